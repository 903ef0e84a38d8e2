package main

import (
	"errors"
	"testing"

	"mypr/supervisor/control"
)

func TestHopeless(t *testing.T) {
	for name, c := range map[string]struct {
		unit          control.UnitStatus
		given, frozen bool
	}{
		"runs":                   {unit: control.UnitStatus{ActiveState: control.Active}},
		"start limit":            {unit: control.UnitStatus{ActiveState: control.Failed, Result: "start-limit-hit"}, given: true},
		"started after that":     {unit: control.UnitStatus{ActiveState: control.Failed, Result: "start-limit-hit", StartQueued: true}},
		"starts after that":      {unit: control.UnitStatus{ActiveState: control.Activating, Result: "start-limit-hit"}},
		"stopped, was killed":    {unit: control.UnitStatus{ActiveState: control.Failed, Result: "timeout", Error: "main process: killed by SIGKILL"}},
		"stopped, had a failure": {unit: control.UnitStatus{ActiveState: control.Failed, Result: "exit-code"}},
		"frozen":                 {unit: control.UnitStatus{ActiveState: control.Active, Frozen: true}, frozen: true},
	} {
		c.unit.Name = managerUnit
		err := hopeless(c.unit)
		if given := errors.As(err, new(givenUp)); given != c.given || (err != nil) != (c.given || c.frozen) {
			t.Errorf("%s: %v", name, err)
		}
		c.unit.Name = "kernel.service"
		if err := hopeless(c.unit); err != nil {
			t.Errorf("%s, of another unit: %v", name, err)
		}
	}
}
