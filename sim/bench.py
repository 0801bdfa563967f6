"""Benchmark: lower, check and simulate three steps of an 80-layer model with 8 chunks a block. `python -m sim.bench`.

A planner asks for hundreds of such predictions, and a person waits for it. The target is 3 s on one core (`taskset -c 0` pins
one). Exit code 1 when the total is above it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from megatrain.derive import step_time
from megatrain.hardware import H200
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import check, lower
from sim.simulate import simulate

TARGET_S = 3.0
STEPS = 3
CHUNKS = 8

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> int:
    marks = [time.perf_counter()]
    model = ModelSpec.from_config(LLAMA_70B)
    recipe = Recipe(micro_batches=4, micro_batch_size=4, seq_len=1024)
    # A bf16 weight is 2 bytes; rounding up keeps the last chunk from being a ninth.
    chunk_bytes = -(-2 * model.layers[0].span // CHUNKS // 256) * 256
    plan = Plan(chunk_bytes=chunk_bytes, adam_threads=16)
    rows = []
    for name in ("lower", "check", "simulate"):
        if name == "lower":
            schedule = lower(model, recipe, plan)
        elif name == "check":
            check(schedule)
        else:
            trace = simulate(schedule, H200, steps=STEPS)
        marks.append(time.perf_counter())
        rows.append((name, marks[-1] - marks[-2]))
    total = marks[-1] - marks[0]
    chunks = max(op.chunk for op in schedule.body.ops if op.chunk is not None and op.block == 1) + 1
    ops = f"{len(schedule.body.ops)} ops a step, {len(trace.events)} simulated"
    print(f"{len(model.layers)} layers, {chunks} chunks a layer, {ops}")
    for name, seconds in [*rows, ("total", total)]:
        print(f"{name:>10} {seconds:7.3f} s")
    mean, _ = step_time(schedule, trace)
    print(f"predicted step {mean / 1e9:.3f} s; target {TARGET_S} s: {'met' if total < TARGET_S else 'MISSED'}")
    return 0 if total < TARGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
