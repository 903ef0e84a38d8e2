package files

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

const examplePatch = `*** Begin Patch
*** Add File: notes/new.txt
+Created from Python.
*** Update File: notes/old.txt
*** Move to: notes/renamed.txt
@@
-Before
+After
*** Delete File: notes/obsolete.txt
*** End Patch
`

func TestApplyPatchExample(t *testing.T) {
	s, dir := newService(t)
	before := map[string]string{"notes/old.txt": "Title\nBefore\nEnd\n", "notes/obsolete.txt": "gone\n"}
	for name, text := range before {
		put(t, dir+"/"+name, text)
	}
	dry, err := s.ApplyPatch(t.Context(), ApplyPatchParams{Patch: examplePatch, DryRun: true, MaxDiffBytes: 32768})
	if err != nil {
		t.Fatal(err)
	}
	if !sameTree(readTree(t, dir), before) {
		t.Fatal("dry_run changed something")
	}
	r, err := s.ApplyPatch(t.Context(), ApplyPatchParams{Patch: examplePatch, MaxDiffBytes: 32768})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"notes/new.txt": "Created from Python.\n", "notes/renamed.txt": "Title\nAfter\nEnd\n"}
	if got := readTree(t, dir); !sameTree(got, want) {
		t.Errorf("%v", got)
	}
	changes, _ := json.Marshal(r.Files)
	wantChanges, _ := json.Marshal([]FileChange{
		{Path: "notes/new.txt", Action: "add", NewRevision: ptr(sha("Created from Python.\n")), Added: 1},
		{Path: "notes/renamed.txt", Action: "move", From: "notes/old.txt", OldRevision: ptr(sha("Title\nBefore\nEnd\n")), NewRevision: ptr(sha("Title\nAfter\nEnd\n")), Added: 1, Removed: 1},
		{Path: "notes/obsolete.txt", Action: "delete", OldRevision: ptr(sha("gone\n")), Removed: 1},
	})
	if string(changes) != string(wantChanges) {
		t.Errorf("%s\nwant %s", changes, wantChanges)
	}
	diff := `--- /dev/null
+++ b/notes/new.txt
@@ -0,0 +1 @@
+Created from Python.
rename from notes/old.txt
rename to notes/renamed.txt
--- a/notes/old.txt
+++ b/notes/renamed.txt
@@ -1,3 +1,3 @@
 Title
-Before
+After
 End
--- a/notes/obsolete.txt
+++ /dev/null
@@ -1 +0,0 @@
-gone
`
	if r.Diff != diff || dry.Diff != diff || r.DiffTruncated || !dry.DryRun || r.DryRun {
		t.Errorf("%s", r.Diff)
	}
}

func body(lines ...string) string {
	return "*** Begin Patch\n" + strings.Join(lines, "\n") + "\n*** End Patch\n"
}

func update(path string, lines ...string) string {
	return body(append([]string{"*** Update File: " + path}, lines...)...)
}

