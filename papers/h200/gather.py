"""What the page is made of: the lines in results/, as nouns. `papers.h200.page` writes the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from papers.h200 import table
from papers.h200.comparison import Line, comparable, last_run, noun_of, ratios, read_lines
from papers.h200.comparison import Run as Run  # of `Results`, for those who read them
from papers.h200.table import Entry, Failure, Measurement, entries, read_rows

CAUSES = {
    "weights late": "weights are on their way up", "update late": "weights wait for the optimizer",
    "gradient slot busy": "gradients have not left the GPU yet", "activations late": "layers' inputs are on their way back",
    "input late": "the batch is not there", "issue late": "the host enqueued too late",
}  # fmt: skip
"""Why compute waits, by the causes of `megatrain.derive`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured row: `numel` parameters; `waits` says what compute waits for, empty if that is not known."""

    entry: Entry
    numel: int
    waits: str

    @property
    def m(self) -> Measurement:
        return self.entry.measured

    @property
    def over_floor(self) -> float:
        """Measured step time over its floor, 0 without a floor."""
        return self.m.step_s / self.entry.floor.seconds if self.entry.floor else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """A line of `papers.h200.first_step`."""

    row: str
    commit: str
    total_s: float
    counted_s: float
    limit_s: float
    passed: bool
    phases: Mapping[str, float]
    files_gb: float
    disk_gb_per_s: float
    read_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The last line of a check by `papers.h200.checks`; `failed_before` of the lines before it did not pass."""

    check: str
    passed: bool
    missed: tuple[str, ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    failed_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All that the page is made of. `ratios` are those of `papers.h200.comparison.ratios`."""

    rows: Sequence[Row]
    failures: Sequence[Failure]
    versus: Sequence[Run]
    ratios: Sequence[Mapping[str, Any]]
    search: Sequence[Run]
    first_step: FirstStep | None
    checks: Sequence[Check]


def gather(files: Sequence[Path], results: Path) -> Results:
    """What the files of rows and the others in `results` say. ValueError, in one line, for what cannot be read or counted."""
    raw = read_rows(files)
    made = entries(raw, table.REPOSITORY, table.HERE / "plans", table.model_of_row)
    versus, first_steps = results / "versus.jsonl", _built(FirstStep, results / "first_step.jsonl")
    return Results(
        rows=[_row(entry, *raw[entry.measured.row]) for entry in made if isinstance(entry, Entry)],
        failures=[entry for entry in made if isinstance(entry, Failure)],
        versus=_runs(versus), ratios=ratios(_lines(versus)),
        search=_runs(results / "versus-search.jsonl"), first_step=first_steps[-1] if first_steps else None,
        checks=_last(_built(Check, results / "checks.jsonl")),
    )  # fmt: skip


def _last(lines: Sequence[Check]) -> list[Check]:
    """Of each check the last line, in the order in which they first ran."""
    found: dict[str, Check] = {}
    for line in lines:
        before = found.get(line.check)
        failed = before.failed_before + (not before.passed) if before else 0
        found[line.check] = dataclasses.replace(line, failed_before=failed)
    return list(found.values())


def _row(entry: Entry, where: str, raw: Mapping[str, Any]) -> Row:
    stalls, use = raw.get("compute stalls, s", {}), raw.get("utilisation", {})
    for name, values in (("compute stalls, s", stalls), ("utilisation", use)):
        if not isinstance(values, dict) or not all(isinstance(value, (int, float)) for value in values.values()):
            raise ValueError(f"{where}: row {entry.measured.row}: {name}: must be a table of numbers")
    waits, total = "", sum(stalls.values())
    if total > 0 and "compute" in use:
        most = max(stalls, key=stalls.__getitem__)
        what = f" ({CAUSES[most]})" if most in CAUSES else ""
        waits = f"compute waits {1 - use['compute']:.0%} of the time, {stalls[most] / total:.0%} of it for `{most}`{what}"
    return Row(entry=entry, numel=table.model_of_row(entry.measured.model).numel, waits=waits)


def _lines(path: Path) -> list[Line]:
    return read_lines(path) if path.exists() else []


Noun = TypeVar("Noun", FirstStep, Check)


def _built(noun: type[Noun], path: Path) -> list[Noun]:
    """The lines of a file as nouns; what the page has no use for is left out."""
    return [noun_of(noun, line) for line in _lines(path)]


def _runs(path: Path) -> list[Run]:
    """Of the last run of a file what can be compared, then what failed and did not run later."""
    lines = _lines(path)
    return [*comparable(lines), *(run for _, run in last_run(lines) if run.error)]
