package search

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

// ASTQuery is what fs.search_ast looks for: a pattern or a rule of ast-grep.
type ASTQuery struct {
	Pattern     *ospath.Text    `json:"pattern,omitempty"`
	Lang        string          `json:"lang,omitempty"`
	Rule        json.RawMessage `json:"rule,omitempty"`
	Constraints json.RawMessage `json:"constraints,omitempty"`
	Utils       json.RawMessage `json:"utils,omitempty"`
	Paths       ospath.List     `json:"paths,omitempty"`
	Glob        ospath.List     `json:"glob,omitempty"`
	Mode        string          `json:"mode,omitempty"`
}

// ASTParams of fs.search_ast.
type ASTParams struct {
	ASTQuery
	Limits
}

// SearchAST runs ast-grep, or reads a page of an earlier search. It never rewrites:
// the command line has no rewrite, and rules are taken apart, so a "fix" cannot come in.
func (s *Service) SearchAST(ctx context.Context, p ASTParams) (*Page, error) {
	if err := p.checkLimits(); err != nil {
		return nil, err
	}
	q := &p.ASTQuery
	for _, f := range []*json.RawMessage{&q.Rule, &q.Constraints, &q.Utils} {
		if string(*f) == "null" {
			*f = nil
		}
	}
	if p.Cursor != nil {
		return s.resume("fs.search_ast", q, &p.Limits)
	}
	if q.Mode == "" {
		q.Mode = modeMatches
	}
	mode := q.Mode
	if err := checkMode(mode); err != nil {
		return nil, err
	}
	rule, err := q.inlineRule()
	if err != nil {
		return nil, err
	}
	for what, list := range map[string]ospath.List{"paths": q.Paths, "glob": q.Glob} {
		if err := checkStrings(what, list); err != nil {
			return nil, err
		}
	}
	tool, err := s.tool("ast-grep", "npm install @ast-grep/cli, pip install ast-grep-cli, or cargo install ast-grep")
	if err != nil {
		return nil, err
	}
	paths, err := s.paths(q.Paths)
	if err != nil {
		return nil, err
	}
	config, err := s.astConfig()
	if err != nil {
		return nil, err
	}
	argv := []string{tool, "scan", "--config=" + config, "--inline-rules=" + rule, "--json=stream", "--color=never"}
	for _, g := range append(q.Glob.Strings(), s.excludes(q.Paths)...) {
		argv = append(argv, "--globs="+g)
	}
	k := &astKeeper{s: s, mode: mode, counts: map[string]int64{}}
	sc := &scan{method: "fs.search_ast", backend: backendAST, mode: mode, query: q, env: s.env, limits: p.Limits,
		argv: append(append(argv, "--"), paths...), split: splitLines, keep: k.keep, finish: k.finish, first: mode == modeExists,
		failed: func(code int, _ string) bool { return code != 0 && code != 1 }}
	sc.wrong = func(_ context.Context, _ int, stderr string) error {
		if !strings.Contains(stderr, "Cannot parse rule") && !strings.Contains(stderr, "invalid value") {
			return nil
		}
		e := invalid("the query is not valid; nothing was searched: %s", astMessage(stderr))
		if strings.Contains(stderr, "SgLang") {
			return invalid("ast-grep knows no language %q", q.Lang).WithHint("for example python, go, rust, typescript, tsx, javascript, java, c, cpp, bash, html, css, json, yaml")
		}
		return e.WithHint("see https://ast-grep.github.io/reference/rule.html")
	}
	return s.run(ctx, sc)
}

// inlineRule is the query as a rule of ast-grep. JSON is YAML.
func (q *ASTQuery) inlineRule() (string, error) {
	switch {
	case q.Lang == "":
		return "", invalid("search_ast needs lang").WithHint("for example lang=\"python\"")
	case (q.Pattern == nil) == (q.Rule == nil):
		return "", invalid("search_ast needs either pattern or rule, not both")
	case q.Pattern != nil && !utf8.ValidString(string(*q.Pattern)):
		return "", invalid("pattern has a lone surrogate")
	case q.Pattern != nil && *q.Pattern == "":
		return "", invalid("pattern is empty")
	}
	r := map[string]any{"id": "query", "language": q.Lang, "rule": q.Rule}
	if q.Pattern != nil {
		r["rule"] = map[string]any{"pattern": string(*q.Pattern)}
	}
	for name, v := range map[string]json.RawMessage{"rule": q.Rule, "constraints": q.Constraints, "utils": q.Utils} {
		if v == nil {
			continue
		}
		if v[0] != '{' {
			return "", invalid("%s must be a dict", name)
		}
		r[name] = v
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // YAML 1.1 readers know \u escapes too, but messages quote the rule
	if err := e.Encode(r); err != nil {
		return "", invalid("the rule cannot be read: %v", err)
	}
	if b.Len() > maxArgument {
		return "", rpc.Errorf(rpc.CodeTooLarge, "the rule has %d bytes, the limit is %d", b.Len(), maxArgument)
	}
	if bytes.IndexByte(b.Bytes(), 0) >= 0 {
		return "", invalid("the rule has a NUL byte")
	}
	return strings.TrimSuffix(b.String(), "\n"), nil
}

// astConfig is an empty project configuration: one of the workspace could name parsers
// to load and directories of rules to run.
func (s *Service) astConfig() (string, error) {
	path := filepath.Join(s.dir, "sgconfig.yml")
	const content = "ruleDirs: []\n"
	if have, err := os.ReadFile(path); err == nil && string(have) == content {
		return path, nil
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return "", s.root.Error("search", s.dir, err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		return "", s.root.Error("write", path, err)
	}
	return path, nil
}

// astMessage takes the causes out of ast-grep's report.
func astMessage(stderr string) string {
	var causes []string
	for line := range strings.Lines(stderr) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), "╰▻ "); ok {
			causes = append(causes, rest)
		}
	}
	if len(causes) == 0 {
		return strings.TrimSpace(stderr)
	}
	return causes[len(causes)-1]
}

