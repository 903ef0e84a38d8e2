package frontend

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"mypr/internal/api"
	"mypr/internal/client/clienttest"
)

var update = flag.Bool("update", false, "write the golden files anew")

const (
	cellID = "0f8b3c6d9a1e4f7080b2c4d6e8fa0c1e"
	gen1   = "3f2a9c01d4e5f60718293a4b5c6d7e8f"
	gen2   = "a1b2c3d4e5f60718293a4b5c6d7e8f90"
)

func ptr[T any](v T) *T { return &v }

func out(text string) api.Event { return api.Event{Type: "stream", Stream: "stdout", Text: text} }
func stderr(text string) api.Event {
	return api.Event{Type: "stream", Stream: "stderr", Text: text}
}

func result1(state string, cursor int64, events ...api.Event) *api.ExecResult {
	return &api.ExecResult{
		ExecID: cellID, ClientID: "calm-otter", Generation: gen1, ExecutionGeneration: gen1,
		State: state, Output: events, Cursor: cursor, ElapsedMS: 12,
	}
}

// The texts that a model reads, as files: testdata/render/NAME.txt.
func TestGolden(t *testing.T) {
	for name, test := range map[string]struct {
		r *api.ExecResult
		v view
	}{
		"expression": {r: result1("succeeded", 1, api.Event{Type: "result", Text: "2"})},
		"silent":     {r: result1("succeeded", 0)},
		"streams": {r: result1("succeeded", 6, out("a\n"), out("b\n"), stderr("warn"), stderr("ing\n"), out("c"),
			api.Event{Type: "result", Text: "array([[1, 2],\n       [3, 4]])"})},
		"stderr only": {r: result1("succeeded", 1, stderr("careful\n"))},
		"failed": {r: func() *api.ExecResult {
			r := result1("failed", 2, out("before\n"), api.Event{Type: "error", Text: "Traceback (most recent call last):\n  File \"<cell>\", line 1\n\x1b[0;31mValueError\x1b[0m: no\n"})
			r.Error = ptr("ValueError: no")
			return r
		}()},
		"running": {r: func() *api.ExecResult {
			r := result1("running", 2, out("step 1\n"), out("step 2\n"))
			r.ElapsedMS = 61_500
			return r
		}()},
		"queued": {r: func() *api.ExecResult {
			r := result1("queued", 0)
			r.QueueAhead = 3
			r.ClampedWaitMS = 30000
			return r
		}()},
		"empty poll": {r: result1("running", 4), v: view{poll: &api.PollParams{ExecID: cellID, Cursor: ptr(int64(4))}}},
		"last poll":  {r: result1("succeeded", 4), v: view{poll: &api.PollParams{ExecID: cellID, Cursor: ptr(int64(4))}}},
		"more": {r: func() *api.ExecResult {
			r := result1("succeeded", 9, out("page\n"))
			r.HasMore = true
			return r
		}(), v: view{poll: &api.PollParams{ExecID: cellID, Cursor: ptr(int64(8))}}},
		"blocked": {r: func() *api.ExecResult {
			r := result1("running", 0)
			r.Blocked = &api.Blocked{ExecID: cellID, ClientID: "calm-otter", Seconds: 12.34, Where: "cell line 3, in work"}
			return r
		}()},
		"blocked by another": {r: func() *api.ExecResult {
			r := result1("queued", 0)
			r.Blocked = &api.Blocked{ExecID: strings.Repeat("ab", 16), ClientID: "dusty-mole", Seconds: 3, Where: "work.py:41, in f"}
			return r
		}()},
		"interrupted": {r: func() *api.ExecResult {
			r := result1("failed", 1)
			r.Error, r.Interrupt = ptr("KeyboardInterrupt"), "interrupted"
			return r
		}()},
		"interrupt pending": {r: func() *api.ExecResult {
			r := result1("running", 1)
			r.Interrupt = "pending"
			r.Blocked = &api.Blocked{ExecID: cellID, ClientID: "calm-otter", Seconds: 12.34, Where: "cell line 3"}
			return r
		}()},
		"replayed": {r: func() *api.ExecResult {
			r := result1("succeeded", 0)
			r.Replayed = true
			return r
		}()},
		"lost": {r: func() *api.ExecResult {
			r := result1("lost", 1, out("so far\n"))
			r.Generation = gen2
			r.Error = ptr("lost: the kernel was killed for its memory (limit 512 MiB, peak 512 MiB)")
			r.Notice = &api.Notice{Kind: "kernel_died", Text: "Python was killed by the kernel: out of memory (limit 512 MiB). All variables are lost; files, history and jobs remain.", OldGeneration: gen1, Generation: gen2}
			return r
		}()},
		"cancelled note": {r: result1("succeeded", 0), v: view{notes: []string{"[an execute that you cancelled was not stopped: its cell X was running then]"},
			notices: []*api.Notice{{Kind: "reset", Text: "calm-otter reset the session.", Generation: gen1}}}},
		"truncated": {r: func() *api.ExecResult {
			r := result1("succeeded", 2, out("x\n"), api.Event{Type: "warning", Code: "journal_corrupt", Text: "line 17 of the journal is damaged", Line: 17})
			r.Truncated = true
			r.Warnings = []api.Warning{{Code: "storage", Text: "the history could not be written"}}
			r.WarningsTruncated = true
			return r
		}()},
		"inbox": {r: func() *api.ExecResult {
			r := result1("succeeded", 0)
			r.Inbox = &api.Inbox{Unacked: 7, HasMore: true, Messages: []api.Preview{
				{ID: 3, From: "dusty-mole", Text: "are you\ndone?"}, {ID: 4, From: "x", Text: "long", ReplyTo: ptr(int64(3)), Truncated: true}}}
			return r
		}()},
		"inbox again": {r: func() *api.ExecResult {
			r := result1("running", 4)
			r.Inbox = &api.Inbox{Unacked: 1, Messages: []api.Preview{{ID: 3, From: "dusty-mole", Text: "hello"}}}
			return r
		}(), v: view{inbox: "1 false 3", poll: &api.PollParams{Cursor: ptr(int64(4))}}},
		"progress bars": {r: result1("succeeded", 3, stderr("\r 0%|     |\r50%|##   |"), stderr("\r100%|#####|\n"), out("done\n"))},
		"repeats":       {r: result1("succeeded", 1, out("start\n"+strings.Repeat("retrying\n", 57)+"ok\n"))},
		"display update": {r: result1("succeeded", 3, api.Event{Type: "display", Text: "1/3", DisplayID: "bar"},
			out("between\n"), api.Event{Type: "display", Text: "3/3", DisplayID: "bar", Update: true})},
		"continued": {r: result1("failed", 3, api.Event{Type: "error", Text: "Traceback (most recent ca"},
			api.Event{Type: "error", Text: "ll last):\nValueError: no", Continues: true}, api.Event{Type: "error", Text: "another\n"})},
		"file": {r: result1("succeeded", 1, api.Event{Type: "result", Text: "<table>", Artifacts: []api.Artifact{
			{Mime: "text/html", Path: "/ws/.mypr/artifacts/0f8b/1.html", Size: 512}, {Mime: "image/png", Path: "/nonexistent/2.png", Size: 9}}})},
		"long": {r: func() *api.ExecResult {
			var events []api.Event
			for i := range 400 {
				events = append(events, out(fmt.Sprintf("line %04d %s\n", i, strings.Repeat("x", 40))))
			}
			r := result1("failed", 1400, events...)
			r.Error = ptr("ValueError: at the end")
			return r
		}()},
	} {
		t.Run(name, func(t *testing.T) {
			got, _ := renderExec(test.r, test.v)
			file := filepath.Join("testdata", "render", strings.ReplaceAll(name, " ", "_")+".txt")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got:\n%s\nwant:\n%s", got, want)
			}
		})
	}
}

