"""A CUDA device: copies are asynchronous, between pinned memory and the device, timed by events.

A start event recorded on an idle stream is reached before the host has even asked for the copy, and would count the asking. So a
long copy goes first: while it runs, what is to be timed is enqueued behind it, as the engine's lanes do, which run ahead of the
device.
"""

# Streams and events have no types in some releases of torch.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from megatrain.calibrate.device import DIRECTIONS, Direction, Piece
from megatrain.calibrate.host import random_bytes
from megatrain.recipe import Recipe

PIECE_NBYTES = 16 << 20
_BATCH = 16
"""Copies enqueued behind one long one."""
_AHEAD = 4
"""Pieces of traffic enqueued before the host waits for the first: enough that the link never idles."""


def device_name() -> str:
    return torch.cuda.get_device_name()


def device_memory() -> int:
    """Bytes of the current device, those of contexts included: a plan's ledger counts its own."""
    _, total = torch.cuda.mem_get_info()
    return int(total)


class Cuda:
    """`Device` for device="cuda", the current one. `buffer_nbytes`: of each pinned buffer and its counterpart on the device.
    RuntimeError without a device. Kernels are chosen as the engine chooses them for `recipe`."""

    on_host = False

    def __init__(self, buffer_nbytes: int, seed: int, recipe: Recipe) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("calibrating device 'cuda' needs a CUDA device")
        # Not before: the engine's backend needs Triton, which is there where a device is.
        from megatrain.engine.cuda import configure

        configure(recipe)
        self.name = torch.cuda.get_device_name()
        free, _ = torch.cuda.mem_get_info()
        self.memory_bytes = device_memory()
        nbytes = min(buffer_nbytes, free // 16)
        self._nbytes = max(PIECE_NBYTES, nbytes // PIECE_NBYTES * PIECE_NBYTES)
        self._buffers: dict[Direction, tuple[Tensor, Tensor]] = {}
        self._streams = {d: torch.cuda.Stream(priority=-1) for d in DIRECTIONS}
        for d in DIRECTIONS:
            host = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=True)
            host.copy_(random_bytes(self._nbytes, seed))
            there = torch.empty(self._nbytes, dtype=torch.uint8, device="cuda")
            there.copy_(host)
            self._buffers[d] = (host, there) if d == "h2d" else (there, host)
        torch.cuda.synchronize()

    def timed(self, work: Callable[[], object], count: int) -> list[int]:
        # All are enqueued before the first has to be waited for; each pair of events lies in the stream around its work.
        marks = []
        for _ in range(count):
            marks.append(_mark())
            work()
        marks.append(_mark())
        marks[-1].synchronize()
        return [_elapsed_ns(a, b) for a, b in itertools.pairwise(marks)]

    def copy_times(self, direction: Direction, nbytes: int, count: int) -> list[int]:
        source, target = self._buffers[direction]
        step = -(-nbytes // PIECE_NBYTES) * PIECE_NBYTES
        offsets = itertools.cycle(range(0, self._nbytes - nbytes + 1, step))
        times: list[int] = []
        with torch.cuda.stream(self._streams[direction]):
            while len(times) < count:
                for start in range(0, self._nbytes, PIECE_NBYTES):
                    _copy(source, target, start, PIECE_NBYTES)
                marks = [_mark()]
                for offset in itertools.islice(offsets, min(_BATCH, count - len(times))):
                    _copy(source, target, offset, nbytes)
                    marks.append(_mark())
                marks[-1].synchronize()
                times += [_elapsed_ns(a, b) for a, b in itertools.pairwise(marks)]
        return times

    def copier(self, direction: Direction) -> Piece:
        source, target = self._buffers[direction]
        stream = self._streams[direction]
        offsets = itertools.cycle(range(0, self._nbytes, PIECE_NBYTES))
        waiting: deque[torch.cuda.Event] = deque()

        def piece() -> int:
            with torch.cuda.stream(stream):
                while len(waiting) < _AHEAD:
                    _copy(source, target, next(offsets), PIECE_NBYTES)
                    event = torch.cuda.Event(blocking=True)
                    event.record()
                    waiting.append(event)
            waiting.popleft().synchronize()
            return PIECE_NBYTES

        return piece

    def largest_copy(self) -> int:
        return self._nbytes

    def close(self) -> None:
        torch.cuda.synchronize()
        self._buffers = {}
        torch.cuda.empty_cache()


def _copy(source: Tensor, target: Tensor, start: int, nbytes: int) -> None:
    target[start : start + nbytes].copy_(source[start : start + nbytes], non_blocking=True)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ns(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return max(1, round(float(start.elapsed_time(end)) * 1e6))
