"""The I/O thread: the kernel's connection to the manager, which it keeps for ever.

It alone touches the socket, the read ends of the captured descriptors and the notify
socket. It waits in one epoll for those and for an eventfd by which others wake it, with a
timeout only while something has a deadline: a reconnect, a watchdog ping, a look at a loop
that was seen working, an unanswered interrupt. With nothing to do it never wakes.

Connecting succeeds while no manager runs (the supervisor listens; the connection waits in
the backlog). If the socket's path is gone or its backlog full, it tries again after 50 ms,
doubling to 5 s: there is no event to wait for, as even the directory may be gone.
"""

from __future__ import annotations

import _socket
import os
import select
import sys
import time
from _signal import SIGINT, SIGTERM, pthread_kill
from _thread import allocate_lock, start_new_thread
from collections import deque

from . import interrupts, wire
from .cells import QUEUED, RUNNING, Cell, current
from .outbox import Chunk, Event, Message
from .turn import BLOCKED_AFTER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .capture import Captured, Log
    from .notify import Notifier
    from .outbox import Outbox
    from .turn import Turn

RECONNECT_FIRST, RECONNECT_MAX = 0.05, 5.0  # seconds
LINGER = 0.001  # seconds: how long output waits for more of it
BATCH = 256 << 10  # bytes joined for one send
RECEIVE = 64 << 10  # bytes; from 128 KiB on malloc maps and unmaps pages for each buffer
ANSWER_WITHIN = 0.5  # seconds from an interrupt to "pending"
RESEND_EVERY = 0.05  # seconds between signals to a cell that still holds the loop
RESEND_FOR = 1.0  # seconds
REPEATED_SIGNALS = 20  # KeyboardInterrupts that a second request for the same cell may raise

TERMINAL = ("succeeded", "failed", "cancelled")


class Frame:
    """An event as it is sent."""

    __slots__ = ("line", "seq")

    def __init__(self, seq: int, line: bytes) -> None:
        self.seq = seq
        self.line = line


class Call:
    """A request of ``ws`` that has no answer yet."""

    __slots__ = ("answer", "gate", "idempotent", "line", "sent")

    def __init__(self, line: bytes, idempotent: bool, gate: Any) -> None:
        self.line = line
        self.idempotent = idempotent
        self.sent = False
        self.gate = gate  # a held lock that somebody waits for; None: the main thread's loop does
        self.answer: dict[str, Any] = {}  # the message, for who waits at the gate


