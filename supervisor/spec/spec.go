// Package spec holds the supervisor's typed description of a unit: what a unit
// file means after parsing, and what a client sends to start a transient unit.
//
// It owns the types, their defaults and their validation. It does not read files
// (package units/unitfile does) and it starts nothing (package supervisor does).
// Field names are systemd's directive names; their meaning is systemd's unless the
// field's comment says otherwise (see systemd.service(5), systemd.exec(5),
// systemd.kill(5), systemd.resource-control(5) and systemd.socket(5)).
package spec

import "time"

// Unit is one parsed unit. Exactly one of Service and Socket is set; a Unit with
// neither is a target: it only groups others by Wants and Requires.
type Unit struct {
	// Name is the full unit name, with its suffix: "manager.service".
	Name string `json:"name"`

	Description   string   `json:"description,omitempty"`
	Documentation []string `json:"documentation,omitempty"`

	Requires  []string `json:"requires,omitempty"`
	Wants     []string `json:"wants,omitempty"`
	After     []string `json:"after,omitempty"`
	Before    []string `json:"before,omitempty"`
	PartOf    []string `json:"part_of,omitempty"`
	BindsTo   []string `json:"binds_to,omitempty"`
	Conflicts []string `json:"conflicts,omitempty"`
	OnFailure []string `json:"on_failure,omitempty"`

	// StartLimitBurst starts within StartLimitInterval end in the failed state with
	// result start-limit-hit. Unlike systemd, only automatic starts count: a manual
	// start clears the counter and always runs. An interval of 0 switches it off.
	StartLimitInterval time.Duration `json:"start_limit_interval,omitempty"`
	StartLimitBurst    int           `json:"start_limit_burst,omitempty"`

	// CollectMode "inactive-or-failed" unloads a transient unit as soon as it has
	// ended and its file descriptors were released; "inactive" (the default) keeps
	// a failed one until it is released or reset.
	CollectMode string `json:"collect_mode,omitempty"`

	// WantedBy lists the targets that pull this unit in ([Install]).
	WantedBy []string `json:"wanted_by,omitempty"`

	// Source lists the files that this unit was read from, in the order applied.
	// Empty for a transient unit.
	Source []string `json:"source,omitempty"`

	// Raw, of a transient unit, has what of it is not UTF-8.
	Raw *Raw `json:"raw,omitempty"`

	Service *Service `json:"service,omitempty"`
	Socket  *Socket  `json:"socket,omitempty"`
}

// Command is one command line of an Exec directive, already split into words and
// with specifiers resolved. Environment variables ($NAME, ${NAME}) in Args are still
// to be expanded by the supervisor unless NoExpand is set.
type Command struct {
	Path string   `json:"path"`
	Args []string `json:"args"` // Args[0] is argv[0]; "@" in a unit file sets it apart from Path
	// IgnoreFailure ("-"): a failure is recorded but counts as success.
	IgnoreFailure bool `json:"ignore_failure,omitempty"`
	// NoExpand (":"): no environment variable expansion.
	NoExpand bool `json:"no_expand,omitempty"`
}

// Service types.
const (
	TypeSimple  = "simple"
	TypeExec    = "exec"
	TypeNotify  = "notify"
	TypeOneshot = "oneshot"
)

// Restart policies.
const (
	RestartNo         = "no"
	RestartOnSuccess  = "on-success"
	RestartOnFailure  = "on-failure"
	RestartOnAbnormal = "on-abnormal"
	RestartOnWatchdog = "on-watchdog"
	RestartOnAbort    = "on-abort"
	RestartAlways     = "always"
)

// Kill modes.
const (
	KillControlGroup = "control-group"
	KillMixed        = "mixed"
	KillProcess      = "process"
	KillNone         = "none"
)

// Stdio modes. "fd:NAME" takes the descriptor that the start request passed under
// NAME. "pipe" and "pty" are made by the supervisor: the other end is returned to
// the client that started the unit and a duplicate is kept until the unit is
// released. "append:PATH", "truncate:PATH" and "file:PATH" are systemd's.
const (
	StdioNull    = "null"
	StdioInherit = "inherit"
	StdioPipe    = "pipe"
	StdioPTY     = "pty" // all three streams of a unit, or none
	StdioJournal = "journal"
)

