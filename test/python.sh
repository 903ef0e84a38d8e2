#!/usr/bin/env bash
# Runs the kernel's own tests with the newest and the oldest interpreter that
# setup.sh found, at the same time, and those that watch a kernel do nothing apart from
# the others: mostly they wait. What failed is shown last.
set -uo pipefail
cd "$(dirname "$0")/../kernel/python"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
run() {
	"$1/bin/python" --version
	PYTHONDONTWRITEBYTECODE=1 "$1/bin/python" -m pytest -p no:cacheprovider "${@:2}"
}
declare -A pids
for venv in .venv .venv-oldest; do
	[ -x "../../test/$venv/bin/python" ] || continue
	run "../../test/$venv" --ignore=tests/test_idle.py >"$logs/$venv" 2>&1 &
	pids[$venv]=$!
	run "../../test/$venv" tests/test_idle.py >"$logs/$venv-idle" 2>&1 &
	pids[$venv-idle]=$!
done
[ ${#pids[@]} -gt 0 ] || { echo "no Python environment: make setup" >&2; exit 1; }
failed=()
for log in "${!pids[@]}"; do
	if wait "${pids[$log]}"; then cat "$logs/$log"; else failed+=("$logs/$log"); fi
done
[ ${#failed[@]} -eq 0 ] || { cat "${failed[@]}"; exit 1; }
