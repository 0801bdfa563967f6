"""Over many steps: memory stays flat, the trace stays bounded, closing gives everything back."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.engine.executor import TRACED_PARTS, PartRun
from megatrain.plan import Plan
from tests.engine.small import random_batches, random_weights, small_model, small_recipe


def test_memory_is_flat_over_200_steps() -> None:
    model, recipe = small_model(num_hidden_layers=2), small_recipe(micro_batches=1)
    batch = random_batches(model, recipe, 1)[0]
    with Engine(model, recipe, Plan(chunk_bytes=0), random_weights(model)) as engine:
        counts = []
        for _ in range(2):
            for _ in range(100):
                engine.step(batch)
            engine.flush()
            gc.collect()
            kinds = [type(o) for o in gc.get_objects()]
            counts.append((sum(issubclass(k, torch.Tensor) for k in kinds), kinds.count(PartRun)))
        # No more after 200 than after 100; fewer only if another test's leftovers went meanwhile.
        assert counts[1][0] <= counts[0][0] and counts[1][1] <= counts[0][1]
        assert counts[0][1] <= TRACED_PARTS + 8  # the lanes hold on to the last part they ran
        trace = engine.trace()
        assert len(trace.parts) == TRACED_PARTS
        assert trace.notes == (f"recording ended after {TRACED_PARTS} parts; {202 - TRACED_PARTS} more ran",)
        engine.restart_trace()
        engine.step(batch)
        assert engine.trace().parts == ("prologue", "epilogue")


def test_closing_returns_memory_and_threads() -> None:
    gc.collect()
    before = threading.active_count()
    engine = Engine(small_model(), small_recipe(), Plan(), random_weights(small_model()))
    engine.step(random_batches(small_model(), small_recipe(), 1)[0])
    memory = weakref.ref(engine.memory)
    engine.close()
    engine.close()
    assert threading.active_count() <= before
    del engine
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"weights: 'model.norm.weight' is missing"),
        ({"model.extra": torch.zeros(1)}, r"weights: 'model.extra' is no parameter of 'small'"),
        ({"model.norm.weight": torch.zeros(35)}, r"'model.norm.weight' must have shape \[36\], got \[35\]"),
        *(
            ({"model.norm.weight": torch.ones(36, dtype=of).index_fill(0, torch.tensor(at), bad)}, r"norm.weight' is not finite")
            for of in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
            for at, bad in ((0, float("nan")), (17, float("inf")), (35, -float("inf")))
        ),
        ({"model.norm.weight": torch.full((36,), 3.4e38)}, r"model.norm.weight"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(change: dict[str, torch.Tensor | None], message: str) -> None:
    weights = {k: v for k, v in (random_weights(small_model()) | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        Engine(small_model(), small_recipe(precision="bf16"), Plan(), weights)
