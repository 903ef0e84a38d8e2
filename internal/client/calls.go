package client

import (
	"context"
	"strings"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
)

// waitOf is the longest wait that the manager will grant. What it does without being
// told is configurable, within the same bound.
func waitOf(ms *int64) time.Duration {
	n := int64(api.MaxWaitMS)
	if ms != nil {
		n = min(max(*ms, 0), api.MaxWaitMS)
	}
	return time.Duration(n) * time.Millisecond
}

// rest is what is left of a wait when a call is sent again.
func rest(ms *int64, spent time.Duration) *int64 {
	if ms == nil || spent < 50*time.Millisecond {
		return ms // the first sending, as the caller said it
	}
	left := max(waitOf(ms)-spent, 0).Milliseconds()
	return &left
}

// shown remembers what the caller now knows of the session.
func (c *Client) shown(generation string, inbox *api.Inbox) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if generation != "" {
		c.seen, c.current = generation, generation
	}
	if inbox != nil {
		c.seenMessage = max(c.seenMessage, inbox.Newest)
	}
}

// whole completes the beginning of the current generation. Anything else is left as it
// is, for the manager to refuse.
func (c *Client) whole(generation string) string {
	current := c.Generation()
	if len(generation) >= 8 && strings.HasPrefix(current, generation) {
		return current
	}
	return generation
}

// Init binds this client to a logical client id, which it keeps over reconnects.
func (c *Client) Init(ctx context.Context, p api.InitParams) (*api.InitResult, error) {
	var first *api.InitResult
	for range maxSends {
		var res api.InitResult
		var by *link
		_, err := c.do(ctx, request{
			method: api.MethodInit, budget: grace, again: true, result: &res, by: &by,
			params: func(time.Duration) any { return p },
		})
		if err != nil {
			return nil, err
		}
		c.mu.Lock()
		c.clientID, c.unbound = res.ClientID, ""
		bound := c.link == by
		c.mu.Unlock()
		if first == nil {
			first = &res
		} else if first.Notice == nil {
			first.Notice = res.Notice
		}
		if bound {
			break
		}
		// The connection ended with its answer, and the next one may have been made
		// without the id.
		p.ClientID = &res.ClientID
	}
	c.shown(first.Runtime.Generation, first.Inbox)
	return first, nil
}

// Execute submits a cell, and waits for its end as long as p says. When p has no
// request id one is made, so that the call can be sent again. p.Generation may be
// shortened to its first 8 digits or more, as people are shown it. progress, which may be
// nil, is called while the call waits; it must not block.
//
// When ctx ends, the cell goes on; the error matches ErrNotSent when there is none.
func (c *Client) Execute(ctx context.Context, p api.ExecuteParams, progress func(api.Progress)) (*api.ExecResult, error) {
	made := p.RequestID == nil
	if made {
		id := c.RequestID()
		p.RequestID = &id
	}
	defer c.watchProgress(*p.RequestID, progress)()
	var res api.ExecResult
	sends, err := c.do(ctx, request{
		method: api.MethodExecute, budget: waitOf(p.WaitMS) + grace, again: true, result: &res,
		params: func(spent time.Duration) any {
			q := p
			q.WaitMS = rest(p.WaitMS, spent)
			q.Generation = c.whole(p.Generation)
			return q
		},
	})
	if err != nil {
		if sends > 0 && ctx.Err() == nil && rpc.CodeOf(err) == rpc.CodeUnavailable {
			e := *rpc.AsError(err)
			e.Message += ". The cell may have been accepted"
			e.Hint = "execute the same code again with request_id=\"" + *p.RequestID + "\": it will not run twice; " + e.Hint
			err = &e
		}
		return nil, c.explain(err)
	}
	if made {
		res.Replayed = false // it is this very call that was sent twice
	}
	c.shown(res.Generation, res.Inbox)
	return &res, nil
}

// explain says why a client that had an id has none now.
func (c *Client) explain(err error) error {
	c.mu.Lock()
	why, id := c.unbound, c.clientID
	c.mu.Unlock()
	if why == "" || rpc.CodeOf(err) != api.CodeNotInitialized {
		return err
	}
	e := *rpc.AsError(err)
	e.Message += "; after a reconnect the id " + id + " could not be bound again: " + why
	return &e
}

// Poll reads an execution. progress is as for Execute.
func (c *Client) Poll(ctx context.Context, p api.PollParams, progress func(api.Progress)) (*api.ExecResult, error) {
	defer c.watchProgress(p.ExecID, progress)()
	var res api.ExecResult
	_, err := c.do(ctx, request{
		method: api.MethodPoll, budget: waitOf(p.WaitMS) + grace, again: true, result: &res,
		params: func(spent time.Duration) any {
			q := p
			q.WaitMS = rest(p.WaitMS, spent)
			return q
		},
	})
	if err != nil {
		return nil, err
	}
	c.shown(res.Generation, res.Inbox)
	return &res, nil
}

// ask is a call that may be asked twice, or not, with fixed parameters.
func ask[R any](ctx context.Context, c *Client, method string, params any, budget time.Duration, again bool) (*R, error) {
	var res R
	_, err := c.do(ctx, request{
		method: method, budget: budget, again: again, result: &res,
		params: func(time.Duration) any { return params },
	})
	if err != nil {
		return nil, err
	}
	return &res, nil
}

// Interrupt stops a cell. Without an exec id it is not sent again: by then another
// cell could be the one that runs.
func (c *Client) Interrupt(ctx context.Context, p api.InterruptParams) (*api.InterruptResult, error) {
	return ask[api.InterruptResult](ctx, c, api.MethodInterrupt, p, grace, p.ExecID != "")
}

// Status asks for the manager's view.
func (c *Client) Status(ctx context.Context, p api.StatusParams) (*api.Status, error) {
	budget := grace
	if p.AwaitKernel {
		budget = kernelTimeout
	}
	return ask[api.Status](ctx, c, api.MethodStatus, p, budget, true)
}

// Logs reads the event log. A wait is not shortened when it is sent again.
func (c *Client) Logs(ctx context.Context, p api.LogsParams) (*api.LogsPage, error) {
	return ask[api.LogsPage](ctx, c, api.MethodLogs, p, waitOf(&p.WaitMS)+grace, true)
}

// History pages through records.
func (c *Client) History(ctx context.Context, p api.HistoryParams) (*api.HistoryPage, error) {
	return ask[api.HistoryPage](ctx, c, api.MethodHistory, p, grace, true)
}

// Record reads one record.
func (c *Client) Record(ctx context.Context, p api.RecordParams) (*api.Record, error) {
	return ask[api.Record](ctx, c, api.MethodRecord, p, grace, true)
}

// Reset replaces the kernel.
func (c *Client) Reset(ctx context.Context, p api.LifecycleParams) (*api.ResetResult, error) {
	return ask[api.ResetResult](ctx, c, api.MethodReset, p, resetTimeout, false)
}

// Stop asks the manager to agree to its end; the caller then shuts the supervisor down.
func (c *Client) Stop(ctx context.Context, p api.LifecycleParams) (*api.StopResult, error) {
	return ask[api.StopResult](ctx, c, api.MethodStop, p, stopTimeout, false)
}

// Restart asks the manager to agree to being replaced.
func (c *Client) Restart(ctx context.Context, p api.LifecycleParams) (*api.RestartResult, error) {
	return ask[api.RestartResult](ctx, c, api.MethodRestart, p, stopTimeout, false)
}
