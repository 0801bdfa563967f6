"""The lines that `papers.h200.versus` writes, and what follows from them: what can be compared, ratios, a search's winner."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from megatrain.files.text import read_text

APART = 0.01
"""How far losses of one step may lie apart, of the smaller one: BF16 rounds differently in different kernels, no more."""
WHICH = ("system", "settings", "checkpointing", "model", "gpu_memory_gib", "tokens")
"""What a line is of. `checkpointing` is null for our engine, whose plan decides layer by layer."""
SHARED = ("run", "versions", "machine")
"""What lines that are compared have in common."""
FIELDS = (*WHICH, *SHARED, "step_s", "losses")
"""Of a line, what the functions here read."""


def read_lines(path: Path) -> list[dict[str, Any]]:
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
            found.append(raw)
    return found


def which(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Two lines that have it in common are of one thing, run twice."""
    return tuple(line.get(field) for field in WHICH)


def comparable(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that are no errors, the last of each system, settings, checkpointing and size. ValueError, in one line, if they
    are not of one run on one machine with one set of versions, lack a field, or if losses of one size differ by more than 1% at a
    step."""
    newest: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for line in lines:
        if "error" in line:
            continue
        missing = [field for field in FIELDS if field not in line]
        if missing:
            raise ValueError(f"{title(line)}: {missing[0]}: is missing")
        if not (isinstance(line["step_s"], (int, float)) and 0 < line["step_s"] < math.inf):
            raise ValueError(f"{title(line)}: step_s: must be a finite number > 0, got {line['step_s']!r}")
        if not line["losses"] or not all(map(math.isfinite, line["losses"])):
            raise ValueError(f"{title(line)}: losses: must be finite numbers, at least one, got {line['losses']!r}")
        newest.pop(which(line), None)
        newest[which(line)] = line
    found = list(newest.values())
    for line in found[1:]:
        for field in SHARED:
            if line[field] != found[0][field]:
                raise ValueError(
                    f"{field}: must be one in all lines, got {found[0][field]!r} ({title(found[0])}) "
                    f"and {line[field]!r} ({title(line)})"
                )
    for a, b in combinations(found, 2):
        if (a["model"], a["tokens"]) != (b["model"], b["tokens"]):
            continue
        for step, (x, y) in enumerate(zip(a["losses"], b["losses"], strict=False), start=1):
            if abs(x - y) > APART * min(abs(x), abs(y)):
                raise ValueError(f"losses: differ by more than {APART:.0%} at step {step}: {x} ({title(a)}), {y} ({title(b)})")
    return found


def title(line: Mapping[str, Any]) -> str:
    """A line's system, settings and size, for people."""
    named = [str(line.get(field)) for field in ("system", "settings", "model", "tokens")]
    return " ".join([*named, "with activations kept"] if line.get("checkpointing") is False else named)


def ratios(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tokens a second of each row of ours over DeepSpeed's at the same model and tokens, {"model", "gpu_memory_gib", "tokens",
    "ratio"}, model by model, fewest tokens first. DeepSpeed's are of its fastest line of that size, whatever its settings; its
    memory is not limited, so one serves rows of every `gpu_memory_gib`. A row without one has no ratio. ValueError, in one line,
    for lines that cannot be compared (`comparable`)."""
    found = comparable(lines)
    theirs: dict[tuple[Any, Any], float] = {}
    for line in found:
        if line["system"] == "deepspeed":
            size = line["model"], line["tokens"]
            theirs[size] = min(line["step_s"], theirs.get(size, math.inf))
    models = [line["model"] for line in found]
    return [
        {
            "model": line["model"], "gpu_memory_gib": line["gpu_memory_gib"], "tokens": line["tokens"],
            "ratio": round(theirs[line["model"], line["tokens"]] / line["step_s"], 3),
        }
        for line in sorted(found, key=lambda line: (models.index(line["model"]), line["tokens"]))
        if line["system"] == "megatrain" and (line["model"], line["tokens"]) in theirs
    ]  # fmt: skip


def winner(path: Path) -> str:
    """The settings with the shortest step of a search. ValueError, in one line, if there is none, if its lines cannot be
    compared, or if the search was of another version of DeepSpeed than the one that is installed."""
    if not path.exists():
        raise ValueError(f"{path}: must hold the lines of a search; run search first, or name another file with --search")
    found = [line for line in comparable(read_lines(path)) if line["system"] == "deepspeed"]
    if not found:
        raise ValueError(f"{path}: must hold a setting that ran")
    best = min(found, key=lambda line: float(line["step_s"]))
    of, here = best["versions"]["deepspeed"], versions()["deepspeed"]
    if of != here:
        raise ValueError(f"{path}: must be a search of DeepSpeed {here}, which is installed; it is of {of}")
    return str(best["settings"])


def versions() -> dict[str, str | None]:
    """Python's and the packages' that a step's time depends on; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "deepspeed"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
