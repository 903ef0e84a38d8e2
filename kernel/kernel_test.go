package kernel

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder runs commands for real and remembers their names.
type recorder struct {
	mu    sync.Mutex // guards names
	names []string
}

func (r *recorder) Run(ctx context.Context, c Command) (Result, error) {
	r.mu.Lock()
	r.names = append(r.names, c.Name)
	r.mu.Unlock()
	return ExecRunner{}.Run(ctx, c)
}

func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := r.names
	r.names = nil
	return names
}

type workspace struct {
	Options
	rec   *recorder
	steps []string
}

// newWorkspace is a fresh workspace with a cache of its own. offline cuts it off from
// every package index.
func newWorkspace(t *testing.T, offline bool) *workspace {
	t.Helper()
	dir := t.TempDir()
	w := &workspace{rec: &recorder{}}
	env := os.Environ()
	if offline {
		// Nothing listens on the discard port of the loopback address, and no proxy
		// or local wheel may help.
		env = slices.DeleteFunc(env, func(kv string) bool { return strings.HasPrefix(kv, "PIP_") })
		env = append(env, "PIP_CONFIG_FILE=/dev/null", "PIP_INDEX_URL=http://127.0.0.1:9/simple", "PIP_RETRIES=0",
			"UV_DEFAULT_INDEX=http://127.0.0.1:9/simple", "UV_HTTP_RETRIES=0", "UV_PYTHON_DOWNLOADS=never",
			"UV_CACHE_DIR="+filepath.Join(dir, "uv-cache"))
	}
	w.Options = Options{
		Root: filepath.Join(dir, "ws", ".mypr"), Workspace: filepath.Join(dir, "ws"),
		Env: env, Run: w.rec, CacheDir: filepath.Join(dir, "cache"),
		Progress: func(s string) { w.steps = append(w.steps, s) },
	}
	return w
}

func (w *workspace) prepare(t *testing.T) *Launch {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	l, err := Prepare(ctx, w.Options)
	if err != nil {
		t.Fatalf("Prepare: %v", err)
	}
	return l
}

// run starts the launch's interpreter as the supervisor would, with other arguments.
func run(t *testing.T, l *Launch, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), l.Path, args...)
	cmd.Env, cmd.Dir = l.Env, l.Dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", l.Path, args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func TestFirstStartInstallsIPythonAndTheSecondStartsNothing(t *testing.T) {
	w := newWorkspace(t, false)
	l := w.prepare(t)
	if l.PlainReason != "" {
		t.Fatalf("plain: %s", l.PlainReason)
	}
	if got := run(t, l, "-c", "import IPython, sys, platform; print(platform.python_version(), sys.prefix)"); got != l.Python+" "+filepath.Join(w.Root, "venv") {
		t.Errorf("the environment's interpreter says %q, Launch says %q", got, l.Python)
	}
	if !slices.Contains(w.steps, "installing IPython") {
		t.Errorf("steps told: %q", w.steps)
	}
	w.rec.take()
	w.steps = nil
	best := time.Hour
	for range 20 {
		start := time.Now()
		w.prepare(t)
		best = min(best, time.Since(start))
	}
	if names := w.rec.take(); len(names) > 0 || len(w.steps) > 0 {
		t.Errorf("a prepared environment ran %q and told %q", names, w.steps)
	}
	if best > 20*time.Millisecond { // it takes 0.2 ms; to start anything takes more than this
		t.Errorf("preparing a prepared environment takes %v", best)
	}
	// Another workspace shares sources and uv.
	other := newWorkspace(t, false)
	other.CacheDir = w.CacheDir
	other.prepare(t)
	if names := other.rec.take(); slices.Contains(names, "uv") || slices.Contains(names, "pip") {
		t.Errorf("uv was fetched again: %q", names)
	}
}

func TestSourcesAreCompiledOnce(t *testing.T) {
	w := newWorkspace(t, true)
	l := w.prepare(t)
	dir := filepath.Dir(script(l))
	pyc, _ := filepath.Glob(filepath.Join(dir, "mypr_kernel", "__pycache__", "*.pyc"))
	if len(pyc) == 0 {
		t.Fatalf("no byte code below %s", dir)
	}
	// Byte 4 holds the flags: 1 is hash-based, 3 would be checked at each import (PEP 552).
	for _, path := range pyc {
		if data, err := os.ReadFile(path); err != nil || data[4] != 1 {
			t.Errorf("%s: flags %v, %v", path, data[4], err)
		}
	}
}

