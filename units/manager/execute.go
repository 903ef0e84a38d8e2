package manager

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
	"mypr/units/manager/journal"
	"mypr/units/manager/store"
)

const (
	progressFirst = 5 * time.Second
	progressEvery = 10 * time.Second
	// How long the kernel has to answer an interrupt before the outcome is "pending".
	interruptAnswer = 2 * time.Second
)

// answer is api.ExecResult with the events as they are in the journal, which saves
// decoding and encoding them again.
type answer struct {
	api.ExecResult
	Output []json.RawMessage `json:"output"`
}

func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails (Go 1.24)
	return hex.EncodeToString(b[:])
}

// waitFor is the wait that a call asked for, or else the usual one, and what it was cut
// to when that differs.
func waitFor(ms, usual *int64) (wait time.Duration, clamped int64) {
	if ms == nil {
		ms = usual
	}
	switch {
	case *ms > api.MaxWaitMS:
		return api.MaxWaitMS * time.Millisecond, api.MaxWaitMS
	case *ms < 0:
		return 0, 0
	}
	return time.Duration(*ms) * time.Millisecond, 0
}

func budgetOf(op string, bytes *int64) (int, error) {
	if bytes == nil {
		return api.DefaultBytes, nil
	}
	if *bytes < api.MinBytes || *bytes > api.MaxBytes {
		return 0, rpc.Errorf(rpc.CodeInvalidRequest, "%s: max_bytes is %d; it must be between %d and %d", op, *bytes, api.MinBytes, api.MaxBytes)
	}
	return int(*bytes), nil
}

// execute takes a cell. It answers later: most cells are over in a moment, and then who
// sees their end answers. The others get a goroutine that waits.
func (c *connection) execute(ctx context.Context, p api.ExecuteParams) (any, error) {
	m := c.m
	budget, err := budgetOf("execute", p.MaxBytes)
	if err != nil {
		return nil, err
	}
	if len(p.Code) > api.MaxCodeBytes {
		return nil, rpc.Errorf(rpc.CodeTooLarge, "execute: the code has %d bytes, the limit is %d", len(p.Code), api.MaxCodeBytes).
			WithHint("write the data to a file and read it from there")
	}
	if id := p.RequestID; id != nil && *id != "" && !isID(*id) {
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "execute: bad request_id %q", *id).
			WithHint("a request id has at most %d characters of A-Z a-z 0-9 _ . : -", api.MaxIDLength)
	}
	if err := m.opts.Workspace.Check(); err != nil {
		return nil, err
	}
	wait, clamped := waitFor(p.WaitMS, m.opts.Limits.ExecuteWaitMS)
	r, replayed, err := m.admit(c, p)
	if err != nil && !errors.Is(err, errRestarting) {
		return nil, err
	}
	result := func(patient bool) (any, error) {
		for errors.Is(err, errRestarting) {
			if err := m.awaitRestart(ctx); err != nil {
				return nil, err
			}
			r, replayed, err = m.admit(c, p)
		}
		if err != nil {
			return nil, err
		}
		var a *answer
		if r == nil { // a replay of one that is not in memory: it has ended
			a, err = c.pageOfEnded(replayed, 0, budget)
		} else {
			if patient {
				requestID := ""
				if p.RequestID != nil {
					requestID = *p.RequestID
				}
				c.wait(ctx, r, wait, requestID, func() (bool, <-chan struct{}) { return r.doneIs, r.done })
			}
			a, err = c.page(r, 0, budget)
		}
		if err != nil {
			return nil, err
		}
		a.Replayed, a.ClampedWaitMS = replayed != nil, clamped
		return a, nil
	}
	return rpc.Later(func(answer func(func() (any, error))) {
		now := func() { answer(func() (any, error) { return result(false) }) }
		late := func() { answer(func() (any, error) { return result(true) }) }
		if err != nil || r == nil || wait < soon || !c.whenOver(r, now, late) {
			go late()
		}
	}), nil
}

// soon is how long the end of a cell is awaited, at most, without a goroutine.
const soon = 50 * time.Millisecond

