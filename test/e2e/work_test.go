package e2e

import (
	"archive/zip"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/test/jobmatrix"
)

// The examples of the sections on shell and tasks, client-local state and history,
// shared work, messages, skills and modules, packages and inspection: each a cell of
// one session, in their order. What is a placeholder there has a meaning here.
func TestExamplesOfWork(t *testing.T) {
	s := newSession(t)
	if out, err := exec.Command("git", "-C", s.dir, "init", "-q").CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	s.write("Makefile", "all: one two\none two:\n\t@echo made $@\n")
	f := s.serve()
	me := f.init("calm-otter")
	other := s.serve()
	other.init("bright-fox")
	for i, c := range []struct{ code, want string }{
		{`r = await ws.shell.run(["git", "status", "--short"]); r["state"], r["returncode"], "?? Makefile" in r["stdout"].splitlines()`, `('succeeded', 0, True)`},
		{`r = await ws.shell.run("make -j2", timeout=120, check=True); sorted(r["stdout"].splitlines()), r["timed_out"], r["truncated"]`, `(['made one', 'made two'], False, False)`},
		{`(await ws.shell.run(["sort"], input="bravo\nalpha\n"))["stdout"]`, `'alpha\nbravo\n'`},
		{`ws.tasks.get(r["id"]).output().count("made")`, `2`},
		{"try:\n    await ws.shell.run('exit 4', check=True)\nexcept ws.ShellError as e:\n    print(e.result['returncode'], e)", "4 exit 4: it returned 4"},

		{`job = await ws.shell.start("make -j2")`, ``},
		{`await job; job.status()["status"], sorted(job.output().splitlines()), job.result(), await job.cancel()`, `('succeeded', ['made one', 'made two'], {'returncode': 0}, False)`},

		{`ws.local["term"] = await ws.shell.start(
    ["bash", "--noprofile", "--norc", "-i"], pty=True, rows=30, cols=100,
)
await ws.local["term"].read()  # bash is there, and takes Ctrl-C for what it is
await ws.local["term"].write("pwd\n")
await ws.local["term"].resize(40, 120)
await ws.local["term"].write("\x03")  # Ctrl-C
ws.local["term"].status()["status"], ws.local["term"].status()["rows"], ws.local["term"].output() != ""`, `('running', 40, True)`},
		// bash, told to stop, may lose the next character it reads, or keep what was typed
		// before (readline acts on a signal only when its read returns): that is the newline's.
		// And before each prompt readline sets the size that it has just asked for, over a
		// new one: so the size is looked at when it is set at a prompt.
		{`term = ws.local["term"]
await term.write("\n")
await term.write("echo at-$((6*7))\n")
at = (await term.expect("at-42"))["cursor"]
at = (await term.expect("bash-", at))["cursor"]
await term.resize(41, 121)
await term.write("stty size\n")
found = await term.expect("41 121\r\n", at)
found["matched"], "stty size" in ws.local["term"].output()`, `(True, True)`},
		{`await ws.local["term"].cancel(), ws.local["term"].status()["status"]`, `(True, 'cancelled')`},

		{`import os, sys

ws.local["job"] = await ws.shell.start(
    [sys.executable, "-c", "import os; print(os.environ['PYTHONUNBUFFERED'], 'HOME' in os.environ, os.getcwd())"],
    cwd=ws.workspace,
    env={**os.environ, "PYTHONUNBUFFERED": "1"},
)
await ws.local["job"]
ws.local["job"].output() == f"1 True {ws.workspace}\n"`, `True`},

		{`import asyncio

ws.local["job"] = ws.tasks.start(asyncio.sleep(5, result="done"))
try:
    ws.local["job"].result()
except ws.NotReady as e:
    print("NotReady")`, `NotReady`},
		{`ws.local["job"].status()["status"], ws.local["job"].output(), len(ws.tasks.list(client_id=ws.client.id)) > 5, ws.tasks.get(ws.local["job"].id) is ws.local["job"]`, `('running', '', True, True)`},
		{`await ws.local["job"]`, `'done'`},
		{`record = await ws.history.get(ws.local["job"].id); record["kind"], record["state"], record["history_id"] == ws.local["job"].history_id, (await ws.history.get(record["history_id"]))["id"] == record["id"]`, `('python', 'succeeded', True, True)`},
		{`(await ws.tasks.attach(record["history_id"])) is ws.local["job"]`, `True`},

		{`async def do_review(): print("looking"); return 7
ws.client.id
ws.local["review_job"] = ws.tasks.start(do_review())
await ws.local["review_job"], ws.local["review_job"].output(), ws.client.id`, `(7, 'looking\n', 'calm-otter')`},
		{`state = await ws.status()
state["connection_count"], state["client_count"]`, `(2, 2)`},
		{`page = await ws.history.list(client_id=ws.client.id, limit=20); exec_id = page["items"][-1]["id"]; len(page["items"]), page["next_cursor"] is not None`, `(20, True)`},
		{`(await ws.history.get(exec_id))["id"] == exec_id, [e["event"] for e in (await ws.history.logs(client_id=ws.client.id, limit=20))["events"]].count("running") > 0`, `(True, True)`},
		{`ws.local["logs"] = await ws.history.logs(client_id=ws.client.id)`, ``},
		{`ws.local["logs"] = await ws.history.logs(
    client_id=ws.client.id, cursor=ws.local["logs"]["cursor"],
)
any(e["event"] == "succeeded" for e in ws.local["logs"]["events"])`, `True`},

		{`async with ws.locks.acquire("module:review", "file:report", timeout=10):
    await ws.fs.write("report.txt", "Done.\n", overwrite=True)
    print([r["name"] for r in ws.locks.list()])
ws.locks.list()`, "['file:report', 'module:review']\n[]"},

		{`sent = await ws.messages.send("bright-fox", "The review is complete.")
(sent["from"], sent["to"])`, `('calm-otter', 'bright-fox')`},
		{`ws.local["inbox"] = await ws.messages.read()
# Handle the messages before acknowledging them.
await ws.messages.ack([message["id"] for message in ws.local["inbox"]["messages"]])`, `0`},

		{`ws.skills.list()`, `[]`},
		{`skill = await ws.skills.write(
    "review",
    "---\nname: review\ndescription: Review workspace changes.\n---\n\n"
    "Read the diff, check affected callers, and report concrete issues.\n",
)
len(skill["revision"]), (await ws.skills.validate("review"))["valid"]`, `(64, True)`},
		{`ws.skills.list()[0]["description"], ws.skills.read("review").splitlines()[-1][:13]`, `('Review workspace changes.', 'Read the diff')`},
		{`await ws.modules.write("helpers", "def answer(value):\n    return value * 2\n")
print((await ws.modules.check("helpers", test_code="assert answer(2) == 4"))["ok"], (await ws.modules.check("helpers", test_code="assert answer(2) == 5"))["ok"])
helpers = ws.modules.load("helpers")
print(helpers.answer(2))
await ws.modules.write(
    "helpers", "def answer(value):\n    return value * 3\n",
    expected_hash=(await ws.modules.read("helpers"))["revision"],
)
helpers = ws.modules.reload("helpers")
helpers.answer(2), __import__("ws_lib.helpers").helpers is helpers`, "True False\n4\n(6, True)"},

		{`i = ws.inspect(); i["workspace"] == str(ws.workspace), i["variables"]["helpers"], [s["name"] for s in i["skills"]]`, `(True, 'module', ['review'])`},
		{`status = await ws.status(); status["healthy"], status["generation"] == i["generation"], len(status["active"])`, `(True, True, 1)`},
		{`"await ws.shell.run(command, *, cwd=None" in ws.help("shell.run"), "ws.tasks" in ws.help()`, `(True, True)`},
	} {
		if got := f.must(c.code); got != c.want {
			t.Errorf("example %d:\n%s\ngot  %s\nwant %s", i, c.code, got, c.want)
		}
	}
	r := other.tool("execute", map[string]any{"code": "1", "wait_ms": 30000})
	if n := r.Exec.Inbox; n == nil || n.Unacked != 1 || n.Messages[0].From != me || n.Messages[0].Text != "The review is complete." {
		t.Errorf("inbox %+v", r.Exec.Inbox)
	}
	if got := other.must(`m = (await ws.messages.read(wait_ms=1000))["messages"][0]; a = await ws.messages.reply(m["id"], "thanks"); await ws.messages.ack([m["id"]]), a["reply_to"] == m["id"]`); got != "(1, True)" {
		t.Error(got)
	}
	if got := f.must(`page = await ws.messages.read(wait_ms=5000, sender="bright-fox"); page["messages"][0]["text"], page["has_more"]`); got != "('thanks', False)" {
		t.Error(got)
	}
}

