package main

import (
	"os"
	"testing"
)

// A mistake in the arguments is told in words of this program, with what is right.
func TestMistakes(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"stauts"}, "mypr-mcp: there is no command \"stauts\"; did you mean status? (mypr-mcp help lists them)\n"},
		{[]string{"doctor"}, "mypr-mcp: there is no command \"doctor\" (mypr-mcp help lists them)\n"},
		{[]string{"show"}, "mypr-mcp: there is no command \"show\" (mypr-mcp help lists them)\n"},
		{[]string{"help", "stauts"}, "mypr-mcp: there is no command \"stauts\"; did you mean status? (mypr-mcp help lists them)\n"},
		{[]string{"help", "units", "lists"}, "mypr-mcp: there is no command \"units lists\"; did you mean list? (mypr-mcp units --help lists them)\n"},
		{[]string{"units", "restrat", "kernel"}, "mypr-mcp: there is no command \"units restrat\"; did you mean restart? (mypr-mcp units --help lists them)\n"},
		{[]string{"units", "stop"}, "mypr-mcp: units stop needs the name of one unit (mypr-mcp units lists them)\n"},
		{[]string{"status", "x"}, "mypr-mcp: status takes no argument, not \"x\"\nnext: mypr-mcp status --help\n"},
		{[]string{"exec", "print(1)", "2"}, "mypr-mcp: exec takes one argument, not 2: quote what has spaces in it\nnext: mypr-mcp exec --help\n"},
		{[]string{"exec", "--timeout", "5", "1"}, "mypr-mcp: --timeout takes a time such as 30s, 5m or 1h30m, not \"5\"\nnext: mypr-mcp exec --help\n"},
		{[]string{"exec", "--timeout", "-5s", "1"}, "mypr-mcp: --timeout takes a time from now on, not -5s\n"},
		{[]string{"logs", "--limit", "x"}, "mypr-mcp: --limit takes a whole number, not \"x\"\nnext: mypr-mcp logs --help\n"},
		{[]string{"logs", "--limit", "0"}, "mypr-mcp: --limit takes 1 to 200, not 0\n"},
		{[]string{"status", "--json=maybe"}, "mypr-mcp: --json takes true or false, not \"maybe\"\nnext: mypr-mcp status --help\n"},
	} {
		said, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		c := &cli{stdin: os.Stdin, stdout: said, stderr: said}
		root := c.command()
		root.SetArgs(tt.args)
		status := c.status(root.ExecuteContext(t.Context()))
		got, err := os.ReadFile(said.Name())
		if err != nil || said.Close() != nil || status != exitUsage || string(got) != tt.want {
			t.Errorf("%q: exit %d, %v, it says\n%swant\n%s", tt.args, status, err, got, tt.want)
		}
	}
}
