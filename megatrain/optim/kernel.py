"""AdamW on the CPU, in place, to the bit: one C++ kernel and one PyTorch fallback that agree with each other.

The formulas, with g = grad * FACTOR and the names of `constants`:

    m' = BETA1 * m + ONE_MINUS_BETA1 * g
    v' = BETA2 * v + ONE_MINUS_BETA2 * g^2
    w' = w * DECAY - STEP_SIZE * m' / (sqrt(v') * INV_SQRT_BC2 + EPS)          (w * 1 for a parameter that does not decay)

All in FP32, one rounding after the other, m' and v' are off by 5 units and w' without limit where m' cancels. All in FP64
they are right, at 2.5 times the time. So the kernels use FP32, carry the errors of the operations that matter along (an FMA
gives that of a product, five additions that of a sum) and put them right at the end. Only operations that IEEE 754 rounds
once are used, so every device can give the same bits. This is the specification; [a b + c] is one FMA, everything else is
an FP32 operation rounded on its own, denormals are kept:

    constants, in FP64, then FP32:  c1 + c1' = ONE_MINUS_BETA1 * FACTOR           e = EPS / INV_SQRT_BC2
      (c' the FP32 rounding of      c2 + c2' = ONE_MINUS_BETA2 * (FACTOR * FACTOR)
       what that of c leaves)       a + a'   = STEP_SIZE / INV_SQRT_BC2           z = 1 / a, or 0 for a below 2^-126
    p = BETA1 * m      p' = [BETA1 m - p]
    q = c1 * grad      q' = [c1 grad - q], then q' = [c1' grad + q']
    s = p + q          t = s - p       s' = ((p - (s - t)) + (q - t)) + (p' + q')            s + s' is m'
    h = grad * grad    v' = [BETA2 v + [c2 h + c2' * h]]
    r = sqrt(v')       r' = [-r r + v'] * H(r)                                            r + r' is sqrt(v')
    y = -a / (r + e)   f = ([y (e + r') + [y r + a]] + a') * z         y * (1 + f) is -(a + a') over r + r' + e
    w' = [w DECAY + [y s + y * [s f + s']]]
    m, v, w = s + s', v', w'

H(r) is 1 / (2 r) to 6%: the number whose bits are 0x7E7311C3 minus those of r, as integers. If c1' and c2' are both 0, as
without clipping, the two operations that add their products are left out. Each element depends on its own inputs only, so
threads, alignment and the cutting of a range into calls cannot matter. The C++ kernel sets its threads to the default
floating-point environment, the fallback relies on PyTorch's default (do not call `torch.set_flush_denormal(True)` with it).
Bits of a NaN are not promised.

Errors, in units of 2^-24 times the larger of the two terms of a sum, against exact arithmetic on the same inputs; a result
has up to twice the larger term and so costs 2 units where the others cost 1. m: 2. v: 2, 1 for c2 h and 1 for h, which is
exact for BF16. w: 2, 1 for the rounding of the update, at most 1.5 for half of the errors of v' (or, where EPS outweighs
the root, up to 2 for e and [y r + a]), and less than 0.1 for the rest. 4.6 to 5.1 would need every rounding at its worst
with one sign, and |w| at |update|; the most seen for w is 3.6, in 10^8 values with EPS = 1e-8 (4.3 with EPS = 0.01).
Not covered: results, or g^2, among FP32's denormals, and m' cancelled to under 2^-20 of its terms.
A gradient whose square overflows makes NaN of v or w; the norm of such a gradient is not finite and the step is skipped.

With a split master and BF16 gradients an update moves 26 bytes a parameter: hi, lo, m, v, g in and hi, lo, m, v out.
One thread of the C++ kernel was measured at 0.50 ns a parameter in the cache (0.52 with clipping) and 0.57 (0.59) in DRAM,
46 GB/s, on an AMD EPYC core with 512-bit vectors; plain FP32 takes 0.40 and 0.54 there, plain FP64 1.05.
The kernel is built by one compiler call when first used and kept under $XDG_CACHE_HOME/megatrain
(default ~/.cache/megatrain), by a name that hashes source, flags, CPU and compiler. Where that fails, the fallback
takes over after one warning. $CXX names another compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatrain.optim.constants import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    FACTOR,
    INV_SQRT_BC2,
    LAYOUT,
    N_CONSTANTS,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    SKIP,
    STEP_SIZE,
)
from megatrain.optim.master import join_bits, split_bits

Implementation = Literal["auto", "native", "torch"]

SOURCE = Path(__file__).with_name("adamw.cpp")
TEAM = SOURCE.with_name("team.h")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"),
    *("-shared", "-fPIC", "-pthread", f"-I{TEAM.parent}"),
    *(f"-D{name}={index}" for name, index in LAYOUT.items()),
)
# Fallback: elements at a time. Its temporaries (2 MiB each) are bounded whatever the tensor, and mostly stay in the
# cache.
CHUNK = 1 << 18
HALF_RECIPROCAL = 0x7E7311C3

_GRADIENT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_LOCK = threading.Lock()


class Run(NamedTuple):
    """Elements [first, end) of the tensors of an update, and whether weight decay applies to them."""

    first: int
    end: int
    decayed: bool


def adamw_update(
    master: tuple[Tensor, ...],
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    constants: Tensor,
    *,
    decayed: bool,
    threads: int,
    implementation: Implementation = "auto",
) -> None:
    """Apply one AdamW step in place to `n` parameters, by the formula in the module's docstring.

    `master` is (hi bfloat16, lo int16), see `master.split`, or (w float32,); `m` and `v` are float32, `grad` is
    bfloat16 or float32; all of shape [n], contiguous, on the CPU, not overlapping, at any offset into their storages.
    `constants` is float32 [16] from `step_constants`; if its SKIP is not zero nothing is written. `decayed` says
    whether weight decay applies. `threads` is the number of threads of the C++ kernel (the fallback uses PyTorch's
    own setting); the GIL is released while it runs.

    `implementation`: "native" is the C++ kernel and raises RuntimeError where it cannot be built, "torch" the fallback,
    "auto" the first with the second in reserve. Raises ValueError for any other shape, dtype, device or layout.
    """
    prepare_adamw(
        master, m, v, grad, constants, [Run(0, m.numel(), decayed)], threads=threads, implementation=implementation
    )()


def prepare_adamw(
    master: tuple[Tensor, ...],
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    constants: Tensor,
    runs: Sequence[Run],
    *,
    threads: int,
    implementation: Implementation = "auto",
) -> PreparedUpdate:
    """`adamw_update` on some `runs` of the elements and no others, to be called any number of times: everything is checked
    here, so a call costs little beside its work. `constants` are read at each call. The tensors are kept alive.

    Raises ValueError as `adamw_update`, and for a run that does not lie within the tensors or overlaps the one before.
    """
    _validate(master, m, v, grad, constants, threads, implementation)
    end = 0
    for run in runs:
        if not end <= run.first <= run.end <= m.numel():
            raise ValueError(f"adamw_update: runs must ascend within [0, {m.numel()}), got {list(runs)}")
        end = run.end
    library = None if implementation == "torch" else _native(required=implementation == "native")
    if library is None:

        def in_torch() -> None:
            for run in runs:
                cut = slice(run.first, run.end)
                planes = tuple(plane[cut] for plane in master)
                _update_in_torch(planes, m[cut], v[cut], grad[cut], constants, run.decayed)

        return PreparedUpdate(in_torch, None)
    form = "split" if len(master) == 2 else "plain"
    entry = getattr(library, f"adamw_{form}_{_GRADIENT_NAMES[grad.dtype]}")
    lo = master[1].data_ptr() if len(master) == 2 else None
    table = (ctypes.c_int64 * (3 * len(runs)))(*(value for run in runs for value in run))
    record = _Record(
        master[0].data_ptr(), lo, m.data_ptr(), v.data_ptr(), grad.data_ptr(), constants.data_ptr(), ctypes.addressof(table),
        len(runs),
    )  # fmt: skip
    native = _Native(entry, record, threads, (master, m, v, grad, constants, table))

    def in_native() -> None:
        entry(ctypes.byref(native.record), 1, threads, None, 0, None)  # `native`: it keeps the operands

    return PreparedUpdate(in_native, native)


class _Record(ctypes.Structure):
    """`Update` of the C++ kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hi", "lo", "m", "v", "grad", "constants", "runs")), ("count", ctypes.c_int64),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Native:
    entry: Any
    record: _Record
    threads: int
    keep: object  # what the record's addresses are of


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """An update with its operands. `native` is None where PyTorch computes it."""

    call: Callable[[], None]
    native: _Native | None

    def __call__(self) -> None:
        self.call()


