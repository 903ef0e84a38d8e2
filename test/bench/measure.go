package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"mypr/internal/api"
	"mypr/internal/client"
	"mypr/kernel/wire"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

// front is a front end that one client talks to, one call at a time.
type front struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	id  int
}

func (b *bench) serve() (*front, error) {
	f := &front{cmd: b.command("serve")}
	f.cmd.Stderr = os.Stderr
	var err error
	if f.in, err = f.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	f.out = bufio.NewReaderSize(out, 1<<20)
	return f, f.cmd.Start()
}

func (f *front) close() error {
	f.in.Close()
	return f.cmd.Wait()
}

const initialize = `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"1"}}}` + "\n"

// client is a front end with its handshake and init behind it.
func (b *bench) client() (*front, error) {
	f, err := b.serve()
	if err != nil {
		return nil, err
	}
	if _, err = io.WriteString(f.in, initialize); err == nil {
		if _, err = f.out.ReadBytes('\n'); err == nil {
			_, err = f.call("init", "{}")
		}
	}
	return f, err
}

// call sends a prepared request and returns the answer's line. Nothing is decoded:
// what is measured is the server, not this client.
func (f *front) call(tool, args string) ([]byte, error) {
	f.id++
	_, err := fmt.Fprintf(f.in, `{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":%q,"arguments":%s}}`+"\n", f.id, tool, args)
	if err != nil {
		return nil, err
	}
	return f.out.ReadBytes('\n')
}

// payload decodes an answer's machine-readable part.
func payload(line []byte) (*api.ExecResult, error) {
	var m struct {
		Result struct {
			Meta struct {
				Result api.ExecResult `json:"mypr/result"`
			} `json:"_meta"`
		} `json:"result"`
	}
	if err := json.Unmarshal(line, &m); err != nil {
		return nil, err
	}
	if m.Result.Meta.Result.ExecID == "" {
		return nil, fmt.Errorf("no execution in %.300s", line)
	}
	return &m.Result.Meta.Result, nil
}

// python is the interpreter of the workspace's environment.
func (b *bench) python() string { return filepath.Join(b.dir, ".mypr", "venv", "bin", "python") }

// floorLoop is two Python processes on a socketpair: one sends a JSON line, the other
// evaluates it and answers with one. For each number on its input it makes so many
// round trips and prints their nanoseconds on one line.
const floorLoop = `
import json, os, socket, sys, time
a, b = socket.socketpair()
if os.fork() == 0:
    a.close()
    for line in b.makefile("rb"):
        b.sendall(json.dumps({"result": repr(eval(json.loads(line)["code"]))}).encode() + b"\n")
    os._exit(0)
b.close()
r = a.makefile("rb")
for n in sys.stdin:
    took = []
    for _ in range(int(n)):
        t = time.perf_counter_ns()
        a.sendall(json.dumps({"code": "1+1"}).encode() + b"\n")
        json.loads(r.readline())
        took.append(time.perf_counter_ns() - t)
    print(*took, flush=True)
`

// execute measures twice: call by call in turn with the floor, as the other rows do, so that
// both find the machine as the other left it; and in batches, where the two processes of
// the floor have their caches and, as the scheduler likes it, one processor to themselves.
func (b *bench) execute() error {
	const rounds, n = 20, 100
	f, err := b.client()
	if err != nil {
		return err
	}
	r, err := b.status()
	if err != nil {
		return err
	}
	b.socket = r.Socket
	floor := exec.CommandContext(b.ctx, b.python(), "-c", floorLoop)
	in, err := floor.StdinPipe()
	if err != nil {
		return err
	}
	out, err := floor.StdoutPipe()
	if err != nil {
		return err
	}
	if err := floor.Start(); err != nil {
		return err
	}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	ours := func() (time.Duration, error) {
		start := time.Now()
		line, err := f.call("execute", `{"code":"1+1","wait_ms":10000}`)
		d := time.Since(start)
		if err != nil {
			return 0, err
		}
		if r, err := payload(line); err != nil || r.State != api.Succeeded {
			return 0, fmt.Errorf("the cell did not succeed: %v %.300s", err, line)
		}
		return d, nil
	}
	bare := func(n int) ([]time.Duration, error) {
		if _, err := fmt.Fprintln(in, n); err != nil {
			return nil, err
		}
		if !lines.Scan() {
			return nil, fmt.Errorf("the floor ended: %w", lines.Err())
		}
		var took []time.Duration
		for s := range strings.FieldsSeq(lines.Text()) {
			ns, err := strconv.ParseInt(s, 10, 64)
			if err != nil {
				return nil, err
			}
			took = append(took, time.Duration(ns))
		}
		return took, nil
	}
	var turns, batches struct{ ours, bare []time.Duration }
	var direct []time.Duration
	for i := range rounds + 1 {
		if i == 1 { // the first round warms up
			turns.ours, turns.bare, batches.ours, batches.bare, direct = nil, nil, nil, nil, nil
		}
		for range n {
			x, err := ours()
			if err != nil {
				return err
			}
			y, err := bare(1)
			if err != nil {
				return err
			}
			turns.ours, turns.bare = append(turns.ours, x), append(turns.bare, y...)
		}
		for range n {
			x, err := ours()
			if err != nil {
				return err
			}
			batches.ours = append(batches.ours, x)
		}
		d, err := b.direct(n)
		if err != nil {
			return err
		}
		y, err := bare(n)
		if err != nil {
			return err
		}
		batches.bare, direct = append(batches.bare, y...), append(direct, d...)
	}
	in.Close()
	if err := errors.Join(f.close(), floor.Wait()); err != nil {
		return err
	}
	b.ratio("execute 1+1 over stdio, p50, in turns (floor: two Pythons on a socketpair)", percentile(turns.ours, 0.5), percentile(turns.bare, 0.5), 8)
	b.ratio("execute 1+1 over stdio, p99, in turns", percentile(turns.ours, 0.99), percentile(turns.bare, 0.99), 0)
	b.ratio(fmt.Sprintf("execute 1+1 over stdio, p50, in batches of %d", n), percentile(batches.ours, 0.5), percentile(batches.bare, 0.5), 8)
	b.ratio("execute 1+1 at the runtime socket, without a front end, p50, in batches", percentile(direct, 0.5), percentile(batches.bare, 0.5), 0)
	return nil
}

