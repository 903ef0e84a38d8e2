"""``ws.messages``: what clients of this workspace write to each other."""

from __future__ import annotations

from .handles import MAX_WAIT_MS, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from .calls import Calls

MAX_PAGE = 100


class Messages:
    """The inbox of the calling client. It is kept when the client is away, and across
    resets and restarts."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def send(self, to: str, text: str, data: Any = None, reply_to: int | None = None) -> dict[str, Any]:
        """Send to a client that is or was in this workspace.

        ``text`` and ``data`` (anything JSON can express) have at most 16 KiB together.
        Returns ``{"id", "from", "to", "text", "created_at", "data", "reply_to"}``. Raises
        LookupError for a client that nobody knows.
        """
        params = {"to": _text("to", to), "text": _text("text", text), "data": data}
        if reply_to is not None:
            params["reply_to"] = whole("reply_to", reply_to, 1, 1 << 62)
        message: dict[str, Any] = await self._calls.request("messages.send", params)
        return message

    async def reply(self, message_id: int, text: str, data: Any = None) -> dict[str, Any]:
        """Answer the sender of a message that the calling client received; as ``send``."""
        params = {
            "message_id": whole("message_id", message_id, 1, 1 << 62),
            "text": _text("text", text),
            "data": data,
        }
        message: dict[str, Any] = await self._calls.request("messages.reply", params)
        return message

    async def read(
        self,
        limit: int = 20,
        after: int | None = None,
        wait_ms: int = 0,
        sender: str | None = None,
        reply_to: int | None = None,
    ) -> dict[str, Any]:
        """Messages not acknowledged yet, by id: ``{"messages", "next_cursor", "has_more"}``.

        ``limit`` is 1 to 100, a page has at most 32 KiB. ``after=next_cursor`` reads on.
        ``sender`` and ``reply_to`` leave only what comes from that client, or answers that
        message. ``wait_ms``, up to 30,000, waits while there is none of those. Reading
        acknowledges nothing.
        """
        params: dict[str, Any] = {
            "limit": whole("limit", limit, 1, MAX_PAGE),
            "wait_ms": whole("wait_ms", wait_ms, 0, MAX_WAIT_MS),
        }
        if after is not None:
            params["after"] = whole("after", after, 0, 1 << 62)
        if sender is not None:
            params["sender"] = _text("sender", sender)
        if reply_to is not None:
            params["reply_to"] = whole("reply_to", reply_to, 1, 1 << 62)
        page: dict[str, Any] = await self._calls.request("messages.read", params, True)
        return page

    async def ack(self, ids: Iterable[int]) -> int:
        """Acknowledge messages of the calling client: they are not shown again.

        Returns how many were not acknowledged before. An id that is no message of this
        client raises LookupError, and none is acknowledged.
        """
        if isinstance(ids, (str, bytes, int)):
            raise TypeError(f"ids is a list of message ids, not {type(ids).__name__}")
        wanted = [whole("a message id", i, 1, 1 << 62) for i in ids]
        count: int = await self._calls.request("messages.ack", {"ids": wanted}, True)
        return count


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is text, not {type(value).__name__}")
    return value
