package paging

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"mypr/internal/rpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type query struct {
	Pattern string `json:"pattern,omitempty"`
	Hidden  bool   `json:"hidden,omitempty"`
}

func openFDs(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

// Following the cursors gives every row once and the whole text, whatever the budget,
// through a snapshot opened anew for each page.
func TestPagesGiveBackTheWhole(t *testing.T) {
	store := NewStore(t.TempDir())
	before := openFDs(t)
	rapid.Check(t, func(t *rapid.T) {
		rows := rapid.SliceOfN(rapid.StringMatching(`"[a-zé💥]{0,200}"`), 0, 60).Draw(t, "rows")
		piece := rapid.StringOfN(rapid.RuneFrom([]rune("aé💥\n\t\"\\\x01\u2028")), 0, 60, -1).Draw(t, "piece")
		text := strings.Repeat(piece, rapid.IntRange(0, 200).Draw(t, "times")) // longer than a page, often
		room := rapid.IntRange(MinBytes, 3*MinBytes).Draw(t, "room")
		var lines []byte
		for _, r := range rows {
			lines = append(append(lines, r...), '\n')
		}
		snap, err := store.Save("m", query{Pattern: "p"}, map[string]int{"n": 7}, lines, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		var gotRows []string
		var gotText strings.Builder
		pos := int64(0)
		for page := 0; ; page++ {
			left := room
			next, err := snap.Rows(pos, func(row []byte) (bool, error) {
				if left -= len(row); left < 0 {
					return false, nil
				}
				gotRows = append(gotRows, string(row))
				return true, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			s, lossy, next2, err := snap.Text(next, room)
			if err != nil || lossy {
				t.Fatal(err, lossy)
			}
			if n, _ := Size(s); n-2 > room {
				t.Fatalf("a text of %d bytes in a page of %d", n-2, room)
			}
			gotText.WriteString(s)
			if next2 == pos && snap.More(pos) {
				t.Fatalf("page %d makes no progress at %d", page, pos)
			}
			snap.Close()
			if !snap.More(next2) {
				break
			}
			if len(snap.Cursor(next2)) > CursorMax {
				t.Fatalf("%q is longer than CursorMax", snap.Cursor(next2))
			}
			snap, pos, err = store.Open("m", snap.Cursor(next2), query{})
			if err != nil {
				t.Fatal(err)
			}
			var meta map[string]int
			if err := snap.Meta(&meta); err != nil || meta["n"] != 7 {
				t.Fatal(meta, err)
			}
		}
		if fmt.Sprint(gotRows) != fmt.Sprint(rows) || gotText.String() != text {
			t.Fatalf("rows %q\n  of %q\ntext %q\n  of %q", gotRows, rows, gotText.String(), text)
		}
	})
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestTextIsCutAtLines(t *testing.T) {
	snap, err := NewStore(t.TempDir()).Save("m", nil, nil, nil, []byte("one\ntwo\nthree"))
	if err != nil {
		t.Fatal(err)
	}
	if s, _, next, _ := snap.Text(0, 10); s != "one\n" || next != 4 { // "one\ntwo\n" takes 10 with escapes, "three" does not fit
		if s != "one\ntwo\n" || next != 8 {
			t.Errorf("%q %d", s, next)
		}
	}
	if s, _, _, _ := snap.Text(0, 100); s != "one\ntwo\nthree" {
		t.Errorf("%q", s)
	}
	lossy, err := NewStore(t.TempDir()).Save("m", nil, nil, nil, []byte("caf\xe9"))
	if err != nil {
		t.Fatal(err)
	}
	if s, l, next, _ := lossy.Text(0, 100); s != "caf\uFFFD" || !l || next != 4 {
		t.Errorf("%q %v %d", s, l, next)
	}
}

// Fit agrees with encoding/json on every string and budget.
func TestFitIsWhatJSONTakes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.String().Draw(t, "s")
		if !utf8.ValidString(s) {
			t.Skip()
		}
		room := rapid.IntRange(0, 40).Draw(t, "room")
		n := Fit([]byte(s), room)
		size, _ := Size(s[:n])
		if size-2 > room {
			t.Fatalf("%q takes %d, not %d", s[:n], size-2, room)
		}
		if n < len(s) {
			_, w := utf8.DecodeRuneInString(s[n:])
			if more, _ := Size(s[:n+w]); more-2 <= room {
				t.Fatalf("%q would have fitted too", s[n:n+w])
			}
		}
	})
}

func TestCursorsThatDoNotFit(t *testing.T) {
	dir := t.TempDir()
	store := NewStore(dir)
	snap, err := store.Save("fs.search", query{Pattern: "a", Hidden: true}, nil, []byte("1\n2\n3\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	good := snap.Cursor(2)
	refused := func(name, method, cursor string, q query, say string) {
		t.Helper()
		s, _, err := store.Open(method, cursor, q)
		if err == nil {
			s.Close()
			t.Errorf("%s: accepted", name)
			return
		}
		if rpc.CodeOf(err) != CodeInvalidCursor || !strings.Contains(err.Error(), say) || !strings.Contains(err.Error(), "run the query again") {
			t.Errorf("%s: %v", name, err)
		}
	}
	other := "0" // a first digit that the random id does not have
	if good[0] == '0' {
		other = "1"
	}
	for _, c := range []string{"", "x", good[:len(good)-1], strings.ToUpper(good), good + "0", other + good[1:], strings.Repeat("a", 100)} {
		if c == good { // a random id of digits alone is the same in upper case
			continue
		}
		refused("damaged "+c, "fs.search", c, query{}, "not a cursor")
	}
	refused("another method", "git.status", good, query{}, "ws.fs.search")
	refused("another query", "fs.search", good, query{Pattern: "b"}, "pattern")
	refused("not at a row", "fs.search", snap.Cursor(3), query{}, "no place")
	refused("beyond the end", "fs.search", snap.Cursor(99), query{}, "no place")
	for _, q := range []query{{}, {Pattern: "a"}, {Hidden: true}} {
		s, pos, err := store.Open("fs.search", good, q)
		if err != nil || pos != 2 {
			t.Errorf("%+v: %d %v", q, pos, err)
			continue
		}
		s.Close()
	}
	file := filepath.Join(dir, snap.id)
	if err := os.Truncate(file, 40); err != nil {
		t.Fatal(err)
	}
	refused("cut off", "fs.search", good, query{}, "cut off")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	refused("expired", "fs.search", good, query{}, "gone")
}

func TestRetentionKeepsTheNewest(t *testing.T) {
	dir := t.TempDir()
	store := NewStore(dir)
	first, err := store.Save("m", nil, nil, []byte("1\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	second, err := store.Save("m", nil, nil, []byte("1\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range []*Snapshot{first, second} { // the clock of the file system may be too coarse to order them
		old := time.Now().Add(time.Duration(i-10) * time.Hour)
		if err := os.Chtimes(filepath.Join(dir, s.id), old, old); err != nil {
			t.Fatal(err)
		}
	}
	for i := 0; i < keepSnapshots-2; i++ {
		if _, err := store.Save("m", nil, nil, []byte("1\n"), nil); err != nil {
			t.Fatal(err)
		}
	}
	if s, _, err := store.Open("m", first.Cursor(0), query{}); err != nil { // reading it makes it young
		t.Fatal(err)
	} else {
		s.Close()
	}
	if _, err := store.Save("m", nil, nil, []byte("1\n"), nil); err != nil {
		t.Fatal(err)
	}
	if e, _ := os.ReadDir(dir); len(e) != keepSnapshots {
		t.Errorf("%d snapshots are kept", len(e))
	}
	if s, _, err := store.Open("m", first.Cursor(0), query{}); err != nil {
		t.Errorf("the one read last is gone: %v", err)
	} else {
		s.Close()
	}
	if _, _, err := store.Open("m", second.Cursor(0), query{}); rpc.CodeOf(err) != CodeInvalidCursor {
		t.Errorf("the oldest is still there: %v", err)
	}
}

func TestSweepRemovesHalfWrittenOnes(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "0123456789abcdef.tmp"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := NewStore(dir).Sweep(); err != nil {
		t.Fatal(err)
	}
	if e, _ := os.ReadDir(dir); len(e) != 0 {
		t.Errorf("left: %v", e)
	}
	if err := NewStore(filepath.Join(dir, "none")).Sweep(); err != nil {
		t.Error(err)
	}
}

func TestSaveFailsWhole(t *testing.T) {
	dir := t.TempDir()
	blocked := filepath.Join(dir, "file")
	if err := os.WriteFile(blocked, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := NewStore(filepath.Join(blocked, "x")).Save("m", nil, nil, nil, nil); err == nil {
		t.Error("saved below a file")
	}
}

func FuzzOpen(f *testing.F) {
	store := NewStore(f.TempDir())
	snap, err := store.Save("m", nil, nil, []byte("1\n"), nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(snap.Cursor(0))
	f.Add("../../../../etc/passwd-0-00000000")
	f.Fuzz(func(t *testing.T, c string) {
		s, _, err := store.Open("m", c, query{})
		if err == nil {
			s.Close()
			if !strings.HasPrefix(c, snap.id) {
				t.Fatalf("%q opened something", c)
			}
		}
	})
}

func TestSize(t *testing.T) {
	for _, v := range []any{"<&>", []int{1}, map[string]string{"a": "\n"}} {
		var b bytes.Buffer
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		_ = e.Encode(v)
		if n, err := Size(v); err != nil || n != b.Len()-1 {
			t.Errorf("%v: %d %v", v, n, err)
		}
	}
}
