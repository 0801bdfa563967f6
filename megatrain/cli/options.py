"""Options that several verbs take, and how they become nouns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from megatrain.catalog import cap, hardware_names, hardware_profile, model_spec
from megatrain.files import Job, load_job, parse_bytes
from megatrain.hardware import HardwareProfile
from megatrain.model import ModelSpec
from megatrain.recipe import Recipe

_RECIPE = "Recipe (what is not given is as in PLAN.yaml)"
_MACHINE = "Machine"
MOST_VALUES = 256
"""Values of a sweep's list: beyond, somebody mistyped a range."""

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="NAME|PATH", help="A built-in name (qwen2.5-7b), a Hugging Face directory, or a config.json."
    ),
]
Hardware = Annotated[
    str,
    typer.Option(
        "--hardware", "-H", metavar="NAME|FILE", rich_help_panel=_MACHINE,
        help=f"A file that calibrate wrote, or built in: {', '.join(hardware_names())}.",
    ),
]  # fmt: skip
JobFile = Annotated[
    Path | None, typer.Argument(metavar="[PLAN.yaml]", help="Model, recipe and plan to start from; else --model.")
]
GpuMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", rich_help_panel=_MACHINE, help="No more of the GPU's memory than this (24GiB); else all."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", rich_help_panel=_MACHINE, help="No more of the host's memory than this (120GiB); else all."),
]
Device = Annotated[str, typer.Option(metavar="cpu|cuda|auto", help="Where it runs; auto takes a GPU if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
MicroBatches = Annotated[int | None, typer.Option(metavar="N", rich_help_panel=_RECIPE, help="Micro-batches a step; else 1.")]
Batch = Annotated[int | None, typer.Option(metavar="N", rich_help_panel=_RECIPE, help="Sequences in a micro-batch; else 1.")]
SeqLen = Annotated[int | None, typer.Option(metavar="N", rich_help_panel=_RECIPE, help="Tokens in a sequence; else 1024.")]
Precision = Annotated[
    str | None,
    typer.Option(metavar="bf16|fp32", rich_help_panel=_RECIPE, help="Type of weights and gradients on the device; else bf16."),
]
Clip = Annotated[
    str | None, typer.Option(metavar="NORM|off", rich_help_panel=_RECIPE, help="Largest norm of the gradient; else 1.0.")
]
Compiled = Annotated[
    bool | None,
    typer.Option("--compiled/--eager", rich_help_panel=_RECIPE, help="Compile the layers; else compiled where there is a GPU."),
]
Deterministic = Annotated[
    bool | None,
    typer.Option("--deterministic/--fastest", rich_help_panel=_RECIPE, help="Whether every bit repeats; else deterministic."),
]
LearningRate = Annotated[
    float | None, typer.Option("--lr", metavar="RATE", rich_help_panel=_RECIPE, help="AdamW's learning rate; else 0.0001.")
]

_OPTION_OF = {
    "micro_batches": "--micro-batches", "micro_batch_size": "--batch", "seq_len": "--seq-len", "precision": "--precision",
    "clip_norm": "--clip", "optimizer.lr": "--lr",
}  # fmt: skip


def recipe_of(
    start: Recipe | None,
    *,
    micro_batches: int | None,
    batch: int | None,
    seq_len: int | None,
    precision: str | None,
    clip: str | None,
    compiled: bool | None,
    deterministic: bool | None,
    lr: float | None,
    on_host: bool,
) -> Recipe:
    """`start` (a job's recipe, or the defaults: compiled where there is a GPU) with the options that were given.

    ValueError, naming the option, for a value that no recipe has.
    """
    recipe = start if start is not None else Recipe(compiled=not on_host)
    given: dict[str, Any] = {
        "micro_batches": micro_batches, "micro_batch_size": batch, "seq_len": seq_len, "precision": precision,
        "compiled": compiled, "deterministic": deterministic, "gradient_dtype": precision,
    }  # fmt: skip
    changes = {name: value for name, value in given.items() if value is not None}
    if clip is not None:
        changes["clip_norm"] = None if clip == "off" else _number("--clip", clip)
    try:
        if lr is not None:
            changes["optimizer"] = replace(recipe.optimizer, lr=lr)
        return replace(recipe, **changes)
    except ValueError as problem:
        field, _, rule = str(problem).removeprefix("recipe.").partition(": ")
        if field not in _OPTION_OF:
            raise
        raise ValueError(f"{_OPTION_OF[field]}: {rule}") from None


def job_of(path: Path | None, model: str | None) -> tuple[Job | None, str, ModelSpec]:
    """The job of a file, if one was named, and the model: the option's, or else the job's."""
    job = load_job(path) if path is not None else None
    name = model if model is not None else job.model if job is not None else None
    if name is None:
        raise ValueError("--model: is missing; name a model, or a plan's file")
    return job, name, model_spec(name)


def read_by(job_file: Path | None, model: str | None, hardware: str | None) -> tuple[Path, ...]:
    """The files a verb reads, as far as its options name them: what it must not write over."""
    named = [Path(text) for text in (model, hardware) if text is not None] + ([job_file] if job_file is not None else [])
    return tuple(file for path in named for file in (sorted(path.iterdir()) if path.is_dir() else [path]))


def machine_of(hardware: str, gpu_memory: str | None, host_memory: str | None) -> HardwareProfile:
    return cap(
        hardware_profile(hardware),
        gpu_memory=_nbytes("--gpu-memory", gpu_memory),
        host_memory=_nbytes("--host-memory", host_memory),
    )


def _nbytes(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    nbytes = _size(option, text)
    if nbytes == 0:
        raise ValueError(f"{option}: must be > 0 bytes, got {text!r}")
    return nbytes


def _size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as problem:
        raise ValueError(f"{option}: {problem}") from None


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option}: must be a number or off, got {text!r}") from None


def integers(option: str, text: str) -> list[int]:
    """`1,2,4` or `1-4`; no more than `MOST_VALUES`."""
    try:
        if "-" in text:
            first, last = map(int, text.split("-"))
            found = list(range(first, min(last, first + MOST_VALUES) + 1))
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(found) > MOST_VALUES:
        raise ValueError(f"{option}: must be up to {MOST_VALUES} integers >= 1 like 1,2,4 or 1-4, got {text!r}")
    return found


def sizes(option: str, text: str) -> list[int]:
    """`1MiB,4MiB,32MiB`; 0 stands for whole blocks."""
    return [_size(option, part.strip()) for part in text.split(",")]
