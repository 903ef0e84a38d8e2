package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/supervisor/control"
)

// leftovers starts sessions where others left something, and checks watchdogs: what is
// recognised, what is refused with a reason, and that no stranger is ever killed.
type leftovers struct {
	s   *session
	bad int
}

func (v *leftovers) check(what string, ok bool, detail any) {
	verdict := "ok"
	if !ok {
		verdict = fmt.Sprintf("BROKEN: %v", detail)
		broken(what, detail)
		v.bad++
	}
	fmt.Printf("| %-76s | %s\n", what, verdict)
}

func (v *leftovers) run() bool {
	for _, f := range []func() error{v.watchdogs, v.givenUp, v.crash, v.strangers, v.deleted} {
		if err := f(); err != nil {
			broken("leftovers", err)
			v.bad++
		}
	}
	left := v.s.processes()
	v.check("nothing is left", len(left) == 0, left)
	return v.bad == 0
}

func (v *leftovers) dropIn(unit, text string) (remove func(), err error) {
	path := filepath.Join(v.s.dir, ".mypr", "units", unit+".service.d", "test.conf")
	return func() { os.Remove(path) }, os.WriteFile(path, []byte(text), 0o600)
}

func (v *leftovers) watchdogs() error {
	for _, unit := range []string{"manager", "kernel"} {
		remove, err := v.dropIn(unit, "[Service]\nWatchdogSec=4s\n")
		if err != nil {
			return err
		}
		defer remove()
	}
	f, err := v.s.front()
	if err != nil {
		return err
	}
	defer f.end()
	if err := f.init("watchdog"); err != nil {
		return err
	}
	if _, err := must(f, "import time; mark = 1"); err != nil {
		return err
	}
	manager, err := v.s.target("manager.service")
	if err != nil {
		return err
	}
	fd, err := unix.PidfdOpen(manager, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	began := time.Now()
	if err := suspend(manager); err != nil {
		return err
	}
	out, err := must(f, "mark")
	took := time.Since(began)
	v.check("a stopped manager: killed by its watchdog (4 s, not 20), the cell is answered", err == nil && out == "1" && took < 18*time.Second, fmt.Sprint(out, err, took))
	// The answer may still be of the old one: the signal that ends it sets it going.
	if err := died(fd, manager); err != nil {
		return err
	}
	if out, err = must(f, "mark"); err != nil {
		return err
	}
	now, err := v.s.target("manager.service")
	v.check("… by another manager", err == nil && out == "1" && now != manager, fmt.Sprint(out, now, err))
	out, err = must(f, "time.sleep(12); mark")
	v.check("a cell that blocks the loop for three times the kernel's watchdog: no failure", err == nil && out == "1", fmt.Sprint(out, err))
	kernel, err := v.s.target("kernel.service")
	if err != nil {
		return err
	}
	if err := suspend(kernel); err != nil {
		return err
	}
	c, err := f.run("mark", "")
	v.check("a stopped kernel: killed by its watchdog, the cell is lost with the cause", err == nil && c.state == api.Lost && strings.Contains(c.err, "watchdog"), fmt.Sprintf("%v %+v", err, c))
	c, err = f.run("1", "")
	v.check("… and a new generation answers", err == nil && c.state == api.Succeeded, fmt.Sprintf("%v %+v", err, c))

	if out, err := v.s.cli("freeze", "kernel.service"); err != nil {
		return fmt.Errorf("%w %s", err, out)
	}
	frozen := time.Now()
	var r api.ExecResult
	err = f.tool("execute", map[string]any{"code": "'thawed'", "wait_ms": 6000}, &r)
	v.check("a frozen kernel: cells wait, the watchdog leaves it alone", err == nil && r.State != api.Lost && !api.Terminal(r.State) && time.Since(frozen) >= 6*time.Second, fmt.Sprint(r.State, err))
	if out, err := v.s.cli("thaw", "kernel.service"); err != nil {
		return fmt.Errorf("%w %s", err, out)
	}
	err = f.tool("poll", map[string]any{"exec_id": r.ExecID, "wait_ms": 30000, "until_done": true}, &r)
	v.check("… and go on when it is thawed", err == nil && r.State == api.Succeeded, fmt.Sprint(r.State, err))
	f.end()
	_, err = v.s.cli("stop", "--force")
	return err
}

// givenUp: a manager that cannot run takes kernel and jobs with it, and a start by hand
// brings the session back.
func (v *leftovers) givenUp() error {
	f, err := v.s.front()
	if err != nil {
		return err
	}
	defer f.end()
	if err := f.init("given-up"); err != nil {
		return err
	}
	out, err := must(f, "import os; job = await ws.shell.start('sleep 300'); print(os.getpid(), job.status()['pid'])")
	if err != nil {
		return err
	}
	var fds []unix.PollFd
	for _, word := range strings.Fields(out) {
		pid, err := strconv.Atoi(word)
		if err != nil {
			return err
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	manager, err := v.s.target("manager.service")
	if err != nil {
		return err
	}
	limits := filepath.Join(v.s.dir, ".mypr", "units", "manager.service.d", "faults.conf")
	before, err := os.ReadFile(limits)
	if err != nil {
		return err
	}
	if err := os.WriteFile(limits, []byte("[Unit]\nStartLimitIntervalSec=60s\nStartLimitBurst=2\n[Service]\nExecStart=\nExecStart=/bin/false\n"), 0o600); err != nil {
		return err
	}
	if _, err := v.s.cli("units", "reload"); err != nil {
		return err
	}
	if err := kill(manager); err != nil {
		return err
	}
	gone := 0
	for i := range fds {
		for {
			n, err := unix.Poll(fds[i:i+1], 60_000)
			if err == unix.EINTR {
				continue
			}
			gone += n
			break
		}
	}
	v.check("a manager that cannot run is given up: kernel and job are stopped", gone == len(fds), gone)
	text, _ := v.s.cli("status", "--json=false")
	v.check("… and status says why", strings.Contains(text, "the manager was given up: 2 automatic starts within 1m0s were too many"), text)
	if err := os.WriteFile(limits, before, 0o600); err != nil {
		return err
	}
	if _, err := v.s.cli("units", "reload"); err != nil {
		return err
	}
	if _, err := v.s.cli("units", "start", "manager"); err != nil {
		return err
	}
	v.exec("… a start by hand brings the session back")
	f.end()
	_, err = v.s.cli("stop", "--force")
	return err
}

// killed kills the session's processes whose command line has one of the words, until
// there is none; what revives others comes first.
func (v *leftovers) killed(words ...string) {
	for again := true; again; {
		again = false
		for _, word := range words {
			for _, p := range v.s.processes() {
				if !strings.Contains(p, word) {
					continue
				}
				again = true
				pid, _ := strconv.Atoi(strings.Fields(p)[0])
				if err := kill(pid); err != nil && !errors.Is(err, syscall.ESRCH) {
					v.check("killing", false, err)
				}
			}
		}
	}
}

// everything kills all processes of the session, as a power failure would.
func (v *leftovers) everything() { v.killed("mypr-anchor", " supervise ", " manager ", "") }

func (v *leftovers) exec(what string) {
	out, err := v.s.cli("exec", "print(6 * 7)")
	v.check(what, err == nil && strings.TrimSpace(out) == "42", fmt.Sprint(out, err))
}

func (v *leftovers) crash() error {
	v.exec("a fresh start")
	cgroup := v.s.cgroup()
	f, err := v.s.front()
	if err != nil {
		return err
	}
	defer f.end()
	if err := f.init("crash"); err != nil {
		return err
	}
	if _, err := must(f, "import os; mark = os.getpid()"); err != nil {
		return err
	}
	supervisor, err := v.s.target("supervisor")
	if err != nil {
		return err
	}
	for _, p := range v.s.processes() {
		if pid, _ := strconv.Atoi(strings.Fields(p)[0]); strings.Contains(p, "mypr-anchor") {
			if err := kill(pid); err != nil {
				return err
			}
		}
	}
	// The supervisor starts another anchor at once; both die now.
	if err := suspend(supervisor); err != nil {
		return err
	}
	for _, p := range v.s.processes() {
		if pid, _ := strconv.Atoi(strings.Fields(p)[0]); strings.Contains(p, "mypr-anchor") {
			if err := kill(pid); err != nil {
				return err
			}
		}
	}
	began := time.Now()
	if err := kill(supervisor); err != nil {
		return err
	}
	err = v.s.answers()
	took := time.Since(began)
	v.check("supervisor and anchor killed: the manager starts another", err == nil, fmt.Sprint(err, took))
	out, err := must(f, "print(mark == os.getpid())")
	v.check("… memory is kept", err == nil && out == "True", fmt.Sprint(out, err))
	v.killed("mypr-anchor", " supervise ", " manager ")
	out, err = must(f, "print(mark == os.getpid())")
	v.check("supervisor, anchor and manager killed: the front end starts them, memory is kept", err == nil && out == "True", fmt.Sprint(out, err))
	f.end()
	state := filepath.Join(v.s.dir, ".mypr", "supervisor.json")
	v.everything()
	v.exec("everything was killed at once: sockets, locks, records and cgroups are left")
	v.everything()
	// As after a restart of the machine.
	raw, err := os.ReadFile(state)
	if err != nil {
		return err
	}
	line, rest, _ := bytes.Cut(raw, []byte("\n"))
	var h map[string]any
	if err := json.Unmarshal(line, &h); err != nil {
		return err
	}
	h["boot"] = "00000000-0000-0000-0000-000000000000"
	line, err = json.Marshal(h)
	if err != nil {
		return err
	}
	if err := os.WriteFile(state, append(append(line, '\n'), rest...), 0o600); err != nil {
		return err
	}
	v.exec("records of another boot of the machine")
	v.everything()
	if err := os.WriteFile(state, raw[:len(raw)*2/3], 0o600); err != nil {
		return err
	}
	v.exec("a state file that was cut off")
	v.everything()
	if err := os.WriteFile(state, []byte("{}\nnonsense\n"), 0o600); err != nil {
		return err
	}
	v.exec("a state file that is damaged")
	if _, err := v.s.cli("stop", "--force"); err != nil {
		return err
	}
	if cgroup != "" {
		_, err := os.Stat(cgroup)
		v.check("… and no cgroup is left at the end", os.IsNotExist(err), err)
	}
	return nil
}

// stranger is a process that is none of ours.
func stranger() (*exec.Cmd, error) {
	cmd := exec.Command("sleep", "300")
	cmd.Env = []string{}
	return cmd, cmd.Start()
}

func (v *leftovers) strangers() error {
	v.exec("a start for the records")
	control1, runtime, err := v.s.paths()
	if err != nil {
		return err
	}
	cgroup := v.s.cgroup()
	state := filepath.Join(v.s.dir, ".mypr", "supervisor.json")
	raw, err := os.ReadFile(state)
	if err != nil {
		return err
	}
	kernel, err := v.s.target("kernel.service")
	if err != nil {
		return err
	}
	v.everything()
	other, err := stranger()
	if err != nil {
		return err
	}
	defer func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	}()
	alive := func(what string) {
		v.check(what, syscall.Kill(other.Process.Pid, 0) == nil, "it was killed")
	}
	// The kernel's pid names somebody else now.
	raw = bytes.ReplaceAll(raw, []byte(fmt.Sprintf(`"pid":%d,`, kernel)), []byte(fmt.Sprintf(`"pid":%d,`, other.Process.Pid)))
	if err := os.WriteFile(state, raw, 0o600); err != nil {
		return err
	}
	v.exec("a recorded pid that names a stranger now")
	alive("… who is left alone at the start")
	if _, err := v.s.cli("stop", "--force"); err != nil {
		return err
	}
	alive("… and at the stop")

	if cgroup != "" {
		group := filepath.Join(cgroup, "kernel.service-00000000000000000000000000000000")
		if err := os.MkdirAll(group, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(other.Process.Pid)), 0o600); err != nil {
			return err
		}
		v.exec("a cgroup of ours with a process of no known unit")
		alive("… which is left alone at the start")
		log, _ := os.ReadFile(filepath.Join(v.s.dir, ".mypr", "supervisor.log"))
		v.check("… and reported", bytes.Contains(log, []byte("no known unit")), "not in the log")
		if _, err := v.s.cli("stop", "--force"); err != nil {
			return err
		}
		alive("… and at the stop")
		_ = other.Process.Kill()
		_ = other.Wait()
		for {
			err := os.Remove(group)
			if err == nil || !errors.Is(err, syscall.EBUSY) {
				break
			}
		}
		_ = os.Remove(cgroup)
	}

	for _, path := range []string{control1, runtime} {
		if err := os.WriteFile(path, []byte("not a socket"), 0o600); err != nil {
			return err
		}
		out, err := v.s.cli("exec", "1")
		v.check("a file in the place of "+filepath.Ext(path)+": refused by name", err != nil && strings.Contains(err.Error(), filepath.Base(path)), fmt.Sprint(out, err))
		if b, err := os.ReadFile(path); err != nil || string(b) != "not a socket" {
			v.check("… and not touched", false, err)
		}
		os.Remove(path)
		l, err := net.Listen("unix", path)
		if err != nil {
			return err
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false)
		l.Close()
		v.exec("a stale socket in the place of " + filepath.Ext(path))
		if _, err := v.s.cli("stop", "--force"); err != nil {
			return err
		}
	}
	return nil
}

func (v *leftovers) deleted() error {
	v.exec("a start before .mypr is deleted")
	pid, err := v.s.target("supervisor")
	if err != nil {
		return err
	}
	root := filepath.Join(v.s.dir, ".mypr")
	if err := os.RemoveAll(root); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := v.s.command(ctx, "exec", "print(6 * 7)").CombinedOutput()
	v.check(".mypr deleted while it runs: answered or refused with what to do", ctx.Err() == nil && (err == nil && strings.Contains(string(out), "42") || strings.Contains(string(out), "next:")), fmt.Sprintf("%v %s", err, out))
	fmt.Printf("    %s\n", strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", "\n    "))
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := v.s.ask(func(ctx context.Context, c *control.Client) error {
		return c.Shutdown(ctx, control.ShutdownParams{Reason: "test"})
	}); err != nil {
		return fmt.Errorf("pid %d: %w", pid, err)
	}
	for {
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(patience.Milliseconds())); err != unix.EINTR {
			return err
		}
	}
}
