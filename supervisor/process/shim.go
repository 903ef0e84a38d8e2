package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
)

// The shim (containment tier 3) is a small process per run of a unit. It is the
// subreaper of everything that the unit starts, so no double fork and no setsid gets
// out of its sight; it starts the unit's processes itself, reports how they ended, and
// sweeps until the kernel says that it has no child left. It outlives a dead
// supervisor: it goes on listening at its socket for a next one, and when the unit is
// empty before one came, it writes what it knows to its exit file and ends. A supervisor
// ends an empty shim with SIGKILL.
//
// Protocol, over internal/rpc, supervisor to shim:
//
//	start  shimStart (+files)  -> shimStarted (+pidfd)
//	state  nil                 -> ShimState
//	pids   nil                 -> []int
//	freeze bool                -> nil
//	signal shimSignal          (notification)
//	kill   nil                 (notification) kill everything, until nothing is left
//
// and shim to supervisor: exit (ShimProcess) and empty (int: how many starts it has
// seen, since one may be under way that it has not), as notifications.
const (
	shimMethodStart  = "start"
	shimMethodState  = "state"
	shimMethodPIDs   = "pids"
	shimMethodFreeze = "freeze"
	shimMethodSignal = "signal"
	shimMethodKill   = "kill"
	shimEventExit    = "exit"
	shimEventEmpty   = "empty"
)

type (
	shimStart struct {
		Tag     string  `json:"tag"`
		Command Command `json:"command"`
		Stdio   [3]bool `json:"stdio"` // which of the three come with the request, before Files
		// Raw has the strings of Command if one of them is not UTF-8, which JSON cannot carry.
		Raw *rawCommand `json:"raw,omitempty"`
	}
	rawCommand struct {
		Path, Dir []byte
		Args, Env [][]byte
	}
	shimStarted struct {
		PID       int    `json:"pid"`
		StartTime uint64 `json:"start_time"`
	}
	shimSignal struct {
		Signal int   `json:"signal"`
		Except []int `json:"except,omitempty"`
	}
	// ShimProcess is one process that a shim started, as long as the shim lives.
	ShimProcess struct {
		Tag       string `json:"tag"`
		PID       int    `json:"pid"`
		StartTime uint64 `json:"start_time"`
		Running   bool   `json:"running"`
		Exit      Exit   `json:"exit,omitzero"`
	}
	// ShimState is all that a shim knows.
	ShimState struct {
		Processes []ShimProcess `json:"processes"`
		Empty     bool          `json:"empty"`
		Starts    int           `json:"starts"`
	}
)

// Descriptors of a shim's process.
const (
	shimConnFD   = 3
	shimListenFD = 4
)

type shim struct {
	exitFile string
	done     chan struct{}

	mu       sync.Mutex // guards the fields below, and a start against the reaper
	procs    []*ShimProcess
	conn     *rpc.Conn // the supervisor, or nil
	starting int
	starts   int
	sweeping bool
	empty    bool
	ended    bool
}

func shimMain(args []string) {
	if len(args) != 1 {
		os.Exit(2)
	}
	s := &shim{exitFile: args[0], done: make(chan struct{}), empty: true}
	// Caught, not ignored: an ignored signal would stay ignored in what the shim starts.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)
	chld := make(chan os.Signal, 1)
	signal.Notify(chld, syscall.SIGCHLD)
	if err := BecomeSubreaper(); err != nil {
		fmt.Fprintln(os.Stderr, "mypr-shim:", err)
		os.Exit(1)
	}
	unix.CloseOnExec(shimConnFD)
	unix.CloseOnExec(shimListenFD)
	// Whoever connects sees the pid of the process that called listen last (SO_PEERCRED).
	if err := unix.Listen(shimListenFD, 8); err != nil {
		fmt.Fprintln(os.Stderr, "mypr-shim:", err)
		os.Exit(1)
	}
	lf := os.NewFile(shimListenFD, "shim")
	l, err := net.FileListener(lf)
	lf.Close()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mypr-shim:", err)
		os.Exit(1)
	}
	ul := l.(*net.UnixListener)
	ul.SetUnlinkOnClose(false)
	if first, err := fileConn(os.NewFile(shimConnFD, "supervisor")); err == nil {
		s.attach(first)
	}
	go func() {
		for {
			c, err := ul.AcceptUnix()
			if err != nil {
				return
			}
			s.attach(c)
		}
	}()
	for {
		select {
		case <-chld:
			s.reap()
		case <-s.done:
			os.Exit(0)
		}
	}
}

