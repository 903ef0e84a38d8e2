package jobs

import (
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"mypr/internal/ospath"
	"mypr/internal/rpc"
	"mypr/supervisor/process"
)

// codeUnknownEnvironment: the text of an environment is needed, and nothing was started.
const codeUnknownEnvironment = "unknown_environment"

// ownEnvironment names an environment of the kernel. Only what a manager has not seen comes
// with its text.
type ownEnvironment struct {
	ID   string       `json:"id"`
	Text *ospath.Text `json:"text"` // NAME=VALUE strings with NUL bytes between
}

// environments are the last ones, which are used again and again.
type environments struct {
	own struct { // of the kernel
		generation, id string
		list           []string
	}
	file struct { // how the supervisor gets them
		list []string
		f    *os.File
	}
}

// ownEnvironment finds the environment that a kernel names.
func (s *Service) ownEnvironment(generation string, e *ownEnvironment) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := &s.env.own
	switch {
	case e.Text != nil:
		own.generation, own.id, own.list = generation, e.ID, splitEnvironment(string(*e.Text))
	case own.generation != generation || own.id != e.ID:
		return nil, rpc.Errorf(codeUnknownEnvironment, "the environment %q is not known here", e.ID)
	}
	return own.list, nil
}

func splitEnvironment(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, "\x00")
}

// environmentFile is a descriptor of a file in memory that has the list, to be closed by
// the caller: JSON would be read and written anew at every step to the command.
func (s *Service) environmentFile(list []string) (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &s.env.file
	if c.f == nil || len(c.list) != len(list) || unsafe.SliceData(c.list) != unsafe.SliceData(list) {
		f, err := memoryFile("environment", strings.Join(list, "\x00"))
		if err != nil {
			return nil, err
		}
		if c.f != nil {
			c.f.Close()
		}
		c.f, c.list = f, list
	}
	return process.Dup(c.f)
}

// close runs when nobody asks any more.
func (e *environments) close() {
	if e.file.f != nil {
		e.file.f.Close()
	}
}

// memoryFile is a file in memory, so that nobody has to feed who reads it and the death of
// this process takes nothing from them.
func memoryFile(name, text string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteString(text); err != nil {
		f.Close()
		return nil, err
	}
	if _, err := f.Seek(0, 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
