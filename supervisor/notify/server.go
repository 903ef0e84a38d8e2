// Package notify is both ends of systemd's notification protocol (sd_notify(3)): the
// socket that a supervisor gives its units, and a small client for processes that run
// as a unit of any service manager.
//
// It owns the datagrams, their credentials and their descriptors. It does not know
// which unit a process belongs to nor whether it may speak for it: the supervisor
// attributes messages.
package notify

import (
	"errors"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// maxMessage is the longest state accepted, as in systemd.
const maxMessage = 4096

// Message is one datagram. Files and the pidfd belong to the receiver.
type Message struct {
	PID, UID int
	// PIDFD pins the sender (SCM_PIDFD, Linux 6.5), or is nil.
	PIDFD  *os.File
	Fields Fields
	Files  []*os.File
}

// Close closes what came with the message.
func (m *Message) Close() {
	if m.PIDFD != nil {
		m.PIDFD.Close()
	}
	for _, f := range m.Files {
		f.Close()
	}
	m.PIDFD, m.Files = nil, nil
}

// Fields are the assignments of a message; of a repeated name the last counts.
type Fields map[string]string

// Is reports whether name was sent with the value "1".
func (f Fields) Is(name string) bool { return f[name] == "1" }

// Parse splits a message into its assignments. Lines without "=" are ignored, as
// sd_notify(3) says of what a manager does not know.
func Parse(b []byte) Fields {
	f := Fields{}
	for line := range strings.SplitSeq(string(b), "\n") {
		if name, value, ok := strings.Cut(line, "="); ok && name != "" {
			f[name] = value
		}
	}
	return f
}

// Server reads a bound datagram socket.
type Server struct {
	conn *net.UnixConn
	done chan struct{}
}

// Serve asks for credentials on the socket f, which it takes over, and hands every
// message to handle, in order, from one goroutine until Close.
func Serve(f *os.File, handle func(*Message)) (*Server, error) {
	defer f.Close()
	c, err := net.FilePacketConn(f)
	if err != nil {
		return nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("the notify socket is no unix socket")
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		conn.Close()
		return nil, err
	}
	var serr error
	_ = raw.Control(func(fd uintptr) {
		serr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSPIDFD, 1)
	})
	if serr != nil {
		conn.Close()
		return nil, os.NewSyscallError("SO_PASSCRED", serr)
	}
	s := &Server{conn: conn, done: make(chan struct{})}
	go s.read(handle)
	return s, nil
}

// File is a duplicate of the socket, to be handed on to a next program.
func (s *Server) File() (*os.File, error) { return s.conn.File() }

// Close ends the server and waits for its goroutine; the socket file stays.
func (s *Server) Close() {
	s.conn.Close()
	<-s.done
}

func (s *Server) read(handle func(*Message)) {
	defer close(s.done)
	buf := make([]byte, maxMessage+1)
	oob := make([]byte, unix.CmsgSpace(unix.SizeofUcred)+unix.CmsgSpace(4)+unix.CmsgSpace(4*253))
	for {
		n, oobn, flags, _, err := s.conn.ReadMsgUnix(buf, oob)
		if err != nil {
			return
		}
		m := control(oob[:oobn])
		if n > maxMessage || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || m.PID == 0 {
			m.Close() // too long, or a sender that cannot be named from here
			continue
		}
		m.Fields = Parse(buf[:n])
		handle(m)
	}
}

func control(oob []byte) *Message {
	m := &Message{UID: -1}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return m
	}
	for i := range msgs {
		if msgs[i].Header.Level != unix.SOL_SOCKET {
			continue
		}
		switch msgs[i].Header.Type {
		case unix.SCM_CREDENTIALS:
			if c, err := unix.ParseUnixCredentials(&msgs[i]); err == nil {
				m.PID, m.UID = int(c.Pid), int(c.Uid)
			}
		case unix.SCM_PIDFD:
			msgs[i].Header.Type = unix.SCM_RIGHTS // it has the same form
			if fds, err := unix.ParseUnixRights(&msgs[i]); err == nil && len(fds) == 1 && fds[0] >= 0 {
				unix.CloseOnExec(fds[0])
				m.PIDFD = os.NewFile(uintptr(fds[0]), "sender")
			}
		case unix.SCM_RIGHTS:
			if fds, err := unix.ParseUnixRights(&msgs[i]); err == nil {
				for _, fd := range fds { // close-on-exec since ReadMsgUnix asks for it
					m.Files = append(m.Files, os.NewFile(uintptr(fd), "received"))
				}
			}
		}
	}
	return m
}
