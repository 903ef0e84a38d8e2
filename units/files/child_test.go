package files

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
)

// Child roles: the test binary runs itself as another user, on a full disk, or to be
// killed in the middle.

type step struct{ Method, Params string }

type outcome struct {
	Code, Message string
	Result        json.RawMessage
}

// runCalls makes calls in a process of its own and returns their outcomes, or those
// before its death.
func runCalls(t *testing.T, dir string, attr *syscall.SysProcAttr, env []string, calls ...step) (got []outcome, state *os.ProcessState) {
	t.Helper()
	raw, err := json.Marshal(calls)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append([]string{"FILES_TEST_ROLE=calls", "FILES_TEST_DIR=" + dir}, env...)
	cmd.Stdin = bytes.NewReader(raw)
	cmd.SysProcAttr = attr
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if cmd.ProcessState == nil {
		t.Fatalf("cannot start the child: %v", err)
	}
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for dec.More() {
		var o outcome
		if err := dec.Decode(&o); err != nil {
			t.Fatalf("%v in %s", err, out)
		}
		got = append(got, o)
	}
	return got, cmd.ProcessState
}

func childRole(role string) int {
	dir := os.Getenv("FILES_TEST_DIR")
	if size := os.Getenv("FILES_TEST_TMPFS"); size != "" {
		if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			fmt.Fprintln(os.Stderr, "cannot make mounts private:", err)
			return 1
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
			fmt.Fprintln(os.Stderr, "cannot mount a small tmpfs:", err)
			return 1
		}
	}
	s, err := New(Options{Root: dir, Umask: -1})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	switch role {
	case "calls":
		return callsRole(s)
	case "loop":
		return loopRole(s, dir)
	}
	return 2
}

func callsRole(s *Service) int {
	if at, err := strconv.Atoi(os.Getenv("FILES_TEST_CRASH_AT")); err == nil {
		n := 0
		s.fault = func(string) error {
			if n++; n == at {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				_ = unix.Pause()
			}
			return nil
		}
	}
	var calls []step
	if err := json.NewDecoder(os.Stdin).Decode(&calls); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	out := json.NewEncoder(os.Stdout)
	for _, c := range calls {
		var o outcome
		v, err := s.Methods()[c.Method](context.Background(), json.RawMessage(c.Params))
		if err != nil {
			o.Code, o.Message = rpc.CodeOf(err), err.Error()
		} else {
			o.Result, _ = json.Marshal(v)
		}
		_ = out.Encode(o)
	}
	return 0
}

var nobody = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}

func TestPermissions(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes files of another user: run it as root")
	}
	_, dir := newService(t)
	must[any](t)(nil, os.Chmod(filepath.Dir(dir), 0o755))
	must[any](t)(nil, os.Chmod(dir, 0o777))
	put(t, dir+"/secret/f", "x")
	must[any](t)(nil, os.Chmod(dir+"/secret", 0o700))
	put(t, dir+"/readonly", "x\n") // root's, 0644, in a directory where nobody may rename
	put(t, dir+"/locked/f", "x\n")
	must[any](t)(nil, os.Chmod(dir+"/locked/f", 0o666))
	must[any](t)(nil, os.Chmod(dir+"/readonly", 0o644))
	put(t, dir+"/shared", "x\n")
	must[any](t)(nil, unix.Chmod(dir+"/shared", 0o4666))
	got, _ := runCalls(t, dir, nobody, nil,
		step{"fs.read", `{"path":"secret/f"}`},
		step{"fs.tree", `{}`},
		step{"fs.patch", `{"path":"readonly","edits":[{"old":"x","new":"y"}]}`},
		step{"fs.write", `{"path":"locked/f","text":"y","overwrite":true}`},
		step{"fs.write", `{"path":"secret/new","text":"y"}`},
		step{"fs.apply_patch", `{"patch":"*** Begin Patch\n*** Add File: mine\n+x\n*** Update File: locked/f\n@@\n-x\n+y\n*** End Patch"}`},
		step{"fs.patch", `{"path":"shared","edits":[{"old":"x","new":"y"}]}`},
	)
	if len(got) != 7 {
		t.Fatal(got)
	}
	for i, want := range []string{rpc.CodePermission, "", rpc.CodePermission, rpc.CodePermission, rpc.CodePermission, rpc.CodePermission, ""} {
		if got[i].Code != want {
			t.Errorf("call %d: %q %s", i, got[i].Code, got[i].Message)
		}
	}
	var tree TreeResult
	if err := json.Unmarshal(got[1].Result, &tree); err != nil {
		t.Fatal(err)
	}
	for _, e := range tree.Entries {
		if e.Path == "secret" && !strings.Contains(e.Error, "permission") {
			t.Errorf("%+v", e)
		}
	}
	if get(t, dir+"/readonly") != "x\n" || get(t, dir+"/locked/f") != "x\n" {
		t.Error("a refused write changed a file")
	}
	if _, err := os.Stat(dir + "/mine"); err == nil {
		t.Error("a refused patch left a file")
	}
	// The file of another owner that anybody may write became ours, and says so.
	if !strings.Contains(string(got[6].Result), "owner could not be kept") {
		t.Errorf("%s", got[6].Result)
	}
	if st, _ := os.Stat(dir + "/shared"); st.Mode()&os.ModeSetuid != 0 || st.Mode().Perm() != 0o666 {
		t.Errorf("mode %v", st.Mode())
	}
}

