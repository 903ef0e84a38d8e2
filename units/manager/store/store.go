// Package store is the manager's durable memory: .mypr/history.sqlite3.
//
// It owns the database file, its schema and its one writer. It holds records of
// executions, logical client ids, the lifecycle log, messages and the generations of
// the kernel; the output of executions is in their journals (package journal), not here.
// It knows no rule of the session: what may follow what is the manager's business.
//
// # Writing
//
// There is one writer connection and no writer goroutine: whoever submits an
// operation while nobody writes becomes the leader, puts everything that is waiting
// into one transaction, commits it and calls everybody back, in order. A caller that
// finds a leader leaves its operation in the queue. So a lone caller pays no switch of
// goroutines and many callers share one commit (group commit).
//
// The database is in WAL mode with synchronous=NORMAL: a commit survives the death of
// the process at once, and that of the machine from the next checkpoint on.
//
// A small Change does not wait for a commit. It is written to the redo log, which makes
// it as durable, and its callback runs; the transactions that carry such changes out
// follow a moment later, many at a time. What reads the database has them carried out
// first.
//
// # Failure
//
// When the disk refuses (full, read-only, I/O error) the whole transaction is rolled
// back. Ordinary operations fail with an error that IsStorage recognises. Operations
// with Keep stay in the queue, in order, and are tried again with the next ordinary
// operation, on Retry, and on a timer that exists only while something is failing.
package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// lazyDelay is how long a Lazy operation waits for others to share a commit with.
const lazyDelay = 2 * time.Millisecond

// applyDelay is how long changes in the redo log wait to be carried out together, and
// maxPending how many may wait.
const (
	applyDelay = time.Second
	maxPending = 1024
)

// maxBatch bounds the operations of one transaction, so that nobody waits for too many others.
const maxBatch = 512

// walLimit is the size from which the write-ahead log is copied into the database, in
// the background: done by the writer itself it would delay one commit in a few hundred
// by two fsyncs.
const walLimit = 4 << 20

// ErrClosed ends operations that were still waiting when the store was closed.
var ErrClosed = errors.New("the history database is closed")

var errDamaged = errors.New("the file is damaged")

// Op is one operation: a function or a change. Apply runs inside a transaction, possibly
// more than once: a failed transaction is rolled back and repeated.
//
// Done is called exactly once, when the operation is durable or has failed for good, in
// the order of submission and without any lock held; it must not block, because later
// operations wait for it. After is called once what it did is in the database and the
// journals, which for a change may be later; not when it failed.
type Op struct {
	Apply  func(*Tx) error
	Change *Change     // instead of Apply
	Done   func(error) // may be nil
	After  func()      // may be nil
	Keep   bool        // repeat until it succeeds or the store is closed
	Lazy   bool        // may wait a moment for company

	redo int64 // sequence number in the redo log, 0: not in it
}

// Store is the open database.
type Store struct {
	path  string
	tx    *Tx
	ro    *sql.DB
	known *lookup
	write func(id string, data []byte, offset int64) error
	wg    sync.WaitGroup // leaders that were handed the queue, checkpoints

	mu         sync.Mutex // guards the fields below
	queue      []*Op
	redo       *redo
	undone     int            // operations in the queue or being committed whose Done has not been called for
	pending    int            // operations that are done and not in the database
	inserts    map[string]int // requests of executions among these, see requestKey
	apply      *time.Timer
	calls      []func() // of Done and After, in order
	calling    bool     // somebody runs them
	leading    bool
	idle       sync.Cond // leading became false
	closed     bool
	failure    error // of the last transaction, nil after a good one
	retryDelay time.Duration
	retry      *time.Timer
	lazy       *time.Timer
	commits    int
	checking   bool // a checkpoint runs
	reset      bool // the bulk of the log was copied: copy the rest and begin it anew
	onFailure  func(error)
}

// Options of Open.
type Options struct {
	// Write puts output into the journal of an execution, for changes that a process
	// before this one made durable and did not carry out. Required if there may be any.
	Write func(id string, data []byte, offset int64) error
	// KeepLog is how many lines of the lifecycle log are kept, and up to a few hundred
	// more; 0: all.
	KeepLog int
	// OnFailure, when not nil, is told of every change between failing (the error) and
	// working (nil); it must not block.
	OnFailure func(error)
}

