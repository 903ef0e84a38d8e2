package manager

import (
	"encoding/json"
	"strings"
	"time"

	"mypr/internal/api"
	"mypr/units/manager/journal"
	"mypr/units/manager/store"
)

// outputLogEvery bounds how often the output of one execution makes a line in the log.
const outputLogEvery = 250 * time.Millisecond

// run is an execution in memory. Its fields are guarded by Manager.mu, except those of
// identity, which never change, and log, which has a lock of its own.
type run struct {
	id, kind, client, connection string

	store.Entity              // what is durable, and so what everybody sees
	next         store.Entity // with everything that is staged
	log          *journal.Log
	admitted     bool // its record is durable
	sent         bool // it was given to the kernel of its generation
	connected    bool // known in this manager's life: false after a resume until the kernel says so
	done         chan struct{}
	change       chan struct{} // closed at the next visible change; nil: nobody waits
	doneIs       bool
	over         func(ended bool) func() // of whenOver; what it returns is called without mu
	// How far the lifecycle log mentions the output.
	logged   int64
	logTimer *time.Timer
	cost     int64 // what it counts for in the cache
}

func (m *Manager) newRun(e store.Entity) *run {
	return &run{id: e.ID, kind: e.Kind, client: e.Client, connection: e.Connection, Entity: e, next: e, log: m.runsDir.New(e.ID), done: make(chan struct{})}
}

func (r *run) stopTimer() {
	if r.logTimer != nil {
		r.logTimer.Stop()
		r.logTimer = nil
	}
}

// changed returns a channel that is closed at the next visible change.
func (r *run) changed() <-chan struct{} {
	if r.change == nil {
		r.change = make(chan struct{})
	}
	return r.change
}

// publish makes a stored state visible. Called with mu held; what it returns, if it is
// not nil, must be called without.
func (m *Manager) publish(r *run, e store.Entity) (then func()) {
	r.Entity = e
	if r.change != nil {
		close(r.change)
		r.change = nil
	}
	if api.Terminal(e.State) && !r.doneIs {
		r.doneIs = true
		r.stopTimer()
		close(r.done)
		delete(m.live, r.id)
		m.keepEnded(r)
		if r.over != nil {
			then = r.over(true)
		}
	}
	return then
}

// keepEnded puts an ended execution into the cache and drops the oldest that are too many.
func (m *Manager) keepEnded(r *run) {
	r.cost = r.size()
	m.ended = append(m.ended, r)
	m.cacheBytes += r.cost
	for len(m.ended) > m.opts.Limits.CompletedRecords || len(m.ended) > 1 && m.cacheBytes > m.opts.Limits.CacheBytes/2 {
		old := m.ended[0]
		m.ended[0] = nil
		m.ended = m.ended[1:]
		m.cacheBytes -= old.cost
		delete(m.runs, old.id)
	}
}

// size is about what a cached execution costs.
func (r *run) size() int64 { return int64(len(r.Code)+len(r.Error)+1024) + r.log.Memory() }

// change is what one batch of kernel events does to one execution.
type change struct {
	run     *run
	batch   journal.Batch
	state   string         // the last new state, "" when it stays
	at      float64        // of the last event
	started float64        // when it began, if it did in this batch
	ended   bool           // nothing more is taken
	events  []api.LogEvent // of the lifecycle
	final   func(*store.Entity)
	cut     bool // output was dropped
	insert  bool // there is no record yet
	bytes   int64
}

// staged is a change that has got its place: what the store and the journal must write.
type staged struct {
	run    *run
	data   []byte
	ends   []int
	offset int64
	entity store.Entity
	whole  bool // the record changes, not only the journal
	insert bool
	events []api.LogEvent
}

// stage fixes the effect of a change. Called with mu held.
func (m *Manager) stage(c *change) *staged {
	r := c.run
	s := &staged{run: r, insert: c.insert}
	e := &r.next
	if !c.batch.Empty() {
		s.data, s.ends = c.batch.Take()
		s.offset = r.log.Stage(s.data)
		e.JournalEvents += int64(len(s.ends))
		e.JournalBytes += int64(len(s.data))
		e.OutputBytes += c.bytes
	}
	if c.cut && !e.Truncated {
		e.Truncated, s.whole = true, true
	}
	for i := range c.events {
		ev := &c.events[i]
		if api.Terminal(ev.State) { // the log tells output before the end
			if line := r.outputLine(c.at); line != nil {
				s.events = append(s.events, *line)
			}
		}
		s.events = append(s.events, *ev)
	}
	if c.state != "" {
		s.whole = true
		e.State = c.state
		if api.Terminal(c.state) {
			e.Finished = c.at
		}
		if c.started > 0 && e.Started == 0 {
			e.Started = c.started
		}
	}
	if c.final != nil {
		c.final(e)
		s.whole = true
	}
	if !api.Terminal(e.State) && len(s.ends) > 0 && r.logTimer == nil {
		if line := r.outputLine(c.at); line != nil {
			s.events = append(s.events, *line)
		}
		r.logTimer = time.AfterFunc(outputLogEvery, func() { m.logOutput(r) })
	}
	s.entity = *e
	return s
}

// outputLine is the log line for output that the log does not mention yet. The text
// stays in the journal; who reads the log gets it from there.
func (r *run) outputLine(at float64) *api.LogEvent {
	n := r.next.JournalEvents - r.logged
	if n <= 0 {
		return nil
	}
	e := r.logEvent("output", r.next.State, at)
	e.Data = map[string]any{"cursor": r.logged, "events": n}
	r.logged = r.next.JournalEvents
	return &e
}

