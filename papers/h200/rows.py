"""The rows of the speed table: calibrate, plan and measure them.

`python -m papers.h200.rows calibrate [names ...]` measures the machine and the rows' blocks, `... plan [names ...]` chooses
plans, `... measure [names ...]` runs them.

A row is a model, the GPU memory that may be used, tokens a step and a recipe. Plans are chosen by the planner with
`results/calibrated.json` and committed under `plans/`, so that what was measured can be read. `measure` runs rows one after the
other on one GPU, each in a process of its own, and appends one JSON line a row to DIR/rows.jsonl: figures, or `error`. What the
processes print is in DIR/rows.log. `python -m papers.h200.table` makes the table of these.

GPU memory is what a process beside the row's sees: the largest use by all processes during the row, less what was used before the
row's process made its context. Host memory is the largest resident size of the row's process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from megatrain.calibrate import calibrate
from megatrain.calibrate.blocks import measure_blocks
from megatrain.calibrate.cuda import Cuda
from megatrain.calibrate.host import Host
from megatrain.calibrate.machine import cpu_name, usable_memory
from megatrain.derive import by_cause, derive
from megatrain.engine.engine import Engine
from megatrain.files import Job, load_hardware, load_job, save_hardware, save_job, save_record
from megatrain.files.fields import plain
from megatrain.hardware import HardwareProfile, MeasuredOp
from megatrain.model import ModelSpec
from megatrain.recipe import Recipe
from megatrain.training import settled
from papers.h200.clocks import Clocks
from papers.h200.floor import Rates, floor_s
from papers.h200.measurement import reserved
from papers.h200.models import Device, qwen
from papers.h200.process import answer, in_its_own_process
from papers.h200.rates import MACHINE_RATES, block_seconds, machine_rates, rates_of
from papers.h200.records import CALIBRATED, record, save_stalls
from papers.h200.workload import RandomWeights, batches
from sim.ledger import CUDA_CONTEXT, ledger
from sim.planner import explain, plan_for

PLANS, RESULTS = Path(__file__).with_name("plans"), Path(__file__).with_name("results")
HOST_MEMORY = 120 << 30
HEADROOM = (512 << 20, 100)
"""Planned to stay free of what may be used: bytes, or one part in so many if that is more. The ledger may be wrong by half of the
one and all of the other."""
WARM, MEASURED = 4, 6
"""Steps before the first measured one (the third may still capture graphs), and measured ones."""
TIMEOUT_S = 420.0
"""That a row may take."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is promised: `limit_s` seconds a step at most. `gpu_memory_gib` None: all there is."""

    model: str
    gpu_memory_gib: int | None
    tokens: int
    limit_s: float
    clipping: bool = True
    deterministic: bool = False
    micro_batches: int = 1
    loss_tile: int = 4096

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            micro_batches=self.micro_batches, micro_batch_size=self.tokens // 1024 // self.micro_batches, seq_len=1024,
            clip_norm=1.0 if self.clipping else None, compiled=True, loss_tile=self.loss_tile,
            deterministic=self.deterministic,
        )  # fmt: skip

    @property
    def blocks(self) -> tuple[str, Recipe]:
        """What a block's time depends on: not on how many layers there are, on clipping or on how often it runs in a step."""
        return self.model.split("-")[0], dataclasses.replace(self.recipe, micro_batches=1, clip_norm=None)


