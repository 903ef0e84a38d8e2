//go:build race

package search

const raceEnabled = true // the detector makes times meaningless
