package supervisor

import (
	"strings"
	"testing"
)

func TestStoredNames(t *testing.T) {
	for _, r := range []fdRecord{
		{Kind: fdControl}, {Kind: fdNotify}, {Kind: fdProgram, Name: "supervisor.lock"},
		{Kind: fdListen, Unit: "kernel.socket", Name: "/run/user/1000/mypr/ab.krn"},
		{Kind: fdKept, Unit: `job-a\x2db@c:d.service`, Name: "pty, the"}, {Kind: fdStored, Unit: "ü.service", Name: "a:b", Poll: true},
	} {
		name := storedName(7, r)
		if !validFDName(name) || len(name) > storeName {
			t.Errorf("%+v: %q is no name of a descriptor", r, name)
		}
		if key, got, ok := parseStoredName(name); !ok || key != 7 || got != r {
			t.Errorf("%q came back as %d %+v %v", name, key, got, ok)
		}
	}
}

func FuzzStoredName(f *testing.F) {
	for _, s := range []string{"mypr-1,kept,p,a.service,pty", "runtime", "mypr-", "mypr-x,,,%zz,", "mypr-1,a,b,c,d,e"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		key, r, ok := parseStoredName(s)
		if !ok {
			return
		}
		if k, again, ok := parseStoredName(storedName(key, r)); !ok || k != key || again != r && !strings.Contains(r.Kind, ",") {
			t.Errorf("%q: %d %+v, then %d %+v %v", s, key, r, k, again, ok)
		}
	})
}
