// Package files reads and changes files for the Python session: ws.fs.read, write,
// patch, apply_patch, stat, tree and image.
//
// It owns the locks between writers, the staging and atomic replacement of files, and
// the journal by which a change that a crash cut off is undone or completed at the
// next start (Recover). It does not search (package search does) and it keeps no
// history of files.
//
// # Paths
//
// A relative path means the workspace. Absolute paths are used with the permissions
// of the user who runs the program: this is no sandbox. Single-file writes follow
// symbolic links and keep them; apply_patch refuses a path that is one. Only regular
// files are read or replaced, so nothing waits on a FIFO and no device is opened.
//
// # Writing
//
// New content is written beside its target under a name of ours, given the mode,
// owner and extended attributes of the file it replaces, synced, and renamed over
// it. A reader sees the old or the new file, never a mixture. The replaced file's
// other hard links keep the old content; the result says so.
//
// Writers of one file are serialized by a lock on its directory's inode and its
// name, whatever path they came by. Programs outside do not know these locks; a
// change of theirs is noticed up to the moment of the rename.
package files

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

// Error codes beyond rpc's.
const (
	CodeNoMatch        = "no_match"        // the text to replace is not there
	CodeAmbiguous      = "ambiguous_match" // it is there more than once
	CodeEncoding       = "invalid_encoding"
	CodeRecoveryNeeded = "recovery_needed" // a failed change could not be undone completely
)

// Limits.
const (
	MaxReadBytes = 4 << 20   // text of one page: escaped six-fold it still fits in a frame
	MaxHashBytes = 1 << 30   // files above it get no revision
	MaxEditBytes = 64 << 20  // files that patch and apply_patch take
	MaxPatchSum  = 256 << 20 // of all files of one apply_patch
)

// Service answers fs.* calls for one workspace. Its methods may be called at the
// same time.
type Service struct {
	root  ospath.Root
	state string // directory of the journals
	umask int    // of new files; negative: the process's
	locks locks

	// fault, when tests set it, is called before each step that touches the file
	// system and may fail it.
	fault func(step string) error
}

// Options of a Service.
type Options struct {
	Root string // of the workspace
	// Umask of the user. New files and directories get it instead of that of this
	// process, which may keep its own files private. Negative: that of this process.
	Umask int
}

// New serves a workspace. Call Recover before the first write.
func New(o Options) (*Service, error) {
	real, err := filepath.EvalSymlinks(o.Root)
	if err != nil {
		return nil, fmt.Errorf("cannot open the workspace: %w", err)
	}
	if real, err = filepath.Abs(real); err != nil {
		return nil, fmt.Errorf("cannot open the workspace: %w", err)
	}
	return &Service{root: ospath.Root(real), state: filepath.Join(real, ".mypr", "writes"), umask: o.Umask, locks: locks{held: map[string]*lock{}}}, nil
}

// Methods are the calls that this service answers, by the names Python sends.
func (s *Service) Methods() map[string]rpc.Method {
	return map[string]rpc.Method{
		"fs.read":        rpc.Typed("fs.read", ReadParams{StartLine: 1, MaxBytes: 32768, Encoding: "utf-8"}, s.Read),
		"fs.read_bytes":  rpc.Typed("fs.read_bytes", ReadBytesParams{MaxBytes: 32768}, s.ReadBytes),
		"fs.image":       rpc.Typed("fs.image", ImageParams{MaxBytes: 2 << 20}, s.Image),
		"fs.stat":        rpc.Typed("fs.stat", StatParams{}, s.Stat),
		"fs.tree":        rpc.Typed("fs.tree", TreeParams{Path: ".", Depth: 3, MaxEntries: 200}, s.Tree),
		"fs.write":       rpc.Typed("fs.write", WriteParams{Encoding: "utf-8"}, s.Write),
		"fs.write_bytes": rpc.Typed("fs.write_bytes", WriteBytesParams{}, s.WriteBytes),
		"fs.patch":       rpc.Typed("fs.patch", PatchParams{Encoding: "utf-8", MaxDiffBytes: 32768}, s.Patch),
		"fs.apply_patch": rpc.Typed("fs.apply_patch", ApplyPatchParams{MaxDiffBytes: 32768}, s.ApplyPatch),
	}
}

