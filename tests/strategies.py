"""Hypothesis strategies for the nouns: tiny models, recipes for them, every plan of a recipe, and small schedules.

Sizes are odd on purpose: no parameter, block, vocabulary or feed-forward size is a multiple of a chunk or a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from megatrain.model import ModelSpec
from megatrain.plan import Activations, Placement, Plan, UpdateOrder, UpdatePolicy
from megatrain.recipe import DTYPE_NBYTES, Precision, Recipe
from megatrain.schedule import Schedule, lower

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
MAX_SEQ_LEN = 32


@st.composite
def models(draw: DrawFn, *, layers: tuple[int, int] = (2, 6), tied: bool | None = None) -> ModelSpec:
    """A tiny model of any architecture. `layers` bounds the decoder layers; `tied` fixes the head."""
    architecture = draw(st.sampled_from(sorted(ARCHITECTURES)))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
    head_dim = draw(st.sampled_from([4, 6]))
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": draw(st.sampled_from([37, 67, 131])),
        "hidden_size": heads * head_dim,
        "intermediate_size": draw(st.sampled_from([19, 29, 43])),
        "num_hidden_layers": draw(st.integers(*layers)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_SEQ_LEN,
        "tie_word_embeddings": draw(st.booleans()) if tied is None else tied,
    }
    return ModelSpec.from_config(config)


@st.composite
def recipes(
    draw: DrawFn, model: ModelSpec, *, precision: Precision | None = None, clipping: bool | None = None
) -> Recipe:
    """A recipe with one to three micro-batches of few tokens. `precision` and `clipping` fix those two."""
    clip = draw(st.booleans()) if clipping is None else clipping
    longest = min(9, model.max_position_embeddings)
    return Recipe(
        micro_batches=draw(st.integers(1, 3)),
        micro_batch_size=draw(st.integers(1, 2)),
        seq_len=draw(st.integers(2, longest)),
        precision=draw(st.sampled_from(["bf16", "fp32"])) if precision is None else precision,
        gradient_dtype=draw(st.sampled_from(["bf16", "fp32"])) if precision is None else precision,
        loss_tile=draw(st.sampled_from([3, 7, 64])),
        clip_norm=draw(st.sampled_from([0.01, 1.0])) if clip else None,
        attention_mask=draw(st.sampled_from(["causal", "segments"])),
    )


@st.composite
def plans(
    draw: DrawFn, model: ModelSpec, recipe: Recipe, *, chunks: tuple[int, int] = (1, 8),
    updates: Sequence[UpdatePolicy] = ("after", "during_backward", "next_forward"),
) -> Plan:  # fmt: skip
    """Any plan that is valid for the recipe. `chunks` bounds how many chunks the largest block is cut into.

    With the sizes of `models`, 3 chunks or more make a chunk smaller than the largest tensor.
    """
    policies = [u for u in updates if u != "during_backward" or recipe.clip_norm is None]
    largest = max(b.span for b in model.blocks) * DTYPE_NBYTES[recipe.precision]
    pieces = draw(st.integers(*chunks))
    update = draw(st.sampled_from(policies))
    early = update == "during_backward"
    return Plan(
        placement=draw(_placements(model.n_layers)),
        activations=draw(_activations(model.n_layers)),
        update=update,
        update_order=draw(_update_orders(model.n_layers)) if early else {"default": "first"},
        weight_slots=draw(st.integers(1, 4)),
        vocab_slots=draw(st.integers(1, 2)),
        gradient_slots=draw(st.integers(1, 3)),
        host_gradient_slots=draw(st.integers(1, 3)),
        state_slots=draw(st.integers(1, 3)),
        input_slots=draw(st.integers(2, 3)),
        # A multiple of the alignment, rounded up, or a byte less than the next one: lowering rounds that down to it.
        chunk_bytes=0 if pieces == 1 else -(-largest // (512 * pieces)) * 512 + draw(st.sampled_from([0, 255])),
        adam_threads=draw(st.integers(1, 2)),
    )


def _placements(n_layers: int) -> SearchStrategy[dict[str, Placement]]:
    value: SearchStrategy[Placement] = st.sampled_from(["streamed", "device_weights", "streamed_adam", "resident"])
    layer = st.integers(0, n_layers - 1)
    key = st.one_of(st.sampled_from(["embedding", "head"]), layer.map(str), st.just(f"0-{n_layers // 2}"))
    return st.one_of(
        st.just({"default": "streamed"}),
        st.builds(lambda d, rest: {"default": d, **rest}, value, st.dictionaries(key, value, max_size=4)),
    )


def _update_orders(n_layers: int) -> SearchStrategy[dict[str, UpdateOrder]]:
    value: SearchStrategy[UpdateOrder] = st.sampled_from(["first", "last"])
    key = st.one_of(st.sampled_from(["embedding", "head"]), st.integers(0, n_layers - 1).map(str))
    return st.builds(lambda d, rest: {"default": d, **rest}, value, st.dictionaries(key, value, max_size=4))


def _activations(n_layers: int) -> SearchStrategy[dict[str, Activations]]:
    value: SearchStrategy[Activations] = st.sampled_from(["recompute", "keep", "offload"])
    key = st.integers(0, n_layers - 1).map(str)
    return st.builds(lambda d, rest: {"default": d, **rest}, value, st.dictionaries(key, value, max_size=3))


@st.composite
def cases(draw: DrawFn, *, layers: tuple[int, int] = (2, 6)) -> tuple[ModelSpec, Recipe, Plan]:
    """A model, a recipe for it and a plan of that recipe."""
    model = draw(models(layers=layers))
    recipe = draw(recipes(model))
    return model, recipe, draw(plans(model, recipe))


@st.composite
def small_schedules(draw: DrawFn, *, ops: tuple[int, int] = (30, 120)) -> Schedule:
    """A training schedule whose body has between `ops[0]` and `ops[1]` ops."""
    model = draw(models(layers=(2, 4)))
    recipe = draw(recipes(model))
    plan = draw(plans(model, recipe, chunks=(1, 5)))
    schedule = lower(model, recipe, plan)
    if len(schedule.body.ops) > ops[1]:
        schedule = lower(model, recipe, draw(plans(model, recipe, chunks=(1, 2))))
    assume(ops[0] <= len(schedule.body.ops) <= ops[1])
    return schedule
