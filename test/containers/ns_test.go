package containers

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// These tests are about what the program itself makes of namespaces, filters and missing
// things, one at a time and without an engine.

// pid1 is a runtime that is the first process of a pid namespace.
type pid1 struct {
	t   *testing.T
	cmd *exec.Cmd // unshare
	log string
	pid int // of the supervisor, in the namespace of the tests
}

func (p *person) pid1(t *testing.T, dir string) *pid1 {
	t.Helper()
	log, err := os.CreateTemp("", "supervise-*.log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := p.command(t.Context(), "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", bin, "-C", dir, "supervise")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := &pid1{t: t, cmd: cmd, log: log.Name()}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
		if t.Failed() {
			b, _ := os.ReadFile(s.log)
			t.Logf("supervisor:\n%s", b)
		}
	})
	p.answers(t, p.host(t, dir))
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", cmd.Process.Pid, cmd.Process.Pid))
	if err == nil {
		s.pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// ends sends a signal, waits for the end and says how long it took.
func (s *pid1) ends(sig unix.Signal) time.Duration {
	s.t.Helper()
	began := time.Now()
	if err := unix.Kill(s.pid, sig); err != nil {
		s.t.Fatal(err)
	}
	_ = s.cmd.Wait()
	return time.Since(began)
}

// stateOf is how a cell ended.
func (f *front) stateOf(id string) string {
	f.b.t.Helper()
	a := f.tool("poll", map[string]any{"exec_id": id, "until_done": true, "wait_ms": 30000})
	var r struct{ State string }
	if err := json.Unmarshal(a.Meta["mypr/result"], &r); err != nil {
		f.b.t.Fatalf("%v: %s", err, a.text())
	}
	return r.State
}

// deaf is a cell that nothing but SIGKILL ends, with children of the same kind.
const deaf = escapee + `
for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
escape()
print("deaf", flush=True)
while True: signal.pause()
`

func TestFirstProcess(t *testing.T) {
	p := someone(t, "root")
	dir := p.workspace(t)
	host := p.host(t, dir)
	for name, sig := range map[string]unix.Signal{"SIGTERM": unix.SIGTERM, "SIGINT": unix.SIGINT, "SIGRTMIN+3": unix.Signal(37)} {
		s := p.pid1(t, dir)
		r := host.status()
		if r.Supervisor == nil || r.Supervisor.PID != 1 || r.Supervisor.Mode != "container" || !r.PIDsForeign || r.RunsIn == "" {
			t.Errorf("status: %+v, %+v", r.Supervisor, r)
		}
		f := host.serve()
		f.tool("init", map[string]any{})
		waits := f.submits("import asyncio; await asyncio.sleep(3600)")
		f.polls(f.submits(deaf), "deaf")
		took := s.ends(sig)
		t.Logf("%s: ended after %v", name, took.Round(time.Millisecond))
		if took > 20*time.Second { // 3 s and a busy machine
			t.Errorf("%s: the end took %v", name, took)
		}
		if state := s.cmd.ProcessState; state.ExitCode() != 0 {
			t.Errorf("%s: %v", name, state)
		}
		f.end()
		s = p.pid1(t, dir)
		g := host.serve()
		g.tool("init", map[string]any{})
		if state := g.stateOf(waits); state != "cancelled" {
			t.Errorf("%s: a cell that waited is %s", name, state)
		}
		g.end()
		s.ends(unix.SIGTERM)
	}

	// One that is killed: nobody else starts a runtime in the container's place before
	// its session is given up.
	s := p.pid1(t, dir)
	f := host.serve()
	f.tool("init", map[string]any{})
	id := f.submits("import asyncio\nprint('waits', flush=True)\nawait asyncio.sleep(3600)")
	f.polls(id, "waits")
	s.ends(unix.SIGKILL)
	host.fails([]string{"it is the session of", "mypr-mcp stop"}, "exec", "1")
	f.end()
	if out := host.ok("stop"); !strings.Contains(out, "given up") {
		t.Errorf("stop: %s", out)
	}
	t.Cleanup(func() { host.ok("stop", "--force") })
	f = host.serve()
	f.tool("init", map[string]any{})
	if state := f.stateOf(id); state != "lost" {
		t.Errorf("a cell of a runtime that was killed is %s", state)
	}
	f.executes("6 * 7", "42")
	f.end()
	if r := host.status(); r.Supervisor.Mode == "container" || r.PIDsForeign {
		t.Errorf("status: %+v", r.Supervisor)
	}
}

func TestFirstProcessReaps(t *testing.T) {
	p := someone(t, "root")
	dir := p.workspace(t)
	s := p.pid1(t, dir)
	out := p.must(t, "nsenter", "--pid", "--mount", "--target", strconv.Itoa(s.pid), "python3", "-c", zombies)
	if !strings.Contains(out, "1000 orphans of {'1'} not reaped: 0") {
		t.Errorf("reaping: %s", out)
	}
	if got := p.host(t, dir).ok("exec", "6 * 7"); got != "42" {
		t.Errorf("after reaping: %s", got)
	}
	s.ends(unix.SIGTERM)
}

// filter is a seccomp program that refuses system calls, each with an error.
func filter(t *testing.T, refuse map[int]unix.Errno) string {
	t.Helper()
	f := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}} // the call's number
	for nr, errno := range refuse {
		f = append(f, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(nr), Jf: 1},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0x00050000 | uint32(errno)}) // SECCOMP_RET_ERRNO
	}
	f = append(f, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0x7fff0000}) // SECCOMP_RET_ALLOW
	var b bytes.Buffer
	if err := binary.Write(&b, binary.NativeEndian, f); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(someone(t, "root").directory(t), "filter")
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// life is a whole session, in a place that ends with the script.
const life = `
export PATH=/usr/bin:/bin
m() { ` + "%s" + ` --json=false "$@"; }
test "$(m exec '6 * 7')" = 42
m --json status
pid=$(m exec "$ESCAPEE
escape()")
kill -0 $pid
m exec 'import asyncio; await asyncio.sleep(3600)' --timeout 100ms 2>/dev/null || test $? = 124
m reset --force >&2
! kill -0 $pid 2>/dev/null
m stop --force >&2
for p in /proc/[0-9]*; do
	case $(readlink $p/exe) in */mypr-mcp*|*/python*) echo "left: $p" >&2; exit 1;; esac
done
`