func invalid(format string, args ...any) *rpc.Error {
	return rpc.Errorf(rpc.CodeInvalidRequest, format, args...)
}

// openRegular opens a regular file for reading. It looks before it opens, because
// opening alone can wait (FIFO) or act (device); and again afterwards, because the
// name may mean another file by then.
func (s *Service) openRegular(operation, path string) (*os.File, *unix.Stat_t, error) {
	abs, err := s.root.Abs(path)
	if err != nil {
		return nil, nil, err
	}
	var st unix.Stat_t
	if err := unix.Stat(abs, &st); err != nil {
		return nil, nil, s.root.Error(operation, abs, err)
	}
	if err := s.mustBeRegular(operation, abs, &st); err != nil {
		return nil, nil, err
	}
	f, err := os.OpenFile(abs, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, s.root.Error(operation, abs, err)
	}
	if err = fstat(f, &st); err == nil {
		err = s.mustBeRegular(operation, abs, &st)
	}
	if err != nil {
		f.Close()
		return nil, nil, s.root.Error(operation, abs, err)
	}
	return f, &st, nil
}

func (s *Service) mustBeRegular(operation, abs string, st *unix.Stat_t) error {
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		return nil
	}
	e := invalid("cannot %s %s: it is a %s, not a regular file", operation, s.root.Display(abs), special(st.Mode))
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return e.WithHint("list it with await ws.fs.tree(%q)", string(s.root.Display(abs)))
	}
	return e.WithHint("open it with ordinary Python if you mean to; that may block the session")
}

// special names a file type in words.
func special(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return "regular file"
	case unix.S_IFDIR:
		return "directory"
	case unix.S_IFLNK:
		return "symbolic link"
	case unix.S_IFIFO:
		return "FIFO"
	case unix.S_IFSOCK:
		return "socket"
	case unix.S_IFCHR:
		return "character device"
	case unix.S_IFBLK:
		return "block device"
	}
	return "file of unknown type"
}

func fstat(f *os.File, st *unix.Stat_t) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = unix.Fstat(int(fd), st) }); err != nil {
		return err
	}
	return inner
}

// identity tells whether a file is still the one that was looked at. The change time
// is not part of it: renaming and linking move it.
type identity struct {
	Dev   uint64 `json:"dev"`
	Ino   uint64 `json:"ino"`
	Size  int64  `json:"size"`
	Mtime int64  `json:"mtime_ns"`
}

func identify(st *unix.Stat_t) identity {
	return identity{uint64(st.Dev), st.Ino, st.Size, st.Mtim.Nano()}
}

// lstatIdentity is the identity of what is at path; ok is false when nothing is.
func lstatIdentity(path string) (id identity, ok bool, err error) {
	var st unix.Stat_t
	switch err := unix.Lstat(path, &st); err {
	case nil:
		return identify(&st), true, nil
	case unix.ENOENT:
		return identity{}, false, nil
	default:
		return identity{}, false, err
	}
}

// target is a place for a file, found through symbolic links.
type target struct {
	path    string       // absolute, no symbolic link in its directories, and none itself
	key     string       // for locks
	st      *unix.Stat_t // nil: nothing is there
	missing []string     // directories to make first, outermost first
}

// resolve finds the place that a path means. With follow, a final symbolic link is
// followed, even to where nothing is yet; else it is refused.
func (s *Service) resolve(operation, path string, follow bool) (*target, error) {
	abs, err := s.root.Abs(path)
	if err != nil {
		return nil, err
	}
	at := abs
	for range 40 { // as the kernel does
		base := at[strings.LastIndexByte(at, '/')+1:]
		if base == "" || base == "." || base == ".." {
			return nil, invalid("cannot %s %s: it names a directory", operation, s.root.Display(abs))
		}
		dir := at[:len(at)-len(base)]
		t, err := s.place(dir, base)
		if err != nil {
			return nil, s.root.Error(operation, abs, err)
		}
		if t.st == nil || t.st.Mode&unix.S_IFMT != unix.S_IFLNK {
			return t, nil
		}
		if !follow {
			return nil, invalid("cannot %s %s: it is a symbolic link", operation, s.root.Display(abs)).
				WithHint("name the file that it points to (ws.fs.stat shows its target)")
		}
		link, err := os.Readlink(t.path)
		if err != nil {
			return nil, s.root.Error(operation, abs, err)
		}
		if at = link; !filepath.IsAbs(link) {
			at = filepath.Dir(t.path) + "/" + link
		}
	}
	return nil, s.root.Error(operation, abs, unix.ELOOP)
}

