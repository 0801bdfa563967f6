"""The catalog: built-in models are what was published, full configs as Hugging Face ships them are read, every machine can be
simulated, and a wrong name is one line with the nearest right one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatrain.catalog import cap, hardware_names, hardware_profile, model_names, model_source, model_spec
from megatrain.catalog.machines import _link
from megatrain.derive import step_time
from megatrain.files import load_hardware, save_hardware
from megatrain.hardware import H200
from megatrain.model import ModelSpec, check_sequence
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import lower
from sim.simulate import simulate

# Parameters in billions as the model cards print them, all and without embedding and head (None: not printed).
PUBLISHED: dict[str, tuple[str, str | None]] = {
    "llama3-1b": ("1.23", None), "llama3-3b": ("3.21", None), "llama3-8b": ("8.03", None), "llama3-70b": ("70.6", None),
    "qwen2.5-0.5b": ("0.49", "0.36"), "qwen2.5-1.5b": ("1.54", "1.31"), "qwen2.5-3b": ("3.09", "2.77"),
    "qwen2.5-7b": ("7.61", "6.53"), "qwen2.5-14b": ("14.7", "13.1"), "qwen2.5-32b": ("32.5", "31.0"),
    "qwen2.5-72b": ("72.7", "70.0"),
    "qwen3-0.6b": ("0.6", "0.44"), "qwen3-1.7b": ("1.7", "1.4"), "qwen3-4b": ("4.0", "3.6"), "qwen3-8b": ("8.2", "6.95"),
    "qwen3-14b": ("14.8", "13.2"), "qwen3-32b": ("32.8", "31.2"),
    "mistral-7b": ("7.25", None),
}  # fmt: skip
# Elements in the published safetensors files (a tied head that some of them store a second time counted once).
STORED = {
    "llama3-1b": 1_235_814_400, "llama3-3b": 3_212_749_824, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "mistral-7b": 7_248_023_552,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    """Within 1%, or the card's rounding where that is coarser (1.7 is printed for 1.72)."""
    spec = model_spec(name)
    vocabulary = spec.embedding.numel + sum(p.numel for p in spec.head.params if len(p.shape) == 2)
    for printed, numel in zip(PUBLISHED[name], (spec.numel, spec.numel - vocabulary), strict=True):
        if printed is not None:
            rounding = 0.5 * 10.0 ** -len(printed.partition(".")[2])
            assert numel / 1e9 == pytest.approx(float(printed), rel=0.01, abs=rounding)
    assert spec.numel == STORED.get(name, spec.numel)


def test_every_built_in_model_is_covered_and_says_where_it_comes_from() -> None:
    assert set(model_names()) == PUBLISHED.keys() | {"dense-120b"}
    made_up = [name for name in model_names() if "made up" in model_source(name)]
    assert made_up == ["dense-120b"] and model_spec("dense-120b").numel == pytest.approx(120e9, rel=0.01)
    for name in PUBLISHED:
        assert re.fullmatch(r"config\.json of [\w-]+/[\w.-]+, Hugging Face", model_source(name))
        assert model_spec(name).name == name


def test_models_have_the_shapes_of_the_study_they_are_compared_with() -> None:
    """Layers, hidden and feed-forward sizes as printed in arXiv 2604.05091."""
    shapes = {"7b": (28, 3584, 18944), "14b": (48, 5120, 13824), "32b": (64, 5120, 27648), "72b": (80, 8192, 29568)}
    for size, shape in shapes.items():
        spec = model_spec(f"qwen2.5-{size}")
        assert (spec.n_layers, spec.hidden_size, spec.intermediate_size) == shape


# ---- config.json as Hugging Face ships it ----------------------------------------------------------------------------

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "qwen2", "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960, "max_window_layers": 36,
    "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
