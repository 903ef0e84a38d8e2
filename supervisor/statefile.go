package supervisor

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/cgroup"
	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

// The state file is a log of JSON lines: a header, and for every change of a unit its
// record, with its definition before its first one. A later line
// stands in place of an earlier one. Each change costs one write; when the log has
// grown it is written anew and renamed over the old one. Nothing is synced: the file
// is of use only as long as the processes in it live, and they do not outlive the
// machine.

// header is the first line of a state file and of the memfd of a re-execution.
type header struct {
	Version  int        `json:"version"`
	Instance string     `json:"instance"`
	Started  time.Time  `json:"started"`
	Self     procRecord `json:"self"`
	Boot     string     `json:"boot"`
	PIDNS    string     `json:"pidns"`
	Init     uint64     `json:"init,omitempty"`   // start time of the first process of the pid namespace
	Cgroup   string     `json:"cgroup,omitempty"` // directory of the tree
	FDs      []fdRecord `json:"fds,omitempty"`    // re-execution only
}

const stateVersion = 1

// line is one line of the log after the header.
type line struct {
	Def  *spec.Unit `json:"def,omitempty"`
	Unit *record    `json:"unit,omitempty"`
	Gone string     `json:"gone,omitempty"`
}

type stateFile struct {
	path    string
	f       *os.File
	size    int64 // now
	base    int64 // after the last rewrite
	defined map[string]*spec.Unit
}

// minRewrite keeps a small log from being written anew all the time. reserve is the room
// on the disk that a log is given beyond its end, so that changes can still be written
// when the disk is full.
const (
	minRewrite = 256 << 10
	reserve    = 2 * minRewrite
)

// rewriteDelay is how long after the disk refused a state file is written again, if no
// change comes first.
const rewriteDelay = 10 * time.Second

// snapshot writes everything as a new log.
func (sf *stateFile) snapshot(b *bytes.Buffer, h header, units []*unit) error {
	sf.defined = map[string]*spec.Unit{}
	if err := appendLine(b, h); err != nil {
		return err
	}
	for _, u := range units {
		if err := sf.appendUnit(b, u); err != nil {
			return err
		}
	}
	return nil
}

// rewrite puts a new log in place of the old one, which stays if that fails.
func (sf *stateFile) rewrite(h header, units []*unit) error {
	var b bytes.Buffer
	defined := sf.defined
	if err := sf.snapshot(&b, h, units); err != nil {
		sf.defined = defined
		return err
	}
	tmp := sf.path + ".new"
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err == nil {
		if _, err = f.Write(b.Bytes()); err == nil {
			err = os.Rename(tmp, sf.path)
		}
		if err != nil {
			f.Close()
			_ = os.Remove(tmp)
		}
	}
	if err != nil {
		sf.defined = defined
		return err
	}
	if sf.f != nil {
		sf.f.Close()
	}
	sf.f, sf.size = f, int64(b.Len())
	sf.base = sf.size
	_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, sf.size, reserve) // where the file system can
	return nil
}

// append adds lines to the log, all or none.
func (sf *stateFile) append(lines []byte) error {
	_, err := sf.f.Write(lines)
	if err != nil {
		_ = sf.f.Truncate(sf.size)
		return err
	}
	sf.size += int64(len(lines))
	return nil
}

func appendLine(b *bytes.Buffer, v any) error {
	e := json.NewEncoder(b)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

func (sf *stateFile) appendUnit(b *bytes.Buffer, u *unit) error {
	u.Transient = u.transient
	if sf.defined[u.name] != u.def {
		if err := appendLine(b, line{Def: u.def}); err != nil {
			return err
		}
		sf.defined[u.name] = u.def
	}
	return appendLine(b, line{Unit: &u.record})
}

// persist writes what has changed since the last time. Without a working state file
// the supervisor goes on: it would only not be adopted.
func (s *Supervisor) persist() {
	if len(s.dirty) == 0 && len(s.gone) == 0 {
		return
	}
	if s.keeper() != nil {
		for _, name := range s.gone {
			s.hold(name, nil, nil)
		}
		for u := range s.dirty {
			if s.units[u.name] == u {
				s.holdUnit(u)
			}
		}
	}
	if s.file == nil {
		clear(s.dirty)
		s.gone = nil
		return
	}
	gone, dirty := s.gone, s.dirty
	s.gone, s.dirty = nil, map[*unit]struct{}{}
	sf := s.file
	if s.stateRetry != nil { // the log lacks more than this
		s.writeState()
		return
	}
	var b bytes.Buffer
	var err error
	for _, name := range gone {
		delete(sf.defined, name)
		err = errors.Join(err, appendLine(&b, line{Gone: name}))
	}
	for u := range dirty {
		if s.units[u.name] == u {
			err = errors.Join(err, sf.appendUnit(&b, u))
		}
	}
	if err == nil {
		err = sf.append(b.Bytes())
	}
	if err != nil {
		s.writeState()
	} else if sf.size > minRewrite && sf.size > 4*sf.base {
		_ = sf.rewrite(s.header(), s.sorted()) // if not, the log is long, and whole
	}
}

// writeState writes the state file anew, again and again until that succeeds. Meanwhile
// the one of before stands: what it says of other units than those that changed is true.
func (s *Supervisor) writeState() {
	err := s.file.rewrite(s.header(), s.sorted())
	if err != nil && s.stateRetry == nil {
		s.log.Error("cannot write the state file; a next supervisor could not adopt what is new", "path", s.file.path, "err", err)
	}
	s.stateRetry.stop()
	s.stateRetry = nil
	if err != nil {
		s.stateRetry = s.afterFunc(rewriteDelay, s.writeState)
	}
}

func (s *Supervisor) header() header {
	start, _ := process.StartTime(os.Getpid())
	h := header{
		Version: stateVersion, Instance: s.opt.Instance, Started: s.started, Self: procRecord{os.Getpid(), start},
		Boot: bootID(), PIDNS: pidNamespace(), Init: initStart(),
	}
	if s.tree != nil {
		h.Cgroup = s.tree.Dir
	}
	return h
}

func bootID() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b))
}

