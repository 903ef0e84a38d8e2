// Package control is the supervisor's control interface: the requests that it
// answers on its control socket, their types, and a typed client.
//
// It owns the names and shapes of the protocol (docs/PROTOCOL.md, "Control
// socket"). It does not own units: the server side hands each request to an
// implementation of Supervisor. Messages travel as package internal/rpc frames.
package control

import (
	"time"

	"mypr/supervisor/spec"
)

// Methods of the control socket.
const (
	MethodInfo           = "info"            // nil -> Info
	MethodList           = "list"            // ListParams -> []UnitStatus
	MethodShow           = "show"            // UnitParams -> UnitDetail
	MethodStart          = "start"           // JobParams -> JobResult
	MethodStop           = "stop"            // JobParams -> JobResult
	MethodRestart        = "restart"         // JobParams -> JobResult
	MethodReload         = "reload"          // JobParams -> JobResult
	MethodKill           = "kill"            // KillParams -> nil
	MethodResetFailed    = "reset-failed"    // UnitParams -> nil
	MethodFreeze         = "freeze"          // UnitParams -> nil
	MethodThaw           = "thaw"            // UnitParams -> nil
	MethodStartTransient = "start-transient" // TransientParams (+fds) -> TransientResult (+fds)
	MethodAttach         = "attach"          // UnitParams -> TransientResult (+fds): duplicates of the kept fds again
	MethodRelease        = "release"         // ReleaseParams -> nil: drop the kept fds; unload an ended transient unit
	MethodResizeTTY      = "resize-tty"      // ResizeParams -> nil
	MethodSubscribe      = "subscribe"       // SubscribeParams -> []UnitStatus; then notifications "unit" (UnitEvent)
	MethodWait           = "wait"            // WaitParams -> UnitStatus, when the unit is inactive or failed
	MethodDaemonReload   = "daemon-reload"   // nil -> nil: read the unit files again
	MethodReexec         = "reexec"          // ReexecParams -> error, or the connection ends: replace the program in place
	MethodShutdown       = "shutdown"        // ShutdownParams -> nil: stop every unit, then exit

	NotificationUnit = "unit"
)

// Active states. A unit is in exactly one of them.
const (
	Inactive     = "inactive"
	Activating   = "activating"
	Active       = "active"
	Reloading    = "reloading"
	Deactivating = "deactivating"
	Failed       = "failed"
)

// Info describes the supervisor itself.
type Info struct {
	Version      string    `json:"version"`
	Protocol     int       `json:"protocol"`
	Instance     string    `json:"instance"` // random, 32 hex digits; kept over re-execution and adoption
	PID          int       `json:"pid"`
	PIDNamespace string    `json:"pid_namespace"` // inode number of /proc/self/ns/pid
	Started      time.Time `json:"started"`
	Executable   string    `json:"executable"`
	// Tier is the containment tier: 1 cgroup v2 with controllers, 2 without, 3 subreaper shim.
	Tier         int               `json:"tier"`
	TierReason   string            `json:"tier_reason"` // why not a better one
	Controllers  []string          `json:"controllers,omitempty"`
	Cgroup       string            `json:"cgroup,omitempty"`
	Mode         string            `json:"mode"` // standalone, systemd, init
	ShuttingDown bool              `json:"shutting_down,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"` // what the program that embeds the supervisor wants shown
}

// UnitStatus is one line of list and the body of every state-change event.
type UnitStatus struct {
	Name         string    `json:"name"`
	Description  string    `json:"description,omitempty"`
	ActiveState  string    `json:"active_state"`
	SubState     string    `json:"sub_state"`
	Result       string    `json:"result"` // success, exit-code, signal, core-dump, timeout, watchdog, oom-kill, start-limit-hit, resources, protocol, unknown
	StatusText   string    `json:"status_text,omitempty"`
	Error        string    `json:"error,omitempty"` // last error, for people
	InvocationID string    `json:"invocation_id,omitempty"`
	MainPID      int       `json:"main_pid,omitempty"`
	Since        time.Time `json:"since"` // of the active state
	StartedAt    time.Time `json:"started_at,omitzero"`
	ExitedAt     time.Time `json:"exited_at,omitzero"`
	// ExitKnown is false when the main process ended but its status could not be
	// learned (adopted after a supervisor crash on an old kernel).
	ExitKnown     bool      `json:"exit_known,omitempty"`
	ExitCode      int       `json:"exit_code"`             // valid when ExitKnown and Signal is 0
	ExitSignal    int       `json:"exit_signal,omitempty"` // number of the signal that ended the main process
	CoreDump      bool      `json:"core_dump,omitempty"`
	Restarts      int       `json:"restarts"`
	NextStart     time.Time `json:"next_start,omitzero"`    // when auto-restart waits
	StartQueued   bool      `json:"start_queued,omitempty"` // a start, or that of a restart, comes next: however the last run ended
	Transient     bool      `json:"transient,omitempty"`
	Adopted       bool      `json:"adopted,omitempty"`
	Frozen        bool      `json:"frozen,omitempty"`
	Containment   string    `json:"containment,omitempty"` // "cgroup", "shim"
	Cgroup        string    `json:"cgroup,omitempty"`
	Processes     int       `json:"processes"`
	MemoryCurrent uint64    `json:"memory_current,omitempty"` // bytes: memory.current, else the sum of the processes' RSS
	MemoryPeak    uint64    `json:"memory_peak,omitempty"`
	MemoryMax     uint64    `json:"memory_max,omitempty"`
	CPUUsageUsec  uint64    `json:"cpu_usage_usec,omitempty"`
	OOMKills      uint64    `json:"oom_kills,omitempty"`
	Survivors     []string  `json:"survivors,omitempty"` // "pid 123 (name)" of what would not die
	FDNames       []string  `json:"fd_names,omitempty"`  // kept fds
}

