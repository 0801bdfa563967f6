"""Model configs: a Hugging Face `config.json`, to a ModelSpec.

Names, shapes and order of the parameters are those of the library's own module; values a config leaves out are those of its
config class. Both spellings are read, the present one (`rope_parameters`, `dtype`) and the older one (`rope_theta`,
`rope_scaling`, `torch_dtype`), and give the same spec. What a template cannot compute exactly is refused here with the field, the
rule and the value. That includes every field this file does not know, unless its value switches it off: models differ from the
four architectures by just such fields (a soft-cap, a multiplier), and leaving one out would train another model without a word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, get_args

from megatrain.model import Architecture, BlockSpec, ModelSpec, ParamSpec, align

# What the library's config classes (transformers 5.17) assume for keys a config leaves out.
_COMMON: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "head_dim": None,
}
_WINDOWED: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_DEFAULTS: dict[Architecture, dict[str, Any]] = {
    "llama": _COMMON
    | {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048}
    | {"attention_bias": False, "mlp_bias": False},
    "qwen2": _COMMON | _WINDOWED,
    "qwen3": _COMMON | _WINDOWED | {"head_dim": 128, "attention_bias": False},
    "mistral": _COMMON
    | {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    | {"sliding_window": 4096, "layer_types": None},
}
_CAUSAL_LM: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
}
# The library's activations that are functions: parameters of their own (prelu, xielu) would need a place in the layout.
ACTIVATIONS = frozenset({
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "swish",
    "tanh",
})  # fmt: skip
# For each type of rotary table: the values it needs and those it may have, all positive numbers but `truncate`.
_ROPE_VALUES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("factor",), ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
}
_ROPE_EVERYWHERE = ("rope_type", "rope_theta", "original_max_position_embeddings")
# Fields beside those of `_DEFAULTS` that are read, or that say nothing about what a training step computes. The last are those
# of generation, of classifiers, of how a checkpoint was stored, and of what a forward returns.
_READ = frozenset({
    "architectures", "model_type", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor",
    "original_max_position_embeddings", "layer_types",
})  # fmt: skip
_SAY_NOTHING = frozenset({
    "dtype", "torch_dtype", "transformers_version", "name_or_path", "auto_map", "tokenizer_class", "language",
    "attn_implementation", "use_cache", "cache_implementation", "return_dict", "output_attentions", "output_hidden_states",
    "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id", "unk_token_id", "cls_token_id", "mask_token_id",
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "max_window_layers",
    "max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "prefix",
    "unsloth_version", "unsloth_fixed",
})  # fmt: skip
# Fields that switch off with 1.
_FACTORS = ("pretraining_tp", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")
_DROPOUTS = ("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop")


MOST_LAYERS = 10_000
"""Far more than any model has; a number beyond is a slip, and a list of that many blocks would take all memory there is."""


def spec_of(raw: Mapping[str, Any], name: str) -> ModelSpec:
    """The spec of a config under a name. ValueError with the field, the rule and the value for what the templates do not compute
    exactly."""
    architecture = _architecture(raw)
    config = {key: raw.get(key, default) for key, default in _DEFAULTS[architecture].items()}

    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        _require_size(key, config[key])
    _require_size("max_position_embeddings", config["max_position_embeddings"])
    if config["num_hidden_layers"] > MOST_LAYERS:
        raise _refuse("num_hidden_layers", f"must be at most {MOST_LAYERS:,}", config["num_hidden_layers"])
    hidden_size, n_heads, vocab_size = config["hidden_size"], config["num_attention_heads"], config["vocab_size"]
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = n_heads
    n_kv_heads = _require_size("num_key_value_heads", config["num_key_value_heads"])
    if n_heads % n_kv_heads:
        raise _refuse("num_attention_heads", f"must be a multiple of num_key_value_heads {n_kv_heads}", n_heads)
    if (config["head_dim"] is None or architecture == "llama") and hidden_size % n_heads:
        raise _refuse("hidden_size", f"must be a multiple of num_attention_heads {n_heads}", hidden_size)
    if config["head_dim"] is None:
        config["head_dim"] = hidden_size // n_heads
    if _require_size("head_dim", config["head_dim"]) % 2:
        raise _refuse("head_dim", "must be even (rotary embedding turns pairs)", config["head_dim"])

    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        if key in config and not isinstance(config[key], bool):
            raise _refuse(key, "must be true or false", config[key])
    for key in _DROPOUTS:
        if raw.get(key):
            raise _refuse(key, "must be 0 (dropout is not a function of step, block and micro-batch yet)", raw[key])
    for key in ("quantization_config", "per_layer_config"):
        if raw.get(key):
            raise _refuse(key, "must be absent (every layer trains plain weights of one structure)", raw[key])
    if not isinstance(config["hidden_act"], str) or config["hidden_act"] not in ACTIVATIONS:
        raise _refuse("hidden_act", f"must be one of {', '.join(sorted(ACTIVATIONS))}", config["hidden_act"])
    for key, most in (("rms_norm_eps", math.inf), ("initializer_range", 1)):
        if not _is_number(config[key]) or not 0 <= config[key] <= most:
            raise _refuse(key, "must be a finite number >= 0" + (" and <= 1" if most == 1 else ""), config[key])
    _refuse_unknown(raw, architecture)

    padding_idx = config["pad_token_id"]
    if padding_idx is not None:
        if not _is_int(padding_idx) or not -vocab_size <= padding_idx < vocab_size:
            raise _refuse("pad_token_id", f"must be a token of the vocabulary of {vocab_size}", padding_idx)
        padding_idx %= vocab_size
    if "layer_types" not in config and any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise _refuse("layer_types", f"must be full_attention, the one type {architecture} has", raw["layer_types"])
    window = _sliding_window(config)
    config.pop("layer_types", None)
    config["sliding_window"] = window
    config["rope_parameters"] = _rope(raw, config["max_position_embeddings"])
    config["model_type"] = architecture
    if architecture in ("qwen2", "qwen3"):
        # All layers are of one kind here, so the switch says it all.
        config |= {"use_sliding_window": window is not None, "max_window_layers": 0 if window else config["num_hidden_layers"]}
    elif architecture == "llama":
        del config["sliding_window"]

    return ModelSpec(
        name=name or architecture,
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=config["head_dim"],
        tied=config["tie_word_embeddings"],
        sliding_window=window,
        max_position_embeddings=config["max_position_embeddings"],
        padding_idx=padding_idx,
        blocks=_blocks(architecture, config),
        config_json=json.dumps(config, sort_keys=True, separators=(",", ":")),
    )


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    classes = raw.get("architectures") or []
    known = [_CAUSAL_LM[c] for c in classes if c in _CAUSAL_LM]
    if classes and not known:
        raise _refuse("architectures", f"must be one of {', '.join(_CAUSAL_LM)}", classes)
    architecture = raw.get("model_type", known[0] if known else None)
    if architecture not in get_args(Architecture):
        raise _refuse("model_type", f"must be one of {', '.join(get_args(Architecture))}", architecture)
    if known and architecture not in known:
        raise _refuse("model_type", f"must agree with architectures {classes}", architecture)
    found: Architecture = architecture
    return found


def _refuse_unknown(raw: Mapping[str, Any], architecture: Architecture) -> None:
    """ValueError for a field that may change what is computed and that nothing here computes."""
    known = _DEFAULTS[architecture].keys() | _READ | _SAY_NOTHING
    for key, value in raw.items():
        off = value is None or value is False or value in ("", [], {}, ()) or (_is_number(value) and value == 0)
        if key in known or str(key).startswith("_") or off or (key in _FACTORS and _is_number(value) and value == 1):
            continue
        rule = "must be 1" if key in _FACTORS else "must be absent or off"
        reason = f"{architecture} here computes nothing by it; take it out if the model does not depend on it either"
        raise _refuse(str(key), f"{rule} ({reason})", value)


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """The window every layer has, None if no layer has one; mixed layers are refused."""
    window = config.get("sliding_window")
    if "use_sliding_window" in config and not config["use_sliding_window"]:
        window = None
    if window is not None:
        _require_size("sliding_window", window)
    n_layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 0)
        sliding = [window is not None and layer >= first for layer in range(n_layers)]
        rule, value = f"max_window_layers must be 0 or >= num_hidden_layers {n_layers}", first
    else:
        if not isinstance(types, (list, tuple)) or len(types) != n_layers:
            raise _refuse("layer_types", f"must name one type for each of the {n_layers} layers", types)
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise _refuse("layer_types", "must be full_attention or sliding_attention", kind)
        sliding = [kind == "sliding_attention" for kind in types]
        rule, value = "all layers must be of one type", types
        if window is None and any(sliding):
            raise _refuse("layer_types", "sliding_attention needs a sliding_window and use_sliding_window", types)
    if any(sliding) and not all(sliding):
        field = "layer_types" if types is not None else "max_window_layers"
        raise _refuse(field, f"{rule} (sliding and full attention are not mixed)", value)
    return window if any(sliding) else None


def _rope(raw: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """The rotary settings in the present spelling, with the values the library would fill in."""
    found = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        raise _refuse("rope_parameters", "must be one flat set of values for all layers", found)
    rope = dict(found)
    rope_type = rope.pop("type", "default")
    rope_type = rope.setdefault("rope_type", rope_type)
    if rope_type in ("dynamic", "longrope", "su"):
        raise _refuse("rope_type", "must not depend on the sequence length", rope_type)
    if not isinstance(rope_type, str) or rope_type not in _ROPE_VALUES:
        raise _refuse("rope_type", f"must be one of {', '.join(_ROPE_VALUES)}", rope_type)
    theta = rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    if not _is_number(theta) or theta <= 0:
        raise _refuse("rope_theta", "must be a number > 0", theta)
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise _refuse("partial_rotary_factor", "must be 1 (whole heads are turned)", partial)
    rope.pop("partial_rotary_factor", None)
    rope["rope_theta"] = float(theta)
    if rope_type in ("llama3", "yarn"):
        if "original_max_position_embeddings" in raw:
            rope["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
        _require_size("original_max_position_embeddings", rope.setdefault(
            "original_max_position_embeddings", max_position_embeddings
        ))  # fmt: skip
    _check_rope_values(rope, rope_type)
    return rope


def _check_rope_values(rope: Mapping[str, Any], rope_type: str) -> None:
    needed, allowed = _ROPE_VALUES[rope_type]
    for key in needed:
        if key not in rope:
            raise _refuse(f"rope_parameters.{key}", f"must be given for {rope_type}", None)
    for key, value in rope.items():
        if key in (*needed, *allowed):
            ok, rule = (isinstance(value, bool), "true or false") if key == "truncate" else (
                (value is None and key in allowed) or (_is_number(value) and value > 0), "a finite number > 0"
            )  # fmt: skip
            if not ok:
                raise _refuse(f"rope_parameters.{key}", f"must be {rule}", value)
        elif key not in _ROPE_EVERYWHERE and value is not None:
            raise _refuse(f"rope_parameters.{key}", f"must be absent ({rope_type} has no such value)", value)


def _blocks(architecture: Architecture, config: Mapping[str, Any]) -> tuple[BlockSpec, ...]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tied, n_layers = config["tie_word_embeddings"], config["num_hidden_layers"]
    within = _layer_params(architecture, config)
    blocks = [BlockSpec(index=0, kind="embedding", params=_lay_out([("model.embed_tokens.weight", (vocab, hidden))]))]
    for layer in range(n_layers):
        named = [(f"model.layers.{layer}.{name}", shape) for name, shape in within]
        blocks.append(BlockSpec(index=layer + 1, kind="layer", params=_lay_out(named)))
    head: list[tuple[str, tuple[int, ...]]] = [("model.norm.weight", (hidden,))]
    if not tied:
        head.append(("lm_head.weight", (vocab, hidden)))
    blocks.append(BlockSpec(index=n_layers + 1, kind="head", params=_lay_out(head), tied=tied))
    return tuple(blocks)


def _layer_params(architecture: Architecture, config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names (within the layer) and shapes of a decoder layer's parameters, in the order of the library's state_dict."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qkv_bias = architecture == "qwen2" or config.get("attention_bias", False)
    output_bias = config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    linears = [
        ("self_attn.q_proj", q, hidden, qkv_bias),
        ("self_attn.k_proj", kv, hidden, qkv_bias),
        ("self_attn.v_proj", kv, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, q, output_bias),
        ("mlp.gate_proj", ffn, hidden, mlp_bias),
        ("mlp.up_proj", ffn, hidden, mlp_bias),
        ("mlp.down_proj", hidden, ffn, mlp_bias),
    ]
    params: list[tuple[str, tuple[int, ...]]] = []
    for name, rows, columns, bias in linears:
        params.append((f"{name}.weight", (rows, columns)))
        if bias:
            params.append((f"{name}.bias", (rows,)))
        if name == "self_attn.o_proj" and architecture == "qwen3":
            params += [("self_attn.q_norm.weight", (head_dim,)), ("self_attn.k_norm.weight", (head_dim,))]
    params += [("input_layernorm.weight", (hidden,)), ("post_attention_layernorm.weight", (hidden,))]
    return params


def _lay_out(named: list[tuple[str, tuple[int, ...]]]) -> tuple[ParamSpec, ...]:
    params: list[ParamSpec] = []
    for name, shape in named:
        params.append(ParamSpec(name=name, shape=shape, offset=align(params[-1].end) if params else 0))
    return tuple(params)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _require_size(field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refuse(field, "must be an integer >= 1", value)
    return value


def _refuse(field: str, rule: str, value: object) -> ValueError:
    return ValueError(f"config.{field}: {rule}, got {value!r}")
