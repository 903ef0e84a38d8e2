package jobs

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
)

func TestMain(m *testing.M) {
	if os.Getenv("JOBS_TEST_ROLE") == "pump" {
		os.Exit(pumpRole(os.Getenv("JOBS_TEST_BASE"), os.Getenv("JOBS_TEST_TTY") != ""))
	}
	goleak.VerifyTestMain(m)
}

type world struct {
	t   *testing.T
	dir string
	f   *fake
	h   *memory
	s   *Service
	o   Options
}

func newWorld(t *testing.T, change ...func(*Options)) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir(), f: newFake(), h: newMemory()}
	w.o = Options{Dir: w.dir, Supervisor: w.f.connection, History: w.h}
	for _, c := range change {
		c(&w.o)
	}
	before := openFDs(t)
	w.s = New(w.o)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
		defer cancel()
		if err := w.s.CancelAll(ctx, "the test is over"); err != nil {
			t.Error(err)
		}
		w.s.Suspend()
		for name := range w.f.units {
			_ = w.f.Release(ctx, name)
		}
		if after := openFDs(t); after > before {
			t.Errorf("%d descriptors before, %d after", before, after)
		}
	})
	return w
}

// openFDs does not count what the runtime opens once (epoll, eventfd).
func openFDs(t *testing.T) int {
	t.Helper()
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range es {
		if link, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(link, "anon_inode:[event") {
			n++
		}
	}
	return n
}

var caller = Caller{ClientID: "calm-otter", ConnectionID: "c", ExecID: "e", Generation: "g"}

// call sends parameters as JSON, as Python does.
func call[R any](w *world, method, params string) (R, error) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Minute)
	defer cancel()
	var r R
	v, err := w.s.Methods()[method](ctx, caller, json.RawMessage(params))
	if err != nil {
		return r, err
	}
	raw, err := json.Marshal(v)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &r); err != nil {
		w.t.Fatal(err)
	}
	return r, nil
}

func must[R any](w *world, method, params string) R {
	w.t.Helper()
	r, err := call[R](w, method, params)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, params, err)
	}
	return r
}