ROPE: dict[str, Any] = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
SHIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B-Instruct": ("llama3-8b", LLAMA | {
        "eos_token_id": [128001, 128008, 128009], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": 32, "rope_scaling": ROPE | {"factor": 8.0}, "tie_word_embeddings": False,
        "transformers_version": "4.42.3",
    }),
    "Llama-3.1-70B": ("llama3-70b", LLAMA | {
        "eos_token_id": 128001, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_hidden_layers": 80, "rope_scaling": ROPE | {"factor": 8.0}, "tie_word_embeddings": False,
        "transformers_version": "4.43.0.dev0",
    }),
    "Llama-3.2-1B": ("llama3-1b", LLAMA | {
        "eos_token_id": 128001, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_hidden_layers": 16, "rope_scaling": ROPE | {"factor": 32.0}, "tie_word_embeddings": True,
        "transformers_version": "4.45.0.dev0",
    }),
    "Llama-3.2-3B": ("llama3-3b", LLAMA | {
        "eos_token_id": 128001, "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
        "num_hidden_layers": 28, "rope_scaling": ROPE | {"factor": 32.0}, "tie_word_embeddings": True,
        "transformers_version": "4.45.0.dev0",
    }),
    "Qwen2.5-0.5B": ("qwen2.5-0.5b", QWEN2 | {
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "sliding_window": 32768, "tie_word_embeddings": True, "transformers_version": "4.40.1", "use_mrope": False,
        "vocab_size": 151936,
    }),
    "Qwen2.5-7B": ("qwen2.5-7b", QWEN2 | {
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "sliding_window": 131072, "tie_word_embeddings": False, "transformers_version": "4.40.1", "use_mrope": False,
        "vocab_size": 152064,
    }),
    "Qwen2.5-32B": ("qwen2.5-32b", QWEN2 | {
        "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 131072, "max_window_layers": 64,
        "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "sliding_window": 131072, "tie_word_embeddings": False, "transformers_version": "4.43.1", "vocab_size": 152064,
    }),
    "Qwen3-4B": ("qwen3-4b", QWEN3 | {
        "attention_dropout": 0, "hidden_size": 2560, "intermediate_size": 9728, "rms_norm_eps": 0.000001,
        "tie_word_embeddings": True, "transformers_version": "4.51.2", "use_cache": False,
    }),
    "Qwen3-8B": ("qwen3-8b", QWEN3 | {
        "attention_dropout": 0.0, "hidden_size": 4096, "intermediate_size": 12288, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False, "transformers_version": "4.51.0", "use_cache": True,
    }),
    "Mistral-7B-v0.3": ("mistral-7b", {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": True,
        "vocab_size": 32768,
    }),
}  # fmt: skip


