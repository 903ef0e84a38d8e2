// Package kernel is the host side of the Python kernel: it carries the Python
// sources of mypr_kernel inside the program, makes the workspace's Python
// environment, and says how to launch a kernel in it.
//
// It owns .mypr/venv, the extracted sources and the copy of uv in the user's cache.
// It does not start the kernel (the supervisor does, at the manager's request), does
// not talk to it (package kernel/wire has the messages), and starts no process
// itself: every command goes through a Runner.
//
// # What a prepared environment is
//
// .mypr/venv is a virtual environment made by uv, or by the venv module of the
// standard library where no uv can be had, with a marker file (mypr.json) that says
// what was found when it was made. While the marker and the interpreter agree,
// Prepare reads a few inodes and starts nothing: it costs well under a millisecond.
// Otherwise it makes what is missing, step by step, and tells each step to
// Options.Progress.
//
// A kernel needs the standard library only. IPython is installed when it can be; when
// it cannot, the kernel is plain, Launch.PlainReason says why, and a start at least
// RetryAfter later tries again.
package kernel

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Supported versions of Python, newest first. Without a configured one the newest
// that is installed is taken.
var Supported = []string{"3.14", "3.13", "3.12", "3.11", "3.10"}

// RetryAfter is how long a failed attempt to install IPython is not repeated, so that
// a machine without a network does not wait for it at every kernel start.
const RetryAfter = time.Hour

// Config is the [python] table of config.toml.
type Config struct {
	// Python is a version ("3.12") or the path of an interpreter. Empty: the newest
	// supported one.
	Python string `toml:"python" json:"python,omitempty"`
	// Plain: do not install IPython.
	Plain bool `toml:"plain" json:"plain,omitempty"`
}

// isPath reports whether Python names an interpreter and no version.
func (c Config) isPath() bool { return strings.ContainsRune(c.Python, '/') }

// Check refuses what is wrong with Python wherever it is: a version that is none, or is
// not supported. Whether it can be had here is Available's to say.
func (c Config) Check() error {
	if c.Python == "" || c.isPath() || version.MatchString(c.Python) && supported(c.Python) {
		return nil
	}
	return fmt.Errorf("%q is no supported version of Python (%s) and no path of an interpreter, which has a slash", c.Python, strings.Join(Supported, ", "))
}

// version is what Python's own are written like, with or without the last number.
var version = regexp.MustCompile(`^3\.\d+(\.\d+([a-z]+\d+)?)?$`)

// Options of Prepare.
type Options struct {
	Root      string // the workspace's .mypr directory
	Workspace string // where the kernel runs
	Config    Config
	Env       []string // NAME=VALUE, complete: what commands and the kernel get
	Run       Runner
	Progress  func(step string) // may be nil
	// CacheDir overrides the user's cache directory (XDG_CACHE_HOME/mypr).
	CacheDir string
}

// Launch says how to start a kernel.
type Launch struct {
	Path string
	Args []string // Args[0] is argv[0]
	Env  []string // complete
	Dir  string

	Python      string // version, "3.13.0"
	Executable  string // of the environment, same as Path
	PlainReason string // why IPython is not installed; "" when it is
	UV          string // path of uv, "" without
}

// Command is one program to run to its end.
type Command struct {
	Name string // short, for unit names and messages: "venv", "ipython"
	Path string
	Args []string // Args[0] is argv[0]
	Dir  string
	Env  []string // complete
}

// Result is how a command ended. Output and Stderr may be cut to their last 64 KiB.
type Result struct {
	ExitCode int // -1: ended by a signal
	Output   string
	Stderr   string
}

// Runner runs a command and everything it leaves behind to the end. The error is not
// nil only when the command could not be started or ctx ended first; then nothing of
// it is left running.
type Runner interface {
	Run(ctx context.Context, c Command) (Result, error)
}

// Prepare makes sure that the environment is there and returns how to launch a
// kernel in it. It must not run twice at a time for one Root.
func Prepare(ctx context.Context, o Options) (*Launch, error) {
	p := newPreparation(o)
	m, err := p.environment(ctx)
	if err != nil {
		return nil, err
	}
	sources, err := p.sources(ctx, m)
	if err != nil {
		return nil, err
	}
	python := p.python()
	return &Launch{
		Path: python,
		Args: append([]string{python}, launchArgs(sources)...),
		Env:  kernelEnv(o.Env, p.venv),
		Dir:  o.Workspace,

		Python: m.Version, Executable: python, PlainReason: m.PlainReason, UV: m.UV,
	}, nil
}

// Available refuses what Prepare is sure to refuse, as far as that costs little to find
// out: it makes and fetches nothing, and runs an interpreter only where an environment
// has to be made. Whoever is about to end a kernel for a new one asks it first. nil
// promises nothing: what has to be downloaded may not come.
func Available(ctx context.Context, o Options) error {
	p := newPreparation(o)
	exists, err := p.exists()
	if err != nil {
		return err
	}
	if exists {
		m, known := p.readMarker()
		if _, err := identify(p.python()); err == nil && !(known && m.Requested != p.Config.Python) {
			return nil // it is kept if it works
		}
	}
	_, _, err = p.source(ctx, false)
	return err
}

// kernelEnv is env as a shell would have it after activating the environment.
// PYTHONHOME would point the interpreter at another installation's library.
func kernelEnv(env []string, venv string) []string {
	path := "/usr/local/bin:/usr/bin:/bin"
	out := make([]string, 0, len(env)+2)
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		switch name {
		case "PATH":
			path = value
		case "PYTHONHOME", "VIRTUAL_ENV":
		default:
			out = append(out, kv)
		}
	}
	return append(out, "PATH="+filepath.Join(venv, "bin")+":"+path, "VIRTUAL_ENV="+venv)
}
