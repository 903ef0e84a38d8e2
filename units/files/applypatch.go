package files

import (
	"context"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

// ApplyPatchParams of fs.apply_patch. ExpectedHashes maps paths to revisions; null
// requires that nothing is at the path.
type ApplyPatchParams struct {
	Patch          ospath.Text             `json:"patch"`
	ExpectedHashes map[ospath.Text]*string `json:"expected_hashes"`
	DryRun         bool                    `json:"dry_run"`
	MaxDiffBytes   int                     `json:"max_diff_bytes"`
}

// ApplyPatchResult of fs.apply_patch; with DryRun, of what it would do.
type ApplyPatchResult struct {
	Files         []FileChange `json:"files"`
	DryRun        bool         `json:"dry_run"`
	Diff          string       `json:"diff"`
	DiffTruncated bool         `json:"diff_truncated"`
	Warnings      []string     `json:"warnings,omitempty"`
}

// FileChange is one file of a patch.
type FileChange struct {
	Path        ospath.Text `json:"path"`           // where it is afterwards; of a deleted file, where it was
	Action      string      `json:"action"`         // add, update, delete, move
	From        ospath.Text `json:"from,omitempty"` // of a move
	OldRevision *string     `json:"old_revision"`
	NewRevision *string     `json:"new_revision"`
	Added       int         `json:"added"` // lines
	Removed     int         `json:"removed"`
}

// maxPatchText bounds the text of a patch.
const maxPatchText = 16 << 20

// ApplyPatch changes several files, all or none. Everything is checked before the
// first file is touched.
func (s *Service) ApplyPatch(ctx context.Context, p ApplyPatchParams) (*ApplyPatchResult, error) {
	if err := checkDiffBytes(p.MaxDiffBytes); err != nil {
		return nil, err
	}
	if len(p.Patch) > maxPatchText {
		return nil, rpc.Errorf(rpc.CodeTooLarge, "the patch has %d bytes, the limit is %d", len(p.Patch), maxPatchText).WithHint("apply it in parts")
	}
	for path, rev := range p.ExpectedHashes {
		if err := checkRevision("expected_hashes of "+string(path), rev); err != nil {
			return nil, err
		}
	}
	sections, err := parsePatch(string(p.Patch))
	if err != nil {
		return nil, err
	}
	job := &patchJob{s: s, sections: sections, params: &p}
	if err := job.resolve(); err != nil {
		return nil, err
	}
	keys := make([]string, 0, len(job.places))
	for k := range job.places {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	release, err := s.locks.acquire(ctx, keys)
	if err != nil {
		return nil, err
	}
	defer release()
	// What was found before the locks were held may have changed.
	before := job.places
	if err := job.resolve(); err != nil {
		return nil, err
	}
	for k := range job.places {
		if before[k] == nil {
			return nil, rpc.Errorf(rpc.CodeConflict, "the directories of %s changed meanwhile; nothing was changed", s.root.Display(job.places[k].path)).WithHint("try again")
		}
	}
	r, err := job.plan(ctx)
	if err != nil || p.DryRun {
		return r, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(job.changes) == 0 {
		return r, nil
	}
	var targets []*target
	for _, t := range job.places {
		targets = append(targets, t)
	}
	if err := s.apply(job.changes, dirsFor(targets...)); err != nil {
		return nil, err
	}
	for _, c := range job.changes {
		for _, w := range c.warnings(job.olds[string(c.Path)]) {
			r.Warnings = append(r.Warnings, string(s.root.Display(string(c.Path)))+": "+w)
		}
	}
	return r, nil
}

// patchJob is one call of ApplyPatch.
type patchJob struct {
	s        *Service
	params   *ApplyPatchParams
	sections []section
	from, to []*target          // of each section; to is nil without a move
	places   map[string]*target // by key
	changes  []*change
	olds     map[string]*unix.Stat_t // by path, of replaced files
}

// resolve finds the places of all paths and refuses two names of one file.
func (j *patchJob) resolve() error {
	j.from, j.to = nil, nil
	j.places = map[string]*target{}
	inodes := map[[2]uint64]string{}
	add := func(path string, line int) (*target, error) {
		t, err := j.s.resolve("patch", path, false)
		if err != nil {
			return nil, err
		}
		if j.places[t.key] != nil {
			return nil, invalid("line %d of the patch: %s is named twice", line, path).WithHint("put all changes of a file into one section")
		}
		j.places[t.key] = t
		if t.st != nil {
			id := [2]uint64{uint64(t.st.Dev), t.st.Ino}
			if other, ok := inodes[id]; ok {
				return nil, invalid("line %d of the patch: %s and %s are hard links of one file", line, path, other).WithHint("change one of them; replacing it separates it from the other")
			}
			inodes[id] = path
		}
		return t, nil
	}
	for _, s := range j.sections {
		from, err := add(s.path, s.line)
		if err != nil {
			return err
		}
		var to *target
		if s.moveTo != "" {
			if to, err = add(s.moveTo, s.line); err != nil {
				return err
			}
		}
		j.from, j.to = append(j.from, from), append(j.to, to)
	}
	// A new directory must not be where the patch puts a file.
	files := map[string]bool{}
	for _, t := range j.places {
		files[t.path] = true
	}
	for _, t := range j.places {
		for _, d := range t.missing {
			if files[d] {
				return invalid("the patch makes %s both a file and a directory", j.s.root.Display(d))
			}
		}
	}
	return nil
}

// plan checks everything and works out the new contents. It touches nothing.
func (j *patchJob) plan(ctx context.Context) (*ApplyPatchResult, error) {
	r := &ApplyPatchResult{Files: []FileChange{}, DryRun: j.params.DryRun}
	var diffs strings.Builder
	revisions := map[string]*string{} // by key
	loadedFiles := make([]*loaded, len(j.sections))
	j.olds = map[string]*unix.Stat_t{}
	var sum int64
	for i := range j.sections {
		s, t := &j.sections[i], j.from[i]
		name := j.s.root.Display(t.path)
		if s.action == actionAdd {
			revisions[t.key] = nil
			if err := j.mustBeFree(t); err != nil {
				return nil, err
			}
			continue
		}
		if t.st == nil {
			return nil, j.s.root.Error(s.action, t.path, unix.ENOENT)
		}
		old, err := j.s.load(ctx, s.action, t, !j.params.DryRun)
		if err != nil {
			return nil, err
		}
		if sum += int64(len(old.data)); sum > MaxPatchSum {
			return nil, rpc.Errorf(rpc.CodeTooLarge, "the files of the patch have more than %d bytes together, with %s", MaxPatchSum, name).WithHint("apply it in parts")
		}
		loadedFiles[i], revisions[t.key] = old, &old.revision
		if to := j.to[i]; to != nil {
			revisions[to.key] = nil
			if err := j.mustBeFree(to); err != nil {
				return nil, err
			}
		}
	}
	if err := j.checkHashes(revisions); err != nil {
		return nil, err
	}
	for i := range j.sections {
		diff, err := j.planOne(&j.sections[i], j.from[i], j.to[i], loadedFiles[i], r)
		if err != nil {
			return nil, err
		}
		if diffs.Len() <= j.params.MaxDiffBytes { // the rest is cut anyway
			diffs.WriteString(diff)
		}
		loadedFiles[i] = nil
	}
	r.Diff, r.DiffTruncated = bound(diffs.String(), j.params.MaxDiffBytes)
	return r, nil
}

func (j *patchJob) planOne(s *section, t, to *target, old *loaded, r *ApplyPatchResult) (diff string, err error) {
	name := j.s.root.Display(t.path)
	f := FileChange{Path: name, Action: s.action}
	var before, after string
	oldName, newName := name, name
	if old != nil {
		f.OldRevision = &old.revision
		before = string(old.data)
	}
	switch s.action {
	case actionAdd:
		after, oldName = s.text(), ""
		if invalidAt([]byte(after)) >= 0 {
			return "", j.notText(name)
		}
		j.changes = append(j.changes, &change{Op: opCreate, Path: ospath.Text(t.path), content: []byte(after)})
	case actionDelete:
		newName = ""
		j.changes = append(j.changes, &change{Op: opDelete, Path: ospath.Text(t.path), Old: identify(t.st)})
	case actionUpdate:
		if after = before; len(s.hunks) > 0 {
			if before, err = decodeText(nil, "update", name, old.data); err != nil {
				return "", err
			}
			if after, err = s.update(before); err != nil {
				return "", err
			}
			if invalidAt([]byte(after)) >= 0 {
				return "", j.notText(name)
			}
		}
		if to == nil {
			if after == before {
				break // replaced by the same: nothing to write
			}
			j.olds[t.path] = t.st
			j.changes = append(j.changes, &change{Op: opReplace, Path: ospath.Text(t.path), Old: identify(t.st), content: []byte(after), attrs: old.attrs})
			break
		}
		f.Action, f.From, f.Path = actionMove, name, j.s.root.Display(to.path)
		newName = f.Path
		j.changes = append(j.changes,
			&change{Op: opCreate, Path: ospath.Text(to.path), content: []byte(after), attrs: old.attrs},
			&change{Op: opDelete, Path: ospath.Text(t.path), Old: identify(t.st)})
	}
	if s.action != actionDelete {
		rev := revisionOf([]byte(after))
		f.NewRevision = &rev
	}
	if len(after) > MaxEditBytes {
		return "", rpc.Errorf(rpc.CodeTooLarge, "the patch would make %s larger than %d bytes", f.Path, MaxEditBytes)
	}
	if invalidAt([]byte(before)) < 0 {
		diff, f.Added, f.Removed = unified(oldName, newName, before, after)
	} else {
		diff = "Binary file " + string(name) + " is deleted or moved\n"
	}
	if f.Action == actionMove {
		diff = "rename from " + string(f.From) + "\nrename to " + string(f.Path) + "\n" + diff
	}
	r.Files = append(r.Files, f)
	return strings.ToValidUTF8(diff, "\uFFFD"), nil
}

func (j *patchJob) notText(name ospath.Text) error {
	return rpc.Errorf(CodeEncoding, "the patch of %s has a lone surrogate, which UTF-8 does not have; nothing was changed", name).
		WithHint("write bytes with ws.fs.write_bytes")
}

func (j *patchJob) mustBeFree(t *target) error {
	if t.st == nil {
		return nil
	}
	return rpc.Errorf(rpc.CodeConflict, "cannot create %s: it exists; nothing was changed", j.s.root.Display(t.path)).
		WithHint("update it, or delete it with a patch of its own first")
}

// checkHashes compares with what the caller expects, for every path it names.
func (j *patchJob) checkHashes(revisions map[string]*string) error {
	for path, want := range j.params.ExpectedHashes {
		t, err := j.s.resolve("patch", string(path), false)
		if err != nil {
			return err
		}
		have, known := revisions[t.key]
		name := j.s.root.Display(t.path)
		switch {
		case !known:
			return invalid("expected_hashes names %s, which the patch does not touch", name).WithHint("name the paths as the patch does")
		case want == nil && have != nil:
			return rpc.Errorf(rpc.CodeConflict, "%s exists, and expected_hashes says that it does not; nothing was changed", name)
		case want != nil && (have == nil || *have != *want):
			return mismatch(name, *want, have)
		}
	}
	return nil
}
