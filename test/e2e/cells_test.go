package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"mypr/internal/api"
)

// Must be seen, 3: 32 rounds of two clients at once, with awaits that interleave.
func TestInterleavedOutputsDoNotMix(t *testing.T) {
	s := newSession(t)
	a, b := s.serve(), s.serve()
	a.init("a")
	b.init("b")
	a.must("import asyncio, contextvars\nseen = []")
	type want struct {
		f      *front
		client string
		ch     chan response
		text   string
	}
	for round := range 32 {
		var both []want
		for _, w := range []want{{f: a, client: "a"}, {f: b, client: "b"}} {
			tag := fmt.Sprintf("%s%02d", w.client, round)
			// A turn of the loop between the prints, and a child task that prints too.
			code := fmt.Sprintf(`
async def child_%[1]s(n):
    await asyncio.sleep(0)
    print("%[1]s child", n)
for n_%[1]s in range(4):
    print("%[1]s", n_%[1]s, end=" ")
    await asyncio.sleep(0)
    await asyncio.create_task(child_%[1]s(n_%[1]s))
"%[1]s end"`, tag)
			var text strings.Builder
			for n := range 4 {
				fmt.Fprintf(&text, "%s %d %s child %d\n", tag, n, tag, n)
			}
			w.text = text.String() + "'" + tag + " end'"
			_, w.ch = w.f.begin("tools/call", toolParams("execute", map[string]any{"code": code, "wait_ms": 30000}))
			both = append(both, w)
		}
		ids := map[string]bool{}
		for _, w := range both {
			r, text := w.f.finish(w.f.result("execute", w.ch))
			if got := strings.TrimSuffix(text, "\n"); got != w.text {
				t.Fatalf("round %d, client %s\ngot  %q\nwant %q", round, w.client, got, w.text)
			}
			if r.Exec.ClientID != w.client || r.Exec.State != api.Succeeded || ids[r.Exec.ExecID] {
				t.Fatalf("round %d: exec %s of client %q is %s", round, r.Exec.ExecID, r.Exec.ClientID, r.Exec.State)
			}
			ids[r.Exec.ExecID] = true
		}
	}
}

// Must be seen, 3: a cell that blocks the loop is named, its output read, and it can
// be stopped without harm to others.
func TestBlockingCellIsNamedAndInterrupted(t *testing.T) {
	s := newSession(t)
	a, b := s.serve(), s.serve()
	a.init("a")
	b.init("b")
	a.must("import time, asyncio\nkeep = 'kept'")
	waiting := b.tool("execute", map[string]any{"code": "await asyncio.sleep(1.5)\nprint('went on')", "wait_ms": 0})

	r := a.tool("execute", map[string]any{"code": "print('before')\ntime.sleep(600)\nprint('after')", "wait_ms": 500})
	id := r.Exec.ExecID
	for output(r) == "" {
		r = a.tool("poll", map[string]any{"exec_id": id, "cursor": 0, "wait_ms": 30000})
	}
	began := time.Now()
	if r.Exec.State != api.Running || output(r) != "before\n" {
		t.Errorf("the blocking cell is %s with output %q", r.Exec.State, output(r))
	}
	// The loop counts as blocked after 0.5 s; poll until it is named, event by event.
	named := r
	for named.Exec.Blocked == nil {
		if time.Since(began) > patience {
			t.Fatalf("the blocking cell was not named: %s", named.Text)
		}
		named = a.tool("poll", map[string]any{"exec_id": id, "cursor": r.Exec.Cursor, "wait_ms": 200})
	}
	t.Logf("named after %v", time.Since(began).Round(time.Millisecond))
	if blocked := named.Exec.Blocked; blocked.ExecID != id || !strings.Contains(blocked.Where, "2") {
		t.Errorf("blocked: %+v", blocked)
	}
	if !strings.Contains(named.Text, "blocked") {
		t.Errorf("the text does not say that the cell blocks: %s", named.Text)
	}
	// From another client the same is seen, with the output from the start.
	other := b.tool("poll", map[string]any{"exec_id": id, "cursor": 0, "wait_ms": 0})
	if output(other) != "before\n" || other.Exec.Blocked == nil {
		t.Errorf("the other client reads %q, blocked %v", output(other), other.Exec.Blocked)
	}
	if got := s.status(); got.Status == nil || got.Status.Kernel.Blocked == nil || got.Status.Kernel.Blocked.ExecID != id {
		t.Errorf("status does not name the blocking cell: %+v", got.Status)
	}

	start := time.Now()
	ended := b.tool("poll", map[string]any{"exec_id": id, "cursor": 0, "wait_ms": 10000, "interrupt": true})
	for !api.Terminal(ended.Exec.State) && time.Since(start) < patience {
		ended = b.tool("poll", map[string]any{"exec_id": id, "cursor": ended.Exec.Cursor, "wait_ms": 10000})
	}
	t.Logf("the interrupt took %v", time.Since(start).Round(time.Millisecond))
	if ended.Exec.State != api.Cancelled || ended.Exec.Error == nil || !strings.Contains(*ended.Exec.Error, "KeyboardInterrupt") {
		t.Errorf("the interrupted cell is %s: %v", ended.Exec.State, ended.Exec.Error)
	}
	if _, text := b.finish(waiting); text != "went on\n" {
		t.Errorf("the other cell printed %q", text)
	}
	if got := a.must("keep"); got != "'kept'" {
		t.Errorf("memory after the interrupt: %s", got)
	}
}

