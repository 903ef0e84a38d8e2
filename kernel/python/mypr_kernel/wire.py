"""Lines of the kernel socket: JSON, one object each, ASCII only.

ASCII because cells may print lone surrogates, which UTF-8 cannot carry and an escape can.
The C accelerators are used without the ``json`` package around them: importing that (and
``re`` below it) costs a third of a bare interpreter start.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PROTOCOL = 1
MAX_LINE = 32 << 20  # bytes, newline included


def _refuse(value: object) -> Any:
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _codec() -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    try:
        import _json

        class Settings:  # what json.JSONDecoder would be to the scanner
            strict = False
            object_hook = None
            object_pairs_hook = None
            parse_float = float
            parse_int = int
            parse_constant = float
            array_hook = None
            memo: dict[str, str] = {}  # noqa: RUF012

        settings: Any = Settings()
        scan = _json.make_scanner(settings)
        parts = _json.make_encoder(
            None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, False
        )

        def dumps(value: Any) -> str:
            return "".join(parts(value, 0))

        def loads(text: str) -> Any:
            try:
                value, end = scan(text, 0)
            except StopIteration:
                raise ValueError("not JSON") from None
            if text[end:].strip():
                raise ValueError("text after the JSON value")
            return value

        if loads(dumps({"a": [1, "\udc80"]})) == {"a": [1, "\udc80"]}:
            return dumps, loads
    except (ImportError, AttributeError, TypeError):  # another implementation, a later version
        pass
    import json

    return json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_refuse).encode, json.loads


dumps, loads = _codec()


def encode(message: dict[str, Any]) -> bytes:
    """The line of a message. TypeError or ValueError when a value is not JSON (NaN is not)."""
    return (dumps(message) + "\n").encode("ascii")


def decode(line: bytes) -> dict[str, Any]:
    """The message of a line. ValueError when it is not a JSON object."""
    message = loads(line.decode("utf-8", "replace").strip())
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message
