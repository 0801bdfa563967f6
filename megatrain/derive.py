"""What a trace says about a schedule: busy and idle lanes, stalls and their causes, overlap, critical path, step times.

Everything here is a function of (Schedule, Trace), the same for predicted and measured traces, and stores nothing in either.

One idea carries the file. An op starts at the earliest when the op before it on its lane and all of its deps have ended; the
one of them that ended last *released* it. Walking from an op to the op that released it, and on from there, tiles the time
before its start without a hole: each piece of time is either the run of one op of that chain, or the delay of one whose
release came earlier than its start.

* The walk from the last op of a run is the *critical path*.
* The walk from an op that its lane sat idle for, cut where the idle time began, splits that gap among its causes. So every
  nanosecond of a gap is charged to the one op that was running (or was late to start) then: for a forward that waits for a
  load that waited for an update, the update's time is `update late` and only the load's own is `weights late`. An op that
  ended before the gap began is never blamed. (Lowering leaves out deps that others imply. That hides nothing: an implied dep
  ends no later than one that is left.)

The cause follows from the kind of that op, and, for ops further back on the chain, from what they held up:

    load                            weights late
    input                           input late; also the time an input could have run and did not: the batch was not there
    update, load[state],
    save[state]                     update late; behind a save: gradient slot busy (it holds the host slot)
    save                            gradient slot busy; behind an update: update late (its gradient was still under way)
    fetch, stash                    activations late: a layer's input is not back, or the slot it would go to is not free
    clip, constants, save[norm],
    load[constants]                 step boundary, and so is all that these waited for: the norm needs every gradient
    any op that was late to start   issue late

Two more appear only in stalls of lanes other than compute: `compute busy` (what the lane waits for is being computed, or the
slot it would fill is being read) and `gradients late` (the CPU waits for a gradient that is on its way down).

Not covered: a chain shows what would have to be shorter first, not what would bind next; and slow-down by contention is part
of an op's duration here, not a cause of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from megatrain.schedule.nouns import LANES, Kind, Lane, Op, Part, PlacedOp, Schedule, after_flush, place
from megatrain.trace import Event, Trace

Cause = Literal[
    "weights late", "gradient slot busy", "update late", "input late", "issue late", "step boundary",
    "activations late", "compute busy", "gradients late",
]  # fmt: skip
CAUSES: tuple[Cause, ...] = get_args(Cause)

_CAUSE_OF_KIND: dict[Kind, Cause] = {
    "load": "weights late", "input": "input late", "update": "update late", "save": "gradient slot busy",
    "clip": "step boundary", "constants": "step boundary", "report": "step boundary",
    "stash": "activations late", "fetch": "activations late",
}  # fmt: skip
_BOUNDARY_COPIES = ("norm", "constants")
# Behind an op of one cause, an op of a higher rank brings its own, one of the same or a lower rank inherits; rank 0 always
# brings its own.
_RANK: dict[Cause, int] = {
    "weights late": 0, "input late": 0, "activations late": 0, "compute busy": 0,
    "update late": 1, "gradient slot busy": 1, "gradients late": 1,
    "step boundary": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A trace joined with its schedule. All sequences go by position in the run; times in ns.

    `before[i]` is the op before i on its lane, -1 for the first. The run lasts from `begin_ns` (the first issue) to `end_ns`.
    """

    parts: tuple[Part, ...]
    placed: tuple[PlacedOp, ...]
    events: tuple[Event, ...]
    lanes: Mapping[Lane, tuple[int, ...]]
    before: tuple[int, ...]
    begin_ns: int
    end_ns: int

    def text(self, position: int) -> str:
        """The op as errors and tables name it: `part 1 (body) 12:load[3.1]`."""
        part, index, _, _ = self.placed[position]
        return f"part {part} ({self.parts[part].name}) {self.parts[part].text(index)}"

    def released_by(self, position: int) -> int:
        """Of the op's deps and the op before it on its lane, the one that ended last, -1 if there is none. Ties go to a dep,
        then to the later op."""
        ended, found = -1, -1
        for dep in self.placed[position].deps:
            if self.events[dep].end_ns > ended or (self.events[dep].end_ns == ended and dep > found):
                ended, found = self.events[dep].end_ns, dep
        before = self.before[position]
        return before if before >= 0 and self.events[before].end_ns > ended else found


class Piece(NamedTuple):
    """Time on a chain. `position` is the op that ran then or, where `ran` is false, that had been released and did not start."""

    position: int
    start_ns: int
    stop_ns: int
    ran: bool

    @property
    def ns(self) -> int:
        return self.stop_ns - self.start_ns


