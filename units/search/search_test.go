package search

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"mypr/internal/job"
	"mypr/internal/ospath"
	"mypr/internal/paging"
	"mypr/internal/rpc"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("SEARCH_TEST_FAKE"); role != "" {
		os.Exit(fake(role))
	}
	goleak.VerifyTestMain(m)
}

// fake is a program that a test puts into PATH as rg or rga.
func fake(role string) int {
	record := func(path string, n int, text string) {
		fmt.Printf(`{"type":"match","data":{"path":{"text":%q},"lines":{"text":%q},"line_number":%d,"absolute_offset":0,"submatches":[{"match":{"text":"x"},"start":0,"end":1}]}}`+"\n", path, text, n)
	}
	switch role {
	case "hang": // some results, then nothing more
		fmt.Println(`{"type":"begin","data":{"path":{"text":"./a"}}}`)
		record("./a", 1, "x one\n")
		record("./a", 2, "x two\n")
		_ = os.WriteFile(os.Getenv("PIDFILE"), []byte(strconv.Itoa(os.Getpid())), 0o600)
		_ = unix.Pause()
	case "flood":
		fmt.Println(`{"type":"begin","data":{"path":{"text":"./a"}}}`)
		for i := 1; ; i++ {
			record("./a", i, "x"+strings.Repeat("y", 1000)+"\n")
		}
	case "crash":
		fmt.Println(`{"type":"begin","data":{"path":{"text":"./a"}}}`)
		record("./a", 1, "x one\n")
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		_ = unix.Pause()
	case "replay", "record":
		return recorded(role == "record")
	}
	return 9
}

// fakePath makes a PATH in which the names are this test binary.
func fakePath(t testing.TB, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if err := os.Symlink(self, filepath.Join(dir, n)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// need fails when a program is missing: see the Makefile for what tests need.
func need(t testing.TB, name string) string {
	t.Helper()
	p, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%s is not in PATH; these tests need it (make tools installs it)", name)
	}
	return p
}

type world struct {
	*Service
	t   testing.TB
	dir string
}

func newWorld(t testing.TB, env ...string) *world {
	t.Helper()
	dir := t.TempDir()
	w := &world{t: t, dir: dir}
	w.Service = w.service(env...)
	fds := len(fdList(t))
	t.Cleanup(func() {
		if now := len(fdList(t)); now > fds {
			t.Errorf("%d descriptors before, %d after", fds, now)
		}
	})
	return w
}

func (w *world) service(env ...string) *Service {
	w.t.Helper()
	base := []string{"PATH=" + os.Getenv("PATH"), "HOME=" + w.t.TempDir()}
	s, err := New(Options{Root: w.dir, Runner: job.Exec{}, Env: append(base, env...)})
	if err != nil {
		w.t.Fatal(err)
	}
	w.dir = string(s.root)
	return s
}

func fdList(t testing.TB) []os.DirEntry {
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func (w *world) put(name, text string) {
	w.t.Helper()
	p := filepath.Join(w.dir, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
		w.t.Fatal(err)
	}
}

type dict = map[string]any

// call goes the way of a call from Python.
func (w *world) call(method, params string) (*result, error) {
	w.t.Helper()
	v, err := w.Methods()[method](w.t.Context(), json.RawMessage(params))
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(v)
	if err != nil {
		w.t.Fatal(err)
	}
	r := &result{}
	if err := json.Unmarshal(raw, &r.raw); err != nil {
		w.t.Fatal(err)
	}
	if err := json.Unmarshal(raw, r); err != nil {
		w.t.Fatal(err)
	}
	return r, nil
}

// ok is call for what must succeed, however slow the machine is: the usual 30 s are a
// matter of other tests.
func (w *world) ok(method, params string) *result {
	w.t.Helper()
	if method != "fs.search_backends" && !strings.Contains(params, `"timeout"`) {
		params = strings.Replace(strings.Replace(params, "{", `{"timeout":600,`, 1), ",}", "}", 1)
	}
	r, err := w.call(method, params)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, params, err)
	}
	return r
}

// result is a page as a client sees it.
type result struct {
	raw           dict
	Mode, Backend string
	Matches       []Match
	Files         []ospath.Text
	Counts        []CountRow
	Complete      bool
	StopReason    *string `json:"stop_reason"`
	ScanTruncated bool    `json:"scan_truncated"`
	HasMore       bool    `json:"has_more"`
	NextCursor    *string `json:"next_cursor"`
	PageCursor    *string `json:"page_cursor"`
	Warnings      []string
	MoreWarnings  int `json:"more_warnings"`
}

func (r *result) reason() string {
	if r.StopReason == nil {
		return ""
	}
	return *r.StopReason
}

