package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/config"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/supervisor"
	"mypr/supervisor/control"
	"mypr/units"
)

// statusTimeout bounds each question of status: it must answer although something hangs.
const statusTimeout = 5 * time.Second

func (c *cli) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the session and every unit; starts nothing", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w, err := c.workspace()
			if err != nil {
				return err
			}
			r, err := report(cmd.Context(), w)
			if err != nil {
				return err
			}
			if c.json {
				return printJSON(c.stdout, r)
			}
			return statusText(c.stdout, r, c.colours(), time.Now())
		},
	}
}

// report gathers what can be known; what cannot is its Problem, not an error.
func report(ctx context.Context, w *workspace.Workspace) (*api.StatusReport, error) {
	r := &api.StatusReport{Workspace: w.Dir, WorkspaceID: w.ID, BridgeVersion: version()}
	problem := func(err error) {
		if r.Problem == "" {
			e := rpc.AsError(err)
			r.Problem, r.Hint = e.Message, e.Hint
		}
	}
	l, err := w.Discover(ctx)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		if left := orphans(w, err); left != "" {
			err = rpc.Errorf(rpc.CodeUnavailable, "%v, but %s of its last one runs on: supervisor and manager have died", err, left).
				WithHint("any cell takes it over, with its memory: mypr-mcp exec 1+1; mypr-mcp stop ends it")
		}
		if notRunning(err) {
			if why := obstacle(w); why != nil {
				e := rpc.AsError(why)
				err = rpc.Errorf(e.Code, "%v, and none can be started: %s", err, e.Message).WithHint("%s", e.Hint)
			}
		}
		problem(err)
		return r, nil
	}
	r.Socket, r.Supervisor = l.Socket, l.Supervisor
	switch {
	case l.Supervisor != nil:
		place := l.Place()
		r.RunsIn, r.PIDsForeign = place.String(), !place.SamePIDs()
		err := withControl(ctx, l, func(ctx context.Context, sv *control.Client) (err error) {
			r.Units, err = sv.List(ctx, true)
			return err
		})
		switch {
		case errors.Is(err, context.DeadlineExceeded): // it hangs since a moment ago
			silent := &workspace.Silent{Control: l.Control}
			if place.SamePIDs() {
				silent.PID = l.Supervisor.PID
			}
			problem(silent)
		case err != nil:
			problem(fmt.Errorf("the supervisor does not list its units: %w", err))
		}
	case l.Silent != nil:
		problem(l.Silent)
	}
	if !w.Locked() {
		problem(rpc.Errorf(rpc.CodeConflict, "%s was deleted while the session runs: what it records now is lost when it ends", w.Root).
			WithHint("save from Python what you need; then: mypr-mcp stop"))
	}
	for _, u := range r.Units {
		if err := hopeless(u); err != nil { // a connect would only wait
			problem(err)
			return r, nil
		}
	}
	ask, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	// Not through client.Client: a manager that is down or hangs is an answer here,
	// nothing to wait for.
	conn, err := rpc.Dial(ask, l.Socket, nil)
	if err == nil {
		defer conn.Close()
		var s api.Status
		if err = conn.Call(ask, api.MethodStatus, api.StatusParams{Detail: true}, &s); err == nil {
			r.Status = &s
		}
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("no answer within %v", statusTimeout)
		}
		problem(rpc.Errorf(rpc.CodeUnavailable, "the manager does not answer: %v", err).
			WithHint("read .mypr/manager.log; then, which keeps Python memory: mypr-mcp units restart manager"))
		return r, nil
	}
	r.ManagerAvailable = true
	r.Healthy = r.Status.Healthy && r.Problem == ""
	if !r.Status.WorkspaceAvailable {
		r.Healthy = false
		problem(rpc.Errorf(api.CodeWorkspaceMoved, "%s", r.Status.WorkspaceProblem).
			WithHint("stop it (mypr-mcp stop) and start one in the directory's new place"))
	}
	r.UpdatePending = api.UpdatePending(r.Status.ManagerVersion, r.BridgeVersion)
	if r.Status.HealthError != "" {
		problem(rpc.Errorf("", "%s", r.Status.HealthError))
	}
	return r, nil
}

