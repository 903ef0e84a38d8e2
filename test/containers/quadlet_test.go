package containers

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"mypr/test/counterpart"
)

// systemd starts the systemd of the person's, and ends it with the test.
func (p *person) systemd(t *testing.T) {
	t.Helper()
	// How systemd tells that systemd runs the machine.
	if err := os.MkdirAll("/run/systemd/system", 0o755); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(p.run, "test-notify")
	ready, err := counterpart.Ready(socket)
	if err == nil {
		err = os.Chown(socket, p.uid, p.uid)
	}
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(p.home, "systemd.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	// There is no journal here.
	units := filepath.Join(p.home, ".config", "systemd", "user")
	conf := "[Service]\nStandardOutput=append:" + p.home + "/services.log\nStandardError=inherit\n"
	if out, err := p.script(p.home, "mkdir -p "+units+"/service.d; echo '"+conf+"' > "+units+"/service.d/log.conf"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const group = "/sys/fs/cgroup/user/manager"
	cmd := p.command(context.Background(), "sh", "-c", "mkdir -p "+group+" && echo $$ > "+group+"/cgroup.procs && exec /lib/systemd/systemd --user --log-target=console")
	cmd.Env = append(cmd.Env, "NOTIFY_SOCKET="+socket)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, f := range []string{"systemd.log", "services.log"} {
				b, _ := os.ReadFile(filepath.Join(p.home, f))
				t.Logf("%s:\n%s", f, b[max(0, len(b)-8000):])
			}
		}
		if out, err := p.runs("systemctl", "--user", "exit"); err != nil {
			t.Errorf("systemctl exit: %v\n%s", err, out)
			_ = cmd.Process.Kill()
		}
		_ = cmd.Wait()
	})
	if err := ready(patience); err != nil {
		t.Fatalf("systemd --user: %v", err)
	}
}

// quadlet has systemd use the program that makes services of container files, as podman's
// package would.
func quadlet(t *testing.T) {
	t.Helper()
	const dir = "/run/systemd/user-generators"
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = os.Symlink(filepath.Join(top, "quadlet"), filepath.Join(dir, "podman-user-generator"))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// The first client's connection has systemd start the container, to which it passes the
// socket; the service is ready when the supervisor in it says so.
func TestQuadlet(t *testing.T) {
	p := someone(t, "rootless")
	p.images(t)
	quadlet(t)
	p.systemd(t)
	dir := p.workspace(t)
	plain := filepath.Join(filepath.Dir(dir), "quadlet") // RequiresMountsFor=, which is made of it, takes no spaces
	if err := os.Rename(dir, plain); err != nil {
		t.Fatal(err)
	}
	blocks := slices.DeleteFunc(guide(), func(block string) bool { return !strings.Contains(block, "systemctl") })
	if len(blocks) != 3 {
		t.Fatalf("the guide has %d blocks about quadlet", len(blocks))
	}
	install, look, undo := blocks[0], blocks[1], blocks[2]
	if out, err := p.script(plain, install); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() {
		if out, err := p.script(plain, undo); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		if out := p.must(t, "podman", "ps", "-aq"); out != "" {
			t.Errorf("containers are left: %s", out)
		}
	})
	property := func(unit, name string) string {
		return p.must(t, "systemctl", "--user", "show", "--value", "--property="+name, unit)
	}
	if got := property("mypr.service", "ActiveState") + property("mypr.service", "Type"); got != "inactivenotify" {
		t.Errorf("before the first connection the service is %s", got)
	}
	host := p.host(t, plain)
	began := time.Now()
	if got := host.ok("exec", "x = 6 * 7; x"); got != "42" {
		t.Errorf("the first cell: %s", got)
	}
	t.Logf("from the first connection to the first result: %v", time.Since(began).Round(time.Millisecond))
	if got := property("mypr.service", "ActiveState"); got != "active" {
		t.Errorf("the service is %s", got)
	}
	r := host.status()
	if r.Supervisor == nil || r.Supervisor.Mode != "container" || r.Supervisor.PID != 1 {
		t.Errorf("the supervisor is %+v", r.Supervisor)
	}
	// An upgrade in place goes through the same sockets.
	p.must(t, "podman", "exec", "mypr", "mypr-mcp", "-C", plain, "restart", "--keep-kernel")
	if got := host.ok("exec", "x"); got != "42" {
		t.Errorf("after restart --keep-kernel: %s", got)
	}
	p.must(t, "systemctl", "--user", "restart", "mypr.service")
	if got := host.ok("exec", "'x' in globals()"); got != "False" {
		t.Errorf("after systemctl restart: %s", got)
	}
	// What kills the container has systemd start another.
	pid, err := strconv.Atoi(p.must(t, "podman", "inspect", "--format", "{{.State.Pid}}", "mypr"))
	if err != nil {
		t.Fatal(err)
	}
	p.must(t, "podman", "kill", "mypr")
	if !ends(pid, patience) {
		t.Fatal("the container lives after podman kill")
	}
	if got := host.ok("exec", "1 + 1"); got != "2" {
		t.Errorf("after podman kill: %s", got)
	}
	p.must(t, "systemctl", "--user", "stop", "mypr.service")
	if got := property("mypr.service", "Result"); got != "success" {
		t.Errorf("stop ended with %s", got)
	}
	if got := host.ok("exec", "2 + 2"); got != "4" {
		t.Errorf("after systemctl stop: %s", got)
	}
	if out, err := p.script(plain, look); err != nil || !strings.Contains(out, "active (running)") {
		t.Errorf("%s: %v\n%s", look, err, out)
	}
	host.ok("stop")
}
