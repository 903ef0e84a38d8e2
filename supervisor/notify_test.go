package supervisor_test

import (
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"mypr/supervisor/control"
	"mypr/supervisor/notify"
	"mypr/supervisor/spec"
)

// stater is a notify service whose role sends what it reads from its standard input, a
// line each (";" for line breaks), and says "sent" when it was handled.
type stater struct {
	e    *env
	name string
	in   *os.File
	out  *lines
	st   control.UnitStatus
}

func (e *env) stater(name string, change func(*spec.Service)) *stater {
	e.t.Helper()
	u := role(name, "stater")
	u.Service.Type = spec.TypeNotify
	u.Service.StandardInput, u.Service.StandardOutput = spec.StdioPipe, spec.StdioPipe
	if change != nil {
		change(u.Service)
	}
	r, f, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: u})
	e.must(err)
	if r.Result != "done" {
		e.t.Fatalf("%+v", r)
	}
	e.t.Cleanup(func() {
		for _, f := range f {
			f.Close()
		}
	})
	return &stater{e: e, name: name, in: f["stdin"], out: newLines(e.t, f["stdout"]), st: r.Unit}
}

func (s *stater) say(state string) control.UnitStatus {
	s.e.t.Helper()
	_, err := s.in.WriteString(state + "\n")
	s.e.must(err)
	if l := s.out.next(); l != "sent" {
		s.e.t.Fatalf("the role says %q", l)
	}
	return s.e.status(s.name)
}

func TestNotifyMessages(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		s := e.stater("n.service", nil)
		if st := s.say("STATUS=half = way"); st.StatusText != "half = way" {
			t.Errorf("%+v", st)
		}
		if st := s.say("ERRNO=2"); !strings.Contains(st.Error, "no such file") {
			t.Errorf("%+v", st)
		}
		if st := s.say("RELOADING=1"); st.ActiveState != "reloading" {
			t.Errorf("%+v", st)
		}
		if st := s.say("READY=1"); st.SubState != "running" {
			t.Errorf("%+v", st)
		}
		if st := s.say("STOPPING=1"); st.ActiveState != "deactivating" {
			t.Errorf("%+v", st)
		}
	})
}

// Only whom NotifyAccess= lets may speak for a unit, and nobody outside of it.
func TestNotifyAttribution(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		for _, c := range []struct{ access, want string }{{"main", ""}, {"all", "from a child"}} {
			s := e.stater("n.service", func(sv *spec.Service) { sv.NotifyAccess = c.access })
			if st := s.say("fork STATUS=from a child"); st.StatusText != c.want {
				t.Errorf("NotifyAccess=%s: status %q", c.access, st.StatusText)
			}
			_, err := e.c.Stop(e.ctx, control.JobParams{Name: s.name})
			e.must(err)
			e.must(e.c.Release(e.ctx, s.name))
		}
		// A stranger: this process is in no unit.
		s := e.stater("x.service", func(sv *spec.Service) { sv.NotifyAccess = "all" })
		e.must(notify.SendTo(e.opt.NotifyPath, "STATUS=from a stranger\nMAINPID=1"))
		if st := s.say("X_NOTHING=1"); st.StatusText != "" || st.MainPID != s.st.MainPID {
			t.Errorf("%+v", st)
		}
		// A process of another unit speaks for itself only.
		o := e.stater("o.service", nil)
		o.say("STATUS=mine")
		if st := e.status("x.service"); st.StatusText != "" {
			t.Errorf("%+v", st)
		}
	})
}

func TestMainPID(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		s := e.stater("m.service", nil)
		if st := s.say("MAINPID=1"); st.MainPID != s.st.MainPID {
			t.Errorf("a foreign main process was accepted: %+v", st)
		}
		st := s.say("newmain")
		if st.MainPID == s.st.MainPID || st.MainPID == 0 {
			t.Fatalf("%+v", st)
		}
		// Its end is now the service's.
		e.must(syscall.Kill(st.MainPID, syscall.SIGUSR1))
		if st = e.wait("m.service", st.InvocationID); st.Result != "signal" && st.Result != "unknown" {
			t.Errorf("%+v", st)
		}
	})
}

func TestExtendTimeout(t *testing.T) {
	e := start(t, 2)
	u := role("x.service", "extend")
	u.Service.Type, u.Service.TimeoutStartSec = spec.TypeNotify, 2*time.Second
	if r := e.transient(u); r.Result != "done" {
		t.Errorf("%+v", r)
	}
}

