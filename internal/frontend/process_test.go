package frontend

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"mypr/internal/api"
	"mypr/internal/client"
	"mypr/internal/client/clienttest"
)

// childRole is what the test binary does when it is executed as another program.
func childRole(role string) int {
	switch role {
	case "nohup": // a front end that was started to ignore some signals
		signal.Ignore(syscall.SIGINT, syscall.SIGHUP)
		return childRole("serve")
	case "serve": // a front end
		in, _ := os.Readlink("/proc/self/fd/0")
		out, _ := os.Readlink("/proc/self/fd/1")
		c := client.New(client.Options{Kind: "frontend", Ensure: func(context.Context) (string, error) {
			return os.Getenv("MYPR_TEST_SOCKET"), childStreams(in, out)
		}})
		if err := Run(context.Background(), Options{In: os.Stdin, Out: os.Stdout, Client: c, Version: "1.0.0"}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	case "parent": // starts a front end with its own streams, and waits
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "MYPR_TEST_ROLE=serve")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		if err := cmd.Run(); err != nil {
			return 1
		}
		return 0
	case "list": // says what it was born with
		entries, _ := os.ReadDir("/proc/self/fd")
		for _, e := range entries {
			if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
				fmt.Println(e.Name(), to)
			}
		}
		return 0
	}
	return 2
}

// childStreams misuses the standard streams in every way that a library or a child
// could, and reports what is wrong with them. in and out are the protocol's pipes.
func childStreams(in, out string) error {
	fmt.Println("noise on stdout")
	if n, err := os.Stdin.Read(make([]byte, 100)); n != 0 || err != io.EOF {
		return fmt.Errorf("fd 0 gave %d bytes, %v", n, err)
	}
	for _, fd := range []string{"0 /dev/null", "1 " + os.Getenv("MYPR_TEST_STDERR")} {
		n, want, _ := strings.Cut(fd, " ")
		if got, _ := os.Readlink("/proc/self/fd/" + n); got != want {
			return fmt.Errorf("fd %s is %s, not %s", n, got, want)
		}
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "MYPR_TEST_ROLE=list")
	cmd.Stdin = os.Stdin
	list, err := cmd.Output()
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(list)) {
		if _, to, _ := strings.Cut(strings.TrimSpace(line), " "); to == in || to == out {
			return fmt.Errorf("a child was born with a stream of the protocol: %s", line)
		}
	}
	return nil
}

// process is a front end in a process of its own.
type process struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	lines  chan string // closed at the end of its output
	stderr *bytes.Buffer
}

func start(t *testing.T, r *clienttest.Runtime, role string) *process {
	t.Helper()
	p := &process{cmd: exec.Command("/proc/self/exe"), lines: make(chan string, 100), stderr: &bytes.Buffer{}}
	errFile, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	defer errFile.Close()
	// The race detector would sleep for a second at each exit.
	p.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", "MYPR_TEST_ROLE="+role, "MYPR_TEST_SOCKET="+r.Socket, "MYPR_TEST_STDERR="+errFile.Name())
	p.cmd.Stderr = errFile
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, outW, err := os.Pipe() // not StdoutPipe: it is read after Wait
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout = outW
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	outW.Close()
	go func() {
		defer close(p.lines)
		defer out.Close()
		s := bufio.NewScanner(out)
		s.Buffer(nil, 1<<20)
		for s.Scan() {
			p.lines <- s.Text()
		}
	}()
	t.Cleanup(func() {
		p.in.Close()
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		for range p.lines {
		}
		if t.Failed() {
			b, _ := os.ReadFile(errFile.Name())
			t.Logf("stderr: %s", b)
		}
	})
	return p
}

func (p *process) send(t *testing.T, line string) {
	t.Helper()
	if _, err := io.WriteString(p.in, line+"\n"); err != nil {
		t.Fatal(err)
	}
}

func (p *process) next(t *testing.T) string {
	t.Helper()
	select {
	case l := <-p.lines:
		return l
	case <-time.After(60 * time.Second):
		t.Fatal("nothing came")
		return ""
	}
}