// obstacle is what a start would fail at, as far as that can be seen without starting
// anything: files that are wrong, and places that cannot be written. nil says little.
func obstacle(w *workspace.Workspace) error {
	if _, _, err := config.Load(w.Root); err != nil {
		return err
	}
	exe, err := executable()
	if err != nil {
		return err
	}
	if err := checkUnits(units.NewLoader(w.Dir, exe, w.Stem())); err != nil {
		return err
	}
	place := w.Root
	if _, err := os.Stat(place); errors.Is(err, fs.ErrNotExist) {
		place = w.Dir
	}
	if err := unix.Access(place, unix.W_OK|unix.X_OK); err != nil {
		return rpc.Errorf(rpc.CodePermission, "%s cannot be written: %v", place, err).
			WithHint("make it writable for you, or use another directory: mypr-mcp -C DIR …")
	}
	return nil
}

// orphans names the units that run on although, as err says, no runtime does; "" when none
// do, or one does.
func orphans(w *workspace.Workspace, err error) string {
	if !notRunning(err) {
		return ""
	}
	return strings.Join(supervisor.Orphans(stateFile(w)), ", ")
}

// withControl runs f with a connection to the runtime's supervisor, within statusTimeout.
func withControl(ctx context.Context, l *workspace.Location, f func(context.Context, *control.Client) error) error {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	sv, err := control.Dial(ctx, l.Control)
	if err != nil {
		return err
	}
	defer sv.Close()
	return f(ctx, sv)
}

// palette colours words on a terminal.
type palette bool