// UnitDetail is the answer to show.
type UnitDetail struct {
	UnitStatus
	Spec     *spec.Unit `json:"spec"`
	Warnings []string   `json:"warnings,omitempty"` // file:line: text
	PIDs     []int      `json:"pids,omitempty"`
}

// UnitEvent is the notification "unit": a state change, or a unit that was unloaded.
type UnitEvent struct {
	UnitStatus
	Previous string `json:"previous"` // "active/running"
	Reason   string `json:"reason"`
	Removed  bool   `json:"removed,omitempty"`
}

type (
	// ListParams filters list. Usage asks for memory and cpu, which costs file reads.
	ListParams struct {
		Usage bool `json:"usage,omitempty"`
	}
	// UnitParams names one unit.
	UnitParams struct {
		Name string `json:"name"`
	}
	// ReleaseParams names what is given back. With FDNames only those kept descriptors
	// are closed and the unit stays: closing the kept end of a stdin pipe is what lets
	// the unit see end of file once the client has closed its own. Names are more units,
	// which are given back as a whole.
	ReleaseParams struct {
		Name    string   `json:"name"`
		FDNames []string `json:"fd_names,omitempty"`
		Names   []string `json:"names,omitempty"`
	}
	// JobParams asks for a start, stop, restart or reload. The answer comes when the
	// job has ended (started, stopped, failed, replaced by a newer job), or at once
	// with NoWait.
	JobParams struct {
		Name   string `json:"name"`
		NoWait bool   `json:"no_wait,omitempty"`
	}
	// JobResult is how a job ended: done, failed, cancelled (a newer job replaced it), timeout.
	JobResult struct {
		Result string     `json:"result"`
		Unit   UnitStatus `json:"unit"`
	}
	// KillParams sends a signal. Who is main (default), control (helpers) or all.
	KillParams struct {
		Name   string `json:"name"`
		Signal int    `json:"signal"`
		Who    string `json:"who,omitempty"`
	}
	// TransientParams defines a unit that exists only in the supervisor and starts
	// it. FDNames name the descriptors passed with the request, in order: a name that
	// a Standard…=fd:NAME refers to becomes that stream, every other one is passed in
	// LISTEN_FDS. An inactive or failed transient unit of the same name is replaced;
	// for a name with a unit file, Unit stands in place of the file until released.
	// With Wait the answer comes when the run has ended, with its last status: one round
	// trip for a command whose streams the client passes itself. WaitMS bounds that: so
	// many milliseconds after the start the answer says that the unit is active.
	//
	// Keep names passed descriptors that are not for the unit: they are kept for attach,
	// as are the client's ends of pipes that the supervisor makes.
	TransientParams struct {
		Unit    *spec.Unit `json:"unit"`
		FDNames []string   `json:"fd_names,omitempty"`
		Keep    []string   `json:"keep,omitempty"`
		NoWait  bool       `json:"no_wait,omitempty"`
		Wait    bool       `json:"wait,omitempty"`
		WaitMS  int        `json:"wait_ms,omitempty"`
	}
	// TransientResult comes with the client's ends of the pipes or the pty master,
	// named in FDNames: stdin, stdout, stderr, pty.
	TransientResult struct {
		JobResult
		FDNames []string `json:"fd_names,omitempty"`
	}
	// ResizeParams sets the window size of a unit's pty.
	ResizeParams struct {
		Name string `json:"name"`
		Rows uint16 `json:"rows"`
		Cols uint16 `json:"cols"`
	}
	// SubscribeParams selects units by name; none means all.
	SubscribeParams struct {
		Names []string `json:"names,omitempty"`
	}
	// WaitParams waits for the end of a unit's run. InvocationID, when set, makes the
	// answer immediate if another run has begun since.
	WaitParams struct {
		Name         string `json:"name"`
		InvocationID string `json:"invocation_id,omitempty"`
	}
	// ReexecParams names the program to become; empty means the one it runs now.
	ReexecParams struct {
		Executable string `json:"executable,omitempty"`
	}
	// ShutdownParams stops everything. Reason is logged and shown.
	ShutdownParams struct {
		Reason string `json:"reason,omitempty"`
	}
)
