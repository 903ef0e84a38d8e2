package process

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// An anchor is a small process beside its supervisor, outside of every unit, that
// holds a second copy of each descriptor which must not close when the supervisor
// dies: listening sockets (a connect then waits instead of being refused) and the ends
// of pipes and ptys (a unit that writes meanwhile would be ended by SIGPIPE, a shell by
// SIGHUP). When the supervisor ends without a farewell, the anchor starts it again and
// hands everything back. It does nothing else, and waits in one recvmsg.
//
// The two share a SOCK_SEQPACKET pair. Its messages and the environment variable of
// the restart are the whole protocol; they stay readable by other versions.

const (
	anchorName = "mypr-anchor"
	// anchorVariable tells a restarted supervisor what it inherited.
	anchorVariable = "MYPR_ANCHOR"
	// anchorBatch is how many descriptors go with one message: SCM_MAX_FD is 253.
	anchorBatch = 100
)

// Anchored is one descriptor that an anchor holds.
type Anchored struct {
	Key  uint64          `json:"key"` // rises; descriptors come back in its order
	Info json.RawMessage `json:"info"`
	File *os.File        `json:"-"`
	FD   int             `json:"fd,omitempty"` // in a restarted supervisor
}

type anchorMessage struct {
	Add  []Anchored `json:"add,omitempty"` // with a descriptor each
	Drop []uint64   `json:"drop,omitempty"`
	Bye  bool       `json:"bye,omitempty"`
}

// anchorCommand is how the supervisor is started again. Its environment is the anchor's.
type anchorCommand struct {
	Path string   `json:"path"`
	Args []string `json:"args"`
	Dir  string   `json:"dir"`
}

type anchorHandover struct {
	PID    int `json:"pid"` // the anchor's
	Socket int `json:"socket"`
	List   int `json:"list"` // memfd: a JSON array of Anchored
}

// Anchor is the supervisor's side.
type Anchor struct {
	PID  int
	sock *os.File
}

// StartAnchor starts an anchor that would start path with args again, in the present
// directory and environment.
func StartAnchor(path string, args []string) (*Anchor, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	command, err := json.Marshal(anchorCommand{path, args, dir})
	if err != nil {
		return nil, err
	}
	ours, theirs, err := anchorPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	p, _, err := Start(&Command{
		Path: selfExe, Args: []string{anchorName, string(command)}, Env: os.Environ(), Dir: "/",
		Stdio: [3]*os.File{nil, os.Stdout, os.Stderr}, Files: []*os.File{theirs}, CgroupFD: -1,
	})
	if err != nil {
		ours.Close()
		return nil, fmt.Errorf("cannot start the anchor: %w", err)
	}
	p.Close()
	return &Anchor{p.PID, ours}, nil
}

func anchorPair() (a, b *os.File, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(pair[0]), "anchor"), os.NewFile(uintptr(pair[1]), "anchor"), nil
}

// AnchorOf is the anchor at the other end of an inherited socket.
func AnchorOf(f *os.File, pid int) *Anchor { return &Anchor{pid, f} }

// HasAnchor reports whether an anchor started this process and TakeAnchor was not
// called yet.
func HasAnchor() bool { return os.Getenv(anchorVariable) != "" }

// TakeAnchor is what a process that an anchor started inherited: descriptors by
// number, in order. nil when none did.
func TakeAnchor() (*Anchor, []Anchored, error) {
	text := os.Getenv(anchorVariable)
	os.Unsetenv(anchorVariable)
	if text == "" {
		return nil, nil, nil
	}
	var h anchorHandover
	if err := json.Unmarshal([]byte(text), &h); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", anchorVariable, err)
	}
	for _, fd := range []int{h.Socket, h.List} {
		unix.CloseOnExec(fd)
	}
	a := &Anchor{h.PID, os.NewFile(uintptr(h.Socket), "anchor")}
	list := os.NewFile(uintptr(h.List), "list")
	defer list.Close()
	var held []Anchored
	if err := json.NewDecoder(list).Decode(&held); err != nil {
		return a, nil, fmt.Errorf("what the anchor held: %w", err)
	}
	for _, e := range held {
		unix.CloseOnExec(e.FD)
	}
	return a, held, nil
}

