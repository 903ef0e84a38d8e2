"""``ws``: the workspace as cells see it.

Thin on purpose: what is not Python is done by the manager and asked for with ``call``.
"""

from __future__ import annotations

from .calls import RPCError
from .cells import Cell, current

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, NoReturn, TypeVar

    from .calls import Calls
    from .fs import Files
    from .git import Git
    from .history import History
    from .locks import Locks
    from .messages import Messages
    from .modules import Modules
    from .packages import Packages
    from .registry import Registry
    from .shell import Shell
    from .skills import Skills
    from .tasks import Tasks

    T = TypeVar("T")


# Name -> the module that has it.
EXCEPTIONS = {
    "RPCError": "calls",
    "ShellError": "shell",
    "NotReady": "handles",
    "ResultUnavailable": "handles",
    "InvalidCursor": "handles",
}


class Client:
    """Who submitted the running cell. Child tasks and threads are its cell's."""

    @property
    def id(self) -> str:
        """The logical client id, "" outside of a cell."""
        cell = current.get()
        return cell.client_id if cell else ""

    @property
    def connection_id(self) -> str:
        """The connection over which the cell came, 32 hex digits."""
        cell = current.get()
        return cell.connection_id if cell else ""

    def __repr__(self) -> str:
        return f"<client {self.id or '(none)'}>"


class Workspace:
    """The API that every cell finds as ``ws``."""

    def __init__(self, workspace: str, root: str, calls: Calls, registry: Registry) -> None:
        self._workspace = workspace
        self._root = root
        self._calls = calls
        self._locals: dict[str, dict[str, Any]] = {}
        self.client = Client()
        self._registry = registry
        self._parts: dict[str, Any] = {}  # what was imported when first asked for

    @property
    def workspace(self) -> Path:
        """The workspace directory, wherever the process is now."""
        from pathlib import Path

        return Path(self._workspace)

    @property
    def root(self) -> Path:
        """``.mypr``, where the runtime keeps its files."""
        from pathlib import Path

        return Path(self._root)

    @property
    def local(self) -> dict[str, Any]:
        """The dictionary of the calling client. It lives as long as the kernel."""
        return self._locals.setdefault(self.client.id, {})

    @property
    def tasks(self) -> Tasks:
        """Detached work."""
        from .tasks import Tasks

        return self._part("tasks", Tasks, self._registry)

    @property
    def fs(self) -> Files:
        """Files and search."""
        from .fs import Files

        return self._part("fs", Files, self._calls)

    @property
    def git(self) -> Git:
        """The repository, read-only."""
        from .git import Git

        return self._part("git", Git, self._calls)

    @property
    def shell(self) -> Shell:
        """Commands and their handles."""
        from .shell import Shell

        return self._part("shell", Shell, self._calls, self._registry)

    @property
    def history(self) -> History:
        """Records and the log."""
        from .history import History

        return self._part("history", History, self._calls)

    @property
    def messages(self) -> Messages:
        """The inbox of the calling client."""
        from .messages import Messages

        return self._part("messages", Messages, self._calls)

    @property
    def locks(self) -> Locks:
        """Names that one task at a time may hold."""
        from .locks import Locks

        return self._part("locks", Locks)

    @property
    def skills(self) -> Skills:
        """Markdown for agents to read."""
        from .skills import Skills

        return self._part("skills", Skills, self._calls, self._root)

    @property
    def modules(self) -> Modules:
        """Python that outlives the session."""
        from .modules import Modules

        return self._part("modules", Modules, self._calls, self.shell, self._root)

    @property
    def packages(self) -> Packages:
        """Installation into the environment of this kernel."""
        from .packages import Packages

        return self._part("packages", Packages, self._calls, self._registry)

    def help(self, topic: str | None = None) -> str:
        """This API: an index, a topic ("shell") or a method ("shell.run")."""
        from .help import text

        return text(self, topic)

    def inspect(self) -> dict[str, Any]:
        """What is here: ``{"workspace", "generation", "client", "variables", "tasks", "skills"}``.

        ``variables`` maps the names that cells have defined to the names of their types.
        """
        return self._registry.inspect(self)

    def _part(self, name: str, make: type[T], *args: Any) -> T:
        part: T | None = self._parts.get(name)
        if part is None:
            self._parts[name] = part = make(*args)
        return part

    async def status(self, detail: bool = False) -> dict[str, Any]:
        """The manager's view: health, generation, connections, active and queued executions.

        ``detail`` adds a list of connections, and ``calls``: how often each method of ws was
        called, and p50, p99 and maximum in milliseconds of what the last 512 cost the manager.
        """
        result: dict[str, Any] = await self.call("status", {"detail": detail}, idempotent=True)
        return result

    async def reset(self, force: bool = False) -> NoReturn:
        """Replace the Python process: all memory of all clients is lost, files remain.

        Refused with RPCError ``active_work`` while other cells or jobs are active, unless
        ``force`` cancels them. Does not return: the cell's end tells how it went.
        """
        await self._leave("reset", {"force": force})

    async def restart(self, force: bool = False, keep_kernel: bool = False) -> None:
        """Replace the manager and, unless ``keep_kernel``, the Python process.

        Refused as reset is. Returns only with ``keep_kernel``, once a new manager is there;
        for everybody else the cell has ended by then, so let it be the last line of one.
        """
        try:
            await self._leave("restart", {"force": force, "keep_kernel": keep_kernel})
        except RPCError as e:
            # That the manager went away is what was asked for.
            if not keep_kernel or e.code != "outcome_unknown":
                raise

    async def call(self, method: str, params: dict[str, Any], idempotent: bool = False) -> Any:
        """Ask the manager by the method's name. For what has no function of its own here."""
        return await self._calls.request(method, params, idempotent)

    async def _leave(self, method: str, params: dict[str, Any]) -> NoReturn:
        import asyncio

        cell: Cell | None = current.get()
        if cell is None or cell.task is not asyncio.current_task():
            raise RPCError(
                f"ws.{method}() works only directly in a foreground cell, not in a task that one started",
                "invalid_request",
                method,
                f"submit a cell with `await ws.{method}()` of its own",
            )
        await self.call(method, params)
        await asyncio.get_running_loop().create_future()  # until the process is stopped
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        """The exceptions that its methods raise, for ``except ws.ShellError``."""
        module = EXCEPTIONS.get(name)
        if module is None:
            raise AttributeError(f"ws has no attribute {name!r}; ws.help() lists what it has")
        import importlib

        return getattr(importlib.import_module(f".{module}", __package__), name)

    def __repr__(self) -> str:
        return f"<workspace {self._workspace}>"
