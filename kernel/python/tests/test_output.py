"""Streams, raw descriptors, threads, limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Kernel


def test_streams_are_apart_and_in_order(shared: Kernel) -> None:
    cell = shared.run("import sys\nprint('a'); print('b', file=sys.stderr); print('c')")
    merged: list[list[str]] = []
    for event in cell.of("stream"):
        if not merged or merged[-1][0] != event["stream"]:
            merged.append([event["stream"], ""])
        merged[-1][1] += event["text"]
    assert merged == [["stdout", "a\n"], ["stderr", "b\n"], ["stdout", "c\n"]]


def test_lines_are_whole_and_flush_sends_what_is_not_one(shared: Kernel) -> None:
    shared.run("import os, sys\nos.path.exists('line') or os.mkfifo('line')")
    exec_id = shared.execute(
        "print('a line')\nprint('50%', end='', flush=True)\nopen('line').read()\nprint('!')"
    )
    shared.wait_text(exec_id, "50%")
    (shared.workspace / "line").open("w").close()
    shared.wait_state(exec_id)
    assert shared.cell(exec_id).text() == "a line\n50%!\n"


def test_interleaved_cells_of_two_clients_never_mix(shared: Kernel) -> None:
    # A function: names at the top of a cell are shared by all cells.
    shared.run(
        "import asyncio, sys\n"
        "async def talk(name, delay):\n"
        "    for i in range(8):\n"
        "        print(name, i, ws.client.id)\n"
        "        await asyncio.sleep(delay)\n"
        "        print(name, i, 'err', file=sys.stderr)\n"
        "    return name"
    )
    code = "await talk({name!r}, {delay})"
    for round_ in range(32):
        a = shared.execute(code.format(name="a", delay=0.001), client="one")
        b = shared.execute(code.format(name="b", delay=0.0015), client="two")
        for exec_id, name, client in ((a, "a", "one"), (b, "b", "two")):
            shared.wait_state(exec_id)
            cell = shared.cell(exec_id)
            assert cell.text() == "".join(f"{name} {i} {client}\n" for i in range(8)), round_
            assert cell.text("stderr") == "".join(f"{name} {i} err\n" for i in range(8))
            assert cell.result == repr(name)


def test_output_streams_while_the_cell_blocks_the_loop(shared: Kernel) -> None:
    shared.run("import os\nos.path.exists('hold') or os.mkfifo('hold')")
    exec_id = shared.execute("print('early')\nopen('hold').read()")
    shared.wait_text(exec_id, "early")
    (shared.workspace / "hold").open("w").close()
    assert shared.wait_state(exec_id)["state"] == "succeeded"


@pytest.mark.parametrize(
    "text", ["é\u20ac\U0001f600", "\ud800 lone", "\udc80\udcff", "a\x00b\x1b[31mred", "\r10%\r20%", "\u2028"]
)
def test_any_text_passes(shared: Kernel, text: str) -> None:
    cell = shared.run(f"import sys\nsys.stdout.write({text!r})\nsys.stderr.write({text!r});\n{text!r}")
    assert (cell.state, cell.text(), cell.text("stderr")) == ("succeeded", text, text)
    assert cell.result == repr(text)


def test_bytes_through_the_buffer(shared: Kernel) -> None:
    cell = shared.run("import sys\nsys.stdout.buffer.write('é'.encode() + b'\\xff\\n');")
    assert cell.text() == "é\ufffd\n"


def test_stream_manners(shared: Kernel) -> None:
    cell = shared.run(
        "import sys, io\n"
        "isinstance(sys.stdout, io.TextIOBase), sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.fileno(),"
        " sys.stderr.fileno(), sys.stdout.writable(), sys.stdout.write('')"
    )
    assert cell.result == "(True, False, 'utf-8', 1, 2, True, 0)"
    assert shared.run("sys.stdout.close(); sys.stdout.flush(); print('still')").text() == "still\n"
    assert shared.run("sys.stdout.write(5)").error.startswith("TypeError")


@pytest.mark.parametrize("fd", [1, 2])
def test_raw_descriptor(shared: Kernel, fd: int) -> None:
    for i in range(20):  # right from the start to the very end of a cell
        cell = shared.run(f"import os; os.write({fd}, b'raw {i}\\n');")
        assert cell.text("stdout" if fd == 1 else "stderr", raw=True) == f"raw {i}\n"


def test_children_inherit_the_captured_descriptors(shared: Kernel) -> None:
    cell = shared.run(
        "import subprocess, sys\n"
        "subprocess.run(['sh', '-c', 'echo out; echo err >&2'])\n"
        "subprocess.run(['echo', 'to stdout'], stdout=sys.stdout);"
    )
    assert cell.text(raw=True) == "out\nto stdout\n"
    assert cell.text("stderr", raw=True) == "err\n"


def test_c_output_comes_before_the_end(shared: Kernel) -> None:
    cell = shared.run("import ctypes; ctypes.CDLL(None).printf(b'from C\\n');")
    assert cell.text(raw=True) == "from C\n"


def test_raw_output_of_two_running_cells_goes_to_the_log(shared: Kernel) -> None:
    shared.run("import asyncio, os\nfirst = asyncio.Event()")
    waiting = shared.execute("await first.wait()")
    shared.wait_state(waiting, "running")
    cell = shared.run("os.write(1, b'whose is it\\n'); first.set()")
    shared.wait_state(waiting)
    assert cell.text() == ""
    assert shared.cell(waiting).text() == ""
    shared.run("1")
    assert "whose is it" in shared.log.read_text()


def test_raw_output_is_given_to_the_right_one_of_two_cells_in_turn(shared: Kernel) -> None:
    shared.run("import os")
    cells = [shared.execute(f"os.write(1, b'<{i}>');") for i in range(50)]
    for exec_id in cells:
        shared.wait_state(exec_id)
    assert [shared.cell(e).text() for e in cells] == [f"<{i}>" for i in range(50)]


def test_split_character_on_a_descriptor(shared: Kernel) -> None:
    cell = shared.run(
        "import os, time\nos.write(1, b'\\xe2\\x82'); time.sleep(0.02); os.write(1, b'\\xac'); os.write(1, b'\\xe2');"
    )
    assert cell.text() == "\u20ac\ufffd"


def test_threads_print_into_the_cell_that_started_them(shared: Kernel) -> None:
    shared.run("import asyncio, threading\nrelease = threading.Event()")
    code = (
        "def {0}():\n    release.wait(600)\n    print({0!r})\n"
        "thread_{0} = threading.Thread(target={0}); thread_{0}.start()\n"
        "await asyncio.to_thread(thread_{0}.join)"
    )
    a, b = shared.execute(code.format("a")), shared.execute(code.format("b"))
    shared.wait_state(b, "running")
    shared.run("release.set()")
    shared.wait_state(a)
    shared.wait_state(b)
    assert (shared.cell(a).text(), shared.cell(b).text()) == ("a\n", "b\n")


def test_executor_threads_print_into_the_cell_that_sent_the_work(shared: Kernel) -> None:
    shared.run("import asyncio\nloop = asyncio.get_running_loop()")
    for name in "ab":  # the second finds the first one's idle thread
        cell = shared.run(f"await loop.run_in_executor(None, print, {name!r})")
        assert cell.text() == f"{name}\n"


def test_output_after_the_end_goes_to_the_log(shared: Kernel) -> None:
    shared.run("import asyncio\nfree = asyncio.Event()")
    cell = shared.run(
        "async def late():\n    await free.wait()\n    print('too late')\ntask = asyncio.create_task(late())"
    )
    other = shared.run("free.set()\nawait task\nprint('mine')")
    assert (cell.text(), other.text()) == ("", "mine\n")
    assert shared.cell(cell.events[0]["exec_id"]).text() == ""
    assert "too late" in shared.log.read_text()


def test_unretrieved_task_exceptions_do_not_land_in_other_cells(shared: Kernel) -> None:
    shared.run(
        "import asyncio, gc\nasync def fails(): raise ValueError('lost')\nasyncio.create_task(fails()); None"
    )
    cell = shared.run("gc.collect(); await asyncio.sleep(0)\nprint('clean')")
    assert (cell.text(), cell.text("stderr")) == ("clean\n", "")
    assert "lost" in shared.log.read_text()


def test_long_text_is_cut_into_events(shared: Kernel) -> None:
    cell = shared.run("print('x' * 40_000, end='')\n'y' * 40_000")
    assert [len(e["text"]) for e in cell.of("stream")] == [16384, 16384, 7232]
    assert cell.result == "'" + "y" * 40_000 + "'"
    assert [(len(e["text"]), e.get("continues", False)) for e in cell.of("display")] == [
        (16384, False),
        (16384, True),
        (7234, True),
    ]


def test_small_prints_are_joined(shared: Kernel) -> None:
    cell = shared.run("for i in range(10_000): print(i)")
    assert cell.text() == "".join(f"{i}\n" for i in range(10_000))
    assert len(cell.of("stream")) < 2_000


def test_sixteen_mebibytes_of_prints(kernel: Kernel) -> None:
    cell = kernel.run(
        "import time\nline = 'x' * 80\nstarted = time.process_time()\n"
        "for i in range(207_000): print(line)\ntime.process_time() - started"
    )
    assert len(cell.text()) == 207_000 * 81
    assert not cell.of("truncated")
    assert float(cell.result or "") < 10  # CPU seconds of both threads; 0.6 on the machine of 2025


def test_output_limit(tmp_path: Path) -> None:
    limits = {"output_bytes": 10_000, "event_chars": 16384, "completed_tasks": 1}
    with Kernel(tmp_path, limits=limits) as k:
        cell = k.run(
            "print('é' * 4_000, end='')\nprint('x' * 4_000, end='')\nprint('more')\ndisplay('no')\n'last'"
        )
        assert cell.state == "succeeded"
        assert cell.text() == "é" * 4_000 + "x" * 2_000
        assert len(cell.of("truncated")) == 1
        assert not cell.of("display")
        cell = k.run("import os\nfor i in range(40): os.write(1, b'z' * 1000)")
        assert (cell.state, cell.text()) == ("succeeded", "z" * 10_000)
        assert len(cell.of("truncated")) == 1
        cell = k.run("class P:\n    def _repr_png_(self): return b'1' * 20_000\ndisplay(P())")
        assert (cell.state, len(cell.of("truncated"))) == ("succeeded", 1)
        assert not list((k.workspace / ".mypr" / "artifacts").rglob("*.png"))
        cell = k.run("raise ValueError('still told')")
        assert cell.error == "ValueError: still told"
        assert k.run("'next'").result == "'next'"


def test_forked_children_print_too(shared: Kernel) -> None:
    method = "fork"
    cell = shared.run(
        "import multiprocessing, os\n"
        f"ctx = multiprocessing.get_context({method!r})\n"
        "p = ctx.Process(target=print, args=('from the child',)); p.start(); p.join()\n"
        "p.exitcode"
    )
    assert cell.result == "0"
    assert "from the child\n" in cell.text()
    cell = shared.run(
        "pid = os.fork()\n"
        "if pid == 0:\n    print('child goes on')\n"
        "else:\n    print('status', os.waitpid(pid, 0)[1])"
    )
    assert "child goes on\n" in cell.text()
    assert "status 0\n" in cell.text()
    assert shared.run("1").result == "1"


def test_closing_the_descriptors_does_no_harm(kernel: Kernel) -> None:
    kernel.run("import os\nos.close(1); os.close(2)")
    assert kernel.run("print('python still prints')").text() == "python still prints\n"
    kernel.send({"type": "ping", "id": 1})
    kernel.wait_for(lambda m: m["type"] == "pong")


def test_finalizers_print_wherever_the_collector_runs_them(kernel: Kernel) -> None:
    """The garbage collector may run a user's __del__ at any point, in any thread, also in
    the middle of a print and in the kernel's own code."""
    cell = kernel.run(
        "import gc, sys\n"
        "class Noisy:\n"
        "    def __init__(self): self.me = self\n"
        "    def __del__(self): print('del', file=sys.stderr)\n"
        "def work():\n"
        "    for i in range(5000):\n"
        "        Noisy()\n"
        "        print(i)\n"
        "gc.collect(); gc.set_threshold(1)\n"
        "work()\n"
        "gc.set_threshold(700); gc.collect();"
    )
    assert cell.state == "succeeded"
    assert cell.text() == "".join(f"{i}\n" for i in range(5000))
    # Some are run by the I/O thread, which is nobody's: those are in the log.
    log = kernel.log.read_text()
    assert cell.text("stderr").count("del\n") + log.count("del\n") == 5000
    assert kernel.run("1").result == "1"


