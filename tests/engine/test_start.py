"""An engine's start: layers compile while weights are loaded, and its times say so."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import megatrain.layers.template as template_module
from megatrain.engine.engine import Engine
from megatrain.engine.kernels import Kernels
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from tests.engine.small import random_batches, random_weights, small_model, small_recipe

PLANS = (
    Plan(chunk_bytes=4096),
    Plan(chunk_bytes=4096, activations={"default": "keep"}),
    Plan(chunk_bytes=4096, activations={"default": "offload"}, placement={"default": "streamed_adam", "1": "resident"}),
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Graphs as the compiler gets them; they run as they are."""
    graphs: list[object] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        run: Callable[..., Any] = graph.forward
        return run

    template_module._build.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield graphs
    template_module._build.cache_clear()


def recipe(*, compiled: bool) -> Recipe:
    return small_recipe(precision="bf16", compiled=compiled)


@pytest.mark.parametrize("plan", PLANS, ids=["recompute", "keep", "offload"])
def test_steps_compile_nothing_that_the_start_has_not(plan: Plan, compiled: list[object]) -> None:
    model = small_model()
    with Engine(model, recipe(compiled=True), plan, random_weights(model)) as engine:
        at_start = len(compiled)
        assert at_start >= 1
        assert engine.start_times.compile_s > 0
        for batch in random_batches(model, engine.schedule.recipe, 2):
            loss = engine.step(batch).loss
        assert len(compiled) == at_start
        rehearsed, trained = loss, engine.state_dict()
    with Engine(model, recipe(compiled=False), plan, random_weights(model)) as engine:
        assert engine.start_times.compile_s < 1
        for batch in random_batches(model, engine.schedule.recipe, 2):
            loss = engine.step(batch).loss
        assert loss == rehearsed
        weights = engine.state_dict()
        assert all(torch.equal(weights[name], trained[name]) for name in trained)


def test_what_compiling_raises_is_raised_by_the_engine(monkeypatch: pytest.MonkeyPatch, compiled: list[object]) -> None:
    model, before = small_model(), threading.active_count()

    def fails(kernels: Kernels) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Kernels, "rehearse", fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        Engine(model, recipe(compiled=True), PLANS[0], random_weights(model))
    weights = random_weights(model)
    del weights["lm_head.weight"]
    with pytest.raises(ValueError, match="missing"):  # what the user can mend comes first
        Engine(model, recipe(compiled=True), PLANS[0], weights)
    assert threading.active_count() == before


def test_the_start_says_how_far_it_is() -> None:
    model, said = small_model(), []
    with Engine(model, recipe(compiled=False), PLANS[0], random_weights(model), on_start=said.append) as engine:
        assert said[0] == 0 and said[-1] == 1 and said == sorted(said)
        times = engine.start_times
        assert times.memory_s > 0 and times.weights_s > 0
