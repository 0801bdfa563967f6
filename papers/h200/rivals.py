"""What `papers.h200.versus` runs beside our engine, each as fast as those who use it would make it.

- `deepspeed`: ZeRO-3 with optimizer and parameters offloaded to the CPU (DeepSpeedCPUAdam), GPU memory not limited. What
  `papers/h200/deepspeed/NAME.json` says of `bf16` and `zero_optimization`, and all else from the recipe.
- `plain`: model, FP32 masters and fused AdamW on the GPU, where they fit.

Both train the library's own model class, with its gradient checkpointing or, faster where they fit, with activations kept. They
have the model (Qwen2.5's shape, untied head), the random weights, the distinct random tokens, batch, clipping, AdamW and decay
of matrices only that our rows have; the loss is the mean over the tokens that have a next one. A step is timed from the batch on
the host to the update's end; `step_s` is the median of the steps after the warm-up.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatrain.engine.kernels import decays
from megatrain.files.fields import short
from megatrain.files.text import read_text
from megatrain.layers.hf import hf_config
from megatrain.model import ModelSpec
from megatrain.recipe import Recipe
from megatrain.training import settled
from papers.h200.models import Device, qwen
from papers.h200.rows import MEASURED, WARM
from papers.h200.workload import RandomWeights, batches

SETTINGS = Path(__file__).with_name("deepspeed")

PLAIN_ENVIRONMENT = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Segments that grow, as our engine's do: near the limit of memory others would be fragmented."""

Step = Callable[[Tensor], Tensor]
"""One optimizer step on token ids [rows, tokens a row] that lie on the device; its loss, a scalar there."""


