package config

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"mypr/internal/rpc"
	"mypr/kernel"
)

// files makes a user's and a workspace's config.toml, "" meaning none, and returns root.
func files(t *testing.T, user, workspace string) string {
	t.Helper()
	home, root := t.TempDir(), t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", home)
	if user != "" {
		if err := os.Mkdir(filepath.Join(home, "mypr"), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, UserFile(), user)
	}
	if workspace != "" {
		write(t, filepath.Join(root, "config.toml"), workspace)
	}
	return root
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDefaults(t *testing.T) {
	c, warnings, err := Load(files(t, "", ""))
	if err != nil || len(warnings) != 0 {
		t.Fatal(warnings, err)
	}
	if want := Default(); !reflect.DeepEqual(c, want) {
		t.Errorf("%+v, want %+v", c, want)
	}
	if _, err := c.check(); err != nil {
		t.Errorf("the defaults are out of bounds: %v", err)
	}
}

func TestWorkspaceOverUser(t *testing.T) {
	root := files(t, `
[limits]
completed_tasks = 7
cache_bytes = 4096
[python]
python = "3.11"
[environment]
HTTPS_PROXY = "http://user"
SSL_CERT_FILE = "/u.pem"
`, `
limits.cache_bytes = 8192
python = { plain = true }
[environment]
HTTPS_PROXY = "http://workspace"
EMPTY = ""
`)
	c, warnings, err := Load(root)
	if err != nil || len(warnings) != 0 {
		t.Fatal(warnings, err)
	}
	want := Default()
	want.Limits.CompletedTasks, want.Limits.CacheBytes = 7, 8192
	want.Python = kernel.Config{Python: "3.11", Plain: true}
	want.Environment = map[string]string{"HTTPS_PROXY": "http://workspace", "SSL_CERT_FILE": "/u.pem", "EMPTY": ""}
	want.Files = []string{UserFile(), filepath.Join(root, "config.toml")}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("%+v\nwant %+v", c, want)
	}
	env, changed := c.Environ([]string{"HTTPS_PROXY=http://client", "HTTPS_PROXY_X=1", "A=b"})
	if want := []string{"HTTPS_PROXY_X=1", "A=b", "EMPTY=", "HTTPS_PROXY=http://workspace", "SSL_CERT_FILE=/u.pem"}; !reflect.DeepEqual(env, want) {
		t.Errorf("environment %q, want %q", env, want)
	}
	if want := []string{"EMPTY", "HTTPS_PROXY", "SSL_CERT_FILE"}; !reflect.DeepEqual(changed, want) {
		t.Errorf("changed %q, want %q", changed, want)
	}
}

func TestUnknownKeys(t *testing.T) {
	root := files(t, "", `colour = "red"
[limits]
completed_task = 3
cache_bytes = 2048
[mcp.servers.x]
command = "a"
args = []
`)
	c, warnings, err := Load(root)
	if err != nil {
		t.Fatal(err)
	}
	if c.Limits.CacheBytes != 2048 {
		t.Error("what is known was not read")
	}
	path := filepath.Join(root, "config.toml")
	want := []string{
		path + ":1:1: unknown key colour, ignored",
		path + ":3:1: unknown key limits.completed_task, ignored",
		path + ":5:2: unknown key mcp, ignored",
	}
	if !reflect.DeepEqual(warnings, want) {
		t.Errorf("warnings %q\nwant %q", warnings, want)
	}
}

