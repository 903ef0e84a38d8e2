"""What is told of an exception: a plain traceback and a summary of at most 1 KiB."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SUMMARY_BYTES = 1024
TRACEBACK_CHARS = 64 << 10
_DIRECTORY = os.path.dirname(os.path.abspath(__file__)) + os.sep


def type_name(error: BaseException) -> str:
    """The class as tracebacks name it: "ValueError", "json.decoder.JSONDecodeError"."""
    return type_name_of(type(error))


def type_name_of(kind: type) -> str:
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as e:  # SystemExit too: the user's code ran
        return f"<str() of the exception failed: {type_name(e)}>"


def cut(text: str, limit: int) -> tuple[str, bool]:
    """At most ``limit`` bytes of UTF-8, and whether something was left out."""
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) <= limit:
        return raw.decode("utf-8"), False
    return raw[: limit - 3].decode("utf-8", "ignore") + "…", True


def summary(error: BaseException) -> dict[str, Any]:
    """The fields ``error``, ``error_truncated`` and ``error_info`` of a failed state."""
    kind, text = type_name(error), message(error)
    line, truncated = cut(f"{kind}: {text}" if text else kind, SUMMARY_BYTES)
    shown, shown_cut = cut(text, SUMMARY_BYTES)
    fields: dict[str, Any] = {
        "error": line,
        "error_info": {"code": "python_exception", "type": kind, "message": shown},
    }
    if truncated or shown_cut:
        fields["error_truncated"] = truncated
        fields["error_info"]["truncated"] = shown_cut
    return fields


def traceback_text(error: BaseException, own_syntax: bool = False) -> str:
    """The traceback without the kernel's frames.

    ``own_syntax``: the cell itself did not compile, so there is no stack to show. Very
    long ones lose their middle.
    """
    import traceback

    formatted = traceback.TracebackException.from_exception(error, limit=None)
    _hide(formatted, set())
    if own_syntax:
        text = "".join(formatted.format_exception_only())
    else:
        text = "".join(formatted.format())
    hint = _hint(error)
    if len(text) > TRACEBACK_CHARS:
        half = TRACEBACK_CHARS // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return text + hint


def _hide(formatted: Any, seen: set[int]) -> None:
    if formatted is None or id(formatted) in seen:
        return
    seen.add(id(formatted))
    stack = formatted.stack
    stack[:] = [frame for frame in stack if not frame.filename.startswith(_DIRECTORY)]
    _hide(formatted.__cause__, seen)
    _hide(formatted.__context__, seen)
    for inner in getattr(formatted, "exceptions", None) or ():
        _hide(inner, seen)


def _hint(error: BaseException) -> str:
    if isinstance(error, RuntimeError) and "asyncio.run() cannot be called" in message(error):
        return "hint: a cell runs in an event loop: write `await main()` instead of asyncio.run(main())\n"
    if isinstance(error, (TypeError, AttributeError)):
        text = message(error)
        if "'coroutine'" in text or "coroutine object" in text:
            return "hint: what makes a coroutine has to be awaited: (await call())\n"
    return ""
