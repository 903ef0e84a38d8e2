package unitfile

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"mypr/supervisor/spec"
)

func parseBool(s string) (bool, error) {
	switch strings.ToLower(s) {
	case "1", "yes", "y", "true", "t", "on":
		return true, nil
	case "0", "no", "n", "false", "f", "off":
		return false, nil
	}
	return false, fmt.Errorf("%q is neither yes nor no", s)
}

// timeUnit is a unit of systemd.time(7); no unit means seconds. A month is 30.44 days
// and a year 365.25, as there.
func timeUnit(name string) (time.Duration, bool) {
	switch name {
	case "usec", "us", "µs", "μs":
		return time.Microsecond, true
	case "msec", "ms":
		return time.Millisecond, true
	case "", "seconds", "second", "sec", "s":
		return time.Second, true
	case "minutes", "minute", "min", "m":
		return time.Minute, true
	case "hours", "hour", "hr", "h":
		return time.Hour, true
	case "days", "day", "d":
		return day, true
	case "weeks", "week", "w":
		return 7 * day, true
	case "months", "month", "M":
		return 2629800 * time.Second, true
	case "years", "year", "y":
		return 31557600 * time.Second, true
	}
	return 0, false
}

const day = 24 * time.Hour

// parseSpan reads a time span: "5min 20s", "1.5h", "90" (seconds), "infinity".
func parseSpan(s string) (time.Duration, error) { return parseSpanIn(s, timeUnit) }

// parseNanoseconds is parseSpan for the few settings whose plain numbers are nanoseconds.
func parseNanoseconds(s string) (time.Duration, error) {
	return parseSpanIn(s, func(name string) (time.Duration, bool) {
		switch name {
		case "", "nsec", "ns":
			return time.Nanosecond, true
		}
		return timeUnit(name)
	})
}

func parseSpanIn(s string, timeUnit func(name string) (time.Duration, bool)) (time.Duration, error) {
	bad := func(why string) (time.Duration, error) { return 0, fmt.Errorf("%q is no time span: %s", s, why) }
	if s == "infinity" {
		return spec.Infinity, nil
	}
	var total uint64
	rest := strings.TrimSpace(s)
	if rest == "" {
		return bad("it is empty")
	}
	for rest != "" {
		whole, frac, after, err := decimal(rest)
		if err != nil {
			return bad(err.Error())
		}
		rest = strings.TrimLeft(after, blanks)
		name := rest
		if i := strings.IndexFunc(rest, func(r rune) bool { return !unicode.IsLetter(r) }); i >= 0 {
			name = rest[:i]
		}
		unit, ok := timeUnit(name)
		if !ok {
			return bad("unknown unit " + strconv.Quote(name))
		}
		n, ok := scale(whole, frac, uint64(unit))
		if !ok || n > math.MaxInt64-1-total {
			return bad("it is too long (infinity is written so)")
		}
		total += n
		rest = strings.TrimLeft(rest[len(name):], blanks)
	}
	return time.Duration(total), nil
}

// decimal takes a number like "12.5" off s.
func decimal(s string) (whole uint64, frac, rest string, err error) {
	digits := func(s string) int { return len(s) - len(strings.TrimLeft(s, "0123456789")) }
	n := digits(s)
	text, rest := s[:n], s[n:]
	if strings.HasPrefix(rest, ".") {
		m := digits(rest[1:])
		if m == 0 {
			return 0, "", "", errors.New("a digit must follow the point")
		}
		frac, rest = rest[1:1+m], rest[1+m:]
	}
	if text == "" && frac == "" {
		return 0, "", "", fmt.Errorf("%q does not begin with a number", s)
	}
	if text != "" {
		if whole, err = strconv.ParseUint(text, 10, 64); err != nil {
			return 0, "", "", fmt.Errorf("the number %s is too large", text)
		}
	}
	return whole, frac, rest, nil
}

