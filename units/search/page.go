package search

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode/utf8"

	"mypr/internal/ospath"
	"mypr/internal/paging"
)

// Page is one page of a result. Of Matches, Files, Counts and Exists only the one of
// the mode is there.
type Page struct {
	Mode    string        `json:"mode"`
	Backend string        `json:"backend"`
	Matches []*Match      `json:"matches,omitzero"`
	Files   []ospath.Text `json:"files,omitzero"`
	Counts  []CountRow    `json:"counts,omitzero"`
	Exists  *Tri          `json:"exists,omitempty"`

	// Complete: the scan looked at everything and kept all of it.
	Complete bool `json:"complete"`
	// StopReason is null when Complete, else timeout, scan_bytes, scan_limit, errors
	// (see Warnings) or killed.
	StopReason    *string  `json:"stop_reason"`
	ScanTruncated bool     `json:"scan_truncated"` // a limit of the scan cut the result
	HasMore       bool     `json:"has_more"`
	NextCursor    *string  `json:"next_cursor"`
	PageCursor    *string  `json:"page_cursor"` // reads this page again, for another max_bytes; null without rows
	Warnings      []string `json:"warnings,omitempty"`
	MoreWarnings  int      `json:"more_warnings,omitempty"` // that max_bytes left no room for
}

// Tri is true, false or, as null, unknown.
type Tri struct{ known, yes bool }

// MarshalJSON implements json.Marshaler.
func (t Tri) MarshalJSON() ([]byte, error) {
	if !t.known {
		return []byte("null"), nil
	}
	return json.Marshal(t.yes)
}

// Match is one row of matches. Lines and columns count from 1, columns and offsets in
// bytes of UTF-8, ends are exclusive.
type Match struct {
	Kind      string      `json:"kind"` // match, context
	Path      ospath.Text `json:"path"`
	PathLossy bool        `json:"path_lossy,omitempty"` // the program could not spell it: U+FFFD stands for other bytes
	Line      int64       `json:"line,omitempty"`
	Column    int64       `json:"column,omitempty"` // of the first span
	// Start and End are the offsets in the file of the first span. Documents have
	// none: their text was extracted.
	Start *int64 `json:"start,omitempty"`
	End   *int64 `json:"end,omitempty"`
	// Text is the matching line (or lines), or the matched node.
	Text string `json:"text"`
	// TextStart is how many bytes of it are left out before Text.
	TextStart int  `json:"text_start,omitempty"`
	TextLossy bool `json:"text_lossy,omitempty"` // it is not UTF-8: U+FFFD stands for other bytes
	// Spans are all matches in the line.
	Spans []Span `json:"spans,omitempty"`

	Language string               `json:"language,omitempty"`
	Range    *Range               `json:"range,omitempty"`
	Captures map[string][]Capture `json:"captures,omitempty"` // by metavariable

	// DetailsTruncated: Text, Spans, Range or Captures are cut or left out.
	DetailsTruncated bool `json:"details_truncated,omitempty"`
}

// Span is one match in a line.
type Span struct {
	Line   int64  `json:"line,omitempty"` // where it is not the row's
	Column int64  `json:"column"`
	Start  *int64 `json:"start,omitempty"`
	End    *int64 `json:"end,omitempty"`
}

// Range is a part of a source file.
type Range struct {
	Start Position `json:"start"`
	End   Position `json:"end"`
}

// Position is a place in a source file.
type Position struct {
	Line   int64 `json:"line"`
	Column int64 `json:"column,omitempty"` // left out when it cannot be told
	Offset int64 `json:"offset"`
}

// Capture is what a metavariable stands for.
type Capture struct {
	Text  string `json:"text"`
	Range Range  `json:"range"`
}

