// Package counterpart plays, for the tests that run the built program, those that it or
// its surroundings talk to: the MCP client of a front end, and whoever a service manager
// tells that it is ready. It starts no process.
package counterpart

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
)

// Client is an MCP client at the standard input and output of "mypr-mcp serve". It makes
// one call at a time.
type Client struct {
	in   io.Writer
	out  *bufio.Reader
	last int // id of the last request
}

// NewClient shakes hands.
func NewClient(in io.Writer, out io.Reader) (*Client, error) {
	c := &Client{in: in, out: bufio.NewReader(out)}
	_, err := c.Call("initialize", map[string]any{"protocolVersion": "2025-06-18", "capabilities": map[string]any{}, "clientInfo": map[string]any{"name": "test", "version": "1"}})
	if err == nil {
		_, err = io.WriteString(in, `{"jsonrpc":"2.0","method":"notifications/initialized"}`+"\n")
	}
	return c, err
}

// Call makes a request and reads until its answer. An error answer is an error.
func (c *Client) Call(method string, params any) (json.RawMessage, error) {
	c.last++
	b, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": c.last, "method": method, "params": params})
	if err == nil {
		_, err = c.in.Write(append(b, '\n'))
	}
	for err == nil {
		var line []byte
		if line, err = c.out.ReadBytes('\n'); err != nil {
			break
		}
		var r struct {
			ID            int
			Result, Error json.RawMessage
		}
		if err = json.Unmarshal(line, &r); err == nil && r.ID == c.last {
			if r.Error != nil {
				return nil, fmt.Errorf("%s: %s", method, r.Error)
			}
			return r.Result, nil
		}
	}
	return nil, fmt.Errorf("%s: %w", method, err)
}

// Tool calls a tool; the result may be that of a call that failed (isError).
func (c *Client) Tool(name string, args map[string]any) (json.RawMessage, error) {
	return c.Call("tools/call", map[string]any{"name": name, "arguments": args})
}
