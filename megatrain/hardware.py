"""HardwareProfile: the rates of one machine, measured or published, with their provenance. No schedule, no model code.

What a profile holds follows from what a step waits for: two links that start up slowly and have a top rate; a GPU (or, for the
cpu backend, the host's own cores) that multiplies, streams its memory and launches kernels; a CPU optimizer bound by DRAM; and
a table that says what each of these gets while others run. Turning bytes and FLOPs into time is not done here but in
`sim.cost` and `sim.sharing`.

All rates are integers per second, all times integer nanoseconds, so a simulation is exact and the same everywhere.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from megatrain.model import BlockKind
from megatrain.recipe import Recipe

ComputeKind = Literal["forward", "backward", "recompute_backward", "loss", "loss_forward", "pack"]
"""What a measured duration is of. `backward` starts from kept activations, `recompute_backward` from the block's input; `loss`
is the head's forward and backward of one micro-batch, `loss_forward` what evaluation does of it; `pack` rounds a block's
gradient, whatever the tokens."""

_ADDING: tuple[ComputeKind, ...] = ("backward", "recompute_backward", "loss")
"""The kinds that make gradients."""

_LAYER_FIELDS = ("precision", "attention", "attention_mask", "compiled", "deterministic", "compute_threads")
_LOSS_FIELDS = ("precision", "loss_tile", "deterministic", "compute_threads")
_CONDITIONS: dict[ComputeKind, tuple[str, ...]] = {
    "forward": _LAYER_FIELDS, "backward": _LAYER_FIELDS, "recompute_backward": _LAYER_FIELDS,
    "loss": _LOSS_FIELDS, "loss_forward": _LOSS_FIELDS, "pack": ("gradient_dtype", "compute_threads"),
}  # fmt: skip

MOST: Mapping[str, int] = {
    "bytes_per_s": 10**18, "flops_per_s": 10**21, "ns": 10**15, "bytes": 2**60, "cores": 2**20, "threads": 2**20,
    "numel": 2**60, "tokens": 2**60, "seq_len": 2**60,
}  # fmt: skip
"""The most a number of a profile may be, by the last words of its field's name: far beyond any machine, and refused above,
because a digit too many in a file would otherwise be a prediction that is wrong, or times that no table can hold."""


def conditions(kind: ComputeKind, recipe: Recipe) -> str:
    """The fields of `recipe` that an op of `kind` runs differently for, beside its tokens: `precision=bf16 loss_tile=512 ...`."""
    return " ".join(f"{name}={getattr(recipe, name)}" for name in _CONDITIONS[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of the host-device link.

    `rates` are rows (nbytes, bytes_per_s): what a copy of that size reached alone, start-up included. `latency_ns` is the time
    of a copy of no bytes. The last row is the link's top rate, which larger copies have too.
    """

    latency_ns: int
    rates: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        _check_most("link", [("latency_ns", self.latency_ns)])
        _require("link.latency_ns", self.latency_ns, self.latency_ns >= 0, ">= 0")
        _check_rows("link.rates", self.rates, ("bytes", "bytes_per_s"))
        fastest = max(rate for _, rate in self.rates)
        _require("link.rates", self.rates, fastest == self.peak_bytes_per_s, "fastest in the last row")

    @property
    def peak_bytes_per_s(self) -> int:
        return self.rates[-1][1]


