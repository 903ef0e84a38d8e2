package jobs

import (
	"context"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	program "mypr/internal/job"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

// runnerPrefix begins the names of units that serve a single call. Those that an
// earlier manager left are of no use to anybody.
const runnerPrefix = "call-"

// Runner runs the programs of other services (search, git) as transient units. They
// are no jobs: no record, no output on disk, and they do not outlive their call.
type Runner struct{ s *Service }

// Runner returns the service's runner.
func (s *Service) Runner() *Runner { return &Runner{s} }

type process struct {
	s              *Service
	unit           string
	invocation     string
	stdout, stderr *os.File
	wg             sync.WaitGroup // kills on their way
}

// Start implements job.Runner.
func (r *Runner) Start(ctx context.Context, c program.Command) (program.Process, error) {
	s := r.s
	sup, err := s.o.Supervisor(ctx)
	if err != nil {
		return nil, err
	}
	name := runnerPrefix + newID() + ".service"
	res, ends, err := sup.StartTransient(ctx, control.TransientParams{Unit: &spec.Unit{
		Name: name, Description: c.Name, Service: &spec.Service{
			Type: spec.TypeExec, Restart: spec.RestartNo, KillMode: spec.KillControlGroup, TimeoutStopSec: killDelay,
			ExecStart:        []spec.Command{{Path: c.Argv[0], Args: c.Argv, NoExpand: true}},
			WorkingDirectory: c.Dir, Environment: c.Env, ExactEnvironment: true,
			StandardInput: spec.StdioNull, StandardOutput: spec.StdioPipe, StandardError: spec.StdioPipe,
		},
	}})
	p := &process{s: s, unit: name, invocation: res.Unit.InvocationID}
	if err == nil && startFailed(&res) {
		closeFiles(ends)
		p.release()
		return nil, rpc.Errorf(CodeStart, "%s", res.Unit.Error)
	}
	if err != nil {
		// It may have begun all the same: whoever asked does not want it any more.
		s.goIfOpen(func() { p.kill(); p.release() })
		return nil, err
	}
	for name, f := range ends {
		f, err := own(f, name)
		if err != nil {
			continue
		}
		switch name {
		case stdout:
			p.stdout = f
		case stderr:
			p.stderr = f
		default:
			f.Close()
		}
	}
	if p.stdout == nil || p.stderr == nil {
		p.Kill()
		_, _ = p.Wait()
		return nil, rpc.Errorf(rpc.CodeInternal, "the supervisor gave no pipes for %s", c.Name)
	}
	return p, nil
}

func (p *process) Stdout() *os.File { return p.stdout }
func (p *process) Stderr() *os.File { return p.stderr }

// Kill implements job.Process.
func (p *process) Kill() { p.wg.Go(p.kill) }

func (p *process) kill() {
	_ = p.s.supervisor(p.s.ctx, func(sup Supervisor) error { // a unit that is not there needs no killing
		return sup.Kill(p.s.ctx, control.KillParams{Name: p.unit, Signal: int(unix.SIGKILL), Who: "all"})
	})
}

// Wait implements job.Process.
func (p *process) Wait() (program.Exit, error) {
	var u control.UnitStatus
	err := p.s.supervisor(p.s.ctx, func(sup Supervisor) (err error) {
		u, err = sup.Wait(p.s.ctx, control.WaitParams{Name: p.unit, InvocationID: p.invocation})
		return err
	})
	p.wg.Wait()
	for _, f := range []*os.File{p.stdout, p.stderr} {
		if f != nil {
			f.Close()
		}
	}
	p.release()
	switch {
	case err != nil:
		return program.Exit{}, err
	case !u.ExitKnown:
		return program.Exit{}, rpc.Errorf(rpc.CodeUnavailable, "how it ended is not known: the supervisor was replaced meanwhile")
	case u.ExitSignal != 0:
		return program.Exit{Code: -1, Signal: syscall.Signal(u.ExitSignal)}, nil
	}
	return program.Exit{Code: u.ExitCode}, nil
}

func (p *process) release() {
	_ = p.s.supervisor(p.s.ctx, func(sup Supervisor) error { return sup.Release(p.s.ctx, p.unit) }) // else the next Resume does
}

// startFailed tells a command that could not be started from one that ran and failed.
func startFailed(r *control.TransientResult) bool {
	return r.Result != "done" && !r.Unit.ExitKnown && (r.Unit.ActiveState == control.Failed || r.Unit.ActiveState == control.Inactive)
}
