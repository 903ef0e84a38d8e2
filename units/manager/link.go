package manager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/internal/rpc/readable"
	"mypr/kernel/wire"
	"mypr/supervisor/control"
	"mypr/units/manager/store"
)

const (
	helloTimeout = 10 * time.Second
	eventChars   = 16 << 10  // of one event; larger text comes in several
	batchBytes   = 256 << 10 // of events that share a transaction
	// maxUnstored bounds what was read from the kernel and is not stored yet, as while
	// the disk refuses. Beyond it the manager stops reading, the kernel's ring fills,
	// and whoever prints waits.
	maxUnstored = 8 << 20
	ackDelay    = 20 * time.Millisecond
	ackBytes    = 64 << 10 // of events that are acknowledged at once
)

// link is the connection of one kernel. It owns the socket, its reader, the queue of
// what could not be sent at once and the calls that run for the kernel.
type link struct {
	m          *Manager
	number     int64 // in the order of connecting
	sock       *readable.Socket
	generation string
	hello      *wire.FromKernel
	in         *wire.Reader
	done       chan struct{} // the reader has returned; everything it read is staged
	wg         sync.WaitGroup

	// Used by the reader only.
	seq     int64 // of the last event read
	changes map[string]*change
	order   []*change
	size    int

	mu         sync.Mutex // guards the fields below
	room       sync.Cond  // unstored became less, or closed
	unstored   int
	out        []byte
	writing    bool
	closed     bool
	ack        int64 // events up to here are durable and not acknowledged; 0: none
	ackBytes   int   // of their text
	ackTimer   *time.Timer
	nextID     int64
	interrupts map[int64]chan string
	calls      map[int64]context.CancelFunc
}

// acceptKernel serves whoever connects to the kernel socket.
func (m *Manager) acceptKernel() {
	defer m.wg.Done()
	select { // records must be known before a kernel may report on them
	case <-m.opened:
	case <-m.ctx.Done():
		return
	}
	for number := int64(1); ; number++ {
		sock, err := m.opts.Kernel.AcceptUnix()
		if err != nil {
			if m.ctx.Err() == nil {
				m.log.Error("the kernel socket broke", "error", err)
			}
			return
		}
		m.wg.Add(1)
		go func() {
			defer m.wg.Done()
			if err := m.serveKernel(sock, number); err != nil && !errors.Is(err, io.EOF) && m.ctx.Err() == nil {
				m.log.Warn("kernel connection ended", "error", err)
			}
		}()
	}
}

// serveKernel runs one connection from hello to its end.
func (m *Manager) serveKernel(conn *net.UnixConn, number int64) error {
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	if e := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); e != nil {
		err = e
	}
	if err != nil {
		return err
	}
	if int(cred.Uid) != os.Getuid() {
		return fmt.Errorf("refused: user id %d is not ours", cred.Uid)
	}
	sock, err := readable.TakeOver(conn)
	if err != nil {
		return err
	}
	defer sock.Close()
	stop := context.AfterFunc(m.ctx, func() { sock.Close() })
	defer stop()
	l := &link{m: m, number: number, sock: sock, in: wire.NewReader(sock), done: make(chan struct{}), hello: &wire.FromKernel{},
		changes: map[string]*change{}, interrupts: map[int64]chan string{}, calls: map[int64]context.CancelFunc{}}
	l.room.L = &l.mu
	silent := time.AfterFunc(helloTimeout, func() { sock.Close() })
	if err := l.in.Next(l.hello); err != nil {
		return fmt.Errorf("no hello: %w", err)
	}
	silent.Stop()
	reject := func(format string, args ...any) error {
		reason := fmt.Sprintf(format, args...)
		l.send(wire.Reject{Type: wire.TypeReject, Reason: reason})
		l.flushOut()
		return errors.New("kernel rejected: " + reason)
	}
	h := l.hello
	l.generation = h.Generation
	switch {
	case h.Type != wire.TypeHello:
		return reject("the first message is %q, not hello", h.Type)
	case h.Protocol != wire.Protocol:
		return reject("this manager speaks protocol %d, the kernel %d", wire.Protocol, h.Protocol)
	case !isExecID(h.Generation):
		return reject("bad generation %q", h.Generation)
	}
	if err := m.confirm(h.Generation); err != nil {
		return reject("%v", err)
	}
	if err := m.connectKernel(l); errors.Is(err, errOutdated) {
		return err
	} else if err != nil {
		return reject("%v", err)
	}
	err = l.read()
	m.disconnectKernel(l)
	l.close()
	close(l.done)
	l.wg.Wait()
	return err
}

