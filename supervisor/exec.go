package supervisor

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"mypr/supervisor/notify"
	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

// ControlEnvironment is the variable that tells units where the control socket is, but
// for those with ExactEnvironment.
const ControlEnvironment = "MYPR_CONTROL"

// private are variables of the supervisor's own service protocol: they are about the
// supervisor, and a unit must not take them for its own.
var private = []string{
	"NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID", "FDSTORE", "WATCHDOG_PID",
	"WATCHDOG_USEC", "INVOCATION_ID", "MAINPID", "MANAGERPID", "JOURNAL_STREAM", "SERVICE_RESULT", "EXIT_CODE",
	"EXIT_STATUS", "SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", reexecEnvironment,
}

// environment of a command of the unit. Later entries win: the supervisor's own
// environment, Environment=, EnvironmentFile=, then UnsetEnvironment= takes away, and
// what the service protocol sets cannot be overridden.
func (u *unit) environment(main bool, cred *credential) ([]string, error) {
	base, err := u.s.environments.of(u.def.Service, u.given[u.def.Service.EnvironmentFD], cred)
	if err != nil {
		return nil, err
	}
	env := append(make(environ, 0, len(base)+8), base...)
	if u.isTTY() && env.get("TERM") == "" {
		env.set("TERM", "xterm-256color")
	}
	env.set("INVOCATION_ID", u.Invocation)
	if !u.def.Service.ExactEnvironment {
		env.set(ControlEnvironment, u.s.opt.ControlPath)
	}
	if access := u.notifyAccess(); u.s.opt.NotifyPath != "" && (access == "exec" || access == "all" || access == "main" && main) {
		env.set(notify.Environment, u.s.opt.NotifyPath)
	}
	if main && u.WatchdogUS > 0 {
		env.set("WATCHDOG_USEC", strconv.FormatInt(u.WatchdogUS, 10))
	}
	if !main && u.main != nil && u.main.p != nil {
		env.set("MAINPID", strconv.Itoa(u.main.p.PID))
	}
	if u.State == Stop || u.State == StopPost {
		env.set("SERVICE_RESULT", u.Result)
		if u.MainEnded && u.Exit.Known {
			code, status := "exited", strconv.Itoa(u.Exit.Code)
			if u.Exit.Signal != 0 {
				code, status = "killed", strings.TrimPrefix(process.SignalName(u.Exit.Signal), "SIG")
				if u.Exit.CoreDump {
					code = "dumped"
				}
			}
			env.set("EXIT_CODE", code)
			env.set("EXIT_STATUS", status)
		}
	}
	return env, nil
}

// environ is NAME=VALUE strings, each name once.
type environ []string

func (e environ) index(name string) int {
	return slices.IndexFunc(e, func(kv string) bool {
		return len(kv) > len(name) && kv[len(name)] == '=' && kv[:len(name)] == name
	})
}

func (e environ) get(name string) string {
	if i := e.index(name); i >= 0 {
		return e[i][len(name)+1:]
	}
	return ""
}

func (e *environ) set(name, value string) {
	if i := e.index(name); i >= 0 {
		(*e)[i] = name + "=" + value
	} else {
		*e = append(*e, name+"="+value)
	}
}

// environments makes of a unit what its processes get in any case, and remembers the last
// that came as a file: the commands of a session nearly all have the same.
type environments struct {
	text []byte
	base environ
	buf  []byte
}

// maxEnvironment is more than execve(2) takes.
const maxEnvironment = 8 << 20

func (m *environments) of(sv *spec.Service, file *os.File, cred *credential) (environ, error) {
	switch {
	case sv.EnvironmentFD == "":
		return baseEnvironment(sv, nil, cred)
	case file == nil:
		return nil, fmt.Errorf("environment_fd: there is no descriptor %q", sv.EnvironmentFD)
	}
	text, err := m.read(process.FD(file))
	if err != nil {
		return nil, err
	}
	alone := sv.ExactEnvironment && len(sv.Environment)+len(sv.EnvironmentFile)+len(sv.PassEnvironment)+len(sv.UnsetEnvironment) == 0
	if alone && m.base != nil && bytes.Equal(text, m.text) {
		return m.base, nil
	}
	var list []string
	if len(text) > 0 {
		list = strings.Split(string(text), "\x00")
	}
	for _, kv := range list {
		if name, _, ok := strings.Cut(kv, "="); !ok || name == "" {
			return nil, fmt.Errorf("environment_fd: %q is not NAME=VALUE", kv)
		}
	}
	base, err := baseEnvironment(sv, list, cred)
	if alone && err == nil && len(text) <= 64<<10 {
		m.text, m.base = bytes.Clone(text), base
	}
	return base, err
}