func TestOfflineIsPlainAndSaysWhy(t *testing.T) {
	w := newWorkspace(t, true)
	l := w.prepare(t)
	if !strings.Contains(l.PlainReason, "could not be fetched") && !strings.Contains(l.PlainReason, "could not be installed") {
		t.Errorf("reason: %q", l.PlainReason)
	}
	if got := run(t, l, "-c", "import sys; print(sys.prefix)"); got != filepath.Join(w.Root, "venv") {
		t.Errorf("prefix %q", got)
	}
	w.rec.take()
	if again := w.prepare(t); again.PlainReason != l.PlainReason {
		t.Errorf("the reason was lost: %q", again.PlainReason)
	}
	if names := w.rec.take(); len(names) > 0 {
		t.Errorf("a failed installation was tried again at once: %q", names)
	}

	// Later, and with a network: the same environment gets IPython.
	edit(t, w, func(m *marker) { m.Tried = time.Now().Add(-2 * RetryAfter) })
	online := newWorkspace(t, false)
	w.Env, w.CacheDir = online.Env, online.CacheDir
	if l = w.prepare(t); l.PlainReason != "" {
		t.Errorf("still plain: %s", l.PlainReason)
	}
	if names := w.rec.take(); slices.Contains(names, "venv") && !slices.Contains(names, "pip") {
		t.Errorf("the environment was made again: %q", names)
	}
}

