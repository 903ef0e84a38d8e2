package journal

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"mypr/internal/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const id = "0123456789abcdef0123456789abcdef"

// write appends events to a log as the manager does.
func write(t testing.TB, l *Log, events ...api.Event) {
	t.Helper()
	var b Batch
	for _, e := range events {
		b.Add(e)
	}
	data, ends := b.Take()
	off := l.Stage(data)
	if err := l.Write(data, off); err != nil {
		t.Fatal(err)
	}
	l.Publish(data, ends)
}

func decode(t testing.TB, p Page) []api.Event {
	t.Helper()
	list := make([]api.Event, len(p.Events))
	for i, raw := range p.Events {
		if err := json.Unmarshal(raw, &list[i]); err != nil {
			t.Fatalf("event %d is %q: %v", i, raw, err)
		}
	}
	return list
}

// size is what the events of a page cost of a budget.
func size(p Page) (n int) {
	for _, e := range p.Events {
		n += len(e) + 1
	}
	return n
}

// pages reads everything from cursor on, in pages of budget.
func pages(t testing.TB, budget int, read func(cursor int64) (Page, int64, error)) []api.Event {
	t.Helper()
	var all []api.Event
	for cursor := int64(0); ; {
		p, total, err := read(cursor)
		if err != nil {
			t.Fatal(err)
		}
		if p.Cursor != cursor+int64(len(p.Events)) {
			t.Fatalf("cursor %d after %d events from %d", p.Cursor, len(p.Events), cursor)
		}
		if n := size(p); n > budget && len(p.Events) > 1 {
			t.Fatalf("a page of %d events has %d bytes, the budget is %d", len(p.Events), n, budget)
		}
		all = append(all, decode(t, p)...)
		if p.Cursor == total {
			return all
		}
		if len(p.Events) == 0 {
			t.Fatalf("no progress at cursor %d of %d", cursor, total)
		}
		cursor = p.Cursor
	}
}

func joined(events []api.Event, kind, stream string) string {
	var b strings.Builder
	for _, e := range events {
		if e.Type == kind && e.Stream == stream {
			b.WriteString(e.Text)
		}
	}
	return b.String()
}

// Whatever is printed, in whatever portions: every budget from the least on delivers
// the whole text, in order, from memory, from the file of a live log, and cold.
func TestPagesDeliverEverything(t *testing.T) {
	alphabet := []rune("ab \n\r\t\"\\\x00\x1b\x7f€ßñ漢字🦦\u2028\ufffd")
	rapid.Check(t, func(rt *rapid.T) {
		dir := openDir(t)
		l := dir.New(id)
		var want [3]string
		for range rapid.IntRange(0, 12).Draw(rt, "batches") {
			var batch []api.Event
			for range rapid.IntRange(1, 6).Draw(rt, "events") {
				s := rapid.StringOfN(rapid.SampledFrom(alphabet), 1, rapid.SampledFrom([]int{3, 40, 900, 9000, 30000}).Draw(rt, "max"), -1).Draw(rt, "text")
				switch rapid.IntRange(0, 2).Draw(rt, "kind") {
				case 0:
					batch = append(batch, api.Event{Type: "stream", Stream: "stdout", Text: s, Time: 1.5})
					want[0] += s
				case 1:
					batch = append(batch, api.Event{Type: "stream", Stream: "stderr", Text: s, Time: 2.25})
					want[1] += s
				default:
					batch = append(batch, api.Event{Type: "error", Text: s})
					want[2] += s
				}
			}
			write(t, l, batch...)
		}
		budget := rapid.IntRange(api.MinBytes*3/4, 40000).Draw(rt, "budget")
		check := func(how string, events []api.Event) {
			for i, got := range []string{joined(events, "stream", "stdout"), joined(events, "stream", "stderr"), joined(events, "error", "")} {
				if got != want[i] {
					rt.Fatalf("%s: text %d differs: %d bytes, want %d", how, i, len(got), len(want[i]))
				}
			}
		}
		live := pages(t, budget, func(c int64) (Page, int64, error) { return l.Page(c, budget) })
		check("live", live)
		for i, e := range live {
			raw, _ := json.Marshal(e)
			if len(raw) > MaxEvent+60 { // json.Marshal escapes some that the journal does not
				rt.Logf("event %d is large: %d", i, len(raw))
			}
		}
		if err := l.Finish(); err != nil {
			rt.Fatal(err)
		}
		check("finished", pages(t, budget, func(c int64) (Page, int64, error) { return l.Page(c, budget) }))
		check("cold", pages(t, budget, func(c int64) (Page, int64, error) { return dir.Read(id, c, budget) }))
		// Any cursor is a place to begin: pages do not depend on how one came there.
		if n := int64(len(live)); n > 0 {
			at := rapid.Int64Range(0, n-1).Draw(rt, "at")
			p, _, err := dir.Read(id, at, budget)
			if err != nil || decode(t, p)[0].Text != live[at].Text {
				rt.Fatalf("event %d differs when read from there: %v", at, err)
			}
		}
	})
}

