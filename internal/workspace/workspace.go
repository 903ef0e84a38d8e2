// Package workspace says which runtime belongs to a directory and brings the two
// together: identity of the directory, paths of its sockets, the files in .mypr that
// processes find each other by, locks, discovery and start.
//
// It owns the runtime directory's safety checks, .mypr's skeleton, runtime.json, the
// lock files and the pipe on which a starting supervisor reports. It does not own the
// supervisor or the manager, and it makes no socket.
//
// Identity is the directory's device and inode, so symlinks and bind mounts of one
// directory meet in one runtime, whatever the path. Because the kernel may give a
// deleted directory's inode to a new one, a runtime is only attached to when it also
// has the instance that runtime.json records, or when somebody holds this very
// directory's locks.
package workspace

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/rpc"
)

// Workspace is a directory with an identity. Open makes it; it is not changed after.
type Workspace struct {
	Dir  string // absolute, symlinks resolved
	Root string // Dir/.mypr
	ID   string // "<st_dev hex>:<st_ino hex>"
	Hash string // first 32 hex digits of SHA-256("workspace:" + ID)
	Paths
}

// Paths are the sockets of one runtime, all in RuntimeDir.
type Paths struct {
	RuntimeDir string `json:"runtime_dir"`
	Socket     string `json:"socket"`  // the manager's, docs/PROTOCOL.md "Runtime socket"
	Control    string `json:"control"` // the supervisor's
	Kernel     string `json:"kernel"`  // Python dials in here
	Notify     string `json:"notify"`  // sd_notify of the units
}

func pathsIn(dir, hash string) Paths {
	stem := filepath.Join(dir, hash)
	return Paths{RuntimeDir: dir, Socket: stem + ".sock", Control: stem + ".ctl", Kernel: stem + ".krn", Notify: stem + ".ntf"}
}

// PathsOf are the sockets of the runtime whose manager's socket is given.
func PathsOf(socket string) Paths {
	name := filepath.Base(socket)
	return pathsIn(filepath.Dir(socket), strings.TrimSuffix(name, filepath.Ext(name)))
}

// Stem is what the sockets' paths have in common: each is the stem and a suffix.
func (p Paths) Stem() string { return strings.TrimSuffix(p.Socket, filepath.Ext(p.Socket)) }

// Labels that the program which embeds the supervisor gives it (control.Info.Labels),
// so that whoever connects can tell whose supervisor it is.
const (
	LabelWorkspace   = "workspace"
	LabelWorkspaceID = "workspace_id"
	// LabelPinned is the workspace id again, from a supervisor that keeps the directory
	// open: as long as it lives no other directory can have that id (Pin).
	LabelPinned = "pinned"
)

// FindDir chooses the workspace directory: the explicit argument, else the current
// directory. Some MCP clients start their servers in "/" or in a directory that was
// deleted since; then CLAUDE_PROJECT_DIR, which Claude Code sets to the project,
// stands in for it.
func FindDir(explicit string) (string, error) {
	if explicit != "" {
		return explicit, nil
	}
	dir, err := os.Getwd()
	if err == nil && dir != "/" {
		return dir, nil
	}
	if project := os.Getenv("CLAUDE_PROJECT_DIR"); filepath.IsAbs(project) {
		return project, nil
	}
	if err != nil {
		return "", rpc.Errorf(rpc.CodeNotFound, "cannot tell the current directory: %v; it was probably deleted", cause(err)).
			WithHint("cd to the workspace, or name it: mypr-mcp -C DIR …")
	}
	return dir, nil
}

// Open identifies the workspace at dir; the empty string means FindDir's choice.
// Nothing is created.
func Open(dir string) (*Workspace, error) {
	dir, err := FindDir(dir)
	if err != nil {
		return nil, err
	}
	fail := func(code, format string, args ...any) error {
		return rpc.Errorf(code, "cannot use %s as a workspace: %s", dir, fmt.Sprintf(format, args...)).
			WithHint("name an existing directory of yours: mypr-mcp -C DIR …")
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fail(rpc.CodeNotFound, "%v", cause(err))
	}
	real, err := filepath.EvalSymlinks(abs)
	if err != nil {
		return nil, fail(codeOf(err), "%v", cause(err))
	}
	if real == "/" {
		return nil, fail(rpc.CodeInvalidRequest, "it is the root of the file system, where a runtime would see everything as its own")
	}
	if !utf8.ValidString(real) {
		return nil, fail(rpc.CodeInvalidRequest, "its path %q is not UTF-8 text, and what is started there is told of it as such: rename it", real)
	}
	f, err := os.OpenFile(real, unix.O_DIRECTORY|os.O_RDONLY, 0)
	if err != nil {
		return nil, fail(codeOf(err), "%v", cause(err))
	}
	defer f.Close()
	if err := unix.Faccessat(unix.AT_FDCWD, real, unix.X_OK, unix.AT_EACCESS); err != nil {
		return nil, fail(rpc.CodePermission, "%v", err)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, fail(rpc.CodeInternal, "%v", cause(err))
	}
	w := &Workspace{Dir: real, Root: filepath.Join(real, ".mypr"), ID: idOf(info)}
	sum := sha256.Sum256([]byte("workspace:" + w.ID))
	w.Hash = hex.EncodeToString(sum[:16])
	dirs := runtimeDirs(os.Getenv("XDG_RUNTIME_DIR"))
	w.Paths = pathsIn(dirs[0], w.Hash)
	return w, nil
}

