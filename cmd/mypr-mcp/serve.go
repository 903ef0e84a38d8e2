package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"mypr/internal/api"
	"mypr/internal/client"
	"mypr/internal/frontend"
	"mypr/internal/workspace"
)

func (c *cli) serveCommand() *cobra.Command {
	var structured bool
	cmd := &cobra.Command{
		Use: "serve", Short: "Serve MCP on standard input and output (what an MCP client runs)", Args: cobra.NoArgs,
		Long: `Serve MCP on standard input and output. Nothing is started or written before the
first tool call. The session goes on when this process ends.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if isTerminal(c.stdin) {
				fmt.Fprintln(c.stderr, "mypr-mcp: serve is for MCP clients, which send JSON-RPC; Ctrl-D ends it. To run Python from here: mypr-mcp exec 1+1")
			}
			return c.serve(cmd.Context(), structured)
		},
	}
	cmd.Flags().BoolVar(&structured, "structured", false, "add the machine-readable payload as structuredContent (some clients then hide the text)")
	return cmd
}

func (c *cli) serve(ctx context.Context, structured bool) error {
	// A call goes through several goroutines, one after the other. On one processor each
	// takes over where the last one stopped; on more, another thread is woken each time.
	// Changing that stops the world, for which the opening message does not wait.
	oneProcessor := sync.OnceFunc(func() { runtime.GOMAXPROCS(1) })
	log := slog.New(slog.NewTextHandler(c.stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	cl := client.New(client.Options{
		// The workspace is looked at when a tool is called: a server whose directory
		// is unusable must still answer its client's opening message.
		Ensure: func(ctx context.Context) (string, error) {
			oneProcessor()
			w, err := c.workspace()
			if err != nil {
				return "", err
			}
			return ensure(ctx, w, "frontend")
		},
		Kind: "frontend", Version: version(), Trouble: trouble, Logger: log,
	})
	defer cl.Close()
	return frontend.Run(ctx, frontend.Options{
		In: c.stdin, Out: c.stdout, Client: cl, Version: version(), Structured: structured, Logger: log,
	})
}

// ensure finds or starts the workspace's runtime and returns its socket.
func ensure(ctx context.Context, w *workspace.Workspace, source string) (string, error) {
	l, err := w.Ensure(ctx, startedBy(source))
	if err != nil {
		return "", err
	}
	return l.Socket, nil
}

// startedBy are the options of a start by this process.
func startedBy(source string) workspace.StartOptions {
	return workspace.StartOptions{Origin: api.Origin{Source: source, Program: parentName(), PID: os.Getppid(), Time: time.Now()}}
}

// parentName is the program that started us, for "where does this environment come
// from"; "" when it cannot be seen.
func parentName() string {
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", os.Getppid()))
	if err != nil {
		return ""
	}
	return exe
}
