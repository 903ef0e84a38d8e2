package unitfile

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"mypr/supervisor/spec"
)

// Dir is a directory of unit files. Path is its name in messages.
type Dir struct {
	FS   fs.FS
	Path string
}

// NotFound is the error for a unit that no directory has a file for.
type NotFound struct {
	Name string
	Dirs []string
}

func (e *NotFound) Error() string {
	return fmt.Sprintf("unit %s not found in %s", e.Name, strings.Join(e.Dirs, ", "))
}

// Is makes it an fs.ErrNotExist.
func (e *NotFound) Is(target error) bool { return target == fs.ErrNotExist }

// Load finds and parses a unit. The directories are in rising priority: a file in a
// later one replaces the file of the same name in an earlier one, a drop-in adds to
// it. An instance ("job@7.service") is read from its own file if there is one, else
// from its template ("job@.service").
//
// Drop-ins are the files *.conf in NAME.d, for an instance in its template's
// directory too, and in the directories of the name cut after each dash
// ("a-b.service": "a-.service.d") and of the type ("service.d"). They apply after the
// unit file, sorted by file name. Of two with the same file name only the one in the
// most specific directory counts, in the latest of the directories given. An empty
// one, or a link to /dev/null, thereby switches a drop-in off; an empty unit file
// switches the unit off.
func Load(dirs []Dir, name string, opts Options) (*spec.Unit, []string, error) {
	if err := CheckName(name); err != nil {
		return nil, nil, err
	}
	if isTemplate(name) {
		return nil, nil, fmt.Errorf("%s is a template: name an instance of it, such as %s", name, strings.Replace(name, "@", "@1", 1))
	}
	main, err := findUnit(dirs, name)
	if err != nil {
		return nil, nil, err
	}
	if len(main.Data) == 0 {
		return nil, nil, &Error{File: main.Path, Err: errors.New("the unit is switched off (masked) by an empty file")}
	}
	files := []File{*main}
	dropins := map[string]File{} // by file name
	for _, dropdir := range dropinDirs(name) {
		for _, d := range slices.Backward(dirs) {
			entries, err := fs.ReadDir(d.FS, dropdir)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, nil, &Error{File: filepath.Join(d.Path, dropdir), Err: err}
			}
			for _, e := range entries {
				if _, have := dropins[e.Name()]; have || path.Ext(e.Name()) != ".conf" || strings.HasPrefix(e.Name(), ".") {
					continue
				}
				f, err := read(d, path.Join(dropdir, e.Name()))
				if err != nil {
					return nil, nil, err
				}
				dropins[e.Name()] = *f
			}
		}
	}
	names := make([]string, 0, len(dropins))
	for n, f := range dropins {
		if len(f.Data) > 0 {
			names = append(names, n)
		}
	}
	sort.Strings(names)
	for _, n := range names {
		files = append(files, dropins[n])
	}
	return Parse(name, files, opts)
}

// Names lists the units that the directories have files for, sorted; templates and
// switched-off units are not among them.
func Names(dirs []Dir) ([]string, error) {
	masked := map[string]bool{}
	for _, d := range dirs {
		entries, err := fs.ReadDir(d.FS, ".")
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, &Error{File: d.Path, Err: err}
		}
		for _, e := range entries {
			if CheckName(e.Name()) != nil || isTemplate(e.Name()) {
				continue
			}
			if info, err := fs.Stat(d.FS, e.Name()); err == nil && !info.IsDir() {
				masked[e.Name()] = info.Size() == 0
			}
		}
	}
	var names []string
	for n, off := range masked {
		if !off {
			names = append(names, n)
		}
	}
	sort.Strings(names)
	return names, nil
}

func findUnit(dirs []Dir, name string) (*File, error) {
	for _, n := range []string{name, template(name)} {
		for _, d := range slices.Backward(dirs) {
			if n == "" {
				continue
			}
			f, err := read(d, n)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			return f, err
		}
	}
	e := &NotFound{Name: name}
	for _, d := range dirs {
		e.Dirs = append(e.Dirs, d.Path)
	}
	return nil, e
}

// dropinDirs lists where drop-ins of a unit may be, the most specific first.
func dropinDirs(name string) []string {
	dirs := []string{name + ".d"}
	if t := template(name); t != "" {
		dirs = append(dirs, t+".d")
	}
	ext := filepath.Ext(name)
	prefix, _, _ := strings.Cut(strings.TrimSuffix(name, ext), "@")
	prefix = strings.TrimSuffix(prefix, "-")
	for i := strings.LastIndexByte(prefix, '-'); i > 0; i = strings.LastIndexByte(prefix[:i], '-') {
		dirs = append(dirs, prefix[:i+1]+ext+".d")
	}
	return append(dirs, ext[1:]+".d")
}

func read(d Dir, name string) (*File, error) {
	f := &File{Path: filepath.Join(d.Path, name)}
	info, err := fs.Stat(d.FS, name) // before opening it: to open a FIFO would block
	switch {
	case err != nil:
	case info.Mode()&fs.ModeCharDevice != 0: // a link to /dev/null is an empty file
		return f, nil
	case !info.Mode().IsRegular():
		err = errors.New("it is not a regular file")
	case info.Size() > MaxSize:
		err = fmt.Errorf("it has %d bytes, more than %d", info.Size(), MaxSize)
	default:
		f.Data, err = fs.ReadFile(d.FS, name)
	}
	if err != nil {
		return nil, &Error{File: f.Path, Err: err}
	}
	return f, nil
}
