package supervisor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"mypr/supervisor/process"
)

// restore takes over the units of the supervisor before: after a re-execution (the
// same process, so its children are still its own and descriptors came along) or
// after its death. Both go the same way; what could not be kept shows as what it is.
func (s *Supervisor) restore(before *saved) {
	if before != nil {
		for _, su := range before.units {
			if u := s.restoreUnit(su); u != nil {
				u.takeFDs(before)
			}
		}
		for _, u := range s.sorted() {
			if u.isService() {
				u.resume(before.reexec)
			}
		}
		for _, u := range s.sorted() {
			if u.isSocket() {
				u.resumeSocket(before)
			}
			if u.Job != "" {
				u.job = &job{kind: u.Job, phase: u.JobPhase, reason: string(u.Job) + " requested before"}
				if u.job.phase == jobWaiting {
					s.waiting = append(s.waiting, u)
				}
			}
			s.unsettled = append(s.unsettled, u)
		}
	}
	s.reportStrangers()
}

func (s *Supervisor) restoreUnit(su *savedUnit) *unit {
	var u *unit
	switch file, err := s.load(su.Name); {
	case err == nil && !su.Transient:
		u = file
	case su.def == nil:
		s.log.Error("a unit of the earlier supervisor is no longer known", "unit", su.Name, "err", err)
		return nil
	case err == nil:
		u = file
		u.fileDef, u.def, u.transient = file.def, su.def, true
	default:
		u = s.add(su.def, nil, su.Transient)
	}
	u.record = su.record
	s.changed(u)
	return u
}

// takeFDs gives the unit the descriptors that came over the re-execution.
func (u *unit) takeFDs(before *saved) {
	for i := range before.FDs {
		r := before.FDs[i]
		if r.Unit != u.name || r.FD < 0 || r.Kind == fdListen {
			continue
		}
		f := before.takeFor(r.Kind, r.Unit, r.Name)
		switch r.Kind {
		case fdKept:
			u.keep(r.Name, f)
		case fdEnd:
			if n, err := strconv.Atoi(r.Name); err == nil && n < len(u.ends) {
				u.ends[n] = f
			}
		case fdGiven, fdPassed:
			if u.given == nil {
				u.given = map[string]*os.File{}
			}
			u.given[r.Name] = f
			if r.Kind == fdPassed {
				u.passed = append(u.passed, r.Name)
			}
		case fdStored:
			u.store(r.Name, r.Poll, f)
		}
	}
}

// resume goes on with a service where its record says it was.
func (u *unit) resume(reexec bool) {
	for _, r := range slices.Clone(u.Lingering) {
		if b := u.s.openBox(u, r); b != nil {
			u.linger = append(u.linger, b)
			b.onEmpty(func() { u.lingered(b) })
			if !b.populated() {
				u.s.later(func() { u.lingered(b) })
			}
		} else {
			u.Lingering = slices.DeleteFunc(u.Lingering, func(x *boxRecord) bool { return x == r })
		}
	}
	switch u.State {
	case Dead, Failed:
		return
	case AutoRestart:
		u.armRestart(time.Until(u.NextStart))
		return
	}
	u.Adopted = u.Adopted || !reexec
	if u.Box != nil {
		u.box = u.s.openBox(u, u.Box)
	}
	if u.box != nil {
		u.box.onOOM(u.oomChanged)
	}
	main, control := u.Main, u.Control
	u.Main, u.Control = nil, nil
	u.s.log.Info("unit taken over", "unit", u.name, "state", u.State, "invocation", u.Invocation, "main", main)
	if main != nil {
		u.main = u.resumeProc(main, true)
	}
	if control != nil {
		u.control = u.resumeProc(control, false)
	}
	if u.Deadline > 0 {
		u.arm(time.Duration(max(u.Deadline-monotonic(), 1)))
	}
	if u.RuntimeEnd > 0 {
		u.armRuntime(time.Duration(max(u.RuntimeEnd-monotonic(), 1)))
	}
	switch u.State {
	case StartPost, Running, Reload:
		u.startWatchdog() // pings of the meantime are in the notify socket, or were lost with it
	}
	if main == nil && control == nil {
		u.s.later(u.resumeWaiting)
	}
}

