package manager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/kernel"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
	"mypr/units/manager/store"
)

func wantCode(t testing.TB, err error, code string, parts ...string) {
	t.Helper()
	if rpc.CodeOf(err) != code {
		t.Errorf("got %v (code %q), want code %q", err, rpc.CodeOf(err), code)
		return
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("%q does not mention %q", err, p)
		}
	}
}

// statusUntil asks for the status until it is as wanted; each ask is prompted by a change of it.
func (w *world) until(what string, ok func(*api.Status) bool) *api.Status {
	w.t.Helper()
	p := w.dial()
	defer p.conn.Close()
	end := time.Now().Add(deadline)
	for {
		s, err := call[api.Status](p, api.MethodStatus, api.StatusParams{Detail: true})
		if err != nil {
			w.t.Fatal(err)
		}
		if ok(&s) {
			return &s
		}
		if time.Now().After(end) {
			w.t.Fatalf("never %s: %+v", what, s)
		}
		// Wait for the next log line, as every change of state makes one.
		page, err := call[api.LogsPage](p, api.MethodLogs, api.LogsParams{Limit: 1})
		if err != nil {
			w.t.Fatal(err)
		}
		if _, err := call[api.LogsPage](p, api.MethodLogs, api.LogsParams{Cursor: &page.Cursor, WaitMS: 20}); err != nil {
			w.t.Fatal(err)
		}
	}
}

func TestExecute(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	r := p.run("print:hello result:2")
	if r.State != api.Succeeded || text(r) != "hello\n2" || len(r.Output) != 2 || r.Cursor != 2 || r.HasMore || r.Error != nil {
		t.Errorf("got %+v", r)
	}
	if r.Generation == "" || r.ExecutionGeneration != r.Generation || r.ClientID != p.client || r.ConnectionID != p.id || r.Replayed {
		t.Errorf("identity: %+v", r)
	}
	if r.CreatedAt == 0 || r.StartedAt < r.CreatedAt || r.FinishedAt < r.StartedAt {
		t.Errorf("times: %+v", r)
	}
	r = p.run("print:before fail:no")
	if r.State != api.FailedCell || errText(r) != "ValueError: no" || r.ErrorInfo == nil || r.ErrorInfo.Type != "ValueError" || text(r) != "before\nTraceback\nValueError: no" {
		t.Errorf("got %+v", r)
	}
	again := p.poll(api.PollParams{ExecID: r.ExecID, Cursor: ptr(int64(1))})
	if len(again.Output) != 1 || again.Output[0].Type != "error" || again.State != api.FailedCell || errText(again) != errText(r) {
		t.Errorf("poll at 1: %+v", again)
	}
}

func TestExecuteRefusals(t *testing.T) {
	w := newWorld(t)
	p := w.dial()
	p.attach(api.AttachParams{})
	_, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:x"})
	wantCode(t, err, api.CodeNotInitialized, "init")
	q := w.dial()
	_, err = call[api.InitResult](q, api.MethodInit, api.InitParams{})
	wantCode(t, err, rpc.CodeConflict, "attached")
	p = w.client()
	for name, x := range map[string]api.ExecuteParams{
		"budget too small": {Code: "x", MaxBytes: ptr(int64(1023))},
		"budget too large": {Code: "x", MaxBytes: ptr(int64(api.MaxBytes + 1))},
		"request id":       {Code: "x", RequestID: ptr("with space")},
		"long request id":  {Code: "x", RequestID: ptr(strings.Repeat("r", 129))},
	} {
		_, err := call[api.ExecResult](p, api.MethodExecute, x)
		if wantCode(t, err, rpc.CodeInvalidRequest); t.Failed() {
			t.Fatal(name)
		}
	}
	_, err = call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: strings.Repeat("x", api.MaxCodeBytes+1)})
	wantCode(t, err, rpc.CodeTooLarge)
	_, err = call[api.ExecResult](p, api.MethodExecute, map[string]any{"code": "x", "wait": 5})
	wantCode(t, err, rpc.CodeInvalidRequest, "wait")
	for name, x := range map[string]api.PollParams{
		"short": {ExecID: "abc"}, "upper": {ExecID: strings.Repeat("A", 32)}, "budget": {ExecID: newID(), MaxBytes: ptr(int64(5))},
	} {
		_, err := call[api.ExecResult](p, api.MethodPoll, x)
		if wantCode(t, err, rpc.CodeInvalidRequest); t.Failed() {
			t.Fatal(name)
		}
	}
	_, err = call[api.ExecResult](p, api.MethodPoll, api.PollParams{ExecID: newID()})
	wantCode(t, err, rpc.CodeNotFound)
	r := p.run("print:x")
	_, err = call[api.ExecResult](p, api.MethodPoll, api.PollParams{ExecID: r.ExecID, Cursor: ptr(int64(-1))})
	wantCode(t, err, api.CodeInvalidCursor)
	_, err = call[api.ExecResult](p, api.MethodPoll, api.PollParams{ExecID: r.ExecID, Cursor: ptr(int64(2))})
	wantCode(t, err, api.CodeInvalidCursor, "which is 1")
	if h, err := call[api.HistoryPage](p, api.MethodHistory, api.HistoryParams{}); err != nil || len(h.Items) != 1 {
		t.Errorf("refused calls left records: %+v %v", h, err)
	}
}

func TestWaits(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	r := p.execute("print:early gate:g print:late", 0)
	if api.Terminal(r.State) {
		t.Fatalf("no wait, and yet %s", r.State)
	}
	// poll returns with new output; with until_done only at the end.
	for r.Cursor == 0 {
		r = p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(api.MaxWaitMS))})
	}
	if api.Terminal(r.State) || text(r) != "early\n" { // the state may be one of a moment before
		t.Errorf("got %+v", r)
	}
	k := w.sup.current()
	done := make(chan api.ExecResult)
	go func() {
		x, err := call[api.ExecResult](p, api.MethodPoll, api.PollParams{ExecID: r.ExecID, Cursor: &r.Cursor, WaitMS: ptr(int64(api.MaxWaitMS)), UntilDone: true})
		if err != nil {
			t.Error(err)
		}
		done <- x
	}()
	k.open("g")
	if x := <-done; x.State != api.Succeeded || text(x) != "late\n" {
		t.Errorf("got %+v", x)
	}
	x, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:x", WaitMS: ptr(int64(99_000))})
	if err != nil || x.ClampedWaitMS != api.MaxWaitMS {
		t.Errorf("clamped: %+v %v", x, err)
	}
	if x := p.poll(api.PollParams{ExecID: x.ExecID, WaitMS: ptr(int64(-5))}); x.ClampedWaitMS != 0 || x.State != api.Succeeded {
		t.Errorf("negative wait: %+v", x)
	}
}

// Calls that name no wait get the configured one.
func TestConfiguredWaits(t *testing.T) {
	w := newWorld(t, func(w *world) { w.opts.Limits.ExecuteWaitMS, w.opts.Limits.PollWaitMS = ptr(int64(0)), ptr(int64(0)) })
	p := w.client()
	p.run("print:x")
	began := time.Now()
	r, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "gate:g"})
	if err != nil || api.Terminal(r.State) {
		t.Errorf("%+v %v", r, err)
	}
	for range 20 {
		p.poll(api.PollParams{ExecID: r.ExecID})
	}
	if d := time.Since(began); d > 15*time.Second { // with waits of a second it is at least 20
		t.Errorf("took %v", d)
	}
	w.sup.current().open("g")
	p.finish(r.ExecID)
}

