"""A folder that says how good a prediction was: a page of figures and tables, pictures, a trace to browse, every op as CSV.

    report.md               the figures below; plain enough for a terminal, and shown with its pictures by what renders Markdown
    lanes.png               both traces on one time axis (`analysis.lanes`)
    trace.perfetto.json.gz  both traces for ui.perfetto.dev (`analysis.perfetto`)
    ops.csv                 `Comparison.ops`: a row an op of the run
    throughput.png          of several runs, if points are given (`analysis.plots`)

Figures. The step time is the settled one of `megatrain.derive`, tokens/s are real (non-padding) tokens of a step over it, and
TFLOPS are 6 x active parameters x tokens over it: 2 FLOPs a parameter and token in the forward, 4 in the backward. Recomputation
and attention are left out of the count as is usual, so it says how fast training is, not how busy the device.

The step time is explained without a rest (`step_account`): between the ends of two steps the compute lane runs an op or waits,
so the difference of two step times is the sum of the differences of its ops by kind and of its stalls by cause.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.compare import Comparison, compare
from analysis.perfetto import save_perfetto
from analysis.plots import ThroughputPoint, plot_lanes, plot_throughput
from analysis.tables import format_ns, format_table
from megatrain.derive import STEADY, Facts
from megatrain.files import refuse_irregular
from megatrain.schedule.nouns import Schedule
from megatrain.trace import Trace

FILES = {
    "text": "report.md", "lanes": "lanes.png", "trace": "trace.perfetto.json.gz", "ops": "ops.csv",
    "throughput": "throughput.png",
}  # fmt: skip
"""The names of the files above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a trace trained, by its settled step time."""

    step_ns: int
    tokens_per_s: float
    tflops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `write_report` found and wrote. The paces are None where no two steps ran in a row: there is no step time then."""

    comparison: Comparison
    predicted: Pace | None
    measured: Pace | None
    text: Path
    lanes: Path
    trace: Path
    ops: Path
    throughput: Path | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted step time; above 1, reality was slower."""
        if self.predicted is None or self.measured is None or not self.predicted.step_ns:
            return None
        return self.measured.step_ns / self.predicted.step_ns


def write_report(
    folder: str | Path,
    schedule: Schedule,
    predicted: Trace,
    measured: Trace,
    *,
    tokens_per_step: int,
    model_name: str,
    hardware_name: str,
    active_parameters: int | None = None,
    throughput: Sequence[ThroughputPoint] = (),
    tolerance: float = 0.3,
) -> Report:
    """Compare two traces of a schedule and write the files above into `folder`, which is made if need be.

    `tokens_per_step` counts real tokens; `active_parameters` (all of the model's by default) are those a token passes. Each file
    replaces one of its name whole or not at all, and none is touched unless all could be made. ForeignTrace and ValueError as
    `analysis.compare.compare`; ValueError for counts below 1.
    """
    parameters = schedule.model.numel if active_parameters is None else active_parameters
    for field, value in (("tokens_per_step", tokens_per_step), ("active_parameters", parameters)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"report.{field}: must be an integer >= 1, got {value!r}")
    found = compare(schedule, predicted, measured)
    step = found.step_time()
    paces: list[Pace | None] = [None, None]
    if not step.empty:
        paces = [pace(int(step[f"{role}_ns"].item()), tokens_per_step, parameters) for role in ("predicted", "measured")]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {what: name for what, name in FILES.items() if throughput or what != "throughput"}
    for name in names.values():
        refuse_irregular(folder / name)
    report = Report(
        comparison=found,
        predicted=paces[0],
        measured=paces[1],
        text=folder / names["text"],
        lanes=folder / names["lanes"],
        trace=folder / names["trace"],
        ops=folder / names["ops"],
        throughput=folder / names["throughput"] if throughput else None,
    )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as made:
        part = {what: Path(made) / name for what, name in names.items()}
        page = _page(report, schedule, (predicted, measured), tokens_per_step, parameters, model_name, hardware_name, tolerance)
        part["text"].write_text(page, encoding="utf-8")
        plot_lanes(found, part["lanes"], model_name=model_name)
        save_perfetto(part["trace"], schedule, predicted, measured)
        found.ops.to_csv(part["ops"], index=False)
        if throughput:
            plot_throughput(throughput, part["throughput"])
        for what, path in part.items():
            os.replace(path, folder / names[what])
    if not throughput:
        (folder / FILES["throughput"]).unlink(missing_ok=True)  # of other runs, whose report was here before
    return report


def pace(step_ns: int, tokens_per_step: int, active_parameters: int) -> Pace:
    """Tokens/s and TFLOPS of a step time (see the module's text); infinite for a step of no time."""
    per_s = 1e9 / step_ns if step_ns else float("inf")
    return Pace(
        step_ns=step_ns,
        tokens_per_s=tokens_per_step * per_s,
        tflops=6 * active_parameters * tokens_per_step * per_s / 1e12,
    )


def mispredicted(comparison: Comparison, tolerance: float = 0.3, *, least_share: float = 0.01) -> pd.DataFrame:
    """The op kinds (on their lane) whose total busy time was predicted wrongly and that matter, largest miss first.

    Wrongly: measured and predicted differ by more than `tolerance` of the predicted. That matter: in one of the traces their ops
    take at least `least_share` of the run. Columns: kind, lane, ops, durations of both, ratio, missed_ns (measured - predicted),
    missed_share (of all time missed, over all kinds, too much or too little), run_share (of the run, the larger of the two).
    """
    table = _by_miss(comparison)
    off = table["missed_ns"].abs() > tolerance * table["predicted_duration_ns"]
    return table[off & (table["run_share"] >= least_share)].reset_index(drop=True)


def _by_miss(comparison: Comparison) -> pd.DataFrame:
    """All op kinds, with the columns of `mispredicted`."""
    kinds = comparison.kinds
    missed = kinds["measured_duration_ns"] - kinds["predicted_duration_ns"]
    shares = pd.DataFrame({
        role: kinds[f"{role}_duration_ns"] / max(1, facts.run.end_ns - facts.run.begin_ns)
        for role, facts in (("predicted", comparison.predicted), ("measured", comparison.measured))
    })  # fmt: skip
    table = kinds.assign(
        missed_ns=missed, missed_share=missed.abs() / max(1, int(missed.abs().sum())), run_share=shares.max(axis="columns")
    )
    return table.sort_values("missed_share", ascending=False, kind="stable").reset_index(drop=True)


def step_account(comparison: Comparison) -> pd.DataFrame:
    """Where the settled step time goes, and where its difference comes from: a row for each kind of op of the compute lane, then
    one for each cause of its stalls.

    Columns: what; `predicted_ns` and `measured_ns`, means over the steps that the settled step time is the mean of, which they
    sum up to; difference_ns; difference_share (of the whole difference, signed). No rows where no two steps ran in a row.
    """
    steps = list(comparison.steps["step"])
    settled = steps[-min(STEADY, (len(steps) + 1) // 2) :]
    accounts = [_account(facts, settled) for facts in (comparison.predicted, comparison.measured)]
    what = sorted(set(accounts[0]) | set(accounts[1]), key=lambda key: (key.startswith("waits"), -accounts[1][key], key))
    table = pd.DataFrame({
        "what": what,
        "predicted_ns": [accounts[0][key] / len(settled) for key in what],
        "measured_ns": [accounts[1][key] / len(settled) for key in what],
    })  # fmt: skip
    difference = table["measured_ns"] - table["predicted_ns"]
    whole = difference.sum() or float("nan")
    return table.assign(difference_ns=difference, difference_share=difference / whole)


def _account(facts: Facts, steps: Sequence[int]) -> Counter[str]:
    """ns of the compute lane in these steps by kind of op and cause of stall. A step's ops follow those of the step before at
    once, so what lies between the ends of the two is its own ops and the gaps before them."""
    run = facts.run
    parts = [p for p, part in enumerate(run.parts) if part.name != "epilogue"]
    counted = {parts[step] for step in steps}
    account: Counter[str] = Counter()
    for i in run.lanes["compute"]:
        if run.placed[i].part in counted:
            account[run.placed[i].op.kind] += run.events[i].end_ns - run.events[i].start_ns
    for stall in facts.stalls["compute"]:
        if run.placed[stall.waiting].part in counted:
            for cause, piece in stall.blames:
                account[f"waits: {cause}"] += piece.ns
    return account


# ---- the page ----------------------------------------------------------------------------------------------------------


def _page(
    report: Report,
    schedule: Schedule,
    traces: tuple[Trace, Trace],
    tokens_per_step: int,
    active_parameters: int,
    model_name: str,
    hardware_name: str,
    tolerance: float,
) -> str:
    found = report.comparison
    sections = [
        f"# {model_name} on {hardware_name}: predicted and measured",
        _headline(report, tokens_per_step, active_parameters),
        "## What ran\n\n" + _what_ran(schedule, found),
        "## On one time axis\n\n![Predicted and measured lanes](lanes.png)",
    ]
    if report.predicted is not None:
        sections += [
            "## Where the step time goes\n\nThe compute lane, means over the settled steps: its ops by kind, then what it waits"
            " for. Both columns sum up to the step times above, the shares to 100% of their difference.",
            _fenced(step_account(found)),
            "Step by step:",
            _fenced(found.steps, max_rows=20),
        ]
    sections += [
        "## Op kinds, most missed first",
        "Busy time over the whole run. The missed share is that of all time missed over all kinds, too much or too little.",
        _fenced(_by_miss(found)),
        _wrong(mispredicted(found, tolerance), tolerance),
        "## Lanes\n\nOver the whole run. Bytes are those written; rates are those while busy, of the copies.",
        _fenced(_lanes(schedule, found)),
        "Share of the copies' time that lies under compute:",
        _fenced(found.overlap),
        "## Stalls of the compute lane\n\nOver the whole run, by cause:",
        _fenced(found.stalls[(found.stalls["predicted_ns"] != 0) | (found.stalls["measured_ns"] != 0)]),
        "The longest:",
        _fenced(found.worst_stalls(), max_rows=10),
        "## Ops missed by most\n\nMeans over the runs of a part, missed time over all of them; every op is in `ops.csv`.",
        _fenced(found.worst_ops(), max_rows=15),
    ]
    if report.throughput is not None:
        sections.append("## Throughput\n\n![Throughput, predicted and measured](throughput.png)")
    sections.append("## Notes\n\n" + _notes(traces))
    sections.append("`trace.perfetto.json.gz` opens in ui.perfetto.dev: both traces, op by op, with the causes of stalls.")
    return "\n\n".join(section.rstrip("\n") for section in sections) + "\n"


def _headline(report: Report, tokens_per_step: int, active_parameters: int) -> str:
    predicted, measured, ratio = report.predicted, report.measured, report.ratio
    if predicted is None or measured is None:
        return "No two steps ran in a row, so there is no step time to compare."
    rows = [
        ("step time", format_ns(predicted.step_ns), format_ns(measured.step_ns), ratio),
        ("tokens/s", f"{predicted.tokens_per_s:,.0f}", f"{measured.tokens_per_s:,.0f}", 1 / ratio if ratio else None),
        ("TFLOPS", f"{predicted.tflops:,.4g}", f"{measured.tflops:,.4g}", 1 / ratio if ratio else None),
    ]
    spread = report.comparison.step_time()
    sources = report.comparison.sources
    lines = [f"| | predicted ({sources[0]}) | measured ({sources[1]}) | measured / predicted |", "|---|--:|--:|--:|"]
    lines += [f"| {name} | {p} | {m} | {f'{r:.3f}x' if r else '-'} |" for name, p, m, r in rows]
    lines += [
        "",
        f"At {tokens_per_step:,} tokens a step; TFLOPS count 6 x {active_parameters:,} active parameters a token.",
        f"The steps averaged differ by {spread['predicted_spread_share'].item():.1%} (predicted) and"
        f" {spread['measured_spread_share'].item():.1%} (measured) of their mean.",
    ]
    return "\n".join(lines)


def _wrong(wrong: pd.DataFrame, tolerance: float) -> str:
    names = [f"{row.kind} on {row.lane} ({row.ratio:.2f}x)" for row in wrong.itertuples()]
    return f"Off by more than {tolerance:.0%}, and at least 1% of the run: {', '.join(names) or 'none'}."


def _what_ran(schedule: Schedule, found: Comparison) -> str:
    model, recipe, plan, run = schedule.model, schedule.recipe, schedule.plan, found.measured.run
    steps = sum(part.name != "epilogue" for part in run.parts)
    clip = "no clipping" if recipe.clip_norm is None else f"clipped at {recipe.clip_norm:g}"
    chunk = f"chunks of {plan.chunk_bytes:,} B" if plan.chunk_bytes else "whole blocks"
    lines = [
        f"- {'evaluation' if schedule.mode == 'evaluate' else 'training'}, {steps} step{'s' if steps > 1 else ''},"
        f" {len(run.placed):,} ops; digests: {', '.join(f'{name} `{digest}`' for name, digest in schedule.digests().items())}",
        f"- model: {model.numel:,} parameters in {len(model.layers)} layers, {recipe.precision}",
        f"- recipe: {recipe.micro_batches} micro-batch{'es' if recipe.micro_batches > 1 else ''} of {recipe.micro_batch_size} x"
        f" {recipe.seq_len:,} tokens, {clip}, {'compiled' if recipe.compiled else 'eager'}",
        f"- plan: update {plan.update}; {plan.weight_slots} weight slots, {plan.gradient_slots} gradient slots, {chunk};"
        f" {plan.adam_threads} thread{'s' if plan.adam_threads > 1 else ''} for AdamW; placement {_choices(plan.placement)};"
        f" activations {_choices(plan.activations)}"
        + (f"; update order {_choices(plan.update_order)}" if plan.update == "during_backward" else ""),
        "- the same bits under every plan: promised (recipe.deterministic)"
        if recipe.deterministic
        else "- the same bits under every plan, or twice under this one: **not promised** (recipe.deterministic is false)",
    ]
    if plan.update == "during_backward":
        lines.append("- a gradient that is not finite ends the run: updates are made before the whole norm is known")
    return "\n".join(lines)


def _choices(table: Mapping[str, str]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in table.items()) or "default"


def _lanes(schedule: Schedule, found: Comparison) -> pd.DataFrame:
    """Bytes of a (warm) step and of the run, use, and the rates of the copy lanes."""
    part = schedule.body if schedule.mode == "train" else schedule.prologue
    of_step = [sum(op.nbytes for op in part.ops if op.lane == lane) for lane in found.lanes["lane"]]
    copies = found.lanes["lane"].isin(["h2d", "d2h"])
    table = found.lanes[["lane", "ops"]].assign(run_nbytes=found.lanes["nbytes"], a_step_nbytes=of_step)
    for what in ("busy_ns", "utilisation"):
        for role in ("predicted", "measured"):
            table[f"{role}_{what}"] = found.lanes[f"{role}_{what}"]
    for role in ("predicted", "measured"):
        busy = found.lanes[f"{role}_busy_ns"].astype("float64")
        table[f"{role}_GB/s"] = (found.lanes["nbytes"] / busy.where(copies & (busy > 0))).round(2)
    return table


def _fenced(table: pd.DataFrame, *, max_rows: int | None = None) -> str:
    return f"```\n{format_table(table, max_rows=max_rows)}```"


def _notes(traces: Sequence[Trace]) -> str:
    lines = [f"- {role} ({trace.source}): {note}" for role, trace in zip(("predicted", "measured"), traces, strict=True)
             for note in trace.notes]  # fmt: skip
    return "\n".join(lines) or "None."
