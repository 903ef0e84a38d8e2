package manager

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
	"mypr/units/manager/store"
)

// activeWork refuses when there are executions other than origin. Called with mu held.
func (m *Manager) activeWork(op string, origin *run) error {
	var ids []string
	for _, r := range m.sortedLive() {
		if r != origin {
			ids = append(ids, r.id)
		}
	}
	jobs := m.activeJobs()
	for _, j := range jobs {
		ids = append(ids, j.ID)
	}
	n := len(ids) + m.admitting
	if n == 0 {
		return nil
	}
	shown := ids
	if len(shown) > 5 {
		shown = shown[:5]
	}
	what := "cells, tasks and jobs have"
	if n == 1 {
		what = "cell, task or job has"
	}
	e := rpc.Errorf(api.CodeActiveWork, "%s: refused, there is active work: %d %s not ended (%s)", op, n, what, strings.Join(shown, ", ")).
		WithHint("wait for them, interrupt them, or %s with force to cancel them", op)
	e.Details = map[string]any{"executions": ids, "jobs": len(jobs)}
	return e
}

// busy refuses while another change of the runtime is under way. Called with mu held.
func (m *Manager) busy(op string) error {
	switch {
	case m.resetting:
		return rpc.Errorf(rpc.CodeConflict, "%s: a reset is under way", op).WithHint("try again in a moment")
	case m.restarting != nil:
		return rpc.Errorf(rpc.CodeConflict, "%s: restart %s is under way", op, m.restarting.ID).WithHint("mypr-mcp status shows how far it is")
	case m.stopping != nil:
		return rpc.Errorf(rpc.CodeConflict, "%s: the runtime is being stopped (%s)", op, m.stopReason)
	}
	return nil
}

// stopKernel stops the kernel unit with all its processes and ends its generation as
// how says. Nothing happens when there is none.
func (m *Manager) stopKernel(how *ending) error {
	sup, unit, err := m.supervisor(m.ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	generation := m.kernel.gen
	m.kernel.ending = how
	m.mu.Unlock()
	if generation == "" && gone(unit) && unit.ActiveState != control.Activating {
		return nil
	}
	res, err := sup.Stop(m.ctx, control.JobParams{Name: KernelUnit})
	if err == nil && res.Result != "done" {
		err = fmt.Errorf("stopping %s ended as %s: %s", KernelUnit, res.Result, res.Unit.Error)
	}
	if err != nil {
		m.mu.Lock()
		m.kernel.ending = nil
		m.mu.Unlock()
		return rpc.Errorf(rpc.CodeInternal, "the kernel could not be stopped: %v", err).WithHint("mypr-mcp units shows its state")
	}
	if generation != "" {
		if res.Unit.InvocationID == "" {
			res.Unit.InvocationID = generation
		}
		m.endKernel(generation, res.Unit)
	}
	return nil
}

// replaceable refuses to end a kernel when it is plain that no other would start: a
// mistake in a file, or a Python that is not there, costs nobody's memory.
func (m *Manager) replaceable(op string) error {
	err := m.opts.Available(m.ctx, &runner{m})
	if err == nil {
		_, err = m.opts.KernelUnit()
	}
	if err == nil {
		return nil
	}
	e := *rpc.AsError(err)
	if e.Code == rpc.CodeInternal { // package kernel and the unit files know no codes
		e.Code = rpc.CodeUnavailable
	}
	e.Message = op + ": refused, for no other Python kernel could be started: " + e.Message
	e.Hint = cmp.Or(e.Hint, "mend that, then mypr-mcp "+op)
	return &e
}

// reset replaces the kernel. origin is the cell that asked, nil for anybody else.
func (m *Manager) reset(p api.LifecycleParams, origin *run) (*api.ResetResult, error) {
	if err := m.replaceable("reset"); err != nil {
		return nil, err
	}
	m.reserveTasks("the session is about to be reset")
	m.mu.Lock()
	err := m.busy("reset")
	if err == nil && !p.Force {
		err = m.activeWork("reset", origin)
	}
	if err != nil {
		m.releaseTasks()
		m.mu.Unlock()
		return nil, err
	}
	m.resetting = true
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		m.resetting = false
		m.releaseTasks()
		m.mu.Unlock()
	}()
	reason := p.Reason
	if origin != nil {
		reason = "by " + origin.client + " in cell " + origin.id
	}
	if err := m.awaitStart(); err != nil { // a kernel on its way is let arrive, or fail, first
		return nil, err
	}
	m.mu.Lock()
	old, generation := m.kernel.gen, ""
	m.mu.Unlock()
	err = m.stopKernel(&ending{kind: "reset", reason: reason, origin: origin})
	if err == nil {
		m.cancelWaiting(origin, "cancelled: the session was reset")
		err = m.cancelJobs("the session was reset " + reason)
	}
	if err == nil {
		if generation, err = m.freshKernel(); err != nil && old != "" {
			e := *rpc.AsError(err)
			e.Message = "Python memory is gone: the old kernel has ended, and " + e.Message
			err = &e
		}
	}
	if origin != nil {
		m.finishOrigin(origin, err, "Session reset. Generation "+generation+" begins with empty memory.\n", "reset failed")
	}
	if err != nil {
		return nil, err
	}
	return &api.ResetResult{Generation: generation, Reset: true}, nil
}

