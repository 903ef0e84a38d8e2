package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

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

// reservePatience is for the kernel's I/O thread, which answers whatever cells do.
const reservePatience = 2 * time.Second

// reserveTasks makes the kernel begin no more tasks, so that what activeWork says stays
// true. Without an answer the kernel is stuck or gone, and begins none anyhow.
func (m *Manager) reserveTasks(reason string) {
	m.mu.Lock()
	l := m.kernel.link
	m.mu.Unlock()
	if l == nil {
		return
	}
	ctx, cancel := context.WithTimeout(m.ctx, reservePatience)
	defer cancel()
	if err := l.reserve(ctx, reason); err != nil {
		m.log.Warn("the kernel was not told to begin no more tasks", "error", err)
	}
}

// releaseTasks undoes reserveTasks. Called with mu held.
func (m *Manager) releaseTasks() {
	if l := m.kernel.link; l != nil && !m.resetting && m.stopping == nil && m.restarting == nil {
		l.send(wire.Release{Type: wire.TypeRelease})
	}
}
