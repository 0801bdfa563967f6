"""What each kind of op reads and writes, written down without looking at lowering.

`table_of(schedule)` gives a function that states, for one op, its lane and every content it must read and must write: a space,
a tag, and the bytes of the block (or vector) the access must cover. `check` compares this with what the op says; so a read or
write that lowering forgot, or a chunk at a wrong offset, is found even where no other op would miss it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatrain.model import BlockSpec
from megatrain.recipe import DTYPE_NBYTES, NORM_TILE
from megatrain.schedule.nouns import Lane, Op, Schedule, Tag


class Content(NamedTuple):
    """`start:stop` bytes of something in host or device memory. What has a micro-batch's or a chunk's number in its tag may lie
    anywhere in its storage; its range counts from its own start."""

    space: str
    tag: Tag
    start: int
    stop: int


class Needs(NamedTuple):
    lane: Lane
    reads: frozenset[Content]
    writes: frozenset[Content]


class _Sizes:
    """Byte sizes and chunk cuts from the model and recipe alone."""

    def __init__(self, schedule: Schedule) -> None:
        model, recipe, plan = schedule.model, schedule.recipe, schedule.plan
        self.blocks: tuple[BlockSpec, ...] = model.blocks
        self.training = schedule.mode == "train"
        self.tied = model.blocks[-1].tied
        self.m = recipe.micro_batches
        self.weight = DTYPE_NBYTES[recipe.precision]
        self.link = DTYPE_NBYTES[recipe.gradient_dtype]
        self.planes = {"weights": self.weight, "m": 4, "v": 4} | ({"lo": 2} if recipe.precision == "bf16" else {})
        self.hidden = recipe.tokens_per_micro_batch * model.hidden_size * self.weight
        self.chunk = plan.chunk_bytes // self.weight // 128 * 128 or (128 if plan.chunk_bytes else 0)
        self.early = plan.update == "during_backward"
        self.late = plan.update == "next_forward"
        self.resident = [plan.placement_of(b.kind, b.layer) == "resident" for b in model.blocks]
        self.passes = [plan.placement_of(b.kind, b.layer) == "streamed_adam" for b in model.blocks]
        kept = [b.layer is not None and plan.activations_of(b.layer) == "keep" for b in model.blocks]
        self.keep = [self.training and k for k in kept]
        self.tiles = [sum(-(-p.numel // NORM_TILE) for p in b.params) for b in model.blocks]
        tokens = recipe.tokens_per_micro_batch
        self.saved = tokens * model.saved_bytes_per_token(self.weight)
        # Ids and targets, two rotary tables, and a mask unless the attention kernel knows causality by itself.
        rows = recipe.micro_batch_size if recipe.attention_mask == "segments" else 1
        pairs = rows * recipe.seq_len**2
        masks = {("eager", "causal"): self.weight, ("eager", "segments"): self.weight, ("sdpa", "segments"): 1}
        inputs = [8 * tokens] * 2 + [self.weight * rows * recipe.seq_len * model.head_dim] * 2
        inputs.append(pairs * masks.get((recipe.attention, recipe.attention_mask), 0))
        self.input = sum(-(-n // 256) * 256 for n in inputs)

    def elements(self, block: int, chunk: int | None) -> tuple[int, int]:
        span = self.blocks[block].span
        if chunk is None or not self.chunk:
            return 0, span
        return min(span, chunk * self.chunk), min(span, (chunk + 1) * self.chunk)


def _forward(op: Op, s: _Sizes) -> Needs:
    b, m = _block(op), _micro(op)
    reads = {_weights(s, b), _input(s, m)}
    if b > 0:
        reads.add(Content("device", Tag("hidden", b, m), 0, s.hidden))
    writes = {Content("device", Tag("hidden", b + 1, m), 0, s.hidden)}
    if s.keep[b]:
        writes.add(Content("device", Tag("saved", b, m), 0, s.saved))
    return Needs("compute", frozenset(reads), frozenset(writes))


def _loss(op: Op, s: _Sizes) -> Needs:
    m, head = _micro(op), len(s.blocks) - 1
    owners = [head, 0] if s.tied else [head]
    reads = {_weights(s, b) for b in owners} | {_input(s, m), Content("device", Tag("hidden", head, m), 0, s.hidden)}
    writes = {Content("device", Tag("loss", None, m), 0, 4)}
    if s.training:
        writes.add(Content("device", Tag("dhidden", head, m), 0, s.hidden))
        writes |= {_acc(s, b, m) for b in owners}
        reads |= {_acc(s, b, m - 1) for b in owners if m > 0}
    return Needs("compute", frozenset(reads), frozenset(writes))


def _backward(op: Op, s: _Sizes) -> Needs:
    b, m = _block(op), _micro(op)
    reads = {_input(s, m), Content("device", Tag("dhidden", b + 1, m), 0, s.hidden)}
    contribution = m + (s.m if b == 0 and s.tied else 0)
    writes = {_acc(s, b, contribution)}
    if contribution > 0:
        reads.add(_acc(s, b, contribution - 1))
    if b > 0:
        reads |= {_weights(s, b), Content("device", Tag("hidden", b, m), 0, s.hidden)}
        writes.add(Content("device", Tag("dhidden", b, m), 0, s.hidden))
    if s.keep[b]:
        reads.add(Content("device", Tag("saved", b, m), 0, s.saved))
    return Needs("compute", frozenset(reads), frozenset(writes))


def _pack(op: Op, s: _Sizes) -> Needs:
    b = _block(op)
    last = s.m * (2 if b == 0 and s.tied else 1) - 1
    first = sum(s.tiles[:b])
    writes = {
        Content("device", Tag("grad", b), 0, s.blocks[b].span * s.link),
        Content("device", Tag("partials"), 4 * first, 4 * (first + s.tiles[b])),
    }
    return Needs("compute", frozenset({_acc(s, b, last)}), frozenset(writes))


def _load(op: Op, s: _Sizes) -> Needs:
    if op.what == "constants":
        return _copied("h2d", "host", "device", [(Tag("constants"), 0, 64)])
    if op.what == "state":
        return _state(op, s, up=True)
    first, end = s.elements(_block(op), op.chunk)
    return _copied("h2d", "host", "device", [(Tag("weights", op.block, None, -1), first * s.weight, end * s.weight)])


def _save(op: Op, s: _Sizes) -> Needs:
    if op.what == "norm":
        return _copied("d2h", "device", "host", [(Tag("partials"), 0, 4 * sum(s.tiles))])
    if op.what == "loss":
        return _copied("d2h", "device", "host", [(Tag("loss", None, m), 0, 4) for m in range(s.m)])
    if op.what == "state":
        return _state(op, s, up=False)
    first, end = s.elements(_block(op), op.chunk)
    return _copied("d2h", "device", "host", [(Tag("grad", op.block), first * s.link, end * s.link)])


def _input_moves(op: Op, s: _Sizes) -> Needs:
    """A layer's input goes down (stash) or comes back (fetch)."""
    tag = Tag("hidden", _block(op), _micro(op))
    if op.kind == "stash":
        return _copied("d2h", "device", "host", [(tag, 0, s.hidden)])
    return _copied("h2d", "host", "device", [(tag, 0, s.hidden)])