var gap = regexp.MustCompile(`\[(\d+) bytes in (\d+) lines are left out here: poll\(exec_id, cursor=(\d+), max_bytes=(\d+)\) shows them\]\n`)

// Whatever the output, the text keeps to its size, begins with the state, says how to
// go on, and what it leaves out is found, to the byte, by the poll that it names.
func TestBudget(t *testing.T) {
	var cuts, all int
	defer func() {
		if cuts*20 < all {
			t.Errorf("only %d of %d texts were cut", cuts, all)
		}
	}()
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(
			rapid.StringMatching(`[a-z é☃]{0,60}\n?`),
			rapid.StringN(0, 900, 900),
			// rapid prefers small values, so the sizes that matter are named
			rapid.Map(rapid.SampledFrom([]int{1, 60, 400, 899}), func(n int) string { return strings.Repeat("y", n) }),
			rapid.Map(rapid.SampledFrom([]int{3, 60, 300}), func(n int) string { return strings.Repeat("\u00e9\u2603", n/2) + "\n" }),
			rapid.Map(rapid.SampledFrom([]int{3, 30, 90}), func(n int) string { return strings.Repeat("same line\n", n) }),
		)
		count := rapid.SampledFrom([]int{0, 1, 4, 20, 60, 80}).Draw(t, "count")
		events := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) api.Event {
			e := api.Event{Type: rapid.SampledFrom([]string{"stream", "stream", "stream", "result", "error", "warning"}).Draw(t, "type"), Text: text.Draw(t, "text")}
			if e.Type == "stream" {
				e.Stream = rapid.SampledFrom([]string{"stdout", "stdout", "stdout", "stderr"}).Draw(t, "stream")
			}
			return e
		}), count, count).Draw(t, "events")
		first := rapid.Int64Range(0, 1000).Draw(t, "first")
		r := result1(rapid.SampledFrom([]string{"running", "succeeded", "failed"}).Draw(t, "state"), first+int64(len(events)), events...)
		r.HasMore = rapid.Bool().Draw(t, "more")
		if r.State == "failed" {
			r.Error = ptr("ValueError: x")
		}

		got, _ := renderExec(r, view{})
		if len(got) > textBudget {
			t.Fatalf("%d bytes", len(got))
		}
		if !utf8.ValidString(got) {
			t.Fatal("a rune was cut")
		}
		if !strings.HasPrefix(got, r.State+" exec_id="+cellID+" generation=3f2a9c01 cursor="+strconv.FormatInt(r.Cursor, 10)) {
			t.Fatalf("begins with %.100q", got)
		}
		lines := strings.Split(strings.TrimSuffix(got, "\n"), "\n")
		last := lines[len(lines)-1]
		if (r.HasMore || r.State == "running") && !strings.Contains(last, fmt.Sprintf("cursor=%d", r.Cursor)) {
			t.Fatalf("ends with %q", last)
		}
		whole, _ := renderExec(r, view{whole: true})
		all++
		m := gap.FindStringSubmatchIndex(got)
		if m == nil {
			if got != whole {
				t.Fatalf("not all is shown, and it does not say so:\n%q\n%q", got, whole)
			}
			return
		}
		cuts++
		num := func(i int) int {
			n, _ := strconv.Atoi(got[m[2*i]:m[2*i+1]])
			return n
		}
		// The hidden part is the whole body without head and tail.
		p := newPage(r, r.Error != nil)
		body := p.text
		i, j := strings.Index(got, "\n")+1, strings.LastIndex(got, body[len(body)-min(len(body), 50):])
		if r.Error != nil {
			i += strings.Index(got[i:], "\n") + 1
		}
		if j < m[1] {
			t.Fatal("the end of the output is not shown")
		}
		head, tail := strings.TrimSuffix(got[i:m[0]], "\n"), got[m[1]:j+min(len(body), 50)]
		if !strings.HasSuffix(body, tail) { // it goes on in the middle of a part, whose label is repeated
			_, tail, _ = strings.Cut(tail, "]\n")
		}
		if !strings.HasPrefix(body, head) || !strings.HasSuffix(body, tail) {
			t.Fatalf("head or tail are not those of the body: %.200q … %.200q", head, tail)
		}
		hidden := body[len(head) : len(body)-len(tail)]
		// A newline may stand between the head and the gap that belongs to either.
		if n := num(1); n != len(hidden) && n != len(hidden)-1 {
			t.Fatalf("%d bytes are said to be left out, %d are", n, len(hidden))
		}
		cursor, size := num(3), num(4)
		if int64(cursor) < first || int64(cursor) >= r.Cursor {
			t.Fatalf("cursor %d is outside %d…%d", cursor, first, r.Cursor)
		}
		// That poll, answered by a manager that fills a page of that size.
		room := size
		var page []api.Event
		for _, e := range events[int64(cursor)-first:] {
			b, _ := json.Marshal(e)
			if room -= len(b) + 1; room < 0 {
				break
			}
			page = append(page, e)
		}
		shown := newPage(result1(r.State, int64(cursor+len(page)), page...), false).text
		if !strings.Contains(plain(shown), plain(strings.TrimPrefix(hidden, "\n"))) {
			t.Fatalf("the poll shows\n%q\nand not\n%q", shown, hidden)
		}
	})
}

