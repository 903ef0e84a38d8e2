package store

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"sync"

	"mypr/internal/api"
)

// Change is what an operation does, as data, so that it can be written to the redo log
// and carried out later. The parts are done in the order of the fields.
type Change struct {
	Insert     []*Entity      `json:"insert,omitempty"` // their Seq must be set, from NextSeq
	Output     []Output       `json:"output,omitempty"`
	Update     []*Entity      `json:"update,omitempty"`   // all that can change of these
	Progress   []*Entity      `json:"progress,omitempty"` // how far the journals of these count
	Log        []api.LogEvent `json:"log,omitempty"`
	Seen       string         `json:"seen,omitempty"` // a client that was there, at the time of the first log line
	Generation string         `json:"generation,omitempty"`
	Acked      int64          `json:"acked,omitempty"` // last durable event of Generation
}

// Output is a piece of a journal and its place in it.
type Output struct {
	ID     string  `json:"id"`
	Offset int64   `json:"offset"`
	Data   []byte  `json:"data"`
	To     Journal `json:"-"` // nil after a crash: Options.Write finds the file
}

// Journal takes output at its place. Writing the same again must change nothing.
type Journal interface {
	Write(data []byte, offset int64) error
}

// A change up to this size goes through the redo log; a larger one is worth a commit.
const maxRedo = 16 << 10

// maxPayload bounds a record of the log, whose JSON may be a few times as long as its
// change. What reads the log takes a longer one for damage.
const maxPayload = 64 * maxRedo

// redoLimit is the size at which the log is emptied as soon as all of it was carried out.
const redoLimit = 1 << 20

func (c *Change) size() int {
	n := 512
	for _, o := range c.Output {
		n += len(o.Data)
	}
	for _, list := range [][]*Entity{c.Insert, c.Update} {
		for _, e := range list {
			n += len(e.Code) + len(e.Job)
		}
	}
	return n
}

// Apply carries the change out as a part of another operation. Its output must say
// where it goes.
func (c *Change) Apply(t *Tx) error { return c.apply(t, nil, false) }

// apply carries a change out. pack keeps small journals in the record.
func (c *Change) apply(t *Tx, write func(id string, data []byte, offset int64) error, pack bool) error {
	for _, e := range c.Insert {
		isNew, err := t.Insert(e)
		if err == nil && !isNew && e.Request != nil {
			// A client has called a request id new that was not. The cell was promised.
			again := *e
			again.Request = nil
			isNew, err = t.Insert(&again)
		}
		if err != nil {
			return err
		} else if !isNew {
			return fmt.Errorf("%s %s is recorded already", e.Kind, e.ID)
		}
	}
	for i := range c.Output {
		if err := c.Output[i].apply(t, write, pack); err != nil {
			return err
		}
	}
	for _, e := range c.Update {
		if err := t.Update(e); err != nil {
			return err
		}
	}
	for _, e := range c.Progress {
		if err := t.Progress(e.ID, e.JournalEvents, e.JournalBytes); err != nil {
			return err
		}
	}
	for i := range c.Log {
		if err := t.Log(&c.Log[i]); err != nil {
			return err
		}
	}
	if c.Seen != "" {
		if err := t.Seen(c.Seen, c.Log[0].Time); err != nil {
			return err
		}
	}
	if c.Acked > 0 {
		return t.Acked(c.Generation, c.Acked)
	}
	return nil
}

// A new file costs up to 600 µs where a directory's block group is full, so when cells
// come thick and fast the small journals among theirs stay in the record. packFrom is the
// number of changes with output in one transaction from which on they do, maxPacked the
// size of a journal up to which it can.
const (
	packFrom  = 16
	maxPacked = 4 << 10
)

func packs(ops []*Op) bool {
	n := 0
	for _, op := range ops {
		if op.Change != nil && len(op.Change.Output) > 0 {
			n++
		}
	}
	return n >= packFrom
}

// apply puts a piece where the journal is: in the record, or in a file. A journal that
// outgrows its record moves into a file.
func (o *Output) apply(t *Tx, write func(id string, data []byte, offset int64) error, pack bool) error {
	var packed []byte // what the record has of the journal
	if o.Offset > 0 {
		v, err := t.scalar(`SELECT journal FROM entities WHERE id = ?`, o.ID)
		if err != nil {
			return err
		}
		if packed, _ = v.([]byte); len(packed) == 0 {
			pack = false
		} else if int64(len(packed)) < o.Offset {
			return fmt.Errorf("the record of %s has %d bytes of its journal, not %d", o.ID, len(packed), o.Offset)
		} else {
			packed = append(packed[:o.Offset:o.Offset], o.Data...)
			pack = true
		}
	} else if pack {
		packed = o.Data
	}
	if pack && len(packed) <= maxPacked {
		return t.exec(`UPDATE entities SET journal = ? WHERE id = ?`, packed, o.ID)
	}
	data, offset := o.Data, o.Offset
	if pack {
		if err := t.exec(`UPDATE entities SET journal = NULL WHERE id = ?`, o.ID); err != nil {
			return err
		}
		data, offset = packed, 0
	}
	if o.To != nil {
		return o.To.Write(data, offset)
	}
	return write(o.ID, data, offset)
}

