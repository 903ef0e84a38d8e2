package supervisor

import (
	"encoding/json"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/process"
	"mypr/supervisor/sockets"
)

// anchorage is what the anchor (process.Anchor), or a service manager in its place, is
// known to hold. Descriptors are told apart by their *os.File, which is never used again for another one.
type anchorage struct {
	a     *process.Anchor // nil: there is none, now or at all
	w     *watch
	held  map[string]map[*os.File]uint64 // by unit ("" is the supervisor itself): keys
	last  uint64                         // key
	retry *timer
	tries int
	begun time.Time
}

// fdsOf are the descriptors of a unit that must outlive this process, in the order in
// which they must come back. over is a re-execution, which happens within a moment;
// else the process's ends of the pipes of a unit that starts only once are left out: a
// second copy could only hold up the end of file that their reader waits for.
func (u *unit) fdsOf(over bool) (records []fdRecord, files []*os.File) {
	add := func(r fdRecord, f *os.File) {
		if f != nil {
			r.Unit = u.name
			records, files = append(records, r), append(files, f)
		}
	}
	for _, l := range u.listeners {
		add(fdRecord{Kind: fdListen, Name: l.addr, Handed: l.handed}, l.file)
	}
	if over || !u.brief {
		for name, f := range u.kept {
			add(fdRecord{Kind: fdKept, Name: name}, f)
		}
	}
	if over || u.isService() && !u.keepsNoEnds() {
		for i, f := range u.ends {
			add(fdRecord{Kind: fdEnd, Name: strconv.Itoa(i)}, f)
		}
		for _, name := range u.passed {
			add(fdRecord{Kind: fdPassed, Name: name}, u.given[name])
		}
		for name, f := range u.given {
			if !slices.Contains(u.passed, name) {
				add(fdRecord{Kind: fdGiven, Name: name}, f)
			}
		}
	}
	for _, st := range u.stored {
		add(fdRecord{Kind: fdStored, Name: st.name, Poll: st.w != nil}, st.file)
	}
	return records, files
}

// takeAnchored makes what an anchor hands back look like what comes over a
// re-execution.
func (s *Supervisor) takeAnchored(st *saved) {
	a, held, err := process.TakeAnchor()
	if a == nil {
		return
	}
	if err != nil {
		s.log.Error("what the anchor held is lost", "err", err)
	}
	s.anchored.a = a
	for _, e := range held {
		s.anchored.last = max(s.anchored.last, e.Key)
		s.staleKeys = append(s.staleKeys, e.Key)
		var r fdRecord
		if json.Unmarshal(e.Info, &r) != nil {
			unix.Close(e.FD)
			continue
		}
		s.takeBack(st, r, e.FD)
	}
}

// takeBack makes a descriptor that was kept over the supervisor's death look like what
// comes over a re-execution.
func (s *Supervisor) takeBack(st *saved, r fdRecord, fd int) {
	switch {
	case r.Kind == fdProgram:
		f := os.NewFile(uintptr(fd), r.Name)
		s.program[r.Name] = f
		s.keys[f] = r.Key
	case st != nil:
		r.FD = fd
		st.FDs = append(st.FDs, r)
	case r.Kind == fdListen || r.Kind == fdControl || r.Kind == fdNotify:
		// Nothing else is known of before, but these addresses are taken by them.
		s.unclaimed = append(s.unclaimed, os.NewFile(uintptr(fd), r.Name))
	default:
		unix.Close(fd)
	}
}

// claim finds the anchor's copy of a socket of which the state file did not tell.
func (s *Supervisor) claim(addr string) *os.File {
	i := slices.IndexFunc(s.unclaimed, func(f *os.File) bool { return sockets.Bound(f, addr) })
	if i < 0 {
		return nil
	}
	f := s.unclaimed[i]
	s.unclaimed = slices.Delete(s.unclaimed, i, i+1)
	return f
}

// anchor makes sure that there is an anchor and that it holds everything.
func (s *Supervisor) anchor() {
	if !s.opt.Anchor || s.done {
		return
	}
	an := &s.anchored
	if an.a == nil {
		a, err := process.StartAnchor(s.opt.Executable, os.Args)
		if err != nil {
			s.log.Error("there is no anchor; if the supervisor dies, nobody starts it again, and pipes and ptys break", "err", err)
			return
		}
		an.a = a
	}
	an.held, an.begun = map[string]map[*os.File]uint64{}, time.Now()
	s.holdOwn()
	for _, u := range s.sorted() {
		s.holdUnit(u)
	}
	if an.a == nil {
		return
	}
	if err := an.a.Update(nil, s.staleKeys); err != nil {
		s.anchorLost(err)
		return
	}
	s.staleKeys = nil
	var err error
	if an.w, err = s.poll.add(process.FD(an.a.File()), unix.EPOLLIN|unix.EPOLLRDHUP, func(uint32) { s.anchorLost(nil) }); err != nil {
		s.log.Error("cannot watch the anchor", "err", err)
	}
}