func (p palette) paint(code, s string) string {
	if !p || s == "" {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}
func (p palette) good(s string) string { return p.paint("32", s) }
func (p palette) bad(s string) string  { return p.paint("31", s) }
func (p palette) dim(s string) string  { return p.paint("2", s) }

// statusText renders the report for people.
func statusText(out io.Writer, r *api.StatusReport, colour bool, now time.Time) error {
	p := palette(colour)
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-11s %s\n", name, fmt.Sprintf(format, args...))
	}
	line("workspace", "%s %s", r.Workspace, p.dim("("+r.WorkspaceID+")"))
	state := p.good("healthy")
	switch {
	case !r.ManagerAvailable && r.Supervisor == nil:
		state = "no runtime"
	case !r.ManagerAvailable:
		state = p.bad("the manager does not answer")
	case !r.Healthy:
		state = p.bad("not healthy")
	}
	line("state", "%s", state)
	if r.Problem != "" {
		line("problem", "%s", p.bad(r.Problem))
	}
	if r.Hint != "" {
		line("next", "%s", r.Hint)
	}
	if s := r.Status; s != nil {
		kernel := s.Kernel.State
		if s.Kernel.Python != "" {
			kernel += ", Python " + s.Kernel.Python
		}
		if s.Kernel.Mode != "" {
			kernel += ", " + s.Kernel.Mode
		}
		if s.Kernel.Mode == "plain" && s.Kernel.PlainReason == "" {
			kernel += " until IPython is loaded"
		}
		if s.Kernel.Detail != "" && !strings.Contains(r.Problem, s.Kernel.Detail) { // said once
			kernel += ": " + s.Kernel.Detail
		}
		line("kernel", "%s", kernel)
		if s.Kernel.PlainReason != "" {
			line("", "no IPython: %s", s.Kernel.PlainReason)
		}
		if blocked := s.Kernel.Blocked; blocked != nil {
			by, next := blocked.ExecID, " (mypr-mcp interrupt)"
			if by == "" { // it imports something, or starts on a slow machine
				by, next = "work of its own", ""
			}
			line("", "%s", p.bad(fmt.Sprintf("blocked for %s by %s at %s%s",
				ago(time.Duration(blocked.Seconds*float64(time.Second))), by, blocked.Where, next)))
		}
		if s.Generation != "" {
			line("generation", "%s", s.Generation)
		}
		line("cells", "%d running, %d queued", len(s.Active), len(s.Queued))
		line("clients", "%d bound, %d connected", s.ClientCount, s.ConnectionCount)
		from := "from " + s.Environment.Source
		if s.Environment.Program != "" {
			from += ", started by " + s.Environment.Program
		}
		line("environment", "%s", from)
		for _, text := range s.Warnings {
			line("warning", "%s", p.bad(text))
		}
		if s.LastError != "" && !strings.Contains(r.Problem, s.LastError) {
			line("last error", "%s", s.LastError)
		}
		v := s.ManagerVersion
		if r.UpdatePending {
			v += fmt.Sprintf(" (this program is %s; mypr-mcp restart replaces the running one)", r.BridgeVersion)
		}
		line("version", "%s", v)
	}
	if sv := r.Supervisor; sv != nil {
		tier := fmt.Sprintf("tier %d", sv.Tier)
		if sv.TierReason != "" {
			tier += ": " + sv.TierReason
		}
		pid := fmt.Sprintf("pid %d", sv.PID)
		if r.PIDsForeign {
			pid += " there"
		}
		line("supervisor", "%s, %s, up %s, %s", pid, sv.Mode, ago(now.Sub(sv.Started)), tier)
		if r.RunsIn != "" {
			line("runs", "%s", r.RunsIn)
		}
		if dir := sv.Labels[workspace.LabelWorkspace]; dir != "" && dir != r.Workspace {
			line("", "where the workspace is %s", dir)
		}
	}
	if len(r.Units) > 0 {
		b.WriteByte('\n')
		unitTable(&b, r.Units, r.Supervisor, p, now)
		if r.PIDsForeign {
			b.WriteString("The pids are those of the pid namespace that the runtime is in, not of this one.\n")
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// unitTable prints one line for each unit.
func unitTable(out io.Writer, units []control.UnitStatus, sv *control.Info, p palette, now time.Time) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "UNIT\tSTATE\tPID\tMEMORY\tUPTIME\tRESTARTS\tTIER\tLAST ERROR")
	for _, u := range units {
		pid, up, tier := "-", "-", "-"
		if u.MainPID != 0 {
			pid = fmt.Sprint(u.MainPID)
		}
		if u.ActiveState == control.Active || u.ActiveState == control.Reloading {
			up = ago(now.Sub(u.Since))
		}
		if sv != nil && u.Containment != "" {
			tier = fmt.Sprint(sv.Tier)
		}
		state := u.ActiveState + "/" + u.SubState
		if u.Frozen {
			state += " frozen"
		}
		last := u.Error
		if last == "" && u.ActiveState == control.Failed {
			last = u.Result
		}
		if len(u.Survivors) > 0 {
			last += " still alive: " + strings.Join(u.Survivors, ", ")
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n", u.Name, state, pid, size(u.MemoryCurrent), up, u.Restarts, tier, oneLine(last))
	}
	_ = t.Flush()
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// runtimeOf finds the running runtime, for verbs that need one.
func runtimeOf(ctx context.Context, w *workspace.Workspace) (*workspace.Location, error) {
	l, err := w.Discover(ctx)
	if err != nil {
		return nil, err
	}
	return l, supervised(l)
}

// supervised is the error for a runtime of which only the manager answers.
func supervised(l *workspace.Location) error {
	switch {
	case l.Supervisor != nil:
		return nil
	case l.Silent != nil:
		return l.Silent
	}
	return rpc.Errorf(rpc.CodeUnavailable, "the supervisor of %s has died and is not back yet", l.Workspace.Dir).
		WithHint("the same again in a moment: its anchor, the manager or systemd starts it again")
}

// notRunning reports whether err says that there is no runtime.
func notRunning(err error) bool {
	var none *workspace.NotRunning
	return errors.As(err, &none)
}
