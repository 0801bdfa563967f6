"""The project's strongest promise: a plan changes when and where, never what.

For one recipe, every plan leaves the same bits: weights, streamed weights, moments, losses and norms after five steps. Plans are
drawn at random: placement per block, slots, chunks from smaller than a tensor to a whole block, recompute or keep per layer,
update policy, threads. Every run has its slots filled with NaN on release, so no plan can live on left-overs.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.engine.cpu import CpuBackend
from megatrain.engine.engine import Engine
from megatrain.engine.executor import Issue, PartRun
from megatrain.plan import Plan
from megatrain.recipe import Precision, Recipe
from tests.engine.small import (
    Outcome,
    assert_same_bits,
    delayed,
    poisoned,
    random_batches,
    random_weights,
    small_model,
    small_recipe,
    train,
)
from tests.strategies import plans

SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
RESIDENT = Plan(placement={"default": "resident"}, activations={"default": "keep"}, update="after", chunk_bytes=0)
"""Ordinary training: everything on the device, nothing recomputed, nothing moved."""


def recipe_of(precision: Precision, clipping: bool) -> Recipe:
    return small_recipe(precision=precision, clip_norm=0.5 if clipping else None, compute_threads=2)


@cache
def reference(precision: Precision, tied: bool, clipping: bool) -> Outcome:
    return train(small_model(tied=tied), recipe_of(precision, clipping), RESIDENT)


def draw_and_compare(data: st.DataObject, precision: Precision) -> None:
    tied, clipping = data.draw(st.booleans(), label="tied"), data.draw(st.booleans(), label="clipping")
    model, recipe = small_model(tied=tied), recipe_of(precision, clipping)
    plan = data.draw(plans(model, recipe), label="plan")
    assert_same_bits(train(model, recipe, plan, wrap=poisoned), reference(precision, tied, clipping))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@settings(SETTINGS, max_examples=20)
@given(data=st.data())
def test_every_plan_gives_the_same_bits(precision: Precision, data: st.DataObject) -> None:
    draw_and_compare(data, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@settings(SETTINGS, max_examples=500)
@given(data=st.data())
def test_a_thousand_plans_give_the_same_bits(precision: Precision, data: st.DataObject) -> None:
    draw_and_compare(data, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("update", ["after", "next_forward", "during_backward"])
def test_kept_layers_streamed_through_one_slot(precision: Precision, update: str) -> None:
    """Between the forward and the backward of a kept layer its only slot holds NaN, then other layers, then it again."""
    clipping = update != "during_backward"
    plan = Plan(activations={"default": "keep"}, weight_slots=1, gradient_slots=1, chunk_bytes=1024, update=update)  # type: ignore[arg-type]
    outcome = train(small_model(), recipe_of(precision, clipping), plan, wrap=poisoned)
    assert_same_bits(outcome, reference(precision, False, clipping))


@pytest.mark.parametrize("lane", ["h2d", "compute", "d2h", "cpu", None])
def test_delays_on_any_lane_change_no_bit(lane: str | None) -> None:
    plan = Plan(weight_slots=2, chunk_bytes=4096, update="next_forward")
    for seed in range(2):
        outcome = train(small_model(), recipe_of("bf16", True), plan, wrap=delayed(seed, lane))  # type: ignore[arg-type]
        assert_same_bits(outcome, reference("bf16", False, True))


def test_a_resident_run_is_reproducible_and_recipes_do_differ() -> None:
    """The comparison can fail: another recipe gives other bits, the same one gives the same."""
    again = train(small_model(), recipe_of("bf16", True), RESIDENT)
    assert_same_bits(again, reference("bf16", False, True))
    with pytest.raises(AssertionError):
        assert_same_bits(again, reference("bf16", False, False))


def test_one_lane_at_a_time_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a part is one possible execution: run it op by op, with no concurrency at all."""
    backends: list[CpuBackend] = []
    honest = PartRun.deps_of

    def one_by_one(self: PartRun, i: int) -> list[tuple[str, Issue]]:
        if i > 0:
            backends[0].clock.wait(self.issued[i - 1], self.outline.names[i])
        return honest(self, i)

    def wrap(inner: CpuBackend) -> CpuBackend:
        backends.append(inner)
        return inner

    monkeypatch.setattr(PartRun, "deps_of", one_by_one)
    plan = Plan(weight_slots=3, chunk_bytes=4096, update="after", gradient_slots=2)
    assert_same_bits(train(small_model(), recipe_of("bf16", True), plan, wrap=wrap), reference("bf16", False, True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_and_padded_rows_under_different_plans(attention: str) -> None:
    recipe = small_recipe(precision="bf16", attention_mask="segments", attention=attention, micro_batch_size=2)
    plan = Plan(activations={"default": "recompute", "2-4": "keep"}, chunk_bytes=2048)
    assert_same_bits(train(small_model(), recipe, plan, wrap=poisoned), train(small_model(), recipe, RESIDENT))


def test_the_streamed_plane_is_the_rounding_of_the_master() -> None:
    """After every step, for every tensor: half away from zero, as the master's two planes are defined."""
    model, recipe = small_model(tied=True), recipe_of("bf16", True)
    with Engine(model, recipe, Plan(chunk_bytes=2048), random_weights(model)) as engine:
        for batch in random_batches(model, recipe, 3):
            engine.step(batch)
            streamed = engine.streamed_weights()
            for name, master in engine.state_dict().items():
                rounded = ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
                assert torch.equal(streamed[name], rounded), name
