package readable

import (
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// connected is a Socket and its peer.
func connected(t *testing.T) (*Socket, int) {
	t.Helper()
	a, b := pair(t)
	dup, err := unix.FcntlInt(uintptr(a), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(dup), "pair")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	s, err := TakeOver(c.(*net.UnixConn))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, b
}

// Lingering ends with input, with the peer, with its time, and takes nothing away.
func TestLinger(t *testing.T) {
	s, peer := connected(t)
	no := func() bool { return false }
	start := time.Now()
	s.Linger(time.Millisecond, no)
	if d := time.Since(start); d < time.Millisecond {
		t.Errorf("without input it ended after %v", d)
	}
	s.Linger(time.Hour, func() bool { return true })
	go func() { _, _ = unix.Write(peer, []byte("x")) }()
	start = time.Now()
	s.Linger(time.Hour, no)
	if d := time.Since(start); d > time.Minute {
		t.Errorf("with input it ended after %v", d)
	}
	b := make([]byte, 8)
	if n, err := s.Read(b); err != nil || string(b[:n]) != "x" {
		t.Errorf("read %q, %v", b[:n], err)
	}
	go func() { _ = unix.Shutdown(peer, unix.SHUT_RDWR) }()
	s.Linger(time.Hour, no)
	s.Close()
	s.Linger(time.Hour, no)
}
