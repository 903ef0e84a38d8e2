package unitfile

import (
	"encoding/json"
	"errors"
	"flag"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"mypr/supervisor/spec"
)

var update = flag.Bool("update", false, "write the golden files again")

var testOptions = Options{Specifiers: map[byte]string{'x': "/usr/bin/prog", 'R': "/ws dir", 'h': "/home/me", 't': "/run/user/7", 'H': "host"}}

// service parses the text of a [Service] section (with ExecStart) and returns the spec.
func service(t *testing.T, text string) *spec.Service {
	t.Helper()
	u, warnings, err := Parse("a.service", []File{{"a.service", []byte("[Service]\nExecStart=/bin/true\n" + text)}}, testOptions)
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	if len(warnings) > 0 {
		t.Errorf("%q: warnings %q", text, warnings)
	}
	return u.Service
}

// Golden: testdata/NAME.EXT is read as unit NAME.EXT, the result is in NAME.EXT.json.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.*")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, path := range files {
		if filepath.Ext(path) == ".json" {
			continue
		}
		n++
		t.Run(filepath.Base(path), func(t *testing.T) {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			name := filepath.Base(path)
			var got struct {
				Unit     *spec.Unit `json:"unit"`
				Warnings []string   `json:"warnings,omitempty"`
				Error    string     `json:"error,omitempty"`
			}
			got.Unit, got.Warnings, err = Parse(name, []File{{name, data}}, testOptions)
			if err != nil {
				got.Error = err.Error()
			}
			b, err := json.MarshalIndent(got, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			b = append(b, '\n')
			golden := path + ".json"
			if *update {
				if err := os.WriteFile(golden, b, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if string(b) != string(want) {
				t.Errorf("got\n%s\nwant\n%s", b, want)
			}
		})
	}
	if n == 0 {
		t.Error("no unit files")
	}
}

// Every field of the spec can be set from a unit file, and every directive sets something.
func TestEveryFieldIsReachable(t *testing.T) {
	set := map[string]bool{}
	for _, name := range []string{"full.service", "full.socket"} {
		data, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		u, _, err := Parse(name, []File{{name, data}}, testOptions)
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range []any{u, u.Service, u.Socket} {
			if v := reflect.ValueOf(part); !v.IsNil() {
				for i := range v.Elem().NumField() {
					if !v.Elem().Field(i).IsZero() {
						set[v.Elem().Type().Name()+"."+v.Elem().Type().Field(i).Name] = true
					}
				}
			}
		}
	}
	for _, typ := range []reflect.Type{reflect.TypeFor[spec.Unit](), reflect.TypeFor[spec.Service](), reflect.TypeFor[spec.Socket]()} {
		for i := range typ.NumField() {
			f := typ.Name() + "." + typ.Field(i).Name
			if f == "Unit.Raw" || f == "Service.EnvironmentFD" { // how bytes travel, nothing of a file's
				continue
			}
			if !set[f] {
				t.Errorf("no unit file in testdata sets %s", f)
			}
		}
	}
}

func TestDirectivesAreDocumented(t *testing.T) {
	b, err := os.ReadFile("../../docs/units.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range directives() {
		for key := range table {
			if !strings.Contains(string(b), "`"+key+"=`") {
				t.Errorf("docs/units.md does not mention `%s=`", key)
			}
		}
	}
}

func TestLexer(t *testing.T) {
	long := strings.Repeat("x", 100_000)
	for name, c := range map[string]struct {
		text string
		want []string // value@line
	}{
		"comments":                         {"# c\n;c\n  # indented\n[Unit]\nDescription=a # b ; c\n", []string{"a # b ; c@5"}},
		"blanks around key and value":      {"[Unit]\n  Description  =  a b\t \n", []string{"a b@2"}},
		"empty value":                      {"[Unit]\nDescription=\n", []string{"@2"}},
		"value with =":                     {"[Unit]\nDescription=a=b\n", []string{"a=b@2"}},
		"no newline at the end":            {"[Unit]\nDescription=a", []string{"a@2"}},
		"carriage returns":                 {"[Unit]\r\nDescription=a\\\r\n b\r\n", []string{"a b@2"}},
		"byte order mark":                  {"\uFEFF[Unit]\nDescription=a\n", []string{"a@2"}},
		"continuation":                     {"[Unit]\nDescription=a\\\n  b\\\nc\nDescription=d\n", []string{"a b c@2", "d@5"}},
		"comments inside a continuation":   {"[Unit]\nDescription=a \\\n# c\n;c \\\n  b\n", []string{"a  b@2"}},
		"an empty line ends it":            {"[Unit]\nDescription=a\\\n\nDescription=b\n", []string{"a@2", "b@4"}},
		"continuation at the end":          {"[Unit]\nDescription=a\\", []string{"a@2"}},
		"comment at the end of one":        {"[Unit]\nDescription=a\\\n# c", []string{"a@2"}},
		"escaped backslash does not":       {"[Unit]\nDescription=a\\\\\nDescription=b\n", []string{`a\\@2`, "b@3"}},
		"three backslashes do":             {"[Unit]\nDescription=a\\\\\\\nb\n", []string{`a\\ b@2`}},
		"a continued section header":       {"[Un\\\nit]\n", nil},
		"a line longer than 2048":          {"[Unit]\nDescription=" + long + "\n", []string{long + "@2"}},
		"only a comment that is continued": {"# a \\\n[Unit]\nDescription=b\n", []string{"b@3"}},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := lex(File{"f", []byte(c.text)})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, a := range list {
				got = append(got, a.value+"@"+string(rune('0'+a.line)))
				if a.section != "Unit" || a.key != "Description" {
					t.Errorf("%+v", a)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%.200q, want %.200q", got, c.want)
			}
		})
	}
}

