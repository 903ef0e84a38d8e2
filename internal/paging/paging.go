// Package paging keeps the answer of a query on disk so that it can be read page by
// page: by opaque cursors, within byte budgets, unchanged by what happens to the
// files meanwhile, and across restarts of every process.
//
// It owns the snapshot files of one directory, their retention, and the cursors. It
// does not know what the rows mean.
//
// A snapshot is one file: a JSON header line, then rows (one JSON value per line),
// then optionally a text of any bytes. It is written under a temporary name and
// renamed, so a file with a snapshot's name is whole; it is not synced to disk,
// because a lost snapshot costs one repeated query.
package paging

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"mypr/internal/rpc"
)

// Budgets of one page, in bytes of its JSON.
const (
	DefaultBytes = 32768
	MinBytes     = 1024
	MaxBytes     = 16 << 20 // well below a frame of the kernel socket
)

// MaxSnapshot bounds one snapshot.
const MaxSnapshot = 64 << 20

// Retention: the snapshots read last are kept.
const (
	keepSnapshots = 128
	keepBytes     = 512 << 20
)

// CodeInvalidCursor: the cursor is damaged, of another query, or its snapshot is gone.
const CodeInvalidCursor = "invalid_cursor"

// Store is a directory of snapshots, shared by every query of one service.
type Store struct {
	dir string
	mu  sync.Mutex // guards retention: one pass at a time
}

// NewStore uses dir, which is made (0700) when the first snapshot is saved.
func NewStore(dir string) *Store { return &Store{dir: dir} }

type header struct {
	Version int             `json:"version"`
	Method  string          `json:"method"`
	Query   json.RawMessage `json:"query"`
	Meta    json.RawMessage `json:"meta"`
	Rows    int64           `json:"rows"` // bytes of rows
	Text    int64           `json:"text"` // bytes of text
}

const version = 1

// Snapshot is the saved answer of one query. Close it.
type Snapshot struct {
	id   string
	head header
	body io.ReaderAt
	base int64 // of the rows in body
	file *os.File
}

// Save keeps an answer: rows are whole lines of JSON, meta is whatever the service
// needs to head each page with.
func (s *Store) Save(method string, query, meta any, rows, text []byte) (*Snapshot, error) {
	h := header{Version: version, Method: method, Rows: int64(len(rows)), Text: int64(len(text))}
	var err error
	if h.Query, err = json.Marshal(query); err != nil {
		return nil, err
	}
	if h.Meta, err = json.Marshal(meta); err != nil {
		return nil, err
	}
	line, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("cannot save the snapshot: %w", err)
	}
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails (crypto/rand)
	id := hex.EncodeToString(random[:])
	if err := s.write(id, append(line, '\n'), rows, text); err != nil {
		return nil, fmt.Errorf("cannot save the snapshot: %w", err)
	}
	s.retain(id)
	return &Snapshot{id: id, head: h, body: parts{bytes.NewReader(rows), bytes.NewReader(text)}}, nil
}

// parts are the rows and the text of a snapshot that is still in memory.
type parts struct{ rows, text *bytes.Reader }

func (p parts) ReadAt(b []byte, off int64) (int, error) {
	if off >= p.rows.Size() {
		return p.text.ReadAt(b, off-p.rows.Size())
	}
	n, err := p.rows.ReadAt(b, off)
	if n < len(b) {
		var m int
		m, err = p.text.ReadAt(b[n:], 0)
		n += m
	}
	return n, err
}

const tempSuffix = ".tmp"

func (s *Store) write(id string, parts ...[]byte) error {
	temp := filepath.Join(s.dir, id+tempSuffix)
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	for _, p := range parts {
		if _, err = f.Write(p); err != nil {
			break
		}
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(temp, filepath.Join(s.dir, id))
	}
	if err != nil {
		os.Remove(temp)
	}
	return err
}

