package frontend

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"runtime/debug"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/mark3labs/mcp-go/mcp"

	"mypr/internal/api"
	"mypr/internal/client"
)

// listTTL is how long a client of the 2026-07-28 revision may keep tools/list and
// server/discover. They change with the program only.
const listTTL = time.Hour

// server is one conversation with an MCP client.
type server struct {
	client        *client.Client
	info          mcp.Implementation
	structured    bool
	progressEvery time.Duration
	log           *slog.Logger
	out           *outbox

	ctx    context.Context // of every call; ends when the front end does
	cancel context.CancelFunc
	calls  sync.WaitGroup

	mu      sync.Mutex       // guards the fields below
	running map[string]*call // by request id, as it was written
	joining *call            // the init that came last, until it has ended
	left    leftovers
	inbox   string // the inbox that was shown last
}

// leftovers are what an answer that could not be delivered would have said. The next
// one says it.
type leftovers struct {
	notices []*api.Notice
	notes   []string
}

func newServer(o Options, out *outbox) *server {
	s := &server{
		client: o.Client, structured: o.Structured, progressEvery: o.progressEvery, log: o.Logger, out: out,
		info:    mcp.Implementation{Name: "mypr-mcp", Title: "Persistent Python session", Version: o.Version},
		running: map[string]*call{},
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// message is any JSON-RPC message. An absent field is nil, null is "null".
type message struct {
	Version string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id"`
	Method  *string         `json:"method"`
	Params  json.RawMessage `json:"params"`
	Result  json.RawMessage `json:"result"`
	Error   json.RawMessage `json:"error"`
}

// params are those of all methods that are served. They are decoded once, and each
// method looks into its own.
type params struct {
	Meta            json.RawMessage `json:"_meta"`
	Name            json.RawMessage `json:"name"`
	Arguments       json.RawMessage `json:"arguments"`
	Cursor          json.RawMessage `json:"cursor"`
	ProtocolVersion json.RawMessage `json:"protocolVersion"`
	ClientInfo      json.RawMessage `json:"clientInfo"`
	RequestID       json.RawMessage `json:"requestId"`
}

type meta struct {
	ProgressToken      json.RawMessage `json:"progressToken"`
	ProtocolVersion    json.RawMessage `json:"io.modelcontextprotocol/protocolVersion"`
	ClientCapabilities json.RawMessage `json:"io.modelcontextprotocol/clientCapabilities"`
	ClientInfo         json.RawMessage `json:"io.modelcontextprotocol/clientInfo"`
}

// failure is a JSON-RPC error.
type failure struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
	Data    any    `json:"data,omitempty"`
}

func failf(code int, format string, a ...any) *failure {
	return &failure{Code: code, Message: fmt.Sprintf(format, a...)}
}

type response struct {
	Version string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id"`
	Result  any             `json:"result,omitempty"`
	Error   *failure        `json:"error,omitempty"`
}

var null = json.RawMessage("null")

func answer(id json.RawMessage, result any, fail *failure) response {
	if id == nil {
		id = null
	}
	return response{mcp.JSONRPC_VERSION, id, result, fail}
}

// sink takes the answer to one message, or learns that there will be none.
type sink interface {
	answer(response)
	none()
}

type single struct{ s *server }

func (o single) answer(r response) {
	if err := o.s.out.send(r); err != nil {
		o.s.log.Warn("an answer was not sent", "error", err)
		if o.s.out.failed() == nil { // it cannot be encoded: the caller must not wait for ever
			_ = o.s.out.send(answer(r.ID, nil, failf(mcp.INTERNAL_ERROR, "cannot encode the answer: %v", err)))
		}
	}
}
func (single) none() {}

// batch gathers the answers to an array of messages (revision 2025-03-26).
type batch struct {
	s *server

	mu      sync.Mutex // guards the fields below
	waiting int
	answers []response
}

func (b *batch) answer(r response) { b.settle(&r) }
func (b *batch) none()             { b.settle(nil) }

func (b *batch) settle(r *response) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r != nil {
		b.answers = append(b.answers, *r)
	}
	if b.waiting--; b.waiting == 0 && len(b.answers) > 0 {
		if err := b.s.out.send(b.answers); err != nil {
			b.s.log.Warn("the answers to a batch were not sent", "error", err)
		}
	}
}

