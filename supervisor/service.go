package supervisor

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// startService begins a run.
func (u *unit) startService(reason string) {
	u.restart.stop()
	invocation := newID()
	if u.brief && u.s.spare != nil {
		invocation = u.s.spare.invocation
	}
	u.record = record{
		Name: u.name, State: u.State, Since: u.Since, Invocation: invocation, Result: resultSuccess,
		Lingering: u.Lingering, Restarts: u.Restarts, Backoff: u.Backoff, AutoStarts: u.AutoStarts,
		WatchdogUS: u.def.Service.WatchdogSec.Microseconds(), Job: u.Job, JobPhase: u.JobPhase,
	}
	if u.def.Service.WatchdogSec == spec.Infinity {
		u.WatchdogUS = 0
	}
	u.s.changed(u)
	err := u.openStdio()
	if err == nil {
		err = u.needBox()
	}
	if err != nil {
		u.fail(resultResources, "cannot start: "+err.Error())
		u.enter(StartPre, reason) // so that the failure is an event of a run
		u.finish()
		return
	}
	if len(u.def.Service.ExecStartPre) > 0 {
		u.enter(StartPre, reason)
		u.arm(u.timeoutStart())
		u.runCommand()
		return
	}
	u.enterStart(reason)
}

// needBox makes the box of a run, and another when that is gone: the shim of a unit that
// has no process ends when the supervisor does.
func (u *unit) needBox() error {
	if b, ok := u.box.(*shimBox); ok && b.lost {
		u.discard(b)
	} else if u.box != nil {
		return nil
	}
	u.box, u.Box = nil, nil
	b, err := u.s.newBox(u)
	if err != nil {
		return err
	}
	u.box, u.Box = b, b.record()
	b.onOOM(u.oomChanged)
	return nil
}

// commands are those of the present state.
func (u *unit) commands() []spec.Command {
	sv := u.def.Service
	switch u.State {
	case StartPre:
		return sv.ExecStartPre
	case Start:
		return sv.ExecStart
	case StartPost:
		return sv.ExecStartPost
	case Reload:
		return sv.ExecReload
	case Stop:
		return sv.ExecStop
	case StopPost:
		return sv.ExecStopPost
	}
	return nil
}

// runCommand runs the next command of the state, or goes on when there is none.
func (u *unit) runCommand() {
	if cmds := u.commands(); u.Command < len(cmds) {
		u.spawn(cmds[u.Command], u.State == Start)
		return
	}
	switch u.State {
	case StartPre:
		u.enterStart("ExecStartPre done")
	case Start:
		u.enterStartPost("ExecStart done")
	case StartPost:
		u.enterRunning("ExecStartPost done")
	case Reload:
		u.reloaded("ExecReload done")
	case Stop:
		u.enterSigterm("ExecStop done")
	case StopPost:
		u.enterFinal("ExecStopPost done")
	}
}

func (u *unit) spawn(c spec.Command, main bool) {
	pr := &proc{u: u, main: main}
	noBox := u.needBox()
	_, pr.shim = u.box.(*shimBox)
	role := "control"
	if main {
		u.main, u.Main, role = pr, &procRecord{}, "main"
	} else {
		u.control, u.Control = pr, &procRecord{}
	}
	// On disk before the process exists: a next supervisor then knows whose the group is.
	u.s.changed(u)
	u.s.persist()
	if noBox != nil {
		u.s.later(func() { u.spawned(pr, nil, &setupError{noProcess, noBox}) })
		return
	}
	cmd, opened, err := u.command(c, main)
	if err != nil {
		u.s.later(func() { u.spawned(pr, nil, err) })
		return
	}
	u.box.start(u.Invocation+"/"+role, cmd, func(p *process.Process, err error) { u.spawned(pr, p, err) })
	closeAll(opened)
}

