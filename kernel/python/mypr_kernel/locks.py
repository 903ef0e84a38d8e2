"""``ws.locks``: names that one task at a time may hold.

They bind those who ask for them and nobody else: not the file system, not other programs.
"""

from __future__ import annotations

import time

from .cells import current

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    from builtins import list as List
    from types import TracebackType
    from typing import Any

MAX_NAME = 256
MAX_WAITERS = 128  # in a list


class _Request:
    """Names that a task holds or waits for."""

    __slots__ = ("at", "client_id", "connection_id", "exec_id", "future", "names", "task")

    def __init__(self, names: tuple[str, ...], task: asyncio.Task[Any]) -> None:
        cell = current.get()
        self.names = names
        self.task = task
        self.at = time.time()
        self.client_id = cell.client_id if cell else ""
        self.connection_id = cell.connection_id if cell else ""
        self.exec_id = cell.exec_id if cell else ""
        self.future: asyncio.Future[None] | None = None

    def described(self) -> dict[str, Any]:
        return {
            "client_id": self.client_id,
            "connection_id": self.connection_id,
            "exec_id": self.exec_id,
            "task": self.task.get_name(),
            "since": self.at,
            "names": list(self.names),
        }


class Locks:
    """Cooperative locks between tasks of all clients."""

    def __init__(self) -> None:
        self._held: dict[str, _Request] = {}
        self._owners: dict[Any, _Request] = {}  # task -> what it holds
        self._waiting: list[_Request] = []  # first come, first served

    def acquire(self, *names: str, timeout: float | None = None) -> Acquired:
        """Hold all of the names, or none: ``async with ws.locks.acquire("file:report"):``.

        Waits until all are free, in the order of those who ask; at most ``timeout``
        seconds, then TimeoutError. They belong to the running task and are released at the
        end of the block, or with the task. A task that holds locks cannot acquire more:
        RuntimeError, because two such tasks could wait for each other for ever.
        """
        if not names:
            raise ValueError("acquire() takes the names of the locks")
        wanted = {_normal(name) for name in names}
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
                raise TypeError(f"timeout is a number of seconds, not {type(timeout).__name__}")
            if not timeout >= 0:
                raise ValueError(f"timeout is a number of seconds, not {timeout}")
        return Acquired(self, tuple(sorted(wanted)), timeout)

    def list(self) -> List[dict[str, Any]]:
        """Every name that is held or waited for: ``{"name", "owner", "waiters"}``.

        An owner or waiter is described by client_id, connection_id, exec_id, task, since
        (Unix seconds) and the names it asked for together; at most 128 waiters are shown.
        """
        rows: dict[str, dict[str, Any]] = {}
        for name, request in self._held.items():
            rows[name] = {"name": name, "owner": request.described(), "waiters": []}
        for request in self._waiting[:MAX_WAITERS]:
            for name in request.names:
                row = rows.setdefault(name, {"name": name, "owner": None, "waiters": []})
                row["waiters"].append(request.described())
        return [rows[name] for name in sorted(rows)]

    # -- inside ----------------------------------------------------------------

    async def _acquire(self, names: tuple[str, ...], timeout: float | None) -> None:
        import asyncio

        task = asyncio.current_task()
        assert task is not None
        held = self._owners.get(task)
        if held is not None:
            raise RuntimeError(
                f"this task holds {', '.join(map(repr, held.names))}: "
                "acquire all locks that are needed together at once"
            )
        request = _Request(names, task)
        if not self._free(request, self._waiting):
            request.future = asyncio.get_running_loop().create_future()
            self._waiting.append(request)
            try:
                await asyncio.wait_for(asyncio.shield(request.future), timeout)
            except BaseException as e:
                if request in self._waiting:
                    self._waiting.remove(request)
                else:
                    self._drop(request)  # granted in the same moment
                self._grant()
                if isinstance(e, asyncio.TimeoutError):
                    owners = {self._held[n].client_id or "nobody" for n in names if n in self._held}
                    raise TimeoutError(
                        f"{', '.join(map(repr, names))} not acquired within {timeout:g} s; "
                        f"held by {', '.join(sorted(owners)) or 'nobody any more'}"
                    ) from None
                raise
        else:
            self._take(request)
        task.add_done_callback(self._task_done)

    def _free(self, request: _Request, before: List[_Request]) -> bool:
        """Whether nobody holds any of the names, nor asked for one earlier."""
        if any(name in self._held for name in request.names):
            return False
        return not any(name in other.names for other in before for name in request.names)

    def _take(self, request: _Request) -> None:
        request.at = time.time()
        self._owners[request.task] = request
        for name in request.names:
            self._held[name] = request

    def _drop(self, request: _Request) -> None:
        if self._owners.get(request.task) is request:
            del self._owners[request.task]
            for name in request.names:
                del self._held[name]

    def _release(self, task: Any) -> None:
        request = self._owners.get(task)
        if request is not None:
            self._drop(request)
            self._grant()

    def _task_done(self, task: Any) -> None:
        self._release(task)

    def _grant(self) -> None:
        """Give the names that are free to those who wait."""
        kept: list[_Request] = []
        for request in self._waiting:
            future = request.future
            if future is not None and not future.done() and self._free(request, kept):
                self._take(request)
                future.set_result(None)
            else:
                kept.append(request)
        self._waiting = kept


class Acquired:
    """What ``acquire`` returns: the locks are held inside of ``async with``."""

    def __init__(self, locks: Locks, names: tuple[str, ...], timeout: float | None) -> None:
        self._locks = locks
        self._timeout = timeout
        self._task: Any = None
        self.names = names

    def __await__(self) -> Any:
        raise TypeError("locks are held for a block: async with ws.locks.acquire(...):")

    async def __aenter__(self) -> Acquired:
        import asyncio

        await self._locks._acquire(self.names, self._timeout)
        self._task = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.remove_done_callback(self._locks._task_done)
            self._locks._release(self._task)
            self._task = None


def _normal(name: Any) -> str:
    """Names that look the same are the same: NFC, and no blanks around."""
    import unicodedata

    if not isinstance(name, str):
        raise TypeError(f"the name of a lock is text, not {type(name).__name__}")
    normal = unicodedata.normalize("NFC", name).strip()
    if not normal or len(normal) > MAX_NAME:
        raise ValueError(f"the name of a lock has 1 to {MAX_NAME} characters, not {len(normal)}")
    return normal
