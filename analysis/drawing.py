"""What all pictures share: a figure of its own, margins in inches, a title, colours that stay apart.

A picture brings its own light background and so reads the same on a light and on a dark page. Colours are Paul Tol's *muted*
scheme (personal.sron.nl/~pault), which stays apart under the common colour blindnesses, and are never the only carrier of a
meaning: rows have names, stalls are hatched, curves have markers, points have labels.

Nothing global is changed: there is no pyplot, figures render with Agg, and matplotlib's settings are its defaults and `STYLE`
while a picture is made, whatever the caller has set, and the caller's again afterwards. (Matplotlib's settings belong to the
process, so one thread at a time may draw.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PAPER, INK, FAINT, TRACK = "#fdfdfc", "#222222", "#666666", "#ebebe8"
DPI = 120
STYLE: dict[str, Any] = {
    "figure.facecolor": PAPER, "savefig.facecolor": PAPER, "axes.facecolor": PAPER, "figure.dpi": DPI, "savefig.dpi": DPI,
    "font.family": "DejaVu Sans", "font.size": 10, "axes.labelsize": 10, "xtick.labelsize": 9.5, "ytick.labelsize": 9.5,
    "legend.fontsize": 9.5, "legend.title_fontsize": 9.5, "legend.frameon": False, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": FAINT, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": "#dcdcd8", "grid.linewidth": 0.8, "axes.axisbelow": True, "hatch.linewidth": 0.9,
}  # fmt: skip


@contextmanager
def drawing(width_in: float, height_in: float) -> Iterator[Figure]:
    """A figure to draw on and `save` within the context."""
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(figure)
        yield figure


def add_axes(figure: Figure, *, left: float, right: float, bottom: float, top: float) -> Axes:
    """Axes with these margins, in inches."""
    width, height = figure.get_size_inches()
    return figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height))


def add_title(ax: Axes, title: str, subtitle: str, *, gap: float = 12) -> None:
    """Both at the figure's left edge, the subtitle `gap` points above the axes. Dollar signs stay what they are."""
    figure = figure_of(ax)
    width, height = figure.get_size_inches()
    x, y = 0.2 / width, ax.get_position().y1
    figure.text(x, y + (gap + 17) / 72 / height, title, fontsize=13, fontweight="bold", parse_math=False)
    figure.text(x, y + gap / 72 / height, subtitle, fontsize=9.5, color=FAINT, parse_math=False)


def figure_of(ax: Axes) -> Figure:
    """The figure that the axes are in."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as a PNG, whatever the path's suffix."""
    figure.savefig(path, format="png")
    return Path(path)