func (u *unit) spawned(pr *proc, p *process.Process, err error) {
	defer u.hearEarly()
	if u.main != pr && u.control != pr { // given up meanwhile
		if p != nil {
			_ = p.Signal(syscall.SIGKILL)
			p.Close()
		}
		return
	}
	if err != nil {
		if p != nil {
			p.Close() // the exec helper, which ends by itself and is reaped as any orphan
		}
		what := "control process"
		if pr.main {
			what = "main process"
		}
		u.Error = fmt.Sprintf("cannot start the %s: %v", what, err)
		var step *process.StepError
		if cmds := u.commands(); errors.As(err, new(syscall.Errno)) && !errors.As(err, &step) && u.Command < len(cmds) {
			u.Error = fmt.Sprintf("cannot execute %s: %v", cmds[u.Command].Path, err)
		}
		exit := process.Exit{Known: true, Code: process.ExitExec}
		setup := &setupError{code: process.ExitExec}
		_ = errors.As(err, &setup)
		if setup.code == noProcess {
			u.setResult(resultResources)
		} else {
			exit.Code = setup.code
		}
		u.ended(pr, exit)
		if pr.main && setup.code == noProcess {
			u.MainEnded, u.Exit = false, process.Exit{}
		}
		return
	}
	pr.p, pr.child = p, !pr.shim
	u.track(pr)
	if n := u.def.Service.OOMScoreAdjust; n != nil && *n < u.s.oomScore { // everybody may raise it
		if is, err := process.OOMScoreAdjust(p.PID); err == nil && is != *n {
			u.s.log.Warn("OOMScoreAdjust= needs more privileges", "unit", u.name, "want", *n, "is", is)
		}
	}
	u.s.changed(u)
	switch u.State {
	case StopWatchdog, StopSigterm, StopSigkill, FinalSigkill:
		u.signalAgain()
	case Start:
		if pr.main {
			u.mainStarted()
		}
	}
}

// track makes the end of pr known to the loop.
func (u *unit) track(pr *proc) {
	rec := &procRecord{PID: pr.p.PID, Start: pr.p.StartTime}
	if pr.main {
		u.Main = rec
	} else {
		u.Control = rec
	}
	u.s.procs[pr.p.PID] = pr
	if pr.shim || pr.child {
		return
	}
	w, err := u.s.poll.add(pr.p.PIDFD(), unix.EPOLLIN, func(uint32) { u.s.collect(pr) })
	if err != nil {
		u.s.log.Error("cannot watch a process", "unit", u.name, "pid", pr.p.PID, "err", err)
	}
	pr.w = w
}

// collect takes the exit of a process whose pidfd has something to say.
func (s *Supervisor) collect(pr *proc) {
	exit, progress := pr.p.Collect()
	switch progress {
	case process.Running:
		pr.w.arm(unix.EPOLLIN)
	case process.Ended:
		pr.u.ended(pr, exit)
	case process.Unreaped:
		// Somebody else's child (adopted): how it ended is known once its parent has
		// reaped it and the pidfd hangs up. A parent that never reaps must not keep
		// the unit from ending.
		pr.w.arm(0)
		if pr.grace == nil {
			pr.grace = s.afterFunc(unreapedGrace, func() { pr.u.ended(pr, process.Exit{}) })
		}
	}
}

// unreapedGrace is how long the parent of an adopted process gets to reap it.
const unreapedGrace = 2 * time.Second

// forget ends the supervisor's view of a process.
func (s *Supervisor) forget(pr *proc) {
	pr.grace.stop()
	pr.w.remove()
	if pr.p != nil {
		if s.procs[pr.p.PID] == pr {
			delete(s.procs, pr.p.PID)
		}
		pr.p.Close()
	}
}

// ended: the process pr of the unit is no more.
func (u *unit) ended(pr *proc, exit process.Exit) {
	u.s.forget(pr)
	u.s.changed(u)
	switch pr {
	case u.main:
		u.main, u.Main = nil, nil
		u.MainEnded, u.Exit, u.ExitedAt = true, exit, time.Now()
		u.CPU += exit.CPU
		u.mainEnded(exit)
	case u.control:
		u.control, u.Control = nil, nil
		u.controlEnded(exit)
	}
}

