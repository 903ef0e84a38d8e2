package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/supervisor/control"
)

// unitEvents follows one unit until the test ends.
func (s *session) unitEvents(name string) <-chan control.UnitEvent {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	sv, err := control.Dial(ctx, strings.TrimSuffix(s.status().Socket, ".sock")+".ctl")
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { sv.Close() })
	_, events, err := sv.Subscribe(ctx, name)
	if err != nil {
		s.t.Fatal(err)
	}
	return events
}

// await returns when the unit has the state, and how long that took.
func (s *session) await(events <-chan control.UnitEvent, state string) time.Duration {
	s.t.Helper()
	start := time.Now()
	timeout := time.After(patience)
	for {
		select {
		case e, ok := <-events:
			if !ok {
				s.t.Fatal("the subscription ended")
			}
			if e.ActiveState == state {
				return time.Since(start)
			}
		case <-timeout:
			s.t.Fatalf("not %s within %v", state, patience)
		}
	}
}

// Must be seen, 5: a front end that is killed gives its client id back at once.
func TestKilledFrontEndFreesItsClientID(t *testing.T) {
	s := newSession(t)
	a := s.serve()
	a.init("same")
	a.must("x = 'still here'")
	running := a.tool("execute", map[string]any{"code": "import asyncio\nawait asyncio.sleep(1)\nprint('finished')", "wait_ms": 0})
	b := s.serve()
	if r := b.tool("init", map[string]any{"client_id": "same"}); !r.IsError {
		t.Fatal("an id in use was bound twice")
	}
	a.closed = true
	s.kill(a.cmd.Process.Pid)
	start := time.Now()
	for {
		r := b.tool("init", map[string]any{"client_id": "same"})
		if !r.IsError {
			break
		}
		if time.Since(start) > patience {
			t.Fatalf("the id does not become free: %s", r.Text)
		}
	}
	t.Logf("free after %v", time.Since(start).Round(time.Millisecond))
	if got := b.must("x"); got != "'still here'" {
		t.Errorf("memory: %s", got)
	}
	if _, text := b.finish(running); text != "finished\n" {
		t.Errorf("the cell of the dead client printed %q", text)
	}
	<-a.ended
}

// Must be seen, 5: a kernel that dies takes its cells and nothing else with it.
func TestKilledKernel(t *testing.T) {
	s := newSession(t)
	a, b := s.serve(), s.serve()
	a.init("a")
	b.init("b")
	r, _ := a.do("x = 1")
	old := r.Exec.Generation
	b.must("x")
	running := a.tool("execute", map[string]any{"code": "print('partial')\nimport asyncio\nawait asyncio.sleep(600)", "wait_ms": 100})
	for output(running) == "" {
		running = a.tool("poll", map[string]any{"exec_id": running.Exec.ExecID, "cursor": 0, "wait_ms": 5000})
	}
	s.kill(s.unitPID("kernel.service"))
	lost := a.tool("poll", map[string]any{"exec_id": running.Exec.ExecID, "cursor": 0, "wait_ms": 20000})
	for !api.Terminal(lost.Exec.State) {
		lost = a.tool("poll", map[string]any{"exec_id": running.Exec.ExecID, "cursor": 0, "wait_ms": 20000})
	}
	if lost.Exec.State != api.Lost || !lost.IsError || !strings.Contains(lost.Text, "SIGKILL") {
		t.Errorf("the cell of the dead kernel is %s:\n%s", lost.Exec.State, lost.Text)
	}
	if !strings.Contains(output(lost), "partial") {
		t.Errorf("its output is gone: %q", output(lost))
	}
	after, _ := a.do("'x' in globals()")
	if after.Exec.Generation == old || !strings.Contains(output(after), "False") {
		t.Errorf("generation %s after %s, %q", after.Exec.Generation, old, output(after))
	}
	// Each connection is told once.
	for name, f := range map[string]*front{"a": a, "b": b} {
		told := 0
		if name == "a" && (lost.Exec.Notice != nil || after.Exec.Notice != nil) {
			told++
		}
		for range 3 {
			if r, _ := f.do("1"); r.Exec.Notice != nil {
				told++
			}
		}
		if told != 1 {
			t.Errorf("client %s was told %d times", name, told)
		}
	}
}