// read takes messages until the connection ends.
func (l *link) read() error {
	var msg wire.FromKernel
	for {
		err := l.in.Next(&msg)
		if err == nil {
			err = l.take(&msg)
		}
		if err != nil {
			l.flush()
			return err
		}
		if l.size > batchBytes || len(l.order) > 0 && !l.in.Buffered() {
			l.flush()
		}
	}
}

func (l *link) take(msg *wire.FromKernel) error {
	m := l.m
	if msg.Type != wire.TypeEvent {
		l.flush() // an answer must not overtake the events before it
	}
	switch msg.Type {
	case wire.TypeEvent:
		return l.event(msg)
	case wire.TypeLoop:
		m.mu.Lock()
		if m.kernel.link == l {
			m.kernel.blocked = msg.Blocked
		}
		m.mu.Unlock()
	case wire.TypeMode:
		m.mu.Lock()
		if m.kernel.link == l {
			m.kernel.mode, m.kernel.modeReason = msg.Mode, msg.Reason
		}
		m.mu.Unlock()
	case wire.TypeInterrupted, wire.TypeReserved, wire.TypePong:
		l.mu.Lock()
		ch := l.interrupts[msg.ID]
		delete(l.interrupts, msg.ID)
		l.mu.Unlock()
		if ch != nil {
			ch <- msg.Outcome
		}
	case wire.TypeCall:
		l.call(msg)
	case wire.TypeCancelCall:
		l.mu.Lock()
		cancel := l.calls[msg.ID]
		l.mu.Unlock()
		if cancel != nil {
			cancel()
		}
	default: // a newer kernel may say more
		m.log.Warn("unknown message from the kernel", "type", msg.Type)
	}
	return nil
}

// event adds one event to the batch.
func (l *link) event(msg *wire.FromKernel) error {
	m := l.m
	if msg.Seq <= l.seq {
		return nil // it is durable already
	}
	if msg.Seq != l.seq+1 {
		return fmt.Errorf("event %d came after event %d", msg.Seq, l.seq)
	}
	l.seq = msg.Seq
	if msg.ExecID == "" {
		m.kernelLog(msg.Text)
	}
	if msg.Event == wire.EventTask {
		return l.beginTask(msg)
	}
	c := l.changes[msg.ExecID]
	if c == nil {
		m.mu.Lock()
		r := m.runs[msg.ExecID]
		gone := r == nil || api.Terminal(r.next.State)
		m.mu.Unlock()
		c = &change{run: r, ended: gone}
		l.changes[msg.ExecID] = c
		l.order = append(l.order, c)
	}
	if c.ended { // output that comes after the end, or of a cell that nobody knows
		return nil
	}
	if (msg.Event == wire.EventError || msg.Event == wire.EventState && msg.State != api.Running) && l.asked(c.run) {
		return nil // the kernel ends it with all the others; how it ends is decided here
	}
	c.at = msg.Time
	e := api.Event{Time: msg.Time, Text: msg.Text}
	switch msg.Event {
	case wire.EventStream:
		e.Type, e.Stream, e.Raw = "stream", msg.Stream, msg.Raw
	case wire.EventDisplay:
		e.Type, e.DisplayID, e.Update, e.Continues = "display", msg.DisplayID, msg.Update, msg.Continues
		if msg.Result {
			e.Type = "result"
		}
		for _, f := range msg.Files {
			e.Artifacts = append(e.Artifacts, api.Artifact{Mime: f.Mime, Path: f.Path, Size: f.Size})
			c.bytes += f.Size
		}
	case wire.EventError:
		e.Type = "error"
	case wire.EventWarning:
		e.Type, e.Code = "warning", msg.Code
	case wire.EventTruncated:
		c.cut = true
		return nil
	case wire.EventState:
		c.transition(msg)
		return nil
	default:
		m.log.Warn("unknown event from the kernel", "event", msg.Event, "exec", msg.ExecID)
		return nil
	}
	c.bytes += int64(len(msg.Text))
	l.size += len(msg.Text) + 64
	c.batch.Add(e)
	return nil
}

