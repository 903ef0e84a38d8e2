package supervisor

import (
	"fmt"
	"slices"
	"time"
)

type (
	jobKind  string
	jobPhase string
)

const (
	jobStart   jobKind = "start"
	jobStop    jobKind = "stop"
	jobRestart jobKind = "restart"
	jobReload  jobKind = "reload"
)

// Phases of a job: it waits for units it is ordered after, then it works.
const (
	jobWaiting   jobPhase = "waiting"
	jobStopping  jobPhase = "stopping"
	jobStarting  jobPhase = "starting"
	jobReloading jobPhase = "reloading"
)

// Results of a job, as control.JobResult has them.
const (
	jobDone      = "done"
	jobFailed    = "failed"
	jobCancelled = "cancelled"
	jobTimeout   = "timeout"
)

// job is what a unit is asked to do. A unit has at most one: a newer job replaces it,
// unless both ask for the same.
type job struct {
	kind   jobKind
	phase  jobPhase
	auto   bool // a restart or an activation: counts for the start limit
	failed bool // the reload did
	reason string
	done   []func(result string)
}

// startJob starts u with everything that it requires and wants.
func (s *Supervisor) startJob(u *unit, auto bool, reason string, done func(string)) {
	if s.shutting {
		if done != nil {
			done(jobCancelled)
		}
		return
	}
	s.pull(u, map[*unit]bool{u: true})
	s.submit(u, jobStart, auto, reason, done)
}

func (s *Supervisor) pull(u *unit, seen map[*unit]bool) {
	for _, name := range slices.Concat(u.requires(), u.wants()) {
		v, err := s.load(name)
		if err != nil {
			s.log.Warn("cannot load a unit that another one needs", "unit", u.name, "needs", name, "err", err)
			continue // begin refuses what requires it
		}
		if seen[v] || v.State.up() || v.job != nil && (v.job.kind == jobStart || v.job.kind == jobRestart) {
			continue
		}
		seen[v] = true
		s.pull(v, seen)
		s.submit(v, jobStart, false, "needed by "+u.name, nil)
	}
	for _, v := range s.units {
		if v != u && !v.State.ended() && (slices.Contains(u.def.Conflicts, v.name) || slices.Contains(v.def.Conflicts, u.name)) {
			s.stopJob(v, "conflicts with "+u.name, nil)
		}
	}
}

// stopJob stops u, and first whatever cannot be without it.
func (s *Supervisor) stopJob(u *unit, reason string, done func(string)) {
	s.submit(u, jobStop, false, reason, done)
	for _, v := range s.dependents(u) {
		if !v.State.ended() && (v.job == nil || v.job.kind != jobStop) {
			s.stopJob(v, "depends on "+u.name, nil)
		}
	}
}

// restartJob restarts u and whatever runs and depends on it.
func (s *Supervisor) restartJob(u *unit, reason string, done func(string)) {
	if u.State.ended() {
		s.startJob(u, false, reason, done)
		return
	}
	s.submit(u, jobRestart, false, reason, done)
	for _, v := range s.dependents(u) {
		if !v.State.ended() && (v.job == nil || v.job.kind != jobRestart) {
			s.restartJob(v, "depends on "+u.name, nil)
		}
	}
}

// dependents of u: what requires it, is bound to it or is part of it.
func (s *Supervisor) dependents(u *unit) []*unit {
	var list []*unit
	for _, v := range s.units {
		if slices.Contains(v.def.Requires, u.name) || slices.Contains(v.def.BindsTo, u.name) || slices.Contains(v.def.PartOf, u.name) {
			list = append(list, v)
		}
	}
	return list
}

// submit gives u a job.
func (s *Supervisor) submit(u *unit, kind jobKind, auto bool, reason string, done func(string)) {
	if old := u.job; old != nil {
		same := old.kind == kind && (kind != jobRestart || old.phase != jobStarting)
		if same || kind == jobStart && old.kind == jobRestart {
			if done != nil {
				old.done = append(old.done, done)
			}
			old.auto = old.auto && auto
			return
		}
		u.endJob(jobCancelled, "")
	}
	u.job = &job{kind: kind, phase: jobWaiting, auto: auto, reason: reason}
	if done != nil {
		u.job.done = append(u.job.done, done)
	}
	u.Job, u.JobPhase = kind, jobWaiting
	s.changed(u)
	s.waiting = append(s.waiting, u)
}

func (u *unit) endJob(result, text string) {
	j := u.job
	if j == nil {
		return
	}
	if text != "" && u.Error == "" {
		u.Error = text
	}
	u.job, u.Job, u.JobPhase = nil, "", ""
	u.s.changed(u)
	for _, f := range j.done {
		f(result)
	}
}

func (u *unit) setPhase(p jobPhase) {
	u.job.phase, u.JobPhase = p, p
	u.s.changed(u)
}

// runJobs begins every waiting job whose turn it is.
func (s *Supervisor) runJobs() {
	for progress := true; progress && len(s.waiting) > 0; {
		progress = false
		list := s.waiting
		s.waiting = nil
		for _, u := range list {
			if u.job == nil || u.job.phase != jobWaiting || slices.Contains(s.waiting, u) {
				continue
			}
			if v := s.blocker(u); v != nil {
				s.waiting = append(s.waiting, u)
				continue
			}
			u.begin()
			progress = true
		}
	}
	if len(s.waiting) == 0 {
		return
	}
	// Nobody can begin and nobody is at work: they wait for each other in a circle.
	for _, u := range s.units {
		if u.job != nil && u.job.phase != jobWaiting {
			return
		}
	}
	u := s.waiting[0]
	s.log.Warn("ordering cycle; starting one of its units out of order", "unit", u.name, "waits_for", s.blocker(u).name)
	s.waiting = s.waiting[1:]
	u.begin()
	s.runJobs()
}

