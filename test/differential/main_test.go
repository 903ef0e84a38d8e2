// Package differential runs the same unit files under a real "systemd --user" and under
// our supervisor, and compares what became of them: states, results, exits, processes,
// descriptors and environments.
//
// It owns the comparison and the scenarios in testdata. It does not own the units'
// behaviour by itself: what is right is what systemd does, or what the table
// "Differences from systemd" in docs/units.md says.
//
// TestMain makes a private corner of this machine for both managers:
//
//	root          makes a cgroup and starts itself in it, in new namespaces
//	root, pid 1   mounts /run, /proc and cgroup2, starts both managers, runs the tests
package differential

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"mypr/supervisor"
	"mypr/supervisor/cgroup"
	"mypr/supervisor/process"
	"mypr/test/counterpart"
	"mypr/units"
)

const (
	stageVariable = "MYPR_DIFFERENTIAL_STAGE"
	tierVariable  = "MYPR_TIER" // of our supervisor
	systemdPath   = "/lib/systemd/systemd"
	patience      = 60 * time.Second // until a manager is up, or has gone
	cgroupRoot    = "/sys/fs/cgroup"

	// The two managers' $XDG_RUNTIME_DIR, %t in the unit files.
	systemdDir = "/run/user/systemd"
	ourDir     = "/run/user/mypr"
	// keepTarget holds all units of the scenarios in systemd's memory after their end.
	keepTarget = "differential-keep.target"
)

// stepPatience has to be longer than what a loaded machine needs, and is only ever waited
// for when a scenario fails.
var stepPatience = flag.Duration("patience", 60*time.Second, "how long one step may take")

var unitsDir = flag.String("units", "testdata", "directory of scenarios, each a txtar file or a directory (docs/units.md)")
var logsDir = flag.String("logs", "", "directory for the managers' logs when a test fails")

func init() {
	// An exec by another thread than the first makes the process look like a zombie for a moment.
	if exe, err := os.Executable(); err == nil && exe == probePath {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	process.HelperMain()
	if exe, err := os.Executable(); err == nil && exe == probePath {
		probe(os.Args[1:])
	}
	var code int
	var err error
	stage := os.Getenv(stageVariable)
	_ = os.Unsetenv(stageVariable)
	switch stage {
	case "":
		code, err = outside()
	case "cgroup":
		code, err = again("namespaces", &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWCGROUP, Pdeathsig: syscall.SIGKILL,
		})
	case "namespaces":
		code, err = inside(m)
	case "supervisor":
		err = supervise()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "differential test:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// again runs this program in the next stage.
func again(stage string, attr *syscall.SysProcAttr) (int, error) {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env, cmd.SysProcAttr = append(os.Environ(), stageVariable+"="+stage), attr
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}

func outside() (int, error) {
	if os.Getuid() != 0 {
		return 1, errors.New("these tests make namespaces and a cgroup: run them as root")
	}
	root := cgroupRoot + "/unified"
	if _, err := os.Stat(root); err != nil {
		root = cgroupRoot
	}
	dir, err := os.MkdirTemp(root, "mypr-differential-")
	if err != nil {
		return 1, err
	}
	defer func() {
		cgroup.KillAll(dir, 10*time.Second)
		remove(dir)
	}()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 1, err
	}
	defer unix.Close(fd)
	return again("cgroup", &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd, Pdeathsig: syscall.SIGKILL})
}

// remove removes a cgroup with those below it.
func remove(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			remove(filepath.Join(dir, e.Name()))
		}
	}
	if err := os.Remove(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

// inside is pid 1 of the namespaces.
func inside(m *testing.M) (code int, err error) {
	mount := func(source, target, kind, data string, flags uintptr) {
		if err == nil {
			err = os.NewSyscallError("mount "+target, unix.Mount(source, target, kind, flags, data))
		}
	}
	unix.Umask(0o022)
	mount("", "/", "", "", unix.MS_REC|unix.MS_PRIVATE)
	mount("tmpfs", "/run", "tmpfs", "mode=755", 0)
	mount("proc", "/proc", "proc", "", 0)
	mount("cgroup2", cgroupRoot, "cgroup2", "", 0)
	if err != nil {
		return 1, err
	}
	// /run/systemd/system is how systemd tells that it runs the machine.
	for _, dir := range []string{"/run/systemd/system", systemdDir + "/systemd/user", ourDir + "/mypr/units", cgroupRoot + "/tests", cgroupRoot + "/systemd", cgroupRoot + "/mypr"} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return 1, err
		}
	}
	if err := os.WriteFile(cgroupRoot+"/tests/cgroup.procs", []byte("1"), 0); err != nil {
		return 1, err
	}
	// A user manager logs to /dev/console itself, if that is a terminal.
	master, slave, err := pty.Open()
	if err != nil {
		return 1, err
	}
	defer slave.Close()
	log, err := os.Create("/run/systemd.log")
	if err != nil {
		return 1, err
	}
	go func() { // to the end of the process
		_, _ = io.Copy(log, master)
	}()
	mount(slave.Name(), "/dev/console", "", "", unix.MS_BIND)
	if err != nil {
		return 1, err
	}
	if err := copyProbe(); err != nil {
		return 1, err
	}
	flag.Parse()
	if scenarios, err = readScenarios(*unitsDir); err != nil {
		return 1, err
	}
	// Units of this machine's own must not get in between.
	if err := os.Symlink(os.DevNull, systemdDir+"/systemd/user/dbus.socket"); err != nil {
		return 1, err
	}
	if err := install(scenarios); err != nil {
		return 1, err
	}
	stopSystemd, err := startSystemd()
	if err != nil {
		return 1, err
	}
	stopOurs, err := startOurs()
	if err != nil {
		return 1, err
	}
	// They mostly wait.
	_ = flag.Set("test.parallel", "24")
	code = m.Run()
	if code != 0 && *logsDir != "" {
		for _, name := range []string{"systemd.log", "mypr.log"} {
			b, _ := os.ReadFile("/run/" + name)
			_ = os.WriteFile(filepath.Join(*logsDir, name), b, 0o600)
		}
	}
	return code, errors.Join(stopOurs(), stopSystemd())
}