// The bound holds for every line that is cut from text, so that the least page budget
// always has room for the next event.
func TestEveryTextEventFitsTheLeastBudget(t *testing.T) {
	for _, s := range []string{strings.Repeat("x", 5000), strings.Repeat("\x01", 5000), strings.Repeat("🦦", 3000), strings.Repeat("\"", 2000), "\xff\xfe" + strings.Repeat("é", 999)} {
		for _, e := range []api.Event{{Type: "stream", Stream: "stderr", Raw: true, Time: 1764498600.123456}, {Type: "display", DisplayID: strings.Repeat("d", 500), Update: true, Time: 1}} {
			e.Text = s
			var b Batch
			b.Add(e)
			data, ends := b.Take()
			start := 0
			var got strings.Builder
			for i, end := range ends {
				line := data[start:end]
				start = end
				if len(line)-1 > MaxEvent {
					t.Errorf("%s event %d has %d bytes", e.Type, i, len(line)-1)
				}
				var d api.Event
				if err := json.Unmarshal(line, &d); err != nil {
					t.Fatalf("%q: %v", line, err)
				}
				if d.Continues != (i > 0 && e.Type != "stream") || (d.DisplayID != "") != (i == 0 && e.DisplayID != "") {
					t.Errorf("%s event %d: %+v", e.Type, i, d)
				}
				got.WriteString(d.Text)
			}
			if want := strings.ToValidUTF8(s, "\ufffd"); got.String() != want && utf8.ValidString(s) {
				t.Errorf("%s: %d bytes came back, want %d", e.Type, got.Len(), len(want))
			}
			if start != len(data) {
				t.Errorf("the ends do not cover the data")
			}
		}
	}
}

func TestSmallWritesShareALine(t *testing.T) {
	var b Batch
	for range 1000 {
		b.Add(api.Event{Type: "stream", Stream: "stdout", Text: "."})
	}
	b.Add(api.Event{Type: "stream", Stream: "stderr", Text: "!"})
	if _, ends := b.Take(); len(ends) > 4 {
		t.Errorf("1000 dots made %d lines", len(ends))
	}
	if !b.Empty() {
		t.Error("Take leaves something")
	}
}

func TestArtifactEventMayBeLarge(t *testing.T) {
	var b Batch
	b.Add(api.Event{Type: "result", Text: strings.Repeat("t", 3000), Artifacts: []api.Artifact{{Mime: "image/png", Path: "/" + strings.Repeat("p", 3000), Size: 12}}})
	data, ends := b.Take()
	ends64 := make([]int64, len(ends))
	for i, e := range ends {
		ends64[i] = int64(e)
	}
	var p Page
	budget := 768
	if n := p.Fill(data, ends64, &budget, 0, true); n != 1 {
		t.Fatalf("took %d", n)
	}
	if e := decode(t, p)[0]; len(e.Artifacts) != 1 || len(e.Artifacts[0].Path) != 3001 || e.Artifacts[0].Size != 12 {
		t.Errorf("got %+v", e)
	}
}

