package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/supervisor/control"
)

// patience bounds every wait for something that must come.
const patience = 2 * time.Minute

// session is one workspace with a runtime of its own.
type session struct {
	bin  string
	root string // temporary directory of all
	dir  string // the workspace
	env  []string
	mark string // in the environment of all its processes
}

func newSession(bin string) (*session, error) {
	root, err := os.MkdirTemp("", "faults-")
	if err != nil {
		return nil, err
	}
	s := &session{bin: bin, root: root, dir: filepath.Join(root, "ws"), mark: "MYPR_FAULTS=" + filepath.Base(root)}
	for _, d := range []string{s.dir, filepath.Join(s.dir, ".mypr"), filepath.Join(root, "run")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(s.dir, ".mypr", "config.toml"), []byte("[python]\nplain = true\n"), 0o600); err != nil {
		return nil, err
	}
	// The start limits are for programs that cannot run, and this one is being killed more
	// often than a minute allows.
	for _, unit := range []string{"manager", "kernel"} {
		dir := filepath.Join(s.dir, ".mypr", "units", unit+".service.d")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(dir, "faults.conf"), []byte("[Unit]\nStartLimitIntervalSec=0\n"), 0o600); err != nil {
			return nil, err
		}
	}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "XDG_RUNTIME_DIR=") && !strings.HasPrefix(kv, "MYPR_") || strings.HasPrefix(kv, "MYPR_TIER=") {
			s.env = append(s.env, kv)
		}
	}
	s.env = append(s.env, "XDG_RUNTIME_DIR="+filepath.Join(root, "run"), s.mark)
	return s, nil
}

func (s *session) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, s.bin, args...)
	cmd.Dir, cmd.Env = s.dir, s.env
	return cmd
}

// cli runs a command line; the error has what it printed.
func (s *session) cli(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var errOut bytes.Buffer
	cmd := s.command(ctx, args...)
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("mypr-mcp %s: %w: %s%s", strings.Join(args, " "), err, out, errOut.String())
	}
	return string(out), err
}

func (s *session) paths() (control, runtime string, err error) {
	found, err := filepath.Glob(filepath.Join(s.root, "run", "mypr", "*.ctl"))
	if err != nil || len(found) != 1 {
		return "", "", fmt.Errorf("control sockets: %v, %v", found, err)
	}
	return found[0], strings.TrimSuffix(found[0], ".ctl") + ".sock", nil
}

// ask has one conversation with the supervisor.
func (s *session) ask(f func(context.Context, *control.Client) error) error {
	path, _, err := s.paths()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := control.Dial(ctx, path)
	if err != nil {
		return err
	}
	defer c.Close()
	return f(ctx, c)
}

// answers waits for a supervisor that answers. Nobody announces that to those outside: it
// is tried again whenever something changes beside the socket, or in the log, in which a
// supervisor says what it does when it has begun to listen.
func (s *session) answers() error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return os.NewSyscallError("inotify_init1", err)
	}
	changes := os.NewFile(uintptr(fd), "inotify")
	defer changes.Close()
	for _, dir := range []string{filepath.Join(s.root, "run", "mypr"), filepath.Join(s.dir, ".mypr")} {
		if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_MOVED_TO|unix.IN_MODIFY); err != nil {
			return os.NewSyscallError("inotify_add_watch "+dir, err)
		}
	}
	if err := changes.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	for buf := make([]byte, 16<<10); ; {
		err := s.ask(func(context.Context, *control.Client) error { return nil })
		if err == nil {
			return nil
		}
		if _, rerr := changes.Read(buf); rerr != nil {
			return errors.Join(err, rerr)
		}
	}
}

// target finds a process of the runtime: "supervisor" or a unit.
func (s *session) target(name string) (pid int, err error) {
	err = s.ask(func(ctx context.Context, c *control.Client) error {
		if name == "supervisor" {
			info, err := c.Info(ctx)
			pid = info.PID
			return err
		}
		list, err := c.List(ctx, false)
		for _, u := range list {
			if u.Name == name {
				pid = u.MainPID
			}
		}
		return err
	})
	if err == nil && pid == 0 {
		err = fmt.Errorf("%s has no process", name)
	}
	return pid, err
}

// kill sends SIGKILL and returns when the process has ended.
func kill(pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		return err
	}
	return died(fd, pid)
}

// died waits for the end of a process of which fd is the pidfd.
func died(fd, pid int) error {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(patience.Milliseconds()))
		if err == unix.EINTR {
			continue
		}
		if n != 1 {
			return errors.Join(err, fmt.Errorf("pid %d does not die", pid))
		}
		return nil
	}
}

// suspend sends SIGSTOP and returns when the process has stopped: until the thread that
// gets the signal runs, the others go on.
func suspend(pid int) error {
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		return err
	}
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err != nil || bytes.Contains(stat, []byte(") T ")) {
			return err
		}
	}
	return fmt.Errorf("pid %d does not stop", pid)
}

// processes lists what has the session's mark in its environment.
func (s *session) processes() (found []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range dirs {
		env, err := os.ReadFile(path)
		pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
		if err != nil || pid == os.Getpid() || !bytes.Contains(append([]byte{0}, env...), []byte("\x00"+s.mark+"\x00")) {
			continue
		}
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		found = append(found, fmt.Sprintf("%d %s", pid, bytes.ReplaceAll(args, []byte{0}, []byte{' '})))
	}
	return found
}

