"""A small model with random weights and batches for it, and ways to disturb the engine without changing what it computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
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

    def run(self, op: Op, step: Any) -> Ran:
        self.before(op)
        ran: Ran = self.inner.run(op, step)
        self.after(op)
        return ran


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
    """Fill every slot with NaN as soon as its last reader has ended: weights, gradients, hidden states, inputs."""
    releases = last_readers(inner.schedule)

    def after(op: Op) -> None:
        stream = getattr(inner.lanes, "streams", {}).get(op.lane)  # the lane's own, where lanes are streams
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for storage, start, stop in releases.get(op.name, ()):
                memory: Memory = inner.memory
                memory.named(storage)[start:stop].fill_(0xFF)

    return Disturbed(inner=inner, after=after)


def last_readers(schedule: Schedule) -> dict[str, list[tuple[str, int, int]]]:
    """Op name -> device ranges whose content nobody touches after it, in a step.

    One pass in single-lane order over the storages that pass from content to content within a step. Their readers all sit on one
    lane, so the last in this order is the last in any.
    """
    passing = ("slot.", "gslot.", "acc.", "hidden[", "dhidden", "input")
    current: dict[tuple[int, int], tuple[tuple[str, int | None], str, int]] = {}
    out: dict[str, list[tuple[str, int, int]]] = {}

    def release(key: tuple[int, int], name: str, stop: int) -> None:
        out.setdefault(name, []).append((schedule.storages[key[0]].name, key[1], stop))

    for op in schedule.body.ops:
        for a in (*op.reads, *op.writes):
            storage = schedule.storages[a.storage]
            if storage.space != "device" or not storage.name.startswith(passing):
                continue
            # Micro-batches lie side by side in the last three; the others hold one block from byte 0.
            vector = storage.name.startswith(("hidden[", "dhidden", "input"))
            key = (a.storage, a.start if vector else 0)
            content = (a.tag.what, a.tag.block)
            before = current.get(key)
            if before is not None and before[0] != content and before[1] != op.name:
                release(key, before[1], before[2])
            stop = a.stop if before is None or before[0] != content else max(a.stop, before[2])
            current[key] = (content, op.name, stop)
    for key, (_, name, stop) in current.items():
        release(key, name, stop)
    return out
