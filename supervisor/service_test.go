package supervisor_test

import (
	"testing"

	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

func TestTransientTrue(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		r := e.transient(&spec.Unit{Name: "true.service", Service: &spec.Service{Type: spec.TypeExec, ExecStart: []spec.Command{{Path: "/bin/true"}}}})
		if r.Result != "done" {
			t.Fatalf("start: %+v", r)
		}
		st, err := e.c.Wait(e.ctx, control.WaitParams{Name: "true.service", InvocationID: r.Unit.InvocationID})
		e.must(err)
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
		if r.Result != "done" || r.Unit.ActiveState != control.Inactive {
			t.Errorf("stop: %+v", r)
		}
	})
}