def _staged(op: Op, s: _Sizes, step: int) -> set[Content]:
    """A chunk of a block's state where it is updated in passing: the weights lie in their slot, the rest on its own."""
    b, (first, end) = _block(op), s.elements(_block(op), op.chunk)
    rest = {(what, n) for what, n in s.planes.items() if what != "weights"}
    return {Content("device", Tag(what, b, op.chunk, step), 0, (end - first) * n) for what, n in rest} | {
        Content("device", Tag("weights", b, None, step), first * s.weight, end * s.weight)
    }


def _staged_gradient(op: Op, s: _Sizes, step: int) -> Content:
    b, (first, end) = _block(op), s.elements(_block(op), op.chunk)
    if s.early:  # it has not left the device
        return Content("device", Tag("grad", b, None, step), first * s.link, end * s.link)
    return Content("device", Tag("grad", b, op.chunk, step), 0, (end - first) * s.link)


def _state(op: Op, s: _Sizes, *, up: bool) -> Needs:
    b, step = _block(op), -1 if s.late else 0
    if not s.passes[b]:
        raise ValueError(f"{op.name}: only the state of streamed_adam blocks passes through the device")
    first, end = s.elements(b, op.chunk)
    age = step - 1 if up else step
    host = {Content("host", Tag(what, b, None, age), first * n, end * n) for what, n in s.planes.items()}
    device = _staged(op, s, age)
    if not up:
        return Needs("d2h", frozenset(device), frozenset(host))
    if s.early:  # weights and gradient are there from the backward
        host = {c for c in host if c.tag.what != "weights"}
        device = {c for c in device if c.tag.what != "weights"}
    else:
        host.add(Content("host", Tag("grad", b, None, step), first * s.link, end * s.link))
        device.add(_staged_gradient(op, s, step))
    return Needs("h2d", frozenset(host), frozenset(device))


