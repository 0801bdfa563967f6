"""The speed table: `python -m papers.h200.table [--rows FILE ...]` makes it of the lines that `papers.h200.rows measure` wrote.

Of several lines of one row the last that carries no error counts, over all files in the order given. Each row stands beside what
was promised of it (`limit_s`) and beside the floor of its plan at the rates measured in the same call (`papers.h200.floor`).

A row passes at `step_s <= limit_s`. Where the machine of that call was slower than the one the limits were promised for, its Adam
or a direction of its link by more than 5%, it also passes at `step_s <= 1.13 x floor`: the table prints both. No row passes that
used more GPU memory than it may or other memory than its ledger says (`LEDGER`), ran something else than its schedule, left a
block without an update, went on allocating, or has a loss that is not finite.

A row counts only if what was measured is what is here. A row of another commit is refused, and the whole table with it, when the
present working tree differs from that commit in lowering, engine or kernels (`MEASURED_CODE`); so is one whose commit is not
known. A row that carries an error is listed as failed and left out of the JSON.

The last line of output is one JSON object, `{"rows": [...], "vs_deepspeed": [...]}`; the second are the ratios of
`papers.h200.versus compare`, where its lines are in results/versus.jsonl. Exit code 0 for a table, whatever its rows say;
2 for one that is refused, with one line that names file, row and field.

What a line must hold: the fields of `Measurement`. It may hold `rates` (the fields of `papers.h200.floor.Rates`, without which
there is no floor), `job` (as in a job's file; else the plan file of the row's name is read, if it is that of the row's commit),
and the pairs of `LEDGER`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.tables import format_table
from megatrain.derive import step_time
from megatrain.files import Job, load_hardware, load_job
from megatrain.files.fields import build, short
from megatrain.files.text import read_text
from megatrain.model import ModelSpec
from megatrain.schedule import lower
from papers.h200.comparison import ratios, read_lines
from papers.h200.floor import Floor, Rates, floor_s
from papers.h200.models import QWEN25, qwen
from papers.h200.records import CALIBRATED
from sim.simulate import simulate

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
ROWS_FILE, VERSUS_FILE = HERE / "results" / "rows.jsonl", HERE / "results" / "versus.jsonl"

MEASURED_CODE = (
    "megatrain/schedule", "megatrain/engine", "megatrain/optim", "megatrain/layers", "megatrain/plan.py", "megatrain/recipe.py",
)  # fmt: skip
"""Lowering, engine and kernels: what a step's time depends on."""

