"""Device: what calibration needs of the place that computes. `host.py` has it for a machine without a device, `cuda.py` for one
with. Both copy exactly as the engine's backend for that device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

Direction = Literal["h2d", "d2h"]
DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h")
Piece = Callable[[], int]
"""Does a piece of some traffic and says how many bytes, of those it has started, are done."""


class Device(Protocol):
    """`name` for people; `memory_bytes` this process may use; `on_host` where there is no device."""

    name: str
    memory_bytes: int
    on_host: bool

    def timed(self, work: Callable[[], object], count: int) -> list[int]:
        """Times in ns of `count` runs of `work`, one after the other, without what it takes to start them if the device can run
        behind the host."""
        ...

    def copy_times(self, direction: Direction, nbytes: int, count: int) -> list[int]:
        """Times in ns of `count` copies of `nbytes`, each of other bytes, nothing else running."""
        ...

    def copier(self, direction: Direction) -> Piece:
        """Traffic of one direction, for a thread of its own."""
        ...

    def largest_copy(self) -> int:
        """Bytes of the largest copy that `copy_times` can do."""
        ...

    def close(self) -> None:
        """Give buffers back."""
        ...
