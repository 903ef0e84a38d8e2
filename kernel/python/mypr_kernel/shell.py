"""``ws.shell``: commands. The manager runs them; here are their handles."""

from __future__ import annotations

import os

from .calls import RPCError
from .handles import Chunk, Handle, InvalidCursor, NotReady, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from .calls import Calls
    from .registry import Registry

    Command = str | Sequence[str | os.PathLike[str]]

TERMINAL = ("succeeded", "failed", "cancelled", "lost")


class ShellError(RPCError):
    """A command of ``run(check=True)`` did not succeed. ``result`` is what run would have returned."""

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        super().__init__(message, "shell_failed", "shell.run")
        self.result = result


class Job(Handle):
    """A shell command or package installation: a handle of a process that the supervisor holds.

    It goes on whatever becomes of this kernel.
    """

    def __init__(self, calls: Calls, status: dict[str, Any]) -> None:
        self.id: str = status["id"]
        self.created_at: float = status["created_at"]
        self._calls = calls
        self._status = status
        self._text: list[str] = []  # combined output, as far as output() was asked for it
        self._chars = 0
        self._offset = 0

    @property
    def done(self) -> bool:
        """Whether it was over when it was last asked for."""
        return self._status["state"] in TERMINAL

    def _know(self, status: dict[str, Any]) -> None:
        if not self.done:
            self._status = status

    def _state(self) -> str:
        state: str = self._status["state"]
        return state

    def status(self) -> dict[str, Any]:
        """What is known of it now, asked of the manager.

        Beside the keys that every handle has: state, command, cwd, pid, returncode (None
        while it runs, negative for a signal), cause ("exit", "signal", "oom", "timeout",
        "cancelled", "start", "unknown"), signal ("SIGSEGV"), timed_out, output_bytes,
        truncated, memory_peak (bytes) and cpu_seconds where the machine tells, and for a
        terminal pty, rows, cols.
        """
        if not self.done:
            self._know(self._calls.request_sync("shell.status", {"id": self.id}))
        return self._known()

    def _known(self) -> dict[str, Any]:
        """The status as it was last heard."""
        status = dict(self._status)
        status["status"] = status["state"]
        status["history_id"] = self.id
        return status

    def output(self, cursor: int | None = None) -> Any:
        more = True
        while more:
            page = self._calls.request_sync(
                "shell.output", {"id": self.id, "offset": self._offset, "max_bytes": 1 << 20}
            )
            self._know(page["status"])
            self._offset, more = page["offset"], page["more"]
            if page["output"]:
                self._text.append(page["output"])
                self._chars += len(page["output"])
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        text = self._text[0] if self._text else ""
        if cursor is None:
            return text
        start = whole("cursor", cursor, 0, 1 << 62)
        if start > len(text):
            raise InvalidCursor(f"cursor {cursor} is beyond the output, which has {len(text)} characters")
        result = {"output": text[start:], "cursor": len(text), "truncated": page["status"]["truncated"]}
        if page["status"].get("warnings"):
            result["warnings"] = page["status"]["warnings"]
        return result

    def result(self) -> dict[str, Any]:
        """``{"returncode": 0}``; RPCError if it failed, with its status in ``details``."""
        status = self.status()
        state = status["state"]
        if state not in TERMINAL:
            raise NotReady(f"job {self.id} is {state}: `await` its handle, or ask later")
        if state == "succeeded":
            return {"returncode": status["returncode"]}
        if state == "cancelled":
            import asyncio

            raise asyncio.CancelledError(status.get("error") or f"job {self.id} was cancelled")
        raise RPCError(
            f"job {self.id} {state}: {status.get('error', '')}",
            "shell_failed" if status["kind"] == "shell" else "package_failed",
            f"{status['kind']}.result",
            status.get("hint", "") or "its output() has what it printed",
            status,
        )

    async def cancel(self) -> bool:
        """Stop it, SIGTERM and after 2 s SIGKILL to every process of it, and wait until none
        is left. False if it was over before."""
        answer = await self._calls.request("shell.cancel", {"id": self.id}, True)
        return bool(answer["cancelled"])

    async def write(self, text: str = "", eof: bool = False) -> dict[str, Any]:
        """Give it text on standard input or its terminal; ``{"id", "bytes", "closed"}``.

        Needs ``stdin=True`` or ``pty=True``. ``eof`` then closes standard input, or sends
        the terminal's end-of-file character. Waits while it does not read.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be str, not {type(text).__name__}")
        answer: dict[str, Any] = {}
        written = 0
        pieces = [text[at : at + (1 << 20)] for at in range(0, len(text), 1 << 20)] or [""]
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            params = {"id": self.id, "text": piece, "eof": eof and last}
            answer = await self._calls.request("shell.write", params)
            written += answer["bytes"]
        answer["bytes"] = written
        return answer

    async def resize(self, rows: int, cols: int) -> dict[str, Any]:
        """Set the size of its terminal; ``{"id", "rows", "cols"}``."""
        params = {"id": self.id, "rows": whole("rows", rows, 1, 65535), "cols": whole("cols", cols, 1, 65535)}
        answer: dict[str, Any] = await self._calls.request("shell.resize", params, True)
        return answer

    async def _end(self) -> None:
        if not self.done:
            self._know(await self._calls.request("shell.wait", {"id": self.id}, True))

    async def _chunk(self, cursor: str | None, stream: str, limit: int, wait: float) -> Chunk:
        from binascii import a2b_base64

        params = {
            "id": self.id,
            "cursor": cursor,
            "stream": stream,
            "max_bytes": limit,
            "wait_ms": int(wait * 1000),
            "raw": True,
            "direct": True,
        }
        page = await self._calls.request("shell.read", params, True)
        raw = _direct(page)
        if raw is None:  # somebody has moved the file
            params["direct"] = False
            page = await self._calls.request("shell.read", params, True)
            raw = b""
        status = {**self._status, "state": page["state"], "truncated": page["truncated"]}
        for key in ("warnings", "error"):
            if page.get(key):
                status[key] = page[key]
        if not self.done and page["state"] not in TERMINAL:
            self._status = status
        ended = page["state"] in TERMINAL
        if ended and not self.done:
            self._know(await self._calls.request("shell.status", {"id": self.id}, True))
        if raw:
            return Chunk(raw.decode(), raw, page["cursor"], page["has_more"], ended)
        data = page.get("data")
        raw = a2b_base64(data) if data else page["output"].encode()
        return Chunk(page["output"], raw, page["cursor"], page["has_more"], ended)

    def _heard(self) -> dict[str, Any]:
        return self._known()  # the page has said it

    async def _skip(self, cursor: str | None, stream: str, chunks: list[Chunk], chars: int) -> str:
        text = "".join(c.text for c in chunks)
        data = b"".join(c.data or b"" for c in chunks)
        params = {"id": self.id, "cursor": cursor, "stream": stream, "bytes": _bytes_of(text, data, chars)}
        answer = await self._calls.request("shell.skip", params, True)
        moved: str = answer["cursor"]
        return moved


def _direct(page: dict[str, Any]) -> bytes | None:
    """The bytes of a page that are in a file, b"" for one that has its output with it, None
    when they cannot be read."""
    path = page.get("file")
    if path is None:
        return b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = [os.pread(fd, size, at) for at, size in page["pieces"]]
        finally:
            os.close(fd)
    except OSError:
        return None
    raw = b"".join(parts)
    return raw if len(raw) == sum(size for _, size in page["pieces"]) else None


def _bytes_of(text: str, data: bytes, chars: int) -> int:
    """How many bytes the first characters are, where bad bytes count as one character each."""
    head = text[:chars].encode()
    if data.startswith(head):
        return len(head)
    at = 0
    for _ in range(chars):
        for size in (1, 2, 3, 4):
            try:
                data[at : at + size].decode()
            except UnicodeDecodeError:
                continue
            break
        else:
            size = 1
        at += size
    return at


class Shell:
    """Commands, each with its processes in a container of its own (a cgroup)."""

    def __init__(self, calls: Calls, registry: Registry) -> None:
        self._calls = calls
        self._registry = registry

    async def run(
        self,
        command: Command,
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        inherit_env: bool = False,
        input: str | None = None,
        timeout: float | None = None,
        check: bool = False,
        max_bytes: int = 32768,
        pty: bool = False,
        rows: int = 24,
        cols: int = 80,
        limits: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run a command and wait for its end.

        ``command``: text for /bin/sh, or a list of words. ``env`` replaces the kernel's
        environment, with ``inherit_env=True`` it is laid over it (None removes a name).
        ``input`` is its whole standard input, else that is empty. ``timeout`` (seconds)
        stops it, as cancelling the calling cell does. ``limits``: {"memory": "2G",
        "cpu": 1.5, "pids": 200, "time": 600}.

        Returns id, state, returncode, stdout and stderr (``max_bytes`` together, stdout
        first), timed_out, truncated; where there is something to say signal, error, hint,
        warnings; memory_peak (bytes) and cpu_seconds where the machine tells. A returncode
        other than 0 is returned; with ``check`` it raises ShellError, which has ``result``.
        ``ws.tasks.get(result["id"]).output()`` has all output that was kept (16 MiB).
        Raises RPCError (LookupError for a program or directory that is not there) when it
        cannot be started.
        """
        params = _params(command, cwd, env, inherit_env, input, pty, rows, cols, limits)
        params["max_bytes"] = whole("max_bytes", max_bytes, 1, 1 << 20)
        if timeout is not None:
            params["timeout"] = _seconds("timeout", timeout)
        try:
            result: dict[str, Any] = await _request(self._calls, "shell.run", params)
        except BaseException as e:
            if not isinstance(e, RPCError):
                await self._abandon(params["id"])
            raise
        result = {key: result[key] for key in _RESULT if key in result}
        result.setdefault("timed_out", False)
        if check and result["state"] != "succeeded":
            raise ShellError(f"{_title(command)}: {result.get('error') or result['state']}", result)
        return result

    async def _abandon(self, id: str) -> None:
        """The caller was cancelled: so is the command, before the cell goes on."""
        import asyncio

        stop = asyncio.ensure_future(self._calls.request("shell.cancel", {"id": id, "early": True}, True))
        try:
            await asyncio.shield(stop)
        except RPCError:
            pass  # it is over, or never began
        except asyncio.CancelledError:
            stop.add_done_callback(lambda t: t.cancelled() or t.exception())

    async def start(
        self,
        command: Command,
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        inherit_env: bool = False,
        input: str | None = None,
        stdin: bool = False,
        pty: bool = False,
        rows: int = 24,
        cols: int = 80,
        limits: Mapping[str, Any] | None = None,
    ) -> Job:
        """Start a command and return its handle; parameters as for ``run``.

        Standard input is empty unless ``input`` is given, or ``stdin=True`` keeps a pipe
        open for ``await job.write(text)``. ``pty=True`` gives it a terminal of rows x cols,
        with stdout and stderr in one.
        """
        params = _params(command, cwd, env, inherit_env, input, pty, rows, cols, limits)
        params["stdin"] = bool(stdin)
        return self._registry.job(await _request(self._calls, "shell.start", params))