// The numbers that a front end gives to its requests are looked up when they come again,
// come late, or come over another connection.
func TestNumberedRequestIDs(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	exec := func(p *peer, id string) api.ExecResult {
		t.Helper()
		r, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:x", RequestID: &id, WaitMS: ptr(int64(api.MaxWaitMS))})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	first := p.id
	two := exec(p, first+":2")
	one := exec(p, first+":1")
	if one.Replayed || two.Replayed || one.ExecID == two.ExecID {
		t.Errorf("got %+v and %+v", two, one)
	}
	again := func(when string) {
		t.Helper()
		for id, want := range map[string]string{first + ":1": one.ExecID, first + ":2": two.ExecID} {
			if r := exec(p, id); !r.Replayed || r.ExecID != want {
				t.Errorf("%s: %+v", when, r)
			}
		}
	}
	again("over the same connection")
	p.conn.Close()
	p = w.client("calm-otter")
	again("over another one")
	w.halt()
	w.start()
	p = w.client("calm-otter")
	again("by another manager")
}

func TestRequestIDs(t *testing.T) {
	w := newWorld(t, func(w *world) { w.opts.Limits.CompletedRecords = 2 })
	p := w.client("calm-otter")
	exec := func(p *peer, id, code string) (api.ExecResult, error) {
		return call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: code, RequestID: &id, WaitMS: ptr(int64(api.MaxWaitMS))})
	}
	first, err := exec(p, "", "set:n=1 print:done")
	if err != nil || first.Replayed {
		t.Fatal(first, err)
	}
	check := func(when string, p *peer) {
		t.Helper()
		r, err := exec(p, "", "set:n=1 print:done")
		if err != nil || !r.Replayed || r.ExecID != first.ExecID || text(r) != "done\n" || r.State != api.Succeeded {
			t.Errorf("%s: %+v, %v", when, r, err)
		}
		_, err = exec(p, "", "other code")
		wantCode(t, err, api.CodeRequestConflict, first.ExecID)
	}
	check("at once", p)
	for range 5 {
		p.run("print:x")
	}
	check("after eviction", p)
	if _, err := call[api.ResetResult](p, api.MethodReset, api.LifecycleParams{}); err != nil {
		t.Fatal(err)
	}
	check("after a reset", p)
	w.halt()
	w.start()
	p = w.client("calm-otter")
	check("in another manager", p)
	// Another client has a scope of its own.
	q := w.client("bold-fox")
	if r, err := exec(q, "", "set:n=1 print:done"); err != nil || r.Replayed {
		t.Errorf("another client: %+v %v", r, err)
	}
	// Many at once with one id run once.
	var mu sync.Mutex
	ids, fresh := map[string]bool{}, 0
	var wg sync.WaitGroup
	for range 10 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r, err := exec(p, "same", "print:x")
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			ids[r.ExecID] = true
			if !r.Replayed {
				fresh++
			}
		}()
	}
	wg.Wait()
	if len(ids) != 1 || fresh != 1 {
		t.Errorf("%d executions, %d fresh", len(ids), fresh)
	}
}

func TestGenerationPrecondition(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	r := p.run("print:x")
	x, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:y", Generation: r.Generation, WaitMS: ptr(int64(api.MaxWaitMS))})
	if err != nil || x.State != api.Succeeded {
		t.Errorf("%+v %v", x, err)
	}
	if _, err := call[api.ResetResult](p, api.MethodReset, api.LifecycleParams{}); err != nil {
		t.Fatal(err)
	}
	_, err = call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:y", Generation: r.Generation})
	wantCode(t, err, api.CodeGeneration, "nothing was run")
	if n := len(w.sup.current().begun()); n != 0 {
		t.Errorf("%d cells were run", n)
	}
}

func (k *fakeKernel) begun() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.runs)
}

// Two clients, 32 rounds, cells that overlap: outputs and identities never mix.
func TestTwoClients(t *testing.T) {
	w := newWorld(t)
	var wg sync.WaitGroup
	for c := range 2 {
		p := w.client()
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 32 {
				mark := fmt.Sprintf("c%dr%d", c, i)
				r, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: strings.Repeat("print:"+mark+" ", 5), WaitMS: ptr(int64(api.MaxWaitMS))})
				if err != nil || r.State != api.Succeeded || r.ClientID != p.client || r.ConnectionID != p.id || text(r) != strings.Repeat(mark+"\n", 5) {
					t.Errorf("%s: %+v %v", mark, r, err)
					return
				}
			}
		}()
	}
	wg.Wait()
}

func TestClientIDs(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	if !strings.Contains(p.client, "-") {
		t.Errorf("automatic id %q", p.client)
	}
	init := func(p *peer, id *string) (api.InitResult, error) {
		return call[api.InitResult](p, api.MethodInit, api.InitParams{ClientID: id})
	}
	for _, id := range []*string{nil, &p.client} {
		if r, err := init(p, id); err != nil || r.ClientID != p.client || r.Runtime.Instructions == "" {
			t.Errorf("again: %+v %v", r, err)
		}
	}
	_, err := init(p, ptr("some-other"))
	wantCode(t, err, api.CodeClientBound, "different client ID")
	for _, bad := range []string{"", "with space", "a/b", strings.Repeat("a", 129), "é"} {
		q := w.dial()
		q.attach(api.AttachParams{})
		_, err := init(q, &bad)
		wantCode(t, err, rpc.CodeInvalidRequest)
		if r, err := init(q, nil); err != nil || r.Resumed {
			t.Errorf("the connection is of no use after a refusal: %v", err)
		}
	}
}

// One live connection per id; its end frees the id, however it ends.
func TestClientIDIsBoundOnce(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	s := w.until("attached", func(s *api.Status) bool { return s.ClientCount == 1 })
	if len(s.Connections) != 1 || *s.Connections[0].ClientID != "calm-otter" {
		t.Errorf("%+v", s.Connections)
	}
	p.conn.Close()
	q := w.client("calm-otter") // at once: the end of p is waited for, not raced
	r, err := call[api.InitResult](q, api.MethodInit, api.InitParams{})
	if err != nil || !r.Resumed || r.ClientID != "calm-otter" {
		t.Errorf("%+v %v", r, err)
	}
	// The same process opens a second connection while the first still stands: a front
	// end whose connection broke on one side. The newer one wins.
	x := w.dial()
	a := x.attach(api.AttachParams{ClientID: "calm-otter"})
	if a.ClientID != "calm-otter" {
		t.Errorf("%+v", a)
	}
	select {
	case <-q.conn.Done():
	case <-time.After(deadline):
		t.Error("two connections have one id")
	}
}

func TestAttachRefusals(t *testing.T) {
	w := newWorld(t)
	p := w.dial()
	_, err := call[api.AttachResult](p, api.MethodAttach, api.AttachParams{ConnectionID: p.id, Protocol: 99, Version: "9"})
	wantCode(t, err, api.CodeProtocol, "protocol 1", "99", "mypr-mcp restart")
	_, err = call[api.AttachResult](p, api.MethodAttach, map[string]any{"connection_id": p.id, "protocol": 99, "of_protocol_99": 1})
	wantCode(t, err, api.CodeProtocol)
	_, err = call[api.AttachResult](p, api.MethodAttach, api.AttachParams{ConnectionID: "no good", Protocol: 1})
	wantCode(t, err, rpc.CodeInvalidRequest)
	p.attach(api.AttachParams{})
	_, err = call[api.AttachResult](p, api.MethodAttach, api.AttachParams{ConnectionID: newID(), Protocol: 1})
	wantCode(t, err, rpc.CodeConflict)
	q := w.dial()
	_, err = call[api.AttachResult](q, api.MethodAttach, api.AttachParams{ConnectionID: p.id, Protocol: 1})
	wantCode(t, err, rpc.CodeConflict)
	_, err = call[any](q, "no-such-method", nil)
	wantCode(t, err, rpc.CodeInvalidRequest)
}