// Open opens or creates the database in dir. A database that is damaged is moved
// aside, with its companions, and a new one is begun: moved then names the file it is
// kept in.
func Open(dir string, o Options) (s *Store, moved string, err error) {
	path := filepath.Join(dir, "history.sqlite3")
	marker := path + ".damaged"
	if _, err := os.Lstat(marker); err == nil {
		if moved, err = moveAside(path); err != nil {
			return nil, "", err
		}
		if err := os.Remove(marker); err != nil {
			return nil, "", err
		}
	}
	s, err = open(path, o)
	if err != nil && isDamage(err) && moved == "" {
		if moved, err = moveAside(path); err != nil {
			return nil, "", err
		}
		s, err = open(path, o)
	}
	if err != nil {
		return nil, "", fmt.Errorf("open %s: %w", path, err)
	}
	return s, moved, nil
}

const redoSuffix = "-redo"

// moveAside renames the database and the files that belong to it.
func moveAside(path string) (string, error) {
	to := path + ".corrupt-" + time.Now().UTC().Format("20060102T150405.000")
	for _, suffix := range []string{"", "-wal", "-shm", redoSuffix} {
		if err := os.Rename(path+suffix, to+suffix); err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", fmt.Errorf("the history database %s is damaged and cannot be moved aside: %w", path, err)
		}
	}
	return to, nil
}

func dsn(path string, pragmas ...string) string {
	q := url.Values{"_pragma": pragmas}
	u := url.URL{Scheme: "file", Path: path}
	return u.String() + "?" + q.Encode()
}

func open(path string, o Options) (*Store, error) {
	conn, err := (&sqlite.Driver{}).Open(dsn(path, "busy_timeout(5000)", "journal_mode(WAL)", "synchronous(NORMAL)",
		"wal_autocheckpoint(0)", "journal_size_limit(8388608)", "cache_size(-1024)"))
	if err != nil {
		return nil, err
	}
	s := &Store{path: path, tx: &Tx{conn: conn, keepLog: int64(o.KeepLog)}, write: o.Write, inserts: map[string]int{}, onFailure: o.OnFailure}
	s.idle.L = &s.mu
	if err := s.prepare(); err != nil {
		s.release()
		return nil, err
	}
	return s, nil
}

func (s *Store) prepare() (err error) {
	if err := s.tx.migrate(); err != nil {
		return err
	}
	if s.redo, err = openRedo(s.path + redoSuffix); err != nil {
		return err
	}
	if err := s.redo.recover(s.tx, s.write); err != nil {
		return err
	}
	last, err := s.tx.scalar(`SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'entities'), 0)`)
	if err != nil {
		return err
	}
	n, _ := last.(int64)
	s.tx.seq.Store(n)
	if s.known, err = newLookup(s.path); err != nil {
		return err
	}
	if s.ro, err = sql.Open("sqlite", dsn(s.path, "busy_timeout(5000)", "query_only(1)", "cache_size(-512)")); err != nil {
		return err
	}
	s.ro.SetMaxOpenConns(2)
	s.ro.SetMaxIdleConns(2)
	return nil
}

// release closes what prepare has opened.
func (s *Store) release() error {
	var errs []error
	if s.ro != nil {
		errs = append(errs, s.ro.Close())
	}
	if s.known != nil {
		errs = append(errs, s.known.close())
	}
	if s.redo != nil {
		errs = append(errs, s.redo.f.Close())
	}
	return errors.Join(append(errs, s.tx.close())...)
}

// NextSeq is the sequence number of a new entity.
func (s *Store) NextSeq() int64 { return s.tx.seq.Add(1) }

// Close ends the store. Operations that still wait are tried once more; those that
// fail end with ErrClosed.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	stopTimer(&s.retry)
	stopTimer(&s.lazy)
	stopTimer(&s.apply)
	for s.leading {
		s.idle.Wait()
	}
	if len(s.queue) > 0 {
		s.leading = true
		s.mu.Unlock()
		s.lead()
		s.mu.Lock()
		for s.leading {
			s.idle.Wait()
		}
	}
	s.mu.Unlock()
	s.wg.Wait()
	s.mu.Lock()
	for s.calling {
		s.idle.Wait()
	}
	s.mu.Unlock()
	return s.release()
}

