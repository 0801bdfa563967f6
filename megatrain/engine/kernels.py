"""Kernels: what each kind of op does to the bytes it is given, the same for every device.

One function a kind. A kernel finds its operands by what their tags say they hold and takes bytes from nowhere else. What differs
between devices (how bytes are copied, how gradients are packed, how AdamW runs on the device) comes in as `DeviceOps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatrain.engine.backend import BoundRange, Ran
from megatrain.engine.memory import Memory
from megatrain.layers.embedding import embedding_backward, embedding_forward
from megatrain.layers.gradients import accumulate
from megatrain.layers.head import HeadTemplate, head_template
from megatrain.layers.inputs import DTYPES, layer_inputs
from megatrain.layers.saved import Saved
from megatrain.layers.template import LayerTemplate, layer_templates
from megatrain.model import BlockSpec, ParamSpec
from megatrain.optim.constants import clip_factor, step_constants
from megatrain.optim.kernel import adamw_update
from megatrain.optim.norm import finish_norm, first_nonfinite, n_tiles
from megatrain.schedule.layout import input_fields
from megatrain.schedule.nouns import Access, Op, Schedule


class NonFiniteGradient(RuntimeError):
    """A gradient is Inf or NaN and updates were made before that was known; the state is not to be trusted."""


@dataclass(slots=True)
class StepContext:
    """What one step brings along and what it finds out.

    `batch` has each micro-batch's inputs as uint8, laid out by `input_fields`. `n_valid` is of the whole step.
    """

    batch: tuple[Tensor, ...]
    n_valid: int
    loss: float | None = None
    norm: float | None = None
    skipped: str | None = None


@dataclass(slots=True)
class UpdateCount:
    """Applied updates so far: what bias correction and learning rate count. Touched by the cpu lane only."""

    applied: int = 0


class Operands(NamedTuple):
    """One running op with its bytes. `reads` and `writes` are keyed by (what they hold, block; micro-batch for losses)."""

    op: Op
    reads: dict[tuple[str, int | None], Tensor]
    writes: dict[tuple[str, int | None], Tensor]


class DeviceOps(Protocol):
    """What a backend adds. Called on the lane the op runs on; a device may finish later, in the order of the lane."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy uint8 bytes between host and device, either way."""
        ...

    def pack(self, block: BlockSpec, sums: Tensor, grads: Tensor, partials: Tensor) -> None:
        """Round a block's FP32 `sums` [span] to the type of `grads` [span] and write the norm partials of the result, parameter
        after parameter."""
        ...

    def adamw(self, master: tuple[Tensor, ...], m: Tensor, v: Tensor, grad: Tensor, constants: Tensor, *, decayed: bool) -> None:
        """`megatrain.optim.kernel.adamw_update` where the block's state lies on the device."""
        ...


@dataclass(slots=True, kw_only=True)
class Kernels:
    """Runs the ops of `schedule` (and of the evaluation schedule over the same storages) on `memory`."""

    schedule: Schedule
    memory: Memory
    device: DeviceOps
    counts: UpdateCount = field(default_factory=UpdateCount)
    _saved: dict[str, tuple[str, Saved]] = field(default_factory=dict)
    _bound: dict[int, tuple[Operands, tuple[BoundRange, ...], tuple[BoundRange, ...]]] = field(default_factory=dict)
    _layers: tuple[LayerTemplate, ...] = field(init=False)
    _head: HeadTemplate = field(init=False)

    def __post_init__(self) -> None:
        model, recipe = self.schedule.model, self.schedule.recipe
        self._layers = layer_templates(model, attention=recipe.attention, compiled=recipe.compiled)
        self._head = head_template(model)

    def run(self, op: Op, step: Any) -> Ran:
        """Run `op` and say what it bound."""
        bound = self._bound.get(id(op))
        if bound is None or bound[0].op is not op:
            # An op touches the same bytes in every step: its views are made, and located, when it first runs.
            reads, read_ranges = self._bind(op.reads)
            writes, write_ranges = self._bind(op.writes)
            bound = self._bound[id(op)] = (Operands(op, reads, writes), read_ranges, write_ranges)
        operands, read_ranges, write_ranges = bound
        if any(self.memory.storages[a.storage].dynamic for a in op.reads):
            read_ranges = self._handles(op, read_ranges)
        copied = _KERNELS[op.kind](self, operands, step)
        nbytes = copied if copied is not None else sum(stop - start for _, start, stop in write_ranges)
        return Ran(read_ranges, write_ranges, nbytes)

    def _handles(self, op: Op, ranges: tuple[BoundRange, ...]) -> tuple[BoundRange, ...]:
        """`ranges` with every kept handle named by the storage that it says itself it was made for."""
        return tuple(
            (self._saved[name][0] if name in self._saved else name, start, stop) if self.memory.storages[a.storage].dynamic
            else (name, start, stop)
            for a, (name, start, stop) in zip(op.reads, ranges, strict=True)
        )  # fmt: skip

    def _bind(self, accesses: tuple[Access, ...]) -> tuple[dict[tuple[str, int | None], Tensor], tuple[BoundRange, ...]]:
        views: dict[tuple[str, int | None], Tensor] = {}
        ranges: list[BoundRange] = []
        for access in accesses:
            if self.memory.storages[access.storage].dynamic:
                ranges.append((self.memory.storages[access.storage].name, access.start, access.stop))
                continue
            view = self.memory.bind(access)
            what = access.tag.what
            key = access.tag.micro if what == "loss" else access.tag.block
            views[what, key] = view
            ranges.append(self.memory.located(view))
        return views, tuple(ranges)

    # ---- views ---------------------------------------------------------------------------------------------------------

    def block(self, index: int) -> BlockSpec:
        return self.schedule.model.blocks[index]

    def params(self, view: Tensor, block: BlockSpec, dtype: torch.dtype) -> list[Tensor]:
        """A block's parameters (or their gradients) as shaped views of its bytes."""
        flat = view.view(dtype)
        return [flat[p.offset : p.end].view(p.shape) for p in block.params]

    def weights(self, view: Tensor, block: BlockSpec) -> list[Tensor]:
        return self.params(view, block, DTYPES[self.schedule.recipe.precision])

    def hidden(self, view: Tensor) -> Tensor:
        recipe = self.schedule.recipe
        shape = (recipe.micro_batch_size, recipe.seq_len, self.schedule.model.hidden_size)
        return view.view(DTYPES[recipe.precision]).view(shape)

    def inputs(self, view: Tensor) -> dict[str, Tensor]:
        """A micro-batch's inputs by name, as tensors over its bytes on the device."""
        return {
            f.name: view[f.offset_nbytes : f.offset_nbytes + f.nbytes].view(getattr(torch, f.dtype)).view(f.shape)
            for f in input_fields(self.schedule.model, self.schedule.recipe)
        }


