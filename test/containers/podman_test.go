package containers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/test/counterpart"
)

// front is a running "mypr-mcp serve", and an MCP client of it.
type front struct {
	b      *box
	client *counterpart.Client
	end    func()
}

func (b *box) serve() *front {
	b.t.Helper()
	argv := b.argv("serve")
	cmd := b.p.command(context.Background(), argv[0], argv[1:]...)
	in, err := cmd.StdinPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	r, w, err := os.Pipe() // not cmd's, whose Wait would wait for whoever keeps it open
	if err != nil {
		b.t.Fatal(err)
	}
	cmd.Stdout = w
	err = cmd.Start()
	w.Close()
	if err != nil {
		b.t.Fatal(err)
	}
	f := &front{b: b}
	f.end = func() {
		in.Close()
		_ = cmd.Wait()
		r.Close()
	}
	b.t.Cleanup(func() { f.end() })
	_ = r.SetReadDeadline(time.Now().Add(3 * patience))
	if f.client, err = counterpart.NewClient(in, r); err != nil {
		f.fatal(err)
	}
	return f
}

func (f *front) fatal(err error) {
	f.b.t.Helper()
	f.b.t.Fatalf("%s, in %s: %v", f.b.p.name, f.b.name, err)
}

// answer is what a tool says.
type answer struct {
	Content []struct{ Text string }
	IsError bool
	Meta    map[string]json.RawMessage `json:"_meta"`
}

func (a answer) text() string {
	var texts []string
	for _, c := range a.Content {
		texts = append(texts, c.Text)
	}
	return strings.Join(texts, "\n")
}

func (f *front) tool(name string, args map[string]any) answer {
	f.b.t.Helper()
	var a answer
	r, err := f.client.Tool(name, args)
	if err == nil {
		err = json.Unmarshal(r, &a)
	}
	if err != nil {
		f.fatal(err)
	}
	return a
}

// executes runs a cell and wants text in the answer.
func (f *front) executes(code, want string) string {
	f.b.t.Helper()
	a := f.tool("execute", map[string]any{"code": code, "wait_ms": 30000})
	if a.IsError || !strings.Contains(a.text(), want) {
		f.b.t.Fatalf("%s, in %s: %q: wanted %q, got:\n%s", f.b.p.name, f.b.name, code, want, a.text())
	}
	return a.text()
}

// submits sends a cell that goes on, and returns its id.
func (f *front) submits(code string) string {
	f.b.t.Helper()
	a := f.tool("execute", map[string]any{"code": code, "wait_ms": 0})
	var r struct {
		ExecID string `json:"exec_id"`
	}
	if err := json.Unmarshal(a.Meta["mypr/result"], &r); err != nil || r.ExecID == "" {
		f.b.t.Fatalf("%q: %v: %s", code, err, a.text())
	}
	return r.ExecID
}

// polls reads a cell until it has printed want.
func (f *front) polls(id, want string) {
	f.b.t.Helper()
	var cursor any
	var all strings.Builder
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		a := f.tool("poll", map[string]any{"exec_id": id, "cursor": cursor, "wait_ms": 10000})
		all.WriteString(a.text() + "\n")
		var r struct {
			Cursor any    `json:"cursor"`
			State  string `json:"state"`
		}
		if err := json.Unmarshal(a.Meta["mypr/result"], &r); a.IsError || err != nil {
			break
		}
		if strings.Contains(all.String(), want) {
			return
		}
		if r.State != "running" && r.State != "queued" && r.State != "starting" {
			break
		}
		cursor = r.Cursor
	}
	f.b.t.Fatalf("%s, in %s: cell %s never says %q:\n%s", f.b.p.name, f.b.name, id, want, all.String())
}

