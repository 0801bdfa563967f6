"""compare: two records, one report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from analysis.compare import ForeignTrace, common, refuse_foreign
from analysis.plots import ThroughputPoint
from analysis.report import Report, mispredicted, write_report
from analysis.tables import format_table
from megatrain.cli import show
from megatrain.cli.exits import naming
from megatrain.derive import derive, join, settled
from megatrain.files import Record
from megatrain.schedule import Schedule, lower


class Named(NamedTuple):
    """A record and its file, which messages begin with."""

    file: Path
    record: Record


Pair = tuple[Named, Named]
"""A prediction and the run it is of."""


def compared(pairs: Sequence[Pair], folder: Path, *, tolerance: float) -> Report:
    """The report of the first of `pairs`, with the throughput of all. ValueError, naming the file, for a trace that is damaged
    or not of its own job, and where the two of a pair are of different schedules."""
    schedules = [schedule_of(*pair) for pair in pairs]
    points = [point(schedule, *pair) for schedule, pair in zip(schedules, pairs, strict=True)]
    schedule, predicted, measured = schedules[0], pairs[0][0].record, pairs[0][1].record
    traces = common(predicted.trace, measured.trace)
    return write_report(
        folder, schedule, *traces, tokens_per_step=measured.job.recipe.tokens_per_step, model_name=shown(measured.model_name),
        hardware_name=shown(predicted.hardware), tolerance=tolerance, throughput=[p for p in points if p is not None],
    )  # fmt: skip


def shown(name: str) -> str:
    """A name as text to draw: fonts have nothing for control characters, and a line break would break a table."""
    return "".join(c if c.isprintable() else " " for c in name)


def point(schedule: Schedule, predicted: Named, measured: Named) -> ThroughputPoint | None:
    """Tokens/s of both; None where no two steps ran in a row."""
    run = measured.record
    recipe = run.job.recipe
    with naming(f"{predicted.file} and {measured.file}"):
        traces = common(predicted.record.trace, run.trace)
    rates = []
    for named, trace in zip((predicted, measured), traces, strict=True):
        with naming(named.file):
            if trace is not named.record.trace:
                join(schedule, named.record.trace)  # what is left out of the comparison is to be whole too
            facts = derive(schedule, trace)
            for step, ns in zip(facts.timed_steps, facts.step_times_ns, strict=True):
                if ns < 1:
                    raise ValueError(f"trace.events: step {step} must end after the one before, got {ns} ns between them")
        times = facts.step_times_ns
        if not times:
            return None
        rates.append(recipe.tokens_per_step * 1e9 / settled(times).mean_ns)
    return ThroughputPoint(
        label=f"{shown(run.model_name)}, {recipe.tokens_per_step:,} tokens, {run.job.plan.update}",
        predicted_tokens_per_s=rates[0],
        measured_tokens_per_s=rates[1],
    )


def schedule_of(predicted: Named, measured: Named) -> Schedule:
    """The schedule that both are of."""
    schedules = []
    for role, (file, record) in (("predicted", predicted), ("measured", measured)):
        with naming(file):
            schedule = lower(record.model_spec(), record.job.recipe, record.job.plan)
            refuse_foreign(schedule, record.trace, role)
            schedules.append(schedule)
    if schedules[0].digests() != schedules[1].digests():
        raise ForeignTrace(
            f"{predicted.file} is of {predicted.record.model_name} and {measured.file} of {measured.record.model_name} under"
            " another recipe or plan: they ran different schedules"
        )
    for role, (file, record), right in (
        ("first", predicted, predicted.record.trace.source == "sim"),
        ("second", measured, measured.record.trace.source != "sim"),
    ):
        if not right:
            wanted = "a prediction, which simulate writes" if role == "first" else "a run, which run writes"
            raise ValueError(f"{file}: the {role} file must be {wanted}; its trace comes from {record.trace.source}")
    return schedules[1]


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
