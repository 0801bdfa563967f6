"""The models that are measured: Qwen2.5's shapes, each with an output matrix of its own. Needs no PyTorch."""

from __future__ import annotations

from typing import Any, Literal

from megatrain.model import ModelSpec

Device = Literal["cpu", "cuda"]
"""The engine's backend. `cpu` rehearses: the same code, at sizes that a laptop's cores run."""

QWEN25: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2, "vocab_size": 151936},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064},
    "14B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064},
}  # fmt: skip
"""What differs between the sizes, in the words of their `config.json`."""


def qwen(name: str, device: Device, **changes: Any) -> ModelSpec:
    """A Qwen2.5 shape with an untied head by its size ("14B"), of another depth if one follows ("14B-60"). `changes` are fields
    of its configuration. On the cpu backend a tiny one of four layers, with the size's heads. KeyError for a size that is not in
    `QWEN25`."""
    size, _, layers = name.partition("-")
    fields = {"model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 32768, **QWEN25[size], **changes}
    fields |= {"num_hidden_layers": int(layers)} if layers else {}
    if device == "cpu":
        heads = fields["num_attention_heads"]
        fields |= {"hidden_size": 4 * heads, "intermediate_size": 96, "vocab_size": 211, "num_hidden_layers": 4}
    return ModelSpec.from_config(fields, name=f"Qwen2.5-{name}")
