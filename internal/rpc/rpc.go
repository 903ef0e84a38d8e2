// Package rpc carries requests, answers and notifications between the processes of
// one user over a Unix stream socket: one JSON object per line, with file
// descriptors as ancillary data where a message says so.
//
// It owns framing, request ids, cancellation, the error shape and the check of the
// peer's user id. It does not know any method: handlers do.
//
// Both sides may call each other over one connection. Requests are handled
// concurrently (unless their handler is Prompt); a notification is handled before the next frame is read, so
// notifications keep their order, and its handler must not block. When the connection ends, the context of every
// handler still running for it is cancelled and every pending Call fails with
// ErrClosed.
//
// Frames (docs/PROTOCOL.md, "Framing"):
//
//	{"id":1,"method":"execute","params":{…}}   request
//	{"id":1,"result":…}                        answer
//	{"id":1,"error":{"code":…,"message":…}}    answer: refused or failed
//	{"method":"unit","params":{…}}             notification
//	{"cancel":1}                               the caller no longer waits for 1
//
// A frame that carries n descriptors has "fds":n and the descriptors ride on its
// bytes (SCM_RIGHTS); they are taken off in the order in which frames name them.
package rpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc/readable"
)

// MaxFrame bounds one line, in both directions.
const MaxFrame = 32 << 20

// maxFDs bounds the descriptors of one frame; the kernel's own limit is 253 (SCM_MAX_FD).
const maxFDs = 64

// maxRequests bounds the requests of one peer that have no answer yet, be it that they
// are worked on or that the peer does not read: each of them holds memory. The next frame
// is not read before there is room.
const maxRequests = 4096

// ErrClosed is wrapped by the error of a Call whose connection ended before the
// answer came: whether the request was carried out is unknown.
var ErrClosed = errors.New("connection closed")

// Error is a refusal or failure as it travels. Code is for programs, Message is a
// full sentence for people and models, Hint is the next command to type or step to take.
type Error struct {
	Code      string         `json:"code"`
	Message   string         `json:"message"`
	Operation string         `json:"operation,omitempty"`
	Hint      string         `json:"hint,omitempty"`
	Details   map[string]any `json:"details,omitempty"`
}

// Codes that more than one service uses.
const (
	CodeInvalidRequest = "invalid_request" // the arguments are wrong; sending them again cannot help
	CodeNotFound       = "not_found"
	CodeConflict       = "conflict"    // the state of things forbids it now
	CodeUnavailable    = "unavailable" // not now, but later
	CodeInternal       = "internal"
	CodeTooLarge       = "too_large"
	CodePermission     = "permission_denied"
)

func (e *Error) Error() string {
	if e.Hint != "" {
		return e.Message + " (" + e.Hint + ")"
	}
	return e.Message
}

// Errorf makes an Error.
func Errorf(code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// WithHint returns the error with a next step.
func (e *Error) WithHint(format string, args ...any) *Error {
	c := *e
	c.Hint = fmt.Sprintf(format, args...)
	return &c
}

// AsError turns any error into one that can travel; an *Error in its chain is kept whole.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: CodeInternal, Message: err.Error()}
}

