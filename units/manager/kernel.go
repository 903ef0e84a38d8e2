package manager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/logfile"
	"mypr/internal/rpc"
	"mypr/kernel"
	"mypr/kernel/wire"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
	"mypr/units/manager/journal"
	"mypr/units/manager/store"
)

// Phases of the kernel, api.KernelStatus.State.
const (
	phaseNone      = "none"      // none is wanted yet, or the last one ended
	phasePreparing = "preparing" // the environment is made ready
	phaseStarting  = "starting"  // the unit starts, or its process has yet to connect
	phaseReady     = "ready"     // it takes cells
	phaseDown      = "down"      // it could not be started
)

// kernelState is what the manager knows of Python. Guarded by Manager.mu; gen and
// link change under kernelMu as well.
type kernelState struct {
	phase    string
	detail   string // the step of the preparation, or why it is down
	gen      string // the generation that runs, also while its process has yet to connect; "" while there is none
	presumed bool   // gen is what an earlier manager knew; nobody has confirmed that it still runs
	acked    int64  // last durable event of gen
	link     *link  // nil while it is not connected
	newest   int64  // number of the newest connection that was taken
	blocked  *wire.Blocked
	starting bool          // startKernel runs
	ending   *ending       // why the end of gen is expected
	changed  chan struct{} // closed and replaced when phase or gen changes

	python, executable, mode, modeReason, launchReason string
	pid                                                int

	// The last event that was read of a generation whose connection ended, which may
	// still be on its way into the store.
	readGen string
	readSeq int64
}

// ending is an end of the kernel that somebody asked for.
type ending struct {
	kind   string // reset, restart, stop
	reason string
	origin *run // the cell that asked; its end is not decided here
}

// setPhase changes the phase and wakes who waits for it. Called with mu held.
func (k *kernelState) setPhase(phase, detail string) {
	k.phase, k.detail = phase, detail
	k.wake()
}

func (k *kernelState) wake() {
	if k.changed != nil {
		close(k.changed)
		k.changed = nil
	}
}

func (k *kernelState) waitChange() <-chan struct{} {
	if k.changed == nil {
		k.changed = make(chan struct{})
	}
	return k.changed
}

func (k *kernelState) plainReason() string {
	switch {
	case k.mode == "ipython":
		return ""
	case k.launchReason != "": // nothing was installed that could be loaded
		return k.launchReason
	}
	return k.modeReason
}

// progressText tells a queued cell what it waits for.
func (k *kernelState) progressText() string {
	text := "the Python kernel is " + k.phase
	switch {
	case k.phase == phaseNone, k.phase == phaseDown, k.phase == phasePreparing && k.detail == "": // nothing had to be done yet
		text = "the Python kernel is about to be started"
	case k.phase == phasePreparing:
		text = "the Python environment is being prepared"
	}
	if k.detail != "" {
		text += ": " + k.detail
	}
	return text
}

// blocked is the cell that holds the loop, nil while it turns. Called with mu held.
func (m *Manager) blocked() *api.Blocked {
	b := m.kernel.blocked
	if b == nil {
		return nil
	}
	r := &api.Blocked{ExecID: b.ExecID, Seconds: max(0, now()-b.Since), Where: b.Where}
	if run := m.runs[b.ExecID]; run != nil {
		r.ClientID = run.Client
	}
	return r
}

// wantKernel starts a kernel in the background for a client that has come, unless there
// is one, one is on its way, or starting one has failed: cells try that again.
func (m *Manager) wantKernel() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.kernel.phase != phaseDown {
		m.wantKernelLocked()
	}
}

// wantKernelLocked is the same for a cell. Called with mu held.
func (m *Manager) wantKernelLocked() {
	k := &m.kernel
	if k.starting || k.gen != "" || m.resetting || m.stopping != nil || m.restarting != nil || m.ctx.Err() != nil {
		return
	}
	if k.phase != phaseNone && k.phase != phaseDown {
		return // the supervisor is about to start it again
	}
	m.beginStart()
}

// beginStart runs startKernel. Called with mu held.
func (m *Manager) beginStart() {
	m.kernel.starting = true
	m.kernel.setPhase(phasePreparing, "")
	m.wg.Add(1)
	go m.startKernel()
}

// startAttempts bounds how often a kernel is started that ends before its start is answered.
const startAttempts = 3

