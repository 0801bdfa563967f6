"""Checks of what is computed: the kernels' bits, the engine beside plain PyTorch, and that a plan changes no bit.

A check takes the device and the folder of results and returns its figures by name. One that finds a promise broken raises
AssertionError.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.engine import Engine
from megatrain.model import ModelSpec
from megatrain.optim.constants import step_constants
from megatrain.optim.kernel import adamw_update
from megatrain.optim.master import split as split_master
from megatrain.optim.norm import n_tiles, norm_partials
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe
from papers.h200.microbenchmarks import device_rates
from papers.h200.models import Device
from tests.engine.small import (
    assert_same_bits,
    delayed,
    poisoned,
    random_batches,
    random_weights,
    small_model,
    small_recipe,
    train,
)

# ---- kernels -----------------------------------------------------------------------------------------------------------


def kernels(device: Device, folder: Path) -> dict[str, Any]:
    """AdamW and packing on the GPU have the bits of the CPU kernels; their rates there. Needs a GPU."""
    generator = torch.Generator().manual_seed(3)
    compared, differences = 0, []
    spreads = (0.0, 4.0)  # beyond 1e18 squares overflow, to a NaN whose payload nobody promises
    for spread, link, split, decayed in itertools.product(spreads, (torch.bfloat16, torch.float32), (True, False), (True, False)):
        n, found = compare_adamw(generator, spread, link, split=split, decayed=decayed)
        compared += n
        differences += found
    for size in (1, 7, 4097, 65535, 65536, 65537, 1_000_003):
        for link in (torch.bfloat16, torch.float32):
            compare_packing(generator, size, link)
    assert not differences, differences
    return {"values compared": compared, "GB/s": device_rates()}


def compare_adamw(
    generator: torch.Generator, spread: float, link: torch.dtype, *, split: bool, decayed: bool
) -> tuple[int, list[str]]:
    """One update of random state on the CPU and on the GPU: how many values were compared, and the first of those that differ.
    Magnitudes spread over 10^(+-3 x `spread`); `link` is the gradient's type."""
    from megatrain.engine import triton_kernels

    n = 3_000_017

    def draw() -> Tensor:
        x = torch.randn(n, generator=generator)
        return x * 10 ** (spread * torch.randn(n, generator=generator).clamp(-3, 3))

    m, v, grad = draw(), draw().abs(), draw().to(link)
    master = split_master(draw()) if split else (draw(),)
    constants = torch.from_numpy(step_constants(AdamW(), 3, factor=0.37))
    operands = [t.clone() for t in (*master, m, v, grad)]
    on_gpu = [t.cuda() for t in (*master, m, v, grad, constants)]
    adamw_update(master, m, v, grad, constants, decayed=decayed, threads=16)
    k = len(master)
    triton_kernels.adamw(tuple(on_gpu[:k]), *on_gpu[k:], decayed=decayed)
    names, compared, differences = (*(("hi", "lo") if split else ("w",)), "m", "v"), 0, []
    for name, here, there in zip(names, (*master, m, v), on_gpu[: k + 2], strict=True):
        as_bits = torch.int16 if here.element_size() == 2 else torch.int32
        where = (here.view(as_bits) != there.cpu().view(as_bits)).nonzero().flatten()[:4]
        if len(where):
            shown = [[float(t[i]) for t in (here, there, *operands)] for i in where]
            case = f"{link} split={split} decayed={decayed} spread={spread}"
            differences.append(f"{name} {case}: here, there, operands: {shown}")
        compared += here.numel()
    return compared, differences


def compare_packing(generator: torch.Generator, size: int, link: torch.dtype) -> None:
    """Packing `size` FP32 sums on the GPU gives the CPU's gradients and its partial sums of the norm."""
    from megatrain.engine import triton_kernels

    sums = torch.randn(size, generator=generator)
    grad, partials = sums.to(link), torch.empty(n_tiles(size))
    norm_partials(grad, partials)
    packed, found = torch.empty(size, dtype=link, device="cuda"), torch.empty(n_tiles(size), device="cuda")
    triton_kernels.pack(triton_kernels.tiles_of([(0, size)]).cuda(), sums.cuda(), packed, found)
    assert torch.equal(packed.cpu(), grad), f"gradients of {size} {link}"
    assert torch.equal(found.cpu(), partials), f"partials of {size} {link}"


def sanitizer(device: Device, folder: Path) -> dict[str, Any]:
    """compute-sanitizer's memcheck finds nothing in two steps of a small model, eager. On the cpu backend the steps alone."""
    code = (
        "from tests.engine.small import *; from megatrain.plan import Plan; "
        f"train(small_model(), small_recipe(precision='bf16'), Plan(chunk_bytes=4096), steps=2, device={device!r})"
    )
    command = [sys.executable, "-c", code]
    if device == "cuda":
        command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "7", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    tail = (done.stdout + done.stderr).strip().splitlines()[-4:]
    assert done.returncode == 0, tail
    return {"says": tail}


