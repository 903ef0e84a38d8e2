package manager

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/units/manager/store"
)

// A kernel that does not answer is not ready, whatever was true a moment ago.
func TestSilentKernel(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	p.run("print:x")
	ask := func(detail bool) api.Status {
		t.Helper()
		s, err := call[api.Status](p, api.MethodStatus, api.StatusParams{Detail: detail})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	w.until("ready", func(s *api.Status) bool { return s.Kernel.State == phaseReady && s.Healthy })
	k := w.sup.current()
	k.mu.Lock()
	k.silent = true
	k.mu.Unlock()
	s := ask(true)
	// Why is not known (the process of the fake is this one, and runs), so it is no fault.
	if s.Kernel.State != "unresponsive" || !strings.Contains(s.Kernel.Detail, "does not answer within 1s") || !s.Healthy {
		t.Errorf("%+v", s.Kernel)
	}
	if s := ask(false); s.Kernel.State != phaseReady { // nobody was asked
		t.Errorf("%+v", s.Kernel)
	}
}

// An environment that is there is not said to be prepared.
func TestProgressText(t *testing.T) {
	k := kernelState{phase: phasePreparing}
	if text := k.progressText(); strings.Contains(text, "prepared") {
		t.Error(text)
	}
	k.detail = "installing IPython"
	if text := k.progressText(); !strings.Contains(text, "prepared: installing IPython") {
		t.Error(text)
	}
}

// Who waits for a cell of a frozen kernel is told so.
func TestFrozenKernel(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	p.run("print:x")
	busy := p.execute("gate:b print:end", 0)
	w.sup.mu.Lock()
	u := w.sup.status
	u.Frozen = true
	w.sup.setStatus(u)
	w.sup.mu.Unlock()
	m := w.manager()
	w.until("frozen", func(*api.Status) bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.unit.Frozen
	})
	x := p.poll(api.PollParams{ExecID: busy.ExecID, WaitMS: ptr(int64(0))})
	if len(x.Warnings) != 1 || !strings.Contains(x.Warnings[0].Text, "mypr-mcp thaw kernel") {
		t.Errorf("%+v", x.Warnings)
	}
	w.sup.current().open("b")
	if x := p.finish(busy.ExecID); x.State != api.Succeeded || len(x.Warnings) != 0 {
		t.Errorf("%+v", x)
	}
}

func TestMeter(t *testing.T) {
	var m meter
	for i := range 1000 { // of which the last 512 count: 488..999 ms
		m.add("fs.read", time.Duration(i)*time.Millisecond)
	}
	m.add("fs.stat", 1500*time.Microsecond)
	m.add("a", math.MaxInt64)
	got := m.report()
	if len(got) != 3 || got[1] != (api.CallCost{Method: "fs.read", Count: 1000, P50MS: 744, P99MS: 994, MaxMS: 999}) ||
		got[2] != (api.CallCost{Method: "fs.stat", Count: 1, P50MS: 1.5, P99MS: 1.5, MaxMS: 1.5}) || got[0].MaxMS <= 0 {
		t.Errorf("%+v", got)
	}
	for i := range 2 * meterMethods {
		m.add(strings.Repeat("x", i), 0)
	}
	if n := len(m.report()); n != meterMethods {
		t.Errorf("%d methods", n)
	}
}

// Calls of a cell are counted, refused ones too.
func TestCallsAreMetered(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	p.run(`call:status|{}`)
	p.run(`call:nosuch|{}`)
	k := w.sup.current()
	<-k.answered
	<-k.answered
	s := w.until("both counted", func(s *api.Status) bool { return len(s.Calls) == 2 }) // a moment after the answer
	if s.Calls[0].Method != "nosuch" || s.Calls[1].Method != "status" || s.Calls[1].Count != 1 {
		t.Errorf("%+v", s.Calls)
	}
	if d, err := call[api.Status](p, api.MethodStatus, api.StatusParams{}); err != nil || d.Calls != nil {
		t.Errorf("not asked for: %+v %v", d.Calls, err)
	}
}

