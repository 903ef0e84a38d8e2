package frontend

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/mark3labs/mcp-go/mcp"

	"mypr/internal/api"
	"mypr/internal/client"
	"mypr/internal/rpc"
)

// lookAfter bounds the question for what became of an execute that was cancelled.
const lookAfter = 5 * time.Second

// call is one tools/call in flight. It ends once: with an answer, or abandoned by its
// client, which then gets nothing.
type call struct {
	s        *server
	id       json.RawMessage
	tool     *tool
	modern   bool
	to       sink
	token    json.RawMessage // of progress; nil: not wanted
	began    time.Time
	cancel   context.CancelFunc
	finished chan struct{} // closed at the end
	behind   *call         // of execute: an init that was asked for before it, or nil

	mu        sync.Mutex // guards the fields below, and the order of what is sent
	done      bool
	abandoned bool
	progress  api.Progress
	heardAt   time.Time // when that came
}

// toolResult is the result of tools/call.
type toolResult struct {
	ResultType        mcp.ResultType `json:"resultType,omitempty"`
	Content           []mcp.Content  `json:"content"`
	StructuredContent any            `json:"structuredContent,omitempty"`
	IsError           bool           `json:"isError,omitempty"`
	Meta              map[string]any `json:"_meta"`
}

// The keys of _meta that are this server's own.
const (
	metaResult = "mypr/result" // the complete payload: api.InitResult, api.ExecResult, or errorPayload
	metaTiming = "timing_ms"
)

// errorPayload is the payload of a refusal.
type errorPayload struct {
	Error string     `json:"error"`
	Info  *rpc.Error `json:"error_info"`
}

// outcome is what a tool call came to.
type outcome struct {
	payload any
	text    func(view) string
	images  func() []picture
	isError bool
	notice  *api.Notice // in payload; must not be lost when the answer is
	inbox   *api.Inbox
}

// finish ends the call with an answer, unless it was abandoned. It reports whether
// the answer went out.
func (c *call) finish(result any, fail *failure) bool {
	c.s.mu.Lock()
	if c.s.running[string(c.id)] == c {
		delete(c.s.running, string(c.id))
	}
	if c.s.joining == c {
		c.s.joining = nil
	}
	c.s.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		return false
	}
	c.done = true
	close(c.finished)
	if c.abandoned {
		c.to.none()
		return false
	}
	c.to.answer(answer(c.id, result, fail))
	return true
}

// abandon ends the waiting: the client no longer wants the answer.
func (c *call) abandon() {
	c.mu.Lock()
	c.abandoned = true
	c.mu.Unlock()
	c.cancel()
}

func (c *call) isAbandoned() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.abandoned
}

// run carries the call out.
func (c *call) run(ctx context.Context, raw json.RawMessage) {
	if c.token != nil {
		c.s.calls.Go(c.report)
	}
	var o outcome
	a, err := c.tool.bind(raw)
	asked := time.Now()
	var after func()
	if err == nil {
		switch c.tool.name {
		case "init":
			o, err = c.init(ctx, a)
		case "execute":
			o, after, err = c.execute(ctx, a)
		case "poll":
			o, err = c.poll(ctx, a)
		}
	}
	answered := time.Now()
	if err != nil {
		if c.s.ctx.Err() != nil {
			err = rpc.Errorf(rpc.CodeUnavailable, "this MCP server is ending: the wait is over, what runs in the session goes on")
		}
		o = refusal(err)
	}
	c.deliver(o, map[string]any{"runtime": milliseconds(answered.Sub(asked))})
	if after != nil && c.isAbandoned() {
		after()
	}
}

