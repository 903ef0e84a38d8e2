package supervisor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"mypr/internal/rpc"
	"mypr/supervisor/cgroup"
	"mypr/supervisor/control"
	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

// api is the supervisor as the control socket sees it. Its methods run in the handlers'
// goroutines and ask the loop.
type api struct{ s *Supervisor }

var _ control.Supervisor = api{}

var errEnding = rpc.Errorf(rpc.CodeUnavailable, "the supervisor is ending")

// ask runs f in the loop and waits until it has called its argument, once; the answer
// is given only when the state that it speaks of is on disk. lost takes an answer that
// nobody waits for any more.
func ask[T any](ctx context.Context, s *Supervisor, f func(answer func(T, error)), lost func(T)) (T, error) {
	type result struct {
		v   T
		err error
	}
	ch := make(chan result, 1)
	var mu sync.Mutex // guards left
	left := false
	s.queue.post(func() {
		f(func(v T, err error) {
			s.reply(func() {
				mu.Lock()
				defer mu.Unlock()
				if left && lost != nil {
					lost(v)
					return
				}
				ch <- result{v, err}
			})
		})
	})
	leave := func() (r result, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		left = true
		select {
		case r = <-ch:
			return r, true
		default:
			return r, false
		}
	}
	select {
	case r := <-ch:
		return r.v, r.err
	case <-ctx.Done():
		if r, ok := leave(); ok {
			return r.v, r.err
		}
		var zero T
		return zero, ctx.Err()
	case <-s.stopped:
		if r, ok := leave(); ok {
			return r.v, r.err
		}
		var zero T
		return zero, errEnding
	}
}

// askLater is ask without the wait: it calls answered once, from the loop, or from where
// ctx ends. The end of ctx is also what the end of the loop leads to.
func askLater[T any](ctx context.Context, s *Supervisor, f func(answer func(T, error)), answered func(T, error), lost func(T)) {
	var over atomic.Bool
	stop := context.AfterFunc(ctx, func() {
		if over.CompareAndSwap(false, true) {
			answered(*new(T), ctx.Err())
		}
	})
	s.queue.post(func() {
		f(func(v T, err error) {
			s.reply(func() {
				if stop(); over.CompareAndSwap(false, true) {
					answered(v, err)
				} else {
					lost(v)
				}
			})
		})
	})
}

type none struct{}

func (a api) Info(ctx context.Context) (control.Info, error) {
	s := a.s
	return ask(ctx, s, func(answer func(control.Info, error)) {
		i := control.Info{
			Version: s.opt.Version, Protocol: 1, Instance: s.opt.Instance, PID: os.Getpid(), PIDNamespace: pidNamespace(),
			Started: s.started, Executable: s.opt.Executable, Tier: s.tier, TierReason: s.tierReason, Mode: s.opt.Mode,
			ShuttingDown: s.shutting, Labels: s.opt.Labels,
		}
		if s.tier < 3 {
			i.Cgroup, i.Controllers = s.tree.Dir, s.tree.Controllers
		}
		answer(i, nil)
	}, nil)
}

// measured is a status with what is needed to measure its usage outside of the loop.
type measured struct {
	control.UnitStatus
	shim int
	pids []int
}

func (u *unit) measured() measured {
	m := measured{UnitStatus: u.status()}
	if b, ok := u.box.(*shimBox); ok {
		m.shim = b.shim.Process.PID
	}
	return m
}

// measure reads files: memory and cpu of the unit's processes.
func (m *measured) measure() {
	switch {
	case m.Cgroup != "":
		m.pids = cgroup.PIDsIn(m.Cgroup)
		use := cgroup.ReadUsage(m.Cgroup)
		m.CPUUsageUsec = max(m.CPUUsageUsec, use.CPU)
		m.MemoryPeak = max(m.MemoryPeak, use.MemoryPeak)
		m.MemoryCurrent = use.MemoryCurrent
	case m.shim != 0:
		m.pids, _ = process.Descendants(m.shim)
		for _, pid := range m.pids {
			m.CPUUsageUsec += process.CPUTime(pid)
		}
	}
	m.Processes = len(m.pids)
	if m.MemoryCurrent == 0 {
		for _, pid := range m.pids {
			m.MemoryCurrent += process.RSS(pid)
		}
	}
}