func TestHardErrors(t *testing.T) {
	for text, want := range map[string]string{
		"Description=a\n":              "f.service:1: Description= stands before any section header",
		"[Unit]\nnonsense\n":           `f.service:2: "nonsense" is neither an assignment`,
		"[Unit]\n=a\n":                 "f.service:2: the key before = is missing",
		"[Unit\n":                      `f.service:1: bad section header "[Unit"`,
		"[]\n":                         "bad section header",
		"[Unit]\nDescription=\xff\n":   "f.service:2: the line is not valid UTF-8",
		"[Unit]\nDescription=a\x00b\n": "f.service:2: the line is not valid UTF-8",
		"[Unit]\n" + strings.Repeat("#", MaxSize):                 "more than 1048576",
		"[Unit]\nAfter=a\n":                                       `f.service:2: After=: "a" is no unit name`,
		"[Unit]\nDescription=%\n":                                 "f.service:2: Description=: a single % at the end",
		"[Unit]\nDescription=%z\n":                                "specifier %z: unknown",
		"[Service]\n":                                             "f.service: ExecStart=: it is missing",
		"[Service]\n\nExecStart=/a\nExecStart=/b\n":               "f.service:4: ExecStart=: there are 2 commands",
		"[Service]\nExecStart=/a ; /b\n":                          "there are 2 commands",
		"[Service]\nExecStart=a/b\n":                              "f.service:2: ExecStart=: the program a/b is neither",
		"[Service]\nType=oneshot\nExecStop=/a\n":                  "or Type=oneshot, RemainAfterExit=yes and ExecStop=",
		"[Service]\nExecStart=-\n":                                "a command is missing",
		"[Service]\nExecStart=\"\" a\n":                           "a command is missing",
		"[Service]\nExecStart=@/a\n":                              "argv[0]",
		"[Service]\nExecStart=/a 'b\n":                            "the quote ' is not closed",
		"[Service]\nType=forking\n":                               `f.service:2: Type=: "forking" is not supported; use one of simple, exec, notify, oneshot`,
		"[Service]\nRestart=maybe\n":                              "Restart=",
		"[Service]\nType=oneshot\nRestart=always\nExecStart=/a\n": "f.service:3: Restart=: always would run",
		"[Service]\nRestartSec=5 parsecs\n":                       "unknown unit \"parsecs\"",
		"[Service]\nMemoryMax=12X\n":                              "unknown suffix",
		"[Service]\nMemoryMax=0\n":                                "no memory at all",
		"[Service]\nMemoryMax=101%\n":                             "not between",
		"[Service]\nCPUQuota=50\n":                                "no percentage",
		"[Service]\nCPUWeight=0\n":                                "from 1 to 10000",
		"[Service]\nTasksMax=0\n":                                 "infinity",
		"[Service]\nKillSignal=SIGWHAT\n":                         "unknown signal",
		"[Service]\nKillSignal=65\n":                              "no signal number",
		"[Service]\nUMask=8\n":                                    "octal",
		"[Service]\nUMask=1777\n":                                 "no umask",
		"[Service]\nLimitNOFILE=10:5\n":                           "the soft limit is above",
		"[Service]\nNice=20\n":                                    "from -20 to 19",
		"[Service]\nSuccessExitStatus=256\n":                      "no exit status",
		"[Service]\nSuccessExitStatus=WHAT\n":                     "neither an exit status nor a signal",
		"[Service]\nEnvironment=A\n":                              "no NAME=VALUE",
		"[Service]\nEnvironment=1A=b\n":                           "no NAME=VALUE",
		"[Service]\nPassEnvironment=A=b\n":                        "no variable name",
		"[Service]\nEnvironmentFile=x\n":                          "absolute",
		"[Service]\nWorkingDirectory=x\n":                         "absolute",
		"[Service]\nStandardOutput=append:x\n":                    "absolute",
		"[Service]\nStandardOutput=syslog\n":                      "not supported",
		"[Service]\nStandardInput=journal\n":                      "not supported",
		"[Service]\nExecStart=/a\nStandardInput=pty\n":            "all of StandardInput=",
		"[Service]\nSockets=a.service\n":                          "no socket unit",
		"[Service]\nRemainAfterExit=perhaps\n":                    "neither yes nor no",
		"[Service]\nExecStart=/a\nRestartSec=5s\nRestartMaxDelaySec=1s\nRestartSteps=2\n": "shorter than RestartSec=5s",
	} {
		_, _, err := Parse("f.service", []File{{"f.service", []byte(text)}}, testOptions)
		var e *Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80q: error %v, want %q", text, err, want)
		}
	}
	for text, want := range map[string]string{
		"[Socket]\n":                                          "ListenStream=: it is missing",
		"[Socket]\nListenStream=80\n":                         "neither an absolute path nor a port of the loopback",
		"[Socket]\nListenStream=0.0.0.0:80\n":                 "loopback",
		"[Socket]\nListenStream=@abstract\n":                  "absolute path",
		"[Socket]\nListenStream=127.0.0.1:65536\n":            "65535",
		"[Socket]\nListenStream=/" + strings.Repeat("x", 107): "at most 107",
		"[Socket]\nFileDescriptorName=a:b\n":                  "no descriptor name",
		"[Socket]\nService=a.socket\n":                        "no service",
		"[Socket]\nSocketMode=9\n":                            "octal",
	} {
		_, _, err := Parse("f.socket", []File{{"f.socket", []byte(text)}}, testOptions)
		var e *Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80q: error %v, want %q", text, err, want)
		}
	}
	for _, name := range []string{"a.service", "A-b_c.9:x@i@j-\\x2d.socket", "a@.service", "a.b.target"} {
		if err := CheckName(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"", "a", "a@b c.service", "é.service", "a.mount", "a/b.service", ".service", "@x.service", "a b.service", strings.Repeat("a", 250) + ".service"} {
		if _, _, err := Parse(name, nil, testOptions); err == nil {
			t.Errorf("the name %q was accepted", name)
		}
	}
}