// Pin opens the directory, so that neither its inode number nor its file system's device
// number can be given to another one while the returned file is open. It fails when the
// path leads elsewhere by now.
func (w *Workspace) Pin() (*os.File, error) {
	f, err := os.OpenFile(w.Dir, unix.O_DIRECTORY|unix.O_PATH, 0)
	if err != nil {
		return nil, rpc.Errorf(codeOf(err), "cannot open the workspace %s: %v", w.Dir, cause(err))
	}
	if info, err := f.Stat(); err != nil || idOf(info) != w.ID {
		f.Close()
		return nil, w.Check()
	}
	return f, nil
}

func idOf(info fs.FileInfo) string {
	st := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%x:%x", st.Dev, st.Ino)
}

// Check reports whether the directory is still the one that was opened: it fails
// with code workspace_moved when the path is gone or leads to another directory.
func (w *Workspace) Check() error {
	info, err := os.Stat(w.Dir)
	var what string
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		what = "it is not there any more"
	case err != nil:
		return rpc.Errorf(codeOf(err), "cannot look at the workspace %s: %v", w.Dir, cause(err))
	case !info.IsDir() || idOf(info) != w.ID:
		what = "another file or directory is in its place"
	default:
		return nil
	}
	return rpc.Errorf(api.CodeWorkspaceMoved, "workspace moved: this runtime was started in %s, and %s", w.Dir, what).
		WithHint("stop this runtime (mypr-mcp stop) and start one in the directory's new place")
}

// Lock file paths.
func (w *Workspace) startupLock() string    { return filepath.Join(w.Root, "startup.lock") }
func (w *Workspace) managerLock() string    { return filepath.Join(w.Root, "manager.lock") }
func (w *Workspace) supervisorLock() string { return filepath.Join(w.Root, "supervisor.lock") }

// SupervisorLog is where a detached supervisor's output goes.
func (w *Workspace) SupervisorLog() string { return filepath.Join(w.Root, "supervisor.log") }

// ignored is what .mypr/.gitignore must hold: everything that is made again or is
// private. Configuration, requirements.txt, units, lib and skills stay visible to git.
var ignored = []string{
	"venv/", ".venv-invalid-*/", "kernel/", "runs/", "artifacts/", "jobs/", "ipython/", "*.json", "history.sqlite3*",
	"*.log", "*.lock", "browser/", "scans/", "searches/", "revisions/", "document-results/", "git/", "git-history/",
	"rewrites/", "html-results/", "task-results/", "change-plans/", "restarts/", "writes/",
}

// EnsureLayout makes .mypr, the directories that everything expects in it, and the
// lines of its .gitignore that are missing. What exists is left as it is.
func (w *Workspace) EnsureLayout() error {
	fail := func(path string, err error) error {
		hint := "make it writable for you, or use another directory: mypr-mcp -C DIR …"
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
			hint = "free some space and try again"
		}
		return rpc.Errorf(codeOf(err), "cannot write to %s: %v", path, cause(err)).WithHint("%s", hint)
	}
	for _, dir := range []string{w.Root, filepath.Join(w.Root, "runs"), filepath.Join(w.Root, "artifacts"), filepath.Join(w.Root, "jobs")} {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fail(dir, err)
		}
		if info, err := os.Stat(dir); err != nil {
			return fail(dir, err)
		} else if !info.IsDir() {
			return fail(dir, syscall.ENOTDIR)
		}
		if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
			return fail(dir, err)
		}
	}
	path := filepath.Join(w.Root, ".gitignore")
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fail(path, err)
	}
	have := strings.Split(string(old), "\n")
	for i := range have {
		have[i] = strings.TrimSpace(have[i])
	}
	var add strings.Builder
	for _, line := range ignored {
		if !slices.Contains(have, line) {
			add.WriteString(line + "\n")
		}
	}
	if add.Len() == 0 {
		return nil
	}
	text := add.String()
	if len(old) > 0 && old[len(old)-1] != '\n' {
		text = "\n" + text
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return fail(path, err)
	}
	_, err = f.WriteString(text)
	if err := errors.Join(err, f.Close()); err != nil {
		return fail(path, err)
	}
	return nil
}

// cause strips the operation and path that package os adds, where our sentence names them.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	var s *os.SyscallError
	if errors.As(err, &s) {
		return s.Err
	}
	return err
}

func codeOf(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return rpc.CodeNotFound
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return rpc.CodePermission
	}
	return rpc.CodeInternal
}
