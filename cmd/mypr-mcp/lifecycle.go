package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"mypr/internal/api"
	"mypr/internal/client"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/supervisor/control"
)

// stopTimeout bounds stop: the supervisor must be gone by then.
const stopTimeout = 30 * time.Second

func (c *cli) resetCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "reset", Short: "Replace the Python kernel: memory is lost, files and history stay", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w, err := c.workspace()
			if err != nil {
				return err
			}
			cl := c.client(w, true, true)
			defer cl.Close()
			r, err := cl.Reset(cmd.Context(), api.LifecycleParams{Force: force, Reason: "reset requested from the command line"})
			if err != nil {
				return orForce(err, "reset")
			}
			if c.json {
				return printJSON(c.stdout, r)
			}
			_, err = fmt.Fprintf(c.stdout, "new session, generation %s\n", r.Generation)
			return err
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "cancel running cells and jobs first")
	return cmd
}

// orForce says in the words of the command line how work that is active is ended.
func orForce(err error, verb string) error {
	if rpc.CodeOf(err) != api.CodeActiveWork {
		return err
	}
	return rpc.AsError(err).WithHint("wait, mypr-mcp interrupt, or mypr-mcp %s --force to cancel it", verb)
}

// stopReport is what stop prints.
type stopReport struct {
	Stopped bool `json:"stopped"`
	// Cancelled executions, with --force.
	Cancelled int    `json:"cancelled,omitempty"`
	Note      string `json:"note,omitempty"`
}

func (c *cli) stopCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "stop", Short: "End the session and every process of it", Args: cobra.NoArgs,
		Long: `End the session: the kernel, all jobs, the manager and the supervisor. Refused while
cells or jobs run, unless --force cancels them. Returns when everything is gone.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w, err := c.workspace()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), stopTimeout, errStopTimeout)
			defer cancel()
			r, err := c.stop(ctx, w, force)
			if err != nil {
				return err
			}
			if c.json {
				return printJSON(c.stdout, r)
			}
			if r.Note != "" {
				fmt.Fprintln(c.stdout, r.Note)
			}
			if r.Cancelled > 0 {
				fmt.Fprintf(c.stdout, "cancelled %d executions\n", r.Cancelled)
			}
			_, err = fmt.Fprintln(c.stdout, "stopped")
			return err
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "cancel running cells and jobs first")
	return cmd
}

var errStopTimeout = rpc.Errorf(rpc.CodeUnavailable, "the runtime did not end within %v", stopTimeout).
	WithHint("mypr-mcp status shows what is left; mypr-mcp stop --force again")

// stop ends the runtime and returns when the supervisor's process is gone.
func (c *cli) stop(ctx context.Context, w *workspace.Workspace, force bool) (*stopReport, error) {
	l, err := w.Discover(ctx)
	if notRunning(err) {
		return &stopReport{Stopped: true, Note: "no runtime was running"}, nil
	}
	if err != nil {
		return nil, err
	}
	r := &stopReport{}
	// The connection that asked stays open until the end: a caller who is gone has
	// called the stop off.
	cl := asker(l)
	defer cl.Close()
	ask, cancel := context.WithTimeout(ctx, stopTimeout/3) // a manager that hangs must leave time for the shutdown
	s, err := cl.Stop(ask, api.LifecycleParams{Force: force, Reason: "stop requested from the command line"})
	cancel()
	switch {
	case err == nil:
		r.Cancelled = s.Cancelled
	case !force:
		return nil, orForce(err, "stop")
	default:
		// Forced: neither a manager that does not answer nor one that is in the middle
		// of something may keep the rest alive.
		r.Note = "the manager did not agree: " + rpc.AsError(err).Message
	}
	if err := shutdown(ctx, l); err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, err
	}
	r.Stopped = true
	return r, nil
}

// asker is a connection to the manager of a runtime, which it never starts.
func asker(l *workspace.Location) *client.Client {
	return client.New(client.Options{
		Ensure: func(context.Context) (string, error) { return l.Socket, nil },
		Kind:   "cli", Name: "mypr-mcp", Version: version(), Passive: true,
	})
}

// shutdown ends the supervisor and everything below it. Its end is read from its
// pidfd, which works across pid namespaces; where the kernel has none (before Linux
// 6.5), from the supervisor's lock, which its last descriptor lets go.
func shutdown(ctx context.Context, l *workspace.Location) error {
	sv, err := control.Dial(ctx, l.Control)
	if err != nil {
		return err
	}
	defer sv.Close()
	gone, err := watchPeer(sv)
	if err != nil {
		return err
	}
	defer gone.Close()
	err = sv.Shutdown(ctx, control.ShutdownParams{Reason: "stop requested from the command line"})
	if err != nil && !errors.Is(err, rpc.ErrClosed) {
		return err
	}
	if err := gone.wait(ctx); err != nil {
		return err
	}
	lock, err := l.Workspace.SupervisorLock(ctx)
	if err != nil {
		return err
	}
	lock.Close()
	for _, path := range []string{l.Socket, l.Control} {
		if _, err := os.Lstat(path); err == nil {
			return rpc.Errorf(rpc.CodeInternal, "the supervisor ended but left %s", path).WithHint("mypr-mcp status")
		}
	}
	return nil
}

func (c *cli) restartCommand() *cobra.Command {
	var p api.LifecycleParams
	cmd := &cobra.Command{
		Use: "restart", Short: "Replace the running programs with this one", Args: cobra.NoArgs,
		Long: `Replace the supervisor's program in place, then the manager and the kernel, with the