// asked reports whether it was this cell that asked for the end of the kernel, or for a
// restart that is not over.
func (l *link) asked(r *run) bool {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	k := &l.m.kernel
	rec := l.m.restarting
	return k.gen == l.generation && k.ending != nil && k.ending.origin == r || rec != nil && rec.OriginExecID == r.id || l.m.replaced == r.id
}

// transition takes a new state of the kernel's.
func (c *change) transition(msg *wire.FromKernel) {
	switch msg.State {
	case api.Running:
		if c.state == "" {
			c.state, c.started = api.Running, msg.Time
			c.events = append(c.events, c.run.transition(api.Running, msg.Time, ""))
		}
		return
	case api.Succeeded, api.FailedCell, api.Cancelled:
	default:
		return
	}
	c.ended, c.state = true, msg.State
	text, cut := summary(msg.Error, api.MaxErrorBytes)
	cut = cut || msg.ErrorTruncated
	var info *api.ErrorInfo
	if len(msg.ErrorInfo) > 0 && string(msg.ErrorInfo) != "null" {
		info = &api.ErrorInfo{}
		if json.Unmarshal(msg.ErrorInfo, info) != nil {
			info = nil
		}
	}
	c.final = func(e *store.Entity) { e.Error, e.ErrorTruncated, e.ErrorInfo = text, cut, info }
	c.events = append(c.events, c.run.transition(msg.State, msg.Time, text))
}

// explain gives an end another reason.
func (c *change) explain(info *api.ErrorInfo) {
	text, cut := summary(info.Message, api.MaxErrorBytes)
	c.final = func(e *store.Entity) { e.Error, e.ErrorTruncated, e.ErrorInfo = text, cut, info }
	for i := range c.events {
		if api.Terminal(c.events[i].State) {
			c.events[i].Error = text
		}
	}
}

// flush hands the batch to the store.
func (l *link) flush() {
	if len(l.order) == 0 {
		return
	}
	m, size, seq := l.m, l.size, l.seq
	lazy := true
	list := make([]*staged, 0, len(l.order))
	m.mu.Lock()
	for _, c := range l.order {
		if c.run == nil || api.Terminal(c.run.next.State) {
			continue
		}
		if how := m.kernel.ending; how != nil && c.state == api.Cancelled && m.kernel.gen == l.generation {
			// The kernel cancels what runs when it is told to stop. Why it was told is ours to say.
			_, info := endInfo(l.generation, how, control.UnitStatus{})
			c.explain(info)
		}
		s := m.stage(c)
		lazy = lazy && len(s.data) == 0 && !api.Terminal(s.entity.State)
		list = append(list, s)
	}
	m.mu.Unlock()
	clear(l.changes)
	l.order, l.size = l.order[:0], 0

	l.mu.Lock()
	for l.unstored > maxUnstored && !l.closed {
		l.room.Wait()
	}
	l.unstored += size
	l.mu.Unlock()
	op := m.keepOp(list, func() {
		if m.kernel.gen == l.generation {
			m.kernel.acked = seq
		}
	}, func() {
		l.mu.Lock()
		l.unstored -= size
		l.room.Broadcast()
		l.mu.Unlock()
		l.acknowledge(seq, size)
	})
	op.Change.Generation, op.Change.Acked = l.generation, seq
	op.Lazy = lazy
	m.store.Submit(op)
}

// acknowledge tells the kernel that events are durable. Each message wakes a process, so
// that waits for another message to ride on, for a lot of events, or for a moment.
func (l *link) acknowledge(seq int64, size int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ack = seq
	if l.ackBytes += size; l.ackBytes > ackBytes {
		l.sendLocked(nil)
	} else if l.ackTimer == nil && !l.closed {
		l.ackTimer = time.AfterFunc(ackDelay, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.ackTimer = nil
			if l.ack > 0 {
				l.sendLocked(nil)
			}
		})
	}
}

// send writes a message without blocking; what the socket does not take at once
// follows from a goroutine.
func (l *link) send(msg any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sendLocked(msg)
}