func copyProbe() error {
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	return os.WriteFile(probePath, b, 0o755)
}

// environ is the environment of both managers.
func environ(dir string) []string {
	return []string{
		"HOME=/root", "USER=root", "LOGNAME=root", "SHELL=/bin/dash", "LANG=C.UTF-8",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "XDG_RUNTIME_DIR=" + dir, "FROM_MANAGER=inherited",
	}
}

// startManager starts a process in a cgroup of its own.
func startManager(cmd *exec.Cmd, group string) error {
	fd, err := unix.Open(cgroupRoot+"/"+group, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd, Setsid: true}
	return cmd.Start()
}

// startSystemd returns when the user manager is ready, with what ends it.
func startSystemd() (func() error, error) {
	path := systemdDir + "/test-notify"
	ready, err := counterpart.Ready(path)
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile("/run/systemd.log", os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	manager := exec.Command(systemdPath, "--user", "--log-target=console", "--log-level=info", "--unit="+keepTarget)
	manager.Env, manager.Stdout, manager.Stderr = append(environ(systemdDir), "NOTIFY_SOCKET="+path), log, log
	manager.ExtraFiles = []*os.File{log, log} // no unit may have them
	if err := startManager(manager, "systemd"); err != nil {
		return nil, err
	}
	if err := ready(patience); err != nil {
		b, _ := os.ReadFile(log.Name())
		return nil, fmt.Errorf("systemd --user: %w:\n%s", err, b)
	}
	return func() error {
		err := manager.Process.Signal(syscall.SIGTERM) // of a user manager: exit.target
		_ = manager.Wait()
		return err
	}, nil
}

// startOurs returns when the supervisor is ready, with what ends it.
func startOurs() (func() error, error) {
	log, err := os.Create("/run/mypr.log")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.Stdout, cmd.Stderr = append(environ(ourDir), stageVariable+"=supervisor", tierVariable+"="+os.Getenv(tierVariable)), log, log
	hold, err := cmd.StdinPipe() // its end is the supervisor's
	if err != nil {
		return nil, err
	}
	says, theirs, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer says.Close()
	cmd.ExtraFiles = []*os.File{theirs, log}
	err = startManager(cmd, "mypr")
	theirs.Close()
	if err != nil {
		return nil, err
	}
	if _, err := says.Read(make([]byte, 1)); err != nil {
		_ = cmd.Wait()
		b, _ := os.ReadFile(log.Name())
		return nil, fmt.Errorf("the supervisor did not start:\n%s", b)
	}
	return func() error {
		hold.Close()
		if err := cmd.Wait(); err != nil {
			b, _ := os.ReadFile(log.Name())
			return fmt.Errorf("the supervisor: %w\n%s", err, b[max(0, len(b)-4000):])
		}
		return nil
	}, nil
}

// supervise is our supervisor, in a process of its own, with the loader that the
// product has.
func supervise() error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	unix.CloseOnExec(3)
	says := os.NewFile(3, "ready")
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	loader := &units.Loader{Dirs: []string{ourDir + "/mypr/units"}}
	builtin, err := (&units.Loader{}).Names()
	if err != nil {
		return err
	}
	tier, _ := strconv.Atoi(os.Getenv(tierVariable))
	_ = os.Unsetenv(tierVariable) // the units inherit what is left
	s, err := supervisor.New(supervisor.Options{
		ForceTier: tier,
		Load:      loader.Load,
		Names: func() ([]string, error) {
			names, err := loader.Names()
			return without(names, builtin), err // nothing of the product starts here
		},
		ControlPath: ourDir + "/mypr/control", NotifyPath: ourDir + "/mypr/notify", StatePath: ourDir + "/mypr/state", CgroupName: "units", Version: "test",
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Ready: func(err error) {
			if err == nil {
				_, err = says.WriteString("ready\n")
			}
			if err != nil {
				cancel()
			}
		},
	})
	if err != nil {
		return err
	}
	return s.Run(ctx)
}

func without(list, drop []string) []string {
	var kept []string
	for _, s := range list {
		if !strings.Contains("\n"+strings.Join(drop, "\n")+"\n", "\n"+s+"\n") {
			kept = append(kept, s)
		}
	}
	return kept
}
