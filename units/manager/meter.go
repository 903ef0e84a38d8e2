package manager

import (
	"slices"
	"sync"
	"time"

	"mypr/internal/api"
)

const (
	meterKeep    = 512 // times kept of each method
	meterMethods = 256 // names kept; a name that is no method is a name too
)

// meter keeps what calls of the Python API cost this manager: from the moment the frame
// was read until the answer was on its way. What programs, the disk and waiting for
// others took is in it; the time that Python needs to send and to wake up is not.
type meter struct {
	mu      sync.Mutex
	methods map[string]*costs
}

type costs struct {
	count int64
	last  []uint32 // microseconds; a ring of the last meterKeep
}

func (t *meter) add(method string, d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.methods[method]
	if c == nil {
		if len(t.methods) >= meterMethods {
			return
		}
		if t.methods == nil {
			t.methods = map[string]*costs{}
		}
		c = &costs{}
		t.methods[method] = c
	}
	us := uint32(min(d.Microseconds(), 1<<32-1))
	if len(c.last) < meterKeep {
		c.last = append(c.last, us)
	} else {
		c.last[c.count%meterKeep] = us
	}
	c.count++
}

// report lists the methods by name.
func (t *meter) report() []api.CallCost {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]api.CallCost, 0, len(t.methods))
	for method, c := range t.methods {
		sorted := slices.Sorted(slices.Values(c.last))
		at := func(p int) float64 { return float64(sorted[min(len(sorted)*p/100, len(sorted)-1)]) / 1e3 }
		list = append(list, api.CallCost{Method: method, Count: c.count, P50MS: at(50), P99MS: at(99), MaxMS: at(100)})
	}
	slices.SortFunc(list, func(a, b api.CallCost) int {
		if a.Method < b.Method {
			return -1
		}
		return 1
	})
	return list
}