// read handles messages until the input ends.
func (s *server) read(in io.Reader) error {
	lines := &lineReader{r: in, limit: maxLine}
	for {
		line, err := lines.next()
		var long *tooLong
		switch {
		case errors.As(err, &long):
			s.log.Warn("message refused", "error", err)
			single{s}.answer(answer(long.id(), nil, failf(mcp.INVALID_REQUEST, "%v", err)))
		case err != nil:
			return err
		default:
			s.handle(line)
		}
	}
}

// id looks for the request id near either end of a message that was too long to be
// parsed, so that its sender does not wait for ever. Some clients write the id first,
// others last.
func (e *tooLong) id() json.RawMessage {
	for _, m := range [][][]byte{idFirst.FindSubmatch(e.head), idLast.FindSubmatch(e.tail)} {
		if m != nil && json.Valid(m[1]) {
			return json.RawMessage(m[1])
		}
	}
	return nil
}

var (
	idFirst = lazyRegexp(`^\s*\{\s*(?:"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*,\s*)*"id"\s*:\s*("[^"\\]*"|-?[0-9]+)\s*,`)
	idLast  = lazyRegexp(`\}\s*,\s*(?:"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*,\s*)*"id"\s*:\s*("[^"\\]*"|-?[0-9]+)\s*(?:,\s*"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*)*\}\s*$`)
)

// lazyRegexp is compiled when it is first used: start-up time is every client's.
type lazyRegexp string

func (r lazyRegexp) FindSubmatch(b []byte) [][]byte {
	return regexp.MustCompile(string(r)).FindSubmatch(b)
}

// handle takes one line.
func (s *server) handle(line []byte) {
	line = bytes.TrimSpace(bytes.TrimPrefix(line, []byte("\xef\xbb\xbf")))
	if len(line) == 0 {
		return
	}
	if !utf8.Valid(line) { // the decoder would quietly put U+FFFD into somebody's code
		single{s}.answer(answer(nil, nil, failf(mcp.PARSE_ERROR, "the message is not valid UTF-8")))
		return
	}
	if line[0] != '[' {
		s.message(line, single{s})
		return
	}
	var messages []json.RawMessage
	if err := json.Unmarshal(line, &messages); err != nil {
		single{s}.answer(answer(nil, nil, failf(mcp.PARSE_ERROR, "the message is not JSON: %v", err)))
		return
	}
	if len(messages) == 0 {
		single{s}.answer(answer(nil, nil, failf(mcp.INVALID_REQUEST, "the batch is empty")))
		return
	}
	b := &batch{s: s, waiting: len(messages)}
	for _, m := range messages {
		s.message(m, b)
	}
}

const notRequest = `not a JSON-RPC message: it must be an object with "jsonrpc" as "2.0" and "method" as a string`

// message takes one JSON-RPC message.
func (s *server) message(raw []byte, to sink) {
	var m message
	if err := json.Unmarshal(raw, &m); err != nil {
		if !json.Valid(raw) {
			to.answer(answer(nil, nil, failf(mcp.PARSE_ERROR, "the message is not JSON: %v", err)))
			return
		}
		// Not an object, or one with a field of the wrong type. The decoder's error names
		// types of ours, which say nothing to whoever reads it.
		var only struct {
			ID json.RawMessage `json:"id"`
		}
		_ = json.Unmarshal(raw, &only)
		to.answer(answer(validID(only.ID), nil, failf(mcp.INVALID_REQUEST, notRequest)))
		return
	}
	switch {
	case m.Method == nil && (m.Result != nil || m.Error != nil):
		to.none() // an answer, though nothing was asked
	case m.Method == nil || m.Version != mcp.JSONRPC_VERSION:
		to.answer(answer(validID(m.ID), nil, failf(mcp.INVALID_REQUEST, notRequest)))
	case m.ID == nil:
		s.notification(*m.Method, m.Params)
		to.none()
	case validID(m.ID) == nil:
		to.answer(answer(nil, nil, failf(mcp.INVALID_REQUEST, "the id of a request must be a string or a number")))
	default:
		s.request(m.ID, *m.Method, m.Params, to)
	}
}