ROWS: dict[str, Row] = {
    "7b-all-4096": Row(model="7B", gpu_memory_gib=None, tokens=4096, limit_s=0.42),
    "7b-all-16384": Row(model="7B", gpu_memory_gib=None, tokens=16384, limit_s=1.45),
    "7b-all-16384-deterministic": Row(
        model="7B", gpu_memory_gib=None, tokens=16384, limit_s=1.45 * 1.06, deterministic=True
    ),
    "7b-all-65536": Row(model="7B", gpu_memory_gib=None, tokens=65536, limit_s=6.0, micro_batches=4),
    "7b-24-16384": Row(model="7B", gpu_memory_gib=24, tokens=16384, limit_s=2.6, loss_tile=1024),
    "7b-24-16384-deterministic": Row(
        model="7B", gpu_memory_gib=24, tokens=16384, limit_s=2.6 * 1.06, loss_tile=1024, deterministic=True
    ),
    "7b-24-16384-unclipped": Row(model="7B", gpu_memory_gib=24, tokens=16384, limit_s=2.1, loss_tile=1024, clipping=False),
    "7b-24-65536": Row(model="7B", gpu_memory_gib=24, tokens=65536, limit_s=6.4, micro_batches=4, loss_tile=1024),
    "14b-all-16384": Row(model="14B", gpu_memory_gib=None, tokens=16384, limit_s=3.6),
    "14b-all-16384-deterministic": Row(model="14B", gpu_memory_gib=None, tokens=16384, limit_s=3.6, deterministic=True),
    "14b-all-65536": Row(model="14B", gpu_memory_gib=None, tokens=65536, limit_s=12.5, micro_batches=4),
    "14bx62-all-1024": Row(model="14B-62", gpu_memory_gib=None, tokens=1024, limit_s=60.0),
    "14bx72-all-1024-unclipped": Row(model="14B-72", gpu_memory_gib=None, tokens=1024, limit_s=60.0, clipping=False),
    "3b-all-4096": Row(model="3B", gpu_memory_gib=None, tokens=4096, limit_s=2.5 / 6),
    "3b-all-16384": Row(model="3B", gpu_memory_gib=None, tokens=16384, limit_s=2.6 / 3),
    "3b-all-32768": Row(model="3B", gpu_memory_gib=None, tokens=32768, limit_s=3.8 / 2, micro_batches=2),
    "3b-16-4096": Row(model="3B", gpu_memory_gib=16, tokens=4096, limit_s=2.5 / 2, loss_tile=1024),
    "3b-16-16384": Row(model="3B", gpu_memory_gib=16, tokens=16384, limit_s=2.6 / 1.7, loss_tile=1024),
    "3b-16-32768": Row(model="3B", gpu_memory_gib=16, tokens=32768, limit_s=3.8 / 1.6, micro_batches=2, loss_tile=1024),
}  # fmt: skip
"""The limit of a deterministic row of 7B is 6% above that of the fastest recipe. The deep ones are the largest that fit, of which
only three steps are promised. Rows of 3B stand beside DeepSpeed ZeRO-3 with
optimizer and parameters offloaded, of which 2.5, 2.6 and 3.8 s were known beforehand: that over the promised ratio."""


