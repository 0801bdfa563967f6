"""Weights on disk: everything wrong with a directory is said when it is opened, nothing is read before it is asked for, and what
is written is whole or absent."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import megatrain.weights as weights_module
from megatrain.model import ModelSpec
from megatrain.weights import FLOATS, INDEX, SINGLE, RandomWeights, Weights, open_weights, save_weights

CONFIG: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 53, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MODEL = ModelSpec.from_config(CONFIG, name="small")
TIED = ModelSpec.from_config(CONFIG | {"tie_word_embeddings": True}, name="tied")
NAMES = [p.name for block in MODEL.blocks for p in block.params]
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return dict(RandomWeights(MODEL, seed=0))


@pytest.fixture
def single(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    save_weights(tmp_path / "single", MODEL, tensors)
    return tmp_path / "single"


@pytest.fixture
def sharded(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    save_weights(tmp_path / "sharded", MODEL, tensors, max_shard_bytes=12_000)
    return tmp_path / "sharded"


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def refusal(directory: Path, model: ModelSpec = MODEL) -> str:
    """What `open_weights` says; one line that names a path of the directory."""
    with pytest.raises(ValueError) as caught:
        open_weights(directory, model)
    message = str(caught.value)
    assert message.startswith(str(directory)) and "\n" not in message
    return message


# ---- writing and reading back ------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(max_shard_bytes=st.integers(1, 80_000), types=st.lists(st.sampled_from(list(FLOATS.values())), min_size=1, max_size=5))
def test_what_is_saved_is_read_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], max_shard_bytes: int, types: list[torch.dtype]
) -> None:
    directory = tmp_path_factory.mktemp("saved")
    typed = {name: value.to(types[i % len(types)]) for i, (name, value) in enumerate(tensors.items())}
    save_weights(directory, MODEL, typed, max_shard_bytes=max_shard_bytes)
    weights = open_weights(directory, MODEL)
    assert same(weights, typed)
    assert weights.dtypes == {name: value.dtype for name, value in typed.items()}
    by_library: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        held = load_file(path)
        nbytes = sum(value.nbytes for value in held.values())
        assert nbytes <= max_shard_bytes or len(held) == 1
        by_library |= held
    assert same(by_library, typed)


def test_the_library_loads_shards_with_the_same_logits(sharded: Path, tensors: dict[str, Tensor]) -> None:
    fields = dict(CONFIG)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.save_pretrained(sharded)
    loaded = AutoModelForCausalLM.from_pretrained(sharded)
    ours = AutoModelForCausalLM.from_config(config)
    ours.load_state_dict(tensors)
    ids = torch.arange(20)[None]
    assert torch.equal(loaded.eval()(ids).logits, ours.eval()(ids).logits)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    fields = dict(CONFIG)
    library = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    library.save_pretrained(tmp_path / "one")
    library.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "many" / INDEX).exists()
    for directory in (tmp_path / "one", tmp_path / "many"):
        assert same(open_weights(directory, MODEL), library.state_dict())


def test_a_tied_head_may_be_there_or_not_and_is_not_written(tmp_path: Path) -> None:
    held = dict(RandomWeights(TIED, seed=0))
    with_head = held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}
    save_weights(tmp_path / "without", TIED, with_head)
    assert same(open_weights(tmp_path / "without", TIED), held)
    (tmp_path / "with").mkdir()
    save_file(with_head, tmp_path / "with" / SINGLE)
    assert same(open_weights(tmp_path / "with", TIED), with_head)
    assert "'lm_head.weight' is missing" in refusal(tmp_path / "without", MODEL)


def test_saving_holds_one_tensor_at_a_time_and_asks_for_each_once(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    asked: list[str] = []
    alive: list[weakref.ref[Any]] = []

    class OnDemand(Mapping[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            assert not any(ref() is not None for ref in alive)
            asked.append(name)
            memory = tensors[name].numpy().copy()
            alive.append(weakref.ref(memory))
            return torch.from_numpy(memory)  # the memory lives as long as any view of it

        def __contains__(self, name: object) -> bool:
            return name in tensors

        def __iter__(self) -> Iterator[str]:
            return iter(tensors)

        def __len__(self) -> int:
            return len(tensors)

    save_weights(tmp_path, MODEL, OnDemand(), max_shard_bytes=12_000)
    assert asked == NAMES


@pytest.mark.parametrize("changed", [
    {Q: None}, {"model.extra": torch.zeros(1)}, {Q: torch.zeros(2, 3)}, {Q: torch.zeros(24, 24, dtype=torch.int32)},
    {Q: torch.zeros(24, 24, dtype=torch.float8_e4m3fn)},
])  # fmt: skip
def test_saving_refuses_what_is_not_the_models_and_leaves_nothing(
    tmp_path: Path, tensors: dict[str, Tensor], changed: dict[str, Tensor | None]
) -> None:
    wrong = {name: value for name, value in (tensors | changed).items() if value is not None}
    with pytest.raises(ValueError, match=next(iter(changed))):
        save_weights(tmp_path, MODEL, wrong, max_shard_bytes=12_000)
    assert list(tmp_path.iterdir()) == []


def test_saving_never_mixes_with_weights_that_are_there(single: Path, sharded: Path, tensors: dict[str, Tensor]) -> None:
    for directory in (single, sharded):
        with pytest.raises(ValueError, match="holds weights already"):
            save_weights(directory, MODEL, RandomWeights(MODEL, seed=1))
        assert same(open_weights(directory, MODEL), tensors)


def test_a_write_that_fails_at_any_rename_leaves_no_weights(
    tmp_path: Path, sharded: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    renames = len(list(sharded.iterdir()))
    plain = Path.rename
    for failing in range(renames):
        left = failing

        def rename(self: Path, target: Path) -> Path:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError("disk gone")
            return plain(self, target)

        directory = tmp_path / str(failing)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            with pytest.raises(OSError, match="disk gone"):
                save_weights(directory, MODEL, tensors, max_shard_bytes=12_000)
        assert not list(directory.glob(".*")) and not (directory / INDEX).exists()
        refusal(directory)


# ---- reading lazily ----------------------------------------------------------------------------------------------------


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sparse_directory(directory: Path, model: ModelSpec) -> int:
    """A file a block with BF16 zeros that take no room on the disk; returns the largest file's bytes."""
    weight_map, largest = {}, 0
    for block in model.blocks:
        header, end = {}, 0
        for p in block.params:
            header[p.name] = {"dtype": "BF16", "shape": p.shape, "data_offsets": [end, end + 2 * p.numel]}
            end += 2 * p.numel
            weight_map[p.name] = f"block-{block.index}.safetensors"
        text = json.dumps(header).encode()
        with (directory / f"block-{block.index}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        largest = max(largest, end)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return largest


def test_a_pass_over_a_large_model_holds_one_file_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG | {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 4096, "num_hidden_layers": 20}
    model = ModelSpec.from_config(config)
    largest = sparse_directory(tmp_path, model)
    total, slack = 2 * model.numel, 24 << 20
    assert total > 5 * (2 * largest + slack)
    before = resident_nbytes()
    with monkeypatch.context() as patch:  # neither opening nor asking what there is reads a tensor
        patch.setattr(Weights, "__getitem__", lambda *_: pytest.fail("read"))
        weights = open_weights(tmp_path, model)
        assert "no.such.tensor" not in weights and all(name in weights for name in weights)
    assert resident_nbytes() - before < slack
    most = 0
    for name in weights:
        assert not weights[name].any()
        most = max(most, resident_nbytes())
    assert most - before < 2 * largest + slack


def test_threads_read_what_one_reads(sharded: Path, tensors: dict[str, Tensor]) -> None:
    weights = open_weights(sharded, MODEL)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(weights.__getitem__, NAMES * 10))
    assert all(torch.equal(value, tensors[name]) for name, value in zip(NAMES * 10, read, strict=True))