func (m *Manager) startKernel() {
	defer m.wg.Done()
	err := m.tryStart()
	m.mu.Lock()
	m.kernel.starting = false
	if err == nil || m.ctx.Err() != nil {
		m.kernel.wake()
		if m.kernel.phase == phaseNone && len(m.waiting()) > 0 {
			m.wantKernelLocked() // it has ended already, and they came while this start was not over
		}
		m.mu.Unlock()
		return
	}
	m.log.Error("the kernel cannot be started", "error", err)
	ops := m.kernelDown(err)
	m.mu.Unlock()
	m.store.Submit(ops...)
}

// kernelDown says that there will be no kernel and fails the cells that wait for one.
// Called with mu held.
func (m *Manager) kernelDown(err error) []*store.Op {
	e := rpc.AsError(err)
	if e.Hint == "" { // a unit file with a mistake, for example
		e = e.WithHint("mypr-mcp reset tries again when that is mended")
	}
	m.kernel.setPhase(phaseDown, e.Error())
	m.lastError = e.Error()
	text := "the Python kernel could not be started, so nothing of this cell was run: " + e.Error()
	at := now()
	var list []*staged
	for _, r := range m.waiting() {
		if s := m.finish(r, api.FailedCell, &api.ErrorInfo{Code: api.CodeKernel, Message: text, Operation: "kernel.start"}, at); s != nil {
			list = append(list, s)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return []*store.Op{m.keepOp(list, nil, nil)}
}

// waiting lists the queued executions that have no kernel, in order. Called with mu held.
func (m *Manager) waiting() []*run {
	var list []*run
	for _, r := range m.sortedLive() {
		if r.next.Generation == "" && r.next.State == api.Queued {
			list = append(list, r)
		}
	}
	return list
}

// sortedLive lists the executions that have not ended, oldest first. Called with mu held.
func (m *Manager) sortedLive() []*run {
	list := make([]*run, 0, len(m.live))
	for _, r := range m.live {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b *run) int { return int(a.Seq - b.Seq) })
	return list
}

// tryStart makes the environment ready and starts the unit, or takes the one that runs.
func (m *Manager) tryStart() error {
	progress := func(step string) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.kernel.setPhase(phasePreparing, step)
	}
	for attempt := 1; ; attempt++ {
		sup, unit, err := m.supervisor(m.ctx)
		if err != nil {
			return err
		}
		if runs(unit) && m.adopt(unit.InvocationID) {
			return nil
		}
		launch, err := m.opts.Prepare(m.ctx, &runner{m}, progress)
		if err != nil {
			return err
		}
		u, err := m.opts.KernelUnit()
		if err != nil {
			return err
		}
		m.fillUnit(u, launch)
		m.mu.Lock()
		m.kernel.launchReason = launch.PlainReason
		m.kernel.setPhase(phaseStarting, "")
		m.mu.Unlock()
		m.rotateKernelLog()
		res, files, err := sup.StartTransient(m.ctx, control.TransientParams{Unit: u})
		for _, f := range files {
			f.Close()
		}
		if errors.Is(err, rpc.ErrClosed) && m.ctx.Err() == nil { // the supervisor died: ask its successor what became of it
			if err := m.supervisorGone(sup); err != nil {
				return err
			}
			continue
		}
		if rpc.CodeOf(err) == rpc.CodeConflict && attempt < startAttempts {
			// It runs, or the supervisor is about to run it; the news of that is on its way.
			if unit := m.awaitUnit(time.Second); restarting(unit) {
				m.mu.Lock()
				m.kernel.setPhase(afterEnd(unit))
				m.mu.Unlock()
				return nil
			}
			continue
		}
		if err != nil {
			return err
		}
		if res.Result != "done" {
			return startFailure(res.JobResult)
		}
		if m.adopt(res.Unit.InvocationID) {
			return nil
		}
		if attempt == startAttempts {
			return rpc.Errorf(api.CodeKernel, "the kernel ended right after its start, %d times in a row", attempt).WithHint("look at .mypr/kernel.log")
		}
	}
}

func startFailure(res control.JobResult) error {
	why := res.Unit.Error
	if why == "" {
		why = describeEnd(res.Unit)
	}
	return rpc.Errorf(api.CodeKernel, "the kernel did not start (%s): %s", res.Result, why).
		WithHint("look at mypr-mcp status and .mypr/kernel.log; mypr-mcp reset tries again")
}