// astKeeper keeps ast-grep's records, or counts them by file.
type astKeeper struct {
	s      *Service
	mode   string
	counts map[string]int64
}

func (k *astKeeper) keep(record []byte) ([]byte, string, bool) {
	var r struct {
		File string `json:"file"`
	}
	if json.Unmarshal(record, &r) != nil || r.File == "" {
		return nil, "", false
	}
	if k.mode == modeMatches {
		return record, r.File, true
	}
	if k.counts[r.File]++; k.counts[r.File] > 1 {
		return nil, "", false
	}
	row, _ := json.Marshal(r.File)
	return row, r.File, true
}

// finish turns the files, one each, into the rows of the mode.
func (k *astKeeper) finish(rows []byte) []byte {
	if k.mode == modeMatches {
		return rows
	}
	var out []byte
	for line := range bytes.Lines(rows) {
		var file string
		_ = json.Unmarshal(line, &file)
		path, lossy := k.s.astPath(file)
		var row []byte
		if k.mode == modeCounts {
			row, _ = json.Marshal(CountRow{Path: path, PathLossy: lossy, Count: k.counts[file]})
		} else {
			row, _ = path.MarshalJSON()
		}
		out = append(append(out, row...), '\n')
	}
	return out
}

// astPath spells a path that ast-grep printed. It puts U+FFFD where a name is not
// UTF-8, and then nobody can open it by that name.
func (s *Service) astPath(printed string) (ospath.Text, bool) {
	path := s.display(printed)
	lossy := false
	if strings.ContainsRune(printed, utf8.RuneError) {
		abs, err := s.root.Abs(string(path))
		if err == nil {
			_, err = os.Lstat(abs)
		}
		lossy = err != nil
	}
	return path, lossy
}

type astPosition struct {
	Line   int64 `json:"line"`
	Column int64 `json:"column"` // in characters
}

type astRange struct {
	Bytes struct {
		Start int64 `json:"start"`
		End   int64 `json:"end"`
	} `json:"byteOffset"`
	Start astPosition `json:"start"`
	End   astPosition `json:"end"`
}

type astCapture struct {
	Text  string   `json:"text"`
	Range astRange `json:"range"`
}

// parseAST reads a record of ast-grep.
func (s *Service) parseAST(row []byte) (*source, error) {
	var rec struct {
		Cut      bool     `json:"cut"`
		Text     string   `json:"text"`
		Range    astRange `json:"range"`
		File     string   `json:"file"`
		Lines    string   `json:"lines"`
		Language string   `json:"language"`
		Meta     struct {
			Single map[string]astCapture   `json:"single"`
			Multi  map[string][]astCapture `json:"multi"`
		} `json:"metaVariables"`
	}
	if err := json.Unmarshal(row, &rec); err != nil {
		return nil, err
	}
	r := &source{cut: rec.Cut, text: rec.Text}
	r.Kind, r.Language = kindMatch, rec.Language
	r.Path, r.PathLossy = s.astPath(rec.File)
	// Columns come in characters. The lines of the match tell where each of them begins
	// in bytes, unless the record was trimmed.
	begins := map[int64]int64{}
	if first, _, _ := strings.Cut(rec.Lines, "\n"); utf8.RuneCountInString(first) >= int(rec.Range.Start.Column) {
		at := rec.Range.Bytes.Start - prefixBytes(first, rec.Range.Start.Column)
		line := rec.Range.Start.Line
		begins[line] = at
		if !rec.Cut {
			for l := range strings.Lines(rec.Lines) {
				at += int64(len(l))
				line++
				begins[line] = at
			}
		}
	}
	position := func(p astPosition, offset int64) Position {
		out := Position{Line: p.Line + 1, Offset: offset}
		if at, ok := begins[p.Line]; ok {
			out.Column = offset - at + 1
		}
		return out
	}
	span := func(a astRange) Range {
		return Range{position(a.Start, a.Bytes.Start), position(a.End, a.Bytes.End)}
	}
	rng := span(rec.Range)
	r.Range = &rng
	r.Line, r.Column = rng.Start.Line, rng.Start.Column
	if r.Column == 0 {
		r.Column = rec.Range.Start.Column + 1 // in characters, for want of better
		r.DetailsTruncated = true
	}
	r.Start, r.End = &rng.Start.Offset, &rng.End.Offset
	for name, c := range rec.Meta.Single {
		r.capture(name, Capture{c.Text, span(c.Range)})
	}
	for name, list := range rec.Meta.Multi {
		for _, c := range list {
			r.capture(name, Capture{c.Text, span(c.Range)})
		}
	}
	return r, nil
}

func (r *source) capture(name string, c Capture) {
	if r.Captures == nil {
		r.Captures = map[string][]Capture{}
	}
	r.Captures[name] = append(r.Captures[name], c)
}

// prefixBytes is the length of the first n characters of s.
func prefixBytes(s string, n int64) int64 {
	i := 0
	for ; n > 0 && i < len(s); n-- {
		_, w := utf8.DecodeRuneInString(s[i:])
		i += w
	}
	return int64(i)
}