// scale is (whole + 0.frac) * unit, and false when it does not fit.
func scale(whole uint64, frac string, unit uint64) (uint64, bool) {
	hi, n := bits.Mul64(whole, unit)
	if hi != 0 {
		return 0, false
	}
	for place := unit / 10; frac != "" && place > 0; frac, place = frac[1:], place/10 {
		add := uint64(frac[0]-'0') * place
		if n+add < n {
			return 0, false
		}
		n += add
	}
	return n, true
}

// parseSize reads bytes: "512M", "1.5G" (powers of 1024), "infinity" as all ones.
func parseSize(s string) (uint64, error) {
	if s == "infinity" {
		return math.MaxUint64, nil
	}
	whole, frac, suffix, err := decimal(s)
	if err != nil {
		return 0, fmt.Errorf("%q is no size: %w", s, err)
	}
	i := strings.Index("BKMGTPE", suffix)
	if suffix == "" {
		i = 0
	} else if len(suffix) != 1 || i < 0 {
		return 0, fmt.Errorf("%q is no size: unknown suffix %q (K, M, G, T, P and E are powers of 1024)", s, suffix)
	}
	if i == 0 && frac != "" {
		return 0, fmt.Errorf("%q is no size: part of a byte", s)
	}
	n, ok := scale(whole, "", 1<<(10*i))
	if !ok {
		return 0, fmt.Errorf("%q is too large", s)
	}
	if frac != "" {
		f, err := strconv.ParseFloat("0."+frac, 64)
		if err != nil {
			return 0, err
		}
		n += uint64(f * float64(uint64(1)<<(10*i)))
	}
	return n, nil
}

// parsePercent reads "12.5%" in hundredths of a percent.
func parsePercent(s string) (uint64, error) {
	text, ok := strings.CutSuffix(s, "%")
	if !ok {
		return 0, fmt.Errorf("%q is no percentage", s)
	}
	whole, frac, rest, err := decimal(text)
	if err != nil || rest != "" || len(frac) > 2 {
		return 0, fmt.Errorf("%q is no percentage with at most two decimals", s)
	}
	n, ok := scale(whole, frac, 100)
	if !ok {
		return 0, fmt.Errorf("%q is too large", s)
	}
	return n, nil
}

// parseMemory is a size or a share of the machine's memory. Infinity is 0, "not set".
func parseMemory(s string) (uint64, error) {
	if s == "infinity" {
		return 0, nil
	}
	if strings.HasSuffix(s, "%") {
		return share(s, totalMemory)
	}
	n, err := parseSize(s)
	if err == nil && n == 0 {
		return 0, errors.New("0 would leave no memory at all; no limit is written infinity")
	}
	return n, err
}

func share(s string, total func() (uint64, error)) (uint64, error) {
	p, err := parsePercent(s)
	if err != nil {
		return 0, err
	}
	if p == 0 || p > 100_00 {
		return 0, fmt.Errorf("%q is not between 0%% and 100%%", s)
	}
	t, err := total()
	if err != nil {
		return 0, err
	}
	hi, lo := bits.Mul64(t, p)
	q, _ := bits.Div64(hi, lo, 100_00)
	return max(q, 1), nil
}

func totalMemory() (uint64, error) {
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return 0, fmt.Errorf("cannot tell the size of memory: %w", err)
	}
	return si.Totalram * uint64(si.Unit), nil
}

// totalTasks is how many tasks the kernel allows at once.
func totalTasks() (uint64, error) {
	least := uint64(math.MaxUint64)
	for _, path := range []string{"/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"} {
		b, err := os.ReadFile(path)
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("cannot read %s: %w", path, err)
		}
		least = min(least, n)
	}
	return least, nil
}

