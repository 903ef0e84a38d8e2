package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"mypr/internal/api"
	"mypr/internal/config"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/supervisor"
	"mypr/units"
)

func (c *cli) superviseCommand() *cobra.Command {
	return &cobra.Command{
		Use: "supervise", Short: "Run the supervisor in the foreground", Args: cobra.NoArgs, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			starter := workspace.TakeStarter()
			err := c.supervise(cmd.Context(), starter)
			starter.Report(err) // counts only when ready was never reported
			return err
		},
	}
}

// supervisorLock names the held lock among the descriptors that go over a re-execution.
const supervisorLock = "supervisor.lock"

// lockPatience is how long a lock may be held by one who only looks, or is about to end.
const lockPatience = 5 * time.Second

func (c *cli) supervise(ctx context.Context, starter *workspace.Starter) error {
	syscall.Umask(0o077)
	log := slog.New(slog.NewTextHandler(c.stderr, nil))
	w, err := c.workspace()
	if err != nil {
		return err
	}
	if err := w.EnsureLayout(); err != nil {
		return err
	}
	// Who takes over what runs does not refuse for a file that was spoilt meanwhile, and
	// does not look for another runtime: the sockets came along.
	takeover := supervisor.TakesOver()
	if _, _, err := config.Load(w.Root); err != nil && !takeover {
		return err // while there is somebody to tell
	}
	keep := map[string]*os.File{}
	// Held until the session is up or has failed, like the one that a starter passes on.
	starting := func() {}
	lockSupervisor := func() error {
		ctx, cancel := context.WithTimeout(ctx, lockPatience)
		defer cancel()
		lock, err := w.SupervisorLock(ctx)
		if err == nil {
			keep[supervisorLock] = lock.File()
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
	ctx, end := context.WithCancel(ctx)
	defer end()
	var failed error // of the first start
	sv, err := supervisor.New(supervisor.Options{
		Load: loader.Load, Names: loader.Names,
		ControlPath: w.Control, NotifyPath: w.Notify, StatePath: filepath.Join(w.Root, "supervisor.json"),
		CgroupName: "mypr-" + w.Hash[:12], ForceTier: tier,
		Instance: workspace.NewInstance(), Version: version(), Mode: "standalone", Executable: exe,
		Labels: map[string]string{workspace.LabelWorkspace: w.Dir, workspace.LabelWorkspaceID: w.ID},
		Logger: log, Keep: keep, Anchor: true,
		Begin: func(t supervisor.Takeover) error {
			if f := t.Kept[supervisorLock]; f != nil {
				keep[supervisorLock] = f // for the whole life of the process
			} else if takeover {
				if err := lockSupervisor(); err != nil {
					return err
				}
			}
			return w.RecordSupervisor(ctx, t.Instance, version(), origin)
		},
		Ready: func(err error) {
			starter.Report(err)
			starting()
			if err != nil && starter != nil {
				failed = err
				end() // whoever started us was told; half a runtime would only be in the way
			}
		},
	})
	if err != nil {
		return err
	}
	if err := sv.Run(ctx); err != nil {
		return err
	}
	return failed
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
		return fmt.Sprintf("/proc/%d/exe", os.Getpid()), nil
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
