package supervisor_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"mypr/internal/rpc"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

func cmd(args ...string) spec.Command { return spec.Command{Path: args[0], Args: args} }

func TestTransientTrue(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		r := e.transient(&spec.Unit{Name: "true.service", Service: &spec.Service{Type: spec.TypeExec, ExecStart: []spec.Command{{Path: "/bin/true"}}}})
		if r.Result != "done" {
			t.Fatalf("start: %+v", r)
		}
		st := e.wait("true.service", r.Unit.InvocationID)
		if st.ActiveState != control.Inactive || st.Result != "success" || !st.ExitKnown {
			t.Errorf("after its end: %+v", st)
		}
	})
}

func TestNotifyService(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		u := role("n.service", "notify")
		u.Service.Type = spec.TypeNotify
		u.WantedBy = []string{"default.target"}
		e := start(t, tier, u)
		st := e.status("n.service")
		if st.SubState != "running" || st.StatusText != "up" || st.MainPID == 0 {
			t.Fatalf("not up: %+v", st)
		}
		r, err := e.c.Stop(e.ctx, control.JobParams{Name: "n.service"})
		e.must(err)
		if r.Result != "done" || r.Unit.ActiveState != control.Inactive || alive(st.MainPID) {
			t.Errorf("stop: %+v", r)
		}
	})
}

func TestNotifyThatNeverComes(t *testing.T) {
	e := start(t, 2)
	u := shell("n.service", "exec sleep 1000")
	u.Service.Type = spec.TypeNotify
	u.Service.TimeoutStartSec = 50 * time.Millisecond
	if r := e.transient(u); r.Result != "timeout" || r.Unit.Result != "timeout" || r.Unit.ActiveState != "failed" {
		t.Errorf("%+v", r)
	}
	u = shell("p.service", "exit 0")
	u.Service.Type = spec.TypeNotify
	if r := e.transient(u); r.Result != "failed" || r.Unit.Result != "protocol" {
		t.Errorf("ended without READY: %+v", r)
	}
	u = shell("x.service", "exit 7")
	u.Service.Type = spec.TypeNotify
	if r := e.transient(u); r.Result != "failed" || r.Unit.Result != "exit-code" || r.Unit.ExitCode != 7 {
		t.Errorf("failed before READY: %+v", r)
	}
}

func TestExecFailure(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		umask := uint32(0o77)
		for _, helper := range []bool{false, true} {
			u := &spec.Unit{Name: "x.service", Service: &spec.Service{Type: spec.TypeExec, ExecStart: []spec.Command{cmd("/no/such/program")}}}
			if helper {
				u.Service.UMask = &umask
			}
			r := e.transient(u)
			if r.Result != "failed" || r.Unit.ActiveState != "failed" || r.Unit.ExitCode != 203 || !strings.Contains(r.Unit.Error, "/no/such/program") || !strings.Contains(r.Unit.Error, "no such file") {
				t.Errorf("helper %v: %+v", helper, r)
			}
		}
		u := shell("d.service", "true")
		u.Service.WorkingDirectory = "/no/such/dir"
		if r := e.transient(u); r.Result != "failed" || !strings.Contains(r.Unit.Error, "WorkingDirectory=") {
			t.Errorf("working directory: %+v", r)
		}
	})
}

