package skills

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mypr/internal/rpc"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func service(t *testing.T, skills map[string]string) *Service {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "skills")
	for name, text := range skills {
		write(t, filepath.Join(dir, name, fileName), text)
	}
	return New(dir)
}

const review = "---\nname: review\ndescription: Review workspace changes.\n---\n\nRead the diff.\n"

func TestListNamesErrorsAndKeepsTheRest(t *testing.T) {
	s := service(t, map[string]string{
		"review": review,
		"plain":  "Just text.\n",
		"broken": "---\nname: [a\n---\n",
		"types":  "---\nname: 7\n---\n",
		"other":  "---\nname: other-name\ntags: [a, 1]\n---\n",
	})
	outside := filepath.Join(t.TempDir(), "far")
	write(t, filepath.Join(outside, fileName), review)
	if err := os.Symlink(outside, filepath.Join(s.dir, "far")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("review", filepath.Join(s.dir, "near")); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(s.dir, "README.md"), "not a skill")
	r, err := s.List(t.Context(), struct{}{})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]Skill{}
	for _, k := range r.Skills {
		got[k.Directory] = k
	}
	if len(got) != 6 {
		t.Fatalf("%d skills: %+v", len(got), got)
	}
	if k := got["review"]; k.Name != "review" || k.Description != "Review workspace changes." || k.Error != "" || k.Path != filepath.Join(s.dir, "review", fileName) {
		t.Errorf("%+v", k)
	}
	if k := got["near"]; k.Name != "review" || k.Error != "" {
		t.Errorf("a link inside: %+v", k)
	}
	if k := got["plain"]; k.Name != "plain" || k.Error != "" {
		t.Errorf("%+v", k)
	}
	if k := got["broken"]; k.Name != "broken" || !strings.Contains(k.Error, "not YAML") {
		t.Errorf("%+v", k)
	}
	if k := got["types"]; k.Name != "types" || !strings.Contains(k.Error, "name must be text") {
		t.Errorf("%+v", k)
	}
	if k := got["other"]; k.Name != "other-name" || fmt.Sprint(k.Metadata["tags"]) != "[a 1]" {
		t.Errorf("%+v", k)
	}
}

func TestRead(t *testing.T) {
	s := service(t, map[string]string{"review": review})
	p, err := s.Read(t.Context(), nameParams{"review"})
	if err != nil || p.Text != review || len(p.Revision) != 64 {
		t.Fatalf("%+v %v", p, err)
	}
	for name, code := range map[string]string{"none": rpc.CodeNotFound, "../review": rpc.CodeInvalidRequest, "": rpc.CodeInvalidRequest, ".hidden": rpc.CodeInvalidRequest} {
		if _, err := s.Read(t.Context(), nameParams{name}); rpc.CodeOf(err) != code {
			t.Errorf("%q: %v", name, err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(s.dir, "review", "x")); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(s.dir, "review", fileName)); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(s.dir, "review", fileName)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read(t.Context(), nameParams{"review"}); rpc.CodeOf(err) != rpc.CodePermission {
		t.Error(err)
	}
}

func TestValidate(t *testing.T) {
	s := service(t, map[string]string{"review": review, "other": review})
	write(t, filepath.Join(s.dir, "review", "guide.md"), "x")
	write(t, filepath.Join(s.dir, "review", "a b.md"), "x")
	if err := os.Symlink("/etc", filepath.Join(s.dir, "review", "etc")); err != nil {
		t.Fatal(err)
	}
	head := "---\nname: review\ndescription: d\n---\n"
	for name, c := range map[string]struct {
		text     string
		errors   []string // codes with lines
		warnings []string
	}{
		"good":       {head + "[g](guide.md) ![i](a%20b.md 'title') [o](../other/SKILL.md#x) [w](https://x.y/z) [m](mailto:a) [h](#there) <guide.md>\n", nil, nil},
		"legacy":     {"text\n", nil, []string{"no_front_matter:1"}},
		"missing":    {head + "\n[x](nope.md)\n", []string{"link_missing:6"}, nil},
		"escape":     {head + "[x](../../../etc/passwd) [y](/etc/passwd) [z](etc/passwd)\n", []string{"link_outside:5", "link_outside:5", "link_outside:5"}, nil},
		"reference":  {head + "[x]: nope.md\n[y]: <guide.md> 'g'\n", []string{"link_missing:5"}, nil},
		"code":       {head + "```\n[x](nope.md)\n```\n`[x](nope.md)` and ``a ` [x](nope.md)``\n", nil, nil},
		"parens":     {head + "[x](no(pe).md)\n", []string{"link_missing:5"}, nil},
		"yaml":       {"---\na: [\n---\n", []string{"yaml:1"}, nil},
		"list":       {"---\n- a\n---\n", []string{"yaml:1"}, nil},
		"types":      {"---\nname: [a]\ndescription: 3\n---\n", []string{"metadata:0", "metadata:0"}, nil},
		"no end":     {"---\nname: a\n", []string{"front_matter:1"}, nil},
		"other name": {"---\nname: x\n---\n", nil, []string{"name:0", "description:0"}},
		"aliases":    {"---\na: &a [x]\nb: *a\n---\n", []string{"yaml:1"}, nil},
		"crlf":       {"---\r\nname: review\r\ndescription: d\r\n---\r\nx\r\n", nil, nil},
		"empty":      {"---\n---\n", nil, []string{"description:0"}},
	} {
		r, err := s.Validate(t.Context(), validateParams{"review", &c.text})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := codes(r.Errors); fmt.Sprint(got) != fmt.Sprint(c.errors) || r.Valid != (len(c.errors) == 0) {
			t.Errorf("%s: errors %v, want %v: %+v", name, got, c.errors, r.Errors)
		}
		if got := codes(r.Warnings); fmt.Sprint(got) != fmt.Sprint(c.warnings) {
			t.Errorf("%s: warnings %v, want %v", name, got, c.warnings)
		}
	}
}

func codes(fs []Finding) (out []string) {
	for _, f := range fs {
		out = append(out, fmt.Sprintf("%s:%d", f.Code, f.Line))
	}
	return out
}

func FuzzValidate(f *testing.F) {
	f.Add(review)
	f.Add("---\na: &a [*a]\n---\n[x](")
	f.Add("---\n---\n```\n``")
	f.Add("\ufeff---\r\n? !!binary x\n...\n[a]: <b")
	f.Add("---\n<<: {a: b}\n---\n`` ` [](a(b)")
	s := New(f.TempDir())
	f.Fuzz(func(t *testing.T, text string) {
		r, err := s.Validate(t.Context(), validateParams{"x", &text})
		if err == nil && r.Valid != (len(r.Errors) == 0) {
			t.Fatalf("%+v", r)
		}
	})
}
