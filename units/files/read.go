package files

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"image"
	_ "image/jpeg" // for image.DecodeConfig
	_ "image/png"
	"io"
	"os"
	"sync"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

// ReadParams of fs.read. Lines count from 1, EndLine is included. StartByte is an
// offset into the file (for an encoding other than UTF-8: into its text as UTF-8).
type ReadParams struct {
	Path      ospath.Text `json:"path"`
	StartLine int64       `json:"start_line"`
	EndLine   *int64      `json:"end_line"`
	StartByte *int64      `json:"start_byte"`
	MaxBytes  int         `json:"max_bytes"`
	Encoding  string      `json:"encoding"`
}

// ReadResult is one page of text. NextLine and NextByte say where the text after it
// begins, and are null at the end of the file; NextCursor has the same only when the
// limit cut the range that was asked for.
type ReadResult struct {
	Path       ospath.Text `json:"path"`
	Text       string      `json:"text"`
	StartLine  int64       `json:"start_line"`
	StartByte  int64       `json:"start_byte"`
	EndLine    int64       `json:"end_line"` // of the last line in Text, also when it is cut; start_line-1 when Text is empty
	TotalLines int64       `json:"total_lines"`
	NextLine   *int64      `json:"next_line"`
	NextByte   *int64      `json:"next_byte"`
	NextCursor *Place      `json:"next_cursor"`
	Truncated  bool        `json:"truncated"`
	Revision   string      `json:"revision"` // SHA-256 of the whole file, hex
	Size       int64       `json:"size"`
}

// Place is where the next page begins.
type Place struct {
	Line int64 `json:"line,omitempty"`
	Byte int64 `json:"byte"`
}

// Read returns lines of a text file.
func (s *Service) Read(ctx context.Context, p ReadParams) (*ReadResult, error) {
	switch {
	case p.StartLine < 1:
		return nil, invalid("start_line must be 1 or more, not %d", p.StartLine)
	case p.EndLine != nil && *p.EndLine < p.StartLine:
		return nil, invalid("end_line %d is before start_line %d", *p.EndLine, p.StartLine)
	case p.StartByte != nil && *p.StartByte < 0:
		return nil, invalid("start_byte must be 0 or more, not %d", *p.StartByte)
	case p.MaxBytes < utf8.UTFMax || p.MaxBytes > MaxReadBytes:
		return nil, invalid("max_bytes must be from %d to %d, not %d", utf8.UTFMax, MaxReadBytes, p.MaxBytes)
	}
	codec, err := codecFor(p.Encoding)
	if err != nil {
		return nil, err
	}
	f, st, err := s.openRegular("read", string(p.Path))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	name := s.root.Display(f.Name())
	limit := int64(MaxHashBytes)
	if codec != nil {
		limit = MaxEditBytes
	}
	if st.Size > limit {
		return nil, rpc.Errorf(rpc.CodeTooLarge, "cannot read %s: it has %d bytes, the limit is %d, because the revision covers the whole file", name, st.Size, limit).
			WithHint("await ws.fs.read_bytes(path, start_byte=...) reads any part of it")
	}
	sum := sha256.New()
	w := window{p: &p, out: make([]byte, 0, min(int64(p.MaxBytes), st.Size))}
	size, err := s.scan(ctx, f, st, func(chunk []byte, pos int64) {
		sum.Write(chunk)
		if codec == nil {
			w.take(chunk, pos)
		} else {
			w.out = append(w.out, chunk...)
		}
	})
	if err != nil {
		return nil, err
	}
	total := size
	if codec != nil {
		text, err := codec.decode(w.out)
		if err != nil {
			return nil, encodingError("read", name, err)
		}
		w = window{p: &p}
		w.take([]byte(text), 0)
		total = int64(len(text))
	}
	r, err := w.result(name, total)
	if err != nil {
		return nil, err
	}
	r.Path, r.Size, r.Revision = name, size, hex.EncodeToString(sum.Sum(nil))
	return r, nil
}