func pidNamespace() string {
	s, _ := os.Readlink("/proc/self/ns/pid")
	return strings.TrimSuffix(strings.TrimPrefix(s, "pid:["), "]")
}

// initStart is when the first process of this pid namespace started, 0 when that cannot
// be seen (hidepid). The number of a pid namespace is given to another one as soon as it
// is free, and a restarted container gets that of the one before as a rule.
func initStart() uint64 {
	start, _ := process.StartTime(1)
	return start
}

// here reports whether the pids of the state mean what they meant.
func (st *saved) here() bool {
	init := initStart()
	return st.Boot == bootID() && st.PIDNS == pidNamespace() && (init == st.Init || init == 0 || st.Init == 0)
}

// Orphans are the units of which processes run on although the supervisor that wrote the
// state file at path is gone and no other has taken over.
func Orphans(path string) (names []string) {
	st, err := readState(path)
	if err != nil || st == nil || !st.here() || st.alive() {
		return nil
	}
	for _, u := range st.units {
		up := u.Main.runs() || u.Control.runs()
		for _, b := range append([]*boxRecord{u.Box}, u.Lingering...) {
			up = up || b != nil && (b.Shim.runs() || b.Cgroup != "" && cgroup.Populated(filepath.Join(st.Cgroup, b.Cgroup)))
		}
		if up {
			names = append(names, u.Name)
		}
	}
	return names
}

// saved is what a state file says.
type saved struct {
	header
	units  []*savedUnit
	reexec bool
	keys   map[*os.File]uint64 // of what was handed out and a service manager keeps
}

type savedUnit struct {
	record
	def *spec.Unit
}

// readState reads a state file; nil when there is none. A last line that was cut off
// is ignored: what it would have said was not answered to anybody.
func readState(path string) (*saved, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return parseState(b)
}

func parseState(b []byte) (*saved, error) {
	r := bufio.NewReader(bytes.NewReader(b))
	first, err := r.ReadBytes('\n')
	if err != nil {
		return nil, errors.New("the state file has no header")
	}
	st := &saved{}
	if err := json.Unmarshal(first, &st.header); err != nil {
		return nil, fmt.Errorf("the header of the state file: %w", err)
	}
	if st.Version != stateVersion {
		return nil, fmt.Errorf("the state file has version %d, this program writes %d", st.Version, stateVersion)
	}
	index := map[string]int{}
	defs := map[string]*spec.Unit{}
	for {
		raw, err := r.ReadBytes('\n')
		if err != nil {
			break
		}
		var l line
		if err := json.Unmarshal(raw, &l); err != nil {
			return nil, fmt.Errorf("the state file is damaged: %w", err)
		}
		switch {
		case l.Def != nil:
			l.Def.RestoreRaw()
			defs[l.Def.Name] = l.Def
		case l.Unit != nil && l.Unit.Name != "":
			u := &savedUnit{record: *l.Unit, def: defs[l.Unit.Name]}
			if i, ok := index[u.Name]; ok {
				st.units[i] = u
			} else {
				index[u.Name] = len(st.units)
				st.units = append(st.units, u)
			}
		case l.Gone != "":
			delete(defs, l.Gone)
			if i, ok := index[l.Gone]; ok {
				st.units[i] = nil
				delete(index, l.Gone)
			}
		}
	}
	live := st.units[:0]
	for _, u := range st.units {
		if u != nil {
			live = append(live, u)
		}
	}
	st.units = live
	return st, nil
}

// alive reports whether the supervisor that wrote the state still runs. One that died
// may be a zombie for long: whoever inherited it reaps it when it likes.
func (st *saved) alive() bool {
	if st.Self.PID == os.Getpid() || !st.here() {
		return false
	}
	return st.Self.runs()
}

// runs reports whether the process is there and has not ended.
func (p *procRecord) runs() bool {
	if p == nil || p.PID == 0 {
		return false
	}
	start, err := process.StartTime(p.PID)
	return err == nil && start == p.Start && process.Runs(p.PID)
}
