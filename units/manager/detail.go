package manager

import (
	"encoding/json"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/units/manager/journal"
	"mypr/units/manager/store"
)

// detailBytes bounds the output that history.get shows of tasks and jobs.
const detailBytes = 64 << 10

type (
	// recordDetail is a record with the beginning of its output, as journal events.
	recordDetail struct {
		api.Record
		Output          any             `json:"output"`
		Cursor          int64           `json:"cursor"` // for poll (executions) or history.output
		HasMore         bool            `json:"has_more"`
		OutputTruncated bool            `json:"output_truncated"` // there is more output than is shown, or was
		Job             json.RawMessage `json:"job,omitempty"`    // its status, of a job
	}
	outputParams struct {
		ID       string `json:"id"`
		Cursor   int64  `json:"cursor"`
		MaxBytes *int64 `json:"max_bytes"`
	}
	outputPage struct {
		Output  []json.RawMessage `json:"output"`
		Cursor  int64             `json:"cursor"`
		HasMore bool              `json:"has_more"`
	}
)

// entity finds a record by its id, or a Python task by the name it had in the newest kernel.
func (m *Manager) entity(id string) (*store.Entity, error) {
	e, err := m.store.Entity(id)
	if err == nil && e == nil {
		e, err = m.store.Task(id)
	}
	if err != nil {
		return nil, storageError(err, "the record could not be read")
	}
	if e == nil {
		return nil, rpc.Errorf(rpc.CodeNotFound, "there is no record %q in this workspace", id).WithHint("mypr-mcp logs shows recent ones")
	}
	return e, nil
}

// recordDetail answers ws.history.get.
func (m *Manager) recordDetail(p api.RecordParams) (*recordDetail, error) {
	e, err := m.entity(p.ID)
	if err != nil {
		return nil, err
	}
	d := &recordDetail{Record: *recordOf(e), Output: []api.Event{}}
	if isJob(e.Kind) {
		d.Job = e.Job
		if m.jobs == nil {
			return d, nil
		}
		events, cut, err := m.jobs.Text(e.ID, 0, 1<<62, detailBytes)
		if err != nil {
			return nil, err
		}
		if events != nil {
			d.Output = events
		}
		d.OutputTruncated = cut || d.Truncated
		return d, nil
	}
	budget := api.DefaultBytes
	if e.Kind == kindTask {
		budget = detailBytes
	}
	page, total, err := m.journalPage(e, 0, budget)
	if err != nil {
		return nil, err
	}
	if page.Events != nil {
		d.Output = page.Events
	}
	d.Cursor, d.HasMore = page.Cursor, page.Cursor < total
	d.OutputTruncated = d.HasMore || d.Truncated
	return d, nil
}

// savedOutput pages through the journal of an execution or task.
func (m *Manager) savedOutput(p outputParams) (*outputPage, error) {
	budget, err := budgetOf("history.output", p.MaxBytes)
	if err != nil {
		return nil, err
	}
	e, err := m.entity(p.ID)
	if err != nil {
		return nil, err
	}
	page, total, err := m.journalPage(e, p.Cursor, budget)
	if err != nil {
		return nil, err
	}
	if p.Cursor < 0 || p.Cursor > total {
		return nil, rpc.Errorf(api.CodeInvalidCursor, "history.output: cursor %d is not within the %d events of %s", p.Cursor, total, p.ID)
	}
	if page.Events == nil {
		page.Events = []json.RawMessage{}
	}
	return &outputPage{page.Events, page.Cursor, page.Cursor < total}, nil
}

// journalPage reads what is visible of a journal, in memory or on disk.
func (m *Manager) journalPage(e *store.Entity, cursor int64, budget int) (journal.Page, int64, error) {
	m.mu.Lock()
	r := m.runs[e.ID]
	m.mu.Unlock()
	if r != nil {
		return m.pageOf(r, cursor, budget)
	}
	return m.readJournal(e, cursor, budget)
}

// readJournal reads the journal of an execution that has ended from the record or its file.
func (m *Manager) readJournal(e *store.Entity, cursor int64, budget int) (journal.Page, int64, error) {
	if len(e.Journal) > 0 {
		p, total := journal.ReadPacked(e.Journal, cursor, budget)
		return p, total, nil
	}
	return m.runsDir.Read(e.ID, cursor, budget)
}
