"""A batch of token ids to the tensors blocks read: ids, targets, rotary tables and mask, made on the host once a step.

A batch is a mapping of host tensors [micro_batches x micro_batch_size, seq_len]: `input_ids`; `labels` if they are not
the ids (-100: no loss), unshifted as the library's; and, for a recipe with `attention_mask: segments`, `segments`. A
segment is a run of one id other than 0; 0 is padding. A token sees the tokens of its own segment up to itself,
positions count from 0 in each segment, and a token's target is the next label of the same segment. So rows may be
padded left or right or hold several sequences, and each sequence gets what it would get alone. A padding token sees
itself only, which keeps its row of the softmax finite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from megatrain.layers.hf import CLASSES, hf_config
from megatrain.model import ModelSpec, check_sequence
from megatrain.recipe import Recipe

IGNORE = -100
"""The target, or label, of a token that has no loss."""

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What every decoder layer reads besides its weights and hidden state.

    `cos`, `sin` [1 or B, T, head_dim] in the compute type. `mask` is None (causal, the kernel's own), bool [B, 1, T, T]
    (True: sees) for sdpa, or for eager attention, which has no causality of its own, additive in the compute type [1 or
    B, 1, T, T].
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None


def make_inputs(model: ModelSpec, recipe: Recipe, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of every micro-batch, in order, named, shaped and typed as
    `megatrain.schedule.layout.input_fields` says.

    Raises ValueError for a batch that is not the recipe's: wrong shape or type, ids outside the vocabulary, segments
    missing or not expected.
    """
    check_sequence(model, recipe.seq_len)
    _check_batch(model, recipe, batch)
    ids, segments, dtype = batch["input_ids"], batch.get("segments"), DTYPES[recipe.precision]
    all_targets = make_targets(batch)
    made = []
    for m in range(recipe.micro_batches):
        part = slice(m * recipe.micro_batch_size, (m + 1) * recipe.micro_batch_size)
        runs = None if segments is None else segments[part]
        cos, sin = rotary_tables(model, _positions(runs, recipe.seq_len), dtype)
        tensors = {"ids": ids[part], "targets": all_targets[part], "cos": cos, "sin": sin}
        mask = _mask(runs, recipe, dtype)
        if mask is not None:
            tensors["mask"] = mask
        made.append(tensors)
    return made


def layer_inputs(tensors: Mapping[str, Tensor]) -> LayerInputs:
    """The part of a micro-batch's tensors that layers read, wherever they lie now."""
    return LayerInputs(cos=tensors["cos"], sin=tensors["sin"], mask=tensors.get("mask"))


def make_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Each token's target [rows, seq_len]: the next label of the same segment, `IGNORE` where there is none."""
    labels, segments = batch.get("labels", batch["input_ids"]), batch.get("segments")
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    if segments is not None:
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        targets[:, :-1].masked_fill_(~same, IGNORE)
    return targets


def n_valid(batch: Mapping[str, Tensor]) -> int:
    """The step's tokens that have a loss: what the loss is divided by. A host number, known before the first op."""
    return int((make_targets(batch) != IGNORE).sum())


def rotary_tables(model: ModelSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) [rows, seq_len, head_dim] for `positions` [rows, seq_len], from the library's own rotary class."""
    cos, sin = _rotary(model.config_json)(torch.empty(0, dtype=dtype), positions)
    return cos, sin


@lru_cache(maxsize=8)
def _rotary(config_json: str) -> nn.Module:
    config = hf_config(json.loads(config_json))
    return CLASSES[config.model_type].rotary(config)


def _positions(segments: Tensor | None, seq_len: int) -> Tensor:
    """Positions [rows or 1, seq_len], counted from the start of each segment; 0 for padding."""
    places = torch.arange(seq_len)[None]
    if segments is None:
        return places
    starts = torch.where(_starts(segments), places, 0).cummax(1).values
    return torch.where(segments != 0, places - starts, 0)


def _starts(segments: Tensor) -> Tensor:
    """True where a run of equal segment ids begins."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return starts


def _mask(segments: Tensor | None, recipe: Recipe, dtype: torch.dtype) -> Tensor | None:
    if segments is None and recipe.attention == "sdpa":
        return None
    sees = torch.ones(recipe.seq_len, recipe.seq_len, dtype=torch.bool).tril()[None, None]
    if segments is not None:
        run = _starts(segments).cumsum(1)
        real = (segments != 0)[:, None, :, None]
        same = (run[:, None, :, None] == run[:, None, None, :]) & real
        sees = (sees & same) | torch.eye(recipe.seq_len, dtype=torch.bool)
    if recipe.attention == "sdpa":
        return sees
    return torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)


def _check_batch(model: ModelSpec, recipe: Recipe, batch: Mapping[str, Tensor]) -> None:
    if "input_ids" not in batch:
        raise ValueError(f"batch: must have input_ids, got {sorted(batch)}")
    for name in batch:
        if name not in ("input_ids", "labels", "segments"):
            hint = "; padding is said by segments (recipe.attention_mask: segments)" if name == "attention_mask" else ""
            raise ValueError(f"batch.{name}: is not read; a batch has input_ids, labels and segments{hint}")
    expects = recipe.attention_mask == "segments"
    if ("segments" in batch) != expects:
        rule = "must" if expects else "must not"
        raise ValueError(
            f"batch: {rule} have segments (recipe.attention_mask is {recipe.attention_mask}), got {sorted(batch)}"
        )
    shape = (recipe.micro_batches * recipe.micro_batch_size, recipe.seq_len)
    for name in ("input_ids", "labels", "segments"):
        if name not in batch:
            continue
        got, dtype = tuple(batch[name].shape), batch[name].dtype
        if got != shape:
            raise ValueError(f"batch.{name}: must be {shape} (micro_batches x micro_batch_size, seq_len), got {got}")
        if dtype != torch.int64 and (name != "segments" or dtype.is_floating_point or dtype == torch.bool):
            raise ValueError(f"batch.{name}: must be torch.int64, got {dtype}")
    for name in ("input_ids", "labels"):
        if name not in batch:
            continue
        values = batch[name] if name == "input_ids" else batch[name][batch[name] != IGNORE]
        if values.numel() and (int(values.min()) < 0 or int(values.max()) >= model.vocab_size):
            found = f"{int(values.min())}..{int(values.max())}"
            raise ValueError(f"batch.{name}: must be in 0..{model.vocab_size - 1}, got {found}")
