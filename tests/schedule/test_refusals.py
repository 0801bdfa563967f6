"""Plans and recipes that cannot be: a ValueError that names the field, the rule and the value."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.model import ModelSpec
from megatrain.optim.constants import BETA1, BETA2, EPS, LR, step_constants
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
        ({"update": "during_backward", "update_order": {"1": "never"}}, ("plan.update_order['1']:", "last", "'never'")),
        ({"update_order": {"1": "last"}}, ("plan.update_order['1']:", "must be first", "next_forward", "'last'")),
        ({"activations": {"1": "drop"}}, ("plan.activations['1']:", "recompute", "'drop'")),
        ({"placement": {"layers": "streamed"}}, ("plan.placement", "'layers'", "0-27")),
        ({"placement": {"3-1": "streamed"}}, ("plan.placement", "'3-1'")),
        ({"placement": {"-1": "streamed"}}, ("plan.placement", "'-1'")),
        ({"placement": {"2": "streamed"}}, ("plan.placement['2']", "layers 0 to 1")),
        ({"activations": {"0-5": "keep"}}, ("plan.activations['0-5']", "layers 0 to 1")),
        ({"update_order": {"2": "first"}}, ("plan.update_order['2']", "layers 0 to 1")),
        # As a YAML file has it that a user wrote: `1: resident`.
        ({"placement": {7: "resident"}}, ("plan.placement", "7")),
        ({"placement": {"²": "resident"}}, ("plan.placement", "'²'", "no block")),
        ({"placement": {"1-³": "resident"}}, ("plan.placement", "'1-³'", "no block")),
        ({"placement": {"٣": "resident"}}, ("plan.placement", "no block")),
        ({"placement": {"1" * 5000: "resident"}}, ("plan.placement", "no block")),
        ({"placement": "resident"}, ("plan.placement: must be a table", "'resident'")),
        ({"activations": ["keep"]}, ("plan.activations: must be a table", "['keep']")),
        ({"placement": {"0": ["resident"]}}, ("plan.placement['0']", "['resident']")),
    ],
)
def test_choices(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    _refused(*parts, fields=fields)


@pytest.mark.parametrize(
    ("keys", "layer"), [(["0-1", "1-2"], 1), (["3", "3-3"], 3), (["3", "03"], 3), (["0-3", "3-6", "1-1"], 3), (["2-4", "0-2"], 2)]
)
@pytest.mark.parametrize(("name", "values"), [("placement", ("streamed", "resident")), ("activations", ("keep", "recompute"))])
def test_ranges_of_one_length_that_overlap_must_agree(keys: list[str], layer: int, name: str, values: tuple[str, str]) -> None:
    """Else the order of the table would decide, and a reader could not see it."""
    for order in permutations(zip(keys, [*values, values[0]], strict=False)):
        _refused(f"plan.{name}:", *(repr(key) for key in keys[:2]), f"layer {layer},", fields={name: dict(order)})
    Plan(**{name: dict.fromkeys(keys, values[0])})  # type: ignore[arg-type]


def test_ranges_that_only_touch_or_differ_in_length_may_disagree() -> None:
    plan = Plan(placement={"0-1": "resident", "2-3": "streamed", "1-3": "resident", "0-9": "streamed"})
    assert [plan.placement_of("layer", i) for i in range(5)] == ["resident", "resident", "streamed", "streamed", "streamed"]


@pytest.mark.parametrize("steps", [0, -3, 1.0, True, "2"])
@pytest.mark.parametrize("lowering", [lower, lower_evaluation])
def test_steps(lowering: Any, steps: Any) -> None:
    schedule = lowering(tiny_model(), tiny_recipe(), Plan())
    for ask in (schedule.parts, schedule.unroll):
        with pytest.raises(ValueError, match=f"steps: must be an integer >= 1, got {steps!r}"):
            ask(steps)


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


@pytest.mark.parametrize("field", ["micro_batches", "micro_batch_size", "loss_tile", "compute_threads"])
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
        ({"attention": ["sdpa"]}, ("recipe.attention:", "sdpa or eager", "['sdpa']")),
        ({"precision": ["bf16"]}, ("recipe.precision:", "bf16 or fp32", "['bf16']")),
        # The last token of a row has no target: with one token a row, no step could learn.
        ({"seq_len": 1}, ("recipe.seq_len:", ">= 2", "got 1")),
        ({"seq_len": 2.0}, ("recipe.seq_len:", ">= 2", "got 2.0")),
        ({"seq_len": True}, ("recipe.seq_len:", "got True")),
        ({"deterministic": "no"}, ("recipe.deterministic:", "true or false", "'no'")),
        ({"deterministic": 0}, ("recipe.deterministic:", "true or false", "got 0")),
        ({"compiled": "yes"}, ("recipe.compiled:", "true or false", "'yes'")),
        ({"compiled": None}, ("recipe.compiled:", "None")),
        # As a clip factor, clip_norm / norm, it would be 0 in FP32 and silently stop the training.
        ({"clip_norm": 1e-46}, ("recipe.clip_norm:", "1.18e-38", "1e-46")),
        ({"clip_norm": 1e39}, ("recipe.clip_norm:", "finite", "1e+39")),
        ({"clip_norm": "1.0"}, ("recipe.clip_norm:", "'1.0'")),
        ({"clip_norm": True}, ("recipe.clip_norm:", "True")),
        ({"optimizer": None}, ("recipe.optimizer:", "an AdamW", "None")),
        ({"optimizer": {"lr": 1e-4}}, ("recipe.optimizer:", "an AdamW")),
    ],
)
def test_recipe_choices(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    _refused(*parts, fields=fields, make=Recipe)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"lr": -1.0}, ("optimizer.lr:", ">= 0", "-1.0")),
        ({"lr": 1e-50}, ("optimizer.lr:", "0 or at least 1.18e-38", "1e-50")),
        ({"lr": 1e38, "weight_decay": 0.0}, ("optimizer.lr:", "lr / (1 - beta1), 1e+39", "1e+38")),
        ({"beta2": 1 - 1e-9}, ("optimizer.beta2:", "[0, 1)", "0.999999999")),
        ({"eps": 1e-50}, ("optimizer.eps:", "7.9e-31", "1e-50")),
        ({"eps": 1e-31}, ("optimizer.eps:", "7.9e-31", "1e-31")),
        ({"lr": 1.0, "weight_decay": 3.0}, ("optimizer.weight_decay:", "lr x weight_decay, 3 with lr 1.0,", "got 3.0")),
        ({"warmup_steps": 2.5}, ("optimizer.warmup_steps:", "an integer >= 0", "2.5")),
        ({"warmup_steps": True}, ("optimizer.warmup_steps:", "True")),
        ({"total_steps": 1.5}, ("optimizer.total_steps:", "an integer >= 1", "1.5")),
        ({"schedule": "cosine", "total_steps": 1.5}, ("optimizer.total_steps:", "an integer >= 1", "1.5")),
        ({"schedule": "cosine", "total_steps": 5, "min_lr": 1.0}, ("optimizer.min_lr:", "at most lr, 0.0001", "1.0")),
        ({"schedule": ["cosine"]}, ("optimizer.schedule:", "['cosine']")),
        ({"beta2": 1.0}, ("optimizer.beta2:", "[0, 1)", "1.0")),
        ({"eps": 0.0}, ("optimizer.eps:", "7.9e-31")),
        ({"schedule": "cosine"}, ("optimizer.total_steps:", "None")),
        ({"schedule": "cosine", "total_steps": 5, "warmup_steps": 5}, ("optimizer.total_steps:", "5")),
    ],
)
def test_optimizer(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    _refused(*parts, fields=fields, make=AdamW)


@pytest.mark.parametrize("field", ["lr", "beta1", "beta2", "eps", "weight_decay", "min_lr"])
@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), -1.0, 1e39, pytest.param(10**400, id="10**400"), "1", None, True, [0.1]]
)
def test_a_value_that_is_no_finite_fp32_number(field: str, value: Any) -> None:
    for schedule in ({}, {"schedule": "cosine", "total_steps": 9}):
        _refused(f"recipe.optimizer.{field}:", repr(value), fields={field: value, **schedule}, make=AdamW)


@given(
    lr=st.floats(0, 1e3), beta1=st.floats(0, 1), beta2=st.floats(0, 1), eps=st.floats(0, 1e3), weight_decay=st.floats(0, 1e3),
    step=st.sampled_from([1, 2, 1000]),
)  # fmt: skip
def test_what_is_accepted_gives_constants_that_are_usable(step: int, **fields: float) -> None:
    """Each one a finite FP32 number; no decay that turns weights around, no eps that lets 0 / 0 through."""
    try:
        optimizer = AdamW(**fields)  # type: ignore[arg-type]
    except ValueError as error:
        assert str(error).startswith("recipe.optimizer.")
        return
    block = step_constants(optimizer, step)
    assert np.isfinite(block).all() and (block >= 0).all()
    assert block[EPS] >= np.finfo(np.float32).smallest_normal
    assert block[BETA1] < 1 and block[BETA2] < 1
    assert (block[LR] > 0) == (optimizer.lr > 0)


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
