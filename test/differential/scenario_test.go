package differential

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/tools/txtar"
)

// scenario is one file NAME.txtar, or a directory NAME with the files "script",
// "differences" (which may be missing) and the rest of the scenario's.
//
// Unit files (*.service, *.socket, *.target and their NAME.d directories) begin with NAME, because
// all scenarios run at once in the same two managers; all other files are put into
// %t/NAME/. The lines of the script are the steps:
//
//	start|stop|restart|reload UNIT    and wait until the job has ended; its result is compared
//	nowait VERB UNIT                  the same without waiting
//	kill UNIT SIGNAL [WHOM]           main (default), control or all
//	reset-failed UNIT
//	daemon-reload
//	install FILE UNIT                 make the scenario's FILE the unit file UNIT, for a daemon-reload
//	until UNIT STATE/SUB [K=V…]       wait for the state, and for fields of it; several states are a|b
//	check [UNIT…]                     compare all fields and processes (of all units)
//	record NAME.N [VARIABLE…|-]       wait for a probe's record and compare it: its whole environment, these
//	                                  variables of it, or nothing
//	feed FIFO [TEXT]                  write to a fifo in %t/NAME that a process reads (the script's mention makes it)
//	connect PATH [NAME]               connect to a socket below %t and compare the answer
//	dial PATH                         connect, and hang up at the end
//	file PATH                         compare a file below %t/NAME
//	mode PATH                         compare the mode of a file below %t
//	present NAME                      wait for a file in %t/NAME
//
// The lines of "differences" are those allowed, each with the row of the table in
// docs/units.md that gives the reason:
//
//	ROW | STEP | WHAT | systemd's | ours
type scenario struct {
	name        string
	steps       [][]string
	files       map[string][]byte
	units       []string // in the order in which they are compared
	differences []difference
}

type difference struct {
	row, when, what, theirs, ours string
}

func (d difference) String() string {
	return strings.Join([]string{d.row, d.when, d.what, d.theirs, d.ours}, " | ")
}

var scenarios []*scenario

func isUnit(name string) bool {
	return slices.Contains([]string{".service", ".socket", ".target"}, filepath.Ext(name))
}

func readScenarios(dir string) (list []*scenario, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		sc := &scenario{files: map[string][]byte{}}
		switch name, isArchive := strings.CutSuffix(e.Name(), ".txtar"); {
		case e.IsDir():
			sc.name = name
			err = filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
				if err != nil || d.IsDir() {
					return err
				}
				rel, _ := filepath.Rel(path, p)
				sc.files[rel], err = os.ReadFile(p)
				return err
			})
		case isArchive:
			sc.name = name
			var a *txtar.Archive
			if a, err = txtar.ParseFile(path); err == nil {
				sc.files["script"] = a.Comment
				for _, f := range a.Files {
					sc.files[f.Name] = f.Data
				}
			}
		default:
			continue
		}
		if err == nil {
			err = sc.prepare()
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		list = append(list, sc)
	}
	return list, nil
}

func (sc *scenario) prepare() (err error) {
	for l := range strings.Lines(string(sc.files["script"])) {
		if step := strings.Fields(l); len(step) > 0 && step[0][0] != '#' {
			sc.steps = append(sc.steps, step)
		}
	}
	if len(sc.steps) == 0 {
		return errors.New("there is no script")
	}
	if sc.differences, err = readDifferences(sc.files["differences"]); err != nil {
		return err
	}
	delete(sc.files, "script")
	delete(sc.files, "differences")
	note := func(unit string) {
		if !slices.Contains(sc.units, unit) && !strings.Contains(unit, "@.") {
			sc.units = append(sc.units, unit)
		}
	}
	for _, step := range sc.steps {
		for _, w := range step[1:] {
			if isUnit(w) && step[0] != "record" {
				note(w)
			}
		}
	}
	for _, name := range sorted(sc.files) {
		top, _, _ := strings.Cut(name, "/")
		if top = strings.TrimSuffix(top, ".d"); !isUnit(top) {
			continue
		}
		if !strings.HasPrefix(top, sc.name) {
			return fmt.Errorf("the unit %s does not begin with %s: all scenarios run in the same managers", top, sc.name)
		}
		if top == name {
			note(name)
		}
	}
	return nil
}