func TestWarnings(t *testing.T) {
	_, warnings, err := Parse("f.service", []File{{"f.service", []byte(`[Unit]
Descripton=typo
X-Mine=1
[Service]
ExecStart=+/bin/true
PrivateTmp=yes
KillMode=none
RestartSteps=3
[Socket]
ListenStream=/x
Other=1
[X-Mine]
A=b
`)}}, testOptions)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"f.service:2: unknown key Descripton= in section [Unit], ignored",
		"f.service:5: ExecStart=: prefix + ignored: every command runs with the unit's own privileges",
		"f.service:6: unknown key PrivateTmp= in section [Service], ignored",
		"f.service:10: unknown section [Socket] in a service unit, ignored",
		"f.service:8: RestartSteps= has no effect without RestartMaxDelaySec=",
		"f.service:7: KillMode=none leaves processes behind that nothing watches",
	}
	if !slices.Equal(warnings, want) {
		t.Errorf("warnings\n%s\nwant\n%s", strings.Join(warnings, "\n"), strings.Join(want, "\n"))
	}
}

// What systemd 252 made of the same line in a unit c.service, read from its D-Bus
// property ExecStart: path, argv, whether failure is ignored. Only %x and %R are ours.
func TestCommands(t *testing.T) {
	cmd := func(argv ...string) spec.Command { return spec.Command{Path: argv[0], Args: argv} }
	for line, want := range map[string][]spec.Command{
		`/bin/echo a  b`:                        {cmd("/bin/echo", "a", "b")},
		`echo`:                                  {cmd("echo")}, // systemd looks it up when it reads the file
		`/bin/echo "a b" 'c "d'`:                {cmd("/bin/echo", "a b", `c "d`)},
		`/bin/echo a"b c"d`:                     {cmd("/bin/echo", "ab cd")},
		`/bin/echo "a"'b'c`:                     {cmd("/bin/echo", "abc")},
		`/bin/echo 'it\'s'`:                     {cmd("/bin/echo", "it's")},
		`/bin/echo "" ''`:                       {cmd("/bin/echo", "", "")},
		`/bin/echo "  lead" trail\s`:            {cmd("/bin/echo", "  lead", "trail ")},
		`/bin/echo \x41\102\u00e9\U0001F600`:    {cmd("/bin/echo", "ABé😀")},
		`/bin/echo "\a\b\f\n\r\t\v\\\"\'\s."`:   {cmd("/bin/echo", "\a\b\f\n\r\t\v\\\"' .")},
		`/bin/echo a ; /bin/true ; -/bin/false`: {cmd("/bin/echo", "a"), cmd("/bin/true"), {Path: "/bin/false", Args: []string{"/bin/false"}, IgnoreFailure: true}},
		`/bin/echo a \; b ";" c; ;`:             {cmd("/bin/echo", "a", ";", "b", ";", "c;")},
		`/bin/echo ;`:                           {cmd("/bin/echo")},
		`/bin/echo a;b "a;" ;/bin/true`:         {cmd("/bin/echo", "a;b", "a;", ";/bin/true")},
		`/bin/echo ";" \;`:                      {cmd("/bin/echo", ";", ";")},
		`-:@/bin/sh login -c x`:                 {{Path: "/bin/sh", Args: []string{"login", "-c", "x"}, IgnoreFailure: true, NoExpand: true}},
		`/bin/echo $A ${B} %% %n`:               {cmd("/bin/echo", "$A", "${B}", "%", "a.service")},
		`/bin/echo %p-%i-%N`:                    {cmd("/bin/echo", "a--a")},
		`/bin/echo \xff`:                        {cmd("/bin/echo", "\xff")},
		`%x run %R`:                             {cmd("/usr/bin/prog", "run", "/ws dir")},
	} {
		s := service(t, "Type=oneshot\nExecStart=\nExecStart="+line+"\n")
		if !reflect.DeepEqual(s.ExecStart, want) {
			t.Errorf("%s\n got %+v\nwant %+v", line, s.ExecStart, want)
		}
	}
	for line, want := range map[string]string{`\q`: `\q`, `\;x`: `\;x`, `\x00`: `\x00`, `\ud800`: `\ud800`, `\400`: `\400`, `\x4`: `\x4`} {
		u, warnings, err := Parse("a.service", []File{{"f", []byte("[Service]\nExecStart=/bin/echo " + line + "\n")}}, testOptions)
		if err != nil || u.Service.ExecStart[0].Args[1] != want || len(warnings) != 1 || !strings.Contains(warnings[0], line[:2]+" is no escape sequence") {
			t.Errorf("%s: %+v, %q, %v", line, u, warnings, err)
		}
	}
}

