package supervisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
	"mypr/supervisor/control"
	"mypr/supervisor/notify"
	"mypr/supervisor/process"
	"mypr/supervisor/sockets"
)

// reexecEnvironment names the descriptor of the memfd that holds the state for the
// program that takes over.
const reexecEnvironment = "MYPR_SUPERVISOR_STATE_FD"

// Kinds of descriptors that go over a re-execution.
const (
	fdControl = "control"
	fdNotify  = "notify"
	fdListen  = "listen"  // Unit, Name: address
	fdKept    = "kept"    // Unit, Name
	fdEnd     = "end"     // Unit, Name: index
	fdGiven   = "given"   // Unit, Name
	fdPassed  = "passed"  // Unit, Name: given, and in LISTEN_FDS
	fdStored  = "stored"  // Unit, Name; Poll
	fdProgram = "program" // Name: of Options.Keep
	fdAnchor  = "anchor"  // Name: its pid
)

type fdRecord struct {
	Kind   string `json:"kind"`
	Unit   string `json:"unit,omitempty"`
	Name   string `json:"name,omitempty"`
	FD     int    `json:"fd"`
	Poll   bool   `json:"poll,omitempty"`
	Handed bool   `json:"handed,omitempty"`
	Key    uint64 `json:"key,omitempty"` // under which a service manager keeps it
}

type reexecRequest struct {
	executable string
	answer     func(error)
}

func (a api) Reexec(ctx context.Context, p control.ReexecParams) error {
	_, err := ask(ctx, a.s, func(answer func(none, error)) {
		s := a.s
		if s.reexec != nil || s.shutting {
			answer(none{}, rpc.Errorf(rpc.CodeConflict, "the supervisor is ending or re-executing already"))
			return
		}
		exe := p.Executable
		if exe == "" {
			exe = s.opt.Executable
		}
		s.reexec = &reexecRequest{executable: exe, answer: func(err error) { answer(none{}, err) }}
	}, nil)
	return err
}

// maybeReexec becomes the new program once no process is half started. If that fails
// everything goes on as before.
func (s *Supervisor) maybeReexec() {
	r := s.reexec
	if r == nil || len(s.starting) > 0 { // an end that was taken and not yet told would be lost
		return
	}
	for _, u := range s.units {
		for _, pr := range []*proc{u.main, u.control} {
			if pr != nil && pr.p == nil {
				return // its end of the exec status pipe would be lost; the next turn tries again
			}
		}
	}
	s.reexec = nil
	err := s.become(r.executable)
	s.log.Error("cannot re-execute; going on as before", "executable", r.executable, "err", err)
	r.answer(rpc.Errorf(rpc.CodeInternal, "cannot execute %s: %v; the old supervisor goes on", r.executable, err))
	s.flush()
}

// become returns only when it failed.
func (s *Supervisor) become(executable string) (err error) {
	if err := unix.Access(executable, unix.X_OK); err != nil {
		return err
	}
	var notifyFile *os.File
	if s.notify != nil {
		// No message may be read by a program that ends before handling it.
		if notifyFile, err = s.notify.File(); err != nil {
			return err
		}
		s.notify.Close()
		defer func() {
			var serr error
			if s.notify, serr = notify.Serve(notifyFile, func(m *notify.Message) { s.queue.post(func() { s.notified(m) }) }); serr != nil {
				s.log.Error("the notify socket is lost", "err", serr)
			}
		}()
		for _, f := range s.queue.take() {
			s.turn(f)
		}
	}
	h := s.header()
	var open []int
	add := func(r fdRecord, f *os.File) {
		if f == nil {
			return
		}
		r.FD, r.Key = process.FD(f), s.anchored.held[r.Unit][f]
		h.FDs = append(h.FDs, r)
		open = append(open, r.FD)
	}
	add(fdRecord{Kind: fdControl}, s.listener)
	add(fdRecord{Kind: fdNotify}, notifyFile)
	if s.up != nil && s.up.notify != nil {
		h.FDs[len(h.FDs)-1].Key = s.anchored.held[""][s.up.notify]
	}
	for name, f := range s.opt.Keep {
		add(fdRecord{Kind: fdProgram, Name: name}, f)
	}
	if a := s.anchored.a; a != nil { // the new program starts one of its own; until then this one watches
		add(fdRecord{Kind: fdAnchor, Name: strconv.Itoa(a.PID)}, a.File())
	}
	for _, u := range s.sorted() {
		records, files := u.fdsOf(true)
		for i, r := range records {
			add(r, files[i])
		}
	}
	var b bytes.Buffer
	sf := stateFile{}
	if err := sf.snapshot(&b, h, s.sorted()); err != nil {
		return err
	}
	fd, err := unix.MemfdCreate("supervisor-state", unix.MFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	mem := os.NewFile(uintptr(fd), "state")
	defer mem.Close()
	if _, err := mem.WriteAt(b.Bytes(), 0); err != nil {
		return err
	}
	open = append(open, fd)
	for _, fd := range open {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
			return os.NewSyscallError("fcntl", err)
		}
	}
	env := append(os.Environ(), reexecEnvironment+"="+strconv.Itoa(fd))
	s.log.Info("re-executing", "executable", executable)
	s.reloadingUpstream()
	if len(s.ignored) > 0 { // what is handled would be at its default in the next program
		signal.Ignore(s.ignored...)
	}
	err = syscall.Exec(executable, os.Args, env)
	s.swallowIgnored()
	s.say("READY=1")
	for _, fd := range open {
		unix.CloseOnExec(fd)
	}
	return err
}