func TestOneshot(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		out := filepath.Join(e.dir, "out")
		sh := func(s string) spec.Command { return cmd("/bin/sh", "-c", s+" >>"+out) }
		u := &spec.Unit{Name: "o.service", Service: &spec.Service{
			Type:            spec.TypeOneshot,
			ExecStartPre:    []spec.Command{sh("echo pre"), {Path: "/bin/false", IgnoreFailure: true}},
			ExecStart:       []spec.Command{sh("echo one"), sh("echo two")},
			ExecStartPost:   []spec.Command{sh("echo post")},
			ExecStop:        []spec.Command{sh("echo stop main=$MAINPID")},
			ExecStopPost:    []spec.Command{sh("echo stop-post $SERVICE_RESULT $EXIT_CODE $EXIT_STATUS")},
			RemainAfterExit: true,
		}}
		for _, c := range [][]spec.Command{u.Service.ExecStop, u.Service.ExecStopPost} {
			for i := range c {
				c[i].NoExpand = true
			}
		}
		if r := e.transient(u); r.Result != "done" || r.Unit.SubState != "exited" {
			t.Fatalf("start: %+v", r)
		}
		if r, err := e.c.Stop(e.ctx, control.JobParams{Name: "o.service"}); err != nil || r.Result != "done" {
			t.Fatalf("stop: %+v %v", r, err)
		}
		b, _ := os.ReadFile(out)
		want := "pre\none\ntwo\npost\nstop main=\nstop-post success exited 0\n"
		if string(b) != want {
			t.Errorf("ran\n%swant\n%s", b, want)
		}

		u = &spec.Unit{Name: "f.service", Service: &spec.Service{Type: spec.TypeOneshot, ExecStart: []spec.Command{cmd("/bin/sh", "-c", "exit 3"), sh("echo never")}}}
		if r := e.transient(u); r.Result != "failed" || r.Unit.ExitCode != 3 || r.Unit.Result != "exit-code" {
			t.Errorf("failing oneshot: %+v", r)
		}
	})
}

func TestStartPreAndPostFailures(t *testing.T) {
	e := start(t, 2)
	u := shell("pre.service", "echo must not run >&2")
	u.Service.ExecStartPre = []spec.Command{cmd("/bin/sh", "-c", "exit 4")}
	if r := e.transient(u); r.Result != "failed" || r.Unit.Result != "exit-code" || !strings.Contains(r.Unit.Error, "exit status 4") || r.Unit.MainPID != 0 {
		t.Errorf("ExecStartPre: %+v", r)
	}
	u = shell("post.service", "exec sleep 1000")
	u.Service.ExecStartPost = []spec.Command{cmd("/bin/sh", "-c", "exit 5")}
	if r := e.transient(u); r.Result != "failed" || r.Unit.ActiveState != "failed" {
		t.Errorf("ExecStartPost: %+v", r)
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("FROM_OUTSIDE", "seen")
	t.Setenv("LISTEN_FDS", "7")
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		file := filepath.Join(e.dir, "env")
		e.must(os.WriteFile(file, []byte("# comment\nA=from file\nB='single $x'\nC=\"dou\\\"ble\" \nD=a\\\n b\n"), 0o600))
		u := shell("env.service", "env")
		u.Service.Environment = []string{"A=from unit", "TWICE=1", "TWICE=2", "GONE=1"}
		u.Service.EnvironmentFile = []string{file, "-/no/such/file"}
		u.Service.UnsetEnvironment = []string{"GONE"}
		out, st := e.output(u, nil)
		vars := map[string]string{}
		for line := range strings.Lines(out) {
			k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			vars[k] = v
		}
		for k, want := range map[string]string{
			"A": "from file", "B": "single $x", "C": `dou"ble`, "D": "a b", "TWICE": "2", "GONE": "", "FROM_OUTSIDE": "seen",
			"INVOCATION_ID": st.InvocationID, "MYPR_CONTROL": e.opt.ControlPath, "LISTEN_FDS": "", "NOTIFY_SOCKET": "",
		} {
			if vars[k] != want {
				t.Errorf("%s=%q, want %q", k, vars[k], want)
			}
		}

		u = shell("exact.service", "/usr/bin/env")
		u.Service.ExactEnvironment = true
		u.Service.Environment = []string{"ONLY=1"}
		u.Service.PassEnvironment = []string{"FROM_OUTSIDE"}
		out, _ = e.output(u, nil)
		for line := range strings.Lines(out) {
			switch k, _, _ := strings.Cut(line, "="); k {
			case "ONLY", "FROM_OUTSIDE", "INVOCATION_ID", "PWD", "SHLVL", "_", "OLDPWD":
			default:
				t.Errorf("ExactEnvironment let %q through", line)
			}
		}

		u = &spec.Unit{Name: "expand.service", Service: &spec.Service{Type: spec.TypeExec,
			Environment: []string{"LIST=one  two", "X=y z"},
			ExecStart:   []spec.Command{cmd("/bin/sh", "-c", `for a; do echo "[$a]"; done`, "sh", "$LIST", "${X}!", "$$HOME", "$NOTHING", "a$X")}}}
		u.Service.ExecStart[0].Args[2] = strings.ReplaceAll(u.Service.ExecStart[0].Args[2], "$", "$$")
		out, _ = e.output(u, nil)
		if want := "[one]\n[two]\n[y z!]\n[$HOME]\n[a$X]\n"; out != want {
			t.Errorf("expanded to\n%swant\n%s", out, want)
		}
	})
}