func (sc *scenario) reloads() bool {
	return slices.ContainsFunc(sc.steps, func(step []string) bool { return step[0] == "daemon-reload" })
}

func sorted[V any](m map[string]V) []string {
	var list []string
	for k := range m {
		list = append(list, k)
	}
	slices.Sort(list)
	return list
}

func readDifferences(text []byte) (list []difference, err error) {
	for l := range strings.Lines(string(text)) {
		l = strings.TrimSpace(l)
		if l == "" || l[0] == '#' {
			continue
		}
		p := strings.Split(l, " | ")
		if len(p) != 5 {
			return nil, fmt.Errorf("the difference %q has not 5 parts", l)
		}
		for i := range p {
			p[i] = strings.TrimSpace(p[i])
		}
		list = append(list, difference{p[0], p[1], p[2], p[3], p[4]})
	}
	return list, nil
}

// install puts all files where the managers look for them.
func install(list []*scenario) error {
	var all []string
	for _, sc := range list {
		all = append(all, sc.units...)
		for _, dirs := range [][2]string{{systemdDir, systemdDir + "/systemd/user"}, {ourDir, ourDir + "/mypr/units"}} {
			if err := os.MkdirAll(filepath.Join(dirs[0], sc.name), 0o700); err != nil {
				return err
			}
			for name, data := range sc.files {
				dir := filepath.Join(dirs[0], sc.name)
				if top, _, _ := strings.Cut(name, "/"); isUnit(strings.TrimSuffix(top, ".d")) {
					dir = dirs[1]
				}
				if err := writeFile(filepath.Join(dir, name), data); err != nil {
					return err
				}
			}
			for _, step := range sc.steps {
				if step[0] != "feed" {
					continue
				}
				if err := unix.Mkfifo(filepath.Join(dirs[0], sc.name, step[1]), 0o600); err != nil && !errors.Is(err, fs.ErrExist) {
					return err
				}
			}
		}
	}
	// What a unit that is up names stays loaded.
	keep := "[Unit]\nDefaultDependencies=no\n"
	for _, u := range all {
		keep += "After=" + u + "\n"
	}
	return writeFile(systemdDir+"/systemd/user/"+keepTarget, []byte(keep))
}

func writeFile(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
}

// fact is one thing that was seen.
type fact struct{ when, what, value string }

// run is a scenario under one manager.
type run struct {
	sc      *scenario
	m       manager
	facts   []fact
	when    string // the step
	pids    map[string]string
	ids     []string // invocations
	conns   []net.Conn
	numbers map[string]int // how often a step occurred
}

func (r *run) see(what, value string) {
	r.facts = append(r.facts, fact{r.when, what, r.neutral(value)})
}

// neutral replaces what has to differ.
func (r *run) neutral(s string) string { return strings.ReplaceAll(s, r.m.dir(), "%t") }

func (r *run) path(name string) string { return filepath.Join(r.m.dir(), r.sc.name, name) }

// play runs the script. It goes on to the end whatever it sees, as long as the manager
// can be asked.
func (sc *scenario) play(ctx context.Context, m manager) ([]fact, error) {
	r := &run{sc: sc, m: m, pids: map[string]string{}, numbers: map[string]int{}}
	defer func() {
		for _, c := range r.conns {
			c.Close()
		}
	}()
	for _, step := range sc.steps {
		text := strings.Join(step, " ")
		r.numbers[text]++
		if r.when = text; r.numbers[text] > 1 {
			r.when += fmt.Sprintf(" (%d)", r.numbers[text])
		}
		ctx, cancel := context.WithTimeout(ctx, *stepPatience)
		err := r.step(ctx, step)
		late := ctx.Err() != nil
		cancel()
		if late {
			r.see("step", fmt.Sprintf("did not end in time: %v", err))
			for _, u := range sc.units {
				_ = r.check(context.WithoutCancel(ctx), u)
			}
			break
		}
		if err != nil {
			return r.facts, fmt.Errorf("%s: %s: %w", m.name(), text, err)
		}
	}
	// Nothing of a scenario outlives it.
	for _, u := range slices.Backward(sc.units) {
		if _, err := m.do(ctx, "stop", u, true); err != nil {
			return r.facts, fmt.Errorf("%s: stop at the end: %w", m.name(), err)
		}
	}
	return r.facts, nil
}