// resumeWaiting: no process was recorded, so the unit waited for its box, or was
// between two steps.
func (u *unit) resumeWaiting() {
	switch u.State {
	case Running: // ExitType=cgroup
		if u.boxPopulated() {
			u.box.onEmpty(u.boxEmpty)
		} else {
			u.boxEmpty()
		}
	case StartPre, Start, StartPost, Reload, Stop, StopPost:
		u.runCommand()
	default:
		u.signalAgain()
		u.checkStopped()
	}
}

// resumeProc finds a recorded process again, or lets its end be noticed.
func (u *unit) resumeProc(rec *procRecord, main bool) *proc {
	pr := &proc{u: u, main: main}
	sb, shim := u.box.(*shimBox)
	pr.shim = shim
	if rec.PID == 0 {
		if found := u.findStarted(main); found != nil {
			rec = found
			u.s.later(func() {
				if main && u.main == pr && u.State == Start {
					u.mainStarted()
				}
			})
		}
	}
	if rec.PID == 0 {
		// The supervisor died between deciding to start it and writing down its pid, and
		// nobody tells what came of it. What is in the unit's box ends there.
		u.s.later(func() {
			if u.main == pr || u.control == pr {
				u.fail(resultUnknown, "the supervisor died while it started a process of the unit")
				u.ended(pr, process.Exit{})
			}
		})
		return pr
	}
	p, err := process.Adopt(rec.PID, rec.Start)
	if err == nil && u.box != nil && !u.box.contains(rec.PID) {
		// The same process, but not where we put it: not ours to watch or to kill.
		p.Close()
		err = errors.New("it is not in the unit's box")
	}
	if err == nil && u.box == nil {
		p.Close()
		err = errors.New("the unit's box is gone")
	}
	if err != nil {
		exit := process.Exit{}
		if shim {
			exit = sb.past(rec)
		} else if u.box == nil && u.Box != nil {
			exit = u.s.shimPast(u.Box, rec)
		}
		u.s.log.Info("a process has ended meanwhile", "unit", u.name, "pid", rec.PID, "why", err, "exit", exit)
		u.s.later(func() {
			if u.main == pr || u.control == pr {
				u.ended(pr, exit)
			}
		})
		return pr
	}
	pr.p = p
	u.track(pr)
	if pr.main {
		u.main = pr
	}
	return pr
}

// findStarted looks for a process that the supervisor before had started without living
// to write down its pid: a shim knows it, or has known it, by its tag; in a cgroup it must be the only
// process that no other one there started.
func (u *unit) findStarted(main bool) *procRecord {
	role := "control"
	if main {
		role = "main"
	}
	byTag := func(list []process.ShimProcess) *procRecord {
		for _, p := range list {
			if p.Tag == u.Invocation+"/"+role && p.PID > 0 {
				return &procRecord{p.PID, p.StartTime}
			}
		}
		return nil
	}
	switch b := u.box.(type) {
	case nil: // a shim may have ended with it
		if u.Box != nil && u.Box.Socket != "" {
			if st, err := process.ReadShimExit(exitFile(u.Box.Socket)); err == nil {
				return byTag(st.Processes)
			}
		}
	case *shimBox:
		return byTag(b.before)
	case *cgroupBox:
		pids := b.pids()
		var found *procRecord
		for _, pid := range pids {
			if parent, err := process.Parent(pid); err != nil || slices.Contains(pids, parent) {
				continue
			}
			start, err := process.StartTime(pid)
			if err != nil || found != nil {
				return nil
			}
			found = &procRecord{pid, start}
		}
		return found
	}
	return nil
}

