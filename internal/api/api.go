// Package api holds the requests and answers of the runtime socket: what front ends
// and the command line ask the manager, and what it says.
//
// It owns names and shapes (docs/PROTOCOL.md, "Runtime socket"), not behaviour. The
// machine-readable payload that MCP clients find in _meta["mypr/result"] is one of
// these structs, so field names here are public.
package api

import (
	"time"

	"mypr/supervisor/control"
)

// Protocol is the version of the runtime protocol. A change that an older peer
// would misread raises it; added fields and methods do not (they are Capabilities).
const Protocol = 1

// Methods of the runtime socket. Every method but attach, init and execute works on
// a connection that was never attached.
const (
	MethodAttach    = "attach"    // AttachParams -> AttachResult: the connection counts as a client until it ends
	MethodInit      = "init"      // InitParams -> InitResult
	MethodExecute   = "execute"   // ExecuteParams -> ExecResult
	MethodPoll      = "poll"      // PollParams -> ExecResult
	MethodInterrupt = "interrupt" // InterruptParams -> InterruptResult
	MethodStatus    = "status"    // StatusParams -> Status
	MethodLogs      = "logs"      // LogsParams -> LogsPage
	MethodReset     = "reset"     // LifecycleParams -> ResetResult
	MethodStop      = "stop"      // LifecycleParams -> StopResult: the manager agrees and has marked its work; the caller then shuts the supervisor down
	MethodRestart   = "restart"   // LifecycleParams -> RestartResult: the same for a restart
	MethodHistory   = "history"   // HistoryParams -> HistoryPage
	MethodRecord    = "record"    // RecordParams -> Record
	// Notification to an attached connection that asked for it in AttachParams.Progress:
	// Progress, at most one a second for each call that waits.
	NotificationProgress = "progress"
	// Notification to every attached connection, before the manager ends on purpose:
	// Stopping. A front end that idles does not connect again after a stop, since
	// that could start what somebody has just stopped.
	NotificationStopping = "stopping"
)

// Execution states.
const (
	Queued     = "queued"
	Running    = "running"
	Succeeded  = "succeeded"
	FailedCell = "failed"
	Cancelled  = "cancelled"
	Lost       = "lost"
	Restarting = "restarting" // the cell that asked for a restart, until it is over
)

// UpdatePending reports whether a client's program is another version than the manager's. A
// program that was built without one ("devel", "unknown") may be the same, and restarting
// into it would not end the matter.
func UpdatePending(manager, client string) bool {
	known := func(v string) bool { return v != "" && v != "devel" && v != "unknown" }
	return known(manager) && known(client) && manager != client
}

// Terminal reports whether an execution in this state has ended.
func Terminal(state string) bool {
	switch state {
	case Succeeded, FailedCell, Cancelled, Lost:
		return true
	}
	return false
}

// Codes of rpc.Error beyond the general ones.
const (
	CodeNotInitialized  = "not_initialized" // execute before init
	CodeGeneration      = "generation_mismatch"
	CodeWorkspaceMoved  = "workspace_moved"
	CodeActiveWork      = "active_work"
	CodeInvalidCursor   = "invalid_cursor"
	CodeOutputLimit     = "output_limit" // max_bytes is too small for the next event
	CodeKernel          = "kernel_unavailable"
	CodeStorage         = "storage_failed" // the disk refused; nothing was run
	CodeProtocol        = "protocol_mismatch"
	CodeClientBound     = "client_bound"     // the id is in use by another live connection, or this one has another id
	CodeClientExhausted = "client_exhausted" // all 65,536 automatic ids are taken
	CodeRequestConflict = "request_conflict" // request_id was used with other code
)

