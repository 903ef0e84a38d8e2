package git

import (
	"bytes"
	"context"
	"encoding/json"
	"path/filepath"
	"strconv"
	"strings"

	"mypr/internal/ospath"
	"mypr/internal/paging"
	"mypr/internal/rpc"
)

// ShowQuery is what git.show reads: a commit, or with Path a file or directory in it.
type ShowQuery struct {
	Ref  string       `json:"ref,omitempty"`
	Path *ospath.Text `json:"path,omitempty"`
}

// ShowParams of git.show.
type ShowParams struct {
	ShowQuery
	Cursor   *string `json:"cursor"`
	MaxBytes int     `json:"max_bytes"`
}

// ShowCommit is one page of git.show without a path.
type ShowCommit struct {
	Kind   string `json:"kind"` // commit
	Commit Commit `json:"commit"`
	DiffResult
}

// Commit is the head of a commit.
type Commit struct {
	ID        string   `json:"id"`
	Tree      string   `json:"tree"`
	Parents   []string `json:"parents"`
	Author    Person   `json:"author"`
	Committer Person   `json:"committer"`
	Message   string   `json:"message"` // on the first page; "" on later ones
	// MessageTruncated: the message is longer than its share of max_bytes, a quarter.
	MessageTruncated bool `json:"message_truncated,omitempty"`
}

// Person is an author or committer.
type Person struct {
	Name  string `json:"name"`
	Email string `json:"email"`
	Time  string `json:"time"` // ISO 8601, with the zone of the person
}

// ShowFile is one page of git.show with a path.
type ShowFile struct {
	Kind string      `json:"kind"` // file, symlink, directory, submodule
	Root ospath.Text `json:"root"`
	Ref  string      `json:"ref"`
	Path ospath.Text `json:"path"` // relative to Root
	Mode string      `json:"mode"`
	ID   string      `json:"id"` // of a submodule, its commit
	Size *int64      `json:"size,omitempty"`
	// Binary files have no text.
	Binary    bool   `json:"binary,omitempty"`
	Text      string `json:"text"`
	TextLossy bool   `json:"text_lossy,omitempty"` // bytes that are not UTF-8 became U+FFFD
	// Entries of a directory.
	Entries []TreeEntry `json:"entries,omitzero"`
	Pages
}

// TreeEntry is one entry of a directory in a commit.
type TreeEntry struct {
	Path ospath.Text `json:"path"` // relative to the root of the repository
	Kind string      `json:"kind"`
	Mode string      `json:"mode"`
	ID   string      `json:"id"`
	Size *int64      `json:"size,omitempty"`
}

type showMeta struct {
	File *ShowFile `json:"file,omitempty"`
	diffMeta
}

// Show reads a commit, or a file as it is in one.
func (s *Service) Show(ctx context.Context, p ShowParams) (any, error) {
	if err := paging.CheckBytes(p.MaxBytes); err != nil {
		return nil, err
	}
	var snap *paging.Snapshot
	var pos int64
	var err error
	switch {
	case p.Cursor != nil:
		q := p.ShowQuery
		if q.Ref == "HEAD" {
			q.Ref = "" // the default says nothing about the query of the cursor
		}
		snap, pos, err = s.store.Open("git.show", *p.Cursor, q)
	case p.Path != nil:
		snap, err = s.scanFile(ctx, p.ShowQuery)
	default:
		snap, err = s.scanCommit(ctx, p.ShowQuery)
	}
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	var m showMeta
	if err := snap.Meta(&m); err != nil {
		return nil, err
	}
	if m.File != nil {
		return m.File.page(snap, pos, p.MaxBytes)
	}
	r := &ShowCommit{Kind: "commit", Commit: *m.Commit, DiffResult: DiffResult{Root: m.Root, Total: m.Total, Files: []FileDiff{},
		Pages: Pages{Complete: m.Complete, Warnings: trimWarnings(m.Warnings, p.MaxBytes/8)}}}
	if pos > 0 {
		r.Commit.Message = ""
	} else if n := paging.Fit([]byte(r.Commit.Message), p.MaxBytes/4); n < len(r.Commit.Message) {
		r.Commit.Message, r.Commit.MessageTruncated = r.Commit.Message[:n], true
	}
	return r, r.fill(snap, pos, p.MaxBytes, r)
}

// commitFields end with NUL each; the message, the last, cannot have one.
const (
	commitFormat = "--format=tformat:%H%x00%T%x00%P%x00%an%x00%ae%x00%aI%x00%cn%x00%ce%x00%cI%x00%B%x00"
	commitFields = 10
)

func (s *Service) scanCommit(ctx context.Context, q ShowQuery) (*paging.Snapshot, error) {
	if err := checkRev("ref", q.Ref); err != nil {
		return nil, err
	}
	args := append([]string{"show", "--no-notes", "--no-show-signature", "--encoding=UTF-8", commitFormat}, diffOptions()...)
	out, root, err := s.both(ctx, append(args, q.Ref+"^{commit}", "--")...)
	if err != nil {
		return nil, err
	}
	f := bytes.SplitN(out.data, []byte{0}, commitFields+1)
	if len(f) != commitFields+1 {
		return nil, unexpected("show", string(out.data))
	}
	field := func(i int) string { return strings.ToValidUTF8(string(f[i]), "\uFFFD") }
	c := &Commit{ID: field(0), Tree: field(1), Parents: strings.Fields(field(2)), Author: Person{field(3), field(4), field(5)},
		Committer: Person{field(6), field(7), field(8)}, Message: field(9)}
	d, err := parseDiff(f[commitFields], out.cut)
	if err != nil {
		return nil, err
	}
	return s.saveDiff("git.show", q, diffMeta{Root: ospath.Text(root), Complete: !out.cut, Warnings: out.warnings, Commit: c}, d)
}

