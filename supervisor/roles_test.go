package supervisor_test

import (
	"fmt"
	"os"
	"time"

	"mypr/supervisor/notify"
)

// roles are what the test binary does as a child.
var roles = map[string]func(args []string){
	"notify": func([]string) {
		must(notify.Send("READY=1\nSTATUS=up"))
		hang()
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
