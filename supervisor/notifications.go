package supervisor

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/notify"
	"mypr/supervisor/process"
)

// notified handles one message of the notify socket, which it closes.
func (s *Supervisor) notified(m *notify.Message) {
	u, pr := s.sender(m)
	if u != nil && pr == nil && u.spawning() {
		// A quick process speaks before the loop has heard that it runs.
		u.early = append(u.early, m)
		return
	}
	defer m.Close() // a barrier is answered by this
	if u == nil {
		s.log.Debug("notification from no unit's process", "pid", m.PID)
		return
	}
	access := u.notifyAccess()
	allowed := access == "all" || access != "none" && pr != nil && (pr.main || access == "exec")
	if !allowed {
		s.log.Warn("notification refused", "unit", u.name, "pid", m.PID, "notify_access", access)
		return
	}
	u.notification(m)
}

// spawning reports whether a process of the unit is on its way.
func (u *unit) spawning() bool {
	return u.main != nil && u.main.p == nil || u.control != nil && u.control.p == nil
}

// hearEarly handles what came before its sender was known.
func (u *unit) hearEarly() {
	early := u.early
	u.early = nil
	for _, m := range early {
		u.s.notified(m)
	}
}

// sender finds whose process sent m: a known process, else by cgroup or descent.
func (s *Supervisor) sender(m *notify.Message) (*unit, *proc) {
	if pr := s.procs[m.PID]; pr != nil { // known pids are pinned: a child of ours is not reaped before it is forgotten
		return pr.u, pr
	}
	u := s.unitOf(m.PID)
	if m.PIDFD != nil && unix.PidfdSendSignal(process.FD(m.PIDFD), 0, nil, 0) == unix.ESRCH {
		return nil, nil // it is gone, and what was read may be of another process with its pid
	}
	return u, nil
}

// unitOf finds the unit in whose box pid is.
func (s *Supervisor) unitOf(pid int) *unit {
	if s.tree != nil {
		if name, ok := s.tree.GroupOf(pid); ok {
			for _, u := range s.units {
				if u.Box != nil && u.Box.Cgroup == name {
					return u
				}
			}
			return nil
		}
	}
	for _, u := range s.units {
		if b, ok := u.box.(*shimBox); ok && b.contains(pid) {
			return u
		}
	}
	return nil
}

func (u *unit) notification(m *notify.Message) {
	f := m.Fields
	s := u.s
	if text, ok := f["STATUS"]; ok {
		u.StatusText = text
		s.changed(u)
	}
	if errno, ok := f["ERRNO"]; ok {
		if n, err := strconv.Atoi(errno); err == nil && n > 0 {
			u.Error = fmt.Sprintf("the service reports: %v", syscall.Errno(n))
			s.changed(u)
		}
	}
	if pid, ok := f["MAINPID"]; ok {
		u.newMain(pid)
	}
	if usec, ok := f["WATCHDOG_USEC"]; ok {
		if n, err := strconv.ParseInt(usec, 10, 64); err == nil && n >= 0 {
			u.WatchdogUS = n
			s.changed(u)
			if u.watchdog != nil || u.State.up() || u.State == StartPost {
				u.startWatchdog()
			}
		}
	}
	if usec, ok := f["EXTEND_TIMEOUT_USEC"]; ok {
		if n, err := strconv.ParseInt(usec, 10, 64); err == nil && n > 0 && n < int64(1<<62)/1000 {
			u.extend(time.Duration(n) * time.Microsecond)
		}
	}
	if f.Is("FDSTORE") {
		for _, file := range m.Files {
			u.store(f["FDNAME"], f["FDPOLL"] != "0", file)
		}
		m.Files = nil
	}
	if f.Is("FDSTOREREMOVE") {
		for _, st := range slices.Clone(u.stored) {
			if st.name == f["FDNAME"] {
				u.unstore(st)
			}
		}
	}
	if f.Is("RELOADING") && u.State == Running {
		u.enter(Reload, "RELOADING=1")
		u.arm(u.timeoutStart())
	}
	if f.Is("READY") && u.State != StartPre { // what ExecStartPre= says is not about the main process
		u.Ready = true
		switch {
		case u.State == Start && u.main != nil && u.main.p != nil && u.def.Service.Type == "notify":
			u.enterStartPost("READY=1")
		case u.State == Reload && u.control == nil:
			u.reloaded("READY=1")
		}
		s.changed(u)
	}
	if f.Is("STOPPING") && u.State.up() {
		u.stopWatchdog()
		u.enter(StopSigterm, "STOPPING=1")
		u.arm(u.timeoutStop())
	}
	switch f["WATCHDOG"] {
	case "1":
		if u.watchdog != nil {
			u.startWatchdog()
		}
	case "trigger":
		u.watchdogMissed("the service asked for it (WATCHDOG=trigger)")
	}
}

// newMain makes another process of the unit its main process.
func (u *unit) newMain(text string) {
	pid, err := strconv.Atoi(text)
	if err != nil || pid <= 0 || u.box == nil || u.main != nil && u.main.p != nil && u.main.p.PID == pid {
		return
	}
	p, err := process.Adopt(pid, 0)
	if err == nil && !u.box.contains(pid) {
		p.Close()
		err = os.ErrPermission
	}
	if err != nil {
		u.s.log.Warn("MAINPID refused", "unit", u.name, "pid", pid, "err", err)
		return
	}
	if u.main != nil {
		u.s.forget(u.main)
	}
	pr := &proc{u: u, main: true, p: p}
	u.main, u.MainEnded = pr, false
	u.track(pr)
	u.s.changed(u)
}