func (b *box) status() *api.StatusReport {
	b.t.Helper()
	argv := append(append([]string{}, b.prefix...), "-C", b.dir, "--json", "status")
	var out, errs bytes.Buffer
	cmd := b.p.command(b.t.Context(), argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	r := new(api.StatusReport)
	if err = errors.Join(err, json.Unmarshal(out.Bytes(), r)); err != nil {
		b.t.Fatalf("%s, in %s: status: %v\n%s\n%s", b.p.name, b.name, err, errs.String(), out.String())
	}
	return r
}

// uses does everything that a client does. The runtime may be anywhere; at knows it.
func (b *box) uses(at *box) {
	b.t.Helper()
	f := b.serve()
	if a := f.tool("init", map[string]any{}); a.IsError {
		b.t.Fatalf("%s, in %s: init: %s", b.p.name, b.name, a.text())
	}
	f.executes("box = "+fmt.Sprintf("%q", b.name)+"; 6 * 7", "42")
	id := f.submits("import asyncio\ngo = asyncio.Event()\nprint('waits', flush=True)\nawait go.wait()\nprint('went on')")
	f.executes("go.set()", "")
	f.polls(id, "went on")
	if got := at.ok("exec", "box"); !strings.Contains(got, b.name) {
		b.t.Errorf("%s: %s has another session than %s: %s", b.p.name, at.name, b.name, got)
	}
	here, there := b.status(), at.status()
	if here.Status == nil || there.Status == nil || here.Status.Generation == "" || here.Status.Generation != there.Status.Generation {
		b.t.Errorf("%s: status in %s is %+v, at the runtime %+v", b.p.name, b.name, here.Status, there.Status)
	}
	// A cell that blocks, and its end from here.
	id = f.submits("import time\nprint('blocks', flush=True)\nwhile True: time.sleep(0.1)")
	f.polls(id, "blocks")
	b.ok("interrupt")
	f.polls(id, "KeyboardInterrupt")
	b.ok("reset", "--force") // the interrupted cell may not have ended yet
	if got := b.ok("exec", "'box' in globals()"); got != "False" {
		b.t.Errorf("%s, in %s: after reset: %s", b.p.name, b.name, got)
	}
	f.end()
}

// Shape (a): the runtime is on the host, clients are in containers.
func TestRuntimeOnTheHost(t *testing.T) {
	each(t, func(t *testing.T, p *person) {
		dir := p.workspace(t)
		host := p.host(t, dir)
		t.Cleanup(func() { host.ok("stop", "--force") })
		host.ok("exec", "x = 'of the host'")
		generation := host.status().Status.Generation

		// The workspace has another path in the second container, and is the same.
		first := p.in(t, p.container(t, dir, dir, idle...), dir)
		second := p.in(t, p.container(t, dir, "/elsewhere", idle...), "/elsewhere")
		f := first.serve()
		f.tool("init", map[string]any{})
		f.executes("x", "of the host")
		id := f.submits("import asyncio; await asyncio.sleep(3600)")
		p.must(t, "podman", "kill", first.name)
		if got := second.ok("exec", "x"); !strings.Contains(got, "of the host") {
			t.Errorf("after the end of the first client's container: %s", got)
		}
		if st := host.status().Status; st.Generation != generation || len(st.Active) != 1 {
			t.Errorf("after the end of the first client's container: %+v", st)
		}
		g := second.serve()
		if a := g.tool("poll", map[string]any{"exec_id": id, "wait_ms": 0}); a.IsError || !strings.Contains(a.text(), "running") {
			t.Errorf("the cell of the client that was killed: %s", a.text())
		}
		second.ok("reset", "--force")
		second.uses(host)

		second.ok("restart")
		if got := second.ok("exec", "1 + 1"); got != "2" {
			t.Errorf("after restart: %s", got)
		}
		second.ok("stop")
		if r := host.status(); r.Status != nil || r.Supervisor != nil {
			t.Errorf("after stop in a container: %+v", r)
		}
	})
}

// Shape (b): the runtime is pid 1 of a container.
func TestRuntimeInAContainer(t *testing.T) {
	each(t, func(t *testing.T, p *person) {
		dir := p.workspace(t)
		server := p.container(t, dir, dir, image)
		host, inside := p.host(t, dir), p.in(t, server, dir)
		sibling := p.in(t, p.container(t, dir, "/elsewhere", idle...), "/elsewhere")
		host.uses(inside)
		sibling.uses(inside)
		host.ok("restart", "--keep-kernel")
		host.ok("exec", "x = 'kept'")

		f := sibling.serve()
		f.tool("init", map[string]any{})
		f.executes("x", "kept")
		id := f.submits("import asyncio; await asyncio.sleep(3600)")
		p.must(t, "podman", "kill", server)
		p.must(t, "podman", "wait", server)
		if a := f.tool("execute", map[string]any{"code": "x", "wait_ms": 30000}); !a.IsError {
			t.Errorf("a call to a runtime that was killed: %s", a.text())
		} else {
			t.Logf("a call to a runtime that was killed: %s", a.text())
		}
		if r := host.status(); r.Status != nil || r.Supervisor != nil {
			t.Errorf("status of a runtime that was killed: %+v", r)
		}
		p.must(t, "podman", "start", server)
		p.answers(t, host)
		if got := f.executes("'x' in globals()", "False"); !strings.Contains(got, "lost") {
			t.Errorf("nothing tells the client of the loss: %s", got)
		}
		if a := f.tool("poll", map[string]any{"exec_id": id, "wait_ms": 0}); !strings.Contains(a.text(), "lost") {
			t.Errorf("the cell of before: %s", a.text())
		}
		host.ok("stop", "--force")
		if out := p.must(t, "podman", "wait", server); last(out) != "0" {
			t.Errorf("the container ended with %s", out)
		}
	})
}

// answers waits until a runtime that was started elsewhere answers: starts are not
// announced to those who wait outside.
func (p *person) answers(t *testing.T, b *box) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		if b.status().Status != nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the runtime does not answer")
		}
	}
}