// deliver renders an outcome and sends it. What it would have said about a loss is
// kept for the next answer when it is not sent.
func (c *call) deliver(o outcome, timing map[string]any) {
	s := c.s
	v := view{}
	if !c.isAbandoned() {
		s.mu.Lock()
		v.notices, v.notes, v.inbox = s.left.notices, s.left.notes, s.inbox
		s.left = leftovers{}
		s.mu.Unlock()
	}
	begun := time.Now()
	r := toolResult{IsError: o.isError, Meta: map[string]any{metaResult: o.payload, metaTiming: timing}}
	r.Content = append(r.Content, mcp.NewTextContent(o.text(v)))
	if o.images != nil {
		for _, p := range o.images() {
			r.Content = append(r.Content, mcp.NewImageContent(base64.StdEncoding.EncodeToString(p.data), p.mime))
		}
	}
	if s.structured {
		r.StructuredContent = o.payload
	}
	if c.modern {
		r.ResultType = mcp.ResultTypeComplete
		r.Meta[mcp.MetaKeyServerInfo] = s.info
	}
	timing["render"] = milliseconds(time.Since(begun))
	timing["total"] = milliseconds(time.Since(c.began))
	if !c.finish(r, nil) {
		s.leave(append(v.notices, o.notice), v.notes...)
	} else if o.inbox != nil {
		s.mu.Lock()
		s.inbox = inboxKey(o.inbox)
		s.mu.Unlock()
	}
}

// leave keeps what an undelivered answer would have said.
func (s *server) leave(notices []*api.Notice, notes ...string) {
	const most = 8 // of each: a client that cancels everything must not make them pile up
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range notices {
		if n != nil && len(s.left.notices) < most {
			s.left.notices = append(s.left.notices, n)
		}
	}
	for _, n := range notes {
		if len(s.left.notes) < most {
			s.left.notes = append(s.left.notes, n)
		}
	}
}

func milliseconds(d time.Duration) float64 {
	return float64(d.Microseconds()) / 1000
}

// refusal is the outcome of a call that was refused or failed before it had a cell.
func refusal(err error) outcome {
	e := rpc.AsError(err)
	var bad *badArgument
	if errors.As(err, &bad) {
		e = rpc.Errorf(rpc.CodeInvalidRequest, "%s", bad.text)
	}
	return outcome{
		payload: errorPayload{e.Message, e}, isError: true,
		text: func(v view) string { return renderError(e, v) },
	}
}

func (c *call) init(ctx context.Context, a args) (outcome, error) {
	r, err := c.s.client.Init(ctx, api.InitParams{ClientID: a.str("client_id")})
	if err != nil {
		return outcome{}, err
	}
	r.Runtime.BridgeVersion = c.s.info.Version
	r.Runtime.UpdatePending = api.UpdatePending(r.Runtime.ManagerVersion, c.s.info.Version)
	return outcome{
		payload: r, notice: r.Notice, inbox: r.Inbox,
		text: func(v view) string { return renderInit(r, v) },
	}, nil
}

// execute runs a cell. after, when the call is abandoned, finds out what became of
// the cell: the client has no other way to learn its id.
func (c *call) execute(ctx context.Context, a args) (o outcome, after func(), err error) {
	p := api.ExecuteParams{
		Code: *a.str("code"), WaitMS: a.int("wait_ms"), RequestID: a.str("request_id"), MaxBytes: a.int("max_bytes"),
	}
	if g := a.str("generation"); g != nil {
		p.Generation = *g
	}
	if len(p.Code) > api.MaxCodeBytes {
		return o, nil, &badArgument{fmt.Sprintf("execute: code has %d bytes, over the limit of %d; put it into a file and import or read that", len(p.Code), api.MaxCodeBytes)}
	}
	if c.behind != nil { // some clients send both at once
		select {
		case <-c.behind.finished:
		case <-ctx.Done():
			return o, nil, ctx.Err()
		}
	}
	made := p.RequestID == nil
	if made {
		id := c.s.client.RequestID()
		p.RequestID = &id
	}
	r, err := c.s.client.Execute(ctx, p, c.heard)
	if err != nil {
		if !errors.Is(err, client.ErrNotSent) && ctx.Err() != nil {
			after = func() { c.lookAfter(p) }
		}
		return o, after, err
	}
	if made {
		r.Replayed = false
	}
	after = func() { c.s.leave(nil, noteOf(r)) }
	return c.page(r, nil, p.MaxBytes != nil), after, nil
}

