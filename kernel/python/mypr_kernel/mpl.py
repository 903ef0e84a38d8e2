"""matplotlib's backend in the kernel: figures of a cell are shown when it ends.

Selected by ``hooks`` when matplotlib is imported. A figure belongs to the cell that made
it; ``plt.show()`` shows and closes the caller's at once, the end of a cell the rest. PNGs
are at most 1568 pixels wide and high: models scale larger ones down.
"""

from __future__ import annotations

import io
import struct
from typing import Any

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .cells import Cell, current

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_PIXELS = 1568

_show: Callable[[Any], None] | None = None  # Displays.show


class FigureManager(FigureManagerBase):
    """A figure of pyplot with the cell that it belongs to."""

    cell: Cell | None = None


class FigureCanvas(FigureCanvasAgg):
    """Agg, as far as matplotlib is concerned."""

    manager_class = FigureManager


def new_figure_manager(num: int, *args: Any, FigureClass: Any = Figure, **kw: Any) -> FigureManager:
    return new_figure_manager_given_figure(num, FigureClass(*args, **kw))


def new_figure_manager_given_figure(num: int, figure: Any) -> FigureManager:
    manager = FigureManager(FigureCanvas(figure), num)
    manager.cell = current.get()
    return manager


def show(*_: Any, **__: Any) -> None:
    """``plt.show()``: never waits."""
    flush(current.get())


def flush(cell: Cell | None) -> None:
    """Show and close the figures of a cell, but for those that it has shown as they are."""
    for manager in Gcf.get_all_fig_managers():
        if getattr(manager, "cell", None) not in (cell, None):
            continue
        figure = manager.canvas.figure
        if _show is not None and (figure.stale or not getattr(figure, "_mypr_shown", False)):
            _show(figure)
        Gcf.destroy(manager)


def render(figure: Any) -> bytes:
    """The PNG of a figure."""
    width, height = figure.get_size_inches()
    dpi = min(figure.dpi, MAX_PIXELS / max(width, height, 1e-6))
    while True:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight")
        png = buffer.getvalue()
        # Cropping to what is drawn ("tight") may also make it larger than the figure.
        largest = max(struct.unpack(">II", png[16:24]))
        if largest <= MAX_PIXELS:
            break
        dpi *= (MAX_PIXELS - 1) / largest
    figure.stale = False
    figure._mypr_shown = True
    return png


def connect(show: Callable[[Any], None]) -> None:
    """Say where figures are shown."""
    global _show
    _show = show
