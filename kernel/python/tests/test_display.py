"""Rich objects and their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Kernel

PNG = "b'\\x89PNG' + bytes(20)"


def test_png_becomes_a_file(shared: Kernel) -> None:
    cell = shared.run(
        f"class Image:\n    def _repr_png_(self): return {PNG}\n    def __repr__(self): return 'an image'\nImage()"
    )
    (event,) = cell.of("display")
    assert (event["text"], event["result"]) == ("an image", True)
    (file,) = event["files"]
    path = Path(file["path"])
    assert path.parent == shared.workspace / ".mypr" / "artifacts" / event["exec_id"]
    assert (file["mime"], file["size"], path.suffix) == ("image/png", 24, ".png")
    assert path.read_bytes() == b"\x89PNG" + bytes(20)
    assert path.stat().st_mode & 0o777 == 0o600


def test_every_representation(shared: Kernel) -> None:
    cell = shared.run(
        "class Rich:\n"
        "    def __repr__(self): return 'plain'\n"
        "    def _repr_html_(self): return '<b>é</b>'\n"
        "    def _repr_svg_(self): return '<svg/>'\n"
        "    def _repr_json_(self): return {'a': 1}\n"
        "    def _repr_markdown_(self): return '**m**'\n"
        "    def _repr_latex_(self): return '$x$'\n"
        "    def _repr_jpeg_(self): return 'AAEC', {'width': 1}\n"
        "    def _repr_pdf_(self): return None\n"
        "display(Rich())"
    )
    (event,) = cell.of("display")
    assert (event["text"], event["result"]) == ("plain", False)
    contents = {f["mime"]: Path(f["path"]).read_bytes() for f in event["files"]}
    assert contents == {
        "text/html": "<b>é</b>".encode(),
        "image/svg+xml": b"<svg/>",
        "application/json": b'{"a": 1}',
        "text/markdown": b"**m**",
        "text/latex": b"$x$",
        "image/jpeg": b"\x00\x01\x02",
    }


def test_mimebundle(shared: Kernel) -> None:
    cell = shared.run(
        "class Bundle:\n"
        "    def _repr_mimebundle_(self, include=None, exclude=None):\n"
        "        return {'text/plain': 'own text', 'application/x-thing': {'k': [1]}}, {}\n"
        "Bundle()"
    )
    (event,) = cell.of("display")
    assert event["text"] == "own text"
    (file,) = event["files"]
    assert (file["mime"], json.loads(Path(file["path"]).read_text())) == ("application/x-thing", {"k": [1]})


def test_display_takes_several_and_plain_values(shared: Kernel) -> None:
    cell = shared.run("display(1, 'two', [3])")
    assert [e["text"] for e in cell.of("display")] == ["1", "'two'", "[3]"]


def test_raw_display(shared: Kernel) -> None:
    cell = shared.run("display({'text/plain': 'raw text', 'image/png': 'AAEC'}, raw=True)")
    (event,) = cell.of("display")
    assert (event["text"], [f["size"] for f in event["files"]]) == ("raw text", [3])


def test_display_id_and_update(shared: Kernel) -> None:
    cell = shared.run(
        "h = display('one', display_id='p')\nh.update('two')\ndisplay('three', display_id='p', update=True)"
    )
    assert [(e["text"], e["display_id"], e["update"]) for e in cell.of("display")] == [
        ("'one'", "p", False),
        ("'two'", "p", True),
        ("'three'", "p", True),
    ]
    assert shared.run("h2 = display(1, display_id=True); len(h2.display_id) > 8").result == "True"


@pytest.mark.parametrize(
    "method", ["__repr__", "_repr_png_", "_repr_html_", "_repr_mimebundle_"]
)  # fmt: skip
def test_broken_methods_warn_and_never_fail_the_cell(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"class Broken:\n    def {method}(self, *a, **k): raise ZeroDivisionError('inside')\nBroken()"
    )
    assert cell.state == "succeeded"
    assert cell.result is not None
    assert "Broken" in cell.result
    assert any("ZeroDivisionError: inside" in w["text"] for w in cell.of("warning"))


def test_malformed_data_warns(shared: Kernel) -> None:
    cell = shared.run(
        "class Bad:\n    def _repr_png_(self): return 'not base64!'\n    def __repr__(self): return 'bad'\nBad()"
    )
    assert (cell.state, cell.result) == ("succeeded", "bad")
    assert [w["code"] for w in cell.of("warning")] == ["artifact_error"]


def test_unwritable_artifacts_warn(kernel: Kernel) -> None:
    (kernel.workspace / ".mypr").mkdir(exist_ok=True)
    (kernel.workspace / ".mypr" / "artifacts").write_text("a file is in the way")
    cell = kernel.run(f"class I:\n    def _repr_png_(self): return {PNG}\nI()")
    assert cell.state == "succeeded"
    (warning,) = cell.of("warning")
    assert warning["code"] == "artifact_error"
    assert "cannot write" in warning["text"]


def test_objects_that_answer_to_anything_are_plain(shared: Kernel) -> None:
    cell = shared.run(
        "class Any:\n    def __getattr__(self, name): return lambda *a, **k: name\n    def __repr__(self): return 'any'\nAny()"
    )
    assert (cell.result, [e["files"] for e in cell.of("display")]) == ("any", [[]])
    assert shared.run("Any").result is not None


def test_figures_show_at_the_end_of_their_cell(shared: Kernel, has_matplotlib: bool) -> None:
    if not has_matplotlib:
        cell = shared.run("import matplotlib")
        assert cell.error.startswith("ModuleNotFoundError")
        return
    cell = shared.run(
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.figure(figsize=(40, 2)); plt.plot([3]);"
    )
    files = [f for e in cell.of("display") for f in e["files"]]
    assert [f["mime"] for f in files] == ["image/png"] * 2
    for file in files:
        png = Path(file["path"]).read_bytes()
        assert png.startswith(b"\x89PNG")
        assert max(int.from_bytes(png[i : i + 4], "big") for i in (16, 20)) <= 1568
    assert shared.run("plt.get_fignums()").result == "[]"
    cell = shared.run("plt.plot([1]); plt.show(); print('after')")
    assert [e["event"] for e in cell.events if e["event"] != "stream"] == ["state", "display", "state"]
    assert cell.events[2]["text"].startswith("after")
    cell = shared.run("fig, ax = plt.subplots(); ax.plot([1]); fig")
    assert len([f for e in cell.of("display") for f in e["files"]]) == 1


def test_figures_of_interleaved_cells_do_not_mix(shared: Kernel, has_matplotlib: bool) -> None:
    if not has_matplotlib:
        assert shared.run("import matplotlib").state == "failed"
        return
    shared.run("import matplotlib.pyplot as plt, asyncio\nready = asyncio.Event()")
    waiting = shared.execute("plt.plot([1]); await ready.wait()")
    shared.wait_state(waiting, "running")
    other = shared.run("print('no figure of mine'); ready.set()")
    shared.wait_state(waiting)
    assert not other.of("display")
    assert len([f for e in shared.cell(waiting).of("display") for f in e["files"]]) == 1


def test_a_coroutine_that_nobody_awaits(shared: Kernel) -> None:
    cell = shared.run("async def work(): return {}\nwork()")
    assert [w["code"] for w in cell.of("warning")] == ["not_awaited"]
    for code in ("work()['x']", "work().x", "a, b = work()"):
        cell = shared.run(code)
        (error,) = cell.of("error")
        assert error["text"].endswith("hint: what makes a coroutine has to be awaited: (await call())\n"), (
            code
        )
    cell = shared.run("await work()")
    assert (cell.result, cell.of("warning")) == ("{}", [])
