"""``ws.tasks``: handles of background work and of the cells that run."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .kernel import Kernel


class Tasks:
    """The handles of this kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
