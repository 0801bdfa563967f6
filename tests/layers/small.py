"""Small models of the four architectures, with sizes that are no multiple of anything, and the library's model beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.layers.hf import hf_config
from megatrain.model import BlockSpec, ModelSpec

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")


def small_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """Three layers, grouped query heads, a head size of its own, an odd vocabulary and FFN."""
    return {
        "model_type": architecture,
        "vocab_size": 131,
        "hidden_size": 42,
        "intermediate_size": 75,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
    } | changes


def library_model(
    model: ModelSpec, attention: str = "sdpa", dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """The library's model of the same config, every parameter random (norms and biases too, so that none is 0 or 1)."""
    found: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config(json.loads(model.config_json), attention))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            around = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(around + 0.15 * torch.randn(parameter.shape, generator=generator))
    return found.to(dtype).eval()


def slot_views(slot: Tensor, block: BlockSpec, dtype: torch.dtype) -> list[Tensor]:
    """The block's parameters as views into a byte buffer."""
    elements = slot.view(dtype)
    return [elements[p.offset : p.end].view(p.shape) for p in block.params]


def filled_slot(block: BlockSpec, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """A byte buffer with the block's weights at their offsets, in `dtype`; NaN between them."""
    slot = torch.full((block.span,), float("nan"), dtype=dtype).view(torch.uint8)
    for spec, view in zip(block.params, slot_views(slot, block, dtype), strict=True):
        view.copy_(weights[spec.name].detach())
    return slot
