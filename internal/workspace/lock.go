package workspace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
)

// Lock is a held lock file. It is flock(2) on an open file description: it holds
// across mount and pid namespaces, ends with the last process that has the
// description open, however it dies, and travels to a child that inherits it.
type Lock struct {
	f    *os.File
	free func()
	once sync.Once
}

// Holder is what the holder of a lock wrote into the file about itself. It is true
// only while the lock is held, and the pid only in its own pid namespace.
type Holder struct {
	PID int `json:"pid"`
	Place
	Program string    `json:"program"`
	Since   time.Time `json:"since"`
}

func (h *Holder) String() string {
	if h == nil || h.PID == 0 {
		return "an unknown process"
	}
	since := h.Since.Format(time.DateTime)
	if h.SamePIDs() {
		return fmt.Sprintf("process %d (%s) since %s", h.PID, h.Program, since)
	}
	return fmt.Sprintf("%s since %s, which is not visible from here: it runs in %v, as process %d there", h.Program, since, h.Place, h.PID)
}

// Held is the error for a lock that another process kept until the caller's deadline.
type Held struct {
	Path   string
	Holder *Holder // nil: unknown
	Err    error   // of the context
}

func (e *Held) Error() string { return fmt.Sprintf("%s is held by %v: %v", e.Path, e.Holder, e.Err) }

// Unwrap gives ctx's error, and the error's shape on the wire.
func (e *Held) Unwrap() []error {
	return []error{e.Err, rpc.Errorf(rpc.CodeUnavailable, "%v", e.Error()).WithHint("try again; mypr-mcp status tells what runs")}
}

// inProcess serialises the callers within this process, by path: a channel of
// capacity 1 that holds a token while one of them has or waits for the file lock.
var inProcess struct {
	sync.Mutex
	byPath map[string]chan struct{}
}

// AcquireLock takes the lock at path, which is created if need be, and waits for it
// until ctx ends; the error is then a *Held.
//
// The wait is a blocking flock(2) on a goroutine of its own, without polling. Linux
// offers no way to call that wait off but a signal handler without SA_RESTART, which
// Go does not let one have. So when ctx ends first the goroutine stays: it ends when
// the holder lets go, passes the lock on at once, and until then later callers of
// this process queue behind it. There is never more than one per lock file.
func AcquireLock(ctx context.Context, path string) (*Lock, error) {
	inProcess.Lock()
	if inProcess.byPath == nil {
		inProcess.byPath = map[string]chan struct{}{}
	}
	sem := inProcess.byPath[path]
	if sem == nil {
		sem = make(chan struct{}, 1)
		inProcess.byPath[path] = sem
	}
	inProcess.Unlock()
	select {
	case sem <- struct{}{}:
	case <-ctx.Done():
		return nil, &Held{path, readHolder(path), context.Cause(ctx)}
	}
	free := func() { <-sem }
	for {
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err != nil {
			free()
			return nil, cannotOpen(path, err)
		}
		err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if err == unix.EWOULDBLOCK {
			granted := make(chan error)
			go func() {
				var err error
				for {
					if err = unix.Flock(fd, unix.LOCK_EX); err != unix.EINTR {
						break
					}
				}
				select {
				case granted <- err:
				case <-ctx.Done():
					unix.Close(fd)
					free()
				}
			}()
			select {
			case err = <-granted:
			case <-ctx.Done():
				return nil, &Held{path, readHolder(path), context.Cause(ctx)}
			}
		}
		if err != nil {
			unix.Close(fd)
			free()
			return nil, fmt.Errorf("cannot lock %s: %w", path, err)
		}
		if !stillAt(fd, path) { // .mypr was removed and made again while we waited
			unix.Close(fd)
			continue
		}
		l := &Lock{f: os.NewFile(uintptr(fd), path), free: free}
		l.Describe()
		return l, nil
	}
}

// LockFromFile makes a Lock of a descriptor that was inherited from a holder.
func LockFromFile(f *os.File) *Lock { return &Lock{f: f, free: func() {}} }

// File is the locked descriptor, for passing the lock to another process. It belongs
// to the Lock. A Lock that is closed here stays held there.
func (l *Lock) File() *os.File { return l.f }

// Close lets go. It does not unlock but closes: a child that inherited the
// descriptor goes on holding the lock.
func (l *Lock) Close() error {
	err := error(nil)
	l.once.Do(func() {
		err = l.f.Close()
		l.free()
	})
	return err
}

// Describe writes into the lock file who this process is. Who takes a lock does; it is for
// one who goes on holding another's.
func (l *Lock) Describe() {
	line, err := json.Marshal(Holder{PID: os.Getpid(), Place: Here(), Program: programName(), Since: time.Now().Truncate(time.Second)})
	if err != nil {
		return
	}
	// Only for people: a full disk must not keep anybody from taking a lock.
	if l.f.Truncate(0) == nil {
		_, _ = l.f.WriteAt(append(line, '\n'), 0)
	}
}

// cannotOpen is the error for a lock file that refuses. Mostly it is another user's:
// each user has a runtime of their own and none uses another's.
func cannotOpen(path string, err error) error {
	e := rpc.Errorf(codeOf(err), "cannot open the lock %s: %v", path, err)
	if errors.Is(err, syscall.EACCES) {
		return e.WithHint("use a directory of your own: mypr-mcp -C DIR …, or do it as the user whose directory this is")
	}
	return e.WithHint("make it readable and writable for you, and try again")
}

// lockHeld reports whether somebody holds the lock at path, without waiting. It takes
// the lock shared for an instant, which is why those who want it exclusively wait a
// little (AcquireLock) rather than only try.
func lockHeld(path string) (bool, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENOTDIR) {
		return false, nil
	}
	if err != nil {
		return false, cannotOpen(path, err)
	}
	defer unix.Close(fd)
	switch err := unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB); err {
	case nil:
		return false, nil
	case unix.EWOULDBLOCK:
		return true, nil
	default:
		return false, fmt.Errorf("cannot test the lock %s: %w", path, err)
	}
}

func readHolder(path string) *Holder {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 4096))
	h := new(Holder)
	if err != nil || json.Unmarshal(b, h) != nil {
		return nil
	}
	return h
}

func stillAt(fd int, path string) bool {
	var a, b unix.Stat_t
	return unix.Fstat(fd, &a) == nil && unix.Lstat(path, &b) == nil && a.Dev == b.Dev && a.Ino == b.Ino
}

// Locked reports whether a runtime holds a lock of this very .mypr; one whose .mypr was
// deleted, or replaced by another, does not. What cannot be told counts as held.
func (w *Workspace) Locked() bool {
	for _, path := range []string{w.supervisorLock(), w.managerLock()} {
		if held, err := lockHeld(path); held || err != nil {
			return true
		}
	}
	return false
}

// StartupLock is held by whoever looks for, starts or replaces a runtime.
func (w *Workspace) StartupLock(ctx context.Context) (*Lock, error) {
	return AcquireLock(ctx, w.startupLock())
}

// ManagerLock is held by the manager as long as it lives.
func (w *Workspace) ManagerLock(ctx context.Context) (*Lock, error) {
	return AcquireLock(ctx, w.managerLock())
}

// SupervisorLock is held by the supervisor as long as it lives.
func (w *Workspace) SupervisorLock(ctx context.Context) (*Lock, error) {
	return AcquireLock(ctx, w.supervisorLock())
}