// judge is the result of a process that ended that way.
func (u *unit) judge(exit process.Exit, c spec.Command) string {
	sv := u.def.Service
	switch {
	case !exit.Known && u.box != nil && u.box.oom() > u.OOMKills:
		return resultOOM
	case !exit.Known:
		return resultUnknown
	case exit.Signal == 0 && (exit.Code == 0 || slices.Contains(sv.SuccessExitStatus.Codes, exit.Code)):
		return resultSuccess
	case exit.Signal != 0 && slices.Contains(sv.SuccessExitStatus.Signals, exit.Signal):
		return resultSuccess
	case exit.Signal != 0 && sv.Type != spec.TypeOneshot && slices.Contains(cleanSignals, syscall.Signal(exit.Signal)):
		return resultSuccess
	case c.IgnoreFailure:
		return resultSuccess
	case u.box != nil && u.box.oom() > u.OOMKills: // a shell turns the kill of its child into a status of its own
		return resultOOM
	case exit.CoreDump:
		return resultCoreDump
	case exit.Signal != 0:
		return resultSignal
	}
	return resultExitCode
}

// cleanSignals end a daemon without being a failure (systemd.service(5), SuccessExitStatus=).
var cleanSignals = []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGPIPE}

func (u *unit) mainCommand() spec.Command {
	cmds := u.def.Service.ExecStart
	if u.State == Start && u.Command < len(cmds) {
		return cmds[u.Command]
	}
	if len(cmds) > 0 {
		return cmds[len(cmds)-1]
	}
	return spec.Command{}
}

func (u *unit) mainEnded(exit process.Exit) {
	result := u.judge(exit, u.mainCommand())
	oneshot := u.def.Service.Type == spec.TypeOneshot
	why := "main process: " + exit.String()
	if result != resultSuccess && u.Error == "" {
		u.Error = why
	}
	switch u.State {
	case Start:
		switch {
		case oneshot && result == resultSuccess:
			u.Command++
			u.s.changed(u)
			u.runCommand()
		case result == resultSuccess && u.def.Service.Type == spec.TypeNotify:
			u.fail(resultProtocol, "the main process ended without having said READY=1")
			u.enterSigterm(why)
		default:
			u.setResult(result)
			u.enterSigterm(why)
		}
	case StartPost:
		u.setResult(result) // enterRunning looks at it when the commands are done
	case Running, Reload, Exited:
		if u.State == Reload {
			u.dropControl()
		}
		u.mainGone(result, why)
	default:
		u.setResult(result)
		u.checkStopped()
	}
}

// mainGone: the main process of a unit that is up has ended.
func (u *unit) mainGone(result, why string) {
	sv := u.def.Service
	if sv.ExitType == "cgroup" && u.box != nil && u.box.populated() {
		u.setResult(result)
		if why += "; others are left"; u.State != Running {
			u.enter(Running, why)
		} else {
			u.tell(Running, why)
		}
		u.box.onEmpty(u.boxEmpty)
		return
	}
	if sv.RemainAfterExit && result == resultSuccess {
		u.enter(Exited, why)
		return
	}
	u.setResult(result)
	if result != resultSuccess { // nobody is there whom ExecStop= could ask to end
		u.enterSigterm(why)
		return
	}
	u.enterStop(why)
}

func (u *unit) controlEnded(exit process.Exit) {
	cmds := u.commands()
	if u.Command >= len(cmds) { // a stop state: it was one of the processes to wait for
		u.checkStopped()
		return
	}
	c := cmds[u.Command]
	result := resultExitCode
	switch {
	case exit.Known && exit.Signal == 0 && exit.Code == 0 || c.IgnoreFailure:
		u.Command++
		u.s.changed(u)
		u.runCommand()
		return
	case !exit.Known:
		result = resultUnknown
	case exit.CoreDump:
		result = resultCoreDump
	case exit.Signal != 0:
		result = resultSignal
	}
	why := fmt.Sprintf("%s: %v", c.Path, exit)
	if u.Error == "" {
		u.Error = why
	}
	switch u.State {
	case StartPre:
		u.setResult(result)
		u.enterSigterm(why)
	case StartPost:
		u.setResult(result)
		u.enterSigterm(why)
	case Reload:
		u.reloadFailed(why)
	case Stop:
		u.setResult(result)
		u.enterSigterm(why)
	case StopPost:
		u.setResult(result)
		u.enterFinal(why)
	}
}

