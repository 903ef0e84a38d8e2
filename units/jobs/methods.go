package jobs

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
	"mypr/internal/rpc"
	"mypr/supervisor/control"
	"mypr/supervisor/spec"
)

type (
	idParams struct {
		ID string `json:"id"`
	}
	readParams struct {
		ID       string  `json:"id"`
		Cursor   *string `json:"cursor"`
		Stream   string  `json:"stream"`
		MaxBytes int     `json:"max_bytes"`
		WaitMS   int64   `json:"wait_ms"`
		Raw      bool    `json:"raw"` // also the bytes, base64, where the text is not exactly them
		// Direct: who asks can read the file of the output itself, which is faster for a
		// long page whose text is exactly the bytes.
		Direct bool `json:"direct"`
	}
	readResult struct {
		ID        string        `json:"id"`
		Output    string        `json:"output"`
		Data      string        `json:"data,omitempty"`
		File      string        `json:"file,omitempty"`   // in place of Output
		Pieces    [][2]int64    `json:"pieces,omitempty"` // of it: offset and length
		Cursor    string        `json:"cursor"`
		HasMore   bool          `json:"has_more"`
		State     string        `json:"state"`
		Truncated bool          `json:"truncated"`
		Warnings  []api.Warning `json:"warnings,omitempty"`
		Error     string        `json:"error,omitempty"`
	}
	skipParams struct {
		ID     string  `json:"id"`
		Cursor *string `json:"cursor"`
		Stream string  `json:"stream"`
		Bytes  int64   `json:"bytes"`
	}
	skipResult struct {
		Cursor string `json:"cursor"`
	}
	waitParams struct {
		ID     string `json:"id"`
		WaitMS *int64 `json:"wait_ms"` // nil: until it is over
	}
	writeParams struct {
		ID   string `json:"id"`
		Text string `json:"text"`
		EOF  bool   `json:"eof"`
	}
	writeResult struct {
		ID     string `json:"id"`
		Bytes  int    `json:"bytes"`
		Closed bool   `json:"closed"`
		EOF    bool   `json:"eof,omitempty"`
	}
	resizeParams struct {
		ID   string `json:"id"`
		Rows int    `json:"rows"`
		Cols int    `json:"cols"`
	}
	resizeResult struct {
		ID   string `json:"id"`
		Rows int    `json:"rows"`
		Cols int    `json:"cols"`
	}
	cancelParams struct {
		ID string `json:"id"`
		// Early: the start may be on its way still, and is then refused.
		Early bool `json:"early"`
	}
	cancelResult struct {
		ID        string `json:"id"`
		Cancelled bool   `json:"cancelled"` // false: it was over before
		State     string `json:"state"`
	}
	outputParams struct {
		ID       string `json:"id"`
		Offset   int64  `json:"offset"`
		MaxBytes int    `json:"max_bytes"`
	}
	outputResult struct {
		Output string `json:"output"`
		Offset int64  `json:"offset"`
		More   bool   `json:"more"`
		Status Status `json:"status"`
	}
	listParams struct {
		IDs      []string `json:"ids"`    // nil: all in memory
		Memory   bool     `json:"memory"` // of ids, only those in memory
		ClientID string   `json:"client_id"`
		Active   bool     `json:"active"`
	}
	listResult struct {
		Jobs []Status `json:"jobs"`
	}
	// RunResult of shell.run.
	RunResult struct {
		Status
		Stdout string `json:"stdout"`
		Stderr string `json:"stderr"`
	}
)

// start of shell.start.
func (s *Service) start(ctx context.Context, c Caller, p startParams) (Status, error) {
	j, err := s.begin(ctx, c, KindShell, &p, 0)
	if err != nil {
		return Status{}, err
	}
	return j.status(), nil
}