class Blame(NamedTuple):
    """A piece of a stall with its cause."""

    cause: Cause
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A gap before an op of a lane: `start_ns:stop_ns`, tiled by `blames` in order of time."""

    lane: Lane
    waiting: int
    start_ns: int
    stop_ns: int
    blames: tuple[Blame, ...]

    @property
    def ns(self) -> int:
        return self.stop_ns - self.start_ns

    @property
    def cause(self) -> Cause:
        """The cause of the largest share of the gap; ties go to the one nearest to the waiting op."""
        shares = by_cause([self])
        return max((b.cause for b in reversed(self.blames)), key=lambda cause: shares[cause])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneUse:
    """What a lane did in a run. busy + stalled + tail is the length of the run; `tail_ns` is after its last op (of a lane
    without ops: everything). `nbytes` were written by its ops: for the copy lanes, the bytes copied."""

    lane: Lane
    ops: int
    busy_ns: int
    stalled_ns: int
    tail_ns: int
    nbytes: int

    @property
    def idle_ns(self) -> int:
        return self.stalled_ns + self.tail_ns

    @property
    def utilisation(self) -> float:
        """Busy share of the run, 0 to 1; 0 for an empty run."""
        return self.busy_ns / max(1, self.busy_ns + self.idle_ns)


class Overlap(NamedTuple):
    """Busy time of a copy lane, and how much of it lies under busy time of the compute lane."""

    busy_ns: int
    under_compute_ns: int

    @property
    def fraction(self) -> float:
        """0 to 1; 1 for a lane that copied nothing: there was nothing to hide."""
        return self.under_compute_ns / self.busy_ns if self.busy_ns else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All derived figures of one run. `timed_steps` are the steps, counted from 0, that `step_times_ns` has a time of: those that
    follow another without a flush between."""

    run: Run
    lanes: Mapping[Lane, LaneUse]
    stalls: Mapping[Lane, tuple[Stall, ...]]
    overlap: Mapping[Lane, Overlap]
    critical_path: tuple[Piece, ...]
    timed_steps: tuple[int, ...]
    step_times_ns: tuple[int, ...]


def derive(schedule: Schedule, trace: Trace) -> Facts:
    """Every figure this module knows. ValueError as `join`."""
    run = join(schedule, trace)
    gaps = {lane: stalls(run, lane) for lane in LANES}
    times = step_times(schedule, trace)
    return Facts(
        run=run,
        lanes={lane: _use(run, lane, gaps[lane]) for lane in LANES},
        stalls=gaps,
        overlap={lane: overlap(run, lane) for lane in LANES if lane in ("h2d", "d2h")},
        critical_path=critical_path(run),
        timed_steps=tuple(times),
        step_times_ns=tuple(times.values()),
    )


# ---- joining ---------------------------------------------------------------------------------------------------------


def join(schedule: Schedule, trace: Trace) -> Run:
    """The ops that ran, each with its event.

    A prologue that is not the first part follows a flush: it starts after everything before it has ended. ValueError, naming
    the op, for a part the schedule does not have or that cannot follow the one before, an event missing, there twice or of no
    op, times not issued <= start <= end, and an op that starts before its lane was free or before a dep ended. Digests are
    not looked at: that is for `compare`.
    """
    named = {part.name: part for part in (schedule.prologue, schedule.body, schedule.epilogue)}
    for p, name in enumerate(trace.parts):
        if name not in named:
            raise ValueError(f"trace ({trace.source}): part {p} is {name!r}, the schedule has {', '.join(named)}")
        before = trace.parts[p - 1] if p else None
        follows = {
            "prologue": before in (None, "epilogue") or not schedule.epilogue.ops,
            "body": before in ("prologue", "body") and schedule.mode == "train",
            "epilogue": before in ("prologue", "body"),
        }
        if not follows[name]:
            raise ValueError(f"trace ({trace.source}): part {p} is {name!r}, which cannot follow {before or 'nothing'}")
    parts = [named[name] for name in trace.parts]
    placed = place(parts, barrier_before=after_flush(parts))
    lanes: dict[Lane, list[int]] = {lane: [] for lane in LANES}
    before_on_lane = []
    for i, q in enumerate(placed):
        line = lanes[q.op.lane]
        before_on_lane.append(line[-1] if line else -1)
        line.append(i)
    run = Run(
        parts=tuple(parts),
        placed=tuple(placed),
        events=_events(trace, parts),
        lanes={lane: tuple(line) for lane, line in lanes.items()},
        before=tuple(before_on_lane),
        begin_ns=min((e.issued_ns for e in trace.events), default=0),
        end_ns=max((e.end_ns for e in trace.events), default=0),
    )
    _check_times(run, trace)
    return run


