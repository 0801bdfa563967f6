"""FP32 gradient accumulators: one rule for every block and placement.

A parameter's gradients over micro-batches are added in FP32, in micro-batch order, and rounded once when the sum
leaves. The first micro-batch overwrites, so no accumulator has to be cleared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accumulate(acc: Sequence[Tensor], grads: Sequence[Tensor], first: bool) -> None:
    """acc = grad if `first` else acc + grad, in FP32, pair by pair. `acc` are FP32 with the shapes of `grads`."""
    if first:
        torch._foreach_copy_(list(acc), list(grads))
    else:
        torch._foreach_add_(list(acc), [grad.float() for grad in grads])