// begin starts a job and returns when it runs, or has run, if that is within patience.
func (s *Service) begin(ctx context.Context, c Caller, kind string, p *startParams, patience time.Duration) (*job, error) {
	if c.Again && p.ID != "" { // else only memory can have it, and that is looked at below
		if j, err := s.find(ctx, p.ID); err == nil {
			return j, j.startError(ctx)
		}
	}
	if p.OwnEnv != nil {
		list, err := s.ownEnvironment(c.Generation, p.OwnEnv)
		if err != nil {
			return nil, err
		}
		p.Env = Environment{list: list}
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	template, err := s.o.Unit()
	if err != nil {
		return nil, err
	}
	if p.ID == "" {
		p.ID = newID()
	}
	u, err := unit(template, p.ID, p)
	if err != nil {
		return nil, err
	}
	if s.o.Admit != nil {
		release, err := s.o.Admit(ctx)
		if err != nil {
			return nil, err
		}
		defer release()
	}
	st := Status{
		ID: p.ID, Kind: kind, State: api.Running, Command: p.Command, Cwd: p.Cwd, ClientID: c.ClientID, ConnectionID: c.ConnectionID,
		ExecID: c.ExecID, Generation: c.Generation, PTY: p.PTY, Rows: p.Rows, Cols: p.Cols, Stdin: p.Stdin || p.PTY,
		Typing: p.PTY && p.Input != nil, Timeout: p.Timeout, CreatedAt: now(),
	}
	if p.Limits != (Limits{}) {
		st.Limits = &p.Limits
		s.checkLimits(ctx, &st)
	}
	j := newJob(s, st)
	s.mu.Lock()
	if old := s.jobs[j.id]; old != nil {
		s.mu.Unlock()
		return old, old.startError(ctx)
	}
	if s.closed {
		s.mu.Unlock()
		return nil, errSuspended
	}
	if slices.Contains(s.early, j.id) {
		s.mu.Unlock()
		return nil, rpc.Errorf(rpc.CodeConflict, "job %s was cancelled before it was started", j.id)
	}
	s.jobs[j.id] = j
	s.wg.Add(1) // for run
	s.mu.Unlock()
	if patience > 0 { // who waits anyway does it all
		j.run(u, p, patience)
	} else {
		go j.run(u, p, 0)
	}
	return j, j.startError(ctx)
}

// checkLimits warns of limits that nothing here enforces.
func (s *Service) checkLimits(ctx context.Context, st *Status) {
	var info control.Info
	err := s.supervisor(ctx, func(sup Supervisor) (err error) {
		info, err = sup.Info(ctx)
		return err
	})
	if err != nil {
		return // the start is about to fail for the same reason
	}
	var not []string
	for _, l := range []struct {
		controller string
		asked      bool
	}{{"memory", st.Limits.Memory > 0}, {"cpu", st.Limits.CPU > 0}, {"pids", st.Limits.PIDs > 0}} {
		if l.asked && (info.Tier != 1 || !slices.Contains(info.Controllers, l.controller)) {
			not = append(not, l.controller)
		}
	}
	if len(not) > 0 {
		st.warn("limits_not_enforced", "nothing here enforces the limits on "+strings.Join(not, ", ")+": "+info.TierReason)
	}
}

// startError waits until the job runs or could not be started.
func (j *job) startError(ctx context.Context) error {
	if err := j.answered(ctx); err != nil {
		return err
	}
	j.mu.Lock()
	starting := j.st.State == api.Running && j.st.Invocation == ""
	j.mu.Unlock()
	if starting { // it could not be started, and that is about to be its end
		if err := j.wait(ctx, nil); err != nil {
			return err
		}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.st.Cause == causeStart {
		return rpc.Errorf(CodeStart, "%s", j.st.Error)
	}
	return nil
}

// briefly is how long a command that is waited for anyway may run before anybody is told
// that it does: most are over by then, and cost one message each way.
const briefly = 20 * time.Millisecond

// run begins the life of a job, which nobody's patience ends.
func (j *job) run(u *spec.Unit, p *startParams, patience time.Duration) {
	fail := func(err error) {
		close(j.started)
		j.finish(nil, err)
		j.s.wg.Done()
	}
	// The record is there before the command is, so that a manager that comes after a
	// crash knows what it finds running.
	if err := j.save(j.s.ctx, api.Running); err != nil {
		fail(rpc.Errorf(CodeStart, "the job could not be recorded, so it was not started: %v", err))
		return
	}
	end, err := j.launch(u, p, patience)
	if err != nil {
		j.stopPumps()
		if j.s.ctx.Err() != nil { // the next manager looks for it
			close(j.started)
			j.s.wg.Done()
			return
		}
		if rpc.CodeOf(err) != CodeStart {
			next := ""
			if strings.Contains(err.Error(), "unknown field") { // an update, and this manager was started anew
				next = "; the supervisor runs an older program than the manager: mypr-mcp restart --keep-kernel"
			}
			err = rpc.Errorf(CodeStart, "the command could not be started: %v%s", err, next)
		}
		fail(err)
		return
	}
	close(j.started)
	if end != nil {
		j.stopPumps()
		j.finish(end, nil)
		j.s.wg.Done()
		return
	}
	if p.PTY && p.Input != nil {
		j.s.goIfOpen(func() { j.feed(*p.Input) })
	}
	go j.watch()
}

// run of shell.run: start, wait, and the output in one answer.
func (s *Service) run(ctx context.Context, c Caller, p startParams) (*RunResult, error) {
	limit, err := pageSize(p.MaxBytes)
	if err != nil {
		return nil, err
	}
	patience := briefly
	if p.PTY { // its terminal comes with the answer
		patience = 0
	}
	j, err := s.begin(ctx, c, KindShell, &p, patience)
	if err != nil {
		return nil, err
	}
	if err := j.wait(ctx, nil); err != nil {
		return nil, err
	}
	r := &RunResult{Status: j.status()}
	if r.OutputBytes == 0 {
		return r, nil
	}
	out, err := j.out.page(0, stdout, limit, true)
	if err != nil {
		return nil, err
	}
	r.Stdout = out.text
	r.Truncated = r.Truncated || out.more
	if out.next == r.OutputBytes && !out.more && len(out.data) == int(r.OutputBytes) {
		return r, nil // there is no stderr
	}
	left := limit - len(out.text)
	if left <= 0 {
		r.Truncated = true
		return r, nil
	}
	out, err = j.out.page(0, stderr, left, true)
	if err != nil {
		return nil, err
	}
	r.Stderr = out.text
	r.Truncated = r.Truncated || out.more
	return r, nil
}

// wait returns when the job is over.
func (j *job) wait(ctx context.Context, timeout <-chan time.Time) error {
	select {
	case <-j.over:
		return nil
	case <-timeout:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-j.s.ctx.Done():
		return j.s.suspended(ctx)
	}
}

// suspendGrace is how long a call that waits is left without an answer when the
// manager ends: its connection ends with the manager, and its caller asks the next one.
const suspendGrace = 5 * time.Second

func (s *Service) suspended(ctx context.Context) error {
	grace := time.NewTimer(suspendGrace)
	defer grace.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-grace.C:
		return errSuspended
	}
}

func timer(ms int64) (<-chan time.Time, func()) {
	t := time.NewTimer(time.Duration(ms) * time.Millisecond)
	return t.C, func() { t.Stop() }
}

func checkWait(ms int64) error {
	if ms < 0 || ms > api.MaxWaitMS {
		return rpc.Errorf(rpc.CodeInvalidRequest, "wait_ms is from 0 to %d, not %d", api.MaxWaitMS, ms)
	}
	return nil
}

func pageSize(n int) (int, error) {
	if n == 0 {
		return api.DefaultBytes, nil
	}
	if n < 1 || n > api.MaxBytes {
		return 0, rpc.Errorf(rpc.CodeInvalidRequest, "max_bytes is from 1 to %d, not %d", api.MaxBytes, n)
	}
	return n, nil
}

// directFrom is from how many bytes on a page is worth opening a file for, directPieces
// of how many it may be made.
const (
	directFrom   = 64 << 10
	directPieces = 256
)

func (s *Service) read(ctx context.Context, _ Caller, p readParams) (*readResult, error) {
	if err := errors.Join(checkStream(p.Stream), checkWait(p.WaitMS)); err != nil {
		return nil, err
	}
	limit, err := pageSize(p.MaxBytes)
	if err != nil {
		return nil, err
	}
	j, err := s.find(ctx, p.ID)
	if err != nil {
		return nil, err
	}
	c, err := parseCursor(p.Cursor, j.id, p.Stream)
	if err != nil {
		return nil, err
	}
	timeout, stop := timer(p.WaitMS)
	defer stop()
	for waiting := p.WaitMS > 0; ; {
		more := j.out.changed() // before the page: what comes after it is seen
		ended := j.ended()
		pg, err := j.out.page(c.Offset, p.Stream, max(limit, utf8.UTFMax), ended)
		if errors.Is(err, errCursor) {
			return nil, rpc.Errorf(api.CodeInvalidCursor, "this cursor is beyond the output of job %s", j.id)
		}
		if err != nil {
			return nil, err
		}
		if pg.text != "" || ended || !waiting {
			st := j.status()
			c.Offset = pg.next
			r := &readResult{ID: j.id, Output: pg.text, Cursor: c.String(), HasMore: pg.more, State: st.State,
				Truncated: st.Truncated, Warnings: st.Warnings, Error: st.Error}
			switch exact := utf8.Valid(pg.data); {
			case p.Raw && !exact:
				r.Data = encodeBytes(pg.data)
			case p.Direct && exact && len(pg.data) >= directFrom && len(pg.pieces) <= directPieces:
				r.Output, r.File = "", s.path(j.id, ".out")
				for _, c := range pg.pieces {
					r.Pieces = append(r.Pieces, [2]int64{c.at, c.n})
				}
			}
			return r, nil
		}
		select {
		case <-more:
		case <-j.over:
		case <-timeout:
			waiting = false
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-s.ctx.Done():
			return nil, s.suspended(ctx)
		}
	}
}

// skip moves a cursor by a number of bytes of its stream: expect does not want to
// fetch again what it has matched.
func (s *Service) skip(ctx context.Context, _ Caller, p skipParams) (skipResult, error) {
	if err := checkStream(p.Stream); err != nil {
		return skipResult{}, err
	}
	j, err := s.find(ctx, p.ID)
	if err != nil {
		return skipResult{}, err
	}
	c, err := parseCursor(p.Cursor, j.id, p.Stream)
	if err != nil {
		return skipResult{}, err
	}
	if c.Offset, err = j.out.skip(c.Offset, p.Stream, p.Bytes); err != nil {
		return skipResult{}, rpc.Errorf(api.CodeInvalidCursor, "there are no %d bytes after this cursor", p.Bytes)
	}
	return skipResult{c.String()}, nil
}

func (s *Service) wait(ctx context.Context, _ Caller, p waitParams) (Status, error) {
	j, err := s.find(ctx, p.ID)
	if err != nil {
		return Status{}, err
	}
	var timeout <-chan time.Time
	if p.WaitMS != nil {
		if err := checkWait(*p.WaitMS); err != nil {
			return Status{}, err
		}
		var stop func()
		timeout, stop = timer(*p.WaitMS)
		defer stop()
	}
	if err := j.wait(ctx, timeout); err != nil {
		return Status{}, err
	}
	return j.status(), nil
}

func (s *Service) status(ctx context.Context, _ Caller, p idParams) (Status, error) {
	j, err := s.find(ctx, p.ID)
	if err != nil {
		return Status{}, err
	}
	if j.ended() {
		return j.status(), nil
	}
	// What the description of a job of before lacks, such as its pid, the supervisor
	// tells in a moment; while there is no supervisor, what is known has to do.
	patience := time.NewTimer(time.Second)
	defer patience.Stop()
	select {
	case <-j.started:
	case <-patience.C:
	case <-ctx.Done():
	}
	return j.status(), nil
}

func (s *Service) inMemory(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.jobs[id] != nil
}

// maxEarly bounds the cancellations that are remembered until their start comes, which
// is on the same connection.
const maxEarly = 256

// forbid refuses the start of a job that is not there yet; false when it is.
func (s *Service) forbid(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.jobs[id] != nil || !isID(id) {
		return false
	}
	if len(s.early) == maxEarly {
		s.early = slices.Delete(s.early, 0, 1)
	}
	s.early = append(s.early, id)
	return true
}

func (s *Service) cancelJob(ctx context.Context, c Caller, p cancelParams) (cancelResult, error) {
	if p.Early && s.forbid(p.ID) {
		return cancelResult{p.ID, true, api.Cancelled}, nil
	}
	j, err := s.find(ctx, p.ID)
	if err != nil {
		return cancelResult{}, err
	}
	reason := "it was cancelled"
	if c.ClientID != "" {
		reason += " by " + c.ClientID
	}
	did, err := j.stop(ctx, reason)
	if err != nil {
		return cancelResult{}, err
	}
	return cancelResult{j.id, did, j.status().State}, nil
}

// output is the text of both streams from an offset that only counts forwards.
func (s *Service) output(ctx context.Context, _ Caller, p outputParams) (*outputResult, error) {
	limit, err := pageSize(p.MaxBytes)
	if err != nil {
		return nil, err
	}
	j, err := s.find(ctx, p.ID)
	if err != nil {
		return nil, err
	}
	ended := j.ended()
	pg, err := j.out.page(max(p.Offset, 0), "", max(limit, utf8.UTFMax), ended)
	if errors.Is(err, errCursor) {
		return nil, rpc.Errorf(api.CodeInvalidCursor, "offset %d is beyond the output of job %s", p.Offset, j.id)
	}
	if err != nil {
		return nil, err
	}
	return &outputResult{pg.text, pg.next, pg.more, j.status()}, nil
}

func (s *Service) list(ctx context.Context, _ Caller, p listParams) (listResult, error) {
	r := listResult{Jobs: []Status{}}
	add := func(j *job) {
		st := j.status()
		if (p.ClientID == "" || st.ClientID == p.ClientID) && (!p.Active || !api.Terminal(st.State)) {
			r.Jobs = append(r.Jobs, st)
		}
	}
	if p.IDs == nil {
		for _, j := range s.sorted() {
			add(j)
		}
		return r, nil
	}
	for _, id := range p.IDs {
		if p.Memory && !s.inMemory(id) {
			continue
		}
		if j, err := s.find(ctx, id); err == nil {
			add(j)
		}
	}
	return r, nil
}

// write gives text to the standard input or the terminal of a job.
func (s *Service) write(ctx context.Context, _ Caller, p writeParams) (writeResult, error) {
	j, err := s.find(ctx, p.ID)
	if err != nil {
		return writeResult{}, err
	}
	if err := j.answered(ctx); err != nil {
		return writeResult{}, err
	}
	select {
	case j.writing <- struct{}{}:
		defer func() { <-j.writing }()
	case <-ctx.Done():
		return writeResult{}, ctx.Err()
	}
	j.mu.Lock()
	f, tty, state, stdin := j.stdin, j.pty, j.st.State, j.st.Stdin
	j.mu.Unlock()
	switch {
	case tty != nil:
		f = tty
	case api.Terminal(state):
		return writeResult{}, rpc.Errorf(rpc.CodeConflict, "job %s is over (%s): nothing can be written to it", j.id, state)
	case f == nil && stdin:
		return writeResult{}, rpc.Errorf(rpc.CodeConflict, "the standard input of job %s is closed", j.id)
	case f == nil:
		return writeResult{}, rpc.Errorf(rpc.CodeConflict, "job %s has no open standard input", j.id).
			WithHint("start it with stdin=True or pty=True")
	}
	r := writeResult{ID: j.id}
	if r.Bytes, err = writeAll(ctx, f, []byte(p.Text)); err != nil {
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EIO) || errors.Is(err, os.ErrClosed) {
			return r, rpc.Errorf(rpc.CodeConflict, "job %s reads its standard input no more: %d of %d bytes were written", j.id, r.Bytes, len(p.Text))
		}
		return r, err
	}
	if !p.EOF {
		return r, nil
	}
	r.EOF = true
	if tty != nil {
		_, err := writeAll(ctx, tty, eof(tty))
		return r, err
	}
	r.Closed = true
	return r, j.closeStdin(ctx)
}