// The same for other properties of one unit.
func TestLikeSystemd(t *testing.T) {
	s := service(t, `Type=oneshot
ExecStart=
ExecStart=/bin/echo a \
# comment
  ;c2
   b\
\
c
Environment=A=1 "B=x y" C=3
Environment=A=2
Environment="D=\x41 b" E='q "r'
Environment=F=a"b c"d G=%%h
TimeoutStopSec=5min 20s
TimeoutStartSec=0
RestartSec=1.5
RuntimeMaxSec=1M
LimitNOFILE=1024:2048
SuccessExitStatus=TEMPFAIL 250 SIGKILL TERM
CPUQuota=12.5%
MemoryMax=1.5G
UMask=027
KillSignal=RTMIN+3
TasksMax=77
TimeoutAbortSec=7
`)
	if want := []string{"/bin/echo", "a", "b", "c"}; !slices.Equal(s.ExecStart[0].Args, want) {
		t.Errorf("ExecStart %q, want %q", s.ExecStart[0].Args, want)
	}
	if want := []string{"B=x y", "C=3", "A=2", "D=A b", `E=q "r`, "F=ab cd", "G=%h"}; !slices.Equal(s.Environment, want) {
		t.Errorf("Environment %q, want %q", s.Environment, want)
	}
	for name, v := range map[string][2]any{
		"TimeoutStopUSec": {s.TimeoutStopSec, 320 * time.Second}, "TimeoutStartUSec": {s.TimeoutStartSec, spec.Infinity},
		"RestartUSec": {s.RestartSec, 1500 * time.Millisecond}, "RuntimeMaxUSec": {s.RuntimeMaxSec, 2629800 * time.Second},
		"LimitNOFILE": {*s.LimitNOFILE, spec.Rlimit{Soft: 1024, Hard: 2048}}, "CPUQuotaPerSecUSec": {s.CPUQuota, uint64(125000)},
		"SuccessExitStatus": {s.SuccessExitStatus, spec.ExitStatusSet{Codes: []int{75, 250}, Signals: []int{9, 15}}},
		"MemoryMax":         {s.MemoryMax, uint64(1610612736)}, "UMask": {*s.UMask, uint32(23)}, "KillSignal": {s.KillSignal, 37},
		"TasksMax": {s.TasksMax, uint64(77)}, "TimeoutAbortUSec": {s.TimeoutAbortSec, 7 * time.Second},
	} {
		if !reflect.DeepEqual(v[0], v[1]) {
			t.Errorf("%s = %v, systemd has %v", name, v[0], v[1])
		}
	}
}

