"""The kernel's own file descriptors, out of the way of what cells do.

Programs use the low numbers: they dup2 over 3 to 9, or close all of them up to some bound.
So the kernel's own ones have high numbers. A cell that goes after those means it.
"""

from __future__ import annotations

import _socket
import os
import select
from fcntl import F_DUPFD_CLOEXEC, fcntl

LIMIT = os.sysconf("SC_OPEN_MAX")  # -1 for none
FLOOR = 512 if not 0 < LIMIT < 1024 else LIMIT // 2


def copy(fd: int) -> int:
    """A duplicate with a high number, close-on-exec; the same one's low if there is none left."""
    for floor in (FLOOR, 3):
        try:
            return fcntl(fd, F_DUPFD_CLOEXEC, floor)
        except OSError:
            if floor != FLOOR:
                raise
    raise AssertionError


def aside(fd: int) -> int:
    """Move a descriptor up; its new number."""
    high = copy(fd)
    os.close(fd)
    return high


def pipe() -> tuple[int, int]:
    """Non-blocking at both ends."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    return aside(reader), aside(writer)


def eventfd() -> int:
    """Non-blocking."""
    return aside(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))


def epoll() -> select.epoll:
    """An epoll of its own."""
    low = select.epoll()
    high = select.epoll.fromfd(copy(low.fileno()))
    low.close()
    return high


def unix_socket(kind: int) -> _socket.socket:
    """A non-blocking Unix socket of a kind (SOCK_STREAM, SOCK_DGRAM)."""
    kind |= _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
    low = _socket.socket(_socket.AF_UNIX, kind)
    return _socket.socket(_socket.AF_UNIX, kind, 0, aside(low.detach()))
