package supervisor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
	"mypr/supervisor/cgroup"
	"mypr/supervisor/control"
	"mypr/supervisor/notify"
	"mypr/supervisor/process"
	"mypr/supervisor/sockets"
	"mypr/supervisor/spec"
)

// DefaultTarget is the target whose units (WantedBy=) are started at the beginning.
const DefaultTarget = "default.target"

// Options of a supervisor.
type Options struct {
	// Load reads a unit file with its drop-ins; fs.ErrNotExist when there is none.
	// Warnings are "file:line: text".
	Load func(name string) (*spec.Unit, []string, error)
	// Names lists the units that Load knows, without instances of templates.
	Names func() ([]string, error)

	ControlPath string // control socket
	NotifyPath  string // notify socket; "" for none
	StatePath   string // state file; shims put their sockets beside it. "" for none: nothing can be adopted

	// Anchor has a small process beside the supervisor start it again when it dies, with
	// the arguments, environment and directory of this process, and keep sockets and
	// pipes open meanwhile. Not for where a service manager does that.
	Anchor bool
	// ServiceManager: this process is a service of type notify of a systemd that starts it
	// again when it dies. It is told of readiness, status, reloads and stops, its watchdog
	// is answered, and descriptors are stored with it (FileDescriptorStoreMax=) in place of
	// an anchor. Sockets that it passed are used by their names.
	ServiceManager bool
	// StatusUnit is the unit whose status text is passed on to the service manager.
	StatusUnit string

	// StopWithin bounds the whole of a shutdown: how long the units' own deadlines may take
	// together. For a process that will itself be killed after so long, as PID 1 of a
	// container is. 0: as long as the units say.
	StopWithin time.Duration

	// CgroupParent is the directory below which CgroupName is made; "" is the
	// process's own group.
	CgroupParent string
	CgroupName   string
	// ForceTier lowers the containment tier (2 or 3); 0 takes the best.
	ForceTier int

	// Instance names this supervisor over re-execution and adoption: the state file's
	// is used when there is one. "" makes a random one.
	Instance   string
	Version    string
	Mode       string
	Labels     map[string]string
	Executable string // what Reexec becomes by default; "" is the program that runs
	Logger     *slog.Logger

	// Ready is called once, from the loop: with nil when the wanted units are started,
	// or with why they are not. Run goes on in both cases.
	Ready func(error)
	// Begin is called by Run once it is known whose supervisor this is, before any
	// socket listens. Its error ends Run. May be nil.
	Begin func(Takeover) error
	// Keep are descriptors of the program's own that go over a re-execution, and over the
	// death of the supervisor when it has an anchor, by name; Begin gets them back. Begin may still add to it.
	Keep map[string]*os.File
	// Inherited are listening sockets from a service manager or an earlier supervisor,
	// by descriptor name. The supervisor closes those that no unit takes.
	Inherited map[string][]*os.File
}

// Takeover is what Run found of an earlier supervisor.
type Takeover struct {
	Instance string // the earlier one's, or the one of Options
	Kept     map[string]*os.File
}

// Supervisor runs units. Create it with New. While it runs, nothing else in the process
// may start children: it reaps every child that it does not know.
type Supervisor struct {
	opt     Options
	log     *slog.Logger
	queue   *queue
	started time.Time
	stopped chan struct{} // closed when the loop has ended
	ignored []os.Signal   // that this process was started with

	// All below is the loop's.

	poll       *poller
	tree       *cgroup.Tree // in tier 3 nil, or that of adopted units
	tier       int
	tierReason string
	oomScore   int // the supervisor's own
	notify     *notify.Server
	file       *stateFile

	units     map[string]*unit
	sockets   []*unit
	procs     map[int]*proc
	starting  map[int]*starting
	waiting   []*unit // with a waiting job
	unsettled []*unit // whose state changed
	calls     []func()

	dirty      map[*unit]struct{}
	gone       []string
	stateRetry *timer   // nil while the state file is true
	replies    []func() // to be made when the state is on disk
	cleanups   []func() // what nobody waits for: done after the replies
	events     []control.UnitEvent
	subs       map[*subscription]struct{}
	recent     []control.UnitStatus // of unloaded units, for late waiters
	unloaded   int                  // since memory was given back
	tidy       *timer               // until then; nil for none

	readyWait map[string]bool
	takesOver bool // units of an earlier supervisor
	ending    int  // shims that were killed and have not gone yet
	forked    bool // since the last flush
	spare     *spareGroup

	environments environments

	shutting  bool
	hurried   time.Duration // no state of a stop may last longer now; 0: as long as the units say
	hurry     []*timer      // of StopWithin
	done      bool
	atEnd     []func()        // answers to shutdown requests
	goodbyes  []chan struct{} // closed when they were sent
	reexec    *reexecRequest
	anchored  anchorage
	up        *upstream           // nil: no service manager
	keys      map[*os.File]uint64 // of descriptors that were kept over the death before
	leaving   bool
	staleKeys []uint64            // of what the anchor holds from before
	unclaimed []*os.File          // sockets that it handed back and nobody knew of
	program   map[string]*os.File // descriptors of Options.Keep of before
	listener  *os.File            // the control socket
	servers   []*controlServer    // at it, and at earlier ones whose files were deleted
	files     *socketWatch        // nil: nobody watches the socket files
}

