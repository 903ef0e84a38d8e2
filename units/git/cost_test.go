package git

import (
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"mypr/internal/job"
)

// A status costs what git costs; the root of the repository is looked up meanwhile.
func TestCostOverGit(t *testing.T) {
	w := newWorld(t)
	for i := range 2000 {
		w.put(filepath.Join("dir", string(rune('a'+i%26)), "f"+time.Duration(i).String()), "x")
	}
	w.commit("one")
	w.put("dir/a/new", "x")
	s, err := New(Options{Root: w.dir, Runner: job.Exec{}, Env: w.env})
	if err != nil {
		t.Fatal(err)
	}
	plain, ours := time.Hour, time.Hour
	rounds := 15
	if raceEnabled {
		rounds = 1 // times mean nothing
	}
	for range rounds {
		start := time.Now()
		cmd := exec.Command("git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "-z")
		cmd.Dir, cmd.Env = w.dir, w.env
		if _, err := cmd.Output(); err != nil {
			t.Fatal(err)
		}
		plain = min(plain, time.Since(start))
		start = time.Now()
		if _, err := s.Status(t.Context(), StatusParams{MaxEntries: 200, MaxBytes: 32768}); err != nil {
			t.Fatal(err)
		}
		ours = min(ours, time.Since(start))
	}
	t.Logf("git status %v, ws.git.status %v (%.2f)", plain, ours, float64(ours)/float64(plain))
	if limit := plain*13/10 + 10*time.Millisecond; ours > limit && !raceEnabled {
		t.Errorf("%v, the limit is %v", ours, limit)
	}
}
