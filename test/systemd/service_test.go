package systemd

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/workspace"
	"mypr/supervisor/cgroup"
	"mypr/test/counterpart"
)

// slice is where all sessions of the user are.
var slice = base + "/manager/app.slice/app-mypr.slice"

// session is a workspace.
type session struct {
	t   *testing.T
	dir string
	w   *workspace.Workspace
	env []string // of what is run in it
}

func newSession(t *testing.T, env ...string) *session {
	t.Helper()
	s := &session{t: t, dir: filepath.Join(t.TempDir(), "my work-space"), env: env}
	if err := os.MkdirAll(filepath.Join(s.dir, ".mypr"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.dir, ".mypr", "config.toml"), []byte("[python]\nplain = true\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.w, err = workspace.Open(s.dir); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *session) cli(args ...string) (string, error) {
	s.t.Helper()
	return command(s.t, s.env, bin, append([]string{"-C", s.dir, "--json=false"}, args...)...)
}

// last is the last line: warnings come before it.
func last(out string) string {
	out = strings.TrimSpace(out)
	return out[strings.LastIndexByte(out, '\n')+1:]
}

func (s *session) ok(args ...string) string {
	s.t.Helper()
	out, err := s.cli(args...)
	if err != nil {
		s.t.Fatalf("mypr-mcp %q: %v\n%s\n%s", args, err, out, s.log())
	}
	if args[0] == "exec" {
		return last(out)
	}
	return strings.TrimSpace(out)
}

func (s *session) log() string {
	j, _ := command(s.t, nil, "journalctl", "--no-pager", "-q", "-o", "cat", "-n", "60")
	b, _ := os.ReadFile(s.w.SupervisorLog())
	m, _ := os.ReadFile(filepath.Join(s.w.Root, "manager.log"))
	st, _ := s.cli("status")
	return fmt.Sprintf("journal:\n%s\nsupervisor.log:\n%s\nmanager.log:\n%s\nstatus:\n%s", j, b, m, st)
}

func (s *session) status() *api.StatusReport {
	s.t.Helper()
	out, err := command(s.t, s.env, bin, "-C", s.dir, "--json", "status")
	var r api.StatusReport
	if err != nil || json.Unmarshal([]byte(out), &r) != nil {
		s.t.Fatalf("status: %v\n%s", err, out)
	}
	return &r
}

// enabled is a session that systemd runs.
func enabled(t *testing.T) *session {
	t.Helper()
	s := newSession(t)
	out := s.ok("systemd", "enable")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(s.log())
		}
		s.ok("systemd", "disable")
		s.nothingLeft()
	})
	if !strings.Contains(out, "wrote ") || !strings.Contains(out, "started "+s.socket()) {
		t.Fatalf("enable said:\n%s", out)
	}
	return s
}

func (s *session) instance() string {
	return must(s.t, "systemd-escape", "--path", s.dir)
}
func (s *session) service() string { return "mypr@" + s.instance() + ".service" }
func (s *session) socket() string  { return "mypr@" + s.instance() + ".socket" }
func (s *session) scope() string   { return filepath.Join(slice, "mypr-"+s.w.Hash[:12]+".scope") }

func (s *session) mainPID() int {
	s.t.Helper()
	pid, err := strconv.Atoi(property(s.t, s.service(), "MainPID"))
	if err != nil {
		s.t.Fatal(err)
	}
	return pid
}

// nothingLeft waits until no process of the session is left, and fails for its cgroups.
func (s *session) nothingLeft() {
	s.t.Helper()
	for _, dir := range []string{s.scope(), slice} {
		if !empties(dir) {
			out, _ := command(s.t, nil, "systemd-cgls", "--no-pager", dir)
			s.t.Errorf("processes are left in %s:\n%s", dir, out)
		}
	}
}

// empties waits for the end of what is in a group.
func empties(dir string) bool {
	fd, err := unix.Open(filepath.Join(dir, "cgroup.events"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return true
	}
	defer unix.Close(fd)
	for deadline := time.Now().Add(patience / 3); time.Now().Before(deadline); {
		var b [128]byte
		n, err := unix.Pread(fd, b[:], 0)
		if err != nil || strings.Contains(string(b[:n]), "populated 0") {
			return true
		}
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, int(time.Until(deadline).Milliseconds())+1)
	}
	return !cgroup.Populated(dir)
}

