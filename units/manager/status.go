package manager

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/units/manager/journal"
	"mypr/units/manager/store"
)

const (
	maxList     = 200
	defaultList = 20
	logText     = 4 << 10 // bytes of output that one log line shows
)

// pingPatience is how long the kernel has to say that it is there. Its I/O thread does so
// within a millisecond, but may have to wait for the interpreter lock and for the CPU.
const pingPatience = time.Second

// silence asks the kernel whether it is there and returns why it seems not to be: "" when
// it answers, or when there is none to ask. stopped: it will not answer by itself.
func (m *Manager) silence(ctx context.Context) (why string, stopped bool) {
	m.mu.Lock()
	l, pid, frozen := m.kernel.link, m.kernel.pid, m.unit.Frozen
	m.mu.Unlock()
	if l == nil {
		return "", false
	}
	ctx, cancel := context.WithTimeoutCause(ctx, pingPatience, errSilent)
	defer cancel()
	if err := l.ping(ctx); err == nil || context.Cause(ctx) != errSilent {
		return "", false // it has answered, its connection has ended, or nobody waits any more
	}
	why = fmt.Sprintf("it does not answer within %v", pingPatience)
	switch state := processState(pid); {
	case frozen:
		return why + ": it is frozen (mypr-mcp thaw kernel)", true
	case state == 'T' || state == 't':
		return fmt.Sprintf("%s: its process is stopped by a signal or a debugger (kill -CONT %d)", why, pid), true
	}
	return why + ": its process is kept from running, or code in it holds the interpreter lock", false
}

var errSilent = errors.New("no answer")

// processState is the letter of /proc/PID/stat, 0 when it cannot be read.
func processState(pid int) byte {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// After the name, which may hold anything: "pid (name) S ...".
	if i := bytes.LastIndexByte(stat, ')'); i >= 0 && i+2 < len(stat) {
		return stat[i+2]
	}
	return 0
}

