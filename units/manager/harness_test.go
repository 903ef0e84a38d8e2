package manager

import (
	"bufio"
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/kernel"
	"mypr/kernel/wire"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

const deadline = 60 * time.Second

// world is a workspace with sockets, a supervisor and, while one runs, a manager. The
// supervisor and the kernel are fakes that speak the real protocols' types.
type world struct {
	t       testing.TB
	ws      *workspace.Workspace
	sup     *fakeSupervisor
	opts    Options
	runtime *os.File // the listening sockets, as the supervisor holds them
	krn     *os.File
	sockDir string

	stop context.CancelFunc
	done chan error
	m    chan *Manager
}

// manager is the running manager itself, for what no request can ask yet.
func (w *world) manager() *Manager {
	m := <-w.m
	w.m <- m
	return m
}

func newWorld(t testing.TB, change ...func(*world)) *world {
	t.Helper()
	ws, err := workspace.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return newWorldIn(t, ws, change...)
}

func newWorldIn(t testing.TB, ws *workspace.Workspace, change ...func(*world)) *world {
	t.Helper()
	if err := ws.EnsureLayout(); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "mgr") // short: a socket path has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := &world{t: t, ws: ws, sockDir: dir}
	w.sup = &fakeSupervisor{w: w, subs: map[chan control.UnitEvent]struct{}{}, status: control.UnitStatus{Name: KernelUnit, ActiveState: control.Inactive, SubState: "dead"}}
	w.runtime, w.krn = w.listen("runtime"), w.listen("kernel")
	level := slog.LevelError + 4
	if os.Getenv("MYPR_TEST_LOG") != "" {
		level = slog.LevelDebug
	}
	w.opts = Options{
		Workspace: ws, KernelSocket: filepath.Join(dir, "kernel"), Instance: "0123456789abcdef0123456789abcdef", Version: "1.0", Executable: "/bin/mypr-mcp",
		Connect: func(context.Context) (Supervisor, error) { return w.sup.connect(), nil },
		Prepare: func(_ context.Context, _ kernel.Runner, progress func(string)) (*kernel.Launch, error) {
			progress("looking for Python")
			return &kernel.Launch{Path: "/bin/python", Args: []string{"python"}, Dir: ws.Dir, PlainReason: "no IPython here"}, nil
		},
		Available: func(context.Context, kernel.Runner) error { return nil },
		KernelUnit: func() (*spec.Unit, error) {
			return &spec.Unit{Name: KernelUnit, Service: &spec.Service{}}, nil
		},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})),
	}
	for _, c := range change {
		c(w)
	}
	w.start()
	t.Cleanup(func() {
		w.halt()
		w.sup.end()
		w.runtime.Close()
		w.krn.Close()
	})
	return w
}

func (w *world) listen(name string) *os.File {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(w.sockDir, name), Net: "unix"})
	if err != nil {
		w.t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	f, err := l.File()
	if err != nil {
		w.t.Fatal(err)
	}
	l.Close()
	return f
}

func (w *world) inherit(f *os.File) *net.UnixListener {
	l, err := net.FileListener(f)
	if err != nil {
		w.t.Fatal(err)
	}
	return l.(*net.UnixListener)
}

// start runs a manager; halt ends it as SIGTERM would.
func (w *world) start() {
	ctx, cancel := context.WithCancel(context.Background())
	o := w.opts
	o.Runtime, o.Kernel = w.inherit(w.runtime), w.inherit(w.krn)
	done := make(chan error, 1)
	w.stop, w.done = cancel, done
	w.m = make(chan *Manager, 1)
	o.onStart = func(m *Manager) { w.m <- m }
	go func() { done <- Run(ctx, o) }()
}

func (w *world) halt() {
	if w.stop == nil {
		return
	}
	w.stop()
	select {
	case err := <-w.done:
		if err != nil {
			w.t.Errorf("Run: %v", err)
		}
	case <-time.After(deadline):
		panic("the manager does not end")
	}
	w.stop = nil
}

// peer is one connection to the manager.
type peer struct {
	t        testing.TB
	conn     *rpc.Conn
	id       string
	client   string
	mu       sync.Mutex
	progress []api.Progress
	notes    chan string
}

func (w *world) dial() *peer {
	w.t.Helper()
	p := &peer{t: w.t, id: newID(), notes: make(chan string, 100)}
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	conn, err := rpc.Dial(ctx, filepath.Join(w.sockDir, "runtime"), rpc.HandlerFunc(p.note))
	if err != nil {
		w.t.Fatal(err)
	}
	p.conn = conn
	w.t.Cleanup(func() { conn.Close() })
	return p
}