func (r *run) step(ctx context.Context, step []string) error {
	args := step[1:]
	arg := func(i int) string {
		if i < len(args) {
			return args[i]
		}
		return ""
	}
	result := func(res string, err error) error {
		if err == nil {
			r.see("result", res)
		}
		return err
	}
	switch step[0] {
	case "start", "stop", "restart", "reload":
		return result(r.m.do(ctx, step[0], arg(0), true))
	case "nowait":
		return result(r.m.do(ctx, arg(0), arg(1), false))
	case "kill":
		whom := arg(2)
		if whom == "" {
			whom = "main"
		}
		return result(r.m.kill(ctx, arg(0), arg(1), whom))
	case "reset-failed":
		return result(r.m.reset(ctx, arg(0)))
	case "daemon-reload":
		return r.m.daemonReload(ctx)
	case "install":
		data, err := os.ReadFile(r.path(arg(0)))
		dir := ourDir + "/mypr/units"
		if r.m.dir() == systemdDir {
			dir = systemdDir + "/systemd/user"
		}
		return errors.Join(err, os.WriteFile(filepath.Join(dir, arg(1)), data, 0o600))
	case "until":
		return r.until(ctx, arg(0), arg(1), args[2:])
	case "check":
		if len(args) == 0 {
			args = r.sc.units
		}
		for _, u := range args {
			if err := r.check(ctx, u); err != nil {
				return err
			}
		}
		return nil
	case "record":
		return r.record(ctx, arg(0), args[1:])
	case "feed":
		return feed(ctx, r.path(arg(0)), strings.Join(args[1:], " "))
	case "connect", "dial":
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(r.m.dir(), arg(0)))
		if err != nil {
			r.see("connect", strings.TrimPrefix(errors.Unwrap(err).Error(), "connect: "))
			return nil
		}
		if r.conns = append(r.conns, conn); step[0] == "dial" {
			return nil
		}
		deadline, _ := ctx.Deadline()
		_ = conn.SetDeadline(deadline)
		b, err := io.ReadAll(conn)
		r.see("answer", string(b))
		return err
	case "file":
		b, err := os.ReadFile(r.path(arg(0)))
		if err != nil {
			b = []byte("missing")
		}
		r.see(arg(0), string(b))
		return nil
	case "mode":
		fi, err := os.Lstat(filepath.Join(r.m.dir(), arg(0)))
		if err != nil {
			r.see(arg(0), "missing")
			return nil
		}
		r.see(arg(0), fi.Mode().String())
		return nil
	case "present":
		return appears(ctx, r.path(arg(0)))
	}
	return errors.New("no such step")
}

