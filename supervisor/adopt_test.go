package supervisor_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/rpc"
	"mypr/supervisor"
	"mypr/supervisor/cgroup"
	"mypr/supervisor/control"
	"mypr/supervisor/process"
	"mypr/supervisor/spec"
)

// ignoreVariable makes a supervisor in a process of its own begin as nohup would start it.
const ignoreVariable = "TEST_IGNORE_SIGNALS"

// config of a supervisor in a process of its own.
type config struct {
	Dir, Name, Version string
	Tier               int
	Units              []*spec.Unit
}

func init() {
	roles["supervisor"] = func([]string) {
		signal.Ignore(syscall.SIGXFSZ) // TestStateFileOnAFullDisk
		if os.Getenv(ignoreVariable) != "" && !supervisor.TakesOver() {
			signal.Ignore(syscall.SIGHUP, syscall.SIGINT)
		}
		var c config
		b, err := os.ReadFile(os.Getenv("TEST_CONFIG"))
		must(false, err)
		must(false, json.Unmarshal(b, &c))
		units := map[string]*spec.Unit{}
		names := []string{}
		for _, u := range c.Units {
			units[u.Name] = u
			names = append(names, u.Name)
		}
		s, err := supervisor.New(supervisor.Options{
			Load: func(name string) (*spec.Unit, []string, error) {
				if u := units[name]; u != nil {
					return u, nil, nil
				}
				return nil, nil, os.ErrNotExist
			},
			Names:       func() ([]string, error) { return names, nil },
			ControlPath: c.Dir + "/ctl", NotifyPath: c.Dir + "/ntf", StatePath: c.Dir + "/state",
			CgroupName: c.Name, ForceTier: c.Tier, Version: c.Version,
			Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})),
			Ready:  func(err error) { fmt.Println("ready", err) },
		})
		must(false, err)
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		must(false, s.Run(ctx))
	}
}

// outer is a supervisor in another process, which can be killed.
type outer struct {
	*env
	conf   config
	cmd    *exec.Cmd
	pid    atomic.Int64 // of cmd
	exited chan struct{}
	pipe   *os.File // its standard output
	out    *bufio.Reader
}

// reapOrphans makes this process a good parent for what a killed supervisor leaves to
// it, as the machine's init is. It returns what ends that.
func reapOrphans(t *testing.T, mine func(pid int) bool) func() {
	t.Helper()
	if err := process.BecomeSubreaper(); err != nil {
		t.Fatal(err)
	}
	ch, quit := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(ch, syscall.SIGCHLD)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-ch:
				for pid := process.PeekZombie(); pid != 0 && !mine(pid); pid = process.PeekZombie() {
					process.Reap(pid)
				}
			case <-quit:
				return
			}
		}
	})
	return func() {
		signal.Stop(ch)
		close(quit)
		wg.Wait()
	}
}

func startOuter(t *testing.T, tier int, reap bool, units ...*spec.Unit) *outer {
	t.Helper()
	e, opt := options(t, tier)
	e.opt = opt
	o := &outer{env: e, conf: config{Dir: e.dir, Name: opt.CgroupName, Version: "one", Tier: tier, Units: units}}
	if reap {
		// First registered, last run: everything that must be reaped is gone by then.
		t.Cleanup(reapOrphans(t, func(pid int) bool { return int64(pid) == o.pid.Load() }))
	}
	o.launch()
	t.Cleanup(func() {
		o.c.Close()
		o.env.must(o.cmd.Process.Signal(syscall.SIGTERM))
		<-o.exited
		if own, err := cgroup.Own(); err == nil {
			if _, err := os.Stat(filepath.Join(own, opt.CgroupName)); err == nil {
				t.Errorf("cgroup %s is left", opt.CgroupName)
			}
		}
		if left, _ := filepath.Glob(e.dir + "/state*"); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
		b, _ := os.ReadFile(e.dir + "/log.txt")
		t.Logf("%s", b)
	})
	return o
}

func (o *outer) writeConfig() string {
	b, err := json.Marshal(o.conf)
	o.must(err)
	path := o.dir + "/config"
	o.must(os.WriteFile(path, b, 0o600))
	return path
}

