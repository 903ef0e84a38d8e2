package files

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/jpeg"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("FILES_TEST_ROLE"); role != "" {
		os.Exit(childRole(role))
	}
	goleak.VerifyTestMain(m)
}

// newService serves a fresh workspace. At the end nothing of ours may be left in it.
func newService(t testing.TB) (*Service, string) {
	t.Helper()
	dir := t.TempDir()
	s, err := New(Options{Root: dir, Umask: -1})
	if err != nil {
		t.Fatal(err)
	}
	fds := len(names(t, "/proc/self/fd"))
	t.Cleanup(func() {
		noLeftovers(t, dir)
		if len(s.locks.held) != 0 {
			t.Errorf("locks are left: %v", s.locks.held)
		}
		if now := len(names(t, "/proc/self/fd")); now > fds {
			t.Errorf("%d descriptors before, %d after", fds, now)
		}
	})
	return s, string(s.root)
}

func noLeftovers(t testing.TB, dir string) {
	t.Helper()
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && (strings.HasPrefix(d.Name(), ".mypr-") || filepath.Base(filepath.Dir(path)) == "writes") {
			t.Errorf("left behind: %s", path)
		}
		return nil
	})
}

func names(t testing.TB, dir string) []string {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n, err := f.Readdirnames(-1)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func put(t testing.TB, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func get(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func sha(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

func ptr[T any](v T) *T { return &v }

// call goes the way of a call from Python: by name, with JSON.
func call[R any](t testing.TB, s *Service, method, params string) (R, error) {
	t.Helper()
	var r R
	m := s.Methods()[method]
	if m == nil {
		t.Fatalf("no method %s", method)
	}
	v, err := m(t.Context(), json.RawMessage(params))
	if err != nil {
		return r, err
	}
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &r); err != nil {
		t.Fatal(err)
	}
	return r, nil
}

func must[R any](t testing.TB) func(R, error) R {
	return func(r R, err error) R {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
}

func refused(t testing.TB, err error, code string, say ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("accepted; %s was expected", code)
	}
	if got := rpc.CodeOf(err); got != code {
		t.Fatalf("code %q, want %q: %v", got, code, err)
	}
	for _, w := range say {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
}

type dict = map[string]any

func TestReadExample(t *testing.T) {
	s, dir := newService(t)
	var b strings.Builder
	for i := 1; i <= 100; i++ {
		fmt.Fprintf(&b, "line %d\n", i)
	}
	put(t, dir+"/src/app.py", b.String())
	r := must[dict](t)(call[dict](t, s, "fs.read", `{"path":"src/app.py","start_line":20,"end_line":80}`))
	lines := strings.SplitAfter(b.String(), "\n")
	want := dict{
		"path": "src/app.py", "text": strings.Join(lines[19:80], ""), "start_line": 20.0, "end_line": 80.0, "total_lines": 100.0,
		"start_byte": float64(len(strings.Join(lines[:19], ""))), "next_line": 81.0, "next_byte": float64(len(strings.Join(lines[:80], ""))),
		"next_cursor": nil, "truncated": false, "revision": sha(b.String()), "size": float64(b.Len()),
	}
	for k, v := range want {
		if r[k] != v {
			t.Errorf("%s: %v, want %v", k, r[k], v)
		}
	}
	if len(r) != len(want) {
		t.Errorf("other fields: %v", r)
	}
}

func TestReadLimits(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/f", strings.Repeat("x", 40_000)+"\n")
	r := must[ReadResult](t)(call[ReadResult](t, s, "fs.read", `{"path":"f"}`))
	if len(r.Text) != 32768 || !r.Truncated || *r.NextCursor != (Place{1, 32768}) {
		t.Errorf("default page: %d bytes, %v, %v", len(r.Text), r.Truncated, r.NextCursor)
	}
	r = must[ReadResult](t)(call[ReadResult](t, s, "fs.read", `{"path":"f","start_line":1,"start_byte":32768}`))
	if len(r.Text) != 40_001-32768 || r.Truncated || r.NextCursor != nil || r.StartLine != 1 {
		t.Errorf("second page: %+v", r)
	}
	put(t, dir+"/empty", "")
	r = must[ReadResult](t)(call[ReadResult](t, s, "fs.read", `{"path":"empty"}`))
	if r.Text != "" || r.TotalLines != 0 || r.EndLine != 0 || r.Truncated || r.NextLine != nil {
		t.Errorf("empty: %+v", r)
	}
	put(t, dir+"/three", "a\nb\nc")
	for _, c := range []struct {
		params, text string
		start, end   int64
	}{
		{`{"path":"three","start_line":2}`, "b\nc", 2, 3},
		{`{"path":"three","start_line":2,"end_line":2}`, "b\n", 2, 2},
		{`{"path":"three","start_line":3,"end_line":99}`, "c", 3, 3},
		{`{"path":"three","start_line":4}`, "", 4, 3},
		{`{"path":"three","start_line":50}`, "", 50, 49},
		{`{"path":"three","start_byte":2}`, "b\nc", 2, 3},
		{`{"path":"three","start_byte":5}`, "", 3, 2},
		{`{"path":"three","start_line":3,"start_byte":4}`, "c", 3, 3},
	} {
		r := must[ReadResult](t)(call[ReadResult](t, s, "fs.read", c.params))
		if r.Text != c.text || r.StartLine != c.start || r.EndLine != c.end || r.TotalLines != 3 {
			t.Errorf("%s: %q lines %d-%d of %d", c.params, r.Text, r.StartLine, r.EndLine, r.TotalLines)
		}
	}
	for params, say := range map[string]string{
		`{"path":"three","start_line":0}`:                   "start_line",
		`{"path":"three","start_line":3,"end_line":2}`:      "end_line",
		`{"path":"three","start_byte":-1}`:                  "start_byte",
		`{"path":"three","start_byte":6}`:                   "behind the end",
		`{"path":"three","start_line":2,"start_byte":4}`:    "in line 3",
		`{"path":"three","max_bytes":3}`:                    "max_bytes",
		`{"path":"three","max_bytes":4194305}`:              "max_bytes",
		`{"path":"three","lines":3}`:                        "lines",
		`{"path":"three","start_line":"one"}`:               "start_line",
		`{"path":""}`:                                       "empty",
		`{"path":"a\u0000b"}`:                               "NUL",
		`{"path":"three","encoding":"klingon"}`:             "klingon",
		`{"path":"` + strings.Repeat("n", 300) + `"}`:       "too long",
		`{"path":"three/x"}`:                                "not a directory",
		`{"path":"."}`:                                      "tree",
		`{"path":"three","encoding":"utf-16","end_line":1}`: "", // below: another code
	} {
		_, err := call[dict](t, s, "fs.read", params)
		if say == "" {
			refused(t, err, CodeEncoding, "byte order mark")
			continue
		}
		refused(t, err, rpc.CodeInvalidRequest, say)
	}
	_, err := call[dict](t, s, "fs.read", `{"path":"src/none.py"}`)
	refused(t, err, rpc.CodeNotFound, "src/none.py", "ws.fs.tree")
	if e := rpc.AsError(err); e.Operation != "fs.read" {
		t.Errorf("operation %q", e.Operation)
	}
}

// Following next_cursor gives back the text byte for byte, whatever characters and
// budgets, and no page is larger than its budget or splits a character.
func TestReadPagesGiveBackTheWhole(t *testing.T) {
	s, dir := newService(t)
	rapid.Check(t, func(t *rapid.T) {
		// Short pieces, repeated: generated strings are seldom longer than a page.
		piece := rapid.StringOfN(rapid.RuneFrom([]rune("aéß漢💥\n\r\n\x00")), 0, 60, -1).Draw(t, "piece")
		text := strings.Repeat(piece, rapid.IntRange(0, 400).Draw(t, "times"))
		if err := os.WriteFile(dir+"/f", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		budget := rapid.IntRange(1024, 9000).Draw(t, "budget")
		p := ReadParams{Path: "f", StartLine: 1, MaxBytes: budget, Encoding: "utf-8"}
		var got strings.Builder
		for {
			r, err := s.Read(context.Background(), p)
			if err != nil {
				t.Fatal(err)
			}
			if len(r.Text) > budget || r.Revision != sha(text) || r.StartByte != int64(got.Len()) {
				t.Fatalf("page of %d bytes at %d", len(r.Text), r.StartByte)
			}
			if r.StartLine != int64(strings.Count(got.String(), "\n"))+1 {
				t.Fatalf("start_line %d", r.StartLine)
			}
			got.WriteString(r.Text)
			if !r.Truncated {
				break
			}
			p.StartLine, p.StartByte = r.NextCursor.Line, &r.NextCursor.Byte
		}
		if got.String() != text {
			t.Fatalf("%d bytes of %d", got.Len(), len(text))
		}
	})
}

// Any range of lines is what splitting the text gives.
func TestReadRangesOfLines(t *testing.T) {
	s, dir := newService(t)
	rapid.Check(t, func(t *rapid.T) {
		// Lines around the size of the read buffer, to meet its borders.
		lines := rapid.SliceOfN(rapid.IntRange(0, 90_000), 0, 12).Draw(t, "lengths")
		var b strings.Builder
		for i, n := range lines {
			b.WriteString(strings.Repeat(string(rune('a'+i)), n))
			if i < len(lines)-1 || rapid.Bool().Draw(t, "final newline") {
				b.WriteByte('\n')
			}
		}
		text := b.String()
		if err := os.WriteFile(dir+"/f", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		split := strings.SplitAfter(text, "\n")
		if split[len(split)-1] == "" {
			split = split[:len(split)-1]
		}
		start := rapid.IntRange(1, 14).Draw(t, "start")
		end := start + rapid.IntRange(0, 14).Draw(t, "n")
		r, err := s.Read(context.Background(), ReadParams{Path: "f", StartLine: int64(start), EndLine: ptr(int64(end)), MaxBytes: MaxReadBytes, Encoding: "utf-8"})
		if err != nil {
			t.Fatal(err)
		}
		want := ""
		if start <= len(split) {
			want = strings.Join(split[start-1:min(end, len(split))], "")
		}
		if r.Text != want || r.TotalLines != int64(len(split)) || r.Truncated {
			t.Fatalf("lines %d-%d: %d bytes, want %d; %d lines, want %d", start, end, len(r.Text), len(want), r.TotalLines, len(split))
		}
	})
}

func TestReadEncodings(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/latin", "caf\xe9\nol\xe9\n")
	_, err := call[dict](t, s, "fs.read", `{"path":"latin"}`)
	refused(t, err, CodeEncoding, "0xe9", "offset 3", "line 1", "read_bytes", "encoding=")
	r := must[ReadResult](t)(call[ReadResult](t, s, "fs.read", `{"path":"latin","encoding":"latin-1","start_line":2}`))
	if r.Text != "olé\n" || r.Revision != sha("caf\xe9\nol\xe9\n") || r.Size != 9 {
		t.Errorf("%+v", r)
	}
	put(t, dir+"/u16", "\xff\xfea\x00\n\x00b\x00")
	r = must[ReadResult](t)(call[ReadResult](t, s, "fs.read", `{"path":"u16","encoding":"utf-16"}`))
	if r.Text != "a\nb" {
		t.Errorf("%q", r.Text)
	}
	put(t, dir+"/bad16", "\xff\xfea\x00b")
	_, err = call[dict](t, s, "fs.read", `{"path":"bad16","encoding":"utf-16"}`)
	refused(t, err, CodeEncoding)
	// In the middle of the page a character that the budget cuts is left for the next one;
	// one that the file cuts is an error.
	put(t, dir+"/cut", "abc\xe6\xbc")
	_, err = call[dict](t, s, "fs.read", `{"path":"cut"}`)
	refused(t, err, CodeEncoding, "offset 3")
	put(t, dir+"/kanji", "漢字")
	_, err = call[dict](t, s, "fs.read", `{"path":"kanji","start_byte":1}`)
	refused(t, err, rpc.CodeInvalidRequest, "inside a character")
}

func TestReadBytes(t *testing.T) {
	s, dir := newService(t)
	data := make([]byte, 700_000)
	for i := range data {
		data[i] = byte(i * 7)
	}
	put(t, dir+"/bin", string(data))
	var got []byte
	p := ReadBytesParams{Path: "bin", MaxBytes: 100_001}
	for {
		r, err := s.ReadBytes(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		if *r.Revision != sha(string(data)) || r.Size != int64(len(data)) || len(r.Data) > p.MaxBytes {
			t.Fatalf("%+v", r)
		}
		got = append(got, r.Data...)
		if !r.Truncated {
			break
		}
		p.StartByte = r.NextCursor.Byte
	}
	if !bytes.Equal(got, data) {
		t.Fatalf("%d bytes", len(got))
	}
	r := must[dict](t)(call[dict](t, s, "fs.read_bytes", `{"path":"bin","start_byte":699999}`))
	if r["data_base64"] == "" || r["truncated"] != false {
		t.Error(r)
	}
	r = must[dict](t)(call[dict](t, s, "fs.read_bytes", `{"path":"bin","start_byte":999999}`))
	if r["data_base64"] != "" || r["truncated"] != false {
		t.Error(r)
	}
}

func TestSparseFileOf5GiB(t *testing.T) {
	s, dir := newService(t)
	f, err := os.Create(dir + "/huge")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(5 << 30); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("end"), 5<<30-3); err != nil {
		t.Fatal(err)
	}
	f.Close()
	_, err = call[dict](t, s, "fs.read", `{"path":"huge"}`)
	refused(t, err, rpc.CodeTooLarge, "5368709120", "read_bytes")
	_, err = call[dict](t, s, "fs.patch", `{"path":"huge","edits":[{"old":"end","new":"END"}]}`)
	refused(t, err, rpc.CodeTooLarge, "ws.shell")
	r, err := s.ReadBytes(t.Context(), ReadBytesParams{Path: "huge", StartByte: 5<<30 - 3, MaxBytes: 100})
	if err != nil || string(r.Data) != "end" || r.Revision != nil || r.Truncated {
		t.Errorf("%+v %v", r, err)
	}
	e := must[Entry](t)(call[Entry](t, s, "fs.stat", `{"path":"huge"}`))
	if e.Size != 5<<30 {
		t.Error(e)
	}
	_, err = call[dict](t, s, "fs.write", `{"path":"huge","text":"x","expected_hash":"`+sha("")+`"}`)
	refused(t, err, rpc.CodeConflict)
	w := must[WriteResult](t)(call[WriteResult](t, s, "fs.write", `{"path":"huge","text":"x","overwrite":true}`))
	if w.OldRevision != nil || get(t, dir+"/huge") != "x" {
		t.Error(w)
	}
}

func TestLineOf50MiB(t *testing.T) {
	s, dir := newService(t)
	line := strings.Repeat("0123456789", 5<<20) + "\n"
	put(t, dir+"/long", "first\n"+line+"last\n")
	r := must[ReadResult](t)(call[ReadResult](t, s, "fs.read", `{"path":"long","start_line":3}`))
	if r.Text != "last\n" || r.TotalLines != 3 {
		t.Errorf("%+v", r)
	}
	r = must[ReadResult](t)(call[ReadResult](t, s, "fs.read", `{"path":"long","start_line":2}`))
	if len(r.Text) != 32768 || r.NextCursor == nil || r.NextCursor.Line != 2 || r.EndLine != 2 {
		t.Errorf("%d %+v", len(r.Text), r.NextCursor)
	}
	p := must[PatchResult](t)(call[PatchResult](t, s, "fs.patch", `{"path":"long","edits":[{"old":"last","new":"LAST"}]}`))
	if p.Added != 1 || p.Removed != 1 || len(p.Diff) > 32768 {
		t.Errorf("%d bytes of diff", len(p.Diff))
	}
}

func TestReadChangedMeanwhile(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/f", strings.Repeat("x", 1<<20))
	f, st, err := s.openRegular("read", "f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, err = s.scan(t.Context(), f, st, func(_ []byte, pos int64) {
		if pos == 0 {
			put(t, dir+"/f", strings.Repeat("y", 1<<19)) // shorter, in place
		}
	})
	refused(t, err, rpc.CodeConflict, "changed while it was read", "again")
	// What replaces the file, or moves or links it, does not disturb who reads it.
	text := strings.Repeat("x", 1<<20)
	for what, change := range map[string]func() error{
		"replaced": func() error {
			return errors.Join(os.WriteFile(dir+"/new", []byte("y"), 0o600), os.Rename(dir+"/new", dir+"/g"))
		},
		"moved":   func() error { return os.Rename(dir+"/g", dir+"/moved") },
		"removed": func() error { return os.Remove(dir + "/g") },
		"linked":  func() error { return os.Link(dir+"/g", dir+"/linked") },
	} {
		put(t, dir+"/g", text)
		f, st, err := s.openRegular("read", "g")
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		_, err = s.scan(t.Context(), f, st, func(chunk []byte, pos int64) {
			if got = append(got, chunk...); pos == 0 {
				must[any](t)(nil, change())
			}
		})
		f.Close()
		if err != nil || string(got) != text {
			t.Errorf("%s: %d bytes, %v", what, len(got), err)
		}
		_ = os.Remove(dir + "/g")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Read(ctx, ReadParams{Path: "f", StartLine: 1, MaxBytes: 1024, Encoding: "utf-8"}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	// The files of /proc lie about their size.
	r := must[ReadResult](t)(call[ReadResult](t, s, "fs.read", `{"path":"/proc/self/status"}`))
	if !strings.HasPrefix(r.Text, "Name:") || r.Size == 0 {
		t.Errorf("%+v", r)
	}
}

func TestSpecialFiles(t *testing.T) {
	s, dir := newService(t)
	if err := unix.Mkfifo(dir+"/fifo", 0o644); err != nil {
		t.Fatal(err)
	}
	must[any](t)(nil, os.Symlink("loop2", dir+"/loop1"))
	must[any](t)(nil, os.Symlink("loop1", dir+"/loop2"))
	must[any](t)(nil, os.Mkdir(dir+"/dir", 0o755))
	sock, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(sock)
	if err := unix.Bind(sock, &unix.SockaddrUnix{Name: dir + "/sock"}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ path, kind, special string }{
		{"fifo", "other", "FIFO"}, {"sock", "other", "socket"}, {"/dev/null", "other", "character device"},
		{"loop1", "symlink", ""}, {"dir", "directory", ""},
	} {
		for _, m := range []string{"read", "read_bytes", "image"} {
			_, err := call[dict](t, s, "fs."+m, fmt.Sprintf(`{"path":%q}`, c.path))
			refused(t, err, rpc.CodeInvalidRequest)
		}
		for m, rest := range map[string]string{"write": `"text":"x","overwrite":true`, "write_bytes": `"data_base64":"eA==","overwrite":true`, "patch": `"edits":[{"old":"a","new":"b"}]`} {
			_, err := call[dict](t, s, "fs."+m, fmt.Sprintf(`{"path":%q,%s}`, c.path, rest))
			refused(t, err, rpc.CodeInvalidRequest)
		}
		_, err := call[dict](t, s, "fs.apply_patch", fmt.Sprintf(`{"patch":"*** Begin Patch\n*** Delete File: %s\n*** End Patch"}`, c.path))
		refused(t, err, rpc.CodeInvalidRequest)
		e := must[Entry](t)(call[Entry](t, s, "fs.stat", fmt.Sprintf(`{"path":%q}`, c.path)))
		if e.Kind != c.kind || e.Special != c.special {
			t.Errorf("%s: %+v", c.path, e)
		}
	}
	_, err = call[dict](t, s, "fs.stat", `{"path":"loop1","follow_symlinks":true}`)
	refused(t, err, rpc.CodeInvalidRequest, "symbolic links", "circle")
	_, err = call[dict](t, s, "fs.write", `{"path":"loop1/x","text":""}`)
	refused(t, err, rpc.CodeInvalidRequest)
	for _, p := range []string{"dir/", ".", "dir/..", "new/"} {
		_, err = call[dict](t, s, "fs.write", fmt.Sprintf(`{"path":%q,"text":""}`, p))
		refused(t, err, rpc.CodeInvalidRequest, "directory")
	}
}

func TestStat(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/f", "12345")
	must[any](t)(nil, unix.Chmod(dir+"/f", 0o4750))
	must[any](t)(nil, os.Chtimes(dir+"/f", time.Unix(5, 7), time.Unix(11, 13)))
	must[any](t)(nil, os.Symlink("f", dir+"/link"))
	must[any](t)(nil, os.Symlink("nothing", dir+"/dangling"))
	must[any](t)(nil, os.Link(dir+"/f", dir+"/hard"))
	got := must[dict](t)(call[dict](t, s, "fs.stat", `{"path":"f"}`))
	want := dict{"path": "f", "kind": "file", "size": 5.0, "mtime_ns": 11e9 + 13, "mode": "4750", "links": 2.0}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", got, want)
	}
	got = must[dict](t)(call[dict](t, s, "fs.stat", `{"path":"link"}`))
	if got["kind"] != "symlink" || got["target"] != "f" {
		t.Error(got)
	}
	got = must[dict](t)(call[dict](t, s, "fs.stat", `{"path":"link","follow_symlinks":true}`))
	if got["kind"] != "file" || got["target"] != "f" || got["path"] != "link" {
		t.Error(got)
	}
	got = must[dict](t)(call[dict](t, s, "fs.stat", `{"path":"dangling"}`))
	if got["kind"] != "symlink" || got["target"] != "nothing" {
		t.Error(got)
	}
	_, err := call[dict](t, s, "fs.stat", `{"path":"dangling","follow_symlinks":true}`)
	refused(t, err, rpc.CodeNotFound)
}

func TestTree(t *testing.T) {
	s, dir := newService(t)
	for _, f := range []string{"b/2", "b/1", "a/x/y/z/deep", ".hidden/f", "c"} {
		put(t, dir+"/"+f, f)
	}
	must[any](t)(nil, os.Symlink("b", dir+"/link"))
	must[any](t)(nil, os.Mkdir(dir+"/empty", 0o755))
	show := func(params string) string {
		t.Helper()
		r := must[TreeResult](t)(call[TreeResult](t, s, "fs.tree", params))
		var b strings.Builder
		var walk func(e *Entry)
		walk = func(e *Entry) {
			fmt.Fprintf(&b, "%s", e.Path)
			if e.Kind == "symlink" {
				fmt.Fprintf(&b, "->%s", *e.Target)
			}
			if e.Entries != nil {
				b.WriteByte('(')
				for i, c := range e.Entries {
					if i > 0 {
						b.WriteByte(' ')
					}
					walk(c)
				}
				b.WriteByte(')')
			}
			if e.Total > 0 {
				fmt.Fprintf(&b, "of%d", e.Total)
			}
		}
		walk(r.Entry)
		if r.Truncated {
			b.WriteString(" truncated")
		}
		return b.String()
	}
	for params, want := range map[string]string{
		`{}`:                          ".(a(a/x(a/x/y)) b(b/1 b/2) c empty() link->b)",
		`{"depth":1}`:                 ".(a b c empty link->b)",
		`{"depth":1,"hidden":true}`:   ".(.hidden a b c empty link->b)",
		`{"path":"a","depth":9}`:      "a(a/x(a/x/y(a/x/y/z(a/x/y/z/deep))))",
		`{"max_entries":3}`:           ".(a b c)of5 truncated",
		`{"max_entries":6}`:           ".(a(a/x) b()of2 c empty link->b) truncated",
		`{"path":"link","depth":1}`:   "link(link/1 link/2)",
		`{"path":"empty"}`:            "empty()",
		`{"depth":1,"max_entries":5}`: ".(a b c empty link->b)",
	} {
		if got := show(params); got != want {
			t.Errorf("%s:\n got %s\nwant %s", params, got, want)
		}
	}
	for _, p := range []string{`{"depth":0}`, `{"depth":65}`, `{"max_entries":0}`, `{"max_entries":10001}`, `{"path":"c"}`} {
		_, err := call[dict](t, s, "fs.tree", p)
		refused(t, err, rpc.CodeInvalidRequest)
	}
}

func TestTreeDefaults(t *testing.T) {
	s, dir := newService(t)
	for i := range 250 {
		put(t, fmt.Sprintf("%s/f%03d", dir, i), "")
	}
	put(t, dir+"/1/2/3/4", "")
	r := must[TreeResult](t)(call[TreeResult](t, s, "fs.tree", `{}`))
	if r.Count != 200 || !r.Truncated || r.Total != 251 {
		t.Errorf("%d entries of %d, %v", r.Count, r.Total, r.Truncated)
	}
	r = must[TreeResult](t)(call[TreeResult](t, s, "fs.tree", `{"max_entries":1000}`))
	d := r.Entries[0].Entries[0].Entries[0] // depth 3
	if d.Path != "1/2/3" || d.Entries != nil {
		t.Errorf("%+v", d)
	}
}

func TestDirectoryOf200000Entries(t *testing.T) {
	s, _ := newService(t)
	dir, err := os.MkdirTemp("/dev/shm", "many") // on a disk, making them takes a minute
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	for i := range 200_000 {
		fd, err := unix.Open(fmt.Sprintf("%s/%06d", dir, i), unix.O_CREAT|unix.O_WRONLY, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
	}
	start := time.Now()
	r := must[TreeResult](t)(call[TreeResult](t, s, "fs.tree", `{"path":"`+dir+`"}`))
	if r.Count != 200 || !r.Truncated || r.Total != 200_000 || string(r.Entries[199].Path) != dir+"/000199" {
		t.Errorf("%d of %d", r.Count, r.Total)
	}
	t.Logf("200,000 entries: %v", time.Since(start))
}

// Names that are not UTF-8 come back as they are and open the same file.
func TestNamesThatAreNotUTF8(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/d\xff/caf\xe9.txt", "content\n")
	v, err := s.Tree(t.Context(), TreeParams{Path: ".", Depth: 2, MaxEntries: 10})
	if err != nil {
		t.Fatal(err)
	}
	name, err := json.Marshal(v.Entries[0].Entries[0].Path)
	if err != nil || string(name) != `"d\udcff/caf\udce9.txt"` {
		t.Fatalf("%s %v", name, err)
	}
	page := must[ReadResult](t)(call[ReadResult](t, s, "fs.read", `{"path":`+string(name)+`}`))
	if page.Text != "content\n" || page.Path != "d\xff/caf\xe9.txt" {
		t.Errorf("%+v", page)
	}
	must[dict](t)(call[dict](t, s, "fs.write", `{"path":"d\udcff/n\udcfe","text":"new"}`))
	if get(t, dir+"/d\xff/n\xfe") != "new" {
		t.Error("not written")
	}
	patch := `*** Begin Patch\n*** Update File: d\udcff/caf\udce9.txt\n*** Move to: d\udcff/x\udcfd\n@@\n-content\n+changed\n*** End Patch`
	got := must[ApplyPatchResult](t)(call[ApplyPatchResult](t, s, "fs.apply_patch",
		`{"patch":"`+patch+`","expected_hashes":{"d\udcff/caf\udce9.txt":"`+sha("content\n")+`","d\udcff/x\udcfd":null}}`))
	if got.Files[0].Path != "d\xff/x\xfd" || get(t, dir+"/d\xff/x\xfd") != "changed\n" {
		t.Errorf("%+v", got)
	}
	if !json.Valid([]byte(got.Diff)) && strings.ToValidUTF8(got.Diff, "") != got.Diff {
		t.Error("the diff is not UTF-8")
	}
	_, err = call[dict](t, s, "fs.write", `{"path":"t","text":"lone \udc80"}`)
	refused(t, err, CodeEncoding, "U+DC80", "write_bytes")
	_, err = call[dict](t, s, "fs.apply_patch", `{"patch":"*** Begin Patch\n*** Add File: t\n+lone \udc80\n*** End Patch"}`)
	refused(t, err, CodeEncoding)
}

func TestImage(t *testing.T) {
	s, dir := newService(t)
	img := image.NewGray(image.Rect(0, 0, 7, 5))
	var p, j bytes.Buffer
	must[any](t)(nil, png.Encode(&p, img))
	must[any](t)(nil, jpeg.Encode(&j, img, nil))
	put(t, dir+"/plot.png", p.String())
	put(t, dir+"/photo", j.String())
	put(t, dir+"/text.png", "no image")
	big := p.String() + strings.Repeat("\x00", 2<<20-p.Len()+1)
	put(t, dir+"/big.png", big)
	put(t, dir+"/fits.png", big[:2<<20])
	r := must[ImageResult](t)(call[ImageResult](t, s, "fs.image", `{"path":"plot.png"}`))
	if r.Mime != "image/png" || r.Width != 7 || r.Height != 5 || !bytes.Equal(r.Data, p.Bytes()) || r.Revision != sha(p.String()) {
		t.Errorf("%+v", r)
	}
	r = must[ImageResult](t)(call[ImageResult](t, s, "fs.image", `{"path":"photo"}`))
	if r.Mime != "image/jpeg" || r.Size != int64(j.Len()) {
		t.Errorf("%+v", r)
	}
	must[ImageResult](t)(call[ImageResult](t, s, "fs.image", `{"path":"fits.png"}`)) // 2 MiB exactly
	_, err := call[dict](t, s, "fs.image", `{"path":"big.png"}`)
	refused(t, err, rpc.CodeTooLarge, "2097153", "2097152")
	_, err = call[dict](t, s, "fs.image", `{"path":"text.png"}`)
	refused(t, err, rpc.CodeInvalidRequest, "no PNG or JPEG")
	if get(t, dir+"/plot.png") != p.String() {
		t.Error("the source was changed")
	}
}

func TestWrite(t *testing.T) {
	s, dir := newService(t)
	r := must[dict](t)(call[dict](t, s, "fs.write", `{"path":"notes.txt","text":"Hello from Python.\n"}`))
	want := dict{"path": "notes.txt", "created": true, "size": 19.0, "old_revision": nil, "new_revision": sha("Hello from Python.\n"), "revision": sha("Hello from Python.\n")}
	if fmt.Sprint(r) != fmt.Sprint(want) {
		t.Errorf("%v", r)
	}
	_, err := call[dict](t, s, "fs.write", `{"path":"notes.txt","text":"other"}`)
	refused(t, err, rpc.CodeConflict, "exists", "expected_hash", "overwrite")
	if rpc.AsError(err).Details["current_revision"] != sha("Hello from Python.\n") {
		t.Error(rpc.AsError(err).Details)
	}
	_, err = call[dict](t, s, "fs.write", `{"path":"notes.txt","text":"other","expected_hash":"`+sha("x")+`"}`)
	refused(t, err, rpc.CodeConflict, "has changed")
	_, err = call[dict](t, s, "fs.write", `{"path":"notes.txt","text":"other","expected_hash":"`+sha("x")+`","overwrite":true}`)
	refused(t, err, rpc.CodeConflict, "has changed") // a revision that was given counts
	_, err = call[dict](t, s, "fs.write", `{"path":"notes.txt","text":"other","expected_hash":"abc"}`)
	refused(t, err, rpc.CodeInvalidRequest, "64 hex digits")
	_, err = call[dict](t, s, "fs.write", `{"path":"none","text":"other","expected_hash":"`+sha("x")+`"}`)
	refused(t, err, rpc.CodeConflict, "does not exist")
	if get(t, dir+"/notes.txt") != "Hello from Python.\n" {
		t.Fatal("a refused write changed the file")
	}
	r = must[dict](t)(call[dict](t, s, "fs.write", `{"path":"notes.txt","text":"two","expected_hash":"`+sha("Hello from Python.\n")+`"}`))
	if r["old_revision"] != sha("Hello from Python.\n") || get(t, dir+"/notes.txt") != "two" || r["created"] != false {
		t.Error(r)
	}
	must[dict](t)(call[dict](t, s, "fs.write", `{"path":"notes.txt","text":"three","overwrite":true}`))
	_, err = call[dict](t, s, "fs.write", `{"path":"p/q/new","text":"x"}`)
	refused(t, err, rpc.CodeNotFound, "p/q", "create_parents")
	must[dict](t)(call[dict](t, s, "fs.write", `{"path":"p/q/new","text":"x","create_parents":true}`))
	if get(t, dir+"/p/q/new") != "x" {
		t.Error("not written")
	}
	must[dict](t)(call[dict](t, s, "fs.write", `{"path":"l1","text":"café","encoding":"latin-1"}`))
	if get(t, dir+"/l1") != "caf\xe9" {
		t.Errorf("%q", get(t, dir+"/l1"))
	}
	must[dict](t)(call[dict](t, s, "fs.write", `{"path":"u16","text":"é","encoding":"utf-16"}`))
	if get(t, dir+"/u16") != "\xff\xfe\xe9\x00" {
		t.Errorf("%q", get(t, dir+"/u16"))
	}
	_, err = call[dict](t, s, "fs.write", `{"path":"a","text":"漢","encoding":"latin-1"}`)
	refused(t, err, CodeEncoding, "latin-1")
	must[dict](t)(call[dict](t, s, "fs.write_bytes", `{"path":"bin","data_base64":"AP8="}`))
	if get(t, dir+"/bin") != "\x00\xff" {
		t.Errorf("%q", get(t, dir+"/bin"))
	}
	abs := t.TempDir() + "/abs"
	r = must[dict](t)(call[dict](t, s, "fs.write", fmt.Sprintf(`{"path":%q,"text":"x"}`, abs)))
	if r["path"] != abs || get(t, abs) != "x" {
		t.Error(r)
	}
}

func TestWritesFollowSymlinks(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/real/f", "old\n")
	must[any](t)(nil, os.Symlink("real", dir+"/dirlink"))
	must[any](t)(nil, os.Symlink("dirlink/f", dir+"/link"))
	must[any](t)(nil, os.Symlink(dir+"/real/new", dir+"/dangling"))
	r := must[dict](t)(call[dict](t, s, "fs.patch", `{"path":"link","edits":[{"old":"old","new":"new"}]}`))
	if r["path"] != "real/f" || get(t, dir+"/real/f") != "new\n" {
		t.Error(r)
	}
	must[dict](t)(call[dict](t, s, "fs.write", `{"path":"link","text":"again","overwrite":true}`))
	must[dict](t)(call[dict](t, s, "fs.write", `{"path":"dangling","text":"made"}`))
	if get(t, dir+"/real/f") != "again" || get(t, dir+"/real/new") != "made" {
		t.Error("not through the link")
	}
	for _, l := range []string{"link", "dangling", "dirlink"} {
		if st, err := os.Lstat(dir + "/" + l); err != nil || st.Mode()&os.ModeSymlink == 0 {
			t.Errorf("%s is no link any more", l)
		}
	}
	// Both names take the same lock.
	a := must[*target](t)(s.resolve("write", "link", true))
	b := must[*target](t)(s.resolve("write", "real/../dirlink/f", true))
	if a.key != b.key {
		t.Errorf("%s and %s", a.key, b.key)
	}
	_, err := call[dict](t, s, "fs.apply_patch", `{"patch":"*** Begin Patch\n*** Update File: link\n@@\n-again\n+x\n*** End Patch"}`)
	refused(t, err, rpc.CodeInvalidRequest, "symbolic link")
}

func TestReplacingKeepsAttributes(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/f", "old\n")
	must[any](t)(nil, os.Chmod(dir+"/f", 0o751))
	hasXattr := true
	if err := unix.Setxattr(dir+"/f", "user.note", []byte("keep"), 0); err != nil {
		t.Logf("this file system has no user attributes: %v", err)
		hasXattr = false
	}
	if os.Geteuid() == 0 {
		must[any](t)(nil, os.Chown(dir+"/f", 12345, 54321))
		must[any](t)(nil, unix.Chmod(dir+"/f", 0o6751))
	}
	var before, after unix.Stat_t
	must[any](t)(nil, unix.Lstat(dir+"/f", &before))
	check := func(what, path string) {
		t.Helper()
		must[any](t)(nil, unix.Lstat(path, &after))
		if after.Mode != before.Mode || after.Uid != before.Uid || after.Gid != before.Gid {
			t.Errorf("%s: mode %o -> %o, owner %d:%d -> %d:%d", what, before.Mode, after.Mode, before.Uid, before.Gid, after.Uid, after.Gid)
		}
		if hasXattr {
			b := make([]byte, 64)
			if n, err := unix.Getxattr(path, "user.note", b); err != nil || string(b[:n]) != "keep" {
				t.Errorf("%s: attribute %q %v", what, b[:max(n, 0)], err)
			}
		}
	}
	must[dict](t)(call[dict](t, s, "fs.patch", `{"path":"f","edits":[{"old":"old","new":"new"}]}`))
	check("patch", dir+"/f")
	must[dict](t)(call[dict](t, s, "fs.write", `{"path":"f","text":"w\n","overwrite":true}`))
	check("write", dir+"/f")
	must[dict](t)(call[dict](t, s, "fs.apply_patch", `{"patch":"*** Begin Patch\n*** Update File: f\n*** Move to: g\n@@\n-w\n+p\n*** End Patch"}`))
	check("move", dir+"/g")
}

// New files get the user's umask, also where the process has a stricter one.
func TestUmask(t *testing.T) {
	s, dir := newService(t)
	mode := func(name string) os.FileMode {
		t.Helper()
		st, err := os.Stat(dir + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return st.Mode().Perm()
	}
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	must[dict](t)(call[dict](t, s, "fs.write", `{"path":"n","text":""}`))
	if got := mode("n"); got != 0o600 {
		t.Errorf("with the umask of the process: %o", got)
	}
	s.umask = 0o027
	must[dict](t)(call[dict](t, s, "fs.write", `{"path":"d/e/n","text":"","create_parents":true}`))
	must[dict](t)(call[dict](t, s, "fs.apply_patch", `{"patch":"*** Begin Patch\n*** Add File: p/q\n+x\n*** End Patch"}`))
	for name, want := range map[string]os.FileMode{"d": 0o750, "d/e": 0o750, "d/e/n": 0o640, "p": 0o750, "p/q": 0o640} {
		if got := mode(name); got != want {
			t.Errorf("%s: %o, want %o", name, got, want)
		}
	}
}

func TestHardLinks(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/a", "one\n")
	must[any](t)(nil, os.Link(dir+"/a", dir+"/b"))
	_, err := call[dict](t, s, "fs.apply_patch", `{"patch":"*** Begin Patch\n*** Update File: a\n@@\n-one\n+two\n*** Delete File: b\n*** End Patch"}`)
	refused(t, err, rpc.CodeInvalidRequest, "hard links")
	r := must[WriteResult](t)(call[WriteResult](t, s, "fs.write", `{"path":"a","text":"two\n","overwrite":true}`))
	if len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "2 hard links") {
		t.Error(r.Warnings)
	}
	if get(t, dir+"/b") != "one\n" {
		t.Error("the other name changed")
	}
}

func TestPatchExample(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/src/app.py", "import x\ntimeout = 10\nrun()\n")
	rev := sha("import x\ntimeout = 10\nrun()\n")
	call1 := `{"path":"src/app.py","edits":[{"old":"timeout = 10","new":"timeout = 30"}],"expected_hash":"` + rev + `","dry_run":`
	r := must[dict](t)(call[dict](t, s, "fs.patch", call1+`true}`))
	diff := "--- a/src/app.py\n+++ b/src/app.py\n@@ -1,3 +1,3 @@\n import x\n-timeout = 10\n+timeout = 30\n run()\n"
	next := sha("import x\ntimeout = 30\nrun()\n")
	for k, v := range (dict{"path": "src/app.py", "old_revision": rev, "new_revision": next, "revision": rev, "dry_run": true, "diff": diff, "diff_truncated": false, "added": 1.0, "removed": 1.0}) {
		if r[k] != v {
			t.Errorf("%s: %q, want %q", k, r[k], v)
		}
	}
	if sha(get(t, dir+"/src/app.py")) != rev {
		t.Fatal("dry_run changed the file")
	}
	r = must[dict](t)(call[dict](t, s, "fs.patch", call1+`false}`))
	if r["revision"] != next || sha(get(t, dir+"/src/app.py")) != next {
		t.Error(r)
	}
	_, err := call[dict](t, s, "fs.patch", call1+`false}`)
	refused(t, err, rpc.CodeConflict, "has changed")
}

func TestPatchEdits(t *testing.T) {
	s, dir := newService(t)
	for _, c := range []struct {
		name, text, edits, want, code string
		say                           []string
	}{
		{"in order", "a b", `[{"old":"a","new":"b c"},{"old":"c b","new":"x"}]`, "b x", "", nil},
		{"all", "a a a", `[{"old":"a","new":"bb","count":"all"}]`, "bb bb bb", "", nil},
		{"first two", "a a a", `[{"old":"a","new":"b","count":2}]`, "b b a", "", nil},
		{"one of several", "a a", `[{"old":"a","new":"b","count":1}]`, "b a", "", nil},
		{"delete", "ab\n", `[{"old":"b\n","new":""}]`, "a", "", nil},
		{"multi-byte", "é漢é", `[{"old":"漢","new":"💥"}]`, "é💥é", "", nil},
		{"missing", "abc", `[{"old":"b","new":"x"},{"old":"q","new":"x"}]`, "", CodeNoMatch, []string{"edit 2", "nothing was changed"}},
		{"ambiguous", "x\na\na\n", `[{"old":"a","new":"b"}]`, "", CodeAmbiguous, []string{"lines 2, 3", `count="all"`}},
		{"overlapping", "aaa", `[{"old":"aa","new":"b"}]`, "", CodeAmbiguous, nil},
		{"too few", "a a", `[{"old":"a","new":"b","count":3}]`, "", CodeNoMatch, []string{"2 times, not 3"}},
		{"white space", "if x:\n\treturn 1\n", `[{"old":"    return 1","new":"b"}]`, "", CodeNoMatch, []string{"line 2", "white space"}},
		{"empty old", "a", `[{"old":"","new":"b"}]`, "", rpc.CodeInvalidRequest, nil},
		{"no edits", "a", `[]`, "", rpc.CodeInvalidRequest, nil},
		{"count 0", "a", `[{"old":"a","new":"b","count":0}]`, "", rpc.CodeInvalidRequest, []string{"count"}},
		{"count true", "a", `[{"old":"a","new":"b","count":true}]`, "", rpc.CodeInvalidRequest, []string{"count"}},
		{"misspelt", "a", `[{"old":"a","mew":"b"}]`, "", rpc.CodeInvalidRequest, []string{"mew"}},
		{"lone surrogate", "a", `[{"old":"a","new":"\udc80"}]`, "", CodeEncoding, nil},
		{"CRLF stays", "a\r\nb\r\nc\r\n", `[{"old":"a\nb","new":"x\ny\nz"}]`, "x\r\ny\r\nz\r\nc\r\n", "", nil},
		{"CRLF named", "a\r\nb\r\n", `[{"old":"a\r\nb","new":"x\r\ny"}]`, "x\r\ny\r\n", "", nil},
		{"mixed line ends are exact", "a\r\nb\nc\n", `[{"old":"b\nc","new":"x\ny"}]`, "a\r\nx\ny\n", "", nil},
		{"mark stays", "\uFEFFa\nb\n", `[{"old":"a\n","new":"x\n"}]`, "\uFEFFx\nb\n", "", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			put(t, dir+"/f", c.text)
			_, err := call[dict](t, s, "fs.patch", `{"path":"f","edits":`+c.edits+`}`)
			if c.code != "" {
				refused(t, err, c.code, c.say...)
				c.want = c.text
			} else if err != nil {
				t.Fatal(err)
			}
			if got := get(t, dir+"/f"); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
	_, err := call[dict](t, s, "fs.patch", `{"path":"none","edits":[{"old":"a","new":"b"}]}`)
	refused(t, err, rpc.CodeNotFound)
	put(t, dir+"/l", "caf\xe9")
	_, err = call[dict](t, s, "fs.patch", `{"path":"l","edits":[{"old":"a","new":"b"}]}`)
	refused(t, err, CodeEncoding, "encoding=")
	must[dict](t)(call[dict](t, s, "fs.patch", `{"path":"l","edits":[{"old":"é","new":"è"}],"encoding":"latin-1"}`))
	if get(t, dir+"/l") != "caf\xe8" {
		t.Errorf("%q", get(t, dir+"/l"))
	}
	for _, order := range []string{"\xff\xfea\x00b\x00", "\xfe\xff\x00a\x00b"} {
		put(t, dir+"/u", order)
		must[dict](t)(call[dict](t, s, "fs.patch", `{"path":"u","edits":[{"old":"b","new":"b"}],"encoding":"utf-16"}`))
		if get(t, dir+"/u") != order {
			t.Errorf("%q, was %q", get(t, dir+"/u"), order)
		}
	}
}

func TestDiffIsBounded(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/f", strings.Repeat("old line with é\n", 10_000))
	r := must[PatchResult](t)(call[PatchResult](t, s, "fs.patch", `{"path":"f","edits":[{"old":"old","new":"new","count":"all"}],"dry_run":true}`))
	if len(r.Diff) > 32768 || !r.DiffTruncated || !strings.HasSuffix(r.Diff, "\n") || r.Added != 10_000 || r.Removed != 10_000 {
		t.Errorf("%d bytes, %v, +%d -%d", len(r.Diff), r.DiffTruncated, r.Added, r.Removed)
	}
	r = must[PatchResult](t)(call[PatchResult](t, s, "fs.patch", `{"path":"f","edits":[{"old":"old","new":"new","count":"all"}],"dry_run":true,"max_diff_bytes":0}`))
	if r.Diff != "" || !r.DiffTruncated {
		t.Error(r.Diff)
	}
	for _, n := range []string{"-1", "4194305"} {
		_, err := call[dict](t, s, "fs.patch", `{"path":"f","edits":[{"old":"old","new":"new","count":"all"}],"max_diff_bytes":`+n+`}`)
		refused(t, err, rpc.CodeInvalidRequest, "max_diff_bytes")
	}
}

func TestDiffOfAPatchIsBounded(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/f", strings.Repeat("old line with é\n", 10_000))
	put(t, dir+"/g", strings.Repeat("old line with é\n", 10_000))
	patch, _ := json.Marshal("*** Begin Patch\n*** Delete File: f\n*** Delete File: g\n*** End Patch\n")
	for params, limit := range map[string]int{`{"dry_run":true,"patch":` + string(patch) + `}`: 32768, `{"dry_run":true,"max_diff_bytes":1000,"patch":` + string(patch) + `}`: 1000} {
		r := must[dict](t)(call[dict](t, s, "fs.apply_patch", params))
		diff, _ := r["diff"].(string)
		if len(diff) > limit || len(diff) < limit-100 || r["diff_truncated"] != true {
			t.Errorf("%d bytes, %v", len(diff), r["diff_truncated"])
		}
	}
}

// Whatever the limit, a cut diff is the beginning of the whole one, and text.
func TestBoundedDiffs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		line := rapid.Custom(func(t *rapid.T) string {
			return strings.Repeat(rapid.StringOfN(rapid.RuneFrom([]rune("aé漢💥 ")), 0, 20, -1).Draw(t, "piece"), rapid.IntRange(0, 40).Draw(t, "times"))
		})
		old := strings.Join(rapid.SliceOfN(line, 0, 20).Draw(t, "old"), "\n")
		new := strings.Join(rapid.SliceOfN(line, 0, 20).Draw(t, "new"), "\n")
		whole, _, _ := unified("f", "f", old, new)
		if rapid.Bool().Draw(t, "one line") { // as of a minified file
			whole = strings.ReplaceAll(whole, "\n", "é")
		}
		limit := rapid.IntRange(0, 5000).Draw(t, "limit")
		cut, truncated := bound(whole, limit)
		if len(cut) > limit || !strings.HasPrefix(whole, cut) || !utf8.ValidString(cut) || truncated != (len(cut) < len(whole)) {
			t.Fatalf("%d of %d bytes for a limit of %d, truncated %v", len(cut), len(whole), limit, truncated)
		}
	})
}

// Eight writers edit one file under revision checks; none of the accepted edits is lost.
func TestConcurrentPatchesLoseNothing(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/real", "start\n")
	must[any](t)(nil, os.Symlink("real", dir+"/link"))
	const writers, each = 8, 25
	var wg sync.WaitGroup
	var all sync.WaitGroup
	all.Add(writers)
	var mu sync.Mutex
	accepted, conflicts := 0, 0
	for w := range writers {
		wg.Go(func() {
			var met sync.Once
			path := ospath.Text([]string{"real", "link"}[w%2])
			for n := 0; n < each; {
				page, err := s.Read(t.Context(), ReadParams{Path: path, StartLine: 1, MaxBytes: MaxReadBytes, Encoding: "utf-8"})
				if rpc.CodeOf(err) == rpc.CodeConflict {
					continue
				}
				if err != nil {
					t.Error(err)
					met.Do(all.Done)
					return
				}
				met.Do(func() { all.Done(); all.Wait() }) // all have read the same once: some must conflict
				_, err = s.Patch(t.Context(), PatchParams{Path: path, Edits: []Edit{{Old: "start\n", New: ospath.Text(fmt.Sprintf("start\n%d.%d\n", w, n))}},
					ExpectedHash: &page.Revision, Encoding: "utf-8"})
				mu.Lock()
				switch rpc.CodeOf(err) {
				case "":
					n++
					accepted++
				case rpc.CodeConflict:
					conflicts++
				default:
					t.Error(err)
					mu.Unlock()
					return
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	lines := strings.Split(strings.TrimSuffix(get(t, dir+"/real"), "\n"), "\n")
	slices.Sort(lines)
	if len(slices.Compact(lines)) != accepted+1 || accepted != writers*each {
		t.Errorf("%d lines for %d accepted edits", len(lines), accepted)
	}
	if conflicts == 0 {
		t.Error("no writer ever met another: the test shows nothing")
	}
}

// A waiting writer gives up with its caller, and leaves the lock usable.
func TestLockIsCancelled(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/f", "x")
	tg := must[*target](t)(s.resolve("write", "f", true))
	release, err := s.locks.acquire(t.Context(), []string{tg.key})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := s.Write(ctx, WriteParams{Path: "f", Text: "y", Overwrite: true, Encoding: "utf-8"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	release()
	must[*WriteResult](t)(s.Write(t.Context(), WriteParams{Path: "f", Text: "y", Overwrite: true, Encoding: "utf-8"}))
}

// Another program changes the file after it was read and before the rename.
func TestOutsideChangeIsNoticed(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/f", "old\n")
	s.fault = func(step string) error {
		if step == "sync" {
			put(t, dir+"/f", "theirs\n")
		}
		return nil
	}
	_, err := call[dict](t, s, "fs.patch", `{"path":"f","edits":[{"old":"old","new":"new"}]}`)
	refused(t, err, rpc.CodeConflict, "another program")
	if get(t, dir+"/f") != "theirs\n" {
		t.Error("their version is lost")
	}
	s.fault = func(step string) error {
		if step == "rename" {
			put(t, dir+"/new", "theirs\n")
		}
		return nil
	}
	_, err = call[dict](t, s, "fs.write", `{"path":"new","text":"ours"}`)
	refused(t, err, rpc.CodeConflict, "somebody else")
	if get(t, dir+"/new") != "theirs\n" {
		t.Error("their version is lost")
	}
}