func (s *Service) scanFile(ctx context.Context, q ShowQuery) (*paging.Snapshot, error) {
	if err := checkRev("ref", q.Ref); err != nil {
		return nil, err
	}
	abs, err := s.root.Abs(string(*q.Path))
	if err != nil {
		return nil, err
	}
	path, err := filepath.Rel(string(s.root), filepath.Clean(abs))
	if err != nil {
		return nil, invalid("%s is not in the repository", *q.Path)
	}
	out, root, err := s.both(ctx, "ls-tree", "-z", "--long", "--full-name", q.Ref, "--", path)
	if err != nil {
		return nil, err
	}
	entries, err := parseTree(out.data)
	if err != nil {
		return nil, err
	}
	name := ospath.Text(path)
	if rel, err := filepath.Rel(root, filepath.Join(string(s.root), path)); err == nil {
		name = ospath.Text(rel)
	}
	f := &ShowFile{Root: ospath.Text(root), Ref: q.Ref, Path: name, Pages: Pages{Complete: true}}
	var rows, text []byte
	switch {
	case len(entries) == 0:
		return nil, rpc.Errorf(rpc.CodeNotFound, "there is no %s in %s", name, q.Ref).
			WithHint("await ws.git.show(ref, path=\".\") lists what is there")
	case len(entries) == 1 && entries[0].Path == name && entries[0].Kind != kindDirectory:
		e := entries[0]
		f.Kind, f.Mode, f.ID, f.Size = e.Kind, e.Mode, e.ID, e.Size
		if e.Kind == kindSubmodule {
			break
		}
		if *e.Size > maxOutput {
			return nil, rpc.Errorf(rpc.CodeTooLarge, "%s has %d bytes in %s, the limit is %d", name, *e.Size, q.Ref, maxOutput).
				WithHint("write it to a file: git cat-file blob %s > FILE", e.ID)
		}
		if out, err = s.git(ctx, "cat-file", "blob", e.ID); err != nil {
			return nil, err
		}
		if f.Binary = bytes.IndexByte(out.data[:min(len(out.data), 8000)], 0) >= 0; !f.Binary { // git's own rule
			text = out.data
		}
	default:
		f.Kind, f.Mode = kindDirectory, "040000"
		if len(entries) == 1 && entries[0].Path == name { // the directory itself: look inside
			f.ID = entries[0].ID
			if out, err = s.git(ctx, "ls-tree", "-z", "--long", "--full-name", f.ID+"^{tree}"); err != nil {
				return nil, err
			}
			if entries, err = parseTree(out.data); err != nil {
				return nil, err
			}
			for i := range entries {
				entries[i].Path = name + "/" + entries[i].Path
			}
		}
		f.Entries = []TreeEntry{}
		for _, e := range entries {
			rows = jsonLine(rows, e)
		}
	}
	snap, err := s.store.Save("git.show", q, showMeta{File: f}, rows, text)
	if err != nil {
		return nil, s.root.Error("save the file in", string(s.root)+"/.mypr/git", err)
	}
	return snap, nil
}

// page cuts a page of a file or directory.
func (f *ShowFile) page(snap *paging.Snapshot, pos int64, maxBytes int) (*ShowFile, error) {
	f.TextLossy = true // measured as if
	fill, err := newFiller(f, &f.Pages, maxBytes, maxEntries)
	f.TextLossy = false
	if err != nil {
		return nil, err
	}
	if fill.room < 16 {
		return nil, paging.TooSmall(maxBytes, maxBytes-fill.room+minPatchRoom)
	}
	next, err := snap.Rows(pos, func(row []byte) (bool, error) {
		ok, err := fill.fits(row)
		if err != nil || !ok {
			return false, err
		}
		var e TreeEntry
		if err := json.Unmarshal(row, &e); err != nil {
			return false, err
		}
		f.Entries = append(f.Entries, e)
		return true, nil
	})
	if err != nil {
		return nil, err
	}
	if f.Kind != kindDirectory {
		if f.Text, f.TextLossy, next, err = snap.Text(next, fill.room); err != nil {
			return nil, err
		}
	}
	f.end(snap, next)
	return f, nil
}

// Kinds of tree entries.
const (
	kindFile      = "file"
	kindSymlink   = "symlink"
	kindDirectory = "directory"
	kindSubmodule = "submodule"
)

// parseTree reads "<mode> <type> <id> <size>\t<path>" records.
func parseTree(data []byte) (entries []TreeEntry, err error) {
	for record := range strings.SplitSeq(strings.TrimSuffix(string(data), "\x00"), "\x00") {
		if record == "" {
			continue
		}
		head, path, ok := strings.Cut(record, "\t")
		w := strings.Fields(head)
		if !ok || len(w) != 4 {
			return nil, unexpected("ls-tree", record)
		}
		e := TreeEntry{Path: ospath.Text(path), Mode: w[0], ID: w[2], Kind: kindFile}
		switch {
		case w[1] == "tree":
			e.Kind = kindDirectory
		case w[1] == "commit":
			e.Kind = kindSubmodule
		case w[0] == "120000":
			e.Kind = kindSymlink
		}
		if n, err := strconv.ParseInt(w[3], 10, 64); err == nil {
			e.Size = &n
		} else if w[1] == "blob" { // "BAD"
			return nil, rpc.Errorf(CodeDamaged, "git cannot read the object %s, which is %s", e.ID, e.Path).
				WithHint("await ws.shell.run([\"git\", \"fsck\"]) says what is damaged")
		}
		entries = append(entries, e)
	}
	return entries, nil
}
