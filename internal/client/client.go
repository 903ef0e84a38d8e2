// Package client is the runtime client that front ends and the command line share:
// typed calls to the manager over the runtime socket, on a connection that is made
// when it is first needed and made again when it breaks.
//
// It owns the connection, its identity (connection id, client id, last generation
// shown) and the rules of sending again. It does not find or start a runtime: the
// Ensure function of its Options does (internal/workspace). It renders nothing.
//
// # Sending again
//
// When a connection ends without an answer, the calls that wait on it are sent again
// over the next one. Every execute carries a request id (one is made when the caller
// gave none), by which the manager knows a cell that it has already accepted, so
// nothing runs twice; poll, init and the questions (status, logs, …) may be asked
// twice by nature. Reset, stop and restart are not sent again: their fate is reported
// as unknown.
//
// # Who may start a runtime
//
// A new call may, through Ensure. A call that was cut off may too, but only when the
// runtime died; after an announced stop (api.NotificationStopping), or when the socket
// has been removed, it fails, for a stop must not be undone by whoever happened to
// wait. An idle client connects again by itself only to a socket that still listens:
// the supervisor holds it, so while the manager restarts the connection waits in the
// backlog and no polling is needed.
package client

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
)

// Bounds of one call. A client's own patience is often 60 s, so a call must have
// failed readably before that. Variables, for tests.
var (
	connectTimeout = 40 * time.Second       // find or start a runtime, connect, attach
	grace          = 20 * time.Second       // on top of the wait that the caller asked for; includes reconnecting
	overdue        = 300 * time.Millisecond // then Trouble is asked what keeps a manager that says nothing
)

const (
	resetTimeout = 90 * time.Second // ends a kernel by escalation and starts another
	stopTimeout  = 60 * time.Second
	// A new environment with a Python from far away; whoever asks for that bounds it.
	kernelTimeout = 10 * time.Minute
	maxSends      = 12 // of one call: the manager may be dying of that very call; the supervisor gives it up after as many starts in a minute
	maxAttaches   = 10 // in a row: connections that end before they are attached

	// A short cell is answered in less, and an agent calls less than once a second.
	linger = time.Millisecond
)

// CodeStopped is the code of a call whose runtime was stopped while it waited.
const CodeStopped = "runtime_stopped"

// ErrNotSent is matched (errors.Is) by the error of a call that certainly never
// reached the manager.
var ErrNotSent = errors.New("the request was not sent")

type notSent struct{ error }

func (e notSent) Unwrap() error        { return e.error }
func (e notSent) Is(target error) bool { return target == ErrNotSent }

// Options configure a Client.
type Options struct {
	// Ensure finds the runtime of the workspace, starts it when there is none, and
	// returns the path of its socket. Its errors reach the user as they are.
	Ensure  func(ctx context.Context) (socket string, err error)
	Kind    string // frontend, cli
	Name    string // what the MCP client calls itself; SetName changes it
	Version string
	// Passive connections are not attached: they do not count as a client and can
	// neither init nor execute.
	Passive bool
	// Trouble, if not nil, is asked about the runtime at socket when its manager has said
	// nothing for a moment. It returns an error, which the call then fails with, as soon as
	// it knows that none will come before somebody does something, and nil when it cannot
	// know or ctx ends.
	Trouble func(ctx context.Context, socket string) error
	Logger  *slog.Logger
}

// Client is a connection to a runtime that mends itself. It is safe for concurrent
// use. Close ends it with all that it started.
type Client struct {
	opts   Options
	log    *slog.Logger
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // dial and watch goroutines

	mu       sync.Mutex // guards the fields below
	name     string
	link     *link // nil: not connected
	dialing  *dialing
	socket   string // that answered last
	clientID string
	unbound  string // why clientID could not be bound again
	seen     string // generation that the last delivered answer was about
	current  string // newest generation heard of
	// seenMessage is the newest message that a delivered answer has counted.
	seenMessage int64
	stopped     *api.Stopping
	watchers    map[*watcher]struct{} // waiting calls that want progress
	closed      bool
}

// link is one attached connection.
type link struct {
	conn     *rpc.Conn
	id       string
	requests int64 // numbered so far; guarded by Client.mu
}

