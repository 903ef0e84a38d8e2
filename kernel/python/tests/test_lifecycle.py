"""Readiness, watchdog, signals, the end."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from harness import Kernel


def notifications(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(path))
    sock.settimeout(20)
    return sock


def test_ready_before_any_manager_is_there(tmp_path: Path) -> None:
    sock = notifications(tmp_path / "notify")
    with sock, Kernel(tmp_path, env={"NOTIFY_SOCKET": str(tmp_path / "notify")}, connect=False) as k:
        assert sock.recv(1000).decode() == "READY=1\nSTATUS=ready"
        k.connect()
        assert k.run("import os; os.environ.get('NOTIFY_SOCKET')").result is None


def test_watchdog_is_fed_while_python_blocks(tmp_path: Path) -> None:
    sock = notifications(tmp_path / "notify")
    env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    with sock, Kernel(tmp_path, env=env) as k:
        exec_id = k.execute("import time\ntime.sleep(30)")
        k.wait_for(lambda m: m["type"] == "loop")
        got = [sock.recv(1000).decode() for _ in range(12)]
        assert f"STATUS=blocked by {exec_id} at cell line 2" in got
        assert got.count("WATCHDOG=1") >= 9
        before = time.monotonic()
        while sock.recv(1000) != b"WATCHDOG=1":
            pass
        assert time.monotonic() - before < 1
        k.interrupt(exec_id)
        k.wait_state(exec_id)


def test_sigterm_ends_orderly(kernel: Kernel) -> None:
    kernel.run("import atexit, asyncio\natexit.register(open, 'at exit', 'w');")
    waiting = kernel.execute("try:\n    await asyncio.sleep(60)\nfinally:\n    print('cleanup')")
    kernel.wait_state(waiting, "running")
    kernel.process.send_signal(signal.SIGTERM)
    assert kernel.process.wait(10) == 0
    state = kernel.wait_state(waiting)
    assert state["state"] == "cancelled"
    assert "told to stop" in state["error"]
    assert kernel.cell(waiting).text() == "cleanup\n"
    assert kernel.cell(waiting).traceback == ""
    assert (kernel.workspace / "at exit").exists()


def test_sigterm_ends_a_blocking_cell(kernel: Kernel) -> None:
    exec_id = kernel.execute("import time\ntime.sleep(60)")
    queued = kernel.execute("2")
    kernel.wait_for(lambda m: m["type"] == "loop")
    started = time.monotonic()
    kernel.process.send_signal(signal.SIGTERM)
    assert kernel.process.wait(10) == 0
    assert time.monotonic() - started < 3
    assert kernel.wait_state(exec_id)["state"] == "cancelled"
    assert kernel.wait_state(queued)["state"] == "cancelled"


def test_sigterm_of_an_idle_kernel_before_its_first_cell(tmp_path: Path) -> None:
    with Kernel(tmp_path) as k:
        k.process.send_signal(signal.SIGTERM)
        assert k.process.wait(10) == 0


def test_sigterm_is_bounded_when_a_cell_will_not_end(kernel: Kernel) -> None:
    kernel.run("import asyncio")
    exec_id = kernel.execute(
        "while True:\n    try:\n        await asyncio.sleep(60)\n    except BaseException:\n        print('never')"
    )
    kernel.wait_state(exec_id, "running")
    kernel.process.send_signal(signal.SIGTERM)
    assert kernel.process.wait(15) == 0
    assert kernel.wait_state(exec_id)["state"] == "cancelled"


def test_sigterm_does_not_wait_for_threads(kernel: Kernel) -> None:
    kernel.run("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()")
    kernel.process.send_signal(signal.SIGTERM)
    assert kernel.process.wait(10) == 0


def test_kernel_outlives_its_manager(kernel: Kernel) -> None:
    kernel.run("x = 5")
    kernel.drop()
    hello = kernel.connect()
    assert hello["pid"] == kernel.process.pid
    assert kernel.run("x").result == "5"


def test_no_descriptor_is_left_open(kernel: Kernel) -> None:
    kernel.run("import asyncio\nawait asyncio.sleep(0)")
    kernel.wait_for(lambda m: m["type"] == "mode")

    def count() -> int:
        return len(os.listdir(f"/proc/{kernel.process.pid}/fd"))

    kernel.run("1/0")
    before = count()
    for i in range(20):
        kernel.run(f"print({i})\ndisplay({i})\n1/0")
        kernel.drop()
        kernel.connect()
    kernel.run("1")
    assert count() == before


def test_children_get_no_descriptor_of_the_kernel(kernel: Kernel) -> None:
    kernel.run("import asyncio, subprocess, os\nawait asyncio.sleep(0)")
    cell = kernel.run(
        "subprocess.run(['ls', '/proc/self/fd'], close_fds=False, stdout=subprocess.PIPE).stdout.split()"
    )
    assert cell.result is not None
    assert set(eval(cell.result)) <= {b"0", b"1", b"2", b"3"}


def test_a_child_of_a_child_keeps_what_is_its_own(kernel: Kernel) -> None:
    """A daemon that forks twice, and workers of a worker: their descriptors have the numbers
    that the first child let go of, and their signal handlers are their own."""
    cell = kernel.run(
        "import os, signal\n"
        "def child():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "    mine = [os.open('/dev/null', os.O_RDONLY) for _ in range(20)]\n"
        "    if pid := os.fork():\n"
        "        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "    for fd in mine: os.fstat(fd)\n"
        "    return 3 if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else 0\n"
        "if pid := os.fork():\n"
        "    print('status', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "else:\n"
        "    status = 9\n"
        "    try:\n"
        "        status = child()\n"
        "    finally:\n"
        "        os._exit(status)"
    )
    assert "status 0\n" in cell.text()
    assert "Error" not in cell.text()
