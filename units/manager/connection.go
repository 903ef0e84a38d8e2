package manager

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/units/manager/store"
)

// Capabilities of this build beyond protocol 1's methods.
var capabilities = []string{"execute", "poll", "interrupt", "messages", "history", "restart", "generation_precondition", "progress",
	"help", "files", "search", "git", "shell", "tasks", "locks", "skills", "modules", "packages"}

// isID reports whether s can be a client, connection or request id.
func isID(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '.' || c == ':' || c == '-') {
			return false
		}
	}
	return len(s) >= 1 && len(s) <= api.MaxIDLength
}

// isExecID reports whether s has the form of an execution id or a generation: 32 lower
// case hex digits.
func isExecID(s string) bool {
	for i := range len(s) {
		if c := s[i]; !(c >= '0' && c <= '9' || c >= 'a' && c <= 'f') {
			return false
		}
	}
	return len(s) == 32
}

// connection is one connection of the runtime socket. It counts as a client from
// attach to its end.
type connection struct {
	m   *Manager
	rpc *rpc.Conn

	initMu sync.Mutex // one init at a time; taken before Manager.mu

	// The fields below are guarded by Manager.mu.
	attached    bool
	gone        bool // it has ended; what it sent just before may still be handled
	id          string
	kind        string
	name        string
	version     string
	progress    bool
	since       time.Time
	activity    time.Time
	client      *client
	told        int64  // row of the last generation whose end this connection was told of
	runtime     string // key of the runtime block that it was shown last
	guided      bool   // it was given the instructions
	mailShown   int64  // newest message that an answer to it has counted
	lastRequest uint64 // highest number of a request id that was fresh
}

// client is a logical client while a connection is bound to it.
type client struct {
	id     string
	conn   *connection
	unread int   // messages not acknowledged
	newest int64 // id of the newest of them
	mail   chan struct{}
}

func (m *Manager) newConnection(c *rpc.Conn) rpc.Handler {
	conn := &connection{m: m, rpc: c}
	context.AfterFunc(c.Context(), conn.ended)
	return conn
}

