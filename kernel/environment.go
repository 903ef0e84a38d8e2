package kernel

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Deadlines of the steps. The longest a first start can take is their sum.
const (
	probeTimeout   = 10 * time.Second
	venvTimeout    = 60 * time.Second
	fetchTimeout   = 90 * time.Second
	installTimeout = 180 * time.Second
)

// preparation is one run of Prepare.
type preparation struct {
	Options
	venv string
	uv   *uv // nil: not looked for yet
}

func newPreparation(o Options) *preparation {
	p := &preparation{Options: o, venv: filepath.Join(o.Root, "venv")}
	if p.Progress == nil {
		p.Progress = func(string) {}
	}
	return p
}

// uv is where it was found, or why there is none.
type uv struct{ path, problem string }

// marker is .mypr/venv/mypr.json: what is known of the environment. It is written
// last, so an environment without one was not finished.
type marker struct {
	Schema      int       `json:"schema"`
	Requested   string    `json:"requested"` // Config.Python when it was made
	Version     string    `json:"version"`
	Base        fileID    `json:"base"` // the interpreter behind the link
	UV          string    `json:"uv,omitempty"`
	IPython     string    `json:"ipython,omitempty"` // version
	PlainReason string    `json:"plain_reason,omitempty"`
	Tried       time.Time `json:"tried"` // last attempt to install IPython
	// Compiled names the sources and the Python that they were last compiled for.
	Compiled string `json:"compiled,omitempty"`
}

const markerSchema = 1

// fileID changes when a file is replaced or rewritten.
type fileID struct {
	Path string `json:"path"`
	Ino  uint64 `json:"ino"`
	Size int64  `json:"size"`
	Time int64  `json:"mtime_ns"`
}

func identify(path string) (fileID, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return fileID{}, err
	}
	st, err := os.Stat(real)
	if err != nil {
		return fileID{}, err
	}
	return fileID{real, st.Sys().(*syscall.Stat_t).Ino, st.Size(), st.ModTime().UnixNano()}, nil
}

func (p *preparation) python() string { return filepath.Join(p.venv, "bin", "python") }

func (p *preparation) markerPath() string { return filepath.Join(p.venv, "mypr.json") }

func (p *preparation) readMarker() (*marker, bool) {
	data, err := os.ReadFile(p.markerPath())
	if err != nil {
		return nil, false
	}
	m := &marker{}
	if json.Unmarshal(data, m) != nil || m.Schema != markerSchema {
		return nil, false
	}
	return m, true
}

func (p *preparation) writeMarker(m *marker) error {
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	tmp := p.markerPath() + ".new"
	if err := os.WriteFile(tmp, append(data, '\n'), 0o644); err != nil {
		return fmt.Errorf("cannot record the Python environment: %w", err)
	}
	return os.Rename(tmp, p.markerPath())
}

// exists reports whether there is an environment; what is none is an error.
func (p *preparation) exists() (bool, error) {
	st, err := os.Lstat(p.venv)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("cannot look at the Python environment: %w", err)
	case st.Mode()&fs.ModeSymlink != 0:
		target, _ := os.Readlink(p.venv)
		return false, fmt.Errorf("%s is a symbolic link to %s: this environment is changed and replaced by the runtime, so it must be its own; "+
			"remove the link, and to use that interpreter write python = %q below [python] in %s",
			p.venv, target, filepath.Join(target, "bin", "python"), filepath.Join(p.Root, "config.toml"))
	case !st.IsDir():
		return false, fmt.Errorf("%s is not a directory: move it away", p.venv)
	}
	return true, nil
}