// The lifecycle log does not grow for ever; what it tells of stays.
func TestLogIsBounded(t *testing.T) {
	w := newWorld(t, func(w *world) { w.opts.Limits.CompletedRecords = 1 })
	p := w.client("calm-otter")
	first, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:first", RequestID: ptr("r1")})
	if err != nil {
		t.Fatal(err)
	}
	first = p.finish(first.ExecID)
	old, err := call[api.LogsPage](p, api.MethodLogs, api.LogsParams{})
	if err != nil || old.Dropped {
		t.Fatal(old, err)
	}
	if err := w.manager().store.Do(func(tx *store.Tx) error { // what some hundred cells leave
		for range 1600 {
			if err := tx.Log(&api.LogEvent{Event: "output", Kind: "execution", ID: first.ExecID}); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	page, err := call[api.LogsPage](p, api.MethodLogs, api.LogsParams{Cursor: &old.Cursor, Limit: 200})
	if err != nil || !page.Dropped || len(page.Events) != 200 || page.Events[0].Seq <= old.Cursor+1 {
		t.Fatalf("%v, dropped %v, %d lines", err, page.Dropped, len(page.Events))
	}
	n := 0
	for start := page.Events[0].Seq - 1; ; {
		page, err := call[api.LogsPage](p, api.MethodLogs, api.LogsParams{Cursor: &start, Limit: 200})
		if err != nil || page.Dropped {
			t.Fatal(page, err)
		}
		n += len(page.Events)
		if start = page.Cursor; len(page.Events) < 200 {
			break
		}
	}
	if n < minLog || n >= minLog+512 {
		t.Errorf("%d lines are kept", n)
	}
	w.halt()
	w.start()
	if p, err = w.reconnect("calm-otter"); err != nil {
		t.Fatal(err)
	}
	again, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:first", RequestID: ptr("r1")})
	if err != nil || !again.Replayed || again.ExecID != first.ExecID || text(again) != text(first) {
		t.Errorf("%+v %v", again, err)
	}
	if r := p.run("print:after"); r.Generation != first.Generation {
		t.Errorf("another kernel: %+v", r)
	}
}

// Half of cache_bytes is for ended executions (their code and what of their output is in
// memory); the newest one stays anyway.
func TestCacheIsBoundedInBytes(t *testing.T) {
	w := newWorld(t, func(w *world) { w.opts.Limits.CacheBytes = 1 << 20 })
	p := w.client()
	kept := func() int {
		m := w.manager()
		m.mu.Lock()
		defer m.mu.Unlock()
		return len(m.runs)
	}
	var last api.ExecResult
	for range 4 {
		last = p.run("print:x" + strings.Repeat(" ", 200_000))
	}
	if n := kept(); n != 2 {
		t.Errorf("%d executions of 200 kB are kept in 512 KiB", n)
	}
	last = p.run("print:x" + strings.Repeat(" ", 900_000))
	if n := kept(); n != 1 {
		t.Errorf("%d are kept beside one that is over the limit alone", n)
	}
	if r := p.poll(api.PollParams{ExecID: last.ExecID}); r.State != api.Succeeded || text(r) != "x\n" {
		t.Errorf("%+v", r)
	}
}

// A page has 32 KiB when nothing is said of it, and 1 KiB at least.
func TestDefaultPage(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	r := p.run("big:200000")
	for name, page := range map[string]api.ExecResult{"execute": r, "poll": p.poll(api.PollParams{ExecID: r.ExecID})} {
		n := 0
		for _, e := range page.Output {
			raw, err := json.Marshal(e)
			if err != nil {
				t.Fatal(err)
			}
			n += len(raw)
		}
		if n > 32768 || n < 30000 || !page.HasMore {
			t.Errorf("%s: events of %d bytes", name, n)
		}
	}
	for _, n := range []int64{1023, api.MaxBytes + 1} {
		_, err := call[api.ExecResult](p, api.MethodPoll, api.PollParams{ExecID: r.ExecID, MaxBytes: &n})
		wantCode(t, err, rpc.CodeInvalidRequest, "between 1024")
	}
}
