package manager

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"mypr/internal/job"
	"mypr/internal/rpc"
	"mypr/kernel"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

// runner runs programs as transient units of the supervisor, each in a cgroup of its
// own: for the preparation of the environment (kernel.Runner) and for the services
// behind ws.fs and ws.git (job.Runner).
type runner struct{ m *Manager }

// process is one program. Its unit is a oneshot service, so the start job ends with
// the program and carries its exit status.
type process struct {
	sup            Supervisor
	unit           string
	stdout, stderr *os.File
	ended          chan struct{} // closed when res and err are set
	res            control.TransientResult
	err            error
	killed         sync.Once
}

// start starts a program with its output in pipes.
func (r *runner) start(ctx context.Context, name, path string, argv []string, dir string, env []string) (*process, error) {
	return r.startUnit(ctx, "call-"+newID()+".service", name, path, argv, dir, env)
}

func (r *runner) startUnit(ctx context.Context, unit, name, path string, argv []string, dir string, env []string) (*process, error) {
	sup, _, err := r.m.supervisor(ctx)
	if err != nil {
		return nil, fmt.Errorf("run %s: no supervisor: %w", name, err)
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		outR.Close()
		outW.Close()
		return nil, err
	}
	p := &process{sup: sup, unit: unit, stdout: outR, stderr: errR, ended: make(chan struct{})}
	u := &spec.Unit{Name: p.unit, Description: name, CollectMode: "inactive-or-failed", Service: &spec.Service{
		Type: spec.TypeOneshot, ExecStart: []spec.Command{{Path: path, Args: argv, NoExpand: true}},
		WorkingDirectory: dir, Environment: env, ExactEnvironment: true,
		StandardInput: spec.StdioNull, StandardOutput: "fd:out", StandardError: "fd:err", TimeoutStopSec: 2 * time.Second,
	}}
	go func() { // ends with the program or with the connection to the supervisor
		defer close(p.ended)
		var files map[string]*os.File
		p.res, files, p.err = sup.StartTransient(context.Background(), control.TransientParams{Unit: u, FDNames: []string{"out", "err"}}, outW, errW)
		for _, f := range files {
			f.Close()
		}
		outW.Close()
		errW.Close()
		if errors.Is(p.err, rpc.ErrClosed) {
			p.res.Unit, p.err = r.find(sup, p.unit)
		}
	}()
	return p, nil
}

// find waits for the end of a program whose supervisor died, under the next one.
func (r *runner) find(died Supervisor, unit string) (st control.UnitStatus, err error) {
	for err = error(rpc.ErrClosed); errors.Is(err, rpc.ErrClosed); {
		if err := r.m.supervisorGone(died); err != nil {
			return st, err
		}
		sup, _, err2 := r.m.supervisor(r.m.ctx)
		if err2 != nil {
			return st, err2
		}
		died = sup
		if st, err = sup.Wait(r.m.ctx, control.WaitParams{Name: unit}); rpc.CodeOf(err) == rpc.CodeNotFound {
			err = rpc.Errorf(rpc.CodeUnavailable, "the supervisor died while it started the program; it was not run, or what became of it is not known")
		}
	}
	return st, err
}

func (p *process) Stdout() *os.File { return p.stdout }
func (p *process) Stderr() *os.File { return p.stderr }

// Kill ends the program with everything that it started.
func (p *process) Kill() {
	p.killed.Do(func() {
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_ = p.sup.Kill(ctx, control.KillParams{Name: p.unit, Signal: int(syscall.SIGKILL), Who: "all"})
		}()
	})
}

// Wait returns when nothing of the program is left.
func (p *process) Wait() (job.Exit, error) {
	<-p.ended
	p.stdout.Close()
	p.stderr.Close()
	if p.err != nil {
		return job.Exit{}, p.err
	}
	u := p.res.Unit
	if !u.ExitKnown {
		return job.Exit{}, errors.New(describeEnd(u) + ": " + u.Error)
	}
	return job.Exit{Code: u.ExitCode, Signal: syscall.Signal(u.ExitSignal)}, nil
}

// Start implements job.Runner.
func (r *runner) Start(ctx context.Context, c job.Command) (job.Process, error) {
	return r.start(ctx, c.Name, c.Argv[0], c.Argv, c.Dir, c.Env)
}

// Run implements kernel.Runner.
func (r *runner) Run(ctx context.Context, c kernel.Command) (kernel.Result, error) {
	p, err := r.start(ctx, "prepare: "+c.Name, c.Path, c.Args, c.Dir, c.Env)
	if err != nil {
		return kernel.Result{}, err
	}
	stop := context.AfterFunc(ctx, p.Kill)
	defer stop()
	var out, errOut []byte
	var wg sync.WaitGroup
	wg.Add(2)
	go func() { defer wg.Done(); out = tail(p.stdout) }()
	go func() { defer wg.Done(); errOut = tail(p.stderr) }()
	wg.Wait()
	exit, err := p.Wait()
	if ctx.Err() != nil {
		return kernel.Result{}, ctx.Err()
	}
	if err != nil {
		return kernel.Result{}, err
	}
	code := exit.Code
	if exit.Signal != 0 {
		code = 128 + int(exit.Signal)
	}
	return kernel.Result{ExitCode: code, Output: string(out), Stderr: string(errOut)}, nil
}

// tail reads to the end and keeps the last 64 KiB.
func tail(r io.Reader) []byte {
	const keep = 64 << 10
	var t []byte
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		t = append(t, buf[:n]...)
		if over := len(t) - keep; over > keep {
			t = append(t[:0], t[over:]...)
		}
		if err != nil {
			return t[max(0, len(t)-keep):]
		}
	}
}