func (u *unit) enterStart(reason string) {
	deadline := u.Deadline
	u.enter(Start, reason)
	if deadline == 0 {
		u.arm(u.timeoutStart())
	} else {
		u.arm(time.Duration(max(deadline-monotonic(), 1))) // one timeout for ExecStartPre and start together
	}
	u.runCommand()
}

// mainStarted: the program runs (the exec succeeded).
func (u *unit) mainStarted() {
	u.StartedAt = time.Now()
	if u.keepsNoEnds() {
		u.closeEnds()
	}
	switch u.def.Service.Type {
	case spec.TypeOneshot:
	case spec.TypeNotify:
		if u.Ready { // it came before a re-execution
			u.enterStartPost("READY=1")
		}
	default:
		u.Ready = true
		u.enterStartPost("main process started")
	}
}

func (u *unit) enterStartPost(reason string) {
	u.Started = true
	u.startWatchdog()
	if len(u.def.Service.ExecStartPost) == 0 {
		u.enterRunning(reason)
		return
	}
	u.enter(StartPost, reason)
	u.arm(u.timeoutStart())
	u.runCommand()
}

func (u *unit) enterRunning(reason string) {
	if u.main == nil {
		result := cmp.Or(u.Result, resultSuccess)
		if u.def.Service.Type == spec.TypeOneshot {
			reason = "ExecStart done"
		}
		u.mainGone(result, reason)
		return
	}
	u.enter(Running, reason)
	if d := u.def.Service.RuntimeMaxSec; d > 0 && d != spec.Infinity && u.runtime == nil {
		u.armRuntime(d)
	}
}

func (u *unit) armRuntime(d time.Duration) {
	u.runtime.stop()
	u.RuntimeEnd = monotonic() + int64(d)
	u.runtime = u.s.afterFunc(d, func() {
		if u.State.up() {
			u.fail(resultTimeout, "RuntimeMaxSec= is over")
			u.enterStop("RuntimeMaxSec= is over")
		}
	})
}

// stop ends a run from any state.
func (u *unit) stop(reason string) {
	switch u.State {
	case StartPre, Start, StartPost: // ExecStop= is for what has been up
		u.enterSigterm(reason)
	case Running, Exited, Reload:
		u.dropControl()
		u.enterStop(reason)
	case StopSigterm:
		u.signalAgain() // it may be there by STOPPING=1, with no signal sent yet
	case AutoRestart:
		u.restart.stop()
		u.NextStart = time.Time{}
		u.enter(Dead, reason)
		u.dropFDs()
	}
}

// dropControl kills a control process whose outcome no longer matters.
func (u *unit) dropControl() {
	if pr := u.control; pr != nil {
		u.control, u.Control = nil, nil
		if pr.p != nil {
			_ = pr.p.Signal(syscall.SIGKILL)
		}
		u.s.forget(pr)
	}
}

func (u *unit) enterStop(reason string) {
	if len(u.def.Service.ExecStop) > 0 && u.Started {
		u.enter(Stop, reason)
		u.arm(u.timeoutStop())
		u.runCommand()
		return
	}
	u.enterSigterm(reason)
}

// enterSigterm asks everything to end that KillMode= says.
func (u *unit) enterSigterm(reason string) {
	u.stopWatchdog()
	if u.main == nil && u.control == nil && !u.boxPopulated() {
		u.enterStopPost(reason)
		return
	}
	u.enter(StopSigterm, reason)
	u.arm(u.timeoutStop())
	u.thawForStop()
	u.signalAgain()
	u.checkStopped()
}

