package supervisor_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mypr/supervisor/spec"
)

// needControllers: limits need cgroup controllers, which a machine with the old
// hierarchies mounted does not have in version 2.
func needControllers(t *testing.T) {
	if !hasControllers() {
		t.Skip("no memory and pids controllers in this process's cgroup v2 group")
	}
}

const hog = `echo begin; head -c 80M /dev/zero | tail -c 70M | wc -c; echo survived`

func TestMemoryMax(t *testing.T) {
	needControllers(t)
	for _, c := range []struct{ policy, result, out string }{
		{"", "oom-kill", "begin\n"},
		{"kill", "oom-kill", "begin\n"},
		{"continue", "success", "begin\n0\nsurvived\n"},
	} {
		e := start(t, 1)
		u := shell("hog.service", hog)
		u.Service.MemoryMax, u.Service.MemorySwapMax, u.Service.OOMPolicy = 32<<20, 1, c.policy
		u.Service.StandardError = spec.StdioNull // the shell says "Killed" there
		out, st := e.output(u, nil)
		if st.Result != c.result || st.OOMKills == 0 || st.MemoryMax != 32<<20 || st.MemoryPeak < 16<<20 || st.MemoryPeak > 33<<20 || out != c.out {
			t.Errorf("OOMPolicy=%s: output %q, %+v", c.policy, out, st)
		}
		e.c.Close()
		e.stop()
	}
	// The main process itself is killed.
	e := start(t, 1)
	u := role("eater.service", "eat")
	u.Service.MemoryMax, u.Service.MemorySwapMax = 64<<20, 1
	r := e.transient(u)
	if st := e.wait(u.Name, r.Unit.InvocationID); st.Result != "oom-kill" || st.ExitSignal != 9 || st.OOMKills == 0 {
		t.Errorf("%+v", st)
	}
}

func TestTasksMaxAndCPU(t *testing.T) {
	needControllers(t)
	e := start(t, 1)
	u := shell("t.service", `for i in 1 2 3 4 5 6 7 8 9; do sleep 1000 & done; echo $?; exec sleep 1000`)
	u.Service.TasksMax, u.Service.CPUQuota, u.Service.CPUWeight, u.Service.MemoryHigh = 5, 500_000, 42, 1<<30
	u.Service.StandardError = spec.StdioNull
	r := e.transient(u)
	for file, want := range map[string]string{"pids.max": "5", "cpu.max": "50000 100000", "cpu.weight": "42", "memory.high": "1073741824"} {
		b, err := os.ReadFile(filepath.Join(r.Unit.Cgroup, file))
		if err != nil || strings.TrimSpace(string(b)) != want {
			t.Errorf("%s: %q %v, want %s", file, b, err, want)
		}
	}
	if st := e.status(u.Name); st.Processes > 5 {
		t.Errorf("%+v", st)
	}
}
