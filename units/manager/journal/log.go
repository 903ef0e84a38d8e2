package journal

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"
)

const (
	memoryTail = 64 << 10 // bytes of the newest lines that are kept in memory
	indexFrom  = 64 << 10 // a smaller journal is scanned about as fast as its index is read
)

// Dir is the directory of the journals. It is held open, so that a workspace that is
// moved while it is in use keeps its output.
type Dir struct {
	path string

	mu   sync.Mutex // guards root
	root *os.Root
}

// OpenDir opens the directory, and makes it if need be.
func OpenDir(path string) (*Dir, error) {
	d := &Dir{path: path}
	return d, d.reopen()
}

// reopen opens the directory by its path. Only the last part of it is made: the rest
// being gone means that the workspace is elsewhere.
func (d *Dir) reopen() error {
	if err := os.Mkdir(d.path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	root, err := os.OpenRoot(d.path)
	if err != nil {
		return err
	}
	if d.root != nil {
		d.root.Close()
	}
	d.root = root
	return nil
}

// Close lets go of the directory. Logs must have been finished.
func (d *Dir) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.root.Close()
}

// create opens a journal for writing. A directory that was removed is made again.
func (d *Dir) create(name string) (*os.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f, err := d.root.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		if err = d.reopen(); err == nil {
			f, err = d.root.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		}
	}
	return f, err
}

func (d *Dir) open(name string, flag int) (*os.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.root.OpenFile(name, flag, 0)
}

// Names are the files of an execution's journal. The id of a Python task has a name of
// its client's choice in it, which is no file name.
func Names(id string) (journal, index string) {
	if strings.HasPrefix(id, "python:") {
		sum := sha256.Sum256([]byte(id))
		id = fmt.Sprintf("task-%x", sum)
	}
	return id + ".jsonl", id + ".idx"
}

// Abandon renames a journal that cannot be taken up.
func (d *Dir) Abandon(id string) error {
	name, _ := Names(id)
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.root.Rename(name, name+".unreadable")
}

// Append puts lines into the journal of an execution that is not in memory.
func (d *Dir) Append(id string, data []byte, offset int64) error {
	l := d.New(id)
	if err := l.Write(data, offset); err != nil {
		return err
	}
	return l.f.Close()
}

// Log is the journal of one execution while the manager has it in memory. Appending
// has three steps, because an event must be on disk, and known to be there, before
// anybody sees it: Stage gives the lines their place, Write puts them there (any
// number of times), Publish makes them visible. Stage belongs to one goroutine; the
// rest may be called from any.
type Log struct {
	dir         *Dir
	name, index string
	staged      int64 // size with everything staged

	mu      sync.Mutex // guards the fields below
	f       *os.File   // open from the first Write to Finish
	offsets []int64    // of the visible lines and their end; nil when finished
	count   int64      // visible lines
	mem     []byte     // the newest visible lines
	memEnds []int64    // where each ends in mem
}

// New is an empty log; no file is made before the first line.
func (d *Dir) New(id string) *Log {
	name, index := Names(id)
	return &Log{dir: d, name: name, index: index, offsets: []int64{0}}
}