class MeasuredOp(NamedTuple):
    """How long one op took in a running step: a `kind` of op on a block of `numel` parameters, over `tokens` in rows of
    `seq_len` (both 1 for a pack).

    A tied head counts the embedding's matrix, which it multiplies by, among its parameters. `conditions` is what `conditions`
    says of the recipe it was measured under; empty stands for every recipe. `adds`: of a micro-batch after the first, whose
    gradient is added to that of those before; a row that does not add stands for all micro-batches where there is none that does.
    """

    kind: ComputeKind
    block: BlockKind
    numel: int
    tokens: int
    seq_len: int
    duration_ns: int
    conditions: str = ""
    adds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What runs forward and backward.

    `flops_per_s` is the sustained rate of matrix products by precision, `attention_flops_per_s` that of attention (counted as in
    `ModelSpec.attention_flops`), `memory_bytes_per_s` that of streaming the memory weights and activations lie in, `launch_ns`
    the cost of starting one kernel. `measured` durations, where they apply, replace what follows from these.

    `on_host`: there is no device. Its memory is an arena in the host's DRAM, copies are memcpys by one core each, compute runs
    on the recipe's `compute_threads` cores, and `flops_per_s` are those of all `cores` together.
    """

    flops_per_s: Mapping[str, int]
    attention_flops_per_s: int
    memory_bytes_per_s: int
    launch_ns: int
    on_host: bool = False
    measured: tuple[MeasuredOp, ...] = ()

    def __post_init__(self) -> None:
        for precision, rate in self.flops_per_s.items():
            most = MOST["flops_per_s"]
            _require(f"compute.flops_per_s[{precision!r}]", rate, rate <= most, f"at most {most:,}")
        _check_most("compute", _numbers(self))
        for i, row in enumerate(self.measured):
            _check_most(f"compute.measured[{i}]", row._asdict().items())
        for precision in ("bf16", "fp32"):
            rate = self.flops_per_s.get(precision, 0)
            _require(f"compute.flops_per_s[{precision!r}]", rate, rate > 0, "> 0")
        for name in ("attention_flops_per_s", "memory_bytes_per_s"):
            _require(f"compute.{name}", getattr(self, name), getattr(self, name) > 0, "> 0")
        _require("compute.launch_ns", self.launch_ns, self.launch_ns >= 0, ">= 0")
        keys = [row._replace(duration_ns=0) for row in self.measured]
        _require("compute.measured", self.measured, len(set(keys)) == len(keys), "at most one row a combination")
        for row in self.measured:
            ok = row.kind in get_args(ComputeKind) and row.tokens > 0 and row.duration_ns > 0
            _require("compute.measured", row, ok, f"one of {get_args(ComputeKind)} with tokens and a duration > 0")
            _require("compute.measured", row, not row.adds or row.kind in _ADDING, f"one that adds only of {', '.join(_ADDING)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRow:
    """What each of some running traffics reached while all of them ran: 0 for one that did not run.

    `adam_threads` is the thread count of the CPU optimizer, 0 when it did not run. What runs alone has no row: its rate stands
    with the link or the optimizer.
    """

    adam_threads: int = 0
    h2d_bytes_per_s: int = 0
    d2h_bytes_per_s: int = 0
    adam_bytes_per_s: int = 0

    def __post_init__(self) -> None:
        _check_most("sharing", _numbers(self))
        rates = (self.h2d_bytes_per_s, self.d2h_bytes_per_s, self.adam_bytes_per_s)
        _require("sharing", self, min(rates) >= 0 and sum(r > 0 for r in rates) >= 2, "rates >= 0, two or more of them > 0")
        _require("sharing.adam_threads", self, self.adam_threads >= 0, ">= 0")
        _require("sharing.adam_threads", self, (self.adam_threads > 0) == (self.adam_bytes_per_s > 0), "> 0 iff Adam ran")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One machine. `provenance` says where the numbers come from: measured when and how, or which data sheet.

    `adam_rates` are rows (threads, bytes_per_s) of the CPU optimizer alone, counting every byte of DRAM it reads and writes.
    `dram_bytes_per_s` is what all traffic together can reach. `host_op_ns` is what any op of the cpu lane costs beside its
    traffic.
    """

    name: str
    provenance: str
    device_memory_bytes: int
    host_memory_bytes: int
    cores: int
    h2d: Link
    d2h: Link
    compute: Compute
    adam_rates: tuple[tuple[int, int], ...]
    dram_bytes_per_s: int
    host_op_ns: int = 10_000
    sharing: tuple[SharingRow, ...] = field(default=())

    def __post_init__(self) -> None:
        _check_most("", _numbers(self))
        for name in ("name", "provenance"):
            _require(name, getattr(self, name), bool(getattr(self, name).strip()), "a text")
        for name in ("device_memory_bytes", "host_memory_bytes", "cores", "dram_bytes_per_s"):
            _require(name, getattr(self, name), getattr(self, name) > 0, "> 0")
        _require("host_op_ns", self.host_op_ns, self.host_op_ns >= 0, ">= 0")
        _check_rows("adam_rates", self.adam_rates, ("threads", "bytes_per_s"))
        most = self.adam_rates[-1][0]
        _require("adam_rates", self.adam_rates, most <= self.cores, f"of at most {self.cores} threads, one a core")
        keys = [(row.adam_threads, row.h2d_bytes_per_s > 0, row.d2h_bytes_per_s > 0) for row in self.sharing]
        _require("sharing", self.sharing, len(set(keys)) == len(keys), "at most one row a combination")


