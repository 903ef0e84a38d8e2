package files

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/aymanbagabas/go-udiff"

	"mypr/internal/ospath"
)

// maxDiffBytes bounds max_diff_bytes.
const maxDiffBytes = 4 << 20

func checkDiffBytes(n int) error {
	if n < 0 || n > maxDiffBytes {
		return invalid("max_diff_bytes must be from 0 to %d, not %d", maxDiffBytes, n)
	}
	return nil
}

// unified is the unified diff of two texts and the numbers of lines added and
// removed. An empty name stands for a file that is not there.
func unified(oldName, newName ospath.Text, old, new string) (diff string, added, removed int) {
	if old == new {
		return "", 0, 0
	}
	label := func(side string, name ospath.Text) string {
		if name == "" {
			return "/dev/null"
		}
		n := side + string(name)
		if !utf8.ValidString(n) || strings.ContainsAny(n, "\n\t\"\\") {
			return fmt.Sprintf("%q", n)
		}
		return n
	}
	diff, err := udiff.ToUnified(label("a/", oldName), label("b/", newName), old, udiff.Lines(old, new), udiff.DefaultContextLines)
	if err != nil { // only edits that contradict each other; a diff is no reason to fail a write
		return fmt.Sprintf("(no diff: %v)\n", err), 0, 0
	}
	body := diff
	for range 2 { // the names
		body = body[strings.IndexByte(body, '\n')+1:]
	}
	for line := range strings.Lines(body) {
		switch line[0] {
		case '+':
			added++
		case '-':
			removed++
		}
	}
	return diff, added, removed
}

// bound cuts a diff at the end of a line, or of a code point when one line is over the limit.
func bound(diff string, limit int) (string, bool) {
	if len(diff) <= limit {
		return diff, false
	}
	cut := diff[:limit]
	if i := strings.LastIndexByte(cut, '\n'); i >= 0 {
		return cut[:i+1], true
	}
	return cut[:len(cut)-partialRune([]byte(cut))], true
}
