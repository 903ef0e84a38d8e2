package workspace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
)

// Location is a runtime that answered and is this workspace's.
type Location struct {
	Workspace *Workspace
	Paths     // where it listens, which need not be where this process would have put it
	Instance  string
	// Supervisor is nil when only the manager answers: its supervisor died and is not
	// back yet, or hangs.
	Supervisor *control.Info
	// Silent is a supervisor that takes connections but does not answer.
	Silent *Silent
	// Started: this call started it.
	Started bool
}

// Silent is a supervisor that hangs: stopped by a signal or a debugger, or worse.
type Silent struct {
	Control string // its socket
	PID     int    // 0 when it is in a pid namespace that is not visible from here
}

// Unwrap gives the error its shape on the wire.
func (e *Silent) Unwrap() error {
	who := "the supervisor"
	if e.PID != 0 {
		who += fmt.Sprintf(" (process %d)", e.PID)
	}
	return rpc.Errorf(rpc.CodeUnavailable, "%s takes connections at %s but does not answer: it was stopped by a signal, or hangs", who, e.Control).
		WithHint("mypr-mcp stop --force kills it and ends the session; a supervisor that was killed is started again and takes over what runs")
}

func (e *Silent) Error() string { return e.Unwrap().Error() }

// NotRunning is the error of Discover when the workspace has no runtime.
type NotRunning struct {
	Dir string
	// Owner is the container, not this one, whose runtime the workspace's last one was
	// (Runtime.owner); "": nobody's, whoever needs a runtime may start it here.
	Owner string
}

func (e *NotRunning) Error() string { return e.Unwrap().Error() }

// Unwrap gives the error its shape on the wire.
func (e *NotRunning) Unwrap() error {
	if e.Owner != "" {
		return rpc.Errorf(rpc.CodeUnavailable, "no runtime runs for %s: it is the session of %s, which does not run, or does not share its runtime directory with this place any more", e.Dir, e.Owner).
			WithHint("start that container again; or give its session up with mypr-mcp stop, and the next cell starts one here")
	}
	return rpc.Errorf(rpc.CodeUnavailable, "no runtime runs for %s", e.Dir).
		WithHint("start one with a cell: mypr-mcp exec 1+1")
}

// Unreachable is the error of Discover when a lock says that a runtime lives but none
// of its sockets answers from here.
type Unreachable struct {
	Dir    string
	Lock   string   // the held lock file
	Holder *Holder  // nil: unknown
	Tried  []string // "path: why not"
	Ours   string   // the runtime directory that this environment would use
	Share  string   // the one that the runtime uses, by its own path
	Mount  string   // what is wrong with a mount here that should have led to it; ""
	Silent *Silent  // not nil: it is reached, but does not answer
}

func (e *Unreachable) Error() string { return e.Unwrap().Error() }

// Unwrap gives the error its shape on the wire.
func (e *Unreachable) Unwrap() error {
	if e.Silent != nil {
		return e.Silent.Unwrap()
	}
	err := rpc.Errorf(rpc.CodeUnavailable, "a runtime of %s is alive but cannot be reached: %s is held by %v; tried %s",
		e.Dir, e.Lock, e.Holder, strings.Join(e.Tried, "; "))
	if e.Mount != "" {
		err.Message += "; " + e.Mount
	}
	const second = "A second one is not started; mypr-mcp stop ends it where it runs"
	share := fmt.Sprintf("-v %s:%s", e.Share, e.Share)
	switch h := e.Holder; {
	case e.Mount != "":
		return err.WithHint("start this container again with the directory mounted, not a socket in it: %s. %s", share, second)
	case h == nil || h.PID == 0:
		return err.WithHint("make %s visible here at the same path (for a container: %s). %s", e.Share, share, second)
	case h.SamePIDs():
		return err.WithHint("if this is a container or namespace of its own, start it with %s; else the sockets were removed: kill %d", share, h.PID)
	case h.Container != "":
		return err.WithHint("start %s with its runtime directory on one that is visible here: -v %s:%s. %s", h.Container, e.Ours, e.Share, second)
	}
	return err.WithHint("start this container with the runtime directory mounted: %s. %s", share, second)
}

// Stranger is the error of Discover when a runtime listens at this workspace's
// sockets that belongs to another directory: one that was deleted and whose inode
// this one got, or this one before its .mypr was deleted.
type Stranger struct {
	Dir       string
	Paths     Paths
	Instance  string
	PID       int    // of the supervisor or manager, when it said
	Place     Place  // where that pid means something
	Workspace string // what it says it serves
}

