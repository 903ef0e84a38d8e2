package workspace

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/internal/systemd"
)

// StartOptions says how to start a runtime. The zero value is right for most.
type StartOptions struct {
	Executable string        // default: this program
	Args       []string      // after "supervise -C DIR"
	Env        []string      // default: this process's environment; FillEnvironment is applied
	Origin     api.Origin    // recorded as where the runtime's environment came from
	Timeout    time.Duration // until the runtime is ready; default 180 s: a first start downloads Python packages
}

const (
	startTimeout = 180 * time.Second
	// lockGrace is how long a lock may be held without a reachable socket before that
	// is an error: a runtime that is stopping closes its sockets first.
	lockGrace = 5 * time.Second
	// stopGrace is what a supervisor that was not ready in time gets to stop its units.
	stopGrace = 10 * time.Second
)

// Ensure finds the workspace's runtime or starts one. Concurrent callers, of any
// process, end up with the same one.
func (w *Workspace) Ensure(ctx context.Context, opts StartOptions) (*Location, error) {
	l, err := w.Discover(ctx)
	var none *NotRunning
	var mute *Unreachable
	switch {
	case errors.As(err, &none):
		if l, err := w.activate(ctx); l != nil || err != nil {
			return l, err
		}
		if mended, err := w.mendSocketUnit(ctx); err != nil {
			return nil, err
		} else if mended {
			if l, err := w.activate(ctx); l != nil || err != nil {
				return l, err
			}
		}
		if none.Owner != "" {
			return nil, none
		}
	case !errors.As(err, &mute) && !l.ending():
		return l, err
	}
	l, err = w.Start(ctx, opts)
	if errors.As(err, &none) { // a container's session that was still ending
		if l, err := w.activate(ctx); l != nil || err != nil {
			return l, err
		}
	}
	return l, err
}

// Revive starts a supervisor in the place of one that died and that nobody else starts
// again. It is for the manager, which notices at once; what still runs is adopted.
func (w *Workspace) Revive(ctx context.Context, opts StartOptions) error {
	if opts.Timeout == 0 {
		opts.Timeout = startTimeout
	}
	lock, err := w.StartupLock(ctx)
	if err != nil {
		return err
	}
	defer lock.Close()
	d := &discovery{w: w, record: w.recorded()}
	if _, err := d.askSupervisor(ctx, w.Paths); err == nil {
		return nil // somebody was faster
	}
	return w.spawn(ctx, opts, lock)
}

// ending reports whether the runtime that was found is about to go.
func (l *Location) ending() bool {
	return l != nil && l.Supervisor != nil && l.Supervisor.ShuttingDown
}

