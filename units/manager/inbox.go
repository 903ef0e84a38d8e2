package manager

import (
	"bytes"
	"context"
	"encoding/json"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/units/manager/store"
)

// Bounds of messages.
const (
	maxMessageBytes = 16 << 10 // of text and data together
	maxMessagePage  = 32 << 10 // of the messages of one page, as JSON
	maxMessages     = 100      // of one page
	defaultMessages = 20
	maxAcks         = 10_000 // ids of one acknowledgement
)

type (
	sendParams struct {
		To      string          `json:"to"`
		Text    string          `json:"text"`
		Data    json.RawMessage `json:"data"`
		ReplyTo *int64          `json:"reply_to"`
	}
	replyParams struct {
		MessageID int64           `json:"message_id"`
		Text      string          `json:"text"`
		Data      json.RawMessage `json:"data"`
	}
	readMessagesParams struct {
		Limit   int    `json:"limit"`
		After   *int64 `json:"after"`
		WaitMS  int64  `json:"wait_ms"`
		Sender  string `json:"sender"`
		ReplyTo *int64 `json:"reply_to"`
	}
	messagesPage struct {
		Messages   []*store.Message `json:"messages"`
		NextCursor *int64           `json:"next_cursor"`
		HasMore    bool             `json:"has_more"`
	}
	ackParams struct {
		IDs []int64 `json:"ids"`
	}
)

// message answers the calls of ws.messages; the caller has a client id.
func (m *Manager) message(ctx context.Context, c Call) (any, error) {
	if c.ClientID == "" {
		return nil, rpc.Errorf(api.CodeNotInitialized, "%s: messages belong to a client, and this code runs for none", c.Method).WithHint("call init first")
	}
	switch c.Method {
	case "messages.send":
		return bind(c, func(p sendParams) (any, error) { return m.sendMessage(c.ClientID, p) })
	case "messages.reply":
		return bind(c, func(p replyParams) (any, error) { return m.reply(c.ClientID, p) })
	case "messages.read":
		return bind(c, func(p readMessagesParams) (any, error) { return m.readMessages(ctx, c.ClientID, p) })
	}
	return bind(c, func(p ackParams) (any, error) { return m.acknowledge(c.ClientID, p.IDs) })
}

// sendMessage delivers to a client that is or was there.
func (m *Manager) sendMessage(from string, p sendParams) (*store.Message, error) {
	if p.Text == "" {
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "messages.send: the text is empty")
	}
	if bytes.Equal(p.Data, []byte("null")) {
		p.Data = nil
	}
	if n := len(p.Text) + len(p.Data); n > maxMessageBytes {
		return nil, rpc.Errorf(rpc.CodeTooLarge, "messages.send: text and data have %d bytes; a message has at most %d", n, maxMessageBytes).
			WithHint("write it to a file and send its path")
	}
	msg := &store.Message{From: from, To: p.To, Text: p.Text, Data: p.Data, ReplyTo: p.ReplyTo, CreatedAt: now()}
	if raw, err := json.Marshal(msg); err != nil {
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "messages.send: bad data: %v", err)
	} else if len(raw)+32 > maxMessagePage { // and room for its id
		return nil, rpc.Errorf(rpc.CodeTooLarge, "messages.send: written as JSON the message has %d bytes, more than a page of %d", len(raw), maxMessagePage).
			WithHint("write it to a file and send its path")
	}
	return msg, m.deliver(msg)
}

// reply answers a message that its caller has received.
func (m *Manager) reply(from string, p replyParams) (*store.Message, error) {
	orig, err := m.store.Message(p.MessageID)
	if err != nil {
		return nil, storageError(err, "messages.reply: the message could not be read")
	}
	if orig == nil || orig.To != from {
		return nil, rpc.Errorf(rpc.CodeNotFound, "messages.reply: %s has received no message %d", from, p.MessageID)
	}
	return m.sendMessage(from, sendParams{To: orig.From, Text: p.Text, Data: p.Data, ReplyTo: &orig.ID})
}

// readMessages pages through what is not acknowledged, and waits for it.
func (m *Manager) readMessages(ctx context.Context, client string, p readMessagesParams) (*messagesPage, error) {
	limit := p.Limit
	switch {
	case limit == 0:
		limit = defaultMessages
	case limit < 1 || limit > maxMessages:
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "messages.read: limit is %d; it must be between 1 and %d", limit, maxMessages)
	}
	if p.WaitMS < 0 || p.WaitMS > api.MaxWaitMS {
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "messages.read: wait_ms is %d; it must be between 0 and %d", p.WaitMS, api.MaxWaitMS)
	}
	after := int64(0)
	if p.After != nil {
		if after = *p.After; after < 0 {
			return nil, rpc.Errorf(api.CodeInvalidCursor, "messages.read: after is %d; it cannot be negative", after)
		}
	}
	deadline := time.NewTimer(time.Duration(p.WaitMS) * time.Millisecond)
	defer deadline.Stop()
	for waiting := p.WaitMS > 0; ; {
		m.mu.Lock()
		arrives := m.arrival(client)
		m.mu.Unlock()
		list, err := m.store.Inbox(client, after, p.Sender, p.ReplyTo, limit+1)
		if err != nil {
			return nil, storageError(err, "messages.read: the inbox could not be read")
		}
		if len(list) > 0 || !waiting {
			return messagePage(list, limit, p.After), nil
		}
		select {
		case <-arrives:
		case <-deadline.C:
			waiting = false
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func messagePage(list []*store.Message, limit int, after *int64) *messagesPage {
	p := &messagesPage{Messages: []*store.Message{}, NextCursor: after}
	room := maxMessagePage
	for _, msg := range list {
		raw, _ := json.Marshal(msg) // it could be when it was sent
		if room -= len(raw) + 1; len(p.Messages) == limit || room < 0 && len(p.Messages) > 0 {
			p.HasMore = true
			break
		}
		p.Messages = append(p.Messages, msg)
		p.NextCursor = &msg.ID
	}
	return p
}

// acknowledge marks messages as read, all or none, and returns how many were not.
func (m *Manager) acknowledge(client string, ids []int64) (int, error) {
	if len(ids) > maxAcks {
		return 0, rpc.Errorf(rpc.CodeTooLarge, "messages.ack: %d ids at once; at most %d", len(ids), maxAcks)
	}
	fresh := 0
	at := now()
	err := m.store.Do(func(t *store.Tx) error {
		fresh = 0
		for _, id := range ids {
			known, isNew, err := t.Acknowledge(client, id, at)
			if err != nil {
				return err
			}
			if !known {
				return rpc.Errorf(rpc.CodeNotFound, "messages.ack: %s has received no message %d; none was acknowledged", client, id)
			}
			if isNew {
				fresh++
			}
		}
		return nil
	})
	if rpc.CodeOf(err) == rpc.CodeNotFound {
		return 0, err
	}
	if err != nil {
		return 0, storageError(err, "messages.ack: nothing was acknowledged")
	}
	m.mu.Lock()
	if c := m.clients[client]; c != nil {
		c.unread = max(0, c.unread-fresh)
	}
	m.mu.Unlock()
	return fresh, nil
}

// arrival returns a channel that is closed when the client's next message comes.
// Called with mu held.
func (m *Manager) arrival(client string) <-chan struct{} {
	ch := m.arrivals[client]
	if ch == nil {
		ch = make(chan struct{})
		if m.arrivals == nil {
			m.arrivals = map[string]chan struct{}{}
		}
		m.arrivals[client] = ch
	}
	return ch
}
