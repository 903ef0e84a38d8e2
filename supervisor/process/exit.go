package process

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Process is one process, pinned by a pidfd so that its pid can never mean another.
type Process struct {
	PID       int    // in the supervisor's pid namespace
	StartTime uint64 // clock ticks since boot, from /proc/PID/stat; 0 when it was gone too soon to read
	fd        int
}

// Exit is how a process ended.
type Exit struct {
	Known    bool   `json:"known"` // false: nothing below is valid
	Code     int    `json:"code"`  // when Signal is 0
	Signal   int    `json:"signal,omitempty"`
	CoreDump bool   `json:"core_dump,omitempty"`
	CPU      uint64 `json:"cpu,omitempty"` // microseconds, with reaped descendants; 0 when not known
}

func (e Exit) String() string {
	switch {
	case !e.Known:
		return "exit status unknown"
	case e.Signal != 0 && e.CoreDump:
		return "dumped core on " + SignalName(e.Signal)
	case e.Signal != 0:
		return "killed by " + SignalName(e.Signal)
	default:
		return fmt.Sprintf("exit status %d", e.Code)
	}
}

// SignalName is "SIGTERM" for 15 and "RTMIN+1" for 35, as systemd has them.
func SignalName(n int) string {
	const rtmin, rtmax = 34, 64 // glibc's: it keeps two for itself
	switch s := unix.SignalName(syscall.Signal(n)); {
	case s != "":
		return s
	case n >= rtmin && n <= rtmax:
		return fmt.Sprintf("RTMIN+%d", n-rtmin)
	}
	return fmt.Sprintf("signal %d", n)
}

// Adopt pins a running process that somebody else started. A start time other than 0
// must agree, so that a recycled pid is refused (os.ErrProcessDone).
func Adopt(pid int, start uint64) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		if errors.Is(err, unix.ESRCH) {
			return nil, os.ErrProcessDone
		}
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	now, err := StartTime(pid)
	if err != nil || start != 0 && now != start {
		unix.Close(fd)
		return nil, os.ErrProcessDone
	}
	return &Process{PID: pid, StartTime: now, fd: fd}, nil
}

// FromPIDFD takes over a pidfd.
func FromPIDFD(pid int, fd int) *Process {
	start, _ := StartTime(pid)
	return &Process{PID: pid, StartTime: start, fd: fd}
}

// PIDFD is readable (poll: IN) once the process has ended, and hung up (HUP) once it
// was reaped as well (Linux 6.9).
func (p *Process) PIDFD() int { return p.fd }

// Close drops the pidfd.
func (p *Process) Close() {
	if p.fd >= 0 {
		unix.Close(p.fd)
		p.fd = -1
	}
}

// Progress is what Collect found.
type Progress int

// A process that is not our child may have ended without being reaped by its parent
// yet (Unreaped), in a way that we may not read in /proc: its exit status can be
// learned only after that, when the pidfd hangs up.
const (
	Running Progress = iota
	Unreaped
	Ended
)

// Collect reaps the process if it is a child that has ended, and says how it ended.
// For a process that is somebody else's child it asks the kernel through the pidfd
// (PIDFD_GET_INFO with exit information, Linux 6.15); where there is no such thing
// the exit is not Known.
func (p *Process) Collect() (Exit, Progress) {
	var ws syscall.WaitStatus
	var ru syscall.Rusage
	for {
		pid, err := syscall.Wait4(p.PID, &ws, syscall.WNOHANG, &ru)
		switch {
		case err == syscall.EINTR:
			continue
		case err == nil && pid == p.PID:
			return exitOf(ws, &ru), Ended
		case err == nil:
			return Exit{}, Running
		}
		return p.foreignExit()
	}
}

func exitOf(ws syscall.WaitStatus, ru *syscall.Rusage) Exit {
	e := Exit{Known: true}
	if ws.Signaled() {
		e.Signal, e.CoreDump = int(ws.Signal()), ws.CoreDump()
	} else {
		e.Code = ws.ExitStatus()
	}
	if ru != nil {
		e.CPU = uint64(ru.Utime.Nano()+ru.Stime.Nano()) / 1000
		// Not ru_maxrss: an exec keeps the high-water mark of the memory before it, which
		// is the supervisor's.
	}
	return e
}

// poll reports whether the process has ended and whether it was reaped as well.
func (p *Process) poll() (ended, reaped bool) {
	poll := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(poll, 0)
		if err == unix.EINTR {
			continue
		}
		return err != nil || n > 0, poll[0].Revents&unix.POLLHUP != 0
	}
}

func (p *Process) foreignExit() (Exit, Progress) {
	ended, reaped := p.poll()
	if !ended {
		return Exit{}, Running
	}
	if e := p.zombieExit(); e.Known {
		return e, Ended
	}
	if !hasExitInfo() {
		return Exit{}, Ended
	}
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	if err := unix.IoctlPidfdInfo(p.fd, &info); err == nil && info.Mask&unix.PIDFD_INFO_EXIT != 0 {
		return exitOf(syscall.WaitStatus(info.Exit_code), nil), Ended
	}
	if reaped {
		return Exit{}, Ended // reaped, and the kernel kept nothing
	}
	return Exit{}, Unreaped
}

// zombieExit reads the exit status of somebody else's child that nobody has reaped yet
// from /proc/PID/stat. The field is 0 for those who may not see it, so it counts only
// after a check that asks for the same permission (ptrace read access).
func (p *Process) zombieExit() Exit {
	const exitCode = 52 - 3 // its place in proc_pid_stat(5), less the fields before the state
	f, err := statFields(p.PID)
	if err != nil || len(f) <= exitCode || f[0][0] != 'Z' || string(f[19]) != strconv.FormatUint(p.StartTime, 10) {
		return Exit{}
	}
	if _, err := os.Readlink("/proc/" + strconv.Itoa(p.PID) + "/ns/pid"); errors.Is(err, os.ErrPermission) {
		return Exit{}
	}
	n, err := strconv.ParseUint(string(f[exitCode]), 10, 32)
	if err != nil {
		return Exit{}
	}
	return exitOf(syscall.WaitStatus(n), nil)
}

// hasExitInfo: the ioctl is there (6.13) and the kernel may keep exit information.
var hasExitInfo = sync.OnceValue(func() bool {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_PID | unix.PIDFD_INFO_EXIT}
	return unix.IoctlPidfdInfo(fd, &info) == nil
})
