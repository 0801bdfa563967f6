"""The rows of the speed table: calibrate, plan and measure them.

`python -m papers.h200.rows calibrate [names ...]` measures the machine and the rows' blocks, `... plan [names ...]` chooses
plans, `... measure [names ...]` runs them.

A row is a model, the GPU memory that may be used, tokens a step and a recipe. Plans are chosen by the planner with
`results/calibrated.json` and committed under `plans/`, so that what was measured can be read. `measure` runs rows one after the
other on one GPU, each in a process of its own, and appends one JSON line a row to DIR/rows.jsonl; `python -m papers.h200.table`
makes the table of these.

GPU memory is what a process beside the row's sees: the largest use by all processes during the row, less what was used before the
row's process made its context. Host memory is the largest resident size of the row's process.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatrain.calibrate import calibrate
from megatrain.calibrate.blocks import measure_blocks
from megatrain.calibrate.cuda import Cuda
from megatrain.calibrate.host import Host
from megatrain.calibrate.machine import cpu_name, usable_memory
from megatrain.derive import by_cause, derive
from megatrain.engine.engine import Engine
from megatrain.engine.memory import buffer
from megatrain.files import Job, load_hardware, load_job, save_hardware, save_job, save_record
from megatrain.files.fields import plain, short
from megatrain.hardware import MeasuredOp
from megatrain.layers.head import head_template
from megatrain.layers.inputs import layer_inputs, make_inputs
from megatrain.layers.template import layer_templates
from megatrain.model import ModelSpec
from megatrain.optim.constants import step_constants
from megatrain.optim.kernel import Run, prepare_adamw
from megatrain.recipe import AdamW, Recipe
from papers.h200.floor import Rates, floor_s
from papers.h200.measurement import reserved
from papers.h200.microbenchmarks import device_rates
from papers.h200.models import Device, qwen
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


def calibrated(names: Sequence[str], device: Device, out: Path) -> None:
    """Write DIR/calibrated.json: the machine, and the blocks of every recipe of the rows, each in a reduced model of its own."""
    profile, done = None, set()
    for name in names:
        row = ROWS[name]
        # What a block's time depends on: not on how many layers there are, on clipping or on how often it runs in a step.
        alike = row.model.split("-")[0], dataclasses.replace(row.recipe, micro_batches=1, clip_norm=None)
        if alike in done:
            continue
        done.add(alike)
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


STATE = (torch.bfloat16, torch.int16, torch.bfloat16, torch.float32, torch.float32)


def machine_rates(device: Device, threads: int) -> dict[str, float]:
    """Bytes a second: link up and down alone, the CPU optimizer alone, it and both directions together, the GPU's optimizer."""
    if device == "cpu":
        return dict.fromkeys(MACHINE_RATES, 1e9)
    n, chunk = 1 << 28, 1 << 28
    hi, lo, g, m, v = (buffer(n * of.itemsize, "cpu").view(of).zero_() for of in STATE)  # as the engine's state lies
    constants = torch.from_numpy(step_constants(AdamW(), 1))
    update = prepare_adamw((hi, lo), m, v, g, constants, [Run(0, n, True)], threads=threads)
    here = {way: torch.zeros(chunk, dtype=torch.uint8, pin_memory=True) for way in ("up", "down")}
    there = {way: torch.zeros(chunk, dtype=torch.uint8, device="cuda") for way in here}
    streams = {way: torch.cuda.Stream() for way in here}

    def copy(way: str) -> None:
        with torch.cuda.stream(streams[way]):
            target, source = (there, here) if way == "up" else (here, there)
            target[way].copy_(source[way], non_blocking=True)

    def alone(work: Callable[[], None], nbytes: int) -> float:
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return nbytes / statistics.median(times[1:])

    found = {
        "h2d_bytes_per_s": alone(lambda: copy("up"), chunk), "d2h_bytes_per_s": alone(lambda: copy("down"), chunk),
        "adam_bytes_per_s": alone(lambda: update(), 26 * n), "gpu_adam_bytes_per_s": device_rates()["adamw"] * 1e9,
    }  # fmt: skip
    # Copies until the optimizer ends; the last ones overhang it by no more than a piece each.
    copies, events, started = 0, [], time.perf_counter()
    worker = threading.Thread(target=lambda: [update() for _ in range(4)])
    worker.start()
    while worker.is_alive():
        for way in here:
            copy(way)
            copies += 1
        events.append(streams["up"].record_event())
        if len(events) > 2:
            events.pop(0).synchronize()
    torch.cuda.synchronize()
    found["dram_bytes_per_s"] = (4 * 26 * n + copies * chunk) / (time.perf_counter() - started)
    return found


