package files

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"mypr/internal/ospath"
)

// Entry is the metadata of one file.
type Entry struct {
	Path   ospath.Text  `json:"path"`
	Kind   string       `json:"kind"` // file, directory, symlink, other
	Size   int64        `json:"size"`
	Mtime  int64        `json:"mtime_ns"` // Unix nanoseconds
	Mode   string       `json:"mode"`     // permission bits, octal: "0644"
	Target *ospath.Text `json:"target,omitempty"`
	// Special says what an "other" is: "FIFO", "socket", "character device", …
	Special string `json:"special,omitempty"`
	// Links is the number of hard links of a file that has more than one.
	Links uint64 `json:"links,omitempty"`
	// Entries of a directory, in the order of name bytes; absent when it was not listed.
	Entries []*Entry `json:"entries,omitzero"`
	// Total is the number of entries of the directory that max_entries cut.
	Total int `json:"total,omitempty"`
	// Error says why a directory could not be listed.
	Error string `json:"error,omitempty"`
}

func entryOf(path ospath.Text, st *unix.Stat_t) *Entry {
	e := &Entry{Path: path, Size: st.Size, Mtime: st.Mtim.Nano(), Mode: fmt.Sprintf("%04o", st.Mode&0o7777)}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		e.Kind = "file"
		if st.Nlink > 1 {
			e.Links = uint64(st.Nlink)
		}
	case unix.S_IFDIR:
		e.Kind = "directory"
	case unix.S_IFLNK:
		e.Kind = "symlink"
	default:
		e.Kind, e.Special = "other", special(st.Mode)
	}
	return e
}

// StatParams of fs.stat.
type StatParams struct {
	Path           ospath.Text `json:"path"`
	FollowSymlinks bool        `json:"follow_symlinks"`
}

// Stat describes a file without opening it. Target is where a symbolic link points;
// with follow_symlinks it is where the links led to.
func (s *Service) Stat(_ context.Context, p StatParams) (*Entry, error) {
	abs, err := s.root.Abs(string(p.Path))
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Lstat(abs, &st); err != nil {
		return nil, s.root.Error("stat", abs, err)
	}
	link := st.Mode&unix.S_IFMT == unix.S_IFLNK
	if !link || !p.FollowSymlinks {
		return s.entry(abs, &st), nil
	}
	if err := unix.Stat(abs, &st); err != nil {
		return nil, s.root.Error("follow", abs, err)
	}
	e := entryOf(s.root.Display(abs), &st)
	if real, err := filepath.EvalSymlinks(abs); err == nil {
		t := s.root.Display(real)
		e.Target = &t
	}
	return e, nil
}

// entry adds the target of a symbolic link.
func (s *Service) entry(abs string, st *unix.Stat_t) *Entry {
	e := entryOf(s.root.Display(abs), st)
	if e.Kind == "symlink" {
		if link, err := os.Readlink(abs); err == nil {
			t := ospath.Text(link)
			e.Target = &t
		}
	}
	return e
}

// TreeParams of fs.tree.
type TreeParams struct {
	Path       ospath.Text `json:"path"`
	Depth      int         `json:"depth"`
	MaxEntries int         `json:"max_entries"`
	Hidden     bool        `json:"hidden"`
}

// TreeResult is the directory with its entries nested.
type TreeResult struct {
	*Entry
	Count     int  `json:"count"` // entries listed, at all levels
	Truncated bool `json:"truncated"`
}

const (
	maxTreeDepth   = 64
	maxTreeEntries = 10_000 // some 25 MB at worst, with names and targets of the longest kind
)

// Tree lists a directory level by level, so that max_entries cuts the deepest levels
// first, and every level in the order of names. Symbolic links are listed, not followed.
func (s *Service) Tree(ctx context.Context, p TreeParams) (*TreeResult, error) {
	switch {
	case p.Depth < 1 || p.Depth > maxTreeDepth:
		return nil, invalid("depth must be from 1 to %d, not %d", maxTreeDepth, p.Depth)
	case p.MaxEntries < 1 || p.MaxEntries > maxTreeEntries:
		return nil, invalid("max_entries must be from 1 to %d, not %d", maxTreeEntries, p.MaxEntries)
	}
	abs, err := s.root.Abs(string(p.Path))
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Stat(abs, &st); err != nil {
		return nil, s.root.Error("list", abs, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, invalid("cannot list %s: it is a %s", s.root.Display(abs), special(st.Mode)).
			WithHint("describe it with ws.fs.stat, read it with ws.fs.read")
	}
	r := &TreeResult{Entry: entryOf(s.root.Display(abs), &st)}
	type dir struct {
		*Entry
		abs string
	}
	level := []dir{{r.Entry, abs}}
	for depth := 0; depth < p.Depth && len(level) > 0; depth++ {
		var next []dir
		for _, d := range level {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			names, err := readNames(d.abs, p.Hidden)
			if err != nil {
				if depth == 0 {
					return nil, s.root.Error("list", abs, err)
				}
				d.Error = s.root.Error("list", d.abs, err).Error()
				continue
			}
			d.Entries = []*Entry{}
			for _, name := range names {
				if r.Count == p.MaxEntries {
					r.Truncated, d.Total = true, len(names)
					return r, nil
				}
				at := filepath.Join(d.abs, name)
				var st unix.Stat_t
				if unix.Lstat(at, &st) != nil {
					continue // gone since the listing
				}
				e := s.entry(at, &st)
				d.Entries = append(d.Entries, e)
				r.Count++
				if e.Kind == "directory" {
					next = append(next, dir{e, at})
				}
			}
		}
		level = next
	}
	return r, nil
}

// readNames lists a directory in the order of name bytes.
func readNames(dir string, hidden bool) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if !hidden {
		names = slices.DeleteFunc(names, func(n string) bool { return strings.HasPrefix(n, ".") })
	}
	slices.SortFunc(names, cmp.Compare[string])
	return names, err
}
