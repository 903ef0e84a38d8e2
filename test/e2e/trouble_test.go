package e2e

import (
	"bufio"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mypr/supervisor/control"
)

// Nobody waits for a manager that its start limit ended: every command says at once what
// happened and what to do.
func TestManagerGivenUp(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	f.must("1")
	pid, events := s.unitPID("manager.service"), s.unitEvents("manager.service")
	dropIn := filepath.Join(s.dir, ".mypr", "units", "manager.service.d")
	if err := os.MkdirAll(dropIn, 0o700); err != nil {
		t.Fatal(err)
	}
	s.write(".mypr/units/manager.service.d/broken.conf", "[Unit]\nStartLimitBurst=2\n[Service]\nExecStart=\nExecStart=/bin/false\n")
	s.ok("units", "reload")
	s.kill(pid)
	s.await(events, control.Failed)
	said := func(who, text string) {
		t.Helper()
		if !strings.Contains(text, "the manager was given up") || !strings.Contains(text, "units start manager") {
			t.Errorf("%s: %s", who, text)
		}
	}
	if r := f.tool("execute", map[string]any{"code": "1"}); !r.IsError {
		t.Error("a cell ran")
	} else {
		said("execute", r.Text)
	}
	for _, args := range [][]string{{"exec", "1"}, {"reset"}} {
		if out, code := s.cli(args...); code != 1 {
			t.Errorf("%q: exit status %d, %s", args, code, out)
		} else {
			said(args[0], out)
		}
	}
	if err := os.RemoveAll(dropIn); err != nil {
		t.Fatal(err)
	}
	s.ok("units", "reload")
	s.ok("units", "start", "manager")
	if got := f.must("2"); got != "2" {
		t.Errorf("after it was started: %s", got)
	}
}

// A manager that was stopped and did not end well is not given up: whoever waits has it
// started again.
func TestManagerThatEndsBadly(t *testing.T) {
	s := newSession(t)
	dropIn := filepath.Join(s.dir, ".mypr", "units", "manager.service.d")
	if err := os.MkdirAll(dropIn, 0o700); err != nil {
		t.Fatal(err)
	}
	s.write(".mypr/units/manager.service.d/bad.conf", "[Service]\nExecStopPost=/bin/sh -c 'sleep 0.7; exit 1'\n")
	s.ok("exec", "1")
	before, events := s.unitPID("manager.service"), s.unitEvents("manager.service")
	stopped := make(chan string, 1)
	go func() {
		out, _ := s.cli("units", "stop", "manager")
		stopped <- out
	}()
	for end, e := time.After(patience), (control.UnitEvent{}); e.SubState != "stop-post"; { // nothing of it can answer then
		select {
		case e = <-events:
		case <-end:
			t.Fatal("it does not end")
		}
	}
	if out, code := s.cli("logs"); code != 0 { // needs no kernel, which goes with a manager that fails
		t.Errorf("logs, while it ended: exit status %d, %s", code, out)
	}
	if out := <-stopped; !strings.Contains(out, `"failed"`) {
		t.Errorf("units stop: %s", out)
	}
	if s.unitPID("manager.service") == before {
		t.Error("it is the same manager")
	}
}

// A manager that is frozen, or stopped by a signal, is named to who waits for it.
func TestSuspendedManager(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "1")
	s.ok("freeze", "manager")
	for _, verb := range []string{"reset", "restart", "logs"} {
		if out, code := s.cli(verb); code != 1 || !strings.Contains(out, "frozen") || !strings.Contains(out, "mypr-mcp thaw manager") {
			t.Errorf("%s: exit status %d, %s", verb, code, out)
		}
	}
	s.ok("thaw", "manager")

	pid := s.unitPID("manager.service")
	s.suspend(pid)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := s.command(ctx, "reset")
	told, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(told)
	said := ""
	for !strings.Contains(said, "kill -CONT "+strconv.Itoa(pid)) && lines.Scan() { // a busy machine may not tell why at once
		if said = lines.Text(); !strings.Contains(said, "waiting for the reset, ") {
			t.Errorf("reset said %q", said)
		}
	}
	if !strings.Contains(said, "kill -CONT "+strconv.Itoa(pid)) {
		t.Errorf("reset did not say why, at last %q, %v", said, lines.Err())
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() {
		t.Log(lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("reset: %v", err)
	}
}

// A supervisor that is stopped by a signal together with its anchor: stop --force gets both
// going and ends the session in order.
func TestSuspendedSupervisorAndAnchor(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "import subprocess\np = subprocess.Popen(['sleep', '600'])")
	sv := s.status().Supervisor
	if sv == nil {
		t.Fatal("no supervisor")
	}
	s.suspend(s.anchorPID())
	s.suspend(sv.PID)
	if out, code := s.cli("stop", "--force"); code != 0 || !strings.Contains(out, "was killed") {
		t.Errorf("exit status %d\n%s", code, out)
	}
	s.nothingLeft(sv.Cgroup)
}

// anchorPID is the process of the anchor.
func (s *session) anchorPID() int {
	s.t.Helper()
	for _, pid := range s.processes(s.mark) {
		if line, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline")); strings.HasPrefix(string(line), "mypr-anchor\x00") {
			return pid
		}
	}
	s.t.Fatal("no anchor")
	return 0
}

// What runs on when supervisor, anchor and manager are killed at once is seen by status,
// and ended by stop.
func TestStopEndsOrphans(t *testing.T) {
	for _, tier := range []string{"2", "3"} {
		t.Run("tier "+tier, func(t *testing.T) {
			s := newSession(t)
			s.env = append(s.env, "MYPR_TIER="+tier)
			s.ok("exec", "import subprocess\np = subprocess.Popen(['sleep', '600'])")
			sv := s.status().Supervisor
			all := []int{s.anchorPID(), s.unitPID("manager.service"), sv.PID}
			for _, pid := range all { // or one would start another again
				s.suspend(pid)
			}
			for _, pid := range all {
				s.kill(pid)
			}
			if r := s.status(); !strings.Contains(r.Problem, "kernel.service") || !strings.Contains(r.Hint, "mypr-mcp stop") {
				t.Errorf("status: problem %q, next %q", r.Problem, r.Hint)
			}
			if out := s.ok("stop"); !strings.Contains(out, "kernel.service") {
				t.Errorf("stop: %s", out)
			}
			s.nothingLeft(sv.Cgroup)
		})
	}
}

// Several people stop a session at the same time: whoever comes too late is not told that
// it is alive and out of reach.
func TestStopTwice(t *testing.T) {
	s := newSession(t)
	for range 3 {
		s.ok("exec", "1")
		var stops sync.WaitGroup
		for range 4 {
			stops.Go(func() {
				if out, code := s.cli("stop"); code != 0 && !strings.Contains(out, "is being stopped") {
					t.Errorf("exit status %d\n%s", code, out)
				}
			})
		}
		stops.Wait()
	}
}
