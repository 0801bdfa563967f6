"""Where a verb writes, checked before the work starts: hours of training must not end at a directory that is not there.

Each check tries what it asks for, with a file that has no name for long, because permissions say little about a read-only or a
network file system, or to root. What may change until the end (a disk that fills up) still can.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from megatrain.cli import show
from megatrain.files import refuse_irregular


def check_file(option: str, path: Path, *, inputs: tuple[Path | None, ...] = ()) -> None:
    """ValueError unless a file can be written at `path` that is none of `inputs`: a regular file or a new one."""
    _refuse_irregular(option, path)
    if not path.parent.is_dir():
        raise ValueError(f"{option}: {path}: there is no directory {path.parent}")
    for used in inputs:
        if used is not None and os.path.realpath(used) == os.path.realpath(path):
            raise ValueError(f"{option}: {path} is what is read; choose another file")
    _try_writing(option, path, Path(os.path.realpath(path)).parent)


def check_folder(option: str, path: Path, *, empty: bool = False, nbytes: int = 0, files: Iterable[str] = ()) -> None:
    """ValueError unless `files` (their names) of `nbytes` together can be written into `path`, which is made later if need be;
    with `empty`, only if it is new or empty."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option}: {path} must be a directory, and is none")
    if empty and path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{option}: {path} must be new or an empty directory")
    for name in files:
        _refuse_irregular(option, path / name)
    there = Path(os.path.realpath(path))
    while not there.exists():
        there = there.parent
    _try_writing(option, path, there)
    free = shutil.disk_usage(there).free
    if free < nbytes:
        need, have = show.format_bytes_short(nbytes), show.format_bytes_short(free)
        raise ValueError(f"{option}: {path} needs {need} ({nbytes:,} bytes) of disk, there are {have} ({free:,})")


def _refuse_irregular(option: str, path: Path) -> None:
    try:
        refuse_irregular(path)
    except ValueError as problem:
        raise ValueError(f"{option}: {problem}") from None


def _try_writing(option: str, path: Path, directory: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as problem:
        raise ValueError(f"{option}: {path} cannot be written: {problem.strerror or problem}") from None
