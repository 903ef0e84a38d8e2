// Package containers tests the program across namespaces: in podman's containers, of
// root and of an ordinary user, in bubblewrap and in bare namespaces, with everything of
// contrib/containers and every command of docs/CONTAINERS.md. No registry is needed: the
// base images are made of this machine's own Python. TestMain runs the tests in a
// corner of this machine that ends with them:
//
//	root          makes a cgroup and starts itself in it, in new namespaces, without a network
//	root, pid 1   mounts /run, /proc and cgroup2, starts the tests, reaps orphans
//	root          runs the tests
//
// Images and containers are in a directory of the tests' own.
package containers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mypr/supervisor/cgroup"
)

const (
	stageVariable = "MYPR_CONTAINERS_STAGE"
	topVariable   = "MYPR_CONTAINERS_TOP"
	testUser      = "mypr-test"
	patience      = 60 * time.Second
)

// top is the directory of the tests, which everybody can enter; bin is the program
// under test, a copy in it.
var (
	top = os.Getenv(topVariable)
	bin = filepath.Join(top, "bin", "mypr-mcp")
)

func TestMain(m *testing.M) {
	var code int
	var err error
	switch os.Getenv(stageVariable) {
	case "":
		code, err = outside()
	case "cgroup":
		code, err = again("init", &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWCGROUP | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL,
		})
	case "init":
		code, err = initProcess()
	case "tests":
		os.Unsetenv(stageVariable)
		code = m.Run()
		err = nobodyLeft()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "containers test:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// again runs this program in the next stage.
func again(stage string, attr *syscall.SysProcAttr) (int, error) {
	cmd := stageCommand(stage)
	cmd.SysProcAttr = attr
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}

func stageCommand(stage string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), stageVariable+"="+stage), os.Stdout, os.Stderr
	return cmd
}

// needed are the programs of the tests, with the package that has each.
var needed = map[string]string{
	"podman": "podman", "crun": "crun", "runc": "runc", "conmon": "conmon", "newuidmap": "uidmap", "bwrap": "bubblewrap", "catatonit": "catatonit", "podman-compose": "podman-compose",
}

// podman is what the person's shell finds under that name: there are no networks here.
const podman = `#!/bin/bash
case $1 in
build) exec /usr/bin/podman build --network=none --pull=never $BUILD_OPTIONS "${@:2}" ;;
run) ;;
*) exec /usr/bin/podman "$@" ;;
esac
args=()
while [ $# -gt 0 ]; do
	case $1 in
	--net | --network-alias) shift ;;
	*) args+=("$1") ;;
	esac
	shift
done
exec /usr/bin/podman "${args[@]}"
`

func outside() (int, error) {
	if os.Getuid() != 0 {
		return 1, errors.New("these tests make namespaces, cgroups and containers of two users: run them as root")
	}
	for program, pkg := range needed {
		if _, err := exec.LookPath(program); err != nil {
			return 1, fmt.Errorf("%s is missing: run test/setup.sh, or install the package %s", program, pkg)
		}
	}
	if _, err := user.Lookup(testUser); err != nil {
		return 1, fmt.Errorf("%w; run test/setup.sh", err)
	}
	program, err := os.ReadFile(os.Getenv("MYPR_BIN"))
	if err != nil {
		return 1, fmt.Errorf("MYPR_BIN names no program (use make test-containers): %w", err)
	}
	if top, err = os.MkdirTemp("/var/tmp", "mypr-containers-"); err != nil {
		return 1, err
	}
	defer os.RemoveAll(top)
	os.Setenv(topVariable, top)
	bin = filepath.Join(top, "bin", "mypr-mcp")
	err = errors.Join(os.Chmod(top, 0o755), os.Mkdir(filepath.Dir(bin), 0o755), os.WriteFile(bin, program, 0o755),
		os.WriteFile(filepath.Join(top, "bin", "podman"), []byte(podman), 0o755), os.Mkdir(filepath.Join(top, "node_modules"), 0o755),
		os.Mkdir(filepath.Join(top, "tmp"), 0o777), os.Chmod(filepath.Join(top, "tmp"), 0o777|os.ModeSticky))
	if err != nil {
		return 1, err
	}
	// An ordinary user can read neither root's checkout nor where go test builds.
	if out, err := exec.Command("cp", "-r", "../../contrib", top).CombinedOutput(); err != nil {
		return 1, fmt.Errorf("%w: %s", err, out)
	}
	// The tests have no network, from which its source may have to come.
	if out, err := exec.Command("go", "build", "-C", "quadlet", "-o", filepath.Join(top, "quadlet"), "github.com/containers/podman/v4/cmd/quadlet").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("%w: %s", err, out)
	}
	root := "/sys/fs/cgroup/unified"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	dir := filepath.Join(root, filepath.Base(top))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return 1, err
	}
	defer func() {
		cgroup.KillAll(dir, 10*time.Second)
		removeGroup(dir)
	}()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 1, err
	}
	defer unix.Close(fd)
	return again("cgroup", &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd, Pdeathsig: syscall.SIGKILL})
}

