"""The command line: `megatrain calibrate | simulate | plan | run | compare | demo`.

Each verb is a thin layer over a documented call and the only place where the packages meet: it reads files, calls, and prints. A
user's mistake is one line on standard error and exit code 2, a failed run exit code 1. Nothing here imports torch before a
verb needs it: predicting takes no GPU and no PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

__all__ = ["main"]


def main() -> None:
    """The entry point: run the verb that the arguments name. Always ends in SystemExit, or in an exception that is a bug."""
    # While libraries are imported, Ctrl-C as an exception could fall into a callback that cannot raise, and be lost. There is
    # nothing to tidy up yet.
    usual = signal.getsignal(signal.SIGINT)
    at_once = usual is signal.default_int_handler  # and not ignored, as for what runs in the background
    if at_once:
        signal.signal(signal.SIGINT, _end)
    from megatrain.cli.app import main as run

    if at_once:
        signal.signal(signal.SIGINT, usual)
    try:
        run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)


def _end(*_: Any) -> None:
    with contextlib.suppress(OSError):  # of a stream that is closed
        os.write(2, b"error: interrupted\n")
    os._exit(130)
