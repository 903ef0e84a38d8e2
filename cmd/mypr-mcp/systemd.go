package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"mypr/internal/rpc"
	"mypr/internal/systemd"
	"mypr/internal/workspace"
)

func (c *cli) systemdCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "systemd", Short: "Have systemd run the session of a directory", Args: cobra.NoArgs,
		Long: `Have your systemd run the session of a directory: the socket is there from the start of
your systemd on, and the first connection starts the session. docs/SYSTEMD.md has the rest.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	for _, v := range []struct {
		verb, short string
		run         func(context.Context, *systemd.Manager, *workspace.Workspace, *systemd.Instance) error
	}{
		{"enable", "Install, enable and start the socket of DIR", c.systemdEnable},
		{"disable", "Stop the session and its socket, and remove what enable installed", c.systemdDisable},
		{"status", "Show what systemd says of the session of DIR", c.systemdStatus},
	} {
		cmd.AddCommand(&cobra.Command{
			Use: v.verb + " [DIR]", Short: v.short, Args: cobra.MaximumNArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				w, i, err := c.instance(args)
				if err != nil {
					return err
				}
				m, err := systemd.Find(filepath.Dir(w.RuntimeDir))
				if err != nil {
					return rpc.Errorf(rpc.CodeUnavailable, "cannot reach your systemd: %v", err).
						WithHint("log in where systemd runs, with XDG_RUNTIME_DIR set; without systemd nothing needs to be enabled: mypr-mcp exec 1+1")
				}
				return v.run(cmd.Context(), m, w, i)
			},
		})
	}
	cmd.AddCommand(&cobra.Command{
		Use: "print [DIR]", Short: "Print the unit files that enable installs, and where", Args: cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			_, i, err := c.instance(args)
			if err != nil {
				return err
			}
			return i.Print(c.stdout)
		},
	})
	return cmd
}

// instance is the pair of units of the directory that was named.
func (c *cli) instance(args []string) (*workspace.Workspace, *systemd.Instance, error) {
	dir := c.dir
	if len(args) == 1 {
		dir = args[0]
	}
	w, err := workspace.Open(dir)
	if err != nil {
		return nil, nil, err
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	i, err := systemd.NewInstance(w.Dir, w.Socket, exe)
	if err != nil {
		return nil, nil, rpc.Errorf(rpc.CodeInvalidRequest, "%v", err).WithHint("use a directory with a shorter path")
	}
	return w, i, nil
}

func (c *cli) did(text string) { fmt.Fprintln(c.stdout, text) }

func (c *cli) systemdEnable(ctx context.Context, m *systemd.Manager, w *workspace.Workspace, i *systemd.Instance) error {
	// systemd would take the socket's place from a session that listens there.
	l, err := w.Discover(ctx)
	var none *workspace.NotRunning
	switch {
	case err == nil:
		st, serr := m.State(ctx, i)
		if serr != nil || st.Service != "active" {
			return rpc.Errorf(rpc.CodeConflict, "a session of %s runs already, and not under %s (supervisor %s)", w.Dir, i.Service(), mode(l)).
				WithHint("mypr-mcp stop, then mypr-mcp systemd enable; Python memory is lost")
		}
	case !errors.As(err, &none):
		return err
	}
	if err := w.EnsureLayout(); err != nil {
		return err
	}
	if err := m.Enable(ctx, i, c.did); err != nil {
		return err
	}
	c.lingerAdvice(ctx, m)
	return nil
}

func mode(l *workspace.Location) string {
	if l.Supervisor == nil {
		return "away"
	}
	return l.Supervisor.Mode
}

// lingerAdvice says it when the session would end with the login.
func (c *cli) lingerAdvice(ctx context.Context, m *systemd.Manager) {
	switch on, err := m.Linger(ctx); {
	case err != nil:
		c.did("note: whether the session outlives your logout is not known: " + err.Error())
	case !on:
		c.did("note: lingering is off, so the session ends at your last logout and is not there before a login; to keep it: loginctl enable-linger")
	}
}

func (c *cli) systemdDisable(ctx context.Context, m *systemd.Manager, _ *workspace.Workspace, i *systemd.Instance) error {
	if err := m.Disable(ctx, i, c.did); err != nil {
		return rpc.Errorf(rpc.CodeConflict, "%v", err).WithHint("mypr-mcp systemd status")
	}
	return nil
}

func (c *cli) systemdStatus(ctx context.Context, m *systemd.Manager, _ *workspace.Workspace, i *systemd.Instance) error {
	s, err := m.State(ctx, i)
	if err != nil {
		return err
	}
	if c.json {
		return printJSON(c.stdout, struct {
			Unit string `json:"unit"`
			*systemd.State
		}{i.Service(), s})
	}
	fmt.Fprintf(c.stdout, "%s: %s, %s", i.SocketUnit(), s.Enabled, s.Socket)
	if s.Listen != "" {
		fmt.Fprintf(c.stdout, " at %s", s.Listen)
	}
	fmt.Fprintf(c.stdout, "\n%s: %s (%s)", i.Service(), s.Service, s.Sub)
	if s.Result != "success" {
		fmt.Fprintf(c.stdout, ", %s", s.Result)
	}
	if s.Status != "" {
		fmt.Fprintf(c.stdout, ": %s", s.Status)
	}
	fmt.Fprintln(c.stdout)
	if s.NeedReload {
		fmt.Fprintln(c.stdout, "unit files have changed on disk: systemctl --user daemon-reload")
	}
	c.lingerAdvice(ctx, m)
	return nil
}
