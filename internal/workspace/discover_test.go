package workspace

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
)

// serve listens at path until the test ends or the returned function is called.
func serve(t *testing.T, path string, s *rpc.Server) (stop func()) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func supervisorOf(w *Workspace, instance string) *rpc.Server {
	return infoServer(control.Info{Instance: instance, PID: 4711, Labels: map[string]string{LabelWorkspace: w.Dir, LabelWorkspaceID: w.ID}}, func() {})
}

func prepare(t *testing.T, w *Workspace) {
	t.Helper()
	if err := errors.Join(w.EnsureLayout(), w.PrepareRuntimeDir()); err != nil {
		t.Fatal(err)
	}
}

func TestDiscoverNothing(t *testing.T) {
	w := setup(t)
	_, err := w.Discover(t.Context())
	var none *NotRunning
	if !errors.As(err, &none) {
		t.Fatalf("error %v", err)
	}
	wantText(t, err, "no runtime runs for "+w.Dir)
	if rpc.AsError(err).Code != rpc.CodeUnavailable || rpc.AsError(err).Hint == "" {
		t.Errorf("on the wire: %+v", rpc.AsError(err))
	}
	for _, path := range []string{w.Root, w.RuntimeDir} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("looking made %s", path)
		}
	}
}

func TestDiscoverStaleSocket(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: w.Control, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	if err := w.RecordSupervisor(t.Context(), "i", "v", api.Origin{}); err != nil {
		t.Fatal(err)
	}
	_, err = w.Discover(t.Context())
	var none *NotRunning
	if !errors.As(err, &none) {
		t.Errorf("error %v", err)
	}
}

func TestDiscoverFromAnotherEnvironment(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	if err := w.RecordSupervisor(t.Context(), "i", "v", api.Origin{}); err != nil {
		t.Fatal(err)
	}
	serve(t, w.Control, supervisorOf(w, "i"))
	for name, xdg := range map[string]string{"the same": filepath.Dir(w.RuntimeDir), "stripped": "", "another": t.TempDir()} {
		t.Setenv("XDG_RUNTIME_DIR", xdg)
		l, err := open(t, w.Dir).Discover(t.Context())
		if err != nil {
			t.Errorf("%s environment: %v", name, err)
			continue
		}
		if l.Paths != w.Paths || l.Instance != "i" || l.Supervisor == nil || l.Supervisor.PID != 4711 || l.Started {
			t.Errorf("%s environment: %+v", name, l)
		}
	}
}

// A record that leads to a runtime of another directory must not be followed.
func TestDiscoverIgnoresForeignRecord(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	other := open(t, t.TempDir())
	prepare(t, other)
	serve(t, other.Control, supervisorOf(other, "o"))
	if err := other.RecordSupervisor(t.Context(), "o", "v", api.Origin{}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(other.runtimeFile())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.runtimeFile(), b, 0o600); err != nil { // cp -a of the whole workspace does this
		t.Fatal(err)
	}
	_, err = w.Discover(t.Context())
	var none *NotRunning
	if !errors.As(err, &none) {
		t.Errorf("error %v", err)
	}
}

// Nor must one that leads to a runtime which says that it is another directory's.
func TestDiscoverChecksTheAnswer(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	other := open(t, t.TempDir())
	serve(t, other.Control, supervisorOf(other, "i"))
	if err := w.UpdateRuntime(t.Context(), func(r *Runtime) { r.Instance, r.Paths = "i", other.Paths }); err != nil {
		t.Fatal(err)
	}
	_, err := w.Discover(t.Context())
	var s *Stranger
	if !errors.As(err, &s) || s.Workspace != other.Dir {
		t.Errorf("error %v", err)
	}
}

func TestDiscoverStranger(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	serve(t, w.Control, supervisorOf(w, "of a deleted directory"))
	check := func(when string) {
		t.Helper()
		_, err := w.Discover(t.Context())
		var s *Stranger
		if !errors.As(err, &s) || s.Instance != "of a deleted directory" {
			t.Fatalf("%s: error %v", when, err)
		}
		wantText(t, err, w.Dir, "kill 4711")
		if _, err := w.Ensure(t.Context(), StartOptions{Executable: os.Args[0]}); !errors.As(err, &s) {
			t.Errorf("%s: Ensure: %v", when, err)
		}
	}
	check("no record")
	if err := w.RecordSupervisor(t.Context(), "another", "v", api.Origin{}); err != nil {
		t.Fatal(err)
	}
	check("another instance recorded")

	// Somebody deleted runtime.json: whoever holds this directory's lock is its runtime all the same.
	lock, err := w.SupervisorLock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if l, err := w.Discover(t.Context()); err != nil || l.Instance != "of a deleted directory" {
		t.Errorf("with the lock held: %+v, %v", l, err)
	}
}

