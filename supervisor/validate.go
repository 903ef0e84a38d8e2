package supervisor

import (
	"path/filepath"
	"strings"

	"mypr/internal/rpc"
	"mypr/supervisor/sockets"
	"mypr/supervisor/spec"
)

// validate refuses a definition that cannot mean anything. A service without ExecStart=
// may be loaded (a client may complete it as a transient unit) but not started.
func validate(u *spec.Unit) error {
	bad := func(format string, args ...any) error {
		return rpc.Errorf(rpc.CodeInvalidRequest, u.Name+": "+format, args...)
	}
	if err := checkName(u.Name); err != nil {
		return err
	}
	suffix := filepath.Ext(u.Name)
	switch {
	case u.Service != nil && (u.Socket != nil || suffix != ".service"),
		u.Socket != nil && suffix != ".socket",
		u.Service == nil && u.Socket == nil && suffix != ".target":
		return bad("a unit of this name must have exactly the section that its suffix says")
	case u.Socket != nil:
		if len(u.Socket.ListenStream) == 0 {
			return bad("ListenStream= is missing")
		}
		for _, a := range u.Socket.ListenStream {
			if err := sockets.CheckAddr(a); err != nil {
				return bad("ListenStream=: %v", err)
			}
		}
		if n := u.Socket.FileDescriptorName; n != "" && !validFDName(n) {
			return bad("FileDescriptorName= %q is no name for a descriptor", n)
		}
		return nil
	case u.Service == nil:
		return nil
	}
	s := u.Service
	one := func(key, value string, allowed ...string) error {
		for _, a := range append(allowed, "") {
			if value == a {
				return nil
			}
		}
		return bad("%s=%s is not one of %s", key, value, strings.Join(allowed, ", "))
	}
	for _, err := range []error{
		one("Type", s.Type, spec.TypeSimple, spec.TypeExec, spec.TypeNotify, spec.TypeOneshot),
		one("ExitType", s.ExitType, "main", "cgroup"),
		one("NotifyAccess", s.NotifyAccess, "none", "main", "exec", "all"),
		one("Restart", s.Restart, spec.RestartNo, spec.RestartOnSuccess, spec.RestartOnFailure, spec.RestartOnAbnormal,
			spec.RestartOnWatchdog, spec.RestartOnAbort, spec.RestartAlways),
		one("KillMode", s.KillMode, spec.KillControlGroup, spec.KillMixed, spec.KillProcess, spec.KillNone),
		one("OOMPolicy", s.OOMPolicy, "continue", "stop", "kill"),
	} {
		if err != nil {
			return err
		}
	}
	if s.Type != spec.TypeOneshot && len(s.ExecStart) > 1 {
		return bad("more than one ExecStart= needs Type=oneshot")
	}
	if s.Type == spec.TypeOneshot && (s.Restart == spec.RestartAlways || s.Restart == spec.RestartOnSuccess) {
		return bad("Restart=%s would run a oneshot without end", s.Restart)
	}
	for _, list := range [][]spec.Command{s.ExecStartPre, s.ExecStart, s.ExecStartPost, s.ExecReload, s.ExecStop, s.ExecStopPost} {
		for _, c := range list {
			if c.Path == "" {
				return bad("a command is empty")
			}
			for _, a := range c.Args {
				if strings.Contains(a, "\x00") {
					return bad("an argument of %s holds a NUL byte", c.Path)
				}
			}
		}
	}
	for _, e := range s.Environment {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" || strings.Contains(e, "\x00") {
			return bad("Environment= entry %q is not NAME=VALUE", e)
		}
	}
	tty := 0
	for _, m := range []string{s.StandardInput, s.StandardOutput, s.StandardError} {
		kind, arg, has := strings.Cut(m, ":")
		switch kind {
		case "", spec.StdioNull, spec.StdioInherit, spec.StdioJournal, spec.StdioPipe:
		case spec.StdioPTY:
			tty++
		case "fd":
			if !validFDName(arg) {
				return bad("%q names no descriptor", m)
			}
		case "file", "append", "truncate":
			if !filepath.IsAbs(arg) {
				return bad("%q needs an absolute path", m)
			}
		default:
			return bad("unknown stdio mode %q", m)
		}
		if kind != "fd" && kind != "file" && kind != "append" && kind != "truncate" && has {
			return bad("unknown stdio mode %q", m)
		}
	}
	if tty > 0 && (s.StandardInput != spec.StdioPTY || s.StandardOutput != spec.StdioPTY && s.StandardOutput != "" ||
		s.StandardError != spec.StdioPTY && s.StandardError != "") {
		return bad("pty is for all three streams or for none")
	}
	return nil
}

// checkName: unit names become names of cgroups and files.
func checkName(name string) error {
	switch filepath.Ext(name) {
	case ".service", ".socket", ".target":
	default:
		return rpc.Errorf(rpc.CodeInvalidRequest, "unit name %q does not end in .service, .socket or .target", name)
	}
	if len(name) > 200 || name[0] == '.' || strings.ContainsFunc(name, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune(`:-_.\@`, r))
	}) {
		return rpc.Errorf(rpc.CodeInvalidRequest, "%q is no unit name: letters, digits and :-_.\\@ are allowed, at most 200", name)
	}
	return nil
}
