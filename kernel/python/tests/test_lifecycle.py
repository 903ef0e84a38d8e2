"""Readiness, watchdog, signals, the end."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from harness import DEADLINE, Kernel


def notifications(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(path))
    sock.settimeout(DEADLINE)
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
        exec_id = k.execute("import time\ntime.sleep(600)")
        while sock.recv(1000).decode() != f"STATUS=blocked by {exec_id} at cell line 2":
            pass
        assert [sock.recv(1000) for _ in range(9)] == [b"WATCHDOG=1"] * 9
        k.interrupt(exec_id)
        k.wait_state(exec_id)


def test_sigterm_ends_orderly(kernel: Kernel) -> None:
    kernel.run("import atexit, asyncio\natexit.register(open, 'at exit', 'w');")
    waiting = kernel.execute("try:\n    await asyncio.sleep(600)\nfinally:\n    print('cleanup')")
    kernel.wait_state(waiting, "running")
    kernel.process.send_signal(signal.SIGTERM)
    assert kernel.process.wait(DEADLINE) == 0
    state = kernel.wait_state(waiting)
    assert state["state"] == "cancelled"
    assert "told to stop" in state["error"]
    assert kernel.cell(waiting).text() == "cleanup\n"
    assert kernel.cell(waiting).traceback == ""
    assert (kernel.workspace / "at exit").exists()


def test_sigterm_ends_a_blocking_cell(kernel: Kernel) -> None:
    exec_id = kernel.execute("import time\ntime.sleep(600)")
    queued = kernel.execute("2")
    kernel.blocked(exec_id)
    kernel.process.send_signal(signal.SIGTERM)
    assert kernel.process.wait(DEADLINE) == 0
    assert kernel.wait_state(exec_id)["state"] == "cancelled"
    assert kernel.wait_state(queued)["state"] == "cancelled"


def test_sigterm_of_an_idle_kernel_before_its_first_cell(tmp_path: Path) -> None:
    with Kernel(tmp_path) as k:
        k.process.send_signal(signal.SIGTERM)
        assert k.process.wait(DEADLINE) == 0


def test_sigterm_is_bounded_when_a_cell_will_not_end(kernel: Kernel) -> None:
    kernel.run("import asyncio")
    exec_id = kernel.execute(
        "while True:\n    try:\n        await asyncio.sleep(600)\n    except BaseException:\n        print('never')"
    )
    kernel.wait_state(exec_id, "running")
    kernel.process.send_signal(signal.SIGTERM)
    assert kernel.process.wait(DEADLINE) == 0
    assert kernel.wait_state(exec_id)["state"] == "cancelled"


def test_sigterm_does_not_wait_for_threads(kernel: Kernel) -> None:
    kernel.run("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()")
    kernel.process.send_signal(signal.SIGTERM)
    assert kernel.process.wait(DEADLINE) == 0


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


# What the kernel needs is gone: it must end (the manager tells of it and starts another),
# never seem to live while nothing is answered any more.
TAKE_AWAY = {
    "the signals' pipe": "import signal\nfd = signal.set_wakeup_fd(-1)\nsignal.set_wakeup_fd(fd)\nos.close(fd)",
    "every epoll": "[os.close(f) for f, n in files if n == 'anon_inode:[eventpoll]']",
    "every eventfd": "[os.close(f) for f, n in files if n == 'anon_inode:[eventfd]']",
    "every pipe": "[os.close(f) for f, n in files if f > 2 and n.startswith('pipe:')]",
    "all": "os.closerange(0, 1 << 16)",
    "builtins": "import builtins\nbuiltins.len = builtins.type = builtins.isinstance = None",
}


@pytest.mark.parametrize("what", TAKE_AWAY)
def test_a_kernel_without_what_it_needs_ends(kernel: Kernel, what: str) -> None:
    kernel.run("import asyncio, os\nawait asyncio.sleep(0)\n")
    files = "files = []\nfor f in map(int, os.listdir('/proc/self/fd')):\n    try: files.append((f, os.readlink(f'/proc/self/fd/{f}')))\n    except OSError: pass\n"
    try:
        kernel.execute(files + TAKE_AWAY[what])
        kernel.execute("import asyncio\nawait asyncio.sleep(0)\nprint(len('x'))")
    except OSError:  # it is quick
        pass
    assert kernel.process.wait(DEADLINE) == 1


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("how", ["os.closerange(3, 256)", "[os.dup2(n, f) for f in range(3, 256)]"])
def test_low_descriptors_are_the_cells(kernel: Kernel, how: str, first: bool) -> None:
    """What programs do with the numbers from 3 on does not hit the kernel."""
    if not first:
        kernel.run("import asyncio\nawait asyncio.sleep(0)")
    assert kernel.run(f"import os\nn = os.open('/dev/null', os.O_RDWR)\n{how}").state == "succeeded"
    cell = kernel.run(
        "import asyncio, os, subprocess\nprint(await asyncio.to_thread(lambda: 'thread'))\n"
        "os.write(1, b'raw\\n')\nsubprocess.run('echo child; echo err >&2', shell=True)"
    )
    assert (cell.state, cell.text(raw=False), cell.text(raw=True)) == (
        "succeeded",
        "thread\n",
        "raw\nchild\n",
    )
    kernel.drop()
    kernel.connect()
    assert kernel.run("await asyncio.sleep(0.01); 1 + 1").result == "2"
    exec_id = kernel.execute("await asyncio.sleep(600)")
    kernel.wait_state(exec_id, "running")
    kernel.end(exec_id, "cancelled")


def test_the_kernel_keeps_room_for_its_own_code(kernel: Kernel) -> None:
    cell = kernel.run("import sys\nsys.setrecursionlimit(40)\nsys.getrecursionlimit()")
    assert (cell.state, cell.result) == ("succeeded", "200")
    assert kernel.run("def f(): f()\nf()").error.startswith("RecursionError")
    assert kernel.run("await __import__('asyncio').sleep(0); 'x' * 10").result == "'xxxxxxxxxx'"
    assert kernel.run("sys.setrecursionlimit(0)").error.startswith("ValueError")
    assert kernel.run("sys.setrecursionlimit(5000); sys.getrecursionlimit()").result == "5000"


def test_a_kernel_whose_connection_is_closed_connects_again(kernel: Kernel) -> None:
    exec_id = kernel.execute(
        "import os\nfor f in map(int, os.listdir('/proc/self/fd')):\n"
        "    try: socket = os.readlink(f'/proc/self/fd/{f}').startswith('socket:')\n"
        "    except OSError: continue\n"
        "    if socket: os.close(f)"
    )
    kernel.connect()
    assert kernel.wait_state(exec_id)["state"] == "succeeded"
    assert kernel.run("1 + 1").result == "2"


def test_a_signal_handler_of_an_ended_cell_may_raise(kernel: Kernel) -> None:
    """signal.alarm with a handler that raises, which nobody took back."""
    os.mkfifo(kernel.workspace / "late")
    for more in ("", "import asyncio; await asyncio.sleep(0)"):  # without a loop, and in one
        cell = kernel.run(
            f"import os, signal\n{more}\n"
            "def late(*_):\n"
            "    with open('late', 'wb') as late: late.write(b'x')\n"
            "    raise TimeoutError('too late')\n"
            "signal.signal(signal.SIGALRM, late);"
        )
        assert cell.state == "succeeded"
        kernel.process.send_signal(signal.SIGALRM)
        with open(kernel.workspace / "late", "rb") as late:
            assert late.read() == b"x"
        assert kernel.run("1 + 1").result == "2"
    assert "between cells: " in kernel.log.read_text()


def test_the_loop_cannot_be_closed(kernel: Kernel) -> None:
    for _ in range(2):  # the first cell imports asyncio: the loop does not run yet
        cell = kernel.run("import asyncio\nasyncio.get_event_loop().close()")
        assert "Cannot close a running event loop" in cell.traceback
    assert kernel.run("import asyncio\nawait asyncio.sleep(0)\n3").result == "3"


def test_an_exception_that_cannot_be_shown_ends_its_cell(kernel: Kernel) -> None:
    cell = kernel.run("class E(BaseException):\n    def __str__(self): raise SystemExit\nraise E()")
    assert cell.state == "failed"
    assert "str() of the exception failed: SystemExit" in cell.error


def test_a_forked_child_that_fails_says_so(kernel: Kernel) -> None:
    wait = "print('status', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    for ending, status in (
        ("1 / 0", 1),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("pass", 0),
    ):
        cell = kernel.run(f"import os\nif pid := os.fork(): {wait}\nelse: {ending}")
        assert f"status {status}\n" in cell.text(raw=False)
        if ending == "1 / 0":
            assert "ZeroDivisionError" in cell.text("stderr", raw=True)
        assert cell.state == "succeeded"


def test_signal_handlers_are_what_cells_have_set(kernel: Kernel) -> None:
    """Although they wait while the kernel is at its connection."""
    code = (
        "import signal\ndef handler(*_): raise TimeoutError('too late')\n"
        "before = signal.signal(signal.SIGALRM, handler)\n"
        "assert signal.getsignal(signal.SIGALRM) is handler\n"
        "try:\n    signal.raise_signal(signal.SIGALRM)\nexcept TimeoutError as e:\n    print(e)\n"
        "assert signal.signal(signal.SIGALRM, signal.SIG_DFL) is handler\n"
        "(before, signal.getsignal(signal.SIGALRM), signal.getsignal.__name__)"
    )
    cell = kernel.run(code)
    assert cell.text() == "too late\n"
    assert cell.result == "(<Handlers.SIG_DFL: 0>, <Handlers.SIG_DFL: 0>, 'getsignal')"


def test_signals_while_cells_come_and_go(kernel: Kernel) -> None:
    """An exception of a handler that meets the kernel itself loses no event and no cell."""
    for more in ("", "import asyncio; await asyncio.sleep(0)"):
        kernel.run(
            f"import signal\n{more}\n"
            "def late(*_): raise TimeoutError('too late')\n"
            "signal.signal(signal.SIGALRM, late);"
        )
        for n in range(4):  # many of them in ten seconds end the kernel
            exec_id = kernel.execute(f"{n}")
            kernel.wait_state(exec_id)  # the signal then meets what follows
            kernel.process.send_signal(signal.SIGALRM)
            cell = kernel.cell(exec_id)
            assert (cell.state, cell.result) == ("succeeded", str(n)) or "too late" in cell.error
        kernel.run("signal.signal(signal.SIGALRM, signal.SIG_IGN);")
