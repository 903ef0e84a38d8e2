// Package e2e tests the built program from outside: real processes, real sockets,
// real MCP clients. It owns nothing of the product; every test has a runtime directory
// and a workspace of its own and ends by checking that no process, cgroup or socket of
// it is left.
package e2e

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
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
)

// bin is the program under test, cache what all tests share of downloads.
var bin, cache string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "mypr-e2e-")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		cache = filepath.Join(dir, "cache")
		// What is started here to be interrupted must not ignore that, even when this does.
		if signal.Ignored(syscall.SIGINT) {
			signal.Notify(make(chan os.Signal, 1), syscall.SIGINT)
		}
		// A make in a cell is nobody's sub-make, even when make runs these tests.
		for _, name := range []string{"MAKEFLAGS", "MFLAGS", "MAKELEVEL"} {
			os.Unsetenv(name)
		}
		if bin = os.Getenv("MYPR_BIN"); bin == "" {
			bin = filepath.Join(dir, "mypr-mcp")
			build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", bin, "mypr/cmd/mypr-mcp")
			build.Env = append(os.Environ(), "CGO_ENABLED=0")
			if out, err := build.CombinedOutput(); err != nil {
				fmt.Fprintf(os.Stderr, "%v\n%s", err, out)
				return 1
			}
		}
		return m.Run()
	}())
}

// patience is how long any single step may take before the test fails.
const patience = 60 * time.Second

// session is one workspace with its own runtime directory.
type session struct {
	t    *testing.T
	dir  string // the workspace
	run  string // XDG_RUNTIME_DIR
	mark string // in the environment of every process of this session
	env  []string
}

// newSession makes a workspace. Unless config is given its kernel is plain, so that
// no test but the one of the bootstrap needs a network.
func newSession(t *testing.T, config ...string) *session {
	t.Helper()
	if len(config) == 0 {
		config = []string{"[python]\nplain = true\n"}
	}
	// Short names: a socket's path has 107 bytes at most.
	top, err := os.MkdirTemp("", "my")
	if err != nil {
		t.Fatal(err)
	}
	s := &session{t: t, dir: filepath.Join(top, "ws"), run: filepath.Join(top, "r"), mark: "MYPR_E2E=" + filepath.Base(top)}
	for _, dir := range []string{s.run, filepath.Join(s.dir, ".mypr")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if text := strings.Join(config, ""); text != "" {
		s.write(".mypr/config.toml", text)
	}
	s.env = append(os.Environ(), "XDG_RUNTIME_DIR="+s.run, "XDG_CACHE_HOME="+cache, "XDG_CONFIG_HOME="+filepath.Join(top, "config"), s.mark)
	t.Cleanup(func() { s.cleanup(top) })
	return s
}

func (s *session) write(name, text string) {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o644); err != nil {
		s.t.Fatal(err)
	}
}

func (s *session) read(name string) string {
	s.t.Helper()
	data, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil {
		s.t.Fatal(err)
	}
	return string(data)
}

// cleanup stops the session and fails the test for whatever is left of it.
func (s *session) cleanup(top string) {
	var cgroup string
	if r := s.status(); r.Supervisor != nil {
		cgroup = r.Supervisor.Cgroup
	}
	if s.t.Failed() {
		s.dump()
	}
	out, code := s.cli("stop", "--force")
	if code != 0 {
		s.t.Errorf("stop --force: exit status %d\n%s", code, out)
	}
	s.nothingLeft(cgroup)
	for _, pid := range s.processes(s.mark) { // a failed test must not burden the machine
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err := os.RemoveAll(top); err != nil {
		s.t.Errorf("cannot remove the workspace: %v", err)
	}
}

// nothingLeft checks that no process but those of the test, no socket and no cgroup is left.
func (s *session) nothingLeft(cgroup string, but ...int) {
	s.t.Helper()
	for _, pid := range s.processes(s.mark) {
		if slices.Contains(but, pid) {
			continue
		}
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		s.t.Errorf("process left: %d %q", pid, bytes.ReplaceAll(line, []byte{0}, []byte{' '}))
	}
	if left, _ := filepath.Glob(filepath.Join(s.run, "mypr", "*")); len(left) > 0 {
		s.t.Errorf("left in the runtime directory: %q", left)
	}
	if cgroup != "" {
		for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", ""} {
			if _, err := os.Stat(filepath.Join(root, cgroup)); err == nil && filepath.Join(root, cgroup) != "/" {
				s.t.Errorf("cgroup left: %s", filepath.Join(root, cgroup))
			}
		}
	}
}

