package files

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

// Kinds of change.
const (
	opCreate  = "create"
	opReplace = "replace"
	opDelete  = "delete"
)

// change is one file of a transaction, as the journal records it before anything is
// touched. Paths are absolute and resolved.
type change struct {
	Op   string      `json:"op"`
	Path ospath.Text `json:"path"`
	// Temp is where new content is staged, beside Path.
	Temp ospath.Text `json:"temp,omitempty"`
	// Backup is a second name of the old file until the transaction has ended. The
	// only change of a transaction needs none: its rename is the whole commit.
	Backup ospath.Text `json:"backup,omitempty"`
	// Old is the file that is replaced or deleted.
	Old identity `json:"old,omitzero"`

	content []byte
	attrs   *attributes // of the file to look like; nil: a new file
}

// transaction changes several files so that all or none are changed, as far as a
// crash of this process goes; package documentation and docs/FILES.md say what else
// can happen.
//
// The journal is one file of JSON lines: the record before anything is touched, the
// identities of the staged files before the first rename, "done" after the last.
// Without "done" the transaction is undone, with it the backups are removed. Undoing
// looks at the files themselves to see how far it got, so it is the same code after
// a failure here and after a crash.
type transaction struct {
	s       *Service
	journal string
	file    *os.File
	record
}

type record struct {
	ID string `json:"id"`
	// Durable transactions are synced to disk at each step, so that a crash of the
	// machine is recovered like one of the process.
	Durable bool          `json:"durable,omitempty"`
	Changes []*change     `json:"changes"`
	Dirs    []ospath.Text `json:"dirs,omitempty"` // made for it, outermost first

	// Staged, one for each change, is the second line of the journal.
	Staged []identity `json:"-"`
	Done   bool       `json:"-"`
}

// apply makes all changes or none. An error of code recovery_needed means that even
// undoing failed: then the journal stays, for Recover.
func (s *Service) apply(changes []*change, dirs []string) error {
	var random [8]byte
	_, _ = rand.Read(random[:])
	id := hex.EncodeToString(random[:])
	t := &transaction{s: s, journal: filepath.Join(s.state, id+".json")}
	t.record = record{ID: id, Durable: len(changes) > 1, Changes: changes}
	for _, d := range dirs {
		t.Dirs = append(t.Dirs, ospath.Text(d))
	}
	for i, c := range changes {
		dir := filepath.Dir(string(c.Path))
		if c.Op != opDelete {
			c.Temp = ospath.Text(fmt.Sprintf("%s/.mypr-%s-%d.new", dir, id, i))
		}
		if c.Op == opDelete || c.Op == opReplace && len(changes) > 1 {
			c.Backup = ospath.Text(fmt.Sprintf("%s/.mypr-%s-%d.old", dir, id, i))
		}
	}
	err := t.begin()
	if err == nil {
		err = t.stage()
	}
	if err == nil {
		err = t.commit()
	}
	if t.file != nil {
		t.file.Close()
	}
	if err != nil {
		if kept, undo := t.undo(); undo != nil || len(kept) > 0 {
			e := rpc.Errorf(CodeRecoveryNeeded, "%v; and it could not be undone completely: %v", err, errors.Join(undo, errors.Join(kept...)))
			return e.WithHint("look at the files named, then restart the runtime: it tries again to undo what %s records", s.root.Display(t.journal))
		}
		return err
	}
	return nil
}

func (t *transaction) begin() error {
	return t.s.step("journal", func() error {
		if err := os.MkdirAll(t.s.state, 0o700); err != nil {
			return t.failed("record the change in", t.s.state, err)
		}
		var err error
		if t.file, err = os.OpenFile(t.journal, os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600); err != nil {
			return t.failed("record the change in", t.journal, err)
		}
		return t.write(t.record)
	})
}

// write appends a line to the journal.
func (t *transaction) write(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err := t.file.Write(append(line, '\n')); err != nil {
		return t.failed("record the change in", t.journal, err)
	}
	if !t.Durable {
		return nil
	}
	if err := t.file.Sync(); err != nil {
		return t.failed("record the change in", t.journal, err)
	}
	return syncDir(t.s.state)
}

