"""demo: the whole way on one small model, in a few minutes, with nothing to download.

A 20-million-parameter Llama with random weights, the sources of Python's standard library as text. This machine is calibrated
without a step of that training; the plan is searched under a cap on device memory that lets at most a third of the layers stay on
the device; the prediction is written down; then it trains, and prediction and measurement are laid side by side.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from analysis.report import Report, mispredicted
from megatrain.calibrate import calibrate
from megatrain.calibrate.machine import usable_cores
from megatrain.catalog import cap, model_spec
from megatrain.cli import report as reports
from megatrain.cli import show
from megatrain.cli.outputs import check_folder
from megatrain.cli.predict import Prediction, predict
from megatrain.cli.run import Device, chosen_device, record_of, train_shown
from megatrain.data import open_data
from megatrain.files import Job, save_hardware, save_job, save_record
from megatrain.hardware import HardwareProfile
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Precision, Recipe
from megatrain.toy import make_toy_model, standard_library_text
from megatrain.training import warm_up
from megatrain.weights import open_weights
from sim.ledger import ledger
from sim.planner import Planned, default_plan, plan_for

CALIBRATION_S = 40.0
TEXT_BYTES = 6_000_000
MODEL_NAME = "llama-18m"
SIZES: dict[str, Any] = {
    "layers": 12, "hidden_size": 320, "intermediate_size": 1024, "heads": 5, "kv_heads": 5, "vocab_size": 2048,
}  # fmt: skip
GOOD = (0.7, 1.4)
"""Measured over predicted step time within this is what the demo promises of an idle machine."""


def run_demo(folder: Path, *, steps: int, device: str, seed: int, as_json: bool = False) -> None:
    """Everything into `folder`, which must be new or empty, and is so again if this does not finish. ValueError for another one,
    for a device that is not there, and for fewer than 10 steps (less is no steady step)."""
    check_folder("--out", folder, empty=True)
    if steps < 10:
        raise ValueError(f"--steps: must be at least 10 for a steady step, got {steps}")
    place = chosen_device(device)
    show.out.quiet = as_json
    with whole_or_empty(folder):
        the_whole_way(folder, steps=steps, place=place, seed=seed, as_json=as_json)


@contextlib.contextmanager
def whole_or_empty(folder: Path) -> Iterator[None]:
    """Make `folder`, if it is not there (it is empty if it is), and the folders above; where the block does not end well, remove
    what is in it then, and the folders that were made."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong is what is told
            for path in folder.iterdir() if folder.is_dir() else ():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            for path in made:
                path.rmdir()
        raise


