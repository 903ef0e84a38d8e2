package differential

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"mypr/supervisor/control"
)

// manager is one of the two, as a script sees it.
type manager interface {
	name() string
	dir() string // $XDG_RUNTIME_DIR
	// do gives the unit a job (start, stop, restart, reload) and returns how it ended:
	// "done", "failed", …, or "refused". With wait false the answer is "".
	do(ctx context.Context, verb, unit string, wait bool) (string, error)
	kill(ctx context.Context, unit, signal, whom string) (string, error)
	reset(ctx context.Context, unit string) (string, error)
	daemonReload(ctx context.Context) error
	// show returns the unit's fields under systemd's names.
	show(ctx context.Context, unit string) (map[string]string, error)
	// watch says whenever something of the unit may have changed.
	watch(unit string) (changed <-chan struct{}, stop func())
	// foreign reports whether a variable comes from this machine and not from the test.
	foreign(variable string) bool
	// owner returns what tells which processes are the unit's, by their cgroup and environment.
	owner(ctx context.Context, unit string) (func(cgroup, env string) bool, error)
}

const refused = "refused"

// watchers wake who waits for a unit.
type watchers struct {
	mu   sync.Mutex // guards list
	list map[string][]chan struct{}
}

func (w *watchers) watch(unit string) (<-chan struct{}, func()) {
	ch := make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.list == nil {
		w.list = map[string][]chan struct{}{}
	}
	w.list[unit] = append(w.list[unit], ch)
	return ch, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.list[unit] = slices.DeleteFunc(w.list[unit], func(c chan struct{}) bool { return c == ch })
	}
}

func (w *watchers) wake(unit string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, ch := range w.list[unit] {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// The user manager, on its private socket.

const (
	dbusName    = "org.freedesktop.systemd1"
	dbusManager = dbusName + ".Manager"
	dbusUnit    = dbusName + ".Unit"
)

type systemdManager struct {
	watchers
	conn *dbus.Conn

	jobs    sync.Mutex // guards the fields below
	results map[dbus.ObjectPath]string
	waiting map[dbus.ObjectPath]chan string
	paths   map[dbus.ObjectPath]string // names of units by path

	own []string // variables that this machine's own units set (environment.d, the bus)
}

func dialSystemd() (*systemdManager, error) {
	conn, err := dbus.Dial("unix:path=" + systemdDir + "/systemd/private")
	if err != nil {
		return nil, err
	}
	if err := conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Getuid()))}); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	s := &systemdManager{
		conn: conn, results: map[dbus.ObjectPath]string{}, waiting: map[dbus.ObjectPath]chan string{}, paths: map[dbus.ObjectPath]string{},
	}
	signals := make(chan *dbus.Signal, 1024)
	conn.Signal(signals)
	go s.listen(signals) // until the connection ends
	if err := s.first(dbusManager + ".Subscribe"); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	v, err := s.manager().GetProperty(dbusManager + ".Environment")
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	given := environ(systemdDir)
	for _, kv := range v.Value().([]string) {
		if !slices.Contains(given, kv) {
			name, _, _ := strings.Cut(kv, "=")
			s.own = append(s.own, name)
		}
	}
	return s, nil
}

// first makes the first call of a connection. One that arrives together with the end of
// the authentication is not looked at before the next one arrives (systemd 252).
func (s *systemdManager) first(method string) error {
	call := s.manager().Go(method, 0, make(chan *dbus.Call, 1))
	push := time.NewTicker(100 * time.Millisecond)
	defer push.Stop()
	deadline := time.After(patience)
	for {
		select {
		case <-call.Done:
			return call.Err
		case <-push.C:
			s.manager().Go("org.freedesktop.DBus.Peer.Ping", 0, nil)
		case <-deadline:
			return errors.New("systemd does not answer on its private socket")
		}
	}
}

func (s *systemdManager) foreign(variable string) bool { return slices.Contains(s.own, variable) }