def respelt(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as version 5 of the library writes it."""
    fields = {key: value for key, value in config.items() if key not in ("torch_dtype", "rope_theta", "rope_scaling")}
    fields |= {"dtype": "bfloat16", "transformers_version": "5.17.0", "pad_token_id": None, "_name_or_path": "somewhere"}
    fields["rope_parameters"] = (config.get("rope_scaling") or {"rope_type": "default"}) | {"rope_theta": config["rope_theta"]}
    if config["model_type"].startswith("qwen"):
        fields["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return fields


@pytest.mark.parametrize("name", SHIPPED)
def test_configs_as_shipped_are_read_and_are_the_built_in_models(tmp_path: Path, name: str) -> None:
    built_in, config = SHIPPED[name]
    (tmp_path / name).mkdir()
    path = tmp_path / name / "config.json"
    for spelling in (config, respelt(config)):
        path.write_text(json.dumps(spelling, indent=2))
        spec = model_spec(tmp_path / name)
        assert spec.name == name
        assert model_spec(str(path)) == spec
        known = model_spec(built_in)
        assert json.loads(spec.config_json) == json.loads(known.config_json)
        assert replace(spec, name=built_in, config_json="") == replace(known, config_json="")


def test_an_older_mistral_is_limited_by_its_window_and_the_built_in_one_is_not() -> None:
    config = SHIPPED["Mistral-7B-v0.3"][1] | {"sliding_window": 4096, "vocab_size": 32000, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="sliding_window 4096"):
        check_sequence(ModelSpec.from_config(config), 8192)
    check_sequence(model_spec("mistral-7b"), 8192)


# ---- names and paths -------------------------------------------------------------------------------------------------


def test_names_are_read_without_regard_to_case() -> None:
    assert model_spec("Qwen2.5-7B") == model_spec("qwen2.5-7b")
    assert hardware_profile("H200") is H200 and hardware_profile("RTX4090").name == "rtx4090"


def test_a_path_is_taken_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("qwen3-4b", "qwen3-8b"):
        Path(folder).mkdir()
    Path("qwen3-4b/config.json").write_text(json.dumps(SHIPPED["Qwen3-8B"][1]))
    assert model_spec("qwen3-4b").numel == model_spec("qwen3-8b").numel  # the directory; and the name, as its directory is empty
    assert model_spec("qwen3-8b").name == "qwen3-8b"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_spec("~/qwen3-4b") == model_spec("qwen3-4b/config.json")
    save_hardware("h200", cap(H200, gpu_memory=1 << 30))
    assert hardware_profile("h200").device_memory_bytes == 1 << 30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama3-7b", r"model: 'llama3-7b' is neither a path nor a built-in name; did you mean llama3-\S+\? built in are .*"),
        ("Qwen/Qwen2.5-7B", r"model: 'Qwen/Qwen2\.5-7B' is neither .*; did you mean qwen2\.5-7b\? built in are .*"),
        ("zzz", r"model: 'zzz' is neither a path nor a built-in name; built in are .*, dense-120b"),
        ("", "model: '' is neither .*"),
        ("x" * 5000, r"model: 'x+\.\.\.x+' is neither .*"),
        ("no/such\0file", r"model: 'no/such\\x00file' is neither .*"),
        ("empty", r"empty: holds no config\.json"),
        ("list.json", r"list\.json: must hold a JSON object, got list"),
        ("cut.json", r"cut\.json: is not JSON: .*"),
        ("latin.json", r"latin\.json: is not JSON: .*"),
        ("gpt2", r"gpt2/config\.json: config\.model_type: must be one of llama, qwen2, qwen3, mistral, got 'gpt2'"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("gpt2").mkdir()
    Path("gpt2/config.json").write_text('{"model_type": "gpt2"}')
    Path("list.json").write_text("[1]")
    Path("cut.json").write_text('{"model_type": ')
    Path("latin.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ValueError, match=f"^(?:{message})$") as refusal:
        model_spec(name)
    assert len(str(refusal.value).splitlines()) == 1


def test_what_is_no_machine_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^hardware: 'rtx4080' is neither .*; did you mean rtx4090\? built in are h200, .*$"):
        hardware_profile("rtx4080")
    (tmp_path / "hw.json").write_text("{}")
    with pytest.raises(ValueError, match=r"hw\.json: name: is missing$"):
        hardware_profile(tmp_path / "hw.json")


# ---- machines --------------------------------------------------------------------------------------------------------


def test_the_machines_are_those_promised_and_one_is_measured() -> None:
    names = ("h200", "h200-1.5tb", "gh200", "a100-pcie", "a6000", "rtx3090", "rtx4090", "rtx5090")
    assert hardware_names() == names
    assert [n for n in names if "not measured" not in hardware_profile(n).provenance.split(":")[0]] == ["h200"]


@pytest.mark.parametrize("name", ["gh200", "a100-pcie", "a6000", "rtx3090", "rtx4090", "rtx5090"])
def test_an_unmeasured_machine_promises_no_more_than_what_it_says_it_has(name: str) -> None:
    """Dense BF16 peaks, FP32 and memory of the data sheets (TFLOPS, TFLOPS, GB/s), and host DRAM in GB/s."""
    sheets = {
        "gh200": (989, 67, 4000, 512), "a100-pcie": (312, 19.5, 1935, 140.8), "a6000": (154.8, 38.7, 768, 204.8),
        "rtx3090": (76, 35.6, 936, 204.8), "rtx4090": (165.2, 82.6, 1008, 204.8), "rtx5090": (209.5, 104.8, 1792, 332.8),
    }  # fmt: skip
    profile, (bf16, fp32, memory, dram) = hardware_profile(name), sheets[name]
    for rate, peak, unit in (
        (profile.compute.flops_per_s["bf16"], bf16, 1e12), (profile.compute.flops_per_s["fp32"], fp32, 1e12),
        (profile.compute.memory_bytes_per_s, memory, 1e9), (profile.dram_bytes_per_s, dram, 1e9),
    ):  # fmt: skip
        assert 0.7 * peak * unit <= rate < peak * unit
    assert profile.compute.attention_flops_per_s < profile.compute.flops_per_s["bf16"]
    assert profile.adam_rates[-1][1] < profile.dram_bytes_per_s and profile.adam_rates[-1][0] == profile.cores
    assert all(low[1] <= high[1] for low, high in pairwise(profile.adam_rates))
    for link in (profile.h2d, profile.d2h):
        times_ns = [round(nbytes * 1e9 / rate) for nbytes, rate in link.rates]
        assert all(short <= long + 1 for short, long in pairwise([link.latency_ns, *times_ns]))


def test_the_rule_for_links_gives_the_measured_ones() -> None:
    for measured in (H200.h2d, H200.d2h):
        by_rule = _link(measured.peak_bytes_per_s / 1e9)
        for (nbytes, rate), row in zip(measured.rates[1:], by_rule.rates[1:], strict=True):
            assert row[0] == nbytes and row[1] == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize("name", ["h200", "h200-1.5tb", "gh200", "a100-pcie", "a6000", "rtx3090", "rtx4090", "rtx5090"])
def test_a_machine_can_be_written_read_and_simulated(tmp_path: Path, name: str) -> None:
    profile = hardware_profile(name)
    save_hardware(tmp_path / "hw.json", profile)
    assert load_hardware(tmp_path / "hw.json") == profile == hardware_profile(tmp_path / "hw.json")
    schedule = lower(model_spec("qwen2.5-0.5b"), Recipe(micro_batches=2), Plan(chunk_bytes=0, adam_threads=8))
    assert step_time(schedule, simulate(schedule, profile)).mean_ns > 0


def test_faster_machines_predict_faster_steps() -> None:
    """Large batches: ordered by matrix products."""
    schedule = lower(model_spec("qwen2.5-1.5b"), Recipe(micro_batches=4, micro_batch_size=8), Plan(chunk_bytes=0, adam_threads=8))
    times = {
        name: step_time(schedule, simulate(schedule, hardware_profile(name))).mean_ns
        for name in ("gh200", "a100-pcie", "rtx4090", "a6000", "rtx3090")
    }
    assert list(times.values()) == sorted(times.values())


def test_a_capped_machine_has_no_more_memory_and_says_so() -> None:
    capped = cap(H200, gpu_memory="24GiB", host_memory=64 << 30)
    assert (capped.device_memory_bytes, capped.host_memory_bytes) == (24 << 30, 64 << 30)
    assert capped.provenance == f"{H200.provenance}; capped: device memory to 24GiB, host memory to 64GiB"
    assert cap(H200) is H200 and cap(H200, gpu_memory="1TiB") is H200
    assert cap(H200, host_memory="1GB").device_memory_bytes == H200.device_memory_bytes
    for size, message in (("24G", "must be a size in bytes, .*"), (0, "must be > 0 bytes, got 0"), (-1, "must be a size .*")):
        with pytest.raises(ValueError, match=f"^gpu_memory: {message}$"):
            cap(H200, gpu_memory=size)
