#!/bin/sh
# Installs the program that lies beside this script: the static binary that "make build"
# or the Containerfile's target "binary" makes.
set -eu
cd "$(dirname "$0")"
prefix=${PREFIX:-/usr/local}
if [ ! -f mypr-mcp ]; then
	echo "mypr-mcp is not beside install.sh: build it (make build) and copy bin/mypr-mcp into the feature's directory" >&2
	exit 1
fi
mkdir -p "$prefix/bin"
cp mypr-mcp "$prefix/bin/mypr-mcp"
chmod 755 "$prefix/bin/mypr-mcp"
"$prefix/bin/mypr-mcp" version
if ! command -v python3 >/dev/null; then
	echo "warning: there is no python3 on the PATH, which a session needs (3.10 to 3.14)" >&2
fi