// redo is the file history.sqlite3-redo: changes that are durable and visible, and
// perhaps not yet in the database. A record is its length and CRC-32C (both 32 bits,
// little-endian) and a JSON object {"seq":N,"change":…}. Each is written with one
// write(2), which survives the death of the process like a commit does, and costs a
// twentieth of one. The database remembers the sequence number of the last one that it
// has (meta "redo"), in the transaction that carried it out.
type redo struct {
	f    *os.File
	size int64 // where the next record goes
	seq  int64 // of the last record
	buf  []byte
}

type redoRecord struct {
	Seq    int64   `json:"seq"`
	Change *Change `json:"change"`
}

// castagnoli is made at the first use: every role of the program would pay for it.
var castagnoli = sync.OnceValue(func() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) })

const redoHeader = 8

func openRedo(path string) (*redo, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return &redo{f: f}, nil
}

// append makes a change durable.
func (r *redo) append(c *Change) error {
	payload, err := json.Marshal(redoRecord{r.seq + 1, c})
	if err != nil {
		return err
	}
	if len(payload) > maxPayload {
		return fmt.Errorf("a change of %d bytes is too long for the redo log", len(payload))
	}
	b := binary.LittleEndian.AppendUint32(r.buf[:0], uint32(len(payload)))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(payload, castagnoli()))
	r.buf = append(b, payload...)
	if _, err := r.f.WriteAt(r.buf, r.size); err != nil {
		return err // what was written of it is overwritten by the next, or cut short and so ignored
	}
	r.size += int64(len(r.buf))
	r.seq++
	return nil
}

// clear empties the log, whose changes are all in the database.
func (r *redo) clear() error {
	if r.size == 0 {
		return nil
	}
	if err := r.f.Truncate(0); err != nil {
		return err
	}
	r.size = 0
	return nil
}

// read calls f for every whole record. What follows a record that is cut short or
// damaged was never acknowledged.
func readRedo(r io.Reader, f func(redoRecord) error) error {
	var head [redoHeader]byte
	for last := int64(0); ; {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return nil
			}
			return err
		}
		n := binary.LittleEndian.Uint32(head[:])
		if n > maxPayload {
			return nil
		}
		payload := make([]byte, n)
		if _, err := io.ReadFull(r, payload); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return nil
			}
			return err
		}
		var rec redoRecord
		if crc32.Checksum(payload, castagnoli()) != binary.LittleEndian.Uint32(head[4:]) || json.Unmarshal(payload, &rec) != nil || rec.Change == nil || rec.Seq <= last {
			return nil
		}
		last = rec.Seq
		if err := f(rec); err != nil {
			return err
		}
	}
}

// recover brings the database up to what the redo log says.
func (r *redo) recover(t *Tx, write func(id string, data []byte, offset int64) error) error {
	v, err := t.scalar(`SELECT value FROM meta WHERE key = 'redo'`)
	if err != nil {
		return err
	}
	if text, ok := v.(string); ok {
		if _, err := fmt.Sscan(text, &r.seq); err != nil {
			return fmt.Errorf("meta redo is %q: %w", text, err)
		}
	}
	done := r.seq
	if err := t.exec("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	fi, err := r.f.Stat()
	pack := err == nil && fi.Size() > packFrom<<10
	err = readRedo(r.f, func(rec redoRecord) error {
		if rec.Seq <= done {
			return nil
		}
		r.seq = rec.Seq
		err := rec.Change.apply(t, write, pack)
		if err != nil && !IsStorage(err) {
			return fmt.Errorf("redo record %d: %w", rec.Seq, err)
		}
		return err
	})
	if err == nil {
		err = t.setRedo(r.seq)
	}
	if err == nil {
		err = t.exec("COMMIT")
	}
	if err != nil {
		_ = t.exec("ROLLBACK")
		return err
	}
	r.size = 1 // so that clear does not take it for empty
	return r.clear()
}

func (t *Tx) setRedo(seq int64) error { return t.SetMeta("redo", fmt.Sprint(seq)) }
