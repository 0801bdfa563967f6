"""Time to the first step: `python -m papers.h200.first_step --out DIR` writes a model's directory, drops what the system caches
of it, and has `megatrain run` train one step, with every compiler's cache empty. One JSON line, in DIR/first_step.jsonl.

Phases, in seconds from the command's start to its end: *import* (interpreter, libraries, checks of plan and files, writing of the
record: what the others leave), *memory* (made, touched, pinned), *weights* (read, turned into masters), *compile* (meanwhile),
*first step*. `read_s` is what the disk alone takes for the files at the rate it was measured at, cold as well: what of it lies
above 30 s belongs to the disk and is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatrain.files import Job, load_job, save_job
from megatrain.weights import open_weights, save_weights
from papers.h200.models import Device, qwen
from papers.h200.rows import PLANS, RESULTS, ROWS, rehearsal
from papers.h200.workload import RandomWeights

LIMIT_S, READING_S = 120.0, 30.0
"""What is promised, and how much of it reading may take."""


def drop(files: Iterable[Path]) -> None:
    """Have the system forget the pages of files that are on the disk."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_step(row: str, device: Device, commit: str, folder: Path) -> dict[str, Any]:
    """Everything that is written lies under `folder`."""
    it, job = ROWS[row], load_job(PLANS / f"{row}.yaml")
    model = qwen(it.model, device)
    if device == "cpu":
        model, recipe, plan = rehearsal(model, job.recipe, job)
        job = dataclasses.replace(job, recipe=recipe, plan=plan)
    directory, plan_file = folder / "model", folder / "plan.yaml"
    save_weights(directory, model, RandomWeights(model, device), max_shard_bytes=4_000_000_000)
    (directory / "config.json").write_text(model.config_json)
    save_job(plan_file, Job(model=str(directory), recipe=job.recipe, plan=job.plan))
    files, weights = sorted(directory.glob("*.safetensors")), open_weights(directory, model)
    drop(files)
    started = time.perf_counter()
    weights.read_ahead().join()
    disk_bytes_per_s = weights.nbytes / (time.perf_counter() - started)
    drop(files)

    caches = {name: str(folder / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")}
    command = [sys.executable, "-m", "megatrain", "run", str(plan_file), "--data", "random", "--steps", "1", "--json"]
    command += ["--device", device, "--out", str(folder / "run.json.gz")]
    started = time.perf_counter()
    done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, text=True)
    total_s = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"megatrain run ended with {done.returncode}")
    start = json.loads(done.stdout)["start"]
    read_s = weights.nbytes / disk_bytes_per_s
    counted_s = total_s - max(0.0, read_s - READING_S)
    waited = start["memory_s"] + max(start["weights_s"], start["compile_s"]) + start["first_step_s"]
    phases = {phase: round(seconds, 1) for phase, seconds in start.items()} | {"import_s": round(total_s - waited, 1)}
    return {
        "row": row, "commit": commit, "total_s": round(total_s, 1), "counted_s": round(counted_s, 1), "limit_s": LIMIT_S,
        "passed": counted_s <= LIMIT_S, "phases": phases,
        "files_gb": round(weights.nbytes / 1e9, 2), "disk_gb_per_s": round(disk_bytes_per_s / 1e9, 2), "read_s": round(read_s, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="How long a model's first step takes from nothing, by phase.")
    parser.add_argument(
        "--row", choices=sorted(ROWS), default="7b-24-16384", metavar="row", help="whose plan and recipe are taken (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where first_step.jsonl is, or will be; results/ by default")
    parser.add_argument("--folder", type=Path, help="where the model is written for a while; else the system's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: rehearse at small sizes")
    parser.add_argument("--commit", default="", help="the commit that is measured")
    options = parser.parse_args()
    for directory in (options.out, options.folder):
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = first_step(options.row, options.device, options.commit, Path(folder))
    line = json.dumps(found)
    print(line)
    with (options.out / "first_step.jsonl").open("a") as log:
        log.write(line + "\n")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
