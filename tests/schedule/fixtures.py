"""Small fixed schedules for tests that look at single ops."""

from __future__ import annotations

from typing import Any

from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import Schedule, lower


def tiny_model(*, layers: int = 2, tied: bool = False) -> ModelSpec:
    """A Llama whose layer has 1,536 elements of storage and whose vocabulary matrix has 640."""
    return ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 67,
            "hidden_size": 8,
            "intermediate_size": 19,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32,
            "tie_word_embeddings": tied,
        }
    )


def tiny_recipe(**fields: Any) -> Recipe:
    return Recipe(**{"micro_batches": 2, "seq_len": 5, **fields})


def build(model: ModelSpec | None = None, recipe: Recipe | None = None, **plan: Any) -> Schedule:
    """The training schedule of a plan on the tiny model, two chunks a layer unless the plan says otherwise."""
    fields = {"chunk_bytes": 1536, **plan}
    return lower(model or tiny_model(), recipe or tiny_recipe(), Plan(**fields))