func fileConn(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("not a unix socket")
	}
	return u, nil
}

// attach makes c the supervisor's connection, in place of an older one.
func (s *shim) attach(sock *net.UnixConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := rpc.NewConn(sock, rpc.HandlerFunc(s.handle))
	// Once it has written down what it knows it is about to go, and there is the file.
	if uid := c.Peer().UID; uid != os.Getuid() && uid != 0 || s.ended {
		c.CloseAsync()
		return
	}
	if s.conn != nil {
		s.conn.CloseAsync()
	}
	s.conn = c
	go func() {
		<-c.Done()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.conn == c {
			s.conn = nil
			s.maybeEnd()
		}
	}()
}

// maybeEnd ends the shim when nothing is left and nobody is there to be told: what it
// knows goes to the exit file. The caller holds mu.
func (s *shim) maybeEnd() {
	if !s.empty || s.starting > 0 || s.ended || s.conn != nil {
		return
	}
	s.ended = true
	b, _ := json.Marshal(s.state())
	_ = os.WriteFile(s.exitFile+".new", b, 0o600)
	_ = os.Rename(s.exitFile+".new", s.exitFile)
	close(s.done)
}

func (s *shim) state() ShimState {
	st := ShimState{Empty: s.empty, Starts: s.starts, Processes: []ShimProcess{}}
	for _, p := range s.procs {
		st.Processes = append(st.Processes, *p)
	}
	return st
}

func (s *shim) handle(_ context.Context, r *rpc.Request) (any, error) {
	defer r.CloseFiles()
	switch r.Method {
	case shimMethodStart:
		return s.start(r)
	case shimMethodState:
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.state(), nil
	case shimMethodPIDs:
		pids, err := Descendants(os.Getpid())
		return pids, err
	case shimMethodFreeze:
		var on bool
		if err := r.Bind(&on); err != nil {
			return nil, err
		}
		sig := syscall.SIGCONT
		if on {
			sig = syscall.SIGSTOP
		}
		signalTree(sig, nil)
		return nil, nil
	case shimMethodSignal:
		var p shimSignal
		if err := r.Bind(&p); err != nil {
			return nil, err
		}
		signalTree(syscall.Signal(p.Signal), p.Except)
		return nil, nil
	case shimMethodKill:
		s.mu.Lock()
		s.sweeping = true
		s.mu.Unlock()
		s.reap()
		return nil, nil
	}
	return nil, rpc.Errorf(rpc.CodeInvalidRequest, "the shim has no method %q", r.Method)
}

// keepRaw returns nil when every string of c is UTF-8.
func keepRaw(c *Command) *rawCommand {
	text := utf8.ValidString(c.Path) && utf8.ValidString(c.Dir)
	r := &rawCommand{Path: []byte(c.Path), Dir: []byte(c.Dir)}
	list := func(from []string) (to [][]byte) {
		for _, s := range from {
			text = text && utf8.ValidString(s)
			to = append(to, []byte(s))
		}
		return to
	}
	if r.Args, r.Env = list(c.Args), list(c.Env); text {
		return nil
	}
	return r
}

func (r *rawCommand) restore(c *Command) {
	if r == nil {
		return
	}
	list := func(from [][]byte) (to []string) {
		for _, b := range from {
			to = append(to, string(b))
		}
		return to
	}
	c.Path, c.Dir, c.Args, c.Env = string(r.Path), string(r.Dir), list(r.Args), list(r.Env)
}

