package journal

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"mypr/internal/api"
)

// Page is a run of events. Cursor is the index after the last of them.
type Page struct {
	Events []json.RawMessage
	Cursor int64
}

// maxLine is the longest line that is read; nothing that this package writes comes
// near it, so that a longer one is damage.
const maxLine = 1 << 20

// Fill takes lines as events while their encoded size, with a comma each, keeps within
// budget; the first is always taken. It returns how many lines it took. Lines from a
// file are checked; number is the first one's index.
func (p *Page) Fill(data []byte, ends []int64, budget *int, number int64, check bool) int {
	start := int64(0)
	for n, end := range ends {
		line := data[start:end]
		start = end
		event := json.RawMessage(bytes.TrimSuffix(line, []byte("\n")))
		if check {
			event = checked(event, len(event) < len(line), number+int64(n)+1)
		}
		if !p.take(event, budget) {
			return n
		}
	}
	return len(ends)
}

func (p *Page) take(event json.RawMessage, budget *int) bool {
	if len(p.Events) > 0 && len(event)+1 > *budget {
		return false
	}
	*budget -= len(event) + 1
	p.Events = append(p.Events, event)
	p.Cursor++
	return true
}

// checked is the event of a line, or a warning in its place.
func checked(line []byte, whole bool, number int64) json.RawMessage {
	var e api.Event
	if len(line) <= maxLine && json.Unmarshal(line, &e) == nil && e.Type != "" {
		return line
	}
	w := api.Event{Type: "warning", Code: "journal_corrupt", Line: number,
		Text: fmt.Sprintf("line %d of the saved output is damaged and cannot be shown", number)}
	if !whole {
		w.Code, w.Text = "journal_truncated", fmt.Sprintf("the saved output ends in the middle of line %d", number)
	}
	raw, _ := json.Marshal(w)
	return raw
}

// Read returns the page of a journal at cursor and the number of its lines. A journal
// that does not exist has none. A cursor past the end is the end.
func (d *Dir) Read(id string, cursor int64, budget int) (Page, int64, error) {
	name, index := Names(id)
	return d.read(name, index, cursor, budget)
}

func (d *Dir) read(name, index string, cursor int64, budget int) (Page, int64, error) {
	p := Page{Cursor: cursor}
	f, err := d.open(name, os.O_RDONLY)
	if errors.Is(err, os.ErrNotExist) {
		p.Cursor = 0
		return p, 0, nil
	}
	if err != nil {
		return p, 0, err
	}
	defer f.Close()
	st, err := stampOf(f)
	if err != nil {
		return p, 0, err
	}
	x, err := d.openIndex(index, st)
	if err != nil {
		if x, err = d.rebuild(f, index, st); err != nil {
			return p, 0, err
		}
	}
	defer x.close()
	p.Cursor = min(cursor, x.count)
	for p.Cursor < x.count {
		// A window of lines: a page of small ones takes several.
		offsets, err := x.window(p.Cursor)
		if err == nil {
			var n, want int
			n, want, err = p.readWindow(f, offsets, x.size, &budget)
			if err == nil && n < want {
				return p, x.count, nil
			}
		}
		if errors.Is(err, errStale) && !x.fresh { // the index lies: make it again and go on
			x.close()
			if x, err = d.rebuild(f, index, st); err == nil {
				continue
			}
		}
		if err != nil {
			return p, x.count, err
		}
		if budget <= 0 {
			break
		}
	}
	return p, x.count, nil
}

// ReadPacked is Read for a journal that is in the record.
func ReadPacked(data []byte, cursor int64, budget int) (Page, int64) {
	lines := linesOf(data)
	total := int64(len(lines))
	p := Page{Cursor: min(cursor, total)}
	from := 0
	if p.Cursor > 0 {
		from = lines[p.Cursor-1]
	}
	var ends []int64
	for _, end := range lines[p.Cursor:] {
		ends = append(ends, int64(end-from))
	}
	p.Fill(data[from:], ends, &budget, p.Cursor, true)
	return p, total
}

var errStale = errors.New("the index does not fit its journal")

// maxRead bounds the bytes that one step of a page reads.
const maxRead = 1 << 20

// readWindow reads the lines between offsets and takes as many as fit. Only the line
// that ends at size may lack its newline.
func (p *Page) readWindow(r io.ReaderAt, offsets []int64, size int64, budget *int) (took, want int, err error) {
	for i := 1; i < len(offsets); i++ {
		if offsets[i] <= offsets[i-1] {
			return 0, 0, errStale
		}
	}
	base := offsets[0]
	// One line more than fits is enough to see that it does not.
	n := 1
	for n < len(offsets)-1 && offsets[n]-base < int64(*budget) && offsets[n+1]-base < maxRead {
		n++
	}
	if offsets[n]-base > maxRead { // one line, of a size that no journal has
		if p.take(checked(nil, true, p.Cursor+1), budget) {
			took = 1
		}
		return took, 1, nil
	}
	before := min(base, 1) // the byte before the first line tells whether it is the begin of one
	data := make([]byte, before+offsets[n]-base)
	if _, err := r.ReadAt(data, base-before); err != nil && !errors.Is(err, io.EOF) {
		return 0, 0, err
	}
	if before > 0 && data[0] != '\n' {
		return 0, 0, errStale
	}
	data = data[before:]
	ends := make([]int64, n)
	for i := range ends {
		ends[i] = offsets[i+1] - base
		last := data[ends[i]-1] == '\n'
		if !last && offsets[i+1] != size || bytes.IndexByte(data[start(ends, i):ends[i]-1], '\n') >= 0 {
			return 0, 0, errStale
		}
	}
	return p.Fill(data, ends, budget, p.Cursor, true), n, nil
}