class UpdateSeries:
    """Prepared updates as one call of the C++ kernel, one after the other. When an update has ended, all caches hold its operands
    and nothing else, so that the interpreter would take several times its usual time to start the next.

    Raises ValueError if one of them is not native, or is of another form or number of threads than the first.
    """

    def __init__(self, updates: Sequence[PreparedUpdate]) -> None:
        natives = [update.native for update in updates if update.native is not None]
        alike = all(n.entry is natives[0].entry and n.threads == natives[0].threads for n in natives)
        if not natives or len(natives) < len(updates) or not alike:
            raise ValueError("a series needs native updates of one form")
        self._natives = natives  # they keep the operands
        self._records = (_Record * len(natives))(*(native.record for native in natives))
        self._spans = (ctypes.c_int64 * (2 * len(natives)))()

    def __call__(self, ended: int | None = None, first: int = 0) -> list[tuple[int, int]]:
        """Start and end of each update, in ns since the call. When number k has ended, the uint32 at address `ended` becomes
        first + k (modulo 2^32). If it is beyond that already, the run was abandoned: updates after k are left out, here too."""
        native, spans = self._natives[0], self._spans
        ran: int = native.entry(self._records, len(self._records), native.threads, ended, first & 0xFFFFFFFF, spans)
        return [(spans[i], spans[i + 1]) for i in range(0, 2 * ran, 2)]


