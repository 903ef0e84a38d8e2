package ospath

import (
	"encoding/json"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"mypr/internal/rpc"
)

func TestTextRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := Text(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))
		raw, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		var out Text
		if err := json.Unmarshal(raw, &out); err != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		if out != in {
			t.Fatalf("%q came back as %q through %s", in, out, raw)
		}
	})
}

// The spelling is Python's: os.fsdecode of the bytes, and json.dumps of that, and back.
func TestTextIsPythons(t *testing.T) {
	cmd := exec.Command("python3", "-c", `
import json, os, sys
names = [b"plain", b"caf\xe9", b"\xff\xfe", "é💥\x7f".encode(), b"a\nb\"\\", b"\xed\xa0\x80"]
print(json.dumps([[os.fsdecode(n), n.hex()] for n in names]))
for n, raw in zip(names, json.loads(sys.stdin.read())):
    assert os.fsencode(raw) == n, (raw, n)
`)
	names := []Text{"plain", "caf\xe9", "\xff\xfe", "é💥\x7f", "a\nb\"\\", "\xed\xa0\x80"}
	raw, err := json.Marshal(names)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = strings.NewReader(string(raw))
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("python disagrees with %s: %v", raw, err)
	}
	var theirs [][2]Text
	if err := json.Unmarshal(out, &theirs); err != nil {
		t.Fatal(err)
	}
	for i, n := range theirs {
		if n[0] != names[i] {
			t.Errorf("python's spelling of %q was read as %q", names[i], n[0])
		}
	}
}

func TestTextRefusesWhatNoFileCanBeCalled(t *testing.T) {
	for _, raw := range []string{`"\ud800"`, `"\udc00"`, `"\udfff x"`, `7`, `{}`} {
		var x Text
		if err := json.Unmarshal([]byte(raw), &x); err == nil {
			t.Errorf("%s was accepted as %q", raw, x)
		}
	}
	var l List
	for raw, want := range map[string]int{`"a"`: 1, `["a","b"]`: 2, `[]`: 0, `null`: 0} {
		l = nil
		if err := json.Unmarshal([]byte(raw), &l); err != nil || len(l) != want {
			t.Errorf("%s: %v %v", raw, l, err)
		}
	}
	if err := json.Unmarshal([]byte(`[1]`), &l); err == nil {
		t.Error("a list of numbers was accepted")
	}
}

func TestTextAsKey(t *testing.T) {
	var m map[Text]int
	if err := json.Unmarshal([]byte(`{"caf\udce9":1}`), &m); err != nil || m["caf\xe9"] != 1 {
		t.Fatal(m, err)
	}
}

// A writer that leaves surrogates unescaped sends their three bytes (surrogatepass).
func TestTextUnescapedSurrogate(t *testing.T) {
	var x Text
	if err := json.Unmarshal([]byte("\"caf\xed\xb3\xa9\""), &x); err != nil || x != "caf\xe9" {
		t.Fatalf("%q %v", x, err)
	}
}

func FuzzText(f *testing.F) {
	for _, s := range []string{`"a"`, `"\udc80"`, `"\ud83d\udca5"`, `"\ud83d"`, "\"\xff\"", `"\u`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var x Text
		if json.Unmarshal(raw, &x) != nil {
			return
		}
		again, err := json.Marshal(x)
		if err != nil {
			t.Fatal(err)
		}
		var y Text
		if err := json.Unmarshal(again, &y); err != nil || x != y {
			t.Fatalf("%q -> %s -> %q (%v)", x, again, y, err)
		}
	})
}

func TestRoot(t *testing.T) {
	r := Root("/ws")
	for in, want := range map[string]string{"a/b": "/ws/a/b", "/etc/x": "/etc/x", ".": "/ws/.", "../x": "/ws/../x"} {
		if got, err := r.Abs(in); err != nil || got != want {
			t.Errorf("Abs(%q) = %q, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "a\x00b"} {
		if _, err := r.Abs(in); rpc.CodeOf(err) != rpc.CodeInvalidRequest {
			t.Errorf("Abs(%q): %v", in, err)
		}
	}
	for in, want := range map[string]Text{"/ws": ".", "/ws/a//b": "a/b", "/wsx/a": "/wsx/a", "/ws/../x": "/x"} {
		if got := r.Display(in); got != want {
			t.Errorf("Display(%q) = %q", in, got)
		}
	}
	if got := Root("/").Display("/a"); got != "a" {
		t.Errorf("Display below / = %q", got)
	}
	for errno, code := range map[syscall.Errno]string{
		syscall.ENOENT: "not_found", syscall.EACCES: "permission_denied", syscall.ELOOP: "invalid_request",
		syscall.ENOSPC: "no_space", syscall.EROFS: "permission_denied", syscall.EIO: "io_error", syscall.EBUSY: "io_error", syscall.ENAMETOOLONG: "invalid_request",
	} {
		if got := rpc.CodeOf(r.Error("read", "/ws/a", errno)); got != code {
			t.Errorf("%v: code %q, want %q", errno, got, code)
		}
	}
}
