// Package config reads config.toml: the user's own ($XDG_CONFIG_HOME/mypr/config.toml)
// and the workspace's (.mypr/config.toml), whose keys win.
//
// It owns the keys, their defaults and bounds (docs/config.md lists them), and messages
// that name file, line and column. It does not watch the files and does not act on
// what they say: the manager reads them when it starts.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/kernel"
)

// Config is what both files say together.
type Config struct {
	Limits Limits        `toml:"limits"`
	Python kernel.Config `toml:"python"`
	// Environment is set for the manager, the kernel and jobs, over what the client
	// that started the runtime had: proxies, certificates, package indexes.
	Environment map[string]string `toml:"environment"`
	Files       []string          `toml:"-"` // those that were read
}

// Limits is the [limits] table.
type Limits struct {
	CompletedTasks   int   `toml:"completed_tasks"`   // ended task handles that the kernel keeps
	CompletedRecords int   `toml:"completed_records"` // ended executions in the manager's memory
	CacheBytes       int64 `toml:"cache_bytes"`       // of that memory
	OutputBytes      int64 `toml:"output_bytes"`      // of one run
	ExecuteWaitMS    int64 `toml:"execute_wait_ms"`   // default wait of execute
	PollWaitMS       int64 `toml:"poll_wait_ms"`      // default wait of poll
	IdleExitSeconds  int64 `toml:"idle_exit_seconds"` // end an idle session after so long; 0: never
}

// Default is the configuration without any file.
func Default() *Config {
	return &Config{
		Limits: Limits{
			CompletedTasks: 128, CompletedRecords: 128, CacheBytes: 32 << 20, OutputBytes: api.MaxOutputBytes,
			ExecuteWaitMS: api.DefaultWaitMS, PollWaitMS: api.DefaultWaitMS,
		},
		Environment: map[string]string{},
	}
}

// CodeInvalid is the code of a configuration that cannot be used.
const CodeInvalid = "invalid_config"

// Error is a file that cannot be used. Line and Column count from 1; 0 is unknown.
type Error struct {
	File         string
	Line, Column int
	Key          string // dotted; may be empty
	Err          error
}

func (e *Error) Error() string {
	s := e.File
	if e.Line > 0 {
		s = fmt.Sprintf("%s:%d:%d", s, e.Line, e.Column)
	}
	if e.Key != "" {
		s += ": " + e.Key
	}
	return s + ": " + e.Err.Error()
}

// Unwrap gives the cause, and the error's shape on the wire.
func (e *Error) Unwrap() []error {
	r := rpc.Errorf(CodeInvalid, "%s", e.Error()).WithHint("correct the file and try again")
	r.Details = map[string]any{"path": e.File, "line": e.Line, "column": e.Column}
	return []error{e.Err, r}
}

// maxSize bounds a file.
const maxSize = 16 << 20

// UserFile is the path of the user's file, or "" when the user has no home.
func UserFile() string {
	dir, err := os.UserConfigDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "mypr", "config.toml")
}

// Load reads the user's file, then the one in root (the workspace's .mypr). Files that
// do not exist say nothing. The warnings ("file:line:column: text") are about keys that
// nothing knows; the error is an *Error.
func Load(root string) (*Config, []string, error) {
	c := Default()
	var warnings []string
	for _, path := range []string{UserFile(), filepath.Join(root, "config.toml")} {
		if path == "" {
			continue
		}
		data, err := read(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, nil, &Error{File: path, Err: err}
		}
		w, err := c.merge(path, data)
		if err != nil {
			return nil, nil, err
		}
		warnings = append(warnings, w...)
		c.Files = append(c.Files, path)
	}
	return c, warnings, nil
}

func read(path string) ([]byte, error) {
	info, err := os.Stat(path) // before opening it: to open a FIFO would block
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is not a regular file")
	}
	if err == nil && info.Size() > maxSize {
		err = fmt.Errorf("it has %d bytes, more than %d", info.Size(), maxSize)
	}
	var data []byte
	if err == nil {
		data, err = os.ReadFile(path)
	}
	var p *fs.PathError
	if errors.As(err, &p) {
		err = p.Err
	}
	return data, err
}