func TestApplyPatchCases(t *testing.T) {
	const text = "class A:\n    def f():\n        return 1\n\nclass B:\n    def f():\n        return 1\n"
	for _, c := range []struct {
		name, before, patch, after, code string
		say                              []string
	}{
		{"anchor", text, update("f", "@@ class B:", "     def f():", "-        return 1", "+        return 2"), text[:len(text)-2] + "2\n", "", nil},
		{"two anchors", text, update("f", "@@ class B:", "@@     def f():", "-        return 1", "+        return 2"), text[:len(text)-2] + "2\n", "", nil},
		{"ambiguous", text, update("f", "@@", "-        return 1", "+        return 2"), "", CodeAmbiguous, []string{"lines 3 and 7", "anchor", "nothing was changed"}},
		{"ambiguous anchor", text, update("f", "@@     def f():", "-        return 1", "+        return 2"), "", CodeAmbiguous, []string{"lines 2 and 6"}},
		{"anchor missing", text, update("f", "@@ class C:", "-        return 1", "+        return 2"), "", CodeNoMatch, []string{"class C:"}},
		{"order makes it unique", text, update("f", "@@ class B:", "+    x = 1", "@@", "-        return 1", "+        return 2"),
			"class A:\n    def f():\n        return 1\n\nclass B:\n    x = 1\n    def f():\n        return 2\n", "", nil},
		{"hunks out of order", "a\nb\nc\nd\n", update("f", "@@", "-c", "+C", "@@", "-a", "+A"), "", CodeNoMatch, []string{"on line 1", "order"}},
		{"end of file", "a\nx\nb\nx\n", update("f", "@@", "-x", "+y", "*** End of File"), "a\nx\nb\ny\n", "", nil},
		{"append", "a\n", update("f", "@@", "+b", "*** End of File"), "a\nb\n", "", nil},
		{"not at the end", "a\nb\n", update("f", "@@", "-a", "+A", "*** End of File"), "", CodeNoMatch, []string{"does not end"}},
		{"end of file is last", "a\nb\n", update("f", "@@", "-b", "+B", "*** End of File", "@@", "-a", "+A"), "", rpc.CodeInvalidRequest, []string{"line 7", "End of File"}},
		{"only adds", "a\nb\n", update("f", "@@", "+c"), "", CodeAmbiguous, []string{"where"}},
		{"adds after an anchor", "a\nb\n", update("f", "@@ a", "+c"), "a\nc\nb\n", "", nil},
		{"fills an empty file", "", update("f", "@@", "+a", "+b"), "a\nb\n", "", nil},
		{"empties a file", "a\nb\n", update("f", "@@", "-a", "-b"), "", "", nil},
		{"first @@ left out", "a\nb\n", update("f", " a", "-b", "+c"), "a\nc\n", "", nil},
		{"white space", "\ta\n", update("f", "@@", "-    a", "+b"), "", CodeNoMatch, []string{"line 1", "white space"}},
		{"missing", "a\n", update("f", "@@", "-q", "+b"), "", CodeNoMatch, []string{"line 3 of the patch"}},
		{"empty line is context", "a\n\nb\n", update("f", "@@", " a", "", "-b", "+c"), "a\n\nc\n", "", nil},
		{"empty line at the end is none", "a\nb\n", update("f", "@@", "-a", "+c", "", "*** Add File: g", "+g", ""), "c\nb\n", "", nil},
		{"no newline at the end", "a\nb", update("f", "@@", "-b", "+c", "+d"), "a\nc\nd", "", nil},
		{"CRLF", "a\r\nb\r\n", update("f", "@@", " a", "-b", "+c", "+d"), "a\r\nc\r\nd\r\n", "", nil},
		{"CRLF in both", "a\r\nb\r\n", strings.ReplaceAll(update("f", "@@", " a", "-b", "+c"), "\n", "\r\n"), "a\r\nc\r\n", "", nil},
		{"CRLF patch of an LF file", "a\nb\n", strings.ReplaceAll(update("f", "@@", " a", "-b", "+c"), "\n", "\r\n"), "a\nc\n", "", nil},
		{"mixed line ends", "a\r\nb\nc\n", update("f", "@@", "-b", "+B"), "a\r\nB\nc\n", "", nil},
		{"byte order mark", "\uFEFFa\nb\n", update("f", "@@", "-a", "+c"), "\uFEFFc\nb\n", "", nil},
		{"move alone", "a\n", update("f", "*** Move to: sub/g"), "", "", nil},
		{"spaces around the path", "a\n", update("  f ", "@@", "-a", "+b"), "b\n", "", nil},
		{"text around", "a\n", "\n\n" + update("f", "@@", "-a", "+b") + "\n \n", "b\n", "", nil},
		{"nothing changes", "a\n", update("f", "@@", "-a", "+a"), "a\n", "", nil},

		{"no begin", "a\n", "hello\n", "", rpc.CodeInvalidRequest, []string{"line 1", "Begin Patch"}},
		{"a diff of git", "a\n", "diff --git a/f b/f\n", "", rpc.CodeInvalidRequest, []string{"Begin Patch", "\"git\", \"apply\""}},
		{"no end", "a\n", strings.TrimSuffix(update("f", "@@", "-a", "+b"), "*** End Patch\n"), "", rpc.CodeInvalidRequest, []string{"End Patch", "cut off"}},
		{"empty", "a\n", " \n", "", rpc.CodeInvalidRequest, []string{"empty"}},
		{"no section", "a\n", body(), "", rpc.CodeInvalidRequest, []string{"no file"}},
		{"stray text", "a\n", body("hello"), "", rpc.CodeInvalidRequest, []string{"line 2", "hello"}},
		{"no name", "a\n", body("*** Delete File: "), "", rpc.CodeInvalidRequest, []string{"names no file"}},
		{"no hunk", "a\n", update("f"), "", rpc.CodeInvalidRequest, []string{"no hunk"}},
		{"hunk of context", "a\n", update("f", "@@", " a"), "", rpc.CodeInvalidRequest, []string{"changes nothing"}},
		{"second hunk without @@", "a\n", update("f", "@@", "-a", "+b", "x"), "", rpc.CodeInvalidRequest, []string{"line 6"}},
		{"line numbers", "a\n", update("f", "@@ -1,2 +1,2 @@", "-a", "+b"), "", rpc.CodeInvalidRequest, []string{"line numbers"}},
		{"anchor without a space", "a\n", update("f", "@@a", "-a", "+b"), "", rpc.CodeInvalidRequest, []string{"space"}},
		{"add without plus", "a\n", body("*** Add File: g", "x"), "", rpc.CodeInvalidRequest, []string{"line 3", "+"}},
		{"twice", "a\n", body("*** Delete File: f", "*** Add File: ./f", "+x"), "", rpc.CodeInvalidRequest, []string{"named twice"}},
		{"moved onto itself", "a\n", update("f", "*** Move to: f"), "", rpc.CodeInvalidRequest, []string{"named twice"}},
		{"add what is there", "a\n", body("*** Add File: f", "+x"), "", rpc.CodeConflict, []string{"exists"}},
		{"move onto a file", "a\n", update("f", "*** Move to: other"), "", rpc.CodeConflict, []string{"other", "exists"}},
		{"update what is not there", "a\n", update("none", "@@", "-a", "+b"), "", rpc.CodeNotFound, []string{"none"}},
		{"delete what is not there", "a\n", body("*** Delete File: none"), "", rpc.CodeNotFound, nil},
		{"file and directory", "a\n", body("*** Add File: x", "+1", "*** Add File: x/y", "+1"), "", rpc.CodeInvalidRequest, []string{"both a file and a directory"}},
		{"below a file", "a\n", body("*** Add File: f/y", "+1"), "", rpc.CodeInvalidRequest, []string{"not a directory"}},
		{"one bad hunk spoils all", "a\n", body("*** Add File: g", "+x", "*** Update File: f", "@@", "-q", "+b"), "", CodeNoMatch, nil},
		{"NUL", "a\n", body("*** Delete File: f\x00"), "", rpc.CodeInvalidRequest, []string{"NUL"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, dir := newService(t)
			put(t, dir+"/f", c.before)
			put(t, dir+"/other", "o\n")
			tree := readTree(t, dir)
			for _, dry := range []bool{true, false} {
				_, err := s.ApplyPatch(t.Context(), ApplyPatchParams{Patch: ospath.Text(c.patch), DryRun: dry})
				if c.code != "" {
					refused(t, err, c.code, c.say...)
				} else if err != nil {
					t.Fatal(err)
				}
				if (dry || c.code != "") && !sameTree(readTree(t, dir), tree) {
					t.Fatalf("changed: %v", readTree(t, dir))
				}
			}
			if c.code != "" {
				return
			}
			if c.name == "move alone" {
				if get(t, dir+"/sub/g") != "a\n" {
					t.Error(readTree(t, dir))
				}
				return
			}
			if got := get(t, dir+"/f"); got != c.after {
				t.Errorf("%q\nwant %q", got, c.after)
			}
		})
	}
}

