package workspace

import (
	"bufio"
	"os"
	"slices"
	"strconv"
	"strings"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// passwdFile is a variable for the tests alone.
var passwdFile = "/etc/passwd"

// FillEnvironment completes an environment that a client stripped before it started
// us, with what a login would have set: PATH, HOME, USER, LOGNAME and SHELL from the
// user's passwd entry, XDG_RUNTIME_DIR where logind made it. Variables that are set
// and not empty stay. It returns a new slice and the names it set, sorted.
func FillEnvironment(env []string) (filled, changed []string) {
	have := map[string]bool{}
	for _, e := range env {
		if name, value, _ := strings.Cut(e, "="); value != "" {
			have[name] = true
		}
	}
	filled = slices.Clone(env)
	set := func(name, value string) {
		if have[name] || value == "" {
			return
		}
		filled = slices.DeleteFunc(filled, func(e string) bool { return strings.HasPrefix(e, name+"=") })
		filled = append(filled, name+"="+value)
		changed = append(changed, name)
	}
	set("PATH", defaultPath)
	set("XDG_RUNTIME_DIR", ownRunUserDir())
	name, home, shell := passwd(os.Getuid())
	set("HOME", home)
	set("USER", name)
	set("LOGNAME", name)
	set("SHELL", shell)
	slices.Sort(changed)
	return filled, changed
}

// passwd reads a user's name, home and shell. The os/user package knows no shells.
func passwd(uid int) (name, home, shell string) {
	f, err := os.Open(passwdFile)
	if err != nil {
		return "", "", ""
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		p := strings.Split(s.Text(), ":")
		if len(p) == 7 && p[2] == strconv.Itoa(uid) {
			return p[0], p[5], p[6]
		}
	}
	return "", "", ""
}
