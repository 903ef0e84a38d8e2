"""The kernel's connection to the manager, which it keeps for ever, and the I/O thread.

The I/O thread waits in one epoll for the socket, the read ends of the captured descriptors
and an eventfd by which others wake it, with a timeout only while something has a deadline:
a reconnect, a watchdog ping, a look at a loop that was seen working, an unanswered
interrupt, output that may get company. With nothing to do it never wakes.

Handing a message from one thread to the other takes longer than a short cell. So the main
thread sends what it has put before it waits, and while it waits it is the one that reads:
cells, and the answers to its calls. Everything else it leaves to the I/O thread, as it does
all connecting. A lock says which of the two is at it.

Connecting succeeds while no manager runs (the supervisor listens; the connection waits in
the backlog). If the socket's path is gone or its backlog full, it tries again after 50 ms,
doubling to 5 s: there is no event to wait for, as even the directory may be gone.
"""

from __future__ import annotations

import _socket
import os
import select
import time
from _signal import SIGTERM
from _thread import allocate_lock, get_ident, start_new_thread
from collections import deque

from . import descriptors, interrupts, wire
from .cells import QUEUED, RUNNING, Cell
from .outbox import Chunk, Event, Message
from .watch import Watch, interrupted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .capture import Captured, Log
    from .notify import Notifier
    from .outbox import Outbox
    from .turn import Turn

RECONNECT_FIRST, RECONNECT_MAX = 0.05, 5.0  # seconds
MAX_FAILURES = 3  # of the I/O thread's turns, in a row
LINGER = 0.02  # seconds: how long output waits for more of it
BATCH = 256 << 10  # bytes joined for one send
RECEIVE = 64 << 10  # bytes; from 128 KiB on malloc maps and unmaps pages for each buffer