func (s *shim) start(r *rpc.Request) (any, error) {
	var p shimStart
	if err := r.Bind(&p); err != nil {
		return nil, err
	}
	c := p.Command
	c.CgroupFD = -1
	p.Raw.restore(&c)
	files := r.Files
	for i, present := range p.Stdio {
		if present {
			if len(files) == 0 {
				return nil, rpc.Errorf(rpc.CodeInvalidRequest, "descriptors are missing")
			}
			c.Stdio[i], files = files[0], files[1:]
		}
	}
	c.Files = files
	s.mu.Lock()
	s.starting++
	s.starts++
	proc, status, err := Start(&c)
	sp := &ShimProcess{Tag: p.Tag, Running: true}
	if err == nil {
		sp.PID, sp.StartTime = proc.PID, proc.StartTime
		s.procs = append(s.procs, sp)
		s.empty, s.sweeping = false, false
	}
	s.starting--
	if s.empty {
		s.tellEmpty()
	}
	s.maybeEnd()
	s.mu.Unlock()
	if err == nil && status != nil {
		err = ReadStatus(status)
	}
	if err != nil {
		var step *StepError
		if !errors.As(err, &step) {
			step = &StepError{Step: "exec " + c.Path}
			errors.As(err, &step.Errno)
		}
		if proc != nil {
			proc.Close()
		}
		return nil, &rpc.Error{Code: "exec", Message: err.Error(), Details: map[string]any{"step": step.Step, "errno": int(step.Errno)}}
	}
	return rpc.Reply{Value: shimStarted{PID: proc.PID, StartTime: proc.StartTime}, Files: []*os.File{os.NewFile(uintptr(proc.fd), "pidfd")}}, nil
}

// reap collects every dead child, reports it, and sweeps on if that was asked for.
func (s *shim) reap() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		var ws syscall.WaitStatus
		var ru syscall.Rusage
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, &ru)
		if err == syscall.EINTR {
			continue
		}
		if err == syscall.ECHILD {
			if !s.empty {
				s.empty = true
				s.tellEmpty()
			}
			s.maybeEnd()
			return
		}
		if err != nil || pid == 0 {
			if s.sweeping {
				sweep()
			}
			return
		}
		i := slices.IndexFunc(s.procs, func(p *ShimProcess) bool { return p.PID == pid && p.Running })
		if i < 0 {
			continue // an orphan
		}
		s.procs[i].Running, s.procs[i].Exit = false, exitOf(ws, &ru)
		if s.conn != nil {
			_ = s.conn.Notify(shimEventExit, s.procs[i])
		}
	}
}

// tellEmpty: the caller holds mu.
func (s *shim) tellEmpty() {
	if s.conn != nil {
		_ = s.conn.Notify(shimEventEmpty, s.starts)
	}
}

// sweep kills all descendants. They are stopped first, in passes until no new ones turn
// up, so that a tree that forks cannot grow faster than one pass over /proc. What
// slips through loses its parent, becomes a child of the shim, and is met by the next
// sweep, which the end of each child brings.
func sweep() {
	signalTree(syscall.SIGSTOP, nil)
	signalTree(syscall.SIGKILL, nil)
}

// signalTree signals every descendant but those in except, in passes until one brings
// nothing new.
func signalTree(sig syscall.Signal, except []int) {
	done := map[int]bool{}
	for _, pid := range except {
		done[pid] = true
	}
	self := os.Getpid()
	for range 20 {
		pids, err := Descendants(self)
		if err != nil {
			return
		}
		fresh := false
		for _, pid := range pids {
			if done[pid] {
				continue
			}
			done[pid], fresh = true, true
			// A descendant that ends becomes a zombie of ours or of its parent; its pid
			// can be another's only after a reap by that parent, between the pass and
			// this line. The pidfd and a second look at its ancestors close that gap.
			signalPID(pid, sig, func() bool { return IsDescendant(pid, self) })
		}
		if !fresh {
			return
		}
	}
}
