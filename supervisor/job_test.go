package supervisor_test

import (
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"mypr/internal/rpc"
	"mypr/supervisor"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

// logged is a oneshot that stays, and writes its name when it starts and stops.
func logged(e *env, name string) *spec.Unit {
	write := func(what string) []spec.Command {
		return []spec.Command{cmd("/bin/sh", "-c", "echo "+what+name+" >>"+e.dir+"/log")}
	}
	u := &spec.Unit{Name: name, Service: &spec.Service{Type: spec.TypeOneshot, ExecStart: write("+"), ExecStop: write("-"), RemainAfterExit: true}}
	e.units[name] = u
	return u
}

func (e *env) log() string {
	b, _ := os.ReadFile(e.dir + "/log")
	_ = os.Remove(e.dir + "/log")
	return strings.Join(strings.Fields(string(b)), " ")
}

func (e *env) job(f func() (control.JobResult, error)) control.JobResult {
	e.t.Helper()
	r, err := f()
	e.must(err)
	return r
}

func TestOrderingAndRequirements(t *testing.T) {
	e, opt := options(t, 2)
	a, b, c := logged(e, "a.service"), logged(e, "b.service"), logged(e, "c.service")
	b.After, b.Requires = []string{"a.service"}, []string{"a.service"}
	c.Before, c.Wants = []string{"a.service"}, []string{"b.service"}
	target := &spec.Unit{Name: "all.target", Wants: []string{"c.service"}, After: []string{"b.service"}}
	e.units[target.Name] = target
	_ = a
	e.run(opt)
	start := func(name string) control.JobResult {
		return e.job(func() (control.JobResult, error) { return e.c.Start(e.ctx, control.JobParams{Name: name}) })
	}
	stop := func(name string) control.JobResult {
		return e.job(func() (control.JobResult, error) { return e.c.Stop(e.ctx, control.JobParams{Name: name}) })
	}
	if r := start("all.target"); r.Result != "done" || r.Unit.ActiveState != "active" {
		t.Errorf("%+v", r)
	}
	if l := e.log(); l != "+c.service +a.service +b.service" {
		t.Errorf("started as %q", l)
	}
	stop("a.service") // takes b along, first
	if l := e.log(); l != "-b.service -a.service" {
		t.Errorf("stopped as %q", l)
	}
	start("b.service")
	if l := e.log(); l != "+a.service +b.service" {
		t.Errorf("pulled %q", l)
	}
	r, err := e.c.Restart(e.ctx, control.JobParams{Name: "a.service"})
	e.must(err)
	e.untilState("b.service", "exited")
	if l := e.log(); r.Result != "done" || l != "-b.service -a.service +a.service +b.service" {
		t.Errorf("restarted as %q: %+v", l, r)
	}
	e.stop()
	if l := e.log(); l != "-b.service -a.service -c.service" {
		t.Errorf("shut down as %q", l)
	}
}

func TestRequiredUnitFails(t *testing.T) {
	e, opt := options(t, 2)
	a, b := logged(e, "a.service"), logged(e, "b.service")
	a.Service.ExecStart = []spec.Command{cmd("/bin/false")}
	b.After, b.Requires = []string{"a.service"}, []string{"a.service"}
	e.run(opt)
	r, err := e.c.Start(e.ctx, control.JobParams{Name: "b.service"})
	e.must(err)
	if r.Result != "failed" || r.Unit.Result != "dependency" || !strings.Contains(r.Unit.Error, "a.service") {
		t.Errorf("%+v", r)
	}
	weaker := *b
	weaker.Requires, weaker.Wants = nil, []string{"a.service"}
	e.define(&weaker)
	e.must(e.c.DaemonReload(e.ctx))
	if r, err = e.c.Start(e.ctx, control.JobParams{Name: "b.service"}); err != nil || r.Result != "done" {
		t.Errorf("with Wants=: %+v %v", r, err)
	}
}

func TestConflictsBindsToPartOf(t *testing.T) {
	e, opt := options(t, 2)
	a, b, c := logged(e, "a.service"), logged(e, "b.service"), logged(e, "c.service")
	b.Conflicts = []string{"a.service"}
	d := shell("d.service", "exec sleep 1000")
	e.units["d.service"] = d
	c.BindsTo, c.After = []string{"d.service"}, []string{"d.service"}
	p := logged(e, "p.service")
	p.PartOf = []string{"d.service"}
	onfail := logged(e, "onfail.service")
	d.OnFailure = []string{onfail.Name}
	_ = a
	e.run(opt)
	for _, n := range []string{"a.service", "b.service"} {
		e.job(func() (control.JobResult, error) { return e.c.Start(e.ctx, control.JobParams{Name: n}) })
	}
	e.untilState("a.service", "dead")
	e.untilState("b.service", "exited")
	for _, n := range []string{"c.service", "p.service"} {
		e.job(func() (control.JobResult, error) { return e.c.Start(e.ctx, control.JobParams{Name: n}) })
	}
	// The unit that c is bound to dies by itself: c follows, p (PartOf) stays.
	e.must(e.c.Kill(e.ctx, control.KillParams{Name: "d.service", Signal: 9}))
	e.untilState("c.service", "dead")
	e.untilState("onfail.service", "exited")
	if st := e.status("p.service"); st.SubState != "exited" {
		t.Errorf("PartOf: %+v", st)
	}
	e.job(func() (control.JobResult, error) { return e.c.Start(e.ctx, control.JobParams{Name: "d.service"}) })
	e.job(func() (control.JobResult, error) { return e.c.Stop(e.ctx, control.JobParams{Name: "d.service"}) })
	e.untilState("p.service", "dead")
}

func TestOrderingCycle(t *testing.T) {
	e, opt := options(t, 2)
	a, b := logged(e, "a.service"), logged(e, "b.service")
	a.After, a.Wants = []string{"b.service"}, []string{"b.service"}
	b.After = []string{"a.service"}
	e.run(opt)
	if r := e.job(func() (control.JobResult, error) { return e.c.Start(e.ctx, control.JobParams{Name: "a.service"}) }); r.Result != "done" {
		t.Errorf("%+v", r)
	}
}

func TestNewerJobReplacesOlder(t *testing.T) {
	e := start(t, 2)
	u := shell("n.service", "exec sleep 1000")
	u.Service.Type = spec.TypeNotify // never becomes ready
	type result struct {
		r   control.TransientResult
		err error
	}
	first := make(chan result, 1)
	go func() {
		r, _, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: u})
		first <- result{r, err}
	}()
	e.untilState(u.Name, "start")
	r, err := e.c.Stop(e.ctx, control.JobParams{Name: u.Name})
	e.must(err)
	if r.Result != "done" {
		t.Errorf("stop: %+v", r)
	}
	if f := <-first; f.err != nil || f.r.Result != "cancelled" {
		t.Errorf("the start: %+v %v", f.r, f.err)
	}
}

