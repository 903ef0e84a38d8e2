package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/kernel"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

// roleVariable makes the test binary a manager: fd 3 and 4 are its sockets, the
// variable's value is "workspace\x00control socket\x00kernel socket".
const roleVariable = "MYPR_TEST_MANAGER"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		if err := managerRole(strings.Split(role, "|")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

func managerRole(args []string) error {
	ws, err := workspace.Open(args[0])
	if err != nil {
		return err
	}
	listener := func(fd uintptr) *net.UnixListener {
		l, err := net.FileListener(os.NewFile(fd, "socket"))
		if err != nil {
			panic(err)
		}
		return l.(*net.UnixListener)
	}
	return Run(context.Background(), Options{
		Workspace: ws, Runtime: listener(3), Kernel: listener(4), KernelSocket: args[2], Version: "1.0", Instance: "0123456789abcdef0123456789abcdef",
		Connect:   func(ctx context.Context) (Supervisor, error) { return control.Dial(ctx, args[1]) },
		Available: func(context.Context, kernel.Runner) error { return nil },
		Prepare: func(context.Context, kernel.Runner, func(string)) (*kernel.Launch, error) {
			return &kernel.Launch{Path: "/bin/python", Args: []string{"python"}, Dir: ws.Dir}, nil
		},
		KernelUnit: func() (*spec.Unit, error) { return &spec.Unit{Service: &spec.Service{}}, nil },
	})
}

// serveControl offers the fake supervisor on a control socket.
func (w *world) serveControl() string {
	path := filepath.Join(w.sockDir, "control")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	server := &rpc.Server{NewHandler: func(c *rpc.Conn) rpc.Handler {
		fake := w.sup.connect()
		go func() { <-c.Done(); fake.Close() }()
		return rpc.HandlerFunc(func(ctx context.Context, r *rpc.Request) (any, error) {
			r.CloseFiles()
			switch r.Method {
			case control.MethodSubscribe:
				units, events, err := fake.Subscribe(ctx)
				go func() {
					for e := range events {
						_ = c.Notify(control.NotificationUnit, e)
					}
				}()
				return units, err
			case control.MethodStartTransient:
				var p control.TransientParams
				if err := r.Bind(&p); err != nil {
					return nil, err
				}
				res, _, err := fake.StartTransient(ctx, p)
				return res, err
			case control.MethodStop:
				return fake.Stop(ctx, control.JobParams{})
			case control.MethodInfo:
				return fake.Info(ctx)
			}
			return nil, fmt.Errorf("no method %s", r.Method)
		})
	}}
	go func() { defer close(done); _ = server.Serve(ctx, l) }()
	w.t.Cleanup(func() { cancel(); <-done })
	return path
}

// child is a manager in a process of its own.
type child struct {
	cmd  *exec.Cmd
	dead chan struct{}
}

func (w *world) spawn(controlPath string) *child {
	exe, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^$")
	cmd.Env = append(os.Environ(), roleVariable+"="+w.ws.Dir+"|"+controlPath+"|"+w.opts.KernelSocket)
	cmd.ExtraFiles = []*os.File{w.runtime, w.krn}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	c := &child{cmd: cmd, dead: make(chan struct{})}
	go func() { _ = cmd.Wait(); close(c.dead) }()
	return c
}

func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	<-c.dead
}

