"""What the main thread tells of the event loop, for the I/O thread to watch it.

Two attributes are written around each wait of the loop. Nobody polls: the I/O thread asks
to be woken by the next change (``tell_busy``, ``tell_idle``) and otherwise looks once,
half a second after the main thread began to work.
"""

from __future__ import annotations

import time
from os import eventfd_write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKED_AFTER = 0.5  # seconds


class Turn:
    """``since`` is the monotonic time at which the loop's present turn began, 0.0 while it waits."""

    __slots__ = ("_flush", "_wake_fd", "since", "tell_busy", "tell_idle")

    def __init__(self, wake_fd: int, flush: Callable[[], None]) -> None:
        self._wake_fd = wake_fd
        self._flush = flush
        self.since = 0.0
        self.tell_busy = False
        self.tell_idle = False

    def begin(self) -> None:
        """The loop has something to do."""
        self.since = time.monotonic()
        if self.tell_busy:
            self.tell_busy = False
            eventfd_write(self._wake_fd, 1)

    def end(self) -> None:
        """The loop is about to wait, or to look for more without waiting."""
        self.since = 0.0
        self._flush()
        if self.tell_idle:
            self.tell_idle = False
            eventfd_write(self._wake_fd, 1)
