// Package readable waits for input on descriptors, and for nothing else.
//
// Go's own poller asks for room to write as well, so a process that has sent something is
// woken once more when its peer reads that. Here the descriptors are in an epoll instance
// of their own, which asks for input only, and the poller watches that one. A Socket asks
// for room only while it has something to send that does not fit.
//
// Whoever waits reads, without blocking and by raw system calls: those do not tell the
// scheduler, which would wake its monitor thread for a call that never waits. What it
// reads is a descriptor of its own, a Dup of the one that it was given.
package readable

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Set is some descriptors. It owns its epoll instance, not them.
type Set struct {
	file *os.File
	raw  syscall.RawConn
}

// New makes a set. A descriptor that cannot be waited for, as a regular file, is left
// out: it always has input.
func New(fds ...int) (*Set, error) { return newSet(unix.EPOLLIN|unix.EPOLLRDHUP, fds...) }

func newSet(events uint32, fds ...int) (*Set, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	for _, fd := range fds {
		err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
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
