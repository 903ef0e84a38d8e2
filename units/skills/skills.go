// Package skills reads the workspace's skills, .mypr/skills/<name>/SKILL.md: Markdown
// for an agent to read, with metadata in YAML front matter.
//
// It owns what a skill is: where it may be, what its metadata may be, which of its
// links lead somewhere. It does not write (ws.fs.write does) and runs nothing: a skill
// is text.
package skills

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
)

// Bounds.
const (
	MaxBytes   = 1 << 20  // of a SKILL.md
	MaxHeader  = 64 << 10 // of its front matter
	maxName    = 100
	maxSkills  = 1000
	headerMark = "---"
)

// fileName is the one file that makes a directory a skill.
const fileName = "SKILL.md"

// Service answers skills.*; dir is .mypr/skills, which need not exist.
type Service struct{ dir string }

// New makes a service.
func New(dir string) *Service { return &Service{dir} }

type (
	// Skill is one row of skills.list. Metadata is the front matter.
	Skill struct {
		Name        string         `json:"name"`
		Description string         `json:"description,omitempty"`
		Directory   string         `json:"directory"` // its name below .mypr/skills; read and write take it
		Path        string         `json:"path"`
		Revision    string         `json:"revision,omitempty"` // SHA-256
		Metadata    map[string]any `json:"metadata"`
		Error       string         `json:"error,omitempty"` // why its metadata cannot be used
	}
	// Finding is one thing that validation noticed. Line is 0 where there is none.
	Finding struct {
		Code string `json:"code"`
		Text string `json:"text"`
		Line int    `json:"line,omitempty"`
	}
	// Report is the answer of skills.validate.
	Report struct {
		Name     string         `json:"name"`
		Path     string         `json:"path"`
		Valid    bool           `json:"valid"` // no errors
		Errors   []Finding      `json:"errors"`
		Warnings []Finding      `json:"warnings"`
		Metadata map[string]any `json:"metadata"`
		Revision string         `json:"revision"`
	}
	// Page is the answer of skills.read.
	Page struct {
		Name     string `json:"name"`
		Path     string `json:"path"`
		Text     string `json:"text"`
		Revision string `json:"revision"`
	}
	nameParams struct {
		Name string `json:"name"`
	}
	validateParams struct {
		Name string  `json:"name"`
		Text *string `json:"text"` // nil: what is on disk
	}
	listResult struct {
		Skills []Skill `json:"skills"`
	}
)

// Methods are the calls that Python makes.
func (s *Service) Methods() map[string]rpc.Method {
	return map[string]rpc.Method{
		"skills.list":     rpc.Typed("skills.list", struct{}{}, s.List),
		"skills.read":     rpc.Typed("skills.read", nameParams{}, s.Read),
		"skills.validate": rpc.Typed("skills.validate", validateParams{}, s.Validate),
	}
}

func invalid(format string, args ...any) *rpc.Error {
	return rpc.Errorf(rpc.CodeInvalidRequest, format, args...)
}

// checkName keeps a name one directory below .mypr/skills.
func checkName(name string) error {
	if name == "" || len(name) > maxName || strings.HasPrefix(name, ".") || strings.ContainsAny(name, "/\\\x00\n") {
		return invalid("%.80q cannot be the name of a skill: it names a directory in .mypr/skills and does not begin with a dot", name)
	}
	return nil
}

var errOutside = errors.New("it leads outside of .mypr/skills")

// open opens the file of a skill, wherever its links lead as long as they stay inside.
func (s *Service) open(name string) (f *os.File, path string, err error) {
	path = filepath.Join(s.dir, name, fileName)
	root, err := filepath.EvalSymlinks(s.dir)
	if err != nil {
		return nil, path, err
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, path, err
	}
	if !inside(root, real) {
		return nil, path, errOutside
	}
	st, err := os.Stat(real)
	if err == nil && !st.Mode().IsRegular() { // opening a FIFO would wait
		err = errors.New("it is not a regular file")
	}
	if err != nil {
		return nil, path, err
	}
	f, err = os.Open(real)
	return f, path, err
}

func inside(root, path string) bool {
	return path == root || strings.HasPrefix(path, strings.TrimSuffix(root, "/")+"/")
}

