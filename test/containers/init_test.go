package containers

import (
	"encoding/json"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// zombies makes 1,000 orphans of pid 1 that end all at once, and waits until each was
// reaped: a pidfd hangs up only then.
const zombies = `
import os, select, sys, time
r, w = os.pipe()
names, mine = os.pipe()
if os.fork() == 0:
    for i in range(1000):
        pid = os.fork()
        if pid == 0:
            os.close(w); os.close(mine)
            os.read(r, 1)
            os._exit(0)
        os.write(mine, b"%d\n" % pid)
    os._exit(0)
os.wait()
os.close(mine)
pids = [int(line) for line in os.fdopen(names)]
fds = [os.pidfd_open(pid) for pid in pids]
parents = {open("/proc/%d/stat" % pid).read().rsplit(")", 1)[1].split()[1] for pid in pids}
os.close(r); os.close(w)
poll = select.poll()
for fd in fds:
    poll.register(fd, select.POLLHUP)
left, deadline = set(fds), time.monotonic() + 60
while left and time.monotonic() < deadline:
    for fd, events in poll.poll(1000):
        if events & select.POLLHUP:
            poll.unregister(fd)
            left.discard(fd)
print(len(pids), "orphans of", parents, "not reaped:", len(left))
`

// escapee is a process that leaves its session, whose parent ends, and that ignores what
// can be ignored.
const escapee = `
import os, signal
def escape():
    r, w = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(s, signal.SIG_IGN)
            os.write(w, b"%d" % os.getpid())
            os.close(0); os.close(1); os.close(2)
            while True: signal.pause()
        os._exit(0)
    os.wait()
    return int(os.read(r, 20))
`

// confined are the ways to start a container in which less is allowed or other than usual.
var confined = []struct {
	name, who string
	uid       int // in the container
	args      []string
}{
	{"nothing allowed", "rootless", 0, []string{"--cap-drop=all", "--read-only", "--security-opt=no-new-privileges"}},
	{"own user id", "rootless", -1, []string{"--userns=keep-id"}},
	{"user without a name or a home", "root", 4242, []string{"--user=4242:4242", "--read-only", "--cap-drop=all", "--unsetenv=HOME"}},
	{"mapped user ids", "root", 0, []string{"--uidmap=0:300000:65536", "--gidmap=0:300000:65536"}},
}

// The runtime as pid 1 in each of them: it reaps whatever becomes its child, sweeps what
// escapes, and ends in order within the engine's patience.
func TestPID1(t *testing.T) {
	for _, c := range confined {
		t.Run(c.who+"/"+c.name, func(t *testing.T) {
			t.Parallel() // most of it is the time that an escapee has
			p := someone(t, c.who)
			dir := p.workspace(t)
			run := p.run + "/mypr"
			if c.uid > 0 || strings.HasPrefix(c.name, "mapped") {
				// Files and the runtime directory are those of the user in the container.
				owner := c.uid
				if owner == 0 {
					owner = 300000
				}
				run = p.directory(t)
				for _, d := range []string{dir, run} {
					if out, err := exec.Command("chown", "-R", strconv.Itoa(owner)+":"+strconv.Itoa(owner), d).CombinedOutput(); err != nil {
						t.Fatalf("%v\n%s", err, out)
					}
				}
			}
			server := p.container(t, dir, "/workspace", append(append([]string{"-v", run + ":/run/user/mypr", "-e", "XDG_RUNTIME_DIR=/run/user"}, c.args...), image)...)
			inside := p.in(t, server, "/workspace")
			p.answers(t, inside)
			r := inside.status()
			if r.Supervisor.Mode != "container" || r.Supervisor.PID != 1 || r.Supervisor.Tier != 3 {
				t.Errorf("the supervisor: %+v", r.Supervisor)
			}
			if got := inside.ok("exec", "import os; os.getuid()"); c.uid >= 0 && got != strconv.Itoa(c.uid) || c.uid < 0 && got != strconv.Itoa(p.uid) {
				t.Errorf("user id %s", got)
			}
			if out := p.must(t, "podman", "exec", server, "python3", "-c", zombies); !strings.Contains(out, "1000 orphans of {'1'} not reaped: 0") {
				t.Errorf("reaping: %s", out)
			}

			// An escapee of the kernel's dies with a reset.
			escaped := inside.ok("exec", escapee+"escape()")
			inside.ok("reset", "--force")
			if out, err := p.runs("podman", "exec", server, "kill", "-0", escaped); err == nil {
				t.Errorf("process %s lives after the reset: %s", escaped, out)
			}

			// The stop: a cell that runs, one that blocks, and an escapee.
			f := inside.serve()
			f.tool("init", map[string]any{})
			f.executes(escapee+"pid = escape()", "")
			awaits := f.submits("import asyncio; await asyncio.sleep(3600)")
			blocks := f.submits("import time\nprint('blocks', flush=True)\nwhile True:\n  try: time.sleep(3600)\n  except BaseException: pass")
			f.polls(blocks, "blocks")
			began := time.Now()
			p.must(t, "podman", "stop", "--time", "60", server)
			took := time.Since(began)
			t.Logf("podman stop took %v", took.Round(time.Millisecond))
			if took > 20*time.Second { // 3 s and a busy machine
				t.Errorf("podman stop took %v", took)
			}
			if out := p.must(t, "podman", "wait", server); last(out) != "0" {
				t.Errorf("the container ended with %s", out)
			}
			f.end()

			p.must(t, "podman", "start", server)
			p.answers(t, inside)
			g := inside.serve()
			g.tool("init", map[string]any{})
			for _, id := range []string{awaits, blocks} {
				a := g.tool("poll", map[string]any{"exec_id": id, "wait_ms": 0})
				var state struct{ State string }
				if err := json.Unmarshal(a.Meta["mypr/result"], &state); err != nil || state.State != "lost" && state.State != "cancelled" {
					t.Errorf("a cell that ran when the container was stopped: %s", a.text())
				}
			}
			g.executes("6 * 7", "42")
			g.end()
			_, _ = inside.run("stop", "--force") // dies with the container that it stops
			if out := p.must(t, "podman", "wait", server); last(out) != "0" {
				t.Errorf("after mypr-mcp stop the container ended with %s", out)
			}
		})
	}
}

// What an engine may send instead of SIGTERM.
func TestStopSignal(t *testing.T) {
	p := someone(t, "rootless")
	dir := p.workspace(t)
	server := p.container(t, dir, dir, "--stop-signal=SIGRTMIN+3", image)
	inside := p.in(t, server, dir)
	p.answers(t, inside)
	p.must(t, "podman", "stop", "--time", "60", server)
	if out := p.must(t, "podman", "wait", server); last(out) != "0" {
		t.Errorf("the container ended with %s", out)
	}
}
