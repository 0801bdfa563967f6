"""Ops, lanes, storages and parts: a schedule as a value.

All of its semantics:

1. each *lane* runs its ops one at a time, in the order they stand in the part;
2. an op starts only after every op in its `deps` (same part) and `prev` (the part that ran before) has ended;
3. every byte two ops share belongs to a named `Storage`; lowering turns every hazard on it into a dep.

An op may depend only on ops that stand before it, so the order of a part is one possible execution (the single-lane one) and
a cycle cannot be written down. Buffer depth, prefetch and overlap have no other representation than storages and deps.

What a range of bytes holds is a content tag, such as `weights[3]@-1`: weights of block 3 as the update of the step before this
one left them. Tags are what `check` proves reads against; no run-time code looks at them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from megatrain.model import ModelSpec
    from megatrain.plan import Plan
    from megatrain.recipe import Recipe

Lane = Literal["h2d", "compute", "d2h", "cpu"]
LANES: tuple[Lane, ...] = ("h2d", "compute", "d2h", "cpu")
Space = Literal["host", "device"]

Kind = Literal[
    "input", "load", "forward", "stash", "loss", "fetch", "backward", "pack", "save", "report", "constants", "clip", "update",
]  # fmt: skip
COPIES: tuple[Kind, ...] = ("load", "save", "stash", "fetch")
"""input: the batch goes up. load/save: bytes go up/down. stash/fetch: a layer's input goes down, and up again. loss: final norm,
head forward and (in training) backward of one micro-batch. pack: accumulated gradients rounded once, norm partials. report: the
losses, now on the host, go to whoever asked for the step. constants: the optimizer's constants of a step whose updates wait for
no norm. clip: finish the norm (and, where updates wait for it, the constants). update: AdamW on a range."""


class Tag(NamedTuple):
    """What a range of bytes holds; `step` is relative to the step that looks at it (0: made in this step).

    `micro` is the micro-batch or, of a block's state on its way through the device, the chunk: such contents lie anywhere in
    their storage, others where the block has them.
    """

    what: str
    block: int | None = None
    micro: int | None = None
    step: int = 0

    def __str__(self) -> str:
        inner = ".".join(str(i) for i in (self.block, self.micro) if i is not None)
        return f"{self.what}[{inner}]@{self.step}" if inner else f"{self.what}@{self.step}"

    def aged(self) -> Tag:
        """The same content seen from the next step."""
        return self._replace(step=self.step - 1)


class Access(NamedTuple):
    """Bytes `start:stop` of storage number `storage`, holding (or given) `tag`."""

    storage: int
    start: int
    stop: int
    tag: Tag

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A named run of bytes. `dynamic` ones exist only from their first write to their last read (saved activations). `copied`
    ones are on the host and copies between host and device touch them."""

    space: Space
    name: str
    nbytes: int
    device: int = 0
    dynamic: bool = False
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One piece of work on one lane. `deps` are positions in the same part, `prev` names of ops of the part before.

    `block`, `micro` and `chunk` say which instance of its kind it is; `what` names a copy of something else than a block's
    weights or gradient (`save[loss]`, `load[state.3.1]`); `nth` tells apart ops of one name within a part (the second load of a
    block: `load[3.1]#2`).
    """

    kind: Kind
    lane: Lane
    block: int | None = None
    micro: int | None = None
    chunk: int | None = None
    what: str | None = None
    nth: int = 1
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    deps: tuple[int, ...] = ()
    prev: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        inner = ".".join(str(i) for i in (self.what, self.block, self.micro, self.chunk) if i is not None)
        suffix = f"#{self.nth}" if self.nth > 1 else ""
        return f"{self.kind}[{inner}]{suffix}" if inner else self.kind + suffix

    @property
    def nbytes(self) -> int:
        """Bytes written: for a copy, the bytes copied."""
        return sum(w.stop - w.start for w in self.writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a schedule between two states: one whole step, or the pending updates of a flush."""

    name: str
    ops: tuple[Op, ...]

    def text(self, index: int) -> str:
        return f"{index}:{self.ops[index].name}"


