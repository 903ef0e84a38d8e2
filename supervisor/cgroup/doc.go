// Package cgroup owns the subtree of the cgroup v2 hierarchy that a supervisor makes
// for itself: one group per run of a unit, with its limits, its kill, its freezer and
// its counters.
//
// It never writes to a group that it did not make, but for one case: it enables
// controllers in a group that was handed to the supervisor alone (a container's own
// root, a systemd unit with Delegate=yes). Which units exist and when they are killed
// is the supervisor's business.
//
//	<parent>/<name>/                 the Tree
//	<parent>/<name>/<unit>-<invocation>/   a Group: one run
//	<parent>/<name>/supervisor/      leaf for the supervisor itself, where the kernel
//	                                 demands one (controllers are only enabled in
//	                                 groups without processes of their own)
package cgroup