// dump prints the logs of a failed test.
func (s *session) dump() {
	logs, _ := filepath.Glob(filepath.Join(s.dir, ".mypr", "*.log"))
	for _, path := range logs {
		data, _ := os.ReadFile(path)
		if len(data) > 6000 {
			data = data[len(data)-6000:]
		}
		s.t.Logf("%s:\n%s", filepath.Base(path), data)
	}
	out, _ := s.cli("status", "--json=false")
	s.t.Logf("status:\n%s", out)
}

// processes lists the pids, but this test's, that have mark in their environment.
func (s *session) processes(mark string) []int {
	var pids []int
	dirs, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range dirs {
		env, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(append([]byte{0}, env...), append([]byte("\x00"+mark), 0)) {
			continue
		}
		pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
		if pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}

// command is the program with this session's environment, in its workspace.
func (s *session) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Dir, cmd.Env = s.dir, s.env
	return cmd
}

// cli runs a command line and returns both outputs and the exit status.
func (s *session) cli(args ...string) (string, int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	defer cancel()
	cmd := s.command(ctx, args...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		s.t.Errorf("mypr-mcp %q: %v, %v", args, err, ctx.Err())
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// ok is cli for a command line that must succeed; it returns standard output.
func (s *session) ok(args ...string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	defer cancel()
	cmd := s.command(ctx, args...)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		s.t.Fatalf("mypr-mcp %q: %v\n%s%s", args, err, out, errOut.String())
	}
	return string(out)
}

func (s *session) status() api.StatusReport {
	s.t.Helper()
	var r api.StatusReport
	out, code := s.cli("status")
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 {
		s.t.Errorf("status: exit %d, %v\n%s", code, err, out)
	}
	return r
}

// unitPID is the main process of a unit.
func (s *session) unitPID(name string) int {
	s.t.Helper()
	for _, u := range s.status().Units {
		if u.Name == name && u.MainPID != 0 {
			return u.MainPID
		}
	}
	s.t.Fatalf("no process of %s", name)
	return 0
}

// kill ends a process at once and returns when it is dead.
func (s *session) kill(pid int) {
	s.t.Helper()
	s.signal(pid, unix.SIGKILL)
}

// signal sends a signal that ends a process and returns when it is dead.
func (s *session) signal(pid int, sig unix.Signal) {
	s.t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		s.t.Fatalf("pidfd of %d: %v", pid, err)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil {
		s.t.Fatalf("signal %d: %v", pid, err)
	}
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(patience.Milliseconds()))
		if err == syscall.EINTR {
			continue
		}
		if n != 1 || err != nil {
			s.t.Fatalf("process %d does not die: %v", pid, err)
		}
		return
	}
}

// suspend stops a process and returns when it has stopped: until the thread that gets the
// signal runs, the others go on.
func (s *session) suspend(pid int) {
	s.t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		s.t.Fatal(err)
	}
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err != nil || bytes.Contains(stat, []byte(") T ")) {
			return
		}
	}
	s.t.Fatalf("process %d does not stop", pid)
}

// front is one MCP client with its own front end, speaking plain JSON lines.
type front struct {
	s   *session
	cmd *exec.Cmd
	in  io.WriteCloser

	mu     sync.Mutex // guards the fields below
	next   int
	wait   map[int]chan response
	err    error
	stderr bytes.Buffer
	notes  []json.RawMessage
	ended  chan struct{}
	closed bool // by the test itself
}

