package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"mypr/internal/api"
)

// status says what is, not what was last heard: a kernel that was stopped or frozen is
// not ready, and the way out is named.
func TestStatusOfAKernelThatDoesNotRun(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "1")
	ready := func(when string) {
		t.Helper()
		var r api.StatusReport
		for range 60 { // on a slow machine it may not answer in time
			r = s.status()
			// What it was stopped in the middle of counts as blocking for a moment.
			if r.Healthy && (r.Status.Kernel.State == "ready" || r.Status.Kernel.State == "blocked") {
				return
			}
		}
		t.Errorf("%s: %+v %s", when, r.Status, r.Problem)
	}
	silent := func(next string) {
		t.Helper()
		var r api.StatusReport
		for range 60 { // on a slow machine the signal may take longer than status waits
			r = s.status()
			if !r.Healthy && r.Status != nil && r.Status.Kernel.State == "unresponsive" && strings.Contains(r.Problem, next) {
				return
			}
		}
		t.Errorf("healthy %v, problem %q, status %+v", r.Healthy, r.Problem, r.Status)
	}
	ready("before")
	pid := s.unitPID("kernel.service")
	s.suspend(pid)
	silent("kill -CONT")
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	ready("after it goes on")
	s.ok("freeze", "kernel")
	silent("does not answer within 1s: it is frozen (mypr-mcp thaw kernel)")
	s.ok("thaw", "kernel")
	ready("after it was thawed")
}

// What calls of the Python API cost is in the report, by method.
func TestStatusShowsTheCostOfCalls(t *testing.T) {
	s := newSession(t)
	s.write("f", "text")
	s.ok("exec", "for _ in range(3):\n    await ws.fs.stat('f')\nawait ws.fs.read('f')")
	calls := map[string]api.CallCost{}
	for _, c := range s.status().Status.Calls {
		calls[c.Method] = c
	}
	for method, n := range map[string]int64{"fs.stat": 3, "fs.read": 1} {
		if c := calls[method]; c.Count != n || c.P50MS <= 0 || c.P99MS < c.P50MS || c.MaxMS < c.P99MS {
			t.Errorf("%s: %+v", method, c)
		}
	}
}

// What nothing knows in a file of configuration is no error, and is not kept from its author.
func TestStatusShowsWhatIsIgnored(t *testing.T) {
	s := newSession(t, "[limits]\noutput_bytes = 2048\n[python]\nplain = true\nversion = \"3.13\"\n")
	if err := os.MkdirAll(filepath.Join(s.dir, ".mypr/units/kernel.service.d"), 0o700); err != nil {
		t.Fatal(err)
	}
	s.write(".mypr/units/kernel.service.d/a.conf", "[Service]\nMemoyMax=4G\n")
	// What is set holds, and no text has another limit.
	if out, code := s.cli("exec", "print('x' * 4000)"); code != 0 || strings.Count(out, "x") > 2100 || !strings.Contains(out, "output over the limit was dropped") {
		t.Errorf("exit %d, %q", code, out)
	}
	check := func(want ...string) {
		t.Helper()
		got := s.status().Status.Warnings
		if len(got) != len(want) {
			t.Fatalf("%q, want %q", got, want)
		}
		for i, text := range want {
			if !strings.Contains(got[i], text) {
				t.Errorf("%q, want %q", got[i], text)
			}
		}
	}
	check("config.toml:5:1: unknown key python.version, ignored", "a.conf:2: unknown key MemoyMax=")
	s.write(".mypr/config.toml", "[python]\nplain = true\n")
	s.ok("reset")
	s.ok("exec", "1")
	check("a.conf:2: unknown key MemoyMax=")
}

// Without a runtime status says what a start would fail at, and starts nothing.
func TestStatusNamesTheObstacle(t *testing.T) {
	s := newSession(t, "[limits]\ncompleted_tasks = 0\n")
	check := func(problem, hint string) {
		t.Helper()
		r := s.status()
		if !strings.Contains(r.Problem, "no runtime runs for "+s.dir) || !strings.Contains(r.Problem, problem) || !strings.Contains(r.Hint, hint) {
			t.Errorf("problem %q, next %q", r.Problem, r.Hint)
		}
		// What it says is what happens.
		if out, code := s.cli("exec", "1"); code != 1 || !strings.Contains(out, problem) {
			t.Errorf("exec: exit %d\n%s", code, out)
		}
	}
	check("config.toml:2:1: limits.completed_tasks: 0 is not between", "correct the file")
	s.write(".mypr/config.toml", "")
	if err := os.MkdirAll(filepath.Join(s.dir, ".mypr/units/kernel.service.d"), 0o700); err != nil {
		t.Fatal(err)
	}
	s.write(".mypr/units/kernel.service.d/x.conf", "garbage\n")
	check("x.conf:1: ", "correct the file")
	s.write(".mypr/units/kernel.service.d/x.conf", "")
	if r := s.status(); strings.Contains(r.Problem, "none can be started") || !strings.Contains(r.Hint, "mypr-mcp exec") {
		t.Errorf("problem %q, next %q", r.Problem, r.Hint)
	}
}