func TestErrorsNameTheirPlace(t *testing.T) {
	for name, c := range map[string]struct{ text, place, want string }{
		"syntax":            {"[limits]\ncache_bytes = = 3\n", ":2:15", ""},
		"unclosed":          {"[limits\n", ":1:", ""},
		"duplicate":         {"[limits]\ncache_bytes = 2048\ncache_bytes = 2048\n", ":3:1", "cache_bytes"},
		"type":              {"[limits]\ncache_bytes = \"many\"\n", ":2:15", "limits.cache_bytes: an integer is expected here, not a TOML string"},
		"no string":         {"[environment]\nA = 1\n", ":2:5", "environment.A: a string is expected"},
		"no table":          {"limits = 3\n", ":1:", "limits: a table is expected"},
		"too small":         {"[limits]\n\n  cache_bytes = 1023\n", ":3:3", "limits.cache_bytes: 1023 is not between 1024"},
		"zero":              {"limits.completed_tasks = 0\n", ":1:8", "limits.completed_tasks"},
		"negative":          {"limits = { completed_records = -1 }\n", ":1:12", "limits.completed_records"},
		"wait":              {"[limits]\nexecute_wait_ms = 30001\n", ":2:1", "30000"},
		"too large":         {"[limits]\ncompleted_tasks = 99999999999999999999\n", ":2:", ""},
		"old Python":        {"[python]\npython = \"3.2\"\n", ":2:1", `python.python: "3.2" is no supported version of Python (3.14, `},
		"new Python":        {"python.python = '3.99.1'\n", ":1:8", `"3.99.1"`},
		"no Python":         {"[python]\nplain = true\npython = \"python3.12\"\n", ":3:1", "path of an interpreter"},
		"half a Python":     {"python = { python = \"3.12.\" }\n", ":1:12", `"3.12."`},
		"variable name":     {"[environment]\n\"a b\" = \"x\"\n", ":2:1", "no variable name"},
		"reserved variable": {"[environment]\nMYPR_X = \"x\"\n", ":2:1", "belong to the runtime"},
		"zero byte":         {"[environment]\nA = \"a\\u0000b\"\n", ":2:1", "zero byte"},
		"not UTF-8":         {"[environment]\nA = \"\xff\"\n", ":2:", ""},
	} {
		t.Run(name, func(t *testing.T) {
			root := files(t, "", c.text)
			_, _, err := Load(root)
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("error %v", err)
			}
			if text := err.Error(); !strings.HasPrefix(text, filepath.Join(root, "config.toml")+c.place) || !strings.Contains(text, c.want) {
				t.Errorf("error %q, want it at %s with %q", text, c.place, c.want)
			}
			if w := rpc.AsError(err); w.Code != CodeInvalid || w.Details["line"] != e.Line {
				t.Errorf("on the wire %+v", w)
			}
		})
	}
}

func TestUserFileIsBlamedForItsOwn(t *testing.T) {
	root := files(t, "[limits]\ncache_bytes = 1\n", "[limits]\ncache_bytes = 4096\n")
	_, _, err := Load(root)
	if err == nil || !strings.HasPrefix(err.Error(), UserFile()+":2:1") {
		t.Errorf("error %v", err)
	}
}

func TestUnreadable(t *testing.T) {
	root := files(t, "", "")
	path := filepath.Join(root, "config.toml")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	check := func(want string) {
		t.Helper()
		_, _, err := Load(root)
		if err == nil || !strings.Contains(err.Error(), path+": ") || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
	check("not a regular file")
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	check("not a regular file")
	write(t, path, "")
	if err := os.Truncate(path, maxSize+1); err != nil {
		t.Fatal(err)
	}
	check("more than")
}

func FuzzMerge(f *testing.F) {
	for _, s := range []string{"", "[limits]\ncache_bytes = 1\n", "limits = {cache_bytes=0}", "a.b.c = [1,{x=2}]\n[[limits]]\n", "[environment]\nA=\"b\"\n\"\"=\"\"", "[python]\npython='3.12'\nplain=true"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c := Default()
		if _, err := c.merge("f", data); err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Line < 0 {
				t.Fatalf("error %#v", err)
			}
			return
		}
		if _, err := c.check(); err != nil {
			t.Fatalf("accepted, but %v", err)
		}
	})
}

// The numbers of docs/config.md are the defaults, and those of the manual.
func TestDefaultsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, ok := strings.Cut(string(text), "```toml\n[limits]\n")
	if !ok {
		t.Fatal("no [limits] in docs/config.md")
	}
	block, _, _ = strings.Cut(block, "\n[")
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "config.toml"), []byte("[limits]\n"+block), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	c, warnings, err := Load(root)
	if err != nil || len(warnings) > 0 {
		t.Fatal(warnings, err)
	}
	if got, want := c.Limits, Default().Limits; got != want || strings.Count(block, " = ") != reflect.TypeFor[Limits]().NumField() {
		t.Errorf("documented %+v, the defaults are %+v", got, want)
	}
	if l := Default().Limits; l.CompletedTasks != 128 || l.CompletedRecords != 128 || l.CacheBytes != 33554432 || l.OutputBytes != 16<<20 || l.ExecuteWaitMS != 1000 {
		t.Errorf("%+v", l)
	}
}
