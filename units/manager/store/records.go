package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"io"
	"sync"

	"modernc.org/sqlite"

	"mypr/internal/api"
)

// Entity is one record.
type Entity struct {
	Seq           int64   `json:"seq"`
	ID            string  `json:"id"`
	Kind          string  `json:"kind,omitempty"`
	Client        string  `json:"client,omitempty"`
	Request       *string `json:"request,omitempty"`    // nil: not de-duplicated
	Generation    string  `json:"generation,omitempty"` // "" until a kernel is chosen
	State         string  `json:"state,omitempty"`
	Created       float64 `json:"created,omitempty"` // Unix seconds
	Code          string  `json:"code,omitempty"`
	JournalEvents int64   `json:"journal_events,omitempty"`
	JournalBytes  int64   `json:"journal_bytes,omitempty"`
	Journal       []byte  `json:"-"` // the journal itself, of those that have no file; only read
	Record        `json:"record"`
}

// Record is the part of an entity that no query looks into.
type Record struct {
	Connection     string         `json:"connection_id,omitempty"`
	Exec           string         `json:"exec_id,omitempty"` // the cell that started it, where it is no cell itself
	Started        float64        `json:"started_at,omitempty"`
	Finished       float64        `json:"finished_at,omitempty"`
	OutputBytes    int64          `json:"output_bytes,omitempty"` // text and artifacts
	Truncated      bool           `json:"truncated,omitempty"`
	Error          string         `json:"error,omitempty"`
	ErrorTruncated bool           `json:"error_truncated,omitempty"`
	ErrorInfo      *api.ErrorInfo `json:"error_info,omitempty"`
	Warnings       []api.Warning  `json:"warnings,omitempty"`
	// Job is what package jobs has to say of a job.
	Job json.RawMessage `json:"job,omitempty"`
}

// Generation is one kernel that there was.
type Generation struct {
	Seq        int64
	Generation string
	Started    float64
	Acked      int64
	Ended      float64 // 0: it may live
	Cause      string  // Kind of the notice
	Text       string  // of the notice
}

// live is the state set of the index entities_live.
const live = "state IN ('queued', 'running', 'restarting')"

// Insert adds an entity and sets its Seq if it has none. It reports false, and adds nothing, when the
// client has used the request id before.
func (t *Tx) Insert(e *Entity) (bool, error) {
	record, err := json.Marshal(&e.Record)
	if err != nil {
		return false, err
	}
	var request driver.Value
	if e.Request != nil {
		request = *e.Request
	}
	if e.Seq == 0 {
		e.Seq = t.seq.Add(1)
	}
	r, err := t.run(`INSERT INTO entities(seq, id, kind, client, request, generation, state, created, code, record)
		VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
		e.Seq, e.ID, e.Kind, e.Client, request, e.Generation, e.State, e.Created, e.Code, string(record))
	if err != nil {
		return false, err
	}
	n, err := r.RowsAffected()
	return n > 0, err
}

// Update stores everything of an entity that can change.
func (t *Tx) Update(e *Entity) error {
	record, err := json.Marshal(&e.Record)
	if err != nil {
		return err
	}
	return t.exec(`UPDATE entities SET generation = ?, state = ?, journal_events = ?, journal_bytes = ?, record = ? WHERE id = ?`,
		e.Generation, e.State, e.JournalEvents, e.JournalBytes, string(record), e.ID)
}

// Progress stores how far the journal of an entity counts.
func (t *Tx) Progress(id string, events, bytes int64) error {
	return t.exec(`UPDATE entities SET journal_events = ?, journal_bytes = ? WHERE id = ?`, events, bytes, id)
}

// Lines of the lifecycle log go when it has more than Options.KeepLog: every trimEvery
// lines, so that not each one pays for it, and at most trimMost at a time, so that the
// transaction that happens to do it stays short where there are very many.
const (
	trimEvery = 256
	trimMost  = 1024
)

// Log adds a line to the lifecycle log, and takes old ones away.
func (t *Tx) Log(e *api.LogEvent) error {
	var data driver.Value
	if len(e.Data) > 0 {
		raw, err := json.Marshal(e.Data)
		if err != nil {
			return err
		}
		data = string(raw)
	}
	r, err := t.run(`INSERT INTO events(time, event, kind, id, client, connection, exec, state, error, data) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		e.Time, e.Event, e.Kind, e.ID, e.ClientID, e.ConnectionID, e.ExecID, e.State, e.Error, data)
	if err != nil || t.keepLog == 0 {
		return err
	}
	seq, err := r.LastInsertId()
	if err != nil || seq%trimEvery != 0 {
		return err
	}
	return t.exec(`DELETE FROM events WHERE seq <= min(?, (SELECT min(seq) FROM events) + ?)`, seq-t.keepLog, int64(trimMost-1))
}

