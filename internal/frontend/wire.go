package frontend

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
	"mypr/internal/rpc/readable"
)

// maxLine bounds one message, in both directions.
const maxLine = rpc.MaxFrame

// maxUnsent bounds what waits for a client that does not read. One that lets this
// much pile up is not coming back.
const maxUnsent = 128 << 20

// tooLong is the error of a line over the limit. The line has been skipped; its two
// ends are kept, because one of them tends to hold the request id.
type tooLong struct {
	size       int64
	head, tail []byte
}

func (e *tooLong) Error() string {
	return fmt.Sprintf("the message has %d bytes, over the limit of %d", e.size, maxLine)
}

// lineReader splits a stream into lines. It owns its buffer: a line is valid until
// the next call.
type lineReader struct {
	r     io.Reader
	limit int
	buf   []byte
	start int // of the unread part of buf
	scan  int // where the search for the newline goes on
	err   error
}

// ends is how much of either end of a line that is too long is kept.
const ends = 4096

// next returns the next line without its newline, *tooLong, or the error of the
// reader. A last line without a newline counts.
func (l *lineReader) next() ([]byte, error) {
	for {
		if i := bytes.IndexByte(l.buf[l.scan:], '\n'); i >= 0 {
			line := l.buf[l.start : l.scan+i]
			l.start = l.scan + i + 1
			l.scan = l.start
			if len(line) > l.limit {
				return nil, l.tooLong(line)
			}
			return line, nil
		}
		l.scan = len(l.buf)
		if l.err != nil {
			if l.start < len(l.buf) {
				line := l.buf[l.start:]
				l.start = len(l.buf)
				if len(line) > l.limit {
					return nil, l.tooLong(line)
				}
				return line, nil
			}
			return nil, l.err
		}
		if len(l.buf)-l.start > l.limit {
			return nil, l.skip()
		}
		l.fill()
	}
}

func (l *lineReader) fill() {
	if l.start > 0 {
		n := copy(l.buf, l.buf[l.start:])
		l.buf, l.scan, l.start = l.buf[:n], l.scan-l.start, 0
		if n == 0 && cap(l.buf) > 1<<20 {
			l.buf, l.scan = nil, 0 // one huge message must not pin its memory for ever
		}
	}
	if cap(l.buf)-len(l.buf) < 4096 {
		grown := make([]byte, len(l.buf), max(64<<10, 2*cap(l.buf)))
		copy(grown, l.buf)
		l.buf = grown
	}
	n, err := l.r.Read(l.buf[len(l.buf):cap(l.buf)])
	l.buf = l.buf[:len(l.buf)+n]
	if err != nil {
		l.err = err
	}
}

func (l *lineReader) tooLong(line []byte) *tooLong {
	n := min(ends, len(line))
	return &tooLong{int64(len(line)), bytes.Clone(line[:n]), bytes.Clone(line[len(line)-n:])}
}

// skip drops the rest of a line that is too long, keeping its ends.
func (l *lineReader) skip() error {
	e := l.tooLong(l.buf[l.start:])
	l.buf, l.start, l.scan = nil, 0, 0
	for l.err == nil {
		l.fill()
		part, rest, found := bytes.Cut(l.buf, []byte{'\n'})
		e.size += int64(len(part))
		e.tail = append(e.tail, part...)
		e.tail = bytes.Clone(e.tail[max(0, len(e.tail)-ends):])
		if found {
			l.start = len(l.buf) - len(rest)
			l.scan = l.start
			break
		}
		l.buf = l.buf[:0]
	}
	return e
}

// errStopped is the end of a pipe end by its owner.
var errStopped = errors.New("stopped")

// pipeEnd reads or writes a descriptor that may be in blocking mode (a terminal, or
// a pipe that others have open too, whose mode is not ours to change), and can still
// be stopped: it waits with poll(2) for the descriptor or the stop event.
//
// Reading does not hold a thread while it waits: input is the set of all that it waits for.
type pipeEnd struct {
	fd    int
	stop  int // eventfd
	other []unix.PollFd
	woken func(fd int32) error // an entry of other became readable
	input *readable.Set        // nil for writing
}

// watch makes a pipe end that reads.
func (p *pipeEnd) watch() (err error) {
	fds := []int{p.fd, p.stop}
	for _, o := range p.other {
		fds = append(fds, int(o.Fd))
	}
	p.input, err = readable.New(fds...)
	return err
}

// wait returns when fd is ready for events, or with an error when it was stopped.
func (p *pipeEnd) wait(events int16) error {
	fds := append(make([]unix.PollFd, 0, 4), unix.PollFd{Fd: int32(p.fd), Events: events}, unix.PollFd{Fd: int32(p.stop), Events: unix.POLLIN})
	fds = append(fds, p.other...)
	for {
		var err error
		if events == unix.POLLIN {
			err = p.input.Wait(func() bool {
				n, _, e := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&fds[0])), uintptr(len(fds)), uintptr(unsafe.Pointer(&unix.Timespec{})), 0, 0, 0)
				return n != 0 || e != 0
			})
		} else {
			_, err = unix.Poll(fds, -1)
		}
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("poll", err)
		}
		if fds[1].Revents != 0 {
			return errStopped
		}
		for _, o := range fds[2:] {
			if o.Revents != 0 {
				return p.woken(o.Fd)
			}
		}
		if fds[0].Revents != 0 {
			return nil
		}
	}
}

