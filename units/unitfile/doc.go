// Package unitfile reads unit files: systemd's syntax (systemd.syntax(7)) and the
// directives of docs/units.md, into the supervisor's typed spec.
//
// It owns lexing, quoting, specifiers, the values of every directive, the search for
// unit files, templates and drop-ins, and the checks that need no running system. It
// does not own the spec's types (package supervisor/spec) or their effect.
//
// Where systemd warns, ignores a bad value and goes on with a default, this package
// fails with an *Error that names file, line and key: a limit that was mistyped must
// not silently be no limit. Unknown keys and sections are warnings, as in systemd.
package unitfile

import "fmt"

// Error is a unit file that cannot be used.
type Error struct {
	File string
	Line int    // 0: the error is about the file as a whole
	Key  string // "" for a line that is no assignment
	Err  error
}

func (e *Error) Error() string {
	s := e.File
	if e.Line > 0 {
		s = fmt.Sprintf("%s:%d", s, e.Line)
	}
	if e.Key != "" {
		s += ": " + e.Key + "="
	}
	return s + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }
