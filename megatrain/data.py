"""Text as training data: documents to tokens to rows, and the row order as a function of (seed, step).

`open_data` reads every document once, tokenizes it, and joins all of them, in sorted order of their files, into one sequence
with the tokenizer's end-of-sequence token between two documents. The sequence is cut into rows of `seq_len` tokens; what is
left at its end is dropped and counted. Rows lie in memory, 4 bytes a token. Nothing is written anywhere.

**Order.** An epoch is one pass over all rows in an order of its own, drawn from (seed, epoch). Epochs follow one another without
a gap, and step s of `rows` rows takes places s x rows to (s + 1) x rows - 1 of that endless sequence. So a batch at an epoch's
end holds its last rows and the first of the next epoch; no row is left out or given twice within an epoch, and a run resumed
at any step gets what it would have got. The order sorts the raw 64-bit output of a counter-based generator (Philox), which
numpy promises to keep from release to release.

**What tokens are.** Documents are tokenized without special tokens of the tokenizer's own (no BOS). Text that spells a special
token becomes that token, as everywhere in `transformers`. Documents beyond 256 Ki characters are tokenized in pieces, cut
before white space: pre-tokenizers that part words there (byte-level ones do) give the same tokens as for the whole.

Not covered: data beyond memory; rows that keep documents apart (a row may hold several, and tokens see the ones before); chat
templates.
"""

from __future__ import annotations

import io
import os
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from megatrain.model import ModelSpec

TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs",
    ".go", ".java", ".js", ".ts", ".sh",
})  # fmt: skip
"""Files that are one document each, in UTF-8."""

PIECE_CHARS = 1 << 18
"""The most characters tokenized at once."""

