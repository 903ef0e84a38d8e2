package workspace

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
)

func TestContainer(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	mount := func(path string) string {
		return "36 35 0:40 " + path + " /etc/hostname rw - ext4 /dev/sda rw\n"
	}
	for _, c := range []struct {
		name, variable string
		files          map[string]string
		want           string
	}{
		{"a machine", "", map[string]string{"proc/self/mountinfo": "36 35 0:40 / / rw - ext4 /dev/sda rw\n"}, ""},
		{"docker", "", map[string]string{".dockerenv": "", "proc/self/mountinfo": mount("/var/lib/docker/containers/" + id + "/hostname")}, "docker container box (0123456789ab)"},
		{"docker, with an id for its host name", "", map[string]string{".dockerenv": ""}, "docker container box"},
		{"podman", "oci", map[string]string{"run/.containerenv": "", "proc/self/mountinfo": mount("/home/u/overlay-containers/" + id + "/userdata/hostname")}, "podman container box (0123456789ab)"},
		{"podman with privileges", "podman", map[string]string{"run/.containerenv": "engine=\"podman-5\"\nname=\"web\"\nid=\"" + id + "\"\n"}, "podman container web (0123456789ab)"},
		{"nspawn", "systemd-nspawn", nil, "systemd-nspawn container box"},
	} {
		root := t.TempDir()
		for name, text := range c.files {
			path := filepath.Join(root, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		t.Setenv("container", c.variable)
		if got := container(root, "box"); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestPlaceText(t *testing.T) {
	for _, c := range []struct {
		place Place
		want  string
	}{
		{Place{PIDNamespace: Here().PIDNamespace}, "here"},
		{Place{PIDNamespace: "1", Host: "elsewhere", Container: "podman container web (0123)"}, "podman container web (0123), host name elsewhere"},
		{Place{PIDNamespace: "1", Host: "web", Container: "docker container web"}, "docker container web"},
		{Place{PIDNamespace: initialPIDNamespace + "0", Host: Here().Host}, "another pid namespace (" + initialPIDNamespace + "0)"},
	} {
		if got := c.place.String(); !strings.HasPrefix(got, c.want) {
			t.Errorf("%+v: %q, want %q", c.place, got, c.want)
		}
	}
}

// Whoever keeps the directory open is its runtime, whatever .mypr says.
func TestDiscoverPinned(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	pin, err := w.Pin()
	if err != nil {
		t.Fatal(err)
	}
	defer pin.Close()
	serve(t, w.Control, infoServer(control.Info{Instance: "i", Labels: map[string]string{LabelWorkspace: w.Dir, LabelWorkspaceID: w.ID, LabelPinned: w.ID}}, func() {}))
	if l, err := w.Discover(t.Context()); err != nil || l.Instance != "i" {
		t.Errorf("%+v, %v", l, err)
	}
	if err := errors.Join(os.Rename(w.Dir, w.Dir+"-moved"), os.Mkdir(w.Dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(w.Dir + "-moved")
	if _, err := w.Pin(); rpc.CodeOf(err) != api.CodeWorkspaceMoved {
		t.Errorf("another directory is pinned: %v", err)
	}
	var none *NotRunning
	if _, err := open(t, w.Dir).Discover(t.Context()); !errors.As(err, &none) {
		t.Errorf("a new directory of the same name: %v", err)
	}
}

// The session of a container is the container's until it is given up.
func TestOwner(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	if err := w.RecordSupervisor(t.Context(), "i", "v", api.Origin{Source: SourceContainer}); err != nil {
		t.Fatal(err)
	}
	var none *NotRunning
	if _, err := w.Discover(t.Context()); !errors.As(err, &none) || none.Owner != "" {
		t.Errorf("in the container itself: %v", err)
	}
	if err := w.UpdateRuntime(t.Context(), func(r *Runtime) {
		r.Supervisor.Place = Place{PIDNamespace: "1", Container: "podman container web"}
	}); err != nil {
		t.Fatal(err)
	}
	for _, f := range []func() (*Location, error){
		func() (*Location, error) { return w.Discover(t.Context()) },
		func() (*Location, error) { return w.Ensure(t.Context(), StartOptions{Executable: os.Args[0]}) },
		func() (*Location, error) { return w.Start(t.Context(), StartOptions{Executable: os.Args[0]}) },
	} {
		l, err := f()
		if !errors.As(err, &none) || none.Owner != "podman container web" {
			t.Fatalf("%+v, %v", l, err)
		}
		wantText(t, err, w.Dir, "podman container web")
	}
	if owner, err := w.GiveUp(t.Context()); err != nil || owner != "podman container web" {
		t.Errorf("%q, %v", owner, err)
	}
	l, err := w.Ensure(t.Context(), StartOptions{Executable: os.Args[0]})
	if err != nil {
		t.Fatal(err)
	}
	stop(t, w, l)
}

// Who cannot reach a runtime is told what to mount where.
func TestUnreachableHints(t *testing.T) {
	for name, c := range map[string]struct {
		e    Unreachable
		want []string
	}{
		"holder on the host":    {Unreachable{Holder: &Holder{PID: 7, Place: Place{PIDNamespace: "1"}}}, []string{"start this container", "-v /theirs:/theirs"}},
		"holder in a container": {Unreachable{Holder: &Holder{PID: 1, Place: Place{PIDNamespace: "1", Container: "podman container web"}}}, []string{"start podman container web", "-v /ours:/theirs"}},
		"holder not known":      {Unreachable{}, []string{"-v /theirs:/theirs"}},
		"holder here":           {Unreachable{Holder: &Holder{PID: 7, Place: Here()}}, []string{"-v /theirs:/theirs", "kill 7"}},
		"a mount":               {Unreachable{Mount: "it is a mount of a file"}, []string{"the directory mounted, not a socket in it", "-v /theirs:/theirs"}},
		"hangs":                 {Unreachable{Silent: &Silent{Control: "/c", PID: 7}}, []string{"stop --force"}},
	} {
		c.e.Ours, c.e.Share = "/ours", "/theirs"
		e := rpc.AsError(&c.e)
		for _, want := range c.want {
			if !strings.Contains(e.Hint, want) {
				t.Errorf("%s: hint %q lacks %q", name, e.Hint, want)
			}
		}
		if c.e.Mount != "" && !strings.Contains(e.Message, c.e.Mount) {
			t.Errorf("%s: %q", name, e.Message)
		}
	}
}
