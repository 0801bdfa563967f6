"""Mutations of a schedule: one small mistake each, of every kind an error in lowering could make.

A mutation takes a schedule and a random source and returns what it did and the mutated schedule, or None where the schedule
has no place for it. Deps follow their ops: removing or moving an op renumbers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from megatrain.schedule import LANES, Access, Op, Part, Schedule

Mutant = tuple[str, Schedule]
Mutation = Callable[[Schedule, Random], Mutant | None]
PARTS = ("prologue", "body", "epilogue")


def each_dep(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Every schedule with one dep, or one dep on the part before, removed."""
    for part in PARTS:
        for i, op in enumerate(_ops(schedule, part)):
            for d in op.deps:
                mutant = replace(op, deps=tuple(x for x in op.deps if x != d))
                yield f"{part} {i}:{op.name} without dep {_ops(schedule, part)[d].name}", _with_op(schedule, part, i, mutant)
            for name in op.prev:
                mutant = replace(op, prev=tuple(x for x in op.prev if x != name))
                yield f"{part} {i}:{op.name} without dep -1:{name}", _with_op(schedule, part, i, mutant)


def is_barrier(schedule: Schedule, description: str) -> bool:
    """Whether the dep that was removed is the one `after` asks for by its meaning, not for any bytes."""
    return schedule.plan.update == "after" and ":input[0] without dep -1:update" in description


# ---- deps ----------------------------------------------------------------------------------------------------------------


def dep_removed(schedule: Schedule, random: Random) -> Mutant | None:
    sites = [(p, i, op) for p, i, op in _places(schedule) if op.deps]
    if not sites:
        return None
    part, i, op = random.choice(sites)
    d = random.choice(op.deps)
    mutant = replace(op, deps=tuple(x for x in op.deps if x != d))
    return f"{part} {i}:{op.name} without dep {d}", _with_op(schedule, part, i, mutant)


def dep_on_part_before_removed(schedule: Schedule, random: Random) -> Mutant | None:
    sites = [(p, i, op) for p, i, op in _places(schedule) if op.prev]
    if not sites:
        return None
    part, i, op = random.choice(sites)
    name = random.choice(op.prev)
    mutant = replace(op, prev=tuple(x for x in op.prev if x != name))
    return f"{part} {i}:{op.name} without dep -1:{name}", _with_op(schedule, part, i, mutant)


def dep_moved_back(schedule: Schedule, random: Random) -> Mutant | None:
    """A dep names the op before the right one on its lane."""
    sites = []
    for part, i, op in _places(schedule):
        ops = _ops(schedule, part)
        for d in op.deps:
            earlier = [j for j in range(d) if ops[j].lane == ops[d].lane]
            if earlier:
                sites.append((part, i, op, d, earlier[-1]))
    if not sites:
        return None
    part, i, op, d, earlier_dep = random.choice(sites)
    mutant = replace(op, deps=tuple(sorted({earlier_dep if x == d else x for x in op.deps})))
    return f"{part} {i}:{op.name} waits for {earlier_dep} in place of {d}", _with_op(schedule, part, i, mutant)


def dep_on_later_op(schedule: Schedule, random: Random) -> Mutant | None:
    part, i, op = random.choice(_places(schedule))
    d = random.randint(i, len(_ops(schedule, part)))  # itself, a later op, or one past the end
    return f"{part} {i}:{op.name} waits for {d}", _with_op(schedule, part, i, replace(op, deps=(*op.deps, d)))


# ---- order ---------------------------------------------------------------------------------------------------------------


def lane_neighbours_swapped(schedule: Schedule, random: Random) -> Mutant | None:
    return _swap(schedule, random, neighbours=True)


def lane_ops_swapped(schedule: Schedule, random: Random) -> Mutant | None:
    return _swap(schedule, random, neighbours=False)


def _swap(schedule: Schedule, random: Random, *, neighbours: bool) -> Mutant | None:
    part = random.choice([p for p in PARTS if len(_ops(schedule, p)) > 1])
    ops = _ops(schedule, part)
    by_lane = [[i for i, op in enumerate(ops) if op.lane == lane] for lane in LANES]
    lane = random.choice([x for x in by_lane if len(x) > 1] or [[0, 1]])
    k = random.randrange(len(lane) - 1)
    i, j = lane[k], lane[k + 1 if neighbours else random.randrange(k + 1, len(lane))]
    swapped = list(range(len(ops)))
    swapped[i], swapped[j] = j, i
    new = [replace(ops[old], deps=tuple(sorted(swapped[d] for d in ops[old].deps))) for old in swapped]
    return f"{part} {i}:{ops[i].name} and {j}:{ops[j].name} swapped", _with_ops(schedule, part, new)