// whenOver calls over at the end of the cell, on the goroutine of whoever sees it, or
// late, on one of its own, if the cell takes longer or its answer is not made in a
// moment. It reports false, and calls neither, when it is of no use.
//
// All such cells share a timer: one for each would wake another thread for each.
func (c *connection) whenOver(r *run, over, late func()) bool {
	m := c.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.doneIs || m.ending || r.over != nil || c.client == nil || c.client.unread > 0 {
		return false
	}
	r.over = func(ended bool) func() {
		r.over = nil
		// What a manager of before has stored is not in memory: the page would wait for
		// the store, of which this is a callback.
		if !ended || r.JournalBytes > promptBytes || !r.log.InMemory(0) || c.client == nil || c.client.unread > 0 {
			return func() { go late() }
		}
		return over
	}
	if m.overTimer == nil {
		m.overTimer = time.AfterFunc(soon, m.notSoon)
	}
	return true
}

// notSoon gives calls that wait for the end of a cell a goroutine of their own.
func (m *Manager) notSoon() {
	m.mu.Lock()
	m.overTimer = nil
	var list []func()
	for _, r := range m.live {
		if r.over != nil {
			list = append(list, r.over(false))
		}
	}
	m.mu.Unlock()
	for _, f := range list {
		f()
	}
}

// promptBytes is the output up to which a page of it is made while others wait.
const promptBytes = 16 << 10

// admit records a new execution and gives it to the kernel, or finds the one that the
// request id stands for. Either run is set or, for one that was forgotten, replayed.
func (m *Manager) admit(c *connection, p api.ExecuteParams) (*run, *store.Entity, error) {
	m.mu.Lock()
	if c.client == nil {
		m.mu.Unlock()
		return nil, nil, rpc.Errorf(api.CodeNotInitialized, "execute: call init first: this connection has no client id yet").
			WithHint("call init() once, then execute again")
	}
	client := c.client.id
	if refused := m.refusal("execute", p.Generation); refused != nil {
		m.mu.Unlock()
		if p.RequestID == nil {
			return nil, nil, refused
		}
		r, e, err := m.replay(client, p) // for a known request nothing is run, so nothing forbids it
		if err == nil && e == nil {
			err = refused
		}
		return r, e, err
	}
	m.wantKernelLocked()
	m.admitting++
	generation := m.kernel.gen
	if m.kernel.presumed && p.Generation == "" {
		generation = "" // the cell is for whatever kernel there turns out to be
	}
	m.mu.Unlock()
	admitted := func() {
		m.mu.Lock()
		m.admitting--
		m.mu.Unlock()
	}
	if id := p.RequestID; id != nil {
		release := m.claimRequest(client, *id)
		defer release()
		m.mu.Lock()
		fresh := c.fresh(*id)
		m.mu.Unlock()
		known, err := false, error(nil)
		if !fresh {
			known, err = m.store.Known(client, *id)
		}
		if err != nil {
			err = storageError(err, "execute: the records could not be read; nothing was run")
		}
		if known || err != nil {
			admitted()
			if err != nil {
				return nil, nil, err
			}
			r, e, err := m.replay(client, p)
			if err == nil && e == nil {
				err = storageError(errors.New("the record has vanished"), "execute: the request id is known, but not its execution; nothing was run")
			}
			return r, e, err
		}
	}
	r := m.newRun(store.Entity{Seq: m.store.NextSeq(), ID: newID(), Kind: "execution", Client: client, Request: p.RequestID, Generation: generation,
		State: api.Queued, Created: now(), Code: p.Code, Record: store.Record{Connection: c.id}})
	r.connected = true
	record := r.Entity // what becomes of r is stored by others
	err := m.submit(&store.Op{Change: &store.Change{Insert: []*store.Entity{&record}, Log: []api.LogEvent{r.transition(api.Queued, r.Created, "")}}}, func(err error) {
		var op *store.Op
		m.mu.Lock()
		m.admitting--
		if err == nil {
			r.admitted = true
			m.runs[r.id], m.live[r.id] = r, r
			op = m.dispatch(r)
			if r.next.Generation == "" { // the kernel that was on its way may have failed meanwhile
				m.wantKernelLocked()
			}
		}
		m.mu.Unlock()
		if op != nil {
			m.store.Submit(op)
		}
	})
	if err != nil {
		return nil, nil, storageError(err, "execute: the cell could not be recorded; nothing was run")
	}
	m.logged(nil)
	m.touchStatus()
	return r, nil, nil
}

