"""The ring: events on their way from whoever writes them to the manager.

Any thread puts; the I/O thread takes, frames and sends. Until it takes them, writes of
the same cell to the same stream grow into one chunk, so that a loop of small prints costs
an append each and not a message each. A chunk is closed by any other event of any cell:
the order of events is the order in which they were put.

Events stay in the ring until the manager has acknowledged them. While the ring is full,
whoever puts output waits; states and small notices never wait, so a cell can always end.
Nothing here is called with the lock held.
"""

from __future__ import annotations

import _thread
import time
from collections import deque
from os import eventfd_write

from . import interrupts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .cells import Cell

RING_BYTES = 8 << 20
DEFAULT_OUTPUT_BYTES = 16 << 20
DEFAULT_EVENT_CHARS = 16_384
UNFINISHED_CHARS = 65_536  # of a line that are not sent before its end, or a flush()


class Chunk:
    """Adjacent writes of one cell to one stream."""

    __slots__ = ("cell", "parts", "stream", "time")

    def __init__(self, cell: Cell, stream: str, text: str) -> None:
        self.cell = cell
        self.stream = stream
        self.parts = [text]
        self.time = time.time()


class Event:
    """A durable event but for its sequence number. ``cost`` is what it takes of the ring."""

    __slots__ = ("cell", "cost", "fields", "time")

    def __init__(self, cell: Cell, fields: dict[str, Any], cost: int) -> None:
        self.cell = cell
        self.fields = fields
        self.cost = cost
        self.time = time.time()


