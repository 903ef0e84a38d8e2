package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
	"mypr/internal/rpc/readable"
)

// Shim is the supervisor's side of one shim.
type Shim struct {
	// Process is the shim itself.
	Process *Process
	conn    *rpc.Conn
}

// ShimEvents is told what happens in a shim, in order, from one goroutine.
type ShimEvents struct {
	Exit  func(ShimProcess)
	Empty func(starts int) // nothing is left of that many starts
	Gone  func()           // the connection ended
}

// StartShim starts a shim that listens on l, which stays the caller's. It does not
// wait until the shim runs.
func StartShim(l *os.File, exitFile string, ev ShimEvents) (*Shim, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "shim"), os.NewFile(uintptr(pair[1]), "shim")
	defer theirs.Close()
	p, _, err := Start(&Command{
		Path: selfExe, Args: []string{shimName, exitFile}, Env: []string{"GOMAXPROCS=1", "GOGC=50"}, Dir: "/",
		Stdio: [3]*os.File{nil, nil, os.Stderr}, Files: []*os.File{theirs, l}, CgroupFD: -1,
	})
	if err != nil {
		ours.Close()
		return nil, fmt.Errorf("cannot start a shim: %w", err)
	}
	sock, err := fileConn(ours)
	if err != nil {
		_ = p.Signal(syscall.SIGKILL)
		return nil, err
	}
	return newShim(p, sock, ev), nil
}

// AttachShim connects to the running shim p at its socket.
func AttachShim(ctx context.Context, p *Process, path string, ev ShimEvents) (*Shim, ShimState, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, ShimState{}, err
	}
	s := newShim(p, c.(*net.UnixConn), ev)
	if pid := s.conn.Peer().PID; pid != p.PID {
		s.Close()
		return nil, ShimState{}, fmt.Errorf("%s is served by pid %d, not by the shim %d", path, pid, p.PID)
	}
	var st ShimState
	if err := s.conn.Call(ctx, shimMethodState, nil, &st); err != nil {
		s.Close()
		return nil, ShimState{}, err
	}
	return s, st, nil
}

// ReadShimExit reads what a shim left behind that ended while no supervisor was there.
func ReadShimExit(path string) (ShimState, error) {
	var st ShimState
	b, err := os.ReadFile(path)
	if err != nil {
		return st, err
	}
	return st, json.Unmarshal(b, &st)
}

func newShim(p *Process, sock *net.UnixConn, ev ShimEvents) *Shim {
	s := &Shim{Process: p}
	s.conn = rpc.NewConn(sock, rpc.HandlerFunc(func(_ context.Context, r *rpc.Request) (any, error) {
		defer r.CloseFiles()
		switch r.Method {
		case shimEventExit:
			var p ShimProcess
			if err := r.Bind(&p); err == nil {
				ev.Exit(p)
			}
		case shimEventEmpty:
			var starts int
			if err := r.Bind(&starts); err == nil {
				ev.Empty(starts)
			}
		}
		return nil, nil
	}))
	go func() {
		<-s.conn.Done()
		ev.Gone()
	}()
	return s
}

// Start starts c in the shim and waits until it was executed or could not be (a
// *StepError). The tag comes back in the exit event.
func (s *Shim) Start(ctx context.Context, tag string, c *Command) (*Process, error) {
	req := shimStart{Tag: tag, Command: *c, Raw: keepRaw(c)}
	var send []*os.File
	for i, f := range c.Stdio {
		if f != nil {
			req.Stdio[i] = true
			send = append(send, f)
		}
	}
	send = append(send, c.Files...)
	var ans shimStarted
	files, err := s.conn.CallFiles(ctx, shimMethodStart, req, send, &ans)
	if err != nil {
		var e *rpc.Error
		if errors.As(err, &e) && e.Code == "exec" {
			step, _ := e.Details["step"].(string)
			errno, _ := e.Details["errno"].(float64)
			return nil, &StepError{Step: step, Errno: syscall.Errno(errno)}
		}
		return nil, err
	}
	if len(files) != 1 {
		return nil, errors.New("the shim sent no pidfd")
	}
	fd, err := readable.Dup(files[0])
	files[0].Close()
	if err != nil {
		return nil, err
	}
	return &Process{PID: ans.PID, StartTime: ans.StartTime, fd: fd}, nil
}

// Signal signals every process of the unit but those in except.
func (s *Shim) Signal(sig syscall.Signal, except ...int) error {
	return s.conn.Notify(shimMethodSignal, shimSignal{Signal: int(sig), Except: except})
}

// Kill kills everything, again and again until nothing is left (event Empty).
func (s *Shim) Kill() error { return s.conn.Notify(shimMethodKill, nil) }

// Freeze stops or continues every process of the unit.
func (s *Shim) Freeze(ctx context.Context, on bool) error {
	return s.conn.Call(ctx, shimMethodFreeze, on, nil)
}

// Close drops the connection; the shim goes on and Process stays the caller's.
func (s *Shim) Close() { _ = s.conn.Close() }