func (p *peer) note(_ context.Context, r *rpc.Request) (any, error) {
	if r.Method == api.NotificationProgress {
		var x api.Progress
		_ = json.Unmarshal(r.Params, &x)
		p.mu.Lock()
		p.progress = append(p.progress, x)
		p.mu.Unlock()
	}
	select {
	case p.notes <- r.Method + string(r.Params):
	default:
	}
	return nil, nil
}

func call[R any](p *peer, method string, params any) (R, error) {
	ctx, cancel := context.WithTimeout(context.Background(), deadline+api.MaxWaitMS*time.Millisecond)
	defer cancel()
	var r R
	err := p.conn.Call(ctx, method, params, &r)
	return r, err
}

func must[R any](t testing.TB, r R, err error) R {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (p *peer) attach(params api.AttachParams) api.AttachResult {
	p.t.Helper()
	params.ConnectionID, params.Protocol, params.Version = p.id, api.Protocol, "1.0"
	if params.Kind == "" {
		params.Kind = "frontend"
	}
	r, err := call[api.AttachResult](p, api.MethodAttach, params)
	return must(p.t, r, err)
}

// client is an attached and initialised connection.
func (w *world) client(id ...string) *peer {
	w.t.Helper()
	p := w.dial()
	p.attach(api.AttachParams{})
	var want *string
	if len(id) > 0 {
		want = &id[0]
	}
	r, err := call[api.InitResult](p, api.MethodInit, api.InitParams{ClientID: want})
	p.client = must(w.t, r, err).ClientID
	return p
}

func (p *peer) execute(code string, wait int64) api.ExecResult {
	p.t.Helper()
	r, err := call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: code, WaitMS: &wait})
	return must(p.t, r, err)
}

// run executes to the end.
func (p *peer) run(code string) api.ExecResult {
	p.t.Helper()
	r := p.execute(code, api.MaxWaitMS)
	if !api.Terminal(r.State) {
		p.t.Fatalf("%q did not end: %+v", code, r)
	}
	return r
}

func (p *peer) poll(params api.PollParams) api.ExecResult {
	p.t.Helper()
	r, err := call[api.ExecResult](p, api.MethodPoll, params)
	return must(p.t, r, err)
}

func (p *peer) finish(id string) api.ExecResult {
	p.t.Helper()
	wait := int64(api.MaxWaitMS)
	r := p.poll(api.PollParams{ExecID: id, WaitMS: &wait, UntilDone: true})
	if !api.Terminal(r.State) {
		p.t.Fatalf("%s did not end: %+v", id, r)
	}
	return r
}

func text(r api.ExecResult) string {
	var b strings.Builder
	for _, e := range r.Output {
		b.WriteString(e.Text)
	}
	return b.String()
}

func errText(r api.ExecResult) string {
	if r.Error == nil {
		return ""
	}
	return *r.Error
}

// fakeSupervisor runs at most one kernel.
type fakeSupervisor struct {
	w         *world
	mu        sync.Mutex
	status    control.UnitStatus
	subs      map[chan control.UnitEvent]struct{}
	conns     []*fakeControl
	kernel    *fakeKernel
	starts    int
	refuse    string // StartTransient fails with this
	noConnect bool   // the kernel that is started never connects
	restart   bool   // the unit is started again when it dies
	lastUnit  *spec.Unit
	reexec    []string
	restarted []string
	shutting  bool
	hold      bool // events are held back, answers are not
	held      []control.UnitEvent
	all       []*fakeKernel
}

type fakeControl struct {
	s      *fakeSupervisor
	events chan control.UnitEvent
	done   chan struct{}
	once   sync.Once
}

func (s *fakeSupervisor) connect() *fakeControl {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &fakeControl{s: s, done: make(chan struct{})}
	s.conns = append(s.conns, c)
	return c
}

// crash ends every control connection, as when the supervisor dies.
func (s *fakeSupervisor) crash() {
	s.mu.Lock()
	conns := s.conns
	s.conns = nil
	s.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
}

func (c *fakeControl) Close() error {
	c.once.Do(func() {
		close(c.done)
		c.s.mu.Lock()
		defer c.s.mu.Unlock()
		if c.events != nil {
			delete(c.s.subs, c.events)
			close(c.events)
		}
	})
	return nil
}
func (c *fakeControl) Done() <-chan struct{} { return c.done }
func (c *fakeControl) Info(context.Context) (control.Info, error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return control.Info{ShuttingDown: c.s.shutting}, nil
}

