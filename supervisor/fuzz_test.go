package supervisor

import (
	"slices"
	"strings"
	"testing"
)

func FuzzParseState(f *testing.F) {
	f.Add([]byte(`{"version":1,"instance":"x"}` + "\n" + `{"def":{"name":"a.service"}}` + "\n" + `{"unit":{"name":"a.service","state":"running"}}` + "\n" + `{"gone":"a.service"}` + "\n"))
	f.Add([]byte(`{"version":1}` + "\n" + `{"unit":{"name":"a.service"`))
	f.Fuzz(func(t *testing.T, b []byte) {
		st, err := parseState(b)
		if err != nil {
			return
		}
		seen := map[string]bool{}
		for _, u := range st.units {
			if u.Name == "" || seen[u.Name] {
				t.Errorf("unit %q is there twice or without a name", u.Name)
			}
			seen[u.Name] = true
		}
	})
}

func TestParseState(t *testing.T) {
	lines := []string{
		`{"version":1,"instance":"i"}`,
		`{"def":{"name":"a.service"}}`,
		`{"unit":{"name":"a.service","state":"start"}}`,
		`{"unit":{"name":"b.service","state":"dead"}}`,
		`{"unit":{"name":"a.service","state":"running"}}`,
		`{"gone":"b.service"}`,
		`{"unit":{"name":"c.service","sta`,
	}
	st, err := parseState([]byte(strings.Join(lines, "\n")))
	if err != nil {
		t.Fatal(err)
	}
	if len(st.units) != 1 || st.units[0].State != Running || st.units[0].def == nil || st.Instance != "i" {
		t.Errorf("%+v", st.units)
	}
}

func FuzzEnvironmentFile(f *testing.F) {
	f.Add("A=1\n# x\nB='a b' \nC=\"x\\\"y\"\\\n z\n")
	f.Fuzz(func(t *testing.T, text string) {
		for _, kv := range parseEnvironmentFile(text) {
			if name, _, ok := strings.Cut(kv, "="); !ok || name == "" {
				t.Errorf("%q is no assignment", kv)
			}
		}
	})
}

func FuzzExpand(f *testing.F) {
	f.Add("a ${X} $X $$ ${} ${X", "v w")
	f.Fuzz(func(t *testing.T, text, value string) {
		args := append([]string{"argv0"}, strings.Split(text, " ")...)
		out := expand(args, []string{"X=" + value})
		if out[0] != "argv0" {
			t.Error("argv[0] was changed")
		}
		if !strings.Contains(text, "$") && !slices.Equal(out, args) {
			t.Errorf("%q became %q", args, out)
		}
	})
}
