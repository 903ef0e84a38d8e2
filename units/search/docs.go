package search

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

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

var adapterName = regexp.MustCompile(`^[+-]?[A-Za-z0-9_.-]+$`)

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
		if !adapterName.MatchString(string(a)) {
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
		failed: func(code int) bool { return code != 0 && code != 1 }, tidy: docsWarnings}
	s.output(sc, base, false, nil, paths)
	sc.wrong = func(ctx context.Context, _ int, stderr string) error {
		if strings.HasPrefix(stderr, "Error: ") && !strings.Contains(stderr, "preprocessor") {
			return invalid("rga refuses the query: %s", strings.TrimSpace(strings.TrimPrefix(stderr, "Error: "))).
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

var (
	docsFailure = regexp.MustCompile(`^(.*): preprocessor command failed: `)
	docsCause   = regexp.MustCompile(`^\s+\d+: (.*)$`)
	docsError   = regexp.MustCompile(`^Error: (.*)$`)
)

// docsWarnings makes one line of each of rga's reports about a file.
func docsWarnings(stderr string) string {
	var out []string
	file, cause := "", ""
	flush := func() {
		if file != "" {
			out = append(out, fmt.Sprintf("%s: %s", file, cause))
		}
		file, cause = "", ""
	}
	for line := range strings.Lines(stderr) {
		line = strings.TrimRight(line, "\n")
		if m := docsFailure.FindStringSubmatch(line); m != nil {
			flush()
			file, cause = strings.TrimPrefix(m[1], "./"), "it could not be converted"
			continue
		}
		if file == "" {
			out = append(out, line)
			continue
		}
		if m := docsCause.FindStringSubmatch(line); m != nil { // the last one is the root
			cause = m[1]
		} else if m := docsError.FindStringSubmatch(line); m != nil && cause == "it could not be converted" {
			cause = m[1]
		}
	}
	flush()
	return strings.Join(out, "\n")
}