// cgroup is the directory of the supervisor's tree, "" in tier 3.
func (s *session) cgroup() (dir string) {
	_ = s.ask(func(ctx context.Context, c *control.Client) error {
		info, err := c.Info(ctx)
		dir = info.Cgroup
		return err
	})
	return dir
}

// front is an MCP client with its front end. Its methods but kill are one goroutine's.
type front struct {
	s   *session
	cmd *exec.Cmd
	in  io.WriteCloser
	out chan []byte // lines; closed at the end
	n   int
}

var errFrontEnded = errors.New("the front end ended")

func (s *session) front() (*front, error) {
	f := &front{s: s, cmd: s.command(context.Background(), "serve"), out: make(chan []byte, 64)}
	var err error
	if f.in, err = f.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := f.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(f.out)
		r := bufio.NewReaderSize(out, 1<<20)
		for {
			line, err := r.ReadBytes('\n')
			if err != nil {
				_ = f.cmd.Wait()
				return
			}
			f.out <- line
		}
	}()
	if _, err := f.request("initialize", map[string]any{"protocolVersion": "2025-11-25", "capabilities": map[string]any{}, "clientInfo": map[string]any{"name": "faults", "version": "1"}}); err != nil {
		return f, err
	}
	return f, f.send(map[string]any{"jsonrpc": "2.0", "method": "notifications/initialized"})
}

func (f *front) send(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err = f.in.Write(append(line, '\n')); err != nil {
		return errFrontEnded
	}
	return nil
}

func (f *front) request(method string, params any) (json.RawMessage, error) {
	f.n++
	if err := f.send(map[string]any{"jsonrpc": "2.0", "id": f.n, "method": method, "params": params}); err != nil {
		return nil, err
	}
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	for {
		select {
		case line, ok := <-f.out:
			if !ok {
				return nil, errFrontEnded
			}
			var m struct {
				ID     *int            `json:"id"`
				Result json.RawMessage `json:"result"`
				Error  json.RawMessage `json:"error"`
			}
			if err := json.Unmarshal(line, &m); err != nil {
				return nil, fmt.Errorf("not JSON: %q", line)
			}
			if m.ID == nil || *m.ID != f.n {
				continue
			}
			if m.Error != nil {
				return nil, fmt.Errorf("%s: %s", method, m.Error)
			}
			return m.Result, nil
		case <-timeout.C:
			return nil, fmt.Errorf("%s was not answered within %v", method, patience)
		}
	}
}

// toolError is an answer with isError.
type toolError struct{ text string }

func (e *toolError) Error() string { return e.text }

func (f *front) tool(name string, args map[string]any, into any) error {
	raw, err := f.request("tools/call", map[string]any{"name": name, "arguments": args})
	if err != nil {
		return err
	}
	var r struct {
		IsError bool                       `json:"isError"`
		Content []struct{ Text string }    `json:"content"`
		Meta    map[string]json.RawMessage `json:"_meta"`
	}
	if err := json.Unmarshal(raw, &r); err != nil {
		return err
	}
	text := ""
	if len(r.Content) > 0 {
		text = r.Content[0].Text
	}
	if payload := r.Meta["mypr/result"]; payload != nil && into != nil {
		if err := json.Unmarshal(payload, into); err == nil {
			if e, ok := into.(*api.ExecResult); !r.IsError || ok && e.ExecID != "" {
				return nil
			}
		}
	}
	if r.IsError {
		return &toolError{text}
	}
	return nil
}

func (f *front) init(client string) error {
	return f.tool("init", map[string]any{"client_id": client}, nil)
}

// cell is what became of a cell.
type cell struct {
	state, output, err string
	generation         string
	calls              int
}

// run runs a cell to its end and reads all of its output.
func (f *front) run(code, request string) (c cell, err error) {
	args := map[string]any{"code": code, "wait_ms": 20000}
	if request != "" {
		args["request_id"] = request
	}
	name := "execute"
	cursor := int64(0)
	for {
		var r api.ExecResult
		c.calls++
		if err := f.tool(name, args, &r); err != nil {
			return c, err
		}
		for _, e := range r.Output {
			if e.Type == "stream" || e.Type == "result" {
				c.output += e.Text
			}
		}
		cursor, c.state, c.generation = r.Cursor, r.State, r.ExecutionGeneration
		if r.Error != nil {
			c.err = *r.Error
		}
		if api.Terminal(r.State) && !r.HasMore {
			return c, nil
		}
		name, args = "poll", map[string]any{"exec_id": r.ExecID, "cursor": cursor, "wait_ms": 20000}
	}
}

// end closes the front end as a client does.
func (f *front) end() {
	f.in.Close()
	for range f.out {
	}
}

// slot is where a client keeps its front end, so that the fault can find it.
type slot struct {
	mu sync.Mutex
	f  *front
}

func (s *slot) set(f *front) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.f = f
}

func (s *slot) signal(sig syscall.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.f == nil {
		return nil
	}
	if err := s.f.cmd.Process.Signal(sig); !errors.Is(err, os.ErrProcessDone) { // its client is between two front ends
		return err
	}
	return nil
}
