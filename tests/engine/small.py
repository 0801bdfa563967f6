"""A small model with random weights and batches for it, and ways to disturb the engine without changing what it computes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from megatrain.engine.backend import Backend, Lanes, Ran
from megatrain.engine.clock import Clock
from megatrain.engine.engine import Engine
from megatrain.engine.memory import Memory
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe
from megatrain.schedule import Lane, Op, Schedule
from megatrain.trace import Source

# No size is a multiple of a chunk (128 elements), a loss tile or a norm tile; more layers than any depth + 2.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 211,
    "hidden_size": 36,
    "intermediate_size": 75,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


def small_model(*, tied: bool = False, **changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**CONFIG, "tie_word_embeddings": tied, **changes}, name="small")


def small_recipe(**changes: Any) -> Recipe:
    """Two micro-batches of one 13-token row in FP32, clipping at a limit that gradients exceed."""
    fields: dict[str, Any] = {
        "micro_batches": 2, "micro_batch_size": 1, "seq_len": 13, "precision": "fp32", "loss_tile": 5, "clip_norm": 0.5,
        "optimizer": AdamW(lr=1e-4, eps=1e-8, beta2=0.999, weight_decay=0.1),
    } | changes  # fmt: skip
    fields.setdefault("gradient_dtype", fields["precision"])
    return Recipe(**fields)


def random_weights(model: ModelSpec, std: float = 0.1) -> dict[str, Tensor]:
    """Random values everywhere, norms around 1."""
    generator = torch.Generator().manual_seed(0)
    return {
        p.name: torch.randn(p.shape, generator=generator) * std + float("norm" in p.name)
        for block in model.blocks
        for p in block.params
    }


def random_batches(model: ModelSpec, recipe: Recipe, steps: int, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (recipe.micro_batches * recipe.micro_batch_size, recipe.seq_len)
    batches = []
    for _ in range(steps):
        batch = {"input_ids": torch.randint(0, model.vocab_size, shape, generator=generator)}
        if recipe.attention_mask == "segments":
            half = recipe.seq_len // 2
            batch["segments"] = torch.cat([torch.full((shape[0], half), 1), torch.full((shape[0], shape[1] - half), 2)], 1)
            batch["segments"][0, -2:] = 0
        batches.append(batch)
    return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All the state a run leaves, and what it reported."""

    weights: dict[str, Tensor]
    streamed: dict[str, Tensor]
    m: dict[str, Tensor]
    v: dict[str, Tensor]
    losses: list[float]
    norms: list[float]


