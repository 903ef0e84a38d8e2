package unitfile

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"mypr/supervisor/spec"
)

// What systemd sets when a unit file does not say (systemd-system.conf(5)). The spec
// itself has no start limit unless one is set.
const (
	defaultStartLimitInterval = 10 * time.Second
	defaultStartLimitBurst    = 5
)

// setter applies one assignment.
type setter func(p *parser, value string) error

// directives lists all of them by section, as docs/units.md does (a test compares).
// Made when the first unit is read: most roles of the program never read one.
var directives = sync.OnceValue(func() map[string]map[string]setter {
	return map[string]map[string]setter{"Unit": unitDirectives(), "Install": installDirectives(), "Service": serviceDirectives(), "Socket": socketDirectives()}
})

func unitDirectives() map[string]setter {
	return map[string]setter{
		"Description":           text(func(p *parser) *string { return &p.unit.Description }),
		"Documentation":         list(func(p *parser) *[]string { return &p.unit.Documentation }, nil),
		"Requires":              list(func(p *parser) *[]string { return &p.unit.Requires }, CheckName),
		"Wants":                 list(func(p *parser) *[]string { return &p.unit.Wants }, CheckName),
		"After":                 list(func(p *parser) *[]string { return &p.unit.After }, CheckName),
		"Before":                list(func(p *parser) *[]string { return &p.unit.Before }, CheckName),
		"PartOf":                list(func(p *parser) *[]string { return &p.unit.PartOf }, CheckName),
		"BindsTo":               list(func(p *parser) *[]string { return &p.unit.BindsTo }, CheckName),
		"Conflicts":             list(func(p *parser) *[]string { return &p.unit.Conflicts }, CheckName),
		"OnFailure":             list(func(p *parser) *[]string { return &p.unit.OnFailure }, CheckName),
		"StartLimitIntervalSec": span(func(p *parser) *time.Duration { return &p.unit.StartLimitInterval }, asIs),
		"StartLimitInterval":    span(func(p *parser) *time.Duration { return &p.unit.StartLimitInterval }, asIs), // systemd before 230
		"StartLimitBurst":       number(func(p *parser) *int { return &p.unit.StartLimitBurst }, 0, 1<<30),
		"CollectMode":           choice(func(p *parser) *string { return &p.unit.CollectMode }, "inactive", "inactive-or-failed"),
	}
}

func installDirectives() map[string]setter {
	return map[string]setter{
		"WantedBy": list(func(p *parser) *[]string { return &p.unit.WantedBy }, CheckName),
	}
}

