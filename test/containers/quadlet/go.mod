// The program that makes services of container files ("quadlet", part of podman since
// 4.4, the version taken here), for the tests on systems whose podman is older.
module quadlet

go 1.26

tool github.com/containers/podman/v4/cmd/quadlet

require (
	github.com/containers/podman/v4 v4.4.4 // indirect
	github.com/containers/storage v1.45.3 // indirect
)