// Acked stores the last kernel event that is durable.
func (t *Tx) Acked(generation string, seq int64) error {
	return t.exec(`UPDATE generations SET acked = ? WHERE generation = ?`, seq, generation)
}

// Begin adds a generation, or leaves the one that is there.
func (t *Tx) Begin(generation string, at float64) error {
	return t.exec(`INSERT INTO generations(generation, started) VALUES(?, ?) ON CONFLICT DO NOTHING`, generation, at)
}

// End closes a generation and returns its row; an end that is stored already stays.
func (t *Tx) End(generation string, at float64, cause, text string) (seq int64, err error) {
	if err := t.exec(`UPDATE generations SET ended = ?, cause = ?, text = ? WHERE generation = ? AND ended IS NULL`, at, cause, text, generation); err != nil {
		return 0, err
	}
	v, err := t.scalar(`SELECT seq FROM generations WHERE generation = ?`, generation)
	seq, _ = v.(int64)
	return seq, err
}

// Reserve takes a logical client id for ever. It reports false when it is taken already.
// A new client need not be told of what ended before it: told is the last generation's row.
func (t *Tx) Reserve(id string, automatic bool, at float64) (bool, error) {
	auto := int64(0)
	if automatic {
		auto = 1
	}
	r, err := t.run(`INSERT INTO client_ids(id, automatic, created, last_seen, told)
		VALUES(?, ?, ?, ?, coalesce((SELECT max(seq) FROM generations WHERE ended IS NOT NULL), 0)) ON CONFLICT DO NOTHING`, id, auto, at, at)
	if err != nil {
		return false, err
	}
	n, err := r.RowsAffected()
	return n > 0, err
}

// Seen stores when a client was last there.
func (t *Tx) Seen(id string, at float64) error {
	return t.exec(`UPDATE client_ids SET last_seen = ? WHERE id = ?`, at, id)
}

// Told stores up to which generation's end a client was told.
func (t *Tx) Told(id string, generation int64) error {
	return t.exec(`UPDATE client_ids SET told = ? WHERE id = ?`, generation, id)
}

// SetMeta stores a named value.
func (t *Tx) SetMeta(key, value string) error {
	return t.exec(`INSERT INTO meta(key, value) VALUES(?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value`, key, value)
}

// Send adds a message and returns its id.
func (t *Tx) Send(from, to, text string, data json.RawMessage, replyTo *int64, at float64) (int64, error) {
	var d, reply driver.Value
	if len(data) > 0 {
		d = string(data)
	}
	if replyTo != nil {
		reply = *replyTo
	}
	r, err := t.run(`INSERT INTO messages(sender, recipient, text, data, reply_to, created) VALUES(?, ?, ?, ?, ?, ?)`, from, to, text, d, reply, at)
	if err != nil {
		return 0, err
	}
	return r.LastInsertId()
}

// The reads below see all that is durable and run beside the writer.

const entityColumns = `seq, id, kind, client, request, generation, state, created, code, journal_events, journal_bytes, journal, record`

func scanEntity(scan func(...any) error) (*Entity, error) {
	var e Entity
	var record string
	if err := scan(&e.Seq, &e.ID, &e.Kind, &e.Client, &e.Request, &e.Generation, &e.State, &e.Created, &e.Code,
		&e.JournalEvents, &e.JournalBytes, &e.Journal, &record); err != nil {
		return nil, err
	}
	return &e, json.Unmarshal([]byte(record), &e.Record)
}