def bind_threads(cores: Sequence[int]) -> None:
    """Keep the C++ kernel's threads, beside the one that calls it, on these cores, one each; [] lets them go where they like.

    It holds for the process. Where the kernel could not be built, or the system refuses, nothing happens.
    """
    library = _native(required=False)
    if library is not None:
        library.adamw_bind((ctypes.c_int * len(cores))(*cores), len(cores))


def native_problem() -> str | None:
    """Why the C++ kernel is not available here, or None if it is. Builds it if nobody has yet."""
    with _LOCK:
        return _load()[1]


def build(compiler: str, cache: Path) -> Path:
    """Compile the kernel into directory `cache`, unless it is there already, and return the library's path.

    `compiler` is a command, possibly with arguments. Safe against other processes doing the same: each compiles to a
    name of its own and renames. Raises RuntimeError with the compiler's message, or OSError if the directory cannot
    be written.
    """
    command = shlex.split(compiler)
    version = _output([*command, "--version"])
    parts = (SOURCE.read_text(), TEAM.read_text(), " ".join(FLAGS), _cpu_identity(), compiler, version)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    library = cache / f"adamw-{digest[:24]}.so"
    if library.exists():
        return library
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as directory:
        target = Path(directory) / library.name
        _output([*command, *FLAGS, str(SOURCE), "-o", str(target)])
        os.replace(target, library)
    return library


def _native(required: bool) -> ctypes.CDLL | None:
    with _LOCK:
        library, problem = _load()
    if required and library is None:
        raise RuntimeError(f"the C++ AdamW kernel is not available: {problem}")
    if problem is not None:
        with _LOCK:
            _warn_once(problem)
    return library


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain"
    try:
        library = ctypes.CDLL(str(build(os.environ.get("CXX") or "g++", cache)))
    except (OSError, RuntimeError) as error:
        return None, str(error)
    pointer, n, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name in ("adamw_split_bf16", "adamw_split_fp32", "adamw_plain_bf16", "adamw_plain_fp32"):
        entry = getattr(library, name)
        entry.argtypes = [pointer, n, integer, pointer, ctypes.c_uint32, pointer]
        entry.restype = n
    library.adamw_bind.argtypes = [ctypes.POINTER(integer), integer]
    library.adamw_bind.restype = None
    return library, None


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        "megatrain: the C++ AdamW kernel could not be built, so the optimizer's CPU updates run in PyTorch: "
        f"the same bits, a hundred times slower. Install g++, or name a compiler in CXX. Reason: {problem}",
        RuntimeWarning,
        stacklevel=5,
    )


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command[:1])} exited with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _cpu_identity() -> str:
    """What -march=native depends on: model and feature flags of the first CPU."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.split(":")[0].strip() in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Derived:
    """The constants of the specification that are not in the block: FP32 numbers, as Python's floats."""

    grad1: tuple[float, float]
    grad2: tuple[float, float]
    step: tuple[float, float]
    inv_step: float
    eps: float


def _derive(c: list[float]) -> _Derived:
    def cut(x: float) -> tuple[float, float]:
        hi = float(np.float32(x))
        return hi, float(np.float32(x - hi))

    step = cut(c[STEP_SIZE] / c[INV_SQRT_BC2])
    return _Derived(
        grad1=cut(c[ONE_MINUS_BETA1] * c[FACTOR]),
        grad2=cut(c[ONE_MINUS_BETA2] * (c[FACTOR] * c[FACTOR])),
        step=step,
        inv_step=float(np.float32(1.0 / step[0])) if step[0] >= 2.0**-126 else 0.0,
        eps=float(np.float32(c[EPS] / c[INV_SQRT_BC2])),
    )


