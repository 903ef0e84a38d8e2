package store

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"mypr/internal/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const deadline = 60 * time.Second

func openIn(t testing.TB, dir string) *Store {
	t.Helper()
	s, moved, err := Open(dir, Options{})
	if err != nil || moved != "" {
		t.Fatal(moved, err)
	}
	return s
}

func openTest(t testing.TB) *Store {
	t.Helper()
	s := openIn(t, t.TempDir())
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func ptr[T any](v T) *T { return &v }

func entity(i int) *Entity {
	return &Entity{ID: fmt.Sprintf("%032x", i), Kind: "execution", Client: "calm-otter", Request: ptr(fmt.Sprint(i)), Generation: "g", State: api.Queued, Created: 1, Code: "1+1"}
}

func insert(t testing.TB, s *Store, e *Entity) bool {
	t.Helper()
	var isNew bool
	if err := s.Do(func(tx *Tx) (err error) { isNew, err = tx.Insert(e); return err }); err != nil {
		t.Fatal(err)
	}
	return isNew
}

func TestRecordsSurviveReopening(t *testing.T) {
	dir := t.TempDir()
	s := openIn(t, dir)
	e := entity(1)
	e.Connection = "conn"
	if !insert(t, s, e) || e.Seq != 1 {
		t.Fatalf("not inserted: %+v", e)
	}
	e.State, e.Error, e.ErrorInfo, e.Truncated, e.JournalEvents, e.JournalBytes = api.FailedCell, "no", &api.ErrorInfo{Code: "x", Message: "no"}, true, 3, 99
	if err := s.Do(func(tx *Tx) error { return tx.Update(e) }); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openIn(t, dir)
	defer s.Close()
	got, err := s.Entity(e.ID)
	if err != nil || got == nil {
		t.Fatal(got, err)
	}
	if got.State != e.State || got.Code != "1+1" || got.Connection != "conn" || got.ErrorInfo.Message != "no" || !got.Truncated || got.JournalEvents != 3 || got.JournalBytes != 99 || *got.Request != "1" {
		t.Errorf("got %+v", got)
	}
	if other, err := s.Entity("nobody"); other != nil || err != nil {
		t.Errorf("unknown id: %v %v", other, err)
	}
}

func TestRequestIDIsUniquePerClient(t *testing.T) {
	s := openTest(t)
	a, b, c, d, e := entity(1), entity(2), entity(3), entity(4), entity(5)
	a.Request, b.Request, c.Request = ptr(""), ptr(""), ptr("")
	c.Client = "bold-fox"
	d.Request, e.Request = nil, nil
	if !insert(t, s, a) || insert(t, s, b) || !insert(t, s, c) || !insert(t, s, d) || !insert(t, s, e) {
		t.Error("wrong ones were taken")
	}
	if got, err := s.ByRequest("calm-otter", ""); err != nil || got == nil || got.ID != a.ID {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestLiveHistoryAndEvents(t *testing.T) {
	s := openTest(t)
	for i := range 10 {
		e := entity(i)
		if i%2 == 0 {
			e.Client = "bold-fox"
		}
		insert(t, s, e)
		if i > 6 {
			e.State = api.Lost
			if err := s.Do(func(tx *Tx) error {
				if err := tx.Update(e); err != nil {
					return err
				}
				return tx.Log(&api.LogEvent{Time: 1, Event: "lost", Kind: "execution", ID: e.ID, ClientID: e.Client, Data: map[string]any{"n": i}})
			}); err != nil {
				t.Fatal(err)
			}
		}
	}
	ids := func(list []*Entity) (n []int64) {
		for _, e := range list {
			n = append(n, e.Seq)
		}
		return n
	}
	live, err := s.Live()
	if err != nil || !slices.Equal(ids(live), []int64{1, 2, 3, 4, 5, 6, 7}) {
		t.Errorf("live %v %v", ids(live), err)
	}
	page, err := s.History("", 3, 0)
	if err != nil || !slices.Equal(ids(page), []int64{10, 9, 8}) {
		t.Errorf("history %v %v", ids(page), err)
	}
	page, _ = s.History("bold-fox", 3, 8)
	if !slices.Equal(ids(page), []int64{7, 5, 3}) {
		t.Errorf("history of one %v", ids(page))
	}
	events, err := s.Events("", -1, 2)
	if err != nil || len(events) != 2 || events[0].Seq != 2 || events[1].Seq != 3 || events[1].Data["n"] != 9.0 {
		t.Errorf("recent events %+v %v", events, err)
	}
	events, _ = s.Events("bold-fox", 0, 20)
	if len(events) != 1 || events[0].Data["n"] != 8.0 {
		t.Errorf("events of one %+v", events)
	}
}

func TestClientsAndGenerations(t *testing.T) {
	s := openTest(t)
	do := func(f func(*Tx) error) {
		t.Helper()
		if err := s.Do(f); err != nil {
			t.Fatal(err)
		}
	}
	var first, again bool
	do(func(tx *Tx) (err error) { first, err = tx.Reserve("calm-otter", true, 1); return err })
	do(func(tx *Tx) (err error) { again, err = tx.Reserve("calm-otter", false, 2); return err })
	if !first || again {
		t.Error("an id was given twice")
	}
	do(func(tx *Tx) error { return tx.Begin("g1", 1) })
	do(func(tx *Tx) error { return tx.Begin("g1", 5) })
	do(func(tx *Tx) error { return tx.Acked("g1", 17) })
	var seq int64
	do(func(tx *Tx) (err error) { seq, err = tx.End("g1", 9, "kernel_died", "why"); return err })
	do(func(tx *Tx) (err error) { _, err = tx.End("g1", 10, "reset", "later"); return err })
	g, err := s.Generation("g1")
	if err != nil || g == nil || *g != (Generation{Seq: seq, Generation: "g1", Started: 1, Acked: 17, Ended: 9, Cause: "kernel_died", Text: "why"}) {
		t.Errorf("got %+v %v", g, err)
	}
	// Who comes after an end need not be told of it, who was there before must be.
	do(func(tx *Tx) error { _, err := tx.Reserve("bold-fox", false, 1); return err })
	if _, told, _ := s.Client("bold-fox"); told != seq {
		t.Errorf("the new client was told up to %d", told)
	}
	if ok, told, _ := s.Client("calm-otter"); !ok || told != 0 {
		t.Errorf("the old client was told up to %d", told)
	}
	if ok, _, err := s.Client("nobody"); ok || err != nil {
		t.Error(err)
	}
}

func TestMessages(t *testing.T) {
	s := openTest(t)
	for i := range 7 {
		if err := s.Do(func(tx *Tx) error { _, err := tx.Send("a", "b", fmt.Sprint(i), nil, nil, 1); return err }); err != nil {
			t.Fatal(err)
		}
	}
	n, newest, err := s.Unacked("b")
	if n != 7 || newest != 7 || err != nil {
		t.Error(n, newest, err)
	}
	list, err := s.Previews("b", 5)
	if err != nil || len(list) != 5 || list[0].Text != "0" || list[0].From != "a" {
		t.Errorf("%+v %v", list, err)
	}
	if n, _, _ := s.Unacked("a"); n != 0 {
		t.Error("the sender got it")
	}
}

// Callbacks come in the order of submission, after the commit, also when many
// goroutines submit at once and some operations are lazy.
func TestOrderOfCallbacks(t *testing.T) {
	s := openTest(t)
	var mu sync.Mutex
	done := map[int][]int{}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			last := make(chan struct{})
			for i := range 100 {
				e := entity(g*1000 + i)
				s.Submit(&Op{Lazy: rand.IntN(3) == 0, Keep: rand.IntN(2) == 0, Apply: func(tx *Tx) error { _, err := tx.Insert(e); return err }, Done: func(err error) {
					if err != nil {
						t.Error(err)
					}
					if got, err := s.Entity(e.ID); err != nil || got == nil {
						t.Errorf("called back before it was committed: %v", err)
					}
					mu.Lock()
					done[g] = append(done[g], i)
					mu.Unlock()
					if i == 99 {
						close(last)
					}
				}})
			}
			<-last
		}()
	}
	wg.Wait()
	for g, list := range done {
		if len(list) != 100 || !slices.IsSorted(list) {
			t.Errorf("goroutine %d: %v", g, list)
		}
	}
}

// A lazy operation is committed soon although nothing else comes.
func TestLazyIsCommitted(t *testing.T) {
	s := openTest(t)
	done := make(chan error, 1)
	s.Submit(&Op{Lazy: true, Apply: func(tx *Tx) error { return tx.SetMeta("k", "v") }, Done: func(err error) { done <- err }})
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(deadline):
		t.Fatal("never committed")
	}
	if v, err := s.Meta("k"); v != "v" || err != nil {
		t.Error(v, err)
	}
}

