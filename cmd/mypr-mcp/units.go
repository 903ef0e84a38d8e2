package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"mypr/internal/rpc"
	"mypr/supervisor/control"
	"mypr/units"
)

func (c *cli) unitsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "units", Short: "List and manage the supervisor's units", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.listUnits(cmd.Context()) },
	}
	cmd.AddCommand(&cobra.Command{
		Use: "list", Short: "List the units", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.listUnits(cmd.Context()) },
	}, &cobra.Command{
		Use: "show NAME", Short: "Show everything about a unit", Args: oneUnit, ValidArgsFunction: c.completion(unitNames),
		RunE: func(cmd *cobra.Command, args []string) error { return c.showUnit(cmd.Context(), unitName(args[0])) },
	}, &cobra.Command{
		Use: "reload", Short: "Read the unit files again", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := c.supervisor(cmd.Context(), func(ctx context.Context, sv *control.Client) error { return sv.DaemonReload(ctx) })
			if rpc.CodeOf(err) == rpc.CodeInvalidRequest {
				return rpc.AsError(err).WithHint("correct them, then mypr-mcp units reload")
			}
			if err != nil {
				return err
			}
			return c.done(map[string]any{"reloaded": true}, "the unit files were read again")
		},
	})
	jobs := []struct {
		verb, short, done string
		run               func(*control.Client, context.Context, control.JobParams) (control.JobResult, error)
	}{
		{"start", "Start a unit; clears a start limit that it hit", "started", (*control.Client).Start},
		{"stop", "Stop a unit and all its processes", "stopped", (*control.Client).Stop},
		{"restart", "Stop a unit and start it again", "restarted", (*control.Client).Restart},
	}
	for _, j := range jobs {
		cmd.AddCommand(&cobra.Command{
			Use: j.verb + " NAME", Short: j.short, Args: oneUnit, ValidArgsFunction: c.completion(unitNames),
			RunE: func(cmd *cobra.Command, args []string) error {
				name := unitName(args[0])
				return c.supervisor(cmd.Context(), func(ctx context.Context, sv *control.Client) error {
					r, err := j.run(sv, ctx, control.JobParams{Name: name})
					if err != nil {
						return unitError(name, err)
					}
					if c.json {
						err = printJSON(c.stdout, r)
					} else {
						_, err = fmt.Fprintf(c.stdout, "%s: %s, now %s/%s\n", name, r.Result, r.Unit.ActiveState, r.Unit.SubState)
					}
					if err == nil && r.Result != "done" {
						err = rpc.Errorf(rpc.CodeConflict, "%s was not %s: %s", name, j.done, strings.TrimSuffix(r.Result+": "+r.Unit.Error, ": ")).WithHint("mypr-mcp units show %s", name)
					}
					return err
				})
			},
		})
	}
	return cmd
}

// freezeCommands are commands of their own: freeze and thaw.
func (c *cli) freezeCommands() (list []*cobra.Command) {
	for _, f := range []struct {
		verb, short, done string
		run               func(*control.Client, context.Context, string) error
	}{
		{"freeze", "Suspend every process of a unit", "frozen", (*control.Client).Freeze},
		{"thaw", "Resume a frozen unit", "thawed", (*control.Client).Thaw},
	} {
		list = append(list, &cobra.Command{
			Use: f.verb + " NAME", Short: f.short, Args: oneUnit, ValidArgsFunction: c.completion(unitNames),
			RunE: func(cmd *cobra.Command, args []string) error {
				name := unitName(args[0])
				err := c.supervisor(cmd.Context(), func(ctx context.Context, sv *control.Client) error { return unitError(name, f.run(sv, ctx, name)) })
				if err != nil {
					return err
				}
				return c.done(map[string]any{"name": name, "frozen": f.verb == "freeze"}, name+": "+f.done)
			},
		})
	}
	return list
}

// oneUnit checks that a command was given the name of one unit.
func oneUnit(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usagef("%s needs the name of one unit (mypr-mcp units lists them)", within(cmd.CommandPath()))
	}
	return nil
}

// done prints that a command did what it was told: a report as JSON, or words.
func (c *cli) done(report any, words string) error {
	if c.json {
		return printJSON(c.stdout, report)
	}
	_, err := fmt.Fprintln(c.stdout, words)
	return err
}

// unitName lets people leave ".service" away.
func unitName(s string) string {
	if strings.Contains(s, ".") {
		return s
	}
	return s + ".service"
}

// unitError adds what to type next to the supervisor's answer about a unit.
func unitError(name string, err error) error {
	if err == nil {
		return nil
	}
	e := rpc.AsError(err)
	switch {
	case e.Hint != "":
		return err
	case e.Code == rpc.CodeNotFound:
		return e.WithHint("mypr-mcp units lists them")
	case e.Code == rpc.CodeConflict:
		return e.WithHint("mypr-mcp units show %s tells how it is", name)
	case e.Code == rpc.CodeInvalidRequest && name == units.Kernel:
		return e.WithHint("mypr-mcp reset starts a new kernel, and so does the next cell")
	}
	return err
}

// supervisor runs f with a connection to the running supervisor.
func (c *cli) supervisor(ctx context.Context, f func(context.Context, *control.Client) error) error {
	w, err := c.workspace()
	if err != nil {
		return err
	}
	l, err := runtimeOf(ctx, w)
	if err != nil {
		return err
	}
	sv, err := control.Dial(ctx, l.Control)
	if err != nil {
		return err
	}
	defer sv.Close()
	return f(ctx, sv)
}

func (c *cli) listUnits(ctx context.Context) error {
	return c.supervisor(ctx, func(ctx context.Context, sv *control.Client) error {
		info, err := sv.Info(ctx)
		if err != nil {
			return err
		}
		list, err := sv.List(ctx, true)
		if err != nil {
			return err
		}
		if c.json {
			return printJSON(c.stdout, list)
		}
		unitTable(c.stdout, list, &info, palette(c.colours()), time.Now())
		return nil
	})
}

func (c *cli) showUnit(ctx context.Context, name string) error {
	return c.supervisor(ctx, func(ctx context.Context, sv *control.Client) error {
		u, err := sv.Show(ctx, name)
		if err != nil {
			return unitError(name, err)
		}
		for _, w := range u.Warnings {
			fmt.Fprintln(os.Stderr, w)
		}
		// A unit has too many properties for a layout of our own: people get the JSON too.
		return printJSON(c.stdout, u)
	})
}
