package client_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"mypr/internal/api"
	"mypr/internal/client"
	"mypr/internal/client/clienttest"
	"mypr/internal/rpc"
)

func TestMain(m *testing.M) {
	before := openFDs()
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if after := openFDs(); code == 0 && after > before {
			println("descriptors leaked:", after-before)
			code = 1
		}
		os.Exit(code)
	}))
}

// openFDs counts descriptors that are no part of the Go runtime's poller.
func openFDs() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	n := 0
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && to != "anon_inode:[eventpoll]" && to != "anon_inode:[eventfd]" {
			n++
		}
	}
	return n
}

func newClient(t *testing.T, r *clienttest.Runtime, edit ...func(*client.Options)) *client.Client {
	t.Helper()
	o := client.Options{Ensure: r.Ensure, Kind: "frontend", Name: "test 1", Version: "1.0.0"}
	for _, f := range edit {
		f(&o)
	}
	c := client.New(o)
	t.Cleanup(func() { c.Close() })
	return c
}

func ctx(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// logChannel passes on the messages of a log.
type logChannel chan string

func (l logChannel) Enabled(context.Context, slog.Level) bool { return true }
func (l logChannel) Handle(_ context.Context, r slog.Record) error {
	l <- r.Message
	return nil
}
func (l logChannel) WithAttrs([]slog.Attr) slog.Handler { return l }
func (l logChannel) WithGroup(string) slog.Handler      { return l }

func ms(n int64) *int64 { return &n }

func mustInit(t *testing.T, c *client.Client) string {
	t.Helper()
	res, err := c.Init(ctx(t), api.InitParams{})
	if err != nil {
		t.Fatal(err)
	}
	return res.ClientID
}

func TestConnectsAtFirstUse(t *testing.T) {
	r := clienttest.New(t)
	c := newClient(t, r)
	if n := len(r.Attached()); n != 0 {
		t.Fatalf("%d connections before the first call", n)
	}
	c.SetName("claude-code 2.1.285")
	mustInit(t, c)
	a := r.Attached()
	if len(a) != 1 || a[0].Name != "claude-code 2.1.285" || a[0].Kind != "frontend" || len(a[0].ConnectionID) != 32 || !a[0].Progress {
		t.Fatalf("attached as %+v", a)
	}
}

// What Ensure found may be stopped before it is connected to: then the next is found or
// started.
func TestStoppedBeforeItWasConnectedTo(t *testing.T) {
	r := clienttest.New(t)
	asked := 0
	c := newClient(t, r, func(o *client.Options) {
		o.Ensure = func(ctx context.Context) (string, error) {
			if asked++; asked == 1 {
				return filepath.Join(t.TempDir(), "gone.sock"), nil
			}
			return r.Ensure(ctx)
		}
	})
	mustInit(t, c)
	if asked != 2 {
		t.Errorf("asked %d times", asked)
	}
}

// The manager dies while a cell runs; the supervisor's socket stays. The caller sees
// one answer, and the cell has run once.
func TestExecuteOverManagerDeath(t *testing.T) {
	r := clienttest.New(t)
	cells := make(chan *clienttest.Cell, 10)
	r.Play(func(c *clienttest.Cell) { cells <- c })
	c := newClient(t, r)
	id := mustInit(t, c)

	type answer struct {
		res *api.ExecResult
		err error
	}
	got := make(chan answer, 1)
	go func() {
		res, err := c.Execute(ctx(t), api.ExecuteParams{Code: "x", WaitMS: ms(15000)}, nil)
		got <- answer{res, err}
	}()
	cell := <-cells
	for range 3 {
		r.Await(api.MethodExecute)
		r.Kill()
		r.Start()
	}
	r.Await(api.MethodExecute)
	cell.Print("hello")
	cell.End(api.Succeeded, "")
	a := <-got
	if a.err != nil {
		t.Fatal(a.err)
	}
	if a.res.State != api.Succeeded || len(a.res.Output) != 1 || a.res.Replayed {
		t.Errorf("answer %+v", a.res)
	}
	if n := len(r.Cells()); n != 1 || cell.Ran() != 1 {
		t.Errorf("%d cells, the first ran %d times", n, cell.Ran())
	}
	seen := map[string]bool{}
	for i, p := range r.Attached() {
		if seen[p.ConnectionID] {
			t.Errorf("connection id %s was used twice", p.ConnectionID)
		}
		seen[p.ConnectionID] = true
		if i > 0 && (p.ClientID != id || p.SeenGeneration != r.Generation()) {
			t.Errorf("attached again as %+v", p)
		}
	}
	if a.res.ClientID != id {
		t.Errorf("client id %q after the reconnects, was %q", a.res.ClientID, id)
	}
}

// A call that is made while no manager accepts waits in the backlog.
func TestCallWaitsForTheManager(t *testing.T) {
	r := clienttest.New(t)
	c := newClient(t, r)
	mustInit(t, c)
	r.Kill()
	done := make(chan error, 1)
	go func() {
		res, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1"}, nil)
		if err == nil && res.State != api.Succeeded {
			err = errors.New(res.State)
		}
		done <- err
	}()
	r.Start()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if r.Starts() != 0 {
		t.Errorf("the runtime was started %d times", r.Starts())
	}
}

// The loss that happened while the front end was away is told, once.
func TestNoticeAfterReconnect(t *testing.T) {
	r := clienttest.New(t)
	c := newClient(t, r)
	mustInit(t, c)
	r.Kill()
	r.NewGeneration()
	r.Start()
	for i := range 2 {
		res, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1"}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if told := res.Notice != nil; told != (i == 0) {
			t.Errorf("answer %d: notice %+v", i+1, res.Notice)
		}
	}
}