type response struct {
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	} `json:"error"`
}

// toolResult is what a tool call returned.
type toolResult struct {
	IsError bool
	Text    string
	Images  int
	Exec    api.ExecResult // of execute and poll
	Init    api.InitResult // of init
}

// serve starts a front end and shakes hands.
func (s *session) serve(args ...string) *front {
	s.t.Helper()
	f := s.serveRaw(args...)
	r := f.request("initialize", map[string]any{
		"protocolVersion": "2025-11-25", "capabilities": map[string]any{}, "clientInfo": map[string]any{"name": "e2e", "version": "1"},
	})
	if r.Error != nil {
		s.t.Fatalf("initialize: %+v", r.Error)
	}
	f.notify("notifications/initialized", nil)
	return f
}

// serveRaw starts a front end without a handshake.
func (s *session) serveRaw(args ...string) *front {
	s.t.Helper()
	f := &front{s: s, wait: map[int]chan response{}, ended: make(chan struct{})}
	f.cmd = s.command(context.Background(), append([]string{"serve"}, args...)...)
	f.cmd.Stderr = &f.stderr
	var err error
	if f.in, err = f.cmd.StdinPipe(); err != nil {
		s.t.Fatal(err)
	}
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := f.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go f.read(out)
	s.t.Cleanup(f.close)
	return f
}

func (f *front) read(out io.Reader) {
	r := bufio.NewReader(out)
	for {
		line, err := r.ReadBytes('\n')
		if err != nil {
			err = fmt.Errorf("the front end ended: %w", err)
			f.mu.Lock()
			f.err = err
			for _, ch := range f.wait {
				close(ch)
			}
			f.wait = nil
			f.mu.Unlock()
			_ = f.cmd.Wait()
			close(f.ended)
			return
		}
		var m struct {
			ID *int `json:"id"`
			response
		}
		if err := json.Unmarshal(line, &m); err != nil {
			f.s.t.Errorf("standard output carries what is no message: %q", line)
			continue
		}
		f.mu.Lock()
		if m.ID == nil {
			f.notes = append(f.notes, line)
		} else if ch := f.wait[*m.ID]; ch != nil {
			ch <- m.response
			delete(f.wait, *m.ID)
		} else {
			f.s.t.Errorf("an answer nobody waits for: %s", line)
		}
		f.mu.Unlock()
	}
}

// close ends the front end as a client does, by closing its input, and expects it
// to end by itself.
func (f *front) close() {
	if f.closed {
		return
	}
	f.closed = true
	f.in.Close()
	select {
	case <-f.ended:
	case <-time.After(patience):
		f.s.t.Error("the front end does not end with its input")
		_ = f.cmd.Process.Kill()
		<-f.ended
	}
}

func (f *front) send(v any) {
	f.s.t.Helper()
	line, err := json.Marshal(v)
	if err != nil {
		f.s.t.Fatal(err)
	}
	if _, err := f.in.Write(append(line, '\n')); err != nil {
		f.s.t.Fatalf("the front end does not read: %v\n%s", err, f.stderr.String())
	}
}

func (f *front) notify(method string, params any) {
	f.s.t.Helper()
	f.send(map[string]any{"jsonrpc": "2.0", "method": method, "params": params})
}

// begin sends a request; the channel gets the answer and is closed without one when
// the front end ends.
func (f *front) begin(method string, params any) (int, chan response) {
	f.s.t.Helper()
	ch := make(chan response, 1)
	f.mu.Lock()
	if f.wait == nil {
		f.mu.Unlock()
		f.s.t.Fatalf("%s: %v\n%s", method, f.err, f.stderr.String())
	}
	f.next++
	id := f.next
	f.wait[id] = ch
	f.mu.Unlock()
	f.send(map[string]any{"jsonrpc": "2.0", "id": id, "method": method, "params": params})
	return id, ch
}

func (f *front) request(method string, params any) response {
	f.s.t.Helper()
	_, ch := f.begin(method, params)
	return f.answer(method, ch)
}

