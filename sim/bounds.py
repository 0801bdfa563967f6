"""Lower bounds: what a step of any plan takes at least, from sums of works, without lowering the plan.

In the steady state every lane does all of its work once a step, and nothing is faster than alone. So no step is shorter than the
sum over any one lane. Two policies put work in a row as well: `next_forward` runs every update of host blocks after the norm of
one step and before the loss of the next, and the norm comes after all of the loss and backward, so these add up. `after` ends
all updates before the next step begins.

A block's works do not depend on where other blocks are. They are read off two schedules of the model, one with every layer
streamed and recomputed, one resident and kept; so the costs are those of `sim.cost`, and the order is lowering's. Left out, which
only lowers a bound: start-up of copies, clip and constants, chunking, contention, and all waiting.

Loads: a layer's weights go up for its forward and again for its backward, but for those that stay on the device and those that
still lie in a slot at the turn. A block that passes through the device for its update brings low halves and moments up, and all
its planes down.
"""

from __future__ import annotations

from collections import defaultdict

from megatrain.hardware import HardwareProfile
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import lower
from megatrain.schedule.layout import state_planes
from sim.cost import NS_PER_S, Work, adam_bytes_per_s, alone_ns, works


class StepBounds:
    """Bounds for plans of one (model, recipe, hardware)."""

    def __init__(self, model: ModelSpec, recipe: Recipe, hardware: HardwareProfile) -> None:
        self.model, self.recipe, self.hardware = model, recipe, hardware
        # (kind, block, whether resident and kept) -> what the ops of this kind on this block take together.
        self._ns: dict[tuple[str, int, bool], int] = defaultdict(int)
        self._adam_bytes: dict[tuple[int, bool], int] = defaultdict(int)
        for resident in (False, True):
            plan = Plan(
                placement={"default": "resident" if resident else "streamed"},
                activations={"default": "keep" if resident else "recompute"},
                chunk_bytes=0,
            )
            schedule = lower(model, recipe, plan)
            for op, work in zip(schedule.body.ops, works(schedule, hardware).parts["body"], strict=True):
                block = -1 if op.block is None else op.block
                if op.kind == "update" and work.traffic == "adam":
                    self._adam_bytes[block, resident] += work.amount
                elif op.kind != "load" or op.nth == 1:
                    self._ns[op.kind, block, resident] += _least_ns(work)

    def step_ns(self, plan: Plan) -> int:
        """No settled step of the plan is shorter."""
        blocks = self.model.blocks
        placed = [plan.placement_of(b.kind, b.layer) for b in blocks]
        resident, passing = ([where == what for where in placed] for what in ("resident", "streamed_adam"))
        kept = [b.layer is not None and plan.activations_of(b.layer) == "keep" for b in blocks]
        on_host = [i for i, there in enumerate(resident) if not there]
        threads = min(plan.adam_threads, self.hardware.cores)
        rate = adam_bytes_per_s(self.hardware, threads)

        def updates(chosen: list[int], there: bool) -> int:
            nbytes = sum([self._adam_bytes.get((i, there), 0) for i in chosen])
            return nbytes * NS_PER_S // rate + sum([self._ns.get(("update", i, there), 0) for i in chosen])

        every = range(len(blocks))
        forward = sum([self._ns["forward", i, False] for i in every])
        backward = sum([self._ns["backward", i, kept[i]] + self._ns["pack", i, False] for i in every])
        turn = self._ns["loss", -1, False] + backward
        cpu = updates([i for i in on_host if not passing[i]], False)
        resident_updates = updates([i for i in every if resident[i] or passing[i]], True)
        up = self._ns["input", -1, False] + sum([self._ns["load", i, False] for i in on_host])
        layers = [i for i in on_host if blocks[i].kind == "layer" and placed[i] in ("streamed", "streamed_adam")]
        up += sum([self._ns["load", i, False] for i in layers[: max(0, len(layers) - plan.weight_slots)]])
        down = sum([self._ns["save", i, False] for i in on_host if not passing[i]])
        through = sum([blocks[i].span for i in every if passing[i]])
        sizes = dict(state_planes(self.recipe))
        up += through * (sum(sizes.values()) - sizes["weights"]) * NS_PER_S // self.hardware.h2d.peak_bytes_per_s
        down += through * sum(sizes.values()) * NS_PER_S // self.hardware.d2h.peak_bytes_per_s
        bounds = [forward + turn + resident_updates, cpu, up, down]
        if plan.update == "next_forward":
            bounds.append(cpu + turn)
        elif plan.update == "after":
            bounds.append(forward + turn + max(cpu, resident_updates))
        return max(bounds)


def _least_ns(work: Work) -> int:
    """A copy at its top rate, without start-up (smaller pieces cannot need less); anything else its time alone."""
    if work.traffic in ("h2d", "d2h"):
        return work.amount * NS_PER_S // work.rate_per_s
    return alone_ns(work)
