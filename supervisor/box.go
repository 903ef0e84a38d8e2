package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/cgroup"
	"mypr/supervisor/process"
	"mypr/supervisor/sockets"
	"mypr/supervisor/spec"
)

// box is what holds all processes of one run: a cgroup (tiers 1 and 2) or a shim
// (tier 3). Its methods are the loop's and do not block.
type box interface {
	// start starts a process and calls done when it was executed or could not be.
	start(tag string, c *process.Command, done func(*process.Process, error))
	signal(sig syscall.Signal, except ...int)
	kill()
	// allowTasks makes new processes possible again after kill.
	allowTasks()
	populated() bool
	// onEmpty calls f once when nothing is left. If that is so already, it may never.
	onEmpty(f func())
	// freeze calls done when every process is stopped (or runs on).
	freeze(on bool, done func(error))
	contains(pid int) bool
	pids() []int
	// oom counts kills for want of memory; onOOM calls f when the count may have changed.
	oom() uint64
	onOOM(f func())
	usage() cgroup.Usage
	// remove takes the empty box away; it fails while something is left.
	remove() error
	// close lets go without touching what runs.
	close()
	record() *boxRecord
}

// frozenTimeout bounds the wait for cgroup.freeze to take effect: a process in an
// uninterruptible sleep can hold it up.
const frozenTimeout = 5 * time.Second

func (s *Supervisor) newBox(u *unit) (box, error) {
	name := u.name + "-" + u.Invocation
	if s.tier == 3 {
		return s.newShimBox(u)
	}
	sv := u.def.Service
	limits := cgroup.Limits{
		MemoryMax: sv.MemoryMax, MemoryHigh: sv.MemoryHigh, MemorySwapMax: sv.MemorySwapMax,
		CPUQuota: sv.CPUQuota, CPUWeight: sv.CPUWeight, TasksMax: sv.TasksMax,
		OOMGroup: sv.OOMPolicy == "kill",
	}
	if spare := s.spare; spare != nil && spare.invocation == u.Invocation {
		s.spare = nil
		b := &cgroupBox{s: s, g: spare.g}
		if err := s.tree.Limit(b.g, limits); err != nil {
			_ = b.remove()
			return nil, err
		}
		return b, nil
	}
	g, err := s.tree.New(name, limits)
	if err != nil {
		return nil, err
	}
	return &cgroupBox{s: s, g: g}, nil
}

// spareGroup is a group made in advance, for a run whose invocation was chosen with it.
type spareGroup struct {
	invocation string
	g          *cgroup.Group
}

// prepare makes a group for the next brief run, which has one thing less to wait for.
// Its name begins with no unit's.
func (s *Supervisor) prepare() {
	if s.spare != nil || s.shutting || s.tier == 3 {
		return
	}
	id := newID()
	if g, err := s.tree.New("run-"+id, cgroup.Limits{}); err == nil {
		s.spare = &spareGroup{id, g}
	}
}

func (s *Supervisor) dropSpare() {
	if s.spare != nil {
		s.spare.g.Close()
		_ = s.spare.g.Remove()
		s.spare = nil
	}
}

type cgroupBox struct {
	s        *Supervisor
	g        *cgroup.Group
	events   *watch
	oomWatch *watch
	empty    func()
	frozen   func(error)
	wantOn   bool
	frozenT  *timer
}

func (b *cgroupBox) start(_ string, c *process.Command, done func(*process.Process, error)) {
	c.CgroupFD = b.g.FD()
	p, status, err := process.Start(c)
	b.s.forked = true
	if err != nil || status == nil {
		done(p, err)
		return
	}
	w, werr := b.s.poll.add(process.FD(status), unix.EPOLLIN, nil)
	if werr != nil {
		done(p, process.ReadStatus(status))
		return
	}
	b.s.starting[p.PID] = &starting{p: p}
	w.f = func(uint32) {
		w.remove()
		st := b.s.starting[p.PID]
		err := process.ReadStatus(status)
		done(p, err)
		pr := b.s.procs[p.PID]
		if err != nil || st.exit == nil || pr == nil {
			delete(b.s.starting, p.PID)
			return
		}
		// In a turn of its own: first it has started. Until then nothing is re-executed.
		b.s.queue.post(func() {
			if b.s.starting[p.PID] == st {
				delete(b.s.starting, p.PID)
			}
			if b.s.procs[p.PID] == pr {
				pr.u.ended(pr, *st.exit)
			}
		})
	}
}

// starting is a child that is the exec helper still, or may be no more: its end, if it
// comes now, is kept until it is known what it was the end of.
type starting struct {
	p    *process.Process
	exit *process.Exit
}

func (b *cgroupBox) signal(sig syscall.Signal, except ...int) { _ = b.g.Signal(sig, except...) }
func (b *cgroupBox) kill() {
	if err := b.g.Kill(); err != nil {
		b.s.log.Error("cannot kill the group", "group", b.g.Name, "err", err)
	}
}
func (b *cgroupBox) allowTasks() { b.g.AllowTasks() }

