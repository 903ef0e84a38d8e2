package git

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"

	"mypr/internal/ospath"
	"mypr/internal/paging"
	"mypr/internal/rpc"
)

// StatusParams of git.status.
type StatusParams struct {
	Cursor     *string `json:"cursor"`
	MaxEntries int     `json:"max_entries"`
	MaxBytes   int     `json:"max_bytes"`
}

// StatusResult is one page of git.status.
type StatusResult struct {
	Root   ospath.Text  `json:"root"` // of the repository, absolute; paths of files are relative to it
	Branch Branch       `json:"branch"`
	Stash  int          `json:"stash"` // entries
	Clean  bool         `json:"clean"` // no file differs, none is untracked
	Total  int          `json:"total"` // files on all pages
	Files  []FileStatus `json:"files"`
	Pages
}

// Branch is where HEAD is.
type Branch struct {
	Head     *string `json:"head"`     // name; null when detached
	OID      *string `json:"oid"`      // commit; null before the first one
	Upstream *string `json:"upstream"` // null: none
	Ahead    *int    `json:"ahead"`    // null without an upstream, or when it is gone
	Behind   *int    `json:"behind"`
	Detached bool    `json:"detached"`
}

// FileStatus is one file that differs from HEAD or from the index.
type FileStatus struct {
	Path    ospath.Text `json:"path"`
	OldPath ospath.Text `json:"old_path,omitempty"` // of a rename or copy
	Kind    string      `json:"kind"`               // changed, renamed, copied, conflict, untracked
	// Index is how the index differs from HEAD, Worktree how the file differs from the
	// index: added, modified, deleted, renamed, copied, type_changed; left out: it does not.
	Index      string     `json:"index,omitempty"`
	Worktree   string     `json:"worktree,omitempty"`
	Conflict   string     `json:"conflict,omitempty"`   // both_modified, added_by_us, …
	Similarity int        `json:"similarity,omitempty"` // per cent, of a rename or copy
	Modes      *Modes     `json:"modes,omitempty"`      // where they differ
	Submodule  *Submodule `json:"submodule,omitempty"`
}

// Modes are the octal modes of a file: "100644", "100755", "120000" (link), "160000"
// (submodule), "000000" (not there).
type Modes struct {
	Head     string `json:"head"`
	Index    string `json:"index"`
	Worktree string `json:"worktree"`
}

// Submodule is what changed in one.
type Submodule struct {
	CommitChanged bool `json:"commit_changed"`
	Modified      bool `json:"modified"`  // tracked files of it
	Untracked     bool `json:"untracked"` // it has untracked files
}

// statusMeta heads every page.
type statusMeta struct {
	Root     ospath.Text `json:"root"`
	Branch   Branch      `json:"branch"`
	Stash    int         `json:"stash"`
	Total    int         `json:"total"`
	Complete bool        `json:"complete"`
	Warnings []string    `json:"warnings,omitempty"`
}

// Status compares HEAD, index and work tree.
func (s *Service) Status(ctx context.Context, p StatusParams) (*StatusResult, error) {
	if err := paging.CheckBytes(p.MaxBytes); err != nil {
		return nil, err
	}
	if err := checkEntries(p.MaxEntries); err != nil {
		return nil, err
	}
	var snap *paging.Snapshot
	var pos int64
	var err error
	if p.Cursor != nil {
		snap, pos, err = s.store.Open("git.status", *p.Cursor, struct{}{})
	} else {
		snap, err = s.scanStatus(ctx)
	}
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	var m statusMeta
	if err := snap.Meta(&m); err != nil {
		return nil, err
	}
	r := &StatusResult{Root: m.Root, Branch: m.Branch, Stash: m.Stash, Total: m.Total, Clean: m.Total == 0 && m.Complete, Files: []FileStatus{},
		Pages: Pages{Complete: m.Complete, Warnings: trimWarnings(m.Warnings, p.MaxBytes/4)}}
	f, err := newFiller(r, &r.Pages, p.MaxBytes, p.MaxEntries)
	if err != nil {
		return nil, err
	}
	if f.room < 0 {
		return nil, paging.TooSmall(p.MaxBytes, p.MaxBytes-f.room)
	}
	next, err := snap.Rows(pos, func(row []byte) (bool, error) {
		ok, err := f.fits(row)
		if err != nil || !ok {
			return false, err
		}
		var file FileStatus
		if err := json.Unmarshal(row, &file); err != nil {
			return false, err
		}
		r.Files = append(r.Files, file)
		return true, nil
	})
	if err != nil {
		return nil, err
	}
	r.end(snap, next)
	return r, nil
}

func (s *Service) scanStatus(ctx context.Context) (*paging.Snapshot, error) {
	out, root, err := s.both(ctx, "status", "--porcelain=v2", "-z", "--branch", "--show-stash", "--untracked-files=normal", "--renames")
	if err != nil {
		return nil, err
	}
	m := statusMeta{Root: ospath.Text(root), Complete: !out.cut, Warnings: out.warnings}
	rows, err := parseStatus(out.data, out.cut, &m)
	if err != nil {
		return nil, err
	}
	if len(rows) > maxOutput {
		return nil, rpc.Errorf(rpc.CodeTooLarge, "the status of this repository is larger than %d bytes", maxOutput)
	}
	snap, err := s.store.Save("git.status", struct{}{}, m, rows, nil)
	if err != nil {
		return nil, s.root.Error("save the status in", string(s.root)+"/.mypr/git", err)
	}
	return snap, nil
}

