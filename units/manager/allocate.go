package manager

import (
	"math/rand/v2"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/units/manager/store"
)

// allocate binds c to a new automatic id, calm-otter. Random picks suffice until the
// names run out; then one of those that are left is taken.
func (c *connection) allocate() (*api.InitResult, error) {
	m := c.m
	adjectives, animals := adjectives(), animals()
	for range 64 {
		id := adjectives[rand.IntN(len(adjectives))] + "-" + animals[rand.IntN(len(animals))]
		if ok, err := c.tryReserve(id); err != nil {
			return nil, err
		} else if ok {
			return &api.InitResult{ClientID: id}, nil
		}
	}
	used, err := m.store.Clients()
	if err != nil {
		return nil, storageError(err, "init: the client ids could not be read")
	}
	var free []string
	for _, a := range adjectives {
		for _, b := range animals {
			if id := a + "-" + b; !used[id] {
				free = append(free, id)
			}
		}
	}
	for len(free) > 0 {
		i := rand.IntN(len(free))
		if ok, err := c.tryReserve(free[i]); err != nil {
			return nil, err
		} else if ok {
			return &api.InitResult{ClientID: free[i]}, nil
		}
		free[i] = free[len(free)-1]
		free = free[:len(free)-1]
	}
	return nil, rpc.Errorf(api.CodeClientExhausted, "init: all %d automatic client ids of this workspace are taken", len(adjectives)*len(animals)).
		WithHint("call init with a client id of your own choice")
}

// tryReserve takes the id if nobody ever had it.
func (c *connection) tryReserve(id string) (bool, error) {
	m := c.m
	m.mu.Lock()
	if !c.attached {
		m.mu.Unlock()
		return false, rpc.ErrClosed
	}
	if m.clients[id] != nil {
		m.mu.Unlock()
		return false, nil
	}
	c.client = &client{id: id, conn: c, mail: make(chan struct{})}
	m.clients[id] = c.client
	m.mu.Unlock()
	isNew := false
	at := now()
	err := m.store.Do(func(t *store.Tx) (err error) {
		if isNew, err = t.Reserve(id, true, at); err != nil || !isNew {
			return err
		}
		return t.Log(&api.LogEvent{Time: at, Event: "initialized", Kind: "connection", ID: c.id, ClientID: id, ConnectionID: c.id})
	})
	if err != nil || !isNew {
		m.unclaim(c)
		if err != nil {
			err = storageError(err, "init: the client id could not be recorded")
		}
		return false, err
	}
	m.logged(nil)
	m.touchStatus()
	return true, nil
}
