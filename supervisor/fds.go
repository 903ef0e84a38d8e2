package supervisor

import (
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

// storedFD is a descriptor that a service gave into keeping (FDSTORE=1).
type storedFD struct {
	name string
	file *os.File
	w    *watch // for the hang-up of its other end; nil with FDPOLL=0
}

// keep holds a client's end for attach, in place of an older one.
func (u *unit) keep(name string, f *os.File) {
	if u.kept == nil {
		u.kept = map[string]*os.File{}
	}
	if old := u.kept[name]; old != nil {
		old.Close()
	}
	u.kept[name] = f
	u.s.changed(u)
}

// keepsNoEnds: no later process of the unit can need the process's ends of its pipes
// or the descriptors it was given, so they are closed once it runs. Whoever reads the
// other end then sees end of file when the unit's last process closes its copy.
func (u *unit) keepsNoEnds() bool { return startsOnce(u.def.Service) }

func startsOnce(sv *spec.Service) bool {
	return (sv.Restart == "" || sv.Restart == spec.RestartNo) && len(sv.ExecStart) == 1 &&
		len(sv.RestartForceExitStatus.Codes)+len(sv.RestartForceExitStatus.Signals) == 0
}

func (u *unit) closeEnds() {
	closeAll(u.ends[:])
	u.ends = [3]*os.File{}
	for _, f := range u.given {
		f.Close()
	}
	u.given, u.passed = nil, nil
	u.s.changed(u)
}

// dropFDs closes what a unit holds only while it runs or will run again.
func (u *unit) dropFDs() {
	u.closeEnds()
	for _, f := range u.stored {
		f.w.remove()
		f.file.Close()
	}
	u.stored = nil
}

// release closes kept client ends: those named, or all.
func (u *unit) release(names ...string) {
	for name, f := range u.kept {
		if len(names) == 0 || slices.Contains(names, name) {
			f.Close()
			delete(u.kept, name)
		}
	}
	u.s.changed(u)
}

// passedFDs are the descriptors for LISTEN_FDS with their names: sockets, then what
// was stored, then what the client gave. The files stay the unit's.
func (u *unit) passedFDs() (names []string, files []*os.File) {
	for _, name := range u.socketNames() {
		if v := u.s.units[name]; v != nil {
			for _, l := range v.listeners {
				names, files = append(names, v.fdName()), append(files, l.file)
			}
		}
	}
	for _, f := range u.stored {
		names, files = append(names, f.name), append(files, f.file)
	}
	for _, name := range u.passed {
		if f := u.given[name]; f != nil {
			names, files = append(names, name), append(files, f)
		}
	}
	return names, files
}

// store keeps a descriptor for the next start. The file is the unit's from here on.
func (u *unit) store(name string, poll bool, f *os.File) {
	if len(u.stored) >= u.def.Service.FileDescriptorStoreMax {
		u.s.log.Warn("FileDescriptorStoreMax is reached; a descriptor was dropped", "unit", u.name, "name", name)
		f.Close()
		return
	}
	if !validFDName(name) {
		name = "stored"
	}
	st := &storedFD{name: name, file: f}
	if poll {
		// Hang-up and error are reported without being asked for. A file that cannot be
		// polled (a memfd, a regular file) is never hung up.
		st.w, _ = u.s.poll.add(process.FD(f), 0, func(ev uint32) {
			if ev&(unix.EPOLLHUP|unix.EPOLLERR) != 0 {
				u.unstore(st)
			}
		})
	}
	u.stored = append(u.stored, st)
	u.s.changed(u)
}

func (u *unit) unstore(st *storedFD) {
	if i := slices.Index(u.stored, st); i >= 0 {
		st.w.remove()
		st.file.Close()
		u.stored = slices.Delete(u.stored, i, i+1)
		u.s.changed(u)
	}
}

// validFDName: what LISTEN_FDNAMES can carry (sd_listen_fds_with_names(3)).
func validFDName(name string) bool {
	return name != "" && len(name) <= 255 && !strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r > '~' || r == ':' })
}