// sendLocked sends a message, or nil for what is to be acknowledged alone.
func (l *link) sendLocked(msg any) {
	if l.closed {
		return
	}
	var line []byte
	var err error
	if l.ack > 0 {
		line, err = wire.Encode(line, wire.Ack{Type: wire.TypeAck, Seq: l.ack})
		l.ack, l.ackBytes = 0, 0
	}
	if err == nil && msg != nil {
		line, err = wire.Encode(line, msg)
	}
	if err != nil {
		l.m.log.Error("message to the kernel not sent", "error", err)
	}
	if len(line) == 0 {
		return
	}
	if !l.writing {
		if line = line[l.sock.TrySend(line):]; len(line) == 0 {
			return
		}
		l.writing = true
		l.wg.Add(1)
		go l.writeOut()
	}
	l.out = append(l.out, line...)
}

func (l *link) writeOut() {
	defer l.wg.Done()
	for {
		l.mu.Lock()
		data := l.out
		l.out = nil
		if len(data) == 0 || l.closed {
			l.writing = false
			l.room.Broadcast()
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
		if _, err := l.sock.Send(context.Background(), data, nil); err != nil {
			l.close()
		}
	}
}

// flushOut waits until everything sent is on its way.
func (l *link) flushOut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.writing && !l.closed {
		l.room.Wait()
	}
}

// close ends the connection; the reader then returns.
func (l *link) close() {
	l.sock.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.closed = true
	if l.ackTimer != nil {
		l.ackTimer.Stop()
	}
	l.room.Broadcast()
	for _, cancel := range l.calls {
		cancel()
	}
	for id, ch := range l.interrupts {
		delete(l.interrupts, id)
		close(ch)
	}
}

// interrupt asks the kernel to stop a cell and returns what it did.
func (l *link) interrupt(ctx context.Context, execID string) (string, error) {
	return l.ask(ctx, func(id int64) any { return wire.Interrupt{Type: wire.TypeInterrupt, ID: id, ExecID: &execID} })
}

// reserve makes the kernel begin no more tasks. When it returns without an error the
// manager knows of all that have begun.
func (l *link) reserve(ctx context.Context, reason string) error {
	_, err := l.ask(ctx, func(id int64) any { return wire.Reserve{Type: wire.TypeReserve, ID: id, Reason: reason} })
	return err
}

// ping returns when the kernel's I/O thread has answered, which it does while a cell
// holds the loop.
func (l *link) ping(ctx context.Context) error {
	_, err := l.ask(ctx, func(id int64) any { return wire.Ping{Type: wire.TypePing, ID: id} })
	return err
}

// ask sends a message that is answered by its id and returns the outcome.
func (l *link) ask(ctx context.Context, message func(id int64) any) (string, error) {
	ch := make(chan string, 1)
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return "", rpc.ErrClosed
	}
	l.nextID++
	id := l.nextID
	l.interrupts[id] = ch
	l.mu.Unlock()
	l.send(message(id))
	select {
	case outcome, ok := <-ch:
		if !ok {
			return "", rpc.ErrClosed
		}
		return outcome, nil
	case <-ctx.Done():
		l.mu.Lock()
		delete(l.interrupts, id)
		l.mu.Unlock()
		return "", ctx.Err()
	}
}

// call answers a request of the Python API.
func (l *link) call(msg *wire.FromKernel) {
	begun := time.Now()
	ctx, cancel := context.WithCancel(l.m.ctx)
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		cancel()
		return
	}
	l.calls[msg.ID] = cancel
	l.mu.Unlock()
	id := msg.ID
	c := Call{Method: msg.Method, Params: msg.Params, ClientID: msg.Context.ClientID, ConnectionID: msg.Context.ConnectionID, ExecID: msg.Context.ExecID, Again: msg.Again}
	l.wg.Add(1)
	go func() {
		defer l.wg.Done()
		result, err := l.m.answerCall(ctx, c)
		l.mu.Lock()
		delete(l.calls, id)
		l.mu.Unlock()
		cancel()
		if err != nil && l.m.ctx.Err() != nil {
			return // it failed because this manager ends: the kernel asks the next one
		}
		r := wire.CallResult{Type: wire.TypeCallResult, ID: id, Result: result}
		if err != nil {
			r.Result, r.Error = nil, rpc.AsError(err)
		} else if result == nil {
			r.Result = json.RawMessage("null")
		}
		l.send(r)
		l.m.meter.add(c.Method, time.Since(begun))
	}()
}
