"""How a verb ends: exit code 0 for done, 1 for failed, 2 for bad usage or a plan that does not fit, 130 for Ctrl-C (which `main`
turns into its line).

What a user did wrong is one line, `error: ...`, on standard error. A bug of ours is a traceback: a ValueError that comes from
somebody else's code is no mistake that a user could mend by reading it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer

from megatrain.cli import show

# typer brings its own click or uses the installed one, depending on its version. Either way what the parser raises is a
# ClickException, and a BadParameter is a UsageError is a ClickException.
_PARSER_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

_ROOT = Path(__file__).resolve().parents[2]
_INTERRUPTED = 130


def run_app(app: typer.Typer) -> None:
    """Run the verb that the arguments name; always ends in SystemExit, in KeyboardInterrupt, or in an exception that is a bug."""
    _guard_streams()
    show.begin()
    with ends():
        code = app(standalone_mode=False)
        # Verbs return nothing; a number is what typer makes of --help (0) and of Ctrl-C (130).
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written is a failure that has its line
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def ends() -> Iterator[None]:
    """Turn what is no bug into its line and exit code."""
    try:
        yield
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except _PARSER_ERROR as problem:  # an option that does not exist, a value of the wrong type
        message: str = problem.format_message()  # type: ignore[attr-defined]
        _stop(" ".join(message.split()), 2)
    except (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as problem:
        if isinstance(problem, ValueError) and not _raised_here(problem):
            raise
        _stop(_one_line(problem), 2)
    except (RuntimeError, MemoryError, OSError) as problem:
        _stop(_one_line(problem), 1)


@contextmanager
def said_of(path: Path | None) -> Iterator[None]:
    """Name the file in messages about fields that came from it: `plan.update: ...` becomes `p.yaml: plan.update: ...`."""
    try:
        yield
    except ValueError as problem:
        if path is None or not str(problem).startswith(("plan.", "recipe.")):
            raise
        raise ValueError(f"{path}: {problem}") from None


@contextmanager
def naming(name: str | Path) -> Iterator[None]:
    """Put the file before messages about what was read from it, where they do not begin with it. A bug stays one."""
    try:
        yield
    except ValueError as problem:
        if not _raised_here(problem) or str(problem).startswith(f"{name}: "):
            raise
        raise ValueError(f"{name}: {problem}") from None


class _Output(io.FileIO):
    """A standard stream that a verb can do without: files are what it is run for. A reader that has had enough (`| head`) is no
    failure, and the verb goes on to its end. Standard output that cannot be written is one, once and by its name; standard error
    that cannot be written has nobody to be told."""

    lost = False

    def write(self, data: Any) -> int:
        if not self.lost:
            try:
                return super().write(data)
            except OSError as problem:
                self.lost = True
                if self.fileno() == 1 and not isinstance(problem, BrokenPipeError):
                    raise OSError(problem.errno, problem.strerror, "standard output") from None
        return memoryview(data).nbytes


def _guard_streams() -> None:
    """Make the interpreter's own streams `_Output`; one that is closed leads nowhere, and `print` not from one to the other."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", errors="replace"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):  # nobody replaced it, as tests do
            stream.flush()
            by_line = number == 2 or stream.line_buffering or stream.write_through
            raw = io.BufferedWriter(_Output(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=by_line))


def _raised_here(problem: Exception) -> bool:
    frame: Any = problem.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    raised_in = Path(frame.tb_frame.f_code.co_filename) if frame is not None else Path()
    return any(raised_in.is_relative_to(_ROOT / package) for package in ("megatrain", "sim", "analysis"))


def _one_line(problem: Exception) -> str:
    if isinstance(problem, OSError) and problem.strerror and problem.filename is not None:
        return f"{problem.filename}: {problem.strerror}"
    return " ".join(str(problem).split()) or type(problem).__name__


def _stop(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