// buffers are for scan: large enough that the system calls do not count.
var buffers = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// scan reads a file to its end and makes sure that nobody changed it meanwhile.
func (s *Service) scan(ctx context.Context, f *os.File, before *unix.Stat_t, each func(chunk []byte, pos int64)) (int64, error) {
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	var pos int64
	for {
		n, err := f.Read(*b)
		if n > 0 {
			each((*b)[:n], pos)
			pos += int64(n)
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return pos, s.root.Error("read", f.Name(), err)
		}
		if ctx.Err() != nil {
			return pos, context.Cause(ctx)
		}
		if pos > before.Size && pos > MaxHashBytes {
			break // it grows as fast as it is read
		}
	}
	var after unix.Stat_t
	if err := fstat(f, &after); err != nil {
		return pos, s.root.Error("read", f.Name(), err)
	}
	// A file that was replaced by a rename, as all writers here do, is as whole as it was:
	// only its links have changed, and with them the time of the inode. Anything else that
	// changes that time may be a writer who put the time of the content back.
	same := after.Size == before.Size && after.Mtim == before.Mtim &&
		(after.Ctim == before.Ctim || after.Nlink != before.Nlink || !leadsTo(f.Name(), &after))
	if !same || pos != before.Size && !synthetic(f) {
		return pos, rpc.Errorf(rpc.CodeConflict, "cannot read %s: it was changed while it was read", s.root.Display(f.Name())).
			WithHint("read it again")
	}
	return pos, nil
}

// leadsTo reports whether a path is that of a file.
func leadsTo(path string, st *unix.Stat_t) bool {
	var now unix.Stat_t
	return unix.Stat(path, &now) == nil && now.Dev == st.Dev && now.Ino == st.Ino
}

// synthetic: the files of /proc and /sys have sizes that say nothing of their content.
func synthetic(f *os.File) bool {
	var st unix.Statfs_t
	if unix.Statfs(f.Name(), &st) != nil {
		return false
	}
	switch st.Type {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC:
		return true
	}
	return false
}

// window picks the wanted part out of a file that passes by.
type window struct {
	p       *ReadParams
	out     []byte // at most MaxBytes from start on
	started bool
	start   int64 // offset of out
	line    int64 // lines before start, or so far
	lines   int64 // newlines in all
	last    byte
}

func (w *window) take(chunk []byte, pos int64) {
	if len(chunk) == 0 {
		return
	}
	w.last = chunk[len(chunk)-1]
	newlines := int64(bytes.Count(chunk, newline))
	defer func() { w.lines += newlines }()
	from := 0
	if !w.started {
		switch {
		case w.p.StartByte != nil:
			if *w.p.StartByte >= pos+int64(len(chunk)) {
				return
			}
			from = int(*w.p.StartByte - pos)
			w.line = w.lines + int64(bytes.Count(chunk[:from], newline))
		default:
			skip := w.p.StartLine - 1 - w.lines
			if newlines < skip || newlines == skip && skip > 0 && w.last == '\n' {
				return // the wanted line begins after this chunk
			}
			for ; skip > 0; skip-- {
				from += bytes.IndexByte(chunk[from:], '\n') + 1
			}
			w.line = w.p.StartLine - 1
		}
		w.started, w.start = true, pos+int64(from)
	}
	if room := w.p.MaxBytes - len(w.out); room > 0 {
		w.out = append(w.out, chunk[from:min(len(chunk), from+room)]...)
	}
}

var newline = []byte{'\n'}

