"""A machine without a device: its device memory is an arena in DRAM, a copy is a memcpy by one core.

Copies go by turns through buffers larger than all caches together, as those of a model's weights do, and start from random
bytes.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megatrain.calibrate.device import DIRECTIONS, Direction, Piece

PIECE_NBYTES = 4 << 20


class Host:
    """`Device` for device="cpu". `buffer_nbytes`: of each of the four buffers."""

    on_host = True

    def __init__(self, name: str, memory_bytes: int, buffer_nbytes: int, seed: int) -> None:
        self.name, self.memory_bytes = name, memory_bytes
        self._nbytes = max(PIECE_NBYTES, buffer_nbytes // PIECE_NBYTES * PIECE_NBYTES)
        self._buffers = {d: (random_bytes(self._nbytes, seed), random_bytes(self._nbytes, seed + 1)) for d in DIRECTIONS}

    def timed(self, work: Callable[[], object], count: int) -> list[int]:
        times = []
        for _ in range(count):
            start = time.perf_counter_ns()
            work()
            times.append(time.perf_counter_ns() - start)
        return times

    def copy_times(self, direction: Direction, nbytes: int, count: int) -> list[int]:
        source, target = self._buffers[direction]
        # Steps beyond the page and the lines around it, so that small copies do not follow each other through memory.
        step = -(-nbytes // PIECE_NBYTES) * PIECE_NBYTES
        offsets = itertools.cycle(range(0, self._nbytes - nbytes + 1, step))
        from_, to = source.data_ptr(), target.data_ptr()
        times = []
        for offset in itertools.islice(offsets, count):
            start = time.perf_counter_ns()
            ctypes.memmove(to + offset, from_ + offset, nbytes)
            times.append(time.perf_counter_ns() - start)
        return times

    def copier(self, direction: Direction) -> Piece:
        source, target = self._buffers[direction]
        from_, to = source.data_ptr(), target.data_ptr()
        offsets = itertools.cycle(range(0, self._nbytes, PIECE_NBYTES))

        def piece() -> int:
            offset = next(offsets)
            ctypes.memmove(to + offset, from_ + offset, PIECE_NBYTES)
            return PIECE_NBYTES

        return piece

    def largest_copy(self) -> int:
        return self._nbytes

    def close(self) -> None:
        self._buffers = {}


def random_bytes(nbytes: int, seed: int) -> Tensor:
    """uint8 [nbytes]; a random block, repeated: making gigabytes of random numbers takes longer than all measurements."""
    block = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    out = torch.empty(nbytes, dtype=torch.uint8)
    for start in range(0, nbytes, block.numel()):
        out[start : start + block.numel()] = block[: nbytes - start]
    return out