// cancelWaiting ends queued executions that no kernel was given.
func (m *Manager) cancelWaiting(origin *run, message string) (n int) {
	m.mu.Lock()
	var list []*staged
	for _, r := range m.waiting() {
		if r == origin {
			continue
		}
		if s := m.finish(r, api.Cancelled, &api.ErrorInfo{Code: "cancelled", Message: message}, now()); s != nil {
			list = append(list, s)
		}
	}
	m.mu.Unlock()
	if len(list) > 0 {
		m.store.Submit(m.keepOp(list, nil, nil))
	}
	return len(list)
}

// finishOrigin ends the cell that asked for a reset or a restart.
func (m *Manager) finishOrigin(r *run, err error, text, failed string) {
	m.mu.Lock()
	at := now()
	var s *staged
	if err != nil {
		s = m.finish(r, api.Lost, &api.ErrorInfo{Code: "lost", Message: failed + ": " + err.Error()}, at)
	} else if !api.Terminal(r.next.State) {
		c := &change{run: r, state: api.Succeeded, at: at}
		c.batch.Add(api.Event{Type: "result", Text: text, Time: at})
		c.bytes = int64(len(text))
		c.events = []api.LogEvent{r.transition(api.Succeeded, at, "")}
		s = m.stage(c)
	}
	m.mu.Unlock()
	if s != nil {
		m.store.Submit(m.keepOp([]*staged{s}, nil, nil))
	}
}

// errAskerGone refuses what only the connection that asked for it can complete or call off.
var errAskerGone = rpc.Errorf(rpc.CodeUnavailable, "whoever asked for it went away before it was done")

// stop prepares the end of the runtime: no more work is taken, with Force what runs is
// ended. The caller then shuts the supervisor down; when its connection ends without
// that, the runtime goes on.
func (c *connection) stop(_ context.Context, p api.LifecycleParams) (*api.StopResult, error) {
	m := c.m
	m.reserveTasks("the runtime is about to be stopped")
	m.mu.Lock()
	err := m.busy("stop")
	if err == nil && c.gone { // its end would not be seen a second time
		err = errAskerGone
	}
	if err == nil && !p.Force {
		err = m.activeWork("stop", nil)
	}
	if err != nil {
		m.releaseTasks()
		m.mu.Unlock()
		return nil, err
	}
	m.stopping, m.stopReason = c, p.Reason
	if m.stopReason == "" {
		m.stopReason = "on request"
	}
	reason, count, generation := m.stopReason, len(m.live)+len(m.activeJobs()), m.kernel.gen
	m.mu.Unlock()
	if count > 0 {
		if generation != "" {
			err = m.stopKernel(&ending{kind: "stop", reason: reason})
		}
		m.cancelWaiting(nil, "cancelled: the runtime was stopped ("+reason+")")
		err = errors.Join(err, m.cancelJobs("the runtime was stopped ("+reason+")"))
	}
	if err != nil {
		m.mu.Lock()
		m.stopping, m.stopReason = nil, ""
		m.releaseTasks()
		m.mu.Unlock()
		return nil, err
	}
	m.announce(c, api.Stopping{Kind: "stop", Reason: reason})
	return &api.StopResult{Stopping: true, Cancelled: count}, nil
}