func (s *systemdManager) manager() dbus.BusObject {
	return s.conn.Object(dbusName, "/org/freedesktop/systemd1")
}

func (s *systemdManager) listen(signals <-chan *dbus.Signal) {
	for sig := range signals {
		switch sig.Name {
		case "org.freedesktop.DBus.Properties.PropertiesChanged":
			s.jobs.Lock()
			unit := s.paths[sig.Path]
			s.jobs.Unlock()
			s.wake(unit)
		case dbusManager + ".JobRemoved":
			path, result := sig.Body[1].(dbus.ObjectPath), sig.Body[3].(string)
			s.jobs.Lock()
			if ch := s.waiting[path]; ch != nil {
				ch <- result
				delete(s.waiting, path)
			} else {
				s.results[path] = result
			}
			s.jobs.Unlock()
		}
	}
}

func (s *systemdManager) close() error { return s.conn.Close() }

func (s *systemdManager) name() string { return "systemd" }
func (s *systemdManager) dir() string  { return systemdDir }

func (s *systemdManager) call(ctx context.Context, method string, args ...any) (*dbus.Call, string, error) {
	call := s.manager().CallWithContext(ctx, dbusManager+"."+method, 0, args...)
	var e dbus.Error
	if errors.As(call.Err, &e) {
		return call, refused, nil
	}
	return call, jobDone, call.Err
}

const jobDone = "done"

