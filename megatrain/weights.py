"""Weights on disk: a Hugging Face directory of safetensors as a mapping from name to tensor, read one tensor at a time.

`open_weights` reads headers only and checks everything they say against the `ModelSpec`: what is missing, misnamed, misshapen,
of a type that is no plain float, cut off or corrupt is said before a byte of data moves. Afterwards each look-up reads one
tensor through a memory map. Only the file read last stays mapped, so what a whole pass holds is one tensor and, as pages the
system can take back, one file. `save_weights` streams the other way: it holds one tensor, whatever the size of a shard.

What a directory may hold is what the `transformers` library writes: `model.safetensors`, or shards that
`model.safetensors.index.json` names; of both, the single file counts, as there. Tables the library once stored beside the
weights (rotary frequencies) are passed over. A tied head's matrix may be there or not; if it is, it is part of the mapping, and
whoever reads it must see that it equals the embedding. Values are not looked at: a NaN is found where the weights are used.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length, that many bytes of JSON, then the data.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatrain.model import ModelSpec, ParamSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
"""The types a weight may have in a file, by their names in the format."""

TIED_HEAD = "lm_head.weight"
_PASSED_OVER = re.compile(r"rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_LARGEST_HEADER = 100_000_000
_TILE = 1 << 20
_PIECE, _READERS = 16 << 20, 4
"""Bytes a reader takes at a time, and readers: one alone does not keep a fast disk busy."""


class _Stamp(NamedTuple):
    """What changes when a file is replaced or written to."""

    inode: int
    nbytes: int
    modified_ns: int


class _Entry(NamedTuple):
    """One tensor as a header has it."""

    dtype: str
    shape: tuple[int, ...]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class ReadAhead:
    """Threads that read pieces (file, first byte) into the system's cache and say nothing: what is wrong with a file is said
    where a weight of it is asked for. A `with` block reads no further at its end."""

    def __init__(self, pieces: Iterable[tuple[Path, int]]) -> None:
        self._pieces, self._lock, self._ended = iter(pieces), threading.Lock(), False
        # Daemons of our own: a pool's workers read all that was handed to them before the interpreter may end.
        self._readers = [threading.Thread(target=self._read, name="megatrain read ahead", daemon=True) for _ in range(_READERS)]
        for reader in self._readers:
            reader.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until all is read, or the time (seconds, for each of the threads) is over."""
        for reader in self._readers:
            reader.join(timeout_s)

    def _read(self) -> None:
        buffer = bytearray(_PIECE)
        while (piece := self._next()) is not None:
            path, start = piece
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                os.preadv(file.fileno(), [buffer], start)

    def _next(self) -> tuple[Path, int] | None:
        with self._lock:
            return None if self._ended else next(self._pieces, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True


class Weights(Mapping[str, Tensor]):
    """Name -> tensor of the file's own type. Every look-up reads the tensor anew; threads may read at once.

    Made by `open_weights`. The files must stay as they are: a look-up in one that was replaced or written to since raises
    ValueError. `dtypes` has each tensor's type without reading it, `files` its file.
    """

    def __init__(self, files: Mapping[str, Path], dtypes: Mapping[str, torch.dtype]) -> None:
        self.dtypes: Mapping[str, torch.dtype] = MappingProxyType(dict(dtypes))
        self.files: Mapping[str, Path] = MappingProxyType(dict(files))
        self._stamps = {path: _stamp(path) for path in set(files.values())}
        self._lock = threading.Lock()
        self._mapped: tuple[Path, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Of the files."""
        return sum(stamp.nbytes for stamp in self._stamps.values() if stamp is not None)

    def read_ahead(self) -> ReadAhead:
        """Have the system cache the files from now on, in order, so that look-ups need not wait for the disk. It takes `nbytes`
        of memory that the system gives away when others ask for it. The reading ends with the files, with the `with` block that
        what is returned may open, or with the process, which does not wait for it."""
        return ReadAhead(
            [(path, start) for path, stamp in self._stamps.items() if stamp for start in range(0, stamp.nbytes, _PIECE)]
        )

    def __getitem__(self, name: str) -> Tensor:
        path = self.files[name]
        with self._lock:
            if self._mapped is None or self._mapped[0] != path:
                self._mapped = None  # unmap the last file before the next one
                if _stamp(path) != self._stamps[path]:
                    raise ValueError(f"{path}: must not change while its weights are in use; it was replaced or written to")
                self._mapped = path, _open(path)
            file = self._mapped[1]
        tensor: Tensor = file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.files  # what Mapping has would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def open_weights(directory: str | Path, model: ModelSpec) -> Weights:
    """The weights in a Hugging Face directory, checked against `model` and not yet read.

    Raises ValueError, one line with file and tensor, if there are none, a file is missing, empty, truncated or corrupt, the
    index does not hold, or a tensor is missing, surplus, misshapen or of a type that is no plain float.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory}: must be a directory with {SINGLE} or {INDEX}; there is none")
    placed = {}
    if os.path.lexists(directory / SINGLE):
        source, headers = directory / SINGLE, {directory / SINGLE: _read_header(directory / SINGLE)}
    elif os.path.lexists(directory / INDEX):
        source = directory / INDEX
        placed = _read_index(source)
        headers = {path: _read_header(path) for path in sorted(set(placed.values()))}
        _check_index(source, placed, headers)
    else:
        raise ValueError(_why_no_weights(directory))
    found = {
        name: (path, entry)
        for path, header in headers.items()
        for name, entry in header.items()
        if not _PASSED_OVER.search(name)
    }
    _check_model(source, model, found)
    own = [p.name for block in model.blocks for p in block.params]
    names = own + [TIED_HEAD] * (TIED_HEAD in found and TIED_HEAD not in own)
    return Weights({name: found[name][0] for name in names}, {name: FLOATS[found[name][1].dtype] for name in names})


class RandomWeights(Mapping[str, Tensor]):
    """Every parameter of `model`, FP32, made when asked for: a function of (seed, name) alone, whatever is asked in what order.

    Matrices are normal with mean 0 and deviation `std`, biases 0, norms 1, the padding token's row 0: what the library's
    initialisation does. Tiles of 2^20 elements have generators of their own, so all cores work on a large matrix and their
    number changes nothing. PyTorch's normal numbers can differ in their last bits from one processor type or release to another.
    """

    def __init__(self, model: ModelSpec, seed: int, std: float = 0.02) -> None:
        if not 0 <= std < float("inf"):
            raise ValueError(f"std: must be a finite number >= 0, got {std!r}")
        self._params = {p.name: p for block in model.blocks for p in block.params}
        self._embedding, self._padding_idx = model.embedding.params[0].name, model.padding_idx
        self._seed, self._std = seed, std

    def __getitem__(self, name: str) -> Tensor:
        param = self._params[name]
        if len(param.shape) == 1:
            return torch.zeros(param.shape) if name.endswith(".bias") else torch.ones(param.shape)
        value = torch.empty(param.shape)
        flat = value.view(-1)

        def fill(start: int) -> None:
            generator = torch.Generator().manual_seed(_hash(self._seed, name, start))
            flat[start : start + _TILE].normal_(0.0, self._std, generator=generator)

        starts = range(0, flat.numel(), _TILE)
        with ThreadPoolExecutor(min(len(starts), len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(fill, starts))
        if name == self._embedding and self._padding_idx is not None:
            value[self._padding_idx] = 0
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._params

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def save_weights(
    directory: str | Path, model: ModelSpec, tensors: Mapping[str, Tensor], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write `tensors`, each in its own float type, as `model.safetensors` or as shards of at most `max_shard_bytes` of data.

    Each tensor is asked for once, in the model's order, and held alone; a larger one than a shard gets a shard of its own. A tied
    head's matrix is left out. Files are written under hidden names (`.partial-*`), brought to the disk and renamed when all are
    complete, the index last: at no moment does the directory hold weights that are not whole, and it is left without new files
    if writing fails (not if the process is killed: hidden files may stay).

    Raises ValueError if the directory holds weights already, or a tensor is missing, surplus, misshapen or no plain float.
    """
    directory = Path(directory)
    _check_saving(directory, model, tensors, max_shard_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    params = [p for block in model.blocks for p in block.params]
    shards: list[_Shard] = []
    try:
        for done, param in enumerate(params):
            tensor = _checked(param, tensors[param.name])
            last = shards[-1] if shards else None
            full = last is not None and last.nbytes + tensor.nbytes > max_shard_bytes
            # A tensor must start at a multiple of its element: some readers refuse another place.
            if last is None or full or last.nbytes % tensor.element_size():
                if last is not None:
                    last.finish()
                last = _Shard.begin(_partial(directory, str(len(shards))), params[done:])
                shards.append(last)
            last.add(param.name, tensor)
            del tensor  # before the next one is made
        shards[-1].finish()
        _publish(directory, shards)
    finally:
        for shard in shards:
            shard.file.close()
        for leftover in directory.glob(_partial(directory, "*").name):
            leftover.unlink()


@dataclass(slots=True, kw_only=True)
class _Shard:
    """A file being written: room for the header first, then tensors one after another."""

    path: Path
    file: BinaryIO
    header_nbytes: int
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    nbytes: int = 0

    @staticmethod
    def begin(path: Path, params: Iterable[ParamSpec]) -> _Shard:
        """Leaves room for a header with all `params`; what is not needed becomes spaces, which the format allows."""
        most = {p.name: {"dtype": "BF16", "shape": p.shape, "data_offsets": [2**63, 2**63]} for p in params}
        nbytes = -(-len(json.dumps(most | {"__metadata__": {"format": "pt"}})) // 8) * 8
        file = path.open("wb")
        file.seek(8 + nbytes)
        return _Shard(path=path, file=file, header_nbytes=nbytes)

    def add(self, name: str, tensor: Tensor) -> None:
        end = self.nbytes + tensor.nbytes
        dtype = next(key for key, value in FLOATS.items() if value == tensor.dtype)
        self.entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [self.nbytes, end]}
        self.file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        self.nbytes = end

    def finish(self) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}} | self.entries).encode()
        self.file.seek(0)
        self.file.write(self.header_nbytes.to_bytes(8, "little") + header.ljust(self.header_nbytes))
        _to_disk(self.file)
        self.file.close()


def _publish(directory: Path, shards: list[_Shard]) -> None:
    """Give finished shards their names. The last rename makes them weights; after the first, only renames are left to fail."""
    renames = [(shards[0].path, SINGLE)]
    if len(shards) > 1:
        renames = [(s.path, f"model-{i:05}-of-{len(shards):05}.safetensors") for i, s in enumerate(shards, 1)]
        weight_map = {key: name for shard, (_, name) in zip(shards, renames, strict=True) for key in shard.entries}
        index = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": weight_map}
        partial = _partial(directory, "index")
        with partial.open("wb") as file:
            file.write(json.dumps(index, indent=2).encode())
            _to_disk(file)
        renames.append((partial, INDEX))
    for path, name in renames:
        path.rename(directory / name)
    entries = os.open(directory, os.O_RDONLY)
    os.fsync(entries)
    os.close(entries)


def _partial(directory: Path, what: str) -> Path:
    return directory / f".partial-{os.getpid()}-{what}"


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check_saving(directory: Path, model: ModelSpec, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: must be an integer >= 1, got {max_shard_bytes!r}")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory}: must be a directory")
    held = [p.name for p in _listed(directory) if p.name in (SINGLE, INDEX) or _SHARD.fullmatch(p.name)]
    if held:
        raise ValueError(f"{directory}: holds weights already ({held[0]}); remove them or choose another directory")
    own = [p.name for block in model.blocks for p in block.params]
    for name in own:
        if name not in tensors:
            raise ValueError(f"weights: {name!r} is missing")
    for name in tensors.keys() - set(own) - ({TIED_HEAD} if model.tied else set()):
        raise ValueError(f"weights: {name!r} is no parameter of {model.name!r}")


def _checked(param: ParamSpec, tensor: Tensor) -> Tensor:
    """The tensor as it is written: contiguous, in host memory."""
    if tuple(tensor.shape) != param.shape:
        raise ValueError(f"weights: {param.name!r} must have shape {list(param.shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in FLOATS.values():
        raise ValueError(f"weights: {param.name!r} must be of type {', '.join(FLOATS)}, got {tensor.dtype}")
    return tensor.detach().cpu().contiguous()


def _read_header(path: Path) -> dict[str, _Entry]:
    """Every tensor a file holds; ValueError for a file that is not what its header says."""
    file = _open(path)  # no mapping: it cannot be iterated
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return {name: _Entry(view.get_dtype(), tuple(view.get_shape())) for name, view in slices.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: {_why_unreadable(path, error)}") from error


def _why_unreadable(path: Path, error: Exception) -> str:
    """What is wrong with a file the library refuses, with the byte counts the library leaves out."""
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            declared = int.from_bytes(start, "little")
            header = file.read(declared) if declared <= min(_LARGEST_HEADER, nbytes) else b""
    except OSError as failure:
        return f"cannot be read: {failure.strerror}"
    if nbytes == 0:
        return "is empty"
    if start == b"version ":
        return "is a Git LFS pointer, not the file itself; fetch it with git lfs pull"
    if len(start) < 8 or (declared <= _LARGEST_HEADER and 8 + declared > nbytes):
        need = "a header length of 8 bytes" if len(start) < 8 else f"a header of {declared} bytes"
        return f"is truncated or no safetensors file: {nbytes} bytes do not hold {need}"
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        whole = 8 + declared + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"has a corrupt header: {_one_line(error)}"
    if nbytes != whole:
        return f"is {'truncated' if nbytes < whole else 'too long'}: has {nbytes} bytes, header and data are {whole}"
    return f"has a corrupt header: {_one_line(error)}"


def _read_index(path: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index has it."""
    try:
        weight_map = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: must hold a weight_map from tensor to file name: {_one_line(error)}") from error
    for name, file in weight_map.items():
        if Path(file).name != file or file == "..":
            raise ValueError(f"{path}: {name!r} must be in a file of the same directory, got {file!r}")
        if not (path.parent / file).exists():
            raise ValueError(f"{path.parent / file}: is missing; {path.name} has {name!r} there")
    return {name: path.parent / file for name, file in weight_map.items()}


def _check_index(source: Path, placed: Mapping[str, Path], headers: Mapping[Path, Mapping[str, _Entry]]) -> None:
    for name, path in placed.items():
        if name not in headers[path]:
            raise ValueError(f"{path}: does not hold {name!r}, which {source.name} has there")
    for path, header in headers.items():
        for name in header:
            if placed.get(name) != path and not _PASSED_OVER.search(name):
                where = f"has in {placed[name].name}" if name in placed else "does not name"
                raise ValueError(f"{path}: holds {name!r}, which {source.name} {where}")


def _check_model(source: Path, model: ModelSpec, found: Mapping[str, tuple[Path, _Entry]]) -> None:
    params = {p.name: p.shape for block in model.blocks for p in block.params}
    known = params | ({TIED_HEAD: model.embedding.params[0].shape} if model.tied else {})
    missing = [name for name in params if name not in found]
    surplus = [name for name in found if name not in known]
    if missing:
        near = difflib.get_close_matches(missing[0], surplus or found, n=1, cutoff=0.5)
        hint = f"; the nearest name there is {near[0]!r}" if near else ""
        raise ValueError(f"{source}: {missing[0]!r} is missing{_and_more(missing)}{hint}")
    if surplus:
        path = found[surplus[0]][0]
        raise ValueError(f"{path}: {surplus[0]!r} is no parameter of {model.name!r}{_and_more(surplus)}")
    for name, shape in known.items():
        if name not in found:
            continue
        path, entry = found[name]
        if entry.dtype not in FLOATS:
            rule = f"must be of type {', '.join(FLOATS)} (quantized weights must be widened first)"
            raise ValueError(f"{path}: {name!r} {rule}, got {entry.dtype}")
        if entry.shape != shape:
            raise ValueError(f"{path}: {name!r} must have shape {list(shape)}, got {list(entry.shape)}")


def _why_no_weights(directory: Path) -> str:
    names = [path.name for path in _listed(directory)]
    shards = [name for name in names if _SHARD.fullmatch(name)]
    pickles = [name for name in names if name.startswith("pytorch_model") or name.endswith((".bin", ".pt", ".pth"))]
    others = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return f"{directory / INDEX}: is missing; {len(shards)} shards ({shards[0]}, ...) need it"
    if others:
        return f"{directory}: must have {SINGLE} or {INDEX}; {others[0]} is neither"
    if pickles:
        return f"{directory}: must have {SINGLE} or {INDEX}, got {pickles[0]}; convert it to safetensors"
    return f"{directory}: must have {SINGLE} or {INDEX}; it has neither"


def _listed(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name[0] != ".") if directory.is_dir() else []


def _stamp(path: Path) -> _Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return _Stamp(stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _hash(seed: int, name: str, start: int) -> int:
    """64 bits of (seed, name, first element): neighbouring seeds and names give generators that have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{start}:{name}".encode()).digest()[:8], "little")
