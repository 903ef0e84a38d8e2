"""docs/WS.md and docs/ws/ are what the docstrings say (``MYPR_WRITE_DOCS=1 pytest
tests/test_docs.py`` writes them), and nobody is told of a call that does not exist."""

from __future__ import annotations

import inspect
import os
import re
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

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"

HEAD = """# The workspace API

Every cell finds it as `ws`, unless one has used the name for something else: `del ws` gives
it back to the next cell. Methods shown with `await` are asynchronous, the others answer at
once. `ws.help()` shows the same in a session. This page and those below are made from the
docstrings (`kernel/python/tests/test_docs.py`); change those.

Errors that the manager sends are `ws.RPCError` with `code`, `hint`, `operation` and `details`;
they are also `ValueError` (code invalid_request, invalid_cursor), `LookupError` (not_found),
`TimeoutError` (timeout) or `PermissionError` (permission_denied), so that either can be caught.
docs/JOBS.md tells how commands run, docs/FILES.md how files are read and written.
"""

# What is described where: a heading of docs/ws/<page>.md each.
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


def test_the_pages_are_what_the_docstrings_say() -> None:
    pages = {"WS.md": index(), **{f"ws/{name}.md": text for name, text in namespaces().items()}}
    if os.environ.get("MYPR_WRITE_DOCS"):
        (DOCS / "ws").mkdir(exist_ok=True)
        for name, text in pages.items():
            (DOCS / name).write_text(text)
    for name, text in pages.items():
        assert (DOCS / name).read_text() == text, "run MYPR_WRITE_DOCS=1 pytest tests/test_docs.py"
    assert {f"ws/{path.name}" for path in (DOCS / "ws").iterdir()} | {"WS.md"} == set(pages)


NAME = re.compile(r"\bws((?:\.[a-z][a-z_]*)+)")


def test_nobody_is_told_of_a_call_that_does_not_exist() -> None:
    """What agents and people read: instructions, results, hints of errors, pages."""
    known = {""} | {"." + member for member, _ in members(Workspace)}
    for name, kind, _ in PAGES:
        if name.startswith("ws."):
            known |= {name[2:]} | {f"{name[2:]}.{member}" for member, _ in members(kind)}
    places = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("kernel/python/mypr_kernel/*.py")]
    places += [p for d in ("internal", "units", "cmd", "kernel") for p in ROOT.glob(f"{d}/**/*.go")]
    told = 0
    for path in places:
        if path.name.endswith("_test.go"):
            continue
        for match in NAME.finditer(path.read_text()):
            name = match.group(1)
            if name.rpartition(".")[0] in (".local", ".workspace", ".root"):
                continue  # of a dictionary or a path
            assert name in known, f"{path.relative_to(ROOT)} speaks of ws{name}"
            told += 1
    assert told > 100


def test_everything_public_says_what_it_does() -> None:
    for name, kind, _ in [*PAGES, ("ws", Workspace, "")]:
        assert inspect.getdoc(kind), name
        for member, value in members(kind):
            assert inspect.getdoc(value), f"{name}.{member} has no docstring"


def index() -> str:
    lines = [HEAD, "## ws", "", *described("ws", Workspace), "## Namespaces", ""]
    for name, kind, title in PAGES:
        page = f"ws/{page_of(name, kind)}.md"
        lines.append(f"- [`{name}`]({page}): {title[0].lower()}{title[1:]}")
    return finished(lines)


def namespaces() -> dict[str, str]:
    """The text of each page of docs/ws, by its name."""
    pages: dict[str, list[str]] = {}
    for name, kind, title in PAGES:
        page = pages.setdefault(page_of(name, kind), [])
        page += [f"{'##' if page else '#'} {title}: `{name}`", "", inspect.getdoc(kind) or "", ""]
        page += described(name, kind)
    return {name: finished(lines) for name, lines in pages.items()}


def page_of(name: str, kind: type) -> str:
    """Handles are described with what returns them."""
    return {Job: "shell", Handle: "tasks"}.get(kind, name.rpartition(".")[2])


def finished(lines: list[str]) -> str:
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