// New checks the options. Nothing is started before Run.
func New(opt Options) (*Supervisor, error) {
	if opt.Load == nil || opt.Names == nil {
		return nil, errors.New("supervisor: Load and Names are needed")
	}
	if opt.ControlPath == "" || opt.CgroupName == "" {
		return nil, errors.New("supervisor: ControlPath and CgroupName are needed")
	}
	opt.Logger = cmp.Or(opt.Logger, slog.Default())
	opt.Instance = cmp.Or(opt.Instance, newID())
	opt.Mode = cmp.Or(opt.Mode, "standalone")
	if opt.Executable == "" {
		opt.Executable, _ = os.Executable()
	}
	return &Supervisor{
		opt: opt, log: opt.Logger, queue: newQueue(), started: time.Now(), stopped: make(chan struct{}),
		program: map[string]*os.File{}, keys: map[*os.File]uint64{}, units: map[string]*unit{}, procs: map[int]*proc{},
		starting: map[int]*starting{}, dirty: map[*unit]struct{}{}, subs: map[*subscription]struct{}{},
	}, nil
}

// Run supervises until a shutdown was requested or ctx ends, stops every unit in
// reverse order and returns nil. An error means that it could not begin; units that
// an earlier supervisor left running are then untouched.
func (s *Supervisor) Run(ctx context.Context) (err error) {
	defer close(s.stopped)
	defer s.closeInherited()
	// What whoever started us left open is no unit's: what is, is passed by number.
	_ = unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC)
	before, err := s.previous()
	if err != nil {
		return s.refuse(err)
	}
	if f := s.opt.Begin; f != nil {
		maps.Copy(s.program, before.program())
		if err := f(Takeover{Instance: s.opt.Instance, Kept: s.program}); err != nil {
			return s.refuse(err)
		}
	}
	if err := process.BecomeSubreaper(); err != nil {
		return s.refuse(err)
	}
	if s.oomScore, err = process.OOMScoreAdjust(os.Getpid()); err != nil {
		return s.refuse(err)
	}
	if s.poll, err = newPoller(s.queue); err != nil {
		return s.refuse(err)
	}
	defer s.poll.close()
	s.openTree(before)
	if err := s.open(before); err != nil {
		return s.refuse(err)
	}
	// Whoever started us may have these ignored: nohup, a shell's background job, the
	// anchor. Units begin with the defaults, which a child is given of what Go handles.
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} {
		if signal.Ignored(sig) {
			s.ignored = append(s.ignored, sig)
		}
	}
	s.swallowIgnored()
	chld := make(chan os.Signal, 1)
	signal.Notify(chld, syscall.SIGCHLD)
	stopWatch := context.AfterFunc(ctx, func() { s.queue.post(func() { s.shutdown("the supervisor was told to end") }) })

	s.later(func() { s.begin(before) })
	s.queue.post(s.reap)
	s.loop(chld)

	stopWatch()
	patience := time.After(time.Second) // for a client that does not read its answer
	for _, c := range s.goodbyes {
		select {
		case <-c:
		case <-patience:
		}
	}
	signal.Stop(chld)
	s.tidy.stop()
	for _, server := range s.servers {
		server.close()
	}
	s.closeSocketWatch()
	if s.leaving {
		return s.leave()
	}
	s.reap() // orphans that ended with the last unit
	s.cleanup()
	return nil
}