program that runs this command. Files, history, messages and MCP connections stay;
Python memory is lost unless --keep-kernel keeps the kernel as it is.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w, err := c.workspace()
			if err != nil {
				return err
			}
			r, err := c.restart(cmd.Context(), w, p)
			if r != nil && c.json {
				err = errors.Join(err, printJSON(c.stdout, r))
			}
			if err != nil || c.json {
				return err
			}
			_, err = fmt.Fprintf(c.stdout, "restarted: version %s, generation %s\n", r.NewVersion, r.NewGeneration)
			return err
		},
	}
	cmd.Flags().BoolVar(&p.Force, "force", false, "cancel running cells and jobs first")
	cmd.Flags().BoolVar(&p.KeepKernel, "keep-kernel", false, "keep the Python kernel with its memory and running cells")
	return cmd
}

// restartTimeout bounds a restart: the new kernel may need a new environment.
const restartTimeout = 240 * time.Second

// restart replaces the supervisor's program and the manager. The record that it
// returns says how far it came.
func (c *cli) restart(ctx context.Context, w *workspace.Workspace, p api.LifecycleParams) (*api.RestartResult, error) {
	ctx, cancel := context.WithTimeout(ctx, restartTimeout)
	defer cancel()
	l, err := runtimeOf(ctx, w)
	if err != nil {
		return nil, err
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p.Target, p.Version, p.Reason = exe, version(), "restart requested from the command line"
	cl := asker(l)
	defer cl.Close() // not before the old manager has ended: that would call the restart off
	r, err := cl.Restart(ctx, p)
	if err != nil {
		return nil, orForce(err, "restart")
	}
	fail := func(step string, err error) (*api.RestartResult, error) {
		r.State, r.Error = "failed", fmt.Sprintf("%s: %v", step, err)
		return r, rpc.Errorf(rpc.CodeInternal, "restart failed: %s", r.Error).WithHint("mypr-mcp status; then mypr-mcp restart again, or mypr-mcp stop --force")
	}
	if err := c.reexec(ctx, l, exe); err != nil {
		return fail("replacing the supervisor's program", err)
	}
	err = c.supervisor(ctx, func(ctx context.Context, sv *control.Client) error {
		job, err := sv.Restart(ctx, control.JobParams{Name: "manager.service"})
		if err == nil && job.Result != "done" {
			err = fmt.Errorf("%s: %s", job.Result, job.Unit.Error)
		}
		return err
	})
	if err != nil {
		return fail("restarting the manager", err)
	}
	again := asker(l)
	defer again.Close()
	s, err := again.Status(ctx, api.StatusParams{})
	if err != nil {
		return fail("asking the new manager", err)
	}
	r.State, r.NewGeneration, r.NewVersion = "succeeded", s.Generation, s.ManagerVersion
	if s.HealthError != "" {
		return fail("the new manager's health", errors.New(s.HealthError))
	}
	return r, nil
}

// reexec makes the supervisor run this program: same process, same units. The
// connection ends when the old program does; the new one answers on the same socket,
// where a connect waits in the backlog until it does.
func (c *cli) reexec(ctx context.Context, l *workspace.Location, exe string) error {
	sv, err := control.Dial(ctx, l.Control)
	if err != nil {
		return err
	}
	defer sv.Close()
	if err := sv.Reexec(ctx, control.ReexecParams{Executable: exe}); err != nil && !errors.Is(err, rpc.ErrClosed) {
		return err
	}
	select {
	case <-sv.Done():
	case <-ctx.Done():
		return ctx.Err()
	}
	again, err := control.Dial(ctx, l.Control)
	if err != nil {
		return err
	}
	defer again.Close()
	info, err := again.Info(ctx)
	if err != nil {
		return err
	}
	if info.Version != version() {
		return fmt.Errorf("the supervisor still runs version %s", info.Version)
	}
	return nil
}