// ends waits for the end of the output: every process that had it is gone. Much less
// than what waits would take.
func (p *process) ends(t *testing.T) {
	t.Helper()
	begun := time.Now()
	timeout := time.After(60 * time.Second)
	for {
		select {
		case _, ok := <-p.lines:
			if ok {
				continue
			}
		case <-timeout:
		}
		break
	}
	if spent := time.Since(begun); spent > 20*time.Second {
		t.Errorf("the end took %s", spent)
	}
}

const (
	sayInit  = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"init"}}`
	saySleep = `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"execute","arguments":{"code":"x","wait_ms":25000}}}`
)

// fd 0 and 1 belong to the protocol: nothing else in the process, and no child, can
// read the one or write the other.
func TestStreamsArePrivate(t *testing.T) {
	p := start(t, clienttest.New(t), "serve")
	p.send(t, sayInit)
	if got := p.next(t); !strings.Contains(got, `"client_id=calm-otter-1 `) {
		t.Errorf("%s", got)
	}
}

// However it is told to end, it ends, whatever waits.
func TestEnds(t *testing.T) {
	for name, end := range map[string]func(*process) error{
		"SIGTERM":      func(p *process) error { return p.cmd.Process.Signal(syscall.SIGTERM) },
		"SIGINT":       func(p *process) error { return p.cmd.Process.Signal(syscall.SIGINT) },
		"SIGHUP":       func(p *process) error { return p.cmd.Process.Signal(syscall.SIGHUP) },
		"end of input": func(p *process) error { return p.in.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			r := clienttest.New(t)
			r.Play(func(*clienttest.Cell) {})
			p := start(t, r, "serve")
			p.send(t, sayInit)
			p.next(t)
			p.send(t, saySleep)
			r.Await(api.MethodExecute)
			if err := end(p); err != nil {
				t.Fatal(err)
			}
			p.ends(t)
			if err := p.cmd.Wait(); err != nil {
				t.Errorf("exit: %v", err)
			}
		})
	}
}

// What it was started to ignore does not end it.
func TestIgnoredSignals(t *testing.T) {
	p := start(t, clienttest.New(t), "nohup")
	p.send(t, sayInit)
	p.next(t)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(status), "SigIgn:\t")
	line, _, _ = strings.Cut(line, "\n")
	ignored, err := strconv.ParseUint(line, 16, 64)
	if want := uint64(1)<<(syscall.SIGINT-1) | 1<<(syscall.SIGHUP-1); err != nil || ignored&want != want {
		t.Errorf("it ignores %q, %v", line, err)
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.ends(t)
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("exit: %v", err)
	}
}

// A host that is killed, while another process keeps the pipes open.
func TestParentDies(t *testing.T) {
	r := clienttest.New(t)
	r.Play(func(*clienttest.Cell) {})
	p := start(t, r, "parent")
	p.send(t, sayInit)
	p.next(t)
	p.send(t, saySleep)
	r.Await(api.MethodExecute)
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	p.ends(t)
}

// Signals that end it also find it when the manager hangs and the client does not read.
func TestEndsWhenAllHangs(t *testing.T) {
	r := clienttest.New(t)
	p := start(t, r, "serve")
	p.send(t, sayInit)
	p.next(t)
	r.Kill() // the socket listens, nobody accepts
	p.send(t, saySleep)
	p.send(t, `{"jsonrpc":"2.0","id":3,"method":"ping"}`)
	p.next(t) // so saySleep has been read
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.ends(t)
}

// Every front end pays for the initialisation of what it imports, before it can
// answer; a bare Go program takes about 1.2 ms in all. What counts here is allocations,
// which do not depend on what else the machine does: package server of mcp-go alone
// makes 21,000 in 2.7 ms, all that is imported now makes 700 in 0.8 ms.
func TestInitialisationCost(t *testing.T) {
	program := filepath.Join(t.TempDir(), "inittree")
	build := exec.Command("go", "build", "-trimpath", "-o", program, "./testdata/inittree")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.Command(program)
	cmd.Env = []string{"GODEBUG=inittrace=1"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	sum := 0
	for _, m := range regexp.MustCompile(`(?m)^init .*, (\d+) allocs$`).FindAllStringSubmatch(string(out), -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	if sum == 0 || sum > 2000 {
		t.Errorf("initialisation makes %d allocations:\n%s", sum, out)
	}
	t.Logf("%d allocations", sum)
}