func (o *outer) launch() {
	o.t.Helper()
	r, w, err := os.Pipe()
	o.must(err)
	o.cmd = exec.Command("/proc/self/exe")
	o.cmd.Args = []string{"supervisor"}
	o.cmd.Env = append(os.Environ(), roleVariable+"=supervisor", "TEST_CONFIG="+o.writeConfig())
	// A file, not a pipe: the units inherit it, and exec.Cmd would wait for all of them.
	logFile, err := os.OpenFile(o.dir+"/log.txt", os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	o.must(err)
	o.cmd.Stdout, o.cmd.Stderr = w, logFile
	o.must(o.cmd.Start())
	o.pid.Store(int64(o.cmd.Process.Pid))
	logFile.Close()
	w.Close()
	o.exited = make(chan struct{})
	go func() {
		_ = o.cmd.Wait()
		close(o.exited)
	}()
	o.pipe, o.out = r, bufio.NewReader(r)
	o.t.Cleanup(func() { r.Close() })
	o.ready()
	o.c = o.dial()
}

func (o *outer) ready() {
	o.t.Helper()
	_ = o.pipe.SetReadDeadline(time.Now().Add(deadline))
	l, err := o.out.ReadString('\n')
	if err != nil || !strings.HasPrefix(l, "ready") {
		o.t.Fatalf("the supervisor says %q, %v", l, err)
	}
}

// kill ends the supervisor with SIGKILL.
func (o *outer) kill() {
	o.t.Helper()
	o.c.Close()
	o.must(o.cmd.Process.Kill())
	<-o.exited
}

func TestAdoption(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		svc := role("n.service", "notify")
		svc.Service.Type, svc.WantedBy = spec.TypeNotify, []string{"default.target"}
		o := startOuter(t, tier, true, svc)
		before := o.untilState("n.service", "running")
		job := shell("j.service", "trap 'exit 7' USR1; "+fmt.Sprintf(waits, "echo $$"))
		out, _ := o.startLines(job)
		out.next()
		info, err := o.c.Info(o.ctx)
		o.must(err)
		jb := o.status("j.service")
		o.kill()
		if !alive(before.MainPID) || !alive(jb.MainPID) {
			t.Fatal("the units died with the supervisor")
		}
		o.launch()
		after := o.untilState("n.service", "running")
		if after.MainPID != before.MainPID || after.InvocationID != before.InvocationID || !after.Adopted || after.StatusText != "up" {
			t.Errorf("adopted as %+v, was %+v", after, before)
		}
		if now, err := o.c.Info(o.ctx); err != nil || now.Instance != info.Instance || now.PID == info.PID {
			t.Errorf("%+v %v", now, err)
		}
		ja := o.status("j.service")
		if ja.MainPID != jb.MainPID || !ja.Transient || ja.SubState != "running" {
			t.Errorf("the job: %+v", ja)
		}
		// It is watched on, and its exit status is known although it is no child of ours.
		o.must(syscall.Kill(ja.MainPID, syscall.SIGUSR1))
		st := o.wait("j.service", ja.InvocationID)
		if !st.ExitKnown || st.ExitCode != 7 || st.Result != "exit-code" {
			t.Errorf("the job's end: %+v", st)
		}
		r, err := o.c.Stop(o.ctx, control.JobParams{Name: "n.service"})
		o.must(err)
		if !gone(before.MainPID) || r.Unit.Result != "success" {
			t.Errorf("%+v", r)
		}
		o.must(o.c.ResetFailed(o.ctx, "j.service"))
	})
}

// A disk that takes nothing must not cost what the state file says already, and it is
// written again when the disk takes it.
func TestStateFileOnAFullDisk(t *testing.T) {
	svc := role("n.service", "notify")
	svc.Service.Type, svc.WantedBy = spec.TypeNotify, []string{"default.target"}
	o := startOuter(t, 2, true, svc)
	before := o.untilState("n.service", "running")
	limit := func(size uint64) {
		o.must(unix.Prlimit(o.cmd.Process.Pid, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: size, Max: unix.RLIM_INFINITY}, nil))
	}
	run := func(name string) {
		r, files, err := o.c.StartTransient(o.ctx, control.TransientParams{Unit: shell(name, "exit 0")})
		o.must(err)
		for _, f := range files {
			f.Close()
		}
		o.wait(name, r.Unit.InvocationID)
	}
	adopted := func() {
		t.Helper()
		o.kill()
		o.launch()
		if now := o.untilState("n.service", "running"); now.MainPID != before.MainPID || !now.Adopted {
			t.Errorf("it was process %d, and is %d (adopted: %v)", before.MainPID, now.MainPID, now.Adopted)
		}
	}
	limit(0) // as a full disk: nothing can be appended, nor written anew
	run("a.service")
	adopted()
	limit(0)
	run("b.service")
	limit(unix.RLIM_INFINITY)
	long := shell("c.service", "echo $$; exec sleep 1000")
	out, _ := o.startLines(long)
	out.next()
	c := o.status("c.service")
	adopted()
	if now := o.status("c.service"); now.MainPID != c.MainPID || !now.Adopted {
		t.Errorf("what was started when the disk had room again: %+v", now)
	}
	_, err := o.c.Stop(o.ctx, control.JobParams{Name: "c.service"})
	o.must(err)
}