// openBox finds a recorded box, or nil when it is gone.
func (s *Supervisor) openBox(u *unit, r *boxRecord) box {
	if r.Cgroup != "" {
		if s.tree == nil {
			return nil
		}
		g, err := s.tree.OpenGroup(r.Cgroup)
		if err != nil {
			return nil
		}
		return &cgroupBox{s: s, g: g}
	}
	if r.Shim == nil {
		return nil
	}
	p, err := process.Adopt(r.Shim.PID, r.Shim.Start)
	if err != nil {
		if r == u.Box && !errors.Is(err, os.ErrProcessDone) {
			// Without pidfds (a seccomp filter) it could be neither watched nor stopped, and
			// the next run would meet it. The shim ends when it is empty.
			s.log.Error("a run cannot be taken over and is killed", "unit", u.name, "invocation", u.Invocation, "err", err)
			process.KillInvocation(u.Invocation)
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	b := &shimBox{s: s, u: u, sock: r.Socket, full: true}
	shim, st, err := process.AttachShim(ctx, p, r.Socket, b.hooks())
	if err != nil {
		s.log.Warn("cannot reach a shim", "unit", u.name, "pid", p.PID, "err", err)
		b.closed = true // that it goes, if it goes, concerns nobody
		p.Close()
		return nil
	}
	b.shim, b.full, b.starts, b.before = shim, !st.Empty, st.Starts, st.Processes
	return b
}

// past is how a process ended while no supervisor was there.
func (b *shimBox) past(rec *procRecord) process.Exit { return exitIn(b.before, rec) }

// shimPast is the same from what a shim wrote that has ended since.
func (s *Supervisor) shimPast(r *boxRecord, rec *procRecord) process.Exit {
	path := exitFile(r.Socket)
	st, err := process.ReadShimExit(path)
	if err != nil {
		return process.Exit{}
	}
	_ = os.Remove(path)
	_ = os.Remove(r.Socket)
	return exitIn(st.Processes, rec)
}

func exitIn(list []process.ShimProcess, rec *procRecord) process.Exit {
	for _, p := range list {
		if p.PID == rec.PID && p.StartTime == rec.Start && !p.Running {
			return p.Exit
		}
	}
	return process.Exit{}
}

func exitFile(socket string) string { return strings.TrimSuffix(socket, shimSuffix) + exitSuffix }

// handed reports whether that listening socket came from outside.
func (st *saved) handed(unit, addr string) bool {
	return st != nil && slices.ContainsFunc(st.FDs, func(r fdRecord) bool { return r.Kind == fdListen && r.Unit == unit && r.Name == addr && r.Handed })
}

// resumeSocket gets the listening sockets of a socket unit back.
func (u *unit) resumeSocket(before *saved) {
	if !u.State.up() {
		return
	}
	for i, addr := range u.def.Socket.ListenStream {
		l := &listener{addr: addr, handed: before.handed(u.name, addr)}
		var err error
		if l.file = before.takeFor(fdListen, u.name, addr); l.file == nil {
			l.file, l.handed, err = u.s.listenAgain(u, i, addr)
		}
		if err != nil {
			u.s.log.Error("a listening socket is lost", "unit", u.name, "addr", addr, "err", err)
			u.closeListeners()
			u.fail(resultResources, "cannot listen: "+err.Error())
			u.enter(Failed, "cannot listen")
			return
		}
		u.listeners = append(u.listeners, l)
	}
	u.s.later(u.serviceChanged)
}

// reportStrangers looks at groups in our tree that no unit knows: an empty one is
// removed, one with processes is reported and left alone.
func (s *Supervisor) reportStrangers() {
	s.removeShimFiles(exitSuffix) // of shims that ended unseen and whose unit is gone too
	if s.tree == nil {
		return
	}
	known := map[string]bool{}
	for _, u := range s.units {
		if u.Box != nil {
			known[u.Box.Cgroup] = true
		}
		for _, r := range u.Lingering {
			known[r.Cgroup] = true
		}
	}
	for _, name := range s.tree.Groups() {
		if known[name] {
			continue
		}
		g, err := s.tree.OpenGroup(name)
		if err != nil {
			continue
		}
		if err := g.Remove(); err != nil {
			var procs []string
			for _, pid := range g.PIDs() {
				procs = append(procs, process.Describe(pid))
			}
			s.log.Warn("a group of an earlier supervisor holds processes of no known unit; they are left alone", "group", filepath.Base(g.Dir()), "processes", procs)
		}
		g.Close()
	}
}

func (s *Supervisor) removeShimFiles(suffix string) {
	if s.opt.StatePath == "" {
		return
	}
	left, _ := filepath.Glob(s.opt.StatePath + "-*" + suffix)
	for _, path := range left {
		_ = os.Remove(path)
	}
}

// shimDied: the processes of a dead shim are orphans now, which are ours (or init's).
func (s *Supervisor) shimDied(b *shimBox) {
	for _, pr := range []*proc{b.u.main, b.u.control} {
		if pr == nil {
			continue
		}
		b.u.fail(resultResources, "the shim that held the unit died")
		pr.shim = false
		if pr.p != nil {
			b.u.track(pr)
		}
	}
}