MACHINE_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "adam_bytes_per_s", "gpu_adam_bytes_per_s", "dram_bytes_per_s")


def block_seconds(model: ModelSpec, recipe: Recipe, device: Device) -> dict[str, float]:
    """Seconds of a decoder layer's forward (first, and again) and backward and of the loss, one micro-batch of the recipe, alone
    on the device."""
    if device == "cuda":
        from megatrain.engine.cuda import configure

        configure(recipe)
    made = RandomWeights(model, device)

    def weights(params: Iterable[Any]) -> list[torch.Tensor]:
        return [made[p.name].bfloat16().to(device) for p in params]

    batch = {"input_ids": batches(model, recipe, 1)[0]["input_ids"][: recipe.micro_batch_size]}
    inputs = {k: t.to(device) for k, t in make_inputs(model, dataclasses.replace(recipe, micro_batches=1), batch)[0].items()}
    layer, head = layer_templates(model, attention=recipe.attention, compiled=recipe.compiled)[0], head_template(model)
    of_layer, of_head = weights(model.layers[0].params), weights(model.head.params)
    shape = (recipe.micro_batch_size, recipe.seq_len, model.hidden_size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    sums = [torch.zeros(w.shape, device=device) for w in of_head]
    saved: list[Any] = []
    works: dict[str, Callable[[], Any]] = {
        "layer_forward_s": lambda: saved.append(layer.forward(of_layer, x, layer_inputs(inputs))[1]),
        "layer_again_s": lambda: layer.saved_by(of_layer, x, layer_inputs(inputs)),
        "layer_backward_s": lambda: layer.backward(of_layer, saved.pop(), x),
        "loss_s": lambda: head.loss_forward_backward(
            of_head, x, inputs["targets"], recipe.tokens_per_step, recipe.loss_tile, sums, first=False
        ),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in works}
    for name, seconds in timed(works, device):
        times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def timed(works: dict[str, Callable[[], Any]], device: Device) -> Iterator[tuple[str, float]]:
    """Ten times through the works, in order. On a GPU as graphs, as the engine runs them, so that launches cost nothing."""
    if device == "cpu":
        for _ in range(10):
            for name, work in works.items():
                started = time.perf_counter()
                work()
                yield name, time.perf_counter() - started
        return
    from megatrain.engine.cuda import captured

    with torch.cuda.stream(torch.cuda.Stream()):
        for work in works.values():  # compiles and loads what it needs
            work()
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        graphs = {name: captured(work, pool) for name, work in works.items()}
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)] for _ in range(12)]
        for row in marks:
            row[0].record()
            for graph, mark in zip(graphs.values(), row[1:], strict=True):
                graph.replay()
                mark.record()
        torch.cuda.synchronize()
    for row in marks[2:]:
        for name, begin, end in zip(works, row, row[1:], strict=False):
            yield name, begin.elapsed_time(end) / 1e3


