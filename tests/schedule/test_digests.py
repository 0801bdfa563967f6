"""A part's digest is a function of what each lane runs (names, order, waits, bytes) and of nothing else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatrain.schedule import Part, Schedule
from tests.schedule.fixtures import build
from tests.schedule.mutations import MUTATIONS
from tests.strategies import small_schedules

# What no lane of an engine could notice: tags are for check alone.
UNSEEN = ("tag_block_changed", "tag_micro_changed", "tag_step_changed", "tag_what_changed")
# A dep on an op that does not exist has no name to hash; check refuses it before any digest is taken.
SEEN = tuple(name for name in MUTATIONS if name not in (*UNSEEN, "dep_on_later_op"))


@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(small_schedules(), st.integers(0, 2**32 - 1))
def test_a_digest_sees_every_change_of_what_runs_and_no_other(schedule: Schedule, seed: int) -> None:
    random, digests = Random(seed), schedule.digests()
    for name in (*SEEN, *UNSEEN):
        made = MUTATIONS[name](schedule, random)
        if made is None or made[1] == schedule:
            continue
        description, mutant = made
        assert (mutant.digests() == digests) is (name in UNSEEN), description


def test_parts_have_digests_of_their_own() -> None:
    schedule = build(update="next_forward")
    digests = schedule.digests()
    assert set(digests) == {"prologue", "body", "epilogue"}
    assert len(set(digests.values())) == 3
    assert all(len(d) == 16 and int(d, 16) >= 0 for d in digests.values())
    fewer = replace(schedule, body=Part(name="body", ops=schedule.body.ops[:-1]))
    assert {name for name, d in fewer.digests().items() if d != digests[name]} == {"body"}


def test_the_order_across_lanes_is_not_hashed() -> None:
    """Two neighbours on different lanes in the other order: every lane runs what it ran."""
    schedule = build(update="after")
    digests, swapped = schedule.digests(), 0
    ops = schedule.body.ops
    for i in range(len(ops) - 1):
        if ops[i].lane == ops[i + 1].lane or i in ops[i + 1].deps:
            continue
        place = {i: i + 1, i + 1: i}
        order = [place.get(k, k) for k in range(len(ops))]
        new = [replace(ops[k], deps=tuple(place.get(d, d) for d in ops[k].deps)) for k in order]
        assert replace(schedule, body=Part(name="body", ops=tuple(new))).digests() == digests
        swapped += 1
    assert swapped >= 5


@pytest.mark.parametrize("change", [{"weight_slots": 1}, {"chunk_bytes": 0}, {"update": "after"}, {"gradient_slots": 1}])
def test_another_plan_has_another_digest(change: dict[str, Any]) -> None:
    assert build(**change).digests()["body"] != build().digests()["body"]


def test_digests_do_not_depend_on_the_process() -> None:
    code = "from tests.schedule.fixtures import build; print(build(placement={'1': 'resident'}).digests())"
    root = Path(__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert outputs == {f"{build(placement={'1': 'resident'}).digests()}\n"}
