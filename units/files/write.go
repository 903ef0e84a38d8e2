package files

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

// WriteParams of fs.write. An existing file is replaced only when ExpectedHash is its
// revision or Overwrite says so.
type WriteParams struct {
	Path          ospath.Text `json:"path"`
	Text          ospath.Text `json:"text"`
	ExpectedHash  *string     `json:"expected_hash"`
	Overwrite     bool        `json:"overwrite"`
	Encoding      string      `json:"encoding"`
	CreateParents bool        `json:"create_parents"`
}

// WriteBytesParams of fs.write_bytes.
type WriteBytesParams struct {
	Path          ospath.Text `json:"path"`
	Data          []byte      `json:"data_base64"`
	ExpectedHash  *string     `json:"expected_hash"`
	Overwrite     bool        `json:"overwrite"`
	CreateParents bool        `json:"create_parents"`
}

// WriteResult of fs.write and fs.write_bytes.
type WriteResult struct {
	Path        ospath.Text `json:"path"`
	Created     bool        `json:"created"`
	Size        int64       `json:"size"`
	OldRevision *string     `json:"old_revision"` // null: there was no file, or one above MaxHashBytes
	NewRevision string      `json:"new_revision"`
	Revision    string      `json:"revision"` // of the file as it is now
	Warnings    []string    `json:"warnings,omitempty"`
}

// Write creates or replaces a text file.
func (s *Service) Write(ctx context.Context, p WriteParams) (*WriteResult, error) {
	codec, err := codecFor(p.Encoding)
	if err != nil {
		return nil, err
	}
	data, err := encodeText(codec, "write", p.Path, string(p.Text))
	if err != nil {
		return nil, err
	}
	return s.put(ctx, p.Path, data, p.ExpectedHash, p.Overwrite, p.CreateParents)
}

// WriteBytes creates or replaces any file.
func (s *Service) WriteBytes(ctx context.Context, p WriteBytesParams) (*WriteResult, error) {
	return s.put(ctx, p.Path, p.Data, p.ExpectedHash, p.Overwrite, p.CreateParents)
}