// direct executes without a front end, to tell its share.
func (b *bench) direct(n int) ([]time.Duration, error) {
	c := client.New(client.Options{Kind: "cli", Version: "bench", Ensure: func(context.Context) (string, error) { return b.socket, nil }})
	defer c.Close()
	id, wait := "direct", int64(10000)
	if _, err := c.Init(b.ctx, api.InitParams{ClientID: &id}); err != nil {
		return nil, err
	}
	var took []time.Duration
	for range n {
		start := time.Now()
		r, err := c.Execute(b.ctx, api.ExecuteParams{Code: "1+1", WaitMS: &wait}, nil)
		if err != nil || r.State != api.Succeeded {
			return nil, fmt.Errorf("%+v: %w", r, err)
		}
		took = append(took, time.Since(start))
	}
	return took, nil
}

func (b *bench) frontEnd() error {
	hello := filepath.Join(b.top, "hello")
	src := filepath.Join(b.top, "hello.go")
	if err := os.WriteFile(src, []byte("package main\n\nimport \"fmt\"\n\nfunc main() { fmt.Println(\"hello\") }\n"), 0o644); err != nil {
		return err
	}
	build := exec.CommandContext(b.ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", hello, src)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	ours := func() (time.Duration, error) {
		start := time.Now()
		f, err := b.serve()
		if err != nil {
			return 0, err
		}
		if _, err := io.WriteString(f.in, initialize); err != nil {
			return 0, err
		}
		_, err = f.out.ReadBytes('\n')
		took := time.Since(start)
		return took, errors.Join(err, f.close())
	}
	floor := func() (time.Duration, error) {
		cmd := exec.CommandContext(b.ctx, hello)
		out, err := cmd.StdoutPipe()
		if err != nil {
			return 0, err
		}
		start := time.Now()
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		_, err = bufio.NewReader(out).ReadBytes('\n')
		took := time.Since(start)
		return took, errors.Join(err, cmd.Wait())
	}
	x, y, err := pairs(60, ours, floor)
	if err != nil {
		return err
	}
	b.ratio("front end start to initialize (floor: a Go hello)", x, y, 3)
	return nil
}

func (b *bench) status() (*api.StatusReport, error) {
	out, err := b.command("status").Output()
	if err != nil {
		return nil, err
	}
	var r api.StatusReport
	return &r, json.Unmarshal(out, &r)
}

func (b *bench) control() (*control.Client, error) {
	r, err := b.status()
	if err != nil {
		return nil, err
	}
	return control.Dial(b.ctx, strings.TrimSuffix(r.Socket, ".sock")+".ctl")
}