// CodeOf is the code of the *Error in err's chain, or "".
func CodeOf(err error) string {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// Request is one incoming request or notification. Files belong to the handler,
// which must close them.
type Request struct {
	Method       string
	Params       json.RawMessage
	Files        []*os.File
	Conn         *Conn
	Notification bool
}

// Bind decodes the parameters into v and refuses unknown fields, so that a
// misspelt one is an error and not a silent default.
func (r *Request) Bind(v any) error {
	if len(r.Params) == 0 || bytes.Equal(r.Params, []byte("null")) {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(r.Params))
	d.DisallowUnknownFields()
	return r.decode(d, v)
}

// BindKnown decodes the parameters into v and leaves out what v has no field for. It is
// for what a program of another version sends before both know of each other.
func (r *Request) BindKnown(v any) error {
	if len(r.Params) == 0 {
		return nil
	}
	return r.decode(json.NewDecoder(bytes.NewReader(r.Params)), v)
}

func (r *Request) decode(d *json.Decoder, v any) error {
	if err := d.Decode(v); err != nil {
		return Errorf(CodeInvalidRequest, "%s: bad parameters: %v", r.Method, err)
	}
	return nil
}

// CloseFiles closes the descriptors that came with the request.
func (r *Request) CloseFiles() {
	for _, f := range r.Files {
		f.Close()
	}
	r.Files = nil
}

// Reply is what a handler returns when its answer carries descriptors. The
// connection closes them after they are sent.
//
// Sent, when set, is called once the answer was written or could not be: for a service
// that ends with its last answer.
type Reply struct {
	Value any
	Files []*os.File
	Sent  func()
}

// Handler answers requests. The context ends when the caller cancels or the
// connection closes. Returning a Reply or a *Reply sends descriptors too.
type Handler interface {
	Handle(ctx context.Context, r *Request) (any, error)
}

// HandlerFunc is a function as Handler.
type HandlerFunc func(ctx context.Context, r *Request) (any, error)

// Handle calls f.
func (f HandlerFunc) Handle(ctx context.Context, r *Request) (any, error) { return f(ctx, r) }

// Prompt is a Handler that says of some requests that it returns without waiting for
// anything but the disk. They are handled before the next frame is read, which spares a
// switch of goroutines. If the answer takes longer, the handler returns Later.
type Prompt interface {
	Handler
	Prompt(method string) bool
}

// Later is what a handler returns whose answer is not there yet. It is called once, with
// the function to call when it is, from any goroutine, with what makes the answer; that
// never waits for a peer that does not read. The handler must see to it that this happens
// soon after its context ended, for Close waits for it.
type Later func(answer func(result func() (any, error)))

type frame struct {
	ID     uint64          `json:"id,omitempty"`
	Method string          `json:"method,omitempty"`
	Params json.RawMessage `json:"params,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
	Error  *Error          `json:"error,omitempty"`
	Cancel uint64          `json:"cancel,omitempty"`
	FDs    int             `json:"fds,omitempty"`
}

type answer struct {
	result json.RawMessage
	files  []*os.File
	err    error
}

// Peer is who is at the other end, as the kernel saw it when it connected.
type Peer struct {
	UID, GID int
	PID      int // 0: in a pid namespace that cannot be seen from here
	fd       *os.File
}

// PIDFD is a descriptor that becomes readable when the peer process ends, also
// across pid namespaces (SO_PEERPIDFD, Linux 6.5), or nil where the kernel has none.
// It belongs to the connection.
func (p Peer) PIDFD() *os.File { return p.fd }

// Conn is one connection. It owns the socket and its reader goroutine; Close, a
// broken peer or a malformed frame ends both.
type Conn struct {
	sock         *readable.Socket // nil: there was no descriptor for it
	handler      Handler
	peer         Peer
	ctx          context.Context
	cancel       context.CancelCauseFunc
	requestsOnly bool          // notifications are dropped
	done         chan struct{} // closed when the reader has returned and all handlers were told
	wg           sync.WaitGroup

	writing chan struct{} // holds a token while somebody writes a frame
	serving chan struct{} // holds a token for each request whose answer has not been written

	linger time.Duration // see Linger
	prompt atomic.Bool   // the last call was answered within it, and none lingers

	mu       sync.Mutex // guards the fields below
	nextID   uint64
	pending  map[uint64]chan answer
	running  map[uint64]context.CancelFunc
	closeErr error
}

// NewConn takes over sock and starts reading. A nil handler refuses every request.
func NewConn(sock *net.UnixConn, handler Handler) *Conn {
	c := newConn(sock, peerOf(sock))
	c.handler = handler
	go c.read()
	return c
}

// newConn makes a connection that does not read yet.
func newConn(sock *net.UnixConn, peer Peer) *Conn {
	ctx, cancel := context.WithCancelCause(context.Background())
	c := &Conn{
		ctx: ctx, cancel: cancel, peer: peer,
		done:    make(chan struct{}),
		writing: make(chan struct{}, 1),
		serving: make(chan struct{}, maxRequests),
		pending: map[uint64]chan answer{},
		running: map[uint64]context.CancelFunc{},
	}
	var err error
	if c.sock, err = readable.TakeOver(sock); err != nil {
		c.fail(err)
	}
	return c
}

// Dial connects to the socket at path. The deadline of ctx covers the connect only.
func Dial(ctx context.Context, path string, handler Handler) (*Conn, error) {
	var d net.Dialer
	s, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return NewConn(s.(*net.UnixConn), handler), nil
}

func peerOf(sock *net.UnixConn) Peer {
	p := Peer{UID: -1, GID: -1}
	raw, err := sock.SyscallConn()
	if err != nil {
		return p
	}
	_ = raw.Control(func(fd uintptr) {
		if u, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			p.UID, p.GID, p.PID = int(u.Uid), int(u.Gid), int(u.Pid)
		}
		if pfd, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err == nil {
			unix.CloseOnExec(pfd)
			p.fd = os.NewFile(uintptr(pfd), "peer-pidfd")
		}
	})
	return p
}

// Linger makes each Call look for its answer for up to d before it sleeps, provided that
// the one before was answered within that time: to wake a sleeping process takes as long
// as a short call does. It is for a process that has nothing else to do meanwhile, and
// must be set before the first call.
func (c *Conn) Linger(d time.Duration) { c.linger = d }

// Peer says who is at the other end.
func (c *Conn) Peer() Peer { return c.peer }

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Context ends with the connection.
func (c *Conn) Context() context.Context { return c.ctx }

// Err says why the connection ended: nil while it is open, io.EOF when the peer closed it.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closeErr
}

// Close ends the connection and waits until its handlers have returned. It must not
// be called from a handler of the same connection (use CloseAsync).
func (c *Conn) Close() error {
	c.CloseAsync()
	<-c.done
	c.wg.Wait()
	return nil
}

func (c *Conn) shut() {
	if c.sock != nil {
		c.sock.Close()
	}
}

// CloseAsync ends the connection without waiting.
func (c *Conn) CloseAsync() {
	c.fail(ErrClosed)
	c.shut()
}

func (c *Conn) fail(err error) {
	c.mu.Lock()
	if c.closeErr == nil {
		c.closeErr = err
	}
	c.mu.Unlock()
	c.cancel(err)
}

// Call sends a request and waits for its answer, which is decoded into result
// (nil: ignored). When ctx ends first the peer is told and ctx's error is returned;
// the request may still have been carried out. Errors of the peer are *Error.
//
// A frame that a peer that does not read has taken only in part when ctx ends cannot
// be taken back: the connection then ends.
func (c *Conn) Call(ctx context.Context, method string, params, result any) error {
	files, err := c.CallFiles(ctx, method, params, nil, result)
	closeAll(files)
	return err
}

// CallFiles is Call with descriptors both ways. The files sent stay the caller's;
// those returned are the caller's to close.
func (c *Conn) CallFiles(ctx context.Context, method string, params any, send []*os.File, result any) ([]*os.File, error) {
	raw, err := marshal(params)
	if err != nil {
		return nil, fmt.Errorf("%s: cannot encode parameters: %w", method, err)
	}
	ch := make(chan answer, 1)
	c.mu.Lock()
	if c.closeErr != nil {
		c.mu.Unlock()
		return nil, c.ended(method)
	}
	c.nextID++
	id := c.nextID
	c.pending[id] = ch
	c.mu.Unlock()
	forget := func() {
		c.mu.Lock()
		delete(c.pending, id)
		c.mu.Unlock()
	}
	if err := c.write(ctx, frame{ID: id, Method: method, Params: raw}, send); err != nil {
		forget()
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case c.Err() != nil:
			return nil, c.ended(method)
		}
		return nil, fmt.Errorf("%s: %w", method, err)
	}
	if c.linger > 0 {
		sent := time.Now()
		defer func() { c.prompt.Store(time.Since(sent) < c.linger) }()
		if c.prompt.CompareAndSwap(true, false) { // one at a time: it keeps the others of this process waiting
			c.sock.Linger(c.linger, func() bool { return len(ch) > 0 || ctx.Err() != nil }) // another thread may have read it
		}
	}
	var a answer
	select {
	case a = <-ch:
	case <-ctx.Done():
		forget()
		c.sendCancel(id)
		select {
		case a = <-ch: // it came in the same moment: its descriptors must not leak
			closeAll(a.files)
		default:
		}
		return nil, ctx.Err()
	case <-c.done:
		forget()
		select {
		case a = <-ch:
		default:
			return nil, c.ended(method)
		}
	}
	if a.err != nil {
		closeAll(a.files)
		return nil, a.err
	}
	if result != nil && len(a.result) > 0 {
		if err := json.Unmarshal(a.result, result); err != nil {
			closeAll(a.files)
			return nil, fmt.Errorf("%s: cannot decode the answer: %w", method, err)
		}
	}
	return a.files, nil
}

// ended is the error of a call that the end of the connection left without an answer.
func (c *Conn) ended(method string) error {
	if err := c.Err(); !errors.Is(err, ErrClosed) {
		return fmt.Errorf("%s: %w: %w", method, ErrClosed, err)
	}
	return fmt.Errorf("%s: %w", method, ErrClosed)
}

// sendCancel tells the peer that nobody waits for id, without waiting for a peer that
// does not read: the goroutine ends with the connection.
func (c *Conn) sendCancel(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closeErr == nil { // Close has not begun to wait
		c.wg.Go(func() { _ = c.write(c.ctx, frame{Cancel: id}, nil) })
	}
}

// Notify sends a notification. It blocks while the peer does not read.
func (c *Conn) Notify(method string, params any) error {
	raw, err := marshal(params)
	if err != nil {
		return fmt.Errorf("%s: cannot encode parameters: %w", method, err)
	}
	return c.write(c.ctx, frame{Method: method, Params: raw}, nil)
}

// marshal keeps <, > and & as they are: the peer is no browser, and code is full of them.
func marshal(v any) (json.RawMessage, error) {
	if v == nil {
		return nil, nil
	}
	if raw, ok := v.(json.RawMessage); ok {
		return raw, nil
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// line encodes a frame for sending.
func (f *frame) line() ([]byte, error) {
	b := make([]byte, 0, 64+len(f.Method)+len(f.Params)+len(f.Result))
	comma := byte('{')
	key := func(name string) {
		b = append(append(append(append(b, comma), '"'), name...), '"', ':')
		comma = ','
	}
	if f.ID != 0 {
		key("id")
		b = strconv.AppendUint(b, f.ID, 10)
	}
	if f.Method != "" {
		key("method")
		b = append(append(append(b, '"'), f.Method...), '"') // methods are plain names
	}
	if len(f.Params) > 0 {
		key("params")
		b = append(b, f.Params...)
	}
	if len(f.Result) > 0 {
		key("result")
		b = append(b, f.Result...)
	}
	if f.Error != nil {
		raw, err := marshal(f.Error)
		if err != nil {
			return nil, err
		}
		key("error")
		b = append(b, raw...)
	}
	if f.Cancel != 0 {
		key("cancel")
		b = strconv.AppendUint(b, f.Cancel, 10)
	}
	if f.FDs != 0 {
		key("fds")
		b = strconv.AppendInt(b, int64(f.FDs), 10)
	}
	b = append(b, '}', '\n')
	if len(b) > MaxFrame {
		return nil, Errorf(CodeTooLarge, "a message of %d bytes is over the limit of %d", len(b), MaxFrame)
	}
	return b, nil
}

// decode reads a frame. Nearly all are requests and results as line writes them, which
// need not be taken apart twice.
func (f *frame) decode(line []byte) error {
	if f.plain(line) {
		return nil
	}
	*f = frame{}
	return json.Unmarshal(line, f)
}

func (f *frame) plain(line []byte) bool {
	rest, ok := bytes.CutPrefix(line, []byte(`{"id":`))
	n := 0
	for n < len(rest) && n < 18 && '0' <= rest[n] && rest[n] <= '9' {
		f.ID = 10*f.ID + uint64(rest[n]-'0')
		n++
	}
	if !ok || n == 0 || rest[0] == '0' {
		return false
	}
	rest = rest[n:]
	body := &f.Result
	if name, ok := bytes.CutPrefix(rest, []byte(`,"method":"`)); ok {
		n := 0
		for n < len(name) && ('a' <= name[n] && name[n] <= 'z' || name[n] == '_' || name[n] == '-' || name[n] == '.') {
			n++
		}
		f.Method = string(name[:n])
		if rest, ok = bytes.CutPrefix(name[n:], []byte(`","params":`)); !ok {
			return false
		}
		body = &f.Params
	} else if rest, ok = bytes.CutPrefix(rest, []byte(`,"result":`)); !ok {
		return false
	}
	rest, ok = bytes.CutSuffix(rest, []byte{'}'})
	if i := bytes.LastIndexByte(rest, ':'); i > 0 && len(rest)-i <= 3 { // perhaps a number of descriptors, which no JSON value ends in
		if head, found := bytes.CutSuffix(rest[:i], []byte(`,"fds"`)); found {
			n, err := strconv.ParseUint(string(rest[i+1:]), 10, 8)
			if err != nil || rest[i+1] == '0' {
				return false
			}
			f.FDs, rest = int(n), head
		}
	}
	if !ok || !json.Valid(rest) {
		return false
	}
	*body = bytes.Clone(rest)
	return true
}

// write sends one frame. When ctx ends before a byte of it was taken, nothing happened.
func (c *Conn) write(ctx context.Context, f frame, files []*os.File) error {
	if len(files) > maxFDs {
		return Errorf(CodeTooLarge, "a message carries at most %d descriptors, not %d", maxFDs, len(files))
	}
	f.FDs = len(files)
	line, err := f.line()
	if err != nil {
		return err
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			if fds[i], err = rawFD(f); err != nil {
				return err
			}
		}
		defer runtime.KeepAlive(files)
		rights = unix.UnixRights(fds...)
	}
	select {
	case c.writing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-c.writing }()
	if ctx.Err() != nil { // as when the connection has ended: whoever calls sends it again
		return ctx.Err()
	}
	if c.sock == nil {
		return c.Err()
	}
	n := 0
	if rights == nil {
		n = c.sock.TrySend(line)
	}
	return c.send(ctx, line, n, rights)
}