// fillUnit turns the unit file into the unit of this launch.
func (m *Manager) fillUnit(u *spec.Unit, launch *kernel.Launch) {
	if u.Service == nil {
		u.Service = &spec.Service{}
	}
	s := u.Service
	u.Name = KernelUnit
	s.ExecStart = []spec.Command{{Path: launch.Path, Args: launch.Args, NoExpand: true}}
	if s.WorkingDirectory == "" {
		s.WorkingDirectory = launch.Dir
	}
	// What the unit file sets wins: that is how a user changes the kernel's environment.
	env := append([]string{}, launch.Env...)
	env = append(env, "MYPR_WORKSPACE="+m.opts.Workspace.Dir, "MYPR_ROOT="+m.opts.Workspace.Root)
	env = append(env, s.Environment...)
	s.Environment = append(env, "MYPR_KERNEL_SOCKET="+m.opts.KernelSocket)
	s.ExactEnvironment = true
}

// runs reports whether a unit has a process that goes on, or is about to.
func runs(u control.UnitStatus) bool {
	return !gone(u) && u.ActiveState != control.Deactivating && u.InvocationID != ""
}

// restarting reports whether the supervisor is about to start the unit again by itself.
func restarting(u control.UnitStatus) bool { return strings.HasPrefix(u.SubState, "auto-restart") }

// afterEnd is the phase that follows the end of a kernel.
func afterEnd(u control.UnitStatus) (phase, detail string) {
	if restarting(u) {
		return phaseStarting, "the last one " + describeEnd(u) + "; the supervisor starts another"
	}
	return phaseNone, ""
}

// gone reports whether the run that a status tells of is over.
func gone(u control.UnitStatus) bool {
	switch u.ActiveState {
	case control.Inactive, control.Failed, "":
		return true
	}
	return restarting(u)
}

// supervisor waits for a connection to the supervisor on which the kernel unit's state is known.
func (m *Manager) supervisor(ctx context.Context) (Supervisor, control.UnitStatus, error) {
	for {
		m.mu.Lock()
		sup, unit, again := m.sup, m.unit, m.supChanged
		m.mu.Unlock()
		if sup != nil {
			return sup, unit, nil
		}
		select {
		case <-again:
		case <-ctx.Done():
			return nil, unit, context.Cause(ctx)
		}
	}
}

// awaitUnit waits until the kernel unit runs or is about to, at most for d, and returns its state.
func (m *Manager) awaitUnit(d time.Duration) control.UnitStatus {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		m.mu.Lock()
		unit, again := m.unit, m.supChanged
		m.mu.Unlock()
		if runs(unit) || restarting(unit) {
			return unit
		}
		select {
		case <-again:
		case <-t.C:
			return unit
		case <-m.ctx.Done():
			return unit
		}
	}
}

// supervisorGone waits until a connection that broke is no longer taken for the present one.
func (m *Manager) supervisorGone(sup Supervisor) error {
	for {
		m.mu.Lock()
		now, again := m.sup, m.supChanged
		m.mu.Unlock()
		if now != sup {
			return nil
		}
		select {
		case <-again:
		case <-m.ctx.Done():
			return context.Cause(m.ctx)
		}
	}
}

// followSupervisor keeps a connection to the supervisor and follows the kernel unit.
func (m *Manager) followSupervisor() {
	defer m.wg.Done()
	select {
	case <-m.opened:
	default:
		m.meetSupervisor()
		select {
		case <-m.opened:
		case <-m.ctx.Done():
			return
		}
	}
	const first, last = 50 * time.Millisecond, 5 * time.Second
	delay := first
	for m.ctx.Err() == nil {
		if m.followOnce() {
			delay = first
		}
		t := time.NewTimer(delay)
		select {
		case <-t.C:
		case <-m.ctx.Done():
			t.Stop()
		}
		delay = min(2*delay, last)
	}
}

// meetSupervisor connects once while the database is not open yet, which may be never:
// Options.Connect starts a supervisor again that it has known, and that may end before
// it is followed.
func (m *Manager) meetSupervisor() {
	ctx, cancel := context.WithTimeout(m.ctx, 5*time.Second)
	defer cancel()
	if sup, err := m.opts.Connect(ctx); err == nil {
		sup.Close()
	}
}

// followOnce serves one connection; it reports whether there was one.
func (m *Manager) followOnce() bool {
	ctx, cancel := context.WithTimeout(m.ctx, 5*time.Second)
	defer cancel()
	sup, err := m.opts.Connect(ctx)
	if err != nil {
		m.log.Warn("no supervisor", "error", err)
		return false
	}
	defer sup.Close()
	units, events, err := sup.Subscribe(ctx, KernelUnit)
	if err != nil {
		m.log.Warn("cannot follow the kernel unit", "error", err)
		return false
	}
	var st control.UnitStatus
	for _, u := range units {
		if u.Name == KernelUnit {
			st = u
		}
	}
	m.mu.Lock()
	m.sup = sup
	m.mu.Unlock()
	m.unitChanged(st)
	for {
		select {
		case e, ok := <-events:
			if ok {
				if e.Name == KernelUnit && !e.Removed {
					m.unitChanged(e.UnitStatus)
				}
				continue
			}
		case <-m.ctx.Done():
		}
		break
	}
	m.mu.Lock()
	m.sup = nil
	m.supWake()
	m.mu.Unlock()
	return true
}