func lines(ms []Match) (out []string) {
	for _, m := range ms {
		sep := ":"
		if m.Kind == kindContext {
			sep = "-"
		}
		out = append(out, fmt.Sprintf("%s%s%d%s%s", m.Path, sep, m.Line, sep, m.Text))
	}
	return out
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

func TestSearchExamples(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("src/app.py", "one\ntwo\n# TODO: first\nfour\nfive\nsix\nx = 1  # FIXME and TODO\nlast\n")
	w.put("src/app.txt", "TODO\n")
	w.put("other.py", "TODO\n")
	r := w.ok("fs.search", `{"pattern":"TODO|FIXME","paths":"src","glob":"*.py","context":2}`)
	want := []string{"src/app.py-1-one", "src/app.py-2-two", "src/app.py:3:# TODO: first", "src/app.py-4-four", "src/app.py-5-five",
		"src/app.py-6-six", "src/app.py:7:x = 1  # FIXME and TODO", "src/app.py-8-last"}
	if got := lines(r.Matches); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if !r.Complete || r.HasMore || r.NextCursor != nil || r.Mode != "matches" || r.Backend != "rg" || r.reason() != "" {
		t.Errorf("%v", r.raw)
	}
	m := r.raw["matches"].([]any)[6].(dict)
	wantRow := `{"column":10,"end":50,"kind":"match","line":7,"path":"src/app.py","spans":[{"column":10,"end":50,"start":45},{"column":20,"end":59,"start":55}],"start":45,"text":"x = 1  # FIXME and TODO"}`
	if got, _ := json.Marshal(m); string(got) != wantRow {
		t.Errorf("%s\nwant %s", got, wantRow)
	}
	r = w.ok("fs.search", `{"glob":"*.py"}`)
	if r.Mode != "files" || fmt.Sprint(r.Files) != "[other.py src/app.py]" {
		t.Errorf("%v", r.raw)
	}
}

func TestSearchOptions(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("a.txt", "foo.bar\nfooXbar\nFOO.bar\nfood\nfoo\nend\n")
	w.put("sub/b.txt", "multi\nline\n")
	w.put(".hidden", "foo\n")
	w.put("ignored.txt", "foo\n")
	w.put(".ignore", "ignored.txt\n")
	for params, want := range map[string]string{
		`{"pattern":"foo.bar"}`:                                        "a.txt:1 a.txt:2",
		`{"pattern":"foo.bar","fixed":true}`:                           "a.txt:1",
		`{"pattern":"foo.bar","fixed":true,"ignore_case":true}`:        "a.txt:1 a.txt:3",
		`{"pattern":"foo","word":true}`:                                "a.txt:1 a.txt:5",
		`{"pattern":"foo","line":true}`:                                "a.txt:5",
		`{"pattern":["food","end"]}`:                                   "a.txt:4 a.txt:6",
		`{"pattern":"^foo$","hidden":true}`:                            ".hidden:1 a.txt:5",
		`{"pattern":"^foo$","no_ignore":true}`:                         "a.txt:5 ignored.txt:1",
		`{"pattern":"^foo$","paths":["ignored.txt","a.txt"]}`:          "a.txt:5 ignored.txt:1",
		`{"pattern":"multi\\nline","multiline":true}`:                  "sub/b.txt:1",
		`{"pattern":"multi.line","multiline":true}`:                    "",
		`{"pattern":"multi.line","multiline":true,"dotall":true}`:      "sub/b.txt:1",
		`{"pattern":"foo","glob":["*.txt","!a.*"],"no_ignore":true}`:   "ignored.txt:1",
		`{"pattern":"food","before":1}`:                                "a.txt-3 a.txt:4",
		`{"pattern":"food","after":1}`:                                 "a.txt:4 a.txt-5",
		`{"pattern":"food","context":1,"before":0}`:                    "a.txt:4 a.txt-5",
		`{"pattern":"nowhere"}`:                                        "",
		`{"pattern":"(?<=foo)d","regex_engine":"pcre2"}`:               "a.txt:4",
		`{"pattern":"(?<=foo)d","regex_engine":"auto"}`:                "a.txt:4",
		`{"pattern":"-x|food"}`:                                        "a.txt:4",
		`{"pattern":"food","regex_engine":"default","mode":"matches"}`: "a.txt:4",
	} {
		r := w.ok("fs.search", params)
		var got []string
		for _, m := range r.Matches {
			sep := map[string]string{"match": ":", "context": "-"}[m.Kind]
			got = append(got, fmt.Sprintf("%s%s%d", m.Path, sep, m.Line))
		}
		if strings.Join(got, " ") != want || !r.Complete {
			t.Errorf("%s: %v (complete %v %v), want %s", params, got, r.Complete, r.Warnings, want)
		}
	}
}

func TestSearchModes(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("a", "x\nx x\ny\n")
	w.put("b/c", "x\n")
	w.put("d", "y\n")
	if r := w.ok("fs.search", `{"pattern":"x","mode":"files"}`); fmt.Sprint(r.Files) != "[a b/c]" {
		t.Error(r.raw)
	}
	if r := w.ok("fs.search", `{"pattern":"x","mode":"counts"}`); fmt.Sprint(r.raw["counts"]) != "[map[count:2 path:a] map[count:1 path:b/c]]" {
		t.Error(r.raw)
	}
	for params, want := range map[string]any{
		`{"pattern":"x","mode":"exists"}`:             true,
		`{"pattern":"q","mode":"exists"}`:             false,
		`{"mode":"exists","glob":"c"}`:                true,
		`{"mode":"exists","glob":"zz"}`:               false,
		`{"pattern":"x","mode":"exists","paths":"d"}`: false,
	} {
		r := w.ok("fs.search", params)
		if got, there := r.raw["exists"]; got != want || !there || !r.Complete {
			t.Errorf("%s: %v", params, r.raw)
		}
	}
	if r := w.ok("fs.search", `{"pattern":"x"}`); r.raw["exists"] != nil || r.raw["files"] != nil {
		t.Error(r.raw)
	}
}

func TestSearchRefuses(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("a", "x\n")
	if err := syscall.Mkfifo(w.dir+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("loop", w.dir+"/loop"); err != nil {
		t.Fatal(err)
	}
	for params, say := range map[string]string{
		`{"pattern":"a("}`:                      "unclosed group",
		`{"pattern":"a\u0000b"}`:                "search binary files with",
		`{"pattern":"a","paths":"a\u0000b"}`:    "no file has such a name",
		`{"glob":"a\u0000b"}`:                   "no file has such a name",
		`{"pattern":"a(","mode":"counts"}`:      "nothing was searched",
		`{"pattern":"(?<=a)b"}`:                 `regex_engine="pcre2"`,
		`{"pattern":"a\nb"}`:                    "multiline=True",
		`{"pattern":"x","glob":"a["}`:           "nothing was searched",
		`{"glob":"{a"}`:                         "nothing was searched",
		`{"pattern":"x","regex_engine":"perl"}`: "regex_engine",
		`{"pattern":"x","mode":"lines"}`:        "mode",
		`{"mode":"matches"}`:                    "needs a pattern",
		`{"pattern":[]}`:                        "empty list",
		`{"pattern":"x","paths":[]}`:            "paths is empty",
		`{"pattern":"x","dotall":true}`:         "multiline",
		`{"pattern":"x","context":-1}`:          "context",
		`{"pattern":"x","before":1001}`:         "before",
		`{"pattern":"x","timeout":0}`:           "timeout",
		`{"pattern":"x","timeout":3601}`:        "timeout",
		`{"pattern":"x","scan_bytes":1023}`:     "scan_bytes",
		`{"pattern":"x","scan_bytes":67108865}`: "scan_bytes",
		`{"pattern":"x","scan_limit":0}`:        "scan_limit",
		`{"pattern":"x","max_matches":0}`:       "max_matches",
		`{"pattern":"x","max_bytes":1023}`:      "max_bytes",
		`{"pattern":"x","paths":"fifo"}`:        "no file and no directory",
		`{"pattern":"x","paths":"loop"}`:        "symbolic links",
		`{"pattern":"x","paths":"a\u0000b"}`:    "NUL",
		`{"pattern":"x\u0000"}`:                 "NUL",
		`{"pattern":"\udc80"}`:                  "surrogate",
		`{"pattern":7}`:                         "string",
		`{"pattern":"x","colour":true}`:         "colour",
	} {
		_, err := w.call("fs.search", params)
		refused(t, err, rpc.CodeInvalidRequest, say)
	}
	_, err := w.call("fs.search", `{"pattern":"x","paths":["a","none"]}`)
	refused(t, err, rpc.CodeNotFound, "none")
	_, err = w.call("fs.search", `{"pattern":"`+strings.Repeat("x", maxArgument+1)+`"}`)
	refused(t, err, rpc.CodeTooLarge)
	if e, _ := os.ReadDir(w.dir + "/.mypr/searches"); len(e) != 0 {
		t.Errorf("refused searches left %v", e)
	}
	w.Service = w.service("PATH=" + t.TempDir())
	for _, m := range []string{`fs.search {"pattern":"x"}`, `fs.search_docs {"pattern":"x"}`, `fs.search_ast {"pattern":"x","lang":"go"}`} {
		method, params, _ := strings.Cut(m, " ")
		_, err = w.call(method, params)
		refused(t, err, CodeDependency, "install")
	}
}

// rgLines is what plain rg prints, as path, line and text.
func rgLines(t testing.TB, dir string, args ...string) []string {
	t.Helper()
	cmd := exec.Command(need(t, "rg"), append([]string{"--no-config", "--line-number", "--with-filename", "--no-heading", "--null", "--sort=path"}, args...)...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil && cmd.ProcessState.ExitCode() != 1 {
		t.Fatalf("rg %q: %v", args, err)
	}
	var all []string
	for l := range strings.Lines(string(out)) {
		path, rest, _ := strings.Cut(strings.TrimSuffix(strings.TrimSuffix(l, "\n"), "\r"), "\x00")
		all = append(all, strings.TrimPrefix(path, "./")+":"+strings.ToValidUTF8(rest, "\uFFFD"))
	}
	return all
}

// every follows the cursors.
func (w *world) every(method, params string, each func(*result)) {
	w.t.Helper()
	for {
		r := w.ok(method, params)
		each(r)
		if !r.HasMore {
			return
		}
		params = fmt.Sprintf(`{"cursor":%q,"max_matches":5000,"max_bytes":4000000}`, *r.NextCursor)
		if method == "fs.search_ast" {
			params = fmt.Sprintf(`{"cursor":%q,"max_matches":5000,"max_bytes":4000000}`, *r.NextCursor)
		}
	}
}

func goSource(t testing.TB) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatalf("go env GOROOT: %v", err)
	}
	src := filepath.Join(strings.TrimSpace(string(out)), "src")
	if real, err := filepath.EvalSymlinks(src); err == nil {
		src = real
	}
	if _, err := os.Stat(src + "/io/io.go"); err != nil {
		t.Fatalf("the source of the standard library is not there: %v", err)
	}
	return src
}

// The results on the Go standard library and on this project are those of plain rg.
func TestSameAsRG(t *testing.T) {
	w := newWorld(t)
	project, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	for _, tree := range []string{goSource(t), project} {
		for _, q := range []struct {
			params string
			args   []string
		}{
			{`"pattern":"TODO|FIXME"`, []string{"-e", "TODO|FIXME"}},
			{`"pattern":"func \\(.*\\) Read"`, []string{"-e", `func \(.*\) Read`}},
			{`"pattern":"import"`, []string{"-e", "import"}},
			{`"pattern":"é|漢|ü","glob":"*.go"`, []string{"-e", "é|漢|ü", "-g", "*.go"}},
			{`"pattern":"err != nil","glob":["*.go","!*_test.go"],"scan_bytes":67108864`, []string{"-F", "err != nil", "-g", "*.go", "-g", "!*_test.go"}},
			{`"pattern":"^$","paths":["io","bufio"]`, []string{"-e", "^$"}},
		} {
			paths := []string{tree}
			params := q.params
			if strings.Contains(params, "paths") {
				if tree == project {
					continue
				}
				paths = []string{tree + "/io", tree + "/bufio"}
				params = strings.Replace(params, `["io","bufio"]`, fmt.Sprintf(`[%q,%q]`, paths[0], paths[1]), 1)
			} else {
				params += fmt.Sprintf(`,"paths":%q`, tree)
			}
			var got []string
			w.every("fs.search", `{`+params+`,"max_bytes":4000000,"max_matches":5000}`, func(r *result) {
				if !r.Complete {
					t.Fatalf("%s: %v %v", params, r.reason(), r.Warnings)
				}
				for _, m := range r.Matches {
					got = append(got, fmt.Sprintf("%s:%d:%s", m.Path, m.Line, m.Text))
				}
			})
			want := rgLines(t, w.dir, append(q.args, paths...)...)
			slices.Sort(want)
			slices.Sort(got)
			total += len(got)
			if !slices.Equal(got, want) {
				t.Errorf("%s: %d rows, rg has %d", params, len(got), len(want))
				for i := range min(len(got), len(want)) {
					if got[i] != want[i] {
						t.Errorf("first difference: %q, rg has %q", got[i], want[i])
						break
					}
				}
			}
		}
		var files []string
		w.every("fs.search", fmt.Sprintf(`{"paths":%q,"max_bytes":4000000,"max_matches":5000}`, tree), func(r *result) {
			for _, f := range r.Files {
				files = append(files, string(f))
			}
		})
		cmd := exec.Command("rg", "--files", "--sort=path", tree)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		if want := strings.Split(strings.TrimSpace(string(out)), "\n"); !slices.Equal(files, want) { // in the same order
			t.Errorf("%d files of %s, rg has %d", len(files), tree, len(want))
		}
		counts := map[string]int64{}
		w.every("fs.search", fmt.Sprintf(`{"paths":%q,"pattern":"return","mode":"counts","max_bytes":4000000,"max_matches":5000}`, tree), func(r *result) {
			for _, c := range r.Counts {
				counts[string(c.Path)] = c.Count
			}
		})
		cmd = exec.Command("rg", "--count", "return", tree)
		if out, err = cmd.Output(); err != nil {
			t.Fatal(err)
		}
		n := 0
		for l := range strings.Lines(string(out)) {
			i := strings.LastIndexByte(l, ':')
			c, _ := strconv.ParseInt(strings.TrimSpace(l[i+1:]), 10, 64)
			if counts[l[:i]] != c {
				t.Errorf("%s: %d, rg has %d", l[:i], counts[l[:i]], c)
			}
			n++
		}
		if n != len(counts) {
			t.Errorf("%d counts, rg has %d", len(counts), n)
		}
	}
	t.Logf("%d matching lines compared", total)
}

// Offsets and columns point at the match in the file itself.
func TestOffsetsAreThoseOfTheFile(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	src := goSource(t)
	re := regexp.MustCompile(`[Rr]ead[A-Z]\w+|世`)
	rows := 0
	w.every("fs.search", fmt.Sprintf(`{"pattern":"[Rr]ead[A-Z]\\w+|世","paths":%q,"max_matches":5000,"max_bytes":4000000}`, src), func(r *result) {
		for _, m := range r.Matches {
			rows++
			data, err := os.ReadFile(string(m.Path))
			if err != nil {
				t.Fatal(err)
			}
			if got := data[*m.Start:*m.End]; !re.Match(got) {
				t.Fatalf("%s:%d: %q", m.Path, m.Line, got)
			}
			for _, sp := range m.Spans {
				if int64(bytes.Count(data[:*sp.Start], []byte("\n")))+1 != m.Line {
					t.Fatalf("%s: offset %d is not in line %d", m.Path, *sp.Start, m.Line)
				}
				if int64(bytes.LastIndexByte(data[:*sp.Start], '\n')) != *sp.Start-sp.Column {
					t.Fatalf("%s: offset %d is not column %d", m.Path, *sp.Start, sp.Column)
				}
			}
			if want := len(re.FindAllString(m.Text, -1)); want != len(m.Spans) {
				t.Fatalf("%s:%d: %d spans, want %d", m.Path, m.Line, len(m.Spans), want)
			}
		}
	})
	if rows < 1000 {
		t.Errorf("only %d rows", rows)
	}
}

func TestMultilineSpans(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("f", "zero\néx a\nb y\nend\n")
	r := w.ok("fs.search", `{"pattern":"a\\nb|y","multiline":true}`)
	m := r.Matches[0]
	if len(r.Matches) != 1 || m.Line != 2 || m.Column != 5 || *m.Start != 9 || *m.End != 12 || m.Text != "éx a\nb y" {
		t.Fatalf("%+v", m)
	}
	if sp := m.Spans[1]; sp.Line != 3 || sp.Column != 3 || *sp.Start != 13 {
		t.Errorf("%+v", sp)
	}
}

func TestNamesAndTextThatAreNotUTF8(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("d\xff/n\xe9\nx", "caf\xe9 needle \xff\n")
	v, err := w.Methods()["fs.search"](t.Context(), json.RawMessage(`{"pattern":"needle"}`))
	if err != nil {
		t.Fatal(err)
	}
	m := v.(*Page).Matches[0]
	if m.Path != "d\xff/n\xe9\nx" || m.Text != "caf\uFFFD needle \uFFFD" || !m.TextLossy || m.Column != 6 || *m.Start != 5 {
		t.Fatalf("%+v", m)
	}
	name, _ := json.Marshal(m.Path)
	for _, mode := range []string{"files", "counts", "matches"} {
		r := w.ok("fs.search", `{"pattern":"needle","mode":"`+mode+`","paths":[`+string(name)+`]}`)
		if len(r.Files)+len(r.Counts)+len(r.Matches) != 1 {
			t.Errorf("%s: %v", mode, r.raw)
		}
	}
	r := w.ok("fs.search", `{}`)
	if len(r.Files) != 1 || r.Files[0] != m.Path {
		t.Errorf("%q", r.Files)
	}
	if r := w.ok("fs.search", `{"pattern":"(?-u:\\xff)"}`); len(r.Matches) != 1 {
		t.Error(r.raw)
	}
}

// Whatever the budgets, following the cursors gives every row once, no page is larger
// than its budget, and a page can be read again.
func TestPagesGiveBackTheWhole(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	for i := range 12 {
		var b strings.Builder
		for l := range 12 {
			fmt.Fprintf(&b, "%s needle é漢💥 %d %s\n", strings.Repeat("é", i*l*5), l, strings.Repeat("needle ", l%9))
		}
		w.put(fmt.Sprintf("dir%d/é%d.txt", i%5, i), b.String())
	}
	for _, mode := range []string{"matches", "files", "counts"} {
		all := w.ok("fs.search", `{"pattern":"needle","mode":"`+mode+`","max_matches":10000,"max_bytes":16777216}`)
		if all.HasMore || !all.Complete {
			t.Fatal(all.raw)
		}
		var want []string
		for _, m := range all.Matches {
			want = append(want, fmt.Sprintf("%s:%d", m.Path, m.Line))
		}
		for _, f := range all.Files {
			want = append(want, string(f))
		}
		for _, c := range all.Counts {
			want = append(want, fmt.Sprint(c))
		}
		rapid.Check(t, func(rt *rapid.T) {
			budget := rapid.IntRange(paging.MinBytes, 20_000).Draw(rt, "max_bytes")
			most := rapid.IntRange(1, 200).Draw(rt, "max_matches")
			p := TextParams{Limits: Limits{Timeout: 30, ScanBytes: DefaultScanBytes, MaxMatches: most, MaxBytes: budget, Cursor: all.PageCursor}}
			var got []string
			for {
				page, err := w.Search(context.Background(), p)
				if err != nil {
					rt.Fatal(err)
				}
				if n, _ := paging.Size(page); n > budget {
					rt.Fatalf("a page of %d bytes for a budget of %d", n, budget)
				}
				if n := len(page.Matches) + len(page.Files) + len(page.Counts); n > most || n == 0 {
					rt.Fatalf("%d rows for %d", n, most)
				}
				for _, m := range page.Matches {
					got = append(got, fmt.Sprintf("%s:%d", m.Path, m.Line))
				}
				for _, f := range page.Files {
					got = append(got, string(f))
				}
				for _, c := range page.Counts {
					got = append(got, fmt.Sprint(c))
				}
				p.Cursor = page.PageCursor
				again, err := w.Search(context.Background(), p)
				a, _ := json.Marshal(page)
				b, _ := json.Marshal(again)
				if err != nil || !bytes.Equal(a, b) {
					rt.Fatalf("page_cursor gives another page: %v", err)
				}
				if !page.HasMore {
					break
				}
				p.Cursor = page.NextCursor
			}
			if !slices.Equal(got, want) {
				rt.Fatalf("%d rows of %d", len(got), len(want))
			}
		})
	}
}

func TestDefaults(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("many", strings.Repeat("needle\n", 1000))
	w.put("long", strings.Repeat("needle"+strings.Repeat("x", 500)+"\n", 1000))
	r := w.ok("fs.search", `{"pattern":"needle","paths":"many"}`)
	if len(r.Matches) != 100 || !r.HasMore {
		t.Errorf("%d matches", len(r.Matches))
	}
	page, err := w.Methods()["fs.search"](t.Context(), json.RawMessage(`{"pattern":"needle","paths":"long"}`))
	if err != nil {
		t.Fatal(err)
	}
	if n, _ := paging.Size(page); n > 32768 || n < 31000 {
		t.Errorf("a page of %d bytes", n)
	}
}

// The defaults of the limits, seen from the programs.
func TestDefaultLimits(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.Service = w.service("PATH=" + fakePath(t, "rg", "rga", "ast-grep"))
	spy := &spyRunner{}
	w.runner = spy
	for _, c := range []string{`fs.search {"pattern":"x"}`, `fs.search_docs {"pattern":"x"}`, `fs.search_ast {"pattern":"x","lang":"go"}`} {
		method, params, _ := strings.Cut(c, " ")
		start := time.Now()
		_, err := w.call(method, params)
		if err == nil {
			t.Fatal("the spy started something")
		}
		if d := spy.deadline.Sub(start); d < 30*time.Second || d > 90*time.Second {
			t.Errorf("%s: a timeout of %v", method, d)
		}
		if depth := "--rga-max-archive-recursion=5"; slices.Contains(spy.argv, depth) != (method == "fs.search_docs") {
			t.Errorf("%s: %q", method, spy.argv)
		}
	}
}

// spyRunner starts nothing.
type spyRunner struct {
	deadline time.Time
	argv     []string
}

func (r *spyRunner) Start(ctx context.Context, c job.Command) (job.Process, error) {
	r.deadline, _ = ctx.Deadline()
	r.argv = c.Argv
	return nil, errors.New("not started")
}

// The snapshot outlives the service and what happens to the files; queries and cursors
// are not mixed up.
func TestCursors(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("f", "needle 1\nneedle 2\nneedle 3\n")
	first := w.ok("fs.search", `{"pattern":"needle","max_matches":1}`)
	w.put("f", "nothing\n")
	w.Service = w.service("PATH=") // the program is not needed any more
	second := w.ok("fs.search", fmt.Sprintf(`{"cursor":%q,"max_matches":1}`, *first.NextCursor))
	third := w.ok("fs.search", fmt.Sprintf(`{"pattern":"needle","regex_engine":"default","cursor":%q}`, *second.NextCursor))
	if second.Matches[0].Text != "needle 2" || third.Matches[0].Text != "needle 3" || third.HasMore {
		t.Errorf("%v %v", second.raw, third.raw)
	}
	_, err := w.call("fs.search", fmt.Sprintf(`{"pattern":"other","cursor":%q}`, *first.NextCursor))
	refused(t, err, paging.CodeInvalidCursor, "another query", "pattern")
	_, err = w.call("fs.search_ast", fmt.Sprintf(`{"lang":"go","cursor":%q}`, *first.NextCursor))
	refused(t, err, paging.CodeInvalidCursor, "ws.fs.search")
	_, err = w.call("fs.search", `{"cursor":"nonsense"}`)
	refused(t, err, paging.CodeInvalidCursor, "not a cursor")
	if err := os.RemoveAll(w.dir + "/.mypr/searches"); err != nil {
		t.Fatal(err)
	}
	_, err = w.call("fs.search", fmt.Sprintf(`{"cursor":%q}`, *first.NextCursor))
	refused(t, err, paging.CodeInvalidCursor, "gone", "again")
}

func TestLineOf50MiB(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	big := strings.Repeat("0123456789", 5<<20)
	w.put("big", "needle first\n"+big[:20<<20]+"needle"+big[:20<<20]+"needle"+big[:10<<20]+"\nneedle last\n")
	w.put("spans", strings.Repeat("needle ", 1<<20)+"\n")
	start := time.Now()
	r := w.ok("fs.search", `{"pattern":"needle"}`)
	t.Logf("%v", time.Since(start))
	if !r.Complete || len(r.Matches) != 4 {
		t.Fatalf("%v %d", r.reason(), len(r.Matches))
	}
	m := r.Matches[1]
	if m.Path != "big" || m.Line != 2 || m.Column != 20<<20+1 || *m.Start != 13+20<<20 || !m.DetailsTruncated || len(m.Spans) != 2 || len(m.Text) == 0 {
		t.Errorf("%s:%d:%d %v spans %v text %d", m.Path, m.Line, m.Column, *m.Start, m.Spans, len(m.Text))
	}
	m = r.Matches[3]
	if m.Path != "spans" || !m.DetailsTruncated || len(m.Spans) == 0 || m.Column != 1 {
		t.Errorf("%s %v %d", m.Path, m.DetailsTruncated, len(m.Spans))
	}
	// A line that is only too long for the page is shown around its match, and whole in a larger page.
	w.put("medium", strings.Repeat("a", 30_000)+"é needle "+strings.Repeat("b", 10_000)+"\n")
	r = w.ok("fs.search", `{"pattern":"needle","paths":"medium"}`)
	m = r.Matches[0]
	if !strings.Contains(m.Text, "é needle b") || m.TextStart < 20_000 || !m.DetailsTruncated || m.Column != 30_000+4 {
		t.Errorf("text of %d bytes from %d, column %d", len(m.Text), m.TextStart, m.Column)
	}
	r = w.ok("fs.search", fmt.Sprintf(`{"cursor":%q,"max_bytes":1000000}`, *r.PageCursor))
	if m = r.Matches[0]; len(m.Text) != 40_010 || m.DetailsTruncated || m.TextStart != 0 {
		t.Errorf("text of %d bytes, truncated %v", len(m.Text), m.DetailsTruncated)
	}
}

func TestBudgetTooSmallForAPath(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	deep := strings.TrimSuffix(strings.Repeat(strings.Repeat("d", 200)+"/", 8), "/")
	w.put(deep+"/f", "needle\n")
	for _, mode := range []string{"matches", "files", "counts"} {
		_, err := w.call("fs.search", `{"pattern":"needle","mode":"`+mode+`","max_bytes":1024}`)
		refused(t, err, rpc.CodeTooLarge, "increase max_bytes")
		need := regexp.MustCompile(`at least (\d+)`).FindStringSubmatch(err.Error())
		r := w.ok("fs.search", `{"pattern":"needle","mode":"`+mode+`","max_bytes":`+need[1]+`}`)
		if len(r.Matches)+len(r.Files)+len(r.Counts) != 1 {
			t.Error(r.raw)
		}
	}
}

func TestScanLimits(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	for i := range 20 {
		w.put(fmt.Sprintf("f%02d", i), strings.Repeat("needle\n", 50))
	}
	r := w.ok("fs.search", `{"pattern":"needle","scan_limit":70}`)
	if r.Complete || r.reason() != "scan_limit" || !r.ScanTruncated {
		t.Errorf("%v", r.raw)
	}
	n := 0
	w.every("fs.search", `{"pattern":"needle","scan_limit":70}`, func(p *result) { n += len(p.Matches) })
	if n != 70 {
		t.Errorf("%d rows", n)
	}
	r = w.ok("fs.search", `{"pattern":"needle","scan_limit":1000}`) // exactly all of them
	if !r.Complete || r.ScanTruncated {
		t.Errorf("%v", r.raw)
	}
	r = w.ok("fs.search", `{"pattern":"needle","mode":"files","scan_limit":5}`)
	if r.Complete || len(r.Files) != 5 {
		t.Errorf("%v", r.raw)
	}
	r = w.ok("fs.search", `{"pattern":"needle","scan_bytes":2000}`)
	if r.Complete || r.reason() != "scan_bytes" || !r.ScanTruncated || len(r.Matches) == 0 {
		t.Errorf("%v", r.raw)
	}
}

func TestTimeoutKeepsWhatWasFound(t *testing.T) {
	w := newWorld(t)
	path := fakePath(t, "rg")
	pidfile := t.TempDir() + "/pid"
	w.Service = w.service("PATH="+path, "SEARCH_TEST_FAKE=hang", "PIDFILE="+pidfile)
	start := time.Now()
	r := w.ok("fs.search", `{"pattern":"x","timeout":6}`) // time for the program to start
	if took := time.Since(start); took < 3*time.Second {
		t.Errorf("it took %v", took)
	}
	if r.Complete || r.reason() != "timeout" || len(r.Matches) != 2 || r.ScanTruncated {
		t.Errorf("%v", r.raw)
	}
	gone(t, pidfile)
	r = w.ok("fs.search", `{"pattern":"x","timeout":0.2,"mode":"exists"}`)
	if v, there := r.raw["exists"]; v != nil || !there || r.Complete {
		t.Errorf("%v", r.raw)
	}
}

func gone(t testing.TB, pidfile string) {
	t.Helper()
	raw, err := os.ReadFile(pidfile)
	if err != nil {
		t.Fatal(err)
	}
	pid, _ := strconv.Atoi(string(raw))
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d is still there: %v", pid, err)
	}
}