# What run() returns: what the caller cannot know. The rest is in the job's status.
_RESULT = (
    "id",
    "state",
    "returncode",
    "stdout",
    "stderr",
    "timed_out",
    "truncated",
    "signal",
    "error",
    "hint",
    "warnings",
    "memory_peak",
    "cpu_seconds",
)


def _params(
    command: Any,
    cwd: Any,
    env: Any,
    inherit_env: bool,
    input: Any,
    pty: bool,
    rows: int,
    cols: int,
    limits: Any,
) -> dict[str, Any]:
    if isinstance(command, (bytes, bytearray)) or not isinstance(command, (str, list, tuple)):
        raise TypeError(f"a command is text for /bin/sh or a list of words, not {type(command).__name__}")
    if not isinstance(command, str):
        command = [_text(word, "a word of the command") for word in command]
    params: dict[str, Any] = {
        # Of our making, so that a request that has to be sent again starts nothing twice.
        "id": os.urandom(16).hex(),
        "command": command,
        "cwd": os.path.abspath(_text(cwd, "cwd")) if cwd is not None else _cwd(),
    }
    if env is None:
        params["own_env"] = _own.param()
    else:
        params["env"] = _environment(env, inherit_env)
    if input is not None:
        if not isinstance(input, str):
            raise TypeError(f"input is text, not {type(input).__name__}")
        params["input"] = input
    if pty:
        params["pty"] = True
        params["rows"] = whole("rows", rows, 1, 65535)
        params["cols"] = whole("cols", cols, 1, 65535)
    if limits is not None:
        params["limits"] = dict(limits)
    return params


