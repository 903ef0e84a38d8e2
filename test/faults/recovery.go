package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"mypr/internal/api"
	"mypr/internal/client"
	"mypr/supervisor/control"
)

// recovery measures how long each fault is felt, several times, beside what is promised
// on a machine that has time. A busy one is late now and then: the exit status is that of
// a promise that even the best of several is far from.
type recovery struct {
	s      *session
	rounds int
	bad    int
}

func (v *recovery) row(name string, promise time.Duration, times []time.Duration, note string) {
	best, worst := times[0], times[0]
	for _, t := range times {
		best, worst = min(best, t), max(worst, t)
	}
	text, verdict := "-", ""
	if promise > 0 {
		text = "≤ " + promise.String()
		switch {
		case best > 10*promise:
			verdict = "  BROKEN"
			broken(name, best)
			v.bad++
		case worst > promise:
			verdict = "  late"
		}
	}
	fmt.Printf("| %-52s | %9v | %9v | %8s |%s %s\n", name, best.Round(100*time.Microsecond), worst.Round(100*time.Microsecond), text, verdict, note)
}

func (v *recovery) run() bool {
	if err := v.all(); err != nil {
		broken("recovery", err)
		return false
	}
	return v.bad == 0
}

// stalls runs short cells in a client of its own, one after the other, and tells the
// longest that one took while fault happened. It ends with the first cell that began
// after the fault was over.
func (v *recovery) stalls(f *front, fault func() error) (longest time.Duration, err error) {
	var wg sync.WaitGroup
	var over sync.Mutex
	ended := false
	wg.Add(1)
	running := make(chan struct{})
	var once sync.Once
	go func() {
		defer wg.Done()
		for n := 0; ; n++ {
			over.Lock()
			last := ended
			over.Unlock()
			began := time.Now()
			c, cerr := f.run("6 * 7", "")
			if cerr != nil || c.state != api.Succeeded {
				err = errors.Join(cerr, fmt.Errorf("a cell of the client: %s %s", c.state, c.err))
				once.Do(func() { close(running) })
				return
			}
			if n > 0 {
				longest = max(longest, time.Since(began))
			}
			once.Do(func() { close(running) })
			if last {
				return
			}
		}
	}()
	<-running
	ferr := fault()
	over.Lock()
	ended = true
	over.Unlock()
	wg.Wait()
	return longest, errors.Join(ferr, err)
}

func (v *recovery) all() error {
	f, err := v.s.front()
	if err != nil {
		return err
	}
	defer f.end()
	if err := f.init("clock"); err != nil {
		return err
	}
	if _, err := must(f, "mark = 1"); err != nil {
		return err
	}
	ctlPath, sock, err := v.s.paths()
	if err != nil {
		return err
	}
	status := func() error {
		c := client.New(client.Options{Ensure: func(context.Context) (string, error) { return sock, nil }, Kind: "cli", Name: "probe", Passive: true})
		defer c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := c.Status(ctx, api.StatusParams{})
		return err
	}
	info := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		c, err := control.Dial(ctx, ctlPath)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Info(ctx)
		return err
	}
	fmt.Printf("| %-52s | %9s | %9s | %8s |\n|%s|%s|%s|%s|\n", "from → to", "best", "worst", "promised", strings.Repeat("-", 54), strings.Repeat("-", 11), strings.Repeat("-", 11), strings.Repeat("-", 10))
	var answer, again, stall, sup, supStall, both, kernel, restart []time.Duration
	for range v.rounds {
		pid, err := v.s.target("manager.service")
		if err != nil {
			return err
		}
		var took time.Duration
		longest, err := v.stalls(f, func() error {
			began := time.Now()
			if err := kill(pid); err != nil {
				return err
			}
			err := status()
			took = time.Since(began)
			return err
		})
		if err != nil {
			return fmt.Errorf("manager killed: %w", err)
		}
		answer, stall = append(answer, took), append(stall, longest)

		if pid, err = v.s.target("supervisor"); err != nil {
			return err
		}
		longest, err = v.stalls(f, func() error {
			began := time.Now()
			if err := kill(pid); err != nil {
				return err
			}
			err := info()
			took = time.Since(began)
			return err
		})
		if err != nil {
			return fmt.Errorf("supervisor killed: %w", err)
		}
		sup, supStall = append(sup, took), append(supStall, longest)

		if pid, err = v.s.target("supervisor"); err != nil {
			return err
		}
		manager, err := v.s.target("manager.service")
		if err != nil {
			return err
		}
		began := time.Now()
		if err := errors.Join(kill(pid), kill(manager), status()); err != nil {
			return fmt.Errorf("both killed: %w", err)
		}
		both = append(both, time.Since(began))
		if _, err := must(f, "mark"); err != nil {
			return err
		}

		longest, err = v.stalls(f, func() error {
			began := time.Now()
			_, err := v.s.cli("restart", "--keep-kernel")
			took = time.Since(began)
			return err
		})
		if err != nil {
			return fmt.Errorf("restart: %w", err)
		}
		again, restart = append(again, took), append(restart, longest)
	}
	for range v.rounds {
		pid, err := v.s.target("kernel.service")
		if err != nil {
			return err
		}
		began := time.Now()
		if err := kill(pid); err != nil {
			return err
		}
		for {
			c, err := f.run("1", "")
			if err != nil {
				return err
			}
			if c.state == api.Succeeded {
				break
			}
		}
		kernel = append(kernel, time.Since(began))
	}
	v.row("manager killed → next answer", 500*time.Millisecond, answer, "")
	v.row("manager killed → longest stall of a client's cells", 0, stall, "")
	v.row("supervisor killed → control socket answers", time.Second, sup, "")
	v.row("supervisor killed → longest stall of a client's cells", 50*time.Millisecond, supStall, "(nobody notices)")
	v.row("both killed → next answer", 0, both, "")
	v.row("kernel killed → a cell of the new generation is done", 0, kernel, "")
	v.row("restart --keep-kernel → longest client stall", 300*time.Millisecond, restart, "")
	v.row("restart --keep-kernel, the command itself", 0, again, "")
	f.end()
	out, err := v.s.cli("stop")
	if err != nil {
		return fmt.Errorf("%w %s", err, out)
	}
	if left := v.s.processes(); len(left) > 0 {
		return fmt.Errorf("left: %v", left)
	}
	return nil
}
