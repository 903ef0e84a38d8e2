package kernel

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// interpreter is what a probe of a Python says of itself.
type interpreter struct {
	Version string `json:"version"`
	Path    string `json:"path"` // of the real program, never a version manager's shim
}

// probe asks an interpreter who it is. sys._base_executable leads out of a virtual
// environment, so that ours never depends on another one.
func (p *preparation) probe(ctx context.Context, path string) (interpreter, error) {
	const script = `import json, platform, sys
print(json.dumps({"version": platform.python_version(), "path": getattr(sys, "_base_executable", None) or sys.executable}))`
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	r, err := p.run(ctx, "probe", "/", path, "-I", "-S", "-c", script)
	if err != nil {
		return interpreter{}, err
	}
	var found interpreter
	if err := json.Unmarshal([]byte(r.Output), &found); err != nil || found.Path == "" {
		return interpreter{}, fmt.Errorf("%s did not answer as a Python does: %s", path, lastWords(r.Output))
	}
	return found, nil
}

// findPython returns the interpreter to make the environment with, "" when none is
// installed that fits and only uv could get one. A configured path that does not work
// is an error: guessing another would hide it.
func (p *preparation) findPython(ctx context.Context) (string, error) {
	want := p.Config.Python
	if p.Config.isPath() {
		if !filepath.IsAbs(want) {
			want = filepath.Join(p.Workspace, want)
		}
		found, err := p.probe(ctx, want)
		if err != nil {
			return "", fmt.Errorf("the interpreter that config.toml names, %s, does not work: %w", want, err)
		}
		if !supported(found.Version) {
			return "", fmt.Errorf("the interpreter that config.toml names, %s, is Python %s; supported are %s",
				want, found.Version, strings.Join(Supported, ", "))
		}
		return found.Path, nil
	}
	if err := p.Config.Check(); err != nil {
		return "", fmt.Errorf("config.toml: python.python: %w", err)
	}
	for _, c := range p.candidates() {
		found, err := p.probe(ctx, c.path)
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		if err == nil && supported(found.Version) && matches(found.Version, want) {
			return found.Path, nil
		}
	}
	return "", nil
}

// matches: "3.12" and "3.12.1" are matched by 3.12.1, "3.12.0" is not.
func matches(version, want string) bool {
	return want == "" || version == want || strings.HasPrefix(version, want+".")
}

type candidate struct {
	path  string
	minor int // of Python 3; 0: unknown
}

// candidates lists the interpreters on PATH and those that uv and pyenv manage, the
// newest first and in PATH's order within a version. Plain "python3" is asked for its
// version only by a probe, so it is put where its link's target name says, or last.
func (p *preparation) candidates() []candidate {
	var found []candidate
	seen := map[string]bool{}
	add := func(path string) {
		real, err := filepath.EvalSymlinks(path)
		if err != nil || seen[real] || !executable(real) {
			return
		}
		seen[real] = true
		if shim(real) {
			return // asking it costs 50 ms and mostly fails; its versions are listed below
		}
		n := minorOf(filepath.Base(path))
		if n == 0 {
			n = minorOf(filepath.Base(real))
		}
		found = append(found, candidate{real, n})
	}
	dirs := filepath.SplitList(lookup(p.Env, "PATH"))
	for _, dir := range dirs {
		for _, v := range Supported {
			add(filepath.Join(dir, "python"+v))
		}
		add(filepath.Join(dir, "python3"))
		add(filepath.Join(dir, "python"))
	}
	var managed []string
	for _, dir := range dirs { // pyenv: PATH has <root>/shims, interpreters are in <root>/versions
		if filepath.Base(dir) == "shims" {
			managed = append(managed, filepath.Join(filepath.Dir(dir), "versions"))
		}
	}
	if dir := lookup(p.Env, "UV_PYTHON_INSTALL_DIR"); dir != "" {
		managed = append(managed, dir)
	} else if dir := lookup(p.Env, "XDG_DATA_HOME"); dir != "" {
		managed = append(managed, filepath.Join(dir, "uv", "python"))
	} else if home := lookup(p.Env, "HOME"); home != "" {
		managed = append(managed, filepath.Join(home, ".local", "share", "uv", "python"))
	}
	for _, dir := range managed {
		for _, v := range Supported {
			paths, _ := filepath.Glob(filepath.Join(dir, "*", "bin", "python"+v))
			slices.SortFunc(paths, func(a, b string) int { return compareVersions(b, a) })
			for _, path := range paths {
				add(path)
			}
		}
	}
	slices.SortStableFunc(found, func(a, b candidate) int { return cmp.Compare(b.minor, a.minor) })
	return found
}

