// Package units is what this product runs under its supervisor: the built-in unit
// files and the loader that lets a user and a workspace change them.
//
// It owns the files and where their overrides are looked for. It does not own their
// syntax (package units/unitfile) and it runs nothing (package supervisor).
package units

import (
	"embed"
	"os"
	"path/filepath"

	"mypr/supervisor/spec"
	"mypr/units/unitfile"
)

//go:embed *.service *.socket *.target
var builtin embed.FS

// Units that are incomplete as files: the manager completes them. A template of
// defaults is no unit of its own, so Names leaves it out.
const (
	Kernel      = "kernel.service"
	JobDefaults = "job.service"
)

// Specifiers of our own, by letter (docs/units.md).
const (
	SpecExecutable = 'x' // path of this program
	SpecWorkspace  = 'R' // the workspace directory
	SpecStem       = 'r' // "<runtime directory>/<workspace hash>": a socket's path without its suffix
)

// Loader reads units from the built-in files, the user's directory and the
// workspace's, each of which overrides or adds to the ones before. It keeps nothing:
// what is on disk at a call counts. The zero value has the built-in files only.
type Loader struct {
	Dirs       []string // in rising priority; those that do not exist are skipped
	Specifiers map[byte]string
}

// NewLoader is the loader for a workspace directory: the user's units are in
// $XDG_CONFIG_HOME/mypr/units, the workspace's in .mypr/units.
func NewLoader(workspace, executable, stem string) *Loader {
	l := &Loader{Specifiers: map[byte]string{SpecExecutable: executable, SpecWorkspace: workspace, SpecStem: stem}}
	if config, err := os.UserConfigDir(); err == nil {
		l.Dirs = append(l.Dirs, filepath.Join(config, "mypr", "units"))
	}
	l.Dirs = append(l.Dirs, filepath.Join(workspace, ".mypr", "units"))
	return l
}

func (l *Loader) dirs() []unitfile.Dir {
	dirs := []unitfile.Dir{{FS: builtin, Path: "builtin"}}
	for _, d := range l.Dirs {
		dirs = append(dirs, unitfile.Dir{FS: os.DirFS(d), Path: d})
	}
	return dirs
}

// Load reads one unit. The warnings are "file:line: text"; the error is a
// *unitfile.Error, a *unitfile.NotFound, or says what is wrong with the name.
func (l *Loader) Load(name string) (*spec.Unit, []string, error) {
	return unitfile.Load(l.dirs(), name, unitfile.Options{
		Specifiers:  l.Specifiers,
		NoExecStart: name == Kernel || name == JobDefaults,
	})
}

// Names lists the units that Load finds, sorted.
func (l *Loader) Names() ([]string, error) {
	names, err := unitfile.Names(l.dirs())
	kept := names[:0]
	for _, n := range names {
		if n != JobDefaults {
			kept = append(kept, n)
		}
	}
	return kept, err
}
