"""Start-up, the main thread, and the life of a cell.

The main thread begins without asyncio, whose import takes four bare interpreter starts:
a cell without ``await`` runs all the same, as the first step of a coroutine that nothing
but this module drives. The event loop is made when the kernel was idle for a moment, or
when it is needed: by a cell that awaits (its coroutine then becomes a task, ``_Handover``), or by
an ``import asyncio`` anywhere below a running cell, which then finds itself inside a running
loop, as a task (``_asyncio_imported``).
From then on every cell is a task of that loop, for ever.
"""

from __future__ import annotations

import builtins
import faulthandler
import os
import select
import sys
import time
from _contextvars import copy_context
from _signal import SIGTERM, signal
from _thread import get_ident, start_new_thread
from collections import deque

from . import descriptors, environment, errors, interrupts, streams, wire
from .capture import CStreams, take_descriptors
from .cells import (
    QUEUED,
    RUNNING,
    Cell,
    Program,
    Sources,
    compile_cell,
    current,
    needs_ipython,
)
from .display import DisplayHandle, Displays
from .hooks import Hooks
from .link import Link
from .notify import Notifier
from .outbox import Outbox
from .turn import Turn

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator
    from types import FrameType, ModuleType
    from typing import Any, NoReturn

    from .environment import Settings
    from .ipython import Shell

IDLE_AFTER_START = 0.2  # seconds without a cell, then the event loop is made
IDLE_AFTER_CELL = 0.03
IPYTHON_AFTER = 0.15  # seconds after that, then IPython is imported
LOADING_SWITCH_INTERVAL = 0.0005  # seconds, meanwhile
MAX_FAILURES, FAILURES_WITHIN = 10, 10.0  # of the main thread between cells; seconds
LEAST_RECURSION = 200  # frames: what the kernel's own code needs on top of a cell's
STOP_WITHIN = 1.0  # seconds for cells to end, and again for their events to be acknowledged

ENDING = "ending"  # its terminal event is being made; nothing may interrupt that


def main() -> int:
    """See ``__main__.main``."""
    settings = environment.Settings()
    if not settings.socket or not settings.generation:
        missing = "MYPR_KERNEL_SOCKET" if not settings.socket else "INVOCATION_ID"
        print(
            f"mypr_kernel: {missing} is not set; the kernel is started by the manager (`mypr-mcp exec`)",
            file=sys.stderr,
        )
        return 2
    return Kernel(settings).run()


