package frontend

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"mypr/internal/api"
	"mypr/internal/client"
	"mypr/internal/client/clienttest"
	"mypr/internal/rpc"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("MYPR_TEST_ROLE"); role != "" {
		os.Exit(childRole(role))
	}
	before := openFDs()
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if after := openFDs(); code == 0 && after > before {
			println("descriptors leaked:", after-before)
			code = 1
		}
		os.Exit(code)
	}))
}

// openFDs counts descriptors that are no part of the Go runtime's poller.
func openFDs() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	n := 0
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && to != "anon_inode:[eventpoll]" && to != "anon_inode:[eventfd]" {
			n++
		}
	}
	return n
}

// conversation is an MCP client at the other end of real pipes.
type conversation struct {
	t     *testing.T
	in    *os.File
	lines chan []byte // closed when the server closes its output
	ended chan error
	stash []map[string]any
}

func converse(t *testing.T, r *clienttest.Runtime, edit ...func(*Options)) *conversation {
	t.Helper()
	o := Options{Version: "1.0.0", Logger: slog.New(slog.DiscardHandler)}
	o.Client = client.New(client.Options{Ensure: r.Ensure, Kind: "frontend", Version: o.Version})
	for _, f := range edit {
		f(&o)
	}
	inR, inW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	o.In, o.Out = inR, outW
	c := &conversation{t: t, in: inW, lines: make(chan []byte, 1000), ended: make(chan error, 1)}
	go func() {
		err := Run(context.Background(), o)
		inR.Close()
		outW.Close()
		c.ended <- err
	}()
	go func() {
		defer close(c.lines)
		defer outR.Close()
		b := bufio.NewReaderSize(outR, 1<<20)
		for {
			line, err := b.ReadBytes('\n')
			if err != nil {
				return
			}
			c.lines <- line
		}
	}()
	t.Cleanup(func() {
		inW.Close()
		for range c.lines {
		}
		select {
		case err := <-c.ended:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(60 * time.Second):
			t.Error("Run did not end")
		}
	})
	return c
}

// send writes one line.
func (c *conversation) send(line string) {
	c.t.Helper()
	if _, err := io.WriteString(c.in, line+"\n"); err != nil {
		c.t.Fatal(err)
	}
}

// next is the next message.
func (c *conversation) next() map[string]any {
	c.t.Helper()
	select {
	case line, ok := <-c.lines:
		if !ok {
			c.t.Fatal("the server closed its output")
		}
		var m map[string]any
		if err := json.Unmarshal(line, &m); err != nil {
			c.t.Fatalf("not JSON: %v: %.200q", err, line)
		}
		return m
	case <-time.After(60 * time.Second):
		c.t.Fatal("no message came")
	}
	return nil
}

// answer is the next message with this id; others are kept for later.
func (c *conversation) answer(id any) map[string]any {
	c.t.Helper()
	want := fmt.Sprint(id)
	for i, m := range c.stash {
		if fmt.Sprint(m["id"]) == want {
			c.stash = slices.Delete(c.stash, i, i+1)
			return m
		}
	}
	for {
		m := c.next()
		if fmt.Sprint(m["id"]) == want {
			return m
		}
		c.stash = append(c.stash, m)
	}
}

