package workspace

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync"
	"testing"

	"mypr/internal/api"
)

func TestRuntimeRecord(t *testing.T) {
	w := setup(t)
	if err := w.EnsureLayout(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.ReadRuntime(); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("without a record: %v", err)
	}
	if err := w.RecordSupervisor(t.Context(), "i1", "v1", api.Origin{Source: "cli"}); err != nil {
		t.Fatal(err)
	}
	if err := w.UpdateRuntime(t.Context(), func(r *Runtime) { r.Manager, r.PID, r.Generation = Self("v1"), 42, "g1" }); err != nil {
		t.Fatal(err)
	}
	read := func() *Runtime {
		t.Helper()
		r, err := w.ReadRuntime()
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := read()
	if r.Instance != "i1" || r.PID != 42 || r.Generation != "g1" || r.WorkspaceID != w.ID || r.Paths != w.Paths ||
		r.Environment.Source != "cli" || r.Supervisor.PID != os.Getpid() || r.Supervisor.PIDNamespace == "" || r.Manager.Executable == "" {
		t.Errorf("record %+v", r)
	}
	// The same supervisor after a re-execution, then another one.
	if err := w.RecordSupervisor(t.Context(), "i1", "v2", api.Origin{Source: "other"}); err != nil {
		t.Fatal(err)
	}
	if r := read(); r.Version != "v2" || r.PID != 42 || r.Environment.Source != "cli" {
		t.Errorf("the same instance lost what it had: %+v", r)
	}
	if err := w.RecordSupervisor(t.Context(), "i2", "v2", api.Origin{Source: "systemd"}); err != nil {
		t.Fatal(err)
	}
	if r := read(); r.PID != 0 || r.Generation != "" || r.Manager.PID != 0 || r.Environment.Source != "systemd" {
		t.Errorf("a new instance kept the old one's manager: %+v", r)
	}
	info, err := os.Stat(w.runtimeFile())
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

func TestRuntimeRecordConcurrently(t *testing.T) {
	w := setup(t)
	if err := w.EnsureLayout(); err != nil {
		t.Fatal(err)
	}
	if err := w.RecordSupervisor(t.Context(), "i", "v", api.Origin{}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 5 {
				if err := w.UpdateRuntime(t.Context(), func(r *Runtime) { r.PID++ }); err != nil {
					t.Error(err)
				}
				if _, err := w.ReadRuntime(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if r, err := w.ReadRuntime(); err != nil || r.PID != 40 {
		t.Errorf("%+v, %v: updates were lost", r, err)
	}
	names, err := os.ReadDir(w.Root)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if strings.HasPrefix(n.Name(), ".runtime-") {
			t.Errorf("left behind: %s", n.Name())
		}
	}
}

func TestRuntimeRecordDamaged(t *testing.T) {
	w := setup(t)
	if err := w.EnsureLayout(); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"", "{", "[]", `{"workspace_id":"1:2","instance":"stranger","pid":9}`, strings.Repeat(" ", maxRecord+1)} {
		if err := os.WriteFile(w.runtimeFile(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if r := w.recorded(); r != nil {
			t.Errorf("%.20q counts as a record: %+v", text, r)
		}
		if err := w.UpdateRuntime(t.Context(), func(r *Runtime) { r.Generation = "g" }); err != nil {
			t.Fatal(err)
		}
		if r := w.recorded(); r == nil || r.Instance != "" || r.PID != 0 || r.Generation != "g" {
			t.Errorf("after %.20q: %+v", text, r)
		}
	}
}
