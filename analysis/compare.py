"""Predicted and measured, side by side: where a model was right, and where it was wrong.

Both traces must be of the very schedule they are compared under. A measured trace's digests are recomputed by the engine from
what each lane really ran, waited for and bound; so a trace whose digest of a part differs from the schedule's comes from an
engine that did something else (swapped two ops, dropped one, copied to the wrong slot) or from another schedule, and is
refused: its times would be compared op by op with times of different work.

A ratio is measured over predicted: above 1, reality was slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from analysis.tables import format_table
from megatrain.derive import CAUSES, Facts, by_cause, derive, settled
from megatrain.schedule.nouns import LANES, Schedule
from megatrain.trace import Trace


class ForeignTrace(ValueError):
    """A trace of another schedule, or of another sequence of parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The tables of one comparison; times in ns, `predicted_` and `measured_` before what both have.

    `ops`: a row an op of the run: part, part_name, index, name, lane, kind; issued, start, end, duration of both; ratio (of
    durations; NaN where the prediction is 0).
    `parts`: a row an op of each part that ran, means over its repetitions: runs, duration of both, ratio.
    `lanes`: busy, idle, stalled, utilisation of both; nbytes; ratio (of busy time).
    `kinds`: total duration by kind and lane, ratio.
    `stalls`: a row a cause: stalled time of the compute lane of both, and the difference.
    `overlap`: a row a copy lane: the share of its busy time that lies under compute, of both.
    `steps`: a row a step that follows another without a flush: its number in the run, step time of both, ratio.
    """

    ops: pd.DataFrame
    parts: pd.DataFrame
    lanes: pd.DataFrame
    kinds: pd.DataFrame
    stalls: pd.DataFrame
    overlap: pd.DataFrame
    steps: pd.DataFrame
    predicted: Facts
    measured: Facts
    sources: tuple[str, str]

    def step_time(self) -> pd.DataFrame:
        """One row: the settled step time of both with its spread, and the ratio. No row where no two steps ran in a row."""
        if self.steps.empty:
            return pd.DataFrame()
        predicted, measured = settled(self.predicted.step_times_ns), settled(self.measured.step_times_ns)
        row = {
            "predicted_ns": predicted.mean_ns,
            "measured_ns": measured.mean_ns,
            "ratio": _over(measured.mean_ns, predicted.mean_ns),
            "predicted_spread_share": predicted.spread,
            "measured_spread_share": measured.spread,
        }
        return pd.DataFrame([row])

    def worst_ops(self) -> pd.DataFrame:
        """The rows of `parts` by how much their mean duration missed, summed over their runs; largest first."""
        missed = (self.parts["measured_duration_ns"] - self.parts["predicted_duration_ns"]) * self.parts["runs"]
        table = self.parts.assign(missed_ns=missed)
        return table.loc[missed.abs().sort_values(ascending=False, kind="stable").index].reset_index(drop=True)

    def worst_stalls(self) -> pd.DataFrame:
        """Every gap of the compute lane before an op, in either trace, longest measured first: the op that waited, the gap
        and its cause in both (0 and None where one trace has no such gap)."""
        both = []
        for facts in (self.predicted, self.measured):
            both.append({gap.waiting: gap for gap in facts.stalls["compute"]})
        rows = []
        for position in sorted(both[0].keys() | both[1].keys()):
            row: dict[str, object] = {"waiting": self.measured.run.text(position)}
            for name, gaps in zip(("predicted", "measured"), both, strict=True):
                gap = gaps.get(position)
                row[f"{name}_ns"] = gap.ns if gap else 0
                row[f"{name}_cause"] = gap.cause if gap else None
            rows.append(row)
        table = pd.DataFrame(rows, columns=["waiting", "predicted_ns", "predicted_cause", "measured_ns", "measured_cause"])
        return table.sort_values(["measured_ns", "predicted_ns"], ascending=False, kind="stable").reset_index(drop=True)

    def to_text(self, *, rows: int = 10) -> str:
        """A page for a terminal; of the long tables the first `rows`."""
        predicted, measured = self.sources
        step = self.step_time()
        tables = [f"predicted: {predicted}    measured: {measured}    ratio: measured / predicted\n"]
        if not step.empty:
            tables.append(format_table(step, title="Step time"))
        tables += [
            format_table(self.lanes, title="Lanes"),
            format_table(self.overlap, title="Copies under compute"),
            format_table(self.kinds, title="Time by kind"),
            format_table(_seen(self.stalls), title="Stalls of the compute lane by cause"),
            format_table(self.worst_stalls(), title="Longest stalls of the compute lane", max_rows=rows),
            format_table(self.worst_ops(), title="Ops whose time was missed by most (means a part)", max_rows=rows),
        ]
        return "\n".join(tables)


def compare(schedule: Schedule, predicted: Trace, measured: Trace) -> Comparison:
    """ForeignTrace (a ValueError) unless both traces ran the same parts with the digests of `schedule`; ValueError for a
    trace whose events are incomplete or break the schedule (see `megatrain.derive.join`)."""
    for role, trace in (("predicted", predicted), ("measured", measured)):
        refuse_foreign(schedule, trace, role)
    if predicted.parts != measured.parts:
        raise ForeignTrace(
            f"the predicted trace ran {_sequence(predicted)}, the measured {_sequence(measured)}: only traces of the same"
            " parts in the same order can be compared op by op; simulate as many steps as were run"
        )
    facts = derive(schedule, predicted), derive(schedule, measured)
    ops = _ops(*facts)
    return Comparison(
        ops=ops,
        parts=_parts(ops),
        lanes=_lanes(*facts),
        kinds=_kinds(ops),
        stalls=_stalls(*facts),
        overlap=_overlap(*facts),
        steps=_steps(*facts),
        predicted=facts[0],
        measured=facts[1],
        sources=(predicted.source, measured.source),
    )


def common(a: Trace, b: Trace) -> tuple[Trace, Trace]:
    """Two traces of a schedule, cut to the parts that both ran from their start in the same order: a prediction of twelve steps
    and a run of sixty compare over twelve. ValueError if they have none in common."""
    count = 0
    for one, other in zip(a.parts, b.parts, strict=False):
        if one != other:
            break
        count += 1
    if not count:
        raise ValueError(f"compare: the predicted trace ran {_sequence(a)}, the measured {_sequence(b)}: no part in common")
    return _first_parts(a, count), _first_parts(b, count)


def _first_parts(trace: Trace, count: int) -> Trace:
    if count == len(trace.parts):
        return trace
    return replace(
        trace,
        parts=trace.parts[:count],
        digests=trace.digests[:count],
        events=tuple(event for event in trace.events if event.part < count),
    )


def refuse_foreign(schedule: Schedule, trace: Trace, role: str = "trace") -> None:
    """ForeignTrace, naming the part and both digests, if a part of the trace is not that part of the schedule."""
    own = schedule.digests()
    for p, (name, digest) in enumerate(zip(trace.parts, trace.digests, strict=True)):
        if name not in own:
            raise ForeignTrace(f"{role} ({trace.source}): part {p} is {name!r}, the schedule has {', '.join(own)}")
        if digest != own[name]:
            raise ForeignTrace(
                f"{role} ({trace.source}): part {p} ({name}) ran {digest}, the schedule's {name} is {own[name]}:"
                " the trace is of another schedule, or what ran did not follow this one"
            )


# ---- the tables ------------------------------------------------------------------------------------------------------


def _ops(predicted: Facts, measured: Facts) -> pd.DataFrame:
    run = predicted.run
    columns: dict[str, list[object]] = {
        "part": [q.part for q in run.placed],
        "part_name": [run.parts[q.part].name for q in run.placed],
        "index": [i for _, i, _, _ in run.placed],
        "name": [q.op.name for q in run.placed],
        "lane": [q.op.lane for q in run.placed],
        "kind": [q.op.kind for q in run.placed],
    }
    for name, facts in (("predicted", predicted), ("measured", measured)):
        events = facts.run.events
        columns[f"{name}_issued_ns"] = [e.issued_ns for e in events]
        columns[f"{name}_start_ns"] = [e.start_ns for e in events]
        columns[f"{name}_end_ns"] = [e.end_ns for e in events]
        columns[f"{name}_duration_ns"] = [e.end_ns - e.start_ns for e in events]
    return _with_ratio(pd.DataFrame(columns), "duration_ns")


def _parts(ops: pd.DataFrame) -> pd.DataFrame:
    keys = ["part_name", "index", "name", "lane", "kind"]
    means = ops.groupby(keys, sort=False, as_index=False).agg(
        runs=("part", "size"),
        predicted_duration_ns=("predicted_duration_ns", "mean"),
        measured_duration_ns=("measured_duration_ns", "mean"),
    )
    return _with_ratio(means, "duration_ns")


def _kinds(ops: pd.DataFrame) -> pd.DataFrame:
    totals = ops.groupby(["kind", "lane"], sort=False, as_index=False).agg(
        ops=("part", "size"),
        predicted_duration_ns=("predicted_duration_ns", "sum"),
        measured_duration_ns=("measured_duration_ns", "sum"),
    )
    return _with_ratio(totals, "duration_ns")


def _lanes(predicted: Facts, measured: Facts) -> pd.DataFrame:
    rows = []
    for lane in LANES:
        row: dict[str, object] = {"lane": lane, "ops": predicted.lanes[lane].ops, "nbytes": predicted.lanes[lane].nbytes}
        for name, facts in (("predicted", predicted), ("measured", measured)):
            use = facts.lanes[lane]
            row[f"{name}_busy_ns"] = use.busy_ns
            row[f"{name}_stalled_ns"] = use.stalled_ns
            row[f"{name}_idle_ns"] = use.idle_ns
            row[f"{name}_utilisation"] = use.utilisation
        rows.append(row)
    return _with_ratio(pd.DataFrame(rows), "busy_ns")


def _stalls(predicted: Facts, measured: Facts) -> pd.DataFrame:
    of_predicted, of_measured = by_cause(predicted.stalls["compute"]), by_cause(measured.stalls["compute"])
    table = pd.DataFrame(
        {
            "cause": list(CAUSES),
            "predicted_ns": [of_predicted[cause] for cause in CAUSES],
            "measured_ns": [of_measured[cause] for cause in CAUSES],
        }
    )
    return table.assign(difference_ns=table["measured_ns"] - table["predicted_ns"])


def _overlap(predicted: Facts, measured: Facts) -> pd.DataFrame:
    rows = [
        {"lane": lane, "predicted_share": predicted.overlap[lane].fraction, "measured_share": measured.overlap[lane].fraction}
        for lane in predicted.overlap
    ]
    return pd.DataFrame(rows)


def _steps(predicted: Facts, measured: Facts) -> pd.DataFrame:
    times = predicted.step_times_ns, measured.step_times_ns
    table = pd.DataFrame({"step": predicted.timed_steps, "predicted_ns": times[0], "measured_ns": times[1]})
    return _with_ratio(table, "ns")


def _with_ratio(table: pd.DataFrame, figure: str) -> pd.DataFrame:
    """Measured over predicted `figure`, NaN where the prediction is 0."""
    over = table[f"predicted_{figure}"].astype("float64")
    return table.assign(ratio=table[f"measured_{figure}"] / over.where(over != 0))


def _over(measured: int, predicted: int) -> float:
    return measured / predicted if predicted else float("nan")


def _seen(stalls: pd.DataFrame) -> pd.DataFrame:
    """Without the causes that neither trace has."""
    return stalls[(stalls["predicted_ns"] != 0) | (stalls["measured_ns"] != 0)]


def _sequence(trace: Trace) -> str:
    """`prologue, 10 x body, epilogue`."""
    runs: list[tuple[str, int]] = []
    for name in trace.parts:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in runs) or "nothing"
