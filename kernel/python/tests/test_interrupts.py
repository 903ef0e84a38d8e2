"""A loop that does not turn, and stopping what holds it."""

from __future__ import annotations

import os
import time

import pytest
from harness import Kernel


def test_sleep_is_reported_and_interrupted(kernel: Kernel) -> None:
    started = time.time()
    exec_id = kernel.execute("import time\nprint('before')\ntime.sleep(600)")
    told = kernel.blocked(exec_id)
    assert told["where"] == "cell line 3"
    assert started - 0.01 <= float(str(told["since"])) <= time.time()
    kernel.wait_text(exec_id, "before")
    kernel.end(exec_id, "interrupted")
    cell = kernel.cell(exec_id)
    assert cell.state == "cancelled"
    assert cell.error == "KeyboardInterrupt: interrupted on request"
    assert cell.end["error_info"]["code"] == "cancelled"
    assert "line 3, in <module>" in cell.traceback
    kernel.wait_for(lambda m: m["type"] == "loop" and m["blocked"] is None)
    assert kernel.run("'alive'").result == "'alive'"


@pytest.mark.parametrize("first", [True, False], ids=["before asyncio", "with asyncio"])
def test_pure_python_loop(kernel: Kernel, first: bool) -> None:
    if not first:
        kernel.run("import asyncio\nawait asyncio.sleep(0)")
    exec_id = kernel.execute("def spin():\n    n = 0\n    while True:\n        n += 1\nspin()")
    told = kernel.blocked(exec_id)
    assert str(told["where"]).startswith("cell line ")
    assert str(told["where"]).endswith(", in spin")
    kernel.end(exec_id, "interrupted")
    assert kernel.cell(exec_id).state == "cancelled"
    assert kernel.run("1").result == "1"


def test_where_names_code_outside_of_the_cell(kernel: Kernel) -> None:
    (kernel.workspace / "slow.py").write_text("import time\n\ndef work():\n    time.sleep(600)\n")
    exec_id = kernel.execute("import slow\nslow.work()")
    assert kernel.blocked(exec_id)["where"] == "slow.py:4, in work (cell line 2)"
    kernel.end(exec_id, "interrupted")


def test_a_print_loop_is_interrupted(kernel: Kernel) -> None:
    for _ in range(5):
        exec_id = kernel.execute("while True: print('x', end='')")
        kernel.wait_text(exec_id, "x")
        kernel.end(exec_id, "interrupted")
        assert kernel.cell(exec_id).state == "cancelled"


def test_awaiting_cell_is_cancelled(kernel: Kernel) -> None:
    kernel.run("import asyncio")
    exec_id = kernel.execute("try:\n    await asyncio.sleep(600)\nfinally:\n    print('cleaned up')")
    other = kernel.execute("await asyncio.sleep(0.5); 'other'")
    kernel.wait_state(other, "running")
    kernel.end(exec_id, "cancelled")
    cell = kernel.cell(exec_id)
    assert (cell.state, cell.error, cell.text()) == (
        "cancelled",
        "CancelledError: interrupted on request",
        "cleaned up\n",
    )
    kernel.wait_state(other)
    assert kernel.cell(other).result == "'other'"


def test_queued_cell_is_dequeued_though_the_loop_is_blocked(kernel: Kernel) -> None:
    blocking = kernel.execute("import time; time.sleep(600)")
    queued = kernel.execute("ran = True")
    kernel.blocked(blocking)
    assert kernel.outcome(kernel.interrupt(queued)) == "dequeued"
    cell = kernel.cell(queued)
    assert [e["state"] for e in cell.of("state")] == ["cancelled"]
    kernel.end(blocking, "interrupted")
    assert kernel.run("'ran' in globals()").result == "False"


def test_only_the_target_is_hit(kernel: Kernel) -> None:
    kernel.run("import asyncio, time")
    waiting = kernel.execute("await asyncio.sleep(600)")
    kernel.wait_state(waiting, "running")
    blocking = kernel.execute("time.sleep(600)")
    kernel.blocked(blocking)
    # The target awaits behind a blocked loop: nothing can be done yet, and the blocker is let alone.
    assert kernel.outcome(kernel.interrupt(waiting)) == "pending"
    assert kernel.cell(blocking).state == ""
    kernel.end(blocking, "interrupted")
    assert kernel.wait_state(waiting)["state"] == "cancelled"


def test_without_a_name_it_means_the_blocking_cell_or_the_only_one(kernel: Kernel) -> None:
    kernel.run("import asyncio, time")
    assert kernel.outcome(kernel.interrupt(None)) == "finished"
    a = kernel.execute("await asyncio.sleep(600)")
    kernel.wait_state(a, "running")
    b = kernel.execute("await asyncio.sleep(0.01); time.sleep(600)")
    kernel.blocked(b)
    kernel.end(None, "interrupted")
    kernel.wait_state(b)
    kernel.end(None, "cancelled")
    kernel.wait_state(a)


