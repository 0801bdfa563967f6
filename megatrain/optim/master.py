"""The FP32 master weight as two 16-bit planes, losslessly.

    hi = (bits32 + 0x8000) >> 16          the BF16 weight, rounded half away from zero; streamed to the device as it is
    lo = bits32 - (hi << 16)              the signed 16-bit remainder, in [-32768, 32767]
    bits32 = (hi << 16) + lo              (all modulo 2^32)

IEEE 754 numbers are sign and magnitude, so adding half a BF16 step to the bit pattern rounds the magnitude up at a tie,
whatever the sign. It differs from torch's own conversion (half to even) at exact ties only. Two planes of two bytes
hold what one FP32 tensor holds, and the streamed weight needs no conversion and no second copy.

A finite master of at least (2 - 2^-8) * 2^127 rounds to infinity in BF16. Such a master counts as non-finite: `split`
refuses it. An update that overflows later shows in `hi` as an infinity, or as the NaN that CPUs make of an invalid
operation (0xFFC00000 or 0x7FC00000). Beware of the NaN that CUDA makes, 0x7FFFFFFF: it is joined back losslessly as
well, but its `hi` wraps round to -0, so a kernel there has to store another NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_STEP = 0x8000


def split_bits(bits: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 bit patterns (int32, any shape) to the planes as integers: (hi int16, lo int16); no range check."""
    hi = (bits + _HALF_STEP) >> 16
    return hi.to(torch.int16), (bits - (hi << 16)).to(torch.int16)


def join_bits(hi: Tensor, lo: Tensor) -> Tensor:
    """The inverse of `split_bits`: (hi int16, lo int16) to int32 bit patterns."""
    return (hi.to(torch.int32) << 16).add_(lo)


def split(w: Tensor, name: str = "master") -> tuple[Tensor, Tensor]:
    """Split FP32 weights (any shape) into (hi bfloat16, lo int16) of the same shape.

    Raises ValueError, naming the tensor, if `w` is not FP32 or if a value is not finite or rounds to infinity in BF16.
    """
    if w.dtype != torch.float32:
        raise ValueError(f"{name}: a master weight must be float32, got {w.dtype}")
    hi_bits, lo = split_bits(w.contiguous().view(torch.int32))
    hi = hi_bits.view(torch.bfloat16)
    # Both are asked: the pattern of some NaNs wraps round to a finite hi.
    bad = ~(torch.isfinite(hi) & torch.isfinite(w))
    if bad.any():
        index = int(bad.flatten().nonzero()[0])
        value = float(w.flatten()[index])
        raise ValueError(
            f"{name}: a master weight must be finite as BF16 (magnitude below {(2 - 2**-8) * 2.0**127:.6g}), "
            f"got {value!r} at flat index {index} ({int(bad.sum())} such values)"
        )
    return hi, lo


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """The FP32 weights that (hi bfloat16, lo int16) stand for, in a new tensor of the same shape.

    Raises ValueError on other dtypes or unequal shapes.
    """
    if hi.dtype != torch.bfloat16 or lo.dtype != torch.int16 or hi.shape != lo.shape:
        raise ValueError(
            f"join: needs hi bfloat16 and lo int16 of one shape, got {hi.dtype} {tuple(hi.shape)} and "
            f"{lo.dtype} {tuple(lo.shape)}"
        )
    return join_bits(hi.contiguous().view(torch.int16), lo).view(torch.float32)