// activate connects to the runtime socket although no runtime runs: when somebody
// listens there nevertheless, it is a service manager, which starts the runtime for
// the connection. Nil when nobody listens.
func (w *Workspace) activate(ctx context.Context) (*Location, error) {
	if checkRuntimeDir(w.RuntimeDir, false) != nil {
		return nil, nil
	}
	c, err := rpc.Dial(ctx, w.Socket, nil)
	if err != nil {
		return nil, ctx.Err()
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var s api.Status
	if err := c.Call(ctx, api.MethodStatus, api.StatusParams{}, &s); err != nil {
		return nil, rpc.Errorf(rpc.CodeUnavailable, "something listens at %s for %s, but the runtime did not start: %v", w.Socket, w.Dir, err).
			WithHint("mypr-mcp systemd status; journalctl --user -u 'mypr@*'")
	}
	l, err := w.Discover(ctx)
	if err == nil {
		l.Started = true
	}
	return l, err
}

// mendSocketUnit starts the workspace's socket unit again when it is enabled and has
// failed, as after too many starts in a short time: who enabled it wants systemd to run
// the session, and not another one beside it. One that was stopped stays so.
func (w *Workspace) mendSocketUnit(ctx context.Context) (mended bool, err error) {
	i, err := systemd.NewInstance(w.Dir, w.Socket, "")
	if err != nil || !i.Enabled() {
		return false, nil
	}
	m, err := systemd.Find(filepath.Dir(w.RuntimeDir))
	if err != nil || m.SameWorld() != nil {
		return false, nil
	}
	st, err := m.State(ctx, i)
	if err != nil || st.Socket != "failed" {
		return false, nil
	}
	if err := m.Again(ctx, i); err != nil {
		unit := "'" + strings.ReplaceAll(i.SocketUnit(), "'", `'\''`) + "'"
		return false, rpc.Errorf(rpc.CodeUnavailable, "systemd is to run the session of %s, but its socket has failed and cannot be started again: %v", w.Dir, err).
			WithHint("systemctl --user status %s says why; mypr-mcp systemd disable does without systemd", unit)
	}
	return true, nil
}

// Start looks once more, under startup.lock, and starts a runtime if there is none:
// "EXECUTABLE supervise -C DIR ARGS", with its output in .mypr/supervisor.log. Where the
// user's systemd can be reached it becomes a transient service, so that it outlives
// this process, its terminal, its process group and its cgroup; elsewhere it gets a
// session of its own, which outlives all but the last.
//
// The child inherits the startup lock and holds it until it has reported. So when ctx
// ends early, or this process is killed, the start goes on and the next caller waits
// for it. Only a start that is not ready within opts.Timeout is called off.
func (w *Workspace) Start(ctx context.Context, opts StartOptions) (*Location, error) {
	if opts.Timeout == 0 {
		opts.Timeout = startTimeout
	}
	if err := w.EnsureLayout(); err != nil {
		return nil, err
	}
	lctx, cancel := context.WithTimeout(ctx, opts.Timeout)
	defer cancel()
	lock, err := w.StartupLock(lctx)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	l, err := w.Discover(ctx)
	var mute *Unreachable
	if errors.As(err, &mute) || l.ending() {
		w.waitUnlocked(ctx)
		if ctx.Err() == nil { // also when it lives on: its sockets may have been made again
			l, err = w.Discover(ctx)
		}
	}
	var none *NotRunning
	if !errors.As(err, &none) || none.Owner != "" {
		return l, err
	}
	if err := w.PrepareRuntimeDir(); err != nil {
		return nil, err
	}
	if err := w.spawn(ctx, opts, lock); err != nil {
		return nil, err
	}
	if l, err = w.Discover(ctx); err != nil {
		return nil, err
	}
	l.Started = true
	return l, nil
}

// waitUnlocked waits for the manager and the supervisor to be gone, not for long.
func (w *Workspace) waitUnlocked(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lockGrace)
	defer cancel()
	for _, path := range []string{w.managerLock(), w.supervisorLock()} {
		l, err := AcquireLock(ctx, path)
		if err != nil {
			return
		}
		l.Close()
	}
}

// starterVariable tells the child what it inherited.
const starterVariable = "MYPR_STARTER"

type starterMessage struct {
	ReadyFD int        `json:"ready_fd,omitempty"`
	LockFD  int        `json:"lock_fd,omitempty"`
	Origin  api.Origin `json:"origin,omitzero"`
	// Socket is where a child that inherits nothing gets the rest: a message without
	// it, with the two descriptors attached.
	Socket string   `json:"socket,omitempty"`
	Env    []string `json:"env,omitempty"`
}

// report is the one line on the ready pipe.
type report struct {
	Ready bool       `json:"ready,omitempty"`
	Error *rpc.Error `json:"error,omitempty"`
}

func (w *Workspace) spawn(ctx context.Context, opts StartOptions, lock *Lock) error {
	exe := opts.Executable
	if exe == "" {
		exe = self()
	}
	env := opts.Env
	if env == nil {
		env = os.Environ()
	}
	env, _ = FillEnvironment(env)
	log, err := os.OpenFile(w.SupervisorLog(), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return rpc.Errorf(codeOf(err), "cannot write %s: %v", w.SupervisorLog(), cause(err)).WithHint("make it writable for you")
	}
	defer log.Close()
	logged, _ := log.Seek(0, io.SeekEnd)
	r, wr, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close() // ends the goroutine that reads it
	if m, err := systemd.Find(filepath.Dir(w.RuntimeDir)); err == nil && m.SameWorld() == nil {
		err := w.spawnService(ctx, m, exe, env, opts, lock, r, wr, logged)
		if !errors.Is(err, errNoService) {
			wr.Close()
			return err
		}
		fmt.Fprintf(log, "time=%s level=WARN msg=%q\n", time.Now().Format(time.RFC3339), err.Error()+"; the session ends with this login")
		logged, _ = log.Seek(0, io.SeekEnd)
	}
	message, err := json.Marshal(starterMessage{ReadyFD: 3, LockFD: 4, Origin: opts.Origin})
	if err != nil {
		return err
	}
	cmd := exec.Command(exe, append([]string{"supervise", "-C", w.Dir}, opts.Args...)...)
	cmd.Dir, cmd.Env = w.Dir, append(env, starterVariable+"="+string(message))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{wr, lock.File()}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// MCP clients leak descriptors to their servers. In a process that outlives them
	// they would keep some pipe from ever ending. (Linux 5.11; earlier ones leak.)
	_ = unix.CloseRange(3, uint(^uint32(0)), unix.CLOSE_RANGE_CLOEXEC)
	err = cmd.Start()
	wr.Close()
	if err != nil {
		return rpc.Errorf(rpc.CodeInternal, "cannot start %s: %v", exe, cause(err)).WithHint("check that the program is there and can be run")
	}
	// Waits for the child as long as it and this process live: it is our child, and
	// nobody else would reap it.
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	return w.await(ctx, opts, r, exited, func() {
		_ = cmd.Process.Signal(unix.SIGTERM)
		grace := time.NewTimer(stopGrace)
		defer grace.Stop()
		select {
		case <-exited:
		case <-grace.C:
			_ = cmd.Process.Kill()
			<-exited
		}
	}, logged)
}

