package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"mypr/internal/job"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/units/files"
	"mypr/units/git"
	"mypr/units/manager"
	"mypr/units/search"
	"mypr/units/skills"
)

// services makes what answers ws.fs and ws.git, given the runner of programs that only
// the manager has.
func services(w *workspace.Workspace, log *slog.Logger) func(job.Runner) func(context.Context, manager.Call) (any, error) {
	return func(run job.Runner) func(context.Context, manager.Call) (any, error) {
		fs, err := files.New(files.Options{Root: w.Dir, Umask: parentUmask()})
		find, ferr := search.New(search.Options{Root: w.Dir, Runner: run, Env: os.Environ()})
		repo, gerr := git.New(git.Options{Root: w.Dir, Runner: run, Env: os.Environ()})
		if err := errors.Join(err, ferr, gerr); err != nil { // the directory is gone
			log.Error("no services for the Python API", "error", err)
			return func(context.Context, manager.Call) (any, error) { return nil, err }
		}
		methods := fs.Methods()
		maps.Copy(methods, skills.New(filepath.Join(w.Root, "skills")).Methods())
		maps.Copy(methods, find.Methods())
		maps.Copy(methods, repo.Methods())
		// The manager has its lock by now, so nobody else writes here.
		reports, err := fs.Recover(context.Background())
		for _, r := range reports {
			log.Warn("a change of files that was cut off was ended", "report", r)
		}
		if err := errors.Join(err, find.Sweep(), repo.Sweep()); err != nil {
			log.Error("cannot tidy up after an earlier manager", "error", err)
		}
		return func(ctx context.Context, call manager.Call) (any, error) {
			method := methods[call.Method]
			if method == nil {
				return nil, rpc.Errorf(rpc.CodeInvalidRequest, "this version knows no call %q", call.Method)
			}
			return method(ctx, call.Params)
		}
	}
}

// parentUmask is the umask of the supervisor, which is that of the user who started it:
// the manager's own keeps its records private. It is -1 when it cannot be told.
func parentUmask() int {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", os.Getppid()))
	if err != nil {
		return -1
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "Umask:"); ok { // since Linux 4.7
			if n, err := strconv.ParseUint(strings.TrimSpace(v), 8, 12); err == nil {
				return int(n)
			}
		}
	}
	return -1
}
