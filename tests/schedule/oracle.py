"""A second proof of a schedule, as dumb as possible and sharing no code with `check` but the table of kinds.

Where `check` follows one vector clock an op and one tag a range, this oracle builds the graph of deps and lane order, takes its
transitive closure, compares *all* pairs of conflicting accesses with it, and runs the schedule on memory that holds one tag
number for every single byte. It accepts any graph without a cycle, whichever way its ops stand in the text.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.schedule import Op, Part, Schedule, Tag
from megatrain.schedule.kinds import table_of
from megatrain.schedule.nouns import Access

PLANES = ("weights", "lo", "m", "v")
# Contents with one range a micro-batch: the table of kinds counts their bytes from the micro-batch's own start.
PER_MICRO_BATCH = ("hidden", "dhidden", "saved", "input", "loss")


@dataclass(frozen=True)
class _Node:
    part: int
    index: int
    op: Op


def harm(schedule: Schedule, *, long: bool = False) -> str | None:
    """What is wrong with the schedule, or None. `long` runs one more body and goes on after the flush."""
    prologue, body, epilogue = schedule.prologue, schedule.body, schedule.epilogue
    for part in (prologue, body, epilogue):
        fault = _against_table(schedule, part)
        if fault:
            return fault
    if schedule.mode == "evaluate":
        return _run(schedule, [prologue, prologue], flushed_before={1})
    fault = _run(schedule, [prologue, body, body, epilogue], flushed_before=set())
    fault = fault or _run(schedule, [prologue, epilogue, prologue], flushed_before={2})
    if long and not fault:
        fault = _run(schedule, [prologue, body, body, body, epilogue, prologue, body, epilogue], flushed_before={5})
    return fault


def _against_table(schedule: Schedule, part: Part) -> str | None:
    """Each op reads and writes exactly what the table of kinds says, on its lane; names are unique; ranges exist."""
    table = table_of(schedule)
    if len({op.name for op in part.ops}) < len(part.ops):
        return f"{part.name}: two ops of one name"
    for op in part.ops:
        try:
            need = table(op)
        except (LookupError, ValueError, StopIteration):
            return f"{op.name}: not in the table"
        if op.lane != need.lane:
            return f"{op.name}: lane"
        for accesses, wanted in ((op.reads, need.reads), (op.writes, need.writes)):
            found = []
            for a in accesses:
                if not (0 <= a.storage < len(schedule.storages) and 0 <= a.start < a.stop):
                    return f"{op.name}: no such bytes"
                storage = schedule.storages[a.storage]
                if a.stop > storage.nbytes:
                    return f"{op.name}: past the end of {storage.name}"
                origin = a.start if a.tag.what in PER_MICRO_BATCH else 0
                found.append((storage.space, a.tag, a.start - origin, a.stop - origin))
            if sorted(map(str, found)) != sorted(str(tuple(w)) for w in wanted):
                return f"{op.name}: not what the table says"
    return None


def _run(schedule: Schedule, parts: Sequence[Part], *, flushed_before: set[int]) -> str | None:
    nodes = [_Node(p, i, op) for p, part in enumerate(parts) for i, op in enumerate(part.ops)]
    at = {(n.part, n.index): k for k, n in enumerate(nodes)}
    before: list[set[int]] = [set() for _ in nodes]  # direct predecessors
    last_on_lane: dict[str, int] = {}
    for k, n in enumerate(nodes):
        if n.op.lane in last_on_lane:
            before[k].add(last_on_lane[n.op.lane])
        last_on_lane[n.op.lane] = k
        for d in n.op.deps:
            if (n.part, d) not in at:
                return f"{n.op.name}: dep {d} does not exist"
            before[k].add(at[n.part, d])
        for name in n.op.prev:
            there = [j for j, m in enumerate(nodes) if m.part == n.part - 1 and m.op.name == name]
            if len(there) != 1:
                return f"{n.op.name}: dep -1:{name} does not exist"
            before[k].add(there[0])
        for flush in flushed_before:
            if n.part >= flush:
                before[k].update(j for j, m in enumerate(nodes) if m.part < flush)

    order = _topological(before)
    if len(order) < len(nodes):
        return "a cycle"
    ancestors = [0] * len(nodes)  # bit j of ancestors[k]: j has ended when k starts
    for k in order:
        for j in before[k]:
            ancestors[k] |= ancestors[j] | (1 << j)

    for number, storage in enumerate(schedule.storages):
        touches = [
            (k, a.start, a.stop, writes)
            for k, n in enumerate(nodes)
            for writes, accesses in ((False, n.op.reads), (True, n.op.writes))
            for a in accesses
            if a.storage == number
        ]
        for k, start, stop, writes in touches:
            if not writes:
                continue
            for j, first, end, _ in touches:
                if j == k or end <= start or stop <= first:
                    continue
                if not (ancestors[k] >> j & 1 or ancestors[j] >> k & 1):
                    return f"{nodes[j].op.name} and {nodes[k].op.name} meet in {storage.name}"
    return _contents(schedule, parts, [nodes[k] for k in order])


def _topological(before: list[set[int]]) -> list[int]:
    """Kahn's order, smallest position first; shorter than `before` if there is a cycle."""
    after: list[list[int]] = [[] for _ in before]
    waiting = [len(b) for b in before]
    for k, b in enumerate(before):
        for j in b:
            after[j].append(k)
    ready = [k for k, w in enumerate(waiting) if w == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        k = heapq.heappop(ready)
        order.append(k)
        for n in after[k]:
            waiting[n] -= 1
            if waiting[n] == 0:
                heapq.heappush(ready, n)
    return order


def _contents(schedule: Schedule, parts: Sequence[Part], nodes: Sequence[_Node]) -> str | None:
    """Run the ops in an order the graph allows, on memory with one tag number a byte."""
    numbers: dict[Tag, int] = {}

    def number(tag: Tag, step: int) -> int:
        return numbers.setdefault(tag._replace(step=tag.step + step), len(numbers) + 1)

    memory = {s.name: np.zeros(s.nbytes, dtype=np.int32) for s in schedule.storages}
    names = [s.name for s in schedule.storages]
    planes = [(s.name, s.name.split("[")[0], int(s.name.split("[")[1][:-1])) for s in schedule.storages if _is_plane(s.name)]
    for name, what, block in planes:
        memory[name][:] = number(Tag(what, block), -1)
    steps, steps_done = [], 0  # the step of each part; an epilogue's tags look back on the step before it
    for part in parts:
        trains = schedule.mode == "train" and part is not schedule.epilogue
        steps.append(steps_done)
        steps_done += trains
    left = [len(p.ops) for p in parts]

    for n in nodes:
        step = steps[n.part]
        for a in n.op.reads:
            held = memory[names[a.storage]][a.start : a.stop]
            if (held != number(a.tag, step)).any():
                return f"{n.op.name}: reads something other than {a.tag}"
        if n.op.kind in ("load", "save", "stash", "fetch"):
            fault = _copies(n.op)
            if fault:
                return fault
        for a in n.op.writes:
            memory[names[a.storage]][a.start : a.stop] = number(a.tag, step)
        left[n.part] -= 1
        if left[n.part] == 0 and parts[n.part] is not schedule.epilogue:
            for m in range(schedule.recipe.micro_batches):
                if (memory["loss.host"][4 * m : 4 * m + 4] != number(Tag("loss", None, m), step)).any():
                    return f"{parts[n.part].name}: the loss of micro-batch {m} is not on the host"
            if schedule.mode == "train" and (memory["norm"] != number(Tag("norm"), step)).any():
                return f"{parts[n.part].name}: the norm is not on the host"
    if any(left):
        return "a part did not run"
    updated = steps_done - 1 if schedule.mode == "train" else -1
    settled = parts[-1] is schedule.epilogue or schedule.plan.update != "next_forward"
    for name, what, block in planes:
        if settled and (memory[name] != number(Tag(what, block), updated)).any():
            return f"{name} does not hold step {updated} at the end"
    return None


def _copies(op: Op) -> str | None:
    """What a copy writes is what it reads, content by content. On its way a chunk of state has a number."""

    def tag(a: Access) -> Tag:
        return a.tag._replace(micro=None) if op.what == "state" else a.tag

    if sorted(str((tag(a), a.nbytes)) for a in op.reads) != sorted(str((tag(a), a.nbytes)) for a in op.writes):
        return f"{op.name}: copies one thing over another"
    return None


def _is_plane(name: str) -> bool:
    return name.split("[")[0] in PLANES and name.endswith("]")
