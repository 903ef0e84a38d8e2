package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
)

// Every refusal names the thing, and the session goes on.
func TestBadToolArguments(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	if r := f.tool("execute", map[string]any{"code": "1"}); !r.IsError || !strings.Contains(r.Text, "init") {
		t.Errorf("execute before init: %s", r.Text)
	}
	for _, id := range []any{"with space", strings.Repeat("x", 129), "ü", "", 7, true, []string{"a"}} {
		r := f.tool("init", map[string]any{"client_id": id})
		if !r.IsError || !strings.Contains(strings.ReplaceAll(r.Text, "client id", "client_id"), "client_id") {
			t.Errorf("client_id %v: %s", id, r.Text)
		}
	}
	f.init("me")
	if r := f.tool("init", map[string]any{"client_id": "other"}); !r.IsError || !strings.Contains(r.Text, "me") {
		t.Errorf("a second id: %s", r.Text)
	}
	done, _ := f.do("print('x' * 5000)\nprint('y')")
	id := done.Exec.ExecID
	for name, c := range map[string]struct {
		tool string
		args map[string]any
		want string
	}{
		"no code":          {"execute", map[string]any{}, "code"},
		"code is a number": {"execute", map[string]any{"code": 7}, "code"},
		"unknown argument": {"execute", map[string]any{"code": "1", "timeout": 5}, "timeout"},
		"wait is text":     {"execute", map[string]any{"code": "1", "wait_ms": "soon"}, "wait_ms"},
		"wait is negative": {"execute", map[string]any{"code": "1", "wait_ms": -1}, "wait_ms"},
		"wait is a half":   {"execute", map[string]any{"code": "1", "wait_ms": 1.5}, "wait_ms"},
		"budget too small": {"execute", map[string]any{"code": "1", "max_bytes": 10}, "max_bytes"},
		"budget too large": {"poll", map[string]any{"exec_id": id, "max_bytes": 1 << 30}, "max_bytes"},
		"request id":       {"execute", map[string]any{"code": "1", "request_id": "a b"}, "request_id"},
		"no exec id":       {"poll", map[string]any{}, "exec_id"},
		"unknown exec id":  {"poll", map[string]any{"exec_id": strings.Repeat("0", 32)}, strings.Repeat("0", 32)},
		"odd exec id":      {"poll", map[string]any{"exec_id": "../../etc/passwd"}, "exec_id"},
		"cursor too far":   {"poll", map[string]any{"exec_id": id, "cursor": 1 << 40}, "cursor"},
		"cursor negative":  {"poll", map[string]any{"exec_id": id, "cursor": -1}, "cursor"},
		"cursor is text":   {"poll", map[string]any{"exec_id": id, "cursor": "end"}, "cursor"},
		"other code":       {"execute", map[string]any{"code": "2", "request_id": "r"}, "r"},
		"unknown tool":     {"run", map[string]any{}, "run"},
	} {
		if name == "other code" {
			f.tool("execute", map[string]any{"code": "1", "request_id": "r", "wait_ms": 5000})
		}
		_, ch := f.begin("tools/call", toolParams(c.tool, c.args))
		r := f.answer(c.tool, ch)
		text := string(r.Result)
		if r.Error != nil {
			text = `"isError":true ` + r.Error.Message
		}
		if !strings.Contains(strings.ReplaceAll(text, " ", ""), `"isError":true`) || !strings.Contains(text, c.want) {
			t.Errorf("%s: %s", name, text)
		}
	}
	if r, _ := f.do("'alive'"); !strings.Contains(output(r), "alive") {
		t.Errorf("the session did not go on: %s", r.Text)
	}
	if r := f.tool("execute", map[string]any{"code": "1", "wait_ms": 99_000}); r.Exec.ClampedWaitMS != api.MaxWaitMS {
		t.Errorf("a wait of 99 s was cut to %d ms", r.Exec.ClampedWaitMS)
	}
}

