"""Published configs of dense decoder-only models, each as its authors' `config.json` on Hugging Face has it.

Fields that say nothing about training (token ids, versions) are left out. Base models stand for their families, as
instruction-tuned siblings share every size and differ at most in the epsilon of a norm and the longest position. One shape is
made up, and its source says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model's config and where it was published."""

    config: Mapping[str, Any]
    source: str


def _llama3(
    repository: str, *, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int = 8, rope_factor: float = 8.0,
    tied: bool = False,
) -> Published:  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    return Published(config, f"config.json of {repository}, Hugging Face")


def _qwen25(
    size: str, *, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int = 152064, eps: float = 1e-6,
    positions: int = 131072, tied: bool = False,
) -> Published:  # fmt: skip
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "initializer_range": 0.02,
        "rms_norm_eps": eps,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": positions,
        "max_window_layers": layers,
        "tie_word_embeddings": tied,
    }
    return Published(config, f"config.json of Qwen/Qwen2.5-{size}, Hugging Face")


def _qwen3(
    size: str, *, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int = 8, tied: bool = False
) -> Published:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "attention_bias": False,
        "tie_word_embeddings": tied,
    }
    return Published(config, f"config.json of Qwen/Qwen3-{size}, Hugging Face")


_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}

# 90 layers of Llama 3's kind between its 8B and 405B: 119.7e9 parameters, head_dim 128.
_MADE_UP = _llama3("none", hidden=10240, ffn=34816, layers=90, heads=80)

MODELS: dict[str, Published] = {
    "llama3-1b": _llama3(
        "meta-llama/Llama-3.2-1B", hidden=2048, ffn=8192, layers=16, heads=32, rope_factor=32.0, tied=True
    ),
    "llama3-3b": _llama3(
        "meta-llama/Llama-3.2-3B", hidden=3072, ffn=8192, layers=28, heads=24, rope_factor=32.0, tied=True
    ),
    "llama3-8b": _llama3("meta-llama/Llama-3.1-8B", hidden=4096, ffn=14336, layers=32, heads=32),
    "llama3-70b": _llama3("meta-llama/Llama-3.1-70B", hidden=8192, ffn=28672, layers=80, heads=64),
    "qwen2.5-0.5b": _qwen25(
        "0.5B", hidden=896, ffn=4864, layers=24, heads=14, kv_heads=2, vocab=151936, positions=32768, tied=True
    ),
    "qwen2.5-1.5b": _qwen25("1.5B", hidden=1536, ffn=8960, layers=28, heads=12, kv_heads=2, vocab=151936, tied=True),
    "qwen2.5-3b": _qwen25(
        "3B", hidden=2048, ffn=11008, layers=36, heads=16, kv_heads=2, vocab=151936, positions=32768, tied=True
    ),
    "qwen2.5-7b": _qwen25("7B", hidden=3584, ffn=18944, layers=28, heads=28, kv_heads=4),
    "qwen2.5-14b": _qwen25("14B", hidden=5120, ffn=13824, layers=48, heads=40, kv_heads=8, eps=1e-5),
    "qwen2.5-32b": _qwen25("32B", hidden=5120, ffn=27648, layers=64, heads=40, kv_heads=8, eps=1e-5),
    "qwen2.5-72b": _qwen25("72B", hidden=8192, ffn=29568, layers=80, heads=64, kv_heads=8, eps=1e-5),
    "qwen3-0.6b": _qwen3("0.6B", hidden=1024, ffn=3072, layers=28, heads=16, tied=True),
    "qwen3-1.7b": _qwen3("1.7B", hidden=2048, ffn=6144, layers=28, heads=16, tied=True),
    "qwen3-4b": _qwen3("4B", hidden=2560, ffn=9728, layers=36, heads=32, tied=True),
    "qwen3-8b": _qwen3("8B", hidden=4096, ffn=12288, layers=36, heads=32),
    "qwen3-14b": _qwen3("14B", hidden=5120, ffn=17408, layers=40, heads=40),
    "qwen3-32b": _qwen3("32B", hidden=5120, ffn=25600, layers=64, heads=64),
    "mistral-7b": Published(_MISTRAL, "config.json of mistralai/Mistral-7B-v0.3, Hugging Face"),
    "dense-120b": Published(_MADE_UP.config, "made up: no published model has this shape (Llama 3's, 90 layers of 10,240)"),
}