func TestPlaces(t *testing.T) {
	// What Docker's filter refused before 20.10: a Go program meets clone3 in
	// CLONE_INTO_CGROUP alone, the C library falls back only from ENOSYS.
	old := filter(t, map[int]unix.Errno{
		unix.SYS_CLONE3: unix.ENOSYS, unix.SYS_PIDFD_OPEN: unix.EPERM, unix.SYS_PIDFD_GETFD: unix.EPERM, unix.SYS_PIDFD_SEND_SIGNAL: unix.EPERM,
		unix.SYS_CLOSE_RANGE: unix.EPERM, unix.SYS_OPENAT2: unix.EPERM, unix.SYS_FACCESSAT2: unix.EPERM,
	})
	unshare := func(mounts string) string {
		return `exec unshare --mount --cgroup --pid --fork --kill-child --mount-proc --propagation private bash -ec '` + mounts + `; exec "$@"' bash "$@"`
	}
	// The place has all of this machine's files, unless it says otherwise.
	bwrap := func(args string) string {
		return `exec bwrap --unshare-pid --die-with-parent --bind / / --dev /dev --proc /proc ` + args + ` "$@"`
	}
	nothing := `--ro-bind / / --tmpfs /run --cap-drop ALL --unshare-user --unsetenv HOME --unsetenv USER --unsetenv TMPDIR --unsetenv XDG_RUNTIME_DIR --bind "$DIR" /srv `
	for _, place := range []struct {
		name, who, script string
		dir               string // of the workspace in there; "": the same
		tier              int
		reason            string
	}{
		{"cgroup namespace of its own", "root", unshare("umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup"), "", 2, "no memory, pids, cpu controller in /sys/fs/cgroup/mypr-"},
		{"cgroups read-only", "root", unshare("umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; mount -o remount,ro,bind /sys/fs/cgroup"), "", 3, "read-only file system"},
		{"no cgroups", "root", unshare("while umount -R /sys/fs/cgroup 2>/dev/null; do :; done"), "", 3, "no cgroup v2 hierarchy is mounted"},
		{"neither clone3 nor pidfd calls", "rootless", "exec 9<'" + old + "'; " + bwrap("--seccomp 9"), "", 3, "clone into a cgroup: function not implemented"},
		{"root of a user namespace", "rootless", `exec unshare --user --map-root-user --pid --fork --kill-child --mount-proc "$@"`, "", 2, ""},
		{"a user without a name, nothing writable", "root", `exec setpriv --reuid 4242 --regid 4242 --clear-groups --no-new-privs bwrap --unshare-pid --die-with-parent ` +
			nothing + `--dev /dev --proc /proc --tmpfs /tmp "$@"`, "/srv", 3, "read-only file system"},
	} {
		t.Run(place.name, func(t *testing.T) {
			t.Parallel() // most of it is the time that an escapee has
			p := someone(t, place.who)
			dir := p.workspace(t)
			in := dir
			if place.dir != "" {
				in = place.dir
				if out, err := exec.Command("chown", "-R", "4242:4242", dir).CombinedOutput(); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
			}
			script := fmt.Sprintf(life, "'"+bin+"' -C '"+in+"'")
			c := p.command(t.Context(), "bash", "-c", place.script, "bash", "bash", "-ec", script)
			c.Env = append(c.Env, "DIR="+dir, "ESCAPEE="+escapee)
			var out, errs bytes.Buffer
			c.Stdout, c.Stderr, c.WaitDelay = &out, &errs, patience
			if err := c.Run(); err != nil {
				log, _ := os.ReadFile(filepath.Join(dir, ".mypr", "supervisor.log"))
				t.Fatalf("%v\n%s\n%s\n%s", err, out.String(), errs.String(), log)
			}
			var r struct {
				Supervisor struct {
					Tier       int
					TierReason string `json:"tier_reason"`
				}
			}
			if err := json.Unmarshal(out.Bytes(), &r); err != nil || r.Supervisor.Tier != place.tier || !strings.Contains(r.Supervisor.TierReason, place.reason) {
				t.Errorf("status: %v, %+v", err, r)
			}
		})
	}
}

