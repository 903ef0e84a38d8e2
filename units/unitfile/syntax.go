package unitfile

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// File is one unit file or drop-in.
type File struct {
	Path string // for messages and spec.Unit.Source
	Data []byte
}

// MaxSize bounds one file; systemd has the same bound for one line.
const MaxSize = 1 << 20

// assignment is one "Key=value" with its place.
type assignment struct {
	section, key, value string
	file                string
	line                int // of the key, when the value goes over several
}

const blanks = " \t\r"

// lex splits a file into assignments. Comments (# and ;) may stand between the lines
// of a continued value; the backslash that continues a line becomes a space.
func lex(f File) ([]assignment, error) {
	fail := func(line int, format string, args ...any) ([]assignment, error) {
		return nil, &Error{File: f.Path, Line: line, Err: fmt.Errorf(format, args...)}
	}
	if len(f.Data) > MaxSize {
		return fail(0, "the file has %d bytes, more than %d", len(f.Data), MaxSize)
	}
	var out []assignment
	section := ""
	var logical strings.Builder
	first := 0 // line number of the logical line, 0: none begun
	data := bytes.TrimPrefix(f.Data, []byte("\uFEFF"))
	for n := 1; len(data) > 0 || first > 0; n++ {
		var raw []byte
		raw, data, _ = bytes.Cut(data, []byte("\n"))
		if !utf8.Valid(raw) || bytes.IndexByte(raw, 0) >= 0 {
			return fail(n, "the line is not valid UTF-8 text")
		}
		line := strings.TrimLeft(string(raw), blanks)
		if line != "" && (line[0] == '#' || line[0] == ';') {
			if len(data) > 0 || first == 0 {
				continue
			}
			line = "" // the file ends inside a continuation
		}
		if first == 0 {
			first = n
		}
		line = strings.TrimRight(line, "\r")
		if continues(line) {
			logical.WriteString(line[:len(line)-1])
			logical.WriteByte(' ')
			if len(data) > 0 {
				continue
			}
		} else {
			logical.WriteString(line)
		}
		text, at := strings.Trim(logical.String(), blanks), first
		logical.Reset()
		first = 0
		switch {
		case text == "":
		case text[0] == '[':
			if text[len(text)-1] != ']' || len(text) < 3 {
				return fail(at, "bad section header %q", text)
			}
			section = text[1 : len(text)-1]
		default:
			key, value, ok := strings.Cut(text, "=")
			key = strings.TrimRight(key, blanks)
			switch {
			case !ok:
				return fail(at, "%q is neither an assignment (Key=value) nor a section header", shorten(text))
			case key == "":
				return fail(at, "the key before = is missing")
			case section == "":
				return fail(at, "%s= stands before any section header", key)
			}
			out = append(out, assignment{section, key, strings.Trim(value, blanks), f.Path, at})
		}
	}
	return out, nil
}

// continues reports whether line ends in a backslash that is not itself escaped.
func continues(line string) bool {
	n := len(line) - len(strings.TrimRight(line, `\`))
	return n%2 == 1
}

func shorten(s string) string {
	if len(s) > 60 {
		return strings.ToValidUTF8(s[:60], "") + "…"
	}
	return s
}

// nextWord takes the first word off s. Words are separated by blanks; single and
// double quotes keep blanks and are removed, wherever in the word they stand, and C
// escapes are decoded inside and outside of them; what is no escape sequence stays as
// it is and goes through bad, as it does in systemd. ok is false when there is no word.
func nextWord(s string, bad func(escape string)) (word, rest string, ok bool, err error) {
	s = strings.TrimLeft(s, blanks+"\n")
	if s == "" {
		return "", "", false, nil
	}
	var b strings.Builder
	var quote byte
	for i := 0; i < len(s); {
		switch c := s[i]; {
		case c == '\\':
			r, n := unescape(s[i:])
			if n == 0 {
				r, n = s[i:i+1], 1
				bad(s[i:min(i+2, len(s))])
			}
			b.WriteString(r)
			i += n
			continue
		case quote != 0 && c == quote:
			quote = 0
		case quote != 0:
			b.WriteByte(c)
		case c == '"' || c == '\'':
			quote = c
		case strings.IndexByte(blanks+"\n", c) >= 0:
			return b.String(), s[i:], true, nil
		default:
			b.WriteByte(c)
		}
		i++
	}
	if quote != 0 {
		return "", "", false, fmt.Errorf("the quote %c is not closed", quote)
	}
	return b.String(), "", true, nil
}

// words splits s completely.
func words(s string, bad func(escape string)) ([]string, error) {
	var out []string
	for {
		w, rest, ok, err := nextWord(s, bad)
		if err != nil || !ok {
			return out, err
		}
		out = append(out, w)
		s = rest
	}
}

// unescape decodes the escape sequence at the start of s: what it stands for, and its
// length, which is 0 when it is none.
func unescape(s string) (string, int) {
	if len(s) < 2 {
		return "", 0
	}
	if i := strings.IndexByte(`abfnrtvs\"'`, s[1]); i >= 0 {
		return "\a\b\f\n\r\t\v \\\"'"[i : i+1], 2
	}
	switch s[1] {
	case 'x':
		return numeric(s, 2, 2, 16)
	case 'u':
		return numeric(s, 2, 4, 16)
	case 'U':
		return numeric(s, 2, 8, 16)
	}
	return numeric(s, 1, 3, 8)
}

// numeric decodes digits characters of s from start: a byte, or for \u and \U a code
// point. No string can hold the zero byte.
func numeric(s string, start, digits, base int) (string, int) {
	if len(s) < start+digits {
		return "", 0
	}
	n, err := strconv.ParseUint(s[start:start+digits], base, 32)
	switch {
	case err != nil || n == 0:
		return "", 0
	case digits <= 3 && n <= 255:
		return string([]byte{byte(n)}), start + digits
	case digits > 3 && n <= utf8.MaxRune && utf8.ValidRune(rune(n)):
		return string(rune(n)), start + digits
	}
	return "", 0
}