// Read waits for input. io.EOF is the end of the stream.
func (p *pipeEnd) Read(b []byte) (int, error) {
	for {
		if err := p.wait(unix.POLLIN); err != nil {
			return 0, err
		}
		n, err := readNow(p.fd, b)
		switch {
		case err == unix.EINTR || err == unix.EAGAIN:
			continue
		case err == unix.EIO: // a terminal whose other side has gone
			return 0, io.EOF
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0:
			return 0, io.EOF
		}
		return n, nil
	}
}

// readNow reads what is there. Most descriptors can be asked not to wait in case somebody
// else has read it meanwhile.
func readNow(fd int, b []byte) (int, error) {
	iov := unix.Iovec{Base: &b[0]}
	iov.SetLen(len(b))
	n, _, e := unix.RawSyscall6(unix.SYS_PREADV2, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1, ^uintptr(0), ^uintptr(0), unix.RWF_NOWAIT)
	switch e {
	case 0:
		return int(n), nil
	case unix.EAGAIN, unix.EINTR:
		return 0, e
	}
	return unix.Read(fd, b)
}

// writeNow writes what the descriptor takes without waiting, which may be nothing.
func (p *pipeEnd) writeNow(b []byte) int {
	iov := unix.Iovec{Base: &b[0]}
	iov.SetLen(len(b))
	n, _, e := unix.RawSyscall6(unix.SYS_PWRITEV2, uintptr(p.fd), uintptr(unsafe.Pointer(&iov)), 1, ^uintptr(0), ^uintptr(0), unix.RWF_NOWAIT)
	if e != 0 {
		return 0 // whoever waits meets the error again
	}
	return int(n)
}

// Write writes all of b in pieces of 4096 bytes: so much fits without blocking into
// a pipe that polls writable (PIPE_BUF, pipe(7)) and into a socket.
func (p *pipeEnd) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		if err := p.wait(unix.POLLOUT); err != nil {
			return done, err
		}
		n, err := unix.Write(p.fd, b[done:min(done+4096, len(b))])
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil {
			return done, os.NewSyscallError("write", err)
		}
		done += n
	}
	return done, nil
}

// outbox is the queue of messages to the client. Whoever has something to say, the reader
// of requests above all, never waits for a client that does not read: what the pipe does
// not take at once is the writer's, a goroutine. Messages leave in the order of send.
type outbox struct {
	w      io.Writer
	now    func([]byte) int // writes what can be written without waiting
	limit  int              // of bytes unsent
	broken chan struct{}    // closed at the first error

	mu      sync.Mutex // guards the fields below
	queue   [][]byte
	writing bool // the writer has taken messages off the queue
	size    int
	err     error
	closed  bool
	changed chan struct{} // capacity 1: something was queued, or closed
	done    chan struct{} // closed when the writer has returned
}

func newOutbox(w io.Writer, limit int) *outbox {
	o := &outbox{w: w, limit: limit, broken: make(chan struct{}), changed: make(chan struct{}, 1), done: make(chan struct{})}
	o.now = func([]byte) int { return 0 }
	if p, ok := w.(*pipeEnd); ok {
		o.now = p.writeNow
	}
	go o.run()
	return o
}

// send queues one message. Messages after an error of the writer are dropped.
func (o *outbox) send(v any) error {
	line, err := encode(v)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.err != nil:
		return o.err
	case o.closed:
		return errStopped
	case o.size+len(line) > o.limit:
		o.fail(fmt.Errorf("the client has not read %d bytes of answers", o.size))
		return o.err
	}
	if len(o.queue) == 0 && !o.writing {
		if line = line[o.now(line):]; len(line) == 0 {
			return nil
		}
	}
	o.queue = append(o.queue, line)
	o.size += len(line)
	o.wake()
	return nil
}

// fail records the first error. mu is held.
func (o *outbox) fail(err error) {
	if o.err == nil {
		o.err = err
		close(o.broken)
		o.wake()
	}
}

func (o *outbox) wake() {
	select {
	case o.changed <- struct{}{}:
	default:
	}
}

// close lets the writer end when all is written.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.wake()
}

// failed is the error that ended the writer.
func (o *outbox) failed() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

func (o *outbox) run() {
	defer close(o.done)
	for range o.changed {
		for {
			o.mu.Lock()
			batch, closed, failed := o.queue, o.closed, o.err != nil
			o.queue = nil
			o.writing = len(batch) > 0
			o.mu.Unlock()
			if failed || len(batch) == 0 {
				if failed || closed {
					return
				}
				break
			}
			for _, line := range batch {
				_, err := o.w.Write(line)
				o.mu.Lock()
				o.size -= len(line)
				if err != nil {
					o.fail(err)
				}
				o.mu.Unlock()
				if err != nil {
					return
				}
			}
		}
	}
}

// encode makes one line. <, > and & stay as they are: code is full of them, and an
// escape costs the reader tokens.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}
