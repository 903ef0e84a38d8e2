package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const two = `{"type":"hello","protocol":1,"generation":"abc","first_seq":4,"next_seq":5,"cells":[{"exec_id":"e","state":"running"}],"seen":["e"]}
{"type":"event","seq":4,"event":"stream","exec_id":"e","stream":"stdout","text":"<&>ä\n"}
`

// However the bytes arrive, the same messages come out.
func TestReader(t *testing.T) {
	for name, r := range map[string]io.Reader{
		"at once": strings.NewReader(two), "byte by byte": iotest.OneByteReader(strings.NewReader(two)), "halves": iotest.HalfReader(strings.NewReader(two)),
	} {
		in := NewReader(r)
		var m FromKernel
		if err := in.Next(&m); err != nil || m.Type != TypeHello || m.FirstSeq != 4 || m.Cells[0].State != "running" || m.Seen[0] != "e" {
			t.Errorf("%s: %+v %v", name, m, err)
		}
		if name == "at once" && !in.Buffered() {
			t.Error("the second message is not seen")
		}
		if err := in.Next(&m); err != nil || m.Type != TypeEvent || m.Seq != 4 || m.Text != "<&>ä\n" || m.Cells != nil {
			t.Errorf("%s: %+v %v", name, m, err)
		}
		if err := in.Next(&m); err != io.EOF {
			t.Errorf("%s: at the end: %v", name, err)
		}
	}
}

func TestReaderErrors(t *testing.T) {
	var m FromKernel
	for name, text := range map[string]string{"not JSON": "hello\n", "no object": "[]\n", "empty": "\n", "no type": "{}\n", "wrong type": `{"type":"event","seq":"4"}` + "\n"} {
		if err := NewReader(strings.NewReader(text)).Next(&m); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := NewReader(strings.NewReader(`{"type":"pong"`)).Next(&m); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut short: %v", err)
	}
	endless := io.MultiReader(strings.NewReader(`{"type":"`), infinite{})
	if err := NewReader(endless).Next(&m); !errors.Is(err, ErrTooLong) {
		t.Errorf("endless: %v", err)
	}
}

type infinite struct{}

func (infinite) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

// A huge message passes and its buffer is given up afterwards.
func TestReaderShrinks(t *testing.T) {
	big := `{"type":"event","text":"` + strings.Repeat("x", 4<<20) + "\"}\n"
	in := NewReader(strings.NewReader(big + two))
	var m FromKernel
	for range 3 {
		if err := in.Next(&m); err != nil {
			t.Fatal(err)
		}
	}
	if len(in.buf) > 1<<20 {
		t.Errorf("the buffer has %d bytes", len(in.buf))
	}
}

func TestEncode(t *testing.T) {
	line, err := Encode([]byte("before "), Execute{Type: TypeExecute, ExecID: "e", Code: "a < b\n"})
	if err != nil || string(line) != `before {"type":"execute","exec_id":"e","code":"a < b\n","client_id":"","connection_id":""}`+"\n" {
		t.Errorf("%q %v", line, err)
	}
	if _, err := Encode(nil, Execute{Code: strings.Repeat("x", MaxLine)}); !errors.Is(err, ErrTooLong) {
		t.Errorf("too long: %v", err)
	}
	line, _ = Encode(nil, Interrupt{Type: TypeInterrupt, ID: 3})
	if !bytes.Contains(line, []byte(`"exec_id":null`)) {
		t.Errorf("%s", line)
	}
}

func FuzzReader(f *testing.F) {
	f.Add([]byte(two))
	f.Add([]byte("\n\x00{\"type\":\"x\"}\n{"))
	f.Fuzz(func(t *testing.T, data []byte) {
		in := NewReader(iotest.OneByteReader(bytes.NewReader(data)))
		for n := 0; ; n++ {
			var m FromKernel
			err := in.Next(&m)
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				if n > bytes.Count(data, []byte("\n")) {
					t.Fatalf("%d messages", n)
				}
				return
			}
			if err == nil && m.Type == "" {
				t.Fatal("a message without type")
			}
			if err == nil {
				if _, err := json.Marshal(m); err != nil && !json.Valid(m.Params) {
					t.Fatal(err)
				}
			}
		}
	})
}
