"""ModelSpec: exact names, shapes, order and counts from a config alone; clear refusals; FLOPs and bytes that were measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN

from megatrain.config import ACTIVATIONS
from megatrain.layers.hf import CLASSES, hf_config
from megatrain.layers.inputs import LayerInputs, rotary_tables
from megatrain.model import ALIGN_ELEMENTS, ModelSpec, check_sequence

TINY = {
    "vocab_size": 131,
    "hidden_size": 42,
    "intermediate_size": 75,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def tiny(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": architecture} | TINY | {"head_dim": 14} | changes


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny("llama"),
    "llama tied, biased, explicit head_dim": tiny(
        "llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=10
    ),
    "llama without kv heads": {k: v for k, v in tiny("llama").items() if k not in ("num_key_value_heads", "head_dim")}
    | {"hidden_size": 48},
    "llama 3 rope, old spelling": tiny("llama", rope_theta=5e5, rope_scaling=LLAMA3, torch_dtype="bfloat16"),
    "qwen2": {k: v for k, v in tiny("qwen2", hidden_size=48).items() if k != "head_dim"},
    "qwen2 tied": tiny("qwen2", tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2 all sliding": tiny("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=0),
    "qwen2 window named but unused": tiny("qwen2", use_sliding_window=False, sliding_window=64, max_window_layers=1),
    "qwen3": tiny("qwen3"),
    "qwen3 default head_dim": {k: v for k, v in tiny("qwen3").items() if k != "head_dim"},
    "qwen3 tied, biased": tiny("qwen3", tie_word_embeddings=True, attention_bias=True, num_key_value_heads=6),
    "mistral": tiny("mistral"),
    "mistral no window, null head_dim": tiny(
        "mistral", sliding_window=None, head_dim=None, hidden_size=48, hidden_act="gelu"
    ),
    "mistral tied, new spelling": tiny(
        "mistral",
        tie_word_embeddings=True,
        dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}
REAL: dict[str, tuple[dict[str, Any], int]] = {
    # Published configs, reduced to what is not a default, and the parameter counts their model cards round.
    "Llama-3.1-8B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
            "max_position_embeddings": 131072,
        },
        8_030_261_248,
    ),
    "Qwen2.5-7B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 131072,
            "max_window_layers": 28,
        },
        7_615_616_512,
    ),
    "Mistral-7B-v0.1": ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, 7_241_732_096),
}


def on_meta(config: dict[str, Any]) -> PreTrainedModel:
    fields = dict(config)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(fields.pop("model_type"), **fields)
        )
    return model


def by_block(model: PreTrainedModel) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The library's parameters (a tied one once), in state_dict order, cut into blocks."""
    own = {name for name, _ in model.named_parameters()}
    found = [(n, tuple(t.shape)) for n, t in model.state_dict().items() if n in own]
    layers = [
        [p for p in found if p[0].startswith(f"model.layers.{i}.")] for i in range(model.config.num_hidden_layers)
    ]
    inside = {p[0] for layer in layers for p in layer}
    embedding = [p for p in found if p[0] == "model.embed_tokens.weight"]
    return [embedding, *layers, [p for p in found if p not in embedding and p[0] not in inside]]


@pytest.mark.parametrize("case", CONFIGS)
def test_names_shapes_order_and_counts_are_the_librarys(case: str) -> None:
    spec, library = ModelSpec.from_config(CONFIGS[case]), on_meta(CONFIGS[case])
    assert [[(p.name, p.shape) for p in block.params] for block in spec.blocks] == by_block(library)
    assert spec.numel == sum(p.numel() for p in library.parameters())
    assert spec.tied == spec.head.tied == library.config.tie_word_embeddings
    assert [b.kind for b in spec.blocks] == ["embedding", *["layer"] * spec.n_layers, "head"]
    assert [b.index for b in spec.blocks] == list(range(spec.n_layers + 2))


