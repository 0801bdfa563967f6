"""Our engine beside the same training by others, on one machine. `python -m papers.h200.versus search --out DIR` finds the
fastest of DeepSpeed's documented settings, `... compare --out DIR [--rows ...]` runs, for each size, our engine's rows, DeepSpeed
with those settings, and plain PyTorch.

- `megatrain`: a row of `papers.h200.rows`, run as `rows measure` runs it; its full line is appended to DIR/rows.jsonl as well.
- `deepspeed`: ZeRO-3 with optimizer and parameters offloaded to the CPU (DeepSpeedCPUAdam), GPU memory not limited. What
  `papers/h200/deepspeed/NAME.json` says of `bf16` and `zero_optimization`, and all else from the recipe.
- `plain`: model, FP32 masters and fused AdamW on the GPU, where they fit.

The last two train the library's own model class with its gradient checkpointing. All have one model (Qwen2.5's shape, untied
head), the same random weights and distinct random tokens, batch, clipping, AdamW and decay of matrices only; the loss is the mean
over the tokens that have a next one. A step is timed from the batch on the host to the update's end; `step_s` is the median of
the steps after the warm-up. Every run has a process of its own and a time limit, and gives one JSON line in
DIR/versus-search.jsonl or DIR/versus.jsonl as soon as it ends: figures, or `error`. What the processes print is in
DIR/versus.log.

Exit code 0 if all ran, 1 if one failed (a model that does not fit counts as failed), 2 for what cannot begin, with one line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatrain.engine.kernels import decays
from megatrain.files.text import read_text
from megatrain.layers.hf import hf_config
from megatrain.model import ModelSpec
from megatrain.recipe import Recipe
from papers.h200.checks import Device, RandomWeights, batches, qwen
from papers.h200.rows import MACHINE_RATES, MEASURED, ROWS, WARM, Watcher

SETTINGS = Path(__file__).with_name("deepspeed")
SEARCH = Path(__file__).with_name("results") / "versus-search.jsonl"
SEARCHED = ("3B", 16384)
"""The model and the tokens a step that settings are searched at."""
SYSTEMS = ("megatrain", "deepspeed", "plain")
APART = 0.01
"""How far losses of one step may lie apart, of the smaller one: BF16 rounds differently in different kernels, no more."""

Step = Callable[[Tensor], Tensor]
"""One optimizer step on token ids [rows, tokens a row] that lie on the device; its loss, a scalar there."""


# ---- what others run -----------------------------------------------------------------------------------------------------


def conditions(name: str, tokens: int, device: Device) -> tuple[ModelSpec, Recipe]:
    """The model and the recipe of a size: sequences of 1,024 tokens, one batch. On the cpu backend tiny ones, to rehearse."""
    rows, length = (2, 16) if device == "cpu" else (tokens // 1024, 1024)
    return qwen(name, device), Recipe(micro_batch_size=rows, seq_len=length, clip_norm=1.0)


def library_model(model: ModelSpec) -> Any:
    """The library's model in BF16 with its gradient checkpointing, on the default device; weights are still to be filled in."""
    config = hf_config(json.loads(model.config_json), "sdpa")
    classes: Any = AutoModelForCausalLM
    module = classes.from_config(config, dtype=torch.bfloat16)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    return module.train()


