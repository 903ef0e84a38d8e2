package systemd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/cgroup"
)

// Variables that systemd sets for the one process that it starts.
var Variables = []string{
	"NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID", "FDSTORE", "WATCHDOG_PID", "WATCHDOG_USEC",
	"INVOCATION_ID", "MANAGERPID", "MANAGERPIDFDID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE",
}

// Service is the service that this process is the main process of.
type Service struct {
	Unit   string
	Slice  string // "" for none
	dir    string // its cgroup
	user   bool   // of a user manager
	anchor string // cgroup of the scope's anchor, once there is a scope
}

// Current is the service of this process, or nil. SYSTEMD_EXEC_PID (systemd 248) tells
// a process that systemd started from a descendant that inherited the environment.
func Current() *Service {
	if os.Getenv("NOTIFY_SOCKET") == "" || os.Getenv("SYSTEMD_EXEC_PID") != strconv.Itoa(os.Getpid()) {
		return nil
	}
	s := &Service{user: os.Getenv("MANAGERPID") != ""}
	if dir, err := cgroup.Own(); err == nil {
		s.dir, s.Unit = dir, filepath.Base(dir)
		if slice := filepath.Base(filepath.Dir(dir)); strings.HasSuffix(slice, ".slice") {
			s.Slice = slice
		}
	}
	return s
}

// scopeTimeout bounds making a scope, which takes some 20 ms.
const scopeTimeout = 15 * time.Second

// anchorScript is what keeps the scope when nothing else is in it. The line it writes
// says that it runs in the scope.
const anchorScript = "echo in; exec sleep infinity >/dev/null 2>&1"

// Scope makes or finds the scope of that name beside the service and returns its
// cgroup, in which the processes that are to survive the service's crash are started.
//
// PartOf= passes a stop of the service on to the scope, in whatever state the service
// is, but no restart, since a scope can be started only once. Before= has a start of
// the service wait for the end of an old scope. (systemd 252 and 257.)
func (s *Service) Scope(name, description string) (string, error) {
	if !strings.HasSuffix(s.Unit, ".service") {
		return "", fmt.Errorf("the process is in no group of a service: %q", s.dir)
	}
	dir := filepath.Join(filepath.Dir(s.dir), name)
	s.anchor = filepath.Join(dir, "anchor")
	if cgroup.Populated(dir) {
		if !cgroup.Populated(s.anchor) {
			if err := startAnchor(s.anchor); err != nil {
				return "", fmt.Errorf("cannot start the anchor of %s: %w", name, err)
			}
		}
		cgroup.Enable(dir)
		return dir, nil
	}
	unit := strings.ReplaceAll(s.Unit, `\`, `\\`) // of an escaped path: systemd-run takes one away
	args := []string{
		"--scope", "--quiet", "--collect", "--unit=" + name, "--description=" + description,
		"-p", "Delegate=yes", "-p", "PartOf=" + unit, "-p", "Before=" + unit, "-p", "TimeoutStopSec=5s",
	}
	if s.user {
		args = append(args, "--user")
	}
	if s.Slice != "" {
		args = append(args, "--slice="+s.Slice)
	}
	var stderr bytes.Buffer
	cmd := exec.Command("systemd-run", append(args, "--", "/bin/sh", "-c", anchorScript)...)
	cmd.Dir, cmd.Env, cmd.Stderr = "/", withoutVariables(os.Environ()), &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return "", err
	}
	stuck := time.AfterFunc(scopeTimeout, func() { _ = cmd.Process.Kill() })
	defer stuck.Stop()
	if line, _ := io.ReadAll(io.LimitReader(out, 3)); string(line) != "in\n" {
		err := cmd.Wait()
		return "", fmt.Errorf("systemd-run cannot make %s: %w: %s", name, err, strings.TrimSpace(stderr.String()))
	}
	// From here on it is a child like any that the supervisor does not know.
	pid := cmd.Process.Pid
	go func() { _ = cmd.Wait() }()
	if err := os.Mkdir(s.anchor, 0o755); err != nil && !os.IsExist(err) {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(s.anchor, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
		return "", err
	}
	cgroup.Enable(dir)
	return dir, nil
}

func startAnchor(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
		return err
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	cmd := exec.Command("/bin/sh", "-c", anchorScript)
	cmd.Dir, cmd.Env = "/", withoutVariables(os.Environ())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: fd}
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() { _ = cmd.Wait() }()
	return nil
}

// EndScope ends the anchor, and so the scope once nothing else is in it.
func (s *Service) EndScope() {
	if s.anchor != "" {
		cgroup.KillAll(s.anchor, time.Second)
		_ = os.Remove(s.anchor)
	}
}

// StopRequested reports whether the manager means to stop the service, now that it has
// sent SIGTERM: that also comes before a restart, and from people. The kind of the
// job is the only thing that tells.
func (s *Service) StopRequested(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for range 20 { // one that cannot answer at all must not be asked for ever
		// Not for one unit: what it takes are patterns, in which a backslash means something.
		out, err := exec.CommandContext(ctx, "systemctl", s.manager("list-jobs", "--plain", "--full", "--no-pager")...).Output()
		for line := range strings.Lines(string(out)) {
			if f := strings.Fields(line); len(f) >= 3 && f[1] == s.Unit {
				return f[2] == "stop"
			}
		}
		// The supervisor may reap the child before Wait does, so its status says nothing. What
		// has answered has printed how many jobs there are. What has printed nothing was
		// killed: the manager sends SIGTERM to the service's processes until it finds no new
		// one, and the child is one.
		if len(out) > 0 || errors.Is(err, exec.ErrNotFound) || ctx.Err() != nil {
			break
		}
	}
	return false
}

func (s *Service) manager(args ...string) []string {
	if s.user {
		return append([]string{"--user"}, args...)
	}
	return args
}

func withoutVariables(env []string) []string {
	return slices.DeleteFunc(env, func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains(Variables, name)
	})
}

// output runs systemctl or another tool and returns what it printed; the error has
// what it printed about the failure.
func output(ctx context.Context, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = env
	b, err := cmd.Output()
	text := strings.TrimSpace(string(b))
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(exit.Stderr) > 0 {
		err = fmt.Errorf("%s %s: %s", name, args[0], strings.TrimSpace(string(exit.Stderr)))
	} else if err != nil {
		err = fmt.Errorf("%s %s: %w", name, args[0], err)
	}
	return text, err
}