// What ended while no supervisor was there is noticed; how, is told only if it is known.
func TestEndedWhileAway(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) { endedWhileAway(t, tier, true) })
	t.Run("before its pid was written down", func(t *testing.T) { endedWhileAway(t, 3, false) })
}

func endedWhileAway(t *testing.T, tier int, written bool) {
	o := startOuter(t, tier, true)
	fifo := o.dir + "/fifo"
	o.must(syscall.Mkfifo(fifo, 0o600))
	u := shell("e.service", "echo $$; read x <"+fifo+"; exit 5")
	out, r := o.startLines(u)
	pid, _ := strconv.Atoi(out.next())
	p, err := process.Adopt(pid, 0)
	o.must(err)
	defer p.Close()
	start, err := process.StartTime(pid)
	o.must(err)
	o.kill()
	if !written {
		b, err := os.ReadFile(o.dir + "/state")
		o.must(err)
		changed := strings.ReplaceAll(string(b), fmt.Sprintf(`"main":{"pid":%d,"start":%d}`, pid, start), `"main":{"pid":0,"start":0}`)
		if changed == string(b) {
			t.Fatal("the state file does not hold what the test changes")
		}
		o.must(os.WriteFile(o.dir+"/state", []byte(changed), 0o600))
	}
	f, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	o.must(err)
	_, _ = f.WriteString("go\n")
	f.Close()
	for !gone(pid) && o.ctx.Err() == nil {
		waitReadable(t, p.PIDFD())
	}
	if tier == 3 { // the shim ends too, when it has written down what it knows
		for o.ctx.Err() == nil {
			if left, _ := filepath.Glob(o.dir + "/state-*.exit"); len(left) > 0 {
				break
			}
		}
	}
	o.launch()
	st := o.wait("e.service", r.Unit.InvocationID)
	if tier == 3 && (!st.ExitKnown || st.ExitCode != 5) {
		t.Errorf("the shim knew: %+v", st)
	}
	if tier == 2 && (st.ExitKnown || st.Result != "unknown" || st.ActiveState != "failed") {
		t.Errorf("nobody knew: %+v", st)
	}
	o.must(o.c.Release(o.ctx, "e.service"))
}

// A unit that is up without a process still has its commands to come when the supervisor
// was away meanwhile.
func TestExitedWhileAway(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		o := startOuter(t, tier, true)
		trace := o.dir + "/trace"
		writes := func(word string) []spec.Command {
			c := cmd("/bin/sh", "-c", "echo "+word+" >>"+trace)
			c.NoExpand = true
			return []spec.Command{c}
		}
		for _, name := range []string{"x.service", "y.service", "z.service"} {
			u := &spec.Unit{Name: name, Service: &spec.Service{Type: spec.TypeOneshot, RemainAfterExit: true, ExecStart: writes("start")}}
			switch name {
			case "x.service":
				u.Service.ExecStop, u.Service.ExecStopPost = writes("stop"), writes("post")
			case "y.service":
				u.Service.ExecStopPost = writes("post")
			}
			if r := o.transient(u); r.Result != "done" {
				t.Fatalf("%+v", r)
			}
		}
		o.kill()
		if tier == 3 { // the shims end too
			for o.ctx.Err() == nil {
				if left, _ := filepath.Glob(o.dir + "/state-*.exit"); len(left) == 3 {
					break
				}
			}
		}
		o.launch()
		for _, name := range []string{"x.service", "y.service", "z.service"} {
			if r, err := o.c.Stop(o.ctx, control.JobParams{Name: name}); err != nil || r.Result != "done" {
				t.Errorf("stop %s: %+v %v", name, r, err)
			}
		}
		if b, err := os.ReadFile(trace); string(b) != "start\nstart\nstart\nstop\npost\npost\n" {
			t.Errorf("%q, %v", b, err)
		}
	})
}

