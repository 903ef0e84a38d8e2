//go:build race

package files

const raceEnabled = true // the detector makes times meaningless
