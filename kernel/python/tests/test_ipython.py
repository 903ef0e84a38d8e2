"""With IPython where it is installed, and a clear word where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Kernel


@pytest.fixture
def ipython(shared: Kernel, has_ipython: bool) -> Kernel:
    mode = shared.wait_for(lambda m: m["type"] == "mode")
    if has_ipython:
        assert (mode["mode"], mode["reason"]) == ("ipython", "")
    else:
        assert mode["mode"] == "plain"
        assert "IPython is not installed in " in mode["reason"]
    return shared


@pytest.mark.parametrize("code", ["%pwd", "!echo hi", "len?", "x = !echo hi", "%%time\n1"])
def test_without_ipython_its_syntax_is_refused_with_the_reason(
    ipython: Kernel, has_ipython: bool, code: str
) -> None:
    cell = ipython.run(code)
    if has_ipython:
        assert (cell.state, cell.error) == ("succeeded", "")
        return
    assert cell.state == "failed"
    assert cell.error.startswith("SyntaxError: this cell uses IPython syntax")
    assert "IPython is not installed in " in cell.error


def test_a_cell_that_needs_it_waits_for_it(tmp_path: Path, has_ipython: bool) -> None:
    with Kernel(tmp_path) as k:
        exec_id = k.execute("%pwd")
        plain = k.execute("'not delayed'")
        k.wait_state(plain)
        k.wait_state(exec_id)
        assert k.cell(plain).result == "'not delayed'"
        if has_ipython:
            assert k.cell(exec_id).result == repr(str(k.workspace))


@pytest.mark.parametrize(
    ("code", "text", "result"),
    [
        ("!echo out; echo err >&2", "out\nerr\n", None),
        ("files = !echo a b\nfiles", "", "['a b']"),
        ("n = 3\n!echo $n {n + 1}", "3 4\n", None),
        ("%%time\nprint('timed')\n5", None, "5"),
        ("%%capture out\nprint('hidden')", "", None),
        ("out.stdout", "", "'hidden\\n'"),
        ("%%bash\necho from bash", "from bash\n", None),
        ("5 % 3", "", "2"),
        ("x = (17\n     % 5)\nx", "", "2"),
        ("[1, 2]", "", "[1, 2]"),
        ("get_ipython().user_ns is globals()", "", "True"),
        ("%precision 2\n3.14159", "", "3.14"),
        ("%precision %r\n3.14159", "", "3.14159"),
        ("import asyncio\nawait asyncio.sleep(0)\n!echo after", "after\n", None),
    ],
)
def test_ipython_cells(
    ipython: Kernel, has_ipython: bool, code: str, text: str | None, result: str | None
) -> None:
    cell = ipython.run(code)
    if has_ipython:
        assert (cell.state, cell.error) == ("succeeded", "")
        assert text is None or cell.text() == text
        assert cell.result == result


def test_pip_says_how_packages_come(ipython: Kernel, has_ipython: bool) -> None:
    if not has_ipython:
        return
    ipython.run("import importlib.util, sys; real, prefix = importlib.util.find_spec, sys.prefix")
    ipython.run("importlib.util.find_spec = lambda name: None; sys.prefix = '/nowhere'")
    try:
        cell = ipython.run("%pip install six")
        assert cell.error.startswith("ModuleNotFoundError: this environment has no pip")
        assert "await ws.packages.add(" in cell.error
        shown = "".join(e["text"] for e in ipython.run("!pip --no-such-option").of("stream"))
        assert shown.startswith("warning: this pip is of another Python") and "ws.packages.add(" in shown
    finally:
        ipython.run("importlib.util.find_spec, sys.prefix = real, prefix")


def test_help_is_shown(ipython: Kernel, has_ipython: bool) -> None:
    cell = ipython.run("len?")
    if has_ipython:
        assert "Return the number of items" in "".join(e["text"] for e in cell.of("display"))
        assert "\x1b" not in str(cell.events)


def test_ipython_display_goes_to_its_cell(ipython: Kernel, has_ipython: bool) -> None:
    cell = ipython.run("from IPython.display import display as show, HTML\nshow(HTML('<b>x</b>'), 7)")
    if not has_ipython:
        assert cell.error.startswith("ModuleNotFoundError")
        return
    first, second = cell.of("display")
    assert [f["mime"] for f in first["files"]] == ["text/html"]
    assert second["text"] == "7"


def test_formatters_of_scalars(ipython: Kernel, has_ipython: bool) -> None:
    if not has_ipython:
        return
    ipython.run("formatters = get_ipython().display_formatter.formatters")
    ipython.run("formatters['text/html'].for_type(int, '<b>{}</b>'.format)")
    try:
        (shown,) = ipython.run("7").of("display")
        assert shown["text"] == "7"
        assert [f["mime"] for f in shown["files"]] == ["text/html"]
    finally:
        ipython.run("formatters['text/html'].pop(int); formatters")
    (shown,) = ipython.run("7").of("display")
    assert (shown["text"], shown["files"]) == ("7", [])
    # The printers of a formatter that was asked before may be replaced as a whole.
    ipython.run("plain = formatters['text/plain']; own = plain.type_printers")
    ipython.run("plain.type_printers = {**own, int: lambda n, p, cycle: p.text('seven')}")
    try:
        (shown,) = ipython.run("7").of("display")
        assert shown["text"] == "seven"
    finally:
        ipython.run("plain.type_printers = own")
    (shown,) = ipython.run("7").of("display")
    assert shown["text"] == "7"


def test_interrupted_command_is_ended(ipython: Kernel, has_ipython: bool) -> None:
    if not has_ipython:
        return
    exec_id = ipython.execute("!echo $$; exec sleep 60")
    pid = int(ipython.wait_for(lambda m: m.get("exec_id") == exec_id and m.get("event") == "stream")["text"])
    ipython.end(exec_id, "interrupted")
    assert not Path(f"/proc/{pid}").exists()


def test_no_history_file_and_no_names_left(ipython: Kernel, has_ipython: bool) -> None:
    assert not list(ipython.workspace.rglob("*.sqlite"))
    assert ipython.run("'In' in globals() or 'Out' in globals()").result == "False"


def test_syntax_errors_stay_as_they_are(ipython: Kernel) -> None:
    cell = ipython.run("b = = 2")
    assert cell.error.startswith("SyntaxError: invalid syntax (<cell ")
    assert "    b = = 2" in cell.traceback
    cell = ipython.run("for i in range(3):\n\tprint(i)\n        print(i)")  # IPython fails too
    assert cell.error.startswith("TabError: inconsistent use of tabs and spaces in indentation (<cell ")
    assert "transform_cell" not in cell.traceback


def test_exit_of_ipython_ends_the_cell(ipython: Kernel, has_ipython: bool) -> None:
    """A cell may meet it, in the moment before its names are taken out again."""
    if not has_ipython:
        assert ipython.run("exit(3)").error == "SystemExit: 3"
        return
    assert ipython.run("get_ipython().exiter()").state == "succeeded"
    assert ipython.run("get_ipython().exiter(3)").error == "SystemExit: 3"
