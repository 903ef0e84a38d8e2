package supervisor_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

func (e *env) startFiles(u *spec.Unit, give map[string]*os.File) (control.TransientResult, map[string]*os.File) {
	e.t.Helper()
	p := control.TransientParams{Unit: u}
	var send []*os.File
	for n, f := range give {
		p.FDNames, send = append(p.FDNames, n), append(send, f)
	}
	r, files, err := e.c.StartTransient(e.ctx, p, send...)
	e.must(err)
	if r.Result != "done" {
		e.t.Fatalf("%+v", r)
	}
	for _, f := range files {
		e.t.Cleanup(func() { f.Close() })
		_ = f.SetDeadline(time.Now().Add(deadline))
	}
	return r, files
}

func TestPipes(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("cat.service", "cat; echo to stderr >&2; exit 4")
		s := u.Service
		s.StandardInput, s.StandardOutput, s.StandardError = spec.StdioPipe, spec.StdioPipe, spec.StdioPipe
		r, f := e.startFiles(u, nil)
		if len(f) != 3 || strings.Join(r.Unit.FDNames, " ") != "stderr stdin stdout" {
			t.Fatalf("got %v, %q", f, r.Unit.FDNames)
		}
		out := bufio.NewReader(f["stdout"])
		fmt.Fprintln(f["stdin"], "one")
		if l, err := out.ReadString('\n'); l != "one\n" {
			t.Fatalf("%q %v", l, err)
		}
		// A second client attaches, the first goes: nothing changes for the unit.
		_, g, err := e.c.Attach(e.ctx, u.Name)
		e.must(err)
		f["stdin"].Close()
		fmt.Fprintln(g["stdin"], "two")
		if l, err := out.ReadString('\n'); l != "two\n" {
			t.Fatalf("%q %v", l, err)
		}
		// End of file needs the kept duplicate gone as well.
		g["stdin"].Close()
		g["stderr"].Close()
		g["stdout"].Close()
		e.must(e.c.Release(e.ctx, u.Name, "stdin"))
		b, err := io.ReadAll(f["stderr"])
		if string(b) != "to stderr\n" || err != nil {
			t.Errorf("stderr: %q %v", b, err)
		}
		st := e.wait(u.Name, r.Unit.InvocationID)
		if st.ExitCode != 4 {
			t.Errorf("%+v", st)
		}
		// Ended, but kept until it is released.
		if _, g, err = e.c.Attach(e.ctx, u.Name); err != nil || len(g) != 2 {
			t.Errorf("attach after the end: %v %v", g, err)
		}
		for _, f := range g {
			f.Close()
		}
		e.must(e.c.Release(e.ctx, u.Name))
		if _, _, err := e.c.Attach(e.ctx, u.Name); rpc.CodeOf(err) != rpc.CodeNotFound {
			t.Errorf("attach after release: %v", err)
		}
		if st, err := e.c.Wait(e.ctx, control.WaitParams{Name: u.Name, InvocationID: r.Unit.InvocationID}); err != nil || st.ExitCode != 4 {
			t.Errorf("wait after release: %+v %v", st, err)
		}
	})
}

// With one unset StandardError both streams come in one pipe, in order.
func TestMergedOutput(t *testing.T) {
	e := start(t, 2)
	out, _ := e.output(shell("m.service", "echo a; echo b >&2; echo c"), nil)
	if out != "a\nb\nc\n" {
		t.Errorf("%q", out)
	}
}

func TestPTY(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		u := shell("pty.service", `trap 'stty size; exit 0' WINCH; tty; stty size; ps -o tty= -p $$; read x; `+fmt.Sprintf(waits, `echo "read $x"`))
		u.Service.StandardInput, u.Service.TTYRows, u.Service.TTYColumns = spec.StdioPTY, 30, 90
		r, f := e.startFiles(u, nil)
		in := bufio.NewReader(f["pty"])
		line := func() string {
			l, err := in.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			return strings.TrimSpace(l)
		}
		tty, size, ctty := line(), line(), line()
		if !strings.HasPrefix(tty, "/dev/pts/") || "/dev/"+ctty != tty || size != "30 90" {
			t.Errorf("tty %q, size %q, controlling %q", tty, size, ctty)
		}
		fmt.Fprintf(f["pty"], "hello\n")
		if l := line(); l != "hello" { // the terminal's echo
			t.Errorf("echo %q", l)
		}
		if l := line(); l != "read hello" {
			t.Errorf("%q", l)
		}
		e.must(e.c.ResizeTTY(e.ctx, control.ResizeParams{Name: u.Name, Rows: 50, Cols: 120}))
		if l := line(); l != "50 120" {
			t.Errorf("after resize %q", l)
		}
		e.wait(u.Name, r.Unit.InvocationID)
		e.must(e.c.Release(e.ctx, u.Name))
	})
}