// writeNow is write for somebody who must not wait: a goroutine does that if need be.
// The connection must have a request that is not answered yet.
func (c *Conn) writeNow(f frame) error {
	if c.ctx.Err() != nil {
		return c.ctx.Err()
	}
	line, err := f.line()
	if err != nil {
		return err
	}
	n := 0
	select {
	case c.writing <- struct{}{}:
		if n = c.sock.TrySend(line); n == len(line) {
			<-c.writing
			return nil
		}
	default:
		n = -1
	}
	c.wg.Go(func() {
		if n < 0 {
			select {
			case c.writing <- struct{}{}:
				n = 0
			case <-c.ctx.Done():
				return
			}
		}
		_ = c.send(c.ctx, line, n, nil)
		<-c.writing
	})
	return nil
}

// send sends the line from its byte begun on. Called with the token of writing.
func (c *Conn) send(ctx context.Context, line []byte, begun int, rights []byte) error {
	if begun == len(line) {
		return nil
	}
	n, err := c.sock.Send(ctx, line[begun:], rights)
	if err != nil && !(n+begun == 0 && ctx.Err() != nil) {
		c.writeFailed(err)
	}
	return err
}

// rawFD is the descriptor of f, without what File.Fd does to it (blocking mode).
func rawFD(f *os.File) (int, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	n := -1
	err = raw.Control(func(fd uintptr) { n = int(fd) })
	return n, err
}