# ---- kernels: one a kind; each returns the bytes it copied, or None ------------------------------------------------------


def _copy(b: Kernels, target: Tensor, source: Tensor) -> int:
    if target.numel() != source.numel():
        raise ValueError(f"copy of {source.numel()} bytes into {target.numel()}")
    b.device.copy(target, source)
    return source.numel()


def _input(b: Kernels, x: Operands, step: StepContext) -> int:
    (target,) = x.writes.values()
    assert x.op.micro is not None
    return _copy(b, target, step.batch[x.op.micro])


def _move(b: Kernels, x: Operands, step: StepContext) -> int:
    return sum(_copy(b, x.writes[key], x.reads[key]) for key in x.writes)


def _report(b: Kernels, x: Operands, step: StepContext) -> None:
    # Per micro-batch FP32 sums over the tokens of the step; added in double, in order.
    step.loss = sum(float(x.reads["loss", m].view(torch.float32)[0]) for m in range(b.schedule.recipe.micro_batches))


def _forward(b: Kernels, x: Operands, step: StepContext) -> None:
    op = x.op
    assert op.block is not None
    block = b.block(op.block)
    weights, inputs = b.weights(x.reads["weights", op.block], block), b.inputs(x.reads["input", None])
    if block.layer is None:
        b.hidden(x.writes["hidden", 1]).copy_(embedding_forward(weights[0], inputs["ids"]))
        return
    y, saved = b._layers[block.layer].forward(weights, b.hidden(x.reads["hidden", op.block]), layer_inputs(inputs))
    b.hidden(x.writes["hidden", op.block + 1]).copy_(y)
    for a in op.writes:
        if a.tag.what == "saved":
            name = f"saved[{op.block}.{op.micro}]"
            b._saved[b.memory.storages[a.storage].name] = (name, saved)


def _loss(b: Kernels, x: Operands, step: StepContext) -> None:
    head, recipe = b.schedule.model.blocks[-1], b.schedule.recipe
    inputs, n_valid = b.inputs(x.reads["input", None]), max(step.n_valid, 1)
    weights = b.weights(x.reads["weights", head.index], head)
    if head.tied:
        weights += b.weights(x.reads["weights", 0], b.block(0))
    hidden = b.hidden(x.reads["hidden", head.index])
    if ("dhidden", head.index) not in x.writes:  # evaluation: no gradient is asked for
        loss = b._head.loss_only(weights, hidden, inputs["targets"], n_valid, recipe.loss_tile)
    else:
        accumulators = b.params(x.writes["acc", head.index], head, torch.float32)
        if head.tied:
            accumulators += b.params(x.writes["acc", 0], b.block(0), torch.float32)
        loss, dx = b._head.loss_forward_backward(
            weights, hidden, inputs["targets"], n_valid, recipe.loss_tile, accumulators, first=x.op.micro == 0
        )
        b.hidden(x.writes["dhidden", head.index]).copy_(dx)
    x.writes["loss", x.op.micro].view(torch.float32)[0] = loss


