"""Checks of how long steps take and what overlaps: predicted, measured, with tracing and without, deterministic and fastest.

A check takes the device and the folder of results and returns its figures by name; `missed` are the promises that they do not
keep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

from megatrain.derive import by_cause, derive, step_time
from megatrain.engine.engine import Engine
from megatrain.files import load_hardware, save_record
from megatrain.hardware import H200
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import lower
from papers.h200.measurement import measure_run, missed, missed_by_run
from papers.h200.models import Device, qwen
from papers.h200.records import CALIBRATED, record
from papers.h200.workload import RandomWeights, batches
from sim.simulate import simulate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """Training of Qwen2.5's shape of a size on `sequences` of 1,024 tokens a step, one micro-batch, every decoder layer streamed,
    embedding and head resident. `buffers` are the plan's."""

    size: str
    sequences: int
    buffers: dict[str, int]

    def under(self, policy: str, device: Device) -> tuple[ModelSpec, Recipe, Plan]:
        """Model, recipe and plan with one of the update policies of `CLIP_NORMS`."""
        placement = {"default": "streamed", "embedding": "resident", "head": "resident"}
        threads = 2 if device == "cpu" else 14
        plan = Plan(placement=placement, update=policy, adam_threads=threads, **self.buffers)  # type: ignore[arg-type]
        return qwen(self.size, device), recipe_of(self.sequences, device, CLIP_NORMS[policy]), plan


SMALL = Streamed(size="0.5B", sequences=8, buffers={"weight_slots": 2, "host_gradient_slots": 12, "chunk_bytes": 3 << 20})
LARGE = Streamed(size="7B", sequences=16, buffers={"weight_slots": 3, "host_gradient_slots": 6, "chunk_bytes": 32 << 20})
CLIP_NORMS: dict[str, float | None] = {"during_backward": None, "next_forward": 1.0}
"""The update policies that are measured, each with the recipe's clipping."""


def recipe_of(sequences: int, device: Device, clip_norm: float | None) -> Recipe:
    """One micro-batch of `sequences` of 1,024 tokens, compiled; on the cpu backend two of 16 tokens, eager."""
    if device == "cpu":
        return Recipe(micro_batch_size=2, seq_len=16, clip_norm=clip_norm)
    return Recipe(micro_batch_size=sequences, seq_len=1024, clip_norm=clip_norm, compiled=True, loss_tile=4096)


def predictions(device: Device, folder: Path) -> dict[str, Any]:
    """What the simulator says of the steps that `overlap` and `seven_b` measure, by the H200's profile and, for 7B, whose blocks
    were timed, by the calibrated one, of which FOLDER/7b-POLICY.predicted.json.gz are records. Promises nothing, needs no GPU."""
    found, profile = {}, load_hardware(CALIBRATED)
    for streamed in (SMALL, LARGE):
        for policy in CLIP_NORMS:
            schedule = lower(*streamed.under(policy, "cuda"))
            trace = simulate(schedule, H200)
            facts = derive(schedule, trace)
            late = by_cause(facts.stalls["compute"])["update late"] / max(1, facts.lanes["compute"].stalled_ns)
            figures = {
                "step_s": round(step_time(schedule, trace).mean_ns / 1e9, 3), "ops a step": len(schedule.body.ops),
                "h2d under compute": round(facts.overlap["h2d"].fraction, 4), "update late share of stalls": round(late, 4),
            }  # fmt: skip
            if streamed is LARGE:
                calibrated = simulate(schedule, profile)
                save_record(
                    folder / f"7b-{policy}.predicted.json.gz", record(schedule, calibrated, profile.name, profile.provenance)
                )
                figures["step_s, calibrated"] = round(step_time(schedule, calibrated).mean_ns / 1e9, 3)
            found[f"{streamed.size} {policy}"] = figures
    return found


