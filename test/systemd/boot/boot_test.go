// Package boot tests the program on a machine that systemd boots: this machine's own
// tree under an overlay, in systemd-nspawn, with logind and lingering users.
package boot

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
)

const (
	stageVariable = "MYPR_BOOT_STAGE"
	testUser      = "mypr-test"
	bootTimeout   = 5 * time.Minute
)

func TestMain(m *testing.M) {
	switch os.Getenv(stageVariable) {
	case "cgroup": // in the cgroup that is to be the machine's root
		cmd := exec.Command("/proc/self/exe")
		cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), stageVariable+"=namespaces"), os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWCGROUP, Pdeathsig: syscall.SIGKILL}
		_ = cmd.Run()
		os.Exit(cmd.ProcessState.ExitCode())
	case "namespaces":
		fmt.Fprintln(os.Stderr, "boot test:", nspawn())
		os.Exit(99)
	}
	os.Exit(m.Run())
}

// nspawn becomes systemd-nspawn.
func nspawn() error {
	top := os.Getenv("MYPR_BOOT_TOP")
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	for _, m := range [][3]string{{"proc", "/proc", "proc"}, {"tmpfs", "/run", "tmpfs"}, {"cgroup2", "/sys/fs/cgroup", "cgroup2"}} {
		if err == nil {
			err = unix.Mount(m[0], m[1], m[2], 0, "")
		}
	}
	if err == nil {
		err = os.Mkdir("/run/root", 0o755) // nspawn refuses -D /
	}
	if err == nil {
		err = unix.Mount("/", "/run/root", "", unix.MS_BIND, "")
	}
	if err != nil {
		return err
	}
	path, err := exec.LookPath("systemd-nspawn")
	if err != nil {
		return err
	}
	argv := []string{
		path, "-q", "-D", "/run/root", "-b", "--register=no", "--keep-unit", "--private-network", "--volatile=overlay", "--machine=mypr-boot", "--console=pipe",
		"--bind=" + top, "--bind=" + top + "/home:/home/" + testUser, "--bind=" + top + "/linger:/var/lib/systemd/linger",
		"--bind-ro=" + top + "/ci.service:/etc/systemd/system/ci.service", "--bind-ro=" + top + "/logind.conf:/etc/systemd/logind.conf",
		"systemd.wants=ci.service", "systemd.mask=postgresql.service", "systemd.mask=postgresql@15-main.service",
	}
	return unix.Exec(path, argv, []string{"PATH=" + os.Getenv("PATH"), "SYSTEMD_LOG_LEVEL=warning"})
}

// machine is a machine that can be booted again and again.
type machine struct {
	t   *testing.T
	top string
	uid string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("booting a machine needs root")
	}
	u, err := user.Lookup(testUser)
	if err != nil {
		t.Fatalf("%v; run test/setup.sh", err)
	}
	uid, _ := strconv.Atoi(u.Uid)
	top, err := os.MkdirTemp("/var/tmp", "mypr-boot-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(top) })
	b, err := os.ReadFile(os.Getenv("MYPR_BIN"))
	err = errors.Join(err, os.Chmod(top, 0o755), os.WriteFile(filepath.Join(top, "mypr-mcp"), b, 0o755),
		os.WriteFile(filepath.Join(top, "logind.conf"), []byte("[Login]\nUserStopDelaySec=0\n"), 0o644),
		os.MkdirAll(filepath.Join(top, "home", "ws", ".mypr"), 0o755), os.Mkdir(filepath.Join(top, "linger"), 0o755),
		os.WriteFile(filepath.Join(top, "home", "ws", ".mypr", "config.toml"), []byte("[python]\nplain = true\n"), 0o644))
	for _, f := range []string{"home", "home/ws", "home/ws/.mypr", "home/ws/.mypr/config.toml"} {
		err = errors.Join(err, os.Chown(filepath.Join(top, f), uid, uid))
	}
	if err != nil {
		t.Fatal(err)
	}
	return &machine{t, top, u.Uid}
}

