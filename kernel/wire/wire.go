// Package wire holds the messages of the kernel socket (docs/PROTOCOL.md, "Kernel
// socket"), a reader and an encoder of their lines. The Python side is
// kernel/python/mypr_kernel.
//
// It owns shapes and framing and has no behaviour: sequence numbers, acknowledgement
// and the state of cells belong to units/manager.
package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Protocol is the version that hello and welcome carry.
const Protocol = 1

// MaxLine bounds one message with its newline, in both directions.
const MaxLine = 32 << 20

// Types of messages.
const (
	TypeHello       = "hello"
	TypeEvent       = "event"
	TypeLoop        = "loop"
	TypeMode        = "mode"
	TypeInterrupted = "interrupted"
	TypeCall        = "call"
	TypeCancelCall  = "cancel_call"
	TypePong        = "pong"
	TypeReserved    = "reserved"

	TypeWelcome    = "welcome"
	TypeReject     = "reject"
	TypeAck        = "ack"
	TypeExecute    = "execute"
	TypeInterrupt  = "interrupt"
	TypeCallResult = "call_result"
	TypePing       = "ping"
	TypeReserve    = "reserve"
	TypeRelease    = "release"
)

// Kinds of events.
const (
	EventState     = "state"
	EventStream    = "stream"
	EventDisplay   = "display"
	EventError     = "error"
	EventWarning   = "warning"
	EventTruncated = "truncated"
	EventTask      = "task" // a task begins that no execute asked for
)

// FromKernel is any message of the kernel; Type says which fields have a meaning.
// One struct for all of them lets the reader decode each line once.
type FromKernel struct {
	Type string `json:"type"`

	// hello
	Protocol       int      `json:"protocol"`
	Generation     string   `json:"generation"`
	PID            int      `json:"pid"`
	Python         string   `json:"python"`
	Implementation string   `json:"implementation"`
	Executable     string   `json:"executable"`
	Mode           string   `json:"mode"` // also of mode
	ModeReason     string   `json:"mode_reason"`
	FirstSeq       int64    `json:"first_seq"`
	NextSeq        int64    `json:"next_seq"`
	Cells          []Cell   `json:"cells"`
	Seen           []string `json:"seen"`
	Reason         string   `json:"reason"` // of mode

	// event
	Seq            int64           `json:"seq"`
	Time           float64         `json:"time"` // Unix seconds
	Event          string          `json:"event"`
	ExecID         string          `json:"exec_id"` // also of interrupted
	State          string          `json:"state"`
	Error          string          `json:"error"`
	ErrorTruncated bool            `json:"error_truncated"`
	ErrorInfo      json.RawMessage `json:"error_info"`
	Stream         string          `json:"stream"`
	Text           string          `json:"text"`
	Raw            bool            `json:"raw"`
	Continues      bool            `json:"continues"` // of display: the text goes on where the last one ended
	Files          []File          `json:"files"`
	DisplayID      string          `json:"display_id"`
	Update         bool            `json:"update"`
	Result         bool            `json:"result"`
	Code           string          `json:"code"`
	Task           json.RawMessage `json:"task"` // a Task

	// loop
	Blocked *Blocked `json:"blocked"`

	// interrupted, call, cancel_call, pong
	ID      int64           `json:"id"`
	Outcome string          `json:"outcome"`
	Method  string          `json:"method"`
	Params  json.RawMessage `json:"params"`
	Context CallContext     `json:"context"`
	Again   bool            `json:"again"` // of call: an earlier manager may have carried it out
}

// Cell is a live cell of a hello.
type Cell struct {
	ExecID string `json:"exec_id"`
	State  string `json:"state"` // queued, running
}

// File is display data that the kernel has written already.
type File struct {
	Mime string `json:"mime"`
	Path string `json:"path"`
	Size int64  `json:"size"`
}

// Blocked names the cell that keeps the loop from turning.
type Blocked struct {
	ExecID string  `json:"exec_id"`
	Since  float64 `json:"since"` // Unix seconds
	Where  string  `json:"where"`
}

// CallContext says on whose behalf Python calls.
type CallContext struct {
	ClientID     string `json:"client_id"`
	ConnectionID string `json:"connection_id"`
	ExecID       string `json:"exec_id"`
}

// Task is a detached task whose events follow under the exec id python:<generation>:<id>.
type Task struct {
	ID           string `json:"id"`
	ClientID     string `json:"client_id"`
	ConnectionID string `json:"connection_id"`
	ExecID       string `json:"exec_id"` // of the cell that started it
}

// Outcomes of an interrupt.
const (
	Interrupted = "interrupted"
	Cancelled   = "cancelled"
	Dequeued    = "dequeued"
	Finished    = "finished"
	Pending     = "pending"
)

