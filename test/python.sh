#!/usr/bin/env bash
# Runs the kernel's own tests with the newest and the oldest interpreter that
# setup.sh found.
set -euo pipefail
cd "$(dirname "$0")/../kernel/python"
for venv in ../../test/.venv ../../test/.venv-oldest; do
	[ -x "$venv/bin/python" ] || continue
	"$venv/bin/python" --version
	PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" -m pytest -q -p no:cacheprovider
done