// watcher gets the progress of one waiting call; key is its request id or exec id.
type watcher struct {
	key  string
	tell func(api.Progress)
}

// dialing is a connection in the making, shared by all who wait for one.
type dialing struct {
	right right
	done  chan struct{}
	link  *link
	err   error
}

// right is what the one who asks for a connection may do to get it.
type right int

const (
	mayConnect right = iota // to the known socket, when something listens there
	mayRevive               // also start a runtime that died, not one that was stopped
	mayStart                // also start a runtime
)

// New makes a client. It does not connect.
func New(o Options) *Client {
	c := &Client{opts: o, log: o.Logger, name: o.Name, watchers: map[*watcher]struct{}{}}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// Close ends the connection. Calls that wait fail.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	l := c.link
	c.mu.Unlock()
	c.cancel()
	if l != nil {
		l.conn.CloseAsync()
	}
	c.wg.Wait()
	return nil
}

// SetName says what the MCP client calls itself. It is told at the next attach.
func (c *Client) SetName(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.name = name
}

// Generation is the newest generation of the session that this client heard of, ""
// before the first connection.
func (c *Client) Generation() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current
}

// NewID is 32 random hex digits: a connection id, or a request id.
func NewID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return hex.EncodeToString(b[:])
}

// RequestID makes a request id that no cell of this client has. The manager knows a
// number of the connection that it comes by to be new without looking.
func (c *Client) RequestID() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == nil {
		return NewID()
	}
	c.link.requests++
	return c.link.id + ":" + strconv.FormatInt(c.link.requests, 10)
}

// request is one call. params is built anew for each sending: what was waited for
// already is taken off the wait.
type request struct {
	method string
	params func(spent time.Duration) any
	result any
	budget time.Duration // from the first sending on
	again  bool          // may be sent again
	by     **link        // when not nil: set to who answered
}

// do carries one request to an answer.
func (c *Client) do(ctx context.Context, q request) (sends int, err error) {
	var first time.Time
	r := mayStart
	sendCtx := ctx
	for {
		l, err := c.acquire(sendCtx, r)
		if err != nil {
			if sends == 0 {
				return 0, notSent{err}
			}
			return sends, c.overdue(ctx, q, first, err)
		}
		if sends == 0 {
			first = time.Now()
			var cancel context.CancelFunc
			sendCtx, cancel = context.WithDeadline(ctx, first.Add(q.budget))
			defer cancel()
		}
		sends++
		err = c.send(sendCtx, l, q, time.Since(first))
		if q.by != nil {
			*q.by = l
		}
		if err == nil || !errors.Is(err, rpc.ErrClosed) {
			return sends, c.overdue(ctx, q, first, err)
		}
		c.log.Info("connection ended during a call", "method", q.method, "connection", l.id, "error", err)
		switch {
		case !q.again:
			return sends, rpc.Errorf(rpc.CodeUnavailable, "the connection to the runtime ended before %s was answered: whether it was carried out is unknown", q.method).
				WithHint("mypr-mcp status, then the same again if it was not")
		case sends == maxSends:
			return sends, rpc.Errorf(rpc.CodeUnavailable, "the manager ended %d times while it worked on this %s", sends, q.method).
				WithHint("mypr-mcp status, and .mypr/manager.log for the reason")
		}
		r = mayRevive
	}
}

// send is one sending.
func (c *Client) send(ctx context.Context, l *link, q request, spent time.Duration) error {
	c.mu.Lock()
	stopped := c.stopped
	c.mu.Unlock()
	err := l.conn.Call(ctx, q.method, q.params(spent), q.result)
	if err == nil && stopped != nil && q.method == api.MethodExecute {
		// Whoever runs cells does not stop: the stop was called off.
		c.mu.Lock()
		if c.stopped == stopped {
			c.stopped = nil
		}
		c.mu.Unlock()
	}
	return err
}

