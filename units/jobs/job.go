package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/internal/rpc/readable"
	"mypr/supervisor/control"
	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

// job is one job of this manager, or one that was read from disk to be looked at.
type job struct {
	s       *Service
	id      string
	created float64
	out     *output
	started chan struct{} // closed when the supervisor has answered the start
	over    chan struct{} // closed when the state is terminal
	pumps   sync.WaitGroup
	writing chan struct{} // a token: one write at a time
	saving  sync.Mutex    // one save at a time, so that the last has the newest state

	mu      sync.Mutex // guards the fields below
	st      Status
	stdin   *os.File // nil: none, or closed
	pty     *os.File
	readers []*os.File // what the pumps read; pty is one of them
	logged  int64      // of the output: up to where the log knows
	logging bool       // a log line is being written
	unsaved bool       // the disk refused the end of it

	recorded bool // history has a record of it
}

func newJob(s *Service, st Status) *job {
	return &job{
		s: s, id: st.ID, created: st.CreatedAt, st: st, out: newOutput(s.path(st.ID, ""), s.o.OutputBytes),
		started: make(chan struct{}), over: make(chan struct{}), writing: make(chan struct{}, 1),
	}
}

func (j *job) ended() bool {
	select {
	case <-j.over:
		return true
	default:
		return false
	}
}

func (j *job) isUnsaved() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.unsaved
}

// status is a copy with what the output says.
func (j *job) status() Status {
	size, dropped, unsaved, failure := j.out.stats()
	j.mu.Lock()
	defer j.mu.Unlock()
	st := j.st
	st.Warnings = append([]api.Warning(nil), st.Warnings...)
	st.OutputBytes, st.OutputDropped, st.OutputUnsaved = size, dropped, unsaved
	st.Truncated = st.Truncated || dropped > 0 || unsaved > 0
	if failure != nil {
		st.warn("output_not_saved", fmt.Sprintf("the output could not be kept from byte %d on (%d bytes are lost): %v", size, unsaved, failure))
	}
	return st
}

// supervisor calls f with a connection, again and again while connections end under it.
// It is for calls that may be repeated.
func (s *Service) supervisor(ctx context.Context, f func(Supervisor) error) error {
	for {
		sup, err := s.o.Supervisor(ctx)
		if err != nil {
			return err
		}
		if err = f(sup); !errors.Is(err, rpc.ErrClosed) || ctx.Err() != nil {
			return err
		}
	}
}

// launch starts the unit. When the connection ended before the answer, the unit is
// looked for and never started a second time.
//
// The pipes are made here, so that the output of a command can be read while the
// supervisor has not answered, which with patience is when the command is over, if that
// is soon: end is then how its unit ended, otherwise nil.
func (j *job) launch(u *spec.Unit, p *startParams, patience time.Duration) (end *control.UnitStatus, err error) {
	params := control.TransientParams{Unit: u, Wait: patience > 0, WaitMS: int(patience.Milliseconds())}
	env, err := j.s.environmentFile(p.Env.list)
	if err != nil {
		return nil, err
	}
	theirs := []*os.File{env}
	defer func() { closeAll(theirs) }()
	files := []*os.File{env}
	params.FDNames = []string{environmentName}
	if !p.PTY {
		ours, its, err := j.streams(&params, p)
		files, theirs = append(files, ours...), append(theirs, its...)
		if err != nil {
			return nil, err
		}
	}
	ctx := j.s.ctx
	sup, err := j.s.o.Supervisor(ctx)
	if err != nil {
		return nil, err
	}
	r, ends, err := sup.StartTransient(ctx, params, files...)
	if errors.Is(err, rpc.ErrClosed) {
		err = j.s.supervisor(ctx, func(sup Supervisor) (err error) {
			r, ends, err = sup.Attach(ctx, u.Name)
			return err
		})
		if rpc.CodeOf(err) == rpc.CodeNotFound {
			if st, known := j.unloaded(u.Name); known && !p.PTY { // without its terminal its output is lost
				return st, j.connect(st, nil)
			}
			return nil, rpc.Errorf(CodeStart, "the supervisor ended while it was asked to start the command; it does not know it now, so the command did not begin or ended unseen")
		}
	}
	if err != nil {
		return nil, err
	}
	if startFailed(&r) {
		closeFiles(ends)
		reason := r.Unit.Error
		if reason == "" {
			reason = r.Unit.Result
		}
		if strings.HasSuffix(reason, unix.ENOENT.Error()) { // the program was there a moment ago
			reason += " (the program, its directory, or what its #! line names)"
		}
		return nil, rpc.Errorf(CodeStart, "the command could not be started: %s", reason)
	}
	if err := j.connect(&r.Unit, ends); err != nil {
		return nil, err
	}
	if params.Wait && (r.Unit.ActiveState == control.Inactive || r.Unit.ActiveState == control.Failed) {
		return &r.Unit, nil
	}
	return nil, nil
}

