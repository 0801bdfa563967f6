"""run: weights and data from disk, the engine, a record of what was measured."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatrain.calibrate.cuda import device_memory, device_name
from megatrain.calibrate.machine import cpu_name, usable_memory
from megatrain.catalog import model_spec
from megatrain.cli import show
from megatrain.cli.exits import said_of
from megatrain.cli.options import read_by
from megatrain.cli.outputs import check_file, check_folder
from megatrain.cli.predict import beyond_positions, now, refuse_too_large
from megatrain.data import SyntheticData, open_data
from megatrain.derive import step_time
from megatrain.engine.engine import Engine, MemoryUse
from megatrain.files import Job, Record, StepFigures, load_job, save_record, write_file
from megatrain.files.fields import short
from megatrain.hardware import H200, HardwareProfile
from megatrain.model import ModelSpec
from megatrain.schedule import lower
from megatrain.training import Trained, train
from megatrain.weights import RandomWeights, Weights, open_weights, save_weights
from sim.ledger import Item, Ledger

Device = Literal["cpu", "cuda"]
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
Batches = Callable[[int, int], Mapping[str, Tensor]]


def chosen_device(asked: str) -> Device:
    """The device of an option; auto takes the GPU where there is one. ValueError for another word, or a GPU that is not there."""
    there = torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
    if asked not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: must be cpu, cuda or auto, got {asked!r}")
    if asked == "cuda" and not there:
        raise ValueError("--device: cuda was asked for, but PyTorch sees no CUDA device; use cpu")
    return "cuda" if there and asked != "cpu" else "cpu"


def this_machine(device: Device) -> HardwareProfile:
    """This machine's memory, for the ledger. Its rates are nobody's."""
    host = usable_memory()
    if device == "cpu":
        return replace(
            H200, name="this machine", host_memory_bytes=host, device_memory_bytes=host,
            compute=replace(H200.compute, on_host=True),
        )  # fmt: skip
    return replace(H200, name="this machine", host_memory_bytes=host, device_memory_bytes=device_memory())


def run_job(
    path: Path, data: str, *, steps: int, device: str, random_weights: bool, tokenizer: Path | None, seed: int, out: Path,
    save: Path | None, as_json: bool,
) -> Trained:  # fmt: skip
    """The verb. Everything that can be refused is, before a weight is read: outputs, plan, memory, files, data."""
    job = load_job(path)
    check_file("--out", out, inputs=read_by(path, job.model, None))
    model = model_spec(job.model)
    place = chosen_device(device)
    if save is not None:
        check_folder("--save", save, empty=True, nbytes=4 * model.numel)
    with said_of(path):
        _refuse_threads(job)
        book = refuse_too_large(model, job.recipe, job.plan, this_machine(place))
        weights: Mapping[str, Tensor] = RandomWeights(model, seed) if random_weights else _weights(job, model)
        with show.progress("lower the plan"):  # long where chunks are small
            schedule = lower(model, job.recipe, job.plan)
    with ExitStack() as ahead:
        if isinstance(weights, Weights) and book.host_nbytes() + weights.nbytes <= usable_memory():
            ahead.enter_context(weights.read_ahead())  # while data is opened and memory touched
        batches, counts = _batches(data, job, model, tokenizer, seed)
        show.note(beyond_positions(model, job.recipe))
        trained = train_shown(job, model, weights, batches, steps=steps, device=place, save=save)
    start, first_s = trained.start, trained.steps[0].seconds
    record = record_of(job, model, trained, place)
    save_record(out, record)
    assert trained.trace is not None
    time = step_time(schedule, trained.trace) if steps > 1 else None
    memory = memory_compared(book, trained.memory)
    figures: dict[str, Any] = {
        "steps": len(trained.steps), "skipped": trained.skipped, "first_loss": trained.steps[0].loss,
        "last_loss": trained.steps[-1].loss, "step_ns": time.mean_ns if time else None,
        "tokens_per_s": job.recipe.tokens_per_step * 1e9 / time.mean_ns if time else None, "out": str(out),
        "save": str(save) if save else None,
        "start": {
            "memory_s": start.memory_s, "weights_s": start.weights_s, "compile_s": start.compile_s, "first_step_s": first_s,
        },
        "memory": {what: row._asdict() for what, row in memory.items()},
    }  # fmt: skip
    if as_json:
        show.json_object(figures)
        return trained
    lines = {
        "loss": f"{trained.steps[0].loss:.4f} at the first step, {trained.steps[-1].loss:.4f} at the last",
        "data": counts,
        "start": f"memory {start.memory_s:.1f} s, weights {start.weights_s:.1f} s"
        + (f" (compiling meanwhile: {start.compile_s:.1f} s)" if job.recipe.compiled else "") + f", first step {first_s:.1f} s",
    }
    if time is not None:
        tflops = 6 * model.numel * figures["tokens_per_s"] / 1e12
        lines["step"] = f"{show.seconds(time.mean_ns)} (spread of the last steps {time.spread:.1%})"
        lines["tokens/s"] = f"{figures['tokens_per_s']:,.0f} at {job.recipe.tokens_per_step:,} tokens a step, {tflops:.3g} TFLOPS"
    if trained.skipped:
        lines["skipped"] = f"{trained.skipped} steps had a gradient that is not finite"
    show.pairs(f"{model.name}, {len(trained.steps)} steps on {place}", lines)
    show.rows("Memory after warm-up", ["", "predicted", "measured"], [
        [_CALLED[what], *(show.format_bytes_short(n) if n is not None else "unknown" for n in row)]
        for what, row in memory.items() if any(row)
    ])  # fmt: skip
    show.notes([*memory_differences(book, memory), *trained.trace.notes])
    show.text(f"written to {out}" + (f" and {save}" if save else ""))
    return trained


def train_shown(
    job: Job, model: ModelSpec, weights: Mapping[str, Tensor], batches: Batches, *, steps: int, device: Device,
    save: Path | None = None,
) -> Trained:  # fmt: skip
    """`train` with a progress bar; `save`: where the trained weights go, as FP32 safetensors beside the model's other files."""
    with _file_named(weights), show.progress("train") as bar:
        bar(None, "touch memory")

        def on_start(loaded: float) -> None:
            bar(loaded, "touch memory" if not loaded else "load weights" + ", compile" * job.recipe.compiled)

        def on_step(step: int, figures: StepFigures, skipped: str | None) -> None:
            rate = job.recipe.tokens_per_step / figures.seconds
            bar((step + 1) / steps, f"step {step + 1} of {steps}, loss {figures.loss:.4f}, {rate:,.0f} tokens/s")
            if skipped:
                show.err.print(f"step {step + 1}: {skipped}; nothing was changed", style="yellow", soft_wrap=True)

        def at_end(engine: Engine) -> None:
            if save is not None:
                bar(1.0, f"write weights to {save}")
                save_weights(save, model, engine.masters())
                _save_beside(save, job, model)

        return train(
            model, job.recipe, job.plan, weights, batches, steps=steps, device=device, on_step=on_step, on_start=on_start,
            on_ready=lambda: bar(0.0, "first step"), at_end=at_end,
        )  # fmt: skip