// Whatever comes in on standard input, the front end answers or ignores it and lives.
func TestBadLinesOnStandardInput(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	for _, line := range []string{
		"not json", "{", `{"jsonrpc":"2.0"`, "\x00\x01\xff\xfe binary", "", "[]", "7", "null", `"text"`,
		`{"jsonrpc":"1.0","method":"x"}`, `{"jsonrpc":"2.0","method":7}`,
		`{"jsonrpc":"2.0","method":"notifications/nobody-knows"}`,
		`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":12345}}`,
	} {
		if _, err := io.WriteString(f.in, line+"\n"); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
	}
	if r := f.request("nobody/knows", map[string]any{}); r.Error == nil || r.Error.Code != -32601 {
		t.Errorf("an unknown method: %+v", r)
	}
	f.init("")
	if f.must("1 + 1") != "2" {
		t.Error("the session did not go on")
	}
}

func TestOversizedLineIsRefused(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	f.must("x = 5")
	big := map[string]any{"code": "len('" + strings.Repeat("x", rpc.MaxFrame) + "')"}
	_, ch := f.begin("tools/call", toolParams("execute", big))
	select {
	case r := <-ch:
		if r.Error == nil && !strings.Contains(string(r.Result), "isError") {
			t.Errorf("a frame over 32 MiB was accepted: %.200s", r.Result)
		}
	case <-time.After(patience):
		t.Error("a frame over 32 MiB was not answered")
	}
	g := s.serve()
	g.init("")
	if g.must("x") != "5" {
		t.Error("the session did not go on")
	}
}

// Strangers on the sockets: nothing they send harms the runtime.
func TestGarbageOnTheSockets(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	f.must("x = 1")
	stem := strings.TrimSuffix(s.status().Socket, ".sock")
	for _, ext := range []string{".sock", ".ctl", ".krn"} {
		for _, garbage := range [][]byte{
			[]byte("not json\n"), {0, 1, 2, 255, '\n'}, []byte(`{"id":1,"method":"status","fds":3}` + "\n"),
			[]byte(`{"type":"hello","protocol":99}` + "\n"), []byte(`{"id":1}` + "\n"), {},
			bytes.Repeat([]byte("x"), rpc.MaxFrame+1),
		} {
			c, err := net.Dial("unix", stem+ext)
			if err != nil {
				t.Fatalf("%s: %v", ext, err)
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			_, _ = c.Write(garbage) // the other side may hang up in the middle
			if u, ok := c.(*net.UnixConn); ok {
				_ = u.CloseWrite()
			}
			if _, err := io.Copy(io.Discard, c); err != nil && os.IsTimeout(err) {
				t.Errorf("%s: %.20q neither answered nor ended", ext, garbage)
			}
			c.Close()
		}
	}
	if f.must("x") != "1" {
		t.Error("the session did not go on")
	}
	if r := s.status(); !r.Healthy {
		t.Errorf("not healthy: %s", r.Problem)
	}
}

func TestBrokenConfigurationIsNamed(t *testing.T) {
	s := newSession(t, "[python\nplain = true\n")
	out, code := s.cli("exec", "1")
	if code != 1 || !strings.Contains(out, "config.toml") || !strings.Contains(out, "1") {
		t.Errorf("exec with a broken config.toml: exit %d\n%s", code, out)
	}
	f := s.serve()
	if r := f.tool("init", nil); !r.IsError || !strings.Contains(r.Text, "config.toml") {
		t.Errorf("init with a broken config.toml: %s", r.Text)
	}
	s.write(".mypr/config.toml", "[python]\nplain = true\n")
	f.init("")
	if f.must("x = 1; x + 1") != "2" {
		t.Error("mended, it does not run")
	}
	// Nor does a mistake cost what runs.
	for text, want := range map[string]string{
		"[python]\nplain = 3\n":                      "config.toml:2:",
		"[python]\nplain = true\npython = \"3.2\"\n": "config.toml:3:1: python.python: ",
		"[python]\npython = \"/nowhere/python\"\n":   "/nowhere/python",
	} {
		s.write(".mypr/config.toml", text)
		for _, verb := range []string{"restart", "reset"} {
			if out, code := s.cli(verb, "--force"); code != 1 || !strings.Contains(out, want) {
				t.Errorf("%s with %q: exit %d\n%s", verb, text, code, out)
			}
			if r, _ := f.do("await ws." + verb + "()"); r.Exec.State != api.FailedCell || !strings.Contains(r.Text, want) {
				t.Errorf("ws.%s with %q: %s", verb, text, r.Text)
			}
			if f.must("x") != "1" {
				t.Fatalf("%s with %q was not refused before it began", verb, text)
			}
		}
	}
}

// A directory that was moved under its runtime: status says what other commands refuse for.
func TestMovedWorkspace(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "x = 1")
	old := s.dir
	s.dir += "-moved"
	if err := os.Rename(old, s.dir); err != nil {
		t.Fatal(err)
	}
	if r := s.status(); r.Healthy || !strings.Contains(r.Problem, old) || r.Hint == "" {
		t.Errorf("status: healthy %v, problem %q, hint %q", r.Healthy, r.Problem, r.Hint)
	}
	if out, code := s.cli("exec", "x"); code != 1 || !strings.Contains(out, "moved") || !strings.Contains(out, "mypr-mcp stop") {
		t.Errorf("exec: exit %d\n%s", code, out)
	}
	s.ok("stop")
	if out := s.ok("exec", "1 + 1"); out != "2\n" {
		t.Errorf("in its new place: %q", out)
	}
}