// Must be seen, 5: a manager that dies is back within a second; front ends reconnect
// by themselves and keep their client id.
func TestKilledManager(t *testing.T) {
	s := newSession(t)
	a := s.serve()
	a.init("a")
	done, _ := a.do("print('before'); 42")
	running := a.tool("execute", map[string]any{"code": "import asyncio\nawait asyncio.sleep(1)\nprint('ended')", "wait_ms": 0})
	pid := s.unitPID("manager.service")
	events := s.unitEvents("manager.service")
	s.kill(pid)
	t.Logf("the manager was back after %v", s.await(events, control.Active).Round(time.Millisecond))
	if got := a.must("'rebound'"); got != "'rebound'" {
		t.Errorf("after the reconnect: %s", got)
	}
	r, text := a.finish(running)
	switch {
	case r.Exec.State == api.Succeeded && text == "ended\n": // the kernel kept it
	case r.Exec.State == api.Lost && r.Exec.Error != nil: // or it was marked
	default:
		t.Errorf("the unfinished cell is %s, output %q", r.Exec.State, text)
	}
	old := a.tool("poll", map[string]any{"exec_id": done.Exec.ExecID, "cursor": 0})
	if !strings.Contains(output(old), "before") || old.Exec.State != api.Succeeded {
		t.Errorf("the finished cell is %s, output %q", old.Exec.State, output(old))
	}
	if s.unitPID("manager.service") == pid {
		t.Error("the manager was not replaced")
	}
}

// Must be seen, 4, in the tier of this machine and in each one below it.
func TestNothingEscapes(t *testing.T) {
	for _, tier := range tiers(t) {
		for _, how := range []string{"reset", "stop"} {
			t.Run(fmt.Sprintf("tier %d, %s", tier, how), func(t *testing.T) {
				s := newSession(t)
				s.env = append(s.env, "MYPR_TIER="+strconv.Itoa(tier))
				mark := s.mark + "-tree"
				f := s.serve()
				f.init("")
				if got := f.must(spawnTree(mark)); !strings.Contains(got, "500 forked") {
					t.Fatalf("the tree is not up: %q", got)
				}
				if info := s.status().Supervisor; info == nil || info.Tier != tier {
					t.Fatalf("tier: %+v", info)
				}
				before := len(s.processes("MYPR_TREE=" + mark))
				if before < 504 {
					t.Fatalf("only %d processes are up", before)
				}
				start := time.Now()
				s.ok(how, "--force")
				if left := s.processes("MYPR_TREE=" + mark); len(left) > 0 {
					t.Errorf("%d of %d processes are left: %v", len(left), before, left[:min(10, len(left))])
				}
				t.Logf("%d processes gone in %v", before, time.Since(start).Round(time.Millisecond))
				if how == "reset" {
					if got := f.must("'procs' in globals()"); got != "False" {
						t.Errorf("memory after the reset: %s", got)
					}
				}
			})
		}
	}
}

// spawnTree is a cell that starts every kind of process that could get away.
func spawnTree(mark string) string {
	return fmt.Sprintf(`
import os, subprocess, sys
def spawn(code, **kw):
    p = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], env=dict(os.environ, MYPR_TREE=%q), stdout=subprocess.PIPE, text=True, **kw)
    return p, p.stdout.readline()
procs = [
    spawn("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"),
    spawn("import signal; print('up', flush=True); signal.pause()", start_new_session=True),
    spawn('''
import os, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print('up', flush=True)
        signal.pause()
    os._exit(0)
os.wait()
'''),
    spawn('''
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
r, w = os.pipe()
for i in range(20):          # 20 children with 24 each: 500
    if os.fork() == 0:
        os.setsid()
        for j in range(24):
            if os.fork() == 0:
                break
        os.write(w, b'.')
        while True: signal.pause()
n = 0
while n < 500: n += len(os.read(r, 500))
print(n, 'forked', flush=True)
while True: signal.pause()
'''),
]
print(procs[-1][1])
`, mark)
}