class Compared(NamedTuple):
    """Bytes by the ledger and by the engine (None where the system does not say)."""

    predicted: int
    measured: int | None


_CALLED = {"device": "device", "pinned": "host, pinned", "pageable": "host, pageable", "resident": "process, resident"}
_BESIDE = ("CUDA context", "process")
"""What the ledger counts beside the allocator and the storages."""
_TOLERATED = {"device": 256 << 20, "pinned": 64 << 20}
"""Bytes a prediction may be off, or a hundredth of it if that is more."""


def memory_compared(book: Ledger, use: MemoryUse) -> dict[str, Compared]:
    """A step's memory: the allocator's on the device, host storages pinned and not, and the resident set of the process.

    The context is left out of the device's, since the allocator knows nothing of it, and what the interpreter and its libraries
    take out of the host's; the resident set has all there is on the host. Without a GPU the device is the arena: kept activations
    and workspaces are of the host's own allocator, which keeps no count.
    """

    def predicted(space: str) -> int:
        return sum(item.nbytes for item in _counted(book, space))

    return {
        "device": Compared(predicted("device"), use.device_reserved), "pinned": Compared(predicted("pinned"), use.pinned),
        "pageable": Compared(predicted("pageable"), use.pageable), "resident": Compared(book.host_nbytes(), use.resident_set),
    }  # fmt: skip


