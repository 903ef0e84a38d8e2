package jobs

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
	"mypr/supervisor/spec"
)

// Command is what to run: a string for /bin/sh, or a list of words. They are bytes;
// see ospath.Text for how they travel.
type Command struct {
	Shell string
	Words []string
}

// UnmarshalJSON takes a string or a list of strings.
func (c *Command) UnmarshalJSON(b []byte) error {
	if !bytes.HasPrefix(b, []byte("[")) { // encoding/json gives it without blanks around
		return (*ospath.Text)(&c.Shell).UnmarshalJSON(b)
	}
	var words []ospath.Text
	if err := json.Unmarshal(b, &words); err != nil {
		return err
	}
	c.Words = make([]string, len(words))
	for i, w := range words {
		c.Words[i] = string(w)
	}
	return nil
}

// MarshalJSON is the inverse.
func (c Command) MarshalJSON() ([]byte, error) {
	if c.Words == nil {
		return json.Marshal(ospath.Text(c.Shell))
	}
	words := make([]ospath.Text, len(c.Words))
	for i, w := range c.Words {
		words[i] = ospath.Text(w)
	}
	return json.Marshal(words)
}

// Environment is NAME=VALUE strings, as execve(2) takes them. It travels as an object of
// names and values; a kernel of before ownEnvironment, which lives over an update of the
// program, sends its own as one string of them with NUL bytes between.
type Environment struct {
	list []string
	bad  error // a name or a value that no environment can have
}

// UnmarshalJSON takes both.
func (e *Environment) UnmarshalJSON(b []byte) error {
	if bytes.HasPrefix(b, []byte(`"`)) { // encoding/json gives it without blanks around
		var text ospath.Text
		if err := text.UnmarshalJSON(b); err != nil {
			return err
		}
		*e = Environment{list: splitEnvironment(string(text))}
		return nil
	}
	var m map[string]ospath.Text
	if err := json.Unmarshal(b, &m); err != nil {
		return err
	}
	*e = Environment{list: make([]string, 0, len(m))}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		switch value := m[name]; {
		case name == "" || strings.ContainsAny(name, "=\x00"):
			e.bad = rpc.Errorf(rpc.CodeInvalidRequest, "%q cannot be the name of an environment variable", name)
		case strings.IndexByte(string(value), 0) >= 0:
			e.bad = rpc.Errorf(rpc.CodeInvalidRequest, "the environment variable %s contains a NUL byte", name)
		default:
			e.list = append(e.list, name+"="+string(value))
		}
	}
	return nil
}

// get is the value of a variable.
func (e *Environment) get(name string) (string, bool) {
	for _, kv := range e.list {
		if value, ok := strings.CutPrefix(kv, name); ok && strings.HasPrefix(value, "=") {
			return value[1:], true
		}
	}
	return "", false
}

// Limits bound a job beyond what the user may do anyway.
type Limits struct {
	Memory uint64  `json:"memory,omitempty"` // bytes
	CPU    float64 `json:"cpu,omitempty"`    // processors
	PIDs   uint64  `json:"pids,omitempty"`   // processes and threads
	Time   float64 `json:"time,omitempty"`   // seconds
}

// UnmarshalJSON takes {"memory": "2G" or bytes, "cpu": 1.5, "pids": 200, "time": seconds}.
func (l *Limits) UnmarshalJSON(b []byte) error {
	var raw struct {
		Memory json.RawMessage `json:"memory"`
		CPU    *float64        `json:"cpu"`
		PIDs   *uint64         `json:"pids"`
		Time   *float64        `json:"time"`
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&raw); err != nil {
		return rpc.Errorf(rpc.CodeInvalidRequest, "bad limits: %v", err).
			WithHint(`limits are {"memory": bytes or "512M", "cpu": processors, "pids": count, "time": seconds}`)
	}
	if len(raw.Memory) > 0 && string(raw.Memory) != "null" {
		n, err := parseSize(raw.Memory)
		if err != nil {
			return err
		}
		l.Memory = n
	}
	if p := raw.CPU; p != nil {
		if !(*p >= 0.01 && *p <= 10_000) {
			return rpc.Errorf(rpc.CodeInvalidRequest, "limits: cpu is a number of processors from 0.01 on, not %v", *p)
		}
		l.CPU = *p
	}
	if p := raw.PIDs; p != nil {
		if *p == 0 {
			return rpc.Errorf(rpc.CodeInvalidRequest, "limits: pids must be at least 1")
		}
		l.PIDs = *p
	}
	if p := raw.Time; p != nil {
		if !(*p > 0 && *p < maxSeconds) {
			return rpc.Errorf(rpc.CodeInvalidRequest, "limits: time is a positive number of seconds, not %v", *p)
		}
		l.Time = *p
	}
	return nil
}

// maxSeconds is what a time.Duration can hold, less a margin.
const maxSeconds = 9e9

// minMemory is the least that a process can start with.
const minMemory = 1 << 20