func (m *Manager) status(ctx context.Context, p api.StatusParams) *api.Status {
	if p.AwaitKernel {
		select {
		case <-m.opened:
			m.wantKernel()
			_, _ = m.awaitKernel(ctx) // what came of it is in the status
		case <-ctx.Done():
		}
	}
	w := m.opts.Workspace
	silent, stopped := "", false
	if p.Detail {
		silent, stopped = m.silence(ctx)
	}
	s := &api.Status{Version: m.opts.Version, ManagerVersion: m.opts.Version, ProtocolVersion: api.Protocol, Capabilities: capabilities,
		PID: os.Getpid(), PIDNamespace: pidNamespace(), WorkspaceID: w.ID, Workspace: w.Dir, WorkspaceAvailable: true,
		Instance: m.opts.Instance, StartedAt: m.started, Environment: m.opts.Origin, ConfigFiles: m.opts.ConfigFiles,
		Active: []string{}, Queued: []string{}}
	if m.opts.Warnings != nil {
		s.Warnings = m.opts.Warnings()
	}
	if err := w.Check(); err != nil {
		s.WorkspaceAvailable, s.WorkspaceProblem = false, err.Error()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	k := &m.kernel
	s.Generation = k.gen
	s.Healthy = true
	switch {
	case m.openErr != nil:
		s.Healthy, s.HealthError = false, "the history database cannot be opened: "+m.openErr.Error()
	case m.storageErr != nil:
		s.Healthy, s.HealthError = false, "the disk refuses: "+m.storageErr.Error()
	case k.phase == phaseDown:
		s.Healthy, s.HealthError = false, "no Python kernel: "+k.detail
	}
	s.LastError = m.lastError
	s.Resetting, s.Stopping = m.resetting, m.stopping != nil
	if m.restarting != nil {
		s.Restarting = m.restarting.ID
	}
	s.Kernel = api.KernelStatus{State: k.phase, Detail: k.detail, Python: k.python, Executable: k.executable, PID: k.pid, Mode: k.mode, PlainReason: k.plainReason(), Blocked: m.blocked()}
	if s.Kernel.Blocked != nil {
		s.Kernel.State = "blocked"
	}
	if silent != "" && k.phase == phaseReady {
		s.Kernel.State, s.Kernel.Detail = "unresponsive", silent
		if stopped && s.Healthy {
			s.Healthy, s.HealthError = false, "the Python kernel "+strings.TrimPrefix(silent, "it ")
		}
	}
	active, tasks := map[string][]string{}, map[string][]string{}
	for _, r := range m.sortedLive() {
		switch {
		case r.kind == kindTask:
			tasks[r.connection] = append(tasks[r.connection], store.TaskID(r.id))
			continue
		case r.State == api.Queued:
			s.Queued = append(s.Queued, r.id)
		default:
			s.Active = append(s.Active, r.id)
		}
		active[r.connection] = append(active[r.connection], r.id)
	}
	for _, j := range m.activeJobs() {
		tasks[j.ConnectionID] = append(tasks[j.ConnectionID], j.ID)
	}
	s.ConnectionCount, s.ClientCount = len(m.conns), len(m.clients)
	if p.Detail {
		s.Calls = m.meter.report()
		for c := range m.conns {
			x := api.Connection{ConnectionID: c.id, Kind: c.kind, Name: c.name, Version: c.version, ConnectedAt: c.since, LastActivity: c.activity,
				Active: append([]string{}, active[c.id]...), TaskIDs: append([]string{}, tasks[c.id]...)}
			if c.client != nil {
				id := c.client.id
				x.ClientID = &id
			}
			s.Connections = append(s.Connections, x)
		}
	}
	return s
}

func pidNamespace() string {
	link, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(strings.TrimPrefix(link, "pid:["), "]")
}

func limitOf(op string, n int) (int, error) {
	if n == 0 {
		return defaultList, nil
	}
	if n < 1 || n > maxList {
		return 0, rpc.Errorf(rpc.CodeInvalidRequest, "%s: limit is %d; it must be between 1 and %d", op, n, maxList)
	}
	return n, nil
}

// logs pages through the lifecycle log; with WaitMS it waits for a line after Cursor.
func (m *Manager) logs(ctx context.Context, p api.LogsParams) (*api.LogsPage, error) {
	limit, err := limitOf("logs", p.Limit)
	if err != nil {
		return nil, err
	}
	after := int64(-1)
	if p.Cursor != nil {
		if after = *p.Cursor; after < 0 {
			return nil, rpc.Errorf(api.CodeInvalidCursor, "logs: bad cursor %d: it cannot be negative", after)
		}
	}
	wait, _ := waitFor(&p.WaitMS, nil)
	deadline := time.NewTimer(wait)
	defer deadline.Stop()
	for {
		m.mu.Lock()
		m.logWaiters++
		again := m.logChanged
		m.mu.Unlock()
		first, last, err := m.store.LogRange() // before the events: with a filter the cursor still moves on
		if err != nil {
			return nil, storageError(err, "the log could not be read")
		}
		events, err := m.store.Events(p.ClientID, after, limit)
		if err != nil {
			return nil, storageError(err, "the log could not be read")
		}
		if len(events) > 0 || wait <= 0 || after < 0 {
			page := &api.LogsPage{Events: events, Cursor: max(after, 0), Dropped: after >= 0 && first > after+1}
			switch n := len(events); {
			case n == limit && after >= 0:
				page.Cursor = events[n-1].Seq
			case n > 0:
				page.Cursor = max(last, events[n-1].Seq)
			default:
				page.Cursor = max(last, page.Cursor)
			}
			for i := range events {
				m.addOutput(&events[i])
			}
			return page, nil
		}
		select {
		case <-again:
		case <-deadline.C:
			wait = 0
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// addOutput puts the text that an output line tells of into it. The log holds only
// where in the journal it is.
func (m *Manager) addOutput(e *api.LogEvent) {
	if e.Event != "output" {
		return
	}
	if isJob(e.Kind) {
		m.addJobOutput(e)
		return
	}
	from, _ := e.Data["cursor"].(float64)
	n, _ := e.Data["events"].(float64)
	if n < 1 {
		return
	}
	m.mu.Lock()
	r := m.runs[e.ID]
	m.mu.Unlock()
	var p journal.Page
	var err error
	if r != nil {
		p, _, err = m.pageOf(r, int64(from), logText)
	} else {
		var rec *store.Entity
		if rec, err = m.store.Entity(e.ID); err == nil && rec != nil {
			p, _, err = m.readJournal(rec, int64(from), logText)
		}
	}
	if err != nil {
		e.Data["text_error"] = err.Error()
		return
	}
	var text strings.Builder
	taken := min(len(p.Events), int(n))
	for _, raw := range p.Events[:taken] {
		var ev api.Event
		if json.Unmarshal(raw, &ev) == nil {
			text.WriteString(ev.Text)
		}
	}
	e.Data["text"] = text.String()
	if taken < int(n) {
		e.Data["truncated"] = true
	}
}

func (m *Manager) history(_ context.Context, p api.HistoryParams) (*api.HistoryPage, error) {
	limit, err := limitOf("history", p.Limit)
	if err != nil {
		return nil, err
	}
	before := int64(0)
	if p.Cursor != nil {
		if before = *p.Cursor; before < 1 {
			return nil, rpc.Errorf(api.CodeInvalidCursor, "history: bad cursor %d", before)
		}
	}
	list, err := m.store.History(p.ClientID, limit+1, before)
	if err != nil {
		return nil, storageError(err, "the history could not be read")
	}
	page := &api.HistoryPage{Items: []api.Record{}}
	for i, e := range list {
		if i == limit {
			next := list[i-1].Seq
			page.NextCursor = &next
			break
		}
		r := recordOf(e)
		r.Code, _ = summary(r.Code, 2<<10) // a list of 200 cells of 8 MiB is no list; record has it whole
		page.Items = append(page.Items, *r)
	}
	return page, nil
}

func (m *Manager) record(_ context.Context, p api.RecordParams) (*api.Record, error) {
	e, err := m.entity(p.ID)
	if err != nil {
		return nil, err
	}
	return recordOf(e), nil
}

func recordOf(e *store.Entity) *api.Record {
	id := e.ID
	if e.Kind == kindTask {
		id = store.TaskID(e.ID)
	}
	return &api.Record{ID: id, HistoryID: e.ID, ExecID: e.Exec, Kind: e.Kind, ClientID: e.Client, ConnectionID: e.Connection, RequestID: e.Request, Generation: e.Generation,
		State: e.State, Code: e.Code, Error: e.Error, ErrorInfo: e.ErrorInfo, Truncated: e.Truncated, OutputEvents: e.JournalEvents,
		OutputBytes: e.OutputBytes, CreatedAt: e.Created, StartedAt: e.Started, FinishedAt: e.Finished}
}