func (a api) List(ctx context.Context, p control.ListParams) ([]control.UnitStatus, error) {
	list, err := ask(ctx, a.s, func(answer func([]measured, error)) {
		var list []measured
		for _, u := range a.s.sorted() {
			list = append(list, u.measured())
		}
		answer(list, nil)
	}, nil)
	if err != nil {
		return nil, err
	}
	out := make([]control.UnitStatus, len(list))
	for i := range list {
		if p.Usage {
			list[i].measure()
		}
		out[i] = list[i].UnitStatus
	}
	return out, nil
}

func (a api) Show(ctx context.Context, p control.UnitParams) (control.UnitDetail, error) {
	type detail struct {
		measured
		def      *spec.Unit
		warnings []string
	}
	d, err := askUnit(ctx, a.s, p.Name, func(u *unit, answer func(detail, error)) {
		answer(detail{u.measured(), u.def, u.warnings}, nil)
	})
	if err != nil {
		return control.UnitDetail{}, err
	}
	d.measure()
	return control.UnitDetail{UnitStatus: d.UnitStatus, Spec: d.def, Warnings: d.warnings, PIDs: d.pids}, nil
}

// askUnit is ask for one unit, which is loaded if need be.
func askUnit[T any](ctx context.Context, s *Supervisor, name string, f func(u *unit, answer func(T, error))) (T, error) {
	return ask(ctx, s, func(answer func(T, error)) {
		var zero T
		if err := checkName(name); err != nil {
			answer(zero, err)
			return
		}
		u, err := s.load(name)
		if err != nil {
			var e *rpc.Error
			if !errors.As(err, &e) {
				err = rpc.Errorf(rpc.CodeInvalidRequest, "cannot load %s: %v", name, err)
			}
			answer(zero, err)
			return
		}
		f(u, answer)
	}, nil)
}

func (a api) Job(ctx context.Context, method string, p control.JobParams) (control.JobResult, error) {
	return askUnit(ctx, a.s, p.Name, func(u *unit, answer func(control.JobResult, error)) {
		if a.s.shutting {
			answer(control.JobResult{}, errEnding)
			return
		}
		done := func(result string) { answer(control.JobResult{Result: result, Unit: u.status()}, nil) }
		reason := method + " requested"
		switch method {
		case control.MethodStart:
			if err := u.startable(); err != nil {
				answer(control.JobResult{}, err)
				return
			}
			a.s.startJob(u, false, reason, waiter1(p.NoWait, done))
		case control.MethodStop:
			a.s.stopJob(u, reason, waiter1(p.NoWait, done))
		case control.MethodRestart:
			if err := u.startable(); err != nil {
				answer(control.JobResult{}, err)
				return
			}
			a.s.restartJob(u, reason, waiter1(p.NoWait, done))
		case control.MethodReload:
			a.s.submit(u, jobReload, false, reason, waiter1(p.NoWait, done))
		}
		if p.NoWait {
			a.s.soon(func() { done(jobDone) })
		}
	})
}

func waiter1(noWait bool, done func(string)) func(string) {
	if noWait {
		return nil
	}
	return done
}

// startable refuses what can never be started, before a job is made of it.
func (u *unit) startable() error {
	if sv := u.def.Service; sv != nil && len(sv.ExecStart) == 0 && (sv.Type != spec.TypeOneshot || len(sv.ExecStop) == 0) {
		return rpc.Errorf(rpc.CodeInvalidRequest, "%s has no ExecStart=, so it cannot be started by itself", u.name)
	}
	return nil
}

func (a api) Kill(ctx context.Context, p control.KillParams) error {
	_, err := askUnit(ctx, a.s, p.Name, func(u *unit, answer func(none, error)) { answer(none{}, u.killBy(p)) })
	return err
}