def test_a_file_that_changes_afterwards_is_not_read(sharded: Path, tensors: dict[str, Tensor]) -> None:
    weights = open_weights(sharded, MODEL)
    last = sharded / json.loads((sharded / INDEX).read_text())["weight_map"][NAMES[-1]]
    content = last.read_bytes()
    last.unlink()
    last.write_bytes(content[:-1] + b"?")
    assert torch.equal(weights[NAMES[0]], tensors[NAMES[0]])
    with pytest.raises(ValueError, match="must not change"):
        weights[NAMES[-1]]


# ---- refusals ----------------------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused_with_its_name(single: Path) -> None:
    path = single / SINGLE
    content = path.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    for nbytes in sorted({*range(12), *range(12, len(content), 997), data - 1, data, data + 1, len(content) - 1}):
        path.write_bytes(content[:nbytes])
        message = refusal(single)
        assert SINGLE in message and ("is empty" if nbytes == 0 else "truncated") in message
    path.write_bytes(content + b"\0")
    assert "too long" in refusal(single)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_header_with_any_byte_changed_is_refused_or_says_the_same(
    single: Path, tensors: dict[str, Tensor], data: st.DataObject
) -> None:
    path = single / SINGLE
    content = path.read_bytes()
    header = len(content[: 8 + int.from_bytes(content[:8], "little")].rstrip())
    place, value = data.draw(st.integers(0, header - 1)), data.draw(st.integers(0, 255))
    try:
        path.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
        try:
            weights = open_weights(single, MODEL)
        except ValueError as error:
            assert SINGLE in str(error) and "\n" not in str(error)
        else:
            # What is left: changes in the metadata, and another float type or place of the same size.
            assert weights.keys() == tensors.keys() and all(weights[n].shape == tensors[n].shape for n in weights)
    finally:
        path.write_bytes(content)


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    held = load_file(path)
    change(held)
    save_file(held, path)


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.pop(Q), [f"{Q!r} is missing"]),
    (lambda t: t.update({"layers.1.self_attn.q_proj.weight": t.pop(Q)}),
     [f"{Q!r} is missing", "nearest name there is 'layers.1.self_attn.q_proj.weight'"]),
    (lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)],
     ["'model.embed_tokens.weight' is missing (and", "'embed_tokens.weight'"]),
    (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": t[Q].clone()}),
     ["'model.layers.3.mlp.up_proj.weight' is no parameter"]),
    (lambda t: t.update({Q: t[Q][:-1].contiguous()}), [repr(Q), "[24, 24]", "[23, 24]"]),
    (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), [repr(Q), "F8_E4M3"]),
    (lambda t: t.update({Q: t[Q].to(torch.int8)}), [repr(Q), "I8"]),
])  # fmt: skip
def test_tensors_that_are_not_the_models_are_named_with_their_file(
    single: Path, change: Callable[[dict[str, Tensor]], None], said: list[str]
) -> None:
    rewrite(single / SINGLE, change)
    message = refusal(single)
    assert all(part in message for part in [SINGLE, *said])