func parseSize(raw json.RawMessage) (uint64, error) {
	bad := rpc.Errorf(rpc.CodeInvalidRequest, `limits: memory is a number of bytes of at least %d, or a size like "512M" or "2G", not %s`, minMemory, raw)
	var text string
	if json.Unmarshal(raw, &text) != nil {
		text = string(raw)
	}
	text = strings.TrimSuffix(strings.ToUpper(strings.TrimSpace(text)), "B")
	unit := 1.0
	if i := strings.IndexAny(text, "KMGT"); i >= 0 {
		if rest := text[i+1:]; rest != "" && rest != "I" {
			return 0, bad
		}
		unit = math.Pow(1024, float64(1+strings.IndexByte("KMGT", text[i])))
		text = text[:i]
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if n *= unit; err != nil || !(n >= minMemory && n < 1<<62) {
		return 0, bad
	}
	return uint64(n), nil
}

// startParams of shell.start and shell.run.
type startParams struct {
	// ID, 32 hex digits, names the job: repeated, it is the same job, which is not
	// started again. Empty: the service makes one.
	ID      string      `json:"id"`
	Command Command     `json:"command"`
	Cwd     ospath.Text `json:"cwd"` // absolute
	Env     Environment `json:"env"` // all of it
	// OwnEnv, in place of Env, is the environment of the kernel: nearly every command has it.
	OwnEnv *ownEnvironment `json:"own_env"`
	Input  *string         `json:"input"`
	Stdin  bool            `json:"stdin"`
	PTY    bool            `json:"pty"`
	Rows   int             `json:"rows"`
	Cols   int             `json:"cols"`
	Limits Limits          `json:"limits"`
	// Timeout in seconds ends the job as cancelled, where Limits.Time makes it a failure.
	Timeout  *float64 `json:"timeout"`
	MaxBytes int      `json:"max_bytes"` // shell.run: of the answer
}

const (
	defaultRows = 24
	defaultCols = 80
)

// Limits of execve(2): each string at most 128 KiB (MAX_ARG_STRLEN), all together a
// quarter of the stack limit, never more than 6 MiB. Checked here because the kernel
// says E2BIG for either without saying which.
const (
	maxArg  = 128<<10 - 1
	maxArgs = 6 << 20
)

func (p *startParams) check() error {
	bad := func(format string, args ...any) error { return rpc.Errorf(rpc.CodeInvalidRequest, format, args...) }
	if p.ID != "" && !isID(p.ID) {
		return bad("a job id is 32 lowercase hexadecimal digits, not %.40q", p.ID)
	}
	words := p.Command.Words
	switch {
	case words == nil && strings.TrimSpace(p.Command.Shell) == "":
		return bad("the command is empty")
	case words == nil:
		words = []string{p.Command.Shell}
	case len(words) == 0 || words[0] == "":
		return bad("the command has no program: the first word of the list is what is run")
	}
	total := 0
	for i, w := range words {
		if strings.IndexByte(w, 0) >= 0 {
			return bad("word %d of the command contains a NUL byte, which no program can be given", i)
		}
		if len(w) > maxArg {
			return bad("word %d of the command has %d bytes; the kernel takes at most %d", i, len(w), maxArg).(*rpc.Error).
				WithHint("pass large data by input= or by a file")
		}
		total += len(w) + 9
	}
	if p.Env.bad != nil {
		return p.Env.bad
	}
	for _, kv := range p.Env.list {
		if len(kv) > maxArg {
			name, value, _ := strings.Cut(kv, "=")
			return bad("the environment variable %s has %d bytes; the kernel takes at most %d", name, len(value), maxArg)
		}
		total += len(kv) + 9
	}
	if total > maxArgs {
		return bad("command and environment have %d bytes together; the kernel takes at most %d", total, maxArgs).(*rpc.Error).
			WithHint("pass large data by input= or by a file")
	}
	if p.Input != nil && p.Stdin {
		return bad("input= and stdin=True exclude each other: input closes standard input at its end")
	}
	if p.PTY {
		if p.Rows == 0 {
			p.Rows = defaultRows
		}
		if p.Cols == 0 {
			p.Cols = defaultCols
		}
		if err := checkSize(p.Rows, p.Cols); err != nil {
			return err
		}
	}
	if t := p.Timeout; t != nil && !(*t >= 0 && *t < maxSeconds) {
		return bad("timeout is a number of seconds, not %v", *t)
	}
	if !filepath.IsAbs(string(p.Cwd)) {
		return bad("the working directory %q is not absolute", p.Cwd)
	}
	st, err := os.Stat(string(p.Cwd))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return rpc.Errorf(rpc.CodeNotFound, "the working directory %s does not exist", p.Cwd).WithHint("pass cwd=")
	case err != nil:
		return rpc.Errorf(rpc.CodeInvalidRequest, "the working directory cannot be used: %v", err)
	case !st.IsDir():
		return bad("the working directory %s is not a directory", p.Cwd)
	}
	return nil
}