// swallowIgnored handles the signals that this process was started to ignore, by doing
// nothing.
func (s *Supervisor) swallowIgnored() {
	if len(s.ignored) > 0 { // without any Notify would take all
		signal.Notify(make(chan os.Signal, 1), s.ignored...)
	}
}

func (s *Supervisor) refuse(err error) error {
	if f := s.opt.Ready; f != nil {
		f(err)
	}
	return err
}

// loop is the goroutine that owns everything.
func (s *Supervisor) loop(chld <-chan os.Signal) {
	s.turn(func() {})
	s.flush()
	for !s.done {
		select {
		case <-s.queue.wake:
		case <-chld:
			s.turn(s.reap)
		}
		for _, f := range s.queue.take() {
			s.turn(f)
			if s.forked {
				// On a busy machine a short command is over when the fork returns: its end is
				// then one thing with its start. And of many starts at once the first must not
				// wait for the last.
				s.forked = false
				s.turn(s.reap)
				s.flush()
			}
		}
		s.flush()
		s.maybeReexec()
	}
}

// turn does f and all that follows from it.
func (s *Supervisor) turn(f func()) {
	f()
	for len(s.calls)+len(s.unsettled)+len(s.waiting) > 0 {
		calls, unsettled := s.calls, s.unsettled
		s.calls, s.unsettled = nil, nil
		for _, f := range calls {
			f()
		}
		for _, u := range unsettled {
			u.settle()
		}
		n := len(s.waiting)
		s.runJobs()
		if len(calls)+len(unsettled) == 0 && len(s.waiting) == n {
			break // what waits, waits for something outside
		}
	}
	s.checkReady()
	s.checkShutdown()
}

// flush puts what has changed on disk, then tells those who wait for it.
func (s *Supervisor) flush() {
	s.persist()
	s.showUpstream()
	events, replies := s.events, s.replies
	s.events, s.replies = nil, nil
	for _, e := range events {
		for sub := range s.subs {
			sub.send(e)
		}
	}
	for _, f := range replies {
		f()
	}
	if len(replies) > 0 {
		runtime.Gosched() // let them out before the next batch: a start may take a millisecond
	}
	cleanups := s.cleanups
	s.cleanups = nil
	for _, f := range cleanups {
		s.turn(f)
	}
}

// soon is later, after the jobs that can begin have begun.
func (s *Supervisor) soon(f func()) { s.later(func() { s.later(f) }) }

func (s *Supervisor) later(f func())  { s.calls = append(s.calls, f) }
func (s *Supervisor) changed(u *unit) { s.dirty[u] = struct{}{} }
func (s *Supervisor) sorted() []*unit { return slices.SortedFunc(maps.Values(s.units), byName) }
func byName(a, b *unit) int           { return strings.Compare(a.name, b.name) }
func (s *Supervisor) reply(f func())  { s.replies = append(s.replies, f) }
func (s *Supervisor) cgroupDir(b box) string {
	if b, ok := b.(*cgroupBox); ok {
		return b.g.Dir()
	}
	return ""
}

// reap takes the exit of every child that has ended: a unit's process goes to its
// unit, an orphan of one (we are its subreaper) to nobody.
func (s *Supervisor) reap() {
	for {
		pid := process.PeekZombie()
		if pid == 0 {
			return
		}
		if pr := s.procs[pid]; pr != nil {
			if exit, progress := pr.p.Collect(); progress == process.Ended {
				s.turn(func() { pr.u.ended(pr, exit) })
				continue
			}
		}
		if st := s.starting[pid]; st != nil {
			if exit, progress := st.p.Collect(); progress == process.Ended {
				st.exit = &exit
				continue
			}
		}
		process.Reap(pid)
	}
}

// openTree probes what contains the units best.
func (s *Supervisor) openTree(before *saved) {
	s.tier = 3
	var t *cgroup.Tree
	var err error
	if before != nil && before.Cgroup != "" {
		t, err = cgroup.Open(before.Cgroup)
	}
	if s.opt.ForceTier >= 3 {
		s.tree, s.tierReason = t, "a lower tier was asked for" // the tree is for what is adopted
		return
	}
	if t == nil {
		t, err = cgroup.Find(s.opt.CgroupParent, s.opt.CgroupName)
	}
	if err != nil {
		s.tierReason = err.Error()
		return
	}
	s.tree, s.tier, s.tierReason = t, 1, t.Reason
	if !t.Limits() {
		s.tier = 2
	} else if s.opt.ForceTier == 2 {
		s.tier, s.tierReason = 2, "a lower tier was asked for"
		t.Controllers = nil
	}
}

