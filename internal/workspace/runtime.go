package workspace

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"mypr/internal/api"
)

// Runtime is .mypr/runtime.json: where the workspace's runtime is and what it is.
// The supervisor's program writes it before its sockets listen, the manager when it
// starts and with each new kernel. It outlives the runtime; only a connection or a
// held lock says that one runs.
type Runtime struct {
	Workspace   string `json:"workspace"`
	WorkspaceID string `json:"workspace_id"`
	Instance    string `json:"instance"` // of the supervisor; kept over re-execution and adoption
	Version     string `json:"version"`
	Protocol    int    `json:"protocol"`
	Generation  string `json:"generation"` // of the kernel; "" while there is none
	PID         int    `json:"pid"`        // the manager's, in its own pid namespace
	Paths
	Supervisor  Process    `json:"supervisor"`
	Manager     Process    `json:"manager"`
	Environment api.Origin `json:"environment"` // who started it, and so whose environment it has
}

// Process is one process of the runtime. The pid means something only in its place's
// pid namespace, the path of the executable only in its mount namespace.
type Process struct {
	PID int `json:"pid,omitempty"`
	Place
	Started    time.Time `json:"started,omitzero"`
	Executable string    `json:"executable,omitempty"`
	Version    string    `json:"version,omitempty"`
}

// Self describes the calling process, as started now.
func Self(version string) Process {
	exe, _ := os.Executable()
	return Process{PID: os.Getpid(), Place: Here(), Started: time.Now(), Executable: exe, Version: version}
}

// NewInstance is a fresh random instance id.
func NewInstance() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never fails (Go 1.24)
	return hex.EncodeToString(b[:])
}

func (w *Workspace) runtimeFile() string { return filepath.Join(w.Root, "runtime.json") }

// maxRecord bounds runtime.json, which a checkout of somebody else's could bring along.
const maxRecord = 64 << 10

// ReadRuntime reads the record. Without one the error wraps fs.ErrNotExist.
func (w *Workspace) ReadRuntime() (*Runtime, error) {
	f, err := os.Open(w.runtimeFile())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxRecord {
		return nil, fmt.Errorf("%s is larger than %d bytes", w.runtimeFile(), maxRecord)
	}
	r := new(Runtime)
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("cannot read %s: %w", w.runtimeFile(), err)
	}
	return r, nil
}

// UpdateRuntime changes the record under a lock, so that the supervisor's program and
// the manager do not undo each other's fields, and replaces it by rename, so that a
// reader sees the old one or the new one. A record that is missing, damaged or of
// another directory counts as empty.
func (w *Workspace) UpdateRuntime(ctx context.Context, change func(*Runtime)) error {
	lock, err := AcquireLock(ctx, filepath.Join(w.Root, "runtime.lock"))
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", w.runtimeFile(), err)
	}
	defer lock.Close()
	r, err := w.ReadRuntime()
	if err != nil || r.WorkspaceID != w.ID {
		r = &Runtime{Paths: w.Paths}
	}
	r.Workspace, r.WorkspaceID, r.Protocol = w.Dir, w.ID, api.Protocol
	change(r)
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	// No fsync: the record describes running processes, none of which survives the
	// power failure that could lose it.
	tmp, err := os.CreateTemp(w.Root, ".runtime-*.json") // mode 0600
	if err == nil {
		_, err = tmp.Write(append(b, '\n'))
		err = errors.Join(err, tmp.Close())
		if err == nil {
			err = os.Rename(tmp.Name(), w.runtimeFile())
		}
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", w.runtimeFile(), err)
	}
	return nil
}

// RecordSupervisor writes the calling process into the record as the supervisor with
// this instance. It must come before the sockets listen: a runtime whose instance is
// not recorded is taken for a stranger's.
func (w *Workspace) RecordSupervisor(ctx context.Context, instance, version string, origin api.Origin) error {
	return w.UpdateRuntime(ctx, func(r *Runtime) {
		if r.Instance != instance {
			*r = Runtime{Workspace: r.Workspace, WorkspaceID: r.WorkspaceID, Protocol: r.Protocol}
			r.Instance, r.Environment = instance, origin
		}
		r.Version, r.Paths, r.Supervisor = version, w.Paths, Self(version)
	})
}

// SourceContainer is the Source of the environment of a runtime whose supervisor is the
// first process of its pid namespace: the container's own.
const SourceContainer = "container"

// owner is the container whose runtime this workspace's is, as seen from outside of it.
// Such a runtime is started with its container and by nobody else: another one here would
// be of another system, with another Python, and be in the container's way.
func (r *Runtime) owner() string {
	if r == nil || r.Environment.Source != SourceContainer || r.Supervisor.SamePIDs() {
		return ""
	}
	return r.Supervisor.Place.String()
}

// GiveUp makes the workspace nobody's: the next client that needs a runtime starts it
// where it is. It tells whose it was, "" when it was no container's.
func (w *Workspace) GiveUp(ctx context.Context) (string, error) {
	owner := w.recorded().owner()
	if owner == "" {
		return "", nil
	}
	return owner, w.UpdateRuntime(ctx, func(r *Runtime) { r.Environment = api.Origin{} })
}

// recorded is the record if it is one of this directory, else nil.
func (w *Workspace) recorded() *Runtime {
	r, err := w.ReadRuntime()
	if err != nil || r.WorkspaceID != w.ID {
		return nil
	}
	return r
}

// programName is this program with its verb: "mypr-mcp manager".
func programName() string {
	name := filepath.Base(os.Args[0])
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		name += " " + os.Args[1]
	}
	return name
}
