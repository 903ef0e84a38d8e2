package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"mypr/internal/rpc"
)

// Client is one connection to a supervisor. It owns the connection and the goroutine
// that delivers events; Close ends both. Its methods may be called concurrently.
//
// Every method returns the supervisor's *rpc.Error when the supervisor refused, and
// an error that wraps rpc.ErrClosed when the connection ended before the answer came:
// whether the request was carried out is then unknown.
type Client struct {
	conn   *rpc.Conn
	closed chan struct{} // closed by Close: nobody reads events any more
	once   sync.Once
	wg     sync.WaitGroup

	mu         sync.Mutex // guards the fields below
	subscribed bool
	queue      []UnitEvent
	more       chan struct{} // holds a token while queue may be non-empty
}

// Dial connects to the control socket at path. The deadline of ctx covers the
// connect only. rpc.IsGone tells from the error whether nobody listens there.
func Dial(ctx context.Context, path string) (*Client, error) {
	c := &Client{closed: make(chan struct{}), more: make(chan struct{}, 1)}
	conn, err := rpc.Dial(ctx, path, rpc.HandlerFunc(c.notified))
	if err != nil {
		return nil, fmt.Errorf("cannot connect to the supervisor: %w", err)
	}
	c.conn = conn
	return c, nil
}

// Close ends the connection and the channel of Subscribe.
func (c *Client) Close() error {
	c.once.Do(func() { close(c.closed) })
	err := c.conn.Close()
	c.wg.Wait()
	return err
}

// Done is closed when the connection has ended, whoever ended it.
func (c *Client) Done() <-chan struct{} { return c.conn.Done() }

// Err says why the connection ended: nil while it is open, io.EOF when the supervisor closed it.
func (c *Client) Err() error { return c.conn.Err() }

// Peer is the supervisor's process as the kernel knows it.
func (c *Client) Peer() rpc.Peer { return c.conn.Peer() }

// Info describes the supervisor.
func (c *Client) Info(ctx context.Context) (Info, error) {
	return call[Info](ctx, c, MethodInfo, nil)
}

// List returns every loaded unit. Usage asks for memory and cpu as well.
func (c *Client) List(ctx context.Context, usage bool) ([]UnitStatus, error) {
	return call[[]UnitStatus](ctx, c, MethodList, ListParams{Usage: usage})
}

// Show returns everything about one unit.
func (c *Client) Show(ctx context.Context, name string) (UnitDetail, error) {
	return call[UnitDetail](ctx, c, MethodShow, UnitParams{Name: name})
}

// Start starts a unit and waits until it has started or failed to.
func (c *Client) Start(ctx context.Context, p JobParams) (JobResult, error) {
	return call[JobResult](ctx, c, MethodStart, p)
}

// Stop stops a unit and waits until nothing is left of it.
func (c *Client) Stop(ctx context.Context, p JobParams) (JobResult, error) {
	return call[JobResult](ctx, c, MethodStop, p)
}

// Restart stops a unit and starts it again.
func (c *Client) Restart(ctx context.Context, p JobParams) (JobResult, error) {
	return call[JobResult](ctx, c, MethodRestart, p)
}

// Reload asks a unit to read its configuration again.
func (c *Client) Reload(ctx context.Context, p JobParams) (JobResult, error) {
	return call[JobResult](ctx, c, MethodReload, p)
}

// Kill sends a signal to processes of a unit.
func (c *Client) Kill(ctx context.Context, p KillParams) error {
	return c.conn.Call(ctx, MethodKill, p, nil)
}

// ResetFailed makes a failed unit inactive and forgets its start-limit counter.
func (c *Client) ResetFailed(ctx context.Context, name string) error {
	return c.conn.Call(ctx, MethodResetFailed, UnitParams{Name: name}, nil)
}

// Freeze suspends every process of a unit.
func (c *Client) Freeze(ctx context.Context, name string) error {
	return c.conn.Call(ctx, MethodFreeze, UnitParams{Name: name}, nil)
}

// Thaw resumes a frozen unit.
func (c *Client) Thaw(ctx context.Context, name string) error {
	return c.conn.Call(ctx, MethodThaw, UnitParams{Name: name}, nil)
}

// StartTransient defines and starts a unit. The files go with it, named by
// p.FDNames in order; they stay the caller's. The files returned, by name (stdin,
// stdout, stderr or pty), are the caller's to close.
func (c *Client) StartTransient(ctx context.Context, p TransientParams, files ...*os.File) (TransientResult, map[string]*os.File, error) {
	if len(files) != len(p.FDNames) {
		return TransientResult{}, nil, fmt.Errorf("%s: %d descriptors for %d names", MethodStartTransient, len(files), len(p.FDNames))
	}
	return c.callFiles(ctx, MethodStartTransient, p, files)
}

// Attach returns duplicates of the descriptors that the supervisor keeps for a unit.
func (c *Client) Attach(ctx context.Context, name string) (TransientResult, map[string]*os.File, error) {
	return c.callFiles(ctx, MethodAttach, UnitParams{Name: name}, nil)
}

