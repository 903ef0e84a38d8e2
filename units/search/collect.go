package search

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"mypr/internal/ospath"
)

// errStop ends a scan that has all it may keep.
var errStop = errors.New("the scan has reached its limit")

// maxRecord is how long a record may be before it is trimmed; maxString is what
// trimming leaves of a string in it.
const (
	maxRecord = 256 << 10
	maxString = 64 << 10
)

// splitter gives the length of the first whole record with its terminator, or 0.
type splitter func(b []byte) int

func splitLines(b []byte) int { return bytes.IndexByte(b, '\n') + 1 }
func splitNUL(b []byte) int   { return bytes.IndexByte(b, 0) + 1 }

// splitCounts: a path, NUL, a number, a newline. Paths may have newlines.
func splitCounts(b []byte) int {
	i := bytes.IndexByte(b, 0) + 1
	if i == 0 {
		return 0
	}
	j := splitLines(b[i:])
	if j == 0 {
		return 0
	}
	return i + j
}

// keeper turns a record, without its last byte, into a row and says how it counts.
// A row of nil drops the record. A path begins a new group of rows when it is not "".
type keeper func(record []byte) (row []byte, path string, result bool)

// collector takes the output of a program as it comes.
type collector struct {
	scan    *scan
	part    []byte   // of a record whose end has not come yet
	trim    *trimmer // while a record passes that is too long to keep whole
	rows    []byte   // JSON lines
	groups  []group
	results int64
	dropped int64
	stop    string // limit that was reached; "" when one result was enough
}

// group is the rows of one path; a program prints them together.
type group struct {
	path       string
	start, end int
}

// Write implements io.Writer.
func (c *collector) Write(p []byte) (int, error) {
	total := len(p)
	if c.trim != nil {
		n, done := c.trim.take(p)
		if p = p[n:]; !done {
			return total, nil
		}
		record, ok := c.trim.record()
		c.trim = nil
		if !ok {
			c.dropped++
		} else if err := c.take(record); err != nil {
			return 0, err
		}
	}
	c.part = append(c.part, p...)
	rest := c.part
	for n := c.scan.split(rest); n > 0; n = c.scan.split(rest) {
		if err := c.take(rest[:n-1]); err != nil {
			return 0, err
		}
		rest = rest[n:]
	}
	c.part = append(c.part[:0], rest...)
	if len(c.part) > maxRecord {
		c.trim = &trimmer{}
		c.trim.take(c.part)
		c.part = nil
	}
	return total, nil
}

func (c *collector) take(record []byte) error {
	row, path, result := c.scan.keep(record)
	if path != "" {
		c.groups = append(c.groups, group{path, len(c.rows), len(c.rows)})
	}
	if row == nil {
		return nil
	}
	if l := c.scan.limits.ScanLimit; result && l != nil && c.results >= *l {
		c.stop = stopScanLimit
		return errStop
	}
	if int64(len(c.rows)+len(row)+1) > c.scan.limits.ScanBytes {
		c.stop = stopScanBytes
		return errStop
	}
	c.rows = append(append(c.rows, row...), '\n')
	if len(c.groups) > 0 {
		c.groups[len(c.groups)-1].end = len(c.rows)
	}
	if result {
		c.results++
		if c.scan.first {
			return errStop
		}
	}
	return nil
}

// sorted is the rows in the order of their paths, as `rg --sort path` has it: names
// compared level by level. The program itself is not asked to sort, because that
// makes ripgrep use one thread.
func (c *collector) sorted() []byte {
	order := func(a, b group) int { return comparePaths(a.path, b.path) }
	if slices.IsSortedFunc(c.groups, order) || len(c.rows) == 0 {
		return c.rows
	}
	slices.SortStableFunc(c.groups, order)
	out := make([]byte, 0, len(c.rows))
	for _, g := range c.groups {
		out = append(out, c.rows[g.start:g.end]...)
	}
	return out
}

func comparePaths(a, b string) int {
	for i := 0; i < len(a) && i < len(b); i++ {
		if a[i] != b[i] {
			switch {
			case a[i] == '/':
				return -1
			case b[i] == '/':
				return 1
			}
			return cmp.Compare(a[i], b[i])
		}
	}
	return cmp.Compare(len(a), len(b))
}

// keepers

// cutPrefix marks a record that was trimmed.
const cutPrefix = `{"cut":true,`

