"""The toy model is a Hugging Face directory like any other, made from its seed alone, and trains on text of this machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import megatrain.toy
from megatrain.data import list_files, open_data
from megatrain.engine.engine import Engine
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe
from megatrain.toy import EOS, make_toy_model, standard_library_text
from megatrain.weights import open_weights

SMALL: dict[str, Any] = {"layers": 2, "hidden_size": 32, "intermediate_size": 48, "heads": 4, "kv_heads": 2}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standard_library_text(tmp_path_factory.mktemp("text") / "library", 300_000)


@pytest.mark.parametrize("tied", [False, True])
def test_the_library_loads_it_with_the_logits_of_its_weights(tmp_path: Path, tied: bool) -> None:
    make_toy_model(tmp_path / "m", **SMALL, tied=tied)
    assert sorted(contents(tmp_path / "m")) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert isinstance(loaded, LlamaForCausalLM) and loaded.config.tie_word_embeddings == tied
    assert loaded.dtype == torch.float32
    ours = LlamaForCausalLM(loaded.config)
    missing, surplus = ours.load_state_dict(load_file(tmp_path / "m" / "model.safetensors"), strict=False)
    assert (missing, surplus) == (["lm_head.weight"] if tied else [], [])
    ids = torch.arange(60)[None]
    assert torch.equal(loaded.eval()(ids).logits, ours.eval()(ids).logits)
    model = ModelSpec.from_config(tmp_path / "m")
    assert model.numel == sum(p.numel() for p in loaded.parameters())
    assert len(open_weights(tmp_path / "m", model)) == len(list(loaded.parameters()))


def test_the_default_has_10_to_30_million_parameters(tmp_path: Path) -> None:
    make_toy_model(tmp_path / "m")
    model = ModelSpec.from_config(tmp_path / "m")
    assert 10e6 < model.numel < 30e6 and model.n_layers == 12
    assert (tmp_path / "m" / "model.safetensors").stat().st_size > 4 * model.numel


@pytest.mark.parametrize("trained", [False, True])
def test_the_tokenizer_takes_any_text_and_gives_it_back(tmp_path: Path, library: Path, trained: bool) -> None:
    make_toy_model(tmp_path / "m", **SMALL, text=library if trained else None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m", local_files_only=True)
    vocab_size = json.loads((tmp_path / "m" / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) == (vocab_size if trained else 257) and len(tokenizer) <= vocab_size
    assert tokenizer.eos_token == EOS
    assert tokenizer.eos_token_id == json.loads((tmp_path / "m" / "config.json").read_text())["eos_token_id"]
    text = "  import os\r\n\t\N{GRINNING FACE} \N{GREEK SMALL LETTER ALPHA}\x00  ,x ." + "".join(map(chr, range(1, 700)))
    for part in (text, text.lstrip()):
        ids = tokenizer(part)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == part
        assert tokenizer.eos_token_id not in ids
        assert (len(ids) < len(part.encode())) == trained


def test_everything_is_a_function_of_the_arguments(tmp_path: Path, library: Path) -> None:
    for name, more in {"a": {}, "b": {}, "other seed": {"seed": 1}}.items():
        torch.rand(len(name))  # the global generator has no part in it
        make_toy_model(tmp_path / name, **SMALL, text=library, **more)
    a, b, other = (contents(tmp_path / name) for name in ("a", "b", "other seed"))
    assert a == b
    assert {name for name in a if a[name] != other[name]} == {"model.safetensors"}
    standard_library_text(tmp_path / "again", 300_000)
    assert contents(tmp_path / "again") == contents(library)


def test_the_standard_library_is_bounded_and_readable(tmp_path: Path, library: Path) -> None:
    sizes = {name: len(content) for name, content in contents(library).items()}
    assert 290_000 < sum(sizes.values()) <= 300_000
    everything = contents(standard_library_text(tmp_path / "all"))
    assert sum(map(len, everything.values())) > 5_000_000 and "json/decoder.py" in everything
    assert sizes.items() <= {name: len(content) for name, content in everything.items()}.items()
    assert not {"test", "tests", "idle_test", "site-packages"} & {part for name in everything for part in Path(name).parts}
    assert list_files(tmp_path / "all")[1] == 0  # all of it is read
    for content in everything.values():
        assert content.decode()


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("full", "file"):
        with pytest.raises(ValueError, match=f"{name}: must be new or an empty directory"):
            make_toy_model(tmp_path / name, **SMALL)
        with pytest.raises(ValueError, match=f"{name}: must be new or an empty directory"):
            standard_library_text(tmp_path / name)
    make_toy_model(tmp_path / "empty", **SMALL)
    assert contents(tmp_path / "full") == {"a": b"mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


@pytest.mark.parametrize("part", ["save_weights", "PreTrainedTokenizerFast", "RandomWeights"])
def test_nothing_is_left_if_making_is_interrupted(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **more: Any) -> None:
        assert any(tmp_path.iterdir())  # in the middle of it
        raise KeyboardInterrupt

    monkeypatch.setattr(megatrain.toy, part, interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_toy_model(tmp_path / "m", **SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("wrong", "field"), [
    ({"hidden_size": 33}, "hidden_size"), ({"layers": 0}, "num_hidden_layers"), ({"kv_heads": 3}, "num_attention_heads"),
    ({"vocab_size": 256}, "vocab_size"),
])  # fmt: skip
def test_sizes_that_make_no_model_are_refused(tmp_path: Path, wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make_toy_model(tmp_path / "m", **(SMALL | wrong))
    with pytest.raises(ValueError, match="max_bytes"):
        standard_library_text(tmp_path / "text", 10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tied", [False, True])
def test_from_directory_to_trained_weights(tmp_path: Path, library: Path, tied: bool) -> None:
    make_toy_model(tmp_path / "m", **SMALL, text=library, vocab_size=512, tied=tied)
    model = ModelSpec.from_config(json.loads((tmp_path / "m" / "config.json").read_text()))
    weights = open_weights(tmp_path / "m", model)
    data = open_data(library, tmp_path / "m", seq_len=32, seed=0)
    recipe = Recipe(micro_batches=2, micro_batch_size=2, seq_len=32, precision="fp32", gradient_dtype="fp32",
                    optimizer=AdamW(lr=3e-3))  # fmt: skip
    with Engine(model, recipe, Plan(), weights) as engine:
        started = engine.state_dict()
        losses = [engine.step(data.batch(step, 4)).loss for step in range(3)]
        again = engine.evaluate(data.batch(0, 4))
    assert all(torch.equal(started[name], weights[name]) for name in weights) and started.keys() == weights.keys()
    assert abs(losses[0] - math.log(model.vocab_size)) < 0.2
    assert all(map(math.isfinite, losses)) and again < losses[0] - 0.1
    # The first loss is that of the plain library on the same tokens.
    ids = data.batch(0, 4)["input_ids"]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()(input_ids=ids, labels=ids).loss
    assert losses[0] == pytest.approx(float(plain), rel=1e-5)
