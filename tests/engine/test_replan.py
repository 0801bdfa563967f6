"""replan: another plan from here on, with the state where it is; no bit of a run changes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.engine.engine import Engine
from megatrain.plan import Plan, UpdatePolicy
from megatrain.recipe import Precision
from tests.engine.small import random_batches, random_weights, small_model, small_recipe
from tests.strategies import plans

PLANS = (
    Plan(weight_slots=2, chunk_bytes=2048),
    Plan(placement={"default": "resident", "1": "streamed"}, update="after", activations={"default": "keep"}, chunk_bytes=0),
    Plan(placement={"default": "device_weights", "head": "resident"}, weight_slots=1, chunk_bytes=4096),
    Plan(
        placement={"default": "streamed_adam", "3": "resident", "5": "streamed"}, activations={"default": "offload", "2": "keep"},
        state_slots=1, chunk_bytes=4096,
    ),
    Plan(
        placement={"default": "streamed", "embedding": "streamed_adam", "0-3": "streamed_adam"}, update="after",
        activations={"default": "recompute", "1-4": "offload"}, input_slots=3, chunk_bytes=0,
    ),
)  # fmt: skip


def state_after(plans: list[Plan], precision: Precision, tied: bool) -> dict[str, torch.Tensor]:
    """The state after a step under each plan, one after the other."""
    model, recipe = small_model(tied=tied), small_recipe(precision=precision)
    found: dict[str, torch.Tensor] = {}
    with Engine(model, recipe, plans[0], random_weights(model)) as engine:
        for i, batch in enumerate(random_batches(model, recipe, len(plans))):
            if i:
                engine.replan(plans[i])
            engine.step(batch)
            assert engine.trace().parts[0] == "prologue"
        expected = engine.schedule.digests()
        trace = engine.trace()
        assert trace.digests == tuple(expected[part] for part in trace.parts)
        found |= engine.state_dict()
        found |= {f"{name} {which}": t for name, pair in engine.moments().items() for which, t in zip("mv", pair, strict=True)}
        assert engine.applied_updates == len(plans)
    return found


@pytest.mark.parametrize(("precision", "tied"), [("bf16", False), ("bf16", True), ("fp32", False)])
def test_a_run_under_changing_plans_has_the_bits_of_a_run_under_one(precision: Precision, tied: bool) -> None:
    order = (0, 1, 2, 3, 1, 4, 3, 0, 4, 2)
    reference = state_after([PLANS[0]] * len(order), precision, tied)
    changing = state_after([PLANS[i] for i in order], precision, tied)
    assert all(torch.equal(reference[name], changing[name]) for name in reference)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_two_plans(data: st.DataObject) -> None:
    model, recipe = small_model(), small_recipe(precision="bf16")
    first, second = (data.draw(plans(model, recipe)) for _ in range(2))
    reference, changing = state_after([PLANS[0]] * 3, "bf16", False), state_after([first, second, first], "bf16", False)
    assert all(torch.equal(reference[name], changing[name]) for name in reference)


def test_what_stays_on_the_host_is_not_copied() -> None:
    model, recipe = small_model(), small_recipe()
    with Engine(model, recipe, PLANS[0], random_weights(model)) as engine:
        before = {what: engine.memory.named(f"{what}[3]").data_ptr() for what in ("weights", "m", "v")}
        threads = threading.active_count()
        engine.replan(Plan(weight_slots=3, placement={"default": "resident", "2": "streamed"}, chunk_bytes=0))
        assert {what: engine.memory.named(f"{what}[3]").data_ptr() for what in ("weights", "m", "v")} == before
        assert threading.active_count() == threads


def test_state_that_will_pass_through_the_device_is_not_copied() -> None:
    model, recipe = small_model(), small_recipe(precision="bf16")
    planes = [f"{what}[{b.index}]" for b in model.blocks for what in ("weights", "lo", "m", "v")]
    with Engine(model, recipe, PLANS[0], random_weights(model)) as engine:
        before = {name: engine.memory.named(name).data_ptr() for name in planes}
        for plan in (Plan(placement={"default": "streamed_adam"}, activations={"default": "offload"}), PLANS[0]):
            engine.replan(plan)
            assert {name: engine.memory.named(name).data_ptr() for name in planes} == before


@pytest.mark.parametrize("plan", PLANS[3:], ids=["next_forward", "after"])
def test_gradients_and_evaluations_are_those_of_any_other_plan(plan: Plan) -> None:
    """After steps, and between them; a plan that was replanned to has a gradient once it has run a step."""
    model, recipe = small_model(tied=True), small_recipe(precision="bf16")
    batches = random_batches(model, recipe, 4)
    with (
        Engine(model, recipe, PLANS[0], random_weights(model)) as engine,
        Engine(model, recipe, PLANS[1], random_weights(model)) as other,
    ):
        engine.replan(plan)
        with pytest.raises(ValueError, match="gradients: no step has run"):
            engine.gradients()
        for i, batch in enumerate(batches):
            engine.step(batch)
            other.step(batch)
            if i in (0, 2):  # after a prologue, and after a body
                ours, theirs = engine.gradients(), other.gradients()
                assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
                assert all(bool(g.any()) for g in ours.values())
                assert engine.evaluate(batches[-1]) == other.evaluate(batches[-1])
        engine.replan(PLANS[0])
        engine.step(batches[0])
        other.step(batches[0])
        ours, theirs = engine.gradients(), other.gradients()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
        ours, theirs = engine.state_dict(), other.state_dict()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("update", ["after", "next_forward", "during_backward"])
def test_reading_state_and_evaluating_between_steps_changes_nothing(update: UpdatePolicy) -> None:
    """Every flush ends a run of bodies: state that passes through the device is back on the host, and whole."""
    model, recipe = small_model(), small_recipe(precision="bf16", clip_norm=None)
    batches = random_batches(model, recipe, 6)
    plan = replace(PLANS[3], update=update)
    with (
        Engine(model, recipe, plan, random_weights(model)) as engine,
        Engine(model, recipe, PLANS[1], random_weights(model)) as other,
        Engine(model, recipe, plan, random_weights(model)) as undisturbed,
    ):
        for i, batch in enumerate(batches):
            engine.step(batch)
            other.step(batch)
            undisturbed.step(batch)
            if i in (0, 1, 4):
                ours, theirs = engine.state_dict(), other.state_dict()
                assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
                assert engine.evaluate(batches[0]) == engine.evaluate(batches[0]) == other.evaluate(batches[0])
        ours, theirs = engine.state_dict(), undisturbed.state_dict()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_a_plan_that_cannot_be_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = small_model(), small_recipe()
    batches = random_batches(model, recipe, 3)
    with Engine(model, recipe, PLANS[0], random_weights(model)) as engine:
        engine.step(batches[0])
        with pytest.raises(ValueError, match="the model has layers 0 to 6"):
            engine.replan(Plan(placement={"9": "resident"}))
        honest, calls = Engine._backend, 0

        def full(self: Engine, *args: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise MemoryError("no room")
            return honest(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Engine, "_backend", full)
        with pytest.raises(MemoryError, match="no room"):
            engine.replan(PLANS[1])
        assert engine.schedule.plan == PLANS[0]
        for batch in batches[1:]:
            engine.step(batch)
        ours = engine.state_dict()
    with Engine(model, recipe, PLANS[0], random_weights(model)) as engine:
        for batch in batches:
            engine.step(batch)
        theirs = engine.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