def parameter_groups(model: ModelSpec, named: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters by whether the recipe's AdamW decays them. Shapes are the spec's: a partitioned parameter has none."""
    spec = {p.name: p for block in model.blocks for p in block.params}
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in named:
        groups[decays(spec[name])].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]


def plain(model: ModelSpec, recipe: Recipe, device: Device) -> Step:
    """A model wholly on the device: BF16 weights and gradients, FP32 masters, fused AdamW."""
    with torch.device(device):
        module = library_model(model)
    made, o = RandomWeights(model, device), recipe.optimizer
    weights: dict[str, nn.Parameter] = dict(module.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(made[name])
    masters = {name: weight.detach().float() for name, weight in weights.items()}
    groups = parameter_groups(model, masters.items(), o.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = module(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        for name, weight in weights.items():  # one by one, so that both types of all gradients never exist together
            assert weight.grad is not None
            masters[name].grad, weight.grad = weight.grad.float(), None
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(masters.values(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(weights.values()), list(masters.values()))
        return loss.detach()

    return step


def deepspeed_config(settings: str, recipe: Recipe) -> dict[str, Any]:
    """The settings' file and what the recipe says: batch, clipping, AdamW. ValueError, in one line, for a file that says anything
    of these itself, or that does not offload both the optimizer and the parameters to the CPU."""
    path, o = SETTINGS / f"{settings}.json", recipe.optimizer
    config: dict[str, Any] = json.loads(read_text(path))
    if set(config) != {"bf16", "zero_optimization"}:
        raise ValueError(f"{path.name}: must hold bf16 and zero_optimization, got {', '.join(sorted(config))}")
    zero = config["zero_optimization"]
    if config["bf16"] != {"enabled": True} or zero.get("stage") != 3:
        raise ValueError(f"{path.name}: must be stage 3 in bf16 with FP32 masters")
    for what in ("offload_optimizer", "offload_param"):
        if zero.get(what, {}).get("device") != "cpu" or zero[what].get("ratio", 1.0) != 1.0:
            raise ValueError(f"{path.name}: zero_optimization.{what}: must be wholly on the cpu, got {zero.get(what)}")
    adamw = {"lr": o.lr, "betas": [o.beta1, o.beta2], "eps": o.eps, "weight_decay": o.weight_decay}
    return config | {
        "train_micro_batch_size_per_gpu": recipe.micro_batch_size, "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.clip_norm or 0.0, "optimizer": {"type": "AdamW", "params": adamw},
        "steps_per_print": 1 << 30,
    }  # fmt: skip


def offloaded(model: ModelSpec, recipe: Recipe, device: Device, settings: str) -> Step:
    """DeepSpeed's engine around the library's model. Needs the environment of `deepspeed_environment`."""
    deepspeed: Any = importlib.import_module("deepspeed")  # installed or not; the folder of settings has its name too
    config = deepspeed_config(settings, recipe)
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):  # each parameter goes to the host as soon as it is made
        module = library_model(model)
    made = RandomWeights(model, device)
    named: dict[str, nn.Parameter] = dict(module.named_parameters())
    for name, parameter in named.items():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(made[name])
    groups = parameter_groups(model, named.items(), recipe.optimizer.weight_decay)
    engine, optimizer, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=config)
    used = type(optimizer.optimizer).__name__
    if used != "DeepSpeedCPUAdam":
        raise RuntimeError(f"the optimizer is {used}, not DeepSpeedCPUAdam")

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def deepspeed_environment(device: Device) -> dict[str, str]:
    """This process's environment, with what DeepSpeed asks for: one rank, its compilers, the accelerator."""
    found = dict(os.environ)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found |= {"DS_ACCELERATOR": device, "DS_SKIP_CUDA_CHECK": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", "")])  # ninja may be there alone
    compiler = shutil.which("nvcc")
    if compiler and "CUDA_HOME" not in found:
        found["CUDA_HOME"] = str(Path(compiler).resolve().parents[1])
    return found


def measured(system: str, settings: str, name: str, tokens: int, device: Device, done: Callable[[], None]) -> dict[str, Any]:
    """Run a system's steps in this process; `done` is called when nothing more of it is to be seen."""
    model, recipe = conditions(name, tokens, device)
    data = [batch["input_ids"] for batch in batches(model, recipe, WARM + MEASURED)]
    started = time.perf_counter()
    step = plain(model, recipe, device) if system == "plain" else offloaded(model, recipe, device, settings)
    losses, times = [], []
    if device == "cuda":
        torch.cuda.synchronize()
    ready_s = time.perf_counter() - started
    for ids in data:
        started = time.perf_counter()
        loss = step(ids.to(device))
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        losses.append(float(loss))
    done()
    return summary(times[WARM:], losses) | {"ready_s": round(ready_s, 1), "warm_s": round(sum(times[:WARM]), 1)}


def summary(times: Sequence[float], losses: Sequence[float]) -> dict[str, Any]:
    return {
        "step_s": round(statistics.median(times), 4), "spread": [round(min(times), 4), round(max(times), 4)],
        "steps_s": [round(t, 4) for t in times], "losses": [round(x, 4) for x in losses],
    }  # fmt: skip


# ---- runs in processes of their own ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the command: where it writes, and what all its lines hold."""

    out: Path
    device: Device
    commit: str
    timeout_s: float
    common: dict[str, Any]

    def line(self, system: str, settings: str, name: str, tokens: int) -> dict[str, Any]:
        return {
            "system": system, "settings": settings, "model": name, "gpu_memory_gib": None, "tokens": tokens,
            "commit": self.commit, **self.common,
        }  # fmt: skip


def other(call: Call, system: str, settings: str, name: str, tokens: int) -> dict[str, Any]:
    """The line of a system that is not ours."""
    line = call.line(system, settings, name, conditions(name, tokens, call.device)[1].tokens_per_step)
    command = [sys.executable, "-m", "papers.h200.versus", "child", system, settings, name, str(tokens), "--device", call.device]
    environment = deepspeed_environment(call.device) if system == "deepspeed" else dict(os.environ)
    try:
        return line | in_its_own_process(call, f"{system} {settings} {name} {tokens}", command, environment)
    except RuntimeError as problem:
        return line | {"error": str(problem)[:2000]}


def ours(call: Call, row: str, rates: dict[str, float] | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The line of a row of our engine, and the row's full line, None if it failed. `rates`: the machine's, once measured."""
    it = ROWS[row]
    line = call.line("megatrain", row, it.model, it.tokens) | {"gpu_memory_gib": it.gpu_memory_gib}
    with tempfile.TemporaryDirectory() as traces:  # of which nothing is kept
        command = [sys.executable, "-m", "papers.h200.rows", "child", row, "--device", call.device, "--commit", call.commit]
        command += ["--machine", json.dumps(rates), "--out", traces]
        try:
            full = in_its_own_process(call, f"megatrain {row}", command, dict(os.environ))
        except RuntimeError as problem:
            return line | {"error": str(problem)[:2000]}, None
    kept = ("tokens", "step_s", "spread", "steps_s", "losses", "ready_s", "warm_s", "gpu_peak_gib", "host_peak_gib")
    return line | {field: full[field] for field in kept}, full


def in_its_own_process(call: Call, title: str, command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What the command says, with what the watcher saw of it. The command waits for a line, says `measured` when it is done, and
    ends with one line of JSON. RuntimeError if it fails (its first line may be `failed` and why) or outlasts its time: then it
    is stopped, with all that it started."""
    with (call.out / "versus.log").open("a") as log:
        print(f"==== {title}", file=log, flush=True)
        begins = log.tell()
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(call.timeout_s, stop)
        timer.start()
        try:
            with Watcher(call.device, child.pid) as watcher:
                with contextlib.suppress(BrokenPipeError):  # of one that has ended already; why is in the log
                    child.stdin.write("go\n")  # not before the watcher has seen what is there without it
                    child.stdin.close()
                first = child.stdout.readline()
                gpu, host = watcher.peaks() if first.strip() == "measured" else (0, 0)
            lines = child.stdout.read().splitlines()
            code = child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:
                stop()
                child.wait()
    if late.is_set():
        raise RuntimeError(f"took longer than {call.timeout_s:g} s")
    if code or first.strip() != "measured" or not lines:
        said = (call.out / "versus.log").read_bytes()[begins:].decode(errors="replace").split("\n")
        causes = [first[7:]] if first.startswith("failed ") else [text for text in said if text.strip()]
        raise RuntimeError(f"ended with {code}: {causes[-1].strip() if causes else 'nothing said'}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found | {"gpu_peak_gib": round(gpu / 2**30, 3), "host_peak_gib": round(host / 2**30, 3)}


def child(system: str, settings: str, name: str, tokens: int, device: Device) -> NoReturn:
    """One run, for `other`. Only this function writes to standard output; libraries that do are sent to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdin.readline()
    try:
        found = measured(system, settings, name, tokens, device, lambda: print("measured", file=answers, flush=True))
        print(json.dumps(found), file=answers, flush=True)
    except Exception as problem:
        traceback.print_exc()
        print(f"failed {type(problem).__name__}: {' '.join(str(problem).split())}", file=answers, flush=True)
        os._exit(1)
    os._exit(0)  # at once: what libraries do when the interpreter ends is no part of the run, and may fail


def build_kernels(device: Device) -> None:
    """Compile DeepSpeed's CPU optimizer, which is otherwise done when it is first used. RuntimeError if that fails."""
    code = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    done = subprocess.run([sys.executable, "-c", code], env=deepspeed_environment(device), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"DeepSpeed's cpu_adam does not compile: {' '.join(done.stderr.split())[-500:]}")


def versions() -> dict[str, str | None]:
    packages = ("torch", "transformers", "deepspeed")
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine(device: Device) -> dict[str, Any]:
    """What the runs of one call share. The GPU is asked in another process: this one takes none of its memory."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "host_gib": round(host / 2**30, 1)}
    if device == "cuda":
        code = "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.uuid, torch.version.cuda, sep='\\n')"
        lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")
        found |= dict(zip(("gpu", "gpu_uuid", "cuda"), lines, strict=False))
    return found


# ---- lines and what follows from them -------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file. ValueError, in one line, for one that is no JSON object."""
    found = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip():
            try:
                raw = json.loads(line)
            except ValueError as problem:
                raise ValueError(f"{path}:{number}: is not JSON: {problem}") from None
            if not isinstance(raw, dict):
                raise ValueError(f"{path}:{number}: must hold a table of fields")
            found.append(raw)
    return found


def comparable(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that are no errors, the last of each system, settings and size. ValueError, in one line, if they are not of one
    call on one machine with one set of versions, lack a field, or if losses of one size differ by more than 1% at a step."""
    newest: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for line in lines:
        if "error" in line:
            continue
        missing = [field for field in FIELDS if field not in line]
        if missing:
            raise ValueError(f"{_title(line)}: {missing[0]}: is missing")
        if not (isinstance(line["step_s"], (int, float)) and 0 < line["step_s"] < math.inf):
            raise ValueError(f"{_title(line)}: step_s: must be a finite number > 0, got {line['step_s']!r}")
        if not line["losses"] or not all(map(math.isfinite, line["losses"])):
            raise ValueError(f"{_title(line)}: losses: must be finite numbers, at least one, got {line['losses']!r}")
        key = (line["system"], line["settings"], line["model"], line["gpu_memory_gib"], line["tokens"])
        newest.pop(key, None)
        newest[key] = line
    found = list(newest.values())
    for line in found[1:]:
        for field in ("run", "versions", "machine"):
            if line[field] != found[0][field]:
                raise ValueError(
                    f"{field}: must be one in all lines, got {found[0][field]!r} ({_title(found[0])}) "
                    f"and {line[field]!r} ({_title(line)})"
                )
    for a, b in combinations(found, 2):
        if (a["model"], a["tokens"]) != (b["model"], b["tokens"]):
            continue
        for step, (x, y) in enumerate(zip(a["losses"], b["losses"], strict=False), start=1):
            if abs(x - y) > APART * min(abs(x), abs(y)):
                raise ValueError(f"losses: differ by more than {APART:.0%} at step {step}: {x} ({_title(a)}), {y} ({_title(b)})")
    return found


FIELDS = ("system", "settings", "model", "gpu_memory_gib", "tokens", "step_s", "losses", "run", "versions", "machine")
"""Of a line, what the functions here read."""


def _title(line: Mapping[str, Any]) -> str:
    return " ".join(str(line.get(field)) for field in ("system", "settings", "model", "tokens"))


def ratios(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tokens a second of each row of ours over DeepSpeed's at the same model and tokens, {"model", "gpu_memory_gib", "tokens",
    "ratio"}, in the rows' order. DeepSpeed's memory is not limited, so one run of it serves rows of every `gpu_memory_gib`; a row
    without it has no ratio. ValueError, in one line, for lines that cannot be compared (`comparable`)."""
    found = comparable(lines)
    theirs = {(line["model"], line["tokens"]): line["step_s"] for line in found if line["system"] == "deepspeed"}
    return [
        {
            "model": line["model"], "gpu_memory_gib": line["gpu_memory_gib"], "tokens": line["tokens"],
            "ratio": round(theirs[line["model"], line["tokens"]] / line["step_s"], 3),
        }
        for line in found
        if line["system"] == "megatrain" and (line["model"], line["tokens"]) in theirs
    ]  # fmt: skip


def winner(path: Path) -> str:
    """The settings with the shortest step of a search. ValueError, in one line, if there is none, if its lines cannot be
    compared, or if the search was of another version of DeepSpeed than the one that is installed."""
    if not path.exists():
        raise ValueError(f"{path}: must hold the lines of a search; run search first, or name another file with --search")
    found = [line for line in comparable(read_lines(path)) if line["system"] == "deepspeed"]
    if not found:
        raise ValueError(f"{path}: must hold a setting that ran")
    best = min(found, key=lambda line: float(line["step_s"]))
    of, here = best["versions"]["deepspeed"], versions()["deepspeed"]
    if of != here:
        raise ValueError(f"{path}: must be a search of DeepSpeed {here}, which is installed; it is of {of}")
    return str(best["settings"])


# ---- the command ----------------------------------------------------------------------------------------------------------


def search(call: Call, settings: Sequence[str]) -> int:
    failed = 0
    with (call.out / "versus-search.jsonl").open("a") as log:
        for name in settings:
            failed += write(log, other(call, "deepspeed", name, *SEARCHED))
    return 1 if failed else 0


def compare(call: Call, rows: Sequence[str], systems: Sequence[str], settings: str) -> int:
    """Size by size in the rows' order: our rows of it, DeepSpeed, plain PyTorch."""
    failed, rates = 0, None
    with (call.out / "versus.jsonl").open("a") as log, (call.out / "rows.jsonl").open("a") as full_log:
        for model, tokens in dict.fromkeys((ROWS[row].model, ROWS[row].tokens) for row in rows):
            for row in rows if "megatrain" in systems else ():
                if (ROWS[row].model, ROWS[row].tokens) == (model, tokens):
                    line, full = ours(call, row, rates)
                    failed += write(log, line)
                    if full is not None:
                        full_log.write(json.dumps(full) + "\n")
                        full_log.flush()
                        rates = {rate: full["rates"][rate] for rate in MACHINE_RATES} if "rates" in full else rates
            for system, name in (("deepspeed", settings), ("plain", "plain")):
                if system in systems:
                    failed += write(log, other(call, system, name, model, tokens))
    return 1 if failed else 0


def write(log: Any, line: dict[str, Any]) -> bool:
    """Whether the line is an error."""
    text = json.dumps(line)
    print(text, flush=True)
    log.write(text + "\n")
    log.flush()
    return "error" in line


def main(arguments: Sequence[str] | None = None) -> int:
    known = sorted(path.stem for path in SETTINGS.glob("*.json"))
    parser = argparse.ArgumentParser(description="Our engine beside DeepSpeed and plain PyTorch, on one machine.")
    parser.add_argument("what", choices=["search", "compare", "child"], help="child: one run, for the other two")
    parser.add_argument("run_of", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="where lines are appended")
    parser.add_argument("--rows", nargs="+", metavar="row", help="rows to compare; those of 3B by default")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="what to compare; all by default")
    parser.add_argument("--settings", nargs="+", choices=known, default=known, help="settings to search; all by default")
    parser.add_argument("--search", type=Path, default=SEARCH, help="lines of the search whose winner is compared")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: rehearse at small sizes")
    parser.add_argument("--commit", default="", help="the commit that is measured")
    parser.add_argument("--timeout", type=float, default=420.0, metavar="seconds", help="that a run may take (%(default)g)")
    parser.add_argument("--run", default="", metavar="id", help="go on with an earlier call on the same machine: its lines' run")
    options = parser.parse_args(arguments)
    if options.what == "child":
        system, name, model, tokens = options.run_of
        child(system, name, model, int(tokens), options.device)
    rows = options.rows or [name for name in ROWS if name.startswith("3b-")]
    try:
        if options.run_of:
            raise ValueError(f"{options.what}: takes no {options.run_of[0]}; see --help")
        if options.what == "compare" and (unknown := [row for row in rows if row not in ROWS] or ([] if rows else ["none"])):
            raise ValueError(f"rows: must be of {', '.join(ROWS)}, got {unknown[0]}")
        settings = ""
        if options.what == "search" or "deepspeed" in options.systems:
            if importlib.util.find_spec("deepspeed") is None:
                less = "" if options.what == "search" else ", or leave it out with --systems megatrain plain"
                raise ValueError(f"DeepSpeed is not installed: pip install 'megatrain[deepspeed]'{less}")
            settings = winner(options.search) if options.what == "compare" else ""
            build_kernels(options.device)
    except (ValueError, RuntimeError) as problem:
        print(problem, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    common = {"run": options.run or uuid.uuid4().hex[:12], "versions": versions(), "machine": machine(options.device)}
    call = Call(out=options.out, device=options.device, commit=options.commit, timeout_s=options.timeout, common=common)
    if options.what == "search":
        return search(call, options.settings)
    return compare(call, rows, options.systems, settings)


if __name__ == "__main__":
    sys.exit(main())
