"""Changes to modules that are made when, and only if, they are imported."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class Hooks:
    """A finder that goes first and lets the others do the work."""

    def __init__(self) -> None:
        self._after: dict[str, Callable[[Any], None]] = {}

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def after(self, name: str, action: Callable[[Any], None]) -> None:
        """Call ``action(module)`` once the module is there: now, or after its import, on
        the thread that imports it."""
        if name in sys.modules:
            action(sys.modules[name])
        else:
            self._after[name] = action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        action = self._after.pop(name, None)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, action)  # type: ignore[assignment]
                return spec
        self._after[name] = action  # not there, yet
        return None

    def invalidate_caches(self) -> None:
        """Nothing is cached."""


class _Loader:
    """Runs the action after the real loader, and leaves no trace of itself."""

    def __init__(self, loader: Any, action: Callable[[Any], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)
