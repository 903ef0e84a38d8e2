//go:build deps

// Package deps pins modules until the packages that import them exist.
package deps

import (
	_ "github.com/coreos/go-systemd/v22/activation"
	_ "github.com/coreos/go-systemd/v22/daemon"
	_ "github.com/coreos/go-systemd/v22/journal"
	_ "github.com/coreos/go-systemd/v22/unit"
	_ "github.com/creack/pty"
	_ "github.com/mark3labs/mcp-go/mcp"
	_ "github.com/mark3labs/mcp-go/server"
	_ "github.com/pelletier/go-toml/v2"
	_ "github.com/rogpeppe/go-internal/testscript"
	_ "github.com/spf13/cobra"
	_ "go.uber.org/goleak"
	_ "golang.org/x/term"
	_ "modernc.org/sqlite"
	_ "pgregory.net/rapid"
)