class Link:
    """The I/O thread and its state. Only that thread touches the underscored attributes.

    ``post(kind, value)`` passes to the main thread, which ``wake_main()`` then wakes:
    ``execute`` with a Cell, ``interrupt`` with an interrupts.Request, ``result`` with
    (call id, message), ``welcome`` with the message, ``exit`` with a status.
    """

    def __init__(
        self,
        path: str,
        hello: Callable[[], dict[str, Any]],
        post: Callable[[str, Any], None],
        wake_main: Callable[[], None],
        outbox: Outbox,
        turn: Turn,
        captured: list[Captured],
        log: Log,
        notifier: Notifier,
        wake_fd: int,
        main_thread: int,
    ) -> None:
        self.path = path
        self.main_thread = main_thread
        self.finished = False  # everything was acknowledged after finish()
        self.limits: dict[str, Any] = {}  # of the last welcome; replaced as a whole
        self._hello = hello
        self._post = post
        self._wake_main = wake_main
        self._posted = False  # something that the main thread was not woken for
        self._linger = False  # output was framed, or a cell came: there may be more at once
        self._outbox = outbox
        self._turn = turn
        self._captured = {c.fd: c for c in captured}
        self._log = log
        self._notifier = notifier
        self._wake_fd = wake_fd
        self._done: Any = None  # a held lock that finish() waits for

        self._socket: _socket.socket | None = None
        self._welcomed = False
        self._inbox: list[bytes] = []  # of a line whose end has not come
        self._inbox_size = 0
        self._events: deque[Frame] = deque()  # the ring: unacknowledged, ascending
        self._queue: deque[bytes] = deque()  # lines to send, in order
        self._batch = b""
        self._sent = 0  # bytes of the batch that went out
        self._writable = True
        self._next_seq = 1

        self._cells: dict[str, Cell] = {}  # live
        self._running: list[Cell] = []  # as far as framed
        self._seen: set[str] = set()  # exec ids whose terminal event is not acknowledged
        self._terminal: deque[tuple[int, str]] = deque()  # those events
        self._calls: dict[int, Call] = {}
        self._requests: list[interrupts.Request] = []
        self._tries: dict[str, int] = {}  # exec id -> interrupts so far

        self._signals, interrupts.wakeup_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll = select.epoll()
        self._pipes = select.epoll()  # the captured pipes alone; asked by the main thread too
        self._paused = False  # the captured pipes are not read: the ring is full
        self._reconnect_at = 0.0  # monotonic; 0.0 for never
        self._reconnect_delay = RECONNECT_FIRST
        self._ping_at = time.monotonic() if notifier.interval else 0.0
        self._look_at = 0.0
        self._stop_at = 0.0
        self._blocked: dict[str, Any] | None = None

    def start(self) -> None:
        self._epoll.register(self._signals, select.EPOLLIN)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        for fd in self._captured:
            self._epoll.register(fd, select.EPOLLIN)
            self._pipes.register(fd, select.EPOLLIN)
        self._turn.tell_busy = True
        # Not threading.Thread: importing that costs 2 ms, and imported first here it
        # would take this thread for the main one (before Python 3.13).
        start_new_thread(self._main, ())

    def after_fork(self) -> None:
        """In a forked child: let go of what must end with the kernel."""
        fds = [self._signals, interrupts.wakeup_fd, *self._captured]
        if self._socket is not None:
            fds.append(self._socket.detach())
        for fd in fds:
            os.close(fd)

    def live(self) -> list[Cell]:
        """The cells that have not ended, begun or not."""
        return list(self._cells.values())

    def finish(self, seconds: float) -> bool:
        """Wait until everything put so far is acknowledged. Called by the main thread."""
        done = allocate_lock()
        done.acquire()
        self._done = done
        os.eventfd_write(self._wake_fd, 1)
        return done.acquire(timeout=seconds)

    def call(self, ident: int, fields: dict[str, Any], idempotent: bool, gate: Any = None) -> Call:
        """Send a request of ``ws``; TypeError or ValueError when it is not JSON or too long."""
        line = wire.encode(fields)
        if len(line) > wire.MAX_LINE:
            raise ValueError(f"{fields['method']}: the parameters are over the limit of 32 MiB")
        call = Call(line, idempotent, gate)
        self._outbox.message({"type": "call", "id": ident, "call": call})
        return call

    def cancel_call(self, ident: int) -> None:
        """Nobody waits for that answer any more."""
        self._outbox.message({"type": "cancel_call", "id": ident})

    def settle(self) -> None:
        """See to it that what was written to fd 1 and 2 until now goes to the cells that
        run now. The main thread calls it before that changes: the I/O thread lags behind."""
        if self._pipes.poll(0, 2):
            done = allocate_lock()
            done.acquire()
            self._outbox.message({"type": "settle", "done": done})
            done.acquire(timeout=1.0)

    # -- the thread ------------------------------------------------------------

    def _main(self) -> None:
        self._notifier.send("READY=1\nSTATUS=ready")
        self._connect()
        while True:
            try:
                self._turn_once()
            except Exception as e:
                import traceback

                self._log.line("I/O thread: " + "".join(traceback.format_exception(e)))
                self._disconnect()

    def _turn_once(self) -> None:
        done = self._done  # looked at before framing: what was put before it is framed now
        self._frame_all()
        self._watch()
        self._send()
        if done is not None and (not self._events or self._socket is None):
            self._done = None
            done.release()
        self._pause_captured(self._outbox.full())
        linger, self._linger = self._linger, False
        if not self._outbox.sleep(linger):
            timeout: float | None = 0.0
        elif linger:
            timeout = LINGER
        else:
            timeout = self._timeout()
        if self._posted:
            # Last of all, as the two threads then contend for the interpreter lock.
            self._posted = False
            self._wake_main()
        ready = self._epoll.poll(timeout)
        self._outbox.awake()
        for fd, mask in ready:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd == self._signals:
                if SIGTERM in os.read(fd, 64):
                    self._stop_at = time.monotonic()
                self._wake_main()
            elif fd in self._captured:
                self._read_pipes()
            elif self._socket is not None and fd == self._socket.fileno():
                if mask & select.EPOLLOUT:
                    self._writable = True
                    self._epoll.modify(fd, select.EPOLLIN)
                if mask & ~select.EPOLLOUT:
                    self._receive()

    def _deliver(self, kind: str, value: Any) -> None:
        self._post(kind, value)
        self._posted = True

    def _timeout(self) -> float | None:
        at = [t for t in (self._reconnect_at, self._ping_at, self._look_at, self._stop_at) if t]
        at += [t for r in self._requests for t in (r.answer_at, r.signal_at) if t]
        return max(min(at) - time.monotonic(), 0.0) if at else None

    # -- deadlines -------------------------------------------------------------

    def _watch(self) -> None:
        """Do what is due. Each deadline that has passed is taken back or moved into the
        future here, so that ``_timeout`` is never in the past twice."""
        now = time.monotonic()
        if self._ping_at and now >= self._ping_at:
            self._notifier.send("WATCHDOG=1")
            self._ping_at = now + self._notifier.interval
        if self._reconnect_at and now >= self._reconnect_at:
            self._reconnect_at = 0.0
            self._connect()
        if self._stop_at and now >= self._stop_at:
            # Until the handler has run: the signal may have come just before a system call.
            self._stop_at = 0.0 if interrupts.stopping else now + RESEND_EVERY
            if self._stop_at and self._turn.since:
                pthread_kill(self.main_thread, SIGTERM)
        self._watch_loop(now)
        for request in list(self._requests):
            self._pursue(request, now)

    def _watch_loop(self, now: float) -> None:
        turn = self._turn
        since = turn.since
        if now >= self._look_at:
            self._look_at = 0.0
        if self._blocked is not None:
            if since == self._blocked["monotonic"]:
                return  # the end of the turn will wake us
            self._blocked = None
            self._notifier.send("STATUS=ready")
            self._once({"type": "loop", "blocked": None})
        if not since:
            if self._look_at:
                return  # it was given a cell and will begin
            turn.tell_busy = True
            since = turn.since
            if not since:
                return
            turn.tell_busy = False
        if now < since + BLOCKED_AFTER:
            self._look_at = since + BLOCKED_AFTER
            return
        cell, where = self._holder()
        turn.tell_idle = True
        if turn.since != since:  # it just moved on
            turn.tell_idle = False
            self._look_at = now + BLOCKED_AFTER
            return
        self._blocked = {
            "exec_id": cell.exec_id if cell else "",
            "since": time.time() - (now - since),
            "where": where,
            "monotonic": since,
        }
        self._notifier.send(f"STATUS=blocked by {self._blocked['exec_id'] or 'a callback'} at {where}")
        self._say_blocked()

    def _say_blocked(self) -> None:
        if self._blocked is not None:
            told = {k: v for k, v in self._blocked.items() if k != "monotonic"}
            self._once({"type": "loop", "blocked": told})

    def _holder(self) -> tuple[Cell | None, str]:
        """Whose code the main thread runs, and where."""
        return holder(sys._current_frames().get(self.main_thread))

    # -- interrupts ------------------------------------------------------------

    def _interrupt(self, ident: int, exec_id: str | None) -> None:
        cell = self._cells.get(exec_id) if exec_id else self._implied()
        if cell is None:
            self._answer(ident, exec_id or "", "finished")
            return
        with self._outbox.lock:
            queued = cell.state == QUEUED
            if queued:
                cell.state = "cancelled"
        if queued:
            self._outbox.state(
                cell,
                {
                    "event": "state",
                    "state": "cancelled",
                    "error": "CancelledError: interrupted on request before it began",
                    "error_info": {"code": "cancelled", "message": "interrupted on request before it began"},
                },
                True,
            )
            self._frame_all()
            self._answer(ident, cell.exec_id, "dequeued")
            return
        now = time.monotonic()
        tries = self._tries[cell.exec_id] = self._tries.get(cell.exec_id, 0) + 1
        request = interrupts.Request(ident, cell, 1 if tries == 1 else REPEATED_SIGNALS)
        request.answer_at = now + ANSWER_WITHIN
        request.signal_at = now
        request.until = now + RESEND_FOR
        self._requests.append(request)
        interrupts.targets = tuple(self._requests)
        self._deliver("interrupt", request)
        self._pursue(request, now)

    def _implied(self) -> Cell | None:
        """The cell that an interrupt without a name means."""
        if self._turn.since:
            cell, _ = self._holder()
            if cell is not None and not cell.ended:
                return cell
        return self._running[0] if len(self._running) == 1 else None

    def _pursue(self, request: interrupts.Request, now: float) -> None:
        """Signal again while it is needed, answer when it is time, forget when it is over."""
        if request.answer_at and now >= request.answer_at:
            request.answer_at = 0.0
            self._answer(request.ident, request.cell.exec_id, "pending")
        if request.signal_at and now >= request.signal_at:
            if request.delivered >= request.signals or now >= request.until:
                request.signal_at = 0.0
            else:
                # Again and again: the signal may have met a moment in which another cell
                # or the kernel itself ran.
                request.signal_at = now + RESEND_EVERY
                if self._turn.since:
                    pthread_kill(self.main_thread, SIGINT)
        if not request.answer_at and not request.signal_at:
            self._forget(request)

    def _forget(self, request: interrupts.Request) -> None:
        self._requests.remove(request)
        interrupts.targets = tuple(self._requests)

    def _answer(self, ident: int, exec_id: str, outcome: str) -> None:
        self._once({"type": "interrupted", "id": ident, "exec_id": exec_id, "outcome": outcome})

    def _cell_ended(self, cell: Cell) -> None:
        self._tries.pop(cell.exec_id, None)
        for request in [r for r in self._requests if r.cell is cell]:
            self._forget(request)
            if request.answer_at:
                outcome = "interrupted" if request.delivered else "cancelled"
                self._answer(request.ident, cell.exec_id, outcome)

    # -- framing ---------------------------------------------------------------

    def _frame_all(self) -> bool:
        """Frame what was put. Whether the main thread was held up meanwhile (``settle``)."""
        settled = False
        for item in self._outbox.take():
            if type(item) is Chunk:
                self._linger = True
                self._frame_chunk(item)
            elif type(item) is Event:
                self._frame_event(item)
            elif type(item) is Message:
                settled |= item.fields["type"] == "settle"
                self._frame_message(item.fields)
        return settled

    def _frame_chunk(self, chunk: Chunk) -> None:
        text = "".join(chunk.parts)
        ring = self._append_stream(chunk.cell, chunk.time, chunk.stream, text, {})
        self._outbox.framed(len(text), ring)

    def _append_stream(self, cell: Cell, at: float, stream: str, text: str, more: dict[str, Any]) -> int:
        size = self._outbox.event_chars
        ring = 0
        for start in range(0, len(text), size):
            fields = {"event": "stream", "stream": stream, "text": text[start : start + size], **more}
            ring += self._append(cell, at, fields)
        return ring

    def _frame_event(self, event: Event) -> None:
        cell, fields = event.cell, event.fields
        state = fields.get("state")
        if fields["event"] == "task":
            self._cells[cell.exec_id] = cell
            self._seen.add(cell.exec_id)
        if state in TERMINAL:
            self._finish_captured(cell)
        ring = self._append(cell, event.time, fields)
        self._outbox.framed(event.cost, ring)
        if state == RUNNING:
            self._running.append(cell)
        elif state in TERMINAL:
            if cell in self._running:
                self._running.remove(cell)
            self._cells.pop(cell.exec_id, None)
            self._terminal.append((self._next_seq - 1, cell.exec_id))
            self._cell_ended(cell)

    def _append(self, cell: Cell, at: float, fields: dict[str, Any]) -> int:
        seq = self._next_seq
        self._next_seq += 1
        message = {"type": "event", "seq": seq, "time": at, "exec_id": cell.exec_id, **fields}
        frame = Frame(seq, wire.encode(message))
        self._events.append(frame)
        if self._welcomed:
            self._queue.append(frame.line)
        return len(frame.line)

    def _frame_message(self, fields: dict[str, Any]) -> None:
        call = fields.get("call")
        if call is not None:
            self._calls[fields["id"]] = call
            if self._welcomed:
                call.sent = True
                self._queue.append(call.line)
        elif fields["type"] == "settle":
            self._drain_pipes()
            fields["done"].release()
        elif fields["type"] == "cancel_call":
            call = self._calls.pop(fields["id"], None)
            if call is not None and call.sent:
                self._once(fields)
        else:
            self._once(fields)

    def _once(self, fields: dict[str, Any]) -> None:
        if self._welcomed:
            self._queue.append(wire.encode(fields))

    # -- captured descriptors --------------------------------------------------

    def _read_pipes(self) -> None:
        """Read what is there, for the cells that run now: the main thread is ahead of this
        one, but it waits (``settle``) before it begins or ends a cell while something is
        in the pipes. So with something in them, all it has put is framed first; if it was
        waiting, it has gone on since, and it is a new situation."""
        while self._pipes.poll(0, 2):
            if not self._frame_all():
                self._drain_pipes()
                return

    def _drain_pipes(self) -> None:
        for fd, _ in self._pipes.poll(0, 2):
            self._read_captured(self._captured[fd])

    def _read_captured(self, captured: Captured) -> None:
        text = captured.read()
        if text is None:  # cells have closed every descriptor of the other end
            self._epoll.unregister(captured.fd)
            self._pipes.unregister(captured.fd)
            del self._captured[captured.fd]
            os.close(captured.fd)
        elif text:
            self._give(captured.stream, text)

    def _finish_captured(self, cell: Cell) -> None:
        """Before the terminal event of the only cell that runs: half characters too."""
        if self._running == [cell]:
            for captured in self._captured.values():
                text = captured.finish()
                if text:
                    self._give(captured.stream, text)

    def _give(self, stream: str, text: str) -> None:
        if len(self._running) != 1:
            self._log.write(text)
            return
        cell = self._running[0]
        text, over = self._outbox.admit(cell, text)
        if cell.sink is not None:
            cell.sink.put(stream, text)
        now = time.time()
        ring = self._append_stream(cell, now, stream, text, {"raw": True})
        if over:
            ring += self._append(cell, now, {"event": "truncated"})
        self._outbox.framed(0, ring)

    def _pause_captured(self, pause: bool) -> None:
        if pause != self._paused:
            self._paused = pause
            for fd in self._captured:
                self._epoll.modify(fd, 0 if pause else select.EPOLLIN)

    # -- the socket ------------------------------------------------------------

    def _connect(self) -> None:
        sock = _socket.socket(
            _socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
        )
        try:
            sock.connect(self.path)
        except OSError as e:
            sock.close()
            if self._reconnect_delay == RECONNECT_FIRST:
                self._log.line(f"cannot connect to {self.path}: {e.strerror or e}; trying again")
            self._reconnect_at = time.monotonic() + self._reconnect_delay
            self._reconnect_delay = min(2 * self._reconnect_delay, RECONNECT_MAX)
            return
        self._reconnect_delay = RECONNECT_FIRST
        self._socket = sock
        self._inbox, self._inbox_size = [], 0
        self._batch, self._sent = b"", 0
        self._queue.clear()
        self._writable = True
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self._frame_all()
        first = self._events[0].seq if self._events else self._next_seq
        hello = self._hello()
        hello.update(
            first_seq=first,
            next_seq=self._next_seq,
            cells=[
                {"exec_id": c.exec_id, "state": RUNNING if c.detached or c in self._running else QUEUED}
                for c in self._cells.values()
            ],
            seen=list(self._seen),
        )
        self._queue.append(wire.encode(hello))

    def _disconnect(self) -> None:
        if self._socket is None:
            return
        self._epoll.unregister(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._welcomed = False
        self._queue.clear()
        # At once: the supervisor holds the listening socket.
        self._reconnect_at = time.monotonic()
        for request in list(self._requests):
            request.answer_at = 0.0  # who asked is gone; the interrupt goes on

    def _send(self) -> None:
        while self._socket is not None and self._writable:
            if self._sent == len(self._batch):
                self._batch, self._sent = self._next_batch(), 0
                if not self._batch:
                    return
            try:
                self._sent += self._socket.send(memoryview(self._batch)[self._sent :])
            except BlockingIOError:
                self._writable = False
                self._epoll.modify(self._socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
            except OSError:
                self._disconnect()

    def _next_batch(self) -> bytes:
        queue = self._queue
        if len(queue) == 1:
            return queue.popleft()
        lines = []
        size = 0
        while queue and size < BATCH:
            line = queue.popleft()
            lines.append(line)
            size += len(line)
        return b"".join(lines)

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect()
            return
        lines = data.split(b"\n")
        for line in lines[:-1]:
            if self._inbox:
                line = b"".join(self._inbox) + line
                self._inbox, self._inbox_size = [], 0
            try:
                self._handle(wire.decode(line))
            except (ValueError, KeyError, TypeError) as e:
                self._log.line(f"bad message of the manager: {e!r}: {line[:200]!r}; connecting again")
                self._disconnect()
            if self._socket is None:
                return
        if lines[-1]:
            self._inbox.append(lines[-1])
            self._inbox_size += len(lines[-1])
            if self._inbox_size > wire.MAX_LINE:
                self._log.line("the manager sent a line of over 32 MiB; connecting again")
                self._disconnect()

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "execute":
            self._execute(message)
        elif kind == "ack":
            self._acknowledge(int(message["seq"]))
        elif kind == "ping":
            self._once({"type": "pong", "id": message["id"]})
        elif kind == "interrupt":
            self._interrupt(message["id"], message.get("exec_id"))
        elif kind == "reserve":
            self._outbox.refuse_tasks(message["reason"])
            self._frame_all()
            self._once({"type": "reserved", "id": message["id"]})
        elif kind == "release":
            self._outbox.refuse_tasks("")
        elif kind == "call_result":
            call = self._calls.pop(message["id"], None)
            if call is not None:
                self._answered(message["id"], call, message)
        elif kind == "welcome":
            self._welcome(message)
        elif kind == "reject":
            self._log.line(f"the manager rejected this kernel: {message.get('reason', '')}")
            self._deliver("exit", 3)
        # Anything else is of a later protocol and was not asked for.

    def _execute(self, message: dict[str, Any]) -> None:
        exec_id = message["exec_id"]
        if exec_id in self._seen:
            return
        cell = Cell(exec_id, message["code"], message["client_id"], message["connection_id"])
        self._seen.add(exec_id)
        self._cells[exec_id] = cell
        self._deliver("execute", cell)
        self._linger = True  # it may be over at once
        # The loop is about to get busy; it need not say so.
        self._turn.tell_busy = False
        self._look_at = time.monotonic() + BLOCKED_AFTER

    def _welcome(self, message: dict[str, Any]) -> None:
        if message.get("protocol", wire.PROTOCOL) != wire.PROTOCOL:
            self._log.line(f"the manager speaks protocol {message['protocol']}, this kernel {wire.PROTOCOL}")
            self._deliver("exit", 3)
            return
        self.limits = limits = message.get("limits") or {}
        self._outbox.refuse_tasks("")
        self._outbox.output_bytes = limits.get("output_bytes") or self._outbox.output_bytes
        self._outbox.event_chars = limits.get("event_chars") or self._outbox.event_chars
        self._acknowledge(int(message["ack"]))
        self._welcomed = True
        self._deliver("welcome", message)
        self._queue.extend(frame.line for frame in self._events)
        self._say_blocked()
        for ident, call in list(self._calls.items()):
            if call.sent and not call.idempotent:
                del self._calls[ident]
                error = {
                    "code": "outcome_unknown",
                    "message": "the manager ended before it answered; the request may have been carried out",
                    "hint": "look at the state of things before repeating it",
                }
                self._answered(ident, call, {"error": error})
            else:
                call.sent = True
                self._queue.append(call.line)

    def _answered(self, ident: int, call: Call, message: dict[str, Any]) -> None:
        if call.gate is None:
            self._deliver("result", (ident, message))
        else:
            call.answer = message
            call.gate.release()

    def _acknowledge(self, seq: int) -> None:
        freed = 0
        while self._events and self._events[0].seq <= seq:
            freed += len(self._events.popleft().line)
        if freed:
            self._outbox.framed(0, -freed)
        while self._terminal and self._terminal[0][0] <= seq:
            self._seen.discard(self._terminal.popleft()[1])


def holder(frame: Any) -> tuple[Cell | None, str]:
    """Whose code a frame of the main thread runs, and where: ("line 3 of the cell" etc.)."""
    inner = frame
    cell: Cell | None = None
    while frame is not None and cell is None:
        code = frame.f_code
        if code.co_name == "_run" and frame.f_globals.get("__name__") == "asyncio.events":
            handle = frame.f_locals.get("self")
            cell = handle._context.get(current) if handle is not None else None
            break
        if code.co_name == "run_cell" and interrupts.is_kernel(frame):
            cell = frame.f_locals.get("cell")
        frame = frame.f_back
    return cell, where(inner)


def where(frame: Any) -> str:
    """ "cell line 3, in work", or "file.py:41, in f (cell line 3)"."""
    outside = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<cell "):
            place = f"cell line {frame.f_lineno}"
            if outside:
                return f"{outside} ({place})"
            return place if code.co_name == "<module>" else f"{place}, in {code.co_name}"
        if not outside and not interrupts.is_kernel(frame) and not code.co_filename.startswith("<"):
            outside = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, in {code.co_name}"
        frame = frame.f_back
    return outside
