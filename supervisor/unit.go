package supervisor

import (
	"cmp"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"mypr/supervisor/control"
	"mypr/supervisor/notify"
	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

// unit is one loaded unit. It is the loop's.
type unit struct {
	s        *Supervisor
	name     string
	def      *spec.Unit
	fileDef  *spec.Unit // of the unit file that a transient definition stands in for
	warnings []string
	// transient: defined by a client, not by a file.
	transient bool

	record

	job         *job
	main        *proc
	control     *proc
	box         box
	linger      []box
	timer       *timer // Deadline
	runtime     *timer // RuntimeEnd
	watchdog    *timer
	restart     *timer
	failureTold bool // OnFailure= was started for the present failure

	kept   map[string]*os.File // the client's ends, for attach
	ends   [3]*os.File         // the process's ends of pipes and pty
	given  map[string]*os.File // passed by the client with start-transient
	passed []string            // names in given that go into LISTEN_FDS, in order
	stored []*storedFD         // FDSTORE=1

	listeners []*listener       // of a socket unit
	early     []*notify.Message // came while their sender was being started
	waiters   []*waiter

	// brief: whoever had it started waits for its end and was not told that it runs. What
	// is kept of it goes to the anchor, a process of its own, only when somebody is.
	brief bool
}

// proc is a process that the supervisor started for a unit, or adopted.
type proc struct {
	u     *unit
	main  bool
	p     *process.Process // nil until it was executed
	w     *watch
	grace *timer
	shim  bool // the shim reports its end
	child bool // SIGCHLD does
}

func (u *unit) isService() bool { return u.def.Service != nil }
func (u *unit) isSocket() bool  { return u.def.Socket != nil }

// enter changes the unit's state. Nothing else does.
func (u *unit) enter(st State, reason string) {
	old := u.State
	if old == st {
		return
	}
	if old.Active() != st.Active() {
		u.Since = time.Now()
	}
	u.State = st
	u.timer.stop()
	u.timer, u.Deadline = nil, 0
	u.Command = 0
	level := u.s.log.Info
	if u.transient {
		level = u.s.log.Debug
	}
	level("unit "+u.name, "unit", u.name, "from", old.Active()+"/"+string(old), "to", st.Active()+"/"+string(st), "reason", reason, "invocation", u.Invocation)
	u.s.changed(u)
	u.tell(old, reason)
	u.s.unsettled = append(u.s.unsettled, u)
}

// tell announces the unit's present state to subscribers. Besides transitions two more
// things are worth telling: with ExitType=cgroup, that the main process has ended, and
// that the unit was frozen or thawed.
func (u *unit) tell(old State, reason string) {
	if u.s.wantsEvents(u) {
		u.s.emit(control.UnitEvent{UnitStatus: u.status(), Previous: old.Active() + "/" + string(old), Reason: reason})
	}
}

// arm sets the deadline of the present state; 0 and infinity are none.
func (u *unit) arm(d time.Duration) {
	u.timer.stop()
	u.timer, u.Deadline = nil, 0
	if h := u.s.hurried; h > 0 && u.State.Active() == control.Deactivating && (d <= 0 || d > h) {
		d = h
	}
	if d <= 0 || d == spec.Infinity {
		return
	}
	u.Deadline = monotonic() + int64(d)
	u.timer = u.s.afterFunc(d, u.timedOut)
}

// extend moves the deadline to d from now, if that is later (EXTEND_TIMEOUT_USEC).
func (u *unit) extend(d time.Duration) {
	if u.timer != nil && monotonic()+int64(d) > u.Deadline {
		u.arm(d)
		u.s.changed(u)
	}
}

// status is the unit as clients see it, without what costs file reads.
func (u *unit) status() control.UnitStatus {
	st := control.UnitStatus{
		Name: u.name, Description: u.def.Description, ActiveState: u.State.Active(), SubState: string(u.State),
		Result: u.Result, StatusText: u.StatusText, Error: u.Error, InvocationID: u.Invocation, Since: u.Since,
		StartedAt: u.StartedAt, ExitedAt: u.ExitedAt, Restarts: u.Restarts, NextStart: u.NextStart,
		Transient: u.transient, Adopted: u.Adopted, Frozen: u.Frozen, MemoryPeak: u.MemoryPeak, CPUUsageUsec: u.CPU,
		OOMKills: u.OOMKills, Survivors: u.Survivors,
	}
	if j := u.job; j != nil && (j.kind == jobStart || j.kind == jobRestart) {
		st.StartQueued = j.phase != jobStarting
	}
	if u.main != nil && u.main.p != nil {
		st.MainPID = u.main.p.PID
	}
	if u.MainEnded && u.Exit.Known {
		st.ExitKnown, st.ExitCode, st.ExitSignal, st.CoreDump = true, u.Exit.Code, u.Exit.Signal, u.Exit.CoreDump
	}
	if sv := u.def.Service; sv != nil {
		st.MemoryMax = sv.MemoryMax
		if u.s.tier != 1 {
			st.MemoryMax = 0 // not enforced here
		}
		st.Containment = "shim"
		if _, shim := u.box.(*shimBox); !shim && u.s.tier < 3 || u.Box != nil && u.Box.Cgroup != "" {
			st.Containment = "cgroup"
		}
	}
	if u.box != nil {
		st.Cgroup = u.s.cgroupDir(u.box)
	}
	st.FDNames = slices.Sorted(maps.Keys(u.kept))
	for _, f := range u.stored {
		st.FDNames = append(st.FDNames, f.name)
	}
	return st
}

func (u *unit) fail(result, text string) {
	u.setResult(result)
	u.Error = text
}

// setResult keeps the first failure of a run.
func (u *unit) setResult(r string) {
	if r != "" && (u.Result == "" || u.Result == resultSuccess) {
		u.Result = r
	}
}

// Durations and modes with their defaults.

const (
	defaultTimeout    = 90 * time.Second
	defaultRestartSec = 100 * time.Millisecond
	defaultReset      = 10 * time.Second
	// killTimeout is how long the kernel gets to end processes after SIGKILL. What is
	// left then sits in an uninterruptible sleep; it is reported by name.
	killTimeout = 10 * time.Second
)

func (u *unit) timeoutStart() time.Duration {
	sv := u.def.Service
	if sv.TimeoutStartSec == 0 && sv.Type == spec.TypeOneshot {
		return spec.Infinity
	}
	return cmp.Or(sv.TimeoutStartSec, defaultTimeout)
}

func (u *unit) timeoutStop() time.Duration {
	return cmp.Or(u.def.Service.TimeoutStopSec, defaultTimeout)
}

func (u *unit) killMode() string { return cmp.Or(u.def.Service.KillMode, spec.KillControlGroup) }

func (u *unit) notifyAccess() string {
	sv := u.def.Service
	if sv.NotifyAccess != "" {
		return sv.NotifyAccess
	}
	if sv.Type == spec.TypeNotify || sv.WatchdogSec > 0 {
		return "main"
	}
	return "none"
}

// Relations. A socket comes before its service and is wanted by it.

func (u *unit) wants() []string {
	return slices.Concat(u.def.Wants, u.socketNames())
}

func (u *unit) requires() []string { return slices.Concat(u.def.Requires, u.def.BindsTo) }

func (u *unit) after() []string { return slices.Concat(u.def.After, u.socketNames()) }

// socketNames are the socket units whose descriptors the service gets.
func (u *unit) socketNames() []string {
	if !u.isService() {
		return nil
	}
	names := slices.Clone(u.def.Service.Sockets)
	for _, v := range u.s.sorted() {
		if v.isSocket() && v.serviceName() == u.name && !slices.Contains(names, v.name) {
			names = append(names, v.name)
		}
	}
	return names
}

// serviceName is the service of a socket unit.
func (u *unit) serviceName() string {
	return cmp.Or(u.def.Socket.Service, strings.TrimSuffix(u.name, ".socket")+".service")
}

// orderedAfter reports whether u comes after v at start (and before it at stop).
func (u *unit) orderedAfter(v *unit) bool {
	return slices.Contains(u.after(), v.name) || slices.Contains(v.def.Before, u.name)
}
