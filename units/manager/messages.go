package manager

import (
	"encoding/json"
	"unicode/utf8"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/units/manager/store"
)

const (
	maxPreviews  = 5
	previewBytes = 4 << 10 // of the inbox as JSON
)

// deliver stores a message and wakes its recipient's connection, once.
func (m *Manager) deliver(msg *store.Message) error {
	exists, _, err := m.store.Client(msg.To)
	if err != nil {
		return storageError(err, "the message was not sent")
	}
	if !exists {
		return rpc.Errorf(rpc.CodeNotFound, "there is no client %q in this workspace", msg.To).
			WithHint("await ws.status(detail=True) lists the connected ones")
	}
	if err := m.store.Do(func(t *store.Tx) (err error) {
		msg.ID, err = t.Send(msg.From, msg.To, msg.Text, msg.Data, msg.ReplyTo, msg.CreatedAt)
		return err
	}); err != nil {
		return storageError(err, "the message was not sent")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.clients[msg.To]; c != nil && msg.ID > c.newest {
		c.unread++
		c.newest = msg.ID
		close(c.mail)
		c.mail = make(chan struct{})
	}
	if ch := m.arrivals[msg.To]; ch != nil {
		close(ch)
		delete(m.arrivals, msg.To)
	}
	return nil
}

// fitPreviews cuts messages to what the budget allows: the last one may be shortened.
func fitPreviews(list []api.Preview) []api.Preview {
	room := previewBytes - len(`{"unacked":1000000,"messages":[],"has_more":false,"newest":1000000000}`)
	fit := []api.Preview{}
	for _, p := range list {
		full, _ := json.Marshal(p)
		if len(full)+1 <= room {
			fit = append(fit, p)
			room -= len(full) + 1
			continue
		}
		text := p.Text
		p.Text, p.Truncated = "", true
		bare, _ := json.Marshal(p)
		room -= len(bare) + 1
		n := 0
		for n < len(text) {
			r, size := utf8.DecodeRuneInString(text[n:])
			enc, _ := json.Marshal(string(r))
			if room -= len(enc) - 2; room < 0 {
				break
			}
			n += size
		}
		if n > 0 {
			p.Text = text[:n]
			fit = append(fit, p)
		}
		break
	}
	return fit
}
