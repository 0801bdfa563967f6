"""Pictures: true to scale, nothing clipped, no text over another, and no trace of them in matplotlib's settings.

The figures are looked at before they become pixels: `analysis.drawing.save` is replaced by one that keeps them.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import matplotlib.image
import matplotlib.style
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

import analysis.lanes
import analysis.plots
from analysis.compare import Comparison, compare
from analysis.drawing import PAPER, TRACK
from analysis.drawing import save as save_png
from analysis.lanes import CAUSE_COLOURS, KIND_COLOURS
from analysis.plots import ThroughputPoint, plot_lanes, plot_sweep, plot_throughput, sweep_table
from megatrain.derive import CAUSES, Facts
from megatrain.hardware import H200
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import LANES, PlacedOp, Schedule, lower
from sim.simulate import simulate
from tests.timelines import MODEL, scheduled

PARTS = ("prologue", "body", "body", "body", "epilogue", "prologue", "body", "epilogue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    weight_slots: int
    chunk_bytes: int
    step_ns: int


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return lower(MODEL, Recipe(seq_len=4, micro_batches=2), Plan(chunk_bytes=512, placement={"head": "resident"}))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures drawn in a test, in order; they are saved all the same."""
    kept: list[Figure] = []

    def keep(figure: Figure, path: str | Path) -> Path:
        kept.append(figure)
        return save_png(figure, path)

    monkeypatch.setattr(analysis.lanes, "save", keep)
    monkeypatch.setattr(analysis.plots, "save", keep)
    return kept


