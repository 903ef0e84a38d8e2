package supervisor_test

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"mypr/supervisor"
	"mypr/supervisor/cgroup"
	"mypr/supervisor/control"
	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

// roleVariable makes the test binary a child role instead of a test run.
const roleVariable = "MYPR_TEST_ROLE"

func TestMain(m *testing.M) {
	process.HelperMain()
	if r := os.Getenv(roleVariable); r != "" {
		f, ok := roles[r]
		if !ok {
			fmt.Fprintln(os.Stderr, "no role", r)
			os.Exit(99)
		}
		f(os.Args[1:])
		os.Exit(0)
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		if pids, err := process.Descendants(os.Getpid()); err != nil || len(pids) > 0 {
			for _, pid := range pids {
				fmt.Fprintln(os.Stderr, "process left:", process.Describe(pid))
			}
			code = 1
		}
		if z := process.PeekZombie(); z != 0 {
			fmt.Fprintln(os.Stderr, "zombie left:", z)
			code = 1
		}
	}
	os.Exit(code)
}

// deadline of everything that a test waits for, and of the test itself: shorter than the
// 90 s of a default stop or start timeout. MYPR_TEST_SLOW multiplies it, for machines
// like User-Mode Linux.
var deadline = 60 * time.Second * slow()

func slow() time.Duration {
	if n, err := strconv.Atoi(os.Getenv("MYPR_TEST_SLOW")); err == nil && n > 0 {
		return time.Duration(n)
	}
	return 1
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	t.Cleanup(cancel)
	return ctx
}

// env is a supervisor in this process with a client.
type env struct {
	t       testing.TB
	ctx     context.Context
	dir     string
	mu      sync.Mutex // guards units
	units   map[string]*spec.Unit
	opt     supervisor.Options
	c       *control.Client
	stopped chan error
	cancel  context.CancelFunc
}

// tiers runs a test in each tier that the machine has.
func tiers(t *testing.T, f func(t *testing.T, tier int)) {
	list := []int{2, 3}
	if hasControllers() {
		list = []int{1, 2, 3}
	}
	for _, tier := range list {
		t.Run("tier"+strconv.Itoa(tier), func(t *testing.T) { f(t, tier) })
	}
}

// hasControllers: groups below our own can have limits (tier 1).
func hasControllers() bool {
	own, err := cgroup.Own()
	if err != nil {
		return false
	}
	b, _ := os.ReadFile(filepath.Join(own, "cgroup.subtree_control"))
	have := strings.Fields(string(b))
	return slices.Contains(have, "memory") && slices.Contains(have, "pids")
}