func TestAutomaticIDsRunOut(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.client()
	w.halt()
	s, _, err := store.Open(w.ws.Root, store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const left = "calm-otter"
	if err := s.Do(func(tx *store.Tx) error {
		for _, a := range adjectives() {
			for _, b := range animals() {
				if id := a + "-" + b; id != left {
					if _, err := tx.Reserve(id, true, 1); err != nil {
						return err
					}
				}
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	s.Close()
	w.start()
	if p.client != left {
		if q := w.client(); q.client != left {
			t.Errorf("got %q, the only one left is %q", q.client, left)
		}
	}
	q := w.dial()
	q.attach(api.AttachParams{})
	_, err = call[api.InitResult](q, api.MethodInit, api.InitParams{})
	wantCode(t, err, api.CodeClientExhausted, "65536")
	if r, err := call[api.InitResult](q, api.MethodInit, api.InitParams{ClientID: ptr("my-own")}); err != nil || r.ClientID != "my-own" {
		t.Errorf("%+v %v", r, err)
	}
}

func TestWordLists(t *testing.T) {
	for _, list := range [][]string{adjectives(), animals()} {
		seen := map[string]bool{}
		for _, word := range list {
			if seen[word] || !isID(word) || strings.ToLower(word) != word {
				t.Errorf("bad word %q", word)
			}
			seen[word] = true
		}
		if len(seen) != 256 {
			t.Errorf("%d words", len(seen))
		}
	}
}

// The kernel's death ends its cells with the true cause, and everybody is told once.
func TestKernelDies(t *testing.T) {
	w := newWorld(t, func(w *world) { w.sup.restart = true })
	p, q := w.client(), w.client()
	q.run("print:x")
	r := p.execute("print:before gate:never", 0)
	for r.Cursor == 0 {
		r = p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(api.MaxWaitMS))})
	}
	late := w.client() // attached after: it loses nothing when told nothing, but it is attached, so it is told
	old := r.Generation
	w.sup.die(control.UnitStatus{ActiveState: control.Failed, SubState: "failed", Result: "oom-kill", ExitKnown: true, ExitSignal: 9, MemoryMax: 512 << 20, MemoryPeak: 511 << 20})
	r = p.finish(r.ExecID)
	if r.State != api.Lost || text(r) != "before\n" || !strings.Contains(errText(r), "512 MiB") || !strings.Contains(errText(r), "out of memory") || r.ErrorInfo.Code != "lost" {
		t.Errorf("got %+v: %s", r, errText(r))
	}
	if d := r.ErrorInfo.Details; d["signal"] != 9.0 || d["cause"] != "oom-kill" || d["memory_max"] != float64(512<<20) {
		t.Errorf("details %v", d)
	}
	if n := r.Notice; n == nil || n.Kind != "kernel_died" || n.OldGeneration != old || !strings.Contains(n.Text, "memory") || !strings.Contains(n.Text, r.ExecID) {
		t.Errorf("notice %+v", n)
	}
	// The new kernel may be there before the cell's end is asked for: one of both answers tells.
	news := r.Runtime
	if r = p.run("print:again"); r.Runtime != nil {
		news = r.Runtime
	}
	if r.Notice != nil || r.Generation == old || news == nil || news.Generation != r.Generation {
		t.Errorf("told twice, or not of the new generation: %+v, %+v", r, news)
	}
	if r = p.run("print:again"); r.Runtime != nil {
		t.Errorf("the runtime is no news: %+v", r.Runtime)
	}
	for _, c := range []*peer{q, late} {
		if r = c.run("print:x"); r.Notice == nil || r.Notice.Kind != "kernel_died" || r.Notice.Generation != r.Generation {
			t.Errorf("%s was not told: %+v", c.client, r.Notice)
		}
		if r = c.run("print:x"); r.Notice != nil {
			t.Errorf("%s was told twice", c.client)
		}
	}
	if r := w.client().run("print:x"); r.Notice != nil {
		t.Errorf("somebody who came later was told: %+v", r.Notice)
	}
}

func TestNoticeReachesWhoWasAway(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	seen := p.run("print:x").Generation
	p.conn.Close()
	q := w.client("bold-fox")
	if _, err := call[api.ResetResult](q, api.MethodReset, api.LifecycleParams{Reason: "for the test"}); err != nil {
		t.Fatal(err)
	}
	// A front end that attaches again with what it showed last.
	p = w.dial()
	if a := p.attach(api.AttachParams{ClientID: "calm-otter", SeenGeneration: seen}); a.ClientID != "calm-otter" {
		t.Fatalf("%+v", a)
	}
	r := p.run("print:x")
	if r.Notice == nil || r.Notice.Kind != "reset" || r.Notice.OldGeneration != seen || !strings.Contains(r.Notice.Text, "for the test") {
		t.Errorf("notice %+v", r.Notice)
	}
	if p.run("print:x").Notice != nil {
		t.Error("told twice")
	}
	p.conn.Close()
	// A client that comes back by its id was told already, the other one was not told of the next.
	if _, err := call[api.ResetResult](q, api.MethodReset, api.LifecycleParams{}); err != nil {
		t.Fatal(err)
	}
	p = w.dial()
	p.attach(api.AttachParams{})
	i, err := call[api.InitResult](p, api.MethodInit, api.InitParams{ClientID: ptr("calm-otter")})
	if err != nil || i.Notice == nil || i.Notice.Kind != "reset" || strings.Contains(i.Notice.Text, "Before that") {
		t.Errorf("%+v %v", i.Notice, err)
	}
	p.conn.Close()
	p = w.dial()
	p.attach(api.AttachParams{})
	if i, err = call[api.InitResult](p, api.MethodInit, api.InitParams{ClientID: ptr("calm-otter")}); err != nil || i.Notice != nil {
		t.Errorf("told twice: %+v %v", i.Notice, err)
	}
	// The same in another manager.
	p.conn.Close()
	if _, err := call[api.ResetResult](q, api.MethodReset, api.LifecycleParams{}); err != nil {
		t.Fatal(err)
	}
	w.halt()
	w.start()
	p = w.dial()
	p.attach(api.AttachParams{})
	if i, err = call[api.InitResult](p, api.MethodInit, api.InitParams{ClientID: ptr("calm-otter")}); err != nil || i.Notice == nil {
		t.Errorf("not told after the manager's restart: %v", err)
	}
}

// An answer that has output of a cell does not say that it is queued, and one that says it
// has ended has, or announces, all of its output.
func TestStateIsAsNewAsTheOutput(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	for range 150 {
		r := p.execute("print:a print:b", 0)
		for {
			if r.State == api.Queued && len(r.Output) > 0 {
				t.Fatalf("queued, with output: %+v", r)
			}
			if api.Terminal(r.State) {
				break
			}
			r = p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(0))})
		}
		if text(r) != "a\nb\n" && !r.HasMore {
			t.Fatalf("%s, with output %q", r.State, text(r))
		}
	}
}

