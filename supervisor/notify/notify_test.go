package notify

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func serve(t *testing.T) (string, chan *Message) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "n")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	ch := make(chan *Message, 10)
	s, err := Serve(os.NewFile(uintptr(fd), path), func(m *Message) { ch <- m })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	t.Setenv(Environment, path)
	return path, ch
}

func TestMessages(t *testing.T) {
	_, ch := serve(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if sent, err := Send("READY=1\nSTATUS=a=b\nnonsense\n=x\n", w); !sent || err != nil {
		t.Fatal(sent, err)
	}
	w.Close()
	m := <-ch
	if m.PID != os.Getpid() || m.UID != os.Getuid() || len(m.Files) != 1 || !m.Fields.Is("READY") || m.Fields["STATUS"] != "a=b" || len(m.Fields) != 2 {
		t.Errorf("%+v", m)
	}
	if m.PIDFD == nil {
		t.Error("no pidfd came along") // Linux 6.5
	}
	m.Close()
	_ = r.SetReadDeadline(time.Now().Add(60 * time.Second))
	if n, _ := r.Read(make([]byte, 1)); n != 0 {
		t.Error("the pipe is still open somewhere")
	}
	// Too long is dropped as a whole, and what comes after is read.
	_, _ = Send("STATUS=" + strings.Repeat("x", 2*maxMessage))
	_, _ = Send("STATUS=next")
	if m = <-ch; m.Fields["STATUS"] != "next" {
		t.Errorf("%+v", m.Fields)
	}
	m.Close()
	_, _ = Store("name", false, r)
	if m = <-ch; m.Fields["FDNAME"] != "name" || m.Fields["FDPOLL"] != "0" || len(m.Files) != 1 {
		t.Errorf("%+v", m)
	}
	m.Close()
}

func TestBarrier(t *testing.T) {
	_, ch := serve(t)
	done := make(chan error, 1)
	go func() { done <- Barrier(60 * time.Second) }()
	m := <-ch
	select {
	case err := <-done:
		t.Fatalf("it returned before the message was handled: %v", err)
	default:
	}
	m.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
	go func() { done <- Barrier(20 * time.Millisecond) }()
	m = <-ch
	if err := <-done; err == nil {
		t.Error("no timeout")
	}
	m.Close()
}

func TestNoManager(t *testing.T) {
	t.Setenv(Environment, "")
	if sent, err := Send("READY=1"); sent || err != nil {
		t.Error(sent, err)
	}
	if err := Barrier(time.Second); err != nil {
		t.Error(err)
	}
}

func TestWatchdog(t *testing.T) {
	for _, c := range []struct {
		usec, pid string
		want      time.Duration
	}{{"", "", 0}, {"2000000", "", 2 * time.Second}, {"2000000", "1", 0}, {"x", "", 0}, {"-1", "", 0}} {
		t.Setenv("WATCHDOG_USEC", c.usec)
		t.Setenv("WATCHDOG_PID", c.pid)
		if d := Watchdog(); d != c.want {
			t.Errorf("%+v: %v", c, d)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("READY=1\nSTATUS=x"))
	f.Add([]byte("=\n\n==\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for k := range Parse(b) {
			if k == "" || strings.ContainsAny(k, "=\n") {
				t.Errorf("name %q", k)
			}
		}
	})
}

func FuzzControl(f *testing.F) {
	f.Add(unix.UnixCredentials(&unix.Ucred{Pid: 1, Uid: 2, Gid: 3}))
	f.Fuzz(func(t *testing.T, oob []byte) {
		// Descriptors in made up ancillary data are numbers that are not ours to close.
		msgs, err := unix.ParseSocketControlMessage(oob)
		if err != nil {
			return
		}
		for _, m := range msgs {
			if m.Header.Level == unix.SOL_SOCKET && (m.Header.Type == unix.SCM_RIGHTS || m.Header.Type == unix.SCM_PIDFD) {
				return
			}
		}
		control(oob).Close()
	})
}