func waitReadable(t *testing.T, fd int) {
	t.Helper()
	dup, err := syscall.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	_ = syscall.SetNonblock(dup, true)
	f := os.NewFile(uintptr(dup), "pidfd")
	defer f.Close()
	_ = f.SetReadDeadline(time.Now().Add(deadline))
	raw, err := f.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	first := true
	_ = raw.Read(func(uintptr) bool { done := !first; first = false; return done })
}

// A parent that never reaps must not hold up the end of an adopted unit.
func TestAdoptedByABadParent(t *testing.T) {
	o := startOuter(t, 2, false)
	u := shell("z.service", "echo $$; exec sleep 1000")
	out, r := o.startLines(u)
	pid, _ := strconv.Atoi(out.next())
	o.must(process.BecomeSubreaper()) // this process, which does not reap
	defer process.Reap(pid)
	o.kill()
	o.launch()
	o.must(syscall.Kill(pid, syscall.SIGKILL))
	// A zombie that nobody reaped still tells how it ended.
	if st := o.wait("z.service", r.Unit.InvocationID); !st.ExitKnown || st.ExitSignal != int(syscall.SIGKILL) {
		t.Errorf("%+v", st)
	}
	o.must(o.c.Release(o.ctx, "z.service"))
}

func TestEscapistsOfAnAdoptedUnit(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		o := startOuter(t, tier, true)
		u := shell("esc.service", fmt.Sprintf(escapists, "exec sleep 1000"))
		u.Service.TimeoutStopSec = 50 * time.Millisecond
		pids := o.startEscapists(u)
		o.kill()
		o.launch()
		r, err := o.c.Stop(o.ctx, control.JobParams{Name: u.Name})
		o.must(err)
		for _, pid := range pids {
			if !gone(pid) {
				t.Errorf("pid %d survived %+v", pid, r)
			}
		}
	})
}

// The supervisor is killed while a unit is being stopped: the next one goes on with it.
func TestKilledWhileStopping(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		o := startOuter(t, tier, true)
		u := shell("s.service", `trap "" TERM; echo $$; while :; do sleep 1000; done`)
		u.Service.TimeoutStopSec = time.Second
		out, r := o.startLines(u)
		pid, _ := strconv.Atoi(out.next())
		_, events, err := o.c.Subscribe(o.ctx, u.Name)
		o.must(err)
		_, err = o.c.Stop(o.ctx, control.JobParams{Name: u.Name, NoWait: true})
		o.must(err)
		for ev := range events {
			if ev.SubState == "stop-sigterm" {
				break
			}
		}
		o.kill()
		o.launch()
		st := o.wait(u.Name, r.Unit.InvocationID)
		if !gone(pid) || st.ActiveState != "failed" && st.ActiveState != "inactive" {
			t.Errorf("%+v", st)
		}
		o.must(o.c.Release(o.ctx, u.Name))
	})
}

// Sockets come back: from the service that still has them, or bound again.
func TestSocketsAfterAKill(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		running, idle := socketUnit("running.socket", ""), socketUnit("idle.socket", "")
		o := func() *outer {
			svc := role("running.service", "serve")
			svc.Service.Type, svc.WantedBy = spec.TypeNotify, []string{"default.target"}
			dir, err := os.MkdirTemp("", "so")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			running.Socket.ListenStream = []string{dir + "/running"}
			idle.Socket.ListenStream = []string{dir + "/idle"}
			return startOuter(t, tier, true, svc, role("idle.service", "serve"), running, idle)
		}()
		path := running.Socket.ListenStream[0]
		first, _ := o.ask("unix", path)
		o.kill()
		if same, _ := o.ask("unix", path); same != first {
			t.Error("not served while the supervisor was away")
		}
		o.launch()
		for _, s := range []string{"running.socket", "idle.socket"} {
			if st := o.status(s); st.ActiveState != "active" {
				t.Errorf("%+v", st)
			}
		}
		// A restart of the service keeps the socket: the supervisor has it again.
		c, err := net.Dial("unix", path)
		o.must(err)
		defer c.Close()
		_, err = o.c.Restart(o.ctx, control.JobParams{Name: "running.service"})
		o.must(err)
		if second, _ := o.ask("unix", path); second == first {
			t.Error("the same process after a restart")
		}
		if pid, _ := o.ask("unix", idle.Socket.ListenStream[0]); pid == "" {
			t.Error("no answer on the socket that was bound again")
		}
	})
}

