package search

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"mypr/internal/rpc"
)

// recordings holds what rga 0.10.9 did for each query of TestDocs. ripgrep-all comes
// from Rust's registry only, where it takes minutes to compile: so the tests run against
// this record, and against the program too where there is one.
// MYPR_RECORD=1 go test -run TestDocs ./units/search makes it anew.
const recordings = "testdata/rga.json"

type recording struct {
	Out  string `json:"out"`
	Err  string `json:"err"`
	Code int    `json:"code"`
}

// recorded is rga: it does what is recorded for its arguments, or has the real program do
// it and records that.
func recorded(record bool) int {
	path, workspace := os.Getenv("RECORDINGS"), os.Getenv("WORKSPACE")
	all := map[string]recording{}
	if raw, err := os.ReadFile(path); err == nil && json.Unmarshal(raw, &all) != nil {
		return 9
	}
	cache := regexp.MustCompile("--rga-cache-path=[^ ]*")
	key := cache.ReplaceAllString(strings.Join(os.Args[1:], " "), "--rga-cache-path=/cache")
	if record {
		var out, msg bytes.Buffer
		cmd := exec.Command(os.Getenv("REAL_RGA"), os.Args[1:]...)
		cmd.Stdout, cmd.Stderr = &out, &msg
		err := cmd.Run()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			return 9
		}
		if cmd.ProcessState.ExitCode() == 0 || exit != nil {
			plain := func(b *bytes.Buffer) string { return strings.ReplaceAll(b.String(), workspace, "/workspace") }
			all[key] = recording{plain(&out), plain(&msg), cmd.ProcessState.ExitCode()}
			raw, err := json.MarshalIndent(all, "", " ")
			if err != nil || os.WriteFile(path, append(raw, '\n'), 0o644) != nil {
				return 9
			}
		}
	}
	r, ok := all[key]
	if !ok {
		fmt.Fprintf(os.Stderr, "not recorded: %s\n", key)
		return 9
	}
	_, _ = os.Stdout.WriteString(r.Out)
	_, _ = os.Stderr.WriteString(strings.ReplaceAll(r.Err, "/workspace", workspace))
	return r.Code
}

// TestDocs searches with the recorded rga, and with the real one where it is.
func TestDocs(t *testing.T) {
	need(t, "rg")
	file, err := filepath.Abs(recordings)
	if err != nil {
		t.Fatal(err)
	}
	real, err := exec.LookPath("rga")
	if os.Getenv("MYPR_RECORD") != "" {
		if err != nil {
			t.Fatal("there is no rga to record")
		}
		_ = os.Remove(file)
		w := newWorld(t)
		w.Service = w.service("PATH="+fakePath(t, "rga")+":"+os.Getenv("PATH"), "SEARCH_TEST_FAKE=record", "REAL_RGA="+real, "RECORDINGS="+file, "WORKSPACE="+w.dir)
		testDocs(w)
		return
	}
	t.Run("recorded", func(t *testing.T) {
		w := newWorld(t)
		w.Service = w.service("PATH="+fakePath(t, "rga")+":"+os.Getenv("PATH"), "SEARCH_TEST_FAKE=replay", "RECORDINGS="+file, "WORKSPACE="+w.dir)
		testDocs(w)
	})
	if err == nil {
		t.Run("rga", func(t *testing.T) {
			w := newWorld(t)
			testDocs(w)
			if _, err := os.Stat(w.dir + "/.mypr/searches/" + docsCache); err != nil {
				t.Error(err)
			}
		})
	}
}

func (w *world) documents() {
	w.t.Helper()
	w.put("plain.txt", "hello needle world\nsecond\n")
	w.put("broken.pdf", "%PDF-1.4 broken")
	script := `
import io, tarfile, zipfile
inner = b"inner needle\n"
t = io.BytesIO()
with tarfile.open(fileobj=t, mode="w:gz") as tf:
    i = tarfile.TarInfo("in.txt"); i.size = len(inner); tf.addfile(i, io.BytesIO(inner))
open("t.tar.gz", "wb").write(t.getvalue())
with zipfile.ZipFile("z.zip", "w") as z:
    z.writestr("in.txt", inner); z.writestr("t.tar.gz", t.getvalue())
`
	cmd := exec.Command("python3", "-c", script)
	cmd.Dir = w.dir
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("%v: %s", err, out)
	}
}

