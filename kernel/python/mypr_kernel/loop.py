"""The event loop: asyncio's, with a look at when it waits and whose executor work it is."""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
import sys
from _thread import get_ident
from math import ceil

from . import descriptors
from .cells import Cell, current

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from typing import Any

    from .capture import Log
    from .link import Link
    from .turn import Turn


class Selector(selectors.EpollSelector):
    """Tells the I/O thread when the loop waits and when it works, reads the kernel's socket
    while it waits, and takes what was passed on as soon as the wait is over: the first step
    of a new cell is then in this turn of the loop. A reader callback would cost one more turn.
    """

    def __init__(
        self, turn: Turn, link: Link, inbox_fd: int, inbox: deque[Any], take_inbox: Callable[[], object]
    ) -> None:
        super().__init__()
        self._turn = turn
        self._link = link
        self._inbox = inbox
        self._take_inbox = take_inbox
        # Edge-triggered: it ends the wait and need not be read.
        low: select.epoll = getattr(self, "_selector")  # noqa: B009
        low.close()
        epoll = self._selector = descriptors.epoll()
        epoll.register(inbox_fd, select.EPOLLIN | select.EPOLLET)
        self._inbox_fd = inbox_fd
        self._poll = epoll.poll
        self._keys: dict[int, selectors.SelectorKey] = getattr(self, "_fd_to_key")  # noqa: B009
        link.attach(epoll)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # As in the class above, but for what is not in its map.
        link = self._link
        if self._inbox:  # an exception kept it from being taken
            timeout = 0
        waits = timeout is None or timeout > 0
        events: list[tuple[int, int]] = []
        if waits:
            link.waits(True)  # before anything is sent: the answer to it is not for the other thread
        self._turn.end()
        try:
            if timeout is not None:  # milliseconds, rounded up: timers must not be early
                timeout = ceil(max(timeout, 0.0) * 1e3) * 1e-3
            events = self._poll(timeout, len(self._keys) + 2)
        except InterruptedError:
            pass
        finally:
            self._turn.begin()
            if waits and not events:
                link.waits(False)
        ready: list[tuple[selectors.SelectorKey, int]] = []
        for fd, event in events:
            key = self._keys.get(fd)
            if key is not None:
                kind = selectors.EVENT_WRITE if event & ~select.EPOLLIN else 0
                if event & ~select.EPOLLOUT:
                    kind |= selectors.EVENT_READ
                ready.append((key, kind & key.events))
            elif fd != self._inbox_fd:
                link.take(fd)
        if waits and events:
            link.waits(False)
        if self._inbox:
            self._take_inbox()
        return ready


class Loop(asyncio.SelectorEventLoop):
    """asyncio's loop; what goes to the default executor prints into the cell that sent it."""

    def _make_self_pipe(self) -> None:
        # As asyncio makes it, out of the way.
        super()._make_self_pipe()  # type: ignore[misc]
        self._remove_reader(self._ssock.fileno())  # type: ignore[attr-defined]
        for name in ("_ssock", "_csock"):
            low = getattr(self, name)
            high = socket.socket(low.family, low.type, low.proto, descriptors.aside(low.detach()))
            high.setblocking(False)
            setattr(self, name, high)
        self._add_reader(self._ssock.fileno(), self._read_from_self)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Refused, also before the loop runs (where the cell is that imports asyncio first):
        it is every cell's, for as long as the process lives."""
        raise RuntimeError("Cannot close a running event loop: it is the kernel's")

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        cell = current.get()
        if cell is not None:
            func = _Attributed(cell, func)
        return super().run_in_executor(executor, func, *args)


class _Attributed:
    """A function that a pool's thread runs for a cell: the thread is that cell's meanwhile."""

    __slots__ = ("_cell", "_func")

    def __init__(self, cell: Cell, func: Callable[..., Any]) -> None:
        self._cell = cell
        self._func = func

    def __call__(self, *args: Any) -> Any:
        threading = sys.modules["threading"]
        thread = threading._active.get(get_ident())
        before = getattr(thread, "_mypr_cell", None)
        if thread is not None:
            thread._mypr_cell = self._cell
        try:
            return self._func(*args)
        finally:
            if thread is not None:
                thread._mypr_cell = before


def make(
    turn: Turn, link: Link, log: Log, inbox_fd: int, inbox: deque[Any], take_inbox: Callable[[], object]
) -> Loop:
    """The loop of the main thread. ``take_inbox`` is called when ``inbox_fd`` has woken it."""
    loop = Loop(Selector(turn, link, inbox_fd, inbox, take_inbox))

    def on_exception(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Not through logging, which would print into whatever cell happens to run.
        from . import errors

        error = context.get("exception")
        text = str(context.get("message", ""))
        if error is not None:
            text += "\n" + errors.traceback_text(error)
        future = context.get("task") or context.get("future")
        owner = None
        if isinstance(future, asyncio.Task) and sys.version_info >= (3, 12):
            owner = future.get_context().get(current)
        if owner is not None and not owner.ended:
            token = current.set(owner)
            try:
                sys.stderr.write(text.rstrip() + "\n")
            finally:
                current.reset(token)
        else:
            log.line(text.rstrip())

    loop.set_exception_handler(on_exception)
    asyncio.set_event_loop(loop)
    return loop


async def stand_in(done: asyncio.Future[None]) -> None:
    """The task of a cell that was running before there was a loop."""
    await done
