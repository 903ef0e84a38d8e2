package skills

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
)

// maxLinks bounds the links of one skill that are looked at.
const maxLinks = 1000

// checkLinks reports local links that lead nowhere or outside of the skills.
func (s *Service) checkLinks(name, body string, before int, r *Report) {
	dir := filepath.Join(s.dir, name)
	root, err := filepath.EvalSymlinks(s.dir)
	if err != nil {
		root = filepath.Clean(s.dir) // it is made with the first skill
	}
	for _, l := range links(body) {
		target, local := localTarget(l.target)
		if !local {
			continue
		}
		line := before + l.line
		path := filepath.Join(dir, target)
		outside := filepath.IsAbs(target) || !inside(filepath.Clean(s.dir), path)
		if !outside {
			real, err := filepath.EvalSymlinks(path)
			switch {
			case err == nil:
				outside = !inside(root, real)
			case errors.Is(err, fs.ErrNotExist):
				if _, err := os.Lstat(path); err == nil {
					r.Errors = append(r.Errors, Finding{"link_missing", fmt.Sprintf("the link to %s is a symbolic link that leads nowhere", l.target), line})
					continue
				}
				r.Errors = append(r.Errors, Finding{"link_missing", fmt.Sprintf("the link to %s leads to no file", l.target), line})
				continue
			default:
				r.Errors = append(r.Errors, Finding{"link_missing", fmt.Sprintf("the link to %s cannot be followed: %v", l.target, err), line})
				continue
			}
		}
		if outside {
			r.Errors = append(r.Errors, Finding{"link_outside", fmt.Sprintf("the link to %s leads outside of .mypr/skills", l.target), line})
		}
	}
}

// localTarget is the file that a link destination means, if it means one.
func localTarget(target string) (path string, local bool) {
	if target == "" || target[0] == '#' || strings.HasPrefix(target, "//") {
		return "", false
	}
	if i := strings.IndexByte(target, ':'); i > 0 && !strings.ContainsAny(target[:i], "/?#") {
		return "", false // a scheme
	}
	if i := strings.IndexAny(target, "?#"); i >= 0 {
		target = target[:i]
	}
	if un, err := url.PathUnescape(target); err == nil {
		target = un
	}
	return target, target != "" && !strings.ContainsRune(target, 0)
}

type link struct {
	target string
	line   int // from 1
}

// links finds the destinations of Markdown's inline links and images, [text](dest), and
// of reference definitions, [label]: dest. Code is skipped.
func links(text string) []link {
	var found []link
	fence := ""
	number := 0
	for line := range strings.Lines(text) {
		number++
		trimmed := strings.TrimLeft(line, " ")
		indent := len(line) - len(trimmed)
		if fence != "" {
			if indent < 4 && strings.HasPrefix(trimmed, fence) && strings.Trim(trimmed, fence[:1]+" \t\r\n") == "" {
				fence = ""
			}
			continue
		}
		if mark := fenceOf(trimmed); mark != "" && indent < 4 {
			fence = mark
			continue
		}
		if indent >= 4 || strings.HasPrefix(line, "\t") {
			continue // code, as long as it is not inside a list; a link missed there is no harm
		}
		line = withoutCode(line)
		if label, rest, ok := strings.Cut(strings.TrimSpace(line), "]:"); ok && strings.HasPrefix(label, "[") && !strings.Contains(label, "](") {
			if d := destination(strings.TrimSpace(rest), ' '); d != "" {
				found = append(found, link{d, number})
			}
			continue
		}
		for rest := line; len(found) < maxLinks; {
			i := strings.Index(rest, "](")
			if i < 0 {
				break
			}
			rest = rest[i+2:]
			if strings.IndexByte(rest, ')') < 0 && !strings.HasPrefix(rest, "<") {
				break
			}
			if d := destination(rest, ')'); d != "" {
				found = append(found, link{d, number})
			}
		}
	}
	return found
}

func fenceOf(line string) string {
	for _, c := range []string{"`", "~"} {
		n := len(line) - len(strings.TrimLeft(line, c))
		if n >= 3 && (c == "~" || !strings.Contains(line[n:], "`")) {
			return line[:n]
		}
	}
	return ""
}

// withoutCode blanks out code spans.
func withoutCode(line string) string {
	if !strings.Contains(line, "`") {
		return line
	}
	b := []byte(line)
	for i := 0; i < len(b); {
		if b[i] != '`' {
			i++
			continue
		}
		n := i
		for n < len(b) && b[n] == '`' {
			n++
		}
		mark := line[i:n]
		end := strings.Index(line[n:], mark)
		if end < 0 {
			return string(b)
		}
		end += n + len(mark)
		for ; i < end; i++ {
			b[i] = ' '
		}
	}
	return string(b)
}

// destination reads a link destination up to white space or the closing character.
// Balanced parentheses belong to it.
func destination(text string, closing byte) string {
	text = strings.TrimLeft(text, " \t")
	if strings.HasPrefix(text, "<") {
		if i := strings.IndexByte(text, '>'); i > 0 {
			return text[1:i]
		}
		return ""
	}
	depth := 0
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			return text[:i]
		case c == '(':
			depth++
		case c == ')' && closing == ')':
			if depth == 0 {
				return text[:i]
			}
			depth--
		}
	}
	return text
}
