package supervisor

import (
	"fmt"
	"log/slog"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"mypr/supervisor/spec"
)

// Memory goes back to the system once, when many transient units are gone and no more
// have come for a while. Nothing in these tests but that forces a collection.
func TestMemoryIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Supervisor{queue: newQueue(), log: slog.New(slog.DiscardHandler), units: map[string]*unit{}, dirty: map[*unit]struct{}{}}
		n := 0
		unload := func(count int) {
			for range count {
				n++
				name := fmt.Sprintf("job-%d.service", n)
				s.unload(&unit{s: s, name: name, def: &spec.Unit{Name: name, Service: &spec.Service{}}, transient: true})
			}
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		before := m.NumForcedGC
		after := func(d time.Duration, want uint32, what string) {
			t.Helper()
			for end, over := time.After(d), false; !over; { // of the bubble's clock
				select {
				case <-s.queue.wake:
				case <-end:
					over = true
					synctest.Wait() // for timers of the same moment
				}
				for _, f := range s.queue.take() {
					f()
				}
			}
			runtime.ReadMemStats(&m)
			if got := m.NumForcedGC - before; got != want {
				t.Errorf("%s: given back %d times, not %d", what, got, want)
			}
		}
		unload(tidyMany - 1)
		after(2*tidyAfter, 0, "few units")
		unload(1)
		after(tidyAfter-time.Second, 0, "many units, a moment ago")
		unload(1)
		after(time.Second, 0, "many units, and another a moment ago")
		after(tidyAfter, 1, "many units, and no more")
		unload(tidyMany - 1)
		after(2*tidyAfter, 1, "few units since")
		unload(1)
		after(tidyAfter, 2, "many units again")
	})
}