// announce tells every other attached connection that the runtime is about to end.
// What it returns is closed when everybody has it.
func (m *Manager) announce(except *connection, s api.Stopping) <-chan struct{} {
	m.mu.Lock()
	conns := make([]*connection, 0, len(m.conns))
	for c := range m.conns {
		if c != except {
			conns = append(conns, c)
		}
	}
	m.mu.Unlock()
	var sending sync.WaitGroup
	for _, c := range conns { // a peer that does not read must not hold up the others
		m.wg.Add(1)
		sending.Add(1)
		go func() {
			defer m.wg.Done()
			defer sending.Done()
			_ = c.rpc.Notify(api.NotificationStopping, s)
		}()
	}
	told := make(chan struct{})
	go func() {
		sending.Wait()
		close(told)
	}()
	return told
}

// shutdownReason is why a runtime ends whose supervisor was told to: by a signal, its
// service manager or its container's engine.
const shutdownReason = "its supervisor was told to end"

// shuttingDown asks the supervisor whether it is about to end with everything. known is
// false when it does not say; without one sup is nil.
func (m *Manager) shuttingDown() (sup Supervisor, ends, known bool) {
	m.mu.Lock()
	sup = m.sup
	m.mu.Unlock()
	if sup == nil {
		return nil, false, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	info, err := sup.Info(ctx)
	return sup, err == nil && info.ShuttingDown, err == nil
}

// announceEnd tells connections why this manager ends, unless they were told, and takes
// down how the kernel ended that its supervisor stopped before it stops this manager.
func (m *Manager) announceEnd() {
	m.mu.Lock()
	told, generation := m.stopping != nil || m.restarting != nil, m.kernel.gen
	m.mu.Unlock()
	if told {
		return
	}
	sup, ends, known := m.shuttingDown()
	if known && !ends {
		return // this manager alone ends, and another comes
	}
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	if ends {
		if generation != "" {
			if u, err := sup.Wait(ctx, control.WaitParams{Name: KernelUnit, InvocationID: generation}); err == nil {
				m.endKernel(generation, u)
			}
		}
		m.cancelWaiting(nil, "cancelled: the runtime was stopped ("+shutdownReason+")")
	}
	// Without a supervisor it is systemd that ends what is left.
	select {
	case <-m.announce(nil, api.Stopping{Kind: "stop", Reason: "the supervisor shuts down"}):
	case <-ctx.Done():
	}
}

// finishStopped records at the very end that the kernel ends with a runtime that was
// stopped on purpose.
func (m *Manager) finishStopped() {
	m.mu.Lock()
	generation, how := m.kernel.gen, m.kernel.ending
	if m.stopping != nil {
		how = &ending{kind: "stop", reason: m.stopReason}
	}
	m.mu.Unlock()
	if generation == "" || how == nil {
		return
	}
	text := lossText(generation, how, control.UnitStatus{}, nil)
	if err := m.store.Do(func(t *store.Tx) error {
		_, err := t.End(generation, now(), how.kind, text)
		return err
	}); err != nil {
		m.log.Warn("the end of the generation was not recorded", "error", err)
	}
}

// restartRecord is .mypr/restart.json.
type restartRecord struct {
	api.RestartResult
	OriginExecID string        `json:"origin_exec_id,omitempty"` // the cell that asked
	conn         *connection   // that asked; its end without the manager's calls the restart off
	over         chan struct{} // closed when it was called off
}

// restartPatience is how long after its last phase a restart record is believed.
const restartPatience = 5 * time.Minute

func (m *Manager) saveRestart(r *restartRecord) {
	r.UpdatedAt = now()
	raw, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		root := m.opts.Workspace.Root
		if err = os.MkdirAll(filepath.Join(root, "restarts"), 0o700); err == nil {
			err = errors.Join(replaceFile(filepath.Join(root, "restarts", r.ID+".json"), raw), replaceFile(filepath.Join(root, "restart.json"), raw))
		}
	}
	if err != nil {
		m.log.Warn("restart record not written", "restart", r.ID, "error", err)
	}
}