func (u *unit) enterWatchdog(reason string) {
	u.enter(StopWatchdog, reason)
	u.arm(cmp.Or(u.def.Service.TimeoutAbortSec, u.timeoutStop()))
	u.thawForStop()
	u.signalAgain()
	u.checkStopped()
}

func (u *unit) enterSigkill(reason string) {
	if u.def.Service.NoSendSIGKILL {
		u.noteSurvivors()
		u.enterStopPost(reason)
		return
	}
	u.enter(StopSigkill, reason)
	u.arm(killTimeout)
	u.signalAgain()
	u.checkStopped()
}

// signalAgain sends the signal that belongs to the present state.
func (u *unit) signalAgain() {
	sv := u.def.Service
	mode := u.killMode()
	if mode == spec.KillNone {
		return
	}
	final := syscall.Signal(cmp.Or(sv.FinalKillSignal, int(syscall.SIGKILL)))
	switch u.State {
	case StopWatchdog:
		u.signalProcs(syscall.Signal(cmp.Or(sv.WatchdogSignal, int(syscall.SIGABRT))), false)
	case StopSigterm:
		sig := syscall.Signal(cmp.Or(sv.KillSignal, int(syscall.SIGTERM)))
		u.signalProcs(sig, mode == spec.KillControlGroup)
		if sv.SendSIGHUP {
			u.signalProcs(syscall.SIGHUP, mode == spec.KillControlGroup)
		}
	case StopSigkill, FinalSigkill:
		switch {
		case mode == spec.KillProcess:
			u.signalProcs(final, false)
		case final == syscall.SIGKILL && u.box != nil:
			u.box.kill()
		default:
			u.signalProcs(final, true)
		}
	}
}

// signalProcs signals the unit's own processes, or all that are in its box, and wakes
// those that are stopped so that they can act on it.
func (u *unit) signalProcs(sig syscall.Signal, all bool) {
	sigs := []syscall.Signal{sig}
	if sig != syscall.SIGKILL && sig != syscall.SIGCONT {
		sigs = append(sigs, syscall.SIGCONT)
	}
	var own []int
	for _, sig := range sigs {
		own = own[:0]
		for _, pr := range []*proc{u.main, u.control} {
			if pr != nil && pr.p != nil {
				own = append(own, pr.p.PID)
				_ = pr.p.Signal(sig)
			}
		}
		if all && u.box != nil {
			u.box.signal(sig, own...)
		}
	}
}

func (u *unit) boxPopulated() bool { return u.box != nil && u.box.populated() }

// boxEmpty: the kernel says that nothing is left in the box.
func (u *unit) boxEmpty() {
	if u.State == Running && u.main == nil { // ExitType=cgroup
		u.mainGone(u.Result, "no process is left")
		return
	}
	u.checkStopped()
}

// checkStopped goes on when what the present state waits for is gone.
func (u *unit) checkStopped() {
	switch u.State {
	case StopWatchdog, StopSigterm, StopSigkill, FinalSigkill:
	default:
		return
	}
	mode := u.killMode()
	if mode != spec.KillNone && (u.main != nil || u.control != nil) {
		return
	}
	if (mode == spec.KillControlGroup || mode == spec.KillMixed) && u.boxPopulated() {
		switch {
		case u.State == StopWatchdog:
			u.enterSigterm("main process ended; others are left")
		case u.State == StopSigterm && mode == spec.KillMixed:
			u.enterSigkill("main process ended; others are left")
		default:
			u.box.onEmpty(u.boxEmpty)
		}
		return
	}
	if u.State == FinalSigkill {
		u.finish()
		return
	}
	u.enterStopPost("stopped")
}

func (u *unit) enterStopPost(reason string) {
	if len(u.def.Service.ExecStopPost) == 0 {
		u.enterFinal(reason)
		return
	}
	u.enter(StopPost, reason)
	u.arm(u.timeoutStop())
	if u.box != nil {
		u.box.allowTasks()
	}
	u.runCommand()
}

