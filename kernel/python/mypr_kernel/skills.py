"""``ws.skills``: Markdown for agents to read, ``.mypr/skills/<name>/SKILL.md``."""

from __future__ import annotations

import os

from .handles import whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from builtins import list as List
    from typing import Any

    from .calls import Calls


class Skills:
    """The workspace's skills. Everything is read from disk at each call."""

    def __init__(self, calls: Calls, root: str) -> None:
        self._calls = calls
        self._root = os.path.join(root, "skills")

    def list(self) -> List[dict[str, Any]]:
        """Every skill: ``{"name", "description", "directory", "path", "revision", "metadata"}``.

        ``metadata`` is the front matter; "error" says why it cannot be used. Skills that
        lead outside of ``.mypr/skills`` are left out.
        """
        found = self._calls.request_sync("skills.list", {})
        skills: List[dict[str, Any]] = found["skills"]
        return skills

    def read(self, name: str) -> str:
        """The whole Markdown of a skill; LookupError if there is none."""
        text: str = self._calls.request_sync("skills.read", {"name": _name(name)})["text"]
        return text

    async def validate(self, name: str, *, text: str | None = None) -> dict[str, Any]:
        """Look at a skill, or at ``text`` that is to become one.

        Returns ``{"name", "path", "valid", "errors", "warnings", "metadata", "revision"}``.
        Errors: front matter that is not YAML or has values of the wrong type, local links
        that lead nowhere or outside. Without front matter there is a warning.
        """
        params: dict[str, Any] = {"name": _name(name)}
        if text is not None:
            params["text"] = text
        report: dict[str, Any] = await self._calls.request("skills.validate", params, True)
        return report

    async def write(
        self,
        name: str,
        text: str,
        *,
        expected_hash: str | None = None,
        dry_run: bool = False,
        max_diff_bytes: int = 32768,
    ) -> dict[str, Any]:
        """Create a skill, or replace the one whose revision is ``expected_hash``.

        Malformed front matter raises ValueError and nothing is written; broken links are
        reported in "warnings". Returns ``{"name", "path", "revision", "created", "diff",
        "diff_truncated", "dry_run", "metadata", "warnings"}``. ``dry_run=True`` only
        shows the diff.
        """
        report = await self.validate(name, text=text)
        bad = [e for e in report["errors"] if not e["code"].startswith("link_")]
        if bad:
            raise ValueError(f"skill {name!r} was not written: " + "; ".join(e["text"] for e in bad))
        links = [e for e in report["errors"] if e["code"].startswith("link_")]
        result = await write_file(
            self._calls, report["path"], self._root, text, expected_hash, dry_run, max_diff_bytes
        )
        result.update(name=name, metadata=report["metadata"], warnings=report["warnings"] + links)
        return result


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a skill is text, not {type(name).__name__}")
    return name


async def read_file(calls: Calls, path: str, root: str) -> dict[str, Any] | None:
    """Text and revision of a file below root, None if there is none.

    ValueError when links lead it outside of root.
    """
    import hashlib

    real, inside = os.path.realpath(path), os.path.realpath(root)
    if real != inside and not real.startswith(inside + os.sep):
        raise ValueError(f"{path} leads outside of {root}")
    try:
        with open(real, "rb") as file:
            data = file.read(4 << 20)
    except FileNotFoundError:
        return None
    return {
        "path": path,
        "text": data.decode("utf-8"),
        "revision": hashlib.sha256(data).hexdigest(),
        "size": len(data),
    }


async def write_file(
    calls: Calls,
    path: str,
    root: str,
    text: str,
    expected_hash: str | None,
    dry_run: bool,
    max_diff_bytes: int,
) -> dict[str, Any]:
    """Write through the manager (atomic, compare and swap), or only show the difference."""
    import difflib

    from .buffer import cut

    limit = whole("max_diff_bytes", max_diff_bytes, 0, 4 << 20)
    before = await read_file(calls, path, root)
    old = before["text"] if before else ""
    diff = "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(
            old.splitlines(True), text.splitlines(True), "before" if before else "/dev/null", "after"
        )
    )
    shown = cut(diff, limit)
    result: dict[str, Any] = {
        "path": path,
        "created": before is None,
        "diff": shown,
        "diff_truncated": len(shown) < len(diff),
        "dry_run": dry_run,
    }
    if dry_run:
        if before is not None and expected_hash not in (None, before["revision"]):
            raise ValueError(f"{path} has changed: it is not at revision {expected_hash}")
        result["revision"] = before["revision"] if before else None
        return result
    params = {"path": path, "text": text, "expected_hash": expected_hash, "create_parents": True}
    written = await calls.request("fs.write", params)
    result["revision"] = written["revision"]
    result["created"] = written["created"]
    return result
