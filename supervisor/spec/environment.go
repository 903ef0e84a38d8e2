package spec

import (
	"bytes"
	"encoding/json"
	"slices"
	"sync/atomic"
)

// Environment is NAME=VALUE strings. One that was read from JSON may be shared with other
// units: it is not to be changed in place.
type Environment []string

// sameEnvironment is the last one that was read. Nearly all commands of a session have the
// same, and to decode it takes longer than the rest of a unit.
var sameEnvironment atomic.Pointer[readEnvironment]

type readEnvironment struct {
	text []byte
	list Environment
}

// maxSame bounds what is kept.
const maxSame = 64 << 10

// UnmarshalJSON takes a list of strings.
func (e *Environment) UnmarshalJSON(text []byte) error {
	if last := sameEnvironment.Load(); last != nil && bytes.Equal(last.text, text) {
		*e = last.list
		return nil
	}
	var list []string
	if err := json.Unmarshal(text, &list); err != nil {
		return err
	}
	*e = slices.Clip(list)
	if len(text) <= maxSame {
		sameEnvironment.Store(&readEnvironment{bytes.Clone(text), *e})
	}
	return nil
}