// Must be seen, 2: every way to feed a job, every way it can end, in the containment
// that this machine has and in the fallback; and nothing of it is left. test/faults does
// the same on a kernel with cgroup controllers.
func TestJobMatrix(t *testing.T) {
	for _, tier := range []string{"", "3"} {
		t.Run("tier "+tier, func(t *testing.T) {
			s := newSession(t)
			if tier != "" {
				s.env = append(s.env, "MYPR_TIER="+tier)
			}
			f := s.serve()
			f.init("")
			f.must(jobmatrix.Code)
			if got := f.must(`print(*await matrix(), sep="\n")`); got != "" {
				t.Error(got)
			}
			for _, u := range s.status().Units {
				if strings.HasPrefix(u.Name, "job-") {
					t.Errorf("unit left: %s %s", u.Name, u.ActiveState)
				}
			}
		})
	}
}

// Must be seen, 3: one terminal, driven by two clients.
func TestTerminalOfTwoClients(t *testing.T) {
	s := newSession(t)
	a, b := s.serve(), s.serve()
	a.init("a")
	b.init("b")
	a.must(`term = await ws.shell.start(["bash", "--noprofile", "--norc", "-i"], pty=True, env={"PATH": "/usr/bin:/bin", "PS1": "> ", "TERM": "dumb"})
at = (await term.expect("> "))["cursor"]
await term.write("X=41\n"); at = (await term.expect("> ", at))["cursor"]`)
	if got := b.must(`await term.write("echo $((X+1))\n"); m = await term.expect(r"\n(\d+)\r", at, regex=True); m["groups"]`); got != "['42']" {
		t.Error(got)
	}
	// Said by the process itself: it has the terminal then, and Ctrl-C is its.
	b.must(`await term.write("sh -c 'echo a-$((1+1)); exec sleep 1000'\n")`)
	if got := a.must(`c = await term.expect("\na-2"); await term.write("\x03"); c = await term.expect("^C", c["cursor"]); c = await term.expect("> ", c["cursor"])
await term.write("echo after=$?\n"); m = await term.expect(r"after=(\d+)\r", c["cursor"], regex=True); at = (await term.expect("> ", m["cursor"]))["cursor"]; m["groups"]`); got != "['130']" {
		t.Error(got)
	}
	// At its prompt: before that readline asks for the size and sets what it was told, over
	// whatever it has become meanwhile.
	if got := b.must(`await term.resize(33, 77); await term.write("stty size\n"); (await term.expect("33 77", at))["matched"]`); got != "True" {
		t.Error(got)
	}
	if got := a.must(`await term.write("exit 5\n"); s = await term.expect("no such text"); s["reason"], term.status()["returncode"]`); got != "('eof', 5)" {
		t.Error(got)
	}
	// A Python of its own, and an editor.
	if got := b.must(`import sys
py = await ws.shell.start([sys.executable, "-i", "-q"], pty=True)
at = (await py.expect(">>> "))["cursor"]
await py.write("6*7\n"); m = await py.expect("42", at); await py.expect(">>> ", m["cursor"])
await py.write(eof=True)
try: await py
except ws.RPCError: pass
m["matched"], py.status()["returncode"]`); got != "(True, 0)" {
		t.Error(got)
	}
	if got := b.must(`vim = await ws.shell.start(["vim", "-u", "NONE", "note.txt"], pty=True, env={"TERM": "xterm", "PATH": "/usr/bin:/bin"})
at = (await vim.expect("note.txt"))["cursor"]  # of its status line: it is there
await vim.write("ihello"); at = (await vim.expect("hello", at))["cursor"]
await vim.write("\x1b"); await vim.resize(20, 60); await vim.write(":wq\r")
await vim
open(ws.workspace / "note.txt").read(), vim.status()["returncode"]`); got != `('hello\n', 0)` {
		t.Error(got)
	}
}