// validID is id if it is a string or a number, else nil.
func validID(id json.RawMessage) json.RawMessage {
	if len(id) > 0 && (id[0] == '"' || id[0] == '-' || '0' <= id[0] && id[0] <= '9') {
		return id
	}
	return nil
}

func (s *server) notification(method string, raw json.RawMessage) {
	if method != string(mcp.MethodNotificationCancelled) {
		return
	}
	var p params
	if json.Unmarshal(raw, &p) != nil {
		return
	}
	s.mu.Lock()
	c := s.running[string(p.RequestID)]
	s.mu.Unlock()
	if c != nil {
		c.abandon()
	}
}

// request answers one request, or starts the call that will.
func (s *server) request(id json.RawMessage, method string, raw json.RawMessage, to sink) {
	var p params
	var m meta
	if len(raw) > 0 && !bytes.Equal(raw, null) {
		if err := json.Unmarshal(raw, &p); err != nil {
			to.answer(answer(id, nil, failf(mcp.INVALID_PARAMS, "params must be an object")))
			return
		}
	}
	if len(p.Meta) > 0 && !bytes.Equal(p.Meta, null) {
		if err := json.Unmarshal(p.Meta, &m); err != nil {
			to.answer(answer(id, nil, failf(mcp.INVALID_PARAMS, "_meta must be an object")))
			return
		}
	}
	modern, fail := era(m)
	if method == string(mcp.MethodInitialize) {
		modern, fail = false, nil
	}
	if fail != nil {
		to.answer(answer(id, nil, fail))
		return
	}
	if modern {
		s.named(m.ClientInfo)
	}
	var result any
	switch mcp.MCPMethod(method) {
	case mcp.MethodInitialize:
		s.named(p.ClientInfo)
		result = s.initialize(p)
	case mcp.MethodServerDiscover:
		if modern {
			result = s.discover()
		} else {
			fail = failf(mcp.INVALID_PARAMS, "server/discover needs _meta with %s and %s", mcp.MetaKeyProtocolVersion, mcp.MetaKeyClientCapabilities)
		}
	case mcp.MethodPing:
		if modern {
			fail = failf(mcp.METHOD_NOT_FOUND, "ping does not exist in revision %s", mcp.ProtocolVersion20260728)
		} else {
			result = struct{}{}
		}
	case mcp.MethodToolsList:
		result, fail = s.list(p, modern)
	case mcp.MethodToolsCall:
		if fail = s.call(id, p, m, modern, to); fail == nil {
			return
		}
	default:
		fail = failf(mcp.METHOD_NOT_FOUND, "this server has no method %q", clip(method, 64))
	}
	if fail != nil {
		to.answer(answer(id, nil, fail))
		return
	}
	to.answer(answer(id, result, nil))
}

// era tells a request of the stateless revisions from one of the handshake's, and
// refuses a stateless one that lacks what it must carry.
func era(m meta) (modern bool, fail *failure) {
	if m.ProtocolVersion == nil {
		return false, nil
	}
	var version string
	if json.Unmarshal(m.ProtocolVersion, &version) != nil {
		return false, failf(mcp.INVALID_PARAMS, "_meta %s must be a string", mcp.MetaKeyProtocolVersion)
	}
	if !mcp.IsModernProtocol(version) && mcp.IsValidProtocolVersion(version) {
		return false, nil // odd, but clear
	}
	if !mcp.IsValidProtocolVersion(version) {
		return false, &failure{mcp.UNSUPPORTED_PROTOCOL_VERSION, fmt.Sprintf("unsupported protocol version %q", clip(version, 64)),
			mcp.UnsupportedProtocolVersionData{Supported: mcp.ValidProtocolVersions, Requested: version}}
	}
	var capabilities map[string]json.RawMessage
	if m.ClientCapabilities == nil || json.Unmarshal(m.ClientCapabilities, &capabilities) != nil || capabilities == nil {
		return false, failf(mcp.INVALID_PARAMS, "_meta %s is required and must be an object", mcp.MetaKeyClientCapabilities)
	}
	return true, nil
}