class PlacedOp(NamedTuple):
    """An op within a run of parts: `part` counts the parts that ran, `position` the op's in its part, `deps` are
    positions in the run."""

    part: int
    position: int
    op: Op
    deps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`prologue`: a whole step from the cold state (no pending update, slots undefined). `body`: a whole step from the state a
    step leaves. `epilogue`: the pending updates, back to the cold state. An evaluation schedule has a prologue only.

    After a flush everything has ended, so a prologue's ops need no deps on what ran before.
    """

    model: ModelSpec
    recipe: Recipe
    plan: Plan
    mode: Literal["train", "evaluate"]
    storages: tuple[Storage, ...]
    prologue: Part
    body: Part
    epilogue: Part

    def parts(self, steps: int) -> list[Part]:
        """What runs for `steps` training steps, cold to cold: prologue, (steps - 1) x body, epilogue. An evaluation is its
        prologue, whatever `steps`. ValueError for fewer steps than one."""
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps: must be an integer >= 1, got {steps!r}")
        if self.mode == "evaluate":
            return [self.prologue]
        return [self.prologue, *[self.body] * (steps - 1), self.epilogue]

    def part(self, name: str) -> Part:
        """The part of this name; ValueError if there is none."""
        for part in (self.prologue, self.body, self.epilogue):
            if part.name == name:
                return part
        raise ValueError(f"schedule: has no part {name!r}")

    def unroll(self, steps: int) -> list[PlacedOp]:
        """The ops of `parts(steps)`, each with its deps as positions among them. ValueError as `parts`."""
        return place(self.parts(steps))

    def digests(self) -> dict[str, str]:
        """One hash a part, over what each lane runs: names, deps waited for, ranges bound. See `part_digest`."""
        return {part.name: part_digest(self.lane_lines(part)) for part in (self.prologue, self.body, self.epilogue)}

    def lane_lines(self, part: Part) -> dict[str, list[str]]:
        lines: dict[str, list[str]] = {lane: [] for lane in LANES}
        for op in part.ops:
            waited = [part.ops[d].name for d in op.deps] + [f"-1:{name}" for name in op.prev]
            lines[op.lane].append(
                ran_line(op.name, waited, self._ranges(op.reads), self._ranges(op.writes), op.nbytes)
            )
        return lines

    def _ranges(self, accesses: Iterable[Access]) -> list[tuple[str, int, int]]:
        return [(self.storages[a.storage].name, a.start, a.stop) for a in accesses]

    def format(self, part: Part) -> str:
        """The text form: one line an op, `index:name lane <- deps | reads -> writes`."""
        lines = []
        for i, op in enumerate(part.ops):
            deps = [part.text(d) for d in op.deps] + [f"-1:{name}" for name in op.prev]
            reads = " ".join(self._access(a) for a in op.reads)
            writes = " ".join(self._access(a) for a in op.writes)
            lines.append(f"{part.text(i)} {op.lane} <- {' '.join(deps) or '.'} | {reads or '.'} -> {writes or '.'}")
        return "\n".join(lines) + "\n"

    def _access(self, a: Access) -> str:
        return f"{self.storages[a.storage].name}({a.start}:{a.stop})={a.tag}"


def ran_line(
    name: str,
    waited: Sequence[str],
    reads: Sequence[tuple[str, int, int]],
    writes: Sequence[tuple[str, int, int]],
    nbytes: int,
) -> str:
    """One op as a digest sees it. An engine builds the same line from what it really did."""

    def ranges(items: Sequence[tuple[str, int, int]]) -> str:
        return " ".join(f"{storage}({start}:{stop})" for storage, start, stop in items)

    return f"{name} <- {' '.join(sorted(waited))} | {ranges(reads)} -> {ranges(writes)} | {nbytes}"


def part_digest(lines: dict[str, list[str]]) -> str:
    """SHA-256, 16 hex digits, over the lanes in fixed order and each lane's ops in the order they ran."""
    digest = hashlib.sha256()
    for lane in LANES:
        digest.update(f"{lane}\n".encode())
        for line in lines.get(lane, ()):
            digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:16]


def after_flush(parts: Sequence[Part]) -> list[bool]:
    """For each part of a run, whether everything before it has ended: a prologue starts from the cold state."""
    return [i > 0 and part.name == "prologue" for i, part in enumerate(parts)]


def place(parts: Sequence[Part], *, barrier_before: Sequence[bool] | None = None) -> list[PlacedOp]:
    """Concatenate parts into one run, with deps as positions in the run.

    `barrier_before[i]` says that everything before part i has ended when it starts (a flush); its ops then wait for every op of
    the part before. Raises ValueError for a `prev` name that the part before does not have.
    """
    placed: list[PlacedOp] = []
    names: dict[str, int] = {}
    for p, part in enumerate(parts):
        base = len(placed)
        fence: tuple[int, ...] = ()
        if barrier_before is not None and barrier_before[p]:
            last = {q.op.lane: i for i, q in enumerate(placed)}
            fence = tuple(sorted(last.values()))
        fresh: dict[str, int] = {}
        for i, op in enumerate(part.ops):
            deps = [base + d for d in op.deps]
            for name in op.prev:
                if name not in names:
                    raise ValueError(f"{part.text(i)}: depends on -1:{name}, which the part before does not have")
                deps.append(names[name])
            fresh[op.name] = base + i
            placed.append(PlacedOp(p, i, op, fence + tuple(deps)))
        names = fresh
    return placed