// page cuts a page out of a snapshot: at most MaxMatches results, and JSON of at most
// MaxBytes.
func (s *Service) page(snap *paging.Snapshot, pos int64, l *Limits) (*Page, error) {
	var m meta
	if err := snap.Meta(&m); err != nil {
		return nil, err
	}
	p := &Page{Mode: m.Mode, Backend: m.Backend, Complete: m.Complete, ScanTruncated: m.ScanTruncated}
	if m.StopReason != "" {
		p.StopReason = &m.StopReason
	}
	longest := strings.Repeat("x", paging.CursorMax)
	switch m.Mode {
	case modeExists:
		p.Exists = &Tri{m.Exists != nil, m.Exists != nil && *m.Exists}
	case modeFiles:
		p.Files = []ospath.Text{}
	case modeCounts:
		p.Counts = []CountRow{}
	default:
		p.Matches = []*Match{}
	}
	if m.Mode != modeExists {
		p.HasMore, p.NextCursor, p.PageCursor = true, &longest, &longest
	}
	left := l.MaxBytes / 4
	for i, w := range m.Warnings {
		n, err := paging.Size(w)
		if err != nil {
			return nil, err
		}
		if left -= n + 1; left < 0 {
			p.MoreWarnings = len(m.Warnings) - i
			break
		}
		p.Warnings = append(p.Warnings, w)
	}
	envelope, err := paging.Size(p)
	if err != nil {
		return nil, err
	}
	p.HasMore, p.NextCursor, p.PageCursor = false, nil, nil
	if m.Mode == modeExists {
		return p, nil
	}
	f := &filler{s: s, p: p, meta: &m, room: l.MaxBytes - envelope, maxBytes: l.MaxBytes, matches: l.MaxMatches}
	next, err := snap.Rows(pos, f.take)
	if err != nil {
		return nil, err
	}
	if snap.More(pos) {
		c := snap.Cursor(pos)
		p.PageCursor = &c
	}
	if snap.More(next) {
		c := snap.Cursor(next)
		p.HasMore, p.NextCursor = true, &c
	}
	return p, nil
}

// filler puts rows into a page while they fit.
type filler struct {
	s        *Service
	p        *Page
	meta     *meta
	room     int
	maxBytes int
	matches  int // results that may still come
	rows     int
}

func (f *filler) take(row []byte) (bool, error) {
	switch f.meta.Mode {
	case modeFiles:
		var path ospath.Text
		if err := json.Unmarshal(row, &path); err != nil {
			return false, err
		}
		ok, err := f.fits(path, true, true)
		if ok {
			f.p.Files = append(f.p.Files, path)
		}
		return ok, err
	case modeCounts:
		var c CountRow
		if err := json.Unmarshal(row, &c); err != nil {
			return false, err
		}
		ok, err := f.fits(c, true, true)
		if ok {
			f.p.Counts = append(f.p.Counts, c)
		}
		return ok, err
	}
	raw, err := f.s.parse(f.meta.Backend, row)
	if err != nil {
		return false, err
	}
	// The first row is cut as far as it must be; another one that does not fit opens the next page.
	for level := range shapes {
		m := raw.shape(level, f.maxBytes)
		ok, err := f.fits(m, m.Kind == kindMatch, level == shapes-1)
		if ok {
			f.p.Matches = append(f.p.Matches, m)
		}
		if ok || err != nil || f.rows > 0 {
			return ok, err
		}
	}
	return false, nil
}

// fits takes the room for a row. The last form of the first row must fit.
func (f *filler) fits(v any, result, last bool) (bool, error) {
	if result && f.matches == 0 {
		return false, nil
	}
	n, err := paging.Size(v)
	if err != nil {
		return false, err
	}
	if n++; n > f.room { // with its comma
		if f.rows == 0 && last {
			return false, paging.TooSmall(f.maxBytes, f.maxBytes-f.room+n)
		}
		return false, nil
	}
	f.room -= n
	f.rows++
	if result {
		f.matches--
	}
	return true, nil
}

const (
	kindMatch   = "match"
	kindContext = "context"
)

// shapes are the forms of a row, from the fullest to the smallest.
const shapes = 3

// source is a record of a program in our terms. Offsets are in bytes of text.
type source struct {
	Match
	text  string
	cut   bool // the record was trimmed when it was collected
	focus int  // what to show first of a long text
	spans []Span
}