func (b *cgroupBox) populated() bool {
	on, err := b.g.Populated()
	if err != nil {
		b.s.log.Error("cannot tell whether the group is empty", "group", b.g.Name, "err", err)
		return true
	}
	return on
}

func (b *cgroupBox) onEmpty(f func()) {
	b.empty = f
	b.watchEvents()
}

func (b *cgroupBox) watchEvents() {
	if b.events != nil {
		b.events.arm(unix.EPOLLPRI)
		return
	}
	fd, err := b.g.Events()
	if err != nil {
		return
	}
	if b.events, err = b.s.poll.add(fd, unix.EPOLLPRI, func(uint32) { b.changed() }); err != nil {
		b.s.log.Error("cannot watch the group", "group", b.g.Name, "err", err)
	}
}

func (b *cgroupBox) changed() {
	if b.empty != nil && !b.populated() {
		f := b.empty
		b.empty = nil
		f()
	}
	if b.frozen != nil {
		if on, err := b.g.Frozen(); err == nil && on == b.wantOn {
			b.thawed(nil)
		}
	}
	if b.empty != nil || b.frozen != nil {
		b.watchEvents()
	}
}

func (b *cgroupBox) freeze(on bool, done func(error)) {
	if b.frozen != nil {
		b.thawed(errors.New("another freeze or thaw came before it took effect"))
	}
	if err := b.g.Freeze(on); err != nil {
		done(err)
		return
	}
	b.frozen, b.wantOn = done, on
	b.frozenT = b.s.afterFunc(frozenTimeout, func() {
		b.thawed(fmt.Errorf("not every process had stopped after %v", frozenTimeout))
	})
	b.changed()
}

func (b *cgroupBox) thawed(err error) {
	f := b.frozen
	b.frozen = nil
	b.frozenT.stop()
	f(err)
}

func (b *cgroupBox) contains(pid int) bool { return b.g.Contains(pid) }
func (b *cgroupBox) pids() []int           { return b.g.PIDs() }
func (b *cgroupBox) oom() uint64           { return b.g.OOMKills() }

func (b *cgroupBox) onOOM(f func()) {
	fd := b.g.OOMEvents()
	if fd < 0 {
		return
	}
	b.g.OOMKills()
	b.oomWatch, _ = b.s.poll.add(fd, unix.EPOLLPRI, func(uint32) {
		f()
		b.oomWatch.arm(unix.EPOLLPRI)
	})
}

func (b *cgroupBox) usage() cgroup.Usage { return cgroup.ReadUsage(b.g.Dir()) }

func (b *cgroupBox) remove() error {
	if err := b.g.Remove(); err != nil {
		return err
	}
	b.close()
	return nil
}

func (b *cgroupBox) close() {
	b.events.remove()
	b.oomWatch.remove()
	if b.frozen != nil {
		b.thawed(errors.New("the unit has ended"))
	}
	b.empty = nil
	b.g.Close()
}

func (b *cgroupBox) record() *boxRecord { return &boxRecord{Cgroup: b.g.Name} }

// shimBox is the box of tier 3. Calls to the shim that wait for an answer run in
// goroutines that end with the shim's connection.
type shimBox struct {
	s      *Supervisor
	u      *unit
	shim   *process.Shim
	sock   string
	starts int
	full   bool // something was started and the shim did not say that it is empty
	empty  func()
	closed bool
	lost   bool                  // the shim died; nothing can be started in it
	before []process.ShimProcess // as found when a running shim was attached to
	early  []process.ShimProcess // ends that came before the answer to their start
}

// shimSuffix ends the name of a shim's socket, exitSuffix that of its exit file.
const (
	shimSuffix = ".shim"
	exitSuffix = ".exit"
)

func (s *Supervisor) newShimBox(u *unit) (box, error) {
	if s.opt.StatePath == "" {
		return nil, errors.New("containment by a shim needs a state path")
	}
	b := &shimBox{s: s, u: u, sock: s.opt.StatePath + "-" + u.Invocation[:16] + shimSuffix}
	// Of the shim before, if that of a unit that goes on has ended.
	_ = os.Remove(b.sock)
	_ = os.Remove(exitFile(b.sock))
	l, err := sockets.Listen(b.sock, sockets.Config{})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	if b.shim, err = process.StartShim(l, exitFile(b.sock), b.hooks()); err != nil {
		_ = os.Remove(b.sock)
		return nil, err
	}
	return b, nil
}

func (b *shimBox) hooks() process.ShimEvents {
	return process.ShimEvents{
		Exit: func(p process.ShimProcess) {
			b.s.queue.post(func() { b.exited(p) })
		},
		Empty: func(starts int) {
			b.s.queue.post(func() {
				if starts == b.starts {
					b.full = false
					b.emptied()
				}
			})
		},
		Gone: func() { b.s.queue.post(b.gone) },
	}
}

