package kernel

import "context"

// Installation says with what packages are installed into the environment.
type Installation struct {
	UV      string // path, "" without
	Problem string // why there is none
	Python  string // of the environment
	Env     []string
}

// Installer finds uv, fetching it when there is none, as Prepare does.
func Installer(ctx context.Context, o Options) Installation {
	p := newPreparation(o)
	base := ""
	if m, ok := p.readMarker(); ok {
		base = m.Base.Path
	}
	uv := p.findUV(ctx, base)
	return Installation{UV: uv.path, Problem: uv.problem, Python: p.python(), Env: commandEnv(o.Env)}
}
