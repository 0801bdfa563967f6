"""The ledger: how many bytes a plan needs, of which memory, in which phase of a run, and of what they consist.

Phases: *load* (buffers exist, weights stream in), *init* (state is complete, inputs have their buffers), *step*, *save*
(a checkpoint streams out). Spaces: *device*; *pinned*, the host storages that copies touch, registered with the driver where
there is a GPU; *pageable*, the rest of the host. Without a GPU (`hardware.compute.on_host`) nothing is pinned, and what would be
device memory lies in the host's.

Storages are counted exactly, by the sizes lowering gives them and the alignment the engine gives them. A step adds the maximum
over time of what lives in it and not the sum: kept activations that exist while an op runs, plus that op's workspace
(`sim.workspaces`). Only the compute lane touches either, so its order decides, and no simulation is needed. Loading and saving
stream: their host peak is what exists anyway and one tensor. The rest are constants below, each with its reason.

The planner and the command line decide with the same two functions, `ledger` and `fits`.

Not covered: what the allocator keeps of a step while a checkpoint is saved (it needs no more than the step did), the page cache,
and other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from megatrain.hardware import HardwareProfile
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import Op, Schedule, Storage, lower
from megatrain.schedule.layout import Storages, input_nbytes, place_blocks
from sim.memory import Moment, lane_moments, peak_on_lane
from sim.workspaces import Workspaces, saved_nbytes, workspaces

Phase = Literal["load", "init", "step", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)
MemorySpace = Literal["device", "pinned", "pageable"]

CUDA_CONTEXT = 920 << 20
"""What a process takes of the GPU beside its allocator: context, loaded kernels, graphs, streams. 840 to 970 MiB on an H200."""
CUBLAS_WORKSPACE = 64 << 20
"""8 buffers of 4 MiB, the size the cuda backend fixes, on each of two streams."""
ALLOCATOR_SLACK = (64 << 20, 64)
"""What the caching allocator holds beyond live temporaries: a constant and, as one part in this many, what is lost to
fragmentation. Segments that grow leave little on an H200: 30 MiB of 3.2 GiB, 1.5 of 84 GiB of kept activations."""
HOST_PROCESS = {"gpu": 2 << 30, "host": 512 << 20}
"""The interpreter, PyTorch and, with a GPU, the driver's host side. Typical resident sizes, not measured by themselves."""
STAGED_STEPS = 3
"""Sets of staged inputs: one for each step that may be unfinished and one to fill (`megatrain.engine.engine`)."""
ALIGN = 256
"""Where storages start: each device storage is rounded up to it, each host storage has as much to spare."""

_LABELS = (
    ("weights[", "weights"), ("lo[", "weights, low halves"), ("m[", "moments"), ("v[", "moments"), ("grad[", "waiting gradients"),
    ("slot.block.", "weights that stay"), ("slot.", "weight slots"),
    ("gslot.", "gradient slots"), ("state.", "state slots"), ("islot.", "input slots"), ("acc", "accumulators"),
    ("hidden[", "hidden states"),
    ("dhidden", "hidden states"), ("input", "inputs"),
)  # fmt: skip
KEPT = "kept activations"


class Item(NamedTuple):
    """`nbytes` of `what`, in these phases."""

    space: MemorySpace
    what: str
    nbytes: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The bytes of one plan. `peak_op` is the op of a step at which most device memory exists, `on_host` whether device and host
    are one memory."""

    items: tuple[Item, ...]
    peak_op: str
    on_host: bool

    def nbytes(self, phase: Phase, space: MemorySpace) -> int:
        """Bytes of a space in a phase."""
        return sum([item.nbytes for item in self.items if item.space == space and phase in item.phases])

    def device_nbytes(self, phase: Phase = "step") -> int:
        return self.nbytes(phase, "device")

    def host_nbytes(self, phase: Phase = "step") -> int:
        """Pinned and pageable, and the device's where that is the host."""
        host = self.nbytes(phase, "pinned") + self.nbytes(phase, "pageable")
        return host + self.nbytes(phase, "device") if self.on_host else host


class Shortage(NamedTuple):
    """A memory that is too small: `need` bytes of `have`, in a phase. `item` is the largest thing there, `helps` what would."""

    phase: Phase
    space: Literal["device", "host"]
    need: int
    have: int
    item: str
    helps: str

    def __str__(self) -> str:
        return (
            f"{self.space} memory, {self.phase}: needs {self.need:,} bytes, there are {self.have:,}:"
            f" {self.need - self.have:,} too few; {self.helps}"
        )