// answered waits until the supervisor has answered the start.
func (j *job) answered(ctx context.Context) error {
	select {
	case <-j.started:
	case <-j.over:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// closeStdin closes both ends that keep the pipe open: ours and the supervisor's.
func (j *job) closeStdin(ctx context.Context) error {
	j.mu.Lock()
	f := j.stdin
	j.stdin, j.st.Stdin = nil, false
	j.mu.Unlock()
	if f != nil {
		f.Close()
	}
	if err := j.save(ctx, "input_closed"); err != nil { // a successor that does not know would find the end of file anyway
		j.s.log.Warn("the end of an input could not be saved", "id", j.id, "err", err)
	}
	return j.s.supervisor(ctx, func(sup Supervisor) error { return sup.Release(ctx, unitName(j.id), "stdin") })
}

// writeAll writes until done or until ctx ends.
func writeAll(ctx context.Context, f *os.File, p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if err := f.SetWriteDeadline(time.Time{}); err != nil {
		return 0, err
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	n, err := f.Write(p)
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	return n, err
}

// eof is the terminal's end-of-file character, as the program has set it.
func eof(tty *os.File) []byte {
	c := byte(4) // ^D
	if raw, err := tty.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			if t, err := unix.IoctlGetTermios(int(fd), unix.TCGETS); err == nil && t.Cc[unix.VEOF] != 0 {
				c = t.Cc[unix.VEOF]
			}
		})
	}
	return []byte{c}
}

