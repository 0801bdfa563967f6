"""Small models assembled from the templates give the library's own loss and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatrain.model import ModelSpec
from megatrain.recipe import Recipe
from tests.layers.assembled import assembled_step
from tests.layers.small import ARCHITECTURES, library_model, small_config

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def batch_of(recipe: Recipe, vocab_size: int, seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = recipe.micro_batches * recipe.micro_batch_size
    return {"input_ids": torch.randint(0, vocab_size, (rows, recipe.seq_len), generator=generator)}


def library_step(
    model: ModelSpec, batch: dict[str, Tensor], attention: str = "sdpa"
) -> tuple[float, dict[str, Tensor]]:
    library = library_model(model, attention)
    loss = library(input_ids=batch["input_ids"], labels=batch.get("labels", batch["input_ids"]), use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in library.named_parameters()}


def assert_close(
    got: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]], tolerance: float = 1e-5
) -> None:
    """Loss, and every tensor's gradient, to `tolerance` of the loss and of the gradient's own norm."""
    assert got[0] == pytest.approx(expected[0], rel=tolerance)
    assert list(got[1]) == list(expected[1])
    for name, gradient in expected[1].items():
        error = float((got[1][name] - gradient).norm() / gradient.norm())
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradients_are_the_librarys(architecture: str, tied: bool) -> None:
    model = ModelSpec.from_config(small_config(architecture, tie_word_embeddings=tied))
    recipe = Recipe(micro_batches=1, micro_batch_size=3, seq_len=17, precision="fp32", loss_tile=7)
    batch = batch_of(recipe, model.vocab_size)
    got = assembled_step(model, recipe, dict(library_model(model).named_parameters()), batch)
    assert_close(got, library_step(model, batch))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_theta": 5e5} | LLAMA3_ROPE}),
        ("qwen2", {"pad_token_id": 5, "tie_word_embeddings": True, "hidden_act": "gelu"}),
        ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 17, "max_window_layers": 0}),
        ("mistral", {"sliding_window": 17, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_setting_that_reaches_the_forward_does(
    architecture: str, changes: dict[str, object], attention: str
) -> None:
    """Biases, rotary scalings, a padding token's row, windows as long as the sequence, both attention kernels."""
    model = ModelSpec.from_config(small_config(architecture, **changes))
    recipe = Recipe(micro_batch_size=2, seq_len=17, precision="fp32", loss_tile=1024, attention=attention)  # type: ignore[arg-type]
    batch = batch_of(recipe, model.vocab_size)
    batch["input_ids"][0, 3] = 5
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][1, :9] = -100
    got = assembled_step(model, recipe, dict(library_model(model).named_parameters()), batch)
    assert_close(got, library_step(model, batch, attention))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_micro_batches_add_up_to_one_batch(tied: bool) -> None:
    """Also when they have very different numbers of valid tokens: the loss is a mean over the step's tokens."""
    model = ModelSpec.from_config(small_config("qwen2", tie_word_embeddings=tied))
    one = Recipe(micro_batches=1, micro_batch_size=4, seq_len=15, precision="fp32", loss_tile=8)
    four = Recipe(micro_batches=4, micro_batch_size=1, seq_len=15, precision="fp32", loss_tile=8)
    batch = batch_of(one, model.vocab_size)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, 3:] = -100
    batch["labels"][2] = -100
    weights = dict(library_model(model).named_parameters())
    whole, split = assembled_step(model, one, weights, batch), assembled_step(model, four, weights, batch)
    assert split[0] == pytest.approx(whole[0], rel=1e-6)
    norm = torch.stack([g.norm() for g in whole[1].values()]).norm()
    difference = torch.stack([(split[1][n] - whole[1][n]).norm() for n in whole[1]]).norm()
    assert float(difference / norm) <= 1e-6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputing_changes_no_bit(precision: str) -> None:
    model = ModelSpec.from_config(small_config("qwen3"))
    recipe = Recipe(micro_batches=2, seq_len=16, precision=precision, loss_tile=5)  # type: ignore[arg-type]
    batch = batch_of(recipe, model.vocab_size)
    weights = dict(library_model(model).named_parameters())
    kept, again = (
        assembled_step(model, recipe, weights, batch),
        assembled_step(model, recipe, weights, batch, recompute=True),
    )
    assert kept[0] == again[0]
    assert all(torch.equal(kept[1][name], again[1][name]) for name in kept[1])


def test_bf16_is_as_near_the_exact_gradient_as_the_librarys_bf16() -> None:
    model = ModelSpec.from_config(small_config("llama"))
    recipe = Recipe(micro_batch_size=4, seq_len=32, precision="bf16", loss_tile=40)
    batch = batch_of(recipe, model.vocab_size)
    library = library_model(model, dtype=torch.bfloat16)
    library(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss.backward()
    weights = {name: p.detach() for name, p in library.named_parameters()}
    exact = assembled_step(model, replace(recipe, precision="fp32"), weights, batch)[1]
    ours, theirs = assembled_step(model, recipe, weights, batch)[1], {n: p.grad for n, p in library.named_parameters()}
    error, expected = (torch.stack([(g[n] - exact[n]).norm() for n in exact]).norm() for g in (ours, theirs))
    assert float(error) <= 1.2 * float(expected)
    assert float(error) <= 0.05 * float(torch.stack([g.norm() for g in exact.values()]).norm())
