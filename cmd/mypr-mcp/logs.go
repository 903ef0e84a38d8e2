package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"mypr/internal/api"
)

func (c *cli) logsCommand() *cobra.Command {
	var limit int
	var follow bool
	var client string
	cmd := &cobra.Command{
		Use: "logs", Short: "Print what happened in the session", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 || limit > 200 {
				return usagef("--limit takes 1 to 200, not %d", limit)
			}
			return c.logs(cmd.Context(), api.LogsParams{Limit: limit, ClientID: client}, follow)
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 20, "print the newest `N` events, 1 to 200")
	cmd.Flags().BoolVar(&follow, "follow", false, "go on printing new events until interrupted")
	cmd.Flags().StringVar(&client, "client", "", "only those of the logical client `ID`")
	return cmd
}

func (c *cli) logs(ctx context.Context, p api.LogsParams, follow bool) error {
	w, err := c.workspace()
	if err != nil {
		return err
	}
	cl := c.client(w, false, true)
	defer cl.Close()
	for {
		page, err := cl.Logs(ctx, p)
		if err != nil {
			if follow && errors.Is(err, context.Canceled) {
				return nil // following ends with Ctrl-C
			}
			return err
		}
		for _, e := range page.Events {
			if err := c.logLine(e); err != nil {
				return err
			}
		}
		if !follow {
			return nil
		}
		p.Cursor, p.WaitMS, p.Limit = &page.Cursor, api.MaxWaitMS, 200
	}
}

func (c *cli) logLine(e api.LogEvent) error {
	if c.json {
		line, err := json.Marshal(e)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(c.stdout, "%s\n", line)
		return err
	}
	line := fmt.Sprintf("%s %-12s %-10s %s %s", clock(time.UnixMicro(int64(e.Time*1e6)), time.Now()), e.Event, e.Kind, e.ID, e.ClientID)
	if e.Error != "" {
		line += " " + strings.Join(strings.Fields(e.Error), " ")
	} else if text, ok := e.Data["text"].(string); ok {
		line += " " + strings.TrimSpace(text)
	}
	_, err := fmt.Fprintln(c.stdout, strings.TrimRight(line, " "))
	return err
}

// clock is when something happened, with the day if that is not today: a session lives for weeks.
func clock(at, now time.Time) string {
	layout := "15:04:05.000"
	if at.Format(time.DateOnly) != now.Format(time.DateOnly) {
		layout = time.DateOnly + " " + layout
	}
	return at.Format(layout)
}