def _events(trace: Trace, parts: Sequence[Part]) -> tuple[Event, ...]:
    """One event an op, in the order of the run."""
    base = [0]
    for part in parts:
        base.append(base[-1] + len(part.ops))
    found: list[Event | None] = [None] * base[-1]
    for event in trace.events:
        p, i, *_ = event
        if not (0 <= p < len(parts) and 0 <= i < len(parts[p].ops)):
            raise ValueError(f"trace ({trace.source}): event of part {p}, op {i}: no such op")
        if found[base[p] + i] is not None:
            raise ValueError(f"trace ({trace.source}): part {p} ({parts[p].name}) {parts[p].text(i)}: two events")
        found[base[p] + i] = event
    events = tuple(event for event in found if event is not None)
    if len(events) < len(found):
        missing = found.index(None)
        p = next(p for p in range(len(parts)) if missing < base[p + 1])
        raise ValueError(
            f"trace ({trace.source}): part {p} ({parts[p].name}) {parts[p].text(missing - base[p])}: no event"
            f" ({len(found) - len(events)} of {len(found)} ops have none)"
        )
    return events


def _check_times(run: Run, trace: Trace) -> None:
    for i, (placed, event) in enumerate(zip(run.placed, run.events, strict=True)):
        if not event.issued_ns <= event.start_ns <= event.end_ns:
            times = f"issued {event.issued_ns}, start {event.start_ns}, end {event.end_ns} ns"
            raise ValueError(f"trace ({trace.source}): {run.text(i)}: {times} are not in this order")
        for role, d in [("lane", run.before[i])] + [("dep", d) for d in placed.deps]:
            if d >= 0 and run.events[d].end_ns > event.start_ns:
                what = "the op before it on its lane" if role == "lane" else "its dep"
                raise ValueError(
                    f"trace ({trace.source}): {run.text(i)}: starts at {event.start_ns} ns, before {what},"
                    f" {run.text(d)}, ends at {run.events[d].end_ns} ns"
                )


# ---- stalls and the critical path ------------------------------------------------------------------------------------


def chain(run: Run, position: int, since_ns: int) -> Iterator[Piece]:
    """The time from `since_ns` to the start of an op, latest piece first: see the module's text. Pieces may be empty (an op
    of no duration is still a link of the chain); together they tile the interval."""
    while True:
        released_by = run.released_by(position)
        released_ns = max(since_ns, run.events[released_by].end_ns) if released_by >= 0 else since_ns
        if run.events[position].start_ns > released_ns:
            yield Piece(position, released_ns, run.events[position].start_ns, False)
        if released_by < 0 or run.events[released_by].end_ns <= since_ns:
            return
        event = run.events[released_by]
        yield Piece(released_by, max(since_ns, event.start_ns), event.end_ns, True)
        position = released_by


def critical_path(run: Run) -> tuple[Piece, ...]:
    """The chain that ends with the last op to end, in order of time; it tiles the run. An op's time on the path is its `ran`
    piece, its delay after release the other one."""
    if not run.events:
        return ()
    last = max(range(len(run.events)), key=lambda i: (run.events[i].end_ns, i))
    path = [Piece(last, run.events[last].start_ns, run.events[last].end_ns, True)]
    path.extend(chain(run, last, run.begin_ns))
    return tuple(reversed(path))


def stalls(run: Run, lane: Lane = "compute") -> tuple[Stall, ...]:
    """Every gap before an op of the lane, the wait for its first op included, in order of time."""
    found = []
    for i in run.lanes[lane]:
        before = run.before[i]
        free_ns = run.events[before].end_ns if before >= 0 else run.begin_ns
        start_ns = run.events[i].start_ns
        if start_ns > free_ns:
            blames = tuple(reversed(list(_blames(run, i, free_ns))))
            found.append(Stall(lane=lane, waiting=i, start_ns=free_ns, stop_ns=start_ns, blames=blames))
    return tuple(found)


def by_cause(gaps: Iterable[Stall]) -> dict[Cause, int]:
    """Nanoseconds of stalls by cause, in the order of `CAUSES`; every cause has an entry."""
    total = dict.fromkeys(CAUSES, 0)
    for gap in gaps:
        for cause, piece in gap.blames:
            total[cause] += piece.ns
    return total


