"""Trace: when each op of a run was issued, started and ended, whatever ran it.

Times are integer nanoseconds from the start of the run. `issued` is when the op's lane was free to look at it, so
`start - issued` is what it waited for its deps. A trace names the parts that ran, in order, with the digest of what each lane
of each part really did; derived figures (stalls, utilisation) are functions of (Schedule, Trace), never stored here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Source = Literal["sim", "null", "cpu", "cuda"]


class Event(NamedTuple):
    """Op number `position` of the `part`-th part that ran; times in ns."""

    part: int
    position: int
    issued_ns: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`parts` and `digests` have one entry for each part that ran; `events` are sorted by (part, position)."""

    source: Source
    parts: tuple[str, ...]
    digests: tuple[str, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.digests):
            raise ValueError(f"trace: {len(self.parts)} parts but {len(self.digests)} digests")
