package supervisor_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

// escapists is a leader with a child that ignores SIGTERM, one that left the session as
// well, and a daemon that forked twice; it prints their pids and its own, then waits.
const escapists = `
trap "" TERM
(while :; do sleep 1000; done) & echo $!
setsid sh -c 'trap "" TERM; echo $$; while :; do sleep 1000; done' &
setsid sh -c '(trap "" TERM; sh -c "echo \$PPID"; while :; do sleep 1000; done) & exit 0'
trap - TERM
echo $$
%s
`

func (e *env) startEscapists(u *spec.Unit) (pids []int) {
	e.t.Helper()
	out, _ := e.startLines(u)
	for range 4 {
		pid, err := strconv.Atoi(out.next())
		e.must(err)
		pids = append(pids, pid)
	}
	return pids
}

func TestStopSweepsEscapists(t *testing.T) {
	for _, leader := range []struct{ name, rest string }{
		{"leader obeys", `exec sleep 1000`},
		{"leader ignores", `trap "" TERM; while :; do sleep 1000; done`},
	} {
		for _, mode := range []string{spec.KillControlGroup, spec.KillMixed} {
			t.Run(leader.name+" "+mode, func(t *testing.T) {
				tiers(t, func(t *testing.T, tier int) {
					e := start(t, tier)
					u := shell("esc.service", fmt.Sprintf(escapists, leader.rest))
					u.Service.KillMode = mode
					u.Service.TimeoutStopSec = 100 * time.Millisecond
					pids := e.startEscapists(u)
					for _, pid := range pids {
						if !alive(pid) {
							t.Fatalf("pid %d of %v is not there before the stop", pid, pids)
						}
					}
					r, err := e.c.Stop(e.ctx, control.JobParams{Name: u.Name})
					e.must(err)
					for _, pid := range pids {
						if !gone(pid) {
							t.Errorf("pid %d survived", pid)
						}
					}
					if len(r.Unit.Survivors) > 0 || r.Result != "done" {
						t.Errorf("%+v", r)
					}
				})
			})
		}
	}
}

// The main process ends by itself and leaves others: the run is over only when they are.
func TestLeaderLeavesChildren(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		fifo := e.dir + "/fifo"
		e.must(syscall.Mkfifo(fifo, 0o600))
		u := shell("left.service", fmt.Sprintf(escapists, "read x <"+fifo+"; exit 0"))
		u.Service.TimeoutStopSec = 50 * time.Millisecond
		out, r := e.startLines(u)
		var pids []int
		for range 4 { // all are there before the leader goes
			pid, _ := strconv.Atoi(out.next())
			pids = append(pids, pid)
		}
		f, err := os.OpenFile(fifo, os.O_WRONLY, 0)
		e.must(err)
		_, err = f.WriteString("go\n")
		f.Close()
		e.must(err)
		st := e.wait(u.Name, r.Unit.InvocationID)
		for _, pid := range pids {
			if !gone(pid) {
				t.Errorf("pid %d is left after %+v", pid, st)
			}
		}
	})
}

const forkTree = `
trap "" TERM
echo $$
grow() {
	if [ $1 -gt 0 ]; then
		(grow $(($1-1))) &
		setsid sh -c "$GROW" sh $(($1-1)) &
	fi
	while :; do sleep 1000; done
}
grow 7
`

const grow = `trap "" TERM
grow() {
	if [ $1 -gt 0 ]; then
		(grow $(($1-1))) &
		(grow $(($1-1))) &
	fi
	while :; do sleep 1000; done
}
grow $1`

func TestKillForkTree(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("tree.service", forkTree)
		u.Service.Environment = []string{"GROW=" + grow}
		u.Service.TimeoutStopSec = 20 * time.Millisecond
		out, _ := e.startLines(u)
		out.next()
		var pids []int
		for len(pids) < 500 {
			d, err := e.c.Show(e.ctx, u.Name)
			e.must(err)
			pids = d.PIDs
			if e.ctx.Err() != nil {
				t.Fatalf("only %d processes", len(pids))
			}
		}
		began := time.Now()
		r, err := e.c.Stop(e.ctx, control.JobParams{Name: u.Name})
		e.must(err)
		t.Logf("%d processes stopped in %v", len(pids), time.Since(began))
		left := 0
		for _, pid := range pids {
			if !gone(pid) {
				left++
			}
		}
		if left > 0 || len(r.Unit.Survivors) > 0 {
			t.Errorf("%d are left: %+v", left, r.Unit)
		}
	})
}

