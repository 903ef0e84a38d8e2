package supervisor

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

// wantsRestart applies Restart= and the exit status sets to the run that has ended.
func (u *unit) wantsRestart() bool {
	sv := u.def.Service
	if u.s.shutting || u.job != nil && u.job.phase != jobStarting && (u.job.kind == jobStop || u.job.kind == jobRestart) {
		return false
	}
	if u.MainEnded && u.Exit.Known {
		if inSet(sv.RestartPreventExitStatus, u.Exit) {
			return false
		}
		if inSet(sv.RestartForceExitStatus, u.Exit) {
			return true
		}
	}
	switch sv.Restart {
	case spec.RestartAlways:
		return true
	case spec.RestartOnSuccess:
		return u.Result == resultSuccess
	case spec.RestartOnFailure:
		return u.Result != resultSuccess
	case spec.RestartOnAbnormal:
		return u.Result != resultSuccess && u.Result != resultExitCode
	case spec.RestartOnAbort:
		return u.Result == resultSignal || u.Result == resultCoreDump || u.Result == resultOOM
	case spec.RestartOnWatchdog:
		return u.Result == resultWatchdog
	}
	return false
}

func inSet(set spec.ExitStatusSet, e process.Exit) bool {
	if e.Signal != 0 {
		return slices.Contains(set.Signals, e.Signal)
	}
	return slices.Contains(set.Codes, e.Code)
}

// scheduleRestart waits for the back-off and starts again, or gives up at the limit.
func (u *unit) scheduleRestart(why string) {
	sv := u.def.Service
	if !u.StartedAt.IsZero() && time.Since(u.StartedAt) >= cmp.Or(sv.RestartResetSec, defaultReset) {
		u.Backoff = 0
	}
	if u.atLimit() {
		u.limitHit()
		return
	}
	delay := backoff(sv, u.Backoff)
	u.Backoff++
	u.NextStart = time.Now().Add(delay)
	u.enter(AutoRestart, why)
	u.armRestart(delay)
}

func (u *unit) armRestart(delay time.Duration) {
	u.restart.stop()
	u.restart = u.s.afterFunc(delay, func() {
		if u.State == AutoRestart {
			u.s.startJob(u, true, "automatic restart", nil)
		}
	})
}

// backoff grows the delay exponentially from RestartSec to RestartMaxDelaySec in
// RestartSteps. Up to a tenth is added at random once it grows, so that units that
// fell together do not get up together.
func backoff(sv *spec.Service, n int) time.Duration {
	low := cmp.Or(sv.RestartSec, defaultRestartSec)
	high := sv.RestartMaxDelaySec
	if sv.RestartSteps <= 0 || high <= low || high == spec.Infinity || n == 0 {
		return low
	}
	n = min(n, sv.RestartSteps)
	d := float64(low) * math.Pow(float64(high)/float64(low), float64(n)/float64(sv.RestartSteps))
	return time.Duration(d * (1 + rand.Float64()/10))
}

// atLimit reports whether one more automatic start would be over StartLimitBurst=.
func (u *unit) atLimit() bool {
	interval, burst := u.def.StartLimitInterval, u.def.StartLimitBurst
	if interval <= 0 || burst <= 0 {
		return false
	}
	return u.autoStarts(interval) >= burst
}

// autoStarts counts the automatic starts of the last interval and forgets older ones.
func (u *unit) autoStarts(interval time.Duration) int {
	since := time.Now().Add(-interval)
	u.AutoStarts = slices.DeleteFunc(u.AutoStarts, func(t time.Time) bool { return interval != spec.Infinity && t.Before(since) })
	return len(u.AutoStarts)
}

// limitHit ends in failed; only a manual start or reset-failed goes on from there.
func (u *unit) limitHit() {
	last := ""
	if u.Error != "" {
		last = "; the last time: " + u.Error
	}
	u.Error = fmt.Sprintf("%d automatic starts within %v were too many%s", len(u.AutoStarts), u.def.StartLimitInterval, last)
	u.Result = resultStartLimit
	u.enter(Failed, "start limit hit")
	u.dropFDs()
}

// clearLimit is what a manual start and reset-failed do.
func (u *unit) clearLimit() {
	u.AutoStarts, u.Backoff, u.Restarts = nil, 0, 0
}