// What is typed reaches a program whole and in order, before and after a Ctrl-C; what the
// terminal throws away with it (a line that is not ended) is all that is lost. The program
// says what it gets, so that this does not depend on how a shell takes a signal.
func TestTerminalInput(t *testing.T) {
	s := newSession(t)
	a, b := s.serve(), s.serve()
	a.init("a")
	b.init("b")
	a.must(`import sys
talk = """
import os, signal, sys, termios
mode = termios.tcgetattr(0)
mode[3] &= ~termios.ECHO  # an echo may come between a line of output and its end
termios.tcsetattr(0, termios.TCSANOW, mode)
def caught(number, frame):
    print('caught', os.get_terminal_size().lines, flush=True)
signal.signal(signal.SIGINT, caught)
print('ready', flush=True)
for line in sys.stdin:
    print('got ' + line.strip(), flush=True)
print('end', flush=True)
"""
term = await ws.shell.start([sys.executable, "-c", talk], pty=True)
at = (await term.expect("ready"))["cursor"]`)
	for round := range 5 {
		a.must(fmt.Sprintf(`await term.resize(%d, 80)
await term.write("thrown away")
await term.write("\x03")
at = (await term.expect("caught %d\r\n", at))["cursor"]`, 30+round, 30+round))
		if got := b.must(`lines = [f"{i} {'x' * (i % 90)}" for i in range(400)]
for line in lines: await term.write(line + "\n")
heard, more = [], ""
while len(heard) < len(lines):
    page = await term.read(at)
    if not page["output"]: break
    at, more = page["cursor"], more + page["output"]
    *whole, more = more.split("\r\n")
    heard += [w[4:] for w in whole if w.startswith("got ")]
[w.strip() for w in lines] == heard or (len(heard), [p for p in zip(lines, heard) if p[0].strip() != p[1]][:3])`); got != "True" {
			t.Fatalf("round %d: %s", round, got)
		}
	}
	if got := a.must(`await term.write(eof=True); m = await term.expect("end\r\n", at); await term; m["matched"], term.status()["returncode"]`); got != "(True, 0)" {
		t.Error(got)
	}
}

// Must be seen, 4: a message to a client that is away waits for it, across a restart
// of the manager.
func TestMessageWaitsForClient(t *testing.T) {
	s := newSession(t)
	a, b := s.serve(), s.serve()
	a.init("calm-otter")
	b.init("bright-fox")
	b.must("1")
	b.close()
	a.must(`sent = await ws.messages.send("bright-fox", "while you were away", {"n": [1, 2]})`)
	s.kill(s.unitPID("manager.service"))
	if got := a.must(`sent["to"]`); got != "'bright-fox'" {
		t.Error(got)
	}
	b = s.serve()
	r := b.tool("init", map[string]any{"client_id": "bright-fox"})
	if n := r.Init.Inbox; n == nil || n.Unacked != 1 || n.Messages[0].Text != "while you were away" {
		t.Fatalf("%s", r.Text)
	}
	if got := b.must(`m = (await ws.messages.read())["messages"]; m[0]["data"], await ws.messages.ack([m[0]["id"]]), await ws.messages.ack([m[0]["id"]])`); got != "({'n': [1, 2]}, 1, 0)" {
		t.Error(got)
	}
	// A message wakes a call that waits, once.
	began := time.Now()
	x := b.tool("execute", map[string]any{"code": "import asyncio\ngate = asyncio.Event()\nt = ws.tasks.start(ws.messages.send('bright-fox', 'hey'))\nawait gate.wait()", "wait_ms": 30000})
	if x.Exec.State != api.Running || x.Exec.Inbox.Unacked != 1 || time.Since(began) > 25*time.Second {
		t.Errorf("after %v: %s", time.Since(began), x.Text)
	}
	began = time.Now()
	if x = b.tool("poll", map[string]any{"exec_id": x.Exec.ExecID, "cursor": x.Exec.Cursor, "wait_ms": 1000}); x.Exec.State != api.Running || time.Since(began) < time.Second {
		t.Errorf("after %v: %s", time.Since(began), x.Text)
	}
	a.must("gate.set()")
	if x, _ = b.finish(x); x.Exec.State != api.Succeeded {
		t.Errorf("%s", x.Text)
	}
}

