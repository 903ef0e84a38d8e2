#!/usr/bin/env bash
# Runs the kernel's own tests with the newest and the oldest interpreter that
# setup.sh found, at the same time: mostly they wait.
set -uo pipefail
cd "$(dirname "$0")/../kernel/python"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
run() {
	"$1/bin/python" --version
	PYTHONDONTWRITEBYTECODE=1 "$1/bin/python" -m pytest -p no:cacheprovider
}
pids=()
for venv in .venv .venv-oldest; do
	[ -x "../../test/$venv/bin/python" ] || continue
	run "../../test/$venv" >"$logs/$venv" 2>&1 &
	pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
cat "$logs"/.venv*
[ ${#pids[@]} -gt 0 ] || { echo "no Python environment: make setup" >&2; status=1; }
exit "$status"
