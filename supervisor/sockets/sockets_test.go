package sockets

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestListenUnix(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "deep", "s")
	f, err := Listen(path, Config{Mode: 0o660})
	if err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o660 {
		t.Errorf("%v %v", fi.Mode(), err)
	}
	if !Listens(f, path) || Listens(f, path+"x") || !Live(path) {
		t.Error("it is not recognised")
	}
	var busy *InUseError
	if _, err := Listen(path, Config{}); !errors.As(err, &busy) {
		t.Errorf("over a live one: %v", err)
	}
	f.Close()
	if Live(path) {
		t.Error("still live")
	}
	if f, err = Listen(path, Config{}); err != nil {
		t.Fatalf("over a stale one: %v", err)
	}
	f.Close()
}

// A live socket of another type is live too.
func TestDatagramIsLive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d")
	f, err := BindDatagram(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var busy *InUseError
	if _, err := Listen(path, Config{}); !errors.As(err, &busy) {
		t.Errorf("%v", err)
	}
	if !Bound(f, path) || Listens(f, path) {
		t.Error("it is not recognised")
	}
}

func TestNeverReplacesOtherFiles(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "f"), filepath.Join(dir, "l")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "nowhere"), link); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{file, link, dir} {
		if _, err := Listen(p, Config{}); err == nil {
			t.Errorf("%s was replaced", p)
		}
		if _, err := os.Lstat(p); err != nil {
			t.Error(err)
		}
	}
}

func TestLongPath(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("d", 100), "s")
	f, err := Listen(path, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if !Live(path) || !Listens(f, path) {
		t.Error("not reachable")
	}
	if _, err := Listen(filepath.Join(t.TempDir(), strings.Repeat("s", 100)), Config{}); err == nil {
		t.Error("a name that cannot be")
	}
}

func TestTCP(t *testing.T) {
	for _, bad := range []string{"0.0.0.0:0", "example.com:80", "127.0.0.1", "127.0.0.1:x", "relative/path", ""} {
		if _, err := Listen(bad, Config{}); err == nil {
			t.Errorf("%q was accepted", bad)
		}
		if CheckAddr(bad) == nil {
			t.Errorf("CheckAddr(%q) is nil", bad)
		}
	}
	for _, addr := range []string{"127.0.0.1:0", "localhost:0"} {
		f, err := Listen(addr, Config{})
		if err != nil {
			t.Fatal(err)
		}
		l, err := net.FileListener(f)
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Error(err)
		} else {
			c.Close()
		}
		var busy *InUseError
		if _, err := Listen(l.Addr().String(), Config{}); !errors.As(err, &busy) {
			t.Errorf("%v", err)
		}
		l.Close()
		f.Close()
	}
}

// Children must not see the supervisor's sockets but where they are passed.
func TestCloseOnExec(t *testing.T) {
	f, err := Listen(filepath.Join(t.TempDir(), "s"), Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	raw, _ := f.SyscallConn()
	_ = raw.Control(func(fd uintptr) {
		if flags, _, _ := syscall.Syscall(syscall.SYS_FCNTL, fd, syscall.F_GETFD, 0); flags&syscall.FD_CLOEXEC == 0 {
			t.Error("not close-on-exec")
		}
	})
}