// shape makes a row. In a page of maxBytes, text takes an eighth and each list of
// details another; the smallest form has neither.
func (r *source) shape(level, maxBytes int) *Match {
	m := r.Match
	m.DetailsTruncated = m.DetailsTruncated || r.cut
	share := maxBytes / 8
	switch level {
	case 1:
		share /= 8
	case 2:
		if r.text != "" || len(r.spans) > 0 || m.Captures != nil {
			m.DetailsTruncated = true
		}
		m.Captures, m.Range = nil, nil
		return &m
	}
	var cut bool
	m.Text, m.TextStart, cut = excerpt(r.text, r.focus, share)
	m.TextLossy = !utf8.ValidString(m.Text)
	m.Text = strings.ToValidUTF8(m.Text, "\uFFFD")
	m.DetailsTruncated = m.DetailsTruncated || cut
	for i, sp := range r.spans {
		if n, err := paging.Size(sp); err != nil || share < n {
			m.Spans, m.DetailsTruncated = r.spans[:i], true
			break
		}
		m.Spans = r.spans[:i+1]
		share -= 48 // about the length of one
	}
	if m.Captures != nil {
		if n, err := paging.Size(m.Captures); err != nil || n > share {
			m.Captures, m.DetailsTruncated = nil, true
		}
	}
	return &m
}

// excerpt is at most room bytes of JSON of a text, with focus in it.
func excerpt(text string, focus, room int) (string, int, bool) {
	if n := paging.Fit([]byte(text), room); n == len(text) {
		return text, 0, false
	}
	start := max(0, min(focus, len(text))-room/4)
	for start > 0 && start < len(text) && !utf8.RuneStart(text[start]) {
		start--
	}
	if paging.Fit([]byte(text), room) > focus+room/4 {
		start = 0 // the beginning shows it as well
	}
	rest := text[start:]
	return rest[:paging.Fit([]byte(rest), room)], start, true
}

// parse reads a row of a snapshot.
func (s *Service) parse(backend string, row []byte) (*source, error) {
	if backend == backendAST {
		return s.parseAST(row)
	}
	return s.parseRG(row, backend == backendDocs)
}

// parseRG reads a record of rg. Documents are searched as extracted text, so their
// offsets mean nothing in the file and are left out.
func (s *Service) parseRG(row []byte, docs bool) (*source, error) {
	var rec struct {
		Cut  bool   `json:"cut"`
		Type string `json:"type"`
		Data struct {
			Path       rgText `json:"path"`
			Lines      rgText `json:"lines"`
			LineNumber int64  `json:"line_number"`
			Offset     int64  `json:"absolute_offset"`
			Submatches []struct {
				Start int64 `json:"start"`
				End   int64 `json:"end"`
			} `json:"submatches"`
		} `json:"data"`
	}
	if err := json.Unmarshal(row, &rec); err != nil {
		return nil, err
	}
	d := &rec.Data
	r := &source{cut: rec.Cut, text: d.Lines.String()}
	r.Kind, r.Path, r.Line = rec.Type, s.display(d.Path.String()), d.LineNumber
	lines := []byte(r.text)
	for i, sub := range d.Submatches {
		sp := Span{Column: sub.Start + 1}
		// A match over several lines may begin after the first of them.
		at := int(max(0, min(sub.Start, int64(len(lines)))))
		if nl := bytes.LastIndexByte(lines[:at], '\n'); nl >= 0 && sub.Start == int64(at) {
			sp.Line = d.LineNumber + int64(bytes.Count(lines[:at], []byte{'\n'}))
			sp.Column = sub.Start - int64(nl)
		}
		if !docs {
			start, end := d.Offset+sub.Start, d.Offset+sub.End
			sp.Start, sp.End = &start, &end
		}
		if i == 0 {
			r.focus = at
			r.Column, r.Start, r.End = sp.Column, sp.Start, sp.End
			if sp.Line != 0 {
				r.Line = sp.Line
			}
		}
		r.spans = append(r.spans, sp)
	}
	for i := range r.spans {
		if r.spans[i].Line == r.Line {
			r.spans[i].Line = 0
		}
	}
	if !rec.Cut {
		r.text = strings.TrimSuffix(strings.TrimSuffix(r.text, "\n"), "\r")
	}
	return r, nil
}
