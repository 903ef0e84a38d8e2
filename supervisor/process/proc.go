package process

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// StartTime is field 22 of /proc/PID/stat: clock ticks since boot. With the pid it
// names a process for the whole uptime of the machine.
func StartTime(pid int) (uint64, error) {
	f, err := statFields(pid)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(string(f[19]), 10, 64)
}

// statFields are the fields of /proc/PID/stat from the third (state) on; the command
// name before them may hold blanks and parentheses.
func statFields(pid int) ([][]byte, error) {
	// Plain system calls: this is on the path of every start.
	path := "/proc/" + strconv.Itoa(pid) + "/stat"
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil, os.ErrProcessDone
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	buf := make([]byte, 1024) // a name of 16 bytes and 50 numbers fit
	n, err := unix.Read(fd, buf)
	unix.Close(fd)
	if err == unix.ESRCH {
		return nil, os.ErrProcessDone
	}
	if err != nil {
		return nil, &os.PathError{Op: "read", Path: path, Err: err}
	}
	b := buf[:n]
	i := bytes.LastIndexByte(b, ')') // the name may hold one too
	f := bytes.Fields(b[i+1:])
	if i < 0 || len(f) < 20 {
		return nil, fmt.Errorf("/proc/%d/stat: not understood", pid)
	}
	return f, nil
}

// Suspended reports whether pid names a process that a signal or a debugger has stopped.
func Suspended(pid int) bool {
	f, err := statFields(pid)
	return err == nil && (f[0][0] == 'T' || f[0][0] == 't')
}

// Runs reports whether pid names a process that has not ended: a zombie has.
func Runs(pid int) bool {
	f, err := statFields(pid)
	return err == nil && f[0][0] != 'Z' && f[0][0] != 'X'
}

// Name is the command name (comm) of a process, or "?".
func Name(pid int) string {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	if err != nil {
		return "?"
	}
	return string(bytes.TrimSpace(b))
}

// Describe is "pid 123 (name)", for reports of what would not die.
func Describe(pid int) string { return fmt.Sprintf("pid %d (%s)", pid, Name(pid)) }

// RSS is the resident memory of a process in bytes, 0 when it is gone.
func RSS(pid int) uint64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/statm")
	if err != nil {
		return 0
	}
	f := bytes.Fields(b)
	if len(f) < 2 {
		return 0
	}
	n, _ := strconv.ParseUint(string(f[1]), 10, 64)
	return n * uint64(os.Getpagesize())
}

// CPUTime is the time used by a process, in microseconds.
func CPUTime(pid int) uint64 {
	f, err := statFields(pid)
	if err != nil {
		return 0
	}
	u, _ := strconv.ParseUint(string(f[11]), 10, 64)
	s, _ := strconv.ParseUint(string(f[12]), 10, 64)
	return (u + s) * 10_000 // USER_HZ is 100 on every Linux that Go runs on
}

// Parent is the parent's pid.
func Parent(pid int) (int, error) {
	f, err := statFields(pid)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(f[1]))
}

// Descendants lists all processes below root, without root and without zombies, in
// no order. One pass over /proc: a tree that forks meanwhile needs another pass.
func Descendants(root int) ([]int, error) {
	d, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	names, err := d.Readdirnames(-1)
	d.Close()
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	zombie := map[int]bool{}
	for _, n := range names {
		if n[0] < '0' || n[0] > '9' {
			continue
		}
		pid, err := strconv.Atoi(n)
		if err != nil {
			continue
		}
		f, err := statFields(pid)
		if err != nil {
			continue
		}
		ppid, _ := strconv.Atoi(string(f[1]))
		children[ppid] = append(children[ppid], pid)
		if f[0][0] == 'Z' || f[0][0] == 'X' {
			zombie[pid] = true
		}
	}
	var all []int
	queue := children[root]
	for len(queue) > 0 {
		pid := queue[0]
		queue = append(queue[1:], children[pid]...)
		if !zombie[pid] {
			all = append(all, pid)
		}
	}
	return all, nil
}

// OOMScoreAdjust reads /proc/PID/oom_score_adj.
func OOMScoreAdjust(pid int) (int, error) {
	path := "/proc/" + strconv.Itoa(pid) + "/oom_score_adj"
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) // plain, as in statFields
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	return readOOMScore(fd)
}

