"""``ws.fs`` and ``ws.git``: what is asked of the manager, and what becomes of its answer."""

from __future__ import annotations

import asyncio
import base64
import inspect
from pathlib import Path
from typing import Any

import pytest
from harness import Kernel, Message

from mypr_kernel.fs import Files
from mypr_kernel.git import Git

# The signatures that agents know.
SIGNATURES = {
    "fs.read": "path, *, start_line=1, end_line=None, start_byte=None, max_bytes=32768, encoding='utf-8'",
    "fs.write": "path, text, *, expected_hash=None, overwrite=False, encoding='utf-8', create_parents=False",
    "fs.patch": "path, edits, *, expected_hash=None, dry_run=False, encoding='utf-8', max_diff_bytes=32768",
    "fs.apply_patch": "patch, *, expected_hashes=None, dry_run=False, max_diff_bytes=32768",
    "fs.stat": "path, follow_symlinks=False",
    "fs.tree": "path='.', depth=3, max_entries=200, hidden=False",
    "fs.image": "path, max_bytes=2097152",
    "fs.search": "pattern=None, *, paths=None, glob=None, fixed=False, ignore_case=False, hidden=False, "
    "no_ignore=False, context=0, word=False, line=False, multiline=False, dotall=False, before=None, "
    "after=None, regex_engine='default', mode=None, timeout=30, scan_bytes=16777216, scan_limit=None, "
    "max_matches=100, max_bytes=32768, cursor=None",
    "fs.search_docs": "pattern=None, *, paths=None, glob=None, mode='matches', adapters=None, accurate=False, "
    "cache=True, archive_depth=5, timeout=30, scan_bytes=16777216, scan_limit=None, max_matches=100, "
    "max_bytes=32768, cursor=None",
    "fs.search_ast": "pattern=None, *, lang, rule=None, constraints=None, utils=None, paths=None, glob=None, "
    "mode='matches', timeout=30, scan_bytes=16777216, scan_limit=None, max_matches=100, max_bytes=32768, "
    "cursor=None",
    "fs.search_backends": "",
    "git.status": "*, cursor=None, max_entries=200, max_bytes=32768",
    "git.diff": "*, staged=False, rev=None, paths=None, cursor=None, max_bytes=32768",
    "git.show": "ref='HEAD', *, path=None, cursor=None, max_bytes=32768",
}


class Fake:
    """Takes requests as the manager would."""

    def __init__(self, answer: Any = None) -> None:
        self.asked: list[tuple[str, dict[str, Any], bool]] = []
        self.answer = answer if answer is not None else {}

    async def request(self, method: str, params: dict[str, Any], idempotent: bool = False) -> Any:
        self.asked.append((method, params, idempotent))
        return self.answer


def ask(part: type[Any], name: str, *args: Any, answer: Any = None, **kw: Any) -> Any:
    """Call a method; what it asked, less the defaults, and what it returned."""
    fake = Fake(answer)
    returned = asyncio.run(getattr(part(fake), name)(*args, **kw))
    method, params, idempotent = fake.asked[0]
    return method, params, idempotent, returned


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    part, method = name.split(".")
    function = getattr({"fs": Files, "git": Git}[part], method)
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for n, p in signature.parameters.items() if n != "self"
    ]
    assert str(inspect.Signature(parameters)) == f"({SIGNATURES[name]})"
    assert inspect.iscoroutinefunction(function)
    assert function.__doc__


def test_paths_are_text_however_they_come() -> None:
    for path in ("a/b", Path("a/b"), b"a/b"):
        assert ask(Files, "stat", path)[1] == {"path": "a/b", "follow_symlinks": False}
    assert ask(Files, "stat", b"caf\xe9")[1]["path"] == "caf\udce9"
    with pytest.raises(TypeError):
        ask(Files, "stat", 7)