@pytest.mark.parametrize("case", CONFIGS)
def test_the_recorded_config_rebuilds_the_librarys_config(case: str) -> None:
    spec, library = ModelSpec.from_config(CONFIGS[case]), on_meta(CONFIGS[case])
    rebuilt = hf_config(json.loads(spec.config_json))
    for key in json.loads(spec.config_json):
        if key not in ("model_type", "max_window_layers", "use_sliding_window", "head_dim"):
            assert getattr(rebuilt, key) == getattr(library.config, key), key
    assert getattr(rebuilt, "layer_types", None) == getattr(library.config, "layer_types", None)
    assert spec.head_dim == library.model.layers[0].self_attn.head_dim
    positions = torch.arange(5)[None]
    expected = CLASSES[spec.architecture].rotary(library.config)(torch.empty(0), positions)
    assert all(torch.equal(a, b) for a, b in zip(rotary_tables(spec, positions, torch.float32), expected, strict=True))
    assert ModelSpec.from_config(json.loads(spec.config_json), name=spec.name) == spec


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_config_that_says_nothing_is_the_config_class_default(architecture: str) -> None:
    spec, default = ModelSpec.from_config({"model_type": architecture}), AutoConfig.for_model(architecture)
    for key, value in json.loads(spec.config_json).items():
        if key not in ("model_type", "max_window_layers", "head_dim"):
            assert getattr(default, key) == value, key
    assert spec.head_dim == (getattr(default, "head_dim", None) or default.hidden_size // default.num_attention_heads)


@pytest.mark.parametrize("name", REAL)
def test_published_models_have_their_published_counts(name: str, tmp_path: Path) -> None:
    config, numel = REAL[name]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_config(folder)
    assert spec == ModelSpec.from_config(str(folder / "config.json")) == ModelSpec.from_config(config, name=name)
    assert (spec.name, spec.numel) == (name, numel)


def test_both_spellings_are_one_spec() -> None:
    old = tiny("llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}, torch_dtype="bfloat16")
    new = tiny("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500000}, dtype="float32")
    assert ModelSpec.from_config(old) == ModelSpec.from_config(new)


@pytest.mark.parametrize("case", CONFIGS)
def test_every_parameter_starts_aligned_and_none_overlap(case: str) -> None:
    for block in ModelSpec.from_config(CONFIGS[case]).blocks:
        ends = [0, *(p.end for p in block.params)]
        for start, param in zip(ends, block.params, strict=False):
            assert param.offset % ALIGN_ELEMENTS == 0 and start <= param.offset < start + ALIGN_ELEMENTS
        assert block.span % ALIGN_ELEMENTS == 0 and block.span >= block.params[-1].end


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, r"model_type: must be one of llama, qwen2, qwen3, mistral, got 'gpt2'"),
    ({}, "model_type"),
    ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ({"model_type": "llama", "architectures": ["MistralForCausalLM"]}, "must agree with architectures"),
    (tiny("llama", attention_dropout=0.1), r"attention_dropout: must be 0 .* got 0.1"),
    (tiny("mistral", hidden_dropout=0.2), "hidden_dropout"),
    (
        tiny("llama", rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rope_type: must not depend on the sequence length, got 'dynamic'",
    ),
    (tiny("llama", rope_parameters={"rope_type": "longrope"}), "longrope"),
    (tiny("llama", rope_parameters={"rope_type": "spiral"}), "rope_type: must be one of default, linear"),
    (tiny("qwen3", rope_parameters={"full_attention": {"rope_type": "default"}}), "one flat set of values"),
    (tiny("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
    (tiny("llama", rope_theta=-1), "rope_theta"),
    (tiny("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1), "max_window_layers: .* not mixed"),
    (
        tiny("qwen3", use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]),
        "layer_types: .* not mixed",
    ),
    (tiny("qwen2", layer_types=["sliding_attention"] * 2), "needs a sliding_window"),
    (tiny("qwen2", layer_types=["full_attention"]), "each of the 2 layers"),
    (tiny("qwen2", layer_types=["full_attention", "linear_attention"]), "linear_attention"),
    (tiny("mistral", sliding_window=0), "sliding_window: must be an integer >= 1, got 0"),
    (tiny("llama", num_attention_heads=7, num_key_value_heads=2), "multiple of num_key_value_heads 2, got 7"),
    (
        tiny("llama", num_attention_heads=8, num_key_value_heads=2),
        "hidden_size: must be a multiple of num_attention_heads 8, got 42",
    ),
    (tiny("qwen2", head_dim=9), "head_dim: must be even"),
    (tiny("qwen2", head_dim=None, num_attention_heads=4, num_key_value_heads=2), "hidden_size: must be a multiple"),
    (tiny("llama", vocab_size=0), "vocab_size: must be an integer >= 1, got 0"),
    (tiny("llama", hidden_size=-4), "hidden_size"),
    (tiny("llama", num_hidden_layers=2.0), r"num_hidden_layers: must be an integer >= 1, got 2.0"),
    (tiny("llama", intermediate_size=None), "intermediate_size"),
    (tiny("llama", num_attention_heads=True), "num_attention_heads"),
    (tiny("llama", pad_token_id=131), "pad_token_id: must be a token of the vocabulary of 131, got 131"),
    (tiny("llama", tie_word_embeddings="no"), "tie_word_embeddings"),
    (tiny("llama", rms_norm_eps="tiny"), "rms_norm_eps"),
    (tiny("llama", rms_norm_eps=float("nan")), "rms_norm_eps: must be a finite number >= 0, got nan"),
    (tiny("llama", rms_norm_eps=float("inf")), "rms_norm_eps: must be a finite number >= 0, got inf"),
    (tiny("llama", initializer_range=float("nan")), "initializer_range: must be a finite number >= 0 and <= 1, got nan"),
    (tiny("llama", rope_theta=float("nan")), "rope_theta: must be a number > 0, got nan"),
    (tiny("llama", rope_scaling={"type": "linear"}), "rope_parameters.factor: must be given for linear, got None"),
    (tiny("llama", rope_scaling={"type": "linear", "factor": float("nan")}), "rope_parameters.factor: .*, got nan"),
    (tiny("llama", rope_scaling={"type": "linear", "factor": "2"}), "rope_parameters.factor: .*, got '2'"),
    (tiny("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor: must be given for llama3"),
    (tiny("llama", rope_scaling=LLAMA3 | {"beta_fast": 32}), "beta_fast: must be absent .llama3 has no such value., got 32"),
    (tiny("qwen2", rope_scaling={"type": "default", "mrope_section": [16, 24, 24]}), "mrope_section: must be absent"),
    (tiny("llama", rope_scaling={"type": "yarn", "factor": 2.0, "truncate": "no"}), "truncate: must be true or false"),
    (tiny("llama", hidden_act=None), "hidden_act"),
    (tiny("llama", hidden_act="swish9"), "hidden_act: must be one of gelu, .*, got 'swish9'"),
    (tiny("llama", hidden_act="prelu"), "hidden_act: must be one of gelu, .*, got 'prelu'"),
    # What other models compute and none of the four does.
    (tiny("llama", final_logit_softcapping=30.0), r"final_logit_softcapping: must be absent or off \(llama .*, got 30.0"),
    (tiny("mistral", attn_logit_softcapping=50.0), "attn_logit_softcapping: must be absent or off"),
    (tiny("llama", embedding_multiplier=12.0), "embedding_multiplier: must be 1 .*, got 12.0"),
    (tiny("llama", logits_scaling=8), "logits_scaling: must be 1"),
    (tiny("llama", residual_multiplier=0.22), "residual_multiplier: must be 1"),
    (tiny("llama", pretraining_tp=2), "pretraining_tp: must be 1 .*, got 2"),
    (tiny("llama", sliding_window=32), "sliding_window: must be absent or off"),
    (tiny("llama", use_sliding_window=True), "use_sliding_window"),
    (tiny("llama", layer_types=["full_attention", "sliding_attention"]), "layer_types: must be full_attention"),
    (tiny("mistral", attention_bias=True), "attention_bias: must be absent or off"),
    (tiny("qwen2", num_experts=8), "num_experts"),
    (tiny("qwen3", no_rope_layers=[1, 0]), "no_rope_layers"),
    (tiny("llama", position_embedding_type="alibi"), "position_embedding_type"),
    (tiny("llama", something_new=0.5), "something_new: must be absent or off .*, got 0.5"),
    (tiny("llama", quantization_config={"bits": 4}), "quantization_config"),
]


@pytest.mark.parametrize(("config", "message"), REFUSALS, ids=[m for _, m in REFUSALS])
def test_what_cannot_be_computed_exactly_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        ModelSpec.from_config(config)
    assert str(refusal.value).startswith("config.")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_fields_that_change_nothing_are_accepted(architecture: str) -> None:
    """All that the library's own config class writes, generation's fields of older files, and whatever is switched off."""
    plain = ModelSpec.from_config(tiny(architecture))
    fields = tiny(architecture)
    written = AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
    assert ModelSpec.from_config(written | {"dtype": "bfloat16"}) == plain
    harmless = {
        "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 1, "eos_token_id": [2, 3], "transformers_version": "4.30.0",
        "_name_or_path": "somewhere", "temperature": 0.7, "pretraining_tp": 1, "embedding_multiplier": 1.0, "use_mrope": False,
        "final_logit_softcapping": None, "num_experts": 0, "pruned_heads": {}, "architectures": None,
    }  # fmt: skip
    assert ModelSpec.from_config(tiny(architecture) | harmless) == plain


def test_the_known_activations_are_the_librarys_functions() -> None:
    assert ACT2FN.keys() >= ACTIVATIONS
    for name in ACT2FN:
        made = ACT2FN[name]
        has_parameters = isinstance(made, torch.nn.Module) and any(True for _ in made.parameters())
        assert not (name in ACTIVATIONS and has_parameters), name
        if name in ACTIVATIONS:
            assert made(torch.ones(3)).shape == (3,)
            assert json.loads(ModelSpec.from_config(tiny("llama", hidden_act=name)).config_json)["hidden_act"] == name


def test_files_that_hold_no_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ModelSpec.from_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        ModelSpec.from_config(tmp_path)


def test_a_window_limits_the_sequence_only_where_layers_have_it() -> None:
    mistral = ModelSpec.from_config(tiny("mistral", sliding_window=32))
    check_sequence(mistral, 32)
    with pytest.raises(ValueError, match="seq_len: must be <= sliding_window 32 of 'mistral', got 33"):
        check_sequence(mistral, 33)
    with pytest.raises(ValueError, match="seq_len: must be >= 1"):
        check_sequence(mistral, 0)
    for case in ("llama", "qwen2", "qwen2 window named but unused", "mistral no window, null head_dim"):
        assert ModelSpec.from_config(CONFIGS[case]).sliding_window is None
        check_sequence(ModelSpec.from_config(CONFIGS[case]), 10**6)
    assert ModelSpec.from_config(CONFIGS["qwen2 all sliding"]).sliding_window == 64


@pytest.mark.parametrize("case", CONFIGS)
def test_flops_are_those_a_counter_sees(case: str) -> None:
    """Matrix products of the whole forward, by torch's own counter; eager attention does all pairs."""
    spec = ModelSpec.from_config(CONFIGS[case])
    library = AutoModelForCausalLM.from_config(hf_config(json.loads(spec.config_json), "eager"))
    batch, seq_len = 2, 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        library(input_ids=torch.zeros(batch, seq_len, dtype=torch.int64), use_cache=False)
    tokens = batch * seq_len
    products = tokens * sum(spec.forward_flops_per_token(block) for block in spec.blocks)
    # All pairs are T^2 a row, the visible ones T (T + 1) / 2.
    attention = spec.n_layers * spec.attention_flops(tokens, seq_len) * 2 * seq_len // (seq_len + 1)
    # Older rotary classes make their table by a matrix product too, [head_dim / 2, 1] x [1, T] a row.
    assert counter.get_total_flops() - products - attention in (0, seq_len * spec.head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_saved_bytes_are_within_a_tenth_of_what_autograd_saves(architecture: str, dtype: torch.dtype) -> None:
    config = tiny(
        architecture, hidden_size=128, intermediate_size=344, num_attention_heads=8, num_key_value_heads=2, head_dim=16
    )
    spec = ModelSpec.from_config(config)
    layer = CLASSES[architecture].layer(hf_config(json.loads(spec.config_json)), 0).to(dtype).eval()
    batch, seq_len = 2, 64
    x = torch.randn(batch, seq_len, 128, dtype=dtype, requires_grad=True)
    cos, sin = rotary_tables(spec, torch.arange(seq_len)[None], dtype)
    inputs = LayerInputs(cos=cos, sin=sin, mask=None)
    given = {t.untyped_storage().data_ptr() for t in (x, cos, sin, *layer.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x, attention_mask=inputs.mask, position_embeddings=(inputs.cos, inputs.sin))
    measured = sum(saved.values()) / (batch * seq_len)
    assert spec.saved_bytes_per_token(dtype.itemsize) == pytest.approx(measured, rel=0.1)
    assert spec.hidden_nbytes(batch * seq_len, dtype.itemsize) == y.nbytes


def test_the_nouns_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, megatrain.model, megatrain.recipe, megatrain.plan\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert out.stdout.split() == ["False", "False"]


def test_more_layers_than_any_model_has_are_refused_before_they_are_made() -> None:
    with pytest.raises(ValueError, match=r"num_hidden_layers.*at most 10,000.*1000000000"):
        ModelSpec.from_config(tiny("llama", num_hidden_layers=10**9), name="slip")
