"""The handles of this kernel: of cells, of tasks and of jobs.

A task that ``start`` makes is a ``Task`` cell: what it prints goes to its own handle and,
unless it is hidden, to the manager, as the output of a cell does.
"""

from __future__ import annotations

import time
from collections import deque

from . import errors
from .calls import RPCError
from .cells import QUEUED, RUNNING, Cell, current
from .handles import CellHandle, Handle, LocalHandle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from builtins import list as List
    from collections.abc import Awaitable
    from typing import Any

    from .calls import Calls
    from .kernel import Kernel
    from .shell import Job
    from .workspace import Workspace

DEFAULT_COMPLETED = 128
CACHE_BYTES = 16 << 20  # output of completed cells and tasks that stays in memory
MAX_ID = 256
MAX_JOBS = 1024  # handles of jobs kept here, beside all that run


class Task(Cell):
    """Who prints in a task. It runs from its birth on."""

    __slots__ = ("hidden",)

    detached = True

    def __init__(self, exec_id: str, parent: Cell | None, hidden: bool) -> None:
        client, connection = (parent.client_id, parent.connection_id) if parent is not None else ("", "")
        super().__init__(exec_id, "", client, connection)
        self.hidden = hidden
        self.state = RUNNING


class TaskHandle(LocalHandle):
    """Work that ``ws.tasks.start`` detached. Its result is the awaitable's."""

    kind = "python"

    def __init__(self, id: str, task: Task, parent: Cell | None, generation: str, limit: int) -> None:
        super().__init__(id, task, generation, limit)
        self.exec_id = parent.exec_id if parent is not None else ""
        self.started_at = self.created_at
        self.visible = not task.hidden

    def _stop(self, cell: Cell) -> None:
        cell.reason = "it was cancelled through its handle"
        super()._stop(cell)


