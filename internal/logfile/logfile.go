// Package logfile keeps the logs in .mypr from growing for ever: NAME.log becomes
// NAME.1.log when it is over Limit, and there is no older one.
//
// The file is copied and emptied, not renamed: processes that others have started have
// it open as their output and would go on writing to the old one, for weeks. They append
// (O_APPEND), so emptying is nothing to them. It owns no file: whoever writes to a log
// most rotates it, so that only what another process writes within the few microseconds
// between the end of copying and the emptying is lost.
package logfile

import (
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Limit is the size from which a log is rotated.
const Limit = 8 << 20

// checkEvery is how much is written between two looks at the size.
const checkEvery = 64 << 10

// Old is where the earlier part of a log is.
func Old(path string) string { return strings.TrimSuffix(path, ".log") + ".1.log" }

// Rotate rotates a log that is over Limit. A file that is not there, or that somebody
// else is rotating, is no error. On an error nothing is lost.
func Rotate(path string) error { return rotate(path, Limit) }

func rotate(path string, limit int64) error {
	if st, err := os.Lstat(path); err != nil || !st.Mode().IsRegular() || st.Size() < limit {
		return nil
	}
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil
	}
	if st, err := f.Stat(); err != nil || st.Size() < limit {
		return err // another one has done it
	}
	old, err := os.OpenFile(Old(path), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer old.Close()
	for copied := int64(0); ; {
		n, err := io.Copy(old, f)
		if err != nil {
			return err
		}
		copied += n
		st, err := f.Stat()
		if err != nil {
			return err
		}
		if st.Size() <= copied {
			return f.Truncate(0)
		}
	}
}

// Writer returns f, the standard error of this process, and lets what is written rotate
// the log when f is that log, opened to append. What f is otherwise (a terminal, a file of
// the user's) is none of our business.
func Writer(f *os.File, path string) io.Writer { return writer(f, path, Limit, checkEvery) }

func writer(f *os.File, path string, limit, every int64) io.Writer {
	is, err := f.Stat()
	named, nerr := os.Lstat(path)
	if err != nil || nerr != nil || !os.SameFile(is, named) {
		return f
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil || flags&unix.O_APPEND == 0 {
		return f
	}
	w := &rotating{f: f, path: path, limit: limit, every: every}
	_ = rotate(path, limit)
	return w
}

type rotating struct {
	f            *os.File
	path         string
	limit, every int64

	mu    sync.Mutex // guards since
	since int64      // bytes since the last look
}

func (w *rotating) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, err := w.f.Write(b)
	if w.since += int64(n); w.since >= w.every {
		w.since = 0
		_ = rotate(w.path, w.limit) // it is tried again
	}
	return n, err
}
