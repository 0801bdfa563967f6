"""Random things to simulate: ops with made-up deps and works, and real schedules of small models under random plans."""

import random
from collections.abc import Callable, Mapping
from typing import Any, get_args

import pytest

from megatrain.hardware import H200, Compute, HardwareProfile, Link
from megatrain.model import ModelSpec
from megatrain.plan import Plan, UpdatePolicy
from megatrain.recipe import Recipe
from megatrain.schedule import LANES, Op, PlacedOp, Schedule, lower
from sim.cost import Work

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 103, "hidden_size": 16,
    "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip

_MEMCPY = Link(latency_ns=200, rates=((1 << 10, 3 * 10**9), (1 << 20, 8 * 10**9)))
HOST = HardwareProfile(
    name="host",
    provenance="made up",
    device_memory_bytes=1 << 30,
    host_memory_bytes=1 << 30,
    cores=2,
    h2d=_MEMCPY,
    d2h=_MEMCPY,
    compute=Compute(
        flops_per_s={"bf16": 50 * 10**9, "fp32": 100 * 10**9},
        attention_flops_per_s=50 * 10**9,
        memory_bytes_per_s=9 * 10**9,
        launch_ns=100,
        on_host=True,
    ),
    adam_rates=((1, 6 * 10**9), (2, 9 * 10**9)),
    dram_bytes_per_s=12 * 10**9,
    host_op_ns=500,
)
"""The cpu backend's kind of machine, a small one: copies and compute use its two cores and its DRAM."""


def _schedule(*, config: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None, **plan: Any) -> Schedule:
    model = ModelSpec.from_config({**LLAMA, **(config or {})})
    return lower(model, Recipe(**{"micro_batches": 2, "seq_len": 8, "loss_tile": 5, **(recipe or {})}), Plan(**plan))


def _random_schedule(rng: random.Random) -> Schedule:
    layers = rng.randint(1, 4)
    keys = ["default", "embedding", "head", *map(str, range(layers))]
    update = rng.choice(get_args(UpdatePolicy))
    return _schedule(
        config={"num_hidden_layers": layers, "vocab_size": rng.randint(40, 300), "tie_word_embeddings": rng.random() < 0.5},
        recipe={
            "micro_batches": rng.randint(1, 3),
            "precision": rng.choice(["bf16", "fp32"]),
            "clip_norm": None if update == "during_backward" else rng.choice([None, 1.0]),
        },
        placement={key: rng.choice(["streamed", "resident"]) for key in keys if rng.random() < 0.6},
        activations={key: rng.choice(["recompute", "keep"]) for key in [keys[0], *keys[3:]] if rng.random() < 0.6},
        update=update,
        update_order={key: rng.choice(["first", "last"]) for key in keys if update == "during_backward" and rng.random() < 0.4},
        weight_slots=rng.randint(1, 4),
        gradient_slots=rng.randint(1, 3),
        host_gradient_slots=rng.randint(1, 3),
        chunk_bytes=rng.choice([0, 1024, 4096]),
    )


def _random_run(rng: random.Random, *, ops: int, longest: int) -> tuple[list[PlacedOp], list[Work]]:
    """`ops` ops over four lanes, each with up to four deps on earlier ones; works of every kind, about `longest` ns at most."""
    placed, works = [], []
    for i in range(ops):
        lane = rng.choice(LANES)
        deps = tuple(rng.sample(range(max(0, i - 12), i), k=rng.randint(0, min(i, 4, i - max(0, i - 12)))))
        placed.append(PlacedOp(0, i, Op(kind="load", lane=lane, block=i), deps))
        ns = rng.choice([0, 1, rng.randint(0, longest), rng.randint(0, longest)])
        traffic = rng.choice(["h2d", "d2h", "adam", "compute", None])
        rate = {
            "h2d": H200.h2d.peak_bytes_per_s, "d2h": H200.d2h.peak_bytes_per_s, "adam": 100 * 10**9,
        }.get(str(traffic), 10**9)  # fmt: skip
        amount = ns * rate // 10**9
        threads = {"adam": 8, "compute": rng.choice([1, 8, 16])}.get(str(traffic), 0)
        dram = 0 if traffic is None else rng.randint(0, 200) * ns if traffic == "compute" else amount
        works.append(Work(rng.choice([0, rng.randint(0, longest // 4)]), amount, rate, traffic, threads, dram))
    return placed, works


@pytest.fixture
def schedule() -> Callable[..., Schedule]:
    """The schedule of a small model; `config` and `recipe` change theirs, everything else is a field of the plan."""
    return _schedule


@pytest.fixture
def random_schedule() -> Callable[[random.Random], Schedule]:
    return _random_schedule


@pytest.fixture
def random_run() -> Callable[..., tuple[list[PlacedOp], list[Work]]]:
    return _random_run


@pytest.fixture
def host() -> HardwareProfile:
    return HOST