func isRevision(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

func checkRevision(name string, rev *string) error {
	if rev != nil && !isRevision(*rev) {
		return invalid("%s must be a revision (64 hex digits of SHA-256), not %.80q", name, *rev).
			WithHint("take it from the revision of ws.fs.read")
	}
	return nil
}

func (s *Service) put(ctx context.Context, path ospath.Text, data []byte, expected *string, overwrite, parents bool) (*WriteResult, error) {
	if err := checkRevision("expected_hash", expected); err != nil {
		return nil, err
	}
	t, release, err := s.lockTarget(ctx, "write", string(path))
	if err != nil {
		return nil, err
	}
	defer release()
	name := s.root.Display(t.path)
	r := &WriteResult{Path: name, Size: int64(len(data)), NewRevision: revisionOf(data)}
	r.Revision = r.NewRevision
	c := &change{Op: opCreate, Path: ospath.Text(t.path), content: data}
	if t.st == nil {
		switch {
		case expected != nil:
			return nil, mismatch(name, *expected, nil)
		case len(t.missing) > 0 && !parents:
			return nil, rpc.Errorf(rpc.CodeNotFound, "cannot write %s: the directory %s does not exist", name, s.root.Display(t.missing[len(t.missing)-1])).
				WithHint("pass create_parents=True")
		}
		r.Created = true
	} else {
		f, err := s.openExisting("write", t, expected != nil || overwrite)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		if r.OldRevision, err = s.revision(ctx, f, t.st); err != nil {
			return nil, err
		}
		switch {
		case expected != nil && (r.OldRevision == nil || *r.OldRevision != *expected):
			return nil, mismatch(name, *expected, r.OldRevision)
		case expected == nil && !overwrite:
			e := rpc.Errorf(rpc.CodeConflict, "cannot write %s: it exists", name).
				WithHint("read it, then pass expected_hash=page[\"revision\"]; or overwrite=True to replace it whatever it holds")
			if r.OldRevision != nil {
				e.Details = map[string]any{"current_revision": *r.OldRevision}
			}
			return nil, e
		}
		c.Op, c.Old, c.attrs = opReplace, identify(t.st), attributesOf(f, t.st)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := s.apply([]*change{c}, t.missing); err != nil {
		return nil, err
	}
	r.Warnings = c.warnings(t.st)
	return r, nil
}

// warnings says what a replacement could not keep.
func (c *change) warnings(old *unix.Stat_t) (w []string) {
	if c.attrs != nil {
		w = append(w, c.attrs.warnings...)
	}
	if old != nil && old.Nlink > 1 {
		w = append(w, fmt.Sprintf("the file had %d hard links: its other names keep the old content", old.Nlink))
	}
	return w
}

func mismatch(name ospath.Text, expected string, current *string) error {
	e := rpc.Errorf(rpc.CodeConflict, "%s has changed: it is not at revision %.12s…", name, expected).
		WithHint("read it again and repeat the edit on what it is now")
	e.Details = map[string]any{"path": name, "expected": expected, "current_revision": nil}
	if current == nil {
		e.Message = fmt.Sprintf("%s does not exist: it is not at revision %.12s…", name, expected)
		e.Hint = "it was deleted or moved; leave out expected_hash to create it"
	} else {
		e.Details["current_revision"] = *current
	}
	return e
}

// openExisting opens the file that is to be replaced, brings t.st up to date, and
// makes sure that an ordinary program could write to it.
func (s *Service) openExisting(operation string, t *target, writing bool) (*os.File, error) {
	f, st, err := s.openRegular(operation, t.path)
	if err != nil {
		return nil, err
	}
	t.st = st
	if writing {
		// Renaming over a file needs no right to write to it; respecting that right is our rule.
		if err := unix.Faccessat(unix.AT_FDCWD, t.path, unix.W_OK, unix.AT_EACCESS); err != nil {
			f.Close()
			return nil, s.root.Error(operation, t.path, err)
		}
	}
	return f, nil
}

// revision is null for files above MaxHashBytes.
func (s *Service) revision(ctx context.Context, f *os.File, st *unix.Stat_t) (*string, error) {
	if st.Size > MaxHashBytes {
		return nil, nil
	}
	sum := sha256.New()
	if _, err := s.scan(ctx, f, st, func(chunk []byte, _ int64) { sum.Write(chunk) }); err != nil {
		return nil, err
	}
	rev := hexOf(sum)
	return &rev, nil
}

// PatchParams of fs.patch.
type PatchParams struct {
	Path         ospath.Text `json:"path"`
	Edits        []Edit      `json:"edits"`
	ExpectedHash *string     `json:"expected_hash"`
	DryRun       bool        `json:"dry_run"`
	Encoding     string      `json:"encoding"`
	MaxDiffBytes int         `json:"max_diff_bytes"`
}

// Edit replaces exact text. Edits of one call see the result of those before them.
type Edit struct {
	Old   ospath.Text `json:"old"`
	New   ospath.Text `json:"new"`
	Count Count       `json:"count"`
}

// Count says how many matches an edit replaces: 0, the default, the only one there
// is; N the first N; All ("all") every one.
type Count int

// All replaces every match.
const All Count = -1

// UnmarshalJSON accepts null, a number from 1 on, or "all".
func (c *Count) UnmarshalJSON(raw []byte) error {
	var n int
	switch {
	case string(raw) == "null":
		return nil
	case string(raw) == `"all"`:
		*c = All
		return nil
	case json.Unmarshal(raw, &n) != nil || n < 1:
		return fmt.Errorf("count must be a number from 1 on or \"all\", not %.40s", raw)
	}
	*c = Count(n)
	return nil
}

// PatchResult of fs.patch. With DryRun, NewRevision is what the file would have and
// Revision what it has.
type PatchResult struct {
	Path          ospath.Text `json:"path"`
	OldRevision   string      `json:"old_revision"`
	NewRevision   string      `json:"new_revision"`
	Revision      string      `json:"revision"`
	DryRun        bool        `json:"dry_run"`
	Replaced      []int       `json:"replaced"` // matches replaced, for each edit
	Added         int         `json:"added"`    // lines
	Removed       int         `json:"removed"`
	Diff          string      `json:"diff"`
	DiffTruncated bool        `json:"diff_truncated"`
	Warnings      []string    `json:"warnings,omitempty"`
}

// Patch replaces exact text in one file, all edits or none.
func (s *Service) Patch(ctx context.Context, p PatchParams) (*PatchResult, error) {
	codec, err := codecFor(p.Encoding)
	if err != nil {
		return nil, err
	}
	if err := checkDiffBytes(p.MaxDiffBytes); err != nil {
		return nil, err
	}
	if err := checkRevision("expected_hash", p.ExpectedHash); err != nil {
		return nil, err
	}
	if len(p.Edits) == 0 {
		return nil, invalid("edits is empty").WithHint("pass a list of {\"old\": ..., \"new\": ...}")
	}
	t, release, err := s.lockTarget(ctx, "patch", string(p.Path))
	if err != nil {
		return nil, err
	}
	defer release()
	if t.st == nil {
		return nil, s.root.Error("patch", t.path, unix.ENOENT)
	}
	name := s.root.Display(t.path)
	old, err := s.load(ctx, "patch", t, !p.DryRun)
	if err != nil {
		return nil, err
	}
	if p.ExpectedHash != nil && *p.ExpectedHash != old.revision {
		return nil, mismatch(name, *p.ExpectedHash, &old.revision)
	}
	before, err := decodeText(codec, "patch", name, old.data)
	if err != nil {
		return nil, err
	}
	after, replaced, err := applyEdits(name, before, p.Edits)
	if err != nil {
		return nil, err
	}
	data, err := encodeText(codec, "patch", name, after)
	if err != nil {
		return nil, err
	}
	r := &PatchResult{Path: name, OldRevision: old.revision, NewRevision: revisionOf(data), DryRun: p.DryRun, Replaced: replaced}
	r.Diff, r.Added, r.Removed = unified(name, name, before, after)
	r.Diff, r.DiffTruncated = bound(r.Diff, p.MaxDiffBytes)
	if p.DryRun {
		r.Revision = old.revision
		return r, nil
	}
	r.Revision = r.NewRevision
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if r.NewRevision != r.OldRevision {
		c := &change{Op: opReplace, Path: ospath.Text(t.path), Old: identify(t.st), content: data, attrs: old.attrs}
		if err := s.apply([]*change{c}, nil); err != nil {
			return nil, err
		}
		r.Warnings = c.warnings(t.st)
	}
	return r, nil
}

// loaded is an existing file as it was when an edit began.
type loaded struct {
	data     []byte
	revision string
	attrs    *attributes
}

func (s *Service) load(ctx context.Context, operation string, t *target, writing bool) (*loaded, error) {
	f, err := s.openExisting(operation, t, writing)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if t.st.Size > MaxEditBytes {
		return nil, rpc.Errorf(rpc.CodeTooLarge, "cannot %s %s: it has %d bytes, the limit is %d", operation, s.root.Display(t.path), t.st.Size, MaxEditBytes).
			WithHint("edit it with a program, for example await ws.shell.run([\"sed\", ...])")
	}
	l := &loaded{attrs: attributesOf(f, t.st)}
	l.data, l.revision, err = s.slurp(ctx, f, t.st)
	return l, err
}

// applyEdits does all edits or says why one cannot be done. In a file whose every
// line ends with CRLF, edits written with LF alone mean CRLF.
func applyEdits(name ospath.Text, text string, edits []Edit) (string, []int, error) {
	crlf := onlyCRLF(text)
	replaced := make([]int, len(edits))
	for i, e := range edits {
		old, new := string(e.Old), string(e.New)
		if old == "" {
			return "", nil, invalid("edit %d of %s: old is empty", i+1, name).WithHint("name the text to replace; to create a file use ws.fs.write")
		}
		for _, t := range []string{old, new} {
			if bad := invalidAt([]byte(t)); bad >= 0 {
				return "", nil, rpc.Errorf(CodeEncoding, "edit %d of %s has a lone surrogate (U+DC%02X)", i+1, name, t[bad]).
					WithHint("edit files that are not text with ws.fs.read_bytes and ws.fs.write_bytes")
			}
		}
		if crlf {
			old, new = toCRLF(old), toCRLF(new)
		}
		n := strings.Count(text, old)
		switch first := strings.Index(text, old); {
		case n == 0:
			err := rpc.Errorf(CodeNoMatch, "edit %d: the old text is not in %s; nothing was changed", i+1, name)
			return "", nil, err.WithHint("%s", nearMiss(text, old))
		case e.Count == 0 && strings.Contains(text[first+1:], old): // overlapping ones too
			at := linesOf(text, old, 10)
			err := rpc.Errorf(CodeAmbiguous, "edit %d: the old text is in %s more than once, on lines %s; nothing was changed", i+1, name, joinInts(at))
			err.Details = map[string]any{"edit": i, "lines": at, "count": n}
			return "", nil, err.WithHint("add lines around it to old, or pass count=N or count=\"all\"")
		case e.Count > 0 && int(e.Count) > n:
			return "", nil, rpc.Errorf(CodeNoMatch, "edit %d: the old text is in %s %d times, not %d times; nothing was changed", i+1, name, n, e.Count).
				WithHint("pass count=\"all\" for every match")
		}
		limit := 1
		switch e.Count {
		case 0:
		case All:
			limit = n
		default:
			limit = int(e.Count)
		}
		if growth := (len(new) - len(old)) * limit; len(text)+growth > MaxEditBytes {
			return "", nil, rpc.Errorf(rpc.CodeTooLarge, "edit %d would make %s larger than %d bytes", i+1, name, MaxEditBytes)
		}
		text = strings.Replace(text, old, new, limit)
		replaced[i] = limit
	}
	return text, replaced, nil
}

// onlyCRLF: the text has line ends, and all are CRLF.
func onlyCRLF(text string) bool {
	n := strings.Count(text, "\n")
	return n > 0 && n == strings.Count(text, "\r\n")
}

func toCRLF(s string) string {
	return strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "\n", "\r\n")
}

// linesOf are the lines on which matches begin, at most limit.
func linesOf(text, old string, limit int) (lines []int) {
	line, from := 1, 0
	for len(lines) < limit {
		i := strings.Index(text[from:], old)
		if i < 0 {
			break
		}
		line += strings.Count(text[from:from+i], "\n")
		lines = append(lines, line)
		if text[from+i] == '\n' {
			line++
		}
		from += i + 1
	}
	return lines
}

func joinInts(n []int) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(n), " ", ", "), "[]")
}

// nearMiss says what may be wrong with text that was not found: most often white space.
func nearMiss(text, old string) string {
	want := ""
	for l := range strings.Lines(old) {
		if want = strings.Join(strings.Fields(l), " "); want != "" {
			break
		}
	}
	if want != "" {
		n := 0
		for l := range strings.Lines(text) {
			n++
			if len(l) < 10_000 && strings.Join(strings.Fields(l), " ") == want {
				return fmt.Sprintf("line %d has the same first line but for white space, or the lines after it differ: read it and copy it exactly", n)
			}
		}
	}
	return "read the file again and copy the text exactly"
}
