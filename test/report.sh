#!/usr/bin/env bash
# Runs a command of Go tests, and when it fails says at the end which failed and how:
# packages are tested at the same time, and what one says may be far above the end.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
if [ "$status" -ne 0 ]; then
	echo "=== failed: $*" | cut -c 1-300
	grep -E '^ *--- FAIL|^FAIL|^panic: |^fatal error: |DATA RACE|^ +[a-z0-9_]+_test\.go:[0-9]+: |_test\.go:[0-9]+:[0-9]+: |left open|leaked|process left' "$log" |
		grep -vE ': time=[^ ]+ level=' | cut -c 1-500 | tail -n 80
fi
exit "$status"