func stopTimer(t **time.Timer) {
	if *t != nil {
		(*t).Stop()
		*t = nil
	}
}

// Err is why the last transaction failed, nil while the store works.
func (s *Store) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failure
}

// Submit hands operations over, to be done in order. It may run the transaction, and
// the callbacks of others, on the caller's goroutine.
func (s *Store) Submit(ops ...*Op) {
	s.mu.Lock()
	urgent := false
	for _, op := range ops {
		if s.closed {
			s.call(op, ErrClosed)
			continue
		}
		s.queue = append(s.queue, op)
		if s.record(op) {
			continue
		}
		s.undone++
		// While the disk refuses, those to keep leave the next attempt to others, or to
		// the timer if it runs.
		urgent = urgent || !op.Lazy && !(op.Keep && s.retry != nil) || s.failure != nil && s.retry == nil
	}
	lead := !s.leading && !s.closed && (urgent || s.pending >= maxPending)
	switch {
	case lead:
		s.leading = true
	case s.leading || s.closed || len(s.queue) == 0 || s.failure != nil:
	case s.undone > 0 && s.lazy == nil:
		s.lazy = time.AfterFunc(lazyDelay, s.Retry)
	case s.undone == 0 && s.apply == nil:
		s.apply = time.AfterFunc(applyDelay, s.Retry)
	}
	if lead && !urgent { // nobody waits for it
		lead = false
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			s.lead()
		}()
	}
	s.runCalls()
	s.mu.Unlock()
	if lead {
		s.lead()
	}
}

// record makes a small change durable at once, unless something before it is not
// durable yet or the log is so long that it must be emptied first, and calls for its
// callback. Called with mu held.
func (s *Store) record(op *Op) bool {
	c := op.Change
	if c == nil || s.undone > 0 || s.failure != nil || c.size() > maxRedo || s.redo.size > 8*redoLimit {
		return false
	}
	if err := s.redo.append(c); err != nil {
		return false // the transaction will say why not
	}
	op.redo = s.redo.seq
	s.pending++
	for _, e := range c.Insert {
		if e.Request != nil {
			s.inserts[requestKey(e.Client, *e.Request)]++
		}
	}
	s.call(op, nil)
	return true
}

// call queues the callback of an operation. Called with mu held.
func (s *Store) call(op *Op, err error) {
	if op.Done != nil {
		s.calls = append(s.calls, func() { op.Done(err) })
	}
}

// runCalls runs queued callbacks, in order, without the lock, unless somebody does
// already. Called with mu held.
func (s *Store) runCalls() {
	if s.calling {
		return
	}
	s.calling = true
	for len(s.calls) > 0 {
		calls := s.calls
		s.calls = nil
		s.mu.Unlock()
		for _, f := range calls {
			f()
		}
		s.mu.Lock()
	}
	s.calling = false
	s.idle.Broadcast()
}

// Flush returns when everything that is durable is in the database and the journals,
// or cannot be brought there now.
func (s *Store) Flush() {
	s.mu.Lock()
	n := s.pending
	s.mu.Unlock()
	if n > 0 {
		_ = s.Do(func(*Tx) error { return nil })
	}
}

// Do runs one operation and waits for its commit.
func (s *Store) Do(apply func(*Tx) error) error {
	done := make(chan error, 1)
	s.Submit(&Op{Apply: apply, Done: func(err error) { done <- err }})
	return <-done
}

// Retry commits what is waiting now, as after a failure that may be over.
func (s *Store) Retry() {
	s.mu.Lock()
	if s.leading || s.closed || len(s.queue) == 0 {
		s.mu.Unlock()
		return
	}
	s.leading = true
	s.mu.Unlock()
	s.lead()
}