func (c *fakeControl) Subscribe(_ context.Context, _ ...string) ([]control.UnitStatus, <-chan control.UnitEvent, error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.events = make(chan control.UnitEvent, 1000)
	select {
	case <-c.done: // its peer was killed in the middle of asking
		close(c.events)
	default:
		c.s.subs[c.events] = struct{}{}
	}
	return []control.UnitStatus{c.s.status}, c.events, nil
}

// setStatus publishes a state. Called with mu held.
func (s *fakeSupervisor) setStatus(u control.UnitStatus) {
	u.Name = KernelUnit
	s.status = u
	e := control.UnitEvent{UnitStatus: u}
	if s.hold {
		s.held = append(s.held, e)
		return
	}
	for ch := range s.subs {
		ch <- e
	}
}

// letGo delivers the events that were held back.
func (s *fakeSupervisor) letGo() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold = false
	for _, e := range s.held {
		for ch := range s.subs {
			ch <- e
		}
	}
	s.held = nil
}

func (c *fakeControl) StartTransient(_ context.Context, p control.TransientParams, _ ...*os.File) (control.TransientResult, map[string]*os.File, error) {
	s := c.s
	s.mu.Lock()
	s.lastUnit = p.Unit
	if strings.HasPrefix(p.Unit.Name, "restart-") { // it outlives the manager
		s.mu.Unlock()
		<-c.done
		return control.TransientResult{}, nil, rpc.ErrClosed
	}
	defer s.mu.Unlock()
	if s.kernel != nil {
		return control.TransientResult{}, nil, rpc.Errorf(rpc.CodeConflict, "%s is active", KernelUnit)
	}
	if s.refuse != "" {
		u := control.UnitStatus{Name: KernelUnit, ActiveState: control.Failed, Result: "exit-code", Error: s.refuse, InvocationID: newID()}
		s.setStatus(u)
		return control.TransientResult{JobResult: control.JobResult{Result: "failed", Unit: u}}, nil, nil
	}
	s.startKernel()
	return control.TransientResult{JobResult: control.JobResult{Result: "done", Unit: s.status}}, nil, nil
}

func (s *fakeSupervisor) startKernel() {
	s.starts++
	gen := newID()
	s.setStatus(control.UnitStatus{ActiveState: control.Active, SubState: "running", InvocationID: gen, MainPID: 4242})
	k := &fakeKernel{w: s.w, gen: gen, dead: make(chan struct{}), gates: map[string]chan struct{}{}, vars: map[string]string{}, answered: make(chan struct{}, 100)}
	s.kernel = k
	s.all = append(s.all, k)
	if !s.noConnect {
		k.wg.Add(1)
		go k.serve()
	}
}

func (c *fakeControl) Stop(_ context.Context, p control.JobParams) (control.JobResult, error) {
	if k := c.s.current(); k != nil {
		k.terminate()
	}
	c.s.die(control.UnitStatus{ActiveState: control.Inactive, SubState: "dead", Result: "success", ExitKnown: true, ExitSignal: 15})
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return control.JobResult{Result: "done", Unit: c.s.status}, nil
}

// die ends the kernel's process with this status.
func (s *fakeSupervisor) die(u control.UnitStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kernel == nil {
		return
	}
	k := s.kernel
	s.kernel = nil
	u.InvocationID = k.gen
	s.setStatus(control.UnitStatus{ActiveState: control.Deactivating, SubState: "stop-sigterm", InvocationID: k.gen})
	again := s.restart && u.ActiveState != control.Inactive
	if again {
		u.ActiveState, u.SubState = control.Activating, "auto-restart"
	}
	k.kill()
	s.setStatus(u)
	if again {
		s.startKernel()
	}
}

func (c *fakeControl) Restart(_ context.Context, p control.JobParams) (control.JobResult, error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.restarted = append(c.s.restarted, p.Name)
	return control.JobResult{Result: "done"}, nil
}
func (c *fakeControl) Kill(context.Context, control.KillParams) error { return nil }
func (c *fakeControl) Wait(_ context.Context, p control.WaitParams) (control.UnitStatus, error) {
	return control.UnitStatus{}, rpc.Errorf(rpc.CodeNotFound, "there is no unit %s", p.Name)
}
func (c *fakeControl) Shutdown(context.Context, control.ShutdownParams) error { return nil }
func (c *fakeControl) Reexec(_ context.Context, p control.ReexecParams) error {
	c.s.mu.Lock()
	c.s.reexec = append(c.s.reexec, p.Executable)
	c.s.mu.Unlock()
	c.s.crash()
	return rpc.ErrClosed
}

