package workspace

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
)

// holder is another process that holds a lock until release.
type holder struct {
	cmd *exec.Cmd
	in  io.WriteCloser
}

func hold(t *testing.T, path string) *holder {
	t.Helper()
	cmd := exec.Command(os.Args[0], "hold", path)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	h := &holder{cmd, in}
	t.Cleanup(func() { h.kill() })
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "held\n" {
		t.Fatalf("holder said %q, %v", line, err)
	}
	return h
}

func (h *holder) kill() {
	_ = h.cmd.Process.Kill()
	_ = h.cmd.Wait()
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestLockWaitsForDeath(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l")
	h := hold(t, path)
	got := make(chan error, 1)
	go func() {
		l, err := AcquireLock(within(t, 60*time.Second), path)
		if err == nil {
			err = l.Close()
		}
		got <- err
	}()
	select {
	case err := <-got:
		t.Fatalf("got a lock that is held: %v", err)
	case <-time.After(50 * time.Millisecond): // a lock that is not granted makes no event
	}
	h.kill()
	if err := <-got; err != nil {
		t.Fatal(err)
	}
}

func TestLockDeadline(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l")
	h := hold(t, path)
	for range 2 { // the second one queues behind the first one's wait
		_, err := AcquireLock(within(t, 20*time.Millisecond), path)
		var held *Held
		if !errors.As(err, &held) || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("error %v", err)
		}
		if held.Holder == nil || held.Holder.PID != h.cmd.Process.Pid || held.Holder.Program == "" {
			t.Errorf("holder %+v, want process %d", held.Holder, h.cmd.Process.Pid)
		}
		wantText(t, err, path, "process", " hold)")
	}
	h.kill()
	// The wait that was given up passes the lock on.
	l, err := AcquireLock(within(t, 60*time.Second), path)
	if err != nil {
		t.Fatal(err)
	}
	if held, err := lockHeld(path); !held || err != nil {
		t.Errorf("held = %v, %v", held, err)
	}
	if err := errors.Join(l.Close(), l.Close()); err != nil {
		t.Error(err)
	}
	if held, err := lockHeld(path); held || err != nil {
		t.Errorf("after Close: held = %v, %v", held, err)
	}
	if held, err := lockHeld(path + "-none"); held || err != nil {
		t.Errorf("no file: held = %v, %v", held, err)
	}
}

func TestLockExcludes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l")
	var inside, most atomic.Int32
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			l, err := AcquireLock(within(t, 60*time.Second), path)
			if err != nil {
				t.Error(err)
				return
			}
			most.Store(max(most.Load(), inside.Add(1)))
			inside.Add(-1)
			l.Close()
		})
	}
	wg.Wait()
	if most.Load() != 1 {
		t.Errorf("%d holders at once", most.Load())
	}
}

// A lock file that was removed while we waited for it protects nothing.
func TestLockFileReplaced(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "l")
	h := hold(t, path)
	opened := watchOpen(t, path)
	got := make(chan *Lock, 1)
	go func() {
		l, err := AcquireLock(within(t, 60*time.Second), path)
		if err != nil {
			t.Error(err)
		}
		got <- l
	}()
	opened()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	h.kill()
	l := <-got
	if l == nil {
		return
	}
	defer l.Close()
	if held, err := lockHeld(path); !held || err != nil {
		t.Errorf("held = %v, %v: the lock is on the removed file", held, err)
	}
}

// watchOpen returns a function that waits until somebody has opened path since.
func watchOpen(t *testing.T, path string) func() {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	return func() {
		if _, err := unix.Read(fd, make([]byte, 4096)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLockSurvivesInChild(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l")
	l, err := AcquireLock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/bin/cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.ExtraFiles = []*os.File{l.File()}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if held, _ := lockHeld(path); !held {
		t.Error("closing our end took the lock from the child")
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if held, _ := lockHeld(path); held {
		t.Error("held though everybody is gone")
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := LockFromFile(f).Close(); err != nil {
		t.Error(err)
	}
}

func TestHolderText(t *testing.T) {
	var none *Holder
	if s := none.String(); s != "an unknown process" {
		t.Errorf("%q", s)
	}
	h := &Holder{PID: 7, Program: "mypr-mcp manager", Place: Place{PIDNamespace: "1", Host: "elsewhere"}}
	if s := h.String(); !strings.Contains(s, "another pid namespace (1), host name elsewhere, as process 7 there") {
		t.Errorf("%q", s)
	}
}

// Another user's lock file may not be opened; the error says what to do then.
func TestLockOfAnotherUser(t *testing.T) {
	err := cannotOpen("/their/.mypr/manager.lock", unix.EACCES)
	e := rpc.AsError(err)
	if e.Code != rpc.CodePermission || !strings.Contains(e.Message, "manager.lock") || !strings.Contains(e.Hint, "-C DIR") {
		t.Errorf("%+v", e)
	}
	path := filepath.Join(t.TempDir(), "l")
	if err := os.Symlink("elsewhere", path); err != nil {
		t.Fatal(err)
	}
	if _, err := lockHeld(path); rpc.AsError(err).Hint == "" {
		t.Errorf("a symbolic link: %v", err)
	}
	if _, err := AcquireLock(t.Context(), path); rpc.AsError(err).Hint == "" {
		t.Errorf("a symbolic link: %v", err)
	}
}
