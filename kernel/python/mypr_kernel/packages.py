"""``ws.packages``: what is installed into the environment of this kernel."""

from __future__ import annotations

import os

from .shell import Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .calls import Calls
    from .registry import Registry


class PackageJob(Job):
    """An installation that runs."""

    def __repr__(self) -> str:
        plain = super().__repr__()
        # Whoever only starts it, and imports, finds that it is not there yet.
        return plain[:-1] + ": await it before the import>" if self._state() == "running" else plain

    def result(self) -> dict[str, Any]:
        """``{"returncode": 0}``; RPCError if it failed, whose hint says what to do."""
        result = super().result()
        import importlib

        importlib.invalidate_caches()  # what was just installed is found
        return result


class Packages:
    """Installation with uv into ``.mypr/venv``."""

    def __init__(self, calls: Calls, registry: Registry) -> None:
        self._calls = calls
        self._registry = registry

    async def add(self, *specs: str) -> Job:
        """Install requirements ("httpx", "rich>=13", a path of a wheel); returns the job.

        ``await`` it before you import what is new. When it succeeds ``.mypr/requirements.txt``
        lists everything that is installed. What this kernel has imported already stays as
        it is until ``ws.reset()``.
        """
        for spec in specs:
            if not isinstance(spec, str):
                raise TypeError(f"a requirement is text, not {type(spec).__name__}")
        params = {"id": os.urandom(16).hex(), "specs": list(specs)}
        return self._registry.job(await self._calls.request("packages.add", params, True))
