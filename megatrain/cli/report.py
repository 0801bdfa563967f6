"""compare: two records, one report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.compare import ForeignTrace, common
from analysis.plots import ThroughputPoint
from analysis.report import Report, mispredicted, write_report
from analysis.tables import format_table
from megatrain.cli import show
from megatrain.derive import derive, settled
from megatrain.files import Record
from megatrain.schedule import Schedule, lower

Pair = tuple[Record, Record]
"""A prediction and the run it is of."""


def compared(pairs: Sequence[Pair], folder: Path, *, tolerance: float) -> Report:
    """The report of the first of `pairs`, with the throughput of all. ForeignTrace where the two of a pair are of different
    schedules."""
    points = [point(schedule_of(*pair), *pair) for pair in pairs]
    predicted, measured = pairs[0]
    schedule = schedule_of(predicted, measured)
    traces = common(predicted.trace, measured.trace)
    return write_report(
        folder, schedule, *traces, tokens_per_step=measured.job.recipe.tokens_per_step, model_name=measured.model_name,
        hardware_name=predicted.hardware, tolerance=tolerance, throughput=[p for p in points if p is not None],
    )  # fmt: skip


def point(schedule: Schedule, predicted: Record, measured: Record) -> ThroughputPoint | None:
    """Tokens/s of both; None where no two steps ran in a row."""
    recipe = measured.job.recipe
    rates = []
    for trace in common(predicted.trace, measured.trace):
        times = derive(schedule, trace).step_times_ns
        if not times:
            return None
        rates.append(recipe.tokens_per_step * 1e9 / settled(times).mean_ns)
    return ThroughputPoint(
        label=f"{measured.model_name}, {recipe.tokens_per_step:,} tokens, {measured.job.plan.update}",
        predicted_tokens_per_s=rates[0],
        measured_tokens_per_s=rates[1],
    )


def schedule_of(predicted: Record, measured: Record) -> Schedule:
    """The schedule that both are of."""
    schedule = lower(measured.model_spec(), measured.job.recipe, measured.job.plan)
    if lower(predicted.model_spec(), predicted.job.recipe, predicted.job.plan).digests() != schedule.digests():
        raise ForeignTrace(
            f"predicted is of {predicted.model_name} and measured of {measured.model_name} under another recipe or plan: they ran"
            " different schedules"
        )
    for role, record, right in (
        ("first", predicted, predicted.trace.source == "sim"),
        ("second", measured, measured.trace.source != "sim"),
    ):
        if not right:
            wanted = "a prediction, which simulate writes" if role == "first" else "a run, which run writes"
            raise ValueError(f"compare: the {role} file must be {wanted}; its trace comes from {record.trace.source}")
    return schedule


def tell(report: Report, tolerance: float) -> None:
    """What a person wants to know first."""
    if report.predicted and report.measured and report.ratio:
        show.rows(
            "Predicted and measured",
            ["", "step", "tokens/s", "TFLOPS"],
            [
                [who, show.seconds(pace.step_ns), f"{pace.tokens_per_s:,.0f}", f"{pace.tflops:.3g}"]
                for who, pace in (("predicted", report.predicted), ("measured", report.measured))
            ],
        )
        show.text(f"ratio of step times, measured / predicted: {report.ratio:.3f}")
    found = report.comparison
    show.text(format_table(found.lanes[["lane", "nbytes", "predicted_busy_ns", "measured_busy_ns", "ratio"]], title="Lanes"))
    show.text(format_table(found.stalls[found.stalls[["predicted_ns", "measured_ns"]].any(axis=1)],
                                title="Stalls of the compute lane by cause"))  # fmt: skip
    show.text(format_table(found.overlap, title="Copies under compute"))
    wrong = mispredicted(found, tolerance)
    if not wrong.empty:
        show.text(format_table(wrong, title=f"Op kinds predicted wrongly by more than {tolerance:.0%}"))
    pictures = [path.name for path in (report.lanes, report.throughput) if path is not None]
    files = f"{report.text.name}, {', '.join(pictures)}, {report.ops.name}, and {report.trace.name} for ui.perfetto.dev"
    show.text(f"written to {report.text.parent}: {files}")


def figures_of(report: Report) -> dict[str, Any]:
    return {
        "ratio": report.ratio,
        "predicted_step_ns": report.predicted.step_ns if report.predicted else None,
        "measured_step_ns": report.measured.step_ns if report.measured else None,
        "throughput": str(report.throughput) if report.throughput else None,
        "report": str(report.text), "lanes": str(report.lanes), "trace": str(report.trace), "ops": str(report.ops),
    }  # fmt: skip
