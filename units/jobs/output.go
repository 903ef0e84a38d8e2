package jobs

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sort"
	"sync"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
)

// Streams of a job. A pty has only stdout. The empty stream means both, in the order
// in which they were read.
const (
	stdout = "stdout"
	stderr = "stderr"
)

// errorFlag marks an entry of the index as the start of a piece of stderr; the rest of
// the number is its offset in the output file.
const errorFlag = 1 << 63

// chunk is what one system call may move at most: long enough for speed, short enough
// that readers of the other stream do not wait.
const chunk = 1 << 20

// segment is a run of bytes of one stream in the output file; the next one, or the end
// of the file, ends it.
type segment struct {
	start int64
	err   bool
}

// output is what a job wrote: the file jobs/<id>.out with the bytes of both streams in
// the order they were read, and jobs/<id>.idx with the offset at which each change of
// stream happened (8 bytes each, little endian, errorFlag for stderr). A job that
// wrote nothing has neither file, one that never wrote to stderr has no index.
//
// The kernel moves the bytes of a pipe into the file (splice(2)), in one system call
// that either leaves them in the pipe or puts them into the file, and the index entry
// of a piece is written before the piece. So a manager that is killed at any moment
// leaves files from which its successor can go on without a lost or doubled byte.
// Terminals get the same by other means: see readTerminal.
type output struct {
	base  string // path without suffix
	limit int64

	wmu      sync.Mutex // held by the pump that writes; guards the fields below
	file     *os.File
	idx      *os.File
	noSplice bool
	window   mapping // of a terminal
	filled   int64   // of a terminal: up to here the file has filling, or output
	unmapped bool    // the filesystem cannot map it

	mu      sync.Mutex // guards the fields below; writers of size and segs hold wmu too
	segs    []segment  // never changed in place
	size    int64
	dropped int64 // bytes over the limit
	unsaved int64 // bytes that the disk refused
	failure error // why the disk refused
	wake    chan struct{}
}

func newOutput(base string, limit int64) *output { return &output{base: base, limit: limit} }

// load finds out what is on disk. It is for a job that this manager did not start; tty:
// for one with a terminal that may have been cut off.
func (o *output) load(tty bool) error {
	st, err := os.Stat(o.base + ".out")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	o.size = st.Size()
	if tty {
		if err := o.trim(); err != nil {
			return err
		}
	}
	raw, err := os.ReadFile(o.base + ".idx")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for ; len(raw) >= 8; raw = raw[8:] {
		n := binary.LittleEndian.Uint64(raw)
		s := segment{int64(n &^ errorFlag), n&errorFlag != 0}
		if s.start > o.size || (len(o.segs) > 0 && s.start < o.segs[len(o.segs)-1].start) {
			return fmt.Errorf("%s.idx is damaged", o.base)
		}
		o.segs = append(o.segs, s)
	}
	return nil
}

// pending reports what a descriptor has: data, its end, or nothing yet.
func pending(fd int) (data, end bool) {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(p, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil || p[0].Revents&unix.POLLNVAL != 0 {
			return false, true
		}
		if n == 0 {
			return false, false
		}
		return p[0].Revents&unix.POLLIN != 0, p[0].Revents&unix.POLLIN == 0
	}
}

// take moves what a descriptor has now into the file, or drops it when there is no
// room for it. It returns the number of bytes moved, and true at the end of the stream.
// With neither there was nothing to move.
func (o *output) take(fd int, isErr, tty bool) (n int, end bool) {
	data, ended := pending(fd)
	if !data {
		return 0, ended
	}
	o.wmu.Lock()
	defer o.wmu.Unlock()
	room := o.limit - o.size
	if o.failure != nil || room <= 0 {
		return o.drop(fd)
	}
	if err := o.open(isErr); err != nil {
		o.fail(err)
		return o.drop(fd)
	}
	n, end, err := o.move(fd, int(min(room, chunk)), tty)
	if err != nil {
		o.fail(err)
		if n == 0 && !end {
			return o.drop(fd)
		}
	}
	o.mu.Lock()
	o.size += int64(n)
	o.broadcast()
	o.mu.Unlock()
	return n, end
}