// supWake wakes who waits for news of the supervisor. Called with mu held.
func (m *Manager) supWake() {
	close(m.supChanged)
	m.supChanged = make(chan struct{})
}

// unitChanged takes what the supervisor says of the kernel unit.
func (m *Manager) unitChanged(u control.UnitStatus) {
	m.mu.Lock()
	current := m.kernel.gen
	if current != "" && current != u.InvocationID && m.over[u.InvocationID] {
		m.mu.Unlock()
		return // late news of an earlier generation (adopt): it says nothing of the one that runs
	}
	m.unit = u
	m.supWake()
	m.mu.Unlock()
	if current != "" && (gone(u) || u.InvocationID != current) {
		m.endKernel(current, u)
	}
	if runs(u) {
		m.adopt(u.InvocationID)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	k := &m.kernel
	if k.starting || k.gen != "" {
		return
	}
	switch {
	case !gone(u):
	case restarting(u):
		k.setPhase(afterEnd(u))
	case u.ActiveState == control.Failed:
		// It was given up. Cells that wait had their chance; the next one tries again.
		err := rpc.Errorf(api.CodeKernel, "the kernel %s and is not started again (%s)", describeEnd(u), u.Result).
			WithHint("look at .mypr/kernel.log; the next execute, or mypr-mcp reset, tries again")
		if k.phase == phaseStarting {
			m.wg.Add(1)
			ops := m.kernelDown(err)
			go func() { // not under the lock
				defer m.wg.Done()
				m.store.Submit(ops...)
			}()
		}
	case k.phase == phaseStarting:
		k.setPhase(phaseNone, "")
		if len(m.waiting()) > 0 {
			m.wantKernelLocked()
		}
	case k.phase == phaseNone && len(m.waiting()) > 0:
		m.wantKernelLocked() // they came while the ended one was presumed to run
	}
}

// confirm returns nil when the supervisor has said that the kernel unit runs with this
// generation. The last one of an earlier manager counts until the supervisor says
// otherwise, so that a kernel is not without a manager while there is no supervisor.
func (m *Manager) confirm(generation string) error {
	patience := time.NewTimer(3 * time.Second) // the event of its start may be on its way
	defer patience.Stop()
	for {
		m.mu.Lock()
		known, unit, current, again := m.sup != nil, m.unit, m.kernel.gen, m.supChanged
		m.mu.Unlock()
		if current == generation || known && runs(unit) && unit.InvocationID == generation {
			return nil
		}
		timeout := patience.C
		if !known {
			timeout = nil
		}
		select {
		case <-again:
		case <-timeout:
			return fmt.Errorf("generation %s is not what %s runs (%s %s)", generation, KernelUnit, unit.ActiveState, unit.InvocationID)
		case <-m.ctx.Done():
			return context.Cause(m.ctx)
		}
	}
}

// adopt makes a generation the current one, after the end of any other. It reports
// false, and changes nothing, for one that has ended: what the supervisor answers and
// the events it sends come on separate ways, so an old state can be heard of late.
func (m *Manager) adopt(generation string) bool {
	m.kernelMu.Lock()
	defer m.kernelMu.Unlock()
	if !m.adoptLocked(generation) {
		return false
	}
	// The supervisor has said it. A connection alone does not say that a kernel lives: one
	// that died since may have left it in the backlog.
	m.mu.Lock()
	var ops []*store.Op
	if m.kernel.presumed {
		m.kernel.presumed = false
		for _, r := range m.sortedLive() {
			if op := m.dispatch(r); op != nil {
				ops = append(ops, op)
			}
		}
	}
	m.mu.Unlock()
	m.store.Submit(ops...)
	return true
}

func (m *Manager) adoptLocked(generation string) bool {
	m.mu.Lock()
	current, over := m.kernel.gen, m.over[generation]
	m.mu.Unlock()
	if current == generation || over {
		return !over
	}
	if current != "" {
		m.endKernelLocked(current, control.UnitStatus{})
	}
	at := now()
	m.store.Submit(&store.Op{Keep: true, Apply: func(t *store.Tx) error { return t.Begin(generation, at) }})
	m.mu.Lock()
	k := &m.kernel
	k.gen, k.presumed, k.acked, k.blocked, k.ending = generation, false, 0, nil, nil
	k.setPhase(phaseStarting, "its process has yet to connect")
	m.supWake() // its connection may wait for this word
	m.mu.Unlock()
	if err := m.recordRuntime(); err != nil {
		m.log.Warn("cannot record the runtime", "error", err)
	}
	m.touchStatus()
	m.log.Info("kernel started", "generation", generation)
	return true
}

// errOutdated: the kernel has connected again since, so what the hello says of its cells
// is out of date.
var errOutdated = errors.New("there is a newer connection")

// connectKernel welcomes a kernel whose generation is confirmed and settles with it
// which cells it has.
func (m *Manager) connectKernel(l *link) error {
	m.kernelMu.Lock()
	defer m.kernelMu.Unlock()
	if !m.adoptLocked(l.generation) {
		return fmt.Errorf("generation %s has ended", l.generation)
	}
	m.mu.Lock()
	old, newest := m.kernel.link, m.kernel.newest
	m.kernel.newest = max(newest, l.number)
	m.mu.Unlock()
	if l.number < newest {
		return errOutdated
	}
	if old != nil { // it connects again before the end of its last connection was seen
		old.close()
		<-old.done
	}
	has := map[string]bool{}
	for _, c := range l.hello.Cells {
		has[c.ExecID] = true
	}
	for _, id := range l.hello.Seen {
		has[id] = true
	}
	m.mu.Lock()
	k, h := &m.kernel, l.hello
	if first := h.FirstSeq - 1; first > k.acked {
		// It was acknowledged, by a manager whose database is not this one.
		m.log.Warn("events of the kernel are missing in the records", "from", k.acked+1, "to", first)
		k.acked = first
	}
	l.seq = k.acked
	if k.readGen == l.generation { // the kernel sends it again all the same: only what is stored is acknowledged
		l.seq = max(l.seq, k.readSeq)
	}
	k.link, k.blocked = l, nil
	k.python, k.executable, k.mode, k.modeReason, k.pid = h.Python, h.Executable, h.Mode, h.ModeReason, h.PID
	l.send(wire.Welcome{Type: wire.TypeWelcome, Protocol: wire.Protocol, Ack: k.acked,
		Limits:    wire.Limits{OutputBytes: m.opts.Limits.OutputBytes, EventChars: eventChars, CompletedTasks: m.opts.Limits.CompletedTasks},
		Workspace: m.opts.Workspace.Dir, Artifacts: filepath.Join(m.opts.Workspace.Root, "artifacts")})
	k.setPhase(phaseReady, "")
	var ops []*store.Op
	for _, r := range m.sortedLive() {
		switch {
		case r.next.Generation == l.generation && has[r.id]:
			r.sent = true
		case r.next.Generation == l.generation && r.next.Started > 0 && !api.Terminal(r.next.State) && r.next.State != api.Restarting:
			// It began, and the kernel does not know it: whatever happened, it must not run twice.
			if s := m.finish(r, api.Lost, &api.ErrorInfo{Code: "lost", Message: "the kernel does not know this cell any more; it was not run again"}, now()); s != nil {
				ops = append(ops, m.keepOp([]*staged{s}, nil, nil))
			}
		default:
			r.sent = false
			if op := m.dispatch(r); op != nil {
				ops = append(ops, op)
			}
		}
	}
	m.mu.Unlock()
	m.store.Submit(ops...)
	m.log.Info("kernel connected", "generation", l.generation, "pid", h.PID, "python", h.Python)
	return nil
}

// dispatch gives a queued execution to the kernel if there is one that takes it. The
// operation returned, if any, must be submitted. Called with mu held.
func (m *Manager) dispatch(r *run) *store.Op {
	k := &m.kernel
	if r.sent || r.next.State != api.Queued {
		return nil
	}
	if g := r.next.Generation; g != "" && g != k.gen { // its kernel ended before it began
		state, info := m.endOf(g)
		s := m.finish(r, state, info, now())
		return m.keepOp([]*staged{s}, nil, nil)
	}
	if k.phase != phaseReady || k.link == nil || k.presumed {
		return nil
	}
	l := k.link
	send := func() {
		if m.kernel.link == l && !r.sent && r.next.State == api.Queued {
			r.sent = true
			l.send(wire.Execute{Type: wire.TypeExecute, ExecID: r.id, Code: r.Code, ClientID: r.client, ConnectionID: r.connection})
		}
	}
	if r.next.Generation != "" {
		send()
		return nil
	}
	s := m.stage(&change{run: r, at: now(), final: func(e *store.Entity) { e.Generation = l.generation }})
	return m.keepOp([]*staged{s}, send, nil)
}

// disconnectKernel notes that a connection has ended.
func (m *Manager) disconnectKernel(l *link) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := &m.kernel
	if l.seq > 0 {
		k.readGen, k.readSeq = l.generation, l.seq
	}
	if k.link == l {
		k.link, k.blocked = nil, nil
		k.setPhase(phaseStarting, "its connection ended; it connects again if it lives")
	}
}