// claimRequest makes sure that one call at a time decides what a request id stands for.
func (m *Manager) claimRequest(client, id string) (release func()) {
	key := client + "\x00" + id
	for {
		m.mu.Lock()
		other := m.claims[key]
		if other == nil {
			mine := make(chan struct{})
			m.claims[key] = mine
			m.mu.Unlock()
			return func() {
				m.mu.Lock()
				delete(m.claims, key)
				m.mu.Unlock()
				close(mine)
			}
		}
		m.mu.Unlock()
		<-other
	}
}

// submit runs one ordinary operation with a callback and waits for both.
func (m *Manager) submit(op *store.Op, then func(error)) error {
	done := make(chan error, 1)
	op.Done = func(err error) {
		then(err)
		done <- err
	}
	m.store.Submit(op)
	return <-done
}

// replay finds what a request id stands for: the run when it is in memory, the record
// in any case, neither when the id is new.
func (m *Manager) replay(client string, p api.ExecuteParams) (*run, *store.Entity, error) {
	e, err := m.store.ByRequest(client, *p.RequestID)
	if err != nil {
		return nil, nil, storageError(err, "execute: the records could not be read; nothing was run")
	}
	if e == nil {
		return nil, nil, nil
	}
	if e.Code != p.Code {
		return nil, nil, rpc.Errorf(api.CodeRequestConflict, "execute: request_id %q was used for other code, by execution %s; nothing was run", *p.RequestID, e.ID).
			WithHint("poll %s for its result, or execute with a new request id", e.ID)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.runs[e.ID], e, nil
}

// errRestarting: the cell is for the next manager, or for this one if the restart is
// called off.
var errRestarting = errors.New("the runtime is being restarted")

// refusal says why no cell may be taken now. Called with mu held.
func (m *Manager) refusal(op, generation string) error {
	switch {
	case m.resetting:
		return rpc.Errorf(rpc.CodeUnavailable, "%s: the session is being reset; nothing was run", op).WithHint("try again in a moment")
	case m.restarting != nil:
		return errRestarting
	case m.stopping != nil:
		return rpc.Errorf(rpc.CodeUnavailable, "%s: the runtime is being stopped (%s); nothing was run", op, m.stopReason).WithHint("call again to start a new one")
	case generation != "" && generation != m.kernel.gen:
		current := m.kernel.gen
		if current == "" {
			current = "none: no kernel runs"
		}
		return rpc.Errorf(api.CodeGeneration, "%s: the session's generation is not %s (now %s): what it held in memory is gone; nothing was run",
			op, generation, current).WithHint("recreate what the cell needs, then execute without generation or with the current one")
	}
	return nil
}

// Where the ids of cells are found: those who poll are models, those who do not, people.
const (
	hintExecID      = "take it from the answer to execute; ws.history.list() and mypr-mcp logs have those of before"
	hintInterruptID = "take it from mypr-mcp status or mypr-mcp logs, or leave it out"
)

func (c *connection) poll(ctx context.Context, p api.PollParams) (*answer, error) {
	m := c.m
	budget, err := budgetOf("poll", p.MaxBytes)
	if err != nil {
		return nil, err
	}
	if !isExecID(p.ExecID) {
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "poll: bad exec_id %q: an exec_id has 32 hex digits", p.ExecID).
			WithHint(hintExecID)
	}
	cursor := int64(0)
	if p.Cursor != nil {
		cursor = *p.Cursor
	}
	if cursor < 0 {
		return nil, rpc.Errorf(api.CodeInvalidCursor, "poll: bad cursor %d: it cannot be negative", cursor)
	}
	wait, clamped := waitFor(p.WaitMS, m.opts.Limits.PollWaitMS)
	m.mu.Lock()
	r := m.runs[p.ExecID]
	m.mu.Unlock()
	if r == nil {
		e, err := m.store.Entity(p.ExecID)
		if err != nil {
			return nil, storageError(err, "poll: the record could not be read")
		}
		if e == nil || e.Kind != "execution" {
			return nil, rpc.Errorf(rpc.CodeNotFound, "poll: there is no execution %s in this workspace", p.ExecID).WithHint(hintExecID)
		}
		// It may have become live, or have been read from the cache's edge, meanwhile.
		m.mu.Lock()
		r = m.runs[p.ExecID]
		m.mu.Unlock()
		if r == nil {
			a, err := c.pageOfEnded(e, cursor, budget)
			if err == nil && p.Interrupt {
				a.Interrupt = "finished"
			}
			return a, err
		}
	}
	outcome := ""
	if p.Interrupt {
		res, err := m.interruptRun(ctx, r)
		if err != nil {
			return nil, err
		}
		outcome = res.Outcome
	}
	m.mu.Lock()
	if cursor > r.JournalEvents {
		n := r.JournalEvents
		m.mu.Unlock()
		return nil, rpc.Errorf(api.CodeInvalidCursor, "poll: cursor %d is past the end of execution %s, which is %d", cursor, p.ExecID, n)
	}
	state := r.State
	m.mu.Unlock()
	c.wait(ctx, r, wait, "", func() (bool, <-chan struct{}) {
		if p.UntilDone || p.Interrupt {
			return r.doneIs, r.done
		}
		return r.doneIs || r.JournalEvents > cursor || r.State != state, r.changed()
	})
	a, err := c.page(r, cursor, budget)
	if err != nil {
		return nil, err
	}
	a.ClampedWaitMS = clamped
	if outcome != "" {
		if !api.Terminal(a.State) {
			outcome = "pending"
		}
		a.Interrupt = outcome
	}
	return a, nil
}