// Release makes the supervisor drop the descriptors it keeps for a unit and forget
// the unit if it is transient and has ended. With fds it drops only those.
func (c *Client) Release(ctx context.Context, name string, fds ...string) error {
	return c.conn.Call(ctx, MethodRelease, ReleaseParams{Name: name, FDNames: fds}, nil)
}

// ReleaseUnits is Release for several units at once.
func (c *Client) ReleaseUnits(ctx context.Context, names ...string) error {
	if len(names) == 0 {
		return nil
	}
	return c.conn.Call(ctx, MethodRelease, ReleaseParams{Name: names[0], Names: names[1:]}, nil)
}

// ResizeTTY sets the window size of a unit's pty.
func (c *Client) ResizeTTY(ctx context.Context, p ResizeParams) error {
	return c.conn.Call(ctx, MethodResizeTTY, p, nil)
}

// Wait returns when the unit is inactive or failed.
func (c *Client) Wait(ctx context.Context, p WaitParams) (UnitStatus, error) {
	return call[UnitStatus](ctx, c, MethodWait, p)
}

// DaemonReload makes the supervisor read its unit files again.
func (c *Client) DaemonReload(ctx context.Context) error {
	return c.conn.Call(ctx, MethodDaemonReload, nil, nil)
}

// Reexec replaces the supervisor's program in place. The connection ends with it,
// so an error that wraps rpc.ErrClosed does not mean that it failed.
func (c *Client) Reexec(ctx context.Context, p ReexecParams) error {
	return c.conn.Call(ctx, MethodReexec, p, nil)
}

// Shutdown stops every unit and ends the supervisor.
func (c *Client) Shutdown(ctx context.Context, p ShutdownParams) error {
	return c.conn.Call(ctx, MethodShutdown, p, nil)
}

// Subscribe returns the present state of the named units (none: all) and a channel
// with every later change, in order. Nothing is dropped: what the caller has not read
// yet is kept in memory. An event that is older than the snapshot may come first; it
// describes a state the unit was in. The channel is closed after the last event when
// the connection has ended. A connection carries one subscription.
func (c *Client) Subscribe(ctx context.Context, names ...string) ([]UnitStatus, <-chan UnitEvent, error) {
	c.mu.Lock()
	if c.subscribed {
		c.mu.Unlock()
		return nil, nil, errors.New("subscribe: this connection has a subscription already")
	}
	c.subscribed = true // from here on events are kept, so that none is lost between the answer and our return
	c.mu.Unlock()
	units, err := call[[]UnitStatus](ctx, c, MethodSubscribe, SubscribeParams{Names: names})
	if err != nil {
		c.mu.Lock()
		c.subscribed, c.queue = false, nil
		c.mu.Unlock()
		return nil, nil, err
	}
	out := make(chan UnitEvent)
	c.wg.Add(1)
	go c.deliver(out)
	return units, out, nil
}

func (c *Client) deliver(out chan<- UnitEvent) {
	defer c.wg.Done()
	defer close(out)
	for {
		ended := false
		select {
		case <-c.more:
		case <-c.conn.Done(): // the reader has returned: nothing is added to the queue any more
			ended = true
		case <-c.closed:
			return
		}
		c.mu.Lock()
		batch := c.queue
		c.queue = nil
		c.mu.Unlock()
		for _, e := range batch {
			select {
			case out <- e:
			case <-c.closed:
				return
			}
		}
		if ended {
			return
		}
	}
}

// notified runs on the connection's reader: it must not block.
func (c *Client) notified(_ context.Context, r *rpc.Request) (any, error) {
	r.CloseFiles()
	if !r.Notification {
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "a client of the control socket answers no requests")
	}
	if r.Method != NotificationUnit {
		return nil, nil // a newer supervisor may send more kinds
	}
	var e UnitEvent
	if err := json.Unmarshal(r.Params, &e); err != nil {
		r.Conn.CloseAsync() // an event that cannot be read is an event lost: the subscriber must notice
		return nil, nil
	}
	c.mu.Lock()
	if c.subscribed {
		c.queue = append(c.queue, e)
	}
	c.mu.Unlock()
	select {
	case c.more <- struct{}{}:
	default:
	}
	return nil, nil
}

func call[T any](ctx context.Context, c *Client, method string, params any) (T, error) {
	var v T
	err := c.conn.Call(ctx, method, params, &v)
	return v, err
}

func (c *Client) callFiles(ctx context.Context, method string, params any, send []*os.File) (TransientResult, map[string]*os.File, error) {
	var r TransientResult
	files, err := c.conn.CallFiles(ctx, method, params, send, &r)
	if err != nil {
		return r, nil, err
	}
	named := make(map[string]*os.File, len(files))
	if len(files) == len(r.FDNames) {
		for i, f := range files {
			named[r.FDNames[i]] = f
		}
	}
	if len(named) != len(files) || len(files) != len(r.FDNames) {
		for _, f := range files {
			f.Close()
		}
		return r, nil, fmt.Errorf("%s: the supervisor sent %d descriptors named %q", method, len(files), r.FDNames)
	}
	return r, named, nil
}