// read returns the whole file, until the next read.
func (m *environments) read(fd int) ([]byte, error) {
	defer func() {
		if cap(m.buf) > 64<<10 {
			m.buf = nil
		}
	}()
	m.buf = slices.Grow(m.buf[:0], 4<<10)
	for {
		n, err := unix.Pread(fd, m.buf[len(m.buf):cap(m.buf)], int64(len(m.buf)))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, fmt.Errorf("environment_fd: pread: %w", err)
		case n == 0:
			return m.buf, nil
		}
		if m.buf = m.buf[:len(m.buf)+max(n, 0)]; len(m.buf) > maxEnvironment {
			return nil, fmt.Errorf("environment_fd: more than %d bytes", maxEnvironment)
		}
		if len(m.buf) == cap(m.buf) {
			m.buf = slices.Grow(m.buf, len(m.buf))
		}
	}
}

func baseEnvironment(sv *spec.Service, more []string, cred *credential) (environ, error) {
	env := make(map[string]string, len(sv.Environment)+len(more))
	set := func(kv string) {
		if k, v, ok := strings.Cut(kv, "="); ok && k != "" {
			env[k] = v
		}
	}
	if !sv.ExactEnvironment {
		for _, kv := range os.Environ() {
			set(kv)
		}
		for _, k := range private {
			delete(env, k)
		}
		if env["PATH"] == "" {
			env["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
		}
		if cred != nil {
			env["USER"], env["LOGNAME"], env["HOME"] = cred.name, cred.name, cred.home
		}
	}
	for _, k := range sv.PassEnvironment {
		if v, ok := os.LookupEnv(k); ok {
			env[k] = v
		}
	}
	for _, kv := range sv.Environment {
		set(kv)
	}
	for _, kv := range more {
		set(kv)
	}
	for _, path := range sv.EnvironmentFile {
		path, optional := strings.CutPrefix(path, "-")
		paths := []string{path}
		if found, _ := filepath.Glob(path); len(found) > 0 {
			paths = found
		}
		for _, path := range paths {
			b, err := os.ReadFile(path)
			if err != nil {
				if optional && errors.Is(err, fs.ErrNotExist) {
					continue
				}
				return nil, fmt.Errorf("EnvironmentFile=: %w", err)
			}
			for _, kv := range parseEnvironmentFile(string(b)) {
				set(kv)
			}
		}
	}
	for _, k := range sv.UnsetEnvironment {
		if k, v, ok := strings.Cut(k, "="); !ok || env[k] == v {
			delete(env, k)
		}
	}
	list := make(environ, 0, len(env))
	for k, v := range env {
		list = append(list, k+"="+v)
	}
	slices.Sort(list)
	return list, nil
}

// parseEnvironmentFile reads NAME=VALUE lines as systemd.exec(5) describes them:
// comments with # or ;, continuation with a backslash, single and double quotes.
func parseEnvironmentFile(text string) []string {
	var list []string
	for i := 0; i < len(text); {
		for i < len(text) && strings.IndexByte(" \t\r\n", text[i]) >= 0 {
			i++
		}
		if i < len(text) && (text[i] == '#' || text[i] == ';') {
			for i < len(text) && text[i] != '\n' {
				if text[i] == '\\' {
					i++
				}
				i++
			}
			continue
		}
		start := i
		for i < len(text) && text[i] != '=' && text[i] != '\n' {
			i++
		}
		if i >= len(text) || text[i] == '\n' {
			continue // no assignment
		}
		name := strings.TrimSpace(text[start:i])
		i++
		for i < len(text) && (text[i] == ' ' || text[i] == '\t') {
			i++
		}
		var v strings.Builder
		var quote byte
		begins := true // a quote is one only at the beginning, or where a quoted part has ended
		keep := 0      // length of v up to which trailing blanks are part of the value
	value:
		for ; i < len(text); i++ {
			c := text[i]
			switch {
			case c == '\\' && quote != '\'' && i+1 < len(text):
				i++
				begins = begins && quote != 0
				if text[i] == '\n' {
					continue
				}
				if quote == '"' && strings.IndexByte("\"\\`$", text[i]) < 0 {
					v.WriteByte('\\')
				}
				v.WriteByte(text[i])
				keep = v.Len()
			case quote != 0 && c == quote:
				quote, begins = 0, true
				keep = v.Len()
			case quote == 0 && begins && (c == '"' || c == '\''):
				quote = c
			case quote == 0 && c == '\n':
				break value
			case quote == 0 && begins && (c == ' ' || c == '\t' || c == '\r'):
			default:
				begins = begins && quote != 0
				v.WriteByte(c)
				if quote != 0 || c != ' ' && c != '\t' && c != '\r' {
					keep = v.Len()
				}
			}
		}
		if isVariable(name) {
			list = append(list, name+"="+v.String()[:keep])
		}
	}
	return list
}

// expand replaces variables in a command's arguments as systemd.service(5) says:
// ${NAME} anywhere in a word, by its value; $NAME as a word of its own, by its value
// split at blanks into any number of words; $$ is a dollar sign. argv[0] is left alone.
func expand(args, env []string) []string {
	lookup := func(name string) string {
		for i := len(env) - 1; i >= 0; i-- {
			if k, v, ok := strings.Cut(env[i], "="); ok && k == name {
				return v
			}
		}
		return ""
	}
	out := make([]string, 0, len(args))
	for i, a := range args {
		if i == 0 || !strings.Contains(a, "$") {
			out = append(out, a)
			continue
		}
		if a[0] == '$' && len(a) > 1 && a[1] != '{' && a[1] != '$' {
			out = append(out, splitValue(lookup(a[1:]))...)
			continue
		}
		var b strings.Builder
		for j := 0; j < len(a); j++ {
			if a[j] == '$' && j+1 < len(a) {
				if a[j+1] == '$' {
					b.WriteByte('$')
					j++
					continue
				}
				if a[j+1] == '{' {
					if end := strings.IndexByte(a[j:], '}'); end >= 2 && (end == 2 || isVariable(a[j+2:j+end])) {
						b.WriteString(lookup(a[j+2 : j+end]))
						j += end
						continue
					}
				}
			}
			b.WriteByte(a[j])
		}
		out = append(out, b.String())
	}
	return out
}

// splitValue splits a variable's value at blanks. Quotes keep blanks together and a
// backslash takes the next character as it is; neither stays.
func splitValue(s string) (words []string) {
	var b strings.Builder
	var quote byte
	inWord := false
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c == '\\' && i+1 < len(s):
			i++
			b.WriteByte(s[i])
			inWord = true
		case quote != 0 && c == quote:
			quote = 0
		case quote == 0 && (c == '"' || c == '\''):
			quote, inWord = c, true
		case quote == 0 && strings.IndexByte(" \t\n\r", c) >= 0:
			if inWord {
				words = append(words, b.String())
			}
			b.Reset()
			inWord = false
		default:
			b.WriteByte(c)
			inWord = true
		}
	}
	if inWord {
		words = append(words, b.String())
	}
	return words
}

