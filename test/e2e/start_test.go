package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mypr/supervisor/control"
)

// Must be seen, 1: from nothing to a result, with the default environment.
func TestFirstStartWithIPython(t *testing.T) {
	s := newSession(t, "")
	f := s.serve()
	f.init("")
	if got := f.must("1 + 1"); got != "2" {
		t.Errorf("1 + 1 is %s", got)
	}
	if got := f.must("%pwd"); !strings.Contains(got, s.dir) {
		t.Errorf("a magic: %s", got)
	}
	if got := f.must("!echo from a shell"); !strings.Contains(got, "from a shell") {
		t.Errorf("a shell escape: %s", got)
	}
	r := s.status()
	if r.Status == nil || r.Status.Kernel.Mode != "ipython" || r.Status.Kernel.PlainReason != "" {
		t.Errorf("kernel: %+v", r.Status)
	}
	ignored, err := os.ReadFile(filepath.Join(s.dir, ".mypr", ".gitignore"))
	if err != nil || !strings.Contains(string(ignored), "venv/") {
		t.Errorf(".gitignore: %q, %v", ignored, err)
	}
}

// Must be seen, 1: without a network the kernel is plain and says why.
func TestFirstStartOffline(t *testing.T) {
	s := newSession(t, "")
	var env []string
	for _, kv := range s.env {
		if !strings.HasPrefix(kv, "PIP_") && !strings.HasPrefix(kv, "UV_") {
			env = append(env, kv)
		}
	}
	s.env = append(env, "PIP_CONFIG_FILE=/dev/null", "PIP_INDEX_URL=http://127.0.0.1:9/simple", "PIP_RETRIES=0", "UV_DEFAULT_INDEX=http://127.0.0.1:9/simple",
		"UV_HTTP_RETRIES=0", "XDG_CACHE_HOME="+filepath.Join(s.dir, "cache"))
	f := s.serve()
	r := f.tool("init", nil)
	if f.must("1 + 1") != "2" {
		t.Error("a plain kernel does not run cells")
	}
	st := s.status()
	if st.Status == nil || st.Status.Kernel.Mode != "plain" || !strings.Contains(st.Status.Kernel.PlainReason, "could not be") {
		t.Errorf("status says nothing of the reason: %+v", st.Status.Kernel)
	}
	if r.IsError {
		t.Errorf("init: %s", r.Text)
	}
	again := f.tool("init", nil)
	if !strings.Contains(again.Text, "IPython") && !strings.Contains(again.Text, "plain") {
		t.Errorf("init says nothing of the reason: %s", again.Text)
	}
}

// Twelve clients that start at once meet in one runtime.
func TestConcurrentFirstStart(t *testing.T) {
	s := newSession(t)
	var wg sync.WaitGroup
	pids := make([]string, 12)
	for n := range pids {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
			defer cancel()
			out, err := s.command(ctx, "exec", "import os; os.getpid()").Output() // what waits says so on stderr
			if err != nil {
				t.Errorf("client %d: %v\n%s", n, err, out)
			}
			pids[n] = string(out)
		})
	}
	wg.Wait()
	for n, pid := range pids {
		if pid != pids[0] {
			t.Errorf("client %d ran in kernel %q, the first one in %q", n, pid, pids[0])
		}
	}
}

// A stripped environment and another way to the directory find the same runtime.
func TestOneRuntimeFromEveryEnvironment(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "x = 'one'")
	link := filepath.Join(filepath.Dir(s.dir), "link")
	if err := os.Symlink(s.dir, link); err != nil {
		t.Fatal(err)
	}
	if out := s.ok("-C", link, "exec", "x"); out != "'one'\n" {
		t.Errorf("by a symlink: %q", out)
	}
	cmd := s.command(t.Context(), "exec", "x")
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), s.mark}
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "'one'\n" {
		t.Errorf("with a stripped environment: %q, %v", out, err)
	}
}

