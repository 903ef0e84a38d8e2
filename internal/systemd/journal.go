package systemd

import (
	"context"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/coreos/go-systemd/v22/journal"
)

// JournalVariable tells the units of a supervisor that logs to the journal to do so
// too, and as whose: it is the name of the supervisor's service.
const JournalVariable = "MYPR_JOURNAL_UNIT"

// NewLogger logs to the journal where stderr is connected to it, or where the
// supervisor's is, and else as text to stderr. workspace becomes a field of every entry.
//
// Entries have the fields MESSAGE, PRIORITY, MYPR_WORKSPACE, and for each attribute
// MYPR_ and its name in capitals: MYPR_UNIT, MYPR_INVOCATION, MYPR_CLIENT, MYPR_EXEC, ….
// USER_UNIT makes "journalctl --user -u" show what the manager logs from the scope.
func NewLogger(stderr io.Writer, workspace string) *slog.Logger {
	unit, told := os.LookupEnv(JournalVariable)
	if !told {
		if ok, err := journal.StderrIsJournalStream(); err == nil && ok {
			told = true
			if s := Current(); s != nil {
				unit = s.Unit
			}
			_ = os.Setenv(JournalVariable, unit)
		}
	}
	if !told || !journal.Enabled() {
		return slog.New(slog.NewTextHandler(stderr, nil))
	}
	fields := map[string]string{"SYSLOG_IDENTIFIER": "mypr-mcp", "MYPR_WORKSPACE": workspace}
	if unit != "" {
		fields["USER_UNIT"] = unit
	}
	return slog.New(&journalHandler{fields: fields, fallback: slog.NewTextHandler(stderr, nil)})
}

// journalHandler sends records to the journal.
type journalHandler struct {
	fields   map[string]string
	text     string // " k=v" of WithAttrs
	prefix   string // of WithGroup
	fallback slog.Handler
}

func (h *journalHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

func (h *journalHandler) WithGroup(name string) slog.Handler {
	n := *h
	n.prefix += name + "_"
	n.fallback = h.fallback.WithGroup(name)
	return &n
}

func (h *journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	n := *h
	n.fields = make(map[string]string, len(h.fields)+len(attrs))
	for k, v := range h.fields {
		n.fields[k] = v
	}
	var b strings.Builder
	for _, a := range attrs {
		n.add(n.fields, &b, a)
	}
	n.text += b.String()
	n.fallback = h.fallback.WithAttrs(attrs)
	return &n
}

func (h *journalHandler) add(fields map[string]string, b *strings.Builder, a slog.Attr) {
	v := a.Value.Resolve().String()
	if a.Key == "" || v == "" {
		return
	}
	fields[fieldName(h.prefix+a.Key)] = v
	b.WriteString(" " + a.Key + "=" + v)
}

// fieldName makes a field name of what people write: journald takes capitals, digits
// and underscores, up to 64.
func fieldName(key string) string {
	name := "MYPR_" + strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, key)
	return name[:min(len(name), 64)]
}

// Handle puts the attributes into the message too: journalctl shows only that.
func (h *journalHandler) Handle(ctx context.Context, r slog.Record) error {
	fields := make(map[string]string, len(h.fields)+r.NumAttrs())
	for k, v := range h.fields {
		fields[k] = v
	}
	var b strings.Builder
	b.WriteString(r.Message + h.text)
	r.Attrs(func(a slog.Attr) bool {
		h.add(fields, &b, a)
		return true
	})
	p := journal.PriInfo
	switch {
	case r.Level >= slog.LevelError:
		p = journal.PriErr
	case r.Level >= slog.LevelWarn:
		p = journal.PriWarning
	}
	if err := journal.Send(b.String(), p, fields); err != nil {
		return h.fallback.Handle(ctx, r) // journald is away
	}
	return nil
}
