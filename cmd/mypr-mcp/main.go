// Command mypr-mcp gives an LLM agent a persistent Python session per workspace
// directory. This package wires the others together: one file per verb, no behaviour
// of its own beyond arguments, rendering and exit statuses (docs/EXIT-CODES.md).
package main

import (
	"os"

	"mypr/supervisor/process"
)

func main() {
	process.HelperMain() // returns unless the supervisor started this process as one of its helpers
	os.Exit(run(os.Args[1:]))
}
