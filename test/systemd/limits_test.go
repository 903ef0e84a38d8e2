package systemd

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestLimitsOutliveTheSupervisor runs limits below on a kernel that has the controllers
// for them.
func TestLimitsOutliveTheSupervisor(t *testing.T) {
	if os.Getenv("MYPR_TEST_KERNEL") == "uml" {
		limits(t)
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "linux.uml", "mem=1024M", "rootfstype=hostfs", "rootflags=/", "ro", "init="+os.Getenv("MYPR_TEST_EXE"),
		"con=null", "con0=null,fd:1", "con1=null", "ssl=null", "random.trust_cpu=1", "quiet", "panic=1",
		stageVariable+"=uml", "MYPR_TEST_KERNEL=uml", "MYPR_TEST_CGROUP=/user", "MYPR_BIN="+bin, "MYPR_TEST_HOME="+os.Getenv("MYPR_TEST_HOME"), "MYPR_TEST_EXE="+os.Getenv("MYPR_TEST_EXE"),
		"--", "-test.v", "-test.run=^TestLimitsOutliveTheSupervisor$")
	cmd.Env = append(os.Environ(), "TMPDIR=/dev/shm")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	out, err := cmd.CombinedOutput()
	if !strings.Contains(string(out), umlVerdict+"0") || !strings.Contains(string(out), "--- PASS") {
		t.Fatalf("%v\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "_test.go:") {
			t.Log(strings.TrimSpace(line))
		}
	}
}

func limits(t *testing.T) {
	s := enabled(t)
	dir := filepath.Join(s.dir, ".mypr", "units", "kernel.service.d")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "memory.conf"), []byte("[Service]\nMemoryMax=200M\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	f := s.serve()
	f.tool("execute", map[string]any{"code": "x = '" + mark + "'", "wait_ms": 30000})
	for !strings.Contains(f.tool("execute", map[string]any{"code": "print(x)", "wait_ms": 30000}), mark) {
		if t.Failed() || s.status().Status == nil {
			t.Fatal(s.log())
		}
	}
	check := func(when string) {
		t.Helper()
		r := s.status()
		if r.Supervisor.Tier != 1 {
			t.Fatalf("%s: tier %d: %s", when, r.Supervisor.Tier, r.Supervisor.TierReason)
		}
		for _, u := range r.Units {
			if u.Name != "kernel.service" {
				continue
			}
			b, err := os.ReadFile(filepath.Join(u.Cgroup, "memory.max"))
			if err != nil || strings.TrimSpace(string(b)) != "209715200" {
				t.Errorf("%s: memory.max %q %v", when, b, err)
			}
		}
	}
	check("at first")
	for range 2 {
		pid := s.mainPID()
		kill(t, pid, syscall.SIGKILL)
		f.remembers()
		check("after SIGKILL")
		if s.mainPID() == pid {
			t.Error("the same supervisor")
		}
	}
	systemctl(t, "restart", s.service())
	f.remembers()
	check("after restart")
}