// wait blocks until ready says so, the wait is over, new mail has come for the client
// or the call ends. ready is called with mu held and returns the channel that is
// closed when it should be asked again.
func (c *connection) wait(ctx context.Context, r *run, wait time.Duration, requestID string, ready func() (bool, <-chan struct{})) {
	m := c.m
	var deadline <-chan time.Time
	progress := &time.Timer{} // its channel never fires
	began := time.Now()
	for {
		m.mu.Lock()
		over, again := ready()
		mail, news := c.wakes()
		tell := c.progress && c.attached
		m.mu.Unlock()
		if over || news || wait <= 0 || ctx.Err() != nil {
			return
		}
		if deadline == nil { // timers only for calls that do wait
			t := time.NewTimer(wait)
			defer t.Stop()
			deadline = t.C
			if tell && wait > progressFirst {
				progress = time.NewTimer(progressFirst)
				defer progress.Stop()
			}
		}
		select {
		case <-again:
		case <-mail:
		case <-deadline:
			return
		case <-ctx.Done():
			return
		case <-progress.C:
			m.mu.Lock()
			state := r.State
			m.mu.Unlock()
			_ = c.rpc.Notify(api.NotificationProgress, api.Progress{ExecID: r.id, RequestID: requestID, State: state,
				Seconds: time.Since(began).Seconds(), LastLine: r.lastLine()})
			progress.Reset(progressEvery)
		}
	}
}

// page answers with what is visible of an execution in memory.
func (c *connection) page(r *run, cursor int64, budget int) (*answer, error) {
	m := c.m
	m.mu.Lock()
	e, visible := r.Entity, r.log.Count()
	ahead := 0
	if e.State == api.Queued {
		for _, other := range m.live {
			if other.State == api.Queued && other.Seq < e.Seq {
				ahead++
			}
		}
	}
	m.mu.Unlock()
	a := m.newAnswer(&e, &budget)
	p, total, err := m.pageOf(r, cursor, budget)
	if err != nil {
		a.Warnings = append(a.Warnings, api.Warning{Code: "journal_unreadable", Text: "the saved output cannot be read: " + err.Error()})
	}
	// Output that became visible since may be of a later state: it is for the next page.
	if later := int(p.Cursor - visible); later > 0 {
		p.Events, p.Cursor = p.Events[:max(0, len(p.Events)-later)], visible
	}
	total = min(total, visible)
	a.QueueAhead = ahead
	if !api.Terminal(e.State) {
		m.mu.Lock()
		a.Blocked = m.blocked()
		if m.storageErr != nil {
			a.Warnings = append(a.Warnings, api.Warning{Code: api.CodeStorage, Text: "output and state of after the disk began to refuse are held back, not lost: " + m.storageErr.Error()})
		}
		if e.State == api.Queued && m.kernel.phase != phaseReady {
			a.Warnings = append(a.Warnings, api.Warning{Code: "kernel_starting", Text: m.kernel.progressText()})
		}
		if m.unit.Frozen && m.kernel.phase == phaseReady {
			a.Warnings = append(a.Warnings, api.Warning{Code: "kernel_frozen", Text: "the Python kernel is frozen, and no cell runs before somebody thaws it: mypr-mcp thaw kernel"})
		}
		m.mu.Unlock()
	}
	return a, c.finishAnswer(a, p, total)
}