func quote(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// call sends a tools/call.
func (c *conversation) call(id any, tool string, args map[string]any) {
	c.t.Helper()
	c.send(`{"jsonrpc":"2.0","id":` + quote(id) + `,"method":"tools/call","params":{"name":"` + tool + `","arguments":` + quote(args) + `}}`)
}

// result is an answered tools/call.
type result struct {
	Text    string
	Images  []string // mime types
	IsError bool
	Payload map[string]any
	Raw     map[string]any
}

func (c *conversation) result(id any) result {
	c.t.Helper()
	m := c.answer(id)
	r, ok := m["result"].(map[string]any)
	if !ok {
		c.t.Fatalf("no result: %v", m)
	}
	res := result{Raw: r}
	res.IsError, _ = r["isError"].(bool)
	for i, b := range r["content"].([]any) {
		b := b.(map[string]any)
		switch {
		case b["type"] == "text" && i == 0:
			res.Text = b["text"].(string)
		case b["type"] == "image" && i > 0:
			res.Images = append(res.Images, b["mimeType"].(string))
		default:
			c.t.Errorf("content %d is %v", i, b["type"])
		}
	}
	res.Payload, _ = r["_meta"].(map[string]any)["mypr/result"].(map[string]any)
	return res
}

// run is a whole call.
func (c *conversation) run(tool string, args map[string]any) result {
	c.t.Helper()
	id := "run-" + client.NewID()
	c.call(id, tool, args)
	return c.result(id)
}

func errorOf(m map[string]any) (code int, message string) {
	e, _ := m["error"].(map[string]any)
	if e == nil {
		return 0, ""
	}
	return int(e["code"].(float64)), e["message"].(string)
}

const modernMeta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/clientInfo":{"name":"modern","version":"2"}}`

func TestInitializeVersions(t *testing.T) {
	r := clienttest.New(t)
	c := converse(t, r)
	for asked, want := range map[string]string{
		"2024-11-05": "2024-11-05", "2025-03-26": "2025-03-26", "2025-06-18": "2025-06-18", "2025-11-25": "2025-11-25",
		"2026-07-28": "2025-11-25", "2031-01-01": "2025-11-25", "1.0": "2025-11-25",
	} {
		c.send(`{"jsonrpc":"2.0","id":"` + asked + `","method":"initialize","params":{"protocolVersion":"` + asked + `","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`)
		res, _ := c.answer(asked)["result"].(map[string]any)
		if res["protocolVersion"] != want {
			t.Errorf("initialize with %s was answered with %v", asked, res["protocolVersion"])
		}
		if res["instructions"] != instructions || res["serverInfo"].(map[string]any)["name"] != "mypr-mcp" {
			t.Errorf("initialize result %v", res)
		}
		if _, ok := res["capabilities"].(map[string]any)["tools"]; !ok || len(res["capabilities"].(map[string]any)) != 1 {
			t.Errorf("capabilities %v", res["capabilities"])
		}
	}
	c.send(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	c.send(`{"jsonrpc":"2.0","method":"notifications/made/up","params":{"a":1}}`)
	c.send(`{"jsonrpc":"2.0","id":"p","method":"ping"}`)
	if m := c.next(); m["id"] != "p" || quote(m["result"]) != "{}" {
		t.Errorf("ping: %v", m)
	}
	if n := len(r.Attached()); n != 0 {
		t.Errorf("%d connections before the first tool call", n)
	}
}

func TestModern(t *testing.T) {
	c := converse(t, clienttest.New(t))
	c.send(`{"jsonrpc":"2.0","id":1,"method":"server/discover","params":{` + modernMeta + `}}`)
	res, _ := c.answer(1)["result"].(map[string]any)
	if quote(res["supportedVersions"]) != `["2026-07-28","2025-11-25","2025-06-18","2025-03-26","2024-11-05"]` || res["instructions"] != instructions ||
		res["resultType"] != "complete" || res["ttlMs"] == nil || res["cacheScope"] != "public" ||
		!strings.Contains(quote(res["_meta"]), `"io.modelcontextprotocol/serverInfo":{"name":"mypr-mcp"`) {
		t.Errorf("discover: %v", res)
	}
	c.send(`{"jsonrpc":"2.0","id":2,"method":"tools/list","params":{` + modernMeta + `}}`)
	res, _ = c.answer(2)["result"].(map[string]any)
	if res["resultType"] != "complete" || res["ttlMs"] == nil || res["cacheScope"] == nil || len(res["tools"].([]any)) != 3 {
		t.Errorf("tools/list: %v", res)
	}
	c.send(`{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"init",` + modernMeta + `}}`)
	got := c.result(3)
	if got.Raw["resultType"] != "complete" || got.IsError || !strings.Contains(quote(got.Raw["_meta"]), "serverInfo") {
		t.Errorf("tools/call: %v", got.Raw)
	}
	for name, test := range map[string]struct {
		method, meta string
		code         int
	}{
		"ping is gone":               {"ping", modernMeta, -32601},
		"no capabilities":            {"tools/list", `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}`, -32602},
		"capabilities of wrong type": {"tools/list", `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":[]}`, -32602},
		"version of wrong type":      {"tools/list", `"_meta":{"io.modelcontextprotocol/protocolVersion":7,"io.modelcontextprotocol/clientCapabilities":{}}`, -32602},
		"unknown version":            {"tools/list", `"_meta":{"io.modelcontextprotocol/protocolVersion":"2031-01-01","io.modelcontextprotocol/clientCapabilities":{}}`, -32022},
		"discover without meta":      {"server/discover", `"x":1`, -32602},
		"unknown method":             {"resources/list", modernMeta, -32601},
		"meta is no object":          {"tools/list", `"_meta":7`, -32602},
	} {
		c.send(`{"jsonrpc":"2.0","id":"x","method":"` + test.method + `","params":{` + test.meta + `}}`)
		m := c.answer("x")
		if code, text := errorOf(m); code != test.code {
			t.Errorf("%s: %d %s", name, code, text)
		}
		if test.code == -32022 && quote(m["error"].(map[string]any)["data"]) != `{"requested":"2031-01-01","supported":["2026-07-28","2025-11-25","2025-06-18","2025-03-26","2024-11-05"]}` {
			t.Errorf("data %v", m["error"])
		}
	}
	// And the handshake in the same process.
	c.send(`{"jsonrpc":"2.0","id":9,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`)
	if res, _ := c.answer(9)["result"].(map[string]any); res["protocolVersion"] != "2025-11-25" || res["resultType"] != nil {
		t.Errorf("initialize: %v", res)
	}
}

func TestToolList(t *testing.T) {
	c := converse(t, clienttest.New(t))
	c.send(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
	m := c.answer(1)
	res := m["result"].(map[string]any)
	if len(res) != 1 {
		t.Errorf("a legacy result has %v", res)
	}
	var names []string
	for _, v := range res["tools"].([]any) {
		tool := v.(map[string]any)
		names = append(names, tool["name"].(string))
		schema := tool["inputSchema"].(map[string]any)
		if schema["type"] != "object" || schema["anyOf"] != nil || schema["additionalProperties"] != false || tool["outputSchema"] != nil {
			t.Errorf("%s: schema %v", tool["name"], schema)
		}
		for name, p := range schema["properties"].(map[string]any) {
			if d, _ := p.(map[string]any)["description"].(string); len(d) < 20 {
				t.Errorf("%s.%s is described as %q", tool["name"], name, d)
			}
		}
		if n := len(tool["description"].(string)); n > 2000 {
			t.Errorf("%s: description of %d characters", tool["name"], n)
		}
		if tool["_meta"].(map[string]any)["anthropic/alwaysLoad"] != true {
			t.Errorf("%s: _meta %v", tool["name"], tool["_meta"])
		}
		a := tool["annotations"].(map[string]any)
		execute := tool["name"] == "execute"
		if a["readOnlyHint"] != false || a["destructiveHint"] != execute || a["openWorldHint"] != execute || a["idempotentHint"] != !execute {
			t.Errorf("%s: annotations %v", tool["name"], a)
		}
	}
	if !slices.Equal(names, []string{"init", "execute", "poll"}) {
		t.Errorf("tools %v", names)
	}
	if len(instructions) >= 2000 {
		t.Errorf("instructions of %d characters", len(instructions))
	}
	for _, essential := range []string{"init", "execute(code)", "poll(exec_id"} {
		if !strings.Contains(instructions[:400], essential) {
			t.Errorf("the start of the instructions does not mention %s", essential)
		}
	}
	// About 4 characters a token.
	if n := len(quote(res["tools"])); n > 6000 {
		t.Errorf("the three schemas have %d characters", n)
	}
	c.send(`{"jsonrpc":"2.0","id":2,"method":"tools/list","params":{"cursor":"abc"}}`)
	if code, _ := errorOf(c.answer(2)); code != -32602 {
		t.Errorf("an invented cursor: %d", code)
	}
}

// What is no proper message gets an error, and the conversation goes on.
func TestBadMessages(t *testing.T) {
	c := converse(t, clienttest.New(t))
	for _, test := range []struct {
		line string
		id   string
		code int
	}{
		{`{"jsonrpc":"2.0","id":1,`, "<nil>", -32700},
		{`hello`, "<nil>", -32700},
		{"\x00\x01\x02\xff\xfe", "<nil>", -32700},
		{"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\",\"params\":{\"x\":\"\xff\"}}", "<nil>", -32700},
		{`[1,2`, "<nil>", -32700},
		{`[]`, "<nil>", -32600},
		{`7`, "<nil>", -32600},
		{`"text"`, "<nil>", -32600},
		{`true`, "<nil>", -32600},
		{`null`, "<nil>", -32600},
		{`{}`, "<nil>", -32600},
		{`{"id":2}`, "2", -32600},
		{`{"jsonrpc":"2.0","id":3,"method":7}`, "3", -32600},
		{`{"jsonrpc":2,"id":3,"method":"ping"}`, "3", -32600},
		{`{"jsonrpc":"1.0","id":4,"method":"ping"}`, "4", -32600},
		{`{"jsonrpc":"2.0","id":5}`, "5", -32600},
		{`{"jsonrpc":"2.0","id":null,"method":"ping"}`, "<nil>", -32600},
		{`{"jsonrpc":"2.0","id":{},"method":"ping"}`, "<nil>", -32600},
		{`{"jsonrpc":"2.0","id":6,"method":"no/such"}`, "6", -32601},
		{`{"jsonrpc":"2.0","id":7,"method":"tools/call","params":[1]}`, "7", -32602},
		{`{"jsonrpc":"2.0","id":8,"method":"tools/call","params":{}}`, "8", -32602},
		{`{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{"name":"exec"}}`, "9", -32602},
	} {
		c.send(test.line)
		m := c.next()
		if code, text := errorOf(m); code != test.code || fmt.Sprint(m["id"]) != test.id || m["jsonrpc"] != "2.0" {
			t.Errorf("%q: %v %d %s", test.line, m["id"], code, text)
		} else if strings.Contains(text, "Go ") || strings.Contains(text, "frontend") {
			t.Errorf("%q: the error speaks of the inside: %s", test.line, text)
		}
	}
	c.send("") // nothing
	c.send(`{"jsonrpc":"2.0","id":4,"result":{}}`)
	c.send("\xef\xbb\xbf{\"jsonrpc\":\"2.0\",\"id\":10,\"method\":\"ping\"}\r")
	if m := c.next(); fmt.Sprint(m["id"]) != "10" || m["error"] != nil {
		t.Errorf("ping: %v", m)
	}
}

func TestBatch(t *testing.T) {
	r := clienttest.New(t)
	c := converse(t, r)
	c.send(`[{"jsonrpc":"2.0","id":1,"method":"ping"},{"jsonrpc":"2.0","method":"notifications/initialized"},` +
		`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"init"}},3]`)
	var batch []map[string]any
	if err := json.Unmarshal(<-c.lines, &batch); err != nil {
		t.Fatal(err)
	}
	ids := map[string]bool{}
	for _, m := range batch {
		ids[fmt.Sprint(m["id"])] = m["error"] == nil
	}
	if want := map[string]bool{"1": true, "2": true, "<nil>": false}; fmt.Sprint(ids) != fmt.Sprint(want) {
		t.Errorf("answers %v", ids)
	}
	c.send(`[{"jsonrpc":"2.0","method":"notifications/initialized"}]`)
	c.send(`{"jsonrpc":"2.0","id":3,"method":"ping"}`)
	if m := c.next(); fmt.Sprint(m["id"]) != "3" {
		t.Errorf("a batch of notifications was answered: %v", m)
	}
}

func TestOversizedLine(t *testing.T) {
	c := converse(t, clienttest.New(t))
	huge := strings.Repeat("x", maxLine)
	go func() { // the order of the TypeScript SDK, and that of most others
		c.send(`{"method":"tools/call","params":{"name":"execute","arguments":{"code":"` + huge + `"}},"jsonrpc":"2.0","id":41}`)
		c.send(`{"jsonrpc":"2.0","id":"a-1","method":"tools/call","params":{"name":"execute","arguments":{"code":"` + huge + `"}}}`)
		c.send(`{"jsonrpc":"2.0","id":42,"method":"ping"}`)
	}()
	for _, want := range []string{"41", "a-1"} {
		m := c.next()
		if code, text := errorOf(m); code != -32600 || !strings.Contains(text, "33554432") || fmt.Sprint(m["id"]) != want {
			t.Errorf("%v", m)
		}
	}
	if m := c.next(); fmt.Sprint(m["id"]) != "42" {
		t.Errorf("then %v", m)
	}
}

func TestSession(t *testing.T) {
	r := clienttest.New(t)
	c := converse(t, r)
	c.send(`{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"claude-code","version":"2.1.285"}}}`)
	c.answer(0)
	got := c.run("execute", map[string]any{"code": "1"})
	if !got.IsError || !strings.HasPrefix(got.Text, "this connection has no client id yet\nnext: call init first\n") {
		t.Errorf("execute before init: %+v", got)
	}
	if got.Payload["error"] != "this connection has no client id yet" || quote(got.Payload["error_info"].(map[string]any)["code"]) != `"not_initialized"` {
		t.Errorf("payload %v", got.Payload)
	}
	got = c.run("init", nil)
	if got.IsError || !strings.HasPrefix(got.Text, "client_id=calm-otter-1 (new) generation=11111111\nworkspace=/ws python=3.13.0") ||
		!strings.Contains(got.Text, "Be kind to the session.") || got.Payload["client_id"] != "calm-otter-1" ||
		got.Payload["runtime"].(map[string]any)["bridge_version"] != "1.0.0" {
		t.Errorf("init: %+v", got)
	}
	if a := r.Attached(); len(a) != 1 || a[0].Name != "claude-code 2.1.285" {
		t.Errorf("attached %+v", a)
	}
	r.Play(func(c *clienttest.Cell) {
		c.Emit(api.Event{Type: "result", Text: "2"})
		c.End(api.Succeeded, "")
	})
	got = c.run("execute", map[string]any{"code": "1+1"})
	if want := "succeeded exec_id=00000000000000000000000000000001 generation=11111111 cursor=1 elapsed=0ms\n[result] 2\n"; got.Text != want || got.IsError {
		t.Errorf("got %q\nwant %q", got.Text, want)
	}
	if _, ok := got.Raw["structuredContent"]; ok || got.Payload["exec_id"] != "00000000000000000000000000000001" ||
		got.Raw["_meta"].(map[string]any)["timing_ms"].(map[string]any)["total"] == nil {
		t.Errorf("raw %v", got.Raw)
	}
	r.Play(func(c *clienttest.Cell) {
		c.Emit(api.Event{Type: "error", Text: "Traceback (most recent call last):\n\x1b[31mZeroDivisionError\x1b[0m: division by zero"})
		c.End(api.FailedCell, "ZeroDivisionError: division by zero")
	})
	got = c.run("execute", map[string]any{"code": "1/0"})
	if want := "failed exec_id=00000000000000000000000000000002 generation=11111111 cursor=1 elapsed=0ms\nZeroDivisionError: division by zero\n" +
		"[traceback]\nTraceback (most recent call last):\nZeroDivisionError: division by zero\n"; got.Text != want || got.IsError {
		t.Errorf("got %q\nwant %q", got.Text, want)
	}
}

func TestStructured(t *testing.T) {
	c := converse(t, clienttest.New(t), func(o *Options) { o.Structured = true })
	got := c.run("init", nil)
	if s, _ := got.Raw["structuredContent"].(map[string]any); s["client_id"] != "calm-otter-1" {
		t.Errorf("structuredContent %v", got.Raw["structuredContent"])
	}
}

func TestArguments(t *testing.T) {
	r := clienttest.New(t)
	c := converse(t, r)
	c.run("init", nil)
	for _, test := range []struct {
		tool string
		args string
		want string // "" : accepted
	}{
		{"execute", `{}`, "execute needs code"},
		{"execute", `{"code":null}`, "execute needs code"},
		{"execute", `{"code":["1"]}`, "execute: code must be a string"},
		{"execute", `{"code":"1","waitms":5}`, `execute has no parameter "waitms". It takes code (required), wait_ms`},
		{"execute", `{"code":"1","wait_ms":"soon"}`, `execute: wait_ms must be a whole number, not "soon". Example: wait_ms=10000`},
		{"execute", `{"code":"1","wait_ms":-1}`, "wait_ms must be 0 or more"},
		{"execute", `{"code":"1","wait_ms":1.5}`, "whole number"},
		{"execute", `{"code":"1","wait_ms":true}`, "whole number"},
		{"execute", `{"code":"1","wait_ms":""}`, "whole number"},
		{"execute", `{"code":"1","wait_ms":"0x10"}`, "whole number"},
		{"execute", `{"code":"1","wait_ms":1e300}`, "whole number"},
		{"execute", `{"code":"1","max_bytes":10}`, "max_bytes must be from 1024 to 1048576, not 10"},
		{"execute", `{"code":"1","generation":7}`, "generation must be a string"},
		{"execute", `"code"`, "the arguments must be an object"},
		{"poll", `{}`, "poll needs exec_id"},
		{"poll", `{"exec_id":"x","interrupt":"maybe"}`, "interrupt must be true or false"},
		{"poll", `{"exec_id":"x","cursor":-1}`, "cursor must be 0 or more"},
		{"init", `{"client_id":1}`, "client_id must be a string"},
		{"init", `{"name":"x"}`, `init has no parameter "name"`},
		{"init", `null`, ""},
		{"execute", `{"code":"1","wait_ms":"1000","max_bytes":2048.0,"request_id":null,"generation":null}`, ""},
		{"execute", `{"code":"1","wait_ms":" 1e3 "}`, ""},
		{"poll", `{"exec_id":"00000000000000000000000000000001","interrupt":"false","until_done":"True"}`, ""},
	} {
		c.send(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"` + test.tool + `","arguments":` + test.args + `}}`)
		got := c.result(1)
		if got.IsError != (test.want != "") || !strings.Contains(got.Text, test.want) {
			t.Errorf("%s %s: error %t, %q", test.tool, test.args, got.IsError, got.Text)
		}
	}
	for _, cell := range r.Cells() {
		if w := cell.Params.WaitMS; w == nil || *w != 1000 {
			t.Errorf("wait_ms arrived as %v", w)
		}
	}
}

func TestProgress(t *testing.T) {
	r := clienttest.New(t)
	cells := make(chan *clienttest.Cell, 1)
	r.Play(func(c *clienttest.Cell) { cells <- c })
	c := converse(t, r, func(o *Options) { o.progressEvery = 10 * time.Millisecond })
	c.run("init", nil)
	c.send(`{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"execute","arguments":{"code":"x","wait_ms":20000},"_meta":{"progressToken":"tok"}}}`)
	cell := <-cells
	last := -1.0
	for range 3 {
		m := c.next()
		p, _ := m["params"].(map[string]any)
		if m["method"] != "notifications/progress" || p["progressToken"] != "tok" || p["progress"].(float64) <= last {
			t.Fatalf("%v after %v", m, last)
		}
		last = p["progress"].(float64)
	}
	r.Notify(api.NotificationProgress, api.Progress{ExecID: cell.ID, RequestID: *cell.Params.RequestID, State: "running", Seconds: 2.5, LastLine: "\x1b[1mstep 7\x1b[0m " + strings.Repeat("é", 200)})
	seen := map[string]bool{} // the time goes on while the manager has nothing new to tell
	for len(seen) < 2 {
		text := c.next()["params"].(map[string]any)["message"].(string)
		if spent, line, ok := strings.Cut(text, ": "); ok && strings.HasPrefix(spent, "running ") && strings.HasPrefix(line, "step 7 é") {
			seen[spent] = true
			if len(text) > 200 {
				t.Errorf("message of %d bytes", len(text))
			}
		}
	}
	cell.End(api.Succeeded, "")
	for {
		m := c.next()
		if m["id"] != nil {
			break
		}
	}
	c.send(`{"jsonrpc":"2.0","id":6,"method":"ping"}`)
	if m := c.next(); m["method"] != nil {
		t.Errorf("after the result came %v", m)
	}
}

// The moments that no conversation hits reliably: a report that is due when the result
// has just left, and an answer with a notice that nobody wants any more.
func TestLateness(t *testing.T) {
	var out bytes.Buffer
	box := newOutbox(&out, maxUnsent)
	s := newServer(Options{Logger: slog.New(slog.DiscardHandler)}, box)
	newCall := func(id string) *call {
		return &call{s: s, id: json.RawMessage(id), token: json.RawMessage("1"), to: single{s}, cancel: func() {}, finished: make(chan struct{})}
	}
	o := refusal(rpc.Errorf("x", "no"))
	o.notice = &api.Notice{Kind: "kernel_died", Text: "all gone", Generation: gen1}
	c := newCall("1")
	c.abandon()
	c.deliver(o, map[string]any{})
	c.tell()
	o.notice = nil
	c = newCall("2")
	c.deliver(o, map[string]any{})
	c.tell()
	box.close()
	<-box.done
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 1 || !strings.Contains(lines[0], `"id":2`) || !strings.Contains(lines[0], "NOTICE kernel_died") {
		t.Errorf("said %q", lines)
	}
}

// A cancelled call gets no answer, its cell goes on, and the next answer says so.
func TestCancel(t *testing.T) {
	r := clienttest.New(t)
	cells := make(chan *clienttest.Cell, 1)
	r.Play(func(c *clienttest.Cell) { cells <- c })
	c := converse(t, r)
	c.run("init", nil)
	c.call(7, "execute", map[string]any{"code": "x", "wait_ms": 20000})
	cell := <-cells
	r.Await(api.MethodExecute)
	c.send(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":8}}`) // unknown
	c.send(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":7,"reason":"user"}}`)
	r.Await(api.MethodExecute) // what became of it?
	var got result
	for i := 0; !strings.Contains(got.Text, "cancelled") && i < 1000; i++ { // until that is answered
		got = c.run("poll", map[string]any{"exec_id": cell.ID, "wait_ms": 0})
	}
	if !strings.HasPrefix(got.Text, "running ") || !strings.Contains(got.Text, "[an execute that you cancelled was not stopped: its cell "+cell.ID+" was running then") {
		t.Errorf("after the cancellation: %q", got.Text)
	}
	cell.End(api.Succeeded, "")
	if got := c.run("poll", map[string]any{"exec_id": cell.ID}); !strings.HasPrefix(got.Text, "succeeded ") || strings.Contains(got.Text, "cancelled") {
		t.Errorf("then: %q", got.Text)
	}
	if cell.Ran() != 1 || len(r.Cells()) != 1 {
		t.Errorf("the cell ran %d times, %d cells", cell.Ran(), len(r.Cells()))
	}
	for _, m := range c.stash {
		if fmt.Sprint(m["id"]) == "7" {
			t.Errorf("the cancelled call was answered: %v", m)
		}
	}
}

// A cancellation that follows its request at once is honoured, each time.
func TestCancelAtOnce(t *testing.T) {
	r := clienttest.New(t)
	r.Play(func(*clienttest.Cell) {})
	c := converse(t, r)
	c.run("init", nil)
	var lines strings.Builder
	for i := range 50 {
		fmt.Fprintf(&lines, `{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"execute","arguments":{"code":"x","wait_ms":25000}}}`+"\n", i)
		fmt.Fprintf(&lines, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%d}}`+"\n", i)
	}
	c.send(lines.String() + `{"jsonrpc":"2.0","id":"end","method":"ping"}`)
	if m := c.next(); m["id"] != "end" {
		t.Errorf("%v", m)
	}
	c.in.Close() // whatever still waits is answered now
	for line := range c.lines {
		t.Errorf("answered: %s", line)
	}
}

// A client may send init and what needs it at once.
func TestExecuteRightBehindInit(t *testing.T) {
	r := clienttest.New(t)
	r.Play(func(cell *clienttest.Cell) { cell.End(api.Succeeded, "") })
	c := converse(t, r)
	const line = `{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":%q,"arguments":{%s}}}` + "\n"
	code := `"code":"x"`
	c.send(fmt.Sprintf(line+line+line, 1, "init", "", 2, "execute", code, 3, "execute", code) + `{"jsonrpc":"2.0","id":4,"method":"ping"}`)
	for id := 1; id <= 3; id++ {
		if got := c.result(id); got.IsError {
			t.Errorf("%d: %s", id, got.Text)
		}
	}
}

// A poll that interrupts does not wait behind calls that wait.
func TestInterruptOvertakes(t *testing.T) {
	r := clienttest.New(t)
	cells := make(chan *clienttest.Cell, 100)
	r.Play(func(c *clienttest.Cell) { cells <- c })
	c := converse(t, r)
	c.run("init", nil)
	for i := range 50 {
		c.call(i, "execute", map[string]any{"code": "x", "wait_ms": 25000})
	}
	var cell *clienttest.Cell
	for range 50 {
		cell = <-cells
	}
	got := c.run("poll", map[string]any{"exec_id": cell.ID, "interrupt": true})
	if !strings.Contains(got.Text, "KeyboardInterrupt was raised") || len(c.stash) > 1 {
		t.Errorf("%q, %d answers before it", got.Text, len(c.stash))
	}
}

// A loss is told first, once, and not lost with an answer that nobody wanted.
func TestNotice(t *testing.T) {
	r := clienttest.New(t)
	cells := make(chan *clienttest.Cell, 1)
	r.Play(func(c *clienttest.Cell) { cells <- c })
	c := converse(t, r)
	c.run("init", nil)
	c.call(1, "execute", map[string]any{"code": "x", "wait_ms": 20000})
	<-cells
	g := r.NewGeneration()
	got := c.result(1)
	if want := "NOTICE kernel_died (generation is now " + g[:8] + "): Python was killed by signal 9. Its memory is lost, files remain.\nlost exec_id="; !strings.HasPrefix(got.Text, want) || !got.IsError {
		t.Errorf("error %t, %q", got.IsError, got.Text)
	}
	if !strings.Contains(got.Text, "\nlost: the kernel was killed by signal 9\n") || !strings.Contains(got.Text, "(a cell of generation 11111111)") {
		t.Errorf("%q", got.Text)
	}
	r.Play(func(c *clienttest.Cell) { c.End(api.Succeeded, "") })
	if got := c.run("execute", map[string]any{"code": "1"}); strings.Contains(got.Text, "NOTICE") {
		t.Errorf("told twice: %q", got.Text)
	}
	if got := c.run("execute", map[string]any{"code": "1", "generation": "11111111"}); !got.IsError || !strings.Contains(got.Text, "nothing was run") {
		t.Errorf("old generation: %q", got.Text)
	}
	if got := c.run("execute", map[string]any{"code": "1", "generation": g[:8]}); got.IsError {
		t.Errorf("this generation: %q", got.Text)
	}
}

// The manager dies under a call; the MCP client sees one answer.
func TestManagerDies(t *testing.T) {
	r := clienttest.New(t)
	cells := make(chan *clienttest.Cell, 1)
	r.Play(func(c *clienttest.Cell) { cells <- c })
	c := converse(t, r)
	c.run("init", nil)
	c.call(1, "execute", map[string]any{"code": "x", "wait_ms": 20000})
	cell := <-cells
	r.Await(api.MethodExecute)
	r.Kill()
	r.Start()
	r.Await(api.MethodExecute)
	cell.End(api.Succeeded, "")
	if got := c.result(1); got.IsError || !strings.HasPrefix(got.Text, "succeeded ") || strings.Contains(got.Text, "used before") {
		t.Errorf("%q", got.Text)
	}
}

// A runtime that cannot start is an answer, not an exit.
func TestStartFails(t *testing.T) {
	c := converse(t, clienttest.New(t), func(o *Options) {
		o.Client = client.New(client.Options{Ensure: func(context.Context) (string, error) {
			return "", rpc.Errorf("invalid_workspace", "/ is no workspace").WithHint("start the server in a project directory")
		}})
	})
	got := c.run("init", nil)
	if want := "/ is no workspace\nnext: start the server in a project directory\n[invalid_workspace]\n"; !got.IsError || got.Text != want {
		t.Errorf("%q", got.Text)
	}
}

// A panic answers the call that it came from.
func TestPanic(t *testing.T) {
	var out bytes.Buffer
	box := newOutbox(&out, maxUnsent)
	s := newServer(Options{Logger: slog.New(slog.DiscardHandler)}, box) // without a client
	s.handle([]byte(`{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"init"}}`))
	s.calls.Wait()
	box.close()
	<-box.done
	if got := out.String(); !strings.HasPrefix(got, `{"jsonrpc":"2.0","id":3,"error":{"code":-32603,`) {
		t.Errorf("%s", got)
	}
}

func TestDuplicateID(t *testing.T) {
	r := clienttest.New(t)
	cells := make(chan *clienttest.Cell, 2)
	r.Play(func(c *clienttest.Cell) { cells <- c })
	c := converse(t, r)
	c.run("init", nil)
	c.call(1, "execute", map[string]any{"code": "x", "wait_ms": 20000})
	cell := <-cells
	c.call(1, "execute", map[string]any{"code": "x", "wait_ms": 20000})
	if code, text := errorOf(c.answer(1)); code != -32600 || !strings.Contains(text, "still being answered") {
		t.Errorf("%d %s", code, text)
	}
	cell.End(api.Succeeded, "")
	c.result(1)
}

// A last line without a newline is answered before the end, and so is a call that ends
// soon; one that waits does not hold up the end.
func TestEndOfInput(t *testing.T) {
	r := clienttest.New(t)
	r.Play(func(c *clienttest.Cell) {
		if c.Params.Code == "now" {
			c.End(api.Succeeded, "")
		}
	})
	c := converse(t, r)
	c.run("init", nil)
	c.call(1, "execute", map[string]any{"code": "later", "wait_ms": 25000})
	c.call(2, "execute", map[string]any{"code": "now", "wait_ms": 25000})
	begun := time.Now()
	if _, err := io.WriteString(c.in, `{"jsonrpc":"2.0","id":3,"method":"ping"}`); err != nil {
		t.Fatal(err)
	}
	c.in.Close()
	c.answer(3)
	if got := c.result(2); !strings.HasPrefix(got.Text, "succeeded ") {
		t.Errorf("%q", got.Text)
	}
	if got := c.result(1); !got.IsError || !strings.Contains(got.Text, "goes on") {
		t.Errorf("%q", got.Text)
	}
	for range c.lines {
	}
	if spent := time.Since(begun); spent > 20*time.Second { // not the 25 s that the call would wait
		t.Errorf("the end took %s", spent)
	}
}

// A client that does not read holds up neither other requests' handling nor the end.
func TestClientDoesNotRead(t *testing.T) {
	r := clienttest.New(t)
	inR, inW, _ := os.Pipe()
	outR, outW, _ := os.Pipe()
	defer outR.Close()
	defer outW.Close()
	defer inR.Close()
	c := client.New(client.Options{Ensure: r.Ensure})
	ended := make(chan error, 1)
	go func() { ended <- Run(context.Background(), Options{In: inR, Out: outW, Client: c, Version: "1"}) }()
	line := []byte(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}` + "\n")
	for range 500 { // their answers are many times what the pipe holds
		if _, err := inW.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	inW.Close()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(60 * time.Second):
		t.Error("it does not end")
		outR.Close()
		<-ended
	}
}

// One that lets answers pile up is given up.
func TestClientNeverReads(t *testing.T) {
	r := clienttest.New(t)
	inR, inW, _ := os.Pipe()
	outR, outW, _ := os.Pipe()
	defer outR.Close()
	defer outW.Close()
	defer inR.Close()
	defer inW.Close()
	ended := make(chan error, 1)
	go func() {
		ended <- Run(context.Background(), Options{In: inR, Out: outW, Client: client.New(client.Options{Ensure: r.Ensure}), maxUnsent: 1 << 20})
	}()
	written := make(chan struct{})
	go func() {
		defer close(written)
		line := []byte(strings.Repeat(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`+"\n", 100))
		for {
			if _, err := inW.Write(line); err != nil {
				return
			}
		}
	}()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(60 * time.Second):
		t.Error("it goes on")
	}
	inR.Close()
	<-written
}