func TestGivenDescriptors(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		in, err := os.CreateTemp(e.dir, "in")
		e.must(err)
		defer in.Close()
		_, _ = in.WriteString("from a file\n")
		_, _ = in.Seek(0, 0)
		r, w, err := os.Pipe()
		e.must(err)
		defer r.Close()
		extra, err := os.CreateTemp(e.dir, "extra")
		e.must(err)
		defer extra.Close()
		u := shell("g.service", `cat; test "$LISTEN_PID" = $$ && echo "$LISTEN_FDS $LISTEN_FDNAMES"; echo into extra >&3`)
		u.Service.StandardInput, u.Service.StandardOutput = "fd:in", "fd:out"
		e.startFiles(u, map[string]*os.File{"in": in, "out": w, "extra": extra})
		w.Close()
		_ = r.SetDeadline(time.Now().Add(deadline))
		b, err := io.ReadAll(r) // ends: neither we nor the supervisor hold the other end
		if want := "from a file\n1 extra\n"; string(b) != want || err != nil {
			t.Errorf("%q %v", b, err)
		}
		b, _ = os.ReadFile(extra.Name())
		if string(b) != "into extra\n" {
			t.Errorf("extra holds %q", b)
		}
	})
}

func TestTransientRefusals(t *testing.T) {
	e := start(t, 2)
	f, err := os.Open("/dev/null")
	e.must(err)
	defer f.Close()
	long := shell("long.service", "exec sleep 1000")
	e.transient(long)
	for what, p := range map[string]control.TransientParams{
		"runs already": {Unit: long},
		"no suffix":    {Unit: shell("x", "true")},
		"path in name": {Unit: shell("../x.service", "true")},
		"no command":   {Unit: &spec.Unit{Name: "x.service", Service: &spec.Service{}}},
		"no service":   {Unit: &spec.Unit{Name: "x.service"}},
		"bad type": {Unit: func() *spec.Unit {
			u := shell("x.service", "true")
			u.Service.Type = "forking"
			return u
		}()},
		"fd missing": {Unit: func() *spec.Unit {
			u := shell("x.service", "true")
			u.Service.StandardInput = "fd:nope"
			return u
		}()},
		"half a pty": {Unit: func() *spec.Unit {
			u := shell("x.service", "true")
			u.Service.StandardOutput = "pty"
			return u
		}()},
	} {
		if _, _, err := e.c.StartTransient(e.ctx, p); err == nil || rpc.CodeOf(err) == rpc.CodeInternal {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, _, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: shell("x.service", "true"), FDNames: []string{"a:b"}}, f); rpc.CodeOf(err) != rpc.CodeInvalidRequest {
		t.Errorf("bad descriptor name: %v", err)
	}
}

func TestCollectMode(t *testing.T) {
	e := start(t, 2)
	loaded := func(name string) bool {
		list, err := e.c.List(e.ctx, true)
		e.must(err)
		for _, u := range list {
			if u.Name == name {
				return true
			}
		}
		return false
	}
	for _, c := range []struct {
		mode, script string
		stays        bool
	}{{"", "exit 0", false}, {"", "exit 1", true}, {"inactive-or-failed", "exit 1", false}} {
		u := shell("c.service", c.script)
		u.CollectMode = c.mode
		r := e.transient(u)
		e.wait(u.Name, r.Unit.InvocationID)
		if loaded(u.Name) != c.stays {
			t.Errorf("CollectMode=%s after %q: loaded %v", c.mode, c.script, !c.stays)
		}
	}
	u := shell("c.service", "exit 1")
	e.wait(u.Name, e.transient(u).Unit.InvocationID)
	e.must(e.c.ResetFailed(e.ctx, "c.service"))
	if loaded("c.service") {
		t.Error("reset-failed kept a transient unit")
	}
}