func (f *front) answer(method string, ch chan response) response {
	f.s.t.Helper()
	select {
	case r, ok := <-ch:
		if !ok {
			f.s.t.Fatalf("%s: %v\n%s", method, f.err, f.stderr.String())
		}
		return r
	case <-time.After(patience):
		f.s.t.Fatalf("%s was not answered within %v", method, patience)
	}
	return response{}
}

func toolParams(name string, args map[string]any) map[string]any {
	if args == nil {
		args = map[string]any{}
	}
	return map[string]any{"name": name, "arguments": args}
}

func (f *front) tool(name string, args map[string]any) toolResult {
	f.s.t.Helper()
	_, ch := f.begin("tools/call", toolParams(name, args))
	return f.result(name, ch)
}

func (f *front) result(name string, ch chan response) toolResult {
	f.s.t.Helper()
	r := f.answer(name, ch)
	if r.Error != nil {
		f.s.t.Fatalf("%s: protocol error %+v", name, r.Error)
	}
	var res struct {
		IsError bool `json:"isError"`
		Content []struct {
			Type string `json:"type"`
			Text string `json:"text"`
		} `json:"content"`
		Meta map[string]json.RawMessage `json:"_meta"`
	}
	if err := json.Unmarshal(r.Result, &res); err != nil {
		f.s.t.Fatalf("%s: %v\n%s", name, err, r.Result)
	}
	t := toolResult{IsError: res.IsError}
	for i, c := range res.Content {
		switch {
		case c.Type == "image" && i > 0:
			t.Images++
		case c.Type == "text" && i == 0:
			t.Text = c.Text
		default:
			f.s.t.Errorf("%s: content block %d is %s: one text block, then images", name, i, c.Type)
		}
	}
	if payload := res.Meta["mypr/result"]; payload != nil {
		var into any = &t.Exec
		if name == "init" {
			into = &t.Init
		}
		if err := json.Unmarshal(payload, into); err != nil && !res.IsError {
			f.s.t.Fatalf("%s: %v\n%s", name, err, payload)
		}
	}
	return t
}

// init binds a client id ("" lets the runtime choose) and returns it.
func (f *front) init(id string) string {
	f.s.t.Helper()
	args := map[string]any{}
	if id != "" {
		args["client_id"] = id
	}
	r := f.tool("init", args)
	if r.IsError {
		f.s.t.Fatalf("init: %s", r.Text)
	}
	return r.Init.ClientID
}

// do runs a cell to its end and returns the last answer and all text that it wrote.
func (f *front) do(code string) (toolResult, string) {
	f.s.t.Helper()
	r := f.tool("execute", map[string]any{"code": code, "wait_ms": 30000})
	return f.finish(r)
}

// finish polls until the cell of r has ended.
func (f *front) finish(r toolResult) (toolResult, string) {
	f.s.t.Helper()
	text := output(r)
	deadline := time.Now().Add(5 * patience)
	for !r.IsError && (!api.Terminal(r.Exec.State) || r.Exec.HasMore) {
		if time.Now().After(deadline) {
			f.s.t.Fatalf("cell %s does not end: %s", r.Exec.ExecID, r.Text)
		}
		r = f.tool("poll", map[string]any{"exec_id": r.Exec.ExecID, "cursor": r.Exec.Cursor, "wait_ms": 30000})
		text += output(r)
	}
	return r, text
}

// must is do for a cell that must succeed; it returns its output without the last newline.
func (f *front) must(code string) string {
	f.s.t.Helper()
	r, text := f.do(code)
	if r.IsError || r.Exec.State != api.Succeeded {
		f.s.t.Fatalf("cell %q ended %q\n%s\n%s", code, r.Exec.State, r.Text, text)
	}
	return strings.TrimSuffix(text, "\n")
}

func output(r toolResult) string {
	var b strings.Builder
	for _, e := range r.Exec.Output {
		b.WriteString(e.Text)
	}
	return b.String()
}
