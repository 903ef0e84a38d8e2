// Package jobs runs background work, shell commands and package installations, as
// transient units of the supervisor: job-<id>.service, one cgroup (or shim) each.
//
// It owns what a job is: its identity, its states, its output on disk and who waits for
// it. It holds no process: the supervisor does, and keeps duplicates of the pipes and
// terminals, so a job goes on when this process dies and Resume picks it up. It does not
// own history: records and log lines go to a History, which the manager implements with
// its database.
//
// # States
//
//	running -> cancelling -> cancelled
//	running -> succeeded | failed | lost
//
// A job is over when its cgroup is empty, not when its first process has ended; its
// return code is the first process's. "lost" means that how it ended cannot be known.
// Cancelling stops the unit: SIGTERM to everything, after two seconds SIGKILL.
//
// # Output across a crash
//
// Every byte that a job writes is in its output file exactly once, however this process
// ends (see output, and readTerminal for terminals). A power failure may cost what the page
// cache held.
package jobs

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

// Kinds of jobs.
const (
	KindShell   = "shell"
	KindPackage = "package"
)

// States of a job beside those of executions (api.Running, …).
const Cancelling = "cancelling"

// CodeStart is the code of an error for a command that could not be started.
const CodeStart = "start_failed"

// Supervisor is what jobs need of the control socket; *control.Client has it.
type Supervisor interface {
	Info(ctx context.Context) (control.Info, error)
	StartTransient(ctx context.Context, p control.TransientParams, files ...*os.File) (control.TransientResult, map[string]*os.File, error)
	Attach(ctx context.Context, name string) (control.TransientResult, map[string]*os.File, error)
	Release(ctx context.Context, name string, fds ...string) error
	ReleaseUnits(ctx context.Context, names ...string) error
	Stop(ctx context.Context, p control.JobParams) (control.JobResult, error)
	List(ctx context.Context, usage bool) ([]control.UnitStatus, error)
	Wait(ctx context.Context, p control.WaitParams) (control.UnitStatus, error)
}

// History keeps records and the log. Its methods may be called concurrently.
type History interface {
	// Save inserts (isNew) or updates the record of a job and adds a line to the log,
	// both or neither, and returns when it is durable. On failure for a terminal state
	// the implementation tries again by itself: the answer is only for a warning.
	Save(ctx context.Context, r *api.Record, job []byte, isNew bool, e *api.LogEvent) error
	// Output adds an output line to the log; done is called when another one may
	// come. A job has at most one outstanding.
	Output(e *api.LogEvent, done func())
	// Live returns what was saved of the jobs that have not ended.
	Live(ctx context.Context) (jobs [][]byte, err error)
	// Load returns what was saved of a job, nil if there is none.
	Load(ctx context.Context, id string) (job []byte, err error)
}

// Options of a Service.
type Options struct {
	Dir string // .mypr/jobs
	// Supervisor returns the present connection, and waits for one while there is none.
	Supervisor func(ctx context.Context) (Supervisor, error)
	History    History
	// Admit is asked before a job starts, so that a reset cannot race it. It refuses
	// with an error; release is called when the job is in Active. Nil: always.
	Admit func(ctx context.Context) (release func(), err error)
	// Unit returns the job.service unit: the defaults of every job. Nil: built-in ones.
	Unit func() (*spec.Unit, error)
	// Packages says how to install packages. Nil: packages.add is refused.
	Packages func(ctx context.Context) (Packages, error)
	// OutputBytes of one job that are kept; default 16 MiB.
	OutputBytes int64
	// Completed jobs that stay in memory; default 128.
	Completed int
	Logger    *slog.Logger
}

// Caller is on whose behalf something is asked.
type Caller struct {
	ClientID     string
	ConnectionID string
	ExecID       string
	Generation   string
	Again        bool // an earlier manager may have answered the same call
}

// Method answers one call.
type Method func(ctx context.Context, c Caller, params json.RawMessage) (any, error)