# ---- the engine beside plain PyTorch -----------------------------------------------------------------------------------


def plain_fp32(device: Device, folder: Path) -> dict[str, Any]:
    """FP32, eager: the engine's losses and gradients are those of an ordinary PyTorch loop, to 1e-5 and 1e-4 of them."""
    from tests.engine.test_plain import difference, norm_of

    worst_loss = worst_gradient = 0.0
    for apart, ours, plain in beside_plain(small_model(tied=True), small_recipe(), Plan(chunk_bytes=2048), device):
        worst_loss = max(worst_loss, apart)
        worst_gradient = max(worst_gradient, norm_of(difference(ours, plain)) / norm_of(plain))
    assert worst_loss <= 1e-5 and worst_gradient <= 1e-4, (worst_loss, worst_gradient)
    return {"loss, relative": worst_loss, "gradient, of its norm": worst_gradient}


def near_plain_bf16(device: Device, folder: Path) -> dict[str, Any]:
    """BF16: the engine's losses are within 1% of those of an ordinary loop with FP32 masters, the cosine of their gradients is
    above 0.999."""
    model, recipe = small_model(**UNEVEN_SIZES), small_recipe(precision="bf16", seq_len=40)
    worst, least = 0.0, 1.0
    plan = PLANS["streamed, depth 4"]
    for apart, ours, plain in beside_plain(model, recipe, plan, device, dtype=torch.bfloat16, std=0.02):
        worst = max(worst, apart)
        a, b = (torch.cat([gradients[name].double().flatten() for name in plain]) for gradients in (ours, plain))
        least = min(least, float(torch.nn.functional.cosine_similarity(a, b, dim=0)))
    assert worst <= 0.01 and least > 0.999, (worst, least)
    return {"loss, relative": worst, "least cosine": least}


def beside_plain(
    model: ModelSpec, recipe: Recipe, plan: Plan, device: Device, *, dtype: torch.dtype = torch.float32, std: float = 0.1
) -> Iterator[tuple[float, dict[str, Tensor], dict[str, Tensor]]]:
    """Five steps of the engine and of an ordinary PyTorch loop that computes in `dtype`, from equal weights of deviation `std`.
    By step: how far their losses lie apart, of the loop's, and the gradients of both by name, before clipping, on the host."""
    from tests.engine.test_plain import plain_loop  # here, since it imports pytest, which the other checks do without

    steps = 5
    expected = plain_loop(model, recipe, steps, device, dtype=dtype, std=std)
    with Engine(model, recipe, plan, random_weights(model, std), device=device) as engine:
        for batch, (loss, gradients, _) in zip(random_batches(model, recipe, steps), expected, strict=True):
            apart = abs(engine.step(batch).loss - loss) / loss
            yield apart, engine.gradients(), gradients


# ---- one result under every plan ---------------------------------------------------------------------------------------

UNEVEN_SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 520, "vocab_size": 1031}
"""Of the small model: large enough for many chunks and tiles, none of which all parameters fill."""