func (b *bench) transient() error {
	sv, err := b.control()
	if err != nil {
		return err
	}
	defer sv.Close()
	n := 0
	ours := func() (time.Duration, error) {
		n++
		name := fmt.Sprintf("bench-%d.service", n)
		start := time.Now()
		r, _, err := sv.StartTransient(b.ctx, control.TransientParams{Wait: true, Unit: &spec.Unit{
			Name: name, CollectMode: "inactive-or-failed",
			Service: &spec.Service{Type: spec.TypeExec, ExecStart: []spec.Command{{Path: "/bin/true", Args: []string{"/bin/true"}}}, StandardOutput: spec.StdioNull},
		}})
		took := time.Since(start)
		if err == nil && (!r.Unit.ExitKnown || r.Unit.ExitCode != 0) {
			err = fmt.Errorf("it ended as %+v", r.Unit)
		}
		return took, err
	}
	floor := func() (time.Duration, error) {
		start := time.Now()
		err := exec.CommandContext(b.ctx, "/bin/true").Run()
		return time.Since(start), err
	}
	x, y, err := pairs(200, ours, floor)
	if err != nil {
		return err
	}
	b.ratio("transient unit of /bin/true, start to end (floor: fork and exec)", x, y, 1.5)
	return nil
}

// printing writes 16 MiB less one line, which is within the limit of a run.
const printing = `import sys
for _ in range(16 * 1024 - 1): sys.stdout.write("x" * 1023 + "\n")
`

func (b *bench) output() error {
	f, err := b.client()
	if err != nil {
		return err
	}
	code, err := json.Marshal(printing)
	if err != nil {
		return err
	}
	ours := func() (time.Duration, error) {
		start := time.Now()
		line, err := f.call("execute", fmt.Sprintf(`{"code":%s,"wait_ms":0}`, code))
		if err != nil {
			return 0, err
		}
		size := 0
		for {
			r, err := payload(line)
			if err != nil {
				return 0, err
			}
			for _, e := range r.Output {
				size += len(e.Text)
			}
			if api.Terminal(r.State) && !r.HasMore {
				break
			}
			line, err = f.call("poll", fmt.Sprintf(`{"exec_id":%q,"cursor":%d,"wait_ms":30000,"max_bytes":%d}`, r.ExecID, r.Cursor, api.MaxBytes))
			if err != nil {
				return 0, err
			}
		}
		if want := (16*1024 - 1) * 1024; size != want {
			return 0, fmt.Errorf("%d of %d bytes came back", size, want)
		}
		return time.Since(start), nil
	}
	floor := func() (time.Duration, error) {
		cmd := exec.CommandContext(b.ctx, b.python(), "-c", printing)
		out, err := cmd.StdoutPipe()
		if err != nil {
			return 0, err
		}
		start := time.Now()
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		_, err = io.Copy(io.Discard, out)
		return time.Since(start), errors.Join(err, cmd.Wait())
	}
	x, y, err := pairs(3, ours, floor)
	if err != nil {
		return err
	}
	b.ratio("print 16 MiB and page it out by 1 MiB (floor: a raw pipe)", x, y, 0)
	return f.close()
}

// kernel starts a kernel as the supervisor would and plays its manager.
func (b *bench) kernel() error {
	sv, err := b.control()
	if err != nil {
		return err
	}
	unit, err := sv.Show(b.ctx, "kernel.service")
	sv.Close()
	if err != nil {
		return err
	}
	argv := unit.Spec.Service.ExecStart[0]
	socket := filepath.Join(b.top, "k.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return err
	}
	defer l.Close()
	_ = l.SetDeadline(time.Now().Add(time.Minute))
	generation := strings.Repeat("ab", 16)
	env := append(os.Environ(), unit.Spec.Service.Environment...)
	env = append(env, "MYPR_KERNEL_SOCKET="+socket, "INVOCATION_ID="+generation)
	ours := func() (time.Duration, error) {
		cmd := exec.CommandContext(b.ctx, argv.Path)
		cmd.Args, cmd.Dir, cmd.Env, cmd.Stderr = argv.Args, b.dir, env, os.Stderr
		start := time.Now()
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		conn, err := l.AcceptUnix()
		if err == nil {
			err = firstCell(conn, b.dir)
		}
		took := time.Since(start)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if conn != nil {
			conn.Close() // only now: a kernel that lives would connect again
		}
		return took, err
	}
	floor := func() (time.Duration, error) {
		start := time.Now()
		err := exec.CommandContext(b.ctx, b.python(), "-c", "pass").Run()
		return time.Since(start), err
	}
	x, y, err := pairs(20, ours, floor)
	if err != nil {
		return err
	}
	b.ratio("kernel start to first result (floor: python -c pass)", x, y, 3)
	return nil
}