func (w *window) result(name ospath.Text, size int64) (*ReadResult, error) {
	r := &ReadResult{TotalLines: w.lines}
	if size > 0 && w.last != '\n' {
		r.TotalLines++
	}
	if !w.started { // the wanted place is at or behind the end
		if w.p.StartByte != nil && *w.p.StartByte > size {
			return nil, invalid("start_byte %d is behind the end of %s, which has %d bytes", *w.p.StartByte, name, size).
				WithHint("the file may have become shorter: read it from the start")
		}
		w.start, w.line = size, max(w.p.StartLine-1, r.TotalLines)
		if w.p.StartByte != nil {
			w.line = w.lines
		}
	}
	r.StartLine, r.StartByte = w.line+1, w.start
	if w.p.StartByte != nil && w.p.StartLine != 1 && r.StartLine != w.p.StartLine {
		return nil, invalid("byte %d of %s is in line %d, not in line %d", w.start, name, r.StartLine, w.p.StartLine).
			WithHint("pass line and byte of one next_cursor, and compare revisions: the file may have changed")
	}
	out := w.out
	wanted := false // out holds all that was asked for
	if w.p.EndLine != nil {
		end := 0
		for n := *w.p.EndLine - w.line; n > 0; n-- {
			i := bytes.IndexByte(out[end:], '\n')
			if i < 0 {
				end = -1
				break
			}
			end += i + 1
		}
		if end >= 0 {
			out, wanted = out[:end], true
		}
	}
	if !wanted && w.start+int64(len(out)) < size {
		r.Truncated = true
		out = out[:len(out)-partialRune(out)]
	}
	if bad := invalidAt(out); bad >= 0 {
		at := w.start + int64(bad)
		if bad == 0 && w.p.StartByte != nil && !utf8.RuneStart(out[0]) {
			return nil, invalid("start_byte %d is inside a character", at).WithHint("pass the byte of next_cursor unchanged")
		}
		e := rpc.Errorf(CodeEncoding, "%s is not UTF-8: byte 0x%02x at offset %d, line %d", name, out[bad], at,
			w.line+1+int64(bytes.Count(out[:bad], newline)))
		return nil, e.WithHint("await ws.fs.read_bytes(path) reads any file; encoding=\"latin-1\" (or another) reads it as text")
	}
	newlines := int64(bytes.Count(out, newline))
	r.Text, r.EndLine = string(out), r.StartLine+newlines
	if len(out) == 0 || out[len(out)-1] == '\n' {
		r.EndLine--
	}
	if next := w.start + int64(len(out)); next < size {
		line := r.StartLine + newlines
		r.NextLine, r.NextByte = &line, &next
		if r.Truncated {
			r.NextCursor = &Place{Line: line, Byte: next}
		}
	}
	return r, nil
}

// partialRune is the length of a code point at the end of b that is not all there.
func partialRune(b []byte) int {
	for i := 1; i <= min(utf8.UTFMax-1, len(b)); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-i:]) {
				return i
			}
			return 0
		}
	}
	return 0
}

// invalidAt is the offset of the first byte that is not UTF-8, or -1.
func invalidAt(b []byte) int {
	if utf8.Valid(b) {
		return -1
	}
	for i := 0; ; {
		r, n := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && n <= 1 {
			return i
		}
		i += n
	}
}

// ReadBytesParams of fs.read_bytes.
type ReadBytesParams struct {
	Path      ospath.Text `json:"path"`
	StartByte int64       `json:"start_byte"`
	MaxBytes  int         `json:"max_bytes"`
}

// ReadBytesResult has the bytes as base64, as encoding/json writes []byte.
type ReadBytesResult struct {
	Path       ospath.Text `json:"path"`
	Data       []byte      `json:"data_base64"`
	StartByte  int64       `json:"start_byte"`
	NextCursor *Place      `json:"next_cursor"`
	Truncated  bool        `json:"truncated"`
	Revision   *string     `json:"revision"` // null above MaxHashBytes
	Size       int64       `json:"size"`
}

