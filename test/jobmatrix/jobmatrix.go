// Package jobmatrix is what the tests of jobs have in common, whatever machine they run
// on: every way to feed a job, every way it can end, and a look at what is left of it. It
// owns a piece of Python and nothing else; test/e2e runs it in the containment of this
// machine and in the fallback, test/faults on a kernel with cgroup controllers.
package jobmatrix

import _ "embed"

// Code is a cell that defines `await matrix()`, which returns what is wrong as a list of
// lines, and an empty list when nothing is.
//
//go:embed matrix.py
var Code string
