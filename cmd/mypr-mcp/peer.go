package main

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
	"mypr/internal/rpc/readable"
	"mypr/supervisor/control"
)

// watched is a process whose end is waited for. It owns the descriptor.
type watched struct{ f *os.File }

// watchPeer opens the process at the other end, before it is asked to go. The pidfd
// of the connection is closed with it, so this is one of its own. Without any (an old
// kernel and a peer in another pid namespace) wait returns at once and the caller's
// lock is the only sign.
func watchPeer(sv *control.Client) (watched, error) {
	peer := sv.Peer()
	fd := -1
	var err error
	if p := peer.PIDFD(); p != nil {
		fd, err = readable.Dup(p)
	} else if peer.PID > 0 {
		fd, err = unix.PidfdOpen(peer.PID, unix.PIDFD_NONBLOCK)
	}
	if err != nil {
		return watched{}, os.NewSyscallError("pidfd", err)
	}
	if fd < 0 {
		return watched{}, nil
	}
	// Non-blocking, so that the runtime's poller waits for it and no thread does.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return watched{}, err
	}
	return watched{os.NewFile(uintptr(fd), "supervisor-pidfd")}, nil
}

func (w watched) Close() {
	if w.f != nil {
		w.f.Close()
	}
}

// kill sends SIGKILL. A process of a pid namespace that is not below this one cannot be
// signalled from here.
func (w watched) kill() error {
	if w.f == nil {
		return os.ErrProcessDone
	}
	raw, err := w.f.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
	switch err {
	case unix.EINVAL:
		return errors.New("it runs in a pid namespace that is not visible from here")
	case unix.ESRCH:
		err = nil // it has ended
	}
	return errors.Join(cerr, err)
}

// wait returns when the process has ended.
func (w watched) wait(ctx context.Context) error {
	if w.f == nil {
		return nil
	}
	raw, err := w.f.SyscallConn()
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = w.f.SetReadDeadline(time.Now()) })()
	err = raw.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for {
			n, err := unix.Poll(p, 0)
			if err == syscall.EINTR {
				continue
			}
			return n > 0 || err != nil
		}
	})
	if ctx.Err() != nil {
		return rpc.AsError(context.Cause(ctx))
	}
	return err
}