// removeGroup removes a cgroup with those below it.
func removeGroup(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			removeGroup(filepath.Join(dir, e.Name()))
		}
	}
	if err := os.Remove(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

// initProcess is pid 1 of the namespaces.
func initProcess() (int, error) {
	uid, err := testUID()
	for _, m := range []struct {
		source, target, kind, data string
		flags                      uintptr
	}{
		{"", "/", "", "", unix.MS_REC | unix.MS_PRIVATE}, {"tmpfs", "/run", "tmpfs", "mode=755", 0}, {"proc", "/proc", "proc", "", 0},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", "", 0}, {"", "/", "", "", unix.MS_REC | unix.MS_SHARED}, // podman warns of a root that is not shared
	} {
		if err == nil {
			err = os.NewSyscallError("mount "+m.target, unix.Mount(m.source, m.target, m.kind, m.flags, m.data))
		}
	}
	if err == nil {
		err = os.NewSyscallError("mount test/node_modules (run test/setup.sh)", unix.Mount("../node_modules", filepath.Join(top, "node_modules"), "", unix.MS_BIND, ""))
	}
	for dir, owner := range map[string]int{"/run/lock": 0, "/run/user/0": 0, fmt.Sprintf("/run/user/%d", uid): uid} {
		err = errors.Join(err, os.MkdirAll(dir, 0o755), os.Chmod(dir, 0o700), os.Chown(dir, owner, owner))
	}
	for dir, owner := range map[string]int{"init": 0, "tests": 0, "user": uid} {
		dir = filepath.Join("/sys/fs/cgroup", dir)
		err = errors.Join(err, os.Mkdir(dir, 0o755), os.Chown(dir, owner, owner))
		for _, f := range []string{"cgroup.procs", "cgroup.subtree_control", "cgroup.threads"} {
			err = errors.Join(err, os.Chown(filepath.Join(dir, f), owner, owner))
		}
	}
	if err = errors.Join(err, os.WriteFile("/sys/fs/cgroup/init/cgroup.procs", []byte("1"), 0)); err != nil {
		return 1, err
	}
	fd, err := unix.Open("/sys/fs/cgroup/tests", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 1, err
	}
	os.Setenv("TMPDIR", filepath.Join(top, "tmp"))
	cmd := stageCommand("tests")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd}
	if err := cmd.Start(); err != nil {
		return 1, err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 1, os.NewSyscallError("wait4", err)
		case pid == cmd.Process.Pid && status.Exited():
			return status.ExitStatus(), nil
		case pid == cmd.Process.Pid:
			return 1, fmt.Errorf("the tests ended by %v", status.Signal())
		}
	}
}

func testUID() (int, error) {
	u, err := user.Lookup(testUser)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(u.Uid)
}

