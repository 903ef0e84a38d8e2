"""Requests to the manager: what stands behind every ``await ws.…`` that leaves Python."""

from __future__ import annotations

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

        cell = current.get()
        self._next += 1
        ident = self._next
        context = {
            "client_id": cell.client_id if cell else "",
            "connection_id": cell.connection_id if cell else "",
            "exec_id": cell.exec_id if cell else "",
        }
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

    def answered(self, ident: int, message: dict[str, Any]) -> None:
        """An answer came. On the main thread."""
        future = self._waiting.pop(ident, None)
        if future is None or future.done():
            return
        error = message.get("error")
        if error is None:
            future.set_result(message.get("result"))
            return
        future.set_exception(
            RPCError(
                str(error.get("message", "the request failed")),
                str(error.get("code", "internal")),
                str(error.get("operation", "")),
                str(error.get("hint", "")),
                error.get("details"),
            )
        )
