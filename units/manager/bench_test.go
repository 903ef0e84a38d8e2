package manager

import "testing"

// A cell through the whole manager: the real sockets and database, a kernel that
// answers at once.
func BenchmarkExecute(b *testing.B) {
	w := newWorld(b)
	p := w.client()
	p.run("result:2")
	for b.Loop() {
		p.run("result:2")
	}
}

// Printing 16 MiB and reading it back in pages of 1 MiB.
func BenchmarkLargeOutput(b *testing.B) {
	w := newWorld(b)
	p := w.client()
	for b.Loop() {
		readAll(b, p, p.execute("big:16777216", 0).ExecID)
	}
	b.SetBytes(16 << 20)
}
