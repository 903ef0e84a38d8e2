"""The process as cells find it: variables, directories, sys.path."""

from __future__ import annotations

import os
import sys

# Programs that would wait for a person: nobody sits here.
QUIET = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_EDITOR": "true",
    "GIT_PAGER": "cat",
    "PAGER": "cat",
    "MANPAGER": "cat",
    "SYSTEMD_PAGER": "",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "NO_COLOR": "1",
}
# The kernel's own: what cells start must not take itself for the kernel.
OWN = ("MYPR_KERNEL_SOCKET", "MYPR_ARTIFACTS", "MYPR_OUTPUT_LIMIT", "INVOCATION_ID")


class Settings:
    """What the launcher told through the environment."""

    __slots__ = ("artifacts", "generation", "output_bytes", "root", "socket", "workspace")

    def __init__(self) -> None:
        get = os.environ.get
        self.socket = get("MYPR_KERNEL_SOCKET", "")
        self.generation = get("INVOCATION_ID", "")
        self.workspace = get("MYPR_WORKSPACE", "") or _cwd()
        self.root = get("MYPR_ROOT", "") or os.path.join(self.workspace, ".mypr")
        self.artifacts = get("MYPR_ARTIFACTS", "") or os.path.join(self.root, "artifacts")
        limit = get("MYPR_OUTPUT_LIMIT", "")
        self.output_bytes = int(limit) if limit.isdigit() else 0


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def prepare(settings: Settings) -> None:
    """Set variables that programs look at, go to the workspace, order sys.path.

    sys.path: ``.mypr/lib``, the standard library, the workspace, installed packages. The
    workspace stands behind the standard library because the kernel imports from that at
    any time: a ``types.py`` of the user must not break the session.
    """
    for name in OWN:
        os.environ.pop(name, None)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        os.chdir(settings.workspace)
    except OSError:
        pass  # deleted or unreadable: cells can still run
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    cwd = _cwd()
    path = [p for p in sys.path if p not in ("", cwd, settings.workspace, package)]
    library = os.path.dirname(os.__file__)
    behind = max((i + 1 for i, p in enumerate(path) if p == library or _within(p, library)), default=0)
    path.insert(behind, settings.workspace)
    if _inherited(package):
        path.append(package)
    sys.path[:] = [os.path.join(settings.root, "lib"), *path]
    sys.argv[:] = [""]


def _within(path: str, library: str) -> bool:
    return path.startswith(library + os.sep) and not path.endswith("-packages")


def _inherited(package: str) -> bool:
    # Found by PYTHONPATH (as in tests): children find it too, so it may stay, last.
    return package in os.environ.get("PYTHONPATH", "").split(os.pathsep)


def hold_sources() -> None:
    """Lock the directory of the kernel's own sources for the life of the process, children
    included: programs of other versions remove those that nobody has locked, and this one
    still imports from it."""
    import fcntl

    try:
        fd = os.open(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        pass  # a file system without locks: then there is nobody who removes it either
