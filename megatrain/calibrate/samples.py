"""Samples: what a quantity came out as, time after time, and how far apart.

A processor is shared: with other programs, with the system, with other guests of its host. They only ever add time, in bursts of
a millisecond or of seconds. So what the processor times is taken as the lower quartile of its samples, which stays where it is
until three quarters of them were disturbed; on a quiet machine it lies within a percent or two of the median. A device belongs to
one program and slows down by itself, when it gets hot; there the median counts. How far samples lie apart is kept beside every
figure, for without it nobody could judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

GROUP = 5
"""Samples next to each other whose median counts as one in a spread: a single one that was interrupted says nothing."""


class Spread(NamedTuple):
    """How far samples lie from their figure, as shares of it: the median distance and the largest."""

    typical: float
    worst: float

    def __str__(self) -> str:
        return f"{self.typical:.0%} to {self.worst:.0%}"


def figure(times: Sequence[float], *, shared: bool) -> int:
    """What a time in ns is taken to be, at least 1. `shared`: the processor measured it. ValueError without samples."""
    if not times:
        raise ValueError("calibrate: nothing was sampled; give it a larger budget_s")
    ordered = sorted(times)
    return max(1, round(ordered[(len(ordered) - 1) // 4] if shared else median(ordered)))


def spread(times: Sequence[float], *, shared: bool) -> Spread:
    """The spread of one quantity's samples, in the order they were taken."""
    centre = figure(times, shared=shared)
    groups = [median(times[i : i + GROUP]) for i in range(0, len(times), GROUP)]
    away = [abs(x - centre) / centre for x in groups]
    return Spread(median(away), max(away))


def overall(spreads: Sequence[Spread]) -> Spread:
    """Of several quantities: the median of what is typical, the worst of the worst."""
    return Spread(median(s.typical for s in spreads), max(s.worst for s in spreads))


def rate_per_s(amount: int, ns: float) -> int:
    """At least 1."""
    return max(1, int(amount * 1e9 / max(ns, 1)))