// end returns a function that waits for the end of a process.
func end(t *testing.T, pid int) func() {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatalf("pidfd of %d: %v", pid, err)
	}
	return func() {
		t.Helper()
		defer unix.Close(fd)
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(patience.Milliseconds()))
			if err == unix.EINTR {
				continue
			}
			if n != 1 {
				t.Fatalf("process %d does not end", pid)
			}
			return
		}
	}
}

func kill(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	wait := end(t, pid)
	if err := syscall.Kill(pid, sig); err != nil {
		t.Fatal(err)
	}
	wait()
}

// front is a running "mypr-mcp serve".
type front struct {
	s      *session
	in     io.WriteCloser
	client *counterpart.Client
}

func (s *session) serve() *front {
	s.t.Helper()
	cmd := exec.Command(bin, "serve", "-C", s.dir)
	cmd.Env, cmd.Dir, cmd.Stderr = append(os.Environ(), s.env...), "/", os.Stderr
	f := s.front(cmd)
	s.t.Cleanup(func() {
		f.in.Close()
		_ = cmd.Wait()
	})
	return f
}

// front starts the command, of which the caller waits for the end, and initializes it.
func (s *session) front(cmd *exec.Cmd) *front {
	s.t.Helper()
	f := &front{s: s}
	in, err := cmd.StdinPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	f.in = in
	if f.client, err = counterpart.NewClient(in, out); err != nil {
		in.Close()
		_ = cmd.Wait()
		s.t.Fatal(err)
	}
	f.tool("init", map[string]any{})
	return f
}

func (f *front) tool(name string, args map[string]any) string {
	f.s.t.Helper()
	r, err := f.client.Tool(name, args)
	if err != nil {
		f.s.t.Fatal(err)
	}
	return string(r)
}

// runs runs a cell and wants text in the answer.
func (f *front) runs(code, want string) string {
	f.s.t.Helper()
	r := f.tool("execute", map[string]any{"code": code, "wait_ms": 30000})
	if !strings.Contains(r, want) || strings.Contains(r, `"isError":true`) {
		f.s.t.Fatalf("%q: %s; wanted %q\n%s", code, r, want, f.s.log())
	}
	return r
}

const mark = "memory-is-kept"

func (f *front) remembers() {
	f.s.t.Helper()
	f.runs("print(x)", mark)
}