def ledger(
    model: ModelSpec, recipe: Recipe, plan: Plan, hardware: HardwareProfile, schedule: Schedule | None = None
) -> Ledger:
    """Bytes by phase and space. `schedule`, if the caller has it, is the plan's training schedule; the answer is the same.

    ValueError for a plan that names a layer the model lacks.
    """
    on_host = hardware.compute.on_host
    spaces = workspaces(model, recipe, on_host=on_host)
    if schedule is None:
        storages: Sequence[Storage] = Storages(model, recipe, plan, place_blocks(model, recipe, plan)).table
        moments = _moments_of_all_kept(model, recipe)
    else:
        storages, moments = schedule.storages, lane_moments(schedule, schedule.body)
    items = [*_static(storages, recipe, on_host=on_host), *_around(model, recipe, on_host=on_host)]

    # A kept handle holds what the forward really saves, of which the storage's size, the same for every recipe, knows nothing.
    saved = saved_nbytes(model, recipe, on_host=on_host)
    kept = {s.name: saved for s in storages if s.dynamic}
    peak = peak_on_lane(moments, kept, lambda op: 0 if op.kind == "loss" and not on_host else _workspace(op, spaces, kept))
    items.append(Item("device", KEPT, peak.live, ("step",)))
    name = peak.op.name if peak.op is not None else ""
    items.append(Item("device", f"workspace of {name}", peak.beside, ("step",)))
    if not on_host:
        # It is no graph, as the others are, and what graphs may take is kept apart.
        items.append(Item("device", "workspace of the loss", spaces.loss, ("step",)))
        constant, part = ALLOCATOR_SLACK
        largest = peak.beside + peak.live
        items.append(Item("device", "allocator slack", constant + largest // part, ("step",)))
    return Ledger(items=tuple(item for item in items if item.nbytes), peak_op=name, on_host=on_host)


def fits(found: Ledger, hardware: HardwareProfile) -> Shortage | None:
    """None if every phase fits into both memories, else the largest shortage."""
    return max(shortages(found, hardware), key=lambda s: s.need - s.have, default=None)


def more_memory(nbytes: int, space: str) -> str:
    """`1.50 GiB more host memory`: so much, rounded up to MiB, in MiB below one GiB."""
    mib = -(-nbytes // 2**20)
    return f"{f'{mib / 2**10:,.2f} GiB' if mib >= 2**10 else f'{mib} MiB'} more {space} memory"


def shortages(found: Ledger, hardware: HardwareProfile) -> tuple[Shortage, ...]:
    """The largest shortage of each memory that is too small, the device's first; empty if the plan fits."""
    worst = []
    there: tuple[tuple[Literal["device", "host"], Callable[[Phase], int], int], ...] = (
        ("device", found.device_nbytes, hardware.device_memory_bytes),
        ("host", found.host_nbytes, hardware.host_memory_bytes),
    )
    for space, needs, have in there:
        need, phase = max(((needs(phase), phase) for phase in PHASES), key=lambda x: x[0])
        if need > have:
            item = _largest(found, phase, space)
            helps = f"{more_memory(need - have, space)} would do, or less of the largest item, {item}"
            worst.append(Shortage(phase, space, need, have, item, helps))
    return tuple(worst)


# ---- items -----------------------------------------------------------------------------------------------------------


def _static(storages: Sequence[Storage], recipe: Recipe, *, on_host: bool) -> list[Item]:
    """The storages that always exist, by what they hold."""
    found: dict[tuple[MemorySpace, str], int] = {}
    for s in storages:
        if s.dynamic:
            continue
        label = _label(s.name)
        space: MemorySpace = "device"
        nbytes = -(-s.nbytes // ALIGN) * ALIGN
        if s.space == "host":
            pinned = s.copied and not on_host
            space, nbytes = "pinned" if pinned else "pageable", s.nbytes + ALIGN
        found[space, label] = found.get((space, label), 0) + nbytes
    return [Item(space, label, nbytes, PHASES) for (space, label), nbytes in found.items()]


@lru_cache(maxsize=4096)
def _label(storage: str) -> str:
    """What a storage of this name holds."""
    return next((label for prefix, label in _LABELS if storage.startswith(prefix)), "partials, constants")


def _around(model: ModelSpec, recipe: Recipe, *, on_host: bool) -> list[Item]:
    """What is there beside the storages and lives longer than an op."""
    # Read: as a file has it, FP64 at most. Written: an FP32 master and, while its halves are joined, as much again.
    tensor = 8 * max(p.numel for block in model.blocks for p in block.params)
    staged = STAGED_STEPS * recipe.micro_batches * input_nbytes(model, recipe)
    where: MemorySpace = "pageable" if on_host else "pinned"
    items = [
        Item("pageable", "process", HOST_PROCESS["host" if on_host else "gpu"], PHASES),
        Item("pageable", "one tensor on its way", tensor, ("load", "save")),
        Item(where, "staged inputs", staged, ("init", "step", "save")),
    ]
    if not on_host:
        items.append(Item("device", "CUDA context", CUDA_CONTEXT, PHASES))
        items.append(Item("device", "cuBLAS workspace", CUBLAS_WORKSPACE, ("step", "save")))
    return items


@lru_cache(maxsize=8)
def _moments_of_all_kept(model: ModelSpec, recipe: Recipe) -> tuple[Moment, ...]:
    """The compute lane in order, with the activations of every layer kept. A plan changes neither the order of forward, loss and
    backward nor when a kept activation lives; it only has fewer of them."""
    plan = Plan(placement={"default": "resident"}, activations={"default": "keep"}, update="after", chunk_bytes=0)
    schedule = lower(model, recipe, plan)
    return lane_moments(schedule, schedule.body)


def _workspace(op: Op, spaces: Workspaces, kept: dict[str, int]) -> int:
    if op.kind == "loss":
        return spaces.loss
    if op.kind not in ("forward", "backward"):
        return 0  # pack and AdamW on the device work in place
    if op.block == 0:
        return spaces.embedding_forward if op.kind == "forward" else spaces.embedding_backward
    if f"saved[{op.block}.{op.micro}]" in kept:
        return spaces.kept_forward if op.kind == "forward" else spaces.kept_backward
    return spaces.forward if op.kind == "forward" else spaces.backward


def _largest(found: Ledger, phase: Phase, space: Literal["device", "host"]) -> str:
    """The largest item of a memory in a phase."""
    device, host = space == "device" or found.on_host, space == "host"
    items = [i for i in found.items if phase in i.phases and (device if i.space == "device" else host)]
    return max(items, key=lambda item: item.nbytes).what