// until waits for a state of a unit.
func (r *run) until(ctx context.Context, unit, states string, more []string) error {
	changed, stop := r.m.watch(unit)
	defer stop()
	for {
		m, err := r.m.show(ctx, unit)
		if err != nil {
			return err
		}
		ok := slices.Contains(strings.Split(states, "|"), m["ActiveState"]+"/"+m["SubState"])
		for _, kv := range more {
			k, v, _ := strings.Cut(kv, "=")
			ok = ok && m[k] == v
		}
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (r *run) check(ctx context.Context, unit string) error {
	m, err := r.m.show(ctx, unit)
	if err != nil {
		return err
	}
	for _, k := range fields {
		if v, ok := m[k]; ok {
			r.see(unit+" "+k, v)
		}
	}
	if filepath.Ext(unit) == ".service" {
		t, err := tree(ctx, r.m, unit)
		if err != nil {
			return err
		}
		r.see(unit+" processes", t)
	}
	return nil
}

// record waits for what a probe wrote and makes it comparable.
func (r *run) record(ctx context.Context, name string, want []string) error {
	path := r.path(name)
	if err := appears(ctx, path); err != nil {
		if b, ferr := os.ReadFile(strings.TrimSuffix(path, filepath.Ext(path)) + ".error"); ferr == nil {
			err = fmt.Errorf("%w: %s", err, b)
		}
		return err
	}
	var rec record
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil {
		return err
	}
	r.pids[strconv.Itoa(rec.PID)] = name
	if slices.Equal(want, []string{"-"}) {
		return nil
	}
	env := map[string]string{}
	for _, kv := range rec.Env {
		k, v, _ := strings.Cut(kv, "=")
		if r.m.foreign(k) {
			continue
		}
		if _, twice := env[k]; twice {
			v = "set twice"
		}
		env[k] = r.variable(k, v, strconv.Itoa(rec.PID))
	}
	if len(want) > 0 {
		for _, k := range want {
			v, ok := env[k]
			if !ok {
				v = "not set"
			}
			r.see(name+" $"+k, v)
		}
		return nil
	}
	for _, k := range sorted(env) {
		r.see(name+" $"+k, env[k])
	}
	r.see(name+" argv", fmt.Sprintf("%q", rec.Args))
	r.see(name+" directory", rec.Dir)
	r.see(name+" umask", rec.UMask)
	r.see(name+" session leader", yes(rec.Leader))
	r.see(name+" nice", strconv.Itoa(rec.Nice))
	r.see(name+" timer slack", strconv.Itoa(rec.Slack))
	for _, k := range sorted(rec.Limits) {
		r.see(name+" limit "+k, rec.Limits[k])
	}
	for _, fd := range rec.FDs {
		if strings.HasPrefix(fd, "1: ") || strings.HasPrefix(fd, "2: ") {
			if !strings.Contains(fd, r.m.dir()) || strings.HasSuffix(fd, ".log") {
				continue // the managers' own output
			}
		}
		n, what, _ := strings.Cut(fd, ": ")
		r.see(name+" fd "+n, what)
	}
	return nil
}

// variable makes the value of an environment variable comparable.
func (r *run) variable(name, value, self string) string {
	switch name {
	case "LISTEN_PID", "WATCHDOG_PID", "SYSTEMD_EXEC_PID", "MAINPID", "MANAGERPID":
		switch who := r.pids[value]; {
		case value == self && name != "MAINPID":
			return "itself"
		case who != "":
			return "pid of " + who
		case name == "MANAGERPID":
			return "set"
		}
		return "a pid"
	case "INVOCATION_ID":
		i := slices.Index(r.ids, value)
		if i < 0 {
			i = len(r.ids)
			r.ids = append(r.ids, value)
		}
		return fmt.Sprintf("invocation %d", i+1)
	case "NOTIFY_SOCKET", "JOURNAL_STREAM", "MYPR_CONTROL":
		return "set"
	}
	return value
}

// appears waits for a file that is made by a rename.
func appears(ctx context.Context, path string) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return err
	}
	events := os.NewFile(uintptr(fd), "inotify")
	defer events.Close()
	if _, err := unix.InotifyAddWatch(fd, filepath.Dir(path), unix.IN_MOVED_TO|unix.IN_CREATE); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = events.SetReadDeadline(time.Unix(1, 0)) })()
	buf := make([]byte, 4096)
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		if _, err := events.Read(buf); err != nil {
			return errors.Join(fmt.Errorf("%s does not appear: %w", path, err), ctx.Err())
		}
	}
}

// feed writes to a fifo when somebody reads it.
func feed(ctx context.Context, path, text string) error {
	opened := make(chan error, 1)
	go func() { // ends when a reader comes, or by the one below
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteString(text)
			err = errors.Join(err, f.Close())
		}
		opened <- err
	}()
	select {
	case err := <-opened:
		return err
	case <-ctx.Done():
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err == nil {
			<-opened
			unix.Close(fd)
		}
		return ctx.Err()
	}
}

