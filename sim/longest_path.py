"""The longest path: an independent evaluation of a schedule when nothing slows anything else down.

An op starts when its lane's previous op and all its deps have ended. Since these stand before it, one pass over the ops in
their order gives every time. It shares nothing with the simulator, so the two check each other: without contention they must
agree to the nanosecond. Contention only makes ops longer and the order is fixed, so these times are lower bounds then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatrain.hardware import HardwareProfile
from megatrain.schedule.nouns import PlacedOp, Schedule
from sim.cost import durations_ns


class Span(NamedTuple):
    """When an op's lane was free, when its deps had ended too, and when it ended."""

    issued_ns: int
    start_ns: int
    end_ns: int


def longest_path(placed: Sequence[PlacedOp], durations: Sequence[int]) -> list[Span]:
    """Times of every op, given each one's duration. ValueError for an op that depends on itself or a later one."""
    free: dict[str, int] = {}
    spans: list[Span] = []
    for i, (p, duration) in enumerate(zip(placed, durations, strict=True)):
        issued = start = free.get(p.op.lane, 0)
        for d in p.deps:
            if d >= i:
                raise ValueError(f"longest path: {p.position}:{p.op.name} depends on position {d}, not before its own, {i}")
            start = max(start, spans[d].end_ns)
        spans.append(Span(issued, start, start + duration))
        free[p.op.lane] = start + duration
    return spans


def lower_bound_ns(schedule: Schedule, hardware: HardwareProfile, *, steps: int) -> int:
    """No run of `steps` training steps, cold to cold, is shorter than this. ValueError for fewer steps than one."""
    names = [part.name for part in schedule.parts(steps)]
    placed, duration = schedule.unroll(steps), durations_ns(schedule, hardware)
    return max(s.end_ns for s in longest_path(placed, [duration[names[p.part], p.position] for p in placed]))
