"""Memory over time: what a schedule holds in each space while a trace runs.

Most storages exist as long as the schedule does. A dynamic one (a block's kept activations) exists, in each part anew, from the
start of its first write to the end of its last read (of its last write, if nothing reads it). The peak is the maximum over time
of what exists, not the sum of all there ever is: a kept activation of the first block is gone before the step ends.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from megatrain.schedule.nouns import Part, Schedule, Space
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