// A call that is repeated at another manager, and waits for the end of its cell there, is
// answered with what the manager of before has stored.
func TestRepeatedAtAnotherManager(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	for i := range 10 { // the cell may end before the call comes
		gate := fmt.Sprintf("gate%d", i)
		params := api.ExecuteParams{Code: "print:before gate:" + gate, RequestID: ptr("request-" + gate), WaitMS: ptr(int64(0))}
		r, err := call[api.ExecResult](p, api.MethodExecute, params)
		if err != nil {
			t.Fatal(err)
		}
		for r.Cursor == 0 {
			r = p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(api.MaxWaitMS))})
		}
		p.conn.Close()
		w.halt()
		w.start()
		w.manager()
		p = w.dial()
		p.attach(api.AttachParams{ClientID: "calm-otter"})
		p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(0))})
		got := make(chan error, 1)
		go func() {
			params.WaitMS = ptr(int64(api.MaxWaitMS))
			r, err := call[api.ExecResult](p, api.MethodExecute, params)
			if err == nil && (r.State != api.Succeeded || text(r) != "before\n") {
				err = fmt.Errorf("%s, with output %q", r.State, text(r))
			}
			got <- err
		}()
		for range i % 3 {
			p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(0))})
		}
		w.sup.current().open(gate)
		if err := <-got; err != nil {
			t.Fatal(err)
		}
	}
}

// A message ends a wait, once for each connection; afterwards calls wait as usual.
func TestMessageWakesOnce(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	begin := func(code string) api.ExecResult {
		r := p.execute(code, 0)
		for r.Cursor == 0 {
			r = p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(api.MaxWaitMS))})
		}
		return r
	}
	r := begin("print:a gate:g")
	if r.Inbox == nil || r.Inbox.Unacked != 0 {
		t.Errorf("inbox %+v", r.Inbox)
	}
	got := make(chan api.ExecResult)
	wait := func() {
		go func() {
			x, err := call[api.ExecResult](p, api.MethodPoll, api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(api.MaxWaitMS)), UntilDone: true})
			if err != nil {
				t.Error(err)
			}
			got <- x
		}()
	}
	wait()
	m := w.manager()
	if _, err := m.sendMessage("bold-fox", sendParams{To: "calm-otter", Text: strings.Repeat("ä", 5000)}); err != nil {
		t.Fatal(err)
	}
	x := <-got
	if x.State != api.Running || x.Inbox.Unacked != 1 || len(x.Inbox.Messages) != 1 || x.Inbox.Messages[0].From != "bold-fox" || !x.Inbox.Messages[0].Truncated {
		t.Errorf("got %+v %+v", x, x.Inbox)
	}
	if raw, _ := json.Marshal(x.Inbox); len(raw) > 4096 {
		t.Errorf("the preview has %d bytes", len(raw))
	}
	wait() // the same unread message does not wake it again
	w.sup.current().open("g")
	if x = <-got; x.State != api.Succeeded || x.Inbox.Unacked != 1 {
		t.Errorf("got %+v %+v", x, x.Inbox)
	}
	// Nor does it after a reconnect to another manager, where a newer one does.
	r = begin("print:a gate:h")
	if _, err := m.sendMessage("bold-fox", sendParams{To: "calm-otter", Text: "while nobody waits"}); err != nil {
		t.Fatal(err)
	}
	unseen := x.Inbox.Newest
	p.conn.Close()
	w.halt()
	w.start()
	w.manager()
	p = w.dial()
	p.attach(api.AttachParams{ClientID: "calm-otter", SeenMessage: unseen})
	wait()
	if x = <-got; api.Terminal(x.State) || x.Inbox.Unacked != 2 {
		t.Errorf("got %+v %+v", x, x.Inbox)
	}
	p.conn.Close()
	w.halt()
	w.start()
	m = w.manager()
	p = w.dial()
	p.attach(api.AttachParams{ClientID: "calm-otter", SeenMessage: x.Inbox.Newest})
	wait()
	w.sup.current().open("h")
	if x = <-got; x.State != api.Succeeded || x.Inbox.Unacked != 2 {
		t.Errorf("got %+v %+v", x, x.Inbox)
	}
	if _, err := m.acknowledge("calm-otter", []int64{x.Inbox.Newest}); err != nil {
		t.Fatal(err)
	}
	// init shows what is unread, so that it does not wake the first call either.
	p.conn.Close()
	p = w.dial()
	p.attach(api.AttachParams{})
	if i, err := call[api.InitResult](p, api.MethodInit, api.InitParams{ClientID: ptr("calm-otter")}); err != nil || i.Inbox.Unacked != 1 {
		t.Errorf("%+v %v", i, err)
	}
	if x := p.run("print:x"); x.Inbox.Unacked != 1 {
		t.Errorf("inbox %+v", x.Inbox)
	}
	for i := range 6 {
		if _, err := m.sendMessage("bold-fox", sendParams{To: "calm-otter", Text: fmt.Sprint(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if x := p.execute("print:x", 0); x.Inbox.Unacked != 7 || !x.Inbox.HasMore {
		t.Errorf("inbox %+v", x.Inbox)
	}
	if _, err := m.sendMessage("bold-fox", sendParams{To: "nobody", Text: "x"}); rpc.CodeOf(err) != rpc.CodeNotFound {
		t.Errorf("to nobody: %v", err)
	}
	// What it was shown may be of a history that was deleted: then numbers begin again.
	p.conn.Close()
	p = w.dial()
	p.attach(api.AttachParams{ClientID: "calm-otter", SeenMessage: 1 << 40})
	wakes := func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		for c := range m.conns {
			if c.id == p.id {
				_, news := c.wakes()
				return news
			}
		}
		t.Error("not attached")
		return false
	}
	if wakes() {
		t.Error("what is unread wakes again")
	}
	if _, err := m.sendMessage("bold-fox", sendParams{To: "calm-otter", Text: "new"}); err != nil {
		t.Fatal(err)
	}
	if !wakes() {
		t.Error("a new message wakes nobody")
	}
}

// The end of a connection is seen by its reader and by who takes its client: the second
// time is of no account.
func TestEndOfAConnectionSeenTwice(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	m := w.manager()
	m.mu.Lock()
	first := m.clients["calm-otter"].conn
	m.mu.Unlock()
	p.conn.Close()
	q := w.dial()
	if a := q.attach(api.AttachParams{ClientID: "calm-otter"}); a.ClientID != "calm-otter" {
		t.Fatalf("%+v", a)
	}
	first.ended()
	if _, err := m.sendMessage("calm-otter", sendParams{To: "calm-otter", Text: "x"}); err != nil {
		t.Fatal(err)
	}
	r := q.execute("gate:g", api.MaxWaitMS) // which the message ends, or nothing
	if r.State != api.Queued && r.State != api.Running || r.Inbox == nil || r.Inbox.Unacked != 1 {
		t.Errorf("%+v %+v", r, r.Inbox)
	}
	w.sup.current().open("g")
	q.finish(r.ExecID)
}

func TestBlocked(t *testing.T) {
	w := newWorld(t)
	p, q := w.client("calm-otter"), w.client("bold-fox")
	r := p.execute("print:a block gate:g unblock", 0)
	for r.Cursor == 0 {
		r = p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(api.MaxWaitMS))})
	}
	w.until("blocked", func(s *api.Status) bool { return s.Kernel.State == "blocked" })
	x := q.execute("gate:x", 0)
	if b := x.Blocked; b == nil || b.ExecID != r.ExecID || b.ClientID != "calm-otter" || b.Seconds < 1 || b.Where != "cell line 3" {
		t.Errorf("blocked %+v", x.Blocked)
	}
	w.sup.current().open("g")
	p.finish(r.ExecID)
	s := w.until("unblocked", func(s *api.Status) bool { return s.Kernel.Blocked == nil && s.Kernel.State == "ready" })
	if len(s.Active)+len(s.Queued) != 1 {
		t.Errorf("%+v", s)
	}
	w.sup.current().open("x")
	q.finish(x.ExecID)
}