// An idle client connects again by itself, so that its id stays its own.
func TestIdleReconnect(t *testing.T) {
	r := clienttest.New(t)
	c := newClient(t, r)
	id := mustInit(t, c)
	r.Await(api.MethodAttach)
	r.Kill()
	r.Start()
	r.Await(api.MethodAttach)
	if a := r.Attached(); len(a) != 2 || a[1].ClientID != id {
		t.Errorf("attached %+v", a)
	}
}

// A connection may end right after it has answered init: the next one has the id as well.
func TestDeathBehindInit(t *testing.T) {
	r := clienttest.New(t)
	for range 100 {
		c := newClient(t, r)
		again := make(chan struct{})
		var once sync.Once
		r.Hook(func(_ context.Context, q *rpc.Request) (any, error, bool) {
			if q.Method == api.MethodInit {
				once.Do(func() {
					go func() { // the answer may or may not be sent before
						defer close(again)
						r.Kill()
						r.Start()
					}()
				})
			}
			return nil, nil, false
		})
		mustInit(t, c)
		<-again
		if _, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1"}, nil); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
}

// A message that was shown is not news to the next manager either.
func TestSeenMessage(t *testing.T) {
	r := clienttest.New(t)
	r.Hook(func(_ context.Context, q *rpc.Request) (any, error, bool) {
		return api.ExecResult{State: api.Running, Inbox: &api.Inbox{Unacked: 1, Newest: 7}}, nil, q.Method == api.MethodPoll
	})
	c := newClient(t, r)
	mustInit(t, c)
	r.Await(api.MethodAttach)
	if _, err := c.Poll(ctx(t), api.PollParams{ExecID: "x"}, nil); err != nil {
		t.Fatal(err)
	}
	r.Kill()
	r.Start()
	r.Await(api.MethodAttach)
	if a := r.Attached(); len(a) != 2 || a[1].SeenMessage != 7 {
		t.Errorf("attached %+v", a)
	}
}

// After a stop an idle client does not touch the socket, even one that listens for a
// service that it would start; the next call does.
func TestIdleAfterStop(t *testing.T) {
	r := clienttest.New(t)
	log := make(logChannel, 10)
	c := newClient(t, r, func(o *client.Options) { o.Logger = slog.New(log) })
	mustInit(t, c)
	r.Stop("stop requested from the command line")
	for m := range log {
		if m == "the runtime was stopped" { // the last that the client does of itself
			break
		}
	}
	r.Listen() // socket activation
	r.Start()
	if _, err := newClient(t, r).Status(ctx(t), api.StatusParams{}); err != nil { // accepted after all that came before
		t.Fatal(err)
	}
	if n := len(r.Attached()); n != 2 {
		t.Errorf("%d connections, of which 2 were asked for", n)
	}
	if _, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1"}, nil); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

// A call that waits when the runtime is stopped fails and starts nothing.
func TestStopUnderACall(t *testing.T) {
	r := clienttest.New(t)
	r.Play(func(*clienttest.Cell) {})
	c := newClient(t, r)
	mustInit(t, c)
	got := make(chan error, 1)
	go func() {
		_, err := c.Execute(ctx(t), api.ExecuteParams{Code: "x", WaitMS: ms(15000)}, nil)
		got <- err
	}()
	r.Await(api.MethodExecute)
	r.Stop("stop requested from the command line")
	err := <-got
	if rpc.CodeOf(err) != client.CodeStopped || !strings.Contains(err.Error(), "from the command line") {
		t.Errorf("error %v", err)
	}
	if r.Starts() != 0 {
		t.Errorf("the runtime was started %d times", r.Starts())
	}
	// A new call may start it.
	if _, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1", WaitMS: ms(0)}, nil); err != nil {
		t.Errorf("the next call: %v", err)
	}
	if r.Starts() != 1 {
		t.Errorf("the runtime was started %d times", r.Starts())
	}
}

// The same when the socket still listens, for a service that a connection would start.
func TestStopUnderACallWithSocketUnit(t *testing.T) {
	r := clienttest.New(t)
	r.Play(func(*clienttest.Cell) {})
	c := newClient(t, r)
	mustInit(t, c)
	got := make(chan error, 1)
	go func() {
		_, err := c.Execute(ctx(t), api.ExecuteParams{Code: "x", WaitMS: ms(15000)}, nil)
		got <- err
	}()
	r.Await(api.MethodExecute)
	r.Notify(api.NotificationStopping, api.Stopping{Kind: "stop"})
	r.Kill()
	if err := <-got; rpc.CodeOf(err) != client.CodeStopped {
		t.Errorf("error %v", err)
	}
	r.Start()
	if _, err := newClient(t, r).Status(ctx(t), api.StatusParams{}); err != nil { // accepted after all that came before
		t.Fatal(err)
	}
	if n := len(r.Attached()); n != 2 {
		t.Errorf("%d connections, of which 2 were asked for", n)
	}
}

// When all died at once a waiting call revives the runtime, and learns the truth.
func TestCrashUnderACall(t *testing.T) {
	r := clienttest.New(t)
	r.Play(func(*clienttest.Cell) {})
	c := newClient(t, r)
	mustInit(t, c)
	type answer struct {
		res *api.ExecResult
		err error
	}
	got := make(chan answer, 1)
	go func() {
		res, err := c.Execute(ctx(t), api.ExecuteParams{Code: "x", WaitMS: ms(15000)}, nil)
		got <- answer{res, err}
	}()
	r.Await(api.MethodExecute)
	r.Crash()
	a := <-got
	if a.err != nil {
		t.Fatal(a.err)
	}
	if a.res.State != api.Lost || a.res.Notice == nil || len(r.Cells()) != 1 {
		t.Errorf("state %s, notice %v, %d cells", a.res.State, a.res.Notice, len(r.Cells()))
	}
}

// A call that kills the manager each time it comes is not sent for ever.
func TestPoisonousCall(t *testing.T) {
	r := clienttest.New(t)
	r.Hook(func(_ context.Context, q *rpc.Request) (any, error, bool) {
		if q.Method == api.MethodStatus {
			q.Conn.CloseAsync()
			<-q.Conn.Done()
			return nil, nil, true
		}
		return nil, nil, false
	})
	c := newClient(t, r)
	_, err := c.Status(ctx(t), api.StatusParams{})
	if rpc.CodeOf(err) != rpc.CodeUnavailable || !strings.Contains(err.Error(), "12 times") {
		t.Errorf("error %v", err)
	}
}

// What must not happen twice is not sent twice.
func TestResetIsNotSentAgain(t *testing.T) {
	r := clienttest.New(t)
	resets := make(chan bool, 10)
	r.Hook(func(_ context.Context, q *rpc.Request) (any, error, bool) {
		if q.Method == api.MethodReset {
			resets <- true
			q.Conn.CloseAsync()
			<-q.Conn.Done()
			return nil, nil, true
		}
		return nil, nil, false
	})
	c := newClient(t, r)
	_, err := c.Reset(ctx(t), api.LifecycleParams{})
	if err == nil || !strings.Contains(err.Error(), "unknown") || len(resets) != 1 {
		t.Errorf("error %v after %d resets", err, len(resets))
	}
}

func TestCancelEndsTheWaitOnly(t *testing.T) {
	r := clienttest.New(t)
	cells := make(chan *clienttest.Cell, 1)
	r.Play(func(c *clienttest.Cell) { cells <- c })
	c := newClient(t, r)
	mustInit(t, c)
	cancelled, cancel := context.WithCancel(ctx(t))
	got := make(chan error, 1)
	go func() {
		_, err := c.Execute(cancelled, api.ExecuteParams{Code: "x", WaitMS: ms(15000)}, nil)
		got <- err
	}()
	cell := <-cells
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) || errors.Is(err, client.ErrNotSent) {
		t.Errorf("error %v", err)
	}
	cell.End(api.Succeeded, "")
	res, err := c.Poll(ctx(t), api.PollParams{ExecID: cell.ID}, nil)
	if err != nil || res.State != api.Succeeded {
		t.Errorf("poll: %+v, %v", res, err)
	}
}

