"""Memory over time: what a schedule holds in each space while a trace runs.

Most storages exist as long as the schedule does. A dynamic one (a block's kept activations) exists, in each part anew, from the
start of its first write to the end of its last read (of its last write, if nothing reads it). The peak is the maximum over time
of what exists, not the sum of all there ever is: a kept activation of the first block is gone before the step ends.

`lane_moments` says the same without times. Where one lane alone touches the dynamic storages, as the compute lane does kept
activations, the order of that lane is enough: which of them exist while an op runs does not depend on how long anything takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import NamedTuple

from megatrain.schedule.nouns import Op, Part, Schedule, Space
from megatrain.trace import Trace


class MemoryUse(NamedTuple):
    """Use of one space. `timeline` has (from_ns, nbytes) at each change, `static_nbytes` what always exists. The peak is first
    reached when op `peak_at` starts ("" when nothing dynamic exists in this space). `part_peaks` has one entry for each part
    that ran."""

    static_nbytes: int
    timeline: tuple[tuple[int, int], ...]
    peak_nbytes: int
    peak_at: str
    part_peaks: tuple[int, ...]


def memory_use(schedule: Schedule, trace: Trace) -> dict[Space, MemoryUse]:
    """Use of host and device memory over the run that `trace` shows, whatever its source. Times in ns, sizes in bytes."""
    parts = {part.name: part for part in (schedule.prologue, schedule.body, schedule.epilogue)}
    lives = {name: _lives(schedule, part) for name, part in parts.items()}
    changes: dict[Space, list[tuple[int, int, int, str]]] = {"host": [], "device": []}
    for number, events in groupby(trace.events, key=lambda e: e.part):
        part = parts[trace.parts[number]]
        when = {e.position: e for e in events}
        for storage, (writers, users) in lives[part.name].items():
            first = min(writers, key=lambda i: when[i].start_ns)
            last_ns = max(when[i].end_ns for i in users)
            of_space, nbytes = changes[schedule.storages[storage].space], schedule.storages[storage].nbytes
            of_space.append((when[first].start_ns, nbytes, number, f"{part.name} {part.text(first)}"))
            of_space.append((last_ns, -nbytes, number, ""))
    return {space: _accumulate(schedule, space, of_space, len(trace.parts)) for space, of_space in changes.items()}


class Moment(NamedTuple):
    """One op of a lane, and the dynamic storages, by name, that begin to exist when it starts and that are gone when it ends."""

    op: Op
    born: tuple[str, ...]
    gone: tuple[str, ...]


def lane_moments(schedule: Schedule, part: Part) -> tuple[Moment, ...]:
    """The ops of the lane that touches the part's dynamic storages (the compute lane, if there are none), in order.

    ValueError, naming a storage, if two lanes touch dynamic storages: then what exists at once depends on times.
    """
    lives = _lives(schedule, part)
    born: dict[int, list[str]] = {}
    gone: dict[int, list[str]] = {}
    lane = None
    for storage, (writers, users) in lives.items():
        name = schedule.storages[storage].name
        lanes = {part.ops[i].lane for i in (*writers, *users)} | ({lane} if lane is not None else set())
        if len(lanes) > 1:
            raise ValueError(f"{name}: lanes {', '.join(sorted(lanes))} touch dynamic storages; their lives depend on times")
        (lane,) = lanes
        born.setdefault(min(writers), []).append(name)
        gone.setdefault(max(users), []).append(name)
    return tuple(
        Moment(op, tuple(born.get(i, ())), tuple(gone.get(i, ())))
        for i, op in enumerate(part.ops)
        if op.lane == (lane or "compute")
    )


class LanePeak(NamedTuple):
    """The op at which most exists: `live` bytes of dynamic storages and `beside` of its own. `op` None: the lane has no ops."""

    live: int
    beside: int
    op: Op | None


def peak_on_lane(moments: Iterable[Moment], nbytes_of: Mapping[str, int], beside: Callable[[Op], int]) -> LanePeak:
    """The peak over a lane; ties go to the first op.

    `nbytes_of` has the size of each dynamic storage that exists (others count nothing), `beside` says what an op takes while it
    runs.
    """
    live, best = 0, LanePeak(0, 0, None)
    for op, born, gone in moments:
        live += sum([nbytes_of.get(name, 0) for name in born])
        extra = beside(op)
        if best.op is None or live + extra > best.live + best.beside:
            best = LanePeak(live, extra, op)
        live -= sum([nbytes_of.get(name, 0) for name in gone])
    return best


def _lives(schedule: Schedule, part: Part) -> dict[int, tuple[list[int], list[int]]]:
    """For each dynamic storage the part uses: the ops that write it, and those whose end it lives to."""
    writers: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for i, op in enumerate(part.ops):
        for accesses, found in ((op.writes, writers), (op.reads, readers)):
            for a in accesses:
                if schedule.storages[a.storage].dynamic:
                    found.setdefault(a.storage, []).append(i)
    return {storage: (ops, readers.get(storage, ops)) for storage, ops in writers.items()}


def _accumulate(
    schedule: Schedule, space: Space, changes: list[tuple[int, int, int, str]], n_parts: int
) -> MemoryUse:
    static = sum(s.nbytes for s in schedule.storages if s.space == space and not s.dynamic)
    # What ends at a time goes before what starts at it: an op that follows another may take over its memory.
    changes.sort(key=lambda c: (c[0], c[1]))
    now = peak = static
    at = ""
    timeline = [(0, static)]
    part_peaks = [static] * n_parts
    for time_ns, nbytes, part, name in changes:
        now += nbytes
        if timeline[-1][0] == time_ns:
            timeline[-1] = (time_ns, now)
        else:
            timeline.append((time_ns, now))
        part_peaks[part] = max(part_peaks[part], now)
        if now > peak:
            peak, at = now, name
    return MemoryUse(static, tuple(timeline), peak, at, tuple(part_peaks))