def train(
    model: ModelSpec, recipe: Recipe, plan: Plan, steps: int = 5, wrap: Callable[[Any], Backend] = lambda b: b,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Outcome:  # fmt: skip
    """`steps` steps; asserts that what ran is what was scheduled."""
    with Engine(model, recipe, plan, random_weights(model), device=device, wrap=wrap) as engine:
        results = [engine.step(batch) for batch in random_batches(model, recipe, steps)]
        trace = engine.trace()
        expected = engine.schedule.digests()
        assert trace.digests == tuple(expected[part] for part in trace.parts)
        moments = engine.moments()
        return Outcome(
            weights=engine.state_dict(),
            streamed=engine.streamed_weights(),
            m={name: moment.m for name, moment in moments.items()},
            v={name: moment.v for name, moment in moments.items()},
            losses=[r.loss for r in results],
            norms=[r.norm for r in results],
        )


def assert_same_bits(a: Outcome, b: Outcome) -> None:
    for what in ("weights", "streamed", "m", "v"):
        ours, theirs = getattr(a, what), getattr(b, what)
        different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        assert not different, f"{what} differ in {different}"
    assert a.losses == b.losses
    assert a.norms == b.norms


# ---- backends that disturb ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Disturbed:
    """A backend around another. `before` and `after` run on the op's lane, inside its time."""

    inner: Any
    before: Callable[[Op], None] = lambda op: None
    after: Callable[[Op], None] = lambda op: None

    @property
    def source(self) -> Source:
        return self.inner.source  # type: ignore[no-any-return]

    @property
    def clock(self) -> Clock:
        return self.inner.clock  # type: ignore[no-any-return]

    @property
    def lanes(self) -> Lanes:
        return self.inner.lanes  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def joins(self, op: Op) -> bool:
        return False  # each is to be disturbed

    def run(self, op: Op, step: Any) -> Ran:
        self.before(op)
        ran: Ran = self.inner.run(op, step)
        self.after(op)
        return ran


@dataclass(kw_only=True)
class Joining(Disturbed):
    """One that runs what can be run together as a series, as a backend does whose streams wait for counts."""

    series: list[list[Op]] = field(default_factory=list)

    def joins(self, op: Op) -> bool:
        return self.inner.kernels.joins(op)  # type: ignore[no-any-return]

    def run_series(self, ops: Sequence[Op], step: Any, count: int) -> Sequence[tuple[Any, Ran, Any]]:
        self.series.append(list(ops))
        return self.inner.run_series(ops, step, count)  # type: ignore[no-any-return]


def delayed(seed: int, lane: Lane | None = None, longest_ns: int = 2_000_000) -> Callable[[Any], Backend]:
    """Random waits before the ops of one lane, or of all."""
    rng = random.Random(seed)

    def wrap(inner: Any) -> Backend:
        def before(op: Op) -> None:
            if lane in (None, op.lane) and rng.random() < 0.3:
                inner.clock.sleep(rng.randrange(longest_ns), op.name)

        return Disturbed(inner=inner, before=before)

    return wrap


def poisoned(inner: Any) -> Backend:
    """Fill every slot with NaN as soon as the last op that touches its content has ended: weights, gradients, hidden states,
    inputs, and state on its way through the device."""
    releases = releases_of(inner.schedule)
    streams = getattr(inner.lanes, "streams", {})  # where lanes are streams: an op that returns has only been enqueued
    arrived: dict[Release, dict[Lane, Any]] = {}
    lock = threading.Lock()

    def after(op: Op) -> None:
        stream = streams.get(op.lane)
        for release in releases.get(id(op), ()):
            with lock:
                there = arrived.setdefault(release, {})
                there[op.lane] = None if stream is None or len(release.lanes) == 1 else stream.record_event()
                if len(there) < len(release.lanes):
                    continue  # another lane has yet to touch it
                del arrived[release]
            for event in there.values():
                if event is not None:
                    stream.wait_event(event)
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                memory: Memory = inner.memory
                memory.named(release.storage)[release.start : release.stop].fill_(0xFF)

    return Disturbed(inner=inner, after=after)


PASSING = ("slot.", "gslot.", "islot.", "state.", "acc", "hidden[", "dhidden", "input")
"""Device storages that pass from content to content within a step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Release:
    """Bytes whose content nobody touches any more in a step, once the last op that does has ended on each of `lanes`."""

    storage: str
    start: int
    stop: int
    lanes: frozenset[Lane]


def releases_of(schedule: Schedule) -> dict[int, list[Release]]:
    """The id of an op -> what is released by it and by the last ones on other lanes.

    One pass through each part in its order, range by range: the next content of a chunk may arrive while that of another
    is still read. A content may be read on two lanes at once (a layer's input by its forward and by its stash), so which of the
    last ops ends last is not known before.
    """
    parts = (schedule.prologue, schedule.body, schedule.epilogue)
    passing = {i for i, s in enumerate(schedule.storages) if s.space == "device" and s.name.startswith(PASSING)}
    cuts: dict[int, set[int]] = {i: set() for i in passing}
    for op in (op for part in parts for op in part.ops):
        for a in (*op.reads, *op.writes):
            cuts.get(a.storage, set()).update((a.start, a.stop))
    ranges = {i: list(pairwise(sorted(points))) for i, points in cuts.items()}
    out: dict[int, list[Release]] = {}

    def release(storage: int, start: int, stop: int, last: dict[Lane, Op]) -> None:
        found = Release(storage=schedule.storages[storage].name, start=start, stop=stop, lanes=frozenset(last))
        for op in last.values():
            out.setdefault(id(op), []).append(found)

    for part in parts:
        current: dict[tuple[int, int, int], tuple[tuple[object, ...], dict[Lane, Op]]] = {}
        for op in part.ops:
            for a in (a for a in (*op.reads, *op.writes) if a.storage in passing):
                chunk = a.tag.micro if schedule.storages[a.storage].name.startswith("state.") else None
                content = (a.tag.what, a.tag.block, chunk)
                for start, stop in ranges[a.storage]:
                    if stop <= a.start or start >= a.stop:
                        continue
                    held, last = current.get((a.storage, start, stop), (None, {}))
                    if held != content:
                        # An op that turns one content into another leaves nothing to fill.
                        if last and all(op is not other for other in last.values()):
                            release(a.storage, start, stop, last)
                        last = {}
                    current[a.storage, start, stop] = (content, last | {op.lane: op})
        for key, (_, last) in current.items():
            release(*key, last)
    return out
