package search

import (
	"context"
	"io"
	"strconv"
	"strings"

	"mypr/internal/job"
	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

// TextQuery is what fs.search looks for.
type TextQuery struct {
	Pattern     ospath.List `json:"pattern,omitempty"`
	Paths       ospath.List `json:"paths,omitempty"`
	Glob        ospath.List `json:"glob,omitempty"`
	Fixed       bool        `json:"fixed,omitempty"`
	IgnoreCase  bool        `json:"ignore_case,omitempty"`
	Hidden      bool        `json:"hidden,omitempty"`
	NoIgnore    bool        `json:"no_ignore,omitempty"`
	Context     int         `json:"context,omitempty"`
	Word        bool        `json:"word,omitempty"`
	Line        bool        `json:"line,omitempty"`
	Multiline   bool        `json:"multiline,omitempty"`
	Dotall      bool        `json:"dotall,omitempty"`
	Before      *int        `json:"before,omitempty"`
	After       *int        `json:"after,omitempty"`
	RegexEngine string      `json:"regex_engine,omitempty"` // default, pcre2, auto
	Mode        string      `json:"mode,omitempty"`
}

// TextParams of fs.search.
type TextParams struct {
	TextQuery
	Limits
}

// Search runs ripgrep, or reads a page of an earlier search.
func (s *Service) Search(ctx context.Context, p TextParams) (*Page, error) {
	if err := p.checkLimits(); err != nil {
		return nil, err
	}
	q := &p.TextQuery
	if q.RegexEngine == "default" {
		q.RegexEngine = ""
	}
	if p.Cursor != nil {
		return s.resume("fs.search", q, &p.Limits)
	}
	mode := q.Mode
	if mode == "" {
		if mode = modeMatches; q.Pattern == nil {
			mode = modeFiles
		}
	}
	if err := q.checkQuery(mode); err != nil {
		return nil, err
	}
	q.Mode = mode
	rg, err := s.tool("rg", "apt install ripgrep, or https://github.com/BurntSushi/ripgrep")
	if err != nil {
		return nil, err
	}
	paths, err := s.paths(q.Paths)
	if err != nil {
		return nil, err
	}
	base := append([]string{rg, "--no-config", "--color=never"}, q.flags()...)
	for _, g := range append(q.Glob.Strings(), s.excludes(q.Paths)...) {
		base = append(base, "--glob="+g)
	}
	sc := &scan{method: "fs.search", backend: backendText, mode: mode, query: q, env: s.env, limits: p.Limits,
		failed: func(code int, _ string) bool { return code == 2 }}
	s.output(sc, base, q.Pattern == nil, q.contextFlags(), paths)
	sc.wrong = func(ctx context.Context, _ int, _ string) error {
		// With nothing to search, an error is about the query.
		exit, stderr, err := job.Collect(ctx, s.runner, job.Command{Name: "search", Argv: append(base[:len(base):len(base)], queryOnly(q.Pattern == nil)...), Dir: string(s.root), Env: s.env}, io.Discard)
		if err != nil || exit.Code != 2 {
			return nil
		}
		return patternError(stderr, q.RegexEngine)
	}
	return s.run(ctx, sc)
}

func (q *TextQuery) checkQuery(mode string) error {
	if err := checkMode(mode); err != nil {
		return err
	}
	switch {
	case q.Pattern != nil && len(q.Pattern) == 0:
		return invalid("pattern is an empty list").WithHint("leave it out to list files")
	case q.Pattern == nil && (mode == modeMatches || mode == modeCounts):
		return invalid("mode %s needs a pattern", mode).WithHint("without one, mode is files or exists")
	case q.Dotall && !q.Multiline:
		return invalid("dotall means something only with multiline=True")
	case q.RegexEngine != "" && q.RegexEngine != "pcre2" && q.RegexEngine != "auto":
		return invalid("regex_engine must be default, pcre2 or auto, not %q", q.RegexEngine)
	}
	for _, n := range []*int{&q.Context, q.Before, q.After} {
		if n != nil && (*n < 0 || *n > maxContext) {
			return invalid("context, before and after must be from 0 to %d, not %d", maxContext, *n)
		}
	}
	for what, list := range map[string]ospath.List{"pattern": q.Pattern, "paths": q.Paths, "glob": q.Glob} {
		if err := checkStrings(what, list); err != nil {
			return err
		}
	}
	return nil
}

// flags are all that change what matches.
func (q *TextQuery) flags() (f []string) {
	for _, c := range []struct {
		on   bool
		flag string
	}{
		{q.Fixed, "--fixed-strings"}, {q.IgnoreCase, "--ignore-case"}, {q.Hidden, "--hidden"}, {q.NoIgnore, "--no-ignore"},
		{q.Word, "--word-regexp"}, {q.Line, "--line-regexp"}, {q.Multiline, "--multiline"}, {q.Dotall, "--multiline-dotall"},
		{q.RegexEngine != "", "--engine=" + q.RegexEngine},
	} {
		if c.on {
			f = append(f, c.flag)
		}
	}
	for _, p := range q.Pattern {
		f = append(f, "--regexp="+string(p))
	}
	return f
}

func (q *TextQuery) contextFlags() []string {
	before, after := q.Context, q.Context
	if q.Before != nil {
		before = *q.Before
	}
	if q.After != nil {
		after = *q.After
	}
	var f []string
	if before > 0 {
		f = append(f, "--before-context="+strconv.Itoa(before))
	}
	if after > 0 {
		f = append(f, "--after-context="+strconv.Itoa(after))
	}
	return f
}

// output completes the command line of rg, or of rga, for a mode, and says how to read
// what it prints.
func (s *Service) output(sc *scan, base []string, noPattern bool, contextFlags, paths []string) {
	argv := base[:len(base):len(base)]
	switch sc.mode {
	case modeMatches:
		argv = append(append(argv, "--json"), contextFlags...)
		sc.split, sc.keep = splitLines, s.keepMatches
	case modeFiles:
		if noPattern {
			argv = append(argv, "--files", "--null")
		} else {
			argv = append(argv, "--files-with-matches", "--null")
		}
		sc.split, sc.keep = splitNUL, s.keepPath
	case modeCounts:
		argv = append(argv, "--count", "--with-filename", "--null")
		sc.split, sc.keep = splitCounts, s.keepCount
	case modeExists:
		if noPattern {
			argv = append(argv, "--files")
		}
		argv = append(argv, "--quiet")
		sc.split, sc.keep = splitLines, keepNothing
		sc.found = func(code int) bool { return code == 0 }
	}
	sc.argv = append(append(argv, "--"), paths...)
}

func queryOnly(noPattern bool) []string {
	if noPattern {
		return []string{"--quiet", "--files", "--", "/dev/null"}
	}
	return []string{"--quiet", "--", "/dev/null"}
}

// patternError is for what rg says of a query before it searches anything.
func patternError(stderr, engine string) error {
	text := strings.TrimSpace(stderr)
	if engine == "pcre2" && strings.Contains(text, "PCRE2 is not available") {
		return rpc.Errorf(CodeDependency, "the installed rg was built without PCRE2").WithHint("use regex_engine=\"default\", or install a build with PCRE2")
	}
	e := invalid("the query is not valid; nothing was searched: %s", text)
	switch {
	case strings.Contains(text, "look-around") || strings.Contains(text, "backreferences"):
		return e.WithHint("look-around and backreferences need regex_engine=\"pcre2\"")
	case strings.Contains(text, `literal '"\n"' is not allowed`) || strings.Contains(text, `literal "\n" is not allowed`):
		return e.WithHint("a pattern that spans lines needs multiline=True")
	}
	return e.WithHint("mend it, or pass fixed=True to search for the text as it is")
}