// A manager that is killed again and again, at any moment, under load: every cell is
// run exactly once and ends with all its output, in the same kernel.
func TestKilledManager(t *testing.T) {
	w := newWorld(t)
	w.halt() // only its sockets and supervisor are used
	controlPath := w.serveControl()
	manager := w.spawn(controlPath)
	var mu sync.Mutex // guards manager
	defer func() { mu.Lock(); defer mu.Unlock(); manager.kill() }()

	stop := make(chan struct{})
	killed := make(chan int)
	answered := make(chan struct{}, 1)
	go func() {
		n := 0
		defer func() { killed <- n }()
		for {
			// The moment is random by design. But somebody must have been answered since
			// the last time, or a slow machine gets nowhere.
			select {
			case <-stop:
				return
			case <-answered:
			}
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(rand.IntN(60_000)) * time.Microsecond):
			}
			mu.Lock()
			manager.kill()
			manager = w.spawn(controlPath)
			mu.Unlock()
			n++
		}
	}()
	// again repeats a call over a new connection until it is answered, as the front end does.
	again := func(p **peer, id string, f func(*peer) error) error {
		end := time.Now().Add(3 * deadline)
		for {
			var err error
			if *p == nil {
				*p, err = w.reconnect(id)
			}
			if err == nil {
				if err = f(*p); err == nil || rpc.CodeOf(err) != "" {
					select {
					case answered <- struct{}{}:
					default:
					}
					return err
				}
			}
			if *p != nil {
				(*p).conn.Close()
				*p = nil
			}
			if time.Now().After(end) {
				return err
			}
		}
	}
	const clients, cells = 3, 40
	var wg sync.WaitGroup
	generation := make(chan string, clients*cells)
	for c := range clients {
		wg.Add(1)
		go func() {
			defer wg.Done()
			id := fmt.Sprintf("client-%d", c)
			var p *peer
			defer func() {
				if p != nil {
					p.conn.Close()
				}
			}()
			for i := range cells {
				mark := fmt.Sprintf("%d.%d", c, i)
				var r api.ExecResult
				err := again(&p, id, func(p *peer) (err error) {
					r, err = call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:" + mark + " big:20000 err:" + mark + " result:" + mark,
						RequestID: &mark, WaitMS: ptr(int64(api.MaxWaitMS)), MaxBytes: ptr(int64(api.MaxBytes))})
					return err
				})
				exec := r.ExecID
				for err == nil && (!api.Terminal(r.State) || r.HasMore) {
					err = again(&p, id, func(p *peer) (err error) {
						r, err = call[api.ExecResult](p, api.MethodPoll, api.PollParams{ExecID: exec, WaitMS: ptr(int64(api.MaxWaitMS)), UntilDone: true, MaxBytes: ptr(int64(api.MaxBytes))})
						return err
					})
				}
				want := mark + "\n" + strings.Repeat("x", 16383) + "\n" + strings.Repeat("x", 20000-16384-1) + "\n" + mark + "\n" + mark
				if err != nil || r.State != api.Succeeded || text(r) != want {
					t.Errorf("cell %s: state %s, %d bytes of %d, %v %s", mark, r.State, len(text(r)), len(want), err, errText(r))
					return
				}
				generation <- r.Generation
			}
		}()
	}
	wg.Wait()
	close(stop)
	t.Logf("%d kills", <-killed)
	close(generation)
	seen := map[string]bool{}
	for g := range generation {
		seen[g] = true
	}
	if len(seen) != 1 {
		t.Errorf("%d kernels", len(seen))
	}
	begun := w.sup.current().begun()
	slices.Sort(begun)
	if n := len(slices.Compact(slices.Clone(begun))); len(begun) != clients*cells || n != len(begun) {
		t.Errorf("%d cells were begun, %d different, want %d", len(begun), n, clients*cells)
	}
}

// reconnect is dial, attach and init without failing the test.
func (w *world) reconnect(id string) (*peer, error) {
	p := &peer{t: w.t, id: newID(), notes: make(chan string, 100)}
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	conn, err := rpc.Dial(ctx, filepath.Join(w.sockDir, "runtime"), rpc.HandlerFunc(p.note))
	if err != nil {
		return nil, err
	}
	p.conn = conn
	a, err := call[api.AttachResult](p, api.MethodAttach, api.AttachParams{ConnectionID: p.id, Protocol: api.Protocol, Kind: "frontend", ClientID: id})
	if err == nil && a.ClientID == "" {
		err = fmt.Errorf("not bound: %s", a.BindError)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return p, nil
}

// A manager that is ended in order leaves running cells alone, and its successor has them.
func TestSuccessor(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	r := p.execute("print:one gate:g print:two", 0)
	for r.Cursor == 0 {
		r = p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(api.MaxWaitMS))})
	}
	cursor := r.Cursor
	w.halt()
	k := w.sup.current()
	k.open("g") // it ends while there is no manager
	w.start()
	p = w.client("calm-otter")
	r = p.finish(r.ExecID)
	if r.State != api.Succeeded || text(r) != "one\ntwo\n" || r.Notice != nil {
		t.Errorf("got %+v", r)
	}
	if x := p.poll(api.PollParams{ExecID: r.ExecID, Cursor: &cursor}); text(x) != "two\n" {
		t.Errorf("cursor of before: %+v", x)
	}
	if n := w.sup.current().begun(); len(n) != 1 || w.sup.current() != k {
		t.Errorf("begun %v", n)
	}
}

