"""sd_notify: readiness, status and watchdog, sent by the I/O thread alone."""

from __future__ import annotations

import _socket
import os

from . import descriptors


class Notifier:
    """Talks to NOTIFY_SOCKET; does nothing without one.

    The variables are taken out of the environment: what cells start must not inherit them.
    """

    def __init__(self) -> None:
        self.interval = 0.0  # seconds between watchdog pings, 0 for none
        self._address: str | bytes = os.environ.pop("NOTIFY_SOCKET", "")
        usec = os.environ.pop("WATCHDOG_USEC", "")
        pid = os.environ.pop("WATCHDOG_PID", "")
        if usec.isdigit() and pid in ("", str(os.getpid())):
            self.interval = int(usec) / 2e6
        self._socket: _socket.socket | None = None
        if self._address:
            if isinstance(self._address, str) and self._address.startswith("@"):
                self._address = b"\0" + os.fsencode(self._address[1:])
            self._socket = descriptors.unix_socket(_socket.SOCK_DGRAM)

    def send(self, text: str) -> None:
        """Send one notification. A supervisor that is away or full misses it."""
        if self._socket is not None:
            try:
                self._socket.sendto(text.encode("utf-8", "replace"), self._address)
            except OSError:
                pass
