"""What a forward saves for its backward, with every weight left out.

A block's weights lie in a slot that other blocks' weights will pass through before the backward runs. So autograd may
keep activations, but no weight and no view of one. Two seams of autograd could hold one, and both are closed here:

- *Saved tensors.* While the forward runs, a pack hook sees every tensor an operation saves. One whose memory lies in a
  weight is replaced by a `WeightView`: which weight, at what byte offset, with what shape, strides and dtype. The
  backward's unpack hook builds it again from the weights which that backward was given, wherever they lie.
- *Leaves.* A leaf's gradient node owns the leaf. So the leaves are anchors, tensors of a weight's shape over a single
  element with all strides 0, and `bind_weights` makes tensors that read the slot's memory but send their gradients to
  the anchors.

Everything else that was saved (activations, and views of the block's input and of its rotary tables and mask) stays in
the graph as it is. The block's input and `LayerInputs` must therefore hold the same values until the backward has run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightView:
    """A view of weight `index`: bytes from the weight's first to its own, shape and strides in elements of `dtype`."""

    index: int
    offset_nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def rebuild(self, weights: Sequence[Tensor]) -> Tensor:
        """The same view of `weights[index]` where that weight lies now."""
        weight = weights[self.index]
        start_nbytes = weight.storage_offset() * weight.element_size() + self.offset_nbytes
        return alias(weight, self.dtype, start_nbytes // self.dtype.itemsize, self.shape, self.stride)


@dataclass(slots=True)
class Rebinding:
    """Where one backward's unpack hook finds the weights; holds them only while that backward runs."""

    weights: Sequence[Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One forward's opaque handle: the graph behind its output, the leaves gradients are asked for, and the rebinding.

    It serves one backward, which frees the graph.
    """

    output: GradientEdge
    x: Tensor
    anchors: tuple[Tensor, ...]
    rebinding: Rebinding


def alias(memory: Tensor, dtype: torch.dtype, start: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A tensor over `memory`'s storage that autograd knows as no view of it; `start` counts elements of `dtype`."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), start, shape, stride)


class _Bind(torch.autograd.Function):
    """(weights, anchors) -> tensors with the weights' memory and the anchors' gradients."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.n = n
        return tuple(alias(w, w.dtype, int(w.storage_offset()), w.shape, w.stride()) for w in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None,) * (1 + ctx.n), *grads)


def bind_weights(weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(bound, anchors): the weights as graph inputs, and the leaves that receive their gradients. Copies nothing.

    The anchors share one element that nobody reads. Call it with gradients enabled.
    """
    element = torch.empty(1, dtype=weights[0].dtype, device=weights[0].device)
    anchors = tuple(element.expand(w.shape).requires_grad_() for w in weights)
    bound: tuple[Tensor, ...] = _Bind.apply(len(weights), *weights, *anchors)  # type: ignore[no-untyped-call]
    return bound, anchors


def weight_free(weights: Sequence[Tensor], rebinding: Rebinding) -> AbstractContextManager[object]:
    """A context in which whatever autograd saves passes the one pack hook and, later, the one unpack hook."""
    spans = sorted((w.data_ptr(), w.data_ptr() + w.nbytes, index) for index, w in enumerate(weights))
    starts = [start for start, _, _ in spans]
    device = weights[0].device  # the hooks outlive this call: they must not hold `weights`

    def pack(tensor: Tensor) -> WeightView | Tensor:
        address = tensor.data_ptr()
        at = bisect_right(starts, address) - 1
        if at < 0 or address >= spans[at][1] or tensor.device != device:
            # Detached, because a saved output must not own the node that owns it.
            return tensor.detach()
        start, _, index = spans[at]
        offset, shape, stride = address - start, tuple(tensor.shape), tensor.stride()
        return WeightView(index=index, offset_nbytes=offset, shape=shape, stride=stride, dtype=tensor.dtype)

    def unpack(packed: WeightView | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert rebinding.weights is not None, "a saved weight was asked for outside LayerTemplate.backward"
        return packed.rebuild(rebinding.weights)

    return saved_tensors_hooks(pack, unpack)
