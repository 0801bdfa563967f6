"""Simulate: a schedule on a machine, op by op. The discrete-event model at the project's centre, in SimPy.

One generator a lane takes the lane's ops in their order. An op waits for its deps, spends its fixed part, then drains its
amount, at full rate or through the fluid resource that all traffic shares. Nothing else is modelled: the schedule decides who
waits for whom, the profile how long things take, and an engine may not do otherwise.

Not covered: the time a host needs to issue an op (a wait that every engine has and a trace shows), clocks that vary, noise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import simpy

from megatrain.derive import SPREAD_LIMIT, STEADY, step_time
from megatrain.hardware import HardwareProfile
from megatrain.schedule.nouns import PlacedOp, Schedule, Space, after_flush, place
from megatrain.trace import Event, Trace
from sim.cost import Work, alone_ns, works
from sim.fluid import Fluid, Segment
from sim.memory import memory_use
from sim.sharing import Sharing, SharingRule

STEPS = 12
"""Enough for a step time: half of them settle, the later half are its mean (`megatrain.derive.settled`)."""


class OpTimes(NamedTuple):
    """When an op's lane was free to look at it, when it started, when it ended."""

    issued_ns: int
    start_ns: int
    end_ns: int


def simulate(
    schedule: Schedule,
    hardware: HardwareProfile,
    *,
    steps: int = STEPS,
    parts_run: Sequence[str] | None = None,
    contention: bool = True,
) -> Trace:
    """The predicted trace of `steps` training steps from cold to cold, or of one evaluation.

    `parts_run` names the parts to run in place of `steps`: a measured trace's `parts`, whatever flushes it has. With
    `contention=False` every op has its duration alone. The trace's notes say what the machine lacks (memory, cores), what the
    profile had no measurement for, and whether the step time had not become steady. ValueError for fewer steps than one and
    for a part that the schedule does not have.
    """
    parts = schedule.parts(steps) if parts_run is None else [schedule.part(name) for name in parts_run]
    costs = works(schedule, hardware)
    sharing = Sharing(hardware) if contention else None
    tables = [costs.parts[part.name] for part in parts]
    placed = place(parts, barrier_before=after_flush(parts))
    times = simulate_ops(placed, lambda p: tables[p.part][p.position], sharing)
    events = tuple(Event(p.part, p.position, *t) for p, t in zip(placed, times, strict=True))
    digests = schedule.digests()
    trace = Trace(
        source="sim",
        parts=tuple(part.name for part in parts),
        digests=tuple(digests[part.name] for part in parts),
        events=events,
    )
    notes = [*_memory_notes(schedule, hardware, trace), *costs.notes, *(sharing.notes if sharing is not None else [])]
    if schedule.mode == "train" and sum(part.name != "epilogue" for part in parts) >= STEPS:
        mean, spread = step_time(schedule, trace)
        if spread > SPREAD_LIMIT:
            notes.append(f"step times are not steady: the last {STEADY} differ by {spread:.2%} of their mean {mean} ns")
    return Trace(source=trace.source, parts=trace.parts, digests=trace.digests, events=events, notes=tuple(notes))


def _memory_notes(schedule: Schedule, hardware: HardwareProfile, trace: Trace) -> list[str]:
    """A note for each memory that the schedule's storages do not fit into. Where compute runs on the host there is only one."""
    there: dict[Space, int] = {"host": hardware.host_memory_bytes, "device": hardware.device_memory_bytes}
    ever = {space: sum(s.nbytes for s in schedule.storages if s.space == space) for space in there}
    host_too = ever["host"] + ever["device"] if hardware.compute.on_host else ever["host"]
    if ever["device"] <= there["device"] and host_too <= there["host"]:
        return []
    use = memory_use(schedule, trace)
    found = [("device", use["device"].peak_nbytes, there["device"], use["device"].peak_at)]
    if hardware.compute.on_host:
        both = use["device"].peak_nbytes + use["host"].peak_nbytes
        found.append(("host", both, there["host"], use["device"].peak_at or use["host"].peak_at))
    else:
        found.append(("host", use["host"].peak_nbytes, there["host"], use["host"].peak_at))
    return [
        f"{hardware.name}: {space} memory: the schedule needs {need:,} bytes ({f'at {at}' if at else 'throughout'}), there are"
        f" {has:,}: {need - has:,} too many; it cannot run"
        for space, need, has, at in found
        if need > has
    ]


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
