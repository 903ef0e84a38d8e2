package files

import (
	"fmt"
	"strings"

	"mypr/internal/rpc"
)

// The text that apply_patch takes:
//
//	patch   = "*** Begin Patch" file… "*** End Patch"
//	file    = "*** Add File: " path, then lines "+text"
//	        | "*** Delete File: " path
//	        | "*** Update File: " path, ["*** Move to: " path], hunk…
//	hunk    = "@@" or "@@ " anchor, once or more; then lines " text", "-text", "+text";
//	          the last hunk of a file may end with "*** End of File"
//
// An anchor is a whole line of the file; the hunk is the first match after it.
// Without an anchor the old lines of the hunk must match at exactly one place after
// the hunk before it. The first hunk may leave out "@@". An empty line in a hunk
// stands for an empty line of context; at the end of a section it stands for nothing.

// Actions of a section.
const (
	actionAdd    = "add"
	actionUpdate = "update"
	actionDelete = "delete"
	actionMove   = "move" // of a result: an update with "Move to"
)

type section struct {
	action string
	path   string
	moveTo string
	added  []string // lines of a new file
	hunks  []hunk
	line   int // in the patch, for messages
}

type hunk struct {
	anchors []string
	lines   []hunkLine
	eof     bool
	line    int
}

type hunkLine struct {
	kind byte // ' ', '-', '+'
	text string
}

func (h *hunk) side(kinds string) (lines []string) {
	for _, l := range h.lines {
		if strings.IndexByte(kinds, l.kind) >= 0 {
			lines = append(lines, l.text)
		}
	}
	return lines
}

const (
	beginPatch = "*** Begin Patch"
	endPatch   = "*** End Patch"
	endOfFile  = "*** End of File"
	addFile    = "*** Add File:"
	updateFile = "*** Update File:"
	deleteFile = "*** Delete File:"
	moveTo     = "*** Move to:"
)

// maxSections bounds the files of one patch, maxCompared the lines that its hunks are
// compared with: every hunk looks through the rest of its file, for a second match.
const (
	maxSections = 1000
	maxCompared = 1 << 30
)

type patchParser struct {
	lines []string
	next  int
}

func (p *patchParser) fail(line int, format string, args ...any) *rpc.Error {
	return invalid("line %d of the patch: %s", line, fmt.Sprintf(format, args...))
}

// parsePatch reads a patch. Its errors name the line.
func parsePatch(text string) ([]section, error) {
	p := &patchParser{lines: strings.Split(text, "\n")}
	for len(p.lines) > 0 && strings.TrimSpace(p.lines[len(p.lines)-1]) == "" {
		p.lines = p.lines[:len(p.lines)-1]
	}
	for p.next < len(p.lines) && strings.TrimSpace(p.lines[p.next]) == "" {
		p.next++
	}
	if p.next == len(p.lines) {
		return nil, invalid("the patch is empty").WithHint("it begins with %q and ends with %q", beginPatch, endPatch)
	}
	// A patch typed with CRLF everywhere means LF.
	if strings.HasSuffix(p.lines[p.next], "\r") {
		for i, l := range p.lines {
			p.lines[i] = strings.TrimSuffix(l, "\r")
		}
	}
	if strings.TrimRight(p.lines[p.next], " \t") != beginPatch {
		err := p.fail(p.next+1, "it must be %q, not %.60q", beginPatch, p.lines[p.next])
		if l := p.lines[p.next]; strings.HasPrefix(l, "diff ") || strings.HasPrefix(l, "--- ") || strings.HasPrefix(l, "Index: ") {
			return nil, err.WithHint(`a diff of git's is for git: await ws.shell.run(["git", "apply", "-"], input=patch, check=True)`)
		}
		return nil, err
	}
	if last := len(p.lines) - 1; strings.TrimRight(p.lines[last], " \t") != endPatch {
		return nil, p.fail(last+1, "the last line must be %q, not %.60q", endPatch, p.lines[last]).WithHint("the patch may have been cut off; nothing was changed")
	}
	p.lines = p.lines[:len(p.lines)-1]
	p.next++
	var sections []section
	for p.next < len(p.lines) {
		if strings.TrimSpace(p.lines[p.next]) == "" {
			p.next++
			continue
		}
		s, err := p.section()
		if err != nil {
			return nil, err
		}
		if sections = append(sections, s); len(sections) > maxSections {
			return nil, rpc.Errorf(rpc.CodeTooLarge, "the patch changes more than %d files", maxSections).WithHint("apply it in parts")
		}
	}
	if len(sections) == 0 {
		return nil, invalid("the patch changes no file").WithHint("add sections that begin with %q, %q or %q", addFile, updateFile, deleteFile)
	}
	return sections, nil
}

// header splits "*** Add File: path".
func header(line, prefix string) (path string, ok bool) {
	rest, ok := strings.CutPrefix(line, prefix)
	return strings.Trim(rest, " \t"), ok
}