// lead runs one transaction and hands the rest of the queue to a goroutine, so that
// no caller works for others longer than for itself.
func (s *Store) lead() {
	s.mu.Lock()
	stopTimer(&s.lazy)
	stopTimer(&s.retry)
	stopTimer(&s.apply)
	if len(s.queue) == 0 {
		s.leading = false
		s.idle.Broadcast()
		s.mu.Unlock()
		return
	}
	batch := s.queue
	if len(batch) > maxBatch {
		batch = batch[:maxBatch:maxBatch]
		s.queue = s.queue[maxBatch:]
	} else {
		s.queue = nil
	}
	s.mu.Unlock()

	err := s.commit(batch)
	var kept []*Op
	done := func(op *Op, err error) { // with mu held
		if op.redo > 0 {
			s.pending--
			for _, e := range op.Change.Insert {
				if e.Request == nil {
					continue
				}
				key := requestKey(e.Client, *e.Request)
				if s.inserts[key]--; s.inserts[key] == 0 {
					delete(s.inserts, key)
				}
			}
			if err != nil { // it was promised: only a mistake of ours leads here
				slog.Error("a change of the redo log cannot be carried out", "error", err)
			}
		} else {
			s.undone--
			s.call(op, err)
		}
		if err == nil && op.After != nil {
			s.calls = append(s.calls, op.After)
		}
	}
	if err != nil && !IsStorage(err) && len(batch) > 1 { // one of them is to blame: each for itself
		for i := range batch {
			if err = s.commit(batch[i : i+1]); err != nil && IsStorage(err) {
				batch = batch[i:]
				break
			}
			s.mu.Lock()
			done(batch[i], err)
			s.mu.Unlock()
			err = nil
		}
		if err == nil {
			batch = nil
		}
	}
	s.mu.Lock()
	for _, op := range batch {
		if (op.Keep || op.redo > 0) && IsStorage(err) {
			kept = append(kept, op)
		} else {
			done(op, err)
		}
	}
	s.mu.Unlock()
	if !IsStorage(err) {
		err = nil
	}
	s.after(err, kept)
}

// after decides what happens next: the following batch, a retry or rest.
func (s *Store) after(err error, kept []*Op) {
	if isDamage(err) { // the next start moves the database aside
		_ = os.WriteFile(s.path+".damaged", []byte(err.Error()+"\n"), 0o600)
	}
	s.mu.Lock()
	s.queue = append(kept, s.queue...)
	changed := (s.failure == nil) != (err == nil)
	s.failure = err
	again := false
	for _, op := range s.queue[len(kept):] {
		again = again || op.redo == 0 // those in the redo log can wait for more
	}
	if err == nil && s.pending >= maxPending {
		again = true
	}
	checkpoint := false
	if err == nil {
		s.retryDelay = 0
		if s.pending == 0 && s.redo.size > redoLimit {
			_ = s.redo.clear()
		}
		if !again && len(s.queue) > 0 && s.apply == nil && !s.closed {
			s.apply = time.AfterFunc(applyDelay, s.Retry)
		}
		if s.commits++; s.commits%16 == 0 && !s.checking && !s.closed {
			checkpoint, s.checking = true, true
			s.wg.Add(1)
		}
	} else if len(s.queue) > 0 && !s.closed {
		s.retryDelay = min(max(2*s.retryDelay, 250*time.Millisecond), 8*time.Second)
		s.retry = time.AfterFunc(s.retryDelay, s.Retry)
	}
	if s.closed && err == nil && len(s.queue) > 0 {
		again = true
	}
	if s.closed && err != nil {
		for _, op := range s.queue {
			if op.redo == 0 { // the others are durable: the next process carries them out
				s.undone--
				s.call(op, ErrClosed)
			}
		}
		s.queue, again = nil, false
	}
	if again && err != nil { // only what can fail at once is worth another attempt now
		again = false
		for _, op := range s.queue[len(kept):] {
			again = again || !op.Keep && op.redo == 0
		}
	}
	rest := s.reset && err == nil && !s.closed
	if rest {
		s.reset = false
	}
	s.leading = again || rest
	if s.leading {
		s.wg.Add(1)
	} else {
		s.idle.Broadcast()
	}
	if changed && s.onFailure != nil {
		s.calls = append([]func(){func() { s.onFailure(err) }}, s.calls...)
	}
	s.runCalls()
	s.mu.Unlock()
	if checkpoint {
		go s.checkpoint()
	}
	if again || rest {
		go func() {
			defer s.wg.Done()
			if rest {
				_ = s.tx.exec("PRAGMA wal_checkpoint(PASSIVE)")
			}
			s.lead()
		}()
	}
}

