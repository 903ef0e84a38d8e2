package jobs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"golang.org/x/term"
	"pgregory.net/rapid"
)

// pumpRole is a manager reduced to what is at stake: it moves two pipes, or a terminal,
// into an output until it is killed, or they have ended.
func pumpRole(base string, tty bool) int {
	o := newOutput(base, 1<<40)
	if err := o.load(tty); err != nil {
		os.Stderr.WriteString(err.Error())
		return 1
	}
	open := []unix.PollFd{{Fd: 3, Events: unix.POLLIN}, {Fd: 4, Events: unix.POLLIN}}
	if tty {
		open = open[:1]
	}
	for len(open) > 0 {
		if _, err := unix.Poll(open, -1); err != nil && err != unix.EINTR {
			return 1
		}
		for i := 0; i < len(open); i++ {
			if _, end := o.take(int(open[i].Fd), open[i].Fd == 4, tty); end {
				open = append(open[:i], open[i+1:]...)
				i--
			}
		}
	}
	if err := o.close(); err != nil {
		os.Stderr.WriteString(err.Error())
		return 1
	}
	return 0
}

const wantKills = 60

// killPumps runs pumps and kills them, until the last may go on to the end.
func killPumps(t *testing.T, kills *atomic.Int64, files []*os.File, env ...string) {
	for {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(append(os.Environ(), "JOBS_TEST_ROLE=pump"), env...)
		cmd.ExtraFiles = files
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(5+rand.IntN(25))*time.Millisecond)
		if kills.Load() == wantKills { // and now to the end
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		}
		stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
		err := cmd.Wait()
		stop()
		cancel()
		if err == nil {
			return
		}
		if stderr.Len() > 0 {
			t.Fatal(stderr.String())
		}
		kills.Add(1)
	}
}

// whole is everything that a stream of a finished output has.
func whole(t *testing.T, o *output, stream string) (got []byte) {
	for from, more := int64(0), true; more; {
		p, err := o.page(from, stream, 1<<20, true)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, p.data...)
		from, more = p.next, p.more
	}
	return got
}

// difference is where two texts begin to differ.
func difference(a, b []byte) (at int) {
	for at < min(len(a), len(b)) && a[at] == b[at] {
		at++
	}
	return at
}

// The same for a terminal, whose bytes cannot be moved by one system call.
func TestKilledPumpsOfTerminals(t *testing.T) {
	base := filepath.Join(t.TempDir(), "job")
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	if _, err := term.MakeRaw(int(slave.Fd())); err != nil { // as it is written, not as it is shown
		t.Fatal(err)
	}
	var want bytes.Buffer
	var kills atomic.Int64
	done := make(chan error, 1)
	go func() {
		var err error
		for line := 0; kills.Load() < wantKills && err == nil; line++ {
			text := strings.Repeat(string(rune('a'+line%26)), rand.IntN(900)) + "\x00\xfe\r\n"
			want.WriteString(text)
			_, err = slave.WriteString(text)
		}
		done <- errors.Join(err, slave.Close())
	}()
	killPumps(t, &kills, []*os.File{master}, "JOBS_TEST_BASE="+base, "JOBS_TEST_TTY=1")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	o := newOutput(base, 1<<40)
	if err := o.load(false); err != nil {
		t.Fatal(err)
	}
	if got := whole(t, o, stdout); !bytes.Equal(got, want.Bytes()) {
		t.Errorf("%d bytes, want %d; they differ at %d (after %d kills)", len(got), want.Len(), difference(got, want.Bytes()), kills.Load())
	}
	t.Logf("%d bytes, %d kills", o.size, kills.Load())
}

