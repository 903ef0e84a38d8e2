//go:build race

package git

const raceEnabled = true // the detector makes times meaningless
