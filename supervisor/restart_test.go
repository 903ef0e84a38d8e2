package supervisor_test

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"mypr/supervisor"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

func TestRestartPolicies(t *testing.T) {
	e := start(t, 2)
	for _, c := range []struct {
		policy, script string
		again          bool
	}{
		{"", "exit 1", false},
		{spec.RestartNo, "exit 1", false},
		{spec.RestartAlways, "exit 0", true},
		{spec.RestartAlways, "exit 1", true},
		{spec.RestartOnSuccess, "exit 0", true},
		{spec.RestartOnSuccess, "exit 1", false},
		{spec.RestartOnFailure, "exit 0", false},
		{spec.RestartOnFailure, "exit 1", true},
		{spec.RestartOnFailure, "kill -USR1 $$", true},
		{spec.RestartOnFailure, "kill -TERM $$", false},
		{spec.RestartOnAbnormal, "exit 1", false},
		{spec.RestartOnAbnormal, "kill -USR1 $$", true},
		{spec.RestartOnAbort, "kill -USR1 $$", true},
		{spec.RestartOnAbort, "exit 1", false},
		{spec.RestartOnWatchdog, "kill -USR1 $$", false},
	} {
		u := shell("r.service", c.script)
		u.CollectMode = "inactive-or-failed"
		u.Service.Restart = c.policy
		u.Service.RestartSec = time.Hour
		r := e.transient(u)
		st := e.wait(u.Name, r.Unit.InvocationID)
		if again := st.SubState == "auto-restart"; again != c.again {
			t.Errorf("Restart=%s after %q: %s/%s", c.policy, c.script, st.ActiveState, st.SubState)
		}
		if c.again && time.Until(st.NextStart) < 50*time.Minute {
			t.Errorf("next start at %v", st.NextStart)
		}
		r2, err := e.c.Stop(e.ctx, control.JobParams{Name: u.Name})
		if c.again && (err != nil || r2.Unit.ActiveState != "inactive") {
			t.Errorf("stop while it waits: %+v %v", r2, err)
		}
	}
}

func TestRestartExitStatusSets(t *testing.T) {
	e := start(t, 2)
	u := shell("p.service", "exit 5")
	u.Service.Restart, u.Service.RestartSec = spec.RestartAlways, time.Hour
	u.Service.RestartPreventExitStatus = spec.ExitStatusSet{Codes: []int{5}}
	r := e.transient(u)
	if st := e.wait(u.Name, r.Unit.InvocationID); st.ActiveState != "failed" {
		t.Errorf("prevented: %+v", st)
	}
	u = shell("f.service", "exit 6")
	u.Service.RestartSec = time.Hour
	u.Service.RestartForceExitStatus = spec.ExitStatusSet{Codes: []int{6}}
	r = e.transient(u)
	if st := e.wait(u.Name, r.Unit.InvocationID); st.SubState != "auto-restart" {
		t.Errorf("forced: %+v", st)
	}
}

func TestStartLimit(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		u := shell("l.service", "exit 1")
		u.Service.Restart, u.Service.RestartSec = spec.RestartAlways, time.Millisecond
		u.StartLimitBurst, u.StartLimitInterval = 3, time.Minute
		e := start(t, tier, u)
		for range 2 { // a manual start clears the limit, every time
			_, err := e.c.Start(e.ctx, control.JobParams{Name: u.Name})
			e.must(err)
			st := e.until(u.Name, "failed", func(st control.UnitStatus) bool { return st.ActiveState == "failed" })
			if st.Result != "start-limit-hit" || st.Restarts != 3 || !strings.Contains(st.Error, "exit status 1") {
				t.Errorf("at the limit: %+v", st)
			}
		}
		e.must(e.c.ResetFailed(e.ctx, u.Name))
		if st := e.status(u.Name); st.ActiveState != "inactive" || st.Result != "success" {
			t.Errorf("after reset-failed: %+v", st)
		}
	})
}

func TestBackoffGrowsAndResets(t *testing.T) {
	e := start(t, 2)
	u := shell("b.service", "test -e "+e.dir+"/stay && exec sleep 1000; exit 1")
	u.Service.Restart = spec.RestartAlways
	u.Service.RestartSec, u.Service.RestartMaxDelaySec, u.Service.RestartSteps = 10*time.Millisecond, 80*time.Millisecond, 3
	u.Service.RestartResetSec = time.Hour
	c := e.dial()
	defer c.Close()
	_, events, err := c.Subscribe(e.ctx, u.Name)
	e.must(err)
	e.transient(u)
	var delays []time.Duration
	for ev := range events {
		if ev.SubState == "auto-restart" {
			delays = append(delays, ev.NextStart.Sub(ev.Since))
			if len(delays) == 5 {
				break
			}
		}
	}
	for i, want := range []time.Duration{10, 20, 40, 80, 80} {
		want *= time.Millisecond
		// From Since of activating, which is a moment after the delay began; up to a tenth of jitter.
		if d := delays[i]; d > want*11/10 {
			t.Errorf("delay %d is %v, want %v", i, d, want)
		}
		if d := supervisor.Backoff(u.Service, i); d < want-time.Microsecond || d > want*11/10 {
			t.Errorf("back-off %d is %v, want %v", i, d, want)
		}
	}
}

// A crash of a running service is a restart with the same name and a new invocation.
func TestCrashRestarts(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		u := role("n.service", "notify")
		u.Service.Type, u.Service.Restart, u.Service.RestartSec = spec.TypeNotify, spec.RestartAlways, time.Millisecond
		u.WantedBy = []string{"default.target"}
		e := start(t, tier, u)
		first := e.untilState(u.Name, "running")
		e.must(syscall.Kill(first.MainPID, syscall.SIGKILL))
		second := e.until(u.Name, "running again", func(st control.UnitStatus) bool {
			return st.SubState == "running" && st.InvocationID != first.InvocationID
		})
		if second.Restarts != 1 || second.MainPID == first.MainPID {
			t.Errorf("%+v", second)
		}
	})
}

// A run that ends badly in a restart has failed, but a start comes next, which is said:
// nobody may take the unit for given up.
func TestFailedInRestart(t *testing.T) {
	u := shell("k.service", "exec sleep 1000")
	u.Service.KillSignal = int(syscall.SIGUSR1) // no clean end
	e := start(t, 2, u)
	_, err := e.c.Start(e.ctx, control.JobParams{Name: u.Name})
	e.must(err)
	c := e.dial()
	defer c.Close()
	_, events, err := c.Subscribe(e.ctx, u.Name)
	e.must(err)
	for _, again := range []bool{true, false} {
		ask := e.c.Stop
		if again {
			ask = e.c.Restart
		}
		r, err := ask(e.ctx, control.JobParams{Name: u.Name})
		e.must(err)
		states := []string{"deactivating", "failed"}
		if again {
			states = append(states, "activating", "active")
		}
		for _, state := range states {
			ev := <-events
			if ev.ActiveState != state {
				t.Fatalf("restarted %v: %+v instead of %s", again, ev, state)
			}
			if state == "failed" && ev.StartQueued != again {
				t.Errorf("restarted %v: a start is queued: %v", again, ev.StartQueued)
			}
		}
		if r.Unit.StartQueued {
			t.Errorf("restarted %v: %+v", again, r.Unit)
		}
	}
}