// One operation that is at fault fails alone.
func TestFaultyOperationFailsAlone(t *testing.T) {
	s := openTest(t)
	block := make(chan struct{})
	entered := make(chan struct{})
	go s.Do(func(*Tx) error { close(entered); <-block; return nil }) // so that the others share a transaction
	<-entered
	results := make(chan string, 3)
	fault := errors.New("its own fault")
	for i, err := range []error{nil, fault, nil} {
		s.Submit(&Op{Keep: true, Apply: func(tx *Tx) error {
			if err != nil {
				return err
			}
			return tx.SetMeta(fmt.Sprint(i), "v")
		}, Done: func(got error) { results <- fmt.Sprint(i, got) }})
	}
	close(block)
	got := []string{<-results, <-results, <-results}
	if !slices.Equal(got, []string{"0 <nil>", "1 its own fault", "2 <nil>"}) {
		t.Errorf("got %q", got)
	}
	if v, _ := s.Meta("0"); v != "v" {
		t.Error("a good one was lost")
	}
	if s.Err() != nil {
		t.Errorf("the store says it fails: %v", s.Err())
	}
}

// While the disk refuses, ordinary operations fail and those to keep wait, in order.
func TestKeptOperationsAreRetried(t *testing.T) {
	var mu sync.Mutex
	var changes []bool
	s, _, err := Open(t.TempDir(), Options{OnFailure: func(err error) {
		mu.Lock()
		defer mu.Unlock()
		changes = append(changes, err != nil)
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var full bool // guarded by mu
	apply := func(key string) func(*Tx) error {
		return func(tx *Tx) error {
			mu.Lock()
			defer mu.Unlock()
			if full {
				return fmt.Errorf("write: %w", syscall.ENOSPC)
			}
			return tx.SetMeta(key, "v")
		}
	}
	full = true
	done := make(chan string, 10)
	for _, key := range []string{"a", "b"} {
		s.Submit(&Op{Keep: true, Apply: apply(key), Done: func(err error) { done <- key + fmt.Sprint(err) }})
	}
	if err := s.Do(apply("c")); !IsStorage(err) || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("an ordinary operation: %v", err)
	}
	if s.Err() == nil {
		t.Error("the store says that it works")
	}
	select {
	case x := <-done:
		t.Fatalf("%s was given up", x)
	default:
	}
	mu.Lock()
	full = false
	mu.Unlock()
	if err := s.Do(apply("d")); err != nil { // it comes after those that waited
		t.Fatal(err)
	}
	if a, b := <-done, <-done; a != "a<nil>" || b != "b<nil>" {
		t.Errorf("got %s, %s", a, b)
	}
	// And without anybody's help, also when it was an ordinary one that failed first.
	mu.Lock()
	full = true
	mu.Unlock()
	if err := s.Do(apply("f")); err == nil {
		t.Error("not refused")
	}
	s.Submit(&Op{Keep: true, Apply: apply("e"), Done: func(err error) { done <- "e" + fmt.Sprint(err) }})
	mu.Lock()
	full = false
	mu.Unlock()
	select {
	case x := <-done:
		if x != "e<nil>" {
			t.Error(x)
		}
	case <-time.After(deadline):
		t.Fatal("never tried again")
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(changes, []bool{true, false, true, false}) {
		t.Errorf("told %v", changes)
	}
}

func TestCloseEndsWhatWaits(t *testing.T) {
	s := openIn(t, t.TempDir())
	done := make(chan error, 2)
	s.Submit(&Op{Keep: true, Apply: func(*Tx) error { return syscall.ENOSPC }, Done: func(err error) { done <- err }})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
	if err := s.Do(func(*Tx) error { return nil }); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestDamagedDatabaseIsMovedAside(t *testing.T) {
	for name, damage := range map[string]func([]byte) []byte{
		"garbage":  func([]byte) []byte { return []byte(strings.Repeat("not a database ", 1000)) },
		"overrun":  func(b []byte) []byte { return append(make([]byte, 4096), b[4096:]...) },
		"scribble": func(b []byte) []byte { copy(b[4096:], strings.Repeat("\xff", 8192)); return b },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := openIn(t, dir)
			for i := range 50 {
				insert(t, s, entity(i))
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, "history.sqlite3")
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			bad := damage(b)
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			s, moved, err := Open(dir, Options{})
			if err != nil || moved == "" {
				t.Fatalf("moved %q, %v", moved, err)
			}
			defer s.Close()
			if kept, err := os.ReadFile(moved); err != nil || !slices.Equal(kept, bad) {
				t.Errorf("the damaged file was not kept: %v", err)
			}
			if !insert(t, s, entity(1)) {
				t.Error("the new database is not new")
			}
		})
	}
}

// Damage that shows only later is noted, so that the next start moves the file away.
func TestDamageFoundLater(t *testing.T) {
	dir := t.TempDir()
	s := openIn(t, dir)
	if err := os.WriteFile(filepath.Join(dir, "history.sqlite3.damaged"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	insert(t, s, entity(1))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s, moved, err := Open(dir, Options{})
	if err != nil || moved == "" {
		t.Fatal(moved, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, moved, err = Open(dir, Options{}); err != nil || moved != "" {
		t.Fatal("moved again", moved, err)
	}
	s.Close()
}

func TestNewerDatabaseIsRefused(t *testing.T) {
	dir := t.TempDir()
	s := openIn(t, dir)
	if err := s.Do(func(tx *Tx) error { return tx.exec(fmt.Sprintf("PRAGMA user_version = %d", Version+1)) }); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, _, err := Open(dir, Options{}); err == nil || !strings.Contains(err.Error(), "newer version") {
		t.Errorf("got %v", err)
	}
	if len(migrations) != Version {
		t.Errorf("%d migrations, version %d", len(migrations), Version)
	}
}

// A real disk that is full: everything committed stays, the store says so and recovers.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatalf("this test mounts a small tmpfs, for which it must be root: %v", err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	s := openIn(t, dir)
	insert(t, s, entity(1))
	ballast := filepath.Join(dir, "ballast")
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	f.Close()
	var full error
	n := 2
	for ; full == nil && n < 1000; n++ { // some pages of the log may be free still
		e := entity(n)
		e.Code = strings.Repeat("x", 10000)
		full = s.Do(func(tx *Tx) error { _, err := tx.Insert(e); return err })
	}
	if !IsStorage(full) {
		t.Fatalf("no refusal after %d: %v", n, full)
	}
	if got, err := s.Entity(entity(1).ID); err != nil || got == nil {
		t.Errorf("reading: %v %v", got, err)
	}
	if got, err := s.Entity(entity(n - 1).ID); err != nil || got != nil {
		t.Errorf("the refused one is there: %v %v", got, err)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if !insert(t, s, entity(n)) {
		t.Error("not inserted after space came back")
	}
	if s.Err() != nil {
		t.Errorf("still failing: %v", s.Err())
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	s = openIn(t, dir)
	defer s.Close()
	for _, i := range []int{1, n} {
		if got, err := s.Entity(entity(i).ID); err != nil || got == nil {
			t.Errorf("%d after reopening: %v %v", i, got, err)
		}
	}
}

// The log is copied into the database in the background when it has grown.
func TestLogDoesNotGrowForEver(t *testing.T) {
	dir := t.TempDir()
	s := openIn(t, dir)
	defer s.Close()
	for i := range 600 {
		e := entity(i)
		e.Code = strings.Repeat("x", 100_000)
		insert(t, s, e)
	}
	s.wg.Wait()
	fi, err := os.Stat(filepath.Join(dir, "history.sqlite3-wal"))
	if err != nil || fi.Size() > 30<<20 {
		t.Errorf("the log has %d MiB of 60 written (%v)", fi.Size()>>20, err)
	}
}

func BenchmarkExecution(b *testing.B) {
	s := openTest(b)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		e := entity(i)
		queued := api.LogEvent{Time: 1, Event: "queued", Kind: "execution", ID: e.ID}
		if err := s.Do(func(t *Tx) error {
			if _, err := t.Insert(e); err != nil {
				return err
			}
			return t.Log(&queued)
		}); err != nil {
			b.Fatal(err)
		}
		if err := s.Do(func(t *Tx) error {
			if err := t.Update(e); err != nil {
				return err
			}
			if err := t.Log(&queued); err != nil {
				return err
			}
			return t.Acked("g", int64(i))
		}); err != nil {
			b.Fatal(err)
		}
	}
}

// The lifecycle log is bounded, however long it had become, and nothing else goes with it.
func TestKeepLog(t *testing.T) {
	dir := t.TempDir()
	s := openIn(t, dir)
	log := func(n int) {
		t.Helper()
		if err := s.Do(func(tx *Tx) error {
			for i := range n {
				if err := tx.Log(&api.LogEvent{Time: float64(i), Event: "output", Kind: "execution", ClientID: []string{"a", "b"}[i%2]}); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(first, last int64) {
		t.Helper()
		if f, l, err := s.LogRange(); err != nil || f != first || l != last {
			t.Errorf("lines %d to %d are there, not %d to %d: %v", f, l, first, last, err)
		}
	}
	check(0, 0)
	insert(t, s, entity(1))
	log(10000) // as a program of before has left it
	check(1, 10000)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s, _, err := Open(dir, Options{KeepLog: 500})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	log(239)
	check(1, 10239)
	log(1)
	check(1025, 10240) // no more at once
	log(256 * 20)
	check(15360-500+1, 15360)
	log(255)
	check(15360-500+1, 15615)
	if list, err := s.Events("a", 0, 10); err != nil || len(list) != 10 || list[0].Seq != 15361-500 && list[0].Seq != 15362-500 {
		t.Errorf("%+v %v", list, err)
	}
	if e, err := s.Entity(entity(1).ID); err != nil || e == nil {
		t.Errorf("the record: %v %v", e, err)
	}
	if known, err := s.Known("calm-otter", "1"); err != nil || !known {
		t.Errorf("the request id: %v %v", known, err)
	}
}