func (e *Stranger) Error() string { return e.Unwrap().Error() }

// Unwrap gives the error its shape on the wire.
func (e *Stranger) Unwrap() error {
	err := rpc.Errorf(rpc.CodeConflict, "the runtime at %s is not the one of %s: it serves %s and has instance %s, which %s/.mypr does not record (the directory or its .mypr was deleted and made again, or is a container's of the same number)",
		e.Paths.RuntimeDir, e.Dir, e.Workspace, e.Instance, e.Dir)
	hint := "stop that runtime, then try again"
	switch {
	case !e.Place.SamePIDs():
		hint += fmt.Sprintf("; it runs in %v. Or set XDG_RUNTIME_DIR to another directory here", e.Place)
	case e.PID != 0:
		hint += fmt.Sprintf(": kill %d", e.PID)
	}
	return err.WithHint("%s", hint)
}

// Bounds of the wait for a socket that accepts but does not answer. The supervisor's
// answer costs it no look at anything.
const (
	probeTimeout       = 5 * time.Second
	supervisorPatience = 3 * time.Second
)

// Discover finds the workspace's running runtime: first where this process would put
// it, then where other environments would have, then where runtime.json says. It
// starts nothing and writes nothing. Its errors are *NotRunning, *Unreachable,
// *Stranger, an *rpc.Error (a runtime directory or socket that is not to be trusted),
// or ctx's.
//
// Whether a runtime lives is read from connections and locks, never from pids, which
// mean nothing in another pid namespace.
func (w *Workspace) Discover(ctx context.Context) (*Location, error) {
	d := &discovery{w: w, record: w.recorded()}
	for _, dir := range runtimeDirs(os.Getenv("XDG_RUNTIME_DIR")) {
		d.add(pathsIn(dir, w.Hash))
	}
	if d.record != nil && d.record.RuntimeDir != "" {
		d.add(d.record.Paths)
	}
	if l := d.each(ctx, supervisorPatience, d.askSupervisor); l != nil {
		return l, nil
	}
	managed, err := lockHeld(w.managerLock())
	if err != nil {
		return nil, rpc.Errorf(codeOf(err), "%v", err)
	}
	// Only now the manager's socket: with no manager alive the listener could be
	// systemd's, and connecting would start a runtime.
	if managed {
		if l := d.each(ctx, probeTimeout, d.askManager); l != nil {
			l.Silent = d.silent
			return l, nil
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if d.stranger != nil {
		return nil, d.stranger
	}
	held := w.supervisorLock()
	supervised, err := lockHeld(held)
	switch {
	case err != nil:
		return nil, rpc.Errorf(codeOf(err), "%v", err)
	case supervised:
	case managed:
		held = w.managerLock()
	case d.refused != nil:
		return nil, d.refused
	default:
		return nil, &NotRunning{w.Dir, d.record.owner()}
	}
	holder := readHolder(held)
	if err := anothers(w.Dir, holder); err != nil { // there is nothing to wait for
		return nil, err
	}
	share := w.RuntimeDir
	if d.record != nil && d.record.RuntimeDir != "" {
		share = d.record.RuntimeDir
	}
	return nil, &Unreachable{Dir: w.Dir, Lock: held, Holder: holder, Tried: d.tried, Ours: w.RuntimeDir, Share: share, Mount: d.mount, Silent: d.silent}
}

// discovery is one search.
type discovery struct {
	w          *Workspace
	record     *Runtime
	candidates []Paths
	tried      []string
	stranger   *Stranger
	silent     *Silent
	mount      string // a mount that leads nowhere, in words
	refused    error  // the directory that we would use, or a socket in it, is not to be trusted
}

func (d *discovery) add(p Paths) {
	if slices.Contains(d.candidates, p) {
		return
	}
	switch err := checkRuntimeDir(p.RuntimeDir, false); {
	case err == nil:
		d.candidates = append(d.candidates, p)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, os.ErrPermission):
		d.failed(p.RuntimeDir + ": " + err.Error())
	default:
		d.failed(err.Error())
		if p.RuntimeDir == d.w.RuntimeDir {
			d.refused = err
		}
	}
}

// failed takes down what was tried in vain.
func (d *discovery) failed(what string) {
	if !slices.Contains(d.tried, what) {
		d.tried = append(d.tried, what)
	}
}

// each asks the candidates in turn until one is ours.
func (d *discovery) each(ctx context.Context, patience time.Duration, ask func(context.Context, Paths) (*Location, error)) *Location {
	for _, p := range d.candidates {
		ctx, cancel := context.WithTimeout(ctx, patience)
		l, err := ask(ctx, p)
		cancel()
		if err == nil {
			return l
		}
		var s *Stranger
		if errors.As(err, &s) {
			d.stranger = s
		} else {
			d.failed(err.Error())
		}
		if p.RuntimeDir == d.w.RuntimeDir && rpc.CodeOf(err) == rpc.CodePermission {
			d.refused = err
		}
	}
	return nil
}

func (d *discovery) askSupervisor(ctx context.Context, p Paths) (*Location, error) {
	c, err := control.Dial(ctx, p.Control)
	if err != nil {
		return nil, d.unreached(p.Control, err)
	}
	defer c.Close()
	if err := trust(c.Peer(), p.Control); err != nil {
		return nil, err
	}
	info, err := c.Info(ctx)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			d.silent = &Silent{Control: p.Control, PID: c.Peer().PID}
		}
		return nil, fmt.Errorf("%s: %w", p.Control, err)
	}
	who := &Stranger{Dir: d.w.Dir, Paths: p, Instance: info.Instance, PID: info.PID, Workspace: info.Labels[LabelWorkspace]}
	l := &Location{Workspace: d.w, Paths: p, Instance: info.Instance, Supervisor: &info}
	who.Place = l.Place()
	if info.Labels[LabelPinned] == d.w.ID {
		return l, nil
	}
	if err := d.ours(who, info.Labels[LabelWorkspaceID]); err != nil {
		return nil, err
	}
	return l, nil
}

