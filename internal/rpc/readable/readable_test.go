package readable

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func pair(t *testing.T) (a, b int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fds[0]); unix.Close(fds[1]) })
	return fds[0], fds[1]
}

// Input wakes, again and again; that the peer has read does not.
func TestWait(t *testing.T) {
	a, b := pair(t)
	s, err := New(a)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	calls := 0
	buf := make([]byte, 16)
	got := make(chan string)
	ready := make(chan struct{}, 100)
	go func() {
		defer close(got)
		for {
			n := 0
			if s.Wait(func() bool {
				calls++
				n, _ = unix.Read(a, buf)
				if n <= 0 {
					ready <- struct{}{}
				}
				return n > 0
			}) != nil {
				return
			}
			got <- string(buf[:n])
		}
	}()
	for _, text := range []string{"x", "y", "z"} {
		<-ready
		if _, err := unix.Write(a, []byte("to b")); err != nil {
			t.Fatal(err)
		}
		if n, err := unix.Read(b, make([]byte, 16)); n != 4 {
			t.Fatal(n, err)
		}
		if _, err := unix.Write(b, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if g := <-got; g != text {
			t.Errorf("got %q, not %q", g, text)
		}
	}
	<-ready
	s.Close()
	for range got {
	}
	if calls != 7 { // three inputs, each found in vain once before, and the last wait
		t.Errorf("tried %d times", calls)
	}
}

func TestClose(t *testing.T) {
	a, _ := pair(t)
	s, err := New(a)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(10*time.Millisecond, func() { s.Close() })
	if err := s.Wait(func() bool { return false }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("error %v", err)
	}
}

// What cannot be waited for is no error.
func TestRegularFile(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s, err := New(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Wait(func() bool { return true }); err != nil {
		t.Error(err)
	}
	if _, err := New(-1); err == nil {
		t.Error("a bad descriptor was taken")
	}
}
