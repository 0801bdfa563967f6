"""Backend: the seam between the executor, which knows order, and what carries ops out.

A backend runs one op at a time a lane, on that lane's thread, and says what it did: the byte ranges it bound and the bytes it
moved. The executor builds the digest of a measured trace from these answers and from nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from megatrain.engine.clock import Clock
from megatrain.schedule.nouns import Lane, Op
from megatrain.trace import Source

BoundRange = tuple[str, int, int]
"""(storage name, first byte, end byte)"""


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