// unloaded is how a unit ended that the supervisor has no more: it was over, and well, before
// anybody could ask for it.
func (j *job) unloaded(name string) (st *control.UnitStatus, known bool) {
	err := j.s.supervisor(j.s.ctx, func(sup Supervisor) error {
		end, err := sup.Wait(j.s.ctx, control.WaitParams{Name: name})
		st = &end
		return err
	})
	return st, err == nil
}

// streams makes the pipes of a command and starts their pumps. The files are what the
// supervisor gets: the command's ends, which are given back to be closed, and ours to keep.
func (j *job) streams(params *control.TransientParams, p *startParams) (files, theirs []*os.File, err error) {
	give := func(name string, f *os.File) {
		params.FDNames, files = append(params.FDNames, name), append(files, f)
	}
	pipe := func(stream, name string) error {
		var fds [2]int
		if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
			return os.NewSyscallError("pipe", err)
		}
		if stream == "stdin" {
			fds[0], fds[1] = fds[1], fds[0]
		}
		its := os.NewFile(uintptr(fds[1]), name)
		theirs = append(theirs, its)
		_ = unix.SetNonblock(fds[0], true) // so that Go's poller waits on it; the other end stays as it is
		ours := os.NewFile(uintptr(fds[0]), stream)
		params.Keep = append(params.Keep, stream)
		give(name, its)
		give(stream, ours)
		j.mu.Lock()
		defer j.mu.Unlock()
		j.take(stream, ours)
		return nil
	}
	switch {
	case p.Input != nil:
		f, err := memoryFile("input", *p.Input)
		if err != nil {
			return nil, nil, err
		}
		theirs = append(theirs, f)
		give(inputName, f)
	case p.Stdin:
		if err := pipe("stdin", inputName); err != nil {
			return nil, theirs, err
		}
	}
	err = pipe(stdout, outputName)
	if err == nil {
		err = pipe(stderr, errorName)
	}
	return files, theirs, err
}

// connect takes the ends of the pipes or the terminal that it does not have, and starts
// their pumps.
func (j *job) connect(u *control.UnitStatus, ends map[string]*os.File) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.st.Invocation, j.st.PID = u.InvocationID, u.MainPID
	if j.readers != nil {
		closeFiles(ends)
		return nil
	}
	var errs []error
	for name, f := range ends {
		mine, err := own(f, name)
		f.Close()
		if err != nil {
			errs = append(errs, err)
			continue
		}
		j.take(name, mine)
	}
	return errors.Join(errs...)
}

// take begins to use an end of a stream. It runs with mu held.
func (j *job) take(name string, f *os.File) {
	switch name {
	case "stdin":
		if !j.st.Stdin { // it was closed
			f.Close()
			return
		}
		j.stdin = f
	case stdout, stderr, "pty":
		if name == "pty" {
			j.pty = f
		}
		j.readers = append(j.readers, f)
		j.pumps.Add(1)
		go j.pump(f, name == stderr, name == "pty")
	default:
		f.Close()
	}
}