// open makes the sockets and the state file.
func (s *Supervisor) open(before *saved) error {
	if s.opt.NotifyPath != "" {
		f := before.take(fdNotify)
		if f == nil {
			f = s.claim(s.opt.NotifyPath)
		}
		var err error
		if f == nil {
			if err := os.MkdirAll(filepath.Dir(s.opt.NotifyPath), 0o700); err != nil {
				return err
			}
			if f, err = sockets.BindDatagram(s.opt.NotifyPath); err != nil {
				return fmt.Errorf("notify socket: %w", err)
			}
		}
		if s.notify, err = notify.Serve(f, s.heard); err != nil {
			return fmt.Errorf("notify socket: %w", err)
		}
	}
	var err error
	if s.listener = before.take(fdControl); s.listener == nil {
		s.listener = s.claim(s.opt.ControlPath)
	}
	if s.listener != nil {
		// Peers see the credentials of who listened last (unix(7)): not those of the dead.
		if err := unix.Listen(process.FD(s.listener), unix.SOMAXCONN); err != nil {
			s.log.Error("cannot listen anew", "err", err)
		}
	}
	if s.listener == nil {
		if s.listener, err = sockets.Listen(s.opt.ControlPath, sockets.Config{}); err != nil {
			s.closeNotify()
			return fmt.Errorf("control socket: %w", err)
		}
	}
	server, err := s.serveControl()
	if err != nil {
		s.closeNotify()
		return fmt.Errorf("control socket: %w", err)
	}
	s.servers = append(s.servers, server)
	if s.opt.StatePath != "" {
		s.file = &stateFile{path: s.opt.StatePath}
	}
	return nil
}

// heard takes a message of a unit.
func (s *Supervisor) heard(m *notify.Message) { s.queue.post(func() { s.notified(m) }) }

func (s *Supervisor) closeNotify() {
	if s.notify != nil {
		s.notify.Close()
	}
}

// begin loads the units, adopts what runs, and starts what is wanted.
func (s *Supervisor) begin(before *saved) {
	names, err := s.opt.Names()
	if err != nil {
		s.log.Error("cannot list the unit files", "err", err)
	}
	for _, name := range names {
		if _, err := s.load(name); err != nil {
			s.log.Error("cannot load a unit", "unit", name, "err", err)
		}
	}
	s.takesOver = before != nil
	s.restore(before)
	if s.file != nil {
		s.writeState()
	}
	old := s.takeReexecAnchor(before)
	if s.up != nil {
		s.storeUpstream(before)
		s.pingUpstream()
	}
	s.anchor()
	s.watchSockets()
	if old != nil {
		old.Dismiss()
	}
	before.closeRest()
	s.readyWait = map[string]bool{}
	for _, u := range s.sorted() {
		if !slices.Contains(u.def.WantedBy, DefaultTarget) {
			continue
		}
		s.readyWait[u.name] = true
		if before == nil || u.State != Failed { // a failed unit stays failed until somebody asks
			s.startJob(u, false, "wanted by "+DefaultTarget, nil)
		}
	}
	s.log.Info("supervisor runs", "pid", os.Getpid(), "instance", s.opt.Instance, "tier", s.tier, "tier_reason", s.tierReason, "control", s.opt.ControlPath)
}

// checkReady reports once how the start of the wanted units ended.
func (s *Supervisor) checkReady() {
	if s.readyWait == nil {
		return
	}
	for name := range s.readyWait {
		if u := s.units[name]; u != nil && (u.job != nil || s.takesOver && u.State == AutoRestart) {
			return // the latter: its run ended with the supervisor before, the next is to come
		}
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(s.readyWait)) {
		if u := s.units[name]; u != nil && !u.State.up() && (u.State != Dead || u.Result != resultSuccess) {
			why := u.Error
			if u.StatusText != "" {
				why += "; it said: " + u.StatusText
			}
			errs = append(errs, fmt.Errorf("%s is %s (%s): %s", name, u.State.Active(), u.Result, why))
		}
	}
	s.readyWait = nil
	err := errors.Join(errs...)
	s.reply(func() {
		s.say("READY=1") // it supervises; how its units are is what the status says
		if f := s.opt.Ready; f != nil {
			f(err)
		}
	})
}