func TestInterrupt(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	a, b := p.execute("gate:a", 0), p.execute("gate:b", 0)
	w.until("both run", func(s *api.Status) bool { return len(s.Active) == 2 })
	_, err := call[api.InterruptResult](p, api.MethodInterrupt, api.InterruptParams{})
	wantCode(t, err, rpc.CodeConflict, a.ExecID, b.ExecID)
	r := p.poll(api.PollParams{ExecID: a.ExecID, Interrupt: true, WaitMS: ptr(int64(api.MaxWaitMS))})
	if r.State != api.Cancelled || r.Interrupt != "cancelled" {
		t.Errorf("got %+v", r)
	}
	x, err := call[api.InterruptResult](p, api.MethodInterrupt, api.InterruptParams{})
	if err != nil || x.ExecID != b.ExecID || x.Outcome != "cancelled" || x.State != api.Cancelled {
		t.Errorf("got %+v %v", x, err)
	}
	_, err = call[api.InterruptResult](p, api.MethodInterrupt, api.InterruptParams{})
	wantCode(t, err, rpc.CodeConflict)
	if x, err = call[api.InterruptResult](p, api.MethodInterrupt, api.InterruptParams{ExecID: a.ExecID}); err != nil || x.Outcome != "finished" {
		t.Errorf("got %+v %v", x, err)
	}
	if r = p.poll(api.PollParams{ExecID: a.ExecID, Interrupt: true}); r.Interrupt != "finished" {
		t.Errorf("got %+v", r)
	}
	_, err = call[api.InterruptResult](p, api.MethodInterrupt, api.InterruptParams{ExecID: newID()})
	wantCode(t, err, rpc.CodeNotFound)
}

// A cell that no kernel was given is taken out of the queue; nothing of it runs.
func TestInterruptBeforeTheKernelIsThere(t *testing.T) {
	gate := make(chan struct{})
	w := newWorld(t, func(w *world) {
		prepare := w.opts.Prepare
		w.opts.Prepare = func(ctx context.Context, run kernel.Runner, progress func(string)) (*kernel.Launch, error) {
			progress("installing IPython")
			select {
			case <-gate:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			return prepare(ctx, run, progress)
		}
	})
	p := w.client()
	r := p.execute("print:x", 0)
	w.until("preparing", func(s *api.Status) bool {
		return s.Kernel.State == "preparing" && s.Kernel.Detail == "installing IPython"
	})
	r = p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(0))})
	if r.State != api.Queued || r.ExecutionGeneration != "" || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0].Text, "installing IPython") {
		t.Errorf("got %+v", r)
	}
	other := p.execute("print:y", 0)
	if other.QueueAhead != 1 {
		t.Errorf("queue ahead %d", other.QueueAhead)
	}
	r = p.poll(api.PollParams{ExecID: r.ExecID, Interrupt: true, WaitMS: ptr(int64(api.MaxWaitMS))})
	if r.State != api.Cancelled || r.Interrupt != "dequeued" || !strings.Contains(errText(r), "nothing of it was run") {
		t.Errorf("got %+v", r)
	}
	close(gate)
	if other = p.finish(other.ExecID); other.State != api.Succeeded || other.ExecutionGeneration != other.Generation {
		t.Errorf("got %+v", other)
	}
	if begun := w.sup.current().begun(); !slices.Equal(begun, []string{other.ExecID}) {
		t.Errorf("begun %v", begun)
	}
}

func TestKernelCannotBePrepared(t *testing.T) {
	attempts := 0
	again := make(chan struct{})
	w := newWorld(t, func(w *world) {
		prepare := w.opts.Prepare
		w.opts.Prepare = func(ctx context.Context, run kernel.Runner, progress func(string)) (*kernel.Launch, error) {
			switch attempts++; attempts {
			case 1:
				return nil, rpc.Errorf(rpc.CodeUnavailable, "no Python found").WithHint("install one")
			case 2:
				<-again
				return nil, errors.New("still none")
			}
			return prepare(ctx, run, progress)
		}
	})
	p := w.client()
	w.until("down", func(s *api.Status) bool {
		return s.Kernel.State == "down" && !s.Healthy && strings.Contains(s.HealthError, "no Python found")
	})
	r := p.execute("print:x", 0) // tries again
	close(again)
	r = p.finish(r.ExecID)
	if r.State != api.FailedCell || r.ErrorInfo.Code != api.CodeKernel || !strings.Contains(errText(r), "still none") || !strings.Contains(errText(r), "nothing of this cell was run") {
		t.Errorf("got %+v: %s", r, errText(r))
	}
	if r = p.run("print:x"); r.State != api.Succeeded {
		t.Errorf("got %+v", r)
	}
}

func TestKernelDoesNotStart(t *testing.T) {
	w := newWorld(t, func(w *world) { w.sup.refuse = "python: bad ELF header" })
	p := w.client()
	r := p.run("print:x")
	if r.State != api.FailedCell || r.ErrorInfo.Code != api.CodeKernel || !strings.Contains(errText(r), "bad ELF header") {
		t.Errorf("got %+v: %s", r, errText(r))
	}
	w.sup.mu.Lock()
	w.sup.refuse = ""
	u := w.sup.lastUnit
	w.sup.mu.Unlock()
	if u == nil || u.Service.ExecStart[0].Path != "/bin/python" || !slices.Contains(u.Service.Environment, "MYPR_KERNEL_SOCKET="+w.opts.KernelSocket) || !u.Service.ExactEnvironment {
		t.Errorf("unit %+v", u)
	}
	if r, err := call[api.ResetResult](p, api.MethodReset, api.LifecycleParams{}); err != nil || r.Generation == "" {
		t.Errorf("reset: %+v %v", r, err)
	}
	if r = p.run("print:x"); r.State != api.Succeeded {
		t.Errorf("got %+v", r)
	}
}

// A kernel that the supervisor does not know is sent away, and disturbs nobody.
func TestStrangeKernelIsRejected(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.client()
	r := p.run("set:a=1")
	k := &fakeKernel{w: w, gen: newID(), dead: make(chan struct{}), gates: map[string]chan struct{}{}}
	k.wg.Add(1)
	go k.serve()
	select {
	case <-k.dead:
	case <-time.After(deadline):
		t.Error("not rejected")
	}
	k.kill()
	k.wg.Wait()
	if x := p.run("get:a"); text(x) != "1" || x.Generation != r.Generation {
		t.Errorf("got %+v", x)
	}
}

func TestReset(t *testing.T) {
	w := newWorld(t)
	p, q := w.client("calm-otter"), w.client("bold-fox")
	q.run("set:a=1")
	r := p.execute("print:x gate:never", 0)
	_, err := call[api.ResetResult](q, api.MethodReset, api.LifecycleParams{})
	wantCode(t, err, api.CodeActiveWork, r.ExecID)
	x, err := call[api.ResetResult](q, api.MethodReset, api.LifecycleParams{Force: true, Reason: "by hand"})
	if err != nil || !x.Reset || x.Generation == "" || x.Generation == r.Generation {
		t.Errorf("%+v %v", x, err)
	}
	r = p.finish(r.ExecID)
	if r.State != api.Cancelled || !strings.Contains(errText(r), "reset") || !strings.Contains(errText(r), "by hand") || r.Notice == nil || r.Notice.Kind != "reset" {
		t.Errorf("got %+v: %s", r, errText(r))
	}
	if got := q.run("get:a"); text(got) != "" || got.Generation != x.Generation {
		t.Errorf("memory survived: %+v", got)
	}
	// Without any kernel, or any work, it works as well.
	w.sup.die(control.UnitStatus{ActiveState: control.Failed, SubState: "failed", Result: "signal", ExitKnown: true, ExitSignal: 11})
	if x, err = call[api.ResetResult](q, api.MethodReset, api.LifecycleParams{}); err != nil || x.Generation == "" {
		t.Errorf("%+v %v", x, err)
	}
}