// ownFDs are the descriptors that belong to no unit.
func (s *Supervisor) ownFDs(notify *os.File) (records []fdRecord, files []*os.File) {
	records, files = []fdRecord{{Kind: fdControl}}, []*os.File{s.listener}
	if notify != nil {
		records, files = append(records, fdRecord{Kind: fdNotify}), append(files, notify)
	}
	for name, f := range s.opt.Keep {
		records, files = append(records, fdRecord{Kind: fdProgram, Name: name}), append(files, f)
	}
	return records, files
}

// holdOwn brings the keeper up to date with what belongs to no unit.
func (s *Supervisor) holdOwn() {
	var nf *os.File
	switch {
	case s.up != nil:
		nf = s.up.notify
	case s.notify != nil:
		if f, err := s.notify.File(); err == nil {
			defer f.Close()
			nf = f
		}
	}
	own, files := s.ownFDs(nf)
	s.hold("", own, files)
}

// holdUnit brings the keeper up to date with one unit.
func (s *Supervisor) holdUnit(u *unit) {
	records, files := u.fdsOf(false)
	s.hold(u.name, records, files)
}

// hold makes the keeper hold exactly these of a unit.
func (s *Supervisor) hold(name string, records []fdRecord, files []*os.File) {
	an, k := &s.anchored, s.keeper()
	if k == nil {
		return
	}
	had := an.held[name]
	if len(had) == 0 && len(files) == 0 {
		return
	}
	var add []process.Anchored
	have := make(map[*os.File]uint64, len(files))
	for i, f := range files {
		if s.up != nil && records[i].Handed {
			continue // its socket unit passes it at every start
		}
		key, ok := had[f]
		if !ok {
			an.last++
			key = an.last
			info, err := json.Marshal(records[i])
			if err != nil {
				continue
			}
			add = append(add, process.Anchored{Key: key, Info: info, File: f})
		}
		have[f] = key
	}
	var drop []uint64
	for f, key := range had {
		if _, ok := have[f]; !ok {
			drop = append(drop, key)
		}
	}
	an.held[name] = have
	if len(have) == 0 {
		delete(an.held, name)
	}
	if len(add)+len(drop) == 0 {
		return
	}
	if err := k.Update(add, drop); err != nil {
		if s.up != nil {
			s.log.Warn("the service manager does not keep a descriptor over a crash", "unit", name, "err", err)
			return
		}
		s.anchorLost(err)
	}
}

// anchorLost: the anchor died or does not read. Another takes its place, at once and
// then at growing intervals.
func (s *Supervisor) anchorLost(err error) {
	an := &s.anchored
	if an.a == nil || s.done {
		return
	}
	s.log.Error("the anchor is lost; starting another", "pid", an.a.PID, "err", err)
	an.w.remove()
	an.w = nil
	an.a.Abandon()
	an.a, an.held, s.staleKeys = nil, nil, nil
	if time.Since(an.begun) > defaultReset {
		an.tries = 0
	}
	delay := time.Duration(0)
	if an.tries > 0 {
		delay = min(defaultRestartSec<<an.tries, time.Minute)
	}
	an.tries++
	an.retry.stop()
	an.retry = s.afterFunc(delay, s.anchor)
}

// dismissAnchor ends the anchor with the supervisor.
func (s *Supervisor) dismissAnchor() {
	an := &s.anchored
	an.retry.stop()
	if an.a != nil {
		an.w.remove()
		an.a.Dismiss()
		an.a = nil
	}
}

// takeReexecAnchor is the anchor of the program before, which watches until the new
// program has one.
func (s *Supervisor) takeReexecAnchor(before *saved) *process.Anchor {
	if before == nil {
		return nil
	}
	for _, r := range before.FDs {
		if r.Kind != fdAnchor || r.FD < 0 {
			continue
		}
		f := before.take(fdAnchor)
		if pid, err := strconv.Atoi(r.Name); err == nil {
			return process.AnchorOf(f, pid)
		}
		f.Close()
	}
	return nil
}