def lane_changed(schedule: Schedule, random: Random) -> Mutant | None:
    part, i, op = random.choice(_places(schedule))
    lane = random.choice([x for x in LANES if x != op.lane])
    return f"{part} {i}:{op.name} on {lane}", _with_op(schedule, part, i, replace(op, lane=lane))


def op_dropped(schedule: Schedule, random: Random) -> Mutant | None:
    """An op left out of one part; those that waited for it wait for what it waited for."""
    part, i, op = random.choice(_places(schedule))
    return f"{part} {i}:{op.name} dropped", _drop(schedule, part, i)


def op_dropped_everywhere(schedule: Schedule, random: Random) -> Mutant | None:
    """The same, in every part that has an op of this name."""
    name = random.choice(_places(schedule))[2].name
    for part in PARTS:
        for i, op in enumerate(_ops(schedule, part)):
            if op.name == name:
                schedule = _drop(schedule, part, i)
                break
    return f"{name} dropped everywhere", schedule


def _drop(schedule: Schedule, part: str, gone: int) -> Schedule:
    ops = _ops(schedule, part)
    dropped = ops[gone]
    new = []
    for i, op in enumerate(ops):
        if i == gone:
            continue
        deps = set(op.deps) - {gone} | (set(dropped.deps) if gone in op.deps else set())
        prev = dict.fromkeys((*op.prev, *(dropped.prev if gone in op.deps else ())))
        new.append(replace(op, deps=tuple(sorted(d - (d > gone) for d in deps)), prev=tuple(prev)))
    schedule = _with_ops(schedule, part, new)
    if part == "epilogue":
        return schedule
    # What named it from the next part names what it waited for (what stood before it on its lane, if it waited for nothing).
    lane = [op.name for op in ops[:gone] if op.lane == dropped.lane]
    instead = [ops[d].name for d in dropped.deps] or lane[-1:]
    for follower in ("body", "epilogue"):
        followers = [
            replace(op, prev=tuple(dict.fromkeys(x for n in op.prev for x in (instead if n == dropped.name else [n]))))
            for op in _ops(schedule, follower)
        ]
        schedule = _with_ops(schedule, follower, followers)
    return schedule


# ---- bytes ---------------------------------------------------------------------------------------------------------------


def slot_changed(schedule: Schedule, random: Random) -> Mutant | None:
    """One access goes to another slot of its pool."""
    sites = [(s, a) for s in _accesses(schedule) for a in _pool_mates(schedule, s[4].storage)]
    if not sites:
        return None
    site, other = random.choice(sites)
    return _change(schedule, site, site[4]._replace(storage=other))


def storage_changed(schedule: Schedule, random: Random) -> Mutant | None:
    """One access goes to any other storage large enough, half the time in the same memory."""
    site = random.choice(_accesses(schedule))
    mine = schedule.storages[site[4].storage]
    others = [
        k
        for k, s in enumerate(schedule.storages)
        if k != site[4].storage and s.nbytes >= site[4].stop and (s.space == mine.space or random.random() < 0.2)
    ]
    return _change(schedule, site, site[4]._replace(storage=random.choice(others))) if others else None


