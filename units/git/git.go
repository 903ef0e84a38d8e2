// Package git answers ws.git.status, diff and show: what a repository looks like,
// read-only, as rows and text in pages.
//
// It owns the command lines, the parsing of what git prints for programs (porcelain
// v2, raw and numstat records, all with NUL), and the shape of the pages. It never
// writes to a repository: not even the index is refreshed on disk. How programs are
// run is the Runner's business, snapshots are package paging's.
//
// # What does not run
//
// A repository can name programs in its configuration, and looking at it must not run
// them: the pager, external diff programs, textconv, hooks, the fsmonitor, signature
// checks and fetching of missing objects are switched off for every command. Filters
// (clean, smudge) are not: without them git could not tell whether a file changed.
package git

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"mypr/internal/job"
	"mypr/internal/ospath"
	"mypr/internal/paging"
	"mypr/internal/rpc"
)

// Error codes beyond rpc's.
const (
	CodeDependency = "dependency_missing"
	CodeDamaged    = "repository_damaged"
	CodeTimeout    = "timeout"
	CodeFailed     = "git_failed"
)

const (
	// timeout of one command. A status of a cold tree of 100,000 files takes seconds.
	timeout        = 2 * time.Minute
	defaultEntries = 200
	maxEntries     = 10_000
	// maxOutput of one command; what is over it is cut off and the answer says so.
	maxOutput = paging.MaxSnapshot
)

// Options of a Service.
type Options struct {
	Root   string // of the workspace
	Runner job.Runner
	Env    []string // its PATH is where git is looked for
}

// Service answers git.* for one workspace. Its methods may be called at the same time.
type Service struct {
	root   ospath.Root
	runner job.Runner
	env    []string
	store  *paging.Store
}

// New serves a workspace. Nothing is touched before the first query.
func New(o Options) (*Service, error) {
	real, err := filepath.EvalSymlinks(o.Root)
	if err != nil {
		return nil, fmt.Errorf("cannot open the workspace: %w", err)
	}
	return &Service{root: ospath.Root(real), runner: o.Runner, env: environment(o.Env),
		store: paging.NewStore(filepath.Join(real, ".mypr", "git"))}, nil
}

// Sweep removes what a process that died left behind. No query may be running.
func (s *Service) Sweep() error { return s.store.Sweep() }

// Methods are the calls that this service answers, by the names Python sends.
func (s *Service) Methods() map[string]rpc.Method {
	return map[string]rpc.Method{
		"git.status": rpc.Typed("git.status", StatusParams{MaxEntries: defaultEntries, MaxBytes: paging.DefaultBytes}, s.Status),
		"git.diff":   rpc.Typed("git.diff", DiffParams{MaxBytes: paging.DefaultBytes}, s.Diff),
		"git.show":   rpc.Typed("git.show", ShowParams{ShowQuery: ShowQuery{Ref: "HEAD"}, MaxBytes: paging.DefaultBytes}, s.Show),
	}
}

func invalid(format string, args ...any) *rpc.Error {
	return rpc.Errorf(rpc.CodeInvalidRequest, format, args...)
}

// environment is what git runs in: without the variables that would send it to
// another repository or make it write traces, and with those that keep it quiet.
func environment(env []string) []string {
	keep := map[string]bool{"GIT_CONFIG_GLOBAL": true, "GIT_CONFIG_SYSTEM": true, "GIT_CONFIG_NOSYSTEM": true, "GIT_CONFIG_COUNT": true,
		"GIT_CEILING_DIRECTORIES": true, "GIT_DISCOVERY_ACROSS_FILESYSTEM": true, "GIT_EXEC_PATH": true}
	var out []string
	for _, e := range env {
		name, _, _ := strings.Cut(e, "=")
		switch {
		case strings.HasPrefix(name, "GIT_CONFIG_KEY_"), strings.HasPrefix(name, "GIT_CONFIG_VALUE_"), keep[name]:
		case strings.HasPrefix(name, "GIT_"), name == "LC_ALL", name == "LANGUAGE":
			continue
		}
		out = append(out, e)
	}
	// Messages are read here, so they are to be English; names of files are not to be touched.
	return append(out, "LC_ALL=C.UTF-8", "GIT_OPTIONAL_LOCKS=0", "GIT_TERMINAL_PROMPT=0", "GIT_NO_LAZY_FETCH=1", "GIT_PAGER=cat")
}

// fixed are the options of every command. "-c" outranks every configuration file and
// is handed on to the commands that git starts in submodules.
func fixed() []string {
	return []string{"--no-pager", "--no-optional-locks", "--literal-pathspecs",
		"-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false", "-c", "color.ui=false",
		"-c", "log.showSignature=false", "-c", "protocol.allow=never", "-c", "core.sshCommand=false", "-c", "credential.helper=",
		"-c", "diff.external=", "-c", "diff.relative=false"}
}

