package files

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/encoding"
	"golang.org/x/text/encoding/charmap"
	"golang.org/x/text/encoding/japanese"
	"golang.org/x/text/encoding/korean"
	"golang.org/x/text/encoding/simplifiedchinese"
	"golang.org/x/text/encoding/traditionalchinese"
	"golang.org/x/text/encoding/unicode"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

// codec turns the bytes of a file into text and back. Both ways are strict: what
// cannot be turned back into the same bytes is an error, so an edit never changes
// bytes that it was not asked to.
type codec struct {
	name   string
	encode func(text string) ([]byte, error)
	plain  func(data []byte) (string, error)
}

// codecFor knows encodings by Python's names. UTF-8
// needs no codec: nil.
func codecFor(name string) (*codec, error) {
	norm := strings.ReplaceAll(strings.ToLower(strings.TrimSpace(name)), "_", "-")
	switch norm {
	case "utf-8", "utf8", "u8":
		return nil, nil
	case "utf-8-sig", "utf8-sig":
		return &codec{name: norm,
			plain: func(b []byte) (string, error) {
				b = bytes.TrimPrefix(b, bom)
				if i := invalidAt(b); i >= 0 {
					return "", fmt.Errorf("byte 0x%02x at offset %d", b[i], i)
				}
				return string(b), nil
			},
			encode: func(s string) ([]byte, error) { return append(bytes.Clone(bom), s...), nil }}, nil
	case "ascii", "us-ascii":
		ascii := func(s string) error {
			for i := 0; i < len(s); i++ {
				if s[i] >= utf8.RuneSelf {
					return fmt.Errorf("byte 0x%02x at offset %d is not ASCII", s[i], i)
				}
			}
			return nil
		}
		return &codec{name: norm,
			plain:  func(b []byte) (string, error) { return string(b), ascii(string(b)) },
			encode: func(s string) ([]byte, error) { return []byte(s), ascii(s) }}, nil
	case "latin-1", "latin1", "iso-8859-1", "iso8859-1", "l1":
		return fromEncoding(norm, charmap.ISO8859_1), nil
	case "utf-16", "utf16":
		return utf16Codec(norm), nil
	case "utf-16-le", "utf-16le":
		return fromEncoding(norm, unicode.UTF16(unicode.LittleEndian, unicode.IgnoreBOM)), nil
	case "utf-16-be", "utf-16be":
		return fromEncoding(norm, unicode.UTF16(unicode.BigEndian, unicode.IgnoreBOM)), nil
	}
	e := tables(norm)
	if e == nil {
		return nil, invalid("the encoding %q is not known", name).
			WithHint("use utf-8, utf-8-sig, utf-16, ascii, latin-1, cp1252, iso-8859-15, koi8-r, shift_jis, gbk, … or ws.fs.read_bytes and write_bytes")
	}
	return fromEncoding(norm, e), nil
}

// tables are the encodings of golang.org/x/text under Python's names. (Its own indexes
// of names cost every start of the program 0.1 ms.)
func tables(name string) encoding.Encoding {
	if n, ok := strings.CutPrefix(name, "windows-"); ok {
		name = "cp" + n
	}
	if n, ok := strings.CutPrefix(name, "iso8859-"); ok {
		name = "iso-8859-" + n
	}
	switch name {
	case "cp437":
		return charmap.CodePage437
	case "cp850":
		return charmap.CodePage850
	case "cp852":
		return charmap.CodePage852
	case "cp855":
		return charmap.CodePage855
	case "cp858":
		return charmap.CodePage858
	case "cp860":
		return charmap.CodePage860
	case "cp862":
		return charmap.CodePage862
	case "cp863":
		return charmap.CodePage863
	case "cp865":
		return charmap.CodePage865
	case "cp866":
		return charmap.CodePage866
	case "cp874":
		return charmap.Windows874
	case "cp1250":
		return charmap.Windows1250
	case "cp1251":
		return charmap.Windows1251
	case "cp1252":
		return charmap.Windows1252
	case "cp1253":
		return charmap.Windows1253
	case "cp1254":
		return charmap.Windows1254
	case "cp1255":
		return charmap.Windows1255
	case "cp1256":
		return charmap.Windows1256
	case "cp1257":
		return charmap.Windows1257
	case "cp1258":
		return charmap.Windows1258
	case "iso-8859-2":
		return charmap.ISO8859_2
	case "iso-8859-3":
		return charmap.ISO8859_3
	case "iso-8859-4":
		return charmap.ISO8859_4
	case "iso-8859-5":
		return charmap.ISO8859_5
	case "iso-8859-6":
		return charmap.ISO8859_6
	case "iso-8859-7":
		return charmap.ISO8859_7
	case "iso-8859-8":
		return charmap.ISO8859_8
	case "iso-8859-9", "latin5":
		return charmap.ISO8859_9
	case "iso-8859-10":
		return charmap.ISO8859_10
	case "iso-8859-13":
		return charmap.ISO8859_13
	case "iso-8859-14":
		return charmap.ISO8859_14
	case "iso-8859-15", "latin9":
		return charmap.ISO8859_15
	case "iso-8859-16":
		return charmap.ISO8859_16
	case "koi8-r":
		return charmap.KOI8R
	case "koi8-u":
		return charmap.KOI8U
	case "mac-roman", "macintosh":
		return charmap.Macintosh
	case "shift-jis", "sjis", "cp932":
		return japanese.ShiftJIS
	case "euc-jp":
		return japanese.EUCJP
	case "iso-2022-jp":
		return japanese.ISO2022JP
	case "gbk", "gb2312", "cp936":
		return simplifiedchinese.GBK
	case "gb18030":
		return simplifiedchinese.GB18030
	case "big5":
		return traditionalchinese.Big5
	case "euc-kr", "cp949":
		return korean.EUCKR
	}
	return nil
}

