package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
)

var fake = StartOptions{Executable: os.Args[0], Origin: api.Origin{Source: "test", Program: "p"}}

func TestStart(t *testing.T) {
	w := setup(t)
	var leak [2]int // without O_CLOEXEC, as a careless client leaves them
	if err := syscall.Pipe(leak[:]); err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(leak[0])
	defer syscall.Close(leak[1])
	l, err := w.Ensure(t.Context(), fake)
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, w, l)
	if !l.Started || l.Paths != w.Paths || l.Supervisor.Labels["cwd"] != w.Dir {
		t.Errorf("location %+v", l)
	}
	if sid := l.Supervisor.Labels["session"]; sid != fmt.Sprint(l.Supervisor.PID) {
		t.Errorf("the runtime is in session %s, not in one of its own (%d)", sid, l.Supervisor.PID)
	}
	if env := l.Supervisor.Labels["environment"]; strings.Contains(env, starterVariable) || !strings.Contains(env, "PATH=") {
		t.Errorf("environment:\n%s", env)
	}
	if fds := l.Supervisor.Labels["inheritable"]; fds != "" {
		t.Errorf("its children would inherit descriptors %s", fds)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", l.Supervisor.PID))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", l.Supervisor.PID, fd.Name()))
		if strings.Contains(to, "startup.lock") || strings.HasPrefix(to, "pipe:") {
			t.Errorf("the runtime keeps fd %s -> %s", fd.Name(), to)
		}
	}
	if held, _ := lockHeld(w.startupLock()); held {
		t.Error("startup.lock is still held")
	}
	if r := w.recorded(); r == nil || r.Environment.Source != "test" || r.Environment.Program != "p" {
		t.Errorf("record %+v", r)
	}
	again, err := w.Ensure(t.Context(), fake)
	if err != nil || again.Started || again.Instance != l.Instance {
		t.Errorf("second Ensure: %+v, %v", again, err)
	}
	b, err := os.ReadFile(w.SupervisorLog())
	if err != nil || !strings.Contains(string(b), "supervise -C "+w.Dir) {
		t.Errorf("log %q, %v", b, err)
	}
}

func TestAliasesAndMovesFindTheRunningOne(t *testing.T) {
	w := setup(t)
	l, err := w.Ensure(t.Context(), fake)
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, w, l)
	base := filepath.Dir(w.Dir)
	link, mount := filepath.Join(base, "link"), filepath.Join(base, "mount")
	if err := errors.Join(os.Symlink(w.Dir, link), os.Mkdir(mount, 0o700)); err != nil {
		t.Fatal(err)
	}
	if again, err := open(t, link).Ensure(t.Context(), fake); err != nil || again.Instance != l.Instance {
		t.Errorf("through a symlink: %+v, %v", again, err)
	}
	if out, err := inMountNamespace(t, "mount --bind "+w.Dir+" "+mount, "ensure", mount); err != nil || out != l.Instance {
		t.Errorf("through a bind mount in another mount namespace: %q, %v; want %s", out, err, l.Instance)
	}
	if out, err := childOf(t, &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}, os.Args[0], "ensure", w.Dir); err != nil || out != l.Instance {
		t.Errorf("from another pid namespace: %q, %v; want %s", out, err, l.Instance)
	}
	moved := filepath.Join(base, "moved")
	if err := errors.Join(os.Rename(w.Dir, moved), os.Mkdir(w.Dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if again, err := open(t, moved).Discover(t.Context()); err != nil || again.Instance != l.Instance {
		t.Errorf("from where it was moved to: %+v, %v", again, err)
	}
	var none *NotRunning
	if _, err := open(t, w.Dir).Discover(t.Context()); !errors.As(err, &none) {
		t.Errorf("the directory that took its place: %v", err)
	}
	if err := errors.Join(os.Remove(w.Dir), os.Rename(moved, w.Dir)); err != nil {
		t.Fatal(err)
	}
}

func TestStartConcurrently(t *testing.T) {
	w := setup(t)
	starts := filepath.Join(filepath.Dir(w.Dir), "starts")
	t.Setenv("FAKE_STARTS", starts)
	instances := make(chan string, 20)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			if i%2 == 0 {
				out, err := child(t, "ensure", w.Dir)
				if err != nil {
					t.Errorf("%v: %s", err, out)
				}
				instances <- out
				return
			}
			l, err := open(t, w.Dir).Ensure(t.Context(), fake)
			if err != nil {
				t.Error(err)
				return
			}
			instances <- l.Instance
		})
	}
	wg.Wait()
	close(instances)
	l, err := w.Discover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, w, l)
	for i := range instances {
		if i != l.Instance {
			t.Errorf("a caller got instance %q, want %q", i, l.Instance)
		}
	}
	if b, err := os.ReadFile(starts); err != nil || string(b) != l.Instance+"\n" {
		t.Errorf("started: %q, %v", b, err)
	}
}

