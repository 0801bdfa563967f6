"""Text as training data: the tokens are the tokenizer's, the order is a function of (seed, step), and what is wrong is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import megatrain.data
from megatrain.data import Counts, Data, SyntheticData, epoch_order, open_data
from megatrain.toy import EOS, make_toy_model

WORDS = [
    "def f(x):\n    return x_  + 1;\n\n\n\tdone  \n" * 5, "", "plain words " * 40, "'', ;: " * 30, "one",
    "\u03b1\u00e9 12\r\n" * 30,
]  # fmt: skip
TEXTS = [*WORDS, "\N{GRINNING FACE}" * 9, "x" * 300, " \n \n" * 50]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model whose tokenizer has merges."""
    root = tmp_path_factory.mktemp("toy")
    (root / "text.txt").write_text(" ".join(TEXTS) * 4, encoding="utf-8")
    make_toy_model(
        root / "model", layers=1, hidden_size=8, intermediate_size=8, heads=2, kv_heads=1, vocab_size=300, text=root / "text.txt"
    )
    return root / "model"


def stream(data: Data) -> list[int]:
    return data.tokens.flatten().tolist()


def joined(model_dir: Path, texts: list[str]) -> list[int]:
    """Documents with the end-of-sequence token between them, from the library's plain call."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts if text]
    return list(chain.from_iterable([*d, tokenizer.eos_token_id] for d in documents))[:-1]


def write(path: Path, texts: list[str]) -> Path:
    """The texts as a file, or folder of text files, by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        lines = [json.dumps({"text": text, "id": i if i % 2 else {"mixed": i}}) for i, text in enumerate(texts)]
        path.write_text("\n\n".join(lines), encoding="utf-8")
    elif path.suffix == ".parquet":
        pd.DataFrame({"id": range(len(texts)), "text": texts}).to_parquet(path)
    elif path.suffix == ".saved":
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(path))
    else:
        for i, text in enumerate(texts):
            path.mkdir(exist_ok=True)
            (path / f"{i}.txt").write_bytes(text.encode())
    return path


# ---- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["folder", "odd [1]*.jsonl", "odd [1]*.parquet", "data.saved"])
@pytest.mark.parametrize(("texts", "piece_chars"), [(TEXTS, megatrain.data.PIECE_CHARS), (WORDS, 32)])
def test_tokens_are_the_tokenizers_joined_by_the_end_token(
    tmp_path: Path, model_dir: Path, name: str, texts: list[str], piece_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatrain.data, "PIECE_CHARS", piece_chars)
    expected = joined(model_dir, texts)
    data = open_data(write(tmp_path / name, texts), model_dir, seq_len=2, seed=0)
    assert stream(data) == expected[: len(expected) // 2 * 2]
    assert data.counts.documents == sum(text != "" for text in texts)
    assert data.counts.tokens == len(expected)


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(min_size=1), min_size=1), piece_chars=st.integers(1, 20))
def test_no_character_is_lost_wherever_documents_are_cut(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, texts: list[str], piece_chars: int
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatrain.data, "PIECE_CHARS", piece_chars)
        path = write(tmp_path_factory.mktemp("texts") / "data.parquet", [*texts, "."])
        data = open_data(path, model_dir, seq_len=2, seed=0)
    whole = EOS.join([*texts, "."])
    expected = whole[:-1] if data.counts.tokens_dropped else whole  # a point is one token
    assert tokenizer.decode(stream(data), clean_up_tokenization_spaces=False) == expected