func TestExpectedHashes(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/f", "a\n")
	apply := func(hashes string) error {
		_, err := call[dict](t, s, "fs.apply_patch", `{"patch":"*** Begin Patch\n*** Update File: f\n*** Move to: g\n@@\n-a\n+b\n*** End Patch","expected_hashes":`+hashes+`,"dry_run":true}`)
		return err
	}
	if err := apply(`{"f":"` + sha("a\n") + `","./g":null}`); err != nil {
		t.Error(err)
	}
	refused(t, apply(`{"f":"`+sha("b\n")+`"}`), rpc.CodeConflict, "f has changed")
	refused(t, apply(`{"f":null}`), rpc.CodeConflict, "f exists")
	refused(t, apply(`{"g":"`+sha("b\n")+`"}`), rpc.CodeConflict, "g does not exist")
	refused(t, apply(`{"other":null}`), rpc.CodeInvalidRequest, "other", "does not touch")
	refused(t, apply(`{"f":"zz"}`), rpc.CodeInvalidRequest, "64 hex digits")
}

// model is a random tree and a patch of it, with what the tree must become: the
// reference changes line lists by position and never matches text.
type model struct {
	before, after map[string]string
	patch         string
}

var lineGen = rapid.Custom(func(t *rapid.T) string {
	return rapid.SampledFrom([]string{"", "a", "b", "  a", "é漢", "💥", "}", "return", "@@", "*** x", "+1", "-1", " "}).Draw(t, "line")
})

