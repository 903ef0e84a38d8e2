// Package manager is the session: it answers the runtime socket, keeps the records of
// executions and their output, and links clients to the Python kernel.
//
// It owns .mypr/history.sqlite3 (package store), .mypr/runs (package journal), the
// connections of clients, the kernel's link and its life cycle. It owns no process:
// the kernel is a unit of the supervisor, which it asks over the control socket, so
// that a manager can die and its successor find the same kernel. docs/SESSION.md
// describes states, durability and notices.
//
// # Goroutines and locks
//
// One mutex, Manager.mu, guards all state in memory. It is held for moments only:
// never while the store commits, never over I/O but a send to the kernel that does
// not block. What changes the state of an execution happens in three steps: stage
// under mu, store.Submit without it, publish in the operation's callback. Goroutines:
// one per connection and per request (package rpc), one reads the kernel, one follows
// the supervisor, one starts a kernel while there is something to start.
package manager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/job"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/kernel"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
	"mypr/units/manager/journal"
	"mypr/units/manager/store"
)

// KernelUnit is the unit that runs Python.
const KernelUnit = "kernel.service"

// ManagerUnit is the unit that this package runs in.
const ManagerUnit = "manager.service"

// Supervisor is what the manager needs of the control socket; *control.Client is one.
type Supervisor interface {
	Info(ctx context.Context) (control.Info, error)
	StartTransient(ctx context.Context, p control.TransientParams, files ...*os.File) (control.TransientResult, map[string]*os.File, error)
	Stop(ctx context.Context, p control.JobParams) (control.JobResult, error)
	Restart(ctx context.Context, p control.JobParams) (control.JobResult, error)
	Kill(ctx context.Context, p control.KillParams) error
	Reexec(ctx context.Context, p control.ReexecParams) error
	Shutdown(ctx context.Context, p control.ShutdownParams) error
	Subscribe(ctx context.Context, names ...string) ([]control.UnitStatus, <-chan control.UnitEvent, error)
	Wait(ctx context.Context, p control.WaitParams) (control.UnitStatus, error)
	Done() <-chan struct{}
	Close() error
}

// Call is a request of the Python API that the manager does not answer itself.
type Call struct {
	Method       string
	Params       []byte // JSON
	ClientID     string
	ConnectionID string
	ExecID       string
	Again        bool // an earlier manager may have carried it out
}

// The lifecycle log is as long as what the session keeps of its past in memory asks for:
// a cell has about ten lines in it, one that prints for long has many more.
const (
	logPerRecord = 256
	minLog       = 1024
)

// Limits bound what the session keeps. Zero fields mean the defaults.
type Limits struct {
	OutputBytes      int64  // of one run; default 16 MiB
	CompletedTasks   int    // handles that the kernel keeps; default 128
	CompletedRecords int    // ended executions kept in memory; default 128
	CacheBytes       int64  // for records and, later, shell output, half each; default 32 MiB
	ExecuteWaitMS    *int64 // wait of an execute that names none; default 1000
	PollWaitMS       *int64 // likewise of a poll
}

// Options configure Run. Workspace, both listeners, Connect, Prepare, Available,
// KernelUnit and KernelSocket are required.
type Options struct {
	Workspace *workspace.Workspace
	Runtime   *net.UnixListener
	Kernel    *net.UnixListener
	// Connect dials the supervisor's control socket. It is called again whenever the
	// connection has ended.
	Connect func(ctx context.Context) (Supervisor, error)
	// Prepare makes the Python environment ready and says how to launch a kernel. It
	// runs programs with run and tells each longer step to progress.
	Prepare func(ctx context.Context, run kernel.Runner, progress func(step string)) (*kernel.Launch, error)
	// Available refuses what Prepare is sure to refuse: a kernel is not ended for one
	// that cannot be started. It runs programs with run, few if any.
	Available func(ctx context.Context, run kernel.Runner) error
	// KernelUnit reads the unit kernel.service with its drop-ins; the manager fills in
	// the command, the directory and the environment.
	KernelUnit   func() (*spec.Unit, error)
	KernelSocket string // path of the socket that the kernel dials
	// Services makes what answers the Python API's requests to other services (files,
	// search, git). It may be nil. The runner it gets starts programs as transient units.
	Services func(run job.Runner) func(ctx context.Context, c Call) (any, error)
	// Jobs makes what runs background work (ws.shell, ws.packages). It may be nil.
	Jobs        func(h JobsHost) Jobs
	Limits      Limits
	IdleExit    time.Duration // end the session when it was idle for so long; 0: never
	Instance    string        // of the supervisor
	Version     string
	Executable  string   // of this program, the default target of a restart
	Environment []string // of programs of ours that are started as units
	Origin      api.Origin
	ConfigFiles []string
	Warnings    func() []string // for status: what nothing knows in files of configuration; may be nil
	// Notify sends a state to the service manager (sd_notify); nil: there is none.
	Notify func(state string) error
	Logger *slog.Logger

	onStart func(*Manager) // tests
}