// One round trip for a command whose streams are the client's own.
func TestStartAndWait(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		out, err := os.Create(e.dir + "/out")
		e.must(err)
		defer out.Close()
		u := shell("w.service", "echo done; exit 3")
		u.Service.StandardOutput, u.CollectMode = "fd:out", "inactive-or-failed"
		r, _, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: u, Wait: true, FDNames: []string{"out"}}, out)
		e.must(err)
		b, _ := os.ReadFile(out.Name())
		if r.Result != "done" || r.Unit.ActiveState != "failed" || r.Unit.ExitCode != 3 || string(b) != "done\n" {
			t.Errorf("%+v, output %q", r, b)
		}
		u = &spec.Unit{Name: "w.service", Service: &spec.Service{Type: spec.TypeExec, ExecStart: []spec.Command{cmd("/no/such")}}}
		if r, _, err = e.c.StartTransient(e.ctx, control.TransientParams{Unit: u, Wait: true}); err != nil || r.Result != "failed" {
			t.Errorf("%+v %v", r, err)
		}
		u = shell("p.service", "true")
		u.Service.StandardOutput = spec.StdioPipe
		if _, _, err = e.c.StartTransient(e.ctx, control.TransientParams{Unit: u, Wait: true}); rpc.CodeOf(err) != rpc.CodeInvalidRequest {
			t.Errorf("with a pipe: %v", err)
		}
	})
}