// Prompt implements rpc.Prompt: a cell is admitted at once unless something is wrong.
func (c *connection) Prompt(method string) bool {
	if method != api.MethodExecute {
		return false
	}
	m := c.m
	select {
	case <-m.opened:
	default:
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.storageErr == nil && m.restarting == nil
}

// fresh reports whether a request id cannot have been used before: front ends number the
// requests of a connection and put its id before the number. Called with mu held.
func (c *connection) fresh(id string) bool {
	number, ok := strings.CutPrefix(id, c.id+":")
	if !ok {
		return false
	}
	n, err := strconv.ParseUint(number, 10, 63)
	if err != nil || n <= c.lastRequest {
		return false
	}
	c.lastRequest = n
	return true
}

// Handle implements rpc.Handler.
func (c *connection) Handle(ctx context.Context, r *rpc.Request) (any, error) {
	r.CloseFiles()
	m := c.m
	m.mu.Lock()
	c.activity = time.Now()
	failing := m.storageErr != nil
	m.mu.Unlock()
	if failing { // somebody asks: perhaps there is space now
		m.store.Retry()
	}
	if r.Method != api.MethodStatus && r.Method != api.MethodStop {
		if err := m.ready(); err != nil {
			return nil, err
		}
	}
	switch r.Method {
	case api.MethodAttach:
		var p api.AttachParams
		if err := r.BindKnown(&p); err != nil { // whether it is too new is said by its protocol
			return nil, err
		}
		return c.attach(ctx, p)
	case api.MethodInit:
		return handle(ctx, r, c.init)
	case api.MethodExecute:
		return handle(ctx, r, c.execute)
	case api.MethodPoll:
		return handle(ctx, r, c.poll)
	case api.MethodInterrupt:
		return handle(ctx, r, c.interrupt)
	case api.MethodStatus:
		return handle(ctx, r, func(ctx context.Context, p api.StatusParams) (*api.Status, error) { return m.status(ctx, p), nil })
	case api.MethodLogs:
		return handle(ctx, r, m.logs)
	case api.MethodHistory:
		return handle(ctx, r, m.history)
	case api.MethodRecord:
		return handle(ctx, r, m.record)
	case api.MethodReset:
		return handle(ctx, r, func(_ context.Context, p api.LifecycleParams) (*api.ResetResult, error) {
			return m.reset(p, nil)
		})
	case api.MethodStop:
		return handle(ctx, r, c.stop)
	case api.MethodRestart:
		return handle(ctx, r, func(_ context.Context, p api.LifecycleParams) (*api.RestartResult, error) {
			return m.restart(p, nil, c)
		})
	}
	return nil, rpc.Errorf(rpc.CodeInvalidRequest, "there is no method %q", r.Method)
}

func handle[P, R any](ctx context.Context, r *rpc.Request, f func(context.Context, P) (R, error)) (any, error) {
	var p P
	if err := r.Bind(&p); err != nil {
		return nil, err
	}
	return f(ctx, p)
}

// ended runs once, when the connection is gone.
func (c *connection) ended() {
	m := c.m
	m.mu.Lock()
	was := c.attached
	c.attached, c.gone = false, true
	delete(m.conns, c)
	var clientID string
	// It may have been told before: who was bound to the client since keeps it.
	if c.client != nil && m.clients[c.client.id] == c.client {
		clientID = c.client.id
		delete(m.clients, clientID)
	}
	if m.stopping == c && !m.ending { // whoever asked for the stop left without doing it
		m.stopping, m.stopReason = nil, ""
		m.releaseTasks()
	}
	rec := m.restarting
	ending := m.ending
	m.mu.Unlock()
	if rec != nil && rec.conn == c && !ending {
		m.failRestart(rec, errAskerGone)
	}
	if !was {
		return
	}
	at := now()
	m.store.Submit(&store.Op{Lazy: true, Done: m.logged, Change: &store.Change{Seen: clientID, Log: []api.LogEvent{
		{Time: at, Event: "disconnected", Kind: "connection", ID: c.id, ClientID: clientID, ConnectionID: c.id}}}})
	m.touchStatus()
}

func (c *connection) attach(ctx context.Context, p api.AttachParams) (*api.AttachResult, error) {
	m := c.m
	if p.Protocol != api.Protocol {
		return nil, rpc.Errorf(api.CodeProtocol, "this runtime (version %s) speaks protocol %d, this client (version %s) speaks %d",
			m.opts.Version, api.Protocol, p.Version, p.Protocol).WithHint("replace the runtime: mypr-mcp restart")
	}
	if !isID(p.ConnectionID) {
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "attach: bad connection id %q", p.ConnectionID)
	}
	if err := m.opts.Workspace.Check(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	if c.attached {
		m.mu.Unlock()
		return nil, rpc.Errorf(rpc.CodeConflict, "attach: this connection is attached already")
	}
	for other := range m.conns {
		if other.id == p.ConnectionID {
			m.mu.Unlock()
			return nil, rpc.Errorf(rpc.CodeConflict, "attach: connection id %s is in use", p.ConnectionID)
		}
	}
	if c.rpc.Context().Err() != nil {
		m.mu.Unlock()
		return nil, rpc.ErrClosed
	}
	c.attached, c.id, c.kind, c.name, c.version, c.progress = true, p.ConnectionID, p.Kind, p.Name, p.Version, p.Progress
	c.since = time.Now()
	c.told = m.toldUpTo(p.SeenGeneration)
	c.mailShown = p.SeenMessage
	m.conns[c] = struct{}{}
	m.mu.Unlock()
	at := now()
	m.store.Submit(&store.Op{Lazy: true, Done: m.logged, Change: &store.Change{Log: []api.LogEvent{
		{Time: at, Event: "connected", Kind: "connection", ID: c.id, ConnectionID: c.id, Data: map[string]any{"kind": p.Kind, "name": p.Name, "version": p.Version}}}}})
	var a api.AttachResult
	if p.ClientID != "" {
		id := p.ClientID
		if r, err := c.bind(ctx, &id, p.SeenGeneration != ""); err != nil {
			a.BindError = err.Error()
		} else {
			a.ClientID = r.ClientID
		}
	}
	if p.Kind == "frontend" {
		m.wantKernel()
	}
	m.mu.Lock()
	a.Runtime = m.runtimeBlock()
	m.mu.Unlock()
	a.Runtime.Instructions = instructions
	m.touchStatus()
	return &a, nil
}

func (c *connection) init(ctx context.Context, p api.InitParams) (*api.InitResult, error) {
	r, err := c.bind(ctx, p.ClientID, false)
	if err != nil {
		return nil, err
	}
	m := c.m
	m.wantKernel()
	inbox, err := c.inbox()
	if err != nil {
		return nil, err
	}
	r.Inbox = inbox
	m.mu.Lock()
	r.Notice = m.takeNotice(c)
	r.Runtime = m.runtimeBlock()
	c.runtime = runtimeKey(&r.Runtime)
	c.guided = true
	m.mu.Unlock()
	r.Runtime.Instructions = instructions
	m.saveTold(c, r.Notice)
	return r, nil
}

// bind makes the connection a logical client's. After a reconnect the front end knows
// what its client was shown, and that counts more than what the store remembers.
func (c *connection) bind(ctx context.Context, want *string, reconnect bool) (*api.InitResult, error) {
	c.initMu.Lock()
	defer c.initMu.Unlock()
	m := c.m
	if want != nil && !isID(*want) {
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "init: bad client id %q", *want).
			WithHint("a client id has 1 to %d characters of A-Z a-z 0-9 _ . : -; leave it out to get a new one", api.MaxIDLength)
	}
	if err := m.opts.Workspace.Check(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	if !c.attached {
		m.mu.Unlock()
		return nil, rpc.Errorf(rpc.CodeConflict, "init: this connection is not attached")
	}
	if bound := c.client; bound != nil {
		m.mu.Unlock()
		if want != nil && *want != bound.id {
			return nil, rpc.Errorf(api.CodeClientBound, "init: this connection is bound to %s already and cannot become a different client ID, %s", bound.id, *want).
				WithHint("go on as %s, or open another connection for %s", bound.id, *want)
		}
		return &api.InitResult{ClientID: bound.id, Resumed: true}, nil
	}
	m.mu.Unlock()
	if want == nil {
		return c.allocate()
	}
	if err := m.claim(ctx, c, *want); err != nil {
		return nil, err
	}
	var isNew bool
	at := now()
	err := m.store.Do(func(t *store.Tx) (err error) {
		if isNew, err = t.Reserve(*want, false, at); err == nil && !isNew {
			err = t.Seen(*want, at)
		}
		if err != nil {
			return err
		}
		return t.Log(&api.LogEvent{Time: at, Event: "initialized", Kind: "connection", ID: c.id, ClientID: *want, ConnectionID: c.id})
	})
	if err == nil {
		err = c.loadClient(!isNew && !reconnect)
	}
	if err != nil {
		m.unclaim(c)
		return nil, storageError(err, "init: the client id could not be recorded")
	}
	m.logged(nil)
	m.touchStatus()
	return &api.InitResult{ClientID: *want, Resumed: !isNew}, nil
}

// loadClient reads what the store knows of the client that c was just bound to.
func (c *connection) loadClient(told bool) error {
	m := c.m
	m.mu.Lock()
	id := c.client.id
	m.mu.Unlock()
	_, row, err := m.store.Client(id)
	if err != nil {
		return err
	}
	unread, newest, err := m.store.Unacked(id)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if told {
		c.told = min(c.told, row)
	}
	if newest >= c.client.newest {
		c.client.unread, c.client.newest = unread, newest
	}
	c.mailShown = min(c.mailShown, c.client.newest) // it may be of a history that was deleted
	return nil
}

// claim takes a client id for c. When the connection that has it belongs to the same
// process, or to one that is dead, its end is only a moment away and is waited for.
func (m *Manager) claim(ctx context.Context, c *connection, id string) error {
	for first := true; ; first = false {
		m.mu.Lock()
		if !c.attached {
			m.mu.Unlock()
			return rpc.ErrClosed
		}
		holder := m.clients[id]
		if holder == nil {
			c.client = &client{id: id, conn: c, mail: make(chan struct{})}
			m.clients[id] = c.client
			m.mu.Unlock()
			return nil
		}
		other := holder.conn
		m.mu.Unlock()
		if !first || !leaving(other.rpc, c.rpc) {
			return rpc.Errorf(api.CodeClientBound, "init: client id %s is bound to another connection", id).
				WithHint("call init without a client id to get a new one, or end the other client first")
		}
		if other.rpc.Peer().PID == c.rpc.Peer().PID {
			other.rpc.CloseAsync()
		}
		t := time.NewTimer(time.Second)
		select {
		case <-other.rpc.Done():
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
		other.ended()
	}
}

// leaving reports whether the other connection is about to end: it is an earlier one
// of the same process, or its process is dead.
func leaving(other, c *rpc.Conn) bool {
	if pid := other.Peer().PID; pid != 0 && pid == c.Peer().PID {
		return true
	}
	fd := other.Peer().PIDFD()
	if fd == nil {
		return other.Context().Err() != nil
	}
	raw, err := fd.SyscallConn()
	if err != nil {
		return true // closed with its connection
	}
	dead := false
	err = raw.Control(func(fd uintptr) {
		n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		dead = n > 0
	})
	return err != nil || dead
}

func (m *Manager) unclaim(c *connection) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c.client != nil {
		if m.clients[c.client.id] == c.client {
			delete(m.clients, c.client.id)
		}
		c.client = nil
	}
}

// runtimeBlock describes the runtime; the instructions are left out. Called with mu held.
func (m *Manager) runtimeBlock() api.Runtime {
	r := api.Runtime{ManagerVersion: m.opts.Version, ProtocolVersion: api.Protocol, Generation: m.kernel.gen,
		Capabilities: capabilities, Workspace: m.opts.Workspace.Dir, PlainReason: m.kernel.plainReason()}
	if k := &m.kernel; k.python != "" {
		r.Python = k.python + " (" + k.executable + ")"
	}
	return r
}

// runtimeKey is what of the block is news when it changes.
func runtimeKey(r *api.Runtime) string {
	return r.Generation + "\x00" + r.Python + "\x00" + r.PlainReason
}

// inbox is the preview of the client's unacknowledged messages, nil before init. It
// marks them as shown: they do not wake this connection again.
func (c *connection) inbox() (*api.Inbox, error) {
	m := c.m
	m.mu.Lock()
	if c.client == nil {
		m.mu.Unlock()
		return nil, nil
	}
	id, unread, newest := c.client.id, c.client.unread, c.client.newest
	c.mailShown = newest
	m.mu.Unlock()
	box := &api.Inbox{Unacked: unread, Messages: []api.Preview{}}
	if unread == 0 {
		return box, nil
	}
	list, err := m.store.Previews(id, maxPreviews)
	if err != nil {
		return nil, storageError(err, "the inbox could not be read")
	}
	box.Messages = fitPreviews(list)
	box.HasMore = unread > len(box.Messages)
	box.Newest = newest
	return box, nil
}

// wakes returns what a waiting call of this connection waits for besides its
// execution: nil when there is no client, and news at once when unseen mail is there.
// Called with mu held.
func (c *connection) wakes() (mail <-chan struct{}, news bool) {
	if c.client == nil {
		return nil, false
	}
	return c.client.mail, c.client.unread > 0 && c.client.newest > c.mailShown
}
