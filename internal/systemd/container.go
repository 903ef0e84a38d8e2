package systemd

import (
	"os"

	"github.com/coreos/go-systemd/v22/activation"

	"mypr/supervisor/notify"
)

// Container is the service of a container of which this process is pid 1: the engine
// passes on what systemd gave it. It can be told how this process is doing, but keeps no
// descriptors, as whatever they lead to ends together with this process.
type Container struct {
	sockets map[string][]*os.File
}

// InContainer takes what was passed to this process, pid 1 of a container.
func InContainer() *Container {
	c := &Container{map[string][]*os.File{}}
	for _, f := range activation.Files(true) { // not again after a re-execution
		c.sockets[f.Name()] = append(c.sockets[f.Name()], f)
	}
	return c
}

// Sockets are the listening sockets by the names that their unit gives them. A lone one
// has the name alone, as engines forget the names.
func (c *Container) Sockets(alone string) map[string][]*os.File {
	if len(c.sockets[alone]) == 0 && len(c.sockets) == 1 {
		for _, files := range c.sockets {
			if len(files) == 1 {
				return map[string][]*os.File{alone: files}
			}
		}
	}
	return c.sockets
}

// Say sends a state ("READY=1"). Without a service that waits for it, it does nothing.
func (c *Container) Say(state string) error {
	if c == nil {
		return nil
	}
	_, err := notify.Send(state)
	return err
}
