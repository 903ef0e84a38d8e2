package rpc

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"syscall"
)

func onPanic(method string, p any) {
	slog.Error("handler panicked", "method", method, "panic", p, "stack", string(debug.Stack()))
}

// Server accepts connections and serves each with a handler of its own. It answers
// requests; notifications to it are dropped, because a method that waits would hold up
// the connection if it came as one.
type Server struct {
	// NewHandler makes the handler of one connection. It may keep the Conn: its
	// Done channel is how a service learns that the peer has gone.
	NewHandler func(*Conn) Handler
	// AllowUID decides who may connect; nil allows the process's own user and root.
	AllowUID func(uid int) bool

	wg sync.WaitGroup

	mu    sync.Mutex // guards the fields below
	conns map[*Conn]struct{}
	freed chan struct{} // made when descriptors ran out; gets a token when a connection ends
}

// Serve accepts until ctx ends or the listener breaks, then closes every connection
// and waits for their handlers. The listener is closed, its socket file is not removed.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener) error {
	l.SetUnlinkOnClose(false)
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		l.Close()
		close(closed)
	})
	var err error
	var spare spareFD
	spare.open()
	defer spare.close()
	for {
		var sock *net.UnixConn
		if sock, err = l.AcceptUnix(); outOfFiles(err) {
			sock, err = s.turnAway(ctx, l, &spare)
		}
		if err != nil {
			break
		}
		if sock != nil {
			s.accept(sock)
		}
	}
	if !stop() {
		<-closed // else the descriptor could outlive us by a moment
	}
	l.Close()
	s.mu.Lock()
	for c := range s.conns {
		c.CloseAsync()
	}
	s.mu.Unlock()
	s.wg.Wait()
	if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

func outOfFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// turnAway closes the connection at the head of the queue when there is no descriptor
// for it. Left there, it would have accept(2) fail again at once, without end. When
// descriptors are back by then, it returns the connection instead.
func (s *Server) turnAway(ctx context.Context, l *net.UnixListener, spare *spareFD) (*net.UnixConn, error) {
	spare.close()
	sock, err := l.AcceptUnix()
	spare.open()
	if err == nil {
		if spare.f != nil {
			return sock, nil
		}
		slog.Error("connection turned away: no file descriptors left")
		sock.Close()
		spare.open()
		return nil, nil
	}
	if !outOfFiles(err) {
		return nil, err
	}
	// Another goroutine took the spare one. Wait until a connection gives one back.
	s.mu.Lock()
	if s.freed == nil {
		s.freed = make(chan struct{}, 1)
	}
	freed, open := s.freed, len(s.conns)
	s.mu.Unlock()
	if open == 0 {
		return nil, err
	}
	select {
	case <-freed:
	case <-ctx.Done():
	}
	return nil, nil
}

// spareFD is a descriptor to let go of when there are no others.
type spareFD struct{ f *os.File }

func (s *spareFD) open() { s.f, _ = os.Open(os.DevNull) }

func (s *spareFD) close() {
	if s.f != nil {
		s.f.Close()
		s.f = nil
	}
}

func (s *Server) accept(sock *net.UnixConn) {
	peer := peerOf(sock)
	if !s.allows(peer.UID) {
		slog.Warn("connection refused", "uid", peer.UID, "pid", peer.PID)
		sock.Close()
		if peer.fd != nil {
			peer.fd.Close()
		}
		return
	}
	c := newConn(sock, peer)
	c.requestsOnly = true
	c.handler = s.NewHandler(c)
	s.mu.Lock()
	if s.conns == nil {
		s.conns = map[*Conn]struct{}{}
	}
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	s.wg.Go(func() {
		c.read()
		c.wg.Wait()
		s.mu.Lock()
		delete(s.conns, c)
		select {
		case s.freed <- struct{}{}: // nil while nobody has ever waited
		default:
		}
		s.mu.Unlock()
	})
}

func (s *Server) allows(uid int) bool {
	if s.AllowUID != nil {
		return s.AllowUID(uid)
	}
	return uid == os.Getuid() || uid == 0
}
