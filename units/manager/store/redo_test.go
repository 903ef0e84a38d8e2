package store

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"mypr/internal/api"
)

// crash copies what a process that is killed now would leave behind.
func crash(t testing.TB, dir string) string {
	t.Helper()
	to := t.TempDir()
	for _, suffix := range []string{redoSuffix, "", "-wal"} { // the log first: what the database has later does no harm
		b, err := os.ReadFile(filepath.Join(dir, "history.sqlite3"+suffix))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, "history.sqlite3"+suffix), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

type memory struct {
	mu sync.Mutex
	b  map[string][]byte
}

func (m *memory) write(id string, data []byte, offset int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.b == nil {
		m.b = map[string][]byte{}
	}
	b := m.b[id]
	if n := int(offset) + len(data); n > len(b) {
		b = append(b, make([]byte, n-len(b))...)
	}
	copy(b[offset:], data)
	m.b[id] = b
	return nil
}

func submit(t testing.TB, s *Store, c *Change) {
	t.Helper()
	done := make(chan error, 1)
	s.Submit(&Op{Keep: true, Change: c, Done: func(err error) { done <- err }})
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(deadline):
		t.Fatal("never done")
	}
}

func TestChangesAreDurableAtOnce(t *testing.T) {
	dir := t.TempDir()
	var journals memory
	s, _, err := Open(dir, Options{Write: journals.write})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	e := entity(1)
	e.Seq = s.NextSeq()
	submit(t, s, &Change{Insert: []*Entity{e}, Log: []api.LogEvent{{Event: "queued", ID: e.ID, Data: map[string]any{"a": 1}}}})
	if ok, err := s.Known(e.Client, *e.Request); !ok || err != nil {
		t.Errorf("the request id is not known: %v", err)
	}
	e2 := *e
	e2.State, e2.Error, e2.JournalBytes, e2.Code = api.FailedCell, "no", 5, ""
	submit(t, s, &Change{Output: []Output{{ID: e.ID, Offset: 0, Data: []byte("hello")}}, Update: []*Entity{&e2}, Generation: "g", Acked: 3})
	killed := crash(t, dir)
	// It is carried out soon, and reading does not see less than was promised.
	got, err := s.Entity(e.ID)
	if err != nil || got == nil || got.State != api.FailedCell || got.Code != "1+1" || got.JournalBytes != 5 {
		t.Fatalf("got %+v %v", got, err)
	}
	if string(journals.b[e.ID]) != "hello" {
		t.Errorf("journals %q", journals.b)
	}
	// The successor of a killed process has it, too, and only once.
	for range 2 {
		var again memory
		s2, moved, err := Open(killed, Options{Write: again.write})
		if err != nil || moved != "" {
			t.Fatal(moved, err)
		}
		got, err = s2.Entity(e.ID)
		if err != nil || got == nil || got.State != api.FailedCell || got.Error != "no" || got.Seq != e.Seq {
			t.Errorf("after a kill: %+v %v", got, err)
		}
		if ok, err := s2.Known(e.Client, *e.Request); !ok || err != nil {
			t.Errorf("after a kill the request id is not known: %v", err)
		}
		if events, err := s2.Events("", 0, 10); err != nil || len(events) != 1 || events[0].Data["a"] != 1.0 {
			t.Errorf("events %+v %v", events, err)
		}
		if next := s2.NextSeq(); next <= e.Seq {
			t.Errorf("the next sequence number is %d", next)
		}
		if fi, err := os.Stat(filepath.Join(killed, "history.sqlite3-redo")); err != nil || fi.Size() != 0 {
			t.Errorf("the log was not emptied: %v %v", fi.Size(), err)
		}
		s2.Close()
	}
}