// A socket that was mounted as a file is that of a runtime which has gone.
func TestStaleSocketMount(t *testing.T) {
	p := someone(t, "rootless")
	dir := p.workspace(t)
	host := p.host(t, dir)
	t.Cleanup(func() { host.ok("stop", "--force") })
	host.ok("exec", "1")
	sockets, err := filepath.Glob(filepath.Join(p.run, "mypr", "*.*"))
	if err != nil {
		t.Fatal(err)
	}
	var mounts []string
	hash := strings.TrimSuffix(filepath.Base(host.status().Socket), ".sock")
	for _, s := range sockets {
		if strings.HasPrefix(filepath.Base(s), hash) {
			mounts = append(mounts, "-v", s+":"+s)
		}
	}
	name := fmt.Sprintf("c%d", containers.Add(1))
	p.images(t)
	t.Cleanup(func() { p.must(t, "podman", "rm", "--force", "--time", "0", name) })
	args := append([]string{"run", "--detach", "--name", name, "-e", "XDG_RUNTIME_DIR", "-v", dir + ":" + dir}, mounts...)
	p.must(t, "podman", append(args, idle...)...)
	client := p.in(t, name, dir)
	if got := client.ok("exec", "40 + 2"); got != "42" {
		t.Errorf("while the socket is the runtime's: %s", got)
	}
	host.ok("stop")
	host.ok("exec", "1")
	client.fails([]string{"-v " + p.run + "/mypr"}, "exec", "40 + 2")
}

// The same in sandboxes of bubblewrap: the runtime as pid 1 of one, clients outside and
// in another one.
func TestBubblewrap(t *testing.T) {
	each(t, func(t *testing.T, p *person) {
		dir := p.workspace(t)
		sandbox := func(inside string, args ...string) []string {
			return append([]string{"bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid", "--unshare-uts", "--tmpfs", "/srv", "--bind", dir, inside,
				"--bind", p.run + "/mypr", p.run + "/mypr"}, args...)
		}
		if out, err := p.runs("mkdir", "-p", "-m", "700", p.run+"/mypr"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		host := p.host(t, dir)
		other := &box{t, p, "another sandbox", sandbox("/srv", bin), "/srv"}
		start := func() (end func()) {
			argv := sandbox(dir, "--as-pid-1", "--die-with-parent", bin, "-C", dir, "supervise")
			cmd := p.command(context.Background(), argv[0], argv[1:]...)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := false
			end = func() {
				if ended {
					return
				}
				ended = true
				// The child of bwrap's, of which nobody else tells.
				children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid))
				if pid, perr := strconv.Atoi(strings.TrimSpace(string(children))); perr == nil && pid > 1 {
					_ = syscall.Kill(pid, syscall.SIGKILL)
					if !ends(pid, patience) {
						t.Errorf("process %d does not end", pid)
					}
				} else if err == nil && len(children) > 0 {
					t.Errorf("bwrap has the children %q", children)
				}
				_ = cmd.Wait()
			}
			t.Cleanup(end)
			p.answers(t, host)
			return end
		}
		end := start()
		if r := host.status(); r.Supervisor.PID != 1 || !r.PIDsForeign {
			t.Errorf("seen from outside: %+v", r)
		}
		other.uses(other)
		host.uses(other)
		f := other.serve()
		f.tool("init", map[string]any{})
		f.executes("x = 1", "")
		end()
		if a := f.tool("execute", map[string]any{"code": "x", "wait_ms": 30000}); !a.IsError || !strings.Contains(a.text(), "no runtime runs") {
			t.Errorf("a call to a runtime that was killed: %s", a.text())
		}
		start()
		f.executes("'x' in globals()", "False")
		f.end()
		other.ok("stop")
		if r := host.status(); r.Status != nil || r.Supervisor != nil {
			t.Errorf("after stop: %+v", r)
		}
	})
}
