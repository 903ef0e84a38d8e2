#!/usr/bin/env bash
# Runs the kernel's own tests with the newest and the oldest interpreter that
# setup.sh found, at the same time: mostly they wait. What failed is shown last.
set -uo pipefail
cd "$(dirname "$0")/../kernel/python"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
run() {
	"$1/bin/python" --version
	PYTHONDONTWRITEBYTECODE=1 "$1/bin/python" -m pytest -p no:cacheprovider
}
declare -A pids
for venv in .venv .venv-oldest; do
	[ -x "../../test/$venv/bin/python" ] || continue
	run "../../test/$venv" >"$logs/$venv" 2>&1 &
	pids[$venv]=$!
done
[ ${#pids[@]} -gt 0 ] || { echo "no Python environment: make setup" >&2; exit 1; }
failed=()
for venv in "${!pids[@]}"; do
	if wait "${pids[$venv]}"; then cat "$logs/$venv"; else failed+=("$logs/$venv"); fi
done
[ ${#failed[@]} -eq 0 ] || { cat "${failed[@]}"; exit 1; }