func (s *fakeSupervisor) end() {
	s.mu.Lock()
	all := s.all
	s.mu.Unlock()
	for _, k := range all {
		k.kill()
		k.wg.Wait()
	}
	s.crash()
}

func (s *fakeSupervisor) current() *fakeKernel {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kernel
}

// fakeKernel is a kernel whose "Python" is a line of commands separated by spaces:
//
//	print:TEXT  result:TEXT  err:TEXT  big:BYTES  gate:NAME  fail:TEXT  set:K=V  get:K
//
// It keeps its events in a ring until they are acknowledged and ignores exec ids that
// it has seen, like the real one.
type fakeKernel struct {
	w    *world
	gen  string
	dead chan struct{}
	once sync.Once
	wg   sync.WaitGroup

	socket atomic.Pointer[net.Conn] // the connection, for kill

	mu       sync.Mutex
	conn     net.Conn
	welcomed bool
	ring     []event
	seq      int64
	cells    map[string]string // exec id -> state
	seen     []string
	runs     []string // exec ids in the order in which they were begun
	gates    map[string]chan struct{}
	vars     map[string]string
	conns    int
	results  []json.RawMessage // of calls
	answered chan struct{}     // holds a token for each
	silent   bool              // it does not answer pings
}

type event struct {
	seq  int64
	line []byte
	ends string // the cell whose end it is
}

func (k *fakeKernel) kill() {
	k.once.Do(func() {
		close(k.dead)
		if c := k.socket.Load(); c != nil { // not under mu: somebody may hang in a write
			(*c).Close()
		}
	})
}

// terminate does what the real kernel does on SIGTERM before it exits: every live cell
// is cancelled.
func (k *fakeKernel) terminate() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id := range k.cells {
		k.emit("error", id, map[string]any{"text": "Traceback\nCancelledError"})
		k.emit("state", id, map[string]any{"state": "cancelled", "error": "cancelled: the kernel was told to stop"})
	}
}

func (k *fakeKernel) serve() {
	defer k.wg.Done()
	for {
		select {
		case <-k.dead:
			return
		default:
		}
		conn, err := net.Dial("unix", filepath.Join(k.w.sockDir, "kernel"))
		if err != nil {
			return
		}
		k.socket.Store(&conn)
		select {
		case <-k.dead:
			conn.Close()
		default:
		}
		k.mu.Lock()
		k.conn, k.welcomed = conn, false
		k.conns++
		first := k.seq + 1
		if len(k.ring) > 0 {
			first = k.ring[0].seq
		}
		hello := map[string]any{"type": "hello", "protocol": 1, "generation": k.gen, "pid": 4242, "python": "3.13.0", "implementation": "CPython",
			"executable": "/bin/python", "mode": "plain", "mode_reason": "", "first_seq": first, "next_seq": k.seq + 1}
		cells := []wire.Cell{}
		for id, st := range k.cells {
			cells = append(cells, wire.Cell{ExecID: id, State: st})
		}
		hello["cells"], hello["seen"] = cells, append([]string{}, k.seen...)
		k.write(hello)
		k.mu.Unlock()
		k.read(conn)
		conn.Close()
	}
}

// write sends one message. Called with mu held.
func (k *fakeKernel) write(v any) {
	line, _ := json.Marshal(v)
	_, _ = k.conn.Write(append(line, '\n'))
}

// emit makes a durable event. Called with mu held.
func (k *fakeKernel) emit(kind, exec string, fields map[string]any) {
	k.seq++
	m := map[string]any{"type": "event", "seq": k.seq, "time": now(), "event": kind, "exec_id": exec}
	for key, v := range fields {
		m[key] = v
	}
	line, _ := json.Marshal(m)
	line = append(line, '\n')
	e := event{seq: k.seq, line: line}
	if kind == "state" && fields["state"] != "running" {
		e.ends = exec
	}
	k.ring = append(k.ring, e)
	if k.conn != nil && k.welcomed {
		_, _ = k.conn.Write(line)
	}
}