// The kernel dies while there is no manager: the next one says how.
func TestKernelDiesWithoutAManager(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	r := p.execute("gate:never", 0)
	w.until("runs", func(s *api.Status) bool { return len(s.Active) == 1 })
	w.halt()
	w.sup.die(control.UnitStatus{ActiveState: control.Failed, SubState: "failed", Result: "signal", ExitKnown: true, ExitSignal: int(unix.SIGSEGV)})
	w.start()
	p = w.client("calm-otter")
	r = p.finish(r.ExecID)
	if r.State != api.Lost || !strings.Contains(errText(r), "SIGSEGV") {
		t.Errorf("got %+v: %s", r, errText(r))
	}
	if r = p.run("print:x"); r.State != api.Succeeded {
		t.Errorf("got %+v", r)
	}
}

// Another runtime finds what an earlier one left: nothing of it is run.
func TestAnotherRuntime(t *testing.T) {
	never := make(chan struct{})
	w := newWorld(t, func(w *world) {
		prepare := w.opts.Prepare
		w.opts.Prepare = func(ctx context.Context, run kernel.Runner, progress func(string)) (*kernel.Launch, error) {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-never:
				return prepare(ctx, run, progress)
			}
		}
	})
	p := w.client("calm-otter")
	waiting := p.execute("print:x", 0)
	w.halt()
	w.start() // the same runtime: it waits on
	p = w.client("calm-otter")
	if r := p.poll(api.PollParams{ExecID: waiting.ExecID, WaitMS: ptr(int64(0))}); r.State != api.Queued {
		t.Errorf("got %+v", r)
	}
	w.halt()
	w.opts.Instance = newID()
	close(never)
	w.start()
	p = w.client("calm-otter")
	r := p.finish(waiting.ExecID)
	if r.State != api.Lost || !strings.Contains(errText(r), "nothing of it was run") {
		t.Errorf("got %+v: %s", r, errText(r))
	}
	if r = p.run("print:y"); r.State != api.Succeeded || len(w.sup.current().begun()) != 1 {
		t.Errorf("got %+v", r)
	}
}

// Nothing changes for anybody while the supervisor is replaced.
func TestSupervisorDies(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	gen := p.run("set:a=1").Generation
	busy := p.execute("gate:g", 0)
	w.sup.crash()
	if r := p.run("get:a"); text(r) != "1" || r.Generation != gen {
		t.Errorf("got %+v", r)
	}
	w.sup.current().open("g")
	if r := p.finish(busy.ExecID); r.State != api.Succeeded || r.Generation != gen {
		t.Errorf("got %+v", r)
	}
	// The kernel's death is noticed by the connection that follows.
	w.sup.crash()
	w.sup.die(control.UnitStatus{ActiveState: control.Failed, SubState: "failed", Result: "exit-code", ExitKnown: true, ExitCode: 3})
	if r := p.run("get:a"); text(r) == "1" && r.Generation == gen {
		t.Errorf("got %+v", r)
	}
}

// The kernel's connection breaks, for no reason: it comes again and nothing is lost.
func TestKernelConnectionBreaks(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	gen := p.run("set:a=1").Generation
	var wg sync.WaitGroup
	var ended atomic.Int64 // cells
	stop := make(chan struct{})
	wg.Add(1)
	go func() {
		defer wg.Done()
		k := w.sup.current()
		pause, seen := 5*time.Millisecond, ended.Load()
		for {
			select {
			case <-stop:
				return
			case <-time.After(pause):
			}
			// A slow machine needs more time for a cell between two breaks.
			if n := ended.Load(); n == seen {
				pause *= 2
			} else {
				pause, seen = 5*time.Millisecond, n
			}
			k.mu.Lock()
			if k.conn != nil {
				k.conn.Close()
			}
			k.mu.Unlock()
		}
	}()
	for i := range 50 {
		mark := fmt.Sprint(i)
		r := p.run("print:" + mark + " big:5000 result:" + mark)
		ended.Add(1)
		if r.State != api.Succeeded || r.Generation != gen || !strings.HasPrefix(text(r), mark+"\n") || !strings.HasSuffix(text(r), mark) || len(text(r)) != 5000+2*len(mark)+1 {
			t.Errorf("cell %d: %+v", i, r)
		}
	}
	close(stop)
	wg.Wait()
	if n := len(w.sup.current().begun()); n != 51 {
		t.Errorf("%d cells were begun", n)
	}
}

