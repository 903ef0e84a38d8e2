package supervisor_test

import (
	"io"
	"log/slog"
	"os/exec"
	"testing"

	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

// BenchmarkTrue compares a transient unit of /bin/true, from the request to the end
// that the client was told of, with a plain fork, exec and wait.
func BenchmarkTrue(b *testing.B) {
	b.Run("forkexec", func(b *testing.B) {
		for b.Loop() {
			if err := exec.Command("/bin/true").Run(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("transient", func(b *testing.B) {
		e, opt := options(b, 0)
		opt.Logger = slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelInfo}))
		e.run(opt)
		u := &spec.Unit{Name: "true.service", Service: &spec.Service{Type: spec.TypeExec, ExecStart: []spec.Command{{Path: "/bin/true"}}}}
		for b.Loop() {
			r, _, err := e.c.StartTransient(b.Context(), control.TransientParams{Unit: u})
			if err != nil {
				b.Fatal(err)
			}
			if _, err := e.c.Wait(b.Context(), control.WaitParams{Name: u.Name, InvocationID: r.Unit.InvocationID}); err != nil {
				b.Fatal(err)
			}
		}
	})
}