// retain removes the snapshots that were not read for the longest time.
func (s *Store) retain(newest string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return
	}
	var infos []os.FileInfo
	for _, e := range entries {
		if info, err := e.Info(); err == nil && validID(e.Name()) && e.Name() != newest {
			infos = append(infos, info)
		}
	}
	slices.SortFunc(infos, func(a, b os.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	var total int64
	for i, info := range infos {
		if total += info.Size(); i >= keepSnapshots-1 || total > keepBytes {
			os.Remove(filepath.Join(s.dir, info.Name()))
		}
	}
}

// Sweep removes what a process that died left half written. Call it before the first Save.
func (s *Store) Sweep() error {
	left, err := filepath.Glob(filepath.Join(s.dir, "*"+tempSuffix))
	for _, f := range left {
		if e := os.Remove(f); e != nil {
			err = e
		}
	}
	return err
}

func validID(id string) bool {
	if len(id) != 16 {
		return false
	}
	_, err := hex.DecodeString(id)
	return err == nil
}

// Cursor is the opaque name of a place in a snapshot. It carries a checksum, because
// models copy them by hand.
func (s *Snapshot) Cursor(pos int64) string {
	body := s.id + "-" + strconv.FormatInt(pos, 36)
	return body + "-" + sum(body)
}

// CursorMax is no shorter than any cursor.
const CursorMax = 16 + 1 + 13 + 1 + 8

func sum(body string) string { return fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(body))) }

// Open finds the place that a cursor names. The query is what the caller gave beside
// the cursor: each of its fields (with omitempty, so only those given) must be as in
// the saved query. Errors are *rpc.Error with CodeInvalidCursor.
func (s *Store) Open(method, cursor string, query any) (*Snapshot, int64, error) {
	bad := func(format string, args ...any) error {
		return rpc.Errorf(CodeInvalidCursor, format, args...).
			WithHint("run the query again without cursor, and pass next_cursor on unchanged")
	}
	i := strings.LastIndexByte(cursor, '-')
	if i < 17 || len(cursor) > CursorMax || cursor[16] != '-' || sum(cursor[:i]) != cursor[i+1:] || !validID(cursor[:16]) {
		return nil, 0, bad("%q is not a cursor of this runtime, or was changed", cursor)
	}
	pos, err := strconv.ParseInt(cursor[17:i], 36, 64)
	if err != nil {
		return nil, 0, bad("%q is not a cursor of this runtime", cursor)
	}
	path := filepath.Join(s.dir, cursor[:16])
	f, err := os.Open(path)
	if os.IsNotExist(err) {
		return nil, 0, bad("the snapshot of this cursor is gone: the last %d queries are kept", keepSnapshots)
	}
	if err != nil {
		return nil, 0, rpc.Errorf(rpc.CodeInternal, "cannot open the snapshot of this cursor: %v", err)
	}
	snap := &Snapshot{id: cursor[:16], file: f, body: f}
	if err := snap.readHeader(); err != nil {
		f.Close()
		return nil, 0, bad("the snapshot of this cursor cannot be used: %v", err)
	}
	err = nil
	switch {
	case snap.head.Method != method:
		err = bad("this cursor belongs to ws.%s, not to ws.%s", snap.head.Method, method)
	case pos < 0 || pos > snap.end() || !snap.boundary(pos):
		err = bad("this cursor names no place in its snapshot")
	default:
		err = sameQuery(snap.head.Query, query, bad)
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	now := time.Now()
	_ = os.Chtimes(path, now, now) // for retain
	return snap, pos, nil
}

func (s *Snapshot) readHeader() error {
	r := bufio.NewReader(s.file)
	line, err := r.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("it is cut off")
	}
	if err := json.Unmarshal(line, &s.head); err != nil {
		return err
	}
	if s.head.Version != version {
		return fmt.Errorf("another version wrote it")
	}
	s.base = int64(len(line))
	if st, err := s.file.Stat(); err != nil || st.Size() != s.base+s.end() {
		return fmt.Errorf("it is cut off")
	}
	return nil
}

func sameQuery(saved json.RawMessage, query any, bad func(string, ...any) error) error {
	raw, err := json.Marshal(query)
	if err != nil {
		return err
	}
	var given, was map[string]json.RawMessage
	if err := json.Unmarshal(raw, &given); err != nil {
		return err
	}
	if err := json.Unmarshal(saved, &was); err != nil {
		return err
	}
	for name, v := range given {
		if !bytes.Equal(v, was[name]) {
			return bad("this cursor belongs to another query: %s was not %.60s", name, v)
		}
	}
	return nil
}

func (s *Snapshot) end() int64 { return s.head.Rows + s.head.Text }