def memory_differences(book: Ledger, memory: Mapping[str, Compared]) -> list[str]:
    """One line for each memory in which the ledger was wrong by more than may be."""
    found = []
    for space, tolerated in _TOLERATED.items():
        predicted, measured = memory[space]
        assert measured is not None
        off = measured - predicted
        if abs(off) > max(predicted // 100, tolerated):
            short = show.format_bytes_short
            largest = max(_counted(book, space), key=lambda item: item.nbytes, default=None)
            found.append(
                f"{space} memory is {short(abs(off))} {'more' if off > 0 else 'less'} than predicted"
                + (f"; the largest item of the prediction is {largest.what}, {short(largest.nbytes)}" if largest else "")
            )
    return found


def _counted(book: Ledger, space: str) -> list[Item]:
    phase = "init" if space == "device" and book.on_host else "step"
    return [item for item in book.items if item.space == space and phase in item.phases and item.what not in _BESIDE]


def record_of(job: Job, model: ModelSpec, trained: Trained, device: Device) -> Record:
    assert trained.trace is not None
    where = f"{device_name()} and {cpu_name()}" if device == "cuda" else cpu_name()
    return Record(
        job=job, model_name=model.name, config_json=model.config_json, hardware=f"this machine ({device})",
        provenance=f"measured on {where}, torch {torch.__version__}", trace=trained.trace, created=now(), steps=trained.steps,
        notes=(f"the trace begins at step {trained.traced_from + 1}",),
    )  # fmt: skip


def _refuse_threads(job: Job) -> None:
    cores = len(os.sched_getaffinity(0))
    for field, threads in (("plan.adam_threads", job.plan.adam_threads), ("recipe.compute_threads", job.recipe.compute_threads)):
        if threads > cores:
            raise ValueError(
                f"{field}: must be at most the {cores} cores there are, got {short(threads)}; plan with a profile of this machine"
                " (calibrate), or edit the plan"
            )


def _directory(job: Job) -> Path | None:
    """Where the model's files lie; None for a built-in shape."""
    path = Path(os.path.expanduser(job.model))
    return path if path.is_dir() else path.parent if path.is_file() else None


def _weights(job: Job, model: ModelSpec) -> Mapping[str, Tensor]:
    directory = _directory(job)
    if directory is None:
        raise ValueError(f"model: {job.model} is a shape without weights; name a Hugging Face directory, or use --random-weights")
    return open_weights(directory, model)


@contextmanager
def _file_named(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Name the file in messages about a weight that is read from one: the engine knows tensors alone, and begins with the name
    of one (`weights: 'NAME' is not finite`, `NAME: a master weight must be ...`)."""
    try:
        yield
    except ValueError as problem:
        text = str(problem).removeprefix("weights: ")
        name = text.split(" ", 1)[0].strip("':")
        if not isinstance(weights, Weights) or name not in weights:
            raise
        raise ValueError(f"{weights.files[name]}: {text}") from None


def _save_beside(directory: Path, job: Job, model: ModelSpec) -> None:
    """What makes weights a model that can be loaded and trained on: its config, and its tokenizer where there is one."""
    source = _directory(job)
    found = [] if source is None else [source / name for name in TOKENIZER_FILES]
    for path in found:
        if path.is_file():
            shutil.copyfile(path, directory / path.name)
    there = source / "config.json" if source is not None else None
    config = json.loads(there.read_text(encoding="utf-8") if there is not None and there.is_file() else model.config_json)
    # What is written is FP32, and a library would round it to what the config says.
    config |= {key: "float32" for key in ("dtype", "torch_dtype") if key in config}
    write_file(directory / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _batches(data: str, job: Job, model: ModelSpec, tokenizer: Path | None, seed: int) -> tuple[Batches, str]:
    recipe = job.recipe
    if recipe.attention_mask != "causal":
        raise ValueError(
            f"recipe.attention_mask: run feeds rows without segments and needs causal, got {recipe.attention_mask}; train packed"
            " rows with megatrain.training.train and batches of your own"
        )
    if data == "random":
        synthetic = SyntheticData(vocab_size=model.vocab_size, seq_len=recipe.seq_len, seed=seed)
        return synthetic.batch, "random tokens"
    directory = tokenizer if tokenizer is not None else _directory(job)
    if directory is None:
        raise ValueError(f"--tokenizer: is missing; {job.model} is a shape without one (or use --data random)")
    with show.progress("tokenize") as bar:
        found = open_data(
            data, directory, seq_len=recipe.seq_len, seed=seed, vocab_size=model.vocab_size,
            progress=lambda documents, tokens: bar(None, f"{documents:,} documents, {tokens:,} tokens"),
        )  # fmt: skip
    c = found.counts
    return found.batch, f"{c.documents:,} documents, {c.tokens:,} tokens, {c.rows:,} rows, {c.tokens_dropped:,} tokens dropped"