func start(ends []int64, i int) int64 {
	if i == 0 {
		return 0
	}
	return ends[i-1]
}

// stamp says which content an index belongs to.
type stamp struct{ Dev, Ino, Size, Mtime uint64 }

func stampOf(f *os.File) (stamp, error) {
	fi, err := f.Stat()
	if err != nil {
		return stamp{}, err
	}
	if !fi.Mode().IsRegular() {
		return stamp{}, fmt.Errorf("%s is not a regular file", f.Name())
	}
	sys := fi.Sys().(*syscall.Stat_t)
	return stamp{uint64(sys.Dev), sys.Ino, uint64(sys.Size), uint64(sys.Mtim.Nano())}, nil
}

// The index file: magic, stamp, then the offset of each line and, last, the size; all
// little-endian 64-bit numbers.
const (
	magic      = "myprjix1"
	headerSize = 8 + 4*8
	windowSize = 2048 // offsets read at once
)

type index struct {
	f     *os.File // nil: all is in memory
	mem   []int64
	size  int64
	count int64
	fresh bool // made by this call
}

func (x *index) close() {
	if x.f != nil {
		x.f.Close()
		x.f = nil
	}
}

func (d *Dir) openIndex(name string, want stamp) (*index, error) {
	f, err := d.open(name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	x, err := readIndex(f, want)
	if err != nil {
		f.Close()
		return nil, err
	}
	return x, nil
}

func readIndex(f *os.File, want stamp) (*index, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	n := fi.Size() - headerSize
	if n < 8 || n%8 != 0 {
		return nil, errStale
	}
	head := make([]byte, headerSize)
	if _, err := f.ReadAt(head, 0); err != nil {
		return nil, err
	}
	var have stamp
	if _, err := binary.Decode(head[8:], binary.LittleEndian, &have); err != nil || string(head[:8]) != magic || have != want {
		return nil, errStale
	}
	return &index{f: f, size: int64(want.Size), count: n/8 - 1}, nil
}

// window returns the offsets of lines from i on and the end of the last of them.
func (x *index) window(i int64) ([]int64, error) {
	n := min(x.count-i, windowSize) + 1
	if x.f == nil {
		return x.mem[i : i+n], nil
	}
	raw := make([]byte, 8*n)
	if _, err := x.f.ReadAt(raw, headerSize+8*i); err != nil {
		return nil, errStale
	}
	offsets := make([]int64, n)
	for k := range offsets {
		offsets[k] = int64(binary.LittleEndian.Uint64(raw[8*k:]))
		if offsets[k] < 0 || offsets[k] > x.size || (i+int64(k) == 0) != (offsets[k] == 0) || (i+int64(k) == x.count) != (offsets[k] == x.size) {
			return nil, errStale
		}
	}
	return offsets, nil
}

// rebuild reads the whole journal once and writes its index anew. That the index
// cannot be written (a read-only disk) is no reason not to answer.
func (d *Dir) rebuild(f *os.File, name string, st stamp) (*index, error) {
	offsets, err := Scan(io.NewSectionReader(f, 0, int64(st.Size)))
	if err != nil {
		return nil, err
	}
	if now, err := stampOf(f); err == nil && now == st {
		_ = d.writeIndex(name, st, offsets)
	}
	return &index{mem: offsets, size: int64(st.Size), count: int64(len(offsets)) - 1, fresh: true}, nil
}

// Scan finds where each line begins, and the end of the last.
func Scan(r io.Reader) ([]int64, error) {
	b := bufio.NewReaderSize(r, 128<<10)
	offsets, at, inLine := []int64{0}, int64(0), false
	for {
		part, err := b.ReadSlice('\n')
		at += int64(len(part))
		inLine = len(part) > 0 && part[len(part)-1] != '\n' || len(part) == 0 && inLine
		if len(part) > 0 && !inLine {
			offsets = append(offsets, at)
		}
		switch {
		case err == nil, errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF):
			if inLine {
				offsets = append(offsets, at)
			}
			return offsets, nil
		default:
			return nil, err
		}
	}
}

// writeIndexOf stores the index of a finished journal; offsets are the begin of each
// line and the end of the last.
func (d *Dir) writeIndexOf(f *os.File, name string, offsets []int64) error {
	st, err := stampOf(f)
	if err != nil {
		return err
	}
	if len(offsets) == 0 || uint64(offsets[len(offsets)-1]) != st.Size {
		return errStale
	}
	return d.writeIndex(name, st, offsets)
}

// writeIndex replaces the file by rename, so that nobody reads half of one.
func (d *Dir) writeIndex(name string, st stamp, offsets []int64) error {
	raw := append(make([]byte, 0, headerSize+8*len(offsets)), magic...)
	raw, _ = binary.Append(raw, binary.LittleEndian, st)
	for _, o := range offsets {
		raw = binary.LittleEndian.AppendUint64(raw, uint64(o))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	tmp := name + ".new" // one writer at a time: the lock is held
	f, err := d.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(raw)
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = d.root.Rename(tmp, name)
	}
	if err != nil {
		_ = d.root.Remove(tmp)
	}
	return err
}