// diffOptions make the records that parseDiff reads, and a patch, the same whatever
// the user's configuration says of their form.
func diffOptions() []string {
	return []string{"--raw", "--numstat", "--patch", "-z", "--no-abbrev", "--no-ext-diff", "--no-textconv", "--no-color", "--no-color-moved",
		"--submodule=short", "--src-prefix=a/", "--dst-prefix=b/"}
}

// limited keeps the beginning of an output.
type limited struct {
	buf bytes.Buffer
	max int
	cut bool
}

var errEnough = errors.New("the output is over its limit")

func (l *limited) Write(p []byte) (int, error) {
	if l.buf.Len()+len(p) > l.max {
		l.buf.Write(p[:l.max-l.buf.Len()])
		l.cut = true
		return 0, errEnough
	}
	return l.buf.Write(p)
}

// output is what a command printed.
type output struct {
	data     []byte
	cut      bool // over maxOutput
	warnings []string
}

// git runs one command in the workspace.
func (s *Service) git(ctx context.Context, args ...string) (*output, error) {
	program := job.Look(s.env, "git")
	if program == "" {
		return nil, rpc.Errorf(CodeDependency, "git is not in the PATH of the runtime").WithHint("install it: apt install git")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errTimeout)
	defer cancel()
	l := &limited{max: maxOutput}
	exit, stderr, err := job.Collect(ctx, s.runner, job.Command{Name: "git", Argv: append(append([]string{program}, fixed()...), args...),
		Dir: string(s.root), Env: s.env}, l)
	switch {
	case errors.Is(err, errEnough):
	case errors.Is(err, errTimeout):
		return nil, rpc.Errorf(CodeTimeout, "git %s took longer than %v", args[0], timeout).
			WithHint("run it with ws.shell, which has no such limit")
	case err != nil:
		return nil, err
	case exit.Signal != 0:
		return nil, rpc.Errorf(CodeFailed, "git %s was killed by signal %d (%v)", args[0], int(exit.Signal), exit.Signal)
	case exit.Code != 0:
		return nil, s.explain(args[0], exit.Code, stderr)
	}
	return &output{data: l.buf.Bytes(), cut: l.cut, warnings: lines(stderr)}, nil
}

var errTimeout = errors.New("the time is over")

// explain makes a typed error of a refusal of git.
func (s *Service) explain(command string, code int, stderr string) error {
	text := strings.TrimSpace(strings.ToValidUTF8(stderr, "\uFFFD"))
	has := func(parts ...string) bool {
		for _, p := range parts {
			if strings.Contains(text, p) {
				return true
			}
		}
		return false
	}
	short := strings.TrimPrefix(text, "fatal: ")
	if i := strings.Index(short, "\n"); i >= 0 {
		short = short[:i]
	}
	switch {
	case has("dubious ownership"):
		dir := string(s.root)
		if _, rest, ok := strings.Cut(text, "repository at '"); ok {
			dir, _, _ = strings.Cut(rest, "'")
		}
		return rpc.Errorf(rpc.CodePermission, "git refuses the repository at %s, because it belongs to another user, whose configuration could run programs as you", dir).
			WithHint("if you trust it: await ws.shell.run([\"git\", \"config\", \"--global\", \"--add\", \"safe.directory\", %q])", dir)
	case has("not a git repository"):
		return rpc.Errorf(rpc.CodeNotFound, "the workspace %s is not in a git repository", s.root).WithHint("git init makes one")
	case has("must be run in a work tree"):
		return invalid("the repository at %s is bare: there is no work tree to compare", s.root).WithHint("read commits with ws.git.show, compare them with rev=\"A..B\"")
	case has("corrupt", "bad signature", "bad object", "index file smaller", "unable to read", "could not read", "loose object", "packfile", "bad tree", "bad config", "bad numeric config", "unable to parse"):
		return rpc.Errorf(CodeDamaged, "git %s cannot read the repository: %s", command, short).
			WithHint("await ws.shell.run([\"git\", \"fsck\"]) says what is damaged")
	case has("bad revision", "unknown revision", "ambiguous argument", "Not a valid object name", "invalid object name", "not a tree object", "Needed a single revision", "bad default revision"):
		return rpc.Errorf(rpc.CodeNotFound, "git %s knows no such revision: %s", command, short).
			WithHint("name a branch, tag or commit; a repository without commits has no HEAD yet")
	case has("outside repository"):
		return invalid("git %s: %s", command, short).WithHint("paths are relative to the workspace and inside the repository")
	}
	return rpc.Errorf(CodeFailed, "git %s failed with exit code %d: %s", command, code, text)
}