func TestStartFailures(t *testing.T) {
	for _, c := range []struct {
		fake, exe string
		timeout   time.Duration
		want      []string
	}{
		{fake: "refuse", want: []string{"the configuration is wrong", "mend it"}},
		{fake: "exit", want: []string{"could not be started", "exit status 3", "something broke", "supervisor.log"}},
		{fake: "hang", timeout: 100 * time.Millisecond, want: []string{"not ready within 100ms"}},
		{exe: "/proc/nonexistent", want: []string{"/proc/nonexistent", "no such file"}},
		{exe: "/bin/true", want: []string{"exit status 0"}},
	} {
		t.Run(c.fake+c.exe, func(t *testing.T) {
			w := setup(t)
			t.Setenv("FAKE", c.fake)
			opts := StartOptions{Executable: os.Args[0], Timeout: c.timeout}
			if c.exe != "" {
				opts.Executable = c.exe
			}
			begin := time.Now()
			_, err := w.Ensure(t.Context(), opts)
			wantText(t, err, c.want...)
			if d := time.Since(begin); d > 50*time.Second {
				t.Errorf("took %v", d)
			}
			lock, err := w.StartupLock(within(t, time.Minute)) // free when the child is gone too
			if err != nil {
				t.Fatal(err)
			}
			lock.Close()
		})
	}
}

// A client that gives up or dies while it starts a runtime does not undo the start:
// the next one waits for it and gets it.
func TestStartGoesOn(t *testing.T) {
	for _, how := range []string{"cancelled", "killed"} {
		t.Run(how, func(t *testing.T) {
			w := setup(t)
			fifo := filepath.Join(filepath.Dir(w.Dir), "fifo")
			if err := syscall.Mkfifo(fifo, 0o600); err != nil {
				t.Fatal(err)
			}
			t.Setenv("FAKE", "slow")
			t.Setenv("FAKE_FIFO", fifo)
			var starter *exec.Cmd
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			gaveUp := make(chan error, 1)
			if how == "killed" {
				starter = exec.Command(os.Args[0], "ensure", w.Dir)
				if err := starter.Start(); err != nil {
					t.Fatal(err)
				}
			} else {
				go func() {
					_, err := w.Ensure(ctx, fake)
					gaveUp <- err
				}()
			}
			gate, err := os.OpenFile(fifo, os.O_WRONLY, 0) // returns when the child has it open for reading
			if err != nil {
				t.Fatal(err)
			}
			if how == "killed" {
				if err := starter.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				_ = starter.Wait()
			} else {
				cancel()
				err := <-gaveUp
				if !errors.Is(err, context.Canceled) {
					t.Errorf("the caller that gave up got %v", err)
				}
				wantText(t, err, "goes on")
			}
			if _, err := w.Start(within(t, 500*time.Millisecond), fake); !errors.Is(err, context.DeadlineExceeded) || rpc.CodeOf(err) != rpc.CodeUnavailable {
				t.Errorf("while it starts: %v", err)
			}
			next := make(chan error, 1)
			var l *Location
			go func() {
				var err error
				l, err = open(t, w.Dir).Ensure(context.Background(), fake)
				next <- err
			}()
			if err := gate.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-next; err != nil {
				t.Fatal(err)
			}
			defer stop(t, w, l)
			if l.Started {
				t.Error("a second runtime was started")
			}
		})
	}
}

// A runtime that is stopping holds its locks a little longer than its sockets.
func TestStartWaitsForTheOldOne(t *testing.T) {
	w := setup(t)
	prepare(t, w)
	h := hold(t, w.managerLock())
	type result struct {
		l   *Location
		err error
	}
	got := make(chan result, 1)
	go func() {
		l, err := w.Ensure(t.Context(), fake)
		got <- result{l, err}
	}()
	select {
	case r := <-got:
		t.Fatalf("did not wait: %+v", r)
	case <-time.After(50 * time.Millisecond):
	}
	h.kill()
	r := <-got
	if r.err != nil {
		t.Fatal(r.err)
	}
	stop(t, w, r.l)
}

func TestTakeStarterOutsideStart(t *testing.T) {
	for _, v := range []string{"", "{", `{"ready_fd":1,"lock_fd":2}`} {
		t.Setenv(starterVariable, v)
		st := TakeStarter()
		if st != nil || st.Holds() {
			t.Errorf("%q: %+v", v, st)
		}
		st.Report(nil)
	}
}
