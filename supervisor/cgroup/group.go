package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Limits of a group; 0 is "not set". They need a tree with controllers and are
// ignored without.
type Limits struct {
	MemoryMax     uint64 // bytes
	MemoryHigh    uint64
	MemorySwapMax uint64
	CPUQuota      uint64 // microseconds per second
	CPUWeight     uint64
	TasksMax      uint64
	OOMGroup      bool // the kernel kills all of the group, not one process of it
}

// Group is one group of a Tree. It is not safe for concurrent use.
type Group struct {
	Name   string
	dir    string
	fd     int // the directory, for CLONE_INTO_CGROUP; -1 when not open
	events int // cgroup.events, -1 until Events
	oom    int // memory.events, -1 until OOMEvents
	tasks  uint64
	memory bool // there is a memory controller
}

// New makes a fresh group. An existing one is an error: a group is never used twice.
func (t *Tree) New(name string, l Limits) (*Group, error) {
	g := &Group{Name: name, dir: filepath.Join(t.Dir, name), fd: -1, events: -1, oom: -1, memory: slices.Contains(t.Controllers, "memory")}
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return nil, fmt.Errorf("cannot make a group: %w", err)
	}
	fd, err := unix.Open(g.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		_ = os.Remove(g.dir)
		return nil, fmt.Errorf("%s: %w", g.dir, err)
	}
	g.fd = fd
	if err := t.Limit(g, l); err != nil {
		g.Close()
		_ = os.Remove(g.dir)
		return nil, err
	}
	return g, nil
}

// OpenGroup opens a group that an earlier supervisor made.
func (t *Tree) OpenGroup(name string) (*Group, error) {
	g := &Group{Name: name, dir: filepath.Join(t.Dir, name), fd: -1, events: -1, oom: -1, memory: slices.Contains(t.Controllers, "memory")}
	fd, err := unix.Open(g.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: g.dir, Err: err}
	}
	g.fd = fd
	return g, nil
}

// Limit sets limits, once, before anything runs in the group.
func (t *Tree) Limit(g *Group, l Limits) error {
	g.tasks = l.TasksMax
	set := func(controller, file string, value uint64) error {
		if value == 0 || !slices.Contains(t.Controllers, controller) {
			return nil
		}
		err := write(g.dir, file, strconv.FormatUint(value, 10))
		if errors.Is(err, fs.ErrNotExist) {
			return nil // memory.swap.max without swap accounting
		}
		return err
	}
	err := errors.Join(
		set("memory", "memory.max", l.MemoryMax),
		set("memory", "memory.high", l.MemoryHigh),
		set("memory", "memory.swap.max", l.MemorySwapMax),
		set("pids", "pids.max", l.TasksMax),
		set("cpu", "cpu.weight", l.CPUWeight),
	)
	if l.OOMGroup {
		err = errors.Join(err, set("memory", "memory.oom.group", 1))
	}
	if l.CPUQuota > 0 && slices.Contains(t.Controllers, "cpu") {
		const period = 100_000 // microseconds, the kernel's default
		err = errors.Join(err, write(g.dir, "cpu.max", fmt.Sprintf("%d %d", max(l.CPUQuota/10, 1000), period)))
	}
	if err != nil {
		return fmt.Errorf("cannot set limits: %w", err)
	}
	return nil
}

// Dir is the group's directory.
func (g *Group) Dir() string { return g.dir }

// FD is the open directory.
func (g *Group) FD() int { return g.fd }

// Close closes what is open; the group stays.
func (g *Group) Close() {
	for _, fd := range []*int{&g.fd, &g.events, &g.oom} {
		if *fd >= 0 {
			unix.Close(*fd)
			*fd = -1
		}
	}
}

// Remove removes the group with the groups that its processes made in it. It fails
// while a process is left; that it succeeds proves that none is.
func (g *Group) Remove() error {
	err := unix.Rmdir(g.dir)
	if err == unix.EBUSY || err == unix.ENOTEMPTY {
		if populated, perr := g.populatedNow(); perr != nil || populated {
			return syscall.EBUSY
		}
		_ = filepath.WalkDir(g.dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() && path != g.dir {
				removeDeep(path)
				return fs.SkipDir
			}
			return nil
		})
		err = unix.Rmdir(g.dir)
	}
	if err == unix.ENOENT {
		return nil
	}
	return err
}

func removeDeep(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			removeDeep(filepath.Join(dir, e.Name()))
		}
	}
	_ = unix.Rmdir(dir)
}

// Events is a descriptor of cgroup.events that polls (PRI) when Populated or Frozen
// may have changed since either was last called. The kernel sends at most one such
// event per 10 ms, so ask first and wait only then.
func (g *Group) Events() (int, error) {
	if g.events < 0 {
		fd, err := unix.Openat(g.fd, "cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1, &fs.PathError{Op: "open", Path: g.dir + "/cgroup.events", Err: err}
		}
		g.events = fd
	}
	return g.events, nil
}

// Populated reports whether a process that is not a zombie is left in the group or
// below it. A group that was removed is not populated.
func (g *Group) Populated() (bool, error) { return g.event("populated") }