def _update(op: Op, s: _Sizes) -> Needs:
    b, step = _block(op), -1 if s.late else 0
    if s.passes[b]:
        constants = Content("device", Tag("constants", None, None, step), 0, 64)
        reads = _staged(op, s, step - 1) | {_staged_gradient(op, s, step), constants}
        return Needs("compute", frozenset(reads), frozenset(_staged(op, s, step)))
    space: str = "device" if s.resident[b] else "host"
    first, end = s.elements(b, op.chunk)
    reads = {Content(space, Tag(what, b, None, step - 1), first * n, end * n) for what, n in s.planes.items()}
    reads.add(Content(space, Tag("grad", b, None, step), first * s.link, end * s.link))
    reads.add(Content(space, Tag("constants", None, None, step), 0, 64))
    writes = {Content(space, Tag(what, b, None, step), first * n, end * n) for what, n in s.planes.items()}
    return Needs("compute" if s.resident[b] else "cpu", frozenset(reads), frozenset(writes))


def _clip(op: Op, s: _Sizes) -> Needs:
    writes = {Content("host", Tag("norm"), 0, 16)}
    if not s.early:
        writes.add(Content("host", Tag("constants"), 0, 64))
    return Needs("cpu", frozenset({Content("host", Tag("partials"), 0, 4 * sum(s.tiles))}), frozenset(writes))


def _report(op: Op, s: _Sizes) -> Needs:
    return Needs("cpu", frozenset(Content("host", Tag("loss", None, m), 0, 4) for m in range(s.m)), frozenset())


def _constants(op: Op, s: _Sizes) -> Needs:
    if not s.early:
        raise ValueError(f"{op.name}: only updates during backward have constants that wait for no norm")
    return Needs("cpu", frozenset(), frozenset({Content("host", Tag("constants"), 0, 64)}))


def _input_op(op: Op, s: _Sizes) -> Needs:
    return Needs("h2d", frozenset(), frozenset({_input(s, _micro(op))}))


TABLE: dict[str, Callable[[Op, _Sizes], Needs]] = {
    "input": _input_op, "load": _load, "forward": _forward, "loss": _loss, "backward": _backward, "pack": _pack,
    "save": _save, "report": _report, "constants": _constants, "clip": _clip, "update": _update,
    "stash": _input_moves, "fetch": _input_moves,
}  # fmt: skip


def table_of(schedule: Schedule) -> Callable[[Op], Needs]:
    """The needs of any op of `schedule`."""
    sizes = _Sizes(schedule)

    def needs(op: Op) -> Needs:
        if op.kind not in TABLE:
            raise ValueError(f"{op.name}: no such kind")
        if op.block is not None and not 0 <= op.block < len(sizes.blocks):
            raise ValueError(f"{op.name}: the model has blocks 0 to {len(sizes.blocks) - 1}")
        if op.micro is not None and not 0 <= op.micro < sizes.m:
            raise ValueError(f"{op.name}: the recipe has micro-batches 0 to {sizes.m - 1}")
        return TABLE[op.kind](op, sizes)

    return needs


def _copied(lane: Lane, source: str, target: str, items: list[tuple[Tag, int, int]]) -> Needs:
    return Needs(
        lane, frozenset(Content(source, *item) for item in items), frozenset(Content(target, *item) for item in items)
    )


def _weights(s: _Sizes, b: int) -> Content:
    return Content("device", Tag("weights", b, None, -1), 0, s.blocks[b].span * s.weight)


def _acc(s: _Sizes, b: int, contribution: int) -> Content:
    return Content("device", Tag("acc", b, contribution), 0, 4 * s.blocks[b].span)


def _input(s: _Sizes, m: int) -> Content:
    return Content("device", Tag("input", None, m), 0, s.input)


def _block(op: Op) -> int:
    if op.block is None:
        raise ValueError(f"{op.name}: a {op.kind} names a block")
    return op.block


def _micro(op: Op) -> int:
    if op.micro is None:
        raise ValueError(f"{op.name}: a {op.kind} names a micro-batch")
    return op.micro
