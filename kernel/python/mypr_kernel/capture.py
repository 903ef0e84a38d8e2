"""File descriptors 1 and 2 behind Python's back: C code, os.write, children.

Both are replaced by pipes that the I/O thread reads; fd 0 becomes /dev/null. The original
stderr stays open as the kernel's log.
"""

from __future__ import annotations

import codecs
import os
import select
import sys
import time

from . import descriptors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

STREAMS = ("stdout", "stderr")
CHUNK = 65_536  # bytes: what a pipe holds


class Captured:
    """The read end of one pipe and its decoder."""

    __slots__ = ("_decoder", "fd", "stream")

    def __init__(self, fd: int, stream: str) -> None:
        self.fd = fd
        self.stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str | None:
        """What is there now, at most what a pipe holds. "" when nothing is, None at its end."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return ""
        return self._decoder.decode(data) if data else None

    def finish(self) -> str:
        """The bytes of an unfinished character."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


class Log:
    """The kernel's log: the stderr that it was started with. A reader that does not read
    loses lines; it never holds up the kernel."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            try:
                if not self._poll.poll(0):
                    return
                # POLLOUT of a pipe promises PIPE_BUF (4096) bytes without blocking.
                data = data[os.write(self.fd, data[:4096]) :]
            except OSError:
                return

    def line(self, text: str) -> None:
        self.write(f"{time.strftime('%H:%M:%S')} kernel[{os.getpid()}]: {text}\n")


def take_descriptors() -> tuple[list[Captured], Log]:
    """Replace fds 0, 1 and 2. Once, before any output and any other thread."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # started with it closed
            os.dup2(null, fd)
    log = Log(descriptors.copy(2))
    os.dup2(null, 0)
    if null > 2:
        os.close(null)
    captured = []
    for fd, stream in enumerate(STREAMS, 1):
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.dup2(writer, fd)
        os.close(writer)
        captured.append(Captured(descriptors.aside(reader), stream))
    return captured, log


class CStreams:
    """What C code has left in stdout and stderr of libc."""

    def __init__(self) -> None:
        self._modules = len(sys.modules)
        # What -u and PYTHONUNBUFFERED leave as a trace; sys.flags has none.
        self._unbuffered = bool(getattr(sys.__stdout__, "write_through", False))
        self._flush: Callable[[], None] | None = None

    def flush(self) -> None:
        """Push it into the pipes.

        Not needed under ``python -u``, which unbuffers them. Costs nothing as long as no
        module was imported since the start, as then no C code but the interpreter's ran.
        """
        if self._unbuffered or (self._flush is None and len(sys.modules) == self._modules):
            return
        if self._flush is None:
            self._flush = _fflush()
        self._flush()


def _fflush() -> Callable[[], None]:
    # Not fflush(NULL): that waits for every stream of the process, and one of them may be
    # in a read that never ends.
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        streams = [ctypes.c_void_p.in_dll(libc, name) for name in STREAMS]
    except (ImportError, OSError, ValueError):
        return lambda: None

    def flush() -> None:
        for stream in streams:
            libc.fflush(stream)

    return flush