// load reads a skill.
func (s *Service) load(name string) (text, path string, err error) {
	f, path, err := s.open(name)
	if err != nil {
		return "", path, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, MaxBytes+1))
	switch {
	case err != nil:
		return "", path, err
	case len(raw) > MaxBytes:
		return "", path, fmt.Errorf("it has more than %d bytes", MaxBytes)
	}
	return string(raw), path, nil
}

func revision(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// List describes every skill. One that cannot be used has an Error; one that leads
// outside is left out.
func (s *Service) List(context.Context, struct{}) (listResult, error) {
	r := listResult{Skills: []Skill{}}
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return r, fmt.Errorf("read the skills: %w", err)
	}
	for _, e := range entries {
		if checkName(e.Name()) != nil || len(r.Skills) == maxSkills {
			continue
		}
		text, path, err := s.load(e.Name())
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errOutside) || errors.Is(err, unix.ENOTDIR) {
			continue
		}
		k := Skill{Name: e.Name(), Directory: e.Name(), Path: path, Metadata: map[string]any{}}
		if err != nil {
			k.Error = err.Error()
		} else {
			k.Revision = revision(text)
			h := split(text)
			if h.err == nil {
				k.Metadata, h.err = metadata(h.header)
			}
			if k.Metadata == nil {
				k.Metadata = map[string]any{}
			}
			if h.err != nil {
				k.Error = h.err.Error()
			} else if problems := checkMetadata(k.Metadata); len(problems) > 0 {
				k.Error = problems[0].Text
			}
			if v, ok := k.Metadata["name"].(string); ok && v != "" {
				k.Name = v
			}
			k.Description, _ = k.Metadata["description"].(string)
		}
		r.Skills = append(r.Skills, k)
	}
	return r, nil
}

// Read returns the whole text of a skill.
func (s *Service) Read(_ context.Context, p nameParams) (*Page, error) {
	if err := checkName(p.Name); err != nil {
		return nil, err
	}
	text, path, err := s.load(p.Name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, rpc.Errorf(rpc.CodeNotFound, "there is no skill %q (%s)", p.Name, path).WithHint("ws.skills.list() shows those that there are")
	case errors.Is(err, errOutside):
		return nil, rpc.Errorf(rpc.CodePermission, "skill %q is not read: %v", p.Name, err).WithHint("ws.fs.read reads any file")
	case err != nil:
		return nil, invalid("skill %q cannot be read: %v", p.Name, err)
	}
	return &Page{p.Name, path, text, revision(text)}, nil
}

// Validate looks at a skill, or at text that is to become one.
func (s *Service) Validate(ctx context.Context, p validateParams) (*Report, error) {
	if err := checkName(p.Name); err != nil {
		return nil, err
	}
	var text string
	if p.Text != nil {
		text = *p.Text
		if len(text) > MaxBytes {
			return nil, rpc.Errorf(rpc.CodeTooLarge, "a skill has at most %d bytes, not %d", MaxBytes, len(text))
		}
	} else {
		page, err := s.Read(ctx, nameParams{p.Name})
		if err != nil {
			return nil, err
		}
		text = page.Text
	}
	r := &Report{Name: p.Name, Path: filepath.Join(s.dir, p.Name, fileName), Errors: []Finding{}, Warnings: []Finding{},
		Metadata: map[string]any{}, Revision: revision(text)}
	h := split(text)
	switch {
	case h.err != nil:
		r.Errors = append(r.Errors, Finding{Code: "front_matter", Text: h.err.Error(), Line: 1})
	case !h.has:
		r.Warnings = append(r.Warnings, Finding{Code: "no_front_matter", Text: "there is no front matter: nobody sees from the list what this skill is for", Line: 1})
	default:
		m, err := metadata(h.header)
		if err != nil {
			r.Errors = append(r.Errors, Finding{Code: "yaml", Text: err.Error(), Line: 1})
			break
		}
		r.Metadata = m
		r.Errors = append(r.Errors, checkMetadata(m)...)
		name, isText := m["name"].(string)
		if isText && name != p.Name {
			r.Warnings = append(r.Warnings, Finding{Code: "name", Text: fmt.Sprintf("the name is %q, the directory %q", name, p.Name)})
		}
		if d, isText := m["description"].(string); m["description"] == nil || isText && strings.TrimSpace(d) == "" {
			r.Warnings = append(r.Warnings, Finding{Code: "description", Text: "there is no description: nobody sees from the list what this skill is for"})
		}
	}
	s.checkLinks(p.Name, h.body, h.lines, r)
	r.Valid = len(r.Errors) == 0
	return r, nil
}