func TestListsResetByEmptyValue(t *testing.T) {
	s := service(t, `ExecStart=
ExecStart=/bin/b
Environment=A=1 "B=x y" C=3
Environment=A=2
UnsetEnvironment=X
UnsetEnvironment=
PassEnvironment=P Q P
EnvironmentFile=/a
EnvironmentFile=
EnvironmentFile=-/b
SuccessExitStatus=1 SIGKILL
SuccessExitStatus=
SuccessExitStatus=TEMPFAIL 5 5 TERM
Nice=5
Nice=
MemoryMax=1M
MemoryMax=
Restart=always
Restart=
WorkingDirectory=/x
WorkingDirectory=
`)
	if len(s.ExecStart) != 1 || s.ExecStart[0].Path != "/bin/b" {
		t.Errorf("ExecStart %+v", s.ExecStart)
	}
	if want := []string{"B=x y", "C=3", "A=2"}; !slices.Equal(s.Environment, want) {
		t.Errorf("Environment %q, want %q", s.Environment, want)
	}
	if s.UnsetEnvironment != nil || !slices.Equal(s.PassEnvironment, []string{"Q", "P"}) || !slices.Equal(s.EnvironmentFile, []string{"-/b"}) {
		t.Errorf("%q %q %q", s.UnsetEnvironment, s.PassEnvironment, s.EnvironmentFile)
	}
	if want := (spec.ExitStatusSet{Codes: []int{75, 5}, Signals: []int{15}}); !reflect.DeepEqual(s.SuccessExitStatus, want) {
		t.Errorf("SuccessExitStatus %+v, want %+v", s.SuccessExitStatus, want)
	}
	if s.Nice != nil || s.MemoryMax != 0 || s.Restart != "" || s.WorkingDirectory != "" {
		t.Errorf("not reset: %+v", s)
	}
}

