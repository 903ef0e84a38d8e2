package frontend

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// badArgument is a mistake in the arguments of a call, told to the model as the text
// of an error result.
type badArgument struct{ text string }

func (e *badArgument) Error() string { return e.text }

// args are the checked arguments of one call.
type args struct {
	strings  map[string]string
	integers map[string]int64
	booleans map[string]bool
}

func (a args) str(name string) *string {
	if v, ok := a.strings[name]; ok {
		return &v
	}
	return nil
}

func (a args) int(name string) *int64 {
	if v, ok := a.integers[name]; ok {
		return &v
	}
	return nil
}

// bind checks arguments against the tool's parameters. null counts as left out,
// and numbers and booleans may come as strings where that is unambiguous, because
// models write them so.
func (t *tool) bind(raw json.RawMessage) (args, error) {
	a := args{map[string]string{}, map[string]int64{}, map[string]bool{}}
	raw = bytes.TrimSpace(raw)
	fields := map[string]json.RawMessage{}
	if len(raw) > 0 && !bytes.Equal(raw, []byte("null")) {
		if err := json.Unmarshal(raw, &fields); err != nil {
			return a, &badArgument{fmt.Sprintf("%s: the arguments must be an object, such as %s", t.name, t.example())}
		}
	}
	for name := range fields {
		if t.parameter(name) == nil {
			return a, &badArgument{fmt.Sprintf("%s has no parameter %q. It takes %s", t.name, clip(name, 64), t.signature())}
		}
	}
	for _, p := range t.parameters {
		v, ok := fields[p.name]
		if !ok || bytes.Equal(v, []byte("null")) {
			if p.required {
				return a, &badArgument{fmt.Sprintf("%s needs %s, for example %s", t.name, p.name, t.example())}
			}
			continue
		}
		wrong := func(what string) error {
			return &badArgument{fmt.Sprintf("%s: %s must be %s, not %s. Example: %s=%s", t.name, p.name, what, clip(string(v), 64), p.name, p.example)}
		}
		switch p.kind {
		case "string":
			var s string
			if json.Unmarshal(v, &s) != nil {
				return a, wrong("a string")
			}
			a.strings[p.name] = s
		case "boolean":
			switch b := strings.ToLower(strings.Trim(string(v), `"`)); b {
			case "true", "false":
				a.booleans[p.name] = b == "true"
			default:
				return a, wrong("true or false")
			}
		case "integer":
			n, ok := integer(v)
			switch {
			case !ok:
				return a, wrong("a whole number")
			case p.max == 0 && n < p.min:
				return a, wrong(fmt.Sprintf("%d or more", p.min))
			case p.max > 0 && (n < p.min || n > p.max):
				return a, wrong(fmt.Sprintf("from %d to %d", p.min, p.max))
			}
			a.integers[p.name] = n
		}
	}
	return a, nil
}

// integer reads 1000, 1000.0, 1e3, "1000" and "1000.0".
func integer(raw json.RawMessage) (int64, bool) {
	s := string(raw)
	if s[0] == '"' {
		if json.Unmarshal(raw, &s) != nil {
			return 0, false
		}
		s = strings.TrimSpace(s)
	}
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		return n, true
	}
	if strings.ContainsAny(s, "xXpP_nN") { // hexadecimal floats, digit groups, inf and nan are Go's, not JSON's
		return 0, false
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return 0, false
	}
	return int64(f), true
}

// example is a call with all that is required.
func (t *tool) example() string {
	var parts []string
	for _, p := range t.parameters {
		if p.required {
			parts = append(parts, fmt.Sprintf("%q: %s", p.name, p.example))
		}
	}
	return t.name + " {" + strings.Join(parts, ", ") + "}"
}

func (t *tool) signature() string {
	names := make([]string, len(t.parameters))
	for i, p := range t.parameters {
		names[i] = p.name
		if p.required {
			names[i] += " (required)"
		}
	}
	return strings.Join(names, ", ")
}

// clip shortens s to at most n bytes, at a rune.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
