#!/usr/bin/env bash
# Runs every fuzz target of the module for the given time.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-3s}
grep -rlE '^func Fuzz' --include='*_test.go' . | sort | while read -r file; do
	dir=$(dirname "$file")
	for target in $(sed -nE 's/^func (Fuzz[A-Za-z0-9_]*)\(.*/\1/p' "$file"); do
		echo "fuzz $dir $target"
		go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" "./${dir#./}" | tail -n 2
	done
done
