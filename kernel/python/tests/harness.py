"""A manager for one real kernel process: what the tests drive the kernel with.

The interpreter is MYPR_TEST_PYTHON, else the one that runs the tests.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("MYPR_TEST_PYTHON", sys.executable)
PACKAGE = Path(__file__).resolve().parent.parent
DEADLINE = 90.0  # seconds: for what should take milliseconds, on a busy machine

Message = dict[str, Any]
TERMINAL = ("succeeded", "failed", "cancelled")


_prctl = ctypes.CDLL(None).prctl


def _die_with_parent() -> None:
    """A kernel outlives its manager by design; it must not outlive a test run that is killed."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Connection:
    """One connection of the kernel. Closing it is the death of a manager."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""
        self.hello = self.read()
        assert self.hello is not None and self.hello["type"] == "hello"

    def read(self) -> Message | None:
        """The next message, None at the end of the stream."""
        while b"\n" not in self._buffer:
            data = self.sock.recv(1 << 20)
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: Message = json.loads(line)
        return message

    def send(self, message: Message) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.sock.close()


class Kernel:
    """A kernel process and the manager's end of its socket.

    A reader thread acknowledges events (unless ``auto_ack`` is off) and collects them;
    ``wait_for`` returns the first message that fulfils a condition.
    """

    def __init__(
        self,
        directory: Path,
        env: dict[str, str] | None = None,
        connect: bool = True,
        limits: Message | None = None,
    ) -> None:
        self.directory = directory
        self.generation = uuid.uuid4().hex
        self.limits = limits or {"output_bytes": 16 << 20, "event_chars": 16384, "completed_tasks": 128}
        self.auto_ack = True
        self.path = directory / "k.sock"
        self.workspace = directory / "ws"
        self.workspace.mkdir(exist_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen(8)
        self.listener.settimeout(DEADLINE)
        self.log = directory / "kernel.log"
        self.messages: list[Message] = []
        self.listeners: list[Callable[[Message], Any]] = []
        self.acked = 0
        self.changed = threading.Condition()
        self.connection: Connection | None = None
        self._reader: threading.Thread | None = None
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("MYPR_", "PYTEST_", "PYTHON"))
        }
        environment.update(
            MYPR_KERNEL_SOCKET=str(self.path),
            MYPR_WORKSPACE=str(self.workspace),
            MYPR_ROOT=str(self.workspace / ".mypr"),
            INVOCATION_ID=self.generation,
            PYTHONPATH=str(PACKAGE),
        )
        environment.update(env or {})
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "mypr_kernel"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.workspace,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        if connect:
            self.connect()

    # -- the connection --------------------------------------------------------

    def accept(self) -> Connection:
        sock, _ = self.listener.accept()
        return Connection(sock)

    def connect(self, welcome: bool = True) -> Message:
        """Accept the kernel's connection and begin to read it; its hello."""
        self.connection = connection = self.accept()
        if welcome:
            self.welcome()
        self._reader = threading.Thread(target=self._read, args=(connection,), daemon=True)
        self._reader.start()
        assert connection.hello is not None
        return connection.hello

    def welcome(self) -> None:
        self.send(
            {
                "type": "welcome",
                "protocol": 1,
                "ack": self.acked,
                "limits": self.limits,
                "workspace": str(self.workspace),
                "artifacts": str(self.workspace / ".mypr" / "artifacts"),
            }
        )

    def drop(self) -> None:
        """The manager dies."""
        assert self.connection is not None and self._reader is not None
        self.connection.close()
        self._reader.join(DEADLINE)
        self.connection = None

    def _read(self, connection: Connection) -> None:
        while True:
            try:
                message = connection.read()
            except OSError:
                message = None
            if message is None:
                return
            for listener in self.listeners:
                listener(message)
            with self.changed:
                self.messages.append(message)
                self.changed.notify_all()
            if message["type"] == "event" and self.auto_ack:
                self.acked = message["seq"]
                try:
                    connection.send({"type": "ack", "seq": self.acked})
                except OSError:
                    return

    def listen(self, listener: Callable[[Message], Any]) -> None:
        """Call with every message that comes from now on, on the reader's thread."""
        self.listeners.append(listener)

    def send(self, message: Message) -> None:
        assert self.connection is not None
        self.connection.send(message)

    # -- cells -----------------------------------------------------------------

    def execute(
        self, code: str, client: str = "calm-otter", connection: str = "c" * 32, exec_id: str = ""
    ) -> str:
        exec_id = exec_id or uuid.uuid4().hex
        self.send(
            {
                "type": "execute",
                "exec_id": exec_id,
                "code": code,
                "client_id": client,
                "connection_id": connection,
            }
        )
        return exec_id

    def wait_for(self, condition: Callable[[Message], bool], timeout: float = DEADLINE) -> Message:
        """The first message, old or new, that fulfils the condition."""
        end = time.monotonic() + timeout
        seen = 0
        with self.changed:
            while True:
                for message in self.messages[seen:]:
                    if condition(message):
                        return message
                seen = len(self.messages)
                left = end - time.monotonic()
                if left <= 0 or not self.changed.wait(left):
                    raise AssertionError(
                        f"no such message within {timeout} s; log:\n{self.log.read_text()[-4000:]}"
                    )

    def wait_state(self, exec_id: str, *states: str, timeout: float = DEADLINE) -> Message:
        wanted = states or TERMINAL
        return self.wait_for(
            lambda m: m.get("exec_id") == exec_id and m.get("event") == "state" and m["state"] in wanted,
            timeout,
        )

    def wait_text(self, exec_id: str, text: str) -> None:
        """Wait until the cell's output, of all streams together, contains the text."""
        so_far = ""

        def grow(message: Message) -> bool:
            nonlocal so_far
            if message.get("exec_id") == exec_id:
                so_far += message.get("text", "")
            return text in so_far

        self.wait_for(grow)

    def run(self, code: str, **kw: Any) -> Cell:
        """Run a cell to its end."""
        exec_id = self.execute(code, **kw)
        self.wait_state(exec_id)
        return self.cell(exec_id)

    def cell(self, exec_id: str) -> Cell:
        with self.changed:
            return Cell([m for m in self.messages if m["type"] == "event" and m["exec_id"] == exec_id])

    def interrupt(self, exec_id: str | None) -> int:
        ident = time.monotonic_ns()
        self.send({"type": "interrupt", "id": ident, "exec_id": exec_id})
        return ident

    def outcome(self, ident: int) -> str:
        message = self.wait_for(lambda m: m["type"] == "interrupted" and m["id"] == ident)
        return str(message["outcome"])

    def end(self, exec_id: str | None, outcome: str) -> None:
        """Interrupt a cell, with this outcome. On a busy machine an answer may come before
        the cell has ended ("pending"): then it is asked again."""
        end = time.monotonic() + DEADLINE
        got = self.outcome(self.interrupt(exec_id))
        late = got == "pending"
        while got == "pending" and time.monotonic() < end:
            got = self.outcome(self.interrupt(exec_id))
        assert got == outcome or (late and got == "finished"), got

    def blocked(self, exec_id: str) -> Message:
        """Wait until this cell is said to block the loop, and what is said of it."""
        message = self.wait_for(
            lambda m: m["type"] == "loop" and m["blocked"] is not None and m["blocked"]["exec_id"] == exec_id
        )
        told: Message = message["blocked"]
        return told

    def process_quiet(self, seconds: float) -> None:
        """Let time pass, which is what some tests are about. Ends early if the process does."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        raise AssertionError("the kernel ended")

    # -- the end ---------------------------------------------------------------

    def stop(self) -> int:
        """End the kernel, however it goes; its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.connection is not None:
            self.drop()
        self.listener.close()
        return self.process.returncode

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Cell:
    """The events of one cell."""

    def __init__(self, events: list[Message]) -> None:
        # A new manager gets again what the old one had not acknowledged.
        self.events = list({e["seq"]: e for e in events}.values())
        events = self.events
        terminal = [e for e in events if e["event"] == "state" and e["state"] in TERMINAL]
        assert len(terminal) <= 1, terminal
        self.end = terminal[0] if terminal else {}

    @property
    def state(self) -> str:
        return str(self.end.get("state", ""))

    @property
    def error(self) -> str:
        return str(self.end.get("error", ""))

    def text(self, stream: str = "stdout", raw: bool | None = None) -> str:
        return "".join(
            e["text"]
            for e in self.events
            if e["event"] == "stream" and e["stream"] == stream and (raw is None or bool(e.get("raw")) == raw)
        )

    def of(self, event: str) -> list[Message]:
        return [e for e in self.events if e["event"] == event]

    @property
    def result(self) -> str | None:
        results = [e["text"] for e in self.of("display") if e["result"]]
        return "".join(results) if results else None

    @property
    def traceback(self) -> str:
        return "".join(e["text"] for e in self.of("error"))


__all__ = ["DEADLINE", "PACKAGE", "PYTHON", "Cell", "Connection", "Kernel", "Message"]