// Nobody's memory is given up for a kernel that plainly cannot be started.
func TestNoKernelIsEndedForNone(t *testing.T) {
	var none atomic.Pointer[error]
	why := func() error {
		if e := none.Load(); e != nil {
			return *e
		}
		return nil
	}
	for _, what := range []string{"Python", "unit file"} {
		t.Run(what, func(t *testing.T) {
			none.Store(nil)
			w := newWorld(t, func(w *world) {
				if what == "Python" {
					w.opts.Available = func(context.Context, kernel.Runner) error { return why() }
					return
				}
				unit := w.opts.KernelUnit
				w.opts.KernelUnit = func() (*spec.Unit, error) {
					if err := why(); err != nil {
						return nil, err
					}
					return unit()
				}
			})
			p := w.client()
			gen := p.run("set:a=1").Generation
			none.Store(ptr(errors.New("there is none here")))
			_, err := call[api.ResetResult](p, api.MethodReset, api.LifecycleParams{Force: true})
			wantCode(t, err, rpc.CodeUnavailable, "there is none here")
			for _, version := range []string{"", "1.0"} {
				_, err = call[api.RestartResult](p, api.MethodRestart, api.LifecycleParams{Force: true, Version: version})
				wantCode(t, err, rpc.CodeUnavailable, "there is none here")
			}
			k := w.sup.current()
			for _, verb := range []string{"reset", "restart"} {
				r := p.execute("call:"+verb+`|{"force":true} gate:`+verb, 0)
				<-k.answered
				k.open(verb)
				if r = p.finish(r.ExecID); r.State != api.Succeeded {
					t.Errorf("%s from a cell: %+v", verb, r)
				}
			}
			k.mu.Lock()
			for _, r := range k.results {
				if !strings.Contains(string(r), "there is none here") {
					t.Errorf("from a cell: %s", r)
				}
			}
			k.mu.Unlock()
			if x := p.run("get:a"); text(x) != "1" || x.Generation != gen {
				t.Errorf("memory is gone: %+v", x)
			}
			// Another version may know how to start one, and a kernel that is kept needs none.
			for _, params := range []api.LifecycleParams{{Version: "2.0"}, {KeepKernel: true}} {
				cli := w.dial()
				if _, err := call[api.RestartResult](cli, api.MethodRestart, params); err != nil {
					t.Errorf("%+v: %v", params, err)
				}
				cli.conn.Close()
				w.until("called off", func(s *api.Status) bool { return s.Restarting == "" })
			}
		})
	}
}

// What could not be told before is told after: there is no kernel, and the old one is gone.
func TestResetWithoutANewKernel(t *testing.T) {
	var none atomic.Bool
	w := newWorld(t, func(w *world) {
		prepare := w.opts.Prepare
		w.opts.Prepare = func(ctx context.Context, run kernel.Runner, progress func(string)) (*kernel.Launch, error) {
			if none.Load() {
				return nil, errors.New("the download failed")
			}
			return prepare(ctx, run, progress)
		}
	})
	p := w.client()
	p.run("set:a=1")
	await := func(state string) {
		t.Helper()
		if s, err := call[api.Status](p, api.MethodStatus, api.StatusParams{AwaitKernel: true}); err != nil || s.Kernel.State != state {
			t.Errorf("the kernel is %s, not %s: %v", s.Kernel.State, state, err)
		}
	}
	await("ready")
	w.sup.die(control.UnitStatus{ActiveState: control.Failed, SubState: "failed", Result: "signal", ExitKnown: true, ExitSignal: 11})
	w.until("its end is known", func(s *api.Status) bool { return s.Generation == "" })
	await("ready")
	none.Store(true)
	_, err := call[api.ResetResult](p, api.MethodReset, api.LifecycleParams{})
	wantCode(t, err, api.CodeKernel, "memory is gone", "the download failed")
	_, err = call[api.ResetResult](p, api.MethodReset, api.LifecycleParams{})
	wantCode(t, err, api.CodeKernel, "the download failed")
	if strings.Contains(err.Error(), "gone") {
		t.Errorf("there was no memory that time: %v", err)
	}
	await("down")
	none.Store(false)
	if x, err := call[api.ResetResult](p, api.MethodReset, api.LifecycleParams{}); err != nil || x.Generation == "" {
		t.Errorf("%+v %v", x, err)
	}
}

// The supervisor's events come on another way than its answers: what they tell of a
// kernel that is gone must not be taken for the new one.
func TestResetWhileEventsLag(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	old := p.run("set:a=1").Generation
	w.sup.mu.Lock()
	w.sup.hold = true
	w.sup.mu.Unlock()
	x, err := call[api.ResetResult](p, api.MethodReset, api.LifecycleParams{})
	if err != nil || x.Generation == old {
		t.Fatalf("%+v %v", x, err)
	}
	busy := p.execute("gate:g", 0)
	w.sup.letGo()
	if r := p.run("get:a"); r.Generation != x.Generation || text(r) != "" {
		t.Errorf("got %+v", r)
	}
	w.sup.current().open("g")
	if r := p.finish(busy.ExecID); r.State != api.Succeeded {
		t.Errorf("got %+v: %s", r, errText(r))
	}
	// By the time of this end, the late news has been taken: it was not that of the new kernel.
	w.sup.die(control.UnitStatus{ActiveState: control.Failed, SubState: "failed", Result: "signal", ExitKnown: true, ExitSignal: 11})
	w.until("its end is known", func(s *api.Status) bool { return s.Generation == "" })
	if r := p.run("print:x"); r.Notice == nil || !strings.Contains(r.Notice.Text, "signal 11") {
		t.Errorf("notice %+v", r.Notice)
	}
}

func TestResetFromACell(t *testing.T) {
	w := newWorld(t)
	p, q := w.client("calm-otter"), w.client("bold-fox")
	busy := q.execute("gate:b", 0)
	w.until("runs", func(s *api.Status) bool { return len(s.Active) == 1 })
	// Refused while others work: the answer goes to Python.
	k := w.sup.current()
	r := p.execute(`call:reset|{} gate:asked`, 0)
	<-k.answered
	k.open("asked")
	if r = p.finish(r.ExecID); r.State != api.Succeeded {
		t.Errorf("got %+v", r)
	}
	k.mu.Lock()
	if len(k.results) != 1 || !strings.Contains(string(k.results[0]), busy.ExecID) {
		t.Errorf("answers %s", k.results)
	}
	k.mu.Unlock()
	r = p.run(`call:reset|{"force":true} gate:never`)
	if r.State != api.Succeeded || !strings.Contains(text(r), "Session reset") || strings.Contains(text(r), "Traceback") || r.Notice == nil {
		t.Errorf("got %+v %s", r, errText(r))
	}
	if r.Generation == r.ExecutionGeneration || !strings.Contains(text(r), r.Generation) {
		t.Errorf("generations: %+v", r)
	}
	if b := q.finish(busy.ExecID); b.State != api.Cancelled || !strings.Contains(errText(b), "calm-otter") {
		t.Errorf("got %+v: %s", b, errText(b))
	}
}

