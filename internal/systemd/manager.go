package systemd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/unit"
	"golang.org/x/sys/unix"

	templates "mypr/contrib/systemd"
)

// Manager is the user's service manager.
type Manager struct {
	RuntimeDir string // $XDG_RUNTIME_DIR of it and of what it starts
}

// Find returns the manager whose runtime directory that is, or why there is none that
// can be used.
func Find(runtimeDir string) (*Manager, error) {
	m := &Manager{runtimeDir}
	if !filepath.IsAbs(runtimeDir) {
		return nil, errors.New("there is no XDG_RUNTIME_DIR")
	}
	c, err := m.dial()
	if err != nil {
		return nil, fmt.Errorf("no systemd user manager answers: %w", err)
	}
	c.Close()
	for _, tool := range []string{"systemctl", "systemd-run"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *Manager) dial() (*net.UnixConn, error) {
	c, err := net.Dial("unix", filepath.Join(m.RuntimeDir, "systemd", "private"))
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// SameWorld says why a process that the manager starts would not live where this
// process does: it must see the same files, and it must not be free of restrictions
// that this process was put under. nil when it would.
func (m *Manager) SameWorld() error {
	c, err := m.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil || err != nil {
		return errors.Join(cerr, err)
	}
	if int(peer.Uid) != os.Getuid() || peer.Pid <= 0 {
		return errors.New("it is another user's, or in another pid namespace")
	}
	for _, ns := range []string{"mnt", "pid", "user", "net"} {
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", peer.Pid, ns))
		if err != nil {
			return err
		}
		if ours, err := os.Readlink("/proc/self/ns/" + ns); err != nil || ours != theirs {
			return fmt.Errorf("it is in another %s namespace", ns)
		}
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if (name == "Seccomp" || name == "NoNewPrivs") && strings.TrimSpace(value) != "0" {
			return fmt.Errorf("this process is under restrictions (%s)", name)
		}
	}
	return nil
}

func (m *Manager) env() []string {
	return append(withoutVariables(os.Environ()), "XDG_RUNTIME_DIR="+m.RuntimeDir, "SYSTEMD_LOG_LEVEL=err", "SYSTEMD_PAGER=", "LC_ALL=C")
}

// systemctl runs "systemctl --user" with args.
func (m *Manager) systemctl(ctx context.Context, args ...string) (string, error) {
	return output(ctx, m.env(), "systemctl", append([]string{"--user"}, args...)...)
}

// properties of the service template, for a transient one: everything of [Unit] and
// [Service] that is not about the socket, the program or installation.
func properties() ([]string, error) {
	options, err := unit.DeserializeOptions(strings.NewReader(templates.Service))
	if err != nil {
		return nil, err
	}
	var args []string
	for _, o := range options {
		switch o.Name {
		case "Description", "Documentation", "Requires", "After", "ExecStart", "ExecReload", "Slice", "NonBlocking", "WantedBy":
		default:
			args = append(args, "-p", o.Name+"="+o.Value)
		}
	}
	return args, nil
}

// Slice is that of all sessions.
const Slice = "app-mypr.slice"

// Transient describes a service without a unit file.
type Transient struct {
	Unit, Description string
	Exec, Reload      []string
	Env               []string // NAME=value, besides the manager's
	Log               string   // file that output goes to
}

// Run starts a transient service and returns when it is ready or could not be started.
// It has the properties of the template. A loaded unit of that name is stopped first.
func (m *Manager) Run(ctx context.Context, t Transient) error {
	p, err := properties()
	if err != nil {
		return err
	}
	args := []string{"--user", "--quiet", "--collect", "--unit=" + t.Unit, "--description=" + t.Description, "--slice=" + Slice}
	args = append(args, p...)
	args = append(args, "-p", "StandardOutput=append:"+specifierEscape(t.Log), "-p", "StandardError=append:"+specifierEscape(t.Log), "-p", "ExecReload="+quote(t.Reload))
	for _, kv := range t.Env {
		args = append(args, "--setenv="+kv)
	}
	args = append(append(args, "--"), t.Exec...)
	_, err = output(ctx, m.env(), "systemd-run", args...)
	if err != nil && strings.Contains(err.Error(), "already") && ctx.Err() == nil {
		if serr := m.Stop(ctx, t.Unit); serr == nil {
			_, err = output(ctx, m.env(), "systemd-run", args...)
		}
	}
	return err
}

// Stop stops units.
func (m *Manager) Stop(ctx context.Context, names ...string) error {
	_, err := m.systemctl(ctx, append([]string{"stop", "--"}, names...)...)
	_, _ = m.systemctl(ctx, append([]string{"reset-failed", "--"}, names...)...) // nothing to reset is no matter
	return err
}

// quote writes a command line for ExecReload=.
func quote(argv []string) string {
	words := make([]string, len(argv))
	for i, a := range argv {
		words[i] = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "$", "$$", "%", "%%", "\n", `\n`).Replace(a) + `"`
	}
	return strings.Join(words, " ")
}

func specifierEscape(s string) string { return strings.ReplaceAll(s, "%", "%%") }

// Instance is a workspace's pair of units.
type Instance struct {
	Dir    string
	Name   string // escaped path
	Socket string // where clients look for the runtime socket
	Exe    string
}

// maxUnitName is UNIT_NAME_MAX.
const maxUnitName = 255

// NewInstance is the instance for a directory.
func NewInstance(dir, socket, exe string) (*Instance, error) {
	i := &Instance{Dir: dir, Name: unit.UnitNamePathEscape(dir), Socket: socket, Exe: exe}
	if len(i.Service()) > maxUnitName {
		return nil, fmt.Errorf("the unit's name for %s would have %d bytes, of which systemd allows %d", dir, len(i.Service()), maxUnitName)
	}
	return i, nil
}

// Service is the name of the service unit.
func (i *Instance) Service() string { return "mypr@" + i.Name + ".service" }

// SocketUnit is the name of the socket unit.
func (i *Instance) SocketUnit() string { return "mypr@" + i.Name + ".socket" }

// File is a unit file or drop-in, below the manager's directory.
type File struct{ Path, Text string }

const (
	serviceTemplate = "mypr@.service"
	socketTemplate  = "mypr@.socket"
	dropIn          = "workspace.conf"
)

// Files are what Enable installs.
func (i *Instance) Files() []File {
	exe := quote([]string{i.Exe})
	return []File{
		{serviceTemplate, strings.ReplaceAll(templates.Service, "%h/.local/bin/mypr-mcp", exe)},
		{socketTemplate, templates.Socket},
		{filepath.Join(i.SocketUnit()+".d", dropIn), "# Where clients look for the session of " + i.Dir + "\n[Socket]\nListenStream=\nListenStream=" + specifierEscape(i.Socket) + "\n"},
	}
}

// Enabled reports whether Enable was called for it, and Disable was not, without asking anybody.
func (i *Instance) Enabled() bool {
	dir, err := UnitDir()
	if err == nil {
		_, err = os.Stat(filepath.Join(dir, i.SocketUnit()+".d", dropIn))
	}
	return err == nil
}

// Again starts a socket that has failed, whatever limit of starts it was.
func (m *Manager) Again(ctx context.Context, i *Instance) error {
	_, _ = m.systemctl(ctx, "reset-failed", "--", i.SocketUnit(), i.Service()) // only one of them may be known
	_, err := m.systemctl(ctx, "start", "--", i.SocketUnit())
	return err
}

// UnitDir is where the user's own unit files are.
func UnitDir() (string, error) {
	config, err := os.UserConfigDir()
	return filepath.Join(config, "systemd", "user"), err
}

// Enable installs the files, and enables and starts the socket. It tells each thing
// that it did.
func (m *Manager) Enable(ctx context.Context, i *Instance, did func(string)) error {
	dir, err := UnitDir()
	if err != nil {
		return err
	}
	for _, f := range i.Files() {
		path := filepath.Join(dir, f.Path)
		if old, err := os.ReadFile(path); err == nil && string(old) == f.Text {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(f.Text), 0o644); err != nil {
			return err
		}
		did("wrote " + path)
	}
	if _, err := m.systemctl(ctx, "daemon-reload"); err != nil {
		return err
	}
	if _, err := m.systemctl(ctx, "enable", "--quiet", "--", i.SocketUnit()); err != nil {
		return err
	}
	did("enabled " + i.SocketUnit())
	// restart: an active socket may listen at the place of an earlier drop-in.
	if st, err := m.State(ctx, i); err == nil && st.Socket == "active" && st.Listen == i.Socket {
		return nil
	}
	_, _ = m.systemctl(ctx, "reset-failed", "--", i.SocketUnit()) // of earlier starts
	if _, err := m.systemctl(ctx, "restart", "--", i.SocketUnit()); err != nil {
		return err
	}
	did("started " + i.SocketUnit() + ": the first connection to " + i.Socket + " starts the session")
	return nil
}

// Disable undoes Enable: it stops the socket and the session, and removes the files
// that no other instance needs.
func (m *Manager) Disable(ctx context.Context, i *Instance, did func(string)) error {
	dir, err := UnitDir()
	if err != nil {
		return err
	}
	if !i.Enabled() {
		return fmt.Errorf("%s is not enabled", i.SocketUnit())
	}
	if _, err := m.systemctl(ctx, "disable", "--quiet", "--", i.SocketUnit(), i.Service()); err != nil {
		return err
	}
	did("disabled " + i.SocketUnit())
	if err := m.Stop(ctx, i.SocketUnit(), i.Service()); err != nil {
		return err
	}
	did("stopped " + i.SocketUnit() + " and " + i.Service())
	remove := []string{filepath.Join(i.SocketUnit()+".d", dropIn), i.SocketUnit() + ".d"}
	if others, err := filepath.Glob(filepath.Join(dir, "mypr@?*.socket.d")); err == nil && len(others) <= 1 {
		remove = append(remove, serviceTemplate, socketTemplate)
	}
	for _, name := range remove {
		if err := os.Remove(filepath.Join(dir, name)); err == nil {
			did("removed " + filepath.Join(dir, name))
		}
	}
	_, err = m.systemctl(ctx, "daemon-reload")
	return err
}

// State is what the manager says of an instance.
type State struct {
	Enabled    string `json:"enabled"` // enabled, disabled, not-found
	Socket     string `json:"socket"`  // active state
	Listen     string `json:"listen,omitempty"`
	Service    string `json:"service"` // active state
	Sub        string `json:"service_sub_state"`
	Result     string `json:"result"`
	Status     string `json:"status,omitempty"`
	MainPID    string `json:"main_pid,omitempty"`
	Restarts   string `json:"restarts"`
	Stored     string `json:"stored_descriptors"`
	NeedReload bool   `json:"need_daemon_reload,omitempty"`
}

// State asks for an instance.
func (m *Manager) State(ctx context.Context, i *Instance) (*State, error) {
	socket, err := m.show(ctx, i.SocketUnit(), "ActiveState", "Listen", "UnitFileState", "LoadState", "NeedDaemonReload")
	if err != nil {
		return nil, err
	}
	service, err := m.show(ctx, i.Service(), "ActiveState", "SubState", "Result", "StatusText", "MainPID", "NRestarts", "NFileDescriptorStore", "NeedDaemonReload")
	if err != nil {
		return nil, err
	}
	s := &State{
		Enabled: socket["UnitFileState"], Socket: socket["ActiveState"], Listen: strings.TrimSuffix(socket["Listen"], " (Stream)"),
		Service: service["ActiveState"], Sub: service["SubState"], Result: service["Result"], Status: service["StatusText"],
		MainPID: service["MainPID"], Restarts: service["NRestarts"], Stored: service["NFileDescriptorStore"],
		NeedReload: socket["NeedDaemonReload"] == "yes" || service["NeedDaemonReload"] == "yes",
	}
	if socket["LoadState"] != "loaded" {
		s.Enabled = socket["LoadState"]
	}
	if s.MainPID == "0" {
		s.MainPID = ""
	}
	return s, nil
}

func (m *Manager) show(ctx context.Context, name string, properties ...string) (map[string]string, error) {
	text, err := m.systemctl(ctx, "show", "--property="+strings.Join(properties, ","), "--", name)
	values := map[string]string{}
	for line := range strings.Lines(text) {
		k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		values[k] = v
	}
	return values, err
}

// Verify has systemd read the files of an instance and returns what it complains of.
func (m *Manager) Verify(ctx context.Context, i *Instance) (string, error) {
	dir, err := UnitDir()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "systemd-analyze", "--user", "verify", filepath.Join(dir, i.SocketUnit()), filepath.Join(dir, i.Service()))
	cmd.Env = m.env()
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// lingerTimeout bounds asking logind.
const lingerTimeout = 5 * time.Second

// Linger reports whether the user's manager, and so a session, goes on after the last
// logout. An error means that nobody knows: there is no logind.
func (m *Manager) Linger(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, lingerTimeout)
	defer cancel()
	text, err := output(ctx, m.env(), "loginctl", "show-user", "--property=Linger", "--", fmt.Sprint(os.Getuid()))
	return strings.TrimSpace(text) == "Linger=yes", err
}

// Print writes the files of an instance, each after a comment with its place.
func (i *Instance) Print(w io.Writer) error {
	dir, err := UnitDir()
	if err != nil {
		return err
	}
	for n, f := range slices.All(i.Files()) {
		if n > 0 {
			fmt.Fprintln(w)
		}
		if _, err := fmt.Fprintf(w, "# %s\n%s", filepath.Join(dir, f.Path), f.Text); err != nil {
			return err
		}
	}
	return nil
}
