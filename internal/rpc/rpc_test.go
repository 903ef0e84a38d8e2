package rpc

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"mypr/internal/rpc/readable"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "serve-without-files" {
		serveWithoutFiles(os.Args[2])
		return
	}
	slog.SetDefault(slog.New(slog.DiscardHandler))
	goleak.VerifyTestMain(m)
}

// socketpair is two connected Unix sockets.
func socketpair(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		out[i] = c.(*net.UnixConn)
	}
	return out[0], out[1]
}

// pair is two connections; both are closed at the end, and no descriptor may be left.
func pair(t testing.TB, left, right Handler) (*Conn, *Conn) {
	t.Helper()
	noLeak(t)
	a, b := socketpair(t)
	l, r := NewConn(a, left), NewConn(b, right)
	t.Cleanup(func() { l.Close(); r.Close() })
	return l, r
}

// noLeak compares the open descriptors at the end of the test with those now.
func noLeak(t testing.TB) {
	t.Helper()
	if r, w, err := os.Pipe(); err == nil { // the poller's own descriptors exist from here on
		r.Close()
		w.Close()
	}
	before := fds(t)
	t.Cleanup(func() {
		if after := fds(t); len(after) > len(before) {
			t.Errorf("descriptors left: %q; before %q", after, before)
		}
	})
}

func fds(t testing.TB) []string {
	t.Helper()
	d, err := os.Open("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range names {
		to, _ := os.Readlink("/proc/self/fd/" + n)
		names[i] = n + "=" + to
	}
	return names
}

