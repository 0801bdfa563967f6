"""Quick: the step time of a schedule and nothing else, for a search that asks hundreds of times.

It evaluates what `sim.simulate` says, op by op and to the nanosecond, from the same works and the same sharing rule; the two are
tested against each other. It is faster because it keeps no trace and draws no events: a lane runs one op at a time, so there are
at most as many things under way as there are lanes, and the next to happen is the smallest of a few numbers. It stops when the
last compute op of a step has ended, since nothing later can change when that was.

Not covered: all else that a trace is for, and the notes of a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from megatrain.derive import settled
from megatrain.hardware import HardwareProfile
from megatrain.schedule.nouns import PlacedOp, Schedule
from sim.cost import NS_PER_S, Work, alone_ns, ceil_div, works
from sim.sharing import Sharing, SharingRule

_NEVER: Final = math.inf
"""A time that does not come."""


def quick_step_ns(schedule: Schedule, hardware: HardwareProfile, *, steps: int) -> int:
    """`step_time(schedule, simulate(schedule, hardware, steps=steps)).mean_ns` of a training schedule, for 2 steps or more."""
    names = [part.name for part in schedule.parts(steps)]
    placed, tables = schedule.unroll(steps), works(schedule, hardware).parts
    last = [0] * steps  # of each step its last op on the compute lane
    for i, p in enumerate(placed):
        if p.op.lane == "compute" and p.part < steps:
            last[p.part] = i
    ended = end_times(placed, [tables[names[p.part]][p.position] for p in placed], Sharing(hardware), last[-1])
    return settled([ended[i] - ended[before] for before, i in pairwise(last)]).mean_ns


class _Lane:
    """A lane at the first of the ops `left`, which waits for op `waits_for` to end or is under way, in its fixed part or flowing,
    until `until_ns` as far as is known. A flow has `remaining`, in 1e-9 of a unit, at `since_ns`."""

    __slots__ = ("flows", "left", "rate", "remaining", "since_ns", "until_ns", "waits_for", "work")

    def __init__(self) -> None:
        self.left: list[int] = []
        self.waits_for: int | None = None
        self.flows = False
        self.rate = self.remaining = self.since_ns = 0
        self.until_ns: int | float = _NEVER
        self.work = Work()


def end_times(placed: Sequence[PlacedOp], work: Sequence[Work], sharing: SharingRule, until: int) -> list[int]:
    """When each op of a run ends, in ns, as far as is known when op `until` has; -1: later. ValueError if it never does."""
    ended = [-1] * len(placed)
    of: dict[str, _Lane] = {}
    for i, p in enumerate(placed):
        of.setdefault(p.op.lane, _Lane()).left.append(i)
    lanes, now = list(of.values()), 0
    for lane in lanes:
        lane.left.reverse()

    def start(lane: _Lane) -> None:
        """The lane's next op starts if nothing holds it up."""
        lane.waits_for, lane.until_ns = None, _NEVER
        if lane.left:
            op = lane.left[-1]
            for dep in placed[op].deps:
                if ended[dep] < 0:
                    lane.waits_for = dep
                    return
            lane.work = work[op]
            lane.until_ns = now + (alone_ns(lane.work) if lane.work.traffic is None else lane.work.fixed_ns)

    for lane in lanes:
        start(lane)
    while ended[until] < 0:
        moved, solve = True, False
        while moved:  # all starts and ends of this nanosecond come before rates are solved: what lasts no time has no rate
            moved = False
            for lane in lanes:
                if lane.waits_for is not None and ended[lane.waits_for] >= 0:
                    start(lane)
                while lane.until_ns == now:
                    if lane.work.traffic is not None and lane.work.amount and not lane.flows:
                        lane.flows = solve = True
                        lane.rate, lane.remaining, lane.since_ns = 0, lane.work.amount * NS_PER_S, now
                        lane.until_ns = _NEVER
                    else:
                        solve |= lane.flows
                        lane.flows, moved = False, True
                        ended[lane.left.pop()] = now
                        start(lane)
        if solve:
            flowing = [lane for lane in lanes if lane.flows]
            for lane, rate in zip(flowing, sharing([lane.work for lane in flowing]), strict=True):
                if rate != lane.rate:
                    lane.remaining -= lane.rate * (now - lane.since_ns)
                    lane.rate, lane.since_ns = rate, now
                    lane.until_ns = now + ceil_div(lane.remaining, rate)
        if ended[until] < 0:
            soonest = min([lane.until_ns for lane in lanes])
            if soonest == _NEVER:
                raise ValueError(f"quick: deadlock: {placed[until].op.name} of part {placed[until].part} never runs")
            now = int(soonest)
    return ended
