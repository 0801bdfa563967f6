"""The command line: `megatrain calibrate | simulate | plan | run | compare | demo`.

Each verb is a thin layer over a documented call and the only place where the packages meet: it reads files, calls, and prints. A
user's mistake is one line on standard error and exit code 2, a failed run exit code 1. Nothing here imports torch before a
verb needs it: predicting takes no GPU and no PyTorch.
"""

from megatrain.cli.app import app, main

__all__ = ["app", "main"]