// open makes the files and begins a segment of the stream. It runs with wmu held.
func (o *output) open(isErr bool) error {
	if o.file == nil {
		f, err := os.OpenFile(o.base+".out", os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		o.file = f
	}
	last := segment{}
	if len(o.segs) > 0 {
		last = o.segs[len(o.segs)-1]
	}
	if last.err == isErr {
		return nil
	}
	if o.idx == nil {
		f, err := os.OpenFile(o.base+".idx", os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		o.idx = f
	}
	segs := o.segs
	if len(segs) > 0 && last.start == o.size { // it stayed empty
		segs = slices.Clone(segs[:len(segs)-1])
	}
	n := uint64(o.size)
	if isErr {
		n |= errorFlag
	}
	if _, err := o.idx.WriteAt(binary.LittleEndian.AppendUint64(nil, n), int64(8*len(segs))); err != nil {
		return err
	}
	o.mu.Lock()
	o.segs = append(segs, segment{o.size, isErr})
	o.mu.Unlock()
	return nil
}

// buffers are for what splice cannot do.
var buffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

// move runs with wmu held.
func (o *output) move(fd, most int, tty bool) (int, bool, error) {
	if !tty && !o.noSplice {
		at := o.size
		for {
			n, err := unix.Splice(fd, nil, int(o.file.Fd()), &at, most, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
			switch err {
			case unix.EINTR:
				continue
			case unix.EAGAIN:
				return 0, false, nil
			case unix.EINVAL: // a filesystem, or a descriptor, that cannot
				o.noSplice = true
			default:
				return int(max(n, 0)), err == nil && n == 0, err
			}
			break
		}
	}
	if tty && !o.unmapped {
		n, end, usable, err := o.readTerminal(fd, most)
		if usable {
			return n, end, err
		}
		o.unmapped = true
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	n, end := read(fd, (*buf)[:min(most, len(*buf))])
	if n == 0 {
		return 0, end, nil
	}
	if w, err := o.file.WriteAt((*buf)[:n], o.size); err != nil {
		o.mu.Lock()
		o.unsaved += int64(n - w)
		o.mu.Unlock()
		return w, false, err
	}
	return n, false, nil
}

// read reports EIO, which a pty master answers when nobody has the terminal open any
// more, and every other error as the end.
func read(fd int, p []byte) (n int, end bool) {
	for {
		n, err := unix.Read(fd, p)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return 0, false
		case err != nil || n == 0:
			return 0, true
		}
		return n, false
	}
}

// drop runs with wmu held.
func (o *output) drop(fd int) (int, bool) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	n, end := read(fd, *buf)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failure != nil {
		o.unsaved += int64(n)
	} else {
		if o.dropped == 0 && n > 0 {
			o.broadcast()
		}
		o.dropped += int64(n)
	}
	return n, end
}

func (o *output) fail(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failure == nil {
		o.failure = err
		o.broadcast()
	}
}

// broadcast wakes everybody who waits on changed. It runs with mu held.
func (o *output) broadcast() {
	if o.wake != nil {
		close(o.wake)
		o.wake = nil
	}
}

// changed is closed when there is more output than now.
func (o *output) changed() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.wake == nil {
		o.wake = make(chan struct{})
	}
	return o.wake
}

// close gives the files back. What they hold can still be read.
func (o *output) close() error {
	o.wmu.Lock()
	defer o.wmu.Unlock()
	var errs []error
	o.window.close()
	if o.file != nil && o.filled > o.size {
		errs = append(errs, o.file.Truncate(o.size))
		o.filled = 0
	}
	for _, f := range []*os.File{o.file, o.idx} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	o.file, o.idx = nil, nil
	return errors.Join(errs...)
}

// stats is how much there is.
func (o *output) stats() (size, dropped, unsaved int64, failure error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.size, o.dropped, o.unsaved, o.failure
}

// piece is a range of the output file.
type piece struct{ at, n int64 }

// page is a part of a stream.
type page struct {
	data []byte
	text string
	next int64 // where the following page begins

	pieces []piece // of the file that data is made of
	more   bool    // there is more at once
}

// page reads up to limit bytes of a stream from an offset of the output file. Unless
// ended, a character at the end of what there is that is not whole yet stays for the
// next page. The text has U+FFFD for what is not UTF-8 and keeps to the limit too; a
// limit under utf8.UTFMax may have no room for the next character.
func (o *output) page(from int64, stream string, limit int, ended bool) (page, error) {
	o.mu.Lock()
	size, segs := o.size, o.segs
	o.mu.Unlock()
	if from > size {
		return page{}, errCursor
	}
	pieces, more := o.pieces(segs, size, from, stream, int64(limit))
	p := page{next: size, more: more}
	if len(pieces) == 0 {
		return p, nil
	}
	f, err := os.Open(o.base + ".out")
	if err != nil {
		return page{}, err
	}
	defer f.Close()
	for _, c := range pieces {
		was := len(p.data)
		p.data = append(p.data, make([]byte, c.n)...)
		if _, err := f.ReadAt(p.data[was:], c.at); err != nil {
			return page{}, fmt.Errorf("read %s.out: %w", o.base, err)
		}
	}
	held := 0
	if more || !ended {
		held = incomplete(p.data)
	}
	var keep int
	p.text, keep = toText(p.data[:len(p.data)-held], limit)
	if keep < len(p.data) {
		p.next = position(pieces, int64(keep))
		p.more = more || keep+held < len(p.data)
		p.data = p.data[:keep]
	} else if more {
		last := pieces[len(pieces)-1]
		p.next = last.at + last.n
	}
	p.pieces = pieces
	for left, i := int64(len(p.data)), 0; i < len(pieces); i++ {
		if pieces[i].n = min(pieces[i].n, left); left == 0 {
			p.pieces = pieces[:i]
			break
		}
		left -= pieces[i].n
	}
	return p, nil
}

// pieces lists where the next bytes of a stream are, and whether there are even more.
func (o *output) pieces(segs []segment, size, from int64, stream string, limit int64) (ps []piece, more bool) {
	i := sort.Search(len(segs), func(i int) bool { return segs[i].start > from }) - 1
	for at := from; at < size; i++ {
		end, isErr := size, i >= 0 && segs[i].err
		if i+1 < len(segs) {
			end = segs[i+1].start
		}
		if n := end - at; n > 0 && (stream == "" || (stream == stderr) == isErr) {
			if limit == 0 {
				return ps, true
			}
			if n > limit {
				return append(ps, piece{at, limit}), true
			}
			limit -= n
			ps = append(ps, piece{at, n})
		}
		at = end
	}
	return ps, false
}

// events are a range of the output, at most limit bytes, as journal events.
func (o *output) events(from, to int64, limit int) (events []api.Event, cut bool, err error) {
	o.mu.Lock()
	size, segs := o.size, o.segs
	o.mu.Unlock()
	to = min(to, size)
	if from >= to {
		return nil, false, nil
	}
	f, err := os.Open(o.base + ".out")
	if err != nil {
		return nil, false, err
	}
	defer f.Close()
	i := sort.Search(len(segs), func(i int) bool { return segs[i].start > from }) - 1
	at := from
	for ; at < to && limit > 0; i++ {
		end, name := to, stdout
		if i >= 0 && segs[i].err {
			name = stderr
		}
		if i+1 < len(segs) {
			end = min(end, segs[i+1].start)
		}
		if n := min(end-at, int64(limit)); n > 0 {
			b := make([]byte, n)
			if _, err := f.ReadAt(b, at); err != nil {
				return nil, false, fmt.Errorf("read %s.out: %w", o.base, err)
			}
			text, took := toText(b, limit)
			events = append(events, api.Event{Type: "stream", Stream: name, Text: text})
			limit -= len(text)
			if took < int(end-at) {
				return events, true, nil
			}
		}
		at = end
	}
	return events, at < to, nil
}

// position is the offset in the file after n bytes of the pieces.
func position(ps []piece, n int64) int64 {
	for _, c := range ps {
		if n <= c.n {
			return c.at + n
		}
		n -= c.n
	}
	last := ps[len(ps)-1]
	return last.at + last.n
}

// skip is the offset n bytes of a stream after another one.
func (o *output) skip(from int64, stream string, n int64) (int64, error) {
	o.mu.Lock()
	size, segs := o.size, o.segs
	o.mu.Unlock()
	if n == 0 {
		return from, nil
	}
	ps, _ := o.pieces(segs, size, from, stream, n)
	have := int64(0)
	for _, c := range ps {
		have += c.n
	}
	if from > size || have < n {
		return 0, errCursor
	}
	return position(ps, n), nil
}

// incomplete is the length of an unfinished character at the end.
func incomplete(b []byte) int {
	for n := 1; n <= min(utf8.UTFMax-1, len(b)); n++ {
		if c := b[len(b)-n]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}

// toText returns the text of as many bytes as fit, and how many those are.
func toText(b []byte, limit int) (string, int) {
	if len(b) <= limit && utf8.Valid(b) {
		return string(b), len(b)
	}
	out := make([]byte, 0, min(3*len(b), limit))
	for i := 0; i < len(b); {
		r, n := utf8.DecodeRune(b[i:])
		if len(out)+utf8.RuneLen(r) > limit {
			return string(out), i
		}
		out = utf8.AppendRune(out, r)
		i += n
	}
	return string(out), len(b)
}

func encodeBytes(b []byte) string { return base64.StdEncoding.EncodeToString(b) }