// shim reports whether the program is a version manager's stand-in: a shell script.
func shim(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return true
	}
	defer f.Close()
	head := make([]byte, 2)
	_, _ = f.Read(head)
	return bytes.Equal(head, []byte("#!"))
}

// minorOf is 12 for "python3.12", 0 for other names.
func minorOf(name string) int {
	n, err := strconv.Atoi(strings.TrimPrefix(name, "python3."))
	if err != nil {
		return 0
	}
	return n
}

// compareVersions orders paths by the numbers in them: ".../3.9.1/..." before ".../3.10.0/...".
func compareVersions(a, b string) int {
	return slices.Compare(numbers(a), numbers(b))
}

func numbers(s string) []int {
	var out []int
	for _, f := range strings.FieldsFunc(s, func(r rune) bool { return r < '0' || r > '9' }) {
		if n, err := strconv.Atoi(f); err == nil {
			out = append(out, n)
		}
	}
	return out
}

func (p *preparation) noPython(uvProblem string) error {
	want := "Python " + Supported[len(Supported)-1] + " or newer"
	if p.Config.Python != "" {
		want = "Python " + p.Config.Python
	}
	return fmt.Errorf("no %s found on PATH and no uv to get one (%s): install it, or write the path of an interpreter as python = \"…\" below [python] in %s",
		want, uvProblem, filepath.Join(p.Root, "config.toml"))
}

// findUV returns uv from PATH, or a copy in the user's cache that is fetched once as
// an ordinary package. It looks once in a preparation: a second fetch would fail like
// the first.
func (p *preparation) findUV(ctx context.Context, python string) uv {
	if p.uv == nil {
		path, problem := p.lookForUV(ctx, python)
		p.uv = &uv{path, problem}
	}
	return *p.uv
}

func (p *preparation) lookForUV(ctx context.Context, python string) (path, problem string) {
	for _, dir := range filepath.SplitList(lookup(p.Env, "PATH")) {
		if path := filepath.Join(dir, "uv"); filepath.IsAbs(path) && executable(path) {
			return path, ""
		}
	}
	cache := p.cacheDir()
	if cache == "" {
		return "", "there is no uv on PATH and no cache directory to fetch one into (neither HOME nor XDG_CACHE_HOME is set)"
	}
	dir := filepath.Join(cache, "uv")
	if path := filepath.Join(dir, "bin", "uv"); executable(path) {
		return path, ""
	}
	if python == "" {
		return "", "there is no uv on PATH and no Python to fetch one with"
	}
	p.Progress("fetching uv")
	if err := p.fetchUV(ctx, python, dir); err != nil {
		return "", "there is no uv on PATH and it could not be fetched: " + err.Error()
	}
	return filepath.Join(dir, "bin", "uv"), ""
}

func (p *preparation) fetchUV(ctx context.Context, python, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".uv-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	pip := python
	if _, err := p.run(ctx, "pip", p.Root, python, "-I", "-m", "pip", "--version"); err != nil {
		// A distribution's Python without pip: an environment of its own has one,
		// unless that was left out too (ensurepip).
		tool := filepath.Join(tmp, "pip")
		if _, err := p.run(ctx, "pip", p.Root, python, "-I", "-m", "venv", tool); err != nil {
			return fmt.Errorf("%s has no pip: %w", python, err)
		}
		pip = filepath.Join(tool, "bin", "python")
	}
	target := filepath.Join(tmp, "uv")
	// The options: a wheel only (building uv would need Rust), and no advice on stderr.
	// Two retries and not five: where there is no network the first cell waits for them.
	if _, err := p.run(ctx, "uv", p.Root, pip, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=2",
		"--no-warn-script-location", "--root-user-action=ignore", "--no-deps", "--only-binary=:all:", "--target", target, "uv>=0.5"); err != nil {
		return err
	}
	if !executable(filepath.Join(target, "bin", "uv")) {
		return errors.New("the package uv has no program bin/uv")
	}
	if err := os.Rename(target, dir); err != nil && !executable(filepath.Join(dir, "bin", "uv")) {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		return os.Rename(target, dir)
	}
	return nil
}
