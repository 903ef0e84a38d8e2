package manager

import (
	"fmt"
	"strings"

	"mypr/internal/api"
	"mypr/supervisor/control"
	"mypr/units/manager/store"
)

// maxLosses is how many ended generations are remembered by name.
const maxLosses = 64

// loss is the end of a generation. Every connection is told once of every loss that
// came after it attached; a front end that attaches again, and a logical client that
// comes back, of those that came while they were away.
type loss struct {
	seq        int64 // row of the generation
	generation string
	kind       string // api.Notice.Kind
	text       string
	at         float64
}

func (m *Manager) lastLoss() int64 {
	if n := len(m.losses); n > 0 {
		return m.losses[n-1].seq
	}
	return 0
}

// toldUpTo is what a connection knows whose client was shown the generation seen last
// ("": nothing yet). Called with mu held.
func (m *Manager) toldUpTo(seen string) int64 {
	for _, l := range m.losses {
		if l.generation == seen {
			return l.seq - 1
		}
	}
	return m.lastLoss()
}

// takeNotice tells a connection what it has not been told; nil when there is nothing.
// Called with mu held.
func (m *Manager) takeNotice(c *connection) *api.Notice {
	var news []loss
	for _, l := range m.losses {
		if l.seq > c.told {
			news = append(news, l)
		}
	}
	if len(news) == 0 {
		return nil
	}
	last := news[len(news)-1]
	c.told = last.seq
	n := &api.Notice{Kind: last.kind, Text: last.text, OldGeneration: news[0].generation, Generation: m.kernel.gen}
	if more := len(news) - 1; more > 0 {
		n.Text = fmt.Sprintf("%s (Before that, %d earlier sessions of this workspace ended that you had not been told of.)", n.Text, more)
		if more == 1 {
			n.Text = last.text + " (Before that, one earlier session of this workspace ended that you had not been told of: " + firstSentence(news[0].text) + ")"
		}
	}
	return n
}

func firstSentence(text string) string {
	if i := strings.Index(text, ". "); i >= 0 {
		return text[:i+1]
	}
	return text
}

// saveTold remembers for the logical client what its connection was told.
func (m *Manager) saveTold(c *connection, n *api.Notice) {
	if n == nil {
		return
	}
	m.mu.Lock()
	if c.client == nil {
		m.mu.Unlock()
		return
	}
	id, told := c.client.id, c.told
	m.mu.Unlock()
	m.store.Submit(&store.Op{Lazy: true, Keep: true, Apply: func(t *store.Tx) error { return t.Told(id, told) }})
}

func kindOf(how *ending) string {
	if how == nil {
		return "kernel_died"
	}
	return how.kind
}

// lossText says what ended, why, what is lost and what remains.
func lossText(generation string, how *ending, u control.UnitStatus, cells []string) string {
	var b strings.Builder
	name := generation
	if len(name) > 8 {
		name = name[:8]
	}
	because := ""
	if how != nil && how.reason != "" {
		because = " (" + how.reason + ")"
	}
	verb := "lost"
	switch {
	case how == nil:
		fmt.Fprintf(&b, "The Python kernel (generation %s) %s.", name, describeEnd(u))
	case how.kind == "reset":
		verb = "cancelled"
		fmt.Fprintf(&b, "The session was reset%s; generation %s is over.", because, name)
	case how.kind == "restart":
		verb = "cancelled"
		fmt.Fprintf(&b, "The runtime was restarted%s; generation %s is over.", because, name)
	default:
		verb = "cancelled"
		fmt.Fprintf(&b, "The runtime was stopped%s; generation %s is over.", because, name)
	}
	b.WriteString(" Gone: everything in Python memory (variables, imports, functions, ws.local, task handles)")
	switch n := len(cells); {
	case n == 1:
		fmt.Fprintf(&b, "; cell %s was %s", cells[0], verb)
	case n > 1 && n <= 4:
		fmt.Fprintf(&b, "; cells %s were %s", strings.Join(cells, ", "), verb)
	case n > 4:
		fmt.Fprintf(&b, "; %d cells were %s (%s, …)", n, verb, strings.Join(cells[:3], ", "))
	}
	b.WriteString(". Still there: files, installed packages, history, saved output and messages. Nothing was or will be run again by itself: define anew what you need.")
	return b.String()
}