func (u *unit) killBy(p control.KillParams) error {
	sig := syscall.Signal(p.Signal)
	if p.Signal <= 0 || p.Signal > 64 {
		return rpc.Errorf(rpc.CodeInvalidRequest, "%d is no signal", p.Signal)
	}
	if u.box == nil && p.Who == "all" && len(u.linger) > 0 { // what KillMode= left of earlier runs
		for _, b := range u.linger {
			if sig == syscall.SIGKILL {
				b.kill()
			} else {
				b.signal(sig)
			}
		}
		return nil
	}
	if !u.isService() || u.box == nil {
		return rpc.Errorf(rpc.CodeConflict, "%s has no processes: it is %s", u.name, u.State.Active())
	}
	pr := u.main
	switch p.Who {
	case "", "main":
	case "control":
		pr = u.control
	case "all":
		if sig == syscall.SIGKILL {
			u.box.kill()
			u.box.allowTasks()
			return nil
		}
		u.box.signal(sig)
		return nil
	default:
		return rpc.Errorf(rpc.CodeInvalidRequest, "who is main, control or all, not %q", p.Who)
	}
	if pr == nil || pr.p == nil {
		return rpc.Errorf(rpc.CodeConflict, "%s has no such process now", u.name)
	}
	if err := pr.p.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("cannot signal %s: %w", process.Describe(pr.p.PID), err)
	}
	return nil
}

func (a api) ResetFailed(ctx context.Context, p control.UnitParams) error {
	_, err := askUnit(ctx, a.s, p.Name, func(u *unit, answer func(none, error)) {
		u.clearLimit()
		u.s.changed(u)
		if u.State == Failed {
			u.Result, u.Error, u.Survivors = resultSuccess, "", nil
			u.enter(Dead, "reset-failed")
		}
		answer(none{}, nil)
	})
	return err
}

func (a api) Freeze(ctx context.Context, p control.UnitParams, on bool) error {
	_, err := askUnit(ctx, a.s, p.Name, func(u *unit, answer func(none, error)) {
		u.freeze(on, func(err error) {
			if err != nil {
				verb := "freeze"
				if !on {
					verb = "thaw"
				}
				err = rpc.Errorf(rpc.CodeConflict, "cannot %s %s: %v", verb, u.name, err)
			}
			answer(none{}, err)
		})
	})
	return err
}

// transient is an answer with descriptors.
type transient struct {
	control.TransientResult
	files []*os.File
}

func (t transient) close() { closeAll(t.files) }

func (a api) StartTransient(ctx context.Context, p control.TransientParams, files []*os.File, answered func(control.TransientResult, []*os.File, error)) {
	s := a.s
	if err := checkTransient(p, files); err != nil {
		closeAll(files)
		answered(control.TransientResult{}, nil, err)
		return
	}
	askLater(ctx, s, func(answer func(transient, error)) {
		u, err := s.defineTransient(p, files)
		if err != nil {
			closeAll(files)
			answer(transient{}, err)
			return
		}
		// The client's ends exist as soon as the run has begun; they are taken before
		// the unit can be unloaded at its end.
		var t transient
		var ends error
		done := func(result string) {
			t.JobResult = control.JobResult{Result: result, Unit: u.status()}
			if ends != nil {
				closeAll(t.files)
				t.files, t.FDNames = nil, nil
			}
			if !p.Wait || result != jobDone {
				answer(t, ends)
				return
			}
			var patience *timer
			w := &waiter{invocation: u.Invocation, answer: func(st control.UnitStatus) {
				patience.stop()
				t.Unit = st
				answer(t, nil)
			}}
			u.waiters = append(u.waiters, w)
			if u.answerWaiters(); p.WaitMS == 0 || !slices.Contains(u.waiters, w) {
				return
			}
			patience = s.afterFunc(time.Duration(p.WaitMS)*time.Millisecond, func() {
				if u.forgetWaiter(w) {
					u.brief = false
					s.changed(u)
					w.answer(u.status())
				}
			})
		}
		if err := u.openStdio(); err != nil {
			s.unload(u)
			answer(transient{}, fmt.Errorf("cannot start %s: %w", u.name, err))
			return
		}
		t.FDNames, t.files, ends = u.duplicates(p.Keep...)
		s.startJob(u, false, "start-transient requested", waiter1(p.NoWait, done))
		if p.NoWait {
			s.soon(func() { done(jobDone) })
		}
	}, func(t transient, err error) {
		answered(t.TransientResult, t.files, err)
	}, transient.close)
}

