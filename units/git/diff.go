package git

import (
	"bytes"
	"context"
	"encoding/json"
	"strconv"
	"strings"

	"mypr/internal/ospath"
	"mypr/internal/paging"
)

// DiffQuery is what git.diff compares: the work tree with the index; with Staged, the
// index with HEAD or Rev; with Rev alone, the work tree with it, or its two ends.
type DiffQuery struct {
	Staged bool        `json:"staged,omitempty"`
	Rev    *string     `json:"rev,omitempty"`
	Paths  ospath.List `json:"paths,omitempty"`
}

// DiffParams of git.diff.
type DiffParams struct {
	DiffQuery
	Cursor   *string `json:"cursor"`
	MaxBytes int     `json:"max_bytes"`
}

// DiffResult is one page of git.diff. The files come first; the patch of all pages
// together is git's.
type DiffResult struct {
	Root  ospath.Text `json:"root"`
	Total int         `json:"total"` // files on all pages
	Files []FileDiff  `json:"files"`
	Patch string      `json:"patch"`
	// PatchLossy: this part of the patch has bytes that are not UTF-8; U+FFFD stands for them.
	PatchLossy bool `json:"patch_lossy,omitempty"`
	Pages
}

// FileDiff is the metadata of one changed file.
type FileDiff struct {
	Path       ospath.Text `json:"path"`
	OldPath    ospath.Text `json:"old_path,omitempty"` // of a rename or copy
	Status     string      `json:"status"`             // added, modified, deleted, renamed, copied, type_changed, unmerged
	Similarity int         `json:"similarity,omitempty"`
	OldMode    string      `json:"old_mode"` // of a merge, of the first parent
	NewMode    string      `json:"new_mode"`
	OldID      string      `json:"old_id"`
	NewID      string      `json:"new_id"` // all zeros: not in the object store, look at the file
	// Additions and Deletions are null for binary files, and where git counts none (conflicts).
	Additions *int `json:"additions"`
	Deletions *int `json:"deletions"`
	Binary    bool `json:"binary,omitempty"`
	Submodule bool `json:"submodule,omitempty"`
	Parents   int  `json:"parents,omitempty"` // of a merge or conflict: versions that it is compared with
}

type diffMeta struct {
	Root     ospath.Text `json:"root"`
	Total    int         `json:"total"`
	Complete bool        `json:"complete"`
	Warnings []string    `json:"warnings,omitempty"`
	Commit   *Commit     `json:"commit,omitempty"` // of git.show
}

// Diff shows changes.
func (s *Service) Diff(ctx context.Context, p DiffParams) (*DiffResult, error) {
	if err := paging.CheckBytes(p.MaxBytes); err != nil {
		return nil, err
	}
	var snap *paging.Snapshot
	var pos int64
	var err error
	if p.Cursor != nil {
		snap, pos, err = s.store.Open("git.diff", *p.Cursor, p.DiffQuery)
	} else {
		snap, err = s.scanDiff(ctx, p.DiffQuery)
	}
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	var m diffMeta
	if err := snap.Meta(&m); err != nil {
		return nil, err
	}
	r := &DiffResult{Root: m.Root, Total: m.Total, Files: []FileDiff{}, Pages: Pages{Complete: m.Complete, Warnings: trimWarnings(m.Warnings, p.MaxBytes/4)}}
	return r, r.fill(snap, pos, p.MaxBytes, r)
}

// minPatchRoom: a smaller rest of a page stays empty; the next page begins with patch.
const minPatchRoom = 256

// fill puts files, then patch into a page; page is r or what embeds it.
func (r *DiffResult) fill(snap *paging.Snapshot, pos int64, maxBytes int, page any) error {
	r.PatchLossy = true // measured as if
	f, err := newFiller(page, &r.Pages, maxBytes, maxEntries)
	r.PatchLossy = false
	if err != nil {
		return err
	}
	if f.room < 0 {
		return paging.TooSmall(maxBytes, maxBytes-f.room+minPatchRoom)
	}
	stopped := false
	next, err := snap.Rows(pos, func(row []byte) (bool, error) {
		ok, err := f.fits(row)
		if err != nil || !ok {
			stopped = true
			return false, err
		}
		var file FileDiff
		if err := json.Unmarshal(row, &file); err != nil {
			return false, err
		}
		r.Files = append(r.Files, file)
		return true, nil
	})
	if err != nil {
		return err
	}
	if !stopped && snap.More(next) {
		switch {
		case f.room >= minPatchRoom:
			if r.Patch, r.PatchLossy, next, err = snap.Text(next, f.room); err != nil {
				return err
			}
		case f.rows == 0:
			return paging.TooSmall(maxBytes, maxBytes-f.room+minPatchRoom)
		}
	}
	r.end(snap, next)
	return nil
}

func (s *Service) scanDiff(ctx context.Context, q DiffQuery) (*paging.Snapshot, error) {
	if q.Rev != nil {
		if err := checkRev("rev", *q.Rev); err != nil {
			return nil, err
		}
	}
	paths, err := s.pathspecs(q.Paths)
	if err != nil {
		return nil, err
	}
	var what []string
	if q.Staged {
		what = append(what, "--cached")
	}
	if q.Rev != nil {
		what = append(what, *q.Rev)
	}
	what = append(append(what, "--"), paths...)
	out, root, err := s.both(ctx, append(append([]string{"diff"}, diffOptions()...), what...)...)
	if err != nil {
		return nil, err
	}
	d, err := parseDiff(out.data, out.cut)
	if err != nil {
		return nil, err
	}
	if d.combined {
		// With --raw, git leaves out the patches of files in conflict.
		var patchOnly []string
		for _, o := range diffOptions() {
			if o != "--raw" && o != "--numstat" && o != "-z" {
				patchOnly = append(patchOnly, o)
			}
		}
		if out, err = s.git(ctx, append(append([]string{"diff"}, patchOnly...), what...)...); err != nil {
			return nil, err
		}
		d.patch = out.data
	}
	return s.saveDiff("git.diff", q, diffMeta{Root: ospath.Text(root), Complete: !out.cut, Warnings: out.warnings}, d)
}