// environment returns the description of a working environment.
func (p *preparation) environment(ctx context.Context) (*marker, error) {
	exists, err := p.exists()
	if err != nil {
		return nil, err
	}
	if !exists {
		return p.create(ctx)
	}
	m, known := p.readMarker()
	base, err := identify(p.python())
	if err != nil {
		return p.replace(ctx, fmt.Sprintf("its interpreter is gone (%v)", err))
	}
	if known && m.Requested != p.Config.Python {
		return p.replace(ctx, fmt.Sprintf("it was made for python = %q and config.toml now says %q", m.Requested, p.Config.Python))
	}
	if !known || m.Base != base {
		// Not finished, or its Python was upgraded: what is it now?
		found, err := p.probe(ctx, p.python())
		if err != nil {
			return p.replace(ctx, "its interpreter does not run: "+err.Error())
		}
		if known && minor(found.Version) != minor(m.Version) {
			return p.replace(ctx, fmt.Sprintf("its Python changed from %s to %s", m.Version, found.Version))
		}
		if !supported(found.Version) {
			return p.replace(ctx, "Python "+found.Version+" is not supported")
		}
		if !known {
			m = &marker{Schema: markerSchema, Requested: p.Config.Python}
		}
		m.Version, m.Base = found.Version, base
		return m, p.finish(ctx, m)
	}
	if m.IPython == "" && !p.Config.Plain && time.Since(m.Tried) > RetryAfter || (m.PlainReason == plainByConfig) != p.Config.Plain {
		return m, p.finish(ctx, m)
	}
	return m, nil
}

const plainByConfig = "config.toml says plain = true"

// replace moves an unusable environment aside, so that nothing in it is lost, and
// makes a new one.
func (p *preparation) replace(ctx context.Context, why string) (*marker, error) {
	id := make([]byte, 4)
	_, _ = rand.Read(id)
	aside := filepath.Join(p.Root, ".venv-invalid-"+hex.EncodeToString(id))
	p.Progress("moving .mypr/venv to " + filepath.Base(aside) + ": " + why)
	if err := os.Rename(p.venv, aside); err != nil {
		return nil, fmt.Errorf("the Python environment is unusable (%s) and cannot be moved aside: %w", why, err)
	}
	return p.create(ctx)
}

// create makes a new environment.
func (p *preparation) create(ctx context.Context) (*marker, error) {
	if err := os.MkdirAll(p.Root, 0o755); err != nil {
		return nil, err
	}
	base, uv, err := p.source(ctx, true)
	if err != nil {
		return nil, err
	}
	request := base
	if request == "" {
		// Only uv can help: it downloads an interpreter.
		if request = p.Config.Python; request == "" {
			request = Supported[0]
		}
		p.Progress("downloading Python " + request)
	} else {
		p.Progress("creating .mypr/venv with " + base)
	}
	if err := p.makeVenv(ctx, uv.path, request); err != nil {
		return nil, err
	}
	found, err := p.probe(ctx, p.python())
	if err != nil {
		return nil, fmt.Errorf("the new Python environment does not work: %w", err)
	}
	id, err := identify(p.python())
	if err != nil {
		return nil, err
	}
	m := &marker{Schema: markerSchema, Requested: p.Config.Python, Version: found.Version, Base: id, UV: uv.path}
	return m, p.finish(ctx, m)
}

// source is what an environment can be made with: an interpreter, uv, or both. uv is
// looked for, and fetched, when fetch says so or there is no interpreter, which then
// cannot fetch it either.
func (p *preparation) source(ctx context.Context, fetch bool) (base string, uv uv, err error) {
	if base, err = p.findPython(ctx); err != nil {
		return "", uv, err
	}
	if base == "" || fetch {
		uv = p.findUV(ctx, base)
	}
	if base == "" && uv.path == "" {
		return "", uv, p.noPython(uv.problem)
	}
	return base, uv, nil
}

// makeVenv makes the environment in place: its scripts hold absolute paths.
func (p *preparation) makeVenv(ctx context.Context, uv, request string) error {
	ctx, cancel := context.WithTimeout(ctx, venvTimeout)
	defer cancel()
	var failures []string
	if uv != "" {
		_, err := p.run(ctx, "venv", p.Root, uv, "venv", "--no-project", "--quiet", "--python", request, p.venv)
		if err == nil {
			return nil
		}
		failures = append(failures, err.Error())
	}
	if filepath.IsAbs(request) {
		// Without pip: making pip is what is slow and what distributions leave out.
		if err := os.RemoveAll(p.venv); err != nil {
			return err
		}
		_, err := p.run(ctx, "venv", p.Root, request, "-I", "-m", "venv", "--without-pip", p.venv)
		if err == nil {
			return nil
		}
		failures = append(failures, err.Error())
	}
	_ = os.RemoveAll(p.venv) // half an environment is none
	return fmt.Errorf("cannot create the Python environment %s: %s", p.venv, strings.Join(failures, "; "))
}