func TestNotSent(t *testing.T) {
	r := clienttest.New(t)
	want := rpc.Errorf(api.CodeKernel, "no Python")
	c := newClient(t, r, func(o *client.Options) {
		o.Ensure = func(context.Context) (string, error) { return "", want }
	})
	_, err := c.Execute(ctx(t), api.ExecuteParams{Code: "x"}, nil)
	if !errors.Is(err, client.ErrNotSent) || rpc.CodeOf(err) != api.CodeKernel || err.Error() != want.Error() {
		t.Errorf("error %q", err)
	}
}

// Many calls over one connection that breaks: each is answered once.
func TestManyCallsOverDeath(t *testing.T) {
	r := clienttest.New(t)
	r.Play(func(*clienttest.Cell) {})
	c := newClient(t, r)
	mustInit(t, c)
	const n = 40
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			res, err := c.Execute(ctx(t), api.ExecuteParams{Code: "x", WaitMS: ms(10000)}, nil)
			if err != nil || res.State != api.Succeeded {
				t.Errorf("%+v, %v", res, err)
			}
		})
	}
	for range n {
		r.Await(api.MethodExecute)
	}
	r.Kill()
	r.Start()
	for range n {
		r.Await(api.MethodExecute)
	}
	for _, cell := range r.Cells() {
		cell.End(api.Succeeded, "")
	}
	wg.Wait()
	if len(r.Cells()) != n {
		t.Errorf("%d cells for %d calls", len(r.Cells()), n)
	}
}