// Where sockets can be nowhere, the first command says so.
func TestNoPlaceForSockets(t *testing.T) {
	p := someone(t, "root")
	dir := p.workspace(t)
	b := &box{t, p, "bwrap", []string{"bwrap", "--unshare-pid", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--bind", dir, "/srv", "--unsetenv", "XDG_RUNTIME_DIR", "--tmpfs", "/run", "--remount-ro", "/run", bin}, "/srv"}
	b.fails([]string{"/tmp/mypr-0", "read-only file system", "XDG_RUNTIME_DIR"}, "exec", "1")
}

// One directory has one session, by whatever path and from whatever namespace.
func TestOneDirectory(t *testing.T) {
	p := someone(t, "root")
	dir := p.workspace(t)
	host := p.host(t, dir)
	t.Cleanup(func() { host.ok("stop", "--force") })
	host.ok("exec", "x = 'of the host'")
	link := filepath.Join(filepath.Dir(dir), "link "+filepath.Base(dir))
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	sandbox := []string{"bwrap", "--unshare-pid", "--unshare-user", "--unshare-uts", "--hostname", "sandbox", "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--bind", dir, "/srv", bin}
	for _, b := range []*box{p.host(t, link), {t, p, "bwrap", sandbox, "/srv"}} {
		if got := b.ok("exec", "x"); got != "'of the host'" {
			t.Errorf("%s: %s", b.name, got)
		}
	}
	inside := &box{t, p, "bwrap", sandbox, "/srv"}
	if out := inside.ok("status"); !strings.Contains(out, "where the workspace is "+dir) || !strings.Contains(out, "not of this one") {
		t.Errorf("status in the sandbox:\n%s", out)
	}
	inside.ok("restart", "--keep-kernel")
	if got := host.ok("exec", "x"); got != "'of the host'" {
		t.Errorf("after a restart in the sandbox: %s", got)
	}

	// The socket's directory is not shared: the lock says that there is a runtime.
	hidden := []string{"bwrap", "--unshare-pid", "--unshare-user", "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--bind", dir, "/srv", bin}
	blind := &box{t, p, "bwrap", hidden, "/srv"}
	share := fmt.Sprintf("-v %s/mypr:%s/mypr", p.run, p.run)
	blind.fails([]string{"is alive but cannot be reached", "supervisor.lock is held by", "mypr-mcp supervise", share}, "exec", "1")
	if r := blind.status(); !strings.Contains(r.Hint, share) {
		t.Errorf("status does not say what to share: %+v", r)
	}
	inside.ok("stop")
	if r := host.status(); r.Supervisor != nil {
		t.Errorf("after a stop in the sandbox: %+v", r.Supervisor)
	}
}

// Device numbers of overlay file systems are used again. As long as a session lives its
// own is not, so what comes in its directory's place is another directory.
func TestOverlay(t *testing.T) {
	p := someone(t, "root")
	top := p.directory(t)
	at, second := filepath.Join(top, "at"), filepath.Join(top, "second")
	mount := func(name string) {
		t.Helper()
		var dirs []string
		for _, d := range []string{"lower", "upper", "work"} {
			dirs = append(dirs, filepath.Join(top, name, d))
		}
		for _, d := range append(dirs, at, second, filepath.Join(dirs[1], ".mypr")) {
			if err := os.MkdirAll(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		err := os.WriteFile(filepath.Join(dirs[1], ".mypr", "config.toml"), []byte("[python]\nplain = true\n"), 0o644)
		if err == nil {
			err = unix.Mount("overlay", at, "overlay", 0, fmt.Sprintf(`lowerdir=%s,upperdir=%s,workdir=%s`, dirs[0], dirs[1], dirs[2]))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	mount("a")
	if err := unix.Mount(at, second, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	a, b := p.host(t, second), p.host(t, at)
	defer func() {
		_ = unix.Unmount(at, unix.MNT_DETACH)
		_ = unix.Unmount(second, unix.MNT_DETACH)
	}()
	a.ok("exec", "x = 'of the first'")
	if got := b.ok("exec", "x"); got != "'of the first'" {
		t.Errorf("by the other mount: %s", got)
	}
	if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	mount("b")
	if got := b.ok("exec", "'x' in globals()"); got != "False" {
		t.Errorf("attached to the session of another file system: %s", got)
	}
	if got := a.ok("exec", "x"); got != "'of the first'" {
		t.Errorf("the first session: %s", got)
	}
	b.ok("stop")
	a.ok("stop")
}

// A full disk must not keep a supervisor from taking over, nor cost what it takes over.
func TestFullDisk(t *testing.T) {
	p := someone(t, "root")
	disk := p.directory(t)
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=256m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
	dir, filling := filepath.Join(disk, "work"), filepath.Join(disk, "filling")
	err := os.MkdirAll(filepath.Join(dir, ".mypr"), 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, ".mypr", "config.toml"), []byte("[python]\nplain = true\n"), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	host := p.host(t, dir)
	t.Cleanup(func() { host.ok("stop", "--force") })
	host.ok("exec", "x = 'kept'")
	if out, err := p.script("/", "! cat /dev/zero 2>/dev/null > '"+filling+"'"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	before := host.status().Supervisor
	if before == nil {
		t.Fatal("no supervisor")
	}
	for range 2 { // the second one finds what the first has written, or not
		if err := unix.Kill(before.PID, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		for began := time.Now(); ; {
			if now := host.status().Supervisor; now != nil && now.PID != before.PID {
				before = now
				break
			}
			if time.Since(began) > time.Minute {
				t.Fatalf("nobody has taken over on a full disk: %+v", host.status())
			}
		}
	}
	if err := os.Truncate(filling, 0); err != nil {
		t.Fatal(err)
	}
	if got := host.ok("exec", "x"); got != "'kept'" {
		t.Errorf("when there is room again: %s", got)
	}
}

// What people and cleaners do to a runtime's files and processes.
func TestRepairs(t *testing.T) {
	p := someone(t, "rootless")
	dir := p.workspace(t)
	host := p.host(t, dir)
	t.Cleanup(func() { host.ok("stop", "--force") })
	host.ok("exec", "x = 'kept'")
	sockets := strings.TrimSuffix(host.status().Socket, ".sock") + ".*"
	if out, err := p.script("/", "rm "+sockets); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got := host.ok("exec", "x"); got != "'kept'" {
		t.Errorf("after the sockets were deleted: %s", got)
	}

	// A supervisor that hangs.
	sv := host.status().Supervisor
	if sv == nil {
		t.Fatal("no supervisor")
	}
	if err := unix.Kill(sv.PID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if r := host.status(); !strings.Contains(r.Problem, "does not answer") || !strings.Contains(r.Problem, strconv.Itoa(sv.PID)) {
		t.Errorf("status: %+v", r)
	}
	if got := host.ok("exec", "x"); got != "'kept'" {
		t.Errorf("while the supervisor hangs: %s", got)
	}
	host.fails([]string{"does not answer", "stop --force"}, "stop")
	if out := host.ok("stop", "--force"); !strings.Contains(out, "was killed") {
		t.Errorf("stop --force: %s", out)
	}
	if r := host.status(); r.Supervisor != nil || r.Status != nil {
		t.Errorf("after stop --force: %+v", r)
	}

	host.ok("exec", "x = 'kept'")
	// Renamed and not removed: something may be put in there at this moment.
	if err := os.Rename(filepath.Join(dir, ".mypr"), filepath.Join(dir, "gone")); err != nil {
		t.Fatal(err)
	}
	if r := host.status(); !strings.Contains(r.Problem, "was deleted while the session runs") {
		t.Errorf("status after .mypr was deleted: %+v", r)
	}
	host.ok("stop")
	if r := host.status(); r.Supervisor != nil || r.Status != nil {
		t.Errorf("after stop: %+v", r)
	}
}
