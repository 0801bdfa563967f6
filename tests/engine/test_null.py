"""The null backend: the engine's order against the simulator's, and the overlap it must reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from analysis.compare import compare
from megatrain.derive import derive
from megatrain.engine.backend import Backend
from megatrain.engine.clock import ClockLock
from megatrain.engine.executor import run_schedule
from megatrain.engine.null import NullBackend
from megatrain.hardware import H200
from megatrain.plan import Plan
from megatrain.schedule import LANES, Op, Schedule, check, lower
from megatrain.trace import Trace
from sim.cost import durations_ns
from sim.simulate import simulate
from tests.engine.small import Disturbed, small_model, small_recipe
from tests.strategies import small_schedules


def durations_by_op(schedule: Schedule, durations: dict[tuple[str, int], int]) -> Callable[[Op], int]:
    parts = {part.name: part for part in (schedule.prologue, schedule.body, schedule.epilogue)}
    table = {id(parts[name].ops[i]): ns for (name, i), ns in durations.items()}
    return lambda op: table[id(op)]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(schedule=small_schedules())
def test_the_engine_runs_what_the_simulator_predicts(schedule: Schedule) -> None:
    """With the contention-free durations of the simulator, the engine's trace is the simulated one, op by op."""
    check(schedule)
    predicted = simulate(schedule, H200, steps=3, contention=False)
    measured = run_schedule(schedule, NullBackend(schedule, durations_by_op(schedule, durations_ns(schedule, H200))), 3)
    assert measured.parts == predicted.parts
    assert measured.digests == predicted.digests
    assert measured.events == predicted.events
    comparison = compare(schedule, predicted, measured)
    assert (comparison.ops["predicted_start_ns"] == comparison.ops["measured_start_ns"]).all()


# ---- overlap -----------------------------------------------------------------------------------------------------------

NS = {
    "forward": 1000, "backward": 3000, "loss": 1500, "pack": 100, "load": 300, "save": 200, "update": 400, "stash": 250,
    "fetch": 250,
}  # fmt: skip
"""Link and update shorter than compute."""


def duration_ns(op: Op) -> int:
    return NS.get(op.kind, 10)


def overlapped_run(depth: int, around: Callable[[Any], Backend] = lambda b: b, **fields: Any) -> tuple[Schedule, Trace]:
    plan = Plan(**{"update": "during_backward", "weight_slots": depth, "chunk_bytes": 0, "host_gradient_slots": 2, **fields})
    schedule = lower(small_model(num_hidden_layers=12), small_recipe(clip_norm=None, micro_batches=1), plan)
    backend = NullBackend(schedule, duration_ns)
    return schedule, run_schedule(schedule, around(backend), 6)


def assert_overlapped(schedule: Schedule, trace: Trace) -> None:
    facts = derive(schedule, trace)
    copies = sum(o.busy_ns for o in facts.overlap.values())
    under = sum(o.under_compute_ns for o in facts.overlap.values())
    assert under >= 0.8 * copies
    # By what the ops take, not by what the trace says: an op that waits inside its own time would make its lane look busy.
    busy = {lane: sum(duration_ns(op) for op in schedule.body.ops if op.lane == lane) for lane in LANES}
    busiest = max(busy.values())
    assert busiest == busy["compute"]
    assert facts.step_times_ns[-1] <= 1.15 * busiest


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_copies_and_updates_lie_under_compute(depth: int) -> None:
    assert_overlapped(*overlapped_run(depth))


@pytest.mark.parametrize("update", ["during_backward", "next_forward"])
def test_state_and_inputs_travel_under_compute(update: str) -> None:
    """Every block updated in passing, and the inputs of all layers but the last two to the host and back."""
    placement, activations = {"default": "streamed_adam"}, {"default": "offload"}
    schedule, trace = overlapped_run(3, update=update, placement=placement, activations=activations, state_slots=2)
    assert any(op.kind == "fetch" for op in schedule.body.ops)
    assert_overlapped(schedule, trace)


def test_a_global_lock_would_be_noticed() -> None:
    """A fix that quietly serialises everything, taken through the clock, breaks the promise of overlap, and only that."""

    def locked(inner: Any) -> Backend:
        lock = ClockLock(inner.clock, "global")
        return Disturbed(inner=inner, before=lambda op: lock.acquire(op.name), after=lambda op: lock.release())

    schedule, trace = overlapped_run(2, locked)
    assert trace.digests == tuple(schedule.digests()[part] for part in trace.parts)
    with pytest.raises(AssertionError):
        assert_overlapped(schedule, trace)
