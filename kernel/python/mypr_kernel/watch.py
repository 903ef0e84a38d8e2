"""The I/O thread's eye on the main thread: a loop that does not turn, and what ends that.

Owns the deadlines of the watchdog's ping, of the look at the loop, of interrupts and of
SIGTERM. ``look`` is called in each turn of the I/O thread, ``deadlines`` tells it how long
it may sleep.
"""

from __future__ import annotations

import os
import sys
import time
from _signal import SIGINT, SIGTERM, pthread_kill

from . import interrupts
from .cells import Cell, current
from .turn import BLOCKED_AFTER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .notify import Notifier
    from .turn import Turn

ANSWER_WITHIN = 0.5  # seconds from an interrupt to "pending"
RESEND_EVERY = 0.05  # seconds between signals to a cell that still holds the loop
RESEND_FOR = 1.0  # seconds
SECOND_AFTER = 0.3  # seconds of SIGINT without effect, then the other signal
REPEATED_SIGNALS = 20  # KeyboardInterrupts that a second request for the same cell may raise


def interrupted(ident: int, exec_id: str, outcome: str) -> dict[str, Any]:
    """The answer to an interrupt."""
    return {"type": "interrupted", "id": ident, "exec_id": exec_id, "outcome": outcome}


class Watch:
    """All deadlines are monotonic, 0.0 for never. ``send`` sends a message once, ``post``
    passes something to the main thread."""

    def __init__(
        self,
        turn: Turn,
        notifier: Notifier,
        main_thread: int,
        send: Callable[[dict[str, Any]], None],
        post: Callable[[str, Any], None],
    ) -> None:
        self._turn = turn
        self._notifier = notifier
        self._main_thread = main_thread
        self._send = send
        self._post = post
        self._ping_at = time.monotonic() if notifier.interval else 0.0
        self._look_at = 0.0
        self._stop_at = 0.0
        self._blocked: dict[str, Any] | None = None  # what was told, and the turn's beginning
        self._requests: list[interrupts.Request] = []
        self._tries: dict[str, int] = {}  # exec id -> interrupts so far
        turn.tell_busy = True

    def deadlines(self) -> list[float]:
        at = [t for t in (self._ping_at, self._look_at, self._stop_at) if t]
        at += [t for r in self._requests for t in (r.answer_at, r.signal_at) if t]
        return at

    def look(self, now: float) -> None:
        """Do what is due. Each deadline that has passed is taken back or moved into the
        future, so that none is ever in the past twice."""
        if self._ping_at and now >= self._ping_at:
            self._notifier.send("WATCHDOG=1")
            self._ping_at = now + self._notifier.interval
        if self._stop_at and now >= self._stop_at:
            # Until the handler has run: the signal may have come just before a system call.
            self._stop_at = 0.0 if interrupts.stopping else now + RESEND_EVERY
            if self._stop_at and self._turn.since:
                pthread_kill(self._main_thread, SIGTERM)
        self._look_at_loop(now)
        for request in list(self._requests):
            self._pursue(request, now)

    # -- the loop --------------------------------------------------------------

    def expect_work(self) -> None:
        """The main thread was given a cell: it is about to get busy and need not say so."""
        self._turn.tell_busy = False
        self._look_at = time.monotonic() + BLOCKED_AFTER

    def _look_at_loop(self, now: float) -> None:
        turn = self._turn
        since = turn.since
        if now >= self._look_at:
            self._look_at = 0.0
        if self._blocked is not None:
            if since == self._blocked["monotonic"]:
                return  # the end of the turn will wake us
            self._blocked = None
            self._notifier.send("STATUS=ready")
            self._send({"type": "loop", "blocked": None})
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
        cell, where = self._held()
        turn.tell_idle = True
        if turn.since != since:  # it just moved on
            turn.tell_idle = False
            self._look_at = now + BLOCKED_AFTER
            return
        exec_id = cell.exec_id if cell else ""
        began = time.time() - (now - since)
        self._blocked = {"exec_id": exec_id, "since": began, "where": where, "monotonic": since}
        self._notifier.send(f"STATUS=blocked by {exec_id or 'a callback'} at {where}")
        self.say_blocked()

    def say_blocked(self) -> None:
        """Tell the manager, or a new one again, if the loop does not turn."""
        if self._blocked is not None:
            told = {k: v for k, v in self._blocked.items() if k != "monotonic"}
            self._send({"type": "loop", "blocked": told})

    def holder(self) -> Cell | None:
        """Whose code the main thread runs now."""
        return self._held()[0] if self._turn.since else None

    def _held(self) -> tuple[Cell | None, str]:
        return whose(sys._current_frames().get(self._main_thread))

    # -- ending what holds it --------------------------------------------------

    def stop(self) -> None:
        """SIGTERM has arrived."""
        self._stop_at = time.monotonic()

    def interrupt(self, ident: int, cell: Cell) -> None:
        """Interrupt a cell that has begun."""
        now = time.monotonic()
        tries = self._tries[cell.exec_id] = self._tries.get(cell.exec_id, 0) + 1
        request = interrupts.Request(ident, cell, 1 if tries == 1 else REPEATED_SIGNALS)
        request.answer_at = now + ANSWER_WITHIN
        request.signal_at = now
        request.until = now + RESEND_FOR
        self._requests.append(request)
        interrupts.targets = tuple(self._requests)
        self._post("interrupt", request)
        self._pursue(request, now)

    def _pursue(self, request: interrupts.Request, now: float) -> None:
        """Signal again while it is needed, answer when it is time, forget when it is over."""
        if request.answer_at and now >= request.answer_at:
            request.answer_at = 0.0
            self._send(interrupted(request.ident, request.cell.exec_id, "pending"))
        if request.signal_at and now >= request.signal_at:
            if request.delivered >= request.signals or now >= request.until:
                request.signal_at = 0.0
            else:
                # Again and again: the signal may have met a moment in which another cell
                # or the kernel itself ran.
                request.signal_at = now + RESEND_EVERY
                first = now < request.until - RESEND_FOR + SECOND_AFTER
                if self._turn.since:
                    pthread_kill(self._main_thread, SIGINT if first else interrupts.SECOND)
        if not request.answer_at and not request.signal_at:
            self._forget(request)

    def _forget(self, request: interrupts.Request) -> None:
        self._requests.remove(request)
        interrupts.targets = tuple(self._requests)

    def ended(self, cell: Cell) -> None:
        """The terminal event of a cell is on its way: answer who wanted that."""
        self._tries.pop(cell.exec_id, None)
        for request in [r for r in self._requests if r.cell is cell]:
            self._forget(request)
            if request.answer_at:
                outcome = "interrupted" if request.delivered else "cancelled"
                self._send(interrupted(request.ident, cell.exec_id, outcome))

    def asker_gone(self) -> None:
        """The connection ended: interrupts go on, unanswered."""
        for request in self._requests:
            request.answer_at = 0.0


def whose(frame: Any) -> tuple[Cell | None, str]:
    """Whose code a frame of the main thread runs, and where."""
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
    return cell, place_of(inner)


def place_of(frame: Any) -> str:
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