func TestSecondSupervisorIsRefused(t *testing.T) {
	o := startOuter(t, 2, true)
	opt := o.opt
	s, err := supervisor.New(opt)
	o.must(err)
	if err := s.Run(o.ctx); rpc.CodeOf(err) != rpc.CodeConflict || !strings.Contains(err.Error(), strconv.Itoa(o.cmd.Process.Pid)) {
		t.Errorf("%v", err)
	}
	if _, err := o.c.Info(o.ctx); err != nil {
		t.Errorf("the first one was harmed: %v", err)
	}
}

// A container that is started again gets the numbers of the one before: those of its
// processes and that of its pid namespace. Only when its first process began differs.
func TestStateOfAnotherContainer(t *testing.T) {
	o := startOuter(t, 2, true)
	b, err := os.ReadFile(o.opt.StatePath)
	o.must(err)
	first, err := process.StartTime(1)
	o.must(err)
	for _, there := range []uint64{first, first + 1} {
		e, opt := options(t, 2)
		text := strings.Replace(string(b), fmt.Sprintf(`"init":%d`, first), fmt.Sprintf(`"init":%d`, there), 1)
		if !strings.Contains(text, fmt.Sprintf(`"init":%d`, there)) {
			t.Fatalf("the state file does not say when the first process began: %.300s", text)
		}
		e.must(os.WriteFile(opt.StatePath, []byte(text), 0o600))
		if there != first {
			e.run(opt)
			continue
		}
		s, err := supervisor.New(opt)
		e.must(err)
		if err := s.Run(e.ctx); rpc.CodeOf(err) != rpc.CodeConflict {
			t.Errorf("beside the supervisor that wrote the state: %v", err)
		}
	}
}

// A group in our tree with processes that no unit knows is not touched.
func TestStrangersAreLeftAlone(t *testing.T) {
	o := startOuter(t, 2, true)
	info, err := o.c.Info(o.ctx)
	o.must(err)
	o.kill()
	dir := filepath.Join(info.Cgroup, "stranger")
	o.must(os.Mkdir(dir, 0o755))
	f, err := os.Open(dir)
	o.must(err)
	c := exec.Command("sleep", "1000")
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	o.must(c.Start())
	f.Close()
	o.launch()
	if !alive(c.Process.Pid) {
		t.Error("a stranger was killed")
	}
	o.must(c.Process.Kill())
	_ = c.Wait()
	o.must(os.Remove(dir))
}

func TestRecycledPIDIsNotAdopted(t *testing.T) {
	o := startOuter(t, 2, true)
	u := shell("r.service", "echo $$; exec sleep 1000")
	out, r := o.startLines(u)
	pid, _ := strconv.Atoi(out.next())
	o.kill()
	// The recorded start time no longer agrees: as if the pid were another process's.
	b, err := os.ReadFile(o.dir + "/state")
	o.must(err)
	st, err := process.StartTime(pid)
	o.must(err)
	changed := strings.ReplaceAll(string(b), fmt.Sprintf(`"pid":%d,"start":%d`, pid, st), fmt.Sprintf(`"pid":%d,"start":%d`, pid, st-1))
	if changed == string(b) {
		t.Fatal("the state file does not hold what the test changes")
	}
	o.must(os.WriteFile(o.dir+"/state", []byte(changed), 0o600))
	o.launch()
	// Its group is ours by its name, so the unit ends with everything in it.
	end := o.wait("r.service", r.Unit.InvocationID)
	if end.Result != "unknown" || !gone(pid) {
		t.Errorf("%+v", end)
	}
	o.must(o.c.Release(o.ctx, "r.service"))
}

func TestDamagedStateFile(t *testing.T) {
	for _, content := range []string{"", "nonsense\n", `{"version":99}` + "\n", `{"version":1}` + "\nnonsense\n"} {
		e, opt := options(t, 2)
		e.must(os.WriteFile(opt.StatePath, []byte(content), 0o600))
		e.run(opt)
		if r := e.transient(shell("ok.service", "exit 0")); r.Result != "done" {
			t.Errorf("%q: %+v", content, r)
		}
		e.c.Close()
		e.stop()
	}
}

