package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// cell runs code in the session; what it prints last is JSON, which goes into v.
func (b *bench) cell(code string, v any) error {
	cmd := b.command("exec", "--", code)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("a cell: %w\n%s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return json.Unmarshal([]byte(lines[len(lines)-1]), v)
}

// shellRun measures a command of ws.shell in turn with one of subprocess in the same kernel:
// as it is, and with its output in the result, as that of ws.shell always is.
func (b *bench) shellRun() error {
	for _, f := range []struct{ name, options string }{
		{"subprocess.run in the same kernel", ""}, {"the same with capture_output", ", capture_output=True"},
	} {
		var r struct{ Ours, Floor float64 }
		err := b.cell(`
import json, statistics, subprocess, time
ours, floor = [], []
for i in range(420):
    t = time.perf_counter()
    await ws.shell.run("true")
    ours.append(time.perf_counter() - t)
    t = time.perf_counter()
    subprocess.run("true", shell=True`+f.options+`)
    floor.append(time.perf_counter() - t)
print(json.dumps({"ours": statistics.median(ours[20:]), "floor": statistics.median(floor[20:])}))
`, &r)
		if err != nil {
			return err
		}
		b.ratio(`await ws.shell.run("true"), p50 (floor: `+f.name+`)`, seconds(r.Ours), seconds(r.Floor), 2)
	}
	return nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// manyJobs measures rates, in batches that take turns with plain os/exec.
func (b *bench) manyJobs() error {
	ours := func(code string, n int) func() (time.Duration, error) {
		code = fmt.Sprintf("import asyncio, json, time\nn = %d\nt = time.perf_counter()\n%s\nprint(json.dumps(time.perf_counter() - t))", n, code)
		return func() (time.Duration, error) {
			var took float64
			err := b.cell(code, &took)
			return seconds(took), err
		}
	}
	run := func() error { return exec.CommandContext(b.ctx, "/bin/true").Run() }
	const burst, row, batches = 200, 2000, 5
	x, y, err := pairs(batches, ours(`for r in await asyncio.gather(*[ws.shell.run(["/bin/true"]) for _ in range(n)]): assert r["returncode"] == 0`, burst),
		func() (time.Duration, error) {
			start := time.Now()
			errs := make([]error, burst)
			var wg sync.WaitGroup
			for i := range errs {
				wg.Go(func() { errs[i] = run() })
			}
			wg.Wait()
			return time.Since(start), errors.Join(errs...)
		})
	if err != nil {
		return err
	}
	b.rate(fmt.Sprintf("%d jobs of /bin/true at once (floor: os/exec)", burst), burst, x, y)
	x, y, err = pairs(batches, ours(`for _ in range(n): assert (await ws.shell.run(["/bin/true"]))["returncode"] == 0`, row/batches),
		func() (time.Duration, error) {
			start := time.Now()
			for range row / batches {
				if err := run(); err != nil {
					return 0, err
				}
			}
			return time.Since(start), nil
		})
	if err != nil {
		return err
	}
	b.rate(fmt.Sprintf("%d jobs of /bin/true in a row (floor: os/exec)", row), row/batches, x, y)
	// What is kept of them is bounded.
	f, err := b.client()
	if err != nil {
		return err
	}
	pids, err := b.processes(f)
	if err != nil {
		return err
	}
	limits := map[string]float64{"supervisor": 15, "manager": 40}
	for _, role := range []string{"supervisor", "manager"} {
		kib, err := field(fmt.Sprintf("/proc/%d/status", pids[role]), "VmRSS:")
		if err != nil {
			return fmt.Errorf("%s: %w", role, err)
		}
		b.amount("resident memory after these jobs, "+role, float64(kib)/1024, "MiB", limits[role])
	}
	return f.close()
}

// rate adds a row of how many of something there were in a second.
func (b *bench) rate(what string, n int, ours, floor time.Duration) {
	show := func(d time.Duration) string { return fmt.Sprintf("%.0f/s", float64(n)/d.Seconds()) }
	b.rows = append(b.rows, row{what: what, ours: show(ours), floor: show(floor), ratio: fmt.Sprintf("%.2fx", float64(ours)/float64(floor))})
}

// jobOutput reads what a job prints by its handle, and the same bytes from a raw pipe.
func (b *bench) jobOutput() error {
	const size = 15 << 20 // within what is kept of one run
	var r struct{ Ours, Floor float64 }
	err := b.cell(fmt.Sprintf(`
import json, os, statistics, subprocess, tempfile, time
size = %d
line = "".join(chr(33 + i %% 90) for i in range(1023)) + "\n"
with tempfile.NamedTemporaryFile("w") as f:
    f.write(line * (size // 1024))
    f.flush()
    ours, floor = [], []
    for batch in range(6):
        t = time.perf_counter()
        job = await ws.shell.start(["cat", f.name])
        got, page = 0, {"cursor": None, "has_more": True, "state": ""}
        while page["has_more"] or page["state"] == "running":
            page = await job.read(page["cursor"], max_bytes=1 << 20)
            got += len(page["output"])
        assert got == size, (got, page)
        a = time.perf_counter() - t
        t = time.perf_counter()
        p = subprocess.Popen(["cat", f.name], stdout=subprocess.PIPE)
        got = 0
        while data := os.read(p.stdout.fileno(), 1 << 20):
            got += len(data)
        p.wait()
        assert got == size
        if batch:
            ours.append(a)
            floor.append(time.perf_counter() - t)
print(json.dumps({"ours": statistics.median(ours), "floor": statistics.median(floor)}))
`, size), &r)
	if err != nil {
		return err
	}
	show := func(s float64) string { return fmt.Sprintf("%.0f MiB/s", size/float64(1<<20)/s) }
	b.rows = append(b.rows, row{what: "output of a job through read() (floor: a raw pipe)", ours: show(r.Ours), floor: show(r.Floor), ratio: fmt.Sprintf("%.1fx", r.Ours/r.Floor)})
	return nil
}

// history measures how questions about the past grow with it: a session that has run 50
// cells beside one that has run 5,000.
func (b *bench) history() error {
	const short, long, rounds, n = 50, 5000, 11, 20
	var sessions [2]*bench
	for i, cells := range []int{short, long} {
		s := &bench{bin: b.bin, env: b.env, ctx: b.ctx, dir: filepath.Join(b.top, fmt.Sprint("h", cells))}
		if err := os.MkdirAll(filepath.Join(s.dir, ".mypr"), 0o700); err != nil {
			return err
		}
		// So that what is asked for is on disk only, in both.
		if err := os.WriteFile(filepath.Join(s.dir, ".mypr", "config.toml"), []byte("[limits]\ncompleted_records = 8\ncompleted_tasks = 8\n"), 0o600); err != nil {
			return err
		}
		defer func() { _ = s.command("stop", "--force").Run() }()
		if out, err := s.command("exec", "1").CombinedOutput(); err != nil {
			return fmt.Errorf("start: %w\n%s", err, out)
		}
		sessions[i] = s
	}
	questions := []string{"poll of an execution that is on disk only", "status", "history.list"}
	var took [2][3][]time.Duration
	var fronts [2]*front
	var old [2][]string // executions of before, by session
	for i, cells := range []int{short, long} {
		f, err := sessions[i].client()
		if err != nil {
			return err
		}
		fronts[i] = f
		for k := range cells {
			line, err := f.call("execute", `{"code":"print(1)","wait_ms":10000}`)
			if err != nil {
				return err
			}
			if k%(cells/short) == 0 {
				r, err := payload(line)
				if err != nil {
					return err
				}
				old[i] = append(old[i], r.ExecID)
			}
		}
		old[i] = old[i][:len(old[i])-10] // those may be in memory
	}
	for round := range rounds {
		for i, f := range fronts {
			var batch [3][]time.Duration
			for k := range n {
				start := time.Now()
				line, err := f.call("poll", fmt.Sprintf(`{"exec_id":%q,"cursor":0}`, old[i][(round*n+k)%len(old[i])]))
				batch[0] = append(batch[0], time.Since(start))
				if err != nil {
					return err
				}
				if r, err := payload(line); err != nil || len(r.Output) != 1 {
					return fmt.Errorf("poll: %v %.300s", err, line)
				}
			}
			var calls [2][]float64
			if err := sessions[i].cell(fmt.Sprintf(`
import json, time
took = [[], []]
for _ in range(%d):
    t = time.perf_counter(); await ws.status(); took[0].append(time.perf_counter() - t)
    t = time.perf_counter(); await ws.history.list(); took[1].append(time.perf_counter() - t)
print(json.dumps(took))`, n), &calls); err != nil {
				return err
			}
			for q, list := range calls {
				for _, s := range list {
					batch[1+q] = append(batch[1+q], seconds(s))
				}
			}
			if round > 0 { // the first warms up
				for q := range batch {
					took[i][q] = append(took[i][q], batch[q]...)
				}
			}
		}
	}
	for q, what := range questions {
		b.ratio(fmt.Sprintf("%s, with a history of %d (floor: of %d)", what, long, short), percentile(took[1][q], 0.5), percentile(took[0][q], 0.5), 1.5)
	}
	return errors.Join(fronts[0].close(), fronts[1].close())
}
