package frontend

import (
	"bytes"
	"errors"
	"fmt"
	"image"
	_ "image/jpeg" // DecodeConfig
	_ "image/png"  // DecodeConfig
	"io"
	"os"

	"golang.org/x/sys/unix"

	"mypr/internal/api"
)

const (
	// maxPictures bounds the images of one result; the others are named as files.
	maxPictures = 10
	// maxSide is the largest side that model providers take. One image over it makes
	// every later request of the same conversation fail.
	maxSide = 8000
)

// picture is an image as it goes into a result.
type picture struct {
	data []byte
	mime string
}

// attach loads the images of the page, notes the fate of each artifact, and adds a
// warning to r for those that are not shown.
func (p *page) attach(r *api.ExecResult) []picture {
	var out []picture
	left := int64(api.MaxInlineImages)
	for i := range p.artifacts {
		a := &p.artifacts[i]
		if a.Mime != "image/png" && a.Mime != "image/jpeg" {
			continue
		}
		var data []byte
		code, err := "artifact_omitted", error(nil)
		switch {
		case len(out) == maxPictures:
			err = fmt.Errorf("over %d images in one answer", maxPictures)
		case a.Size > left:
			err = errors.New("over the 2 MiB of images that one answer carries")
		default:
			if data, err = load(a.Path, left); err != nil {
				code = "artifact_unavailable"
				if errors.Is(err, errBudget) {
					code = "artifact_omitted"
				}
			}
		}
		if err != nil {
			a.fate = "not shown: " + err.Error()
			warn(r, code, fmt.Sprintf("%s: %v", a.Path, err))
			continue
		}
		left -= int64(len(data))
		out = append(out, picture{data, a.Mime})
		a.fate = fmt.Sprintf("image %d", len(out))
	}
	return out
}

var errBudget = errors.New("over the 2 MiB of images that one answer carries")

// load reads an image of at most limit bytes. What is at the path may have been
// replaced since the kernel wrote it, so it is opened without following a link and
// without waiting for the other side of a fifo.
func load(path string, limit int64) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("cannot open it: %w", err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, errors.New("it is not a regular file")
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, errBudget
	}
	cfg, _, err := image.DecodeConfig(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("it is no readable image: %w", err)
	}
	if cfg.Width > maxSide || cfg.Height > maxSide {
		return nil, fmt.Errorf("%dx%d pixels are more than the %d a side that models take", cfg.Width, cfg.Height, maxSide)
	}
	return data, nil
}

// warn adds a warning to r within the protocol's limit.
func warn(r *api.ExecResult, code, text string) {
	if len(r.Warnings) >= api.MaxWarnings {
		r.WarningsTruncated = true
		return
	}
	r.Warnings = append(r.Warnings, api.Warning{Code: code, Text: clip(text, 256)})
}