// Resume opens the log of an execution that goes on. What the file has beyond size was
// never acknowledged, will be sent again, and is cut off.
func (d *Dir) Resume(id string, size int64) (*Log, error) {
	l := d.New(id)
	f, err := d.open(l.name, os.O_RDWR)
	if errors.Is(err, fs.ErrNotExist) && size == 0 {
		return l, nil
	}
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil && fi.Size() > size {
		err = f.Truncate(size)
	} else if err == nil && fi.Size() < size {
		err = fmt.Errorf("%s has %d bytes, %d were stored: its end is lost", l.name, fi.Size(), size)
	}
	if err == nil {
		l.offsets, err = Scan(io.NewSectionReader(f, 0, size))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	l.f, l.count, l.staged = f, int64(len(l.offsets))-1, size
	return l, nil
}

// ResumePacked takes up a log whose lines are in the record, not in a file. What is beyond
// size was never acknowledged.
func (d *Dir) ResumePacked(id string, data []byte, size int64) (*Log, error) {
	l := d.New(id)
	if int64(len(data)) < size {
		return nil, fmt.Errorf("the record has %d bytes of its output, %d were stored: its end is lost", len(data), size)
	}
	data = data[:size:size]
	ends := linesOf(data)
	l.staged = size
	l.Publish(data, ends)
	return l, nil
}

// linesOf says where each line of data ends; the last may lack its newline.
func linesOf(data []byte) (ends []int) {
	for at := 0; at < len(data); {
		if n := bytes.IndexByte(data[at:], '\n'); n >= 0 {
			at += n + 1
		} else {
			at = len(data)
		}
		ends = append(ends, at)
	}
	return ends
}

// Stage reserves the place of the next lines and returns it.
func (l *Log) Stage(data []byte) (offset int64) {
	offset = l.staged
	l.staged += int64(len(data))
	return offset
}

// Write puts lines where Stage said. It does not wait for the disk: the bytes survive
// the process, not the machine.
func (l *Log) Write(data []byte, offset int64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f == nil {
		f, err := l.dir.create(l.name)
		if err != nil {
			return err
		}
		l.f = f
	}
	_, err := l.f.WriteAt(data, offset)
	return err
}

// Publish makes written lines visible. They must be the ones next in order.
func (l *Log) Publish(data []byte, ends []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	base := l.offsets[len(l.offsets)-1]
	memBase := int64(len(l.mem))
	l.mem = append(l.mem, data...)
	for _, e := range ends {
		l.offsets = append(l.offsets, base+int64(e))
		l.memEnds = append(l.memEnds, memBase+int64(e))
	}
	l.count += int64(len(ends))
	if len(l.mem) > 2*memoryTail {
		l.trim()
	}
}

// trim keeps the newest lines in memory; what readers hold of the old ones stays theirs.
func (l *Log) trim() {
	cut, from := int64(0), 0
	for from < len(l.memEnds) && int64(len(l.mem))-cut > memoryTail {
		cut = l.memEnds[from]
		from++
	}
	l.mem = append([]byte(nil), l.mem[cut:]...)
	ends := make([]int64, len(l.memEnds)-from)
	for i := range ends {
		ends[i] = l.memEnds[from+i] - cut
	}
	l.memEnds = ends
}

// Count is the number of visible lines.
func (l *Log) Count() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// Staged is the size of the journal with everything that was staged.
func (l *Log) Staged() int64 { return l.staged }

// Memory is about how many bytes the log holds.
func (l *Log) Memory() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return int64(cap(l.mem) + 8*cap(l.offsets) + 8*cap(l.memEnds))
}

// InMemory reports whether a page at cursor can be had without reading the file, which
// may not have yet what is visible.
func (l *Log) InMemory(cursor int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return cursor >= l.count-int64(len(l.memEnds))
}

// Page returns events from cursor on and the number of visible lines.
func (l *Log) Page(cursor int64, budget int) (Page, int64, error) {
	l.mu.Lock()
	p, total := Page{Cursor: min(cursor, l.count)}, l.count
	first := total - int64(len(l.memEnds)) // the first line in memory
	if p.Cursor < first && l.offsets == nil {
		l.mu.Unlock()
		p, _, err := l.dir.read(l.name, l.index, cursor, budget)
		return p, total, err
	}
	defer l.mu.Unlock()
	for p.Cursor < first {
		if l.f == nil {
			return p, total, errors.New("the saved output is not on the disk yet")
		}
		n, want, err := p.readWindow(l.f, l.offsets[p.Cursor:first+1], -1, &budget)
		if errors.Is(err, errStale) {
			err = fmt.Errorf("%s was changed while its execution runs", l.name)
		}
		if err != nil || n < want {
			return p, total, err
		}
	}
	if skip := int(p.Cursor - first); skip < len(l.memEnds) {
		from := start(l.memEnds, skip)
		var ends []int64
		for _, e := range l.memEnds[skip:] {
			ends = append(ends, e-from)
			if e-from > int64(budget) {
				break
			}
		}
		p.Fill(l.mem[from:len(l.mem):len(l.mem)], ends, &budget, p.Cursor, false)
	}
	return p, total, nil
}

// Last is the newest visible line, without its newline, or nil.
func (l *Log) Last() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.memEnds); n > 0 {
		return l.mem[start(l.memEnds, n-1) : l.memEnds[n-1]-1 : l.memEnds[n-1]-1]
	}
	return nil
}

// Finish closes the file of an execution that has ended, writes its index when that
// helps, and gives up memory that a finished one does not need. Pages can still be read.
func (l *Log) Finish() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var err error
	if l.f != nil {
		if l.staged >= indexFrom {
			err = l.dir.writeIndexOf(l.f, l.index, l.offsets)
		}
		err = errors.Join(err, l.f.Close())
		l.f = nil
	}
	l.offsets = nil
	if len(l.mem) > memoryTail {
		l.trim()
	}
	return err
}