func serviceDirectives() map[string]setter {
	return map[string]setter{
		"Type":                     choice(func(p *parser) *string { return &p.service.Type }, spec.TypeSimple, spec.TypeExec, spec.TypeNotify, spec.TypeOneshot),
		"ExecStartPre":             commands(func(p *parser) *[]spec.Command { return &p.service.ExecStartPre }),
		"ExecStart":                commands(func(p *parser) *[]spec.Command { return &p.service.ExecStart }),
		"ExecStartPost":            commands(func(p *parser) *[]spec.Command { return &p.service.ExecStartPost }),
		"ExecReload":               commands(func(p *parser) *[]spec.Command { return &p.service.ExecReload }),
		"ExecStop":                 commands(func(p *parser) *[]spec.Command { return &p.service.ExecStop }),
		"ExecStopPost":             commands(func(p *parser) *[]spec.Command { return &p.service.ExecStopPost }),
		"RemainAfterExit":          boolean(func(p *parser) *bool { return &p.service.RemainAfterExit }),
		"ExitType":                 choice(func(p *parser) *string { return &p.service.ExitType }, "main", "cgroup"),
		"NotifyAccess":             choice(func(p *parser) *string { return &p.service.NotifyAccess }, "none", "main", "exec", "all"),
		"Restart":                  choice(func(p *parser) *string { return &p.service.Restart }, spec.RestartNo, spec.RestartOnSuccess, spec.RestartOnFailure, spec.RestartOnAbnormal, spec.RestartOnWatchdog, spec.RestartOnAbort, spec.RestartAlways),
		"RestartSec":               span(func(p *parser) *time.Duration { return &p.service.RestartSec }, orTiny),
		"RestartSteps":             number(func(p *parser) *int { return &p.service.RestartSteps }, 0, 1000),
		"RestartMaxDelaySec":       span(func(p *parser) *time.Duration { return &p.service.RestartMaxDelaySec }, orTiny),
		"X-RestartResetSec":        span(func(p *parser) *time.Duration { return &p.service.RestartResetSec }, orTiny),
		"SuccessExitStatus":        exitStatuses(func(p *parser) *spec.ExitStatusSet { return &p.service.SuccessExitStatus }),
		"RestartPreventExitStatus": exitStatuses(func(p *parser) *spec.ExitStatusSet { return &p.service.RestartPreventExitStatus }),
		"RestartForceExitStatus":   exitStatuses(func(p *parser) *spec.ExitStatusSet { return &p.service.RestartForceExitStatus }),
		"TimeoutStartSec":          span(func(p *parser) *time.Duration { return &p.service.TimeoutStartSec }, orInfinity),
		"TimeoutStopSec":           span(func(p *parser) *time.Duration { return &p.service.TimeoutStopSec }, orInfinity),
		"TimeoutAbortSec":          span(func(p *parser) *time.Duration { return &p.service.TimeoutAbortSec }, orInfinity),
		"TimeoutSec":               timeoutSec,
		"RuntimeMaxSec":            span(func(p *parser) *time.Duration { return &p.service.RuntimeMaxSec }, orInfinity),
		"WatchdogSec":              span(func(p *parser) *time.Duration { return &p.service.WatchdogSec }, infinityIsZero),
		"KillMode":                 choice(func(p *parser) *string { return &p.service.KillMode }, spec.KillControlGroup, spec.KillMixed, spec.KillProcess, spec.KillNone),
		"KillSignal":               signal(func(p *parser) *int { return &p.service.KillSignal }),
		"FinalKillSignal":          signal(func(p *parser) *int { return &p.service.FinalKillSignal }),
		"WatchdogSignal":           signal(func(p *parser) *int { return &p.service.WatchdogSignal }),
		"ReloadSignal":             signal(func(p *parser) *int { return &p.service.ReloadSignal }),
		"SendSIGHUP":               boolean(func(p *parser) *bool { return &p.service.SendSIGHUP }),
		"SendSIGKILL": func(p *parser, v string) error {
			if v == "" {
				v = "yes"
			}
			b, err := parseBool(v)
			p.service.NoSendSIGKILL = err == nil && !b
			return err
		},
		"Sockets":                list(func(p *parser) *[]string { return &p.service.Sockets }, checkSocketName),
		"FileDescriptorStoreMax": number(func(p *parser) *int { return &p.service.FileDescriptorStoreMax }, 0, 1<<16),
		"WorkingDirectory":       workingDirectory,
		"User":                   text(func(p *parser) *string { return &p.service.User }),
		"Group":                  text(func(p *parser) *string { return &p.service.Group }),
		"UMask": optional(func(p *parser) **uint32 { return &p.service.UMask }, func(s string) (uint32, error) {
			m, err := parseMode(s)
			if err == nil && m > 0o777 {
				return 0, fmt.Errorf("%q is no umask", s)
			}
			return m, err
		}),
		"Environment":        environment,
		"EnvironmentFile":    environmentFile,
		"PassEnvironment":    list(func(p *parser) *[]string { return &p.service.PassEnvironment }, checkVariable),
		"UnsetEnvironment":   list(func(p *parser) *[]string { return &p.service.UnsetEnvironment }, checkUnset),
		"X-ExactEnvironment": boolean(func(p *parser) *bool { return &p.service.ExactEnvironment }),
		"StandardInput":      stdio(func(p *parser) *string { return &p.service.StandardInput }, true),
		"StandardOutput":     stdio(func(p *parser) *string { return &p.service.StandardOutput }, false),
		"StandardError":      stdio(func(p *parser) *string { return &p.service.StandardError }, false),
		"TTYRows":            ttySize(func(p *parser) *uint16 { return &p.service.TTYRows }),
		"TTYColumns":         ttySize(func(p *parser) *uint16 { return &p.service.TTYColumns }),
		"LimitNOFILE":        rlimit(func(p *parser) **spec.Rlimit { return &p.service.LimitNOFILE }, parseCount),
		"LimitNPROC":         rlimit(func(p *parser) **spec.Rlimit { return &p.service.LimitNPROC }, parseCount),
		"LimitCORE":          rlimit(func(p *parser) **spec.Rlimit { return &p.service.LimitCORE }, parseSize),
		"LimitAS":            rlimit(func(p *parser) **spec.Rlimit { return &p.service.LimitAS }, parseSize),
		"LimitCPU":           rlimit(func(p *parser) **spec.Rlimit { return &p.service.LimitCPU }, rlimitSeconds),
		"LimitFSIZE":         rlimit(func(p *parser) **spec.Rlimit { return &p.service.LimitFSIZE }, parseSize),
		"Nice":               optional(func(p *parser) **int { return &p.service.Nice }, func(s string) (int, error) { return parseInt(s, -20, 19) }),
		"OOMScoreAdjust":     optional(func(p *parser) **int { return &p.service.OOMScoreAdjust }, func(s string) (int, error) { return parseInt(s, -1000, 1000) }),
		"TimerSlackNSec": func(p *parser, v string) (err error) {
			p.service.TimerSlack = 0
			if v != "" && v != "infinity" { // both: not set
				p.service.TimerSlack, err = parseNanoseconds(v)
			}
			return err
		},
		"MemoryMax":     amount(func(p *parser) *uint64 { return &p.service.MemoryMax }, parseMemory),
		"MemoryHigh":    amount(func(p *parser) *uint64 { return &p.service.MemoryHigh }, parseMemory),
		"MemorySwapMax": amount(func(p *parser) *uint64 { return &p.service.MemorySwapMax }, swap),
		"CPUQuota": amount(func(p *parser) *uint64 { return &p.service.CPUQuota }, func(s string) (uint64, error) {
			n, err := parsePercent(s)
			if err == nil && n == 0 {
				err = errors.New("0% would let nothing run; no limit is an empty value")
			}
			return n * 100, err // of hundredths of a percent: microseconds of a second
		}),
		"CPUWeight": amount(func(p *parser) *uint64 { return &p.service.CPUWeight }, func(s string) (uint64, error) {
			n, err := parseInt(s, 1, 10000)
			return uint64(n), err
		}),
		"TasksMax":  amount(func(p *parser) *uint64 { return &p.service.TasksMax }, tasks),
		"OOMPolicy": choice(func(p *parser) *string { return &p.service.OOMPolicy }, "continue", "stop", "kill"),
		"Delegate":  boolean(func(p *parser) *bool { return &p.service.Delegate }),
	}
}