// ReadBytes returns a part of any regular file.
func (s *Service) ReadBytes(ctx context.Context, p ReadBytesParams) (*ReadBytesResult, error) {
	switch {
	case p.StartByte < 0:
		return nil, invalid("start_byte must be 0 or more, not %d", p.StartByte)
	case p.MaxBytes < 1 || p.MaxBytes > MaxReadBytes:
		return nil, invalid("max_bytes must be from 1 to %d, not %d", MaxReadBytes, p.MaxBytes)
	}
	f, st, err := s.openRegular("read", string(p.Path))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := &ReadBytesResult{Path: s.root.Display(f.Name()), Data: []byte{}, StartByte: p.StartByte, Size: st.Size}
	if st.Size > MaxHashBytes {
		r.Data = make([]byte, min(int64(p.MaxBytes), max(0, st.Size-p.StartByte)))
		if _, err := io.ReadFull(io.NewSectionReader(f, p.StartByte, int64(len(r.Data))), r.Data); err != nil {
			return nil, s.root.Error("read", f.Name(), err)
		}
	} else {
		sum := sha256.New()
		r.Size, err = s.scan(ctx, f, st, func(chunk []byte, pos int64) {
			sum.Write(chunk)
			from := min(max(0, p.StartByte-pos), int64(len(chunk)))
			if room := p.MaxBytes - len(r.Data); room > 0 {
				r.Data = append(r.Data, chunk[from:min(int64(len(chunk)), from+int64(room))]...)
			}
		})
		if err != nil {
			return nil, err
		}
		rev := hex.EncodeToString(sum.Sum(nil))
		r.Revision = &rev
	}
	if next := p.StartByte + int64(len(r.Data)); next < r.Size {
		r.NextCursor, r.Truncated = &Place{Byte: next}, true
	}
	return r, nil
}

// ImageParams of fs.image.
type ImageParams struct {
	Path     ospath.Text `json:"path"`
	MaxBytes int         `json:"max_bytes"`
}

// ImageResult is a whole image file.
type ImageResult struct {
	Path     ospath.Text `json:"path"`
	Mime     string      `json:"mime"` // image/png or image/jpeg, from the content
	Data     []byte      `json:"data_base64"`
	Width    int         `json:"width"`
	Height   int         `json:"height"`
	Size     int64       `json:"size"`
	Revision string      `json:"revision"`
}

// maxImageBytes keeps base64 of an image well within a frame.
const maxImageBytes = 16 << 20

// Image loads a PNG or JPEG. The file's name does not matter.
func (s *Service) Image(ctx context.Context, p ImageParams) (*ImageResult, error) {
	if p.MaxBytes < 1 || p.MaxBytes > maxImageBytes {
		return nil, invalid("max_bytes must be from 1 to %d, not %d", maxImageBytes, p.MaxBytes)
	}
	f, st, err := s.openRegular("load", string(p.Path))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	name := s.root.Display(f.Name())
	if st.Size > int64(p.MaxBytes) {
		return nil, rpc.Errorf(rpc.CodeTooLarge, "cannot load %s: it has %d bytes, max_bytes is %d", name, st.Size, p.MaxBytes).
			WithHint("make a smaller copy and load that; images over 2 MiB are not shown inline")
	}
	data, rev, err := s.slurp(ctx, f, st)
	if err != nil {
		return nil, err
	}
	config, format, err := image.DecodeConfig(bytes.NewReader(data))
	if err != nil {
		return nil, invalid("cannot load %s: it is no PNG or JPEG (%v)", name, err).WithHint("convert it to PNG first")
	}
	return &ImageResult{Path: name, Mime: "image/" + format, Data: data, Width: config.Width, Height: config.Height,
		Size: int64(len(data)), Revision: rev}, nil
}

// slurp reads a whole file with its revision.
func (s *Service) slurp(ctx context.Context, f *os.File, st *unix.Stat_t) ([]byte, string, error) {
	data := make([]byte, 0, st.Size)
	sum := sha256.New()
	_, err := s.scan(ctx, f, st, func(chunk []byte, _ int64) {
		data = append(data, chunk...)
		sum.Write(chunk)
	})
	return data, hexOf(sum), err
}

func hexOf(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }

// revisionOf is the revision of content in memory.
func revisionOf(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