func checkTransient(p control.TransientParams, files []*os.File) error {
	if p.Unit == nil || p.Unit.Service == nil {
		return rpc.Errorf(rpc.CodeInvalidRequest, "a transient unit is a service")
	}
	p.Unit.RestoreRaw()
	if err := validate(p.Unit); err != nil {
		return err
	}
	if len(p.Unit.Service.ExecStart) == 0 {
		return rpc.Errorf(rpc.CodeInvalidRequest, "%s has no ExecStart=", p.Unit.Name)
	}
	if p.Wait && (p.NoWait || slices.Contains([]string{p.Unit.Service.StandardInput, p.Unit.Service.StandardOutput, p.Unit.Service.StandardError}, spec.StdioPipe) ||
		p.Unit.Service.StandardInput == spec.StdioPTY) {
		return rpc.Errorf(rpc.CodeInvalidRequest, "wait goes neither with no_wait nor with pipes or a pty: their ends would come with the answer")
	}
	if len(files) != len(p.FDNames) {
		return rpc.Errorf(rpc.CodeInvalidRequest, "%d descriptors came for %d names", len(files), len(p.FDNames))
	}
	for i, n := range p.FDNames {
		if !validFDName(n) || slices.Contains(p.FDNames[:i], n) {
			return rpc.Errorf(rpc.CodeInvalidRequest, "%q is no name for a descriptor, or there are two of it", n)
		}
	}
	for _, n := range p.Keep {
		if !slices.Contains(p.FDNames, n) {
			return rpc.Errorf(rpc.CodeInvalidRequest, "no descriptor %q came with the request, to be kept", n)
		}
	}
	if len(p.Keep) > 0 && p.Wait && p.WaitMS == 0 {
		return rpc.Errorf(rpc.CodeInvalidRequest, "keep and wait need wait_ms: what is kept is safe only once it is known that the unit runs")
	}
	if p.WaitMS < 0 || p.WaitMS > 0 && !p.Wait {
		return rpc.Errorf(rpc.CodeInvalidRequest, "wait_ms is how long wait waits at most, in milliseconds")
	}
	sv := p.Unit.Service
	for _, m := range []string{sv.StandardInput, sv.StandardOutput, sv.StandardError} {
		if len(m) > 3 && m[:3] == "fd:" && (!slices.Contains(p.FDNames, m[3:]) || slices.Contains(p.Keep, m[3:])) {
			return rpc.Errorf(rpc.CodeInvalidRequest, "no descriptor %q came with the request", m[3:])
		}
	}
	if n := sv.EnvironmentFD; n != "" {
		if !slices.Contains(p.FDNames, n) || slices.Contains(p.Keep, n) {
			return rpc.Errorf(rpc.CodeInvalidRequest, "no descriptor %q came with the request", n)
		}
		if !startsOnce(sv) || len(sv.ExecStartPre)+len(sv.ExecStartPost)+len(sv.ExecReload)+len(sv.ExecStop)+len(sv.ExecStopPost) > 0 {
			return rpc.Errorf(rpc.CodeInvalidRequest, "environment_fd is for a unit with one command, which is started once")
		}
	}
	return nil
}

// defineTransient makes or replaces the unit. The files are the unit's if there is no error.
func (s *Supervisor) defineTransient(p control.TransientParams, files []*os.File) (*unit, error) {
	if s.shutting {
		return nil, errEnding
	}
	def := p.Unit
	// Units with files were loaded at the start and at daemon-reload; looking for one of
	// this name now would cost more than the rest.
	u := s.units[def.Name]
	switch {
	case u == nil:
		u = s.add(def, nil, true)
	case !u.State.ended() || u.job != nil:
		return nil, rpc.Errorf(rpc.CodeConflict, "%s is %s", u.name, u.State.Active()).WithHint("stop it first, or choose another name")
	default:
		if !u.transient {
			u.fileDef = u.def
		}
		u.def, u.transient, u.warnings = def, true, nil
		u.release()
		u.dropFDs()
	}
	sv := def.Service
	u.brief = p.Wait
	for i, name := range p.FDNames {
		if slices.Contains(p.Keep, name) {
			u.keep(name, files[i])
			continue
		}
		if u.given == nil {
			u.given = map[string]*os.File{}
		}
		u.given[name] = files[i]
		if m := "fd:" + name; m != sv.StandardInput && m != sv.StandardOutput && m != sv.StandardError && name != sv.EnvironmentFD {
			u.passed = append(u.passed, name)
		}
	}
	return u, nil
}

// duplicates are the kept client ends again, but for some.
func (u *unit) duplicates(but ...string) (names []string, files []*os.File, err error) {
	names = slices.DeleteFunc(slices.Sorted(maps.Keys(u.kept)), func(n string) bool { return slices.Contains(but, n) })
	for _, n := range names {
		f, err := process.Dup(u.kept[n])
		if err != nil {
			closeAll(files)
			return nil, nil, err
		}
		files = append(files, f)
	}
	return names, files, nil
}

func (a api) Attach(ctx context.Context, p control.UnitParams) (control.TransientResult, []*os.File, error) {
	t, err := ask(ctx, a.s, func(answer func(transient, error)) {
		u := a.s.units[p.Name]
		if u == nil {
			answer(transient{}, rpc.Errorf(rpc.CodeNotFound, "there is no unit %s", p.Name))
			return
		}
		t := transient{}
		t.JobResult = control.JobResult{Result: jobDone, Unit: u.status()}
		var err error
		t.FDNames, t.files, err = u.duplicates()
		answer(t, err)
	}, transient.close)
	return t.TransientResult, t.files, err
}

func (a api) Release(ctx context.Context, p control.ReleaseParams) error {
	_, err := ask(ctx, a.s, func(answer func(none, error)) {
		a.s.release(p.Name, p.FDNames)
		for _, name := range p.Names {
			a.s.release(name, nil)
		}
		answer(none{}, nil)
	}, nil)
	return err
}

// release is no error for a unit that is not there: what it is for is so already.
func (s *Supervisor) release(name string, fds []string) {
	u := s.units[name]
	if u == nil {
		return
	}
	u.release(fds...)
	if u.transient && len(fds) == 0 && u.State.ended() && u.job == nil && len(u.linger) == 0 {
		s.unload(u)
	} else {
		s.unsettled = append(s.unsettled, u)
	}
}

func (a api) ResizeTTY(ctx context.Context, p control.ResizeParams) error {
	_, err := askUnit(ctx, a.s, p.Name, func(u *unit, answer func(none, error)) {
		f := u.kept["pty"]
		if f == nil {
			answer(none{}, rpc.Errorf(rpc.CodeConflict, "%s has no pty", u.name))
			return
		}
		answer(none{}, setWinsize(f, p.Rows, p.Cols))
	})
	return err
}

// waiter waits for the end of a run.
type waiter struct {
	invocation string
	answer     func(control.UnitStatus)
}

func (a api) Wait(ctx context.Context, p control.WaitParams) (control.UnitStatus, error) {
	var w *waiter
	var at *unit
	st, err := ask(ctx, a.s, func(answer func(control.UnitStatus, error)) {
		u := a.s.units[p.Name]
		for i := len(a.s.recent) - 1; i >= 0; i-- {
			// A run of a unit that was unloaded, asked for by its invocation or, when
			// no unit of the name is left, by name.
			r := a.s.recent[i]
			if r.Name == p.Name && (r.InvocationID == p.InvocationID && p.InvocationID != "" || u == nil && p.InvocationID == "") {
				answer(r, nil)
				return
			}
		}
		if u == nil {
			answer(control.UnitStatus{}, rpc.Errorf(rpc.CodeNotFound, "there is no unit %s", p.Name))
			return
		}
		at, w = u, &waiter{invocation: p.InvocationID, answer: func(st control.UnitStatus) { answer(st, nil) }}
		u.waiters = append(u.waiters, w)
		u.answerWaiters()
	}, nil)
	if err != nil && ctx.Err() != nil {
		a.s.queue.post(func() { // the waiter must not stay with a unit that never ends
			if at != nil {
				at.forgetWaiter(w)
			}
		})
	}
	return st, err
}

// forgetWaiter reports whether it waited.
func (u *unit) forgetWaiter(w *waiter) bool {
	n := len(u.waiters)
	u.waiters = slices.DeleteFunc(u.waiters, func(x *waiter) bool { return x == w })
	return len(u.waiters) < n
}

func (u *unit) answerWaiters() {
	if len(u.waiters) == 0 {
		return
	}
	st := u.status()
	u.waiters = slices.DeleteFunc(u.waiters, func(w *waiter) bool {
		over := u.State.ended() && u.job == nil ||
			w.invocation != "" && (w.invocation != u.Invocation || u.State.ended() || u.State == AutoRestart)
		if over {
			w.answer(st)
		}
		return over
	})
}

// subscriberMax is how many events wait for a subscriber that does not read. A gap would
// be worse than an end: a subscriber that is slower loses its connection.
var subscriberMax = 10_000