func (m *Manager) closeKernelLink() {
	m.mu.Lock()
	l := m.kernel.link
	m.mu.Unlock()
	if l != nil {
		l.close()
	}
}

// endKernel ends a generation: its cells end, and everybody whom it concerns will be
// told. It does nothing when the generation is not the current one.
func (m *Manager) endKernel(generation string, u control.UnitStatus) {
	m.kernelMu.Lock()
	defer m.kernelMu.Unlock()
	m.endKernelLocked(generation, u)
}

func (m *Manager) endKernelLocked(generation string, u control.UnitStatus) {
	m.mu.Lock()
	if m.kernel.gen != generation {
		m.mu.Unlock()
		return
	}
	l := m.kernel.link
	m.mu.Unlock()
	if l != nil {
		// Nothing of it lives any more, so its last words are in the socket and end with
		// an EOF. Only an fd that was passed out of its cgroup can hold that up.
		t := time.NewTimer(2 * time.Second)
		select {
		case <-l.done:
		case <-t.C:
			l.close()
			<-l.done
		}
		t.Stop()
	}
	if u.InvocationID != generation {
		u = control.UnitStatus{}
	}
	_, shutdown, _ := m.shuttingDown()
	at := now()
	m.mu.Lock()
	how := m.kernel.ending
	switch {
	case how != nil:
	case m.stopping != nil:
		how = &ending{kind: "stop", reason: m.stopReason}
	case shutdown:
		how = &ending{kind: "stop", reason: shutdownReason}
	}
	state, info := endInfo(generation, how, u)
	var list []*staged
	var names []string
	for _, r := range m.sortedLive() {
		if r.next.Generation != generation || how != nil && how.origin == r {
			continue
		}
		names = append(names, r.id)
		one := *info
		switch {
		case !r.sent:
			one.Message += "; nothing of it was run"
		case r.next.Started == 0: // how far it came died with the kernel
			one.Message += "; whether this cell had begun is not known"
		}
		if s := m.finish(r, state, &one, at); s != nil {
			list = append(list, s)
		}
	}
	lost := loss{generation: generation, kind: kindOf(how), at: at, text: lossText(generation, how, u, names)}
	m.lastEnd = endedGeneration{generation, state, info}
	m.over[generation] = true
	k := &m.kernel
	k.gen, k.presumed, k.link, k.blocked, k.acked = "", false, nil, nil, 0
	k.python, k.executable, k.mode, k.modeReason, k.pid = "", "", "", "", 0
	k.setPhase(afterEnd(u))
	if how == nil {
		m.lastError = lost.text
	}
	m.mu.Unlock()
	m.log.Info("kernel ended", "generation", generation, "cause", info.Message, "cells", len(names))
	op := m.keepOp(list, func() { m.losses = append(m.losses, lost) }, nil)
	c := op.Change
	op.Change, op.Apply = nil, func(t *store.Tx) (err error) {
		if err = c.Apply(t); err == nil {
			lost.seq, err = t.End(generation, at, lost.kind, lost.text)
		}
		return err
	}
	m.store.Submit(op)
	m.touchStatus()
}

