"""AdamW on the CPU, in place, to the bit: one C++ kernel and one PyTorch fallback that agree with each other.

Inputs and constants (c = `constants`) are FP32 or BF16 numbers; the arithmetic is FP64, in this order, each operation
rounded on its own (no FMA, no reciprocal), and m, v and w are rounded to FP32 once, when they are stored:

    g  = grad * c[FACTOR]
    m' = c[BETA1] * m + c[ONE_MINUS_BETA1] * g
    v' = c[BETA2] * v + c[ONE_MINUS_BETA2] * (g * g)
    d  = sqrt(v') * c[INV_SQRT_BC2] + c[EPS]
    w' = w * c[DECAY] - c[STEP_SIZE] * (m' / d)          (w * 1.0 for a parameter that does not decay)
    m, v, w = the FP32 numbers nearest to m', v', w'      (ties to even)

This is the specification: every kernel, on any device, follows it to the bit. Each element depends on its own inputs
only, so threads, alignment and the cutting of a range into calls cannot matter. Denormals are kept, never flushed:
the C++ kernel sets its threads to the default floating-point environment, the fallback relies on PyTorch's default
(do not call `torch.set_flush_denormal(True)` with it). The payload of a NaN is not promised.

What FP64 buys: each stored number is off by one rounding. In units of 2^-24 times the larger of the two terms of its sum,
and against exact arithmetic on the same inputs, m, v and w are each off by less than 2.001, since a sum is at most twice
its larger term and the errors of FP64 are 2^29 times smaller. Two exceptions, both out of sight in training: a result
among FP32's denormals is off by up to 2^-150 instead, and where m' cancels to under 2^-18 of its terms *and* the update
is not small beside w, the error of m' itself, 2^-52 of its larger term, shows in w, scaled by c[STEP_SIZE] / d.
All in FP32 the same formulas are off by 5 units in v, and without limit in w where m' cancels.

With a split master and BF16 gradients an update moves 26 bytes a parameter: hi, lo, m, v, g in and hi, lo, m, v out.
One thread of the C++ kernel was measured at 1.05 ns a parameter on an AMD EPYC core with 512-bit vectors, 25 GB/s, more
than half of it in the FP64 square root: it is bound by DRAM on as many threads as reach the DRAM rate at that speed, and
by arithmetic on fewer. It is built by one compiler call when first used and kept under $XDG_CACHE_HOME/megatrain
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
from pathlib import Path
from typing import Literal

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
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"),
    *("-shared", "-fPIC"),
    *(f"-D{name}={index}" for name, index in LAYOUT.items()),
)
# Fallback: elements at a time. Its temporaries (2 MiB each) are bounded whatever the tensor, and mostly stay in the
# cache.
CHUNK = 1 << 18

_GRADIENT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_LOCK = threading.Lock()


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
    _validate(master, m, v, grad, constants, threads, implementation)
    library = None if implementation == "torch" else _native(required=implementation == "native")
    if library is None:
        _update_in_torch(master, m, v, grad, constants, decayed)
        return
    form = "split" if len(master) == 2 else "plain"
    entry = getattr(library, f"adamw_{form}_{_GRADIENT_NAMES[grad.dtype]}")
    lo = master[1].data_ptr() if len(master) == 2 else None
    pointers = (master[0].data_ptr(), lo, m.data_ptr(), v.data_ptr(), grad.data_ptr(), constants.data_ptr())
    entry(*pointers, m.numel(), int(decayed), threads)


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
    parts = (SOURCE.read_text(), " ".join(FLAGS), _cpu_identity(), compiler, version)
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
        entry.argtypes = [pointer] * 6 + [n, integer, integer]
        entry.restype = None
    return library, None


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        "megatrain: the C++ AdamW kernel could not be built, so the optimizer's CPU updates run in PyTorch: "
        f"the same bits, several times slower. Install g++ with OpenMP, or name a compiler in CXX. Reason: {problem}",
        RuntimeWarning,
        stacklevel=4,
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


def _update_in_torch(
    master: tuple[Tensor, ...], m: Tensor, v: Tensor, grad: Tensor, constants: Tensor, decayed: bool
) -> None:
    # Scalars go in as Python floats: every FP32 value is one exactly. No addcmul, addcdiv or lerp: they may use FMA.
    c: list[float] = constants.tolist()
    if c[SKIP] != 0:
        return
    decay = c[DECAY] if decayed else 1.0
    with torch.no_grad():
        for start in range(0, m.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            mi, vi = m[part], v[part]
            g = grad[part].to(torch.float64).mul_(c[FACTOR])
            m64 = mi.to(torch.float64).mul_(c[BETA1]).add_(g * c[ONE_MINUS_BETA1])
            v64 = vi.to(torch.float64).mul_(c[BETA2]).add_(g.mul_(g).mul_(c[ONE_MINUS_BETA2]))
            mi.copy_(m64)
            vi.copy_(v64)
            move = m64.div_(_sqrt_(v64).mul_(c[INV_SQRT_BC2]).add_(c[EPS])).mul_(c[STEP_SIZE])
            if len(master) == 1:
                w = master[0][part]
                w.copy_(w.to(torch.float64).mul_(decay).sub_(move))
            else:
                hi, lo = master[0][part].view(torch.int16), master[1][part]
                w = join_bits(hi, lo).view(torch.float32).to(torch.float64).mul_(decay).sub_(move)
                new_hi, new_lo = split_bits(w.to(torch.float32).view(torch.int32))
                hi.copy_(new_hi)
                lo.copy_(new_lo)


def _sqrt_(x: Tensor) -> Tensor:
    """The square root of a CPU tensor in place, correctly rounded.

    torch's may come from a vector math library and be off by a unit in the last place (1% of values in FP64, where
    rounding to FP32 afterwards hides it in all but a few in a billion). numpy's is the processor's, as IEEE 754 has it.
    """
    root = x.numpy()
    np.sqrt(root, out=root)
    return x


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
