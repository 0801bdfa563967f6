"""Rates of what computes: products, attention, memory, launches. They predict blocks that were not measured themselves.

Data is random: a processor that multiplies zeros draws less power and keeps a higher clock. On a machine without a device all are
measured at the recipe's thread count and stated for all cores in proportion, as `sim.cost` reads them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatrain.calibrate.device import Device
from megatrain.calibrate.samples import Spread, figure, overall, rate_per_s, spread
from megatrain.layers.inputs import DTYPES
from megatrain.model import ModelSpec
from megatrain.recipe import Recipe

_DEVICE_SIZE = 8192
_HOST_SIZES = (256, 512, 1024)
_HOST_PRODUCT_NS = 30_000_000
"""Without a device, products are of the largest of these sizes that takes no longer."""
_LAUNCHES = 200


class Rates(NamedTuple):
    """As the fields of `Compute` of these names; measured with `threads` threads of compute."""

    flops_per_s: dict[str, int]
    attention_flops_per_s: int
    memory_bytes_per_s: int
    launch_ns: int
    threads: int
    spread: Spread


class _Probe(NamedTuple):
    """Something to run, and how much of what is counted one run does (FLOPs, bytes, launches)."""

    run: Callable[[], object]
    amount: int


def measure_rates(
    device: Device, *, model: ModelSpec | None, recipe: Recipe, cores: int, buffer_nbytes: int, budget_s: float, seed: int
) -> Rates:
    """Attention has the heads of `model` and the rows of `recipe` (without a model: 8 heads of 64). `buffer_nbytes` are streamed
    to measure memory."""
    threads = min(recipe.compute_threads, cores)
    where = torch.device("cpu" if device.on_host else "cuda")
    generator = torch.Generator(where).manual_seed(seed)
    with _compute_threads(threads):
        probes = {
            "bf16": _product(device, where, torch.bfloat16, generator),
            "fp32": _product(device, where, torch.float32, generator),
            "attention": _attention(device, where, model, recipe, generator),
            "memory": _stream(where, buffer_nbytes, generator),
            "launches": _launches(where),
        }
        for probe in probes.values():
            device.timed(probe.run, 1)  # warm
        samples: dict[str, list[int]] = {name: [] for name in probes}
        end = time.monotonic() + budget_s
        for number in itertools.count():
            for name, probe in probes.items():
                samples[name] += device.timed(probe.run, 3)
            if time.monotonic() > end and number >= 2:
                break
    rate = {name: rate_per_s(probe.amount, figure(samples[name], shared=device.on_host)) for name, probe in probes.items()}
    scale = cores / threads if device.on_host else 1
    return Rates(
        flops_per_s={precision: round(rate[precision] * scale) for precision in ("bf16", "fp32")},
        attention_flops_per_s=round(rate["attention"] * scale),
        memory_bytes_per_s=rate["memory"],
        launch_ns=figure(samples["launches"], shared=device.on_host) // _LAUNCHES,
        threads=threads,
        spread=overall([spread(found, shared=device.on_host) for found in samples.values()]),
    )


def _product(device: Device, where: torch.device, dtype: torch.dtype, generator: torch.Generator) -> _Probe:
    sizes = _HOST_SIZES if device.on_host else (_DEVICE_SIZE,)
    for size in sizes:
        a, b = (torch.randn(size, size, device=where, generator=generator).to(dtype) for _ in range(2))
        out = torch.empty_like(a)

        def run(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> object:
            return torch.mm(a, b, out=out)

        probe = _Probe(run, 2 * size**3)
        # Twice as large takes eight times as long.
        if size == sizes[-1] or 8 * min(device.timed(run, 3)) > _HOST_PRODUCT_NS:
            break
    return probe


def _attention(
    device: Device, where: torch.device, model: ModelSpec | None, recipe: Recipe, generator: torch.Generator
) -> _Probe:
    """Causal, forward and backward: 3.5 times the FLOPs of a forward as `ModelSpec.attention_flops` counts them."""
    heads, width = (model.n_heads, model.head_dim) if model is not None else (8, 64)
    rows = max(1, (1 if device.on_host else 16_384) // recipe.seq_len)
    shape = (rows, heads, recipe.seq_len, width)
    q, k, v, dy = (torch.randn(shape, device=where, generator=generator).to(DTYPES[recipe.precision]) for _ in range(4))
    leaves = tuple(t.requires_grad_() for t in (q, k, v))

    def run() -> object:
        return torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), leaves, dy)

    forward = 2 * heads * width * (recipe.seq_len + 1) * rows * recipe.seq_len
    return _Probe(run, forward * 7 // 2)


def _stream(where: torch.device, nbytes: int, generator: torch.Generator) -> _Probe:
    source = torch.randn(nbytes // 4, device=where, generator=generator)
    target = torch.empty_like(source)
    return _Probe(lambda: torch.neg(source, out=target), 2 * nbytes)


def _launches(where: torch.device) -> _Probe:
    x = torch.ones(16, device=where)

    def run() -> None:
        for _ in range(_LAUNCHES):
            x.mul_(1.0)

    return _Probe(run, _LAUNCHES)


@contextmanager
def _compute_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
