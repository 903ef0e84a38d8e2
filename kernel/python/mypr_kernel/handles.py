"""What every handle can do, whatever it stands for: a cell, a task or a job."""

from __future__ import annotations

import time

from .buffer import Buffer
from .calls import RPCError
from .cells import QUEUED, RUNNING, Cell

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    import re
    from collections.abc import Callable, Generator
    from typing import Any, NoReturn

    from .calls import Calls

CANCELLING = "cancelling"
TERMINAL = ("succeeded", "failed", "cancelled", "lost")

MAX_WAIT_MS = 30_000
MAX_BYTES = 1 << 20
CANCEL_WITHIN = 10.0  # seconds that cancel() waits for code that does not give in


class NotReady(RuntimeError):
    """There is no result yet: the work has not ended."""


class ResultUnavailable(RuntimeError):
    """The work ended, and its Python value is gone or never was here."""


class InvalidCursor(ValueError):
    """A cursor of another handle, stream, method or kernel."""


class Chunk:
    """A page of output on its way to read() and expect()."""

    __slots__ = ("cursor", "data", "ended", "more", "text")

    def __init__(self, text: str, data: bytes | None, cursor: str, more: bool, ended: bool) -> None:
        self.text = text
        self.data = data  # the same as bytes, where the text may have replacements in it
        self.cursor = cursor  # behind it
        self.more = more
        self.ended = ended


def stream_name(stream: str | None) -> str:
    """ "stdout", "stderr", or "" for both."""
    if stream is None or stream == "combined":
        return ""
    if stream not in ("stdout", "stderr"):
        raise ValueError(f'stream is "stdout", "stderr" or None for both, not {stream!r}')
    return stream