func (d *discovery) askManager(ctx context.Context, p Paths) (*Location, error) {
	c, err := rpc.Dial(ctx, p.Socket, nil)
	if err != nil {
		return nil, d.unreached(p.Socket, err)
	}
	defer c.Close()
	if err := trust(c.Peer(), p.Socket); err != nil {
		return nil, err
	}
	var s api.Status
	if err := c.Call(ctx, api.MethodStatus, api.StatusParams{}, &s); err != nil {
		return nil, fmt.Errorf("%s: %w", p.Socket, err)
	}
	who := &Stranger{Dir: d.w.Dir, Paths: p, Instance: s.Instance, PID: s.PID, Place: Place{PIDNamespace: s.PIDNamespace}, Workspace: s.Workspace}
	if err := d.ours(who, s.WorkspaceID); err != nil {
		return nil, err
	}
	return &Location{Workspace: d.w, Paths: p, Instance: s.Instance}, nil
}

// unreached is the error of a connect, with what a mount has to do with it.
func (d *discovery) unreached(socket string, err error) error {
	if why := brokenMount(socket); why != "" {
		d.mount = why
	}
	return fmt.Errorf("%s: %w", socket, cause(err))
}

// ours decides whether what answered is this directory's runtime.
func (d *discovery) ours(who *Stranger, id string) error {
	if id != d.w.ID {
		return who
	}
	if d.record != nil && d.record.Instance == who.Instance {
		return nil
	}
	// The record is missing or old. Whoever holds a lock in this very .mypr is ours too.
	for _, lock := range []string{d.w.supervisorLock(), d.w.managerLock()} {
		if held, err := lockHeld(lock); err == nil && held {
			return nil
		}
	}
	return who
}

// anothers is the error for a runtime whose lock is held by a process of another user.
// Only root gets so far: others cannot even look at the lock.
func anothers(dir string, h *Holder) error {
	if h == nil || h.PID == 0 || !h.SamePIDs() {
		return nil
	}
	st, err := os.Stat(fmt.Sprintf("/proc/%d", h.PID))
	if err != nil {
		return nil
	}
	uid := int(st.Sys().(*syscall.Stat_t).Uid)
	if uid == os.Geteuid() {
		return nil
	}
	name := fmt.Sprintf("#%d", uid) // as sudo takes it
	if u, err := user.LookupId(strconv.Itoa(uid)); err == nil {
		name = u.Username
	}
	return rpc.Errorf(rpc.CodePermission, "the session of %s is that of user %s (process %d); each user has sessions of their own", dir, name, h.PID).
		WithHint("use it as that user: sudo -u '%s' mypr-mcp …", name)
}

// trust refuses a socket that another user listens at.
func trust(p rpc.Peer, path string) error {
	if p.UID == os.Getuid() || p.UID == 0 {
		return nil
	}
	return rpc.Errorf(rpc.CodePermission, "the runtime at %s is run by user id %d, you are %d", path, p.UID, os.Getuid()).
		WithHint("use it as that user")
}