// previous finds what an earlier supervisor left: in the memfd of a re-execution, or
// in the state file. nil when there is nothing to take over.
func (s *Supervisor) previous() (*saved, error) {
	if v := os.Getenv(reexecEnvironment); v != "" {
		os.Unsetenv(reexecEnvironment)
		fd, err := strconv.Atoi(v)
		if err != nil {
			return nil, fmt.Errorf("%s=%q is no descriptor", reexecEnvironment, v)
		}
		f := os.NewFile(uintptr(fd), "state")
		defer f.Close()
		var b bytes.Buffer
		if _, err := b.ReadFrom(f); err != nil {
			return nil, fmt.Errorf("cannot read the state of the program before: %w", err)
		}
		st, err := parseState(b.Bytes())
		if err != nil {
			return nil, err
		}
		for _, r := range st.FDs {
			unix.CloseOnExec(r.FD)
		}
		st.reexec = true
		s.opt.Instance, s.started = st.Instance, st.Started
		if s.opt.ServiceManager {
			s.takeUpstream(st)
		}
		return st, nil
	}
	st, err := s.left()
	if s.opt.ServiceManager {
		s.takeUpstream(st)
	} else {
		s.takeAnchored(st)
	}
	return st, err
}

// left is what the state file says of a supervisor that has died.
func (s *Supervisor) left() (*saved, error) {
	if s.opt.StatePath == "" {
		return nil, nil
	}
	st, err := readState(s.opt.StatePath)
	if err != nil {
		// What runs is still in its cgroups, and is reported by restore; it is not
		// killed for a damaged file.
		s.log.Error("the state of an earlier supervisor cannot be read; its units are not adopted", "path", s.opt.StatePath, "err", err)
		_ = os.Rename(s.opt.StatePath, s.opt.StatePath+".damaged")
		return nil, nil
	}
	if st == nil {
		return nil, nil
	}
	if st.alive() {
		return nil, rpc.Errorf(rpc.CodeConflict, "another supervisor runs here: %s", process.Describe(st.Self.PID)).
			WithHint("use its control socket %s", s.opt.ControlPath)
	}
	s.opt.Instance = st.Instance
	if !st.here() {
		s.log.Warn("an earlier supervisor ran before a restart of the machine, or in another pid namespace; its units are gone", "pid", st.Self.PID)
		for _, u := range st.units {
			_ = os.Remove(boxSocket(u.Box))
		}
		return nil, nil
	}
	return st, nil
}

func boxSocket(b *boxRecord) string {
	if b == nil {
		return ""
	}
	return b.Socket
}

// take hands out the one descriptor of a kind.
func (st *saved) take(kind string) *os.File {
	return st.takeFor(kind, "", "")
}

// takeFor hands out a descriptor, once.
func (st *saved) takeFor(kind, unit, name string) *os.File {
	if st == nil {
		return nil
	}
	for i := range st.FDs {
		r := &st.FDs[i]
		if r.Kind == kind && r.Unit == unit && (name == "" || r.Name == name) && r.FD >= 0 {
			f := os.NewFile(uintptr(r.FD), r.Name)
			r.FD = -1
			if r.Key != 0 {
				if st.keys == nil {
					st.keys = map[*os.File]uint64{}
				}
				st.keys[f] = r.Key
			}
			return f
		}
	}
	return nil
}

// program hands out the descriptors of the program's own.
func (st *saved) program() map[string]*os.File {
	if st == nil {
		return nil
	}
	files := map[string]*os.File{}
	for _, r := range st.FDs {
		if r.Kind == fdProgram {
			files[r.Name] = st.takeFor(fdProgram, "", r.Name)
		}
	}
	return files
}

// Reexecuted reports whether this process was another program before that handed its
// units over to it. It is true until Run has taken them.
func Reexecuted() bool { return os.Getenv(reexecEnvironment) != "" }

// TakesOver is Reexecuted, or that an anchor or the service manager started this process
// in place of a supervisor that died.
func TakesOver() bool { return Reexecuted() || process.HasAnchor() || storedUpstream() }

// closeRest closes what nobody took.
func (st *saved) closeRest() {
	if st == nil {
		return
	}
	for i := range st.FDs {
		if st.FDs[i].FD >= 0 {
			unix.Close(st.FDs[i].FD)
			st.FDs[i].FD = -1
		}
	}
}

// listenAgain gets a listening socket back after the supervisor was gone: one that was
// handed over, one that the running service still has, or a new one where nobody
// listens any more. An error means that somebody listens whom we cannot take it from.
func (s *Supervisor) listenAgain(u *unit, i int, addr string) (*os.File, bool, error) {
	if f := s.takeInherited(u.fdName(), addr, i); f != nil {
		return f, true, nil
	}
	for _, v := range s.units {
		if v.main != nil && v.main.p != nil {
			if f := sockets.Reclaim(v.main.p.PIDFD(), addr); f != nil {
				return f, false, nil
			}
		}
	}
	f, err := sockets.Listen(addr, u.socketConfig())
	var busy *sockets.InUseError
	if errors.As(err, &busy) {
		err = fmt.Errorf("%w; the socket cannot be taken over from it", err)
	}
	return f, false, err
}