def _numbers(noun: HardwareProfile | Compute | SharingRow) -> list[tuple[str, object]]:
    return [(f.name, getattr(noun, f.name)) for f in fields(noun)]


def _check_most(where: str, named: Iterable[tuple[str, object]]) -> None:
    """Refuse what is beyond `MOST`; `where` is what the fields are of."""
    for name, value in named:
        for kind, most in MOST.items():
            if isinstance(value, int) and f"_{name}".endswith(f"_{kind}"):
                _require(f"{where}.{name}".lstrip("."), value, value <= most, f"at most {most:,}")


def _check_rows(name: str, rows: tuple[tuple[int, int], ...], columns: tuple[str, str]) -> None:
    _require(name, rows, len(rows) > 0, "at least one row")
    for i, row in enumerate(rows):
        for column, (what, value) in enumerate(zip(columns, row, strict=True)):
            _require(f"{name}[{i}][{column}]", value, value <= MOST[what], f"at most {MOST[what]:,}")
    for size, rate in rows:
        _require(name, (size, rate), size > 0 and rate > 0, "> 0 in both columns")
    for low, high in pairwise(rows):
        _require(name, (low, high), low[0] < high[0], "sorted by the first column, each value once")


_shown = reprlib.Repr()  # no more than a line, however many digits or rows
_shown.maxstring = _shown.maxother = 100


def _require(name: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(f"hardware.{name}: must be {rule}, got {_shown.repr(value)}")


_GB = 10**9

H200 = HardwareProfile(
    name="h200",
    provenance="h200 measured 2026-11-29: one H200 (PCIe Gen5 x16), 16 cores, 128 GiB DRAM; bf16 FLOP/s from 8192^3 products of "
    "random data; attention from deterministic flash, 16 x 1,024 tokens, forward and backward; fp32 FLOP/s, launch_ns and "
    "host_op_ns not measured (data sheet and typical values)",
    device_memory_bytes=139 << 30,
    host_memory_bytes=128 << 30,
    cores=16,
    h2d=Link(
        latency_ns=10_000,
        rates=(
            (4 << 10, 290_000_000), (64 << 10, 5_500_000_000), (256 << 10, 29 * _GB), (1 << 20, 48 * _GB),
            (4 << 20, 53 * _GB), (16 << 20, 55 * _GB), (64 << 20, 55_400_000_000),
        ),
    ),
    d2h=Link(
        latency_ns=10_000,
        rates=(
            (4 << 10, 340_000_000), (64 << 10, 8_300_000_000), (256 << 10, 34 * _GB), (1 << 20, 50 * _GB),
            (4 << 20, 54 * _GB), (16 << 20, 55 * _GB), (64 << 20, 55_200_000_000),
        ),
    ),
    compute=Compute(
        flops_per_s={"bf16": 772 * 10**12, "fp32": 51 * 10**12},
        attention_flops_per_s=165 * 10**12,
        memory_bytes_per_s=4_100 * _GB,
        launch_ns=2_000,
    ),
    adam_rates=((1, 16 * _GB), (4, 57 * _GB), (8, 100 * _GB), (12, 106 * _GB), (16, 118 * _GB)),
    dram_bytes_per_s=180 * _GB,
    sharing=(
        SharingRow(h2d_bytes_per_s=50_800_000_000, d2h_bytes_per_s=50_800_000_000),
        SharingRow(adam_threads=8, h2d_bytes_per_s=53 * _GB, adam_bytes_per_s=96 * _GB),
        SharingRow(adam_threads=16, h2d_bytes_per_s=49 * _GB, adam_bytes_per_s=112 * _GB),
        SharingRow(adam_threads=8, d2h_bytes_per_s=54 * _GB, adam_bytes_per_s=88 * _GB),
        SharingRow(adam_threads=16, d2h_bytes_per_s=51 * _GB, adam_bytes_per_s=109 * _GB),
        SharingRow(
            adam_threads=8, h2d_bytes_per_s=42 * _GB, d2h_bytes_per_s=42 * _GB, adam_bytes_per_s=75 * _GB
        ),
        SharingRow(
            adam_threads=16, h2d_bytes_per_s=40 * _GB, d2h_bytes_per_s=40 * _GB, adam_bytes_per_s=101 * _GB
        ),
    ),
)  # fmt: skip
"""The measured machine; others stand in `megatrain.catalog`."""