// AnchorOfSocket finds the anchor that holds the listening socket at a path, whether its
// supervisor lives or not. pidfd is the caller's to close; 0 and nil if there is none to
// be seen.
func AnchorOfSocket(path string) (pid int, pidfd *os.File) {
	table, _ := os.ReadFile("/proc/net/unix")
	var sockets []string // what /proc/PID/fd/N of them says
	for line := range strings.Lines(string(table)) {
		// Num RefCount Protocol Flags Type St Inode Path; the flag is __SO_ACCEPTCON
		if f := strings.Fields(line); len(f) == 8 && f[3] == "00010000" && f[7] == path {
			sockets = append(sockets, "socket:["+f[6]+"]")
		}
	}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		fd, err := unix.PidfdOpen(pid, 0) // first, so that what is looked at is what is opened
		if err != nil {
			continue
		}
		args, _ := os.ReadFile(dir + "/cmdline")
		if bytes.HasPrefix(args, []byte(anchorName+"\x00")) {
			held, _ := filepath.Glob(dir + "/fd/*")
			for _, link := range held {
				if to, err := os.Readlink(link); err == nil && slices.Contains(sockets, to) {
					return pid, os.NewFile(uintptr(fd), "anchor-pidfd")
				}
			}
		}
		unix.Close(fd)
	}
	return 0, nil
}

// File is the socket, for passing it over a re-execution and for noticing the
// anchor's end. It stays the Anchor's.
func (a *Anchor) File() *os.File { return a.sock }

// Update gives and takes back descriptors. It does not block: an anchor that does not
// read is of no use, and the error says so.
func (a *Anchor) Update(add []Anchored, drop []uint64) error {
	for first := true; first || len(add) > 0; first = false {
		n := min(len(add), anchorBatch)
		m := anchorMessage{Add: add[:n]}
		add = add[n:]
		if len(add) == 0 {
			m.Drop = drop
		}
		if err := a.send(m); err != nil {
			return err
		}
	}
	return nil
}

func (a *Anchor) send(m anchorMessage) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	var oob []byte
	if len(m.Add) > 0 {
		fds := make([]int, len(m.Add))
		for i, e := range m.Add {
			fds[i] = FD(e.File)
		}
		oob = unix.UnixRights(fds...)
	}
	return os.NewSyscallError("sendmsg", unix.Sendmsg(FD(a.sock), b, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL))
}

// Dismiss says farewell and waits, not for ever, until the anchor has ended.
func (a *Anchor) Dismiss() {
	pidfd, err := unix.PidfdOpen(a.PID, 0)
	serr := a.send(anchorMessage{Bye: true})
	a.sock.Close()
	if err != nil {
		return
	}
	defer unix.Close(pidfd)
	if serr == nil {
		_, _ = pollOne(pidfd, unix.POLLIN, 5*time.Second) // it may have yet to begin
	}
	Reap(a.PID) // if it is a child of ours
}

// pollOne waits for an event of one descriptor.
func pollOne(fd int, events int16, patience time.Duration) (bool, error) {
	deadline := time.Now().Add(patience)
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, int(time.Until(deadline).Milliseconds())+1)
		if err != unix.EINTR {
			return n > 0, err
		}
	}
}

// Abandon kills an anchor that is of no use any more: left alone, it would take the end
// of the connection for the end of the supervisor.
func (a *Anchor) Abandon() {
	if pidfd, err := unix.PidfdOpen(a.PID, 0); err == nil {
		// The number names the anchor still if the other end is open, or it is our child.
		if ended, err := pollOne(FD(a.sock), unix.POLLIN|unix.POLLRDHUP, 0); err == nil && !ended {
			_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
		}
		unix.Close(pidfd)
	}
	a.sock.Close()
}

// anchor is the state of the process itself. Its descriptors are plain numbers: it
// waits in blocking calls, so that no poller is needed.
type anchor struct {
	command anchorCommand
	sock    int
	held    []Anchored // by key
}

const (
	// anchorTries bounds starts of a supervisor that dies before it has taken over. One
	// that dies later is started for ever, after so many short lives with a pause.
	anchorTries  = 6
	anchorStable = 5 * time.Second
	anchorPause  = 250 * time.Millisecond
)