// recordType is the "type" of a record of rg, which is its first field.
func recordType(record []byte) string {
	rest, ok := bytes.CutPrefix(record, []byte(cutPrefix))
	if !ok {
		rest, ok = bytes.CutPrefix(record, []byte{'{'})
	}
	if ok {
		rest, ok = bytes.CutPrefix(rest, []byte(`"type":"`))
	}
	if i := bytes.IndexByte(rest, '"'); ok && i >= 0 {
		return string(rest[:i])
	}
	return ""
}

// rgText is a string of rg: text, or base64 when it is not UTF-8.
type rgText struct {
	Text  *string `json:"text"`
	Bytes []byte  `json:"bytes"`
}

func (t rgText) String() string {
	if t.Text != nil {
		return *t.Text
	}
	return string(t.Bytes)
}

// keepMatches keeps rg's own records of matches and context as rows; they become
// rows of a result when their page is read.
func (s *Service) keepMatches(record []byte) ([]byte, string, bool) {
	switch recordType(record) {
	case "match":
		return record, "", true
	case "context":
		return record, "", false
	case "begin":
		var b struct {
			Data struct {
				Path rgText `json:"path"`
			} `json:"data"`
		}
		if json.Unmarshal(record, &b) == nil {
			return nil, b.Data.Path.String(), false
		}
	}
	return nil, "", false
}

func (s *Service) keepPath(record []byte) ([]byte, string, bool) {
	row, _ := s.display(string(record)).MarshalJSON()
	return row, string(record), true
}

// CountRow is one row of counts.
type CountRow struct {
	Path      ospath.Text `json:"path"`
	PathLossy bool        `json:"path_lossy,omitempty"`
	Count     int64       `json:"count"`
}

func (s *Service) keepCount(record []byte) ([]byte, string, bool) {
	path, num, _ := strings.Cut(string(record), "\x00")
	n, err := strconv.ParseInt(num, 10, 64)
	if err != nil {
		return nil, "", false
	}
	row, _ := json.Marshal(CountRow{Path: s.display(path), Count: n})
	return row, path, true
}

// keepNothing is for programs that answer by their exit code.
func keepNothing([]byte) ([]byte, string, bool) { return nil, "", false }

// trimmer shortens one JSON record as it passes: long strings lose their ends, and
// arrays their last elements once the record is long. What is left is JSON. A line of
// 50 MiB thus takes 64 KiB of memory.
type trimmer struct {
	out     []byte
	stack   []byte // open brackets
	str     bool   // inside a string
	escape  int    // bytes of an escape sequence still to come
	kept    int    // of this string
	cutting bool   // the rest of this string is left out
	skip    int    // depth of the array whose rest is left out; 0: none
}

// take reads up to the newline that ends the record.
func (t *trimmer) take(p []byte) (n int, done bool) {
	for i, b := range p {
		if b == '\n' { // inside a string it would be escaped
			return i + 1, true
		}
		t.byte(b)
	}
	return len(p), false
}

func (t *trimmer) emit(b byte) {
	if t.skip == 0 {
		t.out = append(t.out, b)
	}
}

func (t *trimmer) byte(b byte) {
	if t.str {
		t.stringByte(b)
		return
	}
	switch b {
	case '"':
		t.str, t.kept, t.cutting = true, 0, false
	case '{', '[':
		t.stack = append(t.stack, b)
	case '}', ']':
		if len(t.stack) == t.skip {
			t.skip = 0
		}
		if len(t.stack) > 0 {
			t.stack = t.stack[:len(t.stack)-1]
		}
	case ',':
		if t.skip == 0 && len(t.out) > maxRecord && len(t.stack) > 0 && t.stack[len(t.stack)-1] == '[' {
			t.skip = len(t.stack)
		}
	}
	t.emit(b)
}

func (t *trimmer) stringByte(b byte) {
	begins := t.escape == 0 // of a character or an escape
	switch {
	case t.escape > 0:
		t.escape--
		if t.escape == 0 && b == 'u' {
			t.escape = 4
		}
	case b == '"':
		t.str = false
		t.emit(b)
		return
	case b == '\\':
		t.escape = 1
	}
	// The cut comes where a character begins; in base64 that is anywhere, and maxString
	// is a multiple of its unit of four.
	if begins && t.kept >= maxString && utf8.RuneStart(b) {
		t.cutting = true
	}
	if !t.cutting {
		t.kept++
		t.emit(b)
	}
}

// record is what is left, marked. It is false for a record that is no use even so.
func (t *trimmer) record() ([]byte, bool) {
	if len(t.stack) != 0 || len(t.out) < 2 || t.out[0] != '{' || len(t.out) > 4*maxRecord {
		return nil, false
	}
	return append([]byte(cutPrefix), t.out[1:]...), true
}