func TestProgressFindsItsCall(t *testing.T) {
	r := clienttest.New(t)
	cells := make(chan *clienttest.Cell, 1)
	r.Play(func(c *clienttest.Cell) { cells <- c })
	c := newClient(t, r)
	mustInit(t, c)
	heard := make(chan api.Progress, 10)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = c.Execute(ctx(t), api.ExecuteParams{Code: "x", WaitMS: ms(15000)}, func(p api.Progress) { heard <- p })
	}()
	cell := <-cells
	r.Notify(api.NotificationProgress, api.Progress{ExecID: "another", RequestID: "another", State: api.Running})
	r.Notify(api.NotificationProgress, api.Progress{ExecID: cell.ID, RequestID: *cell.Params.RequestID, State: api.Running, LastLine: "42%"})
	if p := <-heard; p.LastLine != "42%" {
		t.Errorf("progress %+v", p)
	}
	cell.End(api.Succeeded, "")
	<-done
}

// The shortened generation that people are shown is accepted; another is not.
func TestShortGeneration(t *testing.T) {
	r := clienttest.New(t)
	c := newClient(t, r)
	mustInit(t, c)
	if _, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1", Generation: r.Generation()[:8]}, nil); err != nil {
		t.Error(err)
	}
	_, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1", Generation: "99999999"}, nil)
	if rpc.CodeOf(err) != api.CodeGeneration {
		t.Errorf("error %v", err)
	}
}

