package control

import (
	"context"
	"os"

	"mypr/internal/rpc"
)

// Supervisor is what the control socket speaks to. Its methods may be called
// concurrently, do not outlive their context, and return *rpc.Error for people.
// Files passed in become the implementation's; files returned become the caller's.
type Supervisor interface {
	Info(context.Context) (Info, error)
	List(context.Context, ListParams) ([]UnitStatus, error)
	Show(context.Context, UnitParams) (UnitDetail, error)
	// Job runs MethodStart, MethodStop, MethodRestart or MethodReload.
	Job(ctx context.Context, method string, p JobParams) (JobResult, error)
	Kill(context.Context, KillParams) error
	ResetFailed(context.Context, UnitParams) error
	Freeze(ctx context.Context, p UnitParams, on bool) error
	// StartTransient does not wait: it calls answer once, from any goroutine, soon after
	// the end of ctx at the latest.
	StartTransient(ctx context.Context, p TransientParams, files []*os.File, answer func(TransientResult, []*os.File, error))
	Attach(context.Context, UnitParams) (TransientResult, []*os.File, error)
	Release(context.Context, ReleaseParams) error
	ResizeTTY(context.Context, ResizeParams) error
	// Subscribe returns the present states and calls event for every later one, in
	// order and from one goroutine, until ctx ends. lost is called, last, when so many
	// events wait that some were dropped.
	Subscribe(ctx context.Context, p SubscribeParams, event func(UnitEvent), lost func()) ([]UnitStatus, error)
	Wait(context.Context, WaitParams) (UnitStatus, error)
	DaemonReload(context.Context) error
	Reexec(context.Context, ReexecParams) error
	// Shutdown returns when nothing runs any more; it ends the process once answered
	// was called.
	Shutdown(context.Context, ShutdownParams) (answered func(), err error)
}

// Handler serves the control methods of one connection.
func Handler(s Supervisor, conn *rpc.Conn) rpc.Handler {
	return handler{func(ctx context.Context, r *rpc.Request) (any, error) {
		if r.Method != MethodStartTransient {
			r.CloseFiles()
		}
		switch r.Method {
		case MethodInfo:
			return s.Info(ctx)
		case MethodList:
			return with(ctx, r, s.List)
		case MethodShow:
			return with(ctx, r, s.Show)
		case MethodStart, MethodStop, MethodRestart, MethodReload:
			return with(ctx, r, func(ctx context.Context, p JobParams) (JobResult, error) { return s.Job(ctx, r.Method, p) })
		case MethodKill:
			return do(ctx, r, s.Kill)
		case MethodResetFailed:
			return do(ctx, r, s.ResetFailed)
		case MethodFreeze, MethodThaw:
			return do(ctx, r, func(ctx context.Context, p UnitParams) error { return s.Freeze(ctx, p, r.Method == MethodFreeze) })
		case MethodStartTransient:
			var p TransientParams
			if err := r.Bind(&p); err != nil {
				r.CloseFiles()
				return nil, err
			}
			return rpc.Later(func(answer func(func() (any, error))) {
				s.StartTransient(ctx, p, r.Files, func(res TransientResult, files []*os.File, err error) {
					answer(func() (any, error) {
						if err != nil {
							return nil, err
						}
						return rpc.Reply{Value: res, Files: files}, nil
					})
				})
			}), nil
		case MethodAttach:
			var p UnitParams
			if err := r.Bind(&p); err != nil {
				return nil, err
			}
			res, files, err := s.Attach(ctx, p)
			if err != nil {
				return nil, err
			}
			return rpc.Reply{Value: res, Files: files}, nil
		case MethodRelease:
			return do(ctx, r, s.Release)
		case MethodResizeTTY:
			return do(ctx, r, s.ResizeTTY)
		case MethodSubscribe:
			// The subscription lasts as long as the connection, not as the request.
			return with(ctx, r, func(_ context.Context, p SubscribeParams) ([]UnitStatus, error) {
				return s.Subscribe(conn.Context(), p, func(e UnitEvent) {
					_ = conn.Notify(NotificationUnit, e)
				}, conn.CloseAsync)
			})
		case MethodWait:
			return with(ctx, r, s.Wait)
		case MethodDaemonReload:
			return nil, s.DaemonReload(ctx)
		case MethodReexec:
			return do(ctx, r, s.Reexec)
		case MethodShutdown:
			var p ShutdownParams
			if err := r.Bind(&p); err != nil {
				return nil, err
			}
			answered, err := s.Shutdown(ctx, p)
			if err != nil {
				return nil, err
			}
			return rpc.Reply{Sent: answered}, nil
		}
		return nil, rpc.Errorf(rpc.CodeInvalidRequest, "the supervisor has no method %q", r.Method)
	}}
}

type handler struct{ rpc.HandlerFunc }

// Prompt spares what is asked for often a switch of goroutines.
func (handler) Prompt(method string) bool { return method == MethodStartTransient }

func with[P, R any](ctx context.Context, r *rpc.Request, f func(context.Context, P) (R, error)) (any, error) {
	var p P
	if err := r.Bind(&p); err != nil {
		return nil, err
	}
	v, err := f(ctx, p)
	if err != nil {
		return nil, err
	}
	return v, nil
}

func do[P any](ctx context.Context, r *rpc.Request, f func(context.Context, P) error) (any, error) {
	var p P
	if err := r.Bind(&p); err != nil {
		return nil, err
	}
	return nil, f(ctx, p)
}
