// Package clienttest is a runtime for tests of its clients: a real socket, a real rpc
// server and the methods of internal/api over cells that a test plays by hand. It can
// die in the ways that a runtime can.
//
// It owns the socket and the records, which outlive its manager as they do in earnest.
// It does not run Python, and it is no model of how the manager works inside.
package clienttest

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
)

// Runtime is a supervisor's socket, with a manager behind it or not.
type Runtime struct {
	Socket string

	t testing.TB

	mu         sync.Mutex // guards the fields below
	listener   *net.UnixListener
	manager    *manager
	generation string
	cells      map[string]*Cell
	byRequest  map[string]*Cell
	attached   []api.AttachParams
	starts     int
	play       func(*Cell)
	hook       func(ctx context.Context, r *rpc.Request) (any, error, bool)
	notice     *api.Notice
	bound      map[string]string // client id: connection id
	next       int
	arrived    chan string
}

// manager is one life of the manager.
type manager struct {
	cancel context.CancelFunc
	done   chan struct{}

	mu    sync.Mutex // guards conns
	conns map[*rpc.Conn]*connection
}

type connection struct {
	attach   api.AttachParams
	clientID string
	seen     string
}

// Cell is an execution.
type Cell struct {
	ID     string
	Params api.ExecuteParams

	r       *Runtime
	state   string
	output  []api.Event
	err     *string
	info    *api.ErrorInfo
	gen     string
	begun   time.Time
	ran     int // how often it was started
	changed chan struct{}
}

// New makes a runtime whose socket listens and whose manager serves. It ends with the
// test.
func New(t testing.TB) *Runtime {
	dir, err := os.MkdirTemp("", "mypr") // t.TempDir can be longer than a socket path may be
	if err != nil {
		t.Fatal(err)
	}
	r := &Runtime{
		Socket: filepath.Join(dir, "r.sock"), t: t, generation: "11111111aaaaaaaaaaaaaaaaaaaaaaaa",
		cells: map[string]*Cell{}, byRequest: map[string]*Cell{}, bound: map[string]string{}, arrived: make(chan string, 1000),
		play: func(c *Cell) { c.End(api.Succeeded, "") },
	}
	r.Listen()
	r.Start()
	t.Cleanup(func() {
		r.Crash()
		os.RemoveAll(dir)
	})
	return r
}

// Ensure finds the runtime, and starts it when it is down. Starts counts the latter.
func (r *Runtime) Ensure(context.Context) (string, error) {
	r.mu.Lock()
	down := r.listener == nil
	if down {
		r.starts++
	}
	r.mu.Unlock()
	if down {
		r.NewGeneration()
		r.Listen()
		r.Start()
	}
	return r.Socket, nil
}

// Starts is how often Ensure had to start the runtime.
func (r *Runtime) Starts() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.starts
}

// Listen makes the socket, as the supervisor does.
func (r *Runtime) Listen() {
	os.Remove(r.Socket)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: r.Socket, Net: "unix"})
	if err != nil {
		r.t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listener = l
}

// Start starts a manager on the socket.
func (r *Runtime) Start() {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, err := r.listener.File()
	if err != nil {
		r.t.Fatal(err)
	}
	l, err := net.FileListener(f)
	f.Close()
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	m := &manager{cancel: cancel, done: make(chan struct{}), conns: map[*rpc.Conn]*connection{}}
	s := &rpc.Server{NewHandler: func(c *rpc.Conn) rpc.Handler {
		conn := &connection{}
		m.mu.Lock()
		m.conns[c] = conn
		m.mu.Unlock()
		return rpc.HandlerFunc(func(ctx context.Context, q *rpc.Request) (any, error) { return r.handle(ctx, conn, q) })
	}}
	go func() {
		defer close(m.done)
		if err := s.Serve(ctx, l.(*net.UnixListener)); err != nil {
			r.t.Error(err)
		}
	}()
	r.manager = m
	r.bound = map[string]string{}
}

// Kill ends the manager. The socket goes on listening, nobody accepts.
func (r *Runtime) Kill() {
	r.mu.Lock()
	m := r.manager
	r.manager = nil
	r.mu.Unlock()
	if m != nil {
		m.cancel()
		<-m.done
	}
}

// Crash ends everything. The socket file stays, nobody listens.
func (r *Runtime) Crash() {
	r.Kill()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.listener != nil {
		r.listener.Close()
		r.listener = nil
	}
}

// Stop announces the end, then ends everything. The socket file stays.
func (r *Runtime) Stop(reason string) {
	r.Notify(api.NotificationStopping, api.Stopping{Kind: "stop", Reason: reason})
	r.Crash()
}

// Notify sends a notification to every connection.
func (r *Runtime) Notify(method string, params any) {
	r.mu.Lock()
	m := r.manager
	r.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.conns {
		_ = c.Notify(method, params)
	}
}

