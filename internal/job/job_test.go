package job

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	switch os.Getenv("JOB_TEST_ROLE") {
	case "talk":
		os.Stdout.WriteString("out")
		os.Stderr.WriteString("err")
		os.Exit(3)
	case "flood":
		for {
			if _, err := os.Stdout.WriteString(strings.Repeat("x", 4096)); err != nil {
				os.Exit(0)
			}
		}
	case "hang":
		os.Stdout.WriteString("up")
		_ = unix.Pause()
	}
	goleak.VerifyTestMain(m)
}

func role(name string) Command {
	return Command{Name: "test", Argv: []string{"/proc/self/exe"}, Dir: "/", Env: []string{"JOB_TEST_ROLE=" + name}}
}

func TestCollect(t *testing.T) {
	var out bytes.Buffer
	exit, stderr, err := Collect(t.Context(), Exec{}, role("talk"), &out)
	if err != nil || exit.Code != 3 || exit.Signal != 0 || out.String() != "out" || stderr != "err" {
		t.Fatalf("%+v %q %q %v", exit, out.String(), stderr, err)
	}
}

type refuse struct{ after int }

var errFull = errors.New("full")

func (r *refuse) Write(p []byte) (int, error) {
	if r.after -= len(p); r.after < 0 {
		return 0, errFull
	}
	return len(p), nil
}

func TestCollectKillsWhenSinkIsFull(t *testing.T) {
	exit, _, err := Collect(t.Context(), Exec{}, role("flood"), &refuse{100_000})
	if !errors.Is(err, errFull) || exit.Signal != syscall.SIGKILL {
		t.Fatalf("%+v %v", exit, err)
	}
}

type signalFirst struct{ f func() }

func (s signalFirst) Write(p []byte) (int, error) { s.f(); return len(p), nil }

func TestCollectKillsWhenCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	exit, _, err := Collect(ctx, Exec{}, role("hang"), signalFirst{cancel})
	if !errors.Is(err, context.Canceled) || exit.Signal != syscall.SIGKILL {
		t.Fatalf("%+v %v", exit, err)
	}
}

func TestCollectCannotStart(t *testing.T) {
	_, _, err := Collect(t.Context(), Exec{}, Command{Argv: []string{"/nonexistent/program"}}, io.Discard)
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "program") {
		t.Fatal(err)
	}
}

func TestLook(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/tool", nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/data", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	env := []string{"PATH=/nowhere", "PATH=.:/nonexistent:" + dir}
	if got := Look(env, "tool"); got != dir+"/tool" {
		t.Errorf("tool: %q", got)
	}
	if got := Look(env, "data"); got != "" {
		t.Errorf("a file that cannot be executed was found: %q", got)
	}
}