func TestCancelCleansUp(t *testing.T) {
	w := newWorld(t)
	pidfile := t.TempDir() + "/pid"
	started := make(chan struct{})
	w.Service = w.service("PATH="+fakePath(t, "rg"), "SEARCH_TEST_FAKE=hang", "PIDFILE="+pidfile)
	w.runner = watched{job.Exec{}, func() { close(started) }, func() {}}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-started
		cancel()
	}()
	_, err := w.Methods()["fs.search"](ctx, json.RawMessage(`{"pattern":"x"}`))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(pidfile); err == nil { // it may have been ended before it wrote its pid
		gone(t, pidfile)
	}
	if e, _ := os.ReadDir(w.dir + "/.mypr/searches"); len(e) != 0 {
		t.Errorf("left: %v", e)
	}
}

// watched tells when processes start and end.
type watched struct {
	job.Runner
	started, ended func()
}

type watchedProcess struct {
	job.Process
	ended func()
}

func (w watched) Start(ctx context.Context, c job.Command) (job.Process, error) {
	p, err := w.Runner.Start(ctx, c)
	if err != nil {
		return nil, err
	}
	w.started()
	return watchedProcess{p, w.ended}, nil
}

func (p watchedProcess) Wait() (job.Exit, error) {
	defer p.ended()
	return p.Process.Wait()
}