// place resolves the directory of a file and looks whether the file is there. The
// directory may be missing: then the file's place is known by the nearest one that is there.
func (s *Service) place(dir, base string) (*target, error) {
	if len(base) > 255 {
		return nil, unix.ENAMETOOLONG
	}
	var missing []string
	have := strings.TrimRight(dir, "/")
	for {
		if have == "" {
			have = "/"
		}
		var st unix.Stat_t
		err := unix.Stat(have, &st)
		if err == nil {
			if st.Mode&unix.S_IFMT != unix.S_IFDIR {
				return nil, unix.ENOTDIR
			}
			real, err := filepath.EvalSymlinks(have)
			if err != nil {
				return nil, err
			}
			t := &target{key: fmt.Sprintf("%x:%x", st.Dev, st.Ino)}
			for i := len(missing) - 1; i >= 0; i-- {
				real = filepath.Join(real, missing[i])
				t.key += "/" + missing[i]
				t.missing = append(t.missing, real)
			}
			t.path = filepath.Join(real, base)
			t.key += "/" + base
			if len(missing) > 0 {
				return t, nil
			}
			st = unix.Stat_t{}
			switch err := unix.Lstat(t.path, &st); err {
			case nil:
				t.st = &st
			case unix.ENOENT:
			default:
				return nil, err
			}
			return t, nil
		}
		if err != unix.ENOENT {
			return nil, err
		}
		if err := unix.Lstat(have, &st); err == nil {
			return nil, unix.ENOENT // a symbolic link to nothing is no place to make a directory
		}
		name := have[strings.LastIndexByte(have, '/')+1:]
		if name == ".." || len(missing) > 200 {
			return nil, unix.ENOENT
		}
		if name != "." {
			missing = append(missing, name)
		}
		have = strings.TrimRight(have[:len(have)-len(name)], "/")
	}
}

// locks serialize writers per place.
type locks struct {
	mu   sync.Mutex // guards held and the counts in it
	held map[string]*lock
}

type lock struct {
	free chan struct{} // holds one token while nobody has the lock
	refs int
}

// acquire takes the locks of sorted, distinct keys, or none when ctx ends first.
func (l *locks) acquire(ctx context.Context, keys []string) (release func(), err error) {
	var have []string
	release = func() {
		for _, k := range have {
			l.put(k, true)
		}
	}
	for _, k := range keys {
		l.mu.Lock()
		e := l.held[k]
		if e == nil {
			e = &lock{free: make(chan struct{}, 1)}
			e.free <- struct{}{}
			l.held[k] = e
		}
		e.refs++
		l.mu.Unlock()
		select {
		case <-e.free:
			have = append(have, k)
		case <-ctx.Done():
			l.put(k, false)
			release()
			return nil, ctx.Err()
		}
	}
	return release, nil
}

func (l *locks) put(key string, had bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.held[key]
	if had {
		e.free <- struct{}{}
	}
	if e.refs--; e.refs == 0 {
		delete(l.held, key)
	}
}

// lockTarget resolves a path and takes its lock. What a symbolic link points to may
// change before the lock is held, so it is resolved again.
func (s *Service) lockTarget(ctx context.Context, operation, path string) (*target, func(), error) {
	for range 8 {
		t, err := s.resolve(operation, path, true)
		if err != nil {
			return nil, nil, err
		}
		release, err := s.locks.acquire(ctx, []string{t.key})
		if err != nil {
			return nil, nil, err
		}
		again, err := s.resolve(operation, path, true)
		if err == nil && again.key == t.key {
			return again, release, nil
		}
		release()
		if err != nil {
			return nil, nil, err
		}
	}
	return nil, nil, rpc.Errorf(rpc.CodeConflict, "cannot %s %s: what it names keeps changing", operation, path).
		WithHint("see who changes the link, then try again")
}

// step is one touch of the file system that can fail.
func (s *Service) step(name string, f func() error) error {
	if s.fault != nil {
		if err := s.fault(name); err != nil {
			return err
		}
	}
	return f()
}
