package notify

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Environment is the variable that names the notify socket.
const Environment = "NOTIFY_SOCKET"

// Send sends state ("READY=1", several assignments in lines of their own) with files
// attached to the service manager that NOTIFY_SOCKET names. Without one it does
// nothing and returns false. It does not wait until the message was handled: see
// Barrier.
func Send(state string, files ...*os.File) (bool, error) {
	path := os.Getenv(Environment)
	if path == "" {
		return false, nil
	}
	return true, SendTo(path, state, files...)
}

// SendTo is Send to the socket at path ("@" begins an abstract name).
func SendTo(path, state string, files ...*os.File) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			raw, err := f.SyscallConn()
			if err != nil {
				return err
			}
			if err := raw.Control(func(n uintptr) { fds[i] = int(n) }); err != nil {
				return err
			}
		}
		oob = unix.UnixRights(fds...)
	}
	if err := unix.Sendmsg(fd, []byte(state), oob, &unix.SockaddrUnix{Name: path}, unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("cannot notify %s: %w", path, err)
	}
	return nil
}

// Barrier waits until everything sent before was handled (BARRIER=1: the other side
// closes the descriptor that came with it).
func Barrier(timeout time.Duration) error {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return os.NewSyscallError("pipe", err)
	}
	r, w := os.NewFile(uintptr(p[0]), "barrier"), os.NewFile(uintptr(p[1]), "barrier")
	defer r.Close()
	sent, err := Send("BARRIER=1", w)
	w.Close()
	if err != nil || !sent {
		return err
	}
	if err := r.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := r.Read(make([]byte, 1)); os.IsTimeout(err) {
		return fmt.Errorf("the service manager did not handle the messages within %v: %w", timeout, err)
	}
	return nil
}

// Store asks the service manager to keep files under name (FDSTORE=1) and hand them
// back at the next start. With poll false they are kept also when their other end
// closes (FDPOLL=0; pidfds need it).
func Store(name string, poll bool, files ...*os.File) (bool, error) {
	state := "FDSTORE=1\nFDNAME=" + name
	if !poll {
		state += "\nFDPOLL=0"
	}
	return Send(state, files...)
}

// Unstore drops what is kept under name.
func Unstore(name string) (bool, error) { return Send("FDSTOREREMOVE=1\nFDNAME=" + name) }

// Watchdog is how often the service manager wants WATCHDOG=1 (ping at half of it), or
// 0: WATCHDOG_USEC, if WATCHDOG_PID is this process or not set.
func Watchdog() time.Duration {
	if pid := os.Getenv("WATCHDOG_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return 0
	}
	usec, err := strconv.ParseInt(strings.TrimSpace(os.Getenv("WATCHDOG_USEC")), 10, 64)
	if err != nil || usec <= 0 {
		return 0
	}
	return time.Duration(usec) * time.Microsecond
}
