// Package ospath carries file names through JSON without loss and places them in a
// workspace.
//
// It owns the spelling of names on the wire and the rule that relative names mean
// the workspace. It does not open, create or resolve anything.
//
// A Linux file name is any bytes but NUL and "/". Where they are UTF-8 they travel as
// they are; every other byte 0x80…0xff travels as the code point U+DC80…U+DCFF, which
// is what Python's os.fsdecode makes of it (PEP 383), so a name read by Python and
// sent back by Python names the same file. encoding/json alone would turn both into
// U+FFFD.
package ospath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unicode/utf8"

	"mypr/internal/rpc"
)

// Root is the absolute path of a workspace, with its symbolic links resolved.
type Root string

// Abs makes a name absolute: a relative one is relative to the workspace, wherever
// the process is. It is not cleaned, because "link/.." is the kernel's to resolve.
func (r Root) Abs(name string) (string, error) {
	switch {
	case name == "":
		return "", rpc.Errorf(rpc.CodeInvalidRequest, "the path is empty").WithHint("name a file, or \".\" for the workspace")
	case strings.IndexByte(name, 0) >= 0:
		return "", rpc.Errorf(rpc.CodeInvalidRequest, "the path %q has a NUL byte: no file can have that name", name)
	case filepath.IsAbs(name):
		return name, nil
	}
	return string(r) + "/" + name, nil
}

// Display is how results spell an absolute path: relative to the workspace when it
// is inside, else as it is.
func (r Root) Display(abs string) Text {
	clean := filepath.Clean(abs)
	if clean == string(r) {
		return "."
	}
	prefix := strings.TrimSuffix(string(r), "/") + "/"
	if rest, ok := strings.CutPrefix(clean, prefix); ok {
		return Text(rest)
	}
	return Text(clean)
}

// Error turns an error of the file system about path into one that can travel.
// The operation is a verb phrase: "read", "create".
func (r Root) Error(operation, abs string, err error) error {
	var e *rpc.Error
	name := r.Display(abs)
	code, hint := rpc.CodeInternal, ""
	var errno syscall.Errno
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return e
	case os.IsNotExist(err):
		code = rpc.CodeNotFound
		hint = fmt.Sprintf("list what is there: await ws.fs.tree(%q)", string(r.Display(filepath.Dir(filepath.Clean(abs)))))
	case os.IsPermission(err):
		code = rpc.CodePermission
		hint = "the runtime has the permissions of the user who started it; look at the mode with ws.fs.stat"
	case os.IsExist(err):
		code = rpc.CodeConflict
	case errors.Is(err, syscall.ELOOP):
		code, hint = rpc.CodeInvalidRequest, "its symbolic links go round in a circle; look at them with ws.fs.stat"
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL):
		code = rpc.CodeInvalidRequest
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		code, hint = CodeNoSpace, "free some space, then try again; the file is as it was"
	case errors.Is(err, syscall.EROFS):
		code = rpc.CodePermission
	case errors.As(err, &errno):
		code = CodeIO
	}
	out := rpc.Errorf(code, "cannot %s %s: %v", operation, quote(name), cause(err))
	out.Hint = hint
	return out
}

const (
	// CodeNoSpace: the file system or the user's quota is full.
	CodeNoSpace = "no_space"
	// CodeIO: the file system refused for another reason, as a disk does that fails.
	CodeIO = "io_error"
)

func quote(t Text) string {
	if utf8.ValidString(string(t)) && !strings.ContainsAny(string(t), "\n\t\"") {
		return string(t)
	}
	return fmt.Sprintf("%q", string(t))
}

// cause strips the paths that os puts around an errno: the message names the path itself.
func cause(err error) error {
	var pe *fs.PathError
	var le *os.LinkError
	var se *os.SyscallError
	switch {
	case errors.As(err, &pe):
		return pe.Err
	case errors.As(err, &le):
		return le.Err
	case errors.As(err, &se):
		return se.Err
	}
	return err
}