// header is a text with its front matter taken off.
type header struct {
	has    bool
	header string
	body   string
	lines  int // before the body
	err    error
}

// split finds the front matter: "---" on the first line, up to the next line "---".
func split(text string) header {
	text = strings.TrimPrefix(text, "\ufeff")
	first, rest, _ := strings.Cut(text, "\n")
	if strings.TrimRight(first, " \t\r") != headerMark {
		return header{body: text}
	}
	lines := 1
	for at := 0; at < len(rest); {
		line, _, found := strings.Cut(rest[at:], "\n")
		lines++
		end := at + len(line)
		if found {
			end++
		}
		if mark := strings.TrimRight(line, " \t\r"); mark == headerMark || mark == "..." {
			if at > MaxHeader {
				return header{has: true, err: fmt.Errorf("the front matter has more than %d bytes", MaxHeader)}
			}
			return header{has: true, header: rest[:at], body: rest[end:], lines: lines}
		}
		at = end
	}
	return header{has: true, body: rest, lines: 1, err: errors.New("the front matter has no end: a line --- after it is missing")}
}

// metadata parses front matter. Anchors are refused: aliases to them can make a few
// lines expand to gigabytes.
func metadata(text string) (map[string]any, error) {
	if strings.TrimSpace(text) == "" {
		return map[string]any{}, nil
	}
	file, err := parser.ParseBytes([]byte(text), 0)
	if err != nil {
		return nil, yamlError(err)
	}
	if len(file.Docs) > 1 {
		return nil, errors.New("the front matter has more than one document")
	}
	var found refuse
	for _, doc := range file.Docs {
		if doc.Body != nil {
			ast.Walk(&found, doc.Body)
		}
	}
	if found.what != "" {
		return nil, fmt.Errorf("the front matter has %s, which is not supported", found.what)
	}
	var v any
	if err := yaml.NewDecoder(bytes.NewReader([]byte(text))).Decode(&v); err != nil && !errors.Is(err, io.EOF) {
		return nil, yamlError(err)
	}
	switch m := v.(type) {
	case nil:
		return map[string]any{}, nil
	case map[string]any:
		return m, nil
	}
	return nil, fmt.Errorf("the front matter is not a mapping (name: value lines) but a %s", kindOf(v))
}

type refuse struct{ what string }

func (r *refuse) Visit(n ast.Node) ast.Visitor {
	switch n.Type() {
	case ast.AnchorType, ast.AliasType, ast.MergeKeyType:
		r.what = "an anchor or alias"
	}
	return r
}

// yamlError keeps the first line of the parser's message: the rest is a picture.
func yamlError(err error) error {
	first, _, _ := strings.Cut(err.Error(), "\n")
	return fmt.Errorf("the front matter is not YAML: %s", first)
}

func kindOf(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case string:
		return "text"
	case bool:
		return "boolean"
	case map[string]any:
		return "mapping"
	case []any:
		return "list"
	case int, int64, uint64, float64:
		return "number"
	}
	return fmt.Sprintf("%T", v)
}

// checkMetadata says which of the known fields have a wrong type.
func checkMetadata(m map[string]any) []Finding {
	var bad []Finding
	for _, name := range []string{"name", "description"} {
		v, has := m[name]
		if !has {
			continue
		}
		text, isText := v.(string)
		switch {
		case !isText:
			bad = append(bad, Finding{Code: "metadata", Text: fmt.Sprintf("%s must be text, not %s", name, kindOf(v))})
		case name == "name" && strings.TrimSpace(text) == "":
			bad = append(bad, Finding{Code: "metadata", Text: "name is empty"})
		}
	}
	return bad
}