func (p *patchParser) section() (section, error) {
	line := p.lines[p.next]
	s := section{line: p.next + 1}
	var ok bool
	if s.path, ok = header(line, addFile); ok {
		s.action = actionAdd
	} else if s.path, ok = header(line, updateFile); ok {
		s.action = actionUpdate
	} else if s.path, ok = header(line, deleteFile); ok {
		s.action = actionDelete
	} else {
		return s, p.fail(s.line, "%.60q begins no section", line).
			WithHint("a section begins with %q, %q or %q; lines of a new file begin with +, lines of a hunk with a space, - or +", addFile, updateFile, deleteFile)
	}
	if s.path == "" {
		return s, p.fail(s.line, "it names no file")
	}
	p.next++
	switch s.action {
	case actionAdd:
		return s, p.addedLines(&s)
	case actionUpdate:
		return s, p.update(&s)
	}
	return s, nil
}

// more says whether the section goes on, and passes over empty lines at its end.
func (p *patchParser) more() bool {
	for i := p.next; ; i++ {
		switch {
		case i == len(p.lines) || strings.HasPrefix(p.lines[i], "*** "):
			if i == len(p.lines) || p.lines[i] != endOfFile {
				p.next = i
				return false
			}
			p.next = i
			return true
		case p.lines[i] != "":
			return true
		}
	}
}

func (p *patchParser) addedLines(s *section) error {
	for p.more() {
		text, ok := strings.CutPrefix(p.lines[p.next], "+")
		if !ok {
			return p.fail(p.next+1, "in a new file every line begins with +, not %.60q", p.lines[p.next])
		}
		s.added = append(s.added, text)
		p.next++
	}
	return nil
}

func (p *patchParser) update(s *section) error {
	if p.next < len(p.lines) {
		if to, ok := header(p.lines[p.next], moveTo); ok {
			if to == "" {
				return p.fail(p.next+1, "it names no file")
			}
			s.moveTo = to
			p.next++
		}
	}
	for p.more() {
		h, err := p.hunk(len(s.hunks) == 0)
		if err != nil {
			return err
		}
		if len(s.hunks) > 0 && s.hunks[len(s.hunks)-1].eof {
			return p.fail(h.line, "a hunk follows the one that ends with %q", endOfFile)
		}
		s.hunks = append(s.hunks, h)
	}
	if len(s.hunks) == 0 && s.moveTo == "" {
		return p.fail(s.line, "the update of %s has no hunk", s.path)
	}
	return nil
}

func (p *patchParser) hunk(first bool) (hunk, error) {
	h := hunk{line: p.next + 1}
	for ; p.next < len(p.lines) && strings.HasPrefix(p.lines[p.next], "@@"); p.next++ {
		anchor := p.lines[p.next][2:]
		if strings.HasPrefix(anchor, " -") && strings.Contains(anchor[2:], "@@") {
			return h, p.fail(p.next+1, "line numbers are not used").WithHint("write @@ alone, or @@ and a whole line of the file that comes before the change")
		}
		if anchor != "" && anchor[0] != ' ' {
			return h, p.fail(p.next+1, "%.60q: a space must follow @@", p.lines[p.next])
		}
		if anchor != "" && anchor != " " {
			h.anchors = append(h.anchors, anchor[1:])
		}
	}
	if p.next+1 == h.line && !first {
		return h, p.fail(h.line, "%.60q: a hunk begins with @@", p.lines[p.next])
	}
	changes := false
	for p.more() && !strings.HasPrefix(p.lines[p.next], "@@") {
		l := p.lines[p.next]
		p.next++
		if l == endOfFile {
			h.eof = true
			break
		}
		if l == "" {
			h.lines = append(h.lines, hunkLine{kind: ' '})
			continue
		}
		switch l[0] {
		case '+', '-':
			changes = true
		case ' ':
		default:
			return h, p.fail(p.next, "%.60q: lines of a hunk begin with a space, - or +", l)
		}
		h.lines = append(h.lines, hunkLine{l[0], l[1:]})
	}
	if !changes {
		return h, p.fail(h.line, "the hunk changes nothing")
	}
	return h, nil
}

// text is the content of a new file: every line ends with a newline.
func (s *section) text() string {
	if len(s.added) == 0 {
		return ""
	}
	return strings.Join(s.added, "\n") + "\n"
}