func TestProcessAttributes(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		umask, nice, oom := uint32(0o027), 5, 321
		u := shell("attr.service", "umask; nice; ulimit -n; ulimit -c; cat /proc/self/oom_score_adj; pwd; ps -o sid= -p $$ | tr -d ' '; echo $$; cat /proc/self/timerslack_ns")
		u.Service.UMask, u.Service.Nice, u.Service.OOMScoreAdjust = &umask, &nice, &oom
		u.Service.TimerSlack = 123 * time.Microsecond
		u.Service.LimitNOFILE = &spec.Rlimit{Soft: 123, Hard: 456}
		u.Service.LimitCORE = &spec.Rlimit{}
		u.Service.WorkingDirectory = e.dir
		out, _ := e.output(u, nil)
		f := strings.Fields(out)
		if len(f) != 9 || f[8] != "123000" || f[0] != "0027" || f[1] != "5" || f[2] != "123" || f[3] != "0" || f[4] != "321" || f[5] != e.dir || f[6] != f[7] {
			t.Errorf("got %q", f)
		}
		// Nobody's timers wait as long as the supervisor's own do.
		if out, _ := e.output(shell("slack.service", "cat /proc/self/timerslack_ns"), nil); out != "50000\n" {
			t.Errorf("timer slack %q", out)
		}
		if os.Getuid() == 0 {
			u = shell("user.service", "id -un; id -gn; echo $HOME $USER")
			u.Service.User, u.Service.Group = "nobody", "daemon"
			if out, st := e.output(u, nil); !strings.HasPrefix(out, "nobody\ndaemon\n") || !strings.HasSuffix(out, " nobody\n") {
				t.Errorf("User=: %q %+v", out, st)
			}
		}
	})
}

func TestSuccessExitStatus(t *testing.T) {
	e := start(t, 2)
	for _, c := range []struct {
		script string
		set    spec.ExitStatusSet
		result string
		code   int
		signal syscall.Signal
	}{
		{"exit 0", spec.ExitStatusSet{}, "success", 0, 0},
		{"exit 9", spec.ExitStatusSet{}, "exit-code", 9, 0},
		{"exit 9", spec.ExitStatusSet{Codes: []int{9}}, "success", 9, 0},
		{"kill -TERM $$", spec.ExitStatusSet{}, "success", 0, syscall.SIGTERM},
		{"kill -USR1 $$", spec.ExitStatusSet{}, "signal", 0, syscall.SIGUSR1},
		{"kill -USR1 $$", spec.ExitStatusSet{Signals: []int{int(syscall.SIGUSR1)}}, "success", 0, syscall.SIGUSR1},
	} {
		u := shell("s.service", c.script)
		u.CollectMode = "inactive-or-failed"
		u.Service.SuccessExitStatus = c.set
		r := e.transient(u)
		st := e.wait(u.Name, r.Unit.InvocationID)
		if st.Result != c.result || !st.ExitKnown || st.ExitCode != c.code || st.ExitSignal != int(c.signal) {
			t.Errorf("%s: %s, code %d, signal %d", c.script, st.Result, st.ExitCode, st.ExitSignal)
		}
	}
}