// finish installs IPython if it is wanted and absent, and records the outcome.
func (p *preparation) finish(ctx context.Context, m *marker) error {
	m.IPython, m.PlainReason = "", ""
	if p.Config.Plain {
		m.PlainReason = plainByConfig
		return p.writeMarker(m)
	}
	m.IPython = p.installedIPython(m.Version)
	if m.IPython == "" {
		m.Tried = time.Now()
		if m.UV == "" || !executable(m.UV) {
			uv := p.findUV(ctx, m.Base.Path)
			m.UV, m.PlainReason = uv.path, uv.problem
		}
		if m.UV != "" {
			p.Progress("installing IPython")
			if err := p.installIPython(ctx, m.UV); err != nil {
				m.PlainReason = "IPython could not be installed: " + err.Error()
			} else if m.IPython = p.installedIPython(m.Version); m.IPython == "" {
				m.PlainReason = "IPython was installed but cannot be found in " + p.venv
			}
		}
		if err := ctx.Err(); err != nil {
			return err // given up by the caller: not the environment's failure
		}
	}
	return p.writeMarker(m)
}

func (p *preparation) installIPython(ctx context.Context, uv string) error {
	ctx, cancel := context.WithTimeout(ctx, installTimeout)
	defer cancel()
	_, err := p.run(ctx, "ipython", p.Root, uv, "pip", "install", "--quiet", "--python", p.python(), "ipython")
	return err
}

// installedIPython is the version of the environment's IPython, by its metadata
// directory: importing it would take 0.7 s.
func (p *preparation) installedIPython(python string) string {
	found, _ := filepath.Glob(filepath.Join(p.venv, "lib", "python"+minor(python), "site-packages", "ipython-*.dist-info"))
	for _, dir := range found {
		name := strings.TrimSuffix(filepath.Base(dir), ".dist-info")
		return strings.TrimPrefix(name, "ipython-")
	}
	return ""
}

// run runs one program and turns every failure into an error that names it and the
// last thing it said.
func (p *preparation) run(ctx context.Context, name, dir, path string, args ...string) (Result, error) {
	r, err := p.Run.Run(ctx, Command{
		Name: name, Path: path, Args: append([]string{path}, args...), Dir: dir, Env: commandEnv(p.Env),
	})
	what := filepath.Base(path) + " " + args[0]
	if args[0] == "-I" && len(args) > 2 {
		what = filepath.Base(path) + " " + args[1] + " " + args[2]
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return r, fmt.Errorf("%s took too long and was stopped", what)
	case err != nil:
		return r, fmt.Errorf("%s: %w", what, err)
	case r.ExitCode == 203: // EXEC of the unit that ran it
		return r, fmt.Errorf("%s cannot be executed", path)
	case r.ExitCode != 0:
		said := lastWords(r.Stderr)
		if said == "" {
			said = lastWords(r.Output)
		}
		if said == "" {
			said = "it said nothing"
		}
		return r, fmt.Errorf("%s exited with status %d: %s", what, r.ExitCode, said)
	}
	return r, nil
}

// commandEnv keeps what must not reach uv, pip or a probe out of the environment:
// another activated environment and Python settings meant for other programs.
func commandEnv(env []string) []string {
	out := make([]string, 0, len(env)+2)
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		switch name {
		case "VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP",
			"PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV":
		default:
			out = append(out, kv)
		}
	}
	// Nobody is there to answer a question or to look at a progress bar.
	return append(out, "PIP_NO_INPUT=1", "UV_NO_PROGRESS=1", "NO_COLOR=1")
}

// lastWords is the end of a program's output on one line, at most 300 bytes.
func lastWords(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > 300 {
		s = "…" + strings.ToValidUTF8(s[len(s)-300:], "")
	}
	return s
}

func minor(version string) string {
	parts := strings.SplitN(version, ".", 3)
	if len(parts) < 2 {
		return version
	}
	return parts[0] + "." + parts[1]
}

func supported(version string) bool {
	for _, v := range Supported {
		if minor(version) == v {
			return true
		}
	}
	return false
}

func executable(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && st.Mode().Perm()&0o111 != 0
}
