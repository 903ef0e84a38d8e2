package search

import (
	"bytes"
	"context"
	"io"
	"strings"
	"sync"
	"time"

	"mypr/internal/job"
)

// Backends says what can be searched with here.
type Backends struct {
	RG         Backend           `json:"rg"`
	RGA        Backend           `json:"rga"`
	AST        Backend           `json:"ast"`
	Converters map[string]string `json:"converters"` // programs that rga converts documents with, and their paths
}

// Backend is one program.
type Backend struct {
	Available bool     `json:"available"`
	Path      string   `json:"path,omitempty"`
	Version   string   `json:"version,omitempty"`
	PCRE2     *bool    `json:"pcre2,omitempty"`    // of rg
	Adapters  []string `json:"adapters,omitempty"` // of rga
	Problem   string   `json:"problem,omitempty"`
}

// converters are the programs that rga's adapters start.
var converters = []string{"pdftotext", "pandoc", "ffmpeg", "ffprobe", "tesseract", "soffice", "antiword"}

// SearchBackends looks which programs there are. It starts each of them once.
func (s *Service) SearchBackends(ctx context.Context, _ struct{}) (*Backends, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	b := &Backends{Converters: map[string]string{}}
	for _, c := range converters {
		if p := job.Look(s.env, c); p != "" {
			b.Converters[c] = p
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		b.RG = s.probe(ctx, "rg")
		if b.RG.Available {
			exit, _, err := job.Collect(ctx, s.runner, s.command(b.RG.Path, "--pcre2-version"), io.Discard)
			has := err == nil && exit.Code == 0
			b.RG.PCRE2 = &has
		}
	})
	wg.Go(func() {
		b.RGA = s.probe(ctx, "rga")
		if !b.RGA.Available {
			return
		}
		if job.Look(s.env, "rg") == "" {
			b.RGA.Problem = "it needs rg, which is not in PATH"
		}
		var out bytes.Buffer
		if _, _, err := job.Collect(ctx, s.runner, s.command(b.RGA.Path, "--rga-list-adapters"), &out); err == nil {
			for line := range strings.Lines(out.String()) { // " - **poppler**"
				if name, ok := strings.CutPrefix(line, " - **"); ok {
					b.RGA.Adapters = append(b.RGA.Adapters, strings.TrimRight(name, "*\n"))
				}
			}
		}
	})
	wg.Go(func() { b.AST = s.probe(ctx, "ast-grep") })
	wg.Wait()
	return b, ctx.Err()
}

func (s *Service) command(argv ...string) job.Command {
	return job.Command{Name: "search", Argv: argv, Dir: string(s.root), Env: s.env}
}

func (s *Service) probe(ctx context.Context, name string) Backend {
	b := Backend{Path: job.Look(s.env, name)}
	if b.Path == "" {
		return b
	}
	var out bytes.Buffer
	exit, stderr, err := job.Collect(ctx, s.runner, s.command(b.Path, "--version"), &out)
	switch {
	case err != nil:
		b.Problem = err.Error()
	case exit.Code != 0:
		b.Problem = strings.TrimSpace(stderr)
	default:
		b.Available = true
		// "ripgrep 13.0.0\n…", "ripgrep-all 0.10.9", "ast-grep 0.51.1"
		if words := strings.Fields(out.String()); len(words) > 1 {
			b.Version = words[1]
		}
	}
	return b
}
