package process

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// refused reports that a pidfd call is not to be had: by the kernel, or by a seccomp filter
// from before the call existed, as container engines have them (Docker before 20.10). That
// a process may not be signalled looks the same, and kill(2) then says it again.
func refused(err error) bool {
	return errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM)
}

// signalPID signals the process pid, if is says, of the process that is pinned then, that
// it is the one that is meant. It reports whether it did.
func signalPID(pid int, sig syscall.Signal, is func() bool) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err == nil {
		defer unix.Close(fd)
		if !is() {
			return false
		}
		err = unix.PidfdSendSignal(fd, sig, nil, 0)
	}
	if !refused(err) {
		return err == nil
	}
	// Nothing pins it. That the number becomes another's within this line takes a reaper
	// and as many new processes as there are numbers.
	return is() && syscall.Kill(pid, sig) == nil
}

// Signal sends sig; os.ErrProcessDone when the process has ended and was reaped.
func (p *Process) Signal(sig syscall.Signal) error {
	err := unix.PidfdSendSignal(p.fd, sig, nil, 0)
	if refused(err) {
		if start, serr := StartTime(p.PID); serr != nil || p.StartTime != 0 && start != p.StartTime {
			return os.ErrProcessDone
		}
		err = syscall.Kill(p.PID, sig)
	}
	if errors.Is(err, unix.ESRCH) {
		return os.ErrProcessDone
	}
	return os.NewSyscallError("kill", err)
}