// Jobs and their output outlive the manager, the kernel and, in part, both.
func TestJobsOutliveManagerAndKernel(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	f.must(`job = await ws.shell.start("i=0; while read line; do i=$((i+1)); echo $i:$line; done; exit 7", stdin=True)
await job.write("one\n"); await job.expect("1:one")
count = await ws.shell.start("i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done")
import asyncio
kept = ws.tasks.start(asyncio.sleep(60, 5), task_id="kept")`)
	waiting := f.tool("execute", map[string]any{"code": "await job", "wait_ms": 0})
	s.kill(s.unitPID("manager.service"))
	f.must(`await job.write("two\n"); await job.expect("2:two")`)
	if got := f.must("try:\n    await count\nfinally:\n    text = count.output()\ntext == ''.join(f'{i}\\n' for i in range(20000))"); got != "True" {
		t.Errorf("output of a job while the manager was killed: %s", got)
	}
	if got := f.must(`kept.status()["status"], (await ws.history.get("kept"))["state"], [h.id for h in ws.tasks.active() if h.status()["kind"] == "python"]`); got != "('running', 'running', ['kept'])" {
		t.Error(got)
	}
	if got := f.must(`job_id = job.id; job_id`); len(got) != 34 {
		t.Fatal(got)
	}
	id := strings.Trim(f.must("job_id"), "'")
	s.kill(s.unitPID("kernel.service"))
	r, _ := f.finish(waiting)
	if r.Exec.State != api.Lost {
		t.Errorf("the cell that waited is %s", r.Exec.State)
	}
	got := f.must(fmt.Sprintf(`job = await ws.tasks.attach(%q)
await job.write("three\n"); await job.expect("3:three"); await job.write(eof=True)
try: await job
except ws.RPCError as e: print(e.code)
job.output(), job.status()["returncode"]`, id))
	if got != "shell_failed\n('1:one\\n2:two\\n3:three\\n', 7)" {
		t.Error(got)
	}
	if got := f.must("h = await ws.tasks.attach('kept')\ntry: h.result()\nexcept ws.ResultUnavailable as e: print('gone')\nh.status()['status']"); got != "gone\n'lost'" {
		t.Error(got)
	}
}

// Nothing is active behind the back of a reset.
func TestResetAndActiveWork(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	f.must(`job = await ws.shell.start("sleep 1000")`)
	r, _ := f.do("await ws.reset()")
	if r.Exec.State != api.FailedCell || !strings.Contains(r.Text, "active work") {
		t.Errorf("%s", r.Text)
	}
	if got := f.must(`job.status()["status"]`); got != "'running'" {
		t.Error(got)
	}
	f.must(`await job.cancel()
import asyncio
t = ws.tasks.start(asyncio.sleep(1000), task_id="long")`)
	if r, _ = f.do("await ws.reset()"); r.Exec.State != api.FailedCell || !strings.Contains(r.Text, "active work") {
		t.Errorf("%s", r.Text)
	}
	out, code := s.cli("reset")
	if code == 0 || !strings.Contains(out, "active work") {
		t.Errorf("reset: %d %s", code, out)
	}
	f.must(`job = await ws.shell.start("sleep 1000"); ident = job.id`)
	id := strings.Trim(f.must("ident"), "'")
	if r, _ = f.do("await ws.reset(force=True)"); r.Exec.State != api.Succeeded {
		t.Errorf("%s", r.Text)
	}
	if got := f.must(fmt.Sprintf(`j = await ws.tasks.attach(%q); j.status()["status"], (await ws.history.get("long"))["state"], ws.tasks.start(__import__("asyncio").sleep(0), task_id="long").id`, id)); got != "('cancelled', 'cancelled', 'long')" {
		t.Error(got)
	}
	// A hidden task is nobody's work.
	f.must("import asyncio\nt = ws.tasks.start(asyncio.sleep(1000), visible=False)")
	if r, _ = f.do("await ws.reset()"); r.Exec.State != api.Succeeded {
		t.Errorf("%s", r.Text)
	}
}

// The environment of a command is what the caller says it is, and one variable of ours.
func TestEnvironmentOfJobs(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	f.must(`import os
os.environ["MINE"] = "1"; os.environ["HIDDEN"] = "2"
async def seen(**kw):
    out = (await ws.shell.run(["/usr/bin/env", "-0"], check=True, max_bytes=1 << 20, **kw))["stdout"]
    seen = dict(pair.split("=", 1) for pair in out.split("\0") if pair)
    del seen["INVOCATION_ID"]  # by which the supervisor knows its processes
    return seen`)
	if got := f.must(`await seen(env={}), await seen(env={"A": "b=c"}), await seen() == dict(os.environ)`); got != "({}, {'A': 'b=c'}, True)" {
		t.Error(got)
	}
	if got := f.must(`laid = await seen(env={"MINE": "3", "HIDDEN": None}, inherit_env=True)
"HIDDEN" in laid, {**laid, "HIDDEN": "2", "MINE": "1"} == dict(os.environ), laid["MINE"]`); got != "(False, True, '3')" {
		t.Error(got)
	}
}

