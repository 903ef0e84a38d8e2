package search

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"mypr/internal/paging"
	"mypr/internal/rpc"
)

const pySource = "def fé(a, b):\n    x = \"💥é\"; foo(a, b)\n    return foo(1)\n\nclass A:\n    def m(self):\n        foo(\n            \"é\",\n            2)\n"

func TestASTMatches(t *testing.T) {
	need(t, "ast-grep")
	w := newWorld(t)
	w.put("src/a.py", pySource)
	w.put("src/b.txt", "foo(1)\n")
	r := w.ok("fs.search_ast", `{"pattern":"foo($$$ARGS)","lang":"python","paths":"src"}`)
	if r.Backend != "ast" || r.Mode != "matches" || !r.Complete || len(r.Matches) != 3 {
		t.Fatalf("%v", r.raw)
	}
	for i, want := range []string{"foo(a, b)", "foo(1)", "foo(\n            \"é\",\n            2)"} {
		m := r.Matches[i]
		if m.Text != want || m.Path != "src/a.py" || m.Language != "Python" || m.Kind != "match" || pySource[*m.Start:*m.End] != want {
			t.Errorf("%+v", m)
		}
		checkRange(t, pySource, *m.Range, want)
		if m.Line != m.Range.Start.Line || m.Column != m.Range.Start.Column {
			t.Errorf("%+v", m)
		}
		for _, c := range m.Captures["ARGS"] {
			checkRange(t, pySource, c.Range, c.Text)
		}
	}
	if c := r.Matches[0].Captures["ARGS"]; len(c) != 3 || c[0].Text != "a" || c[2].Text != "b" {
		t.Errorf("%+v", c)
	}
	r = w.ok("fs.search_ast", `{"pattern":"foo($X)","lang":"python"}`)
	if len(r.Matches) != 1 || r.Matches[0].Captures["X"][0].Text != "1" {
		t.Errorf("%v", r.raw)
	}
}

// checkRange compares a range with the text at its offsets, lines and columns.
func checkRange(t *testing.T, source string, r Range, want string) {
	t.Helper()
	if got := source[r.Start.Offset:r.End.Offset]; got != want {
		t.Errorf("offsets %d-%d: %q, want %q", r.Start.Offset, r.End.Offset, got, want)
	}
	for _, p := range []Position{r.Start, r.End} {
		head := source[:p.Offset]
		line := int64(strings.Count(head, "\n")) + 1
		column := p.Offset - int64(strings.LastIndexByte(head, '\n'))
		if p.Line != line || p.Column != column {
			t.Errorf("offset %d is line %d column %d, not %d, %d", p.Offset, line, column, p.Line, p.Column)
		}
	}
}

func TestASTRules(t *testing.T) {
	need(t, "ast-grep")
	w := newWorld(t)
	w.put("a.py", pySource)
	for params, want := range map[string]string{
		`{"lang":"python","rule":{"pattern":"foo($$$A)","inside":{"kind":"class_definition","stopBy":"end"}}}`:                         "7",
		`{"lang":"python","rule":{"kind":"function_definition","has":{"pattern":"foo(1)","stopBy":"end"}}}`:                            "1",
		`{"lang":"python","rule":{"kind":"return_statement","follows":{"kind":"expression_statement"}}}`:                               "3",
		`{"lang":"python","rule":{"kind":"expression_statement","precedes":{"kind":"return_statement"},"has":{"pattern":"foo($$$)"}}}`: "2",
		`{"lang":"python","pattern":"foo($X)","constraints":{"X":{"regex":"^2"}}}`:                                                     "",
		`{"lang":"python","pattern":"foo($X)","constraints":{"X":{"regex":"^1"}}}`:                                                     "3",
		`{"lang":"python","rule":{"matches":"call"},"utils":{"call":{"pattern":"foo($X)"}}}`:                                           "3",
	} {
		r := w.ok("fs.search_ast", params)
		var got []string
		for _, m := range r.Matches {
			got = append(got, fmt.Sprint(m.Line))
		}
		if strings.Join(got, " ") != want || !r.Complete {
			t.Errorf("%s: lines %v, want %s (%v)", params, got, want, r.Warnings)
		}
	}
}