func TestSpans(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"0": 0, "5": 5 * time.Second, "1.5": 1500 * time.Millisecond, ".5s": 500 * time.Millisecond,
		"5min 20s": 320 * time.Second, "5min20s": 320 * time.Second, "2 h": 2 * time.Hour, "1h 1": time.Hour + time.Second,
		"50ms": 50 * time.Millisecond, "7us": 7 * time.Microsecond, "7µs": 7 * time.Microsecond, "7μs": 7 * time.Microsecond, "1w 1d": 8 * 24 * time.Hour,
		"1M": 2629800 * time.Second, "1m": time.Minute, "1y": 31557600 * time.Second, "2months": 5259600 * time.Second,
		"0.000001s": time.Microsecond, "infinity": spec.Infinity, "292y": 292 * 31557600 * time.Second,
	} {
		if d, err := parseSpan(text); err != nil || d != want {
			t.Errorf("%q: %v, %v; want %v", text, d, err, want)
		}
	}
	for _, text := range []string{"", " ", "s", "-5", "5 parsecs", "5.", "1e3", "99999999999999999999", "300y", "5s infinity", "292y 292y", "5,5", "5S"} {
		if d, err := parseSpan(text); err == nil {
			t.Errorf("%q was read as %v", text, d)
		}
	}
	s := service(t, "RestartSec=0\nTimeoutSec=0\nRuntimeMaxSec=infinity\nWatchdogSec=infinity\n")
	if s.RestartSec != time.Nanosecond || s.TimeoutStartSec != spec.Infinity || s.TimeoutStopSec != spec.Infinity || s.RuntimeMaxSec != spec.Infinity || s.WatchdogSec != 0 {
		t.Errorf("%+v", s)
	}
}

func TestTimerSlack(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"1ms": time.Millisecond, "5000": 5 * time.Microsecond, "1us 500": 1500, "20ns": 20, "0": 0, "infinity": 0, "": 0,
	} {
		if s := service(t, "TimerSlackNSec=3\nTimerSlackNSec="+text+"\n"); s.TimerSlack != want {
			t.Errorf("%q is %v, want %v", text, s.TimerSlack, want)
		}
	}
	if _, err := parseNanoseconds("5 parsecs"); err == nil {
		t.Error("no error")
	}
}

func TestNumbers(t *testing.T) {
	for text, want := range map[string]uint64{"0": 0, "7": 7, "7B": 7, "1K": 1024, "1.5M": 3 << 19, "2G": 2 << 30, "3T": 3 << 40, "1P": 1 << 50, "15E": 15 << 60, "infinity": math.MaxUint64} {
		if n, err := parseSize(text); err != nil || n != want {
			t.Errorf("%q: %d, %v; want %d", text, n, err, want)
		}
	}
	for _, text := range []string{"", "K", "-1", "1KB", "1k", "1.5", "16E", "99999999999999999999", "1 K"} {
		if n, err := parseSize(text); err == nil {
			t.Errorf("%q was read as %d", text, n)
		}
	}
	total, err := totalMemory()
	if err != nil {
		t.Fatal(err)
	}
	s := service(t, "MemoryMax=50%\nMemoryHigh=infinity\nMemorySwapMax=0\nCPUQuota=150%\nTasksMax=10%\nCPUWeight=100\nLimitNOFILE=1024:infinity\nLimitCPU=1min 500ms\nLimitCORE=1G\nUMask=027\nOOMScoreAdjust=-5\n")
	if s.MemoryMax != total/2 || s.MemoryHigh != 0 || s.MemorySwapMax != 1 || s.CPUQuota != 1_500_000 || s.TasksMax == 0 || s.CPUWeight != 100 {
		t.Errorf("%+v", s)
	}
	if *s.LimitNOFILE != (spec.Rlimit{Soft: 1024, Hard: spec.RlimInfinity}) || *s.LimitCPU != (spec.Rlimit{Soft: 61, Hard: 61}) || *s.LimitCORE != (spec.Rlimit{Soft: 1 << 30, Hard: 1 << 30}) || *s.UMask != 0o27 || *s.OOMScoreAdjust != -5 {
		t.Errorf("%+v %+v %+v %o", s.LimitNOFILE, s.LimitCPU, s.LimitCORE, *s.UMask)
	}
	if s := service(t, "CPUQuota=12.5%\n"); s.CPUQuota != 125_000 {
		t.Errorf("12.5%%: %d", s.CPUQuota)
	}
	for text, want := range map[string]int{"SIGTERM": 15, "TERM": 15, "9": 9, "SIGRTMIN": 34, "RTMIN+3": 37, "SIGRTMAX-1": 63, "SIGRTMAX": 64} {
		if n, err := parseSignal(text); err != nil || n != want {
			t.Errorf("%q: %d, %v; want %d", text, n, err, want)
		}
	}
	for _, text := range []string{"", "0", "term", "RTMIN-1", "RTMIN+31", "RTMAX+1", "SIG"} {
		if n, err := parseSignal(text); err == nil {
			t.Errorf("%q was read as %d", text, n)
		}
	}
	for text, want := range map[string]bool{"yes": true, "TRUE": true, "on": true, "1": true, "no": false, "off": false, "0": false, "f": false} {
		if b, err := parseBool(text); err != nil || b != want {
			t.Errorf("%q: %v, %v", text, b, err)
		}
	}
}