func TestUnitFiles(t *testing.T) {
	s := enabled(t)
	dir := filepath.Join(os.Getenv("HOME"), ".config", "systemd", "user")
	if out, err := command(t, nil, "systemd-analyze", "--user", "verify", filepath.Join(dir, s.socket()), filepath.Join(dir, s.service())); err != nil || strings.TrimSpace(out) != "" {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	printed := s.ok("systemd", "print")
	for _, name := range []string{"mypr@.service", "mypr@.socket", s.socket() + ".d/workspace.conf"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !strings.Contains(printed, "# "+filepath.Join(dir, name)+"\n"+strings.TrimSpace(string(b))) {
			t.Errorf("print differs from what enable wrote to %s: %v\n%s", name, err, printed)
		}
	}
	if out := s.ok("systemd", "status"); !strings.Contains(out, "enabled, active at "+s.w.Socket) || !strings.Contains(out, "inactive (dead)") {
		t.Errorf("status: %s", out)
	}
	if again := s.ok("systemd", "enable"); strings.Contains(again, "wrote") {
		t.Errorf("a second enable: %s", again)
	}
	// Neither started the session, and nor does asking for it.
	if r := s.status(); r.Supervisor != nil || property(t, s.service(), "ActiveState") != "inactive" {
		t.Errorf("status started the session: %+v", r)
	}
}

func TestFirstConnectionStarts(t *testing.T) {
	s := enabled(t)
	began := time.Now()
	f := s.serve()
	f.runs("x = '"+mark+"'; 6 * 7", "42")
	t.Logf("from connect to the first result: %v", time.Since(began).Round(time.Millisecond))
	if st := property(t, s.service(), "ActiveState"); st != "active" {
		t.Errorf("the service is %s", st)
	}
	r := s.status()
	if r.Supervisor.Mode != "systemd" || !strings.HasPrefix(r.Supervisor.Cgroup, s.scope()) {
		t.Errorf("supervisor: %+v", r.Supervisor)
	}
	if got := s.ok("exec", "x"); !strings.Contains(got, mark) {
		t.Errorf("exec: %s", got)
	}
}

func TestStatusLine(t *testing.T) {
	s := enabled(t)
	f := s.serve()
	f.runs("1", "1")
	// The manager updates it within a second; a cell that runs longer is in it.
	f.tool("execute", map[string]any{"code": "import asyncio; await asyncio.sleep(3600)", "wait_ms": 0})
	text := ""
	for end := time.Now().Add(patience); !strings.Contains(text, "1 clients, 1 cells, kernel ready ") && time.Now().Before(end); {
		text = property(t, s.service(), "StatusText")
	}
	if !strings.Contains(text, "1 clients, 1 cells, kernel ready ") {
		t.Errorf("STATUS= is %q", text)
	}
	s.ok("interrupt")
}

func TestRestartReloadAndCrashes(t *testing.T) {
	s := enabled(t)
	f := s.serve()
	f.runs("x = '"+mark+"'", "")
	generation := s.status().Status.Generation
	kept := func(what string, newPID bool, before int) {
		t.Helper()
		f.remembers()
		if got := s.status().Status.Generation; got != generation {
			t.Errorf("%s: generation %s became %s", what, generation, got)
		}
		pid := s.mainPID()
		if newPID == (pid == before) {
			t.Errorf("%s: pid %d became %d", what, before, pid)
		}
		f.runs("int(open('/proc/self/timerslack_ns').read())", "50000")
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/timerslack_ns", pid)); os.Getuid() == 0 && string(b) != "1000000\n" {
			t.Errorf("%s: timer slack %q, %v", what, b, err)
		}
	}
	pid := s.mainPID()
	began := time.Now()
	systemctl(t, "restart", s.service())
	kept("restart", true, pid)
	t.Logf("restart and a cell: %v", time.Since(began).Round(time.Millisecond))

	pid = s.mainPID()
	manager := s.status().Status.PID
	began = time.Now()
	systemctl(t, "reload", s.service())
	kept("reload", false, pid)
	t.Logf("reload and a cell: %v", time.Since(began).Round(time.Millisecond))
	if s.status().Status.PID == manager {
		t.Error("reload left the manager")
	}

	for i := range 3 {
		pid = s.mainPID()
		began = time.Now()
		kill(t, pid, syscall.SIGKILL)
		f.remembers()
		s.status() // answered by the next supervisor
		t.Logf("SIGKILL %d to the answer of the next one: %v", i, time.Since(began).Round(time.Millisecond))
		kept("SIGKILL", true, pid)
	}
	pid = s.mainPID()
	systemctl(t, "daemon-reload")
	kept("daemon-reload", false, pid)
	systemctl(t, "daemon-reexec")
	kept("daemon-reexec", false, pid)
	kill(t, pid, syscall.SIGKILL)
	s.status()
	kept("SIGKILL after daemon-reexec", true, pid)
	pid = s.mainPID()
	kill(t, pid, syscall.SIGTERM) // from a person: nobody asked systemd to stop
	s.status()
	kept("SIGTERM", true, pid)

	// Descriptors do not pile up, and none is lost: a shell's pty lives through it.
	stored := property(t, s.service(), "NFileDescriptorStore")
	for range 2 {
		pid = s.mainPID()
		kill(t, pid, syscall.SIGKILL)
		s.status()
	}
	f.remembers()
	if now := property(t, s.service(), "NFileDescriptorStore"); now != stored {
		t.Errorf("%s stored descriptors became %s", stored, now)
	}
	// The manager may die as well.
	kill(t, s.status().Status.PID, syscall.SIGKILL)
	f.remembers()
}

