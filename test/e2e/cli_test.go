package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"mypr/internal/api"
)

func TestExec(t *testing.T) {
	s := newSession(t)
	if out := s.ok("exec", "x = 6 * 7; x"); out != "42\n" {
		t.Errorf("printed %q", out)
	}
	s.write("script.py", "print('from a file')\nx")
	if out := s.ok("exec", "-f", "script.py"); out != "from a file\n42\n" {
		t.Errorf("printed %q", out)
	}
	cmd := s.command(t.Context(), "exec")
	cmd.Stdin = strings.NewReader("print('from stdin', x)")
	if out, err := cmd.Output(); err != nil || string(out) != "from stdin 42\n" {
		t.Errorf("printed %q, %v", out, err)
	}
	var r api.ExecResult
	if err := json.Unmarshal([]byte(s.ok("exec", "--json", "print('a'); 'b'")), &r); err != nil || r.State != api.Succeeded {
		t.Errorf("--json: %v, %+v", err, r)
	}
	// The two outputs stay apart, and the exit status is the cell's.
	cmd = s.command(t.Context(), "exec", "import sys; print('out'); print('err', file=sys.stderr); 1 / 0")
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	_ = cmd.Run()
	if cmd.ProcessState.ExitCode() != 1 || out.String() != "out\n" || !strings.HasPrefix(errOut.String(), "err\n") || !strings.Contains(errOut.String(), "ZeroDivisionError") {
		t.Errorf("exit %d, stdout %q, stderr %q", cmd.ProcessState.ExitCode(), out.String(), errOut.String())
	}
	s.write("script.py", "\ufeffprint('marked')\r\nx")
	if out := s.ok("exec", "-f", "script.py"); out != "marked\n42\n" {
		t.Errorf("with a byte order mark: %q", out)
	}
	s.write("script.py", "print('caf\xe9')")
	if out, code := s.cli("exec", "-f", "script.py"); code != 1 || !strings.Contains(out, "not UTF-8") {
		t.Errorf("exit %d, another encoding: %q", code, out)
	}
	// A long result, and a long message of an exception, are one line, in how many pages they came.
	if out := s.ok("exec", "'x' * 40_000"); out != "'"+strings.Repeat("x", 40_000)+"'\n" {
		t.Errorf("a long result has %d bytes in %d lines", len(out), strings.Count(out, "\n"))
	}
	if out, code := s.cli("exec", "print('open', end=''); raise ValueError('y' * 40_000)"); code != 1 || !strings.Contains(out, "open\nTraceback") || !strings.Contains(out, "\nValueError: "+strings.Repeat("y", 40_000)+"\n") {
		t.Errorf("exit %d, a long traceback of %d lines", code, strings.Count(out, "\n"))
	}
	if out, code := s.cli("exec", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"); code != 3 || !strings.Contains(out, "SIGKILL") || strings.Contains(out, "lost: lost") {
		t.Errorf("a cell that kills the kernel: exit %d\n%s", code, out)
	}
	if out, code := s.cli("exec", "--timeout", "300ms", "import asyncio; await asyncio.sleep(600)"); code != 124 || !strings.Contains(out, "goes on as") {
		t.Errorf("--timeout: exit %d\n%s", code, out)
	}
	s.ok("interrupt")
}

// Output arrives while the cell runs, and Ctrl-C stops the cell, not the session.
func TestExecStreamsAndInterrupts(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "y = 1")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := s.command(ctx, "exec", "import time\nprint('first', flush=True)\ntime.sleep(600)")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 6)
	if _, err := io.ReadFull(out, buf); err != nil || string(buf) != "first\n" {
		t.Fatalf("the first line does not come: %q, %v", buf, err)
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 130 {
		t.Errorf("exit %d", code)
	}
	if out := s.ok("exec", "y"); out != "1\n" {
		t.Errorf("memory: %q", out)
	}
}

// A cell behind one that holds Python waits, and says for what.
func TestExecBehindABlockingCell(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("a")
	f.must("import time")
	blocking := f.tool("execute", map[string]any{"code": "time.sleep(1000)", "wait_ms": 0})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := s.command(ctx, "exec", "40 + 2")
	var out bytes.Buffer
	cmd.Stdout = &out
	told, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(told).ReadString('\n')
	if !strings.Contains(line, "waiting: cell "+blocking.Exec.ExecID) || !strings.Contains(line, "mypr-mcp interrupt") {
		t.Errorf("it says %q (%v)", line, err)
	}
	s.ok("interrupt")
	if err := cmd.Wait(); err != nil || out.String() != "42\n" {
		t.Errorf("%v, %q", err, out.String())
	}
	f.finish(blocking)
}