func (s *systemdManager) do(ctx context.Context, verb, unit string, wait bool) (string, error) {
	method := map[string]string{"start": "StartUnit", "stop": "StopUnit", "restart": "RestartUnit", "reload": "ReloadUnit"}[verb]
	call, result, err := s.call(ctx, method, unit, "replace")
	if err != nil || result == refused {
		return result, err
	}
	var path dbus.ObjectPath
	if err := call.Store(&path); err != nil || !wait {
		return "", err
	}
	ch := make(chan string, 1)
	s.jobs.Lock()
	if r, ok := s.results[path]; ok {
		ch <- r
		delete(s.results, path)
	} else {
		s.waiting[path] = ch
	}
	s.jobs.Unlock()
	select {
	case r := <-ch:
		if r == "canceled" {
			r = "cancelled"
		}
		return r, nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (s *systemdManager) kill(ctx context.Context, unit, signal, whom string) (string, error) {
	_, result, err := s.call(ctx, "KillUnit", unit, whom, int32(unix.SignalNum(signal)))
	return result, err
}

func (s *systemdManager) reset(ctx context.Context, unit string) (string, error) {
	_, result, err := s.call(ctx, "ResetFailedUnit", unit)
	return result, err
}

func (s *systemdManager) daemonReload(ctx context.Context) error {
	_, _, err := s.call(ctx, "Reload")
	return err
}

func (s *systemdManager) show(ctx context.Context, unit string) (map[string]string, error) {
	var path dbus.ObjectPath
	call, result, err := s.call(ctx, "LoadUnit", unit)
	if err != nil || result == refused {
		return map[string]string{"ActiveState": refused}, err
	}
	if err := call.Store(&path); err != nil {
		return nil, err
	}
	s.jobs.Lock()
	s.paths[path] = unit
	s.jobs.Unlock()
	all := map[string]dbus.Variant{}
	kind := map[string]string{".service": "Service", ".socket": "Socket"}[filepath.Ext(unit)]
	for _, iface := range []string{"Unit", kind} {
		if iface == "" {
			continue
		}
		props := map[string]dbus.Variant{}
		call := s.conn.Object(dbusName, path).CallWithContext(ctx, "org.freedesktop.DBus.Properties.GetAll", 0, dbusName+"."+iface)
		if err := call.Store(&props); err != nil {
			return nil, err
		}
		for k, v := range props {
			all[k] = v
		}
	}
	m := map[string]string{}
	for _, k := range fields {
		switch v := all[k].Value().(type) {
		case nil:
		case uint32:
			if k == "MainPID" {
				m[k] = yes(v != 0)
				continue
			}
			m[k] = fmt.Sprint(v)
		default:
			m[k] = fmt.Sprint(v)
		}
	}
	if ls, ok := all["LoadState"].Value().(string); ok && ls != "loaded" {
		m["ActiveState"] = ls
	}
	return m, nil
}

// fields that are compared.
var fields = []string{"ActiveState", "SubState", "Result", "MainPID", "ExecMainCode", "ExecMainStatus", "NRestarts", "StatusText", "NFileDescriptorStore"}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func (s *systemdManager) owner(_ context.Context, unit string) (func(cgroup, env string) bool, error) {
	return func(cgroup, _ string) bool {
		return strings.HasPrefix(cgroup, "/systemd/") && slices.Contains(strings.Split(cgroup, "/"), unit)
	}, nil
}

// Our supervisor.

type ourManager struct {
	watchers
	c *control.Client
}

func dialOurs(ctx context.Context) (*ourManager, error) {
	c, err := control.Dial(ctx, ourDir+"/mypr/control")
	if err != nil {
		return nil, err
	}
	o := &ourManager{c: c}
	_, events, err := c.Subscribe(ctx)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	go func() { // until the connection ends
		for ev := range events {
			o.wake(ev.Name)
		}
	}()
	return o, nil
}

func (o *ourManager) name() string { return "mypr" }
func (o *ourManager) dir() string  { return ourDir }

func (o *ourManager) foreign(string) bool { return false }

// answer tells a refusal from a supervisor that is not there.
func (o *ourManager) answer(err error) (string, error) {
	switch {
	case err == nil:
		return jobDone, nil
	case o.c.Err() != nil || errors.Is(err, context.DeadlineExceeded):
		return "", err
	}
	return refused, nil
}

func (o *ourManager) do(ctx context.Context, verb, unit string, wait bool) (string, error) {
	f := map[string]func(context.Context, control.JobParams) (control.JobResult, error){
		"start": o.c.Start, "stop": o.c.Stop, "restart": o.c.Restart, "reload": o.c.Reload,
	}[verb]
	r, err := f(ctx, control.JobParams{Name: unit, NoWait: !wait})
	if result, err := o.answer(err); result != jobDone {
		return result, err
	}
	if !wait {
		return "", nil
	}
	return r.Result, nil
}

func (o *ourManager) kill(ctx context.Context, unit, signal, whom string) (string, error) {
	return o.answer(o.c.Kill(ctx, control.KillParams{Name: unit, Signal: int(unix.SignalNum(signal)), Who: whom}))
}

func (o *ourManager) reset(ctx context.Context, unit string) (string, error) {
	return o.answer(o.c.ResetFailed(ctx, unit))
}

func (o *ourManager) daemonReload(ctx context.Context) error {
	_, err := o.answer(o.c.DaemonReload(ctx)) // it complains of the files that are bad on purpose
	return err
}

func (o *ourManager) show(ctx context.Context, unit string) (map[string]string, error) {
	d, err := o.c.Show(ctx, unit)
	if result, err := o.answer(err); result != jobDone {
		return map[string]string{"ActiveState": refused}, err
	}
	m := map[string]string{"ActiveState": d.ActiveState, "SubState": d.SubState}
	if d.Spec.Socket != nil || d.Spec.Service != nil {
		m["Result"] = d.Result
	}
	if d.Spec.Service == nil {
		return m, nil
	}
	m["MainPID"] = yes(d.MainPID != 0)
	m["ExecMainCode"], m["ExecMainStatus"] = "0", "0"
	if d.ExitKnown {
		switch {
		case d.ExitSignal == 0:
			m["ExecMainCode"], m["ExecMainStatus"] = "1", strconv.Itoa(d.ExitCode) // CLD_EXITED
		case d.CoreDump:
			m["ExecMainCode"], m["ExecMainStatus"] = "3", strconv.Itoa(d.ExitSignal) // CLD_DUMPED
		default:
			m["ExecMainCode"], m["ExecMainStatus"] = "2", strconv.Itoa(d.ExitSignal) // CLD_KILLED
		}
	}
	m["NRestarts"] = strconv.Itoa(d.Restarts)
	m["StatusText"] = d.StatusText
	m["NFileDescriptorStore"] = strconv.Itoa(len(d.FDNames)) // nothing else is kept for a unit with a file
	return m, nil
}

func (o *ourManager) owner(ctx context.Context, unit string) (func(cgroup, env string) bool, error) {
	if os.Getenv(tierVariable) == "3" { // no cgroups
		d, err := o.c.Show(ctx, unit)
		_, err = o.answer(err)
		return func(_, env string) bool {
			return d.InvocationID != "" && strings.Contains(env, "\x00INVOCATION_ID="+d.InvocationID+"\x00")
		}, err
	}
	return func(cgroup, _ string) bool {
		if !strings.HasPrefix(cgroup, "/mypr/") {
			return false
		}
		return slices.ContainsFunc(strings.Split(cgroup, "/"), func(dir string) bool {
			invocation, ok := strings.CutPrefix(dir, unit+"-")
			return ok && len(invocation) == 32
		})
	}, nil
}

// tree describes the processes of a unit: "sleep 1 [sleep 2] | sleep 3". Children stand in
// brackets, whose parent is none of the unit's stand side by side.
func tree(ctx context.Context, m manager, unit string) (string, error) {
	owns, err := m.owner(ctx, unit)
	if err != nil {
		return "", err
	}
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		return "", err
	}
	names := map[int]string{}
	parents := map[int]int{}
	for _, d := range dirs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		cg, _ := os.ReadFile("/proc/" + d.Name() + "/cgroup")
		i := strings.Index(string(cg), "0::")
		if i < 0 {
			continue
		}
		path, _, _ := strings.Cut(string(cg[i+3:]), "\n")
		var cmdline, env []byte
		for end := time.Now().Add(5 * time.Second); len(cmdline) == 0 || len(env) == 0; {
			// In the middle of an exec there are none; of a zombie there never are.
			b, err := os.ReadFile("/proc/" + d.Name() + "/stat")
			if err != nil || strings.Contains(string(b), ") Z ") || time.Now().After(end) {
				break
			}
			runtime.Gosched()
			cmdline, _ = os.ReadFile("/proc/" + d.Name() + "/cmdline")
			env, _ = os.ReadFile("/proc/" + d.Name() + "/environ")
		}
		if !owns(path, "\x00"+string(env)) {
			continue
		}
		stat, err := os.ReadFile("/proc/" + d.Name() + "/stat")
		after := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if err != nil || len(after) < 2 || after[0] == "Z" || after[0] == "X" {
			continue // it has just ended
		}
		argv := strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")
		if argv[0] == probePath && argv[len(argv)-1] == "hold" {
			argv = []string{"sleep", "infinity"} // it is about to become that
		}
		name := strings.Join(append([]string{filepath.Base(argv[0])}, argv[1:]...), " ")
		if len(name) > 40 {
			name = filepath.Base(argv[0])
		}
		names[pid] = name
		parents[pid], _ = strconv.Atoi(after[1])
	}
	var describe func(parent int) []string
	describe = func(parent int) (list []string) {
		for pid, name := range names {
			_, inside := names[parents[pid]]
			if inside && parents[pid] == parent || !inside && parent == 0 {
				if below := describe(pid); len(below) > 0 {
					name += " [" + strings.Join(below, ", ") + "]"
				}
				list = append(list, name)
			}
		}
		slices.Sort(list)
		return list
	}
	return strings.Join(describe(0), " + "), nil
}