_BATCH_CHARS = 1 << 22
_TO_LAST_WORD_END = re.compile(r"(?s:.*)(?:[^\W_](?=\s)|\S(?= ))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a document, not empty; the first of one `starts` it."""

    text: str
    starts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What was read. `rows` x seq_len + `tokens_dropped` = `tokens`, which include the token between documents.

    `skipped_files` of a folder have a suffix that is not read; hidden ones are not counted at all. Empty documents are no
    documents.
    """

    files: int
    skipped_files: int
    documents: int
    tokens: int
    rows: int
    tokens_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """Rows of tokens, int32 [rows, seq_len], and the order they are given in. Made by `open_data`."""

    tokens: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    seed: int
    counts: Counts

    def batch(self, step: int, rows: int) -> dict[str, Tensor]:
        """The batch of one step (from 0): `input_ids` int64 [rows, seq_len]. A function of (seed, step) for the same `rows`."""
        _require("step", step, 0)
        _require("rows", rows, 1)
        n_rows = len(self.tokens)
        places = [divmod(place, n_rows) for place in range(step * rows, (step + 1) * rows)]
        chosen = [epoch_order(n_rows, self.seed, epoch)[place] for epoch, place in places]
        return {"input_ids": torch.from_numpy(self.tokens[chosen].astype(np.int64))}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticData:
    """Independent tokens, uniform over the vocabulary: nothing to learn (the loss stays near ln(vocab_size)), nothing to read."""

    vocab_size: int
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        _require("vocab_size", self.vocab_size, 1)
        _require("seq_len", self.seq_len, 2)
        _require("seed", self.seed, 0)

    def batch(self, step: int, rows: int) -> dict[str, Tensor]:
        """As `Data.batch`; row i of a step is the same whatever `rows`."""
        _require("step", step, 0)
        _require("rows", rows, 1)
        raw = _random_uint64(rows * self.seq_len, self.seed, step) % np.uint64(self.vocab_size)
        return {"input_ids": torch.from_numpy(raw.astype(np.int64)).view(rows, self.seq_len)}


def open_data(
    path: str | Path,
    tokenizer_dir: str | Path,
    *,
    seq_len: int,
    seed: int,
    vocab_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Data:
    """Read and tokenize `path`: a file (text, .jsonl or .parquet with a field "text"), a folder of such files, or a data set that
    `datasets` saved to disk. The tokenizer is that of `tokenizer_dir`, as `transformers` loads it, without network.

    `vocab_size` is the model's; left out, it is that of the `config.json` beside the tokenizer, if there is one. `progress` is
    called now and then with the documents and tokens so far.

    Raises ValueError, one line: no such path, a suffix that is not read, a file that cannot be read or decoded, no text, fewer
    tokens than a row; no tokenizer, one without an end-of-sequence token or with more tokens than the model.
    """
    _require("seq_len", seq_len, 2)
    _require("seed", seed, 0)
    path, tokenizer_dir = Path(path), Path(tokenizer_dir)
    files, skipped = list_files(path)
    encode, eos = _load_tokenizer(tokenizer_dir, vocab_size)
    tokens, documents = array("i"), 0
    for batch in _batches(chain.from_iterable(map(read_file, files))):
        for piece, ids in zip(batch, encode([piece.text for piece in batch]), strict=True):
            if piece.starts and documents:
                tokens.append(eos)
            documents += piece.starts
            tokens.extend(ids)
        if progress is not None:
            progress(documents, len(tokens))
    if not documents:
        raise ValueError(f"{path}: must hold text, got {len(files)} files without any")
    rows, dropped = divmod(len(tokens), seq_len)
    if not rows:
        raise ValueError(f"{path}: must hold at least one row of seq_len {seq_len} tokens, got {len(tokens)} tokens")
    return Data(
        tokens=np.frombuffer(tokens, dtype=np.int32)[: rows * seq_len].reshape(rows, seq_len),
        seed=seed,
        counts=Counts(
            files=len(files), skipped_files=skipped, documents=documents, tokens=len(tokens), rows=rows, tokens_dropped=dropped
        ),
    )


@lru_cache(maxsize=4)
def epoch_order(n_rows: int, seed: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The order of an epoch's rows: a permutation of 0..n_rows-1 (read only), a function of the three numbers."""
    order = np.argsort(_random_uint64(n_rows, seed, epoch), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def _random_uint64(count: int, seed: int, index: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.random.Philox(np.random.SeedSequence([seed, index])).random_raw(count)


# ---- files to documents ------------------------------------------------------------------------------------------------


def list_files(path: str | Path) -> tuple[list[Path], int]:
    """The files that are read, sorted by their path within `path`, and how many others there are. Hidden files and folders and
    links to folders are passed over."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: must be a file or folder of text; there is none")
    if path.is_file() or _is_saved_dataset(path):
        if path.is_file() and path.suffix.lower() not in _READERS:
            raise ValueError(f"{path}: must have a suffix of {' '.join(sorted(_READERS))}, got {path.suffix!r}")
        return [path], 0
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name[0] != "."]
        found += [Path(folder, name) for name in names if name[0] != "."]
    files = sorted((f for f in found if f.suffix.lower() in _READERS), key=lambda f: f.relative_to(path).parts)
    if not files:
        raise ValueError(f"{path}: must hold files of {' '.join(sorted(_READERS))}, got {len(found)} others")
    return files, len(found) - len(files)


def read_file(path: Path) -> Iterator[Piece]:
    """The documents of one of `list_files`, in order, in pieces; each piece is read when asked for."""
    reader = _read_saved_dataset if path.is_dir() else _READERS[path.suffix.lower()]
    try:
        yield from reader(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or _one_line(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8, got the byte 0x{error.object[error.start]:02x} ({error.reason})") from error


def _read_text(path: Path) -> Iterator[Piece]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from _pieces(file)


def _read_jsonl(path: Path) -> Iterator[Piece]:
    decoder = msgspec.json.Decoder(_Record)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    record = decoder.decode(line.removeprefix(b"\xef\xbb\xbf"))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ValueError(f'{path}: line {number} must be an object with "text": {_one_line(error)}') from error
                yield from _pieces(io.StringIO(record.text, newline=""))


class _Record(msgspec.Struct):
    text: str


def _read_parquet(path: Path) -> Iterator[Piece]:
    # The reader `datasets` uses. Through `load_dataset` it would write lock files and take a name with [1] in it for a pattern.
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise ValueError(f'{path}: must have a column "text", got {", ".join(file.schema_arrow.names)}')
            batches = file.iter_batches(batch_size=1024, columns=["text"])
            yield from _column(path, chain.from_iterable(batch.column(0).to_pylist() for batch in batches))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cannot be read as parquet: {_one_line(error)}") from error


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _read_saved_dataset(path: Path) -> Iterator[Piece]:
    import datasets  # type: ignore[import-untyped]

    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the library promises no type
        raise ValueError(f"{path}: cannot be read as a data set: {_one_line(error)}") from error
    if "text" not in dataset.column_names:
        raise ValueError(f'{path}: must have a column "text", got {", ".join(dataset.column_names)}')
    yield from _column(path, (row["text"] for row in dataset.select_columns(["text"])))


def _column(path: Path, values: Iterator[Any]) -> Iterator[Piece]:
    for number, text in enumerate(values, 1):
        if not isinstance(text, str):
            raise ValueError(f"{path}: row {number}: text must be a string, got {type(text).__name__}")
        yield from _pieces(io.StringIO(text, newline=""))


_READERS: dict[str, Callable[[Path], Iterator[Piece]]] = {
    **dict.fromkeys(TEXT_SUFFIXES, _read_text), ".jsonl": _read_jsonl, ".parquet": _read_parquet,
}  # fmt: skip


def _pieces(document: TextIO) -> Iterator[Piece]:
    """One document, cut before white space that follows a letter or digit, or before a space that follows anything else but one:
    byte-level pre-tokenizers always part words there (some join punctuation and the line break after it)."""
    starts, rest = True, ""
    while window := document.read(PIECE_CHARS - len(rest)):
        rest += window
        if len(rest) == PIECE_CHARS:
            words = _TO_LAST_WORD_END.match(rest)
            cut = words.end() if words else PIECE_CHARS
            yield Piece(text=rest[:cut], starts=starts)
            starts, rest = False, rest[cut:]
    if rest:
        yield Piece(text=rest, starts=starts)


# ---- documents to tokens -----------------------------------------------------------------------------------------------


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Lists of pieces to tokenize at once: large enough for all cores, small enough for memory."""
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _load_tokenizer(directory: Path, vocab_size: int | None) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    """Texts -> tokens, and the end-of-sequence token."""
    if not directory.is_dir():
        raise ValueError(f"{directory}: must be a directory with a tokenizer; there is none")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library promises no type
        raise ValueError(f"{directory}: holds no tokenizer that transformers can load: {_one_line(error)}") from error
    eos: int | None = tokenizer.eos_token_id
    if eos is None:
        raise ValueError(f"{directory}: the tokenizer must have an end-of-sequence token (eos_token), got none")
    if vocab_size is None and (directory / "config.json").is_file():
        vocab_size = ModelSpec.from_config(directory).vocab_size
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer must fit the model's vocabulary of {vocab_size}, got tokens up to {largest}"
        )
    if not tokenizer.is_fast:
        return lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"], eos
    # What the call above does too, without the offsets and masks that take most of its time. The file may ask for truncation.
    fast = tokenizer.backend_tokenizer
    fast.no_truncation()
    fast.no_padding()
    return lambda texts: [e.ids for e in fast.encode_batch_fast(texts, add_special_tokens=False)], eos


def _require(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: must be an integer >= {least}, got {value!r}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
