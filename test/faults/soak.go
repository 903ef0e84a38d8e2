package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"mypr/internal/api"
	"mypr/internal/client"
)

// soak is one run: clients that write a ledger, jobs beside them, and faults.
type soak struct {
	s       *session
	faults  int
	kernels bool // kill the kernel too
	seed    uint64

	rnd    *rand.Rand
	slots  [clients]slot
	ending atomic.Bool
	// Calls that were answered with the advice to send them again with their request id:
	// so many faults hit one of them.
	repeated atomic.Int64
	unbegun  atomic.Int64 // jobs whose very start a fault hit
	ledger   string

	mu         sync.Mutex // guards the fields below
	submitted  int
	cells      map[string]cell // by number
	problems   []string
	kernelDead []time.Time
	slowest    map[string]time.Duration
	count      map[string]int
	jobs       int
}

const clients = 4

func (k *soak) problem(format string, args ...any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	text := fmt.Sprintf(format, args...)
	k.problems = append(k.problems, text)
	broken(time.Now().Format("soak, 15:04:05.000"), text)
}

func (k *soak) lastKernelDeath() time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.kernelDead) == 0 {
		return time.Time{}
	}
	return k.kernelDead[len(k.kernelDead)-1]
}

// client runs cells until the end; when its front end dies it starts another, binds
// its client id again and sends what was not answered again, with the same request id.
func (k *soak) client(n int, wg *sync.WaitGroup) {
	defer wg.Done()
	rnd := rand.New(rand.NewPCG(k.seed, uint64(n)))
	id := fmt.Sprintf("soak-%d", n)
	var f *front
	defer func() {
		if f != nil {
			f.end()
		}
	}()
	connect := func() bool {
		if f != nil {
			f.end()
		}
		for range 20 {
			var err error
			if f, err = k.s.front(); f != nil {
				k.slots[n].set(f)
			}
			if err == nil {
				if err = f.init(id); err == nil {
					return true
				}
			}
			if f != nil {
				f.end()
			}
			if !errors.Is(err, errFrontEnded) {
				k.problem("%s cannot connect: %v", id, err)
				return false
			}
		}
		k.problem("%s: its front ends die", id)
		return false
	}
	if !connect() {
		return
	}
	for i := 0; !k.ending.Load(); i++ {
		number := fmt.Sprintf("%d-%d", n, i)
		pad := strings.Repeat("x", rnd.IntN(3000))
		pause := float64(rnd.IntN(60)) / 1000
		code := fmt.Sprintf(`import os, asyncio
fd = os.open(%q, os.O_WRONLY | os.O_APPEND)
os.write(fd, b"%s\n"); os.close(fd)
print("begin %s %s")
await asyncio.sleep(%g)
print("end %s")`, k.ledger, number, number, pad, pause, number)
		want := fmt.Sprintf("begin %s %s\nend %s\n", number, pad, number)
		k.mu.Lock()
		k.submitted++
		k.mu.Unlock()
		began := time.Now()
		var c cell
		for {
			var err error
			if c, err = f.run(code, "r"+number); err == nil {
				break
			}
			if told(err) {
				k.repeated.Add(1)
				continue
			}
			if !errors.Is(err, errFrontEnded) {
				k.problem("cell %s: %v", number, err)
				c.state = "error"
				break
			}
			if !connect() {
				return
			}
		}
		explained := k.kernels && k.lastKernelDeath().After(began.Add(-30*time.Second))
		switch {
		case c.state == api.Succeeded && c.output != want:
			k.problem("cell %s: output is %d bytes, not %d: %.80q", number, len(c.output), len(want), c.output)
			c.state = "incomplete"
		case c.state == api.Succeeded, explained:
		default:
			k.problem("cell %s: %s: %s", number, c.state, c.err)
		}
		k.mu.Lock()
		k.cells[number] = c
		k.mu.Unlock()
	}
}

// told reports whether an answer says to send the same call again.
func told(err error) bool {
	var t *toolError
	return errors.As(err, &t) && strings.Contains(t.text, "it will not run twice")
}