func TestTwoScansAtATime(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("f", strings.Repeat("needle\n", 1000))
	var now, most atomic.Int32
	w.runner = watched{job.Exec{}, func() {
		n := now.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
	}, func() { now.Add(-1) }}
	var wg sync.WaitGroup
	for range 12 {
		wg.Go(func() {
			if _, err := w.Methods()["fs.search"](t.Context(), json.RawMessage(`{"pattern":"needle"}`)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if most.Load() != 2 {
		t.Errorf("%d scans at the same time", most.Load())
	}
}

// The default of scan_bytes is 16 MiB, of which no more is kept.
func TestFloodStopsAt16MiB(t *testing.T) {
	w := newWorld(t)
	w.Service = w.service("PATH="+fakePath(t, "rg"), "SEARCH_TEST_FAKE=flood")
	r := w.ok("fs.search", `{"pattern":"x"}`)
	if r.reason() != "scan_bytes" {
		t.Errorf("%v", r.reason())
	}
	e, err := os.ReadDir(w.dir + "/.mypr/searches")
	if err != nil || len(e) != 1 {
		t.Fatal(e, err)
	}
	if st, _ := e[0].Info(); st.Size() > 16<<20+1000 || st.Size() < 15<<20 {
		t.Errorf("a snapshot of %d bytes", st.Size())
	}
}

func TestProgramDies(t *testing.T) {
	w := newWorld(t)
	w.Service = w.service("PATH="+fakePath(t, "rg"), "SEARCH_TEST_FAKE=crash")
	r := w.ok("fs.search", `{"pattern":"x"}`)
	if r.Complete || r.reason() != "killed" || len(r.Matches) != 1 || !strings.Contains(strings.Join(r.Warnings, " "), "signal 9") {
		t.Errorf("%v", r.raw)
	}
}

// What cannot be searched makes the result partial, and says so.
func TestPartialResultSaysWhy(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("ok", "needle\n")
	w.put("secret", "needle\n")
	if err := os.Chmod(w.dir+"/secret", 0); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 { // root reads everything; nobody does not
		dir := t.TempDir()
		for d := dir; d != os.TempDir(); d = filepath.Dir(d) {
			_ = os.Chmod(d, 0o755)
		}
		script := "#!/bin/sh\nexec setpriv --reuid=65534 --regid=65534 --clear-groups " + need(t, "rg") + " \"$@\"\n"
		if err := os.WriteFile(dir+"/rg", []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		_ = os.Chmod(filepath.Dir(w.dir), 0o755)
		w.Service = w.service("PATH=" + dir + ":" + os.Getenv("PATH"))
	}
	r := w.ok("fs.search", `{"pattern":"needle"}`)
	if r.Complete || r.reason() != "errors" || len(r.Matches) != 1 || !strings.Contains(strings.Join(r.Warnings, " "), "ermission denied") {
		t.Errorf("%v", r.raw)
	}
}

func TestWarningsAreBounded(t *testing.T) {
	var b strings.Builder
	for i := range 100 {
		fmt.Fprintf(&b, "error %d %s\n", i, strings.Repeat("é", 300))
	}
	ws := warnings(b.String())
	if len(ws) != maxWarnings+1 || ws[maxWarnings] != "92 more lines of errors" {
		t.Errorf("%q", ws)
	}
	for _, w := range ws {
		if len(w) > maxWarningBytes+3 {
			t.Errorf("%d bytes", len(w))
		}
	}
}

func TestOwnDataIsLeftOut(t *testing.T) {
	need(t, "rg")
	w := newWorld(t)
	w.put("f", "needle\n")
	w.put(".mypr/skills/s/SKILL.md", "needle\n")
	w.put(".mypr/git/0123", "needle\n")
	w.put(".mypr/writes/x", "needle\n")
	w.ok("fs.search", `{"pattern":"needle"}`) // its snapshot has a needle too
	files := func(params string) string { return fmt.Sprint(w.ok("fs.search", params).Files) }
	if got := files(`{"pattern":"needle","mode":"files"}`); got != "[f]" {
		t.Error(got)
	}
	if got := files(`{"pattern":"needle","mode":"files","hidden":true,"no_ignore":true,"glob":"**"}`); got != "[.mypr/skills/s/SKILL.md f]" {
		t.Error(got)
	}
	if got := files(fmt.Sprintf(`{"pattern":"needle","mode":"files","hidden":true,"paths":%q}`, w.dir)); got != "[.mypr/skills/s/SKILL.md f]" {
		t.Error(got)
	}
	if got := files(`{"pattern":"needle","mode":"files","paths":".mypr/git"}`); got != "[.mypr/git/0123]" {
		t.Error(got)
	}
	if got := files(`{"pattern":"needle","mode":"files","paths":[".mypr/searches","f"]}`); !strings.HasPrefix(got, "[.mypr/searches/") {
		t.Error(got)
	}
}

func TestBackends(t *testing.T) {
	need(t, "rg")
	need(t, "ast-grep")
	w := newWorld(t)
	v, err := w.Methods()["fs.search_backends"](t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	b := v.(*Backends)
	if !b.RG.Available || !regexp.MustCompile(`^\d+\.\d+`).MatchString(b.RG.Version) || b.RG.PCRE2 == nil || b.RG.Path == "" {
		t.Errorf("%+v", b.RG)
	}
	if !b.AST.Available || !regexp.MustCompile(`^\d+\.\d+`).MatchString(b.AST.Version) {
		t.Errorf("%+v", b.AST)
	}
	if _, err := exec.LookPath("rga"); err == nil && (!b.RGA.Available || !slices.Contains(b.RGA.Adapters, "zip")) {
		t.Errorf("%+v", b.RGA)
	}
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/pandoc", nil, 0o755); err != nil {
		t.Fatal(err)
	}
	w.Service = w.service("PATH=" + dir)
	if v, err = w.Methods()["fs.search_backends"](t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	b = v.(*Backends)
	if b.RG.Available || b.RGA.Available || b.AST.Available || b.Converters["pandoc"] != dir+"/pandoc" || len(b.Converters) != 1 {
		t.Errorf("%+v", b)
	}
}

func TestComparePathsIsRGsOrder(t *testing.T) {
	for _, p := range [][2]string{{"a", "b"}, {"a/z", "a.txt"}, {"a", "a/b"}, {"a/b", "ab"}, {"a-b/x", "a.b"}} {
		if comparePaths(p[0], p[1]) >= 0 || comparePaths(p[1], p[0]) <= 0 {
			t.Errorf("%q", p)
		}
	}
}

func TestSweep(t *testing.T) {
	w := newWorld(t)
	w.put(".mypr/searches/"+tempCache+"123/cache.sqlite3", "x")
	w.put(".mypr/searches/0123456789abcdef.tmp", "x")
	w.put(".mypr/searches/rga-cache/cache.sqlite3", "x")
	if err := w.Sweep(); err != nil {
		t.Fatal(err)
	}
	e, _ := os.ReadDir(w.dir + "/.mypr/searches")
	if len(e) != 1 || e[0].Name() != "rga-cache" {
		t.Errorf("%v", e)
	}
}

// trim runs a whole record through a trimmer in pieces.
func trim(record string, piece int) (string, bool) {
	t := &trimmer{}
	for len(record) > 0 {
		n := min(piece, len(record))
		t.take([]byte(record[:n]))
		record = record[n:]
	}
	t.take([]byte("\n"))
	out, ok := t.record()
	return string(out), ok
}

func TestTrimmer(t *testing.T) {
	long := strings.Repeat("é", maxString)
	raw, _ := json.Marshal(dict{"a": long, "b": []dict{{"c": strings.Repeat(`\"`, maxString)}}, "z": 1})
	out, ok := trim(string(raw), 1000)
	var v struct {
		Cut bool
		A   string
		B   []struct{ C string }
		Z   int
	}
	if err := json.Unmarshal([]byte(out), &v); err != nil || !ok {
		t.Fatal(err)
	}
	if !v.Cut || v.Z != 1 || !strings.HasPrefix(long, v.A) || len(v.A) < maxString || len(v.A) > maxString+4 || len(v.B) != 1 {
		t.Errorf("%v %d", v.Cut, len(v.A))
	}
	items := make([]dict, 100_000)
	for i := range items {
		items[i] = dict{"n": i}
	}
	raw, _ = json.Marshal(dict{"a": items, "z": 1})
	out, ok = trim(string(raw), 777)
	var w struct {
		A []struct{ N int }
		Z int
	}
	if err := json.Unmarshal([]byte(out), &w); err != nil || !ok || w.Z != 1 || len(w.A) < 1000 || len(w.A) == len(items) || len(out) > maxRecord+1000 {
		t.Errorf("%v %d of %d", err, len(w.A), len(out))
	}
	b64, _ := json.Marshal(dict{"bytes": bytes.Repeat([]byte{0xff, 1}, maxString)})
	out, _ = trim(string(b64), 5)
	var x rgText
	if err := json.Unmarshal([]byte(out), &x); err != nil || len(x.Bytes) < maxString/2 {
		t.Errorf("%v %d", err, len(x.Bytes))
	}
}

func FuzzTrimmer(f *testing.F) {
	f.Add([]byte(`{"type":"match","data":{"lines":{"text":"a\u00e9\"\\"},"submatches":[{"a":[1,2]},{}]}}`), 3)
	f.Fuzz(func(t *testing.T, record []byte, piece int) {
		record = bytes.ReplaceAll(record, []byte("\n"), nil)
		out, ok := trim(string(record), max(1, piece&0xff))
		if json.Valid(record) && len(record) > 2 && record[0] == '{' && len(record) < maxString {
			if !ok || out != cutPrefix+string(record[1:]) {
				t.Fatalf("%q became %q", record, out)
			}
		}
	})
}

func FuzzRows(f *testing.F) {
	f.Add([]byte(`{"type":"match","data":{"path":{"text":"a"},"lines":{"bytes":"/w=="},"line_number":1,"absolute_offset":5,"submatches":[{"start":9,"end":0},{"start":-1,"end":3}]}}`))
	f.Add([]byte(`{"text":"x","range":{"byteOffset":{"start":-9,"end":1},"start":{"line":-1,"column":99},"end":{}},"file":"f","lines":"x","metaVariables":{"single":{"A":{}}}}`))
	dir := f.TempDir()
	s, err := New(Options{Root: dir, Runner: job.Exec{}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, row []byte) {
		for _, backend := range []string{backendText, backendDocs, backendAST} {
			src, err := s.parse(backend, row)
			if err != nil {
				continue
			}
			for level := range shapes {
				m := src.shape(level, 1024)
				if _, err := json.Marshal(m); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}