def test_only_reading_is_asked_again() -> None:
    reading: dict[str, tuple[Any, ...]] = {
        "read": ("a",),
        "stat": ("a",),
        "tree": (),
        "search": ("x",),
        "search_docs": ("x",),
        "search_backends": (),
    }
    for name, args in reading.items():
        assert ask(Files, name, *args)[2] is True, name
    changing: dict[str, tuple[Any, ...]] = {
        "write": ("a", "t"),
        "write_bytes": ("a", b"t"),
        "patch": ("a", []),
        "apply_patch": ("p",),
    }
    for name, args in changing.items():
        assert ask(Files, name, *args)[2] is False, name


def test_bytes_travel_as_base64() -> None:
    page = {"data_base64": base64.b64encode(b"\x00\xff").decode(), "size": 2}
    assert ask(Files, "read_bytes", "a", answer=page)[3] == {"data": b"\x00\xff", "size": 2}
    assert ask(Files, "write_bytes", "a", bytearray(b"\x00\xff"))[1]["data_base64"] == "AP8="
    with pytest.raises(TypeError, match="write_bytes"):
        ask(Files, "write", "a", b"bytes")


def test_a_cursor_goes_alone() -> None:
    """Defaults are not sent: beside a cursor they would be a query of their own."""
    limits = {
        "timeout": 30,
        "scan_bytes": 16 << 20,
        "scan_limit": None,
        "max_matches": 100,
        "max_bytes": 32768,
        "cursor": "c",
    }
    assert ask(Files, "search", cursor="c")[1] == limits
    assert ask(Files, "search_docs", cursor="c")[1] == {**limits, "cache": True, "archive_depth": 5}
    assert ask(Files, "search_ast", lang="go", cursor="c")[1] == {**limits, "lang": "go"}
    assert ask(Git, "diff", cursor="c")[1] == {"cursor": "c", "max_bytes": 32768}
    method, params, _, _ = ask(Files, "search", ["a", "b"], paths=Path("src"), glob=["*.py"], context=2)
    assert method == "fs.search"
    assert params["pattern"] == ["a", "b"]
    assert params["paths"] == "src"
    assert params["glob"] == ["*.py"]
    assert params["context"] == 2
    assert "mode" not in params


def test_expected_hashes_and_edits() -> None:
    params = ask(Files, "apply_patch", "p", expected_hashes={Path("a"): "h", "b": None})[1]
    assert params["expected_hashes"] == {"a": "h", "b": None}
    assert ask(Files, "patch", "a", ({"old": "x", "new": "y"},))[1]["edits"] == [{"old": "x", "new": "y"}]
    for wrong in ("x", {"old": "x", "new": "y"}, [("x", "y")], ["x"]):
        with pytest.raises(TypeError, match="edits is a list of"):
            ask(Files, "patch", "a", wrong)


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


def test_image_is_shown(shared: Kernel) -> None:
    def answer(message: Message) -> None:
        if message["type"] == "call" and message["method"] == "fs.image":
            assert message["params"] == {"path": "plot.png", "max_bytes": 2097152}
            result = {
                "path": "plot.png",
                "mime": "image/png",
                "width": 1,
                "height": 1,
                "size": len(PNG),
                "revision": "r",
                "data_base64": base64.b64encode(PNG).decode(),
            }
            shared.send({"type": "call_result", "id": message["id"], "result": result})

    shared.listen(answer)
    cell = shared.run("await ws.fs.image('plot.png')")
    (display,) = cell.of("display")
    assert display["result"]
    assert display["text"] == f"<image/png plot.png 1x1, {len(PNG)} bytes>"
    (file,) = display["files"]
    assert file["mime"] == "image/png"
    assert Path(file["path"]).read_bytes() == PNG


def test_errors_are_what_python_programs_catch(shared: Kernel) -> None:
    def answer(message: Message) -> None:
        if message["type"] == "call" and message["method"] == "fs.read":
            error = {
                "code": "not_found",
                "message": "cannot read none",
                "hint": "look",
                "operation": "fs.read",
            }
            shared.send({"type": "call_result", "id": message["id"], "error": error})

    shared.listen(answer)
    cell = shared.run(
        "try:\n    await ws.fs.read('none')\nexcept LookupError as e:\n    print(e.code, e.hint, e.operation, e)"
    )
    assert cell.text() == "not_found look fs.read cannot read none (look)\n"
