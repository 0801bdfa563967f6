"""The numbers of one optimizer step: learning rate, bias corrections and clip factor, as sixteen FP32 values.

Every kernel (C++, PyTorch, later the GPU) reads the same block, so no kernel ever computes a constant: each is computed
once in double and rounded once to FP32. Layout of the block: the names below are indices into it, and `LAYOUT` hands
the same indices to the C++ compiler. Unused places are zero.

Steps are counted from 1 and count applied updates: a step skipped for a non-finite gradient is tried again under the
same number, so bias correction and learning rate do not advance over it.

Learning rate at step t, with W = warmup_steps and T = total_steps:

    t < W              lr * t / W        (no update has a rate of zero; step W is the first with the full one)
    constant, t >= W   lr
    cosine, W <= t     min_lr + (lr - min_lr) * (1 + cos(pi * p)) / 2  with p = min(1, (t - W) / (T - W))

so step T has exactly min_lr and later steps keep it. In terms of torch's schedulers, which count from 0, this is the
rate *after* t calls of `scheduler.step()`; a loop that steps the scheduler after the optimizer runs one step behind
it and spends its first update on a learning rate of zero.

This module needs numpy and no torch.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatrain.recipe import AdamW
from megatrain.schedule.layout import CONSTANTS_NBYTES

N_CONSTANTS: Final = CONSTANTS_NBYTES // 4
"""Of the block that lowering lays out and every kernel reads."""

SKIP: Final = 0
"""Not zero: the update writes nothing."""
FACTOR: Final = 1
"""Multiplies the gradient (clipping)."""
BETA1: Final = 2
ONE_MINUS_BETA1: Final = 3
BETA2: Final = 4
ONE_MINUS_BETA2: Final = 5
INV_SQRT_BC2: Final = 6
"""1 / sqrt(1 - beta2^step): multiplying by it is cheaper than dividing by its inverse."""
EPS: Final = 7
STEP_SIZE: Final = 8
"""lr / (1 - beta1^step)."""
DECAY: Final = 9
"""1 - lr * weight_decay, for parameters that decay."""
LR: Final = 10
"""For reports; no kernel reads it."""

LAYOUT: Final[dict[str, int]] = {
    "SKIP": SKIP,
    "FACTOR": FACTOR,
    "BETA1": BETA1,
    "ONE_MINUS_BETA1": ONE_MINUS_BETA1,
    "BETA2": BETA2,
    "ONE_MINUS_BETA2": ONE_MINUS_BETA2,
    "INV_SQRT_BC2": INV_SQRT_BC2,
    "EPS": EPS,
    "STEP_SIZE": STEP_SIZE,
    "DECAY": DECAY,
    "LR": LR,
}


def learning_rate(optimizer: AdamW, step: int) -> float:
    """Learning rate of the `step`-th applied update, counted from 1 (formula in the module's docstring).

    Raises ValueError for a step below 1.
    """
    _require_step(step)
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.lr * step / warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    total = optimizer.total_steps
    assert total is not None, "AdamW refuses a cosine schedule without total_steps"
    if step >= total:
        return optimizer.min_lr  # as given, not up to the rounding of cos(pi)
    progress = (step - warmup) / (total - warmup)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * (1.0 + math.cos(math.pi * progress)) / 2.0


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """The factor that brings a gradient of this norm down to `clip_norm`: min(1, clip_norm / norm), in double.

    After clipping, the norm equals the limit: there is no epsilon as in `torch.nn.utils.clip_grad_norm_` (which
    divides by norm + 1e-6 and so lands below the limit). `None` switches clipping off; a zero gradient needs none.

    Raises ValueError for a norm that is negative or not finite: such a step is skipped, it is not scaled.
    """
    if not (math.isfinite(norm) and norm >= 0):
        raise ValueError(f"clip_factor: norm must be finite and >= 0, got {norm!r}; skip the step, do not clip it")
    if clip_norm is None or norm <= clip_norm:
        return 1.0
    return clip_norm / norm


def step_constants(optimizer: AdamW, step: int, *, factor: float = 1.0, skip: bool = False) -> NDArray[np.float32]:
    """The block of constants for the `step`-th applied update, counted from 1: float32, shape [16].

    `factor` multiplies every gradient (`clip_factor`); with `skip` the kernels write nothing. Bias corrections are
    those of Kingma & Ba, arXiv 1412.6980, section 2, in the form lr / bc1 and sqrt(v) * (1 / sqrt(bc2)); decay is decoupled
    (Loshchilov & Hutter, arXiv 1711.05101).

    Raises ValueError for a step below 1 and a factor that is negative or not finite; `AdamW` has refused what FP32 cannot hold.
    """
    _require_step(step)
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(f"step_constants: factor must be finite and >= 0, got {factor!r}")
    lr = learning_rate(optimizer, step)
    block = np.zeros(N_CONSTANTS, dtype=np.float64)
    block[SKIP] = float(skip)
    block[FACTOR] = factor
    block[BETA1] = optimizer.beta1
    block[ONE_MINUS_BETA1] = 1.0 - optimizer.beta1
    block[BETA2] = optimizer.beta2
    block[ONE_MINUS_BETA2] = 1.0 - optimizer.beta2
    block[INV_SQRT_BC2] = 1.0 / math.sqrt(1.0 - optimizer.beta2**step)
    block[EPS] = optimizer.eps
    block[STEP_SIZE] = lr / (1.0 - optimizer.beta1**step)
    block[DECAY] = 1.0 - lr * optimizer.weight_decay
    block[LR] = lr
    return block.astype(np.float32)


def _require_step(step: int) -> None:
    if step < 1:
        raise ValueError(f"step must be >= 1 (applied updates are counted from 1), got {step}")