CEILINGS = {"adam_bytes_per_s": ("Adam", 118e9), "h2d_bytes_per_s": ("H2D", 55.4e9), "d2h_bytes_per_s": ("D2H", 55.2e9)}
"""The rates of the machine that the limits were promised for: the CPU optimizer at 16 threads, and the link's two directions."""
SLOWER = 0.05
OF_FLOOR = 1.13
PROMISED = ("every block updated", "digests equal", "segments flat")
"""Fields of a line that say, where it has them, that the run was what it claims to be."""
LEDGER = {
    "device": ("ledger_device_gib", "gpu_peak_gib", 0.25), "allocator": ("ledger_allocator_gib", "allocator_gib", 0.25),
    "pinned": ("ledger_pinned_gib", "pinned_gib", 1 / 16),
}  # fmt: skip
"""Predicted and measured GiB, by what they are of, and how far they may lie apart: so many GiB, or 1% if that is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of a row, as `papers.h200.rows.measure` writes it. `gpu_memory_gib` None: all there is. Memory is in GiB, times in
    seconds; `spread` is the fastest and the slowest step; `tflops_6n` counts 6 x parameters x tokens."""

    row: str
    model: str
    gpu_memory_gib: int | float | None
    tokens: int
    clipping: bool
    deterministic: bool
    step_s: float
    spread: tuple[float, float]
    tflops_6n: float
    gpu_peak_gib: float
    host_peak_gib: float
    commit: str
    limit_s: float
    losses: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("step_s", "limit_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"measurement.{name}: must be a finite number > 0, got {value!r}")
        for name in ("tflops_6n", "gpu_peak_gib", "host_peak_gib"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"measurement.{name}: must be a finite number >= 0, got {value!r}")
        if not 0 < self.spread[0] <= self.step_s <= self.spread[1] < math.inf:
            raise ValueError(f"measurement.spread: must enclose step_s {self.step_s!r}, got {self.spread!r}")


FIELDS = ("model", "gpu_memory_gib", "tokens", "clipping", "deterministic", "step_s", "spread", "tflops_6n", "floor_s",
          "gpu_peak_gib", "host_peak_gib", "commit")  # fmt: skip
"""Of one row in the JSON line, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row of the table. `floor` is None without rates or without the plan that ran; `why_no_floor` then says which. `missed`
    are the promises it does not keep beside its time, `ledger` its memory by the names of `LEDGER`, (predicted, measured) GiB.
    `predicted_s` is the step that the simulator gives for the plan that ran, with `results/calibrated.json`: rates of another
    call, none of this row's. `calibrated` says whether that profile holds times of the model's layers; without them they are
    predicted from the machine's rates."""

    measured: Measurement
    rates: Rates | None
    floor: Floor | None
    why_no_floor: str
    missed: tuple[str, ...]
    ledger: dict[str, tuple[float, float]]
    predicted_s: float | None = None
    calibrated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A row none of whose lines is a measurement."""

    row: str
    error: str


# ---- reading -----------------------------------------------------------------------------------------------------------


def read_rows(files: Sequence[Path]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The line that counts of each row, by the row's name: where it stands (file:line) and its fields. ValueError in one line for
    a line that is no JSON object or names no row."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for file in files:
        for number, line in enumerate(read_text(file).splitlines(), start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                raw = json.loads(line)  # and no stricter reader: the losses of a run that diverged are no JSON
            except ValueError as problem:
                raise ValueError(f"{where}: is not JSON: {problem}") from None
            if not isinstance(raw, dict):
                raise ValueError(f"{where}: must hold a table of fields, got {short(raw)}")
            name = raw.get("row")
            if not isinstance(name, str) or not name:
                raise ValueError(f"{where}: row: must be a row's name, got {short(name)}")
            if name not in found or "error" not in raw or "error" in found[name][1]:
                found[name] = where, raw
    return found


def entries(
    rows: dict[str, tuple[str, dict[str, Any]]], repository: Path, plans: Path, model_of: Callable[[str], ModelSpec]
) -> list[Entry | Failure]:
    """The rows of the table, in the order in which they were first met. ValueError in one line, naming file, row and field, for a
    row that does not count or cannot be read."""
    made: list[Entry | Failure] = []
    for name, (where, raw) in rows.items():
        if "error" in raw:
            made.append(Failure(row=name, error=str(raw["error"])))
            continue
        try:
            made.append(_entry(name, raw, repository, plans, model_of))
        except ValueError as problem:
            raise ValueError(f"{where}: row {name}: {problem}") from None
    return made


def _entry(name: str, raw: dict[str, Any], repository: Path, plans: Path, model_of: Callable[[str], ModelSpec]) -> Entry:
    known = {field.name for field in dataclasses.fields(Measurement)}
    measured = build(Measurement, {key: value for key, value in raw.items() if key in known})
    if differs := difference(repository, measured.commit, MEASURED_CODE):
        raise ValueError(f"commit: {differs}")
    rates = build(Rates, raw["rates"], "rates") if raw.get("rates") is not None else None
    job, why = _job(name, raw, measured.commit, repository, plans)
    profile, model = load_hardware(CALIBRATED), model_of(measured.model)
    layers = {block.numel for block in model.blocks if block.kind == "layer"}
    floor = predicted = None
    if job is not None:
        recipe = job.recipe
        ran = {"tokens": recipe.tokens_per_step, "clipping": recipe.clip_norm is not None, "deterministic": recipe.deterministic}
        for field, value in ran.items():
            if getattr(measured, field) != value:
                raise ValueError(f"{field}: is {short(getattr(measured, field))}, but {short(value)} by the recipe of its job")
        schedule = lower(model, recipe, job.plan)
        predicted = step_time(schedule, simulate(schedule, profile)).mean_ns / 1e9
        if rates is not None:
            floor = floor_s(model, recipe, job.plan, rates)
    missed = [f"not so: {field}" for field in PROMISED if raw.get(field, True) is not True]
    if not all(map(math.isfinite, measured.losses)):
        missed.append("a loss is not finite")
    if measured.gpu_memory_gib is not None and measured.gpu_peak_gib > measured.gpu_memory_gib:
        missed.append(f"GPU memory {measured.gpu_peak_gib:g} GiB > {measured.gpu_memory_gib:g} GiB")
    ledger = _ledger(raw)
    for what, (said, seen) in ledger.items():
        if abs(said - seen) > max(LEDGER[what][2], seen / 100):
            missed.append(f"{what} memory {seen:g} GiB, by the ledger {said:g} GiB")
    return Entry(
        measured=measured, rates=rates, floor=floor, why_no_floor="" if floor else "no rates" if rates is None else why,
        missed=tuple(missed), ledger=ledger, predicted_s=predicted,
        calibrated=layers <= {row.numel for row in profile.compute.measured if row.block == "layer"},
    )  # fmt: skip


def _job(name: str, raw: dict[str, Any], commit: str, repository: Path, plans: Path) -> tuple[Job | None, str]:
    """What the row ran, or None and why that is not known."""
    if raw.get("job") is not None:
        return build(Job, raw["job"], "job"), ""
    file = plans / f"{name}.yaml"
    if not file.exists():
        return None, f"no {file.name}"
    if difference(repository, commit, [str(file.absolute())]):
        return None, f"{file.name} changed since"
    return load_job(file), ""


def _ledger(raw: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(predicted, measured) GiB of what the row has both of."""
    pairs = {what: (raw.get(said), raw.get(seen)) for what, (said, seen, _) in LEDGER.items()}
    return {what: (float(said), float(seen)) for what, (said, seen) in pairs.items() if said is not None and seen is not None}


# ---- whether what was measured is what is here -------------------------------------------------------------------------


def difference(repository: Path, commit: str, paths: Sequence[str]) -> str:
    """How the working tree under `paths` differs from `commit`, uncommitted and untracked files included; empty if it does not.

    A row names its commit by its hash: the name of a branch would move with the code that it should be compared with.
    """
    if not commit:
        return "must be the commit that was measured, got ''"
    if not re.fullmatch("[0-9a-f]{7,40}", commit):
        return f"must be a commit's hash of 7 to 40 digits, got {short(commit)}"
    found = _git(repository, "cat-file", "-e", f"{commit}^{{commit}}")
    if found.returncode:
        return f"{commit} is no commit of {repository} (git: {' '.join(found.stderr.split())})"
    asked = (
        ("diff", "--name-only", "--no-renames", "--no-ext-diff", commit, "--", *paths),
        ("ls-files", "--others", "--exclude-standard", "--", *paths),
    )
    changed: list[str] = []
    for arguments in asked:
        done = _git(repository, *arguments)
        if done.returncode:
            raise ValueError(f"commit: git {arguments[0]} failed: {' '.join(done.stderr.split())}")
        changed += done.stdout.splitlines()
    if not changed:
        return ""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{commit} was measured, and {changed[0]}{more} changed since"


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True)