// job starts shell commands through Python that write slowly, and checks what they
// wrote: the jobs live through everything but their own end.
func (k *soak) job(wg *sync.WaitGroup) {
	defer wg.Done()
	f, err := k.s.front()
	if err == nil {
		err = f.init("soak-jobs")
	}
	if err != nil {
		k.problem("jobs: %v", err)
		return
	}
	defer f.end()
	for i := 0; !k.ending.Load(); i++ {
		c, err := f.run(fmt.Sprintf(`_ids = [(await ws.shell.start("for i in $(seq 100); do echo line %d-$i; sleep 0.02; done; echo done")).id for _ in range(2)]; print(*_ids)`, i), "")
		if told(err) {
			continue
		}
		if err != nil || c.state != api.Succeeded {
			if err != nil || !k.kernels {
				k.problem("jobs: start: %v %s %s", err, c.state, c.err)
				return
			}
			continue
		}
		var want strings.Builder
		for n := 1; n <= 100; n++ {
			fmt.Fprintf(&want, "line %d-%d\n", i, n)
		}
		want.WriteString("done\n")
		for _, id := range strings.Fields(c.output) {
			var r cell
			for try := 0; ; try++ {
				r, err = f.run(fmt.Sprintf("_j = await ws.tasks.attach(%q); await _j; print(_j.status()['state'], _j.output(), sep='\\n', end='')", id), "")
				if told(err) {
					continue
				}
				// With kernels that die the cell that asks may be lost as well, and asks again.
				if err != nil || r.state == api.Succeeded || !k.kernels || try > 20 || r.state != api.Lost && strings.Contains(r.err, " lost: ") {
					break
				}
			}
			switch state, output, _ := strings.Cut(r.output, "\n"); {
			case err == nil && strings.Contains(r.err, "it never began, or ended unseen"): // the fault hit its start
				k.unbegun.Add(1)
				continue
			case err != nil || r.state != api.Succeeded:
				k.problem("job %s: %v %s %s", id, err, r.state, r.err)
			case state != "succeeded":
				k.problem("job %s ended %s", id, state)
			case output != want.String():
				k.problem("job %s: output is %d bytes, not %d: …%.100q", id, len(output), want.Len(), output[max(0, len(output)-100):])
			}
			k.mu.Lock()
			k.jobs++
			k.mu.Unlock()
		}
	}
}

// probe is a client of its own that tells when the session answers again.
func (k *soak) probe(c *client.Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := c.Status(ctx, api.StatusParams{})
	return err
}

func (k *soak) pick() string {
	list := []string{"manager", "manager", "supervisor", "supervisor", "both", "front end", "front end", "restart", "stop manager", "stop supervisor", "stop front end"}
	if k.kernels {
		list = append(list, "kernel", "kernel", "kernel", "all three")
	}
	return list[k.rnd.IntN(len(list))]
}

