"""Kernels: what each kind of op does to the bytes it is given, the same for every device.

An op touches the same bytes in every step. So it is *prepared* when it first runs: its operands are found by what their tags say
they hold, bound, and turned into the tensors its computation takes; what is left is a function of the step. One function a kind
prepares; it takes bytes from nowhere else. What differs between devices (how bytes are copied, how gradients are packed, how
AdamW runs on the device) comes in as `DeviceOps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from megatrain.optim.kernel import PreparedUpdate, Run, UpdateSeries, native_problem, prepare_adamw
from megatrain.optim.norm import finish_norm, first_nonfinite, n_tiles
from megatrain.schedule.layout import input_fields
from megatrain.schedule.nouns import Access, Lane, Op, Schedule


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
    """One op with its bytes. `reads` and `writes` are keyed by (what they hold, block; micro-batch for losses)."""

    op: Op
    reads: dict[tuple[str, int | None], Tensor]
    writes: dict[tuple[str, int | None], Tensor]


Kernel = Callable[[StepContext], None]
"""A prepared op: does its work for one step."""


@dataclass(frozen=True, slots=True)
class CpuUpdate:
    """The kernel of an update on the cpu lane."""

    update: PreparedUpdate

    def __call__(self, step: StepContext) -> None:
        self.update()


class Prepared(NamedTuple):
    """An op that has run before: its kernel, what running it touches, and whether that depends on kept handles."""

    op: Op
    kernel: Kernel
    ran: Ran
    dynamic: bool


class DeviceOps(Protocol):
    """What a backend adds. Called on the lane the op runs on; a device may finish later, in the order of the lane."""

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        """Copy uint8 bytes between host and device, either way."""
        ...

    def repeated(self, kernel: Kernel) -> Kernel:
        """A kernel that does what `kernel` does, for one that launches the same work on the same bytes in every step and reads
        nothing of the step."""
        ...

    def pack(self, block: BlockSpec, sums: Tensor, grads: Tensor, partials: Tensor) -> None:
        """Round a block's FP32 `sums` [span] to the type of `grads` [span] and write the norm partials of the result, parameter
        after parameter."""
        ...

    def prepare_adamw(
        self, master: tuple[Tensor, ...], m: Tensor, v: Tensor, grad: Tensor, constants: Tensor, runs: Sequence[Run]
    ) -> Callable[[], None]:
        """`megatrain.optim.kernel.prepare_adamw` where the block's state lies on the device."""
        ...


