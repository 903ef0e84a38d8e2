package search

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"

	"mypr/internal/job"
	"mypr/internal/ospath"
)

const (
	defaultDepth = 5
	maxDepth     = 64
	// docsCache keeps extracted text between searches; tempCache begins the names of
	// caches that live for one search.
	docsCache = "rga-cache"
	tempCache = "rga-once-"
)

// DocsQuery is what fs.search_docs looks for. Its case counts.
type DocsQuery struct {
	Pattern      ospath.List `json:"pattern,omitempty"`
	Paths        ospath.List `json:"paths,omitempty"`
	Glob         ospath.List `json:"glob,omitempty"`
	Mode         string      `json:"mode,omitempty"`
	Adapters     ospath.List `json:"adapters,omitempty"`
	Accurate     bool        `json:"accurate,omitempty"` // find out formats from content, not names
	Cache        bool        `json:"cache"`
	ArchiveDepth int         `json:"archive_depth"`
}

// DocsParams of fs.search_docs.
type DocsParams struct {
	DocsQuery
	Limits
}

// isAdapter: a name, perhaps with the sign that adds it to the default ones or takes it away.
func isAdapter(s string) bool {
	return s != "" && strings.IndexFunc(s, func(r rune) bool {
		return r != '+' && r != '-' && r != '_' && r != '.' && !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) < 0
}

// SearchDocs runs ripgrep-all, or reads a page of an earlier search.
func (s *Service) SearchDocs(ctx context.Context, p DocsParams) (*Page, error) {
	if err := p.checkLimits(); err != nil {
		return nil, err
	}
	q := &p.DocsQuery
	if p.Cursor != nil {
		given := map[string]any{}
		for name, list := range map[string]ospath.List{"pattern": q.Pattern, "paths": q.Paths, "glob": q.Glob, "adapters": q.Adapters} {
			if list != nil {
				given[name] = list
			}
		}
		if q.Mode != "" {
			given["mode"] = q.Mode
		}
		return s.resume("fs.search_docs", given, &p.Limits)
	}
	if q.Mode == "" {
		q.Mode = modeMatches
	}
	mode := q.Mode
	if err := checkMode(mode); err != nil {
		return nil, err
	}
	switch {
	case len(q.Pattern) == 0:
		return nil, invalid("search_docs needs a pattern").WithHint("list files with ws.fs.search(glob=...)")
	case q.ArchiveDepth < 0 || q.ArchiveDepth > maxDepth:
		return nil, invalid("archive_depth must be from 0 to %d, not %d", maxDepth, q.ArchiveDepth)
	}
	for what, list := range map[string]ospath.List{"pattern": q.Pattern, "paths": q.Paths, "glob": q.Glob} {
		if err := checkStrings(what, list); err != nil {
			return nil, err
		}
	}
	for _, a := range q.Adapters {
		if !isAdapter(string(a)) {
			return nil, invalid("%q is no name of an adapter", a).WithHint("await ws.fs.search_backends() lists them")
		}
	}
	rga, err := s.tool("rga", "cargo install ripgrep_all, or https://github.com/phiresky/ripgrep-all")
	if err != nil {
		return nil, err
	}
	if _, err := s.tool("rg", "apt install ripgrep"); err != nil { // rga starts it
		return nil, err
	}
	paths, err := s.paths(q.Paths)
	if err != nil {
		return nil, err
	}
	cache := filepath.Join(s.dir, docsCache)
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, s.root.Error("search", s.dir, err)
	}
	if !q.Cache {
		if cache, err = os.MkdirTemp(s.dir, tempCache); err != nil {
			return nil, s.root.Error("search", s.dir, err)
		}
		defer os.RemoveAll(cache)
	}
	// rga asks rg for smart case and no line numbers unless told otherwise.
	base := []string{rga, "--rga-cache-path=" + cache, "--rga-max-archive-recursion=" + strconv.Itoa(q.ArchiveDepth)}
	if q.Accurate {
		base = append(base, "--rga-accurate")
	}
	if len(q.Adapters) > 0 {
		base = append(base, "--rga-adapters="+strings.Join(q.Adapters.Strings(), ","))
	}
	base = append(base, "--no-config", "--color=never", "--case-sensitive", "--line-number")
	for _, pat := range q.Pattern {
		base = append(base, "--regexp="+string(pat))
	}
	for _, g := range append(q.Glob.Strings(), s.excludes(q.Paths)...) {
		base = append(base, "--glob="+g)
	}
	sc := &scan{method: "fs.search_docs", backend: backendDocs, mode: mode, query: q, env: s.env, limits: p.Limits,
		failed: docsFailed, tidy: docsWarnings}
	s.output(sc, base, false, nil, paths)
	sc.wrong = func(ctx context.Context, _ int, stderr string) error {
		if strings.HasPrefix(stderr, ownError) {
			return invalid("rga refuses the query: %s", strings.TrimSpace(strings.TrimPrefix(stderr, ownError))).
				WithHint("await ws.fs.search_backends() lists the adapters")
		}
		argv := append(base[:len(base):len(base)], queryOnly(false)...)
		exit, stderr, err := job.Collect(ctx, s.runner, job.Command{Name: "search", Argv: argv, Dir: string(s.root), Env: s.env}, io.Discard)
		if err != nil || exit.Code != 2 || strings.Contains(stderr, "preprocessor") {
			return nil
		}
		return patternError(stderr, "")
	}
	return s.run(ctx, sc)
}

// ownError begins what rga says of its own arguments; its exit code is then that of
// an rg which found nothing.
const ownError = "Error: "

func docsFailed(code int, stderr string) bool {
	return code != 0 && (code != 1 || strings.HasPrefix(stderr, ownError))
}

// docsWarnings makes one line of each of rga's reports about a file.
func docsWarnings(stderr string) string {
	var out []string
	const unknown = "it could not be converted"
	file, cause := "", ""
	flush := func() {
		if file != "" {
			out = append(out, fmt.Sprintf("%s: %s", file, cause))
		}
		file, cause = "", ""
	}
	for line := range strings.Lines(stderr) {
		line = strings.TrimRight(line, "\n")
		if name, _, ok := strings.Cut(line, ": preprocessor command failed: "); ok {
			flush()
			file, cause = strings.TrimPrefix(name, "./"), unknown
			continue
		}
		if file == "" {
			out = append(out, line)
			continue
		}
		if n, text, ok := strings.Cut(strings.TrimLeft(line, " "), ": "); ok && line[0] == ' ' && strings.Trim(n, "0123456789") == "" {
			cause = text // of "    2: text", the last of which is the root of the matter
		} else if text, ok := strings.CutPrefix(line, "Error: "); ok && cause == unknown {
			cause = text
		}
	}
	flush()
	return strings.Join(out, "\n")
}
