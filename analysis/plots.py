"""Pictures that sum up many runs: throughput predicted and measured, step time against buffer depth.

Each function writes one PNG; `analysis.drawing` says what the pictures have in common. The picture of one comparison,
`plot_lanes`, is in `analysis.lanes` and can be imported from here as well.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.transforms import Bbox

from analysis.drawing import FAINT, PAPER, add_axes, add_title, drawing, figure_of, save
from analysis.lanes import plot_lanes
from analysis.tables import SIZE_UNITS, TIME_UNITS, format_ns

__all__ = ["SweepPoint", "ThroughputPoint", "plot_lanes", "plot_sweep", "plot_throughput", "sweep_table"]

BAND = 0.1
"""A prediction within this share of the measurement's is called near."""
ENOUGH = 0.01
"""More depth has stopped helping where the step time is within this share of the best."""

# ---- throughput --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPoint:
    """One run, predicted and measured. ValueError unless both rates, in tokens/s, are finite and > 0."""

    label: str
    predicted_tokens_per_s: float
    measured_tokens_per_s: float

    def __post_init__(self) -> None:
        for name in ("predicted_tokens_per_s", "measured_tokens_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"throughput {self.label!r}: {name}: must be a finite number > 0, got {getattr(self, name)!r}")


def plot_throughput(points: Iterable[ThroughputPoint], path: str | Path) -> Path:
    """Write a PNG of measured against predicted tokens/s, with the line of equality and a band of 10% to either side of it.

    Axes are logarithmic where the rates lie more than fourfold apart. Where labels have no room beside their points, the points
    are numbered and the labels stand in a list. ValueError for no points.
    """
    points = list(points)
    if not points:
        raise ValueError("plot_throughput: no points")
    if _draw_throughput(points, path, listed=False):
        return Path(path)
    _draw_throughput(points, path, listed=True)
    return Path(path)


def _draw_throughput(points: Sequence[ThroughputPoint], path: str | Path, *, listed: bool) -> bool:
    """Draws and saves; or, if the labels are not to be listed and have no room, returns False and saves nothing."""
    predicted, measured = [p.predicted_tokens_per_s for p in points], [p.measured_tokens_per_s for p in points]
    low, high = min(*predicted, *measured) / 1.2, max(*predicted, *measured) * 1.2
    off = [abs(m / p - 1) for p, m in zip(predicted, measured, strict=True)]
    near = f"{sum(error <= BAND for error in off)} of {len(off)} within the band of ±{BAND:.0%} around measured = predicted"
    # U+2007 is as wide as a digit.
    numbered = [f"{n:\u2007>3}  {p.label}" for n, p in enumerate(points, start=1)]
    names = "\n".join(textwrap.fill(line, 52, subsequent_indent="\u2007\u2007\u2007  ") for line in numbered)
    height_in = max(8.0, 1.2 + 0.2 * (names.count("\n") + 1)) if listed else 8.0
    with drawing(12 if listed else 8, height_in) as figure:
        ax = add_axes(figure, left=1.0, right=4.65 if listed else 0.65, bottom=height_in - 7.3, top=0.95)  # square
        if high > 4 * 1.2**2 * low:
            ax.set_xscale("log")
            ax.set_yscale("log")
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_minor_locator(NullLocator())
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        ax.set_xlim(low, high)
        ax.set_ylim(low, high)
        ax.grid(True)
        below, above = ([low * edge, high * edge] for edge in (1 - BAND, 1 + BAND))
        ax.fill_between([low, high], below, above, color="#88ccee", alpha=0.3, linewidth=0)
        ax.plot([low, high], [low, high], color=FAINT, linewidth=1.2)
        ax.scatter(predicted, measured, s=46, color="#332288", edgecolor=PAPER, linewidth=0.8, zorder=3)
        ax.set_xlabel("predicted [tokens/s]")
        ax.set_ylabel("measured [tokens/s]")
        add_title(ax, "Throughput, predicted and measured", f"{near}; off by {median(off):.0%} (median), {max(off):.0%} (most)")
        labels = [str(n) if listed else p.label for n, p in enumerate(points, start=1)]
        if not _label_points(ax, predicted, measured, labels) and not listed:
            return False
        if listed:
            ax.text(1.02, 1, names, transform=ax.transAxes, va="top", fontsize=9.5, linespacing=1.5, parse_math=False)
        save(figure, path)
    return True


def _label_points(ax: Axes, x: Sequence[float], y: Sequence[float], labels: Sequence[str]) -> bool:
    """A label beside each point, where it covers no point and no other label and, if possible, not the line of equality.
    Whether there was room for all."""
    renderer = figure_of(ax).canvas.get_renderer()  # type: ignore[attr-defined]  # Agg's canvas has it
    inside = ax.get_window_extent()
    at = ax.transData.transform(list(zip(x, y, strict=True))).tolist()
    taken = [Bbox.from_bounds(px - 7, py - 7, 14, 14) for px, py in at]
    fitted = True
    for (px, py), label in sorted(zip(at, labels, strict=True)):
        text = ax.text(0, 0, label, fontsize=9.5, transform=None, va="center", zorder=4, parse_math=False)
        size = text.get_window_extent(renderer)
        places = []
        for reach in (11, 18):
            for direction in range(16):
                angle = 2 * math.pi * direction / 16
                left = px + math.cos(angle) * (reach + size.width / 2) - size.width / 2
                bottom = py + math.sin(angle) * (reach + size.height / 2) - size.height / 2
                places.append(Bbox.from_bounds(left, bottom, size.width, size.height))
        free = [
            box for box in places
            if inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0 and box.y1 < inside.y1
            and not any(box.padded(2).overlaps(other) for other in taken)
        ]  # fmt: skip
        fitted = fitted and bool(free)
        box = min(free or places, key=lambda box: _crosses_diagonal(box, inside))
        taken.append(box)
        text.set_position((box.x0, (box.y0 + box.y1) / 2))
    return fitted


def _crosses_diagonal(box: Bbox, axes: Bbox) -> bool:
    """Whether the line from the lower left to the upper right corner of square axes passes through the box."""
    return bool(box.y0 - axes.y0 < box.x1 - axes.x0 and box.y1 - axes.y0 > box.x0 - axes.x0)


# ---- sweep -------------------------------------------------------------------------------------------------------------


class SweepPoint(Protocol):
    """A plan tried: its weight slots (the depth), its chunk bytes (0: whole blocks), the step time."""

    @property
    def weight_slots(self) -> int: ...

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def step_ns(self) -> int: ...


def sweep_table(points: Iterable[SweepPoint]) -> pd.DataFrame:
    """A row a point, by chunk bytes and weight slots: chunk_bytes, weight_slots, step_ns, `over_best_ratio` (step time over the
    best of its chunk size) and `enough`, true for the first depth of each chunk size within 1% of the best. ValueError for no
    points and for two of one depth and chunk size."""
    rows = sorted((p.chunk_bytes, p.weight_slots, p.step_ns) for p in points)
    if not rows:
        raise ValueError("sweep: no points")
    best: dict[int, int] = {}
    for chunk_bytes, _, step_ns in rows:
        best[chunk_bytes] = min(step_ns, best.get(chunk_bytes, step_ns))
    table = pd.DataFrame(rows, columns=["chunk_bytes", "weight_slots", "step_ns"])
    for row in table[table.duplicated(["chunk_bytes", "weight_slots"])].itertuples():
        raise ValueError(f"sweep: two points of weight_slots {row.weight_slots} and chunk_bytes {row.chunk_bytes}")
    table["over_best_ratio"] = table["step_ns"] / table["chunk_bytes"].map(best)
    near = table[table["over_best_ratio"] <= 1 + ENOUGH]
    return table.assign(enough=table.index.isin(near.drop_duplicates("chunk_bytes").index))


def plot_sweep(points: Iterable[SweepPoint], path: str | Path, *, model_name: str = "") -> Path:
    """Write a PNG of step time against weight slots, a curve a chunk size. A ring marks the depth from which on more brings less
    than 1%; more may even cost. ValueError as `sweep_table`."""
    table = sweep_table(points)
    unit, scale = next((u, s) for u, s in TIME_UNITS if table["step_ns"].max() >= s or u == "ns")
    chunks: list[int] = sorted(set(table["chunk_bytes"]), key=lambda nbytes: nbytes or math.inf)  # whole blocks are the largest
    with drawing(10, 5.8) as figure:
        ax = add_axes(figure, left=0.95, right=2.75, bottom=0.75, top=0.95)
        ax.grid(True)
        for number, chunk_bytes in enumerate(chunks):
            curve = table[table["chunk_bytes"] == chunk_bytes]
            enough = curve[curve["enough"]]
            colour = mpl.colormaps["viridis"](0.82 * number / max(1, len(chunks) - 1))
            # Curves often coincide: each stands a little beside the one before.
            aside = 0.4 * (number - (len(chunks) - 1) / 2) / len(chunks)
            label = f"{_chunk_text(chunk_bytes)}: {enough['weight_slots'].item()}"
            ax.plot(curve["weight_slots"] + aside, curve["step_ns"] / scale, color=colour, marker="osD^vPX*<>"[number % 10],
                    markersize=5, linewidth=1.5, label=label, zorder=3)  # fmt: skip
            ax.plot(enough["weight_slots"] + aside, enough["step_ns"] / scale, marker="o", markersize=13, markeredgewidth=1.8,
                    markeredgecolor=colour, markerfacecolor="none", linestyle="none", zorder=4)  # fmt: skip
        depths = sorted(set(table["weight_slots"]))
        ax.set_xticks(depths[:: math.ceil(len(depths) / 16)])
        least, most = table["step_ns"].min() / scale, table["step_ns"].max() / scale
        margin = 0.08 * (most - least) or 0.05 * most
        ax.set_ylim(least - margin, most + margin)
        ax.set_xlabel("depth [weight slots]")
        ax.set_ylabel(f"step time [{unit}], not from 0")
        ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), title="chunk size: depth that is enough", alignment="left",
                  labelspacing=0.8, borderaxespad=0)  # fmt: skip
        name = f"{model_name}: step" if model_name else "Step"
        add_title(ax, f"{name} time by depth and chunk size", _sweep_subtitle(table))
        return save(figure, path)


def _sweep_subtitle(table: pd.DataFrame) -> str:
    best = table.iloc[int(table["step_ns"].argmin())]
    slots = f"{best['weight_slots']:.0f} slot{'s' if best['weight_slots'] > 1 else ''}"
    shortest = f"{format_ns(int(best['step_ns']))} ({slots}, {_size_text(int(best['chunk_bytes']))})"
    rule = f"a ring: first depth within {ENOUGH:.0%} of its curve's best"
    return f"{rule}; best of all: {shortest}; curves are set apart sideways"


def _chunk_text(nbytes: int) -> str:
    """`2^22 B (4 MiB)`, with one decimal in the exponent where it is no power of two."""
    if nbytes == 0:
        return _size_text(nbytes)
    exponent = math.log2(nbytes)
    return f"$2^{{{exponent:.{0 if exponent.is_integer() else 1}f}}}$ B ({_size_text(nbytes)})"


def _size_text(nbytes: int) -> str:
    if nbytes == 0:
        return "whole blocks"
    unit, scale = next((u, s) for u, s in SIZE_UNITS if nbytes >= s)
    return f"{nbytes / scale:.4g} {unit}"