// nobodyLeft waits for the end of every process of the tests.
func nobodyLeft() error {
	entries, err := os.ReadDir("/proc")
	for _, e := range entries {
		pid, perr := strconv.Atoi(e.Name())
		if perr != nil || pid <= 1 || pid == os.Getpid() {
			continue
		}
		cmdline, cerr := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		text := strings.ReplaceAll(strings.Trim(string(cmdline), "\x00"), "\x00", " ")
		// What holds podman's user namespace stays, by design.
		if cerr != nil || text == "" || strings.HasSuffix(text, "catatonit -P") || strings.HasPrefix(text, "podman") && strings.Contains(text, "pause") {
			continue
		}
		if !ends(pid, patience/2) {
			err = errors.Join(err, fmt.Errorf("process %d is left: %s", pid, text))
		}
	}
	return err
}

// ends waits for the end of a process.
func ends(pid int, patience time.Duration) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err == unix.ESRCH
	}
	defer unix.Close(fd)
	for deadline := time.Now().Add(patience); ; {
		left := time.Until(deadline)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, max(0, int(left.Milliseconds())))
		if n == 1 {
			return true
		}
		if err != unix.EINTR || left <= 0 {
			return false
		}
	}
}

// person is somebody with podman: root, or an ordinary user.
type person struct {
	name   string
	uid    int
	home   string
	run    string // XDG_RUNTIME_DIR
	env    []string
	cgroup int // descriptor of the group that what he runs is in
}

var people = sync.OnceValues(func() (map[string]*person, error) {
	uid, err := testUID()
	all := map[string]*person{}
	for name, id := range map[string]int{"root": 0, "rootless": uid} {
		user, group, runtime := "root", "/sys/fs/cgroup/tests", "runc" // which needs no CAP_SYS_RESOURCE
		if id != 0 {
			user, group, runtime = testUser, "/sys/fs/cgroup/user", "crun"
		}
		p := &person{name: name, uid: id, home: filepath.Join(top, name), run: fmt.Sprintf("/run/user/%d", id)}
		conf := "[containers]\nnetns = \"none\"\npids_limit = 0\nlog_driver = \"k8s-file\"\n[engine]\ncgroup_manager = \"cgroupfs\"\nruntime = \"" + runtime +
			"\"\nevents_logger = \"file\"\n[network]\nnetwork_backend = \"netavark\"\n"
		storage := fmt.Sprintf("[storage]\ndriver = \"overlay\"\ngraphroot = \"%s/storage\"\nrunroot = \"%s/storage\"\n", p.home, p.run)
		var gerr error
		p.cgroup, gerr = unix.Open(group, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		err = errors.Join(err, gerr, os.Mkdir(p.home, 0o755), os.Mkdir(filepath.Join(p.home, "tmp"), 0o755),
			os.WriteFile(filepath.Join(p.home, "containers.conf"), []byte(conf), 0o644), os.WriteFile(filepath.Join(p.home, "storage.conf"), []byte(storage), 0o644),
			os.Chown(p.home, id, id), os.Chown(filepath.Join(p.home, "tmp"), id, id))
		p.env = []string{
			"HOME=" + p.home, "USER=" + user, "LANG=C.UTF-8", "PATH=" + top + "/bin:" + top + "/node_modules/.bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "XDG_RUNTIME_DIR=" + p.run, "TMPDIR=" + p.home + "/tmp",
			"contrib=" + top + "/contrib/containers", "CONTAINERS_CONF=" + p.home + "/containers.conf", "CONTAINERS_STORAGE_CONF=" + p.home + "/storage.conf",
		}
		all[name] = p
	}
	return all, err
})

// each runs a test as root and as an ordinary user.
func each(t *testing.T, test func(t *testing.T, p *person)) {
	for _, name := range []string{"rootless", "root"} {
		t.Run(name, func(t *testing.T) { test(t, someone(t, name)) })
	}
}

func someone(t *testing.T, name string) *person {
	t.Helper()
	all, err := people()
	if err != nil {
		t.Fatal(err)
	}
	return all[name]
}

// command is one that the person runs.
func (p *person) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env, cmd.Dir = p.env, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: p.cgroup}
	if p.uid != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(p.uid), Gid: uint32(p.uid)}
	}
	return cmd
}

