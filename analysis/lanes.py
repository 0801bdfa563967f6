"""The lanes of both traces on one time axis: what ran when, who waited for what, where prediction and measurement part.

True to scale: nothing is widened to be seen, and an op narrower than a pixel shades its pixel by its share. Thousands of ops a
step stay readable that way: a lane that is half busy looks half shaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from analysis.compare import Comparison
from analysis.drawing import DPI, FAINT, INK, PAPER, TRACK, add_axes, add_title, drawing, figure_of, save
from analysis.tables import TIME_UNITS, format_ns
from megatrain.derive import CAUSES, Cause, Facts
from megatrain.schedule.nouns import LANES, Kind, Lane

KIND_COLOURS: dict[Kind, str] = {
    "input": "#332288", "load": "#88ccee", "forward": "#44aa99", "backward": "#117733", "loss": "#ddcc77", "pack": "#999933",
    "stash": "#661100", "fetch": "#6699cc", "save": "#aa4499",
    "update": "#cc6677", "clip": "#882255", "constants": "#777777", "report": "#bbbbbb",
}  # fmt: skip
# A cause has the colour of the kind that is waited for.
CAUSE_COLOURS: dict[Cause, str] = {
    "weights late": KIND_COLOURS["load"], "gradient slot busy": KIND_COLOURS["save"], "update late": KIND_COLOURS["update"],
    "input late": KIND_COLOURS["input"], "issue late": KIND_COLOURS["constants"], "step boundary": KIND_COLOURS["clip"],
    "compute busy": KIND_COLOURS["forward"], "gradients late": KIND_COLOURS["pack"],
    "activations late": KIND_COLOURS["fetch"],
}  # fmt: skip
_HATCH = "////"
_VISIBLE_PX = 0.5
"""A kind or cause whose spans together are narrower has no entry in the legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The steps shown of one trace: from the end of the last compute op before them to that of each of them."""

    start_ns: int
    ends_ns: tuple[int, ...]

    @property
    def stop_ns(self) -> int:
        return self.ends_ns[-1]

    @property
    def ns(self) -> int:
        return self.stop_ns - self.start_ns

    def clip(self, start_ns: int, stop_ns: int) -> tuple[int, int]:
        """What of an interval lies inside, counted from the window's start; an empty interval if nothing does."""
        first, last = max(start_ns, self.start_ns), min(stop_ns, self.stop_ns)
        return first - self.start_ns, max(first, last) - self.start_ns


class _Row(NamedTuple):
    """Where a lane of one trace is drawn: around height `y`, `scale` ns a unit of the time axis, `px` pixels a unit."""

    ax: Axes
    facts: Facts
    window: _Window
    y: float
    scale: float
    px: float

    @property
    def height(self) -> tuple[float, float]:
        return self.y - 0.42, 0.84


_Spans = list[tuple[float, float]]
"""(start, width) in units of the time axis."""


class _Drawn(NamedTuple):
    """The kinds that can be seen, whether an op carries its block's number, and the lane's busy time in the window."""

    kinds: set[Kind]
    numbered: bool
    busy_ns: int


def plot_lanes(
    comparison: Comparison, path: str | Path, *, steps: Sequence[int] | None = None, model_name: str = ""
) -> Path:
    """Write a PNG with every lane of both traces, predicted above measured, on one time axis that begins with the first step
    shown.

    `steps` are consecutive steps of the run, counted from 0 as in `Comparison.steps`; by default the one whose measured time is
    nearest the settled step time. A step is shown as it is timed, from the end of the last compute op of the step before to that
    of its own, with all that runs meanwhile, whichever step it belongs to. Stalls of the compute lane are hatched, in the colour
    of what was waited for. ValueError for steps that did not run or are not consecutive.
    """
    shown = _shown_steps(comparison, steps)
    traces = [("predicted", comparison.predicted, _window(comparison.predicted, shown))]
    traces += [("measured", comparison.measured, _window(comparison.measured, shown))]
    windows = {role: window for role, _, window in traces}
    longest_ns = max(1, *(window.ns for window in windows.values()))
    unit, scale = next((u, s) for u, s in TIME_UNITS if longest_ns >= s)
    with drawing(13, 6.5) as figure:
        ax = add_axes(figure, left=1.75, right=0.95, bottom=1.4, top=1.1)
        ax.set_xlim(0, longest_ns / scale)
        ax.set_ylim(len(LANES) * 2.5 - 0.85, -0.65)
        width_px = ax.get_window_extent().width
        beside = ax.get_yaxis_transform()  # x in widths of the axes, y in rows
        kinds: set[Kind] = set()
        causes: set[Cause] = set()
        numbered = False
        for number, lane in enumerate(LANES):
            middle = 2.5 * number + 0.5
            ax.text(-1.55 * DPI / width_px, middle, lane, transform=beside, va="center", fontsize=11, fontweight="bold")
            for below, (_, facts, window) in enumerate(traces):
                row = _Row(ax, facts, window, 2.5 * number + below, scale, width_px / (longest_ns / scale))
                ax.broken_barh([(0, window.ns / scale)], row.height, facecolors=TRACK)
                if lane == "compute":
                    causes |= _draw_stalls(row)
                drawn = _draw_ops(row, lane)
                kinds |= drawn.kinds
                numbered |= drawn.numbered
                ends = [(end_ns - window.start_ns) / scale for end_ns in window.ends_ns]
                ax.vlines(ends, row.y - 0.5, row.y + 0.5, color=INK, linewidth=1.6, clip_on=False)
                busy = f"{drawn.busy_ns / max(1, window.ns):.0%} busy"
                ax.text(1.01, row.y, busy, transform=beside, va="center", fontsize=9.5, color=FAINT)
        rows = [(2.5 * number + below, role) for number in range(len(LANES)) for below, role in enumerate(windows)]
        ax.set_yticks([y for y, _ in rows], [role for _, role in rows])
        ax.tick_params(axis="y", length=0, pad=4)
        ax.spines["left"].set_visible(False)
        ax.set_xlabel(f"time since the step began [{unit}]")
        _mark_ends(ax, windows, scale)
        _add_legends(ax, kinds, causes)
        add_title(ax, _title(comparison, windows, model_name), _subtitle(comparison, shown, numbered), gap=34)
        return save(figure, path)


