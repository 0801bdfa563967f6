"""The schedule: what a step does, in which order, on which bytes. `lower` writes it, `check` proves it, all others read it."""

from megatrain.schedule.check import ScheduleError, check
from megatrain.schedule.lower import lower, lower_evaluation
from megatrain.schedule.nouns import LANES, Access, Lane, Op, Part, PlacedOp, Schedule, Storage, Tag, place

__all__ = [
    "LANES", "Access", "Lane", "Op", "Part", "PlacedOp", "Schedule", "ScheduleError", "Storage", "Tag",
    "check", "lower", "lower_evaluation", "place",
]  # fmt: skip
