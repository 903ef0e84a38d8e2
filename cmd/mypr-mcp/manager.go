package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/spf13/cobra"

	"mypr/internal/api"
	"mypr/internal/config"
	"mypr/internal/logfile"
	"mypr/internal/rpc"
	"mypr/internal/systemd"
	"mypr/internal/workspace"
	"mypr/kernel"
	"mypr/supervisor/control"
	"mypr/supervisor/notify"
	"mypr/supervisor/spec"
	"mypr/units"
	"mypr/units/manager"
)

func (c *cli) managerCommand() *cobra.Command {
	return &cobra.Command{
		Use: "manager", Short: "Run the manager (started by the supervisor)", Args: cobra.NoArgs, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.manager(cmd.Context()) },
	}
}

// manager runs the session in this process. Its sockets, its control socket and its
// working directory are the supervisor's doing.
func (c *cli) manager(ctx context.Context) (err error) {
	syscall.Umask(0o077)
	defer func() {
		if err != nil { // so that who waits for the session reads why, and not only that it failed
			text, _, _ := strings.Cut(err.Error(), "\n")
			_, _ = notify.Send("STATUS=" + text)
			_ = notify.Barrier(5 * time.Second)
		}
	}()
	runtime, kernelSocket, err := managerSockets()
	if err != nil {
		return err
	}
	controlPath := os.Getenv("MYPR_CONTROL")
	if controlPath == "" {
		return errNotSupervised
	}
	w, err := c.workspace()
	if err != nil {
		return err
	}
	log := systemd.NewLogger(logfile.Writer(c.stderr, filepath.Join(w.Root, "manager.log")), w.Dir)
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	record, err := w.ReadRuntime()
	if err != nil {
		return fmt.Errorf("cannot read what the supervisor recorded: %w", err)
	}
	// A broken file must not keep the manager from saying so: the defaults serve until
	// a kernel is to be prepared, which reads it again and fails with the reason.
	started := os.Environ()
	cfg, list, err := config.Load(w.Root)
	if err != nil {
		log.Error("configuration", "error", err)
		cfg = config.Default()
	}
	ignored := &warnings{log: log, of: map[string][]string{}}
	ignored.in("config.toml", list)
	origin := record.Environment
	env, changed := cfg.Environ(started)
	origin.Changed = changed
	setEnvironment(env)

	loader := units.NewLoader(w.Dir, exe, w.Stem())
	return manager.Run(ctx, manager.Options{
		Workspace: w, Runtime: runtime, Kernel: kernelSocket, KernelSocket: kernelSocket.Addr().String(),
		Connect: (&reviver{w: w, control: controlPath, env: withoutService(slices.Clone(started)), origin: record.Environment}).connect,
		Prepare: func(ctx context.Context, run kernel.Runner, progress func(string)) (*kernel.Launch, error) {
			return prepareKernel(ctx, w, started, ignored, run, progress)
		},
		Available: func(ctx context.Context, run kernel.Runner) error {
			o, err := kernelOptions(w, started, ignored)
			if err != nil {
				return err
			}
			o.Run = run
			return kernel.Available(ctx, o)
		},
		KernelUnit: func() (*spec.Unit, error) {
			u, list, err := loader.Load(units.Kernel)
			ignored.in(units.Kernel, list)
			return u, err
		},
		Services: services(w, log), Jobs: backgroundJobs(w, loader, cfg, started, ignored, log), Warnings: ignored.all,
		IdleExit: time.Duration(cfg.Limits.IdleExitSeconds) * time.Second,
		Limits: manager.Limits{
			OutputBytes: cfg.Limits.OutputBytes, CompletedTasks: cfg.Limits.CompletedTasks,
			CompletedRecords: cfg.Limits.CompletedRecords, CacheBytes: cfg.Limits.CacheBytes,
			ExecuteWaitMS: &cfg.Limits.ExecuteWaitMS, PollWaitMS: &cfg.Limits.PollWaitMS,
		},
		Instance: record.Instance, Version: version(), Executable: exe, Environment: withoutService(slices.Clone(started)), Origin: origin, ConfigFiles: cfg.Files,
		Notify: func(state string) error {
			_, err := notify.Send(state)
			return err
		},
		Logger: log,
	})
}