// Service is the [Service] section. A zero duration means "not set" where the
// comment names a default, and "infinity" is Infinity.
type Service struct {
	Type            string    `json:"type,omitempty"` // default simple
	ExecStartPre    []Command `json:"exec_start_pre,omitempty"`
	ExecStart       []Command `json:"exec_start,omitempty"` // more than one only with oneshot
	ExecStartPost   []Command `json:"exec_start_post,omitempty"`
	ExecReload      []Command `json:"exec_reload,omitempty"`
	ExecStop        []Command `json:"exec_stop,omitempty"`
	ExecStopPost    []Command `json:"exec_stop_post,omitempty"`
	RemainAfterExit bool      `json:"remain_after_exit,omitempty"`
	// ExitType "cgroup": the run lasts until no process of the unit is left; "main" (the
	// default): until the main process ends, and what is left is then stopped. The exit
	// status is the main process's in both cases.
	ExitType     string `json:"exit_type,omitempty"`
	NotifyAccess string `json:"notify_access,omitempty"` // none, main, exec, all; default main for notify and wherever WatchdogSec is set

	Restart                  string        `json:"restart,omitempty"`
	RestartSec               time.Duration `json:"restart_sec,omitempty"`                // default 100ms
	RestartSteps             int           `json:"restart_steps,omitempty"`              // steps from RestartSec to RestartMaxDelaySec
	RestartMaxDelaySec       time.Duration `json:"restart_max_delay_sec,omitempty"`      // Infinity: no growth
	RestartResetSec          time.Duration `json:"restart_reset_sec,omitempty"`          // ours (X-RestartResetSec=): a run at least this long resets the back-off; default 10s
	SuccessExitStatus        ExitStatusSet `json:"success_exit_status,omitzero"`         //
	RestartPreventExitStatus ExitStatusSet `json:"restart_prevent_exit_status,omitzero"` //
	RestartForceExitStatus   ExitStatusSet `json:"restart_force_exit_status,omitzero"`   //

	TimeoutStartSec time.Duration `json:"timeout_start_sec,omitempty"` // default 90s; oneshot: Infinity
	TimeoutStopSec  time.Duration `json:"timeout_stop_sec,omitempty"`  // default 90s
	TimeoutAbortSec time.Duration `json:"timeout_abort_sec,omitempty"` // default TimeoutStopSec
	RuntimeMaxSec   time.Duration `json:"runtime_max_sec,omitempty"`   // default Infinity
	WatchdogSec     time.Duration `json:"watchdog_sec,omitempty"`      // 0: none

	KillMode        string `json:"kill_mode,omitempty"`         // default control-group
	KillSignal      int    `json:"kill_signal,omitempty"`       // default SIGTERM
	FinalKillSignal int    `json:"final_kill_signal,omitempty"` // default SIGKILL
	WatchdogSignal  int    `json:"watchdog_signal,omitempty"`   // default SIGABRT
	ReloadSignal    int    `json:"reload_signal,omitempty"`     // default SIGHUP, for units without ExecReload that ask for it
	SendSIGHUP      bool   `json:"send_sighup,omitempty"`
	NoSendSIGKILL   bool   `json:"no_send_sigkill,omitempty"` // SendSIGKILL=no

	Sockets                []string `json:"sockets,omitempty"` // socket units whose fds this service gets; besides those with Service= naming it
	FileDescriptorStoreMax int      `json:"file_descriptor_store_max,omitempty"`

	WorkingDirectory         string   `json:"working_directory,omitempty"`
	WorkingDirectoryOptional bool     `json:"working_directory_optional,omitempty"` // "-" prefix
	User                     string   `json:"user,omitempty"`
	Group                    string   `json:"group,omitempty"`
	UMask                    *uint32  `json:"umask,omitempty"`
	Environment              []string `json:"environment,omitempty"`       // NAME=VALUE, later wins
	EnvironmentFile          []string `json:"environment_file,omitempty"`  // "-" prefix: may be absent; read at each start
	PassEnvironment          []string `json:"pass_environment,omitempty"`  // names taken from the supervisor's own environment
	UnsetEnvironment         []string `json:"unset_environment,omitempty"` // NAME or NAME=VALUE
	// ExactEnvironment: the process gets Environment and nothing else but what the
	// service protocol itself sets. For transient units whose caller resolved it all.
	ExactEnvironment bool `json:"exact_environment,omitempty"`
	// EnvironmentFD names a descriptor that came with a transient unit: a file with more
	// of Environment, NAME=VALUE strings of any bytes with NUL bytes between. It is read once:
	// for a unit with one command, which is started once.
	EnvironmentFD string `json:"environment_fd,omitempty"`

	StandardInput  string `json:"standard_input,omitempty"`  // default null
	StandardOutput string `json:"standard_output,omitempty"` // default inherit
	StandardError  string `json:"standard_error,omitempty"`  // default: what StandardOutput is
	TTYRows        uint16 `json:"tty_rows,omitempty"`
	TTYColumns     uint16 `json:"tty_columns,omitempty"`

	LimitNOFILE    *Rlimit `json:"limit_nofile,omitempty"`
	LimitNPROC     *Rlimit `json:"limit_nproc,omitempty"`
	LimitCORE      *Rlimit `json:"limit_core,omitempty"`
	LimitAS        *Rlimit `json:"limit_as,omitempty"`
	LimitCPU       *Rlimit `json:"limit_cpu,omitempty"`
	LimitFSIZE     *Rlimit `json:"limit_fsize,omitempty"`
	Nice           *int    `json:"nice,omitempty"`
	OOMScoreAdjust *int    `json:"oom_score_adjust,omitempty"`
	// TimerSlack is how much later than asked for a timer may wake the process, so that it
	// wakes together with others (prctl(2), PR_SET_TIMERSLACK). Default 50 µs, which is the
	// kernel's; systemd's default is its own.
	TimerSlack time.Duration `json:"timer_slack,omitempty"`

	MemoryMax     uint64 `json:"memory_max,omitempty"`      // bytes; 0: not set
	MemoryHigh    uint64 `json:"memory_high,omitempty"`     // bytes
	MemorySwapMax uint64 `json:"memory_swap_max,omitempty"` // bytes
	CPUQuota      uint64 `json:"cpu_quota,omitempty"`       // microseconds of CPU per second of time: 1500000 is 150%
	CPUWeight     uint64 `json:"cpu_weight,omitempty"`      // 1..10000
	TasksMax      uint64 `json:"tasks_max,omitempty"`
	OOMPolicy     string `json:"oom_policy,omitempty"` // continue, stop, kill; default stop
	Delegate      bool   `json:"delegate,omitempty"`
}