def test_streams_that_a_cell_leaves_replaced_are_taken_back(kernel: Kernel) -> None:
    cell = kernel.run("import io, sys\nsys.stdout = io.StringIO()\nprint('into it')")
    assert (cell.state, cell.text()) == ("succeeded", "")
    [warning] = cell.of("warning")
    assert (warning["code"], warning["text"][:10]) == ("stream_replaced", "sys.stdout")
    assert kernel.run("print('shown')").text() == "shown\n"
    cell = kernel.run("del sys.stdout\nsys.stderr = None\n1 / 0")
    assert cell.state == "failed"
    assert cell.of("warning")[0]["text"].startswith("sys.stdout and sys.stderr was")
    assert kernel.run("sys.stderr.write('shown')").text("stderr") == "shown"
    assert not kernel.run("print('shown')").of("warning")


def test_a_redirection_of_what_still_runs_is_let_alone(kernel: Kernel) -> None:
    kernel.run("import asyncio, contextlib, io")
    other = kernel.execute(
        "with contextlib.redirect_stdout(io.StringIO()) as kept:\n"
        "    go = asyncio.Event(); await go.wait(); print('kept')\nkept.getvalue()"
    )
    kernel.wait_state(other, "running")
    assert not kernel.run("1").of("warning")
    kernel.run("go.set()")
    kernel.wait_state(other)
    assert kernel.cell(other).result == "'kept\\n'"
    # A task redirects, and ends without a cell: the next cell finds the stream in place.
    kernel.run(
        "async def work(): sys.stdout = io.StringIO(); await go2.wait()\n"
        "import sys; go2 = asyncio.Event(); t = ws.tasks.start(work())\nawait asyncio.sleep(0)"
    )
    assert kernel.run("print('hidden'); go2.set(); await t").text() == ""
    assert kernel.run("print('shown')").text() == "shown\n"