// feed types input into a terminal and ends it. The end-of-file character means that
// only at the start of a line, so text without a newline at its end needs two.
func (j *job) feed(text string) {
	j.mu.Lock()
	tty := j.pty
	j.mu.Unlock()
	if tty == nil {
		return
	}
	end := eof(tty)
	if text != "" && text[len(text)-1] != '\n' {
		end = append(end, end...)
	}
	_, _ = writeAll(j.s.ctx, tty, append([]byte(text), end...)) // the program may end without reading it
	if j.s.ctx.Err() != nil {
		return
	}
	j.mu.Lock()
	j.st.Typing = false
	over := api.Terminal(j.st.State)
	j.mu.Unlock()
	if over {
		return
	}
	if err := j.save(j.s.ctx, "input_closed"); err != nil { // a successor would say that it does not know
		j.s.log.Warn("the end of an input could not be saved", "id", j.id, "err", err)
	}
}

func (s *Service) resize(ctx context.Context, _ Caller, p resizeParams) (resizeResult, error) {
	if err := checkSize(p.Rows, p.Cols); err != nil {
		return resizeResult{}, err
	}
	j, err := s.find(ctx, p.ID)
	if err != nil {
		return resizeResult{}, err
	}
	if err := j.answered(ctx); err != nil {
		return resizeResult{}, err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case !j.st.PTY:
		return resizeResult{}, rpc.Errorf(rpc.CodeConflict, "job %s has no terminal", j.id).WithHint("start it with pty=True")
	case j.pty == nil:
		return resizeResult{}, rpc.Errorf(rpc.CodeConflict, "job %s is over (%s)", j.id, j.st.State)
	}
	raw, err := j.pty.SyscallConn()
	if err != nil {
		return resizeResult{}, err
	}
	var ierr error
	err = raw.Control(func(fd uintptr) {
		ierr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(p.Rows), Col: uint16(p.Cols)})
	})
	if err := errors.Join(err, ierr); err != nil {
		return resizeResult{}, err
	}
	j.st.Rows, j.st.Cols = p.Rows, p.Cols
	return resizeResult{j.id, p.Rows, p.Cols}, nil
}
