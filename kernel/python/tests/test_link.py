"""The connection: acknowledgement, reconnection, back-pressure, calls."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from harness import DEADLINE, Kernel, Message


def events(messages: list[Message]) -> list[Message]:
    return [m for m in messages if m["type"] == "event"]


def test_unacknowledged_events_come_again_exactly_once(kernel: Kernel) -> None:
    kernel.auto_ack = False
    first = kernel.run("print('kept')")
    kernel.drop()
    before = list(kernel.messages)
    kernel.messages.clear()
    kernel.connect(welcome=False)
    assert kernel.connection is not None and kernel.connection.hello is not None
    hello = kernel.connection.hello
    assert hello["first_seq"] == 1
    assert hello["next_seq"] == len(events(before)) + 1
    assert hello["seen"] == [first.end["exec_id"]]
    assert hello["cells"] == []
    kernel.acked = 1
    kernel.welcome()
    kernel.run("print('new')")
    got = events(kernel.messages)
    assert [e["seq"] for e in got] == list(range(2, 2 + len(got)))
    assert got[: len(events(before)) - 1] == events(before)[1:]


def test_acknowledged_events_and_cells_are_forgotten(kernel: Kernel) -> None:
    cell = kernel.run("1")
    kernel.send({"type": "ack", "seq": cell.end["seq"]})
    kernel.run("2")
    kernel.send({"type": "ping", "id": 1})
    kernel.wait_for(lambda m: m["type"] == "pong")
    kernel.drop()
    hello = kernel.connect()
    assert hello["first_seq"] == hello["next_seq"] == 7
    assert hello["seen"] == []


def test_cells_run_on_while_no_manager_is_there(kernel: Kernel) -> None:
    kernel.run("import asyncio, os\nos.mkfifo('gate')")
    exec_id = kernel.execute(
        "print('one')\nawait asyncio.to_thread(lambda: open('gate').read())\nprint('two')\n'end'"
    )
    kernel.wait_text(exec_id, "one")
    kernel.drop()
    (kernel.workspace / "gate").open("w").close()
    hello = kernel.connect()
    assert [c["exec_id"] for c in hello["cells"]] in ([exec_id], [])
    kernel.wait_state(exec_id)
    cell = kernel.cell(exec_id)
    assert (cell.state, cell.text(), cell.result) == ("succeeded", "one\ntwo\n", "'end'")
    seqs = [e["seq"] for e in cell.events]
    assert len(set(seqs)) == len(seqs)


def test_execute_is_repeated_without_running_twice(kernel: Kernel) -> None:
    kernel.run("import asyncio\nruns = 0\ngate = asyncio.Event()")
    exec_id = kernel.execute("runs += 1; await gate.wait()")
    kernel.wait_state(exec_id, "running")
    kernel.drop()
    hello = kernel.connect()
    assert hello["cells"] == [{"exec_id": exec_id, "state": "running"}]
    assert exec_id in hello["seen"]
    kernel.execute("runs += 1; await gate.wait()", exec_id=exec_id)
    kernel.auto_ack = False
    kernel.run("gate.set()")
    kernel.wait_state(exec_id)
    kernel.execute("runs += 1", exec_id=exec_id)  # over, but not acknowledged
    assert kernel.run("runs").result == "1"


def test_hello_tells_queued_from_running(kernel: Kernel) -> None:
    kernel.run("import os\nos.mkfifo('gate')")
    blocking = kernel.execute("open('gate').read()")
    kernel.wait_state(blocking, "running")
    queued = kernel.execute("2")
    kernel.send({"type": "ping", "id": 1})
    kernel.wait_for(lambda m: m["type"] == "pong")
    kernel.drop()
    hello = kernel.connect()
    assert hello["cells"] == [
        {"exec_id": blocking, "state": "running"},
        {"exec_id": queued, "state": "queued"},
    ]
    (kernel.workspace / "gate").open("w").close()
    kernel.wait_state(queued)


def test_a_full_ring_holds_writers_and_loses_nothing(kernel: Kernel) -> None:
    kernel.run("import asyncio, os, threading\n")
    kernel.auto_ack = False
    exec_id = kernel.execute(
        "for i in range(12): print(str(i % 10) * (1 << 20), end='')\nopen('done', 'w').close()\nos.write(1, b'raw');"
    )
    # The kernel stops at its 8 MiB; a ping is still answered, by the I/O thread.
    kernel.wait_for(lambda m: m.get("exec_id") == exec_id and m.get("text", "").startswith("6"))
    kernel.send({"type": "ping", "id": 5})
    kernel.wait_for(lambda m: m["type"] == "pong")
    assert not (kernel.workspace / "done").exists()
    kernel.blocked(exec_id)
    kernel.auto_ack = True
    kernel.send({"type": "ack", "seq": max(e["seq"] for e in events(list(kernel.messages)))})
    kernel.wait_state(exec_id)
    cell = kernel.cell(exec_id)
    assert cell.text(raw=False) == "".join(str(i % 10) * (1 << 20) for i in range(12))
    assert cell.text(raw=True) == "raw"


def test_an_interrupt_breaks_the_wait_for_room(kernel: Kernel) -> None:
    kernel.run("1")
    kernel.auto_ack = False
    exec_id = kernel.execute("while True: print('x' * (1 << 16))")
    kernel.blocked(exec_id)
    kernel.end(exec_id, "interrupted")
    assert kernel.cell(exec_id).state == "cancelled"


def test_back_pressure_reaches_children(kernel: Kernel) -> None:
    kernel.run("import asyncio\n")
    kernel.limits["output_bytes"] = 64 << 20
    kernel.auto_ack = False
    exec_id = kernel.execute(
        "p = await asyncio.create_subprocess_exec('head', '-c', '12000000', '/dev/zero')\nawait p.wait()"
    )
    kernel.wait_for(lambda m: m.get("exec_id") == exec_id and m.get("raw", False))
    kernel.drop()
    kernel.auto_ack = True
    kernel.connect()
    assert kernel.wait_state(exec_id)["state"] == "succeeded"
    assert len(kernel.cell(exec_id).text()) == 12_000_000


def test_connects_when_the_socket_appears(tmp_path: Path) -> None:
    with Kernel(tmp_path, connect=False) as k:
        k.connect()
        k.listener.close()
        os.unlink(k.path)
        k.drop()
        k.listener = socket.socket(socket.AF_UNIX)
        k.listener.settimeout(DEADLINE)
        k.listener.bind(str(k.path))
        k.listener.listen(1)
        k.connect()
        assert k.run("3").result == "3"


def test_garbage_ends_the_connection_not_the_kernel(kernel: Kernel) -> None:
    for line in (b"no json\n", b"[]\n", b'{"type":"execute"}\n', b'{"type":"ack","seq":"x"}\n', b"{}\n"):
        assert kernel.connection is not None
        kernel.connection.sock.sendall(line)
        hello = kernel.connect()
        assert hello["generation"] == kernel.generation
    kernel.send({"type": "of a later protocol", "x": 1})
    assert kernel.run("3").result == "3"


def test_large_cells_arrive(kernel: Kernel) -> None:
    cell = kernel.run("x = '" + "é" * 3_000_000 + "'\nlen(x)")
    assert cell.result == "3000000"


def test_reject_ends_the_kernel_with_status_3(tmp_path: Path) -> None:
    with Kernel(tmp_path, connect=False) as k:
        connection = k.accept()
        connection.send({"type": "reject", "reason": "wrong generation"})
        assert k.process.wait(DEADLINE) == 3
        connection.close()
        assert "wrong generation" in k.log.read_text()


def test_incomplete_environment_ends_with_status_2(tmp_path: Path) -> None:
    with Kernel(tmp_path, env={"INVOCATION_ID": ""}, connect=False) as k:
        assert k.process.wait(DEADLINE) == 2
        assert "INVOCATION_ID is not set" in k.log.read_text()


# -- ws.call ------------------------------------------------------------------


def call_of(kernel: Kernel, exec_id: str) -> Message:
    return kernel.wait_for(lambda m: m["type"] == "call" and m["context"]["exec_id"] == exec_id)


def test_call_round_trip(kernel: Kernel) -> None:
    exec_id = kernel.execute("await ws.status(detail=True)", client="calm-otter", connection="e" * 32)
    call = call_of(kernel, exec_id)
    assert (call["method"], call["params"]) == ("status", {"detail": True})
    assert call["context"] == {"client_id": "calm-otter", "connection_id": "e" * 32, "exec_id": exec_id}
    kernel.send({"type": "call_result", "id": call["id"], "result": {"healthy": True}})
    kernel.wait_state(exec_id)
    assert kernel.cell(exec_id).result == "{'healthy': True}"


def test_call_error(kernel: Kernel) -> None:
    exec_id = kernel.execute("await ws.reset()")
    call = call_of(kernel, exec_id)
    assert (call["method"], call["params"]) == ("reset", {"force": False})
    error = {
        "code": "active_work",
        "message": "2 cells run",
        "hint": "force=True",
        "operation": "reset",
        "details": {"n": 2},
    }
    kernel.send({"type": "call_result", "id": call["id"], "error": error})
    state = kernel.wait_state(exec_id)
    assert state["state"] == "failed"
    assert "RPCError: 2 cells run (force=True)" in state["error"]
    exec_id = kernel.execute(
        "try: await ws.reset()\nexcept Exception as e: print(e.code, e.details, e.operation)"
    )
    kernel.send({"type": "call_result", "id": call_of(kernel, exec_id)["id"], "error": error})
    kernel.wait_state(exec_id)
    assert kernel.cell(exec_id).text() == "active_work {'n': 2} reset\n"


def test_reset_only_in_the_foreground(kernel: Kernel) -> None:
    cell = kernel.run("import asyncio\nawait asyncio.create_task(ws.reset())")
    assert "foreground" in cell.error
    assert not [m for m in kernel.messages if m["type"] == "call"]


def test_cancelled_call(kernel: Kernel) -> None:
    exec_id = kernel.execute("import asyncio\nawait asyncio.wait_for(ws.status(), 0.05)")
    call = call_of(kernel, exec_id)
    kernel.wait_for(lambda m: m["type"] == "cancel_call" and m["id"] == call["id"])
    assert "TimeoutError" in kernel.wait_state(exec_id)["error"]


def test_calls_across_a_manager_restart(kernel: Kernel) -> None:
    idempotent = kernel.execute("await ws.call('fs.read', {'path': 'a'}, idempotent=True)")
    risky = kernel.execute("await ws.call('shell.start', {'command': 'x'})")
    first = call_of(kernel, idempotent)
    call_of(kernel, risky)
    kernel.drop()
    kernel.messages[:] = [m for m in kernel.messages if m["type"] != "call"]
    kernel.connect()
    assert "may have been carried out" in kernel.wait_state(risky)["error"]
    again = call_of(kernel, idempotent)
    assert again.pop("again") is True
    assert again == first
    kernel.send({"type": "call_result", "id": again["id"], "result": "content"})
    kernel.wait_state(idempotent)
    assert kernel.cell(idempotent).result == "'content'"
    assert [m["method"] for m in kernel.messages if m["type"] == "call"] == ["fs.read"]


def test_unserializable_parameters(kernel: Kernel) -> None:
    assert kernel.run("await ws.call('x', {'a': object()})").error == "TypeError: object is not a JSON value"
    assert kernel.run("await ws.call('x', {'a': float('nan')})").error.startswith("ValueError")