class Message:
    """A message without a sequence number, sent once, in order with the events."""

    __slots__ = ("fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


def utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class Outbox:
    """Where output is put. Limits are set by the manager's welcome.

    The lock guards everything below it; it is held for a few instructions at a time and
    never while waiting. ``wake_fd`` is the I/O thread's eventfd.
    """

    def __init__(self, wake_fd: int, output_bytes: int = DEFAULT_OUTPUT_BYTES) -> None:
        self.output_bytes = output_bytes  # of one run, text and files together
        self.event_chars = DEFAULT_EVENT_CHARS
        self._wake_fd = wake_fd
        # Reentrant: the garbage collector may run a user's __del__ that prints in the middle
        # of anything below. Nothing is lost then; a count may come out a little low.
        self.lock = _thread.RLock()
        self.holder = 0  # the thread that is at the connection: it must not wait for itself
        self.deliver: Callable[[], bool] | None = None  # sends what was put at once, or says that it cannot
        self.touched = False  # something was put since the I/O thread last slept
        self._items: deque[Chunk | Event | Message] = deque()
        self._tail: Chunk | None = None  # the last item, when it may still grow
        self._pending = 0  # characters and costs of _items
        self._ring = 0  # bytes framed and not acknowledged
        self._gates: list[Any] = []  # one held lock for each writer that waits
        self._refused = ""  # why no task may begin
        # The I/O thread waits, or is about to: the main thread should wake it before it
        # waits itself; whoever puts something must.
        self._waiting = False
        self._asleep = False

    # -- writers ---------------------------------------------------------------

    def stream(self, cell: Cell, stream: str, text: str) -> bool:
        """Put text of a live cell. False when the cell is over: the text was not taken.

        Waits while the ring is full. Text over the run's limit is dropped, which one
        ``truncated`` event says.
        """
        if self._pending + self._ring >= RING_BYTES and not cell.truncated:
            self.wait()
        length = len(text)
        size = length if text.isascii() else utf8_size(text)
        with self.lock:
            if cell.ended:
                return False
            if cell.truncated:
                return True
            cell.output = output = cell.output + size
            if output > self.output_bytes:
                text = _cut(text, size - (output - self.output_bytes))
                length = len(text)
            tail = self._tail
            if tail is not None and tail.cell is cell and tail.stream == stream:
                tail.parts.append(text)
            else:
                self._tail = tail = Chunk(cell, stream, text)
                self._items.append(tail)
            self._pending += length
            self.touched = True
            if output > self.output_bytes:
                self._truncate(cell)
            # Line by line, as to a terminal: print() writes its text and its newline apart.
            if self._asleep and ("\n" in text or stream == "stderr" or self._pending > UNFINISHED_CHARS):
                self._rouse()
        return True

    def event(self, cell: Cell, fields: dict[str, Any], size: int = 0, wait: bool = True) -> bool:
        """Put output that is not a stream: display, error, warning.

        ``size`` is its share of the run's limit, in bytes, text and files together. False
        when the cell is over or its limit does not allow it (which is then marked).
        Waits while the ring is full, unless ``wait`` is false.
        """
        if wait and self._pending + self._ring >= RING_BYTES:
            self.wait()
        with self.lock:
            if cell.ended or cell.truncated:
                return False
            cell.output += size
            if cell.output > self.output_bytes:
                self._truncate(cell)
                self._rouse()
                return False
            self._put(Event(cell, fields, 200 + len(fields.get("text", ""))))
        return True

    def state(self, cell: Cell, fields: dict[str, Any], ended: bool) -> None:
        """Put a state event; never waits. ``ended``: nothing of the cell may follow."""
        with self.lock:
            if cell.ended:
                return
            cell.ended = ended
            self._put(Event(cell, fields, 200))

    def refuse_tasks(self, reason: str) -> None:
        """From now on no task may begin, and why; "" lets them again."""
        with self.lock:
            self._refused = reason

    def task(self, cell: Cell, fields: dict[str, Any]) -> str:
        """Put the beginning of a detached task; never waits. Why it may not begin, or ""."""
        with self.lock:
            if self._refused:
                return self._refused
            self._put(Event(cell, {"event": "task", "task": fields}, 300))
        return ""

    def message(self, fields: dict[str, Any]) -> None:
        """Put a message that is sent once."""
        with self.lock:
            self._tail = None
            self._items.append(Message(fields))
            self._rouse()

    def room(self, cell: Cell, size: int) -> bool:
        """Whether the run's limit allows this many more bytes; marks the cell when not."""
        with self.lock:
            if cell.ended or cell.truncated:
                return False
            if cell.output + size > self.output_bytes:
                self._truncate(cell)
                self._rouse()
                return False
            return True

    def _put(self, event: Event) -> None:
        self._tail = None
        self._items.append(event)
        self._pending += event.cost
        self._rouse()

    def _truncate(self, cell: Cell) -> None:
        cell.truncated = True
        self._put(Event(cell, {"event": "truncated"}, 200))

    def _rouse(self) -> None:
        self.touched = True
        if self._asleep:
            self._asleep = self._waiting = False
            eventfd_write(self._wake_fd, 1)

    def wait(self) -> None:
        """Wait until the ring has room. An interrupt of the caller's cell ends the wait."""
        if _thread.get_ident() == self.holder:
            return
        gate = _thread.allocate_lock()
        gate.acquire()
        with self.lock:
            if self._pending + self._ring < RING_BYTES:
                return
            self._gates.append(gate)
            self._rouse()
        interrupts.wait(gate)

    def flush(self) -> None:
        """What was put should be sent now: the main thread has nothing more to do, or
        somebody asks for it."""
        if self._items and not (self.deliver is not None and self.deliver()) and self._waiting:
            self._asleep = self._waiting = False
            eventfd_write(self._wake_fd, 1)

    # -- the I/O thread --------------------------------------------------------

    def take(self) -> deque[Chunk | Event | Message]:
        """Everything that was put. What is framed of it goes to ``framed``."""
        with self.lock:
            items, self._items = self._items, deque()
            self._tail = None
            return items

    def framed(self, pending: int, ring: int) -> None:
        """So much less is pending, so much more is in the ring (bytes; less when negative)."""
        with self.lock:
            self._pending -= pending
            self._ring += ring
            if self._gates and self._pending + self._ring < RING_BYTES:
                for gate in self._gates:
                    gate.release()
                self._gates.clear()

    def admit(self, cell: Cell, text: str) -> tuple[str, bool]:
        """What of captured text the run's limit allows, and whether that just ended it.

        For the I/O thread, which frames such text itself: the cell may have put its
        terminal event already, and the text belongs before that.
        """
        size = utf8_size(text)
        with self.lock:
            if cell.truncated:
                return "", False
            cell.output += size
            over = cell.output - self.output_bytes
            if over <= 0:
                return text, False
            cell.truncated = True
            return _cut(text, size - over), True

    def full(self) -> bool:
        return self._pending + self._ring >= RING_BYTES

    def sleep(self, linger: bool) -> bool:
        """Whether the I/O thread may wait: nothing was put.

        From here a put wakes it. If it only lingers (and so comes back by itself in a
        moment), a put does not, only ``flush`` does: two threads that take the interpreter
        lock from each other at every event are slow.
        """
        with self.lock:
            self._waiting = not self._items
            if self._waiting:
                self.touched = False
            self._asleep = self._waiting and not linger
            return self._waiting

    def awake(self) -> None:
        """The I/O thread goes on by itself: a put need not wake it."""
        self._asleep = self._waiting = False


def _cut(text: str, size: int) -> str:
    """The longest beginning of text that has at most ``size`` bytes in UTF-8."""
    if text.isascii():
        return text[: max(size, 0)]
    raw = text.encode("utf-8", "surrogatepass")[: max(size, 0)]
    return raw.decode("utf-8", "ignore")