func TestASTModes(t *testing.T) {
	need(t, "ast-grep")
	w := newWorld(t)
	w.put("a.py", pySource)
	w.put("sub/b.py", "foo(3)\n")
	w.put("c.py", "bar(3)\n")
	if r := w.ok("fs.search_ast", `{"pattern":"foo($$$)","lang":"python","mode":"counts"}`); fmt.Sprint(r.raw["counts"]) != "[map[count:3 path:a.py] map[count:1 path:sub/b.py]]" {
		t.Error(r.raw)
	}
	if r := w.ok("fs.search_ast", `{"pattern":"foo($$$)","lang":"python","mode":"files"}`); fmt.Sprint(r.Files) != "[a.py sub/b.py]" {
		t.Error(r.raw)
	}
	for params, want := range map[string]any{
		`{"pattern":"foo($$$)","lang":"python","mode":"exists"}`:               true,
		`{"pattern":"quux($$$)","lang":"python","mode":"exists"}`:              false,
		`{"pattern":"foo($$$)","lang":"python","mode":"exists","glob":"c.*"}`:  false,
		`{"pattern":"foo($$$)","lang":"python","mode":"exists","paths":"sub"}`: true,
	} {
		if r := w.ok("fs.search_ast", params); r.raw["exists"] != want || !r.Complete || r.reason() != "" {
			t.Errorf("%s: %v", params, r.raw)
		}
	}
	r := w.ok("fs.search_ast", `{"pattern":"foo($$$)","lang":"python","max_matches":3}`)
	if len(r.Matches) != 3 || !r.HasMore {
		t.Error(r.raw)
	}
	r = w.ok("fs.search_ast", fmt.Sprintf(`{"lang":"python","cursor":%q}`, *r.NextCursor))
	if len(r.Matches) != 1 || r.Matches[0].Path != "sub/b.py" || r.HasMore {
		t.Error(r.raw)
	}
	r = w.ok("fs.search_ast", `{"pattern":"foo($$$)","lang":"python","scan_limit":2}`)
	if len(r.Matches) != 2 || r.Complete || r.reason() != "scan_limit" {
		t.Error(r.raw)
	}
}

func TestASTRefuses(t *testing.T) {
	need(t, "ast-grep")
	w := newWorld(t)
	w.put("a.py", pySource)
	for params, say := range map[string]string{
		`{"pattern":"x"}`:   "lang",
		`{"lang":"python"}`: "either pattern or rule",
		`{"lang":"python","pattern":"x","rule":{"kind":"call"}}`: "either pattern or rule, not both",
		`{"lang":"python","pattern":""}`:                         "empty",
		`{"lang":"python","rule":[]}`:                            "rule must be a dict",
		`{"lang":"python","rule":{"bogus":1}}`:                   "bogus",
		`{"lang":"python","rule":{"kind":"no_such_kind"}}`:       "no_such_kind",
		`{"lang":"python","rule":{"pattern":"x","fix":"y"}}`:     "fix",
		`{"lang":"klingon","pattern":"x"}`:                       "klingon",
		`{"lang":"python","pattern":"x","mode":"all"}`:           "mode",
		`{"lang":"python","pattern":"x","constraints":"X"}`:      "constraints must be a dict",
	} {
		_, err := w.call("fs.search_ast", params)
		refused(t, err, rpc.CodeInvalidRequest, say)
	}
	_, err := w.call("fs.search_ast", `{"lang":"python","rule":{"pattern":"`+strings.Repeat("x", maxArgument)+`"}}`)
	refused(t, err, rpc.CodeTooLarge)
	if got, _ := os.ReadFile(w.dir + "/a.py"); string(got) != pySource {
		t.Error("the file was changed")
	}
}

// Rules of the workspace neither run nor break a search, and nothing is rewritten.
func TestASTIgnoresTheProject(t *testing.T) {
	need(t, "ast-grep")
	w := newWorld(t)
	w.put("a.py", pySource)
	w.put("sgconfig.yml", "ruleDirs: [rules\n")
	w.put("rules/r.yml", "id: r\nlanguage: python\nrule: {pattern: foo($$$A)}\nfix: bar()\n")
	if r := w.ok("fs.search_ast", `{"pattern":"foo(1)","lang":"python"}`); len(r.Matches) != 1 {
		t.Error(r.raw)
	}
	w.put("sgconfig.yml", "ruleDirs: [rules]\ncustomLanguages:\n  python:\n    libraryPath: ./evil.so\n    extensions: [py]\n")
	if r := w.ok("fs.search_ast", `{"pattern":"foo(1)","lang":"python"}`); len(r.Matches) != 1 {
		t.Error(r.raw)
	}
	if got, _ := os.ReadFile(w.dir + "/a.py"); string(got) != pySource {
		t.Error("the file was changed")
	}
}