func TestWatchdog(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		const interval = 3 * time.Second // all of them at once, and time to act before it is over
		dog := func(sv *spec.Service) {
			sv.WatchdogSec, sv.TimeoutAbortSec, sv.WatchdogSignal = interval, 50*time.Millisecond, int(syscall.SIGTERM)
		}
		// Stopped: it is woken by SIGCONT and obeys the signal. Deaf: SIGKILL follows.
		stopped := e.stater("stopped.service", dog)
		e.must(syscall.Kill(stopped.st.MainPID, syscall.SIGSTOP))
		deaf := e.stater("deaf.service", func(sv *spec.Service) {
			dog(sv)
			sv.WatchdogSignal = int(syscall.SIGWINCH)
			sv.TimeoutStopSec = 50 * time.Millisecond
		})
		s := e.stater("w.service", dog)
		<-time.After(200 * time.Millisecond)
		pinged := time.Now()
		s.say("WATCHDOG=1")
		st := e.wait(s.name, s.st.InvocationID)
		if st.Result != "watchdog" || st.ActiveState != "failed" || st.ExitSignal != int(syscall.SIGTERM) {
			t.Errorf("missed: %+v", st)
		}
		if lived := time.Since(pinged); lived < interval {
			t.Errorf("it missed its watchdog %v after the ping", lived)
		}
		if st = e.wait(stopped.name, stopped.st.InvocationID); st.Result != "watchdog" || st.ExitSignal != int(syscall.SIGTERM) {
			t.Errorf("stopped: %+v", st)
		}
		if st = e.wait(deaf.name, deaf.st.InvocationID); st.Result != "watchdog" || st.ExitSignal != int(syscall.SIGKILL) {
			t.Errorf("deaf: %+v", st)
		}

		s = e.stater("trigger.service", func(sv *spec.Service) { sv.WatchdogSignal = int(syscall.SIGTERM) })
		_, err := s.in.WriteString("WATCHDOG=trigger\n")
		e.must(err)
		if st = e.wait(s.name, s.st.InvocationID); st.Result != "watchdog" {
			t.Errorf("trigger: %+v", st)
		}
		// The service may set its own interval; restart on it.
		s = e.stater("usec.service", func(sv *spec.Service) {
			sv.Restart, sv.RestartSec, sv.WatchdogSignal = spec.RestartOnWatchdog, time.Hour, int(syscall.SIGTERM)
		})
		_, err = s.in.WriteString("WATCHDOG_USEC=50000\n")
		e.must(err)
		if st = e.wait(s.name, s.st.InvocationID); st.SubState != "auto-restart" || st.Result != "watchdog" {
			t.Errorf("WATCHDOG_USEC: %+v", st)
		}
	})
}

// A frozen unit cannot ping: its watchdog rests.
func TestFrozenWatchdog(t *testing.T) {
	e := start(t, 2)
	s := e.stater("w.service", func(sv *spec.Service) { sv.WatchdogSec = 2 * time.Second })
	e.must(e.c.Freeze(e.ctx, s.name))
	r, err := e.c.Start(e.ctx, control.JobParams{Name: s.name}) // up already: no waiting
	e.must(err)
	c := e.dial()
	defer c.Close()
	_, events, err := c.Subscribe(e.ctx, s.name)
	e.must(err)
	select {
	case ev := <-events:
		t.Errorf("%+v", ev)
	case <-time.After(2500 * time.Millisecond):
	}
	e.must(e.c.Thaw(e.ctx, s.name))
	if st := e.wait(s.name, r.Unit.InvocationID); st.Result != "watchdog" {
		t.Errorf("after the thaw: %+v", st)
	}
}

func TestFDStore(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		s := e.stater("s.service", func(sv *spec.Service) {
			sv.FileDescriptorStoreMax = 3
			sv.Restart, sv.RestartSec = spec.RestartAlways, time.Millisecond
		})
		if st := s.say("store mem some content"); !contains(st.FDNames, "mem") {
			t.Fatalf("%q", st.FDNames)
		}
		s.say("store two more")
		s.say("unstore two")
		s.say("hangup pipe") // the other end is closed: it goes by itself
		e.until(s.name, "without the hung up pipe", func(control.UnitStatus) bool { return !contains(e.status(s.name).FDNames, "pipe") })
		again := func(what string) {
			t.Helper()
			if l := s.out.next(); l != "start: mem=some content" {
				t.Errorf("%s: the next run got %q", what, l)
			}
		}
		e.must(syscall.Kill(s.st.MainPID, syscall.SIGKILL))
		again("crash")
		e.untilState(s.name, "running")
		if _, err := e.c.Restart(e.ctx, control.JobParams{Name: s.name}); err != nil {
			t.Fatal(err)
		}
		again("restart")
		r, err := e.c.Stop(e.ctx, control.JobParams{Name: s.name})
		e.must(err)
		if contains(r.Unit.FDNames, "mem") {
			t.Errorf("kept over a stop: %q", r.Unit.FDNames)
		}
	})
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}

// A quick process says READY=1 before the loop has heard that its program runs.
func TestQuickReady(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		const many = 40
		results := make(chan string, many)
		for i := range many {
			go func() {
				u := role("quick-"+strconv.Itoa(i)+".service", "quick")
				u.Service.Type = spec.TypeNotify
				u.Service.TimeoutStartSec = deadline / 2
				nice := 1
				u.Service.Nice = &nice // through the exec helper
				c, err := control.Dial(e.ctx, e.opt.ControlPath)
				if err != nil {
					results <- err.Error()
					return
				}
				defer c.Close()
				r, _, err := c.StartTransient(e.ctx, control.TransientParams{Unit: u})
				if err != nil {
					results <- err.Error()
					return
				}
				results <- r.Result + " " + r.Unit.SubState
			}()
		}
		for range many {
			if r := <-results; r != "done running" {
				t.Errorf("start: %s", r)
			}
		}
	})
}
