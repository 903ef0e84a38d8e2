package jobs

import (
	"encoding/json"
	"os/exec"
	"testing"
)

// BenchmarkRun is a job from call to answer, with the processes of the fake supervisor;
// BenchmarkExec is what the same program costs alone.
func BenchmarkRun(b *testing.B) {
	f, h := newFake(), newMemory()
	s := New(Options{Dir: b.TempDir(), Supervisor: f.connection, History: h})
	run := s.Methods()["shell.run"]
	p := json.RawMessage(params([]string{"/bin/true"}, ""))
	for b.Loop() {
		if _, err := run(b.Context(), caller, p); err != nil {
			b.Fatal(err)
		}
	}
	s.Suspend()
}

func BenchmarkExec(b *testing.B) {
	for b.Loop() {
		if err := exec.Command("/bin/true").Run(); err != nil {
			b.Fatal(err)
		}
	}
}