# ---- judging and printing ----------------------------------------------------------------------------------------------


def judged(entry: Entry) -> tuple[bool, str]:
    """Whether the row passes, and why: every figure that decides."""
    measured, floor = entry.measured, entry.floor
    reasons = list(entry.missed)
    within = measured.step_s <= measured.limit_s
    reasons.append(f"{measured.step_s:.5g} s {'<=' if within else '>'} limit {measured.limit_s:.5g} s")
    if not within and (slow := slower(entry.rates)):
        reasons.append(slow)
        if floor is None:
            reasons.append(f"no floor: {entry.why_no_floor}")
        else:
            within = measured.step_s <= OF_FLOOR * floor.seconds
            reasons.append(f"{'<=' if within else '>'} {OF_FLOOR:g} x floor = {OF_FLOOR * floor.seconds:.5g} s")
    return within and not entry.missed, "; ".join(reasons)


def slower(rates: Rates | None) -> str:
    """Which rates of the call lie more than 5% below those of the machine that was promised; empty if none does."""
    if rates is None:
        return ""
    low = [
        f"{name} {rate / 1e9:.4g} GB/s is {100 * (1 - rate / ceiling):.1f}% below {ceiling / 1e9:g}"
        for field, (name, ceiling) in CEILINGS.items()
        if (rate := getattr(rates, field)) < (1 - SLOWER) * ceiling
    ]
    return ", ".join(low)


def report(made: Sequence[Entry | Failure]) -> str:
    """The table for people: speed and memory, why each row passes or not, floors and rates, memory ledgers."""
    found = [entry for entry in made if isinstance(entry, Entry)]
    parts = []
    if found:
        parts.append(format_table(pd.DataFrame(map(_speed, found)), title="Measured rows"))
    verdicts = [f"  {e.row}: failed: {e.error}" if isinstance(e, Failure) else _verdict(e) for e in made]
    parts.append("\n".join(["Passed or not", *verdicts]) + "\n")
    if any(entry.floor for entry in found):
        floors = pd.DataFrame([_floor(entry, entry.floor) for entry in found if entry.floor])
        parts.append(format_table(floors, title="Floors: the seconds that each candidate needs; the longest binds"))
    if any(entry.rates for entry in found):
        rates = pd.DataFrame([_rates(entry.measured.row, entry.rates) for entry in found if entry.rates])
        parts.append(format_table(rates, title="Rates of the same call, GB/s and ms of a micro-batch"))
    ledgers = [_memory(entry) for entry in found if entry.ledger]
    if ledgers:
        parts.append(format_table(pd.DataFrame(ledgers), title="Memory, GiB: by the ledger, and measured"))
    return "\n".join(parts)