func options(t testing.TB, tier int, units ...*spec.Unit) (*env, supervisor.Options) {
	dir, err := os.MkdirTemp("", "sv")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	e := &env{t: t, ctx: testContext(t), dir: dir, units: map[string]*spec.Unit{}}
	for _, u := range units {
		e.units[u.Name] = u
	}
	opt := supervisor.Options{
		Load: func(name string) (*spec.Unit, []string, error) {
			e.mu.Lock()
			defer e.mu.Unlock()
			if u := e.units[name]; u != nil {
				return u, nil, nil
			}
			return nil, nil, fs.ErrNotExist
		},
		Names: func() ([]string, error) {
			e.mu.Lock()
			defer e.mu.Unlock()
			return slices.Sorted(maps.Keys(e.units)), nil
		},
		ControlPath: filepath.Join(dir, "ctl"), NotifyPath: filepath.Join(dir, "ntf"), StatePath: filepath.Join(dir, "state"),
		CgroupName: "mypr-test-" + filepath.Base(dir), Version: "test", ForceTier: tier,
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	return e, opt
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", b)
	return len(b), nil
}

// start runs a supervisor and checks at the end that it left nothing.
func start(t testing.TB, tier int, units ...*spec.Unit) *env {
	t.Helper()
	e, opt := options(t, tier, units...)
	e.run(opt)
	return e
}

func (e *env) run(opt supervisor.Options) {
	t := e.t
	t.Helper()
	fds := openFDs()
	ready := make(chan error, 1)
	opt.Ready = func(err error) { ready <- err }
	s, err := supervisor.New(opt)
	if err != nil {
		t.Fatal(err)
	}
	e.opt = opt
	ctx, cancel := context.WithCancel(context.Background())
	e.cancel = cancel
	e.stopped = make(chan error, 1)
	go func() { e.stopped <- s.Run(ctx) }()
	select {
	case err := <-ready:
		if err != nil {
			t.Logf("ready: %v", err)
		}
	case <-e.ctx.Done():
		t.Fatal("not ready in time")
	}
	e.c = e.dial()
	t.Cleanup(func() {
		e.c.Close()
		e.stop()
		for fd, what := range openFDs() {
			if fds[fd] == "" {
				n, _ := strconv.Atoi(fd)
				name, _ := syscall.Getsockname(n)
				peer, _ := syscall.Getpeername(n)
				t.Errorf("descriptor %s is left open: %s %+v %+v", fd, what, name, peer)
			}
		}
		if own, err := cgroup.Own(); err == nil {
			if _, err := os.Stat(filepath.Join(own, opt.CgroupName)); err == nil {
				t.Errorf("cgroup %s is left", opt.CgroupName)
			}
		}
	})
}

func (e *env) dial() *control.Client {
	e.t.Helper()
	c, err := control.Dial(e.ctx, e.opt.ControlPath)
	if err != nil {
		e.t.Fatal(err)
	}
	return c
}

func (e *env) stop() {
	e.cancel()
	select {
	case err := <-e.stopped:
		if err != nil {
			e.t.Errorf("Run: %v", err)
		}
		e.stopped <- nil
	case <-time.After(deadline):
		// It still reaps the children of this process: no later test could be trusted.
		panic("the supervisor did not end")
	}
}

// define puts unit files in place.
func (e *env) define(units ...*spec.Unit) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, u := range units {
		e.units[u.Name] = u
	}
}

func openFDs() map[string]string {
	fds := map[string]string{}
	d, err := os.Open("/proc/self/fd")
	if err != nil {
		return fds
	}
	defer d.Close()
	self := strconv.Itoa(process.FD(d))
	names, _ := d.Readdirnames(-1)
	for _, n := range names {
		// Two stay open for good.
		if link, err := os.Readlink("/proc/self/fd/" + n); err == nil && n != self && link != os.DevNull && !strings.HasSuffix(link, "/oom_score_adj") {
			fds[n] = link
		}
	}
	return fds
}

// role is a service that runs a role of the test binary.
func role(name, r string, args ...string) *spec.Unit {
	return &spec.Unit{Name: name, Service: &spec.Service{
		Type:        spec.TypeExec,
		ExecStart:   []spec.Command{{Path: "/proc/self/exe", Args: append([]string{r}, args...)}},
		Environment: []string{roleVariable + "=" + r},
	}}
}

func shell(name, script string) *spec.Unit {
	return &spec.Unit{Name: name, Service: &spec.Service{
		Type:      spec.TypeExec,
		ExecStart: []spec.Command{{Path: "/bin/sh", Args: []string{"sh", "-c", script}, NoExpand: true}},
	}}
}

func (e *env) must(err error) {
	e.t.Helper()
	if err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) transient(u *spec.Unit) control.TransientResult {
	e.t.Helper()
	r, files, err := e.c.StartTransient(e.ctx, control.TransientParams{Unit: u})
	e.must(err)
	for _, f := range files {
		f.Close()
	}
	return r
}

func (e *env) status(name string) control.UnitStatus {
	e.t.Helper()
	d, err := e.c.Show(e.ctx, name)
	e.must(err)
	return d.UnitStatus
}