// blocker is a unit whose job must end before u's may begin: at start what u comes
// after, at stop what comes after u.
func (s *Supervisor) blocker(u *unit) *unit {
	stop := u.job.kind == jobStop || u.job.kind == jobRestart
	for _, v := range s.units {
		if v == u || v.job == nil {
			continue
		}
		vStops := v.job.kind == jobStop || v.job.kind == jobRestart && v.job.phase != jobStarting
		switch {
		case stop && vStops && v.orderedAfter(u):
			return v
		case !stop && u.orderedAfter(v):
			return v
		}
	}
	return nil
}

func (u *unit) begin() {
	j := u.job
	switch j.kind {
	case jobStop:
		u.setPhase(jobStopping)
		u.stopUnit(j.reason)
	case jobRestart:
		u.setPhase(jobStopping)
		u.stopUnit(j.reason)
	case jobReload:
		u.setPhase(jobReloading)
		if !u.isService() {
			u.endJob(jobFailed, "it is no service")
		} else if why := u.reload(); why != "" {
			u.endJob(jobFailed, "cannot reload: "+why)
		}
	case jobStart:
		if u.State.Active() == "deactivating" {
			u.setPhase(jobStopping) // and start when that is over
			return
		}
		u.beginStart()
	}
	u.s.unsettled = append(u.s.unsettled, u)
}

func (u *unit) beginStart() {
	j := u.job
	u.setPhase(jobStarting)
	u.s.unsettled = append(u.s.unsettled, u)
	if !u.State.ended() && u.State != AutoRestart {
		return // it is up, or on its way
	}
	if !j.auto {
		u.clearLimit()
	} else if u.State != AutoRestart && u.atLimit() {
		u.limitHit()
		return
	}
	for _, name := range u.requires() {
		v, err := u.s.load(name)
		why := ""
		switch {
		case err != nil:
			why = err.Error()
		case u.orderedAfter(v) && !v.State.up():
			why = fmt.Sprintf("it is %s (%s)", v.State.Active(), v.Result)
		}
		if why != "" {
			u.Result, u.Error = resultDependency, fmt.Sprintf("required unit %s did not start: %s", name, why)
			u.enter(Failed, "dependency failed")
			u.dropFDs()
			return
		}
	}
	if j.auto {
		// Without a limit nobody looks at the older ones.
		u.AutoStarts = append(u.AutoStarts[max(0, len(u.AutoStarts)-max(64, u.def.StartLimitBurst)):], time.Now())
		if u.State == AutoRestart { // and not a connection
			u.Restarts++
		}
	}
	switch {
	case u.isService():
		u.startService(j.reason)
	case u.isSocket():
		u.startSocket(j.reason)
	default:
		u.Result, u.Error = resultSuccess, ""
		u.enter(TargetActive, j.reason)
	}
}

func (u *unit) stopUnit(reason string) {
	switch {
	case u.State.ended():
	case u.isService():
		u.stop(reason)
	case u.isSocket():
		u.stopSocket(reason)
	default:
		u.enter(Dead, reason)
	}
}

// settle draws the consequences of a change of u's state.
func (u *unit) settle() {
	s := u.s
	if j := u.job; j != nil {
		switch j.phase {
		case jobStarting:
			switch {
			case u.State.up():
				u.endJob(jobDone, "")
			case u.State == Dead && u.Result == resultSuccess:
				u.endJob(jobDone, "") // a oneshot, or a run that was over at once
			case u.State.ended() || u.State == AutoRestart:
				result := jobFailed
				if u.Result == resultTimeout {
					result = jobTimeout
				}
				u.endJob(result, "")
			}
		case jobStopping:
			if u.State.ended() {
				if j.kind == jobStop {
					u.endJob(jobDone, "")
				} else { // and now the start, in its order among the others
					j.kind, j.auto = jobStart, false
					u.Job = jobStart
					u.setPhase(jobWaiting)
					s.waiting = append(s.waiting, u)
				}
			}
		case jobReloading:
			if u.State != Reload {
				result := jobDone
				if u.State != Running || j.failed {
					result = jobFailed
				}
				u.endJob(result, "")
			}
		}
	}
	u.answerWaiters()
	if u.isService() {
		for _, v := range s.sockets {
			if v.serviceName() == u.name || slices.Contains(u.def.Service.Sockets, v.name) {
				v.serviceChanged()
			}
		}
	}
	if u.State.ended() && u.job == nil {
		for _, v := range s.dependents(u) {
			if slices.Contains(v.def.BindsTo, u.name) && !v.State.ended() && v.job == nil {
				s.stopJob(v, "bound to "+u.name, nil)
			}
		}
		if u.State == Failed && !u.failureTold {
			u.failureTold = true
			for _, name := range u.def.OnFailure {
				if v, err := s.load(name); err == nil {
					s.startJob(v, false, "OnFailure of "+u.name, nil)
				} else {
					s.log.Error("cannot load OnFailure unit", "unit", u.name, "on_failure", name, "err", err)
				}
			}
		}
		s.maybeUnload(u)
	}
	if u.State != Failed {
		u.failureTold = false
	}
}
