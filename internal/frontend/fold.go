package frontend

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// Bounds for cursor movements, so that no escape sequence can make much out of
// little.
const (
	maxColumn = 250 // that a movement to the right may reach; text may be longer
	maxUp     = 200 // rows that a movement up may cross
)

// fold turns what a program wrote for a terminal into what the terminal would show:
// escape sequences are gone, a carriage return lets the rest of its line overwrite the
// start (progress bars keep their final state), and the movements that progress bars
// of several lines make are followed. Nothing that a terminal would have kept in its
// scroll-back is lost: clearing the screen is ignored.
func fold(s string) string {
	if !strings.ContainsFunc(s, special) {
		return s
	}
	s = strings.ReplaceAll(s, "\r\n", "\n")
	if !strings.ContainsFunc(s, special) {
		return s
	}
	t := terminal{rows: make([][]rune, 1)}
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == 0x1b:
			n = t.escape(s[i:])
		case r == '\n':
			t.row++
			t.col = 0
			if t.row == len(t.rows) {
				t.rows = append(t.rows, nil)
			}
		case r == '\r':
			t.col = 0
		case r == '\b':
			t.col = max(t.col-1, 0)
		case r == '\t' || !special(r):
			t.put(r)
		}
		i += n
	}
	return t.String()
}

// special reports the control characters that a terminal does not print. C1 controls
// (U+0080 to U+009F) count: some terminals take U+009B for an escape sequence.
func special(r rune) bool {
	return r < ' ' && r != '\n' && r != '\t' || 0x7f <= r && r < 0xa0
}

// terminal is the text written so far and the place where the next rune goes.
type terminal struct {
	rows     [][]rune
	row, col int
}

func (t *terminal) String() string {
	var b strings.Builder
	for i, row := range t.rows {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(string(row))
	}
	return b.String()
}

func (t *terminal) put(r rune) {
	row := t.rows[t.row]
	for len(row) < t.col {
		row = append(row, ' ')
	}
	if t.col < len(row) {
		row[t.col] = r
	} else {
		row = append(row, r)
	}
	t.rows[t.row] = row
	t.col++
}

// escape obeys or ignores the sequence that s begins with, and returns its length
// (ECMA-48: CSI, OSC, DCS and the like, two-byte sequences).
func (t *terminal) escape(s string) int {
	if len(s) < 2 {
		return len(s)
	}
	switch c := s[1]; {
	case c == '[':
		i := 2
		for i < len(s) && 0x20 <= s[i] && s[i] <= 0x3f {
			i++
		}
		if i == len(s) {
			return i // cut off
		}
		if s[i] < 0x40 || s[i] > 0x7e {
			return i // no final byte: malformed, what follows is text
		}
		t.csi(s[2:i], s[i])
		return i + 1
	case strings.IndexByte("]PX^_", c) >= 0:
		// A string up to BEL or ST. Real ones hold no newline, and one that is never
		// ended must not swallow the output that follows.
		for i := 2; i < len(s); i++ {
			switch {
			case s[i] == '\a':
				return i + 1
			case s[i] == '\n':
				return i
			case s[i] == 0x1b:
				if i+1 < len(s) && s[i+1] == '\\' {
					return i + 2
				}
				return i
			}
		}
		return len(s)
	case 0x20 <= c && c <= 0x2f: // ESC, intermediate bytes, final byte (a character set)
		i := 2
		for i < len(s) && 0x20 <= s[i] && s[i] <= 0x2f {
			i++
		}
		if i < len(s) && 0x30 <= s[i] && s[i] <= 0x7e {
			i++
		}
		return i
	case 0x30 <= c && c <= 0x7e:
		return 2
	}
	return 1
}

func (t *terminal) csi(params string, final byte) {
	first, _, _ := strings.Cut(params, ";")
	n, err := strconv.Atoi(first)
	if err != nil {
		n = 0
	}
	count := max(n, 1)
	switch final {
	case 'A', 'F': // up
		t.row = max(t.row-min(count, maxUp), 0)
		if final == 'F' {
			t.col = 0
		}
	case 'B', 'E': // down, never below the last row
		t.row = min(t.row+count, len(t.rows)-1)
		if final == 'E' {
			t.col = 0
		}
	case 'C': // right
		t.col = max(t.col, min(t.col+count, maxColumn))
	case 'D': // left
		t.col = max(t.col-count, 0)
	case 'G': // to column
		t.col = min(count-1, maxColumn)
	case 'K': // erase in line
		row := t.rows[t.row]
		switch n {
		case 0:
			t.rows[t.row] = row[:min(t.col, len(row))]
		case 1:
			for i := range min(t.col+1, len(row)) {
				row[i] = ' '
			}
		case 2:
			t.rows[t.row] = row[:0]
		}
	case 'J': // erase below the cursor; clearing all of the screen is ignored
		if n == 0 {
			row := t.rows[t.row]
			t.rows[t.row] = row[:min(t.col, len(row))]
			t.rows = t.rows[:t.row+1]
		}
	}
}

// minRepeats is how often a line must come in a row to be counted instead of shown.
const minRepeats = 5

// collapse replaces runs of the same line by one and a count.
func collapse(s string) string {
	lines := strings.SplitAfter(s, "\n")
	run := 1
	longest := 1
	for i := 1; i < len(lines); i++ {
		if lines[i] == lines[i-1] && lines[i] != "" {
			run++
			longest = max(longest, run)
		} else {
			run = 1
		}
	}
	if longest < minRepeats {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(lines); {
		j := i + 1
		for j < len(lines) && lines[j] == lines[i] {
			j++
		}
		if j-i >= minRepeats && lines[i] != "" {
			b.WriteString(lines[i])
			b.WriteString("[the line above ")
			b.WriteString(strconv.Itoa(j - i - 1))
			b.WriteString(" more times]\n")
		} else {
			for _, l := range lines[i:j] {
				b.WriteString(l)
			}
		}
		i = j
	}
	return b.String()
}
