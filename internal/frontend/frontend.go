// Package frontend is the MCP server that one client talks to over stdio: it speaks
// the protocol in both its eras, checks arguments, passes calls to the manager through
// a client.Client, and turns answers into text and images that a model can use.
//
// It owns the protocol streams, the requests in flight and the wording of results. It
// holds no state of the session and starts nothing before the first tool call; when it
// dies, nothing is lost but what it was about to say. docs/MCP.md says what a client
// sees, docs/DEPENDENCIES.md why the read and write loop is its own.
//
// # Goroutines
//
// The reader parses messages, answers what needs no session, registers every tool call
// before it reads on (so that no cancellation can come too early for it) and starts one
// goroutine per call. What the client does not take at once the writer writes. Run owns
// all of them.
package frontend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mypr/internal/client"
	"mypr/internal/rpc/readable"
)

const (
	// progressEvery is how often a waiting call reports, when its client wants that.
	progressEvery = 10 * time.Second
	// lastCalls is how long calls may still be answered after the end of the input: a
	// script may write its requests and close. A client's death must be over in 1 s.
	lastCalls = 600 * time.Millisecond
	// lastWords is how long the client may take to read what is left to say.
	lastWords = 200 * time.Millisecond
)

// Options of Run.
type Options struct {
	In, Out *os.File // the protocol streams; stdin and stdout of the process
	Client  *client.Client
	Version string
	// Structured adds the payload as structuredContent. Off by default: clients that
	// find it hide the text, and some drop the images.
	Structured bool
	Logger     *slog.Logger

	progressEvery time.Duration // tests: not 10 s
	maxUnsent     int           // tests: not 128 MiB
}

// Run serves one MCP client until its input ends, its process ends, ctx ends, or
// SIGTERM, SIGINT or SIGHUP comes; all of these end it within a second, whatever waits.
// It closes o.Client. Its error is nil in all these cases.
//
// When the streams are the process's standard ones, it moves them away: what else in
// this process, or in a child, reads fd 0 or writes fd 1 finds /dev/null and stderr.
func Run(ctx context.Context, o Options) error {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.progressEvery == 0 {
		o.progressEvery = progressEvery
	}
	if o.maxUnsent == 0 {
		o.maxUnsent = maxUnsent
	}
	defer o.Client.Close()
	st, err := openStreams(o.In, o.Out)
	if err != nil {
		return err
	}
	defer st.close()

	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGHUP} {
		if !signal.Ignored(sig) { // nohup, a shell's background job
			signal.Notify(signals, sig)
		}
	}
	defer signal.Stop(signals)
	// A stderr that nobody reads must not kill us: only with a handler does Go return
	// EPIPE for fd 1 and 2 instead of dying.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)

	s := newServer(o, newOutbox(st.out, o.maxUnsent))
	ended := make(chan error, 1)
	var reader sync.WaitGroup
	reader.Go(func() { ended <- s.read(st.in) })

	var why error
	select {
	case why = <-ended:
	case sig := <-signals:
		why = fmt.Errorf("signal: %v", sig)
	case <-ctx.Done():
		why = ctx.Err()
	case <-s.out.broken:
		why = s.out.failed()
	}
	o.Logger.Info("front end ends", "reason", why)
	if errors.Is(why, io.EOF) {
		wait(&s.calls, lastCalls)
	}
	s.cancel()
	st.stopReading()
	reader.Wait()
	o.Client.Close() // ends what a call may still hang on
	s.calls.Wait()
	s.out.close()
	select {
	case <-s.out.done:
	case <-time.After(lastWords):
		st.stopWriting()
		<-s.out.done
	}
	return nil
}

// wait waits for wg, at most d.
func wait(wg *sync.WaitGroup, d time.Duration) {
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }() // ends when Run waits for the same group
	select {
	case <-done:
	case <-time.After(d):
	}
}

// errParent is the end of the process that started this one.
var errParent = errors.New("the process that started this one has ended")

// streams are the private protocol streams, and the parent, as descriptors that this
// package alone has.
type streams struct {
	in, out *pipeEnd
	fds     []int
}

// openStreams takes the protocol streams for this package alone.
func openStreams(in, out *os.File) (_ *streams, err error) {
	st := &streams{}
	defer func() {
		if err != nil {
			st.close()
		}
	}()
	keep := func(fd int, err error) (int, error) {
		if err == nil {
			st.fds = append(st.fds, fd)
		}
		return fd, err
	}
	inFD, err := keep(readable.Dup(in))
	if err != nil {
		return nil, fmt.Errorf("cannot take over the input: %w", err)
	}
	outFD, err := keep(readable.Dup(out))
	if err != nil {
		return nil, fmt.Errorf("cannot take over the output: %w", err)
	}
	if err := standIns(in, out); err != nil {
		return nil, err
	}
	stopIn, err := keep(unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK))
	if err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	stopOut, err := keep(unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK))
	if err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	st.in = &pipeEnd{fd: inFD, stop: stopIn}
	st.out = &pipeEnd{fd: outFD, stop: stopOut}
	// No parent can be watched from another pid namespace (getppid is 0 then); the end
	// of the input remains.
	if ppid := os.Getppid(); ppid > 0 {
		if fd, err := keep(unix.PidfdOpen(ppid, 0)); err == nil {
			if os.Getppid() != ppid {
				return nil, errParent
			}
			st.in.other = []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			st.in.woken = func(int32) error { return errParent }
		}
	}
	return st, st.in.watch()
}

// standIns puts /dev/null on fd 0 and stderr on fd 1, if these were the streams.
func standIns(in, out *os.File) error {
	if in == os.Stdin {
		null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("cannot open %s: %w", os.DevNull, err)
		}
		defer unix.Close(null)
		if err := unix.Dup3(null, 0, 0); err != nil {
			return os.NewSyscallError("dup3", err)
		}
	}
	if out == os.Stdout {
		if err := unix.Dup3(2, 1, 0); err != nil {
			return os.NewSyscallError("dup3", err)
		}
	}
	return nil
}

var one = []byte{1, 0, 0, 0, 0, 0, 0, 0}

func (st *streams) stopReading() { _, _ = unix.Write(st.in.stop, one) }
func (st *streams) stopWriting() { _, _ = unix.Write(st.out.stop, one) }

func (st *streams) close() {
	if st.in != nil && st.in.input != nil {
		st.in.input.Close()
	}
	for _, fd := range st.fds {
		unix.Close(fd)
	}
}