// firstCell plays the manager until the end of one cell.
func firstCell(conn *net.UnixConn, dir string) error {
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	r := wire.NewReader(conn)
	var m wire.FromKernel
	if err := r.Next(&m); err != nil || m.Type != wire.TypeHello {
		return fmt.Errorf("hello: %v %+v", err, m)
	}
	var line []byte
	var err error
	for _, msg := range []any{
		wire.Welcome{Type: wire.TypeWelcome, Protocol: wire.Protocol, Limits: wire.Limits{OutputBytes: api.MaxOutputBytes, EventChars: 16384, CompletedTasks: 128},
			Workspace: dir, Artifacts: filepath.Join(dir, ".mypr", "artifacts")},
		wire.Execute{Type: wire.TypeExecute, ExecID: strings.Repeat("cd", 16), Code: "1+1", ClientID: "bench", ConnectionID: "bench"},
	} {
		if line, err = wire.Encode(line, msg); err != nil {
			return err
		}
	}
	if _, err := conn.Write(line); err != nil {
		return err
	}
	for {
		if err := r.Next(&m); err != nil {
			return err
		}
		if m.Type == wire.TypeEvent && m.Event == wire.EventState && api.Terminal(m.State) {
			if m.State != api.Succeeded {
				return fmt.Errorf("the first cell %s: %s", m.State, m.Error)
			}
			return nil
		}
	}
}

// lifecycle has no floor: what a person waits for.
func (b *bench) lifecycle() error {
	timed := func(args ...string) (time.Duration, error) {
		start := time.Now()
		out, err := b.command(args...).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%q: %w\n%s", args, err, bytes.TrimSpace(out))
		}
		return time.Since(start), err
	}
	var sums [4][]time.Duration
	steps := [][]string{{"exec", "1+1"}, {"reset"}, {"stop"}, {"exec", "1+1"}}
	names := []string{"exec 1+1 in a running session", "reset", "stop, until all is gone", "exec 1+1 with everything still to start"}
	for range 5 {
		for n, args := range steps {
			took, err := timed(args...)
			if err != nil {
				return err
			}
			sums[n] = append(sums[n], took)
		}
	}
	for n, name := range names {
		b.rows = append(b.rows, row{what: name, ours: show(percentile(sums[n], 0.5))})
	}
	return nil
}

// processes are the pids of the running session by role, with a front end of this run.
func (b *bench) processes(f *front) (map[string]int, error) {
	r, err := b.status()
	if err != nil {
		return nil, err
	}
	pids := map[string]int{"supervisor": r.Supervisor.PID, "front end": f.cmd.Process.Pid}
	for _, u := range r.Units {
		if u.MainPID != 0 {
			pids[strings.TrimSuffix(u.Name, ".service")] = u.MainPID
		}
	}
	return pids, nil
}

var roles = []string{"supervisor", "front end", "manager", "kernel"}

func (b *bench) memory() error {
	f, err := b.client()
	if err != nil {
		return err
	}
	if _, err := f.call("execute", `{"code":"1+1","wait_ms":10000}`); err != nil {
		return err
	}
	pids, err := b.processes(f)
	if err != nil {
		return err
	}
	limits := map[string]float64{"supervisor": 15, "front end": 20, "manager": 40}
	for _, role := range roles {
		kib, err := field(fmt.Sprintf("/proc/%d/status", pids[role]), "VmRSS:")
		if err != nil {
			return fmt.Errorf("%s: %w", role, err)
		}
		b.amount("resident memory, "+role, float64(kib)/1024, "MiB", limits[role])
	}
	return f.close()
}

func (b *bench) idle() error {
	const duration = 30 * time.Second
	f, err := b.client()
	if err != nil {
		return err
	}
	if _, err := f.call("execute", `{"code":"1+1","wait_ms":10000}`); err != nil {
		return err
	}
	pids, err := b.processes(f)
	if err != nil {
		return err
	}
	// What the last calls leave to do: a checkpoint, the collector giving memory back.
	settled := time.NewTimer(10 * time.Second)
	defer settled.Stop()
	<-settled.C
	before := map[string]int64{}
	for _, role := range roles {
		if before[role], err = switches(pids[role]); err != nil {
			return fmt.Errorf("%s: %w", role, err)
		}
	}
	over := time.NewTimer(duration)
	defer over.Stop()
	<-over.C
	for _, role := range roles {
		after, err := switches(pids[role])
		if err != nil {
			return fmt.Errorf("%s: %w", role, err)
		}
		b.amount("idle, context switches of "+role, float64(after-before[role])/duration.Seconds(), "/s", 1)
	}
	return f.close()
}

// switches counts the context switches of all threads of a process.
func switches(pid int) (int64, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(tasks) == 0 {
		return 0, fmt.Errorf("process %d is gone", pid)
	}
	var sum int64
	for _, path := range tasks {
		for _, name := range []string{"voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"} {
			n, err := field(path, name)
			if errors.Is(err, os.ErrNotExist) {
				continue // a thread that ended meanwhile
			}
			if err != nil {
				return 0, err
			}
			sum += n
		}
	}
	return sum, nil
}

// field is a number of a /proc status file.
func field(path, name string) (int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", path, name)
}
