"""GPU kernels in Triton: AdamW and packing, each the twin of a CPU kernel to the bit.

Both are bound by memory. Their bits are those of `megatrain.optim`: contraction into FMA is off and an FMA is asked for
where the specification has one, division and square root are correctly rounded, and the norm's tree adds pairs, whose order
cannot matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatrain.optim.constants import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    FACTOR,
    INV_SQRT_BC2,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    SKIP,
    STEP_SIZE,
)
from megatrain.optim.kernel import HALF_RECIPROCAL
from megatrain.recipe import NORM_TILE

_INDEX = {
    "I_SKIP": SKIP, "I_FACTOR": FACTOR, "I_BETA1": BETA1, "I_OMB1": ONE_MINUS_BETA1, "I_BETA2": BETA2, "I_OMB2": ONE_MINUS_BETA2,
    "I_INV": INV_SQRT_BC2, "I_EPS": EPS, "I_STEP": STEP_SIZE, "I_DECAY": DECAY,
}  # fmt: skip
_BLOCK = 1024


@triton.jit
def _adamw(
    hi, lo, m, v, g, c, n,
    SPLIT: tl.constexpr, DECAYED: tl.constexpr, BLOCK: tl.constexpr,
    I_SKIP: tl.constexpr, I_FACTOR: tl.constexpr, I_BETA1: tl.constexpr, I_OMB1: tl.constexpr, I_BETA2: tl.constexpr,
    I_OMB2: tl.constexpr, I_INV: tl.constexpr, I_EPS: tl.constexpr, I_STEP: tl.constexpr, I_DECAY: tl.constexpr,
    HALF_RECIPROCAL: tl.constexpr,
):  # fmt: skip
    if tl.load(c + I_SKIP) != 0.0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    # Constants: FP64 holds products of two FP32 numbers exactly. Scalars, so FP64 costs nothing.
    factor, inv = tl.load(c + I_FACTOR).to(tl.float64), tl.load(c + I_INV).to(tl.float64)
    c1_wide = tl.load(c + I_OMB1).to(tl.float64) * factor
    c2_wide = tl.load(c + I_OMB2).to(tl.float64) * (factor * factor)
    a_wide = tl.load(c + I_STEP).to(tl.float64) / inv
    c1, c2, a = c1_wide.to(tl.float32), c2_wide.to(tl.float32), a_wide.to(tl.float32)
    c1_lo = (c1_wide - c1.to(tl.float64)).to(tl.float32)
    c2_lo = (c2_wide - c2.to(tl.float64)).to(tl.float32)
    a_lo = (a_wide - a.to(tl.float64)).to(tl.float32)
    z = tl.where(a >= 1.1754943508222875e-38, (1.0 / a.to(tl.float64)).to(tl.float32), 0.0)
    e = (tl.load(c + I_EPS).to(tl.float64) / inv).to(tl.float32)
    scaled = (c1_lo != 0.0) | (c2_lo != 0.0)
    beta1, beta2 = tl.load(c + I_BETA1), tl.load(c + I_BETA2)

    gi = tl.load(g + at, mask=live, other=0.0).to(tl.float32)
    mi = tl.load(m + at, mask=live, other=0.0)
    # Negation is a product with -1: a difference from zero would lose the sign of a zero.
    p, q = beta1 * mi, c1 * gi
    q_lo = tl.fma(c1, gi, q * -1.0)
    q_lo = tl.where(scaled, tl.fma(c1_lo, gi, q_lo), q_lo)
    s = p + q
    t = s - p
    s_lo = ((p - (s - t)) + (q - t)) + (tl.fma(beta1, mi, p * -1.0) + q_lo)
    h = gi * gi
    gain = tl.where(scaled, tl.fma(c2, h, c2_lo * h), c2 * h)
    vi = tl.fma(beta2, tl.load(v + at, mask=live, other=0.0), gain)
    r = tl.sqrt_rn(vi)
    r_lo = tl.fma(r * -1.0, r, vi) * (HALF_RECIPROCAL - r.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    y = tl.div_rn(a * -1.0, r + e)
    f = (tl.fma(y, e + r_lo, tl.fma(y, r, a)) + a_lo) * z
    update = tl.fma(y, s, y * tl.fma(s, f, s_lo))
    if SPLIT:
        upper = tl.load(hi + at, mask=live, other=0).to(tl.int32)
        w = ((upper << 16) + tl.load(lo + at, mask=live, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        w = tl.load(hi + at, mask=live, other=0.0)
    decay = tl.load(c + I_DECAY) if DECAYED else 1.0
    w = tl.fma(w, decay, update)
    tl.store(m + at, s + s_lo, mask=live)
    tl.store(v + at, vi, mask=live)
    if SPLIT:
        bits = w.to(tl.int32, bitcast=True)
        # The canonical NaN of the device would round up to a hi of -0; keep it a NaN.
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
        upper = (bits + 0x8000) >> 16
        tl.store(hi + at, upper.to(tl.int16), mask=live)
        tl.store(lo + at, (bits - (upper << 16)).to(tl.int16), mask=live)
    else:
        tl.store(hi + at, w, mask=live)


def adamw(master: tuple[Tensor, ...], m: Tensor, v: Tensor, grad: Tensor, constants: Tensor, *, decayed: bool) -> None:
    """`megatrain.optim.kernel.adamw_update` for CUDA tensors, on the current stream. Same bits."""
    split, n = len(master) == 2, m.numel()
    # BF16 planes are handled as the integers they are.
    first = master[0].view(torch.int16) if split else master[0]
    _adamw[(triton.cdiv(n, _BLOCK),)](
        first, master[1] if split else first, m, v, grad, constants, n,
        SPLIT=split, DECAYED=decayed, BLOCK=_BLOCK, HALF_RECIPROCAL=HALF_RECIPROCAL, enable_fp_fusion=False, **_INDEX,
    )  # fmt: skip


# The norm's tree adds the upper half of a tile to the lower, and so on down to one number. Seen from the root: of the rows of a
# tile, the sum is that of the even rows plus that of the odd ones, down to pairs of rows half a tile apart. So a thread has
# its columns' part of all rows in registers, and only one row's worth of sums is left to exchange between threads.
@triton.jit
def _row(sums, grads, first, end, r, COLUMNS: tl.constexpr):
    at = first + r * COLUMNS + tl.arange(0, COLUMNS)
    live = at < end  # a tile that is not full adds zeros, which change no square
    x = tl.load(sums + at, mask=live, other=0.0).to(grads.dtype.element_ty)
    tl.store(grads + at, x, mask=live)
    x = x.to(tl.float32)
    return x * x


@triton.jit
def _rows2(sums, grads, first, end, r, step: tl.constexpr, COLUMNS: tl.constexpr):
    return _row(sums, grads, first, end, r, COLUMNS) + _row(sums, grads, first, end, r + step, COLUMNS)


@triton.jit
def _rows4(sums, grads, first, end, r, step: tl.constexpr, COLUMNS: tl.constexpr):
    return _rows2(sums, grads, first, end, r, 2 * step, COLUMNS) + _rows2(sums, grads, first, end, r + step, 2 * step, COLUMNS)


@triton.jit
def _rows8(sums, grads, first, end, r, step: tl.constexpr, COLUMNS: tl.constexpr):
    return _rows4(sums, grads, first, end, r, 2 * step, COLUMNS) + _rows4(sums, grads, first, end, r + step, 2 * step, COLUMNS)


@triton.jit
def _rows16(sums, grads, first, end, r, step: tl.constexpr, COLUMNS: tl.constexpr):
    return _rows8(sums, grads, first, end, r, 2 * step, COLUMNS) + _rows8(sums, grads, first, end, r + step, 2 * step, COLUMNS)


@triton.jit
def _pack(tiles, sums, grads, partials, COLUMNS: tl.constexpr, LEVELS: tl.constexpr):
    first = tl.load(tiles + 2 * tl.program_id(0))
    end = tl.load(tiles + 2 * tl.program_id(0) + 1)
    x = _rows16(sums, grads, first, end, 0, 2, COLUMNS) + _rows16(sums, grads, first, end, 1, 2, COLUMNS)
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (2, COLUMNS >> (level + 1))), axis=0)  # of two, which no order can change
    tl.store(partials + tl.program_id(0) + tl.arange(0, 1), x)


def tiles_of(params: Sequence[tuple[int, int]]) -> Tensor:
    """The norm tiles of a block whose parameters lie at these (first, end) elements: int64 [tiles, 2] of the same."""
    return torch.tensor(
        [(at, min(at + NORM_TILE, end)) for first, end in params for at in range(first, end, NORM_TILE)], dtype=torch.int64
    )


def pack(tiles: Tensor, sums: Tensor, grads: Tensor, partials: Tensor) -> None:
    """Round `sums` (FP32 [span]) to the type of `grads` [span] within `tiles`, and write the norm partial of each tile as
    `megatrain.optim.norm.norm_partials` has it to `partials` (FP32 [tiles]). On the current stream."""
    # Without fusion: a square fused into the first sum would round once where the tree rounds twice.
    columns = NORM_TILE // 32
    _pack[(tiles.shape[0],)](
        tiles, sums, grads, partials, COLUMNS=columns, LEVELS=columns.bit_length() - 1, num_warps=8, enable_fp_fusion=False
    )
