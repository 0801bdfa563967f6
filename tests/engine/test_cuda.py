"""What the cuda backend adds to order and bits: streams that wait for the host, graphs, memory of the device. Needs a GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.engine.backend import Backend
from megatrain.engine.engine import STEPS_IN_FLIGHT, Engine
from megatrain.engine.executor import LaneError
from megatrain.plan import Plan
from megatrain.schedule.layout import input_nbytes
from megatrain.schedule.nouns import Op
from tests.engine.small import (
    Disturbed,
    Joining,
    assert_same_bits,
    delayed,
    poisoned,
    random_batches,
    random_weights,
    small_model,
    small_recipe,
    train,
)

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]

PLAN = Plan(weight_slots=2, chunk_bytes=4096)
EARLY = Plan(update="during_backward", placement={"2": "resident"}, chunk_bytes=4096)
PASSING = Plan(
    placement={"default": "streamed_adam", "1": "streamed", "4": "device_weights"}, weight_slots=2, state_slots=2,
    activations={"default": "offload", "3": "recompute"}, chunk_bytes=4096,
)  # fmt: skip
EARLY_PASSING = replace(PASSING, update="during_backward")


@pytest.mark.parametrize("plan", [PLAN, PASSING], ids=["streamed", "passing"])
@pytest.mark.parametrize("nth", [1, 40, 400])
@pytest.mark.parametrize("lane", ["h2d", "compute", "d2h", "cpu"])
def test_a_failure_ends_the_run_and_leaves_no_stream_waiting(lane: str, nth: int, plan: Plan) -> None:
    """Streams wait for counts that a failed cpu lane will not reach; they must be let go."""
    failed_at: list[float] = []

    def failing(inner: Any) -> Backend:
        seen = 0

        def before(op: Op) -> None:
            nonlocal seen
            seen += op.lane == lane
            if op.lane == lane and seen == nth:
                failed_at.append(time.monotonic())
                raise OSError("no more of it")

        # Beside another lane's failure, the cpu lane is in the middle of a series.
        return (Disturbed if lane == "cpu" else Joining)(inner=inner, before=before)

    model, recipe = small_model(), small_recipe(precision="bf16")
    with Engine(model, recipe, plan, random_weights(model), device="cuda", wrap=failing) as engine:
        with pytest.raises(LaneError, match="no more of it"):
            for batch in random_batches(model, recipe, 30):
                engine.step(batch)
            engine.flush()
        torch.cuda.synchronize()
        assert time.monotonic() - failed_at[0] < 2


@pytest.mark.parametrize("plan", [PLAN, PASSING], ids=["streamed", "passing"])
def test_flushes_evaluations_and_skipped_steps_between_graphs(plan: Plan) -> None:
    """Ops run directly, are captured, and are replayed, wherever flushes fall: the bits are those of an undisturbed run."""
    model, recipe = small_model(), small_recipe(precision="bf16")
    batches = random_batches(model, recipe, 6)
    empty = {"input_ids": batches[0]["input_ids"], "labels": torch.full_like(batches[0]["input_ids"], -100)}
    states = []
    for disturbed in (False, True):
        with Engine(model, recipe, plan, random_weights(model), device="cuda") as engine:
            for i, batch in enumerate(batches):
                engine.step(batch)
                if disturbed and i in (0, 1, 4):
                    engine.evaluate(batches[0])
                if disturbed and i in (1, 3):
                    assert engine.step(empty).skipped
                if disturbed and i == 3:
                    engine.flush()
            states.append(engine.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    "plan", [PLAN, EARLY, PASSING, EARLY_PASSING], ids=["next_forward", "during_backward", "passing", "passing during_backward"]
)
def test_memory_is_flat_after_the_third_step_and_closing_returns_it(plan: Plan) -> None:
    model = small_model()
    recipe = small_recipe(precision="bf16", clip_norm=None if plan.update == "during_backward" else 1.0)
    batches = random_batches(model, recipe, 40)
    train(model, recipe, plan, steps=2, device="cuda")  # what the process keeps for good: compiled kernels, cuBLAS workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    with Engine(model, recipe, plan, random_weights(model), device="cuda", tracing=False) as engine:
        for batch in batches[:3]:
            engine.step(batch)
        engine.flush()
        reserved = torch.cuda.memory_reserved()  # segments that grow are not counted one by one
        for batch in batches[3:]:
            engine.step(batch)
        engine.flush()
        assert torch.cuda.memory_reserved() == reserved
    del engine
    gc.collect()
    # PyTorch keeps the workspaces of cuBLAS and cuBLASLt for each stream there ever was, 32 MiB each.
    assert torch.cuda.memory_allocated() - before <= 2 * (32 << 20) + (4 << 20)


@pytest.mark.parametrize("tracing", [False, True])
def test_the_first_engine_of_a_process_runs_with_and_without_tracing(tracing: bool) -> None:
    """In a process of its own: its lanes' threads are the first to call the driver, and all memory is in growing segments."""
    code = (
        "from tests.engine.small import *; from megatrain.engine.engine import Engine; from megatrain.plan import Plan\n"
        "model, recipe = small_model(), small_recipe(precision='bf16')\n"
        "weights, plan = random_weights(model), Plan(chunk_bytes=4096)\n"
        f"with Engine(model, recipe, plan, weights, device='cuda', tracing={tracing}) as engine:\n"
        "    print([engine.step(batch).loss for batch in random_batches(model, recipe, 2)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and "nan" not in done.stdout, done.stderr


@pytest.mark.parametrize("plan", [PASSING, replace(PASSING, update="after", state_slots=1), EARLY_PASSING])
def test_state_that_passes_through_the_device_has_the_bits_of_state_that_stays_on_the_host(plan: Plan) -> None:
    """With poison in what was released, with delays, and with neither: a step of graphs that waits for copies on both sides."""
    model, recipe = small_model(), small_recipe(precision="bf16", micro_batches=3, clip_norm=None)
    expected = train(model, recipe, PLAN, steps=6, device="cuda")
    wraps: list[Callable[[Any], Backend]] = [lambda b: b, poisoned, delayed(1), lambda b: delayed(2)(poisoned(b))]
    for wrap in wraps:
        assert_same_bits(train(model, recipe, plan, steps=6, device="cuda", wrap=wrap), expected)


def test_a_replan_to_and_from_state_that_passes_keeps_every_bit() -> None:
    """Host planes that copies did not touch are registered with the driver now, and again let go."""
    model, recipe = small_model(), small_recipe(precision="bf16")
    batches, states = random_batches(model, recipe, 6), []
    for changing in (False, True):
        with Engine(model, recipe, PLAN, random_weights(model), device="cuda") as engine:
            for i, batch in enumerate(batches):
                if changing and i:
                    engine.replan(PASSING if i % 2 else PLAN)
                engine.step(batch)
            states.append(engine.state_dict())
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


def test_memory_use_is_what_is_registered_and_what_the_allocator_took() -> None:
    model, recipe = small_model(), small_recipe(precision="bf16")
    with Engine(model, recipe, PLAN, random_weights(model), device="cuda") as engine:
        for batch in random_batches(model, recipe, 4):
            engine.step(batch)
        engine.flush()
        use, storages = engine.memory_use(), engine.schedule.storages
        arena = sum(s.nbytes for s in storages if s.space == "device" and not s.dynamic)
        host = [s for s in storages if s.space == "host"]
        pinned, pageable = (sum(s.nbytes for s in host if s.copied == copied) for copied in (True, False))
        staged = (STEPS_IN_FLIGHT + 1) * recipe.micro_batches * input_nbytes(model, recipe)
        assert (use.pinned, use.pageable) == (pinned + staged, pageable)
        assert arena <= use.device_allocated <= use.device_reserved < use.device_process

        spike = 256 << 20
        before = engine.memory_use(reset=True)
        held = torch.empty(spike, dtype=torch.uint8, device="cuda")
        del held
        after = engine.memory_use(reset=True)
        assert after.device_allocated >= torch.cuda.memory_allocated() + spike and after.device_reserved >= spike
        assert engine.memory_use().device_allocated < after.device_allocated  # the peak began anew
        assert before.pinned == after.pinned
    assert engine.memory_use().pinned == staged  # the driver has its pages back


def test_kept_activations_of_several_micro_batches_survive_in_graphs() -> None:
    model, recipe = small_model(), small_recipe(precision="bf16", micro_batches=3)
    keep = Plan(weight_slots=1, activations={"default": "keep"}, chunk_bytes=4096)
    assert_same_bits(
        train(model, recipe, keep, steps=6, device="cuda"), train(model, recipe, PLAN, steps=6, device="cuda")
    )
