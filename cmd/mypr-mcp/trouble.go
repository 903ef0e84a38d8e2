package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/supervisor/control"
	"mypr/supervisor/process"
)

const managerUnit = "manager.service"

// givenUp is the error for a manager that its start limit ended. Kernel and jobs were
// stopped then.
type givenUp struct{ wire *rpc.Error }

func (e givenUp) Error() string { return e.wire.Error() }

// Unwrap gives the error its shape on the wire.
func (e givenUp) Unwrap() error { return e.wire }

// hopeless is why a manager will not answer before somebody does something, with what
// that is; nil when it may.
func hopeless(u control.UnitStatus) error {
	switch {
	case u.Name != managerUnit:
	// One that failed in another way is started by the next connection: a waiting one counts.
	case u.Result == "start-limit-hit" && u.ActiveState == control.Failed && !u.StartQueued:
		why := cmp.Or(u.Error, "its last run ended with "+u.Result)
		return givenUp{rpc.Errorf(rpc.CodeUnavailable, "the manager was given up: %s", strings.TrimSuffix(why+"; "+u.StatusText, "; ")).
			WithHint("read .mypr/manager.log, mend it, then: mypr-mcp units start manager")}
	case u.Frozen:
		return rpc.Errorf(rpc.CodeUnavailable, "the manager does not answer: it is frozen").
			WithHint("mypr-mcp thaw manager")
	}
	return nil
}

// trouble waits until the supervisor of the runtime at socket says that the manager is
// hopeless. It is for client.Options.
func trouble(ctx context.Context, socket string) error {
	sv, err := control.Dial(ctx, workspace.PathsOf(socket).Control)
	if err != nil {
		return nil // it may be on its way; the manager starts one if need be
	}
	defer sv.Close()
	now, events, err := sv.Subscribe(ctx, managerUnit)
	if err != nil {
		return nil
	}
	// A session that is being stopped is no trouble: whoever may starts the next one.
	verdict := func(u control.UnitStatus) error {
		err := hopeless(u)
		if err != nil {
			if info, e := sv.Info(ctx); e != nil || info.ShuttingDown {
				return nil
			}
		}
		return err
	}
	for _, u := range now {
		if err := verdict(u); err != nil {
			return err
		}
	}
	for {
		select {
		case e, ok := <-events:
			if !ok {
				return nil
			}
			if err := verdict(e.UnitStatus); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// patiently runs f. When that takes more than a second, people are told what is waited
// for, and why if that can be seen, now and then until f is done.
func (c *cli) patiently(ctx context.Context, w *workspace.Workspace, what string, f func(context.Context) error) error {
	told, enough := context.WithCancel(ctx)
	var telling sync.WaitGroup
	telling.Go(func() {
		began, said := time.Now(), ""
		for next := time.Second; ; next *= 2 { // after 1, 2, 4, … seconds
			t := time.NewTimer(time.Until(began.Add(next)))
			select {
			case <-t.C:
				why := delay(told, w)
				if told.Err() != nil {
					return
				}
				line := fmt.Sprintf("waiting for %s, %d s", what, int(time.Since(began).Seconds()))
				if why != said && why != "" {
					line += ": " + why
				}
				said = why
				fmt.Fprintln(c.stderr, "mypr-mcp: "+line)
			case <-told.Done():
				t.Stop()
				return
			}
		}
	})
	err := f(ctx)
	enough()
	telling.Wait()
	return err
}

// delay is what keeps the manager, in words; "" when nothing is known to.
func delay(ctx context.Context, w *workspace.Workspace) (why string) {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond) // a supervisor that hangs must not keep the news
	defer cancel()
	l, err := w.Discover(ctx)
	if err != nil || l.Supervisor == nil {
		return ""
	}
	_ = withControl(ctx, l, func(ctx context.Context, sv *control.Client) error {
		u, err := sv.Show(ctx, managerUnit)
		if err == nil && l.Place().SamePIDs() && process.Suspended(u.MainPID) {
			why = fmt.Sprintf("the manager, process %d, is stopped by a signal or a debugger (kill -CONT %d, or mypr-mcp units restart manager; its watchdog ends it otherwise)", u.MainPID, u.MainPID)
		}
		return err
	})
	return why
}
