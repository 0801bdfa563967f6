"""The verbs. Each checks what it was given and where it will write, then calls what does the work, then prints.

`--json` prints one object with the fields that the verb's `--help` names; a number that is not finite is null there.
"""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli import options as o
from megatrain.cli import show
from megatrain.cli.exits import run_app, said_of
from megatrain.cli.outputs import check_file, check_folder
from megatrain.files import Job, load_record, save_hardware, save_job, save_record

app = typer.Typer(name="megatrain", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

_SWEEP = "Sweep"
_DEPTHS, _CHUNKS = "1-5", "1MiB,4MiB,16MiB,64MiB"


def _examples(*lines: str) -> str:
    return "\n\n".join(["Examples:", *(f"- megatrain {line}" for line in lines)])


@app.callback(invoke_without_command=True, epilog=_examples("demo"))
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False
) -> None:
    """Train models larger than a GPU's memory, and know beforehand how fast.

    One schedule is planned, simulated and run: calibrate measures a machine, plan finds the fastest plan that fits, simulate
    predicts a step, run trains, compare lays prediction and run side by side. Exit codes: 0 done, 1 failed, 2 bad input or
    infeasible, 130 interrupted.
    """
    if version:
        from importlib.metadata import version as version_of

        show.text(f"megatrain {version_of('megatrain')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command(epilog=_examples("calibrate --model qwen2.5-0.5b --batch 4 --out hw.json"))
def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the profile goes (JSON).")],
    device: o.Device = "auto",
    model: o.ModelName = None,
    budget: Annotated[float, typer.Option(min=1.0, max=3600.0, metavar="SECONDS", help="For all measurements together.")] = 40.0,
    micro_batches: o.MicroBatches = None, batch: o.Batch = None, seq_len: o.SeqLen = None, precision: o.Precision = None,
    compiled: o.Compiled = None, deterministic: o.Deterministic = None,
    as_json: o.Json = False,
) -> None:  # fmt: skip
    """Measure this machine: links, CPU optimizer, memory, compute.

    With --model its blocks are timed too, for the recipe given; without, a prediction says of each block that it follows from
    rates.

    JSON fields: out, name, provenance, blocks (timed).
    """
    from megatrain.catalog import model_spec

    check_file("--out", out, inputs=o.read_by(None, model, None))
    spec = model_spec(model) if model is not None else None
    with show.progress("load PyTorch"):
        from megatrain.calibrate import calibrate as measure
        from megatrain.cli.run import chosen_device
    place = chosen_device(device)
    recipe = o.recipe_of(
        None, micro_batches=micro_batches, batch=batch, seq_len=seq_len, precision=precision, clip=None, compiled=compiled,
        deterministic=deterministic, lr=None, on_host=place == "cpu",
    )  # fmt: skip
    with show.progress("calibrate") as bar:
        profile = measure(
            device=place, model=spec, recipe=recipe, budget_s=budget, progress=lambda what, done: bar(done, what)
        )
    save_hardware(out, profile)
    if as_json:
        blocks = len(profile.compute.measured)
        show.json_object({"out": str(out), "name": profile.name, "provenance": profile.provenance, "blocks": blocks})
        return
    show.profile(profile)
    show.text(f"written to {out}")


