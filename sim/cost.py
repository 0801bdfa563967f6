"""Cost: the only place where bytes and FLOPs become time.

Every op becomes a `Work`: a fixed part that nothing can slow (start-up latency, launches), then an amount that flows at a rate.
What the rate is while other ops run is the business of `sim.sharing`; alone, it is `rate_per_s`. So

    duration alone = fixed_ns + ceil(amount x 1e9 / rate_per_s)

Two sources for compute. *Calibrated*: a duration measured in a running step, where the profile has it for this block, token
count and sequence length (between two token counts, linear in time). *Spec*: products at the sustained rate, attention at its
own, everything else as memory traffic, plus launches; the sum, because within one stream they follow each other. A backward
does twice the products of a forward and 2.5 times its attention (scores are computed anew); with recomputation a forward
without its last product comes first. If a profile has measured durations and one is missing, the notes say what was asked
outside of them.

Not covered: what a kernel's shape does to its rate, copies that take GPU memory bandwidth, and the clock of a GPU, which falls
within 150 ms of work without a pause. Measured durations are of sustained work; after a pause ops are quicker than that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from megatrain.hardware import ComputeKind, HardwareProfile, Link, conditions
from megatrain.model import BlockSpec
from megatrain.recipe import DTYPE_NBYTES
from megatrain.schedule.nouns import Access, Op, Schedule

NS_PER_S = 10**9

Traffic = Literal["h2d", "d2h", "adam", "compute"]
"""Whose bandwidth is shared: the two directions of the link, the CPU optimizer, and compute where it runs on the host."""


class Work(NamedTuple):
    """What an op has to get done. `amount` is in any unit (bytes for copies and the optimizer, ns for compute), `rate_per_s` in
    that unit per second. `traffic` None: nothing slows it. `threads` are the host cores it keeps busy and `dram_bytes` the host
    memory traffic it causes, both while `amount` flows."""

    fixed_ns: int = 0
    amount: int = 0
    rate_per_s: int = NS_PER_S
    traffic: Traffic | None = None
    threads: int = 0
    dram_bytes: int = 0


class Costs(NamedTuple):
    """The works of a schedule, by part name and then by the op's position, and what the cost model has to say about them."""

    parts: dict[str, tuple[Work, ...]]
    notes: tuple[str, ...]


def alone_ns(work: Work) -> int:
    """The duration of `work` when nothing else runs."""
    return work.fixed_ns + ceil_div(work.amount * NS_PER_S, work.rate_per_s)


def works(schedule: Schedule, hardware: HardwareProfile) -> Costs:
    """The work of every op of the three parts."""
    model = _CostModel(schedule, hardware)
    table = {
        part.name: tuple(model.work(op) for op in part.ops) for part in (schedule.prologue, schedule.body, schedule.epilogue)
    }
    return Costs(table, tuple(sorted(model.notes)))


def durations_ns(schedule: Schedule, hardware: HardwareProfile) -> dict[tuple[str, int], int]:
    """Every op's duration when nothing else runs, by (name of its part, its position there): what a null backend sleeps."""
    return {
        (part, position): alone_ns(work)
        for part, of_part in works(schedule, hardware).parts.items()
        for position, work in enumerate(of_part)
    }


def copy_ns(link: Link, nbytes: int) -> int:
    """Time of a copy alone: linear in time between the rows of the link's table, from `latency_ns` for no bytes."""
    sizes = [size for size, _ in link.rates]
    i = bisect_left(sizes, nbytes)
    if i == len(sizes):
        return ceil_div(nbytes * NS_PER_S, link.peak_bytes_per_s)
    times = [(0, link.latency_ns), *((size, ceil_div(size * NS_PER_S, rate)) for size, rate in link.rates)]
    return interpolate(times[i], times[i + 1], nbytes)


def adam_bytes_per_s(hardware: HardwareProfile, threads: int) -> int:
    """The CPU optimizer alone at `threads` threads; more threads than the profile knows bring nothing."""
    rows = ((0, 0), *hardware.adam_rates)
    i = bisect_left([n for n, _ in rows], threads)
    return rows[-1][1] if i == len(rows) else max(1, interpolate(rows[i - 1], rows[i], threads))