func TestWatchdog(t *testing.T) {
	s := enabled(t)
	s.dropIn("WatchdogSec=5s")
	f := s.serve()
	f.runs("x = '"+mark+"'", "")
	pid := s.mainPID()
	wait := end(t, pid)
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	wait()
	s.status()
	f.remembers()
	if s.mainPID() == pid {
		t.Error("the same supervisor")
	}
}

// dropIn sets something in [Service].
func (s *session) dropIn(text string) {
	s.t.Helper()
	dir := filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "systemd", "user", s.service()+".d")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		s.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "test.conf"), []byte("[Service]\n"+text+"\n"), 0o644); err != nil {
		s.t.Fatal(err)
	}
	systemctl(s.t, "daemon-reload")
	s.t.Cleanup(func() { _ = os.RemoveAll(dir) })
}

func TestStopInEveryState(t *testing.T) {
	// A job that ignores SIGTERM, below a kernel that has memory.
	const stubborn = "import subprocess; p = subprocess.Popen(['sh', '-c', 'trap \"\" TERM; echo on; sleep 1000'], stdout=subprocess.PIPE, start_new_session=True); p.stdout.readline()"
	for _, c := range []struct {
		name, dropIn, sub string
		kill              bool
	}{
		{"running", "", "running", false},
		{"waiting for its restart", "RestartSec=300s", "auto-restart", true},
		{"failed", "Restart=no", "failed", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := enabled(t)
			if c.dropIn != "" {
				s.dropIn(c.dropIn)
			}
			f := s.serve()
			f.runs(stubborn, "")
			if c.kill {
				kill(t, s.mainPID(), syscall.SIGKILL)
			}
			if sub := property(t, s.service(), "SubState"); sub != c.sub {
				t.Fatalf("the service is %s", sub)
			}
			if !cgroup.Populated(s.scope()) {
				t.Fatal("nothing runs in the scope")
			}
			systemctl(t, "stop", s.service())
			s.nothingLeft()
			// It waits for what systemd still has to do. Mostly the scope has gone by then.
			_, _ = command(t, nil, "systemctl", "--user", "stop", "--", filepath.Base(s.scope()))
			if _, err := os.Stat(s.scope()); err == nil {
				t.Error("the scope's group is left")
			}
			if st := property(t, s.socket(), "ActiveState"); st != "active" {
				t.Errorf("the socket is %s", st)
			}
			if st := property(t, s.service(), "ActiveState"); st != "inactive" && c.sub != "failed" {
				t.Errorf("the service is %s: an idle client started it again?", st)
			}
			// The next call starts a new session, and says what was lost.
			r := f.tool("execute", map[string]any{"code": "'p' in globals()", "wait_ms": 30000})
			if !strings.Contains(r, "NOTICE") {
				t.Errorf("the call after the stop: %s\n%s", r, s.log())
			}
			if strings.Contains(r, "nothing of it was run") { // it came before the loss was known
				r = f.tool("execute", map[string]any{"code": "'p' in globals()", "wait_ms": 30000})
			}
			if !strings.Contains(r, "False") {
				t.Errorf("memory after the stop: %s\n%s", r, s.log())
			}
		})
	}
}

func TestStopByTheCommandLine(t *testing.T) {
	s := enabled(t)
	s.ok("exec", "x = 1")
	if out := s.ok("stop"); !strings.Contains(out, "stopped") {
		t.Errorf("stop: %s", out)
	}
	s.nothingLeft()
	if st := property(t, s.service(), "ActiveState"); st != "inactive" {
		t.Errorf("the service is %s", st)
	}
	if got := s.ok("exec", "'x' in globals()"); got != "False" {
		t.Errorf("after the stop: %s", got)
	}
}

