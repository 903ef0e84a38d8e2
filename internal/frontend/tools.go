package frontend

import (
	"encoding/json"
	"sync"

	"github.com/mark3labs/mcp-go/mcp"

	"mypr/internal/api"
)

// instructions are the same in both eras. Hosts cut them at 2,048 characters, some
// earlier, and some show none at all: what matters most comes first, and each tool's
// description stands for itself.
const instructions = `A persistent Python session for this directory. Call init once, then execute(code). Variables, imports and functions stay between calls and are shared by every client of the directory; the session outlives this connection. If the answer says running or queued, read on with poll(exec_id, cursor); never submit the same code again to get its output.

Every answer opens with one line: state, exec_id, generation, cursor, elapsed. States: queued, running, succeeded, failed (the cell raised; the exception is on the next line), cancelled, lost (the session died under it). A wait that ended is not a cell that ended: after wait_ms the cell goes on.

A new generation means that Python memory was lost (reset, restart, crash); the answer that first shows it says what died and what remains. Pass generation to execute when the code relies on earlier variables: it is refused, not run, in another session.

Cells run as asyncio tasks in one process: top-level await works, and while one cell awaits others run. Synchronous code holds them all; an answer then names the cell that blocks, and poll(exec_id, interrupt=true) stops it without touching the others. The last expression is displayed, a trailing ; hides it. input() is not available. In Python, ws is the API of the workspace; the answer to init describes it.

Long output comes in pages: has_more and the cursor say how to go on. Prefer to keep data in Python and to print what you need. PNG and JPEG displays come as images; everything displayed is also kept as a file, whose path is given.

After an uncertain outcome look before you repeat: use the same request_id, which never runs twice, or poll.`

// parameter is one argument of a tool: what its schema says and what args checks.
type parameter struct {
	name     string
	kind     string // string, integer, boolean
	required bool
	min, max int64 // of an integer; max 0: none
	text     string
	example  string // as it would be written in JSON
}

// tool is one tool: its definition and its parameters.
type tool struct {
	name        string
	title       string
	description string
	annotations mcp.ToolAnnotation
	meta        map[string]any
	parameters  []parameter
}

func hints(title string, readOnly, destructive, idempotent, openWorld bool) mcp.ToolAnnotation {
	return mcp.ToolAnnotation{
		Title: title, ReadOnlyHint: &readOnly, DestructiveHint: &destructive,
		IdempotentHint: &idempotent, OpenWorldHint: &openWorld,
	}
}

// largeResult raises Claude Code's limit for text results; a large max_bytes would be
// turned into a file otherwise. 500,000 characters is the most it grants.
const largeResult = 500_000

