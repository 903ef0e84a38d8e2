"""``ws.tasks``: detached work."""

from __future__ import annotations

from .handles import Handle, HistoricalHandle
from .registry import is_hex

TYPE_CHECKING = False
if TYPE_CHECKING:
    from builtins import list as List
    from collections.abc import Awaitable
    from typing import Any

    from .registry import Registry, TaskHandle


class Tasks:
    """Detached work: start it, find it, look at what came of it.

    Handles of all clients are here: cells, tasks of ``start`` and jobs of ``ws.shell`` and
    ``ws.packages``, under one kind of id.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def start(
        self, awaitable: Awaitable[Any], *, task_id: str | None = None, visible: bool = True
    ) -> TaskHandle:
        """Let an awaitable run on by itself, beside the cells; returns its handle at once.

        What it prints is kept on the handle. It must await: code that blocks or computes
        for long stops every cell, and belongs into a process (``ws.shell.start``).
        ``task_id``: a name of your own, unused in this kernel; ValueError otherwise.
        ``visible=False`` leaves it out of ``list``, of history and of what ``ws.reset()``
        refuses to interrupt.
        """
        return self._registry.start(awaitable, task_id, visible)

    def list(self, client_id: str | None = None) -> List[dict[str, Any]]:
        """The status of every visible handle that this kernel keeps, oldest first.

        ``client_id`` leaves only those that this client started. Completed ones are kept
        up to the limit ``completed_tasks``; ``attach`` and ``ws.history`` know older ones.
        """
        statuses = self._registry.statuses()
        return [s for s in statuses if client_id is None or s["client_id"] == client_id]

    def active(self) -> List[Handle]:
        """The handles of what has not ended, oldest first. The calling cell is one of them."""
        return self._registry.active()

    def get(self, task_id: str) -> Handle:
        """The handle with this id, whoever started it; KeyError if this kernel has none."""
        handle = self._registry.find(task_id)
        if handle is not None:
            return handle
        if is_hex(task_id):
            for job in self._registry.fetch_jobs({"ids": [task_id]}):
                return job
        raise KeyError(
            f"there is no task {task_id!r} in this kernel; `await ws.tasks.attach(id)` also finds saved ones"
        )

    async def attach(self, task_id: str) -> Handle:
        """The handle of work that may have begun in an earlier kernel or manager.

        ``task_id`` is an id or a history id. A live handle is returned as it is; a shell
        or package job is connected to again; of Python tasks and cells of earlier kernels
        the saved status and output are there, and ``result()`` raises ResultUnavailable.
        Raises LookupError when nothing is known of it.
        """
        handle = self._registry.find(task_id)
        if handle is not None:
            return handle
        calls = self._registry.calls
        record: dict[str, Any] = await calls.request("history.get", {"id": task_id}, True)
        if record.get("kind") in ("shell", "package"):
            return self._registry.job(await calls.request("shell.status", {"id": task_id}, True))
        return HistoricalHandle(calls, record)
