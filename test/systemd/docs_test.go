package systemd

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestDocs runs every command of docs/SYSTEMD.md, in an order in which each makes sense.
func TestDocs(t *testing.T) {
	text, err := os.ReadFile(os.Getenv("MYPR_TEST_DOCS"))
	if err != nil {
		t.Fatal(err)
	}
	var blocks []string
	for i, part := range strings.Split(string(text), "```") {
		if code, ok := strings.CutPrefix(part, "sh\n"); ok && i%2 == 1 {
			blocks = append(blocks, strings.TrimSpace(code))
		}
	}
	// Commands in the table of what systemctl does.
	for _, line := range strings.Split(string(text), "\n") {
		if row := strings.Split(line, "`"); strings.HasPrefix(line, "| `") && strings.Contains(row[1], " ") && !strings.Contains(line, "templates") {
			blocks = append(blocks, row[1])
		}
	}
	s := newSession(t)
	t.Cleanup(s.nothingLeft)
	path := "PATH=" + filepath.Dir(bin) + ":" + os.Getenv("PATH")
	shell := func(script string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "sh", "-ec", script)
		cmd.Dir, cmd.Env = s.dir, append(os.Environ(), path, "PAGER=cat", "SYSTEMD_PAGER=cat")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	const unit = "unit=\"mypr@$(systemd-escape --path \"$PWD\").service\"\n"
	var disable, down string
	ran := map[string]bool{}
	for _, b := range blocks {
		switch {
		case ran[b]:
			continue
		case strings.HasPrefix(b, "mypr-mcp systemd disable"):
			disable = b
			continue
		case strings.Contains(b, ".socket\" "):
			down = b // after everything else
			continue
		case strings.HasPrefix(b, "loginctl"):
			continue // there is no logind here: test/systemd/boot runs it
		}
		ran[b] = true
		if strings.Contains(b, "status") || strings.Contains(b, "restart") || strings.Contains(b, "reload") || strings.Contains(b, "logs") {
			s.ok("exec", "1")
		}
		if out, err := shell(unit + b); err != nil || strings.TrimSpace(out) == "" && !strings.Contains(b, "systemctl") && !strings.HasPrefix(b, "unit=") {
			t.Errorf("%s: %v\n%s", b, err, out)
		}
	}
	if len(ran) < 11 {
		t.Errorf("only %d commands found", len(ran))
	}
	if out, err := shell(unit + down); err != nil || property(t, s.socket(), "ActiveState") != "inactive" {
		t.Errorf("%s: %v\n%s", down, err, out)
	}
	if out, err := shell(disable); err != nil || !strings.Contains(out, "removed") {
		t.Errorf("%s: %v\n%s", disable, err, out)
	}
}