func timeout(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// echo answers with its parameters; the names of other methods say what they do.
var echo = HandlerFunc(func(ctx context.Context, r *Request) (any, error) {
	defer r.CloseFiles()
	switch r.Method {
	case "echo":
		return r.Params, nil
	case "fail":
		return nil, Errorf(CodeNotFound, "no %s", "such").WithHint("look")
	case "plain":
		return nil, errors.New("plain")
	case "panic":
		panic("boom")
	case "huge":
		return strings.Repeat("x", MaxFrame), nil
	case "unencodable":
		return func() {}, nil
	case "wait":
		if !r.Notification {
			<-ctx.Done()
		}
		return nil, ctx.Err()
	case "bind":
		var p struct{ A int }
		return p.A, r.Bind(&p)
	}
	return nil, nil
})

func TestCall(t *testing.T) {
	c, _ := pair(t, nil, echo)
	var got string
	text := "<b>&\u2028\x00\U0001F600"
	if err := c.Call(timeout(t), "echo", text, &got); err != nil || got != text {
		t.Errorf("%q, %v", got, err)
	}
	if err := c.Call(timeout(t), "nothing", nil, &got); err != nil || got != text {
		t.Errorf("a null answer: %q, %v", got, err)
	}
	var n int
	if err := c.Call(timeout(t), "echo", "text", &n); err == nil || !strings.Contains(err.Error(), "echo: cannot decode") {
		t.Errorf("an answer of another type: %v", err)
	}
	if err := c.Call(timeout(t), "echo", func() {}, nil); err == nil || !strings.Contains(err.Error(), "cannot encode") {
		t.Errorf("parameters that are no JSON: %v", err)
	}
	for method, want := range map[string]Error{
		"fail":        {Code: CodeNotFound, Message: "no such", Operation: "fail", Hint: "look"},
		"plain":       {Code: CodeInternal, Message: "plain", Operation: "plain"},
		"panic":       {Code: CodeInternal, Message: "panic: internal error: boom", Operation: "panic"},
		"unencodable": {Code: CodeInternal, Operation: "unencodable"},
		"huge":        {Code: CodeTooLarge, Operation: "huge"},
	} {
		err := c.Call(timeout(t), method, nil, nil)
		var e *Error
		if !errors.As(err, &e) || e.Code != want.Code || e.Operation != want.Operation && want.Operation != "unencodable" || e.Hint != want.Hint || want.Message != "" && e.Message != want.Message {
			t.Errorf("%s: %#v, want %#v", method, err, want)
		}
	}
	if err := c.Call(timeout(t), "bind", map[string]int{"A": 1, "B": 2}, nil); CodeOf(err) != CodeInvalidRequest || !strings.Contains(err.Error(), `"B"`) {
		t.Errorf("an unknown parameter: %v", err)
	}
	if err := c.Call(timeout(t), "bind", nil, nil); err != nil {
		t.Errorf("no parameters: %v", err)
	}
	if err := c.Call(timeout(t), "echo", strings.Repeat("x", MaxFrame), nil); CodeOf(err) != CodeTooLarge {
		t.Errorf("a request over the limit: %v", err)
	}
	if err := c.Call(timeout(t), "echo", text, &got); err != nil {
		t.Errorf("after all that: %v", err)
	}
}

func TestManyCallsBothWays(t *testing.T) {
	a, b := pair(t, echo, echo)
	var wg sync.WaitGroup
	for i := range 200 {
		c := a
		if i%2 == 0 {
			c = b
		}
		wg.Go(func() {
			want := strings.Repeat(fmt.Sprint(i, " "), i*10)
			var got string
			if err := c.Call(timeout(t), "echo", want, &got); err != nil || got != want {
				t.Errorf("%d: got %d bytes, %v", i, len(got), err)
			}
		})
	}
	wg.Wait()
}

func TestCancel(t *testing.T) {
	began, ended := make(chan struct{}), make(chan error, 1)
	c, _ := pair(t, nil, HandlerFunc(func(ctx context.Context, r *Request) (any, error) {
		if r.Method != "wait" {
			return "still here", nil
		}
		close(began)
		<-ctx.Done()
		ended <- ctx.Err()
		return "late", nil
	}))
	ctx, cancel := context.WithCancel(timeout(t))
	go func() { <-began; cancel() }()
	if err := c.Call(ctx, "wait", nil, nil); err != context.Canceled {
		t.Errorf("error %v", err)
	}
	if err := <-ended; err != context.Canceled {
		t.Errorf("the handler saw %v", err)
	}
	var got string
	if err := c.Call(timeout(t), "other", nil, &got); err != nil || got != "still here" {
		t.Errorf("after a cancelled call: %q, %v", got, err)
	}
}

func TestConnectionEnds(t *testing.T) {
	began := make(chan struct{})
	var handlerErr atomic.Value
	c, peer := pair(t, nil, HandlerFunc(func(ctx context.Context, r *Request) (any, error) {
		close(began)
		<-ctx.Done()
		handlerErr.Store(ctx.Err())
		return nil, nil
	}))
	result := make(chan error, 1)
	go func() { result <- c.Call(timeout(t), "wait", nil, nil) }()
	<-began
	peer.Close()
	if err := <-result; !errors.Is(err, ErrClosed) || !errors.Is(err, io.EOF) {
		t.Errorf("pending call: %v", err)
	}
	if handlerErr.Load() != context.Canceled {
		t.Errorf("Close returned before the handler did, or it saw %v", handlerErr.Load())
	}
	<-c.Done()
	if c.Err() != io.EOF || c.Context().Err() == nil {
		t.Errorf("ended by %v", c.Err())
	}
	if err := c.Call(timeout(t), "wait", nil, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("later call: %v", err)
	}
	if err := peer.Call(timeout(t), "x", nil, nil); !errors.Is(err, ErrClosed) || strings.Count(err.Error(), "connection closed") != 1 {
		t.Errorf("call on a connection that we closed: %v", err)
	}
	if err := c.Notify("x", nil); err == nil {
		t.Error("a notification went out on a dead connection")
	}
}

func TestNotificationsKeepTheirOrder(t *testing.T) {
	const n = 2000
	got := make(chan int, n+1)
	c, _ := pair(t, nil, HandlerFunc(func(_ context.Context, r *Request) (any, error) {
		if r.Notification != (r.Method == "n") {
			t.Errorf("%s: notification = %v", r.Method, r.Notification)
		}
		if r.Method == "panic" {
			panic("must not end the process")
		}
		if r.Notification {
			var i int
			if err := r.Bind(&i); err != nil {
				t.Error(err)
			}
			got <- i
		}
		return len(got), nil
	}))
	for i := range n {
		if err := c.Notify("n", i); err != nil {
			t.Fatal(err)
		}
	}
	var seen int
	if err := c.Call(timeout(t), "count", nil, &seen); err != nil || seen != n {
		t.Errorf("a request overtook notifications: %d of %d, %v", seen, n, err)
	}
	for i := range n {
		if v := <-got; v != i {
			t.Fatalf("%d came at place %d", v, i)
		}
	}
}

func TestPanicInNotification(t *testing.T) {
	c, _ := pair(t, nil, HandlerFunc(func(_ context.Context, r *Request) (any, error) {
		if r.Notification {
			panic("boom")
		}
		return nil, nil
	}))
	if err := errors.Join(c.Notify("x", nil), c.Call(timeout(t), "y", nil, nil)); err != nil {
		t.Error(err)
	}
}

func TestNoHandler(t *testing.T) {
	c, _ := pair(t, nil, nil)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if _, err := c.CallFiles(timeout(t), "x", nil, []*os.File{w}, nil); CodeOf(err) != CodeInvalidRequest {
		t.Errorf("error %v", err)
	}
	if err := c.Notify("x", nil); err != nil {
		t.Error(err)
	}
}

// Descriptors arrive with the frame that names them, whatever the sizes around it.
func TestFiles(t *testing.T) {
	c, _ := pair(t, nil, HandlerFunc(func(_ context.Context, r *Request) (any, error) {
		defer r.CloseFiles()
		var p struct {
			N    int
			Fill string
		}
		if err := r.Bind(&p); err != nil {
			return nil, err
		}
		if len(r.Files) != p.N {
			return nil, fmt.Errorf("%d files, want %d", len(r.Files), p.N)
		}
		back := Reply{Value: p.Fill}
		for i, f := range r.Files {
			if _, err := fmt.Fprintf(f, "%d of %d", i, p.N); err != nil {
				return nil, err
			}
			rd, wr, err := os.Pipe()
			if err != nil {
				return nil, err
			}
			fmt.Fprintf(wr, "back %d", i)
			wr.Close()
			back.Files = append(back.Files, rd)
		}
		return &back, nil
	}))
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			n, fill := []int{0, 1, 3, 0, 17}[i%5], strings.Repeat("f", []int{0, 100_000, 10, 400_000}[i%4])
			var readers, writers []*os.File
			for range n {
				r, w, err := os.Pipe()
				if err != nil {
					t.Error(err)
					return
				}
				defer r.Close()
				readers, writers = append(readers, r), append(writers, w)
			}
			var got string
			files, err := c.CallFiles(timeout(t), "x", map[string]any{"N": n, "Fill": fill}, writers, &got)
			for _, w := range writers {
				w.Close()
			}
			if err != nil || len(files) != n || got != fill {
				t.Errorf("call %d: %d files, %d bytes, %v", i, len(files), len(got), err)
				return
			}
			for j := range files {
				if b, err := io.ReadAll(readers[j]); err != nil || string(b) != fmt.Sprintf("%d of %d", j, n) {
					t.Errorf("call %d: pipe %d got %q, %v", i, j, b, err)
				}
				if b, err := io.ReadAll(files[j]); err != nil || string(b) != fmt.Sprintf("back %d", j) {
					t.Errorf("call %d: file %d had %q, %v", i, j, b, err)
				}
				files[j].Close()
			}
		})
	}
	wg.Wait()
}

