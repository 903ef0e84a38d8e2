"""``ws.modules``: Python that outlives the session, ``.mypr/lib/ws_lib``."""

from __future__ import annotations

import os
import sys

from .skills import read_file, write_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from builtins import list as List
    from types import ModuleType
    from typing import Any

    from .calls import Calls
    from .shell import Shell

PACKAGE = "ws_lib"

# Runs a module and then test code in its namespace, in a process of its own.
CHECK = """
import importlib, json, os, sys, types
job = json.load(sys.stdin)
sys.stdin = open(os.devnull)
sys.path.insert(0, job["lib"])
name = job["name"]
parent = name.rpartition(".")[0]
importlib.import_module(parent)
module = types.ModuleType(name)
module.__file__ = job["path"]
module.__package__ = name if job["package"] else parent
if job["package"]:
    module.__path__ = [os.path.dirname(job["path"])]
sys.modules[name] = module
exec(compile(job["text"], job["path"], "exec"), module.__dict__)
if job["test"]:
    exec(compile(job["test"], "<test_code>", "exec"), module.__dict__)
"""


class Modules:
    """Modules of the package ``ws_lib``: write, check in a process of their own, load."""

    def __init__(self, calls: Calls, shell: Shell, root: str) -> None:
        self._calls = calls
        self._shell = shell
        self._lib = os.path.join(root, "lib")
        self._root = os.path.join(self._lib, PACKAGE)

    def list(self) -> List[dict[str, Any]]:
        """Every module: ``{"name", "path", "size", "loaded"}``, by name."""
        found: List[dict[str, Any]] = []
        for directory, subs, files in os.walk(self._root):
            subs[:] = sorted(s for s in subs if _public(s))
            for file in sorted(files):
                stem, extension = os.path.splitext(file)
                relative = os.path.relpath(directory, self._root)
                parts = [] if relative == "." else relative.split(os.sep)
                if extension != ".py" or not (_public(stem) or (stem == "__init__" and parts)):
                    continue
                name = ".".join(parts if stem == "__init__" else [*parts, stem])
                path = os.path.join(directory, file)
                if not _inside(path, self._root):
                    continue
                found.append(
                    {
                        "name": name,
                        "path": path,
                        "size": os.path.getsize(path),
                        "loaded": f"{PACKAGE}.{name}" in sys.modules,
                    }
                )
        return sorted(found, key=lambda m: str(m["name"]))

    async def read(self, name: str) -> dict[str, Any]:
        """``{"name", "path", "text", "revision", "size"}``; LookupError if there is none."""
        page = await read_file(self._calls, self._path(name), self._root)
        if page is None:
            raise _missing(name)
        return {"name": name, **page}

    async def check(
        self, name: str, *, text: str | None = None, test_code: str | None = None, timeout: float = 30
    ) -> dict[str, Any]:
        """Compile a module (or ``text`` in its place), run it and ``test_code`` in a process
        of its own.

        The test code sees the module's names: ``assert answer(2) == 4``. Returns ``{"name",
        "ok", "error", "returncode", "stdout", "stderr", "timed_out"}``; ok is False, and error
        says why, when it does not compile, raises, exits or takes longer than ``timeout``
        seconds. This kernel is not touched.
        """
        path = self._path(name)
        if text is None:
            text = (await self.read(name))["text"]
        result: dict[str, Any] = {
            "name": name,
            "ok": False,
            "error": None,
            "returncode": None,
            "stdout": "",
            "stderr": "",
            "timed_out": False,
        }
        try:
            compile(text, path, "exec", dont_inherit=True)
            if test_code is not None:
                compile(test_code, "<test_code>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as e:
            result["error"] = f"{type(e).__name__}: {e}"
            return result
        import json

        job = {
            "lib": self._lib,
            "name": f"{PACKAGE}.{name}",
            "path": path,
            "package": os.path.basename(path) == "__init__.py",
            "text": text,
            "test": test_code or "",
        }
        self._ensure_package()
        ran = await self._shell.run([sys.executable, "-c", CHECK], input=json.dumps(job), timeout=timeout)
        for key in ("returncode", "stdout", "stderr", "timed_out"):
            result[key] = ran[key]
        result["ok"] = ran["state"] == "succeeded"
        if not result["ok"]:
            lines = ran["stderr"].strip().splitlines()
            result["error"] = ran.get("error") if ran["timed_out"] or not lines else lines[-1]
        return result

    async def write(
        self,
        name: str,
        text: str,
        *,
        expected_hash: str | None = None,
        dry_run: bool = False,
        max_diff_bytes: int = 32768,
    ) -> dict[str, Any]:
        """Create a module, or replace the one whose revision is ``expected_hash``.

        Text that does not compile raises SyntaxError and nothing is written. Nothing is
        loaded: ``load`` and ``reload`` do that. Returns ``{"name", "path", "revision",
        "created", "diff", "diff_truncated", "dry_run"}``.
        """
        path = self._path(name)
        compile(text, path, "exec", dont_inherit=True)
        result = await write_file(self._calls, path, self._root, text, expected_hash, dry_run, max_diff_bytes)
        if not dry_run:
            self._ensure_package()
        result["name"] = name
        return result

    def load(self, name: str) -> ModuleType:
        """Execute the module afresh and return it; it is then ``ws_lib.<name>`` for imports.

        If it raises, what was loaded before stays. Objects that somebody has of an earlier
        load stay what they are.
        """
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                source = file.read()
        except FileNotFoundError:
            raise _missing(name) from None
        import importlib
        import importlib.util
        import linecache

        full = f"{PACKAGE}.{name}"
        parent, _, last = full.rpartition(".")
        # Not the import system's own way: its cache of bytecode takes two versions of one
        # size within one second for the same.
        package = os.path.basename(path) == "__init__.py"
        spec = importlib.util.spec_from_file_location(
            full, path, submodule_search_locations=[os.path.dirname(path)] if package else None
        )
        assert spec is not None
        if self._lib not in sys.path:
            sys.path.insert(0, self._lib)
        importlib.invalidate_caches()
        above = importlib.import_module(parent)
        module = importlib.util.module_from_spec(spec)
        code = compile(source, path, "exec", dont_inherit=True)
        linecache.checkcache(path)
        before = sys.modules.get(full)
        sys.modules[full] = module
        try:
            exec(code, module.__dict__)
        except BaseException:
            if before is None:
                sys.modules.pop(full, None)
            else:
                sys.modules[full] = before
            raise
        module = sys.modules.get(full, module)
        setattr(above, last, module)
        return module

    def reload(self, name: str) -> ModuleType:
        """The same as ``load``, for a module that has changed."""
        return self.load(name)

    def _path(self, name: Any) -> str:
        """The file of a module; ValueError for a name that is none or leads outside."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a module is text, not {type(name).__name__}")
        parts = name.split(".")
        if not all(_public(part) for part in parts):
            raise ValueError(
                f"{name[:80]!r} is not the name of a module: write Python names without a leading "
                "underscore, joined by dots"
            )
        path = os.path.join(self._root, *parts)
        path = os.path.join(path, "__init__.py") if os.path.isdir(path) else path + ".py"
        if not _inside(path, self._root):
            raise ValueError(f"module {name!r} leads outside of {self._root}")
        return path

    def _ensure_package(self) -> None:
        init = os.path.join(self._root, "__init__.py")
        if not os.path.exists(init):
            os.makedirs(self._root, exist_ok=True)
            with open(init, "a"):
                pass


def _missing(name: str) -> LookupError:
    return LookupError(
        f"there is no module {name!r} in .mypr/lib/{PACKAGE}; ws.modules.list() shows those there are"
    )


def _public(part: str) -> bool:
    import keyword

    return part.isidentifier() and not part.startswith("_") and not keyword.iskeyword(part)


def _inside(path: str, root: str) -> bool:
    real, top = os.path.realpath(path), os.path.realpath(root)
    return real == top or real.startswith(top + os.sep)