// own makes a duplicate that Go's poller waits on. The flag O_NONBLOCK is shared with
// the descriptor that the supervisor keeps, which nobody reads.
func own(f *os.File, name string) (*os.File, error) {
	fd, err := readable.Dup(f)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

func closeFiles(files map[string]*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// lastDrain bounds what is read of a pipe after the job is over: more than a pipe can
// hold (pipe-max-size) comes from somebody who left the cgroup and has no end.
const lastDrain = 4 << 20

// A pipe that was full is made larger: the command and the pump then wait for each other
// less often.
const (
	pipeSize = 64 << 10 // the kernel's default
	widePipe = 1 << 20
)

// pump moves one stream into the output until its end, or until the deadline that
// stopPumps sets.
func (j *job) pump(f *os.File, isErr, tty bool) {
	defer j.pumps.Done()
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	end, wide := false, tty
	err = raw.Read(func(fd uintptr) bool {
		for n := 0; j.s.ctx.Err() == nil; {
			if n, end = j.out.take(int(fd), isErr, tty); n == 0 {
				return end
			}
			if !wide && n >= pipeSize {
				wide = true
				_, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, widePipe) // refused, it goes on as it is
			}
			j.logOutput()
		}
		return true
	})
	if err == nil || end || j.s.ctx.Err() != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		for total := 0; total < lastDrain; {
			n, end := j.out.take(int(fd), isErr, tty)
			if n == 0 || end {
				return
			}
			total += n
		}
	})
	j.logOutput()
}

// stopPumps lets the pumps take what is there and end, and closes everything.
func (j *job) stopPumps() {
	j.mu.Lock()
	readers, stdin := j.readers, j.stdin
	j.mu.Unlock()
	for _, f := range readers {
		_ = f.SetReadDeadline(time.Unix(1, 0))
	}
	j.pumps.Wait()
	for _, f := range readers {
		f.Close()
	}
	if stdin != nil {
		stdin.Close()
	}
	_ = j.out.close() // every write to it was checked
	j.mu.Lock()
	j.readers, j.stdin, j.pty = nil, nil, nil
	j.mu.Unlock()
}

// logOutput tells the log of new output, one line at a time: while one is being
// written, what comes meanwhile goes into the next.
func (j *job) logOutput() {
	size, _, _, _ := j.out.stats()
	j.mu.Lock()
	if j.logging || size == j.logged {
		j.mu.Unlock()
		return
	}
	from := j.logged
	j.logged, j.logging = size, true
	e := j.event("output", map[string]any{"from": from, "to": size})
	j.mu.Unlock()
	j.s.o.History.Output(e, func() {
		j.mu.Lock()
		j.logging = false
		j.mu.Unlock()
		j.logOutput()
	})
}

// event runs with mu held.
func (j *job) event(name string, data map[string]any) *api.LogEvent {
	return &api.LogEvent{
		Time: now(), Event: name, Kind: j.st.Kind, ID: j.id, ClientID: j.st.ClientID, ConnectionID: j.st.ConnectionID,
		ExecID: j.st.ExecID, State: j.st.State, Error: j.st.Error, Data: data,
	}
}

// startFailed tells a command that could not be started from one that ran and failed.
func startFailed(r *control.TransientResult) bool {
	over := r.Unit.ActiveState == control.Failed || r.Unit.ActiveState == control.Inactive
	return over && r.Result != "done" && (!r.Unit.ExitKnown || notExecuted(&r.Unit))
}

// notExecuted: the exit status of the unit is its supervisor's way to say that the program
// could not be executed.
func notExecuted(u *control.UnitStatus) bool {
	return u.ExitKnown && u.ExitCode == process.ExitExec && u.StartedAt.IsZero()
}

