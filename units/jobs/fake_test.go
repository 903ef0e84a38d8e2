package jobs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

// fake is a supervisor for the tests of this package: it starts real processes, keeps
// duplicates of the client ends, and knows process groups instead of cgroups.
type fake struct {
	mu     sync.Mutex
	units  map[string]*fakeUnit
	lose   string // the method whose answer gets lost next
	starts int
	recent *fakeUnit // unloaded
	older  bool      // it does not know what a newer manager asks for
}

type fakeUnit struct {
	u      *spec.Unit
	st     control.UnitStatus
	cmd    *exec.Cmd
	kept   map[string]*os.File
	over   chan struct{}
	timer  *time.Timer
	timout bool
}

func newFake() *fake { return &fake{units: map[string]*fakeUnit{}} }

func (f *fake) connection(ctx context.Context) (Supervisor, error) { return f, ctx.Err() }

// lost reports whether the answer to a method is to be lost.
func (f *fake) lost(method string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lose == method {
		f.lose = ""
		return fmt.Errorf("%s: %w", method, rpc.ErrClosed)
	}
	return nil
}

func (f *fake) get(name string) (*fakeUnit, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if u := f.units[name]; u != nil {
		return u, nil
	}
	return nil, rpc.Errorf(rpc.CodeNotFound, "no unit %s", name)
}

func dup(f *os.File) *os.File {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	return os.NewFile(uintptr(fd), f.Name())
}

func (f *fake) StartTransient(ctx context.Context, p control.TransientParams, files ...*os.File) (control.TransientResult, map[string]*os.File, error) {
	if err := f.lost("refuse"); err != nil {
		return control.TransientResult{}, nil, err
	}
	if f.older {
		return control.TransientResult{}, nil, rpc.Errorf(rpc.CodeInvalidRequest, "start-transient: bad parameters: json: unknown field \"environment_fd\"")
	}
	s := p.Unit.Service
	u := &fakeUnit{u: p.Unit, kept: map[string]*os.File{}, over: make(chan struct{})}
	env, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", files[slices.Index(p.FDNames, s.EnvironmentFD)].Fd()))
	if err != nil {
		return control.TransientResult{}, nil, err
	}
	u.cmd = &exec.Cmd{Path: s.ExecStart[0].Path, Args: s.ExecStart[0].Args, Dir: s.WorkingDirectory, Env: strings.Split(string(env), "\x00"),
		SysProcAttr: &syscall.SysProcAttr{Setsid: true}}
	var child []*os.File
	for i, name := range p.FDNames {
		if slices.Contains(p.Keep, name) {
			u.kept[name] = dup(files[i])
		}
	}
	if s.StandardInput == spec.StdioPTY {
		m, t, err := pty.Open()
		if err != nil {
			return control.TransientResult{}, nil, err
		}
		_ = pty.Setsize(m, &pty.Winsize{Rows: s.TTYRows, Cols: s.TTYColumns})
		u.kept["pty"] = m
		child = append(child, t)
		u.cmd.Stdin, u.cmd.Stdout, u.cmd.Stderr = t, t, t
		u.cmd.SysProcAttr.Setctty = true
	} else {
		given := func(stream string) *os.File { return files[slices.Index(p.FDNames, strings.TrimPrefix(stream, "fd:"))] }
		if s.StandardInput != spec.StdioNull {
			u.cmd.Stdin = given(s.StandardInput)
		}
		u.cmd.Stdout, u.cmd.Stderr = given(s.StandardOutput), given(s.StandardError)
	}
	u.st = control.UnitStatus{Name: p.Unit.Name, ActiveState: control.Active, InvocationID: newID(), Transient: true}
	err = u.cmd.Start()
	closeAll(child)
	r := control.TransientResult{JobResult: control.JobResult{Result: "done"}}
	if err != nil {
		u.st.ActiveState, u.st.Result, u.st.Error = control.Failed, "resources", err.Error()
		r.Result = "failed"
		close(u.over)
	} else {
		u.st.MainPID = u.cmd.Process.Pid
		if d := s.RuntimeMaxSec; d > 0 {
			u.timer = time.AfterFunc(d, func() {
				f.mu.Lock()
				u.timout = true
				f.mu.Unlock()
				_ = syscall.Kill(-u.st.MainPID, unix.SIGKILL)
			})
		}
	}
	r.Unit = u.st
	f.mu.Lock()
	f.starts++
	f.units[p.Unit.Name] = u
	f.mu.Unlock()
	if err == nil {
		go f.wait(u)
	}
	if err := f.lost("start"); err != nil {
		return control.TransientResult{}, nil, err
	}
	if err := f.lost("end"); err != nil {
		<-u.over
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.units, p.Unit.Name)
		closeFiles(u.kept)
		f.recent = u
		return control.TransientResult{}, nil, err
	}
	if p.Wait {
		var timeout <-chan time.Time
		if p.WaitMS > 0 {
			timeout = time.After(time.Duration(p.WaitMS) * time.Millisecond)
		}
		select {
		case <-u.over:
			f.mu.Lock()
			r.Unit = u.st
			f.mu.Unlock()
		case <-timeout:
		}
	}
	return r, f.hand(u, p.Keep...), nil
}

