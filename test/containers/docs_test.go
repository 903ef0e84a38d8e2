package containers

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// guide has the shell blocks of docs/CONTAINERS.md. The images are built by the first,
// and those with systemctl are TestQuadlet's.
func guide() (blocks []string) {
	text, err := os.ReadFile("../../docs/CONTAINERS.md")
	if err != nil {
		panic(err)
	}
	for i, part := range strings.Split(string(text), "```") {
		if code, ok := strings.CutPrefix(part, "sh\n"); ok && i%2 == 1 {
			blocks = append(blocks, strings.TrimSpace(code))
		}
	}
	return blocks
}

// TestDocs runs every other command of the guide, in its order, in one workspace.
func TestDocs(t *testing.T) {
	p := someone(t, "rootless")
	p.images(t)
	dir := p.workspace(t)
	host := p.host(t, dir)
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := p.script(dir, "for c in $(podman ps -aq); do podman logs --tail 20 $c; podman rm --force --time 0 $c; done")
			t.Log(out)
		}
		_, _ = host.run("stop", "--force")
		if out := p.must(t, "podman", "ps", "-aq"); out != "" {
			t.Errorf("containers are left: %s", out)
		}
	})
	ran := 0
	for _, block := range guide() {
		if strings.HasPrefix(block, "podman build") || strings.Contains(block, "systemctl") {
			continue
		}
		ran++
		out, err := p.script(dir, "export WORKSPACE=\"$PWD\"\n"+block) // of an earlier block, in the same shell
		if err != nil {
			t.Fatalf("%s: %v\n%s", block, err, out)
		}
		command := last(block)
		switch {
		case strings.HasSuffix(block, "exec x"), strings.Contains(block, "exec x\n"), strings.Contains(block, "exec '6 * 7'"):
			if !strings.Contains(out, "42") {
				t.Errorf("%s: %s", block, out)
			}
		case strings.HasSuffix(command, "mypr-mcp status"):
			if !strings.Contains(out, "podman container") {
				t.Errorf("%s: %s", block, out)
			}
		case strings.Contains(command, "podman run -d"):
			p.answers(t, host)
		case strings.Contains(command, "up -d"):
			p.answers(t, p.in(t, "containers_session_1", "/workspace"))
		}
	}
	if ran < 13 {
		t.Errorf("only %d blocks found", ran)
	}
	for _, name := range []string{"devcontainer.json", "mypr/devcontainer-feature.json", "mypr/install.sh", "mypr/mypr-mcp"} {
		if _, err := os.Stat(filepath.Join(dir, ".devcontainer", name)); err != nil {
			t.Error(err)
		}
	}
}

// The image with the program alone has it in a layer to copy from.
func TestBinaryImage(t *testing.T) {
	p := someone(t, "rootless")
	p.images(t)
	if out := p.must(t, "podman", "run", "--rm", binaryImage, "version"); !strings.Contains(out, "mypr-mcp ") {
		t.Errorf("version: %s", out)
	}
	text, err := os.ReadFile("../../docs/CONTAINERS.md")
	if err != nil {
		t.Fatal(err)
	}
	_, copyFrom, found := strings.Cut(string(text), "```Dockerfile\n")
	copyFrom, _, end := strings.Cut(copyFrom, "```")
	if !found || !end {
		t.Fatal("the guide does not say how to copy from the image")
	}
	dir := p.directory(t)
	script := "printf '%s' 'FROM " + pythonImage + "\n" + copyFrom + "' > Containerfile\n" +
		"podman build --quiet -t localhost/derived .\npodman run --rm localhost/derived sh -c 'ls / && mypr-mcp version'\npodman rmi localhost/derived"
	out, err := p.script(dir, script)
	if err != nil || !strings.Contains(out, "mypr-mcp ") || !strings.Contains(out, "usr") {
		t.Errorf("%v\n%s", err, out)
	}
}
