package ospath

import (
	"encoding/json"
	"fmt"
	"unicode/utf16"
	"unicode/utf8"
)

// Text is a string of arbitrary bytes with the JSON spelling described above.
type Text string

// MarshalJSON spells bytes that are not UTF-8 as lone surrogates.
func (t Text) MarshalJSON() ([]byte, error) {
	return appendQuoted(make([]byte, 0, len(t)+2), string(t)), nil
}

const hexDigits = "0123456789abcdef"

func appendQuoted(b []byte, s string) []byte {
	b = append(b, '"')
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
			i++
		case c < 0x20 || c == 0x7f:
			b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
			i++
		case c < utf8.RuneSelf:
			b = append(b, c)
			i++
		default:
			r, n := utf8.DecodeRuneInString(s[i:])
			if r == utf8.RuneError && n == 1 {
				b = append(b, '\\', 'u', 'd', 'c', hexDigits[c>>4], hexDigits[c&15])
			} else {
				b = append(b, s[i:i+n]...)
			}
			i += n
		}
	}
	return append(b, '"')
}

// UnmarshalJSON accepts what MarshalJSON and Python's json.dumps write. A lone
// surrogate that stands for no byte is refused: no file can have that name.
func (t *Text) UnmarshalJSON(raw []byte) error {
	if string(raw) == "null" {
		return nil
	}
	if len(raw) < 2 || raw[0] != '"' {
		return fmt.Errorf("a string is needed, not %.40s", raw)
	}
	raw = raw[1 : len(raw)-1]
	b := make([]byte, 0, len(raw))
	for i := 0; i < len(raw); {
		// In one piece up to what is special.
		plain := i
		for i < len(raw) && raw[i] != '\\' && raw[i] != 0xed {
			i++
		}
		b = append(b, raw[plain:i]...)
		if i == len(raw) {
			break
		}
		if raw[i] != '\\' {
			// A JSON writer that does not escape may put the three bytes of a lone surrogate here.
			if i+2 < len(raw) && raw[i] == 0xed && raw[i+1] >= 0xb2 && raw[i+1] <= 0xb3 && raw[i+2]&0xc0 == 0x80 {
				r := rune(0xd000) | rune(raw[i+1]&0x3f)<<6 | rune(raw[i+2]&0x3f)
				if c, ok := escapedByte(r); ok {
					b = append(b, c)
					i += 3
					continue
				}
			}
			b = append(b, raw[i])
			i++
			continue
		}
		switch e := raw[i+1]; e {
		case 'u':
			r := hex4(raw[i+2:])
			i += 6
			if utf16.IsSurrogate(r) {
				if i+6 <= len(raw) && raw[i] == '\\' && raw[i+1] == 'u' {
					if p := utf16.DecodeRune(r, hex4(raw[i+2:])); p != utf8.RuneError {
						b = utf8.AppendRune(b, p)
						i += 6
						continue
					}
				}
				c, ok := escapedByte(r)
				if !ok {
					return fmt.Errorf("the lone surrogate U+%04X stands for no byte", r)
				}
				b = append(b, c)
				continue
			}
			b = utf8.AppendRune(b, r)
			continue
		case 'b':
			b = append(b, '\b')
		case 'f':
			b = append(b, '\f')
		case 'n':
			b = append(b, '\n')
		case 'r':
			b = append(b, '\r')
		case 't':
			b = append(b, '\t')
		default: // quote, backslash, solidus
			b = append(b, e)
		}
		i += 2
	}
	*t = Text(b)
	return nil
}

// UnmarshalText makes Text usable as the key of a map: encoding/json asks for this
// method, then calls UnmarshalJSON with the key as it was written.
func (t *Text) UnmarshalText(b []byte) error {
	*t = Text(b)
	return nil
}

// escapedByte is the byte that a code point of PEP 383 stands for.
func escapedByte(r rune) (byte, bool) {
	if r < 0xdc80 || r > 0xdcff {
		return 0, false
	}
	return byte(r), true
}

// hex4 reads four hex digits; the JSON decoder has checked them.
func hex4(b []byte) (r rune) {
	for _, c := range b[:4] {
		r <<= 4
		switch {
		case c <= '9':
			r |= rune(c - '0')
		default:
			r |= rune(c|0x20-'a') + 10
		}
	}
	return r
}

// List is one name or a list of names: "src" and ["src"] mean the same.
type List []Text

// UnmarshalJSON accepts a string, a list of strings or null.
func (l *List) UnmarshalJSON(raw []byte) error {
	if string(raw) == "null" {
		return nil
	}
	if len(raw) > 0 && raw[0] == '"' {
		var t Text
		if err := t.UnmarshalJSON(raw); err != nil {
			return err
		}
		*l = List{t}
		return nil
	}
	var all []Text
	if err := json.Unmarshal(raw, &all); err != nil {
		return fmt.Errorf("a string or a list of strings is needed: %w", err)
	}
	*l = all
	return nil
}

// Strings are the elements as plain strings.
func (l List) Strings() []string {
	out := make([]string, len(l))
	for i, t := range l {
		out[i] = string(t)
	}
	return out
}