func edit(t *testing.T, w *workspace, change func(*marker)) {
	t.Helper()
	path := filepath.Join(w.Root, "venv", "mypr.json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	m := &marker{}
	if err := json.Unmarshal(data, m); err != nil {
		t.Fatal(err)
	}
	change(m)
	if data, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestPlainByConfig(t *testing.T) {
	w := newWorkspace(t, true)
	w.Config.Plain = true
	if l := w.prepare(t); l.PlainReason != plainByConfig {
		t.Errorf("reason: %q", l.PlainReason)
	}
	if names := w.rec.take(); slices.Contains(names, "ipython") {
		t.Errorf("IPython was installed all the same: %q", names)
	}
}

func TestBrokenEnvironmentIsMovedAside(t *testing.T) {
	for name, breakIt := range map[string]func(t *testing.T, w *workspace){
		"interpreter gone": func(t *testing.T, w *workspace) {
			relink(t, w, filepath.Join(w.Workspace, "no", "python"))
		},
		"interpreter does not run": func(t *testing.T, w *workspace) {
			path := filepath.Join(w.Workspace, "python")
			if err := os.WriteFile(path, []byte("#!/bin/sh\nexit 9\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			relink(t, w, path)
		},
		"never finished": func(t *testing.T, w *workspace) {
			for _, name := range []string{"mypr.json", "bin/python", "bin/python3"} {
				if err := os.Remove(filepath.Join(w.Root, "venv", name)); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Fatal(err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorkspace(t, true)
			w.Config.Plain = true
			w.prepare(t)
			keep := filepath.Join(w.Root, "venv", "mine.txt")
			if err := os.WriteFile(keep, []byte("kept"), 0o644); err != nil {
				t.Fatal(err)
			}
			breakIt(t, w)
			l := w.prepare(t)
			run(t, l, "-c", "pass")
			if kept, _ := filepath.Glob(filepath.Join(w.Root, ".venv-invalid-*", "mine.txt")); len(kept) != 1 {
				t.Errorf("what was in the broken environment is not aside: %q", kept)
			}
		})
	}
}

// script is the launch script of the kernel.
func script(l *Launch) string { return l.Args[len(l.Args)-1] }

func relink(t *testing.T, w *workspace, target string) {
	t.Helper()
	link := filepath.Join(w.Root, "venv", "bin", "python")
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
}

func TestRefusals(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no program"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		set  func(w *workspace)
		want []string
	}{
		"linked environment": {func(w *workspace) {
			_ = os.MkdirAll(w.Root, 0o755)
			_ = os.Symlink("/somewhere/venv", filepath.Join(w.Root, "venv"))
		}, []string{"symbolic link to /somewhere/venv", "config.toml"}},
		"environment is a file": {func(w *workspace) {
			_ = os.MkdirAll(w.Root, 0o755)
			_ = os.WriteFile(filepath.Join(w.Root, "venv"), nil, 0o644)
		}, []string{"not a directory"}},
		"unsupported version":    {func(w *workspace) { w.Config.Python = "3.4" }, []string{`"3.4"`, "3.10"}},
		"nonsense version":       {func(w *workspace) { w.Config.Python = "snake" }, []string{`"snake"`}},
		"no such interpreter":    {func(w *workspace) { w.Config.Python = "/no/such/python" }, []string{"/no/such/python"}},
		"not an interpreter":     {func(w *workspace) { w.Config.Python = text }, []string{text}},
		"answers like no Python": {func(w *workspace) { w.Config.Python = "/bin/echo" }, []string{"did not answer as a Python"}},
		"no Python and no uv":    {func(w *workspace) { w.Env = []string{"PATH=/nowhere", "HOME=/nowhere"} }, []string{"Python 3.10 or newer", "no uv", "[python]"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorkspace(t, true)
			c.set(w)
			_, err := Prepare(t.Context(), w.Options)
			for who, err := range map[string]error{"Prepare": err, "Available": Available(t.Context(), w.Options)} {
				if err == nil {
					t.Fatal(who, "accepted it")
				}
				for _, s := range c.want {
					if !strings.Contains(err.Error(), s) {
						t.Errorf("%s: %q does not say %q", who, err, s)
					}
				}
			}
		})
	}
}

// Available does not touch what it looks at, and refuses nothing that Prepare could do.
func TestAvailable(t *testing.T) {
	w := newWorkspace(t, true)
	check := func(what string, runs ...string) {
		t.Helper()
		if err := Available(t.Context(), w.Options); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if names := w.rec.take(); !slices.Equal(names, runs) {
			t.Errorf("%s: it ran %q, not %q", what, names, runs)
		}
	}
	check("nothing is there yet", "probe")
	if _, err := os.Stat(w.Root); err == nil {
		t.Error("it made something")
	}
	p := newPreparation(w.Options)
	found, err := p.findPython(t.Context())
	if err != nil || found == "" {
		t.Fatalf("Python %q, %v", found, err)
	}
	is, err := p.probe(t.Context(), found)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(p.python()), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(found, p.python()); err != nil {
		t.Fatal(err)
	}
	if err := p.writeMarker(&marker{Schema: markerSchema, Version: is.Version}); err != nil {
		t.Fatal(err)
	}
	w.rec.take()
	env := w.Env
	w.Env = []string{"PATH=/nowhere", "HOME=/nowhere"} // the environment that is there is enough
	check("all is there")
	w.Config.Python = is.Version
	if err := Available(t.Context(), w.Options); err == nil || !strings.Contains(err.Error(), "no Python "+is.Version+" found") {
		t.Errorf("another one is asked for, and there is none: %v", err)
	}
	w.Env = env
	check("another one is asked for", "probe")
}

func TestReadOnlyRootNamesIt(t *testing.T) {
	w := newWorkspace(t, true)
	// A file where a directory must be refuses root too, unlike a mode.
	if err := os.MkdirAll(w.Workspace, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.Root, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Prepare(t.Context(), w.Options); err == nil || !strings.Contains(err.Error(), w.Root) {
		t.Errorf("error %v does not name %s", err, w.Root)
	}
}

func TestCancelledPreparationLeavesNoMarker(t *testing.T) {
	w := newWorkspace(t, true)
	ctx, cancel := context.WithCancel(t.Context())
	w.Progress = func(string) { cancel() }
	if _, err := Prepare(ctx, w.Options); !errors.Is(err, context.Canceled) {
		// makeVenv reports the command it was in; the cause must be in there.
		if err == nil || !strings.Contains(err.Error(), context.Canceled.Error()) {
			t.Fatalf("error %v", err)
		}
	}
	if _, err := os.Stat(filepath.Join(w.Root, "venv", "mypr.json")); err == nil {
		t.Error("an unfinished environment has a marker")
	}
	w.Progress = nil
	run(t, w.prepare(t), "-c", "pass")
}

// fakePython makes an executable that answers a probe as Python VERSION would.
func fakePython(t *testing.T, path, version string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	// A binary, not a script: scripts are taken for version managers' shims.
	data, err := os.ReadFile("/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(data, version...), 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestCandidates(t *testing.T) {
	dir := t.TempDir()
	at := func(p string) string { return filepath.Join(dir, p) }
	fakePython(t, at("a/python3.11"), "3.11")
	fakePython(t, at("a/python3.12"), "3.12")
	fakePython(t, at("b/python3.12"), "3.12b")
	fakePython(t, at("b/odd"), "?")
	if err := os.Symlink("python3.11", at("a/python3")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("odd", at("b/python3")); err != nil {
		t.Fatal(err)
	}
	for _, v := range []string{"3.9.1", "3.10.2", "3.10.13", "3.14.0"} {
		fakePython(t, at("pyenv/versions/"+v+"/bin/python"+minor(v)), v)
	}
	shim := at("pyenv/shims/python3.13")
	if err := os.MkdirAll(filepath.Dir(shim), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(shim, []byte("#!/usr/bin/env bash\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	fakePython(t, at("data/uv/python/cpython-3.13.5-linux/bin/python3.13"), "3.13.5")
	p := &preparation{Options: Options{Env: []string{
		"PATH=" + strings.Join([]string{at("pyenv/shims"), at("a"), at("b"), at("missing")}, ":"), "XDG_DATA_HOME=" + at("data"),
	}}}
	var got []string
	for _, c := range p.candidates() {
		got = append(got, strings.TrimPrefix(c.path, dir+"/"))
	}
	want := []string{
		"pyenv/versions/3.14.0/bin/python3.14",
		"data/uv/python/cpython-3.13.5-linux/bin/python3.13",
		"a/python3.12", "b/python3.12", "a/python3.11",
		"pyenv/versions/3.10.13/bin/python3.10", "pyenv/versions/3.10.2/bin/python3.10",
		"b/odd",
	}
	if !slices.Equal(got, want) {
		t.Errorf("candidates\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestConfiguredVersionIsUsed(t *testing.T) {
	w := newWorkspace(t, true)
	p := &preparation{Options: w.Options}
	all := p.candidates()
	oldest := all[len(all)-1]
	if oldest.minor == 0 {
		oldest = all[len(all)-2]
	}
	w.Config = Config{Python: "3." + itoa(oldest.minor), Plain: true}
	if l := w.prepare(t); minor(l.Python) != w.Config.Python {
		t.Errorf("asked for %s, got %s", w.Config.Python, l.Python)
	}
	// Another version in config.toml makes another environment.
	newest := all[0]
	w.Config.Python = newest.path
	if l := w.prepare(t); minor(l.Python) != "3."+itoa(newest.minor) {
		t.Errorf("asked for %s, got %s", newest.path, l.Python)
	}
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

func TestKernelEnv(t *testing.T) {
	env := kernelEnv([]string{"A=1", "PATH=/x:/y", "PYTHONHOME=/bad", "VIRTUAL_ENV=/other", "PYTHONPATH=/mine"}, "/ws/.mypr/venv")
	want := []string{"A=1", "PYTHONPATH=/mine", "PATH=/ws/.mypr/venv/bin:/x:/y", "VIRTUAL_ENV=/ws/.mypr/venv"}
	if !slices.Equal(env, want) {
		t.Errorf("%q", env)
	}
}

func TestExtractTogether(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache", "kernel-x")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := extract(dir); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if !complete(dir) {
		t.Error("not complete")
	}
	if left, _ := os.ReadDir(filepath.Dir(dir)); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
	// A cleaner took a file.
	if err := os.Remove(filepath.Join(dir, "launch.py")); err != nil {
		t.Fatal(err)
	}
	if err := extract(dir); err != nil || !complete(dir) {
		t.Errorf("not repaired: %v", err)
	}
}

// Sources of other versions go when nothing has started from them for long and no kernel
// runs from them.
func TestOldSourcesAreRemoved(t *testing.T) {
	base := t.TempDir()
	old := time.Now().Add(-8 * 24 * time.Hour)
	for _, name := range []string{"kernel-mine", "kernel-new", "kernel-old", "kernel-held", ".kernel-123", "other"} {
		writeFile(t, filepath.Join(base, name, "mypr_kernel", "x.py"), "x")
		if name != "kernel-new" {
			if err := os.Chtimes(filepath.Join(base, name), old, old); err != nil {
				t.Fatal(err)
			}
		}
	}
	writeFile(t, filepath.Join(base, "kernel-file"), "x")
	if err := os.Chtimes(filepath.Join(base, "kernel-file"), old, old); err != nil {
		t.Fatal(err)
	}
	held, err := os.Open(filepath.Join(base, "kernel-held"))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(held.Fd()), unix.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	removeOld(base, filepath.Join(base, "kernel-mine"))
	if got := names(t, base); !slices.Equal(got, []string{"kernel-file", "kernel-held", "kernel-mine", "kernel-new", "other"}) {
		t.Errorf("left: %q", got)
	}
	held.Close()
	if err := os.Chtimes(filepath.Join(base, "kernel-new"), old, old); err != nil {
		t.Fatal(err)
	}
	removeOld(base, filepath.Join(base, "kernel-new"))
	// What was started from a moment ago stays.
	if got := names(t, base); !slices.Equal(got, []string{"kernel-file", "kernel-mine", "kernel-new", "other"}) {
		t.Errorf("left: %q", got)
	}
}

func names(t *testing.T, dir string) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

func TestCacheOfAnotherIsNotUsed(t *testing.T) {
	w := newWorkspace(t, true)
	w.Config.Plain = true
	if err := os.MkdirAll(w.CacheDir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(w.CacheDir, 0o777); err != nil {
		t.Fatal(err)
	}
	l := w.prepare(t)
	if !strings.HasPrefix(script(l), filepath.Join(w.Root, "kernel")+"/") {
		t.Errorf("sources in %s, a directory that others can write", script(l))
	}
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