// ExitStatusSet is a set of exit codes and signal numbers.
type ExitStatusSet struct {
	Codes   []int `json:"codes,omitempty"`
	Signals []int `json:"signals,omitempty"`
}

// IsZero reports whether the set is empty (for json omitzero).
func (s ExitStatusSet) IsZero() bool { return len(s.Codes) == 0 && len(s.Signals) == 0 }

// Rlimit is a soft and a hard limit; RlimInfinity means none.
type Rlimit struct {
	Soft uint64 `json:"soft"`
	Hard uint64 `json:"hard"`
}

// RlimInfinity is RLIM_INFINITY.
const RlimInfinity = ^uint64(0)

// Infinity is the duration that "infinity" parses to.
const Infinity = time.Duration(1<<63 - 1)

// Socket is the [Socket] section. Only stream sockets of the Unix family and of
// loopback addresses are supported.
type Socket struct {
	ListenStream       []string `json:"listen_stream"` // absolute path, or loopback "host:port"
	FileDescriptorName string   `json:"file_descriptor_name,omitempty"`
	Service            string   `json:"service,omitempty"`        // default: same name with .service
	SocketMode         uint32   `json:"socket_mode,omitempty"`    // default 0600 (systemd: 0666)
	DirectoryMode      uint32   `json:"directory_mode,omitempty"` // default 0700 (systemd: 0755)
	Backlog            int      `json:"backlog,omitempty"`        // default 4096 (SOMAXCONN)
	RemoveOnStop       bool     `json:"remove_on_stop,omitempty"`
	// PassOnly: never start the service because of a connection; only hand the fd on.
	PassOnly bool `json:"pass_only,omitempty"`
}