// plain drops what depends on where a page begins: labels, and the breaks they add.
func plain(s string) string {
	s = regexp.MustCompile(`\[(stdout|stderr|result|traceback|warning)\][ \n]`).ReplaceAllString(s, "")
	return strings.ReplaceAll(s, "\n", "")
}

// What a poll costs that brings nothing, at 4 characters a token or less.
func TestEmptyPollIsCheap(t *testing.T) {
	got, _ := renderExec(result1("running", 1234), view{poll: &api.PollParams{Cursor: ptr(int64(1234))}})
	if len(got) > 80 {
		t.Errorf("%d characters: %q", len(got), got)
	}
}

func pngFile(t *testing.T, dir, name string, width, height, pad int) string {
	t.Helper()
	var b bytes.Buffer
	m := image.NewPaletted(image.Rect(0, 0, width, height), color.Palette{color.Black, color.White})
	if err := png.Encode(&b, m); err != nil {
		t.Fatal(err)
	}
	b.Write(make([]byte, pad)) // readers ignore what follows the image
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestImages(t *testing.T) {
	dir := t.TempDir()
	good := pngFile(t, dir, "good.png", 20, 10, 0)
	wide := pngFile(t, dir, "wide.png", 9000, 1, 0)
	big := pngFile(t, dir, "big.png", 20, 10, api.MaxInlineImages-1000)
	huge := pngFile(t, dir, "huge.png", 20, 10, api.MaxInlineImages)
	link := filepath.Join(dir, "link.png")
	if err := os.Symlink(good, link); err != nil {
		t.Fatal(err)
	}
	fifo := filepath.Join(dir, "fifo.png")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	text := filepath.Join(dir, "text.png")
	if err := os.WriteFile(text, []byte("no image"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := clienttest.New(t)
	r.Play(func(c *clienttest.Cell) {
		c.Print("pictures\n")
		for _, p := range []string{good, wide, huge, link, fifo, text, big, big, good} {
			var size int64
			if st, err := os.Stat(p); err == nil {
				size = st.Size()
			}
			if p == huge {
				size = 5 // the record may be wrong
			}
			c.Emit(api.Event{Type: "display", Artifacts: []api.Artifact{{Mime: "image/png", Path: p, Size: size}}})
		}
		c.End(api.Succeeded, "")
	})
	c := converse(t, r)
	c.run("init", nil)
	got := c.run("execute", map[string]any{"code": "plot()"})
	if len(got.Images) != 3 {
		t.Errorf("%d images", len(got.Images))
	}
	for _, want := range []string{
		"good.png (image/png, ", ", image 1]\n", "wide.png", "not shown: 9000x1 pixels are more", "huge.png (image/png, 5 bytes), not shown: over the 2 MiB",
		"link.png", "not shown: cannot open it: too many levels of symbolic links", "fifo.png", "not shown: it is not a regular file",
		"text.png", "not shown: it is no readable image", ", image 2]\n", ", image 3]\n",
	} {
		if !strings.Contains(got.Text, want) {
			t.Errorf("no %q in\n%s", want, got.Text)
		}
	}
	if w := got.Payload["warnings"].([]any); len(w) != api.MaxWarnings || got.Payload["warnings_truncated"] != true {
		t.Errorf("warnings %v", w)
	}
	content := got.Raw["content"].([]any)
	data, err := base64.StdEncoding.DecodeString(content[1].(map[string]any)["data"].(string))
	want, _ := os.ReadFile(good)
	if err != nil || !bytes.Equal(data, want) {
		t.Errorf("the first image is not the file: %v", err)
	}
}

func TestFold(t *testing.T) {
	for in, want := range map[string]string{
		"plain\ntext\n":                            "plain\ntext\n",
		"a\r\nb\r\n":                               "a\nb\n",
		"\x1b[31mred\x1b[0m":                       "red",
		"10%\r20%\r100%":                           "100%",
		"longer line\rshort":                       "shortr line",
		"longer line\r\x1b[Kshort":                 "short",
		"abc\b\bX":                                 "aXc",
		"\x1b]0;title\x07text":                     "text",
		"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\": "link",
		"\x1b]never ended\nnext":                   "\nnext",
		"\x1bP1;2q data\x1b\\after":                "after",
		"\x1b(Bascii":                              "ascii",
		"\x1b7save\x1b8":                           "save",
		"cut\x1b[3":                                "cut",
		"cut\x1b":                                  "cut",
		"one\ntwo\n\x1b[2A\x1b[KONE\x1b[2B\rend":   "ONE\ntwo\nend",
		"bar 1: 0%\nbar 2: 0%\x1b[A\rbar 1: 100%\n\rbar 2: 100%\n": "bar 1: 100%\nbar 2: 100%\n",
		"keep\x1b[2J\x1b[H this":                                   "keep this",
		"below\x1b[J":                                              "below",
		"a\x1b[3Cb":                                                "a   b",
		"a\x1b[999999999Cb":                                        "a" + strings.Repeat(" ", maxColumn-1) + "b",
		"\x1b[5G*":                                                 "    *",
		"x\x1b[1Ky":                                                " y",
		"bell\a null\x00 del\x7f c1\u0085":                         "bell null del c1",
		"tab\tstays":                                               "tab\tstays",
		"\x1b[31":                                                  "",
		"\x1b[é":                                                   "é",
	} {
		if got := fold(in); got != want {
			t.Errorf("fold(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzFold(f *testing.F) {
	for _, s := range []string{"a\rb", "\x1b[31mx", "\x1b]0;t\a", "\x1b[9A\x1b[9B\x1b[2K\x1b[J", "\x1b[999C\b\b", "a\n\x1b[A\x1b[1K", "\x1b[\xff", "é\x1b(B\r\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := fold(s)
		if strings.ContainsFunc(got, special) {
			t.Errorf("fold(%q) = %q", s, got)
		}
		if fold(got) != got {
			t.Errorf("folding %q again changes it", got)
		}
		// At most a movement to the right for every three bytes.
		if len(got) > len(s)*utf8.UTFMax+(len(s)/3+1)*maxColumn {
			t.Errorf("%d bytes became %d", len(s), len(got))
		}
		if !strings.ContainsFunc(s, special) && got != s {
			t.Errorf("plain text changed: %q to %q", s, got)
		}
		if utf8.ValidString(s) && !utf8.ValidString(got) {
			t.Errorf("a rune was cut: %q", got)
		}
		collapse(got)
	})
}

func FuzzCollapse(f *testing.F) {
	f.Add("a\na\na\na\na\na\nb\n")
	f.Add("\n\n\n\n\n\n\n")
	f.Add("x\nx\nx\nx\nx\nx")
	f.Fuzz(func(t *testing.T, s string) {
		if strings.Contains(s, "[the line above ") {
			t.Skip() // what the output itself says cannot be told from a count
		}
		// Expanding the counts gives the text back.
		var b strings.Builder
		last := ""
		for line := range strings.Lines(collapse(s)) {
			var n int
			if c, err := fmt.Sscanf(line, "[the line above %d more times]", &n); c == 1 && err == nil {
				b.WriteString(strings.Repeat(last, n))
				continue
			}
			b.WriteString(line)
			last = line
		}
		if b.String() != s {
			t.Errorf("%q became %q", s, collapse(s))
		}
	})
}
