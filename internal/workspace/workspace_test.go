package workspace

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"mypr/internal/api"
	"mypr/internal/rpc"
)

func TestFindDir(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		name, cwd, project, explicit, want string
		fails                              bool
	}{
		{name: "explicit wins", cwd: dir, project: "/proj", explicit: "x", want: "x"},
		{name: "current directory", cwd: dir, project: "/proj", want: dir},
		{name: "root yields to the project", cwd: "/", project: "/proj", want: "/proj"},
		{name: "root without a project", cwd: "/", want: "/"},
		{name: "relative project is ignored", cwd: "/", project: "proj", want: "/"},
		{name: "deleted yields to the project", cwd: "deleted", project: "/proj", want: "/proj"},
		{name: "deleted without a project", cwd: "deleted", fails: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			cwd := c.cwd
			if cwd == "deleted" {
				cwd = filepath.Join(t.TempDir(), "d")
				if err := os.Mkdir(cwd, 0o700); err != nil {
					t.Fatal(err)
				}
			}
			t.Chdir(cwd)
			if c.cwd == "deleted" {
				if err := os.Remove(cwd); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("CLAUDE_PROJECT_DIR", c.project)
			got, err := FindDir(c.explicit)
			if got != c.want || (err != nil) != c.fails {
				t.Fatalf("FindDir(%q) = %q, %v; want %q", c.explicit, got, err, c.want)
			}
			if c.fails {
				wantText(t, err, "deleted", "mypr-mcp -C DIR")
			}
		})
	}
}