// A tree that forks all the time, each process in a session of its own.
func TestKillForkingTree(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("bomb.service", `trap "" TERM; echo $$; n=0; while [ $n -lt 20 ]; do n=$((n+1)); setsid sh -c 'while :; do (sleep 0.05; sh -c "sleep 0.05" &) & wait; done' & done; wait`)
		u.Service.TimeoutStopSec = 20 * time.Millisecond
		out, _ := e.startLines(u)
		out.next()
		r, err := e.c.Stop(e.ctx, control.JobParams{Name: u.Name})
		e.must(err)
		if len(r.Unit.Survivors) > 0 || r.Result != "done" {
			t.Errorf("%+v", r)
		}
	})
}

func TestKillModeProcessLeavesTheRest(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("p.service", `sleep 1000 & echo $!; exec sleep 1000`)
		u.Service.KillMode = spec.KillProcess
		out, _ := e.startLines(u)
		pid, _ := strconv.Atoi(out.next())
		r, err := e.c.Stop(e.ctx, control.JobParams{Name: u.Name})
		e.must(err)
		if r.Unit.ActiveState != control.Inactive || !alive(pid) {
			t.Fatalf("after the stop: %+v, child alive: %v", r.Unit, alive(pid))
		}
		// Its group is watched on, and removed with the unit when the child ends.
		e.must(e.c.Release(e.ctx, u.Name))
		c := e.dial()
		defer c.Close()
		_, events, err := c.Subscribe(e.ctx, u.Name)
		e.must(err)
		e.must(syscall.Kill(pid, syscall.SIGKILL))
		for ev := range events {
			if ev.Removed {
				return
			}
		}
		t.Error("the unit was not unloaded")
	})
}

func TestExecStopAndStopPost(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("s.service", `trap 'echo asked; exit 0' USR1; `+fmt.Sprintf(waits, "echo $$"))
		// As systemd: SIGTERM follows as soon as ExecStop= is done, so it has to wait itself.
		u.Service.ExecStop = []spec.Command{cmd("/bin/sh", "-c", "kill -USR1 $1; tail --pid=$1 -f /dev/null", "sh", "$MAINPID")}
		u.Service.ExecStop[0].Args[2] = strings.ReplaceAll(u.Service.ExecStop[0].Args[2], "$", "$$")
		u.Service.ExecStopPost = []spec.Command{cmd("/bin/sh", "-c", "echo $SERVICE_RESULT $EXIT_CODE $EXIT_STATUS >"+e.dir+"/post")}
		u.Service.ExecStopPost[0].NoExpand = true
		u.Service.Restart = spec.RestartNo
		out, _ := e.startLines(u)
		out.next()
		r, err := e.c.Stop(e.ctx, control.JobParams{Name: u.Name})
		e.must(err)
		if l := out.next(); l != "asked" || r.Result != "done" {
			t.Errorf("%q %+v", l, r)
		}
		b, _ := os.ReadFile(e.dir + "/post")
		if string(b) != "success exited 0\n" {
			t.Errorf("ExecStopPost saw %q", b)
		}
	})
}

func TestStoppedProcessObeysSIGTERM(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("stopped.service", `echo $$; exec sleep 1000`)
		out, _ := e.startLines(u)
		pid, _ := strconv.Atoi(out.next())
		e.must(e.c.Kill(e.ctx, control.KillParams{Name: u.Name, Signal: int(syscall.SIGSTOP), Who: "all"}))
		r, err := e.c.Stop(e.ctx, control.JobParams{Name: u.Name}) // 90 s by default if it stayed stopped
		e.must(err)
		if r.Unit.Result != "success" || !gone(pid) {
			t.Errorf("%+v", r)
		}
	})
}

func TestFreeze(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("f.service", `echo $$; while :; do echo tick; sleep 0.01; done`)
		out, r := e.startLines(u)
		out.next()
		out.next()
		e.must(e.c.Freeze(e.ctx, u.Name))
		if st := e.status(u.Name); !st.Frozen {
			t.Errorf("not shown as frozen: %+v", st)
		}
		if tier == 3 { // each has got SIGSTOP, and stops when it would run
			for _, pid := range e.pids(u.Name) {
				for !stopped(pid) && e.ctx.Err() == nil {
				}
			}
		}
		out.drain()
		<-time.After(200 * time.Millisecond)
		if n := out.drain(); n > 0 {
			t.Errorf("a frozen unit wrote %d lines", n)
		}
		e.must(e.c.Thaw(e.ctx, u.Name))
		out.next()
		e.must(e.c.Freeze(e.ctx, u.Name))
		if r, err := e.c.Stop(e.ctx, control.JobParams{Name: u.Name}); err != nil || r.Unit.Result != "success" {
			t.Errorf("stop of a frozen unit: %+v %v", r, err)
		}
		if err := e.c.Freeze(e.ctx, u.Name); err == nil {
			t.Error("froze what does not run")
		}
		_ = r
	})
}