// A converter is missing, so the result is partial, with what the other files have.
func testDocs(w *world) {
	t := w.t
	w.documents()
	r := w.ok("fs.search_docs", `{"pattern":"needle"}`)
	want := []string{"plain.txt:1:hello needle world", "t.tar.gz:1:in.txt: inner needle", "z.zip:1:in.txt: inner needle", "z.zip:3:t.tar.gz: in.txt: inner needle"}
	if got := lines(r.Matches); !slices.Equal(got, want) || r.Backend != "rga" {
		t.Errorf("%q", got)
	}
	if m := r.Matches[1]; m.Start != nil || m.End != nil || m.Spans[0].Start != nil || m.Column != 15 {
		t.Errorf("offsets of extracted text: %+v", m)
	}
	if r.Complete || r.reason() != "errors" || len(r.Warnings) != 1 || !strings.HasPrefix(r.Warnings[0], "broken.pdf: ") {
		t.Errorf("%v %q", r.reason(), r.Warnings)
	}
	r = w.ok("fs.search_docs", fmt.Sprintf(`{"pattern":"needle","cursor":%q,"max_matches":1}`, *r.PageCursor))
	if len(r.Matches) != 1 || !r.HasMore {
		t.Error(r.raw)
	}
	if r = w.ok("fs.search_docs", `{"pattern":"needle","mode":"counts","glob":"*.zip"}`); fmt.Sprint(r.raw["counts"]) != "[map[count:2 path:z.zip]]" || !r.Complete {
		t.Error(r.raw)
	}
	if r = w.ok("fs.search_docs", `{"pattern":"needle","mode":"files","paths":["z.zip","plain.txt"],"cache":false}`); fmt.Sprint(r.Files) != "[plain.txt z.zip]" {
		t.Error(r.raw)
	}
	if left, _ := filepath.Glob(w.dir + "/.mypr/searches/" + tempCache + "*"); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if r = w.ok("fs.search_docs", `{"pattern":"NEEDLE","mode":"exists","glob":"!*.pdf"}`); r.raw["exists"] != false {
		t.Error(r.raw)
	}
	if r = w.ok("fs.search_docs", `{"pattern":"nowhere","mode":"exists"}`); r.raw["exists"] != nil || r.Complete { // broken.pdf was not searched
		t.Error(r.raw)
	}
	if r = w.ok("fs.search_docs", `{"pattern":"needle","mode":"exists","glob":"*.zip","accurate":true}`); r.raw["exists"] != true {
		t.Error(r.raw)
	}
	if r = w.ok("fs.search_docs", `{"pattern":"needle","glob":"z.zip","adapters":["zip"],"archive_depth":2,"cache":false}`); len(r.Matches) != 1 {
		t.Errorf("%q", lines(r.Matches))
	}
	// rga counts the archive itself.
	if r = w.ok("fs.search_docs", `{"pattern":"needle","glob":"z.zip","archive_depth":1,"cache":false}`); len(r.Matches) != 0 {
		t.Errorf("%q", lines(r.Matches))
	}
	_, err := w.call("fs.search_docs", `{"pattern":"needle","adapters":"nosuch"}`)
	refused(t, err, rpc.CodeInvalidRequest, "nosuch")
	_, err = w.call("fs.search_docs", `{"pattern":"nee("}`)
	refused(t, err, rpc.CodeInvalidRequest, "unclosed group")
}

func TestDocsRefuses(t *testing.T) {
	w := newWorld(t)
	for params, say := range map[string]string{
		`{}`:                                 "needs a pattern",
		`{"pattern":"x","archive_depth":-1}`: "archive_depth",
		`{"pattern":"x","archive_depth":65}`: "archive_depth",
		`{"pattern":"x","adapters":"a b"}`:   "a b",
		`{"pattern":"x","mode":"none"}`:      "mode",
		`{"pattern":"x","hidden":true}`:      "hidden",
	} {
		_, err := w.call("fs.search_docs", params)
		refused(t, err, rpc.CodeInvalidRequest, say)
	}
}

func TestDocsWarnings(t *testing.T) {
	const raw = `./broken.pdf: preprocessor command failed: '"/usr/bin/rga-preproc" "./broken.pdf"':
-------------------------------------------------------------------------------
/workspace/./broken.pdf adapter: poppler
Error: during preprocessing

Caused by:
    0: run_adapter(/workspace/./broken.pdf)
    1: adapting /workspace/./broken.pdf via poppler failed
    2: Could not find executable "pdftotext".
-------------------------------------------------------------------------------
`
	if got := docsWarnings(raw); got != "broken.pdf: Could not find executable \"pdftotext\"." {
		t.Errorf("%q", got)
	}
	if got := docsWarnings("plain error\n"); got != "plain error" {
		t.Errorf("%q", got)
	}
}