func isVariable(s string) bool {
	for i := range len(s) {
		c := s[i]
		if c != '_' && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

type credential struct {
	cred       syscall.Credential
	name, home string
}

// credential of User= and Group=; nil when neither asks for another identity.
func (u *unit) credential() (*credential, error) {
	sv := u.def.Service
	if sv.User == "" && sv.Group == "" {
		return nil, nil
	}
	c := &credential{cred: syscall.Credential{Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid())}}
	id := sv.User
	if id == "" {
		id = strconv.Itoa(os.Getuid())
	}
	usr, err := user.Lookup(id)
	if err != nil {
		if usr, err = user.LookupId(id); err != nil {
			return nil, fmt.Errorf("cannot be user %s (User=): %w", id, err)
		}
	}
	c.name, c.home = usr.Username, usr.HomeDir
	c.cred.Uid, c.cred.Gid = number(usr.Uid), number(usr.Gid)
	if groups, err := usr.GroupIds(); err == nil {
		for _, g := range groups {
			c.cred.Groups = append(c.cred.Groups, number(g))
		}
	}
	if sv.Group != "" {
		g, err := user.LookupGroup(sv.Group)
		if err != nil {
			if g, err = user.LookupGroupId(sv.Group); err != nil {
				return nil, fmt.Errorf("cannot be group %s (Group=): %w", sv.Group, err)
			}
		}
		c.cred.Gid = number(g.Gid)
	}
	if int(c.cred.Uid) == os.Getuid() && int(c.cred.Gid) == os.Getgid() {
		return nil, nil // and no privilege is needed for it
	}
	return c, nil
}

func number(s string) uint32 {
	n, _ := strconv.ParseUint(s, 10, 32)
	return uint32(n)
}

// command makes the process description of a command. The files in it stay the unit's,
// but for those returned, which the caller closes after the start.
func (u *unit) command(c spec.Command, main bool) (*process.Command, []*os.File, error) {
	sv := u.def.Service
	cred, err := u.credential()
	if err != nil {
		return nil, nil, &setupError{exitUser, err}
	}
	env, err := u.environment(main, cred)
	if err != nil {
		return nil, nil, &setupError{noProcess, err}
	}
	p := &process.Command{Path: c.Path, Args: c.Args, Env: env, CgroupFD: -1, OOMScoreAdjust: sv.OOMScoreAdjust, TimerSlack: sv.TimerSlack, Setup: setup(sv)}
	if len(p.Args) == 0 {
		p.Args = []string{c.Path}
	}
	if !c.NoExpand {
		p.Args = expand(p.Args, env)
	}
	if cred != nil {
		p.Credential = &cred.cred
	}
	if p.Path, err = lookPath(c.Path, env); err != nil {
		return nil, nil, err
	}
	if p.Dir, err = u.workingDirectory(cred); err != nil {
		return nil, nil, &setupError{exitChdir, err}
	}
	var opened []*os.File
	p.Stdio, opened, err = u.stdio(main)
	if err != nil {
		closeAll(opened)
		return nil, nil, &setupError{exitStdout, err}
	}
	p.TTY = main && u.isTTY()
	if main {
		names, files := u.passedFDs()
		if len(files) > 0 {
			p.Files = files
			p.Env = append(p.Env, "LISTEN_FDS="+strconv.Itoa(len(files)), "LISTEN_FDNAMES="+strings.Join(names, ":"))
			p.Setup.ListenPID = true
		}
	}
	return p, opened, nil
}

// setupError is why a process could not be made, with the exit status that systemd has
// for it (systemd.exec(5), "Process Exit Codes").
type setupError struct {
	code int
	err  error
}

const (
	noProcess  = 0 // it fails before there would be a process
	exitChdir  = 200
	exitStdout = 209
	exitUser   = 217
)

func (e *setupError) Error() string { return e.err.Error() }
func (e *setupError) Unwrap() error { return e.err }

func lookPath(path string, env []string) (string, error) {
	if strings.Contains(path, "/") {
		return path, nil
	}
	for _, kv := range env {
		if dirs, ok := strings.CutPrefix(kv, "PATH="); ok {
			for _, d := range filepath.SplitList(dirs) {
				if p := filepath.Join(d, path); d != "" && filepath.IsAbs(p) && unix.Access(p, unix.X_OK) == nil {
					return p, nil
				}
			}
		}
	}
	return "", &exec.Error{Name: path, Err: exec.ErrNotFound}
}

func (u *unit) workingDirectory(cred *credential) (string, error) {
	dir := u.def.Service.WorkingDirectory
	if dir == "~" {
		dir, _ = os.UserHomeDir()
		if cred != nil {
			dir = cred.home
		}
	}
	if dir == "" {
		return "/", nil
	}
	fi, err := os.Stat(dir)
	if err == nil && !fi.IsDir() {
		err = &fs.PathError{Op: "chdir", Path: dir, Err: syscall.ENOTDIR}
	}
	if err != nil {
		if u.def.Service.WorkingDirectoryOptional {
			return "/", nil
		}
		return "", fmt.Errorf("WorkingDirectory=: %w", err)
	}
	return dir, nil
}

func (u *unit) isTTY() bool { return u.def.Service.StandardInput == spec.StdioPTY }

// openStdio makes the pipes or the pty of a run: the process's ends go to u.ends, the
// client's to u.kept. Ends of an earlier run are used again, so that a client keeps
// its pipes over a restart of the unit.
func (u *unit) openStdio() error {
	sv := u.def.Service
	if u.isTTY() {
		if u.kept["pty"] != nil {
			return nil
		}
		master, slave, err := pty.Open()
		if err != nil {
			return fmt.Errorf("cannot open a pty: %w", err)
		}
		rows, cols := sv.TTYRows, sv.TTYColumns
		if rows == 0 || cols == 0 {
			rows, cols = 24, 80
		}
		_ = setWinsize(master, rows, cols)
		_ = unix.SetNonblock(process.FD(master), true)
		_ = unix.SetNonblock(process.FD(slave), false) // os.OpenFile made it so; the process must not see that
		u.keep("pty", master)
		for i := range u.ends {
			u.ends[i], err = process.Dup(slave)
			if err != nil {
				return err
			}
		}
		return slave.Close()
	}
	for i, mode := range []string{sv.StandardInput, sv.StandardOutput, sv.StandardError} {
		if mode != spec.StdioPipe || u.ends[i] != nil {
			continue
		}
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return os.NewSyscallError("pipe", err)
		}
		name := []string{"stdin", "stdout", "stderr"}[i]
		mine, theirs := p[0], p[1] // client reads
		if i == 0 {
			mine, theirs = p[1], p[0]
		}
		_ = unix.SetNonblock(mine, true) // the process's end is another description and stays blocking
		u.ends[i] = os.NewFile(uintptr(theirs), name)
		u.keep(name, os.NewFile(uintptr(mine), name))
	}
	return nil
}

