package differential

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"mypr/supervisor/notify"
)

// probePath is this program as the unit files know it:
//
//	/run/probe PATH ACTION…
//
// It writes what it was given (argv, environment, descriptors, …) to PATH.N, N counting
// its runs, and does the actions in turn. Those that end or replace the process come
// last; the record appears just before them, or at "record".
//
//	notify:TEXT      tell the manager, and wait until it has heard
//	notify!TEXT      the same without waiting
//	fdstore:NAME     store a memfd of that name; fdstore!NAME: a pipe whose other end closes at once
//	fdremove:NAME    take it out again
//	child:N daemon:N start "sleep N" as a child; in a session of its own
//	ignore:SIGNAL    ignored from here on, by children too
//	wait:FIFO        go on when the script feeds FIFO (beside PATH)
//	accept:FD        take one connection and answer with the record's name
//	sub:ACTION       the action in a child process, to its end
//	N?ACTION         only in run N; N+?ACTION from run N on
//	record           write the record now
//	args             end; what follows is only there to be recorded
//	exit:N           end
//	die:SIGNAL       end by it
//	hold             be "sleep infinity"
//	sh:SCRIPT        be "/bin/sh -c SCRIPT"
const probePath = "/run/probe"

// record is what a process was given by its manager.
type record struct {
	PID, PPID int
	Args      []string
	Env       []string
	Dir       string
	UMask     string
	Leader    bool // of a session
	Nice      int
	OOMScore  string
	Slack     int // ns, of timers
	Limits    map[string]string
	Ignored   string   // signals
	FDs       []string // kinds of what is open
}

func probe(args []string) {
	if len(args) < 1 {
		fmt.Fprintln(os.Stderr, "probe: no path")
		os.Exit(99)
	}
	rec := takeRecord()
	if err := act(rec, args[0], args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		_ = os.WriteFile(args[0]+".error", []byte(err.Error()+"\n"), 0o600)
		os.Exit(98)
	}
	os.Exit(0)
}

func takeRecord() *record {
	r := &record{FDs: openDescriptors(), PID: os.Getpid(), PPID: os.Getppid(), Args: os.Args, Env: os.Environ(), Limits: map[string]string{}}
	r.Dir, _ = os.Getwd()
	mask := unix.Umask(0)
	unix.Umask(mask)
	r.UMask = fmt.Sprintf("%04o", mask)
	sid, _ := unix.Getsid(0)
	r.Leader = sid == r.PID
	prio, _ := unix.Getpriority(unix.PRIO_PROCESS, 0)
	r.Nice = 20 - prio
	b, _ := os.ReadFile("/proc/self/oom_score_adj")
	r.OOMScore = strings.TrimSpace(string(b))
	r.Slack, _ = unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	for name, what := range map[string]int{"NOFILE": unix.RLIMIT_NOFILE, "CORE": unix.RLIMIT_CORE, "NPROC": unix.RLIMIT_NPROC, "FSIZE": unix.RLIMIT_FSIZE, "AS": unix.RLIMIT_AS, "CPU": unix.RLIMIT_CPU} {
		var l unix.Rlimit
		// The Go runtime raises the soft limit of NOFILE for itself.
		if unix.Getrlimit(what, &l) == nil {
			r.Limits[name] = limit(l.Cur) + ":" + limit(l.Max)
		}
		if name == "NOFILE" {
			r.Limits[name] = limit(l.Max)
		}
	}
	return r
}

func limit(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "infinity"
	}
	return strconv.FormatUint(n, 10)
}

// openDescriptors says what is open, before this program opens something itself.
func openDescriptors() (list []string) {
	for fd := range 64 {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		if err != nil {
			continue
		}
		link, _ := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
		what := link
		var st unix.Stat_t
		_ = unix.Fstat(fd, &st)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFSOCK:
			what = "socket"
			sa, err := unix.Getsockname(fd)
			if u, ok := sa.(*unix.SockaddrUnix); ok && err == nil {
				what += " " + u.Name
			} else if in, ok := sa.(*unix.SockaddrInet4); ok && err == nil {
				what += " " + net.IP(in.Addr[:]).String()
			}
			if n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err == nil && n == 1 {
				what += " listening"
			}
		case unix.S_IFIFO:
			if strings.HasPrefix(link, "pipe:") {
				what = "pipe"
			}
		}
		if strings.HasPrefix(link, "anon_inode:") || strings.HasPrefix(link, cgroupRoot) || strings.HasPrefix(link, "/proc/") {
			continue // the Go runtime's
		}
		if flags&unix.O_NONBLOCK != 0 {
			what += " nonblocking"
		}
		list = append(list, fmt.Sprintf("%d: %s", fd, what))
	}
	return list
}

