package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/config"
	"mypr/internal/logfile"
	"mypr/internal/rpc"
	"mypr/internal/systemd"
	"mypr/internal/workspace"
	"mypr/supervisor"
	"mypr/supervisor/process"
	"mypr/units"
	"mypr/units/manager"
)

// stateFile is where the supervisor of a workspace keeps what the next one must know.
func stateFile(w *workspace.Workspace) string { return filepath.Join(w.Root, "supervisor.json") }

func (c *cli) superviseCommand() *cobra.Command {
	return &cobra.Command{
		Use: "supervise", Short: "Run the supervisor in the foreground", Args: cobra.NoArgs, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), haltSignal)
			defer stop()
			if os.Getpid() == 1 {
				// With it the whole container would end: a log that nobody reads any more, or a
				// terminal that is closed, is no reason. (Caught, for units must not ignore them.)
				signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGPIPE)
			}
			starter := workspace.TakeStarter()
			service := systemd.Current()
			takeover := supervisor.TakesOver()
			err := c.supervise(ctx, starter, service)
			starter.Report(err) // counts only when ready was never reported
			var known *rpc.Error
			switch {
			case errors.Is(err, supervisor.ErrLeft):
				return exitStatus(exitLeft)
			case service != nil && errors.As(err, &known) && (!takeover || known.Code != rpc.CodeInternal):
				c.status(err)
				return exitStatus(exitConfig)
			}
			return err
		},
	}
}

// timerSlack is that of the supervisor; manager.service sets the manager's.
const timerSlack = time.Millisecond

// relax executes the program anew with more timer slack. Go's runtime has a thread that
// looks after the others every 20 µs while there is work, and is there before we are: it
// takes its slack from the thread that executed the program. No signal may be caught yet:
// it would end with the program that caught it.
func relax() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if was, err := process.SetTimerSlack(timerSlack); err != nil || was >= timerSlack {
		return
	}
	if is, err := process.SetTimerSlack(timerSlack); err != nil || is != timerSlack { // as with a real-time policy
		return
	}
	if exe, err := executable(); err == nil { // not what an update has put in its place
		_ = syscall.Exec(exe, os.Args, os.Environ()) // without it, all goes as well, a little slower
	}
}

// haltSignal is SIGRTMIN+3, with which container engines ask an init to end its system
// (systemd(1), CONTAINER_INTERFACE).
const haltSignal = syscall.Signal(34 + 3)

// containerGrace is how long the whole end may take when this process is the first of
// its pid namespace: engines kill the container 10 seconds after they asked, and people
// wait for that.
const containerGrace = 2700 * time.Millisecond

// Exit statuses of supervise that contrib/systemd/mypr@.service knows.
const (
	exitLeft   = 75 // told to go; the units run on (EX_TEMPFAIL)
	exitConfig = 78 // cannot run as things are: starting it again would not help (EX_CONFIG)
)

// environmentFD names the environment that a starter sent, among the descriptors that
// outlive the supervisor: systemd starts it again with its own.
const environmentFD = "environment"

// supervisorLock names the held lock among the descriptors that go over a re-execution.
const supervisorLock = "supervisor.lock"

// lockPatience is how long a lock may be held by one who only looks, or is about to end.
const lockPatience = 5 * time.Second

