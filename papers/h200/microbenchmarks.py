"""Rates and costs of single parts, each alone: the optimizer's kernels on the CPU and on the GPU, and the host's calls."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatrain.optim.constants import step_constants
from megatrain.optim.kernel import Run, bind_threads, prepare_adamw
from megatrain.optim.norm import n_tiles
from megatrain.recipe import AdamW
from papers.h200.models import Device

ADAMW_NBYTES = 26
"""Bytes that AdamW reads and writes of a parameter: two halves of the weight, two FP32 moments, and its BF16 gradient once."""


def adam_rates(device: Device, folder: Path) -> dict[str, Any]:
    """The CPU's AdamW in GB/s: by threads, and with 14 threads, free and bound to cores, by the size of an update. Promises
    nothing."""
    n = 1 << (22 if device == "cpu" else 27)
    hi, lo, g = torch.randn(n).bfloat16(), torch.zeros(n, dtype=torch.int16), torch.randn(n).bfloat16()
    m, v, constants = torch.zeros(n), torch.zeros(n), torch.from_numpy(step_constants(AdamW(), 1))

    def rate(threads: int, size: int) -> float:
        parts = [slice(at, at + size) for at in range(0, n, size)]
        updates = [
            prepare_adamw((hi[c], lo[c]), m[c], v[c], g[c], constants, [Run(0, size, True)], threads=threads) for c in parts
        ]
        times = []
        for _ in range(4):
            started = time.perf_counter()
            for update in updates:
                update()
            times.append(time.perf_counter() - started)
        return round(ADAMW_NBYTES * n / statistics.median_low(times) / 1e9, 1)

    usual, cores = 14, sorted(os.sched_getaffinity(0))
    found: dict[str, Any] = {"by threads": {str(threads): rate(threads, n) for threads in (1, 4, 8, 12, 14, 16)}}
    for how, bound in (("free", []), ("bound", cores[-usual + 1 :])):
        bind_threads(bound)
        by_size = {str(size >> 20): rate(usual, size) for size in (1 << 20, 1 << 21, n)}
        found[f"14 threads, {how}, by Mi parameters an update"] = by_size
    bind_threads([])
    return found


def device_rates(n: int = 1 << 28) -> dict[str, float]:
    """What the GPU's kernels move on `n` elements, in GB/s: AdamW 26 bytes an element, packing to BF16 6. Needs a GPU."""
    from megatrain.engine import triton_kernels

    hi, lo = torch.zeros(n, dtype=torch.bfloat16, device="cuda"), torch.zeros(n, dtype=torch.int16, device="cuda")
    m, v, sums = (torch.randn(n, device="cuda").abs() for _ in range(3))
    grad, constants = sums.bfloat16(), torch.from_numpy(step_constants(AdamW(), 1)).cuda()
    tiles, partials = triton_kernels.tiles_of([(0, n)]).cuda(), torch.empty(n_tiles(n), device="cuda")
    launches: dict[str, tuple[int, Callable[[], None]]] = {
        "adamw": (ADAMW_NBYTES, lambda: triton_kernels.adamw((hi, lo), m, v, grad, constants, decayed=True)),
        "pack": (6, lambda: triton_kernels.pack(tiles, sums, grad, partials)),
    }
    rates = {}
    for name, (nbytes, launch) in launches.items():
        times = []
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        rates[name] = round(nbytes * n / statistics.median_low(times) / 1e9, 1)
    return rates


def host_costs(device: Device, folder: Path) -> dict[str, Any]:
    """Microseconds: of host time to enqueue what lanes are made of, and until a stream passes a count that the host raised.
    Promises nothing; without a GPU there is nothing to measure."""
    if device == "cpu":
        return {}
    from megatrain.engine import driver

    stream, there = torch.cuda.Stream(priority=-1), torch.empty(4096, dtype=torch.uint8, device="cuda")
    here = torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    event, flag = torch.cuda.Event(), driver.Flag()
    handle = stream.cuda_stream

    def by_torch() -> None:
        with torch.cuda.stream(stream):
            there.copy_(here, non_blocking=True)

    calls: dict[str, Callable[[], object]] = {
        "copy by the driver": lambda: driver.copy(there.data_ptr(), here.data_ptr(), 4096, handle),
        "copy by PyTorch": by_torch,
        "event": lambda: event.record(stream),
        "wait for a count": lambda: flag.follow(handle, 0),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(300):
            call()
        found[name] = round((time.perf_counter() - started) / 300 * 1e6, 1)
    torch.cuda.synchronize()
    late = []
    for count in range(1, 60):
        flag.follow(handle, count)
        event.record(stream)
        time.sleep(0.002)  # until the stream waits for the count
        started = time.perf_counter()
        flag.set(count)
        while not event.query():
            pass
        late.append((time.perf_counter() - started) * 1e6)
    late.sort()
    return found | {"a count is passed after, median": round(late[29], 1), "in 9 of 10": round(late[53], 1)}
