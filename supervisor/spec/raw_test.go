package spec

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"
)

func TestBytesSurviveJSON(t *testing.T) {
	nice := 5
	in := Service{
		Type: TypeExec, ExecStart: []Command{{Path: "/bin/x", Args: []string{"a", "b\xfe", "é"}, NoExpand: true}},
		Environment: []string{"A=\x80", "B=x"}, WorkingDirectory: "/tmp/\xffdir", TimeoutStopSec: time.Second, Nice: &nice,
	}
	u := &Unit{Name: "x.service", Service: &in}
	u.KeepRaw()
	raw, err := json.Marshal(u)
	if err != nil {
		t.Fatal(err)
	}
	var out Unit
	if err := json.Unmarshal(raw, &out); err != nil {
		t.Fatal(err)
	}
	out.RestoreRaw()
	if !reflect.DeepEqual(*out.Service, in) {
		t.Errorf("got  %+v\nwant %+v\n%s", *out.Service, in, raw)
	}
	plain := &Unit{Service: &Service{Environment: []string{"A=é"}}}
	if plain.KeepRaw(); plain.Raw != nil {
		t.Error("text needs no raw form")
	}
}