func TestReload(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("r.service", `trap 'echo got HUP' HUP; `+fmt.Sprintf(waits, "echo up"))
		u.Service.ExecReload = []spec.Command{cmd("/bin/kill", "-HUP", "${MAINPID}")}
		out, _ := e.startLines(u)
		out.next()
		r, err := e.c.Reload(e.ctx, control.JobParams{Name: "r.service"})
		e.must(err)
		if r.Result != "done" || r.Unit.SubState != "running" {
			t.Errorf("reload: %+v", r)
		}
		if l := out.next(); l != "got HUP" {
			t.Errorf("the service saw %q", l)
		}
		u = shell("b.service", "exec sleep 1000")
		u.Service.ExecReload = []spec.Command{cmd("/bin/false")}
		e.transient(u)
		if r, err = e.c.Reload(e.ctx, control.JobParams{Name: "b.service"}); err != nil || r.Result != "failed" || r.Unit.SubState != "running" {
			t.Errorf("failing reload: %+v %v", r, err)
		}
		if r, err = e.c.Reload(e.ctx, control.JobParams{Name: "b.service"}); err != nil || r.Result != "failed" {
			t.Errorf("failing reload again: %+v %v", r, err)
		}
	})
}

// Started by nohup or in the background of a shell, and yet its units heed their signals.
func TestIgnoredSignalsAreNotPassedOn(t *testing.T) {
	t.Setenv(ignoreVariable, "1")
	tiers(t, func(t *testing.T, tier int) {
		e := startOuter(t, tier, true) // what this process ignored once, it could not undo
		out, _ := e.output(shell("i.service", "grep SigIgn /proc/self/status"), nil)
		mask, err := strconv.ParseUint(strings.TrimSpace(strings.TrimPrefix(out, "SigIgn:")), 16, 64)
		if err != nil || mask&(1<<(syscall.SIGHUP-1)|1<<(syscall.SIGINT-1)) != 0 {
			t.Errorf("ignored: %q %v", out, err)
		}
	})
}

// A supervisor that nohup started outlives its terminal also after a re-execution.
func TestIgnoredSignalsStaySoOverReexec(t *testing.T) {
	t.Setenv(ignoreVariable, "1")
	e := startOuter(t, 2, true)
	exe, err := os.Executable()
	e.must(err)
	for range 2 {
		if err := e.c.Reexec(e.ctx, control.ReexecParams{Executable: exe}); err == nil || rpc.CodeOf(err) != "" {
			t.Fatalf("re-execution: %v", err)
		}
		e.c.Close()
		e.ready()
		e.c = e.dial()
		e.must(e.cmd.Process.Signal(syscall.SIGHUP))
		if _, err := e.c.Info(e.ctx); err != nil {
			t.Fatalf("after SIGHUP: %v", err)
		}
	}
}

func TestRuntimeMax(t *testing.T) {
	e := start(t, 2)
	u := shell("m.service", "exec sleep 1000")
	u.Service.RuntimeMaxSec = 50 * time.Millisecond
	r := e.transient(u)
	if st := e.wait("m.service", r.Unit.InvocationID); st.Result != "timeout" || st.ActiveState != "failed" {
		t.Errorf("%+v", st)
	}
}

func TestExitTypeCgroup(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		fifo := filepath.Join(e.dir, "fifo")
		e.must(syscall.Mkfifo(fifo, 0o600))
		u := shell("c.service", "setsid sh -c 'echo child; read x <"+fifo+"' & exit 3")
		u.Service.ExitType = "cgroup"
		out, r := e.startLines(u)
		out.next()
		st := e.until("c.service", "without main process", func(st control.UnitStatus) bool { return st.ExitKnown })
		if st.SubState != "running" || st.ExitCode != 3 {
			t.Errorf("with a child left: %+v", st)
		}
		f, err := os.OpenFile(fifo, os.O_WRONLY, 0)
		e.must(err)
		_, err = f.WriteString("go\n")
		f.Close()
		e.must(err)
		if st := e.wait("c.service", r.Unit.InvocationID); st.ExitCode != 3 || st.Result != "exit-code" || st.ActiveState != "failed" {
			t.Errorf("at the end: %+v", st)
		}
	})
}