func TestStop(t *testing.T) {
	w := newWorld(t)
	p, q := w.client(), w.client()
	r := p.execute("gate:never", 0)
	cli := w.dial()
	_, err := call[api.StopResult](cli, api.MethodStop, api.LifecycleParams{})
	wantCode(t, err, api.CodeActiveWork, r.ExecID)
	s, err := call[api.StopResult](cli, api.MethodStop, api.LifecycleParams{Force: true, Reason: "bedtime"})
	if err != nil || !s.Stopping || s.Cancelled != 1 {
		t.Errorf("%+v %v", s, err)
	}
	if r = p.finish(r.ExecID); r.State != api.Cancelled || !strings.Contains(errText(r), "bedtime") {
		t.Errorf("got %+v: %s", r, errText(r))
	}
	_, err = call[api.ExecResult](q, api.MethodExecute, api.ExecuteParams{Code: "print:x"})
	wantCode(t, err, rpc.CodeUnavailable, "bedtime")
	for _, c := range []*peer{p, q} {
		select {
		case n := <-c.notes:
			if !strings.Contains(n, "stopping") || !strings.Contains(n, "bedtime") {
				t.Errorf("told %q", n)
			}
		case <-time.After(deadline):
			t.Error("not told")
		}
	}
	// Whoever asked goes away without stopping: life goes on.
	cli.conn.Close()
	w.until("not stopping", func(s *api.Status) bool { return !s.Stopping })
	if r := p.run("print:x"); r.State != api.Succeeded {
		t.Errorf("got %+v", r)
	}
	// Stopped for good: the next runtime tells a client that comes back.
	id, gen := p.client, p.run("print:x").Generation
	cli = w.dial()
	if s, err := call[api.StopResult](cli, api.MethodStop, api.LifecycleParams{Reason: "for good"}); err != nil || s.Cancelled != 0 {
		t.Errorf("%+v %v", s, err)
	}
	w.halt()
	w.sup.die(control.UnitStatus{ActiveState: control.Inactive, SubState: "dead", Result: "success", ExitKnown: true})
	w.opts.Instance = newID()
	w.start()
	c := w.dial()
	c.attach(api.AttachParams{})
	i, err := call[api.InitResult](c, api.MethodInit, api.InitParams{ClientID: &id})
	if err != nil || i.Notice == nil || i.Notice.Kind != "stop" || i.Notice.OldGeneration != gen || !strings.Contains(i.Notice.Text, "for good") {
		t.Errorf("%+v %v", i.Notice, err)
	}
}

func TestRestart(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	old := p.run("set:a=1").Generation
	cli := w.dial()
	r, err := call[api.RestartResult](cli, api.MethodRestart, api.LifecycleParams{Target: "/new/mypr-mcp", Version: "2.0", Reason: "upgrade"})
	if err != nil || r.State != "stopping" || r.OldGeneration != old || r.Target != "/new/mypr-mcp" {
		t.Fatalf("%+v %v", r, err)
	}
	// A cell that comes now is for the next manager: its connection ends unanswered.
	held := make(chan error)
	go func() {
		_, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:x"})
		held <- err
	}()
	_, err = call[api.RestartResult](cli, api.MethodRestart, api.LifecycleParams{})
	wantCode(t, err, rpc.CodeConflict, r.ID)
	w.halt()
	if err := <-held; !errors.Is(err, rpc.ErrClosed) {
		t.Errorf("a cell was answered with %v", err)
	}
	w.opts.Version = "2.0"
	w.start()
	p = w.client("calm-otter")
	x := p.run("get:a")
	if text(x) != "" || x.Generation == old {
		t.Errorf("memory survived: %+v", x)
	}
	rec := w.restartRecord(r.ID, "succeeded")
	if rec.NewVersion != "2.0" || rec.NewGeneration != x.Generation {
		t.Errorf("record %+v", rec)
	}
	// Called off when whoever asked goes away before the manager ends.
	cli = w.dial()
	r, err = call[api.RestartResult](cli, api.MethodRestart, api.LifecycleParams{})
	if err != nil {
		t.Fatal(err)
	}
	cli.conn.Close()
	w.until("not restarting", func(s *api.Status) bool { return s.Restarting == "" })
	if rec := w.restartRecord(r.ID, "failed"); rec.Error == "" {
		t.Errorf("record %+v", rec)
	}
	if x := p.run("print:x"); x.State != api.Succeeded {
		t.Errorf("got %+v", x)
	}
	// With the kernel kept, work goes on through it.
	gen := p.run("set:b=2").Generation
	busy := p.execute("gate:b print:end", 0)
	cli = w.dial()
	if r, err = call[api.RestartResult](cli, api.MethodRestart, api.LifecycleParams{KeepKernel: true}); err != nil {
		t.Fatal(err)
	}
	w.halt()
	w.start()
	p = w.client("calm-otter")
	if x := p.run("get:b"); text(x) != "2" || x.Generation != gen || x.Notice != nil {
		t.Errorf("got %+v", x)
	}
	w.sup.current().open("b")
	if x := p.finish(busy.ExecID); x.State != api.Succeeded || text(x) != "end\n" {
		t.Errorf("got %+v", x)
	}
	w.restartRecord(r.ID, "succeeded")
}

// A request whose connection has ended before the manager came to it would begin what
// nobody is left to complete or to call off.
func TestLifecycleOfOneWhoIsGone(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	c := &connection{m: w.manager()}
	c.ended()
	if r, err := c.stop(t.Context(), api.LifecycleParams{}); err == nil {
		t.Errorf("stop: %+v", r)
	}
	if r, err := c.m.restart(api.LifecycleParams{KeepKernel: true}, nil, c); err == nil {
		t.Errorf("restart: %+v", r)
	}
	if x := p.run("print:x"); x.State != api.Succeeded {
		t.Errorf("got %+v", x)
	}
}

// restartRecord waits until the record says so.
func (w *world) restartRecord(id, state string) (rec restartRecord) {
	w.t.Helper()
	w.until("restart "+state, func(*api.Status) bool {
		raw, err := os.ReadFile(filepath.Join(w.ws.Root, "restarts", id+".json"))
		if err != nil || json.Unmarshal(raw, &rec) != nil {
			return false
		}
		return rec.State == state
	})
	return rec
}

func TestRestartFromACell(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	r := p.execute(`print:now call:restart|{} gate:never`, 0)
	w.until("asked", func(*api.Status) bool {
		w.sup.mu.Lock()
		defer w.sup.mu.Unlock()
		u := w.sup.lastUnit
		return u != nil && strings.HasPrefix(u.Name, "restart-") && u.Service.ExecStart[0].Path == "/bin/mypr-mcp" && slices.Contains(u.Service.ExecStart[0].Args, "replace")
	})
	if x := p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(0))}); x.State != api.Restarting {
		t.Errorf("state %s", x.State)
	}
	w.halt()
	w.start()
	p = w.client("calm-otter")
	r = p.finish(r.ExecID)
	if r.State != api.Succeeded || !strings.Contains(text(r), "now\n") || !strings.Contains(text(r), "completed") {
		t.Errorf("got %+v: %s", r, text(r))
	}
}

func TestLogs(t *testing.T) {
	w := newWorld(t)
	p, q := w.client("calm-otter"), w.client("bold-fox")
	page, err := call[api.LogsPage](p, api.MethodLogs, api.LogsParams{})
	if err != nil {
		t.Fatal(err)
	}
	next := make(chan api.LogsPage)
	go func() {
		x, err := call[api.LogsPage](q, api.MethodLogs, api.LogsParams{Cursor: &page.Cursor, WaitMS: api.MaxWaitMS, ClientID: "calm-otter"})
		if err != nil {
			t.Error(err)
		}
		next <- x
	}()
	q.run("print:other")
	r := p.run("print:hello")
	x := <-next
	if len(x.Events) == 0 || x.Events[0].Event != "queued" || x.Events[0].ID != r.ExecID {
		t.Errorf("got %+v", x)
	}
	all, err := call[api.LogsPage](p, api.MethodLogs, api.LogsParams{Cursor: &page.Cursor, Limit: 200, ClientID: "calm-otter"})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range all.Events {
		names = append(names, e.Event)
		if e.Event == "output" && e.Data["text"] != "hello\n" {
			t.Errorf("output line %+v", e)
		}
	}
	if !slices.Equal(names, []string{"queued", "running", "output", "succeeded"}) {
		t.Errorf("events %v", names)
	}
	for _, bad := range []api.LogsParams{{Limit: 201}, {Limit: -1}} {
		_, err = call[api.LogsPage](p, api.MethodLogs, bad)
		wantCode(t, err, rpc.CodeInvalidRequest)
	}
	_, err = call[api.LogsPage](p, api.MethodLogs, api.LogsParams{Cursor: ptr(int64(-1))})
	wantCode(t, err, api.CodeInvalidCursor)
}