// write makes the record appear as a whole, as the next run of path.
func (r *record) write(path string, n int) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	tmp := path + ".tmp" + strconv.Itoa(r.PID)
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path+"."+strconv.Itoa(n))
}

// takeRun counts the runs of path.
func takeRun(path string) (int, error) {
	for n := 1; ; n++ {
		f, err := os.OpenFile(path+".run"+strconv.Itoa(n), os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			return 0, err
		}
		return n, f.Close()
	}
}

func act(rec *record, path string, actions []string) error {
	run, err := takeRun(path)
	if err != nil {
		return err
	}
	written := false
	write := func() error {
		if written {
			return nil
		}
		written = true
		return rec.write(path, run)
	}
	for _, a := range actions {
		if a == "args" {
			break
		}
		if cond, rest, ok := strings.Cut(a, "?"); ok {
			from, open := strings.CutSuffix(cond, "+")
			if n, err := strconv.Atoi(from); err == nil {
				if run != n && !(open && run >= n) {
					continue
				}
				a = rest
			}
		}
		i := strings.IndexAny(a, ":!")
		verb, arg, wait := a, "", true
		if i >= 0 {
			verb, arg, wait = a[:i], a[i+1:], a[i] == ':'
		}
		if slices.Contains([]string{"record", "exit", "die", "hold", "sh"}, verb) {
			if err := write(); err != nil {
				return err
			}
		}
		if err := action(path, run, verb, arg, wait); err != nil {
			return fmt.Errorf("%s: %w", a, err)
		}
	}
	return write()
}

func action(path string, run int, verb, arg string, wait bool) error {
	become := func(argv ...string) error { return unix.Exec(argv[0], argv, os.Environ()) }
	heard := func(sent bool, err error) error {
		if err != nil || !wait || !sent {
			return err
		}
		return notify.Barrier(patience)
	}
	switch verb {
	case "record":
		return nil
	case "notify":
		return heard(notify.Send(arg))
	case "fdstore":
		f, err := memory(arg, !wait)
		if err != nil {
			return err
		}
		wait = true
		return heard(notify.Store(arg, true, f))
	case "fdremove":
		return heard(notify.Unstore(arg))
	case "child", "daemon":
		cmd := exec.Command("/bin/sleep", arg)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: verb == "daemon"}
		return cmd.Start()
	case "ignore":
		signal.Ignore(unix.SignalNum(arg))
		return nil
	case "wait":
		f, err := os.Open(filepath.Join(filepath.Dir(path), arg))
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(io.Discard, f)
		return err
	case "accept":
		fd, err := strconv.Atoi(arg)
		if err != nil {
			return err
		}
		conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
		if err != nil {
			return err
		}
		defer unix.Close(conn)
		_, err = unix.Write(conn, []byte(filepath.Base(path)+"."+strconv.Itoa(run)))
		return err
	case "sub":
		cmd := exec.Command(probePath, path+"-sub", arg)
		cmd.Stderr = os.Stderr
		return cmd.Run()
	case "exit":
		n, err := strconv.Atoi(arg)
		if err == nil {
			os.Exit(n)
		}
		return err
	case "die":
		return become("/bin/sh", "-c", "kill -"+strings.TrimPrefix(arg, "SIG")+" $$; exec sleep infinity")
	case "hold":
		return become("/bin/sleep", "infinity")
	case "sh":
		return become("/bin/sh", "-c", arg)
	}
	return errors.New("no such action")
}

// memory is a memfd, or the end of a pipe whose other end is closed.
func memory(name string, hungUp bool) (*os.File, error) {
	if hungUp {
		r, w, err := os.Pipe()
		if err == nil {
			w.Close()
		}
		return r, err
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	return os.NewFile(uintptr(fd), name), err
}