// runs runs a program to its end, and returns what it printed.
func (p *person) runs(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience) // also in a cleanup
	defer cancel()
	cmd := p.command(ctx, name, args...)
	// A file and not a pipe: what a container's monitor keeps open must not be waited for.
	out, err := os.CreateTemp("", "output-")
	if err != nil {
		return "", err
	}
	defer out.Close()
	defer os.Remove(out.Name())
	cmd.Stdout, cmd.Stderr = out, out
	err = cmd.Run()
	b, rerr := os.ReadFile(out.Name())
	return strings.TrimSpace(string(b)), errors.Join(err, rerr)
}

func (p *person) must(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := p.runs(name, args...)
	if err != nil {
		t.Fatalf("%s: %s %q: %v\n%s", p.name, name, args, err, out)
	}
	return out
}

// last is the last line: warnings come before it.
func last(out string) string {
	out = strings.TrimSpace(out)
	return out[strings.LastIndexByte(out, '\n')+1:]
}

var directories atomic.Int64

// directory makes a directory of the person's.
func (p *person) directory(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(p.home, fmt.Sprintf("work %d", directories.Add(1)))
	if err := errors.Join(os.Mkdir(dir, 0o755), os.Chown(dir, p.uid, p.uid)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// workspace makes a directory in which a session can be, with the plain kernel.
func (p *person) workspace(t *testing.T) string {
	t.Helper()
	dir := p.directory(t)
	config := filepath.Join(dir, ".mypr", "config.toml")
	err := errors.Join(os.Mkdir(filepath.Dir(config), 0o755), os.WriteFile(config, []byte("[python]\nplain = true\n"), 0o644))
	for _, f := range []string{filepath.Dir(config), config} {
		err = errors.Join(err, os.Chown(f, p.uid, p.uid))
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// The images: those that the Containerfile builds on by their names in the registry,
// and what it builds.
const (
	goImage     = "docker.io/library/golang:1.26-bookworm"
	pythonImage = "docker.io/library/python:3.13-slim-bookworm"
	image       = "localhost/mypr-mcp"
	binaryImage = "localhost/mypr-mcp-bin"
)

// base is a tar archive of a root file system with Python.
var base = sync.OnceValues(func() (string, error) {
	dir, file := filepath.Join(top, "base"), filepath.Join(top, "base.tar")
	if out, err := exec.Command("sh", "base.sh", dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("base.sh: %w\n%s", err, out)
	}
	if out, err := exec.Command("tar", "-C", dir, "-cf", file, ".").CombinedOutput(); err != nil {
		return "", fmt.Errorf("tar: %w\n%s", err, out)
	}
	return file, os.RemoveAll(dir)
})

// built builds the images as root, from the base images and with the Go and the module
// and build caches of this machine.
var built = sync.OnceValue(func() error {
	all, err := people()
	if err != nil {
		return err
	}
	p := all["root"]
	file, err := base()
	if err != nil {
		return err
	}
	run := func(name string, args ...string) error {
		if out, err := p.runs(name, args...); err != nil {
			return fmt.Errorf("%s %q: %w\n%s", name, args, err, out)
		}
		return nil
	}
	// The commands of the guide, with the Go, modules and build cache of this machine.
	script := "export BUILD_OPTIONS='"
	for _, v := range [][2]string{{"GOROOT", "/usr/local/go"}, {"GOMODCACHE", "/go/pkg/mod"}, {"GOCACHE", "/root/.cache/go-build"}} {
		out, err := exec.Command("go", "env", v[0]).Output()
		if err != nil {
			return fmt.Errorf("go env: %w", err)
		}
		script += " -v " + strings.TrimSpace(string(out)) + ":" + v[1]
	}
	script += "'\n"
	for _, block := range guide() {
		if strings.HasPrefix(block, "podman build") {
			script += block + "\n"
		}
	}
	source, err := filepath.Abs("../..")
	if err != nil {
		return err
	}
	if err := errors.Join(
		run("podman", "import", "--quiet", "--change", "ENV PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "--change", "ENV GOPATH=/go", file, pythonImage),
		run("podman", "tag", pythonImage, goImage)); err != nil {
		return err
	}
	if out, err := p.script(source, script); err != nil {
		return fmt.Errorf("%s: %w\n%s", script, err, out)
	}
	return errors.Join(
		run("podman", "save", "--quiet", "-m", "-o", filepath.Join(top, "images.tar"), image, binaryImage, pythonImage, goImage),
		os.Chmod(filepath.Join(top, "images.tar"), 0o644))
})

var loaded = sync.OnceValue(func() error {
	all, err := people()
	if err != nil {
		return err
	}
	if out, err := all["rootless"].runs("podman", "load", "--quiet", "-i", filepath.Join(top, "images.tar")); err != nil {
		return fmt.Errorf("podman load: %w\n%s", err, out)
	}
	return nil
})

// images has the person have the images.
func (p *person) images(t *testing.T) {
	t.Helper()
	err := built()
	if err == nil && p.uid != 0 {
		err = loaded()
	}
	if err != nil {
		t.Fatal(err)
	}
}

var containers atomic.Int64

// container starts one that runs until the end of the test, in which the runtime
// directory is shared and dir is at the path inside.
func (p *person) container(t *testing.T, dir, inside string, args ...string) string {
	t.Helper()
	name := fmt.Sprintf("c%d", containers.Add(1))
	p.images(t)
	if out, err := p.runs("mkdir", "-p", "-m", "700", p.run+"/mypr"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := p.runs("podman", "logs", "--tail", "40", name)
			t.Logf("container %s:\n%s", name, out)
		}
		if out, err := p.runs("podman", "rm", "--force", "--time", "0", name); err != nil {
			t.Errorf("podman rm: %v\n%s", err, out)
		}
	})
	p.must(t, "podman", append([]string{"run", "--detach", "--name", name, "-e", "XDG_RUNTIME_DIR", "-v", p.run + "/mypr:" + p.run + "/mypr", "-v", dir + ":" + inside, "-w", inside}, args...)...)
	return name
}

// idle is what a container runs that is only there to be used.
var idle = []string{"--entrypoint", "sleep", image, "infinity"}

// box is a place where the command line can be used: this machine, or a container.
type box struct {
	t      *testing.T
	p      *person
	name   string
	prefix []string
	dir    string // of the workspace, in there
}

func (p *person) host(t *testing.T, dir string) *box {
	return &box{t, p, "host", []string{bin}, dir}
}

func (p *person) in(t *testing.T, container, dir string) *box {
	return &box{t, p, container, []string{"podman", "exec", "-i", container, "mypr-mcp"}, dir}
}

func (b *box) argv(args ...string) []string {
	return append(append([]string{}, b.prefix...), append([]string{"-C", b.dir, "--json=false"}, args...)...)
}

func (b *box) run(args ...string) (string, error) {
	argv := b.argv(args...)
	return b.p.runs(argv[0], argv[1:]...)
}

// ok runs a command that must succeed; of exec it is the last line.
func (b *box) ok(args ...string) string {
	b.t.Helper()
	out, err := b.run(args...)
	if err != nil {
		b.t.Fatalf("%s, in %s: mypr-mcp %q: %v\n%s", b.p.name, b.name, args, err, out)
	}
	if args[0] == "exec" {
		return last(out)
	}
	return out
}

// fails runs a command that must fail, and say each of want.
func (b *box) fails(want []string, args ...string) {
	b.t.Helper()
	out, err := b.run(args...)
	if err == nil {
		b.t.Errorf("%s, in %s: mypr-mcp %q succeeded:\n%s", b.p.name, b.name, args, out)
	}
	for _, w := range want {
		if !strings.Contains(out, w) {
			b.t.Errorf("%s, in %s: mypr-mcp %q does not say %q:\n%s", b.p.name, b.name, args, w, out)
		}
	}
}

// script runs a shell script as the person, in dir.
func (p *person) script(dir, script string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	cmd := p.command(ctx, "bash", "-ec", script)
	cmd.Dir = dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, patience
	err := cmd.Run()
	return strings.TrimSpace(out.String()), err
}