func drawModel(t *rapid.T) model {
	m := model{before: map[string]string{}, after: map[string]string{}}
	var p strings.Builder
	p.WriteString("*** Begin Patch\n")
	n := rapid.IntRange(1, 6).Draw(t, "files")
	sections := 0
	for i := range n {
		name := fmt.Sprintf("%s/f%d", rapid.SampledFrom([]string{".", "d", "d/e", "漢"}).Draw(t, "dir"), i)
		lines := rapid.SliceOfN(lineGen, 0, 25).Draw(t, "lines")
		end := rapid.SampledFrom([]string{"\n", "\n", "\r\n"}).Draw(t, "line end")
		if len(lines) == 0 {
			end = "\n" // nothing shows another
		}
		mark := rapid.SampledFrom([]string{"", "", "\uFEFF"}).Draw(t, "mark")
		// A lone line without a newline, or CRLF that no line shows, are other tests'.
		final := rapid.Bool().Draw(t, "final newline") || len(lines) <= 1 || end != "\n"
		join := func(lines []string) string {
			if len(lines) == 0 {
				return mark
			}
			s := mark + strings.Join(lines, end)
			if final {
				s += end
			}
			return s
		}
		// Without a final newline, an empty last line cannot be told from one.
		if !final && lines[len(lines)-1] == "" {
			lines[len(lines)-1] = "x"
		}
		action := rapid.SampledFrom([]string{"add", "delete", "update", "update", "update", "move", "leave"}).Draw(t, "action")
		clean := filepath.Clean(name)
		switch action {
		case "leave":
			m.before[clean], m.after[clean] = join(lines), join(lines)
		case "add":
			fmt.Fprintf(&p, "*** Add File: %s\n", name)
			text := ""
			for _, l := range lines {
				p.WriteString("+" + l + "\n")
				text += l + "\n"
			}
			m.after[clean] = text
			sections++
		case "delete":
			fmt.Fprintf(&p, "*** Delete File: %s\n", name)
			m.before[clean] = join(lines)
			sections++
		default:
			hunks, changed := drawHunks(t, lines, !final)
			m.before[clean] = join(lines)
			to := clean
			if action == "move" {
				to = fmt.Sprintf("moved/m%d", i)
			}
			if hunks == "" && action == "update" {
				m.after[clean] = join(lines)
				continue
			}
			fmt.Fprintf(&p, "*** Update File: %s\n", name)
			if action == "move" {
				fmt.Fprintf(&p, "*** Move to: %s\n", to)
			}
			p.WriteString(hunks)
			m.after[to] = join(changed)
			sections++
		}
	}
	if sections == 0 {
		p.WriteString("*** Add File: extra\n+x\n")
		m.after["extra"] = "x\n"
	}
	p.WriteString("*** End Patch\n")
	m.patch = p.String()
	return m
}