func setWinsize(f *os.File, rows, cols uint16) error {
	return unix.IoctlSetWinsize(process.FD(f), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
}

// stdio resolves the three streams. Only the main process gets standard input.
func (u *unit) stdio(main bool) (s [3]*os.File, opened []*os.File, err error) {
	sv := u.def.Service
	out := sv.StandardOutput
	if out == "" && u.isTTY() {
		out = spec.StdioPTY
	}
	errMode := sv.StandardError
	modes := []string{sv.StandardInput, out, errMode}
	own := []*os.File{nil, os.Stdout, os.Stderr}
	for i, mode := range modes {
		if i == 0 && !main {
			continue
		}
		kind, arg, _ := strings.Cut(mode, ":")
		switch kind {
		case "":
			switch i {
			case 1:
				s[1] = own[1]
			case 2:
				s[2] = s[1]
				if out == "" || out == spec.StdioInherit || out == spec.StdioJournal {
					s[2] = own[2]
				}
			}
		case spec.StdioNull:
		case spec.StdioInherit, spec.StdioJournal:
			s[i] = own[i]
			if i == 2 && kind == spec.StdioInherit && out != "" && out != spec.StdioInherit && out != spec.StdioJournal {
				s[2] = s[1] // of standard output
			}
		case spec.StdioPipe, spec.StdioPTY:
			s[i] = u.ends[i]
		case "fd":
			if s[i] = u.given[arg]; s[i] == nil && main {
				return s, opened, fmt.Errorf("there is no descriptor %q for %s", arg, mode)
			}
			if s[i] != nil { // programs expect it, whatever the client uses for itself
				_ = unix.SetNonblock(process.FD(s[i]), false)
			}
		case "file", "append", "truncate":
			flag := unix.O_WRONLY | unix.O_CREAT
			switch {
			case i == 0:
				flag = unix.O_RDONLY
			case kind == "append":
				flag |= unix.O_APPEND
			case kind == "truncate":
				flag |= unix.O_TRUNC
			}
			// Not to wait for the other end of a fifo; the process gets it blocking.
			fd, err := unix.Open(arg, flag|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0o600)
			if err != nil {
				return s, opened, &fs.PathError{Op: "open", Path: arg, Err: err}
			}
			_ = unix.SetNonblock(fd, false)
			f := os.NewFile(uintptr(fd), arg)
			opened = append(opened, f)
			s[i] = f
		default:
			return s, opened, fmt.Errorf("unknown stdio mode %q", mode)
		}
	}
	return s, opened, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}