func (t *transaction) failed(operation, path string, err error) error {
	return t.s.root.Error(operation, path, err)
}

// stage writes all new contents beside their targets.
func (t *transaction) stage() error {
	dirs := t.Dirs
	t.Dirs = nil
	for _, d := range dirs {
		err := t.s.step("mkdir", func() error { return os.Mkdir(string(d), 0o777) })
		if errors.Is(err, fs.ErrExist) {
			continue // somebody else was faster: then it is not ours to remove; what is wrong with it will show
		}
		if err != nil {
			return t.failed("create", string(d), err)
		}
		t.Dirs = append(t.Dirs, d)
		if err := t.s.userMode(string(d), 0o777, func(mode uint32) error { return unix.Chmod(string(d), mode) }); err != nil {
			return t.failed("create", string(d), err)
		}
	}
	t.Staged = make([]identity, len(t.Changes))
	for i, c := range t.Changes {
		if c.Temp == "" {
			continue
		}
		id, err := t.stageOne(c)
		if err != nil {
			return t.failed("write", string(c.Path), err)
		}
		t.Staged[i] = id
	}
	return t.s.step("journal", func() error { return t.write(map[string]any{"staged": t.Staged}) })
}

func (t *transaction) stageOne(c *change) (identity, error) {
	var f *os.File
	err := t.s.step("create", func() (err error) {
		f, err = os.OpenFile(string(c.Temp), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		return err
	})
	if err != nil {
		return identity{}, err
	}
	defer f.Close()
	if err := t.s.step("write", func() error { _, err := f.Write(c.content); return err }); err != nil {
		return identity{}, err
	}
	err = t.s.step("attributes", func() error {
		if c.attrs != nil {
			return c.attrs.give(f)
		}
		return t.s.userMode(string(c.Temp), 0o666, func(mode uint32) error { return f.Chmod(os.FileMode(mode)) })
	})
	if err != nil {
		return identity{}, err
	}
	if err := t.s.step("sync", f.Sync); err != nil {
		return identity{}, err
	}
	var st unix.Stat_t
	if err := fstat(f, &st); err != nil {
		return identity{}, err
	}
	return identify(&st), nil
}

// commit puts the staged files in place.
func (t *transaction) commit() error {
	for _, c := range t.Changes {
		if err := t.commitOne(c); err != nil {
			return t.failed(c.Op, string(c.Path), err)
		}
	}
	if t.Durable {
		if err := t.s.step("syncdir", t.syncDirs); err != nil {
			return err
		}
		if err := t.s.step("journal", func() error { return t.write(map[string]any{"done": true}) }); err != nil {
			return err
		}
	}
	// From here on the change has been made: what cannot be cleaned up now is left to Recover.
	_ = t.finish()
	return nil
}

func (t *transaction) commitOne(c *change) error {
	path, temp, backup := string(c.Path), string(c.Temp), string(c.Backup)
	if c.Op == opCreate {
		err := t.s.step("rename", func() error { return moveNew(temp, path) })
		if errors.Is(err, fs.ErrExist) {
			return rpc.Errorf(rpc.CodeConflict, "cannot create %s: somebody else just did", t.s.root.Display(path)).WithHint("read it, then decide")
		}
		return err
	}
	if err := t.unchanged(c, path); err != nil {
		return err
	}
	if c.Op == opDelete {
		return t.s.step("rename", func() error { return moveNew(path, backup) })
	}
	if backup != "" {
		err := t.s.step("link", func() error { return os.Link(path, backup) })
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EMLINK) || errors.Is(err, unix.EXDEV) {
			// No hard links here: for a moment the file has no name.
			err = t.s.step("rename", func() error { return moveNew(path, backup) })
		}
		if err != nil {
			return err
		}
		// What was kept must be what was read, or somebody else's new version would get lost.
		if err := t.unchanged(c, backup); err != nil {
			return err
		}
	}
	return t.s.step("rename", func() error { return os.Rename(temp, path) })
}

func (t *transaction) unchanged(c *change, at string) error {
	now, ok, err := lstatIdentity(at)
	if err != nil {
		return err
	}
	if !ok || now != c.Old {
		return rpc.Errorf(rpc.CodeConflict, "cannot %s %s: another program changed it meanwhile", c.Op, t.s.root.Display(string(c.Path))).
			WithHint("read it again and repeat the change on what it is now")
	}
	return nil
}

