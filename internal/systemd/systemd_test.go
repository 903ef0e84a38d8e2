package systemd

import (
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