@app.command(
    epilog=_examples(
        "simulate --model qwen2.5-72b --hardware h200-1.5tb --batch 8",
        "simulate plan.yaml --hardware hw.json --out predicted.json.gz",
        "simulate plan.yaml --sweep folder --depths 1-4",
    )
)
def simulate(
    job_file: o.JobFile = None,
    model: o.ModelName = None,
    hardware: o.Hardware = "h200",
    gpu_memory: o.GpuMemory = None, host_memory: o.HostMemory = None,
    micro_batches: o.MicroBatches = None, batch: o.Batch = None, seq_len: o.SeqLen = None, precision: o.Precision = None,
    clip: o.Clip = None, compiled: o.Compiled = None, deterministic: o.Deterministic = None,
    steps: Annotated[int, typer.Option(min=2, max=10_000, metavar="N", help="Steps to simulate.")] = 12,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the prediction here (.json or .json.gz).")
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", rich_help_panel=_SWEEP, help="Sweep both instead: sweep.csv and sweep.png go there."),
    ] = None,
    depths: Annotated[
        str, typer.Option(metavar="LIST", rich_help_panel=_SWEEP, help="Numbers of weight slots, e.g. 1-6 or 1,2,4.")
    ] = _DEPTHS,
    chunks: Annotated[
        str, typer.Option(metavar="LIST", rich_help_panel=_SWEEP, help="Chunk sizes, e.g. 4MiB,32MiB; 0: whole blocks.")
    ] = _CHUNKS,
    as_json: o.Json = False,
) -> None:  # fmt: skip
    """Predict a step: its time, its memory, and who waits for whom.

    Without PLAN.yaml, of the default plan: everything streamed, or as much on the GPU as the host's memory lacks.

    JSON fields: model, hardware, step_ns, spread (of the last steps), tokens_per_step, tokens_per_s, tflops, busy (share by
    lane), stalls_ns (of the compute lane in all steps, by cause), device_bytes, host_bytes, notes, out. With --sweep: csv, png,
    points.
    """
    from megatrain.cli.predict import SWEEP_FILES, beyond_positions, predict, refuse_too_large, simple_plan, swept

    if sweep is not None:
        if out is not None:
            raise ValueError("--out: has no meaning with --sweep, which writes into its own folder")
        check_folder("--sweep", sweep, files=SWEEP_FILES)
    elif (depths, chunks) != (_DEPTHS, _CHUNKS):
        raise ValueError("--sweep: is missing; --depths and --chunks say what it sweeps")
    if out is not None:
        check_file("--out", out, inputs=o.read_by(job_file, model, hardware))
    job, name, spec = o.job_of(job_file, model)
    machine = o.machine_of(hardware, gpu_memory, host_memory)
    recipe = o.recipe_of(
        job.recipe if job else None, micro_batches=micro_batches, batch=batch, seq_len=seq_len, precision=precision, clip=clip,
        compiled=compiled, deterministic=deterministic, lr=None, on_host=machine.compute.on_host,
    )  # fmt: skip
    with said_of(job_file):
        plan = job.plan if job else simple_plan(spec, recipe, machine)
        if sweep is not None:
            cells = o.integers("--depths", depths), o.sizes("--chunks", chunks)
            refuse_too_large(spec, recipe, replace(plan, weight_slots=min(cells[0])), machine)
            show.note(beyond_positions(spec, recipe))
            swept(spec, recipe, plan, machine, *cells, sweep, as_json=as_json)
            return
        with show.progress("simulate") as bar:
            bar(None, f"{steps} steps")
            book = refuse_too_large(spec, recipe, plan, machine)
            found = predict(Job(model=name, recipe=recipe, plan=plan), spec, machine, steps=steps)
    show.note(beyond_positions(spec, recipe))
    if out is not None:
        save_record(out, found.record)
    if as_json:
        memory = {"device_bytes": book.device_nbytes(), "host_bytes": book.host_nbytes()}
        show.json_object(found.figures() | memory | {"out": str(out) if out else None})
        return
    show.pairs(f"{spec.name} on {machine.name}, {recipe.tokens_per_step:,} tokens a step", found.lines())
    show.lanes(found.schedule, found.steady, found.step.mean_ns, found.facts)
    show.memory(book, machine.device_memory_bytes, machine.host_memory_bytes)
    show.notes([*found.record.trace.notes, f"rates: {machine.provenance}"])
    if out is not None:
        show.text(f"written to {out}")


@app.command(
    epilog=_examples(
        "plan --model qwen2.5-14b --hardware rtx4090 --out plan.yaml",
        "plan --model DIR --hardware hw.json --batch 4 --lr 3e-4 --out plan.yaml",
        "plan plan.yaml --gpu-memory 24GiB --out smaller.yaml",
    )
)
def plan(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the plan goes (YAML).")],
    job_file: o.JobFile = None,
    model: o.ModelName = None,
    hardware: o.Hardware = "h200",
    gpu_memory: o.GpuMemory = None, host_memory: o.HostMemory = None,
    micro_batches: o.MicroBatches = None, batch: o.Batch = None, seq_len: o.SeqLen = None, precision: o.Precision = None,
    clip: o.Clip = None, compiled: o.Compiled = None, deterministic: o.Deterministic = None, lr: o.LearningRate = None,
    as_json: o.Json = False,
) -> None:  # fmt: skip
    """Search the fastest plan that fits, and explain it.

    The plan of PLAN.yaml, where it fits too, is one that the winner does not lose to.

    JSON fields: out, step_ns, tokens_per_s, binding (what binds it, in words), default_step_ns (null: the default plan does not
    fit), device_bytes, host_bytes, simulated (how many plans).
    """
    from megatrain.cli.predict import beyond_positions, usable_seeds
    from sim.planner import explain, plan_for

    check_file("--out", out, inputs=o.read_by(None, model, hardware))
    job, name, spec = o.job_of(job_file, model)
    machine = o.machine_of(hardware, gpu_memory, host_memory)
    recipe = o.recipe_of(
        job.recipe if job else None, micro_batches=micro_batches, batch=batch, seq_len=seq_len, precision=precision, clip=clip,
        compiled=compiled, deterministic=deterministic, lr=lr, on_host=machine.compute.on_host,
    )  # fmt: skip
    with said_of(job_file):
        seeds = usable_seeds(job, spec, recipe, machine)
    with show.progress("plan") as bar:
        planned = plan_for(
            spec, recipe, machine, seeds=seeds, progress=lambda what, done: bar(None, f"{what} ({done} simulated)")
        )
    show.note(beyond_positions(spec, recipe))
    said = (
        f"{spec.name} on {machine.name}: {planned.step_ns / 1e9:.4g} s a step, {planned.tokens_per_s:,.0f} tokens/s predicted"
    )
    save_job(out, Job(model=name, recipe=recipe, plan=planned.plan), comment=said)
    if as_json:
        show.json_object({
            "out": str(out), "step_ns": planned.step_ns, "tokens_per_s": planned.tokens_per_s, "binding": planned.binding,
            "default_step_ns": planned.default_step_ns, "device_bytes": planned.ledger.device_nbytes(),
            "host_bytes": planned.ledger.host_nbytes(), "simulated": planned.simulated + planned.in_full,
        })  # fmt: skip
        return
    show.text(explain(planned))
    show.text(f"written to {out}")