// tools are all there are, in the order of tools/list.
//
// poll is not marked read-only, although hosts would then run it beside a waiting
// execute and ask less: with interrupt=true it ends a cell, possibly another client's,
// and a hint is for the worst that a call can do. It destroys no data, can be repeated
// and touches nothing outside the session, which is what hosts ask that know more than
// one hint.
var tools = []tool{
	{
		name:  "init",
		title: "Join the Python session",
		description: `Join this directory's Python session; call it once before the first execute. It starts the session when none runs. Without arguments it gives you a new client id such as calm-otter; with client_id it makes or resumes that identity, for instance your own from an earlier connection, with its messages and its request ids. The id belongs to the connection, so later calls do not repeat it. Calling init again is harmless and returns the same id.

The answer names the id, the session's generation, the workspace, the Python version and what the session can do. Memory is shared by all clients and lasts until a reset, restart or crash, each of which changes the generation.`,
		annotations: hints("Join the Python session", false, false, true, false),
		meta:        map[string]any{"anthropic/alwaysLoad": true},
		parameters: []parameter{
			{name: "client_id", kind: "string", example: `"calm-otter"`, text: "Identity to create or resume: 1 to 128 of A-Z a-z 0-9 _ . : -. Leave out for a new one."},
		},
	},
	{
		name:  "execute",
		title: "Run Python code",
		description: `Run a Python cell in the shared persistent session and return its state and output. Call init first. Top-level await works; the last expression is displayed. The call waits up to wait_ms for the cell to end, then returns what there is; the cell goes on, and you read the rest with poll(exec_id, cursor). Do not submit code again to see its output.

Code runs with the user's permissions, without a sandbox. A cell that raises is state=failed with the exception on the second line. Synchronous code blocks the other cells of the session, so let long work await.`,
		annotations: hints("Run Python code", false, true, false, true),
		meta:        map[string]any{"anthropic/alwaysLoad": true, "anthropic/maxResultSizeChars": largeResult},
		parameters: []parameter{
			{name: "code", kind: "string", required: true, example: `"print(1 + 1)"`, text: "Python source of the cell, at most 8 MiB."},
			waitParameter,
			{name: "request_id", kind: "string", example: `"build-7"`, text: "Your own name for this submission. The same id with the same code returns the first run instead of running again, even after a restart. At most 128 of A-Z a-z 0-9 _ . : -."},
			bytesParameter,
			{name: "generation", kind: "string", example: `"3f2a9c01"`, text: "Run only if the session is still this generation, as shown on an answer's first line; otherwise nothing runs."},
		},
	},
	{
		name:  "poll",
		title: "Read a Python cell",
		description: `Read the state and output of a cell that execute started, also one of another client or of an earlier session. Returns at once when there is output after cursor or the cell has ended; otherwise waits up to wait_ms for one of these. Pass the cursor of the last answer to get only what is new; without it output is read from the start. Use a long wait_ms (10000 to 30000) rather than many short polls.

interrupt=true first stops the cell: KeyboardInterrupt if it holds the event loop, cancellation if it awaits, removal if it has not begun. Other cells are not touched.`,
		annotations: hints("Read a Python cell", false, false, true, false),
		meta:        map[string]any{"anthropic/alwaysLoad": true, "anthropic/maxResultSizeChars": largeResult},
		parameters: []parameter{
			{name: "exec_id", kind: "string", required: true, example: `"0f8b3c6d9a1e4f7080b2c4d6e8fa0c1e"`, text: "The cell, as named by execute."},
			{name: "cursor", kind: "integer", example: "12", text: "Number of output events read so far, from the last answer. Default 0: from the start."},
			waitParameter,
			bytesParameter,
			{name: "interrupt", kind: "boolean", example: "true", text: "Stop the cell first. Default false."},
			{name: "until_done", kind: "boolean", example: "true", text: "Let only the end of the cell end the wait, not new output. Default false."},
		},
	},
}

var (
	waitParameter = parameter{name: "wait_ms", kind: "integer", example: "10000",
		text: "How long to wait, in milliseconds, 0 to 30000; more is cut, and the answer says so. Default 1000, unless config.toml says otherwise. Not a limit on the cell."}
	bytesParameter = parameter{name: "max_bytes", kind: "integer", min: api.MinBytes, max: api.MaxBytes, example: "65536",
		text: "Size of one page of output, 1024 to 1048576; all of it is shown. Default: pages of 32768, of which the text shows head and tail in about 8 KB."}
)

func toolByName(name string) *tool {
	for i := range tools {
		if tools[i].name == name {
			return &tools[i]
		}
	}
	return nil
}

func (t *tool) parameter(name string) *parameter {
	for i := range t.parameters {
		if t.parameters[i].name == name {
			return &t.parameters[i]
		}
	}
	return nil
}

// definition is the tool as tools/list shows it. The schema is a plain object without
// combinators: some hosts drop a whole list for one tool that has them.
func (t *tool) definition() mcp.Tool {
	d := mcp.Tool{Name: t.name, Title: t.title, Description: t.description, Annotations: t.annotations}
	if t.meta != nil {
		d.Meta = &mcp.Meta{AdditionalFields: t.meta}
	}
	d.InputSchema = mcp.ToolInputSchema{Type: "object", Properties: map[string]any{}, AdditionalProperties: false}
	for _, p := range t.parameters {
		s := map[string]any{"type": p.kind, "description": p.text}
		if p.kind == "integer" {
			s["minimum"] = p.min
			if p.max > 0 {
				s["maximum"] = p.max
			}
		}
		d.InputSchema.Properties[p.name] = s
		d.InputSchema.PropertyOrder = append(d.InputSchema.PropertyOrder, p.name)
		if p.required {
			d.InputSchema.Required = append(d.InputSchema.Required, p.name)
		}
	}
	return d
}

// toolList is the list as it travels, made at its first use.
var toolList = sync.OnceValues(func() (json.RawMessage, error) {
	list := make([]mcp.Tool, len(tools))
	for i := range tools {
		list[i] = tools[i].definition()
	}
	return json.Marshal(list)
})
