"""Blocks in situ: how long each block's ops take where they will run, in the engine.

A reduced model is trained for a few steps: blocks of the very shapes of the user's model, but few decoder layers, random
weights, random tokens, two micro-batches (on the host at most as many as the recipe has, on a GPU one where two do not fit).
All state is resident, so that nothing else runs beside compute; the first layer keeps its activations, the others recompute
them. The engine's own trace says how long each op took, so what is timed is what will run: the same kernels on the same kind
of memory, after the same ops, bookkeeping included. It stays so whatever the engine does inside.

Two layers on the host; on a GPU as many of eight as fit: its clock falls with the power it draws, and layers, which are most of
a real step, draw more than the head, which is half of a step of two layers. The clock falls within 150 ms of work and is back
after a pause, so of a GPU's ops those count that come after `SUSTAINED_NS` of work with hardly a pause, as nearly all of a real
step do; of a kind that has too few of them (in small models, whose steps are short) all.

A forward's row is that of the layer that recomputes; one that keeps its activations may take a few percent longer. The first
micro-batch's gradient is written and the others' are added to it, which takes longer: there is a row of each where both ran.

What ops of the cpu lane and copies cost beside their traffic is read off a model so small that nothing else is left.

Not covered: layers that differ from each other (no model that `ModelSpec` accepts has them), other token counts, and what copies
and the optimizer take away from compute while they run.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatrain.calibrate.device import Device
from megatrain.calibrate.samples import Spread, figure, overall, spread
from megatrain.engine.engine import Engine
from megatrain.hardware import ComputeKind, MeasuredOp, conditions
from megatrain.layers.head import head_template
from megatrain.layers.inputs import DTYPES, make_targets
from megatrain.model import BlockKind, ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import Op, Schedule, lower
from megatrain.trace import Trace

LAYERS, MOST_LAYERS = 2, (8, 4, 2)
"""Of the reduced model: on the host, and on a GPU the first of these that fits."""
LEAST_STEPS, MOST_STEPS = 3, 40
"""Steps that count; a trace holds 64 parts."""
WARM_UP_SHARE = 0.3
"""Of a training's budget, what passes before steps count: clocks and caches are then those of a run that goes on."""
SUSTAINED_NS, SUSTAINED_SHARE = 150_000_000, 0.9
"""For how long, and for how much of it, a GPU has worked when its clock is taken to be that of sustained work."""
LEAST_SAMPLES = 3
"""Of sustained work, for them to stand for a kind of op."""

Key = tuple[ComputeKind, BlockKind, bool]
"""What, of which block, and whether its gradient is added to that of earlier micro-batches. The layers are alike, and so are
their ops but for what is kept, which the first says."""


class Blocks(NamedTuple):
    """`steps` of the reduced model of `layers` layers counted."""

    layers: int
    measured: tuple[MeasuredOp, ...]
    steps: int
    spread: Spread


class Sample(NamedTuple):
    """How long an op took, and for how much of the `SUSTAINED_NS` before it its lane had worked."""

    ns: int
    worked_ns: int

    @property
    def sustained(self) -> bool:
        return self.worked_ns >= SUSTAINED_SHARE * SUSTAINED_NS


class Overheads(NamedTuple):
    """`host_op_ns` of an op of the cpu lane, `copy_op_ns` of an op that copies, by the engine's thread, beside their traffic."""

    host_op_ns: int
    copy_op_ns: int


def measure_blocks(device: Device, *, model: ModelSpec, recipe: Recipe, budget_s: float, seed: int) -> Blocks:
    """Rows for every kind of op on every kind of block. ValueError if even the reduced model does not fit the device."""
    small, short, plan = reduced_job(device, model, recipe)
    schedule, trace = _train(device, small, short, plan, budget_s=0.85 * budget_s, seed=seed)
    rows, spreads = [], []
    for (kind, block, adds), taken in samples(schedule, trace).items():
        steady = [] if device.on_host else [sample for sample in taken if sample.sustained]
        counts = [sample.ns for sample in (steady if len(steady) >= LEAST_SAMPLES else taken)]
        rows.append(_row(kind, block, model, recipe, figure(counts, shared=device.on_host), adds))
        spreads.append(spread(counts, shared=device.on_host))
    evaluated = _loss_forward(device, model, recipe, budget_s=0.15 * budget_s, seed=seed)
    rows.append(_row("loss_forward", "head", model, recipe, figure(evaluated, shared=device.on_host)))
    spreads.append(spread(evaluated, shared=device.on_host))
    return Blocks(small.n_layers, tuple(rows), sum(part != "epilogue" for part in trace.parts), overall(spreads))


