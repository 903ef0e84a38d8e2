package spec

import (
	"slices"
	"unicode/utf8"
)

// Raw has the strings of a service that are not UTF-8. Arguments, environment and
// directories are bytes, which JSON's strings cannot carry; encoding/json would put
// U+FFFD in their place.
type Raw struct {
	Args             [][][]byte `json:"args,omitempty"` // of each ExecStart
	Environment      [][]byte   `json:"environment,omitempty"`
	WorkingDirectory []byte     `json:"working_directory,omitempty"`
}

// KeepRaw sets Raw if anything needs it. Who sends a unit calls it before.
func (u *Unit) KeepRaw() {
	s := u.Service
	if s == nil {
		return
	}
	text := utf8.ValidString(s.WorkingDirectory) && isText(s.Environment)
	for _, c := range s.ExecStart {
		text = text && isText(c.Args)
	}
	if text {
		return
	}
	u.Raw = &Raw{Environment: toBytes(s.Environment), WorkingDirectory: []byte(s.WorkingDirectory)}
	for _, c := range s.ExecStart {
		u.Raw.Args = append(u.Raw.Args, toBytes(c.Args))
	}
}

// RestoreRaw puts the strings back. Who has read a unit from JSON calls it.
func (u *Unit) RestoreRaw() {
	if u.Raw == nil || u.Service == nil {
		return
	}
	s := u.Service
	s.WorkingDirectory, s.Environment = string(u.Raw.WorkingDirectory), toStrings(u.Raw.Environment)
	for i := range s.ExecStart {
		if i < len(u.Raw.Args) {
			s.ExecStart[i].Args = toStrings(u.Raw.Args[i])
		}
	}
}

func isText(list []string) bool {
	return !slices.ContainsFunc(list, func(s string) bool { return !utf8.ValidString(s) })
}

func toBytes(list []string) [][]byte {
	out := make([][]byte, len(list))
	for i, s := range list {
		out[i] = []byte(s)
	}
	return out
}

func toStrings(list [][]byte) []string {
	out := make([]string, len(list))
	for i, b := range list {
		out[i] = string(b)
	}
	return out
}