func (c *cli) supervise(ctx context.Context, starter *workspace.Starter, service *systemd.Service) error {
	// It lives long and has little to do: its memory matters, its collector's time does not.
	debug.SetGCPercent(25)
	// One goroutine owns everything and the others only wait for it: more threads would
	// only wake each other up, several times for each unit that starts.
	runtime.GOMAXPROCS(1)
	// The umask stays the user's: cells and jobs make files that are the user's, not
	// ours. Ours name their modes, and .mypr is closed.
	keep := map[string]*os.File{}
	if err := adoptEnvironment(starter, keep); err != nil {
		return err
	}
	w, err := c.workspace()
	if err != nil {
		return err
	}
	log := systemd.NewLogger(logfile.Writer(c.stderr, w.SupervisorLog()), w.Dir)
	// Open for good: as long as this process lives no other directory can be taken for
	// this one, whatever becomes of it and of .mypr.
	pin, err := w.Pin()
	if err != nil {
		return err
	}
	defer pin.Close()
	if err := w.EnsureLayout(); err != nil {
		return err
	}
	// Who takes over what runs does not refuse for a file that was spoilt meanwhile, and
	// does not look for another runtime: the sockets came along.
	takeover := supervisor.TakesOver()
	if _, _, err := config.Load(w.Root); err != nil && !takeover {
		return err // while there is somebody to tell
	}
	// Held until the session is up or has failed, like the one that a starter passes on.
	starting := func() {}
	lockSupervisor := func() error {
		ctx, cancel := context.WithTimeout(ctx, lockPatience)
		defer cancel()
		lock, err := w.SupervisorLock(ctx)
		var held *workspace.Held
		switch {
		case err == nil:
			keep[supervisorLock] = lock.File()
		case errors.As(err, &held):
			return rpc.Errorf(rpc.CodeConflict, "%s has a session already; its supervisor is %v", w.Dir, held.Holder).
				WithHint("use that one; or end it where it runs (mypr-mcp stop) and start this one again")
		}
		return err
	}
	if !takeover {
		ctx, cancel := context.WithTimeout(ctx, lockPatience)
		defer cancel()
		if !starter.Holds() {
			startup, err := w.StartupLock(ctx)
			if err != nil {
				return err
			}
			starting = func() { startup.Close() }
			defer starting()
		}
		if err := lockSupervisor(); err != nil {
			return err
		}
	}
	if err := w.PrepareRuntimeDir(); err != nil {
		return err
	}
	exe, err := executable()
	if err != nil {
		return err
	}
	origin := api.Origin{Source: "supervise", Program: parentName(), PID: os.Getppid(), Time: time.Now()}
	if starter != nil {
		origin = starter.Origin
	}
	tier, _ := strconv.Atoi(os.Getenv("MYPR_TIER")) // for tests: the supervisor checks it
	loader := units.NewLoader(w.Dir, exe, w.Stem())
	if err := checkUnits(loader); err != nil && !takeover {
		return err
	}
	told := ctx // ends at SIGTERM
	ctx, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	mode, cgroupParent := "standalone", ""
	// The first process of a pid namespace takes everything with it when it ends, so there
	// is nothing that an anchor could start it again for; the engine starts the container.
	init := os.Getpid() == 1
	var stopWithin time.Duration
	var container *systemd.Container
	var passed map[string][]*os.File
	if init {
		container = systemd.InContainer()
		passed = container.Sockets("runtime")
		mode, stopWithin = workspace.SourceContainer, containerGrace
		origin.Source = workspace.SourceContainer
	}
	if service != nil {
		mode = "systemd"
		origin.Source = "systemd"
		if starter != nil {
			origin.Source = starter.Origin.Source
		}
		// Without a scope everything still works, but a crash of the supervisor takes the
		// session along, as it would in any service.
		if cgroupParent, err = service.Scope("mypr-"+w.Hash[:12]+".scope", "Python session of "+w.Dir); err != nil {
			log.Error("there is no scope for the units; they end with the supervisor", "err", err)
		}
	}
	labels := workspace.Here().Labels()
	labels[workspace.LabelWorkspace], labels[workspace.LabelWorkspaceID], labels[workspace.LabelPinned] = w.Dir, w.ID, w.ID
	var failed error // of the first start
	sv, err := supervisor.New(supervisor.Options{
		Load: loader.Load, Names: loader.Names,
		ControlPath: w.Control, NotifyPath: w.Notify, StatePath: stateFile(w),
		CgroupName: "mypr-" + w.Hash[:12], ForceTier: tier,
		Instance: workspace.NewInstance(), Version: version(), Mode: mode, Executable: exe,
		CgroupParent: cgroupParent, ServiceManager: service != nil, StatusUnit: manager.ManagerUnit,
		Labels: labels, StopWithin: stopWithin,
		Logger: log, Keep: keep, Anchor: service == nil && !init, Inherited: passed,
		Begin: func(t supervisor.Takeover) error {
			if f := t.Kept[environmentFD]; f != nil {
				keep[environmentFD] = f
			}
			if f := t.Kept[supervisorLock]; f != nil {
				keep[supervisorLock] = f // for the whole life of the process
				workspace.LockFromFile(f).Describe()
			} else if takeover {
				if err := lockSupervisor(); err != nil {
					return err
				}
			}
			err := w.RecordSupervisor(ctx, t.Instance, version(), origin)
			if r, rerr := w.ReadRuntime(); err != nil && rerr == nil && r.Instance == t.Instance {
				// As on a full disk. What the one before us wrote leads to the session too.
				log.Warn("cannot record the supervisor", "error", err)
				return nil
			}
			return err
		},
		Ready: func(err error) {
			if err != nil && starter != nil {
				// Half a runtime would only be in the way. Whoever started us is told when it
				// is gone.
				failed = err
				end()
				return
			}
			starter.Report(err)
			starting()
			if err == nil {
				err = container.Say("READY=1")
			}
			if err != nil {
				log.Error("not ready", "err", err)
			}
		},
	})
	if err != nil {
		return err
	}
	defer context.AfterFunc(told, func() {
		if service != nil && !service.StopRequested(ctx) {
			log.Info("told to go, but not to stop the session: its units run on")
			sv.Leave()
			return
		}
		end()
	})()
	if err := sv.Run(ctx); err != nil {
		return err
	}
	if service != nil {
		service.EndScope()
	}
	return failed
}

