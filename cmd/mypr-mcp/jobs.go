package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"mypr/internal/config"
	"mypr/internal/workspace"
	"mypr/kernel"
	"mypr/supervisor/spec"
	"mypr/units"
	"mypr/units/jobs"
	"mypr/units/manager"
)

// background is units/jobs as the manager sees it.
type background struct {
	*jobs.Service
	methods map[string]jobs.Method
}

func (b background) Handles(method string) bool { return b.methods[method] != nil }

func (b background) Call(ctx context.Context, c manager.Call, generation string) (any, error) {
	return b.methods[c.Method](ctx, jobs.Caller{ClientID: c.ClientID, ConnectionID: c.ConnectionID, ExecID: c.ExecID, Generation: generation, Again: c.Again}, json.RawMessage(c.Params))
}

var _ manager.Jobs = background{}

// backgroundJobs makes what answers ws.shell and ws.packages. base is the environment
// before config.toml, run starts the programs that fetch uv.
func backgroundJobs(w *workspace.Workspace, loader *units.Loader, cfg *config.Config, base []string, ignored *warnings, log *slog.Logger) func(manager.JobsHost) manager.Jobs {
	return func(host manager.JobsHost) manager.Jobs {
		s := jobs.New(jobs.Options{
			Dir: filepath.Join(w.Root, "jobs"),
			Supervisor: func(ctx context.Context) (jobs.Supervisor, error) {
				sup, err := host.Supervisor(ctx)
				if err != nil {
					return nil, err
				}
				full, ok := sup.(jobs.Supervisor)
				if !ok {
					return nil, fmt.Errorf("%T runs no jobs", sup)
				}
				return full, nil
			},
			History: host, Admit: host.Admit,
			Unit: jobDefaults(loader, ignored),
			Packages: func(ctx context.Context) (jobs.Packages, error) {
				cfg, _, err := config.Load(w.Root)
				if err != nil {
					return jobs.Packages{}, err
				}
				env, _ := cfg.Environ(base)
				in := kernel.Installer(ctx, kernel.Options{Root: w.Root, Workspace: w.Dir, Env: withoutService(env), Run: host.Runner()})
				return jobs.Packages{UV: in.UV, Problem: in.Problem, Python: in.Python, Requirements: filepath.Join(w.Root, "requirements.txt"),
					Dir: w.Dir, Env: in.Env}, ctx.Err()
			},
			OutputBytes: cfg.Limits.OutputBytes, Completed: cfg.Limits.CompletedRecords, Logger: log,
		})
		return background{s, s.Methods()}
	}
}

// jobDefaults reads job.service for each job: what is on disk then counts. Where neither
// the user nor the workspace has a directory of units, there is nothing to read again.
func jobDefaults(loader *units.Loader, ignored *warnings) func() (*spec.Unit, error) {
	var builtin atomic.Pointer[spec.Unit]
	overridden := func() bool {
		return slices.ContainsFunc(loader.Dirs, func(dir string) bool {
			return !errors.Is(unix.Access(dir, unix.F_OK), unix.ENOENT)
		})
	}
	return func() (*spec.Unit, error) {
		over := overridden()
		if u := builtin.Load(); u != nil && !over {
			return u, nil
		}
		u, list, err := loader.Load(units.JobDefaults)
		ignored.in(units.JobDefaults, list)
		if err == nil && !over && !overridden() { // not while it was read either
			builtin.Store(u)
		}
		return u, err
	}
}

var _ jobs.History = manager.JobsHost{}
