package git

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"mypr/internal/job"
	"mypr/internal/ospath"
	"mypr/internal/paging"
	"mypr/internal/rpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type world struct {
	*Service
	t   testing.TB
	dir string
	env []string
}

// newWorld is a workspace with an empty repository.
func newWorld(t testing.TB) *world {
	w := bareWorld(t)
	w.git("init", "-q", "-b", "main")
	w.put(".git/info/exclude", ".mypr/\n")
	return w
}

func bareWorld(t testing.TB) *world {
	t.Helper()
	if _, err := exec.LookPath("git"); err != nil {
		t.Fatal("git is not in PATH; these tests need it")
	}
	home := t.TempDir()
	config := "[user]\n\tname = Ümit Test\n\temail = umit@example.org\n[protocol \"file\"]\n\tallow = always\n[core]\n\tquotePath = false\n"
	if err := os.WriteFile(home+"/.gitconfig", []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dir: t.TempDir(), env: []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "GIT_CONFIG_NOSYSTEM=1", "LC_ALL=C.UTF-8",
		"GIT_AUTHOR_DATE=2026-01-02T03:04:05+06:00", "GIT_COMMITTER_DATE=2026-01-02T03:04:05Z"}}
	if real, err := filepath.EvalSymlinks(w.dir); err == nil {
		w.dir = real
	}
	w.Service = w.at("")
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if now, _ := os.ReadDir("/proc/self/fd"); len(now) > len(entries) {
			t.Errorf("%d descriptors before, %d after", len(entries), len(now))
		}
	})
	return w
}