// boot boots the machine, runs a script on it as root, and shuts it down. It returns
// what the script printed.
func (m *machine) boot(script string) string {
	t := m.t
	t.Helper()
	log := filepath.Join(m.top, "log")
	unit := `[Unit]
After=multi-user.target systemd-logind.service
SuccessAction=exit
FailureAction=exit
[Service]
Type=oneshot
StandardOutput=append:` + log + `
StandardError=inherit
TimeoutStartSec=240
ExecStart=/bin/sh ` + m.top + `/script
`
	prelude := `set -eu
uid=` + m.uid + ` mypr=` + m.top + `/mypr-mcp ws=/home/` + testUser + `/ws
# A login and its logout, and what needs none.
login() { runuser -l ` + testUser + ` -c "$1"; }
user() { runuser -u ` + testUser + ` -- env HOME=/home/` + testUser + ` XDG_RUNTIME_DIR=/run/user/$uid sh -c "$1"; }
gone() { python3 -c 'import os,select,sys
try: fd = os.pidfd_open(int(sys.argv[1]))
except ProcessLookupError: sys.exit(0)
sys.exit(not select.select([fd], [], [], 120)[0])' "$1"; }
`
	err := errors.Join(os.WriteFile(filepath.Join(m.top, "ci.service"), []byte(unit), 0o644),
		os.WriteFile(filepath.Join(m.top, "script"), []byte(prelude+script), 0o644), os.WriteFile(log, nil, 0o666), os.Chmod(log, 0o666))
	if err != nil {
		t.Fatal(err)
	}
	root := "/sys/fs/cgroup/unified"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	dir := filepath.Join(root, filepath.Base(m.top))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cgroup.KillAll(dir, time.Minute)
		remove(t, dir)
	}()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	ctx, cancel := context.WithTimeout(t.Context(), bootTimeout)
	defer cancel()
	var console bytes.Buffer
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), stageVariable+"=cgroup", "MYPR_BOOT_TOP="+m.top), &console, &console
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd}
	err = cmd.Run()
	out, _ := os.ReadFile(log)
	if err != nil {
		t.Fatalf("%v\n%s\nconsole:\n%s", err, out, console.String())
	}
	return string(out)
}

func remove(t *testing.T, dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			remove(t, filepath.Join(dir, e.Name()))
		}
	}
	if err := os.Remove(dir); err != nil {
		t.Error(err)
	}
}

// want checks that the lines of out that begin with "test:" are these.
func want(t *testing.T, out string, lines ...string) {
	t.Helper()
	var got []string
	for line := range strings.Lines(out) {
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "test: "); ok {
			got = append(got, text)
		}
	}
	if strings.Join(got, "\n") != strings.Join(lines, "\n") {
		t.Errorf("got %q, want %q\n%s", got, lines, out)
	}
}

func TestLogoutLingerReboot(t *testing.T) {
	m := newMachine(t)
	t.Run("without linger the session ends at the logout", func(t *testing.T) {
		m.t = t
		out := m.boot(`
login "$mypr systemd enable $ws; $mypr -C $ws exec 'x = 41'; $mypr -C $ws --json=false status; systemctl --user show -p MainPID --value init.scope >/dev/null"
manager=$(systemctl show -p MainPID --value user@$uid.service)
gone $manager
systemctl stop user@$uid.service # it stops; this waits for the end of what it has besides the manager
echo "test: left $(pgrep -u $uid -c || true)"
pgrep -u $uid -a || true
`)
		want(t, out, "left 0")
		if !strings.Contains(out, "lingering is off") || !strings.Contains(out, "loginctl enable-linger") {
			t.Errorf("enable gave no warning:\n%s", out)
		}
	})
	t.Run("with linger it stays", func(t *testing.T) {
		m.t = t
		out := m.boot(`
login "loginctl enable-linger"
login "$mypr systemd enable $ws; $mypr -C $ws exec 'x = 41'"
timeout 120 sh -c 'while loginctl list-sessions --no-legend | grep -q ` + testUser + `; do :; done' # logind hears of the end a moment later
echo "test: sessions $(loginctl list-sessions --no-legend | grep -c ` + testUser + ` || true)"
login "echo test: x is \$($mypr -C $ws --json=false exec x 2>/dev/null)"
`)
		want(t, out, "sessions 0", "x is 41")
		if strings.Contains(out, "lingering is off") {
			t.Errorf("enable warned although the user lingers:\n%s", out)
		}
	})
	t.Run("after a reboot the first connection starts it", func(t *testing.T) {
		m.t = t
		out := m.boot(`
systemctl start user@$uid.service # lingering starts it; this waits
echo "test: $(user "systemctl --user is-active mypr@home-mypr\\\\x2dtest-ws.socket")"
echo "test: $(user "systemctl --user is-active mypr@home-mypr\\\\x2dtest-ws.service" || true)"
echo "test: $(user "$mypr -C $ws --json=false exec \"'x' in globals()\" 2>/dev/null")"
echo "test: $(user "systemctl --user is-active mypr@home-mypr\\\\x2dtest-ws.service")"
user "journalctl --user -u 'mypr@*' -n 3 --no-pager -q" || true
`)
		want(t, out, "active", "inactive", "False", "active")
	})
}
