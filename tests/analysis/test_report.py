"""Reports: figures by hand, differences explained without a rest, files whole or untouched; and once with what really ran."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import analysis.report
from analysis.compare import Comparison, ForeignTrace, compare
from analysis.plots import ThroughputPoint
from analysis.report import Report, mispredicted, pace, step_account, write_report
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import LANES, PlacedOp, Schedule, lower, lower_evaluation
from megatrain.trace import Trace
from sim.simulate import simulate
from tests.timelines import MODEL, scheduled

PARTS = ("prologue", "body", "body", "body", "epilogue")
FILES = {"report.md", "lanes.png", "trace.perfetto.json.gz", "ops.csv"}


def _schedule(recipe: Recipe | None = None, **plan: object) -> Schedule:
    fields = {"chunk_bytes": 512, "placement": {"head": "resident"}} | plan
    return lower(MODEL, recipe or Recipe(seq_len=4, micro_batches=2), Plan(**fields))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return _schedule()


def _traces(schedule: Schedule, parts: tuple[str, ...] = PARTS, seed: int = 1) -> tuple[Trace, Trace]:
    def durations(seed: int) -> Callable[[PlacedOp], int]:
        rng = random.Random(seed)
        return lambda q: rng.randrange(1, 10**6)

    rng = random.Random(seed)
    measured = scheduled(schedule, parts, durations(seed + 1), lambda q: rng.choice((0, 0, rng.randrange(10**5))))
    return scheduled(schedule, parts, durations(seed)), replace(measured, source="cuda", notes=("a note of the run",))


def _write(folder: Path, schedule: Schedule, traces: tuple[Trace, Trace], **fields: object) -> Report:
    given = {"tokens_per_step": 8, "model_name": "tiny", "hardware_name": "bench"} | fields
    return write_report(folder, schedule, *traces, **given)  # type: ignore[arg-type]


# ---- figures -------------------------------------------------------------------------------------------------------------


def test_pace_by_hand() -> None:
    """2 s for 16,384 tokens through 7e9 parameters: 8,192 tokens/s, 6 x 7e9 x 8,192 FLOP/s."""
    found = pace(2 * 10**9, 16_384, 7 * 10**9)
    assert (found.step_ns, found.tokens_per_s) == (2 * 10**9, 8192)
    assert found.tflops == pytest.approx(344.064)


@pytest.mark.parametrize("parts", [PARTS, ("prologue", "body", "epilogue", "prologue", "body", "body", "epilogue")])
@pytest.mark.parametrize("seed", range(4))
def test_the_step_time_is_explained_without_a_rest(schedule: Schedule, parts: tuple[str, ...], seed: int) -> None:
    found = compare(schedule, *_traces(schedule, parts, seed))
    account, step = step_account(found), found.step_time()
    for role in ("predicted", "measured"):
        assert account[f"{role}_ns"].sum() == pytest.approx(step[f"{role}_ns"].item(), abs=1)
        assert (account[f"{role}_ns"] >= 0).all()
    assert account["difference_share"].sum() == pytest.approx(1)
    assert list(account["difference_ns"]) == pytest.approx(list(account["measured_ns"] - account["predicted_ns"]))
    stalls = account["what"].str.startswith("waits: ")
    assert set(account["what"][~stalls]) == {op.kind for op in schedule.body.ops if op.lane == "compute"}


def test_a_slower_kind_takes_all_of_the_difference(schedule: Schedule) -> None:
    """Nothing but the loss, on the one lane that has work, takes longer: the waits stay as they were."""
    quick = scheduled(schedule, PARTS, lambda q: 10 if q.op.lane == "compute" else 0)
    slow = scheduled(schedule, PARTS, lambda q: 25 if q.op.kind == "loss" else 10 if q.op.lane == "compute" else 0)
    account = step_account(compare(schedule, quick, slow)).set_index("what")
    micro_batches = schedule.recipe.micro_batches
    assert account.loc["loss", "difference_ns"] == 15 * micro_batches
    assert account["difference_share"].drop("loss").abs().sum() == 0


def _changed(schedule: Schedule, change: Callable[[PlacedOp], float]) -> Comparison:
    """Every op takes 1 us as predicted, and `change` times that as measured."""
    quick = scheduled(schedule, PARTS, lambda q: 1000)
    return compare(schedule, quick, scheduled(schedule, PARTS, lambda q: round(1000 * change(q))))


def test_mispredicted_names_the_kind_that_was(schedule: Schedule) -> None:
    found = _changed(schedule, lambda q: {"backward": 1.5, "save": 0.25, "forward": 1.2}.get(q.op.kind, 1))
    table = mispredicted(found, least_share=0)
    assert dict(zip(table["kind"], table["ratio"], strict=True)) == {"save": 0.25, "backward": 1.5}
    assert table["missed_ns"].abs().is_monotonic_decreasing
    ops = {kind: sum(e.kind == kind for e in (op for op in found.ops.itertuples())) for kind in ("save", "backward", "forward")}
    missed = {"save": -750 * ops["save"], "backward": 500 * ops["backward"], "forward": 200 * ops["forward"]}
    whole = sum(map(abs, missed.values()))
    for row in table.itertuples():
        assert row.missed_ns == missed[str(row.kind)]
        assert row.missed_share == pytest.approx(abs(missed[str(row.kind)]) / whole)
    assert {"save", "backward", "forward"} == set(mispredicted(found, 0.1, least_share=0)["kind"])
    assert mispredicted(found, 1).empty


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_what_takes_little_of_the_run_does_not_matter(schedule: Schedule, ratio: float) -> None:
    """clip: one op a step of dozens."""
    found = _changed(schedule, lambda q: ratio if q.op.kind == "clip" else 1)
    runs = [facts.run.end_ns - facts.run.begin_ns for facts in (found.predicted, found.measured)]
    row = found.kinds.set_index("kind").loc["clip"]
    share = max(row["predicted_duration_ns"] / runs[0], row["measured_duration_ns"] / runs[1])
    assert list(mispredicted(found, least_share=share * 0.999)["kind"]) == ["clip"]
    assert mispredicted(found, least_share=share * 1.001).empty


def test_a_kind_predicted_to_take_no_time_is_mispredicted(schedule: Schedule) -> None:
    free = scheduled(schedule, PARTS, lambda q: 0 if q.op.kind == "pack" else 1000)
    found = mispredicted(compare(schedule, free, scheduled(schedule, PARTS, lambda q: 1000)))
    assert list(found["kind"]) == ["pack"]


# ---- files ---------------------------------------------------------------------------------------------------------------


def test_a_report_holds_what_the_comparison_says(schedule: Schedule, tmp_path: Path) -> None:
    traces = _traces(schedule)
    report = _write(tmp_path / "new" / "folder", schedule, traces, active_parameters=10**6)
    found = report.comparison
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == FILES
    assert report.throughput is None
    step = found.step_time()
    assert report.predicted == pace(int(step["predicted_ns"].item()), 8, 10**6)
    assert report.measured == pace(int(step["measured_ns"].item()), 8, 10**6)
    assert report.ratio == pytest.approx(step["ratio"].item())
    read = pd.read_csv(report.ops)
    pd.testing.assert_frame_equal(read, found.ops, check_dtype=False)
    events = json.loads(gzip.decompress(report.trace.read_bytes()))["traceEvents"]
    assert sum(e["ph"] == "X" and e["cat"] != "stall" for e in events) == 2 * len(found.ops)
    assert report.lanes.read_bytes().startswith(b"\x89PNG")
    text = report.text.read_text(encoding="utf-8")
    assert text.startswith("# tiny on bench: predicted and measured\n")
    for words in (
        f"{report.predicted.tokens_per_s:,.0f} | {report.measured.tokens_per_s:,.0f} | {1 / report.ratio:.3f}x",
        "At 8 tokens a step; TFLOPS count 6 x 1,000,000 active parameters a token.",
        "predicted (sim) | measured (cuda)",
        "- measured (cuda): a note of the run",
        f"{len(found.ops):,} ops",
        schedule.digests()["body"],
        "waits: update late",
        "Off by more than 30%",
        found.worst_ops()["name"][0],
        found.worst_stalls()["waiting"][0],
        "promised (recipe.deterministic)",
    ):
        assert words in text, words
    assert "throughput.png" not in text and "not finite" not in text
    assert text.count("```") % 2 == 0


def test_bytes_are_given_for_the_run_and_for_a_step(schedule: Schedule, tmp_path: Path) -> None:
    lines = _write(tmp_path, schedule, _traces(schedule)).text.read_text(encoding="utf-8").splitlines()
    lanes = lines[lines.index("## Lanes") :]
    header = next(i for i, line in enumerate(lanes) if line.startswith("lane "))
    assert "[KiB]" in lanes[header]
    parts = {"prologue": 1, "body": 3, "epilogue": 1}
    for lane in LANES:
        row = next(line for line in lanes[header:] if line.startswith(lane)).split()
        of = {name: sum(op.nbytes for op in schedule.part(name).ops if op.lane == lane) for name in parts}
        run = sum(of[name] * n for name, n in parts.items())
        assert row[1] == str(sum(n * sum(op.lane == lane for op in schedule.part(name).ops) for name, n in parts.items()))
        assert float(row[2].replace(",", "")) == pytest.approx(run / 1024, abs=6e-4)
        assert float(row[3].replace(",", "")) == pytest.approx(of["body"] / 1024, abs=6e-4)


def test_what_a_plan_or_recipe_does_not_promise_is_said(tmp_path: Path) -> None:
    schedule = _schedule(
        Recipe(seq_len=4, clip_norm=None, deterministic=False), update="during_backward", chunk_bytes=0, placement={}
    )
    text = _write(tmp_path, schedule, _traces(schedule)).text.read_text(encoding="utf-8")
    assert "**not promised** (recipe.deterministic is false)" in text
    assert "a gradient that is not finite ends the run" in text


def test_throughput_of_several_runs_is_drawn_if_given(schedule: Schedule, tmp_path: Path) -> None:
    point = ThroughputPoint(label="x", predicted_tokens_per_s=1.0, measured_tokens_per_s=1.5)
    report = _write(tmp_path, schedule, _traces(schedule), throughput=[point])
    assert report.throughput is not None and report.throughput.read_bytes().startswith(b"\x89PNG")
    assert "(throughput.png)" in report.text.read_text(encoding="utf-8")
    _write(tmp_path, schedule, _traces(schedule))
    assert not report.throughput.exists(), "a report of one run beside the picture of others"


def test_a_report_that_fails_leaves_the_one_before(schedule: Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, schedule, _traces(schedule))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fails(*args: object, **fields: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(analysis.report, "save_perfetto", fails)
    with pytest.raises(OSError, match="no space"):
        _write(tmp_path, schedule, _traces(schedule, seed=9))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_report_replaces_the_one_before(schedule: Schedule, tmp_path: Path) -> None:
    _write(tmp_path / "a", schedule, _traces(schedule))
    _write(tmp_path / "a", schedule, _traces(schedule, seed=9))
    _write(tmp_path / "b", schedule, _traces(schedule, seed=9))
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab")
    assert a == b and set(a) == FILES


def test_runs_without_a_step_time_have_a_report(schedule: Schedule, tmp_path: Path) -> None:
    evaluation = lower_evaluation(MODEL, schedule.recipe, schedule.plan)
    for name, of, parts in (("one step", schedule, ("prologue", "epilogue")), ("evaluation", evaluation, ("prologue",))):
        report = _write(tmp_path / name, of, _traces(of, parts))
        assert (report.predicted, report.measured, report.ratio) == (None, None, None)
        assert step_account(report.comparison).empty
        text = report.text.read_text(encoding="utf-8")
        assert "No two steps ran in a row" in text and "Where the step time goes" not in text


@pytest.mark.parametrize("field", ["tokens_per_step", "active_parameters"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True])
def test_counts_below_one_are_refused(schedule: Schedule, field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"report\.{field}: must be an integer >= 1, got {value}"):
        _write(tmp_path / "folder", schedule, _traces(schedule), **{field: value})
    assert not list(tmp_path.iterdir())


def test_a_trace_of_another_schedule_is_refused_and_nothing_written(schedule: Schedule, tmp_path: Path) -> None:
    with pytest.raises(ForeignTrace):
        _write(tmp_path / "folder", schedule, _traces(_schedule(chunk_bytes=1024)))
    assert not list(tmp_path.iterdir())


# ---- what really ran -------------------------------------------------------------------------------------------------------


def test_a_real_run_beside_its_simulation(tmp_path: Path) -> None:
    """Sim and engine, of one schedule: what the whole project is for."""
    from megatrain.engine.engine import Engine
    from tests.engine.small import random_batches, random_weights, small_model, small_recipe
    from tests.sim.conftest import HOST

    model, recipe = small_model(num_hidden_layers=3), small_recipe()
    with Engine(model, recipe, Plan(chunk_bytes=4096), random_weights(model)) as engine:
        for batch in random_batches(model, recipe, 4):
            engine.step(batch)
        measured, schedule = engine.trace(), engine.schedule
    predicted = simulate(schedule, HOST, parts_run=measured.parts)
    report = _write(tmp_path, schedule, (predicted, measured), tokens_per_step=recipe.tokens_per_step)
    assert report.comparison.sources == ("sim", "cpu")
    assert report.measured is not None and report.measured.tokens_per_s > 0
    account = step_account(report.comparison)
    assert account["measured_ns"].sum() == pytest.approx(report.measured.step_ns, abs=1)
    for note in (*predicted.notes, *measured.notes):
        assert note in report.text.read_text(encoding="utf-8")
