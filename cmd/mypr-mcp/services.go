package main

import (
	"context"
	"log/slog"
	"maps"
	"os"
	"sync"

	"mypr/internal/job"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/units/files"
	"mypr/units/manager"
	"mypr/units/search"
)

// services makes what answers ws.fs and its like, given the runner of programs that
// only the manager has.
func services(w *workspace.Workspace, log *slog.Logger) (func(job.Runner) func(context.Context, manager.Call) (any, error), error) {
	fs, err := files.New(w.Dir)
	if err != nil {
		return nil, err
	}
	return func(run job.Runner) func(context.Context, manager.Call) (any, error) {
		methods := fs.Methods()
		find, err := search.New(search.Options{Root: w.Dir, Runner: run, Env: os.Environ()})
		if err != nil { // the directory is gone since files.New looked at it
			log.Error("no search", "error", err)
		} else {
			maps.Copy(methods, find.Methods())
		}
		// At the first call, not at the start: it may take a while, and by then the
		// manager's lock says that nobody else writes here.
		recover := sync.OnceFunc(func() {
			reports, err := fs.Recover(context.Background())
			for _, r := range reports {
				log.Warn("a change of files that was cut off was ended", "report", r)
			}
			if err == nil && find != nil {
				err = find.Sweep()
			}
			if err != nil {
				log.Error("cannot tidy up after an earlier manager", "error", err)
			}
		})
		return func(ctx context.Context, call manager.Call) (any, error) {
			method := methods[call.Method]
			if method == nil {
				return nil, rpc.Errorf(rpc.CodeInvalidRequest, "this version knows no call %q", call.Method)
			}
			recover()
			return method(ctx, call.Params)
		}
	}, nil
}
