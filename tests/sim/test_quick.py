"""The quick evaluation is the simulator's, to the nanosecond, and nothing more than a step time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.derive import step_time
from megatrain.hardware import H200, HardwareProfile
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import LANES, Op, PlacedOp, Schedule, lower
from sim.cost import Work
from sim.quick import end_times, quick_step_ns
from sim.sharing import Sharing
from sim.simulate import simulate, simulate_ops
from tests.strategies import cases


@pytest.mark.parametrize("seed", range(12))
def test_every_op_ends_when_the_simulator_says(random_run: Callable[..., object], host: HardwareProfile, seed: int) -> None:
    """Whatever shares what, works of no time among them, on a machine with a table and on one without."""
    rng = random.Random(seed)
    for longest in (3, 400, 10**6, 10**24):  # however long
        placed, works = random_run(rng, ops=120, longest=longest)  # type: ignore[misc]
        for machine in (H200, host):
            expected = [t.end_ns for t in simulate_ops(placed, lambda p, w=works: w[p.position], Sharing(machine))]  # type: ignore[misc]
            last = max(range(len(placed)), key=lambda i: expected[i])
            assert end_times(placed, works, Sharing(machine), last) == expected
            # Stopped earlier, it knows less and nothing else.
            some = rng.randrange(len(placed))
            found = end_times(placed, works, Sharing(machine), some)
            assert found[some] == expected[some]
            assert all(end == (expected[i] if expected[i] <= expected[some] else -1) for i, end in enumerate(found))


@settings(max_examples=40, deadline=None)
@given(case=cases(layers=(2, 3)), steps=st.integers(2, 5))
def test_a_step_takes_what_the_simulator_says(case: tuple[ModelSpec, Recipe, Plan], steps: int) -> None:
    schedule = lower(*case)
    assert quick_step_ns(schedule, H200, steps=steps) == step_time(schedule, simulate(schedule, H200, steps=steps)).mean_ns


def test_a_step_takes_what_the_simulator_says_on_the_host(
    random_schedule: Callable[[random.Random], Schedule], host: HardwareProfile
) -> None:
    for seed in range(10):
        schedule = random_schedule(random.Random(seed))
        assert quick_step_ns(schedule, host, steps=12) == step_time(schedule, simulate(schedule, host)).mean_ns


def test_ops_that_wait_for_each_other_are_named() -> None:
    placed = [PlacedOp(0, i, Op(kind="load", lane=LANES[i], block=i), (1 - i,)) for i in range(2)]
    with pytest.raises(ValueError, match=r"deadlock: load\[1\] of part 0 never runs"):
        end_times(placed, [Work(5), Work(5)], Sharing(H200), 1)