// NewGeneration is a new kernel: what ran is lost, and every connection is told.
func (r *Runtime) NewGeneration() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.generation
	r.next++
	r.generation = fmt.Sprintf("%08x%024x", 0x22222222+r.next, r.next)
	r.notice = &api.Notice{Kind: "kernel_died", Text: "Python was killed by signal 9. Its memory is lost, files remain.", OldGeneration: old, Generation: r.generation}
	for _, c := range r.cells {
		if !api.Terminal(c.state) {
			c.endLocked(api.Lost, "the kernel was killed by signal 9")
		}
	}
	return r.generation
}

// Generation is the current one.
func (r *Runtime) Generation() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.generation
}

// Play sets what a new cell does; it is called once for each, in its own goroutine's
// stead, so it must not wait. The default ends it at once.
func (r *Runtime) Play(f func(*Cell)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.play = f
}

// Hook lets a test answer any method itself: it does when it returns true.
func (r *Runtime) Hook(f func(ctx context.Context, q *rpc.Request) (any, error, bool)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hook = f
}

// Attached are the introductions, as they came.
func (r *Runtime) Attached() []api.AttachParams {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]api.AttachParams{}, r.attached...)
}

// Await waits until a request of this method arrives that no Await has seen.
func (r *Runtime) Await(method string) {
	r.t.Helper()
	timeout := time.After(60 * time.Second)
	for {
		select {
		case m := <-r.arrived:
			if m == method {
				return
			}
		case <-timeout:
			r.t.Fatalf("no %s came", method)
		}
	}
}

// Cells are all executions.
func (r *Runtime) Cells() []*Cell {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []*Cell
	for _, c := range r.cells {
		all = append(all, c)
	}
	return all
}

// Print appends output.
func (c *Cell) Print(text string) { c.Emit(api.Event{Type: "stream", Stream: "stdout", Text: text}) }

// Emit appends events.
func (c *Cell) Emit(events ...api.Event) {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	c.output = append(c.output, events...)
	close(c.changed)
	c.changed = make(chan struct{})
}

// End ends the cell.
func (c *Cell) End(state, err string) {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	c.endLocked(state, err)
}

// Ran is how often the code was started.
func (c *Cell) Ran() int {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	return c.ran
}

func (c *Cell) endLocked(state, err string) {
	c.state = state
	if err != "" {
		c.err = &err
	}
	close(c.changed)
	c.changed = make(chan struct{})
}

func (r *Runtime) handle(ctx context.Context, conn *connection, q *rpc.Request) (any, error) {
	r.mu.Lock()
	hook := r.hook
	r.mu.Unlock()
	if q.Method == api.MethodAttach {
		defer r.arrive(q.Method) // when it is among Attached
	} else {
		r.arrive(q.Method)
	}
	if hook != nil {
		if v, err, ok := hook(ctx, q); ok {
			return v, err
		}
	}
	switch q.Method {
	case api.MethodAttach:
		return r.attach(conn, q)
	case api.MethodInit:
		return r.init(conn, q)
	case api.MethodExecute:
		var p api.ExecuteParams
		if err := q.Bind(&p); err != nil {
			return nil, err
		}
		res, err := r.execute(ctx, conn, p)
		return mute(ctx, q, res, err)
	case api.MethodPoll:
		var p api.PollParams
		if err := q.Bind(&p); err != nil {
			return nil, err
		}
		res, err := r.poll(ctx, conn, p)
		return mute(ctx, q, res, err)
	case api.MethodStatus:
		return api.Status{Generation: r.Generation(), ProtocolVersion: api.Protocol}, nil
	}
	return nil, rpc.Errorf(rpc.CodeInvalidRequest, "no method %q", q.Method)
}

// arrive tells Await. A test that never awaits may fill the channel.
func (r *Runtime) arrive(method string) {
	select {
	case r.arrived <- method:
	default:
	}
}

// mute holds back the answer to a call that nobody waits for, until the connection has
// ended: a manager that is killed says nothing any more.
func mute(ctx context.Context, q *rpc.Request, res any, err error) (any, error) {
	if ctx.Err() != nil {
		<-q.Conn.Done()
	}
	return res, err
}

func (r *Runtime) attach(conn *connection, q *rpc.Request) (any, error) {
	if err := q.Bind(&conn.attach); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.attached = append(r.attached, conn.attach)
	conn.seen = conn.attach.SeenGeneration
	if conn.seen == "" {
		conn.seen = r.generation
	}
	res := api.AttachResult{Runtime: r.runtimeLocked()}
	if id := conn.attach.ClientID; id != "" {
		if other, taken := r.bound[id]; taken && other != conn.attach.ConnectionID {
			res.BindError = "another connection uses it"
		} else {
			conn.clientID, res.ClientID = id, id
			r.bound[id] = conn.attach.ConnectionID
		}
	}
	return res, nil
}