func socketDirectives() map[string]setter {
	return map[string]setter{
		"ListenStream": func(p *parser, v string) error {
			if v == "" {
				p.socket.ListenStream = nil
				return nil
			}
			v, err := p.expand(v)
			if err == nil {
				err = checkListen(v)
			}
			if err != nil {
				return err
			}
			p.socket.ListenStream = append(p.socket.ListenStream, v)
			return nil
		},
		"FileDescriptorName": func(p *parser, v string) error {
			v, err := p.expand(v)
			if err != nil {
				return err
			}
			if len(v) > 255 || strings.ContainsFunc(v, func(r rune) bool { return r <= ' ' || r > '~' || r == ':' }) {
				return fmt.Errorf("%q is no descriptor name: printable ASCII without blanks and colons, at most 255 characters", v)
			}
			p.socket.FileDescriptorName = v
			return nil
		},
		"Service": func(p *parser, v string) error {
			v, err := p.expand(v)
			if err == nil && v != "" {
				if err = CheckName(v); err == nil && filepath.Ext(v) != suffixService {
					err = fmt.Errorf("%q is no service", v)
				}
			}
			p.socket.Service = v
			return err
		},
		"SocketMode":    mode(func(p *parser) *uint32 { return &p.socket.SocketMode }),
		"DirectoryMode": mode(func(p *parser) *uint32 { return &p.socket.DirectoryMode }),
		"Backlog":       number(func(p *parser) *int { return &p.socket.Backlog }, 0, 1<<30),
		"RemoveOnStop":  boolean(func(p *parser) *bool { return &p.socket.RemoveOnStop }),
		"X-PassOnly":    boolean(func(p *parser) *bool { return &p.socket.PassOnly }),
	}
}

