package workspace

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
)

// maxSocketPath is what sockaddr_un holds (108 bytes) less its terminating zero.
const maxSocketPath = 107

// These are variables for the tests alone.
var (
	runUserDir = "/run/user"
	tmpDir     = "/tmp"
)

// runtimeDirs lists where a runtime of this user may have its sockets, the one that
// a new runtime uses first. A client whose environment was stripped, and one whose
// was not, thereby look in the same places.
func runtimeDirs(xdg string) []string {
	uid := strconv.Itoa(os.Getuid())
	var dirs []string
	add := func(dir string) {
		if !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	if filepath.IsAbs(xdg) { // the base directory specification has relative ones ignored
		add(filepath.Join(xdg, "mypr"))
	}
	if dir := ownRunUserDir(); dir != "" {
		add(filepath.Join(dir, "mypr"))
	}
	add(filepath.Join(tmpDir, "mypr-"+uid, "mypr"))
	return dirs
}

// ownRunUserDir is the directory that logind makes for this user, or "".
func ownRunUserDir() string {
	dir := filepath.Join(runUserDir, strconv.Itoa(os.Getuid()))
	var st unix.Stat_t
	if unix.Stat(dir, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR && int(st.Uid) == os.Getuid() {
		return dir
	}
	return ""
}

// PrepareRuntimeDir makes the runtime directory if need be, checks that nobody else
// can put a socket in it, and that the sockets' paths fit. Whoever is about to listen
// calls it first.
func (w *Workspace) PrepareRuntimeDir() error {
	if n := len(w.Socket); n > maxSocketPath {
		return rpc.Errorf(rpc.CodeInvalidRequest, "the socket path %s has %d bytes, and a Unix socket's path has at most %d", w.Socket, n, maxSocketPath).
			WithHint("set XDG_RUNTIME_DIR to a directory with a shorter name, or unset it")
	}
	if err := checkRuntimeDir(w.RuntimeDir, true); err != nil {
		return err
	}
	// It can be there from before, in a file system that is read-only here.
	if err := unix.Faccessat(unix.AT_FDCWD, w.RuntimeDir, unix.W_OK, unix.AT_EACCESS); err != nil {
		return runtimeDirError(rpc.CodePermission, w.RuntimeDir, err.Error())
	}
	return nil
}

// checkRuntimeDir walks the last two components of dir by descriptor, so that what
// was checked is what is used: the parent must be a place where others cannot rename
// our entries, and dir itself must be ours, no symlink, and closed to everybody else.
// With create, what is missing is made. Errors other than "does not exist" are
// *rpc.Error.
func checkRuntimeDir(dir string, create bool) error {
	uid := os.Getuid()
	parent := filepath.Dir(dir)
	// The fallback below /tmp has a component more that anybody could have made before us.
	if filepath.Dir(parent) == tmpDir && filepath.Base(parent) == "mypr-"+strconv.Itoa(uid) {
		tmp, err := openParent(tmpDir, uid)
		if err != nil {
			return err
		}
		defer unix.Close(tmp)
		mid, err := openOwn(tmp, parent, uid, create)
		if err != nil {
			return err
		}
		defer unix.Close(mid)
		fd, err := openOwn(mid, dir, uid, create)
		if err != nil {
			return err
		}
		return unix.Close(fd)
	}
	if create {
		if err := os.Mkdir(parent, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return runtimeDirError(rpc.CodeNotFound, dir, fmt.Sprintf("cannot make %s: %v", parent, cause(err)))
		}
	}
	p, err := openParent(parent, uid)
	if err != nil {
		return err
	}
	defer unix.Close(p)
	fd, err := openOwn(p, dir, uid, create)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// openParent opens a directory that is ours or root's and in which nobody else may
// rename or remove what is ours.
func openParent(path string, uid int) (int, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENOTDIR) {
		return -1, err
	}
	if err != nil {
		return -1, runtimeDirError(rpc.CodePermission, path, err.Error())
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return -1, runtimeDirError(rpc.CodeInternal, path, err.Error())
	}
	switch {
	case int(st.Uid) != uid && st.Uid != 0 && st.Uid != unmappedUID():
		err = runtimeDirError(rpc.CodePermission, path, fmt.Sprintf("it belongs to user id %d, you are %d", st.Uid, uid))
	case st.Mode&0o022 != 0 && st.Mode&unix.S_ISVTX == 0:
		err = runtimeDirError(rpc.CodePermission, path, "other users may rename what is in it (mode "+strconv.FormatUint(uint64(st.Mode&0o7777), 8)+")")
	default:
		return fd, nil
	}
	unix.Close(fd)
	return -1, err
}

// unmappedUID is the owner that the files of root show in a user namespace that knows only
// some of the machine's users, as rootless containers and sandboxes do; 0 elsewhere. It
// can be another user's too, who could then take our directory away but none in its place
// that would pass for ours.
func unmappedUID() uint32 {
	b, err := os.ReadFile("/proc/self/uid_map")
	var inside, outside, n uint64
	if _, serr := fmt.Sscan(string(b), &inside, &outside, &n); err != nil || serr != nil || n == 1<<32-1 {
		return 0
	}
	var overflow uint32 = 65534
	if b, err := os.ReadFile("/proc/sys/kernel/overflowuid"); err == nil {
		_, _ = fmt.Sscan(string(b), &overflow)
	}
	return overflow
}

// openOwn opens the last component of path below parent and checks it by descriptor.
func openOwn(parent int, path string, uid int, create bool) (int, error) {
	name := filepath.Base(path)
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	if create {
		if err := unix.Mkdirat(parent, name, 0o700); err != nil && err != unix.EEXIST {
			return -1, runtimeDirError(rpc.CodePermission, path, "cannot make it: "+err.Error())
		}
	}
	fd, err := unix.Openat(parent, name, flags, 0)
	switch err {
	case nil:
	case unix.ENOENT:
		return -1, err
	case unix.ELOOP, unix.ENOTDIR:
		return -1, runtimeDirError(rpc.CodePermission, path, "it is not a directory but a symbolic link or a file")
	default:
		return -1, runtimeDirError(rpc.CodePermission, path, err.Error())
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	switch {
	case err != nil:
		err = runtimeDirError(rpc.CodeInternal, path, err.Error())
	case int(st.Uid) != uid:
		err = runtimeDirError(rpc.CodePermission, path, fmt.Sprintf("it belongs to user id %d, you are %d", st.Uid, uid))
	case st.Mode&0o077 != 0:
		if err = unix.Fchmod(fd, 0o700); err != nil {
			err = runtimeDirError(rpc.CodePermission, path, "others have access, and its mode cannot be changed: "+err.Error())
		}
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func runtimeDirError(code, path, why string) error {
	return rpc.Errorf(code, "cannot use the runtime directory %s: %s", path, why).
		WithHint("remove it, or set XDG_RUNTIME_DIR to a directory of your own with mode 0700 that can be written (in a container with a read-only file system: a tmpfs, or the host's)")
}
