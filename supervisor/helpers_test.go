package supervisor_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/control"
	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

// until waits until a state of the unit satisfies ok, and returns it.
func (e *env) until(name, what string, ok func(control.UnitStatus) bool) control.UnitStatus {
	e.t.Helper()
	c := e.dial()
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	now, events, err := c.Subscribe(ctx, name)
	e.must(err)
	var last control.UnitStatus
	for _, st := range now {
		if last = st; ok(st) {
			return st
		}
	}
	for {
		select {
		case ev, open := <-events:
			if !open {
				e.t.Fatalf("the supervisor went away while waiting for %s to be %s", name, what)
			}
			if last = ev.UnitStatus; ok(last) {
				return last
			}
		case <-ctx.Done():
			e.t.Fatalf("%s did not become %s; it is %+v", name, what, last)
		}
	}
}

func (e *env) untilState(name, sub string) control.UnitStatus {
	e.t.Helper()
	return e.until(name, sub, func(st control.UnitStatus) bool { return st.SubState == sub })
}

// run is one run of a transient unit to its end.
func (e *env) wait(name, invocation string) control.UnitStatus {
	e.t.Helper()
	st, err := e.c.Wait(e.ctx, control.WaitParams{Name: name, InvocationID: invocation})
	e.must(err)
	return st
}

// output runs a unit with its output in a pipe and returns what it wrote, with how it ended.
func (e *env) output(u *spec.Unit, files map[string]*os.File) (string, control.UnitStatus) {
	e.t.Helper()
	u.Service.StandardOutput = spec.StdioPipe
	p := control.TransientParams{Unit: u}
	var send []*os.File
	for n, f := range files {
		p.FDNames = append(p.FDNames, n)
		send = append(send, f)
	}
	r, ends, err := e.c.StartTransient(e.ctx, p, send...)
	e.must(err)
	defer func() {
		for _, f := range ends {
			f.Close()
		}
	}()
	b, err := io.ReadAll(ends["stdout"])
	e.must(err)
	st := e.wait(u.Name, r.Unit.InvocationID)
	e.must(e.c.Release(e.ctx, u.Name))
	return string(b), st
}

// waits is a script that waits for signals that it traps: in a builtin, which they end.
const waits = `sleep 1000 & %s; while :; do wait $!; done`

// lines reads the lines that a started unit writes.
type lines struct {
	t testing.TB
	f *os.File
	r *bufio.Reader
}

func (e *env) startLines(u *spec.Unit) (*lines, control.TransientResult) {
	e.t.Helper()
	u.Service.StandardOutput = spec.StdioPipe
	r, ends, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: u})
	e.must(err)
	if r.Result != "done" {
		e.t.Fatalf("start: %+v", r)
	}
	f := ends["stdout"]
	for n, other := range ends {
		if n != "stdout" {
			other.Close()
		}
	}
	e.t.Cleanup(func() { f.Close() })
	return newLines(e.t, f), r
}

func newLines(t testing.TB, f *os.File) *lines { return &lines{t, f, bufio.NewReader(f)} }

func (l *lines) next() string {
	l.t.Helper()
	_ = l.f.SetReadDeadline(time.Now().Add(deadline))
	s, err := l.r.ReadString('\n')
	if err != nil {
		l.t.Fatalf("reading a line: %v", err)
	}
	return strings.TrimSpace(s)
}

// drain reads the lines that are there without waiting, and counts them.
func (l *lines) drain() (n int) {
	l.t.Helper()
	for {
		size, err := unix.IoctlGetInt(process.FD(l.f), unix.TIOCINQ)
		if err != nil {
			l.t.Fatal(err)
		}
		if size+l.r.Buffered() == 0 {
			return n
		}
		l.next()
		n++
	}
}

// gone reports whether a pid no longer names a live process.
func gone(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(b), ") Z ")
}

// stopped: it does not run until it is continued, and makes no other process. One that
// waits for its vfork(2) child (D), which was stopped before it could exec, never gets to
// stop itself.
func stopped(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	stat := string(b)
	return err != nil || strings.Contains(stat, ") T ") || strings.Contains(stat, ") Z ") || strings.Contains(stat, ") D ")
}

func (e *env) pids(name string) []int {
	e.t.Helper()
	d, err := e.c.Show(e.ctx, name)
	e.must(err)
	return d.PIDs
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil && !gone(pid) }