// Two agents: a name is held by one of them at a time, and what each did is told apart.
func TestAgentsShareLocksAndHistory(t *testing.T) {
	s := newSession(t)
	a, b := s.serve(), s.serve()
	a.init("calm-otter")
	b.init("bright-fox")
	a.must("import asyncio\norder, held, asked, let_go = [], asyncio.Event(), asyncio.Event(), asyncio.Event()")
	first := a.tool("execute", map[string]any{"code": `async with ws.locks.acquire("file:report", "module:review"):
    held.set()
    await let_go.wait()
    order.append("calm-otter")`, "wait_ms": 0})
	if got := b.must(`await held.wait()
try:
    async with ws.locks.acquire("module:review", timeout=0.05): pass
except TimeoutError: print("taken")
[(l["name"], l["owner"]["client_id"]) for l in ws.locks.list()]`); got != "taken\n[('file:report', 'calm-otter'), ('module:review', 'calm-otter')]" {
		t.Error(got)
	}
	second := b.tool("execute", map[string]any{"code": `asyncio.get_running_loop().call_soon(asked.set)
async with ws.locks.acquire("module:review", timeout=30):
    order.append("bright-fox")`, "wait_ms": 0})
	if got := a.must(`await asked.wait()
waiting = [w["client_id"] for l in ws.locks.list() for w in l["waiters"]]
let_go.set()
waiting`); got != "['bright-fox']" {
		t.Error(got)
	}
	a.finish(first)
	b.finish(second)
	if got := a.must(`order, ws.locks.list()`); got != "(['calm-otter', 'bright-fox'], [])" {
		t.Error(got)
	}
	if got := a.must(`mine = (await ws.history.list(client_id="calm-otter", limit=200))["items"]
theirs = (await ws.history.list(client_id="bright-fox", limit=200))["items"]
events = (await ws.history.logs(client_id="bright-fox", limit=200))["events"]
{i["client_id"] for i in mine}, {i["client_id"] for i in theirs}, len(theirs), {e["client_id"] for e in events}, ` +
		fmt.Sprintf("%q in [i['id'] for i in theirs]", second.Exec.ExecID)); got != "({'calm-otter'}, {'bright-fox'}, 2, {'bright-fox'}, True)" {
		t.Error(got)
	}
}

// A restart from a cell: refused beside other work, else everything in memory is gone,
// and both clients go on under their names.
func TestRestartFromACell(t *testing.T) {
	s := newSession(t)
	a, b := s.serve(), s.serve()
	a.init("a")
	b.init("b")
	a.must("import asyncio\nover = asyncio.Event(); kept = 1")
	beside := b.tool("execute", map[string]any{"code": "await over.wait()", "wait_ms": 0})
	if r, _ := a.do("await ws.restart()"); r.Exec.State != api.FailedCell || !strings.Contains(r.Text, "active work") {
		t.Errorf("beside other work: %s", r.Text)
	}
	a.must("over.set()")
	b.finish(beside)
	before := s.unitPID("manager.service")
	if r, _ := a.do("await ws.restart()"); r.Exec.State != api.Succeeded {
		t.Errorf("%s", r.Text)
	}
	for _, f := range []*front{a, b} {
		if got := f.must(`"kept" in globals(), ws.client.id`); got != map[*front]string{a: "(False, 'a')", b: "(False, 'b')"}[f] {
			t.Error(got)
		}
	}
	if s.unitPID("manager.service") == before {
		t.Error("the manager was not replaced")
	}
	// Memory is kept: the cell ends in the kernel too, and is not taken for one that runs
	// beside the next ones, whose children would not be heard then.
	a.must("kept = 2")
	if got := a.must("await ws.restart(keep_kernel=True)"); !strings.Contains(got, "completed") {
		t.Error(got)
	}
	if got := a.must(`import asyncio, subprocess
cells = [t for t in asyncio.all_tasks() if t is not asyncio.current_task() and t.get_name().startswith("cell ")]
cells and await asyncio.wait(cells, timeout=60)
subprocess.run(["echo", "heard"])
kept, [t["status"] for t in ws.inspect()["tasks"]].count("running")`); got != "heard\n(2, 1)" {
		t.Errorf("after a restart that kept memory: %s", got)
	}
	// What forces it is cancelled.
	a.must("import asyncio\nstarted = asyncio.Event()")
	f := b.tool("execute", map[string]any{"code": `job = await ws.shell.start("sleep 1000"); started.set(); await job`, "wait_ms": 0})
	a.must(`await started.wait(); open("ident", "w").write(job.id)`)
	if r, _ := a.do("await ws.restart(force=True)"); r.Exec.State != api.Succeeded {
		t.Errorf("%s", r.Text)
	}
	if r, _ := b.finish(f); r.Exec.State != api.Cancelled {
		t.Errorf("a cell that was in the way: %s", r.Text)
	}
	if got := a.must(`(await ws.tasks.attach(open("ident").read())).status()["status"]`); got != "'cancelled'" {
		t.Error(got)
	}
}

// Whoever awaits run() and is cancelled ends the command; whoever waits for a handle or its
// output ends only the wait.
func TestCancelledWaits(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	f.must(`import asyncio, os
fifo = str(ws.workspace / "began"); os.mkfifo(fifo)
shells = lambda: [h for h in ws.tasks.active() if h.status()["kind"] == "shell"]
def began():
    with open(fifo) as file: file.read()`)
	if got := f.must(`run = ws.tasks.start(ws.shell.run(f"echo > {fifo}; exec sleep 1000"))
await asyncio.to_thread(began)
[job] = shells()
await run.cancel(), run.status()["status"], shells(), job.status()["status"]`); got != "(True, 'cancelled', [], 'cancelled')" {
		t.Error(got)
	}
	if got := f.must(`job = await ws.shell.start(f"echo up; echo > {fifo}; exec sleep 1000")
await asyncio.to_thread(began)
at = (await job.expect("up\n"))["cursor"]
async def wait_for_it(): return await job
for wait in (job.read(at), job.expect("never", at), wait_for_it()):
    w = ws.tasks.start(wait); await asyncio.sleep(0.05)
    print(await w.cancel(), w.status()["status"], job.status()["status"])
await job.cancel()`); got != strings.Repeat("True cancelled running\n", 3)+"True" {
		t.Error(got)
	}
}