def _text(value: Any, what: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{what} is text or a path, not {type(value).__name__}") from None


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        hint = "pass cwd=, or os.chdir()"
        raise RPCError(
            "the kernel's current directory was deleted", "not_found", "shell.start", hint
        ) from None


class _Own:
    """This process's environment, which nearly every command gets: the manager is told of it
    once, and again when it has changed or is another manager."""

    def __init__(self) -> None:
        self._seen: dict[bytes, bytes] = {}
        self._text = ""
        self._id = ""
        self._known = ""  # the id that the manager has

    def param(self) -> dict[str, str]:
        # os.environ decodes each name and value at every look, which takes as long as the
        # rest of a call: what is below it is compared instead.
        data: Any = getattr(os.environ, "_data", None)
        if type(data) is not dict or os.name != "posix":
            data = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}
        if data != self._seen or not self._id:
            self._seen = data.copy()  # at once: other threads may be changing it
            joined = b"\0".join([name + b"=" + value for name, value in self._seen.items()])
            self._text = os.fsdecode(joined)
            self._id = os.urandom(8).hex()
        return {"id": self._id, "text": self._text}

    async def request(self, calls: Calls, method: str, params: dict[str, Any]) -> Any:
        # It is what it was when the call was made, whatever another call is about to tell.
        own: dict[str, str] = params["own_env"]
        if own["id"] == self._known:
            try:
                return await calls.request(method, {**params, "own_env": {"id": own["id"]}}, True)
            except RPCError as e:
                if e.code != "unknown_environment":
                    raise
        result = await calls.request(method, params, True)
        self._known = own["id"]
        return result


_own = _Own()


async def _request(calls: Calls, method: str, params: dict[str, Any]) -> Any:
    """Ask for a start, which may be sent again: the id is of our making."""
    if "own_env" in params:
        return await _own.request(calls, method, params)
    return await calls.request(method, params, True)


def _environment(env: Mapping[str, Any], inherit: bool) -> dict[str, str]:
    merged = dict(os.environ) if inherit else {}
    for name, value in dict(env).items():
        if not isinstance(name, str):
            raise TypeError(f"the name of an environment variable is text, not {type(name).__name__}")
        if value is None and inherit:
            merged.pop(name, None)
        else:
            merged[name] = _text(value, f"the environment variable {name}")
    return merged


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds, not {type(value).__name__}")
    if not 0 <= value < 9e9:
        raise ValueError(f"{name} is a number of seconds, not {value}")
    return float(value)


def _title(command: Any) -> str:
    text = command if isinstance(command, str) else " ".join(map(str, command))
    return text if len(text) <= 80 else text[:79] + "…"
