package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"

	"mypr/internal/rpc/readable"
	"mypr/supervisor/control"
	"mypr/supervisor/notify"
	"mypr/supervisor/process"
)

// upstream is the service manager that this process is a service of (systemd). It
// keeps descriptors over this process's death, in place of an anchor: FDSTORE=1 with a
// name that says what the descriptor is.
type upstream struct {
	names  map[uint64]string // of what it keeps, by key
	status string            // as last sent
	notify *os.File          // a second descriptor of the notify socket, for keeping
	ping   *timer
}

// keeper holds second copies of descriptors: the anchor, or the service manager.
type keeper interface {
	Update(add []process.Anchored, drop []uint64) error
}

func (s *Supervisor) keeper() keeper {
	switch {
	case s.up != nil:
		return s.up
	case s.anchored.a != nil:
		return s.anchored.a
	}
	return nil
}

// say sends a state to the service manager, if there is one.
func (s *Supervisor) say(state string, files ...*os.File) {
	if s.up == nil {
		return
	}
	if _, err := notify.Send(state, files...); err != nil {
		s.log.Warn("cannot notify the service manager", "err", err)
	}
}

const (
	storePrefix = "mypr-"
	// storeName is the longest FDNAME= (sd_notify(3)).
	storeName = 255
)

// Update stores and removes descriptors. They are all sent with FDPOLL=0: systemd
// would drop one at the first hang-up, which for a kept pipe end is what its reader
// still has to see.
func (up *upstream) Update(add []process.Anchored, drop []uint64) error {
	var errs []error
	for _, key := range drop {
		if name, ok := up.names[key]; ok {
			delete(up.names, key)
			_, err := notify.Send("FDSTOREREMOVE=1\nFDNAME=" + name)
			errs = append(errs, err)
		}
	}
	for _, e := range add {
		var r fdRecord
		err := json.Unmarshal(e.Info, &r)
		name := storedName(e.Key, r)
		if err == nil && len(name) > storeName {
			err = fmt.Errorf("the descriptor %q of %s cannot be stored: its name is too long", r.Name, r.Unit)
		}
		if err == nil {
			if _, err = notify.Send("FDSTORE=1\nFDPOLL=0\nFDNAME="+name, e.File); err == nil {
				up.names[e.Key] = name
			}
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// storedName holds all of a record, in what FDNAME= may be made of.
func storedName(key uint64, r fdRecord) string {
	flags := ""
	if r.Poll {
		flags += "p"
	}
	return storePrefix + strings.Join([]string{
		strconv.FormatUint(key, 10), r.Kind, flags, url.QueryEscape(r.Unit), url.QueryEscape(r.Name),
	}, ",")
}

func parseStoredName(text string) (key uint64, r fdRecord, ok bool) {
	text, ok = strings.CutPrefix(text, storePrefix)
	p := strings.Split(text, ",")
	if !ok || len(p) != 5 {
		return 0, r, false
	}
	key, err := strconv.ParseUint(p[0], 10, 64)
	unit, err2 := url.QueryUnescape(p[3])
	name, err3 := url.QueryUnescape(p[4])
	return key, fdRecord{Kind: p[1], Unit: unit, Name: name, Poll: strings.Contains(p[2], "p")}, errors.Join(err, err2, err3) == nil
}

// storedUpstream reports whether a service manager hands back what an earlier process
// stored with it.
func storedUpstream() bool {
	return os.Getenv("LISTEN_PID") == strconv.Itoa(os.Getpid()) &&
		slices.ContainsFunc(strings.Split(os.Getenv("LISTEN_FDNAMES"), ":"), func(name string) bool { return strings.HasPrefix(name, storePrefix) })
}

// Stored is a second descriptor of what an earlier process of this service kept under
// that name in Options.Keep, for reading it before Run; nil when there is none.
func Stored(name string) *os.File {
	if !storedUpstream() {
		return nil
	}
	for i, text := range strings.Split(os.Getenv("LISTEN_FDNAMES"), ":") {
		if _, r, ok := parseStoredName(text); ok && r.Kind == fdProgram && r.Name == name {
			if fd, err := unix.FcntlInt(uintptr(3+i), unix.F_DUPFD_CLOEXEC, 3); err == nil {
				return os.NewFile(uintptr(fd), name)
			}
		}
	}
	return nil
}

// takeUpstream takes what came with the start: sockets of a socket unit, by name, and
// what an earlier process stored, which then looks like what an anchor hands back.
func (s *Supervisor) takeUpstream(st *saved) {
	s.up = &upstream{names: map[uint64]string{}}
	for _, f := range activation.Files(true) {
		key, r, ok := parseStoredName(f.Name())
		if !ok {
			if s.opt.Inherited == nil {
				s.opt.Inherited = map[string][]*os.File{}
			}
			s.opt.Inherited[f.Name()] = append(s.opt.Inherited[f.Name()], f)
			continue
		}
		if _, again := s.up.names[key]; again { // without kcmp(2) systemd cannot tell what it has already
			f.Close()
			continue
		}
		s.up.names[key] = f.Name()
		// The file's number goes on; its owner will be another os.File.
		// Not Fd, which makes it blocking, and with it every other process's copy.
		fd, err := readable.Dup(f)
		f.Close()
		if err != nil {
			continue
		}
		r.Key = key
		s.takeBack(st, r, fd)
	}
}

// storeUpstream makes the service manager keep exactly what must outlive this process.
// What it has already keeps its key: it would not take the same again, and removing
// first would leave a moment in which nobody has it.
func (s *Supervisor) storeUpstream(before *saved) {
	an := &s.anchored
	an.held = map[string]map[*os.File]uint64{}
	known := s.keys
	var notifyKey uint64
	if before != nil {
		maps.Copy(known, before.keys)
		for _, r := range before.FDs {
			if r.Kind == fdNotify { // whose file is not the one that is kept
				notifyKey = r.Key
			}
			if before.reexec && r.Key != 0 {
				s.up.names[r.Key] = storedName(r.Key, r)
			}
		}
	}
	for key := range s.up.names {
		an.last = max(an.last, key)
	}
	use := func(unit string, files []*os.File) {
		for _, f := range files {
			if key, ok := known[f]; ok {
				s.held(unit, f, key)
			}
		}
	}
	if s.notify != nil {
		if f, err := s.notify.File(); err == nil {
			s.up.notify = f
			if notifyKey != 0 {
				s.held("", f, notifyKey)
			}
		}
	}
	records, files := s.ownFDs(s.up.notify)
	use("", files)
	s.hold("", records, files)
	for _, u := range s.sorted() {
		_, files := u.fdsOf(false)
		use(u.name, files)
		s.holdUnit(u)
	}
	var stale []uint64
	for key := range s.up.names {
		used := false
		for _, files := range an.held {
			for _, k := range files {
				used = used || k == key
			}
		}
		if !used {
			stale = append(stale, key)
		}
	}
	if err := s.up.Update(nil, stale); err != nil {
		s.log.Warn("cannot remove from the service manager's descriptor store", "err", err)
	}
}

// held notes that a descriptor of a unit is kept already.
func (s *Supervisor) held(unit string, f *os.File, key uint64) {
	m := s.anchored.held[unit]
	if m == nil {
		m = map[*os.File]uint64{}
		s.anchored.held[unit] = m
	}
	m[f] = key
}

// pingUpstream answers the service manager's watchdog from the loop, whose turning is
// what it is to watch.
func (s *Supervisor) pingUpstream() {
	usec, err := strconv.ParseInt(os.Getenv("WATCHDOG_USEC"), 10, 64)
	if s.up == nil || err != nil || usec <= 0 {
		return
	}
	if pid := os.Getenv("WATCHDOG_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return
	}
	s.say("WATCHDOG=1")
	s.up.ping = s.afterFunc(time.Duration(usec)*time.Microsecond/3, s.pingUpstream)
}

// showUpstream passes the status line on: that of StatusUnit while it runs, else what
// has become of it.
func (s *Supervisor) showUpstream() {
	if s.up == nil || s.opt.StatusUnit == "" {
		return
	}
	u := s.units[s.opt.StatusUnit]
	if u == nil {
		return
	}
	text := u.StatusText
	if u.State.Active() != control.Active || text == "" {
		text = u.name + " is " + u.State.Active() + " (" + string(u.State) + ")"
		if u.Error != "" {
			text += ": " + u.Error
		}
	}
	text = strings.ToValidUTF8(strings.Join(strings.Fields(text), " "), "?")
	if text != s.up.status {
		s.up.status = text
		s.say("STATUS=" + text)
	}
}

// reloadingUpstream precedes a re-execution, whose end is READY=1 of the new program.
func (s *Supervisor) reloadingUpstream() {
	s.say(fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d\nSTATUS=becoming another program", monotonic()/1000))
}

func (s *Supervisor) closeUpstream() {
	if s.up != nil {
		s.up.ping.stop()
		if s.up.notify != nil {
			s.up.notify.Close()
		}
	}
}
