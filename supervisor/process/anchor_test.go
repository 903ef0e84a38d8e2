package process

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// anchoredMain is what an anchor starts in these tests: it writes what it was handed to
// the descriptor "result", with anything that went wrong, and says farewell.
func anchoredMain() {
	a, held, err := TakeAnchor()
	var result *os.File
	text := fmt.Sprint(err, " ", a.PID == os.Getppid(), " ", os.Args[1:])
	for _, e := range held {
		var name string
		if err := json.Unmarshal(e.Info, &name); err != nil {
			text += err.Error()
		}
		text += fmt.Sprint(" ", e.Key, name)
		if name == "result" {
			result = os.NewFile(uintptr(e.FD), name)
		}
		if flags, err := unix.FcntlInt(uintptr(e.FD), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			text += " inheritable"
		}
	}
	if HasAnchor() {
		text += " again"
	}
	fmt.Fprint(result, text)
	a.Dismiss()
}

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	if err := r.SetReadDeadline(time.Now().Add(60 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return r, w
}

func anchored(t *testing.T, path string) (a *Anchor, result *os.File) {
	t.Helper()
	a, err := StartAnchor(path, []string{"anchored", "one", "two"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Reap(a.PID) })
	result, w := pipe(t)
	if err := a.Update([]Anchored{{Key: 1, Info: json.RawMessage(`"result"`), File: w}}, nil); err != nil {
		t.Fatal(err)
	}
	w.Close()
	return a, result
}

func TestAnchorKeepsAndStartsAgain(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// A program that is gone, or cannot be executed, is replaced by the anchor's own.
	for _, path := range []string{exe, "/nonexistent/program"} {
		a, result := anchored(t, path)
		kept, w := pipe(t)
		dropped, w2 := pipe(t)
		if err := a.Update([]Anchored{{Key: 2, Info: json.RawMessage(`"dropped"`), File: w2}, {Key: 3, Info: json.RawMessage(`"kept"`), File: w}}, nil); err != nil {
			t.Fatal(err)
		}
		w.Close()
		w2.Close()
		if err := a.Update(nil, []uint64{2}); err != nil {
			t.Fatal(err)
		}
		// End of file once the anchor has closed the last copy: it has read everything.
		if b, err := io.ReadAll(dropped); err != nil || len(b) > 0 {
			t.Fatalf("dropped: %q, %v", b, err)
		}
		if hup, err := pollOne(FD(kept), unix.POLLIN|unix.POLLHUP, 0); hup || err != nil {
			t.Fatalf("what is kept has ended: %v", err)
		}
		a.sock.Close() // the supervisor's death
		b, err := io.ReadAll(result)
		if want := "<nil> true [one two] 1result 3kept"; err != nil || string(b) != want {
			t.Errorf("the restarted program said %q, %v; want %q", b, err, want)
		}
		if b, err := io.ReadAll(kept); err != nil || len(b) > 0 { // both are gone
			t.Errorf("kept: %q, %v", b, err)
		}
	}
}

func TestAnchorDismissed(t *testing.T) {
	a, result := anchored(t, "/proc/self/exe")
	a.Dismiss()
	if Runs(a.PID) {
		t.Error("the anchor runs on")
	}
	if b, err := io.ReadAll(result); err != nil || len(b) > 0 {
		t.Errorf("a dismissed anchor started the program again: %q, %v", b, err)
	}
}

func TestManyAnchored(t *testing.T) {
	a, result := anchored(t, "/proc/self/exe")
	var add []Anchored
	var ends []*os.File
	for i := range 3*anchorBatch + 7 {
		r, w := pipe(t)
		ends = append(ends, r)
		add = append(add, Anchored{Key: uint64(i + 2), Info: json.RawMessage(`"many"`), File: w})
	}
	if err := a.Update(add, nil); err != nil {
		t.Fatal(err)
	}
	var drop []uint64
	for _, e := range add {
		e.File.Close()
		drop = append(drop, e.Key)
	}
	if err := a.Update(nil, drop); err != nil {
		t.Fatal(err)
	}
	for _, r := range ends {
		if b, err := io.ReadAll(r); err != nil || len(b) > 0 {
			t.Fatalf("%q, %v", b, err)
		}
	}
	a.sock.Close()
	b, err := io.ReadAll(result)
	if want := "<nil> true [one two] 1result"; err != nil || string(b) != want {
		t.Errorf("%q, %v", b, err)
	}
}
