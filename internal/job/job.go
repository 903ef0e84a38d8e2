// Package job says what the services need of whatever runs external programs for
// them, and has a plain implementation.
//
// It owns the Runner interface and Collect, the one loop that reads a program's
// output within limits. It does not know the supervisor: the manager implements
// Runner with transient units, each in a cgroup of its own, so that Kill leaves
// nothing behind. Exec, with os/exec and a process group, is for tests and for
// programs without a supervisor.
package job

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Command is one program to run. Standard input is /dev/null.
type Command struct {
	// Name says what it is for, in lists of jobs: "search", "git".
	Name string
	// Argv[0] is the absolute path of the program.
	Argv []string
	// Dir is the absolute working directory.
	Dir string
	// Env is the whole environment.
	Env []string
}

// Exit is how a program ended: by a code, or by a signal when Signal is not 0.
type Exit struct {
	Code   int
	Signal syscall.Signal
}

// Runner starts programs.
type Runner interface {
	// Start returns once the program runs. The end of ctx afterwards does not touch
	// the program: Kill does.
	Start(ctx context.Context, c Command) (Process, error)
}

// Process is a program that was started. Its owner reads Stdout and Stderr to their
// end, then calls Wait once, which releases everything.
type Process interface {
	Stdout() *os.File
	Stderr() *os.File
	// Kill ends the program and all that it started. It may be called at any time.
	Kill()
	// Wait returns when nothing of the program is left, and closes the pipes.
	Wait() (Exit, error)
}

// Exec runs programs as children of this process.
type Exec struct{}

type child struct {
	cmd            *exec.Cmd
	stdout, stderr *os.File

	mu     sync.Mutex // guards reaped
	reaped bool       // its pid may be somebody else's
}

// Start implements Runner.
func (Exec) Start(_ context.Context, c Command) (Process, error) {
	outR, outW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		outR.Close()
		outW.Close()
		return nil, err
	}
	cmd := &exec.Cmd{Path: c.Argv[0], Args: c.Argv, Dir: c.Dir, Env: c.Env, Stdout: outW, Stderr: errW,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true}}
	err = cmd.Start()
	outW.Close()
	errW.Close()
	if err != nil {
		outR.Close()
		errR.Close()
		return nil, err
	}
	return &child{cmd: cmd, stdout: outR, stderr: errR}, nil
}

func (p *child) Stdout() *os.File { return p.stdout }
func (p *child) Stderr() *os.File { return p.stderr }

func (p *child) Kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	}
}

func (p *child) Wait() (Exit, error) {
	// Wait without reaping first, so that Kill never signals a process group that
	// took over the number.
	for {
		err := unix.Waitid(unix.P_PID, p.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			break
		}
	}
	p.mu.Lock()
	p.reaped = true
	p.mu.Unlock()
	err := p.cmd.Wait()
	p.stdout.Close()
	p.stderr.Close()
	var ee *exec.ExitError
	if err != nil && !errors.As(err, &ee) {
		return Exit{}, err
	}
	ws := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if ws.Signaled() {
		return Exit{Code: -1, Signal: ws.Signal()}, nil
	}
	return Exit{Code: ws.ExitStatus()}, nil
}

// StderrMax is how much of a program's standard error Collect keeps.
const StderrMax = 64 << 10

// Collect starts a program and gives its standard output to sink as it comes. When
// sink returns an error, or ctx ends, the program is killed; the first of both is
// returned beside what is known of the end. Whatever happens, nothing of the program
// runs any more when Collect returns.
func Collect(ctx context.Context, r Runner, c Command, sink io.Writer) (Exit, string, error) {
	p, err := r.Start(ctx, c)
	if err != nil {
		return Exit{}, "", fmt.Errorf("cannot start %s: %w", filepath.Base(c.Argv[0]), err)
	}
	stop := context.AfterFunc(ctx, p.Kill)
	stderr := make(chan string, 1)
	go func() {
		var b strings.Builder
		_, _ = io.Copy(&b, io.LimitReader(p.Stderr(), StderrMax))
		_, _ = io.Copy(io.Discard, p.Stderr())
		stderr <- b.String()
	}()
	buf := make([]byte, 64<<10)
	var failed error
	for {
		n, err := p.Stdout().Read(buf)
		if n > 0 && failed == nil {
			if _, failed = sink.Write(buf[:n]); failed != nil {
				p.Kill()
			}
		}
		if err != nil {
			if err != io.EOF && failed == nil {
				failed = err
			}
			break
		}
	}
	text := <-stderr
	exit, err := p.Wait()
	stop()
	switch {
	case failed != nil:
		err = failed
	case ctx.Err() != nil && exit.Signal != 0:
		err = context.Cause(ctx)
	}
	return exit, text, err
}

// Look finds a program in the PATH of env, as a shell would; "" when there is none.
func Look(env []string, name string) string {
	for _, dir := range filepath.SplitList(Getenv(env, "PATH")) {
		if !filepath.IsAbs(dir) {
			continue // relative entries would mean whatever directory the job runs in
		}
		p := filepath.Join(dir, name)
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return p
		}
	}
	return ""
}

// Getenv is the last value of a name in an environment list.
func Getenv(env []string, name string) string {
	for i := len(env) - 1; i >= 0; i-- {
		if v, ok := strings.CutPrefix(env[i], name+"="); ok {
			return v
		}
	}
	return ""
}
