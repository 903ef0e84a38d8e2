package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"mypr/internal/api"
	"mypr/supervisor/control"
	"mypr/test/jobmatrix"
)

// limits checks what only a machine with the cgroup controllers can show: it needs
// containment tier 1. "uml" runs it, and the recovery of an old kernel, in a machine of
// its own.
type limits struct {
	s   *session
	bad int
}

func (v *limits) check(what string, ok bool, detail any) {
	verdict := "ok"
	if !ok {
		verdict = fmt.Sprintf("BROKEN: %v", detail)
		broken(what, detail)
		v.bad++
	}
	fmt.Printf("| %-66s | %s\n", what, verdict)
}

func (v *limits) run() bool {
	if err := v.all(); err != nil {
		broken("limits", err)
		return false
	}
	return v.bad == 0
}

var outOfMemory = regexp.MustCompile(`out of memory \(limit 160 MiB, peak 1[56]\d MiB\)`)

func (v *limits) all() error {
	dir := filepath.Join(v.s.dir, ".mypr", "units", "kernel.service.d")
	if err := os.WriteFile(filepath.Join(dir, "memory.conf"), []byte("[Service]\nMemoryMax=160M\nMemorySwapMax=0\n"), 0o600); err != nil {
		return err
	}
	f, err := v.s.front()
	if err != nil {
		return err
	}
	defer f.end()
	if err := f.init("limits"); err != nil {
		return err
	}
	first, err := f.run("mark = 1", "")
	if err != nil {
		return err
	}
	var info control.Info
	if err := v.s.ask(func(ctx context.Context, c *control.Client) (err error) {
		info, err = c.Info(ctx)
		return err
	}); err != nil {
		return err
	}
	v.check("containment tier 1 with memory, pids and cpu", info.Tier == 1 && len(info.Controllers) >= 3, fmt.Sprintf("%d %v %s", info.Tier, info.Controllers, info.TierReason))
	if _, err := must(f, jobmatrix.Code); err != nil {
		return err
	}
	out, err := must(f, `print(*await matrix(), sep="\n")`)
	v.check("every way to feed a job × every way it can end: nothing is left", err == nil && out == "", fmt.Sprint(out, err))
	manager, err := v.s.target("manager.service")
	if err != nil {
		return err
	}
	c, err := f.run("big = bytearray(400 << 20)", "")
	v.check("kernel at its memory limit: the cell is lost, limit and peak are told", err == nil && c.state == api.Lost && outOfMemory.MatchString(c.err), fmt.Sprintf("%v %s %s", err, c.state, c.err))
	again, err := f.run("'mark' in globals()", "")
	v.check("… a new generation answers, without the memory", err == nil && again.state == api.Succeeded && again.generation != first.generation && strings.TrimSpace(again.output) == "False", fmt.Sprintf("%v %+v", err, again))
	now, err := v.s.target("manager.service")
	v.check("… the manager is untouched", err == nil && now == manager, fmt.Sprint(now, manager, err))

	out, err = must(f, `j = await ws.shell.start("head -c 200M /dev/zero | tail -c 200M > /dev/null", limits={"memory": "48M"})
try:
    await j
except Exception as e: pass
s = j.status(); print(s["state"], s["cause"], s.get("error"))`)
	v.check("job at its memory limit: limit and peak are told", err == nil && strings.HasPrefix(out, "failed oom") && strings.Contains(out, "out of memory (limit 48"), fmt.Sprint(out, err))

	out, err = must(f, `j = await ws.shell.start(["bash", "-c", "for i in $(seq 40); do sleep 30 & done; echo all"], limits={"pids": 12})
r = await j.expect("Resource temporarily unavailable", timeout=25)
print(r["reason"]); _ = await j.cancel()`)
	v.check("job at its limit of tasks: fork fails there", err == nil && out == "match", fmt.Sprint(out, err))

	if _, err = must(f, `j = await ws.shell.start("while :; do :; done", limits={"cpu": 0.2})
import asyncio; await asyncio.sleep(2)`); err != nil {
		return err
	}
	throttled := -1
	err = v.s.ask(func(ctx context.Context, c *control.Client) error {
		list, err := c.List(ctx, true)
		for _, u := range list {
			if strings.HasPrefix(u.Name, "job-") && u.ActiveState == control.Active {
				stat, rerr := os.ReadFile(filepath.Join(u.Cgroup, "cpu.stat"))
				for line := range strings.Lines(string(stat)) {
					if n, ok := strings.CutPrefix(line, "nr_throttled "); ok {
						throttled, _ = strconv.Atoi(strings.TrimSpace(n))
					}
				}
				err = errors.Join(err, rerr)
			}
		}
		return err
	})
	v.check("job with a CPU quota: cpu.stat counts the throttling", err == nil && throttled > 0, fmt.Sprint(throttled, err))
	if _, err = must(f, "await j.cancel()"); err != nil {
		v.check("… and it is cancelled", false, err)
	}

	// What this kernel cannot tell must show as unknown, and nothing may be lost by it.
	if _, err := must(f, "import os; mark = os.getpid()"); err != nil {
		return err
	}
	supervisor, err := v.s.target("supervisor")
	if err != nil {
		return err
	}
	if err := kill(supervisor); err != nil {
		return err
	}
	out, err = must(f, "print(mark == os.getpid())")
	v.check("supervisor killed on this kernel: memory is kept", err == nil && out == "True", fmt.Sprint(out, err))
	if supervisor, err = v.s.target("supervisor"); err != nil {
		return err
	}
	if manager, err = v.s.target("manager.service"); err != nil {
		return err
	}
	if err := errors.Join(kill(supervisor), kill(manager)); err != nil {
		return err
	}
	out, err = must(f, "print(mark == os.getpid())")
	v.check("supervisor and manager killed: memory is kept", err == nil && out == "True", fmt.Sprint(out, err))
	kernel, err := v.s.target("kernel.service")
	if err != nil {
		return err
	}
	if err := kill(kernel); err != nil {
		return err
	}
	deadline := time.Now().Add(patience)
	for c, err = f.run("1", ""); err == nil && c.state != api.Succeeded && time.Now().Before(deadline); c, err = f.run("1", "") {
	}
	logs, _ := os.ReadFile(filepath.Join(v.s.dir, ".mypr", "manager.log"))
	told := strings.Contains(string(logs), "killed by signal 9") || strings.Contains(string(logs), "exit status is not known")
	v.check("adopted kernel killed: the cause is told or said to be unknown", err == nil && c.state == api.Succeeded && told, fmt.Sprintf("%v %+v", err, c))
	f.end()
	if out, err := v.s.cli("stop", "--force"); err != nil {
		return fmt.Errorf("%w %s", err, out)
	}
	left := v.s.processes()
	v.check("nothing is left", len(left) == 0, left)
	return v.container()
}