// fault does one. The targets are looked up first: while they are down nobody tells.
func (k *soak) fault(kind string) error {
	pids := map[string]int{}
	need := map[string][]string{
		"manager": {"manager.service"}, "stop manager": {"manager.service"}, "supervisor": {"supervisor"}, "stop supervisor": {"supervisor"},
		"both": {"supervisor", "manager.service"}, "kernel": {"kernel.service"}, "all three": {"supervisor", "manager.service", "kernel.service"},
	}[kind]
	for _, name := range need {
		pid, err := k.s.target(name)
		if err != nil {
			return nil // it is between two lives just now
		}
		pids[name] = pid
	}
	if pids["kernel.service"] != 0 {
		k.mu.Lock()
		k.kernelDead = append(k.kernelDead, time.Now())
		k.mu.Unlock()
	}
	pause := time.Duration(50+k.rnd.IntN(450)) * time.Millisecond
	stop := func(signal func(syscall.Signal) error) error {
		err := signal(syscall.SIGSTOP)
		time.Sleep(pause) // the fault itself: stopped for a while
		return errors.Join(err, signal(syscall.SIGCONT))
	}
	switch kind {
	case "front end":
		return k.slots[k.rnd.IntN(clients)].signal(syscall.SIGKILL)
	case "stop front end":
		return stop(k.slots[k.rnd.IntN(clients)].signal)
	case "stop manager", "stop supervisor":
		return stop(func(sig syscall.Signal) error { return syscall.Kill(pids[need[0]], sig) })
	case "restart":
		_, err := k.s.cli("restart", "--keep-kernel")
		return err
	}
	var errs []error
	for _, name := range need {
		if err := syscall.Kill(pids[name], syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (k *soak) run() bool {
	k.rnd = rand.New(rand.NewPCG(k.seed, 99))
	k.cells, k.slowest, k.count = map[string]cell{}, map[string]time.Duration{}, map[string]int{}
	k.ledger = filepath.Join(k.s.root, "ledger")
	if err := os.WriteFile(k.ledger, nil, 0o600); err != nil {
		k.problem("%v", err)
		return false
	}
	if _, err := k.s.cli("exec", "0"); err != nil {
		k.problem("%v", err)
		return false
	}
	cgroup := k.s.cgroup()
	var wg sync.WaitGroup
	for n := range clients {
		wg.Add(1)
		go k.client(n, &wg)
	}
	wg.Add(1)
	go k.job(&wg)

	_, runtime, err := k.s.paths()
	if err != nil {
		k.problem("%v", err)
	}
	probe := client.New(client.Options{Ensure: func(context.Context) (string, error) { return runtime, nil }, Kind: "cli", Name: "probe", Passive: true})
	began := time.Now()
	for i := 0; i < k.faults && len(k.problems) < 20; i++ {
		kind := k.pick()
		at := time.Now()
		if err := k.fault(kind); err != nil {
			k.problem("fault %d, %s: %v", i, kind, err)
		}
		if strings.HasPrefix(kind, "stop ") || kind == "restart" {
			at = time.Now()
		}
		k.count[kind]++
		if k.rnd.IntN(8) > 0 { // now and then the next fault comes before the recovery
			if err := k.probe(probe); err != nil {
				k.problem("after fault %d, %s: %v", i, kind, err)
			}
			k.slowest[kind] = max(k.slowest[kind], time.Since(at))
		}
		time.Sleep(time.Duration(k.rnd.IntN(300)) * time.Millisecond) // lets the clients work between faults
	}
	elapsed := time.Since(began)
	k.ending.Store(true)
	wg.Wait()
	probe.Close()
	if out, err := k.s.cli("stop", "--force"); err != nil {
		k.problem("%v %s", err, out)
	}
	return k.report(elapsed, cgroup)
}

// report counts and prints the table; it is true when everything is as promised.
func (k *soak) report(elapsed time.Duration, cgroup string) bool {
	raw, err := os.ReadFile(k.ledger)
	if err != nil {
		k.problem("%v", err)
	}
	times := map[string]int{}
	for line := range strings.Lines(string(raw)) {
		times[strings.TrimSpace(line)]++
	}
	var once, twice, unrun, lost, incomplete int
	for number, c := range k.cells {
		switch n := times[number]; {
		case n > 1:
			twice++
			k.problem("cell %s ran %d times", number, n)
		case n == 1:
			once++
		case c.state == api.Succeeded:
			unrun++
			k.problem("cell %s is said to have succeeded and did not run", number)
		}
		if c.state == "incomplete" {
			incomplete++
		} else if c.state != api.Succeeded {
			lost++
		}
	}
	if len(k.cells) != k.submitted {
		k.problem("%d cells were submitted, %d answered", k.submitted, len(k.cells))
	}
	left := k.s.processes()
	groups := 0
	if cgroup != "" {
		_ = filepath.WalkDir(cgroup, func(_ string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				groups++
			}
			return nil
		})
	}
	if len(left) > 0 {
		k.problem("processes left: %s", strings.Join(left, "; "))
	}
	if groups > 0 {
		k.problem("cgroups left below %s: %d", cgroup, groups)
	}
	var b bytes.Buffer
	row := func(name string, value any) { fmt.Fprintf(&b, "| %-38s | %9v |\n", name, value) }
	mode := "kernel kept"
	if k.kernels {
		mode = "kernel killed too"
	}
	fmt.Fprintf(&b, "\n| %-38s | %9s |\n|%s|%s|\n", "soak, "+mode, "seed "+strconv.FormatUint(k.seed%10000, 10), strings.Repeat("-", 40), strings.Repeat("-", 11))
	total := 0
	for _, n := range k.count {
		total += n
	}
	row("faults", total)
	row("seconds", int(elapsed.Seconds()))
	row("cells submitted", k.submitted)
	row("cells run once", once)
	row("cells run twice", twice)
	row("cells said to have run that did not", unrun)
	if k.kernels {
		row("cells lost with their kernel", lost)
	} else {
		row("cells lost", lost)
	}
	row("cells with output missing", incomplete)
	row("calls told to be sent again", k.repeated.Load())
	row("jobs complete", k.jobs)
	row("jobs that a fault kept from starting", k.unbegun.Load())
	row("processes left", len(left))
	row("cgroups left", groups)
	for _, kind := range slices.Sorted(maps.Keys(k.slowest)) {
		row(fmt.Sprintf("slowest recovery: %s (%d)", kind, k.count[kind]), k.slowest[kind].Round(time.Millisecond))
	}
	row("broken promises", len(k.problems))
	fmt.Print(b.String())
	return len(k.problems) == 0
}