func (r *Runtime) runtimeLocked() api.Runtime {
	return api.Runtime{
		ManagerVersion: "1.0.0", ProtocolVersion: api.Protocol, Generation: r.generation, Workspace: "/ws",
		Python: "3.13.0 (/ws/.mypr/venv/bin/python)", Capabilities: []string{"execute", "poll"},
	}
}

func (r *Runtime) noticeLocked(conn *connection) *api.Notice {
	if conn.seen == r.generation {
		return nil
	}
	conn.seen = r.generation
	return r.notice
}

func (r *Runtime) init(conn *connection, q *rpc.Request) (any, error) {
	var p api.InitParams
	if err := q.Bind(&p); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	res := api.InitResult{Runtime: r.runtimeLocked(), Notice: r.noticeLocked(conn)}
	res.Runtime.Instructions = "Be kind to the session."
	switch {
	case conn.clientID != "" && (p.ClientID == nil || *p.ClientID == conn.clientID):
	case conn.clientID != "":
		return nil, rpc.Errorf(api.CodeClientBound, "this connection already has a different client ID, %s", conn.clientID)
	case p.ClientID != nil:
		conn.clientID, res.Resumed = *p.ClientID, true
	default:
		conn.clientID = fmt.Sprintf("calm-otter-%d", len(r.bound)+1)
	}
	r.bound[conn.clientID] = conn.attach.ConnectionID
	res.ClientID = conn.clientID
	return res, nil
}

func (r *Runtime) execute(ctx context.Context, conn *connection, p api.ExecuteParams) (any, error) {
	r.mu.Lock()
	if conn.clientID == "" {
		r.mu.Unlock()
		return nil, rpc.Errorf(api.CodeNotInitialized, "this connection has no client id yet").WithHint("call init first")
	}
	if p.Generation != "" && p.Generation != r.generation {
		g := r.generation
		r.mu.Unlock()
		return nil, rpc.Errorf(api.CodeGeneration, "the session is generation %s, not %s: nothing was run", g, p.Generation)
	}
	key := conn.clientID + "\x00" + *p.RequestID
	c, replayed := r.byRequest[key]
	play := r.play
	if !replayed {
		r.next++
		c = &Cell{ID: fmt.Sprintf("%032x", r.next), Params: p, r: r, state: api.Running, gen: r.generation, begun: time.Now(), ran: 1, changed: make(chan struct{})}
		r.byRequest[key], r.cells[c.ID] = c, c
	}
	r.mu.Unlock()
	if !replayed {
		play(c)
	}
	return r.page(ctx, conn, c, 0, p.WaitMS, replayed, func() bool { return api.Terminal(c.state) }), nil
}

func (r *Runtime) poll(ctx context.Context, conn *connection, p api.PollParams) (any, error) {
	r.mu.Lock()
	c := r.cells[p.ExecID]
	r.mu.Unlock()
	if c == nil {
		return nil, rpc.Errorf(rpc.CodeNotFound, "there is no execution %q", p.ExecID)
	}
	var cursor int64
	if p.Cursor != nil {
		cursor = *p.Cursor
	}
	if p.Interrupt {
		c.End(api.FailedCell, "KeyboardInterrupt")
	}
	res := r.page(ctx, conn, c, cursor, p.WaitMS, false, func() bool {
		return api.Terminal(c.state) || !p.UntilDone && int64(len(c.output)) > cursor
	})
	if p.Interrupt {
		res.Interrupt = "interrupted"
	}
	return res, nil
}

// page waits until ready (called with mu held) or the wait is over.
func (r *Runtime) page(ctx context.Context, conn *connection, c *Cell, cursor int64, waitMS *int64, replayed bool, ready func() bool) *api.ExecResult {
	wait := int64(api.DefaultWaitMS)
	if waitMS != nil {
		wait = *waitMS
	}
	clamped := int64(0)
	if wait > api.MaxWaitMS {
		wait, clamped = api.MaxWaitMS, api.MaxWaitMS
	}
	timeout := time.After(time.Duration(wait) * time.Millisecond)
	r.mu.Lock()
	defer r.mu.Unlock()
waiting:
	for !ready() {
		changed := c.changed
		r.mu.Unlock()
		select {
		case <-changed:
			r.mu.Lock()
		case <-timeout:
			r.mu.Lock()
			break waiting
		case <-ctx.Done():
			r.mu.Lock()
			break waiting
		}
	}
	out := append([]api.Event{}, c.output[min(cursor, int64(len(c.output))):]...)
	return &api.ExecResult{
		ExecID: c.ID, ClientID: conn.clientID, ConnectionID: conn.attach.ConnectionID, Generation: r.generation, ExecutionGeneration: c.gen,
		State: c.state, Output: out, Cursor: int64(len(c.output)), Error: c.err, ErrorInfo: c.info, Notice: r.noticeLocked(conn),
		Replayed: replayed, ElapsedMS: time.Since(c.begun).Milliseconds(), ClampedWaitMS: clamped,
	}
}
