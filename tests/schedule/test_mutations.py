"""Every mutation of a schedule is rejected by `check`, or the oracle shows it harmless. Nothing else survives."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatrain.schedule import Schedule, ScheduleError, check, lower_evaluation
from tests.schedule.mutations import MUTATIONS, each_dep, is_barrier
from tests.schedule.oracle import harm
from tests.strategies import small_schedules

# The least share of each mutation's mutants that check must reject, well below what it does reject. Some mutations often do
# no harm: micro-batches of one layer in another order, a free slot in place of another.
LEAST_REJECTED = dict.fromkeys(MUTATIONS, 0.95) | {
    "dep_on_part_before_removed": 0.7,  # the barrier of `after` orders no bytes
    "lane_neighbours_swapped": 0.4,
    "lane_ops_swapped": 0.6,
    "content_moved": 0.7,
    "instance_changed": 0.7,  # with whole blocks for chunks, every chunk number means the whole block
}


def _prove(examples: int, mutants_each: int, *, repeatable: bool) -> None:
    tried: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    survivors: list[str] = []
    zealous: list[str] = []
    crashes: list[str] = []

    def judge(name: str, description: str, mutant: Schedule, random: Random) -> None:
        tried[name] += 1
        try:
            check(mutant)
        except ScheduleError as error:
            rejected[name] += 1
            # The converse, on a sample: what check rejects is harmful, but for the rule that a text must be executable in its
            # own order, which makes cycles impossible to write down.
            if random.random() < 0.1 and "does not stand before it" not in str(error) and harm(mutant) is None:
                zealous.append(f"{name}: {description}: {error}")
            return
        except Exception as error:
            crashes.append(f"{name}: {description}: {error!r}")
            return
        harmful = harm(mutant)
        if harmful:
            survivors.append(f"{name}: {description}: {harmful}")

    @settings(
        max_examples=examples, derandomize=repeatable, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(small_schedules(), st.integers(0, 2**32 - 1))
    def prove_one(schedule: Schedule, seed: int) -> None:
        check(schedule)
        assert harm(schedule, long=True) is None
        evaluation = lower_evaluation(schedule.model, schedule.recipe, schedule.plan)
        check(evaluation)
        assert harm(evaluation) is None
        random = Random(seed)
        for description, mutant in each_dep(schedule):
            if not is_barrier(schedule, description):
                judge("each_dep", description, mutant, random)
        for name, mutation in MUTATIONS.items():
            for _ in range(mutants_each):
                made = mutation(schedule, random)
                if made is not None and made[1] != schedule:
                    judge(name, *made, random)
            made = mutation(evaluation, random)
            if made is not None and made[1] != evaluation:
                judge(f"evaluation {name}", *made, random)

    prove_one()
    assert not survivors, f"{len(survivors)} harmful mutants pass check, the first: " + "\n".join(survivors[:10])
    assert not crashes, f"{len(crashes)} mutants crash check, the first: " + "\n".join(crashes[:10])
    assert not zealous, f"{len(zealous)} harmless mutants do not pass check, the first: " + "\n".join(zealous[:10])
    assert rejected["each_dep"] == tried["each_dep"] > 20 * examples
    for name, least in LEAST_REJECTED.items():
        assert tried[name] >= examples * mutants_each / 4, f"{name} was hardly tried"
        assert rejected[name] >= least * tried[name], f"{name}: only {rejected[name]} of {tried[name]} rejected"


def test_no_harmful_mutant_passes_check() -> None:
    _prove(30, 3, repeatable=True)


@pytest.mark.slow
def test_no_harmful_mutant_passes_check_long() -> None:
    _prove(200, 15, repeatable=False)