// A socket that hit a limit is started again by the next call: the session is systemd's, as
// was asked for, and not one beside it that a stop of the unit would not reach.
func TestFailedSocketIsStartedAgain(t *testing.T) {
	s := enabled(t)
	dropIn := filepath.Join(os.Getenv("HOME"), ".config", "systemd", "user", s.socket()+".d", "limit.conf")
	if err := os.WriteFile(dropIn, []byte("[Unit]\nStartLimitIntervalSec=1h\nStartLimitBurst=2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	systemctl(t, "daemon-reload")
	for n := 0; property(t, s.socket(), "ActiveState") != "failed"; n++ {
		if n == 10 {
			t.Fatal("the socket does not fail")
		}
		systemctl(t, "stop", s.socket())
		_, _ = command(t, nil, "systemctl", "--user", "start", s.socket())
	}
	s.ok("exec", "x = 1")
	if pid := s.mainPID(); pid == 0 || pid != s.status().Supervisor.PID {
		t.Errorf("the service's process is %d, the session's %d", pid, s.status().Supervisor.PID)
	}
	systemctl(t, "stop", s.service())
	s.nothingLeft()
	if err := os.Remove(dropIn); err != nil {
		t.Fatal(err)
	}
}

func TestFiftyClientsAtOnce(t *testing.T) {
	s := enabled(t)
	var wg sync.WaitGroup
	errs := make([]string, 50)
	began := time.Now()
	for i := range errs {
		wg.Go(func() {
			out, err := command(t, nil, bin, "-C", s.dir, "--json=false", "exec", "--client", fmt.Sprint("c", i), strconv.Itoa(i)+" + 1000")
			if err != nil || !strings.HasSuffix(strings.TrimSpace(out), strconv.Itoa(i+1000)) {
				errs[i] = fmt.Sprintf("%v: %s", err, out)
			}
		})
	}
	wg.Wait()
	t.Logf("50 clients: %v", time.Since(began).Round(time.Millisecond))
	for i, e := range errs {
		if e != "" {
			t.Errorf("client %d: %s", i, e)
		}
	}
	if n := property(t, s.service(), "NRestarts"); n != "0" {
		t.Errorf("%s restarts", n)
	}
}

func TestJournal(t *testing.T) {
	s := enabled(t)
	s.ok("exec", "1")
	kernel := s.status().Status.Generation
	s.ok("stop")
	// Following, it waits for what journald has not written yet.
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "journalctl", "--user", "--no-pager", "-q", "-f", "-n", "all", "-o", "json", "-u", s.service(), "MYPR_WORKSPACE="+s.dir)
	pipe, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		cancel()
		_ = cmd.Wait()
	}()
	units, invocations := map[string]bool{}, map[string]bool{}
	out := ""
	for lines := bufio.NewScanner(pipe); !strings.Contains(out, "supervisor ends") && lines.Scan(); {
		line := lines.Text()
		out += line + "\n"
		var e map[string]any
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		u, _ := e["MYPR_UNIT"].(string)
		i, _ := e["MYPR_INVOCATION"].(string)
		units[u], invocations[i] = true, true
		if p, _ := e["PRIORITY"].(string); p == "" {
			t.Errorf("no priority: %s", line)
		}
	}
	if !units["manager.service"] || !units["runtime.socket"] {
		t.Errorf("MYPR_UNIT: %v\n%s", units, out)
	}
	if !strings.Contains(out, kernel) {
		t.Errorf("the kernel's generation %s is nowhere:\n%s", kernel, out)
	}
	if logs := s.ok("exec", "2") + s.ok("logs"); !strings.Contains(logs, "execution") {
		t.Errorf("logs: %s", logs)
	}
}

func TestEnableRefusesARunningSession(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "x = 1")
	if out, err := s.cli("systemd", "enable"); err == nil || !strings.Contains(out, "mypr-mcp stop") {
		t.Errorf("enable: %v %s", err, out)
	}
	if got := s.ok("exec", "x"); got != "1" {
		t.Errorf("after it: %s", got)
	}
	s.ok("stop")
	s.nothingLeft()
}

