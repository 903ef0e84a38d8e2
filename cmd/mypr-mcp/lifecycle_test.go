package main

import (
	"testing"

	"mypr/internal/api"
)

func TestMemoryAfterARestart(t *testing.T) {
	none, unknown := generation{known: true}, generation{}
	for _, c := range []struct {
		old  string
		keep bool
		now  generation
		want string
	}{
		{"", false, none, "there was no Python kernel before"},
		{"", false, generation{"b", true}, "there was no Python kernel before"},
		{"", true, generation{"b", true}, "there was no Python kernel to keep"},
		{"a", false, none, "the Python memory of before is gone"},
		{"a", false, unknown, "the Python memory of before is gone"},
		{"a", false, generation{"b", true}, "Python memory is new"},
		{"a", true, generation{"a", true}, "Python memory is kept"},
		{"a", true, generation{"b", true}, "Python memory is gone all the same: the kernel ended meanwhile (mypr-mcp logs)"},
		{"a", true, none, "Python memory is gone all the same: the kernel ended meanwhile (mypr-mcp logs)"},
		{"a", true, unknown, "whether Python memory was kept is not known (mypr-mcp status)"},
	} {
		if got := memoryAfter(&api.RestartResult{OldGeneration: c.old, KeepKernel: c.keep}, c.now); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}
