"""Every check that needs a GPU, in order of priority: `python -m papers.h200.checks --out DIR [names ...]`.

A preflight of under a minute comes first (imports, a copy, a step on each backend) and stops at the first failure. Each check
then writes one JSON line to DIR/checks.jsonl as soon as it is done, so that a run that is cut short keeps what it has. A failing
check is reported and the next one runs. `--device cpu` rehearses the same code on a machine without a GPU, at small sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from analysis.tables import format_table
from megatrain.derive import Facts, by_cause, derive, step_time
from megatrain.engine.engine import Engine
from megatrain.files import Job, Record, load_hardware, save_record
from megatrain.hardware import H200
from megatrain.model import ModelSpec
from megatrain.optim.constants import step_constants
from megatrain.optim.kernel import Run, adamw_update, bind_threads, prepare_adamw
from megatrain.optim.master import split as split_master
from megatrain.optim.norm import n_tiles, norm_partials
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe
from megatrain.schedule import Schedule, lower
from megatrain.trace import Trace
from sim.simulate import simulate
from tests.engine.small import (
    assert_same_bits,
    delayed,
    poisoned,
    random_batches,
    random_weights,
    small_model,
    small_recipe,
    train,
)

Device = Literal["cpu", "cuda"]
CALIBRATED = Path(__file__).with_name("results") / "calibrated.json"
QWEN25: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2, "vocab_size": 151936},
    "14B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064},
}  # fmt: skip


def qwen(name: str, device: Device, **changes: Any) -> ModelSpec:
    """A Qwen2.5 shape with an untied head, by its size ("14B"), of another depth if one follows ("14B-60"); on the cpu backend,
    which rehearses, a tiny one."""
    size, _, layers = name.partition("-")
    fields = {"model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 32768, **QWEN25[size], **changes}
    fields |= {"num_hidden_layers": int(layers)} if layers else {}
    if device == "cpu":
        heads = fields["num_attention_heads"]
        fields |= {"hidden_size": 4 * heads, "intermediate_size": 96, "vocab_size": 211, "num_hidden_layers": 4}
    return ModelSpec.from_config(fields, name=f"Qwen2.5-{name}")


def rows_of_1024(rows: int, device: Device, clip_norm: float | None) -> Recipe:
    """One micro-batch of `rows` sequences of 1,024 tokens, compiled."""
    if device == "cpu":
        return Recipe(micro_batch_size=2, seq_len=16, clip_norm=clip_norm)
    return Recipe(micro_batch_size=rows, seq_len=1024, clip_norm=clip_norm, compiled=True, loss_tile=4096)


def streamed_layers(policy: str, device: Device, **fields: Any) -> Plan:
    """Every decoder layer streamed, embedding and head resident."""
    placement = {"default": "streamed", "embedding": "resident", "head": "resident"}
    threads = 2 if device == "cpu" else 14
    return Plan(placement=placement, update=policy, adam_threads=threads, **fields)  # type: ignore[arg-type]


POLICIES: tuple[tuple[str, float | None], ...] = (("during_backward", None), ("next_forward", 1.0))


class RandomWeights(Mapping[str, Tensor]):
    """Weights made when asked for, on the device, piece by piece: 0.02 x normal, norms 1. A matrix holds until the next one is
    asked for: fresh memory for each would take longer than to make it."""

    def __init__(self, model: ModelSpec, device: Device) -> None:
        self._shapes = {p.name: p.shape for block in model.blocks for p in block.params}
        self._device = device
        self._made = torch.empty(max(map(math.prod, self._shapes.values())), dtype=torch.bfloat16)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if "norm" in name:
            return torch.ones(shape)
        generator = torch.Generator(self._device).manual_seed(hash_of(name))
        made, piece = self._made[: math.prod(shape)], 1 << 24
        for part in made.split(piece):  # so that they take little of the device's memory
            part.copy_((torch.randn(part.numel(), generator=generator, device=self._device) * 0.02).bfloat16())
        return made.view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[-6:], "little")


def batches(model: ModelSpec, recipe: Recipe, count: int) -> list[dict[str, Tensor]]:
    """Distinct random tokens."""
    generator = torch.Generator().manual_seed(7)
    shape = (recipe.micro_batches * recipe.micro_batch_size, recipe.seq_len)
    return [{"input_ids": torch.randint(0, model.vocab_size, shape, generator=generator)} for _ in range(count)]


# ---- checks ------------------------------------------------------------------------------------------------------------


def preflight(device: Device, folder: Path) -> dict[str, Any]:
    import simpy
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__, "simpy": simpy.__version__}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        host = torch.arange(1 << 20, dtype=torch.int32)
        assert torch.equal(host.cuda().cpu(), host)
    model, recipe, plan = small_model(), small_recipe(precision="bf16"), Plan(chunk_bytes=4096)
    for where in dict.fromkeys(("cpu", device)):
        found[f"norm on {where}"] = train(model, recipe, plan, steps=1, device=where).norms[0]
    return found


def kernels(device: Device, folder: Path) -> dict[str, Any]:
    """AdamW and pack on the device have the bits of the CPU kernels."""
    from megatrain.engine import triton_kernels

    generator = torch.Generator().manual_seed(3)
    n, checked, worst = 3_000_017, 0, []
    for spread in (0.0, 4.0):  # beyond 1e18 squares overflow, to a NaN whose payload nobody promises
        def draw(sign: bool = True, n: int = n, spread: float = spread) -> Tensor:
            x = torch.randn(n, generator=generator) * 10 ** (spread * torch.randn(n, generator=generator).clamp(-3, 3))
            return x if sign else x.abs()

        for link in (torch.bfloat16, torch.float32):
            for split in (True, False):
                for decayed in (True, False):
                    m, v, g = draw(), draw(False), draw().to(link)
                    master = split_master(draw()) if split else (draw(),)
                    constants = torch.from_numpy(step_constants(AdamW(), 3, factor=0.37))
                    old = [t.clone() for t in (*master, m, v, g)]
                    names = ["hi", "lo", "m", "v"] if split else ["w", "m", "v"]
                    there = [t.cuda() for t in (*master, m, v, g, constants)]
                    adamw_update(master, m, v, g, constants, decayed=decayed, threads=16)
                    k = len(master)
                    triton_kernels.adamw(tuple(there[:k]), *there[k:], decayed=decayed)
                    case = f"{link} split={split} decayed={decayed} spread={spread}"
                    for here, other, name in zip((*master, m, v), there, names[-len(master) - 2 :], strict=False):
                        as_bits = torch.int16 if here.element_size() == 2 else torch.int32
                        where = (here.view(as_bits) != other.cpu().view(as_bits)).nonzero().flatten()[:4]
                        if len(where):
                            shown = [[float(t[i]) for t in (here, other, *old)] for i in where]
                            worst.append(f"{name} {case}: here, there, operands: {shown}")
                        checked += here.numel()
    for size in (1, 7, 4097, 65535, 65536, 65537, 1_000_003):
        for link in (torch.bfloat16, torch.float32):
            sums = torch.randn(size, generator=generator)
            grad, partials = sums.to(link), torch.empty(n_tiles(size))
            norm_partials(grad, partials)
            on_device, found = torch.empty(size, dtype=link, device="cuda"), torch.empty(n_tiles(size), device="cuda")
            triton_kernels.pack(triton_kernels.tiles_of([(0, size)]).cuda(), sums.cuda(), on_device, found)
            assert torch.equal(on_device.cpu(), grad)
            assert torch.equal(found.cpu(), partials), f"partials of {size} {link}"
    assert not worst, worst
    return {"values compared": checked, "GB/s": device_rates()}


def device_rates(n: int = 1 << 28) -> dict[str, float]:
    """What the two kernels move, in GB/s: AdamW 26 B an element, packing to BF16 6 B."""
    from megatrain.engine import triton_kernels

    hi, lo = torch.zeros(n, dtype=torch.bfloat16, device="cuda"), torch.zeros(n, dtype=torch.int16, device="cuda")
    m, v, sums = (torch.randn(n, device="cuda").abs() for _ in range(3))
    grad, constants = sums.bfloat16(), torch.from_numpy(step_constants(AdamW(), 1)).cuda()
    tiles, partials = triton_kernels.tiles_of([(0, n)]).cuda(), torch.empty(n_tiles(n), device="cuda")
    launches: dict[str, tuple[int, Callable[[], None]]] = {
        "adamw": (26, lambda: triton_kernels.adamw((hi, lo), m, v, grad, constants, decayed=True)),
        "pack": (6, lambda: triton_kernels.pack(tiles, sums, grad, partials)),
    }
    rates = {}
    for name, (nbytes, launch) in launches.items():
        times = []
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        rates[name] = round(nbytes * n / sorted(times)[2] / 1e9, 1)
    return rates


def plain_fp32(device: Device, folder: Path) -> dict[str, Any]:
    """FP32, eager: the engine against an ordinary PyTorch loop, 5 steps."""
    from tests.engine.test_plain import difference, norm_of, plain_loop

    model, recipe = small_model(tied=True), small_recipe()
    worst_loss = worst_gradient = 0.0
    expected = plain_loop(model, recipe, 5, device)
    with Engine(model, recipe, Plan(chunk_bytes=2048), random_weights(model), device=device) as engine:
        for batch, (loss, gradients, _) in zip(random_batches(model, recipe, 5), expected, strict=True):
            result = engine.step(batch)
            worst_loss = max(worst_loss, abs(result.loss - loss) / loss)
            worst_gradient = max(worst_gradient, norm_of(difference(engine.gradients(), gradients)) / norm_of(gradients))
    assert worst_loss <= 1e-5 and worst_gradient <= 1e-4, (worst_loss, worst_gradient)
    return {"loss, relative": worst_loss, "gradient, of its norm": worst_gradient}


PLANS: dict[str, Plan] = {
    "resident, kept": Plan(placement={"default": "resident"}, activations={"default": "keep"}, update="after", chunk_bytes=0),
    "streamed, depth 1": Plan(weight_slots=1, gradient_slots=1, chunk_bytes=0),
    "streamed, depth 2, after": Plan(weight_slots=2, chunk_bytes=1 << 17, update="after"),
    "streamed, depth 3, kept": Plan(weight_slots=3, chunk_bytes=1 << 16, activations={"default": "keep"}),
    "streamed, depth 4": Plan(weight_slots=4, vocab_slots=2, gradient_slots=3, chunk_bytes=100_000),
    "mixed": Plan(
        placement={"default": "streamed", "embedding": "resident", "0-2": "resident"},
        activations={"default": "recompute", "1-4": "keep"},
    ),
    "mixed, after": Plan(
        placement={"default": "resident", "head": "streamed", "3-5": "streamed"}, update="after", chunk_bytes=1 << 18
    ),
    "resident, recomputed": Plan(placement={"default": "resident"}),
    "kept, depth 1": Plan(activations={"default": "keep"}, weight_slots=1, chunk_bytes=1 << 19),
    "streamed_adam": Plan(placement={"default": "streamed_adam"}, chunk_bytes=1 << 18),
    "streamed_adam, one slot of each": Plan(
        placement={"default": "streamed_adam"}, weight_slots=1, gradient_slots=1, state_slots=1, chunk_bytes=0
    ),
    "streamed_adam, after, depth 3, small chunks": Plan(
        placement={"default": "streamed_adam"}, update="after", weight_slots=3, state_slots=3, chunk_bytes=1 << 15
    ),
    "streamed_adam, offload": Plan(
        placement={"default": "streamed_adam"}, activations={"default": "offload"}, chunk_bytes=1 << 17
    ),
    "device_weights, streamed_adam, resident mixed": Plan(
        placement={"default": "device_weights", "head": "streamed", "0-1": "streamed_adam", "3": "resident", "5": "streamed"},
        state_slots=1, chunk_bytes=1 << 17,
    ),
    "embedding and head streamed_adam": Plan(
        placement={"default": "streamed", "embedding": "streamed_adam", "head": "streamed_adam"}, vocab_slots=1,
        chunk_bytes=1 << 16,
    ),
    "CPU and streamed_adam in turn": Plan(
        placement={"default": "streamed", "0": "streamed_adam", "2": "streamed_adam", "4": "streamed_adam", "6": "streamed_adam"},
        weight_slots=3, chunk_bytes=1 << 16,
    ),
    "offload": Plan(activations={"default": "offload"}, chunk_bytes=1 << 18),
    "offload, keep, recompute mixed": Plan(
        activations={"default": "offload", "1": "keep", "3": "recompute", "4": "keep"}, input_slots=3, weight_slots=1
    ),
    "resident, offload, after": Plan(placement={"default": "resident"}, activations={"default": "offload"}, update="after"),
}  # fmt: skip
FREE_PLANS: dict[str, Plan] = {
    "during_backward, depth 2": Plan(update="during_backward", weight_slots=2, chunk_bytes=1 << 16),
    "during_backward, mixed": Plan(
        update="during_backward", placement={"default": "streamed", "2-4": "resident", "head": "resident"}
    ),
    "during_backward, streamed_adam": Plan(
        update="during_backward", placement={"default": "streamed_adam"}, vocab_slots=1, chunk_bytes=1 << 16
    ),
    "during_backward, streamed_adam, one slot of each, offload": Plan(
        update="during_backward", placement={"default": "streamed_adam"}, activations={"default": "offload"}, weight_slots=1,
        gradient_slots=1, state_slots=1, chunk_bytes=0,
    ),
    "during_backward, every placement and every activation": Plan(
        update="during_backward", activations={"default": "offload", "1": "keep", "4": "recompute"}, state_slots=3,
        placement={"default": "streamed_adam", "0": "device_weights", "2": "resident", "4-5": "streamed", "head": "resident"},
        input_slots=3, chunk_bytes=1 << 17,
    ),
}  # fmt: skip


def bitwise(device: Device, folder: Path) -> dict[str, Any]:
    """BF16, deterministic: equal bits after 5 steps over plans, with slots poisoned and lanes delayed; eager and compiled."""
    done: dict[str, Any] = {}
    sizes = {"hidden_size": 192, "intermediate_size": 520, "vocab_size": 1031}
    for compiled, tied in ((device == "cuda", False), (False, True)):
        model = small_model(tied=tied, **sizes)
        changes = {"precision": "bf16", "seq_len": 40, "compiled": compiled, "loss_tile": 16}
        clipped, free = small_recipe(**changes), small_recipe(**changes, clip_norm=None)
        for recipe, plans in ((clipped, PLANS), (free, FREE_PLANS | {"streamed": PLANS["streamed, depth 4"]})):
            reference = train(model, recipe, PLANS["resident, kept"], device=device)
            for name, plan in plans.items():
                assert_same_bits(train(model, recipe, plan, device=device), reference)
                done[f"{'compiled' if compiled else 'eager'} {'tied' if tied else 'untied'} {name}"] = True
        reference = train(model, clipped, PLANS["resident, kept"], device=device)
        for plan in (PLANS["streamed, depth 3, kept"], PLANS["streamed, depth 1"], PLANS["streamed_adam, offload"]):
            assert_same_bits(train(model, clipped, plan, wrap=poisoned, device=device), reference)
            assert_same_bits(train(model, clipped, plan, wrap=delayed(1), device=device), reference)
    return {"plans equal, poison and delays included": sorted(done)}


SMALL_PLAN: dict[str, int] = {"weight_slots": 2, "host_gradient_slots": 12, "chunk_bytes": 4 << 20}
LARGE_PLAN: dict[str, int] = {"weight_slots": 3, "host_gradient_slots": 6, "chunk_bytes": 32 << 20}


def predictions(device: Device, folder: Path) -> dict[str, Any]:
    """What the simulator says of the steps that `overlap` and `seven_b` measure, with the H200 profile. Needs no GPU."""
    out = {}
    for name, rows, fields in (("0.5B", 8, SMALL_PLAN), ("7B", 16, LARGE_PLAN)):
        for policy, clip in POLICIES:
            recipe, plan = rows_of_1024(rows, "cuda", clip), streamed_layers(policy, "cuda", **fields)
            schedule = lower(qwen(name, "cuda"), recipe, plan)
            trace = simulate(schedule, H200)
            mean_ns = step_time(schedule, trace).mean_ns
            if name == "7B":
                save_record(folder / f"7b-{policy}.predicted.json.gz", record(schedule, trace, "h200", H200.provenance))
            out[f"{name} {policy}"] = {"step_s": round(mean_ns / 1e9, 3), "ops a step": len(schedule.body.ops)}
            if name == "7B":  # whose blocks were timed
                calibrated_ns = step_time(schedule, simulate(schedule, load_hardware(CALIBRATED))).mean_ns
                out[f"{name} {policy}"]["step_s, calibrated"] = round(calibrated_ns / 1e9, 3)
    return out


def overlap(device: Device, folder: Path) -> dict[str, Any]:
    """Qwen2.5-0.5B's shape, all layers streamed, depth 2, 8,192 tokens, 10 steps, twice: what lies under what, and who waits."""
    model, out = qwen("0.5B", device), {}
    for policy, clip in POLICIES:
        plan = streamed_layers(policy, device, **SMALL_PLAN)
        for repeat in range(2):
            row = measured(model, rows_of_1024(8, device, clip), plan, device, steps=10)
            if policy == "during_backward":
                lines = {"h2d under compute >= 0.8": row["h2d under compute"] >= 0.8}
            else:
                lines = {
                    "update late >= 0.9 of stalls": row["update late share of stalls"] >= 0.9,
                    "cpu busy after clip >= 0.9": row["cpu busy from clip to last update"] >= 0.9,
                }
            out[f"{policy} {repeat}"] = row | {"missed": missed(row, lines)}
    return out


