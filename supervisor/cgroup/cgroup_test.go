package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// prefix of the groups of this run alone.
var prefix = fmt.Sprintf("mypr-cgtest-%d-", os.Getpid())

func TestMain(m *testing.M) {
	code := m.Run()
	if own, err := Own(); err == nil {
		if left, _ := filepath.Glob(filepath.Join(own, prefix+"*")); len(left) > 0 {
			println("groups left:", strings.Join(left, " "))
			code = 1
		}
	}
	os.Exit(code)
}

func TestDirOf(t *testing.T) {
	const hybrid = `25 30 0:23 / /sys rw - sysfs sysfs rw
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
42 31 0:39 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
`
	const covered = `30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro
41 30 0:38 /docker/abc /sys/fs/cgroup rw shared:9 master:1 - cgroup2 cgroup rw
`
	const blank = `41 30 0:38 / /mnt/a\040b rw - cgroup2 cgroup rw
`
	for _, c := range []struct{ name, mounts, cgroup, want, problem string }{
		{"hybrid", hybrid, "9:name=systemd:/x\n0::/user.slice/a\n", "/sys/fs/cgroup/unified/user.slice/a", ""},
		{"root", hybrid, "0::/\n", "/sys/fs/cgroup/unified", ""},
		{"mounted below", covered, "0::/docker/abc/x\n", "/sys/fs/cgroup/x", ""},
		{"mount's own root", covered, "0::/docker/abc\n", "/sys/fs/cgroup", ""},
		{"outside", covered, "0::/docker/abcd\n", "", "outside"},
		{"namespace parent", hybrid, "0::/../other\n", "", "outside"},
		{"escaped", blank, "0::/x\n", "/mnt/a b/x", ""},
		{"deleted", hybrid, "0::/gone (deleted)\n", "/sys/fs/cgroup/unified/gone", ""},
		{"v1 only", "42 31 0:39 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", "4:memory:/\n", "", "no cgroup v2"},
		{"no v2 line", hybrid, "4:memory:/\n", "", "no cgroup v2 group"},
	} {
		got, err := dirOf([]byte(c.mounts), []byte(c.cgroup))
		if got != c.want || (err == nil) != (c.problem == "") || err != nil && !strings.Contains(err.Error(), c.problem) {
			t.Errorf("%s: %q, %v", c.name, got, err)
		}
	}
}

func FuzzDirOf(f *testing.F) {
	f.Add([]byte("41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"), []byte("0::/a/b\n"))
	f.Add([]byte("41 31 0:38 /x /a\\040b rw a b c - cgroup2 n rw"), []byte("0::/x"))
	f.Fuzz(func(t *testing.T, mounts, cgroup []byte) {
		if dir, err := dirOf(mounts, cgroup); err == nil && dir == "" {
			t.Error("no directory and no error")
		}
	})
}

func tree(t *testing.T) *Tree {
	t.Helper()
	tr, err := Find("", prefix+strings.ToLower(t.Name()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Remove(); err != nil {
			t.Error(err)
		}
	})
	return tr
}

func startIn(t *testing.T, g *Group, script string) *exec.Cmd {
	t.Helper()
	c := exec.Command("/bin/sh", "-c", script)
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: g.FD(), Setsid: true}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return c
}

// await waits for the group's events until ok.
func await(t *testing.T, g *Group, ok func() (bool, error)) {
	t.Helper()
	fd, err := g.Events()
	if err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(60 * time.Second)
	for {
		done, err := ok()
		if err != nil {
			t.Fatal(err)
		}
		if done {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("it did not come")
		}
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, 1000)
	}
}

func TestGroup(t *testing.T) {
	tr := tree(t)
	g, err := tr.New("run-1", Limits{MemoryMax: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if _, err := tr.New("run-1", Limits{}); !errors.Is(err, os.ErrExist) {
		t.Errorf("a group was made twice: %v", err)
	}
	if on, err := g.Populated(); on || err != nil {
		t.Errorf("fresh: %v %v", on, err)
	}
	c := startIn(t, g, `trap "" TERM; mkdir `+g.Dir()+`/own; sleep 1000 & sleep 1000`)
	if !g.Contains(c.Process.Pid) || g.Contains(os.Getpid()) {
		t.Error("Contains is wrong")
	}
	if name, ok := tr.GroupOf(c.Process.Pid); name != "run-1" || !ok {
		t.Errorf("GroupOf: %q %v", name, ok)
	}
	if err := g.Remove(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("removed while populated: %v", err)
	}
	for len(g.PIDs()) < 3 { // until the shell has forked twice
	}
	if err := g.Freeze(true); err != nil {
		t.Fatal(err)
	}
	await(t, g, g.Frozen)
	if err := g.Freeze(false); err != nil {
		t.Fatal(err)
	}
	await(t, g, func() (bool, error) { on, err := g.Frozen(); return !on, err })
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	await(t, g, func() (bool, error) { on, err := g.Populated(); return !on, err })
	if err := g.Remove(); err != nil { // with the group that the process had made in it
		t.Error(err)
	}
	if on, err := g.Populated(); on || err != nil {
		t.Errorf("removed: %v %v", on, err)
	}
	if err := g.Remove(); err != nil {
		t.Errorf("removing twice: %v", err)
	}
}

func TestSignalLeavesOthersAlone(t *testing.T) {
	tr := tree(t)
	g, err := tr.New("run-2", Limits{})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	spared, hit := startIn(t, g, "exec sleep 1000"), startIn(t, g, "exec sleep 1000")
	if err := g.Signal(syscall.SIGTERM, spared.Process.Pid); err != nil {
		t.Fatal(err)
	}
	_ = hit.Wait()
	if err := spared.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the excepted process: %v", err)
	}
	_ = g.Kill()
	_ = spared.Wait()
	await(t, g, func() (bool, error) { on, err := g.Populated(); return !on, err })
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
}

// A group that is not ours is no tree, and nothing is written to it.
func TestFindRefuses(t *testing.T) {
	for _, c := range []struct{ parent, name string }{{"", ""}, {"", "a/b"}, {t.TempDir(), "x"}} {
		if tr, err := Find(c.parent, c.name); err == nil {
			t.Errorf("%q %q: %+v", c.parent, c.name, tr)
		}
	}
}
