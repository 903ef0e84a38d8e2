"""Rich objects: what is shown of them as text, and which files are written.

text/plain travels in the event; every other representation becomes a file under
``artifacts/<exec id>/`` that the event names. An object whose methods fail is shown by what
still works, with a warning; it never fails the cell.
"""

from __future__ import annotations

import os

from . import errors
from .cells import Cell, current
from .outbox import utf8_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .capture import Log
    from .outbox import Outbox

METHODS = {
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "image/svg+xml": "_repr_svg_",
    "application/pdf": "_repr_pdf_",
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "application/json": "_repr_json_",
    "application/javascript": "_repr_javascript_",
}
EXTENSIONS = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/webp": "webp",
    "image/svg+xml": "svg",
    "application/pdf": "pdf",
    "application/json": "json",
    "application/javascript": "js",
    "audio/wav": "wav",
    "text/html": "html",
    "text/markdown": "md",
    "text/latex": "tex",
}
WARNING_BYTES = 1024


class Displays:
    """Shows objects of cells. ``formatter`` is IPython's once that is loaded; ``figure``
    renders a matplotlib figure once that is."""

    def __init__(self, outbox: Outbox, artifacts: str, log: Log) -> None:
        self.artifacts = artifacts
        self.formatter: Callable[[Any], Mapping[str, Any]] | None = None
        self.figure: Callable[[Any], bytes] | None = None
        self._outbox = outbox
        self._log = log

    def show(
        self, value: object, *, result: bool = False, display_id: str = "", update: bool = False
    ) -> None:
        """Display an object in the running cell."""
        cell = current.get()
        if result and isinstance(value, DisplayHandle):
            return  # of a display() that is the cell's last expression
        if cell is not None and not cell.ended and not cell.truncated:
            self.publish(cell, self._bundle(cell, value), result, display_id, update)
            if result and type(value).__name__ == "coroutine":
                self.warn(cell, "not_awaited", "nothing of this coroutine was run: write await before it")
        elif cell is None or cell.ended:
            self._log.line(f"displayed outside of a cell: {type(value).__name__}")

    def publish(
        self,
        cell: Cell,
        data: Mapping[str, Any],
        result: bool = False,
        display_id: str = "",
        update: bool = False,
    ) -> None:
        """Send a bundle of representations: mime type -> str, bytes (or their base64), JSON."""
        text = data.get("text/plain", "")
        if not isinstance(text, str):
            self.warn(cell, "invalid_output", f"text/plain of a display is a {type(text).__name__}, not text")
            text = ""
        size = utf8_size(text)
        files = []
        for mime, value in data.items():
            if mime != "text/plain":
                file = self._save(cell, str(mime), value)
                if file is not None:
                    files.append(file)
                    size += file["size"]
        if not text and not files and not update:
            return
        limit = self._outbox.event_chars
        fields: dict[str, Any] = {"event": "display", "text": text[:limit], "files": files, "result": result}
        if display_id:
            fields["display_id"] = display_id
            fields["update"] = update
        if not self._outbox.event(cell, fields, size):
            for file in files:
                _remove(file["path"])
            return
        for at in range(limit, len(text), limit):
            part = text[at : at + limit]
            more = {"event": "display", "text": part, "files": [], "result": result, "continues": True}
            self._outbox.event(cell, more)

    def warn(self, cell: Cell, code: str, text: str) -> None:
        self._outbox.event(
            cell, {"event": "warning", "code": code, "text": errors.cut(text, WARNING_BYTES)[0]}
        )

    # -- representations -------------------------------------------------------

    def _bundle(self, cell: Cell, value: object) -> Mapping[str, Any]:
        kind = type(value)
        if kind.__module__ == "builtins" and self.formatter is None:
            return {"text/plain": self._plain(cell, value)}
        if self.figure is not None and is_figure(kind):
            try:
                return {"text/plain": self._plain(cell, value), "image/png": self.figure(value)}
            except Exception as e:
                self._failed(cell, "rendering a figure", e)
        if self.formatter is not None:
            try:
                return self._with_text(dict(self.formatter(value)))
            except Exception as e:
                self._failed(cell, f"formatting a {errors.type_name_of(kind)}", e)
                return {"text/plain": _placeholder(value)}
        data: dict[str, Any] = {}
        bundle = self._call(cell, value, "_repr_mimebundle_")
        if isinstance(bundle, tuple):
            bundle = bundle[0]
        if isinstance(bundle, dict):
            data.update(bundle)
        for mime, name in METHODS.items():
            if mime not in data:
                shown = self._call(cell, value, name)
                if isinstance(shown, tuple):  # with metadata
                    shown = shown[0]
                if shown is not None:
                    data[mime] = shown
        if "text/plain" not in data:
            data["text/plain"] = self._plain(cell, value)
        return self._with_text(data)

    def _call(self, cell: Cell, value: object, name: str) -> Any:
        # Looked up on the class: objects that answer to any attribute have none of these.
        method = getattr(type(value), name, None)
        if method is None:
            return None
        try:
            return method(value)
        except NotImplementedError:
            return None
        except Exception as e:
            self._failed(cell, f"{errors.type_name_of(type(value))}.{name}()", e)
            return None

    def _plain(self, cell: Cell, value: object) -> str:
        try:
            text = repr(value)
            return text if type(text) is str else str.__str__(text)
        except Exception as e:
            self._failed(cell, f"repr() of a {errors.type_name_of(type(value))}", e)
            return _placeholder(value)

    def _failed(self, cell: Cell, what: str, error: Exception) -> None:
        self.warn(cell, "display_failed", f"{what} failed: {errors.summary(error)['error']}")

    @staticmethod
    def _with_text(data: dict[str, Any]) -> dict[str, Any]:
        """For an object that is a piece of Markdown or LaTeX, that is the text to read."""
        plain = data.get("text/plain", "")
        if isinstance(plain, str) and (not plain or (plain.startswith("<") and " object" in plain)):
            for mime in ("text/markdown", "text/latex"):
                if isinstance(data.get(mime), str):
                    data["text/plain"] = data[mime]
                    break
        return data

    # -- files -----------------------------------------------------------------

    def _save(self, cell: Cell, mime: str, value: Any) -> dict[str, Any] | None:
        try:
            content = _content(mime, value)
        except (ValueError, TypeError) as e:
            self.warn(cell, "artifact_error", f"display data of type {mime} is malformed: {e}")
            return None
        if not self._outbox.room(cell, len(content)):
            return None
        directory = os.path.join(self.artifacts, cell.exec_id)
        path = os.path.join(directory, f"{os.urandom(16).hex()}.{EXTENSIONS.get(mime, 'bin')}")
        try:
            os.makedirs(directory, 0o700, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            except OSError:
                _remove(path)
                raise
            finally:
                os.close(fd)
        except OSError as e:
            self.warn(cell, "artifact_error", f"cannot write display data of type {mime}: {e}")
            return None
        return {"mime": mime, "path": path, "size": len(content)}


def _placeholder(value: object) -> str:
    return f"<{errors.type_name_of(type(value))} object at {id(value):#x}: its repr() failed>"


def is_figure(kind: type) -> bool:
    return any(base.__module__ == "matplotlib.figure" and base.__name__ == "Figure" for base in kind.__mro__)


def _content(mime: str, value: Any) -> bytes:
    """The bytes of a file. ValueError or TypeError when the value is not of its type."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        if mime == "application/pdf" or (
            mime.startswith(("image/", "audio/", "video/")) and mime != "image/svg+xml"
        ):
            import base64

            return base64.b64decode("".join(value.split()), validate=True)
        if mime != "application/json":
            return value.encode("utf-8", "backslashreplace")
    import json

    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


class DisplayHandle:
    """What ``display(..., display_id=...)`` returns: shows another object in its place."""

    def __init__(self, show: Callable[..., None], display_id: str) -> None:
        self.display_id = display_id
        self._show = show

    def display(self, value: object) -> None:
        """Show it again, under the same id."""
        self._show(value, display_id=self.display_id)

    def update(self, value: object) -> None:
        """Replace what is shown under the id."""
        self._show(value, display_id=self.display_id, update=True)

    def __repr__(self) -> str:
        return f"<DisplayHandle display_id={self.display_id}>"
