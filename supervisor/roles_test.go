package supervisor_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"

	"mypr/supervisor/notify"
)

// roles are what the test binary does as a child.
var roles = map[string]func(args []string){
	"notify": func([]string) {
		must(notify.Send("READY=1\nSTATUS=up"))
		hang()
	},
	// quick: says that it is ready as soon as it runs.
	"quick": func([]string) {
		if _, err := notify.Send("READY=1"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		_ = unix.Pause()
	},
	// stater: see the type of that name.
	"stater": func([]string) {
		stored := ""
		for _, f := range activation.Files(true) {
			b := make([]byte, 100)
			n, _ := f.ReadAt(b, 0)
			stored += " " + f.Name() + "=" + string(b[:max(n, 0)])
		}
		must(notify.Send("READY=1"))
		if stored != "" {
			fmt.Println("start:" + stored)
		}
		in := bufio.NewScanner(os.Stdin)
		for in.Scan() {
			verb, rest, _ := strings.Cut(in.Text(), " ")
			switch verb {
			case "fork": // a child that is not the main process
				c := exec.Command("/proc/self/exe", rest)
				c.Env = append(os.Environ(), roleVariable+"=say")
				c.Stderr = os.Stderr
				if err := c.Run(); err != nil {
					fmt.Println(err)
				}
			case "newmain":
				c := exec.Command("sleep", "1000")
				if err := c.Start(); err != nil {
					fmt.Println(err)
				}
				must(notify.Send(fmt.Sprintf("MAINPID=%d", c.Process.Pid)))
			case "store":
				name, content, _ := strings.Cut(rest, " ")
				fd, err := unix.MemfdCreate(name, 0)
				must(false, err)
				f := os.NewFile(uintptr(fd), name)
				_, err = f.WriteString(content)
				must(false, err)
				must(notify.Store(name, true, f))
			case "unstore":
				must(notify.Unstore(rest))
			case "hangup":
				r, w, err := os.Pipe()
				must(false, err)
				must(notify.Store(rest, true, r))
				must(false, notify.Barrier(deadline))
				r.Close()
				w.Close()
			default:
				must(notify.Send(strings.ReplaceAll(in.Text(), ";", "\n")))
			}
			must(false, notify.Barrier(deadline))
			fmt.Println("sent")
		}
		hang()
	},
	"say": func(args []string) {
		must(notify.Send(args[0]))
		must(false, notify.Barrier(deadline))
	},
	// extend becomes ready after its start timeout of 2 s, which it puts off.
	"extend": func([]string) {
		for range 30 {
			must(notify.Send("EXTEND_TIMEOUT_USEC=2000000"))
			<-time.After(100 * time.Millisecond)
		}
		must(notify.Send("READY=1"))
		hang()
	},
	// eat takes memory until it is stopped.
	"eat": func([]string) {
		var held [][]byte
		for range 1 << 10 {
			b := make([]byte, 1<<20)
			for i := range b {
				b[i] = 1
			}
			held = append(held, b)
		}
		fmt.Println(len(held))
	},
	// serve answers every connection on every socket it was given with its pid and the names.
	"serve": func([]string) {
		names := os.Getenv("LISTEN_FDNAMES")
		listeners, err := activation.Listeners()
		if err != nil || len(listeners) == 0 {
			fmt.Fprintln(os.Stderr, "no sockets:", err, os.Getenv("LISTEN_PID"), os.Getpid())
			os.Exit(97)
		}
		must(notify.Send("READY=1"))
		var wg sync.WaitGroup
		for _, l := range listeners {
			wg.Go(func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					fmt.Fprintf(c, "%d %s\n", os.Getpid(), names)
					c.Close()
				}
			})
		}
		wg.Wait()
	},
}

func must(_ bool, err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(98)
	}
}

// hang waits for the signal that ends the process.
func hang() {
	time.Sleep(time.Hour)
}
