package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"mypr/internal/client"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
)

// Exit statuses (docs/EXIT-CODES.md).
const (
	exitOK        = 0
	exitFailed    = 1
	exitUsage     = 2
	exitLost      = 3
	exitCancelled = 4
	exitTimeout   = 124 // as timeout(1): the wait ended, the cell goes on
	exitInterrupt = 130 // 128 + SIGINT
)

// cli is what every verb gets.
type cli struct {
	dir    string // -C
	json   bool
	stdin  *os.File
	stdout *os.File
	stderr *os.File
}

// exitStatus ends the program with a status when everything was already said.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// usageError is a mistake in the arguments.
type usageError struct {
	error
	next string // what to type; "" where the error says it
}

func usagef(format string, args ...any) error {
	return usageError{error: fmt.Errorf(format, args...)}
}

// misused is a mistake that cobra found: what is right is in the command's help.
func misused(cmd *cobra.Command, err error) error {
	if bad := new(pflag.InvalidValueError); errors.As(err, &bad) {
		err = fmt.Errorf("--%s takes %s, not %q", bad.GetFlag().Name, takes[bad.GetFlag().Value.Type()], bad.GetValue())
	}
	return usageError{error: err, next: cmd.CommandPath() + " --help"}
}

// takes says what a flag of each type takes, where the error has what Go's parser says.
var takes = map[string]string{"bool": "true or false", "int": "a whole number", "duration": "a time such as 30s, 5m or 1h30m"}

// noCommand is the mistake of a name that no command below parent has.
func noCommand(parent *cobra.Command, name string) error {
	parent.SuggestionsMinimumDistance = 1
	if len(name) > 4 { // two wrong letters of four may be another word
		parent.SuggestionsMinimumDistance = 2
	}
	near := ""
	if names := parent.SuggestionsFor(name); len(names) > 0 {
		near = "; did you mean " + strings.Join(names, " or ") + "?"
	}
	list := parent.CommandPath() + " --help"
	if !parent.HasParent() {
		list = "mypr-mcp help"
	}
	return usagef("there is no command %q%s (%s lists them)", within(parent.CommandPath()+" "+name), near, list)
}

// within is the path of a command without the name of the program.
func within(path string) string { return strings.TrimPrefix(path, "mypr-mcp ") }

// run runs one command line and returns the exit status.
func run(args []string) int {
	c := &cli{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr}
	root := c.command()
	root.SetArgs(args)
	if cmd, _, err := root.Find(args); err == nil && cmd.Name() == "supervise" {
		relax()
	}
	ctx, stop := signal.NotifyContext(context.Background(), endSignals()...)
	defer stop()
	return c.status(root.ExecuteContext(ctx))
}

// endSignals end a command. A SIGINT that whoever started it has ignored (a shell's
// background job) stays ignored, as everywhere: to catch it would take that back.
func endSignals() []os.Signal {
	if signal.Ignored(syscall.SIGINT) {
		return []os.Signal{syscall.SIGTERM}
	}
	return []os.Signal{syscall.SIGTERM, syscall.SIGINT}
}

func (c *cli) command() *cobra.Command {
	var showVersion bool
	root := &cobra.Command{
		Use:           "mypr-mcp",
		Short:         "A persistent Python session for LLM agents, one per directory",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return noCommand(cmd, args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if showVersion {
				return c.printVersion(cmd)
			}
			return cmd.Help()
		},
	}
	root.Flags().BoolVar(&showVersion, "version", false, "print the version of this program")
	root.SetOut(c.stdout)
	root.SetErr(c.stderr)
	root.PersistentFlags().StringVarP(&c.dir, "directory", "C", "", "the workspace `DIR` (default: the current directory)")
	root.PersistentFlags().BoolVar(&c.json, "json", !isTerminal(c.stdout), "print JSON; --json=false prints text also when the output is no terminal")
	root.PersistentFlags().Lookup("json").DefValue = ""
	root.SetFlagErrorFunc(misused)
	root.AddCommand(
		c.serveCommand(), c.execCommand(), c.statusCommand(), c.logsCommand(), c.interruptCommand(),
		c.resetCommand(), c.restartCommand(), c.stopCommand(), c.unitsCommand(), c.systemdCommand(), c.versionCommand(),
		c.superviseCommand(), c.managerCommand(), c.replaceCommand(),
	)
	root.AddCommand(c.freezeCommands()...)
	strictHelpers(root)
	for _, cmd := range root.Commands() {
		asUsage(cmd)
	}
	return root
}