// Makers of setters. An empty value always means: as if never set.

func text(field func(*parser) *string) setter {
	return func(p *parser, v string) (err error) {
		*field(p), err = p.expand(v)
		return err
	}
}

func boolean(field func(*parser) *bool) setter {
	return func(p *parser, v string) (err error) {
		*field(p) = false
		if v != "" {
			*field(p), err = parseBool(v)
		}
		return err
	}
}

func number(field func(*parser) *int, least, most int) setter {
	return func(p *parser, v string) (err error) {
		*field(p) = 0
		if v != "" {
			*field(p), err = parseInt(v, least, most)
		}
		return err
	}
}

func amount(field func(*parser) *uint64, parse func(string) (uint64, error)) setter {
	return func(p *parser, v string) (err error) {
		*field(p) = 0
		if v != "" {
			*field(p), err = parse(v)
		}
		return err
	}
}

func optional[T any](field func(*parser) **T, parse func(string) (T, error)) setter {
	return func(p *parser, v string) error {
		*field(p) = nil
		if v == "" {
			return nil
		}
		n, err := parse(v)
		*field(p) = &n
		return err
	}
}

func choice(field func(*parser) *string, values ...string) setter {
	return func(p *parser, v string) (err error) {
		*field(p) = ""
		if v != "" {
			*field(p), err = oneOf(v, values...)
		}
		return err
	}
}

func span(field func(*parser) *time.Duration, adjust func(time.Duration) time.Duration) setter {
	return func(p *parser, v string) error {
		*field(p) = 0
		if v == "" {
			return nil
		}
		d, err := parseSpan(v)
		if err == nil {
			*field(p) = adjust(d)
		}
		return err
	}
}

func asIs(d time.Duration) time.Duration { return d }

// orInfinity: systemd lets 0 stand for "no timeout".
func orInfinity(d time.Duration) time.Duration {
	if d == 0 {
		return spec.Infinity
	}
	return d
}

// infinityIsZero: for the watchdog both mean that there is none.
func infinityIsZero(d time.Duration) time.Duration {
	if d == spec.Infinity {
		return 0
	}
	return d
}

func timeoutSec(p *parser, v string) error {
	err := span(func(p *parser) *time.Duration { return &p.service.TimeoutStartSec }, orInfinity)(p, v)
	p.service.TimeoutStopSec = p.service.TimeoutStartSec
	return err
}

func signal(field func(*parser) *int) setter {
	return func(p *parser, v string) (err error) {
		*field(p) = 0
		if v != "" {
			*field(p), err = parseSignal(v)
		}
		return err
	}
}

func mode(field func(*parser) *uint32) setter {
	return func(p *parser, v string) (err error) {
		*field(p) = 0
		if v != "" {
			*field(p), err = parseMode(v)
		}
		return err
	}
}

func rlimit(field func(*parser) **spec.Rlimit, value func(string) (uint64, error)) setter {
	return func(p *parser, v string) (err error) {
		*field(p) = nil
		if v != "" {
			*field(p), err = parseRlimit(v, value)
		}
		return err
	}
}

func ttySize(field func(*parser) *uint16) setter {
	return func(p *parser, v string) error {
		*field(p) = 0
		if v == "" {
			return nil
		}
		n, err := parseInt(v, 0, 1<<16-1)
		*field(p) = uint16(n)
		return err
	}
}