// merge applies one file over what c holds. On error c is in no defined state.
func (c *Config) merge(path string, data []byte) (warnings []string, err error) {
	err = toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().Decode(c)
	var unknown *toml.StrictMissingError
	var bad *toml.DecodeError
	switch {
	case errors.As(err, &unknown):
		tables := map[string]bool{}
		for _, e := range unknown.Errors {
			key, name := e.Key(), strings.Join(e.Key(), ".")
			if len(key) > 0 && !slices.Contains([]string{"limits", "python", "environment"}, key[0]) {
				if tables[key[0]] {
					continue // one warning for a whole table
				}
				tables[key[0]], name = true, key[0]
			}
			line, column := e.Position()
			warnings = append(warnings, fmt.Sprintf("%s:%d:%d: unknown key %s, ignored", path, line, column, name))
		}
	case errors.As(err, &bad):
		line, column := bad.Position()
		return nil, &Error{File: path, Line: line, Column: column, Key: strings.Join(bad.Key(), "."), Err: errors.New(plain(bad.Error()))}
	case err != nil:
		return nil, &Error{File: path, Err: err}
	}
	if key, err := c.check(); err != nil {
		line, column := position(data, key)
		return nil, &Error{File: path, Line: line, Column: column, Key: strings.Join(key, "."), Err: err}
	}
	return warnings, nil
}

// plain says in TOML's words what the decoder says in Go's.
func plain(message string) string {
	message = strings.TrimPrefix(message, "toml: ")
	rest, ok := strings.CutPrefix(message, "cannot decode TOML ")
	got, into, found := strings.Cut(rest, " into ")
	if !ok || !found {
		return message
	}
	want := "a table"
	switch into[strings.LastIndexByte(into, ' ')+1:] {
	case "int", "int64":
		want = "an integer"
	case "string":
		want = "a string"
	case "bool":
		want = "true or false"
	}
	return fmt.Sprintf("%s is expected here, not a TOML %s", want, got)
}

// isVariable reports whether s can be a variable's name: [A-Za-z_][A-Za-z0-9_]*.
func isVariable(s string) bool {
	for i, c := range []byte(s) {
		if c != '_' && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

// check returns the first key whose value is out of bounds, and why.
func (c *Config) check() (key []string, err error) {
	l := c.Limits
	for _, b := range []struct {
		key               string
		value, least, top int64
	}{
		{"completed_tasks", int64(l.CompletedTasks), 1, 1 << 20},
		{"completed_records", int64(l.CompletedRecords), 1, 1 << 20},
		{"cache_bytes", l.CacheBytes, 1 << 10, 1 << 40},
		{"output_bytes", l.OutputBytes, 1 << 10, 1 << 40},
		{"execute_wait_ms", l.ExecuteWaitMS, 0, api.MaxWaitMS},
		{"poll_wait_ms", l.PollWaitMS, 0, api.MaxWaitMS},
		{"idle_exit_seconds", l.IdleExitSeconds, 0, 10 * 365 * 86400},
	} {
		if b.value < b.least || b.value > b.top {
			return []string{"limits", b.key}, fmt.Errorf("%d is not between %d and %d", b.value, b.least, b.top)
		}
	}
	if err := c.Python.Check(); err != nil {
		return []string{"python", "python"}, err
	}
	for _, name := range slices.Sorted(maps.Keys(c.Environment)) {
		key := []string{"environment", name}
		switch {
		case !isVariable(name):
			return key, errors.New("the key is no variable name")
		case strings.HasPrefix(name, "MYPR_"):
			return key, errors.New("variables that begin with MYPR_ belong to the runtime")
		case strings.ContainsRune(c.Environment[name], 0):
			return key, errors.New("a variable cannot hold a zero byte")
		}
	}
	return nil, nil
}

// Environ is base with the configured variables set, and their names, sorted.
func (c *Config) Environ(base []string) (env, changed []string) {
	env = slices.Clone(base)
	changed = slices.Sorted(maps.Keys(c.Environment))
	for _, name := range changed {
		env = slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
		env = append(env, name+"="+c.Environment[name])
	}
	return env, changed
}

// position finds where a key is set: by "[table]" and "key", a dotted key, or an
// inline table. It answers 0, 0 when the key is not in the file.
func position(data []byte, key []string) (line, column int) {
	p := unstable.Parser{}
	p.Reset(data)
	var table []string
	for p.NextExpression() {
		e := p.Expression()
		switch e.Kind {
		case unstable.Table, unstable.ArrayTable:
			table = names(e.Key())
		case unstable.KeyValue:
			if n := find(e, table, key); n != nil {
				pos := p.Shape(n.Raw).Start
				return pos.Line, pos.Column
			}
		}
	}
	return 0, 0
}

func find(kv *unstable.Node, table, key []string) *unstable.Node {
	path := append(slices.Clone(table), names(kv.Key())...)
	if slices.Equal(path, key) {
		it := kv.Key()
		var last *unstable.Node
		for it.Next() {
			last = it.Node()
		}
		return last
	}
	if v := kv.Value(); v.Kind == unstable.InlineTable {
		for it := v.Children(); it.Next(); {
			if n := find(it.Node(), path, key); n != nil {
				return n
			}
		}
	}
	return nil
}

func names(it unstable.Iterator) []string {
	var out []string
	for it.Next() {
		out = append(out, string(it.Node().Data))
	}
	return out
}