// compare returns what differs, in order.
func compare(theirs, ours []fact) (list []difference) {
	seen := map[fact]string{}
	for _, f := range ours {
		seen[fact{when: f.when, what: f.what}] = f.value
	}
	for _, f := range theirs {
		k := fact{when: f.when, what: f.what}
		v, ok := seen[k]
		delete(seen, k)
		switch {
		case !ok:
			list = append(list, difference{"", f.when, f.what, show(f.value), "-"})
		case v != f.value:
			list = append(list, difference{"", f.when, f.what, show(f.value), show(v)})
		}
	}
	for _, f := range ours {
		if _, left := seen[fact{when: f.when, what: f.what}]; left {
			list = append(list, difference{"", f.when, f.what, "-", show(f.value)})
		}
	}
	return list
}

// show is a value on one line, and not empty.
func show(s string) string {
	if s == "" || s == "-" || strings.ContainsAny(s, "\n|") || strings.TrimSpace(s) != s {
		return strconv.Quote(s)
	}
	return s
}

func TestDifferential(t *testing.T) {
	everywhereText, err := os.ReadFile("testdata/everywhere")
	if err != nil {
		t.Fatal(err)
	}
	everywhere, err := readDifferences(everywhereText)
	if err != nil {
		t.Fatal(err)
	}
	docs, err := os.ReadFile("../../docs/units.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := func(row string) bool { return bytes.Contains(docs, []byte("\n| "+row+" |")) }
	theirs, err := dialSystemd()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { theirs.close() })
	ours, err := dialOurs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.c.Close() })
	used := make([]atomic.Bool, len(everywhere))
	// A daemon-reload is about all units, and systemd may lose track of a start meanwhile.
	for _, reloads := range []bool{false, true} {
		t.Run("scenario", func(t *testing.T) {
			for _, sc := range scenarios {
				if sc.reloads() != reloads {
					continue
				}
				t.Run(sc.name, func(t *testing.T) {
					if !reloads {
						t.Parallel()
					}
					sc.test(t, theirs, ours, everywhere, used, documented)
				})
			}
		})
	}
	if *unitsDir != "testdata" || t.Failed() || flag.Lookup("test.run").Value.String() != "" {
		return
	}
	for i, d := range everywhere {
		switch {
		case !used[i].Load():
			t.Errorf("testdata/everywhere: the difference was not met: %v", d)
		case !documented(d.row):
			t.Errorf("testdata/everywhere: docs/units.md has no row %q", d.row)
		}
	}
}

func (sc *scenario) test(t *testing.T, theirs, ours manager, everywhere []difference, used []atomic.Bool, documented func(string) bool) {
	ctx := context.WithoutCancel(t.Context())
	type outcome struct {
		facts []fact
		err   error
	}
	other := make(chan outcome, 1)
	go func() {
		facts, err := sc.play(ctx, theirs)
		other <- outcome{facts, err}
	}()
	our, err := sc.play(ctx, ours)
	their := <-other
	if err := errors.Join(their.err, err); err != nil {
		t.Error(err)
	}
	left := slices.Clone(sc.differences)
	for _, d := range compare(their.facts, our) {
		same := func(want difference) bool {
			return (want.when == "*" || want.when == d.when) && (want.what == d.what || strings.HasPrefix(want.what, "* ") && strings.HasSuffix(d.what, want.what[1:])) &&
				(want.theirs == d.theirs || want.theirs == "*") && (want.ours == d.ours || want.ours == "*")
		}
		if i := slices.IndexFunc(left, same); i >= 0 {
			if !documented(left[i].row) {
				t.Errorf("docs/units.md has no row %q", left[i].row)
			}
			if left[i].when != "*" && !strings.HasPrefix(left[i].what, "* ") {
				left = slices.Delete(left, i, i+1)
			} else {
				left[i].row = "" // met
			}
			continue
		}
		if i := slices.IndexFunc(everywhere, same); i >= 0 {
			used[i].Store(true)
			continue
		}
		t.Errorf("DIFFERENT%v", d)
	}
	for _, d := range left {
		if d.row != "" {
			t.Errorf("an allowed difference was not met: %v", d)
		}
	}
	if t.Failed() && testing.Verbose() {
		for _, f := range their.facts {
			t.Logf("systemd: %s: %s = %s", f.when, f.what, show(f.value))
		}
	}
}
