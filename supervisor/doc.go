// Package supervisor runs units: it starts, watches, limits, stops and restarts
// processes, holds listening sockets and file descriptors for them, and answers the
// control socket. It knows nothing of what the units do.
//
// It owns every unit's state, its processes (through pidfds), its cgroup or shim, its
// sockets and kept descriptors, and the state file that lets a next supervisor adopt
// all of it. It does not read unit files (Options.Load does) and does not decide which
// units there are.
//
// # One goroutine
//
// All of that is owned by one goroutine, the loop in Run. Everything else (the poller
// of descriptors, timers, the notify and control sockets, signals) only posts functions
// to its queue. After each batch the loop writes the changed units to the state file,
// and only then answers and announces what depends on them.
//
// # States of a service
//
//	              start                      all ExecStartPre done          READY=1 / exec done / oneshot exits
//	inactive/dead ─────▶ activating/start-pre ─────▶ activating/start ─────▶ activating/start-post
//	     ▲                       │ fails                   │ fails, timeout           │ all ExecStartPost done
//	     │                       ▼                         ▼                          ▼
//	     │          ┌─ deactivating/stop-sigterm ◀── deactivating/stop ◀──── active/running ◀─▶ reloading/reload
//	     │          │ TimeoutStopSec    ▲             (ExecStop)   stop, main       │
//	     │          ▼                   │                          process ends     │ oneshot, RemainAfterExit
//	     │   deactivating/stop-sigkill  │ main ends                                 ▼
//	     │          │                   └── deactivating/stop-watchdog ◀────── active/exited
//	     │          ▼ nothing is left        (watchdog missed)
//	     │   deactivating/stop-post ─▶ deactivating/final-sigkill
//	     │          (ExecStopPost)          │ nothing is left
//	     └──────────────────────────────────┼──▶ failed/failed
//	                                        └──▶ activating/auto-restart ─▶ (start)
//
// States without commands to run are passed over. A socket is dead, listening (its
// service does not run), running, or failed; a target dead or active. (*unit).enter is
// the only place that changes a state.
package supervisor
