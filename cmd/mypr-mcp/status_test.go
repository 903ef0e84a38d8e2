package main

import (
	"strings"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/supervisor/control"
)

var testNow = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func TestStatusText(t *testing.T) {
	r := &api.StatusReport{
		Workspace: "/ws", WorkspaceID: "1:2", ManagerAvailable: true, BridgeVersion: "v2", UpdatePending: true,
		Status: &api.Status{
			ManagerVersion: "v1", Generation: "abcd", HealthError: "disk full", LastError: "disk full", Active: []string{"a"}, ClientCount: 1, ConnectionCount: 2,
			Kernel: api.KernelStatus{
				State: "blocked", Python: "3.13.0", Mode: "plain", PlainReason: "no network",
				Blocked: &api.Blocked{ExecID: "e1", Seconds: 12.34, Where: "cell line 3, in work"},
			},
			Environment: api.Origin{Source: "frontend", Program: "/usr/bin/client"}, Warnings: []string{"f:2:1: unknown key limit, ignored"},
		},
		Problem:    "disk full",
		Supervisor: &control.Info{PID: 7, Mode: "standalone", Tier: 2, TierReason: "no controllers", Started: testNow.Add(-90 * time.Second)},
		Units: []control.UnitStatus{
			{Name: "kernel.service", ActiveState: control.Active, SubState: "running", MainPID: 9, MemoryCurrent: 17 << 20, Since: testNow.Add(-3 * time.Second), Containment: "cgroup"},
			{Name: "manager.service", ActiveState: control.Failed, SubState: "failed", Result: "start-limit-hit", Restarts: 12, Error: "exit\nstatus 1", Survivors: []string{"pid 3 (x)"}},
		},
	}
	var b strings.Builder
	if err := statusText(&b, r, false, testNow); err != nil {
		t.Fatal(err)
	}
	want := `workspace   /ws (1:2)
state       not healthy
problem     disk full
kernel      blocked, Python 3.13.0, plain
            no IPython: no network
            blocked for 12.3s by e1 at cell line 3, in work (mypr-mcp interrupt)
generation  abcd
cells       1 running, 0 queued
clients     1 bound, 2 connected
environment from frontend, started by /usr/bin/client
warning     f:2:1: unknown key limit, ignored
version     v1 (this program is v2; mypr-mcp restart replaces the running one)
supervisor  pid 7, standalone, up 1m30s, tier 2: no controllers

UNIT             STATE           PID  MEMORY  UPTIME  RESTARTS  TIER  LAST ERROR
kernel.service   active/running  9    17 MiB  3s      0         2     
manager.service  failed/failed   -    -       -       12        -     exit status 1 still alive: pid 3 (x)
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	if err := statusText(&b, r, true, testNow); err != nil || !strings.Contains(b.String(), "\x1b[31mdisk full\x1b[0m") {
		t.Errorf("no colour: %q, %v", b.String(), err)
	}
}

func TestQuantities(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 90 * time.Millisecond: "100ms", 3200 * time.Millisecond: "3.2s", 312 * time.Second: "5m12s",
		2*time.Hour + 3*time.Minute: "2h3m", 98 * time.Hour: "4d2h",
	} {
		if got := ago(d); got != want {
			t.Errorf("ago(%v) = %q, want %q", d, got, want)
		}
	}
	for n, want := range map[uint64]string{0: "-", 1: "1 KiB", 17 << 20: "17 MiB", 20 << 30: "20.0 GiB"} {
		if got := size(n); got != want {
			t.Errorf("size(%d) = %q, want %q", n, got, want)
		}
	}
}

// What holds the loop may be no cell: an import at the start, on a slow machine.
func TestStatusTextOfAKernelThatBlocksItself(t *testing.T) {
	r := &api.StatusReport{Workspace: "/ws", ManagerAvailable: true, Healthy: true, Status: &api.Status{
		Kernel: api.KernelStatus{State: "blocked", Python: "3.13.0", Mode: "plain", Blocked: &api.Blocked{Seconds: 2, Where: "base_events.py:21"}}}}
	var b strings.Builder
	if err := statusText(&b, r, false, testNow); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "blocked, Python 3.13.0, plain until IPython is loaded\n") || !strings.Contains(b.String(), "blocked for 2s by work of its own at base_events.py:21\n") {
		t.Error(b.String())
	}
}