func TestSpecifiers(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", "/state")
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "/home/me")
	t.Setenv("TMPDIR", "/mytmp")
	for spec, want := range map[string]string{
		"n": "my-app@a-b\\x2dc.service", "N": "my-app@a-b\\x2dc", "p": "my-app", "P": "my/app", "i": "a-b\\x2dc", "I": "a/b-c", "j": "app", "J": "app",
		"S": "/state", "C": "/home/me/.cache", "L": "/state/log", "T": "/mytmp", "V": "/mytmp", "t": "/run/user/7", "h": "/home/me", "x": "/usr/bin/prog", "%": "%",
	} {
		u, _, err := Parse("my-app@a-b\\x2dc.service", []File{{"f", []byte("[Unit]\nDescription=%" + spec + "\n[Service]\nExecStart=/a\n")}}, testOptions)
		if err != nil || u.Description != want {
			t.Errorf("%%%s: %v, %v; want %q", spec, u, err, want)
		}
	}
	for _, c := range "uUgGHlmbvsET" {
		u, _, err := Parse("a.service", []File{{"f", []byte("[Unit]\nDescription=%" + string(c) + "\n[Service]\nExecStart=/a\n")}}, Options{})
		if err != nil || u.Description == "" {
			t.Errorf("%%%c: %+v, %v", c, u, err)
		}
	}
}

func dir(path string, files ...string) Dir {
	m := fstest.MapFS{}
	for i := 0; i < len(files); i += 2 {
		m[files[i]] = &fstest.MapFile{Data: []byte(files[i+1])}
	}
	return Dir{m, path}
}

func describe(text string) string { return "[Unit]\nDescription=" + text + "\n" }

func TestLoadPriorities(t *testing.T) {
	base := describe("base") + "[Service]\nExecStart=/base\nEnvironment=A=0\n"
	env := func(v string) string { return "[Service]\nEnvironment=" + v + "\n" }
	dirs := []Dir{
		dir("low", "a-b-c.service", base, "job@.service", base, "job@special.service", describe("special")+"[Service]\nExecStart=/s\n",
			"a-b-c.service.d/20-x.conf", env("X=low"), "a-b-c.service.d/10-y.conf", env("Y=low"),
			"service.d/30-type.conf", env("TYPE=1"), "a-.service.d/05-prefix.conf", env("PREFIX=a"), "a-b-.service.d/05-prefix.conf", env("PREFIX=a-b"),
			"a-b-c.service.d/ignored.txt", "nonsense", "a-b-c.service.d/.hidden.conf", "nonsense",
			"job@.service.d/t.conf", env("T=%i"), "job@7.service.d/i.conf", env("I=7"),
			"off.service", base, "only-low.service", base),
		dir("high", "a-b-c.service.d/20-x.conf", env("X=high"), "a-b-c.service.d/40-last.conf", env("Y=last"), "service.d/05-prefix.conf", env("PREFIX=type"),
			"off.service", "", "job@7.service.d/t.conf", ""),
		{os.DirFS("/nonexistent/dir"), "/nonexistent/dir"},
	}
	u, warnings, err := Load(dirs, "a-b-c.service", testOptions)
	if err != nil || len(warnings) > 0 {
		t.Fatal(warnings, err)
	}
	if want := []string{"A=0", "PREFIX=a-b", "X=high", "TYPE=1", "Y=last"}; !slices.Equal(u.Service.Environment, want) {
		t.Errorf("Environment %q, want %q", u.Service.Environment, want)
	}
	want := []string{"low/a-b-c.service", "low/a-b-.service.d/05-prefix.conf", "low/a-b-c.service.d/10-y.conf", "high/a-b-c.service.d/20-x.conf", "low/service.d/30-type.conf", "high/a-b-c.service.d/40-last.conf"}
	if !slices.Equal(u.Source, want) {
		t.Errorf("Source\n%q, want\n%q", u.Source, want)
	}
	u, _, err = Load(dirs, "job@7.service", testOptions)
	if err != nil || !slices.Equal(u.Service.Environment, []string{"A=0", "PREFIX=type", "TYPE=1", "I=7"}) || u.Name != "job@7.service" {
		t.Errorf("instance whose template drop-in is switched off: %+v, %v", u.Service, err)
	}
	u, _, err = Load(dirs, "job@8.service", testOptions)
	if err != nil || !slices.Contains(u.Service.Environment, "T=8") {
		t.Errorf("instance: %+v, %v", u.Service, err)
	}
	if u, _, err = Load(dirs, "job@special.service", testOptions); err != nil || u.Description != "special" {
		t.Errorf("an instance with a file of its own: %+v, %v", u, err)
	}
	for name, want := range map[string]string{"off.service": "high/off.service: the unit is switched off", "none.service": "unit none.service not found in low, high", "job@.service": "is a template", "bad": "no unit name"} {
		if _, _, err := Load(dirs, name, testOptions); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", name, err, want)
		}
	}
	if _, _, err := Load(dirs, "none.service", testOptions); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a unit without a file: %v", err)
	}
	names, err := Names(dirs)
	if want := []string{"a-b-c.service", "job@special.service", "only-low.service"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("Names %q, %v; want %q", names, err, want)
	}
}

