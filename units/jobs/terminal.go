package jobs

import (
	"bytes"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// A terminal cannot be spliced from, and between a read into memory and a write to the
// file this process can be killed. So what a terminal has is read into the file itself:
// into a mapping of what lies ahead of its end, in one system call. How much it was, a
// successor sees by the filling that is ahead of the end: a byte that is in no text of
// any encoding in use. (A program that sends that very byte loses the last ones of a run
// of them, if the kill comes before the next output.)
const (
	ahead  = 64 << 10 // bytes of filling at most; the most that one read takes
	filler = 0xFF     // never part of UTF-8, and of no character a terminal sends
	window = 4 * ahead
)

// filling is made when the first terminal is opened: most programs have none.
var filling = sync.OnceValue(func() []byte { return bytes.Repeat([]byte{filler}, ahead) })

// mapping is a piece of the output file in memory.
type mapping struct {
	data  []byte
	at    int64 // offset in the file
	ready int   // bytes of data whose pages are there
}

// has reports whether a range of the file is in it.
func (m *mapping) has(from, to int64) bool {
	return m.at <= from && to <= m.at+int64(len(m.data))
}

func (m *mapping) close() {
	if m.data != nil {
		_ = unix.Munmap(m.data) // of our own making
	}
	*m = mapping{}
}

// readTerminal reads at most so many bytes to the end of the file. usable is false when
// the file cannot be mapped, and nothing was read. It runs with wmu held.
func (o *output) readTerminal(fd, most int) (n int, end, usable bool, err error) {
	to := o.size + int64(min(most, ahead))
	for at := max(o.filled, o.size); at < to; at = o.filled {
		w, err := o.file.WriteAt(filling()[:to-at], at)
		o.filled = at + int64(w)
		if err != nil {
			return 0, false, true, err
		}
	}
	if !o.window.has(o.size, to) {
		o.window.close()
		at := o.size &^ int64(os.Getpagesize()-1)
		data, err := unix.Mmap(int(o.file.Fd()), at, window, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return 0, false, false, nil
		}
		o.window = mapping{data: data, at: at}
	}
	if end := int(to - o.window.at); end > o.window.ready {
		// A kill in the middle of a page fault would cut the copy short. Before Linux 5.14
		// there is no such call, and that must be lived with.
		page := os.Getpagesize()
		from, end := o.window.ready&^(page-1), (end+page-1)&^(page-1)
		_ = unix.Madvise(o.window.data[from:end], unix.MADV_POPULATE_WRITE)
		o.window.ready = end
	}
	n, end = read(fd, o.window.data[o.size-o.window.at:to-o.window.at])
	return n, end, true, nil
}

// trim finds the end of what a terminal wrote in the file of an earlier manager.
func (o *output) trim() error {
	f, err := os.Open(o.base + ".out")
	if err != nil {
		return err
	}
	defer f.Close()
	tail := make([]byte, min(o.size, ahead))
	if _, err := f.ReadAt(tail, o.size-int64(len(tail))); err != nil {
		return err
	}
	o.filled = o.size
	for i := len(tail); i > 0 && tail[i-1] == filler; i-- {
		o.size--
	}
	return nil
}
