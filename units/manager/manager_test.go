package manager

import (
	"testing"

	"mypr/internal/api"
)

func TestExecute(t *testing.T) {
	w := newWorld(t)
	p := w.client()
	r := p.run("print:hello result:2")
	if r.State != api.Succeeded || text(r) != "hello\n2" || len(r.Output) != 2 || r.Cursor != 2 || r.HasMore || r.Error != nil {
		t.Errorf("got %+v", r)
	}
	if r.Generation == "" || r.ExecutionGeneration != r.Generation || r.ClientID != p.client || r.ConnectionID != p.id {
		t.Errorf("identity: %+v", r)
	}
	r = p.run("fail:no")
	if r.State != api.FailedCell || errText(r) != "ValueError: no" || r.ErrorInfo == nil || r.ErrorInfo.Type != "ValueError" {
		t.Errorf("got %+v", r)
	}
}

func BenchmarkExecute(b *testing.B) {
	w := newWorld(b)
	p := w.client()
	p.run("result:2")
	for b.Loop() {
		p.run("result:2")
	}
}
