package main

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/internal/workspace"
	"mypr/supervisor/control"
)

// completeTimeout bounds what a shell's completion asks a session: somebody waits at the
// keyboard.
const completeTimeout = 500 * time.Millisecond

// completion offers the first argument of a command from what the running session says.
// Without one, or when it does not say so at once, there is nothing to offer.
func (c *cli) completion(list func(context.Context, *workspace.Location) []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, begun string) (words []string, _ cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(context.Background(), completeTimeout)
		defer cancel()
		w, err := c.workspace()
		if err != nil || len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		if l, err := w.Discover(ctx); err == nil {
			for _, word := range list(ctx, l) {
				if strings.HasPrefix(word, begun) {
					words = append(words, word)
				}
			}
		}
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}

// unitNames are the session's units, with what they are.
func unitNames(ctx context.Context, l *workspace.Location) (words []string) {
	_ = withControl(ctx, l, func(ctx context.Context, sv *control.Client) error {
		list, err := sv.List(ctx, false)
		for _, u := range list {
			words = append(words, cobra.CompletionWithDesc(u.Name, u.Description))
		}
		return err
	})
	return words
}

// cellIDs are the cells that can be interrupted, with their states.
func cellIDs(ctx context.Context, l *workspace.Location) (words []string) {
	conn, err := rpc.Dial(ctx, l.Socket, nil)
	if err != nil {
		return nil
	}
	defer conn.Close()
	var s api.Status
	if conn.Call(ctx, api.MethodStatus, api.StatusParams{}, &s) != nil {
		return nil
	}
	for _, id := range s.Active {
		words = append(words, cobra.CompletionWithDesc(id, api.Running))
	}
	for _, id := range s.Queued {
		words = append(words, cobra.CompletionWithDesc(id, api.Queued))
	}
	return words
}
