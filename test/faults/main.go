// Command faults kills the parts of a running session for a living and checks that
// nothing is lost that can be kept, nothing runs twice and nothing is left.
//
// It runs the built program (-bin) in temporary workspaces with runtime directories of
// their own. "faults soak" throws random faults at a session with four MCP clients and
// jobs; "faults recovery" measures how long each kind of recovery takes; "faults
// survive" checks what lives through each fault. The exit status is 1 when a promise
// was broken.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

func main() {
	bin := flag.String("bin", "bin/mypr-mcp", "the program")
	n := flag.Int("n", 300, "faults of a soak")
	kernels := flag.Bool("kernel", false, "soak: kill the kernel too")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the random faults")
	sleep := flag.Int("sleep", 60, "survive: seconds that the awaiting cell sleeps")
	rounds := flag.Int("rounds", 5, "recovery: how often each is measured")
	keep := flag.Bool("keep", false, "leave the workspace for a look")
	flag.Parse()
	path, err := filepath.Abs(*bin)
	if err != nil {
		fatal(err)
	}
	ok := true
	for _, what := range flag.Args() {
		if what == "uml" {
			verbose := ""
			if *keep {
				verbose = "yes"
			}
			ok = uml(path, verbose) && ok
			continue
		}
		s, err := newSession(path)
		if err != nil {
			fatal(err)
		}
		good := false
		switch what {
		case "soak":
			good = (&soak{s: s, faults: *n, kernels: *kernels, seed: *seed}).run()
		case "leftovers":
			good = (&leftovers{s: s}).run()
		case "limits":
			good = (&limits{s: s}).run()
		case "upgrade":
			good = (&upgrade{s: s}).run()
		case "recovery":
			good = (&recovery{s: s, rounds: *rounds}).run()
		case "survive":
			other, err := variant(s.root, otherVersion, "", "", "")
			if err != nil {
				fatal(err)
			}
			good = (&survive{s: s, other: other, sleep: *sleep}).run()
		default:
			fatal(fmt.Errorf("unknown: %s", what))
		}
		ok = ok && good
		if *keep || !good {
			fmt.Fprintln(os.Stderr, "workspace and logs:", s.dir)
		} else {
			os.RemoveAll(s.root)
		}
	}
	if !ok {
		fmt.Fprintf(os.Stderr, "faults: broken:\n%s", strings.Join(all, ""))
		os.Exit(1)
	}
}

// all that was broken, to be said again at the end, where it is found.
var (
	mu  sync.Mutex
	all []string
)

func broken(words ...any) {
	text := fmt.Sprintln(words...)
	if len(text) > 2000 {
		text = text[:1000] + " … " + text[len(text)-1000:]
	}
	mu.Lock()
	defer mu.Unlock()
	all = append(all, text)
	fmt.Fprint(os.Stderr, "BROKEN: ", text)
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, "faults:", err)
	os.Exit(1)
}
