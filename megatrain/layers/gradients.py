"""FP32 gradient accumulators: one rule for every block and placement.

A parameter's gradients over micro-batches are added in FP32, in micro-batch order, and rounded once when the sum
leaves. The first micro-batch overwrites, so no accumulator has to be cleared.
"""

from __future__ import annotations

from torch import Tensor


def accumulate(acc: Tensor, grad: Tensor, first: bool) -> None:
    """acc = grad if `first` else acc + grad, in FP32. `acc` is FP32 and has `grad`'s shape."""
    if first:
        acc.copy_(grad)
    else:
        acc.add_(grad)