func (k *fakeKernel) read(conn net.Conn) {
	sc := bufio.NewScanner(conn)
	sc.Buffer(make([]byte, 1<<20), wire.MaxLine)
	for sc.Scan() {
		var m struct {
			Type, Code string
			Ack, Seq   int64
			ExecID     string `json:"exec_id"`
			ID         int64
			Result     json.RawMessage
			Error      json.RawMessage
		}
		if err := json.Unmarshal(sc.Bytes(), &m); err != nil {
			panic(err)
		}
		k.mu.Lock()
		switch m.Type {
		case "welcome", "ack":
			for len(k.ring) > 0 && k.ring[0].seq <= max(m.Ack, m.Seq) {
				if id := k.ring[0].ends; id != "" {
					k.seen = slices.DeleteFunc(k.seen, func(s string) bool { return s == id })
				}
				k.ring = k.ring[1:]
			}
			if m.Type == "welcome" {
				k.welcomed = true
				for _, e := range k.ring {
					_, _ = conn.Write(e.line)
				}
			}
		case "reject":
			k.once.Do(func() { close(k.dead) })
		case "execute":
			if _, known := k.cells[m.ExecID]; known {
				break
			}
			if k.cells == nil {
				k.cells = map[string]string{}
			}
			k.cells[m.ExecID] = "queued"
			k.seen = append(k.seen, m.ExecID)
			k.wg.Add(1)
			go k.cell(m.ExecID, m.Code)
		case "interrupt":
			outcome := "finished"
			if ch := k.gates["interrupt:"+m.ExecID]; ch != nil {
				delete(k.gates, "interrupt:"+m.ExecID)
				close(ch)
				outcome = "cancelled"
			} else if _, live := k.cells[m.ExecID]; live {
				outcome = "pending"
			}
			k.write(map[string]any{"type": "interrupted", "id": m.ID, "exec_id": m.ExecID, "outcome": outcome})
		case "ping":
			if !k.silent {
				k.write(map[string]any{"type": "pong", "id": m.ID})
			}
		case "reserve":
			k.write(map[string]any{"type": "reserved", "id": m.ID})
		case "call_result":
			r, _ := json.Marshal(map[string]any{"result": m.Result, "error": m.Error})
			k.results = append(k.results, r)
			k.answered <- struct{}{}
		}
		k.mu.Unlock()
	}
}

func (k *fakeKernel) gate(name string) chan struct{} {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.gates[name] == nil {
		k.gates[name] = make(chan struct{})
	}
	return k.gates[name]
}

// open lets cells that wait at a gate go on.
func (k *fakeKernel) open(name string) { close(k.gate(name)) }

func (k *fakeKernel) cell(id, code string) {
	defer k.wg.Done()
	k.mu.Lock()
	k.cells[id] = "running"
	k.runs = append(k.runs, id)
	k.emit("state", id, map[string]any{"state": "running"})
	k.mu.Unlock()
	end := map[string]any{"state": "succeeded"}
	for _, cmd := range strings.Fields(code) {
		op, arg, _ := strings.Cut(cmd, ":")
		k.mu.Lock()
		switch op {
		case "print", "err":
			name := map[string]string{"print": "stdout", "err": "stderr"}[op]
			k.emit("stream", id, map[string]any{"stream": name, "text": arg + "\n"})
		case "big":
			n, _ := strconv.Atoi(arg)
			for n > 0 {
				c := min(n, 16384)
				k.emit("stream", id, map[string]any{"stream": "stdout", "text": strings.Repeat("x", c-1) + "\n"})
				n -= c
			}
		case "result":
			k.emit("display", id, map[string]any{"text": arg, "result": true})
		case "set":
			key, v, _ := strings.Cut(arg, "=")
			k.vars[key] = v
		case "get":
			k.emit("display", id, map[string]any{"text": k.vars[arg], "result": true})
		case "fail":
			k.emit("error", id, map[string]any{"text": "Traceback\nValueError: " + arg})
			end = map[string]any{"state": "failed", "error": "ValueError: " + arg, "error_info": map[string]any{"code": "python_exception", "type": "ValueError", "message": arg}}
		case "call":
			method, params, _ := strings.Cut(arg, "|")
			k.write(map[string]any{"type": "call", "id": k.seq, "method": method, "params": json.RawMessage(params),
				"context": map[string]any{"client_id": "c", "connection_id": "n", "exec_id": id}})
		case "block":
			k.write(map[string]any{"type": "loop", "blocked": map[string]any{"exec_id": id, "since": now() - 2, "where": "cell line 3"}})
		case "unblock":
			k.write(map[string]any{"type": "loop", "blocked": nil})
		case "gate":
			stop := make(chan struct{})
			k.gates["interrupt:"+id] = stop
			k.mu.Unlock()
			select {
			case <-k.gate(arg):
			case <-stop:
				end = map[string]any{"state": "cancelled", "error": "interrupted"}
			case <-k.dead:
				return
			}
			k.mu.Lock()
			delete(k.gates, "interrupt:"+id)
		}
		k.mu.Unlock()
		if end["state"] == "cancelled" {
			break
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.cells, id)
	k.emit("state", id, end)
}

func ptr[T any](v T) *T { return &v }
