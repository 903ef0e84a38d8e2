package files

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// attributes are what a replaced file hands on to its successor.
type attributes struct {
	mode     uint32 // permission bits
	uid, gid uint32
	xattrs   map[string][]byte
	warnings []string // what could not be handed on; filled by give
}

// attributesOf reads them off an open file.
func attributesOf(f *os.File, st *unix.Stat_t) *attributes {
	a := &attributes{mode: st.Mode & 0o7777, uid: st.Uid, gid: st.Gid}
	raw, err := f.SyscallConn()
	if err != nil {
		return a
	}
	_ = raw.Control(func(fd uintptr) { a.xattrs = xattrsOf(int(fd)) })
	return a
}

func xattrsOf(fd int) map[string][]byte {
	n, err := unix.Flistxattr(fd, nil)
	if err != nil || n == 0 {
		return nil
	}
	names := make([]byte, n+1024)
	if n, err = unix.Flistxattr(fd, names); err != nil {
		return nil
	}
	out := map[string][]byte{}
	for name := range strings.SplitSeq(strings.TrimRight(string(names[:n]), "\x00"), "\x00") {
		// The kernel drops file capabilities when a file's content changes; so do we.
		if name == "security.capability" {
			continue
		}
		size, err := unix.Fgetxattr(fd, name, nil)
		if err != nil {
			continue
		}
		value := make([]byte, size)
		if size > 0 {
			if size, err = unix.Fgetxattr(fd, name, value); err != nil {
				continue
			}
		}
		out[name] = value[:size]
	}
	return out
}

// give hands them to a new file, as far as the caller may. Without the right to give
// the file to its old owner, set-user-ID and set-group-ID are dropped, or they would
// give somebody else's program our rights.
func (a *attributes) give(f *os.File) error {
	a.warnings = nil
	var st unix.Stat_t
	if err := fstat(f, &st); err != nil {
		return err
	}
	mode := a.mode
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(p uintptr) {
		fd := int(p)
		if st.Uid != a.uid || st.Gid != a.gid {
			if err := unix.Fchown(fd, int(a.uid), int(a.gid)); err != nil {
				mode &^= 0o6000
				a.warnings = append(a.warnings, "the file's owner could not be kept: it belongs to you now")
				_ = unix.Fchown(fd, -1, int(a.gid)) // the group often can
			}
		}
		if inner = unix.Fchmod(fd, mode); inner != nil {
			return
		}
		for name, value := range a.xattrs {
			err := unix.Fsetxattr(fd, name, value, 0)
			switch {
			case err == nil || errors.Is(err, unix.EOPNOTSUPP):
			case strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "system.posix_acl"):
				a.warnings = append(a.warnings, "the extended attribute "+name+" could not be kept: "+err.Error())
			}
			// Labels in security.* and trusted.* are the system's to set.
		}
	})
	return errors.Join(err, inner)
}

// userMode gives a new file or directory the mode that the user's umask leaves. Where
// the directory has a default ACL, that decides instead of any umask (acl(5)).
func (s *Service) userMode(path string, mode uint32, chmod func(mode uint32) error) error {
	if s.umask < 0 {
		return nil
	}
	if n, err := unix.Getxattr(filepath.Dir(path), "system.posix_acl_default", nil); err == nil && n > 0 {
		return nil
	}
	return chmod(mode &^ uint32(s.umask))
}