func openDir(t testing.TB) *Dir {
	t.Helper()
	d, err := OpenDir(filepath.Join(t.TempDir(), "runs"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// files are the paths of the journal and its index.
func files(d *Dir) (path, index string) {
	j, i := Names(id)
	return filepath.Join(d.path, j), filepath.Join(d.path, i)
}

func saved(t *testing.T, events int, each int) (dir *Dir, path, index string) {
	t.Helper()
	dir = openDir(t)
	l := dir.New(id)
	for i := range events {
		write(t, l, api.Event{Type: "stream", Stream: []string{"stdout", "stderr"}[i%2], Text: fmt.Sprintf("%06d", i) + strings.Repeat("x", each)})
	}
	if err := l.Finish(); err != nil {
		t.Fatal(err)
	}
	path, index = files(dir)
	return dir, path, index
}

func edit(t *testing.T, path string, f func([]byte) []byte) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, f(bytes.Clone(data)), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDamagedLinesAreWarningsInPlace(t *testing.T) {
	dir, path, _ := saved(t, 5, 10)
	edit(t, path, func(b []byte) []byte {
		lines := bytes.SplitAfter(b, []byte("\n"))
		lines[1] = []byte("{\"type\":\"stream\",\"te\n")
		lines[2] = []byte("\n")
		lines[3] = []byte("[1,2,3]\n")
		last := lines[4]
		lines[4] = last[:len(last)/2]
		return bytes.Join(lines, nil)
	})
	before, _ := os.ReadFile(path)
	for range 2 { // the second time with an index
		p, total, err := dir.Read(id, 0, 1<<20)
		if err != nil || total != 5 {
			t.Fatal(total, err)
		}
		e := decode(t, p)
		want := []string{"", "journal_corrupt", "journal_corrupt", "journal_corrupt", "journal_truncated"}
		for i := range e {
			if e[i].Code != want[i] || want[i] != "" && (e[i].Type != "warning" || e[i].Line != int64(i)+1) {
				t.Errorf("event %d: %+v", i, e[i])
			}
		}
		if !strings.HasPrefix(e[0].Text, "000000") {
			t.Errorf("the good line became %q", e[0].Text)
		}
		// The cursors of single lines are what they were.
		p, _, _ = dir.Read(id, 4, 1024)
		if e := decode(t, p); len(e) != 1 || e[0].Code != "journal_truncated" {
			t.Errorf("at 4: %+v", e)
		}
	}
	if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
		t.Error("the journal was changed")
	}
}

func TestCompleteLastLineWithoutNewlineIsShown(t *testing.T) {
	dir, path, _ := saved(t, 2, 10)
	edit(t, path, func(b []byte) []byte { return b[:len(b)-1] })
	p, total, err := dir.Read(id, 0, 4096)
	if err != nil || total != 2 {
		t.Fatal(total, err)
	}
	if e := decode(t, p); !strings.HasPrefix(e[1].Text, "000001") {
		t.Errorf("got %+v", e[1])
	}
}

func TestIndexIsRebuilt(t *testing.T) {
	dir, path, index := saved(t, 3000, 100)
	if _, err := os.Stat(index); err != nil {
		t.Fatalf("a large journal has no index: %v", err)
	}
	good, _ := os.ReadFile(index)
	read := func(what string, cursor int64) {
		t.Helper()
		p, total, err := dir.Read(id, cursor, 2000)
		if err != nil || total != 3000 {
			t.Fatalf("%s: %d lines, %v", what, total, err)
		}
		if e := decode(t, p); !strings.HasPrefix(e[0].Text, fmt.Sprintf("%06d", cursor)) {
			t.Fatalf("%s: event %d is %q", what, cursor, e[0].Text)
		}
	}
	read("good", 2500)
	damage := map[string]func([]byte) []byte{
		"missing":       nil,
		"empty":         func([]byte) []byte { return nil },
		"short":         func(b []byte) []byte { return b[:len(b)-5] },
		"one entry off": func(b []byte) []byte { return b[:len(b)-8] },
		"wrong magic":   func(b []byte) []byte { b[0] ^= 1; return b },
		"wrong stamp":   func(b []byte) []byte { b[9] ^= 1; return b },
		"wrong offset":  func(b []byte) []byte { b[headerSize+8*2500] ^= 4; return b },
		"wild offset":   func(b []byte) []byte { b[headerSize+8*2500+6] = 0x7f; return b },
		"next offset":   func(b []byte) []byte { b[headerSize+8*2501] ^= 4; return b },
		"zero offset":   func(b []byte) []byte { copy(b[headerSize+8*2500:], make([]byte, 8)); return b },
	}
	for what, f := range damage {
		if f == nil {
			os.Remove(index)
		} else if err := os.WriteFile(index, f(bytes.Clone(good)), 0o600); err != nil {
			t.Fatal(err)
		}
		read(what, 2500)
		if now, err := os.ReadFile(index); err != nil || !bytes.Equal(now, good) {
			t.Errorf("%s: the index was not made again (%v)", what, err)
		}
	}
	// A journal that was replaced behind our back is indexed anew.
	edit(t, path, func(b []byte) []byte {
		return append([]byte("{\"type\":\"stream\",\"text\":\"000000\"}\n"), b[bytes.IndexByte(b, '\n')+1:]...)
	})
	read("stale", 2500)
	// An index that cannot be written does not keep anybody from reading.
	os.Remove(index)
	if err := os.Mkdir(index, 0o700); err != nil {
		t.Fatal(err)
	}
	read("unwritable", 2500)
	if left, _ := filepath.Glob(filepath.Join(dir.path, "*.new")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestHugeLineIsDamage(t *testing.T) {
	dir, path, _ := saved(t, 2, 10)
	edit(t, path, func(b []byte) []byte {
		huge := append(bytes.Repeat([]byte("y"), 3<<20), '\n')
		return append(huge, b...)
	})
	p, total, err := dir.Read(id, 0, 1<<20)
	if err != nil || total != 3 {
		t.Fatal(total, err)
	}
	e := decode(t, p)
	if len(e) != 3 || e[0].Code != "journal_corrupt" || !strings.HasPrefix(e[1].Text, "000000") {
		t.Errorf("got %d events, first %+v", len(e), e[0])
	}
}

func TestMissingJournalIsEmpty(t *testing.T) {
	dir := openDir(t)
	p, total, err := dir.Read(id, 7, 1024)
	if err != nil || total != 0 || p.Cursor != 0 {
		t.Errorf("%+v %d %v", p, total, err)
	}
}

// What was written but never acknowledged is sent again by the kernel, so it must go.
func TestResumeCutsWhatDoesNotCount(t *testing.T) {
	dir := openDir(t)
	l := dir.New(id)
	write(t, l, api.Event{Type: "stream", Stream: "stdout", Text: "one"})
	size, count := l.Staged(), l.Count()
	write(t, l, api.Event{Type: "stream", Stream: "stdout", Text: "two"})
	if err := l.Finish(); err != nil {
		t.Fatal(err)
	}
	r, err := dir.Resume(id, size)
	if err != nil {
		t.Fatal(err)
	}
	if r.Count() != count {
		t.Errorf("%d lines, want %d", r.Count(), count)
	}
	write(t, r, api.Event{Type: "stream", Stream: "stdout", Text: "TWO"})
	if p, total, err := r.Page(0, 1024); err != nil || int64(len(p.Events)) != total {
		t.Errorf("a page ends where memory begins: %d of %d, %v", len(p.Events), total, err)
	}
	events := pages(t, 1024, func(c int64) (Page, int64, error) { return r.Page(c, 1024) })
	if got := joined(events, "stream", "stdout"); got != "oneTWO" {
		t.Errorf("got %q", got)
	}
	if err := r.Finish(); err != nil {
		t.Fatal(err)
	}
	events = pages(t, 1024, func(c int64) (Page, int64, error) { return dir.Read(id, c, 1024) })
	if got := joined(events, "stream", "stdout"); got != "oneTWO" {
		t.Errorf("cold: %q", got)
	}
	if _, err := dir.Resume(id, 1<<20); err == nil {
		t.Error("a journal whose end is lost was taken up")
	}
	if r, err := dir.Resume(strings.Repeat("f", 32), 0); err != nil || r.Count() != 0 {
		t.Errorf("none yet: %v", err)
	}
}

// A workspace that is moved takes its journals along.
func TestMovedDirectory(t *testing.T) {
	dir := openDir(t)
	if err := os.Rename(dir.path, dir.path+".moved"); err != nil {
		t.Fatal(err)
	}
	l := dir.New(id)
	write(t, l, api.Event{Type: "stream", Stream: "stdout", Text: "here"})
	if err := l.Finish(); err != nil {
		t.Fatal(err)
	}
	if p, total, err := dir.Read(id, 0, 1024); err != nil || total != 1 || decode(t, p)[0].Text != "here" {
		t.Errorf("%+v %v", p, err)
	}
	if _, err := os.Stat(dir.path); err == nil {
		t.Error("a directory was made in the old place")
	}
}

// Writing again at the same place, as after a transaction that failed, changes nothing.
func TestWriteIsRepeatable(t *testing.T) {
	dir := openDir(t)
	if err := os.RemoveAll(dir.path); err != nil { // it is made again
		t.Fatal(err)
	}
	l := dir.New(id)
	var b Batch
	b.Add(api.Event{Type: "error", Text: "x"})
	data, ends := b.Take()
	off := l.Stage(data)
	for range 3 {
		if err := l.Write(data, off); err != nil {
			t.Fatal(err)
		}
	}
	if p, total, _ := l.Page(0, 1024); total != 0 || len(p.Events) != 0 {
		t.Error("visible before it was published")
	}
	l.Publish(data, ends)
	if got := string(l.Last()); got != strings.TrimSuffix(string(data), "\n") {
		t.Errorf("Last is %q", got)
	}
	if _, total, _ := l.Page(0, 1024); total != 1 {
		t.Errorf("%d lines", total)
	}
	if err := l.Finish(); err != nil {
		t.Fatal(err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte("{\"type\":\"stream\",\"text\":\"a\"}\n"), []byte(magic), int64(0))
	f.Add([]byte("\n\n{\"type\":1}\n{"), []byte{}, int64(3))
	f.Fuzz(func(t *testing.T, data, idx []byte, cursor int64) {
		dir := openDir(t)
		path, index := files(dir)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if len(idx) > 0 { // a valid header lets the fuzzer reach the offsets
			fl, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			st, err := stampOf(fl)
			fl.Close()
			if err != nil {
				t.Fatal(err)
			}
			if err := dir.writeIndex(filepath.Base(index), st, nil); err != nil {
				t.Fatal(err)
			}
			head, _ := os.ReadFile(index)
			if err := os.WriteFile(index, append(head, idx...), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		lines := int64(bytes.Count(data, []byte("\n")))
		if len(data) > 0 && data[len(data)-1] != '\n' {
			lines++
		}
		if cursor < 0 {
			cursor = -(cursor + 1)
		}
		p, total, err := dir.Read(id, cursor%(lines+1), 4096)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range p.Events {
			var ev api.Event
			if err := json.Unmarshal(e, &ev); err != nil || ev.Type == "" {
				t.Fatalf("served %q: %v", e, err)
			}
		}
		if total > lines || p.Cursor > total {
			t.Fatalf("cursor %d, %d lines, really %d", p.Cursor, total, lines)
		}
	})
}

func FuzzEncode(f *testing.F) {
	f.Add("stdout", "hello\n", "id", true)
	f.Add("", "\xff\x00\"\\€", "\xc3", false)
	f.Fuzz(func(t *testing.T, stream, text, display string, raw bool) {
		var b Batch
		b.Add(api.Event{Type: "display", Text: text, Stream: stream, DisplayID: display, Raw: raw, Artifacts: []api.Artifact{{Mime: stream, Path: text}}})
		data, ends := b.Take()
		start := 0
		var got strings.Builder
		for _, end := range ends {
			line := data[start:end]
			start = end
			var e api.Event
			if err := json.Unmarshal(line, &e); err != nil || bytes.Count(line, []byte("\n")) != 1 || !utf8.Valid(line) {
				t.Fatalf("bad line %q: %v", line, err)
			}
			got.WriteString(e.Text)
		}
		if utf8.ValidString(text) && got.String() != text {
			t.Fatalf("%q became %q", text, got.String())
		}
	})
}
