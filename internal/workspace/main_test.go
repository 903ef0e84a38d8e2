package workspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
)

// The test binary is every other process of these tests: "supervise" is the fake
// supervisor that Start runs, the others are started by child.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		if role, ok := roles[os.Args[1]]; ok {
			if err := role(os.Args[2:]); err != nil {
				fmt.Println(err)
				os.Exit(3)
			}
			os.Exit(0)
		}
	}
	os.Setenv("GORACE", "atexit_sleep_ms=0") // for the children: their race detector sleeps 1 s at exit
	if r, w, err := os.Pipe(); err == nil {  // the poller's own descriptors exist from here on
		r.Close()
		w.Close()
	}
	before := fds()
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if after := fds(); code == 0 && len(after) > len(before) {
			fmt.Printf("descriptors left: %q; before %q\n", after, before)
			code = 1
		}
		os.Exit(code)
	}))
}

func fds() (links []string) {
	names, _ := filepath.Glob("/proc/self/fd/*")
	for _, n := range names {
		if to, err := os.Readlink(n); err == nil {
			links = append(links, to)
		}
	}
	return links
}

var roles map[string]func([]string) error

func init() {
	roles = map[string]func([]string) error{
		"supervise": fakeSupervise,
		"open": func(args []string) error {
			w, err := Open(args[0])
			if err == nil {
				fmt.Print(w.ID)
			}
			return err
		},
		"layout": func(args []string) error {
			w, err := Open(args[0])
			if err != nil {
				return err
			}
			return w.EnsureLayout()
		},
		"ensure": func(args []string) error {
			w, err := Open(args[0])
			if err != nil {
				return err
			}
			l, err := w.Ensure(context.Background(), StartOptions{Executable: os.Args[0]})
			if err == nil {
				fmt.Print(l.Instance)
			}
			return err
		},
		"hold": func(args []string) error { // holds a lock until stdin ends
			l, err := AcquireLock(context.Background(), args[0])
			if err != nil {
				return err
			}
			defer l.Close()
			fmt.Println("held")
			_, _ = os.Stdin.Read(make([]byte, 1))
			return nil
		},
	}
}

// fakeSupervise does what the supervise verb does around the supervisor, and answers
// info and shutdown. FAKE chooses a way to go wrong.
func fakeSupervise(args []string) error {
	st := TakeStarter()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	fmt.Println("supervise", strings.Join(args, " "))
	switch os.Getenv("FAKE") {
	case "refuse":
		st.Report(rpc.Errorf("bad_config", "the configuration is wrong").WithHint("mend it"))
		return nil
	case "exit":
		return errors.New("something broke")
	case "hang":
		for {
			_ = unix.Pause() // not select {}: that is a deadlock, which the runtime ends
		}
	case "slow": // until the file that the test makes appears in the fifo
		if _, err := os.ReadFile(os.Getenv("FAKE_FIFO")); err != nil {
			return err
		}
	}
	w, err := Open(args[1])
	if err != nil {
		return err
	}
	lock, err := w.SupervisorLock(ctx)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := w.PrepareRuntimeDir(); err != nil {
		return err
	}
	inheritable := ""
	for fd := 3; fd < 1024; fd++ {
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			inheritable += fmt.Sprint(fd, " ")
		}
	}
	instance := NewInstance()
	var origin api.Origin
	if st != nil {
		origin = st.Origin
	}
	if err := w.RecordSupervisor(ctx, instance, "test", origin); err != nil {
		return err
	}
	os.Remove(w.Control)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: w.Control, Net: "unix"})
	if err != nil {
		return err
	}
	if path := os.Getenv("FAKE_STARTS"); path != "" {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		fmt.Fprintln(f, instance)
		f.Close()
	}
	st.Report(nil)
	s := infoServer(control.Info{Instance: instance, PID: os.Getpid(), Labels: map[string]string{
		LabelWorkspace: w.Dir, LabelWorkspaceID: w.ID, "environment": strings.Join(os.Environ(), "\n"), "session": fmt.Sprint(sid()), "cwd": cwd(), "inheritable": inheritable}}, cancel)
	err = s.Serve(ctx, l)
	os.Remove(w.Control)
	return err
}

func sid() int {
	n, _, _ := syscall.RawSyscall(syscall.SYS_GETSID, 0, 0, 0)
	return int(n)
}

func cwd() string { d, _ := os.Getwd(); return d }

func infoServer(info control.Info, stop func()) *rpc.Server {
	return &rpc.Server{NewHandler: func(*rpc.Conn) rpc.Handler {
		return rpc.HandlerFunc(func(_ context.Context, r *rpc.Request) (any, error) {
			switch r.Method {
			case control.MethodInfo:
				return info, nil
			case control.MethodShutdown:
				stop()
				return nil, nil
			}
			return nil, rpc.Errorf(rpc.CodeInvalidRequest, "no such method")
		})
	}}
}

// child runs the test binary in a role.
func child(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return childOf(t, nil, os.Args[0], args...)
}

// childAs does so as another user, with a copy of the binary that the user can reach.
func childAs(t *testing.T, uid int, args ...string) (string, error) {
	t.Helper()
	b, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "mb")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	bin := filepath.Join(dir, "bin")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(bin, b, 0o755), os.Chmod(bin, 0o755)); err != nil {
		t.Fatal(err)
	}
	return childOf(t, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}, bin, args...)
}

func childOf(t *testing.T, attr *syscall.SysProcAttr, bin string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.SysProcAttr = attr
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// setup gives the test a runtime base directory and a workspace of its own, with
// short names: a socket path holds 107 bytes.
func setup(t *testing.T) *Workspace {
	t.Helper()
	base, err := os.MkdirTemp("", "mw")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	run, dir, nobody := filepath.Join(base, "run"), filepath.Join(base, "ws"), filepath.Join(base, "none")
	for _, d := range []string{run, dir} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("XDG_RUNTIME_DIR", run)
	oldRun, oldTmp := runUserDir, tmpDir
	runUserDir, tmpDir = nobody, filepath.Join(base, "tmp")
	t.Cleanup(func() { runUserDir, tmpDir = oldRun, oldTmp })
	return open(t, dir)
}

func open(t *testing.T, dir string) *Workspace {
	t.Helper()
	w, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// stop ends the fake supervisor of w and waits until it is gone.
func stop(t *testing.T, w *Workspace, l *Location) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := control.Dial(ctx, l.Control)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	pidfd, err := unix.PidfdOpen(l.Supervisor.PID, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	if err := c.Shutdown(ctx, control.ShutdownParams{}); err != nil && !errors.Is(err, rpc.ErrClosed) {
		t.Fatal(err)
	}
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 60_000)
		if err == unix.EINTR {
			continue
		}
		if n != 1 || err != nil {
			t.Fatalf("the fake supervisor does not end: %v", err)
		}
		break
	}
	if held, err := lockHeld(w.supervisorLock()); held || err != nil {
		t.Errorf("its lock outlived it: %v", err)
	}
}

func wantText(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error; want one with %q", parts)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q lacks %q", err, p)
		}
	}
}