// Limits of the protocol. Bounds are inclusive.
const (
	MaxWaitMS       = 30_000 // a longer wait is cut to this, and the answer says so (Clamped)
	DefaultWaitMS   = 1_000
	MinBytes        = 1_024
	MaxBytes        = 1 << 20
	DefaultBytes    = 32 << 10
	MaxErrorBytes   = 1_024
	MaxOutputBytes  = 16 << 20 // of one run, text and artifacts together
	MaxInlineImages = 2 << 20  // bytes of PNG and JPEG in one answer
	MaxWarnings     = 4
	MaxIDLength     = 128 // client, connection and request ids; [A-Za-z0-9_.:-]
	MaxCodeBytes    = 8 << 20
)

type (
	// AttachParams opens a connection's life as a client.
	AttachParams struct {
		ConnectionID string `json:"connection_id"` // 32 hex digits, new for every connection
		Protocol     int    `json:"protocol"`
		Version      string `json:"version"`
		Kind         string `json:"kind"` // frontend, cli
		// Name is what the MCP client calls itself ("claude-code 2.1.285"), for status.
		Name string `json:"name,omitempty"`
		// Progress asks for progress notifications on this connection.
		Progress bool `json:"progress,omitempty"`
		// ClientID rebinds at once after a reconnect; SeenGeneration is the last
		// generation that this front end showed its client, so that a loss which
		// happened while it was away is still told.
		ClientID       string `json:"client_id,omitempty"`
		SeenGeneration string `json:"seen_generation,omitempty"`
		// SeenMessage is the highest Inbox.Newest that it showed: what is not newer does
		// not end a wait again.
		SeenMessage int64 `json:"seen_message,omitempty"`
	}
	// AttachResult describes the runtime.
	AttachResult struct {
		Runtime Runtime `json:"runtime"`
		// ClientID is set when AttachParams.ClientID was bound; BindError says why it was not.
		ClientID  string `json:"client_id,omitempty"`
		BindError string `json:"bind_error,omitempty"`
	}
	// Runtime is the block that init returns, and every answer in which something
	// of it is news to its connection.
	Runtime struct {
		ManagerVersion  string   `json:"manager_version"`
		BridgeVersion   string   `json:"bridge_version,omitempty"` // filled in by the front end
		ProtocolVersion int      `json:"protocol_version"`
		Generation      string   `json:"generation"`
		UpdatePending   bool     `json:"update_pending"`
		Capabilities    []string `json:"capabilities"`
		Instructions    string   `json:"instructions,omitempty"`
		Workspace       string   `json:"workspace"`
		Python          string   `json:"python,omitempty"`       // "3.13.0 (/ws/.mypr/venv/bin/python)"
		PlainReason     string   `json:"plain_reason,omitempty"` // why there is no IPython
	}

	// InitParams binds the connection to a logical client.
	InitParams struct {
		ClientID *string `json:"client_id"`
	}
	// InitResult is the payload of the init tool.
	InitResult struct {
		ClientID string  `json:"client_id"`
		Resumed  bool    `json:"resumed"` // the id existed before
		Inbox    *Inbox  `json:"inbox,omitempty"`
		Notice   *Notice `json:"notice,omitempty"`
		Runtime  Runtime `json:"runtime"`
	}

	// ExecuteParams submits a cell.
	ExecuteParams struct {
		Code      string  `json:"code"`
		WaitMS    *int64  `json:"wait_ms,omitempty"`
		RequestID *string `json:"request_id,omitempty"` // nil: never de-duplicated; "" is an id
		MaxBytes  *int64  `json:"max_bytes,omitempty"`
		// Generation, when set, must be the current one, else nothing is run.
		Generation string `json:"generation,omitempty"`
	}
	// PollParams reads an execution.
	PollParams struct {
		ExecID    string `json:"exec_id"`
		Cursor    *int64 `json:"cursor,omitempty"`
		WaitMS    *int64 `json:"wait_ms,omitempty"`
		MaxBytes  *int64 `json:"max_bytes,omitempty"`
		Interrupt bool   `json:"interrupt,omitempty"`
		// UntilDone: output alone does not end the wait (the CLI and agents that only
		// want the end).
		UntilDone bool `json:"until_done,omitempty"`
	}

	// ExecResult is the payload of the execute and poll tools.
	ExecResult struct {
		ExecID              string     `json:"exec_id"`
		ClientID            string     `json:"client_id"`
		ConnectionID        string     `json:"connection_id"`
		Generation          string     `json:"generation"`           // current
		ExecutionGeneration string     `json:"execution_generation"` // the cell's
		State               string     `json:"state"`
		Output              []Event    `json:"output"`
		Cursor              int64      `json:"cursor"` // events consumed so far; pass it to the next poll
		HasMore             bool       `json:"has_more"`
		Truncated           bool       `json:"truncated"` // output was dropped for good
		Error               *string    `json:"error"`
		ErrorTruncated      bool       `json:"error_truncated,omitempty"`
		ErrorInfo           *ErrorInfo `json:"error_info,omitempty"`
		Warnings            []Warning  `json:"warnings,omitempty"`
		WarningsTruncated   bool       `json:"warnings_truncated,omitempty"`
		Inbox               *Inbox     `json:"inbox,omitempty"`
		Runtime             *Runtime   `json:"runtime,omitempty"`
		Notice              *Notice    `json:"notice,omitempty"`
		Blocked             *Blocked   `json:"blocked,omitempty"`   // the loop does not turn
		Replayed            bool       `json:"replayed,omitempty"`  // request_id was known: nothing was run
		Interrupt           string     `json:"interrupt,omitempty"` // what poll(interrupt=true) did
		CreatedAt           float64    `json:"created_at"`          // Unix seconds
		StartedAt           float64    `json:"started_at,omitempty"`
		FinishedAt          float64    `json:"finished_at,omitempty"`
		ElapsedMS           int64      `json:"elapsed_ms"` // since start, or since submission while queued
		ClampedWaitMS       int64      `json:"clamped_wait_ms,omitempty"`
		QueueAhead          int        `json:"queue_ahead,omitempty"`
	}
	// Event is one entry of an execution's journal. Its index is its cursor.
	Event struct {
		Type      string     `json:"type"`             // stream, result, display, error, warning
		Stream    string     `json:"stream,omitempty"` // stdout, stderr
		Text      string     `json:"text"`
		Raw       bool       `json:"raw,omitempty"` // written to fd 1 or 2 behind Python's back
		Artifacts []Artifact `json:"artifacts,omitempty"`
		DisplayID string     `json:"display_id,omitempty"`
		Update    bool       `json:"update,omitempty"`    // replaces what was shown under display_id
		Code      string     `json:"code,omitempty"`      // of a warning
		Line      int64      `json:"line,omitempty"`      // of a damaged journal line
		Continues bool       `json:"continues,omitempty"` // not of streams: the text goes on where that of the event before ended
		Time      float64    `json:"time,omitempty"`      // Unix seconds
	}
	// Artifact is display data kept as a file.
	Artifact struct {
		Mime string `json:"mime"`
		Path string `json:"path"` // absolute
		Size int64  `json:"size"`
	}
	// Warning is about the answer or the storage, never about the cell's success.
	Warning struct {
		Code string `json:"code"`
		Text string `json:"text"`
	}
	// ErrorInfo says what kind of end a cell had.
	ErrorInfo struct {
		Code      string         `json:"code"` // python_exception, cancelled, lost
		Type      string         `json:"type,omitempty"`
		Message   string         `json:"message"`
		Truncated bool           `json:"truncated,omitempty"`
		Operation string         `json:"operation,omitempty"`
		Details   map[string]any `json:"details,omitempty"` // lost: cause, exit_code, signal, memory_max, memory_peak
	}
	// Notice is said once to each connection that a loss concerns.
	Notice struct {
		Kind          string `json:"kind"` // kernel_died, kernel_restarted, reset, restart, manager_restarted
		Text          string `json:"text"` // what ended, why, what is lost, what remains
		OldGeneration string `json:"old_generation,omitempty"`
		Generation    string `json:"generation"`
	}
	// Blocked names the cell that holds the event loop.
	Blocked struct {
		ExecID   string  `json:"exec_id"`
		ClientID string  `json:"client_id,omitempty"`
		Seconds  float64 `json:"seconds"`
		Where    string  `json:"where,omitempty"` // "cell line 3, in work" or "file.py:41, in f"
	}
	// Inbox is the preview of unacknowledged messages.
	Inbox struct {
		Unacked  int       `json:"unacked"`
		Messages []Preview `json:"messages"`
		HasMore  bool      `json:"has_more"`
		Newest   int64     `json:"newest,omitempty"` // id of the newest one, shown here or not
	}
	// Preview is one message of an inbox preview.
	Preview struct {
		ID        int64  `json:"id"`
		From      string `json:"from"`
		Text      string `json:"text"`
		ReplyTo   *int64 `json:"reply_to"`
		Truncated bool   `json:"truncated"`
	}
	// Progress is sent while a call of this connection waits.
	Progress struct {
		ExecID string `json:"exec_id"`
		// RequestID is that of the execute call that waits; "" for a poll.
		RequestID string  `json:"request_id,omitempty"`
		State     string  `json:"state"`
		Seconds   float64 `json:"seconds"`
		LastLine  string  `json:"last_line,omitempty"`
	}

	// Stopping says why the connection is about to end.
	Stopping struct {
		Kind   string `json:"kind"`             // stop, restart
		Reason string `json:"reason,omitempty"` // "stop requested from the command line"
	}

	// InterruptParams: an empty ExecID means the cell that blocks the loop, else the
	// only one that runs.
	InterruptParams struct {
		ExecID string `json:"exec_id,omitempty"`
	}
	// InterruptResult says what was done. Outcome: interrupted (KeyboardInterrupt was
	// raised in the blocking cell), cancelled (it awaited and was cancelled),
	// dequeued (it had not begun), pending (delivered, the cell has not ended yet),
	// finished (it had ended before).
	InterruptResult struct {
		ExecID  string `json:"exec_id"`
		Outcome string `json:"outcome"`
		State   string `json:"state"`
	}

	// StatusParams: Detail asks for connections and the cost of calls, and has the kernel
	// asked whether it is there.
	StatusParams struct {
		Detail bool `json:"detail,omitempty"`
		// AwaitKernel has a kernel started if there is none, and the answer wait until it
		// takes cells or cannot be had, which may take as long as to make an environment.
		AwaitKernel bool `json:"await_kernel,omitempty"`
	}
	// Status is the manager's view. The CLI adds what it knows (StatusReport).
	Status struct {
		Version            string       `json:"version"`
		ManagerVersion     string       `json:"manager_version"`
		ProtocolVersion    int          `json:"protocol_version"`
		Capabilities       []string     `json:"capabilities"`
		PID                int          `json:"pid"`
		PIDNamespace       string       `json:"pid_namespace"`
		WorkspaceID        string       `json:"workspace_id"`
		Workspace          string       `json:"workspace"`
		WorkspaceAvailable bool         `json:"workspace_available"`
		WorkspaceProblem   string       `json:"workspace_problem,omitempty"`
		Instance           string       `json:"instance"`
		Generation         string       `json:"generation"` // "" while there is no kernel
		Healthy            bool         `json:"healthy"`
		HealthError        string       `json:"health_error,omitempty"`
		Resetting          bool         `json:"resetting"`
		Restarting         string       `json:"restarting,omitempty"`
		Stopping           bool         `json:"stopping,omitempty"`
		StartedAt          time.Time    `json:"started_at"`
		Kernel             KernelStatus `json:"kernel"`
		ConnectionCount    int          `json:"connection_count"`
		ClientCount        int          `json:"client_count"`
		Connections        []Connection `json:"connections,omitempty"`
		Calls              []CallCost   `json:"calls,omitempty"` // with Detail
		Active             []string     `json:"active"`          // running
		Queued             []string     `json:"queued"`
		Environment        Origin       `json:"environment"`
		ConfigFiles        []string     `json:"config_files,omitempty"`
		Warnings           []string     `json:"warnings,omitempty"` // what nothing knows in config.toml and the unit files that the manager reads
		LastError          string       `json:"last_error,omitempty"`
	}
	// KernelStatus is what the manager knows of Python.
	KernelStatus struct {
		State        string   `json:"state"`            // none, preparing, starting, ready, blocked, unresponsive, down
		Detail       string   `json:"detail,omitempty"` // step of the preparation, or why it is down
		Python       string   `json:"python,omitempty"`
		Executable   string   `json:"executable,omitempty"`
		PID          int      `json:"pid,omitempty"`
		Mode         string   `json:"mode,omitempty"` // ipython, plain
		PlainReason  string   `json:"plain_reason,omitempty"`
		Blocked      *Blocked `json:"blocked,omitempty"`
		UnackedBytes int64    `json:"unacked_bytes,omitempty"`
	}
	// CallCost is what the calls of one method of the Python API cost this manager, from
	// reading the request to having written the answer: all that it did, waited and ran for
	// it, and nothing of Python's own time. The times are those of the last 512 calls.
	CallCost struct {
		Method string  `json:"method"`
		Count  int64   `json:"count"` // since the manager started
		P50MS  float64 `json:"p50_ms"`
		P99MS  float64 `json:"p99_ms"`
		MaxMS  float64 `json:"max_ms"`
	}
	// Connection is one attached connection.
	Connection struct {
		ConnectionID string    `json:"connection_id"`
		ClientID     *string   `json:"client_id"`
		Kind         string    `json:"kind"`
		Name         string    `json:"name,omitempty"`
		Version      string    `json:"version,omitempty"`
		ConnectedAt  time.Time `json:"connected_at"`
		LastActivity time.Time `json:"last_activity"`
		Active       []string  `json:"active"`
		TaskIDs      []string  `json:"task_ids"`
	}
	// Origin says where the runtime's environment came from.
	Origin struct {
		Source  string    `json:"source"` // "frontend", "cli", "systemd", …
		Program string    `json:"program,omitempty"`
		PID     int       `json:"pid,omitempty"`
		Time    time.Time `json:"time,omitzero"`
		Changed []string  `json:"changed,omitempty"` // names that config.toml set
	}

	// LogsParams: without Cursor the most recent Limit events; WaitMS waits for one.
	LogsParams struct {
		Limit    int    `json:"limit,omitempty"` // 1..200, default 20
		Cursor   *int64 `json:"cursor,omitempty"`
		WaitMS   int64  `json:"wait_ms,omitempty"`
		ClientID string `json:"client_id,omitempty"`
	}
	// LogsPage is ascending.
	LogsPage struct {
		Events  []LogEvent `json:"events"`
		Cursor  int64      `json:"cursor"`
		Dropped bool       `json:"dropped,omitempty"` // lines after the cursor of the request are no longer kept
	}
	// LogEvent is one line of the log.
	LogEvent struct {
		Seq          int64          `json:"seq"`
		Time         float64        `json:"time"`
		Event        string         `json:"event"` // queued running succeeded failed cancelled lost output connected initialized disconnected …
		Kind         string         `json:"kind"`  // execution python shell package connection runtime
		ID           string         `json:"id,omitempty"`
		ClientID     string         `json:"client_id,omitempty"`
		ConnectionID string         `json:"connection_id,omitempty"`
		ExecID       string         `json:"exec_id,omitempty"`
		State        string         `json:"state,omitempty"`
		Error        string         `json:"error,omitempty"`
		Data         map[string]any `json:"data,omitempty"`
	}

	// LifecycleParams of reset, stop and restart.
	LifecycleParams struct {
		Force bool `json:"force,omitempty"`
		// KeepKernel (restart): Python memory and running cells stay.
		KeepKernel bool `json:"keep_kernel,omitempty"`
		// Target (restart): the program to become.
		Target  string `json:"target,omitempty"`
		Version string `json:"version,omitempty"` // of Target
		// Reason is recorded and told to other connections: "stop requested from the command line".
		Reason string `json:"reason,omitempty"`
	}
	// ResetResult is the new session.
	ResetResult struct {
		Generation string `json:"generation"`
		Reset      bool   `json:"reset"`
	}
	// StopResult: the caller may now ask the supervisor to shut down.
	StopResult struct {
		Stopping  bool `json:"stopping"`
		Cancelled int  `json:"cancelled"` // executions that force ended
	}
	// RestartResult is the restart record.
	RestartResult struct {
		ID            string  `json:"id"`
		State         string  `json:"state"` // preparing stopping starting succeeded failed
		OldGeneration string  `json:"old_generation"`
		NewGeneration string  `json:"new_generation,omitempty"`
		OldVersion    string  `json:"old_version"`
		NewVersion    string  `json:"new_version,omitempty"`
		Target        string  `json:"target"`
		Force         bool    `json:"force"`
		KeepKernel    bool    `json:"keep_kernel"`
		Error         string  `json:"error,omitempty"`
		CreatedAt     float64 `json:"created_at"`
		UpdatedAt     float64 `json:"updated_at"`
	}

	// HistoryParams pages records, newest first.
	HistoryParams struct {
		ClientID string `json:"client_id,omitempty"`
		Limit    int    `json:"limit,omitempty"`
		Cursor   *int64 `json:"cursor,omitempty"`
	}
	// HistoryPage is one page.
	HistoryPage struct {
		Items      []Record `json:"items"`
		NextCursor *int64   `json:"next_cursor"`
	}
	// RecordParams names a record.
	RecordParams struct {
		ID string `json:"id"`
	}
	// Record is one entity: an execution, later a task, job or scan.
	Record struct {
		ID           string     `json:"id"`
		HistoryID    string     `json:"history_id"`        // of a Python task: names it across kernels; else the id
		Kind         string     `json:"kind"`              // execution, python, shell, package
		ExecID       string     `json:"exec_id,omitempty"` // the cell that started a task or job
		ClientID     string     `json:"client_id"`
		ConnectionID string     `json:"connection_id"`
		RequestID    *string    `json:"request_id,omitempty"`
		Generation   string     `json:"generation"`
		State        string     `json:"state"`
		Code         string     `json:"code,omitempty"`
		Error        string     `json:"error,omitempty"`
		ErrorInfo    *ErrorInfo `json:"error_info,omitempty"`
		Truncated    bool       `json:"truncated,omitempty"`
		OutputEvents int64      `json:"output_events"`
		OutputBytes  int64      `json:"output_bytes"`
		CreatedAt    float64    `json:"created_at"`
		StartedAt    float64    `json:"started_at,omitempty"`
		FinishedAt   float64    `json:"finished_at,omitempty"`
	}
)

// StatusReport is what `mypr-mcp status` prints: one struct for text and JSON.
type StatusReport struct {
	Workspace        string               `json:"workspace"`
	WorkspaceID      string               `json:"workspace_id,omitempty"`
	Healthy          bool                 `json:"healthy"`
	ManagerAvailable bool                 `json:"manager_available"`
	BridgeVersion    string               `json:"bridge_version"` // of the program that prints this
	UpdatePending    bool                 `json:"update_pending"`
	Problem          string               `json:"problem,omitempty"`
	Hint             string               `json:"hint,omitempty"`
	Socket           string               `json:"socket,omitempty"`
	Status           *Status              `json:"runtime,omitempty"`
	Supervisor       *control.Info        `json:"supervisor,omitempty"`
	RunsIn           string               `json:"runs_in,omitempty"`      // where the supervisor is, seen from here: "here", a container, ...
	PIDsForeign      bool                 `json:"pids_foreign,omitempty"` // every pid in this report is of another pid namespace
	Units            []control.UnitStatus `json:"units,omitempty"`
}
