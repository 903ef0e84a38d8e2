"""Cells: order, results, errors, identity."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from harness import DEADLINE, PYTHON, Kernel


def test_hello_describes_the_process(kernel: Kernel) -> None:
    assert kernel.connection is not None
    hello = kernel.connection.hello
    assert hello is not None
    assert hello["protocol"] == 1
    assert hello["generation"] == kernel.generation
    assert hello["pid"] == kernel.process.pid
    assert (hello["first_seq"], hello["next_seq"], hello["cells"], hello["seen"]) == (1, 1, [], [])
    assert hello["mode"] == "plain"
    assert not hello["mode_reason"]  # IPython may come: nobody is told that there is none


def test_first_cell_waits_for_no_import(tmp_path: Path) -> None:
    """What a start may load, beyond what the interpreter does by itself."""
    bare = subprocess.run(
        [PYTHON, "-c", "import sys; print(sorted(sys.modules))"], capture_output=True, text=True
    )
    slow = {"asyncio", "json", "re", "enum", "typing", "socket", "threading", "inspect", "pathlib", "ast"}
    slow |= {
        "dataclasses",
        "traceback",
        "logging",
        "subprocess",
        "selectors",
        "signal",
        "IPython",
    }
    for attempt in range(5):  # one that has waited for 0.2 s makes use of the time: a busy machine is late
        directory = tmp_path / str(attempt)
        directory.mkdir()
        with Kernel(directory) as kernel:
            cell = kernel.run("import sys\nprint(sorted(sys.modules))\n6 * 7")
        assert (cell.state, cell.result) == ("succeeded", "42")
        loaded = set(eval(cell.text())) - set(eval(bare.stdout))
        if not loaded & slow:
            break
    assert sorted(loaded & slow) == []


def test_warnings_of_the_compiler_are_said_once_in_the_cell(kernel: Kernel) -> None:
    for _ in range(2):  # the first cell, and one with the loop
        cell = kernel.run("import sys\nx = 1 is 1\nimport asyncio; await asyncio.sleep(0)")
        assert cell.text("stderr").count("SyntaxWarning") == 1


def test_first_cell_that_imports_asyncio_is_a_task_of_a_running_loop(kernel: Kernel) -> None:
    cell = kernel.run(
        "import asyncio\n"
        "async def work():\n    await asyncio.sleep(0); print('child'); return 5\n"
        "task = asyncio.create_task(work())\n"
        "asyncio.current_task().get_name().startswith('cell ') and asyncio.get_running_loop().is_closed()"
    )
    assert (cell.state, cell.result) == ("succeeded", "False")
    cell = kernel.run("await task, asyncio.get_running_loop() is task.get_loop()")
    assert (cell.state, cell.result) == ("succeeded", "(5, True)")


def test_first_cell_that_awaits(kernel: Kernel) -> None:
    cell = kernel.run("import asyncio\nawait asyncio.sleep(0.01)\nx = await asyncio.sleep(0, 3)\nx")
    assert (cell.state, cell.result) == ("succeeded", "3")


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("1+1", "2"),
        ("x = 5", None),
        ("x", "5"),
        ("x;", None),
        ("x  ;  # comment", None),
        ("(x\n);", None),
        ("x # ; not this one", "5"),
        ("'é;'", "'é;'"),
        ("None", None),
        ("a = 1\na + 1", "2"),
        ("def f():\n    return 7\n\nf()\n", "7"),
        ("[y async for y in __import__('mypr_test_none', fromlist=['x'])] if False else 1", "1"),
        ("  indented = 4\n  indented", "4"),
        ("", None),
        ("# nothing", None),
        ("'''a\nb'''", "'a\\nb'"),
    ],
)
def test_last_expression(shared: Kernel, code: str, result: str | None) -> None:
    cell = shared.run(code)
    assert (cell.state, cell.error, cell.result) == ("succeeded", "", result)


def test_underscore_is_the_last_result_unless_taken(shared: Kernel) -> None:
    shared.run("41")
    assert shared.run("_ + 1").result == "42"
    shared.run("_ = 'mine'")
    shared.run("7")
    assert shared.run("_").result == "'mine'"
    shared.run("del _")


def test_states_begin_with_running_and_end_once(shared: Kernel) -> None:
    cell = shared.run("print('x')")
    assert [e["state"] for e in cell.of("state")] == ["running", "succeeded"]
    seqs = [e["seq"] for e in cell.events]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


def test_starts_in_the_order_of_submission(shared: Kernel) -> None:
    shared.run("import asyncio\norder = []")
    cells = [shared.execute(f"order.append({i}); await asyncio.sleep(0.01)") for i in range(20)]
    for exec_id in cells:
        assert shared.wait_state(exec_id)["state"] == "succeeded"
    assert shared.run("order").result == str(list(range(20)))


def test_a_cell_behind_a_blocked_loop_stays_queued(shared: Kernel) -> None:
    shared.run("import time, os\nos.mkfifo('gate')")
    first = shared.execute("open('gate').read()")
    shared.wait_state(first, "running")
    second = shared.execute("'second'")
    shared.send({"type": "ping", "id": 99})
    shared.wait_for(lambda m: m["type"] == "pong" and m["id"] == 99)
    assert shared.cell(second).events == []
    (shared.workspace / "gate").open("w").close()
    assert shared.wait_state(second)["state"] == "succeeded"


def test_exception(shared: Kernel) -> None:
    cell = shared.run("def work():\n    return 1 / 0\n\nprint('before')\nwork()")
    assert cell.state == "failed"
    assert cell.error == "ZeroDivisionError: division by zero"
    assert cell.end["error_info"] == {
        "code": "python_exception",
        "type": "ZeroDivisionError",
        "message": "division by zero",
    }
    assert "error_truncated" not in cell.end
    assert cell.text() == "before\n"
    lines = cell.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert re.match(r'  File "<cell [0-9a-f]{8}>", line 5, in <module>', lines[1])
    assert "    work()" in lines
    assert "    return 1 / 0" in lines
    assert lines[-1] == cell.error
    assert "mypr_kernel" not in cell.traceback
    assert "\x1b" not in cell.traceback


def test_chained_exceptions_and_awaited_ones_show_user_frames_only(shared: Kernel) -> None:
    cell = shared.run(
        "import asyncio\n"
        "async def inner():\n    raise KeyError('k')\n"
        "try:\n    await inner()\n"
        "except KeyError as e:\n    raise ValueError('outer') from e"
    )
    assert cell.error == "ValueError: outer"
    assert "KeyError: 'k'" in cell.traceback
    assert "direct cause" in cell.traceback
    assert "mypr_kernel" not in cell.traceback


def test_function_of_an_earlier_cell_shows_its_source(shared: Kernel) -> None:
    shared.run("def fails(n):\n    raise RuntimeError('from here')  # the line")
    cell = shared.run("fails(1)")
    assert "raise RuntimeError('from here')  # the line" in cell.traceback
    assert shared.run("import inspect\ninspect.getsource(fails)").result is not None


def test_syntax_error(shared: Kernel) -> None:
    cell = shared.run("a = 1\nb = = 2")
    assert cell.state == "failed"
    assert cell.error.startswith("SyntaxError: invalid syntax (<cell ")
    lines = cell.traceback.splitlines()
    assert lines[0].startswith('  File "<cell ')
    assert "    b = = 2" in lines[1]
    assert lines[2].strip() == "^"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x = 1\x00", "cannot contain null bytes"),
        ("return 5", "SyntaxError: 'return' outside function"),
        ("yield 5", "SyntaxError: 'yield' outside function"),
        ("'\ud800'", "UnicodeEncodeError: "),
        ("raise Exception", "Exception"),
        ("raise KeyError('a')", "KeyError: 'a'"),
        ("import json; json.loads('{')", "json.decoder.JSONDecodeError: "),
        ("(" * 300, "too many nested parentheses"),
    ],
)
def test_what_fails_and_how(shared: Kernel, code: str, error: str) -> None:
    cell = shared.run(code)
    assert cell.state == "failed"
    assert error in cell.error
    assert shared.run("1").result == "1"


def test_error_summary_is_bounded(shared: Kernel) -> None:
    cell = shared.run("raise ValueError('é' * 5000)")
    assert len(cell.error.encode()) <= 1024
    assert cell.error.startswith("ValueError: éé")
    assert cell.end["error_truncated"] is True
    assert len(json.dumps(cell.end["error_info"]["message"], ensure_ascii=False).encode()) <= 1030
    assert "é" * 5000 in cell.traceback


def test_huge_traceback_loses_its_middle(shared: Kernel) -> None:
    cell = shared.run("raise ValueError('x' * 1_000_000)")
    assert len(cell.traceback) < 70_000
    assert "characters left out" in cell.traceback


def test_recursion_is_folded(shared: Kernel) -> None:
    cell = shared.run("def f(): f()\nf()")
    assert cell.error.startswith("RecursionError")
    assert len(cell.traceback) < 5_000
    assert shared.run("1").result == "1"


def test_exception_with_a_broken_str(shared: Kernel) -> None:
    cell = shared.run("class E(Exception):\n    def __str__(self): raise OSError('no')\nraise E")
    assert cell.state == "failed"
    assert "E" in cell.error
    assert shared.run("1").result == "1"


def test_exception_whose_str_ends_the_program(shared: Kernel) -> None:
    cell = shared.run("class E(Exception):\n    def __str__(self): raise SystemExit(1)\nraise E")
    assert cell.state == "failed"
    assert shared.run("1").result == "1"


def test_asyncio_run_says_what_to_do(shared: Kernel) -> None:
    cell = shared.run("import asyncio\nasync def main(): pass\nasyncio.run(main())")
    assert cell.state == "failed"
    assert "await main()" in cell.traceback


@pytest.mark.parametrize(
    ("code", "state", "error"),
    [
        ("raise SystemExit", "succeeded", ""),
        ("raise SystemExit(0)", "succeeded", ""),
        ("import sys; sys.exit(3)", "failed", "SystemExit: 3"),
        ("exit()", "succeeded", ""),
        ("import sys; sys.exit('reason')", "failed", "SystemExit: reason"),
        ("raise KeyboardInterrupt", "failed", "KeyboardInterrupt"),
        ("raise GeneratorExit", "failed", "GeneratorExit"),
        ("raise BaseException('b')", "failed", "BaseException: b"),
        ("import asyncio; raise asyncio.CancelledError", "cancelled", "CancelledError"),
        (
            "import asyncio; asyncio.current_task().cancel(); await asyncio.sleep(1)",
            "cancelled",
            "CancelledError",
        ),
    ],
)
def test_exceptions_that_end_programs_end_only_the_cell(
    shared: Kernel, code: str, state: str, error: str
) -> None:
    cell = shared.run(code)
    assert (cell.state, cell.error) == (state, error)
    assert shared.run("2").result == "2"


def test_child_tasks_that_end_programs_leave_the_loop_alone(shared: Kernel) -> None:
    cell = shared.run(
        "import asyncio, sys\n"
        "async def leave(): sys.exit(5)\n"
        "async def stop(): raise KeyboardInterrupt\n"
        "a, b = asyncio.create_task(leave()), asyncio.create_task(stop())\n"
        "await asyncio.sleep(0.01)\n"
        "a.exception(), b.exception()"
    )
    assert (cell.state, cell.result) == ("succeeded", "(SystemExit(5), KeyboardInterrupt())")


def test_os_exit_really_kills(kernel: Kernel) -> None:
    kernel.execute("import os; os._exit(7)")
    assert kernel.process.wait(DEADLINE) == 7


@pytest.mark.parametrize("code", ["input('name? ')", "import sys; sys.stdin.readline()", "for line in __import__('sys').stdin: pass",
                                  "import getpass; getpass.getpass()", "breakpoint()"])  # fmt: skip
def test_input_fails_at_once_and_says_why(shared: Kernel, code: str) -> None:
    cell = shared.run(code)
    assert cell.state == "failed"
    assert "nobody can type" in cell.error
    assert (
        shared.run("issubclass(type(__import__('sys').stdin).read and EOFError, Exception)").result == "True"
    )


def test_fd_0_is_empty(shared: Kernel) -> None:
    assert shared.run("import os; os.read(0, 10)").result == "b''"


def test_identity_follows_into_child_tasks(shared: Kernel) -> None:
    shared.run(
        "import asyncio\nasync def who(): await asyncio.sleep(0); return ws.client.id, ws.client.connection_id"
    )
    cell = shared.run(
        "await asyncio.create_task(who()), await asyncio.gather(who()), await asyncio.to_thread(lambda: ws.client.id)",
        client="brave-fox",
        connection="d" * 32,
    )
    pair = ("brave-fox", "d" * 32)
    assert eval(cell.result or "") == (pair, [pair], "brave-fox")


def test_workspace_object(shared: Kernel) -> None:
    assert shared.run("ws.workspace").result == f"PosixPath('{shared.workspace}')"
    assert shared.run("ws.root").result == f"PosixPath('{shared.workspace}/.mypr')"
    shared.run("ws.local['k'] = 1", client="one")
    assert shared.run("ws.local", client="one").result == "{'k': 1}"
    assert shared.run("ws.local", client="two").result == "{}"


def test_names_of_cells_are_those_of_main(shared: Kernel) -> None:
    cell = shared.run(
        "import pickle, sys\nclass Point: pass\n"
        "type(pickle.loads(pickle.dumps(Point()))) is Point, __name__, sys.modules['__main__'].Point is Point"
    )
    assert cell.result == "(True, '__main__', True)"


def test_path_and_directory(shared: Kernel) -> None:
    (shared.workspace / "mine.py").write_text("value = 5\n")
    (shared.workspace / "types.py").write_text("raise RuntimeError('shadowed')\n")
    assert shared.run("import mine; mine.value").result == "5"
    assert shared.run("import sys; sys.path[0]").result == repr(str(shared.workspace / ".mypr" / "lib"))
    assert shared.run("import types; types.__file__.startswith(sys.prefix) or types.__file__.startswith(sys.base_prefix)").result == "True"  # fmt: skip
    assert shared.run("import os; os.getcwd()").result == repr(str(shared.workspace))


def test_environment_asks_nobody(shared: Kernel) -> None:
    cell = shared.run(
        "import os\n{k: os.environ.get(k) for k in ('GIT_TERMINAL_PROMPT', 'PAGER', 'INVOCATION_ID')}"
    )
    assert cell.result == "{'GIT_TERMINAL_PROMPT': '0', 'PAGER': 'cat', 'INVOCATION_ID': None}"


def test_ten_thousand_cells_leave_nothing(kernel: Kernel) -> None:
    kernel.run("import gc, asyncio")
    kernel.wait_for(lambda m: m["type"] == "mode")  # IPython is loaded, if ever

    def measure() -> tuple[int, int, int]:
        cell = kernel.run(
            "gc.collect()\n"
            "(sum(type(o).__name__ == 'Cell' for o in gc.get_objects()), len(gc.get_objects()),\n"
            " int(open('/proc/self/statm').read().split()[1]) * 4096)"
        )
        assert cell.result is not None
        a, b, c = eval(cell.result)
        return a, b, c

    def batch(n: int) -> None:
        last = ""
        for i in range(n):
            last = kernel.execute(f"y = {i}\nprint(y)\n1/0" if i % 10 == 0 else f"{i}")
        kernel.wait_state(last)
        with kernel.changed:
            kernel.messages.clear()

    batch(1000)
    cells, objects, _ = measure()
    rss = measure()[2]
    for _ in range(9):
        batch(1000)
    cells_after, objects_after, rss_after = measure()
    assert cells_after <= cells + 2
    assert objects_after < objects + 500
    assert rss_after < rss + (8 << 20)


def test_kernel_survives_a_deleted_directory(tmp_path: Path) -> None:
    with Kernel(tmp_path) as k:
        k.run("import os, shutil; shutil.rmtree(os.getcwd())")
        assert k.run("import asyncio, wave\nawait asyncio.sleep(0)\n3").result == "3"
        assert k.run("1/0").error == "ZeroDivisionError: division by zero"
