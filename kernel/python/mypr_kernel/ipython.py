"""IPython, when the environment has it: magics, !commands, ?help and rich formatting.

Only its translation, its magics and its formatters are used; cells run through the kernel's
own machinery, so their outputs never mix and no history is kept. Importing it takes most of
a second: that happens in a thread of its own, with a short switch interval so that cells
get the interpreter lock within half a millisecond meanwhile.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from IPython.core import page
from IPython.core.autocall import ExitAutocall
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell
from IPython.lib import pretty
from traitlets import Type
from traitlets.config import Config

from . import interrupts
from .cells import Cell, current

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from .display import Displays


SCALARS = frozenset((int, float, str, bytes))


class Publisher(DisplayPublisher):
    """Where IPython.display.display ends."""

    def publish(
        self,
        data: Mapping[str, Any],
        metadata: Any = None,
        source: Any = None,
        *,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        cell = current.get()
        if cell is not None:
            ident = str((transient or {}).get("display_id") or "")
            self.shell.displays.publish(cell, data, display_id=ident, update=update)

    def clear_output(self, wait: bool = False) -> None:
        """Nothing is taken back: a client may have read it."""


class Hook(DisplayHook):
    """Shows what code run by a magic (%%time, %%capture) leaves as its value."""

    def __call__(self, result: object = None) -> None:
        if result is not None and not self.quiet():
            self.shell.displays.show(result, result=True)

    def quiet(self) -> bool:
        return False


class Exit(ExitAutocall):
    """``exit()`` of a cell that runs just when IPython has put its own names there."""

    def __call__(self, code: object = None) -> None:
        raise SystemExit(code)


class Shell(InteractiveShell):
    """The one shell. ``translate``, ``format``, ``before`` and ``after`` are the kernel's."""

    display_pub_class = Type(Publisher)
    displayhook_class = Type(Hook)
    displays: Displays
    _formatting = False
    _format_error = ""

    # -- used by the kernel ----------------------------------------------------

    def translate(self, code: str) -> str:
        """Python for a cell in IPython's syntax. SyntaxError when it is neither."""
        text: str = self.transform_cell(code)
        return text

    def format(self, value: object) -> dict[str, Any]:
        """Representations of an object by mime type; RuntimeError when one of its methods failed."""
        if type(value) in SCALARS and self._is_plain(type(value)):
            return {"text/plain": repr(value)}
        self._formatting, self._format_error = True, ""
        try:
            data, _ = self.display_formatter.format(value)
        finally:
            self._formatting = False
        shown = {mime: part for mime, part in data.items() if part is not None}
        if self._format_error and "text/plain" not in shown:
            raise RuntimeError(self._format_error)
        return shown

    def _is_plain(self, kind: type) -> bool:
        """Whether nobody has changed how a scalar is shown. To ask all of IPython's formatters
        takes as long as everything else that a short cell needs."""
        formatter = self.display_formatter
        formatters = formatter.formatters
        plain = formatters["text/plain"]
        if plain.type_printers.get(kind) is not pretty._repr_pprint:
            return False
        others = (formatter.mimebundle_formatter, formatter.ipython_display_formatter, *formatters.values())
        return not any([kind in f.type_printers for f in others if f is not plain])  # noqa: C419

    def transform(self, tree: Any) -> Any:
        """Apply what extensions have registered to change code."""
        return self.transform_ast(tree) if self.ast_transformers else tree

    def before(self, cell: Cell) -> None:
        """Tell extensions (autoreload) that a cell begins."""
        callbacks = self.events.callbacks
        if callbacks["pre_execute"]:
            self.events.trigger("pre_execute")
        if callbacks["pre_run_cell"]:
            self.events.trigger("pre_run_cell", ExecutionInfo(cell.code, False, False, True, cell.exec_id))

    def after(self) -> None:
        """Tell extensions that a cell is over."""
        if self.events.callbacks["post_execute"]:
            self.events.trigger("post_execute")

    # -- what IPython calls ----------------------------------------------------

    def init_user_ns(self) -> None:
        self.exiter = Exit(self)
        super().init_user_ns()

    def showtraceback(self, *args: Any, **kw: Any) -> None:
        if not self._formatting:
            super().showtraceback(*args, **kw)
            return
        error = sys.exc_info()[1]
        self._format_error = f"{type(error).__name__}: {error}"

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str, str]:
        """``%matplotlib``: inline is what the kernel does anyway; windows need a display."""
        if gui in (None, "inline", "agg", "auto"):
            import matplotlib

            matplotlib.use("module://mypr_kernel.mpl")
            return "inline", "module://mypr_kernel.mpl"
        result: tuple[str, str] = super().enable_matplotlib(gui)
        return result

    def system(self, command: str) -> None:
        """``!command``: its output streams into the cell. The loop waits, as for any
        synchronous code; an interrupt ends the command's process group."""
        import codecs
        import signal
        import subprocess

        command = self.var_expand(command, depth=1)
        program = command.split(maxsplit=1)[:1]
        if program in (["pip"], ["pip3"]) and not os.path.exists(os.path.join(sys.prefix, "bin", program[0])):
            sys.stderr.write(f"warning: this {program[0]} is of another Python; for this one: {INSTALL}\n")
        process = subprocess.Popen(
            command,
            shell=True,
            executable=os.environ.get("SHELL") or None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a signal reaches all of it
        )
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        assert process.stdout is not None
        try:
            while data := os.read(process.stdout.fileno(), 65_536):
                sys.stdout.write(decoder.decode(data))
            sys.stdout.write(decoder.decode(b"", True))
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
        finally:
            process.stdout.close()
            self.user_ns["_exit_code"] = process.wait()

    interrupts.safe.add(system.__code__)
    system_piped = system
    system_raw = system


INSTALL = 'job = await ws.packages.add("NAME"); await job'


def _pip(pip: Callable[[str], None]) -> Callable[[str], None]:
    """``%pip`` where there is no pip: uv makes environments without."""

    def magic(line: str) -> None:
        from importlib.util import find_spec

        if find_spec("pip") is None:
            raise ModuleNotFoundError(f"this environment has no pip; packages come by: {INSTALL}", name="pip")
        pip(line)

    return magic


def make(module: ModuleType, displays: Displays, root: str) -> Shell:
    """The shell over the kernel's ``__main__``. Slow; called on the loading thread."""
    namespace = module.__dict__
    before = set(namespace)
    shown = getattr(sys.modules["builtins"], "display", None)
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.automagic = False
    config.InteractiveShell.autocall = 0
    config.InteractiveShell.cache_size = 0
    config.InteractiveShell.xmode = "Plain"
    config.Completer.use_jedi = False
    Shell.displays = displays
    shell: Shell = Shell.instance(
        config=config, ipython_dir=os.path.join(root, "ipython"), user_module=module, user_ns=namespace
    )
    for name in ("NoColor", "nocolor"):  # IPython 8, 9
        try:
            shell.colors = name
            break
        except Exception:
            continue
    shell.register_magic_function(_pip(shell.find_line_magic("pip")), "line", "pip")
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), 0)
    for name in ("In", "Out", "exit", "quit", "open"):
        if name not in before:
            namespace.pop(name, None)
    if shown is not None:
        sys.modules["builtins"].display = shown  # type: ignore[attr-defined]
    return shell
