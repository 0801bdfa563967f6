"""Streamed training equals an ordinary PyTorch loop, and a step of micro-batches equals one of a single batch."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.engine.engine import Engine
from megatrain.engine.kernels import decays
from megatrain.layers.hf import hf_config
from megatrain.model import ModelSpec
from megatrain.optim.constants import learning_rate
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe
from megatrain.schedule.layout import place_blocks
from tests.engine.small import random_batches, random_weights, small_model, small_recipe

STREAMED = Plan(weight_slots=2, chunk_bytes=2048, update="next_forward")


def library_model(model: ModelSpec, weights: dict[str, Tensor]) -> PreTrainedModel:
    hf: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config(json.loads(model.config_json), "sdpa"))
    hf.load_state_dict(weights, strict=False)
    return hf


def plain_loop(
    model: ModelSpec, recipe: Recipe, steps: int, device: str = "cpu", dtype: torch.dtype = torch.float32, std: float = 0.1
) -> list[tuple[float, dict[str, Tensor], dict[str, Tensor]]]:
    """What anybody would write: (loss, gradients before clipping, weights after the step) for each step.

    With another `dtype` than FP32, masters and optimizer are FP32 all the same and the model computes in `dtype`.
    """
    hf, o = library_model(model, random_weights(model, std)).to(device), recipe.optimizer
    computing = hf if dtype == torch.float32 else library_model(model, random_weights(model, std)).to(device, dtype)
    shapes = {p.name: p for block in model.blocks for p in block.params}
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in hf.named_parameters():
        groups[decays(shapes[name])].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": o.weight_decay}, {"params": groups[False], "weight_decay": 0.0}],
        lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps,
    )  # fmt: skip
    out = []
    for step, batch in enumerate(random_batches(model, recipe, steps), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step)
        optimizer.zero_grad()
        if computing is not hf:
            with torch.no_grad():
                for master, rounded in zip(hf.parameters(), computing.parameters(), strict=True):
                    rounded.copy_(master)
            computing.zero_grad()
        ids = batch["input_ids"].to(device)
        loss = computing(input_ids=ids, labels=ids).loss
        loss.backward()
        for master, rounded in zip(hf.parameters(), computing.parameters(), strict=True):
            master.grad = rounded.grad.float() if computing is not hf else master.grad
        gradients = {name: p.grad.clone().cpu() for name, p in hf.named_parameters()}
        if recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(hf.parameters(), recipe.clip_norm)
        optimizer.step()
        out.append((float(loss.detach()), gradients, {name: p.detach().cpu().clone() for name, p in hf.named_parameters()}))
    return out


def norm_of(tensors: dict[str, Tensor]) -> float:
    return float(torch.cat([t.double().flatten() for t in tensors.values()]).norm())


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    assert a.keys() == b.keys()
    return {name: a[name].double() - b[name].double() for name in a}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("policy", ["next_forward", "after", "during_backward"])
def test_streamed_training_equals_an_ordinary_loop(tied: bool, policy: str) -> None:
    model = small_model(tied=tied)
    recipe = small_recipe(clip_norm=None if policy == "during_backward" else 0.5)
    plan = Plan(weight_slots=2, chunk_bytes=2048, update=policy)  # type: ignore[arg-type]
    for block in place_blocks(model, recipe, plan):
        if block.size_class != "norm":
            assert len(block.chunks) > 1
            assert any(p.numel % 512 for p in block.spec.params), "sizes are no multiple of a chunk"
    expected = plain_loop(model, recipe, 5)
    with Engine(model, recipe, plan, random_weights(model)) as engine:
        for batch, (loss, gradients, weights) in zip(random_batches(model, recipe, 5), expected, strict=True):
            result = engine.step(batch)
            assert result.loss == pytest.approx(loss, rel=1e-5)
            assert result.norm == pytest.approx(norm_of(gradients), rel=1e-5)
            if policy != "during_backward":  # there, gradients live in passing buffers only
                assert norm_of(difference(engine.gradients(), gradients)) <= 1e-5 * norm_of(gradients)
            far = torch.cat([d.abs().flatten() > 1e-5 for d in difference(engine.state_dict(), weights).values()])
            assert float(far.double().mean()) <= 1e-4


def test_the_learning_rate_follows_its_schedule() -> None:
    model = small_model()
    cosine = AdamW(lr=1e-2, schedule="cosine", warmup_steps=2, total_steps=5, min_lr=1e-3)
    recipe = small_recipe(optimizer=cosine)
    expected = plain_loop(model, recipe, 5)
    with Engine(model, recipe, STREAMED, random_weights(model)) as engine:
        for batch, (loss, _, _) in zip(random_batches(model, recipe, 5), expected, strict=True):
            assert engine.step(batch).loss == pytest.approx(loss, rel=1e-4)
    with Engine(model, small_recipe(optimizer=AdamW(lr=1e-2)), STREAMED, random_weights(model)) as constant:
        losses = [constant.step(batch).loss for batch in random_batches(model, recipe, 5)]
    assert losses[-1] != pytest.approx(expected[-1][0], rel=1e-3), "another schedule would be seen"


def test_clipping_changes_the_update() -> None:
    """Off and on differ; the reported norm is the one before clipping, so it is the same."""
    model, batch = small_model(), random_batches(small_model(), small_recipe(), 1)[0]
    outcomes = []
    for clip in (None, 0.5):
        with Engine(model, small_recipe(clip_norm=clip), STREAMED, random_weights(model)) as engine:
            outcomes.append((engine.step(batch).norm, engine.moments()))
    (norm, free), (same, clipped) = outcomes
    assert norm == same
    assert norm > 0.5
    # m = (1 - beta1) g after one step: the norm of what the optimizer consumed is the limit.
    assert norm_of({k: v.m for k, v in clipped.items()}) / 0.1 == pytest.approx(0.5, rel=1e-5)
    assert norm_of({k: v.m for k, v in free.items()}) / 0.1 == pytest.approx(norm, rel=1e-5)


def test_four_micro_batches_equal_one_batch() -> None:
    """On the first step and on later ones: what step 1 leaves behind would show at step 2 or 3."""
    model = small_model(tied=True)
    split = small_recipe(micro_batches=4, micro_batch_size=1)
    whole = small_recipe(micro_batches=1, micro_batch_size=4)
    with (
        Engine(model, split, STREAMED, random_weights(model)) as a,
        Engine(model, whole, STREAMED, random_weights(model)) as b,
    ):
        for batch in random_batches(model, split, 3):
            ra, rb = a.step(batch), b.step(batch)
            gradients = b.gradients()
            assert norm_of(difference(a.gradients(), gradients)) <= 1e-6 * norm_of(gradients)
            assert ra.norm == pytest.approx(rb.norm, rel=1e-6)
            assert ra.loss == pytest.approx(rb.loss, rel=1e-6)


def test_loss_is_normalised_by_the_valid_tokens_of_the_whole_step() -> None:
    """11 valid tokens in one micro-batch and 101 in the other: the mean over 112 tokens, not the mean of two means."""
    model = small_model(max_position_embeddings=128)
    recipe = small_recipe(micro_batches=2, seq_len=102, loss_tile=40)
    batch = random_batches(model, recipe, 1)[0]
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, 12:] = -100
    hf = library_model(model, random_weights(model))
    logits = hf(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
    assert int((batch["labels"][:, 1:] != -100).sum()) == 112
    expected.backward()
    with Engine(model, recipe, STREAMED, random_weights(model)) as engine:
        assert engine.step(batch).loss == pytest.approx(float(expected.detach()), rel=1e-5)
        gradients = {name: p.grad for name, p in hf.named_parameters()}
        assert norm_of(difference(engine.gradients(), gradients)) <= 1e-5 * norm_of(gradients)


def test_evaluation_gives_the_loss_a_step_would_see_and_changes_nothing() -> None:
    model, recipe = small_model(), small_recipe()
    batches = random_batches(model, recipe, 3)
    with (
        Engine(model, recipe, STREAMED, random_weights(model)) as watched,
        Engine(model, recipe, STREAMED, random_weights(model)) as alone,
    ):
        for batch in batches:
            before = watched.evaluate(batch)
            assert watched.step(batch).loss == before
            alone.step(batch)
        ours, theirs = watched.state_dict(), alone.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
