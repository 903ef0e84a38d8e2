package client

import (
	"testing"
	"time"
)

// SetPatience shortens what a client waits for, until the test ends.
func SetPatience(t *testing.T, d time.Duration) {
	a, b := connectTimeout, grace
	connectTimeout, grace = d, d
	t.Cleanup(func() { connectTimeout, grace = a, b })
}