// quote is JSON.
func quote(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func params(command any, more string) string {
	if more != "" {
		more = "," + more
	}
	return fmt.Sprintf(`{"command":%s,"cwd":"/","env":{"PATH":%s}%s}`, quote(command), quote(os.Getenv("PATH")), more)
}

func TestRunSeparatesStreams(t *testing.T) {
	w := newWorld(t)
	r := must[RunResult](w, "shell.run", params("printf out; printf err >&2; exit 3", ""))
	if r.State != "failed" || *r.ReturnCode != 3 || r.Stdout != "out" || r.Stderr != "err" || r.Truncated || r.Cause != "exit" {
		t.Fatalf("%+v", r)
	}
	out := must[outputResult](w, "shell.output", `{"id":"`+r.ID+`"}`)
	if out.Output != "outerr" && out.Output != "errout" {
		t.Fatalf("%+v", out)
	}
	if rec := w.h.records[r.ID]; rec.State != "failed" || rec.ClientID != "calm-otter" || rec.Kind != "shell" || rec.OutputBytes != 6 {
		t.Fatalf("%+v", rec)
	}
}

func TestRunBudgetGoesToStdoutFirst(t *testing.T) {
	w := newWorld(t)
	r := must[RunResult](w, "shell.run", params("printf 12345; printf 67890 >&2", `"max_bytes":7`))
	if r.Stdout != "12345" || r.Stderr != "67" || !r.Truncated {
		t.Fatalf("%+v", r)
	}
}

func TestInput(t *testing.T) {
	w := newWorld(t)
	text := strings.Repeat("bravo\nalpha\n", 100_000)
	r := must[RunResult](w, "shell.run", params([]string{"sort", "-u"}, `"input":`+quote(text)))
	if r.Stdout != "alpha\nbravo\n" || r.State != "succeeded" {
		t.Fatalf("%+v", r.Status)
	}
}

func TestStdinPipe(t *testing.T) {
	w := newWorld(t)
	st := must[Status](w, "shell.start", params("cat; echo end", `"stdin":true`))
	for _, text := range []string{"a", "b"} {
		wr := must[writeResult](w, "shell.write", `{"id":"`+st.ID+`","text":`+quote(text)+`}`)
		if wr.Bytes != 1 || wr.Closed {
			t.Fatalf("%+v", wr)
		}
	}
	rd := must[readResult](w, "shell.read", `{"id":"`+st.ID+`","wait_ms":30000}`)
	for rd.Output != "ab" { // two writes, one or two reads
		next := must[readResult](w, "shell.read", fmt.Sprintf(`{"id":%q,"wait_ms":30000,"cursor":%q}`, st.ID, rd.Cursor))
		rd.Output, rd.Cursor = rd.Output+next.Output, next.Cursor
	}
	if wr := must[writeResult](w, "shell.write", `{"id":"`+st.ID+`","eof":true}`); !wr.Closed {
		t.Fatalf("%+v", wr)
	}
	st = must[Status](w, "shell.wait", `{"id":"`+st.ID+`"}`)
	if st.State != "succeeded" {
		t.Fatalf("%+v", st)
	}
	if _, err := call[writeResult](w, "shell.write", `{"id":"`+st.ID+`","text":"x"}`); rpc.CodeOf(err) != rpc.CodeConflict {
		t.Fatal(err)
	}
	rd = must[readResult](w, "shell.read", fmt.Sprintf(`{"id":%q,"cursor":%q}`, st.ID, rd.Cursor))
	if rd.Output != "end\n" || rd.HasMore || rd.State != "succeeded" {
		t.Fatalf("%+v", rd)
	}
}

func TestPTY(t *testing.T) {
	w := newWorld(t)
	st := must[Status](w, "shell.start", params("tty >/dev/null && stty size; read x; stty size; cat", `"pty":true,"rows":30,"cols":100`))
	want := func(text string) {
		t.Helper()
		got := ""
		cursor := "null"
		for !strings.Contains(got, text) {
			r := must[readResult](w, "shell.read", fmt.Sprintf(`{"id":%q,"wait_ms":30000,"cursor":%s}`, st.ID, cursor))
			if r.Output == "" {
				t.Fatalf("%q and then nothing, not %q: %+v", got, text, r)
			}
			got += r.Output
			cursor = quote(r.Cursor)
		}
	}
	want("30 100")
	must[resizeResult](w, "shell.resize", `{"id":"`+st.ID+`","rows":40,"cols":120}`)
	must[writeResult](w, "shell.write", `{"id":"`+st.ID+`","text":"x\n"}`)
	want("40 120")
	must[writeResult](w, "shell.write", `{"id":"`+st.ID+`","text":"hello\n"}`)
	want("hello\r\nhello\r\n")
	if wr := must[writeResult](w, "shell.write", `{"id":"`+st.ID+`","eof":true}`); wr.Closed || !wr.EOF {
		t.Fatalf("%+v", wr)
	}
	if st = must[Status](w, "shell.wait", `{"id":"`+st.ID+`"}`); st.State != "succeeded" || st.Rows != 40 {
		t.Fatalf("%+v", st)
	}
}

func TestPTYInput(t *testing.T) {
	w := newWorld(t)
	r := must[RunResult](w, "shell.run", params("cat", `"pty":true,"input":"a\nb"`))
	if r.State != "succeeded" || !strings.Contains(r.Stdout, "a\r\n") {
		t.Fatalf("%+v", r)
	}
}

func TestCancelEscalates(t *testing.T) {
	w := newWorld(t)
	st := must[Status](w, "shell.start", params("trap '' TERM; echo up; while :; do sleep 1000 & wait; done", ""))
	must[readResult](w, "shell.read", `{"id":"`+st.ID+`","wait_ms":30000}`)
	c := must[cancelResult](w, "shell.cancel", `{"id":"`+st.ID+`"}`)
	if !c.Cancelled || c.State != "cancelled" {
		t.Fatalf("%+v", c)
	}
	st = must[Status](w, "shell.status", `{"id":"`+st.ID+`"}`)
	if *st.ReturnCode != -9 || st.Signal != "SIGKILL" || !strings.Contains(st.Error, "calm-otter") {
		t.Fatalf("%+v", st)
	}
	if c := must[cancelResult](w, "shell.cancel", `{"id":"`+st.ID+`"}`); c.Cancelled {
		t.Fatal("a job that is over was cancelled")
	}
}

func TestTimeouts(t *testing.T) {
	w := newWorld(t)
	r := must[RunResult](w, "shell.run", params("sleep 100", `"timeout":0.05`))
	if !r.TimedOut || r.State != "cancelled" || !strings.Contains(r.Error, "timeout of 0.05 s") {
		t.Fatalf("%+v", r)
	}
	r = must[RunResult](w, "shell.run", params("sleep 100", `"timeout":10,"limits":{"time":0.05}`))
	if !r.TimedOut || r.State != "failed" || !strings.Contains(r.Error, "time limit of 0.05 s") {
		t.Fatalf("%+v", r)
	}
}

func TestSignalIsNamed(t *testing.T) {
	w := newWorld(t)
	r := must[RunResult](w, "shell.run", params("kill -SEGV $$", ""))
	if r.Signal != "SIGSEGV" || *r.ReturnCode != -11 || r.State != "failed" || !strings.Contains(r.Error, "SIGSEGV") {
		t.Fatalf("%+v", r)
	}
}

func TestFloodIsDrainedAndMarked(t *testing.T) {
	w := newWorld(t, func(o *Options) { o.OutputBytes = 100_000 })
	r := must[RunResult](w, "shell.run", params("head -c 20000000 /dev/zero; echo end >&2", ""))
	if r.State != "succeeded" || !r.Truncated || r.OutputBytes != 100_000 || r.OutputBytes+r.OutputDropped != 20_000_004 {
		t.Fatalf("%+v", r.Status)
	}
	if st, err := os.Stat(filepath.Join(w.dir, r.ID+".out")); err != nil || st.Size() != 100_000 {
		t.Fatal(st, err)
	}
}

func TestBytesAreKeptAndReplaced(t *testing.T) {
	w := newWorld(t)
	r := must[RunResult](w, "shell.run", params(`printf 'a\377\303\251\303'`, ""))
	if r.Stdout != "a\ufffdé\ufffd" {
		t.Fatalf("%q", r.Stdout)
	}
	raw, err := os.ReadFile(filepath.Join(w.dir, r.ID+".out"))
	if err != nil || string(raw) != "a\xff\xc3\xa9\xc3" {
		t.Fatalf("%q %v", raw, err)
	}
	ascii := must[RunResult](w, "shell.run", params("echo é", ""))
	if rd := must[readResult](w, "shell.read", `{"id":"`+ascii.ID+`","raw":true}`); rd.Data != "" || rd.Output != "é\n" {
		t.Fatalf("%+v", rd)
	}
	rd := must[readResult](w, "shell.read", `{"id":"`+r.ID+`","raw":true}`)
	if b, _ := base64.StdEncoding.DecodeString(rd.Data); string(b) != string(raw) {
		t.Fatalf("%q", b)
	}
}

// A long page may be read from the file itself.
func TestDirectPages(t *testing.T) {
	w := newWorld(t)
	st := must[Status](w, "shell.start", params(`seq 100000; seq 100000 200000 >&2; seq 3`, ""))
	must[Status](w, "shell.wait", `{"id":"`+st.ID+`"}`)
	for _, stream := range []string{"", stdout, stderr} {
		var want, got strings.Builder
		files := 0
		for cursor := "null"; ; {
			ask := func(direct bool) readResult {
				return must[readResult](w, "shell.read", fmt.Sprintf(`{"id":%q,"stream":%q,"max_bytes":300001,"raw":true,"direct":%v,"cursor":%s}`, st.ID, stream, direct, cursor))
			}
			plain, direct := ask(false), ask(true)
			want.WriteString(plain.Output)
			got.WriteString(direct.Output)
			if direct.File != "" {
				files++
				f, err := os.Open(direct.File)
				if err != nil {
					t.Fatal(err)
				}
				for _, p := range direct.Pieces {
					b := make([]byte, p[1])
					if _, err := f.ReadAt(b, p[0]); err != nil {
						t.Fatal(err)
					}
					got.Write(b)
				}
				f.Close()
			}
			if plain.Cursor != direct.Cursor || plain.HasMore != direct.HasMore {
				t.Fatalf("%+v, %+v", plain, direct)
			}
			if cursor = strconv.Quote(plain.Cursor); !plain.HasMore {
				break
			}
		}
		if want.String() != got.String() || want.Len() < 500_000 || files == 0 {
			t.Errorf("stream %q: %d bytes, %d of them directly, in %d files", stream, want.Len(), got.Len(), files)
		}
	}
}

func TestDiskRefusesOutput(t *testing.T) {
	w := newWorld(t)
	id := newID()
	// A directory in place of the file: nothing can be kept, as on a broken disk.
	if err := os.Mkdir(filepath.Join(w.dir, id+".out"), 0o700); err != nil {
		t.Fatal(err)
	}
	r := must[RunResult](w, "shell.run", params("head -c 1000000 /dev/zero; exit 5", `"id":"`+id+`"`))
	if *r.ReturnCode != 5 || !r.Truncated || r.OutputUnsaved != 1_000_000 || len(r.Warnings) != 1 || r.Warnings[0].Code != "output_not_saved" {
		t.Fatalf("%+v", r.Status)
	}
}

func TestHistoryRefusesTheStart(t *testing.T) {
	w := newWorld(t)
	w.h.fail = errors.New("database or disk is full")
	_, err := call[Status](w, "shell.start", params("true", ""))
	if rpc.CodeOf(err) != CodeStart || !strings.Contains(err.Error(), "disk is full") || w.f.starts != 0 {
		t.Fatal(err, w.f.starts)
	}
}

func TestHistoryRefusesTheEnd(t *testing.T) {
	w := newWorld(t, func(o *Options) { o.Completed = 1 })
	st := must[Status](w, "shell.start", params("read x; exit 4", `"stdin":true`))
	w.h.mu.Lock()
	w.h.fail = errors.New("database or disk is full")
	w.h.mu.Unlock()
	must[writeResult](w, "shell.write", `{"id":"`+st.ID+`","text":"\n"}`)
	st = must[Status](w, "shell.wait", `{"id":"`+st.ID+`"}`)
	if *st.ReturnCode != 4 || len(st.Warnings) != 1 || st.Warnings[0].Code != "record_not_saved" {
		t.Fatalf("%+v", st)
	}
}

func TestSameIDIsTheSameJob(t *testing.T) {
	w := newWorld(t)
	id := newID()
	p := params("echo once >>"+w.dir+"/count", `"id":"`+id+`"`)
	done := make(chan error, 8)
	for range 8 {
		go func() {
			_, err := call[RunResult](w, "shell.run", p)
			done <- err
		}()
	}
	for range 8 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if raw, _ := os.ReadFile(w.dir + "/count"); string(raw) != "once\n" || w.f.starts != 1 {
		t.Fatalf("%q %d", raw, w.f.starts)
	}
}

func TestLostAnswers(t *testing.T) {
	for method, want := range map[string]string{"start": "succeeded", "end": "succeeded", "wait": "succeeded", "refuse": ""} {
		t.Run(method, func(t *testing.T) {
			w := newWorld(t)
			w.f.lose = method
			r, err := call[RunResult](w, "shell.run", params("echo ran", ""))
			if want == "" {
				if rpc.CodeOf(err) != CodeStart || w.f.starts != 0 {
					t.Fatal(r, err)
				}
				return
			}
			if err != nil || r.State != want || r.Stdout != "ran\n" || w.f.starts != 1 {
				t.Fatalf("%+v %v %d", r, err, w.f.starts)
			}
		})
	}
}

// A second service takes over what the first one let go of.
func TestResume(t *testing.T) {
	w := newWorld(t)
	run := must[Status](w, "shell.start", params("read a; echo got $a; read b; echo got $b; exit 7", `"stdin":true`))
	tty := must[Status](w, "shell.start", params("read a; echo got $a", `"pty":true`))
	ended := must[Status](w, "shell.start", params("read a; head -c 50000 /dev/zero | tr '\\0' x; exit 3", `"stdin":true`))
	must[writeResult](w, "shell.write", `{"id":"`+run.ID+`","text":"1\n"}`)
	must[readResult](w, "shell.read", `{"id":"`+run.ID+`","wait_ms":30000}`)

	w.s.Suspend()
	if _, err := call[Status](w, "shell.start", params("true", "")); rpc.CodeOf(err) != rpc.CodeUnavailable {
		t.Fatal(err)
	}
	// One job ends while there is no manager.
	ends := w.f.hand(w.f.units[unitName(ended.ID)])
	if _, err := ends["stdin"].WriteString("\n"); err != nil {
		t.Fatal(err)
	}
	closeFiles(ends)
	<-w.f.units[unitName(ended.ID)].over

	w.s = New(w.o)
	if err := w.s.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	st := must[Status](w, "shell.wait", `{"id":"`+ended.ID+`"}`)
	if st.State != "failed" || *st.ReturnCode != 3 || st.OutputBytes != 50_000 {
		t.Fatalf("%+v", st)
	}
	must[writeResult](w, "shell.write", `{"id":"`+run.ID+`","text":"2\n"}`)
	st = must[Status](w, "shell.wait", `{"id":"`+run.ID+`"}`)
	out := must[outputResult](w, "shell.output", `{"id":"`+run.ID+`"}`)
	if *st.ReturnCode != 7 || out.Output != "got 1\ngot 2\n" {
		t.Fatalf("%+v %q", st, out.Output)
	}
	must[writeResult](w, "shell.write", `{"id":"`+tty.ID+`","text":"t\n"}`)
	must[Status](w, "shell.wait", `{"id":"`+tty.ID+`"}`)
	if out := must[outputResult](w, "shell.output", `{"id":"`+tty.ID+`"}`); !strings.HasSuffix(out.Output, "got t\r\n") {
		t.Fatalf("%q", out.Output)
	}
	if live, _ := w.h.Live(t.Context()); len(live) != 0 {
		t.Fatalf("%+v", live)
	}
}

// The supervisor was killed before its anchor had the pipes, and then the manager: what
// they held is lost, and that is said.
func TestResumeWithoutStreams(t *testing.T) {
	w := newWorld(t)
	st := must[Status](w, "shell.start", params("read a; exit 5", `"stdin":true`))
	w.s.Suspend()
	if err := w.f.Release(t.Context(), unitName(st.ID), "stdin", stdout, stderr); err != nil {
		t.Fatal(err)
	}
	w.s = New(w.o)
	if err := w.s.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	st = must[Status](w, "shell.wait", `{"id":"`+st.ID+`"}`)
	if !api.Terminal(st.State) || len(st.Warnings) != 1 || st.Warnings[0].Code != "output_lost" {
		t.Errorf("%+v", st)
	}
}

// Input that was on its way into a terminal when the manager ended: nobody knows how far
// it came, and that is said.
func TestResumeOfTyping(t *testing.T) {
	w := newWorld(t)
	text, _ := json.Marshal(strings.Repeat("nobody reads this\n", 50_000))
	st := must[Status](w, "shell.start", params("echo up; exec sleep 1000", `"pty":true,"input":`+string(text)))
	must[readResult](w, "shell.read", `{"id":"`+st.ID+`","wait_ms":30000}`)
	w.s.Suspend()
	w.s = New(w.o)
	if err := w.s.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	st = must[Status](w, "shell.status", `{"id":"`+st.ID+`"}`)
	if st.State != "running" || st.Typing || len(st.Warnings) != 1 || st.Warnings[0].Code != "input_unknown" {
		t.Errorf("%+v", st)
	}
}

func TestResumeOfCancellation(t *testing.T) {
	w := newWorld(t)
	st := must[Status](w, "shell.start", params("trap '' TERM; echo up; while :; do sleep 1000 & wait; done", ""))
	must[readResult](w, "shell.read", `{"id":"`+st.ID+`","wait_ms":30000}`)
	ctx, cancel := context.WithCancel(t.Context())
	w.s.mu.Lock()
	j := w.s.jobs[st.ID]
	w.s.mu.Unlock()
	go func() { cancel() }()
	_, _ = j.stop(ctx, "it was cancelled by a test")
	w.s.Suspend()
	w.s = New(w.o)
	if err := w.s.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	st = must[Status](w, "shell.wait", `{"id":"`+st.ID+`"}`)
	if st.State != "cancelled" || st.Error != "it was cancelled by a test" {
		t.Fatalf("%+v", st)
	}
}

func TestResumeWithoutUnit(t *testing.T) {
	w := newWorld(t)
	st := must[Status](w, "shell.start", params("sleep 1000", ""))
	w.s.Suspend()
	u := w.f.units[unitName(st.ID)]
	_, _ = w.f.Stop(t.Context(), controlJob(st.ID))
	<-u.over
	_ = w.f.Release(t.Context(), unitName(st.ID))
	w.s = New(w.o)
	if err := w.s.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	st = must[Status](w, "shell.wait", `{"id":"`+st.ID+`"}`)
	if st.State != "lost" || st.ReturnCode != nil {
		t.Fatalf("%+v", st)
	}
}

func TestCompletedJobsComeFromDisk(t *testing.T) {
	w := newWorld(t, func(o *Options) { o.Completed = 2 })
	var ids []string
	for i := range 5 {
		r := must[RunResult](w, "shell.run", params(fmt.Sprintf("echo %d; echo e >&2", i), ""))
		ids = append(ids, r.ID)
	}
	if n := len(must[listResult](w, "jobs.list", `{}`).Jobs); n != 2 {
		t.Fatalf("%d jobs in memory", n)
	}
	rd := must[readResult](w, "shell.read", `{"id":"`+ids[0]+`","stream":"stdout"}`)
	if rd.Output != "0\n" || rd.State != "succeeded" {
		t.Fatalf("%+v", rd)
	}
	rd = must[readResult](w, "shell.read", `{"id":"`+ids[0]+`","stream":"stderr"}`)
	if rd.Output != "e\n" {
		t.Fatalf("%+v", rd)
	}
	if n := len(must[listResult](w, "jobs.list", `{"ids":`+quote(ids)+`}`).Jobs); n != 5 {
		t.Fatalf("%d of 5 found", n)
	}
}

func TestCursors(t *testing.T) {
	w := newWorld(t)
	a := must[RunResult](w, "shell.run", params("echo one; echo two >&2; echo three", ""))
	b := must[RunResult](w, "shell.run", params("echo x", ""))
	r := must[readResult](w, "shell.read", `{"id":"`+a.ID+`","stream":"stdout","max_bytes":4}`)
	if r.Output != "one\n" || !r.HasMore {
		t.Fatalf("%+v", r)
	}
	r2 := must[readResult](w, "shell.read", fmt.Sprintf(`{"id":%q,"stream":"stdout","cursor":%q}`, a.ID, r.Cursor))
	if r2.Output != "three\n" || r2.HasMore {
		t.Fatalf("%+v", r2)
	}
	sk := must[skipResult](w, "shell.skip", fmt.Sprintf(`{"id":%q,"stream":"stdout","bytes":6}`, a.ID))
	if r := must[readResult](w, "shell.read", fmt.Sprintf(`{"id":%q,"stream":"stdout","cursor":%q}`, a.ID, sk.Cursor)); r.Output != "ree\n" {
		t.Fatalf("%+v", r)
	}
	for _, bad := range []string{
		fmt.Sprintf(`{"id":%q,"stream":"stdout","cursor":%q}`, b.ID, r.Cursor),
		fmt.Sprintf(`{"id":%q,"stream":"stderr","cursor":%q}`, a.ID, r.Cursor),
		fmt.Sprintf(`{"id":%q,"cursor":"12"}`, a.ID),
		fmt.Sprintf(`{"id":%q,"cursor":"mypr-shell1.%%%%"}`, a.ID),
		fmt.Sprintf(`{"id":%q,"cursor":%q}`, a.ID, cursor{Job: a.ID, Offset: 1 << 40}.String()),
	} {
		if _, err := call[readResult](w, "shell.read", bad); rpc.CodeOf(err) != api.CodeInvalidCursor {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestBadRequests(t *testing.T) {
	w := newWorld(t)
	big := strings.Repeat("x", 200_000)
	for name, c := range map[string]struct{ params, code, text string }{
		"no program":    {params([]string{"no-such-program-here"}, ""), rpc.CodeNotFound, "no-such-program-here"},
		"not a program": {params([]string{"/etc/passwd"}, ""), rpc.CodePermission, "/etc/passwd"},
		"directory":     {params([]string{"/etc"}, ""), rpc.CodeInvalidRequest, "/etc"},
		"empty":         {params("  ", ""), rpc.CodeInvalidRequest, "empty"},
		"no words":      {params([]string{}, ""), rpc.CodeInvalidRequest, "no program"},
		"nul":           {params([]string{"true", "a\x00b"}, ""), rpc.CodeInvalidRequest, "NUL"},
		"long word":     {params([]string{"true", big}, ""), rpc.CodeInvalidRequest, "200000 bytes"},
		"cwd":           {`{"command":"true","cwd":"/no/such/dir","env":{}}`, rpc.CodeNotFound, "/no/such/dir"},
		"cwd file":      {`{"command":"true","cwd":"/etc/passwd","env":{}}`, rpc.CodeInvalidRequest, "not a directory"},
		"env nul":       {`{"command":"true","cwd":"/","env":{"A":"x\u0000"}}`, rpc.CodeInvalidRequest, "A contains"},
		"env name":      {`{"command":"true","cwd":"/","env":{"A=B":"x"}}`, rpc.CodeInvalidRequest, "A=B"},
		"size":          {params("true", `"pty":true,"rows":70000`), rpc.CodeInvalidRequest, "70000"},
		"both inputs":   {params("true", `"stdin":true,"input":"x"`), rpc.CodeInvalidRequest, "exclude"},
		"memory":        {params("true", `"limits":{"memory":"2Q"}`), rpc.CodeInvalidRequest, "2Q"},
		"limit name":    {params("true", `"limits":{"mem":1}`), rpc.CodeInvalidRequest, "mem"},
		"unknown":       {params("true", `"colour":1`), rpc.CodeInvalidRequest, "colour"},
	} {
		_, err := call[Status](w, "shell.start", c.params)
		if rpc.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %q %v", name, rpc.CodeOf(err), err)
		}
	}
	if len(w.h.records) != 0 || w.f.starts != 0 {
		t.Errorf("%d records, %d starts", len(w.h.records), w.f.starts)
	}
	if _, err := call[Status](w, "shell.status", `{"id":"nope"}`); rpc.CodeOf(err) != rpc.CodeNotFound {
		t.Error(err)
	}
}

func TestLimitsReachTheUnit(t *testing.T) {
	w := newWorld(t)
	st := must[Status](w, "shell.start", params("sleep 1000", `"limits":{"memory":"1.5G","cpu":1.5,"pids":200,"time":600}`))
	s := w.f.units[unitName(st.ID)].u.Service
	if s.MemoryMax != 3<<29 || s.CPUQuota != 1_500_000 || s.TasksMax != 200 || s.RuntimeMaxSec != 10*time.Minute {
		t.Fatalf("%+v", s)
	}
	if len(st.Warnings) != 1 || st.Warnings[0].Text != "nothing here enforces the limits on pids: the pids controller is missing" {
		t.Fatalf("%+v", st.Warnings)
	}
}

func TestAdmissionRefuses(t *testing.T) {
	w := newWorld(t, func(o *Options) {
		o.Admit = func(context.Context) (func(), error) {
			return nil, rpc.Errorf(rpc.CodeConflict, "a reset is under way")
		}
	})
	if _, err := call[Status](w, "shell.start", params("true", "")); rpc.CodeOf(err) != rpc.CodeConflict || w.f.starts != 0 {
		t.Fatal(err)
	}
}

func controlJob(id string) control.JobParams { return control.JobParams{Name: unitName(id)} }

func TestArgumentsAreBytes(t *testing.T) {
	w := newWorld(t)
	// As Python's json.dumps writes os.fsdecode(b"\xff").
	r := must[RunResult](w, "shell.run", `{"command":["/bin/sh","-c","printf %s \"$1$A\" | od -An -tx1","sh","\udcff"],"cwd":"/","env":{"PATH":"/usr/bin:/bin","A":"\udcfe"}}`)
	if strings.TrimSpace(r.Stdout) != "ff fe" {
		t.Fatalf("%+v", r)
	}
}

// A call that is sent again finds what the earlier manager did.
func TestStartSentAgain(t *testing.T) {
	w := newWorld(t)
	id := newID()
	p := params("echo once >>"+w.dir+"/count; exit 3", `"id":"`+id+`"`)
	must[RunResult](w, "shell.run", p)
	w.s.Suspend()
	w.s = New(w.o)
	if err := w.s.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	again := caller
	again.Again = true
	v, err := w.s.Methods()["shell.run"](t.Context(), again, json.RawMessage(p))
	if err != nil || *v.(*RunResult).ReturnCode != 3 || w.f.starts != 1 {
		t.Fatal(v, err, w.f.starts)
	}
	if raw, _ := os.ReadFile(w.dir + "/count"); string(raw) != "once\n" {
		t.Fatalf("%q", raw)
	}
}

// The kernel's environment comes once. Who does not know it starts nothing.
func TestOwnEnvironment(t *testing.T) {
	w := newWorld(t)
	run := func(own string) (RunResult, error) {
		return call[RunResult](w, "shell.run", `{"command":"printf %s \"$A\" | od -An -tx1","cwd":"/","own_env":`+own+`}`)
	}
	if _, err := run(`{"id":"1"}`); rpc.CodeOf(err) != codeUnknownEnvironment || w.f.starts != 0 || len(w.h.records) != 0 {
		t.Fatalf("%v, %d starts, %d records", err, w.f.starts, len(w.h.records))
	}
	for _, c := range []struct{ own, out string }{
		{`{"id":"1","text":"PATH=/usr/bin:/bin\u0000A=\udcfe"}`, "fe"}, {`{"id":"1"}`, "fe"}, {`{"id":"1"}`, "fe"},
		{`{"id":"2","text":"PATH=/usr/bin:/bin\u0000A=x"}`, "78"}, {`{"id":"2"}`, "78"}, {`{"id":"3","text":""}`, ""},
	} {
		if r, err := run(c.own); err != nil || strings.TrimSpace(r.Stdout) != c.out {
			t.Errorf("%s: %q, %v", c.own, r.Stdout, err)
		}
		if r := must[RunResult](w, "shell.run", params("echo $A", "")); r.Stdout != "\n" {
			t.Errorf("between: %q", r.Stdout)
		}
	}
	if _, err := run(`{"id":"1"}`); rpc.CodeOf(err) != codeUnknownEnvironment {
		t.Error(err)
	}
	// A kernel that was started by an earlier version.
	if r := must[RunResult](w, "shell.run", `{"command":"echo $A","cwd":"/","env":"PATH=/usr/bin:/bin\u0000A=old"}`); r.Stdout != "old\n" {
		t.Errorf("as one string: %q", r.Stdout)
	}
}

// After an update of the program's file a manager that is started anew is the new program,
// and its supervisor still the old one.
func TestOlderSupervisor(t *testing.T) {
	w := newWorld(t)
	w.f.older = true
	_, err := call[RunResult](w, "shell.run", params("true", ""))
	if rpc.CodeOf(err) != CodeStart || !strings.Contains(err.Error(), "mypr-mcp restart --keep-kernel") {
		t.Error(err)
	}
}
