package units

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"mypr/supervisor/spec"
)

func loader(t *testing.T) *Loader {
	t.Helper()
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	return NewLoader(t.TempDir(), "/usr/bin/mypr-mcp", "/run/user/7/mypr/abc")
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestBuiltinUnits(t *testing.T) {
	l := loader(t)
	names, err := l.Names()
	if want := []string{"kernel.service", "kernel.socket", "manager-lost.target", "manager.service", "runtime.socket"}; err != nil || !slices.Equal(names, want) {
		t.Fatalf("names %q, %v; want %q", names, err, want)
	}
	unit := func(name string) *spec.Unit {
		t.Helper()
		u, warnings, err := l.Load(name)
		if err != nil || len(warnings) > 0 {
			t.Fatalf("%s: %q, %v", name, warnings, err)
		}
		return u
	}
	workspace := l.Specifiers[SpecWorkspace]
	m := unit("manager.service").Service
	if want := []string{"/usr/bin/mypr-mcp", "manager"}; !slices.Equal(m.ExecStart[0].Args, want) {
		t.Errorf("manager runs %q, want %q", m.ExecStart[0].Args, want)
	}
	if m.WorkingDirectory != workspace || m.StandardError != "append:"+workspace+"/.mypr/manager.log" || !slices.Equal(m.Sockets, []string{"runtime.socket", "kernel.socket"}) || m.WatchdogSec != 20*time.Second {
		t.Errorf("manager %+v", m)
	}
	k := unit(Kernel).Service
	if len(k.ExecStart) != 0 || k.Restart != spec.RestartAlways || k.TimeoutStopSec != 2*time.Second {
		t.Errorf("kernel %+v", k)
	}
	if j := unit(JobDefaults); len(j.Service.ExecStart) != 0 || j.Service.ExitType != "cgroup" || j.Service.TimeoutStopSec != 2*time.Second {
		t.Errorf("job %+v", j.Service)
	}
	for name, want := range map[string]spec.Socket{
		"runtime.socket": {ListenStream: []string{"/run/user/7/mypr/abc.sock"}, FileDescriptorName: "runtime"},
		"kernel.socket":  {ListenStream: []string{"/run/user/7/mypr/abc.krn"}, FileDescriptorName: "kernel", PassOnly: true},
	} {
		u := unit(name)
		if s := u.Socket; !slices.Equal(s.ListenStream, want.ListenStream) || s.FileDescriptorName != want.FileDescriptorName || s.PassOnly != want.PassOnly || s.Service != "manager.service" {
			t.Errorf("%s: %+v", name, s)
		}
		if !slices.Equal(u.WantedBy, []string{"default.target"}) {
			t.Errorf("%s is wanted by %q", name, u.WantedBy)
		}
	}
}

func TestUserAndWorkspaceTune(t *testing.T) {
	l := loader(t)
	user, workspace := l.Dirs[0], l.Dirs[1]
	write(t, filepath.Join(user, "kernel.service.d/memory.conf"), "[Service]\nMemoryMax=1G\nNice=1\n")
	write(t, filepath.Join(user, "kernel.service.d/user.conf"), "[Service]\nCPUQuota=50%\n")
	write(t, filepath.Join(workspace, "kernel.service.d/memory.conf"), "[Service]\nMemoryMax=2G\n")
	write(t, filepath.Join(workspace, "extra.service"), "[Service]\nExecStart=/bin/extra %R %r %x\n[Install]\nWantedBy=default.target\n")
	write(t, filepath.Join(workspace, "broken.service"), "[Service]\nExecStart=/a\nNice=much\n")
	u, _, err := l.Load(Kernel)
	if err != nil {
		t.Fatal(err)
	}
	if s := u.Service; s.MemoryMax != 2<<30 || s.Nice != nil || s.CPUQuota != 500_000 || s.Restart != spec.RestartAlways {
		t.Errorf("kernel %+v", s)
	}
	want := []string{"builtin/kernel.service", filepath.Join(workspace, "kernel.service.d/memory.conf"), filepath.Join(user, "kernel.service.d/user.conf")}
	if !slices.Equal(u.Source, want) {
		t.Errorf("read from %q, want %q", u.Source, want)
	}
	u, _, err = l.Load("extra.service")
	if want := []string{"/bin/extra", l.Specifiers[SpecWorkspace], "/run/user/7/mypr/abc", "/usr/bin/mypr-mcp"}; err != nil || !slices.Equal(u.Service.ExecStart[0].Args, want) {
		t.Errorf("extra: %+v, %v", u, err)
	}
	if names, err := l.Names(); err != nil || !slices.Contains(names, "extra.service") || !slices.Contains(names, "broken.service") {
		t.Errorf("names %q, %v", names, err)
	}
	if _, _, err := l.Load("broken.service"); err == nil || !strings.HasPrefix(err.Error(), filepath.Join(workspace, "broken.service")+":3: Nice=: ") {
		t.Errorf("broken: %v", err)
	}
	write(t, filepath.Join(workspace, "runtime.socket"), "")
	if _, _, err := l.Load("runtime.socket"); err == nil || !strings.Contains(err.Error(), "switched off") {
		t.Errorf("a switched-off built-in unit: %v", err)
	}
}

// Reading a unit must cost little beside starting a process (about 1 ms).
func BenchmarkLoadJobDefaults(b *testing.B) {
	l := NewLoader(b.TempDir(), "/x", "/y")
	for b.Loop() {
		if _, _, err := l.Load(JobDefaults); err != nil {
			b.Fatal(err)
		}
	}
}
