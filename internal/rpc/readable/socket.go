package readable

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Socket is a connected Unix stream socket. One goroutine may read and one send at a
// time; Close may come at any time and ends both.
type Socket struct {
	file *os.File // in blocking mode, so that Go's poller leaves it alone
	raw  syscall.RawConn
	in   *Set

	mu     sync.Mutex // guards the fields below
	out    *Set       // of a Send that waits
	closed bool
}

// TakeOver makes a Socket of a connection, which it closes.
func TakeOver(sock *net.UnixConn) (*Socket, error) {
	defer sock.Close()
	fd, err := Dup(sock)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	s := &Socket{file: os.NewFile(uintptr(fd), "socket")}
	if s.raw, err = s.file.SyscallConn(); err == nil {
		s.in, err = New(fd)
	}
	if err != nil {
		s.file.Close()
		return nil, err
	}
	return s, nil
}

// Dup is a second descriptor of what c has, to be closed by the caller: close-on-exec, and
// never one of the standard three. Whether reading blocks stays common to both.
func Dup(c syscall.Conn) (fd int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	if e := raw.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 3) }); e != nil {
		return -1, e
	}
	return fd, os.NewSyscallError("dup", err)
}

// Close ends reading and sending.
func (s *Socket) Close() error {
	s.mu.Lock()
	s.closed = true
	if s.out != nil {
		s.out.Close()
	}
	s.mu.Unlock()
	s.in.Close()
	return s.file.Close()
}

// call makes a system call that does not wait; EAGAIN is reported as not done. What an
// argument points at must not be on the stack, which may move before the call.
//
//go:uintptrescapes
func (s *Socket) call(trap uintptr, a, b, c uintptr) (n int, done bool, err error) {
	closed := s.raw.Control(func(fd uintptr) {
		for {
			r, _, e := unix.RawSyscall6(trap, fd, a, b, c, 0, 0)
			switch e {
			case unix.EINTR:
				continue
			case unix.EAGAIN:
				return
			case 0:
				n = int(r)
			default:
				err = e
			}
			done = true
			return
		}
	})
	if closed != nil {
		return 0, true, os.ErrClosed
	}
	return n, done, err
}

// Read implements io.Reader.
func (s *Socket) Read(b []byte) (n int, err error) {
	n, _, _, err = s.Receive(b, nil)
	if err == nil && n == 0 && len(b) > 0 {
		err = io.EOF
	}
	return n, err
}

// Receive waits for bytes and the descriptors that ride on them, as recvmsg(2). Nothing
// is the end of the stream.
func (s *Socket) Receive(b, oob []byte) (n, oobn, flags int, err error) {
	iov := unix.Iovec{Base: unsafe.SliceData(b)}
	iov.SetLen(len(b))
	var msg unix.Msghdr
	closed := s.in.Wait(func() (done bool) {
		msg = unix.Msghdr{Iov: &iov, Control: unsafe.SliceData(oob)}
		msg.SetIovlen(1)
		msg.SetControllen(len(oob))
		n, done, err = s.call(unix.SYS_RECVMSG, uintptr(unsafe.Pointer(&msg)), unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT, 0)
		return done
	})
	if closed != nil {
		return 0, 0, 0, closed
	}
	if err != nil {
		return 0, 0, 0, fmt.Errorf("recvmsg: %w", err)
	}
	return n, int(msg.Controllen), int(msg.Flags), nil
}

// Linger returns when there is input, or over reports true, or d later. It keeps its
// processor from sleeping but not from others: whoever can run goes first.
func (s *Socket) Linger(d time.Duration, over func() bool) {
	fds, never := []unix.PollFd{{Events: unix.POLLIN}}, new(unix.Timespec)
	until := time.Now().Add(d)
	_ = s.raw.Control(func(fd uintptr) {
		fds[0].Fd = int32(fd)
		for !over() && time.Now().Before(until) {
			if n, _, _ := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(unsafe.SliceData(fds))), 1, uintptr(unsafe.Pointer(never)), 0, 0, 0); n == 1 {
				return
			}
			_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	})
}

// TrySend sends what there is room for now, which may be nothing, also because of an
// error: Send meets it again.
func (s *Socket) TrySend(b []byte) int {
	n, _, err := s.call(unix.SYS_SENDTO, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	runtime.KeepAlive(b)
	if err != nil {
		return 0
	}
	return n
}

// Send sends all of b, with rights on its first byte, and waits for room as long as ctx
// lasts. It returns how much was sent.
func (s *Socket) Send(ctx context.Context, b, rights []byte) (sent int, err error) {
	var failed error
	send := func() bool {
		for sent < len(b) {
			iov := unix.Iovec{Base: &b[sent]}
			iov.SetLen(len(b) - sent)
			msg := unix.Msghdr{Iov: &iov, Control: unsafe.SliceData(rights)}
			msg.SetIovlen(1)
			msg.SetControllen(len(rights))
			n, done, err := s.call(unix.SYS_SENDMSG, uintptr(unsafe.Pointer(&msg)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0)
			if !done {
				return false
			}
			if err != nil {
				failed = err
				return true
			}
			sent += n
			rights = nil
		}
		return true
	}
	var closed error
	if !send() {
		closed = s.whenWritable(ctx, send)
	}
	runtime.KeepAlive(b)
	runtime.KeepAlive(rights)
	switch {
	case closed != nil && ctx.Err() != nil:
		return sent, ctx.Err()
	case closed != nil:
		return sent, closed
	case failed != nil:
		return sent, fmt.Errorf("sendmsg: %w", failed)
	}
	return sent, nil
}

// whenWritable calls f when there is room until it reports that it is done. The error
// says that it never was: the socket or ctx ended.
func (s *Socket) whenWritable(ctx context.Context, f func() bool) error {
	var out *Set
	var err error
	if e := s.raw.Control(func(fd uintptr) { out, err = newSet(unix.EPOLLOUT, int(fd)) }); e != nil {
		return os.ErrClosed
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.out = out
	if s.closed {
		out.Close()
	}
	s.mu.Unlock()
	defer func() {
		out.Close()
		s.mu.Lock()
		s.out = nil
		s.mu.Unlock()
	}()
	stop := context.AfterFunc(ctx, func() { out.Close() })
	defer stop()
	return out.Wait(f)
}
