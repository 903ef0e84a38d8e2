package manager

import (
	"context"
	"fmt"
	"time"

	"mypr/supervisor/control"
)

// touchIdle starts counting when nobody is connected and nothing runs, and stops when
// that has changed. Without an idle exit there is nothing to count.
func (m *Manager) touchIdle() {
	after := m.opts.IdleExit
	if after <= 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.idleTimer != nil {
		m.idleTimer.Stop()
		m.idleTimer = nil
	}
	if m.idle() {
		m.idleTimer = time.AfterFunc(after, m.idleExit)
	}
}

// idle reports whether only the kernel's memory would be lost. Called with mu held.
func (m *Manager) idle() bool {
	return m.ctx.Err() == nil && !m.ending && len(m.conns) == 0 && m.stopping == nil && m.restarting == nil && !m.resetting &&
		len(m.live)+m.admitting == 0
}

// idleExit ends the session, unless a job still runs: then it looks again later.
func (m *Manager) idleExit() {
	m.mu.Lock()
	m.idleTimer = nil
	idle, sup := m.idle(), m.sup
	if idle && (sup == nil || len(m.activeJobs()) > 0) {
		m.idleTimer = time.AfterFunc(m.opts.IdleExit, m.idleExit)
		idle = false
	}
	m.mu.Unlock()
	if !idle {
		return
	}
	reason := fmt.Sprintf("nobody was connected and nothing ran for %v (idle_exit)", m.opts.IdleExit)
	m.log.Info("ending the session", "reason", reason)
	ctx, cancel := context.WithTimeout(m.ctx, time.Minute)
	defer cancel()
	// Its answer comes when everything has ended, this process included.
	if err := sup.Shutdown(ctx, control.ShutdownParams{Reason: reason}); err != nil && m.ctx.Err() == nil {
		m.log.Error("cannot end the session", "error", err)
	}
}
