"""Files: what people and programs write down, and how it is read back.

    job         plan.yaml        a model's name, a recipe, a plan. People edit it: YAML, fields at their default left out
    hardware    hw.json          a `HardwareProfile`, every field
    record      run.json(.gz)    one predicted or measured run: its job, its model's config, its trace. It lowers to the very same
                                 schedule without the model's directory, so it states every field of the job

What is read is a noun or one line of ValueError: the file, the field, the rule, the value. A key that no noun has is refused
with the nearest one that exists: a misspelt field that silently kept its default would train or predict something else. What is
written replaces a file whole or not at all, and reads back equal.

`megatrain.files.text` is about bytes, YAML and JSON, `megatrain.files.fields` about plain values and nouns.

Not covered: tensors (safetensors), checkpoints, and whether a plan fits a model, which lowering decides.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from megatrain.files.fields import build, format_bytes, parse_bytes, plain, short, without_defaults
from megatrain.files.text import dump_json, dump_yaml, parse_json, parse_yaml, read_text, refuse_irregular, write_file
from megatrain.hardware import HardwareProfile
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.trace import Trace

__all__ = [
    "Job", "Record", "StepFigures", "format_bytes", "load_hardware", "load_job", "load_record", "parse_bytes",
    "refuse_irregular", "save_hardware", "save_job", "save_record", "write_file",
]  # fmt: skip

LARGEST_JOB, LARGEST_HARDWARE = 1 << 20, 1 << 26
"""Bytes of text of a job and of a profile: far more than any needs."""
RECORD_VERSION = 1
"""What the field `record` of a record's file says: the version of its layout."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_Noun = TypeVar("_Noun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run and how. `model` is a built-in name, a Hugging Face directory or a `config.json` (`megatrain.catalog`)."""

    model: str
    recipe: Recipe
    plan: Plan

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ValueError(f"job.model: must be a name or a path, got {self.model!r}")


class StepFigures(NamedTuple):
    """What one step reported: mean loss a token, gradient norm before clipping, wall time in seconds."""

    loss: float
    norm: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run, predicted or measured (`trace.source` says which), complete in itself.

    `model_name` and `config_json` are the `ModelSpec`'s; `hardware` and `provenance` are the `HardwareProfile`'s name and
    provenance, or what a measured run says of its machine. `created` is an ISO 8601 time. `steps` may be empty: a prediction has
    no losses.
    """

    job: Job
    model_name: str
    config_json: str
    hardware: str
    provenance: str
    trace: Trace
    created: str
    notes: tuple[str, ...] = ()
    steps: tuple[StepFigures, ...] = ()

    def __post_init__(self) -> None:
        try:
            datetime.fromisoformat(self.created)
        except ValueError:
            raise ValueError(f"record.created: must be an ISO 8601 time, got {self.created!r}") from None

    def model_spec(self) -> ModelSpec:
        """The model that ran. ValueError if `config_json` is not the config of one."""
        try:
            config = json.loads(self.config_json)
        except ValueError as problem:
            raise ValueError(f"config_json: is not JSON: {problem}") from None
        if not isinstance(config, dict):
            raise ValueError(f"config_json: must hold a JSON object, got {short(config)}")
        return ModelSpec.from_config(config, name=self.model_name)


def load_job(path: str | Path) -> Job:
    """The job of a YAML file. ValueError in one line for anything else.

    A relative `model` that names a config beside the file becomes that one's absolute path. Any other is left as it is: a
    built-in name, or a path from the working directory.
    """
    raw = parse_yaml(path, read_text(path, LARGEST_JOB))
    # `plan:` with every field below it commented out is null to YAML, and all defaults to whoever did that.
    raw |= {key: {} for key in ("recipe", "plan") if key in raw and raw[key] is None}
    job = _checked(path, Job, raw)
    beside = Path(path).absolute().parent / job.model
    return dataclasses.replace(job, model=str(beside)) if _holds_config(beside) else job


def save_job(path: str | Path, job: Job, comment: str = "") -> None:
    """Write a job as YAML for people to edit, each line of `comment` as a comment above it.

    A model in or below the file's directory is written relative to it, so that both can move together.
    """
    model, here = Path(job.model), Path(path).absolute().parent
    inside = model.is_relative_to(here) and _holds_config(model)
    fields = {
        "model": str(model.relative_to(here)) if inside else job.model,
        "recipe": without_defaults(job.recipe),
        "plan": without_defaults(job.plan),
    }
    # A control character would make the file unreadable, even within a comment.
    printable = ["".join(c if c.isprintable() else " " for c in line) for line in comment.splitlines()]
    header = "".join(f"# {line}".rstrip() + "\n" for line in printable)
    write_file(path, (header + dump_yaml(fields)).encode())


def load_hardware(path: str | Path) -> HardwareProfile:
    """The profile of a JSON file. ValueError in one line for anything else."""
    return _checked(path, HardwareProfile, parse_json(path, read_text(path, LARGEST_HARDWARE)))


def save_hardware(path: str | Path, profile: HardwareProfile) -> None:
    """Write a profile as JSON, one row of a table a line."""
    fields = plain(profile)
    fields["compute"]["measured"] = [row._asdict() for row in profile.compute.measured]
    write_file(path, dump_json(fields).encode())


def load_record(path: str | Path) -> Record:
    """The record of a JSON file (gzip if its name ends in .gz). ValueError in one line for anything else."""
    raw = parse_json(path, read_text(path))
    version = raw.pop("record", None)
    if version != RECORD_VERSION:
        raise ValueError(f"{path}: record: must be {RECORD_VERSION}, the version of a record of a run, got {short(version)}")
    if isinstance(raw.get("steps"), list):
        raw["steps"] = [[_number(v) for v in row] if isinstance(row, list) else row for row in raw["steps"]]
    record = _checked(path, Record, raw)
    try:
        record.model_spec()
    except ValueError as problem:
        raise ValueError(f"{path}: config_json: {str(problem).removeprefix('config_json: ')}") from None
    return record


def save_record(path: str | Path, record: Record) -> None:
    """Write a record as JSON, compressed by gzip if the name ends in .gz."""
    fields = {"record": RECORD_VERSION, **plain(record)}
    # JSON has no infinity and no NaN, and a diverging run has both.
    fields["steps"] = [[v if math.isfinite(v) else str(float(v)) for v in row] for row in record.steps]
    data = msgspec.json.encode(fields)
    write_file(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def _checked(path: str | Path, noun: type[_Noun], raw: Mapping[str, Any]) -> _Noun:
    try:
        return build(noun, raw)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from None


def _holds_config(path: Path) -> bool:
    # os.path, because a name too long for the system is no file to it and an error to pathlib.
    return os.path.isfile(path) or os.path.isfile(path / "config.json")


def _number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
