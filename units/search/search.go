// Package search finds text, documents and syntax in the workspace for the Python
// session: ws.fs.search, search_docs, search_ast and search_backends.
//
// It owns the command lines of ripgrep, ripgrep-all and ast-grep, the limits of a
// scan, the shape of the rows and their pages. It installs nothing and changes no
// file but its own snapshots and cache below .mypr/searches. How programs are run is
// the Runner's business.
//
// A scan keeps its program's output up to scan_bytes and scan_limit, sorts it by path
// and saves it as a snapshot; pages are cut from the snapshot and rows are made when
// their page is read. So a first page costs what the program costs, and every later
// page costs nothing of it. docs/FILES.md says how to use it.
package search

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"mypr/internal/job"
	"mypr/internal/ospath"
	"mypr/internal/paging"
	"mypr/internal/rpc"
)

// CodeDependency: a program is not installed, or was built without what was asked for.
const CodeDependency = "dependency_missing"

// Limits and defaults.
const (
	DefaultTimeout   = 30.0 // seconds
	maxTimeout       = 3600
	DefaultScanBytes = 16 << 20
	minScanBytes     = 1024
	maxScanBytes     = paging.MaxSnapshot
	DefaultMatches   = 100
	maxMatches       = 10_000
	maxContext       = 1000
	// maxArgument keeps patterns below what the kernel takes as one argument
	// (MAX_ARG_STRLEN, 128 KiB).
	maxArgument = 100 << 10
	// slots scans run at the same time; more would only compete for the same disk.
	slots = 2
)

// Options of a Service.
type Options struct {
	Root   string // of the workspace
	Runner job.Runner
	Env    []string // of the programs; its PATH is where they are looked for
}

// Service answers fs.search* for one workspace. Its methods may be called at the same time.
type Service struct {
	root   ospath.Root
	runner job.Runner
	env    []string
	dir    string // .mypr/searches
	store  *paging.Store
	slots  chan struct{}
}

// New serves a workspace. Nothing is touched before the first search.
func New(o Options) (*Service, error) {
	real, err := filepath.EvalSymlinks(o.Root)
	if err != nil {
		return nil, fmt.Errorf("cannot open the workspace: %w", err)
	}
	dir := filepath.Join(real, ".mypr", "searches")
	return &Service{root: ospath.Root(real), runner: o.Runner, env: o.Env, dir: dir,
		store: paging.NewStore(dir), slots: make(chan struct{}, slots)}, nil
}

// Sweep removes what a process that died left behind. No search may be running.
func (s *Service) Sweep() error {
	left, err := filepath.Glob(filepath.Join(s.dir, tempCache+"*"))
	for _, d := range left {
		err = errors.Join(err, os.RemoveAll(d))
	}
	return errors.Join(err, s.store.Sweep())
}

// Methods are the calls that this service answers, by the names Python sends.
func (s *Service) Methods() map[string]rpc.Method {
	limits := Limits{Timeout: DefaultTimeout, ScanBytes: DefaultScanBytes, MaxMatches: DefaultMatches, MaxBytes: paging.DefaultBytes}
	return map[string]rpc.Method{
		"fs.search":          rpc.Typed("fs.search", TextParams{Limits: limits}, s.Search),
		"fs.search_docs":     rpc.Typed("fs.search_docs", DocsParams{Limits: limits, DocsQuery: DocsQuery{Cache: true, ArchiveDepth: defaultDepth}}, s.SearchDocs),
		"fs.search_ast":      rpc.Typed("fs.search_ast", ASTParams{Limits: limits}, s.SearchAST),
		"fs.search_backends": rpc.Typed("fs.search_backends", struct{}{}, s.SearchBackends),
	}
}

// Limits of a scan and of a page. They are not part of the query: the pages of one
// snapshot may have different ones.
type Limits struct {
	Timeout    float64 `json:"timeout"`    // seconds, from the start of the program to its last output
	ScanBytes  int64   `json:"scan_bytes"` // of output that is kept
	ScanLimit  *int64  `json:"scan_limit"` // of results that are kept: matching lines or nodes, files, counts
	MaxMatches int     `json:"max_matches"`
	MaxBytes   int     `json:"max_bytes"`
	Cursor     *string `json:"cursor"`
}

