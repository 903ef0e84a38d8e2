package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"mypr/internal/api"
)

// upgrade restarts a session into other versions, good and broken ones, and checks what
// runs afterwards and what was kept.
type upgrade struct {
	s   *session
	bad int
}

// variant builds the program with a version and, in one file, one text replaced.
func variant(dir, version, file, old, new string) (string, error) {
	path := filepath.Join(dir, "mypr-mcp-"+version)
	args := []string{"build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -X main.buildVersion=" + version, "-o", path}
	if file != "" {
		source, err := filepath.Abs(file)
		if err != nil {
			return "", err
		}
		text, err := os.ReadFile(source)
		if err != nil {
			return "", err
		}
		if !strings.Contains(string(text), old) {
			return "", fmt.Errorf("%s has no %q", file, old)
		}
		changed := filepath.Join(dir, version+".go")
		if err := os.WriteFile(changed, []byte(strings.Replace(string(text), old, new, 1)), 0o600); err != nil {
			return "", err
		}
		overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{source: changed}})
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(changed+".json", overlay, 0o600); err != nil {
			return "", err
		}
		args = append(args, "-overlay", changed+".json")
	}
	cmd := exec.Command("go", append(args, "./cmd/mypr-mcp")...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building %s: %w: %s", version, err, out)
	}
	return path, nil
}

func (v *upgrade) check(what string, ok bool, detail any) {
	verdict := "ok"
	if !ok {
		verdict = fmt.Sprintf("BROKEN: %v", detail)
		broken(what, detail)
		v.bad++
	}
	fmt.Printf("| %-72s | %s\n", what, verdict)
}

func (v *upgrade) run() bool {
	if err := v.all(); err != nil {
		broken("upgrade", err)
		return false
	}
	return v.bad == 0
}

func (v *upgrade) with(bin string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := v.s.command(ctx, args...)
	cmd.Path = bin
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (v *upgrade) versions() (string, error) {
	out, err := v.s.cli("status", "--json")
	if err != nil {
		return "", err
	}
	var r api.StatusReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || r.Status == nil || r.Supervisor == nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return r.Supervisor.Version + " " + r.Status.ManagerVersion, nil
}

func (v *upgrade) record() (r api.RestartResult) {
	raw, _ := os.ReadFile(filepath.Join(v.s.dir, ".mypr", "restart.json"))
	_ = json.Unmarshal(raw, &r)
	return r
}

func (v *upgrade) all() error {
	dir := v.s.root
	const entry, supervise = "syscall.Umask(0o077)\n", "keep := map[string]*os.File{}\n"
	good, err := variant(dir, "good", "", "", "")
	if err != nil {
		return err
	}
	old, err := variant(dir, "old", "", "", "")
	if err != nil {
		return err
	}
	noManager, err := variant(dir, "no-manager", "cmd/mypr-mcp/manager.go", entry, entry+"	os.Exit(7)\n")
	if err != nil {
		return err
	}
	noSupervisor, err := variant(dir, "no-supervisor", "cmd/mypr-mcp/supervise.go", supervise, supervise+"	os.Exit(7)\n")
	if err != nil {
		return err
	}
	foreign, err := variant(dir, "foreign", "internal/api/api.go", "const Protocol = 1", "const Protocol = 2")
	if err != nil {
		return err
	}
	place := filepath.Join(dir, "installed")
	install := func(from string) error {
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(place+".new", b, 0o700)
		}
		if err == nil {
			err = os.Rename(place+".new", place)
		}
		return err
	}
	if err := install(old); err != nil {
		return err
	}
	v.s.bin = place
	f, err := v.s.front()
	if err != nil {
		return err
	}
	defer f.end()
	if err := f.init("upgrader"); err != nil {
		return err
	}
	if _, err := must(f, "kept = 42; import os; pid = os.getpid()"); err != nil {
		return err
	}
	alive := func(what, versions string) {
		out, err := must(f, "print(kept, os.getpid() == pid)")
		got, verr := v.versions()
		v.check(what, err == nil && verr == nil && out == "42 True" && got == versions+" "+versions, fmt.Sprint(out, " ", err, " ", got, " ", verr))
	}
	alive("before: supervisor and manager have the installed version", "old")

	out, err := v.with(noManager, "restart", "--keep-kernel")
	v.check("a version whose manager does not start: refused with what was done", err != nil && strings.Contains(out, "version old was put back and runs again"), out)
	alive("… the old version runs again, memory is kept", "old")
	r := v.record()
	v.check("… and the record says so", r.State == "failed" && strings.Contains(r.Error, "no-manager") && strings.Contains(r.Error, "old"), fmt.Sprintf("%+v", r))

	out, err = v.with(noSupervisor, "restart", "--keep-kernel")
	v.check("a version whose supervisor does not start: refused", err != nil && strings.Contains(out, "supervisor runs version old"), out)
	alive("… the old version runs, memory is kept", "old")

	if err := install(noManager); err != nil {
		return err
	}
	out, err = v.with(place, "restart", "--keep-kernel")
	v.check("a broken version installed over the old one: refused", err != nil && strings.Contains(out, "version old was put back and runs again"), out)
	v.s.bin = old
	alive("… the overwritten old version runs again, memory is kept", "old")
	v.s.bin = place

	c, err := f.run("await ws.restart(keep_kernel=True)", "")
	v.check("the same from a cell: the cell says it", err == nil && (c.state == api.Lost || c.state == api.FailedCell) && strings.Contains(c.err+c.output, "put back"), fmt.Sprintf("%v %+v", err, c))
	v.s.bin = old
	alive("… the overwritten old version runs again, memory is kept", "old")
	v.s.bin = place

	if err := install(good); err != nil {
		return err
	}
	out, err = v.s.cli("status", "--json")
	v.check("a new version installed: status says that an update is pending", err == nil && strings.Contains(out, `"update_pending": true`), fmt.Sprint(out, err))
	c, err = f.run("await ws.restart(keep_kernel=True); print('after', kept)", "")
	v.check("ws.restart(keep_kernel=True) of a good version: the cell succeeds", err == nil && c.state == api.Succeeded, fmt.Sprintf("%v %+v", err, c))
	alive("… the new version runs, memory is kept", "good")
	var in api.InitResult
	err = f.tool("init", map[string]any{"client_id": "upgrader"}, &in)
	v.check("… an older front end goes on and says that an update is pending", err == nil && in.Runtime.UpdatePending && in.Runtime.ManagerVersion == "good" && in.Runtime.BridgeVersion == "old", fmt.Sprintf("%v %+v", err, in.Runtime))

	out, err = v.with(foreign, "exec", "1")
	v.check("another protocol: refused with what to run", err != nil && strings.Contains(out, "protocol") && strings.Contains(out, "mypr-mcp restart"), out)
	out, err = v.with(old, "restart", "--force")
	v.check("back to the old version with a new kernel", err == nil, out)
	got, err := v.versions()
	v.check("… runs", err == nil && got == "old old", fmt.Sprint(got, err))
	f.end()
	if out, err := v.s.cli("stop", "--force"); err != nil {
		return fmt.Errorf("%w %s", err, out)
	}
	left := v.s.processes()
	v.check("nothing is left", len(left) == 0, left)
	return nil
}