// named remembers what the client calls itself, for status.
func (s *server) named(raw json.RawMessage) {
	var info mcp.Implementation
	if len(raw) > 0 && json.Unmarshal(raw, &info) == nil && info.Name != "" {
		name := info.Name
		if info.Version != "" {
			name += " " + info.Version
		}
		s.client.SetName(clip(name, 128))
	}
}

func capabilities() mcp.ServerCapabilities {
	return mcp.ServerCapabilities{Tools: &struct {
		ListChanged bool `json:"listChanged,omitempty"`
	}{}}
}

func (s *server) initialize(p params) any {
	var version string
	_ = json.Unmarshal(p.ProtocolVersion, &version) // whatever it is, it gets an answer
	return mcp.InitializeResult{
		ProtocolVersion: mcp.NegotiateLegacyVersion(version),
		Capabilities:    capabilities(), ServerInfo: s.info, Instructions: instructions,
	}
}

func (s *server) discover() any {
	r := mcp.DiscoverResult{SupportedVersions: mcp.ValidProtocolVersions, Capabilities: capabilities(), Instructions: instructions}
	r.SetResultType(mcp.ResultTypeComplete)
	r.EnsureResultMeta().SetServerInfo(s.info)
	r.SetCacheHints(listTTL.Milliseconds(), mcp.CacheScopePublic)
	return r
}

func (s *server) list(p params, modern bool) (any, *failure) {
	var cursor string
	if p.Cursor != nil && (json.Unmarshal(p.Cursor, &cursor) != nil || cursor != "") {
		return nil, failf(mcp.INVALID_PARAMS, "tools/list has one page: leave out the cursor")
	}
	list, err := toolList()
	if err != nil {
		return nil, failf(mcp.INTERNAL_ERROR, "cannot encode the tools: %v", err)
	}
	r := struct {
		mcp.CacheableResult
		Tools json.RawMessage `json:"tools"`
	}{Tools: list}
	if modern {
		r.SetResultType(mcp.ResultTypeComplete)
		r.EnsureResultMeta().SetServerInfo(s.info)
		r.SetCacheHints(listTTL.Milliseconds(), mcp.CacheScopePublic)
	}
	return r, nil
}

// call registers a tool call and starts it. The registration comes first: whatever
// the client sends next, a cancellation above all, finds it.
func (s *server) call(id json.RawMessage, p params, m meta, modern bool, to sink) *failure {
	var name string
	if json.Unmarshal(p.Name, &name) != nil {
		return failf(mcp.INVALID_PARAMS, "tools/call needs the name of a tool")
	}
	t := toolByName(name)
	if t == nil {
		return failf(mcp.INVALID_PARAMS, "there is no tool %q: the tools are init, execute and poll", clip(name, 64))
	}
	c := &call{s: s, id: id, tool: t, modern: modern, to: to, began: time.Now(), finished: make(chan struct{})}
	if validID(m.ProgressToken) != nil {
		c.token = m.ProgressToken
	}
	var ctx context.Context
	ctx, c.cancel = context.WithCancel(s.ctx)
	s.mu.Lock()
	if s.running[string(id)] != nil {
		s.mu.Unlock()
		c.cancel()
		return failf(mcp.INVALID_REQUEST, "a request with id %s is still being answered", clip(string(id), 64))
	}
	s.running[string(id)] = c
	switch t.name {
	case "init":
		s.joining = c
	case "execute":
		c.behind = s.joining
	}
	s.mu.Unlock()
	s.calls.Go(func() {
		defer c.cancel()
		defer func() {
			if x := recover(); x != nil {
				s.log.Error("a tool call panicked", "tool", t.name, "panic", x, "stack", string(debug.Stack()))
				c.finish(nil, failf(mcp.INTERNAL_ERROR, "%s: internal error: %v", t.name, x))
			}
		}()
		c.run(ctx, p.Arguments)
	})
	return nil
}