func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test mounts a small file system: run it as root")
	}
	dir := t.TempDir()
	big := strings.Repeat("x", 300_000)
	patch, _ := json.Marshal("*** Begin Patch\n*** Update File: a\n@@\n-old\n+new\n*** Add File: d/e/small\n+s\n*** Add File: big\n+" + big + "\n*** Delete File: b\n*** End Patch\n")
	text, _ := json.Marshal(big)
	got, _ := runCalls(t, dir, &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}, []string{"FILES_TEST_TMPFS=256k"},
		step{"fs.write", `{"path":"a","text":"old\n"}`},
		step{"fs.write", `{"path":"b","text":"b\n"}`},
		step{"fs.apply_patch", `{"patch":` + string(patch) + `}`},
		step{"fs.write", `{"path":"a","text":` + string(text) + `,"overwrite":true}`},
		step{"fs.tree", `{"hidden":true,"depth":9}`},
		step{"fs.read", `{"path":"a"}`},
		step{"fs.read", `{"path":"b"}`},
	)
	if len(got) != 7 {
		t.Fatal(got)
	}
	for _, i := range []int{2, 3} {
		if got[i].Code != "no_space" || !strings.Contains(got[i].Message, "no space") || !strings.Contains(got[i].Message, "free some space") {
			t.Errorf("call %d: %q %s", i, got[i].Code, got[i].Message)
		}
	}
	var tree TreeResult
	if err := json.Unmarshal(got[4].Result, &tree); err != nil {
		t.Fatal(err)
	}
	var all []string
	var walk func(e *Entry)
	walk = func(e *Entry) {
		all = append(all, string(e.Path))
		for _, c := range e.Entries {
			walk(c)
		}
	}
	walk(tree.Entry)
	if s := strings.Join(all, " "); s != ". .mypr a b .mypr/writes" && s != ". .mypr .mypr/writes a b" {
		t.Errorf("on the full disk are: %s", s)
	}
	if !strings.Contains(string(got[5].Result), `"text":"old\n"`) || !strings.Contains(string(got[6].Result), `"text":"b\n"`) {
		t.Errorf("%s %s", got[5].Result, got[6].Result)
	}
}

const crashPatch = "*** Begin Patch\n*** Update File: a\n@@\n-old a\n+new a\n*** Add File: d/e/new\n+made\n*** Delete File: b\n*** Update File: c\n*** Move to: m/c\n@@\n-old c\n+new c\n*** End Patch\n"

