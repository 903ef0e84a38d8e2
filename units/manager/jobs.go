package manager

import (
	"context"
	"errors"
	"strings"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/kernel"
	"mypr/units/manager/store"
)

// Jobs is the background work that runs under the supervisor (package units/jobs).
type Jobs interface {
	// Handles reports whether a call of the Python API is for it.
	Handles(method string) bool
	Call(ctx context.Context, c Call, generation string) (any, error)
	// Resume finds the jobs that an earlier manager left. It is called once, before Call.
	Resume(ctx context.Context) error
	// Active are the jobs that have not ended.
	Active() []api.Record
	// CancelAll ends them and waits for it.
	CancelAll(ctx context.Context, reason string) error
	// Suspend lets go of them without touching them.
	Suspend()
	// Text is a range of a job's output, cut to a number of bytes, as journal events.
	Text(id string, from, to int64, limit int) (events []api.Event, cut bool, err error)
}

// JobsHost is what Jobs get from the manager.
type JobsHost struct{ m *Manager }

// Supervisor returns the present connection and waits while there is none.
func (h JobsHost) Supervisor(ctx context.Context) (Supervisor, error) {
	sup, _, err := h.m.supervisor(ctx)
	return sup, err
}

// Runner runs a program to its end, as a unit of its own.
func (h JobsHost) Runner() kernel.Runner { return &runner{h.m} }

// Admit lets a job begin unless the runtime is about to change. release is called
// when the job is among Active.
func (h JobsHost) Admit(ctx context.Context) (release func(), err error) {
	m := h.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for err = m.refusal("start", ""); err != nil; err = m.refusal("start", "") {
		if !errors.Is(err, errRestarting) {
			return nil, err
		}
		m.mu.Unlock()
		err = m.awaitRestart(ctx)
		m.mu.Lock()
		if err != nil {
			return nil, err
		}
	}
	m.admitting++
	return func() {
		m.mu.Lock()
		m.admitting--
		m.mu.Unlock()
	}, nil
}

// saveWait is how long Save waits for a disk that refuses.
const saveWait = 250 * time.Millisecond

// Save inserts or updates the record of a job and logs a line, both or neither. The
// end of a job is stored as soon as the disk takes it, also when Save has given up waiting.
func (h JobsHost) Save(ctx context.Context, r *api.Record, job []byte, isNew bool, line *api.LogEvent) error {
	m := h.m
	e := &store.Entity{ID: r.ID, Kind: r.Kind, Client: r.ClientID, Generation: r.Generation, State: r.State, Created: r.CreatedAt, Code: r.Code,
		Record: store.Record{Connection: r.ConnectionID, Started: r.StartedAt, Finished: r.FinishedAt, OutputBytes: r.OutputBytes,
			Truncated: r.Truncated, Error: r.Error, ErrorInfo: r.ErrorInfo, Exec: r.ExecID, Job: job}}
	e.Error, e.ErrorTruncated = summary(e.Error, api.MaxErrorBytes)
	done := make(chan error, 1)
	change := &store.Change{Log: []api.LogEvent{*line}}
	if isNew {
		e.Seq = m.store.NextSeq()
		change.Insert = []*store.Entity{e}
	} else {
		change.Update = []*store.Entity{e}
	}
	m.store.Submit(&store.Op{Keep: api.Terminal(r.State), Change: change, Done: func(err error) {
		m.logged(err)
		done <- err
	}})
	select { // the usual case needs no timer
	case err := <-done:
		return err
	default:
	}
	patience := time.NewTimer(saveWait)
	defer patience.Stop()
	for timeout := patience.C; ; {
		select {
		case err := <-done:
			return err
		case <-timeout:
			if err := m.store.Err(); err != nil {
				return err
			}
			timeout = nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Output adds a line to the log and calls done when there may be another.
func (h JobsHost) Output(line *api.LogEvent, done func()) {
	m := h.m
	m.store.Submit(&store.Op{Keep: true, Change: &store.Change{Log: []api.LogEvent{*line}}, Done: func(err error) {
		m.logged(err)
		time.AfterFunc(outputLogEvery, done)
	}})
}

// Live is what was saved of the jobs that have not ended.
func (h JobsHost) Live(context.Context) ([][]byte, error) {
	list, err := h.m.store.Live()
	if err != nil {
		return nil, err
	}
	var jobs [][]byte
	for _, e := range list {
		if isJob(e.Kind) {
			jobs = append(jobs, e.Job)
		}
	}
	return jobs, nil
}

// Load is what was saved of a job, nil if there is no such job.
func (h JobsHost) Load(_ context.Context, id string) ([]byte, error) {
	e, err := h.m.store.Entity(id)
	if err != nil {
		return nil, storageError(err, "the job could not be read")
	}
	if e == nil || !isJob(e.Kind) {
		return nil, nil
	}
	return e.Job, nil
}

// isJob tells the kinds of records whose state only Jobs know.
func isJob(kind string) bool { return kind == "shell" || kind == "package" }

// resumeJobs lets the jobs of before be found, and then calls about jobs be answered.
func (m *Manager) resumeJobs() {
	defer m.wg.Done()
	if err := m.jobs.Resume(m.ctx); err != nil && m.ctx.Err() == nil {
		m.log.Error("jobs of before are not taken up", "error", err)
	}
	close(m.jobsKnown)
}

// callJobs answers a call about jobs.
func (m *Manager) callJobs(ctx context.Context, c Call) (any, error) {
	select {
	case <-m.jobsKnown:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	m.mu.Lock()
	generation := m.kernel.gen
	m.mu.Unlock()
	return m.jobs.Call(ctx, c, generation)
}

// addJobOutput puts the text that an output line of a job tells of into it.
func (m *Manager) addJobOutput(e *api.LogEvent) {
	from, _ := e.Data["from"].(float64)
	to, _ := e.Data["to"].(float64)
	if m.jobs == nil || to <= from {
		return
	}
	events, cut, err := m.jobs.Text(e.ID, int64(from), int64(to), logText)
	if err != nil {
		e.Data["text_error"] = err.Error()
		return
	}
	var text strings.Builder
	for _, ev := range events {
		text.WriteString(ev.Text)
	}
	e.Data["text"] = text.String()
	if cut {
		e.Data["truncated"] = true
	}
}

// activeJobs are the jobs that have not ended.
func (m *Manager) activeJobs() []api.Record {
	if m.jobs == nil {
		return nil
	}
	return m.jobs.Active()
}

// cancelJobs ends every job.
func (m *Manager) cancelJobs(reason string) error {
	if m.jobs == nil {
		return nil
	}
	if err := m.jobs.CancelAll(m.ctx, reason); err != nil && m.ctx.Err() == nil {
		return rpc.Errorf(rpc.CodeInternal, "jobs could not be cancelled: %v", err)
	}
	return nil
}