// errNoService: the service manager could not even begin, so that nothing was started.
var errNoService = errors.New("no service could be started")

// spawnService starts the runtime as a transient service of the user's systemd. What a
// child would inherit is sent over a socket. It does not close wr.
func (w *Workspace) spawnService(ctx context.Context, m *systemd.Manager, exe string, env []string, opts StartOptions, lock *Lock, r, wr *os.File, logged int64) error {
	path := w.Stem() + ".start"
	_ = os.Remove(path) // of a starter that was killed; we hold the lock
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return errNoService
	}
	message, err := json.Marshal(starterMessage{Origin: opts.Origin, Env: env})
	hello, err2 := json.Marshal(starterMessage{Socket: path})
	if err := errors.Join(err, err2); err != nil {
		l.Close()
		return err
	}
	sent := make(chan bool, 1)
	go func() {
		c, err := l.AcceptUnix()
		l.Close() // unlinks it
		if err != nil {
			sent <- false
			return
		}
		defer c.Close()
		_, _, err = c.WriteMsgUnix(message[:1], unix.UnixRights(int(wr.Fd()), int(lock.File().Fd())), nil)
		if err == nil {
			_, err = c.Write(message[1:])
		}
		sent <- err == nil
	}()
	unit := "mypr-" + w.Hash[:12] + ".service"
	started := make(chan error, 1)
	// Not bound to ctx: the start goes on when this caller has gone.
	go func() {
		started <- m.Run(context.WithoutCancel(ctx), systemd.Transient{
			Unit: unit, Description: "Python session of " + w.Dir, Log: w.SupervisorLog(),
			Exec:   append([]string{exe, "supervise", "-C", w.Dir}, opts.Args...),
			Reload: []string{exe, "restart", "--keep-kernel", "-C", w.Dir},
			Env:    []string{starterVariable + "=" + string(hello)},
		})
	}()
	stop := func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*stopGrace)
		defer cancel()
		_ = m.Stop(ctx, unit)
	}
	select {
	case ok := <-sent:
		if !ok {
			stop()
			return errNoService
		}
	case err := <-started: // failed, as it never took what it needs
		l.Close()
		stop()
		return fmt.Errorf("%w: %w", errNoService, err)
	case <-ctx.Done():
		return fmt.Errorf("stopped waiting for the runtime of %s to start, which goes on: %w", w.Dir, context.Cause(ctx))
	}
	wr.Close() // only the service has it now
	exited := make(chan error, 1)
	go func() {
		if err := <-started; err != nil {
			exited <- err
		}
	}()
	err = w.await(ctx, opts, r, exited, stop, logged)
	if err != nil && ctx.Err() == nil {
		stop() // or systemd would start it again and again
	}
	return err
}

// await waits for the report on r of a child, or its end.
func (w *Workspace) await(ctx context.Context, opts StartOptions, r *os.File, exited <-chan error, stop func(), logged int64) error {
	reported := make(chan report, 1)
	go func() {
		defer close(reported)
		line, err := bufio.NewReader(io.LimitReader(r, 1<<20)).ReadBytes('\n')
		var rep report
		if err == nil && json.Unmarshal(line, &rep) == nil {
			reported <- rep
		}
	}()
	timeout := time.NewTimer(opts.Timeout)
	defer timeout.Stop()
	early := reported // nil once the pipe was closed without a report
	for {
		select {
		case rep, ok := <-early:
			if !ok {
				early = nil // it is about to exit; the status says more
				continue
			}
			if rep.Error != nil { // who looks next should find nothing of it
				grace := time.NewTimer(time.Second)
				defer grace.Stop()
				select {
				case <-exited:
				case <-grace.C:
				case <-ctx.Done():
				}
			}
			return rep.err()
		case err := <-exited:
			if early != nil {
				// What it wrote before it died is in the pipe. The deadline is for a
				// descendant that kept the pipe open.
				_ = r.SetReadDeadline(time.Now().Add(time.Second))
				if rep, ok := <-early; ok && rep.Error != nil {
					return rep.Error
				}
			}
			return w.startError(fmt.Sprintf("it ended while starting (%v)", exitText(err)), logged)
		case <-ctx.Done():
			return fmt.Errorf("stopped waiting for the runtime of %s to start, which goes on: %w", w.Dir, context.Cause(ctx))
		case <-timeout.C:
			stop()
			return w.startError(fmt.Sprintf("it was not ready within %v and was stopped", opts.Timeout), logged)
		}
	}
}