// A client that makes its pipes itself has the supervisor keep its ends, and is told that
// a unit runs only when it is not over soon.
func TestKeepAndWaitAWhile(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		run := func(name, command string, ms int) (control.TransientResult, *os.File) {
			r, w, err := os.Pipe()
			e.must(err)
			t.Cleanup(func() { r.Close() })
			u := shell(name, command)
			u.Service.StandardOutput = "fd:out"
			res, files, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: u, Wait: true, WaitMS: ms, FDNames: []string{"out", "stdout"}, Keep: []string{"stdout"}}, w, r)
			w.Close()
			e.must(err)
			if len(files) > 0 {
				t.Errorf("%s: what it gave came back: %v", name, files)
			}
			return res, r
		}
		res, mine := run("soon.service", "echo soon; exit 3", 60_000)
		if res.Result != "done" || res.Unit.ActiveState != control.Failed || res.Unit.ExitCode != 3 {
			t.Errorf("it was over soon: %+v", res)
		}
		if b, err := io.ReadAll(mine); err != nil || string(b) != "soon\n" {
			t.Errorf("%q %v", b, err)
		}
		res, mine = run("long.service", "echo here; sleep 1000", 1)
		if res.Result != "done" || res.Unit.ActiveState != control.Active || res.Unit.MainPID == 0 {
			t.Errorf("it runs: %+v", res)
		}
		b := make([]byte, 5)
		if _, err := io.ReadFull(mine, b); err != nil || string(b) != "here\n" {
			t.Errorf("%q %v", b, err)
		}
		// Whoever comes later is given the same.
		_, files, err := e.c.Attach(e.ctx, "long.service")
		e.must(err)
		if len(files) != 1 || files["stdout"] == nil {
			t.Fatalf("attached: %v", files)
		}
		_, err = e.c.Stop(e.ctx, control.JobParams{Name: "long.service"})
		e.must(err)
		if rest, err := io.ReadAll(files["stdout"]); err != nil || len(rest) > 0 {
			t.Errorf("%q %v", rest, err)
		}
		files["stdout"].Close()
		e.must(e.c.ReleaseUnits(e.ctx, "soon.service", "long.service", "no-such.service"))
		units, err := e.c.List(e.ctx, false)
		e.must(err)
		if len(units) > 0 {
			t.Errorf("left: %+v", units)
		}
		for name, p := range map[string]control.TransientParams{
			"kept and not passed":  {Keep: []string{"x"}},
			"patience without":     {WaitMS: 5},
			"no time at all":       {Wait: true, WaitMS: -1},
			"a stream that's kept": {Keep: []string{"out"}, FDNames: []string{"out"}},
		} {
			p.Unit = shell("bad.service", "true")
			var files []*os.File
			if len(p.FDNames) > 0 {
				p.Unit.Service.StandardOutput = "fd:out"
				files = []*os.File{mine}
			}
			if _, _, err := e.c.StartTransient(e.ctx, p, files...); rpc.CodeOf(err) != rpc.CodeInvalidRequest {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// A transient definition stands in for a unit file until it is released.
func TestTransientInPlaceOfFile(t *testing.T) {
	file := &spec.Unit{Name: "k.service", Description: "from the file", Service: &spec.Service{}}
	e := start(t, 2, file)
	if _, err := e.c.Start(e.ctx, control.JobParams{Name: "k.service"}); rpc.CodeOf(err) != rpc.CodeInvalidRequest {
		t.Errorf("start without ExecStart=: %v", err)
	}
	u := shell("k.service", "exec sleep 1000")
	u.Description, u.Source = "filled in", []string{"/etc/k.service"}
	e.transient(u)
	if d, err := e.c.Show(e.ctx, "k.service"); err != nil || d.Spec == nil || !slices.Equal(d.Spec.Source, u.Source) {
		t.Errorf("the files it was read from: %+v, %v", d.Spec, err)
	}
	if st := e.status("k.service"); st.Description != "filled in" || st.SubState != "running" {
		t.Errorf("%+v", st)
	}
	_, err := e.c.Stop(e.ctx, control.JobParams{Name: "k.service"})
	e.must(err)
	if st := e.status("k.service"); st.Description != "from the file" || st.Transient {
		t.Errorf("after its end: %+v", st)
	}
}

// memfd is a file in memory.
func memfd(t *testing.T, text string) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "test")
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestEnvironmentFD(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		e := start(t, tier)
		unit := func() *spec.Unit {
			u := shell("fd.service", `for v in A B INVOCATION_ID; do eval "printf '%s=%s;' $v \"\$$v\""; done | sed 's/INVOCATION_ID=[0-9a-f]*/id/'; env | wc -l`)
			u.CollectMode = "inactive-or-failed"
			u.Service.ExactEnvironment, u.Service.EnvironmentFD = true, "env"
			return u
		}
		large := strings.Repeat("x", 100<<10)
		for _, c := range []struct{ text, more, want string }{
			{"A=1\x00B=\xff\xfe", "", "A=1;B=\xff\xfe;id;"},
			{"A=1\x00B=\xff\xfe", "", "A=1;B=\xff\xfe;id;"},
			{"A=1\x00B=2", "A=0", "A=1;B=2;id;"},
			{"A=1\x00A=2\x00INVOCATION_ID=mine", "B=3", "A=2;B=3;id;"},
			{"", "", "A=;B=;id;"},
			{"A=" + large, "", "A=" + large + ";B=;id;"},
		} {
			u := unit()
			if c.more != "" {
				u.Service.Environment = []string{c.more}
			}
			if out, st := e.output(u, map[string]*os.File{"env": memfd(t, c.text)}); !strings.HasPrefix(out, c.want) {
				t.Errorf("%.80q: %.200q %+v", c.text, out, st)
			}
		}
		// So do arguments and directories come as the bytes that they are.
		dir := filepath.Join(e.dir, "caf\xe9")
		e.must(os.Mkdir(dir, 0o700))
		u := &spec.Unit{Name: "bytes.service", Service: &spec.Service{Type: spec.TypeExec, WorkingDirectory: dir,
			ExecStart: []spec.Command{cmd("/bin/sh", "-c", `printf %s "$0"; basename "$(/bin/pwd)"`, "\xff")}}}
		u.Service.ExecStart[0].NoExpand = true
		u.KeepRaw()
		if out, st := e.output(u, nil); out != "\xffcaf\xe9\n" {
			t.Errorf("arguments: %q %+v", out, st)
		}
		for _, bad := range []string{"A=1\x00B", "=x", "\x00", strings.Repeat("A=1\x00", 3<<20)} {
			u := unit()
			u.Service.StandardOutput = spec.StdioNull
			r, _, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: u, FDNames: []string{"env"}}, memfd(t, bad))
			if err != nil || r.Result != "failed" || !strings.Contains(r.Unit.Error, "environment_fd: ") {
				t.Errorf("%.20q: %+v %v", bad, r, err)
			}
		}
		r, w, err := os.Pipe()
		e.must(err)
		defer r.Close()
		defer w.Close()
		u = unit()
		u.Service.StandardOutput = spec.StdioNull
		if r, _, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: u, FDNames: []string{"env"}}, r); err != nil || !strings.Contains(r.Unit.Error, "environment_fd: pread") {
			t.Errorf("a pipe: %+v %v", r, err)
		}
		for name, change := range map[string]func(*spec.Service){
			"no descriptor":   func(sv *spec.Service) { sv.EnvironmentFD = "other" },
			"it is restarted": func(sv *spec.Service) { sv.Restart = spec.RestartAlways },
			"two commands":    func(sv *spec.Service) { sv.ExecStopPost = sv.ExecStart },
		} {
			u := unit()
			change(u.Service)
			if _, _, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: u, FDNames: []string{"env"}}, memfd(t, "A=1")); rpc.CodeOf(err) != rpc.CodeInvalidRequest {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}
