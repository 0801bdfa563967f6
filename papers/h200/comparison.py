"""The lines that `papers.h200.versus` writes, and what follows from them: what can be compared, ratios, a search's winner.

Lines of the last run in a file count; those of runs before it are history, whatever they say. A line that is refused is named by
where it stands (file:line), or, where it is of no file, by its title.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatrain.files.fields import build, short
from megatrain.files.text import read_text

APART = 0.01
"""How far losses of one step may lie apart, of the smaller one: BF16 rounds differently in different kernels, no more."""
System = Literal["megatrain", "deepspeed", "plain"]
WHICH = ("system", "settings", "checkpointing", "model", "gpu_memory_gib", "tokens")
"""What a line is of. `checkpointing` is null for our engine, whose plan decides layer by layer."""
SHARED = ("versions", "machine")
"""What lines of one run have in common beside its name."""
FIGURES = ("step_s", "losses")
"""What a line holds that has no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A line of `papers.h200.versus`: a step's seconds, or why there are none (`error`). `spread` is the fastest and the slowest
    step."""

    system: System
    settings: str
    checkpointing: bool | None
    model: str
    gpu_memory_gib: int | float | None
    tokens: int
    run: str
    versions: Mapping[str, str | None]
    machine: Mapping[str, Any]
    commit: str = ""
    step_s: float = 0.0
    spread: tuple[float, float] | None = None
    losses: tuple[float, ...] = ()
    gpu_peak_gib: float | None = None
    error: str = ""
    out_of_memory: str | None = None

    def __post_init__(self) -> None:
        texts = {name: getattr(self, name) for name in ("settings", "model", "run", "commit")}
        for name, text in (texts | {f"versions[{name!r}]": text or "" for name, text in self.versions.items()}).items():
            if not text.isprintable():  # it stands in messages and cells, which are of one line
                raise ValueError(f"run.{name}: must be a text of one line, got {short(text)}")
        for name in ("gpu_memory_gib", "tokens", *(["step_s"] if not self.error else [])):
            value = getattr(self, name)
            if value is not None and not 0 < value <= sys.float_info.max:  # so that it divides as a float too
                kind = "an integer" if name == "tokens" else "a finite number"
                raise ValueError(f"run.{name}: must be {kind} > 0, got {short(value)}")
        if self.gpu_peak_gib is not None and not 0 <= self.gpu_peak_gib < math.inf:
            raise ValueError(f"run.gpu_peak_gib: must be a finite number >= 0, got {self.gpu_peak_gib!r}")
        if self.error:
            return
        if not self.losses or not all(0 < loss < math.inf for loss in self.losses):
            raise ValueError(f"run.losses: must be finite numbers > 0, at least one, got {short(list(self.losses))}")
        if self.spread is not None and not 0 < self.spread[0] <= self.step_s <= self.spread[1] < math.inf:
            raise ValueError(f"run.spread: must enclose step_s {self.step_s!r}, got {list(self.spread)!r}")

    @property
    def size(self) -> tuple[str, int]:
        return self.model, self.tokens


# ---- reading -------------------------------------------------------------------------------------------------------------


class Line(dict[str, Any]):
    """A line of a file, which knows where it stands there (file:line)."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw)
        self.where = where


def read_lines(path: Path) -> list[Line]:
    """The lines of a file. ValueError, in one line, for one that is no JSON object."""
    found = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip():
            try:
                raw = json.loads(line)
            except ValueError as problem:
                raise ValueError(f"{path}:{number}: is not JSON: {problem}") from None
            if not isinstance(raw, dict):
                raise ValueError(f"{path}:{number}: must hold a table of fields")
            found.append(Line(raw, f"{path}:{number}"))
    return found


