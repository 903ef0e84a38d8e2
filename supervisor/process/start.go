package process

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc/readable"
)

// Command is a process to start. All its files stay the caller's.
type Command struct {
	Path string   `json:"path"` // absolute
	Args []string `json:"args"` // with argv[0]
	Env  []string `json:"env"`
	Dir  string   `json:"dir,omitempty"`

	// Stdio are descriptors 0, 1 and 2; nil is /dev/null. Files are 3, 4, ….
	Stdio [3]*os.File `json:"-"`
	Files []*os.File  `json:"-"`
	// TTY makes descriptor 0 the controlling terminal.
	TTY bool `json:"tty,omitempty"`

	// CgroupFD is the directory of the cgroup to be born in, or -1.
	CgroupFD   int                 `json:"-"`
	Credential *syscall.Credential `json:"credential,omitempty"`
	// OOMScoreAdjust is set as far as the privileges allow (lowering needs
	// CAP_SYS_RESOURCE); the caller may look at what it became.
	OOMScoreAdjust *int `json:"oom_score_adjust,omitempty"`
	// TimerSlack of the process; 0: the kernel's default.
	TimerSlack time.Duration `json:"timer_slack,omitempty"`
	Setup      Setup         `json:"setup,omitzero"`
}

// Setup is what only the new process can set for itself without a race. If any of
// it is asked for, the process starts as the exec helper (2-5 ms more).
type Setup struct {
	ListenPID bool     `json:"listen_pid,omitempty"` // LISTEN_PID=<own pid> (sd_listen_fds(3) checks it)
	UMask     *uint32  `json:"umask,omitempty"`
	Nice      *int     `json:"nice,omitempty"`
	Rlimits   []Rlimit `json:"rlimits,omitempty"`
}

// Rlimit is one limit, as setrlimit(2) takes it.
type Rlimit struct {
	Resource int    `json:"resource"`
	Soft     uint64 `json:"soft"`
	Hard     uint64 `json:"hard"`
}

// IsZero reports that no helper is needed.
func (s Setup) IsZero() bool {
	return !s.ListenPID && s.UMask == nil && s.Nice == nil && len(s.Rlimits) == 0
}

// Start starts c in a new session. The error is that of the exec, unless the exec
// helper was needed: then the process is the helper for now, and status becomes
// readable when it has executed the command (end of file) or could not (see
// ReadStatus); the caller must close it.
func Start(c *Command) (p *Process, status *os.File, err error) {
	attr := &syscall.ProcAttr{Dir: c.Dir, Env: c.Env, Files: make([]uintptr, 0, 4+len(c.Files))}
	for _, f := range c.Stdio {
		if f == nil {
			if f, err = devNull(); err != nil {
				return nil, nil, err
			}
		}
		attr.Files = append(attr.Files, uintptr(FD(f)))
	}
	for _, f := range c.Files {
		attr.Files = append(attr.Files, uintptr(FD(f)))
	}
	path, args := c.Path, c.Args
	if !c.Setup.IsZero() {
		var child int
		if status, child, err = statusPipe(); err != nil {
			return nil, nil, err
		}
		defer unix.Close(child)
		setup, err := json.Marshal(helperSetup{Setup: c.Setup, StatusFD: len(attr.Files)})
		if err != nil {
			return nil, nil, err
		}
		attr.Files = append(attr.Files, uintptr(child))
		path, args = selfExe, append([]string{helperName, string(setup), c.Path}, c.Args...)
	}
	pidfd := -1
	attr.Sys = &syscall.SysProcAttr{Setsid: true, Setctty: c.TTY, PidFD: &pidfd, Credential: c.Credential}
	if c.CgroupFD >= 0 {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, c.CgroupFD
	}
	if c.OOMScoreAdjust != nil {
		// Inherited at the clone: set afterwards, what the child forks first could miss it.
		if restore := lendOOMScore(*c.OOMScoreAdjust); restore != nil {
			defer restore()
		}
	}
	if restore := lendTimerSlack(cmp.Or(c.TimerSlack, DefaultTimerSlack)); restore != nil {
		defer restore()
	}
	before := bootTicks()
	pid, err := syscall.ForkExec(path, args, attr)
	if err != nil {
		if status != nil {
			status.Close()
		}
		return nil, nil, err
	}
	if pidfd < 0 { // a kernel without CLONE_PIDFD; our own unreaped child's pid is no one else's
		if pidfd, err = unix.PidfdOpen(pid, 0); err != nil {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			_, _ = syscall.Wait4(pid, nil, 0, nil)
			return nil, nil, fmt.Errorf("pidfd: %w", err)
		}
	}
	return &Process{PID: pid, StartTime: startTime(pid, before, bootTicks()), fd: pidfd}, status, nil
}

// startTime is StartTime of a process that began between two times. If they are the
// same there is nothing to read, which a few of them confirm at first.
func startTime(pid int, before, after uint64) uint64 {
	if before == after && ticks.Load() >= confirmed {
		return after
	}
	start, err := StartTime(pid)
	if err == nil && before == after {
		if start == after {
			ticks.Add(1)
		} else {
			ticks.Store(math.MinInt32) // another clock or unit here
		}
	}
	return start
}

const confirmed = 3

var ticks atomic.Int32

// bootTicks is the time since boot in the unit of StartTime.
func bootTicks() uint64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0
	}
	return uint64(ts.Nano()) / 1e7 // USER_HZ is 100 on every Linux that Go runs on
}

// devNull stays open for good: almost every start needs it.
var devNull = sync.OnceValues(func() (*os.File, error) { return os.OpenFile(os.DevNull, os.O_RDWR, 0) })

// selfExe is the program that runs, also when its file was replaced or deleted.
const selfExe = "/proc/self/exe"

func statusPipe() (*os.File, int, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, -1, err
	}
	return os.NewFile(uintptr(fds[0]), "exec-status"), fds[1], nil
}

// ReadStatus reads what the exec helper reported and closes status: nil once the
// command was executed.
func ReadStatus(status *os.File) error {
	defer status.Close()
	buf := make([]byte, 512)
	n, err := status.Read(buf)
	if n == 0 || err != nil {
		return nil // end of file: the helper's end was closed by its exec, or by its death, which has its own report
	}
	var e StepError
	if err := json.Unmarshal(buf[:n], &e); err != nil {
		return errors.New(string(buf[:n]))
	}
	return &e
}

// StepError says at which step a process could not be made.
type StepError struct {
	Step  string        `json:"step"`
	Errno syscall.Errno `json:"errno"`
}

func (e *StepError) Error() string { return e.Step + ": " + e.Errno.Error() }
func (e *StepError) Unwrap() error { return e.Errno }

// FD is f's descriptor without the change to blocking mode that File.Fd makes. It
// is valid as long as f is not closed.
func FD(f *os.File) int {
	fd := -1
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(n uintptr) { fd = int(n) })
	}
	return fd
}

// Dup duplicates f, close-on-exec.
func Dup(f *os.File) (*os.File, error) {
	fd, err := readable.Dup(f)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