def _update_in_torch(
    master: tuple[Tensor, ...], m: Tensor, v: Tensor, grad: Tensor, constants: Tensor, decayed: bool
) -> None:
    # Scalars go in as Python floats: every FP32 value is one exactly. No addcmul, addcdiv or lerp: they may use FMA.
    c: list[float] = constants.tolist()
    if c[SKIP] != 0:
        return
    derived, decay = _derive(c), c[DECAY] if decayed else 1.0
    with torch.no_grad():
        for start in range(0, m.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            g = grad[part].to(torch.float32)
            if len(master) == 1:
                w = master[0][part]
                w.copy_(_step(w, m[part], v[part], g, c, derived, decay))
            else:
                hi, lo = master[0][part].view(torch.int16), master[1][part]
                new = _step(join_bits(hi, lo).view(torch.float32), m[part], v[part], g, c, derived, decay)
                new_hi, new_lo = split_bits(new.view(torch.int32))
                hi.copy_(new_hi)
                lo.copy_(new_lo)


def _step(w: Tensor, m: Tensor, v: Tensor, g: Tensor, c: list[float], d: _Derived, decay: float) -> Tensor:
    """The specification, in its order, on FP32 tensors of one shape: `m` and `v` in place, the new w returned."""
    scaled = d.grad1[1] != 0 or d.grad2[1] != 0
    p, q = m * c[BETA1], g * d.grad1[0]
    q_rest = _fma(g, d.grad1[0], -q)
    if scaled:
        q_rest = _fma(g, d.grad1[1], q_rest)
    s = p + q
    t = s - p
    rest = ((p - (s - t)) + (q - t)) + (_fma(m, c[BETA1], -p) + q_rest)
    h = g * g
    gain = _fma(h, d.grad2[0], h * d.grad2[1]) if scaled else h * d.grad2[0]
    m.copy_(s + rest)
    v.copy_(_fma(v, c[BETA2], gain))
    r = _sqrt(v)
    r_rest = _fma(-r, r, v) * (HALF_RECIPROCAL - r.view(torch.int32)).view(torch.float32)
    y = torch.full_like(r, -d.step[0]).div_(r + d.eps)
    f = (_fma(y, r_rest + d.eps, _fma(y, r, d.step[0])) + d.step[1]) * d.inv_step
    return _fma(w, decay, _fma(y, s, y * _fma(s, f, rest)))


def _fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c of FP32 numbers, rounded to FP32 once.

    The product is exact in FP64, the sum is not. Rounding the sum to FP64 and then to FP32 would be two roundings, so the
    first is made "to odd" instead: an inexact sum becomes the neighbour whose last bit is 1. It then never lies on a tie of
    the second rounding, nor on the other side of one, as FP64 has more than two bits to spare (Boldo and Melquiond,
    "Emulation of a FMA and correctly-rounded sums", 2008).
    """
    product = a.to(torch.float64).mul_(b)
    addend = c.to(torch.float64) if isinstance(c, Tensor) else c
    total = product + addend
    back = total - product
    error = (product - (total - back)).add_(addend - back)  # exact: total + error is the sum
    bits = total.view(torch.int64)
    away = ((error < 0) == (total < 0)).to(torch.int64).mul_(2).sub_(1)  # the sum is further from zero than total: 1, else -1
    inexact = (error != 0) & error.isfinite()  # not finite: nor is the total
    bits.add_(away.mul_((bits & 1) ^ 1).mul_(inexact))
    return total.to(torch.float32)


def _sqrt(x: Tensor) -> Tensor:
    """The square root of an FP32 CPU tensor, correctly rounded: numpy's is the processor's, as IEEE 754 has it, while
    torch's may come from a vector math library and be off by a unit in the last place."""
    return torch.from_numpy(np.sqrt(x.numpy()))


def _validate(
    master: tuple[Tensor, ...], m: Tensor, v: Tensor, grad: Tensor, constants: Tensor, threads: int, implementation: str
) -> None:
    if implementation not in ("auto", "native", "torch"):
        raise ValueError(f"adamw_update: implementation must be auto, native or torch, got {implementation!r}")
    if threads < 1:
        raise ValueError(f"adamw_update: threads must be >= 1, got {threads}")
    planes: dict[str, tuple[Tensor, tuple[torch.dtype, ...]]]
    if len(master) == 2:
        planes = {"hi": (master[0], (torch.bfloat16,)), "lo": (master[1], (torch.int16,))}
    elif len(master) == 1:
        planes = {"w": (master[0], (torch.float32,))}
    else:
        raise ValueError(f"adamw_update: master must be (hi, lo) or (w,), got {len(master)} tensors")
    planes |= {"m": (m, (torch.float32,)), "v": (v, (torch.float32,)), "grad": (grad, tuple(_GRADIENT_NAMES))}
    n = m.numel()
    for name, (tensor, dtypes) in (planes | {"constants": (constants, (torch.float32,))}).items():
        want = N_CONSTANTS if name == "constants" else n
        if tensor.dtype not in dtypes:
            raise ValueError(f"adamw_update: {name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
        if tensor.dim() != 1 or tensor.numel() != want:
            raise ValueError(f"adamw_update: {name} must have shape [{want}], got {list(tensor.shape)}")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"adamw_update: {name} must be contiguous on the CPU, got stride {tensor.stride()} on {tensor.device}"
            )