def the_whole_way(folder: Path, *, steps: int, place: Device, seed: int, as_json: bool) -> None:
    started = time.perf_counter()

    say(started, "a small model, and the standard library's sources as text")
    text = standard_library_text(folder / "text", max_bytes=TEXT_BYTES)
    directory = folder / MODEL_NAME
    make_toy_model(directory, **SIZES, text=text, seed=seed)
    model = model_spec(directory)
    recipe = demo_recipe(place)
    show.text(
        f"  {model.name}: {model.numel / 1e6:.1f} million parameters, {model.n_layers} layers;"
        f" {recipe.tokens_per_step:,} tokens a step, {recipe.precision}, clipping {recipe.clip_norm}"
    )

    say(started, f"calibrate this machine ({CALIBRATION_S:.0f} s)")
    with show.progress("calibrate") as bar:
        profile = calibrate(
            device=place, model=model, recipe=recipe, budget_s=CALIBRATION_S, seed=seed, name="this-machine",
            progress=lambda what, done: bar(done, what),
        )  # fmt: skip
    save_hardware(folder / "hw.json", profile)

    say(started, "plan under a cap on device memory")
    planned = plan_streaming(model, recipe, profile)
    job = Job(model=str(directory.absolute()), recipe=recipe, plan=planned.plan)
    save_job(folder / "plan.yaml", job, comment=f"{model.name}: {show.seconds(planned.step_ns)} a step predicted")
    streamed = [i for i in range(model.n_layers) if planned.plan.placement_of("layer", i) == "streamed"]
    show.text(
        f"  device memory capped at {show.format_bytes_short(planned.hardware.device_memory_bytes)}: {len(streamed)} of"
        f" {model.n_layers} layers stream, update {planned.plan.update}, {planned.plan.weight_slots} weight slots;"
        f" {planned.binding}",
    )

    traced = steps - warm_up(steps)
    prediction = predict(job, model, planned.hardware, steps=traced)
    save_record(folder / "predicted.json.gz", prediction.record)
    say(started, f"prediction written down: {prediction.tokens_per_s:,.0f} tokens/s")

    say(started, f"train {steps} steps on {place}")
    data = open_data(text, directory, seq_len=recipe.seq_len, seed=seed, vocab_size=model.vocab_size)
    trained = train_shown(job, model, open_weights(directory, model), data.batch, steps=steps, device=place)
    measured = record_of(job, model, trained, place)
    save_record(folder / "measured.json.gz", measured)
    tenth = max(1, steps // 10)
    losses = [figures.loss for figures in trained.steps]
    means = [sum(losses[i : i + tenth]) / len(losses[i : i + tenth]) for i in range(0, steps, tenth)]
    show.text(f"  loss, means of {tenth} steps: {'  '.join(f'{mean:.2f}' for mean in means)}")

    say(started, "predicted and measured, side by side")
    pair = (
        reports.Named(folder / "predicted.json.gz", prediction.record), reports.Named(folder / "measured.json.gz", measured)
    )  # fmt: skip
    report = reports.compared([pair], folder / "report", tolerance=0.3)
    reports.tell(report, tolerance=0.3)
    conclude(prediction, report, started)
    if as_json:
        assert report.measured is not None
        show.out.quiet = False
        show.json_object({
            "out": str(folder), "predicted_tokens_per_s": prediction.tokens_per_s,
            "measured_tokens_per_s": report.measured.tokens_per_s, "ratio": report.ratio, "first_loss": losses[0],
            "last_loss": losses[-1], "seconds": time.perf_counter() - started,
        })  # fmt: skip


def say(started: float, what: str) -> None:
    show.text(f"[{time.perf_counter() - started:5.1f} s] {what}")


def demo_recipe(place: str) -> Recipe:
    """bf16 where this machine multiplies faster in it; half of the cores for compute, the rest for copies and the optimizer."""
    optimizer = AdamW(lr=2e-3, warmup_steps=5, weight_decay=0.01)
    if place == "cuda":
        return Recipe(micro_batch_size=16, seq_len=256, compiled=True, optimizer=optimizer)
    threads = max(1, usable_cores() // 2)
    torch.set_num_threads(threads)
    precision = faster_precision()
    return Recipe(
        micro_batch_size=4, seq_len=128, loss_tile=512, precision=precision, gradient_dtype=precision, compute_threads=threads,
        optimizer=optimizer,
    )  # fmt: skip


def faster_precision() -> Precision:
    best: dict[Precision, float] = {}
    kinds: tuple[tuple[Precision, torch.dtype], ...] = (("fp32", torch.float32), ("bf16", torch.bfloat16))
    for name, dtype in kinds:
        a, b = torch.randn(512, 1024).to(dtype), torch.randn(1024, 320).to(dtype)
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - begin)
        best[name] = min(times)
    return min(best, key=lambda name: best[name])


def plan_streaming(model: ModelSpec, recipe: Recipe, machine: HardwareProfile) -> Planned:
    """The best plan under the largest cap with which two thirds of the layers still stream. The first try has room for a third
    of them beside what streaming needs, each further one for a layer less."""
    streaming = default_plan(recipe, machine)
    needs = ledger(model, recipe, streaming, machine).device_nbytes()
    first = replace(streaming, placement={**streaming.placement, "0": "resident"})
    layer = max(1, ledger(model, recipe, first, machine).device_nbytes() - needs)
    for room in range(model.n_layers // 3, -1, -1):
        with show.progress("plan") as bar:
            planned = plan_for(
                model, recipe, cap(machine, gpu_memory=needs + room * layer), marginals=False,
                progress=lambda what, done: bar(None, f"{what} ({done} simulated)"),
            )  # fmt: skip
        if streamed_layers(model, planned.plan) >= -(-2 * model.n_layers // 3):
            return planned
    return planned


def streamed_layers(model: ModelSpec, plan: Plan) -> int:
    return sum(plan.placement_of("layer", i) == "streamed" for i in range(model.n_layers))


def conclude(prediction: Prediction, report: Report, started: float) -> None:
    assert report.measured is not None and report.ratio is not None
    show.pairs(
        "In short",
        {
            "predicted": f"{prediction.tokens_per_s:,.0f} tokens/s",
            "measured": f"{report.measured.tokens_per_s:,.0f} tokens/s",
            "ratio of step times": f"{report.ratio:.2f} (measured / predicted)",
            "time": f"{time.perf_counter() - started:.0f} s",
        },
    )
    if not GOOD[0] <= report.ratio <= GOOD[1]:
        wrong = mispredicted(report.comparison)
        kinds = ", ".join(f"{kind} on {lane} ({ratio:.2f}x)" for kind, lane, ratio in wrong[["kind", "lane", "ratio"]].values)
        show.text(
            f"The ratio lies outside {GOOD[0]} to {GOOD[1]}: was the machine busy with something else? Mispredicted:"
            f" {kinds or 'no kind of op by itself; see the stalls'}",
        )