func (l *Limits) checkLimits() error {
	switch {
	case !(l.Timeout > 0 && l.Timeout <= maxTimeout):
		return invalid("timeout must be more than 0 and at most %d seconds, not %v", maxTimeout, l.Timeout)
	case l.ScanBytes < minScanBytes || l.ScanBytes > maxScanBytes:
		return invalid("scan_bytes must be from %d to %d, not %d", minScanBytes, maxScanBytes, l.ScanBytes)
	case l.ScanLimit != nil && *l.ScanLimit < 1:
		return invalid("scan_limit must be 1 or more, not %d", *l.ScanLimit)
	case l.MaxMatches < 1 || l.MaxMatches > maxMatches:
		return invalid("max_matches must be from 1 to %d, not %d", maxMatches, l.MaxMatches)
	}
	return paging.CheckBytes(l.MaxBytes)
}

func invalid(format string, args ...any) *rpc.Error {
	return rpc.Errorf(rpc.CodeInvalidRequest, format, args...)
}

// Modes of a result.
const (
	modeMatches = "matches"
	modeFiles   = "files"
	modeCounts  = "counts"
	modeExists  = "exists"
)

func checkMode(mode string) error {
	switch mode {
	case modeMatches, modeFiles, modeCounts, modeExists:
		return nil
	}
	return invalid("mode must be matches, files, counts or exists, not %q", mode)
}

// Backends, as results name them.
const (
	backendText = "rg"
	backendDocs = "rga"
	backendAST  = "ast"
)

// scan is one run of a program.
type scan struct {
	method  string
	backend string
	mode    string
	query   any // for the cursor
	argv    []string
	env     []string
	limits  Limits
	split   splitter
	keep    keeper
	// first: one result answers the question, the rest is not looked for.
	first bool
	// found reads from the exit code whether anything was found, where the program
	// prints nothing.
	found func(code int) bool
	// wrong is asked when nothing was found and the program failed: an error when the
	// query itself is at fault, which the program finds out before it searches.
	wrong func(ctx context.Context, code int, stderr string) error
	// tidy makes warnings of what the program wrote to standard error; nil: as it is.
	tidy func(stderr string) string
	// finish makes the last change to the sorted rows; nil: none.
	finish func(rows []byte) []byte
	// failed says whether the end means that something could not be searched.
	failed func(code int, stderr string) bool
}

// meta heads every page of a snapshot.
type meta struct {
	Mode          string   `json:"mode"`
	Backend       string   `json:"backend"`
	Complete      bool     `json:"complete"`
	StopReason    string   `json:"stop_reason,omitempty"`
	ScanTruncated bool     `json:"scan_truncated,omitempty"`
	Warnings      []string `json:"warnings,omitempty"`
	Exists        *bool    `json:"exists,omitempty"`
}

// Reasons why a scan ended before it was complete.
const (
	stopTimeout   = "timeout"
	stopScanBytes = "scan_bytes"
	stopScanLimit = "scan_limit"
	stopErrors    = "errors" // some files or directories could not be searched
	stopKilled    = "killed" // the program died
)

var errTimeout = errors.New("the time is over")

// run scans, saves the snapshot and returns its first page.
func (s *Service) run(ctx context.Context, sc *scan) (*Page, error) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	c := &collector{scan: sc}
	limited, cancel := context.WithTimeoutCause(ctx, time.Duration(sc.limits.Timeout*float64(time.Second)), errTimeout)
	defer cancel()
	exit, stderr, err := job.Collect(limited, s.runner, job.Command{Name: "search", Argv: sc.argv, Dir: string(s.root), Env: sc.env}, c)
	m := meta{Mode: sc.mode, Backend: sc.backend}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, errTimeout), errors.Is(err, context.DeadlineExceeded):
		m.StopReason = stopTimeout
	case errors.Is(err, errStop):
		m.StopReason, m.ScanTruncated = c.stop, c.stop != ""
	case err != nil:
		return nil, rpc.Errorf(rpc.CodeInternal, "the search failed: %v", err)
	case exit.Signal != 0:
		m.StopReason = stopKilled
		stderr += fmt.Sprintf("\n%s was killed by signal %d (%v)", filepath.Base(sc.argv[0]), int(exit.Signal), exit.Signal)
	case sc.failed(exit.Code, stderr):
		if c.results == 0 {
			if err := sc.wrong(limited, exit.Code, stderr); err != nil {
				return nil, err
			}
		}
		m.StopReason = stopErrors
	}
	m.Complete = m.StopReason == ""
	if sc.tidy != nil {
		stderr = sc.tidy(stderr)
	}
	m.Warnings = warnings(stderr)
	if c.dropped > 0 {
		m.Complete, m.ScanTruncated = false, true
		m.Warnings = append(m.Warnings, fmt.Sprintf("%d results were too large to keep", c.dropped))
	}
	if sc.mode == modeExists {
		found := c.results > 0 || sc.found != nil && err == nil && sc.found(exit.Code)
		if found || m.Complete {
			m.Exists = &found
		}
		if found { // the answer cannot become another one
			m.Complete, m.StopReason, m.ScanTruncated = true, "", false
		}
		c.rows = nil
	}
	rows := c.sorted()
	if sc.finish != nil {
		rows = sc.finish(rows)
	}
	snap, err := s.store.Save(sc.method, sc.query, m, rows, nil)
	if err != nil {
		return nil, s.root.Error("search", s.dir, err)
	}
	return s.page(snap, 0, &sc.limits)
}

