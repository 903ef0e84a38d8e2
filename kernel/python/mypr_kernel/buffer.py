"""What a cell or a task has printed, kept in this process for its handle.

Positions are characters of the combined output; they are what cursors hold. Any thread
may put; the main thread reads.
"""

from __future__ import annotations

from _thread import RLock

from .outbox import utf8_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class _Piece:
    """Adjacent text of one stream."""

    __slots__ = ("parts", "start", "stream")

    def __init__(self, stream: str, start: int) -> None:
        self.stream = stream
        self.start = start
        self.parts: list[str] = []

    def text(self) -> str:
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


class Page:
    """A part of a stream. ``more``: the next part is there already."""

    __slots__ = ("more", "next", "text")

    def __init__(self, text: str, next: int, more: bool) -> None:
        self.text = text
        self.next = next
        self.more = more


class Buffer:
    """The output of one handle, up to ``limit`` bytes."""

    __slots__ = ("_closed", "_lock", "_pieces", "_wake", "evicted", "limit", "size", "truncated", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0  # characters
        self.used = 0  # bytes
        self.truncated = False  # something was not kept
        self.evicted = False  # nothing is kept any more
        self._closed = False
        self._lock = RLock()  # a finalizer may print in the middle of put()
        self._pieces: list[_Piece] = []
        self._wake: list[Callable[[], None]] = []

    def put(self, stream: str, text: str) -> None:
        """Keep text, unless the owner is over."""
        size = len(text) if text.isascii() else utf8_size(text)
        with self._lock:
            if self._closed or self.truncated:
                return
            self.used += size
            if self.used > self.limit:
                self.truncated = True
                text = cut(text, size - (self.used - self.limit))
                self.used = self.limit
            pieces = self._pieces
            if not pieces or pieces[-1].stream != stream:
                pieces.append(_Piece(stream, self.size))
            pieces[-1].parts.append(text)
            self.size += len(text)
            wake, self._wake = self._wake, []
        for call in wake:
            call()

    def close(self) -> None:
        """Nothing more is taken."""
        with self._lock:
            self._closed = True
            wake, self._wake = self._wake, []
        for call in wake:
            call()

    def evict(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._pieces = []
            self.evicted = self.truncated = True

    def on_change(self, size: int, call: Callable[[], None]) -> None:
        """Call once, from any thread, when there is more than ``size`` or it was closed."""
        with self._lock:
            if not self._closed and self.size == size:
                self._wake.append(call)
                return
        call()

    def text(self, start: int = 0) -> str:
        """The combined text from a position on."""
        return self.page("", start, None).text

    def page(self, stream: str, start: int, limit: int | None) -> Page:
        """The text of a stream ("" for both) from a position on, at most ``limit`` bytes."""
        out: list[str] = []
        with self._lock:
            end = self.size
            for piece in self._pieces[self._index(start) :]:
                if stream and piece.stream != stream:
                    continue
                text = piece.text()
                if piece.start < start:
                    text = text[start - piece.start :]
                if not text:
                    continue
                if limit is not None:
                    head = cut(text, limit)
                    limit -= utf8_size(head)
                    if len(head) < len(text):
                        if head:
                            out.append(head)
                            return Page("".join(out), max(piece.start, start) + len(head), True)
                        return Page("".join(out), max(piece.start, start), True)
                    text = head
                out.append(text)
        return Page("".join(out), end, False)

    def skip(self, stream: str, start: int, chars: int) -> int:
        """The position a number of characters of a stream later."""
        with self._lock:
            for piece in self._pieces[self._index(start) :]:
                if stream and piece.stream != stream:
                    continue
                begin = max(piece.start, start)
                there = piece.start + len(piece.text()) - begin
                if chars <= there:
                    return begin + chars
                chars -= there
            return self.size

    def _index(self, start: int) -> int:
        """The piece that a position is in."""
        low, high = 0, len(self._pieces)
        while low < high:
            middle = (low + high) // 2
            if self._pieces[middle].start <= start:
                low = middle + 1
            else:
                high = middle
        return max(low - 1, 0)


def cut(text: str, limit: int) -> str:
    """The longest beginning of text that has at most ``limit`` bytes in UTF-8."""
    if len(text) * 4 <= limit:
        return text
    if text.isascii():
        return text[: max(limit, 0)]
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) <= limit:
        return text
    end = max(limit, 0)
    while end > 0 and raw[end] & 0xC0 == 0x80:  # not in the middle of a character
        end -= 1
    return raw[:end].decode("utf-8", "surrogatepass")