// A process that dies at any step of a patch leaves it whole or not at all, after Recover.
func TestCrashAtEveryStep(t *testing.T) {
	patch, _ := json.Marshal(crashPatch)
	before := map[string]string{"a": "old a\n", "b": "b\n", "c": "old c\n"}
	after := map[string]string{"a": "new a\n", "d/e/new": "made\n", "m/c": "new c\n"}
	crashes, undone, completed := 0, 0, 0
	for at := 1; ; at++ {
		s, dir := newService(t)
		for name, text := range before {
			put(t, dir+"/"+name, text)
		}
		must[any](t)(nil, os.Chmod(dir+"/a", 0o640))
		var inode unix.Stat_t
		must[any](t)(nil, unix.Stat(dir+"/a", &inode))
		got, state := runCalls(t, dir, nil, []string{fmt.Sprintf("FILES_TEST_CRASH_AT=%d", at)}, step{"fs.apply_patch", `{"patch":` + string(patch) + `}`})
		reports, err := s.Recover(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		tree := readTree(t, dir)
		if len(got) == 1 { // no step is left to die at
			if got[0].Code != "" || !sameTree(tree, after) || len(reports) != 0 {
				t.Fatalf("without a crash: %+v %v %v", got, tree, reports)
			}
			break
		}
		crashes++
		if !state.Sys().(syscall.WaitStatus).Signaled() {
			t.Fatalf("step %d: %v", at, state)
		}
		switch {
		case len(reports) == 0:
			if !sameTree(tree, before) && !sameTree(tree, after) {
				t.Errorf("step %d: no report, and %v", at, tree)
			}
		case reports[0].Outcome == "undone":
			undone++
			if !sameTree(tree, before) {
				t.Errorf("step %d: undone, and %v", at, tree)
			}
			var now unix.Stat_t
			if err := unix.Stat(dir+"/a", &now); err != nil || now.Ino != inode.Ino || now.Mode != inode.Mode || now.Nlink != 1 {
				t.Errorf("step %d: a is not the file it was", at)
			}
		case reports[0].Outcome == "completed":
			completed++
			if !sameTree(tree, after) {
				t.Errorf("step %d: completed, and %v", at, tree)
			}
		default:
			t.Errorf("step %d: %+v", at, reports)
		}
		if len(reports) > 0 && len(reports[0].Paths) != 5 && reports[0].Paths != nil {
			t.Errorf("step %d: %+v", at, reports)
		}
		if again, err := s.Recover(t.Context()); err != nil || len(again) != 0 {
			t.Errorf("step %d: recovering twice: %v %v", at, again, err)
		}
	}
	t.Logf("%d steps: %d undone, %d completed", crashes, undone, completed)
	if undone < 10 || completed < 2 {
		t.Error("too few crashes hit the change")
	}
}

// The same for the change of one file, whose rename is the commit.
func TestCrashAtEveryStepOfAWrite(t *testing.T) {
	outcomes := map[string]int{}
	for at := 1; ; at++ {
		s, dir := newService(t)
		put(t, dir+"/f", "old")
		got, _ := runCalls(t, dir, nil, []string{fmt.Sprintf("FILES_TEST_CRASH_AT=%d", at)}, step{"fs.write", `{"path":"f","text":"new","overwrite":true}`})
		reports, err := s.Recover(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		text := get(t, dir+"/f")
		if len(got) == 1 {
			break
		}
		o := "none"
		if len(reports) == 1 {
			o = reports[0].Outcome
		}
		outcomes[o]++
		if want := map[string]string{"none": "old", "undone": "old", "completed": "new"}[o]; text != want {
			t.Errorf("step %d: %s, and %q", at, o, text)
		}
	}
	if outcomes["undone"] < 3 || outcomes["completed"] != 1 {
		t.Error(outcomes)
	}
}

// loopRole applies patch after patch that move a counter in several files.
func loopRole(s *Service, dir string) int {
	if _, err := s.Recover(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	raw, err := os.ReadFile(filepath.Join(dir, "f0"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	n, _ := strconv.Atoi(strings.TrimSpace(string(raw)))
	for ; ; n++ {
		var p strings.Builder
		p.WriteString("*** Begin Patch\n")
		for i := range 3 {
			fmt.Fprintf(&p, "*** Update File: f%d\n@@\n-%d\n+%d\n", i, n, n+1)
		}
		fmt.Fprintf(&p, "*** Update File: m/%d\n*** Move to: m/%d\n*** Add File: d%d/x\n+x\n*** Delete File: d%d/x\n*** End Patch\n", n, n+1, n+1, n)
		params, _ := json.Marshal(map[string]string{"patch": p.String()})
		if _, err := s.Methods()["fs.apply_patch"](context.Background(), params); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		fmt.Println(n + 1)
	}
}

// A process that applies patches all the time is killed again and again.
func TestKilledAtRandom(t *testing.T) {
	s, dir := newService(t)
	for i := range 3 {
		put(t, fmt.Sprintf("%s/f%d", dir, i), "0\n")
	}
	put(t, dir+"/m/0", "moved\n")
	put(t, dir+"/d0/x", "x\n")
	patches := 0
	for round := 0; patches < 200; round++ {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = []string{"FILES_TEST_ROLE=loop", "FILES_TEST_DIR=" + dir}
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// Each round lets some patches pass; where in the next one the signal meets the
		// process is up to the scheduler.
		buf := make([]byte, 1)
		for lines := 0; lines < 3+round%11; {
			if _, err := out.Read(buf); err != nil {
				t.Fatalf("the child ended: %v", err)
			}
			if buf[0] == '\n' {
				lines++
				patches++
			}
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		reports, err := s.Recover(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range reports {
			if r.Outcome != "undone" && r.Outcome != "completed" {
				t.Fatalf("%+v", r)
			}
		}
		tree := readTree(t, dir)
		n := strings.TrimSpace(tree["f0"])
		want := map[string]string{"f0": n + "\n", "f1": n + "\n", "f2": n + "\n", "m/" + n: "moved\n", "d" + n + "/x": "x\n"}
		if !sameTree(tree, want) {
			t.Fatalf("round %d: %v, want %v (%v)", round, tree, want, reports)
		}
		noLeftovers(t, dir)
	}
}

// readTree is the content of all files outside .mypr.
func readTree(t testing.TB, dir string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.Name() == ".mypr" {
			return filepath.SkipDir
		}
		if !d.IsDir() {
			rel, _ := filepath.Rel(dir, path)
			tree[rel] = get(t, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func sameTree(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || w != v {
			return false
		}
	}
	return true
}
