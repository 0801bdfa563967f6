"""Our engine beside the same training by others, on one machine. `python -m papers.h200.versus search --out DIR` finds the
fastest of DeepSpeed's documented settings, `... compare --out DIR [--rows ...]` runs, for each size, our engine's rows, DeepSpeed
with those settings, and plain PyTorch.

- `megatrain`: a row of `papers.h200.rows`, run as `rows measure` runs it; its full line, trace and stalls are kept in
  DIR as well.
- `deepspeed`, `plain`: see `papers.h200.rivals`, which says what all have in common and how a step is timed.

A rival keeps activations where they fit. `plain` runs so first, and once more with checkpointing if the GPU's memory ran out.
DeepSpeed's settings say whether they checkpoint, and the search compares both; settings that keep activations and do not fit at a
size of `compare` run once more with checkpointing there. `compare --settings` names settings to run in place of the winner.

Every run has a process of its own and a time limit, and gives one JSON line in DIR/versus-search.jsonl or DIR/versus.jsonl as
soon as it ends. A line says what ran (`checkpointing` is null for our engine, whose plan decides layer by layer) and holds
figures, or `error` and `out_of_memory`: whose memory ran out, "gpu" or "host", or null. What the processes print is in
DIR/versus.log.

Each call is a run of its own, whose lines are appended: those who read the file (`papers.h200.comparison`) take the lines of its
last run and leave those of earlier ones out. `--run ID` goes on with the call whose lines have that `run`, on the same machine
with the same versions: what has a line of this commit in DIR already, be it of figures or of memory that ran out, is not run
again. Runs that failed otherwise are.

Exit code 0 if all ran, 1 if one failed (a model that does not fit counts as failed, unless it does with checkpointing), 2 for
what cannot begin, with one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from papers.h200.comparison import SHARED, System, read_lines, title, versions, which, winner
from papers.h200.models import Device
from papers.h200.process import answer, in_its_own_process
from papers.h200.rates import MACHINE_RATES
from papers.h200.rivals import (
    PLAIN_ENVIRONMENT,
    SETTINGS,
    build_kernels,
    conditions,
    deepspeed_environment,
    measured,
    read_settings,
)
from papers.h200.rows import ROWS, Known, child_command

SEARCH = Path(__file__).with_name("results") / "versus-search.jsonl"
SEARCHED = ("3B", 16384)
"""The model and the tokens a step that settings are searched at."""
SYSTEMS: tuple[str, ...] = get_args(System)


# ---- runs ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the command: where it writes, what all its lines hold, and the lines of its run that were there before."""

    out: Path
    lines: Path
    device: Device
    commit: str
    timeout_s: float
    common: Mapping[str, Any]
    earlier: Sequence[Mapping[str, Any]] = ()

    def line(self, system: str, settings: str, name: str, tokens: int, checkpointing: bool | None) -> dict[str, Any]:
        """What a line says beside its figures."""
        return {
            "system": system, "settings": settings, "checkpointing": checkpointing, "model": name, "gpu_memory_gib": None,
            "tokens": conditions(name, tokens, self.device)[1].tokens_per_step, "commit": self.commit, **self.common,
        }  # fmt: skip

    def once(self, line: Mapping[str, Any], run: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """The line with what the run says, written and printed; or the earlier line of the same, without a run."""
        for found in reversed(self.earlier):
            settled = "error" not in found or found.get("out_of_memory") is not None
            if settled and which(found) == which(line) and found.get("commit") == line["commit"]:
                print(f"{title(line)}: has a line already", file=sys.stderr)
                return found
        made = {**line, **run()}
        said = json.dumps(made)
        print(said, flush=True)
        with self.lines.open("a") as log:
            log.write(said + "\n")
        return made

    def process(self, line: Mapping[str, Any], environment: Mapping[str, str], command: Sequence[str]) -> dict[str, Any]:
        """What the command answers."""
        return in_its_own_process(
            command, environment, title=title(line), log=self.out / "versus.log", device=self.device, timeout_s=self.timeout_s
        )


def child(asked: dict[str, Any]) -> NoReturn:
    """One run of a system that is not ours, for `Call.process`."""
    answer(lambda answers: measured(**asked, done=lambda: print("measured", file=answers, flush=True)))


def rival(call: Call, system: str, settings: str, name: str, tokens: int, checkpointing: bool) -> Mapping[str, Any]:
    """The line of a system that is not ours."""
    line = call.line(system, settings, name, tokens, checkpointing)
    environment = deepspeed_environment(call.device) if system == "deepspeed" else PLAIN_ENVIRONMENT
    asked = {
        "device": call.device, "system": system, "settings": settings, "name": name, "tokens": tokens,
        "checkpointing": checkpointing,
    }  # fmt: skip
    command = [sys.executable, "-m", "papers.h200.versus", "child", json.dumps(asked)]
    return call.once(line, lambda: call.process(line, environment, command))


def fastest_that_fits(call: Call, system: str, settings: str, name: str, tokens: int, checkpointing: bool) -> Mapping[str, Any]:
    """The line of a system that is not ours; where it keeps activations and the GPU's memory ran out, that of a second run, with
    checkpointing. The host's memory is not where activations are."""
    line = rival(call, system, settings, name, tokens, checkpointing)
    if checkpointing or line.get("out_of_memory") != "gpu":
        return line
    return rival(call, system, settings, name, tokens, True)


def ours(call: Call, row: str, rates: dict[str, float] | None) -> tuple[Mapping[str, Any], dict[str, float] | None]:
    """The line of a row of our engine, and the machine's rates, once measured. The row's full line goes to rows.jsonl, its trace
    and stalls beside it."""
    it = ROWS[row]
    full: dict[str, Any] = {}
    line = call.line("megatrain", row, it.model, it.tokens, None) | {"gpu_memory_gib": it.gpu_memory_gib}

    def run() -> dict[str, Any]:
        command = child_command(row, call.device, call.commit, Known(machine=rates), call.out)
        full.update(call.process(line, os.environ, command))
        if "error" in full:
            return full
        with (call.out / "rows.jsonl").open("a") as log:
            log.write(json.dumps(full) + "\n")
        kept = ("tokens", "step_s", "spread", "steps_s", "losses", "ready_s", "warm_s", "gpu_peak_gib", "host_peak_gib")
        return {field: full[field] for field in kept}

    found = call.once(line, run)
    return found, {rate: full["rates"][rate] for rate in MACHINE_RATES} if "rates" in full else rates


# ---- the command ---------------------------------------------------------------------------------------------------------


def search(call: Call, settings: Sequence[str]) -> int:
    lines = [rival(call, "deepspeed", name, *SEARCHED, read_settings(name).checkpointing) for name in settings]
    return 1 if any("error" in line for line in lines) else 0


def compare(call: Call, rows: Sequence[str], systems: Sequence[str], settings: Sequence[str]) -> int:
    """Size by size in the rows' order: our rows of it, DeepSpeed with each of the settings, plain PyTorch."""
    failed, rates = 0, None
    for model, tokens in dict.fromkeys((ROWS[row].model, ROWS[row].tokens) for row in rows):
        for row in rows if "megatrain" in systems else ():
            if (ROWS[row].model, ROWS[row].tokens) == (model, tokens):
                line, rates = ours(call, row, rates)
                failed += "error" in line
        for name in settings if "deepspeed" in systems else ():
            failed += "error" in fastest_that_fits(call, "deepspeed", name, model, tokens, read_settings(name).checkpointing)
        if "plain" in systems:
            failed += "error" in fastest_that_fits(call, "plain", "plain", model, tokens, False)
    return 1 if failed else 0


def machine(device: Device) -> dict[str, Any]:
    """What the runs of one call share; RuntimeError, in one line, without a GPU on cuda. The GPU is asked in another process:
    this one takes none of its memory. How much memory the host has is left out: a virtual machine's may grow while it is used."""
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
    if device == "cuda":
        code = "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.uuid, torch.version.cuda, sep='\\n')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"--device: cuda must have a GPU: {done.stderr.strip().splitlines()[-1]}")
        found |= dict(zip(("gpu", "gpu_uuid", "cuda"), done.stdout.split("\n"), strict=False))
    return found


def earlier_lines(path: Path, common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lines of a run that are there already. ValueError, in one line, if what follows could not be compared with them."""
    found = [line for line in read_lines(path) if line.get("run") == common["run"]] if path.exists() else []
    for line in found:
        for field in SHARED:
            if line.get(field) != common[field]:
                raise ValueError(f"--run {common['run']}: {field}: must be {line.get(field)}, as in {path}, got {common[field]}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    known = sorted(path.stem for path in SETTINGS.glob("*.json"))
    parser = argparse.ArgumentParser(description="Our engine beside DeepSpeed and plain PyTorch, on one machine.")
    parser.add_argument("what", choices=["search", "compare", "child"], help="child: one run, for the other two")
    parser.add_argument("asked", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="where lines are appended")
    parser.add_argument("--rows", nargs="+", metavar="row", help="rows to compare; those of 3B by default")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="what to compare; all by default")
    parser.add_argument(
        "--settings", nargs="+", choices=known, help="of DeepSpeed: to search, all by default; to compare, the winner by default"
    )
    parser.add_argument(
        "--search", type=Path, help="lines of a search, whose winner is compared; by default those in --out, else the committed"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: rehearse at small sizes")
    parser.add_argument("--commit", default="", help="the commit that is measured")
    parser.add_argument("--timeout", type=float, default=420.0, metavar="seconds", help="that a run may take (%(default)g)")
    parser.add_argument("--run", default="", metavar="id", help="go on with an earlier call on the same machine: its lines' run")
    options = parser.parse_args(arguments)
    if options.what == "child":
        child(json.loads(options.asked[0]))
    searches = options.what == "search"
    lines = options.out / ("versus-search.jsonl" if searches else "versus.jsonl")
    rows = options.rows or [name for name in ROWS if name.startswith("3b-")]
    settings: list[str] = []
    common = {"run": options.run or uuid.uuid4().hex[:12], "versions": versions()}
    try:
        if options.asked:
            raise ValueError(f"{options.what}: takes no {options.asked[0]}; see --help")
        if not 0 < options.timeout < math.inf:
            raise ValueError(f"--timeout: must be a finite number > 0, got {options.timeout:g}")
        if not searches and (unknown := [row for row in rows if row not in ROWS]):
            raise ValueError(f"rows: must be of {', '.join(ROWS)}, got {unknown[0]}")
        if searches or "deepspeed" in options.systems:
            if importlib.util.find_spec("deepspeed") is None:
                less = "" if searches else ", or leave it out with --systems megatrain plain"
                raise ValueError(f"DeepSpeed is not installed: pip install 'megatrain[deepspeed]'{less}")
            found = options.out / "versus-search.jsonl"
            found = options.search or (found if found.exists() else SEARCH)
            settings = options.settings or (known if searches else [winner(found)])
            for name in settings:
                read_settings(name)
        common["machine"] = machine(options.device)
        earlier = earlier_lines(lines, common)
        if settings:
            build_kernels(options.device)
    except (ValueError, RuntimeError) as problem:
        print(problem, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    call = Call(
        out=options.out, lines=lines, device=options.device, commit=options.commit, common=common, earlier=earlier,
        timeout_s=min(options.timeout, threading.TIMEOUT_MAX),  # more is more than a timer takes
    )  # fmt: skip
    return search(call, settings) if searches else compare(call, rows, options.systems, settings)


if __name__ == "__main__":
    sys.exit(main())
