"""The cpu backend: kernels on CPU threads, a fixed arena as the device, real copies between it and the host.

It is the reference of the project: the schedule that runs on CUDA streams runs here with the same ops, slots and order, and is
compared with plain PyTorch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.backend import HostLanes, Ran
from megatrain.engine.clock import Clock, RealClock
from megatrain.engine.kernels import Kernel, Kernels, UpdateCount
from megatrain.engine.memory import Memory
from megatrain.model import BlockSpec
from megatrain.optim.kernel import Run, prepare_adamw
from megatrain.optim.norm import n_tiles, norm_partials
from megatrain.schedule.nouns import Lane, Op, Schedule
from megatrain.trace import Source


class CpuBackend:
    """Runs the ops of `schedule` on memory of its own. An op has ended when its kernel returns, so a mark is a time."""

    source: Source = "cpu"
    pinned_nbytes = 0
    """Host memory registered with a driver."""

    def __init__(
        self, schedule: Schedule, counts: UpdateCount, clock: Clock | None = None, adopted: Mapping[str, Tensor] | None = None
    ) -> None:
        self.schedule, self.clock = schedule, clock or RealClock()
        self.memory = Memory(schedule.storages, adopted=adopted)
        self.lanes = HostLanes(self.clock, self._enter)
        ops = CpuOps(threads=schedule.plan.adam_threads)
        self.kernels = Kernels(schedule=schedule, memory=self.memory, device=ops, counts=counts)

    def _enter(self, lane: Lane) -> None:
        if lane == "compute":
            # The recipe's number, because it may change bits. Of the other lanes only the optimizer's fallback uses torch's
            # threads, and each of its elements depends on its own inputs alone.
            torch.set_num_threads(self.schedule.recipe.compute_threads)

    def run(self, op: Op, step: Any) -> Ran:
        return self.kernels.run(op, step)

    def joins(self, op: Op) -> bool:
        return False  # who waits for an op hears of its end from the thread, which a series would keep busy

    def run_series(self, ops: Sequence[Op], step: Any, count: int) -> list[tuple[int, Ran, int]]:
        series, ran = self.kernels.series(ops)
        called = self.clock.now_ns()
        return [(called + start, what, called + end) for what, (start, end) in zip(ran, series(), strict=True)]

    def rehearse(self) -> None:
        self._enter("compute")
        self.kernels.rehearse()

    def after_load(self) -> None:
        pass

    def close(self) -> None:
        self.kernels.forget()

    def device_use(self, *, reset: bool) -> tuple[int, int, int]:
        """As the cuda backend's: the arena, which is fixed, and no GPU."""
        arena = next(self.memory.named(s.name) for s in self.schedule.storages if s.space == "device" and not s.dynamic)
        nbytes = arena.untyped_storage().nbytes()
        return nbytes, nbytes, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOps:
    """Device operations where the device is memory of the host."""

    threads: int

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        # A plain memory copy: the GIL is released while it runs, and torch's threads stay out of it.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())

    def repeated(self, kernel: Kernel) -> Kernel:
        return kernel

    def pack(self, block: BlockSpec, sums: Tensor, grads: Tensor, partials: Tensor) -> None:
        at = 0
        for p in block.params:
            grad, count = grads[p.offset : p.end], n_tiles(p.numel)
            grad.copy_(sums[p.offset : p.end])
            norm_partials(grad, partials[at : at + count])
            at += count

    def prepare_adamw(
        self, master: tuple[Tensor, ...], m: Tensor, v: Tensor, grad: Tensor, constants: Tensor, runs: Sequence[Run]
    ) -> Callable[[], None]:
        return prepare_adamw(master, m, v, grad, constants, runs, threads=self.threads)
