"""Choices: plans in few numbers, which is what the planner's search moves among.

How many layers are resident, how many pass through the device for their update, how many keep their activations or offload
their inputs, and where these lie among the layers; slots, chunk, update policy, threads. Layers are alike, so their number and
rough place say nearly all. Where: the first layers' gradients come last and their weights are needed first, so these gain most
from being resident; spread evenly, resident layers give the link time to bring the others. Plans beyond this (a table of single
layers) are written by hand, and can be seeds of the search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatrain.hardware import HardwareProfile
from megatrain.plan import Activations, Placement, Plan, UpdateOrder, UpdatePolicy
from megatrain.recipe import Recipe
from sim.cost import adam_bytes_per_s

Where = Literal["first", "last", "spread"]
LANE_CORES = 2
"""Cores left to the threads that drive a GPU's lanes, of which the optimizer's measured rates know nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan in few numbers. `resident` and `kept` count layers; `resident_at` and `kept_at` say which.

    `passing` and `passing_at` say which of the layers that are not resident are updated on their way through the device. If these
    are the first, their updates and the forward begin as soon as the norm is known, while the CPU updates those behind; spread
    among the others, they leave the CPU time as gradients come. `staying` counts layers, the first of what is left, whose weights
    stay on the device, `offloaded` the first of those not kept whose inputs wait on the host. Under `during_backward` the CPU
    updates `waiting` layers after all others: from the last layer down the CPU takes one as it comes and leaves `waiting_of` - 1.
    """

    update: UpdatePolicy
    adam_threads: int
    embedding: Placement = "streamed"
    head: Placement = "streamed"
    resident: int = 0
    resident_at: Where = "first"
    passing: int = 0
    passing_at: Where = "first"
    staying: int = 0
    waiting: int = 0
    waiting_of: int = 2
    kept: int = 0
    kept_at: Where = "last"
    offloaded: int = 0
    state_slots: int = 2
    input_slots: int = 2
    weight_slots: int = 1
    vocab_slots: int = 1
    gradient_slots: int = 1
    host_gradient_slots: int = 1
    chunk_bytes: int = 0

    def plan(self, n_layers: int) -> Plan:
        placement: dict[str, Placement] = {"default": "streamed"}
        for name, where in (("embedding", self.embedding), ("head", self.head)):
            if where != "streamed":
                placement[name] = where
        resident = layers_at(self.resident_at, self.resident, n_layers)
        others = [layer for layer in range(n_layers) if layer not in set(resident)]
        passing = [others[i] for i in layers_at(self.passing_at, min(self.passing, len(others)), len(others))]
        for key in _ranges(passing):
            placement[key] = "streamed_adam"
        others = [layer for layer in others if layer not in set(passing)]
        for key in _ranges(others[: self.staying]):
            placement[key] = "device_weights"
        for key in _ranges(resident):
            placement[key] = "resident"
        late = [layer for i, layer in enumerate(reversed(others)) if i % self.waiting_of][: self.waiting]
        order: dict[str, UpdateOrder] = {"default": "first"}
        if self.update == "during_backward":
            order |= dict.fromkeys(_ranges(late[::-1]), "last")
        activations: dict[str, Activations] = {"default": "recompute"}
        kept = layers_at(self.kept_at, self.kept, n_layers)
        for key in _ranges(kept):
            activations[key] = "keep"
        for key in _ranges([layer for layer in range(n_layers) if layer not in set(kept)][: self.offloaded]):
            activations[key] = "offload"
        # Under the other policies every block has a host buffer of its own, and the number says nothing.
        usual = Plan()
        host_slots = self.host_gradient_slots if self.update == "during_backward" else usual.host_gradient_slots
        return Plan(
            placement=placement, activations=activations, update=self.update, update_order=order, weight_slots=self.weight_slots,
            vocab_slots=self.vocab_slots, gradient_slots=self.gradient_slots, host_gradient_slots=host_slots,
            state_slots=self.state_slots if self.passes else usual.state_slots,
            input_slots=self.input_slots if self.offloaded else usual.input_slots,
            chunk_bytes=self.chunk_bytes, adam_threads=self.adam_threads,
        )  # fmt: skip

    @property
    def passes(self) -> bool:
        """Whether any block is updated on its way through the device: only then do chunks take memory."""
        return self.passing > 0 or "streamed_adam" in (self.embedding, self.head)


def layers_at(where: Where, count: int, n_layers: int) -> list[int]:
    """`count` of the layers 0 to n_layers - 1, ascending: the first, the last, or spread evenly."""
    if where == "first":
        return list(range(count))
    if where == "last":
        return list(range(n_layers - count, n_layers))
    return [(2 * i + 1) * n_layers // (2 * count) for i in range(count)]


def _ranges(layers: Sequence[int]) -> Iterator[str]:
    """The keys of a plan that name these layers, runs as ranges."""
    start = 0
    for i in range(1, len(layers) + 1):
        if i == len(layers) or layers[i] != layers[i - 1] + 1:
            yield str(layers[start]) if i - start == 1 else f"{layers[start]}-{layers[i - 1]}"
            start = i


def policies(recipe: Recipe) -> tuple[UpdatePolicy, ...]:
    """The update policies a recipe allows."""
    return ("next_forward", "after") if recipe.clip_norm is not None else ("during_backward", "next_forward", "after")


def adam_thread_counts(hardware: HardwareProfile, recipe: Recipe) -> list[int]:
    """Thread counts worth trying for the CPU optimizer, the sensible one first: the fewest that reach 98% of its best rate.

    They leave cores to a GPU's lanes, or to compute where that runs on the host.
    """
    spare = recipe.compute_threads if hardware.compute.on_host else LANE_CORES
    most = max(1, hardware.cores - spare)
    counts = sorted({n for n, _ in hardware.adam_rates if n <= most} | {most})
    best = max(adam_bytes_per_s(hardware, n) for n in counts)
    first = next(n for n in counts if adam_bytes_per_s(hardware, n) >= 0.98 * best)
    rest = [n for n in counts if n != first]
    if hardware.compute.on_host and hardware.cores not in counts:
        rest.append(hardware.cores)  # whether they are better shared is for the simulation to say
    return [first, *rest]


def with_resident(choice: Choice, count: int) -> Choice:
    return replace(choice, resident=count)


def with_kept(choice: Choice, count: int) -> Choice:
    return replace(choice, kept=count)
