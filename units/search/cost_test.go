package search

import (
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"testing"
	"time"
)

// A search costs what rg costs, and at most 30 % and 10 ms more. Both run in turn, and
// the best of each counts: other work on the machine only makes runs longer.
func TestCostOverRG(t *testing.T) {
	rg := need(t, "rg")
	w := newWorld(t)
	src := goSource(t)
	for _, q := range []struct{ pattern, mode string }{{"TODO|FIXME", "matches"}, {"func .*Reader", "matches"}, {"return", "counts"}, {"nowhere to be found", "matches"}, {"", "files"}} {
		args := []string{"--no-config", "--line-number", "--with-filename", "--no-heading", "-e", q.pattern, src}
		params := fmt.Sprintf(`{"pattern":%q,"paths":%q,"mode":%q}`, q.pattern, src, q.mode)
		switch q.mode {
		case "counts":
			args = append(args, "--count")
		case "files":
			args = []string{"--no-config", "--files", src}
			params = fmt.Sprintf(`{"paths":%q}`, src)
		}
		plain, ours := time.Hour, time.Hour
		rounds := 6
		if raceEnabled {
			rounds = 1 // times mean nothing
		}
		for range rounds {
			plain = min(plain, timeOf(t, rg, args))
			start := time.Now()
			if _, err := w.Methods()["fs.search"](t.Context(), json.RawMessage(params)); err != nil {
				t.Fatal(err)
			}
			ours = min(ours, time.Since(start))
		}
		t.Logf("%-22q %-8s rg %v, fs.search %v (%.2f)", q.pattern, q.mode, plain, ours, float64(ours)/float64(plain))
		if limit := plain*13/10 + 10*time.Millisecond; ours > limit && !raceEnabled {
			t.Errorf("%q: %v, the limit is %v", q.pattern, ours, limit)
		}
	}
}

func timeOf(t *testing.T, program string, args []string) time.Duration {
	t.Helper()
	start := time.Now()
	cmd := exec.Command(program, args...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, out)
	_ = cmd.Wait()
	return time.Since(start)
}