@dataclass(slots=True, kw_only=True)
class Kernels:
    """Runs the ops of `schedule` (and of the evaluation schedule over the same storages) on `memory`."""

    schedule: Schedule
    memory: Memory
    device: DeviceOps
    counts: UpdateCount = field(default_factory=UpdateCount)
    saved: dict[str, tuple[str, Saved]] = field(default_factory=dict)
    layers: tuple[LayerTemplate, ...] = field(init=False)
    head: HeadTemplate = field(init=False)
    _prepared: dict[int, Prepared] = field(default_factory=dict)
    _alike: dict[tuple[object, ...], Prepared] = field(default_factory=dict)
    _series: dict[tuple[int, ...], tuple[UpdateSeries, tuple[Prepared, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, recipe = self.schedule.model, self.schedule.recipe
        self.layers = layer_templates(model, attention=recipe.attention, compiled=recipe.compiled)
        self.head = head_template(model)

    def run(self, op: Op, step: Any) -> Ran:
        """Run `op` and say what it bound."""
        prepared = self._prepared_of(op)
        ran = prepared.ran
        if prepared.dynamic:  # before it runs: a handle is gone when its reader has ended
            ran = Ran(self._handles(op, ran.reads), ran.writes, ran.nbytes)
        prepared.kernel(step)
        return ran

    def joins(self, op: Op) -> bool:
        """Whether `series` takes it."""
        return op.kind == "update" and op.lane == "cpu" and native_problem() is None

    def series(self, ops: Sequence[Op]) -> tuple[UpdateSeries, list[Ran]]:
        """Ops that `joins` takes as one call, and what each binds."""
        key = tuple(map(id, ops))
        series, prepared = self._series.get(key, (None, ()))
        if series is None or any(known.op is not op for known, op in zip(prepared, ops, strict=True)):
            prepared = tuple(map(self._prepared_of, ops))
            series = UpdateSeries([p.kernel.update for p in prepared if isinstance(p.kernel, CpuUpdate)])
            self._series[key] = series, prepared
        return series, [known.ran for known in prepared]

    def rehearse(self) -> None:
        """Compile what a step will run, before there is a state: forward and backward of a layer of each structure, and the loss,
        on memory that holds nothing yet. What they write means nothing, as what lay there did not."""
        inputs = self.memory.named("input")
        inputs.zero_()  # token ids, which are looked up
        for op in self._to_rehearse():
            kernel = _KERNELS[op.kind](self, Operands(op, self._bind(op.reads)[0], self._bind(op.writes)[0]))
            kernel(StepContext(batch=(), n_valid=1))
        inputs.fill_(0xFF)

    def _to_rehearse(self) -> Iterator[Op]:
        """Of the first micro-batch; a kept forward comes before the backward that takes what it kept."""
        layers = {id(self.layers[block.layer]): block.index for block in self.schedule.model.layers if block.layer is not None}
        for op in self.schedule.prologue.ops:
            if op.micro == 0 and (op.kind == "loss" or (op.kind in ("forward", "backward") and op.block in layers.values())):
                yield op

    def forget(self) -> None:
        """Let go of all that was prepared, and of what refers to it in turn. Nothing runs after this."""
        self._prepared.clear()
        self._alike.clear()
        self._series.clear()
        self.saved.clear()

    def _prepared_of(self, op: Op) -> Prepared:
        prepared = self._prepared.get(id(op))
        if prepared is None or prepared.op is not op:
            prepared = self._prepared[id(op)] = self._prepare(op)
        return prepared

    def _prepare(self, op: Op) -> Prepared:
        # Two parts have ops that touch the same bytes in the same way, where only their order may differ: they share a kernel.
        touched = ((a.tag.what, a.tag.block, a.tag.micro, *a[:3]) for a in (*op.reads, *op.writes))
        key = (op.name, op.lane, len(op.reads), *touched)
        alike = self._alike.get(key)
        if alike is not None:
            return alike._replace(op=op)
        reads, read_ranges = self._bind(op.reads)
        writes, write_ranges = self._bind(op.writes)
        kernel = _KERNELS[op.kind](self, Operands(op, reads, writes))
        if op.lane == "compute" and op.kind in _REPEATED:
            kernel = self.device.repeated(kernel)
        nbytes = sum(stop - start for _, start, stop in write_ranges)
        dynamic = any(self.memory.storages[a.storage].dynamic for a in op.reads)
        prepared = self._alike[key] = Prepared(op, kernel, Ran(read_ranges, write_ranges, nbytes), dynamic)
        return prepared

    def _handles(self, op: Op, ranges: tuple[BoundRange, ...]) -> tuple[BoundRange, ...]:
        """`ranges` with every kept handle named by the storage that it says itself it was made for."""
        return tuple(
            (self.saved[name][0] if name in self.saved else name, start, stop) if self.memory.storages[a.storage].dynamic
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


# ---- one function a kind: it prepares an op ------------------------------------------------------------------------------


def _same_size(target: Tensor, source: Tensor) -> None:
    if target.numel() != source.numel():
        raise ValueError(f"copy of {source.numel()} bytes into {target.numel()}")


def _input(b: Kernels, x: Operands) -> Kernel:
    (target,) = x.writes.values()
    lane, micro = x.op.lane, x.op.micro
    assert micro is not None

    def kernel(step: StepContext) -> None:
        source = step.batch[micro]
        _same_size(target, source)
        b.device.copy(lane, target, source)

    return kernel


def _move(b: Kernels, x: Operands) -> Kernel:
    lane, pairs = x.op.lane, [(x.writes[key], x.reads[key]) for key in x.writes]
    for target, source in pairs:
        _same_size(target, source)

    def kernel(step: StepContext) -> None:
        for target, source in pairs:
            b.device.copy(lane, target, source)

    return kernel


def _report(b: Kernels, x: Operands) -> Kernel:
    # Per micro-batch FP32 sums over the tokens of the step; added in double, in order.
    losses = [x.reads["loss", m].view(torch.float32).numpy() for m in range(b.schedule.recipe.micro_batches)]

    def kernel(step: StepContext) -> None:
        step.loss = sum(float(loss[0]) for loss in losses)

    return kernel


def _forward(b: Kernels, x: Operands) -> Kernel:
    op = x.op
    assert op.block is not None
    block = b.block(op.block)
    weights, inputs = b.weights(x.reads["weights", op.block], block), b.inputs(x.reads["input", None])
    if block.layer is None:
        output, ids = b.hidden(x.writes["hidden", 1]), inputs["ids"]

        def embed(step: StepContext) -> None:
            output.copy_(embedding_forward(weights[0], ids))

        return embed
    template, of_layer = b.layers[block.layer], layer_inputs(inputs)
    hidden, after = b.hidden(x.reads["hidden", op.block]), b.hidden(x.writes["hidden", op.block + 1])
    handle = f"saved[{op.block}.{op.micro}]"
    kept = [b.memory.storages[a.storage].name for a in op.writes if a.tag.what == "saved"]

    def kernel(step: StepContext) -> None:
        y, saved = template.forward(weights, hidden, of_layer)
        after.copy_(y)
        for name in kept:
            b.saved[name] = (handle, saved)

    return kernel


def _loss(b: Kernels, x: Operands) -> Kernel:
    head, tile = b.schedule.model.blocks[-1], b.schedule.recipe.loss_tile
    targets, first = b.inputs(x.reads["input", None])["targets"], x.op.micro == 0
    weights = b.weights(x.reads["weights", head.index], head)
    if head.tied:
        weights += b.weights(x.reads["weights", 0], b.block(0))
    hidden, result = b.hidden(x.reads["hidden", head.index]), x.writes["loss", x.op.micro].view(torch.float32)
    if ("dhidden", head.index) not in x.writes:  # evaluation: no gradient is asked for

        def loss_only(step: StepContext) -> None:
            result[0] = b.head.loss_only(weights, hidden, targets, max(step.n_valid, 1), tile)

        return loss_only
    accumulators = b.params(x.writes["acc", head.index], head, torch.float32)
    if head.tied:
        accumulators += b.params(x.writes["acc", 0], b.block(0), torch.float32)
    dhidden = b.hidden(x.writes["dhidden", head.index])

    def kernel(step: StepContext) -> None:
        n_valid = max(step.n_valid, 1)
        loss, dx = b.head.loss_forward_backward(weights, hidden, targets, n_valid, tile, accumulators, first=first)
        dhidden.copy_(dx)
        result[0] = loss

    return kernel


def _backward(b: Kernels, x: Operands) -> Kernel:
    op = x.op
    assert op.block is not None
    block, inputs = b.block(op.block), b.inputs(x.reads["input", None])
    dy = b.hidden(x.reads["dhidden", op.block + 1])
    accumulators = b.params(x.writes["acc", op.block], block, torch.float32)
    first = ("acc", op.block) not in x.reads
    if block.layer is None:
        ids, padding = inputs["ids"], b.schedule.model.padding_idx

        def embedding(step: StepContext) -> None:
            embedding_backward(ids, dy, accumulators[0], first=first, padding_idx=padding)

        return embedding
    template, weights = b.layers[block.layer], b.weights(x.reads["weights", op.block], block)
    of_layer, before = layer_inputs(inputs), b.hidden(x.writes["dhidden", op.block])
    kept = [b.memory.storages[a.storage].name for a in op.reads if a.tag.what == "saved"]
    hidden = None if kept else b.hidden(x.reads["hidden", op.block])

    def kernel(step: StepContext) -> None:
        if hidden is None:
            _, saved = b.saved.pop(kept[0])
        else:
            saved = template.saved_by(weights, hidden, of_layer)
        dx, grads = template.backward(weights, saved, dy)
        accumulate(accumulators, grads, first)
        before.copy_(dx)

    return kernel


def _pack(b: Kernels, x: Operands) -> Kernel:
    assert x.op.block is not None
    block, dtype = b.block(x.op.block), DTYPES[b.schedule.recipe.gradient_dtype]
    sums, grads = x.reads["acc", block.index].view(torch.float32), x.writes["grad", block.index].view(dtype)
    partials = x.writes["partials", None].view(torch.float32)
    return lambda step: b.device.pack(block, sums, grads, partials)


def _constants(b: Kernels, x: Operands) -> Kernel:
    return lambda step: _set_constants(b, x, factor=1.0, skip=step.n_valid == 0)


def _clip(b: Kernels, x: Operands) -> Kernel:
    partials = x.reads["partials", None].view(torch.float32).numpy()
    norm_and_flag = x.writes["norm", None].view(torch.float64).numpy()
    params = [p for block in b.schedule.model.blocks for p in block.params]
    counts, names = [n_tiles(p.numel) for p in params], [p.name for p in params]

    def kernel(step: StepContext) -> None:
        bad = first_nonfinite(partials, counts, names)
        step.norm = norm = finish_norm(partials)
        norm_and_flag[:] = (norm, 0.0 if bad is None else 1.0)
        if bad is not None:
            step.skipped = f"non-finite gradient in {bad}"
        elif step.n_valid == 0:
            step.skipped = "no valid token in the batch"
        if ("constants", None) in x.writes:
            factor = clip_factor(norm, b.schedule.recipe.clip_norm) if bad is None else 1.0
            _set_constants(b, x, factor=factor, skip=step.skipped is not None)
        elif bad is not None:
            raise NonFiniteGradient(
                f"{step.skipped}, and during_backward updates weights before that is known; start again from saved weights"
            )

    return kernel


def _set_constants(b: Kernels, x: Operands, *, factor: float, skip: bool) -> None:
    values = step_constants(b.schedule.recipe.optimizer, b.counts.applied + 1, factor=factor, skip=skip)
    x.writes["constants", None].view(torch.float32).numpy()[:] = values
    if not skip:
        b.counts.applied += 1


def _update(b: Kernels, x: Operands) -> Kernel:
    """Parameter by parameter: decay is a matter of the parameter, and padding between them is left alone."""
    assert x.op.block is not None
    block = b.block(x.op.block)
    weight, link = DTYPES[b.schedule.recipe.precision], DTYPES[b.schedule.recipe.gradient_dtype]
    master: tuple[Tensor, ...] = (x.writes["weights", block.index].view(weight),)
    if ("lo", block.index) in x.writes:
        master += (x.writes["lo", block.index].view(torch.int16),)
    m, v = (x.writes[what, block.index].view(torch.float32) for what in ("m", "v"))
    grad = x.reads["grad", block.index].view(link)
    (constants,) = (view.view(torch.float32) for (what, _), view in x.reads.items() if what == "constants")
    # The weights lie as the block has them wherever they are; the rest of a chunk may lie on its own.
    first = next(a.start for a in x.op.writes if a.tag.what == "weights") // weight.itemsize
    end = first + m.numel()
    runs = [
        Run(max(p.offset, first) - first, min(p.end, end) - first, decays(p))
        for p in block.params
        if p.offset < end and p.end > first
    ]
    if x.op.lane == "cpu":
        return CpuUpdate(prepare_adamw(master, m, v, grad, constants, runs, threads=b.schedule.plan.adam_threads))
    update = b.device.prepare_adamw(master, m, v, grad, constants, runs)
    return lambda step: update()


def decays(param: ParamSpec) -> bool:
    """Weight decay applies to matrices, not to norms and biases."""
    return len(param.shape) > 1


_KERNELS: dict[str, Callable[[Kernels, Operands], Kernel]] = {
    "input": _input, "load": _move, "stash": _move, "fetch": _move,
    "forward": _forward, "loss": _loss, "backward": _backward, "pack": _pack,
    "save": _move, "report": _report, "constants": _constants, "clip": _clip, "update": _update,
}  # fmt: skip
_REPEATED = ("forward", "backward", "pack", "update")
"""Kinds whose kernels read nothing of the step: what changes from step to step comes to them in memory."""