// endedGeneration remembers how the last generation ended, for a cell that was
// submitted to it in the same moment.
type endedGeneration struct {
	generation string
	state      string
	info       *api.ErrorInfo
}

func (m *Manager) endOf(generation string) (string, *api.ErrorInfo) {
	if m.lastEnd.generation == generation {
		info := *m.lastEnd.info
		info.Message += "; nothing of it was run"
		return m.lastEnd.state, &info
	}
	return api.Lost, &api.ErrorInfo{Code: "lost", Message: "lost: its kernel, generation " + generation + ", had ended before it began; nothing of it was run"}
}

// awaitKernel waits until a kernel takes cells, or cannot be had.
func (m *Manager) awaitKernel(ctx context.Context) (generation string, err error) {
	for {
		m.mu.Lock()
		phase, detail, gen, starting := m.kernel.phase, m.kernel.detail, m.kernel.gen, m.kernel.starting
		again := m.kernel.waitChange()
		m.mu.Unlock()
		switch {
		case phase == phaseReady:
			return gen, nil
		case phase == phaseDown:
			return "", rpc.Errorf(api.CodeKernel, "the Python kernel could not be started: %s", detail)
		case phase == phaseNone && !starting:
			return "", rpc.Errorf(api.CodeKernel, "the Python kernel ended before it took cells").WithHint("look at .mypr/kernel.log")
		}
		select {
		case <-again:
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
}

// freshKernel starts a kernel for a reset, which has stopped the one before, and waits for
// it. The start of that one may be at its very end still (its kernel connects before the
// supervisor's answer is dealt with), and another begins only after it.
func (m *Manager) freshKernel() (generation string, err error) {
	if err := m.awaitStart(); err != nil {
		return "", err
	}
	m.mu.Lock()
	if !m.kernel.starting && m.kernel.gen == "" {
		m.beginStart()
	}
	m.mu.Unlock()
	return m.awaitKernel(m.ctx)
}

// awaitStart waits until no start of a kernel is under way.
func (m *Manager) awaitStart() error {
	for {
		m.mu.Lock()
		starting, again := m.kernel.starting, m.kernel.waitChange()
		m.mu.Unlock()
		if !starting {
			return nil
		}
		select {
		case <-again:
		case <-m.ctx.Done():
			return context.Cause(m.ctx)
		}
	}
}

func (m *Manager) kernelLogPath() string { return filepath.Join(m.opts.Workspace.Root, "kernel.log") }

// rotateKernelLog is called before each start and before what this process writes there.
// The kernel itself writes only what it dies of.
func (m *Manager) rotateKernelLog() {
	if err := logfile.Rotate(m.kernelLogPath()); err != nil {
		m.log.Warn("kernel.log not rotated", "error", err)
	}
}

// kernelLog keeps what the kernel's process printed outside of any cell.
func (m *Manager) kernelLog(text string) {
	if text == "" {
		return
	}
	m.rotateKernelLog()
	f, err := os.OpenFile(m.kernelLogPath(), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		m.log.Warn("kernel output outside of cells not kept", "error", err)
		return
	}
	_, _ = f.WriteString(text)
	f.Close()
}

// describeEnd says how a run ended, as a verb: "was killed by signal 9 (SIGKILL)".
func describeEnd(u control.UnitStatus) string {
	switch {
	case u.InvocationID == "" || u.Name == "":
		return "ended while nobody watched; how is not known"
	case u.Result == "oom-kill":
		text := "was killed: out of memory"
		switch {
		case u.MemoryMax > 0 && u.MemoryPeak > 0:
			text += fmt.Sprintf(" (limit %d MiB, peak %d MiB)", u.MemoryMax>>20, u.MemoryPeak>>20)
		case u.MemoryMax > 0:
			text += fmt.Sprintf(" (limit %d MiB)", u.MemoryMax>>20)
		case u.MemoryPeak > 0:
			text += fmt.Sprintf(" (no limit of its own; peak %d MiB)", u.MemoryPeak>>20)
		}
		return text
	case u.Result == "watchdog":
		return "was killed by the watchdog"
	case u.Result == "timeout":
		return "took too long to " + map[bool]string{true: "start", false: "stop"}[u.StartedAt.IsZero()] + " and was killed"
	case !u.ExitKnown:
		return "ended; its exit status is not known"
	case u.ExitSignal != 0:
		text := fmt.Sprintf("was killed by signal %d (%s)", u.ExitSignal, unix.SignalName(unix.Signal(u.ExitSignal)))
		if u.CoreDump {
			text += " and dumped core"
		}
		return text
	}
	return fmt.Sprintf("exited with status %d", u.ExitCode)
}

// endInfo is how the end of its kernel ends a cell.
func endInfo(generation string, how *ending, u control.UnitStatus) (state string, info *api.ErrorInfo) {
	if how != nil {
		text := map[string]string{"reset": "the session was reset", "restart": "the runtime was restarted", "stop": "the runtime was stopped"}[how.kind]
		if how.reason != "" {
			text += " (" + how.reason + ")"
		}
		return api.Cancelled, &api.ErrorInfo{Code: "cancelled", Message: "cancelled: " + text, Operation: how.kind}
	}
	details := map[string]any{"generation": generation, "cause": u.Result}
	if u.ExitKnown && u.ExitSignal == 0 {
		details["exit_code"] = u.ExitCode
	}
	if u.ExitSignal != 0 {
		details["signal"] = u.ExitSignal
	}
	if u.MemoryMax > 0 {
		details["memory_max"] = u.MemoryMax
	}
	if u.MemoryPeak > 0 {
		details["memory_peak"] = u.MemoryPeak
	}
	return api.Lost, &api.ErrorInfo{Code: "lost", Message: "lost: the Python kernel " + describeEnd(u), Details: details}
}

// resume takes up what an earlier manager left: the generation that may still run and
// its executions. Everything else that had not ended is lost.
func (m *Manager) resume() error {
	s := m.store
	gens, err := s.Generations(maxLosses)
	if err != nil {
		return err
	}
	var current *store.Generation
	for i := range gens {
		if gens[i].Ended == 0 {
			current = &gens[i]
		}
	}
	instance, err := s.Meta("instance")
	if err != nil {
		return err
	}
	sameRuntime := instance == m.opts.Instance && instance != ""
	live, err := s.Live()
	if err != nil {
		return err
	}
	origin := m.loadRestart()
	at := now()
	var updates []func(*store.Tx) error
	ended := map[string]*store.Generation{}
	var losses []loss
	for i := range gens {
		g := &gens[i]
		if g.Ended == 0 && g != current {
			g.Cause, g.Ended = "kernel_died", at
			g.Text = lossText(g.Generation, nil, control.UnitStatus{}, nil)
			updates = append(updates, func(t *store.Tx) error {
				_, err := t.End(g.Generation, at, g.Cause, g.Text)
				return err
			})
		}
		if g.Ended != 0 {
			ended[g.Generation] = g
			losses = append(losses, loss{seq: g.Seq, generation: g.Generation, kind: g.Cause, text: g.Text, at: g.Ended})
		}
	}
	m.mu.Lock()
	m.losses, m.replaced = losses, origin
	for _, e := range live {
		switch {
		case isJob(e.Kind):
			continue // units/jobs knows how it is
		case e.ID == origin && origin != "":
			m.takeUp(e)
		case current != nil && e.Generation == current.Generation:
			m.takeUp(e)
		case e.Generation == "" && sameRuntime && e.State == api.Queued:
			m.takeUp(e)
		default:
			info := &api.ErrorInfo{Code: "lost", Message: "lost: the runtime ended before this cell did"}
			if g := ended[e.Generation]; g != nil && g.Text != "" {
				info.Message = "lost: " + g.Text
			}
			if e.Generation == "" {
				info.Message = "lost: the runtime ended before this cell began; nothing of it was run"
			}
			e.State, e.Finished, e.ErrorInfo = api.Lost, at, info
			e.Error, e.ErrorTruncated = summary(info.Message, api.MaxErrorBytes)
			line := api.LogEvent{Time: at, Event: api.Lost, Kind: e.Kind, ID: e.ID, ClientID: e.Client, ConnectionID: e.Connection, ExecID: e.ID, State: api.Lost, Error: e.Error}
			updates = append(updates, func(t *store.Tx) error {
				if err := t.Update(e); err != nil {
					return err
				}
				return t.Log(&line)
			})
		}
	}
	m.mu.Unlock()
	updates = append(updates, func(t *store.Tx) error { return t.SetMeta("instance", m.opts.Instance) })
	if err := s.Do(func(t *store.Tx) error {
		for _, u := range updates {
			if err := u(t); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if current != nil {
		m.kernel.gen, m.kernel.presumed, m.kernel.acked = current.Generation, true, current.Acked
		m.kernel.phase, m.kernel.detail = phaseStarting, "this manager is new; the kernel connects again if it lives"
	} else if len(m.live) > 0 {
		m.wantKernelLocked()
	}
	return nil
}

// takeUp makes a run of a record that goes on. Called with mu held.
func (m *Manager) takeUp(e *store.Entity) {
	r := m.newRun(*e)
	r.admitted = true
	resume := func() (*journal.Log, error) {
		if len(e.Journal) > 0 {
			return m.runsDir.ResumePacked(e.ID, e.Journal, e.JournalBytes)
		}
		return m.runsDir.Resume(e.ID, e.JournalBytes)
	}
	log, err := resume()
	e.Journal, r.Journal, r.next.Journal = nil, nil, nil
	if err != nil {
		m.log.Error("journal cannot be taken up", "exec", e.ID, "error", err)
		_ = m.runsDir.Abandon(e.ID)
		r.Warnings = append(r.Warnings, api.Warning{Code: "journal_truncated", Text: "output of before the manager's restart was lost: " + err.Error()})
		r.JournalEvents, r.JournalBytes = 0, 0
		r.next = r.Entity
	} else {
		r.log = log
	}
	r.logged = r.JournalEvents
	r.sent = r.Generation != "" // it may have been; the kernel will say
	m.runs[r.id], m.live[r.id] = r, r
}
