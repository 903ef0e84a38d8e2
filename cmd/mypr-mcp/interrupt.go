package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"mypr/internal/api"
)

func (c *cli) interruptCommand() *cobra.Command {
	return &cobra.Command{
		Use: "interrupt [EXEC_ID]", Short: "Stop a cell, the session goes on",
		Long: `Stop one cell: KeyboardInterrupt where it blocks Python, cancellation where it awaits.
Without EXEC_ID: the cell that blocks, else the only one that runs.`,
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: c.completion(cellIDs),
		RunE: func(cmd *cobra.Command, args []string) error {
			w, err := c.workspace()
			if err != nil {
				return err
			}
			cl := c.client(w, false, true)
			defer cl.Close()
			var p api.InterruptParams
			if len(args) == 1 {
				p.ExecID = args[0]
			}
			var r *api.InterruptResult
			err = c.patiently(cmd.Context(), w, "the interrupt", func(ctx context.Context) (err error) {
				r, err = cl.Interrupt(ctx, p)
				return err
			})
			if err != nil {
				return err
			}
			if c.json {
				return printJSON(c.stdout, r)
			}
			what := map[string]string{
				"interrupted": "was interrupted", "cancelled": "was cancelled", "dequeued": "had not begun and will not",
				"pending": "was told to stop and has not ended yet", "finished": "had ended before",
			}[r.Outcome]
			_, err = fmt.Fprintf(c.stdout, "%s %s (state %s)\n", r.ExecID, what, r.State)
			if r.Outcome == "pending" {
				fmt.Fprintln(c.stderr, "next: mypr-mcp status says what the kernel does; mypr-mcp interrupt again; mypr-mcp reset --force ends every cell, with all Python memory")
			}
			return err
		},
	}
}
