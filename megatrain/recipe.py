"""Recipe: everything that may change a bit of the result.

Two runs of one recipe on the same device give the same weights, whatever plan executes them. So a field belongs here, and not
in `Plan`, exactly when changing it may change a bit: how a step is split into micro-batches, the types weights and gradients
have, the tile of the loss, the constants of the optimizer, the attention kernel, how many threads compute uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["bf16", "fp32"]
DTYPE_NBYTES: dict[str, int] = {"bf16": 2, "fp32": 4}

NORM_TILE = 65_536
"""Elements of a gradient that one partial of its norm sums; no tile spans two parameters. The same in every recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) and its learning-rate schedule.

    `weight_decay` applies to parameters of two or more dimensions. `schedule` is "constant" (after a linear warm-up of
    `warmup_steps`) or "cosine" (the same warm-up, then half a cosine from `lr` to `min_lr` at `total_steps`).
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
        _require("optimizer.lr", self.lr, self.lr >= 0, ">= 0")
        _require("optimizer.beta1", self.beta1, 0 <= self.beta1 < 1, "in [0, 1)")
        _require("optimizer.beta2", self.beta2, 0 <= self.beta2 < 1, "in [0, 1)")
        # Padding between parameters holds zeros; eps > 0 keeps 0/0 out of it.
        _require("optimizer.eps", self.eps, self.eps > 0, "> 0")
        _require("optimizer.weight_decay", self.weight_decay, self.weight_decay >= 0, ">= 0")
        _require("optimizer.warmup_steps", self.warmup_steps, self.warmup_steps >= 0, ">= 0")
        _require("optimizer.schedule", self.schedule, self.schedule in ("constant", "cosine"), "constant or cosine")
        if self.schedule == "cosine":
            total = self.total_steps
            ok = total is not None and total > self.warmup_steps
            _require("optimizer.total_steps", total, ok, "given and more than warmup_steps for a cosine schedule")
            _require("optimizer.min_lr", self.min_lr, 0 <= self.min_lr <= self.lr, "between 0 and lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is computed, to the bit.

    A step is `micro_batches` x `micro_batch_size` sequences of `seq_len` tokens. `precision` is the type of the streamed
    weights and of the computation; the masters are FP32 in both. `gradient_dtype` is the type gradients have when they leave
    the device. `loss_tile` is how many tokens' logits exist at once. `clip_norm=None` switches clipping off (the norm is
    reported all the same). `attention_mask` is "causal" (no padding, one sequence a row) or "segments" (the batch brings a
    segment id a token, 0 for padding: packed and padded rows).
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
        for name in ("micro_batches", "micro_batch_size", "seq_len", "loss_tile", "compute_threads"):
            value = getattr(self, name)
            _require(name, value, isinstance(value, int) and not isinstance(value, bool) and value >= 1, "an integer >= 1")
        _require("precision", self.precision, self.precision in DTYPE_NBYTES, "bf16 or fp32")
        _require("gradient_dtype", self.gradient_dtype, self.gradient_dtype in DTYPE_NBYTES, "bf16 or fp32")
        clip = self.clip_norm
        ok = clip is None or (isinstance(clip, (int, float)) and not isinstance(clip, bool) and 0 < clip < float("inf"))
        _require("clip_norm", clip, ok, "a finite number > 0, or null for off")
        _require("attention", self.attention, self.attention in ("sdpa", "eager"), "sdpa or eager")
        _require("attention_mask", self.attention_mask, self.attention_mask in ("causal", "segments"), "causal or segments")

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch_size * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batches * self.tokens_per_micro_batch


def _require(name: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(f"recipe.{name}: must be {rule}, got {value!r}")