func (m *Manager) logOutput(r *run) {
	m.mu.Lock()
	r.logTimer = nil
	if m.ctx.Err() != nil || api.Terminal(r.next.State) {
		m.mu.Unlock()
		return
	}
	line := r.outputLine(now())
	if line != nil {
		r.logTimer = time.AfterFunc(outputLogEvery, func() { m.logOutput(r) })
	}
	m.mu.Unlock()
	if line != nil {
		m.store.Submit(&store.Op{Keep: true, Change: &store.Change{Log: []api.LogEvent{*line}}, Done: m.logged})
	}
}

// logEvent is a line of the lifecycle log about this execution.
func (r *run) logEvent(event, state string, at float64) api.LogEvent {
	return api.LogEvent{Time: at, Event: event, Kind: r.kind, ID: r.id, ClientID: r.client, ConnectionID: r.connection, ExecID: r.id, State: state}
}

// transition is the line of a new state.
func (r *run) transition(state string, at float64, summary string) api.LogEvent {
	e := r.logEvent(state, state, at)
	e.Error = summary
	return e
}

// add makes a staged change a part of what the store is to do.
func (s *staged) add(c *store.Change) {
	if s.insert {
		c.Insert = append(c.Insert, &s.entity)
	}
	if len(s.data) > 0 {
		c.Output = append(c.Output, store.Output{ID: s.run.id, Offset: s.offset, Data: s.data, To: s.run.log})
	}
	switch {
	case s.whole || s.insert && len(s.data) > 0:
		e := s.entity
		e.Code, e.Request = "", nil // they do not change, and the redo log need not have them again
		c.Update = append(c.Update, &e)
	case len(s.data) > 0:
		c.Progress = append(c.Progress, &store.Entity{ID: s.run.id, JournalEvents: s.entity.JournalEvents, JournalBytes: s.entity.JournalBytes})
	}
	c.Log = append(c.Log, s.events...)
}

// publishStaged makes written changes visible. Called with mu held; what it returns must
// be called without.
func (m *Manager) publishStaged(list []*staged) (then []func()) {
	for _, s := range list {
		if len(s.ends) > 0 {
			s.run.log.Publish(s.data, s.ends)
		}
		if f := m.publish(s.run, s.entity); f != nil {
			then = append(then, f)
		}
	}
	return then
}

// summary cuts an error to its bound, in whole characters.
func summary(text string, limit int) (string, bool) {
	if len(text) <= limit {
		return text, false
	}
	cut := text[:limit-len("…")]
	for len(cut) > 0 && cut[len(cut)-1]&0xc0 == 0x80 {
		cut = cut[:len(cut)-1]
	}
	if n := len(cut); n > 0 && cut[n-1] >= 0xc0 {
		cut = cut[:n-1]
	}
	return cut + "…", true
}

// finish stages an end that the manager decides, not the kernel. Called with mu held;
// nil when the execution has ended already.
func (m *Manager) finish(r *run, state string, info *api.ErrorInfo, at float64) *staged {
	if api.Terminal(r.next.State) {
		return nil
	}
	text, cut := summary(info.Message, api.MaxErrorBytes)
	c := &change{run: r, state: state, at: at, final: func(e *store.Entity) {
		e.Error, e.ErrorTruncated, e.ErrorInfo = text, cut, info
	}}
	c.events = []api.LogEvent{r.transition(state, at, text)}
	return m.stage(c)
}

// keepOp makes the operation that stores staged changes and publishes them. locked runs
// with the publication under mu, then after it.
func (m *Manager) keepOp(list []*staged, locked, then func()) *store.Op {
	c := &store.Change{}
	for _, s := range list {
		s.add(c)
	}
	return &store.Op{Keep: true, Change: c, Done: func(err error) {
		if err != nil {
			m.log.Error("changes were not stored", "error", err)
			return
		}
		m.mu.Lock()
		if locked != nil {
			locked()
		}
		answers := m.publishStaged(list)
		m.mu.Unlock()
		for _, f := range answers {
			f()
		}
		if then != nil {
			then()
		}
		m.logged(nil)
	}, After: func() {
		for _, s := range list {
			if !api.Terminal(s.entity.State) {
				continue
			}
			if err := s.run.log.Finish(); err != nil {
				m.log.Warn("journal not finished", "exec", s.run.id, "error", err)
			}
		}
	}}
}

// logged wakes those who follow the log.
func (m *Manager) logged(err error) {
	if err != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.logWaiters > 0 {
		close(m.logChanged)
		m.logChanged = make(chan struct{})
		m.logWaiters = 0
	}
}

// pageOf is a page of an execution in memory.
func (m *Manager) pageOf(r *run, cursor int64, budget int) (journal.Page, int64, error) {
	if !r.log.InMemory(cursor) {
		m.store.Flush()
	}
	return r.log.Page(cursor, budget)
}

// lastLine is the last line of text that an execution has printed, for progress.
func (r *run) lastLine() string {
	raw := r.log.Last()
	if raw == nil {
		return ""
	}
	var e api.Event
	if json.Unmarshal(raw, &e) != nil {
		return ""
	}
	text := strings.TrimRight(e.Text, "\r\n ")
	if i := strings.LastIndexAny(text, "\r\n"); i >= 0 {
		text = text[i+1:]
	}
	text, _ = summary(text, 200)
	return text
}
