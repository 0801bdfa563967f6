"""Recipe: everything that may change a bit of the result.

Two runs of one recipe on the same device give the same weights, whatever plan executes them. So a field belongs here, and not
in `Plan`, exactly when changing it may change a bit: how a step is split into micro-batches, the types weights and gradients
have, the tile of the loss, the constants of the optimizer, the attention kernel, how many threads compute uses.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["bf16", "fp32"]
DTYPE_NBYTES: dict[str, int] = {"bf16": 2, "fp32": 4}

NORM_TILE = 65_536
"""Elements of a gradient that one partial of its norm sums; no tile spans two parameters. The same in every recipe."""

FP32_SMALLEST = 2.0**-126
"""The smallest normal FP32 number, 1.2e-38: below it digits are lost, below 2^-149 everything is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) and its learning-rate schedule.

    `weight_decay` applies to parameters of two or more dimensions. `schedule` is "constant" (after a linear warm-up of
    `warmup_steps`) or "cosine" (the same warm-up, then half a cosine from `lr` to `min_lr` at `total_steps`).

    Kernels get their constants in FP32, so a value that FP32 does not hold (as infinity, as zero, as 1) is refused here.
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "min_lr"):
            value = getattr(self, name)
            _require(f"optimizer.{name}", value, _is_finite(value) and value >= 0, "a number >= 0, finite in FP32")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(f"optimizer.{name}", value, _in_fp32(value) < 1, "in [0, 1), in FP32 too")
        for name in ("lr", "min_lr"):
            value = getattr(self, name)
            _require(f"optimizer.{name}", value, value == 0 or value >= FP32_SMALLEST, f"0 or at least {FP32_SMALLEST:.3g}")
        first = self.lr / (1 - self.beta1)
        _require("optimizer.lr", self.lr, _is_finite(first), f"such that lr / (1 - beta1), {first:.3g}, is finite in FP32")
        # Kernels divide the step size by eps in FP32; an overflow there would make NaN of a zero gradient's update.
        _require("optimizer.eps", self.eps, self.eps >= 2.0**-100, "at least 2^-100, 7.9e-31")
        decay = self.lr * self.weight_decay
        rule = f"such that lr x weight_decay, {decay:.3g} with lr {self.lr!r}, is at most 1: a step may not turn weights around"
        _require("optimizer.weight_decay", self.weight_decay, decay <= 1, rule)
        _require("optimizer.warmup_steps", self.warmup_steps, _is_count(self.warmup_steps, 0), "an integer >= 0")
        total = self.total_steps
        _require("optimizer.total_steps", total, total is None or _is_count(total, 1), "an integer >= 1, or null")
        _require("optimizer.schedule", self.schedule, self.schedule in ("constant", "cosine"), "constant or cosine")
        if self.schedule == "cosine":
            ok = total is not None and total > self.warmup_steps
            _require("optimizer.total_steps", total, ok, "given and more than warmup_steps for a cosine schedule")
            _require("optimizer.min_lr", self.min_lr, self.min_lr <= self.lr, f"at most lr, {self.lr!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is computed, to the bit.

    A step is `micro_batches` x `micro_batch_size` sequences of `seq_len` tokens. `precision` is the type of the streamed
    weights and of the computation; the masters are FP32 in both. `gradient_dtype` is the type gradients have when they leave
    the device. `loss_tile` is how many tokens' logits exist at once. `clip_norm=None` switches clipping off (the norm is
    reported all the same; what range of gradients it sees stands in `megatrain.optim.norm`). `attention_mask` is "causal" (no
    padding, one sequence a row) or "segments" (the batch brings a segment id a token, 0 for padding: packed and padded rows).
    """

    micro_batches: int = 1
    micro_batch_size: int = 1
    seq_len: int = 1024
    precision: Precision = "bf16"
    gradient_dtype: Precision = "bf16"
    loss_tile: int = 1024
    clip_norm: float | None = 1.0
    optimizer: AdamW = field(default_factory=AdamW)
    attention: Literal["sdpa", "eager"] = "sdpa"
    attention_mask: Literal["causal", "segments"] = "causal"
    compiled: bool = False
    deterministic: bool = True
    compute_threads: int = 1

    def __post_init__(self) -> None:
        for name in ("micro_batches", "micro_batch_size", "loss_tile", "compute_threads"):
            _require(name, getattr(self, name), _is_count(getattr(self, name), 1), "an integer >= 1")
        # The last token of a row has no next one, so a row of one token has nothing to learn from.
        _require("seq_len", self.seq_len, _is_count(self.seq_len, 2), "an integer >= 2: a token predicts the next one")
        for name, values in (
            ("precision", tuple(DTYPE_NBYTES)), ("gradient_dtype", tuple(DTYPE_NBYTES)),
            ("attention", ("sdpa", "eager")), ("attention_mask", ("causal", "segments")),
        ):  # fmt: skip
            _require(name, getattr(self, name), getattr(self, name) in values, " or ".join(values))
        for name in ("compiled", "deterministic"):
            _require(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        clip = self.clip_norm
        ok = clip is None or (_is_finite(clip) and clip >= FP32_SMALLEST)
        _require("clip_norm", clip, ok, f"a finite number of at least {FP32_SMALLEST:.3g}, or null for off")
        _require("optimizer", self.optimizer, isinstance(self.optimizer, AdamW), "an AdamW")

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch_size * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batches * self.tokens_per_micro_batch


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_finite(value: object) -> bool:
    """Whether `value` is a number that FP32 holds: not rounded to infinity, no NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(_in_fp32(value)) < float("inf")


def _in_fp32(value: float) -> float:
    """The nearest FP32 number, infinity beyond the largest."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except (OverflowError, struct.error):  # the second for an integer beyond even a double
        return float("inf")
    return rounded


def _require(name: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(f"recipe.{name}: must be {rule}, got {value!r}")