// Messages of the manager. Type must be set to the constant of the same name.
type (
	Welcome struct {
		Type      string `json:"type"`
		Protocol  int    `json:"protocol"`
		Ack       int64  `json:"ack"`
		Limits    Limits `json:"limits"`
		Workspace string `json:"workspace"`
		Artifacts string `json:"artifacts"`
	}
	// Limits are what the kernel must keep to.
	Limits struct {
		OutputBytes    int64 `json:"output_bytes"`    // of one run, text and artifacts
		EventChars     int   `json:"event_chars"`     // of the text of one event
		CompletedTasks int   `json:"completed_tasks"` // handles kept
	}
	Reject struct {
		Type   string `json:"type"`
		Reason string `json:"reason"`
	}
	Ack struct {
		Type string `json:"type"`
		Seq  int64  `json:"seq"`
	}
	Execute struct {
		Type         string `json:"type"`
		ExecID       string `json:"exec_id"`
		Code         string `json:"code"`
		ClientID     string `json:"client_id"`
		ConnectionID string `json:"connection_id"`
	}
	Interrupt struct {
		Type   string  `json:"type"`
		ID     int64   `json:"id"`
		ExecID *string `json:"exec_id"`
	}
	CallResult struct {
		Type   string `json:"type"`
		ID     int64  `json:"id"`
		Result any    `json:"result,omitempty"`
		Error  any    `json:"error,omitempty"` // *rpc.Error
	}
	// Reserve makes the kernel refuse new tasks, for the reason given, until a Release
	// or a new connection. It answers "reserved" after the events of those it had begun.
	Reserve struct {
		Type   string `json:"type"`
		ID     int64  `json:"id"`
		Reason string `json:"reason"`
	}
	Release struct {
		Type string `json:"type"`
	}
	Ping struct {
		Type string `json:"type"`
		ID   int64  `json:"id"`
	}
)

// ErrTooLong is returned for a line over MaxLine.
var ErrTooLong = errors.New("message over the limit of 32 MiB")

// Encode appends the line of a message to dst. It keeps <, > and & as they are.
func Encode(dst []byte, message any) ([]byte, error) {
	b := bytes.NewBuffer(dst)
	e := json.NewEncoder(b)
	e.SetEscapeHTML(false)
	if err := e.Encode(message); err != nil {
		return dst, err
	}
	if b.Len()-len(dst) > MaxLine {
		return dst, ErrTooLong
	}
	return b.Bytes(), nil
}

const bufferSize = 64 << 10

// Reader splits a stream into messages. It is used by one goroutine.
type Reader struct {
	r          io.Reader
	buf        []byte
	start, end int // the bytes read and not yet consumed
	scanned    int // no newline before this index
}

// NewReader reads from r.
func NewReader(r io.Reader) *Reader { return &Reader{r: r, buf: make([]byte, bufferSize)} }

// Buffered reports whether a whole line has been read already, so that Next will not block.
func (r *Reader) Buffered() bool {
	if r.scanned < r.start {
		r.scanned = r.start
	}
	i := bytes.IndexByte(r.buf[r.scanned:r.end], '\n')
	if i < 0 {
		r.scanned = r.end
		return false
	}
	r.scanned += i
	return true
}

// Next decodes the next message into m, which it clears first. io.EOF means that the
// stream ended between two messages.
func (r *Reader) Next(m *FromKernel) error {
	for !r.Buffered() {
		if err := r.fill(); err != nil {
			return err
		}
	}
	line := r.buf[r.start:r.scanned]
	r.start = r.scanned + 1
	r.scanned = r.start
	*m = FromKernel{}
	err := json.Unmarshal(line, m)
	if err == nil && m.Type == "" {
		err = errors.New("it has no type")
	}
	if r.start == r.end {
		r.start, r.end, r.scanned = 0, 0, 0
		if len(r.buf) > 16*bufferSize { // one huge message must not cost its size for ever
			r.buf = make([]byte, bufferSize)
		}
	}
	if err != nil {
		return fmt.Errorf("bad message from the kernel: %w", err)
	}
	return nil
}

func (r *Reader) fill() error {
	if r.end-r.start >= MaxLine {
		return ErrTooLong
	}
	if r.end == len(r.buf) {
		if r.start > len(r.buf)/2 {
			n := copy(r.buf, r.buf[r.start:r.end])
			r.start, r.end, r.scanned = 0, n, r.scanned-r.start
		} else {
			b := make([]byte, 2*len(r.buf))
			n := copy(b, r.buf[r.start:r.end])
			r.buf, r.scanned = b, r.scanned-r.start
			r.start, r.end = 0, n
		}
	}
	n, err := r.r.Read(r.buf[r.end:])
	r.end += n
	if n > 0 {
		return nil
	}
	if err == nil {
		return nil // a reader may return nothing once; it will not for ever
	}
	if errors.Is(err, io.EOF) && r.end > r.start {
		return io.ErrUnexpectedEOF
	}
	return err
}
