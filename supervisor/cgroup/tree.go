package cgroup

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// leafName is the group that the supervisor moves itself to when it must.
const leafName = "supervisor"

// controllers that unit limits need, in the order they are enabled.
var wanted = []string{"memory", "pids", "cpu"}

// Tree is a supervisor's own subtree.
type Tree struct {
	Dir         string   // absolute directory
	Controllers []string // enabled for the groups below
	// Why no (or not every) controller is available; "" when all are.
	Reason string
}

// Find makes or finds the subtree name below parent ("" means below the process's
// own group) and enables what controllers it can. The error says why cgroups cannot
// be used at all.
func Find(parent, name string) (*Tree, error) {
	if name == "" || strings.ContainsAny(name, "/\n") {
		return nil, fmt.Errorf("bad group name %q", name)
	}
	own := false
	if parent == "" {
		dir, err := Own()
		if err != nil {
			return nil, err
		}
		parent, own = dir, true
	}
	// Started by a unit of an earlier supervisor of that name: its tree is the one.
	for dir := parent; own && dir != "/"; dir = filepath.Dir(dir) {
		if filepath.Base(dir) == name {
			return Open(dir)
		}
	}
	t := &Tree{Dir: filepath.Join(parent, name)}
	if err := os.Mkdir(t.Dir, 0o755); err != nil && !os.IsExist(err) {
		return nil, fmt.Errorf("cannot make a group: %w", err)
	}
	if err := t.usable(); err != nil {
		_ = os.Remove(t.Dir)
		return nil, err
	}
	t.enable(parent, own)
	return t, nil
}

// Open is Find for a subtree that an earlier supervisor made and recorded. If the
// calling process sits in a group below it (it was started by a unit), it moves to a
// leaf of its own, so that it does not end with that unit.
func Open(dir string) (*Tree, error) {
	t := &Tree{Dir: dir}
	if err := t.usable(); err != nil {
		return nil, err
	}
	if own, err := Own(); err == nil && strings.HasPrefix(own, dir+"/") && own != filepath.Join(dir, leafName) {
		if err := t.moveSelf(); err != nil {
			return nil, err
		}
	}
	t.enable(filepath.Dir(dir), false)
	return t, nil
}

// usable checks what every tier with cgroups needs.
func (t *Tree) usable() error {
	var st unix.Statfs_t
	if err := unix.Statfs(t.Dir, &st); err != nil {
		return fmt.Errorf("%s: %w", t.Dir, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("%s is no cgroup v2 directory", t.Dir)
	}
	if err := unix.Access(filepath.Join(t.Dir, "cgroup.kill"), unix.W_OK); err != nil {
		return fmt.Errorf("cgroup.kill (Linux 5.14): %w", err)
	}
	return t.testClone()
}

// testClone makes a group and asks the kernel to start a process in it: container
// runtimes refuse clone3 by seccomp, and older kernels have no CLONE_INTO_CGROUP.
func (t *Tree) testClone() error {
	g, err := t.New("probe-"+strconv.Itoa(os.Getpid()), Limits{})
	if err != nil {
		return err
	}
	defer g.Remove()
	defer g.Close()
	pid, err := syscall.ForkExec("/proc/self/mypr-no-such-program", []string{"probe"}, &syscall.ProcAttr{
		Sys: &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: g.FD()},
	})
	if err == nil { // cannot be
		_, _ = syscall.Wait4(pid, nil, 0, nil)
		return nil
	}
	if errors.Is(err, syscall.ENOENT) {
		return nil // the clone worked, and the exec failed as it should
	}
	return fmt.Errorf("clone into a cgroup: %w", err)
}

func (t *Tree) enable(parent string, own bool) {
	have, why := words(filepath.Join(t.Dir, "cgroup.controllers")), ""
	up := words(filepath.Join(parent, "cgroup.controllers"))
	// The parent may have them and not hand them on. It may not have processes of its own
	// then, so we leave it.
	if !slices.Contains(have, "memory") && own && slices.Contains(up, "memory") {
		switch {
		case !delegated(parent):
			why = ": " + parent + " has them and hands none on, and is not this supervisor's alone to change"
		case !alone(parent):
			why = ": " + parent + " has them and can hand none on while other processes are in it"
		default:
			if err := t.moveSelf(); err != nil {
				why = ": " + err.Error()
				break
			}
			enableIn(parent, up)
			have = words(filepath.Join(t.Dir, "cgroup.controllers"))
		}
	}
	enableIn(t.Dir, have)
	t.Controllers = words(filepath.Join(t.Dir, "cgroup.subtree_control"))
	var missing []string
	for _, c := range wanted {
		if !slices.Contains(t.Controllers, c) {
			missing = append(missing, c)
		}
	}
	if len(missing) > 0 {
		t.Reason = "no " + strings.Join(missing, ", ") + " controller in " + t.Dir + why
	}
}

// Limits reports whether the tree can hold units to memory and task limits.
func (t *Tree) Limits() bool {
	return slices.Contains(t.Controllers, "memory") && slices.Contains(t.Controllers, "pids")
}

func enableIn(dir string, have []string) {
	for _, c := range wanted {
		if slices.Contains(have, c) {
			_ = write(dir, "cgroup.subtree_control", "+"+c) // one by one: one refusal must not cost the others
		}
	}
}

