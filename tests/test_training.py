"""`train` is a loop around `Engine.step`: the same bits, every step's figures, a trace of the steps after warm-up, and an engine
that is closed whatever happens."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from analysis.compare import compare
from megatrain.data import SyntheticData
from megatrain.engine.engine import Engine, MemoryUse
from megatrain.files import StepFigures
from megatrain.hardware import H200
from megatrain.model import ModelSpec
from megatrain.plan import Plan, UpdatePolicy
from megatrain.recipe import AdamW, Recipe
from megatrain.schedule import lower
from megatrain.trace import Trace
from megatrain.training import WARM_UP, Trained, settled, train, warm_up
from megatrain.weights import RandomWeights
from sim.simulate import simulate

MODEL = ModelSpec.from_config(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 61, "hidden_size": 32,
        "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
    name="small",
)  # fmt: skip
RECIPE = Recipe(micro_batches=2, micro_batch_size=2, seq_len=12, loss_tile=8, optimizer=AdamW(lr=1e-2))
PLAN = Plan(chunk_bytes=1024)
WEIGHTS = RandomWeights(MODEL, 3)
DATA = SyntheticData(vocab_size=61, seq_len=12, seed=5)


def trained(steps: int, plan: Plan = PLAN, **options: Any) -> Trained:
    return train(MODEL, RECIPE, plan, WEIGHTS, DATA.batch, steps=steps, **options)


@pytest.mark.parametrize("plan", [PLAN, Plan(update="after", weight_slots=1), Plan(placement={"default": "resident"})])
def test_losses_norms_and_weights_are_those_of_stepping_by_hand(plan: Plan) -> None:
    by_hand = []
    with Engine(MODEL, RECIPE, plan, WEIGHTS) as engine:
        for step in range(8):
            result = engine.step(DATA.batch(step, 4))
            by_hand.append((result.loss, result.norm))
        masters = engine.state_dict()
    ended: dict[str, torch.Tensor] = {}
    found = trained(8, plan, at_end=lambda engine: ended.update(engine.state_dict()))
    assert [(f.loss, f.norm) for f in found.steps] == by_hand
    assert len(set(by_hand)) == 8
    assert ended.keys() == masters.keys()
    assert all(torch.equal(ended[name], masters[name]) for name in masters)


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 9])
def test_every_step_is_reported_once_and_in_order(steps: int) -> None:
    told: list[tuple[int, StepFigures, str | None]] = []
    ready: list[int] = []
    found = trained(steps, on_step=lambda *told_of: told.append(told_of), on_ready=lambda: ready.append(len(told)))
    assert ready == [0]
    assert [step for step, _, _ in told] == list(range(steps))
    assert tuple(figures for _, figures, _ in told) == found.steps
    assert {why for _, _, why in told} == {None} and found.skipped == 0
    assert all(figures.seconds > 0 for figures in found.steps)


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 9])
def test_the_trace_covers_the_steps_after_warm_up(steps: int) -> None:
    found = trained(steps)
    assert found.trace is not None
    assert found.traced_from == warm_up(steps) == (WARM_UP if steps >= 2 * WARM_UP else 0)
    assert found.trace.parts[0] == "prologue"
    assert sum(part != "epilogue" for part in found.trace.parts) == steps - found.traced_from


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
def test_memory_is_read_once_when_the_third_step_is_known(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    read: list[tuple[int, MemoryUse]] = []
    inner = Engine.memory_use

    def memory_use(engine: Engine) -> MemoryUse:
        read.append((len(told), inner(engine)))
        return read[-1][1]

    monkeypatch.setattr(Engine, "memory_use", memory_use)
    found = trained(steps, on_step=lambda step, figures, why: told.append(step))
    assert [before for before, _ in read] == [min(steps, 3) - 1]  # the steps told of before the one that is just known
    assert found.memory == read[0][1]


def test_the_trace_compares_with_a_simulation_of_the_same_parts() -> None:
    found = trained(9)
    assert isinstance(found.trace, Trace)
    schedule = lower(MODEL, RECIPE, PLAN)
    predicted = simulate(schedule, H200, parts_run=found.trace.parts)
    table = compare(schedule, predicted, found.trace)
    assert len(table.steps) == 9 - WARM_UP - 1  # times between the ends of steps
    assert (table.steps["measured_ns"] > 0).all()


def test_without_tracing_there_is_no_trace_and_the_same_losses() -> None:
    found = trained(7, tracing=False)
    assert found.trace is None
    assert [f.loss for f in found.steps] == [f.loss for f in trained(7).steps]


@pytest.mark.parametrize("tracing", [True, False])
@pytest.mark.parametrize("update", ["after", "next_forward"])
def test_at_end_sees_a_flushed_engine(update: UpdatePolicy, tracing: bool) -> None:
    pending: list[bool] = []

    def at_end(engine: Engine) -> None:
        def state() -> list[torch.Tensor]:  # as it lies there: reading it by name would flush
            return [engine.memory.named(f"{what}[1]").clone() for what in ("weights", "lo", "m", "v")]

        before = state()
        engine.flush()
        pending.extend(not torch.equal(a, b) for a, b in zip(before, state(), strict=True))

    trained(4, Plan(update=update, chunk_bytes=1024), at_end=at_end, tracing=tracing)
    assert pending == [False] * 4


def test_a_step_that_is_skipped_is_counted_and_said() -> None:
    # Near the largest that bf16 holds: whatever the loss is, the gradient is not finite.
    huge = {name: value * (1e38 if value.dim() > 1 else 1) for name, value in WEIGHTS.items()}
    told: list[str | None] = []
    found = train(MODEL, RECIPE, PLAN, huge, DATA.batch, steps=2, on_step=lambda step, figures, why: told.append(why))
    assert found.skipped == 2 and all(told)


def test_an_exception_of_the_callers_closes_the_engine() -> None:
    before = set(threading.enumerate())
    for name in ("on_step", "on_ready", "at_end"):

        def fail(*arguments: Any) -> None:
            raise LookupError("the caller's")

        callbacks: dict[str, Any] = {name: fail}
        with pytest.raises(LookupError, match="the caller's"):
            trained(4, **callbacks)
        assert set(threading.enumerate()) <= before, name


def test_after_warm_up_the_garbage_collector_leaves_what_was_there_alone() -> None:
    frozen: list[int] = []
    alive = len(gc.get_objects())
    for tracing in (True, False):
        frozen.clear()
        trained(8, tracing=tracing, on_step=lambda *_: frozen.append(gc.get_freeze_count()))
        assert frozen[:WARM_UP] == [0] * WARM_UP
        assert all(count > alive / 2 for count in frozen[WARM_UP:])
        assert gc.get_freeze_count() == 0
    with pytest.raises(LookupError), settled():
        raise LookupError
    assert gc.get_freeze_count() == 0


def test_inside_settled_new_garbage_is_still_collected() -> None:
    class Node:
        me: Node

    with settled():
        node = Node()
        node.me = node
        gone = weakref.ref(node)
        del node
        gc.collect()
        assert gone() is None


def test_settled_where_something_is_frozen_from_the_start() -> None:
    """Python 3.12 begins so."""
    alive = len(gc.get_objects())
    gc.freeze()
    new: list[list[int]] = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    with settled():
        assert gc.get_freeze_count() >= before + len(new)
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > alive / 2


def test_an_exception_of_the_datas_closes_the_engine() -> None:
    before = set(threading.enumerate())

    def batch(step: int, rows: int) -> dict[str, torch.Tensor]:
        if step == 2:
            raise LookupError("no more rows")
        return DATA.batch(step, rows)

    with pytest.raises(LookupError, match="no more rows"):
        train(MODEL, RECIPE, PLAN, WEIGHTS, batch, steps=4)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("steps", [0, -1])
def test_fewer_steps_than_one_are_refused(steps: int) -> None:
    with pytest.raises(ValueError, match=r"^steps: must be an integer >= 1"):
        trained(steps)
