package process

import (
	"encoding/json"
	"errors"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	helperName = "mypr-exec-helper"
	shimName   = "mypr-shim"
)

type helperSetup struct {
	Setup
	StatusFD int `json:"status_fd"`
}

// HelperMain returns at once in an ordinary start of the program. In a process that
// Start, StartShim or StartAnchor made it does that job and never returns. Call
// it before anything else in main (in tests: in TestMain).
func HelperMain() {
	if len(os.Args) == 0 {
		return
	}
	switch os.Args[0] {
	case helperName:
		execHelper(os.Args[1:])
	case shimName:
		shimMain(os.Args[1:])
	case anchorName:
		anchorMain(os.Args[1:])
	}
}

// execHelper sets up its own process and becomes the command: args are the setup,
// the path and the command's argv.
func execHelper(args []string) {
	var h helperSetup
	if len(args) < 3 || json.Unmarshal([]byte(args[0]), &h) != nil {
		os.Exit(ExitExec)
	}
	runtime.LockOSThread() // nice is per thread
	unix.CloseOnExec(h.StatusFD)
	fail := func(step string, err error) {
		var errno syscall.Errno
		errors.As(err, &errno)
		b, _ := json.Marshal(StepError{Step: step, Errno: errno})
		_, _ = unix.Write(h.StatusFD, b)
		os.Exit(ExitExec)
	}
	if h.UMask != nil {
		unix.Umask(int(*h.UMask))
	}
	if h.Nice != nil {
		if err := unix.Setpriority(unix.PRIO_PROCESS, 0, *h.Nice); err != nil {
			fail("nice", err)
		}
	}
	for _, l := range h.Rlimits {
		// syscall, not unix: Go puts the soft NOFILE limit that it found back at exec,
		// unless it was set through package syscall.
		if err := syscall.Setrlimit(l.Resource, &syscall.Rlimit{Cur: l.Soft, Max: l.Hard}); err != nil {
			fail("rlimit "+strconv.Itoa(l.Resource), err)
		}
	}
	env := os.Environ()
	if h.ListenPID {
		env = append(env, "LISTEN_PID="+strconv.Itoa(os.Getpid()))
	}
	err := syscall.Exec(args[1], args[2:], env)
	fail("exec "+args[1], err)
}

// ExitExec is the exit status that systemd reports for a command that could not be
// executed (EXIT_EXEC in systemd.exec(5)).
const ExitExec = 203