def _backward(b: Kernels, x: Operands, step: StepContext) -> None:
    op = x.op
    assert op.block is not None
    block, inputs = b.block(op.block), b.inputs(x.reads["input", None])
    dy = b.hidden(x.reads["dhidden", op.block + 1])
    accumulators = b.params(x.writes["acc", op.block], block, torch.float32)
    first = ("acc", op.block) not in x.reads
    if block.layer is None:
        embedding_backward(inputs["ids"], dy, accumulators[0], first=first, padding_idx=b.schedule.model.padding_idx)
        return
    template, weights = b._layers[block.layer], b.weights(x.reads["weights", op.block], block)
    names = [b.memory.storages[a.storage].name for a in op.reads if a.tag.what == "saved"]
    if names:
        _, saved = b._saved.pop(names[0])
    else:
        _, saved = template.forward(weights, b.hidden(x.reads["hidden", op.block]), layer_inputs(inputs))
    dx, grads = template.backward(weights, saved, dy)
    accumulate(accumulators, grads, first)
    b.hidden(x.writes["dhidden", op.block]).copy_(dx)


def _pack(b: Kernels, x: Operands, step: StepContext) -> None:
    assert x.op.block is not None
    block, dtype = b.block(x.op.block), DTYPES[b.schedule.recipe.gradient_dtype]
    sums, grads = x.reads["acc", block.index].view(torch.float32), x.writes["grad", block.index].view(dtype)
    b.device.pack(block, sums, grads, x.writes["partials", None].view(torch.float32))


def _constants(b: Kernels, x: Operands, step: StepContext) -> None:
    _set_constants(b, x, step, factor=1.0, skip=step.n_valid == 0)


def _clip(b: Kernels, x: Operands, step: StepContext) -> None:
    partials = x.reads["partials", None].view(torch.float32).numpy()
    params = [p for block in b.schedule.model.blocks for p in block.params]
    bad = first_nonfinite(partials, [n_tiles(p.numel) for p in params], [p.name for p in params])
    norm = finish_norm(partials)
    x.writes["norm", None].view(torch.float64).numpy()[:] = (norm, 0.0 if bad is None else 1.0)
    step.norm = norm
    if bad is not None:
        step.skipped = f"non-finite gradient in {bad}"
    elif step.n_valid == 0:
        step.skipped = "no valid token in the batch"
    if ("constants", None) in x.writes:
        factor = clip_factor(norm, b.schedule.recipe.clip_norm) if bad is None else 1.0
        _set_constants(b, x, step, factor=factor, skip=step.skipped is not None)
    elif bad is not None:
        raise NonFiniteGradient(
            f"{step.skipped}, and during_backward has updated weights with it already; resume from a checkpoint"
        )


def _set_constants(b: Kernels, x: Operands, step: StepContext, *, factor: float, skip: bool) -> None:
    values = step_constants(b.schedule.recipe.optimizer, b.counts.applied + 1, factor=factor, skip=skip)
    x.writes["constants", None].view(torch.float32).numpy()[:] = values
    if not skip:
        b.counts.applied += 1


def _update(b: Kernels, x: Operands, step: StepContext) -> None:
    """Parameters are updated one by one: decay is a matter of the parameter, and padding between them is left alone."""
    assert x.op.block is not None
    block = b.block(x.op.block)
    state = {what: x.writes[what, block.index] for what in ("weights", "lo", "m", "v") if (what, block.index) in x.writes}
    first = next(a.start for a in x.op.writes if a.tag.what == "m") // 4
    end = first + state["m"].numel() // 4
    weight, link = DTYPES[b.schedule.recipe.precision], DTYPES[b.schedule.recipe.gradient_dtype]
    flat = {
        "weights": state["weights"].view(weight), "m": state["m"].view(torch.float32), "v": state["v"].view(torch.float32),
        "grad": x.reads["grad", block.index].view(link),
    }  # fmt: skip
    if "lo" in state:
        flat["lo"] = state["lo"].view(torch.int16)
    (constants,) = (view for (what, _), view in x.reads.items() if what == "constants")
    for p in block.params:
        i, j = max(p.offset, first) - first, min(p.end, end) - first
        if i < j:
            cut = {what: plane[i:j] for what, plane in flat.items()}
            master = (cut["weights"], cut["lo"]) if "lo" in cut else (cut["weights"],)
            operands = (master, cut["m"], cut["v"], cut["grad"], constants.view(torch.float32))
            if x.op.lane == "cpu":
                adamw_update(*operands, decayed=decays(p), threads=b.schedule.plan.adam_threads)
            else:
                b.device.adamw(*operands, decayed=decays(p))


def decays(param: ParamSpec) -> bool:
    """Weight decay applies to matrices, not to norms and biases."""
    return len(param.shape) > 1


_KERNELS: dict[str, Callable[[Kernels, Operands, Any], int | None]] = {
    "input": _input, "load": _move, "forward": _forward, "loss": _loss, "backward": _backward, "pack": _pack,
    "save": _move, "report": _report, "constants": _constants, "clip": _clip, "update": _update,
}  # fmt: skip
