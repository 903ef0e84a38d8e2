package unitfile

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"mypr/supervisor/spec"
)

// Options says what a unit file may refer to.
type Options struct {
	// Specifiers adds to or replaces the specifiers of docs/units.md, by letter.
	Specifiers map[byte]string
	// NoExecStart accepts a service without ExecStart=: the program that loads it
	// fills one in before the unit is started.
	NoExecStart bool
}

// Suffixes of unit names, and so the kinds of unit.
const (
	suffixService = ".service"
	suffixSocket  = ".socket"
	suffixTarget  = ".target"
)

// CheckName reports whether name can be a unit's name. The characters are systemd's.
func CheckName(name string) error {
	ext := filepath.Ext(name)
	prefix, instance, _ := strings.Cut(strings.TrimSuffix(name, ext), "@")
	other := func(c rune) bool {
		return (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && !strings.ContainsRune(`:_.\-`, c)
	}
	if len(name) > 255 || ext != suffixService && ext != suffixSocket && ext != suffixTarget ||
		prefix == "" || strings.ContainsFunc(prefix, other) || strings.ContainsFunc(strings.ReplaceAll(instance, "@", ""), other) {
		return fmt.Errorf("%q is no unit name: it is made of letters, digits and :_.\\-@, has at most 255 characters and ends in .service, .socket or .target", name)
	}
	return nil
}

// Parse reads a unit from its file followed by its drop-ins, in the order in which
// they apply. The warnings begin with "file:line: ". The error is an *Error, or says
// that the name is none.
func Parse(name string, files []File, opts Options) (*spec.Unit, []string, error) {
	if err := CheckName(name); err != nil {
		return nil, nil, err
	}
	p := &parser{name: name, opts: opts, unit: &spec.Unit{Name: name}, at: map[string]assignment{}}
	sections := map[string]map[string]setter{"Unit": directives()["Unit"], "Install": directives()["Install"]}
	switch filepath.Ext(name) {
	case suffixService:
		p.service = &spec.Service{}
		p.unit.Service = p.service
		sections["Service"] = directives()["Service"]
		p.unit.StartLimitInterval, p.unit.StartLimitBurst = defaultStartLimitInterval, defaultStartLimitBurst
	case suffixSocket:
		p.socket = &spec.Socket{}
		p.unit.Socket = p.socket
		sections["Socket"] = directives()["Socket"]
	}
	for _, f := range files {
		p.unit.Source = append(p.unit.Source, f.Path)
		list, err := lex(f)
		if err != nil {
			return nil, p.warnings, err
		}
		unknown := map[string]bool{} // section headers warned about
		for _, a := range list {
			keys, ok := sections[a.section]
			if !ok {
				if !strings.HasPrefix(a.section, "X-") && !unknown[a.section] {
					unknown[a.section] = true
					p.warn(a, "unknown section [%s] in a %s unit, ignored", a.section, filepath.Ext(name)[1:])
				}
				continue
			}
			set, ok := keys[a.key]
			if !ok {
				if !strings.HasPrefix(a.key, "X-") {
					p.warn(a, "unknown key %s= in section [%s], ignored", a.key, a.section)
				}
				continue
			}
			p.current = a
			if err := set(p, a.value); err != nil {
				return nil, p.warnings, &Error{File: a.file, Line: a.line, Key: a.key, Err: err}
			}
			p.at[a.key] = a
		}
	}
	if err := p.check(); err != nil {
		return nil, p.warnings, err
	}
	return p.unit, p.warnings, nil
}

// parser builds one unit.
type parser struct {
	name     string
	opts     Options
	unit     *spec.Unit
	service  *spec.Service // nil unless a service
	socket   *spec.Socket  // nil unless a socket
	current  assignment
	at       map[string]assignment // the last assignment of each key
	warnings []string
}

func (p *parser) warn(a assignment, format string, args ...any) {
	p.warnings = append(p.warnings, fmt.Sprintf("%s:%d: %s", a.file, a.line, fmt.Sprintf(format, args...)))
}

func (p *parser) badEscape(s string) {
	p.warn(p.current, "%s=: %s is no escape sequence and stays as it is (a backslash is written \\\\)", p.current.key, s)
}

// fail is an error of the unit as a whole, placed at the last assignment of key if there is one.
func (p *parser) fail(key, format string, args ...any) error {
	e := &Error{File: p.name, Key: key, Err: fmt.Errorf(format, args...)}
	if n := len(p.unit.Source); n > 0 {
		e.File = p.unit.Source[0]
	}
	if a, ok := p.at[key]; ok {
		e.File, e.Line = a.file, a.line
	}
	return e
}

// check holds what concerns several directives at once.
func (p *parser) check() error {
	if s := p.service; s != nil {
		oneshot := s.Type == spec.TypeOneshot
		switch {
		case len(s.ExecStart) == 0 && !p.opts.NoExecStart && !(oneshot && s.RemainAfterExit && len(s.ExecStop) > 0):
			return p.fail("ExecStart", "it is missing: a service needs a program to start (or Type=oneshot, RemainAfterExit=yes and ExecStop=)")
		case len(s.ExecStart) > 1 && !oneshot:
			return p.fail("ExecStart", "there are %d commands, and only Type=oneshot takes more than one (an empty ExecStart= drops those of earlier files)", len(s.ExecStart))
		case oneshot && (s.Restart == spec.RestartAlways || s.Restart == spec.RestartOnSuccess):
			return p.fail("Restart", "%s would run a Type=oneshot service for ever; use on-failure", s.Restart)
		case s.RemainAfterExit && s.ExitType == "cgroup":
			return p.fail("ExitType", "cgroup and RemainAfterExit=yes contradict each other")
		}
		pty := 0
		for _, v := range []string{s.StandardInput, s.StandardOutput, s.StandardError} {
			if v == spec.StdioPTY {
				pty++
			}
		}
		if pty != 0 && pty != 3 {
			return p.fail("StandardOutput", "pty is for all of StandardInput=, StandardOutput= and StandardError=, or none")
		}
		if s.RestartSteps > 0 && s.RestartMaxDelaySec == 0 {
			p.warn(p.at["RestartSteps"], "RestartSteps= has no effect without RestartMaxDelaySec=")
		}
		if s.RestartSteps == 0 && s.RestartMaxDelaySec != 0 && s.RestartMaxDelaySec != spec.Infinity {
			p.warn(p.at["RestartMaxDelaySec"], "RestartMaxDelaySec= has no effect without RestartSteps=")
		}
		if s.RestartMaxDelaySec != 0 && s.RestartMaxDelaySec < s.RestartSec {
			return p.fail("RestartMaxDelaySec", "it is shorter than RestartSec=%v", s.RestartSec)
		}
		if s.KillMode == spec.KillNone {
			p.warn(p.at["KillMode"], "KillMode=none leaves processes behind that nothing watches")
		}
	}
	if s := p.socket; s != nil && len(s.ListenStream) == 0 {
		return p.fail("ListenStream", "it is missing: a socket unit needs an address")
	}
	return nil
}

// Templates: "name@.service" is the file for every "name@instance.service".

// template is the name of the file that name is an instance of, or "".
func template(name string) string {
	at := strings.IndexByte(name, '@')
	ext := filepath.Ext(name)
	if at < 0 || at+1 == len(name)-len(ext) {
		return ""
	}
	return name[:at+1] + ext
}

// isTemplate reports whether name has an empty instance and so cannot be started.
func isTemplate(name string) bool {
	return strings.HasSuffix(strings.TrimSuffix(name, filepath.Ext(name)), "@")
}

var errRelative = errors.New("the path must be absolute")