// hand makes duplicates for the client.
func (f *fake) hand(u *fakeUnit, but ...string) map[string]*os.File {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := map[string]*os.File{}
	for name, k := range u.kept {
		if !slices.Contains(but, name) {
			m[name] = dup(k)
		}
	}
	return m
}

func (f *fake) wait(u *fakeUnit) {
	err := u.cmd.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	if u.timer != nil {
		u.timer.Stop()
	}
	u.st.ActiveState, u.st.ExitedAt, u.st.ExitKnown = control.Inactive, time.Now(), true
	u.st.Result = "success"
	var ee *exec.ExitError
	if errors.As(err, &ee) {
		u.st.ActiveState = control.Failed
		ws := ee.Sys().(syscall.WaitStatus)
		u.st.Result = "exit-code"
		u.st.ExitCode = ws.ExitStatus()
		if ws.Signaled() {
			u.st.Result, u.st.ExitSignal, u.st.ExitCode = "signal", int(ws.Signal()), 0
		}
	}
	if u.timout {
		u.st.Result = "timeout"
	}
	close(u.over)
}

func (f *fake) Attach(ctx context.Context, name string) (control.TransientResult, map[string]*os.File, error) {
	u, err := f.get(name)
	if err != nil {
		return control.TransientResult{}, nil, err
	}
	f.mu.Lock()
	st := u.st
	f.mu.Unlock()
	return control.TransientResult{JobResult: control.JobResult{Result: "done", Unit: st}}, f.hand(u), nil
}

func (f *fake) Release(ctx context.Context, name string, fds ...string) error {
	u, err := f.get(name)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for n, k := range u.kept {
		if len(fds) == 0 || slices.Contains(fds, n) {
			k.Close()
			delete(u.kept, n)
		}
	}
	if len(fds) == 0 && u.st.ActiveState != control.Active {
		delete(f.units, name)
	}
	return nil
}

func (f *fake) ReleaseUnits(ctx context.Context, names ...string) error {
	for _, name := range names {
		_ = f.Release(ctx, name) // no error for what is not there
	}
	return nil
}

func (f *fake) Info(context.Context) (control.Info, error) {
	return control.Info{Tier: 1, Controllers: []string{"memory", "cpu"}, TierReason: "the pids controller is missing"}, nil
}

func (f *fake) Kill(ctx context.Context, p control.KillParams) error {
	u, err := f.get(p.Name)
	if err != nil {
		return err
	}
	select {
	case <-u.over:
		return nil
	default:
		return syscall.Kill(-u.st.MainPID, syscall.Signal(p.Signal))
	}
}

func (f *fake) Stop(ctx context.Context, p control.JobParams) (control.JobResult, error) {
	u, err := f.get(p.Name)
	if err != nil {
		return control.JobResult{}, err
	}
	_ = f.Kill(ctx, control.KillParams{Name: p.Name, Signal: int(unix.SIGTERM)})
	select {
	case <-u.over:
	case <-time.After(u.u.Service.TimeoutStopSec):
		_ = f.Kill(ctx, control.KillParams{Name: p.Name, Signal: int(unix.SIGKILL)})
		<-u.over
	}
	return control.JobResult{Result: "done", Unit: u.st}, nil
}

func (f *fake) List(context.Context, bool) ([]control.UnitStatus, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var us []control.UnitStatus
	for _, u := range f.units {
		us = append(us, u.st)
	}
	return us, nil
}

func (f *fake) Wait(ctx context.Context, p control.WaitParams) (control.UnitStatus, error) {
	if err := f.lost("wait"); err != nil {
		return control.UnitStatus{}, err
	}
	u, err := f.get(p.Name)
	if r := f.recent; err != nil && r != nil && r.st.Name == p.Name && p.InvocationID == "" {
		u, err = r, nil
	}
	if err != nil {
		return control.UnitStatus{}, err
	}
	select {
	case <-u.over:
		f.mu.Lock()
		defer f.mu.Unlock()
		return u.st, nil
	case <-ctx.Done():
		return control.UnitStatus{}, ctx.Err()
	}
}

// memory is a History.
type memory struct {
	mu      sync.Mutex
	records map[string]api.Record
	jobs    map[string][]byte
	events  []api.LogEvent
	fail    error // what Save answers
}

func newMemory() *memory { return &memory{records: map[string]api.Record{}, jobs: map[string][]byte{}} }

func (m *memory) Save(_ context.Context, r *api.Record, job []byte, isNew bool, e *api.LogEvent) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return m.fail
	}
	if _, known := m.records[r.ID]; known == isNew {
		return fmt.Errorf("record %s: known %v, new %v", r.ID, known, isNew)
	}
	m.records[r.ID] = *r
	m.jobs[r.ID] = job
	m.events = append(m.events, *e)
	return nil
}

func (m *memory) Output(e *api.LogEvent, done func()) {
	m.mu.Lock()
	m.events = append(m.events, *e)
	m.mu.Unlock()
	go done()
}

func (m *memory) Live(context.Context) ([][]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var jobs [][]byte
	for id, r := range m.records {
		if !api.Terminal(r.State) {
			jobs = append(jobs, m.jobs[id])
		}
	}
	return jobs, nil
}

func (m *memory) Load(_ context.Context, id string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.jobs[id], nil
}