def _blames(run: Run, waiting: int, since_ns: int) -> Iterator[Blame]:
    held_up, cause = run.placed[waiting].op, None
    for piece in chain(run, waiting, since_ns):
        op = run.placed[piece.position].op
        if piece.ran:
            cause = _cause(op, held_up, cause)
            held_up = op
            if piece.ns:
                yield Blame(cause, piece)
        else:
            yield Blame("input late" if op.kind == "input" else "issue late", piece)


def _cause(op: Op, held_up: Op, behind: Cause | None) -> Cause:
    """The cause that `op` is, having held up an op of a chain whose cause so far is `behind` (None: the waiting op)."""
    if op.lane == "compute":
        return "compute busy"
    own = _CAUSE_OF_KIND[op.kind]
    if op.what in _BOUNDARY_COPIES:
        own = "step boundary"
    elif op.what == "state":
        own = "update late"
    elif op.kind == "save" and held_up.lane == "cpu":
        own = "gradients late"
    if behind is None or _RANK[own] == _RANK[behind] == 0 or _RANK[own] > _RANK[behind]:
        return own
    return behind


# ---- totals ----------------------------------------------------------------------------------------------------------


def _use(run: Run, lane: Lane, gaps: Sequence[Stall]) -> LaneUse:
    line = run.lanes[lane]
    return LaneUse(
        lane=lane,
        ops=len(line),
        busy_ns=sum(run.events[i].end_ns - run.events[i].start_ns for i in line),
        stalled_ns=sum(gap.ns for gap in gaps),
        tail_ns=run.end_ns - (run.events[line[-1]].end_ns if line else run.begin_ns),
        nbytes=sum(run.placed[i].op.nbytes for i in line),
    )


def overlap(run: Run, lane: Lane) -> Overlap:
    """How much of a lane's busy time the compute lane is busy too. Linear in the ops of both."""
    mine, compute = run.lanes[lane], run.lanes["compute"]
    busy = under = j = 0
    for i in mine:
        start, end = run.events[i].start_ns, run.events[i].end_ns
        busy += end - start
        while j < len(compute) and run.events[compute[j]].end_ns <= start:
            j += 1
        k = j
        while k < len(compute) and run.events[compute[k]].start_ns < end:
            under += max(0, min(end, run.events[compute[k]].end_ns) - max(start, run.events[compute[k]].start_ns))
            k += 1
    return Overlap(busy, under)


STEADY = 6
SPREAD_LIMIT = 0.001


class StepTime(NamedTuple):
    """The settled step time in ns, and how far the steps it is the mean of differ: (longest - shortest) / mean. A simulated
    spread above `SPREAD_LIMIT` means that the run has not settled."""

    mean_ns: int
    spread: float


def step_times(schedule: Schedule, trace: Trace) -> dict[int, int]:
    """For each step (counted from 0 in the run) that follows another at once: the end of its last compute op minus that of the
    step before, in ns.

    Steps are prologues and bodies. A prologue starts a run or follows a flush, and what a flush takes (an evaluation, a
    checkpoint) is no part of a step: it has no time here. Looks at the times of compute ops only, whatever the source.
    """
    computes = {
        part.name: frozenset(i for i, op in enumerate(part.ops) if op.lane == "compute")
        for part in (schedule.prologue, schedule.body)
    }
    ends: dict[int, int] = {}
    for part, position, _, _, end_ns in trace.events:
        if position in computes.get(trace.parts[part], ()):
            ends[part] = max(end_ns, ends.get(part, end_ns))
    numbers = {part: step for step, part in enumerate(p for p, name in enumerate(trace.parts) if name in computes)}
    return {
        step: ends[part] - ends[part - 1]
        for part, step in numbers.items()
        if trace.parts[part] == "body" and part in ends and part - 1 in ends
    }


def step_time(schedule: Schedule, trace: Trace) -> StepTime:
    """`settled` of `step_times`. ValueError for a trace without two steps in a row."""
    return settled(tuple(step_times(schedule, trace).values()))


def settled(times_ns: Sequence[int]) -> StepTime:
    """The mean, rounded to ns, of the last `STEADY` step times (those of a run of 12 steps that has settled in the first 6), or
    of the later half where there are fewer than 12 steps. ValueError when there is no step time."""
    if not times_ns:
        raise ValueError("step time: the difference of two steps in a row, and no two ran")
    later = times_ns[-min(STEADY, (len(times_ns) + 1) // 2) :]
    mean = sum(later) / len(later)
    return StepTime(round(mean), (max(later) - min(later)) / mean if mean else 0.0)