// strictHelpers makes mistakes of cobra's own commands mistakes, which it answers with
// help and success.
func strictHelpers(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "completion":
			cmd.Args = func(cmd *cobra.Command, args []string) error {
				if len(args) > 0 {
					return usagef("there is no completion for %q (mypr-mcp completion --help lists the shells)", args[0])
				}
				return nil
			}
			cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		case "help":
			cmd.Args = func(_ *cobra.Command, args []string) error {
				if parent, rest, err := root.Find(args); len(rest) > 0 {
					return noCommand(parent, rest[0])
				} else if err != nil {
					return noCommand(root, args[0])
				}
				return nil
			}
		}
	}
}

// asUsage makes wrong numbers of arguments usage errors, which cobra does not tell apart.
func asUsage(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			err := check(cmd, args)
			switch {
			case err == nil || errors.As(err, new(usageError)):
				return err
			case cmd.HasSubCommands():
				return noCommand(cmd, args[0])
			case check(cmd, args[:1]) != nil:
				err = fmt.Errorf("%s takes no argument, not %q", within(cmd.CommandPath()), args[0])
			default:
				err = fmt.Errorf("%s takes one argument, not %d: quote what has spaces in it", within(cmd.CommandPath()), len(args))
			}
			return misused(cmd, err)
		}
	}
	for _, sub := range cmd.Commands() {
		asUsage(sub)
	}
}

// status says an error and turns it into an exit status.
func (c *cli) status(err error) int {
	var quiet exitStatus
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &quiet):
		return int(quiet)
	case errors.As(err, &usage):
		fmt.Fprintf(c.stderr, "mypr-mcp: %v\n", usage.error)
		if usage.next != "" {
			fmt.Fprintf(c.stderr, "next: %s\n", usage.next)
		}
		return exitUsage
	case errors.Is(err, context.Canceled):
		fmt.Fprintln(c.stderr, "mypr-mcp: interrupted")
		return exitInterrupt
	}
	var e *rpc.Error
	if errors.As(err, &e) {
		fmt.Fprintf(c.stderr, "mypr-mcp: %s\n", e.Message)
		if e.Hint != "" {
			fmt.Fprintf(c.stderr, "next: %s\n", e.Hint)
		}
		return exitFailed
	}
	fmt.Fprintf(c.stderr, "mypr-mcp: %v\n", err)
	return exitFailed
}

// workspace opens the workspace of this command line.
func (c *cli) workspace() (*workspace.Workspace, error) { return workspace.Open(c.dir) }

// client is a runtime client of the command line. Without start it never starts a
// runtime. passive connections do not count as clients.
func (c *cli) client(w *workspace.Workspace, start, passive bool) *client.Client {
	return client.New(client.Options{
		Ensure: func(ctx context.Context) (string, error) {
			if !start {
				l, err := w.Discover(ctx)
				if err != nil {
					return "", err
				}
				return l.Socket, nil
			}
			return ensure(ctx, w, "cli")
		},
		Kind: "cli", Name: "mypr-mcp", Version: version(), Passive: passive, Trouble: trouble,
	})
}

// printJSON writes v as the original does: indented, one object.
func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// colours reports whether to colour the output: a terminal whose user did not object.
func (c *cli) colours() bool { return os.Getenv("NO_COLOR") == "" && isTerminal(c.stdout) }

// ago is a duration for people: "3.2s", "5m12s", "2h3m", "4d2h".
func ago(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 24*time.Hour:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	h := int(d.Round(time.Hour).Hours())
	return fmt.Sprintf("%dd%dh", h/24, h%24)
}

// size is a number of bytes for people: "17 MiB".
func size(n uint64) string {
	switch {
	case n == 0:
		return "-"
	case n < 1<<20:
		return fmt.Sprintf("%d KiB", (n+1023)>>10)
	case n < 10<<30:
		return fmt.Sprintf("%d MiB", (n+1<<19)>>20)
	}
	return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
}