// Frozen reports whether every process of the group is frozen.
func (g *Group) Frozen() (bool, error) { return g.event("frozen") }

func (g *Group) event(key string) (bool, error) {
	fd, err := g.Events()
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return false, err
	}
	buf := make([]byte, 256)
	n, err := unix.Pread(fd, buf, 0)
	if err == unix.ENODEV { // removed
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%s/cgroup.events: %w", g.dir, err)
	}
	return counter(buf[:n], key) != 0, nil
}

func (g *Group) populatedNow() (bool, error) {
	b, err := os.ReadFile(filepath.Join(g.dir, "cgroup.events"))
	if err != nil {
		return false, err
	}
	return counter(b, "populated") != 0, nil
}

// counter is the value of "key value" in a flat keyed file.
func counter(b []byte, key string) uint64 {
	for line := range bytes.Lines(b) {
		k, v, ok := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		if ok && string(k) == key {
			n, _ := strconv.ParseUint(string(v), 10, 64)
			return n
		}
	}
	return 0
}

// PIDs lists the processes of the group and of groups below it.
func (g *Group) PIDs() []int {
	var pids []int
	_ = filepath.WalkDir(g.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if d.IsDir() {
			for _, w := range words(filepath.Join(path, "cgroup.procs")) {
				if pid, err := strconv.Atoi(w); err == nil && pid > 0 {
					pids = append(pids, pid)
				}
			}
		}
		return nil
	})
	return pids
}

// Contains reports whether pid is in the group or below it.
func (g *Group) Contains(pid int) bool {
	path, ok := PathOf(pid)
	return ok && (strings.HasSuffix(path, "/"+g.Name) || strings.Contains(path, "/"+g.Name+"/"))
}

// Signal sends sig to every process of the group but those in except, again until no
// new ones turn up (a few rounds: against a tree that forks faster only Kill helps).
func (g *Group) Signal(sig syscall.Signal, except ...int) error {
	done := map[int]bool{}
	for range 5 {
		fresh := false
		for _, pid := range g.PIDs() {
			if done[pid] || slices.Contains(except, pid) {
				continue
			}
			done[pid], fresh = true, true
			g.signalOne(pid, sig)
		}
		if !fresh {
			break
		}
	}
	return nil
}

// signalOne signals by pidfd, after a look whether the pid is still a process of this
// group: it may have ended and be somebody else's by now.
func (g *Group) signalOne(pid int, sig syscall.Signal) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if g.Contains(pid) {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0)
	}
}

// Kill sends SIGKILL to all of the group at once. No new process can be made in it
// from then on (where there is a pids controller), so that a forking tree cannot
// outrun it; AllowTasks undoes that.
func (g *Group) Kill() error {
	_ = write(g.dir, "pids.max", "0")
	err := write(g.dir, "cgroup.kill", "1")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// AllowTasks sets pids.max back after Kill.
func (g *Group) AllowTasks() {
	value := "max"
	if g.tasks > 0 {
		value = strconv.FormatUint(g.tasks, 10)
	}
	_ = write(g.dir, "pids.max", value)
}

// Freeze stops (or continues) every process of the group. It takes effect some time
// after the call: see Frozen.
func (g *Group) Freeze(on bool) error {
	value := "0"
	if on {
		value = "1"
	}
	return write(g.dir, "cgroup.freeze", value)
}

// OOMEvents is a descriptor of memory.events that polls (PRI) when OOMKills may have
// changed, or -1 without a memory controller.
func (g *Group) OOMEvents() int {
	if g.oom < 0 && g.memory {
		if fd, err := unix.Openat(g.fd, "memory.events", unix.O_RDONLY|unix.O_CLOEXEC, 0); err == nil {
			g.oom = fd
		}
	}
	return g.oom
}

// OOMKills counts the processes of the group that the kernel killed for want of memory.
func (g *Group) OOMKills() uint64 {
	if g.OOMEvents() < 0 {
		return 0
	}
	buf := make([]byte, 512)
	n, err := unix.Pread(g.oom, buf, 0)
	if err != nil {
		return 0
	}
	return counter(buf[:n], "oom_kill")
}

// Usage is what a group uses, 0 where the kernel does not count it.
type Usage struct {
	MemoryCurrent, MemoryPeak uint64 // bytes
	CPU                       uint64 // microseconds
}

// ReadUsage reads the usage of the group at dir. It may be called from any goroutine.
func ReadUsage(dir string) Usage {
	var u Usage
	u.MemoryCurrent = number(filepath.Join(dir, "memory.current"))
	u.MemoryPeak = number(filepath.Join(dir, "memory.peak"))
	if b, err := os.ReadFile(filepath.Join(dir, "cpu.stat")); err == nil {
		u.CPU = counter(b, "usage_usec")
	}
	return u
}

func number(path string) uint64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(string(bytes.TrimSpace(b)), 10, 64)
	return n
}

// PIDsIn is PIDs for the group at dir. It may be called from any goroutine.
func PIDsIn(dir string) []int { return (&Group{dir: dir}).PIDs() }
