// Package systemd tests the program under a real "systemd --user", as an ordinary
// user: no machine, no container image, only a private corner of this one. TestMain
// runs the tests inside of it:
//
//	root          makes a cgroup and starts itself in it, in new namespaces
//	root, pid 1   mounts /run, /proc and cgroup2, starts journald
//	the user      starts "systemd --user" and runs the tests
//
// and removes the cgroup with everything in it at the end.
package systemd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/cgroup"
	"mypr/test/counterpart"
)

const (
	stageVariable = "MYPR_SYSTEMD_STAGE"
	testUser      = "mypr-test"
	systemdPath   = "/lib/systemd/systemd"
	patience      = 90 * time.Second
)

// base is the user's cgroup: the root of the namespace, or a group of the second kernel.
var base = "/sys/fs/cgroup" + os.Getenv("MYPR_TEST_CGROUP")

// bin is the program under test.
var bin = os.Getenv("MYPR_BIN")

func TestMain(m *testing.M) {
	var code int
	var err error
	switch os.Getenv(stageVariable) {
	case "":
		code, err = outside()
	case "cgroup":
		code, err = again("namespaces", nil, &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWCGROUP, Pdeathsig: syscall.SIGKILL,
		})
	case "namespaces":
		code, err = inside()
	case "uml":
		code, err = machine()
		fmt.Fprintf(os.Stderr, "\n%s%d\n", umlVerdict, code)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	case "user":
		code, err = asUser(m)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "systemd test:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// again runs this program in the next stage.
func again(stage string, env []string, attr *syscall.SysProcAttr) (int, error) {
	exe, err := os.Executable()
	if err != nil {
		return 1, err
	}
	if env == nil {
		env = os.Environ()
	}
	cmd := exec.Command(exe, os.Args[1:]...)
	cmd.Env, cmd.SysProcAttr = append(env, stageVariable+"="+stage), attr
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}

func outside() (int, error) {
	if os.Getuid() != 0 {
		return 1, errors.New("these tests make namespaces and a user's cgroup: run them as root")
	}
	u, err := user.Lookup(testUser)
	if err != nil {
		return 1, fmt.Errorf("%w; run test/setup.sh", err)
	}
	uid, _ := strconv.Atoi(u.Uid)
	top, err := os.MkdirTemp("/var/tmp", "mypr-systemd-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(top)
	exe, err := os.Executable()
	if err != nil {
		return 1, err
	}
	// The user can read neither root's checkout nor where go test builds.
	home := filepath.Join(top, "home")
	for from, to := range map[string]string{bin: "mypr-mcp", exe: "test", "../../docs/SYSTEMD.md": "SYSTEMD.md"} {
		if err := copyFile(from, filepath.Join(top, to)); err != nil {
			return 1, err
		}
	}
	if err := errors.Join(os.Chmod(top, 0o755), os.Mkdir(home, 0o755), os.Chown(home, uid, uid)); err != nil {
		return 1, err
	}
	root := "/sys/fs/cgroup/unified"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	dir := filepath.Join(root, filepath.Base(top))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return 1, err
	}
	defer func() {
		cgroup.KillAll(dir, time.Minute)
		remove(dir)
	}()
	for _, f := range []string{"", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"} {
		if err := os.Chown(filepath.Join(dir, f), uid, uid); err != nil {
			return 1, err
		}
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 1, err
	}
	defer unix.Close(fd)
	env := append(os.Environ(), "MYPR_BIN="+filepath.Join(top, "mypr-mcp"), "MYPR_TEST_HOME="+home, "MYPR_TEST_EXE="+filepath.Join(top, "test"))
	return again("cgroup", env, &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd, Pdeathsig: syscall.SIGKILL})
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o755)
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

// umlVerdict precedes the exit status of the tests on a second kernel.
const umlVerdict = "TESTS-ENDED="

// machine is pid 1 of a second kernel (User-Mode Linux), which has what this machine may
// lack: cgroup v2 with controllers. Its root is this machine's tree, read-only.
func machine() (int, error) {
	u, err := user.Lookup(testUser)
	if err != nil {
		return 1, err
	}
	uid, _ := strconv.Atoi(u.Uid)
	os.Setenv("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
	for _, m := range [][4]string{
		{"proc", "/proc", "proc"}, {"sysfs", "/sys", "sysfs"}, {"devtmpfs", "/dev", "devtmpfs"}, {"tmpfs", "/tmp", "tmpfs", "mode=1777"},
		{"tmpfs", os.Getenv("MYPR_TEST_HOME"), "tmpfs", "mode=755,uid=" + u.Uid}, {"cgroup2", "/sys/fs/cgroup", "cgroup2", "nsdelegate"},
	} {
		if err := unix.Mount(m[0], m[1], m[2], 0, m[3]); err != nil && err != unix.EBUSY { // the kernel has mounted /dev
			return 1, fmt.Errorf("mount %s: %w", m[1], err)
		}
	}
	for _, n := range []string{"/dev/null", "/dev/zero", "/dev/urandom"} {
		_ = os.Chmod(n, 0o666)
	}
	if err := os.Mkdir(base, 0o755); err != nil {
		return 1, err
	}
	for _, dir := range []string{"/sys/fs/cgroup", base} {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory +pids +cpu"), 0); err != nil {
			return 1, err
		}
	}
	for _, f := range []string{"", "cgroup.procs", "cgroup.subtree_control"} {
		if err := os.Chown(filepath.Join(base, f), uid, uid); err != nil {
			return 1, err
		}
	}
	return inside()
}

