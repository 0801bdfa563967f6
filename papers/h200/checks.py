"""Every check that needs a GPU, in order of priority: `python -m papers.h200.checks --out DIR [names ...]`.

A preflight of under a minute comes first (imports, a copy, a step on each backend) and stops at the first failure. Each check
then writes one JSON line to DIR/checks.jsonl as soon as it is done, so that a run that is cut short keeps what it has. A failing
check is reported and the next one runs. `--device cpu` rehearses the same code on a machine without a GPU, at small sizes.

What each check promises is said in `correctness`, `speed` and `microbenchmarks`. Exit code 0 if all that ran passed, 1 if one
failed, 2 for what cannot begin, with one line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain.plan import Plan
from papers.h200.correctness import bitwise, kernels, near_plain_bf16, plain_fp32, sanitizer
from papers.h200.microbenchmarks import adam_rates, host_costs
from papers.h200.models import Device
from papers.h200.speed import fastest, overlap, predictions, seven_b, tracing
from tests.engine.small import small_model, small_recipe, train

Check = Callable[[Device, Path], dict[str, Any]]
"""Takes the device and the folder of results. Its figures by name; `missed` in them, or in one of them, are promises that they do
not keep. It raises what it likes."""


def preflight(device: Device, folder: Path) -> dict[str, Any]:
    """Libraries are there, the device holds what is copied to it, and a step runs on each backend."""
    import simpy
    import transformers

    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "simpy": simpy.__version__}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        host = torch.arange(1 << 20, dtype=torch.int32)
        assert torch.equal(host.cuda().cpu(), host)
    model, recipe, plan = small_model(), small_recipe(precision="bf16"), Plan(chunk_bytes=4096)
    for backend in dict.fromkeys(("cpu", device)):
        found[f"norm on {backend}"] = train(model, recipe, plan, steps=1, device=backend).norms[0]
    return found


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        predictions, kernels, plain_fp32, near_plain_bf16, seven_b, overlap, bitwise, tracing, sanitizer, adam_rates,
        host_costs, fastest,
    )
}  # fmt: skip
NOT_REHEARSED = {"kernels"}


def run(name: str, check: Check, device: Device, folder: Path) -> dict[str, Any]:
    """The check's line: `check`, `passed`, `seconds`, and `missed` and `result`, or `error`. What is promised is promised of the
    GPU: a rehearsal shows that the code runs, and passes whatever it misses."""
    started = time.perf_counter()
    try:
        result = check(device, folder)
        failures = list(missed_in(result)) if device == "cuda" else []
        line: dict[str, Any] = {"check": name, "passed": not failures, "missed": failures, "result": result}
    except Exception as error:
        traceback.print_exc()
        line = {"check": name, "passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    return line | {"seconds": round(time.perf_counter() - started, 1)}


def missed_in(result: Mapping[str, Any]) -> Iterator[str]:
    """The promises that a check's figures, or those of one of its runs, do not keep."""
    for figures in (result, *(part for part in result.values() if isinstance(part, dict))):
        yield from figures.get("missed", ())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", metavar="check", help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--out", type=Path, required=True, help="where checks.jsonl and records are, or will be")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: rehearse at small sizes")
    options = parser.parse_args(arguments)
    known = {"preflight": preflight, **CHECKS}
    if unknown := [name for name in options.checks if name not in known]:
        print(f"check: must be of {', '.join(known)}, got {unknown[0]}", file=sys.stderr)
        return 2
    asked = [name for name in known if name == "preflight" or not options.checks or name in options.checks]
    if options.device == "cpu":
        asked = [name for name in asked if name not in NOT_REHEARSED]
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with (options.out / "checks.jsonl").open("a") as log:
        for name in asked:
            line = run(name, known[name], options.device, options.out)
            print(json.dumps(line), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
            failed += not line["passed"]
            if name == "preflight" and failed:
                break
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
