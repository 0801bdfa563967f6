"""Layout: which storages a model, recipe and plan need, and where blocks and chunks lie in them.

Blocks of one shape pass through one pool of slots; a *size class* names the pool: "layer", "vocab" (the embedding and an
untied head) or "norm" (a tied head, which owns only its final norm). A block lies in a slot at the offsets it has on the host,
so chunk boundaries are the same on both sides and loading is a plain copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.model import ALIGN_ELEMENTS, BlockSpec, ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import DTYPE_NBYTES, NORM_TILE, Recipe
from megatrain.schedule.nouns import Space, Storage

CONSTANTS_NBYTES = 64
"""Sixteen FP32 values, see `megatrain.optim.constants`."""
NORM_NBYTES = 16
LOSS_NBYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlace:
    """A block as the plan places it.

    `resident`: all its state is on the device; `stays`: its state is on the host, but its weights have a device buffer of their
    own; `passes`: its state is on the host and passes through the device to be updated there. `keep`: what its forward saved is
    kept; `offload`: its input passes through slots and waits on the host; `waits`: under `during_backward` the CPU updates it
    after the blocks that do not wait. `chunks` are element ranges, cut at multiples of
    `ALIGN_ELEMENTS`; `tiles` the range of its norm partials among those of the model.
    """

    spec: BlockSpec
    size_class: str
    resident: bool
    stays: bool
    passes: bool
    keep: bool
    offload: bool
    waits: bool
    chunks: tuple[tuple[int, int], ...]
    tiles: tuple[int, int]


def size_class(block: BlockSpec) -> str:
    """The pool of slots a block passes through."""
    if block.kind == "layer":
        return "layer"
    return "norm" if block.tied else "vocab"


def norm_tiles(block: BlockSpec) -> int:
    """Norm partials of a block: one for each started `NORM_TILE` elements of each parameter."""
    return sum(-(-p.numel // NORM_TILE) for p in block.params)


def place_blocks(model: ModelSpec, recipe: Recipe, plan: Plan) -> tuple[BlockPlace, ...]:
    """Every block with its placement, chunks and partials. ValueError for a plan key that names a layer the model lacks."""
    _check_layers(model, plan)
    _check_size(model, recipe, plan)
    per_chunk = plan.chunk_bytes // DTYPE_NBYTES[recipe.precision] // ALIGN_ELEMENTS * ALIGN_ELEMENTS
    places, tile = [], 0
    for spec in model.blocks:
        tiles, placement = norm_tiles(spec), plan.placement_of(spec.kind, spec.layer)
        activations = "recompute" if spec.layer is None else plan.activations_of(spec.layer)
        by_cpu = placement in ("streamed", "device_weights")
        places.append(
            BlockPlace(
                spec=spec,
                size_class=size_class(spec),
                resident=placement == "resident",
                stays=placement == "device_weights",
                passes=placement == "streamed_adam",
                keep=activations == "keep",
                offload=activations == "offload",
                waits=by_cpu and plan.update_order_of(spec.kind, spec.layer) == "last",
                chunks=tuple(_cut(spec.span, max(per_chunk, ALIGN_ELEMENTS) if plan.chunk_bytes else spec.span)),
                tiles=(tile, tile + tiles),
            )
        )
        tile += tiles
    return tuple(places)


def _cut(span: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, span, step):
        yield start, min(span, start + step)


MOST_OPS = 2_000_000
"""A schedule of more ops in a step is refused before it takes all memory there is; useful ones have thousands."""


def _check_size(model: ModelSpec, recipe: Recipe, plan: Plan) -> None:
    passes = 3 * len(model.blocks) * recipe.micro_batches
    if passes > MOST_OPS:
        raise ValueError(f"recipe.micro_batches: {recipe.micro_batches} make about {passes:,} ops a step, more than {MOST_OPS:,}")
    nbytes = sum(block.span for block in model.blocks) * DTYPE_NBYTES[recipe.precision]
    chunks = nbytes // max(256, plan.chunk_bytes) if plan.chunk_bytes else 0
    if 4 * chunks > MOST_OPS:
        raise ValueError(
            f"plan.chunk_bytes: {plan.chunk_bytes} cut the model into {chunks:,} chunks, about {4 * chunks:,} ops a step, more"
            f" than {MOST_OPS:,}; use larger chunks"
        )


def _check_layers(model: ModelSpec, plan: Plan) -> None:
    layers = sum(b.kind == "layer" for b in model.blocks)
    tables = (("placement", plan.placement), ("activations", plan.activations), ("update_order", plan.update_order))
    for name, table in tables:
        for key in table:
            last = key.rpartition("-")[2]
            if last.isdigit() and int(last) >= layers:
                raise ValueError(f"plan.{name}[{key!r}]: the model has layers 0 to {layers - 1}")


class Storages:
    """The storages of one (model, recipe, plan), by name: `index` gives the number an `Access` uses."""

    def __init__(self, model: ModelSpec, recipe: Recipe, plan: Plan, places: tuple[BlockPlace, ...]) -> None:
        self.table: list[Storage] = []
        self.index: dict[str, int] = {}
        weight, link = DTYPE_NBYTES[recipe.precision], DTYPE_NBYTES[recipe.gradient_dtype]
        micro_batches = recipe.micro_batches
        hidden = model.hidden_nbytes(recipe.tokens_per_micro_batch, weight)

        self._add("host", "constants", CONSTANTS_NBYTES, copied=any(p.resident or p.passes for p in places))
        self._add("device", "constants.device", CONSTANTS_NBYTES)
        self._add("device", "loss", LOSS_NBYTES * micro_batches)
        self._add("host", "loss.host", LOSS_NBYTES * micro_batches, copied=True)
        self._add("device", "partials", 4 * places[-1].tiles[1])
        self._add("host", "partials.host", 4 * places[-1].tiles[1], copied=True)
        self._add("host", "norm", NORM_NBYTES)
        self._add("device", "input", micro_batches * input_nbytes(model, recipe))
        self._add("device", "dhidden", micro_batches * hidden)
        offloaded = [p.spec.index for p in places if p.offload]
        inputs = min(plan.input_slots, len(offloaded))
        # The last ones are still in the slots when their backward comes.
        self.stashed = frozenset(offloaded[: len(offloaded) - inputs])
        self.input_slots = [self._add("device", f"islot.{k}", micro_batches * hidden) for k in range(inputs)]
        for place in places[1:]:
            if not place.offload:
                self._add("device", f"hidden[{place.spec.index}]", micro_batches * hidden)
            elif place.spec.index in self.stashed:
                self._add("host", f"hidden[{place.spec.index}]", micro_batches * hidden, copied=True)
            if place.keep:
                saved = recipe.tokens_per_micro_batch * model.saved_bytes_per_token(weight)
                for m in range(micro_batches):
                    self._add("device", f"saved[{place.spec.index}.{m}]", saved, dynamic=True)
        for place in places:
            b, span = place.spec.index, place.spec.span
            space: Space = "device" if place.resident else "host"
            self._add(space, f"weights[{b}]", span * weight, copied=not place.resident)
            if recipe.precision == "bf16":
                self._add(space, f"lo[{b}]", span * 2, copied=place.passes)
            self._add(space, f"m[{b}]", span * 4, copied=place.passes)
            self._add(space, f"v[{b}]", span * 4, copied=place.passes)
            if plan.update != "during_backward" or place.waits:
                self._add(space, f"grad[{b}]", span * link, copied=not place.resident)

        self.own_slots = {
            p.spec.index: self._add("device", f"slot.block.{p.spec.index}", p.spec.span * weight) for p in places if p.stays
        }
        # Blocks accumulate one after the other, but for a tied embedding, which does so from the loss to the end.
        tied = model.blocks[-1].tied
        if not tied:
            self._add("device", "acc", 4 * max(p.spec.span for p in places))
        self.weight_slots: dict[str, list[int]] = {}
        self.gradient_slots: dict[str, list[int]] = {}
        self.host_gradient_slots: dict[str, list[int]] = {}
        for name in ("layer", "vocab", "norm"):
            members = [p for p in places if p.size_class == name]
            streamed = [p for p in members if not p.resident]
            pooled = members if plan.update == "during_backward" else streamed
            from_host = [p for p in streamed if not p.passes and not p.waits]
            if members and tied:
                self._add("device", f"acc.{name}", 4 * max(p.spec.span for p in members))
            slots = {"layer": plan.weight_slots, "vocab": plan.vocab_slots, "norm": 1}[name]
            passing = [p for p in streamed if not p.stays]
            self.weight_slots[name] = self._pool("device", f"slot.{name}", passing, slots, weight)
            grads = plan.gradient_slots if name == "layer" else 1
            self.gradient_slots[name] = self._pool("device", f"gslot.{name}", pooled, grads, link)
            if plan.update == "during_backward":
                grads = plan.host_gradient_slots if name == "layer" else 1
                self.host_gradient_slots[name] = self._pool("host", f"gslot.{name}.host", from_host, grads, link, copied=True)

        passing = [p for p in places if p.passes]
        longest = max((end - first for p in passing for first, end in p.chunks), default=0)
        planes = state_planes(recipe)[1:] + ([("grad", link)] if plan.update != "during_backward" else [])
        self.state_slots = [
            {what: self._add("device", f"state.{k}.{what}", longest * nbytes) for what, nbytes in planes}
            for k in range(min(plan.state_slots, sum(len(p.chunks) for p in passing)))
        ]

    def _add(self, space: Space, name: str, nbytes: int, *, dynamic: bool = False, copied: bool = False) -> int:
        self.index[name] = len(self.table)
        self.table.append(Storage(space=space, name=name, nbytes=nbytes, dynamic=dynamic, copied=copied))
        return self.index[name]

    def _pool(
        self, space: Space, name: str, members: list[BlockPlace], slots: int, itemsize: int, *, copied: bool = False
    ) -> list[int]:
        if not members:
            return []
        nbytes = itemsize * max(p.spec.span for p in members)
        return [self._add(space, f"{name}.{k}", nbytes, copied=copied) for k in range(min(slots, len(members)))]


def state_planes(recipe: Recipe) -> list[tuple[str, int]]:
    """What a block's state consists of, the streamed weights first, each with its bytes a parameter."""
    low = [("lo", 2)] if recipe.precision == "bf16" else []
    return [("weights", DTYPE_NBYTES[recipe.precision]), *low, ("m", 4), ("v", 4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputField:
    """One tensor of a micro-batch's inputs and where it lies among them. `dtype` is torch's name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_nbytes: int
    nbytes: int


def input_fields(model: ModelSpec, recipe: Recipe) -> tuple[InputField, ...]:
    """What the `input` op of a micro-batch brings: token ids and targets [B, T], rotary cos and sin [1 or B, T, head_dim] in the
    type of the computation, and a mask [1 or B, 1, T, T] where the recipe needs one. Rows differ in tables and mask only under
    "segments". Each starts at a multiple of 256 bytes."""
    rows, tokens = recipe.micro_batch_size, recipe.seq_len
    own = rows if recipe.attention_mask == "segments" else 1
    compute = {"bf16": "bfloat16", "fp32": "float32"}[recipe.precision]
    wanted: list[tuple[str, str, int, tuple[int, ...]]] = [
        ("ids", "int64", 8, (rows, tokens)),
        ("targets", "int64", 8, (rows, tokens)),
        ("cos", compute, DTYPE_NBYTES[recipe.precision], (own, tokens, model.head_dim)),
        ("sin", compute, DTYPE_NBYTES[recipe.precision], (own, tokens, model.head_dim)),
    ]
    if recipe.attention == "eager":  # additive: eager attention has no causality of its own
        wanted.append(("mask", compute, DTYPE_NBYTES[recipe.precision], (own, 1, tokens, tokens)))
    elif recipe.attention_mask == "segments":
        wanted.append(("mask", "bool", 1, (own, 1, tokens, tokens)))
    fields, at = [], 0
    for name, dtype, itemsize, shape in wanted:
        nbytes = itemsize * math.prod(shape)
        fields.append(InputField(name=name, dtype=dtype, shape=shape, offset_nbytes=at, nbytes=nbytes))
        at += -(-nbytes // 256) * 256
    return tuple(fields)


def input_nbytes(model: ModelSpec, recipe: Recipe) -> int:
    """Bytes a micro-batch's inputs take, a multiple of 256."""
    last = input_fields(model, recipe)[-1]
    return last.offset_nbytes + -(-last.nbytes // 256) * 256