def measured(
    model: ModelSpec, recipe: Recipe, plan: Plan, device: Device, *, steps: int, warm: int = 4, keep: Path | None = None
) -> dict[str, Any]:
    """Run and trace; every figure the promises speak of. `keep`: where record and stall table go, without a suffix."""
    started = time.perf_counter()
    with Engine(model, recipe, plan, RandomWeights(model, device), device=device) as engine:
        ready = time.perf_counter() - started
        data = batches(model, recipe, warm + steps)
        losses = [engine.step(batch).loss for batch in data[:warm]]
        first = time.perf_counter() - started
        engine.restart_trace()
        before = segments(device)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        results = [engine.step(batch) for batch in data[warm:]]
        losses += [r.loss for r in results]
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        after = segments(device)
        trace = engine.trace()
        expected = engine.schedule.digests()
        facts = derive(engine.schedule, trace)
        if keep is not None:
            save_record(Path(f"{keep}.measured.json.gz"), record(engine.schedule, trace, "h200", device))
            save_stalls(keep, trace, facts)
        steady = sorted(facts.step_times_ns[2:])
        compute = facts.lanes["compute"]
        blame = by_cause(facts.stalls["compute"])
        return {
            "ready_s": round(ready, 1), "warm_s": round(first, 1),
            "step_s": steady[len(steady) // 2] / 1e9, "steps_s": [round(t / 1e9, 4) for t in facts.step_times_ns],
            "losses": [round(x, 4) for x in losses],
            "digests equal": list(trace.digests) == [expected[p] for p in trace.parts],
            "h2d under compute": round(facts.overlap["h2d"].fraction, 4),
            "d2h under compute": round(facts.overlap["d2h"].fraction, 4),
            "utilisation": {lane: round(use.utilisation, 4) for lane, use in facts.lanes.items()},
            "GB": {lane: round(use.nbytes / 1e9, 3) for lane, use in facts.lanes.items()},
            "GB/s while busy": {lane: round(use.nbytes / max(1, use.busy_ns), 2) for lane, use in facts.lanes.items()},
            "compute stalls, s": {cause: round(ns / 1e9, 4) for cause, ns in blame.items() if ns},
            "update late share of stalls": round(blame["update late"] / max(1, compute.stalled_ns), 4),
            "cpu busy from clip to last update": round(cpu_busy_after_clip(facts), 4),
            "segments before, after": [before, after],
            "device GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
            "notes": list(trace.notes),
        }  # fmt: skip


def missed(row: dict[str, Any], lines: dict[str, bool]) -> list[str]:
    """The promised lines that a measured row does not keep; of every row, that it ran the schedule and allocated nothing."""
    before, after = row["segments before, after"]
    lines = lines | {"digests equal": row["digests equal"], "segments flat": before == after}
    return [line for line, kept in lines.items() if not kept]


def record(schedule: Schedule, trace: Trace, hardware: str, provenance: str) -> Record:
    """A run that `megatrain compare` reads."""
    model = schedule.model
    job = Job(model=model.name, recipe=schedule.recipe, plan=schedule.plan)
    return Record(
        job=job, model_name=model.name, config_json=model.config_json, hardware=hardware, provenance=provenance, trace=trace,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def save_stalls(path: Path, trace: Trace, facts: Facts) -> None:
    """PATH.stalls.txt: who waited for whom, of every lane."""
    lanes = [
        {"lane": lane, "busy_ns": use.busy_ns, "stalled_ns": use.stalled_ns, "tail_ns": use.tail_ns, "bytes": use.nbytes,
         "utilisation": use.utilisation}
        for lane, use in facts.lanes.items()
    ]  # fmt: skip
    causes = [
        {"lane": lane, "cause": cause, "ns": ns}
        for lane, gaps in facts.stalls.items()
        for cause, ns in by_cause(gaps).items()
        if ns
    ]
    steps = [{"step": i, "ns": ns} for i, ns in enumerate(facts.step_times_ns, start=1)]
    tables = [format_table(pd.DataFrame(rows), title=title) for rows, title in
              ((steps, "Steps"), (lanes, "Lanes"), (causes, "Stalls by lane and cause"))]  # fmt: skip
    Path(f"{path}.stalls.txt").write_text("\n\n".join([*tables, *trace.notes]) + "\n")


def segments(device: Device) -> int:
    return int(torch.cuda.memory_stats()["segment.all.current"]) if device == "cuda" else 0


def cpu_busy_after_clip(facts: Facts) -> float:
    """Of the time from each clip to the last update before the next one: the share in which the cpu lane runs an op."""
    run, total, busy = facts.run, 0, 0
    line = [(run.placed[i].op, run.events[i]) for i in run.lanes["cpu"]]
    clips = [n for n, (op, _) in enumerate(line) if op.kind == "clip"]
    for n, following in zip(clips, [*clips[1:], len(line)], strict=True):
        updates = [e for op, e in line[n + 1 : following] if op.kind == "update"]
        if updates:
            begin, end = line[n][1].end_ns, max(e.end_ns for e in updates)
            total += end - begin
            busy += sum(e.end_ns - e.start_ns for _, e in line[n + 1 : following] if e.end_ns <= end)
    return busy / total if total else 0.0


def seven_b(device: Device, folder: Path) -> dict[str, Any]:
    """Qwen2.5-7B's shape, decoder layers streamed, embedding and head resident, recompute, 16,384 tokens a step."""
    model, out = qwen("7B", device), {}
    for policy, clip in POLICIES:
        plan = streamed_layers(policy, device, **LARGE_PLAN)
        rows = rows_of_1024(16, device, clip)
        row = measured(model, rows, plan, device, steps=6, warm=3, keep=folder / f"7b-{policy}")
        most_s = {"during_backward": 2.3, "next_forward": 3.1}[policy]
        out[policy] = row | {"missed": missed(row, {f"step <= {most_s} s": row["step_s"] <= most_s})}
    return out


def adam_rates(device: Device, folder: Path) -> dict[str, Any]:
    """The CPU kernel in GB/s at 26 B a parameter: by threads; at 14 threads, free and bound to cores, by size of an update."""
    n = 1 << (22 if device == "cpu" else 27)
    hi, lo, g = torch.randn(n).bfloat16(), torch.zeros(n, dtype=torch.int16), torch.randn(n).bfloat16()
    m, v, constants = torch.zeros(n), torch.zeros(n), torch.from_numpy(step_constants(AdamW(), 1))

    def rate(threads: int, size: int) -> float:
        parts = [slice(at, at + size) for at in range(0, n, size)]
        updates = [
            prepare_adamw((hi[c], lo[c]), m[c], v[c], g[c], constants, [Run(0, size, True)], threads=threads) for c in parts
        ]
        times = []
        for _ in range(4):
            started = time.perf_counter()
            for update in updates:
                update()
            times.append(time.perf_counter() - started)
        return round(26 * n / sorted(times)[1] / 1e9, 1)

    usual, cores = 14, sorted(os.sched_getaffinity(0))
    out: dict[str, Any] = {"by threads": {str(threads): rate(threads, n) for threads in (1, 4, 8, 12, 14, 16)}}
    for how, bound in (("free", []), ("bound", cores[-usual + 1 :])):
        bind_threads(bound)
        out[f"14 threads, {how}, by Mi parameters an update"] = {str(s >> 20): rate(usual, s) for s in (1 << 20, 1 << 21, n)}
    bind_threads([])
    return out


def host_costs(device: Device, folder: Path) -> dict[str, Any]:
    """Microseconds: of host time to enqueue what lanes are made of, and until a stream passes a count that the host raised."""
    if device == "cpu":
        return {}
    from megatrain.engine import driver

    stream, there = torch.cuda.Stream(priority=-1), torch.empty(4096, dtype=torch.uint8, device="cuda")
    here = torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    event, flag = torch.cuda.Event(), driver.Flag()
    handle = stream.cuda_stream

    def by_torch() -> None:
        with torch.cuda.stream(stream):
            there.copy_(here, non_blocking=True)

    calls: dict[str, Callable[[], object]] = {
        "copy by the driver": lambda: driver.copy(there.data_ptr(), here.data_ptr(), 4096, handle),
        "copy by PyTorch": by_torch,
        "event": lambda: event.record(stream),
        "wait for a count": lambda: flag.follow(handle, 0),
    }
    out: dict[str, Any] = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(300):
            call()
        out[name] = round((time.perf_counter() - started) / 300 * 1e6, 1)
    torch.cuda.synchronize()
    late = []
    for count in range(1, 60):
        flag.follow(handle, count)
        event.record(stream)
        time.sleep(0.002)
        started = time.perf_counter()
        flag.set(count)
        while not event.query():
            pass
        late.append((time.perf_counter() - started) * 1e6)
    late.sort()
    return out | {"a count is passed after, median": round(late[29], 1), "in 9 of 10": round(late[53], 1)}


def tracing(device: Device, folder: Path) -> dict[str, Any]:
    """What tracing costs: pairs of runs with it on and off, in turn, on a run whose compute lane is busy."""
    model, recipe = qwen("7B", device, num_hidden_layers=4), rows_of_1024(8, device, None)
    plan = Plan(placement={"default": "resident"})
    pairs = 3 if device == "cpu" else 20
    data = batches(model, recipe, 4)
    engines = {
        on: Engine(model, recipe, plan, RandomWeights(model, device), device=device, tracing=on) for on in (True, False)
    }
    times: dict[bool, list[float]] = {True: [], False: []}
    try:
        for pair in range(pairs + 1):
            for on in (True, False) if pair % 2 else (False, True):
                engine = engines[on]
                engine.flush()
                started = time.perf_counter()
                for batch in data:
                    engine.step(batch)
                engine.flush()
                if pair:
                    times[on].append(time.perf_counter() - started)
                if on:
                    busy = derive(engine.schedule, engine.trace()).lanes["compute"].utilisation
                    engine.restart_trace()
    finally:
        for engine in engines.values():
            engine.close()
    differences = sorted(a / b - 1 for a, b in zip(times[True], times[False], strict=True))
    median = differences[len(differences) // 2]
    lines = {"median difference <= 0.01": median <= 0.01, "compute busy >= 0.9": busy >= 0.9}
    return {
        "missed": [line for line, kept in lines.items() if not kept],
        "median difference": round(median, 5),
        "from": round(differences[0], 5),
        "to": round(differences[-1], 5),
        "compute busy": round(busy, 4),
        "pairs": pairs,
    }


def fastest(device: Device, folder: Path) -> dict[str, Any]:
    """The deterministic recipe beside the fastest one: 7B layers, resident, activations kept. Their losses agree closely."""
    model = qwen("7B", device, num_hidden_layers=4)
    plan = Plan(placement={"default": "resident"}, activations={"default": "keep"})
    times: dict[bool, list[float]] = {True: [], False: []}
    losses: dict[bool, list[float]] = {}
    for deterministic in (True, False, True, False):
        recipe = dataclasses.replace(rows_of_1024(16, device, 1.0), deterministic=deterministic)
        row = measured(model, recipe, plan, device, steps=6, warm=3)
        times[deterministic].append(row["step_s"])
        losses[deterministic] = row["losses"]
    difference = max(abs(a - b) for a, b in zip(losses[True], losses[False], strict=True))
    lines = {"losses within 0.5%": difference <= 0.005 * losses[True][0]}
    return {
        "missed": [line for line, kept in lines.items() if not kept],
        "step_s, deterministic": times[True],
        "step_s, fastest": times[False],
        "largest difference of losses": difference,
    }


def near_plain_bf16(device: Device, folder: Path) -> dict[str, Any]:
    """BF16 against a plain loop with FP32 masters: loss within 1% each step, gradient cosine above 0.999."""
    from tests.engine.test_plain import plain_loop

    model = small_model(hidden_size=192, intermediate_size=520, vocab_size=1031)
    recipe = small_recipe(precision="bf16", seq_len=40)
    expected = plain_loop(model, recipe, 5, device, dtype=torch.bfloat16, std=0.02)
    worst, least = 0.0, 1.0
    with Engine(model, recipe, PLANS["streamed, depth 4"], random_weights(model, 0.02), device=device) as engine:
        for batch, (loss, gradients, _) in zip(random_batches(model, recipe, 5), expected, strict=True):
            worst = max(worst, abs(engine.step(batch).loss - loss) / loss)
            ours = engine.gradients()
            a = torch.cat([ours[k].double().flatten() for k in gradients])
            b = torch.cat([gradients[k].double().flatten().cpu() for k in gradients])
            least = min(least, float(torch.nn.functional.cosine_similarity(a, b, dim=0)))
    assert worst <= 0.01 and least > 0.999, (worst, least)
    return {"loss, relative": worst, "least cosine": least}


def sanitizer(device: Device, folder: Path) -> dict[str, Any]:
    """compute-sanitizer memcheck over two steps of the tiny model, eager."""
    code = (
        "from tests.engine.small import *; from megatrain.plan import Plan; "
        f"train(small_model(), small_recipe(precision='bf16'), Plan(chunk_bytes=4096), steps=2, device={device!r})"
    )
    command = [sys.executable, "-c", code]
    if device == "cuda":
        command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "7", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    tail = (done.stdout + done.stderr).strip().splitlines()[-4:]
    assert done.returncode == 0, tail
    return {"says": tail}


CHECKS: dict[str, Callable[[Device, Path], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        predictions, kernels, plain_fp32, near_plain_bf16, seven_b, overlap, bitwise, tracing, sanitizer, adam_rates,
        host_costs, fastest,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", metavar="check", help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with (options.out / "checks.jsonl").open("a") as log:
        for name, check in {"preflight": preflight, **CHECKS}.items():
            if name != "preflight" and options.checks and name not in options.checks:
                continue
            if name == "kernels" and options.device == "cpu":
                continue
            started = time.perf_counter()
            try:
                result = check(options.device, options.out)
                lines = [result, *(part for part in result.values() if isinstance(part, dict))]
                # A rehearsal shows that the code runs; what is promised is promised of the GPU.
                failures = [m for part in lines for m in part.get("missed", ())] if options.device == "cuda" else []
                row: dict[str, Any] = {"check": name, "passed": not failures, "missed": failures, "result": result}
                failed += bool(failures)
            except Exception as error:
                traceback.print_exc()
                row = {"check": name, "passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
                failed += 1
            row["seconds"] = round(time.perf_counter() - started, 1)
            print(json.dumps(row), flush=True)
            log.write(json.dumps(row) + "\n")
            log.flush()
            if name == "preflight" and failed:
                break
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