def test_finished_and_unknown_cells(kernel: Kernel) -> None:
    cell = kernel.run("1")
    assert kernel.outcome(kernel.interrupt(cell.end["exec_id"])) == "finished"
    assert kernel.outcome(kernel.interrupt("f" * 32)) == "finished"
    assert kernel.run("2").result == "2"


def test_swallowed_interrupt_is_pending_then_repeated(kernel: Kernel) -> None:
    exec_id = kernel.execute(
        "import time\nn = 0\nwhile n < 3:\n    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n        n += 1\n        print('no', n)\n'gave in'"
    )
    kernel.blocked(exec_id)
    assert kernel.outcome(kernel.interrupt(exec_id)) == "pending"
    kernel.wait_text(exec_id, "no 1")
    kernel.interrupt(exec_id)  # raises again and again
    kernel.wait_state(exec_id)
    cell = kernel.cell(exec_id)
    assert (cell.state, cell.text(), cell.result) == ("succeeded", "no 1\nno 2\nno 3\n", "'gave in'")


def test_swallowed_cancellation_is_pending(kernel: Kernel) -> None:
    exec_id = kernel.execute(
        "import asyncio\ntry:\n    await asyncio.sleep(600)\nexcept asyncio.CancelledError:\n    pass\nawait asyncio.sleep(600)"
    )
    kernel.wait_state(exec_id, "running")
    kernel.run("1")
    assert kernel.outcome(kernel.interrupt(exec_id)) == "pending"
    kernel.end(exec_id, "cancelled")


def test_child_task_that_blocks(kernel: Kernel) -> None:
    kernel.run("import asyncio")  # which may take so long that it blocks
    exec_id = kernel.execute(
        "import asyncio, time\nasync def child():\n    time.sleep(600)\nt = asyncio.create_task(child())\nawait asyncio.sleep(600)"
    )
    assert kernel.blocked(exec_id)["where"] == "cell line 3, in child"
    kernel.interrupt(exec_id)
    assert kernel.wait_state(exec_id)["state"] == "cancelled"
    assert kernel.run("1").result == "1"


def test_interrupt_in_a_subprocess_run(kernel: Kernel) -> None:
    exec_id = kernel.execute("import subprocess\nsubprocess.run(['sleep', '600'])")
    kernel.blocked(exec_id)
    kernel.end(exec_id, "interrupted")


def test_handler_taken_by_a_cell_is_taken_back(kernel: Kernel) -> None:
    kernel.run("import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN);")
    exec_id = kernel.execute("time.sleep(600)")
    kernel.blocked(exec_id)
    kernel.end(exec_id, "interrupted")


def test_sigint_from_outside_is_ignored(kernel: Kernel) -> None:
    os.mkfifo(kernel.workspace / "gate")
    exec_id = kernel.execute("open('gate').read()\n'read'")
    kernel.blocked(exec_id)
    kernel.process.send_signal(2)
    (kernel.workspace / "gate").open("w").close()
    kernel.wait_state(exec_id)
    assert kernel.cell(exec_id).result == "'read'"


def test_blocked_is_told_again_to_a_new_manager(kernel: Kernel) -> None:
    exec_id = kernel.execute("import time\ntime.sleep(600)")
    kernel.blocked(exec_id)
    kernel.drop()
    kernel.messages.clear()
    kernel.connect()
    kernel.blocked(exec_id)
    kernel.interrupt(exec_id)
    kernel.wait_state(exec_id)


def test_a_short_turn_is_not_reported(kernel: Kernel) -> None:
    kernel.run("import asyncio, time\nawait asyncio.sleep(0)")
    cell = kernel.run(
        "longest = 0\n"
        "for _ in range(20):\n"
        "    began = time.monotonic()\n    time.sleep(0.05)\n    await asyncio.sleep(0.001)\n"
        "    longest = max(longest, time.monotonic() - began)\n"
        "longest"
    )
    kernel.send({"type": "ping", "id": 3})
    kernel.wait_for(lambda m: m["type"] == "pong" and m["id"] == 3)
    told = [m for m in kernel.messages if m["type"] == "loop" and m["blocked"] is not None]
    # A machine that stops for so long makes a long turn of a short one.
    ours = [m for m in told if m["blocked"]["exec_id"] == cell.events[0]["exec_id"]]
    assert not ours or float(cell.result or "") > 0.4


@pytest.mark.parametrize(
    "deaf",
    [
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "signal.signal(signal.SIGINT, lambda *_: None)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})",
    ],
)
def test_a_cell_that_is_deaf_to_sigint_is_interrupted(kernel: Kernel, deaf: str) -> None:
    for work in ("while True: pass", "time.sleep(600)"):
        exec_id = kernel.execute(f"import signal, time\n{deaf}\n{work}")
        kernel.blocked(exec_id)
        kernel.end(exec_id, "interrupted")
        assert kernel.cell(exec_id).state == "cancelled"
    assert (
        kernel.run("signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT}); 1 + 1").state == "succeeded"
    )
    exec_id = kernel.execute("time.sleep(600)")
    kernel.blocked(exec_id)
    kernel.end(exec_id, "interrupted")