// inside is pid 1 of the namespaces.
func inside() (int, error) {
	u, err := user.Lookup(testUser)
	if err != nil {
		return 1, err
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	groups := []uint32{uint32(gid)}
	if g, err := user.LookupGroup("systemd-journal"); err == nil {
		n, _ := strconv.Atoi(g.Gid)
		groups = append(groups, uint32(n)) // may read the journal
	}
	run := "/run/user/" + u.Uid
	mount := func(source, target, kind, data string) {
		if err == nil {
			err = os.NewSyscallError("mount "+target, unix.Mount(source, target, kind, 0, data))
		}
	}
	err = os.NewSyscallError("mount /", unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	mount("tmpfs", "/run", "tmpfs", "mode=755")
	if os.Getenv(stageVariable) != "uml" {
		mount("proc", "/proc", "proc", "")
		mount("cgroup2", "/sys/fs/cgroup", "cgroup2", "")
	}
	mount("tmpfs", "/var/log", "tmpfs", "mode=755") // a journal on disk has a file for each user
	if err != nil {
		return 1, err
	}
	// /run/systemd/system is how systemd tells that it runs the machine.
	for _, dir := range []string{"/run/systemd/system", "/run/systemd/journal", "/run/systemd/journald.conf.d", run, base + "/tests"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return 1, err
		}
	}
	for _, path := range []string{run, base + "/tests", base + "/tests/cgroup.procs"} {
		if err := os.Chown(path, uid, gid); err != nil {
			return 1, err
		}
	}
	err = errors.Join(os.Chmod(run, 0o700),
		os.WriteFile("/run/systemd/journald.conf.d/test.conf", []byte("[Journal]\nStorage=persistent\nReadKMsg=no\nAudit=no\nForwardToSyslog=no\nRateLimitBurst=0\n"), 0o644),
		os.WriteFile("/run/systemd/journal/flushed", nil, 0o644),
		os.WriteFile(base+"/tests/cgroup.procs", []byte("1"), 0))
	if err != nil {
		return 1, err
	}
	// As tmpfiles would have it, so that the group can read the journal.
	if id, ierr := os.ReadFile("/etc/machine-id"); ierr == nil && len(groups) == 2 {
		for _, dir := range []string{"/var/log/journal", "/var/log/journal/" + strings.TrimSpace(string(id))} {
			err = errors.Join(err, os.Mkdir(dir, 0o755), os.Chown(dir, 0, int(groups[1])), os.Chmod(dir, 0o755|os.ModeSetgid))
		}
	}
	ready, rerr := counterpart.Ready("/run/systemd/notify")
	if err = errors.Join(err, rerr); err != nil {
		return 1, err
	}
	journald := exec.Command("/lib/systemd/systemd-journald")
	journald.Env = []string{"NOTIFY_SOCKET=/run/systemd/notify", "SYSTEMD_LOG_TARGET=null"}
	if err := journald.Start(); err != nil {
		return 1, err
	}
	if err := ready(patience); err != nil {
		return 1, fmt.Errorf("journald: %w", err)
	}
	env := []string{
		"HOME=" + os.Getenv("MYPR_TEST_HOME"), "USER=" + testUser, "LOGNAME=" + testUser, "SHELL=/bin/sh", "LANG=C.UTF-8",
		"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "XDG_RUNTIME_DIR=" + run, "DBUS_SESSION_BUS_ADDRESS=unix:path=" + run + "/bus",
		"MYPR_BIN=" + bin, "MYPR_TEST_HOME=" + os.Getenv("MYPR_TEST_HOME"), "MYPR_TEST_EXE=" + os.Getenv("MYPR_TEST_EXE"), "MYPR_TEST_KERNEL=" + os.Getenv("MYPR_TEST_KERNEL"), "MYPR_TEST_CGROUP=" + os.Getenv("MYPR_TEST_CGROUP"),
		"MYPR_TEST_DOCS=" + filepath.Join(filepath.Dir(bin), "SYSTEMD.md"), stageVariable + "=user",
	}
	cmd := exec.Command(os.Getenv("MYPR_TEST_EXE"), os.Args[1:]...)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = env, "/", os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid), Groups: groups}, Setsid: true}
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}

// asUser starts the user's systemd and runs the tests.
func asUser(m *testing.M) (int, error) {
	run := os.Getenv("XDG_RUNTIME_DIR")
	ready, err := counterpart.Ready(run + "/test-notify")
	if err != nil {
		return 1, err
	}
	manager := exec.Command("/bin/sh", "-c", "mkdir "+base+"/manager && echo $$ > "+base+"/manager/cgroup.procs && exec "+systemdPath+" --user --log-target=journal")
	manager.Env = append(os.Environ(), "NOTIFY_SOCKET="+run+"/test-notify", stageVariable+"=")
	manager.Stderr = os.Stderr
	if err := manager.Start(); err != nil {
		return 1, err
	}
	if err := ready(patience); err != nil {
		return 1, fmt.Errorf("systemd --user: %w", err)
	}
	code := m.Run()
	// What a session leaves behind, systemd must not have to clean up.
	if out, err := exec.Command("systemctl", "--user", "exit").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("systemctl exit: %w: %s", err, out)
	}
	_ = manager.Wait()
	return code, nil
}

// Helpers of the tests.

// command runs a program to its end.
func command(t *testing.T, env []string, name string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience) // also in a cleanup
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env, cmd.Dir = append(os.Environ(), env...), "/"
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

func must(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := command(t, nil, name, args...)
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return strings.TrimSpace(out)
}

func systemctl(t *testing.T, args ...string) string {
	t.Helper()
	return must(t, "systemctl", append([]string{"--user"}, args...)...)
}

// property of a unit.
func property(t *testing.T, unit, name string) string {
	t.Helper()
	return systemctl(t, "show", "--value", "--property="+name, "--", unit)
}
