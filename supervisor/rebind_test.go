package supervisor_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"mypr/supervisor/spec"
)

// Whoever cleans up too much takes sockets along that are in use.
func TestDeletedSockets(t *testing.T) {
	svc, sock := role("a.service", "serve"), socketUnit("a.socket", "")
	e, opt := options(t, 3, svc, sock)
	path := filepath.Join(e.dir, "sub", "a.sock")
	sock.Socket.ListenStream = []string{path}
	e.run(opt)
	first, _ := e.ask("unix", path)
	before := e.status("a.service")
	_, events, err := e.c.Subscribe(e.ctx, "a.service")
	e.must(err)
	e.must(os.RemoveAll(filepath.Dir(path)))
	e.must(os.Remove(opt.ControlPath))
	e.must(os.Remove(opt.NotifyPath))
	// The connection of before goes on, and tells when the service has the new socket.
	for up := false; !up; {
		select {
		case ev, open := <-events:
			if !open {
				t.Fatal("the connection ended")
			}
			up = ev.SubState == "running" && ev.InvocationID != before.InvocationID
		case <-e.ctx.Done():
			t.Fatal("the service was not restarted")
		}
	}
	if second, names := e.ask("unix", path); second == first || names != "a.socket" {
		t.Errorf("served by %s, before by %s; names %s", second, first, names)
	}
	c := e.dial()
	defer c.Close()
	if _, err := c.Info(e.ctx); err != nil {
		t.Error(err)
	}
	// A notify service gets up only over the new notify socket.
	n := role("n.service", "notify")
	n.Service.Type = spec.TypeNotify
	if r := e.transient(n); r.Result != "done" {
		t.Errorf("%+v", r)
	}
}

// A container is killed so long after it was asked to end, whatever its units ask for.
func TestStopWithin(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		deaf := shell("deaf.service", `trap "" TERM; while :; do sleep 1000; done`)
		slow := shell("slow.service", `exec sleep 1000`)
		slow.Service.ExecStop = []spec.Command{{Path: "/bin/sleep", Args: []string{"sleep", "1000"}}}
		first := shell("first.service", `exec sleep 1000`) // ends after the others have
		deaf.After, slow.After = []string{"first.service"}, []string{"first.service"}
		e, opt := options(t, tier, deaf, slow, first)
		for _, u := range []*spec.Unit{deaf, slow, first} {
			u.Service.TimeoutStopSec = spec.Infinity
			u.WantedBy = []string{"default.target"}
		}
		opt.StopWithin = 2 * time.Second
		e.run(opt)
		e.untilState("deaf.service", "running")
		e.untilState("slow.service", "running")
		e.stop() // panics when it does not end, and nothing but StopWithin ends these
	})
}
