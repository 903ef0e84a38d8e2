"""Requests to the manager: what stands behind every ``await ws.…`` that leaves Python."""

from __future__ import annotations

from _thread import allocate_lock

from . import interrupts
from .cells import current

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .link import Link


class RPCError(RuntimeError):
    """The manager refused or could not do it.

    ``code`` is for programs ("active_work", "not_found", …), ``hint`` says what to do next,
    ``operation`` names the method, ``details`` has what else is known.
    """

    def __init__(
        self,
        message: str,
        code: str = "internal",
        operation: str = "",
        hint: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.operation = operation
        self.hint = hint
        self.details = details or {}

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class Calls:
    """Awaitable requests. Used on the main thread, inside the event loop."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._next = 0
        self._waiting: dict[int, Any] = {}  # id -> asyncio.Future

    async def request(self, method: str, params: dict[str, Any], idempotent: bool = False) -> Any:
        """Ask the manager and return its result.

        A request that is on its way when the manager ends is sent again to the next one if
        it is ``idempotent``, else it fails with code ``outcome_unknown``. Raises RPCError;
        TypeError or ValueError when a parameter is not JSON.
        """
        import asyncio

        self._next += 1
        ident = self._next
        context = _context()
        future = asyncio.get_running_loop().create_future()
        self._link.call(
            ident,
            {"type": "call", "id": ident, "method": method, "params": params, "context": context},
            idempotent,
        )
        self._waiting[ident] = future
        try:
            return await future
        finally:
            if self._waiting.pop(ident, None) is not None:
                self._link.cancel_call(ident)

    def request_sync(self, method: str, params: dict[str, Any], timeout: float = 30.0) -> Any:
        """Ask the manager and wait, holding the event loop: for the quick questions of
        methods that are not awaited. An interrupt ends the wait.

        The request must be one that may be sent again. RPCError with code ``timeout`` when
        no manager answers in time.
        """
        self._next += 1
        ident = self._next
        gate = allocate_lock()
        gate.acquire()
        call = self._link.call(
            ident,
            {"type": "call", "id": ident, "method": method, "params": params, "context": _context()},
            True,
            gate,
        )
        try:
            if not interrupts.wait(gate, timeout):
                raise RPCError(
                    f"{method}: the manager did not answer within {timeout:g} s",
                    "timeout",
                    method,
                    "mypr-mcp status tells whether it runs",
                )
        except BaseException:
            self._link.cancel_call(ident)
            raise
        answer = call.answer
        if "error" in answer:
            raise _error(answer["error"])
        return answer.get("result")

    def answered(self, ident: int, message: dict[str, Any]) -> None:
        """An answer came. On the main thread."""
        future = self._waiting.pop(ident, None)
        if future is None or future.done():
            return
        error = message.get("error")
        if error is None:
            future.set_result(message.get("result"))
        else:
            future.set_exception(_error(error))


def _context() -> dict[str, str]:
    """On whose behalf is asked."""
    cell = current.get()
    if cell is None:
        return {"client_id": "", "connection_id": "", "exec_id": ""}
    return {"client_id": cell.client_id, "connection_id": cell.connection_id, "exec_id": cell.exec_id}


# What Python programs catch for such an error anywhere else.
_KINDS: dict[str, type[RPCError]] = {}


def _kind(code: str, base: type[Exception]) -> None:
    name = "".join(part.capitalize() for part in code.split("_")) + "Error"
    body = {"__doc__": f"RPCError with code {code!r}.", "__module__": __name__}
    _KINDS[code] = type(name, (RPCError, base), body)


_kind("invalid_request", ValueError)
_kind("invalid_cursor", ValueError)
_kind("not_found", LookupError)
_kind("timeout", TimeoutError)
_kind("permission_denied", PermissionError)


def _error(error: dict[str, Any]) -> RPCError:
    """The exception of an error as the manager sends it."""
    code = str(error.get("code", "internal"))
    return _KINDS.get(code, RPCError)(
        str(error.get("message", "the request failed")),
        code,
        str(error.get("operation", "")),
        str(error.get("hint", "")),
        error.get("details"),
    )
