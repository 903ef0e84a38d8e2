package supervisor

import (
	"time"

	"mypr/supervisor/control"
	"mypr/supervisor/process"
)

// State is the sub state of a unit, under systemd's names; it implies the active state.
type State string

// States. See the diagram in the package documentation.
const (
	Dead         State = "dead"
	StartPre     State = "start-pre"
	Start        State = "start"
	StartPost    State = "start-post"
	Running      State = "running"
	Exited       State = "exited"
	Reload       State = "reload"
	Stop         State = "stop"
	StopWatchdog State = "stop-watchdog"
	StopSigterm  State = "stop-sigterm"
	StopSigkill  State = "stop-sigkill"
	StopPost     State = "stop-post"
	FinalSigkill State = "final-sigkill"
	AutoRestart  State = "auto-restart"
	Failed       State = "failed"
	Listening    State = "listening"
	TargetActive State = "active"
)

// Active is the active state that s belongs to.
func (s State) Active() string {
	switch s {
	case Dead:
		return control.Inactive
	case StartPre, Start, StartPost, AutoRestart:
		return control.Activating
	case Running, Exited, Listening, TargetActive:
		return control.Active
	case Reload:
		return control.Reloading
	case Failed:
		return control.Failed
	}
	return control.Deactivating
}

// ended: no run, and none is coming by itself.
func (s State) ended() bool { return s == Dead || s == Failed }

// up: the unit does for others what it is there for.
func (s State) up() bool {
	a := s.Active()
	return a == control.Active || a == control.Reloading
}

// Results of a run.
const (
	resultSuccess    = "success"
	resultExitCode   = "exit-code"
	resultSignal     = "signal"
	resultCoreDump   = "core-dump"
	resultTimeout    = "timeout"
	resultWatchdog   = "watchdog"
	resultOOM        = "oom-kill"
	resultStartLimit = "start-limit-hit"
	resultResources  = "resources"
	resultProtocol   = "protocol"
	resultUnknown    = "unknown"
	resultDependency = "dependency"
)

// record is all of a unit that survives the supervisor: it is written to the state
// file at every change and is enough, with the unit's definition, to go on from.
type record struct {
	Name       string    `json:"name"`
	Transient  bool      `json:"transient,omitempty"`
	State      State     `json:"state"`
	Since      time.Time `json:"since"`
	Invocation string    `json:"invocation,omitempty"`
	Result     string    `json:"result"`
	StatusText string    `json:"status_text,omitempty"`
	Error      string    `json:"error,omitempty"`

	// Main and Control are the processes that run, or were about to be started (PID 0).
	Main    *procRecord `json:"main,omitempty"`
	Control *procRecord `json:"control,omitempty"`
	// Command is the index of the command that runs in this state's list.
	Command int        `json:"command,omitempty"`
	Box     *boxRecord `json:"box,omitempty"`
	// Lingering are boxes of earlier runs in which processes were left (KillMode=process, none).
	Lingering []*boxRecord `json:"lingering,omitempty"`

	Deadline   int64 `json:"deadline,omitempty"` // of the state; CLOCK_MONOTONIC, nanoseconds
	RuntimeEnd int64 `json:"runtime_end,omitempty"`
	WatchdogUS int64 `json:"watchdog_us,omitempty"`
	// Ready: READY=1 came, or the type needs none. Started: the run was up once.
	Ready   bool `json:"ready,omitempty"`
	Started bool `json:"started,omitempty"`

	StartedAt  time.Time    `json:"started_at,omitzero"`
	ExitedAt   time.Time    `json:"exited_at,omitzero"`
	MainEnded  bool         `json:"main_ended,omitempty"`
	Exit       process.Exit `json:"exit,omitzero"`
	Restarts   int          `json:"restarts,omitempty"` // automatic ones, since the last manual start
	Backoff    int          `json:"backoff,omitempty"`  // steps of delay; a stable run resets it
	AutoStarts []time.Time  `json:"auto_starts,omitempty"`
	NextStart  time.Time    `json:"next_start,omitzero"`
	// Job that is under way: start, stop, restart, reload.
	Job        jobKind  `json:"job,omitempty"`
	JobPhase   jobPhase `json:"job_phase,omitempty"`
	Adopted    bool     `json:"adopted,omitempty"`
	Frozen     bool     `json:"frozen,omitempty"`
	OOMKills   uint64   `json:"oom_kills,omitempty"`
	MemoryPeak uint64   `json:"memory_peak,omitempty"`
	CPU        uint64   `json:"cpu,omitempty"`
	Survivors  []string `json:"survivors,omitempty"`
}

type procRecord struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

type boxRecord struct {
	Cgroup string      `json:"cgroup,omitempty"` // name of the group in the tree
	Shim   *procRecord `json:"shim,omitempty"`
	Socket string      `json:"socket,omitempty"` // of the shim
}