// boundary says whether a page may begin at pos: at a row, or in the text at a code point.
func (s *Snapshot) boundary(pos int64) bool {
	if pos == 0 || pos == s.head.Rows || pos == s.end() {
		return true
	}
	var b [2]byte
	if _, err := s.body.ReadAt(b[:], s.base+pos-1); err != nil {
		return false
	}
	if pos < s.head.Rows {
		return b[0] == '\n'
	}
	return true // any byte: text that is not UTF-8 has no code points to respect
}

// Close releases the file of a snapshot that was opened by its cursor.
func (s *Snapshot) Close() error {
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

// Meta decodes what Save was given.
func (s *Snapshot) Meta(v any) error { return json.Unmarshal(s.head.Meta, v) }

// More says whether anything follows pos.
func (s *Snapshot) More(pos int64) bool { return pos < s.end() }

// Rows gives row after row from pos on to take, until the rows end or take says stop.
// It returns the place of the first row that was not taken.
func (s *Snapshot) Rows(pos int64, take func(row []byte) (taken bool, err error)) (int64, error) {
	if pos >= s.head.Rows {
		return pos, nil
	}
	r := bufio.NewReaderSize(io.NewSectionReader(s.body, s.base+pos, s.head.Rows-pos), 32<<10)
	for pos < s.head.Rows {
		line, err := r.ReadBytes('\n')
		if err != nil {
			return pos, fmt.Errorf("cannot read the snapshot: %w", err)
		}
		taken, err := take(line[:len(line)-1])
		if err != nil || !taken {
			return pos, err
		}
		pos += int64(len(line))
	}
	return pos, nil
}

// Text is the part of the text that follows pos and takes at most room bytes as the
// inside of a JSON string; whole lines where one fits. Bytes that are not UTF-8
// become U+FFFD, and lossy says so. The place returned is where it ends.
func (s *Snapshot) Text(pos int64, room int) (text string, lossy bool, next int64, err error) {
	if pos < s.head.Rows || pos >= s.end() {
		return "", false, pos, nil
	}
	// One escaped byte takes at least one byte; the four more complete the last code point.
	buf := make([]byte, min(int64(room)+utf8.UTFMax, s.end()-pos))
	if _, err := s.body.ReadAt(buf, s.base+pos); err != nil && err != io.EOF {
		return "", false, pos, fmt.Errorf("cannot read the snapshot: %w", err)
	}
	n := Fit(buf, room)
	if n < len(buf) || pos+int64(n) < s.end() {
		if i := bytes.LastIndexByte(buf[:n], '\n'); i >= 0 {
			n = i + 1
		}
	}
	buf = buf[:n]
	return string(bytes.ToValidUTF8(buf, []byte("\uFFFD"))), !utf8.Valid(buf), pos + int64(n), nil
}

// Fit is how many bytes of s fill at most room bytes inside a JSON string, as
// encoding/json writes it without HTML escaping. It never splits a code point.
func Fit(s []byte, room int) int {
	i := 0
	for i < len(s) {
		r, n := utf8.DecodeRune(s[i:])
		if room -= cost(r, n); room < 0 {
			break
		}
		i += n
	}
	return i
}

// cost is the length of a code point of n bytes inside a JSON string.
func cost(r rune, n int) int {
	switch {
	case r == '"', r == '\\', r == '\n', r == '\r', r == '\t', r == '\b', r == '\f':
		return 2
	case r < 0x20, r == '\u2028', r == '\u2029', r == utf8.RuneError && n == 1:
		return 6
	}
	return n
}

// Size is the length of v as JSON, as it will travel.
func Size(v any) (int, error) {
	var c counter
	e := json.NewEncoder(&c)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return 0, err
	}
	return int(c) - 1, nil // Encode adds a newline
}

type counter int

func (c *counter) Write(p []byte) (int, error) { *c += counter(len(p)); return len(p), nil }

// CheckBytes refuses budgets out of range.
func CheckBytes(n int) error {
	if n < MinBytes || n > MaxBytes {
		return rpc.Errorf(rpc.CodeInvalidRequest, "max_bytes must be from %d to %d, not %d", MinBytes, MaxBytes, n)
	}
	return nil
}

// TooSmall is the error for a row that does not even fit in its shortest form.
func TooSmall(maxBytes, needed int) error {
	return rpc.Errorf(rpc.CodeTooLarge, "the next row does not fit into max_bytes=%d", maxBytes).
		WithHint("increase max_bytes to at least %d", min(needed, MaxBytes))
}
