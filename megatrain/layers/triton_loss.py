# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (Triton kernels are no Python functions: their arguments have no types of Python's.)
"""The head's cross-entropy on a GPU: one Triton kernel that turns a tile's logits into their own gradient, in place.

A program takes a row of logits z [V] in the compute type and its target t, and works in FP32:

    first pass    m = max z,  s = sum of exp(z - m)         (online: s is rescaled when m grows)
    loss          log s + (m - z[t])
    second pass   dz = (exp(z - m) / s - onehot(t)) * scale  rounded to the compute type, over z

So the memory of a tile's loss is that of its logits: 2 bytes a logit in BF16. An ignored row is not read: its loss is 0
and its gradient zeros. A row with a NaN or an infinity above its other logits gets a loss that is not finite.

The bits depend on the row, V and `_BLOCK` alone: a lane of the block adds its own columns in order, one tree adds the
lanes, nothing is atomic and nothing is tuned at run time. Without the gradient the loss takes the same steps.

Import this on a machine with a GPU only: others have no Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatrain.layers.inputs import IGNORE

# Logits a program holds at once. Part of the bits.
_BLOCK = 4096


@triton.jit
def _cross_entropy(
    logits, targets, losses, scale, vocab, IGNORE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # a tile of many rows has more than 2^31 logits
    logits += row * vocab
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    if target == IGNORE:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, vocab, BLOCK):
                at = start + columns
                tl.store(logits + at, tl.zeros([BLOCK], tl.float32).to(logits.dtype.element_ty), mask=at < vocab)
        return
    # Read before anything is written: the first pass's sums are a barrier between this and the second pass.
    aimed = tl.load(logits + target).to(tl.float32)
    # The lowest FP32 number, not -inf: -inf less -inf were NaN if a first block had nothing above -inf.
    top = tl.full((), -3.4028234663852886e38, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + columns
        z = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, axis=0))
        sums = sums * tl.exp(top - higher) + tl.exp(z - higher)
        top = higher
    total = tl.sum(sums, axis=0)
    tl.store(losses + row, tl.log(total) + (top - aimed))
    if GRADIENT:
        inverse = 1.0 / total
        for start in range(0, vocab, BLOCK):
            at = start + columns
            z = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            p = tl.exp(z - top) * inverse
            dz = tl.where(at == target.to(tl.int32), p - 1.0, p) * scale
            tl.store(logits + at, dz.to(logits.dtype.element_ty), mask=at < vocab)


def cross_entropy(logits: Tensor, targets: Tensor, n_valid: int, *, gradient: bool) -> Tensor:
    """The losses [n] in FP32 of contiguous `logits` [n, V] in BF16 and `targets` [n] int64, each in 0..V-1 or `IGNORE`.

    With `gradient` the logits become the gradient of (sum of losses) / max(`n_valid`, 1); without it they stay. Losses
    are not divided. On the current stream.
    """
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _cross_entropy[(logits.shape[0],)](
        logits, targets, losses, 1.0 / max(n_valid, 1), logits.shape[1],
        IGNORE=IGNORE, GRADIENT=gradient, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return losses