// saveDiff keeps files and patch, cutting the patch to what a snapshot may have.
func (s *Service) saveDiff(method string, query any, m diffMeta, d *diffOutput) (*paging.Snapshot, error) {
	var rows []byte
	for i := range d.files {
		rows = jsonLine(rows, d.files[i])
	}
	m.Total = len(d.files)
	if room := max(0, paging.MaxSnapshot-len(rows)); len(d.patch) > room {
		d.patch, m.Complete = d.patch[:room], false
	}
	if !m.Complete {
		m.Warnings = append(m.Warnings, "the patch is longer than can be kept; narrow it with paths")
	}
	snap, err := s.store.Save(method, query, m, rows, d.patch)
	if err != nil {
		return nil, s.root.Error("save the diff in", string(s.root)+"/.mypr/git", err)
	}
	return snap, nil
}

// diffOutput is what "diff --raw --numstat --patch -z" printed.
type diffOutput struct {
	files    []FileDiff
	patch    []byte
	combined bool // some file has several old versions
}

// parseDiff reads raw and numstat records, in the order in which they come (merges
// have numstat first), then the patch (git-diff(1), "Raw output format").
func parseDiff(data []byte, cut bool) (*diffOutput, error) {
	d := &diffOutput{}
	index := map[ospath.Text]int{}
	type count struct {
		path           ospath.Text
		added, deleted string
	}
	var counts []count
	rest := data
	field := func() (string, bool) {
		i := bytes.IndexByte(rest, 0)
		if i < 0 {
			return "", false
		}
		f := string(rest[:i])
		rest = rest[i+1:]
		return f, true
	}
	truncated := func() (*diffOutput, error) {
		if cut {
			return d, nil
		}
		return nil, unexpected("diff", string(data))
	}
	for len(rest) > 0 {
		switch {
		case rest[0] == 0 || rest[0] == '\n':
			rest = rest[1:]
			continue
		case rest[0] == ':':
			head, ok := field()
			if !ok {
				return truncated()
			}
			path, ok := field()
			if !ok {
				return truncated()
			}
			parents := len(head) - len(strings.TrimLeft(head, ":"))
			w := strings.Split(head[parents:], " ")
			if len(w) != 2*parents+3 || w[2*parents+2] == "" {
				return nil, unexpected("diff", head)
			}
			status := w[2*parents+2]
			f := FileDiff{Path: ospath.Text(path), OldMode: w[0], NewMode: w[parents], OldID: w[parents+1], NewID: w[2*parents+1], Status: statusWord(status[0])}
			if parents > 1 {
				f.Parents = parents
				d.combined = true
				if strings.Trim(status, "A") == "" {
					f.Status = "added"
				} else if strings.Trim(status, "D") == "" {
					f.Status = "deleted"
				} else {
					f.Status = "modified"
				}
			} else if status[0] == 'R' || status[0] == 'C' {
				f.Similarity, _ = strconv.Atoi(status[1:])
				f.OldPath = f.Path
				if path, ok = field(); !ok {
					return truncated()
				}
				f.Path = ospath.Text(path)
			}
			f.Submodule = f.OldMode == "160000" || f.NewMode == "160000"
			if _, twice := index[f.Path]; !twice || f.Status != "modified" { // an unmerged file comes once more as modified
				index[f.Path] = len(d.files)
				d.files = append(d.files, f)
			}
			continue
		}
		// "12\t3\tpath", "-\t-\tpath", or "12\t3\t", old path, new path
		w := bytes.SplitN(rest[:min(len(rest), 64)], []byte{'\t'}, 3)
		if len(w) != 3 || !isCount(w[0]) || !isCount(w[1]) {
			break
		}
		c := count{added: string(w[0]), deleted: string(w[1])}
		rest = rest[len(w[0])+len(w[1])+2:]
		path, ok := field()
		if !ok {
			return truncated()
		}
		if path == "" {
			if _, ok = field(); !ok {
				return truncated()
			}
			if path, ok = field(); !ok {
				return truncated()
			}
		}
		c.path = ospath.Text(path)
		counts = append(counts, c)
	}
	for _, c := range counts {
		i, ok := index[c.path]
		if !ok {
			continue // of a merge: changed from the first parent, but as in the second
		}
		f := &d.files[i]
		if c.added == "-" {
			f.Binary = true
			continue
		}
		if a, err := strconv.Atoi(c.added); err == nil && f.Status != "unmerged" {
			f.Additions = &a
		}
		if n, err := strconv.Atoi(c.deleted); err == nil && f.Status != "unmerged" {
			f.Deletions = &n
		}
	}
	d.patch = rest
	return d, nil
}

func isCount(b []byte) bool {
	return string(b) == "-" || len(b) > 0 && len(bytes.Trim(b, "0123456789")) == 0
}