// What is left of a terminal's output when nobody could tidy up.
func TestFillingIsNoOutput(t *testing.T) {
	base := filepath.Join(t.TempDir(), "job")
	for text, want := range map[string]int64{
		"abc" + strings.Repeat("\xff", ahead): 3, "abc": 3, "": 0, strings.Repeat("\xff", 100): 0, "a\xffb\xff": 3, "a\xfe\xff": 2, "\xc3\xff": 1,
		strings.Repeat("x", 2*ahead) + "\xff": 2 * ahead,
	} {
		if err := os.WriteFile(base+".out", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		o := newOutput(base, 1<<40)
		if err := o.load(true); err != nil || o.size != want {
			t.Errorf("%.20q: %d bytes, want %d: %v", text, o.size, want, err)
		}
	}
}

// However often whoever moves the bytes is killed, every byte of both streams arrives
// once, in the order of its stream.
func TestKilledPumpsLoseAndDoubleNothing(t *testing.T) {
	base := filepath.Join(t.TempDir(), "job")
	var readers, writers [2]*os.File
	var want [2]bytes.Buffer
	var kills atomic.Int64
	done := make(chan error, 2)
	for i := range readers {
		var err error
		if readers[i], writers[i], err = os.Pipe(); err != nil {
			t.Fatal(err)
		}
		defer readers[i].Close()
		go func() {
			var err error
			for line := 0; kills.Load() < wantKills && err == nil; line++ {
				text := strings.Repeat(string(rune('a'+line%26)), rand.IntN(90)) + "\n"
				want[i].WriteString(text)
				_, err = writers[i].WriteString(text)
			}
			done <- errors.Join(err, writers[i].Close())
		}()
	}
	killPumps(t, &kills, readers[:], "JOBS_TEST_BASE="+base)
	for range 2 {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	o := newOutput(base, 1<<40)
	if err := o.load(false); err != nil {
		t.Fatal(err)
	}
	for i, stream := range []string{stdout, stderr} {
		got := whole(t, o, stream)
		if !bytes.Equal(got, want[i].Bytes()) {
			at := difference(got, want[i].Bytes())
			t.Errorf("%s: %d bytes, want %d; they differ at %d (after %d kills)", stream, len(got), want[i].Len(), at, kills.Load())
		}
	}
	t.Logf("%d bytes, %d kills, %d changes of stream", o.size, kills.Load(), len(o.segs))
}

// Pages of any size put together are the stream, and cursors lead where they should.
func TestPagesPutTogetherAreTheStream(t *testing.T) {
	dir := t.TempDir()
	number := 0
	rapid.Check(t, func(t *rapid.T) {
		number++
		base := filepath.Join(dir, "job"+string(rune('0'+number%10)))
		os.Remove(base + ".out")
		os.Remove(base + ".idx")
		o := newOutput(base, 1<<20)
		defer o.close()
		var both bytes.Buffer
		streams := map[string]*bytes.Buffer{stdout: {}, stderr: {}, "": &both}
		for range rapid.IntRange(0, 12).Draw(t, "pieces") {
			text := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "é", "漢", "😀", "\xff", "\xc3", "\xf0\x9f"}), 1, 20).Draw(t, "text")
			isErr := rapid.Bool().Draw(t, "stderr")
			data := strings.Join(text, "")
			put(t, o, data, isErr)
			both.WriteString(data)
			streams[map[bool]string{false: stdout, true: stderr}[isErr]].WriteString(data)
		}
		again := newOutput(base, 1<<20)
		if err := again.load(false); err != nil {
			t.Fatal(err)
		}
		for name, want := range streams {
			var got bytes.Buffer
			limit := rapid.IntRange(utf8.UTFMax, 40).Draw(t, "limit")
			from, more := int64(0), want.Len() > 0
			for more {
				p, err := again.page(from, name, limit, true)
				if err != nil {
					t.Fatal(err)
				}
				if len(p.data) == 0 {
					t.Fatalf("%q: a page without progress at %d of %q", name, from, both.Bytes())
				}
				if len(p.text) > limit || !utf8.ValidString(p.text) {
					t.Fatalf("%q: page %q over the limit %d", name, p.text, limit)
				}
				next, err := again.skip(from, name, int64(len(p.data)))
				if err != nil {
					t.Fatal(err)
				}
				q, _ := again.page(next, name, 1000, true)
				r, _ := again.page(p.next, name, 1000, true)
				if !bytes.Equal(q.data, r.data) {
					t.Fatalf("%q: skip of %d from %d leads to %d, the page to %d", name, len(p.data), from, next, p.next)
				}
				got.Write(p.data)
				from, more = p.next, p.more
			}
			if !bytes.Equal(got.Bytes(), want.Bytes()) {
				t.Fatalf("%q: got %q, want %q", name, got.Bytes(), want.Bytes())
			}
		}
	})
}

// put moves data through a pipe, as a job would.
func put(t interface{ Fatal(...any) }, o *output, data string, isErr bool) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := w.WriteString(data); err != nil {
		t.Fatal(err)
	}
	w.Close()
	for end := false; !end; {
		_, end = o.take(int(r.Fd()), isErr, false)
	}
}

func TestDamagedIndexIsSaid(t *testing.T) {
	base := filepath.Join(t.TempDir(), "job")
	for name, text := range map[string]string{".out": "abc", ".idx": "\x09\x00\x00\x00\x00\x00\x00\x80"} {
		if err := os.WriteFile(base+name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := newOutput(base, 10).load(false); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Fatal(err)
	}
}

func FuzzCursor(f *testing.F) {
	id := strings.Repeat("a", 32)
	f.Add(cursor{Job: id, Stream: stdout, Offset: 7}.String())
	f.Add("mypr-shell1.")
	f.Add("mypr-shell1.e30")
	f.Add("12")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := parseCursor(&text, id, stdout)
		if err == nil && (c.Job != id || c.Stream != stdout || c.Offset < 0) {
			t.Fatalf("%q was taken for %+v", text, c)
		}
	})
}

func FuzzLimits(f *testing.F) {
	for _, s := range []string{`{"memory":"2G","cpu":1.5,"pids":200,"time":600}`, `{"memory":1e300}`, `{"memory":"NaN"}`, `{"cpu":-1}`, `{"memory":"1.5 MiB"}`, `{"memory":null}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var l Limits
		if json.Unmarshal([]byte(text), &l) != nil {
			return
		}
		if l.Memory != 0 && (l.Memory < minMemory || l.Memory >= 1<<62) || l.CPU < 0 || l.CPU > 10_000 || l.Time < 0 || l.Time >= maxSeconds {
			t.Fatalf("%s was taken for %+v", text, l)
		}
	})
}