// load finds a unit or loads its file.
func (s *Supervisor) load(name string) (*unit, error) {
	if u := s.units[name]; u != nil {
		return u, nil
	}
	def, warnings, err := s.opt.Load(name)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, rpc.Errorf(rpc.CodeNotFound, "there is no unit %s", name)
		}
		return nil, err
	}
	if err := validate(def); err != nil {
		return nil, err
	}
	return s.add(def, warnings, false), nil
}

func (s *Supervisor) add(def *spec.Unit, warnings []string, transient bool) *unit {
	u := &unit{s: s, name: def.Name, def: def, warnings: warnings, transient: transient}
	u.record = record{Name: def.Name, State: Dead, Since: time.Now(), Result: resultSuccess}
	for _, w := range warnings {
		s.log.Warn("unit file", "unit", def.Name, "warning", w)
	}
	s.units[def.Name] = u
	if u.isSocket() {
		s.sockets = append(s.sockets, u)
	}
	return u
}

// maybeUnload forgets an ended transient unit that nobody needs any more.
func (s *Supervisor) maybeUnload(u *unit) {
	if !u.transient || !u.State.ended() || u.job != nil || len(u.kept) > 0 || len(u.linger) > 0 || u.Invocation == "" {
		return
	}
	if u.State == Failed && u.def.CollectMode != "inactive-or-failed" {
		return
	}
	s.unload(u)
}

// unload forgets a transient unit; where there is a unit file, its definition is back.
func (s *Supervisor) unload(u *unit) {
	st := u.status()
	s.recent = append(s.recent, st)
	if n := len(s.recent); n > recentMax {
		s.recent = slices.Delete(s.recent, 0, n-recentMax)
	}
	u.dropFDs()
	u.release()
	if u.fileDef != nil {
		u.def, u.fileDef, u.transient = u.fileDef, nil, false
		s.changed(u)
		return
	}
	delete(s.units, u.name)
	delete(s.dirty, u)
	s.gone = append(s.gone, u.name)
	s.unloaded++
	s.tidyLater()
	for _, w := range u.waiters {
		w.answer(st)
	}
	u.waiters = nil
	if s.wantsEvents(u) {
		s.emit(control.UnitEvent{UnitStatus: st, Previous: st.ActiveState + "/" + st.SubState, Reason: "unloaded", Removed: true})
	}
}

// tidyLater gives memory back to the system when many units are gone and no more have
// come for a while: Go's collector runs after allocations, and then there are none.
func (s *Supervisor) tidyLater() {
	if s.tidy != nil || s.unloaded < tidyMany {
		return
	}
	seen := s.unloaded
	s.tidy = s.afterFunc(tidyAfter, func() {
		s.tidy = nil
		if s.unloaded != seen {
			s.tidyLater()
			return
		}
		s.unloaded = 0
		debug.FreeOSMemory()
	})
}

const (
	tidyMany  = 100
	tidyAfter = 10 * time.Second
)

// recentMax is how many ended runs of unloaded units a late Wait can still ask for.
const recentMax = 128

func (s *Supervisor) shutdown(reason string) {
	if s.shutting {
		return
	}
	s.log.Info("shutting down", "reason", reason)
	s.say("STOPPING=1\nSTATUS=stopping: " + strings.Join(strings.Fields(reason), " "))
	for _, u := range s.sorted() {
		if !u.State.ended() || u.job != nil {
			s.submit(u, jobStop, false, "shutdown: "+reason, nil)
		}
	}
	s.shutting = true
	if d := s.opt.StopWithin; d > 0 {
		s.hurry = append(s.hurry, s.afterFunc(d/2, s.hurryUp), s.afterFunc(d*19/20, s.giveUp))
	}
}

