// Command inittree is the smallest program with all that package frontend imports:
// the time that its package initialisation takes is that of every front end.
package main

import "mypr/internal/frontend"

func main() { _ = frontend.Run }
