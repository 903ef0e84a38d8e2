package counterpart

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/notify"
)

// Ready makes the socket at path, for the NOTIFY_SOCKET of a service manager to be
// started, and returns what waits for READY=1 there and removes the socket.
func Ready(path string) (wait func(patience time.Duration) error, err error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	socket := os.NewFile(uintptr(fd), "notify")
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		socket.Close()
		return nil, os.NewSyscallError("bind "+path, err)
	}
	ready := make(chan struct{}, 1)
	s, err := notify.Serve(socket, func(m *notify.Message) {
		if m.Fields.Is("READY") {
			select {
			case ready <- struct{}{}:
			default:
			}
		}
		m.Close()
	})
	if err != nil {
		return nil, err
	}
	return func(patience time.Duration) error {
		defer os.Remove(path)
		defer s.Close()
		select {
		case <-ready:
			return nil
		case <-time.After(patience):
			return errors.New("it was not ready in time")
		}
	}, nil
}
