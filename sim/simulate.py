"""Simulate: a schedule on a machine, op by op. The discrete-event model at the project's centre, in SimPy.

One generator a lane takes the lane's ops in their order. An op waits for its deps, spends its fixed part, then drains its
amount, at full rate or through the fluid resource that all traffic shares. Nothing else is modelled: the schedule decides who
waits for whom, the profile how long things take, and an engine may not do otherwise.

Not covered: the time a host needs to issue an op (a wait that every engine has and a trace shows), clocks that vary, noise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import groupby
from typing import NamedTuple

import simpy

from megatrain.hardware import HardwareProfile
from megatrain.schedule.nouns import Part, PlacedOp, Schedule, place
from megatrain.trace import Event, Trace
from sim.cost import Work, alone_ns, works
from sim.fluid import Fluid, Segment
from sim.sharing import Sharing, SharingRule

STEPS = 12
STEADY = 6
"""Step time is the mean of the last `STEADY` of `STEPS` steps."""
SPREAD_LIMIT = 0.001


class StepTime(NamedTuple):
    """`spread` is (longest - shortest) / mean of the steps the mean is of; above `SPREAD_LIMIT` there is no steady state."""

    mean_ns: int
    spread: float


class OpTimes(NamedTuple):
    """When an op's lane was free to look at it, when it started, when it ended."""

    issued_ns: int
    start_ns: int
    end_ns: int


def simulate(schedule: Schedule, hardware: HardwareProfile, *, steps: int = STEPS, contention: bool = True) -> Trace:
    """The predicted trace of `steps` training steps from cold to cold, or of one evaluation.

    `contention=False` gives every op its duration alone. The trace's notes say what the profile had no measurement for, and
    whether the step time had not become steady.
    """
    if steps < 1:
        raise ValueError(f"simulate: steps must be >= 1, got {steps}")
    parts = parts_of(schedule, steps)
    costs = works(schedule, hardware)
    sharing = Sharing(hardware) if contention else None
    tables = [costs.parts[part.name] for part in parts]
    placed = place(parts)
    times = simulate_ops(placed, lambda p: tables[p.part][p.position], sharing)
    events = tuple(Event(p.part, p.position, *t) for p, t in zip(placed, times, strict=True))
    digests = schedule.digests()
    trace = Trace(
        source="sim",
        parts=tuple(part.name for part in parts),
        digests=tuple(digests[part.name] for part in parts),
        events=events,
    )
    notes = [*costs.notes, *(sharing.notes if sharing is not None else [])]
    if schedule.mode == "train" and steps >= STEPS:
        mean, spread = step_time(trace, schedule)
        if spread > SPREAD_LIMIT:
            notes.append(f"step times are not steady: the last {STEADY} differ by {spread:.2%} of their mean {mean} ns")
    return Trace(source=trace.source, parts=trace.parts, digests=trace.digests, events=events, notes=tuple(notes))


def parts_of(schedule: Schedule, steps: int) -> list[Part]:
    """The parts that `steps` training steps run, cold to cold; an evaluation is one part."""
    if schedule.mode == "evaluate":
        return [schedule.prologue]
    return [schedule.prologue, *[schedule.body] * (steps - 1), schedule.epilogue]


def step_time(trace: Trace, schedule: Schedule) -> StepTime:
    """Step k took (end of its last compute op) - (that of step k-1); the mean of the last `STEADY` of these, or of all when
    there are fewer. Works for every source. ValueError when the trace has fewer than two consecutive steps."""
    parts = {part.name: part for part in (schedule.prologue, schedule.body, schedule.epilogue)}
    computes = {
        name: {i for i, op in enumerate(part.ops) if op.lane == "compute"}
        for name, part in parts.items()
        if any(op.kind == "loss" for op in part.ops)
    }
    ends: dict[int, int] = {}
    for part, events in groupby(trace.events, key=lambda e: e.part):
        of_part = computes.get(trace.parts[part])
        if of_part is not None:
            ends[part] = max(e.end_ns for e in events if e.position in of_part)
    # A prologue follows a flush, whatever time that took.
    durations = [end - ends[k - 1] for k, end in ends.items() if k - 1 in ends and trace.parts[k] != "prologue"][-STEADY:]
    if not durations:
        raise ValueError(f"step time: needs two consecutive steps, the trace has parts {', '.join(trace.parts)}")
    mean = sum(durations) / len(durations)
    return StepTime(round(mean), (max(durations) - min(durations)) / mean)


def simulate_ops(
    placed: Sequence[PlacedOp],
    work_of: Callable[[PlacedOp], Work],
    sharing: SharingRule | None,
    *,
    segments: list[Segment] | None = None,
) -> list[OpTimes]:
    """When each op of a run is issued, starts and ends. `sharing` None: every op takes its duration alone.

    Lanes are whatever the ops name. `segments`, when given, receives the rates of every flow, by position in `placed`. Raises
    ValueError, naming the ops, when some wait for each other.
    """
    env = simpy.Environment()
    fluid = Fluid(env, sharing, segments) if sharing is not None else None
    issued, started, ended = ([-1] * len(placed) for _ in range(3))
    waiting: dict[int, simpy.Event] = {}

    def run_lane(ops: list[int]) -> Generator[simpy.Event, None, None]:
        for i in ops:
            issued[i] = int(env.now)
            for d in placed[i].deps:
                if ended[d] < 0:
                    # One dep after the other: waiting for all at once would cost an event a dep.
                    event = waiting.get(d)
                    if event is None:
                        event = waiting[d] = env.event()
                    yield event
            started[i] = int(env.now)
            work = work_of(placed[i])
            if fluid is None or work.traffic is None:
                duration = alone_ns(work)
                if duration:
                    yield env.timeout(duration)
            else:
                if work.fixed_ns:
                    yield env.timeout(work.fixed_ns)
                if work.amount:
                    yield fluid.flow(i, work)
            ended[i] = int(env.now)
            waited = waiting.pop(i, None)
            if waited is not None:
                waited.succeed()

    lanes: dict[str, list[int]] = {}
    for i, p in enumerate(placed):
        lanes.setdefault(p.op.lane, []).append(i)
    for ops in lanes.values():
        env.process(run_lane(ops))
    env.run()
    stuck = [i for i in range(len(placed)) if issued[i] >= 0 and ended[i] < 0]
    if stuck:
        names = ", ".join(f"{placed[i].position}:{placed[i].op.name} of part {placed[i].part}" for i in stuck)
        raise ValueError(f"simulate: deadlock, these wait for each other: {names}")
    return [OpTimes(*t) for t in zip(issued, started, ended, strict=True)]