class Registry:
    """Every handle of this kernel. ``Tasks`` is what cells see of it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.calls: Calls = kernel.calls
        self._generation: str = kernel.settings.generation
        self._handles: dict[str, Handle] = {}
        self._custom: set[str] = set()  # ids that callers chose, for the life of this kernel
        self._next = 0
        self._completed: deque[Handle] = deque()  # oldest first
        self._cached = 0  # bytes of output in them
        self._jobs: dict[str, Job] = {}

    # -- what ws.tasks calls ------------------------------------------------------

    def start(self, awaitable: Awaitable[Any], task_id: str | None, visible: bool) -> TaskHandle:
        """See ``Tasks.start``."""
        try:
            handle, task = self._begin(awaitable, task_id, visible)
        except BaseException:
            _close(awaitable)  # a coroutine that will never be awaited
            raise
        import asyncio
        from contextvars import copy_context

        context = copy_context()
        context.run(current.set, task)
        coroutine = self._run(handle, task, awaitable)
        loop = asyncio.get_running_loop()
        task.task = context.run(loop.create_task, coroutine, name=f"task {handle.id}")
        task.task.add_done_callback(lambda _: self._never_began(handle, task, awaitable))
        return handle

    def _begin(
        self, awaitable: Awaitable[Any], task_id: str | None, visible: bool
    ) -> tuple[TaskHandle, Task]:
        self._check_start(awaitable, task_id)
        ident = task_id if task_id is not None else f"task-{self._generation}-{self._next + 1}"
        parent = current.get()
        task = Task(f"python:{self._generation}:{ident}", parent, not visible)
        handle = TaskHandle(ident, task, parent, self._generation, self._kernel.outbox.output_bytes)
        if isinstance(parent, Task):
            above = self._by_history(parent.exec_id)
            handle.exec_id = above.exec_id if above is not None else ""
        if visible:
            fields = {
                "id": ident,
                "client_id": task.client_id,
                "connection_id": task.connection_id,
                "exec_id": handle.exec_id,
            }
            refused = self._kernel.outbox.task(task, fields)
            if refused:
                hint = "nothing new is started until that is over"
                raise RPCError(f"no task is started: {refused}", "conflict", "tasks.start", hint)
        if task_id is None:
            self._next += 1
        else:
            self._custom.add(task_id)
        task.sink = handle.buffer
        self._handles[ident] = handle
        return handle, task

    def statuses(self) -> List[dict[str, Any]]:
        """Of every visible handle, oldest first."""
        statuses = [h.status() for h in self._handles.values() if listed(h)]
        statuses += [job._known() for job in self.fetch_jobs({})]
        statuses.sort(key=lambda s: s.get("created_at", 0.0))
        return statuses

    def active(self) -> List[Handle]:
        """What has not ended, oldest first."""
        handles: list[tuple[float, Handle]] = [
            (h.created_at, h)
            for h in self._handles.values()
            if isinstance(h, LocalHandle) and not h.done and listed(h)
        ]
        handles += [(job.created_at, job) for job in self.fetch_jobs({"active": True})]
        handles.sort(key=lambda pair: pair[0])
        return [h for _, h in handles]

    # -- what the kernel calls -------------------------------------------------

    def submitted(self, cell: Cell) -> None:
        """A cell came."""
        handle = CellHandle(cell, self._generation, self._kernel.outbox.output_bytes, self._dequeue)
        cell.sink = handle.buffer
        self._handles[cell.exec_id] = handle

    def began(self, cell: Cell) -> None:
        """It runs."""
        handle = self._handles.get(cell.exec_id)
        if isinstance(handle, LocalHandle):
            handle.started_at = time.time()

    def ended(self, cell: Cell, fields: dict[str, Any], value: Any, error: BaseException | None) -> None:
        """A cell ended, with the fields of its terminal event."""
        handle = self._handles.get(cell.exec_id)
        if isinstance(handle, LocalHandle) and not handle.done:
            if error is not None:
                # Its stack has the cell's output already, and would keep every local
                # variable in it alive.
                error = error.with_traceback(None)
            handle._finish(fields["state"], value, error, fields.get("error", ""))
            self._complete(handle)

    def _dequeue(self, cell: Cell) -> bool:
        """Cancel a cell that has not begun; False if it has."""
        outbox = self._kernel.outbox
        with outbox.lock:
            queued = cell.state == QUEUED
            if queued:
                cell.state = "cancelled"
        if queued:
            message = "cancelled by another cell before it began"
            info = {"code": "cancelled", "message": message}
            fields = {"state": "cancelled", "error": f"CancelledError: {message}", "error_info": info}
            outbox.state(cell, {"event": "state", **fields}, True)
            self.ended(cell, fields, None, None)
        return queued

    def dequeued(self, cell: Cell) -> None:
        """A cell was taken out of the queue by an interrupt."""
        handle = self._handles.get(cell.exec_id)
        if isinstance(handle, LocalHandle) and not handle.done:
            error = "CancelledError: interrupted on request before it began"
            self.ended(cell, {"state": "cancelled", "error": error}, None, None)

    def left(self) -> List[Task]:
        """Visible tasks that have not ended, for the last words about them."""
        return [h._cell for h in self.live() if isinstance(h._cell, Task)]

    def live(self) -> List[LocalHandle]:
        """Visible tasks that have not ended."""
        return [h for h in self._handles.values() if isinstance(h, TaskHandle) and h.visible and not h.done]

    def tasks_run(self) -> bool:
        """Whether any task, visible or not, has not ended."""
        return any(isinstance(h, TaskHandle) and not h.done for h in self._handles.values())

    def leave(self) -> List[Any]:
        """Cancel every task, because the process ends; the asyncio tasks to wait for."""
        tasks = []
        for handle in self._handles.values():
            cell = handle._cell if isinstance(handle, TaskHandle) else None
            if cell is not None and cell.task is not None:
                cell.reason = "the kernel was told to stop"
                cell.task.cancel()
                tasks.append(cell.task)
        return tasks

    def inspect(self, ws: Workspace) -> dict[str, Any]:
        hidden = {"ws", "workspace", "display", "get_ipython", "In", "Out", "exit", "quit"}
        variables = {
            name: errors.type_name_of(type(value))
            for name, value in list(self._kernel.namespace.items())
            if not name.startswith("_") and name not in hidden
        }
        return {
            "workspace": str(ws.workspace),
            "generation": self._generation,
            "client": {"id": ws.client.id, "connection_id": ws.client.connection_id},
            "variables": variables,
            "tasks": [
                {key: status[key] for key in ("id", "kind", "status", "client_id")}
                for status in self.statuses()
            ],
            "skills": ws.skills.list(),
        }

    # -- inside ----------------------------------------------------------------

    def _check_start(self, awaitable: Any, task_id: Any) -> None:
        import inspect

        if not inspect.isawaitable(awaitable):
            hint = ": call it, start(work())" if inspect.iscoroutinefunction(awaitable) else ""
            raise TypeError(f"ws.tasks.start takes an awaitable, not {type(awaitable).__name__}{hint}")
        if task_id is None:
            return
        if not isinstance(task_id, str):
            raise TypeError(f"task_id must be text, not {type(task_id).__name__}")
        if not task_id or len(task_id) > MAX_ID or not task_id.isprintable():
            raise ValueError(f"a task id has 1 to {MAX_ID} printable characters, not {task_id[:40]!r}")
        if reserved(task_id):
            raise ValueError(
                f"{task_id!r} has the form of a generated id (32 hexadecimal digits, task-…-<number>, "
                "python:<generation>:…, remote-watch:…): choose another name"
            )
        if task_id in self._custom:
            raise ValueError(
                f"the task id {task_id!r} was used in this kernel already; ids are free again after a reset"
            )

    async def _run(self, handle: TaskHandle, task: Task, awaitable: Awaitable[Any]) -> None:
        """The life of a task. Raises nothing: the handle has the outcome."""
        import asyncio

        value: Any = None
        error: BaseException | None = None
        state = "succeeded"
        fields: dict[str, Any] = {}
        try:
            value = await awaitable
        except asyncio.CancelledError as e:
            state = "cancelled"
            reason = task.reason or str(e) or "it was cancelled"
            fields = {
                "error": f"CancelledError: {reason}",
                "error_info": {"code": "cancelled", "type": "CancelledError", "message": reason},
            }
        except BaseException as e:
            if isinstance(e, GeneratorExit):
                raise
            state, error = "failed", e
            fields = errors.summary(e)
            if not task.hidden:
                text = errors.traceback_text(e)
                self._kernel.outbox.event(task, {"event": "error", "text": text}, len(text))
        self._conclude(handle, task, {"state": state, **fields}, value, error)

    def _never_began(self, handle: TaskHandle, task: Task, awaitable: Any) -> None:
        """It was cancelled before its first step, so ``_run`` never was."""
        if handle.done:
            return
        _close(awaitable)
        summary = f"CancelledError: {task.reason or 'it was cancelled'} before it began"
        info = {"code": "cancelled", "type": "CancelledError", "message": summary}
        self._conclude(handle, task, {"state": "cancelled", "error": summary, "error_info": info}, None, None)

    def _conclude(
        self, handle: TaskHandle, task: Task, fields: dict[str, Any], value: Any, error: BaseException | None
    ) -> None:
        task.state = fields["state"]
        if not task.hidden:
            self._kernel.outbox.state(task, {"event": "state", **fields}, True)
        task.ended = True
        handle._finish(fields["state"], value, error, fields.get("error", ""))
        task.release()
        self._complete(handle)

    def _complete(self, handle: LocalHandle) -> None:
        self._completed.append(handle)
        self._cached += handle.buffer.used
        self._trim()

    def _trim(self) -> None:
        limit: int = self._kernel.link.limits.get("completed_tasks") or DEFAULT_COMPLETED
        while len(self._completed) > limit:
            old = self._completed.popleft()
            self._handles.pop(old.id, None)
            if isinstance(old, LocalHandle):
                self._cached -= old.buffer.used
        newest = self._completed[-1]
        for old in self._completed:
            if old is newest or self._cached <= CACHE_BYTES:
                break
            if isinstance(old, LocalHandle) and not old.buffer.evicted and old.buffer.used:
                self._cached -= old.buffer.used
                old.buffer.used = 0
                old.buffer.evict()

    def find(self, task_id: str) -> Handle | None:
        if not isinstance(task_id, str):
            raise TypeError(f"a task id is text, not {type(task_id).__name__}")
        return self._handles.get(task_id) or self._by_history(task_id) or self._jobs.get(task_id)

    def _by_history(self, history_id: str) -> LocalHandle | None:
        prefix = f"python:{self._generation}:"
        if history_id.startswith(prefix):
            handle = self._handles.get(history_id[len(prefix) :])
            if isinstance(handle, TaskHandle):
                return handle
        return None

    def fetch_jobs(self, params: dict[str, Any]) -> List[Job]:
        """Handles of the manager's jobs, with their present status."""
        found = self.calls.request_sync("jobs.list", {"memory": True, **params})
        jobs = [self.job(status) for status in found["jobs"]]
        if not params:
            kept = {job.id for job in jobs}
            self._jobs = {id: job for id, job in self._jobs.items() if id in kept}
        return jobs

    def job(self, status: dict[str, Any]) -> Job:
        """The handle of a job: always the same object as long as it is kept."""
        job = self._jobs.get(status["id"])
        if job is None:
            if status["kind"] == "package":
                from .packages import PackageJob

                job = PackageJob(self.calls, status)
            else:
                from .shell import Job

                job = Job(self.calls, status)
            self._jobs[job.id] = job
            while len(self._jobs) > MAX_JOBS:
                old = next((j for j in self._jobs.values() if j.done), None)
                if old is None:
                    break
                del self._jobs[old.id]
        else:
            job._know(status)
        return job


def _close(awaitable: Any) -> None:
    close = getattr(awaitable, "close", None)
    if close is not None:
        close()


def listed(handle: Handle) -> bool:
    """Whether a handle is anybody's business."""
    return not isinstance(handle, TaskHandle) or handle.visible


def reserved(task_id: str) -> bool:
    """Whether an id has a form that only generated ids have."""
    if is_hex(task_id) or task_id.startswith("remote-watch:"):
        return True
    if task_id.startswith("task-"):
        middle, dash, number = task_id[5:].rpartition("-")
        if dash and middle and number.isdecimal():
            return True
    if task_id.startswith("python:"):
        generation, colon, _ = task_id[7:].partition(":")
        return bool(colon) and bool(generation) and all(c in "0123456789abcdef" for c in generation)
    return False


def is_hex(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 32 and all(c in "0123456789abcdef" for c in text)