func TestFilesThatCannotBeSent(t *testing.T) {
	c, _ := pair(t, nil, HandlerFunc(func(_ context.Context, r *Request) (any, error) {
		r.CloseFiles()
		if r.Method == "closed" {
			f, err := os.Open(os.DevNull)
			if err == nil {
				f.Close()
			}
			return Reply{Files: []*os.File{f}}, err
		}
		return nil, nil
	}))
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.CallFiles(timeout(t), "x", nil, make([]*os.File, maxFDs+1), nil); CodeOf(err) != CodeTooLarge {
		t.Errorf("too many: %v", err)
	}
	many := make([]*os.File, maxFDs)
	for i := range many {
		many[i] = f
	}
	if _, err := c.CallFiles(timeout(t), "x", nil, many, nil); err != nil {
		t.Errorf("as many as allowed: %v", err)
	}
	f.Close()
	if _, err := c.CallFiles(timeout(t), "x", nil, []*os.File{f}, nil); err == nil || errors.Is(err, ErrClosed) {
		t.Errorf("a closed file: %v", err)
	}
	if err := c.Call(timeout(t), "closed", nil, nil); CodeOf(err) != CodeInternal {
		t.Errorf("an answer with a closed file: %v", err)
	}
	if err := c.Call(timeout(t), "x", nil, nil); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// The caller has gone when the answer with its descriptors comes: they must not leak.
func TestFilesOfLateAnswer(t *testing.T) {
	release, sent := make(chan struct{}), make(chan struct{})
	c, _ := pair(t, nil, HandlerFunc(func(_ context.Context, r *Request) (any, error) {
		if r.Method == "sync" {
			return nil, nil
		}
		<-release
		f, err := os.Open(os.DevNull)
		return Reply{Files: []*os.File{f}, Sent: func() { close(sent) }}, err
	}))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := c.Call(ctx, "late", nil, nil); err != context.DeadlineExceeded {
		t.Errorf("error %v", err)
	}
	close(release)
	<-sent
	if err := c.Call(timeout(t), "sync", nil, nil); err != nil { // the late answer was read before this one
		t.Error(err)
	}
}

// A peer that does not read must not hold a caller beyond its deadline.
func TestStuckPeer(t *testing.T) {
	noLeak(t)
	a, stuck := socketpair(t)
	defer stuck.Close()
	c := NewConn(a, nil)
	defer c.Close()
	for range 3 { // they fit into the socket's buffer, and so do their cancellations
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		if err := c.Call(ctx, "small", nil, nil); err != context.DeadlineExceeded {
			t.Fatalf("error %v", err)
		}
		cancel()
	}
	ctx, cancel := context.WithCancel(timeout(t))
	defer cancel()
	call := make(chan error, 1)
	go func() { call <- c.Call(ctx, "large", strings.Repeat("x", 4<<20), nil) }()
	for b := make([]byte, 1); b[0] != 'x'; { // until it is being written
		if _, err := io.ReadFull(stuck, b); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	if err := <-call; err != context.Canceled {
		t.Errorf("error %v", err)
	}
	select {
	case <-c.Done():
	case <-time.After(60 * time.Second):
		t.Error("a connection that holds half a frame goes on")
	}
}

func TestWaitingForTheirTurnIsHarmless(t *testing.T) {
	noLeak(t)
	a, slow := socketpair(t)
	c := NewConn(a, nil)
	defer c.Close()
	large := make(chan error, 1)
	go func() { large <- c.Notify("large", strings.Repeat("x", 4<<20)) }()
	// Its first byte is there: it is being written, and its writer holds the turn.
	b := make([]byte, 1)
	if _, err := io.ReadFull(slow, b); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := c.Call(ctx, "small", nil, nil); err != context.DeadlineExceeded {
		t.Errorf("error %v", err)
	}
	drained := make(chan struct{})
	go func() { defer close(drained); _, _ = io.Copy(io.Discard, slow) }()
	if err := <-large; err != nil {
		t.Errorf("the frame that was being written: %v", err)
	}
	if err := c.Notify("after", nil); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	c.Close()
	<-drained // its descriptor is in use until then
	slow.Close()
}

// raw is a connection whose other end the test writes by hand.
func raw(t *testing.T, h Handler) (*Conn, *net.UnixConn) {
	t.Helper()
	noLeak(t)
	a, b := socketpair(t)
	c := NewConn(a, h)
	t.Cleanup(func() { b.Close(); c.Close() })
	return c, b
}

// A peer that asks and asks and never reads costs a bounded amount of memory, and has its
// answers when it reads.
func TestPeerThatNeverReads(t *testing.T) {
	noLeak(t)
	left, right := socketpair(t)
	defer left.Close()
	var handled atomic.Int64
	c := NewConn(right, HandlerFunc(func(context.Context, *Request) (any, error) {
		handled.Add(1)
		return strings.Repeat("x", 1<<10), nil
	}))
	defer c.Close()
	const requests = 6 * maxRequests
	asked := make(chan error, 1)
	go func() {
		w := bufio.NewWriter(left)
		for id := 1; id <= requests; id++ {
			fmt.Fprintf(w, "{\"id\":%d,\"method\":\"m\"}\n", id)
		}
		asked <- w.Flush()
	}()
	select {
	case <-asked:
		t.Fatal("the connection takes everything")
	case <-time.After(300 * time.Millisecond):
	}
	if n := handled.Load(); n > 2*maxRequests {
		t.Errorf("%d requests were handled for a peer that reads nothing", n)
	}
	answers := bufio.NewReader(left)
	for range requests {
		if line, err := answers.ReadString('\n'); err != nil || !strings.Contains(line, "xxx") {
			t.Fatalf("%s: %v", line, err)
		}
	}
	if err := <-asked; err != nil {
		t.Error(err)
	}
}

func TestMalformed(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for name, c := range map[string]struct {
		text  string
		files int // sent along, one message each
		want  string
	}{
		"no JSON":                         {text: "hello\n", want: "malformed frame"},
		"no object":                       {text: "[1]\n", want: "malformed frame"},
		"wrong type":                      {text: `{"id":"x"}` + "\n", want: "malformed frame"},
		"negative id":                     {text: `{"id":-1}` + "\n", want: "malformed frame"},
		"descriptors that did not come":   {text: `{"method":"x","fds":1}` + "\n", want: "names 1 descriptors, 0 came"},
		"negative descriptors":            {text: `{"method":"x","fds":-1}` + "\n", want: "names -1"},
		"one that came, two named":        {text: `{"method":"x","fds":2}` + "\n", files: 1, want: "names 2 descriptors, 1 came"},
		"descriptors that no frame names": {text: strings.Repeat("\n", 5*maxFDs), files: 5 * maxFDs, want: "no frame names"},
		"the end inside a frame":          {text: `{"method":`, want: io.ErrUnexpectedEOF.Error()},
		"the same id twice":               {text: `{"id":1,"method":"wait"}` + "\n" + `{"id":1,"method":"wait"}` + "\n", want: "request id 1 is in use"},
		"blank lines and unknown fields":  {text: "\n \n{}\n" + `{"new":1}` + "\n" + `{"id":99,"result":1}` + "\n" + `{"cancel":5}` + "\n", files: 1, want: io.EOF.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			conn, b := raw(t, echo)
			text := []byte(c.text)
			for range c.files {
				if _, _, err := b.WriteMsgUnix(text[:1], unix.UnixRights(int(null.Fd())), nil); err != nil {
					break // it has closed already
				}
				text = text[1:]
			}
			_, _ = b.Write(text)
			_ = b.CloseWrite()
			select {
			case <-conn.Done():
			case <-time.After(60 * time.Second):
				t.Fatal("the connection goes on")
			}
			if err := conn.Err(); !strings.Contains(err.Error(), c.want) {
				t.Errorf("ended by %v, want %q", err, c.want)
			}
		})
	}
}

func TestFrameLimit(t *testing.T) {
	got := make(chan int, 1)
	conn, b := raw(t, HandlerFunc(func(_ context.Context, r *Request) (any, error) {
		got <- len(r.Params)
		return nil, nil
	}))
	head, tail := `{"method":"m","params":"`, `"}`+"\n"
	frame := func(size int) []byte {
		return []byte(head + strings.Repeat("x", size-len(head)-len(tail)) + tail)
	}
	if _, err := b.Write(frame(MaxFrame)); err != nil {
		t.Fatal(err)
	}
	if n := <-got; n < MaxFrame-100 {
		t.Errorf("%d bytes of parameters", n)
	}
	written := make(chan struct{})
	go func() { defer close(written); _, _ = b.Write(frame(MaxFrame + 1)) }() // fails when the other end closes
	<-conn.Done()
	<-written
	if !errors.Is(conn.Err(), errTooLong) {
		t.Errorf("ended by %v", conn.Err())
	}
}

// The read that brings the newline may bring it from beyond the limit.
func TestFrameLimitWithinOneRead(t *testing.T) {
	a, b := socketpair(t)
	defer a.Close()
	defer b.Close()
	r := &reader{sock: takeOver(t, a), buf: make([]byte, MaxFrame-100, MaxFrame+8192)}
	if _, err := b.Write(append(bytes.Repeat([]byte("x"), 200), '\n')); err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.next(); !errors.Is(err, errTooLong) {
		t.Errorf("error %v", err)
	}
}

func TestPeer(t *testing.T) {
	c, _ := pair(t, nil, nil)
	p := c.Peer()
	if p.UID != os.Getuid() || p.PID != os.Getpid() {
		t.Errorf("peer %+v", p)
	}
	if p.PIDFD() == nil {
		t.Error("no pidfd of the peer")
	}
}

func listen(t *testing.T) *net.UnixListener {
	t.Helper()
	dir, err := os.MkdirTemp("", "mr")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestServer(t *testing.T) {
	noLeak(t)
	l := listen(t)
	path := l.Addr().String()
	handlers := make(chan struct{}, 10)
	began := make(chan struct{})
	s := &Server{NewHandler: func(c *Conn) Handler {
		if err := c.Notify("hello", nil); err != nil {
			t.Error(err)
		}
		return HandlerFunc(func(ctx context.Context, r *Request) (any, error) {
			if r.Notification {
				t.Error("a notification was handled")
			}
			close(began)
			<-ctx.Done()
			handlers <- struct{}{}
			return nil, nil
		})
	}}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	hello := make(chan string, 1)
	c, err := Dial(timeout(t), path, HandlerFunc(func(_ context.Context, r *Request) (any, error) {
		hello <- r.Method
		return nil, nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if m := <-hello; m != "hello" {
		t.Errorf("got %q", m)
	}
	if err := c.Notify("wait", nil); err != nil { // must not hold up the connection
		t.Error(err)
	}
	call := make(chan error, 1)
	go func() { call <- c.Call(timeout(t), "wait", nil, nil) }()
	<-began
	stop()
	if err := <-done; err != nil {
		t.Errorf("Serve: %v", err)
	}
	if len(handlers) != 1 {
		t.Error("Serve returned before its handlers")
	}
	if err := <-call; !errors.Is(err, ErrClosed) {
		t.Errorf("pending call: %v", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the socket's file was removed: %v", err)
	}
	if _, err := Dial(timeout(t), path, nil); !IsGone(err) {
		t.Errorf("dialling it: %v", err)
	}
}

func TestServerRefusesOtherUsers(t *testing.T) {
	noLeak(t)
	l := listen(t)
	s := &Server{AllowUID: func(uid int) bool { return uid != os.Getuid() }, NewHandler: func(*Conn) Handler {
		t.Error("a handler was made")
		return nil
	}}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	c, err := Dial(timeout(t), l.Addr().String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Call(timeout(t), "x", nil, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("error %v", err)
	}
	c.Close()
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// serveWithoutFiles is a server whose descriptors are nearly used up.
func serveWithoutFiles(path string) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		panic(err)
	}
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	limit := syscall.Rlimit{Cur: 40, Max: 40}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		panic(err)
	}
	fmt.Println("ready")
	err = (&Server{NewHandler: func(*Conn) Handler { return echo }}).Serve(context.Background(), l)
	fmt.Println("ended", err)
}

func TestServerOutOfDescriptors(t *testing.T) {
	dir, err := os.MkdirTemp("", "mr")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	cmd := exec.Command(os.Args[0], "serve-without-files", path)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		t.Fatal(err)
	}
	var held []*Conn
	turned := 0
	for range 60 { // each takes three descriptors there: the socket, its epoll instance and the peer's pidfd
		c, err := Dial(timeout(t), path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Call(timeout(t), "echo", 1, nil); err != nil {
			if !errors.Is(err, ErrClosed) {
				t.Fatal(err)
			}
			turned++
			c.Close()
			continue
		}
		held = append(held, c)
	}
	if turned == 0 || len(held) == 0 {
		t.Errorf("%d connections were turned away, %d served", turned, len(held))
	}
	before := cpuTime(t, cmd.Process.Pid)
	for _, c := range held {
		c.Close()
	}
	// Descriptors are back: somebody is served again. (A turned-away call says so at once.)
	try := 0
	for end := time.Now().Add(60 * time.Second); ; try++ {
		c, err := Dial(timeout(t), path, nil)
		if err != nil {
			t.Fatal(err)
		}
		err = c.Call(timeout(t), "echo", 1, nil)
		c.Close()
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("still turned away: %v", err)
		}
	}
	if used := cpuTime(t, cmd.Process.Pid) - before; used > 100+try {
		t.Errorf("it used %d ticks of CPU meanwhile, for %d tries", used, try)
	}
}

func cpuTime(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+2:]))
	var user, system int
	fmt.Sscan(f[11], &user)
	fmt.Sscan(f[12], &system)
	return user + system
}

func TestErrors(t *testing.T) {
	e := Errorf(CodeConflict, "it is %d", 3)
	h := e.WithHint("do %s", "that")
	if h.Error() != "it is 3 (do that)" || e.Error() != "it is 3" {
		t.Errorf("%q, %q", h, e)
	}
	if w := fmt.Errorf("outer: %w", h); AsError(w) != h || CodeOf(w) != CodeConflict {
		t.Errorf("wrapped: %v", AsError(w))
	}
	if CodeOf(io.EOF) != "" || CodeOf(nil) != "" || AsError(io.EOF).Code != CodeInternal {
		t.Error("codes of other errors")
	}
}

// A server must survive whatever bytes come, with whatever descriptors.
func FuzzConn(f *testing.F) {
	for _, s := range []string{
		`{"id":1,"method":"echo","params":[1,2]}` + "\n", `{"method":"n"}` + "\n" + `{"cancel":1}` + "\n", `{"id":1,"method":"echo","fds":1}` + "\n",
		`{"id":1,"result":null}` + "\n" + `{"id":2,"error":{"code":"x"}}` + "\n", "\n\n{}\n{", `{"id":1,"method":"wait"}` + "\n" + `{"id":1,"method":"wait"}` + "\n",
		`{"id":18446744073709551615,"method":"fail"}` + "\n", `{"id":3,"method":"bind","params":{"A":"x"}}` + "\n", `{"ID":1,"Method":"panic"}` + "\n",
	} {
		f.Add([]byte(s), uint8(0), uint8(0))
		f.Add([]byte(s), uint8(2), uint8(7))
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { null.Close() })
	f.Fuzz(func(t *testing.T, data []byte, files, chunk uint8) {
		before := len(fds(t))
		a, b := socketpair(t)
		c := NewConn(a, echo)
		drained := make(chan struct{})
		go func() { defer close(drained); _, _ = io.Copy(io.Discard, b) }()
		rest := data
		for len(rest) > 0 {
			n := min(len(rest), 1+int(chunk))
			var rights []byte
			if files > 0 {
				files--
				rights = unix.UnixRights(int(null.Fd()))
			}
			if _, _, err := b.WriteMsgUnix(rest[:n], rights, nil); err != nil {
				break
			}
			rest = rest[n:]
		}
		_ = b.CloseWrite()
		<-c.Done()
		c.Close()
		<-drained // its descriptor is in use until then
		b.Close()
		runtime.KeepAlive(null)
		if n := len(fds(t)); n > before {
			t.Fatalf("%d descriptors, %d before", n, before)
		}
	})
}

// However the bytes are cut, the same frames come out.
func FuzzReaderChunks(f *testing.F) {
	f.Add([]byte(`{"id":1,"method":"a"}`+"\n\n"+`{"method":"b","params":{"x":"y"}}`+"\n"+`{"cancel":3}`), uint16(1), uint16(5))
	f.Add([]byte("{}\n{}\nx"), uint16(2), uint16(1))
	f.Fuzz(func(t *testing.T, data []byte, first, second uint16) {
		want, wantErr := split(t, data, len(data)+1)
		for _, n := range []uint16{first, second} {
			got, err := split(t, data, 1+int(n))
			if fmt.Sprint(got) != fmt.Sprint(want) || fmt.Sprint(err) != fmt.Sprint(wantErr) {
				t.Fatalf("in pieces of %d: %v, %v; whole: %v, %v", n+1, got, err, want, wantErr)
			}
		}
	})
}

func takeOver(t *testing.T, sock *net.UnixConn) *readable.Socket {
	t.Helper()
	s, err := readable.TakeOver(sock)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func split(t *testing.T, data []byte, chunk int) (out []string, err error) {
	a, b := socketpair(t)
	defer a.Close()
	go func() {
		defer b.Close()
		for len(data) > 0 {
			n := min(len(data), chunk)
			if _, err := b.Write(data[:n]); err != nil {
				return
			}
			data = data[n:]
		}
	}()
	r := &reader{sock: takeOver(t, a)}
	for {
		f, files, err := r.next()
		closeAll(files)
		if err != nil {
			closeAll(r.files)
			return out, err
		}
		line, err := json.Marshal(f)
		if err != nil {
			return out, err
		}
		out = append(out, string(line))
	}
}

// The short way to decode a frame and the long one agree.
func FuzzPlainFrame(f *testing.F) {
	for _, s := range []string{`{"id":1,"method":"echo","params":[1,2]}`, `{"id":12,"result":null}`, `{"id":1,"method":"echo","params":{"a":1},"fds":1}`, `{"id":1,"method":"a-b","params":{"a":1},"fds":12}`, `{"id":1,"result":1,"fds":0}`, `{"id":1,"result":{"fds":1}}`, `{"id":1,"result":1,"fds":01}`, `{"id":1,"result":1,"id":2}`,
		`{"id":01,"result":1}`, `{"id":0,"result":1}`, `{"id":1,"method":"a\u0062","params":1}`, `{"id":999999999999999999,"result":1}`, `{"id":1,"result":}`, `{"id":1,"result":1}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		var short, long frame
		if !short.plain(line) {
			return
		}
		if err := json.Unmarshal(line, &long); err != nil {
			t.Fatalf("%s: accepted, but %v", line, err)
		}
		short.Params, short.Result = bytes.TrimSpace(short.Params), bytes.TrimSpace(short.Result)
		if short.ID != long.ID || short.Method != long.Method || !bytes.Equal(short.Params, long.Params) || !bytes.Equal(short.Result, long.Result) || short.FDs != long.FDs || long.Error != nil || long.Cancel != 0 {
			t.Fatalf("%s: %+v, not %+v", line, short, long)
		}
	})
}

// prompt answers "later" through the channel that it sends, the rest at once.
type prompt struct {
	later chan func(func() (any, error))
}

func (prompt) Prompt(method string) bool { return method != "slow" }

func (p prompt) Handle(ctx context.Context, r *Request) (any, error) {
	switch r.Method {
	case "later":
		return Later(func(answer func(func() (any, error))) { p.later <- answer }), nil
	case "slow":
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return r.Method, nil
}

func TestLater(t *testing.T) {
	h := prompt{make(chan func(func() (any, error)), 8)}
	c, _ := pair(t, nil, h)
	call := func(method string) chan error {
		done := make(chan error, 1)
		go func() {
			var got string
			err := c.Call(context.Background(), method, nil, &got)
			if err == nil && got != method {
				err = fmt.Errorf("got %q", got)
			}
			done <- err
		}()
		return done
	}
	ctx, cancel := context.WithCancel(context.Background())
	slow := make(chan error, 1)
	go func() { slow <- c.Call(ctx, "slow", nil, nil) }()
	first := call("later")
	answer := <-h.later
	if err := <-call("now"); err != nil { // it does not wait for the others
		t.Error(err)
	}
	answer(func() (any, error) { return "later", nil })
	if err := <-first; err != nil {
		t.Error(err)
	}
	bad := call("later")
	(<-h.later)(func() (any, error) { panic("boom") })
	if err := <-bad; CodeOf(err) != CodeInternal {
		t.Errorf("a panic: %v", err)
	}
	cancel()
	if err := <-slow; !errors.Is(err, context.Canceled) {
		t.Errorf("slow: %v", err)
	}
}

// An answer to a peer that does not read holds up nobody, and arrives whole.
func TestLaterToAPeerThatDoesNotRead(t *testing.T) {
	h := prompt{make(chan func(func() (any, error)), 8)}
	_, b := raw(t, h)
	const size = 4 << 20
	for i := 1; i <= 3; i++ {
		fmt.Fprintf(b, `{"id":%d,"method":"later","params":null}`+"\n", i)
	}
	for range 3 {
		(<-h.later)(func() (any, error) { return strings.Repeat("x", size), nil })
	}
	in := bufio.NewReader(b)
	seen := map[uint64]bool{}
	for range 3 {
		line, err := in.ReadBytes('\n')
		var f frame
		if err == nil {
			err = json.Unmarshal(line, &f)
		}
		if err != nil || len(f.Result) != size+2 {
			t.Fatalf("%d bytes: %v", len(f.Result), err)
		}
		seen[f.ID] = true
	}
	if len(seen) != 3 {
		t.Errorf("answers %v", seen)
	}
}

func BenchmarkCall(b *testing.B) {
	c, _ := pair(b, nil, echo)
	for b.Loop() {
		var n int
		if err := c.Call(context.Background(), "echo", 1, &n); err != nil {
			b.Fatal(err)
		}
	}
}

// Who lingers looks for the answer only while answers come at once: a call that takes
// longer costs the one after it nothing.
func TestLinger(t *testing.T) {
	later := make(chan struct{})
	c, _ := pair(t, nil, HandlerFunc(func(_ context.Context, r *Request) (any, error) {
		if r.Method == "slow" {
			<-later
		}
		return r.Method, nil
	}))
	c.Linger(time.Minute)
	call := func(method string) {
		t.Helper()
		var got string
		if err := c.Call(t.Context(), method, nil, &got); err != nil || got != method {
			t.Fatalf("%s: %q, %v", method, got, err)
		}
	}
	call("prompt")
	if !c.prompt.Load() {
		t.Error("the second call does not linger")
	}
	call("prompt") // looks for it
	c.Linger(time.Millisecond)
	time.AfterFunc(5*time.Millisecond, func() { close(later) })
	call("slow")
	if c.prompt.Load() {
		t.Error("the call after a slow one lingers")
	}
	call("prompt") // sleeps
}

// watched is a context that tells when it is looked at, which is before the sending, and
// again and again while the call lingers.
type watched struct {
	context.Context
	looked chan struct{}
}

func (w watched) Err() error {
	select {
	case w.looked <- struct{}{}:
	default:
	}
	return w.Context.Err()
}

// Of calls that are under way together one lingers, or they would wait for each other. It
// ends with its caller's patience.
func TestLingerAlone(t *testing.T) {
	c, _ := pair(t, nil, HandlerFunc(func(ctx context.Context, r *Request) (any, error) {
		if r.Method == "slow" {
			<-ctx.Done()
		}
		return nil, nil
	}))
	c.Linger(time.Hour)
	if err := c.Call(t.Context(), "prompt", nil, nil); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	slow := watched{ctx, make(chan struct{}, 2)}
	result := make(chan error, 1)
	go func() { result <- c.Call(slow, "slow", nil, nil) }()
	expire := time.After(time.Minute)
	for range 2 {
		select {
		case <-slow.looked:
		case <-expire:
			t.Fatal("the slow call does not linger, or not for its caller")
		}
	}
	other := watched{t.Context(), make(chan struct{}, 2)}
	if err := c.Call(other, "prompt", nil, nil); err != nil || len(other.looked) > 1 {
		t.Errorf("the call beside it lingers too, or: %v", err)
	}
	cancel()
	select {
	case err := <-result:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-expire:
		t.Error("it lingers for nobody")
	}
}