// tiers are those that this machine has, best first: all below its own can be forced.
func tiers(t *testing.T) []int {
	t.Helper()
	s := newSession(t)
	s.ok("exec", "1")
	best := s.status().Supervisor.Tier
	var all []int
	for n := best; n <= 3; n++ {
		all = append(all, n)
	}
	return all
}

// A stop that is not forced refuses while something runs.
func TestStopAndResetRefuseActiveWork(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	r := f.tool("execute", map[string]any{"code": "import asyncio\nawait asyncio.sleep(600)", "wait_ms": 0})
	for _, verb := range []string{"stop", "reset", "restart"} {
		out, code := s.cli(verb)
		if code != 1 || !strings.Contains(out, "--force") {
			t.Errorf("%s with a running cell: exit %d\n%s", verb, code, out)
		}
	}
	s.ok("interrupt", r.Exec.ExecID)
	f.finish(r)
	s.ok("stop")
	if r := s.status(); r.ManagerAvailable || r.Supervisor != nil {
		t.Error("still there after stop")
	}
	s.ok("stop") // nothing to stop is no error
	if f.must("1 + 1") != "2" {
		t.Error("the next call did not start a new session")
	}
}

// A supervisor that is told to end by a signal ends everything in order.
func TestSupervisorEndsInOrder(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	r, _ := f.do("print('recorded')")
	running := f.tool("execute", map[string]any{"code": "import asyncio\nawait asyncio.sleep(600)", "wait_ms": 0})
	info := s.status().Supervisor
	s.signal(info.PID, unix.SIGTERM)
	s.nothingLeft(info.Cgroup, f.cmd.Process.Pid)
	if p := f.tool("poll", map[string]any{"exec_id": r.Exec.ExecID, "cursor": 0}); output(p) != "recorded\n" {
		t.Errorf("the record of before: %q", output(p))
	}
	if p := f.tool("poll", map[string]any{"exec_id": running.Exec.ExecID, "cursor": 0}); !api.Terminal(p.Exec.State) || p.Exec.State == api.Succeeded {
		t.Errorf("the cell that ran is %s", p.Exec.State)
	}
}

func TestRestartKeepsConnectionsAndRecords(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	first, _ := f.do("x = 7\nprint('kept output')")
	sv, manager, kernel := s.status().Supervisor, s.unitPID("manager.service"), s.unitPID("kernel.service")
	out := s.ok("restart")
	if !strings.Contains(out, `"state": "succeeded"`) {
		t.Errorf("restart: %s", out)
	}
	if got := f.must("'x' in globals()"); got != "False" {
		t.Errorf("memory after a restart: %s", got)
	}
	after := s.status()
	if after.Supervisor.PID != sv.PID || after.Supervisor.Instance != sv.Instance {
		t.Errorf("the supervisor was not replaced in place: %d -> %d", sv.PID, after.Supervisor.PID)
	}
	if s.unitPID("manager.service") == manager || s.unitPID("kernel.service") == kernel {
		t.Error("manager or kernel are the old ones")
	}
	if r := f.tool("poll", map[string]any{"exec_id": first.Exec.ExecID, "cursor": 0}); output(r) != "kept output\n" {
		t.Errorf("record after a restart: %q", output(r))
	}
	if runtime := s.read(".mypr/runtime.json"); !strings.Contains(runtime, sv.Instance) {
		t.Errorf("runtime.json does not record instance %s:\n%s", sv.Instance, runtime)
	}
	lock, err := os.Open(filepath.Join(s.dir, ".mypr", "supervisor.lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != unix.EWOULDBLOCK {
		t.Errorf("the lock of the re-executed supervisor can be taken: %v", err)
	}
	f.must("y = 8")
	kernel = s.unitPID("kernel.service")
	s.ok("restart", "--keep-kernel")
	if s.unitPID("kernel.service") != kernel || f.must("y") != "8" {
		t.Error("--keep-kernel did not keep the kernel")
	}
}