// A client that has gone ends the server.
func TestClientGone(t *testing.T) {
	r := clienttest.New(t)
	inR, inW, _ := os.Pipe()
	outR, outW, _ := os.Pipe()
	defer outW.Close()
	defer inR.Close()
	defer inW.Close()
	ended := make(chan error, 1)
	go func() {
		ended <- Run(context.Background(), Options{In: inR, Out: outW, Client: client.New(client.Options{Ensure: r.Ensure})})
	}()
	outR.Close()
	if _, err := io.WriteString(inW, `{"jsonrpc":"2.0","id":1,"method":"ping"}`+"\n"); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Every line of the output is one JSON message, whatever the cells print.
func TestOutputIsLines(t *testing.T) {
	r := clienttest.New(t)
	r.Play(func(c *clienttest.Cell) {
		c.Print("a\nb\r\n<&>\u2028\x00\xff" + c.Params.Code)
		c.End(api.Succeeded, "")
	})
	c := converse(t, r)
	c.run("init", nil)
	got := c.run("execute", map[string]any{"code": "<b>&\n"})
	if !strings.Contains(got.Text, "a\nb\n<&>\u2028\ufffd<b>&\n") {
		t.Errorf("%q", got.Text)
	}
	if b, _ := encode(map[string]string{"x": "<&>"}); !bytes.Contains(b, []byte("<&>")) {
		t.Errorf("%s", b)
	}
}

// A whole execute through real pipes and a real socket, with a manager that does
// nothing.
func BenchmarkExecute(b *testing.B) {
	r := clienttest.New(b)
	inR, inW, _ := os.Pipe()
	outR, outW, _ := os.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- Run(context.Background(), Options{In: inR, Out: outW, Client: client.New(client.Options{Ensure: r.Ensure})})
	}()
	answers := bufio.NewReaderSize(outR, 1<<20)
	say := func(line string) {
		if _, err := io.WriteString(inW, line+"\n"); err != nil {
			b.Fatal(err)
		}
		if _, err := answers.ReadSlice('\n'); err != nil {
			b.Fatal(err)
		}
	}
	say(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"init"}}`)
	for b.Loop() {
		say(`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"execute","arguments":{"code":"1+1"}}}`)
	}
	inW.Close()
	<-ended
	for _, f := range []*os.File{inR, outR, outW} {
		f.Close()
	}
}