func TestDiscoverUnreachable(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	if err := w.RecordSupervisor(t.Context(), "i", "v", api.Origin{}); err != nil {
		t.Fatal(err)
	}
	for _, lock := range []string{w.managerLock(), w.supervisorLock()} {
		h := hold(t, lock)
		_, err := w.Discover(t.Context())
		var u *Unreachable
		if !errors.As(err, &u) || u.Lock != lock || u.Share != w.RuntimeDir || u.Holder.PID != h.cmd.Process.Pid {
			t.Fatalf("error %v", err)
		}
		wantText(t, err, lock, w.Control, "no such file")
		if hint := rpc.AsError(err).Hint; !strings.Contains(hint, "-v "+w.RuntimeDir+":"+w.RuntimeDir) {
			t.Errorf("hint %q", hint)
		}
		h.kill()
	}
	// What was tried is named once, also when it is the recorded place.
	if err := os.RemoveAll(w.RuntimeDir); err != nil {
		t.Fatal(err)
	}
	hold(t, w.supervisorLock())
	_, err := w.Discover(t.Context())
	var u *Unreachable
	if !errors.As(err, &u) {
		t.Fatalf("error %v", err)
	}
	seen := map[string]bool{}
	for _, place := range u.Tried {
		if seen[place] {
			t.Errorf("named twice: %q", place)
		}
		seen[place] = true
	}
}

// A session of another user is refused at once, and it is said whose it is.
func TestDiscoverAnothersSession(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	hold(t, w.supervisorLock())
	cat := exec.Command("cat")
	cat.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4321, Gid: 4321}}
	stdin, err := cat.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cat.Start(); err != nil {
		t.Fatalf("this test starts a process of another user, for which it must be root: %v", err)
	}
	defer func() {
		stdin.Close()
		_ = cat.Wait()
	}()
	line, err := json.Marshal(Holder{PID: cat.Process.Pid, Place: readHolder(w.supervisorLock()).Place})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.supervisorLock(), line, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = w.Discover(t.Context())
	var u *Unreachable
	if rpc.CodeOf(err) != rpc.CodePermission || errors.As(err, &u) {
		t.Fatalf("error %v", err)
	}
	wantText(t, err, "user #4321", w.Dir)
	if hint := rpc.AsError(err).Hint; !strings.Contains(hint, "sudo -u '#4321'") {
		t.Errorf("hint %q", hint)
	}
}

// While the supervisor is dead the manager answers for the runtime.
func TestDiscoverByManager(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	if err := w.RecordSupervisor(t.Context(), "i", "v", api.Origin{}); err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int32
	serve(t, w.Socket, &rpc.Server{NewHandler: func(*rpc.Conn) rpc.Handler {
		return rpc.HandlerFunc(func(_ context.Context, r *rpc.Request) (any, error) {
			asked.Add(1)
			if r.Method != api.MethodStatus {
				return nil, rpc.Errorf(rpc.CodeInvalidRequest, "not expected")
			}
			return api.Status{WorkspaceID: w.ID, Instance: "i"}, nil
		})
	}})
	_, err := w.Discover(t.Context())
	var none *NotRunning
	if !errors.As(err, &none) || asked.Load() != 0 {
		t.Errorf("with no manager alive: %v, %d requests to a socket that may be systemd's", err, asked.Load())
	}
	hold(t, w.managerLock())
	l, err := w.Discover(t.Context())
	if err != nil || l.Supervisor != nil || l.Instance != "i" || l.Socket != w.Socket {
		t.Errorf("%+v, %v", l, err)
	}
}

func TestDiscoverDistrustsOthers(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	if err := os.Chown(w.RuntimeDir, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	serve(t, w.Control, supervisorOf(w, "i"))
	_, err := w.Discover(t.Context())
	wantText(t, err, w.RuntimeDir, "belongs to user id 65534")
	if err := trust(rpc.Peer{UID: 65534}, "/s"); err == nil {
		t.Error("a socket of another user is trusted")
	}
}

func TestDiscoverSilentSocket(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: w.Control, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	hold(t, w.supervisorLock())
	begin := time.Now()
	_, err = w.Discover(within(t, 100*time.Millisecond))
	if !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) > 30*time.Second {
		t.Errorf("%v after %v", err, time.Since(begin))
	}
}