// A cell that no kernel can run says why, on the command line too.
func TestWrongPythonIsNamed(t *testing.T) {
	s := newSession(t, "[python]\npython = \"/nowhere/python\"\n")
	out, code := s.cli("exec", "1")
	if code != 1 || !strings.Contains(out, "config.toml") || !strings.Contains(out, "/nowhere/python") || !strings.Contains(out, "reset") {
		t.Errorf("exec with an interpreter that is not there: exit %d\n%s", code, out)
	}
	s.write(".mypr/config.toml", "[python]\nplain = true\n")
	s.ok("reset")
	if out := s.ok("exec", "1 + 1"); out != "2\n" {
		t.Errorf("mended: %q", out)
	}
}

// An interpreter that seems to do and does not: what could not be told before a restart is
// in its answer.
func TestRestartWithoutANewKernel(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "x = 1")
	s.write("python", "#!/bin/sh\n[ \"$1 $2 $3\" = '-I -S -c' ] || { echo broken >&2; exit 9; }\n"+`printf '{"version": "3.12.1", "path": "%s"}' "$0"`)
	if err := os.Chmod(filepath.Join(s.dir, "python"), 0o755); err != nil {
		t.Fatal(err)
	}
	s.write(".mypr/config.toml", "[python]\nplain = true\npython = \"./python\"\n")
	out, code := s.cli("restart", "--json=false")
	for _, want := range []string{"the Python memory of before is gone", "there is no Python kernel", "cannot create the Python environment", "next: mend that"} {
		if code != 1 || !strings.Contains(out, want) {
			t.Errorf("restart: exit %d, without %q:\n%s", code, want, out)
		}
	}
	s.write(".mypr/config.toml", "[python]\nplain = true\n")
	s.ok("reset")
	s.ok("exec", "1")
}

func TestBrokenUnitFileIsNamed(t *testing.T) {
	s := newSession(t)
	if err := os.MkdirAll(filepath.Join(s.dir, ".mypr", "units"), 0o755); err != nil {
		t.Fatal(err)
	}
	s.write(".mypr/units/manager.service", "[Service]\nType=nonsense\nExecStart=/bin/true\n")
	out, code := s.cli("exec", "1")
	if code != 1 || !strings.Contains(out, "manager.service") || !strings.Contains(out, "Type") {
		t.Errorf("exec with a broken unit file: exit %d\n%s", code, out)
	}
	if err := os.RemoveAll(filepath.Join(s.dir, ".mypr", "units")); err != nil {
		t.Fatal(err)
	}
	s.ok("exec", "1")
}

func TestBrokenVenvIsReplaced(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "1")
	s.ok("stop")
	link := filepath.Join(s.dir, ".mypr", "venv", "bin", "python")
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/nowhere/python", link); err != nil {
		t.Fatal(err)
	}
	if out := s.ok("exec", "1 + 1"); out != "2\n" {
		t.Errorf("printed %q", out)
	}
	if aside, _ := filepath.Glob(filepath.Join(s.dir, ".mypr", ".venv-invalid-*")); len(aside) != 1 {
		t.Errorf("moved aside: %q", aside)
	}
}

