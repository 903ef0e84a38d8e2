package rpc

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"sync"
)

func onPanic(method string, p any) {
	slog.Error("handler panicked", "method", method, "panic", p, "stack", string(debug.Stack()))
}

// Server accepts connections and serves each with a handler of its own.
type Server struct {
	// NewHandler makes the handler of one connection. It may keep the Conn: its
	// Done channel is how a service learns that the peer has gone.
	NewHandler func(*Conn) Handler
	// AllowUID decides who may connect; nil allows the process's own user and root.
	AllowUID func(uid int) bool

	mu    sync.Mutex
	conns map[*Conn]struct{}
	wg    sync.WaitGroup
}

// Serve accepts until ctx ends or the listener breaks, then closes every connection
// and waits for their handlers. The listener is closed, its socket file is not removed.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener) error {
	l.SetUnlinkOnClose(false)
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	var err error
	for {
		var sock *net.UnixConn
		if sock, err = l.AcceptUnix(); err != nil {
			break
		}
		s.accept(sock)
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

func (s *Server) accept(sock *net.UnixConn) {
	allow := s.AllowUID
	if allow == nil {
		allow = func(uid int) bool { return uid == os.Getuid() || uid == 0 }
	}
	var c *Conn
	ready := make(chan struct{})
	h := HandlerFunc(func(ctx context.Context, r *Request) (any, error) {
		<-ready
		return c.lateHandler.Handle(ctx, r)
	})
	c = NewConn(sock, h)
	if !allow(c.peer.UID) {
		slog.Warn("connection refused", "uid", c.peer.UID, "pid", c.peer.PID)
		c.lateHandler = HandlerFunc(func(context.Context, *Request) (any, error) {
			return nil, Errorf(CodePermission, "this socket belongs to user id %d, you are %d", os.Getuid(), c.peer.UID)
		})
		close(ready)
		c.CloseAsync()
		return
	}
	c.lateHandler = s.NewHandler(c)
	s.mu.Lock()
	if s.conns == nil {
		s.conns = map[*Conn]struct{}{}
	}
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	s.wg.Add(1)
	close(ready)
	go func() {
		defer s.wg.Done()
		<-c.done
		c.wg.Wait()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
}
