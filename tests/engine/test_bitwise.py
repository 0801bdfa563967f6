"""The project's strongest promise: a plan changes when and where, never what.

For one recipe, every plan leaves the same bits: weights, streamed weights, moments, losses and norms after five steps. Plans are
drawn at random: placement per block, slots, chunks from smaller than a tensor to a whole block, recompute, keep or offload per
layer, update policy, threads. Every run has its slots filled with NaN on release, so no plan can live on left-overs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.engine.backend import Backend
from megatrain.engine.cpu import CpuBackend
from megatrain.engine.engine import Engine
from megatrain.engine.executor import Issue, PartRun
from megatrain.plan import Placement, Plan, UpdatePolicy
from megatrain.recipe import Precision, Recipe
from megatrain.schedule import lower
from tests.engine.small import (
    Disturbed,
    Joining,
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


def recipe_of(precision: Precision, clipping: bool, micro_batches: int = 2) -> Recipe:
    clip_norm = 0.5 if clipping else None
    return small_recipe(precision=precision, clip_norm=clip_norm, compute_threads=2, micro_batches=micro_batches)


@cache
def reference(precision: Precision, tied: bool, clipping: bool, micro_batches: int = 2) -> Outcome:
    return train(small_model(tied=tied), recipe_of(precision, clipping, micro_batches), RESIDENT)


def draw_and_compare(data: st.DataObject, precision: Precision) -> None:
    tied, clipping = data.draw(st.booleans(), label="tied"), data.draw(st.booleans(), label="clipping")
    micro_batches = data.draw(st.integers(1, 3), label="micro-batches")
    model, recipe = small_model(tied=tied), recipe_of(precision, clipping, micro_batches)
    plan = data.draw(plans(model, recipe), label="plan")
    assert_same_bits(train(model, recipe, plan, wrap=poisoned), reference(precision, tied, clipping, micro_batches))


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_that_are_updated_last(precision: Precision) -> None:
    """Every block or some of them, some of which are not the CPU's."""
    expected = reference(precision, False, False)
    mixed: dict[str, Placement] = {"default": "streamed", "0": "resident", "3": "device_weights"}
    staying: dict[str, Placement] = {"default": "device_weights", "2": "streamed_adam", "6": "resident"}
    streamed = Plan(update="during_backward", update_order={"default": "last"}, host_gradient_slots=1, chunk_bytes=4096)
    for plan in (
        streamed,
        replace(streamed, update_order={"head": "last", "2": "last", "4-6": "last"}, placement=mixed),
        replace(streamed, update_order={"default": "last", "embedding": "first", "5": "first"}, placement=staying),
    ):
        assert_same_bits(train(small_model(), recipe_of(precision, False), plan, wrap=poisoned), expected)


PASSING: dict[str, dict[str, Any]] = {
    "all, one slot of each": {
        "placement": {"default": "streamed_adam"}, "activations": {"default": "offload"}, "weight_slots": 1, "gradient_slots": 1,
        "state_slots": 1, "input_slots": 2, "chunk_bytes": 4096,
    },
    "all, whole blocks": {
        "placement": {"default": "streamed_adam"}, "activations": {"default": "offload"}, "weight_slots": 3, "vocab_slots": 2,
        "state_slots": 3, "input_slots": 3, "chunk_bytes": 0,
    },
    # A chunk waits for a slot while the one before it in the same block is still on its way down.
    "every other layer, many chunks": {
        "placement": {"default": "streamed", "1": "streamed_adam", "3": "streamed_adam", "5": "streamed_adam"},
        "activations": {"default": "recompute", "0": "offload", "2-4": "offload", "6": "keep"},
        "state_slots": 2, "input_slots": 2, "chunk_bytes": 2048,
    },
    "every placement and every activation": {
        "placement": {"default": "streamed_adam", "0": "device_weights", "2": "resident", "4-5": "streamed", "head": "resident"},
        "activations": {"default": "offload", "1": "keep", "4": "recompute"},
        "state_slots": 2, "input_slots": 3, "chunk_bytes": 8192,
    },
    "embedding and head": {
        "placement": {"default": "resident", "embedding": "streamed_adam", "head": "streamed_adam"}, "vocab_slots": 1,
        "state_slots": 3, "chunk_bytes": 4096,
    },
    # Nothing else on the copy lanes, so what an input waits for is not implied by what a load waits for.
    "offload alone": {"placement": {"default": "resident"}, "activations": {"default": "offload"}, "input_slots": 2},
}  # fmt: skip
"""Plans whose state passes through the device or whose inputs wait on the host."""