func TestLoadFromDisk(t *testing.T) {
	d := t.TempDir()
	for path, text := range map[string]string{"a.service": "[Service]\nExecStart=/a\n", "a.service.d/x.conf": "[Service]\nNice=1\n", "a.service.d/y.conf": "[Service]\nNice=2\n"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(d, path)), 0o700), os.WriteFile(filepath.Join(d, path), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	high := t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(high, "a.service.d"), 0o700), os.Symlink("/dev/null", filepath.Join(high, "a.service.d", "y.conf")), os.Symlink("/dev/null", filepath.Join(high, "b.service"))); err != nil {
		t.Fatal(err)
	}
	dirs := []Dir{{os.DirFS(d), d}, {os.DirFS(high), high}}
	u, _, err := Load(dirs, "a.service", Options{})
	if err != nil || *u.Service.Nice != 1 {
		t.Errorf("a link to /dev/null does not switch a drop-in off: %+v, %v", u, err)
	}
	if _, _, err := Load(dirs, "b.service", Options{}); err == nil || !strings.Contains(err.Error(), "switched off") {
		t.Errorf("a link to /dev/null does not switch a unit off: %v", err)
	}
	if err := os.Mkdir(filepath.Join(high, "a.service.d", "z.conf"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Load(dirs, "a.service", Options{}); err == nil || !strings.Contains(err.Error(), filepath.Join(high, "a.service.d", "z.conf")+": it is not a regular file") {
		t.Errorf("error %v", err)
	}
}

func FuzzParse(f *testing.F) {
	seeds, err := filepath.Glob("testdata/*.s*")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range seeds {
		if b, err := os.ReadFile(path); err == nil && filepath.Ext(path) != ".json" {
			f.Add(b, filepath.Ext(path) == ".socket")
		}
	}
	for _, s := range []string{"", "[", "[Service]\nExecStart=/a \\", "[Service]\nExecStart=a ; \\; ;\n", "[Unit]\nAfter=\"a.service\" %i\n", "[Service]\nEnvironment='A=\\x20%%'\n", "[Service]\nRestartSec=1.9999999999999999999y\nMemoryMax=0.1E\n"} {
		f.Add([]byte(s), false)
	}
	f.Fuzz(func(t *testing.T, data []byte, socket bool) {
		name := "f.service"
		if socket {
			name = "f.socket"
		}
		u, _, err := Parse(name, []File{{name, data}}, testOptions)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("error %v without a place", err)
			}
			return
		}
		if u.Service != nil {
			for _, c := range u.Service.ExecStart {
				if c.Path == "" || len(c.Args) == 0 || strings.Contains(strings.Join(c.Args, ""), "\x00") {
					t.Fatalf("command %+v", c)
				}
			}
			for _, d := range []time.Duration{u.Service.RestartSec, u.Service.TimeoutStopSec, u.Service.WatchdogSec} {
				if d < 0 {
					t.Fatalf("negative time %v", d)
				}
			}
		}
		// What was read can be sent to a supervisor and comes out the same there.
		b, err := json.Marshal(u)
		if err != nil {
			t.Fatal(err)
		}
		var back spec.Unit
		if err := json.Unmarshal(b, &back); err != nil {
			t.Fatal(err)
		}
	})
}