// overdue turns the end of the call's own time into an error for people.
func (c *Client) overdue(ctx context.Context, q request, first time.Time, err error) error {
	if err == nil || ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	late := rpc.Errorf(rpc.CodeUnavailable, "the manager did not answer %s within %s", q.method, time.Since(first).Round(100*time.Millisecond))
	c.mu.Lock()
	socket := c.socket
	c.mu.Unlock()
	if c.opts.Trouble != nil && socket != "" {
		ctx, cancel := context.WithTimeout(ctx, overdue)
		defer cancel()
		if t := c.opts.Trouble(ctx, socket); t != nil {
			why := rpc.AsError(t)
			late.Message += ": " + strings.TrimPrefix(why.Message, "the manager does not answer: ")
			return late.WithHint("%s", why.Hint)
		}
	}
	return late.WithHint("mypr-mcp status; when the manager hangs: mypr-mcp units restart manager, which keeps Python memory")
}

// acquire is a live connection. It joins an attempt that is under way, and makes one
// of its own when that failed for want of a right.
func (c *Client) acquire(ctx context.Context, r right) (*link, error) {
	for {
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			return nil, rpc.Errorf(rpc.CodeUnavailable, "this front end is shutting down")
		}
		if l := c.link; l != nil && l.conn.Err() == nil {
			c.mu.Unlock()
			return l, nil
		}
		d := c.dialing
		if d == nil {
			d = c.startDial(r)
		}
		c.mu.Unlock()
		select {
		case <-d.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if d.err == nil {
			return d.link, nil
		}
		if d.right >= r {
			return nil, d.err
		}
	}
}

// startDial begins an attempt in a goroutine that Close waits for. mu is held.
func (c *Client) startDial(r right) *dialing {
	d := &dialing{right: r, done: make(chan struct{})}
	c.dialing = d
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		ctx, cancel := context.WithTimeout(c.ctx, connectTimeout)
		defer cancel()
		l, err := c.dial(ctx, r)
		if err != nil && c.ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
			err = rpc.Errorf(rpc.CodeUnavailable, "no answer from the runtime within %s", connectTimeout).
				WithHint("mypr-mcp status; when the manager hangs: mypr-mcp units restart manager, which keeps Python memory")
		}
		c.mu.Lock()
		c.dialing = nil
		d.link, d.err = l, err
		if l != nil {
			c.link, c.stopped = l, nil
			if c.closed {
				l.conn.CloseAsync()
			}
			c.wg.Add(1)
			go c.watch(l)
		}
		c.mu.Unlock()
		close(d.done)
	}()
	return d
}

// watch waits for the end of a connection, and reconnects when that was no stop.
func (c *Client) watch(l *link) {
	defer c.wg.Done()
	<-l.conn.Done()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == l {
		c.link = nil
	}
	if c.closed || c.link != nil || c.dialing != nil || c.opts.Passive {
		return
	}
	if c.stopped != nil {
		c.log.Info("the runtime was stopped", "reason", c.stopped.Reason)
		return
	}
	c.log.Info("connection ended", "connection", l.id, "error", l.conn.Err())
	c.startDial(mayConnect)
}

// dial makes an attached connection.
func (c *Client) dial(ctx context.Context, r right) (*link, error) {
	c.mu.Lock()
	socket, stopped := c.socket, c.stopped
	c.mu.Unlock()
	// A socket unit would start the service at a connect, so after a stop even that
	// is a right of new calls alone.
	if socket != "" && (stopped == nil || r == mayStart) {
		l, err := c.attach(ctx, socket)
		if err == nil || !rpc.IsGone(err) {
			return l, err
		}
		if r == mayConnect {
			return nil, fmt.Errorf("nobody listens any more: %w", err)
		}
		if r == mayRevive && errors.Is(err, fs.ErrNotExist) {
			stopped = &api.Stopping{Kind: "stop"}
		}
	}
	if r != mayStart && stopped != nil {
		msg := "the runtime was stopped while this call waited"
		if stopped.Reason != "" {
			msg += " (" + stopped.Reason + ")"
		}
		return nil, rpc.Errorf(CodeStopped, "%s: Python memory is gone, files and history remain", msg).
			WithHint("the next call starts a new session")
	}
	for again := false; ; again = true {
		socket, err := c.opts.Ensure(ctx)
		if err != nil {
			return nil, err
		}
		c.mu.Lock()
		c.socket = socket
		c.mu.Unlock()
		l, err := c.attach(ctx, socket)
		if err == nil || again || !rpc.IsGone(err) {
			return l, err
		}
		// It was stopped between the two, or before it had answered.
	}
}

