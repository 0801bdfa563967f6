"""The null backend: no kernels, no memory, a virtual clock. It proves order: what would wait for whom, to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatrain.engine.backend import HostLanes, Ran
from megatrain.engine.clock import Clock, VirtualClock
from megatrain.schedule.nouns import Op, Schedule
from megatrain.trace import Source


class NullBackend:
    """Every op takes `duration_ns(op)` of virtual time and touches what it says."""

    source: Source = "null"

    def __init__(self, schedule: Schedule, duration_ns: Callable[[Op], int], clock: Clock | None = None) -> None:
        self.clock: Clock = clock or VirtualClock()
        self.lanes = HostLanes(self.clock)
        self._storages = schedule.storages
        self._duration_ns = duration_ns

    def joins(self, op: Op) -> bool:
        return False

    def run_series(self, ops: Sequence[Op], step: Any, count: int) -> Sequence[tuple[Any, Ran, Any]]:
        return [(self.clock.now_ns(), self.run(op, step), self.clock.now_ns()) for op in ops]

    def run(self, op: Op, step: Any) -> Ran:
        self.clock.sleep(self._duration_ns(op), op.name)
        reads = tuple((self._storages[a.storage].name, a.start, a.stop) for a in op.reads)
        writes = tuple((self._storages[a.storage].name, a.start, a.stop) for a in op.writes)
        return Ran(reads, writes, op.nbytes)
