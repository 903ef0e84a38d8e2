package main

import (
	"testing"
	"time"
)

func TestClock(t *testing.T) {
	for before, want := range map[time.Duration]string{
		time.Minute: "11:59:00.000", 13 * time.Hour: "2026-11-29 23:00:00.000", 24 * time.Hour: "2026-11-29 12:00:00.000",
	} {
		if got := clock(testNow.Add(-before), testNow); got != want {
			t.Errorf("%v ago: %q, want %q", before, got, want)
		}
	}
}