func replaceFile(path string, data []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".new-*.json")
	if err != nil {
		return err
	}
	_, err = tmp.Write(append(data, '\n'))
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
	}
	return err
}

// restart prepares the replacement of the runtime and records it. For the command line
// it answers when the kernel is down, and the caller asks the supervisor for the rest;
// for a cell it asks itself, and the next manager finishes the cell. It goes on when
// the caller no longer waits.
func (m *Manager) restart(p api.LifecycleParams, origin *run, conn *connection) (*api.RestartResult, error) {
	// What another version can start is not known here.
	if !p.KeepKernel && (p.Version == "" || p.Version == m.opts.Version) {
		if err := m.replaceable("restart"); err != nil {
			return nil, err
		}
	}
	if !p.KeepKernel {
		m.reserveTasks("the runtime is about to be restarted")
	}
	m.mu.Lock()
	err := m.busy("restart")
	if err == nil && conn != nil && conn.gone {
		err = errAskerGone
	}
	if err == nil && !p.Force && !p.KeepKernel {
		err = m.activeWork("restart", origin)
	}
	if err != nil {
		m.releaseTasks()
		m.mu.Unlock()
		return nil, err
	}
	rec := &restartRecord{RestartResult: api.RestartResult{ID: newID(), State: "preparing", OldGeneration: m.kernel.gen, OldVersion: m.opts.Version,
		NewVersion: p.Version, Target: p.Target, Force: p.Force, KeepKernel: p.KeepKernel, CreatedAt: now()}, conn: conn, over: make(chan struct{})}
	if rec.Target == "" {
		rec.Target = m.opts.Executable
	}
	m.restarting = rec
	reason := p.Reason
	var mark *staged
	if origin != nil {
		rec.OriginExecID = origin.id
		reason = "by " + origin.client + " in cell " + origin.id
		at := now()
		mark = m.stage(&change{run: origin, at: at, state: api.Restarting, events: []api.LogEvent{origin.transition(api.Restarting, at, "")}})
	}
	m.mu.Unlock()
	m.saveRestart(rec)
	if mark != nil {
		m.store.Submit(m.keepOp([]*staged{mark}, nil, nil))
	}
	if !p.KeepKernel {
		err = m.stopKernel(&ending{kind: "restart", reason: reason, origin: origin})
		m.cancelWaiting(origin, "cancelled: the runtime was restarted")
		err = errors.Join(err, m.cancelJobs("the runtime was restarted"))
	}
	if err == nil {
		rec.State = "stopping"
		m.saveRestart(rec)
		m.announce(rec.conn, api.Stopping{Kind: "restart", Reason: reason})
		if origin != nil {
			err = m.replaceSelf(rec, origin)
		}
	}
	if err != nil {
		m.failRestart(rec, err)
		if origin != nil {
			m.finishOrigin(origin, err, "", "restart failed")
		}
		return nil, err
	}
	result := rec.RestartResult
	return &result, nil
}

