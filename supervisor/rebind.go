package supervisor

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"mypr/supervisor/notify"
	"mypr/supervisor/process"
	"mypr/supervisor/sockets"
)

// A socket whose file was deleted listens on and cannot be reached by anybody: there is
// no way to give it a name again. So the supervisor watches the directories of its
// sockets, and makes another one in the place of one that is missing. A service that
// has the old one is restarted to get it; connections that exist stay.

const (
	// rebindDelay lets whoever deletes finish: a directory goes after its entries.
	rebindDelay = 100 * time.Millisecond
	// rebindPause is the least time between two rounds, in case something deletes on.
	rebindPause = 5 * time.Second
)

// socketWatch notices that socket files go. It is the loop's.
type socketWatch struct {
	f     *os.File // inotify
	w     *watch
	timer *timer // the next look
	last  time.Time
}

// watchSockets looks after the socket files from now on. Without inotify they are not.
func (s *Supervisor) watchSockets() {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		s.log.Warn("deleted sockets will not be noticed", "err", os.NewSyscallError("inotify_init", err))
		return
	}
	// Not with the poller of package os: the loop's own waits for it.
	sw := &socketWatch{f: os.NewFile(uintptr(fd), "inotify")}
	if sw.w, err = s.poll.add(fd, unix.EPOLLIN, func(uint32) { s.socketFilesChanged() }); err != nil {
		s.log.Warn("deleted sockets will not be noticed", "err", err)
		sw.f.Close()
		return
	}
	s.files = sw
	s.checkSockets()
}

func (s *Supervisor) closeSocketWatch() {
	if sw := s.files; sw != nil {
		sw.timer.stop()
		sw.w.remove()
		sw.f.Close()
		s.files = nil
	}
}

// socketFilesChanged reads what happened in the directories, and looks when it may have
// been to a socket.
func (s *Supervisor) socketFilesChanged() {
	sw := s.files
	if sw == nil {
		return
	}
	names := map[string]bool{}
	for _, path := range s.socketPaths() {
		names[filepath.Base(path)] = true
	}
	look := false
	buf := make([]byte, 16<<10)
	for {
		n, err := unix.Read(process.FD(sw.f), buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			e := (*unix.InotifyEvent)(unsafe.Pointer(&b[0]))
			end := unix.SizeofInotifyEvent + int(e.Len)
			name := b[unix.SizeofInotifyEvent:end]
			b = b[end:]
			if i := slices.Index(name, 0); i >= 0 {
				name = name[:i]
			}
			// Of the directory itself, or so many that some were dropped.
			look = look || len(name) == 0 || names[string(name)]
		}
	}
	sw.w.arm(unix.EPOLLIN)
	if look && sw.timer == nil {
		sw.timer = s.afterFunc(max(rebindDelay, time.Until(sw.last.Add(rebindPause))), s.checkSockets)
	}
}

// socketPaths are the socket files that this process made.
func (s *Supervisor) socketPaths() []string {
	paths := []string{s.opt.ControlPath}
	if s.notify != nil {
		paths = append(paths, s.opt.NotifyPath)
	}
	for _, u := range s.sockets {
		for _, l := range u.listeners {
			if !l.handed && l.addr[0] == '/' {
				paths = append(paths, l.addr)
			}
		}
	}
	return paths
}

// checkSockets makes anew what is missing, and watches the directories, which may be
// others of the same name by now.
func (s *Supervisor) checkSockets() {
	sw := s.files
	if sw == nil || s.shutting || s.done {
		return
	}
	sw.timer = nil
	missing := func(path string) bool {
		_, err := os.Lstat(path)
		return errors.Is(err, fs.ErrNotExist)
	}
	if s.notify != nil && missing(s.opt.NotifyPath) {
		s.rebound(s.opt.NotifyPath, s.rebindNotify())
	}
	for _, u := range s.sockets {
		again := false
		for _, l := range u.listeners {
			if !l.handed && l.addr[0] == '/' && missing(l.addr) {
				err := u.rebind(l)
				s.rebound(l.addr, err)
				again = again || err == nil
			}
		}
		if !again {
			continue
		}
		s.changed(u)
		u.serviceChanged()
		if svc := s.units[u.serviceName()]; svc != nil && !svc.State.ended() {
			s.restartJob(svc, "its socket was deleted", nil)
		}
	}
	// Last: who finds the supervisor expects the others to be there.
	if missing(s.opt.ControlPath) {
		s.rebound(s.opt.ControlPath, s.rebindControl())
	}
	for _, path := range s.socketPaths() {
		const events = unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR
		if _, err := unix.InotifyAddWatch(process.FD(sw.f), filepath.Dir(path), events); err != nil {
			s.log.Warn("a directory of sockets is not watched", "dir", filepath.Dir(path), "err", err)
		}
	}
}

func (s *Supervisor) rebound(path string, err error) {
	s.files.last = time.Now()
	if err != nil {
		s.log.Error("a socket was deleted and cannot be made again", "path", path, "err", err)
		return
	}
	s.log.Warn("a socket was deleted; there is another in its place", "path", path)
}

// rebindControl serves at a new control socket too. At the old one nobody can arrive
// any more, but connections through it go on.
func (s *Supervisor) rebindControl() error {
	f, err := sockets.Listen(s.opt.ControlPath, sockets.Config{})
	if err != nil {
		return err
	}
	old := s.listener
	s.listener = f
	server, err := s.serveControl()
	if err != nil {
		s.listener = old
		f.Close()
		return err
	}
	old.Close()
	s.servers = append(s.servers, server)
	s.holdOwn()
	return nil
}

func (s *Supervisor) rebindNotify() error {
	if err := os.MkdirAll(filepath.Dir(s.opt.NotifyPath), 0o700); err != nil {
		return err
	}
	f, err := sockets.BindDatagram(s.opt.NotifyPath)
	if err != nil {
		return err
	}
	n, err := notify.Serve(f, s.heard)
	if err != nil {
		return err
	}
	if s.up != nil && s.up.notify != nil {
		s.up.notify.Close()
		s.up.notify, _ = n.File()
	}
	s.notify.Close()
	s.notify = n
	s.holdOwn()
	return nil
}

// rebind makes a listening socket anew.
func (u *unit) rebind(l *listener) error {
	f, err := sockets.Listen(l.addr, u.socketConfig())
	if err != nil {
		return err
	}
	l.w.remove()
	l.w = nil
	l.file.Close()
	l.file = f
	return nil
}
