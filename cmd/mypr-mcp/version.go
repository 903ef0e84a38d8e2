package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"

	"github.com/spf13/cobra"

	"mypr/internal/api"
)

// buildVersion is set by packagers and tests: -ldflags '-X main.buildVersion=1.2.3'.
var buildVersion string

// version is buildVersion, else the module version that the build recorded, with the
// revision where it was built from a checkout.
var version = sync.OnceValue(func() string {
	if buildVersion != "" {
		return buildVersion
	}
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	if info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	v := "devel"
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision" && len(s.Value) >= 12:
			v += "+" + s.Value[:12]
		case s.Key == "vcs.modified" && s.Value == "true":
			v += ".dirty"
		}
	}
	return v
})

// versionReport is what version prints.
type versionReport struct {
	Version  string `json:"version"`
	Protocol int    `json:"protocol_version"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func (c *cli) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version of this program", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.printVersion(cmd) },
	}
}

func (c *cli) printVersion(cmd *cobra.Command) error {
	r := versionReport{version(), api.Protocol, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
	if c.json && cmd.Flags().Changed("json") { // a plain line also for scripts, unless they ask
		return printJSON(c.stdout, r)
	}
	_, err := fmt.Fprintf(c.stdout, "mypr-mcp %s (protocol %d, %s, %s)\n", r.Version, r.Protocol, r.Go, r.Platform)
	return err
}
