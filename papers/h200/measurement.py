"""One traced run of the engine: its figures, and which promises they do not keep."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatrain.derive import Facts, by_cause, derive
from megatrain.engine.engine import Engine
from megatrain.files import save_record
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.training import settled
from papers.h200.models import Device
from papers.h200.records import record, save_stalls
from papers.h200.workload import RandomWeights, batches


def measure_run(
    model: ModelSpec, recipe: Recipe, plan: Plan, device: Device, *, steps: int, warm_up: int = 4, keep: Path | None = None
) -> dict[str, Any]:
    """Train `warm_up` steps and then `steps` traced ones; every figure that a promise speaks of. Seconds are of the traced steps
    (`step_s` the median without the first two), but `ready_s` and `warm_s`, which run from before the engine is made.

    With `keep`, KEEP.measured.json.gz is the run's record and KEEP.stalls.txt says who waited for whom. On a GPU an operation
    that makes the host wait for it raises RuntimeError in a traced step.
    """
    started = time.perf_counter()
    with Engine(model, recipe, plan, RandomWeights(model, device), device=device) as engine:
        ready_s = time.perf_counter() - started
        data = batches(model, recipe, warm_up + steps)
        losses = [engine.step(batch).loss for batch in data[:warm_up]]
        warm_s = time.perf_counter() - started
        engine.restart_trace()
        before = reserved(device)
        with settled(), synchronisation_raises(device):
            results = [engine.step(batch) for batch in data[warm_up:]]
            losses += [result.loss for result in results]
        after = reserved(device)
        trace = engine.trace()
        expected = engine.schedule.digests()
        facts = derive(engine.schedule, trace)
        if keep is not None:
            save_record(Path(f"{keep}.measured.json.gz"), record(engine.schedule, trace, "h200", device))
            save_stalls(keep, trace, facts)
        stalls = by_cause(facts.stalls["compute"])
        return {
            "ready_s": round(ready_s, 1), "warm_s": round(warm_s, 1),
            "step_s": statistics.median_high(facts.step_times_ns[2:]) / 1e9,
            "steps_s": [round(ns / 1e9, 4) for ns in facts.step_times_ns],
            "losses": [round(loss, 4) for loss in losses],
            "digests equal": list(trace.digests) == [expected[part] for part in trace.parts],
            "h2d under compute": round(facts.overlap["h2d"].fraction, 4),
            "d2h under compute": round(facts.overlap["d2h"].fraction, 4),
            "utilisation": {lane: round(use.utilisation, 4) for lane, use in facts.lanes.items()},
            "GB": {lane: round(use.nbytes / 1e9, 3) for lane, use in facts.lanes.items()},
            "GB/s while busy": {lane: round(use.nbytes / max(1, use.busy_ns), 2) for lane, use in facts.lanes.items()},
            "compute stalls, s": {cause: round(ns / 1e9, 4) for cause, ns in stalls.items() if ns},
            "update late share of stalls": round(stalls["update late"] / max(1, facts.lanes["compute"].stalled_ns), 4),
            "cpu busy from clip to last update": round(cpu_busy_after_clip(facts), 4),
            "segments and bytes reserved before, after": [before, after],
            "device GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
            "notes": list(trace.notes),
        }  # fmt: skip


@contextlib.contextmanager
def synchronisation_raises(device: Device) -> Iterator[None]:
    """On a GPU, have PyTorch raise RuntimeError at an operation that makes the host wait for the device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def reserved(device: Device) -> list[int]:
    """What PyTorch's allocator holds of the GPU's memory: segments (its own statistics do not count those that grow), and bytes;
    none on the cpu backend."""
    if device == "cpu":
        return [0, 0]
    return [len(torch.cuda.memory_snapshot()), int(torch.cuda.memory_stats()["reserved_bytes.all.current"])]


def cpu_busy_after_clip(facts: Facts) -> float:
    """Of the time from each clip to the last update before the next one: the share in which the cpu lane runs an op. 0 if no
    update follows a clip."""
    run, total, busy = facts.run, 0, 0
    ran = [(run.placed[i].op, run.events[i]) for i in run.lanes["cpu"]]
    clips = [n for n, (op, _) in enumerate(ran) if op.kind == "clip"]
    for n, following in zip(clips, [*clips[1:], len(ran)], strict=True):
        updates = [event for op, event in ran[n + 1 : following] if op.kind == "update"]
        if updates:
            begin, end = ran[n][1].end_ns, max(event.end_ns for event in updates)
            total += end - begin
            busy += sum(event.end_ns - event.start_ns for _, event in ran[n + 1 : following] if event.end_ns <= end)
    return busy / total if total else 0.0


def missed(promises: Mapping[str, bool]) -> list[str]:
    """The promises that are not kept."""
    return [promise for promise, kept in promises.items() if not kept]


def missed_by_run(figures: Mapping[str, Any], promises: Mapping[str, bool]) -> list[str]:
    """The promises that a run's figures (`measure_run`) do not keep: these, and of every run that it executed its schedule and
    that the allocator took no more of the device's memory."""
    before, after = figures["segments and bytes reserved before, after"]
    return missed({**promises, "digests equal": figures["digests equal"], "segments flat": before == after})
