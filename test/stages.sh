#!/usr/bin/env bash
# stages.sh N TARGET…: makes the targets, N of them side by side, in this order: most wait
# more than they compute. What a target says is shown when it has ended. After a failure no
# other is begun, and what failed is shown once more at the end.
set -uo pipefail
n=$1
shift
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
declare -A target=() began=() # by the pid of its make
failed=()

# ended waits for the end of one of them.
ended() {
	local pid status=0
	wait -n -p pid "${!target[@]}" || status=$?
	local name=${target[$pid]} seconds=$((SECONDS - began[$pid]))
	unset "target[$pid]"
	echo "=== $(date +%T) $name: $([ $status = 0 ] && echo passed || echo FAILED) after $seconds s"
	cat "$logs/$name"
	[ $status = 0 ] || failed+=("$name")
}

for name in "$@"; do
	while [ ${#target[@]} -ge "$n" ]; do ended; done
	[ ${#failed[@]} = 0 ] || break
	echo "=== $(date +%T) $name"
	once=(-o build) # and not anew while others run it
	[ "$name" != build ] || once=()
	make --no-print-directory "${once[@]}" "$name" >"$logs/$name" 2>&1 </dev/null &
	target[$!]=$name began[$!]=$SECONDS
done
while [ ${#target[@]} -gt 0 ]; do ended; done
for name in "${failed[@]}"; do
	echo "=== $name FAILED:"
	tail -n 100 "$logs/$name"
done
[ ${#failed[@]} = 0 ]
