"""``ws.history``: what ran, by whom, and how it ended. All of it survives the kernel."""

from __future__ import annotations

from .handles import MAX_WAIT_MS, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .calls import Calls

MAX_LIST = 200


class History:
    """Records of cells, tasks and jobs, and the log of what happened to them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def list(
        self, client_id: str | None = None, limit: int = 20, cursor: int | None = None
    ) -> dict[str, Any]:
        """Records, newest first: ``{"items": [...], "next_cursor"}``.

        Each has id, history_id, kind (execution, python, shell, package), client_id,
        connection_id, generation, state, code, error, truncated, output_bytes, created_at,
        started_at, finished_at. ``limit`` is 1 to 200. Go on with ``cursor=next_cursor``
        until that is None. ``client_id`` leaves only the records of that client.
        """
        params = _filter(client_id, limit, cursor)
        page: dict[str, Any] = await self._calls.request("history.list", params, True)
        return page

    async def get(self, id: str) -> dict[str, Any]:
        """One record, by exec id, task id, job id or history id; LookupError without.

        A task id means the newest task of that name, a history id exactly one. Beside the
        fields of ``list``: output, a list of events as poll returns them (of a cell the
        first 32 KiB, of tasks and jobs the first 64 KiB), output_truncated, and cursor and
        has_more for going on with poll (cells).
        """
        if not isinstance(id, str):
            raise TypeError(f"an id is text, not {type(id).__name__}")
        record: dict[str, Any] = await self._calls.request("history.get", {"id": id}, True)
        return record

    async def logs(
        self,
        client_id: str | None = None,
        limit: int = 20,
        cursor: int | None = None,
        wait_ms: int = 0,
    ) -> dict[str, Any]:
        """Log lines, oldest first: ``{"events": [...], "cursor"}``.

        Without a cursor the most recent ones, with ``cursor=0`` from the beginning, with
        the cursor of an earlier page (and the same ``client_id``) what came since.
        ``wait_ms``, up to 30,000, waits for a line when there is none. Old lines go (the
        newest 256 for each of the completed_records are kept, 32,768): ``dropped`` is True
        when some after the cursor are gone.
        """
        params = _filter(client_id, limit, cursor)
        params["wait_ms"] = whole("wait_ms", wait_ms, 0, MAX_WAIT_MS)
        page: dict[str, Any] = await self._calls.request("history.logs", params, True)
        return page


def _filter(client_id: str | None, limit: int, cursor: int | None) -> dict[str, Any]:
    params: dict[str, Any] = {"limit": whole("limit", limit, 1, MAX_LIST)}
    if client_id is not None:
        if not isinstance(client_id, str):
            raise TypeError(f"client_id is text, not {type(client_id).__name__}")
        params["client_id"] = client_id
    if cursor is not None:
        params["cursor"] = whole("cursor", cursor, 0, 1 << 62)
    return params