// Service runs jobs. It owns their goroutines and descriptors until Suspend.
type Service struct {
	o      Options
	log    *slog.Logger
	ctx    context.Context // ends with Suspend
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex // guards the fields below
	closed  bool
	jobs    map[string]*job
	done    []string // completed ones in jobs, oldest first
	early   []string // ids whose start was cancelled before it was asked for, newest last
	unsaved string   // the completed one whose metadata the disk refused: kept beside the others
	spent   []string // units to be released; a goroutine does it as long as there are any
	env     environments
}

// New makes a service. Jobs of an earlier manager are not touched until Resume.
func New(o Options) *Service {
	if o.OutputBytes == 0 {
		o.OutputBytes = api.MaxOutputBytes
	}
	if o.Completed == 0 {
		o.Completed = 128
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Unit == nil {
		o.Unit = defaultUnit
	}
	s := &Service{o: o, log: o.Logger, jobs: map[string]*job{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// killDelay is between SIGTERM and SIGKILL.
const killDelay = 2 * time.Second

func defaultUnit() (*spec.Unit, error) {
	return &spec.Unit{Service: &spec.Service{
		Type: spec.TypeExec, ExitType: "cgroup", Restart: spec.RestartNo,
		KillMode: spec.KillControlGroup, TimeoutStopSec: killDelay, OOMPolicy: "kill",
	}}, nil
}

// Methods are the calls that Python makes, by name.
func (s *Service) Methods() map[string]Method {
	return map[string]Method{
		"shell.start":  typed("shell.start", s.start),
		"shell.run":    typed("shell.run", s.run),
		"shell.read":   typed("shell.read", s.read),
		"shell.skip":   typed("shell.skip", s.skip),
		"shell.wait":   typed("shell.wait", s.wait),
		"shell.write":  typed("shell.write", s.write),
		"shell.resize": typed("shell.resize", s.resize),
		"shell.cancel": typed("shell.cancel", s.cancelJob),
		"shell.status": typed("shell.status", s.status),
		"shell.output": typed("shell.output", s.output),
		"packages.add": typed("packages.add", s.addPackages),
		"jobs.list":    typed("jobs.list", s.list),
	}
}

func typed[P, R any](name string, f func(context.Context, Caller, P) (R, error)) Method {
	return func(ctx context.Context, c Caller, raw json.RawMessage) (any, error) {
		return rpc.Typed(name, *new(P), func(ctx context.Context, p P) (R, error) { return f(ctx, c, p) })(ctx, raw)
	}
}

// Active are the records of the jobs that have not ended, oldest first.
func (s *Service) Active() []api.Record {
	var list []api.Record
	for _, j := range s.sorted() {
		if !j.ended() {
			st := j.status()
			list = append(list, *st.record())
		}
	}
	return list
}

// Text is a range of a job's output as journal events, cut to limit bytes.
func (s *Service) Text(id string, from, to int64, limit int) (events []api.Event, cut bool, err error) {
	j, err := s.find(s.ctx, id)
	if err != nil {
		return nil, false, err
	}
	return j.out.events(from, to, limit)
}

// CancelAll cancels every active job and waits until they are over, or ctx ends.
func (s *Service) CancelAll(ctx context.Context, reason string) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for _, j := range s.sorted() {
		if !j.ended() {
			wg.Go(func() {
				if _, err := j.stop(ctx, reason); err != nil {
					mu.Lock()
					errs = append(errs, fmt.Errorf("job %s: %w", j.id, err))
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Suspend lets go of every job without touching it: the supervisor keeps them, and
// Resume of the next service goes on. Calls that wait end with an error.
func (s *Service) Suspend() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.env.close()
}

// Resume takes up the jobs that an earlier manager left: those that run go on, those
// that ended meanwhile get their true end. It returns when all of them are found. It is
// called once, before any method.
func (s *Service) Resume(ctx context.Context) error {
	live, err := s.o.History.Live(ctx)
	if err != nil {
		return fmt.Errorf("resume jobs: %w", err)
	}
	known := map[string]bool{}
	for _, raw := range live {
		j, err := s.revive(raw)
		if err != nil {
			s.log.Error("the record of a job cannot be read", "err", err)
			continue
		}
		known[j.id] = true
		s.adopt(j)
	}
	// Units without a live record: of jobs that ended and were not released, or of a
	// history that was replaced.
	var units []control.UnitStatus
	err = s.supervisor(ctx, func(sup Supervisor) (err error) {
		units, err = sup.List(ctx, false)
		return err
	})
	if err != nil {
		return fmt.Errorf("resume jobs: %w", err)
	}
	for _, u := range units {
		id, isJob := strings.CutPrefix(strings.TrimSuffix(u.Name, ".service"), jobPrefix)
		if !isJob || !isID(id) || known[id] {
			continue
		}
		j, err := s.load(ctx, id)
		if err != nil || j == nil {
			s.log.Error("a job of which nothing is known is stopped", "unit", u.Name, "err", err)
			j = newJob(s, Status{ID: id, Kind: KindShell, State: Cancelling, CreatedAt: now(), CancelledBy: "its record is lost"})
		}
		s.adopt(j)
	}
	return nil
}

// adopt puts a job of an earlier manager into the table.
func (s *Service) adopt(j *job) {
	s.mu.Lock()
	s.jobs[j.id] = j
	s.mu.Unlock()
	if !j.ended() {
		s.goIfOpen(j.resume)
		return
	}
	s.completed(j) // it ended, and only what comes after that was not done
	s.goIfOpen(j.release)
}

func (s *Service) sorted() []*job {
	s.mu.Lock()
	js := make([]*job, 0, len(s.jobs))
	for _, j := range s.jobs {
		js = append(js, j)
	}
	s.mu.Unlock()
	slices.SortFunc(js, func(a, b *job) int {
		if d := a.created - b.created; d != 0 {
			if d < 0 {
				return -1
			}
			return 1
		}
		return 0
	})
	return js
}

// find returns a job that is in memory or was saved.
func (s *Service) find(ctx context.Context, id string) (*job, error) {
	if !isID(id) {
		return nil, rpc.Errorf(rpc.CodeNotFound, "there is no job %.80q", id)
	}
	s.mu.Lock()
	j := s.jobs[id]
	s.mu.Unlock()
	if j != nil {
		return j, nil
	}
	j, err := s.load(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("read job %s: %w", id, err)
	}
	if j == nil {
		return nil, rpc.Errorf(rpc.CodeNotFound, "there is no job %s", id)
	}
	if !j.ended() { // resumption would have found it, so it ended a moment ago
		s.mu.Lock()
		defer s.mu.Unlock()
		if now := s.jobs[id]; now != nil {
			return now, nil
		}
	}
	return j, nil
}

// load reads a saved job; nil if there is none.
func (s *Service) load(ctx context.Context, id string) (*job, error) {
	raw, err := s.o.History.Load(ctx, id)
	if err != nil || raw == nil {
		return nil, err
	}
	return s.revive(raw)
}

// revive makes a job of what was saved of it.
func (s *Service) revive(raw []byte) (*job, error) {
	var st Status
	if err := json.Unmarshal(raw, &st); err != nil {
		return nil, err
	}
	if !isID(st.ID) {
		return nil, fmt.Errorf("%q is no job id", st.ID)
	}
	j := newJob(s, st)
	j.recorded = true
	if err := j.out.load(st.PTY && !api.Terminal(st.State)); err != nil {
		j.st.warn("output_lost", "what was kept of the output cannot be read: "+err.Error())
	}
	j.out.dropped, j.out.unsaved = st.OutputDropped, st.OutputUnsaved
	if api.Terminal(st.State) {
		close(j.over)
	}
	return j, nil
}

// completed keeps a finished job in memory until there are enough newer ones.
func (s *Service) completed(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.jobs[j.id] != j {
		return
	}
	if j.isUnsaved() {
		if old := s.unsaved; old != "" {
			delete(s.jobs, old)
		}
		s.unsaved = j.id
		return
	}
	s.done = append(s.done, j.id)
	if n := len(s.done) - s.o.Completed; n > 0 {
		for _, id := range s.done[:n] {
			delete(s.jobs, id)
		}
		s.done = slices.Clone(s.done[n:])
	}
}

func (s *Service) path(id, suffix string) string { return filepath.Join(s.o.Dir, id+suffix) }

func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

func now() float64 { return float64(time.Now().UnixMicro()) / 1e6 }