// Standalone, but with a systemd within reach.
func TestStandaloneOutlivesItsStarter(t *testing.T) {
	s := newSession(t)
	// As in a terminal or an IDE: a scope, a session, a process group.
	out := must(t, "systemd-run", "--user", "--scope", "--collect", "--unit=terminal.scope", "-q", "--",
		"setsid", "--wait", "sh", "-c", `MARK=seen "$0" -C "$1" exec "import os; x = os.environ['MARK']"; echo $$; echo gone`, bin, s.dir)
	if !strings.Contains(out, "gone") {
		t.Fatal(out)
	}
	r := s.status()
	if r.Supervisor == nil || r.Supervisor.Mode != "systemd" || !strings.HasPrefix(r.Supervisor.Cgroup, s.scope()) {
		t.Fatalf("supervisor: %+v", r.Supervisor)
	}
	if got := s.ok("exec", "x"); got != "'seen'" {
		t.Errorf("the starter's environment: %s", got)
	}
	// One that is killed while it runs: all of its scope, all of its group.
	cmd := exec.Command("systemd-run", "--user", "--scope", "--collect", "--unit=terminal2.scope", "-q", "--", bin, "serve", "-C", s.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	f := s.front(cmd)
	f.runs("y = '"+mark+"'", "")
	systemctl(t, "kill", "--signal=KILL", "terminal2.scope")
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	_ = cmd.Wait()
	if got := s.ok("exec", "y"); !strings.Contains(got, mark) {
		t.Errorf("after the end of the terminal: %s", got)
	}
	// It is revived like the installed service, with the environment of its starter.
	pid := s.status().Supervisor.PID
	kill(t, pid, syscall.SIGKILL)
	if got := s.ok("exec", "y"); !strings.Contains(got, mark) {
		t.Errorf("after the supervisor's death: %s", got)
	}
	if now := s.status().Supervisor.PID; now == pid {
		t.Error("the supervisor was not started again")
	}
	s.ok("reset")
	if got := s.ok("exec", "import os; os.environ['MARK']"); got != "'seen'" {
		t.Errorf("the environment of a kernel that the second supervisor started: %s", got)
	}
	s.ok("stop")
	s.nothingLeft()
	if out := systemctl(t, "list-units", "--all", "--no-legend", "--plain", "mypr-*"); out != "" {
		t.Errorf("units are left:\n%s", out)
	}
}

// The first client's own group and scope are killed with it.
func TestKillingTheFirstClient(t *testing.T) {
	s := newSession(t)
	cmd := exec.Command("systemd-run", "--user", "--scope", "--collect", "--unit=first.scope", "-q", "--", bin, "serve", "-C", s.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	s.killFirst(cmd, func() { systemctl(t, "kill", "--signal=KILL", "first.scope") })
	if m := s.status().Supervisor.Mode; m != "systemd" {
		t.Errorf("mode %s", m)
	}
	s.ok("stop")
	s.nothingLeft()
}

// Without a systemd within reach a session of its own is what keeps the runtime.
func TestKillingTheFirstClientWithoutSystemd(t *testing.T) {
	run := t.TempDir()
	s := newSession(t, "XDG_RUNTIME_DIR="+run)
	cmd := exec.Command(bin, "serve", "-C", s.dir)
	cmd.Env = append(os.Environ(), s.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	s.killFirst(cmd, func() {})
	if m := s.status().Supervisor.Mode; m != "standalone" {
		t.Errorf("mode %s", m)
	}
	s.ok("stop")
}

func (s *session) killFirst(cmd *exec.Cmd, more func()) {
	s.t.Helper()
	f := s.front(cmd)
	f.runs("y = '"+mark+"'", "")
	more()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	_ = cmd.Wait()
	if got := s.ok("exec", "y"); !strings.Contains(got, mark) {
		s.t.Errorf("after the end of the first client: %s", got)
	}
}

func TestIdleExit(t *testing.T) {
	s := enabled(t)
	if err := os.WriteFile(filepath.Join(s.dir, ".mypr", "config.toml"), []byte("[python]\nplain = true\n[limits]\nidle_exit_seconds = 1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	f := s.serve()
	f.runs("x = 1", "")
	f.tool("execute", map[string]any{"code": "import time; time.sleep(2.5)", "wait_ms": 10000})
	f.runs("x", "1") // somebody is connected: it stays
	wait := end(t, s.mainPID())
	f.in.Close()
	wait()
	s.nothingLeft()
	systemctl(t, "daemon-reload") // systemd has taken its end in by then
	if st := property(t, s.service(), "ActiveState"); st != "inactive" {
		t.Errorf("the service is %s", st)
	}
	if got := s.ok("exec", "'x' in globals()"); got != "False" {
		t.Errorf("the next session: %s", got)
	}
}
