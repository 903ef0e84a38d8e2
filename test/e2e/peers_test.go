package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mypr/internal/api"
)

// testDir is the folder that holds e2e, peers and what setup.sh installed.
func testDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// sdk is a client made with the official Python SDK.
type sdk struct {
	t   *testing.T
	in  io.WriteCloser
	out *bufio.Reader

	Protocol     string   `json:"protocol"`
	Instructions string   `json:"instructions"`
	Tools        []string `json:"tools"`
}

func (s *session) sdk(mode string) *sdk {
	s.t.Helper()
	python := filepath.Join(testDir(s.t), ".venv", "bin", "python")
	if _, err := os.Stat(python); err != nil {
		s.t.Fatalf("the Python SDK is not installed (make setup): %v", err)
	}
	cmd := exec.Command(python, filepath.Join(testDir(s.t), "peers", "sdk_client.py"), mode, bin, "serve")
	cmd.Dir, cmd.Env, cmd.Stderr = s.dir, s.env, os.Stderr
	p := &sdk{t: s.t}
	var err error
	if p.in, err = cmd.StdinPipe(); err != nil {
		s.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		p.in.Close()
		if err := cmd.Wait(); err != nil {
			s.t.Errorf("the SDK client: %v", err)
		}
	})
	p.out = bufio.NewReader(out)
	p.read(p)
	return p
}

func (p *sdk) read(v any) {
	p.t.Helper()
	line, err := p.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, v)
	}
	if err != nil {
		p.t.Fatalf("the SDK client: %v %s", err, line)
	}
}

func (p *sdk) tool(name string, args map[string]any) toolResult {
	p.t.Helper()
	line, err := json.Marshal(map[string]any{"tool": name, "args": args})
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := p.in.Write(append(line, '\n')); err != nil {
		p.t.Fatal(err)
	}
	var res struct {
		IsError bool            `json:"isError"`
		Text    []string        `json:"text"`
		Images  int             `json:"images"`
		Payload json.RawMessage `json:"payload"`
	}
	p.read(&res)
	if len(res.Text) != 1 {
		p.t.Errorf("%s: %d text blocks", name, len(res.Text))
	}
	r := toolResult{IsError: res.IsError, Text: strings.Join(res.Text, ""), Images: res.Images}
	if name == "init" {
		err = json.Unmarshal(res.Payload, &r.Init)
	} else {
		err = json.Unmarshal(res.Payload, &r.Exec)
	}
	if err != nil {
		p.t.Errorf("%s: payload: %v\n%s", name, err, res.Payload)
	}
	return r
}

// inspector runs the MCP inspector's command line against a front end of its own.
func (s *session) inspector(args ...string) map[string]any {
	s.t.Helper()
	modules := filepath.Join(testDir(s.t), "node_modules")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(modules, ".bin", "node"),
		append([]string{filepath.Join(modules, "@modelcontextprotocol", "inspector", "clients", "launcher", "build", "index.js"), "--cli", bin, "serve"}, args...)...)
	cmd.Dir, cmd.Env = s.dir, append(slices.Clone(s.env), "HOME="+s.dir) // it writes a catalogue into HOME
	var errOut strings.Builder
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		s.t.Fatalf("inspector %q: %v\n%s%s", args, err, out, errOut.String())
	}
	var v map[string]any
	if err := json.Unmarshal(out, &v); err != nil {
		s.t.Fatalf("inspector %q printed: %v\n%s", args, err, out)
	}
	return v
}

var toolNames = []string{"init", "execute", "poll"}

// Must be seen, 2: three kinds of client, one session.
func TestPeersShareOneSession(t *testing.T) {
	s := newSession(t)
	own := s.serve()
	peer := s.sdk("auto")
	if !slices.Equal(peer.Tools, toolNames) || peer.Instructions == "" {
		t.Errorf("the SDK client sees tools %q, instructions %q", peer.Tools, peer.Instructions)
	}
	own.init("own")
	if r := peer.tool("init", map[string]any{"client_id": "peer"}); r.Init.ClientID != "peer" {
		t.Fatalf("init: %s", r.Text)
	}
	own.must("x = 20")
	r := peer.tool("execute", map[string]any{"code": "y = x + 1; print('sdk', y)", "wait_ms": 30000})
	if got := output(r); got != "sdk 21\n" || r.Exec.State != api.Succeeded {
		t.Errorf("the SDK client printed %q, state %s", got, r.Exec.State)
	}
	if got := own.must("x + y"); got != "41" {
		t.Errorf("x + y is %s", got)
	}
	legacy := s.sdk("legacy")
	if !slices.Equal(legacy.Tools, toolNames) || legacy.Instructions != peer.Instructions {
		t.Errorf("the two protocols differ: tools %q, same instructions: %v", legacy.Tools, legacy.Instructions == peer.Instructions)
	}
	if legacy.Protocol == peer.Protocol {
		t.Errorf("both SDK clients speak %s", legacy.Protocol)
	}

	// The inspector makes one call for each start; poll needs no init.
	var names []string
	for _, tool := range s.inspector("--method", "tools/list")["tools"].([]any) {
		names = append(names, tool.(map[string]any)["name"].(string))
	}
	if !slices.Equal(names, toolNames) {
		t.Errorf("the inspector sees %q", names)
	}
	poll := s.inspector("--method", "tools/call", "--tool-name", "poll", "--tool-arg", "exec_id="+r.Exec.ExecID, "cursor=0")
	text := poll["content"].([]any)[0].(map[string]any)["text"].(string)
	if !strings.Contains(text, "sdk 21") || !strings.Contains(text, r.Exec.ExecID) {
		t.Errorf("the inspector reads %q", text)
	}
}

// Must be seen, 2: the session outlives its clients.
func TestSessionOutlivesItsClients(t *testing.T) {
	s := newSession(t)
	a, b := s.serve(), s.serve()
	a.init("a")
	b.init("b")
	a.must("kept = ['from a']")
	b.must("kept.append('from b')")
	a.close()
	b.close()
	c := s.serve()
	c.init("c")
	if got := c.must("kept"); got != "['from a', 'from b']" {
		t.Errorf("the third client finds %s", got)
	}
}

func TestNothingIsStartedBeforeTheFirstCall(t *testing.T) {
	s := newSession(t)
	for range 10 {
		f := s.serve()
		r := f.request("tools/list", map[string]any{})
		if !strings.Contains(string(r.Result), `"execute"`) {
			t.Errorf("tools/list: %s", r.Result)
		}
	}
	if r := s.status(); r.ManagerAvailable || r.Supervisor != nil {
		t.Error("a runtime was started by a handshake")
	}
	if left, _ := os.ReadDir(filepath.Join(s.dir, ".mypr")); len(left) != 1 {
		t.Errorf("a handshake wrote into .mypr: %v", left)
	}
}
