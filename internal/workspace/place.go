package workspace

import (
	"bufio"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Place says where a process runs, for people and for processes elsewhere: which
// numbers of it mean something to them. What a container calls itself is a hint that
// its engine left; nothing but texts depends on it.
type Place struct {
	Host           string `json:"host,omitempty"`            // host name there
	Container      string `json:"container,omitempty"`       // "podman container web (0123456789ab)"; "": none that can be told
	PIDNamespace   string `json:"pid_namespace,omitempty"`   // inode number of /proc/self/ns/pid
	MountNamespace string `json:"mount_namespace,omitempty"` // likewise
}

// Here is where this process runs.
var Here = sync.OnceValue(func() Place {
	host, _ := os.Hostname()
	return Place{Host: host, Container: container("/", host), PIDNamespace: namespace("pid"), MountNamespace: namespace("mnt")}
})

// initialPIDNamespace is the number of the machine's own pid namespace on every Linux
// (PROC_PID_INIT_INO).
const initialPIDNamespace = "4026531836"

// SamePIDs reports whether pids of p mean the same here.
func (p Place) SamePIDs() bool { return p.PIDNamespace == "" || p.PIDNamespace == Here().PIDNamespace }

// SameFiles reports whether paths of p mean the same here.
func (p Place) SameFiles() bool {
	return p.MountNamespace == "" || p.MountNamespace == Here().MountNamespace
}

// String names the place as seen from here.
func (p Place) String() string {
	here := Here()
	elsewhere := ""
	if p.Host != "" && p.Host != here.Host && !strings.Contains(p.Container, p.Host) {
		elsewhere = ", host name " + p.Host
	}
	switch {
	case p.SamePIDs() && here.Container != "":
		return "here, in " + here.Container
	case p.SamePIDs():
		return "here"
	case p.Container != "":
		return p.Container + elsewhere
	case p.PIDNamespace == initialPIDNamespace:
		return "the host, outside of this container" + elsewhere
	}
	return "another pid namespace (" + p.PIDNamespace + ")" + elsewhere
}

// containerID finds the id of a container in what its engine mounted over the network
// files of /etc: ".../containers/ID/hostname", ".../overlay-containers/ID/userdata/hosts".
var containerID = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`containers/([0-9a-f]{64})/\S* /etc/(?:hostname|hosts|resolv\.conf) `)
})

// container names the container that the file system at root belongs to, by the marks
// that engines leave. "" when there is none.
func container(root, host string) string {
	engine, name, id := os.Getenv("container"), "", "" // systemd's convention (CONTAINER_INTERFACE)
	if f, err := os.Open(filepath.Join(root, "run/.containerenv")); err == nil {
		engine = cmp.Or(engine, "podman")
		for s := bufio.NewScanner(f); s.Scan(); { // empty but for privileged containers
			key, value, _ := strings.Cut(s.Text(), "=")
			if v, err := strconv.Unquote(value); err == nil {
				switch key {
				case "name":
					name = v
				case "id":
					id = v
				}
			}
		}
		f.Close()
	} else if _, err := os.Stat(filepath.Join(root, ".dockerenv")); err == nil {
		engine = cmp.Or(engine, "docker")
	}
	if engine == "oci" {
		engine = "podman"
	}
	if id == "" {
		if b, err := os.ReadFile(filepath.Join(root, "proc/self/mountinfo")); err == nil {
			if m := containerID().FindSubmatch(b); m != nil {
				id = string(m[1])
			}
		}
	}
	if engine == "" && id == "" {
		return ""
	}
	text := strings.TrimSpace(engine + " container " + cmp.Or(name, host))
	if len(id) > 12 {
		id = id[:12]
	}
	if id != "" && id != cmp.Or(name, host) {
		text += " (" + id + ")"
	}
	return text
}

func namespace(kind string) string {
	var st unix.Stat_t
	if unix.Stat("/proc/self/ns/"+kind, &st) != nil {
		return ""
	}
	return fmt.Sprint(st.Ino)
}

// Labels under which the supervisor's Info carries its Place, besides the pid namespace.
const (
	LabelHost           = "host"
	LabelContainer      = "container"
	LabelMountNamespace = "mount_namespace"
)

// Labels is the place as labels of a supervisor.
func (p Place) Labels() map[string]string {
	return map[string]string{LabelHost: p.Host, LabelContainer: p.Container, LabelMountNamespace: p.MountNamespace}
}

// Place is where the runtime's supervisor runs; without one it is not known.
func (l *Location) Place() Place {
	if l.Supervisor == nil {
		return Place{}
	}
	m := l.Supervisor.Labels
	return Place{Host: m[LabelHost], Container: m[LabelContainer], PIDNamespace: l.Supervisor.PIDNamespace, MountNamespace: m[LabelMountNamespace]}
}

// brokenMount says why a socket's path can lead nowhere although its owner listens: the
// path is a mount of its own, of a socket file that was replaced since, or it lies in a
// mounted directory that was removed since. "" when it is neither.
func brokenMount(socket string) string {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return ""
	}
	defer f.Close()
	dir, why := filepath.Dir(socket), ""
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		fields := strings.Fields(s.Text())
		if len(fields) < 5 {
			continue
		}
		root, point := unescapeMount(fields[3]), unescapeMount(fields[4])
		switch {
		case point == socket:
			why = "here " + socket + " is a mount of the socket file alone, which still leads to the socket of an earlier start"
		case strings.HasSuffix(root, "//deleted") && (dir == point || strings.HasPrefix(dir, point+"/")):
			why = "the directory that is mounted here at " + point + " was removed and made again since, and this mount still leads to the old one"
		}
	}
	return why
}

// unescapeMount undoes the octal escapes of mountinfo (proc_pid_mountinfo(5)).
func unescapeMount(s string) string {
	return mountEscape().ReplaceAllStringFunc(s, func(m string) string {
		n, _ := strconv.ParseUint(m[1:], 8, 8)
		return string([]byte{byte(n)})
	})
}

var mountEscape = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`\\[0-7]{3}`) })