// moveNew renames without replacing.
func moveNew(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if err != unix.EINVAL && err != unix.ENOSYS {
		return err
	}
	// This file system cannot; a link never replaces either.
	if err := os.Link(from, to); err != nil {
		return err
	}
	return os.Remove(from)
}

// syncDirs makes the renames durable.
func (t *transaction) syncDirs() error {
	seen := map[string]bool{}
	for _, c := range t.Changes {
		seen[filepath.Dir(string(c.Path))] = true
	}
	for _, d := range t.Dirs {
		seen[filepath.Dir(string(d))] = true
	}
	for d := range seen {
		if err := syncDir(d); err != nil {
			return t.failed("sync", d, err)
		}
	}
	return nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil && !errors.Is(err, unix.EINVAL) { // some file systems cannot sync directories
		return err
	}
	return nil
}

// finish removes what a committed transaction kept for undoing.
func (t *transaction) finish() error {
	var errs []error
	for _, c := range t.Changes {
		if c.Backup == "" {
			continue
		}
		if err := t.s.step("cleanup", func() error { return remove(string(c.Backup)) }); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	return t.s.step("end", func() error { return remove(t.journal) })
}

// remove is os.Remove for what may be gone already.
func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// undo brings back what was, newest change first. kept names the files that somebody
// else changed after we did: they are left as they are, with the old version beside
// them. err means that undo is to be tried again; then the journal stays.
func (t *transaction) undo() (kept []error, err error) {
	var errs []error
	for i, c := range slices.Backward(t.Changes) {
		var staged identity
		if i < len(t.Staged) {
			staged = t.Staged[i]
		}
		k, err := t.undoOne(c, staged)
		if k != nil {
			kept = append(kept, k)
		}
		if err == nil && c.Temp != "" {
			err = t.s.step("undo", func() error { return remove(string(c.Temp)) })
		}
		if err != nil {
			errs = append(errs, t.failed("restore", string(c.Path), err))
		}
	}
	for _, d := range slices.Backward(t.Dirs) {
		// Others may have put files there: then it stays.
		if err := os.Remove(string(d)); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, fs.ErrExist) {
			errs = append(errs, t.failed("remove", string(d), err))
		}
	}
	if len(errs) > 0 {
		return kept, errors.Join(errs...)
	}
	if t.Durable {
		_ = t.syncDirs() // directories that were made are gone again
	}
	return kept, t.s.step("undo", func() error { return remove(t.journal) })
}

func (t *transaction) undoOne(c *change, staged identity) (kept, err error) {
	path, backup := string(c.Path), string(c.Backup)
	now, there, err := lstatIdentity(path)
	if err != nil && !errors.Is(err, unix.ENOTDIR) {
		return nil, err
	}
	ours := there && staged != (identity{}) && now == staged
	if c.Op == opCreate {
		switch {
		case ours:
			return nil, t.s.step("undo", func() error { return remove(path) })
		case there && staged != (identity{}) && now.Dev == staged.Dev && now.Ino == staged.Ino:
			return fmt.Errorf("%s was created, then changed by somebody else, and was left there", t.s.root.Display(path)), nil
		}
		return nil, nil
	}
	if backup == "" {
		return nil, nil // the only change: its rename is the commit
	}
	old, saved, err := lstatIdentity(backup)
	switch {
	case err != nil:
		return nil, err
	case !saved:
		return nil, nil // it did not get that far
	case there && now.Dev == old.Dev && now.Ino == old.Ino:
		return nil, t.s.step("undo", func() error { return remove(backup) }) // two names of one file
	case ours:
		return nil, t.s.step("undo", func() error { return os.Rename(backup, path) })
	case !there:
		return nil, t.s.step("undo", func() error { return moveNew(backup, path) })
	}
	// Somebody else's file is there now. Keep both: theirs in place, the old one in our directory.
	safe := filepath.Join(t.s.state, "kept-"+t.ID+"-"+filepath.Base(path))
	if err := os.Rename(backup, safe); err != nil {
		safe = backup // another file system: it stays beside the file
	}
	return fmt.Errorf("%s was changed by somebody else and was left as it is; its content before is in %s",
		t.s.root.Display(path), t.s.root.Display(safe)), nil
}

