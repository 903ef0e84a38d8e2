package spec

import (
	"encoding/json"

	"mypr/internal/ospath"
)

// Arguments, environment and directories are bytes, not text: what of them is not
// UTF-8 travels as ospath.Text spells it, where encoding/json alone would put U+FFFD.

// MarshalJSON keeps bytes that are not UTF-8.
func (c Command) MarshalJSON() ([]byte, error) {
	type plain Command
	return json.Marshal(struct {
		plain
		Path ospath.Text   `json:"path"`
		Args []ospath.Text `json:"args"`
	}{plain(c), ospath.Text(c.Path), texts(c.Args)})
}

// UnmarshalJSON is the inverse.
func (c *Command) UnmarshalJSON(raw []byte) error {
	type plain Command
	v := struct {
		*plain
		Path ospath.Text   `json:"path"`
		Args []ospath.Text `json:"args"`
	}{plain: (*plain)(c)}
	if err := json.Unmarshal(raw, &v); err != nil {
		return err
	}
	c.Path, c.Args = string(v.Path), stringsOf(v.Args)
	return nil
}

// MarshalJSON keeps bytes that are not UTF-8.
func (s Service) MarshalJSON() ([]byte, error) {
	type plain Service
	return json.Marshal(struct {
		plain
		WorkingDirectory ospath.Text   `json:"working_directory,omitempty"`
		Environment      []ospath.Text `json:"environment,omitempty"`
	}{plain(s), ospath.Text(s.WorkingDirectory), texts(s.Environment)})
}

// UnmarshalJSON is the inverse.
func (s *Service) UnmarshalJSON(raw []byte) error {
	type plain Service
	v := struct {
		*plain
		WorkingDirectory ospath.Text   `json:"working_directory,omitempty"`
		Environment      []ospath.Text `json:"environment,omitempty"`
	}{plain: (*plain)(s)}
	if err := json.Unmarshal(raw, &v); err != nil {
		return err
	}
	s.WorkingDirectory, s.Environment = string(v.WorkingDirectory), stringsOf(v.Environment)
	return nil
}

func texts(list []string) []ospath.Text {
	if list == nil {
		return nil
	}
	out := make([]ospath.Text, len(list))
	for i, s := range list {
		out[i] = ospath.Text(s)
	}
	return out
}

func stringsOf(list []ospath.Text) []string {
	if list == nil {
		return nil
	}
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return out
}