class Kernel:
    """The process. One per interpreter."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pid = os.getpid()
        environment.prepare(settings)
        captured, self.log = take_descriptors()
        wake_fd = descriptors.eventfd()
        self._inbox_fd = descriptors.eventfd()
        self.inbox: deque[tuple[str, Any]] = deque()
        self.outbox = Outbox(wake_fd, *([settings.output_bytes] if settings.output_bytes else []))
        self.turn = Turn(wake_fd, self.outbox.flush)
        notifier = Notifier()
        self.link = Link(
            settings.socket,
            self._hello,
            lambda kind, value: self.inbox.append((kind, value)),
            self._wake_main,
            self.outbox,
            self.turn,
            captured,
            self.log,
            notifier,
            wake_fd,
            get_ident(),
        )
        self.displays = Displays(self.outbox, settings.artifacts, self.log)
        self.sources = Sources()
        self.hooks = Hooks()
        self.running: list[Cell] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.shell: Shell | None = None
        self.mode = "plain"
        self.mode_reason = ""  # not known before IPython was looked for
        self._ipython_wanted = False  # it is being loaded, or was
        self._ipython_settled = False
        self._ipython_done: Any = None  # asyncio.Event
        self._stand_in: Any = None  # the task of a cell that imported asyncio, and its end
        self._c_streams = CStreams()
        self._exit: int | None = None
        self._forked = False  # this is a child of the kernel
        self._router = streams.Router(self.outbox, self.log, lambda: self.running)
        self.namespace = self._make_namespace()

    # -- set-up ----------------------------------------------------------------

    def _make_namespace(self) -> dict[str, Any]:
        """A fresh ``__main__``: what cells define can be pickled by its name."""
        module: ModuleType = type(sys)("__main__")
        self._own_main = sys.modules.get("__main__")  # its globals must live on
        sys.modules["__main__"] = module
        namespace = module.__dict__
        namespace["__builtins__"] = builtins
        return namespace

    def _make_workspace(self) -> None:
        from .calls import Calls
        from .registry import Registry
        from .workspace import Workspace

        self.calls = Calls(self.link)
        self.registry = Registry(self)
        settings = self.settings
        self.api = Workspace(settings.workspace, settings.root, self.calls, self.registry)
        self.namespace["ws"] = self.api

    def _install(self) -> None:
        router = self._router
        self._stdout = streams.Output(router, "stdout", 1)
        self._stderr = streams.Output(router, "stderr", 2)
        sys.stdout = sys.__stdout__ = self._stdout  # type: ignore[assignment,misc]
        sys.stderr = sys.__stderr__ = self._stderr  # type: ignore[assignment,misc]
        sys.stdin = sys.__stdin__ = streams.Input()  # type: ignore[assignment,misc]
        faulthandler.enable(self.log.fd)
        sys.setrecursionlimit = _with_least(sys.setrecursionlimit)
        sys.breakpointhook = streams.refuse_debugger
        setattr(builtins, "display", self.display)  # noqa: B010
        interrupts.install()
        signal(SIGTERM, self._on_sigterm)
        hooks = self.hooks
        hooks.after("asyncio", self._asyncio_imported)
        hooks.after("threading", _remember_threads)
        hooks.after("linecache", lambda _: self.sources.publish_all())
        hooks.after("signal", interrupts.guard)
        hooks.after("getpass", _refuse_passwords)
        hooks.after("matplotlib", self._matplotlib_imported)
        hooks.install()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """In a forked child (multiprocessing): it is no kernel. What the child forks has
        nothing to let go of: the descriptors' numbers and the signals are the child's now."""
        if self._forked:
            return
        self._forked = True
        self._stdout.after_fork()
        self._stderr.after_fork()
        interrupts.leave()
        self.link.after_fork()

    # -- the main thread -------------------------------------------------------

    def run(self) -> int:
        """Run until told to stop; the exit status."""
        self._install()
        self._make_workspace()
        self.link.start()
        failures: deque[float] = deque(maxlen=MAX_FAILURES)
        while self._exit is None:
            try:
                if self.loop is None:
                    self._run_without_loop()
                else:
                    self.loop.run_forever()
            except (KeyboardInterrupt, SystemExit, interrupts.Stopping):
                # Of a child task or callback; its cell has been told. The loop goes on.
                continue
            except Exception as e:
                # Of a signal handler that a cell has left behind (a signal.alarm that nobody
                # waits for any more). Again and again: the kernel itself is broken.
                self.log.line("between cells: " + errors.traceback_text(e).rstrip())
                now = time.monotonic()
                if len(failures) == MAX_FAILURES and now - failures[0] < FAILURES_WITHIN:
                    self._broken("the main thread fails again and again")
                failures.append(now)
        return self._leave()

    def _broken(self, reason: str) -> NoReturn:
        """The kernel's own code has failed, as cells can make it (they have closed its
        descriptors, or replaced what it calls). A kernel that seems to live and never ends a
        cell is worse than one that is seen to end."""
        try:
            self.log.line(f"{reason}: the kernel ends")
        finally:
            os._exit(1)

    def _run_without_loop(self) -> None:
        epoll = descriptors.epoll()
        epoll.register(self._inbox_fd, select.EPOLLIN | select.EPOLLET)
        self.link.attach(epoll)
        patience = IDLE_AFTER_START
        try:
            while self.loop is None and self._exit is None:
                self.link.waits(True)
                self.turn.end()
                ready = epoll.poll(0 if self.inbox else patience)
                self.turn.begin()
                for fd, _ in ready:
                    if fd != self._inbox_fd:
                        self.link.take(fd)
                self.link.waits(False)
                if not ready and not self.inbox:
                    self._make_loop()
                elif self.take_inbox():
                    patience = IDLE_AFTER_CELL
        finally:
            if self.loop is None:  # else it has its own
                self.link.attach(None)
            epoll.close()

    def _wake_main(self) -> None:
        try:
            os.eventfd_write(self._inbox_fd, 1)
        except OSError as e:
            self._broken(f"the main thread cannot be woken ({e})")

    def _deliver(self, kind: str, value: Any) -> None:
        """Pass something to the main thread, from any thread or a signal handler."""
        self.inbox.append((kind, value))
        self._wake_main()

    def take_inbox(self) -> bool:
        """Handle what the I/O thread passed on. Whether there was a cell."""
        cells = False
        while self.inbox and self._exit is None:
            kind, value = self.inbox.popleft()
            if kind == "execute":
                cells = True
                try:
                    self._submit(value)
                except Exception as e:
                    self._broken("a cell could not begin: " + errors.traceback_text(e).rstrip())
            elif kind == "interrupt":
                self._interrupt(value)
            elif kind == "result":
                self.calls.answered(*value)
            elif kind == "ipython":
                self._ipython_loaded(*value)
            elif kind == "welcome":
                self.displays.artifacts = value.get("artifacts") or self.settings.artifacts
            elif kind == "exit":
                self._exit = value
        if self._exit is not None and self.loop is not None:
            self.loop.stop()
        return cells

    def _make_loop(self) -> None:
        """Import asyncio and enter the event loop; no-op once there is one."""
        if self.loop is None:
            import asyncio  # noqa: F401  (the hook does the rest)

            if self.loop is None:
                self._asyncio_imported(sys.modules["asyncio"])

    def _asyncio_imported(self, _: Any) -> None:
        """asyncio was just imported: make the loop.

        If a cell's first step did it (the loop is not running yet), make it a task of that
        loop at once: what follows in the cell may call create_task or current_task.
        """
        if self.loop is not None or get_ident() != self._router.main_thread:
            return
        import asyncio

        from . import loop as loops

        self.loop = loop = loops.make(
            self.turn, self.link, self.log, self._inbox_fd, self.inbox, self.take_inbox
        )
        loop.call_later(IPYTHON_AFTER, self.load_ipython)
        loop.call_later(IPYTHON_AFTER, environment.hold_sources)
        cell = current.get()
        if cell is not None and cell.state == RUNNING:
            done = loop.create_future()
            cell.task = task = loop.create_task(loops.stand_in(done), name=f"cell {cell.exec_id}")
            self._stand_in = task, done
            asyncio._set_running_loop(loop)
            asyncio.tasks._enter_task(loop, task)

    # -- cells -----------------------------------------------------------------

    def _submit(self, cell: Cell) -> None:
        self.registry.submitted(cell)
        context = copy_context()
        context.run(current.set, cell)
        coroutine = self.run_cell(cell)
        if self.loop is None:
            try:
                context.run(coroutine.send, None)
            except StopIteration:
                self._leave_stand_in()
                return
            self._make_loop()  # it awaits the loop (_Handover), where its task goes on
        assert self.loop is not None
        name = f"cell {cell.exec_id}"
        if sys.version_info >= (3, 11):
            cell.task = self.loop.create_task(coroutine, name=name, context=context)
        else:
            cell.task = context.run(self.loop.create_task, coroutine, name=name)

    def _leave_stand_in(self) -> None:
        """The cell that was made a task in the middle of its only step is over."""
        if self._stand_in is not None:
            import asyncio

            task, done = self._stand_in
            self._stand_in = None
            asyncio.tasks._leave_task(task.get_loop(), task)
            asyncio._set_running_loop(None)
            done.set_result(None)

    async def run_cell(self, cell: Cell) -> None:
        """The whole life of a cell. Ends in exactly one terminal event; raises nothing."""
        try:
            await self._run_cell(cell)
        except GeneratorExit:
            raise
        except BaseException as e:
            self._broken("a cell could not end: " + errors.traceback_text(e).rstrip())

    async def _run_cell(self, cell: Cell) -> None:
        with self.outbox.lock:
            begins = cell.state == QUEUED and self._exit is None
            if begins:
                cell.state = RUNNING
        if not begins:  # an interrupt took it out of the queue
            self.registry.dequeued(cell)
            return
        interrupts.install()
        self._restore_streams(None)
        self.link.settle()
        self.running.append(cell)
        self.registry.began(cell)
        self.namespace.setdefault("ws", self.api)  # whoever took the name gives it back by del
        self.outbox.state(cell, {"event": "state", "state": RUNNING}, False)
        fields: dict[str, Any]
        program: Program | None = None
        result: Any = None
        failure: BaseException | None = None
        try:
            program = await self._compile(cell)
            if program.is_async and self.loop is None:
                await _Handover()
            shell = self.shell
            if shell is not None:
                shell.before(cell)
            value = None
            if program.body is not None:
                if program.body.co_flags & 0x80:
                    await eval(program.body, self.namespace)
                else:
                    exec(program.body, self.namespace)
            if program.last is not None:
                value = eval(program.last, self.namespace)
                if program.last.co_flags & 0x80:
                    value = await value
                result = value
                if value is not None and not program.silent:
                    self._remember(value)
                    self.displays.show(value, result=True)
                value = None
            if shell is not None:
                shell.after()
            self._show_figures(cell)
            cell.state = ENDING
            fields = {"state": "succeeded"}
        except BaseException as e:
            cell.state = ENDING
            failure = e
            if os.getpid() == self.pid:
                fields = self._failure(cell, e)
        if os.getpid() != self.pid:
            _leave_child(failure)  # a forked child came out of the cell's code
        if program is not None and not program.defines():
            self.sources.drop(cell.filename)
        self._c_streams.flush()
        self.link.settle()
        self._restore_streams(cell)
        cell.state = fields["state"]
        self.registry.ended(cell, fields, result, failure)
        self.outbox.state(cell, {"event": "state", **fields}, True)
        self.running.remove(cell)
        cell.release()

    def _restore_streams(self, cell: Cell | None) -> None:
        """Take back sys.stdout and sys.stderr that a cell has left replaced: what later cells
        print would go nowhere. ``cell``: the one that is about to end and is told. What else
        runs may be redirecting output for a while, so nothing is done beside it."""
        if getattr(sys, "stdout", None) is self._stdout and getattr(sys, "stderr", None) is self._stderr:
            return
        own = {"stdout": self._stdout, "stderr": self._stderr}
        replaced = [name for name, stream in own.items() if getattr(sys, name, None) is not stream]
        if not replaced or self.registry.tasks_run() or any(c is not cell for c in self.running):
            return
        for name in replaced:
            setattr(sys, name, own[name])
        if cell is not None:
            text = " and ".join(f"sys.{n}" for n in replaced)
            text += " was left replaced: what cells print is shown again"
            self.displays.warn(cell, "stream_replaced", text)

    async def _compile(self, cell: Cell) -> Program:
        try:
            program = compile_cell(cell.code, cell.filename)
        except SyntaxError as e:
            translated = await self._translate(cell, e)
            program = compile_cell(translated, cell.filename)
            self.sources.add(cell.filename, translated)
            return program
        if "get_ipython" in cell.code:
            await self._wait_for_ipython()
        self.sources.add(cell.filename, cell.code)
        return program

    async def _translate(self, cell: Cell, error: SyntaxError) -> str:
        """Python for code that is none, by IPython's rules; raises ``error`` if it has none."""
        code = cell.code
        if needs_ipython(code):
            await self._wait_for_ipython()
            if self.shell is None:
                raise SyntaxError(
                    "this cell uses IPython syntax (%magic, !command or ?help), "
                    f"and IPython is not available: {self.mode_reason}",
                    (cell.filename, error.lineno, error.offset, error.text),
                ) from None
        if self.shell is not None:
            try:
                translated = self.shell.translate(code)
            except SyntaxError:
                raise error from None  # where Python found it is what helps, not where IPython did
            if translated != code and translated != code + "\n":
                return translated
            raise error
        if code[:1] in (" ", "\t", "\n"):
            import textwrap

            dedented = textwrap.dedent(code)
            if dedented != code:
                return dedented
        raise error

    def _remember(self, value: object) -> None:
        """``_`` is the last result shown, unless a cell has made the name its own."""
        namespace = self.namespace
        if "_" not in namespace or namespace["_"] is self._last:
            namespace["_"] = self._last = value

    _last: object = None

    def _failure(self, cell: Cell, error: BaseException) -> dict[str, Any]:
        """Send what is to be told of the exception; the fields of the terminal event."""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return {"state": "succeeded"}
        asyncio = sys.modules.get("asyncio")
        cancelled = asyncio is not None and isinstance(error, asyncio.CancelledError)
        fields = errors.summary(error)
        fields["state"] = "failed"
        stopped = isinstance(error, interrupts.Stopping)
        if cancelled or stopped or (isinstance(error, KeyboardInterrupt) and cell.interrupted):
            reason = cell.reason or ("interrupted on request" if cell.interrupted else "")
            if stopped:
                reason = "the kernel was told to stop"
            kind = "CancelledError" if cancelled else "KeyboardInterrupt"
            fields = {
                "state": "cancelled",
                "error": f"{kind}: {reason}" if reason else kind,
                "error_info": {"code": "cancelled", "type": kind, "message": reason or "cancelled"},
            }
        if cancelled and cell.reason:
            return fields  # the kernel did it: where the cell waited is no news
        try:
            own = isinstance(error, SyntaxError) and error.filename == cell.filename
            text = errors.traceback_text(error, own_syntax=own and _of_compile(error))
        except BaseException as e:
            text = (
                f"{fields.get('error', '')}\n(the traceback cannot be shown: {errors.summary(e)['error']})\n"
            )
        # Bounded, so it need not wait for room: an interrupt must end the cell now.
        self.outbox.event(cell, {"event": "error", "text": text}, len(text), wait=False)
        return fields

    def _show_figures(self, cell: Cell) -> None:
        mpl = sys.modules.get("mypr_kernel.mpl")
        if mpl is not None:
            mpl.flush(cell)

    # -- interrupts and the end ------------------------------------------------

    def _interrupt(self, request: interrupts.Request) -> None:
        """An interrupt arrived and the loop turns: the cell awaits, or has been hit."""
        cell = request.cell
        if cell.state != RUNNING or cell.task is None:
            return
        if request.delivered and not request.child:
            return  # KeyboardInterrupt was raised in it, and it goes on: its choice
        cell.interrupted = True
        cell.task.cancel()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        interrupts.stopping = True
        if self._exit is None:
            self._exit = 0
        if self.loop is not None:
            self.loop.stop()
        self._wake_main()
        cell = current.get()
        if cell is not None and cell.state == RUNNING and interrupts.interruptible(frame):
            raise interrupts.Stopping

    def _leave(self) -> int:
        """The orderly end: cells are cancelled, their events delivered, atexit run."""
        loop = self.loop
        status = self._exit or 0
        tasks = [c.task for c in self.running if c.task is not None]
        for cell in self.running:
            cell.reason = "the kernel was told to stop"
        for task in tasks:
            task.cancel()
        tasks += self.registry.leave()
        if tasks and loop is not None:
            import asyncio

            try:
                loop.run_until_complete(asyncio.wait(tasks, timeout=STOP_WITHIN))
            except BaseException:
                pass
        for cell in (*self.link.live(), *self.registry.left()):
            self._cancelled(cell)
        if status == 0:
            self.link.finish(STOP_WITHIN)
        try:
            import atexit

            atexit._run_exitfuncs()
        except BaseException as e:
            self.log.line(f"atexit: {errors.summary(e)['error']}")
        # Not a normal finalization: that waits for threads that cells have left.
        os._exit(status)

    def _cancelled(self, cell: Cell) -> None:
        reason = "the kernel was told to stop"
        self.outbox.state(
            cell,
            {
                "event": "state",
                "state": "cancelled",
                "error": f"CancelledError: {reason}",
                "error_info": {"code": "cancelled", "type": "CancelledError", "message": reason},
            },
            True,
        )

    # -- what cells see --------------------------------------------------------

    def display(
        self,
        *values: object,
        display_id: str | bool | None = None,
        raw: bool = False,
        update: bool = False,
        **_: Any,
    ) -> DisplayHandle | None:
        """Show objects richly: images and the like become files that the client is told of.

        ``display_id`` (a name, or True for a generated one) lets a later call replace what
        is shown; the handle that is returned then does that. ``raw``: the values are
        mappings from mime type to data.
        """
        ident = os.urandom(8).hex() if display_id is True else str(display_id or "")
        cell = current.get()
        for value in values:
            if raw and isinstance(value, dict) and cell is not None:
                self.displays.publish(cell, value, display_id=ident, update=update)
            else:
                self.displays.show(value, display_id=ident, update=update)
        return DisplayHandle(self.displays.show, ident) if ident else None

    def _matplotlib_imported(self, matplotlib: Any) -> None:
        if "MPLBACKEND" not in os.environ:
            # Not by that variable: what cells start would inherit it.
            matplotlib.use("module://mypr_kernel.mpl")
        self.hooks.after("mypr_kernel.mpl", self._backend_imported)
        self.hooks.after("matplotlib.figure", self._figures_imported)

    def _backend_imported(self, mpl: Any) -> None:
        mpl.connect(self.displays.show)

    def _figures_imported(self, _: Any) -> None:
        def render(figure: Any) -> bytes:
            from . import mpl

            return mpl.render(figure)

        self.displays.figure = render

    # -- IPython ---------------------------------------------------------------

    def _hello(self) -> dict[str, Any]:
        version = ".".join(map(str, sys.version_info[:3]))
        return {
            "type": "hello",
            "protocol": wire.PROTOCOL,
            "generation": self.settings.generation,
            "pid": self.pid,
            "python": version,
            "implementation": {"cpython": "CPython", "pypy": "PyPy"}.get(
                sys.implementation.name, sys.implementation.name
            ),
            "executable": sys.executable,
            "mode": self.mode,
            "mode_reason": self.mode_reason,
        }

    def load_ipython(self) -> None:
        """Start importing IPython in a thread of its own; once."""
        if self._ipython_wanted:
            return
        self._ipython_wanted = True
        interval = sys.getswitchinterval()
        sys.setswitchinterval(LOADING_SWITCH_INTERVAL)
        start_new_thread(self._import_ipython, (interval,))

    def _import_ipython(self, interval: float) -> None:
        shell, reason = None, ""
        self._router.own_threads.add(get_ident())
        try:
            from . import ipython

            shell = ipython.make(sys.modules["__main__"], self.displays, self.settings.root)
        except ModuleNotFoundError as e:
            name = (e.name or "").partition(".")[0]
            reason = f"{name} is not installed in {sys.prefix}"
        except BaseException as e:
            reason = f"importing IPython failed: {errors.summary(e)['error']}"
            self.log.line(errors.traceback_text(e))
        if sys.getswitchinterval() == LOADING_SWITCH_INTERVAL:
            sys.setswitchinterval(interval)
        self._router.own_threads.discard(get_ident())
        self._deliver("ipython", (shell, reason))

    async def _wait_for_ipython(self) -> None:
        """Return when IPython is loaded, or will not be."""
        if self.loop is None:
            await _Handover()
        if self._ipython_done is None:
            import asyncio

            self._ipython_done = asyncio.Event()
            if self._ipython_settled:
                self._ipython_done.set()
        self.load_ipython()
        await self._ipython_done.wait()

    def _ipython_loaded(self, shell: Shell | None, reason: str) -> None:
        """The thread is done."""
        self._ipython_settled = True
        self.mode_reason = reason
        if shell is not None:
            self.shell = shell
            self.mode = "ipython"
            self.displays.formatter = shell.format
        if self._ipython_done is not None:
            self._ipython_done.set()
        self.outbox.message({"type": "mode", "mode": self.mode, "reason": reason})


