"""What an engine says it takes of memory: nothing is left out, it is what the ledger counts, and asking disturbs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.cli.run import this_machine
from megatrain.engine.engine import STEPS_IN_FLIGHT, Engine, resident_set
from megatrain.plan import Plan
from megatrain.recipe import Precision
from megatrain.schedule import Schedule
from megatrain.schedule.layout import input_nbytes
from sim.ledger import ALIGN, ledger
from tests.engine.small import random_batches, random_weights, small_model, small_recipe, train
from tests.strategies import plans

STREAMED = Plan(weight_slots=2, chunk_bytes=2048)
RESIDENT = Plan(
    placement={"default": "resident", "1": "streamed"}, activations={"default": "keep"}, update="after", chunk_bytes=0
)


def storages(schedule: Schedule, space: str) -> list[int]:
    return [s.nbytes for s in schedule.storages if s.space == space and not s.dynamic]


def staged(schedule: Schedule) -> int:
    return (STEPS_IN_FLIGHT + 1) * schedule.recipe.micro_batches * input_nbytes(schedule.model, schedule.recipe)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), precision=st.sampled_from(["bf16", "fp32"]))
def test_every_byte_is_somewhere_and_the_ledger_knows_it(data: st.DataObject, precision: Precision) -> None:
    model, recipe = small_model(), small_recipe(precision=precision)
    plan = data.draw(plans(model, recipe))
    with Engine(model, recipe, plan, random_weights(model)) as engine:
        use, schedule = engine.memory_use(), engine.schedule
    host, device = storages(schedule, "host"), storages(schedule, "device")
    assert use.pinned + use.pageable == sum(host) + staged(schedule)
    assert sum(device) <= use.device_reserved <= sum(device) + ALIGN * (len(device) + 1)
    assert use.device_allocated == use.device_reserved and use.device_process == 0

    items = [i for i in ledger(model, recipe, plan, this_machine("cpu")).items if "init" in i.phases and i.what != "process"]
    pinned, pageable, arena = (sum(i.nbytes for i in items if i.space == of) for of in ("pinned", "pageable", "device"))
    assert use.pinned == pinned == 0
    assert 0 <= pageable - use.pageable <= ALIGN * len(host)
    assert 0 <= use.device_reserved - arena <= ALIGN


def test_asking_neither_flushes_nor_changes_a_bit() -> None:
    model, recipe = small_model(), small_recipe(precision="bf16")
    undisturbed = train(model, recipe, STREAMED, steps=4)
    with Engine(model, recipe, STREAMED, random_weights(model)) as engine:
        results = []
        for batch in random_batches(model, recipe, 4):
            results.append(engine.step(batch))
            engine.memory_use(reset=True)
        assert engine.trace().parts == ("prologue", "body", "body", "body", "epilogue")
        assert [r.loss for r in results] == undisturbed.losses
        state = engine.state_dict()
    assert all(torch.equal(state[name], undisturbed.weights[name]) for name in state)


def test_after_replanning_it_is_the_new_plans() -> None:
    model, recipe = small_model(), small_recipe(precision="bf16")
    with Engine(model, recipe, STREAMED, random_weights(model)) as engine:
        before = engine.memory_use()
        engine.replan(RESIDENT)
        after = engine.memory_use()
        assert after.pageable == sum(storages(engine.schedule, "host")) + staged(engine.schedule)
    with Engine(model, recipe, RESIDENT, random_weights(model)) as engine:
        anew = engine.memory_use()
    assert (after.device_reserved, after.pageable) == (anew.device_reserved, anew.pageable)
    assert after.device_reserved > before.device_reserved and after.pageable < before.pageable


def test_the_resident_set_grows_with_what_is_touched() -> None:
    before = resident_set()
    if before is None:
        pytest.skip("there is no /proc")
    held = torch.ones(64 << 20, dtype=torch.uint8)
    grown = resident_set()
    assert grown is not None and 60 << 20 <= grown - before <= 80 << 20
    del held


def test_the_resident_set_is_read_in_bytes_where_it_is_there(tmp_path: Path) -> None:
    assert resident_set(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    status = tmp_path / "proc/self/status"
    status.write_text("Name:\tpython\n")
    assert resident_set(tmp_path) is None
    status.write_text("Name:\tpython\nVmHWM:\t    9 kB\nVmRSS:\t    5 kB\nRssAnon:\t    4 kB\n")
    assert resident_set(tmp_path) == 5 << 10
