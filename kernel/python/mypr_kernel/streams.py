"""sys.stdout, sys.stderr and sys.stdin of the kernel.

What is written goes to the cell of the context that writes; from a thread without one, to
the cell that started the thread, else to the only cell that runs. What belongs to no live
cell goes to the kernel's log.
"""

from __future__ import annotations

import io
import os
import sys
from _thread import get_ident

from . import interrupts
from .cells import Cell, current

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from .capture import Log
    from .outbox import Outbox

NO_INPUT = (
    "nobody can type into a cell: pass the value in the code, "
    "or give a program its input through its own stdin (subprocess.run(..., input=...))"
)


class InputUnavailable(EOFError):
    """Something asked for keyboard input. An EOFError, which programs are prepared for."""


class Router:
    """Finds the cell that a write belongs to."""

    def __init__(self, outbox: Outbox, log: Log, running: Callable[[], list[Cell]]) -> None:
        self.outbox = outbox
        self.log = log
        self._running = running
        self.main_thread = get_ident()
        self.own_threads: set[int] = set()  # of the kernel: what they print is for the log

    def of_thread(self) -> Cell | None:
        """The cell of a thread that has no context of one."""
        ident = get_ident()
        if ident == self.main_thread or ident in self.own_threads:
            return None
        threading = sys.modules.get("threading")
        if threading is not None:
            cell = getattr(threading._active.get(ident), "_mypr_cell", None)
            if isinstance(cell, Cell):
                return cell
        running = self._running()
        return running[0] if len(running) == 1 else None


class Output(io.TextIOBase):
    """A text stream that routes. Surrogates are welcome; encoding is a formality."""

    # Read by libraries that ask what a stream can do.
    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = True
    mode = "w"

    def __init__(self, router: Router, stream: str, fd: int) -> None:
        super().__init__()
        self.name = f"<{stream}>"
        self._router = router
        self._stream = stream
        self._put = router.outbox.stream
        self._fd = fd
        self._forked = False
        self._line = ""  # unfinished, in a forked child
        self.buffer = Bytes(self)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            cell = current.get()
            if cell is None or self._forked:
                self._write_elsewhere(text)
            elif cell.sink is not None or not self._put(cell, self._stream, text):
                self._write_to(cell, text)
            if interrupts.missed:
                interrupts.pass_on()
        return len(text)

    def _write_elsewhere(self, text: str) -> None:
        if self._forked:
            self._line += text
            if "\n" in text:
                self.flush()
            return
        cell = self._router.of_thread()
        if cell is None:
            self._router.log.write(text)
        else:
            self._write_to(cell, text)

    def _write_to(self, cell: Cell, text: str) -> None:
        """Into a cell that has more than one place for it, or is over."""
        sink = cell.sink
        if sink is not None:
            sink.put(self._stream, text)
        if not cell.hidden and not self._put(cell, self._stream, text):
            self._router.log.write(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """The descriptor that children inherit; what they write there is captured too."""
        return self._fd

    def isatty(self) -> bool:
        return False

    def flush(self) -> None:
        """Send an unfinished line."""
        if not self._forked:
            self._router.outbox.flush()
            return
        data, self._line = self._line.encode("utf-8", "backslashreplace"), ""
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Ignored: all cells share this stream."""

    def reconfigure(self, **_: Any) -> None:
        """Accepted and ignored, as for a stream that is as it is asked to be."""

    def after_fork(self) -> None:
        """In a forked child: write lines to the descriptor, which the parent reads."""
        self._forked = True


class Bytes(io.BufferedIOBase):
    """``sys.stdout.buffer``: bytes that are decoded as UTF-8."""

    def __init__(self, text: Output) -> None:
        super().__init__()
        self.raw = self
        self._text = text

    def write(self, data: Any) -> int:
        view = bytes(data)
        self._text.write(view.decode("utf-8", "replace"))
        return len(view)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._text.fileno()

    def flush(self) -> None:
        """Send an unfinished line."""
        self._text.flush()

    def close(self) -> None:
        """Ignored: all cells share this stream."""


class Input(io.TextIOBase):
    """``sys.stdin``: every read fails at once."""

    encoding = "utf-8"
    name = "<stdin>"

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0  # /dev/null

    def isatty(self) -> bool:
        return False

    def read(self, size: int | None = -1) -> str:
        raise InputUnavailable(NO_INPUT)

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        raise InputUnavailable(NO_INPUT)

    def readlines(self, hint: int = -1) -> list[str]:  # type: ignore[override]
        raise InputUnavailable(NO_INPUT)

    def __next__(self) -> str:  # type: ignore[override]
        raise InputUnavailable(NO_INPUT)

    def close(self) -> None:
        """Ignored: all cells share this stream."""


def refuse_debugger(*_: Any, **__: Any) -> None:
    """``breakpoint()``: there is no terminal for a debugger."""
    raise InputUnavailable(f"breakpoint() needs a terminal, and {NO_INPUT}")


def refuse_password(prompt: str = "Password: ", stream: Any = None, **_: Any) -> str:
    """``getpass.getpass()``."""
    raise InputUnavailable(f"getpass() needs a terminal, and {NO_INPUT}")