func TestStatusWithoutRuntime(t *testing.T) {
	s := newSession(t, "")
	if err := os.Remove(s.dir + "/.mypr"); err != nil {
		t.Fatal(err)
	}
	r := s.status()
	if r.Healthy || r.ManagerAvailable || r.Workspace != s.dir || r.Problem == "" || r.Hint == "" {
		t.Errorf("%+v", r)
	}
	if _, err := os.Stat(s.dir + "/.mypr"); err == nil {
		t.Error("status wrote into the workspace")
	}
	for _, verb := range []string{"logs", "interrupt", "units"} {
		if out, code := s.cli(verb); code != 1 || !strings.Contains(out, "next:") {
			t.Errorf("%s without a runtime: exit %d\n%s", verb, code, out)
		}
	}
}

func TestStatusAndUnits(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "1")
	r := s.status()
	if !r.Healthy || r.Status == nil || r.Supervisor == nil {
		t.Fatalf("%+v", r)
	}
	text := s.ok("status", "--json=false")
	for _, want := range []string{s.dir, "healthy", "tier", "manager.service", "kernel.service", "active/running", "RESTARTS"} {
		if !strings.Contains(text, want) {
			t.Errorf("status does not show %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "\x1b") {
		t.Error("colours in a pipe")
	}
	if out := s.ok("units", "show", "kernel"); !strings.Contains(out, `"kernel.service"`) {
		t.Errorf("units show: %s", out)
	}
	if out, code := s.cli("units", "show", "nobody"); code != 1 || !strings.Contains(out, "nobody.service") || !strings.Contains(out, "next: mypr-mcp units") {
		t.Errorf("units show nobody: exit %d\n%s", code, out)
	}
	var kernel struct {
		Spec struct {
			Source []string `json:"source"`
		} `json:"spec"`
	}
	if err := json.Unmarshal([]byte(s.ok("units", "show", "kernel")), &kernel); err != nil || len(kernel.Spec.Source) == 0 {
		t.Errorf("units show kernel names no file: %v", err)
	}
	for verb, want := range map[string]string{"freeze": "kernel.service: frozen\n", "thaw": "kernel.service: thawed\n"} {
		if out := s.ok(verb, "kernel", "--json=false"); out != want {
			t.Errorf("%s says %q", verb, out)
		}
	}
	if out, code := s.cli("freeze", "runtime.socket"); code != 1 || !strings.Contains(out, "it has no processes\nnext: mypr-mcp units show runtime.socket") {
		t.Errorf("freeze runtime.socket: exit %d\n%s", code, out)
	}
	s.ok("thaw", "kernel")
	s.ok("units", "stop", "kernel")
	if out, code := s.cli("units", "start", "kernel"); code != 1 || !strings.Contains(out, "next: mypr-mcp reset") {
		t.Errorf("units start kernel: exit %d\n%s", code, out)
	}
	if err := os.MkdirAll(filepath.Join(s.dir, ".mypr/units/kernel.service.d"), 0o755); err != nil {
		t.Fatal(err)
	}
	s.write(".mypr/units/kernel.service.d/wrong.conf", "[Service]\nMemoryMax=4GX\n")
	for _, c := range []struct{ args, next string }{{"units reload", "next: correct them, then mypr-mcp units reload"}, {"reset", "next: mend that, then mypr-mcp reset"}} {
		if out, code := s.cli(strings.Fields(c.args)...); code != 1 || !strings.Contains(out, "wrong.conf:2") || !strings.Contains(out, c.next) {
			t.Errorf("%s with a wrong unit file: exit %d\n%s", c.args, code, out)
		}
	}
	before := s.unitPID("manager.service")
	s.ok("units", "restart", "manager")
	if s.unitPID("manager.service") == before {
		t.Error("the manager was not restarted")
	}
}

func TestLogs(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "print('logged')")
	s.ok("exec", "1") // by the time of its answer the end of the first connection is in the log
	seen := map[string]bool{}
	for line := range strings.Lines(s.ok("logs", "--limit", "200")) {
		var e api.LogEvent
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		seen[e.Event] = true
	}
	for _, want := range []string{"queued", "running", "output", "succeeded", "connected", "initialized", "disconnected"} {
		if !seen[want] {
			t.Errorf("no event %q in %v", want, seen)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := s.command(ctx, "logs", "--follow", "--limit", "1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(out)
	var first, e api.LogEvent
	if err := d.Decode(&first); err != nil {
		t.Fatal(err)
	}
	s.ok("exec", "--client", "follower", "1")
	for e.Event != "succeeded" || e.ClientID != "follower" {
		if err := d.Decode(&e); err != nil {
			t.Fatalf("followed to %+v: %v", e, err)
		}
	}
	_ = cmd.Process.Signal(syscall.SIGINT)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("following ended with status %d", code)
	}
}

func TestUsageErrors(t *testing.T) {
	s := newSession(t, "")
	for _, args := range [][]string{
		{"nonsense"}, {"--nonsense"}, {"exec", "1", "2"}, {"exec", "1", "-f", "x"}, {"logs", "--limit", "0"}, {"logs", "--limit", "201"},
		{"logs", "--limit", "x"}, {"interrupt", "a", "b"}, {"status", "x"}, {"units", "start"}, {"units", "nonsense"}, {"exec", "--timeout", "soon"},
		{"completion", "nosuch"}, {"completion", "bash", "x"}, {"help", "nosuch"}, {"help", "units", "nosuch"}, {"systemd", "nosuch"},
	} {
		if out, code := s.cli(args...); code != 2 || !strings.HasPrefix(out, "mypr-mcp: ") {
			t.Errorf("%q: exit %d\n%s", args, code, out)
		}
	}
	// What is right is not in cobra's own words: they come with the command that tells it.
	for _, args := range [][]string{{"--nonsense"}, {"exec", "1", "2"}, {"units", "nonsense"}, {"units", "start"}, {"freeze"}, {"nonsense"}} {
		if out, _ := s.cli(args...); !strings.Contains(out, "\nnext: mypr-mcp ") && !strings.Contains(out, "(mypr-mcp ") {
			t.Errorf("%q names no command to type next:\n%s", args, out)
		}
	}
	for _, args := range [][]string{{}, {"help"}, {"version"}, {"version", "--json"}, {"--version", "--json"}, {"completion"}, {"completion", "bash"}, {"help", "units", "start"}, {"exec", "--help"}} {
		if out, code := s.cli(args...); code != 0 || out == "" {
			t.Errorf("%q: exit %d\n%s", args, code, out)
		}
	}
	if out := s.ok("help"); strings.Contains(out, "supervise") {
		t.Error("help shows internal verbs")
	}
	if out, want := s.ok("--version"), s.ok("version"); out != want {
		t.Errorf("--version prints %q, version %q", out, want)
	}
}

// Who starts the server by hand is told what it waits for.
func TestServeOnATerminal(t *testing.T) {
	s := newSession(t, "")
	master, terminal, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := s.command(ctx, "serve")
	cmd.Stdin = terminal
	told, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	terminal.Close()
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(told).ReadString('\n')
	if !strings.Contains(line, "mypr-mcp exec") {
		t.Errorf("it says %q (%v)", line, err)
	}
	if _, err := master.WriteString("\x04"); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// A shell offers the names of what there is, of a session that runs.
func TestCompletion(t *testing.T) {
	s := newSession(t)
	if out := s.ok("__complete", "units", "show", ""); strings.Contains(out, "manager") {
		t.Errorf("without a session: %s", out)
	}
	if r := s.status(); r.Supervisor != nil {
		t.Error("a completion started the session")
	}
	_, id, _ := strings.Cut(s.background(), "goes on as ")
	id, _, _ = strings.Cut(id, "\n")
	for _, c := range []struct{ args, word string }{
		{"units show ", "kernel.service\tPython kernel"}, {"units restart man", "manager.service\t"}, {"freeze k", "kernel.service\t"}, {"interrupt ", id + "\t"},
	} {
		out := ""
		for n := 0; n < 60 && !strings.Contains(out, c.word); n++ { // it does not wait for a busy machine
			out = s.ok(append([]string{"__complete"}, strings.Split(c.args, " ")...)...)
		}
		if id == "" || !strings.Contains(out, c.word) || strings.HasSuffix(c.args, "man") && strings.Contains(out, "kernel") {
			t.Errorf("%q: %q is not in %q", c.args, c.word, out)
		}
	}
	s.ok("interrupt", id)
}

// background starts a cell that goes on, and returns what exec said.
func (s *session) background() string {
	s.t.Helper()
	out, code := s.cli("exec", "--timeout", "300ms", "import asyncio; await asyncio.sleep(600)")
	for code == 124 && !strings.Contains(out, "goes on as") { // the session was not there in time
		out, code = s.cli("exec", "--timeout", "300ms", "import asyncio; await asyncio.sleep(600)")
	}
	return out
}

// A start says what it waits for when that is true, and a restart what it kept.
func TestStartAndRestartSayWhatIsTrue(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "1")
	s.ok("stop")
	if out, code := s.cli("exec", "1"); code != 0 || strings.Contains(out, "environment is being prepared") {
		t.Errorf("exit status %d\n%s", code, out)
	}
	if out := s.ok("restart", "--keep-kernel", "--json=false"); !strings.Contains(out, "memory is kept") {
		t.Errorf("with a kernel: %s", out)
	}
	if out := s.ok("restart", "--json=false"); !strings.Contains(out, "memory is new") {
		t.Errorf("with a kernel: %s", out)
	}
	for _, c := range [][]string{{"restart", "--keep-kernel"}, {"restart"}} {
		s.ok("exec", "1") // the restart before this starts a kernel in its own time
		s.ok("units", "stop", "kernel")
		for end := time.Now().Add(patience); time.Now().Before(end); { // the manager is told of it a moment later
			if r := s.status(); r.Status != nil && r.Status.Generation == "" {
				break
			}
		}
		if out := s.ok(append(c, "--json=false")...); !strings.Contains(out, "there was no Python kernel") || strings.Contains(out, "memory") {
			t.Errorf("%q without a kernel: %s", c, out)
		}
	}
}
