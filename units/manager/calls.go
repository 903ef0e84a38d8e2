package manager

import (
	"bytes"
	"context"
	"encoding/json"

	"mypr/internal/api"
	"mypr/internal/rpc"
)

// answerCall answers what the Python API asks.
func (m *Manager) answerCall(ctx context.Context, c Call) (any, error) {
	switch c.Method {
	case "status":
		return bind(c, func(p api.StatusParams) (any, error) { return m.status(ctx, p), nil })
	case "history.list":
		return bind(c, func(p api.HistoryParams) (any, error) { return m.history(ctx, p) })
	case "history.get":
		return bind(c, func(p api.RecordParams) (any, error) { return m.recordDetail(p) })
	case "history.output":
		return bind(c, func(p outputParams) (any, error) { return m.savedOutput(p) })
	case "history.logs":
		return bind(c, func(p api.LogsParams) (any, error) { return m.logs(ctx, p) })
	case "messages.send", "messages.reply", "messages.read", "messages.ack":
		return m.message(ctx, c)
	case "reset", "restart":
		return bind(c, func(p api.LifecycleParams) (any, error) {
			m.mu.Lock()
			origin := m.live[c.ExecID]
			m.mu.Unlock()
			if origin == nil {
				return nil, rpc.Errorf(rpc.CodeInvalidRequest, "ws.%s: it must be called in a cell that has not ended (a foreground cell)", c.Method)
			}
			if c.Method == "reset" {
				return m.reset(p, origin)
			}
			r, err := m.restart(p, origin, nil)
			if err != nil || !p.KeepKernel {
				return r, err
			}
			// The cell lives on and waits for this answer: it is that the restart was called
			// off, or none, by which the kernel knows that another manager is there.
			if err := m.awaitRestart(ctx); err != nil {
				return nil, err
			}
			return nil, rpc.Errorf(rpc.CodeUnavailable, "ws.restart: restart %s failed", r.ID).WithHint("its record is .mypr/restart.json")
		})
	}
	if m.jobs != nil && m.jobs.Handles(c.Method) {
		return m.callJobs(ctx, c)
	}
	if m.services == nil {
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "there is no method %q", c.Method)
	}
	return m.services(ctx, c)
}

// bind decodes the parameters of a call, refusing names that the method does not know.
func bind[P any](c Call, f func(P) (any, error)) (any, error) {
	var p P
	if len(c.Params) > 0 {
		d := json.NewDecoder(bytes.NewReader(c.Params))
		d.DisallowUnknownFields()
		if err := d.Decode(&p); err != nil {
			return nil, rpc.Errorf(rpc.CodeInvalidRequest, "%s: bad parameters: %v", c.Method, err)
		}
	}
	return f(p)
}