PLANS: dict[str, Plan] = {
    "resident, kept": Plan(placement={"default": "resident"}, activations={"default": "keep"}, update="after", chunk_bytes=0),
    "streamed, depth 1": Plan(weight_slots=1, gradient_slots=1, chunk_bytes=0),
    "streamed, depth 2, after": Plan(weight_slots=2, chunk_bytes=1 << 17, update="after"),
    "streamed, depth 3, kept": Plan(weight_slots=3, chunk_bytes=1 << 16, activations={"default": "keep"}),
    "streamed, depth 4": Plan(weight_slots=4, vocab_slots=2, gradient_slots=3, chunk_bytes=100_000),
    "mixed": Plan(
        placement={"default": "streamed", "embedding": "resident", "0-2": "resident"},
        activations={"default": "recompute", "1-4": "keep"},
    ),
    "mixed, after": Plan(
        placement={"default": "resident", "head": "streamed", "3-5": "streamed"}, update="after", chunk_bytes=1 << 18
    ),
    "resident, recomputed": Plan(placement={"default": "resident"}),
    "kept, depth 1": Plan(activations={"default": "keep"}, weight_slots=1, chunk_bytes=1 << 19),
    "streamed_adam": Plan(placement={"default": "streamed_adam"}, chunk_bytes=1 << 18),
    "streamed_adam, one slot of each": Plan(
        placement={"default": "streamed_adam"}, weight_slots=1, gradient_slots=1, state_slots=1, chunk_bytes=0
    ),
    "streamed_adam, after, depth 3, small chunks": Plan(
        placement={"default": "streamed_adam"}, update="after", weight_slots=3, state_slots=3, chunk_bytes=1 << 15
    ),
    "streamed_adam, offload": Plan(
        placement={"default": "streamed_adam"}, activations={"default": "offload"}, chunk_bytes=1 << 17
    ),
    "device_weights, streamed_adam, resident mixed": Plan(
        placement={"default": "device_weights", "head": "streamed", "0-1": "streamed_adam", "3": "resident", "5": "streamed"},
        state_slots=1, chunk_bytes=1 << 17,
    ),
    "embedding and head streamed_adam": Plan(
        placement={"default": "streamed", "embedding": "streamed_adam", "head": "streamed_adam"}, vocab_slots=1,
        chunk_bytes=1 << 16,
    ),
    "CPU and streamed_adam in turn": Plan(
        placement={"default": "streamed", "0": "streamed_adam", "2": "streamed_adam", "4": "streamed_adam", "6": "streamed_adam"},
        weight_slots=3, chunk_bytes=1 << 16,
    ),
    "offload": Plan(activations={"default": "offload"}, chunk_bytes=1 << 18),
    "offload, keep, recompute mixed": Plan(
        activations={"default": "offload", "1": "keep", "3": "recompute", "4": "keep"}, input_slots=3, weight_slots=1
    ),
    "resident, offload, after": Plan(placement={"default": "resident"}, activations={"default": "offload"}, update="after"),
}  # fmt: skip
"""Of a recipe that clips: every placement, every kind of activations, buffers from one to four."""

UNCLIPPED_PLANS: dict[str, Plan] = {
    "during_backward, depth 2": Plan(update="during_backward", weight_slots=2, chunk_bytes=1 << 16),
    "during_backward, mixed": Plan(
        update="during_backward", placement={"default": "streamed", "2-4": "resident", "head": "resident"}
    ),
    "during_backward, every second layer last": Plan(
        update="during_backward", update_order={"default": "first", "1": "last", "3": "last", "5": "last", "head": "last"},
        host_gradient_slots=1, chunk_bytes=1 << 16,
    ),
    "during_backward, streamed_adam": Plan(
        update="during_backward", placement={"default": "streamed_adam"}, vocab_slots=1, chunk_bytes=1 << 16
    ),
    "during_backward, streamed_adam, one slot of each, offload": Plan(
        update="during_backward", placement={"default": "streamed_adam"}, activations={"default": "offload"}, weight_slots=1,
        gradient_slots=1, state_slots=1, chunk_bytes=0,
    ),
    "during_backward, every placement and every activation": Plan(
        update="during_backward", activations={"default": "offload", "1": "keep", "4": "recompute"}, state_slots=3,
        placement={"default": "streamed_adam", "0": "device_weights", "2": "resident", "4-5": "streamed", "head": "resident"},
        input_slots=3, chunk_bytes=1 << 17,
    ),
}  # fmt: skip
"""Of one that does not, and so may update `during_backward`."""


def bitwise(device: Device, folder: Path) -> dict[str, Any]:
    """BF16, deterministic, eager and, on a GPU, compiled: after five steps weights, moments, losses and norms have the same bits
    under every plan, and also when slots are filled with NaN once they are free and ops wait at random."""
    done = set()
    for compiled, tied in ((device == "cuda", False), (False, True)):
        model = small_model(tied=tied, **UNEVEN_SIZES)
        changes = {"precision": "bf16", "seq_len": 40, "compiled": compiled, "loss_tile": 16}
        clipped, unclipped = small_recipe(**changes), small_recipe(**changes, clip_norm=None)
        unclipped_plans = UNCLIPPED_PLANS | {"streamed": PLANS["streamed, depth 4"]}
        for recipe, plans in ((clipped, PLANS), (unclipped, unclipped_plans)):
            reference = train(model, recipe, PLANS["resident, kept"], device=device)
            for name, plan in plans.items():
                assert_same_bits(train(model, recipe, plan, device=device), reference)
                done.add(f"{'compiled' if compiled else 'eager'} {'tied' if tied else 'untied'} {name}")
        reference = train(model, clipped, PLANS["resident, kept"], device=device)
        for name in ("streamed, depth 3, kept", "streamed, depth 1", "streamed_adam, offload"):
            for disturbed in (poisoned, delayed(1)):
                assert_same_bits(train(model, clipped, PLANS[name], wrap=disturbed, device=device), reference)
    return {"plans equal, poison and delays included": sorted(done)}