// parseStatus reads porcelain v2 with NUL (git-status(1), "Porcelain Format Version
// 2"). Lines of kinds that a newer git may add are passed over, as it asks.
func parseStatus(data []byte, cut bool, m *statusMeta) (rows []byte, err error) {
	text := string(data)
	next := func() (string, bool) {
		record, rest, ok := strings.Cut(text, "\x00")
		if !ok {
			return "", false
		}
		text = rest
		return record, true
	}
	for {
		record, ok := next()
		if !ok {
			if text != "" && !cut {
				return nil, unexpected("status", text)
			}
			return rows, nil
		}
		if len(record) < 2 {
			return nil, unexpected("status", record)
		}
		var f FileStatus
		switch record[0] {
		case '#':
			m.header(record)
			continue
		case '1':
			w := strings.SplitN(record, " ", 9)
			if len(w) != 9 || len(w[1]) != 2 {
				return nil, unexpected("status", record)
			}
			f = FileStatus{Path: ospath.Text(w[8]), Kind: "changed"}
			f.changes(w[1], w[2], w[3], w[4], w[5])
		case '2':
			w := strings.SplitN(record, " ", 10)
			old, ok := next()
			if !ok && cut {
				return rows, nil
			}
			if len(w) != 10 || len(w[1]) != 2 || len(w[8]) < 2 || !ok {
				return nil, unexpected("status", record)
			}
			f = FileStatus{Path: ospath.Text(w[9]), OldPath: ospath.Text(old), Kind: "renamed"}
			if w[8][0] == 'C' {
				f.Kind = "copied"
			}
			f.Similarity, _ = strconv.Atoi(w[8][1:])
			f.changes(w[1], w[2], w[3], w[4], w[5])
		case 'u':
			w := strings.SplitN(record, " ", 11)
			if len(w) != 11 {
				return nil, unexpected("status", record)
			}
			f = FileStatus{Path: ospath.Text(w[10]), Kind: "conflict", Conflict: conflict(w[1])}
			f.submodule(w[2])
		case '?':
			f = FileStatus{Path: ospath.Text(record[2:]), Kind: "untracked"}
		default:
			continue
		}
		rows = jsonLine(rows, f)
		m.Total++
	}
}

func unexpected(command, record string) error {
	return rpc.Errorf(CodeFailed, "git %s printed something unexpected: %.100q", command, record).
		WithHint("is this a very old or very new git? git --version")
}

func (m *statusMeta) header(record string) {
	w := strings.SplitN(record, " ", 3)
	if len(w) != 3 {
		return
	}
	v := w[2]
	switch w[1] {
	case "branch.oid":
		if v != "(initial)" {
			m.Branch.OID = &v
		}
	case "branch.head":
		if v == "(detached)" {
			m.Branch.Detached = true
		} else {
			v = strings.ToValidUTF8(v, "\uFFFD")
			m.Branch.Head = &v
		}
	case "branch.upstream":
		v = strings.ToValidUTF8(v, "\uFFFD")
		m.Branch.Upstream = &v
	case "branch.ab":
		ahead, behind, _ := strings.Cut(v, " ")
		if a, err := strconv.Atoi(ahead); err == nil {
			m.Branch.Ahead = &a
		}
		if b, err := strconv.Atoi(behind); err == nil {
			b = -b
			m.Branch.Behind = &b
		}
	case "stash":
		m.Stash, _ = strconv.Atoi(v)
	}
}

func (f *FileStatus) changes(xy, sub, head, index, worktree string) {
	f.Index, f.Worktree = statusWord(xy[0]), statusWord(xy[1])
	if head != index || index != worktree {
		f.Modes = &Modes{head, index, worktree}
	}
	f.submodule(sub)
}

// submodule reads "N..." or "S<c><m><u>".
func (f *FileStatus) submodule(sub string) {
	if len(sub) == 4 && sub[0] == 'S' {
		f.Submodule = &Submodule{CommitChanged: sub[1] == 'C', Modified: sub[2] == 'M', Untracked: sub[3] == 'U'}
	}
}

func statusWord(c byte) string {
	switch c {
	case 'A':
		return "added"
	case 'M':
		return "modified"
	case 'D':
		return "deleted"
	case 'R':
		return "renamed"
	case 'C':
		return "copied"
	case 'T':
		return "type_changed"
	case 'U':
		return "unmerged"
	}
	return ""
}

func conflict(xy string) string {
	switch xy {
	case "DD":
		return "both_deleted"
	case "AU":
		return "added_by_us"
	case "UD":
		return "deleted_by_them"
	case "UA":
		return "added_by_them"
	case "DU":
		return "deleted_by_us"
	case "AA":
		return "both_added"
	case "UU":
		return "both_modified"
	}
	return xy
}
