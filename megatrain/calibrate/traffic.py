"""Traffic: what links and the CPU optimizer reach alone and together.

Alone, a copy is timed by its size. Together, a thread for each traffic does one piece after the other, all of them for the same
while, and the rate of each is the bytes of the pieces that ended within it over the time between the first and the last of these
ends: nobody's start or end, when others do not run yet or any more, is part of it. Every combination gets a short while a
round, round after round, so that what disturbs a machine for a second does not fall on one combination alone.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megatrain.calibrate.device import DIRECTIONS, Device, Direction, Piece
from megatrain.calibrate.host import random_bytes
from megatrain.calibrate.samples import Spread, figure, overall, rate_per_s, spread
from megatrain.engine.memory import buffer
from megatrain.hardware import Link, SharingRow
from megatrain.layers.inputs import DTYPES
from megatrain.optim.constants import step_constants
from megatrain.optim.kernel import Run, prepare_adamw
from megatrain.recipe import Recipe

SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
ROUNDS = 4
SETTLE_SHARE = 0.2
"""Of a while, what passes before ends of pieces count: until then threads start one after the other."""
_ADAM_PIECE = 8 << 20
"""Elements a call of the optimizer: 200 MB of traffic, beside which a call and its threads' start are little."""


_GB = 10**9


class Links(NamedTuple):
    h2d: Link
    d2h: Link
    spread: Spread


class Shared(NamedTuple):
    """`adam_rates` alone; `rows` of what ran together; `dram_bytes_per_s` the most that all DRAM traffic of any while was."""

    adam_rates: tuple[tuple[int, int], ...]
    rows: tuple[SharingRow, ...]
    dram_bytes_per_s: int
    spread: Spread


# ---- links -------------------------------------------------------------------------------------------------------------