// update applies the hunks to the text of a file. A byte order mark, CRLF line ends
// and a missing newline at the end stay as they are.
func (s *section) update(text string) (string, error) {
	mark, body := "", text
	if rest, ok := strings.CutPrefix(text, "\uFEFF"); ok {
		mark, body = "\uFEFF", rest
	}
	end := "\n"
	if onlyCRLF(body) {
		end = "\r\n"
	}
	lines := strings.Split(body, end)
	last := lines[len(lines)-1] == "" // it ends with a newline, or is empty
	if last {
		lines = lines[:len(lines)-1]
	}
	if len(s.hunks)*len(lines) > maxCompared {
		return "", rpc.Errorf(rpc.CodeTooLarge, "%s: %d hunks for %d lines are too many for one patch", s.path, len(s.hunks), len(lines)).WithHint("apply it in parts")
	}
	var out []string
	at := 0 // lines before it are in out
	for i := range s.hunks {
		h := &s.hunks[i]
		if end == "\r\n" {
			for j := range h.lines {
				h.lines[j].text = strings.TrimSuffix(h.lines[j].text, "\r")
			}
		}
		pos, err := s.locate(h, lines, at)
		if err != nil {
			return "", err
		}
		out = append(out, lines[at:pos]...)
		out = append(out, h.side(" +")...)
		at = pos + len(h.side(" -"))
	}
	out = append(out, lines[at:]...)
	if len(out) == 0 {
		return mark, nil
	}
	body = strings.Join(out, end)
	if last {
		body += end
	}
	return mark + body, nil
}

// locate finds the one place for a hunk, from line at on.
func (s *section) locate(h *hunk, lines []string, at int) (int, error) {
	old := h.side(" -")
	where := func(code, format string, args ...any) *rpc.Error {
		e := rpc.Errorf(code, "%s, hunk at line %d of the patch: %s; nothing was changed", s.path, h.line, fmt.Sprintf(format, args...))
		e.Details = map[string]any{"path": s.path, "patch_line": h.line}
		return e
	}
	from := at
	for i, a := range h.anchors {
		found := find(lines, []string{strings.TrimSuffix(a, "\r")}, from)
		switch {
		case len(found) == 0:
			return 0, where(CodeNoMatch, "the line %.80q is not there", a).WithHint("an anchor after @@ is a whole line of the file, copied exactly with its indentation")
		case len(found) > 1 && i == 0:
			return 0, where(CodeAmbiguous, "the line %.80q is there more than once, on lines %d and %d", a, found[0]+1, found[1]+1).
				WithHint("use an anchor that occurs once, or put a second @@ line before it")
		}
		from = found[0] + 1
	}
	if h.eof {
		pos := len(lines) - len(old)
		if pos < from || len(find(lines[pos:], old, 0)) == 0 && len(old) > 0 {
			return 0, where(CodeNoMatch, "the file does not end with its old lines").WithHint("read the end of the file and copy it exactly")
		}
		return pos, nil
	}
	if len(old) == 0 {
		if len(h.anchors) == 0 && len(lines) > 0 {
			return 0, where(CodeAmbiguous, "it only adds lines, and does not say where").
				WithHint("give a line of context before or after them, an anchor after @@, or %q", endOfFile)
		}
		return from, nil
	}
	found := find(lines, old, from)
	switch {
	case len(found) == 0:
		return 0, where(CodeNoMatch, "its old lines are not there%s", s.hint(lines, old, from)).WithHint("read the file again and copy the context exactly")
	case len(found) > 1 && len(h.anchors) == 0:
		return 0, where(CodeAmbiguous, "its old lines are there more than once, on lines %d and %d", found[0]+1, found[1]+1).
			WithHint("add context, or an anchor after @@: a line that comes before the right place")
	}
	return found[0], nil
}

// maxHintLines bounds the work for a hint.
const maxHintLines = 1 << 20

// hint says what may be wrong with old lines that were not found.
func (s *section) hint(lines, old []string, from int) string {
	if found := find(lines, old, 0); len(found) > 0 {
		return fmt.Sprintf(" after line %d, but on line %d: hunks come in the order of the file", from, found[0]+1)
	}
	if len(lines) > maxHintLines {
		return ""
	}
	loose := func(in []string) []string {
		out := make([]string, len(in))
		for i, l := range in {
			out[i] = strings.Join(strings.Fields(l), " ")
		}
		return out
	}
	if found := find(loose(lines), loose(old), 0); len(found) > 0 {
		return fmt.Sprintf(", but line %d differs only in white space", found[0]+1)
	}
	return ""
}

// find gives the first two places, from line from on, where want is. It is Knuth,
// Morris and Pratt's search over lines: a file of one line repeated stays linear.
func find(lines, want []string, from int) (found []int) {
	if len(want) == 0 {
		return nil
	}
	fail := make([]int, len(want))
	for i, k := 1, 0; i < len(want); i++ {
		for k > 0 && want[i] != want[k] {
			k = fail[k-1]
		}
		if want[i] == want[k] {
			k++
		}
		fail[i] = k
	}
	k := 0
	for i := from; i < len(lines); i++ {
		for k > 0 && lines[i] != want[k] {
			k = fail[k-1]
		}
		if lines[i] == want[k] {
			k++
		}
		if k == len(want) {
			if found = append(found, i+1-k); len(found) == 2 {
				return found
			}
			k = fail[k-1]
		}
	}
	return found
}