// watch waits for the end of the unit.
func (j *job) watch() {
	defer j.s.wg.Done()
	ctx := j.s.ctx
	name, invocation := unitName(j.id), j.status().Invocation
	var u control.UnitStatus
	err := j.s.supervisor(ctx, func(sup Supervisor) (err error) {
		u, err = sup.Wait(ctx, control.WaitParams{Name: name, InvocationID: invocation})
		return err
	})
	j.stopPumps()
	if ctx.Err() != nil {
		return
	}
	if err == nil && invocation != "" && u.InvocationID != invocation {
		err = errors.New("the supervisor knows another run by its name")
	}
	j.finish(&u, err)
}

// finish makes the end durable and then visible.
func (j *job) finish(u *control.UnitStatus, err error) {
	j.mu.Lock()
	cancelled := j.st.State == Cancelling
	switch {
	case err == nil:
		j.st.conclude(u, cancelled)
		if !u.ExitedAt.IsZero() {
			j.st.FinishedAt = float64(u.ExitedAt.UnixMicro()) / 1e6
		}
	case rpc.CodeOf(err) == CodeStart:
		j.st.State, j.st.Cause, j.st.Error = api.FailedCell, causeStart, err.Error()
	case rpc.CodeOf(err) == rpc.CodeNotFound:
		j.st.State, j.st.Cause = api.Lost, causeUnknown
		j.st.Error = "how it ended is not known: the supervisor does not know it any more"
		if j.st.Invocation == "" {
			j.st.Error = "the manager ended while it was starting it, and the supervisor knows nothing of it: it never began, or ended unseen"
		}
	default:
		j.st.State, j.st.Cause, j.st.Error = api.Lost, causeUnknown, "how it ended is not known: "+err.Error()
	}
	j.st.Stdin, j.st.Typing = false, false
	if j.st.FinishedAt < j.st.CreatedAt {
		j.st.FinishedAt = now()
	}
	if j.st.Kind == KindPackage {
		j.explain()
	}
	j.mu.Unlock()
	if err := j.save(j.s.ctx, j.status().State); err != nil {
		j.mu.Lock()
		j.unsaved = true
		j.st.warn("record_not_saved", "the end of the job is not in the history yet: "+err.Error())
		j.mu.Unlock()
	}
	j.s.completed(j)
	close(j.over)
	j.release()
}

// release lets the supervisor forget the unit. Nobody waits for that: what ended at
// about the same time goes together.
func (j *job) release() {
	s := j.s
	s.mu.Lock()
	s.spent = append(s.spent, unitName(j.id))
	first := len(s.spent) == 1
	s.mu.Unlock()
	if first {
		s.goIfOpen(s.releaseSpent)
	}
}

// releaseAfter is how long an ended unit waits for others.
const releaseAfter = 20 * time.Millisecond

func (s *Service) releaseSpent() {
	delay := time.NewTimer(releaseAfter)
	defer delay.Stop()
	select {
	case <-delay.C:
	case <-s.ctx.Done():
		return // the next manager finds them
	}
	s.mu.Lock()
	names := s.spent
	s.spent = nil
	s.mu.Unlock()
	err := s.supervisor(s.ctx, func(sup Supervisor) error { return sup.ReleaseUnits(s.ctx, names...) })
	if err != nil && s.ctx.Err() == nil {
		s.log.Warn("units could not be released", "units", names, "err", err)
	}
}

// save makes what is known of the job durable, with a line for the log.
func (j *job) save(ctx context.Context, event string) error {
	j.saving.Lock()
	defer j.saving.Unlock()
	st := j.status()
	raw, err := json.Marshal(&st)
	if err != nil {
		return err
	}
	j.mu.Lock()
	e, isNew := j.event(event, nil), !j.recorded
	j.mu.Unlock()
	if err := j.s.o.History.Save(ctx, st.record(), raw, isNew, e); err != nil {
		return err
	}
	j.mu.Lock()
	j.recorded = true
	j.mu.Unlock()
	return nil
}