// Report is what Recover did about one change that a crash had cut off.
type Report struct {
	ID      string        `json:"id"`
	Outcome string        `json:"outcome"` // undone, completed, kept, failed
	Paths   []ospath.Text `json:"paths"`
	Message string        `json:"message"` // for people; says what to do where something is left to do
}

// Recover ends the changes that a process which died left in the middle: those that
// had been committed are completed, all others undone. No other process may be
// writing through this package in this workspace.
func (s *Service) Recover(ctx context.Context) ([]Report, error) {
	journals, err := filepath.Glob(filepath.Join(s.state, "*.json"))
	if err != nil {
		return nil, err
	}
	slices.Sort(journals)
	var reports []Report
	for _, j := range journals {
		if ctx.Err() != nil {
			return reports, ctx.Err()
		}
		reports = append(reports, s.recoverOne(j))
	}
	return reports, nil
}

func (s *Service) recoverOne(journal string) Report {
	r := Report{ID: strings.TrimSuffix(filepath.Base(journal), ".json"), Outcome: "failed"}
	t := &transaction{s: s, journal: journal}
	raw, err := os.ReadFile(journal)
	if err != nil {
		r.Message = fmt.Sprintf("cannot read the journal %s: %v", journal, err)
		return r
	}
	if t.record, err = parseJournal(raw); err != nil {
		// Its first line is synced before anything is touched, or, for a change of one
		// file, written in one piece: an unfinished one stands for nothing.
		r.Outcome, r.Message = "undone", fmt.Sprintf("the journal %s was cut off before the change began (%v)", journal, err)
		if err := remove(journal); err != nil {
			r.Outcome, r.Message = "failed", err.Error()
		}
		return r
	}
	for _, c := range t.Changes {
		r.Paths = append(r.Paths, s.root.Display(string(c.Path)))
	}
	if len(t.Changes) == 1 && len(t.Staged) == 1 && t.Changes[0].Backup == "" {
		if now, there, err := lstatIdentity(string(t.Changes[0].Path)); err == nil && there && now == t.Staged[0] {
			t.Done = true
		}
	}
	if t.Done {
		if err := t.finish(); err != nil {
			r.Message = fmt.Sprintf("the change was made, but what it kept cannot be removed: %v", err)
			return r
		}
		r.Outcome, r.Message = "completed", "the change had been made when the runtime ended"
		return r
	}
	kept, err := t.undo()
	switch {
	case err != nil:
		r.Message = fmt.Sprintf("a change that was cut off cannot be undone: %v; mend that and restart the runtime", err)
	case len(kept) > 0:
		r.Outcome, r.Message = "kept", fmt.Sprintf("a change that was cut off was undone, except: %v; compare, then remove the copy", errors.Join(kept...))
	default:
		r.Outcome, r.Message = "undone", "the change was cut off and has been undone: the files are as they were"
	}
	return r
}

// parseJournal reads the lines that are whole. Only the first one must be.
func parseJournal(raw []byte) (record, error) {
	var rec record
	lines := bytes.SplitAfter(raw, newline)
	if !bytes.HasSuffix(lines[0], newline) {
		return rec, errors.New("its first line has no end")
	}
	if err := json.Unmarshal(lines[0], &rec); err != nil {
		return rec, err
	}
	for _, c := range rec.Changes {
		if c == nil {
			return rec, errors.New("it has an empty change")
		}
	}
	for _, l := range lines[1:] {
		var more struct {
			Staged []identity `json:"staged"`
			Done   bool       `json:"done"`
		}
		if !bytes.HasSuffix(l, newline) || json.Unmarshal(l, &more) != nil {
			break
		}
		if more.Staged != nil {
			rec.Staged = more.Staged
		}
		rec.Done = rec.Done || more.Done
	}
	return rec, nil
}

// dirsFor merges the directories that several targets need, outermost first.
func dirsFor(targets ...*target) []string {
	var all []string
	for _, t := range targets {
		all = append(all, t.missing...)
	}
	slices.SortFunc(all, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	return slices.Compact(all)
}
