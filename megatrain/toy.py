"""A small model and some text, both made on the spot: what examples and tests train where there is nothing to download.

`make_toy_model` writes a Hugging Face directory of the Llama family, with untrained weights and a tokenizer that needs no
data; `transformers` loads both. `standard_library_text` gathers the sources of Python's standard library: megabytes of text of
a kind a small model learns quickly, on every machine that runs this. Both are functions of their arguments (and of the
interpreter's library), and both are whole or absent: they are written beside their place and renamed at the end.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from megatrain.data import list_files, read_file
from megatrain.model import ModelSpec
from megatrain.weights import RandomWeights, save_weights

EOS = "<|endoftext|>"
BYTE_VOCAB = 257
"""Tokens of a tokenizer without merges: every byte, and end of sequence."""


def make_toy_model(
    directory: str | Path,
    *,
    layers: int = 12,
    hidden_size: int = 384,
    intermediate_size: int = 1024,
    heads: int = 6,
    kv_heads: int = 2,
    vocab_size: int | None = None,
    max_position_embeddings: int = 4096,
    tied: bool = False,
    text: str | Path | None = None,
    seed: int = 0,
) -> None:
    """Write config.json, model.safetensors (FP32), tokenizer.json and tokenizer_config.json: 19 million parameters by default.

    Matrices are normal with deviation 0.02, norms 1, as the library initialises them. Without `text` a token is a byte and
    `vocab_size` is 320 unless given; with `text` (a file or folder that `open_data` reads) the tokenizer is a byte-level BPE of
    at most `vocab_size` tokens (4,096 unless given) trained on it. Either way any text becomes tokens and back, unchanged.

    Raises ValueError for a directory that is not empty and for sizes that make no model.
    """
    if vocab_size is None:
        vocab_size = 320 if text is None else 4096
    if vocab_size < BYTE_VOCAB:
        raise ValueError(f"vocab_size: must be at least {BYTE_VOCAB} (every byte, and end of sequence), got {vocab_size}")
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": hidden_size,
        "intermediate_size": intermediate_size, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": max_position_embeddings, "tie_word_embeddings": tied,
        "initializer_range": 0.02,
    }  # fmt: skip
    model = ModelSpec.from_config(fields, name=Path(directory).name)  # refuses sizes before anything is written
    with _written_aside(Path(directory)) as aside:
        tokenizer = _byte_level_bpe(vocab_size, text)
        fields |= {"dtype": "float32", "bos_token_id": None, "eos_token_id": tokenizer.token_to_id(EOS), "pad_token_id": None}
        LlamaConfig(**fields).save_pretrained(aside)
        save_weights(aside, model, RandomWeights(model, seed, 0.02))
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)  # type: ignore[no-untyped-call]
        wrapped.save_pretrained(aside)


def standard_library_text(directory: str | Path, max_bytes: int = 32_000_000) -> Path:
    """Copy sources of the standard library of the running Python into `directory`, in its own folders; returns `directory`.

    Files are taken in sorted order, each if all of them together still have at most `max_bytes` bytes (the whole is about 12
    million). Tests, installed packages and the few files that are not UTF-8 or empty are left out.

    Raises ValueError for a directory that is not empty, and if there is no source file of at most `max_bytes`.
    """
    library = Path(sysconfig.get_path("stdlib"))
    with _written_aside(Path(directory)) as aside:
        left = max_bytes
        for source in _library_sources(library):
            content = source.read_bytes()
            if not content or not _is_utf8(content):
                continue
            if len(content) > left:
                continue
            left -= len(content)
            target = aside / source.relative_to(library)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        if left == max_bytes:
            raise ValueError(f"max_bytes: must hold at least one source file of {library}, got {max_bytes}")
    return Path(directory)


def _byte_level_bpe(vocab_size: int, text: str | Path | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_VOCAB if text is None else vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = [] if text is None else list_files(text)[0]
    tokenizer.train_from_iterator((piece.text for file in files for piece in read_file(file)), trainer)
    return tokenizer


def _library_sources(library: Path) -> list[Path]:
    out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    found: list[Path] = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in out and name[0] != "."]
        found += [Path(folder, name) for name in names if name.endswith(".py") and name[0] != "."]
    return sorted(found, key=lambda path: path.relative_to(library).parts)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


@contextmanager
def _written_aside(directory: Path) -> Iterator[Path]:
    """A new folder beside `directory` that becomes `directory` if the block ends well, and is removed if it does not."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory}: must be new or an empty directory")
    directory = directory.absolute()
    aside = directory.parent / f".{directory.name}.{uuid4().hex[:8]}.partial"
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(directory)  # takes the place of an empty directory; fails if one was filled in the meantime
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