// The runtime outlives the process group and the session of whoever started it.
func TestRuntimeOutlivesItsStarter(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	f.must("x = 'survived'")
	f.closed = true
	s.kill(f.cmd.Process.Pid)
	<-f.ended
	if out := s.ok("exec", "x"); out != "'survived'\n" {
		t.Errorf("%q", out)
	}
}

// Whoever tells a supervisor to end while it begins is obeyed, at whatever moment.
func TestSignalAtStart(t *testing.T) {
	s := newSession(t)
	for n := range 40 {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		cmd := s.command(ctx, "supervise")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		moment := time.Duration(n) * 250 * time.Microsecond
		<-time.After(moment)
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait() // any status: it may have had no time to say anything
		if ctx.Err() != nil {
			t.Fatalf("SIGTERM after %v was lost", moment)
		}
		cancel()
	}
}

// supervise starts a supervisor and returns when it says that it runs.
func (s *session) supervise(cmd *exec.Cmd) {
	s.t.Helper()
	log, err := cmd.StderrPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	defer time.AfterFunc(patience, func() { log.Close() }).Stop()
	lines := bufio.NewScanner(log)
	for lines.Scan() && !strings.Contains(lines.Text(), "supervisor runs") {
	}
	go func() { _, _ = io.Copy(io.Discard, log) }()
}

// A supervisor that is started by hand while the session before it stops takes its place,
// which is no failure of the stop. A SIGINT that it was started to ignore stays ignored.
func TestSupervisorByHand(t *testing.T) {
	s := newSession(t)
	dropIn := filepath.Join(s.dir, ".mypr", "units", "kernel.service.d")
	if err := os.MkdirAll(dropIn, 0o700); err != nil {
		t.Fatal(err)
	}
	s.write(".mypr/units/kernel.service.d/slow.conf", "[Service]\nExecStopPost=/bin/sleep 0.3\n")
	s.ok("exec", "1")
	events := s.unitEvents("kernel.service")
	stopped := make(chan string, 1)
	go func() {
		out, code := s.cli("stop", "--json=false")
		stopped <- fmt.Sprint(code, " ", out)
	}()
	s.await(events, control.Deactivating)
	if err := os.RemoveAll(dropIn); err != nil {
		t.Fatal(err)
	}
	cmd := s.command(t.Context(), "supervise")
	cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-c", `trap "" INT; exec "$0" supervise`, bin}
	s.supervise(cmd)
	if said := <-stopped; !strings.HasPrefix(said, "0 ") {
		t.Errorf("stop: exit status %s", said)
	}
	for n := range 2 {
		if out := s.ok("exec", "1 + 1"); out != "2\n" {
			t.Errorf("a cell: %q", out)
		}
		if sv := s.status().Supervisor; sv == nil || sv.PID != cmd.Process.Pid {
			t.Fatalf("the supervisor is %+v, not process %d", sv, cmd.Process.Pid)
		}
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			s.ok("restart") // that executes the supervisor anew
		}
	}
	if out := s.ok("exec", "40 + 2"); out != "42\n" {
		t.Errorf("after SIGINT: %q", out)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// A supervisor is the program that was started, whatever an update puts in its place.
func TestReplacedWhileStarting(t *testing.T) {
	s := newSession(t)
	program := filepath.Join(t.TempDir(), "mypr-mcp")
	if out, err := exec.Command("cp", bin, program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	f, err := os.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Remove(program); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, []byte("#!/bin/sh\nexit 7\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := s.command(t.Context(), "supervise")
	cmd.Path = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd())
	s.supervise(cmd)
	if out := s.ok("exec", "40 + 2"); out != "42\n" {
		t.Errorf("a cell: %q", out)
	}
	if pid := s.status().Supervisor.PID; pid != cmd.Process.Pid {
		t.Errorf("the supervisor is process %d, not %d", pid, cmd.Process.Pid)
	}
	s.ok("stop")
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
