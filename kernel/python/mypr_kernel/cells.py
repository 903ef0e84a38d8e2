"""A cell, whose output is whose, and how its code is compiled."""

from __future__ import annotations

import sys
from _contextvars import ContextVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

    from .buffer import Buffer

# States of a cell. Live ones are named as in hello, the others as in the state event.
QUEUED = "queued"
RUNNING = "running"

# Flags of compile(), from the ast module, which costs half a bare interpreter start.
ONLY_AST = 0x400
TOP_LEVEL_AWAIT = 0x2000
CO_COROUTINE = 0x80

SOURCES_CHARS = 16 << 20  # source text kept for tracebacks through functions of old cells
SOURCE_COST = 500  # characters that each text counts for on top

current: ContextVar[Cell | None] = ContextVar("mypr_cell", default=None)


class Cell:
    """One execution. Everything that it starts carries it in the ``current`` variable.

    Child tasks and threads may hold it long after its end, so ``release`` leaves only
    what identifies it. ``output``, ``truncated`` and ``ended`` are the outbox's, ``sink`` is
    its handle's copy of what it prints.
    """

    __slots__ = (
        "__weakref__",
        "client_id",
        "code",
        "connection_id",
        "ended",
        "exec_id",
        "filename",
        "interrupted",
        "output",
        "reason",
        "sink",
        "state",
        "task",
        "truncated",
    )

    detached = False  # True for a task, which runs from its birth on
    hidden = False  # True for a task that nobody else is told of: only the sink gets its output

    def __init__(self, exec_id: str, code: str, client_id: str, connection_id: str) -> None:
        self.exec_id = exec_id
        self.code = code
        self.client_id = client_id
        self.connection_id = connection_id
        self.filename = f"<cell {exec_id[:8]}>"
        self.state = QUEUED
        self.task: Any = None  # asyncio.Task once it has one
        self.interrupted = False  # KeyboardInterrupt was raised in it on request
        self.reason = ""  # why it was cancelled, when the kernel did it
        self.output = 0  # bytes
        self.truncated = False
        self.ended = False  # its terminal event was put
        self.sink: Buffer | None = None

    def release(self) -> None:
        self.code = ""
        self.task = None

    def __repr__(self) -> str:
        return f"<cell {self.exec_id} {self.state}>"


class Program:
    """Compiled code: ``body`` is executed, then ``last`` evaluated and displayed."""

    __slots__ = ("body", "is_async", "last", "silent")

    def __init__(self, body: CodeType | None, last: CodeType | None, silent: bool) -> None:
        self.body = body
        self.last = last
        self.silent = silent
        self.is_async = bool(
            (body is not None and body.co_flags & CO_COROUTINE)
            or (last is not None and last.co_flags & CO_COROUTINE)
        )

    def defines(self) -> bool:
        """Whether functions, classes or the like may outlive the cell."""
        for code in (self.body, self.last):
            if code is not None:
                for const in code.co_consts:
                    if type(const) is type(code):
                        return True
        return False


def compile_cell(code: str, filename: str) -> Program:
    """Compile a cell. SyntaxError and ValueError (NUL characters) as from compile().

    A trailing semicolon keeps the last expression from being displayed.
    """
    flags = TOP_LEVEL_AWAIT
    short = code.strip()
    if short and "\n" not in short and ";" not in short:
        # One expression is the common case and needs no tree.
        try:
            return Program(None, compile(short, filename, "eval", flags, True), False)
        except SyntaxError:
            pass
    tree = compile(code, filename, "exec", flags | ONLY_AST, True)
    return compile_tree(tree, code, filename)


def compile_tree(tree: Any, code: str, filename: str) -> Program:
    """Compile the ast.Module of a cell, its last expression apart."""
    import _ast

    flags = TOP_LEVEL_AWAIT
    last: CodeType | None = None
    silent = False
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        expression = _ast.Expression(tree.body.pop().value)
        last = compile(expression, filename, "eval", flags, True)
        silent = _ends_with_semicolon(code, expression.body)
    body = compile(tree, filename, "exec", flags, True) if tree.body else None
    return Program(body, last, silent)


def _ends_with_semicolon(code: str, node: Any) -> bool:
    """Whether a semicolon follows the last expression, comments and blanks apart."""
    lines = code.split("\n")[node.end_lineno - 1 :]
    rest = lines[0].encode("utf-8", "replace")[node.end_col_offset :].decode("utf-8", "replace")
    # An expression in parentheses ends before they close.
    return any(part.lstrip(" \t\r)").startswith(";") for part in (rest, *lines[1:]))


def needs_ipython(code: str) -> bool:
    """Whether code that is no Python looks like IPython's syntax: a line that begins with
    ``%``, ``!`` or ``?``, ends with ``?``, or assigns from a magic or a command."""
    for line in code.splitlines():
        text = line.strip()
        if text[:1] in ("%", "!", "?") or text[-1:] == "?":
            return True
        for mark in ("= %", "= !", "=%", "=!"):
            if mark in text:
                return True
    return False


class Sources:
    """The text of cells, so that tracebacks and inspect.getsource show their lines.

    Kept for all cells that define something, up to SOURCES_CHARS in total; the text of a
    cell that defines nothing goes with the cell.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._chars = 0

    def add(self, filename: str, code: str) -> None:
        self.drop(filename)
        self._texts[filename] = code
        self._chars += len(code) + SOURCE_COST
        while self._chars > SOURCES_CHARS and len(self._texts) > 1:
            self.drop(next(iter(self._texts)))
        if "linecache" in sys.modules:
            self._publish(filename, code)

    def drop(self, filename: str) -> None:
        text = self._texts.pop(filename, None)
        if text is not None:
            self._chars -= len(text) + SOURCE_COST
            if "linecache" in sys.modules:
                sys.modules["linecache"].cache.pop(filename, None)

    def publish_all(self) -> None:
        """linecache was imported: fill it."""
        for filename, code in self._texts.items():
            self._publish(filename, code)

    @staticmethod
    def _publish(filename: str, code: str) -> None:
        lines = [line + "\n" for line in code.split("\n")]
        # No modification time: linecache then never looks for such a file.
        sys.modules["linecache"].cache[filename] = (len(code), None, lines, filename)