def seven_b(device: Device, folder: Path) -> dict[str, Any]:
    """A step of 16,384 tokens of Qwen2.5-7B's shape, activations recomputed, takes at most 2.3 s without clipping and 3.1 s with
    exact clipping. FOLDER/7b-POLICY.measured.json.gz and .stalls.txt are kept."""
    found, limits_s = {}, {"during_backward": 2.3, "next_forward": 3.1}
    for policy, limit_s in limits_s.items():
        figures = measure_run(*LARGE.under(policy, device), device, steps=6, warm_up=3, keep=folder / f"7b-{policy}")
        promises = {f"step <= {limit_s} s": figures["step_s"] <= limit_s}
        found[policy] = figures | {"missed": missed_by_run(figures, promises)}
    return found


def overlap(device: Device, folder: Path) -> dict[str, Any]:
    """Ten steps of 8,192 tokens of Qwen2.5-0.5B's shape, twice under each policy. During backward 80% of what is copied up is
    copied under compute; with clipping 90% of compute's stalls are for late updates, and the cpu lane is busy for 90% of the time
    from the clip to the last update."""
    found = {}
    for policy in CLIP_NORMS:
        for repeat in range(2):
            figures = measure_run(*SMALL.under(policy, device), device, steps=10)
            if policy == "during_backward":
                promises = {"h2d under compute >= 0.8": figures["h2d under compute"] >= 0.8}
            else:
                promises = {
                    "update late >= 0.9 of stalls": figures["update late share of stalls"] >= 0.9,
                    "cpu busy after clip >= 0.9": figures["cpu busy from clip to last update"] >= 0.9,
                }
            found[f"{policy} {repeat}"] = figures | {"missed": missed_by_run(figures, promises)}
    return found


def tracing(device: Device, folder: Path) -> dict[str, Any]:
    """Tracing makes four steps of four resident 7B layers at most 1% longer, by the median of pairs of runs with it and without,
    in turn, while the compute lane is busy for at least 90% of the time."""
    model, recipe = qwen("7B", device, num_hidden_layers=4), recipe_of(8, device, None)
    plan = Plan(placement={"default": "resident"})
    pairs = 3 if device == "cpu" else 20
    data = batches(model, recipe, 4)
    times: dict[bool, list[float]] = {True: [], False: []}
    with contextlib.ExitStack() as stack:
        engines = {
            on: stack.enter_context(Engine(model, recipe, plan, RandomWeights(model, device), device=device, tracing=on))
            for on in times
        }
        for pair in range(pairs + 1):  # the first warms up
            for on in (True, False) if pair % 2 else (False, True):
                engine = engines[on]
                engine.flush()
                started = time.perf_counter()
                for batch in data:
                    engine.step(batch)
                engine.flush()
                if pair:
                    times[on].append(time.perf_counter() - started)
                if on:
                    busy = derive(engine.schedule, engine.trace()).lanes["compute"].utilisation
                    engine.restart_trace()
    differences = [traced / untraced - 1 for traced, untraced in zip(times[True], times[False], strict=True)]
    median = statistics.median_high(differences)
    return {
        "missed": missed({"median difference <= 0.01": median <= 0.01, "compute busy >= 0.9": busy >= 0.9}),
        "median difference": round(median, 5),
        "from": round(min(differences), 5),
        "to": round(max(differences), 5),
        "compute busy": round(busy, 4),
        "pairs": pairs,
    }


def fastest(device: Device, folder: Path) -> dict[str, Any]:
    """The deterministic recipe and the fastest one in turn, on four resident 7B layers whose activations are kept: their losses
    lie no further apart than 0.5% of the first. What determinism costs is measured, not promised."""
    model = qwen("7B", device, num_hidden_layers=4)
    plan = Plan(placement={"default": "resident"}, activations={"default": "keep"})
    times: dict[bool, list[float]] = {True: [], False: []}
    losses: dict[bool, list[float]] = {}
    for deterministic in (True, False, True, False):
        recipe = dataclasses.replace(recipe_of(16, device, 1.0), deterministic=deterministic)
        figures = measure_run(model, recipe, plan, device, steps=6, warm_up=3)
        times[deterministic].append(figures["step_s"])
        losses[deterministic] = figures["losses"]
    difference = max(abs(a - b) for a, b in zip(losses[True], losses[False], strict=True))
    return {
        "missed": missed({"losses within 0.5%": difference <= 0.005 * losses[True][0]}),
        "step_s, deterministic": times[True],
        "step_s, fastest": times[False],
        "largest difference of losses": difference,
    }