// hurryUp is half of StopWithin over: what was asked to end and has not is killed, and
// what ends after it (the manager, which still takes down how the others ended) gets a
// part of what is left.
func (s *Supervisor) hurryUp() {
	s.hurried = s.opt.StopWithin / 4
	for _, u := range s.sorted() {
		switch u.State {
		case StopWatchdog, StopSigterm:
			u.timedOut()
		case Stop, StopPost, StopSigkill, FinalSigkill:
			u.arm(s.hurried)
		}
	}
}

// giveUp is StopWithin over: everything is killed and nothing is waited for any more.
func (s *Supervisor) giveUp() {
	for _, u := range s.sorted() {
		if !u.State.ended() || u.job != nil {
			s.log.Error("a unit did not end in time and is left as it is", "unit", u.name, "state", u.State)
		}
		if u.box != nil {
			u.box.kill()
		}
	}
	s.done = true
	for _, f := range s.atEnd {
		f()
	}
}

// ErrLeft is what Run returns after Leave.
var ErrLeft = errors.New("the supervisor has left; its units run on")

// Leave ends Run and leaves the units running, as a crash would but in order: what is
// known is on disk, and a next supervisor takes over. A shutdown that has begun goes on.
func (s *Supervisor) Leave() {
	s.queue.post(func() {
		if !s.shutting && !s.done {
			s.leaving, s.done = true, true
		}
	})
}

// leave is the end of Run after Leave.
func (s *Supervisor) leave() error {
	s.dropSpare()
	s.closeNotify()
	for _, f := range s.queue.take() { // messages that were read must not be lost
		s.turn(f)
	}
	s.flush()
	s.dismissAnchor()
	s.closeUpstream()
	s.log.Info("supervisor leaves; its units run on")
	return ErrLeft
}

func (s *Supervisor) checkShutdown() {
	if !s.shutting || s.ending > 0 || s.done { // the answers are given once
		return
	}
	for _, u := range s.units {
		if !u.State.ended() || u.job != nil {
			return
		}
	}
	s.done = true
	for _, f := range s.atEnd {
		f()
	}
}

// cleanup removes what the supervisor made. What processes are left (KillMode=process
// or none, or what would not die) is reported and left alone.
func (s *Supervisor) cleanup() {
	for _, t := range s.hurry {
		t.stop()
	}
	s.dismissAnchor()
	s.closeUpstream()
	for _, u := range s.units {
		u.dropFDs()
		u.release()
		for _, b := range u.linger {
			if b.remove() == nil {
				continue
			}
			s.log.Warn("processes are left behind", "unit", u.name, "pids", b.pids())
			b.close()
		}
		u.restart.stop()
	}
	s.closeNotify()
	if s.opt.NotifyPath != "" {
		_ = os.Remove(s.opt.NotifyPath)
	}
	s.listener.Close()
	_ = os.Remove(s.opt.ControlPath)
	if s.file != nil {
		s.stateRetry.stop()
		if s.file.f != nil {
			s.file.f.Close()
		}
		_ = os.Remove(s.file.path)
	}
	s.removeShimFiles(exitSuffix)
	s.removeShimFiles(shimSuffix)
	s.dropSpare()
	if s.tree != nil {
		if err := s.tree.Remove(); err != nil {
			s.log.Warn("the supervisor's cgroup stays", "dir", s.tree.Dir, "err", err)
		}
	}
	s.log.Info("supervisor ends")
}

func (s *Supervisor) closeInherited() {
	for _, files := range s.opt.Inherited {
		closeAll(files)
	}
	closeAll(s.unclaimed)
}

// controlServer is the accepting side of the control socket.
type controlServer struct {
	cancel context.CancelFunc
	done   chan struct{}
}

func (s *Supervisor) serveControl() (*controlServer, error) {
	l, err := net.FileListener(s.listener)
	if err != nil {
		return nil, err
	}
	ul, ok := l.(*net.UnixListener)
	if !ok {
		l.Close()
		return nil, errors.New("not a unix socket")
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &controlServer{cancel: cancel, done: make(chan struct{})}
	srv := &rpc.Server{NewHandler: func(conn *rpc.Conn) rpc.Handler { return control.Handler(api{s}, conn) }}
	go func() {
		defer close(c.done)
		if err := srv.Serve(ctx, ul); err != nil {
			s.log.Error("the control socket broke", "err", err)
		}
	}()
	return c, nil
}

func (c *controlServer) close() {
	c.cancel()
	<-c.done
}