// Root may write anything, so "read-only" is made of what refuses root as well: a
// file where a directory must be.
func TestUnusableDirectories(t *testing.T) {
	s := newSession(t, "")
	refuse := func(name, want string, args ...string) {
		t.Helper()
		out, code := s.cli(args...)
		if code != 1 || !strings.Contains(out, want) || !strings.Contains(out, "next:") {
			t.Errorf("%s: exit %d\n%s", name, code, out)
		}
	}
	refuse("root of the file system", "/", "-C", "/", "exec", "1")
	refuse("no such directory", "nowhere", "-C", filepath.Join(s.dir, "nowhere"), "exec", "1")
	file := filepath.Join(s.dir, "file")
	s.write("file", "")
	refuse("a file", file, "-C", file, "exec", "1")
	ws := filepath.Join(s.dir, "blocked")
	if err := os.Mkdir(ws, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(ws, ".mypr"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	refuse(".mypr cannot be made", ".mypr", "-C", ws, "exec", "1")

	env := s.env
	s.env = append(env, "XDG_RUNTIME_DIR=/"+strings.Repeat("long/", 30))
	refuse("socket path too long", "XDG_RUNTIME_DIR", "exec", "1")
	stranger := filepath.Join(s.dir, "stranger")
	if err := os.MkdirAll(filepath.Join(stranger, "mypr"), 0o700); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() == 0 {
		if err := os.Chown(filepath.Join(stranger, "mypr"), 12345, 12345); err != nil {
			t.Fatal(err)
		}
		s.env = append(env, "XDG_RUNTIME_DIR="+stranger)
		refuse("runtime directory of another user", "12345", "exec", "1")
	}
	s.env = env
	// The front end of such a workspace still answers, and says it as a tool error.
	f := s.serve("-C", "/")
	if r := f.tool("init", nil); !r.IsError || !strings.Contains(r.Text, "/") {
		t.Errorf("init in /: %s", r.Text)
	}
}

// A journal that is damaged on disk is served as far as it goes, with its place marked.
func TestDamagedJournal(t *testing.T) {
	s := newSession(t)
	f := s.serve()
	f.init("")
	var r toolResult
	r, _ = f.do("import sys\nfor n in range(6):\n    print('line', n, flush=True)\n    print('err', n, file=sys.stderr, flush=True)")
	s.ok("stop")
	path := filepath.Join(s.dir, ".mypr", "runs", r.Exec.ExecID+".jsonl")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.SplitAfter(data, []byte("\n"))
	if len(lines) < 4 {
		t.Fatalf("only %d events", len(lines))
	}
	lines[1] = append(bytes.Repeat([]byte{0xff}, len(lines[1])-1), '\n')
	damaged := append(bytes.Join(lines, nil), `{"type":"stream","text":"cut`...)
	if err := os.WriteFile(path, damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	g := s.serve()
	p := g.tool("poll", map[string]any{"exec_id": r.Exec.ExecID, "cursor": 0})
	var codes []string
	for _, e := range p.Exec.Output {
		if e.Code != "" {
			codes = append(codes, e.Code)
		}
	}
	text, _ := json.Marshal(codes)
	if !strings.Contains(string(text), "journal_corrupt") || !strings.Contains(string(text), "journal_truncated") {
		t.Errorf("codes %s\n%s", text, p.Text)
	}
	if !strings.Contains(output(p), "5") {
		t.Errorf("what is readable was not served: %q", output(p))
	}
	if now, _ := os.ReadFile(path); !bytes.Equal(now, damaged) {
		t.Error("the damaged journal was changed")
	}
}

// TestNewerRecords opens a session whose records a later version of the program wrote.
func TestNewerRecords(t *testing.T) {
	s := newSession(t)
	s.ok("exec", "1")
	s.ok("stop")
	f, err := os.OpenFile(filepath.Join(s.dir, ".mypr", "history.sqlite3"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const userVersion = 60 // in the header, big-endian: https://www.sqlite.org/fileformat.html#user_version_number
	old := make([]byte, 4)
	if _, err := f.ReadAt(old, userVersion); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{0, 0, 1, 0}, userVersion); err != nil {
		t.Fatal(err)
	}
	if out, code := s.cli("exec", "1"); code == 0 || !strings.Contains(out, "newer version of mypr-mcp") || !strings.Contains(out, "use that version") {
		t.Errorf("exit status %d: %s", code, out)
	}
	if _, err := f.WriteAt(old, userVersion); err != nil {
		t.Fatal(err)
	}
	if out := s.ok("exec", "6 * 7"); !strings.Contains(out, "42") {
		t.Errorf("got %s", out)
	}
}