// Bad input is refused with a clear error; nothing is lost by it and nobody else notices.
func TestBadInputOfWork(t *testing.T) {
	s := newSession(t)
	f, other := s.serve(), s.serve()
	f.init("a")
	other.init("b")
	beside := other.tool("execute", map[string]any{"code": "import asyncio\nover = asyncio.Event()\nawait over.wait()\n'untouched'", "wait_ms": 0})
	f.must("async def attempt(make):\n    try:\n        r = make()\n        r = await r if hasattr(r, '__await__') else r\n        return 'no error: ' + repr(r)\n    except BaseException as e:\n        return f'{type(e).__name__}: {e}'")
	f.must("import os\nfor name, text in (('plain', 'true'), ('orphan', '#!/no/such\\n')):\n    with open(name, 'w') as file: file.write(text)\n    os.chmod(name, 0o755)")
	for code, want := range map[string]string{
		`ws.shell.run(["./plain"])`:                                         "exec format error",
		`ws.shell.start(["./orphan"])`:                                      "no such file or directory (the program, its directory, or what its #! line names)",
		`ws.shell.run(["no-such-program"])`:                                 "NotFoundError: cannot start \"no-such-program\"",
		`ws.shell.run("true", cwd="/no/such")`:                              "NotFoundError: the working directory /no/such does not exist",
		`ws.shell.run("true", env={"A": "x\0"})`:                            "InvalidRequestError: the environment variable A contains a NUL byte",
		`ws.shell.run(["true", "x" * (10 << 20)])`:                          "the kernel takes at most",
		`ws.shell.run(["true"] + ["x" * 100000] * 100)`:                     "the kernel takes at most",
		`ws.shell.run(b"true")`:                                             "TypeError: a command is text",
		`ws.shell.run("true", limits={"memory": "lots"})`:                   "limits: memory is a number of bytes",
		`ws.shell.run("true", timeout="x")`:                                 "TypeError: timeout",
		`ws.messages.send("nobody-here", "x")`:                              "NotFoundError: there is no client \"nobody-here\"",
		`ws.messages.send("a", "x" * 16385)`:                                "at most 16384",
		`ws.messages.send("a", "")`:                                         "the text is empty",
		`ws.messages.send("a", "x", float("nan"))`:                          "ValueError",
		`ws.messages.send("a", "x", {1, 2})`:                                "TypeError",
		`ws.messages.ack([99])`:                                             "NotFoundError: messages.ack: a has received no message 99",
		`ws.messages.ack([True])`:                                           "TypeError",
		`ws.messages.read(limit=101)`:                                       "ValueError: limit",
		`ws.messages.read(wait_ms=30001)`:                                   "ValueError: wait_ms",
		`ws.history.list(limit=0)`:                                          "ValueError: limit",
		`ws.history.get("nobody")`:                                          "NotFoundError: there is no record",
		`ws.modules.load("../x")`:                                           "ValueError: '../x' is not the name of a module",
		`ws.modules.write("_private", "")`:                                  "ValueError",
		`ws.modules.write("a.b.class", "")`:                                 "ValueError",
		`ws.modules.write("bad", "def (")`:                                  "SyntaxError",
		`ws.skills.write("bad", "---\na: [\n---\n")`:                        "ValueError: skill 'bad' was not written: the front matter is not YAML",
		`ws.skills.write("../bad", "x")`:                                    "InvalidRequestError",
		`ws.skills.read("nobody")`:                                          "NotFoundError: there is no skill",
		`ws.packages.add()`:                                                 "InvalidRequestError: there is nothing to install",
		`ws.packages.add("--help")`:                                         "is not a package requirement",
		`ws.tasks.start(5)`:                                                 "TypeError: ws.tasks.start takes an awaitable",
		`ws.tasks.get("nobody")`:                                            "KeyError",
		`ws.tasks.attach("nobody")`:                                         "NotFoundError",
		`ws.help("nothing")`:                                                "ValueError: there is no topic 'nothing'",
		`ws.help("shell._registry")`:                                        "private",
		`ws.help(7)`:                                                        "TypeError",
		`ws.locks.acquire("")`:                                              "ValueError: the name of a lock",
		`(await ws.shell.start("true")).read("mypr-shell1.e30")`:            "InvalidCursorError: this cursor belongs to job",
		`(await ws.shell.start("true")).read("mypr1.AAAA")`:                 "InvalidCursorError",
		`(await ws.shell.start("sleep 8", limits={"time": 5})).write("x")`:  "has no open standard input",
		`(await ws.shell.start("sleep 9", limits={"time": 5})).resize(1,1)`: "has no terminal",
	} {
		make := "lambda: " + code
		pre := ""
		if strings.HasPrefix(code, "(await ") {
			pre = "job = " + code[1:strings.Index(code, ").")] + "\n"
			make = "lambda: job" + code[strings.Index(code, ").")+1:]
		}
		if got := f.must(pre + "print(await attempt(" + make + "))"); !strings.Contains(got, want) {
			t.Errorf("%s:\ngot  %s\nwant %s", code, got, want)
		}
	}
	// A cursor belongs to one job and one stream, whatever it is shown to.
	if got := f.must(`one, two = await ws.shell.start("echo one"), await ws.shell.start("echo two")
task = ws.tasks.start(__import__("asyncio").sleep(0)); await task
c = (await one.read())["cursor"], (await one.read(stream="stdout"))["cursor"], (await task.read(wait_ms=0))["cursor"]
for use in (lambda: two.read(c[0]), lambda: one.read(c[0], stream="stdout"), lambda: one.read(c[1]), lambda: one.read(c[2]),
    lambda: task.read(c[0]), lambda: two.expect("two", c[0]), lambda: one.read("12"), lambda: one.read(7)):
    print((await attempt(use)).partition(":")[0])
one.output(cursor=4)["output"], (await one.read(c[0]))["output"]`); got != "InvalidCursorError\nInvalidCursorError\nInvalidCursorError\nInvalidCursorError\nInvalidCursor\nInvalidCursorError\nInvalidCursorError\nTypeError\n('', '')" {
		t.Error(got)
	}
	// The exceptions have fields for programs.
	if got := f.must(`try: await ws.shell.run("true", cwd="/no/such")
except ws.RPCError as e: print(e.code, e.operation, e.hint, e.details, isinstance(e, LookupError))
try: await ws.shell.run("exit 3", check=True)
except ws.ShellError as e: print(e.code, e.operation, e.result["returncode"], isinstance(e, ws.RPCError))
job = await ws.shell.start("exit 4")
try: await job
except ws.RPCError as e: print(e.code, e.operation, e.hint, e.details["returncode"])`); got != "not_found shell.run pass cwd= {} True\nshell_failed shell.run 3 True\nshell_failed shell.result its output() has what it printed 4" {
		t.Error(got)
	}
	// A current directory that is gone.
	if got := f.must(`import os, tempfile
here = os.getcwd(); gone = tempfile.mkdtemp(); os.chdir(gone); os.rmdir(gone)
try: print(await attempt(lambda: ws.shell.run("true")), (await ws.shell.run("pwd", cwd=ws.workspace))["stdout"] == f"{ws.workspace}\n")
finally: os.chdir(here)`); !strings.Contains(got, "the kernel's current directory was deleted") || !strings.HasSuffix(got, " True") {
		t.Error(got)
	}
	// Skills on disk that are broken or lead out: one is said, the other is not there.
	if got := f.must(`import os, pathlib, tempfile
skills = ws.root / "skills"
outside = pathlib.Path(tempfile.mkdtemp()) / "SKILL.md"; outside.write_text("---\nname: out\n---\nsecret\n")
for name, make in {"broken": lambda p: p.write_text("---\na: [\n---\n"), "out": lambda p: p.symlink_to(outside), "plain": lambda p: p.write_text("just text [x](../../../etc/passwd)\n")}.items():
    (skills / name).mkdir(parents=True); make(skills / name / "SKILL.md")
(skills / "whole").symlink_to(outside.parent)
print([(k["name"], "YAML" in k.get("error", "")) for k in ws.skills.list()])
print(await attempt(lambda: ws.skills.read("out")), "|", await attempt(lambda: ws.skills.read("whole")))
print(await ws.skills.validate("plain"))
import shutil; shutil.rmtree(outside.parent)`); !strings.Contains(got, "[('broken', True), ('plain', False)]") || strings.Contains(got, "secret") || !strings.Contains(got, "outside") {
		t.Error(got)
	}
	if got := f.must(`async def twice():
    async with ws.locks.acquire("x"):
        async with ws.locks.acquire("y"): pass
await attempt(twice)`); !strings.Contains(got, "RuntimeError: this task holds 'x'") {
		t.Error(got)
	}
	if got := f.must(`import asyncio
for i in range(10000): last = ws.tasks.start(asyncio.sleep(0))
await last
del last
await asyncio.sleep(0.5)
len([s for s in ws.tasks.list() if s["kind"] == "python"])`); got != "128" {
		t.Errorf("10,000 tasks: %s", got)
	}
	if got := f.must(`j = await ws.shell.run("printf 'a\\377b'"); j["stdout"], open(ws.root / "jobs" / (j["id"] + ".out"), "rb").read()`); got != `('a\ufffdb', b'a\xffb')` && got != `('a�b', b'a\xffb')` {
		t.Error(got)
	}
	f.must("over.set()")
	if r, text := other.finish(beside); r.Exec.State != api.Succeeded || !strings.Contains(text, "untouched") {
		t.Errorf("a cell of somebody else: %s %s", r.Text, text)
	}
}

