"""Calibrate: a `HardwareProfile` of this machine, measured with the project's own kernels and copies.

    profile = calibrate(device="cpu", model=model, recipe=recipe, adam_threads=(1, 2), budget_s=40)

What follows from the machine alone (links, the CPU optimizer by threads, what they get of each other, rates of products and of
memory) is measured directly. What follows from the machine and the model (how long a block's ops take) is measured in the engine,
on a model of the same blocks with few layers and random weights; the user's model is never trained. Without a model there are
rates only, and a prediction says of each block that it was not measured.

Every figure is of many samples over its share of the budget (`samples`). The provenance says when, on what and with which
versions it was measured, for which model and recipe, what was not, and how far samples lay apart. The budget is for measuring;
loading the libraries, building the CPU kernel and (for a compiled recipe) compiling the blocks come on top.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from megatrain.calibrate.blocks import Blocks, measure_blocks, measure_overheads, reduced_job
from megatrain.calibrate.device import Device
from megatrain.calibrate.host import Host
from megatrain.calibrate.machine import cache_nbytes, cpu_name, usable_cores, usable_memory
from megatrain.calibrate.rates import measure_rates
from megatrain.calibrate.traffic import measure_links, measure_sharing
from megatrain.hardware import Compute, HardwareProfile
from megatrain.model import ModelSpec
from megatrain.optim.kernel import native_problem
from megatrain.recipe import Recipe

Progress = Callable[[str, float], None]
"""Called with what is measured next and the share of the budget that lies behind, 0 to 1."""

_SHARES = {"overheads": 0.08, "links": 0.12, "sharing": 0.35, "rates": 0.10, "blocks": 0.35}
_LEAST_BUDGET_S = 1.0


def calibrate(
    *,
    device: Literal["cpu", "cuda"],
    model: ModelSpec | None = None,
    recipe: Recipe | None = None,
    adam_threads: Sequence[int] | None = None,
    budget_s: float = 40.0,
    progress: Progress | None = None,
    seed: int = 0,
    name: str | None = None,
    today: datetime.date | None = None,
) -> HardwareProfile:
    """Measure this machine.

    `model` and `recipe`, given together, are what blocks are timed for. A recipe alone says the types and the compute threads
    that rates are measured with (default: `Recipe()` in rows of 256 tokens). `adam_threads` are the thread counts the optimizer
    is measured at (default: 1, 2, 4, 8, 12, then every eighth, and all cores). `budget_s` is for all measurements together;
    with less than some 20 s on a small machine, spreads grow. `name` and `today` are what the profile says of itself.

    ValueError for a model without a recipe, thread counts that are no more than the cores, or a model of which even two layers
    do not fit; RuntimeError for device "cuda" where there is none.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"calibrate: device must be cpu or cuda, got {device!r}")
    if model is not None and recipe is None:
        raise ValueError("calibrate: recipe must be given with a model: a block's time depends on its tokens and types")
    if budget_s < _LEAST_BUDGET_S:
        raise ValueError(f"calibrate: budget_s must be at least {_LEAST_BUDGET_S}, got {budget_s!r}")
    cores, memory = usable_cores(), usable_memory()
    threads = _thread_counts(adam_threads, cores)
    wanted = recipe if recipe is not None else Recipe(seq_len=256)
    shares = {stage: share for stage, share in _SHARES.items() if stage != "blocks" or model is not None}
    whole, done = sum(shares.values()), 0.0

    def start(stage: str, what: str) -> float:
        nonlocal done
        if progress is not None:
            progress(what, done)
        done += shares[stage] / whole
        return budget_s * shares[stage] / whole

    # Larger than the caches, so that traffic is DRAM's; on a small machine no more than a sixteenth of its memory.
    buffer = min(max(64 << 20, 2 * cache_nbytes()), 1 << 30, memory // 16)
    place: Device = _device(device, memory, buffer, seed, wanted)
    try:
        if model is not None:
            reduced_job(place, model, wanted)  # what does not fit is refused before a minute has gone into the rest
        overheads = measure_overheads(
            place, threads=wanted.compute_threads, budget_s=start("overheads", "the engine's own cost"), seed=seed
        )
        op_ns = overheads.copy_op_ns
        links = measure_links(place, budget_s=start("links", "links"), op_ns=op_ns)
        state = min(4 * buffer, memory // 8)
        shared = measure_sharing(
            place, threads=threads, state_nbytes=state, recipe=wanted, seed=seed,
            budget_s=start("sharing", "the CPU optimizer, alone and beside copies"),
        )  # fmt: skip
        rates = measure_rates(
            place, model=model, recipe=wanted, cores=cores, buffer_nbytes=buffer, seed=seed,
            budget_s=start("rates", "products, attention, memory"),
        )  # fmt: skip
    finally:
        place.close()
    blocks = None
    if model is not None:
        blocks = measure_blocks(place, model=model, recipe=wanted, budget_s=start("blocks", "the model's blocks"), seed=seed)
    if progress is not None:
        progress("done", 1.0)
    day = (today or datetime.date.today()).isoformat()
    spreads = f"distance of samples, typical to worst: links {links.spread}, sharing {shared.spread}, rates {rates.spread}"
    said = [
        f"measured {day} by megatrain calibrate in {budget_s:g} s: {_machine(place, cores)}",
        f"copies by {'memcpy, one core each' if place.on_host else 'pinned asynchronous copies'}",
        f"the CPU optimizer with {', '.join(map(str, threads))} threads"
        f" ({wanted.precision} weights, {wanted.gradient_dtype} gradients)",
        f"products, attention and memory with {rates.threads} compute threads",
        _what_blocks(model, wanted, blocks),
        spreads + (f", blocks {blocks.spread}" if blocks is not None else ""),
    ]
    if (problem := native_problem()) is not None:
        said.append(f"the optimizer's fallback in PyTorch, since its kernel could not be built: {problem.splitlines()[0]}")
    return HardwareProfile(
        name=name or _slug(place.name),
        provenance="; ".join(said),
        device_memory_bytes=place.memory_bytes,
        host_memory_bytes=memory,
        cores=cores,
        h2d=links.h2d,
        d2h=links.d2h,
        compute=Compute(
            flops_per_s=rates.flops_per_s,
            attention_flops_per_s=rates.attention_flops_per_s,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            launch_ns=rates.launch_ns,
            on_host=place.on_host,
            measured=blocks.measured if blocks is not None else (),
        ),
        adam_rates=shared.adam_rates,
        dram_bytes_per_s=shared.dram_bytes_per_s,
        host_op_ns=overheads.host_op_ns,
        sharing=shared.rows,
    )


def _device(device: str, memory: int, buffer: int, seed: int, recipe: Recipe) -> Device:
    if device == "cuda":
        from megatrain.calibrate.cuda import Cuda

        return Cuda(buffer, seed, recipe)
    return Host(cpu_name(), memory, buffer, seed)


def _thread_counts(asked: Sequence[int] | None, cores: int) -> tuple[int, ...]:
    if asked is None:
        usual = {1, 2, 4, 8, 12, *range(16, cores, 8), cores}
        return tuple(sorted(n for n in usual if n <= cores))
    counts = tuple(sorted(set(asked)))
    if not counts or counts[0] < 1 or counts[-1] > cores:
        raise ValueError(f"calibrate: adam_threads must be one or more counts in 1..{cores}, one a core, got {list(asked)}")
    return counts


def _machine(place: Device, cores: int) -> str:
    cpu = f"{cores} cores of {cpu_name()}"
    return f"{cpu}, torch {torch.__version__}" if place.on_host else f"{place.name}, {cpu}, torch {torch.__version__}"


def _what_blocks(model: ModelSpec | None, recipe: Recipe, blocks: Blocks | None) -> str:
    if model is None or blocks is None:
        return "no model's blocks measured: they are predicted from rates"
    tokens = f"{recipe.micro_batch_size} x {recipe.seq_len} tokens"
    how = "compiled" if recipe.compiled else "eager"
    return (
        f"blocks of {model.name!r} ({json.loads(model.config_json)['model_type']}, hidden {model.hidden_size}) in the engine over"
        f" {blocks.steps} steps of {blocks.layers} layers: {recipe.precision}, {how}, {recipe.attention} attention,"
        f" {tokens} a micro-batch"
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "machine"
