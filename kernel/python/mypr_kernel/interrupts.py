"""SIGINT that hits one cell and nothing else.

The I/O thread aims (``aim``) and signals the main thread; Python then calls ``_on_sigint``
there, between two instructions of whatever runs. The handler runs in the context of what
it interrupts, so the context variable tells which cell that is, be it the cell's own
step, a child task or a callback. KeyboardInterrupt is raised only if it is the target and
only in code of the user: the kernel's own frames (an ``Outbox`` being changed) and the
event loop's are let alone; ``pass_on`` or the I/O thread's next signal try again.
"""

from __future__ import annotations

import _signal
import sys
from _thread import get_ident

from .cells import RUNNING, current

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from .cells import Cell

PACKAGE = __name__.rpartition(".")[0]
# What is sent when SIGINT does nothing: a cell may have it ignored, blocked or handled.
SECOND = _signal.SIGRTMAX - 2


class Request:
    """One interrupt message of the manager, until it is answered and no longer pursued."""

    __slots__ = ("answer_at", "cell", "child", "delivered", "ident", "signal_at", "signals", "until")

    def __init__(self, ident: int, cell: Cell, signals: int) -> None:
        self.ident = ident
        self.cell = cell
        self.signals = signals  # how many KeyboardInterrupts it may raise
        self.delivered = 0  # how many it has raised
        self.child = False  # the last one hit a child task or callback, not the cell's own step
        # The I/O thread's deadlines, monotonic, 0.0 for never.
        self.answer_at = 0.0
        self.signal_at = 0.0
        self.until = 0.0


targets: tuple[Request, ...] = ()  # replaced as a whole, by the I/O thread
_main_thread = get_ident()  # this module is imported by it
stopping = False  # SIGTERM has been handled
wakeup_fd = -1  # where Python writes the number of each signal, for the I/O thread
missed = False  # a signal came while the kernel's own code ran


class Stopping(BaseException):
    """Raised in whatever runs when the kernel gets SIGTERM."""


def install() -> None:
    """Take SIGINT. On the main thread; again before each cell, as cells may take it away."""
    for number in (_signal.SIGINT, SECOND):
        if _signal.getsignal(number) is not _on_sigint:
            _signal.signal(number, _on_sigint)
    # A signal that comes just before the main thread waits would not end the wait; the I/O
    # thread, told through this descriptor, does. asyncio's add_signal_handler puts its own
    # there, with the same effect, and -1 when the last handler is removed.
    other = _signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
    if other not in (-1, wakeup_fd):
        _signal.set_wakeup_fd(other, warn_on_full_buffer=False)


# Handlers of cells do not run while the main thread is at the kernel's connection.
deferring = False
deferred: list[tuple[Any, int, Any]] = []


def guard(signal: Any) -> None:
    """The signal module was imported: handlers that cells install wait while ``deferring``."""
    import functools

    set_handler, get_handler = signal.signal, signal.getsignal

    def original(handler: Any) -> Any:
        return getattr(handler, "_mypr_handler", handler)

    @functools.wraps(set_handler)
    def guarded(signalnum: Any, handler: Any) -> Any:
        if not callable(handler):
            return original(set_handler(signalnum, handler))

        def unless_deferring(number: int, frame: FrameType | None) -> None:
            if deferring:
                deferred.append((handler, number, frame))
            else:
                handler(number, frame)

        setattr(unless_deferring, "_mypr_handler", handler)  # noqa: B010
        return original(set_handler(signalnum, unless_deferring))

    @functools.wraps(get_handler)
    def getsignal(signalnum: Any) -> Any:
        return original(get_handler(signalnum))

    signal.signal, signal.getsignal = guarded, getsignal


def handle_deferred() -> None:
    """Run the handlers that had to wait. Called on the main thread."""
    while deferred:
        handler, number, frame = deferred.pop(0)
        handler(number, frame)


def leave() -> None:
    """In a forked child: signals mean what they mean in any program."""
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    _signal.signal(SECOND, _signal.SIG_DFL)
    _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)


def wait(gate: Any, timeout: float = -1) -> bool:
    """Acquire a lock. On the main thread an interrupt may end the wait. False: it took too long."""
    acquired: bool = gate.acquire(timeout=timeout)
    return acquired


# Code of the kernel that may be interrupted: nothing is half done in it.
safe = {wait.__code__}


def pass_on() -> None:
    """Raise what was held back while the kernel's own code ran. Called on the way out."""
    global missed
    if missed and get_ident() == _main_thread:
        missed = False
        request = _wanted()
        if request is not None:
            _deliver(request)


def _wanted() -> Request | None:
    cell = current.get()
    for request in targets:
        if request.cell is cell and cell.state == RUNNING and request.delivered < request.signals:
            return request
    return None


def _deliver(request: Request) -> None:
    request.delivered += 1
    request.cell.interrupted = True
    task = request.cell.task
    request.child = task is not None and sys.modules["asyncio"].current_task(task.get_loop()) is not task
    raise KeyboardInterrupt("interrupted on request")


def _on_sigint(number: int, frame: FrameType | None) -> None:
    global missed
    request = _wanted()
    if request is None:
        return
    if number == SECOND:
        install()
    if interruptible(frame):
        _deliver(request)
    else:
        missed = True


def interruptible(frame: FrameType | None) -> bool:
    """Whether an exception may be raised in this frame: user code, or what it called."""
    if frame is None:
        return False
    if frame.f_code in safe:
        return True
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if is_kernel(frame) or name in ("asyncio.events", "asyncio.base_events"):
            return False
        if not name.startswith("asyncio."):
            return True
        frame = frame.f_back
    return False


def is_kernel(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return isinstance(name, str) and (name == PACKAGE or name.startswith(PACKAGE + "."))
