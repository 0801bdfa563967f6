"""Backend: the seam between the executor, which knows order, and what carries ops out.

A backend runs one op at a time a lane, on that lane's thread, and says what it did: the byte ranges it bound and the bytes it
moved. The executor builds the digest of a measured trace from these answers and from nothing else.

A *mark* is a point in a lane's time, taken before and after an op. On a lane that works while its thread waits, it is the time
itself; on a CUDA stream it is an event, which has been enqueued when the call returns and is reached later. `follow` then makes
the lane wait for a mark of another: the executor calls it only after that mark was taken, since waiting for an event that was
never recorded waits for nothing. What was not issued yet can only be an op of another thread: `follow_count` makes a lane wait
for it by itself, where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from megatrain.engine.clock import Clock
from megatrain.schedule.nouns import LANES, Lane, Op
from megatrain.trace import Source

BoundRange = tuple[str, int, int]
"""(storage name, first byte, end byte)"""
Base = Any
"""What ties a backend's marks to the clock for the length of a part; see `Lanes.base`."""


class Ran(NamedTuple):
    """What running an op really touched. `nbytes`: bytes copied by a copy, bytes bound for writing by other ops."""

    reads: tuple[BoundRange, ...]
    writes: tuple[BoundRange, ...]
    nbytes: int


class Timeline(Protocol):
    """Marks as times of the backend's clock. Two of them may be off from each other by `resolution_ns`; `notes` say so."""

    @property
    def resolution_ns(self) -> int: ...
    @property
    def notes(self) -> Sequence[str]: ...
    def ns(self, part: int, mark: Any) -> int:
        """The time of a mark of the `part`-th part."""
        ...


class HostTimeline:
    """Where a mark is the time."""

    resolution_ns = 0
    notes: Sequence[str] = ()

    def ns(self, part: int, mark: int) -> int:
        return mark


class Lanes(Protocol):
    """How lanes keep time and wait for each other. What names a lane is called on that lane's thread."""

    @property
    def threads(self) -> tuple[tuple[Lane, ...], ...]:
        """The lanes, by the thread that issues their ops."""
        ...

    def enter(self, lanes: tuple[Lane, ...]) -> None:
        """Called once on the thread of `lanes` before its first op."""
        ...

    def mark(self, lane: Lane, *, timed: bool) -> Any:
        """This point of the lane; `timed` if a trace will ask for its time."""
        ...

    def follow(self, lane: Lane, mark: Any) -> None:
        """What the lane runs next comes after `mark`."""
        ...

    def follow_count(self, lane: Lane, other: Lane, count: int) -> bool:
        """What the lane runs next comes after the first `count` ops of `other`, which may not have been issued yet. False if it
        cannot wait for that by itself, so that its thread must."""
        ...

    def ended(self, lane: Lane, count: int) -> None:
        """The first `count` ops of the lane have been issued."""
        ...

    def recycle(self, marks: Iterable[Any], *, timed: bool) -> None:
        """Nobody will ask for these marks any more; on any thread."""
        ...

    def abandon(self) -> None:
        """The run has failed or ends: whatever a lane waits for by itself, it need not; on any thread."""
        ...

    def base(self) -> Base:
        """Taken when a part is submitted that will be timed."""
        ...

    def timeline(self, bases: Sequence[Base]) -> Timeline:
        """Read the marks of parts that have these bases; all of them have been reached."""
        ...

    def settle(self, mark: Any) -> None:
        """Return when `mark` is reached."""
        ...


class HostLanes:
    """Lanes whose ops have ended when they return: a thread each, and a mark is the time."""

    threads: tuple[tuple[Lane, ...], ...] = tuple((lane,) for lane in LANES)

    def __init__(self, clock: Clock, enter: Callable[[Lane], None] = lambda lane: None) -> None:
        self._clock, self._enter = clock, enter

    def enter(self, lanes: tuple[Lane, ...]) -> None:
        for lane in lanes:
            self._enter(lane)

    def mark(self, lane: Lane, *, timed: bool) -> int:
        return self._clock.now_ns()

    def follow(self, lane: Lane, mark: Any) -> None:
        pass

    def follow_count(self, lane: Lane, other: Lane, count: int) -> bool:
        return False

    def ended(self, lane: Lane, count: int) -> None:
        pass

    def recycle(self, marks: Iterable[Any], *, timed: bool) -> None:
        pass

    def abandon(self) -> None:
        pass

    def base(self) -> Base:
        return None

    def timeline(self, bases: Sequence[Base]) -> HostTimeline:
        return HostTimeline()

    def settle(self, mark: Any) -> None:
        pass


class Backend(Protocol):
    """`step` is whatever the driver of the executor attached to the part that is running."""

    @property
    def source(self) -> Source: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def lanes(self) -> Lanes: ...
    def run(self, op: Op, step: Any) -> Ran: ...
    def joins(self, op: Op) -> bool:
        """Whether `run_series` takes it; always the same answer."""
        ...

    def run_series(self, ops: Sequence[Op], step: Any, count: int) -> Sequence[tuple[Any, Ran, Any]]:
        """Run ops of one lane, one after the other, that wait for nothing but each other: for each the mark before it, what it
        did and the mark after it. The first is op number `count` of its lane; who follows that count sees each as it ends. Fewer
        than were asked for if the run was abandoned meanwhile."""
        ...
