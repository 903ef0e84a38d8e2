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
func (m *Manager) deliver(from, to, text string) (int64, error) {
	exists, _, err := m.store.Client(to)
	if err != nil {
		return 0, storageError(err, "the message was not sent")
	}
	if !exists {
		return 0, rpc.Errorf(rpc.CodeNotFound, "there is no client %q in this workspace", to)
	}
	var id int64
	if err := m.store.Do(func(t *store.Tx) (err error) {
		id, err = t.Send(from, to, text, nil, nil, now())
		return err
	}); err != nil {
		return 0, storageError(err, "the message was not sent")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.clients[to]; c != nil && id > c.newest {
		c.unread++
		c.newest = id
		close(c.mail)
		c.mail = make(chan struct{})
	}
	return id, nil
}

// fitPreviews cuts messages to what the budget allows: the last one may be shortened.
func fitPreviews(list []api.Preview) []api.Preview {
	room := previewBytes - len(`{"unacked":1000000,"messages":[],"has_more":false}`)
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
