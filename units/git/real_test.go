package git

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mypr/internal/paging"
)

// realRepositories are a clone of this project, and a repository of a part of Go's source
// (over 100,000 lines): code as people write it, with histories of their own.
func realRepositories(t *testing.T) map[string]*world {
	t.Helper()
	project := bareWorld(t)
	top, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	// Of a source archive there is no history: then only Go's source counts.
	_, err = os.Stat(filepath.Join(top, ".git"))
	cloned := err == nil
	if cloned {
		project.git("clone", "-q", "--shared", "--", top, project.dir)
	}
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	goSource := newWorld(t)
	src := filepath.Join(strings.TrimSpace(string(out)), "src")
	for _, part := range []string{"net", "go", "encoding", "os"} {
		if err := os.CopyFS(filepath.Join(goSource.dir, part), os.DirFS(filepath.Join(src, part))); err != nil {
			t.Fatal(err)
		}
	}
	goSource.commit("one")
	all := map[string]*world{"Go": goSource}
	if cloned {
		all["this project"] = project
	}
	return all
}

// What status, diff and show say of real repositories is what git says.
func TestRealRepositories(t *testing.T) {
	for name, w := range realRepositories(t) {
		// Every eleventh file is changed, in one of six ways.
		var files []string
		lines := 0
		err := filepath.WalkDir(w.dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() && d.Name() == ".git" {
				return filepath.SkipDir
			}
			if err == nil && d.Type().IsRegular() {
				files = append(files, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for i, path := range files {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			lines += strings.Count(string(b), "\n")
			rel, _ := filepath.Rel(w.dir, path)
			switch i % 66 {
			case 0:
				w.put(rel, "a line before\n"+string(b))
			case 11:
				w.put(rel, string(b[:len(b)/2]))
			case 22:
				w.git("rm", "-q", "--", rel)
			case 33:
				w.git("mv", "--", rel, rel+" moved")
			case 44:
				w.put(rel, string(b)+"staged\n")
				w.git("add", "--", rel)
				w.put(rel, string(b)+"staged\nand more\n")
			case 55:
				w.put(rel+".new", "new\n")
				if err := os.Chmod(path, 0o755); err != nil {
					t.Fatal(err)
				}
			}
		}
		_, got := everyStatus(t, w.Service, `{"max_entries":50,"max_bytes":4096}`)
		var have []string
		for _, f := range got {
			have = append(have, string(f.Path))
		}
		var want []string
		records := strings.Split(w.git("status", "--porcelain=v2", "-z", "--untracked-files=normal"), "\x00")
		for i := 0; i < len(records); i++ {
			switch r := records[i]; {
			case r == "":
			case r[0] == '1':
				want = append(want, strings.SplitN(r, " ", 9)[8])
			case r[0] == '2':
				want = append(want, strings.SplitN(r, " ", 10)[9])
				i++ // the name before
			case r[0] == '?':
				want = append(want, r[2:])
			default:
				t.Fatalf("%s: %q", name, r)
			}
		}
		slices.Sort(have)
		slices.Sort(want)
		if !slices.Equal(have, want) || len(have) < 20 {
			t.Errorf("%s: status has %d files, git %d", name, len(have), len(want))
		}
		for params, args := range map[string][]string{
			`{}`: {"diff"}, `{"staged":true}`: {"diff", "--cached"}, `{"rev":"HEAD"}`: {"diff", "HEAD"},
		} {
			_, changed, patch, _ := everyDiff(t, w.Service, "git.diff", params, paging.DefaultBytes)
			if patch != strings.ToValidUTF8(w.git(args...), "\uFFFD") {
				t.Errorf("%s: the patch of diff %s is not git's", name, params)
			}
			if n := strings.Count(w.git(append([]string{"diff", "--name-only", "-z"}, args[1:]...)...), "\x00"); n != len(changed) {
				t.Errorf("%s: diff %s names %d files, git %d", name, params, len(changed), n)
			}
		}
		commits := strings.Fields(w.git("rev-list", "-n", "15", "--no-merges", "HEAD"))
		for _, c := range commits {
			page, _, patch, _ := everyDiff(t, w.Service, "git.show", fmt.Sprintf(`{"ref":%q}`, c), 1<<20)
			if page.Commit.ID != c || page.Commit.Message == "" || !strings.HasPrefix(w.git("log", "-1", "--format=%B", c), page.Commit.Message) {
				t.Errorf("%s: %s is shown as %+v", name, c, page.Commit)
			}
			if patch != strings.ToValidUTF8(w.git("show", "--format=", c), "\uFFFD") {
				t.Errorf("%s: the patch of %s is not git's", name, c)
			}
		}
		t.Logf("%s: %d lines in %d files, %d changed, %d commits", name, lines, len(files), len(have), len(commits))
		if name == "Go" && lines < 100_000 {
			t.Errorf("only %d lines", lines)
		}
	}
}