TERMINAL = ("succeeded", "failed", "cancelled")
FOR_MAIN = ("execute", "ack", "call_result")  # messages that the main thread handles itself


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
    """The connection and the I/O thread. The underscored attributes are touched with the
    lock held, which the I/O thread lets go of only to wait.

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
        self._linger = False  # a cell came: there may be output at once
        self._lock = allocate_lock()
        self._main_epoll: select.epoll | None = None  # of the event loop
        self._main_waits = False  # and it reads the socket
        self._left: list[dict[str, Any]] = []  # messages that the main thread has read and left
        self._left_child = False  # in a forked child
        self._outbox = outbox
        outbox.deliver = self.deliver
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

        self._signals, interrupts.wakeup_fd = descriptors.pipe()
        self._epoll = descriptors.epoll()
        self._pipes = descriptors.epoll()  # the captured pipes alone; asked by the main thread too
        self._paused = False  # the captured pipes are not read: the ring is full
        self._reconnect_at = 0.0  # monotonic; 0.0 for never
        self._reconnect_delay = RECONNECT_FIRST
        self._watch = Watch(turn, notifier, main_thread, self._once, self._deliver)

    def start(self) -> None:
        self._epoll.register(self._signals, select.EPOLLIN)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        for fd in self._captured:
            self._epoll.register(fd, select.EPOLLIN)
            self._pipes.register(fd, select.EPOLLIN)
        # Not threading.Thread: importing that costs 2 ms, and imported first here it
        # would take this thread for the main one (before Python 3.13).
        start_new_thread(self._main, ())

    def after_fork(self) -> None:
        """In a forked child: let go of what must end with the kernel."""
        self._left_child = True
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
        if gate is not None:  # nobody waits in the loop, which would send it
            self._outbox.flush()
        return call

    def cancel_call(self, ident: int) -> None:
        """Nobody waits for that answer any more."""
        self._outbox.message({"type": "cancel_call", "id": ident})

    def settle(self) -> None:
        """See to it that what was written to fd 1 and 2 until now goes to the cells that
        run now. The main thread calls it before that changes: the I/O thread lags behind."""
        if self._pipes.poll(0, 2):
            self._enter()
            try:
                self._frame_all()
                self._drain_pipes()
            finally:
                self._leave()

    # -- the main thread -------------------------------------------------------

    def _enter(self) -> None:
        """On the main thread signal handlers of cells wait until ``_leave``: they may raise,
        and what is half done here would be lost."""
        if get_ident() == self.main_thread:
            interrupts.deferring = True
        self._lock.acquire()
        self._outbox.holder = get_ident()

    def _leave(self) -> None:
        self._outbox.holder = 0
        self._lock.release()
        if get_ident() == self.main_thread:
            interrupts.deferring = False

    def deliver(self) -> bool:
        """Send what was put, if this is the main thread and nobody else is at it."""
        if get_ident() != self.main_thread or self._left_child or self._outbox.holder:
            return False
        self._enter()
        try:
            self._frame_all()
            self._send()
        except BaseException as e:
            self._upset(e)
        finally:
            self._leave()
        interrupts.handle_deferred()
        return True

    def attach(self, epoll: select.epoll | None) -> None:
        """From now on the main thread waits in this epoll, or in none, when it has nothing to do."""
        self._enter()
        try:
            self._main_epoll = epoll
            self._main_waits = False
            self._watch_socket()
            if self._socket is not None and epoll is not None:
                epoll.register(self._socket.fileno(), select.EPOLLIN)
        finally:
            self._leave()

    def waits(self, waits: bool) -> None:
        """The main thread is about to wait, or goes on: who reads the socket meanwhile."""
        if self._left_child:
            return
        self._enter()
        try:
            self._main_waits = waits
            self._watch_socket()
        except BaseException as e:
            self._upset(e)
        finally:
            self._leave()
        interrupts.handle_deferred()

    def take(self, fd: int) -> None:
        """Read messages: the main thread's wait has ended, and ``fd`` is readable."""
        self._enter()
        try:
            if self._socket is not None and self._socket.fileno() == fd:
                self._receive(main=True)
                self._posted = False  # to the main thread, which is here
        except BaseException as e:
            self._upset(e)
        finally:
            self._leave()
        interrupts.handle_deferred()

    def _upset(self, error: BaseException) -> None:
        """An exception in the main thread while it was at the connection (descriptors that
        cells have closed, no memory): begin the connection anew, which repeats what was not
        acknowledged. What was put and not framed cannot be told again."""
        if self._framing:
            self._log.line(f"the kernel was interrupted while it sent events ({error!r}): it ends")
            os._exit(1)
        self._disconnect()

    # -- the thread ------------------------------------------------------------

    def _main(self) -> None:
        self._enter()
        self._notifier.send("READY=1\nSTATUS=ready")
        self._connect()
        failures = 0  # in a row
        while True:
            try:
                self._turn_once()
                failures = 0
            except BaseException as e:
                failures += 1
                self._recover(e, failures)

    def _recover(self, error: BaseException, failures: int) -> None:
        """Connect anew after a failure. When what this thread lives on is gone (a cell has
        closed its descriptors, or replaced what it calls), end the process: without this
        thread the kernel would look alive and never answer again."""
        try:
            import traceback

            self._log.line("I/O thread: " + "".join(traceback.format_exception(error)))
            self._disconnect()
            for fd in (self._wake_fd, self._signals, *self._captured):
                self._epoll.modify(fd, select.EPOLLIN)
            self._paused = False
            if failures < MAX_FAILURES:
                return
            self._log.line("the I/O thread fails again and again: the kernel ends")
        except BaseException:
            os.write(self._log.fd, b"the I/O thread has lost what it needs: the kernel ends\n")
        os._exit(1)

    def _turn_once(self) -> None:
        done = self._done  # looked at before framing: what was put before it is framed now
        left, self._left = self._left, []
        for message in left:
            self._handle(message)
        self._frame_all()
        self._do_due()
        self._send()
        if done is not None and (not self._events or self._socket is None):
            self._done = None
            done.release()
        self._pause_captured(self._outbox.full())
        linger, self._linger = self._linger or self._outbox.touched, False
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
        self._leave()
        try:
            ready = self._epoll.poll(timeout)
        finally:
            self._enter()
        self._outbox.awake()
        for fd, mask in ready:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd == self._signals:
                if SIGTERM in os.read(fd, 64):
                    self._watch.stop()
                self._wake_main()
            elif fd in self._captured:
                self._read_pipes()
            elif self._socket is not None and fd == self._socket.fileno():
                if mask & select.EPOLLOUT:
                    self._writable = True
                    self._watch_socket()
                if mask & ~select.EPOLLOUT:
                    self._receive()

    def _deliver(self, kind: str, value: Any) -> None:
        self._post(kind, value)
        self._posted = True

    def _timeout(self) -> float | None:
        at = self._watch.deadlines()
        if self._reconnect_at:
            at.append(self._reconnect_at)
        return max(min(at) - time.monotonic(), 0.0) if at else None

    def _do_due(self) -> None:
        """Do what is due. Each deadline that has passed is taken back or moved into the
        future here, so that ``_timeout`` is never in the past twice."""
        now = time.monotonic()
        if self._reconnect_at and now >= self._reconnect_at:
            self._reconnect_at = 0.0
            self._connect()
        self._watch.look(now)

    # -- interrupts ------------------------------------------------------------

    def _interrupt(self, ident: int, exec_id: str | None) -> None:
        cell = self._cells.get(exec_id) if exec_id else self._implied()
        if cell is None:
            self._once(interrupted(ident, exec_id or "", "finished"))
            return
        with self._outbox.lock:
            queued = cell.state == QUEUED
            if queued:
                cell.state = "cancelled"
        if not queued:
            self._watch.interrupt(ident, cell)
            return
        reason = "interrupted on request before it began"
        fields = {
            "event": "state",
            "state": "cancelled",
            "error": f"CancelledError: {reason}",
            "error_info": {"code": "cancelled", "message": reason},
        }
        self._outbox.state(cell, fields, True)
        self._frame_all()
        self._once(interrupted(ident, cell.exec_id, "dequeued"))

    def _implied(self) -> Cell | None:
        """The cell that an interrupt without a name means."""
        cell = self._watch.holder()
        if cell is not None and not cell.ended:
            return cell
        return self._running[0] if len(self._running) == 1 else None

    # -- framing ---------------------------------------------------------------

    _framing = False  # something was taken off the outbox

    def _frame_all(self) -> None:
        """Frame what was put."""
        self._framing = True
        for item in self._outbox.take():
            if type(item) is Chunk:
                self._frame_chunk(item)
            elif type(item) is Event:
                self._frame_event(item)
            elif type(item) is Message:
                self._frame_message(item.fields)
        self._framing = False

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
            self._watch.ended(cell)

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
        in the pipes. So with something in them, all it has put is framed first."""
        if self._pipes.poll(0, 2):
            self._frame_all()
            self._drain_pipes()

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
        sock = descriptors.unix_socket(_socket.SOCK_STREAM)
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
        if self._main_epoll is not None:
            self._main_epoll.register(sock.fileno(), select.EPOLLIN)
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

    def _watch_socket(self) -> None:
        """What the I/O thread waits for at the socket."""
        if self._socket is not None:
            mask = (0 if self._main_waits else select.EPOLLIN) | (0 if self._writable else select.EPOLLOUT)
            self._epoll.modify(self._socket.fileno(), mask)

    def _disconnect(self) -> None:
        if self._socket is None:
            return
        try:
            self._epoll.unregister(self._socket.fileno())
            if self._main_epoll is not None:
                self._main_epoll.unregister(self._socket.fileno())
            self._socket.close()
        except OSError:  # a cell has closed the descriptor: the number is not ours any more
            self._socket.detach()
        self._socket = None
        self._welcomed = False
        self._queue.clear()
        self._left.clear()
        # At once: the supervisor holds the listening socket.
        self._reconnect_at = time.monotonic()
        self._watch.asker_gone()
        if get_ident() == self.main_thread:
            os.eventfd_write(self._wake_fd, 1)

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
                self._watch_socket()
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

    def _receive(self, main: bool = False) -> None:
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
                message = wire.decode(line)
                if not main or (not self._left and message["type"] in FOR_MAIN):
                    self._handle(message)
                else:
                    if not self._left:
                        os.eventfd_write(self._wake_fd, 1)
                    self._left.append(message)
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
        self._watch.expect_work()

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
        self._watch.say_blocked()
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
                again = b'{"again":true,' + call.line[1:] if call.sent else call.line
                call.sent = True
                self._queue.append(again)

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