// resume answers a call with a cursor.
func (s *Service) resume(method string, query any, l *Limits) (*Page, error) {
	snap, pos, err := s.store.Open(method, *l.Cursor, query)
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	return s.page(snap, pos, l)
}

// tool finds a program.
func (s *Service) tool(name, install string) (string, error) {
	if p := job.Look(s.env, name); p != "" {
		return p, nil
	}
	return "", rpc.Errorf(CodeDependency, "%s is not in the PATH of the runtime", name).
		WithHint("install it: %s; await ws.fs.search_backends() shows what is there", install)
}

// paths checks what to search and spells it for the program. Names that are not
// there are refused before anything is searched.
func (s *Service) paths(list ospath.List) ([]string, error) {
	if list == nil {
		return []string{"./"}, nil // a bare rg would read standard input where it thinks that it should
	}
	if len(list) == 0 {
		return nil, invalid("paths is empty").WithHint("leave it out to search the workspace")
	}
	var out []string
	for _, p := range list {
		abs, err := s.root.Abs(string(p))
		if err != nil {
			return nil, err
		}
		st, err := os.Stat(abs)
		if err != nil {
			return nil, s.root.Error("search", abs, err)
		}
		if !st.IsDir() && !st.Mode().IsRegular() {
			return nil, invalid("cannot search %s: it is no file and no directory", p).WithHint("searching a FIFO or a device could wait for ever")
		}
		name := string(p)
		if !filepath.IsAbs(name) {
			name = "./" + name
		}
		out = append(out, name)
	}
	return out, nil
}

// ownData are the directories of ours that a search leaves out.
var ownData = []string{"searches", "git", "writes"}

// excludes are the globs that keep our own data out of a search, unless its paths
// name something below .mypr.
func (s *Service) excludes(paths ospath.List) (globs []string) {
	own := filepath.Join(string(s.root), ".mypr")
	for _, p := range paths {
		if abs, err := s.root.Abs(string(p)); err == nil {
			abs = filepath.Clean(abs)
			if abs == own || strings.HasPrefix(abs, own+"/") {
				return nil
			}
		}
	}
	for _, d := range ownData {
		globs = append(globs, "!/.mypr/"+d)
	}
	return globs
}

// checkStrings refuses arguments that a program cannot take.
func checkStrings(what string, list ospath.List) error {
	total := 0
	for _, t := range list {
		if total += len(t); total > maxArgument {
			return rpc.Errorf(rpc.CodeTooLarge, "%s has more than %d bytes", what, maxArgument)
		}
		if strings.IndexByte(string(t), 0) >= 0 {
			err := invalid("%s has a NUL byte", what)
			if what == "pattern" {
				return err.WithHint("search binary files with \\x00 in a pattern that is not fixed")
			}
			return err.WithHint("no file has such a name")
		}
		if what != "paths" && !utf8.ValidString(string(t)) {
			return invalid("%s has a lone surrogate", what).WithHint("search for other bytes with (?-u:\\xff)")
		}
	}
	return nil
}

// display is how results spell a path that a program printed.
func (s *Service) display(printed string) ospath.Text {
	if rest, ok := strings.CutPrefix(printed, "./"); ok {
		return ospath.Text(strings.TrimLeft(rest, "/"))
	}
	if filepath.IsAbs(printed) {
		return s.root.Display(printed)
	}
	return ospath.Text(printed)
}

const (
	maxWarnings     = 8
	maxWarningBytes = 256
)

// warnings makes a short list of what a program wrote to standard error.
func warnings(stderr string) (list []string) {
	more := 0
	for line := range strings.Lines(strings.ToValidUTF8(stderr, "\uFFFD")) {
		line = strings.TrimSpace(line)
		if line == "" || strings.Trim(line, "-^|") == "" || slices.Contains(list, line) {
			continue
		}
		if len(line) > maxWarningBytes {
			line = line[:paging.Fit([]byte(line), maxWarningBytes)] + "…"
		}
		if len(list) == maxWarnings {
			more++
			continue
		}
		list = append(list, line)
	}
	if more > 0 {
		list = append(list, fmt.Sprintf("%d more lines of errors", more))
	}
	return list
}