func (b *shimBox) emptied() {
	if f := b.empty; f != nil && !b.full {
		b.empty = nil
		f()
	}
}

// gone: the shim died (or was ended by remove). What it held cannot be attributed by
// descent any more; the invocation id in the environment still names it.
func (b *shimBox) gone() {
	if b.closed {
		return
	}
	b.s.log.Error("the shim of a unit died; killing what it held", "unit", b.u.name, "invocation", b.u.Invocation)
	b.full, b.lost = false, true
	process.KillInvocation(b.u.Invocation)
	b.s.shimDied(b)
	b.emptied()
}

func (b *shimBox) start(tag string, c *process.Command, done func(*process.Process, error)) {
	b.full = true
	b.starts++
	// The files are the caller's and may be closed when this returns.
	d := *c
	var dups []*os.File
	dup := func(f *os.File) *os.File {
		if f == nil {
			return nil
		}
		n, err := process.Dup(f)
		if err != nil {
			return nil
		}
		dups = append(dups, n)
		return n
	}
	for i := range d.Stdio {
		d.Stdio[i] = dup(c.Stdio[i])
	}
	d.Files = nil
	for _, f := range c.Files {
		d.Files = append(d.Files, dup(f))
	}
	go func() {
		p, err := b.shim.Start(context.Background(), tag, &d) // ends with the connection at the latest
		for _, f := range dups {
			f.Close()
		}
		b.s.queue.post(func() {
			done(p, err)
			if p != nil {
				early := b.early
				b.early = nil
				b.s.soon(func() { // when its start has been told: it was one, however short
					for _, e := range early {
						b.exited(e)
					}
				})
			}
		})
	}()
}

// exited: the shim reports the end of a process that it started.
func (b *shimBox) exited(p process.ShimProcess) {
	if pr := b.s.procs[p.PID]; pr != nil && pr.shim && pr.p.StartTime == p.StartTime {
		pr.u.ended(pr, p.Exit)
		return
	}
	b.early = append(b.early, p)
}

func (b *shimBox) signal(sig syscall.Signal, except ...int) { _ = b.shim.Signal(sig, except...) }
func (b *shimBox) kill()                                    { _ = b.shim.Kill() }
func (b *shimBox) allowTasks()                              {}
func (b *shimBox) populated() bool                          { return b.full }
func (b *shimBox) onEmpty(f func())                         { b.empty = f }

func (b *shimBox) freeze(on bool, done func(error)) {
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), frozenTimeout)
		defer cancel()
		err := b.shim.Freeze(ctx, on)
		b.s.queue.post(func() { done(err) })
	}()
}

func (b *shimBox) contains(pid int) bool {
	return process.IsDescendant(pid, b.shim.Process.PID)
}

func (b *shimBox) pids() []int {
	pids, _ := process.Descendants(b.shim.Process.PID)
	return pids
}
func (b *shimBox) oom() uint64         { return 0 }
func (b *shimBox) onOOM(func())        {}
func (b *shimBox) usage() cgroup.Usage { return cgroup.Usage{} }

func (b *shimBox) remove() error {
	if b.full {
		return syscall.EBUSY
	}
	b.closed = true
	p := b.shim.Process
	_ = p.Signal(syscall.SIGKILL)
	b.shim.Close()
	_ = os.Remove(b.sock)
	w, err := b.s.poll.add(p.PIDFD(), unix.EPOLLIN, nil)
	if err != nil {
		p.Close()
		return nil
	}
	b.s.ending++ // the supervisor does not end before its shims
	w.f = func(uint32) {
		b.s.ending--
		w.remove()
		p.Close()
	}
	return nil
}

func (b *shimBox) close() {
	if !b.closed {
		b.closed = true
		b.shim.Close()
		b.shim.Process.Close()
	}
}

func (b *shimBox) record() *boxRecord {
	return &boxRecord{Socket: b.sock, Shim: &procRecord{b.shim.Process.PID, b.shim.Process.StartTime}}
}

// setup is what of the unit only the new process can set.
func setup(sv *spec.Service) process.Setup {
	st := process.Setup{UMask: sv.UMask, Nice: sv.Nice}
	for _, l := range []struct {
		n int
		r *spec.Rlimit
	}{
		{unix.RLIMIT_NOFILE, sv.LimitNOFILE}, {unix.RLIMIT_NPROC, sv.LimitNPROC}, {unix.RLIMIT_CORE, sv.LimitCORE},
		{unix.RLIMIT_AS, sv.LimitAS}, {unix.RLIMIT_CPU, sv.LimitCPU}, {unix.RLIMIT_FSIZE, sv.LimitFSIZE},
	} {
		if l.r != nil {
			st.Rlimits = append(st.Rlimits, process.Rlimit{Resource: l.n, Soft: l.r.Soft, Hard: l.r.Hard})
		}
	}
	return st
}
