package store

import (
	"fmt"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func openTest(t testing.TB) *Store {
	t.Helper()
	s, moved, err := Open(t.TempDir(), nil)
	if err != nil || moved != "" {
		t.Fatal(moved, err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func BenchmarkExecution(b *testing.B) {
	s := openTest(b)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		e := &Entity{ID: itoa(i), Kind: "execution", Client: "calm-otter", Request: ptr(itoa(i)), Generation: "g", State: "queued", Code: "1+1"}
		if err := s.Do(func(t *Tx) error { _, err := t.Insert(e); return err }); err != nil {
			b.Fatal(err)
		}
		if err := s.Do(func(t *Tx) error {
			if err := t.Update(e); err != nil {
				return err
			}
			return t.Acked("g", int64(i))
		}); err != nil {
			b.Fatal(err)
		}
	}
}

func ptr[T any](v T) *T { return &v }

func itoa(i int) string { return string(rune('a'+i%26)) + fmt.Sprint(i) }
