"""docs/WS.md is what the docstrings say. ``MYPR_WRITE_DOCS=1 pytest tests/test_docs.py`` writes it."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from mypr_kernel.fs import Files
from mypr_kernel.git import Git
from mypr_kernel.handles import Handle
from mypr_kernel.history import History
from mypr_kernel.locks import Locks
from mypr_kernel.messages import Messages
from mypr_kernel.modules import Modules
from mypr_kernel.packages import Packages
from mypr_kernel.shell import Job, Shell
from mypr_kernel.skills import Skills
from mypr_kernel.tasks import Tasks
from mypr_kernel.workspace import Client, Workspace

DOCS = Path(__file__).resolve().parents[3] / "docs" / "WS.md"

HEAD = """# The workspace API

Every cell finds it as `ws`. Methods shown with `await` are asynchronous, the others answer at
once. `ws.help()` shows the same in a session. This page is made from the docstrings
(`kernel/python/tests/test_docs.py`); change those.

Errors that the manager sends are `ws.RPCError` with `code`, `hint`, `operation` and `details`;
they are also `ValueError` (code invalid_request, invalid_cursor), `LookupError` (not_found),
`TimeoutError` (timeout) or `PermissionError` (permission_denied), so that either can be caught.
docs/JOBS.md tells how commands run, docs/FILES.md how files are read and written.
"""

PAGES: list[tuple[str, type, str]] = [
    ("ws.fs", Files, "Files"),
    ("ws.git", Git, "Git"),
    ("ws.shell", Shell, "Commands"),
    ("job", Job, "Handles of commands"),
    ("ws.tasks", Tasks, "Detached work"),
    ("handle", Handle, "Handles of any work"),
    ("ws.history", History, "History"),
    ("ws.messages", Messages, "Messages"),
    ("ws.locks", Locks, "Locks"),
    ("ws.skills", Skills, "Skills"),
    ("ws.modules", Modules, "Modules"),
    ("ws.packages", Packages, "Packages"),
    ("ws.client", Client, "Who asks"),
]


def test_the_page_is_what_the_docstrings_say() -> None:
    text = page()
    if os.environ.get("MYPR_WRITE_DOCS"):
        DOCS.write_text(text)
    assert DOCS.read_text() == text, "run MYPR_WRITE_DOCS=1 pytest tests/test_docs.py"


def test_everything_public_says_what_it_does() -> None:
    for name, kind, _ in [*PAGES, ("ws", Workspace, "")]:
        assert inspect.getdoc(kind), name
        for member, value in members(kind):
            assert inspect.getdoc(value), f"{name}.{member} has no docstring"


def page() -> str:
    lines = [HEAD, "## ws", "", *described("ws", Workspace)]
    for name, kind, title in PAGES:
        lines += [f"## {title}: `{name}`", "", inspect.getdoc(kind) or "", "", *described(name, kind)]
    return "\n".join(lines).replace("``", "`").rstrip() + "\n"


def members(kind: type) -> list[tuple[str, Any]]:
    """Public methods and properties that the class has itself."""
    own: list[tuple[str, Any]] = []
    for name, value in vars(kind).items():
        if (
            name.startswith("_")
            or isinstance(value, type)
            or not (callable(value) or isinstance(value, property))
        ):
            continue
        if isinstance(value, property) and "_part" in (value.fget.__code__.co_names if value.fget else ()):
            continue  # a page of its own
        own.append((name, value))
    return own


def described(name: str, kind: type) -> list[str]:
    lines = []
    for member, value in members(kind):
        doc = inspect.getdoc(value) or ""
        head = f"{name}.{member}" if isinstance(value, property) else signature(f"{name}.{member}", value)
        lines += [f"### `{head}`", "", doc, ""]
    return lines


def signature(name: str, function: Any) -> str:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    shown = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])
    return ("await " if inspect.iscoroutinefunction(function) else "") + f"{name}{shown}"
