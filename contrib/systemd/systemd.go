// Package systemd holds the unit templates for systemd's user manager.
package systemd

import _ "embed"

// The templates, as they are installed but for the path of the program.
var (
	//go:embed mypr@.service
	Service string
	//go:embed mypr@.socket
	Socket string
)
