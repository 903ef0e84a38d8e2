package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// computes is how long a cell keeps the loop from turning.
const computes = 10 * time.Second

// calls measures file calls from a cell, each against what a program would do without
// us and from the same kernel; then the manager's share of each, alone and while another
// cell computes without a turn.
func (b *bench) calls() error {
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return err
	}
	src := filepath.Join(strings.TrimSpace(string(goroot)), "src")
	if err := os.WriteFile(filepath.Join(b.dir, "page"), []byte(strings.Repeat("a line of text\n", 1<<16)), 0o644); err != nil {
		return err
	}
	var r map[string]struct{ Ours, Floor float64 }
	err = b.cell(fmt.Sprintf(`
import asyncio, hashlib, json, os, statistics, subprocess, time
src = %q
os.makedirs("tree", exist_ok=True)
for i in range(2000):
    os.makedirs(f"tree/{i %% 26}", exist_ok=True)
    open(f"tree/{i %% 26}/{i}", "w").write("x")
open(".gitignore", "w").write(".mypr/\n")
for args in (["init", "-q"], ["add", "-A"], ["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "x"]):
    subprocess.run(["git", *args], check=True)
def read():
    data = open("page", "rb").read()
    return hashlib.sha256(data).hexdigest(), data.decode()
kinds = {
    "fs.search": (lambda: ws.fs.search("func .*Reader", paths=src), lambda: subprocess.run(["rg", "--no-config", "-n", "-e", "func .*Reader", src], stdout=subprocess.PIPE), 7),
    "fs.read": (lambda: ws.fs.read("page", max_bytes=1 << 20), read, 30),
    "git.status": (lambda: ws.git.status(), lambda: subprocess.run(["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "-z"], stdout=subprocess.PIPE), 15),
    "fs.stat": (lambda: ws.fs.stat("page"), lambda: os.lstat("page"), 100),
}
result = {}
for name, (ours, floor, n) in kinds.items():
    a, f = [], []
    for i in range(n + 1):
        t = time.perf_counter()
        await ours()
        a.append(time.perf_counter() - t)
        t = time.perf_counter()
        floor()
        f.append(time.perf_counter() - t)
    result[name] = {"ours": statistics.median(a[1:]), "floor": statistics.median(f[1:])}
here, go = asyncio.Event(), asyncio.Event()
print(json.dumps(result))
`, src), &r)
	if err != nil {
		return err
	}
	for _, c := range []struct {
		method, what string
		add          time.Duration // over 1.3 times the floor; 0: no target
	}{
		{"fs.search", "ws.fs.search of Go's source, p50 (floor: rg)", 10 * time.Millisecond},
		{"fs.read", "ws.fs.read of 1 MiB, p50 (floor: open, read, sha256, decode)", 0},
		{"git.status", "ws.git.status of 2000 files, p50 (floor: git status)", 10 * time.Millisecond},
		{"fs.stat", "ws.fs.stat, p50 (floor: os.lstat)", 0},
	} {
		ours, floor := seconds(r[c.method].Ours), seconds(r[c.method].Floor)
		b.ratio(c.what, ours, floor, 0)
		if c.add > 0 {
			last := &b.rows[len(b.rows)-1]
			last.target, last.mark = fmt.Sprintf("<= 1.3x + %v", c.add), mark(ours <= floor*13/10+c.add)
		}
	}
	if err := b.shares("alone"); err != nil {
		return err
	}
	// The calls of one cell are sent, then another one computes.
	waiting := b.command("exec", "--", `
here.set()
await go.wait()
_ = await asyncio.gather(*(ours() for ours, _, n in kinds.values() for _ in range(n)))
`)
	waiting.Stderr = os.Stderr
	if err := waiting.Start(); err != nil {
		return err
	}
	var took float64
	err = b.cell(fmt.Sprintf(`
await here.wait()
go.set()
for _ in range(3):
    await asyncio.sleep(0)
t = time.perf_counter()
while time.perf_counter() - t < %v:
    pass
print(time.perf_counter() - t)
`, computes.Seconds()), &took)
	if werr := waiting.Wait(); err == nil {
		err = werr
	}
	if err != nil {
		return err
	}
	return b.shares(fmt.Sprintf("while a cell computes %v", computes))
}

// shares adds what the manager says that the calls cost it, and has the next manager
// begin from nothing.
func (b *bench) shares(when string) error {
	r, err := b.status()
	if err != nil {
		return err
	}
	if r.Status == nil {
		return fmt.Errorf("no manager answers: %s", r.Problem)
	}
	for _, c := range r.Status.Calls {
		if strings.HasPrefix(c.Method, "fs.") || strings.HasPrefix(c.Method, "git.") {
			ms := func(x float64) string { return show(time.Duration(x * float64(time.Millisecond))) }
			b.rows = append(b.rows, row{what: fmt.Sprintf("the manager's share of %s, %s: p50, p99 of %d", c.Method, when, c.Count), ours: ms(c.P50MS) + ", " + ms(c.P99MS)})
		}
	}
	out, err := b.command("units", "restart", "manager").CombinedOutput()
	if err != nil {
		return fmt.Errorf("restart of the manager: %w\n%s", err, out)
	}
	return nil
}