def plan(name: str) -> None:
    """Choose the row's plan and write it; what the planner says of it stands beside it."""
    row, hardware = ROWS[name], load_hardware(CALIBRATED)
    there = hardware.device_memory_bytes if row.gpu_memory_gib is None else row.gpu_memory_gib << 30
    memory = there - max(HEADROOM[0], there // HEADROOM[1])
    alike = (other for other, it in ROWS.items() if it.model == row.model and it.gpu_memory_gib == row.gpu_memory_gib)
    files = [PLANS / f"{other}.yaml" for other in alike if ROWS[other].clipping == row.clipping]
    seeds = [load_job(path).plan for path in files if path.exists()]  # what was found before, here or for other tokens
    model, said = qwen(row.model, "cuda"), f"qwen2.5-{row.model.lower()}"
    planned = plan_for(
        model, row.recipe, hardware, gpu_memory=memory, host_memory=HOST_MEMORY, seeds=seeds, marginals=False
    )
    PLANS.mkdir(exist_ok=True)
    if "-" in row.model:  # no built-in shape
        (PLANS / f"{row.model.lower()}.json").write_text(model.config_json + "\n")
        said = f"papers/h200/plans/{row.model.lower()}.json"
    save_job(PLANS / f"{name}.yaml", Job(model=said, recipe=row.recipe, plan=planned.plan))
    (PLANS / f"{name}.txt").write_text(explain(planned) + "\n")
    print(f"{name}: {planned.step_ns / 1e9:.3f} s, at most {row.limit_s:.3g}")


def calibrated(names: Sequence[str], device: Device, out: Path, onto: HardwareProfile | None = None) -> None:
    """Write DIR/calibrated.json: the machine, and the blocks of every recipe of the rows, each in a reduced model of its own.
    With `onto` that profile, and the blocks that it does not have."""
    profile = None
    if onto is not None:
        said = f"{onto.provenance}; later, on a machine of the same kind, blocks of {', '.join(names)}"
        profile = dataclasses.replace(onto, provenance=said)
    first: dict[tuple[str, Recipe], str] = {}
    for name in names:
        first.setdefault(ROWS[name].blocks, name)
    for name in first.values():
        row = ROWS[name]
        model, recipe = qwen(row.model, device), row.recipe
        if device == "cpu":
            recipe = dataclasses.replace(recipe, micro_batch_size=2, seq_len=16, compiled=False, loss_tile=16)
        if profile is None:
            profile = calibrate(device=device, model=model, recipe=recipe, budget_s=40, name="h200-calibrated")
        else:
            found = blocks_of(device, model, recipe)
            measured = {op._replace(duration_ns=0): op for op in (*found, *profile.compute.measured)}  # the earlier one stands
            profile = dataclasses.replace(
                profile, compute=dataclasses.replace(profile.compute, measured=tuple(measured.values()))
            )
        save_hardware(out / "calibrated.json", profile)
        print(f"{name}: calibrated", flush=True)


def blocks_of(device: Device, model: ModelSpec, recipe: Recipe) -> tuple[MeasuredOp, ...]:
    """What `calibrate` says of the model's blocks, without the machine's other rates."""
    buffer = 64 << 20
    if device == "cpu":
        place: Host | Cuda = Host(cpu_name(), usable_memory(), buffer, 0)
    else:
        place = Cuda(buffer, 0, recipe)
    place.close()  # its buffers are for copies
    return measure_blocks(place, model=model, recipe=recipe, budget_s=4.0, seed=0).measured


def measure(name: str, device: Device, commit: str, known: Known, out: Path) -> dict[str, Any]:
    """Run a row, and keep its trace: figures of the steady steps, every loss, whether every block was updated, and the rates of
    its floor, measured if they are not known."""
    row, job = ROWS[name], load_job(PLANS / f"{name}.yaml")
    model, recipe, plan = qwen(row.model, device), job.recipe, job.plan
    if device == "cpu":
        model, recipe, plan = rehearsal(model, recipe, job)
    started = time.perf_counter()
    with Clocks(device) as clocks, Engine(model, recipe, plan, RandomWeights(model, device), device=device) as engine:
        ready_s = time.perf_counter() - started
        uses = {"start": engine.memory_use(reset=True)}
        before = checksums(engine)
        data = batches(model, recipe, WARM + MEASURED)
        losses = [engine.step(batch).loss for batch in data[:WARM]]
        warm_s = time.perf_counter() - started
        uses["warm-up"] = engine.memory_use(reset=True)
        engine.restart_trace()
        at_start, steps_began = reserved(device), time.perf_counter()
        with settled():
            results = [engine.step(batch) for batch in data[WARM:]]
            losses += [result.loss for result in results]
        clock, each_second = clocks.since(steps_began), clocks.each_second(steps_began)
        norms = [result.norm for result in results]
        at_end = reserved(device)
        trace = engine.trace()
        changed = [a != b for a, b in zip(before, checksums(engine), strict=True)]
        use = uses["steps"] = engine.memory_use()
        facts = derive(engine.schedule, trace)
        save_record(out / f"{name}.measured.json.gz", record(engine.schedule, trace, "h200", device))
        save_stalls(out / name, trace, facts)
        times = [ns / 1e9 for ns in facts.step_times_ns]
        expected = engine.schedule.digests()
        start = {k: round(v, 1) for k, v in plain(engine.start_times).items()}
    print("measured", flush=True)  # what the rates below take is not the row's
    del engine, results  # both hold on to all memory of the run, which the rates need
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    book = ledger(model, recipe, plan, load_hardware(CALIBRATED))
    found: dict[str, Any] = {}
    try:
        machine = known.machine or machine_rates(device, threads=14)
        blocks, alone = known.blocks, {}
        if blocks is None:
            with Clocks(device) as clocks:
                blocks, alone = block_seconds(model, recipe, device), clocks.since(0.0)
        rates = Rates(**machine, **blocks)
        floor = floor_s(model, recipe, plan, rates)
        found = {"floor_s": round(floor.seconds, 4), "floor_by": floor.binds, "rates": dataclasses.asdict(rates)}
        found["clock, blocks alone"] = alone
    except Exception:  # a row without a floor is a row all the same
        traceback.print_exc()
    steady, step_s = sorted(times), statistics.median(times)
    numel = sum(block.numel for block in model.blocks)

    def gib(nbytes: int) -> float:
        return round(nbytes / 2**30, 3)

    return {
        "row": name, "model": row.model, "gpu_memory_gib": row.gpu_memory_gib, "tokens": recipe.tokens_per_step,
        "clipping": row.clipping, "deterministic": row.deterministic, "step_s": round(step_s, 4),
        "spread": [round(steady[0], 4), round(steady[-1], 4)], "steps_s": [round(t, 4) for t in times],
        "tflops_6n": round(6 * numel * recipe.tokens_per_step / step_s / 1e12, 1), "commit": commit, "limit_s": row.limit_s,
        "job": plain(job), **found,
        "losses": [round(x, 4) for x in losses], "norms": [round(x, 4) for x in norms], "every block updated": all(changed),
        "digests equal": list(trace.digests) == [expected[p] for p in trace.parts], "segments flat": at_start == at_end,
        "clock": clock, "clock, each second": each_second, "ready_s": round(ready_s, 1), "start": start,
        "warm_s": round(warm_s, 1), **derive_busy(facts),
        "ledger_device_gib": gib(book.device_nbytes()), "ledger_allocator_gib": gib(book.device_nbytes() - CUDA_CONTEXT),
        "ledger_pinned_gib": gib(book.nbytes("step", "pinned")), "pinned_gib": gib(use.pinned),
        "allocator_gib": gib(max(use.device_reserved for use in uses.values())),
        "allocator_by_phase_gib": {name: [gib(use.device_reserved), gib(use.device_allocated)] for name, use in uses.items()},
    }  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Rates that need not be measured again in a call: the machine's, and those of a row's blocks."""

    machine: dict[str, float] | None = None
    blocks: dict[str, float] | None = None


def child_command(name: str, device: Device, commit: str, known: Known, out: Path) -> list[str]:
    """What runs `child`, for `process.in_its_own_process`."""
    command = [sys.executable, "-m", "papers.h200.rows", "child", name, "--device", device, "--commit", commit]
    return [*command, "--machine", json.dumps(known.machine), "--blocks", json.dumps(known.blocks), "--out", str(out)]


def child(name: str, device: Device, commit: str, known: Known, out: Path) -> NoReturn:
    """`measure` in this process, for one that watches it."""

    def work(answers: TextIO) -> dict[str, Any]:
        with contextlib.redirect_stdout(answers):  # a row says itself that it is measured
            return measure(name, device, commit, known, out)

    answer(work)


def derive_busy(facts: Any) -> dict[str, Any]:
    """Where time went: lanes, who waited for whom, and the time of ops by kind (of all recorded steps)."""
    kinds: dict[str, list[int]] = {}
    for placed, event in zip(facts.run.placed, facts.run.events, strict=True):
        if placed.op.lane == "compute":
            kind = placed.op.kind if placed.op.block != 0 else f"{placed.op.kind} embedding"
            kinds.setdefault(kind, []).append(event.end_ns - event.start_ns)
    return {
        "utilisation": {lane: round(use.utilisation, 4) for lane, use in facts.lanes.items()},
        "compute stalls, s": {k: round(ns / 1e9, 4) for k, ns in by_cause(facts.stalls["compute"]).items() if ns},
        "compute ops, ms": {k: [len(v), round(statistics.median(v) / 1e6, 3)] for k, v in kinds.items()},
        "GB/s while busy": {k: round(use.nbytes / max(1, use.busy_ns), 2) for k, use in facts.lanes.items()},
    }


def checksums(engine: Engine) -> list[int]:
    """One number a block of its streamed weights: the sum of their bits, eight bytes at a time, modulo 2^64."""
    engine.flush()

    def total(weights: torch.Tensor) -> int:
        whole = weights.numel() // 8 * 8
        return int(weights[:whole].view(torch.int64).sum()) + int(weights[whole:].sum())

    return [total(engine.memory.named(f"weights[{block.index}]")) for block in engine.schedule.model.blocks]


def rehearsal(model: ModelSpec, recipe: Recipe, job: Job) -> tuple[ModelSpec, Recipe, Any]:
    """The same kind of row at a size that a laptop's cores run, under a plan with every kind of placement."""
    small = dataclasses.replace(recipe, micro_batch_size=2, seq_len=16, compiled=False, loss_tile=16)
    return model, small, dataclasses.replace(
        job.plan, adam_threads=2,
        placement={"default": "streamed", "embedding": "streamed_adam", "0": "streamed_adam", "1": "resident"},
        activations={"default": "offload", "3": "keep"},
        update_order={"default": "first"} | ({"2": "last"} if job.plan.update == "during_backward" else {}),
    )  # fmt: skip


COMMANDS = {
    "calibrate": "measure the machine and the blocks, into calibrated.json", "plan": "choose plans, into plans/",
    "measure": "run them and append to rows.jsonl", "child": "one row, for `measure`",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True, metavar="command")
    for what, does in COMMANDS.items():
        command = commands.add_parser(what, help=does, description=f"Of the rows that are named, or of all: {does}.")
        command.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}; all by default")
        if what == "plan":
            continue
        command.add_argument("--out", type=Path, default=RESULTS, help="the folder that is written to; results/ by default")
        command.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: rehearse at small sizes")
        if what == "calibrate":
            command.add_argument("--onto", type=Path, metavar="FILE", help="a profile that blocks are added to")
        else:
            command.add_argument("--commit", default="", help="the commit that is measured; make h200-table asks for it")
            command.add_argument("--machine", default="null", help="rates that were measured already, a row's own as JSON")
        if what == "child":
            command.add_argument("--blocks", default="null", help="seconds of its blocks that were measured already, as JSON")
    options = parser.parse_args(arguments)
    names = options.rows or list(ROWS)
    try:
        for unknown in [name for name in names if name not in ROWS]:
            raise ValueError(f"row: must be of {', '.join(ROWS)}, got {unknown}")
        machine = rates_of(options.machine) if options.what in ("measure", "child") else None
        onto = load_hardware(options.onto) if options.what == "calibrate" and options.onto else None
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    if options.what == "plan":
        for name in names:
            plan(name)
        return 0
    if options.what == "child":
        child(names[0], options.device, options.commit, Known(machine=machine, blocks=json.loads(options.blocks)), options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.what == "calibrate":
        calibrated(names, options.device, options.out, onto)
        return 0
    failed, blocks = 0, {}
    with (options.out / "rows.jsonl").open("a") as log:
        for name in names:
            known = Known(machine=machine, blocks=blocks.get(ROWS[name].blocks))
            command = child_command(name, options.device, options.commit, known, options.out)
            found = {"row": name} | in_its_own_process(
                command, os.environ, title=name, log=options.out / "rows.log", device=options.device, timeout_s=TIMEOUT_S
            )
            if "rates" in found:
                machine = {rate: found["rates"][rate] for rate in MACHINE_RATES}
                blocks[ROWS[name].blocks] = {rate: s for rate, s in found["rates"].items() if rate not in MACHINE_RATES}
            failed += "error" in found
            print(json.dumps(found), flush=True)
            log.write(json.dumps(found) + "\n")
            log.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