// A flood is drained, and costs the manager no memory.
func TestFloodCostsNoMemory(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	f.must(`await ws.shell.run("true")`)
	rss := func() int {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", s.unitPID("manager.service")))
		if err != nil {
			t.Fatal(err)
		}
		var size, pages int
		fmt.Sscan(string(data), &size, &pages)
		return pages * os.Getpagesize()
	}
	before := rss()
	if got := f.must(`r = await ws.shell.run("head -c 1073741824 /dev/zero", max_bytes=10); r["state"], r["truncated"], ws.tasks.get(r["id"]).status()["output_dropped"]`); got != fmt.Sprintf("('succeeded', True, %d)", 1<<30-16<<20) {
		t.Error(got)
	}
	if after := rss(); after > before+16<<20 {
		t.Errorf("the manager grew from %d to %d KiB", before>>10, after>>10)
	}
}

func TestRecordsOfWork(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	f.must(`r = await ws.shell.run("echo line; exit 2")`)
	if got := f.must(`d = await ws.history.get(r["id"]); d["kind"], d["state"], d["output"][0]["text"], d["client_id"], d["job"]["returncode"], d["job"]["command"]`); got != "('shell', 'failed', 'line\\n', 'a', 2, 'echo line; exit 2')" {
		t.Error(got)
	}
	out := s.ok("logs", "--limit", "50")
	if !strings.Contains(out, `"kind":"shell"`) || !strings.Contains(out, `"text":"line\n"`) {
		t.Errorf("%s", out)
	}
}