func (u *unit) enterFinal(reason string) {
	mode := u.killMode()
	if (mode == spec.KillControlGroup || mode == spec.KillMixed) && len(u.Survivors) == 0 &&
		!u.def.Service.NoSendSIGKILL && (u.control != nil || u.boxPopulated()) {
		u.enter(FinalSigkill, reason)
		u.arm(killTimeout)
		u.signalAgain()
		u.checkStopped()
		return
	}
	u.finish()
}

// timedOut: the deadline of the present state has come.
func (u *unit) timedOut() {
	u.timer, u.Deadline = nil, 0
	text := string(u.State) + " took too long"
	switch u.State {
	case StartPre, Start:
		u.fail(resultTimeout, text+" (TimeoutStartSec="+u.timeoutStart().String()+")")
		u.enterSigterm("timeout")
	case StartPost:
		u.fail(resultTimeout, text)
		u.enterSigterm("timeout")
	case Reload:
		u.dropControl()
		u.reloadFailed(text)
	case Stop:
		u.setResult(resultTimeout)
		u.enterSigterm("timeout")
	case StopWatchdog, StopSigterm:
		u.setResult(resultTimeout)
		u.enterSigkill("timeout")
	case StopSigkill, FinalSigkill:
		u.setResult(resultTimeout)
		u.noteSurvivors()
		if u.State == FinalSigkill {
			u.finish()
		} else {
			u.enterStopPost("some processes would not die")
		}
	case StopPost:
		u.setResult(resultTimeout)
		u.enterFinal("timeout")
	}
}

// noteSurvivors records by name what would not die.
func (u *unit) noteSurvivors() {
	u.Survivors = nil
	if u.box != nil {
		for _, pid := range u.box.pids() {
			u.Survivors = append(u.Survivors, process.Describe(pid))
		}
	}
	if len(u.Survivors) > 0 {
		u.Error = fmt.Sprintf("%d processes are left: %v", len(u.Survivors), u.Survivors)
		u.s.log.Error("processes would not die", "unit", u.name, "invocation", u.Invocation, "survivors", u.Survivors)
	}
	u.s.changed(u)
}

// finish ends the run and decides what comes next.
func (u *unit) finish() {
	for _, pr := range []*proc{u.main, u.control} {
		if pr != nil {
			u.s.forget(pr)
		}
	}
	u.main, u.control, u.Main, u.Control = nil, nil, nil, nil
	u.stopWatchdog()
	u.runtime.stop()
	u.runtime, u.RuntimeEnd = nil, 0
	u.Frozen = false
	if b := u.box; b != nil {
		u.OOMKills = max(u.OOMKills, b.oom())
		if u.s.tier == 1 {
			use := b.usage()
			u.MemoryPeak, u.CPU = max(use.MemoryPeak, u.MemoryPeak), max(use.CPU, u.CPU)
		}
		u.box, u.Box = nil, nil
		if _, ok := b.(*cgroupBox); ok && !b.populated() {
			u.s.cleanups = append(u.s.cleanups, func() {
				u.discard(b)
				if u.brief {
					u.s.prepare()
				}
			})
		} else {
			u.discard(b)
		}
	}
	if u.Result == resultSuccess && len(u.Survivors) > 0 {
		u.Result = resultTimeout
	}
	why := "ended: " + u.Result
	if u.wantsRestart() {
		u.scheduleRestart(why)
		return
	}
	if u.Result == resultSuccess {
		u.enter(Dead, why)
	} else {
		u.enter(Failed, why)
	}
	if j := u.job; j == nil || j.phase != jobStopping || j.kind == jobStop {
		u.dropFDs() // else a start follows at once, which gets them again
	}
}

