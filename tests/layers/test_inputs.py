"""Inputs: padded and packed rows give each sequence what it gets alone, and what the library gives it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatrain.layers.inputs import IGNORE, layer_inputs, make_inputs, make_targets, n_valid
from megatrain.model import ModelSpec
from megatrain.recipe import Recipe
from megatrain.schedule.layout import input_fields
from tests.layers.assembled import assembled_step
from tests.layers.small import ARCHITECTURES, library_model, small_config

SEQ_LEN = 16
LENGTHS = (5, 11, 16, 7)


def sequences(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, vocab_size, (length,), generator=generator) for length in LENGTHS]


def laid_out(kind: str, rows: list[Tensor]) -> dict[str, Tensor]:
    """Each sequence in a row of its own, padded left or right; or packed: 5 + 11, 16, and 7 with padding on both sides."""
    places = {
        "right": [[(0, s)] for s in rows],
        "left": [[(SEQ_LEN - len(s), s)] for s in rows],
        "packed": [[(0, rows[0]), (5, rows[1])], [(0, rows[2])], [(3, rows[3])], []],
    }[kind]
    ids, segments = torch.zeros(4, SEQ_LEN, dtype=torch.int64), torch.zeros(4, SEQ_LEN, dtype=torch.int64)
    for row, content in enumerate(places):
        for number, (start, tokens) in enumerate(content):
            ids[row, start : start + len(tokens)] = tokens
            segments[row, start : start + len(tokens)] = number + 1
    return {"input_ids": ids, "segments": segments}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["left", "right", "packed"])
def test_padded_and_packed_rows_give_what_each_sequence_gives_alone(kind: str, attention: str) -> None:
    """Loss and every gradient, against the library's model run on each bare sequence."""
    model = ModelSpec.from_config(small_config("llama"))
    recipe = Recipe(micro_batches=2, micro_batch_size=2, seq_len=SEQ_LEN, precision="fp32", loss_tile=9)
    recipe = replace(recipe, attention=attention, attention_mask="segments")  # type: ignore[arg-type]
    rows = sequences(model.vocab_size)
    library = library_model(model, attention)
    count = sum(length - 1 for length in LENGTHS)
    total = 0.0
    for tokens in rows:
        loss = library(input_ids=tokens[None], labels=tokens[None], use_cache=False).loss * (len(tokens) - 1) / count
        loss.backward()
        total += float(loss.detach())
    batch = laid_out(kind, rows)
    assert n_valid(batch) == count
    loss_got, grads = assembled_step(model, recipe, dict(library.named_parameters()), batch)
    assert loss_got == pytest.approx(total, rel=1e-5)
    for name, parameter in library.named_parameters():
        assert float((grads[name] - parameter.grad).norm() / parameter.grad.norm()) <= 1e-5, name


@pytest.mark.parametrize("kind", ["left", "right", "packed"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_single_token_gets_the_loss_it_gets_alone(architecture: str, kind: str) -> None:
    from megatrain.layers.embedding import embedding_forward
    from megatrain.layers.template import layer_templates

    model = ModelSpec.from_config(small_config(architecture))
    recipe = Recipe(micro_batch_size=4, seq_len=SEQ_LEN, precision="fp32", attention_mask="segments")
    library, rows = library_model(model), sequences(model.vocab_size)
    weights = dict(library.named_parameters())
    alone = []
    with torch.no_grad():
        for tokens in rows:
            logits = library(input_ids=tokens[None], use_cache=False).logits[0]
            alone.append(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none"))
    (tensors,) = make_inputs(model, recipe, laid_out(kind, rows))
    x = embedding_forward(weights["model.embed_tokens.weight"].detach(), tensors["ids"])
    for layer, block in enumerate(model.layers):
        x, _ = layer_templates(model)[layer].forward(
            [weights[p.name].detach() for p in block.params], x, layer_inputs(tensors)
        )
    assert bool(x.isfinite().all()), "padding rows must stay finite too"
    with torch.no_grad():
        logits = library.lm_head(library.model.norm(x))
    valid = tensors["targets"] != IGNORE
    got = torch.nn.functional.cross_entropy(logits[valid], tensors["targets"][valid], reduction="none")
    torch.testing.assert_close(got, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_targets_stay_inside_a_segment() -> None:
    ids = torch.tensor([[7, 8, 9, 4, 5, 0, 6, 6]])
    segments = torch.tensor([[1, 1, 1, 2, 2, 0, 1, 1]])
    expected = [[8, 9, IGNORE, 5, IGNORE, IGNORE, 6, IGNORE]]
    assert make_targets({"input_ids": ids, "segments": segments}).tolist() == expected
    labels = ids.clone()
    labels[0, 1] = IGNORE
    assert make_targets({"input_ids": ids, "labels": labels, "segments": segments}).tolist()[0][0] == IGNORE
    assert n_valid({"input_ids": ids, "labels": labels, "segments": segments}) == 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", ["causal", "segments"])
def test_shapes_are_known_in_advance(precision: str, attention: str, mask: str) -> None:
    model = ModelSpec.from_config(small_config("mistral"))
    recipe = Recipe(
        micro_batches=3, micro_batch_size=2, seq_len=9, precision=precision, attention=attention, attention_mask=mask
    )  # type: ignore[arg-type]
    batch = {"input_ids": torch.randint(0, model.vocab_size, (6, 9))}
    if mask == "segments":
        batch["segments"] = torch.ones(6, 9, dtype=torch.int32)
    made = make_inputs(model, recipe, batch)
    assert len(made) == 3
    fields = {f.name: (f.shape, getattr(torch, f.dtype), f.nbytes) for f in input_fields(model, recipe)}
    for tensors in made:
        assert {name: (tuple(t.shape), t.dtype, t.nbytes) for name, t in tensors.items()} == fields


def test_a_batch_that_is_not_the_recipes_is_refused() -> None:
    model = ModelSpec.from_config(small_config("mistral", sliding_window=9))
    recipe = Recipe(micro_batch_size=2, seq_len=9)
    ids = torch.zeros(2, 9, dtype=torch.int64)
    refused: list[tuple[Recipe, dict[str, Tensor], str]] = [
        (recipe, {}, "must have input_ids"),
        (recipe, {"input_ids": ids, "segments": ids}, "must not have segments"),
        (replace(recipe, attention_mask="segments"), {"input_ids": ids}, "must have segments"),
        (recipe, {"input_ids": ids[:, :8]}, r"must be \(2, 9\)"),
        (recipe, {"input_ids": ids.int()}, "must be torch.int64, got torch.int32"),
        (recipe, {"input_ids": ids + 131}, r"must be in 0..130, got 131..131"),
        (recipe, {"input_ids": ids, "labels": ids - 1}, r"labels: must be in 0..130"),
        (replace(recipe, seq_len=10), {"input_ids": ids}, "sliding_window 9"),
    ]
    for bad_recipe, batch, message in refused:
        with pytest.raises(ValueError, match=message):
            make_inputs(model, bad_recipe, batch)
    make_inputs(model, recipe, {"input_ids": ids, "labels": torch.full_like(ids, IGNORE)})