def measure_links(device: Device, *, budget_s: float, op_ns: int) -> Links:
    """Both directions by size, each alone. `op_ns` is what an op that copies costs the engine's thread beside the copy itself,
    0 where the device runs behind the host."""
    end = time.monotonic() + budget_s
    sizes = [size for size in SIZES if size <= device.largest_copy()]
    times: dict[tuple[Direction, int], list[int]] = {(d, size): [] for d in DIRECTIONS for size in sizes}
    for d in DIRECTIONS:
        device.copy_times(d, sizes[-1], 2)  # warm
    for number in itertools.count():
        for (direction, size), found in times.items():
            found += device.copy_times(direction, size, max(1, min(16, (32 << 20) // size)))
        if time.monotonic() > end and number >= ROUNDS - 1:
            break
    links = {}
    for d in DIRECTIONS:
        taken = [(size, figure(times[d, size], shared=device.on_host)) for size in sizes]
        rates = [(size, rate_per_s(size, ns + op_ns)) for size, ns in taken]
        # A small copy may lie in a cache and pass the link's top rate, which is that of the largest.
        top = rates[-1][1]
        links[d] = Link(
            latency_ns=op_ns + _intercept_ns(taken),
            rates=tuple((size, min(rate, top)) for size, rate in rates),
        )
    return Links(links["h2d"], links["d2h"], overall([spread(found, shared=device.on_host) for found in times.values()]))


def _intercept_ns(times: Sequence[tuple[int, int]]) -> int:
    """The time of no bytes: on the line through the two smallest sizes, no more than the smallest takes."""
    (size0, t0), (size1, t1) = times[:2]
    return min(t0, max(0, t0 - (t1 - t0) * size0 // (size1 - size0)))


# ---- together ----------------------------------------------------------------------------------------------------------


def measure_sharing(
    device: Device, *, threads: Sequence[int], state_nbytes: int, recipe: Recipe, budget_s: float, seed: int
) -> Shared:
    """The optimizer alone at each of `threads`, both directions of the link together, and each of these with the optimizer."""
    # Combinations: which directions run, and the optimizer's threads, 0 for none.
    cases: list[tuple[tuple[Direction, ...], int]] = [((), n) for n in threads]
    cases.append((DIRECTIONS, 0))
    cases += [(ds, n) for n in threads for ds in (("h2d",), ("d2h",), DIRECTIONS)]
    adam = adam_traffic(recipe, state_nbytes, seed)
    window_s = min(0.3, max(0.03, budget_s / (ROUNDS * len(cases))))
    # Times of a gigabyte: others on the machine make them longer, never shorter.
    samples: dict[tuple[tuple[Direction, ...], int], dict[str, list[int]]] = {case: {} for case in cases}
    run_together({"adam": adam(threads[-1])}, 0.05)  # builds the kernel, touches all of its memory once
    end = time.monotonic() + budget_s
    for number in itertools.count(1):
        for (directions, n), found in samples.items():
            pieces: dict[str, Piece] = {d: device.copier(d) for d in directions}
            if n:
                pieces["adam"] = adam(n)
            for who, rate in run_together(pieces, window_s).items():
                found.setdefault(who, []).append(rate_per_s(_GB, rate))
        if number >= ROUNDS and time.monotonic() > end:
            break
    rates = {
        case: {who: rate_per_s(_GB, figure(times, shared=True)) for who, times in found.items()}
        for case, found in samples.items()
    }
    spreads = [spread(times, shared=True) for found in samples.values() for times in found.values()]
    weight = 2 if device.on_host else 1  # a memcpy reads and writes DRAM, a device copy does one of them
    totals = [sum(rate * (1 if who == "adam" else weight) for who, rate in r.items()) for r in rates.values()]
    # More threads that are slower would be noise: a planner must not read more into it than "no faster".
    adam_rates = tuple(zip(threads, itertools.accumulate((rates[(), n]["adam"] for n in threads), max), strict=True))
    rows = tuple(
        SharingRow(
            adam_threads=n, h2d_bytes_per_s=r.get("h2d", 0), d2h_bytes_per_s=r.get("d2h", 0), adam_bytes_per_s=r.get("adam", 0)
        )
        for (directions, n), r in rates.items()
        if directions
    )
    return Shared(adam_rates, rows, max(totals), overall(spreads))


def adam_traffic(recipe: Recipe, state_nbytes: int, seed: int) -> Callable[[int], Piece]:
    """The CPU optimizer on `state_nbytes` of its own state, in the recipe's types: a `Piece` for a number of threads."""
    link = DTYPES[recipe.gradient_dtype]
    split = recipe.precision == "bf16"
    count = max(_ADAM_PIECE, state_nbytes // (12 + link.itemsize) // _ADAM_PIECE * _ADAM_PIECE)
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(_ADAM_PIECE, generator=generator) * 0.02

    def plane(values: torch.Tensor) -> torch.Tensor:
        out = buffer(count * values.itemsize, "cpu").view(values.dtype)  # the memory that an engine's state lies in
        for start in range(0, count, _ADAM_PIECE):
            out[start : start + _ADAM_PIECE] = values
        return out

    low = random_bytes(2 * _ADAM_PIECE, seed).view(torch.int16)
    master = (plane(block.bfloat16()), plane(low)) if split else (plane(block),)
    m, v, grad = plane(block * 0.1), plane(block.square()), plane(block.to(link))
    constants = torch.from_numpy(step_constants(recipe.optimizer, 100, factor=0.5))
    moved = _ADAM_PIECE * (2 * 12 + link.itemsize)  # master, m and v are read and written, the gradient is read

    def update(at: int, threads: int) -> Callable[[], None]:
        part, run = slice(at, at + _ADAM_PIECE), Run(0, _ADAM_PIECE, True)
        planes = tuple(p[part] for p in master)
        return prepare_adamw(planes, m[part], v[part], grad[part], constants, [run], threads=threads)

    def traffic(threads: int) -> Piece:
        updates = itertools.cycle([update(at, threads) for at in range(0, count, _ADAM_PIECE)])

        def piece() -> int:
            next(updates)()
            return moved

        return piece

    return traffic


def run_together(pieces: Mapping[str, Piece], window_s: float) -> dict[str, int]:
    """Bytes per second of each traffic while all of them ran. The first error of any is raised."""
    stop = threading.Event()
    ready = threading.Barrier(len(pieces) + 1)
    ends: dict[str, list[tuple[int, int]]] = {name: [] for name in pieces}
    errors: list[BaseException] = []

    def work(name: str, piece: Piece) -> None:
        try:
            ready.wait()
            while not stop.is_set():
                nbytes = piece()
                ends[name].append((time.perf_counter_ns(), nbytes))
        except BaseException as error:  # to be raised where somebody sees it
            errors.append(error)
            ready.abort()
            stop.set()

    workers = [threading.Thread(target=work, args=item, daemon=True) for item in pieces.items()]
    for thread in workers:
        thread.start()
    try:
        ready.wait()
        began = time.perf_counter_ns()
        stop.wait(window_s)
        ended = time.perf_counter_ns()
        # A slow machine may not end two pieces of each in this while; it then takes as long as that takes.
        while not stop.is_set() and any(len(_within(found, began, None)) < 2 for found in ends.values()):
            stop.wait(0.01)
            ended = time.perf_counter_ns()
    except threading.BrokenBarrierError:
        pass
    finally:
        stop.set()
        for thread in workers:
            thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    settled = began + int((ended - began) * SETTLE_SHARE)
    rates = {}
    for name, found in ends.items():
        inside = _within(found, settled, ended)
        inside = inside if len(inside) >= 2 else _within(found, began, None)
        (first, _), (last, _) = inside[0], inside[-1]
        rates[name] = rate_per_s(sum(nbytes for _, nbytes in inside[1:]), last - first)
    return rates


def _within(found: Iterable[tuple[int, int]], start: int, end: int | None) -> list[tuple[int, int]]:
    return [(at, nbytes) for at, nbytes in found if at >= start and (end is None or at <= end)]
