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
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// lazyDelay is how long a Lazy operation waits for others to share a commit with.
const lazyDelay = 2 * time.Millisecond

// maxBatch bounds the operations of one transaction, so that nobody waits for too many others.
const maxBatch = 512

// walLimit is the size from which the write-ahead log is copied into the database, in
// the background: done by the writer itself it would delay one commit in a few hundred
// by two fsyncs.
const walLimit = 4 << 20

// ErrClosed ends operations that were still waiting when the store was closed.
var ErrClosed = errors.New("the history database is closed")

var errDamaged = errors.New("the file is damaged")

// Op is one operation. Apply runs inside a transaction, possibly more than once: a
// failed transaction is rolled back and repeated. Done is called exactly once, after
// the commit or the final failure, in the order of submission and without any lock
// held; it must not block, because later operations wait for it.
type Op struct {
	Apply func(*Tx) error
	Done  func(error) // may be nil
	Keep  bool        // repeat until it succeeds or the store is closed
	Lazy  bool        // may wait a moment for company
}

// Store is the open database.
type Store struct {
	path string
	tx   *Tx
	ro   *sql.DB
	wg   sync.WaitGroup // leaders that were handed the queue, checkpoints

	mu         sync.Mutex // guards the fields below
	queue      []*Op
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

// Open opens or creates the database in dir. A database that is damaged is moved
// aside, with its companions, and a new one is begun: moved then names the file it is
// kept in. onFailure, when not nil, is told of every change between failing (the
// error) and working (nil); it must not block.
func Open(dir string, onFailure func(error)) (s *Store, moved string, err error) {
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
	s, err = open(path, onFailure)
	if err != nil && isDamage(err) && moved == "" {
		if moved, err = moveAside(path); err != nil {
			return nil, "", err
		}
		s, err = open(path, onFailure)
	}
	if err != nil {
		return nil, "", fmt.Errorf("open %s: %w", path, err)
	}
	return s, moved, nil
}

// moveAside renames the database and the files that belong to it.
func moveAside(path string) (string, error) {
	to := path + ".corrupt-" + time.Now().UTC().Format("20060102T150405.000")
	for _, suffix := range []string{"", "-wal", "-shm"} {
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

func open(path string, onFailure func(error)) (*Store, error) {
	conn, err := (&sqlite.Driver{}).Open(dsn(path, "busy_timeout(5000)", "journal_mode(WAL)", "synchronous(NORMAL)",
		"wal_autocheckpoint(0)", "journal_size_limit(8388608)", "cache_size(-1024)"))
	if err != nil {
		return nil, err
	}
	tx := &Tx{conn: conn}
	if err := tx.migrate(); err != nil {
		conn.Close()
		return nil, err
	}
	ro, err := sql.Open("sqlite", dsn(path, "busy_timeout(5000)", "query_only(1)", "cache_size(-512)"))
	if err != nil {
		conn.Close()
		return nil, err
	}
	ro.SetMaxOpenConns(2)
	ro.SetMaxIdleConns(2)
	s := &Store{path: path, tx: tx, ro: ro, onFailure: onFailure}
	s.idle.L = &s.mu
	return s, nil
}

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
	err := s.ro.Close()
	return errors.Join(err, s.tx.close())
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

// Submit hands operations over, to be committed together and in order. It may run the
// transaction, and the callbacks of others, on the caller's goroutine.
func (s *Store) Submit(ops ...*Op) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		for _, op := range ops {
			op.done(ErrClosed)
		}
		return
	}
	urgent := false
	for _, op := range ops {
		// While the disk refuses, those to keep leave the next attempt to others, or to
		// the timer if it runs.
		urgent = urgent || !op.Lazy && !(op.Keep && s.retry != nil) || s.failure != nil && s.retry == nil
	}
	s.queue = append(s.queue, ops...)
	switch {
	case s.leading:
		s.mu.Unlock()
	case !urgent:
		if s.failure == nil && s.lazy == nil {
			s.lazy = time.AfterFunc(lazyDelay, s.Retry)
		}
		s.mu.Unlock()
	default:
		s.leading = true
		s.mu.Unlock()
		s.lead()
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
	if err != nil && !IsStorage(err) && len(batch) > 1 { // one of them is to blame: each for itself
		for i := range batch {
			if err = s.commit(batch[i : i+1]); err != nil && IsStorage(err) {
				batch = batch[i:]
				break
			}
			batch[i].done(err)
			err = nil
		}
		if err == nil {
			batch = nil
		}
	}
	for _, op := range batch {
		if op.Keep && IsStorage(err) {
			kept = append(kept, op)
		} else {
			op.done(err)
		}
	}
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
	again := len(s.queue) > len(kept)
	checkpoint := false
	if err == nil {
		s.retryDelay = 0
		if s.commits++; s.commits%64 == 0 && !s.checking && !s.closed {
			checkpoint, s.checking = true, true
			s.wg.Add(1)
		}
	} else if len(s.queue) > 0 && !s.closed {
		s.retryDelay = min(max(2*s.retryDelay, 250*time.Millisecond), 8*time.Second)
		s.retry = time.AfterFunc(s.retryDelay, s.Retry)
	}
	var dropped []*Op
	if s.closed && err != nil {
		dropped, s.queue, again = s.queue, nil, false
	}
	if again && err != nil { // only what can fail at once is worth another attempt now
		again = false
		for _, op := range s.queue[len(kept):] {
			again = again || !op.Keep
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
	onFailure := s.onFailure
	s.mu.Unlock()
	if changed && onFailure != nil {
		onFailure(err)
	}
	for _, op := range dropped {
		op.done(ErrClosed)
	}
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

func (op *Op) done(err error) {
	if op.Done != nil {
		op.Done(err)
	}
}

// commit runs the operations in one transaction.
func (s *Store) commit(ops []*Op) (err error) {
	if err := s.tx.exec("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	for _, op := range ops {
		if err = op.Apply(s.tx); err != nil {
			break
		}
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
	conn  driver.Conn
	stmts map[string]driver.Stmt
}

func (t *Tx) close() error {
	for _, st := range t.stmts {
		st.Close()
	}
	return t.conn.Close()
}

// exec runs a statement that it prepares once.
func (t *Tx) exec(query string, args ...driver.Value) error {
	_, err := t.run(query, args...)
	return err
}

func (t *Tx) run(query string, args ...driver.Value) (driver.Result, error) {
	st := t.stmts[query]
	if st == nil {
		var err error
		if st, err = t.conn.Prepare(query); err != nil {
			return nil, err
		}
		if t.stmts == nil {
			t.stmts = map[string]driver.Stmt{}
		}
		t.stmts[query] = st
	}
	return st.Exec(args) //nolint:staticcheck // the driver's own interface: no context, no watcher goroutine for each statement
}