// drawHunks changes some ranges of lines and describes each with as much context as
// makes it unique after the hunk before it.
func drawHunks(t *rapid.T, lines []string, keepLast bool) (string, []string) {
	var p strings.Builder
	var out []string
	at := 0 // lines before it are done
	for range rapid.IntRange(1, 3).Draw(t, "hunks") {
		if at >= len(lines) && len(lines) > 0 {
			break
		}
		start := rapid.IntRange(at, len(lines)).Draw(t, "start")
		stop := rapid.IntRange(start, min(len(lines), start+4)).Draw(t, "stop")
		repl := rapid.SliceOfN(lineGen, 0, 4).Draw(t, "replacement")
		if start == stop && len(repl) == 0 {
			continue
		}
		if keepLast && stop == len(lines) { // the end without a newline is kept simple
			if stop == start {
				continue
			}
			stop--
			if stop == start && len(repl) == 0 {
				continue
			}
		}
		from, to := start, stop
		eof := false
		for count(lines, lines[from:to], at) != 1 {
			grown := false
			if from > at {
				from, grown = from-1, true
			}
			if to < len(lines) {
				to, grown = to+1, true
			}
			if !grown {
				break
			}
		}
		if count(lines, lines[from:to], at) != 1 {
			// All that is left is context, and yet not unique: only an empty range.
			if to != len(lines) || from != to || len(lines) > 0 && rapid.Bool().Draw(t, "skip") {
				continue
			}
			eof = len(lines) > 0
		}
		p.WriteString("@@\n")
		write := func(kind string, ls []string) {
			for _, l := range ls {
				p.WriteString(kind + l + "\n")
			}
		}
		write(" ", lines[from:start])
		write("-", lines[start:stop])
		write("+", repl)
		write(" ", lines[stop:to])
		out = append(out, lines[at:start]...)
		out = append(out, repl...)
		out = append(out, lines[stop:to]...)
		at = to
		if eof {
			p.WriteString("*** End of File\n")
			break
		}
	}
	return p.String(), append(out, lines[at:]...)
}

// count is how often want is in lines from at on, the slow way.
func count(lines, want []string, at int) (n int) {
	if len(want) == 0 {
		if len(lines) == 0 {
			return 1
		}
		return 0
	}
	for i := at; i+len(want) <= len(lines); i++ {
		if slices.Equal(lines[i:i+len(want)], want) {
			n++
		}
	}
	return n
}

func setTree(t interface {
	Fatal(...any)
	Helper()
}, dir string, tree map[string]string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range tree {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// Random trees and random valid patches: the result is the reference's, a dry run
// changes nothing and says the same, and a failure at any step leaves all as it was.
func TestApplyPatchAgainstReference(t *testing.T) {
	s, dir := newService(t)
	patches, faults := 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		m := drawModel(rt)
		setTree(rt, dir, m.before)
		p := ApplyPatchParams{Patch: ospath.Text(m.patch), DryRun: true, MaxDiffBytes: 1 << 20}
		dry, err := s.ApplyPatch(t.Context(), p)
		if err != nil {
			rt.Fatalf("%v\n%s\n%q", err, m.patch, m.before)
		}
		if got := readTree(t, dir); !sameTree(got, m.before) {
			rt.Fatalf("dry_run changed the tree:\n%q\n%q", m.before, got)
		}
		p.DryRun = false
		injected := errors.New("injected")
		for failAt := rapid.IntRange(1, 6).Draw(rt, "first fault"); ; failAt += 1 + failAt/4 {
			before := snapshotTree(t, dir)
			n := 0
			s.fault = func(step string) error {
				// Undoing and cleaning up go on: that they fail too is another test.
				if step == "undo" || step == "cleanup" || step == "end" {
					return nil
				}
				if n++; n == failAt {
					return injected
				}
				return nil
			}
			r, err := s.ApplyPatch(t.Context(), p)
			s.fault = nil
			if err == nil {
				dry.DryRun = false
				a, _ := json.Marshal(dry)
				b, _ := json.Marshal(r)
				if string(a) != string(b) {
					rt.Fatalf("the dry run said\n%s\nnot\n%s", a, b)
				}
				break
			}
			if !errors.Is(err, injected) && !strings.Contains(err.Error(), "injected") {
				rt.Fatalf("%v\n%s", err, m.patch)
			}
			faults++
			if after := snapshotTree(t, dir); !sameTree(after, before) {
				rt.Fatalf("after a failure at step %d:\n%q\nwas\n%q", failAt, after, before)
			}
		}
		patches++
		if got := readTree(t, dir); !sameTree(got, m.after) {
			rt.Fatalf("%s\nbefore %q\n   got %q\n  want %q", m.patch, m.before, got, m.after)
		}
	})
	t.Logf("%d patches, %d failures injected", patches, faults)
}

// snapshotTree is every file and directory with its inode, mode and content.
func snapshotTree(t testing.TB, dir string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			t.Fatal(err)
		}
		if d.Name() == ".mypr" {
			return filepath.SkipDir
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			t.Fatal(err)
		}
		v := fmt.Sprintf("%d %o ", st.Ino, st.Mode)
		if !d.IsDir() {
			v += fmt.Sprint(st.Nlink) + get(t, path)
		}
		tree[path] = v
		return nil
	})
	return tree
}

