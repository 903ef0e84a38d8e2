"""A kernel that has nothing to do does nothing: no thread of it wakes up, in any state."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Kernel


def switches(kernel: Kernel) -> int:
    """Context switches of all threads so far."""
    total = 0
    for task in Path(f"/proc/{kernel.process.pid}/task").iterdir():
        status = (task / "status").read_text()
        total += sum(int(line.split()[1]) for line in status.splitlines() if "voluntary_ctxt" in line)
    return total


def cpu_seconds(kernel: Kernel) -> float:
    fields = Path(f"/proc/{kernel.process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(kernel: Kernel) -> None:
    """Nothing at all."""


def unacknowledged(kernel: Kernel) -> None:
    """Events in the ring, and a manager that does not acknowledge them."""
    kernel.auto_ack = False
    kernel.run("print('kept')")


def disconnected(kernel: Kernel) -> None:
    """No manager; the connection waits in the backlog."""
    unacknowledged(kernel)
    kernel.drop()


def disconnected_while_blocked(kernel: Kernel) -> None:
    blocked(kernel)
    kernel.drop()


def awaiting(kernel: Kernel) -> None:
    exec_id = kernel.execute("await asyncio.sleep(3600)")
    kernel.wait_state(exec_id, "running")


def background_task(kernel: Kernel) -> None:
    kernel.run("forever = asyncio.create_task(asyncio.sleep(3600))")


def blocked(kernel: Kernel) -> None:
    kernel.blocked(kernel.execute("time.sleep(3600)"))


def blocked_with_a_queued_cell(kernel: Kernel) -> None:
    blocked(kernel)
    kernel.execute("1")


def interrupt_pending(kernel: Kernel) -> None:
    """A cell that shrugs off interrupts, after the answer and the last signal."""
    exec_id = kernel.execute(
        "while True:\n    try:\n        time.sleep(3600)\n    except KeyboardInterrupt:\n        pass"
    )
    kernel.blocked(exec_id)
    for _ in range(2):
        assert kernel.outcome(kernel.interrupt(exec_id)) == "pending"


def cancellation_pending(kernel: Kernel) -> None:
    exec_id = kernel.execute(
        "while True:\n    try:\n        await asyncio.sleep(3600)\n    except asyncio.CancelledError:\n        pass"
    )
    kernel.wait_state(exec_id, "running")
    assert kernel.outcome(kernel.interrupt(exec_id)) == "pending"


def full_ring(kernel: Kernel) -> None:
    """A cell that waits for room, and a child that fills its pipe."""
    kernel.auto_ack = False
    exec_id = kernel.execute(
        "import subprocess\np = subprocess.Popen(['yes'])\nwhile True: print('x' * 65536)"
    )
    kernel.blocked(exec_id)


def unanswered_call(kernel: Kernel) -> None:
    kernel.execute("await ws.status()")
    kernel.wait_for(lambda m: m["type"] == "call")


def after_errors(kernel: Kernel) -> None:
    for code in ("1/0", "raise SystemExit(1)", "b = = 2", "import os; os.close(1)"):
        kernel.run(code)


@pytest.mark.parametrize(
    "state",
    [
        idle,
        unacknowledged,
        disconnected,
        disconnected_while_blocked,
        awaiting,
        background_task,
        blocked,
        blocked_with_a_queued_cell,
        interrupt_pending,
        cancellation_pending,
        full_ring,
        unanswered_call,
        after_errors,
    ],
    ids=lambda f: f.__name__,
)
def test_no_wake_ups(kernel: Kernel, state: Callable[[Kernel], None]) -> None:
    kernel.run("import asyncio, time\nawait asyncio.sleep(0)")
    kernel.wait_for(lambda m: m["type"] == "mode")
    state(kernel)
    # The last look at the loop comes half a second after it worked, the last signal of an
    # interrupt a second after the request.
    kernel.process_quiet(1.5)
    for _ in range(5):  # on a busy machine those come later
        before, used = switches(kernel), cpu_seconds(kernel)
        kernel.process_quiet(1.0)
        woken, used = switches(kernel) - before, cpu_seconds(kernel) - used
        if woken <= 2 and used <= 0.02:
            break
    assert woken <= 2
    assert used <= 0.02
    kernel.process.kill()  # some of these states no signal ends