def _random(seed: int, longest_ns: int = 10**6) -> Callable[[PlacedOp], int]:
    rng = random.Random(seed)
    return lambda q: rng.choice((0, rng.randrange(longest_ns // 10), rng.randrange(longest_ns)))


def _comparison(schedule: Schedule, seed: int = 1, slower: float = 1.0) -> Comparison:
    """Random times; the measured ones `slower` times as long or, at 1, random too, on a clock that does not begin at 0."""
    predicted = scheduled(schedule, PARTS, _random(seed))
    if slower != 1:
        durations = _random(seed)
        measured = scheduled(schedule, PARTS, lambda q: int(slower * durations(q)))
    else:
        measured = scheduled(schedule, PARTS, _random(seed + 1), _random(seed + 2, 10**5), origin_ns=10**9)
    return compare(schedule, predicted, replace(measured, source="cuda"))


def _texts(figure: Figure) -> Iterator[Text]:
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text.get_visible() and text.get_text().strip():
            yield text


def assert_legible(figure: Figure) -> None:
    """All text lies inside the picture, and no two texts meet."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    figure.draw(renderer)
    # Axes keep ticks beyond their limits without drawing them.
    beyond = {
        id(label)
        for ax in figure.axes
        for axis, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim())))
        for at, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
        if not low <= at <= high
    }
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in _texts(figure) if id(t) not in beyond]
    assert len(boxes) > 8
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, f"{text!r} is cut off"
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, f"{text!r} is cut off"
    for (a, first), (b, second) in combinations(boxes, 2):
        assert not first.padded(-0.5).overlaps(second.padded(-0.5)), f"{a!r} lies on {b!r}"


# ---- all pictures --------------------------------------------------------------------------------------------------------


def _draw_all(schedule: Schedule, folder: Path) -> list[Path]:
    points = [Point(weight_slots=d, chunk_bytes=c, step_ns=10**9 // d + c) for d in (1, 2, 3) for c in (0, 1 << 20)]
    rates = [ThroughputPoint(label=f"run {i}", predicted_tokens_per_s=i * 1000, measured_tokens_per_s=i * 900) for i in (1, 2)]
    return [
        plot_lanes(_comparison(schedule), folder / "lanes.png"),
        plot_throughput(rates, folder / "throughput.png"),
        plot_sweep(points, folder / "sweep.png"),
    ]


def test_settings_are_left_alone_and_not_taken_over(schedule: Schedule, tmp_path: Path) -> None:
    """The same picture for a caller with settings of their own, who finds them unchanged."""
    plain = [path.read_bytes() for path in _draw_all(schedule, tmp_path)]
    with mpl.style.context("dark_background"):
        mpl.rcParams |= {"font.size": 30, "xtick.direction": "in", "axes.grid": True, "lines.linewidth": 9, "legend.shadow": True}
        before = dict(mpl.rcParams)
        dark = [path.read_bytes() for path in _draw_all(schedule, tmp_path)]
        assert dict(mpl.rcParams) == before
    assert dark == plain


def test_pictures_are_opaque_and_bring_their_background(schedule: Schedule, tmp_path: Path) -> None:
    for path in _draw_all(schedule, tmp_path):
        pixels = matplotlib.image.imread(path)
        assert pixels.shape[2] == 3 or (pixels[..., 3] == 1).all()
        for corner in (pixels[0, 0], pixels[0, -1], pixels[-1, 0], pixels[-1, -1]):
            assert np.allclose(corner[:3], to_rgb(PAPER), atol=1 / 255)


def test_no_pyplot_is_loaded() -> None:
    code = "import sys, analysis.plots, analysis.report; print('matplotlib.pyplot' in sys.modules, 'sim' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]


# ---- lanes ---------------------------------------------------------------------------------------------------------------


def _window(facts: Facts, steps: tuple[int, ...]) -> tuple[int, int]:
    """Start and end of these steps, from the events alone; step 4 of PARTS follows a flush."""
    part = {0: 0, 1: 1, 2: 2, 3: 3, 4: 5, 5: 6}
    first, last = part[steps[0]], part[steps[-1]]
    rows = list(zip(facts.run.placed, facts.run.events, strict=True))
    stop = max(e.end_ns for q, e in rows if q.part == last and q.op.lane == "compute")
    if first == 0:
        return facts.run.begin_ns, stop
    lanes = LANES if first == 5 else ("compute",)
    return max(e.end_ns for q, e in rows if q.part == first - 1 and q.op.lane in lanes), stop


@pytest.mark.parametrize("steps", [(0,), (1,), (2, 3), (4,), (4, 5), (0, 1, 2, 3, 4, 5)])
def test_lanes_are_true_to_scale(schedule: Schedule, steps: tuple[int, ...], figures: list[Figure], tmp_path: Path) -> None:
    """In every row, ops take as much of the axis as they took of the time; in the compute rows ops and stalls tile all of it,
    but for what nobody has an op for after a flush."""
    comparison = _comparison(schedule, seed=len(steps))
    plot_lanes(comparison, tmp_path / "lanes.png", steps=steps)
    (ax,) = figures[0].axes
    unit = {"ms": 1e6, "us": 1e3}[ax.get_xlabel().rpartition("[")[2].rstrip("]")]
    drawn: dict[tuple[float, str], float] = {}
    names = {to_rgb(colour): kind for kind, colour in KIND_COLOURS.items()} | {to_rgb(TRACK): "track"}
    for collection in ax.collections:
        if isinstance(collection, PolyCollection):
            fill = tuple(float(c) for c in collection.get_facecolor()[0][:3])
            what = "stalls" if collection.get_hatch() else names[fill]
            for path in collection.get_paths():
                box = path.get_extents()
                key = (round((box.y0 + box.y1) / 2, 3), what)
                drawn[key] = drawn.get(key, 0) + box.width * unit
    pixel = unit / (ax.get_window_extent().width / ax.get_xlim()[1])
    for number, lane in enumerate(LANES):
        for below, facts in enumerate((comparison.predicted, comparison.measured)):
            y, run = round(2.5 * number + below, 3), facts.run
            start, stop = _window(facts, steps)
            busy: dict[str, int] = {}
            for i in run.lanes[lane]:
                inside = min(run.events[i].end_ns, stop) - max(run.events[i].start_ns, start)
                busy[run.placed[i].op.kind] = busy.get(run.placed[i].op.kind, 0) + max(0, inside)
            for kind, ns in busy.items():
                assert drawn.get((y, kind), 0) == pytest.approx(ns, abs=0.06 * pixel * len(run.lanes[lane]))
            assert drawn[y, "track"] == pytest.approx(stop - start)
            if lane == "compute":
                gaps = [(max(g.start_ns, start), min(g.stop_ns, stop)) for g in facts.stalls["compute"]]
                waited = sum(max(0, b - a) for a, b in gaps)
                assert drawn.get((y, "stalls"), 0) == pytest.approx(waited)
                if steps not in ((4,), (4, 5)):
                    assert waited + sum(busy.values()) == stop - start


@pytest.mark.parametrize("slower", [1.0, 0.01, 0.9, 1.001, 30])
def test_lanes_are_legible(schedule: Schedule, slower: float, figures: list[Figure], tmp_path: Path) -> None:
    plot_lanes(_comparison(schedule, slower=slower), tmp_path / "lanes.png", model_name="A model of a name of some length, 70B")
    assert_legible(figures[0])


def test_lanes_are_legible_with_two_thousand_ops(figures: list[Figure], tmp_path: Path) -> None:
    schedule = lower(MODEL, Recipe(seq_len=4, micro_batches=190), Plan(chunk_bytes=256))
    assert len(schedule.body.ops) > 2000
    predicted = simulate(schedule, H200, steps=3)
    measured = scheduled(schedule, predicted.parts, _random(5), _random(6, 10**5))
    plot_lanes(compare(schedule, predicted, measured), tmp_path / "lanes.png")
    assert_legible(figures[0])
    legend = {text.get_text() for box in figures[0].legends for text in box.get_texts()}
    assert {"load", "forward", "backward", "save", "update", "issue late", "update late"} <= legend


def test_every_kind_and_cause_has_a_colour_of_its_own() -> None:
    assert len(set(KIND_COLOURS.values())) == len(KIND_COLOURS)
    assert set(CAUSE_COLOURS) == set(CAUSES)


def test_the_title_says_times_and_ratio(schedule: Schedule, figures: list[Figure], tmp_path: Path) -> None:
    """Every op takes 1 us and then three times as long."""
    traces = [scheduled(schedule, PARTS, lambda q, n=n: n * 1000) for n in (1, 3)]
    found = compare(schedule, *traces)
    plot_lanes(found, tmp_path / "lanes.png", model_name="tiny")
    texts = {text.get_text() for text in _texts(figures[0])}
    step_us = found.step_time()["predicted_ns"].item() / 1000
    assert f"tiny: a step takes {3 * step_us:.3f} us, predicted {step_us:.3f} us (3.00x)" in texts
    assert "shown: step 1 of steps 0 to 5; above: means of the settled steps; predicted: sim, measured: sim" in {
        text.partition("; a number")[0] for text in texts
    }


def test_a_run_without_two_steps_in_a_row_can_be_shown(schedule: Schedule, figures: list[Figure], tmp_path: Path) -> None:
    trace = scheduled(schedule, ("prologue", "epilogue"), _random(1))
    plot_lanes(compare(schedule, trace, trace), tmp_path / "lanes.png")
    assert_legible(figures[0])
    assert any(text.get_text().startswith("A step takes") and "(1.00x)" in text.get_text() for text in _texts(figures[0]))


@pytest.mark.parametrize("steps", [(), (6,), (-1,), (1, 3), (2, 1), (5, 6)])
def test_steps_that_cannot_be_shown_are_refused(schedule: Schedule, steps: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be consecutive steps of the 6 that ran"):
        plot_lanes(_comparison(schedule), tmp_path / "lanes.png", steps=steps)
    assert not list(tmp_path.iterdir())


# ---- throughput ----------------------------------------------------------------------------------------------------------


def _points(count: int, spread: float, seed: int = 0, label: str = "7B, next_forward, depth") -> list[ThroughputPoint]:
    rng = random.Random(seed)
    out = []
    for i in range(count):
        predicted = 10_000 * spread ** rng.random()
        measured = predicted * rng.uniform(0.8, 1.2)
        out.append(
            ThroughputPoint(label=f"{label} {i}", predicted_tokens_per_s=predicted, measured_tokens_per_s=measured)
        )
    return out


@pytest.mark.parametrize("count", [1, 5, 25])
@pytest.mark.parametrize("spread", [1.01, 1000])
def test_throughput_is_legible(count: int, spread: float, figures: list[Figure], tmp_path: Path) -> None:
    points = _points(count, spread)
    plot_throughput(points, tmp_path / "throughput.png")
    texts = [text.get_text() for text in _texts(figures[0])]
    if len(figures[0].axes[0].texts) == count:
        assert_legible(figures[0])
    # Beside its point or in the list: every label is there.
    assert all(any(point.label in text for text in texts) for point in points)


def test_labels_without_room_are_listed(figures: list[Figure], tmp_path: Path) -> None:
    plot_throughput(_points(12, 1.01, label="a label far longer than what has room beside a point"), tmp_path / "throughput.png")
    (ax,) = figures[0].axes
    assert {text.get_text() for text in ax.texts} >= {str(n) for n in range(1, 13)}
    box = ax.texts[-1].get_window_extent(figures[0].canvas.get_renderer())  # type: ignore[attr-defined]
    assert box.x1 < figures[0].bbox.x1 and box.y0 > 0


def test_the_subtitle_counts_what_is_near(figures: list[Figure], tmp_path: Path) -> None:
    points = [
        ThroughputPoint(label=str(ratio), predicted_tokens_per_s=100, measured_tokens_per_s=100 * ratio)
        for ratio in (0.5, 0.91, 1.0, 1.09, 1.2)
    ]
    plot_throughput(points, tmp_path / "throughput.png")
    assert any(
        text.get_text() == "3 of 5 within the band of ±10% around measured = predicted; off by 9% (median), 50% (most)"
        for text in _texts(figures[0])
    )


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"throughput 'x': measured_tokens_per_s: must be a finite number > 0"):
        ThroughputPoint(label="x", predicted_tokens_per_s=1.0, measured_tokens_per_s=rate)


def test_no_points_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no points"):
        plot_throughput([], tmp_path / "x.png")
    with pytest.raises(ValueError, match="no points"):
        plot_sweep([], tmp_path / "x.png")


# ---- sweep ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_enough_is_the_first_depth_within_a_percent(seed: int) -> None:
    rng = random.Random(seed)
    points = [
        Point(weight_slots=depth, chunk_bytes=chunk, step_ns=10**9 + rng.randrange(3 * 10**7))
        for chunk in (0, 1 << 20, 3 << 20)
        for depth in rng.sample(range(1, 12), 8)
    ]
    table = sweep_table(rng.sample(points, len(points)))
    assert list(zip(table["chunk_bytes"], table["weight_slots"], table["step_ns"], strict=True)) == sorted(
        (p.chunk_bytes, p.weight_slots, p.step_ns) for p in points
    )
    for chunk, curve in table.groupby("chunk_bytes"):
        own = {p.weight_slots: p.step_ns for p in points if p.chunk_bytes == chunk}
        best = min(own.values())
        expected = min(depth for depth, ns in own.items() if ns <= 1.01 * best)
        assert list(curve["weight_slots"][curve["enough"]]) == [expected]
        assert curve["over_best_ratio"].min() == 1
        assert list(curve["over_best_ratio"] * best) == pytest.approx(list(curve["step_ns"]))


def test_two_points_of_one_plan_are_refused() -> None:
    points = [Point(weight_slots=3, chunk_bytes=4096, step_ns=ns) for ns in (1, 2)]
    with pytest.raises(ValueError, match="two points of weight_slots 3 and chunk_bytes 4096"):
        sweep_table(points)


@pytest.mark.parametrize("chunks", [(0,), (1 << 20,), (0, 1 << 20, 5_000_000, 1 << 26), tuple(2**k for k in range(12, 24))])
@pytest.mark.parametrize("depths", [(2,), range(1, 60)])
def test_a_sweep_is_legible_and_says_the_depth(
    chunks: tuple[int, ...], depths: range | tuple[int, ...], figures: list[Figure], tmp_path: Path
) -> None:
    points = [Point(weight_slots=d, chunk_bytes=c, step_ns=10**9 + 10**8 // d) for c in chunks for d in depths]
    plot_sweep(points, tmp_path / "sweep.png", model_name="Qwen2.5-7B")
    assert_legible(figures[0])
    labels = {text.get_text() for text in figures[0].axes[0].get_legend().get_texts()}
    enough = next(d for d in depths if 10**9 + 10**8 // d <= 1.01 * (10**9 + 10**8 // depths[-1]))
    assert len(labels) == len(chunks) and all(label.endswith(f": {enough}") for label in labels)
    if 1 << 20 in chunks:
        assert f"$2^{{20}}$ B (1 MiB): {enough}" in labels
    if 0 in chunks:
        assert f"whole blocks: {enough}" in labels