def _verdict(entry: Entry) -> str:
    passed, why = judged(entry)
    return f"  {entry.measured.row}: {'passed' if passed else 'failed'}: {why}"


def _speed(entry: Entry) -> dict[str, object]:
    m, floor = entry.measured, entry.floor
    return {
        "row": m.row, "model": m.model, "GPU GiB": "all" if m.gpu_memory_gib is None else f"{m.gpu_memory_gib:g}",
        "tokens": f"{m.tokens:,}", "clipping": _yes(m.clipping), "deterministic": _yes(m.deterministic),
        "step [s]": m.step_s, "spread [s]": f"{m.spread[0]:g}-{m.spread[1]:g}",
        "predicted [s]": "" if entry.predicted_s is None else f"{entry.predicted_s:.4g}", "limit [s]": round(m.limit_s, 4),
        "floor [s]": f"{floor.seconds:.4g}" if floor else entry.why_no_floor,
        f"{OF_FLOOR:g} x floor": round(OF_FLOOR * floor.seconds, 4) if floor else None, "TFLOPS": m.tflops_6n,
        "GPU peak [GiB]": m.gpu_peak_gib, "host peak [GiB]": m.host_peak_gib, "passed": _yes(judged(entry)[0]),
    }  # fmt: skip


def _floor(entry: Entry, floor: Floor) -> dict[str, object]:
    seconds = {f"{name} [s]": round(s, 4) for name, s in floor.candidates.items()}
    times = f"{entry.measured.step_s / floor.seconds:.3f}x"
    return {"row": entry.measured.row, **seconds, "binds": floor.binds, "step / floor": times}


def _memory(entry: Entry) -> dict[str, object]:
    columns: dict[str, object] = {"row": entry.measured.row}
    for what, (said, seen) in entry.ledger.items():
        columns |= {f"{what}, ledger": said, what: seen, f"{what}, off by": round(seen - said, 3)}
    return columns


def _rates(row: str, rates: Rates) -> dict[str, object]:
    found: dict[str, object] = {"row": row}
    for field in dataclasses.fields(rates):
        value, fast = getattr(rates, field.name), field.name.endswith("_bytes_per_s")
        name = field.name.removesuffix("_bytes_per_s").removesuffix("_s").replace("_", " ")
        found[name] = round(value / 1e9 if fast else value * 1e3, 2)
    return found


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def json_line(made: Sequence[Entry | Failure], versus: Sequence[dict[str, Any]] = ()) -> str:
    """The measured rows and the ratios to DeepSpeed for programs, on one line. `floor_s` is null where there is none."""
    rows = []
    for entry in made:
        if isinstance(entry, Entry):
            values = dataclasses.asdict(entry.measured)
            values["floor_s"] = round(entry.floor.seconds, 4) if entry.floor else None
            rows.append({field: values[field] for field in FIELDS})
    return json.dumps({"rows": rows, "vs_deepspeed": list(versus)})


def model_of_row(name: str) -> ModelSpec:
    """The model of a row by the name it has there. ValueError for a size that is not among those measured."""
    if name.partition("-")[0] not in QWEN25:
        raise ValueError(f"model: must be one of {', '.join(QWEN25)}, got {short(name)}")
    return qwen(name, "cuda")


def _versus(path: Path) -> list[dict[str, Any]]:
    """The ratios of a file of lines, none without it. ValueError, in one line, for lines that cannot be compared."""
    if not path.exists():
        return []
    return ratios(read_lines(path))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The speed table from the rows that were measured.")
    parser.add_argument("--rows", type=Path, nargs="+", action="extend", metavar="FILE", help="default: results/rows.jsonl")
    options = parser.parse_args(arguments)
    try:
        made = entries(read_rows(options.rows or [ROWS_FILE]), REPOSITORY, HERE / "plans", model_of_row)
        versus = _versus(VERSUS_FILE)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    print(report(made))
    if versus:
        print(format_table(pd.DataFrame(versus), title="Tokens a second over DeepSpeed's"))
    print(json_line(made, versus))
    return 0


if __name__ == "__main__":
    sys.exit(main())