# ---- what is shown -----------------------------------------------------------------------------------------------------


def _steps_ran(facts: Facts) -> list[int]:
    """The parts of the run that are steps."""
    return [p for p, part in enumerate(facts.run.parts) if part.name != "epilogue"]


def _shown_steps(comparison: Comparison, steps: Sequence[int] | None) -> tuple[int, ...]:
    ran = len(_steps_ran(comparison.measured))
    if steps is None:
        if comparison.steps.empty:
            return (0,)
        off = (comparison.steps["measured_ns"] - comparison.step_time()["measured_ns"].item()).abs()
        return (int(comparison.steps["step"].iloc[int(off.argmin())]),)
    shown = tuple(steps)
    if not shown or shown != tuple(range(shown[0], shown[0] + len(shown))) or shown[0] < 0 or shown[-1] >= ran:
        raise ValueError(f"plot_lanes.steps: must be consecutive steps of the {ran} that ran, counted from 0, got {list(shown)}")
    return shown


def _window(facts: Facts, steps: Sequence[int]) -> _Window:
    run, parts = facts.run, _steps_ran(facts)
    ends: dict[int, int] = {}
    for i in run.lanes["compute"]:
        ends[run.placed[i].part] = run.events[i].end_ns
    first = parts[steps[0]]
    if run.parts[first].name == "body":
        start_ns = ends[first - 1]
    else:  # the first step of the run, or one after a flush: all before it has ended
        start_ns = max((e.end_ns for q, e in zip(run.placed, run.events, strict=True) if q.part < first), default=run.begin_ns)
    return _Window(start_ns=start_ns, ends_ns=tuple(ends[parts[step]] for step in steps))


# ---- rows --------------------------------------------------------------------------------------------------------------


def _draw_ops(row: _Row, lane: Lane) -> _Drawn:
    run = row.facts.run
    spans: dict[Kind, _Spans] = {}
    busy_ns, numbered = 0, False
    for i in run.lanes[lane]:
        start_ns, stop_ns = row.window.clip(run.events[i].start_ns, run.events[i].end_ns)
        if start_ns == stop_ns:
            continue
        busy_ns += stop_ns - start_ns
        op, start, width = run.placed[i].op, start_ns / row.scale, (stop_ns - start_ns) / row.scale
        spans.setdefault(op.kind, []).append((start, width))
        number = "" if op.block is None else str(op.block)
        if number and width * row.px > 8 + 8 * len(number):
            numbered = True
            row.ax.text(start + width / 2, row.y, number, ha="center", va="center_baseline", fontsize=8.5,
                        color=_readable_on(KIND_COLOURS[op.kind]))  # fmt: skip
    for kind, of_kind in spans.items():
        colour = KIND_COLOURS[kind]
        if median(width for _, width in of_kind) * row.px >= 6:
            # A light edge parts neighbours: there is room for one.
            row.ax.broken_barh(of_kind, row.height, facecolors=colour, edgecolor=PAPER, linewidth=0.5)
        else:
            row.ax.broken_barh(_joined(of_kind, gap=0.05 / row.px), row.height, facecolors=colour, linewidth=0, snap=False)
    return _Drawn({kind for kind, of_kind in spans.items() if _visible(of_kind, row)}, numbered, busy_ns)


