"""The built-in catalog: models by name and machines by name, and the one place that turns what a user wrote into either.

A name is a path first: a file, or a directory with a `config.json`, is taken before a built-in name, as in the library whose
directories these are. Nothing is ever downloaded. Names are read without regard to case.

Models hold the values their authors published (`megatrain.catalog.models`). Of the machines (`megatrain.catalog.machines`) one is
measured; the others are data sheets and other people's measurements, and their provenance says so, figure by figure.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from megatrain.catalog.machines import MACHINES
from megatrain.catalog.models import MODELS
from megatrain.files import format_bytes, load_hardware, parse_bytes
from megatrain.files.fields import short
from megatrain.hardware import HardwareProfile
from megatrain.model import ModelSpec

__all__ = ["cap", "hardware_names", "hardware_profile", "model_names", "model_source", "model_spec"]


def model_names() -> tuple[str, ...]:
    """The built-in models, family by family, small ones first."""
    return tuple(MODELS)


def model_source(name: str) -> str:
    """Where a built-in model's values were published. ValueError for a name that is not built in."""
    return MODELS[_built_in("model", name, MODELS)].source


def model_spec(name_or_path: str | Path) -> ModelSpec:
    """The model of a built-in name, a Hugging Face directory or a `config.json`.

    ValueError in one line for a name or path that is none, naming the nearest built-in one, and for a config that is refused
    (`ModelSpec.from_config`), naming its file.
    """
    path = Path(os.path.expanduser(name_or_path))
    config = path / "config.json" if os.path.isdir(path) else path
    if os.path.isfile(config):  # not pathlib's: to that a name too long for the system is an error
        try:
            return ModelSpec.from_config(config.absolute())
        except OSError as problem:
            raise ValueError(f"{config}: cannot be read: {problem.strerror or problem}") from None
        except ValueError as problem:
            text = str(problem).removeprefix(f"{config.absolute()}: ")
            refused = text.startswith(("config.", "must "))
            raise ValueError(f"{config}: {text}" if refused else f"{config}: is not JSON: {text}") from None
    if str(name_or_path) and os.path.isdir(path) and str(name_or_path).lower() not in MODELS:
        raise ValueError(f"{name_or_path}: holds no config.json")
    name = _built_in("model", str(name_or_path), MODELS)
    return ModelSpec.from_config(MODELS[name].config, name=name)


def hardware_names() -> tuple[str, ...]:
    """The built-in machines."""
    return tuple(MACHINES)


def hardware_profile(name_or_path: str | Path) -> HardwareProfile:
    """The machine of a built-in name, or of a profile's JSON file (`megatrain.files.load_hardware`).

    ValueError in one line for what is neither, naming the nearest built-in one, and for a file that is refused.
    """
    path = Path(os.path.expanduser(name_or_path))
    return load_hardware(path) if os.path.isfile(path) else MACHINES[_built_in("hardware", str(name_or_path), MACHINES)]


def cap(
    profile: HardwareProfile, gpu_memory: int | str | None = None, host_memory: int | str | None = None
) -> HardwareProfile:
    """The same machine with no more memory than given, in bytes or as `parse_bytes` reads it ("24GiB"); never with more than it
    has. The provenance says what was capped.

    ValueError for a size that is none, or 0.
    """
    sizes = {"device_memory_bytes": ("gpu_memory", gpu_memory), "host_memory_bytes": ("host_memory", host_memory)}
    changes: dict[str, int] = {}
    for field, (argument, size) in sizes.items():
        if size is None:
            continue
        try:
            nbytes = parse_bytes(size)
        except ValueError as problem:
            raise ValueError(f"{argument}: {problem}") from None
        if nbytes == 0:
            raise ValueError(f"{argument}: must be > 0 bytes, got {size!r}")
        if nbytes < getattr(profile, field):
            changes[field] = nbytes
    if not changes:
        return profile
    capped = ", ".join(f"{field.removesuffix('_bytes').replace('_', ' ')} to {format_bytes(n)}" for field, n in changes.items())
    return replace(profile, provenance=f"{profile.provenance}; capped: {capped}", **changes)  # type: ignore[arg-type]


def _built_in(kind: str, name: str, names: Iterable[str]) -> str:
    known = list(names)
    if name.lower() in known:
        return name.lower()
    if os.path.lexists(os.path.expanduser(name)):
        raise ValueError(f"{kind}: {short(name)} is there, but no regular file")
    # Of an organisation's name and a model's, the second is the one that may be known here.
    near = difflib.get_close_matches(name.lower().rstrip("/").rpartition("/")[2], known, n=1, cutoff=0.5)
    hint = f" did you mean {near[0]}?" if near else ""
    raise ValueError(f"{kind}: {short(name)} is neither a path nor a built-in name;{hint} built in are {', '.join(known)}")