func TestNoWait(t *testing.T) {
	e := start(t, 2)
	u := shell("n.service", "exec sleep 1000")
	u.Service.Type = spec.TypeNotify
	r, _, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: u, NoWait: true})
	e.must(err)
	if r.Unit.ActiveState != "activating" {
		t.Errorf("%+v", r)
	}
	if r, err := e.c.Stop(e.ctx, control.JobParams{Name: u.Name, NoWait: true}); err != nil || r.Unit.ActiveState == "active" {
		t.Errorf("%+v %v", r, err)
	}
}

func TestListShowInfo(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("l.service", "sleep 1000 & exec sleep 1000")
		u.Description = "two sleepers"
		e.transient(u)
		info, err := e.c.Info(e.ctx)
		e.must(err)
		if info.Tier != tier || info.PID != os.Getpid() || len(info.Instance) != 32 || info.TierReason == "" && tier > 1 || info.Version != "test" {
			t.Errorf("%+v", info)
		}
		var st control.UnitStatus
		for st.Processes < 2 && e.ctx.Err() == nil { // the shell forks a moment after it was executed
			list, err := e.c.List(e.ctx, true)
			e.must(err)
			if len(list) != 1 || list[0].Description != "two sleepers" {
				t.Fatalf("%+v", list)
			}
			st = list[0]
		}
		if st.MemoryCurrent < 100<<10 || st.MainPID == 0 || st.Containment == "" {
			t.Errorf("%+v", st)
		}
		if _, err := e.c.Show(e.ctx, "nothing.service"); rpc.CodeOf(err) != rpc.CodeNotFound {
			t.Errorf("%v", err)
		}
		if _, err := e.c.Show(e.ctx, "../etc.service"); rpc.CodeOf(err) != rpc.CodeInvalidRequest {
			t.Errorf("%v", err)
		}
		e.must(e.c.Kill(e.ctx, control.KillParams{Name: u.Name, Signal: 9, Who: "all"}))
		e.untilState(u.Name, "failed")
		if err := e.c.Kill(e.ctx, control.KillParams{Name: u.Name, Signal: 9}); rpc.CodeOf(err) != rpc.CodeConflict {
			t.Errorf("kill of what is dead: %v", err)
		}
	})
}