def _draw_stalls(row: _Row) -> set[Cause]:
    """Returns the causes that can be seen."""
    spans: dict[Cause, _Spans] = {}
    for stall in row.facts.stalls["compute"]:
        for cause, piece in stall.blames:
            start_ns, stop_ns = row.window.clip(piece.start_ns, piece.stop_ns)
            if start_ns < stop_ns:
                spans.setdefault(cause, []).append((start_ns / row.scale, (stop_ns - start_ns) / row.scale))
    for cause, of_cause in spans.items():
        row.ax.broken_barh(of_cause, row.height, facecolors=_pale(CAUSE_COLOURS[cause]), edgecolor=CAUSE_COLOURS[cause],
                           hatch=_HATCH, linewidth=0)  # fmt: skip
    return {cause for cause, of_cause in spans.items() if _visible(of_cause, row)}


def _joined(spans: _Spans, gap: float) -> _Spans:
    """Spans that touch joined: each drawn alone would leave a light seam where two share a pixel."""
    joined: _Spans = []
    for start, width in spans:
        if joined and start - sum(joined[-1]) <= gap:
            joined[-1] = (joined[-1][0], start + width - joined[-1][0])
        else:
            joined.append((start, width))
    return joined


def _visible(spans: _Spans, row: _Row) -> bool:
    return sum(width for _, width in spans) * row.px >= _VISIBLE_PX


def _pale(colour: str) -> tuple[float, float, float]:
    r, g, b = (0.28 * c + 0.72 * p for c, p in zip(to_rgb(colour), to_rgb(PAPER), strict=True))
    return r, g, b


def _readable_on(colour: str) -> str:
    """The text colour that reads on this one."""
    r, g, b = to_rgb(colour)
    return INK if 0.299 * r + 0.587 * g + 0.114 * b > 0.5 else PAPER


# ---- words -------------------------------------------------------------------------------------------------------------


def _mark_ends(ax: Axes, windows: dict[str, _Window], scale: float) -> None:
    """Above the axes, each trace on a line of its own so that the two never meet: when its last step shown ended."""
    longest_ns = max(window.ns for window in windows.values())
    for line, (role, window) in enumerate(windows.items()):
        steps = f"{len(window.ends_ns)} steps in " if len(window.ends_ns) > 1 else ""
        text, left = f"{role}: {steps}{format_ns(window.ns)}", window.ns < 0.3 * longest_ns
        ax.annotate(
            f"▾ {text}" if left else f"{text} ▾", (window.ns / scale, 1), xycoords=ax.get_xaxis_transform(),
            xytext=(-4 if left else 4, 19 - 14 * line), textcoords="offset points", ha="left" if left else "right", fontsize=9.5,
        )  # fmt: skip


def _add_legends(ax: Axes, kinds: set[Kind], causes: set[Cause]) -> None:
    ops = [Patch(facecolor=colour, label=kind) for kind, colour in KIND_COLOURS.items() if kind in kinds]
    stalls = [
        Patch(facecolor=_pale(CAUSE_COLOURS[c]), edgecolor=CAUSE_COLOURS[c], hatch=_HATCH, linewidth=0, label=c)
        for c in CAUSES
        if c in causes
    ]
    figure = figure_of(ax)
    width, height = figure.get_size_inches()
    for name, handles, above_in in (("ops", ops, 0.62), ("compute waits", stalls, 0.3)):
        if handles:
            figure.text(0.2 / width, above_in / height, name, fontsize=9.5, color=FAINT, va="center")
            figure.legend(handles=handles, loc="center left", bbox_to_anchor=(1.7 / width, above_in / height), ncols=len(handles),
                          columnspacing=1.4, handlelength=1.6, handleheight=1.0, borderpad=0)  # fmt: skip


def _title(comparison: Comparison, windows: dict[str, _Window], model_name: str) -> str:
    step = comparison.step_time()
    if step.empty:
        predicted_ns, measured_ns = windows["predicted"].ns, windows["measured"].ns
    else:
        predicted_ns, measured_ns = int(step["predicted_ns"].item()), int(step["measured_ns"].item())
    ratio = f" ({measured_ns / predicted_ns:.2f}x)" if predicted_ns else ""
    name = f"{model_name}: a" if model_name else "A"
    return f"{name} step takes {format_ns(measured_ns)}, predicted {format_ns(predicted_ns)}{ratio}"


def _subtitle(comparison: Comparison, shown: Sequence[int], numbered: bool) -> str:
    ran = len(_steps_ran(comparison.measured))
    steps = f"step {shown[0]}" if len(shown) == 1 else f"steps {shown[0]} to {shown[-1]}"
    among = f" of steps 0 to {ran - 1}" if ran > len(shown) else ""
    above = "" if comparison.steps.empty else "; above: means of the settled steps"
    predicted, measured = comparison.sources
    numbers = "; a number in an op is its block" if numbered else ""
    return f"shown: {steps}{among}{above}; predicted: {predicted}, measured: {measured}{numbers}"