// Packages come from a file without a network, and without one an index that cannot be
// reached is said, with what to do.
func TestPackages(t *testing.T) {
	s := newSession(t, "[python]\nplain = true\n[environment]\nUV_DEFAULT_INDEX = \"http://127.0.0.1:9/simple\"\nUV_HTTP_RETRIES = \"0\"\n")
	s.write("tiny-1.0-py3-none-any.whl", wheel(t, "tiny", "1.0", "answer = 42\n"))
	f := s.serve()
	f.init("a")
	got := f.must(`ws.local["install"] = await ws.packages.add("./tiny-1.0-py3-none-any.whl")
shown = repr(ws.local["install"])
kind = ws.local["install"].status()["kind"]
r = await ws.local["install"]
import tiny
"running: await it before the import>" in shown or shown, kind, r, tiny.answer, [l for l in open(ws.root / "requirements.txt") if "tiny" in l][0].startswith("tiny @ file://")`)
	if got != "(True, 'package', {'returncode': 0}, 42, True)" {
		t.Error(got)
	}
	got = f.must(`job = await ws.packages.add("no-such-package-of-anybody")
try: await job
except ws.RPCError as e: print(e.code, e.message, e.hint)`)
	if !strings.Contains(got, "package_failed") || !strings.Contains(got, "the package index cannot be reached") || !strings.Contains(got, "UV_FIND_LINKS") {
		t.Error(got)
	}
	if got := f.must(`tiny.answer, (await ws.history.get(job.id))["kind"]`); got != "(42, 'package')" {
		t.Error(got)
	}
}

// wheel is the least that pip calls a package.
func wheel(t *testing.T, name, version, code string) string {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	info := name + "-" + version + ".dist-info/"
	for _, f := range [][2]string{
		{name + ".py", code},
		{info + "METADATA", "Metadata-Version: 2.1\nName: " + name + "\nVersion: " + version + "\n"},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{info + "RECORD", name + ".py,,\n" + info + "METADATA,,\n" + info + "WHEEL,,\n" + info + "RECORD,,\n"},
	} {
		w, err := z.Create(f[0])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f[1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// The processes of the session may be woken late, to disturb the work less; the work may not.
func TestTimerSlack(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	own := "open('/proc/self/timerslack_ns').read().strip()"
	if got := f.must("(" + own + `, (await ws.shell.run("cat /proc/self/timerslack_ns"))["stdout"].strip())`); got != "('50000', '50000')" {
		t.Errorf("kernel and command: %s", got)
	}
	if os.Getuid() != 0 { // others' are not shown
		return
	}
	for name, pid := range map[string]int{"manager": s.unitPID("manager.service"), "supervisor": s.status().Supervisor.PID} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/timerslack_ns", pid))
		if err != nil || string(b) != "1000000\n" {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
}

// A command gets the environment that the kernel has at that moment, bytes and all, from
// whichever manager.
func TestEnvironmentOfCommands(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	f.must("import os\nasync def value(**more): return (await ws.shell.run(r'''printf %s \"$A\" | od -An -tx1''', **more))['stdout'].split()")
	check := func(code, want string) {
		t.Helper()
		if got := f.must(code); got != want {
			t.Errorf("%s: %s, want %s", code, got, want)
		}
	}
	for _, c := range []struct{ change, want string }{
		{"os.environ['A'] = 'x'", "['78']"}, {"os.environb[b'A'] = b'\\xfe'", "['fe']"}, {"del os.environ['A']", "[]"}, {"os.environ['A'] = 'y'", "['79']"},
	} {
		f.must(c.change)
		check("await value()", c.want)
		check("await value(env={'A': 'z', 'PATH': os.environ['PATH']}), await value(), await value(env={'A': 'w'}, inherit_env=True), await value()",
			"(['7a'], "+c.want+", ['77'], "+c.want+")")
		s.kill(s.unitPID("manager.service"))
		check("await value()", c.want)
	}
	f.must("os.environ['A'] = 'v'")
	check("import asyncio\nawait asyncio.gather(*(value() for _ in range(5)))", "[['76'], ['76'], ['76'], ['76'], ['76']]")
	// That of each call, when many are under way and it changes between them.
	f.must(`async def differs():
    wrong = 0
    for turn in range(4):
        os.environ["A"] = "v"
        await value()
        runs, want = [], []
        for n in range(8):
            for _ in range(2):
                runs.append(asyncio.ensure_future(value()))
                want.append([os.environ["A"].encode().hex()])
            await asyncio.sleep(0)
            os.environ["A"] = "stuvwxyz"[n]
        wrong += sum(a != b for a, b in zip(await asyncio.gather(*runs), want))
    return wrong`)
	check("await differs()", "0")
	// And when a thread changes it at that very moment.
	f.must(`class Sly(bytes):
    def __radd__(self, other):
        os.environ._data[b"B"] = b"1"
        return other + bytes(self)
os.environ._data[b"A"] = Sly(b"x")`)
	check("await value(), (await ws.shell.run('echo $B'))['stdout']", "(['78'], '1\\n')")
}