// replaceSelf has the target do the rest, as a unit of its own that outlives this
// manager: it knows its version, replaces the supervisor's program and the manager, and
// goes back to what ran before when that fails. It returns an error when the target
// could not be started; what it comes to is followed until this manager ends.
func (m *Manager) replaceSelf(rec *restartRecord, origin *run) error {
	p, err := (&runner{m}).startUnit(m.ctx, "restart-"+rec.ID+".service", "restart", rec.Target,
		[]string{rec.Target, "-C", m.opts.Workspace.Dir, "replace"}, m.opts.Workspace.Dir, m.opts.Environment)
	if err != nil {
		return err
	}
	m.wg.Add(1)
	go func() {
		defer m.wg.Done()
		text := make(chan string, 1)
		go func() {
			b := tail(p.stderr) // until it ends, or Wait closes the pipe
			text <- strings.TrimSpace(string(b))
		}()
		select {
		case <-p.ended:
		case <-m.ctx.Done():
			p.stdout.Close()
			p.stderr.Close()
			<-text
			return
		}
		said := <-text
		exit, err := p.Wait()
		if m.ctx.Err() != nil {
			return
		}
		if err == nil {
			err = fmt.Errorf("%s ended with status %d and this manager still runs: %s", rec.Target, exit.Code, said)
		}
		m.failRestart(rec, err)
		m.finishOrigin(origin, err, "", "restart failed")
	}()
	return nil
}

func (m *Manager) failRestart(rec *restartRecord, err error) {
	rec.State, rec.Error = "failed", err.Error()
	m.saveRestart(rec)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.restarting == rec {
		m.restarting = nil
		m.releaseTasks()
		close(rec.over)
	}
}

// awaitRestart holds a request while the manager is being replaced. It returns when the
// restart was called off; when it comes about, the connection ends and the client asks
// the next manager.
func (m *Manager) awaitRestart(ctx context.Context) error {
	for {
		m.mu.Lock()
		rec := m.restarting
		m.mu.Unlock()
		if rec == nil {
			return nil
		}
		select {
		case <-rec.over:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// loadRestart looks for a restart that this manager is the outcome of, and returns the
// cell that asked for it, if one did.
func (m *Manager) loadRestart() (origin string) {
	raw, err := os.ReadFile(filepath.Join(m.opts.Workspace.Root, "restart.json"))
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			m.log.Warn("restart record not read", "error", err)
		}
		return ""
	}
	rec := &restartRecord{}
	if err := json.Unmarshal(raw, rec); err != nil {
		m.log.Warn("restart record not read", "error", err)
		return ""
	}
	switch rec.State {
	case "succeeded", "failed":
		return ""
	case "preparing":
		rec.State, rec.Error = "failed", "the manager ended while it prepared the restart"
		m.saveRestart(rec)
		return ""
	}
	if time.Since(time.UnixMicro(int64(rec.UpdatedAt*1e6))) > restartPatience {
		rec.State, rec.Error = "failed", "nothing happened for 5 minutes: whoever drove the restart is gone"
		m.saveRestart(rec)
		return ""
	}
	rec.State = "starting"
	m.saveRestart(rec)
	m.wg.Add(1)
	go m.finishRestart(rec)
	return rec.OriginExecID
}

// finishRestart records how a restart ended.
func (m *Manager) finishRestart(rec *restartRecord) {
	defer m.wg.Done()
	select {
	case <-m.opened:
	case <-m.ctx.Done():
		return
	}
	m.wantKernel()
	generation, err := m.awaitKernel(m.ctx)
	if m.ctx.Err() != nil {
		return
	}
	wanted := rec.NewVersion
	rec.NewGeneration, rec.NewVersion, rec.State = generation, m.opts.Version, "succeeded"
	if err == nil && wanted != "" && wanted != m.opts.Version {
		err = fmt.Errorf("version %s could not run; version %s was put back and runs again", wanted, m.opts.Version)
	}
	if err != nil {
		rec.State, rec.Error = "failed", err.Error()
	}
	m.saveRestart(rec)
	m.mu.Lock()
	r := m.live[rec.OriginExecID]
	m.mu.Unlock()
	if r != nil {
		m.finishOrigin(r, err, fmt.Sprintf("Restart %s completed: version %s, generation %s.\n", rec.ID, rec.NewVersion, generation), "restart failed")
	}
	m.mu.Lock()
	m.replaced = ""
	m.mu.Unlock()
}
