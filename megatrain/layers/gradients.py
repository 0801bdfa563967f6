"""Gradients, and FP32 accumulators of them: one rule for every block and placement.

A parameter's gradients over micro-batches are added in FP32, in micro-batch order, and rounded once when the sum
leaves. The first micro-batch overwrites, so no accumulator has to be cleared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def gradients(output: Tensor | GradientEdge, inputs: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """The gradients of `inputs`, given that of `output`. It frees the graph.

    On the calling thread. A GPU's gradients otherwise come from a thread of autograd's, which holds on to them for a while
    after it has handed them over: what a run takes of the GPU's memory would depend on how soon that thread has a turn.
    """
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad((output,), tuple(inputs), (dy,))  # type: ignore[arg-type]


def accumulate(acc: Sequence[Tensor], grads: Sequence[Tensor], first: bool) -> None:
    """acc = grad if `first` else acc + grad, in FP32, pair by pair. `acc` are FP32 with the shapes of `grads`."""
    if first:
        torch._foreach_copy_(list(acc), list(grads))
    else:
        torch._foreach_add_(list(acc), [grad.float() for grad in grads])