func TestInterruptFromTheCommandLine(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	f.must("import time, asyncio")
	for name, code := range map[string]string{"blocking": "time.sleep(600)", "awaiting": "await asyncio.sleep(600)"} {
		r := f.tool("execute", map[string]any{"code": "print('up')\n" + code, "wait_ms": 0})
		for output(r) == "" {
			r = f.tool("poll", map[string]any{"exec_id": r.Exec.ExecID, "cursor": 0, "wait_ms": 10000})
		}
		s.ok("interrupt", r.Exec.ExecID)
		r, _ = f.finish(r)
		if r.Exec.State != api.Cancelled {
			t.Errorf("%s cell: state %s", name, r.Exec.State)
		}
	}
	if out, code := s.cli("interrupt"); code != 1 || !strings.Contains(out, "no cell") {
		t.Errorf("interrupt with nothing to interrupt: exit %d, %s", code, out)
	}
}

// C code that holds the interpreter lock silences the kernel's I/O thread too.
func TestInterruptOfCodeThatHoldsTheInterpreterLock(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	f.must("import asyncio, re")
	waiting := f.tool("execute", map[string]any{"code": "print('up')\nawait asyncio.Event().wait()", "wait_ms": 0})
	for output(waiting) == "" {
		waiting = f.tool("poll", map[string]any{"exec_id": waiting.Exec.ExecID, "cursor": 0, "wait_ms": 10000})
	}
	r := f.tool("execute", map[string]any{"code": "re.match(r'(a+)+$', 'a' * 40 + 'b')", "wait_ms": 1000})
	if out, code := s.cli("interrupt"); code == 0 {
		t.Errorf("an interrupt of nobody in particular: %s", out)
	}
	// Whether a signal gets through depends on how the lock changes hands: "pending" is an
	// answer too, and the next request tries again.
	for deadline := time.Now().Add(patience); !api.Terminal(r.Exec.State) && time.Now().Before(deadline); {
		s.ok("interrupt", r.Exec.ExecID)
		r = f.tool("poll", map[string]any{"exec_id": r.Exec.ExecID, "cursor": 0, "wait_ms": 1000, "until_done": true})
	}
	if r.Exec.State != api.Cancelled {
		t.Errorf("the cell is %s", r.Exec.State)
	}
	if waiting = f.tool("poll", map[string]any{"exec_id": waiting.Exec.ExecID, "cursor": 0, "wait_ms": 0}); waiting.Exec.State != api.Running {
		t.Errorf("the cell that waits is %s", waiting.Exec.State)
	}
}

func TestDisplaysTracebacksAndLimits(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	if got := f.must("1 + 1;"); got != "" {
		t.Errorf("a trailing semicolon shows %q", got)
	}
	r, text := f.do("def f(): raise ValueError('ü' * 2000)\nf()")
	if r.Exec.State != api.FailedCell || r.IsError || !strings.Contains(text, "line 1, in f") {
		t.Errorf("a raising cell: state %s, isError %v\n%s", r.Exec.State, r.IsError, text)
	}
	if r.Exec.Error == nil || len(*r.Exec.Error) > api.MaxErrorBytes || !r.Exec.ErrorTruncated {
		t.Errorf("the error summary is not cut to 1 KiB: %d bytes", len(*r.Exec.Error))
	}
	if r, _ := f.do("input('name? ')"); r.Exec.State != api.FailedCell {
		t.Errorf("input() did not fail: %s", r.Exec.State)
	}
	if got := f.must("import os; os.system('echo raw; echo err >&2'); None"); !strings.Contains(got, "raw") || !strings.Contains(got, "err") {
		t.Errorf("output of a child: %q", got)
	}
	// The smallest PNG: it comes back as an image and as a file.
	png := `import base64
class P:
    def _repr_png_(self): return base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
P()`
	if r, _ := f.do(png); r.Images != 1 {
		t.Errorf("%d images\n%s", r.Images, r.Text)
	}
	r, text = f.do("for n in range(20 * 1024): print('x' * 1023)")
	if !r.Exec.Truncated || len(text) > api.MaxOutputBytes || len(text) < api.MaxOutputBytes*9/10 || r.Exec.State != api.Succeeded {
		t.Errorf("20 MiB of output: %d bytes kept, truncated %v, state %s", len(text), r.Exec.Truncated, r.Exec.State)
	}
}

func TestRequestIDsRunOnce(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	f.must("n = 0")
	args := map[string]any{"code": "n += 1; n", "wait_ms": 30000, "request_id": "once"}
	first := f.tool("execute", args)
	again := f.tool("execute", args)
	if again.Exec.ExecID != first.Exec.ExecID || f.must("n") != "1" {
		t.Errorf("the request ran twice: %s, %s", first.Exec.ExecID, again.Exec.ExecID)
	}
	f.close()
	s.ok("reset")
	g := s.serve()
	g.init("a")
	if r := g.tool("execute", args); r.Exec.ExecID != first.Exec.ExecID || !strings.Contains(output(r), "1") {
		t.Errorf("after a reset the request ran again: %s\n%s", r.Exec.ExecID, r.Text)
	}
}

func TestGenerationGuard(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	r, _ := f.do("x = 1")
	old := r.Exec.Generation
	if r := f.tool("execute", map[string]any{"code": "x", "wait_ms": 30000, "generation": old}); r.IsError || r.Exec.State != api.Succeeded {
		t.Errorf("the current generation is refused: %s", r.Text)
	}
	s.ok("reset")
	refused := f.tool("execute", map[string]any{"code": "open('ran', 'w')", "wait_ms": 5000, "generation": old})
	if !refused.IsError {
		t.Errorf("another session's generation was accepted: %s", refused.Text)
	}
	if r, _ := f.do("import os; os.path.exists('ran')"); !strings.Contains(output(r), "False") {
		t.Error("the refused cell ran")
	}
}
