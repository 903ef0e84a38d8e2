package logfile

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func open(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|flags, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func content(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return string(b)
}

// Both files together end in everything that was written last, without a gap, and a
// second process that has the log open (here: another descriptor) goes on after it.
func TestNothingRecentIsLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	f, other := open(t, path, os.O_APPEND), open(t, path, os.O_APPEND)
	w := writer(f, path, 1000, 100)
	var all strings.Builder
	for i := range 500 {
		line := fmt.Sprintf("line %d\n", i)
		out := io.Writer(w)
		if i%7 == 0 {
			out = other
		}
		if n, err := io.WriteString(out, line); err != nil || n != len(line) {
			t.Fatal(n, err)
		}
		all.WriteString(line)
		now := content(t, path)
		if len(now) > 1300 {
			t.Fatalf("%d bytes", len(now))
		}
		if got := content(t, Old(path)) + now; !strings.HasSuffix(all.String(), got) || len(got) < min(all.Len(), 1000) {
			t.Fatalf("after line %d:\n%q", i, got)
		}
	}
	if st, err := os.Stat(Old(path)); err != nil || st.Mode().Perm() != 0o600 {
		t.Error(st, err)
	}
}

func TestRotateLeavesAlone(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x.log")
	if err := rotate(path, 10); err != nil {
		t.Errorf("no file: %v", err)
	}
	target := filepath.Join(dir, "target")
	if err := os.WriteFile(target, bytes.Repeat([]byte{'x'}, 100), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	if err := rotate(path, 10); err != nil || len(content(t, target)) != 100 {
		t.Errorf("a link: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(target, path); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if err := rotate(path, 10); err != nil || len(content(t, path)) != 100 {
		t.Errorf("somebody else is at it: %v", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	// Where the old part cannot go, the log stays whole.
	if err := os.Mkdir(Old(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := rotate(path, 10); err == nil || len(content(t, path)) != 100 {
		t.Errorf("no place for the old part: %v", err)
	}
	if err := os.Remove(Old(path)); err != nil {
		t.Fatal(err)
	}
	if err := rotate(path, 10); err != nil || content(t, path) != "" || len(content(t, Old(path))) != 100 {
		t.Errorf("at last: %v", err)
	}
}

// Only the log itself is rotated, not what else standard error may be.
func TestWriterOfOtherFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x.log")
	users, plain := open(t, filepath.Join(dir, "users"), os.O_APPEND), open(t, path, 0)
	for _, f := range []*os.File{users, plain} { // another file; the log, but others could not append
		if w := writer(f, path, 10, 1); w != io.Writer(f) {
			t.Errorf("%s would be rotated", f.Name())
		}
	}
}