// The results on a part of the Go standard library are those of plain ast-grep.
func TestSameAsASTGrep(t *testing.T) {
	need(t, "ast-grep")
	w := newWorld(t)
	tree := goSource(t) + "/net"
	cmd := exec.Command("ast-grep", "run", "--lang=go", "--pattern=if err != nil { $$$BODY }", "--json=stream", tree)
	cmd.Dir = w.dir
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for l := range strings.Lines(string(out)) {
		var r struct {
			File  string
			Text  string
			Range astRange
		}
		if err := json.Unmarshal([]byte(l), &r); err != nil {
			t.Fatal(err)
		}
		want = append(want, fmt.Sprintf("%s %d-%d %s", r.File, r.Range.Bytes.Start, r.Range.Bytes.End, r.Text))
	}
	last := ""
	w.every("fs.search_ast", fmt.Sprintf(`{"pattern":"if err != nil { $$$BODY }","lang":"go","paths":%q,"max_bytes":4000000,"max_matches":5000}`, tree), func(r *result) {
		for _, m := range r.Matches {
			got = append(got, fmt.Sprintf("%s %d-%d %s", m.Path, *m.Start, *m.End, m.Text))
			if comparePaths(last, string(m.Path)) > 0 {
				t.Errorf("%s comes after %s", m.Path, last)
			}
			last = string(m.Path)
			data, err := os.ReadFile(string(m.Path))
			if err != nil {
				t.Fatal(err)
			}
			checkRange(t, string(data), *m.Range, m.Text)
		}
	})
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) || len(got) < 300 {
		t.Errorf("%d nodes, ast-grep has %d", len(got), len(want))
	}
	t.Logf("%d nodes compared", len(got))
}

func TestASTLargeMatch(t *testing.T) {
	need(t, "ast-grep")
	w := newWorld(t)
	args := strings.Repeat("1234567890, ", 4_000)
	w.put("a.py", "x = 1\nfoo("+args+"1)\n")
	r := w.ok("fs.search_ast", `{"pattern":"foo($$$ARGS)","lang":"python"}`)
	if len(r.Matches) != 1 || !r.Complete {
		t.Fatalf("%v %v", r.reason(), r.Warnings)
	}
	m := r.Matches[0]
	if !m.DetailsTruncated || m.Line != 2 || m.Column != 1 || m.Path != "a.py" || !strings.HasPrefix(m.Text, "foo(123") {
		t.Errorf("%s:%d:%d %v", m.Path, m.Line, m.Column, m.DetailsTruncated)
	}
	bigger := w.ok("fs.search_ast", fmt.Sprintf(`{"lang":"python","cursor":%q,"max_bytes":1000000}`, *r.PageCursor))
	if n := len(bigger.Matches[0].Text); n <= len(m.Text) {
		t.Errorf("a larger page has %d bytes of text, the smaller one %d", n, len(m.Text))
	}
}

func TestASTNamesThatAreNotUTF8(t *testing.T) {
	need(t, "ast-grep")
	w := newWorld(t)
	w.put("d\xff/a.py", "foo(1)\n")
	r := w.ok("fs.search_ast", `{"pattern":"foo(1)","lang":"python"}`)
	if len(r.Matches) != 1 || r.Matches[0].Path != "d\uFFFD/a.py" || !r.Matches[0].PathLossy {
		t.Errorf("%v", r.raw)
	}
}

func TestASTDefaults(t *testing.T) {
	need(t, "ast-grep")
	w := newWorld(t)
	w.put("many.py", strings.Repeat("foo(1)\n", 150))
	w.put("long.py", strings.Repeat("foo("+strings.Repeat("x", 500)+")\n", 150))
	if r := w.ok("fs.search_ast", `{"pattern":"foo($A)","lang":"python","paths":"many.py","max_bytes":1000000}`); len(r.Matches) != 100 || !r.HasMore {
		t.Errorf("%d matches", len(r.Matches))
	}
	page, err := w.Methods()["fs.search_ast"](t.Context(), json.RawMessage(`{"pattern":"foo($A)","lang":"python","paths":"long.py"}`))
	if err != nil {
		t.Fatal(err)
	}
	if n, _ := paging.Size(page); n > 32768 || n < 30000 {
		t.Errorf("a page of %d bytes", n)
	}
}