// Manager is the state of one session. Run makes and ends it.
type Manager struct {
	opts    Options
	log     *slog.Logger
	ctx     context.Context // ends with the session
	store   *store.Store    // set before opened is closed
	runsDir *journal.Dir
	started time.Time
	wg      sync.WaitGroup // goroutines of the session
	opened  chan struct{}  // closed when the store is open
	opening sync.Mutex     // held by who tries to open the store
	// services answers calls of the Python API that are not the manager's; nil: none
	services  func(ctx context.Context, c Call) (any, error)
	jobs      Jobs          // nil: none
	jobsKnown chan struct{} // closed when the jobs of before are known
	meter     meter

	kernelMu sync.Mutex // serialises changes of generation; taken before mu

	mu          sync.Mutex // guards the fields below
	openErr     error      // why the store is not open
	storageErr  error      // why it does not write
	lastError   string
	conns       map[*connection]struct{} // attached
	clients     map[string]*client       // bound to a connection
	runs        map[string]*run          // live ones and the cache of ended ones
	live        map[string]*run
	claims      map[string]chan struct{} // request ids that are being admitted
	ended       []*run                   // the cache, oldest first
	cacheBytes  int64
	admitting   int // executions between admission and their commit
	losses      []loss
	kernel      kernelState
	lastEnd     endedGeneration
	over        map[string]bool // generations that ended in this manager's life
	sup         Supervisor      // nil while there is no connection
	supChanged  chan struct{}   // closed and replaced when sup or the unit's state changes
	unit        control.UnitStatus
	resetting   bool
	stopping    *connection // the connection that asked for a stop
	stopReason  string
	restarting  *restartRecord
	replaced    string                   // the cell whose restart made this manager, until its end is decided
	ending      bool                     // this manager ends
	arrivals    map[string]chan struct{} // closed at a client's next message; for ws.messages.read
	logChanged  chan struct{}            // closed and replaced when log lines were added and somebody waits
	logWaiters  int
	overTimer   *time.Timer // of whenOver; nil: no call waits, or not for long
	statusTimer *time.Timer
	idleTimer   *time.Timer
	statusText  string
}