class _Handover:
    """Awaited by a cell that is not a task yet, and needs to be one to go on."""

    def __await__(self) -> Generator[None, None, None]:
        yield


def _with_least(set_limit: Callable[[int], None]) -> Callable[[int], None]:
    """sys.setrecursionlimit, which must leave room for the kernel's own code."""

    def setrecursionlimit(limit: int, /) -> None:
        set_limit(max(limit, LEAST_RECURSION) if type(limit) is int and limit > 0 else limit)

    setrecursionlimit.__doc__ = set_limit.__doc__
    return setrecursionlimit


def _leave_child(failure: BaseException | None) -> NoReturn:
    """End a forked child as Python ends a program, without what belongs to the parent."""
    status = 0
    try:
        if isinstance(failure, SystemExit) and (failure.code is None or isinstance(failure.code, int)):
            status = failure.code or 0
        elif failure is not None:
            status = 1
            exits = isinstance(failure, SystemExit)
            sys.stderr.write(f"{failure}\n" if exits else errors.traceback_text(failure))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status & 0xFF)


def _of_compile(error: BaseException) -> bool:
    """Whether no user code ran: the cell itself did not compile."""
    traceback = error.__traceback__
    while traceback is not None:
        if not interrupts.is_kernel(traceback.tb_frame):
            return False
        traceback = traceback.tb_next
    return True


def _remember_threads(threading: Any) -> None:
    """Threads remember the cell that starts them."""
    start = threading.Thread.start

    def start_in_cell(self: Any) -> None:
        cell = current.get()
        if cell is not None:
            self._mypr_cell = cell
        start(self)

    start_in_cell.__wrapped__ = start  # type: ignore[attr-defined]
    start_in_cell.__doc__ = start.__doc__
    threading.Thread.start = start_in_cell


def _refuse_passwords(getpass: Any) -> None:
    getpass.getpass = streams.refuse_password