// subscription carries events to one subscriber.
type subscription struct {
	names []string
	mu    sync.Mutex // guards the fields below
	queue []control.UnitEvent
	lost  bool // it was too slow

	onLost func()
	wake   chan struct{}
}

func (sub *subscription) send(e control.UnitEvent) {
	if len(sub.names) > 0 && !slices.Contains(sub.names, e.Name) {
		return
	}
	sub.mu.Lock()
	switch {
	case sub.lost:
	case len(sub.queue) >= subscriberMax:
		sub.lost, sub.queue = true, nil
		go sub.onLost() // closes a connection; its own goroutine may be stuck in a write
	default:
		sub.queue = append(sub.queue, e)
	}
	sub.mu.Unlock()
	select {
	case sub.wake <- struct{}{}:
	default:
	}
}

func (s *Supervisor) emit(e control.UnitEvent) { s.events = append(s.events, e) }

func (s *Supervisor) wantsEvents(u *unit) bool {
	for sub := range s.subs {
		if len(sub.names) == 0 || slices.Contains(sub.names, u.name) {
			return true
		}
	}
	return false
}

func (a api) Subscribe(ctx context.Context, p control.SubscribeParams, event func(control.UnitEvent), lost func()) ([]control.UnitStatus, error) {
	sub := &subscription{onLost: lost, names: p.Names, wake: make(chan struct{}, 1)}
	list, err := ask(ctx, a.s, func(answer func([]control.UnitStatus, error)) {
		a.s.subs[sub] = struct{}{}
		list := []control.UnitStatus{}
		for _, u := range a.s.sorted() {
			if len(p.Names) == 0 || slices.Contains(p.Names, u.name) {
				list = append(list, u.status())
			}
		}
		answer(list, nil)
	}, nil)
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			select {
			case <-sub.wake:
			case <-ctx.Done():
				a.s.queue.post(func() { delete(a.s.subs, sub) })
				return
			}
			sub.mu.Lock()
			batch, gap := sub.queue, sub.lost
			sub.queue = nil
			sub.mu.Unlock()
			if gap {
				a.s.queue.post(func() { delete(a.s.subs, sub) })
				return
			}
			for _, e := range batch {
				event(e)
			}
		}
	}()
	return list, nil
}

func (a api) DaemonReload(ctx context.Context) error {
	_, err := ask(ctx, a.s, func(answer func(none, error)) { answer(none{}, a.s.daemonReload()) }, nil)
	return err
}

// daemonReload reads every unit file again. A unit whose file has an error keeps the
// definition it has; one whose file is gone is forgotten once it does not run.
func (s *Supervisor) daemonReload() error {
	var errs []error
	names, err := s.opt.Names()
	if err != nil {
		errs = append(errs, err)
	}
	for _, u := range s.sorted() {
		if u.transient && u.fileDef == nil {
			continue
		}
		def, warnings, err := s.opt.Load(u.name)
		if err == nil {
			err = validate(def)
		}
		switch {
		case errors.Is(err, os.ErrNotExist):
			if u.State.ended() && u.job == nil && !u.transient {
				delete(s.units, u.name)
				s.sockets = slices.DeleteFunc(s.sockets, func(v *unit) bool { return v == u })
				s.gone = append(s.gone, u.name)
			}
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", u.name, err))
		case u.transient:
			u.fileDef = def
		case (u.def.Service == nil) == (def.Service == nil) && (u.def.Socket == nil) == (def.Socket == nil):
			u.def, u.warnings = def, warnings
		}
	}
	for _, name := range names {
		if _, err := s.load(name); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	if len(errs) > 0 {
		return rpc.Errorf(rpc.CodeInvalidRequest, "some unit files were not loaded: %v", errors.Join(errs...))
	}
	return nil
}

func (a api) Shutdown(ctx context.Context, p control.ShutdownParams) (func(), error) {
	answered := make(chan struct{})
	_, err := ask(ctx, a.s, func(answer func(none, error)) {
		a.s.goodbyes = append(a.s.goodbyes, answered)
		a.s.atEnd = append(a.s.atEnd, func() { answer(none{}, nil) })
		a.s.shutdown(cmp.Or(p.Reason, "shutdown requested"))
	}, nil)
	if err != nil {
		close(answered)
		return nil, err
	}
	return func() { close(answered) }, nil
}