// container runs the session as the first process of a container: alone in a group that
// is the root of its cgroup namespace. The controllers are for it to hand on, and it may
// not stay in that group when it does.
func (v *limits) container() error {
	const group = "/sys/fs/cgroup/container"
	if err := os.Mkdir(group, 0o755); err != nil {
		return err
	}
	dir, err := os.Open(group)
	if err != nil {
		return err
	}
	defer dir.Close()
	script := fmt.Sprintf("umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; mount -t proc proc /proc; exec %s -C %s supervise", v.s.bin, v.s.dir)
	cmd := exec.Command("unshare", "--cgroup", "--mount", "--propagation", "private", "bash", "-ec", script)
	log, err := os.OpenFile(filepath.Join(v.s.dir, ".mypr", "supervisor.log"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Dir, cmd.Env, cmd.Stderr = v.s.dir, v.s.env, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var info control.Info
	for deadline := time.Now().Add(patience); ; {
		err := v.s.ask(func(ctx context.Context, c *control.Client) (err error) {
			info, err = c.Info(ctx)
			return err
		})
		if err == nil {
			break
		}
		if len(ended) > 0 || time.Now().After(deadline) {
			_ = cmd.Process.Kill()
			return fmt.Errorf("no runtime in a container: %w", err)
		}
	}
	v.check("first process of a container: tier 1", info.Mode == "container" && info.Tier == 1, fmt.Sprintf("%s %d %s", info.Mode, info.Tier, info.TierReason))
	out, err := v.s.cli("exec", "6 * 7")
	v.check("… a cell runs", err == nil && strings.TrimSpace(out) == "42", fmt.Sprint(out, err))
	limit, _ := filepath.Glob(group + "/mypr-*/kernel.service-*/memory.max")
	var b []byte
	if len(limit) == 1 {
		b, err = os.ReadFile(limit[0])
	}
	v.check("… its kernel has the limit", err == nil && strings.TrimSpace(string(b)) == strconv.Itoa(160<<20), fmt.Sprint(limit, string(b), err))
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case err = <-ended:
		v.check("… SIGTERM ends it", err == nil, err)
	case <-time.After(patience):
		v.check("… SIGTERM ends it", false, "it did not end")
		_ = cmd.Process.Kill()
	}
	v.check("… and nothing is left", len(v.s.processes()) == 0, v.s.processes())
	return nil
}

// umlInit is the first process of the machine.
const umlInit = `#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp/home TMPDIR=/tmp GOMAXPROCS=2
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs -o mode=755 t /run; mount -t tmpfs -o mode=1777 t /tmp
mount -t devtmpfs dev /dev; mkdir -p /dev/shm /dev/pts; mount -t tmpfs -o mode=1777 t /dev/shm; mount -t devpts pts /dev/pts; mkdir -p /tmp/home
mount -t cgroup2 cg /sys/fs/cgroup
echo "+memory +pids +cpu" > /sys/fs/cgroup/cgroup.subtree_control
ip link set lo up 2>/dev/null
echo "UML-BEGIN $(uname -r)"
%s -bin %s limits; echo "UML-RC=$?"
[ -n "%s" ] && for l in /tmp/faults-*/ws/.mypr/*.log; do echo "== $l"; tail -n 25 $l; done
echo o > /proc/sysrq-trigger; sleep 5
`

// uml boots User-Mode Linux (package user-mode-linux) on this machine's files, read-only,
// and runs limits there.
func uml(bin string, verbose string) bool {
	linux, err := exec.LookPath("linux.uml")
	if err != nil {
		broken("uml: there is no linux.uml: apt-get install user-mode-linux")
		return false
	}
	// Not below /tmp, which is another one there.
	dir, err := os.MkdirTemp("/var/tmp", "faults-uml-")
	if err != nil {
		fatal(err)
	}
	defer os.RemoveAll(dir)
	self, err := os.Executable()
	if err != nil {
		fatal(err)
	}
	for from, to := range map[string]string{self: "faults", bin: "mypr-mcp"} {
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, to), b, 0o755)
		}
		if err != nil {
			fatal(err)
		}
	}
	init := filepath.Join(dir, "init")
	script := fmt.Sprintf(umlInit, filepath.Join(dir, "faults"), filepath.Join(dir, "mypr-mcp"), verbose)
	if err := os.WriteFile(init, []byte(script), 0o755); err != nil {
		fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	// A pid namespace, so that killing unshare leaves nothing of it.
	cmd := exec.CommandContext(ctx, "unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc", linux, "mem=1024M", "rootfstype=hostfs", "rootflags=/", "ro",
		"init="+init, "con=null", "con0=null,fd:1", "con1=null", "ssl=null", "random.trust_cpu=1", "quiet")
	cmd.Env = append(os.Environ(), "TMPDIR=/dev/shm")
	out, err := cmd.CombinedOutput()
	text := string(out)
	if i := strings.Index(text, "UML-BEGIN"); i >= 0 {
		text = text[i:]
	}
	fmt.Println(strings.ReplaceAll(text, "\r", ""))
	if !strings.Contains(text, "UML-RC=0") {
		broken("uml: failed:", err, ctx.Err())
		return false
	}
	return true
}