@app.command(
    epilog=_examples(
        "run plan.yaml --data text/ --steps 100 --save trained",
        "run plan.yaml --data random --random-weights --steps 10",
    )
)
def run(
    job_file: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="What plan wrote: model, recipe and plan.")],
    data: Annotated[
        str, typer.Option("--data", "-d", metavar="PATH|random", help="A text file, .jsonl, .parquet, a folder, or: random.")
    ],
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to train.")] = 20,
    device: o.Device = "auto",
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Start from random weights, not the model's.")] = False,
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR", help="The tokenizer's directory; else the model's.")] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the data's order and of random weights.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The measured run (.json or .json.gz).")
    ] = Path("run.json.gz"),
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the trained weights, a Hugging Face directory, here (new or empty).")
    ] = None,
    as_json: o.Json = False,
) -> None:  # fmt: skip
    """Train: execute a plan, and write what was measured.

    JSON fields: steps, skipped (steps with a gradient that is not finite), first_loss, last_loss, step_ns (null for a single
    step), tokens_per_s, out, save, start (seconds, by what they went into), memory (bytes predicted and measured: device, pinned,
    pageable, resident).
    """
    with show.progress("load PyTorch"):
        from megatrain.cli.run import run_job

    run_job(
        job_file, data, steps=steps, device=device, random_weights=random_weights, tokenizer=tokenizer, seed=seed, out=out,
        save=save, as_json=as_json,
    )  # fmt: skip


@app.command(epilog=_examples("compare predicted.json.gz run.json.gz --out report"))
def compare(
    predicted: Annotated[Path, typer.Argument(metavar="PREDICTED", help="What simulate wrote.")],
    measured: Annotated[Path, typer.Argument(metavar="MEASURED", help="What run wrote.")],
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PREDICTED MEASURED]...", help="Further pairs, for the picture of throughput alone."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="The report's folder.")] = Path("report"),
    tolerance: Annotated[float, typer.Option(min=0.0, metavar="SHARE", help="Op kinds further off than this are named.")] = 0.3,
    as_json: o.Json = False,
) -> None:
    """Lay a prediction and a run side by side.

    Writes report.md (tables, stalls), lanes.png, throughput.png, ops.csv and a trace for ui.perfetto.dev.

    JSON fields: ratio (of step times, measured / predicted; null where no two steps ran in a row), predicted_step_ns,
    measured_step_ns, report, lanes, throughput, trace, ops (paths).
    """
    check_folder("--out", out)
    files = [predicted, measured, *(more or ())]
    if len(files) % 2:
        raise ValueError(f"compare: files must come in pairs, PREDICTED MEASURED; {files[-1]} has no other half")
    with show.progress("compare") as bar:
        bar(None, "tables and pictures")
        from analysis.report import FILES
        from megatrain.cli.report import Named, compared, figures_of, tell

        check_folder("--out", out, files=FILES.values())
        records = [Named(path, load_record(path)) for path in files]
        report = compared(list(zip(records[::2], records[1::2], strict=True)), out, tolerance=tolerance)
    if as_json:
        show.json_object(figures_of(report))
        return
    tell(report, tolerance)


@app.command(epilog=_examples("demo --out demo"))
def demo(
    folder: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="For all it makes; must be new or empty.")
    ] = Path("demo"),
    steps: Annotated[int, typer.Option(min=10, metavar="N", help="Steps to train.")] = 60,
    device: o.Device = "auto",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of weights and data order.")] = 0,
    as_json: o.Json = False,
) -> None:  # fmt: skip
    """Make a small model, calibrate, plan, predict, train, compare.

    The whole way in a minute or two, with nothing to download.

    JSON fields: out, predicted_tokens_per_s, measured_tokens_per_s, ratio (of step times, measured / predicted), first_loss,
    last_loss, seconds.
    """
    check_folder("--out", folder, empty=True)
    with show.progress("load PyTorch"):
        from megatrain.cli.demo import run_demo

    run_demo(folder, steps=steps, device=device, seed=seed, as_json=as_json)


def main() -> None:
    """The entry point: users' mistakes end in one line and code 2, failures in code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows ASCII only gets a question mark, and not an error
            stream.reconfigure(errors="replace")
    run_app(app)
