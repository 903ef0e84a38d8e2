// Package readable waits for input on descriptors, and for nothing else.
//
// Go's own poller asks for room to write as well, so a process that has sent something is
// woken once more when its peer reads that. Here the descriptors are in an epoll instance
// of their own, which asks for input only, and the poller watches that one.
//
// Whoever waits reads, without blocking and by raw system calls: those do not tell the
// scheduler, which would wake its monitor thread for a call that never waits.
package readable

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Set is some descriptors. It owns its epoll instance, not them.
type Set struct {
	file *os.File
	raw  syscall.RawConn
}

// New makes a set. A descriptor that cannot be waited for, as a regular file, is left
// out: it always has input.
func New(fds ...int) (*Set, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	for _, fd := range fds {
		err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: int32(fd)})
		if err != nil && !errors.Is(err, unix.EPERM) {
			unix.Close(ep)
			return nil, fmt.Errorf("epoll_ctl of descriptor %d: %w", fd, err)
		}
	}
	if err := unix.SetNonblock(ep, true); err != nil { // else the poller does not take it
		unix.Close(ep)
		return nil, os.NewSyscallError("fcntl", err)
	}
	s := &Set{file: os.NewFile(uintptr(ep), "input")}
	if s.raw, err = s.file.SyscallConn(); err != nil {
		s.file.Close()
		return nil, err
	}
	return s, nil
}

// Wait calls try until it returns true, each time after a descriptor has got input. It
// fails with os.ErrClosed when the set is closed.
func (s *Set) Wait(try func() bool) error {
	if s.raw.Read(func(uintptr) bool { return try() }) != nil {
		return os.ErrClosed
	}
	return nil
}

// Close ends a Wait. The descriptors stay open.
func (s *Set) Close() error { return s.file.Close() }

// Socket reads a stream socket.
type Socket struct {
	*Set
	sock syscall.RawConn
}

// NewSocket makes a reader of a socket that stays its owner's. Close, after the socket
// was closed, ends a Read.
func NewSocket(sock syscall.RawConn) (*Socket, error) {
	var set *Set
	var err error
	if e := sock.Control(func(fd uintptr) { set, err = New(int(fd)) }); e != nil {
		return nil, e
	}
	if err != nil {
		return nil, err
	}
	return &Socket{set, sock}, nil
}

// Read implements io.Reader.
func (s *Socket) Read(b []byte) (n int, err error) {
	closed := s.Wait(func() (done bool) {
		e := s.sock.Control(func(fd uintptr) {
			for {
				got, _, e := unix.RawSyscall6(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
				switch e {
				case unix.EINTR:
					continue
				case unix.EAGAIN:
					return
				case 0:
					n = int(got)
				default:
					err = os.NewSyscallError("recvfrom", e)
				}
				done = true
				return
			}
		})
		if e != nil {
			err, done = e, true
		}
		return done
	})
	if err == nil {
		err = closed
	}
	if err == nil && n == 0 {
		err = io.EOF
	}
	return n, err
}