@pytest.mark.parametrize(
    ("precision", "tied", "micro_batches"), [("bf16", False, 3), pytest.param("fp32", True, 1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("update", ["after", "next_forward", "during_backward"])
@pytest.mark.parametrize("name", PASSING)
def test_state_that_passes_through_the_device_and_inputs_that_wait_on_the_host(
    name: str, update: UpdatePolicy, precision: Precision, tied: bool, micro_batches: int
) -> None:
    """With released slots filled with NaN, and random delays: a copy that nobody waited for finds NaN."""
    clipping = update != "during_backward"
    model, recipe = small_model(tied=tied), recipe_of(precision, clipping, micro_batches)
    expected = reference(precision, tied, clipping, micro_batches)
    late = delayed(micro_batches, longest_ns=300_000)
    assert_same_bits(train(model, recipe, Plan(update=update, **PASSING[name]), wrap=lambda b: late(poisoned(b))), expected)


@pytest.mark.parametrize("lane", ["h2d", "compute", "d2h", "cpu", None])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(weight_slots=2, chunk_bytes=4096, update="next_forward"),
        Plan(placement={"default": "streamed_adam", "2-3": "streamed"}, activations={"default": "offload"}, state_slots=1),
    ],
    ids=["streamed", "streamed_adam and offload"],
)
def test_delays_on_any_lane_change_no_bit(plan: Plan, lane: str | None) -> None:
    for seed in range(2):
        outcome = train(small_model(), recipe_of("bf16", True), plan, wrap=delayed(seed, lane))  # type: ignore[arg-type]
        assert_same_bits(outcome, reference("bf16", False, True))


@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "not waited for"])
@pytest.mark.parametrize("late", ["stash[3.0]", "fetch[3.0]", "load[state.4.0]", "save[state.4.0]"])
def test_one_very_late_copy(late: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no bit; and it would if those that wait for it did not: released bytes hold NaN, then other contents."""
    model, recipe = small_model(), recipe_of("bf16", True, 1)
    placement = {"default": "resident", "3-6": "streamed_adam"} if "state" in late else {"default": "resident"}
    plan = Plan(placement=placement, activations={"default": "offload"}, weight_slots=1, state_slots=1, chunk_bytes=0)  # type: ignore[arg-type]
    honest = PartRun.deps_of

    def forgetful(self: PartRun, i: int) -> list[tuple[str, Issue]]:
        return [(name, issue) for name, issue in honest(self, i) if waits or name != late]

    def slow(inner: CpuBackend) -> Backend:
        return Disturbed(inner=poisoned(inner), before=lambda op: inner.clock.sleep(200_000_000 * (op.name == late), op.name))

    expected = reference("bf16", False, True, 1)
    monkeypatch.setattr(PartRun, "deps_of", forgetful)
    if waits:
        assert_same_bits(train(model, recipe, plan, wrap=slow), expected)
        return
    with Engine(model, recipe, plan, random_weights(model), wrap=slow) as engine:
        for batch in random_batches(model, recipe, 5):
            engine.step(batch)
        ours = engine.state_dict()
    assert any(not torch.equal(ours[name], expected.weights[name]) for name in ours)


@pytest.mark.parametrize("update", ["during_backward", "after", "next_forward"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_updates_that_wait_for_nothing_may_run_in_one_call(precision: Precision, update: UpdatePolicy) -> None:
    """The same bits and digests (`train` holds them against the schedule), and no wait is left out."""
    clipping = update != "during_backward"
    model, recipe = small_model(), recipe_of(precision, clipping)
    backends: list[Joining] = []

    def joining(inner: CpuBackend) -> Backend:
        backends.append(Joining(inner=inner))
        return backends[-1]

    plan = Plan(weight_slots=2, chunk_bytes=256, update=update)
    assert_same_bits(train(model, recipe, plan, wrap=joining), reference(precision, False, clipping))
    (backend,) = backends
    lengths = [len(series) for series in backend.series]
    assert all(length > 1 for length in lengths)
    assert all(op.kind == "update" and not (op.deps or op.prev) for series in backend.series for op in series[1:])
    updates = sum(op.kind == "update" for op in lower(model, recipe, plan).body.ops)
    assert (max(lengths, default=0) == updates) == clipping  # during backward each waits for its gradient


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
    expected = train(small_model(), recipe, RESIDENT)
    for plan in (
        Plan(activations={"default": "recompute", "2-4": "keep"}, chunk_bytes=2048),
        Plan(activations={"default": "offload", "2-4": "keep"}, placement={"default": "streamed_adam"}, chunk_bytes=2048),
    ):
        assert_same_bits(train(small_model(), recipe, plan, wrap=poisoned), expected)


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