// Close ends calls that wait for a manager that does not answer.
func TestClose(t *testing.T) {
	r := clienttest.New(t)
	c := newClient(t, r)
	mustInit(t, c)
	r.Kill()
	done := make(chan error, 1)
	go func() {
		_, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1"}, nil)
		done <- err
	}()
	c.Close()
	if err := <-done; err == nil {
		t.Error("no error")
	}
}

func TestPassive(t *testing.T) {
	r := clienttest.New(t)
	c := newClient(t, r, func(o *client.Options) { o.Passive = true })
	if _, err := c.Status(ctx(t), api.StatusParams{}); err != nil {
		t.Fatal(err)
	}
	if n := len(r.Attached()); n != 0 {
		t.Errorf("%d attached", n)
	}
}

// A manager that hangs is an error that says so, in time.
func TestOverdue(t *testing.T) {
	client.SetPatience(t, 50*time.Millisecond)
	r := clienttest.New(t)
	c := newClient(t, r)
	mustInit(t, c)
	r.Hook(func(ctx context.Context, _ *rpc.Request) (any, error, bool) {
		<-ctx.Done()
		return nil, ctx.Err(), true
	})
	_, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1", WaitMS: ms(10)}, nil)
	if rpc.CodeOf(err) != rpc.CodeUnavailable || !strings.Contains(err.Error(), "did not answer execute within") || !strings.Contains(err.Error(), "request_id=") {
		t.Errorf("error %v", err)
	}
}

// Where it can be told what keeps it, and what to do, that is said.
func TestOverdueWithTrouble(t *testing.T) {
	client.SetPatience(t, 50*time.Millisecond)
	r := clienttest.New(t)
	var frozen atomic.Bool
	c := newClient(t, r, func(o *client.Options) {
		o.Trouble = func(context.Context, string) error {
			if !frozen.Load() {
				return nil
			}
			return rpc.Errorf(rpc.CodeUnavailable, "the manager does not answer: it is frozen").WithHint("thaw it")
		}
	})
	mustInit(t, c)
	frozen.Store(true)
	r.Hook(func(ctx context.Context, _ *rpc.Request) (any, error, bool) {
		<-ctx.Done()
		return nil, ctx.Err(), true
	})
	_, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1", WaitMS: ms(10)}, nil)
	if err == nil || !strings.Contains(err.Error(), "s: it is frozen. The cell may") || !strings.Contains(err.Error(), "thaw it") || !strings.Contains(err.Error(), "request_id=") {
		t.Errorf("error %v", err)
	}
}

// Nor does one that never accepts hold a call for ever.
func TestNobodyAccepts(t *testing.T) {
	client.SetPatience(t, 50*time.Millisecond)
	r := clienttest.New(t)
	r.Kill()
	c := newClient(t, r)
	_, err := c.Init(ctx(t), api.InitParams{})
	if rpc.CodeOf(err) != rpc.CodeUnavailable || !strings.Contains(err.Error(), "no answer from the runtime within 50ms") || !errors.Is(err, client.ErrNotSent) {
		t.Errorf("error %v", err)
	}
}

// A stop that was announced and called off is forgotten.
func TestStopCalledOff(t *testing.T) {
	r := clienttest.New(t)
	c := newClient(t, r)
	mustInit(t, c)
	r.Await(api.MethodAttach)
	r.Notify(api.NotificationStopping, api.Stopping{Kind: "stop"})
	for range 2 { // the first is sent after the announcement was read, or it is what makes sure that it was
		if _, err := c.Execute(ctx(t), api.ExecuteParams{Code: "1"}, nil); err != nil {
			t.Fatal(err)
		}
	}
	r.Kill()
	r.Start()
	r.Await(api.MethodAttach)
}