func (s *Store) entity(query string, args ...any) (*Entity, error) {
	s.Flush()
	e, err := scanEntity(s.ro.QueryRow(query, args...).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	return e, err
}

// Entity is the record with this id, or nil.
func (s *Store) Entity(id string) (*Entity, error) {
	return s.entity(`SELECT `+entityColumns+` FROM entities WHERE id = ?`, id)
}

func requestKey(client, request string) string { return client + "\x00" + request }

// Known reports whether a client has used a request id. It is asked for every cell, so
// it has a connection and a prepared statement of its own.
func (s *Store) Known(client, request string) (bool, error) {
	s.mu.Lock()
	_, pending := s.inserts[requestKey(client, request)]
	s.mu.Unlock()
	if pending {
		return true, nil
	}
	return s.known.ask(client, request)
}

// lookup answers Known from the database.
type lookup struct {
	mu   sync.Mutex // one question at a time
	conn driver.Conn
	stmt driver.Stmt
}

func newLookup(path string) (*lookup, error) {
	conn, err := (&sqlite.Driver{}).Open(dsn(path, "busy_timeout(5000)", "query_only(1)", "cache_size(-256)"))
	if err != nil {
		return nil, err
	}
	stmt, err := conn.Prepare(`SELECT 1 FROM entities WHERE client = ? AND request = ?`)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return &lookup{conn: conn, stmt: stmt}, nil
}

func (l *lookup) close() error { return errors.Join(l.stmt.Close(), l.conn.Close()) }

func (l *lookup) ask(client, request string) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	//lint:ignore SA1019 the Context variants cost a watcher goroutine per statement in this driver
	rows, err := l.stmt.Query([]driver.Value{client, request})
	if err != nil {
		return false, err
	}
	defer rows.Close()
	switch err := rows.Next(make([]driver.Value, 1)); err {
	case nil:
		return true, nil
	case io.EOF:
		return false, nil
	default:
		return false, err
	}
}

// ByRequest is the execution that a client submitted under a request id, or nil.
func (s *Store) ByRequest(client, request string) (*Entity, error) {
	return s.entity(`SELECT `+entityColumns+` FROM entities WHERE client = ? AND request = ?`, client, request)
}