def test_rotary_tables_beside_the_weights_are_passed_over(single: Path, tensors: dict[str, Tensor]) -> None:
    rewrite(single / SINGLE, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}))
    assert same(open_weights(single, MODEL), tensors)


def test_an_index_must_hold(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    one, other = index["weight_map"][NAMES[0]], index["weight_map"][NAMES[-1]]

    def with_map(**changes: Any) -> str:
        weight_map = {k: v for k, v in (index["weight_map"] | changes).items() if v is not None}
        (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return refusal(sharded)

    assert one in (message := with_map(**{NAMES[-1]: one})) and f"does not hold {NAMES[-1]!r}" in message
    assert index["weight_map"][Q] in (message := with_map(**{Q: None})) and f"holds {Q!r}, which {INDEX} does not" in message
    assert "is missing" in with_map(**{NAMES[-1]: "model-9.safetensors"})
    assert "same directory" in with_map(**{NAMES[-1]: f"../sharded/{other}"})
    for text in ("", "{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}', '{"weight_map": "\xff"}'):
        (sharded / INDEX).write_bytes(text.encode("latin-1"))
        assert INDEX in refusal(sharded)
    (sharded / INDEX).write_text(json.dumps(index))
    rewrite(sharded / files[0], lambda t: t.update({NAMES[-1]: torch.zeros(1)}))
    assert files[0] in (message := refusal(sharded)) and f"has in {other}" in message
    (sharded / files[0]).unlink()
    assert f"{files[0]}: is missing" in refusal(sharded)
    (sharded / INDEX).unlink()
    assert f"{INDEX}: is missing" in refusal(sharded)


def test_a_directory_without_weights_says_what_it_has_instead(tmp_path: Path) -> None:
    assert "there is none" in refusal(tmp_path / "nowhere")
    assert "neither" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert "convert it to safetensors" in refusal(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "adapter_model.safetensors" in refusal(tmp_path)
    (tmp_path / SINGLE).symlink_to(tmp_path / "gone")
    assert "No such file" in refusal(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).mkdir()
    assert "Is a directory" in refusal(tmp_path)


# ---- random weights ----------------------------------------------------------------------------------------------------


def test_random_weights_depend_on_seed_and_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # The embedding is of three tiles, the last one not whole.
    model = ModelSpec.from_config(CONFIG | {"vocab_size": 100_003, "pad_token_id": 7})
    forward, backward = RandomWeights(model, seed=3), RandomWeights(model, seed=3)
    values = {name: forward[name] for name in forward}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert all(torch.equal(backward[name], values[name]) for name in reversed(values))
    other = RandomWeights(model, seed=4)
    matrices = [name for name in values if values[name].ndim == 2]
    assert not any(torch.equal(other[name], values[name]) for name in matrices)
    firsts = [tuple(values[name].flatten()[8 * 24 :][:8].tolist()) for name in matrices]
    assert len(set(firsts)) == len(matrices)
    tiles = values["model.embed_tokens.weight"].flatten().split(1 << 20)
    assert not torch.equal(tiles[0][-9:], tiles[1][-9:]) and not torch.equal(tiles[0][:9], tiles[1][:9])


def test_random_weights_are_what_the_library_would_initialise() -> None:
    fields = dict(CONFIG) | {"pad_token_id": 7, "hidden_size": 96}
    model = ModelSpec.from_config(fields)
    library = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).state_dict()
    weights = RandomWeights(model, seed=0)
    assert weights.keys() == library.keys()
    for name, theirs in library.items():
        ours = weights[name]
        assert ours.dtype == torch.float32 and ours.shape == theirs.shape
        if ours.ndim == 1:
            assert torch.equal(ours, theirs)
        else:
            assert abs(ours.mean()) < 6 * 0.02 / ours.numel() ** 0.5
            assert abs(ours.std() / 0.02 - 1) < 6 / ours.numel() ** 0.5
    assert not weights["model.embed_tokens.weight"][7].any() and not library["model.embed_tokens.weight"][7].any()


def test_reading_ahead_reads_every_byte_once(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, seen = open_weights(sharded, MODEL), []
    monkeypatch.setattr(weights_module, "_PIECE", 1000)
    preadv = os.preadv

    def counted(file: int, buffers: list[bytearray], offset: int) -> int:
        seen.append(preadv(file, buffers, offset))
        return seen[-1]

    monkeypatch.setattr(os, "preadv", counted)
    weights.read_ahead().join(60)
    files = list(sharded.glob("*.safetensors"))
    assert sum(seen) == weights.nbytes == sum(path.stat().st_size for path in files)
    files[0].unlink()
    weights.read_ahead().join(60)  # what is wrong is said where a weight is asked for


def test_reading_ahead_ends_with_its_block(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, seen, go_on = open_weights(sharded, MODEL), [], threading.Event()
    monkeypatch.setattr(weights_module, "_PIECE", 100)

    def slow(file: int, buffers: list[bytearray], offset: int) -> int:
        seen.append(offset)
        go_on.wait(60)
        return 0

    monkeypatch.setattr(os, "preadv", slow)
    with weights.read_ahead() as ahead:
        pass
    go_on.set()
    ahead.join(60)
    assert len(seen) <= weights_module._READERS < weights.nbytes // 100


def test_a_process_that_ends_while_it_reads_ahead_ends_at_once_and_says_nothing(single: Path) -> None:
    code = f"""
import os, threading
from megatrain import weights
from megatrain.model import ModelSpec
weights._PIECE = 1
begun, preadv = threading.Event(), os.preadv
def noted(*arguments):
    begun.set()
    return preadv(*arguments)
os.preadv = noted
weights.open_weights({str(single)!r}, ModelSpec.from_config({CONFIG!r}, name="small")).read_ahead()
assert begun.wait(60)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