// discard removes a box, or watches it until it can be removed.
func (u *unit) discard(b box) {
	if err := b.remove(); err == nil {
		return
	}
	u.linger = append(u.linger, b)
	u.Lingering = append(u.Lingering, b.record())
	u.s.log.Warn("processes are left of a unit that has ended", "unit", u.name, "pids", b.pids())
	b.onEmpty(func() { u.lingered(b) })
	if !b.populated() { // it became so before it was watched
		u.lingered(b)
	}
}

func (u *unit) lingered(b box) {
	i := slices.Index(u.linger, b)
	if i < 0 {
		return
	}
	if err := b.remove(); err != nil {
		u.s.log.Error("cannot remove an empty group", "unit", u.name, "err", err)
		b.close()
	}
	u.linger = slices.Delete(u.linger, i, i+1)
	u.Lingering = slices.Delete(u.Lingering, i, i+1)
	u.s.changed(u)
	u.s.unsettled = append(u.s.unsettled, u)
}

func (u *unit) oomChanged() {
	if u.box == nil {
		return
	}
	n := u.box.oom()
	if n <= u.OOMKills || !u.State.up() {
		return
	}
	switch cmp.Or(u.def.Service.OOMPolicy, "stop") {
	case "stop", "kill":
		// OOMKills stays behind until finish, so that judge sees this kill.
		if u.main != nil {
			u.fail(resultOOM, "a process was killed for want of memory")
			u.enterStop("out of memory")
		}
	default:
		u.OOMKills = n
	}
}

// Reload.

func (u *unit) reload() string {
	sv := u.def.Service
	switch {
	case u.State == Reload:
		return ""
	case u.State != Running:
		return "it is not running"
	case len(sv.ExecReload) > 0:
		u.enter(Reload, "reload requested")
		u.arm(u.timeoutStart())
		u.runCommand()
	case sv.ReloadSignal != 0 && u.main != nil && u.main.p != nil:
		if err := u.main.p.Signal(syscall.Signal(sv.ReloadSignal)); err != nil {
			return err.Error()
		}
		u.s.later(func() { u.endJob(jobDone, "") })
	default:
		return "it has neither ExecReload= nor ReloadSignal="
	}
	return ""
}

func (u *unit) reloaded(reason string) { u.enter(Running, reason) }

func (u *unit) reloadFailed(why string) {
	if u.job != nil && u.job.kind == jobReload {
		u.job.failed = true
	}
	u.Error = "reload: " + why
	u.enter(Running, "reload failed: "+why)
}

// Watchdog.

func (u *unit) startWatchdog() {
	u.watchdog.stop()
	u.watchdog = nil
	if u.WatchdogUS <= 0 || u.Frozen {
		return
	}
	d := time.Duration(u.WatchdogUS) * time.Microsecond
	u.watchdog = u.s.afterFunc(d, func() {
		u.watchdogMissed(fmt.Sprintf("no WATCHDOG=1 for %v", d))
	})
}

func (u *unit) stopWatchdog() {
	u.watchdog.stop()
	u.watchdog = nil
}

func (u *unit) watchdogMissed(why string) {
	switch u.State {
	case StartPost, Running, Reload:
		u.stopWatchdog()
		u.dropControl()
		u.fail(resultWatchdog, why)
		u.enterWatchdog(why)
	}
}

// Freezing.

func (u *unit) freeze(on bool, done func(error)) {
	switch {
	case !u.isService() || u.box == nil:
		done(errors.New("it has no processes"))
		return
	case on && !u.State.up():
		done(fmt.Errorf("it is %s/%s, not active", u.State.Active(), u.State))
		return
	}
	u.Frozen = on
	u.s.changed(u)
	u.tell(u.State, map[bool]string{true: "frozen", false: "thawed"}[on])
	if on {
		u.stopWatchdog()
	}
	u.box.freeze(on, func(err error) {
		if !on && u.State.up() {
			u.startWatchdog()
		}
		done(err)
	})
}

// thawForStop: a frozen process cannot act on a signal other than SIGKILL.
func (u *unit) thawForStop() {
	if u.Frozen && u.box != nil {
		u.Frozen = false
		u.box.freeze(false, func(error) {})
	}
}
