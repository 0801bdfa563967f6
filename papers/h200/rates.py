"""Rates that a row's floor is fed with: the machine's, and seconds of the model's blocks."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megatrain.engine.memory import buffer
from megatrain.files.fields import short
from megatrain.layers.head import head_template
from megatrain.layers.inputs import layer_inputs, make_inputs
from megatrain.layers.template import layer_templates
from megatrain.model import ModelSpec
from megatrain.optim.constants import step_constants
from megatrain.optim.kernel import Run, prepare_adamw
from megatrain.recipe import AdamW, Recipe
from papers.h200.microbenchmarks import device_rates
from papers.h200.models import Device
from papers.h200.workload import RandomWeights, batches

STATE = (torch.bfloat16, torch.int16, torch.bfloat16, torch.float32, torch.float32)


def machine_rates(device: Device, threads: int) -> dict[str, float]:
    """Bytes a second: link up and down alone, the CPU optimizer alone, it and both directions together, the GPU's optimizer."""
    if device == "cpu":
        return dict.fromkeys(MACHINE_RATES, 1e9)
    n, chunk = 1 << 28, 1 << 28
    hi, lo, g, m, v = (buffer(n * of.itemsize, "cpu").view(of).zero_() for of in STATE)  # as the engine's state lies
    constants = torch.from_numpy(step_constants(AdamW(), 1))
    update = prepare_adamw((hi, lo), m, v, g, constants, [Run(0, n, True)], threads=threads)
    here = {way: torch.zeros(chunk, dtype=torch.uint8, pin_memory=True) for way in ("up", "down")}
    there = {way: torch.zeros(chunk, dtype=torch.uint8, device="cuda") for way in here}
    streams = {way: torch.cuda.Stream() for way in here}

    def copy(way: str) -> None:
        with torch.cuda.stream(streams[way]):
            target, source = (there, here) if way == "up" else (here, there)
            target[way].copy_(source[way], non_blocking=True)

    def alone(work: Callable[[], None], nbytes: int) -> float:
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return nbytes / statistics.median(times[1:])

    found = {
        "h2d_bytes_per_s": alone(lambda: copy("up"), chunk), "d2h_bytes_per_s": alone(lambda: copy("down"), chunk),
        "adam_bytes_per_s": alone(lambda: update(), 26 * n), "gpu_adam_bytes_per_s": device_rates()["adamw"] * 1e9,
    }  # fmt: skip
    # Copies until the optimizer ends; the last ones overhang it by no more than a piece each.
    copies, events, started = 0, [], time.perf_counter()
    worker = threading.Thread(target=lambda: [update() for _ in range(4)])
    worker.start()
    while worker.is_alive():
        for way in here:
            copy(way)
            copies += 1
        events.append(streams["up"].record_event())
        if len(events) > 2:
            events.pop(0).synchronize()
    torch.cuda.synchronize()
    found["dram_bytes_per_s"] = (4 * 26 * n + copies * chunk) / (time.perf_counter() - started)
    return found


MACHINE_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "adam_bytes_per_s", "gpu_adam_bytes_per_s", "dram_bytes_per_s")


def block_seconds(model: ModelSpec, recipe: Recipe, device: Device) -> dict[str, float]:
    """Seconds of a decoder layer's forward (first, and again) and backward and of the loss, one micro-batch of the recipe, alone
    on the device."""
    if device == "cuda":
        from megatrain.engine.cuda import configure

        configure(recipe)
    made = RandomWeights(model, device)

    def weights(params: Iterable[Any]) -> list[torch.Tensor]:
        return [made[p.name].bfloat16().to(device) for p in params]

    batch = {"input_ids": batches(model, recipe, 1)[0]["input_ids"][: recipe.micro_batch_size]}
    inputs = {k: t.to(device) for k, t in make_inputs(model, dataclasses.replace(recipe, micro_batches=1), batch)[0].items()}
    layer, head = layer_templates(model, attention=recipe.attention, compiled=recipe.compiled)[0], head_template(model)
    of_layer, of_head = weights(model.layers[0].params), weights(model.head.params)
    shape = (recipe.micro_batch_size, recipe.seq_len, model.hidden_size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    sums = [torch.zeros(w.shape, device=device) for w in of_head]
    saved: list[Any] = []
    works: dict[str, Callable[[], Any]] = {
        "layer_forward_s": lambda: saved.append(layer.forward(of_layer, x, layer_inputs(inputs))[1]),
        "layer_again_s": lambda: layer.saved_by(of_layer, x, layer_inputs(inputs)),
        "layer_backward_s": lambda: layer.backward(of_layer, saved.pop(), x),
        "loss_s": lambda: head.loss_forward_backward(
            of_head, x, inputs["targets"], recipe.tokens_per_step, recipe.loss_tile, sums, first=False
        ),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in works}
    for name, seconds in timed(works, device):
        times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def timed(works: dict[str, Callable[[], Any]], device: Device) -> Iterator[tuple[str, float]]:
    """Ten times through the works, in order. On a GPU as graphs, as the engine runs them, so that launches cost nothing."""
    if device == "cpu":
        for _ in range(10):
            for name, work in works.items():
                started = time.perf_counter()
                work()
                yield name, time.perf_counter() - started
        return
    from megatrain.engine.cuda import captured

    with torch.cuda.stream(torch.cuda.Stream()):
        for work in works.values():  # compiles and loads what it needs
            work()
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        graphs = {name: captured(work, pool) for name, work in works.items()}
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)] for _ in range(12)]
        for row in marks:
            row[0].record()
            for graph, mark in zip(graphs.values(), row[1:], strict=True):
                graph.replay()
                mark.record()
        torch.cuda.synchronize()
    for row in marks[2:]:
        for name, begin, end in zip(works, row, row[1:], strict=False):
            yield name, begin.elapsed_time(end) / 1e3


def rates_of(text: str) -> dict[str, float] | None:
    """The machine's rates that a JSON object holds, alone or among others; None for null. ValueError, in one line."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as problem:
        raise ValueError(f"--machine: is not JSON: {problem}") from None
    if found is None:
        return None
    for rate in MACHINE_RATES:
        value = found.get(rate) if isinstance(found, dict) else None
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"--machine: {rate}: must be a number > 0, got {short(value)}")
    return {rate: float(found[rate]) for rate in MACHINE_RATES}
