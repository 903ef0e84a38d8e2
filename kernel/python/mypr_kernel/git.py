"""``ws.git``: the repository of the workspace, read-only."""

from __future__ import annotations

from .fs import MAX_BYTES, _names, _path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .calls import Calls
    from .fs import Names, Path


class Git:
    """Status, diff and commits. No pager, external diff, textconv, hook or fsmonitor runs.

    Paths given are relative to the workspace, paths returned to ``root``, the root of the
    repository. Pages come from a snapshot: go on with ``cursor=next_cursor`` and the same
    method while ``has_more``. ``max_bytes`` is at least 1024.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def status(
        self, *, cursor: str | None = None, max_entries: int = 200, max_bytes: int = MAX_BYTES
    ) -> dict[str, Any]:
        """HEAD, index and work tree compared.

        Returns ``{"root", "branch": {"head", "oid", "upstream", "ahead", "behind",
        "detached"}, "stash", "clean", "total", "files", "complete", "has_more",
        "next_cursor"}``. A file is ``{"path", "old_path"?, "kind": "changed" | "renamed" |
        "copied" | "conflict" | "untracked", "index"?, "worktree"?, "conflict"?, "modes"?,
        "submodule"?}``.
        """
        params = {"cursor": cursor, "max_entries": max_entries, "max_bytes": max_bytes}
        return await self._ask("git.status", params)

    async def diff(
        self,
        *,
        staged: bool = False,
        rev: str | None = None,
        paths: Names | None = None,
        cursor: str | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> dict[str, Any]:
        """Changes of the work tree, with ``staged`` of the index; against ``rev`` if given
        ("HEAD~2", "main..topic").

        Returns ``{"root", "total", "files", "patch", "complete", "has_more",
        "next_cursor"}``. Collect both files and patch over the pages. A file is ``{"path",
        "old_path"?, "status", "old_mode", "new_mode", "old_id", "new_id", "additions",
        "deletions", "binary"?, "submodule"?}``.
        """
        query = {"staged": staged or None, "rev": rev, "paths": _names(paths)}
        return await self._ask("git.diff", {**_given(query), "cursor": cursor, "max_bytes": max_bytes})

    async def show(
        self,
        ref: str = "HEAD",
        *,
        path: Path | None = None,
        cursor: str | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> dict[str, Any]:
        """A commit, or with ``path`` a file or directory as it is in one.

        A commit has ``{"kind": "commit", "commit": {"id", "tree", "parents", "author",
        "committer", "message"}}`` and what ``diff`` returns; a file ``{"kind", "path",
        "mode", "id", "size", "text", "binary"?}``, a directory ``entries``.
        """
        query = {"ref": ref, "path": None if path is None else _path(path)}
        return await self._ask("git.show", {**_given(query), "cursor": cursor, "max_bytes": max_bytes})

    async def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._calls.request(method, params, True)
        return answer


def _given(query: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}