func TestDaemonReload(t *testing.T) {
	u := shell("u.service", "exec sleep 1000")
	e := start(t, 2, u)
	e.job(func() (control.JobResult, error) { return e.c.Start(e.ctx, control.JobParams{Name: u.Name}) })
	changed, fresh := shell("u.service", "exec sleep 1001"), shell("v.service", "true")
	changed.Description = "changed"
	e.define(changed, fresh)
	e.must(e.c.DaemonReload(e.ctx))
	if st := e.status("u.service"); st.Description != "changed" || st.SubState != "running" {
		t.Errorf("%+v", st)
	}
	if st := e.status("v.service"); st.SubState != "dead" {
		t.Errorf("%+v", st)
	}
	changed = shell("u.service", "true")
	changed.Service.Type = "nonsense"
	e.define(changed)
	if err := e.c.DaemonReload(e.ctx); rpc.CodeOf(err) != rpc.CodeInvalidRequest || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("%v", err)
	}
	if st := e.status("u.service"); st.Description != "changed" {
		t.Errorf("a broken file took the old definition away: %+v", st)
	}
}

func TestShutdownRequest(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("s.service", `trap "" TERM; while :; do sleep 1000; done`)
		u.Service.TimeoutStopSec = 50 * time.Millisecond
		e.transient(u)
		e.must(e.c.Shutdown(e.ctx, control.ShutdownParams{Reason: "test"}))
		if err := <-e.stopped; err != nil {
			t.Error(err)
		}
		e.stopped <- nil
		for _, f := range []string{"ctl", "ntf", "state"} {
			if _, err := os.Stat(e.dir + "/" + f); err == nil {
				t.Errorf("%s is left", f)
			}
		}
	})
}

// A subscriber that does not read loses its connection; the supervisor goes on.
func TestDeafSubscriber(t *testing.T) {
	t.Cleanup(supervisor.SetSubscriberMax(100))
	e := start(t, 2)
	c, err := net.Dial("unix", e.opt.ControlPath)
	e.must(err)
	defer c.Close()
	_, err = c.Write([]byte(`{"id":1,"method":"subscribe"}` + "\n"))
	e.must(err)
	u := shell("x.service", "exec sleep 1000")
	u.Description = strings.Repeat("x", 4000)
	e.define(u)
	e.must(e.c.DaemonReload(e.ctx))
	for range 150 { // three events each, more than fits between
		_, err := e.c.Start(e.ctx, control.JobParams{Name: u.Name, NoWait: true})
		e.must(err)
		_, err = e.c.Stop(e.ctx, control.JobParams{Name: u.Name})
		e.must(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(deadline))
	if _, err := io.Copy(io.Discard, c); err != nil {
		t.Errorf("the connection did not end: %v", err)
	}
	if _, err := e.c.Info(e.ctx); err != nil {
		t.Error(err)
	}
}
