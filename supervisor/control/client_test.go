package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"mypr/internal/rpc"
	"mypr/supervisor/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server answers with handle at a socket until the test ends, and dials it.
func server(t *testing.T, handle rpc.HandlerFunc) *Client {
	t.Helper()
	c, stop := stoppable(t, handle)
	t.Cleanup(stop)
	return c
}

func stoppable(t *testing.T, handle rpc.HandlerFunc) (_ *Client, stop func()) {
	t.Helper()
	dir, err := os.MkdirTemp("", "mc")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	s := &rpc.Server{NewHandler: func(*rpc.Conn) rpc.Handler { return handle }}
	go func() { done <- s.Serve(ctx, l) }()
	c, err := Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	return c, func() {
		c.Close()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
	}
}

func TestEachMethod(t *testing.T) {
	var mu sync.Mutex
	var got rpc.Request
	status := UnitStatus{Name: "a.service", ActiveState: Active}
	answers := map[string]any{
		MethodInfo: Info{Instance: "i"}, MethodList: []UnitStatus{status}, MethodShow: UnitDetail{UnitStatus: status},
		MethodStart: JobResult{"done", status}, MethodStop: JobResult{"done", status}, MethodRestart: JobResult{"done", status}, MethodReload: JobResult{"done", status},
		MethodStartTransient: TransientResult{JobResult: JobResult{"done", status}}, MethodAttach: TransientResult{JobResult: JobResult{"done", status}},
		MethodWait: status,
	}
	c := server(t, func(_ context.Context, r *rpc.Request) (any, error) {
		mu.Lock()
		defer mu.Unlock()
		got = *r
		return answers[r.Method], nil
	})
	ctx := t.Context()
	value := func(v any, err error) (any, error) { return v, err }
	for method, c := range map[string]struct {
		params string
		call   func() (any, error)
	}{
		MethodInfo:         {``, func() (any, error) { return value(c.Info(ctx)) }},
		MethodList:         {`{"usage":true}`, func() (any, error) { return value(c.List(ctx, true)) }},
		MethodShow:         {`{"name":"a"}`, func() (any, error) { return value(c.Show(ctx, "a")) }},
		MethodStart:        {`{"name":"a","no_wait":true}`, func() (any, error) { return value(c.Start(ctx, JobParams{"a", true})) }},
		MethodStop:         {`{"name":"a"}`, func() (any, error) { return value(c.Stop(ctx, JobParams{Name: "a"})) }},
		MethodRestart:      {`{"name":"a"}`, func() (any, error) { return value(c.Restart(ctx, JobParams{Name: "a"})) }},
		MethodReload:       {`{"name":"a"}`, func() (any, error) { return value(c.Reload(ctx, JobParams{Name: "a"})) }},
		MethodKill:         {`{"name":"a","signal":9,"who":"all"}`, func() (any, error) { return nil, c.Kill(ctx, KillParams{"a", 9, "all"}) }},
		MethodResetFailed:  {`{"name":"a"}`, func() (any, error) { return nil, c.ResetFailed(ctx, "a") }},
		MethodFreeze:       {`{"name":"a"}`, func() (any, error) { return nil, c.Freeze(ctx, "a") }},
		MethodThaw:         {`{"name":"a"}`, func() (any, error) { return nil, c.Thaw(ctx, "a") }},
		MethodAttach:       {`{"name":"a"}`, func() (any, error) { r, _, err := c.Attach(ctx, "a"); return r, err }},
		MethodRelease:      {`{"name":"a","fd_names":["stdin"]}`, func() (any, error) { return nil, c.Release(ctx, "a", "stdin") }},
		MethodResizeTTY:    {`{"name":"a","rows":2,"cols":3}`, func() (any, error) { return nil, c.ResizeTTY(ctx, ResizeParams{"a", 2, 3}) }},
		MethodWait:         {`{"name":"a","invocation_id":"x"}`, func() (any, error) { return value(c.Wait(ctx, WaitParams{"a", "x"})) }},
		MethodDaemonReload: {``, func() (any, error) { return nil, c.DaemonReload(ctx) }},
		MethodReexec:       {`{"executable":"/x"}`, func() (any, error) { return nil, c.Reexec(ctx, ReexecParams{"/x"}) }},
		MethodShutdown:     {`{"reason":"r"}`, func() (any, error) { return nil, c.Shutdown(ctx, ShutdownParams{"r"}) }},
		MethodStartTransient: {`{"unit":{"name":"t.service"}}`, func() (any, error) {
			r, _, err := c.StartTransient(ctx, TransientParams{Unit: &spec.Unit{Name: "t.service"}})
			return r, err
		}},
	} {
		v, err := c.call()
		if err != nil {
			t.Errorf("%s: %v", method, err)
		}
		mu.Lock()
		got := got
		mu.Unlock()
		if got.Method != method || string(got.Params) != c.params {
			t.Errorf("%s sent %s %s, want %s", method, got.Method, got.Params, c.params)
		}
		if !reflect.DeepEqual(v, answers[method]) {
			t.Errorf("%s = %+v, want %+v", method, v, answers[method])
		}
	}
}