// writeFailed ends a connection whose stream may hold half a frame.
func (c *Conn) writeFailed(err error) {
	c.fail(err)
	c.shut()
}

func (c *Conn) read() {
	defer close(c.done)
	r := &reader{sock: c.sock}
	err := c.Err()
	for err == nil {
		var f frame
		var files []*os.File
		if f, files, err = r.next(); err != nil {
			break
		}
		if err = c.dispatch(f, files); err != nil {
			break
		}
	}
	closeAll(r.files)
	c.fail(err)
	c.shut()
	if c.peer.fd != nil {
		c.peer.fd.Close()
	}
	c.mu.Lock()
	for _, cancel := range c.running {
		cancel()
	}
	c.mu.Unlock()
}

// dispatch acts on one frame. An error ends the connection.
func (c *Conn) dispatch(f frame, files []*os.File) error {
	switch {
	case f.Cancel != 0:
		c.mu.Lock()
		cancel := c.running[f.Cancel]
		c.mu.Unlock()
		if cancel != nil {
			cancel()
		}
	case f.Method != "" && f.ID == 0:
		r := &Request{Method: f.Method, Params: f.Params, Files: files, Conn: c, Notification: true}
		if c.handler == nil || c.requestsOnly {
			r.CloseFiles()
			return nil
		}
		_, _ = c.handle(c.ctx, r)
		return nil
	case f.Method != "":
		ctx, cancel := context.WithCancel(c.ctx)
		c.mu.Lock()
		_, twice := c.running[f.ID]
		if !twice {
			c.running[f.ID] = cancel // before the next frame is read, so that no cancel can miss it
		}
		c.mu.Unlock()
		if twice {
			cancel()
			closeAll(files)
			return fmt.Errorf("malformed frame: request id %d is in use", f.ID)
		}
		select {
		case c.serving <- struct{}{}:
		case <-c.ctx.Done():
			cancel()
			closeAll(files)
			return context.Cause(c.ctx)
		}
		c.wg.Add(1)
		if h, ok := c.handler.(Prompt); ok && h.Prompt(f.Method) {
			c.serve(ctx, cancel, f, files)
		} else {
			go c.serve(ctx, cancel, f, files)
		}
		return nil
	case f.ID != 0:
		c.mu.Lock()
		ch := c.pending[f.ID]
		delete(c.pending, f.ID)
		c.mu.Unlock()
		if ch != nil {
			var err error
			if f.Error != nil {
				err = f.Error
			}
			ch <- answer{f.Result, files, err}
			return nil
		}
	}
	closeAll(files)
	return nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

func (c *Conn) serve(ctx context.Context, cancel context.CancelFunc, f frame, files []*os.File) {
	var value any
	var err error
	if c.handler == nil {
		err = Errorf(CodeInvalidRequest, "this side of the connection answers no requests")
		closeAll(files)
	} else {
		value, err = c.handle(ctx, &Request{Method: f.Method, Params: f.Params, Files: files, Conn: c})
	}
	later, ok := value.(Later)
	if err != nil || !ok {
		c.answer(cancel, f, value, err, c.write)
		return
	}
	later(func(result func() (any, error)) {
		value, err := guard(f.Method, result)
		if r, ok := value.(Reply); ok && len(r.Files) > 0 { // those are sent with a wait, if need be
			go c.answer(cancel, f, value, err, c.write)
			return
		}
		c.answer(cancel, f, value, err, func(_ context.Context, f frame, _ []*os.File) error { return c.writeNow(f) })
	})
}

// answer ends a request that was served.
func (c *Conn) answer(cancel context.CancelFunc, f frame, value any, err error, write func(context.Context, frame, []*os.File) error) {
	defer c.wg.Done()
	defer cancel()
	defer func() { <-c.serving }()
	c.mu.Lock()
	delete(c.running, f.ID)
	c.mu.Unlock()
	var send []*os.File
	var sent func()
	switch r := value.(type) {
	case Reply:
		value, send, sent = r.Value, r.Files, r.Sent
	case *Reply:
		value, send, sent = r.Value, r.Files, r.Sent
	}
	if sent != nil {
		defer sent()
	}
	defer closeAll(send)
	out := frame{ID: f.ID}
	if err != nil {
		out.Error = AsError(err)
		if out.Error.Operation == "" {
			e := *out.Error
			e.Operation = f.Method
			out.Error = &e
		}
	} else if out.Result, err = marshal(value); err != nil {
		out.Error = Errorf(CodeInternal, "%s: cannot encode the answer: %v", f.Method, err)
	} else if out.Result == nil {
		out.Result = json.RawMessage("null")
	}
	if out.Error != nil {
		_ = write(c.ctx, out, nil)
		return
	}
	if err := write(c.ctx, out, send); err != nil && c.Err() == nil { // too large, or a file that is closed
		e := AsError(err)
		e.Operation = f.Method
		_ = write(c.ctx, frame{ID: f.ID, Error: e}, nil)
	}
}

func (c *Conn) handle(ctx context.Context, r *Request) (any, error) {
	return guard(r.Method, func() (any, error) { return c.handler.Handle(ctx, r) })
}

// guard turns a panic of a handler into an error of that one request.
func guard(method string, f func() (any, error)) (value any, err error) {
	defer func() {
		if p := recover(); p != nil {
			value, err = nil, Errorf(CodeInternal, "%s: internal error: %v", method, p)
			onPanic(method, p)
		}
	}()
	return f()
}

var errTooLong = fmt.Errorf("malformed frame: over the limit of %d bytes", MaxFrame)

// reader splits the stream into frames and hands each the descriptors it names.
type reader struct {
	sock  *readable.Socket
	buf   []byte
	start int // of the unread part of buf
	scan  int // where the search for the newline goes on
	files []*os.File
	oob   []byte
}

func (r *reader) next() (frame, []*os.File, error) {
	for {
		if i := bytes.IndexByte(r.buf[r.scan:], '\n'); i >= 0 {
			line := r.buf[r.start : r.scan+i]
			if len(line) >= MaxFrame {
				return frame{}, nil, errTooLong
			}
			r.start = r.scan + i + 1
			r.scan = r.start
			if len(bytes.TrimSpace(line)) == 0 {
				continue
			}
			var f frame
			if err := f.decode(line); err != nil {
				return f, nil, fmt.Errorf("malformed frame: %w", err)
			}
			if f.FDs < 0 || f.FDs > len(r.files) {
				return f, nil, fmt.Errorf("malformed frame: it names %d descriptors, %d came", f.FDs, len(r.files))
			}
			files := r.files[:f.FDs:f.FDs]
			r.files = r.files[f.FDs:]
			return f, files, nil
		}
		r.scan = len(r.buf)
		if err := r.fill(); err != nil {
			return frame{}, nil, err
		}
	}
}

func (r *reader) fill() error {
	if r.start > 0 {
		n := copy(r.buf, r.buf[r.start:])
		r.buf, r.scan, r.start = r.buf[:n], r.scan-r.start, 0
		if n == 0 && cap(r.buf) > 1<<20 {
			r.buf = nil // one huge frame must not pin its memory for ever
		}
	}
	if len(r.buf) >= MaxFrame {
		return errTooLong
	}
	if cap(r.buf)-len(r.buf) < 4096 {
		grown := make([]byte, len(r.buf), max(8192, 2*cap(r.buf)))
		copy(grown, r.buf)
		r.buf = grown
	}
	if r.oob == nil {
		r.oob = make([]byte, unix.CmsgSpace(4*maxFDs))
	}
	n, oobn, flags, err := r.sock.Receive(r.buf[len(r.buf):cap(r.buf)], r.oob)
	if oobn > 0 {
		if perr := r.take(r.oob[:oobn]); perr != nil {
			return perr
		}
	}
	if flags&unix.MSG_CTRUNC != 0 {
		return errors.New("malformed frame: too many descriptors at once")
	}
	if err != nil {
		return err
	}
	if n == 0 {
		if r.start < len(r.buf) {
			return io.ErrUnexpectedEOF
		}
		return io.EOF
	}
	r.buf = r.buf[:len(r.buf)+n]
	return nil
}

func (r *reader) take(oob []byte) error {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	for i := range msgs {
		if msgs[i].Header.Level != unix.SOL_SOCKET || msgs[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return err
		}
		for _, fd := range fds {
			r.files = append(r.files, os.NewFile(uintptr(fd), "received"))
		}
	}
	if len(r.files) > 4*maxFDs {
		return errors.New("malformed frame: descriptors that no frame names")
	}
	return nil
}

// IsGone reports whether err means that nobody listens at a socket: there is no
// such file, or the process that made it is gone.
func IsGone(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOTDIR)
}