def measure_overheads(device: Device, *, threads: int, budget_s: float, seed: int) -> Overheads:
    """Of the engine on this machine, from a model of a few thousand parameters with everything streamed."""
    recipe = Recipe(seq_len=8, loss_tile=8, compute_threads=threads)
    # One slot each and updates after everything: lanes take turns, and nobody waits for a core.
    plan = Plan(update="after", weight_slots=1, gradient_slots=1, chunk_bytes=8 << 10)
    schedule, trace = _train(device, ModelSpec.from_config(_TINY), recipe, plan, budget_s=budget_s, seed=seed)
    ops = [(schedule.part(trace.parts[e.part]).ops[e.position], e.end_ns - e.start_ns) for e in trace.events]
    updates = [ns for op, ns in ops if op.kind == "update"]
    copies = [ns for op, ns in ops if op.kind in ("load", "save")]
    return Overheads(figure(updates, shared=True), figure(copies, shared=True) if device.on_host else 0)


_TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def reduced(model: ModelSpec, layers: int = LAYERS) -> ModelSpec:
    """`model` with so many decoder layers."""
    config = json.loads(model.config_json) | {"num_hidden_layers": layers}
    if config.get("max_window_layers"):
        config["max_window_layers"] = layers
    return ModelSpec.from_config(config, name=f"{model.name}, {layers} layers")


def reduced_job(device: Device, model: ModelSpec, recipe: Recipe) -> tuple[ModelSpec, Recipe, Plan]:
    """The reduced model, and all of it resident where that fits; if not even two layers do so, embedding and head pass through
    slots, and then the layers too. The recipe with the micro-batches that are run. ValueError, in one line, if nothing fits."""
    counts = (LAYERS,) if device.on_host else MOST_LAYERS
    micro_batches = (min(2, recipe.micro_batches),) if device.on_host else (2, 1)
    ways: list[tuple[int, dict[str, str]]] = [(layers, {"default": "resident"}) for layers in counts]
    ways += [(LAYERS, {"default": "streamed", f"0-{LAYERS - 1}": "resident"}), (LAYERS, {"default": "streamed"})]
    for (layers, placement), count in itertools.product(ways, micro_batches):
        small, short = reduced(model, layers), replace(recipe, micro_batches=count)
        activations = {"default": "recompute", "0": "keep"}
        plan = Plan(placement=placement, activations=activations, update="after", chunk_bytes=0)  # type: ignore[arg-type]
        need = sum(s.nbytes for s in lower(small, short, plan).storages if s.space == "device" or device.on_host)
        # A tile's logits, in a few copies, and what a layer saves come on top.
        need += 16 * recipe.loss_tile * model.vocab_size
        need += 2 * recipe.tokens_per_micro_batch * model.saved_bytes_per_token(4)
        if need <= device.memory_bytes:
            return small, short, plan
    raise ValueError(
        f"calibrate: model {small.name!r} needs {need:,} bytes of device memory for one step, {device.name} has"
        f" {device.memory_bytes:,}; a smaller recipe.micro_batch_size may fit"
    )


def _train(device: Device, model: ModelSpec, recipe: Recipe, plan: Plan, *, budget_s: float, seed: int) -> tuple[Schedule, Trace]:
    """Train for `budget_s` from when the engine is ready, warm-up included, and return what ran after that."""
    where: Literal["cpu", "cuda"] = "cpu" if device.on_host else "cuda"
    with Engine(model, recipe, plan, _RandomWeights(model, seed), device=where) as engine:
        end = time.monotonic() + budget_s
        batch = _batch(model, recipe, seed)
        warm = time.monotonic() + budget_s * WARM_UP_SHARE
        for number in itertools.count(1):
            engine.step(batch)
            if number >= LEAST_STEPS and time.monotonic() > warm:
                break
        engine.restart_trace()
        for number in range(1, MOST_STEPS + 1):
            engine.step(batch)
            if number >= LEAST_STEPS and time.monotonic() > end:
                break
        return engine.schedule, engine.trace()


def samples(schedule: Schedule, trace: Trace) -> dict[Key, list[Sample]]:
    """What a trace says of compute ops, in the order in which they ran."""
    found: dict[Key, list[Sample]] = {}
    ran = [(event, schedule.part(trace.parts[event.part]).ops[event.position]) for event in trace.events]
    compute = sorted(((event, op) for event, op in ran if op.lane == "compute"), key=lambda it: it[0].start_ns)
    worked = worked_before([(event.start_ns, event.end_ns) for event, _ in compute])
    for (event, op), worked_ns in zip(compute, worked, strict=True):
        if (kind := _kind(op)) is None:
            continue
        block = schedule.model.blocks[-1 if op.block is None else op.block]  # a loss is the head's
        key = (kind, block.kind, bool(op.micro) and kind != "forward")
        found.setdefault(key, []).append(Sample(event.end_ns - event.start_ns, worked_ns))
    return found


