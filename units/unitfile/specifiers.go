package unitfile

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"

	systemd "github.com/coreos/go-systemd/v22/unit"
	"golang.org/x/sys/unix"
)

// expand resolves the specifiers (%n, %i, …) in s. Unlike systemd it refuses an
// unknown one, which would otherwise reach a program as it is.
func (p *parser) expand(s string) (string, error) {
	if !strings.Contains(s, "%") {
		return s, nil
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b.WriteByte(s[i])
			continue
		}
		i++
		if i == len(s) {
			return "", errors.New("a single % at the end (a percent sign is written %%)")
		}
		v, err := p.specifier(s[i])
		if err != nil {
			return "", fmt.Errorf("specifier %%%c: %w", s[i], err)
		}
		b.WriteString(v)
		if b.Len() > MaxSize {
			return "", errors.New("the value grows too long")
		}
	}
	return b.String(), nil
}

func (p *parser) specifier(c byte) (string, error) {
	if c == '%' {
		return "%", nil
	}
	if v, ok := p.opts.Specifiers[c]; ok {
		return v, nil
	}
	base := strings.TrimSuffix(p.name, filepath.Ext(p.name))
	prefix, instance, _ := strings.Cut(base, "@")
	last := prefix[strings.LastIndexByte(prefix, '-')+1:]
	env := func(name, dflt string) (string, error) {
		if v := os.Getenv(name); filepath.IsAbs(v) {
			return v, nil
		}
		home, err := os.UserHomeDir()
		return filepath.Join(home, dflt), err
	}
	switch c {
	case 'n':
		return p.name, nil
	case 'N':
		return base, nil
	case 'p':
		return prefix, nil
	case 'P':
		return systemd.UnitNameUnescape(prefix), nil
	case 'i':
		return instance, nil
	case 'I':
		return systemd.UnitNameUnescape(instance), nil
	case 'j':
		return last, nil
	case 'J':
		return systemd.UnitNameUnescape(last), nil
	case 'u':
		u, err := user.Current()
		if err != nil {
			return "", err
		}
		return u.Username, nil
	case 'U':
		return strconv.Itoa(os.Getuid()), nil
	case 'g':
		g, err := user.LookupGroupId(strconv.Itoa(os.Getgid()))
		if err != nil {
			return "", err
		}
		return g.Name, nil
	case 'G':
		return strconv.Itoa(os.Getgid()), nil
	case 'h':
		return os.UserHomeDir()
	case 's':
		if v := os.Getenv("SHELL"); v != "" {
			return v, nil
		}
		return "/bin/sh", nil
	case 't':
		if v := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(v) {
			return v, nil
		}
		return "/run/user/" + strconv.Itoa(os.Getuid()), nil
	case 'T', 'V':
		if v := os.Getenv("TMPDIR"); filepath.IsAbs(v) {
			return v, nil
		}
		if c == 'V' {
			return "/var/tmp", nil
		}
		return "/tmp", nil
	case 'S':
		return env("XDG_STATE_HOME", ".local/state")
	case 'C':
		return env("XDG_CACHE_HOME", ".cache")
	case 'E':
		return env("XDG_CONFIG_HOME", ".config")
	case 'L':
		v, err := env("XDG_STATE_HOME", ".local/state")
		return filepath.Join(v, "log"), err
	case 'H', 'l':
		host, err := os.Hostname()
		if c == 'l' {
			host, _, _ = strings.Cut(host, ".")
		}
		return host, err
	case 'm':
		b, err := os.ReadFile("/etc/machine-id")
		return strings.TrimSpace(string(b)), err
	case 'b':
		b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		return strings.ReplaceAll(strings.TrimSpace(string(b)), "-", ""), err
	case 'v':
		var u unix.Utsname
		err := unix.Uname(&u)
		return unix.ByteSliceToString(u.Release[:]), err
	}
	return "", errors.New("unknown (a percent sign is written %%)")
}
