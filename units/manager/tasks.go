package manager

import (
	"encoding/json"
	"fmt"

	"mypr/internal/api"
	"mypr/kernel/wire"
	"mypr/units/manager/store"
)

// kindTask is the kind of a Python task's record. Its id is python:<generation>:<name>.
const kindTask = "python"

// beginTask makes a run of a task that Python has detached from its cell. From then on
// its events are those of any execution.
func (l *link) beginTask(msg *wire.FromKernel) error {
	var t wire.Task
	if err := json.Unmarshal(msg.Task, &t); err != nil {
		return fmt.Errorf("bad task event: %w", err)
	}
	m := l.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.runs[msg.ExecID] != nil {
		return nil
	}
	r := m.newRun(store.Entity{Seq: m.store.NextSeq(), ID: msg.ExecID, Kind: kindTask, Client: t.ClientID, Generation: l.generation, State: api.Running,
		Created: msg.Time, Record: store.Record{Connection: t.ConnectionID, Started: msg.Time, Exec: t.ExecID}})
	r.admitted, r.sent, r.connected = true, true, true
	m.runs[r.id], m.live[r.id] = r, r
	c := &change{run: r, at: msg.Time, state: api.Running, insert: true, events: []api.LogEvent{r.transition(api.Running, msg.Time, "")}}
	l.changes[r.id] = c
	l.order = append(l.order, c)
	return nil
}
