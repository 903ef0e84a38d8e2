package kernel

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Globs, not the directory: a directory pattern leaves out names that begin with an
// underscore, "all:" takes __pycache__ along.
//
//go:embed python/mypr_kernel/*.py
var embedded embed.FS

// launchScript starts the kernel. A script starts up to 3 ms faster than "-m" (which
// imports runpy), needs no PYTHONPATH, which every child of a cell would inherit, and
// leaves the workspace off sys.path until the kernel has its own imports behind it: a
// select.py of the user must not break it. The guard is for multiprocessing's spawn,
// which imports the main script again in each child.
const launchScript = `import sys

if __name__ == "__main__":
    from mypr_kernel.__main__ import main

    sys.exit(main())
`

// launchArgs: "-u" spares the kernel a flush of libc's stdout after each cell.
func launchArgs(sources string) []string {
	return []string{"-u", filepath.Join(sources, "launch.py")}
}

type sourceFile struct {
	path string // below the directory, with slashes
	data []byte
}

// sourceFiles is what is extracted, sorted by path, with the hash of it all.
var sourceFiles = sync.OnceValues(func() ([]sourceFile, string) {
	var files []sourceFile
	sub, err := fs.Sub(embedded, "python")
	if err == nil {
		err = fs.WalkDir(sub, ".", func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			data, err := fs.ReadFile(sub, path)
			files = append(files, sourceFile{path, data})
			return err
		})
	}
	if err != nil {
		panic("embedded kernel sources: " + err.Error()) // cannot happen: they are in the program
	}
	files = append(files, sourceFile{"launch.py", []byte(launchScript)})
	h := sha256.New()
	for _, f := range files {
		fmt.Fprintf(h, "%s %d\n", f.path, len(f.data))
		h.Write(f.data)
	}
	return files, hex.EncodeToString(h.Sum(nil))[:16]
})

// SourcesHash names the kernel sources of this program: 16 hex digits.
func SourcesHash() string {
	_, hash := sourceFiles()
	return hash
}

// sources returns the directory with the extracted and compiled sources, making it
// in the user's cache, or in .mypr when no cache can be written.
func (p *preparation) sources(ctx context.Context, m *marker) (string, error) {
	var errs []error
	for _, base := range []string{p.cacheDir(), filepath.Join(p.Root, "kernel")} {
		if base == "" {
			continue
		}
		dir := filepath.Join(base, "kernel-"+SourcesHash())
		err := extract(dir)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		removeOld(base, dir)
		if compiled := dir + " " + m.Version; m.Compiled != compiled {
			p.compile(ctx, dir)
			m.Compiled = compiled
			if err := p.writeMarker(m); err != nil {
				return "", err
			}
		}
		return dir, nil
	}
	return "", fmt.Errorf("cannot extract the kernel's Python sources: %w", errors.Join(errs...))
}

// unusedAfter is how old the last start from a directory of sources is when another
// version removes it. It only spares the locks: each kernel holds one on its directory.
const unusedAfter = 7 * 24 * time.Hour

// removeOld removes from base the sources of other versions that no kernel runs from, and
// what a killed program has left of its extraction. A failure leaves them to the next start.
func removeOld(base, keep string) {
	now := time.Now()
	_ = os.Chtimes(keep, now, now)
	entries, err := os.ReadDir(base)
	if err != nil {
		return
	}
	for _, e := range entries {
		dir := filepath.Join(base, e.Name())
		if dir == keep || !strings.HasPrefix(strings.TrimPrefix(e.Name(), "."), "kernel-") || !e.IsDir() {
			continue
		}
		if st, err := e.Info(); err != nil || now.Sub(st.ModTime()) < unusedAfter {
			continue
		}
		f, err := os.Open(dir)
		if err != nil {
			continue
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			// Whoever is about to start from it after all finds it whole or not at all.
			gone := filepath.Join(base, ".kernel-gone-"+e.Name())
			if os.Rename(dir, gone) == nil {
				_ = os.RemoveAll(gone)
			}
		}
		f.Close()
	}
}

// compile writes byte code beside the sources. Unchecked: the directory's name is the
// hash of the sources, so nothing in it can be out of date. A failure only makes each
// start slower.
func (p *preparation) compile(ctx context.Context, dir string) {
	_, _ = p.run(ctx, "compile", dir, p.python(), "-I", "-m", "compileall", "-q",
		"--invalidation-mode", "unchecked-hash", dir)
}

// extract makes dir complete, whoever else is doing the same: a new directory is
// filled beside it and renamed.
func extract(dir string) error {
	base := filepath.Dir(dir)
	if err := os.MkdirAll(base, 0o700); err != nil {
		return err
	}
	// What is run from here must not be another user's to write.
	st, err := os.Stat(base)
	if err != nil {
		return err
	}
	if uid := st.Sys().(*syscall.Stat_t).Uid; int(uid) != os.Geteuid() || st.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s: owned by user id %d with mode %o: it must be yours and writable by nobody else", base, uid, st.Mode().Perm())
	}
	if complete(dir) {
		return nil
	}
	tmp, err := os.MkdirTemp(base, ".kernel-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	files, _ := sourceFiles()
	for _, f := range files {
		path := filepath.Join(tmp, f.path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, f.data, 0o644); err != nil {
			return err
		}
	}
	err = os.Rename(tmp, dir)
	if err != nil && !complete(dir) { // not another program's, finished first: a damaged one
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		return os.Rename(tmp, dir)
	}
	return nil
}

// complete reports whether every file is there with its size: cleaners of caches
// remove single files.
func complete(dir string) bool {
	files, _ := sourceFiles()
	for _, f := range files {
		st, err := os.Lstat(filepath.Join(dir, f.path))
		if err != nil || st.Size() != int64(len(f.data)) {
			return false
		}
	}
	return true
}

// cacheDir is the program's directory in the user's cache, "" when there is none.
func (p *preparation) cacheDir() string {
	if p.CacheDir != "" {
		return p.CacheDir
	}
	if xdg := lookup(p.Env, "XDG_CACHE_HOME"); filepath.IsAbs(xdg) {
		return filepath.Join(xdg, "mypr")
	}
	if home := lookup(p.Env, "HOME"); filepath.IsAbs(home) {
		return filepath.Join(home, ".cache", "mypr")
	}
	return ""
}
