"""Backend: the seam between the executor, which knows order, and what carries ops out.

A backend runs one op at a time a lane, on that lane's thread, and says what it did: the byte ranges it bound and the bytes it
moved. The executor builds the digest of a measured trace from these answers and from nothing else.

A *mark* is a point in a lane's time, taken before and after an op. On a lane that works while its thread waits, it is the time
itself; on a CUDA stream it is an event, which has been enqueued when the call returns and is reached later. `follow` then makes
the lane wait for a mark of another: the executor calls it only after that mark was taken, since waiting for an event that was
never recorded waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from megatrain.engine.clock import Clock
from megatrain.schedule.nouns import Lane, Op
from megatrain.trace import Source

BoundRange = tuple[str, int, int]
"""(storage name, first byte, end byte)"""
Base = Any
"""What ties a backend's marks to the clock for the length of a part; see `Backend.base`."""


class Ran(NamedTuple):
    """What running an op really touched. `nbytes`: bytes copied by a copy, bytes bound for writing by other ops."""

    reads: tuple[BoundRange, ...]
    writes: tuple[BoundRange, ...]
    nbytes: int


class Backend(Protocol):
    """`step` is whatever the driver of the executor attached to the part that is running."""

    @property
    def source(self) -> Source: ...
    @property
    def clock(self) -> Clock: ...
    def enter_lane(self, lane: Lane) -> None:
        """Called once on the lane's thread before its first op."""
        ...

    def run(self, op: Op, step: Any) -> Ran: ...
    def mark(self, lane: Lane, *, timed: bool) -> Any:
        """This point of the lane, on its thread; `timed` if `time_ns` will be asked for it."""
        ...

    def follow(self, lane: Lane, mark: Any) -> None:
        """What the lane runs next comes after `mark`; on the lane's thread."""
        ...

    def base(self) -> Base:
        """Taken when a part is submitted that will be timed."""
        ...

    def clock_notes(self, bases: Sequence[Base]) -> list[str]:
        """What a trace with these bases must say about its clocks."""
        ...

    def settle(self, mark: Any) -> None:
        """Return when `mark` is reached."""
        ...

    def time_ns(self, base: Base, mark: Any) -> int:
        """The clock's time of a mark that has been reached."""
        ...