// pageOfEnded answers for an execution that is not in memory any more.
func (c *connection) pageOfEnded(e *store.Entity, cursor int64, budget int) (*answer, error) {
	a := c.m.newAnswer(e, &budget)
	p, total, err := c.m.readJournal(e, cursor, budget)
	switch {
	case err != nil:
		a.Warnings = append(a.Warnings, api.Warning{Code: "journal_unreadable", Text: "the saved output cannot be read: " + err.Error()})
	case total < e.JournalEvents:
		a.Warnings = append(a.Warnings, api.Warning{Code: "journal_truncated", Text: fmt.Sprintf("%d events were saved, %d are left in the journal", e.JournalEvents, total)})
	}
	if cursor > max(total, e.JournalEvents) {
		return nil, rpc.Errorf(api.CodeInvalidCursor, "poll: cursor %d is past the end of execution %s, which is %d", cursor, e.ID, max(total, e.JournalEvents))
	}
	return a, c.finishAnswer(a, p, total)
}

// newAnswer fills in what the record says, and takes the error's part off the budget.
func (m *Manager) newAnswer(e *store.Entity, budget *int) *answer {
	a := &answer{ExecResult: api.ExecResult{ExecID: e.ID, ClientID: e.Client, ConnectionID: e.Connection, ExecutionGeneration: e.Generation, State: e.State,
		Truncated: e.Truncated, ErrorInfo: e.ErrorInfo, CreatedAt: e.Created, StartedAt: e.Started, FinishedAt: e.Finished}}
	a.Warnings = append(a.Warnings, e.Warnings...)
	if e.Error != "" {
		text := e.Error
		room := min(api.MaxErrorBytes, *budget/4)
		a.ErrorTruncated = e.ErrorTruncated
		if n := journal.Fit(text, room); n < len(text) {
			text = text[:n]
			a.ErrorTruncated = true
		}
		*budget -= room
		a.Error = &text
	}
	from, to := e.Created, now()
	if e.Started > 0 {
		from = e.Started
	}
	if e.Finished > 0 {
		to = e.Finished
	}
	a.ElapsedMS = int64((to - from) * 1000)
	return a
}

// finishAnswer adds the page and what is news to this connection.
func (c *connection) finishAnswer(a *answer, p journal.Page, total int64) error {
	m := c.m
	a.Output, a.Cursor, a.HasMore = p.Events, p.Cursor, p.Cursor < total
	if a.Output == nil {
		a.Output = []json.RawMessage{}
	}
	if len(a.Warnings) > api.MaxWarnings {
		a.Warnings, a.WarningsTruncated = a.Warnings[:api.MaxWarnings], true
	}
	inbox, err := c.inbox()
	if err != nil {
		return err
	}
	a.Inbox = inbox
	m.mu.Lock()
	a.Generation = m.kernel.gen
	if c.attached {
		block := m.runtimeBlock()
		if key := runtimeKey(&block); key != c.runtime {
			c.runtime = key
			a.Runtime = &block
		}
		a.Notice = m.takeNotice(c)
	}
	m.mu.Unlock()
	m.saveTold(c, a.Notice)
	return nil
}

