package store

import (
	"database/sql/driver"
	"fmt"
	"io"
)

// migrations[i] brings a database from version i to i+1. They are never edited, only added to.
var migrations = []string{`
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- told: the last row of generations whose end this client has been told of.
CREATE TABLE client_ids(
	id TEXT PRIMARY KEY, automatic INTEGER NOT NULL, created REAL NOT NULL,
	last_seen REAL NOT NULL, told INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

-- Executions and whatever else has an id, an owner, a state and a journal.
-- request is NULL where nothing de-duplicates. journal_bytes and journal_events are
-- how much of the journal counts: a longer file ends in what was never acknowledged.
CREATE TABLE entities(
	seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
	client TEXT NOT NULL, request TEXT, generation TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL,
	code TEXT NOT NULL, journal_events INTEGER NOT NULL DEFAULT 0, journal_bytes INTEGER NOT NULL DEFAULT 0,
	record TEXT NOT NULL
);
CREATE UNIQUE INDEX entities_request ON entities(client, request) WHERE request IS NOT NULL;
CREATE INDEX entities_client ON entities(client, seq);
CREATE INDEX entities_live ON entities(seq) WHERE state IN ('queued', 'running', 'restarting');

CREATE TABLE events(
	seq INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, event TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL,
	client TEXT NOT NULL, connection TEXT NOT NULL, exec TEXT NOT NULL, state TEXT NOT NULL, error TEXT NOT NULL, data TEXT
);
CREATE INDEX events_client ON events(client, seq);

CREATE TABLE messages(
	id INTEGER PRIMARY KEY AUTOINCREMENT, sender TEXT NOT NULL, recipient TEXT NOT NULL, text TEXT NOT NULL,
	data TEXT, reply_to INTEGER, created REAL NOT NULL, acknowledged REAL
);
CREATE INDEX messages_inbox ON messages(recipient, id) WHERE acknowledged IS NULL;

-- Every kernel there was. acked: the last event of it that is stored. ended is NULL while it may live.
CREATE TABLE generations(
	seq INTEGER PRIMARY KEY AUTOINCREMENT, generation TEXT NOT NULL UNIQUE, started REAL NOT NULL,
	acked INTEGER NOT NULL DEFAULT 0, ended REAL, cause TEXT NOT NULL DEFAULT '', text TEXT NOT NULL DEFAULT ''
);
`, `
-- A Python task by the name its client gave it: the id is python:<generation>:<name>.
CREATE INDEX entities_task ON entities(substr(id, 41), seq) WHERE kind = 'python';
CREATE INDEX messages_reply ON messages(recipient, reply_to, id) WHERE acknowledged IS NULL AND reply_to IS NOT NULL;
`, `
-- The whole journal, where it has no file of its own.
ALTER TABLE entities ADD COLUMN journal BLOB;
`}

// checkedPages is the size up to which the database is checked at each start.
const checkedPages = 2048

// Version is the schema version that this program writes.
const Version = 3

func (t *Tx) migrate() error {
	have, err := t.scalar("PRAGMA user_version")
	if err != nil {
		return err
	}
	v, _ := have.(int64)
	if v > int64(len(migrations)) {
		return fmt.Errorf("it was written by a newer version of mypr-mcp (schema %d, this one knows %d): use that version, or move the file away", v, len(migrations))
	}
	for ; v < int64(len(migrations)); v++ {
		if err := t.script("BEGIN IMMEDIATE;" + migrations[v] + fmt.Sprintf("PRAGMA user_version = %d; COMMIT;", v+1)); err != nil {
			_ = t.script("ROLLBACK")
			return fmt.Errorf("schema %d: %w", v+1, err)
		}
	}
	// Damage had better show now than at some cell. A whole check reads every page, so it
	// is for small files only (8 MiB take about 15 ms); of others the roots are looked at.
	if pages, err := t.scalar("PRAGMA page_count"); err != nil {
		return err
	} else if n, _ := pages.(int64); n <= checkedPages {
		result, err := t.scalar("PRAGMA quick_check(1)")
		if err != nil {
			return err
		}
		if result != "ok" {
			return fmt.Errorf("%w: %v", errDamaged, result)
		}
	}
	if _, err := t.scalar("SELECT count(*) FROM sqlite_schema"); err != nil {
		return err
	}
	_, err = t.scalar("SELECT max(seq) FROM entities")
	return err
}

// script runs several statements that are not kept.
func (t *Tx) script(text string) error {
	st, err := t.conn.Prepare(text)
	if err != nil {
		return err
	}
	defer st.Close()
	//lint:ignore SA1019 the Context variants cost a watcher goroutine per statement in this driver
	_, err = st.Exec(nil)
	return err
}

// scalar is the first column of the first row, or nil.
func (t *Tx) scalar(query string, args ...driver.Value) (driver.Value, error) {
	st, err := t.prepare(query)
	if err != nil {
		return nil, err
	}
	//lint:ignore SA1019 the Context variants cost a watcher goroutine per statement in this driver
	rows, err := st.Query(args)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	row := make([]driver.Value, len(rows.Columns()))
	if err := rows.Next(row); err == io.EOF {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	return row[0], nil
}
