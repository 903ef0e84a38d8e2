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
		Type: TypeExec, ExecStart: []Command{{Path: "/bin/\xff", Args: []string{"a", "b\xfe", "é"}, NoExpand: true}},
		Environment: []string{"A=\x80", "B=x"}, WorkingDirectory: "/tmp/\xffdir", TimeoutStopSec: time.Second, Nice: &nice,
	}
	raw, err := json.Marshal(&Unit{Name: "x.service", Service: &in})
	if err != nil {
		t.Fatal(err)
	}
	var out Unit
	if err := json.Unmarshal(raw, &out); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(*out.Service, in) {
		t.Errorf("got  %+v\nwant %+v\n%s", *out.Service, in, raw)
	}
}