// attach connects and introduces this client. A connection that ends before the
// answer was waiting for a manager that did not live to see it, so it tries again;
// each try is ended by an event of the other side, not by a timer.
func (c *Client) attach(ctx context.Context, socket string) (*link, error) {
	for n := 1; ; n++ {
		l, err := c.attachOnce(ctx, socket)
		if !errors.Is(err, rpc.ErrClosed) {
			return l, err
		}
		if n == maxAttaches {
			return nil, rpc.Errorf(rpc.CodeUnavailable, "the manager ended the connection %d times before it answered", n).
				WithHint("mypr-mcp status, and .mypr/manager.log for the reason")
		}
	}
}

func (c *Client) attachOnce(ctx context.Context, socket string) (*link, error) {
	conn, err := rpc.Dial(ctx, socket, rpc.HandlerFunc(c.notified))
	if err != nil {
		return nil, fmt.Errorf("cannot connect to the runtime at %s: %w", socket, err)
	}
	conn.Linger(linger)
	l := &link{conn: conn, id: NewID()}
	if c.opts.Passive {
		// Only what answers is asked for something: in the backlog of a manager that is
		// frozen a reset would wait, to be carried out when nobody wants it any more.
		err := c.unlessTrouble(ctx, socket, func(ctx context.Context) error {
			return conn.Call(ctx, api.MethodStatus, api.StatusParams{}, nil)
		})
		if err != nil {
			conn.CloseAsync()
			return nil, err
		}
		return l, nil
	}
	c.mu.Lock()
	p := api.AttachParams{
		ConnectionID: l.id, Protocol: api.Protocol, Version: c.opts.Version,
		Kind: c.opts.Kind, Name: c.name, Progress: c.opts.Kind == "frontend",
		ClientID: c.clientID, SeenGeneration: c.seen, SeenMessage: c.seenMessage,
	}
	c.mu.Unlock()
	var res api.AttachResult
	err = c.unlessTrouble(ctx, socket, func(ctx context.Context) error { return conn.Call(ctx, api.MethodAttach, p, &res) })
	if err != nil {
		conn.CloseAsync()
		return nil, err
	}
	c.mu.Lock()
	c.current = res.Runtime.Generation
	c.unbound = ""
	if p.ClientID != "" && res.ClientID == "" {
		c.unbound = res.BindError
	}
	c.mu.Unlock()
	return l, nil
}

// unlessTrouble does what waits for a manager, as long as there is hope of an answer.
func (c *Client) unlessTrouble(ctx context.Context, socket string, wait func(context.Context) error) error {
	if c.opts.Trouble == nil {
		return wait(ctx)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var trouble error
	asked := make(chan struct{})
	late := time.AfterFunc(overdue, func() {
		defer close(asked)
		if trouble = c.opts.Trouble(ctx, socket); trouble != nil {
			cancel()
		}
	})
	err := wait(ctx)
	if !late.Stop() {
		cancel()
		<-asked
		if err != nil && trouble != nil {
			return trouble
		}
	}
	return err
}

// notified takes the manager's notifications, in order.
func (c *Client) notified(_ context.Context, r *rpc.Request) (any, error) {
	r.CloseFiles()
	if !r.Notification {
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "a client answers no requests")
	}
	switch r.Method {
	case api.NotificationStopping:
		var s api.Stopping
		// An unknown field of a newer manager must not turn a stop into a crash.
		if json.Unmarshal(r.Params, &s) == nil && s.Kind != "restart" {
			c.mu.Lock()
			c.stopped = &s
			c.mu.Unlock()
		}
	case api.NotificationProgress:
		var p api.Progress
		if json.Unmarshal(r.Params, &p) != nil {
			return nil, nil
		}
		key := p.RequestID
		if key == "" {
			key = p.ExecID
		}
		c.mu.Lock()
		var told []*watcher
		for w := range c.watchers {
			if w.key == key {
				told = append(told, w)
			}
		}
		c.mu.Unlock()
		for _, w := range told {
			w.tell(p)
		}
	}
	return nil, nil
}

// watchProgress passes the progress of one call to tell, until forget is called.
func (c *Client) watchProgress(key string, tell func(api.Progress)) (forget func()) {
	if tell == nil {
		return func() {}
	}
	w := &watcher{key, tell}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watchers[w] = struct{}{}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.watchers, w)
	}
}