def worked_before(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Of one lane's (start, end) in ns, in their order: for how much of the `SUSTAINED_NS` before each start it had worked."""
    found, busy, first = [], 0, 0  # busy: of spans[first:i]
    for i, (start, end) in enumerate(spans):
        begin = start - SUSTAINED_NS
        while first < i and spans[first][1] <= begin:
            busy -= spans[first][1] - spans[first][0]
            first += 1
        found.append(busy - (max(0, begin - spans[first][0]) if first < i else 0))
        busy += end - start
    return found


def _kind(op: Op) -> ComputeKind | None:
    if op.kind == "backward":
        is_layer = any(a.tag.what == "weights" for a in op.reads)
        kept = any(a.tag.what == "saved" for a in op.reads)
        return "recompute_backward" if is_layer and not kept else "backward"
    if op.kind == "forward" and any(a.tag.what == "saved" for a in op.writes):
        return None  # memory for what it keeps is new in each step here, which would count as its time
    return op.kind if op.kind in ("forward", "loss", "pack") else None


def _row(kind: ComputeKind, block: BlockKind, model: ModelSpec, recipe: Recipe, ns: int, adds: bool = False) -> MeasuredOp:
    spec = next(b for b in model.blocks if b.kind == block)
    numel = spec.numel + (model.embedding.numel if spec.tied else 0)
    tokens, seq_len = (1, 1) if kind == "pack" else (recipe.tokens_per_micro_batch, recipe.seq_len)
    return MeasuredOp(kind, block, numel, tokens, seq_len, ns, conditions(kind, recipe), adds)


def _loss_forward(device: Device, model: ModelSpec, recipe: Recipe, *, budget_s: float, seed: int) -> list[int]:
    """The head's forward as evaluation calls it."""
    where = torch.device("cpu" if device.on_host else "cuda")
    dtype = DTYPES[recipe.precision]
    shape = (recipe.micro_batch_size, recipe.seq_len)
    generator = torch.Generator(where).manual_seed(seed)
    x = torch.randn(*shape, model.hidden_size, device=where, generator=generator).to(dtype)
    matrix = (torch.randn(model.vocab_size, model.hidden_size, device=where, generator=generator) * 0.02).to(dtype)
    weights = (torch.ones(model.hidden_size, device=where, dtype=dtype), matrix)
    targets = make_targets({"input_ids": torch.randint(0, model.vocab_size, shape)}).to(where)
    head = head_template(model)

    def run() -> Tensor:
        return head.loss_only(weights, x, targets, targets.numel(), recipe.loss_tile)

    before = torch.get_num_threads()
    torch.set_num_threads(recipe.compute_threads)
    try:
        device.timed(run, 1)
        end, times = time.monotonic() + budget_s, device.timed(run, 3)
        while time.monotonic() < end:
            times += device.timed(run, 1)
    finally:
        torch.set_num_threads(before)
    return times


def _batch(model: ModelSpec, recipe: Recipe, seed: int) -> dict[str, Tensor]:
    shape = (recipe.micro_batches * recipe.micro_batch_size, recipe.seq_len)
    batch = {"input_ids": torch.randint(0, model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))}
    if recipe.attention_mask == "segments":
        batch["segments"] = (torch.arange(recipe.seq_len) >= recipe.seq_len // 2).long().expand(shape) + 1
    return batch


class _RandomWeights(Mapping[str, Tensor]):
    """0.02 x normal, norms 1; made one parameter at a time, from one random block: an engine copies each as it asks for it."""

    def __init__(self, model: ModelSpec, seed: int) -> None:
        self._shapes = {p.name: p.shape for block in model.blocks for p in block.params}
        block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)) * 0.02
        self._block = block.bfloat16()  # which an engine in BF16 takes as it is

    def __getitem__(self, name: str) -> Tensor:
        shape = torch.Size(self._shapes[name])
        if "norm" in name:
            return torch.ones(shape)
        return self._block.repeat(-(-shape.numel() // self._block.numel()))[: shape.numel()].view(shape)

    def __contains__(self, name: object) -> bool:  # a mapping's own would make the tensor
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