def test_a_folder_is_read_in_order_without_what_is_hidden_or_unknown(tmp_path: Path, model_dir: Path) -> None:
    root = tmp_path / ".hidden itself"
    kept = ["a.txt", "a/z.md", "b/b/c.py", "b/c.jsonl", "b.TXT"]
    for name in reversed(kept):
        write(root / "x" / name, [name]) if name.endswith("jsonl") else _text(root / "x" / name, name)
    for name in (".a.txt", ".git/a.txt", "b/.b/a.txt"):
        _text(root / "x" / name, "hidden")
    for name in ("picture.png", "b/module.pyc", "no_suffix"):
        _text(root / "x" / name, "unknown")
    data = open_data(root / "x", model_dir, seq_len=2, seed=0)
    expected = joined(model_dir, sorted(kept, key=lambda name: Path(name).parts))
    assert stream(data) == expected[: len(expected) // 2 * 2]
    assert (data.counts.files, data.counts.skipped_files, data.counts.documents) == (5, 3, 5)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_counts_add_up_and_rows_are_consecutive(tmp_path: Path, model_dir: Path) -> None:
    path = write(tmp_path / "d.parquet", TEXTS)
    seen: list[tuple[int, int]] = []
    data = open_data(path, model_dir, seq_len=31, seed=0, progress=lambda documents, tokens: seen.append((documents, tokens)))
    n = len(joined(model_dir, TEXTS))
    assert n % 31 and data.tokens.shape == (n // 31, 31)
    assert data.counts == Counts(files=1, skipped_files=0, documents=8, tokens=n, rows=n // 31, tokens_dropped=n % 31)
    assert seen[-1] == (8, n)


def test_a_tokenizer_that_truncates_and_pads_does_not(tmp_path: Path, model_dir: Path) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": EOS,
    }  # fmt: skip
    other = tmp_path / "model"
    other.mkdir()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (other / "tokenizer_config.json").write_bytes((model_dir / "tokenizer_config.json").read_bytes())
    path = write(tmp_path / "d.parquet", TEXTS)
    plain = open_data(path, model_dir, seq_len=2, seed=0)
    assert stream(open_data(path, other, seq_len=2, seed=0)) == stream(plain)


def test_a_byte_order_mark_is_no_text(tmp_path: Path, model_dir: Path) -> None:
    for name, content in (("a.txt", b"words"), ("b.jsonl", b'{"text": "words"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        expected = joined(model_dir, ["words"])
        assert stream(open_data(tmp_path / name, model_dir, seq_len=2, seed=0)) == expected[: len(expected) // 2 * 2]


def test_nothing_is_written_anywhere(tmp_path: Path, model_dir: Path) -> None:
    """In a process of its own, whose home, caches and temporary files are in one folder."""
    for name in ("d/a.parquet", "d/b.jsonl", "d/c"):
        write(tmp_path / name, TEXTS)
    write(tmp_path / "e.saved", TEXTS)
    home = tmp_path / "home"
    home.mkdir()

    def state() -> dict[Path, int]:
        paths = [*tmp_path.rglob("*"), *model_dir.rglob("*")]
        return {path: 0 if path == home else path.stat().st_mtime_ns for path in paths}  # something may come and go there

    before = state()
    code = (
        "import sys; from megatrain.data import open_data\n"
        "print(*(open_data(path, sys.argv[1], seq_len=4, seed=0).counts.documents for path in sys.argv[2:]))"
    )
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_", "TRANSFORMERS"))}
    environment = plain | {"HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, str(model_dir), str(tmp_path / "d"), str(tmp_path / "e.saved")]
    root = Path(megatrain.data.__file__).parent.parent
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=root)
    assert ran.stdout.split() == ["24", "8"]
    assert state() == before


# ---- order -------------------------------------------------------------------------------------------------------------


def numbered(n_rows: int, seed: int) -> Data:
    """Rows that say their own number."""
    tokens = np.repeat(np.arange(n_rows, dtype=np.int32)[:, None], 3, axis=1)
    counts = Counts(files=1, skipped_files=0, documents=1, tokens=3 * n_rows, rows=n_rows, tokens_dropped=0)
    return Data(tokens=tokens, seed=seed, counts=counts)


@settings(max_examples=60, deadline=None)
@given(n_rows=st.integers(1, 40), rows=st.integers(1, 100), seed=st.integers(0, 2**70), epochs=st.integers(1, 4))
def test_every_epoch_gives_every_row_once_and_steps_are_consecutive(n_rows: int, rows: int, seed: int, epochs: int) -> None:
    data = numbered(n_rows, seed)
    steps = -(-n_rows * epochs // rows)
    given_rows: list[int] = []
    for step in range(steps):
        batch = data.batch(step, rows)
        assert batch.keys() == {"input_ids"}
        assert batch["input_ids"].dtype == torch.int64 and batch["input_ids"].shape == (rows, 3)
        given_rows += batch["input_ids"][:, 0].tolist()
    for epoch in range(epochs):
        assert sorted(given_rows[epoch * n_rows : (epoch + 1) * n_rows]) == list(range(n_rows))
    # Any step alone, from another object and in any order, is the same.
    for step in reversed(range(steps)):
        epoch_order.cache_clear()
        again = numbered(n_rows, seed).batch(step, rows)["input_ids"][:, 0].tolist()
        assert again == given_rows[step * rows : (step + 1) * rows]


def test_orders_differ_between_epochs_and_seeds_and_stay_as_they_are() -> None:
    orders = [tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    # A checkpoint says only a step: an order that changes with a library would change a resumed run without a word.
    assert epoch_order(8, 1, 2).tolist() == GOLDEN_ORDER


GOLDEN_ORDER = [7, 1, 3, 0, 4, 2, 6, 5]


def test_a_batch_may_be_changed_without_changing_the_data() -> None:
    data = numbered(4, 0)
    first = data.batch(0, 4)["input_ids"].clone()
    data.batch(0, 4)["input_ids"].zero_()
    assert torch.equal(data.batch(0, 4)["input_ids"], first)


def test_synthetic_tokens_are_uniform_and_a_function_of_seed_and_step() -> None:
    data = SyntheticData(vocab_size=11, seq_len=64, seed=3)
    ids = data.batch(5, 40)["input_ids"]
    assert ids.dtype == torch.int64 and ids.shape == (40, 64)
    assert torch.equal(SyntheticData(vocab_size=11, seq_len=64, seed=3).batch(5, 17)["input_ids"], ids[:17])
    assert not torch.equal(data.batch(6, 40)["input_ids"], ids)
    assert not torch.equal(SyntheticData(vocab_size=11, seq_len=64, seed=4).batch(5, 40)["input_ids"], ids)
    counts = torch.bincount(ids.flatten(), minlength=11)
    assert counts.numel() == 11 and bool(((counts - 2560 / 11).abs() < 6 * (2560 / 11) ** 0.5).all())


# ---- refusals ----------------------------------------------------------------------------------------------------------


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.pdf", b"words", ["a.pdf", "'.pdf'", ".jsonl"]),
    ("latin.txt", b"gar\xe7on " * 9, ["latin.txt", "UTF-8", "0xe7"]),
    ("cut.txt", "\N{GRINNING FACE}".encode()[:3], ["cut.txt", "UTF-8"]),
    ("d/latin.py", b"# gar\xe7on", ["latin.py", "UTF-8"]),
    ("bad.jsonl", b'{"text": "a"}\nnot json', ["bad.jsonl", "line 2"]),
    ("bad.jsonl", b'{"text": "a"}\n\n{"texts": "a"}', ["bad.jsonl", "line 3", "text"]),
    ("bad.jsonl", b'{"text": 3}', ["bad.jsonl", "line 1", "str"]),
    ("bad.jsonl", b'{"text": "gar\xe7on"}', ["bad.jsonl", "line 1", "UTF-8"]),
    ("bad.jsonl", b'["text"]', ["bad.jsonl", "line 1"]),
    ("bad.parquet", b"junk", ["bad.parquet", "parquet"]),
    ("bad.parquet", b"", ["bad.parquet", "parquet"]),
    ("empty.txt", b"", ["empty.txt", "must hold text"]),
    ("empty.jsonl", b'{"text": ""}\n', ["empty.jsonl", "must hold text"]),
    ("short.txt", b"ab", ["short.txt", "seq_len 99", "got 2 tokens"]),
    ("d/.hidden.txt", b"words", ["must hold files of"]),
    ("d/a.png", b"words", ["must hold files of", "got 1 others"]),
])  # fmt: skip
def test_data_that_cannot_be_read_is_named(
    tmp_path: Path, model_dir: Path, name: str, content: bytes, said: list[str]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    message = refusal(lambda: open_data(tmp_path / Path(name).parts[0], model_dir, seq_len=99, seed=0))
    assert str(tmp_path) in message and all(part in message for part in said)


def test_tables_without_text_are_named(tmp_path: Path, model_dir: Path) -> None:
    pd.DataFrame({"texts": ["a"]}).to_parquet(tmp_path / "a.parquet")
    pd.DataFrame({"text": ["a", None]}).to_parquet(tmp_path / "b.parquet")
    pd.DataFrame({"text": [b"a"]}).to_parquet(tmp_path / "c.parquet")
    datasets.Dataset.from_dict({"texts": ["a"]}).save_to_disk(str(tmp_path / "d"))
    for name, said in {"a.parquet": "texts", "b.parquet": "row 2", "c.parquet": "bytes", "d": "texts"}.items():
        message = refusal(lambda name=name: open_data(tmp_path / name, model_dir, seq_len=2, seed=0))
        assert str(tmp_path / name) in message and said in message
    assert "there is none" in refusal(lambda: open_data(tmp_path / "nowhere", model_dir, seq_len=2, seed=0))


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, model_dir: Path) -> None:
    data = write(tmp_path / "d.parquet", TEXTS)

    def said(directory: Path, **more: Any) -> str:
        message = refusal(lambda: open_data(data, directory, seq_len=2, seed=0, **more))
        assert str(directory) in message
        return message

    assert "there is none" in said(tmp_path / "nowhere")
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "no tokenizer" in said(bare)
    (bare / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    assert "no tokenizer" in said(bare)
    (bare / "tokenizer.json").write_text("{")
    assert "no tokenizer" in said(bare)
    (bare / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (bare / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert "end-of-sequence" in said(bare)
    largest = max(AutoTokenizer.from_pretrained(model_dir).get_vocab().values())
    assert f"tokens up to {largest}" in said(model_dir, vocab_size=largest)
    assert open_data(data, model_dir, seq_len=2, seed=0, vocab_size=largest + 1).counts.rows
    config = json.loads((model_dir / "config.json").read_text()) | {"vocab_size": 60}
    (bare / "config.json").write_text(json.dumps(config))
    (bare / "tokenizer_config.json").write_bytes((model_dir / "tokenizer_config.json").read_bytes())
    assert "vocabulary of 60" in said(bare)


@pytest.mark.parametrize("wrong", [{"seq_len": 1}, {"seq_len": 2.0}, {"seed": -1}, {"seed": True}])
def test_numbers_are_checked(tmp_path: Path, model_dir: Path, wrong: dict[str, Any]) -> None:
    assert next(iter(wrong)) in refusal(lambda: open_data(tmp_path, model_dir, **({"seq_len": 2, "seed": 0} | wrong)))
    assert next(iter(wrong)) in refusal(lambda: SyntheticData(**({"vocab_size": 5, "seq_len": 2, "seed": 0} | wrong)))
    for source in (numbered(4, 0), SyntheticData(vocab_size=5, seq_len=2, seed=0)):
        assert "step" in refusal(lambda source=source: source.batch(-1, 1))
        assert "rows" in refusal(lambda source=source: source.batch(0, 0))
