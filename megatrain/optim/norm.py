"""The gradient norm, summed in an order that belongs to the parameters alone.

Every parameter is cut into tiles of 65,536 elements, the last one shorter; no tile spans two parameters. A tile's
partial is the sum of the squares of its elements, as they are on the link (BF16 or FP32), in FP32, by a fixed halving
tree:

    x = squares, padded with zeros to 65,536;  while len(x) > 1: x = x[: len(x) // 2] + x[len(x) // 2 :]

Each level is an elementwise addition, so threads, devices and vector widths cannot change a bit; nor can transfer
chunks, slots or lanes, which this order does not know. The norm is the root of the FP64 sum of all partials, in
parameter order.

Squares are >= +0 and x + 0 == x, so the padding is never made: where the upper half is missing, nothing is added.

The partials double as the check for non-finite gradients: a tile with an Inf or NaN has a partial that is not finite.
So has one whose sum of squares exceeds FP32 (an element beyond 1.8e19); such a step is not usable either, and is
skipped alike. At the other end squares underflow: an element below 1.1e-19 (2^-63) adds a square with digits missing, one
below 2.6e-23 (2^-75) nothing at all. So a norm is exact to FP32's rounding where what carries it is between these, and a
gradient that lies wholly below them has norm 0 and is not clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.recipe import NORM_TILE

# Temporaries of `norm_partials`: at most this many tiles, 256 KiB each.
TILES_AT_ONCE = 16


def n_tiles(numel: int) -> int:
    """Number of tiles, and of norm partials, of a parameter with `numel` elements."""
    return -(-numel // NORM_TILE)


def norm_partials(grad: Tensor, out: Tensor, *, tiles_at_once: int = TILES_AT_ONCE) -> None:
    """Write the sum of squares of each tile of one parameter's gradient to `out`.

    `grad` is bfloat16 or float32, shape [numel], contiguous, as rounded for the link; `out` is float32, shape
    [n_tiles(numel)], on the same device. `tiles_at_once` bounds the temporary memory and changes no bit. Raises
    ValueError for other shapes, dtypes or devices.
    """
    _validate(grad, out, tiles_at_once)
    numel = grad.numel()
    full = numel // NORM_TILE
    with torch.no_grad():
        for first in range(0, full, tiles_at_once):
            last = min(first + tiles_at_once, full)
            _sum_rows(grad[first * NORM_TILE : last * NORM_TILE].view(last - first, NORM_TILE), out[first:last])
        if full * NORM_TILE < numel:
            _sum_rows(grad[full * NORM_TILE :].view(1, numel - full * NORM_TILE), out[full:])


def finish_norm(partials: NDArray[np.float32]) -> float:
    """The norm of the whole gradient: the root of the FP64 sum of `partials`, from first to last.

    `partials` is float32 [tiles], the tiles of all parameters in parameter order. An Inf or NaN among them comes out
    as one. Raises ValueError for another dtype or shape.
    """
    if partials.dtype != np.float32 or partials.ndim != 1:
        raise ValueError(f"finish_norm: partials must be float32 [tiles], got {partials.dtype} {list(partials.shape)}")
    if partials.size == 0:
        return 0.0
    # accumulate adds strictly from left to right; numpy's sum groups as it likes.
    return math.sqrt(float(np.add.accumulate(partials, dtype=np.float64)[-1]))


def first_nonfinite(partials: NDArray[np.float32], tiles_per_param: Sequence[int], names: Sequence[str]) -> str | None:
    """The name of the first parameter with a partial that is not finite, or None.

    `tiles_per_param[i]` is how many of the `partials` belong to the parameter `names[i]`. Raises ValueError if the
    counts do not add up.
    """
    if len(names) != len(tiles_per_param) or sum(tiles_per_param) != partials.size:
        raise ValueError(
            f"first_nonfinite: {len(names)} names, {len(tiles_per_param)} tile counts that sum to "
            f"{sum(tiles_per_param)}, {partials.size} partials: they must agree"
        )
    bad = np.flatnonzero(~np.isfinite(partials))
    if bad.size == 0:
        return None
    ends = np.cumsum(np.asarray(tiles_per_param))
    return names[int(np.searchsorted(ends, bad[0], side="right"))]


def _sum_rows(grad: Tensor, out: Tensor) -> None:
    x = grad.to(torch.float32)
    x = x.square() if x is grad else x.square_()
    n = x.shape[1]
    half = 1 << (n - 1).bit_length() >> 1  # of the next power of two; 0 when a single element is left
    while half:
        x[:, : n - half].add_(x[:, half:n])
        n, half = half, half >> 1
    out.copy_(x[:, 0])


def _validate(grad: Tensor, out: Tensor, tiles_at_once: int) -> None:
    if grad.dtype not in (torch.bfloat16, torch.float32) or grad.dim() != 1 or not grad.is_contiguous():
        raise ValueError(
            "norm_partials: grad must be bfloat16 or float32, [numel], contiguous, "
            f"got {grad.dtype} {list(grad.shape)} stride {grad.stride()}"
        )
    want = n_tiles(grad.numel())
    if out.dtype != torch.float32 or list(out.shape) != [want] or out.device != grad.device:
        raise ValueError(
            f"norm_partials: out must be float32 [{want}] on {grad.device}, "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )
    if tiles_at_once < 1:
        raise ValueError(f"norm_partials: tiles_at_once must be >= 1, got {tiles_at_once}")
