package process

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	HelperMain()
	if HasAnchor() {
		anchoredMain()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func waitEnd(t *testing.T, p *Process) {
	t.Helper()
	if ok, err := pollOne(p.PIDFD(), unix.POLLIN, 60e9); !ok || err != nil {
		t.Fatalf("pid %d did not end: %v", p.PID, err)
	}
}

func TestStartAndCollect(t *testing.T) {
	for _, c := range []struct {
		script string
		want   Exit
	}{
		{"exit 3", Exit{Known: true, Code: 3}},
		{"kill -USR1 $$", Exit{Known: true, Signal: int(syscall.SIGUSR1)}},
	} {
		p, status, err := Start(&Command{Path: "/bin/sh", Args: []string{"sh", "-c", c.script}, CgroupFD: -1})
		if err != nil || status != nil {
			t.Fatal(status, err)
		}
		waitEnd(t, p)
		e, progress := p.Collect()
		if progress != Ended || e.Code != c.want.Code || e.Signal != c.want.Signal || !e.Known {
			t.Errorf("%s: %+v %v", c.script, e, progress)
		}
		if err := p.Signal(syscall.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("signal after the end: %v", err)
		}
		p.Close()
	}
}

func TestHelperReportsItsSteps(t *testing.T) {
	start := func(c *Command) error {
		c.CgroupFD = -1
		p, status, err := Start(c)
		if err != nil {
			t.Fatal(err)
		}
		err = ReadStatus(status)
		_ = p.Signal(syscall.SIGKILL)
		waitEnd(t, p)
		p.Collect()
		p.Close()
		return err
	}
	umask := uint32(0o77)
	err := start(&Command{Path: "/no/such", Args: []string{"x"}, Setup: Setup{UMask: &umask}})
	if !errors.Is(err, syscall.ENOENT) || !strings.Contains(err.Error(), "/no/such") {
		t.Errorf("%v", err)
	}
	err = start(&Command{Path: "/bin/true", Args: []string{"true"}, Setup: Setup{Rlimits: []Rlimit{{Resource: 99}}}})
	if !errors.Is(err, syscall.EINVAL) {
		t.Errorf("%v", err)
	}
	if err = start(&Command{Path: "/bin/sleep", Args: []string{"sleep", "1000"}, Setup: Setup{UMask: &umask}}); err != nil {
		t.Errorf("%v", err)
	}
}

func TestAdoptRefusesAnotherStartTime(t *testing.T) {
	c := exec.Command("sleep", "1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	}()
	start, err := StartTime(c.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	p, err := Adopt(c.Process.Pid, start)
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	if _, err := Adopt(c.Process.Pid, start+1); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("%v", err)
	}
}

// The kernel remembers the exit of a process that somebody else reaped (Linux 6.15).
func TestForeignExit(t *testing.T) {
	if !hasExitInfo() {
		t.Log("this kernel has no PIDFD_GET_INFO: the exit must be unknown")
	}
	c := exec.Command("sh", "-c", "exit 9")
	c.Stdin, _ = os.Open("/dev/null")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(c.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	p := &Process{PID: c.Process.Pid, fd: fd}
	defer p.Close()
	_ = c.Wait() // reaped: Collect cannot
	e, progress := p.Collect()
	if progress != Ended || e.Known != hasExitInfo() || e.Known && e.Code != 9 {
		t.Errorf("%+v %v", e, progress)
	}
}

func TestDescendants(t *testing.T) {
	c := exec.Command("sh", "-c", "sleep 1000 & echo $!; exec sleep 1000")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 20)
	n, _ := out.Read(buf)
	pids, err := Descendants(c.Process.Pid)
	if err != nil || len(pids) != 1 || strings.TrimSpace(string(buf[:n])) == "" || !IsDescendant(pids[0], os.Getpid()) || IsDescendant(os.Getpid(), pids[0]) {
		t.Errorf("%v %v", pids, err)
	}
	for _, pid := range append(pids, c.Process.Pid) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	_ = c.Wait()
}

func TestKillInvocation(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 2)
	mine, other := exec.Command("sleep", "1000"), exec.Command("sleep", "1000")
	mine.Env, other.Env = []string{"A=1", "INVOCATION_ID=" + id}, []string{"X_INVOCATION_ID=" + id, "INVOCATION_ID=" + id + "0"}
	for _, c := range []*exec.Cmd{mine, other} {
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
	}
	KillInvocation(id)
	if err := mine.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("%v", err)
	}
	if err := other.Process.Signal(syscall.Signal(0)); err != nil {
		t.Error("it killed another's")
	}
	KillInvocation("") // no id names nobody
	_ = other.Process.Kill()
	_ = other.Wait()
}