// warnings are what files of configuration have that nothing knows, each as it was last
// read: in the log, and for status.
type warnings struct {
	log *slog.Logger
	mu  sync.Mutex
	of  map[string][]string
}

func (w *warnings) in(file string, list []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if slices.Equal(w.of[file], list) {
		return
	}
	for _, text := range list {
		w.log.Warn("configuration", "warning", text)
	}
	w.of[file] = list
}

func (w *warnings) all() (list []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, file := range slices.Sorted(maps.Keys(w.of)) {
		list = append(list, w.of[file]...)
	}
	return list
}

// reviver connects the manager to its supervisor, and starts that again when it died
// together with its anchor. A service manager sees to its own.
type reviver struct {
	w       *workspace.Workspace
	control string
	env     []string
	origin  api.Origin
	ours    bool // the last supervisor was started by this program, not by a service manager
}

func (r *reviver) connect(ctx context.Context) (manager.Supervisor, error) {
	c, err := control.Dial(ctx, r.control)
	if err != nil && r.ours && rpc.IsGone(err) {
		if err := r.w.Revive(ctx, workspace.StartOptions{Env: r.env, Origin: r.origin}); err != nil {
			return nil, fmt.Errorf("cannot start the supervisor again: %w", err)
		}
		c, err = control.Dial(ctx, r.control)
	}
	if err != nil {
		return nil, err
	}
	if info, err := c.Info(ctx); err == nil {
		r.ours = info.Mode == "standalone"
	}
	return c, nil
}

var errNotSupervised = rpc.Errorf(rpc.CodeInvalidRequest, "the manager is started by the supervisor, which passes it its sockets").
	WithHint("mypr-mcp exec 1+1 starts a session")

// managerSockets takes the inherited listeners.
func managerSockets() (runtime, kernel *net.UnixListener, err error) {
	named, err := activation.ListenersWithNames()
	if err != nil {
		return nil, nil, err
	}
	take := func(name string) *net.UnixListener {
		for _, l := range named[name] {
			if u, ok := l.(*net.UnixListener); ok {
				u.SetUnlinkOnClose(false) // the socket file is the supervisor's
				return u
			}
		}
		return nil
	}
	if runtime, kernel = take("runtime"), take("kernel"); runtime == nil || kernel == nil {
		return nil, nil, errNotSupervised
	}
	return runtime, kernel, nil
}

// serviceVariables are what the supervisor tells its units about themselves.
var serviceVariables = []string{
	"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "INVOCATION_ID", "MYPR_CONTROL", systemd.JournalVariable,
}

// prepareKernel makes ready what a kernel needs.
func prepareKernel(ctx context.Context, w *workspace.Workspace, base []string, ignored *warnings, run kernel.Runner, progress func(string)) (*kernel.Launch, error) {
	o, err := kernelOptions(w, base, ignored)
	if err != nil {
		return nil, err
	}
	o.Run, o.Progress = run, progress
	l, err := kernel.Prepare(ctx, o)
	var known *rpc.Error
	if err != nil && ctx.Err() == nil && !errors.As(err, &known) {
		err = rpc.Errorf(rpc.CodeUnavailable, "cannot prepare Python: %v", err).WithHint("mypr-mcp reset tries again when that is mended")
	}
	return l, err
}

// kernelOptions reads the configuration as it is now, so that a reset applies it.
func kernelOptions(w *workspace.Workspace, base []string, ignored *warnings) (kernel.Options, error) {
	cfg, list, err := config.Load(w.Root)
	if err != nil {
		return kernel.Options{}, err
	}
	ignored.in("config.toml", list)
	env, _ := cfg.Environ(base)
	return kernel.Options{Root: w.Root, Workspace: w.Dir, Config: cfg.Python, Env: withoutService(env)}, nil
}

// withoutService takes out what the supervisor told this process: it is nothing for others.
func withoutService(env []string) []string {
	return slices.DeleteFunc(env, func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains(serviceVariables, name)
	})
}

// setEnvironment makes env this process's own: what it starts, and the libraries in
// it, see the configured proxies and certificates.
func setEnvironment(env []string) {
	os.Clearenv()
	for _, kv := range env {
		for i := 1; i < len(kv); i++ { // a name may begin with "="
			if kv[i] == '=' {
				_ = os.Setenv(kv[:i], kv[i+1:])
				break
			}
		}
	}
}
