package jobs

import (
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/ospath"
	"mypr/supervisor/control"
)

// Causes of an end.
const (
	causeExit      = "exit"      // the first process returned ReturnCode
	causeSignal    = "signal"    // a signal ended it
	causeOOM       = "oom"       // the kernel killed it for want of memory
	causeTimeout   = "timeout"   // Timeout or Limits.Time ran out
	causeCancelled = "cancelled" // somebody cancelled it
	causeStart     = "start"     // it could not be started
	causeUnknown   = "unknown"   // the supervisor could not learn how it ended
)

// Status is everything known of a job, as Python sees it and as History keeps it. Times are Unix seconds. The environment is not part of it: it may hold secrets.
type Status struct {
	ID           string      `json:"id"`
	Kind         string      `json:"kind"` // shell, package
	State        string      `json:"state"`
	Command      Command     `json:"command"`
	Cwd          ospath.Text `json:"cwd"`
	ClientID     string      `json:"client_id"`
	ConnectionID string      `json:"connection_id"`
	ExecID       string      `json:"exec_id"`
	Generation   string      `json:"generation,omitempty"`
	PTY          bool        `json:"pty,omitempty"`
	Rows         int         `json:"rows,omitempty"`
	Cols         int         `json:"cols,omitempty"`
	Stdin        bool        `json:"stdin,omitempty"`  // write works
	Typing       bool        `json:"typing,omitempty"` // its input is on the way into its terminal
	Limits       *Limits     `json:"limits,omitempty"`
	Timeout      *float64    `json:"timeout,omitempty"`
	Invocation   string      `json:"invocation,omitempty"` // of the unit

	CreatedAt  float64 `json:"created_at"`
	FinishedAt float64 `json:"finished_at,omitempty"`
	PID        int     `json:"pid,omitempty"` // of the first process

	// ReturnCode is as Python has it: negative for a signal; nil while running and when it is not known.
	ReturnCode  *int    `json:"returncode"`
	TimedOut    bool    `json:"timed_out,omitempty"`
	Cause       string  `json:"cause,omitempty"`
	Signal      string  `json:"signal,omitempty"` // "SIGSEGV"
	CoreDump    bool    `json:"core_dump,omitempty"`
	Error       string  `json:"error,omitempty"` // one sentence for people
	Hint        string  `json:"hint,omitempty"`
	MemoryPeak  uint64  `json:"memory_peak,omitempty"` // bytes
	CPUSeconds  float64 `json:"cpu_seconds,omitempty"`
	CancelledBy string  `json:"cancelled_by,omitempty"` // why it was cancelled

	OutputBytes   int64         `json:"output_bytes"` // kept
	OutputDropped int64         `json:"output_dropped,omitempty"`
	OutputUnsaved int64         `json:"output_unsaved,omitempty"`
	Truncated     bool          `json:"truncated"` // output is missing
	Warnings      []api.Warning `json:"warnings,omitempty"`
}

func (s *Status) warn(code, text string) {
	for _, w := range s.Warnings {
		if w.Code == code {
			return
		}
	}
	s.Warnings = append(s.Warnings, api.Warning{Code: code, Text: text})
}

// conclude fills in how the job ended from how its unit did.
func (s *Status) conclude(u *control.UnitStatus, cancelled bool) {
	s.MemoryPeak, s.CPUSeconds = u.MemoryPeak, float64(u.CPUUsageUsec)/1e6
	s.CoreDump = u.CoreDump
	known := u.ExitKnown && !notExecuted(u)
	if known {
		code := u.ExitCode
		if u.ExitSignal != 0 {
			code = -u.ExitSignal
			s.Signal = unix.SignalName(syscall.Signal(u.ExitSignal))
		}
		s.ReturnCode = &code
	}
	if len(u.Survivors) > 0 {
		s.warn("survivors", "these processes could not be ended: "+strings.Join(u.Survivors, ", "))
	}
	switch {
	case cancelled:
		s.State, s.Cause = api.Cancelled, causeCancelled
		s.Error = s.CancelledBy
	case u.Result == "timeout":
		s.TimedOut, s.Cause = true, causeTimeout
		seconds, limit := (&startParams{Timeout: s.Timeout, Limits: s.limits()}).deadline()
		s.State = api.Cancelled
		s.Error = fmt.Sprintf("it was stopped after its timeout of %v s", seconds)
		if limit {
			s.State = api.FailedCell
			s.Error = fmt.Sprintf("it was stopped after its time limit of %v s", seconds)
		}
	case u.Result == "oom-kill", u.OOMKills > 0 && known && u.ExitSignal == int(unix.SIGKILL):
		s.State, s.Cause = api.FailedCell, causeOOM
		s.Error = "it was killed: out of memory"
		if u.MemoryMax > 0 {
			s.Error += fmt.Sprintf(" (limit %s, peak %s)", size(u.MemoryMax), size(u.MemoryPeak))
		}
	case u.Result == "resources", notExecuted(u):
		s.State, s.Cause = api.FailedCell, causeStart
		s.Error = "it could not be started: " + u.Error
	case !known:
		s.State, s.Cause = api.Lost, causeUnknown
		s.Error = "it ended, but how is not known: the supervisor was replaced meanwhile"
	case u.ExitSignal != 0:
		s.State, s.Cause = api.FailedCell, causeSignal
		s.Error = "it was killed by " + s.Signal
		if s.CoreDump {
			s.Error += " (core dumped)"
		}
	case u.ExitCode != 0:
		s.State, s.Cause = api.FailedCell, causeExit
		s.Error = fmt.Sprintf("it returned %d", u.ExitCode)
	default:
		s.State, s.Cause = api.Succeeded, causeExit
	}
}

func (s *Status) limits() Limits {
	if s.Limits == nil {
		return Limits{}
	}
	return *s.Limits
}

// size is for people.
func size(n uint64) string {
	v, unit := float64(n), "bytes"
	for _, u := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if v < 1024 {
			break
		}
		v, unit = v/1024, u
	}
	if unit == "bytes" {
		return fmt.Sprintf("%d bytes", n)
	}
	return fmt.Sprintf("%.1f %s", v, unit)
}