func TestReexec(t *testing.T) {
	tiers(t, func(t *testing.T, tier int) {
		svc := role("n.service", "stater")
		svc.Service.Type, svc.Service.FileDescriptorStoreMax = spec.TypeNotify, 3
		svc.Service.Restart, svc.Service.RestartSec = spec.RestartAlways, time.Millisecond
		sock := socketUnit("a.socket", "")
		dir, err := os.MkdirTemp("", "so")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		sock.Socket.ListenStream = []string{dir + "/a"}
		o := startOuter(t, tier, true, role("a.service", "serve"), sock)
		s := o.stater("n.service", func(sv *spec.Service) { *sv = *svc.Service; sv.StandardInput, sv.StandardOutput = "pipe", "pipe" })
		s.say("store mem some content")
		exit := shell("x.service", "echo $$; read x; exit 6")
		exit.Service.StandardInput, exit.Service.StandardOutput = spec.StdioPipe, spec.StdioPipe
		xr, xf := o.startFiles(exit, nil)
		newLines(t, xf["stdout"]).next()
		info, err := o.c.Info(o.ctx)
		o.must(err)

		// A failing one first: everything goes on, and the caller is told.
		if err := o.c.Reexec(o.ctx, control.ReexecParams{Executable: "/no/such/file"}); rpc.CodeOf(err) == "" {
			t.Errorf("re-execution of nothing: %v", err)
		}
		notExecutable := dir + "/text"
		o.must(os.WriteFile(notExecutable, []byte("no program"), 0o755))
		if err := o.c.Reexec(o.ctx, control.ReexecParams{Executable: notExecutable}); rpc.CodeOf(err) == "" {
			t.Errorf("re-execution of a text: %v", err)
		}
		s.say("STATUS=still here")

		o.conf.Version = "two"
		o.writeConfig()
		exe, err := os.Executable()
		o.must(err)
		if err := o.c.Reexec(o.ctx, control.ReexecParams{Executable: exe}); err == nil || rpc.CodeOf(err) != "" {
			t.Fatalf("the answer to a good re-execution: %v", err)
		}
		o.c.Close()
		o.ready()
		o.c = o.dial()
		now, err := o.c.Info(o.ctx)
		o.must(err)
		if now.PID != info.PID || now.Version != "two" || now.Instance != info.Instance {
			t.Errorf("%+v", now)
		}
		st := s.say("STATUS=after")
		if st.StatusText != "after" || st.MainPID != s.st.MainPID || !contains(st.FDNames, "mem") || !contains(st.FDNames, "stdin") || st.Adopted {
			t.Errorf("%+v", st)
		}
		// The child is still ours: its exit status is known.
		_, _ = io.WriteString(xf["stdin"], "go\n")
		if st := o.wait("x.service", xr.Unit.InvocationID); !st.ExitKnown || st.ExitCode != 6 {
			t.Errorf("%+v", st)
		}
		o.must(o.c.Release(o.ctx, "x.service"))
		if pid, _ := o.ask("unix", sock.Socket.ListenStream[0]); pid == "" {
			t.Error("no answer on the socket")
		}
		o.must(syscall.Kill(st.MainPID, syscall.SIGKILL))
		if l := s.out.next(); l != "start: mem=some content" {
			t.Errorf("the next run got %q", l)
		}
	})
}

// A next supervisor with another tier still knows what the one before had started.
func TestTierChangesOverAdoption(t *testing.T) {
	for _, tiers := range [][2]int{{2, 3}, {3, 2}} {
		t.Run(fmt.Sprint(tiers), func(t *testing.T) {
			o := startOuter(t, tiers[0], true)
			u := shell("t.service", fmt.Sprintf(escapists, "exec sleep 1000"))
			u.Service.TimeoutStopSec = 50 * time.Millisecond
			pids := o.startEscapists(u)
			o.kill()
			o.conf.Tier = tiers[1]
			o.launch()
			if st := o.status(u.Name); st.SubState != "running" {
				t.Fatalf("%+v", st)
			}
			n := o.transient(shell("n.service", "exec sleep 1000"))
			if now := []string{2: "cgroup", 3: "shim"}[tiers[1]]; n.Unit.Containment != now {
				t.Errorf("a new unit: %+v", n.Unit)
			}
			_, err := o.c.Stop(o.ctx, control.JobParams{Name: u.Name})
			o.must(err)
			for _, pid := range pids {
				if !gone(pid) {
					t.Errorf("pid %d survived", pid)
				}
			}
		})
	}
}