// When undoing fails too, the caller is told, the journal stays, and Recover ends it.
func TestUndoFails(t *testing.T) {
	s, dir := newService(t)
	before := map[string]string{"a": "old a\n", "b": "b\n", "c": "old c\n"}
	setTree(t, dir, before)
	broken := false
	s.fault = func(step string) error {
		if step == "syncdir" {
			broken = true
		}
		if broken {
			return unix.EIO
		}
		return nil
	}
	_, err := s.ApplyPatch(t.Context(), ApplyPatchParams{Patch: crashPatch})
	refused(t, err, CodeRecoveryNeeded, "input/output error", "restart the runtime", ".mypr/writes/")
	s.fault = nil
	reports, err := s.Recover(t.Context())
	if err != nil || len(reports) != 1 || reports[0].Outcome != "undone" {
		t.Fatalf("%+v %v", reports, err)
	}
	if got := readTree(t, dir); !sameTree(got, before) {
		t.Errorf("%q", got)
	}
}

// Somebody else changes files between the crash and the recovery: theirs stay, and the
// report says where the old ones are.
func TestRecoverMeetsOthersChanges(t *testing.T) {
	s, dir := newService(t)
	setTree(t, dir, map[string]string{"a": "old a\n", "b": "b\n", "c": "old c\n"})
	stop := false
	s.fault = func(step string) error {
		if step == "syncdir" {
			stop = true
		}
		if stop {
			return unix.EIO
		}
		return nil
	}
	_, err := s.ApplyPatch(t.Context(), ApplyPatchParams{Patch: crashPatch})
	refused(t, err, CodeRecoveryNeeded)
	s.fault = nil
	put(t, dir+"/a", "theirs\n")        // had been replaced
	put(t, dir+"/b", "theirs too\n")    // had been deleted
	put(t, dir+"/d/e/new", "edited\n")  // had been created
	put(t, dir+"/d/e/own", "unknown\n") // in a directory that had been made
	reports, err := s.Recover(t.Context())
	if err != nil || len(reports) != 1 || reports[0].Outcome != "kept" {
		t.Fatalf("%+v %v", reports, err)
	}
	want := map[string]string{"a": "theirs\n", "b": "theirs too\n", "c": "old c\n", "d/e/new": "edited\n", "d/e/own": "unknown\n"}
	if got := readTree(t, dir); !sameTree(got, want) {
		t.Errorf("%q", got)
	}
	kept, _ := filepath.Glob(dir + "/.mypr/writes/kept-*")
	if len(kept) != 2 || !strings.Contains(reports[0].Message, filepath.Base(kept[0])) {
		t.Fatalf("%v\n%s", kept, reports[0].Message)
	}
	var texts []string
	for _, k := range kept {
		texts = append(texts, get(t, k))
		must[any](t)(nil, os.Remove(k))
	}
	slices.Sort(texts)
	if strings.Join(texts, "") != "b\nold a\n" {
		t.Errorf("%q", texts)
	}
}

func TestRecoverDamagedJournals(t *testing.T) {
	s, dir := newService(t)
	for i, raw := range []string{"", "{", `{"id":"x","changes":[{"op":"replace"`, "{\"changes\":[null]}\n", "nonsense\n"} {
		put(t, fmt.Sprintf("%s/.mypr/writes/%d.json", dir, i), raw)
	}
	reports, err := s.Recover(t.Context())
	if err != nil || len(reports) != 5 {
		t.Fatalf("%+v %v", reports, err)
	}
	for _, r := range reports {
		if r.Outcome != "undone" || !strings.Contains(r.Message, "cut off") {
			t.Errorf("%+v", r)
		}
	}
}

