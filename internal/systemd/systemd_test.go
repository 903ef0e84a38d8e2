package systemd

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestTransientHasTheTemplatesProperties(t *testing.T) {
	got, err := properties()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"Type=notify", "Restart=always", "RestartPreventExitStatus=0 78", "SuccessExitStatus=75", "FileDescriptorStoreMax=4096",
		"WatchdogSec=20s", "StartLimitIntervalSec=0", "KillMode=control-group",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("%s is missing in %q", want, got)
		}
	}
	for _, p := range got {
		if strings.HasPrefix(p, "Exec") || strings.HasPrefix(p, "Requires") || strings.Contains(p, "%") {
			t.Errorf("%s is of the template alone", p)
		}
	}
}

func TestInstanceFiles(t *testing.T) {
	i, err := NewInstance("/home/me/my work-space", "/run/user/1/mypr/a%b.sock", `/opt/a "b"/my%pr`)
	if err != nil {
		t.Fatal(err)
	}
	if want := `mypr@home-me-my\x20work\x2dspace.service`; i.Service() != want {
		t.Errorf("%s, want %s", i.Service(), want)
	}
	files := i.Files()
	if !strings.Contains(files[0].Text, `ExecStart="/opt/a \"b\"/my%%pr" supervise -C %f`) || strings.Contains(files[0].Text, "%h") {
		t.Error(files[0].Text)
	}
	if !strings.Contains(files[2].Text, "ListenStream=\nListenStream=/run/user/1/mypr/a%%b.sock\n") {
		t.Error(files[2].Text)
	}
	if _, err := NewInstance("/"+strings.Repeat("long-", 60), "", ""); err == nil {
		t.Error("a name that is too long was accepted")
	}
}

func TestFieldNames(t *testing.T) {
	for key, want := range map[string]string{"unit": "MYPR_UNIT", "tier_reason": "MYPR_TIER_REASON", "a.b-ü": "MYPR_A_B__", strings.Repeat("x", 80): "MYPR_" + strings.Repeat("X", 59)} {
		if got := fieldName(key); got != want {
			t.Errorf("%q is %q, want %q", key, got, want)
		}
	}
}

// The manager's SIGTERM is for all processes of the service: it can hit the one that asks
// it what the signal meant.
func TestStopRequested(t *testing.T) {
	for jobs, want := range map[string]bool{
		`12 mypr@a\x20b.service stop running`:    true,
		`12 mypr@a\x20b.service restart running`: false,
		`12 mypr@other.service stop running`:     false,
		``:                                       false,
	} {
		dir := t.TempDir()
		script := "#!/bin/sh\nif mkdir " + dir + "/killed 2>/dev/null; then kill -TERM $$; fi\n" +
			"cat <<'EOF'\nJOB UNIT TYPE STATE\n" + jobs + "\n1 jobs listed.\nEOF\n"
		if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
		s := &Service{Unit: `mypr@a\x20b.service`, user: true}
		if got := s.StopRequested(t.Context()); got != want {
			t.Errorf("%q: %v", jobs, got)
		}
		if _, err := os.Stat(filepath.Join(dir, "killed")); err != nil {
			t.Error(err)
		}
	}
}
