package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
)

// Message is one message between clients.
type Message struct {
	ID           int64           `json:"id"`
	From         string          `json:"from"`
	To           string          `json:"to"`
	Text         string          `json:"text"`
	Data         json.RawMessage `json:"data"` // null: none
	ReplyTo      *int64          `json:"reply_to"`
	CreatedAt    float64         `json:"created_at"`
	Acknowledged bool            `json:"-"`
}

const messageColumns = `id, sender, recipient, text, data, reply_to, created, acknowledged IS NOT NULL`

func scanMessage(scan func(...any) error) (*Message, error) {
	var m Message
	var data *string
	if err := scan(&m.ID, &m.From, &m.To, &m.Text, &data, &m.ReplyTo, &m.CreatedAt, &m.Acknowledged); err != nil {
		return nil, err
	}
	if data != nil {
		m.Data = json.RawMessage(*data)
	}
	return &m, nil
}

// Message is the message with this id, or nil.
func (s *Store) Message(id int64) (*Message, error) {
	m, err := scanMessage(s.ro.QueryRow(`SELECT `+messageColumns+` FROM messages WHERE id = ?`, id).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	return m, err
}

// Inbox lists the unacknowledged messages of a client after an id, in order. sender ""
// and replyTo nil do not filter.
func (s *Store) Inbox(client string, after int64, sender string, replyTo *int64, limit int) ([]*Message, error) {
	query := `SELECT ` + messageColumns + ` FROM messages WHERE recipient = ? AND acknowledged IS NULL AND id > ?`
	args := []any{client, after}
	if sender != "" {
		query, args = query+` AND sender = ?`, append(args, sender)
	}
	if replyTo != nil {
		query, args = query+` AND reply_to = ?`, append(args, *replyTo)
	}
	rows, err := s.ro.QueryContext(context.Background(), query+` ORDER BY id LIMIT ?`, append(args, limit)...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var list []*Message
	for rows.Next() {
		m, err := scanMessage(rows.Scan)
		if err != nil {
			return nil, err
		}
		list = append(list, m)
	}
	return list, rows.Err()
}

// Acknowledge marks a message of the client as read. known is false when the client has
// no such message; fresh when it was unread until now.
func (t *Tx) Acknowledge(client string, id int64, at float64) (known, fresh bool, err error) {
	r, err := t.run(`UPDATE messages SET acknowledged = ? WHERE id = ? AND recipient = ? AND acknowledged IS NULL`, at, id, client)
	if err != nil {
		return false, false, err
	}
	if n, err := r.RowsAffected(); err != nil || n > 0 {
		return n > 0, n > 0, err
	}
	v, err := t.scalar(`SELECT 1 FROM messages WHERE id = ? AND recipient = ?`, id, client)
	return v != nil, false, err
}

// TaskID is the part of a Python task's entity id that its client knows it by.
func TaskID(id string) string {
	if len(id) > taskIDAt {
		return id[taskIDAt:]
	}
	return id
}

// taskIDAt is len("python:" + generation + ":").
const taskIDAt = 40

// Task is the newest Python task with this task id, of whatever generation, or nil.
func (s *Store) Task(id string) (*Entity, error) {
	return s.entity(`SELECT `+entityColumns+` FROM entities WHERE kind = 'python' AND substr(id, 41) = ? ORDER BY seq DESC LIMIT 1`, id)
}