func TestPatchTooLarge(t *testing.T) {
	s, dir := newService(t)
	_, err := s.ApplyPatch(t.Context(), ApplyPatchParams{Patch: ospath.Text(strings.Repeat("x", maxPatchText+1))})
	refused(t, err, rpc.CodeTooLarge)
	var many []string
	for i := range maxSections + 1 {
		many = append(many, fmt.Sprintf("*** Add File: f%d", i), "+x")
	}
	_, err = s.ApplyPatch(t.Context(), ApplyPatchParams{Patch: ospath.Text(body(many...))})
	refused(t, err, rpc.CodeTooLarge, "1000 files")
	put(t, dir+"/f", strings.Repeat("a\n", 2_000_000))
	var hunks []string
	for range 600 {
		hunks = append(hunks, "@@", "-a", "+b")
	}
	_, err = s.ApplyPatch(t.Context(), ApplyPatchParams{Patch: ospath.Text(update("f", hunks...))})
	refused(t, err, rpc.CodeTooLarge, "600 hunks")
	// A long hunk that nearly matches everywhere takes linear time.
	long := append(slices.Repeat([]string{"-a"}, 100_000), "-b", "+c")
	_, err = s.ApplyPatch(t.Context(), ApplyPatchParams{Patch: ospath.Text(update("f", append([]string{"@@"}, long...)...))})
	refused(t, err, CodeNoMatch)
}

func FuzzParsePatch(f *testing.F) {
	f.Add(examplePatch, "Title\nBefore\n")
	f.Add(crashPatch, "old a\n")
	f.Add(update("f", "@@ a", "@@ b", " c", "-d", "+e", "", "*** End of File"), "a\nb\nc\nd\n\n")
	f.Add(strings.ReplaceAll(examplePatch, "\n", "\r\n"), "\uFEFFBefore\r\n")
	f.Add("*** Begin Patch\n*** Update File: x\n@@\n*** End Patch", "")
	f.Fuzz(func(t *testing.T, patch, text string) {
		sections, err := parsePatch(patch)
		if err != nil {
			if rpc.CodeOf(err) == "" {
				t.Fatalf("an untyped error: %v", err)
			}
			return
		}
		for i := range sections {
			s := &sections[i]
			if s.path == "" || s.line < 2 {
				t.Fatalf("%+v", s)
			}
			if s.action != actionUpdate {
				continue
			}
			after, err := s.update(text)
			if err != nil {
				if rpc.CodeOf(err) == "" {
					t.Fatalf("an untyped error: %v", err)
				}
				continue
			}
			if utf8.ValidString(patch) && utf8.ValidString(text) && !utf8.ValidString(after) {
				t.Fatalf("%q became %q", text, after)
			}
			added, removed := 0, 0
			for _, h := range s.hunks {
				added += len(h.side("+"))
				removed += len(h.side("-"))
			}
			if got := strings.Count(after, "\n") - strings.Count(text, "\n"); got-(added-removed) > 1 || (added-removed)-got > 1 {
				t.Fatalf("%d lines added, %d removed, but %d newlines more\n%q\n%q", added, removed, got, text, after)
			}
		}
	})
}

func FuzzJournal(f *testing.F) {
	f.Add([]byte(`{"id":"x","changes":[{"op":"create","path":"/a","temp":"/b"}]}` + "\n" + `{"staged":[{"dev":1}]}` + "\n"))
	f.Add([]byte("{}\n{"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, err := parseJournal(raw)
		if err == nil {
			for _, c := range r.Changes {
				_ = c.Op
			}
		}
	})
}

func FuzzCodec(f *testing.F) {
	for _, n := range []string{"utf-16", "latin-1", "utf-8-sig", "shift_jis", "ascii", "cp1252", "utf-7"} {
		f.Add(n, []byte("\xff\xfea\x00"))
	}
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		c, err := codecFor(name)
		if err != nil || c == nil {
			return
		}
		text, err := c.decode(data)
		if err != nil {
			return
		}
		if again, err := c.encode(text); err != nil || string(again) != string(data) {
			t.Fatalf("%s: %q -> %q -> %q %v", name, data, text, again, err)
		}
	})
}

// Reading, writing and patching may be cancelled before they begin to change anything.
func TestCancelledBeforeTheChange(t *testing.T) {
	s, dir := newService(t)
	put(t, dir+"/a", "old a\n")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.ApplyPatch(ctx, ApplyPatchParams{Patch: ospath.Text(update("a", "@@", "-old a", "+new a"))})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := s.Write(ctx, WriteParams{Path: "n", Text: "x", Encoding: "utf-8"}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if got := readTree(t, dir); !sameTree(got, map[string]string{"a": "old a\n"}) {
		t.Error(got)
	}
}