func exitStatuses(field func(*parser) *spec.ExitStatusSet) setter {
	return func(p *parser, v string) error {
		if v == "" {
			*field(p) = spec.ExitStatusSet{}
		}
		for w := range strings.FieldsSeq(v) {
			if err := addExitStatus(field(p), w); err != nil {
				return err
			}
		}
		return nil
	}
}

// list appends words; one that is there already moves to the end. An empty value
// empties the list.
func list(field func(*parser) *[]string, check func(string) error) setter {
	return func(p *parser, v string) error {
		if v == "" {
			*field(p) = nil
			return nil
		}
		items, err := words(v, p.badEscape)
		if err != nil {
			return err
		}
		for _, w := range items {
			if w, err = p.expand(w); err != nil {
				return err
			}
			if check != nil {
				if err := check(w); err != nil {
					return err
				}
			}
			*field(p) = append(slices.DeleteFunc(*field(p), func(o string) bool { return o == w }), w)
		}
		return nil
	}
}

func checkSocketName(s string) error {
	if err := CheckName(s); err != nil {
		return err
	}
	if filepath.Ext(s) != suffixSocket {
		return fmt.Errorf("%q is no socket unit", s)
	}
	return nil
}

// isVariable reports whether s can be a variable's name: [A-Za-z_][A-Za-z0-9_]*.
func isVariable(s string) bool {
	for i, c := range []byte(s) {
		if c != '_' && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

func checkVariable(s string) error {
	if !isVariable(s) {
		return fmt.Errorf("%q is no variable name", s)
	}
	return nil
}

func checkAssignment(s string) error {
	name, _, ok := strings.Cut(s, "=")
	if !ok || !isVariable(name) {
		return fmt.Errorf("%q is no NAME=VALUE (one with blanks is quoted as a whole: \"NAME=a b\")", s)
	}
	return nil
}

func checkUnset(s string) error {
	if strings.Contains(s, "=") {
		return checkAssignment(s)
	}
	return checkVariable(s)
}

// environment keeps one value of each variable, the last.
func environment(p *parser, v string) error {
	err := list(func(p *parser) *[]string { return &p.service.Environment }, checkAssignment)(p, v)
	last := map[string]int{}
	name := func(s string) string { n, _, _ := strings.Cut(s, "="); return n }
	for i, e := range p.service.Environment {
		last[name(e)] = i
	}
	kept := p.service.Environment[:0]
	for i, e := range p.service.Environment {
		if last[name(e)] == i {
			kept = append(kept, e)
		}
	}
	p.service.Environment = kept
	return err
}

func environmentFile(p *parser, v string) error {
	if v == "" {
		p.service.EnvironmentFile = nil
		return nil
	}
	v, err := p.expand(v)
	if err != nil {
		return err
	}
	if !filepath.IsAbs(strings.TrimPrefix(v, "-")) {
		return errRelative
	}
	p.service.EnvironmentFile = append(p.service.EnvironmentFile, v)
	return nil
}

func workingDirectory(p *parser, v string) error {
	dir, optional := strings.CutPrefix(v, "-")
	if dir == "~" {
		dir = "%h"
	}
	dir, err := p.expand(dir)
	if err != nil {
		return err
	}
	if dir != "" && !filepath.IsAbs(dir) {
		return errRelative
	}
	p.service.WorkingDirectory, p.service.WorkingDirectoryOptional = dir, optional && dir != ""
	return nil
}

func stdio(field func(*parser) *string, input bool) setter {
	return func(p *parser, v string) error {
		v, err := p.expand(v)
		if err != nil {
			return err
		}
		kind, arg, has := strings.Cut(v, ":")
		simple := []string{"", spec.StdioNull, spec.StdioPipe, spec.StdioPTY}
		files := []string{"file"}
		if !input {
			simple = append(simple, spec.StdioInherit, spec.StdioJournal)
			files = append(files, "append", "truncate")
		}
		switch {
		case !has && slices.Contains(simple, kind):
		case has && slices.Contains(files, kind):
			if !filepath.IsAbs(arg) {
				return errRelative
			}
		case has && kind == "fd" && arg != "":
		default:
			return fmt.Errorf("%q is not supported; use one of %s, fd:NAME, %s:PATH", v, strings.Join(simple[1:], ", "), strings.Join(files, ":PATH, "))
		}
		*field(p) = v
		return nil
	}
}

func swap(s string) (uint64, error) {
	if s == "0" {
		return 1, nil // the kernel rounds down to pages: none. The spec's 0 is "not set".
	}
	return parseMemory(s)
}

func tasks(s string) (uint64, error) {
	switch {
	case s == "infinity":
		return 0, nil
	case strings.HasSuffix(s, "%"):
		return share(s, totalTasks)
	}
	n, err := parseCount(s)
	if err == nil && n == 0 {
		err = errors.New("0 would let nothing start; no limit is written infinity")
	}
	return n, err
}

func checkListen(v string) error {
	if filepath.IsAbs(v) {
		if len(v) > 107 {
			return fmt.Errorf("the path has %d bytes, and a Unix socket's path has at most 107", len(v))
		}
		return nil
	}
	host, port, err := net.SplitHostPort(v)
	if err == nil {
		if _, err := parseInt(port, 0, 65535); err != nil {
			return err
		}
		if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
			return nil
		}
	}
	return fmt.Errorf("%q is neither an absolute path nor a port of the loopback (127.0.0.1:80, [::1]:80)", v)
}

// commands appends command lines; several on one line are separated by " ; ".
func commands(field func(*parser) *[]spec.Command) setter {
	return func(p *parser, v string) error {
		if v == "" {
			*field(p) = nil
			return nil
		}
		for rest := v; strings.TrimLeft(rest, blanks) != ""; {
			c, after, err := p.command(rest)
			if err != nil {
				return err
			}
			*field(p) = append(*field(p), c)
			rest = after
		}
		return nil
	}
}

// isWord reports whether w is the first word of s as it stands.
func isWord(s, w string) bool {
	after, ok := strings.CutPrefix(s, w)
	return ok && (after == "" || strings.Contains(blanks, after[:1]))
}

// command reads one command line off s.
func (p *parser) command(s string) (spec.Command, string, error) {
	var c spec.Command
	fail := func(err error) (spec.Command, string, error) { return c, "", err }
	s = strings.TrimLeft(s, blanks)
	setArgv0 := false
prefixes:
	for ; s != ""; s = s[1:] {
		switch s[0] {
		case '-':
			c.IgnoreFailure = true
		case ':':
			c.NoExpand = true
		case '@':
			setArgv0 = true
		case '+', '!':
			p.warn(p.current, "%s=: prefix %c ignored: every command runs with the unit's own privileges", p.current.key, s[0])
		default:
			break prefixes
		}
	}
	var argv []string
	for {
		trimmed := strings.TrimLeft(s, blanks)
		if isWord(trimmed, ";") { // alone and unquoted
			s = trimmed[1:]
			break
		}
		if isWord(trimmed, `\;`) {
			argv, s = append(argv, ";"), trimmed[2:]
			continue
		}
		w, rest, ok, err := nextWord(trimmed, p.badEscape)
		if err != nil {
			return fail(err)
		}
		if !ok {
			s = ""
			break
		}
		if w, err = p.expand(w); err != nil {
			return fail(err)
		}
		argv, s = append(argv, w), rest
	}
	if len(argv) == 0 || argv[0] == "" {
		return fail(errors.New("a command is missing"))
	}
	c.Path = argv[0]
	if strings.Contains(c.Path, "/") && !filepath.IsAbs(c.Path) {
		return fail(fmt.Errorf("the program %s is neither an absolute path nor a bare name", c.Path))
	}
	if setArgv0 {
		if argv = argv[1:]; len(argv) == 0 {
			return fail(errors.New("after @ the program's path and its argv[0] are needed"))
		}
	}
	c.Args = argv
	return c, s, nil
}