func readOOMScore(fd int) (int, error) {
	buf := make([]byte, 16)
	n, err := unix.Pread(fd, buf, 0)
	if err != nil {
		return 0, os.NewSyscallError("read", err)
	}
	return strconv.Atoi(string(bytes.TrimSpace(buf[:n])))
}

// ownOOMScore is that of the calling process, open for good: it is changed for a moment
// at nearly every start.
var ownOOMScore = sync.OnceValues(func() (int, error) {
	return unix.Open("/proc/self/oom_score_adj", unix.O_RDWR|unix.O_CLOEXEC, 0)
})

// lendOOMScore gives the calling process another score, for a child to inherit, until
// restore is called, which is nil when there is nothing to restore.
func lendOOMScore(score int) (restore func()) {
	fd, err := ownOOMScore()
	if err != nil {
		return nil
	}
	own, err := readOOMScore(fd)
	if err != nil || own == score {
		return nil
	}
	set := func(n int) error {
		_, err := unix.Pwrite(fd, strconv.AppendInt(nil, int64(n), 10), 0)
		return err
	}
	if set(score) != nil {
		return nil
	}
	return func() { _ = set(own) }
}

// DefaultTimerSlack is what the kernel gives a process whose parent asks for nothing else.
const DefaultTimerSlack = 50 * time.Microsecond

// SetTimerSlack sets that of the calling thread, and so of what it starts. It returns what
// it was.
func SetTimerSlack(d time.Duration) (was time.Duration, err error) {
	n, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil {
		return 0, os.NewSyscallError("prctl(PR_GET_TIMERSLACK)", err)
	}
	if was = time.Duration(n); was == d {
		return was, nil
	}
	return was, os.NewSyscallError("prctl(PR_SET_TIMERSLACK)", unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(d), 0, 0, 0))
}

// lendTimerSlack gives the calling thread another slack, for a child to inherit, and keeps
// the goroutine on it until restore is called, which is nil when there is nothing to do.
func lendTimerSlack(d time.Duration) (restore func()) {
	runtime.LockOSThread()
	was, err := SetTimerSlack(d)
	if err != nil || was == d {
		runtime.UnlockOSThread()
		return nil
	}
	return func() {
		_, _ = SetTimerSlack(was)
		runtime.UnlockOSThread()
	}
}

// BecomeSubreaper makes the calling process the parent of orphaned descendants.
func BecomeSubreaper() error {
	return os.NewSyscallError("prctl(PR_SET_CHILD_SUBREAPER)", unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
}

// PeekZombie is the pid of a child that has ended and was not reaped, or 0. It reaps
// nothing, so no exit status is lost.
func PeekZombie() int {
	for {
		var si unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &si, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0
		}
		// si_pid is the first member of the union, which is aligned like a pointer.
		const off = 3*4 + (unsafe.Sizeof(uintptr(0)) - 4)
		return int(*(*int32)(unsafe.Add(unsafe.Pointer(&si), off)))
	}
}

// Reap takes the exit status of a child that nobody wants.
func Reap(pid int) {
	for {
		if _, err := syscall.Wait4(pid, nil, syscall.WNOHANG, nil); err != syscall.EINTR {
			return
		}
	}
}

// IsDescendant reports whether pid is below root.
func IsDescendant(pid, root int) bool {
	for range 10_000 {
		ppid, err := Parent(pid)
		if err != nil || ppid <= 1 && ppid != root {
			return false
		}
		if ppid == root {
			return true
		}
		pid = ppid
	}
	return false
}

// KillInvocation kills every process that has INVOCATION_ID=id in the environment it
// was started with: the last resort when nothing else tells whose a process is.
func KillInvocation(id string) {
	want := []byte("INVOCATION_ID=" + id + "\x00")
	self := os.Getpid()
	for range 20 {
		fresh := false
		names, _ := os.ReadDir("/proc")
		for _, n := range names {
			pid, err := strconv.Atoi(n.Name())
			if err != nil || pid == self {
				continue
			}
			fresh = signalPID(pid, unix.SIGKILL, func() bool {
				env, err := os.ReadFile("/proc/" + n.Name() + "/environ")
				return err == nil && len(id) == 32 && bytes.Contains(append([]byte{0}, env...), append([]byte{0}, want...))
			}) || fresh
		}
		if !fresh {
			return
		}
	}
}
