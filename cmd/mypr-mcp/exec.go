package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"mypr/internal/api"
	"mypr/internal/client"
	"mypr/internal/rpc"
)

type execArgs struct {
	file    string
	client  string
	timeout time.Duration
}

func (c *cli) execCommand() *cobra.Command {
	var a execArgs
	cmd := &cobra.Command{
		Use:   "exec [CODE | -f FILE | < FILE]",
		Short: "Run a cell in the session, starting one if there is none",
		Long: `Run a cell in the session of the directory, which is started if there is none, and
print its output as it comes. The exit status is 0 when the cell succeeded, 1 when it
raised, 3 when it was lost with its session, 4 when somebody cancelled it.

Ctrl-C interrupts the cell; a second Ctrl-C leaves it running.`,
		Example: `  mypr-mcp exec 'x = 6 * 7; x'
  mypr-mcp exec -f script.py
  echo 'print(x)' | mypr-mcp exec
  mypr-mcp exec -- '-x'`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if a.timeout < 0 {
				return usagef("--timeout takes a time from now on, not %s", a.timeout)
			}
			code, err := c.code(a, args)
			if err != nil {
				return err
			}
			if !utf8.ValidString(code) {
				return rpc.Errorf(rpc.CodeInvalidRequest, "the code is not UTF-8 text").
					WithHint("convert it, or run the file by its own encoding: mypr-mcp exec 'import runpy; runpy.run_path(\"FILE\")'")
			}
			return c.exec(cmd.Context(), a, code, cmd.Flags().Changed("json") && c.json)
		},
	}
	cmd.Flags().StringVarP(&a.file, "file", "f", "", "read the code from `FILE` (-: standard input)")
	cmd.Flags().StringVar(&a.client, "client", "", "run as the logical client `ID` (default: cli, or cli-2 … while that one is in use)")
	cmd.Flags().DurationVar(&a.timeout, "timeout", 0, "stop waiting after this `DURATION` with status 124; the cell goes on (default: never)")
	return cmd
}

// code is what to run, from the one place that was named.
func (c *cli) code(a execArgs, args []string) (string, error) {
	var data []byte
	var err error
	switch {
	case len(args) == 1 && a.file != "":
		return "", usagef("give CODE or -f FILE, not both")
	case len(args) == 1 && args[0] != "-":
		return args[0], nil
	case a.file != "" && a.file != "-":
		data, err = os.ReadFile(a.file)
	case isTerminal(c.stdin):
		return "", usagef("no code: give it as an argument, with -f FILE, or on standard input")
	default:
		data, err = io.ReadAll(io.LimitReader(c.stdin, api.MaxCodeBytes+1))
	}
	if err != nil {
		return "", fmt.Errorf("cannot read the code: %w", err)
	}
	return string(bytes.TrimPrefix(data, []byte("\ufeff"))), nil // as Python does with a file
}

func (c *cli) exec(ctx context.Context, a execArgs, code string, asJSON bool) error {
	w, err := c.workspace()
	if err != nil {
		return err
	}
	// The root's context ends at the first Ctrl-C, which here is for the cell.
	ctx = context.WithoutCancel(ctx)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, endSignals()...)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if a.timeout > 0 {
		t := time.AfterFunc(a.timeout, func() { cancel(context.DeadlineExceeded) })
		defer t.Stop()
	}

	cl := c.client(w, true, false)
	defer cl.Close()
	e := &execution{cli: c, client: cl, json: asJSON, submitted: make(chan string, 1)}
	stop := make(chan struct{})
	stopped := make(chan struct{})
	go func() { defer close(stopped); e.interrupts(ctx, signals, stop, cancel) }()
	defer func() { close(stop); <-stopped }()

	if err := e.bind(ctx, a.client); err != nil {
		return e.ended(ctx, err)
	}
	return e.ended(ctx, e.run(ctx, code))
}

// execution is one cell as the command line follows it.
type execution struct {
	*cli
	client    *client.Client
	json      bool
	submitted chan string // gets the exec id
	asked     atomic.Bool // Ctrl-C was passed on

	id     string
	all    api.ExecResult // with all output, for --json
	inLine bool           // the last text has not ended its line
	out    io.Writer      // where that went
	open   bool           // it was of a result or a traceback, which ends with a line
	told   bool           // the output said why the cell failed
	// starting is what the cell was last said to wait for. Nobody is told before it has
	// waited: most starts are over in a moment.
	starting string
	waited   bool
	blocked  bool // it was said that another cell holds Python
}

// interrupts turns the first Ctrl-C into an interrupt of the cell, once there is one,
// and the second, or a SIGTERM, into the end of waiting.
func (e *execution) interrupts(ctx context.Context, signals <-chan os.Signal, stop <-chan struct{}, leave context.CancelCauseFunc) {
	id := ""
	for {
		select {
		case id = <-e.submitted:
		case s := <-signals:
			if id == "" || s == syscall.SIGTERM || e.asked.Swap(true) {
				leave(context.Canceled)
				return
			}
			if _, err := e.client.Interrupt(ctx, api.InterruptParams{ExecID: id}); err != nil {
				fmt.Fprintf(e.stderr, "mypr-mcp: cannot interrupt: %v\n", err)
			}
		case <-stop:
			return
		}
	}
}

// bind takes the client id. One id is used by one connection at a time, so parallel
// command lines number themselves: few ids, used again and again.
func (e *execution) bind(ctx context.Context, id string) error {
	if id != "" {
		_, err := e.client.Init(ctx, api.InitParams{ClientID: &id})
		return err
	}
	for n := 1; ; n++ {
		id := "cli"
		if n > 1 {
			id = fmt.Sprintf("cli-%d", n)
		}
		_, err := e.client.Init(ctx, api.InitParams{ClientID: &id})
		if rpc.CodeOf(err) != api.CodeClientBound || n == 256 {
			return err
		}
	}
}

