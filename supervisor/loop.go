package supervisor

import (
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// queue carries functions to the loop. Posting never blocks, so that the loop may post
// to itself and no poster can be held up by a slow one.
type queue struct {
	wake chan struct{}
	mu   sync.Mutex // guards list
	list []func()
}

func newQueue() *queue { return &queue{wake: make(chan struct{}, 1)} }

func (q *queue) post(f func()) {
	q.mu.Lock()
	q.list = append(q.list, f)
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *queue) take() []func() {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.list
	q.list = nil
	return l
}

// poller watches descriptors for the loop: one epoll instance, itself watched by Go's
// netpoller, so that nothing but one parked goroutine waits for all of them. Methods
// are the loop's.
type poller struct {
	q       *queue
	ep      *os.File
	done    chan struct{}
	watches map[int]*watch // by descriptor
	nextID  int32
}

type watch struct {
	p  *poller
	fd int
	id int32
	f  func(events uint32)
}

func newPoller(q *queue) (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	p := &poller{q: q, ep: os.NewFile(uintptr(fd), "epoll"), done: make(chan struct{}), watches: map[int]*watch{}}
	go p.run()
	return p, nil
}

func (p *poller) run() {
	defer close(p.done)
	raw, err := p.ep.SyscallConn()
	if err != nil {
		return
	}
	events := make([]unix.EpollEvent, 64)
	for {
		n := 0
		err := raw.Read(func(fd uintptr) bool {
			for {
				var err error
				if n, err = unix.EpollWait(int(fd), events, 0); err != unix.EINTR {
					return n > 0 || err != nil
				}
			}
		})
		if err != nil || n <= 0 {
			return // closed
		}
		batch := append([]unix.EpollEvent(nil), events[:n]...)
		p.q.post(func() {
			for _, e := range batch {
				// The id tells a watch from an older one of the same descriptor number.
				if w := p.watches[int(e.Fd)]; w != nil && w.id == e.Pad {
					w.f(e.Events)
				}
			}
		})
	}
}

// add watches fd once: after an event it must be armed again.
func (p *poller) add(fd int, events uint32, f func(uint32)) (*watch, error) {
	p.nextID++
	w := &watch{p: p, fd: fd, id: p.nextID, f: f}
	e := unix.EpollEvent{Events: events | unix.EPOLLONESHOT, Fd: int32(fd), Pad: w.id}
	if err := unix.EpollCtl(p.fd(), unix.EPOLL_CTL_ADD, fd, &e); err != nil {
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	p.watches[fd] = w
	return w, nil
}

func (w *watch) arm(events uint32) {
	e := unix.EpollEvent{Events: events | unix.EPOLLONESHOT, Fd: int32(w.fd), Pad: w.id}
	_ = unix.EpollCtl(w.p.fd(), unix.EPOLL_CTL_MOD, w.fd, &e)
}

// remove ends the watch; call it before the descriptor is closed.
func (w *watch) remove() {
	if w == nil || w.p.watches[w.fd] != w {
		return
	}
	delete(w.p.watches, w.fd)
	_ = unix.EpollCtl(w.p.fd(), unix.EPOLL_CTL_DEL, w.fd, &unix.EpollEvent{})
}

func (p *poller) fd() int {
	fd := -1
	if raw, err := p.ep.SyscallConn(); err == nil {
		_ = raw.Control(func(n uintptr) { fd = int(n) })
	}
	return fd
}

func (p *poller) close() {
	p.ep.Close()
	<-p.done
}

// timer calls a function in the loop. It is the loop's.
type timer struct {
	t       *time.Timer
	stopped bool
}

func (s *Supervisor) afterFunc(d time.Duration, f func()) *timer {
	t := &timer{}
	t.t = time.AfterFunc(max(d, 0), func() {
		s.queue.post(func() {
			if !t.stopped {
				t.stopped = true
				f()
			}
		})
	})
	return t
}

func (t *timer) stop() {
	if t != nil {
		t.stopped = true
		t.t.Stop()
	}
}

// monotonic is CLOCK_MONOTONIC, which means the same in the next supervisor process.
func monotonic() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}