func checkSize(rows, cols int) error {
	if rows < 1 || rows > 65535 || cols < 1 || cols > 65535 {
		return rpc.Errorf(rpc.CodeInvalidRequest, "a terminal has 1 to 65535 rows and columns, not %d and %d", rows, cols)
	}
	return nil
}

// lookPath finds the program as execvp(3) in the directory and environment of the job would.
func lookPath(name, dir, path string) (string, error) {
	try := func(p string) error {
		if !filepath.IsAbs(p) {
			p = filepath.Join(dir, p)
		}
		st, err := os.Stat(p)
		switch {
		case err != nil:
			return err
		case st.IsDir():
			return unix.EISDIR
		}
		return unix.Access(p, unix.X_OK)
	}
	abs := func(p string) string {
		if filepath.IsAbs(p) {
			return p
		}
		return filepath.Join(dir, p)
	}
	if strings.Contains(name, "/") {
		if err := try(name); err != nil {
			return "", commandError(name, err)
		}
		return abs(name), nil
	}
	var found error
	for _, d := range filepath.SplitList(path) {
		p := filepath.Join(d, name)
		switch err := try(p); {
		case err == nil:
			return abs(p), nil
		case !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTDIR):
			found = err
		}
	}
	if found != nil {
		return "", commandError(name, found)
	}
	return "", rpc.Errorf(rpc.CodeNotFound, "cannot start %q: there is no such program in PATH", name)
}

func commandError(name string, err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	code := rpc.CodeInvalidRequest
	switch {
	case errors.Is(err, os.ErrNotExist):
		code = rpc.CodeNotFound
	case errors.Is(err, os.ErrPermission):
		code = rpc.CodePermission
	}
	return rpc.Errorf(code, "cannot start %q: %v", name, err)
}

// defaultPath is what execvp(3) searches when the environment has no PATH.
const defaultPath = "/bin:/usr/bin"

// unit makes the unit of a job from the built-in job.service.
func unit(template *spec.Unit, id string, p *startParams) (*spec.Unit, error) {
	u := *template
	s := spec.Service{}
	if template.Service != nil {
		s = *template.Service
	}
	u.Name, u.Service, u.Source = unitName(id), &s, nil
	u.Description = p.Command.title()
	words := p.Command.Words
	if words == nil {
		words = []string{"/bin/sh", "-c", p.Command.Shell}
	}
	path, ok := p.Env.get("PATH")
	if !ok {
		path = defaultPath
	}
	program, err := lookPath(words[0], string(p.Cwd), path)
	if err != nil {
		return nil, err
	}
	s.ExecStart = []spec.Command{{Path: program, Args: words, NoExpand: true}}
	s.WorkingDirectory = string(p.Cwd)
	s.ExactEnvironment = true
	s.EnvironmentFD = environmentName
	switch {
	case p.PTY:
		s.StandardInput, s.StandardOutput, s.StandardError = spec.StdioPTY, spec.StdioPTY, spec.StdioPTY
		s.TTYRows, s.TTYColumns = uint16(p.Rows), uint16(p.Cols)
	default:
		s.StandardInput, s.StandardOutput, s.StandardError = spec.StdioNull, "fd:"+outputName, "fd:"+errorName
		if p.Input != nil || p.Stdin {
			s.StandardInput = "fd:" + inputName
		}
	}
	s.MemoryMax = p.Limits.Memory
	s.TasksMax = p.Limits.PIDs
	s.CPUQuota = uint64(p.Limits.CPU * 1e6)
	if p.Limits.Memory > 0 {
		// Else a job at its limit goes on in swap, slowly, and the limit is none.
		s.MemorySwapMax = 1 // bytes; 0 would mean "not set"
	}
	if seconds, _ := p.deadline(); seconds > 0 {
		s.RuntimeMaxSec = time.Duration(seconds * float64(time.Second))
	}
	u.KeepRaw()
	return &u, nil
}

// deadline is the tighter of timeout and the time limit, 0 for none; limit reports
// which of them it was.
func (p *startParams) deadline() (seconds float64, limit bool) {
	seconds, limit = p.Limits.Time, p.Limits.Time > 0
	if t := p.Timeout; t != nil && (!limit || *t <= seconds) {
		return max(*t, 0.001), false
	}
	return seconds, limit
}

// Names of the descriptors that become the streams of a command, and of its environment. The
// other ends of pipes have the names of the streams.
const (
	environmentName = "env"
	inputName       = "in"
	outputName      = "out"
	errorName       = "err"
)

// title is one line for people.
func (c Command) title() string {
	text := c.Shell
	if c.Words != nil {
		text = strings.Join(c.Words, " ")
	}
	text = strings.Join(strings.Fields(text), " ")
	if r := []rune(text); len(r) > 120 {
		text = string(r[:119]) + "…"
	}
	return text
}

const jobPrefix = "job-"

func unitName(id string) string { return jobPrefix + id + ".service" }

func isID(s string) bool {
	if len(s) != 32 {
		return false
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
