package supervisor_test

import (
	"bufio"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

func socketUnit(name, path string) *spec.Unit {
	return &spec.Unit{Name: name, WantedBy: []string{"default.target"}, Socket: &spec.Socket{ListenStream: []string{path}}}
}

// ask connects and reads the line that the "serve" role answers with: pid and names.
func (e *env) ask(network, addr string) (pid, names string) {
	e.t.Helper()
	c, err := net.DialTimeout(network, addr, deadline)
	e.must(err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(deadline))
	l, err := bufio.NewReader(c).ReadString('\n')
	e.must(err)
	pid, names, _ = strings.Cut(strings.TrimSpace(l), " ")
	return pid, names
}

func TestSocketActivation(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		svc := role("a.service", "serve")
		sock := socketUnit("a.socket", "")
		e, opt := options(t, tier, svc, sock)
		path := filepath.Join(e.dir, "sub", "a.sock")
		sock.Socket.ListenStream = []string{path}
		e.run(opt)
		if st := e.status("a.service"); st.ActiveState != "inactive" {
			t.Fatalf("started without a connection: %+v", st)
		}
		if st := e.status("a.socket"); st.SubState != "listening" {
			t.Fatalf("%+v", st)
		}
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("socket file: %v %v", fi.Mode(), err)
		}
		if fi, err := os.Stat(filepath.Dir(path)); err != nil || fi.Mode().Perm() != 0o700 {
			t.Errorf("its directory: %v %v", fi.Mode(), err)
		}
		first, names := e.ask("unix", path)
		if names != "a.socket" {
			t.Errorf("LISTEN_FDNAMES=%s", names)
		}
		e.untilState("a.socket", "running")
		// The socket is the supervisor's: it is there while the service is down, and the
		// next connection starts it again.
		if r, err := e.c.Stop(e.ctx, control.JobParams{Name: "a.service"}); err != nil || r.Result != "done" {
			t.Fatalf("%+v %v", r, err)
		}
		e.untilState("a.socket", "listening")
		if second, _ := e.ask("unix", path); second == first {
			t.Error("the same process answered after a stop")
		}
	})
}

func TestSocketsAreHeldOverRestart(t *testing.T) {
	svc := role("a.service", "serve")
	svc.Service.Type = spec.TypeNotify
	svc.Service.Sockets = []string{"b.socket"}
	svc.Service.Restart, svc.Service.RestartSec = spec.RestartAlways, 50*time.Millisecond
	svc.WantedBy = []string{"default.target"}
	one, two := socketUnit("a.socket", ""), socketUnit("b.socket", "127.0.0.1:0")
	two.WantedBy = nil
	two.Socket.FileDescriptorName, two.Socket.PassOnly = "tcp", true
	e, opt := options(t, 2, svc, one, two)
	path := filepath.Join(e.dir, "a.sock")
	one.Socket.ListenStream = []string{path}
	e.run(opt)
	first, names := e.ask("unix", path)
	if names != "tcp:a.socket" {
		t.Errorf("names %q", names)
	}
	st := e.status("a.service")
	e.must(syscall.Kill(st.MainPID, syscall.SIGKILL))
	if second, _ := e.ask("unix", path); second == first { // waits in the backlog until the restart
		t.Error("the killed process answered")
	}
}

func TestSocketFiles(t *testing.T) {
	live, stale, plain := socketUnit("live.socket", ""), socketUnit("stale.socket", ""), socketUnit("plain.socket", "")
	e, opt := options(t, 2, live, stale, plain)
	for _, u := range []*spec.Unit{live, stale, plain} {
		u.Socket.ListenStream = []string{filepath.Join(e.dir, u.Name)}
	}
	other, err := net.Listen("unix", live.Socket.ListenStream[0])
	e.must(err)
	defer other.Close()
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale.Socket.ListenStream[0], Net: "unix"})
	e.must(err)
	dead.SetUnlinkOnClose(false)
	dead.Close()
	e.must(os.WriteFile(plain.Socket.ListenStream[0], []byte("precious"), 0o600))
	e.run(opt)
	if st := e.status("live.socket"); st.ActiveState != "failed" || !strings.Contains(st.Error, "listens there already") {
		t.Errorf("over a live socket: %+v", st)
	}
	if c, err := net.Dial("unix", live.Socket.ListenStream[0]); err != nil {
		t.Errorf("the live socket was taken away: %v", err)
	} else {
		c.Close()
	}
	if st := e.status("stale.socket"); st.SubState != "listening" {
		t.Errorf("over a stale socket: %+v", st)
	}
	if st := e.status("plain.socket"); st.ActiveState != "failed" || !strings.Contains(st.Error, "is no socket") {
		t.Errorf("over a file: %+v", st)
	}
	if b, _ := os.ReadFile(plain.Socket.ListenStream[0]); string(b) != "precious" {
		t.Error("the file was touched")
	}
}

func TestInheritedSocket(t *testing.T) {
	svc, sock := role("a.service", "serve"), socketUnit("a.socket", "/nonexistent/asked/for")
	sock.Socket.FileDescriptorName = "api"
	e, opt := options(t, 2, svc, sock)
	path := filepath.Join(e.dir, "given")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	e.must(err)
	f, err := l.File()
	e.must(err)
	l.SetUnlinkOnClose(false)
	l.Close()
	opt.Inherited = map[string][]*os.File{"api": {f}}
	e.run(opt)
	if _, names := e.ask("unix", path); names != "api" {
		t.Errorf("names %q", names)
	}
}

// A service that ends without accepting must not be started for ever.
func TestTriggerLimit(t *testing.T) {
	svc, sock := shell("a.service", "exit 0"), socketUnit("a.socket", "")
	e, opt := options(t, 2, svc, sock)
	path := filepath.Join(e.dir, "a.sock")
	sock.Socket.ListenStream = []string{path}
	e.run(opt)
	c, err := net.Dial("unix", path)
	e.must(err)
	defer c.Close()
	st := e.until("a.service", "failed", func(st control.UnitStatus) bool { return st.ActiveState == "failed" })
	if st.Result != "start-limit-hit" {
		t.Errorf("%+v", st)
	}
	if st := e.status("a.socket"); st.SubState != "listening" {
		t.Errorf("the socket: %+v", st)
	}
	if r, err := e.c.Start(e.ctx, control.JobParams{Name: "a.service"}); err != nil || r.Result != "done" {
		t.Errorf("a manual start: %+v %v", r, err)
	}
}

func TestRemoveOnStop(t *testing.T) {
	keep, remove := socketUnit("keep.socket", ""), socketUnit("remove.socket", "")
	remove.Socket.RemoveOnStop = true
	e, opt := options(t, 2, keep, remove)
	for _, u := range []*spec.Unit{keep, remove} {
		u.Socket.ListenStream = []string{filepath.Join(e.dir, u.Name)}
	}
	e.run(opt)
	e.stop()
	if _, err := os.Stat(keep.Socket.ListenStream[0]); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(remove.Socket.ListenStream[0]); !errors.Is(err, os.ErrNotExist) {
		t.Error("RemoveOnStop= left the file")
	}
}
