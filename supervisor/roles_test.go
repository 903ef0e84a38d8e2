package supervisor_test

import (
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/activation"

	"mypr/supervisor/notify"
)

// roles are what the test binary does as a child.
var roles = map[string]func(args []string){
	"notify": func([]string) {
		must(notify.Send("READY=1\nSTATUS=up"))
		hang()
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
