// Package rules holds the project's rules about its own code as tests: who may import
// whom, that every package says what it owns, and which modules are linked in.
package rules

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

type pkg struct {
	ImportPath, Dir, Doc, Name         string
	GoFiles                            []string
	Imports, TestImports, XTestImports []string
	Module                             *struct{ Path string }
}

func packages(t *testing.T, args ...string) []pkg {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json"}, args...)...)
	cmd.Dir = filepath.Join("..", "..")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// inside reports whether path is the package dir or below it.
func inside(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

func TestImports(t *testing.T) {
	// from must not import any of these.
	forbidden := map[string][]string{
		"mypr/supervisor":         {"mypr/units", "mypr/kernel", "mypr/cmd", "mypr/internal/api", "mypr/internal/workspace"},
		"mypr/kernel":             {"mypr/supervisor", "mypr/units", "mypr/cmd"},
		"mypr/internal/rpc":       {"mypr/internal", "mypr/supervisor", "mypr/units", "mypr/kernel", "mypr/cmd"},
		"mypr/units/unitfile":     {"mypr/units/manager", "mypr/kernel", "mypr/cmd"},
		"mypr/internal/frontend":  {"mypr/units", "mypr/kernel", "mypr/cmd", "github.com/mark3labs/mcp-go/server"},
		"mypr/internal/client":    {"mypr/units", "mypr/kernel", "mypr/cmd"},
		"mypr/internal/workspace": {"mypr/units", "mypr/cmd"},
	}
	all := packages(t, "./...")
	if len(all) < 10 {
		t.Fatalf("only %d packages found", len(all))
	}
	for _, p := range all {
		for _, imported := range p.Imports {
			for from, list := range forbidden {
				for _, to := range list {
					if inside(p.ImportPath, from) && inside(imported, to) && !inside(imported, from) {
						t.Errorf("%s imports %s", p.ImportPath, imported)
					}
				}
			}
			// Units are told apart by interfaces, not by imports of each other.
			from, to := unit(p.ImportPath), unit(imported)
			if from != "" && to != "" && from != to && to != "unitfile" {
				t.Errorf("unit %s imports unit %s (%s -> %s)", from, to, p.ImportPath, imported)
			}
			if inside(imported, "mypr/cmd") {
				t.Errorf("%s imports %s", p.ImportPath, imported)
			}
		}
	}
}

// unit is the directory below mypr/units that a package belongs to, "" for others.
func unit(path string) string {
	rest, ok := strings.CutPrefix(path, "mypr/units/")
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(rest, "/")
	return name
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	for _, p := range packages(t, "./...") {
		if len(p.GoFiles) == 0 {
			continue // tests only
		}
		if len(p.Doc) < 40 {
			t.Errorf("%s has no doc comment", p.ImportPath)
		}
		switch p.Name {
		case "util", "utils", "common", "helpers", "misc":
			t.Errorf("%s: a package is named after what it provides", p.ImportPath)
		}
	}
}

func TestMainIsShort(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "..", "cmd", "mypr-mcp", "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	_, after, found := strings.Cut(string(data), "\nfunc main() {")
	if lines := strings.Count(after, "\n"); !found || lines > 15 {
		t.Errorf("main has %d lines", lines)
	}
}

// Every module that is linked into the program is explained.
func TestDependenciesAreExplained(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "DEPENDENCIES.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range packages(t, "-deps", "./cmd/mypr-mcp") {
		if p.Module != nil && p.Module.Path != "mypr" && !strings.Contains(string(doc), "`"+p.Module.Path+"`") {
			t.Errorf("docs/DEPENDENCIES.md does not mention %s (imported as %s)", p.Module.Path, p.ImportPath)
		}
	}
}