func (c *connection) interrupt(ctx context.Context, p api.InterruptParams) (*api.InterruptResult, error) {
	m := c.m
	m.mu.Lock()
	if p.ExecID == "" {
		id, err := m.interruptible()
		if err != nil {
			m.mu.Unlock()
			return nil, err
		}
		p.ExecID = id
	}
	r := m.runs[p.ExecID]
	m.mu.Unlock()
	if r == nil {
		if !isExecID(p.ExecID) {
			return nil, rpc.Errorf(rpc.CodeInvalidRequest, "interrupt: bad exec_id %q: an exec_id has 32 hex digits", p.ExecID).
				WithHint(hintInterruptID)
		}
		e, err := m.store.Entity(p.ExecID)
		if err != nil {
			return nil, storageError(err, "interrupt: the record could not be read")
		}
		if e == nil {
			return nil, rpc.Errorf(rpc.CodeNotFound, "interrupt: there is no execution %s in this workspace", p.ExecID).
				WithHint(hintInterruptID)
		}
		return &api.InterruptResult{ExecID: e.ID, Outcome: "finished", State: e.State}, nil
	}
	res, err := m.interruptRun(ctx, r)
	if err != nil {
		return nil, err
	}
	// The kernel has said what it did; the end itself may be on its way.
	if res.Outcome != "pending" && !api.Terminal(res.State) {
		t := time.NewTimer(interruptAnswer)
		defer t.Stop()
		select {
		case <-r.done:
		case <-t.C:
			res.Outcome = "pending"
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	m.mu.Lock()
	res.State = r.State
	m.mu.Unlock()
	return res, nil
}

// interruptible is the cell that an interrupt without a name means. Called with mu held.
func (m *Manager) interruptible() (string, error) {
	if b := m.kernel.blocked; b != nil && m.live[b.ExecID] != nil {
		return b.ExecID, nil
	}
	var running, queued []string
	for id, r := range m.live {
		if r.State == api.Running {
			running = append(running, id)
		} else {
			queued = append(queued, id)
		}
	}
	// A kernel whose interpreter lock is held does not even say which cell has begun: one
	// that seems to wait may be the one that is meant.
	running = append(running, queued...)
	switch len(running) {
	case 1:
		return running[0], nil
	case 0:
		return "", rpc.Errorf(rpc.CodeConflict, "interrupt: no cell is running")
	}
	return "", rpc.Errorf(rpc.CodeConflict, "interrupt: %d cells are running or waiting and none is known to block the others; name one of them: %v", len(running), running).
		WithHint("mypr-mcp interrupt %s", running[0])
}

// interruptRun stops one execution and says what was done.
func (m *Manager) interruptRun(ctx context.Context, r *run) (*api.InterruptResult, error) {
	m.mu.Lock()
	res := &api.InterruptResult{ExecID: r.id, State: r.State}
	if r.doneIs {
		m.mu.Unlock()
		res.Outcome = "finished"
		return res, nil
	}
	if !r.sent { // it waits here
		s := m.finish(r, api.Cancelled, &api.ErrorInfo{Code: "cancelled", Message: "interrupted before it began; nothing of it was run"}, now())
		m.mu.Unlock()
		if s != nil {
			m.store.Submit(m.keepOp([]*staged{s}, nil, nil))
		}
		res.Outcome = "dequeued"
		return res, nil
	}
	l, sup := m.kernel.link, m.sup
	m.mu.Unlock()
	res.Outcome = "pending"
	if l == nil {
		return res, nil
	}
	ctx, cancel := context.WithTimeout(ctx, interruptAnswer)
	var poking sync.WaitGroup
	defer poking.Wait()
	defer cancel()
	if sup != nil {
		// C code holds the interpreter lock, and the kernel's I/O thread cannot take the request.
		// Some such code looks for signals itself (re does), and Python's handler of one lets
		// that thread run, which then aims at the cell. On a busy machine the moment may be too
		// short for it, so there are several.
		poking.Go(func() {
			t := time.NewTicker(interruptAnswer / 5)
			defer t.Stop()
			for {
				select {
				case <-t.C:
					_ = sup.Kill(ctx, control.KillParams{Name: KernelUnit, Signal: int(syscall.SIGINT), Who: "main"})
				case <-ctx.Done():
					return
				}
			}
		})
	}
	if outcome, err := l.interrupt(ctx, r.id); err == nil {
		res.Outcome = outcome
	}
	return res, nil
}