// lookAfter asks for the cell of an abandoned execute by its request id, which runs
// nothing that was accepted before, and leaves a note for the next answer.
func (c *call) lookAfter(p api.ExecuteParams) {
	ctx, cancel := context.WithTimeout(c.s.ctx, lookAfter)
	defer cancel()
	now, least := int64(0), int64(api.MinBytes)
	p.WaitMS, p.MaxBytes = &now, &least
	r, err := c.s.client.Execute(ctx, p, nil)
	if err != nil {
		c.s.log.Info("what became of a cancelled execute is not known", "error", err)
		return
	}
	c.s.leave([]*api.Notice{r.Notice}, noteOf(r))
}

func noteOf(r *api.ExecResult) string {
	if api.Terminal(r.State) {
		return fmt.Sprintf("[an execute that you cancelled was not undone: its cell %s has ended, %s]", r.ExecID, r.State)
	}
	return fmt.Sprintf("[an execute that you cancelled was not stopped: its cell %s was %s then; poll(exec_id) reads it, with interrupt=true it is stopped]", r.ExecID, r.State)
}

func (c *call) poll(ctx context.Context, a args) (outcome, error) {
	p := api.PollParams{
		ExecID: *a.str("exec_id"), Cursor: a.int("cursor"), WaitMS: a.int("wait_ms"), MaxBytes: a.int("max_bytes"),
		Interrupt: a.booleans["interrupt"], UntilDone: a.booleans["until_done"],
	}
	r, err := c.s.client.Poll(ctx, p, c.heard)
	if err != nil {
		return outcome{}, err
	}
	return c.page(r, &p, p.MaxBytes != nil), nil
}

// page is the outcome that shows a page of an execution.
func (c *call) page(r *api.ExecResult, poll *api.PollParams, whole bool) outcome {
	if r.Runtime != nil {
		r.Runtime.BridgeVersion = c.s.info.Version
		r.Runtime.UpdatePending = api.UpdatePending(r.Runtime.ManagerVersion, c.s.info.Version)
	}
	var pictures []picture
	return outcome{
		payload: r, notice: r.Notice, inbox: r.Inbox, isError: r.State == api.Lost,
		text: func(v view) string {
			v.poll, v.whole = poll, whole
			var text string
			text, pictures = renderExec(r, v)
			return text
		},
		images: func() []picture { return pictures },
	}
}

// heard takes the manager's word on how the call goes.
func (c *call) heard(p api.Progress) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.progress, c.heardAt = p, time.Now()
}

// report sends progress while the call waits.
func (c *call) report() {
	t := time.NewTicker(c.s.progressEvery)
	defer t.Stop()
	for {
		select {
		case <-c.finished:
			return
		case <-t.C:
			c.tell()
		}
	}
}

// tell sends one progress notification. It holds mu, as finish does, so that none can
// come after the result.
func (c *call) tell() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done || c.abandoned {
		return
	}
	spent := time.Since(c.began)
	text := "waiting for the session, " + elapsed(spent.Milliseconds())
	if p := c.progress; p.State != "" {
		text = p.State + " " + elapsed(int64(p.Seconds*1000)+time.Since(c.heardAt).Milliseconds())
		if line := fold(p.LastLine); line != "" {
			text += ": " + line
		}
	}
	_ = c.s.out.send(map[string]any{
		"jsonrpc": mcp.JSONRPC_VERSION,
		"method":  "notifications/progress",
		"params": map[string]any{
			"progressToken": c.token,
			"progress":      spent.Seconds(), // the clock is monotonic: it rises
			"message":       clip(text, 190),
		},
	})
}