def which(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Two lines that have it in common are of one thing, run twice."""
    return tuple(line.get(field) for field in WHICH)


def title(line: Mapping[str, Any]) -> str:
    """A line's system, settings and size, for people, in one line."""
    said = [str(line.get(field)) for field in ("system", "settings", "model", "tokens")]
    said += ["with activations kept"] if line.get("checkpointing") is False else []
    return " ".join(" ".join(said).split())


def place(line: Mapping[str, Any]) -> str:
    """What a message calls a line: file:line, or its title where it is of no file."""
    return line.where if isinstance(line, Line) else title(line)


Noun = TypeVar("Noun")


def noun_of(noun: type[Noun], line: Mapping[str, Any], needed: Iterable[str] = ()) -> Noun:
    """The noun (a dataclass) of a line; what the noun has no field for is left out. ValueError, in one line that names line and
    field, for what the noun refuses and for a field of `needed` that is missing."""
    known = typing.get_type_hints(noun)
    try:
        for field in needed:
            if field not in line:
                raise ValueError(f"{field}: is missing")
        return build(noun, {field: value for field, value in line.items() if field in known})
    except ValueError as problem:
        raise ValueError(f"{place(line)}: {problem}") from None


# ---- comparing -----------------------------------------------------------------------------------------------------------


def last_run(lines: Iterable[Mapping[str, Any]]) -> list[tuple[str, Run]]:
    """What ran in the run of the last line that has a `run`, by what a message calls it: of each system, settings, checkpointing
    and size the last line without an error, or else the last. ValueError, in one line, for a bad line of that run."""
    lines = list(lines)
    last = next((line for line in reversed(lines) if "run" in line), {})
    found: dict[tuple[Any, ...], tuple[str, Run]] = {}
    for line in lines:
        if line is not last and line.get("run") != last.get("run"):
            continue
        run = noun_of(Run, line, () if line.get("error") else FIGURES)
        before = found.get(which(line))
        if before is None or before[1].error or not run.error:
            found.pop(which(line), None)  # so that it stands where it ran last
            found[which(line)] = place(line), run
    return list(found.values())


def comparable(lines: Iterable[Mapping[str, Any]]) -> list[Run]:
    """The runs of `last_run` that are no errors. ValueError, in one line, also if they are not on one machine with one set of
    versions, or if at one size they have different numbers of losses or losses that differ by more than 1% at a step."""
    found = [(name, run) for name, run in last_run(lines) if not run.error]
    for (first, a), (name, b) in combinations(found, 2):
        for field in SHARED:
            wanted, got = getattr(a, field), getattr(b, field)
            if wanted != got:
                raise ValueError(f"{name}: {field}: must be one in all lines of a run, {wanted} as in {first}, got {got}")
        if a.size != b.size:
            continue
        if len(a.losses) != len(b.losses):
            raise ValueError(f"{name}: losses: must be as many at one size, {len(a.losses)} as in {first}, got {len(b.losses)}")
        for step, (x, y) in enumerate(zip(a.losses, b.losses, strict=True), start=1):
            if abs(x - y) > APART * min(abs(x), abs(y)):
                raise ValueError(f"{name}: losses: differ by more than {APART:.0%} at step {step}: {y}, but {x} in {first}")
    return [run for _, run in found]


def ratios(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tokens a second of each row of ours over DeepSpeed's at the same model and tokens, {"model", "gpu_memory_gib", "tokens",
    "ratio"}, model by model, fewest tokens first. DeepSpeed's are of its fastest line of that size, whatever its settings; its
    memory is not limited, so one serves rows of every `gpu_memory_gib`. A row without one has no ratio. ValueError, in one line,
    for lines that cannot be compared (`comparable`)."""
    found = comparable(lines)
    theirs: dict[tuple[str, int], float] = {}
    for run in found:
        if run.system == "deepspeed":
            theirs[run.size] = min(run.step_s, theirs.get(run.size, math.inf))
    models = [run.model for run in found]
    return [
        {
            "model": run.model, "gpu_memory_gib": run.gpu_memory_gib, "tokens": run.tokens,
            "ratio": round(theirs[run.size] / run.step_s, 3),
        }
        for run in sorted(found, key=lambda run: (models.index(run.model), run.tokens))
        if run.system == "megatrain" and run.size in theirs
    ]  # fmt: skip


def winner(path: Path) -> str:
    """The settings with the shortest step of a search. ValueError, in one line, if there is none, if its lines cannot be
    compared, or if the search was of another version of DeepSpeed than the one that is installed."""
    if not path.exists():
        raise ValueError(f"{path}: must hold the lines of a search; run search first, or name another file with --search")
    found = [run for run in comparable(read_lines(path)) if run.system == "deepspeed"]
    if not found:
        raise ValueError(f"{path}: must hold a setting that ran")
    best = min(found, key=lambda run: run.step_s)
    if "deepspeed" not in best.versions:
        raise ValueError(f"{path}: versions: must name DeepSpeed's, got {short(dict(best.versions))}")
    of, here = best.versions["deepspeed"], versions()["deepspeed"]
    if of != here:
        raise ValueError(f"{path}: must be a search of DeepSpeed {here}, which is installed; it is of {of}")
    return best.settings


def versions() -> dict[str, str | None]:
    """Python's and the packages' that a step's time depends on; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "deepspeed"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