def interpolate(low: tuple[int, int], high: tuple[int, int], x: int) -> int:
    """The integer at `x` on the line through two points, rounded down."""
    return low[1] + (high[1] - low[1]) * (x - low[0]) // (high[0] - low[0])


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# Kernels started by an op, rounded: (compiled, eager). They matter only where blocks are so small that starting them does.
_KERNELS: dict[str, tuple[int, int]] = {
    "embedding": (2, 4), "forward": (12, 40), "backward": (24, 100), "loss": (8, 20), "pack": (4, 8), "update": (1, 20),
}  # fmt: skip
# FP32 passes over a tile's logits: written, read for the maximum and the sum; in training their gradient is written and read
# by two products as well.
_LOGIT_PASSES = {"evaluate": 3, "train": 6}


class _CostModel:
    """One (schedule, hardware). `notes` collects what was asked outside the calibration."""

    def __init__(self, schedule: Schedule, hardware: HardwareProfile) -> None:
        self.schedule, self.hardware = schedule, hardware
        self.model, self.recipe, self.plan = schedule.model, schedule.recipe, schedule.plan
        self.weight_nbytes = DTYPE_NBYTES[self.recipe.precision]
        self.tokens = self.recipe.tokens_per_micro_batch
        self.on_host = hardware.compute.on_host
        self.notes: set[str] = set()
        self.memo: dict[tuple[object, ...], Work] = {}
        # Rows that hold for this recipe only; one measured under just these conditions comes before one for every recipe.
        self.measured: dict[tuple[str, str, int, int, bool], dict[int, int]] = {}
        for row in sorted(hardware.compute.measured, key=lambda row: row.conditions):
            if row.conditions in ("", conditions(row.kind, self.recipe)):
                key = (row.kind, row.block, row.numel, row.seq_len, row.adds)
                self.measured.setdefault(key, {})[row.tokens] = row.duration_ns
        self.by_kind: dict[str, Callable[[Op], Work]] = {
            "input": self._h2d, "load": self._h2d, "save": self._d2h, "forward": self._forward, "loss": self._loss,
            "backward": self._backward, "pack": self._pack, "report": self._constants, "constants": self._constants,
            "clip": self._clip, "update": self._update, "stash": self._d2h, "fetch": self._h2d,
        }  # fmt: skip

    def work(self, op: Op) -> Work:
        # An op's cost is a function of these: blocks of one shape differ only in where their bytes lie.
        block, later = (op.block, bool(op.micro)) if op.lane == "compute" else (None, False)
        key = (op.kind, op.lane, block, later, _nbytes(op.reads), _nbytes(op.writes))
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self.by_kind[op.kind](op)
        return found

    # ---- copies and the cpu lane ----

    def _h2d(self, op: Op) -> Work:
        return self._copy(self.hardware.h2d, "h2d", op)

    def _d2h(self, op: Op) -> Work:
        return self._copy(self.hardware.d2h, "d2h", op)

    def _copy(self, link: Link, traffic: Traffic, op: Op) -> Work:
        """What a copy needs beyond its bytes at the link's top rate is start-up. A device copies by itself and moves each byte
        through DRAM once; a memcpy takes a core and moves it twice."""
        nbytes, rate = op.nbytes, link.peak_bytes_per_s
        fixed = max(0, copy_ns(link, nbytes) - ceil_div(nbytes * NS_PER_S, rate))
        return Work(fixed, nbytes, rate, traffic, int(self.on_host), nbytes * (1 + self.on_host))

    def _constants(self, op: Op) -> Work:
        return Work(self.hardware.host_op_ns)

    def _clip(self, op: Op) -> Work:
        """One thread sums the partials, a 65,536th of the parameters: too little to share a bandwidth."""
        rate = adam_bytes_per_s(self.hardware, 1)
        return Work(self.hardware.host_op_ns + ceil_div(_nbytes(op.reads) * NS_PER_S, rate))

    def _update(self, op: Op) -> Work:
        """AdamW is bound by memory: the bytes its op reads and writes (26 a parameter in bf16, its gradient included). Without a
        device every update is the CPU optimizer's, whatever the lane."""
        nbytes = _nbytes(op.reads) + _nbytes(op.writes)
        if op.lane == "compute" and not self.on_host:
            return self._compute("update", ns=self._memory_ns(nbytes), nbytes=nbytes)
        threads = min(self.plan.adam_threads, self.hardware.cores)
        self._note_threads("plan.adam_threads", self.plan.adam_threads)
        least, most = self.hardware.adam_rates[0][0], self.hardware.adam_rates[-1][0]
        if not least <= threads <= most:
            self.notes.add(
                f"{self.hardware.name}: the CPU optimizer at {threads} threads is outside the measured {least} to {most} threads;"
                + (f" predicted as at {most}" if threads > most else " predicted in proportion to threads")
            )
        return Work(self.hardware.host_op_ns, nbytes, adam_bytes_per_s(self.hardware, threads), "adam", threads, nbytes)

    # ---- compute ----

    def _forward(self, op: Op) -> Work:
        block = self._block(op)
        if block.kind == "embedding":
            nbytes = 2 * self._hidden_nbytes()
            return self._compute("embedding", ns=self._memory_ns(nbytes), nbytes=nbytes, measured=("forward", block, False))
        nbytes = self._layer_nbytes(block)
        return self._compute("forward", ns=self._layer_ns(block, 1), nbytes=nbytes, measured=("forward", block, False))

    def _backward(self, op: Op) -> Work:
        block, adds = self._block(op), bool(op.micro)
        if block.kind == "embedding":
            # Gradients sorted by token, then summed into the accumulator, which is read (from the second on) and written.
            nbytes = 2 * self._hidden_nbytes() + _accumulator_nbytes(op)
            return self._compute("embedding", ns=self._memory_ns(nbytes), nbytes=nbytes, measured=("backward", block, adds))
        keep = any(a.tag.what == "saved" for a in op.reads)
        accumulated = _accumulator_nbytes(op)
        ns = self._layer_ns(block, 2) + self._memory_ns(accumulated)
        if not keep:
            ns += self._layer_ns(block, 1) - self._products_ns(self.model.last_product_flops_per_token() * self.tokens)
        nbytes = (2 if keep else 3) * self._layer_nbytes(block) + accumulated
        kernels = ("backward",) if keep else ("forward", "backward")
        kind: ComputeKind = "backward" if keep else "recompute_backward"
        return self._compute(*kernels, ns=ns, nbytes=nbytes, measured=(kind, block, adds))

    def _loss(self, op: Op) -> Work:
        """Tile by tile: logits, and in training their gradient and the head's; its accumulator is read and written by each."""
        head, training = self.model.head, self.schedule.mode == "train"
        tiles = ceil_div(self.tokens, self.recipe.loss_tile)
        written = sum(a.nbytes for a in op.writes if a.tag.what == "acc")
        nbytes = 4 * self.tokens * self.model.vocab_size * _LOGIT_PASSES[self.schedule.mode] + 2 * tiles * written
        products = self.model.forward_flops_per_token(head) * self.tokens * (3 if training else 1)
        ns = self._products_ns(products) + self._memory_ns(nbytes)
        kind: ComputeKind = "loss" if training else "loss_forward"
        return self._compute("loss", times=tiles, ns=ns, nbytes=nbytes, measured=(kind, head, bool(op.micro)))

    def _pack(self, op: Op) -> Work:
        nbytes = _nbytes(op.reads) + _nbytes(op.writes)
        return self._compute("pack", ns=self._memory_ns(nbytes), nbytes=nbytes, measured=("pack", self._block(op), False))

    def _layer_ns(self, block: BlockSpec, passes: int) -> int:
        """A decoder layer's forward (`passes` 1) or backward from kept activations (2), by the spec source, launches aside."""
        attention = self.model.attention_flops(self.tokens, self.recipe.seq_len) * (2 if passes == 1 else 5) // 2
        return (
            self._products_ns(passes * self.model.forward_flops_per_token(block) * self.tokens)
            + self._flops_ns(attention, self.hardware.compute.attention_flops_per_s)
            + self._memory_ns(passes * self._layer_nbytes(block))
        )

    def _layer_nbytes(self, block: BlockSpec) -> int:
        """Memory traffic of a layer's forward outside its products: what a backward needs is written once and read once."""
        return 2 * self.tokens * self.model.saved_bytes_per_token(self.weight_nbytes)

    def _hidden_nbytes(self) -> int:
        return self.model.hidden_nbytes(self.tokens, self.weight_nbytes)

    def _products_ns(self, flops: int) -> int:
        return self._flops_ns(flops, self.hardware.compute.flops_per_s[self.recipe.precision])

    def _flops_ns(self, flops: int, flops_per_s: int) -> int:
        if self.on_host:
            flops, flops_per_s = flops * self.hardware.cores, flops_per_s * self._threads()
        return ceil_div(flops * NS_PER_S, flops_per_s)

    def _memory_ns(self, nbytes: int) -> int:
        return ceil_div(nbytes * NS_PER_S, self.hardware.compute.memory_bytes_per_s)

    def _threads(self) -> int:
        self._note_threads("recipe.compute_threads", self.recipe.compute_threads)
        return min(self.recipe.compute_threads, self.hardware.cores)

    def _note_threads(self, field: str, wanted: int) -> None:
        cores = self.hardware.cores
        if wanted > cores:
            self.notes.add(f"{self.hardware.name}: {field} asks for {wanted} threads of {cores} cores; predicted with {cores}")

    def _note_attention(self) -> None:
        """The profile's rate is of a fused causal kernel, which neither of these is."""
        recipe, masked = self.recipe, self.recipe.attention_mask == "segments"
        if recipe.attention == "eager" or masked:
            what = f"attention={recipe.attention!r}" + (" with a mask of segments" if masked else "")
            self.notes.add(
                f"{self.hardware.name}: recipe: {what}: predicted at the profile's rate for a fused causal kernel; scores and"
                " mask in memory, and the hidden pairs, are not counted: expect longer"
            )

    def _compute(
        self, *kernels: str, ns: int, nbytes: int, times: int = 1, measured: tuple[ComputeKind, BlockSpec, bool] | None = None
    ) -> Work:
        """`ns` by the spec source unless it was measured; `kernels` are launched `times` over. On the host it shares DRAM
        (`nbytes` of traffic) and cores."""
        launches = self.hardware.compute.launch_ns * times * sum(_KERNELS[k][not self.recipe.compiled] for k in kernels)
        found = self._lookup(*measured) if measured is not None else None
        if found is not None:
            launches, ns = 0, found
        elif {"forward", "backward"} & set(kernels):
            self._note_attention()
        if not self.on_host:
            return Work(launches + ns)
        return Work(launches, ns, NS_PER_S, "compute", self._threads(), nbytes)

    def _lookup(self, kind: ComputeKind, block: BlockSpec, adds: bool) -> int | None:
        """The measured duration, or None."""
        if not self.hardware.compute.measured:
            return None
        numel = block.numel + (self.model.embedding.numel if block.tied else 0)
        tokens, seq_len = (1, 1) if kind == "pack" else (self.tokens, self.recipe.seq_len)
        for of in (True, False) if adds else (False,):
            rows = sorted(self.measured.get((kind, block.kind, numel, seq_len, of), {}).items())
            i = bisect_left(rows, (tokens, 0))
            if i < len(rows) and rows[i][0] == tokens:
                return rows[i][1]
            if 0 < i < len(rows):
                return interpolate(rows[i - 1], rows[i], tokens)
        at = "" if kind == "pack" else f" at {tokens} tokens in rows of {seq_len}"
        self.notes.add(
            f"{self.hardware.name}: {kind} of a {block.kind} of {numel} parameters{at} is outside the measured durations"
            f" ({conditions(kind, self.recipe)}); predicted from rates"
        )
        return None

    def _block(self, op: Op) -> BlockSpec:
        if op.block is None:
            raise ValueError(f"{op.name}: a {op.kind} names a block")
        return self.model.blocks[op.block]


def _nbytes(accesses: Iterable[Access]) -> int:
    return sum([a.stop - a.start for a in accesses])


def _accumulator_nbytes(op: Op) -> int:
    return _nbytes(a for a in (*op.reads, *op.writes) if a.tag.what == "acc")