func TestHistory(t *testing.T) {
	w := newWorld(t)
	p, q := w.client("calm-otter"), w.client("bold-fox")
	var ids []string
	for i := range 5 {
		ids = append(ids, p.run(fmt.Sprint("print:", i)).ExecID)
		q.run("print:x")
	}
	var got []string
	var cursor *int64
	for {
		h, err := call[api.HistoryPage](q, api.MethodHistory, api.HistoryParams{ClientID: "calm-otter", Limit: 2, Cursor: cursor})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range h.Items {
			got = append(got, r.ID)
		}
		if cursor = h.NextCursor; cursor == nil {
			break
		}
	}
	slices.Reverse(got)
	if !slices.Equal(got, ids) {
		t.Errorf("got %v, want %v", got, ids)
	}
	r, err := call[api.Record](q, api.MethodRecord, api.RecordParams{ID: ids[2]})
	if err != nil || r.Code != "print:2" || r.State != api.Succeeded || r.OutputEvents != 1 || r.ClientID != "calm-otter" {
		t.Errorf("got %+v %v", r, err)
	}
	_, err = call[api.Record](q, api.MethodRecord, api.RecordParams{ID: "nobody"})
	wantCode(t, err, rpc.CodeNotFound)
}

func TestWorkspaceMoved(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	r := p.run("print:x")
	if err := os.Rename(w.ws.Dir, w.ws.Dir+".elsewhere"); err != nil {
		t.Fatal(err)
	}
	_, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:x"})
	wantCode(t, err, api.CodeWorkspaceMoved, "workspace moved")
	q := w.dial()
	_, err = call[api.AttachResult](q, api.MethodAttach, api.AttachParams{ConnectionID: q.id, Protocol: 1})
	wantCode(t, err, api.CodeWorkspaceMoved)
	s, err := call[api.Status](q, api.MethodStatus, api.StatusParams{})
	if err != nil || s.WorkspaceAvailable || s.WorkspaceProblem == "" {
		t.Errorf("%+v %v", s, err)
	}
	if x := p.poll(api.PollParams{ExecID: r.ExecID}); text(x) != "x\n" {
		t.Errorf("got %+v", x)
	}
	if _, err := call[api.StopResult](q, api.MethodStop, api.LifecycleParams{}); err != nil {
		t.Error(err)
	}
	w.halt()
	if err := os.Rename(w.ws.Dir+".elsewhere", w.ws.Dir); err != nil { // for the clean-up of the test
		t.Fatal(err)
	}
}

func TestProgress(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.dial()
	p.attach(api.AttachParams{Progress: true})
	if _, err := call[api.InitResult](p, api.MethodInit, api.InitParams{}); err != nil {
		t.Fatal(err)
	}
	done := make(chan api.ExecResult)
	go func() {
		r, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:one print:two gate:g", RequestID: ptr("req"), WaitMS: ptr(int64(api.MaxWaitMS))})
		if err != nil {
			t.Error(err)
		}
		done <- r
	}()
	select {
	case <-p.notes:
	case <-time.After(deadline):
		t.Error("no progress")
	}
	w.sup.current().open("g")
	r := <-done
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.progress) == 0 || p.progress[0].ExecID != r.ExecID || p.progress[0].RequestID != "req" || p.progress[0].LastLine != "two" || p.progress[0].State != api.Running || p.progress[0].Seconds < 4 {
		t.Errorf("progress %+v", p.progress)
	}
}

func TestWatchdog(t *testing.T) {
	t.Setenv("WATCHDOG_USEC", "40000")
	states := make(chan string, 100)
	w := newWorld(t, func(w *world) {
		w.opts.Notify = func(s string) error {
			select {
			case states <- s:
			default:
			}
			return nil
		}
	})
	var seen []string
	for !slices.Contains(seen, "READY=1") || !slices.Contains(seen, "WATCHDOG=1") || !slices.ContainsFunc(seen, func(s string) bool { return strings.HasPrefix(s, "STATUS=1 clients") }) {
		if len(seen) == 0 {
			w.client()
		}
		select {
		case s := <-states:
			seen = append(seen, s)
		case <-time.After(deadline):
			t.Fatalf("saw %v", seen)
		}
	}
}

// A second manager is refused by the lock.
func TestManagerLock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.client()
	if err := Run(context.Background(), w.opts); err == nil || !strings.Contains(err.Error(), w.ws.Dir) {
		t.Errorf("got %v", err)
	}
}

// Ended executions are forgotten within bounds and read from disk afterwards.
func TestCacheIsBounded(t *testing.T) {
	w := newWorld(t, func(w *world) { w.opts.Limits.CompletedRecords, w.opts.Limits.CacheBytes = 4, 1<<20 })
	p := w.client()
	first := p.run("print:first big:300000")
	for i := range 6 {
		p.run(fmt.Sprint("print:", i))
	}
	m := w.manager()
	m.mu.Lock()
	n := len(m.runs)
	m.mu.Unlock()
	if n != 4 {
		t.Errorf("%d are kept, want 4", n)
	}
	r := p.poll(api.PollParams{ExecID: first.ExecID, MaxBytes: ptr(int64(1024))})
	if r.State != api.Succeeded || !strings.HasPrefix(text(r), "first\n") || !r.HasMore || r.Notice != nil {
		t.Errorf("got %+v", r)
	}
	total := len(text(r))
	for r.HasMore {
		r = p.poll(api.PollParams{ExecID: first.ExecID, Cursor: &r.Cursor, MaxBytes: ptr(int64(api.MaxBytes))})
		total += len(text(r))
	}
	if total != 300000+6 {
		t.Errorf("%d bytes", total)
	}
}

// A record whose journal is gone says so, and cursors of before still work.
func TestMissingJournal(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	r := p.run("print:a err:b print:c")
	w.halt()
	if err := os.Remove(filepath.Join(w.ws.Root, "runs", r.ExecID+".jsonl")); err != nil {
		t.Fatal(err)
	}
	w.start()
	p = w.client()
	x := p.poll(api.PollParams{ExecID: r.ExecID, Cursor: ptr(int64(2))})
	if x.State != api.Succeeded || len(x.Output) != 0 || x.HasMore || len(x.Warnings) != 1 || x.Warnings[0].Code != "journal_truncated" {
		t.Errorf("got %+v", x)
	}
}

// A cell that was submitted as its kernel ended is told how that was, and once.
func TestCellOfAnEndedKernel(t *testing.T) {
	state, info := endInfo("g", nil, control.UnitStatus{Name: "kernel.service", InvocationID: "g", ExitKnown: true, ExitSignal: 9})
	m := &Manager{lastEnd: endedGeneration{"g", state, info}}
	for _, generation := range []string{"g", "g", "earlier"} {
		state, info := m.endOf(generation)
		want := "lost: the Python kernel was killed by signal 9 (SIGKILL); nothing of it was run"
		if generation != "g" {
			want = "lost: its kernel, generation earlier, had ended before it began; nothing of it was run"
		}
		if state != api.Lost || info.Message != want {
			t.Errorf("%s: %s, %q", generation, state, info.Message)
		}
	}
}
