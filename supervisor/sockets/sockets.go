// Package sockets makes the listening sockets that a supervisor holds for its units.
//
// It owns binding, the rules for socket files (a stale one is replaced, a live one or
// anything that is no socket never), recognising a socket that was handed over, and
// taking one back out of a process that still has it. It does not accept and does not
// decide when a service starts.
package sockets

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// InUseError says that somebody listens at the address already.
type InUseError struct{ Addr string }

func (e *InUseError) Error() string { return e.Addr + ": somebody listens there already" }

// Config is how to make a socket.
type Config struct {
	Mode    uint32 // of a socket file; 0 means 0600
	DirMode uint32 // of directories made for it; 0 means 0700
	Backlog int    // 0 means 4096
}

// Listen binds and listens at addr: an absolute path or a loopback "host:port". The
// descriptor is blocking and close-on-exec, ready to be passed on.
func Listen(addr string, c Config) (*os.File, error) {
	if c.Backlog == 0 {
		c.Backlog = unix.SOMAXCONN
	}
	if strings.HasPrefix(addr, "/") {
		return listenUnix(addr, c)
	}
	return listenTCP(addr, c)
}

// CheckAddr reports why addr cannot be a ListenStream.
func CheckAddr(addr string) error {
	if strings.HasPrefix(addr, "/") {
		return nil
	}
	_, err := tcpAddr(addr)
	return err
}

func tcpAddr(addr string) (*net.TCPAddr, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("%s is neither an absolute path nor host:port", addr)
	}
	if host == "localhost" {
		host = "127.0.0.1"
	}
	ip := net.ParseIP(host)
	if ip == nil || !ip.IsLoopback() {
		return nil, fmt.Errorf("%s: only loopback addresses are allowed", addr)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("%s: bad port", addr)
	}
	return &net.TCPAddr{IP: ip, Port: int(n)}, nil
}

func listenTCP(addr string, c Config) (*os.File, error) {
	a, err := tcpAddr(addr)
	if err != nil {
		return nil, err
	}
	family, sa := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: a.Port, Addr: [16]byte(a.IP.To16())})
	if ip4 := a.IP.To4(); ip4 != nil {
		family, sa = unix.AF_INET, &unix.SockaddrInet4{Port: a.Port, Addr: [4]byte(ip4)}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err := errors.Join(os.NewSyscallError("bind", unix.Bind(fd, sa))); err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EADDRINUSE) {
			return nil, &InUseError{addr}
		}
		return nil, fmt.Errorf("%s: %w", addr, err)
	}
	return listen(fd, addr, c)
}

func listen(fd int, addr string, c Config) (*os.File, error) {
	if err := unix.Listen(fd, c.Backlog); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("%s: %w", addr, os.NewSyscallError("listen", err))
	}
	return os.NewFile(uintptr(fd), addr), nil
}

func listenUnix(path string, c Config) (*os.File, error) {
	if c.Mode == 0 {
		c.Mode = 0o600
	}
	if c.DirMode == 0 {
		c.DirMode = 0o700
	}
	if err := os.MkdirAll(filepath.Dir(path), os.FileMode(c.DirMode)); err != nil {
		return nil, err
	}
	if err := clear(path); err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := bindUnix(fd, path, c.Mode); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return listen(fd, path, c)
}

