"""The floor of a step: the shortest time that one plan can take on one machine, whatever the order of its ops.

Each candidate is the time that one thing needs for the work the plan gives it, with nothing else in its way: compute, the link
up, the link down, the CPU optimizer, host memory, and the chain that exact clipping makes of backward and optimizer. None can be
shorter, so the longest is a bound: `step >= max(candidates)`. The formulas are those of "Floors for a step" in the table of
measured ceilings that the speed table was promised from; the bytes follow from where the plan places a block's state.

Work is counted low where it is not certain, so that the bound holds: padding between parameters, the embedding's compute, packing
of gradients, inputs and constants count nothing, and what slots may still hold at the turn from forward to backward is not
loaded again. Not covered: start-up of copies and kernels, rates that fall while others run, a pipeline's filling and draining.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import DTYPE_NBYTES, Recipe

STATE_NBYTES = 12
"""Bytes a parameter of what outlives a step, in either precision: FP32 weight (in bf16 two halves of it) and two FP32 moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one call to a machine measured, each figure alone and sustained.

    Bytes a second of the link's two directions; of the CPU optimizer, of host memory while the CPU optimizer and streamed state
    use it together (about 180e9), and of the GPU's optimizer, these three counting every byte read and written (26 a parameter in
    bf16). Seconds of one micro-batch of the recipe: one decoder layer's forward, the same again for what its backward needs, its
    backward from kept activations (no forward again), and the loss (head forward and backward).
    """

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    adam_bytes_per_s: float
    dram_bytes_per_s: float
    gpu_adam_bytes_per_s: float
    layer_forward_s: float
    layer_again_s: float
    layer_backward_s: float
    loss_s: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise ValueError(f"rates.{field.name}: must be a finite number > 0, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Seconds that each candidate needs, by its name. `binds` names the longest, `seconds` is the floor."""

    candidates: Mapping[str, float]

    @property
    def binds(self) -> str:
        return max(self.candidates, key=self.candidates.__getitem__)

    @property
    def seconds(self) -> float:
        return self.candidates[self.binds]


def floor_s(model: ModelSpec, recipe: Recipe, plan: Plan, rates: Rates) -> Floor:
    """The floor of a steady step. With w and g the bytes of a streamed weight and of a gradient (2 and 2 in bf16), P parameters:

    - compute: micro-batches x (layers x (forward + backward) + a forward again for each layer whose activations are not kept
      + loss), and P updated on the GPU (`resident`, `streamed_adam`) x (24 + g) B / GPU optimizer;
    - link up: `streamed` P x w for each of its passes: two for a layer (forward, backward), but one for the last
      `weight_slots` of them, which the slots still hold at the turn; one for the embedding, whose backward needs no weights, and
      for the head, whose forward and backward are one op. `device_weights` P x w, the refresh. `streamed_adam` P x (12 + g), the
      state and its gradient (none under `during_backward`, where it is used at once), and a layer's second pass as above;
      `resident` nothing. The inputs of `offload` layers come back, but for those that `input_slots` still hold;
    - link down: P x g for what the CPU updates; P x (12 + g) for `streamed_adam`, g again not under `during_backward`; the inputs
      of `offload` layers, but for those that `input_slots` hold until they are needed;
    - cpu adam: P updated on the CPU x (24 + g) B / CPU optimizer;
    - host memory: P whose state is on the host x (24 + g) B / host memory: the CPU optimizer reads 12 + g and writes 12, and so
      do the copies of `streamed_adam`, so both together are bound by it;
    - after the norm, with any state on the host: under exact clipping no update begins before the norm is known, and that comes
      after the whole backward; and the loss of the next step comes after every update. So loss + backward (forwards again
      included) + the longer of the two terms before. Under `after`, clipped or not, the next forward waits too and is added.

    Raises nothing for a plan that cannot run, such as a layer that the model lacks; lowering does that.
    """
    weight, gradient = DTYPE_NBYTES[recipe.precision], DTYPE_NBYTES[recipe.gradient_dtype]
    travels = 0 if plan.update == "during_backward" else gradient
    on_cpu = on_gpu = through_gpu = up = down = slotted = 0
    for block in model.blocks:
        placement: str = plan.placement_of(block.kind, block.layer)
        if placement == "resident":
            on_gpu += block.numel
            continue
        if placement == "streamed_adam":
            through_gpu += block.numel
            up += block.numel * (STATE_NBYTES + travels)
            down += block.numel * (STATE_NBYTES + travels)
        else:
            on_cpu += block.numel
            up += block.numel * weight
            down += block.numel * gradient
        slotted += block.kind == "layer" and placement != "device_weights"
    # Decoder layers are all of one size.
    up += max(0, slotted - plan.weight_slots) * model.layers[0].numel * weight

    kept: list[str] = [plan.activations_of(layer) for layer in range(model.n_layers)]
    again, offloaded = sum(a != "keep" for a in kept), kept.count("offload")
    hidden = recipe.micro_batches * model.hidden_nbytes(recipe.tokens_per_micro_batch, weight)
    if offloaded:
        up += max(0, offloaded - plan.input_slots) * hidden
        down += max(0, offloaded - plan.input_slots) * hidden

    adam_nbytes = 2 * STATE_NBYTES + gradient
    forward = recipe.micro_batches * model.n_layers * rates.layer_forward_s
    backward = recipe.micro_batches * (model.n_layers * rates.layer_backward_s + again * rates.layer_again_s + rates.loss_s)
    cpu_adam = on_cpu * adam_nbytes / rates.adam_bytes_per_s
    host_memory = (on_cpu + through_gpu) * adam_nbytes / rates.dram_bytes_per_s
    after_norm = 0.0
    if on_cpu + through_gpu and (plan.update == "after" or (plan.update == "next_forward" and recipe.clip_norm is not None)):
        after_norm = backward + max(cpu_adam, host_memory) + (forward if plan.update == "after" else 0.0)
    return Floor(
        candidates={
            "compute": forward + backward + (on_gpu + through_gpu) * adam_nbytes / rates.gpu_adam_bytes_per_s,
            "link up": up / rates.h2d_bytes_per_s,
            "link down": down / rates.d2h_bytes_per_s,
            "cpu adam": cpu_adam,
            "host memory": host_memory,
            "after the norm": after_norm,
        }
    )
