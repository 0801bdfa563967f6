"""Plans simulated in full: each one's settled step, what its lanes did in it, and sweeps over depth and chunk size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatrain.derive import Cause, by_cause, derive, settled
from megatrain.hardware import HardwareProfile
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import LANES, Lane, Schedule, lower
from megatrain.trace import Trace
from sim.ledger import Shortage, fits, ledger
from sim.quick import quick_step_ns
from sim.simulate import STEPS, simulate

Progress = Callable[[str, int], None]
"""Called with what is being done and how many plans have been simulated so far."""


class SweepPoint(NamedTuple):
    """One cell of a sweep. `lacks` is None if the plan fits; `stalls` is the compute lane's waiting in a settled step, ns by
    cause, the largest first."""

    weight_slots: int
    chunk_bytes: int
    step_ns: int
    device_bytes: int
    lacks: Shortage | None
    stalls: Mapping[Cause, int]


def sweep(
    model: ModelSpec,
    recipe: Recipe,
    plan: Plan,
    hardware: HardwareProfile,
    depths: Sequence[int],
    chunk_sizes: Sequence[int],
    progress: Progress | None = None,
) -> list[SweepPoint]:
    """`plan` with every combination of weight slots and chunk bytes, simulated in full: whether more depth still helps."""
    points: list[SweepPoint] = []
    # Each cell's plan is forgotten again, and with it the count of those that were simulated.
    run = Runs(model, recipe, hardware, None if progress is None else lambda text, _: progress(text, len(points)))
    for depth in depths:
        for chunk in chunk_sizes:
            cell = replace(plan, weight_slots=depth, chunk_bytes=chunk)
            schedule = run.schedule(cell)
            book = ledger(model, recipe, cell, hardware, schedule)
            stalls = steady(schedule, run.trace(cell)).stalls
            points.append(SweepPoint(depth, chunk, run.step_ns(cell), book.device_nbytes(), fits(book, hardware), stalls))
            run.done.clear()
    return points


class Runs:
    """Plans simulated in full: the step of each, and a trace of those of which one is asked for."""

    def __init__(self, model: ModelSpec, recipe: Recipe, hardware: HardwareProfile, progress: Progress | None = None) -> None:
        self.model, self.recipe, self.hardware = model, recipe, hardware
        self.done: list[_Done] = []
        self._progress = progress or (lambda text, count: None)

    def _run(self, plan: Plan) -> _Done:
        found = next((done for done in self.done if done.schedule.plan == plan), None)
        if found is None:
            self._progress(f"simulating {STEPS} steps", len(self.done))
            found = _Done(lower(self.model, self.recipe, plan))
            self.done.append(found)
        return found

    def schedule(self, plan: Plan) -> Schedule:
        return self._run(plan).schedule

    def trace(self, plan: Plan) -> Trace:
        done = self._run(plan)
        if done.trace is None:
            done.trace = simulate(done.schedule, self.hardware, steps=STEPS)
        return done.trace

    def step_ns(self, plan: Plan, hardware: HardwareProfile | None = None) -> int:
        """The settled step; on another machine than this one, of a simulation that is not kept."""
        done = self._run(plan)
        if hardware is not None:
            return quick_step_ns(done.schedule, hardware, steps=STEPS)
        if done.step_ns is None:
            done.step_ns = quick_step_ns(done.schedule, self.hardware, steps=STEPS)
        return done.step_ns


@dataclass(slots=True)
class _Done:
    """A plan's schedule and, where someone has asked, what is simulated of it."""

    schedule: Schedule
    trace: Trace | None = None
    step_ns: int | None = None


class Steady(NamedTuple):
    """Of the last full step of a run: busy share by lane, the compute lane's stalls by cause; and by lane, the share of the
    critical path of the whole run."""

    busy: Mapping[Lane, float]
    stalls: Mapping[Cause, int]
    critical: Mapping[Lane, float]


def steady(schedule: Schedule, trace: Trace) -> Steady:
    facts = derive(schedule, trace)
    last = max(p for p, name in enumerate(trace.parts) if name == "body")
    step_ns = max(1, settled(facts.step_times_ns).mean_ns)
    busy: dict[Lane, int] = dict.fromkeys(LANES, 0)
    for placed, event in zip(facts.run.placed, facts.run.events, strict=True):
        if placed.part == last:
            busy[placed.op.lane] += event.end_ns - event.start_ns
    waits = by_cause(s for s in facts.stalls["compute"] if facts.run.placed[s.waiting].part == last)
    path: dict[Lane, int] = dict.fromkeys(LANES, 0)
    for piece in facts.critical_path:
        path[facts.run.placed[piece.position].op.lane] += piece.ns
    whole = max(1, sum(path.values()))
    return Steady(
        {lane: ns / step_ns for lane, ns in busy.items()},
        {cause: ns for cause, ns in sorted(waits.items(), key=lambda x: -x[1]) if ns},
        {lane: ns / whole for lane, ns in path.items()},
    )