// A full disk: nothing is run, output is held back, and all goes on when there is
// space again.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatalf("this test mounts a small tmpfs, for which it must be root: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	ws, err := workspace.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorldIn(t, ws)
	p := w.client("calm-otter")
	r := p.execute("print:one gate:g print:two big:100000", 0)
	for r.Cursor == 0 {
		r = p.poll(api.PollParams{ExecID: r.ExecID, WaitMS: ptr(int64(api.MaxWaitMS))})
	}
	ballast := filepath.Join(dir, "ballast")
	fill := func() {
		f, err := os.OpenFile(ballast, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		for err == nil {
			_, err = f.Write(make([]byte, 4096))
		}
		f.Close()
	}
	fill()
	var refusal error
	for i := 0; refusal == nil && i < 200; i++ {
		_, refusal = call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:refused " + strings.Repeat("x", 20000), WaitMS: ptr(int64(0))})
		fill()
	}
	wantCode(t, refusal, api.CodeStorage, "nothing was run", "free some space")
	before := len(w.sup.current().begun())
	_, err = call[api.ExecResult](p, api.MethodExecute, api.ExecuteParams{Code: "print:refused " + strings.Repeat("x", 20000)})
	wantCode(t, err, api.CodeStorage)
	if n := len(w.sup.current().begun()); n != before {
		t.Errorf("a refused cell was begun")
	}
	w.sup.current().open("g") // what it prints now cannot be stored
	s := w.until("unhealthy", func(s *api.Status) bool { return s.HealthError != "" })
	if s.Healthy || !strings.Contains(s.HealthError, "disk") {
		t.Errorf("%+v", s)
	}
	x := p.poll(api.PollParams{ExecID: r.ExecID, Cursor: &r.Cursor, WaitMS: ptr(int64(0))})
	if x.State != api.Running || !slices.ContainsFunc(x.Warnings, func(w api.Warning) bool { return w.Code == api.CodeStorage }) {
		t.Errorf("got %+v", x)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	x = p.finish(r.ExecID)
	for x.HasMore {
		y := p.poll(api.PollParams{ExecID: r.ExecID, Cursor: &x.Cursor, MaxBytes: ptr(int64(api.MaxBytes))})
		y.Output = append(x.Output, y.Output...)
		x = y
	}
	if got := text(x); x.State != api.Succeeded || !strings.HasPrefix(got, "one\ntwo\n") || len(got) != 100008 {
		t.Errorf("%s with %d bytes", x.State, len(got))
	}
	if y := p.run("print:after"); y.State != api.Succeeded {
		t.Errorf("got %+v", y)
	}
	w.until("healthy", func(s *api.Status) bool { return s.Healthy })
}

// A manager that starts on a full disk serves what it can and recovers by itself.
func TestStartOnAFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatalf("this test mounts a small tmpfs, for which it must be root: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	ws, err := workspace.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(dir, "ballast")
	w := newWorldIn(t, ws)
	gen := w.client("calm-otter").run("set:a=1").Generation
	w.halt()
	f, err := os.Create(ballast)
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	f.Close()
	w.start()
	p := w.dial()
	s, err := call[api.Status](p, api.MethodStatus, api.StatusParams{})
	if err != nil {
		t.Fatal(err)
	}
	if s.HealthError != "" { // SQLite may manage to open it all the same
		_, err = call[api.AttachResult](p, api.MethodAttach, api.AttachParams{ConnectionID: p.id, Protocol: api.Protocol})
		wantCode(t, err, api.CodeStorage, "free some space")
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	c, err := w.reconnect("calm-otter") // the first call after that finds it
	if err != nil {
		t.Fatal(err)
	}
	defer c.conn.Close()
	if r := c.run("get:a"); text(r) != "1" || r.Generation != gen {
		t.Errorf("got %+v", r)
	}
}

func TestDamagedDatabase(t *testing.T) {
	w := newWorld(t)
	p := w.client("calm-otter")
	p.run("print:x")
	w.halt()
	path := filepath.Join(w.ws.Root, "history.sqlite3")
	if err := os.WriteFile(path, []byte(strings.Repeat("garbage ", 5000)), 0o600); err != nil {
		t.Fatal(err)
	}
	w.start()
	s := w.until("started", func(*api.Status) bool { return true })
	if !strings.Contains(s.LastError, "corrupt-") {
		t.Errorf("status says %q", s.LastError)
	}
	if r := w.client("calm-otter").run("get:a"); r.State != api.Succeeded {
		t.Errorf("got %+v", r)
	}
	if kept, _ := filepath.Glob(path + ".corrupt-*"); len(kept) == 0 {
		t.Error("the damaged file is gone")
	}
}

// Whatever arrives at the kernel socket, the session goes on.
func TestGarbageOnTheKernelSocket(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	gen := p.run("print:x").Generation
	for _, garbage := range []string{"", "\n", "{}\n", "[1]\n", "{\"type\":\"event\"}\n", "{\"type\":\"hello\",\"protocol\":9,\"generation\":\"" + gen + "\"}\n",
		"{\"type\":\"hello\",\"protocol\":1,\"generation\":\"../../etc\"}\n", "\x00\xff\n", strings.Repeat("x", 1<<20)} {
		c, err := net.Dial("unix", filepath.Join(w.sockDir, "kernel"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, garbage)
		_ = c.(*net.UnixConn).CloseWrite()
		_ = c.SetReadDeadline(time.Now().Add(deadline))
		_, _ = io.ReadAll(c)
		c.Close()
	}
	if r := p.run("print:x"); r.State != api.Succeeded || r.Generation != gen {
		t.Errorf("got %+v", r)
	}
}

// 16 MiB of output are read back whole, in pages of any size, while it runs and after.
func TestLargeOutput(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	const size = 16 << 20
	r := p.execute(fmt.Sprintf("big:%d", size), 0)
	total := 0
	cursor := int64(0)
	for budget := int64(api.MinBytes); ; budget = min(2*budget, api.MaxBytes) {
		x := p.poll(api.PollParams{ExecID: r.ExecID, Cursor: &cursor, MaxBytes: &budget, WaitMS: ptr(int64(api.MaxWaitMS))})
		if raw, _ := json.Marshal(x.Output); len(raw) > int(budget)+16 {
			t.Fatalf("a page of %d bytes, the budget is %d", len(raw), budget)
		}
		total += len(text(x))
		cursor = x.Cursor
		if api.Terminal(x.State) && !x.HasMore {
			break
		}
	}
	if total != size {
		t.Errorf("%d bytes of %d", total, size)
	}
	rec, err := call[api.Record](p, api.MethodRecord, api.RecordParams{ID: r.ExecID})
	if err != nil || rec.OutputBytes != size || rec.OutputEvents != cursor {
		t.Errorf("%+v %v", rec, err)
	}
}

// readAll reads the output of an execution to its end and returns its length.
func readAll(t testing.TB, p *peer, id string) (n int) {
	t.Helper()
	for cursor := int64(0); ; {
		x := p.poll(api.PollParams{ExecID: id, Cursor: &cursor, MaxBytes: ptr(int64(api.MaxBytes)), WaitMS: ptr(int64(api.MaxWaitMS))})
		n += len(text(x))
		if cursor = x.Cursor; api.Terminal(x.State) && !x.HasMore {
			return n
		}
	}
}

// No descriptor is left behind by a manager's life.
func TestDescriptors(t *testing.T) {
	count := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	w := newWorld(t)
	quiet := func() { // no manager, and no kernel that is just connecting again
		w.halt()
		w.sup.die(control.UnitStatus{ActiveState: control.Inactive, SubState: "dead", Result: "success", ExitKnown: true})
		w.sup.end()
	}
	p := w.client("calm-otter")
	p.run("print:x")
	p.conn.Close()
	quiet()
	before := count()
	w.start()
	p = w.client("calm-otter")
	p.run("print:x big:200000")
	r := p.execute("print:x gate:never", 0)
	w.until("runs", func(s *api.Status) bool { return len(s.Active) == 1 })
	if _, err := call[api.ResetResult](p, api.MethodReset, api.LifecycleParams{Force: true}); err != nil {
		t.Fatal(err)
	}
	p.finish(r.ExecID)
	p.conn.Close()
	quiet()
	if after := count(); after > before {
		t.Errorf("%d descriptors, before %d", after, before)
	}
}
