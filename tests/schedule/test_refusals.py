"""Plans and recipes that cannot be: a ValueError that names the field, the rule and the value."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe
from megatrain.schedule import lower, lower_evaluation
from tests.schedule.fixtures import tiny_model, tiny_recipe


def _refused(*parts: str, fields: dict[str, Any], make: type[Plan] | type[Recipe] | type[AdamW] = Plan) -> None:
    with pytest.raises(ValueError) as caught:
        made = make(**fields)
        if isinstance(made, Plan):
            lower(tiny_model(), tiny_recipe(), made)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("field", ["weight_slots", "vocab_slots", "gradient_slots", "host_gradient_slots", "adam_threads"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_counts(field: str, value: object) -> None:
    _refused(f"plan.{field}:", ">= 1", repr(value), fields={field: value})


@pytest.mark.parametrize("value", [-1, 1.5e3, "1MiB"])
def test_chunk_bytes(value: object) -> None:
    _refused("plan.chunk_bytes:", ">= 0", repr(value), fields={"chunk_bytes": value})


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"update": "later"}, ("plan.update:", "next_forward", "'later'")),
        ({"placement": {"default": "disk"}}, ("plan.placement['default']:", "resident", "'disk'")),
        ({"activations": {"1": "drop"}}, ("plan.activations['1']:", "recompute", "'drop'")),
        ({"placement": {"layers": "streamed"}}, ("plan.placement", "'layers'", "0-27")),
        ({"placement": {"3-1": "streamed"}}, ("plan.placement", "'3-1'")),
        ({"placement": {"-1": "streamed"}}, ("plan.placement", "'-1'")),
        ({"placement": {"2": "streamed"}}, ("plan.placement['2']", "layers 0 to 1")),
        ({"activations": {"0-5": "keep"}}, ("plan.activations['0-5']", "layers 0 to 1")),
        # As a YAML file has it that a user wrote: `1: resident`.
        ({"placement": {7: "resident"}}, ("plan.placement", "7")),
    ],
)
def test_choices(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    _refused(*parts, fields=fields)


def test_updates_during_backward_need_clipping_off() -> None:
    with pytest.raises(ValueError, match=r"plan\.update: during_backward .* recipe\.clip_norm: null"):
        lower(tiny_model(), tiny_recipe(clip_norm=1.0), Plan(update="during_backward"))
    lower(tiny_model(), tiny_recipe(clip_norm=None), Plan(update="during_backward"))


@pytest.mark.parametrize("lowering", [lower, lower_evaluation])
def test_a_sequence_longer_than_the_window(lowering: Any) -> None:
    model = ModelSpec.from_config({
        "architectures": ["MistralForCausalLM"], "vocab_size": 67, "hidden_size": 8, "intermediate_size": 19,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4,
    })  # fmt: skip
    lowering(model, tiny_recipe(seq_len=4), Plan())
    with pytest.raises(ValueError, match=r"seq_len: must be <= sliding_window 4 .* got 5"):
        lowering(model, tiny_recipe(seq_len=5), Plan())


@pytest.mark.parametrize("field", ["micro_batches", "micro_batch_size", "seq_len", "loss_tile", "compute_threads"])
@pytest.mark.parametrize("value", [0, -1, 2.0])
def test_recipe_counts(field: str, value: object) -> None:
    _refused(f"recipe.{field}:", ">= 1", repr(value), fields={field: value}, make=Recipe)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"precision": "fp16"}, ("recipe.precision:", "bf16 or fp32", "'fp16'")),
        ({"gradient_dtype": "fp8"}, ("recipe.gradient_dtype:", "'fp8'")),
        ({"clip_norm": 0.0}, ("recipe.clip_norm:", "null", "0.0")),
        ({"clip_norm": float("nan")}, ("recipe.clip_norm:", "nan")),
        ({"attention_mask": "full"}, ("recipe.attention_mask:", "segments", "'full'")),
    ],
)
def test_recipe_choices(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    _refused(*parts, fields=fields, make=Recipe)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"lr": -1.0}, ("optimizer.lr:", ">= 0", "-1.0")),
        ({"beta2": 1.0}, ("optimizer.beta2:", "[0, 1)", "1.0")),
        ({"eps": 0.0}, ("optimizer.eps:", "> 0")),
        ({"schedule": "cosine"}, ("optimizer.total_steps:", "None")),
        ({"schedule": "cosine", "total_steps": 5, "warmup_steps": 5}, ("optimizer.total_steps:", "5")),
    ],
)
def test_optimizer(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    _refused(*parts, fields=fields, make=AdamW)


@pytest.mark.parametrize(
    ("table", "layer", "wanted"),
    [
        ({"default": "resident"}, 3, "resident"),
        ({}, 3, "streamed"),
        ({"default": "resident", "0-5": "streamed"}, 3, "streamed"),
        ({"0-5": "streamed", "3": "resident"}, 3, "resident"),
        ({"3": "resident", "0-5": "streamed"}, 4, "streamed"),
        ({"default": "resident", "0-2": "streamed"}, 3, "resident"),
    ],
)
def test_the_most_specific_key_wins(table: dict[str, Any], layer: int, wanted: str) -> None:
    assert Plan(placement=table).placement_of("layer", layer) == wanted


def test_embedding_and_head_have_keys_of_their_own() -> None:
    plan = Plan(placement={"default": "resident", "head": "streamed", "0": "streamed"})
    assert plan.placement_of("embedding", None) == "resident"
    assert plan.placement_of("head", None) == "streamed"