func parseSignal(s string) (int, error) {
	if n, err := strconv.Atoi(s); err == nil {
		if n < 1 || n > 64 {
			return 0, fmt.Errorf("%d is no signal number", n)
		}
		return n, nil
	}
	name := strings.TrimPrefix(s, "SIG")
	if n := unix.SignalNum("SIG" + name); n != 0 {
		return int(n), nil
	}
	for _, rt := range []struct {
		name string
		base int
		sign int
	}{{"RTMIN", 34, 1}, {"RTMAX", 64, -1}} { // glibc's numbers, which systemd uses
		rest, ok := strings.CutPrefix(name, rt.name)
		if !ok {
			continue
		}
		off := 0
		if rest != "" {
			n, err := strconv.Atoi(rest)
			if err != nil || n*rt.sign < 0 {
				break
			}
			off = n
		}
		if n := rt.base + off; n >= 34 && n <= 64 {
			return n, nil
		}
	}
	return 0, fmt.Errorf("unknown signal %q", s)
}

// exitName is an exit status by its name in systemd.exec(5), "Process Exit Codes":
// those of libc, LSB and BSD.
func exitName(s string) (int, bool) {
	if i := slices.Index([]string{"SUCCESS", "FAILURE", "INVALIDARGUMENT", "NOTIMPLEMENTED", "NOPERMISSION", "NOTINSTALLED", "NOTCONFIGURED", "NOTRUNNING"}, s); i >= 0 {
		return i, true
	}
	i := slices.Index([]string{"USAGE", "DATAERR", "NOINPUT", "NOUSER", "NOHOST", "UNAVAILABLE", "SOFTWARE", "OSERR", "OSFILE", "CANTCREAT", "IOERR", "TEMPFAIL", "PROTOCOL", "NOPERM", "CONFIG"}, s)
	return 64 + i, i >= 0
}

func addExitStatus(set *spec.ExitStatusSet, s string) error {
	if n, err := strconv.Atoi(s); err == nil {
		if n < 0 || n > 255 {
			return fmt.Errorf("%d is no exit status", n)
		}
		add(&set.Codes, n)
		return nil
	}
	if n, ok := exitName(s); ok {
		add(&set.Codes, n)
		return nil
	}
	n, err := parseSignal(s)
	if err != nil {
		return fmt.Errorf("%q is neither an exit status nor a signal", s)
	}
	add(&set.Signals, n)
	return nil
}

func add(list *[]int, n int) {
	if !slices.Contains(*list, n) {
		*list = append(*list, n)
	}
}

func parseMode(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o7777 {
		return 0, fmt.Errorf("%q is no octal file mode", s)
	}
	return uint32(n), nil
}

// parseRlimit reads "soft:hard" or one value for both.
func parseRlimit(s string, value func(string) (uint64, error)) (*spec.Rlimit, error) {
	soft, hard, two := strings.Cut(s, ":")
	if !two {
		hard = soft
	}
	var l spec.Rlimit
	for _, p := range []struct {
		text string
		to   *uint64
	}{{soft, &l.Soft}, {hard, &l.Hard}} {
		if p.text == "infinity" {
			*p.to = spec.RlimInfinity
			continue
		}
		n, err := value(p.text)
		if err != nil {
			return nil, err
		}
		*p.to = n
	}
	if l.Soft > l.Hard {
		return nil, fmt.Errorf("%q: the soft limit is above the hard one", s)
	}
	return &l, nil
}

func parseCount(s string) (uint64, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is no number", s)
	}
	return n, nil
}

// rlimitSeconds reads RLIMIT_CPU, whose unit is whole seconds; parts of one round up.
func rlimitSeconds(s string) (uint64, error) {
	d, err := parseSpan(s)
	return uint64((d + time.Second - 1) / time.Second), err
}

func parseInt(s string, least, most int) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("%q is no number from %d to %d", s, least, most)
	}
	return n, nil
}

func oneOf(s string, values ...string) (string, error) {
	if slices.Contains(values, s) {
		return s, nil
	}
	return "", fmt.Errorf("%q is not supported; use one of %s", s, strings.Join(values, ", "))
}

// orTiny keeps an explicit 0 apart from "not set" where the spec's zero is a default.
func orTiny(d time.Duration) time.Duration {
	if d == 0 {
		return time.Nanosecond
	}
	return d
}