def content_moved(schedule: Schedule, random: Random) -> Mutant | None:
    """Every access of a part to one content in one slot goes to another slot: right contents, and perhaps no longer ordered."""
    sites = [(s, other) for s in _accesses(schedule) for other in _pool_mates(schedule, s[4].storage)]
    if not sites:
        return None
    (part, _, _, _, access), other = random.choice(sites)

    def moved(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(
            a._replace(storage=other) if (a.storage, a.tag) == (access.storage, access.tag) else a for a in accesses
        )

    new = [replace(op, reads=moved(op.reads), writes=moved(op.writes)) for op in _ops(schedule, part)]
    return f"{part}: {access.tag} moved to {schedule.storages[other].name}", _with_ops(schedule, part, new)


def read_missing(schedule: Schedule, random: Random) -> Mutant | None:
    return _change(schedule, random.choice([s for s in _accesses(schedule) if s[2] == "reads"]), None)


def write_missing(schedule: Schedule, random: Random) -> Mutant | None:
    return _change(schedule, random.choice([s for s in _accesses(schedule) if s[2] == "writes"]), None)


def range_shifted(schedule: Schedule, random: Random) -> Mutant | None:
    """A range moves, or one end of it does."""
    site = random.choice(_accesses(schedule))
    by = random.choice([-256, -128, -4, -1, 1, 4, 128, 256])
    first, last = random.choice([(by, by), (by, 0), (0, by)])
    return _change(schedule, site, site[4]._replace(start=site[4].start + first, stop=site[4].stop + last))


# ---- tags and names ------------------------------------------------------------------------------------------------------


def tag_block_changed(schedule: Schedule, random: Random) -> Mutant | None:
    site = random.choice([s for s in _accesses(schedule) if s[4].tag.block is not None])
    tag = site[4].tag
    return _change(schedule, site, site[4]._replace(tag=tag._replace(block=(tag.block or 0) + random.choice([-1, 1]))))


def tag_micro_changed(schedule: Schedule, random: Random) -> Mutant | None:
    site = random.choice([s for s in _accesses(schedule) if s[4].tag.micro is not None])
    tag = site[4].tag
    return _change(schedule, site, site[4]._replace(tag=tag._replace(micro=(tag.micro or 0) + random.choice([-1, 1]))))


def tag_step_changed(schedule: Schedule, random: Random) -> Mutant | None:
    site = random.choice(_accesses(schedule))
    tag = site[4].tag
    return _change(schedule, site, site[4]._replace(tag=tag._replace(step=tag.step + random.choice([-1, 1]))))


def tag_what_changed(schedule: Schedule, random: Random) -> Mutant | None:
    site = random.choice(_accesses(schedule))
    others = sorted({s[4].tag.what for s in _accesses(schedule)} - {site[4].tag.what})
    return _change(schedule, site, site[4]._replace(tag=site[4].tag._replace(what=random.choice(others))))


def instance_changed(schedule: Schedule, random: Random) -> Mutant | None:
    """An op says it is another block's, micro-batch's or chunk's, and does what it did."""
    part, i, op = random.choice(_places(schedule))
    field = random.choice([f for f in ("block", "micro", "chunk") if getattr(op, f) is not None] or ["what"])
    value = "norm" if field == "what" and op.what != "norm" else "loss"
    new = value if field == "what" else getattr(op, field) + random.choice([-1, 1])
    fields: dict[str, Any] = {field: new}
    return f"{part} {i}:{op.name} with {field}={new}", _with_op(schedule, part, i, replace(op, **fields))


MUTATIONS: dict[str, Mutation] = {
    f.__name__: f
    for f in (
        dep_removed, dep_on_part_before_removed, dep_moved_back, dep_on_later_op,
        lane_neighbours_swapped, lane_ops_swapped, lane_changed, op_dropped, op_dropped_everywhere,
        slot_changed, storage_changed, content_moved, read_missing, write_missing, range_shifted,
        tag_block_changed, tag_micro_changed, tag_step_changed, tag_what_changed, instance_changed,
    )
}  # fmt: skip


# ---- plumbing ------------------------------------------------------------------------------------------------------------

_Site = tuple[str, int, str, int, Access]  # part, op, reads or writes, which of them, the access


def _ops(schedule: Schedule, part: str) -> tuple[Op, ...]:
    found: Part = getattr(schedule, part)
    return found.ops


def _with_ops(schedule: Schedule, part: str, ops: list[Op]) -> Schedule:
    fields: dict[str, Any] = {part: Part(name=part, ops=tuple(ops))}
    return replace(schedule, **fields)


def _with_op(schedule: Schedule, part: str, i: int, op: Op) -> Schedule:
    ops = list(_ops(schedule, part))
    ops[i] = op
    return _with_ops(schedule, part, ops)


def _places(schedule: Schedule) -> list[tuple[str, int, Op]]:
    return [(part, i, op) for part in PARTS for i, op in enumerate(_ops(schedule, part))]


def _accesses(schedule: Schedule) -> list[_Site]:
    return [
        (part, i, verb, k, a)
        for part, i, op in _places(schedule)
        for verb in ("reads", "writes")
        for k, a in enumerate(getattr(op, verb))
    ]


def _pool_mates(schedule: Schedule, storage: int) -> list[int]:
    pool, _, last = schedule.storages[storage].name.rpartition(".")
    if not pool or not last.isdigit():
        return []
    return [k for k, s in enumerate(schedule.storages) if k != storage and s.name.rpartition(".")[0] == pool]


def _change(schedule: Schedule, site: _Site, access: Access | None) -> Mutant:
    part, i, verb, k, old = site
    op = _ops(schedule, part)[i]
    accesses = list(getattr(op, verb))
    accesses[k : k + 1] = [] if access is None else [access]
    fields: dict[str, Any] = {verb: tuple(accesses)}
    return f"{part} {i}:{op.name} {verb} {old} -> {access}", _with_op(schedule, part, i, replace(op, **fields))