// Run serves the session until ctx ends. It returns an error when it could not begin
// or lost its sockets.
func Run(ctx context.Context, o Options) error {
	m := &Manager{
		opts: o, log: o.Logger, started: time.Now(),
		opened: make(chan struct{}),
		conns:  map[*connection]struct{}{}, clients: map[string]*client{}, runs: map[string]*run{}, live: map[string]*run{}, over: map[string]bool{}, claims: map[string]chan struct{}{},
		supChanged: make(chan struct{}), logChanged: make(chan struct{}), jobsKnown: make(chan struct{}),
	}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	if o.onStart != nil {
		o.onStart(m)
	}
	setDefaults(&m.opts.Limits)
	if o.Jobs != nil {
		m.jobs = o.Jobs(JobsHost{m})
	}
	lockCtx, unlockCtx := context.WithTimeout(ctx, 5*time.Second)
	lock, err := o.Workspace.ManagerLock(lockCtx)
	unlockCtx()
	if err != nil && ctx.Err() != nil {
		return nil // told to end before it had begun
	}
	if err != nil {
		return fmt.Errorf("another manager seems to serve %s: %w", o.Workspace.Dir, err)
	}
	defer lock.Close()
	// With the lock, and before the kernel is told what became of its calls: the services
	// first end what the death of an earlier manager cut off.
	if o.Services != nil {
		m.services = o.Services(&runner{m})
	}
	o.Kernel.SetUnlinkOnClose(false) // its file is the supervisor's
	m.kernel.phase = phaseNone

	var cancel context.CancelFunc
	m.ctx, cancel = context.WithCancel(context.Background())
	defer cancel()
	if err := m.open(); err != nil {
		if !store.IsStorage(err) {
			return err
		}
		m.wg.Add(1)
		go m.keepOpening()
	}
	if err := m.recordRuntime(); err != nil {
		m.log.Warn("cannot record the runtime", "error", err)
	}

	// Connections end after they were told why, not with ctx.
	serveCtx, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	server := &rpc.Server{NewHandler: m.newConnection}
	served := make(chan error, 1)
	go func() { served <- server.Serve(serveCtx, o.Runtime) }()
	m.wg.Add(2)
	go m.followSupervisor()
	go m.acceptKernel()
	stopWatchdog := m.watchdog()
	m.notify("READY=1")
	m.touchStatus()

	select {
	case <-ctx.Done():
		err = nil
	case err = <-served:
		if ctx.Err() == nil {
			err = fmt.Errorf("the runtime socket broke: %w", errors.Join(err, net.ErrClosed))
		}
		served <- err
	}
	m.mu.Lock()
	m.ending = true
	m.mu.Unlock()
	m.notSoon()
	m.announceEnd()
	m.notify("STOPPING=1")
	stopServing()
	cancel()
	<-served
	stopWatchdog()
	o.Kernel.Close()
	m.closeKernelLink()
	if m.jobs != nil {
		m.jobs.Suspend()
	}
	m.wg.Wait()
	m.mu.Lock()
	if m.statusTimer != nil {
		m.statusTimer.Stop()
	}
	if m.idleTimer != nil {
		m.idleTimer.Stop()
	}
	for _, r := range m.live {
		r.stopTimer()
	}
	m.mu.Unlock()
	if m.store != nil {
		m.finishStopped()
		err = errors.Join(err, m.store.Close())
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.live {
		_ = r.log.Finish()
	}
	if m.runsDir != nil {
		err = errors.Join(err, m.runsDir.Close())
	}
	return err
}

func setDefaults(l *Limits) {
	if l.OutputBytes <= 0 {
		l.OutputBytes = api.MaxOutputBytes
	}
	if l.CompletedTasks <= 0 {
		l.CompletedTasks = 128
	}
	if l.CompletedRecords <= 0 {
		l.CompletedRecords = 128
	}
	if l.CacheBytes <= 0 {
		l.CacheBytes = 32 << 20
	}
	wait := int64(api.DefaultWaitMS)
	if l.ExecuteWaitMS == nil {
		l.ExecuteWaitMS = &wait
	}
	if l.PollWaitMS == nil {
		l.PollWaitMS = &wait
	}
}

// open opens the store and takes up what an earlier manager left, unless that was done.
func (m *Manager) open() error {
	m.opening.Lock()
	defer m.opening.Unlock()
	select {
	case <-m.opened:
		return nil
	default:
	}
	err := m.openStore()
	m.mu.Lock()
	again := m.openErr != nil
	m.openErr = err
	m.mu.Unlock()
	if err == nil {
		close(m.opened)
		if again {
			m.log.Info("the history database is open now")
		}
	}
	return err
}

func (m *Manager) openStore() error {
	if m.runsDir == nil {
		d, err := journal.OpenDir(filepath.Join(m.opts.Workspace.Root, "runs"))
		if err != nil {
			return err
		}
		m.runsDir = d
	}
	s, moved, err := store.Open(m.opts.Workspace.Root, store.Options{KeepLog: max(minLog, logPerRecord*m.opts.Limits.CompletedRecords), OnFailure: m.storageChanged, Write: func(id string, data []byte, offset int64) error {
		return m.runsDir.Append(id, data, offset)
	}})
	if err != nil {
		return err
	}
	if moved != "" {
		m.mu.Lock()
		m.lastError = fmt.Sprintf("the history database was damaged: it was moved to %s and a new one was begun; "+
			"records, client ids, messages and request ids of before are no longer known", moved)
		m.mu.Unlock()
		m.log.Error("history database damaged", "moved", moved)
	}
	m.mu.Lock()
	m.store = s
	m.mu.Unlock()
	if err := m.resume(); err != nil {
		s.Close()
		m.mu.Lock()
		m.store = nil
		m.mu.Unlock()
		return err
	}
	if m.jobs != nil {
		m.wg.Add(1)
		go m.resumeJobs()
	}
	return nil
}

// keepOpening tries again while the disk refuses, at growing intervals. Requests try for
// themselves.
func (m *Manager) keepOpening() {
	defer m.wg.Done()
	for delay := time.Second; ; delay = min(2*delay, 30*time.Second) {
		t := time.NewTimer(delay)
		select {
		case <-m.ctx.Done():
			t.Stop()
			return
		case <-m.opened:
			t.Stop()
			return
		case <-t.C:
		}
		if m.open() == nil {
			return
		}
	}
}

// ready fails while there is no store and none can be opened now.
func (m *Manager) ready() error {
	select {
	case <-m.opened:
		return nil
	default:
	}
	if err := m.open(); err != nil {
		return storageError(err, "the session's history cannot be opened")
	}
	return nil
}

func storageError(err error, what string) *rpc.Error {
	return rpc.Errorf(api.CodeStorage, "%s: %v", what, err).
		WithHint("free some space in the workspace, or make .mypr writable, and try again; mypr-mcp status shows whether it works")
}

// storageChanged is told by the store when it begins to fail and when it works again.
func (m *Manager) storageChanged(err error) {
	m.mu.Lock()
	m.storageErr = err
	m.mu.Unlock()
	if err != nil {
		m.log.Error("storage fails", "error", err)
	} else {
		m.log.Info("storage works again")
	}
}

func (m *Manager) recordRuntime() error {
	ctx, cancel := context.WithTimeout(m.ctx, 5*time.Second)
	defer cancel()
	m.mu.Lock()
	generation := m.kernel.gen
	m.mu.Unlock()
	return m.opts.Workspace.UpdateRuntime(ctx, func(r *workspace.Runtime) {
		r.Manager = workspace.Self(m.opts.Version)
		r.Manager.Started = m.started
		r.PID, r.Version, r.Generation = r.Manager.PID, m.opts.Version, generation
	})
}

func (m *Manager) notify(state string) {
	if m.opts.Notify == nil {
		return
	}
	if err := m.opts.Notify(state); err != nil {
		m.log.Warn("cannot notify the service manager", "error", err)
	}
}

// touchStatus lets the status line follow what it counts, at most once a second.
func (m *Manager) touchStatus() {
	m.touchIdle()
	if m.opts.Notify == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.statusTimer == nil && m.ctx.Err() == nil {
		m.statusTimer = time.AfterFunc(time.Second, func() {
			m.mu.Lock()
			m.statusTimer = nil
			generation := m.kernel.gen
			if len(generation) > 8 {
				generation = generation[:8]
			}
			text := fmt.Sprintf("STATUS=%d clients, %d cells, kernel %s %s", len(m.clients), len(m.live), m.kernel.phase, generation)
			same := text == m.statusText
			m.statusText = text
			m.mu.Unlock()
			if !same {
				m.notify(text)
			}
		})
	}
}

// watchdog answers the supervisor's watchdog as long as the state can be locked and
// the store's queue moves; nothing runs when no watchdog is asked for.
func (m *Manager) watchdog() (stop func()) {
	usec, _ := strconv.ParseInt(os.Getenv("WATCHDOG_USEC"), 10, 64)
	if usec <= 0 || m.opts.Notify == nil {
		return func() {}
	}
	// A timer of Go's wakes the runtime's monitor thread as well, which then waits, wake-up
	// after wake-up, until another thread has taken the timer: up to 10 ms.
	t, err := timer(time.Duration(usec) * time.Microsecond / 2)
	if err != nil {
		m.log.Error("cannot answer the supervisor's watchdog, which will end this process", "error", err)
		return func() {}
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			if _, err := t.Read(make([]byte, 8)); err != nil {
				return // it was closed
			}
			m.mu.Lock()
			opened := m.store != nil && m.openErr == nil
			m.mu.Unlock() //nolint:staticcheck // that it could be taken is the proof
			if opened {
				m.store.Err() // likewise the store's lock
			}
			m.notify("WATCHDOG=1")
		}
	}()
	return func() {
		t.Close()
		<-stopped
	}
}

// timer is a file that can be read once in each interval (timerfd_create(2)).
func timer(interval time.Duration) (*os.File, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	ts := unix.NsecToTimespec(int64(interval))
	if err := unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Interval: ts, Value: ts}, nil); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("timerfd_settime", err)
	}
	return os.NewFile(uintptr(fd), "watchdog"), nil
}

// now is the time in Unix seconds.
func now() float64 { return float64(time.Now().UnixMicro()) / 1e6 }
