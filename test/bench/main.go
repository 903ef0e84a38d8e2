// Command bench measures the built program against the floor of each of its jobs, both
// in the same run, and prints one table. MYPR_BIN names the program. It owns a
// workspace and a runtime of its own, which it removes.
//
// The numbers depend on the machine and on what else it does; the ratios much less.
// A mark says whether a target is met; the exit status is 1 only when a measurement
// failed.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"
)

type bench struct {
	bin  string
	top  string // everything is below it
	dir  string // the workspace
	env  []string
	rows []row
	ctx  context.Context

	socket string // the runtime's, for execute
}

// row is one line of the table. Floor and ratio are "" where there is none.
type row struct {
	what, ours, floor, ratio, target, mark string
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	b := &bench{bin: os.Getenv("MYPR_BIN"), ctx: ctx}
	if b.bin == "" {
		return fmt.Errorf("MYPR_BIN is not set (make bench)")
	}
	if b.top, err = os.MkdirTemp("", "my"); err != nil {
		return err
	}
	defer os.RemoveAll(b.top)
	b.dir = filepath.Join(b.top, "ws")
	if err := os.MkdirAll(filepath.Join(b.top, "r"), 0o700); err != nil {
		return err
	}
	if err := os.MkdirAll(b.dir, 0o700); err != nil {
		return err
	}
	b.env = append(os.Environ(), "XDG_RUNTIME_DIR="+filepath.Join(b.top, "r"))
	defer func() {
		if out, serr := b.command("stop", "--force").CombinedOutput(); serr != nil && err == nil {
			err = fmt.Errorf("stop: %w\n%s", serr, out)
		}
	}()
	fmt.Fprintln(os.Stderr, "preparing a workspace")
	if out, err := b.command("exec", "1").CombinedOutput(); err != nil {
		return fmt.Errorf("first start: %w\n%s", err, out)
	}
	only := os.Getenv("MYPR_BENCH") // one measurement, for who works on it
	for _, m := range []struct {
		name string
		run  func() error
	}{
		{"execute", b.execute}, {"front end start", b.frontEnd}, {"transient unit", b.transient}, {"output", b.output},
		{"shell run", b.shellRun}, {"many jobs", b.manyJobs}, {"job output", b.jobOutput}, {"history", b.history}, {"calls", b.calls},
		{"kernel start", b.kernel}, {"session start and stop", b.lifecycle}, {"memory", b.memory}, {"idle for 30 s", b.idle},
	} {
		if only != "" && only != m.name {
			continue
		}
		fmt.Fprintln(os.Stderr, "measuring:", m.name)
		if err := m.run(); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
	}
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "WHAT\tOURS\tFLOOR\tRATIO\tTARGET\t")
	for _, r := range b.rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", r.what, r.ours, r.floor, r.ratio, r.target, r.mark)
	}
	return t.Flush()
}

func (b *bench) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(b.ctx, b.bin, args...)
	cmd.Dir, cmd.Env = b.dir, b.env
	return cmd
}

// ratio adds a row of two durations; limit 0 has no target.
func (b *bench) ratio(what string, ours, floor time.Duration, limit float64) {
	r := row{what: what, ours: show(ours), floor: show(floor), ratio: fmt.Sprintf("%.2fx", float64(ours)/float64(floor))}
	if limit > 0 {
		r.target, r.mark = fmt.Sprintf("<= %gx", limit), mark(float64(ours)/float64(floor) <= limit)
	}
	b.rows = append(b.rows, r)
}

// amount adds a row of one number.
func (b *bench) amount(what string, value float64, unit string, limit float64) {
	r := row{what: what, ours: fmt.Sprintf("%.1f %s", value, unit)}
	if limit > 0 {
		r.target, r.mark = fmt.Sprintf("<= %g %s", limit, unit), mark(value <= limit)
	}
	b.rows = append(b.rows, r)
}

func mark(ok bool) string {
	if ok {
		return "ok"
	}
	return "MISSED"
}

func show(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%.1f us", float64(d.Nanoseconds())/1e3)
	case d < time.Second:
		return fmt.Sprintf("%.2f ms", float64(d.Nanoseconds())/1e6)
	}
	return fmt.Sprintf("%.2f s", d.Seconds())
}

// percentile of durations, which it sorts.
func percentile(d []time.Duration, p float64) time.Duration {
	slices.Sort(d)
	return d[min(int(p*float64(len(d))), len(d)-1)]
}

// pairs runs two measurements in turn, n times each, so that both see the same
// machine, and returns their medians.
func pairs(n int, ours, floor func() (time.Duration, error)) (a, b time.Duration, err error) {
	var as, bs []time.Duration
	for i := range n + 1 {
		x, err := ours()
		if err != nil {
			return 0, 0, err
		}
		y, err := floor()
		if err != nil {
			return 0, 0, err
		}
		if i > 0 { // the first of each warms the caches
			as, bs = append(as, x), append(bs, y)
		}
	}
	return percentile(as, 0.5), percentile(bs, 0.5), nil
}
