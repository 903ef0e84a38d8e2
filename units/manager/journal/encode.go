// Package journal keeps the output of executions: .mypr/runs/<id>.jsonl, one event a
// line, and .mypr/runs/<id>.idx, the byte offsets of the lines.
//
// It owns the format of both files, the cutting of text into events and the reading of
// pages. Which events exist and when one becomes visible is the manager's business.
//
// The index is a cache: missing, stale or damaged it is made again from the journal. A
// damaged line of a journal is served as a warning event in its place, so that cursors
// stay what they were; the file is never repaired.
package journal

import (
	"strconv"
	"unicode/utf8"

	"mypr/internal/api"
)

// MaxEvent bounds the encoded bytes of an event that is cut from text, so that every
// page budget (at least api.MinBytes, a quarter of it for the error summary) has room
// for the next event. Only an event whose artifacts or display id need more is larger;
// a page always takes its first event, whatever its size.
const MaxEvent = api.MinBytes*3/4 - 8

// maxDisplayID bounds display ids, which are repeated on each update.
const maxDisplayID = 200

// Batch collects events and cuts them into lines. Stream text that follows text of the
// same stream is joined with it first: a program that prints a character at a time must
// not cost a line for each.
type Batch struct {
	data []byte
	ends []int // of each line in data, its newline included
	open api.Event
	text []byte // of open, which is a stream event
}

// Add appends an event.
func (b *Batch) Add(e api.Event) {
	if e.Type != "stream" {
		b.flush()
		b.cut(&e, []byte(e.Text))
		return
	}
	if len(b.text) > 0 && (b.open.Stream != e.Stream || b.open.Raw != e.Raw) {
		b.flush()
	}
	if len(b.text) == 0 {
		b.open = e
		b.open.Text = ""
	}
	b.text = append(b.text, e.Text...)
}

// Empty reports whether nothing was added since Take.
func (b *Batch) Empty() bool { return len(b.data) == 0 && len(b.text) == 0 }

// Take returns the lines and where each ends, and empties the batch.
func (b *Batch) Take() (data []byte, ends []int) {
	b.flush()
	data, ends = b.data, b.ends
	b.data, b.ends = nil, nil
	return data, ends
}

func (b *Batch) flush() {
	if len(b.text) == 0 {
		return
	}
	b.cut(&b.open, b.text)
	b.text = b.text[:0]
	if cap(b.text) > 1<<20 {
		b.text = nil
	}
}

// cut writes one line, or as many as the text needs. Artifacts and the display id ride
// on the first.
func (b *Batch) cut(e *api.Event, text textBytes) {
	for first := true; first || len(text) > 0; first = false {
		start := len(b.data)
		b.data = append(b.data, `{"type":`...)
		b.data = appendString(b.data, e.Type)
		if e.Stream != "" {
			b.data = append(b.data, `,"stream":`...)
			b.data = appendString(b.data, e.Stream)
		}
		if e.Raw {
			b.data = append(b.data, `,"raw":true`...)
		}
		if e.Code != "" {
			b.data = append(b.data, `,"code":`...)
			b.data = appendString(b.data, e.Code)
		}
		if first {
			b.data = b.appendDisplay(e)
		}
		if e.Continues || !first && e.Type != "stream" {
			b.data = append(b.data, `,"continues":true`...)
		}
		if e.Time != 0 {
			b.data = append(b.data, `,"time":`...)
			b.data = strconv.AppendFloat(b.data, e.Time, 'f', 3, 64)
		}
		b.data = append(b.data, `,"text":"`...)
		// The line is closed by two bytes. An event that is over the bound without any
		// text (its artifacts did that) takes none, unless that would never end.
		room := MaxEvent - 2 - (len(b.data) - start)
		var n int
		b.data, n = appendText(b.data, text, room)
		if n == 0 && len(text) > 0 && !first {
			b.data, n = appendText(b.data, text, MaxEvent)
		}
		text = text[n:]
		b.data = append(b.data, "\"}\n"...)
		b.ends = append(b.ends, len(b.data))
	}
}

func (b *Batch) appendDisplay(e *api.Event) []byte {
	d := b.data
	if len(e.Artifacts) > 0 {
		d = append(d, `,"artifacts":[`...)
		for i, a := range e.Artifacts {
			if i > 0 {
				d = append(d, ',')
			}
			d = append(d, `{"mime":`...)
			d = appendString(d, a.Mime)
			d = append(d, `,"path":`...)
			d = appendString(d, a.Path)
			d = append(d, `,"size":`...)
			d = strconv.AppendInt(d, a.Size, 10)
			d = append(d, '}')
		}
		d = append(d, ']')
	}
	if id := e.DisplayID; id != "" {
		if len(id) > maxDisplayID {
			id = id[:maxDisplayID] // encoding replaces a character that this cuts in two
		}
		d = append(d, `,"display_id":`...)
		d = appendString(d, id)
	}
	if e.Update {
		d = append(d, `,"update":true`...)
	}
	return d
}

// textBytes is the text of an event, whichever way it is held.
type textBytes = []byte

func appendString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	dst, _ = appendText(dst, []byte(s), 1<<31-1)
	return append(dst, '"')
}

const hex = "0123456789abcdef"

// appendText appends as much of text, encoded for a JSON string, as room has space
// for, in whole characters, and returns how many bytes of text that was. What is not
// UTF-8 becomes U+FFFD.
func appendText(dst, text []byte, room int) ([]byte, int) {
	i, clean := 0, 0 // text[clean:i] is copied as it is
	limit := len(dst) + room
	for i < len(text) {
		c := text[i]
		if c >= ' ' && c < utf8.RuneSelf && c != '"' && c != '\\' && c != 0x7f {
			if len(dst)+i-clean+1 > limit {
				break
			}
			i++
			continue
		}
		var enc [6]byte
		e, size := enc[:0], 1
		switch {
		case c == '"' || c == '\\':
			e = append(e, '\\', c)
		case c == '\n':
			e = append(e, '\\', 'n')
		case c == '\r':
			e = append(e, '\\', 'r')
		case c == '\t':
			e = append(e, '\\', 't')
		case c < utf8.RuneSelf:
			e = append(e, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		default:
			var r rune
			r, size = utf8.DecodeRune(text[i:])
			e = utf8.AppendRune(e, r) // RuneError for bad bytes
		}
		if len(dst)+i-clean+len(e) > limit {
			break
		}
		dst = append(dst, text[clean:i]...)
		dst = append(dst, e...)
		i += size
		clean = i
	}
	return append(dst, text[clean:i]...), i
}

// Fit returns how many bytes of text, in whole characters, fit into room bytes of a
// JSON string.
func Fit(text string, room int) int {
	if 6*len(text) <= room {
		return len(text)
	}
	_, n := appendText(make([]byte, 0, room), []byte(text), room)
	return n
}