func TestOpenRefuses(t *testing.T) {
	base := t.TempDir()
	file := filepath.Join(base, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	bytes := filepath.Join(base, "caf\xe9")
	if err := os.Mkdir(bytes, 0o700); err != nil {
		t.Fatal(err)
	}
	for dir, text := range map[string]string{
		bytes:                          `caf\xe9" is not UTF-8 text`,
		"/":                            "root of the file system",
		"/..":                          "root of the file system",
		filepath.Join(base, "missing"): "no such file or directory",
		file:                           "not a directory",
		filepath.Join(file, "below"):   "not a directory",
	} {
		_, err := Open(dir)
		wantText(t, err, dir, text, "mypr-mcp -C DIR")
	}
	// Root may read everything, so another user looks.
	private := filepath.Join(base, "private")
	if err := os.Mkdir(private, 0o700); err != nil {
		t.Fatal(err)
	}
	for d := base; d != "/"; d = filepath.Dir(d) {
		if info, err := os.Stat(d); err == nil && info.Mode().Perm()&0o005 != 0o005 {
			if err := os.Chmod(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	out, err := childAs(t, 65534, "open", private)
	if err == nil || !strings.Contains(out, "permission denied") {
		t.Errorf("another user opened %s: %q, %v", private, out, err)
	}
}

func TestAliasesMeet(t *testing.T) {
	w := setup(t)
	link := filepath.Join(filepath.Dir(w.Dir), "link")
	if err := os.Symlink(w.Dir, link); err != nil {
		t.Fatal(err)
	}
	if l := open(t, link); !reflect.DeepEqual(l, w) {
		t.Errorf("through a symlink: %+v, want %+v", l, w)
	}
	t.Chdir(link)
	if l := open(t, ""); l.Dir != w.Dir {
		t.Errorf("from a symlinked current directory: %s, want %s", l.Dir, w.Dir)
	}
	mount := filepath.Join(filepath.Dir(w.Dir), "mount")
	if err := os.Mkdir(mount, 0o700); err != nil {
		t.Fatal(err)
	}
	id, err := inMountNamespace(t, "mount --bind "+w.Dir+" "+mount, "open", mount)
	if err != nil || id != w.ID {
		t.Errorf("through a bind mount: %q, %v; want %s", id, err, w.ID)
	}
	other := filepath.Join(filepath.Dir(w.Dir), "other")
	if err := os.CopyFS(other, os.DirFS(w.Dir)); err != nil {
		t.Fatal(err)
	}
	if o := open(t, other); o.ID == w.ID || o.Socket == w.Socket {
		t.Errorf("a copy has the identity of the original")
	}
}

func TestCheck(t *testing.T) {
	w := setup(t)
	if err := w.Check(); err != nil {
		t.Fatal(err)
	}
	aside := w.Dir + "-moved"
	if err := os.Rename(w.Dir, aside); err != nil {
		t.Fatal(err)
	}
	err := w.Check()
	wantText(t, err, "workspace moved", w.Dir, "mypr-mcp stop")
	if rpc.CodeOf(err) != api.CodeWorkspaceMoved {
		t.Errorf("code %q", rpc.CodeOf(err))
	}
	if moved := open(t, aside); moved.ID != w.ID {
		t.Errorf("a rename changed the identity from %s to %s", w.ID, moved.ID)
	}
	if err := os.Mkdir(w.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	wantText(t, w.Check(), "workspace moved", "in its place")
	if err := os.Remove(w.Dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(aside, w.Dir); err != nil {
		t.Fatal(err)
	}
	if err := w.Check(); err != nil {
		t.Errorf("moved back: %v", err)
	}
}

func TestEnsureLayout(t *testing.T) {
	w := setup(t)
	ignore := filepath.Join(w.Root, ".gitignore")
	if err := os.Mkdir(w.Root, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(ignore, []byte("# mine\nvenv/\nown-line"), 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := w.EnsureLayout(); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(ignore)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(b), "# mine\nvenv/\nown-line\n") {
		t.Errorf("the lines that were there changed:\n%s", b)
	}
	for _, line := range ignored {
		if n := strings.Count("\n"+string(b), "\n"+line+"\n"); n != 1 {
			t.Errorf("%q is there %d times", line, n)
		}
	}
	if info, err := os.Stat(filepath.Join(w.Root, "runs")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("runs: %v, %v", info, err)
	}
}

func TestEnsureLayoutCannotWrite(t *testing.T) {
	w := setup(t)
	if err := w.EnsureLayout(); err != nil {
		t.Fatal(err)
	}
	out, err := inMountNamespace(t, "mount --bind "+w.Root+" "+w.Root+" && mount -o remount,bind,ro "+w.Root, "layout", w.Dir)
	if err == nil {
		t.Fatal("a read-only .mypr was accepted")
	}
	wantText(t, errors.New(out), w.Root, "read-only file system", "make it writable")

	file := setup(t)
	if err := os.WriteFile(file.Root, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	wantText(t, file.EnsureLayout(), file.Root, "not a directory")
}

func TestRuntimeDirChoice(t *testing.T) {
	w := setup(t)
	base := filepath.Dir(w.Dir)
	fallback := filepath.Join(tmpDir, "mypr-"+strconv.Itoa(os.Getuid()), "mypr")
	if got, want := runtimeDirs("/x/y"), []string{"/x/y/mypr", fallback}; !reflect.DeepEqual(got, want) {
		t.Errorf("full environment: %q, want %q", got, want)
	}
	if got, want := runtimeDirs("relative"), []string{fallback}; !reflect.DeepEqual(got, want) {
		t.Errorf("relative XDG_RUNTIME_DIR: %q, want %q", got, want)
	}
	runUserDir = filepath.Join(base, "user")
	own := filepath.Join(runUserDir, strconv.Itoa(os.Getuid()))
	if err := os.MkdirAll(own, 0o700); err != nil {
		t.Fatal(err)
	}
	if got, want := runtimeDirs(""), []string{own + "/mypr", fallback}; !reflect.DeepEqual(got, want) {
		t.Errorf("stripped environment: %q, want %q", got, want)
	}
	if err := os.Chown(own, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if got, want := runtimeDirs(""), []string{fallback}; !reflect.DeepEqual(got, want) {
		t.Errorf("somebody else's /run/user directory: %q, want %q", got, want)
	}
}

func TestRuntimeDirChecks(t *testing.T) {
	w := setup(t)
	run := filepath.Dir(w.RuntimeDir)
	if err := checkRuntimeDir(w.RuntimeDir, false); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("without create: %v", err)
	}
	if err := w.PrepareRuntimeDir(); err != nil {
		t.Fatal(err)
	}
	mode := func() fs.FileMode {
		info, err := os.Lstat(w.RuntimeDir)
		if err != nil {
			t.Fatal(err)
		}
		return info.Mode()
	}
	if m := mode(); m != fs.ModeDir|0o700 {
		t.Errorf("made with mode %v", m)
	}
	if err := os.Chmod(w.RuntimeDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := w.PrepareRuntimeDir(); err != nil {
		t.Fatal(err)
	}
	if m := mode(); m != fs.ModeDir|0o700 {
		t.Errorf("others keep access: %v", m)
	}
	if err := os.Chown(w.RuntimeDir, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	wantText(t, w.PrepareRuntimeDir(), w.RuntimeDir, "belongs to user id 65534", "XDG_RUNTIME_DIR")
	if err := os.Remove(w.RuntimeDir); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(w.Dir, w.RuntimeDir); err != nil {
		t.Fatal(err)
	}
	wantText(t, w.PrepareRuntimeDir(), w.RuntimeDir, "symbolic link")
	if err := os.Remove(w.RuntimeDir); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(run, 0o777); err != nil {
		t.Fatal(err)
	}
	wantText(t, w.PrepareRuntimeDir(), run, "may rename", "777")
	if err := os.Chmod(run, fs.ModeSticky|0o777); err != nil {
		t.Fatal(err)
	}
	if err := w.PrepareRuntimeDir(); err != nil {
		t.Errorf("a sticky parent like /tmp: %v", err)
	}
	if err := os.Chown(run, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	wantText(t, w.PrepareRuntimeDir(), run, "belongs to user id 65534")
}

func TestRuntimeDirMissingBase(t *testing.T) {
	w := setup(t)
	t.Setenv("XDG_RUNTIME_DIR", filepath.Join(filepath.Dir(w.Dir), "new"))
	if err := open(t, w.Dir).PrepareRuntimeDir(); err != nil {
		t.Errorf("a base that can be made: %v", err)
	}
	t.Setenv("XDG_RUNTIME_DIR", filepath.Join(filepath.Dir(w.Dir), "no", "such"))
	wantText(t, open(t, w.Dir).PrepareRuntimeDir(), "/no/such", "no such file or directory", "XDG_RUNTIME_DIR")
}

func TestRuntimeDirTmpFallback(t *testing.T) {
	w := setup(t)
	t.Setenv("XDG_RUNTIME_DIR", "")
	if err := os.Mkdir(tmpDir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(tmpDir, fs.ModeSticky|0o777); err != nil {
		t.Fatal(err)
	}
	w = open(t, w.Dir)
	mid := filepath.Dir(w.RuntimeDir)
	if err := os.Symlink(w.Dir, mid); err != nil {
		t.Fatal(err)
	}
	wantText(t, w.PrepareRuntimeDir(), mid, "symbolic link")
	if err := os.Remove(mid); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(mid, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(mid, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	wantText(t, w.PrepareRuntimeDir(), mid, "belongs to user id 65534")
	if err := os.Remove(mid); err != nil {
		t.Fatal(err)
	}
	if err := w.PrepareRuntimeDir(); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{mid, w.RuntimeDir} {
		if info, err := os.Lstat(d); err != nil || info.Mode() != fs.ModeDir|0o700 {
			t.Errorf("%s: %v, %v", d, info, err)
		}
	}
	if err := os.Chmod(tmpDir, 0o777); err != nil {
		t.Fatal(err)
	}
	wantText(t, w.PrepareRuntimeDir(), tmpDir, "may rename")
}

func TestSocketPathTooLong(t *testing.T) {
	w := setup(t)
	long := filepath.Join(filepath.Dir(w.Dir), strings.Repeat("x", 80))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", long)
	w = open(t, w.Dir)
	wantText(t, w.PrepareRuntimeDir(), w.Socket, "107", "shorter")
	_, err := w.Start(t.Context(), StartOptions{Executable: os.Args[0]})
	wantText(t, err, "107", "shorter")
	if _, err := os.Stat(w.RuntimeDir); err == nil {
		t.Error("the directory was made all the same")
	}
}

func TestFillEnvironment(t *testing.T) {
	w := setup(t)
	base := filepath.Dir(w.Dir)
	runUserDir = filepath.Join(base, "user")
	own := filepath.Join(runUserDir, strconv.Itoa(os.Getuid()))
	if err := os.MkdirAll(own, 0o700); err != nil {
		t.Fatal(err)
	}
	old := passwdFile
	t.Cleanup(func() { passwdFile = old })
	passwdFile = filepath.Join(base, "passwd")
	if err := os.WriteFile(passwdFile, []byte("bad line\nsomebody:x:12345:1::/x:/bin/x\nme:x:"+strconv.Itoa(os.Getuid())+":1:Me:/home/me:/bin/zsh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env, changed := FillEnvironment([]string{"HOME=/mine", "SHELL=", "A=b=c"})
	want := []string{"HOME=/mine", "A=b=c", "PATH=" + defaultPath, "XDG_RUNTIME_DIR=" + own, "USER=me", "LOGNAME=me", "SHELL=/bin/zsh"}
	if !reflect.DeepEqual(env, want) {
		t.Errorf("environment %q\nwant %q", env, want)
	}
	if want := []string{"LOGNAME", "PATH", "SHELL", "USER", "XDG_RUNTIME_DIR"}; !reflect.DeepEqual(changed, want) {
		t.Errorf("changed %q, want %q", changed, want)
	}
	if env, changed := FillEnvironment(env); len(changed) != 0 || !reflect.DeepEqual(env, want) {
		t.Errorf("a full environment was changed: %q", changed)
	}
}

// inMountNamespace runs the test binary after a mount command, in a mount namespace of its own.
func inMountNamespace(t *testing.T, mount string, args ...string) (string, error) {
	t.Helper()
	return childOf(t, &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}, "/bin/sh",
		append([]string{"-c", "mount --make-rprivate / && " + mount + ` && exec "$0" "$@"`, os.Args[0]}, args...)...)
}
