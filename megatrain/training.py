"""Train: an engine, batches by step, and a record of what ran.

    trained = train(model, recipe, plan, weights, data.batch, steps=60, device="cuda")
    trained.steps[-1].loss; trained.trace

`train` drives `Engine.step` the way a loop of one's own would: it submits a step, then reads the figures of an earlier one, so
that nothing waits for a number. The first steps compile, touch memory and fill caches; the trace begins after them
(`warm_up`), with a flush that changes no bit. `settled` is for loops of one's own as well.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatrain.engine.engine import STEPS_IN_FLIGHT, Engine, MemoryUse, StartTimes, StepResult
from megatrain.files import StepFigures
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.trace import Trace

WARM_UP = 3
"""Steps before the trace begins: the first compiles, the second may be captured, the third is as all others."""

OnStep = Callable[[int, StepFigures, str | None], None]
"""Called with the step's number from 0, its figures, and why it changed nothing (None: it did)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """`steps` has each step's figures, `seconds` being the time since the one before was known (since the start, for the first).
    `trace` covers the steps from `traced_from` on, as many as a trace holds; None if tracing was off. `memory` is what the engine
    took when the third step, or the last of fewer, was known, `start` how long its parts took to be ready for the first."""

    steps: tuple[StepFigures, ...]
    skipped: int
    trace: Trace | None
    traced_from: int
    memory: MemoryUse
    start: StartTimes


def warm_up(steps: int) -> int:
    """How many of `steps` steps go before the trace: none where a trace of three would not be left."""
    return WARM_UP if steps >= 2 * WARM_UP else 0


@contextmanager
def settled() -> Iterator[None]:
    """Inside, Python's garbage collector does not look again at what is alive at the start; newer objects it collects as ever.

    What PyTorch's compiler leaves alive is so much that to go over all of it takes some tenths of a second, in which nothing is
    enqueued on a GPU. For the steps after the first ones (`WARM_UP`), with none in flight. At the end everything is thawed, what
    was frozen before too (`gc.freeze`): Python knows no other way.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def train(
    model: ModelSpec,
    recipe: Recipe,
    plan: Plan,
    weights: Mapping[str, Tensor],
    batch: Callable[[int, int], Mapping[str, Tensor]],
    *,
    steps: int,
    device: Literal["cpu", "cuda"] = "cpu",
    tracing: bool = True,
    on_step: OnStep = lambda step, figures, skipped: None,
    on_start: Callable[[float], None] = lambda loaded: None,
    on_ready: Callable[[], None] = lambda: None,
    at_end: Callable[[Engine], None] = lambda engine: None,
) -> Trained:
    """Train for `steps` steps. `batch(step, rows)` gives the rows of a step (`megatrain.data`).

    `on_start` is called as state is put in place (`Engine`), `on_ready` when it is there, `at_end` with the flushed engine before
    it closes (to save, to evaluate).
    ValueError for fewer steps than one and as `Engine`; LaneError if the run fails.
    """
    if steps < 1:
        raise ValueError(f"steps: must be an integer >= 1, got {steps!r}")
    rows, first_traced = recipe.micro_batches * recipe.micro_batch_size, warm_up(steps)
    figures: list[StepFigures] = []
    skipped = 0
    pending: deque[StepResult] = deque()
    memory: MemoryUse | None = None

    with ExitStack() as after_warm_up, Engine(
        model, recipe, plan, weights, device=device, tracing=tracing, on_start=on_start
    ) as engine:
        on_ready()
        known_at = time.perf_counter()

        def read() -> None:
            nonlocal known_at, skipped, memory
            result = pending.popleft()
            loss, norm, why = result.loss, result.norm, result.skipped
            now = time.perf_counter()
            figures.append(StepFigures(loss, norm, now - known_at))
            known_at = now
            skipped += why is not None
            if len(figures) == min(steps, WARM_UP):
                memory = engine.memory_use()
            on_step(len(figures) - 1, figures[-1], why)

        for step in range(steps):
            if step == first_traced and step:
                while pending:
                    read()
                after_warm_up.enter_context(settled())
                if tracing:
                    engine.restart_trace()
            pending.append(engine.step(batch(step, rows)))
            if len(pending) >= STEPS_IN_FLIGHT:
                read()
        while pending:
            read()
        trace, start = engine.trace() if tracing else None, engine.start_times
        engine.flush()  # whether or not reading the trace did
        at_end(engine)
    assert memory is not None
    return Trained(steps=tuple(figures), skipped=skipped, trace=trace, traced_from=first_traced, memory=memory, start=start)