func anchorMain(args []string) {
	a := &anchor{sock: 3}
	if len(args) != 1 || json.Unmarshal([]byte(args[0]), &a.command) != nil {
		os.Exit(ExitExec)
	}
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE)
	unix.CloseOnExec(a.sock)
	a.sock = high(a.sock)
	quick, fails := 0, 0 // deaths in a row soon after a start; those before it had taken over
	for {
		began := time.Now()
		bye, heard := a.serve()
		unix.Close(a.sock)
		if bye {
			os.Exit(0)
		}
		quick++
		if time.Since(began) > anchorStable {
			quick = 0
		}
		if heard {
			fails = 0
		}
		for {
			switch {
			case fails == anchorTries:
				a.say("the supervisor cannot take over: giving up; what runs goes on without one")
				os.Exit(1)
			case fails > 0:
				time.Sleep(50 * time.Millisecond << fails)
			case quick > anchorTries:
				time.Sleep(anchorPause)
			}
			fails++
			a.say("the supervisor has ended unexpectedly: starting it again")
			err := a.restart(fails > 1)
			if err == nil {
				break
			}
			a.say("cannot start it: " + err.Error())
		}
	}
}

func (a *anchor) say(text string) {
	fmt.Fprintf(os.Stderr, "time=%s level=WARN msg=%q anchor=%d\n", time.Now().Format(time.RFC3339Nano), text, os.Getpid())
}

// high moves a descriptor out of the range that a restarted supervisor's take.
func high(fd int) int {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 10)
	if err != nil {
		return fd
	}
	unix.Close(fd)
	return n
}

// serve takes what the supervisor sends, until its farewell (bye) or its end. heard: it
// has sent something, which it does once it has taken over.
func (a *anchor) serve() (bye, heard bool) {
	buf, oob := make([]byte, 256<<10), make([]byte, unix.CmsgSpace(4*253))
	for {
		n, oobn, flags, _, err := unix.Recvmsg(a.sock, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return false, heard
		}
		heard = true
		fds := rights(oob[:oobn])
		var m anchorMessage
		if json.Unmarshal(buf[:n], &m) != nil || len(fds) != len(m.Add) {
			a.say(fmt.Sprintf("a message was not understood (%d bytes, %d descriptors, flags %#x)", n, len(fds), flags))
			for _, fd := range fds {
				unix.Close(fd)
			}
			continue
		}
		for i, e := range m.Add {
			e.FD = fds[i]
			a.held = append(a.held, e)
		}
		a.held = slices.DeleteFunc(a.held, func(e Anchored) bool {
			if !slices.Contains(m.Drop, e.Key) {
				return false
			}
			unix.Close(e.FD)
			return true
		})
		if m.Bye {
			return true, true
		}
	}
}

func rights(oob []byte) (fds []int) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for _, m := range msgs {
		if list, err := unix.ParseUnixRights(&m); err == nil {
			fds = append(fds, list...)
		}
	}
	return fds
}

// restart starts the supervisor with copies of everything. When its program did not
// live (it may have been replaced by one that cannot run), or is gone, the anchor's own
// program takes its place, which ran well enough to start an anchor.
func (a *anchor) restart(own bool) error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	defer unix.Close(pair[1])
	const first = 5 // 3: the socket, 4: the list
	list := slices.Clone(a.held)
	files := []uintptr{0, 1, 2, uintptr(pair[1]), 0}
	for i := range list {
		files = append(files, uintptr(list[i].FD))
		list[i].FD = first + i
	}
	mem, err := unix.MemfdCreate("anchored", unix.MFD_CLOEXEC)
	if err != nil {
		unix.Close(pair[0])
		return os.NewSyscallError("memfd_create", err)
	}
	defer unix.Close(mem)
	files[4] = uintptr(mem)
	var b bytes.Buffer
	h, herr := json.Marshal(anchorHandover{PID: os.Getpid(), Socket: 3, List: 4})
	if err = errors.Join(herr, json.NewEncoder(&b).Encode(list)); err == nil {
		_, err = unix.Pwrite(mem, b.Bytes(), 0)
	}
	if err != nil {
		unix.Close(pair[0])
		return err
	}
	attr := &syscall.ProcAttr{Dir: a.command.Dir, Files: files, Env: append(os.Environ(), anchorVariable+"="+string(h)), Sys: &syscall.SysProcAttr{Setsid: true}}
	path := a.command.Path
	if own || unix.Access(path, unix.X_OK) != nil {
		path = selfExe
	}
	pid, err := syscall.ForkExec(path, a.command.Args, attr)
	if err != nil {
		unix.Close(pair[0])
		return err
	}
	a.sock = pair[0]
	go func() { _, _ = syscall.Wait4(pid, nil, 0, nil) }()
	return nil
}