def whole(name: str, value: object, low: int, high: int) -> int:
    """An integer parameter within bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {value}")
    return value


class Handle:
    """Work that goes on without you: ``await`` it, look at it, cancel it.

    Methods without ``await`` (status, output, result) answer at once.
    """

    id: str

    def status(self) -> dict[str, Any]:
        """What is known of it now.

        Keys: id, kind, status (queued, running, cancelling, succeeded, failed, cancelled,
        lost), created_at, started_at, finished_at (Unix seconds), client_id,
        connection_id, exec_id (of the cell that started it), history_id, error, warnings.
        """
        raise NotImplementedError

    def output(self, cursor: int | None = None) -> Any:
        """What it printed, stdout and stderr together: text, or with ``cursor`` (a number
        of characters) ``{"output", "cursor", "truncated", "warnings"}`` from there on."""
        raise NotImplementedError

    def result(self) -> Any:
        """Its value, or its exception raised.

        Raises NotReady before the end, asyncio.CancelledError if it was cancelled,
        ResultUnavailable if the value does not exist in this kernel.
        """
        raise NotImplementedError

    async def cancel(self) -> bool:
        """Cancel it and wait until it is over. False if it was over before."""
        raise NotImplementedError

    async def _end(self) -> None:
        """Return when it is over."""
        raise NotImplementedError

    async def _chunk(self, cursor: str | None, stream: str, limit: int, wait: float) -> Chunk:
        """The next output; waits when there is none."""
        raise NotImplementedError

    async def _skip(self, cursor: str | None, stream: str, chunks: list[Chunk], chars: int) -> str:
        """The cursor a number of characters further, all of them in the chunks."""
        raise NotImplementedError

    def _heard(self) -> dict[str, Any]:
        """The status right after _chunk, which may have told it."""
        return self.status()

    def _state(self) -> str:
        state: str = self.status()["status"]
        return state

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        await self._end()
        return self.result()

    async def read(
        self,
        cursor: str | None = None,
        stream: str | None = None,
        max_bytes: int = 32768,
        wait_ms: int = MAX_WAIT_MS,
    ) -> dict[str, Any]:
        """The next output; waits up to ``wait_ms`` (at most 30,000) for some or for the end.

        ``stream``: "stdout", "stderr", or None for both in order. ``cursor``: what an
        earlier read or expect of the same stream returned; None is the beginning. Returns
        ``{"id", "output", "cursor", "has_more", "state", "truncated"}`` and, where there
        is something to say, "warnings" and "error". Cancelling the wait does not cancel
        the work. Raises ValueError for a cursor from elsewhere.
        """
        _check_cursor(cursor)
        limit = whole("max_bytes", max_bytes, 1, MAX_BYTES)
        wait = whole("wait_ms", wait_ms, 0, MAX_WAIT_MS) / 1000
        chunk = await self._chunk(cursor, stream_name(stream), max(limit, 4), wait)
        status = self._heard()
        page = {
            "id": self.id,
            "output": chunk.text,
            "cursor": chunk.cursor,
            "has_more": chunk.more,
            "state": status["status"],
            "truncated": bool(status.get("truncated")),
        }
        for key in ("warnings", "error"):
            if status.get(key):
                page[key] = status[key]
        return page

    async def expect(
        self,
        pattern: str | re.Pattern[str],
        cursor: str | None = None,
        stream: str | None = None,
        regex: bool = False,
        timeout: float = 30,
        max_scan_bytes: int = 65536,
    ) -> dict[str, Any]:
        """Wait until the output contains ``pattern``: text, or with ``regex`` an expression.

        Searches from ``cursor`` on, at most ``max_scan_bytes``, for at most ``timeout``
        seconds (30 or less). Returns ``{"id", "matched", "reason", "cursor",
        "scanned_cursor", "state"}``; reason is "match", "eof" (it ended without), "timeout"
        or "limit". With a match there are "match" (the text) and "groups", and the cursor is
        behind it; without one the cursor is the one given, for another try.
        """
        _check_cursor(cursor)
        name = stream_name(stream)
        limit = whole("max_scan_bytes", max_scan_bytes, 1, 16 << 20)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
        if not 0 <= timeout <= MAX_WAIT_MS / 1000:
            raise ValueError(f"timeout must be from 0 to 30 seconds, not {timeout}")
        search = _searcher(pattern, regex)
        until = time.monotonic() + timeout
        chunks: list[Chunk] = []
        text, at = "", cursor
        start = at
        reason = ""
        found: Any = None
        while not reason:
            scanned = len(text.encode("utf-8", "surrogatepass"))
            if scanned >= limit:
                reason = "limit"
                break
            wait = max(until - time.monotonic(), 0)
            chunk = await self._chunk(at, name, max(limit - scanned, 4), wait)
            at = chunk.cursor
            if start is None:
                start = await self._skip(None, name, [], 0)
            if chunk.text:
                chunks.append(chunk)
                before, text = len(text), text + chunk.text
                found = search(text, before)
                if found is not None:
                    reason = "match"
            if not reason and not chunk.more:
                if chunk.ended:
                    reason = "eof"
                elif not chunk.text and time.monotonic() >= until:
                    reason = "timeout"
        page = {"id": self.id, "matched": found is not None, "reason": reason}
        if found is not None:
            page["match"], page["groups"], end = found
            page["cursor"] = await self._skip(cursor, name, chunks, end)
        else:
            page["cursor"] = start
        page["scanned_cursor"] = at
        page["state"] = self._state()
        return page

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.id} {self._state()}>"


def _searcher(pattern: Any, regex: bool) -> Callable[[str, int], tuple[str, list[Any], int] | None]:
    """A function of the text and of how much of it was searched before."""
    if isinstance(pattern, str) and not regex:
        if not pattern:
            raise ValueError("pattern is empty")

        def literal(text: str, before: int) -> tuple[str, list[Any], int] | None:
            at = text.find(pattern, max(before - len(pattern) + 1, 0))
            return None if at < 0 else (pattern, [], at + len(pattern))

        return literal
    import re

    if not isinstance(pattern, (str, re.Pattern)):
        raise TypeError(f"pattern must be text, not {type(pattern).__name__}")
    compiled = re.compile(pattern)

    def expression(text: str, _: int) -> tuple[str, list[Any], int] | None:
        match = compiled.search(text)
        return None if match is None else (match.group(), list(match.groups()), match.end())

    return expression


def encode_cursor(*fields: str | int) -> str:
    from binascii import b2a_base64

    raw = "\n".join(map(str, fields)).encode("utf-8", "surrogatepass")
    return "mypr1." + b2a_base64(raw, newline=False).decode().translate({43: "-", 47: "_", 61: None})


def _check_cursor(cursor: object) -> None:
    if cursor is not None and not isinstance(cursor, str):
        raise TypeError(f"cursor must be text that read or expect returned, not {type(cursor).__name__}")


def decode_cursor(cursor: str) -> list[str]:
    from binascii import a2b_base64

    prefix, _, text = cursor.partition(".")
    try:
        if prefix != "mypr1":
            raise ValueError
        raw = a2b_base64(text.translate({45: "+", 95: "/"}) + "=" * (-len(text) % 4))
        return raw.decode("utf-8", "surrogatepass").split("\n")
    except ValueError:
        raise InvalidCursor(
            "this cursor is not one that read or expect of a Python task or cell returned "
            "(output(), poll and history have cursors of their own)"
        ) from None


class LocalHandle(Handle):
    """Work in this process: a cell or a task. Its value and its exception stay here."""

    kind = ""

    def __init__(self, id: str, cell: Cell, generation: str, limit: int) -> None:
        self.id = id
        self.created_at = time.time()
        self.started_at = 0.0
        self.finished_at = 0.0
        self.client_id = cell.client_id
        self.connection_id = cell.connection_id
        self.exec_id = cell.exec_id
        self.history_id = cell.exec_id
        self.generation = generation
        self.buffer = Buffer(limit)
        self._cell: Cell | None = cell
        self._final = ""  # the terminal state
        self._cancelling = False
        self._summary = ""
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return bool(self._final)

    def _state(self) -> str:
        if self._final:
            return self._final
        if self._cell is not None and self._cell.state == QUEUED:
            return QUEUED
        return CANCELLING if self._cancelling else RUNNING

    def status(self) -> dict[str, Any]:
        state = self._state()
        status: dict[str, Any] = {
            "id": self.id,
            "kind": self.kind,
            "status": state,
            "state": state,
            "created_at": self.created_at,
            "client_id": self.client_id,
            "connection_id": self.connection_id,
            "exec_id": self.exec_id,
            "generation": self.generation,
            "history_id": self.history_id,
            "truncated": self.buffer.truncated,
        }
        if self.started_at:
            status["started_at"] = self.started_at
        if self._final:
            status["finished_at"] = self.finished_at
        if self._summary:
            status["error"] = self._summary
        if self.buffer.evicted:
            text = "the output is no longer in memory; await ws.history.get(handle.id) has what was saved"
            status["warnings"] = [{"code": "output_expired", "text": text}]
        return status

    def output(self, cursor: int | None = None) -> Any:
        if cursor is None:
            return self.buffer.text()
        size = self.buffer.size
        start = whole("cursor", cursor, 0, 1 << 62)
        if start > size:
            raise InvalidCursor(f"cursor {cursor} is beyond the output, which has {size} characters")
        page = {
            "output": self.buffer.text(start),
            "cursor": self.buffer.size,
            "truncated": self.buffer.truncated,
        }
        warnings = self.status().get("warnings")
        if warnings:
            page["warnings"] = warnings
        return page

    def result(self) -> Any:
        if not self._final:
            raise NotReady(f"{self.kind} {self.id} is {self._state()}: `await` its handle, or ask later")
        if self._final == "succeeded":
            return self._value
        if self._final == "cancelled" or self._error is None:
            import asyncio

            raise asyncio.CancelledError(self._summary or f"{self.kind} {self.id} was cancelled")
        raise self._error

    async def _end(self) -> None:
        import asyncio

        if self._final:
            return
        cell = self._cell
        if cell is not None and cell.task is not None and cell.task is asyncio.current_task():
            raise RuntimeError(f"{self.kind} {self.id} cannot wait for its own end")
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        try:
            await future
        finally:
            if future in self._waiters:
                self._waiters.remove(future)

    def _finish(self, state: str, value: Any, error: BaseException | None, summary: str) -> None:
        """It is over. On the main thread."""
        self._final = state
        self._value = value
        self._error = error
        self._summary = summary
        self.finished_at = time.time()
        self._cell = None
        self.buffer.close()
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    async def cancel(self) -> bool:
        import asyncio

        cell = self._cell
        if self._final or cell is None:
            return False
        if cell.task is not None and cell.task is asyncio.current_task():
            raise RuntimeError(f"{self.kind} {self.id} cannot cancel itself: return, or raise an exception")
        self._cancelling = True
        self._stop(cell)
        try:
            await asyncio.wait_for(self._end(), CANCEL_WITHIN)
        except asyncio.TimeoutError:
            raise RPCError(
                f"{self.kind} {self.id} was told to stop and goes on",
                "timeout",
                "cancel",
                "it catches CancelledError; ask status() again, or interrupt it",
            ) from None
        return True

    def _stop(self, cell: Cell) -> None:
        if cell.task is not None:
            cell.task.cancel()

    async def _chunk(self, cursor: str | None, stream: str, limit: int, wait: float) -> Chunk:
        import asyncio

        start = self._position(cursor, stream)
        until = time.monotonic() + wait
        loop = asyncio.get_running_loop()
        while True:
            ended, size = self.done, self.buffer.size
            page = self.buffer.page(stream, start, limit)
            left = until - time.monotonic()
            if page.text or ended or left <= 0:
                return Chunk(page.text, None, self._cursor(stream, page.next), page.more, ended)
            changed = loop.create_future()

            def wake(changed: Any = changed) -> None:
                loop.call_soon_threadsafe(lambda: changed.done() or changed.set_result(None))

            self.buffer.on_change(size, wake)
            await asyncio.wait([changed], timeout=left)

    async def _skip(self, cursor: str | None, stream: str, chunks: list[Chunk], chars: int) -> str:
        return self._cursor(stream, self.buffer.skip(stream, self._position(cursor, stream), chars))

    def _cursor(self, stream: str, position: int) -> str:
        return encode_cursor(self.generation, self.id, stream, position)

    def _position(self, cursor: str | None, stream: str) -> int:
        if cursor is None:
            return 0
        fields = decode_cursor(cursor)
        if len(fields) != 4 or fields[:2] != [self.generation, self.id]:
            raise InvalidCursor(f"this cursor does not belong to {self.kind} {self.id}")
        if fields[2] != stream:
            raise InvalidCursor(
                f"this cursor belongs to {fields[2] or 'both streams'}, not to {stream or 'both streams'}"
            )
        position = int(fields[3])
        if position > self.buffer.size:
            raise InvalidCursor("this cursor is beyond the output")
        return position


class CellHandle(LocalHandle):
    """A submitted cell. Its result is the value of its last expression."""

    kind = "cell"

    def __init__(self, cell: Cell, generation: str, limit: int, dequeue: Callable[[Cell], bool]) -> None:
        super().__init__(cell.exec_id, cell, generation, limit)
        self._dequeue = dequeue

    def _stop(self, cell: Cell) -> None:
        if not self._dequeue(cell):
            cell.reason = cell.reason or "cancelled by another cell"
            super()._stop(cell)


class HistoricalHandle(Handle):
    """A Python task or cell of which only the record is left.

    It has the saved output and status; the Python value is gone with its kernel.
    """

    def __init__(self, calls: Calls, record: dict[str, Any]) -> None:
        self.id = str(record["id"])
        self._calls = calls
        self._record = record
        self._buffer = Buffer(1 << 62)
        self._params = {"id": record["history_id"], "cursor": 0, "max_bytes": MAX_BYTES}
        self._all = False  # the whole output was fetched

    def status(self) -> dict[str, Any]:
        hidden = ("output", "code", "cursor", "has_more", "output_truncated")
        status = {k: v for k, v in self._record.items() if k not in hidden}
        status["status"] = status.get("state", "lost")
        status["kind"] = "cell" if status.get("kind") == "execution" else status.get("kind")
        status["historical"] = True
        return status

    def _keep(self, page: dict[str, Any]) -> None:
        for event in page["output"]:
            if event.get("type") == "stream":
                self._buffer.put(event.get("stream", "stdout"), event.get("text", ""))
        self._params["cursor"] = page["cursor"]
        self._all = not page["has_more"]

    def output(self, cursor: int | None = None) -> Any:
        while not self._all:
            self._keep(self._calls.request_sync("history.output", self._params))
        if cursor is None:
            return self._buffer.text()
        start = whole("cursor", cursor, 0, self._buffer.size)
        return {
            "output": self._buffer.text(start),
            "cursor": self._buffer.size,
            "truncated": bool(self._record.get("truncated")),
        }

    def result(self) -> NoReturn:
        raise ResultUnavailable(
            f"{self.id} belongs to an earlier kernel or was forgotten: "
            "its output and status are saved, its value is not"
        )

    async def cancel(self) -> bool:
        return False

    async def _end(self) -> None:
        return

    async def _chunk(self, cursor: str | None, stream: str, limit: int, wait: float) -> Chunk:
        while not self._all:
            self._keep(await self._calls.request("history.output", self._params, True))
        page = self._buffer.page(stream, self._position(cursor, stream), limit)
        return Chunk(page.text, None, self._cursor(stream, page.next), page.more, True)

    async def _skip(self, cursor: str | None, stream: str, chunks: list[Chunk], chars: int) -> str:
        return self._cursor(stream, self._buffer.skip(stream, self._position(cursor, stream), chars))

    def _cursor(self, stream: str, position: int) -> str:
        return encode_cursor("saved", self._params["id"], stream, position)

    def _position(self, cursor: str | None, stream: str) -> int:
        if cursor is None:
            return 0
        fields = decode_cursor(cursor)
        if len(fields) != 4 or fields[:3] != ["saved", self._params["id"], stream]:
            raise InvalidCursor(f"this cursor does not belong to the saved output of {self.id}")
        return int(fields[3])
