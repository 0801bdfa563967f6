"""Hugging Face's classes of each architecture, and its config from a `ModelSpec.config_json`. Nothing else names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """One architecture's modules: decoder layer (config, layer_idx), norm (size, eps), rotary embedding (config)."""

    layer: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


CLASSES: dict[str, Classes] = {
    "llama": Classes(layer=llama.LlamaDecoderLayer, norm=llama.LlamaRMSNorm, rotary=llama.LlamaRotaryEmbedding),
    "qwen2": Classes(layer=qwen2.Qwen2DecoderLayer, norm=qwen2.Qwen2RMSNorm, rotary=qwen2.Qwen2RotaryEmbedding),
    "qwen3": Classes(layer=qwen3.Qwen3DecoderLayer, norm=qwen3.Qwen3RMSNorm, rotary=qwen3.Qwen3RotaryEmbedding),
    "mistral": Classes(
        layer=mistral.MistralDecoderLayer, norm=mistral.MistralRMSNorm, rotary=mistral.MistralRotaryEmbedding
    ),
}


def hf_config(fields: Mapping[str, Any], attention: str = "sdpa") -> PreTrainedConfig:
    """The library's config of a parsed `ModelSpec.config_json`, with `attention` as its implementation."""
    values = dict(fields)
    config: PreTrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    config._attn_implementation = attention
    return config