// delegated: systemd marks a group whose unit has Delegate=yes; a process that is in
// the root of its cgroup namespace, and not of the machine, was given that root.
func delegated(dir string) bool {
	buf := make([]byte, 8)
	for _, attr := range []string{"user.delegate", "trusted.delegate"} {
		if n, err := unix.Getxattr(dir, attr, buf); err == nil && string(buf[:n]) == "1" {
			return true
		}
	}
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return false
	}
	path, ok := v2Path(b)
	// The machine's root group has no cgroup.type; the root of a namespace has.
	_, typ := os.Stat(filepath.Join(dir, "cgroup.type"))
	return ok && path == "/" && typ == nil
}

func alone(dir string) bool {
	pids := words(filepath.Join(dir, "cgroup.procs"))
	return len(pids) == 1 && pids[0] == strconv.Itoa(os.Getpid())
}

func (t *Tree) moveSelf() error {
	leaf := filepath.Join(t.Dir, leafName)
	if err := os.Mkdir(leaf, 0o755); err != nil && !os.IsExist(err) {
		return err
	}
	return write(leaf, "cgroup.procs", strconv.Itoa(os.Getpid()))
}

// Remove removes the tree if nothing is left in it; the supervisor itself, if it sits
// in the leaf, moves out to the tree's parent first.
func (t *Tree) Remove() error {
	leaf := filepath.Join(t.Dir, leafName)
	if own, err := Own(); err == nil && own == leaf {
		if err := write(filepath.Dir(t.Dir), "cgroup.procs", strconv.Itoa(os.Getpid())); err != nil {
			return nil // the parent has controllers enabled: the leaf goes with us
		}
	}
	_ = os.Remove(leaf)
	err := os.Remove(t.Dir)
	if os.IsNotExist(err) {
		return nil
	}
	return err
}

// Groups names the groups in the tree, without the supervisor's leaf.
func (t *Tree) Groups() []string {
	var names []string
	entries, _ := os.ReadDir(t.Dir)
	for _, e := range entries {
		if e.IsDir() && e.Name() != leafName {
			names = append(names, e.Name())
		}
	}
	return names
}

// Own is the directory of the calling process's group.
func Own() (string, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	return dirOf(mounts, b)
}

// dirOf maps the v2 line of a /proc/PID/cgroup to a directory.
func dirOf(mountinfo, cgroup []byte) (string, error) {
	point, root, ok := findMount(mountinfo)
	if !ok {
		return "", errors.New("no cgroup v2 hierarchy is mounted")
	}
	path, ok := v2Path(cgroup)
	if !ok {
		return "", errors.New("the process is in no cgroup v2 group")
	}
	rel, ok := strings.CutPrefix(path, strings.TrimSuffix(root, "/"))
	if !ok || strings.HasPrefix(path, "/..") || rel != "" && rel[0] != '/' {
		return "", fmt.Errorf("the process's group %s is outside of what is mounted at %s", path, point)
	}
	return filepath.Join(point, rel), nil
}

// findMount finds the last cgroup2 mount (later mounts cover earlier ones).
func findMount(mountinfo []byte) (point, root string, ok bool) {
	sc := bufio.NewScanner(bytes.NewReader(mountinfo))
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		left, right, found := strings.Cut(sc.Text(), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if found && len(l) >= 5 && len(r) >= 1 && r[0] == "cgroup2" {
			root, point, ok = unescape(l[3]), unescape(l[4]), true
		}
	}
	return point, root, ok
}

// unescape undoes the octal escapes of mountinfo (proc_pid_mountinfo(5)).
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func v2Path(cgroup []byte) (string, bool) {
	for line := range strings.Lines(string(cgroup)) {
		if p, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			// A process whose group was removed shows " (deleted)" behind its path.
			return strings.TrimSuffix(p, " (deleted)"), true
		}
	}
	return "", false
}

// PathOf is the cgroup v2 path of a process, as the calling process's namespace
// shows it; relate it to a directory only by its suffix.
func PathOf(pid int) (string, bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return "", false
	}
	return v2Path(b)
}

// GroupOf names the group of the tree that a process is in (or in a group below it).
func (t *Tree) GroupOf(pid int) (string, bool) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", false
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return "", false
	}
	dir, err := dirOf(mounts, b)
	if err != nil {
		return "", false
	}
	rel, ok := strings.CutPrefix(dir, t.Dir+"/")
	if !ok {
		return "", false
	}
	name, _, _ := strings.Cut(rel, "/")
	return name, true
}

func words(path string) []string {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	return strings.Fields(string(b))
}

func write(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// Enable hands on to the groups below dir what controllers units need and dir has.
func Enable(dir string) { enableIn(dir, words(filepath.Join(dir, "cgroup.controllers"))) }

// Populated reports whether a process is in the group at dir or below it.
func Populated(dir string) bool {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
	return err == nil && bytes.Contains(b, []byte("populated 1"))
}

// KillAll kills what is in the group at dir and waits, at most for patience, until
// nothing is.
func KillAll(dir string, patience time.Duration) {
	fd, err := unix.Open(filepath.Join(dir, "cgroup.events"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if write(dir, "cgroup.kill", "1") != nil {
		return
	}
	for deadline := time.Now().Add(patience); ; {
		var b [128]byte
		n, err := unix.Pread(fd, b[:], 0) // also arms the event
		left := time.Until(deadline)
		if err != nil || !bytes.Contains(b[:n], []byte("populated 1")) || left <= 0 {
			return
		}
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, int(left.Milliseconds())+1)
	}
}