def conditions(name: str, tokens: int, device: Device) -> tuple[ModelSpec, Recipe]:
    """The model and the recipe of a size: sequences of 1,024 tokens, one batch. On the cpu backend tiny ones, to rehearse."""
    rows, length = (2, 16) if device == "cpu" else (tokens // 1024, 1024)
    return qwen(name, device), Recipe(micro_batch_size=rows, seq_len=length, clip_norm=1.0)


def library_model(model: ModelSpec, checkpointing: bool) -> Any:
    """The library's model in BF16, on the default device; weights are still to be filled in. `checkpointing`: a layer keeps its
    input alone and runs forward again in backward."""
    config = hf_config(json.loads(model.config_json), "sdpa")
    classes: Any = AutoModelForCausalLM
    module = classes.from_config(config, dtype=torch.bfloat16)
    if checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return module.train()


def parameter_groups(model: ModelSpec, named: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters by whether the recipe's AdamW decays them. Shapes are the spec's: a partitioned parameter has none."""
    spec = {p.name: p for block in model.blocks for p in block.params}
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in named:
        groups[decays(spec[name])].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]


# ---- the two systems -----------------------------------------------------------------------------------------------------


def plain(model: ModelSpec, recipe: Recipe, device: Device, checkpointing: bool) -> Step:
    """A model wholly on the device: BF16 weights and gradients, FP32 masters, fused AdamW."""
    with torch.device(device):
        module = library_model(model, checkpointing)
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A file of deepspeed/: what of it is DeepSpeed's, and whether the model is checkpointed."""

    checkpointing: bool
    config: dict[str, Any]


def read_settings(name: str) -> Settings:
    """Read deepspeed/NAME.json. ValueError, in one line, for a file that says anything of batch, clipping or AdamW itself, that
    does not offload both the optimizer and the parameters to the CPU, or whose `checkpointing` (true if left out) is no truth."""
    path = SETTINGS / f"{name}.json"
    try:
        config = json.loads(read_text(path))
    except json.JSONDecodeError as problem:
        raise ValueError(f"{path.name}: is not JSON: {problem}") from None
    if not isinstance(config, dict) or config.keys() - {"checkpointing"} != {"bf16", "zero_optimization"}:
        got = ", ".join(sorted(config)) if isinstance(config, dict) else short(config)
        raise ValueError(f"{path.name}: must hold bf16 and zero_optimization, and may hold checkpointing, got {got}")
    checkpointing, zero = config.pop("checkpointing", True), config["zero_optimization"]
    if not isinstance(checkpointing, bool):
        raise ValueError(f"{path.name}: checkpointing: must be true or false, got {short(checkpointing)}")
    if config["bf16"] != {"enabled": True} or not isinstance(zero, dict) or zero.get("stage") != 3:
        raise ValueError(f"{path.name}: must be stage 3 in bf16 with FP32 masters")
    for what in ("offload_optimizer", "offload_param"):
        to = zero.get(what)
        if not isinstance(to, dict) or to.get("device") != "cpu" or to.get("ratio", 1.0) != 1.0:
            raise ValueError(f"{path.name}: zero_optimization.{what}: must be wholly on the cpu, got {short(to)}")
    return Settings(checkpointing=checkpointing, config=config)


def deepspeed_config(settings: str, recipe: Recipe) -> dict[str, Any]:
    """What DeepSpeed is told: the settings' file (`read_settings`) and the recipe's batch, clipping and AdamW."""
    o = recipe.optimizer
    adamw = {"lr": o.lr, "betas": [o.beta1, o.beta2], "eps": o.eps, "weight_decay": o.weight_decay}
    return read_settings(settings).config | {
        "train_micro_batch_size_per_gpu": recipe.micro_batch_size, "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.clip_norm or 0.0, "optimizer": {"type": "AdamW", "params": adamw},
        "steps_per_print": 1 << 30,
    }  # fmt: skip


def offloaded(model: ModelSpec, recipe: Recipe, device: Device, settings: str, checkpointing: bool) -> Step:
    """DeepSpeed's engine around the library's model. Needs the environment of `deepspeed_environment`."""
    deepspeed: Any = importlib.import_module("deepspeed")  # installed or not; the folder of settings has its name too
    config = deepspeed_config(settings, recipe)
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):  # each parameter goes to the host as soon as it is made
        module = library_model(model, checkpointing)
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


def build_kernels(device: Device) -> None:
    """Compile DeepSpeed's CPU optimizer, which is otherwise done when it is first used. RuntimeError if that fails."""
    code = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    done = subprocess.run([sys.executable, "-c", code], env=deepspeed_environment(device), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"DeepSpeed's cpu_adam does not compile: {' '.join(done.stderr.split())[-500:]}")


# ---- measuring -----------------------------------------------------------------------------------------------------------


def without_weights(model: ModelSpec, device: Device, checkpointing: bool) -> Any:
    """The library's model with the weights of one decoder layer for all of them and one matrix for embedding and head, none
    filled in: what its forward keeps is what that of the whole model keeps."""
    with torch.device("meta"):
        module = library_model(model, checkpointing)
    layers = module.model.layers
    module.model.layers = nn.ModuleList([layers[0]] * len(layers))
    module.to_empty(device=device)
    module.lm_head.weight = module.model.embed_tokens.weight
    return module


def try_forward(system: str, model: ModelSpec, recipe: Recipe, device: Device, checkpointing: bool) -> None:
    """Raise what PyTorch raises where a step cannot fit, before time goes into building what would step.

    No more is held than every step of the system holds while its loss is computed: activations, logits, and for `plain` weights,
    masters and moments. So what fails here would fail there; what passes here may still fail there.
    """
    module = without_weights(model, device, checkpointing)
    numel = sum(block.numel for block in model.blocks)
    lasting = (2 + 4 + 8) * numel - sum(p.nbytes for p in module.parameters()) if system == "plain" else 0
    reserved = torch.empty(lasting, dtype=torch.uint8, device=device)
    ids = torch.zeros(recipe.micro_batch_size, recipe.seq_len, dtype=torch.int64, device=device)
    loss = module(input_ids=ids, labels=ids, use_cache=False).loss
    del reserved, module, loss
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def measured(
    system: str, settings: str, name: str, tokens: int, device: Device, checkpointing: bool, done: Callable[[], None]
) -> dict[str, Any]:
    """Run a system's steps in this process; `done` is called when nothing more of it is to be seen. Seconds: `ready_s` until it
    could step, `warm_s` of the steps before the measured ones, and those of `summary`."""
    model, recipe = conditions(name, tokens, device)
    try_forward(system, model, recipe, device, checkpointing)
    data = [batch["input_ids"] for batch in batches(model, recipe, WARM + MEASURED)]
    started = time.perf_counter()
    if system == "plain":
        step = plain(model, recipe, device, checkpointing)
    else:
        step = offloaded(model, recipe, device, settings, checkpointing)
    losses, times = [], []
    if device == "cuda":
        torch.cuda.synchronize()
    ready_s = time.perf_counter() - started
    with settled():  # of no use while a system warms up, but to its advantage later
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