// BindDatagram binds a datagram socket at path, mode 0600, with the file rules of Listen.
func BindDatagram(path string) (*os.File, error) {
	if err := clear(path); err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := bindUnix(fd, path, 0o600); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// bindUnix makes the file with its final mode at once: fchmod on the unbound socket
// sets what bind(2) gives the file, less the umask, which may only take away.
func bindUnix(fd int, path string, mode uint32) error {
	if err := unix.Fchmod(fd, mode); err != nil {
		return os.NewSyscallError("fchmod", err)
	}
	sa, done, err := unixAddr(path)
	if err != nil {
		return err
	}
	defer done()
	if err := unix.Bind(fd, sa); err != nil {
		if err == unix.EADDRINUSE {
			return &InUseError{path}
		}
		return fmt.Errorf("cannot bind %s: %w", path, err)
	}
	return os.Chmod(path, os.FileMode(mode)) // the umask took away what was asked for
}

// unixAddr is the socket address of path. Addresses hold 107 bytes; a longer path is
// reached through its directory's descriptor.
func unixAddr(path string) (unix.Sockaddr, func(), error) {
	if len(path) < 108 {
		return &unix.SockaddrUnix{Name: path}, func() {}, nil
	}
	dir, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &fs.PathError{Op: "open", Path: filepath.Dir(path), Err: err}
	}
	short := fmt.Sprintf("/proc/self/fd/%d/%s", dir, filepath.Base(path))
	if len(short) >= 108 {
		unix.Close(dir)
		return nil, nil, fmt.Errorf("%s: too long for the name of a socket", path)
	}
	return &unix.SockaddrUnix{Name: short}, func() { unix.Close(dir) }, nil
}

// clear removes a stale socket file: one that nobody listens at any more.
func clear(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is no socket", path)
	}
	if Live(path) {
		return &InUseError{path}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Live reports whether a socket is bound at path: a connect is not refused. It never
// blocks: a full backlog is an answer too.
func Live(path string) bool {
	sa, done, err := unixAddr(path)
	if err != nil {
		return false
	}
	defer done()
	for _, typ := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM, unix.SOCK_SEQPACKET} {
		fd, err := unix.Socket(unix.AF_UNIX, typ|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return true // cannot tell; do not take anything away
		}
		err = unix.Connect(fd, sa)
		unix.Close(fd)
		switch err {
		case unix.EPROTOTYPE:
			continue
		case unix.ECONNREFUSED, unix.ENOENT:
			return false
		}
		return true
	}
	return true
}

// Listens reports whether f is a socket that listens at addr.
func Listens(f *os.File, addr string) bool {
	on := false
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(fd uintptr) { on = listensFD(int(fd), addr) })
	return on
}

// Bound reports whether f is a Unix socket with the address path, listening or not.
func Bound(f *os.File, path string) bool {
	on := false
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(fd uintptr) {
		sa, err := unix.Getsockname(int(fd))
		u, ok := sa.(*unix.SockaddrUnix)
		on = err == nil && ok && sameUnix(u.Name, path)
	})
	return on
}

func sameUnix(name, path string) bool {
	return name == path || strings.HasPrefix(name, "/proc/self/fd/") && filepath.Base(name) == filepath.Base(path)
}

func listensFD(fd int, addr string) bool {
	if on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || on != 1 {
		return false
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return false
	}
	switch sa := sa.(type) {
	case *unix.SockaddrUnix:
		return sameUnix(sa.Name, addr)
	case *unix.SockaddrInet4:
		a, err := tcpAddr(addr)
		return err == nil && a.IP.Equal(net.IP(sa.Addr[:])) && (a.Port == sa.Port || a.Port == 0)
	case *unix.SockaddrInet6:
		a, err := tcpAddr(addr)
		return err == nil && a.IP.Equal(net.IP(sa.Addr[:])) && (a.Port == sa.Port || a.Port == 0)
	}
	return false
}

// Reclaim takes a duplicate of the socket listening at addr out of the process behind
// pidfd, which got it as one of its descriptors from 3 on (LISTEN_FDS). That needs
// ptrace access (ptrace(2)): the same user, and no stricter Yama scope. nil if it has
// none or that is not allowed.
func Reclaim(pidfd int, addr string) *os.File {
	const look = 64 // more descriptors than anybody is passed
	for n := 3; n < 3+look; n++ {
		fd, err := unix.PidfdGetfd(pidfd, n, 0)
		if err == unix.EBADF {
			continue
		}
		if err != nil {
			return nil
		}
		if listensFD(fd, addr) {
			return os.NewFile(uintptr(fd), addr)
		}
		unix.Close(fd)
	}
	return nil
}