// commit runs the operations in one transaction.
func (s *Store) commit(ops []*Op) (err error) {
	if err := s.tx.exec("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	redo, pack := int64(0), packs(ops)
	for _, op := range ops {
		if op.Change != nil {
			err = op.Change.apply(s.tx, s.write, pack)
		} else {
			err = op.Apply(s.tx)
		}
		if err != nil {
			break
		}
		redo = max(redo, op.redo)
	}
	if err == nil && redo > 0 {
		err = s.tx.setRedo(redo)
	}
	if err == nil {
		err = s.tx.exec("COMMIT")
	}
	if err != nil {
		_ = s.tx.exec("ROLLBACK") // fails when SQLite has rolled back by itself
	}
	return err
}

// checkpoint copies the log into the database when it has grown. The bulk is copied
// beside the writer. But a log that is written to is never copied to its end, and only
// one that is can be begun anew: the little that came meanwhile is copied by the leader,
// between two transactions.
func (s *Store) checkpoint() {
	defer s.wg.Done()
	big := false
	if fi, err := os.Stat(s.path + "-wal"); err == nil && fi.Size() > walLimit {
		big = s.checkpointNow() == nil
	}
	s.mu.Lock()
	s.checking = false
	s.reset = s.reset || big
	s.mu.Unlock()
}

func (s *Store) checkpointNow() error {
	db, err := sql.Open("sqlite", dsn(s.path, "busy_timeout(0)"))
	if err != nil {
		return err
	}
	defer db.Close()
	_, err = db.ExecContext(context.Background(), "PRAGMA wal_checkpoint(PASSIVE)")
	return err
}

// IsStorage reports whether the error is the disk's refusal rather than a fault of the operation.
func IsStorage(err error) bool {
	if err == nil {
		return false
	}
	var e *sqlite.Error
	if errors.As(err, &e) {
		switch e.Code() & 0xff {
		case sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM,
			sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
			return true
		}
		return false
	}
	for _, no := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EROFS, syscall.EIO, syscall.EMFILE, syscall.ENFILE, syscall.EFBIG, syscall.ENOMEM} {
		if errors.Is(err, no) {
			return true
		}
	}
	return errors.Is(err, ErrClosed)
}

func isDamage(err error) bool {
	if errors.Is(err, errDamaged) {
		return true
	}
	var e *sqlite.Error
	if errors.As(err, &e) {
		c := e.Code() & 0xff
		return c == sqlite3.SQLITE_CORRUPT || c == sqlite3.SQLITE_NOTADB
	}
	return false
}

// Tx is the writer connection inside a transaction. Its methods are called from Apply only.
type Tx struct {
	conn    driver.Conn
	stmts   map[string]driver.Stmt
	seq     atomic.Int64 // of the last entity
	keepLog int64
}

func (t *Tx) close() error {
	for _, st := range t.stmts {
		st.Close()
	}
	return t.conn.Close()
}

// prepare makes a statement once.
func (t *Tx) prepare(query string) (driver.Stmt, error) {
	if st := t.stmts[query]; st != nil {
		return st, nil
	}
	st, err := t.conn.Prepare(query)
	if err != nil {
		return nil, err
	}
	if t.stmts == nil {
		t.stmts = map[string]driver.Stmt{}
	}
	t.stmts[query] = st
	return st, nil
}

// exec runs a statement that it prepares once.
func (t *Tx) exec(query string, args ...driver.Value) error {
	_, err := t.run(query, args...)
	return err
}

func (t *Tx) run(query string, args ...driver.Value) (driver.Result, error) {
	st, err := t.prepare(query)
	if err != nil {
		return nil, err
	}
	//lint:ignore SA1019 the Context variants cost a watcher goroutine per statement in this driver
	return st.Exec(args)
}
