package supervisor

import (
	"cmp"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/process"
	"mypr/supervisor/sockets"
)

// listener is one listening socket of a socket unit.
type listener struct {
	addr string
	file *os.File
	w    *watch
	// handed: it came from outside (a service manager), who owns its file.
	handed bool
}

func (u *unit) fdName() string { return cmp.Or(u.def.Socket.FileDescriptorName, u.name) }

func (u *unit) startSocket(reason string) {
	u.record = record{Name: u.name, State: u.State, Since: u.Since, Result: resultSuccess, Invocation: newID(), Job: u.Job, JobPhase: u.JobPhase}
	if err := u.listen(); err != nil {
		u.closeListeners()
		u.fail(resultResources, "cannot listen: "+err.Error())
		u.enter(Failed, "cannot listen")
		return
	}
	u.StartedAt = time.Now()
	u.enter(Listening, reason)
	u.serviceChanged()
}

func (u *unit) listen() error {
	for i, addr := range u.def.Socket.ListenStream {
		l := &listener{addr: addr}
		if f := u.s.takeInherited(u.fdName(), addr, i); f != nil {
			l.file, l.handed = f, true
		} else if l.file = u.s.claim(addr); l.file == nil {
			f, err := sockets.Listen(addr, u.socketConfig())
			if err != nil {
				return err
			}
			l.file = f
		}
		u.listeners = append(u.listeners, l)
	}
	return nil
}

func (u *unit) socketConfig() sockets.Config {
	c := u.def.Socket
	return sockets.Config{Mode: c.SocketMode, DirMode: c.DirectoryMode, Backlog: c.Backlog}
}

// takeInherited finds a handed over socket by its name and address; one that listens
// elsewhere (a socket unit of the service manager may choose the address) is taken by
// its place among those of the name.
func (s *Supervisor) takeInherited(name, addr string, i int) *os.File {
	files := s.opt.Inherited[name]
	j := slices.IndexFunc(files, func(f *os.File) bool { return f != nil && sockets.Listens(f, addr) })
	if j < 0 && i < len(files) {
		j = i
	}
	if j < 0 || files[j] == nil {
		return nil
	}
	f := files[j]
	files[j] = nil
	return f
}

// serviceChanged follows the state of the socket's service: connections start it
// while it does not run.
func (u *unit) serviceChanged() {
	if !u.State.up() {
		return
	}
	svc := u.s.units[u.serviceName()]
	if svc != nil && !svc.State.ended() {
		u.unwatch()
		u.enter(Running, svc.name+" runs")
		return
	}
	u.enter(Listening, "the service does not run")
	if u.def.Socket.PassOnly || u.s.shutting || svc != nil && (svc.Result == resultStartLimit || svc.job != nil) {
		u.unwatch()
		return
	}
	for _, l := range u.listeners {
		if l.w != nil {
			continue
		}
		l.w, _ = u.s.poll.add(process.FD(l.file), unix.EPOLLIN, func(uint32) { u.connected() })
	}
}

func (u *unit) unwatch() {
	for _, l := range u.listeners {
		l.w.remove()
		l.w = nil
	}
}

// triggerLimit bounds starts by connections of a service that has no start limit and
// ends without accepting (systemd.socket(5), TriggerLimitBurst=).
const (
	triggerLimitBurst    = 20
	triggerLimitInterval = 2 * time.Second
)

func (u *unit) connected() {
	u.unwatch()
	svc, err := u.s.load(u.serviceName())
	if err != nil {
		u.fail(resultResources, "cannot load the service: "+err.Error())
		u.closeListeners()
		u.enter(Failed, "no service")
		return
	}
	if !svc.State.ended() || svc.job != nil {
		return
	}
	if svc.def.StartLimitInterval <= 0 && svc.autoStarts(triggerLimitInterval) >= triggerLimitBurst {
		svc.limitHit()
		return
	}
	u.s.startJob(svc, true, "connection to "+u.name, nil)
}

func (u *unit) stopSocket(reason string) {
	u.closeListeners()
	u.enter(Dead, reason)
}

func (u *unit) closeListeners() {
	u.unwatch()
	for _, l := range u.listeners {
		l.file.Close()
		if u.def.Socket.RemoveOnStop && !l.handed && l.addr[0] == '/' {
			_ = os.Remove(l.addr)
		}
	}
	u.listeners = nil
}