// at serves a directory of the world as workspace.
func (w *world) at(sub string) *Service {
	w.t.Helper()
	s, err := New(Options{Root: filepath.Join(w.dir, sub), Runner: job.Exec{}, Env: w.env})
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// git runs plain git, as a user would.
func (w *world) git(args ...string) string {
	w.t.Helper()
	out, err := w.try(args...)
	if err != nil {
		w.t.Fatalf("git %q: %v\n%s", args, err, out)
	}
	return out
}

func (w *world) try(args ...string) (string, error) {
	cmd := exec.Command("git", args...)
	cmd.Dir, cmd.Env = w.dir, w.env
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String() + errs.String(), err
	}
	return out.String(), nil
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

func (w *world) commit(message string) {
	w.t.Helper()
	w.git("add", "-A")
	w.git("commit", "-q", "--allow-empty", "-m", message)
}

func call[R any](t testing.TB, s *Service, method, params string) (R, error) {
	t.Helper()
	var r R
	v, err := s.Methods()[method](t.Context(), json.RawMessage(params))
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

func ok[R any](t testing.TB, s *Service, method, params string) R {
	t.Helper()
	r, err := call[R](t, s, method, params)
	if err != nil {
		t.Fatalf("%s %s: %v", method, params, err)
	}
	return r
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

// rich makes a repository with every kind of change between HEAD, index and work tree.
func rich(t testing.TB) *world {
	w := newWorld(t)
	sub := bareWorld(t)
	sub.git("init", "-q", "-b", "main")
	sub.put("s", "1\n")
	sub.commit("sub one")
	long := strings.Repeat("line\n", 40)
	for name, text := range map[string]string{
		"mod": "a\nb\nc\n", "staged": "a\n", "both": "a\n", "gone": "g\n", "gone-index": "g\n", "old name": long, "wt-rename": long + "x\n",
		"bin": "\x00\x01", "mode.sh": "#!/bin/sh\n", "type": "file\n", "漢/é": "unicode\n", "caf\xe9": "latin\n", "new\nline": "n\n", "quo\"te\t": "q\n",
		"conflict": "1\n2\n3\n", "dir/deep/f": "f\n", "crlf": "a\r\nb\r\n", "nonl": "no newline",
	} {
		w.put(name, text)
	}
	w.git("submodule", "--quiet", "add", sub.dir, "module")
	w.commit("base")
	w.git("checkout", "-q", "-b", "other")
	w.put("conflict", "1\ntwo\n3\n")
	w.put("theirs", "t\n")
	w.commit("other")
	w.git("checkout", "-q", "main")
	w.put("conflict", "1\nzwei\n3\n")
	w.commit("main")
	if out, err := w.try("merge", "other"); err == nil {
		t.Fatalf("no conflict: %s", out)
	}
	w.put("staged", "a\nb\n")
	w.put("both", "a\nb\n")
	w.put("added", "new\n")
	w.put("intent", "i\n")
	w.git("add", "staged", "both", "added")
	w.git("add", "-N", "intent")
	w.put("both", "a\nb\nc\n")
	w.put("mod", "a\nB\nc\n")
	w.put("bin", "\x00\x02")
	w.put("漢/é", "unicode!\n")
	w.put("caf\xe9", "lat\xefn\n")
	w.put("new\nline", "m\n")
	w.put("quo\"te\t", "r\n")
	w.put("nonl", "still no newline")
	w.put("crlf", "a\r\nc\r\n")
	w.git("mv", "old name", "new name")
	w.git("rm", "-q", "--cached", "gone-index")
	for _, err := range []error{os.Remove(w.dir + "/gone"), os.Chmod(w.dir+"/mode.sh", 0o755), os.Remove(w.dir + "/type"), os.Symlink("mod", w.dir+"/type")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	w.put("untracked/u", "u\n")
	w.put("module/s", "2\n")
	w.put("module/extra", "e\n")
	return w
}

func everyStatus(t testing.TB, s *Service, params string) (StatusResult, []FileStatus) {
	t.Helper()
	first := ok[StatusResult](t, s, "git.status", params)
	all, page := first.Files, first
	for page.HasMore {
		page = ok[StatusResult](t, s, "git.status", fmt.Sprintf(`{"cursor":%q}`, *page.NextCursor))
		all = append(all, page.Files...)
	}
	return first, all
}

func TestStatus(t *testing.T) {
	w := rich(t)
	r, files := everyStatus(t, w.Service, `{}`)
	got := map[string]FileStatus{}
	for _, f := range files {
		got[string(f.Path)] = f
	}
	for path, want := range map[string]FileStatus{
		"mod":        {Kind: "changed", Worktree: "modified"},
		"staged":     {Kind: "changed", Index: "modified"},
		"both":       {Kind: "changed", Index: "modified", Worktree: "modified"},
		"added":      {Kind: "changed", Index: "added", Modes: &Modes{"000000", "100644", "100644"}},
		"intent":     {Kind: "changed", Worktree: "added", Modes: &Modes{"000000", "000000", "100644"}},
		"gone":       {Kind: "changed", Worktree: "deleted", Modes: &Modes{"100644", "100644", "000000"}},
		"mode.sh":    {Kind: "changed", Worktree: "modified", Modes: &Modes{"100644", "100644", "100755"}},
		"type":       {Kind: "changed", Worktree: "type_changed", Modes: &Modes{"100644", "100644", "120000"}},
		"bin":        {Kind: "changed", Worktree: "modified"},
		"漢/é":        {Kind: "changed", Worktree: "modified"},
		"caf\xe9":    {Kind: "changed", Worktree: "modified"},
		"new\nline":  {Kind: "changed", Worktree: "modified"},
		"quo\"te\t":  {Kind: "changed", Worktree: "modified"},
		"new name":   {Kind: "renamed", OldPath: "old name", Index: "renamed", Similarity: 100},
		"conflict":   {Kind: "conflict", Conflict: "both_modified"},
		"theirs":     {Kind: "changed", Index: "added", Modes: &Modes{"000000", "100644", "100644"}},
		"module":     {Kind: "changed", Worktree: "modified", Submodule: &Submodule{Modified: true, Untracked: true}},
		"untracked/": {Kind: "untracked"},
	} {
		want.Path = ospath.Text(path)
		a, _ := json.Marshal(want)
		b, _ := json.Marshal(got[path])
		if string(a) != string(b) {
			t.Errorf("%s, want %s", b, a)
		}
	}
	if string(r.Root) != w.dir || *r.Branch.Head != "main" || r.Branch.Upstream != nil || r.Branch.Detached || r.Total != len(files) || r.Clean || !r.Complete {
		t.Errorf("%+v", r)
	}
	// The files are those of plain git, in its order.
	var want []string
	records := strings.Split(w.git("status", "--porcelain", "-z"), "\x00")
	for i := 0; i < len(records)-1; i++ {
		want = append(want, records[i][3:])
		if records[i][0] == 'R' {
			i++
		}
	}
	var have []string
	for _, f := range files {
		have = append(have, string(f.Path))
	}
	slices.Sort(want)
	slices.Sort(have)
	if !slices.Equal(have, want) {
		t.Errorf("%q\ngit has %q", have, want)
	}
}

func TestStatusOfBranches(t *testing.T) {
	w := newWorld(t)
	r := ok[StatusResult](t, w.Service, "git.status", `{}`)
	if r.Branch.OID != nil || *r.Branch.Head != "main" || !r.Clean {
		t.Errorf("before the first commit: %+v", r)
	}
	w.put("f", "1\n")
	w.commit("one")
	w.git("clone", "-q", ".", "clone")
	c := w.at("clone")
	w.put("f", "2\n")
	w.git("commit", "-qam", "two")
	cmd := exec.Command("sh", "-c", "git fetch -q && git commit -q --allow-empty -m a && git commit -q --allow-empty -m b && echo x > g && git stash -q -u")
	cmd.Dir, cmd.Env = w.dir+"/clone", w.env
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s", out)
	}
	r = ok[StatusResult](t, c, "git.status", `{}`)
	if *r.Branch.Upstream != "origin/main" || *r.Branch.Ahead != 2 || *r.Branch.Behind != 1 || r.Stash != 1 || string(r.Root) != w.dir+"/clone" {
		t.Errorf("%+v", r)
	}
	w.git("checkout", "-q", "--detach")
	r = ok[StatusResult](t, w.Service, "git.status", `{}`)
	if !r.Branch.Detached || r.Branch.Head != nil || len(*r.Branch.OID) != 40 {
		t.Errorf("%+v", r)
	}
}

func TestConflictKinds(t *testing.T) {
	for code, want := range map[string]string{"DD": "both_deleted", "AU": "added_by_us", "UD": "deleted_by_them", "UA": "added_by_them", "DU": "deleted_by_us", "AA": "both_added", "UU": "both_modified"} {
		if got := conflict(code); got != want {
			t.Errorf("%s: %s", code, got)
		}
	}
	w := newWorld(t)
	w.put("du", "1\n")
	w.put("ud", "1\n")
	w.commit("base")
	w.git("checkout", "-q", "-b", "other")
	w.put("du", "2\n")
	w.git("rm", "-q", "ud")
	w.put("aa", "theirs\n")
	w.commit("other")
	w.git("checkout", "-q", "main")
	w.git("rm", "-q", "du")
	w.put("ud", "2\n")
	w.put("aa", "ours\n")
	w.commit("main")
	_, _ = w.try("merge", "other")
	_, files := everyStatus(t, w.Service, `{}`)
	got := map[string]string{}
	for _, f := range files {
		got[string(f.Path)] = f.Conflict
	}
	if fmt.Sprint(got) != "map[aa:both_added du:deleted_by_us ud:deleted_by_them]" {
		t.Error(got)
	}
}

// everyDiff collects files and patch of all pages of a diff or a commit.
func everyDiff(t testing.TB, s *Service, method, params string, maxBytes int) (ShowCommit, []FileDiff, string, bool) {
	t.Helper()
	p := strings.TrimSuffix(params, "}")
	if p != "{" {
		p += ","
	}
	first := ok[ShowCommit](t, s, method, fmt.Sprintf(`%s"max_bytes":%d}`, p, maxBytes))
	page, files, patch, lossy := first, first.Files, first.Patch, first.PatchLossy
	for page.HasMore {
		page = ok[ShowCommit](t, s, method, fmt.Sprintf(`{"cursor":%q,"max_bytes":%d}`, *page.NextCursor, maxBytes))
		files, patch, lossy = append(files, page.Files...), patch+page.Patch, lossy || page.PatchLossy
	}
	return first, files, patch, lossy
}

// Patches and metadata are those of plain git, for every kind of change.
func TestDiffIsGits(t *testing.T) {
	w := rich(t)
	for params, args := range map[string][]string{
		`{}`:                                 {"diff"},
		`{"staged":true}`:                    {"diff", "--cached"},
		`{"rev":"other"}`:                    {"diff", "other"},
		`{"rev":"main~1..other"}`:            {"diff", "main~1..other"},
		`{"staged":true,"rev":"other"}`:      {"diff", "--cached", "other"},
		`{"paths":["mod","dir"]}`:            {"diff", "--", "mod", "dir"},
		`{"staged":true,"paths":"new name"}`: {"diff", "--cached", "--", "new name"},
		`{"paths":"conflict"}`:               {"diff", "--", "conflict"},
	} {
		_, files, patch, lossy := everyDiff(t, w.Service, "git.diff", params, paging.DefaultBytes)
		want := w.git(args...)
		if patch != strings.ToValidUTF8(want, "\uFFFD") {
			t.Errorf("%s: the patch is not git's:\n%s\nwant\n%s", params, patch, want)
		}
		if lossy != strings.Contains(want, "lat\xefn") {
			t.Errorf("%s: lossy %v", params, lossy)
		}
		names := strings.Split(strings.TrimSuffix(w.git(append([]string{args[0], "--name-only", "-z"}, args[1:]...)...), "\x00"), "\x00")
		var have []string
		for _, f := range files {
			have = append(have, string(f.Path))
		}
		slices.Sort(names)
		slices.Sort(have)
		if names = slices.Compact(names); !slices.Equal(have, names) {
			t.Errorf("%s: files %q, git has %q", params, have, names)
		}
	}
	_, files, _, _ := everyDiff(t, w.Service, "git.diff", `{}`, paging.DefaultBytes)
	got := map[string]FileDiff{}
	for _, f := range files {
		got[string(f.Path)] = f
	}
	if f := got["bin"]; !f.Binary || f.Additions != nil || f.Status != "modified" {
		t.Errorf("%+v", f)
	}
	if f := got["mode.sh"]; f.OldMode != "100644" || f.NewMode != "100755" || *f.Additions != 0 {
		t.Errorf("%+v", f)
	}
	if f := got["type"]; f.Status != "type_changed" || f.NewMode != "120000" {
		t.Errorf("%+v", f)
	}
	if f := got["module"]; !f.Submodule || f.NewMode != "160000" {
		t.Errorf("%+v", f)
	}
	if f := got["conflict"]; f.Parents != 2 {
		t.Errorf("%+v", f)
	}
	if f := got["mod"]; *f.Additions != 1 || *f.Deletions != 1 || len(f.OldID) != 40 {
		t.Errorf("%+v", f)
	}
	_, files, _, _ = everyDiff(t, w.Service, "git.diff", `{"staged":true,"paths":["new name","old name"]}`, paging.DefaultBytes)
	if f := files[0]; f.Status != "renamed" || f.OldPath != "old name" || f.Similarity != 100 {
		t.Errorf("%+v", f)
	}
}

func TestShowCommit(t *testing.T) {
	w := rich(t)
	w.git("add", "conflict")
	w.git("commit", "-qam", "merge: Ünïcode subject\n\nBody line 1\nBody line 2")
	w.git("tag", "-a", "v1", "-m", "tag")
	w.git("commit", "-q", "--allow-empty", "-m", "empty")
	for _, ref := range []string{"HEAD", "HEAD~1", "v1", "other", "main~2", "HEAD^^"} {
		r, files, patch, _ := everyDiff(t, w.Service, "git.show", fmt.Sprintf(`{"ref":%q}`, ref), paging.DefaultBytes)
		if want := w.git("show", "--format=", "--patch", ref+"^{commit}"); patch != strings.ToValidUTF8(strings.TrimPrefix(want, "\n"), "\uFFFD") {
			t.Errorf("%s: the patch is not git's:\n%s\nwant\n%s", ref, patch, want)
		}
		c := r.Commit
		want := strings.Split(strings.TrimSuffix(w.git("show", "-s", "--format=%H%n%T%n%P%n%an%n%ae%n%aI%n%cI", ref+"^{commit}"), "\n"), "\n")
		have := []string{c.ID, c.Tree, strings.Join(c.Parents, " "), c.Author.Name, c.Author.Email, c.Author.Time, c.Committer.Time}
		if !slices.Equal(have, want) || r.Kind != "commit" {
			t.Errorf("%s: %q, want %q", ref, have, want)
		}
		if want := w.git("show", "-s", "--format=%B", ref+"^{commit}"); c.Message+"\n" != want && c.Message != want {
			t.Errorf("%s: %q, want %q", ref, c.Message, want)
		}
		names := strings.Split(strings.TrimSuffix(w.git("show", "--format=", "--name-only", "-z", ref+"^{commit}"), "\x00"), "\x00")
		var paths []string
		for _, f := range files {
			paths = append(paths, string(f.Path))
		}
		slices.Sort(names)
		slices.Sort(paths)
		if names = slices.DeleteFunc(names, func(s string) bool { return s == "" }); !slices.Equal(paths, names) {
			t.Errorf("%s: files %q, git has %q", ref, paths, names)
		}
	}
	r := ok[ShowCommit](t, w.Service, "git.show", `{"ref":"v1"}`)
	if len(r.Commit.Parents) != 2 || r.Commit.Author.Name != "Ümit Test" || r.Commit.Author.Time != "2026-01-02T03:04:05+06:00" {
		t.Errorf("%+v", r.Commit)
	}
	def := ok[ShowCommit](t, w.Service, "git.show", `{}`)
	if strings.TrimSpace(def.Commit.Message) != "empty" || len(def.Files) != 0 || def.Patch != "" || def.HasMore {
		t.Errorf("%+v", def)
	}
}

func TestShowFile(t *testing.T) {
	w := rich(t)
	w.put("README.md", "now\n")
	w.git("add", "README.md")
	w.git("commit", "-qam", "readme")
	w.put("README.md", "later\n")
	r := ok[ShowFile](t, w.Service, "git.show", `{"ref":"HEAD","path":"README.md"}`)
	if r.Kind != "file" || r.Text != "now\n" || r.Path != "README.md" || *r.Size != 4 || r.Mode != "100644" || r.HasMore || string(r.Root) != w.dir {
		t.Errorf("%+v", r)
	}
	for path, want := range map[string]string{`漢/é`: "unicode!\n", `caf\udce9`: "lat\uFFFDn\n", `new\nline`: "m\n", `quo\"te\t`: "r\n", `crlf`: "a\r\nc\r\n", `nonl`: "still no newline"} {
		r := ok[ShowFile](t, w.Service, "git.show", `{"path":"`+path+`"}`)
		if r.Text != want || r.TextLossy != strings.Contains(want, "\uFFFD") {
			t.Errorf("%s: %q", path, r.Text)
		}
	}
	if r = ok[ShowFile](t, w.Service, "git.show", `{"path":"bin"}`); !r.Binary || r.Text != "" || *r.Size != 2 {
		t.Errorf("%+v", r)
	}
	if r = ok[ShowFile](t, w.Service, "git.show", `{"path":"type"}`); r.Kind != "symlink" || r.Text != "mod" {
		t.Errorf("%+v", r)
	}
	if r = ok[ShowFile](t, w.Service, "git.show", `{"path":"module"}`); r.Kind != "submodule" || len(r.ID) != 40 {
		t.Errorf("%+v", r)
	}
	if r = ok[ShowFile](t, w.Service, "git.show", `{"path":"dir"}`); r.Kind != "directory" || len(r.Entries) != 1 || r.Entries[0].Path != "dir/deep" || r.Entries[0].Kind != "directory" {
		t.Errorf("%+v", r)
	}
	if r = ok[ShowFile](t, w.Service, "git.show", `{"path":"."}`); r.Kind != "directory" || len(r.Entries) < 15 {
		t.Errorf("%+v", r)
	}
	if r = ok[ShowFile](t, w.Service, "git.show", fmt.Sprintf(`{"path":%q,"ref":"other"}`, w.dir+"/conflict")); r.Text != "1\ntwo\n3\n" {
		t.Errorf("%+v", r)
	}
	// A pattern is a name, not a pattern.
	_, err := call[ShowFile](t, w.Service, "git.show", `{"path":"*.md"}`)
	refused(t, err, rpc.CodeNotFound, "*.md")
	_, err = call[ShowFile](t, w.Service, "git.show", `{"path":"none","ref":"other"}`)
	refused(t, err, rpc.CodeNotFound, "none in other")
}

// The workspace may be a directory inside the repository: paths go in relative to the
// workspace and come out relative to the root.
func TestWorkspaceInARepository(t *testing.T) {
	w := newWorld(t)
	w.put("top", "1\n")
	w.put("a/b/f", "1\n")
	w.commit("one")
	w.put("top", "2\n")
	w.put("a/b/f", "2\n")
	s := w.at("a/b")
	_, files := everyStatus(t, s, `{}`)
	if len(files) != 2 || files[0].Path != "a/b/f" || files[1].Path != "top" {
		t.Errorf("%+v", files)
	}
	r := ok[DiffResult](t, s, "git.diff", `{"paths":"f"}`)
	if len(r.Files) != 1 || r.Files[0].Path != "a/b/f" || string(r.Root) != w.dir {
		t.Errorf("%+v", r)
	}
	r = ok[DiffResult](t, s, "git.diff", `{"paths":["../../top"]}`)
	if len(r.Files) != 1 || r.Files[0].Path != "top" {
		t.Errorf("%+v", r)
	}
	for path, want := range map[string]ospath.Text{"f": "a/b/f", "../../top": "top", w.dir + "/top": "top"} {
		f := ok[ShowFile](t, s, "git.show", fmt.Sprintf(`{"path":%q}`, path))
		if f.Path != want || f.Text != "1\n" {
			t.Errorf("%s: %+v", path, f)
		}
	}
	if f := ok[ShowFile](t, s, "git.show", `{"path":".."}`); f.Kind != "directory" || f.Entries[0].Path != "a/b" {
		t.Errorf("%+v", f)
	}
	_, err := call[DiffResult](t, s, "git.diff", `{"paths":"/etc/passwd"}`)
	refused(t, err, rpc.CodeInvalidRequest, "outside repository")
}

// Whatever the budget, the pages together are the whole, and no page is over its budget.
func TestPages(t *testing.T) {
	w := newWorld(t)
	for i := range 30 {
		w.put(fmt.Sprintf("dir/é%02d", i), strings.Repeat(fmt.Sprintf("line %d é漢💥\t\"x\"\n", i), 20))
	}
	w.put("wide", strings.Repeat("é\"", 3000)+"\n")
	w.commit("one " + strings.Repeat("long message é ", 300))
	for i := range 30 {
		w.put(fmt.Sprintf("dir/é%02d", i), strings.Repeat(fmt.Sprintf("zeile %d é漢💥\t\"x\"\n", i), 20))
	}
	w.put("wide", strings.Repeat("ü\"", 3000)+"\n")
	wantPatch := w.git("diff")
	wantStatus := strings.Count(w.git("status", "--porcelain"), "\n")
	wantShow := w.git("show", "--format=", "HEAD")
	text := w.git("show", "HEAD:wide")
	rapid.Check(t, func(rt *rapid.T) {
		budget := rapid.IntRange(paging.MinBytes, 9000).Draw(rt, "max_bytes")
		entries := rapid.IntRange(1, 40).Draw(rt, "max_entries")
		check := func(page any, p Pages) {
			if n, _ := paging.Size(page); n > budget {
				rt.Fatalf("a page of %d bytes for %d", n, budget)
			}
			if p.HasMore != (p.NextCursor != nil) || !p.Complete {
				rt.Fatalf("%+v", p)
			}
		}
		n := 0
		for p := (StatusParams{MaxBytes: budget, MaxEntries: entries}); ; {
			r, err := w.Status(context.Background(), p)
			if err != nil {
				rt.Fatal(err)
			}
			check(r, r.Pages)
			if len(r.Files) > entries || len(r.Files) == 0 {
				rt.Fatalf("%d files for %d", len(r.Files), entries)
			}
			if n += len(r.Files); !r.HasMore {
				break
			}
			p.Cursor = r.NextCursor
		}
		if n != wantStatus {
			rt.Fatalf("%d files of %d", n, wantStatus)
		}
		patch, files := "", 0
		for p := (DiffParams{MaxBytes: budget}); ; {
			r, err := w.Diff(context.Background(), p)
			if err != nil {
				rt.Fatal(err)
			}
			check(r, r.Pages)
			patch, files = patch+r.Patch, files+len(r.Files)
			if !r.HasMore {
				break
			}
			p.Cursor = r.NextCursor
		}
		if patch != wantPatch || files != 31 {
			rt.Fatalf("%d bytes of patch, git has %d; %d files", len(patch), len(wantPatch), files)
		}
		patch = ""
		message := false
		for p := (ShowParams{ShowQuery: ShowQuery{Ref: "HEAD"}, MaxBytes: budget}); ; {
			v, err := w.Show(context.Background(), p)
			if err != nil {
				rt.Fatal(err)
			}
			r := v.(*ShowCommit)
			check(r, r.Pages)
			if !message && (!r.Commit.MessageTruncated && len(r.Commit.Message) < 4000 || r.Commit.Message == "") {
				rt.Fatalf("message of %d bytes", len(r.Commit.Message))
			}
			message = true
			if patch += r.Patch; !r.HasMore {
				break
			}
			p.Cursor = r.NextCursor
		}
		if patch != wantShow {
			rt.Fatalf("%d bytes of patch, git has %d", len(patch), len(wantShow))
		}
		got := ""
		for p := (ShowParams{ShowQuery: ShowQuery{Ref: "HEAD", Path: ptr(ospath.Text("wide"))}, MaxBytes: budget}); ; {
			v, err := w.Show(context.Background(), p)
			if err != nil {
				rt.Fatal(err)
			}
			r := v.(*ShowFile)
			check(r, r.Pages)
			if got += r.Text; !r.HasMore {
				break
			}
			p.Cursor = r.NextCursor
			p.ShowQuery = ShowQuery{Ref: "HEAD"}
		}
		if got != text {
			rt.Fatalf("%d bytes of text, git has %d", len(got), len(text))
		}
	})
}

func ptr[T any](v T) *T { return &v }

func TestDefaults(t *testing.T) {
	w := newWorld(t)
	for i := range 250 {
		w.put(fmt.Sprintf("f%03d", i), "x")
	}
	r := ok[StatusResult](t, w.Service, "git.status", `{"max_bytes":1000000}`)
	if len(r.Files) != 200 || r.Total != 250 || !r.HasMore {
		t.Errorf("%d files", len(r.Files))
	}
	w.put("big", strings.Repeat("a line of text\n", 10_000))
	w.git("add", "-A")
	v, err := w.Diff(t.Context(), DiffParams{DiffQuery: DiffQuery{Staged: true}, MaxBytes: paging.DefaultBytes})
	if err != nil {
		t.Fatal(err)
	}
	if n, _ := paging.Size(v); n > 32768 {
		t.Errorf("%d bytes", n)
	}
	// A page may have files only: 251 of them fill more than one.
	if v.Patch != "" || len(v.Files) == 0 || !v.HasMore {
		t.Errorf("%d files and %d bytes of patch", len(v.Files), len(v.Patch))
	}
	// The budget of a page, when none is named, for each method.
	w.git("commit", "-qm", "big")
	w.put("big", strings.Repeat("another line of text\n", 10_000))
	for i := range 300 {
		w.put(fmt.Sprintf("new/%s-%d/f", strings.Repeat("x", 180), i), "x")
	}
	w.git("config", "status.showUntrackedFiles", "all")
	for _, m := range []string{`git.status {}`, `git.diff {}`, `git.show {}`, `git.show {"path":"big"}`} {
		method, params, _ := strings.Cut(m, " ")
		raw := ok[json.RawMessage](t, w.Service, method, params)
		if n := len(raw); n > 32768 || n < 30000 && method != "git.status" {
			t.Errorf("%s: a page of %d bytes", m, n)
		}
	}
	for _, m := range []string{"git.status", "git.diff", "git.show"} {
		_, err := call[any](t, w.Service, m, `{"max_bytes":1023}`)
		refused(t, err, rpc.CodeInvalidRequest, "1024")
	}
}

// Later changes do not alter an existing query, which outlives the service.
func TestSnapshots(t *testing.T) {
	w := newWorld(t)
	for i := range 20 {
		w.put(fmt.Sprintf("f%02d", i), "1\n")
	}
	w.commit("one")
	for i := range 20 {
		w.put(fmt.Sprintf("f%02d", i), "2\n")
	}
	s1 := ok[StatusResult](t, w.Service, "git.status", `{"max_entries":5}`)
	d1 := ok[DiffResult](t, w.Service, "git.diff", `{"max_bytes":1024}`)
	w.git("checkout", "-q", ".")
	w.env = append(w.env, "PATH=/nowhere") // git is not needed any more
	s := w.at("")
	s2 := ok[StatusResult](t, s, "git.status", fmt.Sprintf(`{"cursor":%q}`, *s1.NextCursor))
	if len(s2.Files) != 15 || s2.Files[0].Path != "f05" || s2.HasMore || s2.Total != 20 {
		t.Errorf("%+v", s2)
	}
	d2 := ok[DiffResult](t, s, "git.diff", fmt.Sprintf(`{"cursor":%q,"max_bytes":1000000}`, *d1.NextCursor))
	if !strings.HasSuffix(d1.Patch+d2.Patch, "-1\n+2\n") || d2.HasMore {
		t.Errorf("%q", d2.Patch)
	}
	_, err := call[DiffResult](t, s, "git.diff", fmt.Sprintf(`{"staged":true,"cursor":%q}`, *d1.NextCursor))
	refused(t, err, paging.CodeInvalidCursor, "staged")
	_, err = call[any](t, s, "git.show", fmt.Sprintf(`{"cursor":%q}`, *d1.NextCursor))
	refused(t, err, paging.CodeInvalidCursor, "ws.git.diff")
	_, err = call[any](t, s, "git.status", `{}`)
	refused(t, err, CodeDependency, "git")
}

// Nothing that a repository's configuration names is run, and nothing is written to it.
func TestNothingOfTheRepositoryRuns(t *testing.T) {
	w := newWorld(t)
	w.put("f.txt", "1\n")
	w.put("pic.bin", "\x00\x01")
	w.put(".gitattributes", "*.txt diff=evil\n*.bin diff=evil\n")
	sub := bareWorld(t)
	sub.git("init", "-q", "-b", "main")
	sub.put("s.txt", "1\n")
	sub.commit("sub")
	w.git("submodule", "--quiet", "add", sub.dir, "module")
	w.commit("one")
	proof := t.TempDir()
	script := func(name string) string {
		p := filepath.Join(proof, "run-"+name)
		if err := os.WriteFile(p, []byte("#!/bin/sh\ntouch "+proof+"/ran-"+name+"\ncat \"$1\" 2>/dev/null\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for key, value := range map[string]string{
		"core.pager": script("pager"), "pager.diff": script("pager-diff"), "pager.status": script("pager-status"), "pager.show": script("pager-show"),
		"diff.external": script("external"), "diff.evil.command": script("driver"), "diff.evil.textconv": script("textconv"), "diff.evil.cachetextconv": "true",
		"core.fsmonitor": script("fsmonitor"), "core.editor": script("editor"), "gpg.program": script("gpg"), "log.showSignature": "true",
		"core.hooksPath": proof, "core.sshCommand": script("ssh"), "color.ui": "always", "color.diff": "always", "color.status": "always",
		"diff.noprefix": "true", "diff.mnemonicPrefix": "true", "status.relativePaths": "true", "status.short": "true", "diff.relative": "true",
		"core.askPass": script("askpass"), "interactive.diffFilter": script("filter"), "diff.submodule": "log", "alias.status": "!" + script("alias"),
		"status.submoduleSummary": "true", "format.pretty": "oneline", "log.decorate": "full", "diff.renames": "copies", "core.quotePath": "true", "log.date": "relative",
	} {
		w.git("config", key, value)
	}
	w.git("-C", "module", "config", "core.fsmonitor", script("sub-fsmonitor"))
	w.put("module/s.txt", "2\n")
	for _, h := range []string{"post-index-change", "pre-commit", "fsmonitor-watchman", "query-watchman", "post-checkout"} {
		if err := os.Symlink(script(h), filepath.Join(proof, h)); err != nil {
			t.Fatal(err)
		}
	}
	w.env = append(w.env, "GIT_EXTERNAL_DIFF="+script("env-external"), "GIT_PAGER="+script("env-pager"), "PAGER="+script("env-pager2"), "GIT_DIR=/nonexistent",
		"GIT_INDEX_FILE=/nonexistent", "GIT_TRACE="+proof+"/ran-trace", "GIT_SSH_COMMAND="+script("env-ssh"))
	s := w.at("")
	w.put("f.txt", "2\n")
	w.put("pic.bin", "\x00\x02")
	before := fingerprint(t, w.dir+"/.git")
	st := ok[StatusResult](t, s, "git.status", `{}`)
	d := ok[DiffResult](t, s, "git.diff", `{}`)
	c := ok[ShowCommit](t, s, "git.show", `{}`)
	f := ok[ShowFile](t, s, "git.show", `{"path":"f.txt"}`)
	if ran, _ := filepath.Glob(proof + "/ran-*"); len(ran) != 0 {
		t.Errorf("were run: %v", ran)
	}
	if after := fingerprint(t, w.dir+"/.git"); after != before {
		t.Error("the repository was written to")
	}
	if strings.Contains(d.Patch+c.Patch, "\x1b") || !strings.Contains(d.Patch, "--- a/f.txt\n+++ b/f.txt\n") || len(d.Files) != 3 || f.Text != "1\n" || st.Total != 3 {
		t.Errorf("%q", d.Patch)
	}
	if !strings.Contains(d.Patch, "Binary files a/pic.bin and b/pic.bin differ") {
		t.Errorf("%q", d.Patch)
	}
}

// fingerprint is every file of a tree with its content and times.
func fingerprint(t testing.TB, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		fmt.Fprintln(&b, path, info.Mode(), info.ModTime(), info.Size())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestRefusals(t *testing.T) {
	w := bareWorld(t)
	for _, m := range []string{"git.status", "git.diff", "git.show"} {
		_, err := call[any](t, w.Service, m, `{}`)
		refused(t, err, rpc.CodeNotFound, "not in a git repository", "git init")
	}
	w = newWorld(t)
	_, err := call[any](t, w.Service, "git.show", `{}`)
	refused(t, err, rpc.CodeNotFound, "no such revision", "without commits")
	w.put("f", "1\n")
	w.commit("one")
	for params, say := range map[string]string{
		`{"ref":"-p"}`:           "begin with -",
		`{"ref":""}`:             "empty",
		`{"ref":"a\u0000b"}`:     "no revision",
		`{"path":""}`:            "empty",
		`{"path":"a\u0000b"}`:    "NUL",
		`{"max_bytes":16777217}`: "max_bytes",
		`{"revision":"HEAD"}`:    "revision",
		`{"path":["f"]}`:         "string",
	} {
		_, err := call[any](t, w.Service, "git.show", params)
		refused(t, err, rpc.CodeInvalidRequest, say)
	}
	for params, say := range map[string]string{
		`{"rev":"--output=/tmp/x"}`: "begin with -", `{"paths":[]}`: "empty", `{"paths":"a\u0000"}`: "NUL", `{"staged":1}`: "staged",
	} {
		_, err := call[any](t, w.Service, "git.diff", params)
		refused(t, err, rpc.CodeInvalidRequest, say)
	}
	for _, params := range []string{`{"ref":"nosuch"}`, `{"ref":"HEAD~9"}`, `{"ref":"HEAD:f"}`, `{"ref":"nosuch","path":"f"}`, `{"ref":"1234567890123456789012345678901234567890"}`} {
		_, err := call[any](t, w.Service, "git.show", params)
		if c := rpc.CodeOf(err); c != rpc.CodeNotFound && c != CodeDamaged {
			t.Errorf("%s: %v", params, err)
		}
	}
	_, err = call[any](t, w.Service, "git.diff", `{"rev":"nosuch"}`)
	refused(t, err, rpc.CodeNotFound, "nosuch")
	_, err = call[any](t, w.Service, "git.status", `{"max_entries":0}`)
	refused(t, err, rpc.CodeInvalidRequest, "max_entries")
}

func TestBareRepository(t *testing.T) {
	w := newWorld(t)
	w.put("d/f", "1\n")
	w.commit("one")
	w.git("clone", "-q", "--bare", ".", "bare.git")
	s := w.at("bare.git")
	_, err := call[any](t, s, "git.status", `{}`)
	refused(t, err, rpc.CodeInvalidRequest, "bare", "ws.git.show")
	r := ok[ShowCommit](t, s, "git.show", `{}`)
	if strings.TrimSpace(r.Commit.Message) != "one" || string(r.Root) != w.dir+"/bare.git" || len(r.Files) != 1 {
		t.Errorf("%+v", r)
	}
	f := ok[ShowFile](t, s, "git.show", `{"path":"d/f"}`)
	if f.Text != "1\n" || f.Path != "d/f" {
		t.Errorf("%+v", f)
	}
}

func TestDamagedRepository(t *testing.T) {
	w := newWorld(t)
	w.put("f", "content of f\n")
	w.commit("one")
	blob := strings.TrimSpace(w.git("rev-parse", "HEAD:f"))
	object := w.dir + "/.git/objects/" + blob[:2] + "/" + blob[2:]
	if err := os.Chmod(object, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(object, []byte("rubbish"), 0o644); err != nil {
		t.Fatal(err)
	}
	w.put("f", "other\n")
	for _, c := range []string{`git.show {"path":"f"}`, `git.show {}`, `git.diff {}`} {
		method, params, _ := strings.Cut(c, " ")
		_, err := call[any](t, w.Service, method, params)
		refused(t, err, CodeDamaged, "fsck")
	}
	if err := os.WriteFile(w.dir+"/.git/index", []byte("rubbish rubbish rubbish rubbish"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := call[any](t, w.Service, "git.status", `{}`)
	refused(t, err, CodeDamaged, "fsck")
	if err := os.WriteFile(w.dir+"/.git/config", []byte("[core\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = call[any](t, w.Service, "git.status", `{}`)
	refused(t, err, CodeDamaged, "config")
}

func TestSafeDirectory(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes a repository of another user: run it as root")
	}
	w := newWorld(t)
	w.put("f", "1\n")
	w.commit("one")
	err := filepath.WalkDir(w.dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, 65534, 65534)
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []string{"git.status", "git.diff", "git.show"} {
		_, err := call[any](t, w.Service, m, `{}`)
		refused(t, err, rpc.CodePermission, w.dir, "belongs to another user", "safe.directory")
	}
}

// git ends with the call that wanted it.
func TestCancel(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	fifo := dir + "/fifo"
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	// A git that opens a FIFO: the test knows that it runs when the other end opens.
	if err := os.WriteFile(dir+"/git", []byte("#!/bin/sh\nexec 3>"+fifo+"\nexec sleep 1000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	w.env = append(w.env, "PATH="+dir+":"+os.Getenv("PATH"))
	s := w.at("")
	ctx, cancel := context.WithCancel(t.Context())
	opened := make(chan *os.File, 1)
	go func() {
		f, _ := os.Open(fifo)
		cancel()
		opened <- f
	}()
	_, err := s.Status(ctx, StatusParams{MaxEntries: 1, MaxBytes: 1024})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	f := <-opened
	defer f.Close()
	if _, err := f.Read(make([]byte, 1)); err == nil { // end of file: nobody holds it open any more
		t.Error("something was written")
	}
}

// 100,000 files: the whole status is in the pages, and it takes about as long as git.
func TestHundredThousandFiles(t *testing.T) {
	w := newWorld(t)
	dir, err := os.MkdirTemp("/dev/shm", "repo") // on a disk, making them takes a minute
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	w.dir = dir
	w.git("init", "-q", "-b", "main")
	for i := range 100_000 {
		if i%1000 == 0 {
			if err := os.Mkdir(fmt.Sprintf("%s/d%03d", dir, i/1000), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		fd, err := syscall.Open(fmt.Sprintf("%s/d%03d/file-%05d.txt", dir, i/1000, i), syscall.O_CREAT|syscall.O_WRONLY, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		syscall.Close(fd)
	}
	w.git("add", "-A")
	s := w.at("")
	params := `{"max_entries":10000,"max_bytes":4000000}`
	n := 0
	for {
		r := ok[StatusResult](t, s, "git.status", params)
		if r.Total != 100_000 || !r.Complete {
			t.Fatalf("%d files", r.Total)
		}
		if n += len(r.Files); !r.HasMore {
			break
		}
		params = fmt.Sprintf(`{"cursor":%q,"max_entries":10000,"max_bytes":4000000}`, *r.NextCursor)
	}
	if n != 100_000 {
		t.Errorf("%d files on the pages", n)
	}
}

func TestOutputIsBounded(t *testing.T) {
	l := &limited{max: 10}
	if n, err := l.Write([]byte("12345678")); n != 8 || err != nil {
		t.Error(n, err)
	}
	if _, err := l.Write([]byte("9abc")); err == nil || l.buf.String() != "123456789a" || !l.cut {
		t.Error(err, l.buf.String())
	}
	// What is cut in the middle of a record is used up to there.
	d, err := parseDiff([]byte(":100644 100644 a b M\x00f\x00:100644 100644 a b M\x00g"), true)
	if err != nil || len(d.files) != 1 {
		t.Error(d, err)
	}
	if _, err := parseDiff([]byte(":100644 100644 a b M\x00f\x00:100644 100644 a b M\x00g"), false); err == nil {
		t.Error("a cut record was accepted")
	}
}

// A diff larger than a snapshot says that it is not complete.
func TestHugeDiff(t *testing.T) {
	w := newWorld(t)
	w.put("big", "")
	w.commit("one")
	w.put("big", strings.Repeat(strings.Repeat("x", 127)+"\n", 560_000)) // 68 MiB
	r := ok[DiffResult](t, w.Service, "git.diff", `{}`)
	if r.Complete || len(r.Files) != 1 || r.Patch == "" || !strings.Contains(strings.Join(r.Warnings, " "), "narrow it with paths") {
		t.Errorf("%v %d %q", r.Complete, len(r.Files), r.Warnings)
	}
	w.git("add", "-A")
	w.git("commit", "-qm", "two")
	_, err := call[any](t, w.Service, "git.show", `{"path":"big"}`)
	refused(t, err, rpc.CodeTooLarge, "cat-file")
}

func FuzzStatus(f *testing.F) {
	f.Add([]byte("# branch.oid (initial)\x00# branch.head main\x001 M. N... 100644 100644 100644 a b f\x002 R. N... 100644 100644 100644 a b R100 new\x00old\x00u UU N... 1 2 3 4 a b c f\x00? x\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, cut := range []bool{false, true} {
			var m statusMeta
			rows, err := parseStatus(data, cut, &m)
			if err == nil && bytes.Count(rows, []byte("\n")) != m.Total {
				t.Fatalf("%d rows, total %d", bytes.Count(rows, []byte("\n")), m.Total)
			}
		}
	})
}

func FuzzDiff(f *testing.F) {
	f.Add([]byte(":100644 100644 a b R098\x00a\x00b\x00::100644 100644 100644 a b c MM\x00c\x00" + "1\t2\t\x00a\x00b\x00-\t-\tc\x00\x00diff --git a/a b/b\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, cut := range []bool{false, true} {
			if d, err := parseDiff(data, cut); err == nil && !bytes.HasSuffix(data, d.patch) {
				t.Fatal("the patch is not the rest")
			}
		}
		_, _ = parseTree(data)
	})
}
