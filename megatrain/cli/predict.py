"""Predictions: a job on a machine, simulated, as a record with the figures people ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.catalog import model_spec
from megatrain.cli import show
from megatrain.derive import Facts, StepTime, derive, step_time
from megatrain.files import Job, Record, refuse_irregular, write_file
from megatrain.hardware import HardwareProfile
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import DTYPE_NBYTES, Recipe
from megatrain.schedule import Schedule, check, lower
from sim.ledger import Ledger, fits, ledger, shortages
from sim.planner import Infeasible, default_plan
from sim.simulate import simulate
from sim.sweep import Steady, steady

SWEEP_FILES = ("sweep.csv", "sweep.png")
"""What a sweep writes into its folder."""


class Prediction(NamedTuple):
    """A simulated run and what follows from it."""

    record: Record
    schedule: Schedule
    facts: Facts
    step: StepTime

    def lines(self) -> dict[str, str]:
        recipe = self.schedule.recipe
        return {
            "step": f"{show.seconds(self.step.mean_ns)} (spread of the last steps {self.step.spread:.2%})",
            "tokens/s": f"{self.tokens_per_s:,.0f} at {recipe.tokens_per_step:,} tokens a step",
            "TFLOPS": f"{self.tflops:.3g} (6 x {self.schedule.model.numel / 1e9:.3g}e9 parameters x tokens)",
            "update": f"{self.schedule.plan.update}, clipping {recipe.clip_norm if recipe.clip_norm is not None else 'off'}",
        }

    @property
    def tokens_per_s(self) -> float:
        return self.schedule.recipe.tokens_per_step * 1e9 / self.step.mean_ns

    @property
    def tflops(self) -> float:
        return 6 * self.schedule.model.numel * self.tokens_per_s / 1e12

    @property
    def steady(self) -> Steady:
        """What the lanes do in a settled step."""
        return steady(self.schedule, self.record.trace)

    def figures(self) -> dict[str, Any]:
        return {
            "model": self.schedule.model.name, "hardware": self.record.hardware, "step_ns": self.step.mean_ns,
            "spread": self.step.spread, "tokens_per_step": self.schedule.recipe.tokens_per_step,
            "tokens_per_s": self.tokens_per_s, "tflops": self.tflops,
            "busy": dict(self.steady.busy), "stalls_ns": dict(self.steady.stalls),
            "notes": list(self.record.trace.notes),
        }  # fmt: skip


def refuse_too_large(model: ModelSpec, recipe: Recipe, plan: Plan, machine: HardwareProfile) -> Ledger:
    """The ledger of a plan; Infeasible with the memory, the phase and the bytes where it does not fit."""
    book = ledger(model, recipe, plan, machine)
    short = fits(book, machine)
    if short is not None:
        raise Infeasible(f"{model.name} on {machine.name}: {short}", (short,))
    return book


def beyond_positions(model: ModelSpec, recipe: Recipe) -> str | None:
    """A line for whoever trains on longer sequences than the model was made for, which is allowed; else None."""
    most = model.max_position_embeddings
    if recipe.seq_len <= most:
        return None
    return (
        f"sequences of {recipe.seq_len:,} tokens (seq_len) go beyond the {most:,} positions of {model.name}"
        " (max_position_embeddings): this is allowed, but its weights may not know the others"
    )


def usable_seeds(job: Job | None, model: ModelSpec, recipe: Recipe, machine: HardwareProfile) -> tuple[Plan, ...]:
    """The job's plan, if it is one of this model, recipe and machine, which need not be the job's own. ValueError for a plan that
    contradicts its own job."""
    if job is None:
        return ()
    lower(model_spec(job.model), job.recipe, job.plan)
    try:
        lower(model, recipe, job.plan)
    except ValueError:
        return ()
    return (job.plan,) if job.plan.adam_threads <= machine.cores else ()


def simple_plan(model: ModelSpec, recipe: Recipe, machine: HardwareProfile) -> Plan:
    """The default plan, with chunks large enough that a layer has 16 of them at most.

    Where the host is too small for it, as few blocks as will do are resident on the device, the embedding and the head first,
    then layers from the first; where that does not fit either, all are streamed again, to be refused.
    """
    default = default_plan(recipe, machine)
    layer_nbytes = max(block.numel for block in model.layers) * DTYPE_NBYTES[recipe.precision]
    default = replace(default, chunk_bytes=max(default.chunk_bytes, 1 << (layer_nbytes // 16).bit_length()))

    def resident(count: int) -> Plan:
        placement = {**default.placement, "embedding": "resident", "head": "resident"}
        if count:
            placement[f"0-{count - 1}"] = "resident"
        return replace(default, placement=placement)

    def host_short(plan: Plan) -> bool:
        return any(short.space == "host" for short in shortages(ledger(model, recipe, plan, machine), machine))

    if not host_short(default):
        return default
    low, high = 0, model.n_layers  # each layer more on the device leaves the host more room
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if host_short(resident(middle)) else (low, middle)
    found = resident(low)
    return found if fits(ledger(model, recipe, found, machine), machine) is None else default


def predict(job: Job, model: ModelSpec, machine: HardwareProfile, *, steps: int) -> Prediction:
    """Simulate `steps` steps of a job. ValueError for fewer than one and for what lowering refuses."""
    schedule = lower(model, job.recipe, job.plan)
    check(schedule)
    trace = simulate(schedule, machine, steps=steps)
    record = Record(
        job=job, model_name=model.name, config_json=model.config_json, hardware=machine.name, provenance=machine.provenance,
        trace=trace, created=now(),
    )  # fmt: skip
    return Prediction(record, schedule, derive(schedule, trace), step_time(schedule, trace))


def swept(
    model: ModelSpec, recipe: Recipe, plan: Plan, machine: HardwareProfile, depths: Sequence[int], chunks: Sequence[int],
    folder: Path, *, as_json: bool,
) -> None:  # fmt: skip
    """Simulate every depth with every chunk size; `SWEEP_FILES` in `folder`, and the table."""
    from analysis.plots import plot_sweep, sweep_table
    from analysis.tables import format_table
    from sim.planner import sweep

    with show.progress("sweep") as bar:
        cells = len(depths) * len(chunks)
        points = sweep(
            model, recipe, plan, machine, depths, chunks,
            lambda what, done: bar(done / cells, f"{what} ({done} of {cells} simulated)"),
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    table = sweep_table(points)
    csv, png = (folder / name for name in SWEEP_FILES)
    write_file(csv, table.to_csv(index=False).encode())
    refuse_irregular(png)
    plot_sweep(points, png, model_name=model.name)
    if as_json:
        show.json_object({"csv": str(csv), "png": str(png), "points": len(points)})
        return
    chunks_said = [show.format_bytes_short(n) if n else "whole blocks" for n in table["chunk_bytes"]]
    said = table.assign(chunk=chunks_said, enough=["yes" if enough else "" for enough in table["enough"]])
    columns = ["chunk", "weight_slots", "step_ns", "over_best_ratio", "enough"]
    show.text(format_table(said[columns], title=f"{model.name} on {machine.name}"))
    show.text(f"written to {csv} and {png}")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
