"""Hazards: from what ops read and write, the deps they need. Used by lowering only; `check` has its own proof.

For every range of every storage the tracker knows the last writer and the last reader on each lane since. A read must follow
the writer; a write must follow the writer and the readers. Each op carries a vector clock (for each lane, the last op of that
lane known to have ended before this op starts), so an ordering that lane order or another dep implies adds no dep.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from megatrain.schedule.nouns import LANES, Access, Op, Storage

_LANE_NUMBER = {lane: i for i, lane in enumerate(LANES)}


class _Range:
    __slots__ = ("readers", "writer")

    def __init__(self, writer: int, readers: dict[int, int]) -> None:
        self.writer = writer
        self.readers = readers


class Hazards:
    """Feed it every op in program order; `order` returns the deps. Ops are numbered over all parts."""

    def __init__(self, storages: list[Storage]) -> None:
        # Per storage: sorted cut points and, for each interval between them, who touched it. Cut on demand.
        self._cuts = [[0, s.nbytes] for s in storages]
        self._ranges: list[dict[int, _Range]] = [{0: _Range(-1, {})} for _ in storages]
        self._lane: list[int] = []
        self._clock: list[list[int]] = []
        self._last_on_lane = [-1] * len(LANES)
        self._part_start = 0
        self._previous_start = 0
        self._was_cut = False

    def next_part(self) -> None:
        self._previous_start, self._part_start = self._part_start, len(self._lane)

    def order(self, op: Op, after: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Deps in this part and in the part before, each as ascending positions in its part. `after` are extra deps,
        relative to the start of this part."""
        me, lane = len(self._lane), _LANE_NUMBER[op.lane]
        raw = {self._part_start + a for a in after}
        self._was_cut = False
        read, written = self._all_touched(op.reads), self._all_touched(op.writes)
        if self._was_cut:  # perhaps one of these ranges: then its other part is missing
            read, written = self._all_touched(op.reads), self._all_touched(op.writes)
        for r in read:
            raw.add(r.writer)
        for r in written:
            raw.add(r.writer)
            raw.update(r.readers.values())
        for r in read:
            r.readers[lane] = me
        for r in written:
            r.writer = me
            r.readers = {}

        predecessor = self._last_on_lane[lane]
        clock = list(self._clock[predecessor]) if predecessor >= 0 else [-1] * len(LANES)
        clock[lane] = predecessor
        deps = []
        for d in sorted(raw - {-1}, reverse=True):  # latest first: it most likely implies the others
            if d <= clock[self._lane[d]]:
                continue
            deps.append(d)
            other = self._clock[d]
            clock = [a if a > b else b for a, b in zip(clock, other, strict=True)]
            clock[self._lane[d]] = max(clock[self._lane[d]], d)
        self._lane.append(lane)
        self._clock.append(clock)
        self._last_on_lane[lane] = me

        deps.reverse()
        if deps and deps[0] < self._previous_start:
            raise RuntimeError(f"lowering: {op.name} depends on an op two parts back")
        inside = tuple(d - self._part_start for d in deps if d >= self._part_start)
        before = tuple(d - self._previous_start for d in deps if d < self._part_start)
        return inside, before

    def _all_touched(self, accesses: tuple[Access, ...]) -> list[_Range]:
        out = []
        for storage, start, stop, _ in accesses:
            cuts, ranges = self._cuts[storage], self._ranges[storage]
            first = self._cut(cuts, ranges, start)
            if first + 1 < len(cuts) and cuts[first + 1] == stop:  # as it is but for the first time
                out.append(ranges[start])
            else:
                end = self._cut(cuts, ranges, stop)
                out.extend([ranges[cut] for cut in cuts[first:end]])
        return out

    def _cut(self, cuts: list[int], ranges: dict[int, _Range], at: int) -> int:
        """Make `at` a cut point; its position among them."""
        i = bisect_left(cuts, at)
        if i < len(cuts) and cuts[i] == at:
            return i
        left = ranges[cuts[i - 1]]
        self._was_cut = True
        insort(cuts, at)
        ranges[at] = _Range(left.writer, dict(left.readers))
        return i