// resume takes up a job of an earlier manager.
func (j *job) resume() {
	ctx := j.s.ctx
	var r control.TransientResult
	var ends map[string]*os.File
	err := j.s.supervisor(ctx, func(sup Supervisor) (err error) {
		r, ends, err = sup.Attach(ctx, unitName(j.id))
		return err
	})
	if ctx.Err() != nil {
		closeFiles(ends)
		close(j.started)
		return
	}
	j.mu.Lock()
	cancelling, invocation := j.st.State == Cancelling, j.st.Invocation
	j.logged = j.out.size
	if j.st.Typing {
		j.st.Typing = false
		j.st.warn("input_unknown", "the manager ended while it typed the input into the terminal: how much of it arrived is not known, and its end was not typed")
	}
	j.mu.Unlock()
	if err == nil && invocation != "" && r.Unit.InvocationID != invocation {
		closeFiles(ends)
		err = errors.New("the supervisor knows another run by its name")
	}
	if err != nil {
		close(j.started)
		j.finish(nil, err)
		return
	}
	whole := ends[stdout] != nil || ends["pty"] != nil
	err = j.connect(&r.Unit, ends)
	j.mu.Lock()
	if err != nil {
		j.st.warn("output_lost", "a stream of the job could not be taken up again: "+err.Error())
	} else if !whole { // the supervisor was killed in the moment of the start, before its anchor had them, and then the manager
		j.st.warn("output_lost", "its streams could not be taken up again: what it printed and was not read is lost")
	}
	j.mu.Unlock()
	close(j.started) // now there is something to write to
	j.s.wg.Add(1)
	if cancelling {
		j.s.wg.Go(j.stopUnit)
	}
	j.watch()
}

// stop cancels the job and waits until it is over. It reports false when it was over before.
func (j *job) stop(ctx context.Context, reason string) (bool, error) {
	j.mu.Lock()
	if api.Terminal(j.st.State) {
		j.mu.Unlock()
		return false, nil
	}
	first := j.st.State != Cancelling
	if first {
		j.st.State, j.st.CancelledBy = Cancelling, reason
	}
	j.mu.Unlock()
	if first {
		// So that a manager that takes over knows that it was not the command that failed.
		if err := j.save(j.s.ctx, Cancelling); err != nil {
			j.s.log.Warn("a cancellation could not be saved", "id", j.id, "err", err)
		}
		if !j.s.goIfOpen(j.stopUnit) {
			return false, errSuspended
		}
	}
	select {
	case <-j.over:
		return true, nil
	case <-ctx.Done():
		return true, ctx.Err()
	case <-j.s.ctx.Done():
		return true, errSuspended
	}
}

var errSuspended = rpc.Errorf(rpc.CodeUnavailable, "the manager is ending; the job goes on").WithHint("ask again")

func (j *job) stopUnit() {
	ctx := j.s.ctx
	select {
	case <-j.started:
	case <-ctx.Done():
		return
	}
	err := j.s.supervisor(ctx, func(sup Supervisor) error {
		_, err := sup.Stop(ctx, control.JobParams{Name: unitName(j.id)})
		return err
	})
	if err != nil && ctx.Err() == nil && rpc.CodeOf(err) != rpc.CodeNotFound {
		j.s.log.Warn("a job could not be stopped", "id", j.id, "err", err)
	}
}

// goIfOpen starts a goroutine of the service unless it is suspended.
func (s *Service) goIfOpen(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.wg.Go(f)
	return true
}

// record is the job as history shows it.
func (s *Status) record() *api.Record {
	code := s.Command.Shell
	if s.Command.Words != nil {
		raw, _ := json.Marshal(s.Command.Words) // strings
		code = string(raw)
	}
	r := &api.Record{
		ID: s.ID, Kind: s.Kind, ClientID: s.ClientID, ConnectionID: s.ConnectionID, Generation: s.Generation,
		State: s.State, Code: code, Error: s.Error, Truncated: s.Truncated, OutputBytes: s.OutputBytes,
		CreatedAt: s.CreatedAt, StartedAt: s.CreatedAt, FinishedAt: s.FinishedAt,
	}
	if r.State == Cancelling {
		r.State = api.Running
	}
	return r
}
