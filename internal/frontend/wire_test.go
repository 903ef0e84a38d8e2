package frontend

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/iotest"

	"mypr/internal/client"
)

// FuzzLines splits any input, however it arrives, as bytes.Split would.
func FuzzLines(f *testing.F) {
	f.Add([]byte("a\nb\n"), 5)
	f.Add([]byte("a\n\n\nb"), 1)
	f.Add([]byte(strings.Repeat("x", 100)+"\nshort\n"), 10)
	f.Add([]byte(strings.Repeat("x", 10)+"\n"+strings.Repeat("y", 11)), 10)
	f.Fuzz(func(t *testing.T, in []byte, limit int) {
		limit = max(1, min(limit, 1000))
		want := bytes.Split(in, []byte("\n"))
		if len(want[len(want)-1]) == 0 {
			want = want[:len(want)-1]
		}
		for _, r := range []io.Reader{bytes.NewReader(in), iotest.OneByteReader(bytes.NewReader(in)), iotest.DataErrReader(bytes.NewReader(in))} {
			l := &lineReader{r: r, limit: limit}
			for i := 0; ; i++ {
				line, err := l.next()
				var long *tooLong
				switch {
				case errors.As(err, &long):
					if i >= len(want) || len(want[i]) <= limit || long.size != int64(len(want[i])) ||
						!bytes.HasPrefix(want[i], long.head) || !bytes.HasSuffix(want[i], long.tail) {
						t.Fatalf("line %d: %v", i, err)
					}
					continue
				case err == io.EOF:
					if i != len(want) {
						t.Fatalf("%d lines, want %d", i, len(want))
					}
				case err != nil:
					t.Fatal(err)
				case i >= len(want) || !bytes.Equal(line, want[i]) || len(line) > limit:
					t.Fatalf("line %d is %q", i, line)
				}
				if err != nil {
					break
				}
			}
		}
	})
}

// FuzzMessages throws anything at the dispatcher: it must answer in JSON lines, and
// still answer what comes after.
func FuzzMessages(f *testing.F) {
	for _, s := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"ping"}`, `[{"jsonrpc":"2.0","id":1,"method":"ping"},7,[]]`, `{"jsonrpc":"2.0","id":1.5e3,"method":"tools/call","params":{"name":"none"}}`,
		`{"jsonrpc":"2.0","id":"x","method":"initialize","params":{"protocolVersion":[],"clientInfo":7}}`, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":{}}}`,
		`{"jsonrpc":"2.0","id":1,"method":"server/discover","params":{` + modernMeta + `}}`, "null", "\xef\xbb\xbf{}", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"execute","arguments":{"wait_ms":"1e5"}}}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		if bytes.Contains(line, []byte("init")) || bytes.Contains(line, []byte("poll")) || bytes.Contains(line, []byte("code")) || bytes.Contains(line, []byte(`\u`)) {
			t.Skip() // could reach the runtime, which is not here
		}
		c := client.New(client.Options{})
		defer c.Close()
		var out bytes.Buffer
		box := newOutbox(&out, maxUnsent)
		s := newServer(Options{Client: c, Logger: slog.New(slog.DiscardHandler)}, box)
		s.handle(line)
		s.calls.Wait()
		s.handle([]byte(`{"jsonrpc":"2.0","id":"after","method":"ping"}`))
		box.close()
		<-box.done
		lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
		if lines[len(lines)-1] != `{"jsonrpc":"2.0","id":"after","result":{}}` {
			t.Errorf("after %q came %q", line, lines)
		}
	})
}

func FuzzArguments(f *testing.F) {
	for _, s := range []string{`{}`, `{"code":"1"}`, `{"code":"1","wait_ms":"1_000"}`, `{"code":null}`, `[]`, `{"code":"1","max_bytes":1e4}`, `""`, `{"code":"1","wait_ms":-0}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for i := range tools {
			a, err := tools[i].bind(raw)
			if err != nil {
				if len(err.Error()) > 1000 || !strings.Contains(err.Error(), tools[i].name) {
					t.Errorf("%q: %v", raw, err)
				}
				continue
			}
			for name, n := range a.integers {
				if p := tools[i].parameter(name); n < p.min || p.max > 0 && n > p.max {
					t.Errorf("%q: %s=%d", raw, name, n)
				}
			}
		}
	})
}
