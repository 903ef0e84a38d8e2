"""``ws.fs``: files and search. The manager does the work, off the event loop."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from .calls import Calls

    Path = str | os.PathLike[str]
    Names = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

MAX_BYTES = 32768
IMAGE_BYTES = 2 * 1024 * 1024
SCAN_BYTES = 16 * 1024 * 1024


class Image:
    """A PNG or JPEG. It shows itself as the last expression of a cell or in display()."""

    def __init__(self, info: dict[str, Any], data: bytes) -> None:
        self.path: str = info["path"]
        self.mime: str = info["mime"]
        self.width: int = info["width"]
        self.height: int = info["height"]
        self.revision: str = info["revision"]
        self.data = data

    def _repr_png_(self) -> bytes | None:
        return self.data if self.mime == "image/png" else None

    def _repr_jpeg_(self) -> bytes | None:
        return self.data if self.mime == "image/jpeg" else None

    def __repr__(self) -> str:
        return f"<{self.mime} {self.path} {self.width}x{self.height}, {len(self.data)} bytes>"


class Files:
    """Read, change and search files.

    Relative paths mean the workspace, whatever the current directory. Revisions are the
    SHA-256 of a file's bytes. What fails raises RPCError (``code``, ``hint``), which is also
    a LookupError (not_found), ValueError (invalid_request, invalid_cursor) or
    PermissionError where that fits. Names that are not UTF-8 are as os.fsdecode makes them.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def read(
        self,
        path: Path,
        *,
        start_line: int = 1,
        end_line: int | None = None,
        start_byte: int | None = None,
        max_bytes: int = MAX_BYTES,
        encoding: str = "utf-8",
    ) -> dict[str, Any]:
        """Lines of a text file: lines count from 1, ``end_line`` is included.

        Returns ``{"path", "text", "start_line", "start_byte", "end_line", "total_lines",
        "next_line", "next_byte", "next_cursor", "truncated", "revision", "size"}``. When
        ``max_bytes`` cut the page, go on with ``start_line=next_cursor["line"],
        start_byte=next_cursor["byte"]``, and compare revisions.
        """
        params = {
            "path": _path(path),
            "start_line": start_line,
            "end_line": end_line,
            "start_byte": start_byte,
            "max_bytes": max_bytes,
            "encoding": encoding,
        }
        return await self._ask("fs.read", params)

    async def read_bytes(
        self, path: Path, *, start_byte: int = 0, max_bytes: int = MAX_BYTES
    ) -> dict[str, Any]:
        """A part of any file: ``{"path", "data", "start_byte", "next_cursor", "truncated",
        "revision", "size"}``.

        ``data`` is bytes. Go on with ``start_byte=next_cursor["byte"]``. The revision of a
        file over 1 GiB is None.
        """
        page = await self._ask(
            "fs.read_bytes", {"path": _path(path), "start_byte": start_byte, "max_bytes": max_bytes}
        )
        page["data"] = _decode(page.pop("data_base64"))
        return page

    async def write(
        self,
        path: Path,
        text: str,
        *,
        expected_hash: str | None = None,
        overwrite: bool = False,
        encoding: str = "utf-8",
        create_parents: bool = False,
    ) -> dict[str, Any]:
        """Create a text file, or replace the one whose revision is ``expected_hash``.

        ``overwrite=True`` replaces it whatever it holds. The replacement is atomic, keeps
        mode, owner and attributes, and follows symbolic links. Returns ``{"path",
        "created", "size", "old_revision", "new_revision", "revision", "warnings"?}``.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is str, not {type(text).__name__}; ws.fs.write_bytes writes bytes")
        params = {
            "path": _path(path),
            "text": text,
            "expected_hash": expected_hash,
            "overwrite": overwrite,
            "encoding": encoding,
            "create_parents": create_parents,
        }
        return await self._change("fs.write", params)

    async def write_bytes(
        self,
        path: Path,
        data: bytes | bytearray | memoryview,
        *,
        expected_hash: str | None = None,
        overwrite: bool = False,
        create_parents: bool = False,
    ) -> dict[str, Any]:
        """Create or replace any file, as ``write`` does."""
        from base64 import b64encode

        params = {
            "path": _path(path),
            "data_base64": b64encode(data).decode("ascii"),
            "expected_hash": expected_hash,
            "overwrite": overwrite,
            "create_parents": create_parents,
        }
        return await self._change("fs.write_bytes", params)

    async def patch(
        self,
        path: Path,
        edits: Sequence[Mapping[str, Any]],
        *,
        expected_hash: str | None = None,
        dry_run: bool = False,
        encoding: str = "utf-8",
        max_diff_bytes: int = MAX_BYTES,
    ) -> dict[str, Any]:
        """Replace exact text: ``edits`` is a list of ``{"old": ..., "new": ...}``, done in order.

        Each ``old`` must occur once; ``"count": N`` replaces the first N matches,
        ``"count": "all"`` every one. If one edit cannot be done, none is (codes no_match,
        ambiguous_match). Returns ``{"path", "old_revision", "new_revision", "revision",
        "dry_run", "replaced", "added", "removed", "diff", "diff_truncated", "warnings"?}``.
        """
        params = {
            "path": _path(path),
            "edits": _edits(edits),
            "expected_hash": expected_hash,
            "dry_run": dry_run,
            "encoding": encoding,
            "max_diff_bytes": max_diff_bytes,
        }
        return await self._change("fs.patch", params)

    async def apply_patch(
        self,
        patch: str,
        *,
        expected_hashes: Mapping[str, str | None] | None = None,
        dry_run: bool = False,
        max_diff_bytes: int = MAX_BYTES,
    ) -> dict[str, Any]:
        """Change several files, all or none::

            *** Begin Patch
            *** Add File: new.txt
            +a line
            *** Update File: old.txt
            *** Move to: renamed.txt
            @@ a whole line of the file that comes before the change
             context
            -before
            +after
            *** Delete File: obsolete.txt
            *** End Patch

        ``@@`` alone begins a hunk whose old lines occur once; ``*** End of File`` after a
        hunk anchors it to the end. ``expected_hashes`` maps paths to revisions, None means
        that nothing is there. Returns ``{"files": [{"path", "action", "from"?,
        "old_revision", "new_revision", "added", "removed"}], "dry_run", "diff",
        "diff_truncated", "warnings"?}``.
        """
        params = {
            "patch": patch,
            "expected_hashes": None
            if expected_hashes is None
            else {_path(path): revision for path, revision in expected_hashes.items()},
            "dry_run": dry_run,
            "max_diff_bytes": max_diff_bytes,
        }
        return await self._change("fs.apply_patch", params)

    async def stat(self, path: Path, follow_symlinks: bool = False) -> dict[str, Any]:
        """Metadata without reading: ``{"path", "kind", "size", "mtime_ns", "mode", "target"?,
        "special"?, "links"?}``.

        ``kind`` is file, directory, symlink or other; ``mode`` is octal text.
        """
        return await self._ask("fs.stat", {"path": _path(path), "follow_symlinks": follow_symlinks})

    async def tree(
        self, path: Path = ".", depth: int = 3, max_entries: int = 200, hidden: bool = False
    ) -> dict[str, Any]:
        """A directory as nested ``entries`` (each as from ``stat``), with ``count`` and ``truncated``.

        Sorted by name; ``max_entries`` cuts the deepest levels first. Symbolic links are not
        followed. A directory without ``entries`` was not listed.
        """
        params = {"path": _path(path), "depth": depth, "max_entries": max_entries, "hidden": hidden}
        return await self._ask("fs.tree", params)

    async def image(self, path: Path, max_bytes: int = IMAGE_BYTES) -> Image:
        """Load a PNG or JPEG to show: return it as the cell's last expression, or display() it."""
        info = await self._ask("fs.image", {"path": _path(path), "max_bytes": max_bytes})
        return Image(info, _decode(info["data_base64"]))

    async def search(
        self,
        pattern: str | Iterable[str] | None = None,
        *,
        paths: Names | None = None,
        glob: str | Iterable[str] | None = None,
        fixed: bool = False,
        ignore_case: bool = False,
        hidden: bool = False,
        no_ignore: bool = False,
        context: int = 0,
        word: bool = False,
        line: bool = False,
        multiline: bool = False,
        dotall: bool = False,
        before: int | None = None,
        after: int | None = None,
        regex_engine: str = "default",
        mode: str | None = None,
        timeout: float = 30,
        scan_bytes: int = SCAN_BYTES,
        scan_limit: int | None = None,
        max_matches: int = 100,
        max_bytes: int = MAX_BYTES,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """Search with ripgrep: regular expressions in lines, ignore files respected.

        ``mode``: "matches" (default with a pattern), "files" (default without), "counts" or
        "exists". Returns ``{"mode", "backend", "matches" | "files" | "counts" | "exists",
        "complete", "stop_reason", "scan_truncated", "has_more", "next_cursor",
        "page_cursor", "warnings"?}``. A match is ``{"kind", "path", "line", "column",
        "start", "end", "text", "spans"}``: columns and offsets in bytes, ends exclusive.
        Go on with ``cursor=next_cursor`` alone; ``cursor=page_cursor`` reads the page again
        with another ``max_bytes``. A list of patterns means any of them.
        """
        query = {
            "pattern": _names(pattern),
            "paths": _names(paths),
            "glob": _names(glob),
            "fixed": fixed,
            "ignore_case": ignore_case,
            "hidden": hidden,
            "no_ignore": no_ignore,
            "context": context or None,
            "word": word,
            "line": line,
            "multiline": multiline,
            "dotall": dotall,
            "before": before,
            "after": after,
            "regex_engine": regex_engine if regex_engine != "default" else None,
            "mode": mode,
        }
        limits = _limits(timeout, scan_bytes, scan_limit, max_matches, max_bytes, cursor)
        return await self._search("fs.search", query, limits)

    async def search_docs(
        self,
        pattern: str | Iterable[str] | None = None,
        *,
        paths: Names | None = None,
        glob: str | Iterable[str] | None = None,
        mode: str = "matches",
        adapters: str | Iterable[str] | None = None,
        accurate: bool = False,
        cache: bool = True,
        archive_depth: int = 5,
        timeout: float = 30,
        scan_bytes: int = SCAN_BYTES,
        scan_limit: int | None = None,
        max_matches: int = 100,
        max_bytes: int = MAX_BYTES,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """Search PDF, Office, e-book and other documents, and archives, with ripgrep-all.

        Results are as from ``search``, with lines and columns of the extracted text and no
        offsets. A missing converter makes the result partial, with a warning.
        """
        query = {
            "pattern": _names(pattern),
            "paths": _names(paths),
            "glob": _names(glob),
            "mode": mode if mode != "matches" else None,
            "adapters": _names(adapters),
            "accurate": accurate,
        }
        limits = _limits(timeout, scan_bytes, scan_limit, max_matches, max_bytes, cursor)
        limits.update(cache=cache, archive_depth=archive_depth)
        return await self._search("fs.search_docs", query, limits)

    async def search_ast(
        self,
        pattern: str | None = None,
        *,
        lang: str,
        rule: Mapping[str, Any] | None = None,
        constraints: Mapping[str, Any] | None = None,
        utils: Mapping[str, Any] | None = None,
        paths: Names | None = None,
        glob: str | Iterable[str] | None = None,
        mode: str = "matches",
        timeout: float = 30,
        scan_bytes: int = SCAN_BYTES,
        scan_limit: int | None = None,
        max_matches: int = 100,
        max_bytes: int = MAX_BYTES,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """Search syntax with ast-grep: a pattern ("foo($A, $$$REST)") or a rule, not both.

        Results are as from ``search``; a match also has ``language``, ``range`` (``start``
        and exclusive ``end``, each ``{"line", "column", "offset"}``) and ``captures`` by
        metavariable. ``details_truncated`` says that some of it did not fit.
        """
        query = {
            "pattern": pattern,
            "lang": lang,
            "rule": rule,
            "constraints": constraints,
            "utils": utils,
            "paths": _names(paths),
            "glob": _names(glob),
            "mode": mode if mode != "matches" else None,
        }
        limits = _limits(timeout, scan_bytes, scan_limit, max_matches, max_bytes, cursor)
        return await self._search("fs.search_ast", query, limits)

    async def search_backends(self) -> dict[str, Any]:
        """Which search programs there are: ``{"rg", "rga", "ast", "converters"}``, with versions."""
        return await self._ask("fs.search_backends", {})

    async def _search(self, method: str, query: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
        # What is left out has its default; beside a cursor, what is given must be as in its query.
        given = {name: value for name, value in query.items() if value is not None and value is not False}
        return await self._ask(method, {**given, **limits})

    async def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._calls.request(method, params, True)
        return answer

    async def _change(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        # Never sent twice: whether a manager that died had done it is for the caller to look at.
        answer: dict[str, Any] = await self._calls.request(method, params)
        return answer


def _limits(
    timeout: float,
    scan_bytes: int,
    scan_limit: int | None,
    max_matches: int,
    max_bytes: int,
    cursor: str | None,
) -> dict[str, Any]:
    return {
        "timeout": timeout,
        "scan_bytes": scan_bytes,
        "scan_limit": scan_limit,
        "max_matches": max_matches,
        "max_bytes": max_bytes,
        "cursor": cursor,
    }


def _path(path: Any) -> str:
    """A path as text; bytes as os.fsdecode makes them."""
    return os.fsdecode(path)


def _edits(edits: Any) -> list[dict[str, Any]]:
    """The edits of ``patch`` as plain dicts; one alone, or text, is a mistake to be named."""
    wanted = 'edits is a list of {"old": ..., "new": ...}'
    if isinstance(edits, (str, bytes)) or hasattr(edits, "keys"):
        raise TypeError(f"{wanted}, not {type(edits).__name__}")
    result = []
    for edit in edits:
        if not hasattr(edit, "keys"):
            raise TypeError(f"{wanted}; one of them is {type(edit).__name__}")
        result.append(dict(edit))
    return result


def _names(names: Any) -> str | list[str] | None:
    """One name, a list of names, or None."""
    if names is None:
        return None
    if isinstance(names, (str, bytes, os.PathLike)):
        return _path(names)
    return [_path(name) for name in names]


def _decode(data: str) -> bytes:
    from base64 import b64decode

    return b64decode(data)