func (r report) err() error {
	switch {
	case r.Error != nil:
		return r.Error
	case !r.Ready:
		return rpc.Errorf(rpc.CodeInternal, "the runtime reported neither ready nor an error")
	}
	return nil
}

func exitText(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

// startError adds the end of what the child logged.
func (w *Workspace) startError(what string, from int64) error {
	e := rpc.Errorf(rpc.CodeUnavailable, "the runtime of %s could not be started: %s", w.Dir, what).WithHint("read %s", w.SupervisorLog())
	f, err := os.Open(w.SupervisorLog())
	if err != nil {
		return e
	}
	defer f.Close()
	const tail = 2 << 10
	if info, err := f.Stat(); err == nil && info.Size()-from > tail {
		from = info.Size() - tail
	}
	b, _ := io.ReadAll(io.LimitReader(io.NewSectionReader(f, from, tail), tail))
	text := strings.ToValidUTF8(strings.TrimSpace(string(b)), "\uFFFD")
	if text == "" {
		return e
	}
	e.Details = map[string]any{"log": text}
	e.Message += "; its last line: " + text[strings.LastIndexByte(text, '\n')+1:]
	return e
}

// self is a path that this program can be started by.
func self() string {
	exe, err := os.Executable()
	if err == nil {
		if _, err = os.Stat(exe); err == nil {
			return exe
		}
	}
	return "/proc/self/exe" // the file was replaced or removed since we were started
}

// Starter is the child's end of Start. Nil is valid and stands for a process that was
// started otherwise: from a shell, or by systemd.
type Starter struct {
	Origin api.Origin
	// Env is the environment that the runtime is to have; nil: the process has it.
	Env  []string
	pipe *os.File
	lock *os.File
}

// TakeStarter takes over what Start passed to this process, so that no child of ours
// inherits it. It must be called before the first child is started and at most once;
// it returns nil when Start did not start us.
func TakeStarter() *Starter {
	text := os.Getenv(starterVariable)
	os.Unsetenv(starterVariable)
	var m starterMessage
	if text == "" || json.Unmarshal([]byte(text), &m) != nil {
		return nil
	}
	if m.Socket != "" && receive(&m) != nil {
		return nil // of an earlier start of this service: the starter has long gone
	}
	if m.ReadyFD < 3 || m.LockFD < 3 {
		return nil
	}
	unix.CloseOnExec(m.ReadyFD)
	unix.CloseOnExec(m.LockFD)
	return &Starter{
		Origin: m.Origin, Env: m.Env,
		pipe: os.NewFile(uintptr(m.ReadyFD), "ready"),
		lock: os.NewFile(uintptr(m.LockFD), "startup.lock"),
	}
}

// receive gets what spawnService sends.
func receive(m *starterMessage) error {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: m.Socket, Net: "unix"})
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(probeTimeout))
	first, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(2*4))
	n, oobn, _, _, err := c.ReadMsgUnix(first, oob)
	if err != nil {
		return err
	}
	rest, err := io.ReadAll(c)
	if err != nil {
		return err
	}
	var fds []int
	if messages, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(messages) == 1 {
		fds, _ = unix.ParseUnixRights(&messages[0])
	}
	if err := json.Unmarshal(append(first[:n], rest...), m); err != nil || len(fds) != 2 {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return fmt.Errorf("the starter sent %d descriptors: %w", len(fds), err)
	}
	m.ReadyFD, m.LockFD = fds[0], fds[1]
	return nil
}

// Holds reports whether this process came with the startup lock. One that did not
// takes it itself before it looks for another runtime.
func (s *Starter) Holds() bool { return s != nil && s.lock != nil }

// Report tells whoever started us that the runtime is ready, or why it will never
// be, and lets go of the startup lock. Only the first call counts. That nobody
// listens any more is no error.
func (s *Starter) Report(failure error) {
	if s == nil || s.pipe == nil {
		return
	}
	r := report{Ready: failure == nil}
	if failure != nil {
		r.Error = rpc.AsError(failure)
	}
	var b bytes.Buffer
	if json.NewEncoder(&b).Encode(r) == nil {
		_, _ = s.pipe.Write(b.Bytes()) // EPIPE: the front end is gone
	}
	s.pipe.Close()
	s.lock.Close()
	s.pipe, s.lock = nil, nil
}