func TestDialNobody(t *testing.T) {
	_, err := Dial(t.Context(), filepath.Join(t.TempDir(), "none"))
	if !rpc.IsGone(err) {
		t.Errorf("error %v", err)
	}
}

func openFDs(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func TestStartTransientPassesFiles(t *testing.T) {
	if rd, wr, err := os.Pipe(); err == nil { // so that the runtime's own descriptors exist
		rd.Close()
		wr.Close()
	}
	before := openFDs(t)
	var names atomic.Pointer[[]string]
	names.Store(&[]string{"stdin", "stdout"})
	c, stop := stoppable(t, func(_ context.Context, r *rpc.Request) (any, error) {
		var p TransientParams
		if err := r.Bind(&p); err != nil {
			return nil, err
		}
		defer r.CloseFiles()
		// What the client sent under "log" gets a line; the two ends of a pipe go back.
		if len(r.Files) != 1 || p.FDNames[0] != "log" {
			return nil, fmt.Errorf("%d files %q", len(r.Files), p.FDNames)
		}
		if _, err := r.Files[0].WriteString("hello\n"); err != nil {
			return nil, err
		}
		rd, wr, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		return rpc.Reply{Value: TransientResult{FDNames: *names.Load()}, Files: []*os.File{wr, rd}}, nil
	})
	rd, wr, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_, files, err := c.StartTransient(t.Context(), TransientParams{Unit: &spec.Unit{}, FDNames: []string{"log"}}, wr)
	if err != nil {
		t.Fatal(err)
	}
	wr.Close()
	if b, err := io.ReadAll(rd); err != nil || string(b) != "hello\n" {
		t.Errorf("the log got %q, %v", b, err)
	}
	rd.Close()
	if _, err := files["stdin"].WriteString("x"); err != nil {
		t.Fatal(err)
	}
	files["stdin"].Close()
	if b, err := io.ReadAll(files["stdout"]); err != nil || string(b) != "x" {
		t.Errorf("through the unit's pipe: %q, %v", b, err)
	}
	files["stdout"].Close()

	if _, _, err := c.StartTransient(t.Context(), TransientParams{FDNames: []string{"log", "more"}}, rd); err == nil {
		t.Error("one file for two names was accepted")
	}
	for _, bad := range [][]string{{"stdin"}, {"a", "a"}} {
		names.Store(&bad)
		rd, wr, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		if _, files, err := c.StartTransient(t.Context(), TransientParams{FDNames: []string{"log"}}, wr); err == nil || files != nil {
			t.Errorf("two files named %q: %v, %v", bad, files, err)
		}
		rd.Close()
		wr.Close()
	}
	stop()
	if n := openFDs(t); n != before {
		t.Errorf("%d descriptors, %d before", n, before)
	}
}

func event(n int) UnitEvent { return UnitEvent{UnitStatus: UnitStatus{Name: fmt.Sprint(n)}} }

func TestSubscribeLosesNothing(t *testing.T) {
	const many = 20_000
	c := server(t, func(_ context.Context, r *rpc.Request) (any, error) {
		for n := range many { // some before the answer, as a supervisor may do
			if err := r.Conn.Notify(NotificationUnit, event(n)); err != nil {
				return nil, err
			}
		}
		if err := r.Conn.Notify("from-the-future", 1); err != nil {
			return nil, err
		}
		go func() {
			_ = r.Conn.Notify(NotificationUnit, event(many))
			r.Conn.CloseAsync()
		}()
		return []UnitStatus{{Name: "snapshot"}}, nil
	})
	// Nobody reads the channel until the server has sent everything and closed.
	units, events, err := c.Subscribe(t.Context())
	if err != nil || len(units) != 1 || units[0].Name != "snapshot" {
		t.Fatal(units, err)
	}
	<-c.Done()
	if !errors.Is(c.Err(), io.EOF) {
		t.Errorf("ended by %v", c.Err())
	}
	n := 0
	for e := range events {
		if e.Name != fmt.Sprint(n) {
			t.Fatalf("event %s, want %d", e.Name, n)
		}
		n++
	}
	if n != many+1 {
		t.Errorf("%d events, want %d", n, many+1)
	}
}

func TestSubscribeClose(t *testing.T) {
	c := server(t, func(_ context.Context, r *rpc.Request) (any, error) {
		for n := range 3 {
			_ = r.Conn.Notify(NotificationUnit, event(n))
		}
		return []UnitStatus{}, nil
	})
	_, events, err := c.Subscribe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Subscribe(t.Context()); err == nil {
		t.Error("a second subscription was accepted")
	}
	if e := <-events; e.Name != "0" {
		t.Errorf("first event %+v", e)
	}
	c.Close() // with events unread: must not hang
	for range events {
	}
}

func TestSubscribeRefused(t *testing.T) {
	var refused atomic.Bool
	c := server(t, func(_ context.Context, r *rpc.Request) (any, error) {
		if !refused.Swap(true) {
			return nil, rpc.Errorf(rpc.CodeUnavailable, "not now")
		}
		return []UnitStatus{}, nil
	})
	if _, _, err := c.Subscribe(t.Context()); rpc.CodeOf(err) != rpc.CodeUnavailable {
		t.Errorf("error %v", err)
	}
	if _, _, err := c.Subscribe(t.Context()); err != nil {
		t.Errorf("after a refusal: %v", err)
	}
}

func TestUnreadableEventEndsTheConnection(t *testing.T) {
	c := server(t, func(_ context.Context, r *rpc.Request) (any, error) {
		return []UnitStatus{}, r.Conn.Notify(NotificationUnit, json.RawMessage(`{"name":7}`))
	})
	_, _, _ = c.Subscribe(t.Context()) // the answer may still come before the end
	select {
	case <-c.Done():
	case <-time.After(60 * time.Second):
		t.Fatal("the connection goes on although an event was lost")
	}
}

func TestCallAndServerDies(t *testing.T) {
	c := server(t, func(_ context.Context, r *rpc.Request) (any, error) {
		r.Conn.CloseAsync()
		return nil, nil
	})
	if _, err := c.Info(t.Context()); !errors.Is(err, rpc.ErrClosed) {
		t.Errorf("error %v", err)
	}
}

func TestClientAnswersNothing(t *testing.T) {
	answer := make(chan error, 1)
	c := server(t, func(ctx context.Context, r *rpc.Request) (any, error) {
		answer <- r.Conn.Call(ctx, "anything", nil, nil)
		return nil, nil
	})
	if err := c.DaemonReload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; rpc.CodeOf(err) != rpc.CodeInvalidRequest {
		t.Errorf("error %v", err)
	}
}