// kernelStarting is the warning that says what a queued cell waits for. A new environment
// takes its time: exec asks that often what is being done now.
const (
	kernelStarting = "kernel_starting"
	startingWaitMS = 2000
)

func (e *execution) run(ctx context.Context, code string) error {
	zero := int64(0)
	budget := int64(api.MaxBytes)
	r, err := e.client.Execute(ctx, api.ExecuteParams{Code: code, WaitMS: &zero, MaxBytes: &budget}, nil)
	if err != nil {
		return err
	}
	e.id = r.ExecID
	e.submitted <- r.ExecID
	for {
		e.print(r)
		if api.Terminal(r.State) && !r.HasMore {
			return e.outcome(r)
		}
		cursor, wait := r.Cursor, int64(api.MaxWaitMS)
		if slices.ContainsFunc(r.Warnings, func(w api.Warning) bool { return w.Code == kernelStarting }) ||
			r.State == api.Queued && !e.blocked && len(r.Warnings) == 0 { // soon it is seen what keeps it
			wait = startingWaitMS
		}
		e.waited = true
		r, err = e.client.Poll(ctx, api.PollParams{ExecID: e.id, Cursor: &cursor, WaitMS: &wait, MaxBytes: &budget}, nil)
		if err != nil {
			return err
		}
	}
}

// print writes what is new.
func (e *execution) print(r *api.ExecResult) {
	if e.json {
		all := e.all.Output
		e.all = *r
		e.all.Output = append(all, r.Output...)
		return
	}
	if r.Notice != nil {
		e.note("%s", r.Notice.Text)
	}
	for _, ev := range r.Output {
		e.event(ev)
	}
	if b := r.Blocked; b != nil && b.ExecID != r.ExecID && !e.blocked {
		e.note("waiting: cell %s has held Python for %.1fs (mypr-mcp interrupt stops that one)", b.ExecID, b.Seconds)
		e.blocked = true
	}
	for _, w := range r.Warnings {
		if w.Code == kernelStarting { // what the cell waits for; nothing is wrong
			if e.waited && w.Text != e.starting {
				e.note("%s", w.Text)
				e.starting = w.Text
			}
			continue
		}
		e.note("warning: %s", w.Text)
	}
}

func (e *execution) event(ev api.Event) {
	switch ev.Type {
	case "stream":
		out := e.stdout
		if ev.Stream == "stderr" {
			out = e.stderr
		}
		e.write(out, ev.Text)
	case "error":
		e.told = true
		e.whole(e.stderr, ev)
	case "warning":
		e.note("warning: %s", ev.Text)
	default:
		e.whole(e.stdout, ev)
		for _, a := range ev.Artifacts {
			fmt.Fprintf(e.stdout, "[%s, %d bytes: %s]\n", a.Mime, a.Size, a.Path)
		}
	}
}

func (e *execution) write(out io.Writer, text string) {
	if text == "" {
		return
	}
	_, _ = io.WriteString(out, text)
	e.inLine, e.out = !strings.HasSuffix(text, "\n"), out
	e.open = false
}

// whole writes what begins and ends with a line, but may come in several parts.
func (e *execution) whole(out io.Writer, ev api.Event) {
	if !ev.Continues || !e.open {
		e.fresh()
	}
	e.write(out, ev.Text)
	e.open = e.inLine
}

// fresh begins a new line if one is open.
func (e *execution) fresh() {
	if e.inLine {
		fmt.Fprintln(e.out)
	}
	e.inLine, e.open = false, false
}

func (e *execution) note(format string, args ...any) {
	e.fresh()
	fmt.Fprintf(e.stderr, "mypr-mcp: "+format+"\n", args...)
}

// outcome is the exit status of a cell that has ended.
func (e *execution) outcome(r *api.ExecResult) error {
	if e.json {
		if err := printJSON(e.stdout, e.all); err != nil {
			return err
		}
	} else {
		if e.open || isTerminal(e.stdout) {
			e.fresh()
		}
		if r.Truncated {
			e.note("output over the limit was dropped for good ([limits] output_bytes in config.toml)")
		}
	}
	switch {
	case r.State == api.Succeeded:
		return nil
	case r.State == api.Cancelled && e.asked.Load():
		return exitStatus(exitInterrupt)
	case r.State == api.Lost, r.State == api.Cancelled:
		if !e.json && r.Error != nil {
			e.note("%s: %s", r.State, strings.TrimPrefix(*r.Error, string(r.State)+": "))
		}
		if r.State == api.Lost {
			return exitStatus(exitLost)
		}
		return exitStatus(exitCancelled)
	case !e.json && !e.told && r.Error != nil: // no kernel could run it, or its traceback was over the limit
		e.note("%s", *r.Error)
	}
	return exitStatus(exitFailed)
}

// ended explains an error that ended the wait and not the cell.
func (e *execution) ended(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	if err == nil || cause == nil {
		return err
	}
	var status exitStatus
	if errors.As(err, &status) {
		return err
	}
	code := exitInterrupt
	if errors.Is(cause, context.DeadlineExceeded) {
		code = exitTimeout
	}
	if e.id == "" {
		e.note("stopped waiting before the cell was accepted")
		return exitStatus(code)
	}
	e.note("stopped waiting; the cell goes on as %s\nnext: mypr-mcp interrupt %s", e.id, e.id)
	return exitStatus(code)
}
