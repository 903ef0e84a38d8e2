package rpc

import (
	"context"
	"encoding/json"
	"errors"
)

// Method answers one named request from its raw parameters.
type Method = func(ctx context.Context, params json.RawMessage) (any, error)

// Typed makes a Method of a typed function. Parameters are decoded over a copy of
// defaults, so those left out keep their default; unknown ones are refused. Errors
// that can travel get the method's name as their operation.
func Typed[P, R any](name string, defaults P, f func(context.Context, P) (R, error)) Method {
	return func(ctx context.Context, raw json.RawMessage) (any, error) {
		p := defaults
		if err := (&Request{Method: name, Params: raw}).Bind(&p); err != nil {
			return nil, named(name, err)
		}
		r, err := f(ctx, p)
		if err != nil {
			return nil, named(name, err)
		}
		return r, nil
	}
}

func named(name string, err error) error {
	var e *Error
	if !errors.As(err, &e) || e.Operation == name {
		return err
	}
	c := *e
	c.Operation = name
	return &c
}
