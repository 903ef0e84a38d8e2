package supervisor

import (
	"slices"
	"testing"
)

// What a real systemd makes of these is in test/differential (environment-file*, variables*).

func TestEnvironmentFile(t *testing.T) {
	text := "# A=0\nA=plain\n  B = spaced  \nC=\"a b\" \nD=it's\nE='one'\"two\"\nF=a\"b c\"d\nG=a\\\nb\nH=\"x\\\"y\\n\"\n1BAD=x\nBAD-NAME=x\nexport I=1\nJ=\n"
	want := []string{"A=plain", "B=spaced", "C=a b", "D=it's", "E=onetwo", `F=a"b c"d`, "G=ab", `H=x"y\n`, "J="}
	if got := parseEnvironmentFile(text); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestExpand(t *testing.T) {
	env := []string{"ONE=1", "WORDS=a b  c", `QUOTED="a b" c\ d ''`}
	for word, want := range map[string][]string{
		"$ONE": {"1"}, "x$ONE": {"x$ONE"}, "x${ONE}y": {"x1y"}, "$WORDS": {"a", "b", "c"}, "${WORDS}": {"a b  c"},
		"$NOTHING": nil, "${NOTHING}": {""}, "${}": {""}, "${ONE": {"${ONE"}, "$ONE$WORDS": nil, "$$ONE": {"$ONE"},
		"$QUOTED": {"a b", "c d", ""},
	} {
		if got := expand([]string{"argv0", word}, env)[1:]; !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q", word, got, want)
		}
	}
}
