package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/client"
	"mypr/internal/config"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/supervisor"
	"mypr/supervisor/control"
	"mypr/supervisor/process"
	"mypr/units/manager"
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
			var r *api.ResetResult
			err = c.patiently(cmd.Context(), w, "the reset", func(ctx context.Context) (err error) {
				r, err = cl.Reset(ctx, api.LifecycleParams{Force: force, Reason: "reset requested from the command line"})
				return err
			})
			if err != nil {
				return orForce(err, "reset")
			}
			if c.json {
				return printJSON(c.stdout, r)
			}
			_, err = fmt.Fprintf(c.stdout, "reset: Python memory is new, generation %s\n", r.Generation)
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
	return rpc.AsError(err).WithHint("wait, end it (a cell: mypr-mcp interrupt; a job: mypr-mcp units stop job-ID), or mypr-mcp %s --force to cancel it", verb)
}

// stopReport is what stop prints.
type stopReport struct {
	Stopped bool `json:"stopped"`
	// Cancelled executions, with --force.
	Cancelled int    `json:"cancelled,omitempty"`
	Note      string `json:"note,omitempty"`
	idle      bool   // there was nothing to stop, as the note says
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
			var r *stopReport
			err = c.patiently(ctx, w, "the session to end", func(ctx context.Context) (err error) {
				r, err = c.stop(ctx, w, force)
				if err != nil && endedMeanwhile(ctx, w) {
					r, err = &stopReport{Stopped: true, Note: "somebody else stopped it meanwhile"}, nil
				}
				return err
			})
			if err != nil {
				return err
			}
			if c.json {
				return printJSON(c.stdout, r)
			}
			if r.Note != "" {
				fmt.Fprintln(c.stdout, r.Note)
			}
			if r.idle {
				return nil
			}
			if r.Cancelled > 0 {
				fmt.Fprintf(c.stdout, "cells cancelled: %d\n", r.Cancelled)
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

var errStopUnanswered = rpc.Errorf(rpc.CodeUnavailable, "the manager did not answer within %v", stopTimeout/3).
	WithHint("mypr-mcp status says why, if it can; mypr-mcp stop --force ends the session without it")

// stop ends the runtime and returns when the supervisor's process is gone.
func (c *cli) stop(ctx context.Context, w *workspace.Workspace, force bool) (*stopReport, error) {
	r := &stopReport{}
	l, err := w.Discover(ctx)
	if silent := silentSupervisor(l, err); silent != nil && force {
		if err := killSilent(ctx, silent); err != nil {
			return nil, err
		}
		r.Note = "the supervisor did not answer and was killed"
		l, err = w.Discover(ctx)
	}
	if left := orphans(w, err); left != "" {
		// Nobody is there who could end them. A supervisor that is started takes them over.
		if l, err = w.Start(ctx, startedBy("cli")); err == nil {
			r.Note = strings.TrimPrefix(r.Note+"; ", "; ") + "the supervisor had died: " + left + " ran on and was taken over"
		}
	}
	if notRunning(err) && r.Note != "" { // nobody started it again: it was a container's first process
		return &stopReport{Stopped: true, Note: r.Note}, nil
	}
	if notRunning(err) {
		note := "no runtime was running"
		owner, err := w.GiveUp(ctx)
		if owner != "" {
			note += "; the session of " + owner + " is given up, and the next one is started where it is needed"
		}
		return &stopReport{Stopped: true, Note: note, idle: true}, err
	}
	if err != nil {
		return nil, err
	}
	if err := supervised(l); err != nil {
		return nil, err
	}
	// The connection that asked stays open until the end: a caller who is gone has
	// called the stop off.
	cl := asker(l)
	defer cl.Close()
	ask, cancel := context.WithTimeoutCause(ctx, stopTimeout/3, errStopUnanswered) // a manager that hangs must leave time for the shutdown
	s, err := cl.Stop(ask, api.LifecycleParams{Force: force, Reason: "stop requested from the command line"})
	if err != nil && context.Cause(ask) == errStopUnanswered {
		err = errStopUnanswered
	}
	cancel()
	var none givenUp
	switch {
	case err == nil:
		r.Cancelled = s.Cancelled
	case errors.As(err, &none): // nothing of the session runs
		r.Note = none.wire.Message
	case !force:
		return nil, orForce(err, "stop")
	default:
		// Forced: neither a manager that does not answer nor one that is in the middle
		// of something may keep the rest alive.
		r.Note = strings.TrimPrefix(r.Note+"; the manager did not agree: "+rpc.AsError(err).Message, "; ")
	}
	next, err := shutdown(ctx, l)
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, err
	}
	if next != nil {
		r.Note = strings.TrimPrefix(fmt.Sprintf("%s; the next session has begun meanwhile (supervisor: process %d)", r.Note, next.PID), "; ")
	}
	r.Stopped = true
	return r, nil
}

// endGrace is how long a session may be on its way out.
const endGrace = 5 * time.Second

// endedMeanwhile reports whether a session that could not be stopped has ended all the
// same, as when somebody else stopped it: its sockets go before it does.
func endedMeanwhile(ctx context.Context, w *workspace.Workspace) bool {
	ctx, cancel := context.WithTimeout(ctx, endGrace)
	defer cancel()
	l, err := w.Discover(ctx)
	if silentSupervisor(l, err) != nil || err == nil && (l.Supervisor == nil || !l.Supervisor.ShuttingDown) {
		return false
	}
	lock, err := w.SupervisorLock(ctx)
	if err != nil {
		return false
	}
	defer lock.Close()
	return supervisor.Orphans(stateFile(w)) == nil
}

// silentSupervisor is the supervisor that Discover found to hang, or nil.
func silentSupervisor(l *workspace.Location, err error) *workspace.Silent {
	var mute *workspace.Unreachable
	switch {
	case err == nil && l.Supervisor == nil:
		return l.Silent
	case errors.As(err, &mute):
		return mute.Silent
	}
	return nil
}

// reviveTimeout is how long a supervisor that was killed may take to be there again.
const reviveTimeout = 10 * time.Second

// killSilent kills a supervisor that hangs and waits until the next one answers, which
// its anchor, the manager or a service manager starts: that one takes over what runs and
// can end it in order. Where nobody does, what ran has ended with it or is of no use.
func killSilent(ctx context.Context, silent *workspace.Silent) error {
	sv, err := control.Dial(ctx, silent.Control)
	if err != nil {
		return err
	}
	defer sv.Close()
	hung, err := watchPeer(sv)
	if err != nil {
		return err
	}
	defer hung.Close()
	anchor, anchorFD := process.AnchorOfSocket(silent.Control)
	defer anchorFD.Close()  // nil is valid
	if sv.Peer().PID == 1 { // of this pid namespace: the kernel does not deliver the signal
		err = errors.New("it is the first process of this container")
	} else {
		err = hung.kill()
	}
	if err != nil {
		return rpc.AsError(silent).WithHint("kill it from where it runs; it cannot be killed from here: %v", err)
	}
	if err := hung.wait(ctx); err != nil {
		return err
	}
	if anchorFD != nil { // whoever stopped the one has often stopped the other
		_ = unix.PidfdSendSignal(int(anchorFD.Fd()), unix.SIGCONT, nil, 0)
	}
	rctx, cancel := context.WithTimeout(ctx, reviveTimeout)
	defer cancel()
	next, err := control.Dial(rctx, silent.Control)
	if err != nil {
		return nil
	}
	defer next.Close()
	_, err = next.Info(rctx)
	switch {
	case err == nil, errors.Is(err, rpc.ErrClosed):
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case rctx.Err() == nil:
		return err
	}
	done := rpc.Errorf(rpc.CodeUnavailable, "the supervisor (process %d), which did not answer, has been killed, and none has taken its place within %v: everything else of the session runs on", silent.PID, reviveTimeout)
	if anchor == 0 {
		return done.WithHint("mypr-mcp status shows what is left; mypr-mcp stop --force again")
	}
	done.Message += fmt.Sprintf("; its anchor (process %d), which should start it again, does not run: a debugger or a freezer may hold it", anchor)
	return done.WithHint("kill -9 %d, then mypr-mcp stop --force again", anchor)
}

// asker is a connection to the manager of a runtime, which it never starts.
func asker(l *workspace.Location) *client.Client {
	return client.New(client.Options{
		Ensure: func(context.Context) (string, error) { return l.Socket, nil },
		Kind:   "cli", Name: "mypr-mcp", Version: version(), Passive: true, Trouble: trouble,
	})
}

// shutdown ends the supervisor and everything below it. Its end is read from its
// pidfd, which works across pid namespaces; where the kernel has none (before Linux
// 6.5), from the supervisor's lock, which its last descriptor lets go. next is the
// supervisor of another session that waited for that and has begun.
func shutdown(ctx context.Context, l *workspace.Location) (next *control.Info, err error) {
	sv, err := control.Dial(ctx, l.Control)
	if err != nil {
		return nil, err
	}
	defer sv.Close()
	asked, err := sv.Info(ctx) // l may be of a moment when there was none
	if err != nil {
		return nil, err
	}
	gone, err := watchPeer(sv)
	if err != nil {
		return nil, err
	}
	defer gone.Close()
	err = sv.Shutdown(ctx, control.ShutdownParams{Reason: "stop requested from the command line"})
	if err != nil && !errors.Is(err, rpc.ErrClosed) {
		return nil, err
	}
	if err := gone.wait(ctx); err != nil {
		return nil, err
	}
	if _, err := os.Stat(l.Workspace.Root); err == nil { // else it was deleted, the lock with it
		lock, next, err := released(ctx, l.Workspace, asked.Instance)
		if err != nil || next != nil {
			return next, err
		}
		defer lock.Close() // before that nobody makes new sockets
	}
	made := []string{l.Socket, l.Control}
	if asked.Mode == "systemd" || asked.Mode == workspace.SourceContainer {
		made = made[1:] // the other may be of a socket unit, and stay for the next session
	}
	for _, path := range made {
		if _, err := os.Lstat(path); err == nil {
			return nil, rpc.Errorf(rpc.CodeInternal, "the supervisor ended but left %s", path).WithHint("mypr-mcp status")
		}
	}
	return nil, nil
}

// released takes the lock of the supervisor of that instance, which ends: it is free when
// nothing of it is left. Whoever wants a session meanwhile waits for the same, and may be
// quicker: then that supervisor is next. Those who only look let go at once.
func released(ctx context.Context, w *workspace.Workspace, instance string) (lock *workspace.Lock, next *control.Info, err error) {
	for {
		patience, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		lock, err := w.SupervisorLock(patience)
		cancel()
		if err == nil || !errors.As(err, new(*workspace.Held)) || ctx.Err() != nil {
			return lock, nil, err
		}
		if now, err := w.Discover(ctx); err == nil && now.Supervisor != nil && now.Supervisor.Instance != instance {
			return nil, now.Supervisor, nil
		}
	}
}

func (c *cli) restartCommand() *cobra.Command {
	var p api.LifecycleParams
	cmd := &cobra.Command{
		Use: "restart", Short: "Replace the running programs with this one", Args: cobra.NoArgs,
		Long: `Replace the supervisor's program in place, then the manager and the kernel, with the
program that runs this command; of a runtime in another container, with the one that is
installed there. Files, history, messages and MCP connections stay; Python memory is
lost unless --keep-kernel keeps the kernel as it is.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w, err := c.workspace()
			if err != nil {
				return err
			}
			var r *api.RestartResult
			var now generation
			err = c.patiently(cmd.Context(), w, "the restart", func(ctx context.Context) (err error) {
				r, now, err = c.restart(ctx, w, p)
				return err
			})
			if r != nil && c.json {
				err = errors.Join(err, printJSON(c.stdout, r))
			}
			if err != nil || c.json {
				return err
			}
			_, err = fmt.Fprintf(c.stdout, "restarted: version %s, %s\n", r.NewVersion, memoryAfter(r, now))
			return err
		},
	}
	cmd.Flags().BoolVar(&p.Force, "force", false, "cancel running cells and jobs first")
	cmd.Flags().BoolVar(&p.KeepKernel, "keep-kernel", false, "keep the Python kernel with its memory and running cells")
	return cmd
}

// generation is that of the kernel that runs, as the supervisor says.
type generation struct {
	id    string // "": none runs
	known bool
}

// kernelNow asks the supervisor, which knows before a new manager does.
func kernelNow(ctx context.Context, l *workspace.Location) (g generation) {
	err := withControl(ctx, l, func(ctx context.Context, sv *control.Client) error {
		u, err := sv.Show(ctx, manager.KernelUnit)
		if err == nil && u.MainPID != 0 {
			g.id = u.InvocationID
		}
		return err
	})
	g.known = err == nil || rpc.CodeOf(err) == rpc.CodeNotFound
	return g
}

// memoryAfter says what became of Python memory in a restart.
func memoryAfter(r *api.RestartResult, now generation) string {
	switch {
	case r.OldGeneration == "" && r.KeepKernel:
		return "there was no Python kernel to keep"
	case r.OldGeneration == "":
		return "there was no Python kernel before"
	case !r.KeepKernel && now.id == "": // unknown, or there is none yet
		return "the Python memory of before is gone"
	case !r.KeepKernel:
		return "Python memory is new"
	case !now.known:
		return "whether Python memory was kept is not known (mypr-mcp status)"
	case now.id != r.OldGeneration:
		return "Python memory is gone all the same: the kernel ended meanwhile (mypr-mcp logs)"
	}
	return "Python memory is kept"
}

// replacement is the program that a restart puts in place, by its path where the runtime
// runs.
type replacement struct {
	path    string
	version string // "": not known before it runs
}

// replacementFor is this program, or, where the runtime runs among other files, the one
// that is installed there: what this path leads to there is another program, or none.
func replacementFor(l *workspace.Location) (replacement, error) {
	exe, err := os.Executable()
	if err != nil {
		return replacement{}, err
	}
	there, ours := l.Place(), replacement{exe, version()}
	if there.SameFiles() {
		return ours, nil
	}
	if there.SamePIDs() {
		at, err := os.Stat(fmt.Sprintf("/proc/%d/root%s", l.Supervisor.PID, exe))
		self, serr := os.Stat("/proc/self/exe")
		if err == nil && serr == nil && os.SameFile(at, self) {
			return ours, nil
		}
	}
	return replacement{path: l.Supervisor.Executable}, nil
}

// restartTimeout bounds a restart: the new kernel may need a new environment.
const restartTimeout = 240 * time.Second

// restart replaces the supervisor's program and the manager. The record that it
// returns says how far it came.
func (c *cli) restart(ctx context.Context, w *workspace.Workspace, p api.LifecycleParams) (r *api.RestartResult, now generation, err error) {
	ctx, cancel := context.WithTimeout(ctx, restartTimeout)
	defer cancel()
	l, err := runtimeOf(ctx, w)
	if err != nil {
		return nil, now, err
	}
	to, err := replacementFor(l)
	if err != nil {
		return nil, now, err
	}
	if to.version != "" { // else another place's files count, too
		if _, _, err := config.Load(w.Root); err != nil { // what runs is worth more than what could not
			return nil, now, err
		}
	}
	if to.version == "" && !c.json {
		fmt.Fprintf(c.stdout, "the runtime runs elsewhere (%v): it becomes the program installed there, %s\n", l.Place(), to.path)
	}
	p.Target, p.Version, p.Reason = to.path, cmp.Or(to.version, l.Supervisor.Version), "restart requested from the command line"
	cl := asker(l)
	defer cl.Close() // not before the old manager has ended: that would call the restart off
	r, err = cl.Restart(ctx, p)
	if err != nil {
		return nil, now, orForce(err, "restart")
	}
	st, err := c.swap(ctx, l, to)
	if err != nil {
		r.State, r.Error = "failed", err.Error()
		return r, now, rpc.Errorf(rpc.CodeInternal, "restart failed: %v", err).WithHint("mypr-mcp status; then mypr-mcp restart again, or mypr-mcp stop --force")
	}
	r.State, r.NewVersion = "succeeded", st.ManagerVersion
	if !p.KeepKernel && to.version != "" { // else it may be a version that does not know the question
		err = newKernel(ctx, l)
	}
	now = kernelNow(ctx, l)
	r.NewGeneration = now.id
	if err != nil {
		r.State, r.Error = "failed", err.Error()
		e := *rpc.AsError(err)
		e.Message = fmt.Sprintf("version %s runs, and %s, but %s", r.NewVersion, memoryAfter(r, now), e.Message)
		err = &e
	}
	return r, now, err
}

// newKernel waits until there is a Python kernel and says why there is none.
func newKernel(ctx context.Context, l *workspace.Location) error {
	cl := asker(l)
	defer cl.Close()
	s, err := cl.Status(ctx, api.StatusParams{AwaitKernel: true})
	switch {
	case err != nil:
		return rpc.Errorf(rpc.CodeUnavailable, "whether there is a new Python kernel is not known: %v", err).WithHint("mypr-mcp status")
	case s.Kernel.State == "down":
		return rpc.Errorf(api.CodeKernel, "there is no Python kernel: %s", s.Kernel.Detail).WithHint("mend that, then mypr-mcp reset")
	case s.Generation == "":
		return rpc.Errorf(api.CodeKernel, "there is no Python kernel: %s", cmp.Or(s.LastError, "it ended at once")).WithHint("look at .mypr/kernel.log, then mypr-mcp reset")
	}
	return nil
}

// replaceCommand is the rest of a restart that a cell asked for: the manager starts it.
func (c *cli) replaceCommand() *cobra.Command {
	return &cobra.Command{
		Use: "replace", Args: cobra.NoArgs, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w, err := c.workspace()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), restartTimeout)
			defer cancel()
			l, err := runtimeOf(ctx, w)
			if err != nil {
				return err
			}
			exe, err := os.Executable()
			if err != nil {
				return err
			}
			if err := recordVersion(w.Root, version()); err != nil {
				return err
			}
			_, err = c.swap(ctx, l, replacement{exe, version()})
			return err
		},
	}
}

// recordVersion adds to the record of the restart under way what version it is for, so
// that the manager which ends it can tell whether it came to that.
func recordVersion(root, version string) error {
	path := filepath.Join(root, "restart.json")
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	r := map[string]any{}
	if err := json.Unmarshal(raw, &r); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	r["new_version"] = version
	if raw, err = json.MarshalIndent(r, "", "  "); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", append(raw, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// swap puts a program in the place of the one that runs, and that one back when it does
// not do.
func (c *cli) swap(ctx context.Context, l *workspace.Location, to replacement) (*api.Status, error) {
	if l.Supervisor == nil {
		return nil, rpc.Errorf(rpc.CodeUnavailable, "the supervisor does not answer").WithHint("mypr-mcp status")
	}
	// Its file may have been overwritten by this very program. As long as it runs it can
	// be opened all the same, and while it is open it can be executed again.
	old := replacement{l.Supervisor.Executable, l.Supervisor.Version}
	if l.Place().SamePIDs() && l.Place().SameFiles() {
		if f, err := os.Open(fmt.Sprintf("/proc/%d/exe", l.Supervisor.PID)); err == nil {
			defer f.Close()
			old.path = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd())
		}
	}
	st, err := c.become(ctx, l, to)
	if err == nil {
		return st, nil
	}
	if info, ierr := supervisorInfo(ctx, l); ierr == nil && info.Version == old.version && info.PID == l.Supervisor.PID && info.Version != to.version {
		return nil, err // nothing was replaced
	}
	if _, berr := c.become(ctx, l, old); berr != nil {
		return nil, fmt.Errorf("%w; going back to version %s failed too: %w", err, old.version, berr)
	}
	return nil, fmt.Errorf("%w; version %s was put back and runs again", err, old.version)
}

// healthTimeout is how long a new manager has to answer that it is well.
const healthTimeout = 20 * time.Second

// become makes the supervisor run a program, restarts the manager with it, and asks that
// manager how it is.
func (c *cli) become(ctx context.Context, l *workspace.Location, to replacement) (*api.Status, error) {
	version, err := c.reexec(ctx, l, to)
	if err == nil && to.version == "" {
		err = recordVersion(l.Workspace.Root, version)
	}
	if err != nil {
		return nil, fmt.Errorf("replacing the supervisor's program: %w", err)
	}
	sv, err := control.Dial(ctx, l.Control)
	if err != nil {
		return nil, err
	}
	defer sv.Close()
	job, err := sv.Restart(ctx, control.JobParams{Name: managerUnit})
	if err == nil && job.Result != "done" {
		err = fmt.Errorf("%s: %s", job.Result, job.Unit.Error)
	}
	if err != nil {
		return nil, fmt.Errorf("restarting the manager: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	again := asker(l)
	defer again.Close()
	s, err := again.Status(ctx, api.StatusParams{})
	switch {
	case err != nil:
		return nil, fmt.Errorf("asking the new manager: %w", err)
	case s.ManagerVersion != version:
		return nil, fmt.Errorf("the manager has version %s, not %s", s.ManagerVersion, version)
	case s.HealthError != "" && s.Kernel.State != "down": // which is Python's trouble, with any version
		return nil, fmt.Errorf("the new manager is not well: %s", s.HealthError)
	}
	return s, nil
}

func supervisorInfo(ctx context.Context, l *workspace.Location) (control.Info, error) {
	sv, err := control.Dial(ctx, l.Control)
	if err != nil {
		return control.Info{}, err
	}
	defer sv.Close()
	return sv.Info(ctx)
}

// reexec makes the supervisor run a program: same process, same units. The connection
// ends when the old program does; the new one answers on the same socket, where a
// connect waits in the backlog until it does.
func (c *cli) reexec(ctx context.Context, l *workspace.Location, to replacement) (version string, err error) {
	sv, err := control.Dial(ctx, l.Control)
	if err != nil {
		return "", err
	}
	defer sv.Close()
	if err := sv.Reexec(ctx, control.ReexecParams{Executable: to.path}); err != nil && !errors.Is(err, rpc.ErrClosed) {
		return "", err
	}
	select {
	case <-sv.Done():
	case <-ctx.Done():
		return "", ctx.Err()
	}
	info, err := supervisorInfo(ctx, l)
	if err != nil {
		return "", err
	}
	if to.version != "" && info.Version != to.version {
		return "", fmt.Errorf("the supervisor runs version %s", info.Version)
	}
	return info.Version, nil
}
