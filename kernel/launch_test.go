package kernel

import (
	"bytes"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"mypr/kernel/wire"
)

// The launch starts a kernel that dials in, runs a cell and ends when told to, whatever
// modules of the user's lie in the workspace.
func TestLaunchedKernelRunsACell(t *testing.T) {
	w := newWorkspace(t, true)
	w.Config.Plain = true
	l := w.prepare(t)
	for _, name := range []string{"select.py", "json.py", "mypr_kernel.py", "asyncio.py"} {
		writeFile(t, filepath.Join(w.Workspace, name), "raise SystemExit('shadowed')\n")
	}
	socket := filepath.Join(t.TempDir(), "k")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	_ = listener.SetDeadline(time.Now().Add(2 * time.Minute))
	cmd := exec.CommandContext(t.Context(), l.Path)
	cmd.Args, cmd.Dir = l.Args, l.Dir
	cmd.Env = append(l.Env, "MYPR_KERNEL_SOCKET="+socket, "MYPR_WORKSPACE="+w.Workspace, "MYPR_ROOT="+w.Root, "INVOCATION_ID="+strings.Repeat("0", 32))
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	start := time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the kernel ended with %v\n%s", err, log.String())
		}
	}()
	conn, err := listener.Accept()
	if err != nil {
		t.Fatalf("the kernel does not dial in: %v\n%s", err, log.String())
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(2 * time.Minute))
	var line []byte
	for _, msg := range []any{
		wire.Welcome{Type: wire.TypeWelcome, Protocol: wire.Protocol, Workspace: w.Workspace, Artifacts: filepath.Join(w.Root, "artifacts"),
			Limits: wire.Limits{OutputBytes: 1 << 20, EventChars: 16384, CompletedTasks: 128}},
		wire.Execute{Type: wire.TypeExecute, ExecID: strings.Repeat("a", 32), Code: "import sys; (6 * 7, sys.prefix, __name__)"},
	} {
		if line, err = wire.Encode(line, msg); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := conn.Write(line); err != nil {
		t.Fatal(err)
	}
	r := wire.NewReader(conn)
	var m wire.FromKernel
	var text string
	for !(m.Type == wire.TypeEvent && m.Event == wire.EventState && m.State != "running") {
		if err := r.Next(&m); err != nil {
			t.Fatalf("%v\n%s", err, log.String())
		}
		if m.Type == wire.TypeHello && m.Python != l.Python {
			t.Errorf("the kernel is Python %s, the launch said %s", m.Python, l.Python)
		}
		text += m.Text
	}
	t.Logf("first result after %v", time.Since(start))
	if want := "(42, '" + filepath.Join(w.Root, "venv") + "', '__main__')"; m.State != "succeeded" || strings.TrimSpace(text) != want {
		t.Errorf("the cell %s: %q, want %q, %s", m.State, text, want, m.Error)
	}
	ack, err := wire.Encode(nil, wire.Ack{Type: wire.TypeAck, Seq: m.Seq})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(ack); err != nil {
		t.Fatal(err)
	}
}