func (s *Store) entities(query string, args ...any) ([]*Entity, error) {
	s.Flush()
	rows, err := s.ro.QueryContext(context.Background(), query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var list []*Entity
	for rows.Next() {
		e, err := scanEntity(rows.Scan)
		if err != nil {
			return nil, err
		}
		list = append(list, e)
	}
	return list, rows.Err()
}

// Live lists the entities that have not ended, in order of submission.
func (s *Store) Live() ([]*Entity, error) {
	return s.entities(`SELECT ` + entityColumns + ` FROM entities WHERE ` + live + ` ORDER BY seq`)
}

// History lists entities, newest first: at most limit, before the row before when that is not 0.
func (s *Store) History(client string, limit int, before int64) ([]*Entity, error) {
	if before <= 0 {
		before = 1<<63 - 1
	}
	if client != "" {
		return s.entities(`SELECT `+entityColumns+` FROM entities WHERE client = ? AND seq < ? ORDER BY seq DESC LIMIT ?`, client, before, limit)
	}
	return s.entities(`SELECT `+entityColumns+` FROM entities WHERE seq < ? ORDER BY seq DESC LIMIT ?`, before, limit)
}

// Events lists log lines in ascending order: those after a sequence number, or with
// after < 0 the most recent ones.
func (s *Store) Events(client string, after int64, limit int) ([]api.LogEvent, error) {
	s.Flush()
	const columns = `seq, time, event, kind, id, client, connection, exec, state, error, data`
	where, args := ``, []any{}
	if client != "" {
		where, args = `client = ? AND `, append(args, client)
	}
	query := `SELECT ` + columns + ` FROM events WHERE ` + where + `seq > ? ORDER BY seq LIMIT ?`
	if after < 0 {
		query = `SELECT * FROM (SELECT ` + columns + ` FROM events WHERE ` + where + `seq > ? ORDER BY seq DESC LIMIT ?) ORDER BY seq`
	}
	rows, err := s.ro.QueryContext(context.Background(), query, append(args, after, limit)...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	list := []api.LogEvent{}
	for rows.Next() {
		var e api.LogEvent
		var data sql.NullString
		if err := rows.Scan(&e.Seq, &e.Time, &e.Event, &e.Kind, &e.ID, &e.ClientID, &e.ConnectionID, &e.ExecID, &e.State, &e.Error, &data); err != nil {
			return nil, err
		}
		if data.Valid {
			if err := json.Unmarshal([]byte(data.String), &e.Data); err != nil {
				return nil, err
			}
		}
		list = append(list, e)
	}
	return list, rows.Err()
}

// LogRange says which sequence numbers the log lines have that are still there, 0 and 0
// when there are none.
func (s *Store) LogRange() (first, last int64, err error) {
	s.Flush()
	err = s.ro.QueryRow(`SELECT coalesce((SELECT min(seq) FROM events), 0), coalesce((SELECT max(seq) FROM events), 0)`).Scan(&first, &last)
	return first, last, err
}

// Generations lists the newest ones, oldest first.
func (s *Store) Generations(limit int) ([]Generation, error) {
	return s.generations(`SELECT * FROM (SELECT seq, generation, started, acked, coalesce(ended, 0), cause, text FROM generations ORDER BY seq DESC LIMIT ?) ORDER BY seq`, limit)
}

// Generation is the one with this id, or nil.
func (s *Store) Generation(generation string) (*Generation, error) {
	list, err := s.generations(`SELECT seq, generation, started, acked, coalesce(ended, 0), cause, text FROM generations WHERE generation = ?`, generation)
	if err != nil || len(list) == 0 {
		return nil, err
	}
	return &list[0], nil
}

func (s *Store) generations(query string, args ...any) ([]Generation, error) {
	s.Flush()
	rows, err := s.ro.QueryContext(context.Background(), query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var list []Generation
	for rows.Next() {
		var g Generation
		if err := rows.Scan(&g.Seq, &g.Generation, &g.Started, &g.Acked, &g.Ended, &g.Cause, &g.Text); err != nil {
			return nil, err
		}
		list = append(list, g)
	}
	return list, rows.Err()
}

// Client says whether a logical client id is reserved, and up to which generation it was told.
func (s *Store) Client(id string) (exists bool, told int64, err error) {
	err = s.ro.QueryRow(`SELECT told FROM client_ids WHERE id = ?`, id).Scan(&told)
	if errors.Is(err, sql.ErrNoRows) {
		return false, 0, nil
	}
	return err == nil, told, err
}

// Clients is the set of reserved ids.
func (s *Store) Clients() (map[string]bool, error) {
	rows, err := s.ro.QueryContext(context.Background(), `SELECT id FROM client_ids`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	set := map[string]bool{}
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		set[id] = true
	}
	return set, rows.Err()
}

// Meta is a named value, "" when it was never set.
func (s *Store) Meta(key string) (string, error) {
	var v string
	err := s.ro.QueryRow(`SELECT value FROM meta WHERE key = ?`, key).Scan(&v)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return v, err
}

// Unacked counts the messages that a client has not acknowledged and says which is the newest.
func (s *Store) Unacked(client string) (count int, newest int64, err error) {
	err = s.ro.QueryRow(`SELECT count(*), coalesce(max(id), 0) FROM messages WHERE recipient = ? AND acknowledged IS NULL`, client).Scan(&count, &newest)
	return count, newest, err
}

// Previews lists the first unacknowledged messages of a client, whole.
func (s *Store) Previews(client string, limit int) ([]api.Preview, error) {
	rows, err := s.ro.QueryContext(context.Background(), `SELECT id, sender, text, reply_to FROM messages
		WHERE recipient = ? AND acknowledged IS NULL ORDER BY id LIMIT ?`, client, limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var list []api.Preview
	for rows.Next() {
		var p api.Preview
		if err := rows.Scan(&p.ID, &p.From, &p.Text, &p.ReplyTo); err != nil {
			return nil, err
		}
		list = append(list, p)
	}
	return list, rows.Err()
}
