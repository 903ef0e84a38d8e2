package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// No log grows for ever: the one over 8 MiB becomes the old one, and each of the
// processes that write to it goes on where it is.
func TestLogsAreRotated(t *testing.T) {
	s := newSession(t)
	full := strings.Repeat(strings.Repeat("x", 1<<20)+"\n", 9)
	names := []string{"supervisor", "manager", "kernel"}
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(s.dir, ".mypr", name+".log"), []byte(full), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a := s.serve()
	a.init("a")
	a.must("1")
	for _, name := range names {
		now, old := s.read(".mypr/"+name+".log"), s.read(".mypr/"+name+".1.log")
		if !strings.HasPrefix(old, full) || len(now) > 1<<20 {
			t.Errorf("%s: %d bytes now, %d in the old one", name, len(now), len(old))
		}
	}
	if log := s.read(".mypr/manager.log"); !strings.Contains(log, "kernel connected") || strings.ContainsRune(log, 0) {
		t.Errorf("%.500q", log)
	}
	// While they run, and for the next kernel. (What it is filled with is few lines: a
	// failed test prints it.)
	if err := os.WriteFile(filepath.Join(s.dir, ".mypr", "kernel.log"), []byte(full), 0o600); err != nil {
		t.Fatal(err)
	}
	s.ok("reset")
	if log := s.read(".mypr/kernel.log"); len(log) > 1<<20 {
		t.Errorf("%d bytes", len(log))
	}
}