var bom = []byte("\xef\xbb\xbf")

func fromEncoding(name string, e encoding.Encoding) *codec {
	return &codec{name: name,
		plain: func(b []byte) (string, error) {
			out, err := e.NewDecoder().Bytes(b)
			return string(out), err
		},
		encode: func(s string) ([]byte, error) { return e.NewEncoder().Bytes([]byte(s)) }}
}

// utf16Codec keeps the byte order that the file's mark tells, and writes new files as
// Python does: little-endian with a mark.
func utf16Codec(name string) *codec {
	order := unicode.LittleEndian
	c := &codec{name: name}
	c.plain = func(b []byte) (string, error) {
		if bytes.HasPrefix(b, []byte{0xfe, 0xff}) {
			order = unicode.BigEndian
		} else if !bytes.HasPrefix(b, []byte{0xff, 0xfe}) && len(b) > 0 {
			return "", errors.New("it has no byte order mark; say utf-16-le or utf-16-be")
		}
		out, err := unicode.UTF16(order, unicode.UseBOM).NewDecoder().Bytes(b)
		return string(out), err
	}
	c.encode = func(s string) ([]byte, error) {
		return unicode.UTF16(order, unicode.UseBOM).NewEncoder().Bytes([]byte(s))
	}
	return c
}

// decode is strict: the text encodes to the same bytes again.
func (c *codec) decode(data []byte) (string, error) {
	text, err := c.plain(data)
	if err != nil {
		return "", err
	}
	again, err := c.encode(text)
	if err != nil {
		return "", err
	}
	if !bytes.Equal(again, data) {
		i := 0
		for i < min(len(again), len(data)) && again[i] == data[i] {
			i++
		}
		return "", fmt.Errorf("the bytes at offset %d are not %s", i, c.name)
	}
	return text, nil
}

// decodeText is decode with nil meaning UTF-8.
func decodeText(c *codec, operation string, name ospath.Text, data []byte) (string, error) {
	if c == nil {
		if i := invalidAt(data); i >= 0 {
			return "", encodingError(operation, name, fmt.Errorf("byte 0x%02x at offset %d is not UTF-8", data[i], i))
		}
		return string(data), nil
	}
	text, err := c.decode(data)
	if err != nil {
		return "", encodingError(operation, name, err)
	}
	return text, nil
}

// encodeText turns text that came from Python into the bytes of a file.
func encodeText(c *codec, operation string, name ospath.Text, text string) ([]byte, error) {
	if i := invalidAt([]byte(text)); i >= 0 {
		return nil, rpc.Errorf(CodeEncoding, "cannot %s %s: the text has a lone surrogate (U+DC%02X), which no encoding has", operation, name, text[i]).
			WithHint("write bytes with await ws.fs.write_bytes(path, data)")
	}
	if c == nil {
		return []byte(text), nil
	}
	data, err := c.encode(text)
	if err != nil {
		return nil, rpc.Errorf(CodeEncoding, "cannot %s %s: the text cannot be written as %s: %v", operation, name, c.name, err).
			WithHint("use encoding=\"utf-8\", or leave out the characters that it does not have")
	}
	return data, nil
}

func encodingError(operation string, name ospath.Text, err error) error {
	return rpc.Errorf(CodeEncoding, "cannot %s %s as text: %v", operation, name, err).
		WithHint("name its encoding=, for example \"latin-1\", or use ws.fs.read_bytes and ws.fs.write_bytes")
}