// adoptEnvironment makes the environment that a starter sent this process's own, and
// that of an earlier process of the service when systemd has started it again.
func adoptEnvironment(starter *workspace.Starter, keep map[string]*os.File) error {
	var env []string
	if starter != nil && starter.Env != nil {
		env = starter.Env
		b, err := json.Marshal(env)
		if err != nil {
			return err
		}
		fd, err := unix.MemfdCreate(environmentFD, unix.MFD_CLOEXEC)
		if err != nil {
			return os.NewSyscallError("memfd_create", err)
		}
		f := os.NewFile(uintptr(fd), environmentFD)
		if _, err := f.WriteAt(b, 0); err != nil {
			return err
		}
		keep[environmentFD] = f
	} else if f := supervisor.Stored(environmentFD); f != nil {
		defer f.Close()
		b, err := io.ReadAll(io.NewSectionReader(f, 0, 16<<20))
		if err == nil {
			err = json.Unmarshal(b, &env)
		}
		if err != nil {
			return fmt.Errorf("the environment of the session is lost: %w", err)
		}
	}
	if env == nil {
		return nil
	}
	for _, name := range systemd.Variables {
		env = slices.DeleteFunc(env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	setEnvironment(env)
	return nil
}

// executable is a path of the program that runs. When its file was replaced or removed
// since, that is through this process, for as long as it lives.
func executable() (string, error) {
	exe, err := os.Executable()
	if err != nil {
		return "", err
	}
	at, err := os.Stat(exe)
	running, rerr := os.Stat("/proc/self/exe")
	if err != nil || rerr != nil || !os.SameFile(at, running) {
		self, err := os.Readlink("/proc/self") // the pid that it has where this /proc is from
		return "/proc/" + self + "/exe", err
	}
	return exe, nil
}

// checkUnits reads every unit file, so that a mistake in one is said to whoever starts
// the session, with its place, before anything runs.
func checkUnits(loader *units.Loader) error {
	names, err := loader.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, _, err := loader.Load(name); err != nil {
			return rpc.Errorf(rpc.CodeInvalidRequest, "%v", err).WithHint("correct the file, or move it away, and try again")
		}
	}
	return nil
}
