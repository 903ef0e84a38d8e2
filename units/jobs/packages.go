package jobs

import (
	"context"
	"regexp"
	"strings"
	"sync"

	"mypr/internal/api"
	"mypr/internal/ospath"
	"mypr/internal/rpc"
)

// Packages is how packages get into the workspace's environment.
type Packages struct {
	UV           string   // path of uv; "" when there is none
	Problem      string   // why there is none
	Python       string   // .mypr/venv/bin/python
	Requirements string   // .mypr/requirements.txt
	Dir          string   // what relative paths in requirements mean
	Env          []string // complete
}

type packagesParams struct {
	ID    string   `json:"id"`
	Specs []string `json:"specs"`
}

// CodeDependency is for a program that has to be installed first.
const CodeDependency = "dependency_missing"

// install runs in one job, so that it goes on whatever happens to the manager. The
// list is replaced by rename: nobody sees half of it.
const install = `uv=$1 python=$2 list=$3; shift 3
"$uv" pip install --python "$python" -- "$@" || exit
"$uv" pip freeze --python "$python" >"$list.new" && mv -f "$list.new" "$list"`

// addPackages of packages.add.
func (s *Service) addPackages(ctx context.Context, c Caller, p packagesParams) (Status, error) {
	if len(p.Specs) == 0 {
		return Status{}, rpc.Errorf(rpc.CodeInvalidRequest, "there is nothing to install: name at least one package")
	}
	for _, spec := range p.Specs {
		if strings.TrimSpace(spec) == "" || strings.HasPrefix(spec, "-") || strings.ContainsAny(spec, "\x00\n") {
			return Status{}, rpc.Errorf(rpc.CodeInvalidRequest, "%.80q is not a package requirement", spec).
				WithHint(`write it like "httpx", "rich>=13", "./dist/some.whl" or "name @ https://…"; options of uv belong into its configuration`)
		}
	}
	if s.o.Packages == nil {
		return Status{}, rpc.Errorf(rpc.CodeUnavailable, "packages cannot be installed by this runtime")
	}
	k, err := s.o.Packages(ctx)
	if err != nil {
		return Status{}, err
	}
	if k.UV == "" {
		return Status{}, rpc.Errorf(CodeDependency, "packages are installed with uv, and there is none: %s", k.Problem).
			WithHint("install uv (https://docs.astral.sh/uv/) and run mypr-mcp restart")
	}
	words := append([]string{"/bin/sh", "-c", install, "mypr-packages", k.UV, k.Python, k.Requirements}, p.Specs...)
	j, err := s.begin(ctx, c, KindPackage, &startParams{ID: p.ID, Command: Command{Words: words}, Cwd: ospath.Text(k.Dir), Env: Environment{list: k.Env}}, 0)
	if err != nil {
		return Status{}, err
	}
	return j.status(), nil
}

// unreachable is what uv says when the index does not answer.
var unreachable = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`(?i)error sending request|failed to fetch|dns error|could not connect|connection refused|network is unreachable|` +
		`network connectivity is disabled|timed out|failed to lookup address`)
})

// explain makes the error of a failed installation say what to do. It runs with mu held.
func (j *job) explain() {
	if j.st.State != api.FailedCell || j.st.Cause != causeExit {
		return
	}
	size, _, _, _ := j.out.stats()
	pg, err := j.out.page(max(0, size-4096), "", 4096, true)
	if err != nil {
		return
	}
	text := strings.TrimSpace(pg.text)
	if unreachable().MatchString(text) {
		j.st.Error = "nothing was installed: the package index cannot be reached: " + last(text)
		j.st.Hint = "check the network, or name a reachable index or a directory of wheels in uv's configuration (UV_DEFAULT_INDEX, UV_FIND_LINKS), " +
			"or install a local wheel by its path; what is installed already stays usable"
		return
	}
	j.st.Error = "the packages were not installed: " + last(text)
	j.st.Hint = "output() of this job has the whole text"
}

// last is the end of a text, on one line.
func last(text string) string {
	lines := strings.Split(text, "\n")
	if n := len(lines); n > 6 {
		lines = lines[n-6:]
	}
	out := strings.Join(strings.Fields(strings.Join(lines, " ")), " ")
	if r := []rune(out); len(r) > 600 {
		out = "…" + string(r[len(r)-600:])
	}
	return out
}