func TestChangesAreCarriedOutSoon(t *testing.T) {
	s := openTest(t)
	applied := make(chan struct{})
	e := entity(1)
	e.Seq = s.NextSeq()
	s.Submit(&Op{Change: &Change{Insert: []*Entity{e}}, After: func() { close(applied) }})
	select {
	case <-applied:
	case <-time.After(deadline):
		t.Fatal("not carried out")
	}
	if ok, err := s.known.ask(e.Client, *e.Request); !ok || err != nil {
		t.Errorf("not in the database: %v", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending != 0 || len(s.inserts) != 0 {
		t.Errorf("%d pending, %v", s.pending, s.inserts)
	}
}

// However far the log was written when the process was killed, what the next one finds
// is what had been promised up to some moment, without holes.
// A successor takes long records of the log for damage, so none are written, whichever
// part of a change is long.
func TestLongChanges(t *testing.T) {
	long := strings.Repeat("x", 3<<20)
	for name, change := range map[string]func(e *Entity) *Change{
		"command":  func(e *Entity) *Change { e.Code = long; return &Change{Update: []*Entity{e}} },
		"job":      func(e *Entity) *Change { e.Job = []byte(`"` + long + `"`); return &Change{Update: []*Entity{e}} },
		"new job":  func(e *Entity) *Change { e.Job = []byte(`"` + long + `"`); return &Change{Insert: []*Entity{e}} },
		"log line": func(e *Entity) *Change { return &Change{Log: []api.LogEvent{{Event: "x", Error: long}}} },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s, _, err := Open(dir, Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			c := change(entity(int(s.NextSeq())))
			submit(t, s, c)
			last := entity(int(s.NextSeq()))
			submit(t, s, &Change{Insert: []*Entity{last}})
			after, _, err := Open(crash(t, dir), Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer after.Close()
			if e, err := after.Entity(last.ID); e == nil || err != nil {
				t.Errorf("what followed the long change is lost: %v", err)
			}
			for _, e := range c.Insert {
				if e, err := after.Entity(e.ID); e == nil || err != nil {
					t.Errorf("the long change is lost: %v", err)
				}
			}
		})
	}
}

func TestTornLog(t *testing.T) {
	dir := t.TempDir()
	s := openIn(t, dir)
	const n = 20
	for i := range n {
		e := entity(i)
		e.Seq = s.NextSeq()
		s.mu.Lock()
		s.leading = true // nothing is carried out
		s.mu.Unlock()
		s.Submit(&Op{Change: &Change{Insert: []*Entity{e}}})
	}
	killed := crash(t, dir)
	s.mu.Lock()
	s.leading = false
	s.mu.Unlock()
	s.Close()
	log, err := os.ReadFile(filepath.Join(killed, "history.sqlite3-redo"))
	if err != nil {
		t.Fatal(err)
	}
	for range 40 {
		cut := bytes.Clone(log[:rand.IntN(len(log)+1)])
		if len(cut) > 0 && rand.IntN(3) == 0 {
			cut[rand.IntN(len(cut))] ^= 1 << rand.IntN(8)
		}
		here := t.TempDir()
		if err := os.WriteFile(filepath.Join(here, "history.sqlite3-redo"), cut, 0o600); err != nil {
			t.Fatal(err)
		}
		s := openIn(t, here)
		live, err := s.Live()
		if err != nil {
			t.Fatal(err)
		}
		for i, e := range live {
			if e.ID != entity(i).ID || e.Code != "1+1" {
				t.Fatalf("%d is %+v", i, e)
			}
		}
		if len(cut) == len(log) && bytes.Equal(cut, log) && len(live) != n {
			t.Errorf("%d of %d from a whole log", len(live), n)
		}
		s.Close()
	}
}

// Changes and functions keep their order, whichever way they take.
func TestChangesAndFunctionsKeepTheirOrder(t *testing.T) {
	s := openTest(t)
	var mu sync.Mutex
	var order []int
	var wg sync.WaitGroup
	id := func(i int) string { return fmt.Sprintf("%032x", i) }
	for i := range 500 {
		wg.Add(1)
		op := &Op{Keep: true, Done: func(err error) {
			defer wg.Done()
			if err != nil {
				t.Error(i, err)
			}
			mu.Lock()
			defer mu.Unlock()
			order = append(order, i)
		}}
		e := entity(i)
		switch rand.IntN(4) {
		case 0:
			op.Apply = func(tx *Tx) error { _, err := tx.Insert(e); return err }
		case 1: // too large for the log
			e.Seq, e.Code = s.NextSeq(), strings.Repeat("x", maxRedo+1)
			op.Change = &Change{Insert: []*Entity{e}}
		default:
			e.Seq = s.NextSeq()
			op.Change = &Change{Insert: []*Entity{e}, Log: []api.LogEvent{{Event: "queued"}}}
		}
		s.Submit(op)
	}
	wg.Wait()
	for i, n := range order {
		if i != n {
			t.Fatalf("%d was done as number %d", n, i)
		}
	}
	for i := range 500 {
		if e, err := s.Entity(id(i)); err != nil || e == nil {
			t.Fatalf("%d is missing: %v", i, err)
		}
	}
}

func TestLogIsEmptied(t *testing.T) {
	dir := t.TempDir()
	s := openIn(t, dir)
	defer s.Close()
	for i := range 5000 {
		e := entity(i)
		e.Seq, e.Code = s.NextSeq(), strings.Repeat("x", 2000)
		s.Submit(&Op{Change: &Change{Insert: []*Entity{e}}})
	}
	s.Flush()
	if fi, err := os.Stat(filepath.Join(dir, "history.sqlite3-redo")); err != nil || fi.Size() > 10<<20 {
		t.Errorf("the log has %d bytes (%v)", fi.Size(), err)
	}
	if list, err := s.History("", 1, 0); err != nil || len(list) != 1 || list[0].ID != entity(4999).ID {
		t.Errorf("%v %v", list, err)
	}
}

func FuzzRedo(f *testing.F) {
	path := filepath.Join(f.TempDir(), "redo")
	r, err := openRedo(path)
	if err != nil {
		f.Fatal(err)
	}
	for i := range 3 {
		if err := r.append(&Change{Insert: []*Entity{entity(i)}, Output: []Output{{ID: "x", Data: []byte("y")}}}); err != nil {
			f.Fatal(err)
		}
	}
	r.f.Close()
	good, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:len(good)-3])
	f.Add([]byte("\xff\xff\xff\xff\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		last := int64(0)
		if err := readRedo(bytes.NewReader(data), func(rec redoRecord) error {
			if rec.Seq <= last || rec.Change == nil {
				t.Fatalf("record %+v after %d", rec, last)
			}
			last = rec.Seq
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	})
}

func BenchmarkChanges(b *testing.B) {
	s := openTest(b)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		e := entity(i)
		if known, err := s.Known(e.Client, *e.Request); known || err != nil {
			b.Fatal(known, err)
		}
		e.Seq = s.NextSeq()
		submit(b, s, &Change{Insert: []*Entity{e}, Log: []api.LogEvent{{Time: 1, Event: "queued", Kind: "execution", ID: e.ID}}})
		e2 := *e
		e2.Code = ""
		submit(b, s, &Change{Update: []*Entity{&e2}, Log: []api.LogEvent{{Time: 1, Event: "succeeded", Kind: "execution", ID: e.ID}}, Generation: "g", Acked: int64(i)})
	}
}

// A cell was promised although its request id was not new: it is recorded all the same.
func TestRequestIDThatWasNotNew(t *testing.T) {
	dir := t.TempDir()
	s := openIn(t, dir)
	defer s.Close()
	one, two, three := entity(1), entity(2), entity(3)
	two.Request, three.Request = one.Request, one.Request
	one.Seq, two.Seq, three.Seq = s.NextSeq(), s.NextSeq(), s.NextSeq()
	submit(t, s, &Change{Insert: []*Entity{one}})
	submit(t, s, &Change{Insert: []*Entity{two}})
	s.Flush()
	submit(t, s, &Change{Insert: []*Entity{three}})
	s2, _, err := Open(crash(t, dir), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s2.Close()
	for _, e := range []*Entity{one, two, three} {
		if got, err := s2.Entity(e.ID); err != nil || got == nil {
			t.Errorf("%s: %v %v", e.ID, got, err)
		}
	}
	if got, err := s2.ByRequest(one.Client, *one.Request); err != nil || got == nil || got.ID != one.ID {
		t.Errorf("%v %v", got, err)
	}
}

// Small journals of cells that come thick and fast are kept in their records, and move
// into a file when they grow, also in the hands of a successor.
func TestPackedJournals(t *testing.T) {
	dir := t.TempDir()
	var files memory
	s, _, err := Open(dir, Options{Write: files.write})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const n = 2 * packFrom
	text := func(i, size int) []byte { return bytes.Repeat([]byte{byte('a' + i%26)}, size) }
	for i := range n {
		e := entity(i)
		e.Seq = s.NextSeq()
		submit(t, s, &Change{Insert: []*Entity{e}, Output: []Output{{ID: e.ID, Data: text(i, 100)}}})
	}
	check := func(s *Store, files *memory, i, size int, packed bool) {
		t.Helper()
		e, err := s.Entity(entity(i).ID)
		if err != nil || e == nil {
			t.Fatal(e, err)
		}
		if got, file := string(e.Journal), string(files.b[e.ID]); packed && (got != string(text(i, size)) || file != "") || !packed && (got != "" || file != string(text(i, size))) {
			t.Errorf("%d: %d bytes in the record, %d in the file", i, len(got), len(file))
		}
	}
	check(s, &files, 0, 100, true)
	submit(t, s, &Change{Output: []Output{{ID: entity(1).ID, Offset: 100, Data: text(1, 10)}}})
	check(s, &files, 1, 110, true)
	submit(t, s, &Change{Output: []Output{{ID: entity(2).ID, Offset: 100, Data: text(2, maxPacked)}}})
	check(s, &files, 2, 100+maxPacked, false)
	submit(t, s, &Change{Output: []Output{{ID: entity(2).ID, Offset: 100 + maxPacked, Data: text(2, 5)}}})
	check(s, &files, 2, 105+maxPacked, false)
	// One that comes alone has a file.
	e := entity(n)
	e.Seq = s.NextSeq()
	submit(t, s, &Change{Insert: []*Entity{e}, Output: []Output{{ID: e.ID, Data: text(n, 7)}}})
	check(s, &files, n, 7, false)
	// What was promised and not carried out when the process was killed.
	submit(t, s, &Change{Output: []Output{{ID: entity(3).ID, Offset: 100, Data: text(3, 10)}}})
	submit(t, s, &Change{Output: []Output{{ID: entity(4).ID, Offset: 100, Data: text(4, maxPacked)}}})
	again := memory{b: maps.Clone(files.b)}
	s2, _, err := Open(crash(t, dir), Options{Write: again.write})
	if err != nil {
		t.Fatal(err)
	}
	defer s2.Close()
	check(s2, &again, 0, 100, true)
	check(s2, &again, 2, 105+maxPacked, false)
	check(s2, &again, 3, 110, true)
	check(s2, &again, 4, 100+maxPacked, false)
}