class Watcher:
    """A process beside this one that sees what the GPU has left, whoever took it, every few milliseconds."""

    CODE = (
        "import select, sys, torch\n"
        "print(torch.cuda.mem_get_info()[0], flush=True)\n"
        "least, host, statm = 1 << 60, 0, f'/proc/{sys.argv[1]}/statm'\n"
        "while True:\n"
        "    least = min(least, torch.cuda.mem_get_info()[0])\n"
        "    host = max(host, int(open(statm).read().split()[1]) * 4096)\n"
        "    if select.select([sys.stdin], [], [], 0.002)[0]:\n"
        "        if not sys.stdin.readline(): break\n"
        "        print(least, host, flush=True)\n"
        "        least, host = 1 << 60, 0\n"
    )

    def __init__(self, device: Device, pid: int) -> None:
        self._process: subprocess.Popen[str] | None = None
        if device == "cuda":
            self._process = subprocess.Popen(
                [sys.executable, "-c", self.CODE, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert self._process.stdout is not None
            self._free = int(self._process.stdout.readline())

    def peaks(self) -> tuple[int, int]:
        """(GPU, host) bytes in use at most since this was last asked."""
        if self._process is None:
            return 0, 0
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        least, host = map(int, self._process.stdout.readline().split())
        return self._free - least, host

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()


def measure(name: str, device: Device, commit: str, machine: dict[str, float] | None, out: Path) -> dict[str, Any]:
    """Run a row, and keep its trace: figures of the steady steps, every loss, whether every block was updated, and the rates of
    its floor."""
    row, job = ROWS[name], load_job(PLANS / f"{name}.yaml")
    model, recipe, plan = qwen(row.model, device), job.recipe, job.plan
    if device == "cpu":
        model, recipe, plan = rehearsal(model, recipe, job)
    started = time.perf_counter()
    with Engine(model, recipe, plan, RandomWeights(model, device), device=device) as engine:
        ready_s = time.perf_counter() - started
        before = checksums(engine)
        data = batches(model, recipe, WARM + MEASURED)
        losses = [engine.step(batch).loss for batch in data[:WARM]]
        warm_s = time.perf_counter() - started
        engine.restart_trace()
        at_start = reserved(device)
        results = [engine.step(batch) for batch in data[WARM:]]
        losses += [result.loss for result in results]
        norms = [result.norm for result in results]
        trace = engine.trace()
        at_end = reserved(device)
        changed = [a != b for a, b in zip(before, checksums(engine), strict=True)]
        use = engine.memory_use()
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
        machine = machine or machine_rates(device, threads=14)
        rates = Rates(**machine, **block_seconds(model, recipe, device))
        floor = floor_s(model, recipe, plan, rates)
        found = {"floor_s": round(floor.seconds, 4), "floor_by": floor.binds, "rates": dataclasses.asdict(rates)}
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
        "ready_s": round(ready_s, 1), "start": start, "warm_s": round(warm_s, 1), **derive_busy(facts),
        "ledger_device_gib": gib(book.device_nbytes()), "ledger_allocator_gib": gib(book.device_nbytes() - CUDA_CONTEXT),
        "ledger_pinned_gib": gib(book.nbytes("step", "pinned")), "allocator_gib": gib(use.device_reserved),
        "allocated_gib": gib(use.device_allocated), "pinned_gib": gib(use.pinned),
    }  # fmt: skip


def in_its_own_process(
    name: str, device: Device, commit: str, machine: dict[str, float] | None, out: Path
) -> dict[str, Any]:
    """`measure` in a process of its own, with what the watcher saw of it."""
    command = [sys.executable, "-m", "papers.h200.rows", "child", name, "--device", device, "--commit", commit]
    command += ["--machine", json.dumps(machine), "--out", str(out)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    with Watcher(device, child.pid) as watcher:
        child.stdin.write("go\n")  # not before the watcher has seen what is there without it
        child.stdin.close()
        line = child.stdout.readline()
        gpu, host = watcher.peaks()
    text = child.stdout.read()
    if child.wait() or line.strip() != "measured":
        raise RuntimeError(f"{name}: the process that ran it ended with {child.returncode}")
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found | {"gpu_peak_gib": round(gpu / 2**30, 3), "host_peak_gib": round(host / 2**30, 3)}


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
    )  # fmt: skip


COMMANDS = {
    "calibrate": "measure the machine and the blocks, into calibrated.json", "plan": "choose plans, into plans/",
    "measure": "run them and append to rows.jsonl", "child": "one row, for `measure`",
}  # fmt: skip


def rates_of(text: str) -> dict[str, float] | None:
    """The machine's rates that a JSON object holds, alone or among others; None for null. ValueError, in one line."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as problem:
        raise ValueError(f"--machine: is not JSON: {problem}") from None
    if found is None:
        return None
    for rate in MACHINE_RATES:
        value = found.get(rate) if isinstance(found, dict) else None
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"--machine: {rate}: must be a number > 0, got {short(value)}")
    return {rate: float(found[rate]) for rate in MACHINE_RATES}


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
        if what != "calibrate":
            command.add_argument("--commit", default="", help="the commit that is measured; make h200-table asks for it")
            command.add_argument("--machine", default="null", help="rates that were measured already, a row's own as JSON")
    options = parser.parse_args(arguments)
    names = options.rows or list(ROWS)
    try:
        for unknown in [name for name in names if name not in ROWS]:
            raise ValueError(f"row: must be of {', '.join(ROWS)}, got {unknown}")
        machine = rates_of(options.machine) if options.what in ("measure", "child") else None
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    if options.what == "plan":
        for name in names:
            plan(name)
        return 0
    if options.what == "child":
        sys.stdin.readline()
        print(json.dumps(measure(names[0], options.device, options.commit, machine, options.out)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    if options.what == "calibrate":
        calibrated(names, options.device, options.out)
        return 0
    failed = 0
    with (options.out / "rows.jsonl").open("a") as log:
        for name in names:
            try:
                found = in_its_own_process(name, options.device, options.commit, machine, options.out)
                machine = {rate: found["rates"][rate] for rate in MACHINE_RATES} if "rates" in found else machine
            except Exception as error:
                traceback.print_exc()
                found = {"row": name, "error": f"{type(error).__name__}: {error}"[:2000]}
                failed += 1
            print(json.dumps(found), flush=True)
            log.write(json.dumps(found) + "\n")
            log.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
