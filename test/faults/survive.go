package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"mypr/internal/api"
)

// survive checks what lives through each fault, one after the other in one session:
// memory, a cell that awaits, a shell on a pty with a half-typed line, and a job in the
// middle of its output.
type survive struct {
	s     *session
	other string // the same program with another version string
	sleep int    // seconds that the awaiting cell sleeps
	bad   int
}

const otherVersion = "other-version"

func (v *survive) check(fault, what string, ok bool, detail any) {
	verdict := "survived"
	if !ok {
		verdict = fmt.Sprintf("BROKEN: %v", detail)
		broken(fault, what, detail)
		v.bad++
	}
	fmt.Printf("| %-28s | %-34s | %s\n", fault, what, verdict)
}

func (v *survive) run() bool {
	if err := v.all(); err != nil {
		broken("survive", err)
		return false
	}
	return v.bad == 0
}

// must runs a cell that has to succeed.
func must(f *front, code string) (string, error) {
	c, err := f.run(code, "")
	if err == nil && c.state != api.Succeeded {
		err = fmt.Errorf("cell %s: %s %s", c.state, c.err, c.output)
	}
	return strings.TrimSpace(c.output), err
}

func (v *survive) all() error {
	f, err := v.s.front()
	if err != nil {
		return err
	}
	defer f.end()
	if err := f.init("survivor"); err != nil {
		return err
	}
	if _, err = must(f, `import asyncio, os
memory = {"big": list(range(1000))}
shell = await ws.shell.start(["sh"], pty=True, env={"PS1": "", "PATH": os.environ["PATH"]})
job = await ws.shell.start("i=0; while [ $i -lt 2000 ]; do i=$((i+1)); echo line $i; sleep 0.01; done")
await shell.write("echo beg")
print(os.getpid())`); err != nil {
		return err
	}
	var sleeping api.ExecResult
	began := time.Now()
	if err := f.tool("execute", map[string]any{"code": fmt.Sprintf("import asyncio\nawait asyncio.sleep(%d)\nprint('slept', len(memory['big']))", v.sleep), "wait_ms": 0}, &sleeping); err != nil {
		return err
	}
	generation := sleeping.Generation
	pids, err := must(f, "print(os.getpid(), shell.status()['pid'], job.status()['pid'])")
	if err != nil {
		return err
	}
	fmt.Printf("| %-28s | %-34s | %s\n|%s|%s|%s\n", "fault", "what", "", strings.Repeat("-", 30), strings.Repeat("-", 36), strings.Repeat("-", 10))
	word := "beg"
	for i, fault := range []string{"manager killed", "supervisor killed", "both killed", "restart --keep-kernel", "both killed, again", "restart --keep-kernel, back"} {
		if err := v.fault(fault); err != nil {
			v.check(fault, "the fault itself", false, err)
			continue
		}
		out, err := must(f, "print(len(memory['big']), os.getpid(), shell.status()['pid'], job.status()['pid'])")
		v.check(fault, "memory, kernel, shell and job", err == nil && out == "1000 "+pids, fmt.Sprint(out, err))
		next := fmt.Sprintf("half%d", i)
		out, err = must(f, fmt.Sprintf(`await shell.write("un%d\necho %s")
r = await shell.expect("%sun%d\r\n")
print(r["reason"])`, i, next, word, i))
		v.check(fault, "half-typed line of the pty shell", err == nil && out == "match", fmt.Sprint(out, err))
		word = next
		var r api.ExecResult
		err = f.tool("poll", map[string]any{"exec_id": sleeping.ExecID, "wait_ms": 0}, &r)
		v.check(fault, "cell that awaits", err == nil && (r.State == "running" || time.Since(began) > time.Duration(v.sleep)*time.Second) && r.ExecutionGeneration == generation, fmt.Sprint(r.State, err))
		out, err = must(f, "print(job.status()['state'])")
		v.check(fault, "job in mid-output", err == nil && (out == "running" || out == "succeeded"), fmt.Sprint(out, err))
	}
	c, err := f.run("await job; print(job.output(), end='')", "")
	var want strings.Builder
	for n := 1; n <= 2000; n++ {
		fmt.Fprintf(&want, "line %d\n", n)
	}
	v.check("all of them", "every line of the job, once", err == nil && c.output == want.String(), fmt.Sprintf("%v %s: %d of %d bytes", err, c.err, len(c.output), want.Len()))
	var r api.ExecResult
	for !api.Terminal(r.State) {
		r = api.ExecResult{}
		if err := f.tool("poll", map[string]any{"exec_id": sleeping.ExecID, "wait_ms": 30000, "until_done": true}, &r); err != nil {
			return err
		}
	}
	v.check("all of them", "the cell that awaits has ended well", r.State == api.Succeeded && len(r.Output) > 0 && r.Output[0].Text == "slept 1000\n", fmt.Sprint(r.State, r.Error, r.Output))
	if _, err := must(f, "await shell.write('\\nexit\\n'); await shell"); err != nil {
		v.check("all of them", "the shell ends", false, err)
	}
	cgroup := v.s.cgroup()
	f.end()
	if out, err := v.s.cli("stop"); err != nil {
		return fmt.Errorf("%w %s", err, out)
	}
	if left := v.s.processes(); len(left) > 0 {
		v.check("stop", "nothing is left", false, left)
	}
	if _, err := os.Stat(cgroup); cgroup != "" && err == nil {
		v.check("stop", "no cgroup is left", false, cgroup)
	}
	return nil
}

func (v *survive) fault(kind string) error {
	supervisor, err := v.s.target("supervisor")
	if err != nil {
		return err
	}
	manager, err := v.s.target("manager.service")
	if err != nil {
		return err
	}
	switch kind {
	case "manager killed":
		return kill(manager)
	case "supervisor killed":
		return kill(supervisor)
	case "both killed", "both killed, again":
		return errors.Join(kill(supervisor), kill(manager))
	}
	want, bin := otherVersion, v.other
	if strings.HasSuffix(kind, "back") {
		want, bin = "", v.s.bin
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := v.s.command(ctx, "restart", "--keep-kernel", "--json")
	cmd.Path = bin
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("restart: %w %s %s", err, out, errOut.String())
	}
	var r api.RestartResult
	if err := json.Unmarshal(out, &r); err != nil {
		return err
	}
	if want != "" && r.NewVersion != want || r.NewVersion == r.OldVersion || r.OldGeneration != r.NewGeneration {
		return fmt.Errorf("the record says %s", out)
	}
	return nil
}