// lines are what git wrote to standard error beside a good result.
func lines(stderr string) (list []string) {
	for l := range strings.Lines(strings.ToValidUTF8(stderr, "\uFFFD")) {
		if l = strings.TrimSpace(l); l == "" {
			continue
		}
		if len(l) > 256 {
			l = l[:paging.Fit([]byte(l), 256)] + "…"
		}
		if list = append(list, l); len(list) == 8 {
			break
		}
	}
	return list
}

// top finds the root of the work tree; of a bare repository, the repository.
func (s *Service) top(ctx context.Context) (string, error) {
	out, err := s.git(ctx, "rev-parse", "--show-toplevel")
	if rpc.CodeOf(err) == rpc.CodeInvalidRequest { // bare, or the workspace is in .git
		out, err = s.git(ctx, "rev-parse", "--absolute-git-dir")
	}
	if err != nil {
		return "", err
	}
	return strings.TrimSuffix(string(out.data), "\n"), nil
}

// both runs a command while the root of the repository is looked up.
func (s *Service) both(ctx context.Context, args ...string) (*output, string, error) {
	type answer struct {
		root string
		err  error
	}
	ch := make(chan answer, 1)
	go func() {
		root, err := s.top(ctx)
		ch <- answer{root, err}
	}()
	out, err := s.git(ctx, args...)
	a := <-ch
	if a.err != nil { // says more about a missing repository: outside of one, "git diff" compares files
		return nil, "", a.err
	}
	return out, a.root, err
}

// pathspecs checks the paths of a query. They are literal: no pattern, no magic.
func (s *Service) pathspecs(list ospath.List) ([]string, error) {
	if list != nil && len(list) == 0 {
		return nil, invalid("paths is empty").WithHint("leave it out for the whole repository")
	}
	var out []string
	for _, p := range list {
		if _, err := s.root.Abs(string(p)); err != nil {
			return nil, err
		}
		out = append(out, string(p))
	}
	return out, nil
}

// checkRev refuses what git would take for an option, or could not be a revision.
func checkRev(name, rev string) error {
	switch {
	case rev == "":
		return invalid("%s is empty", name)
	case strings.HasPrefix(rev, "-"):
		return invalid("%s must not begin with -: %.80q", name, rev)
	case strings.ContainsAny(rev, "\x00\n"):
		return invalid("%s is no revision: %.80q", name, rev)
	case len(rev) > 4096:
		return invalid("%s has %d bytes: it is no revision", name, len(rev))
	}
	return nil
}

func checkEntries(n int) error {
	if n < 1 || n > maxEntries {
		return invalid("max_entries must be from 1 to %d, not %d", maxEntries, n)
	}
	return nil
}

// Pages are the fields that every page has.
type Pages struct {
	Complete   bool     `json:"complete"` // git's whole answer is in the snapshot
	HasMore    bool     `json:"has_more"`
	NextCursor *string  `json:"next_cursor"`
	Warnings   []string `json:"warnings,omitempty"`
}

// filler puts rows into a page while they fit.
type filler struct {
	room, maxBytes, rows, most int
}

// newFiller measures a page that has everything but its rows and cursor.
func newFiller(page any, p *Pages, maxBytes, most int) (*filler, error) {
	longest := strings.Repeat("x", paging.CursorMax)
	p.NextCursor, p.HasMore = &longest, false // "false" is the longer one
	n, err := paging.Size(page)
	p.NextCursor = nil
	return &filler{room: maxBytes - n, maxBytes: maxBytes, most: most}, err
}

// fits takes the room for a row. It is an error when the first one does not fit.
func (f *filler) fits(row []byte) (bool, error) {
	if f.rows == f.most {
		return false, nil
	}
	var v json.RawMessage = row
	n, err := paging.Size(v)
	if err != nil {
		return false, err
	}
	if n++; n > f.room {
		if f.rows == 0 {
			return false, paging.TooSmall(f.maxBytes, f.maxBytes-f.room+n)
		}
		return false, nil
	}
	f.room -= n
	f.rows++
	return true, nil
}

// end closes a page at a place of its snapshot.
func (p *Pages) end(snap *paging.Snapshot, pos int64) {
	if snap.More(pos) {
		c := snap.Cursor(pos)
		p.HasMore, p.NextCursor = true, &c
	}
}

// trimWarnings keeps those that take at most room bytes.
func trimWarnings(list []string, room int) []string {
	for i, w := range list {
		n, _ := paging.Size(w)
		if room -= n + 1; room < 0 {
			return list[:i]
		}
	}
	return list
}

func jsonLine(b []byte, v any) []byte {
	line, err := json.Marshal(v)
	if err != nil {
		panic(err) // only types of this package come here
	}
	return append(append(b, line...), '\n')
}
