import ctypes
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.optim import constants, kernel
from megatrain.optim.constants import LAYOUT, clip_factor, step_constants
from megatrain.optim.kernel import Implementation, PreparedUpdate, Run, UpdateSeries, adamw_update, prepare_adamw
from megatrain.optim.master import join, split
from megatrain.recipe import AdamW

needs_compiler = pytest.mark.skipif(kernel.native_problem() is not None, reason=f"{kernel.native_problem()}")
IMPLEMENTATIONS = [pytest.param("native", marks=needs_compiler), "torch"]
FORMS = ["split", "plain"]
GRADIENTS = [torch.bfloat16, torch.float32]

# One of each kind of FP32 number: zeros, denormals, the smallest normal, ones at which squares vanish or overflow, ties of
# the BF16 rounding (1 + 2^-8, and odd and even neighbours), the largest weight a master may hold.
SPECIAL = torch.tensor([0.0, 1.4e-45, 1e-40, 1.1754944e-38, 1e-30, 1e-20, 1e-8, 1.0, 1.00390625, 1.01171875, 3.0, 1e19, 1e38])


@dataclass(frozen=True)
class State:
    """What one update reads and writes, as FP32; `w`, `m`, `v`, `grad` are of one length."""

    w: Tensor
    m: Tensor
    v: Tensor
    grad: Tensor

    def cut(self, start: int, end: int) -> "State":
        return State(self.w[start:end], self.m[start:end], self.v[start:end], self.grad[start:end])


def _normal(n: int, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    w, m, v, grad = torch.randn(4, n, generator=generator)
    return State(w, m, v.square_(), grad)


def _training_like(n: int, seed: int = 0) -> State:
    state = _normal(n, seed)
    return State(state.w * 0.02, state.m * 1e-3, state.v * 1e-6, state.grad * 1e-3)


def _adversarial(n: int, seed: int = 0) -> State:
    """Random bit patterns and special values, each finite, in every combination."""
    generator = torch.Generator().manual_seed(seed)

    def values() -> Tensor:
        bits = torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32)
        ties = (bits & ~0xFFFF) | 0x8000
        x = torch.where(torch.rand(n, generator=generator) < 0.3, ties, bits).view(torch.float32)
        special = SPECIAL[torch.randint(0, len(SPECIAL), (n,), generator=generator)]
        special = special * (torch.randint(0, 2, (n,), generator=generator) * 2 - 1)
        x = torch.where(torch.rand(n, generator=generator) < 0.4, special, x)
        return torch.where(x.isfinite() & (x.abs() < 3.3e38), x, special)

    return State(values(), values(), values().abs(), values())


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def _shifted(x: Tensor, offset: int) -> Tensor:
    """A copy that starts `offset` elements into its storage."""
    return torch.empty(x.numel() + offset, dtype=x.dtype)[offset:].copy_(x)


def _planes(state: State, form: str, grad_dtype: torch.dtype, offsets: tuple[int, ...] = (0,) * 5) -> list[Tensor]:
    """Fresh [hi, lo, m, v, grad] or [w, m, v, grad]."""
    master = list(split(state.w)) if form == "split" else [state.w]
    parts = [*master, state.m, state.v, state.grad.to(grad_dtype)]
    return [_shifted(x, offset) for x, offset in zip(parts, offsets, strict=False)]


def _update(
    parts: list[Tensor], block: Tensor, implementation: Implementation, *, decayed: bool = True, threads: int = 1
) -> None:
    *master, m, v, grad = parts
    adamw_update(tuple(master), m, v, grad, block, decayed=decayed, threads=threads, implementation=implementation)


def _block(step: int = 3, optimizer: AdamW | None = None, *, factor: float = 1.0, skip: bool = False) -> Tensor:
    return torch.from_numpy(step_constants(optimizer or AdamW(), step, factor=factor, skip=skip))


def _assert_same_bits(parts: list[Tensor], others: list[Tensor]) -> None:
    """Of a NaN only that it is one is promised; `lo` follows its `hi`."""
    number = torch.ones_like(parts[0], dtype=torch.bool)
    for mine, theirs in zip(parts, others, strict=True):
        if mine.is_floating_point():
            number = ~mine.isnan()
        assert torch.equal(number, ~theirs.isnan() if mine.is_floating_point() else number)
        assert torch.equal(_bits(mine)[number], _bits(theirs)[number])


def _prepared(parts: list[Tensor], block: Tensor, implementation: Implementation = "native", threads: int = 2) -> PreparedUpdate:
    *master, m, v, grad = parts
    runs = [Run(3, m.numel() // 2, True), Run(m.numel() // 2 + 1, m.numel(), False)]
    return prepare_adamw(tuple(master), m, v, grad, block, runs, threads=threads, implementation=implementation)


@needs_compiler
@pytest.mark.parametrize("grad_dtype", GRADIENTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_series_is_its_updates_one_after_the_other(form: str, grad_dtype: torch.dtype) -> None:
    """The same bits, also where an update is skipped; one in it twice sees what it did itself."""
    sizes, skipped = (100_000, 77, 1 << 17, 5_000), 3
    blocks = [_block(7, factor=0.37, skip=k == skipped) for k in range(len(sizes))]
    together, apart = ([_planes(_training_like(n), form, grad_dtype) for n in sizes] for _ in range(2))
    updates = [_prepared(parts, block) for parts, block in zip(together, blocks, strict=True)]
    first = (1 << 32) - 2  # counts are modulo 2^32
    ended = torch.tensor([0, -3, 0], dtype=torch.int32)
    spans = UpdateSeries([*updates, updates[0]])(ended[1:].data_ptr(), first)
    for parts, block in [*zip(apart, blocks, strict=True), (apart[0], blocks[0])]:
        _prepared(parts, block)()
    for ours, theirs in zip(together, apart, strict=True):
        _assert_same_bits(ours, theirs)
    assert ended.tolist() == [0, 2, 0]
    times = [time for span in spans for time in span]
    assert len(spans) == 5 and times == sorted(times) and times[0] >= 0 and times[-1] > times[0]


@needs_compiler
def test_a_series_of_an_abandoned_run_ends_early_and_takes_no_count_back() -> None:
    """Who abandons a run has the count go far beyond what it will ever be: from then on nobody waits for it."""
    parts = [_planes(_training_like(1000), "split", torch.bfloat16) for _ in range(3)]
    before = [[plane.clone() for plane in planes] for planes in parts]
    far = 7 + (1 << 30)
    ended = torch.tensor([far], dtype=torch.int32)
    spans = UpdateSeries([_prepared(planes, _block()) for planes in parts])(ended.data_ptr(), 7)
    assert ended.tolist() == [far] and len(spans) == 1
    for ours, old in zip(parts[1:], before[1:], strict=True):
        _assert_same_bits(ours, old)


@needs_compiler
def test_a_series_takes_native_updates_of_one_form_and_number_of_threads() -> None:
    def update(form: str, implementation: Implementation = "native", threads: int = 2) -> PreparedUpdate:
        return _prepared(_planes(_training_like(100), form, torch.bfloat16), _block(), implementation, threads)

    UpdateSeries([update("split"), update("split")])
    for other in (update("plain"), update("split", "torch"), update("split", threads=1)):
        with pytest.raises(ValueError, match="native updates of one form"):
            UpdateSeries([update("split"), other])
    with pytest.raises(ValueError, match="native updates of one form"):
        UpdateSeries([])


@needs_compiler
@pytest.mark.parametrize("grad_dtype", GRADIENTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [_training_like, _adversarial])
@pytest.mark.parametrize("decayed", [True, False])
def test_native_and_torch_agree_to_the_bit(make: object, form: str, grad_dtype: torch.dtype, decayed: bool) -> None:
    assert callable(make)
    state = make(300_001)
    for block in (_block(1), _block(7, factor=0.37), _block(10_000, AdamW(lr=0.3, beta1=0.0, eps=1e-30))):
        native, fallback = _planes(state, form, grad_dtype), _planes(state, form, grad_dtype)
        _update(native, block, "native", decayed=decayed, threads=3)
        _update(fallback, block, "torch", decayed=decayed)
        _assert_same_bits(native, fallback)


@needs_compiler
@pytest.mark.parametrize("make", [_training_like, _adversarial])
def test_the_kernel_gives_the_same_bits_where_it_has_no_wide_vectors(
    make: Callable[[int], State], no_library_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "FLAGS", (*kernel.FLAGS, "-U__AVX512BW__"))
    for form, grad_dtype, factor in ((f, g, x) for f in FORMS for g in GRADIENTS for x in (1.0, 0.37)):
        native, fallback = (_planes(make(20_001), form, grad_dtype) for _ in range(2))
        _update(native, _block(2, factor=factor), "native", threads=2)
        _update(fallback, _block(2, factor=factor), "torch")
        _assert_same_bits(native, fallback)


def test_the_adversarial_values_reach_what_they_are_for() -> None:
    state = _adversarial(300_001)
    parts = _planes(state, "plain", torch.float32)
    _update(parts, _block(1), "torch", decayed=False)
    w, m, v, _ = parts
    tiny = torch.finfo(torch.float32).tiny
    for x in (w, m, v):
        assert ((x != 0) & (x.abs() < tiny)).sum() > 100  # denormal results
        assert (x == 0).sum() > 100
    assert v.isinf().sum() > 100  # g * g overflows; such a step is skipped by the norm, the bits agree all the same
    assert ((_bits(w) & 0xFFFF) == 0x8000).sum() > 100  # exact ties


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 5000),
    offsets=st.tuples(*[st.integers(0, 17)] * 5),
    cuts=st.lists(st.integers(0, 5000), max_size=4),
    threads=st.integers(1, 4),
    form=st.sampled_from(FORMS),
    grad_dtype=st.sampled_from(GRADIENTS),
    implementation=st.sampled_from(["auto", "torch"]),
    chunk=st.sampled_from([1, 1000, 4096]),
)
def test_bits_do_not_depend_on_threads_alignment_or_cuts(
    n: int,
    offsets: tuple[int, ...],
    cuts: list[int],
    threads: int,
    form: str,
    grad_dtype: torch.dtype,
    implementation: Implementation,
    chunk: int,
) -> None:
    state, block = _adversarial(5000).cut(0, n), _block(2, factor=0.5)
    whole = _planes(state, form, grad_dtype)
    _update(whole, block, "torch")
    parts = _planes(state, form, grad_dtype, offsets)
    ends = sorted({min(cut, n) for cut in cuts} | {n})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "CHUNK", chunk if n <= 100 else max(chunk, 1000))
        for start, end in zip([0, *ends], ends, strict=False):
            _update([x[start:end] for x in parts], block, implementation, threads=threads)
    _assert_same_bits(parts, whole)


@pytest.mark.parametrize("grad_dtype", GRADIENTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_both_forms_of_the_master_hold_the_same_weights(implementation: Implementation, grad_dtype: torch.dtype) -> None:
    two, one = (_planes(_training_like(70_001), form, grad_dtype) for form in FORMS)
    for step in range(1, 6):
        _update(two, _block(step), implementation)
        _update(one, _block(step), implementation)
    hi, lo, *moments = two
    _assert_same_bits([join(hi, lo), *moments], one)
    # The streamed plane is the rounding of the master, as `split` defines it.
    _assert_same_bits([hi, lo], list(split(one[0])))


def _gaussian(n: int, seed: int) -> State:
    state = _normal(n, seed)
    return replace(state, v=state.v.sqrt())


def _after_real_steps(n: int, seed: int) -> State:
    """Weights and gradients of a training run; moments are those of nine steps with such gradients."""
    state = replace(_training_like(n, seed), m=torch.zeros(n), v=torch.zeros(n))
    for step in range(9):
        grad = _training_like(n, 100 * seed + step).grad
        state = replace(state, m=state.m.lerp(grad, 0.1), v=state.v.lerp(grad.square(), 0.05))
    return state


def _many_decades(n: int, seed: int) -> State:
    """Random magnitudes, each on its own: updates far above and far below their weights, moments that cancel."""
    generator = torch.Generator().manual_seed(seed)

    def values(low: float, high: float) -> Tensor:
        sign = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
        return 10.0 ** (torch.rand(n, generator=generator) * (high - low) + low) * sign

    return State(values(-8, 2), values(-12, 4), values(-16, 8).abs(), values(-8, 4))


def _terms_in_fp64(state: State, block: Tensor, decayed: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """The two terms of each of the three sums, in FP64 from inputs to end."""
    c = {name: block[index].double() for name, index in LAYOUT.items()}
    w, m, v, grad = (x.double() for x in (state.w, state.m, state.v, state.grad))
    g = grad * c["FACTOR"]
    m_terms = (m * c["BETA1"], g * c["ONE_MINUS_BETA1"])
    v_terms = (v * c["BETA2"], g.square() * c["ONE_MINUS_BETA2"])
    d = sum(v_terms).sqrt() * c["INV_SQRT_BC2"] + c["EPS"]
    return {"w": (w * c["DECAY"] if decayed else w, -c["STEP_SIZE"] * sum(m_terms) / d), "m": m_terms, "v": v_terms}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("make", [_gaussian, _after_real_steps, _many_decades])
def test_a_step_is_within_4_units_of_fp64(
    make: Callable[[int, int], State], beta2: float, implementation: Implementation
) -> None:
    """A million values, one step from equal state, against FP64 throughout with the same FP32-rounded constants.

    The unit is 2^-24 of the larger term of each sum; plain FP32 takes 5 for v, and without limit for w where m cancels.
    """
    state = make(10**6, 1)
    for factor, decayed in ((1.0, True), (1.0, False), (0.37, True), (0.37, False)):
        block = _block(10, AdamW(lr=1e-4, beta1=0.9, beta2=beta2, eps=1e-8, weight_decay=0.1), factor=factor)
        parts = _planes(state, "plain", torch.float32)
        _update(parts, block, implementation, decayed=decayed, threads=2)
        for got, (name, (a, b)) in zip(parts, _terms_in_fp64(state, block, decayed).items(), strict=False):
            units = (got - (a + b)).abs() / torch.maximum(a.abs(), b.abs()) * 2**24
            assert units.max() <= 4, name
            assert units.max() > 0.5, name  # not FP64 compared with itself


def _rounded(exact: Fraction) -> float:
    """To FP32, once: to a multiple of the last place, which is 2^-149 or more; Fraction rounds ties to even."""
    if exact == 0:
        return 0.0
    exponent = abs(exact).numerator.bit_length() - abs(exact).denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    place = Fraction(2) ** max(exponent - 23, -149)
    result = round(exact / place) * place
    return math.copysign(math.inf, result) if abs(result) >= 2**128 else float(result)


def _fma_cases(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Finite FP32 triples: of any magnitude, sums that cancel, and sums at or next to a tie, also among denormals."""
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (n,), generator=generator)

    a, b, c = _adversarial(n, seed).w, _adversarial(n, seed + 1).w, _adversarial(n, seed + 2).w
    near_tie = torch.ldexp(pick(2**23, 2**24).float(), pick(-60, -20)), torch.ldexp(1.0 + pick(-1, 2) * 2.0**-23, pick(-60, 40))
    product = near_tie[0].double() * near_tie[1].double()
    # c is from 2^23 to 2^25 times the product's last bits: the product ends at c's rounding position, give or take.
    shift = pick(-2, 28)
    aligned = torch.ldexp(product, shift.double()).float()
    kind = pick(0, 4)
    a, b = (torch.where(kind < 2, x, y) for x, y in zip((a, b), near_tie, strict=True))
    power = torch.ldexp(torch.ones(n), pick(-149, 20))
    a = torch.where(kind == 2, power, a)  # one bit times few bits: exact ties
    b = torch.where(kind == 2, torch.ldexp(pick(1, 8).float(), pick(-30, 0)), b)
    c = torch.where(kind == 1, -(a.double() * b.double()).float(), torch.where(kind == 3, aligned, c))
    c = torch.where(kind == 2, torch.ldexp(pick(-(2**24), 2**24).float(), pick(-149, 0)), c)
    return a, b, torch.where(c.isfinite(), c, 1.0)


def test_the_fma_of_the_fallback_rounds_once() -> None:
    a, b, c = _fma_cases(20_000, 0)
    triples = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    expected = [_rounded(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in triples]
    got, naive = kernel._fma(a, b, c), (a.double() * b.double() + c.double()).float()
    assert got.tolist() == expected
    wrong = naive != torch.tensor(expected)
    tiny = torch.finfo(torch.float32).tiny
    # What the cases are for: without rounding to odd some are wrong, among normal numbers and denormals.
    assert (wrong & (got.abs() >= tiny)).sum() > 0
    assert ((got != 0) & (got.abs() < tiny)).sum() > 100
    assert got.isinf().sum() > 100
    infinite = torch.tensor([torch.inf, torch.inf, 1.0, torch.nan])
    assert kernel._fma(infinite, 2.0, torch.tensor([1.0, -torch.inf, torch.inf, 1.0])).isfinite().sum() == 0


@needs_compiler
def test_the_fma_of_the_fallback_is_that_of_c(tmp_path: Path) -> None:
    source = tmp_path / "fma.cpp"
    source.write_text(
        '#include <cmath>\nextern "C" void all(const float* a, const float* b, const float* c, float* out, long n)'
        " { for (long i = 0; i < n; ++i) out[i] = std::fma(a[i], b[i], c[i]); }"
    )
    library = source.with_suffix(".so")
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    a, b, c = _fma_cases(2_000_000, 7)
    out = torch.empty_like(a)
    ctypes.CDLL(str(library)).all(*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, c, out)), ctypes.c_long(a.numel()))
    _assert_same_bits([kernel._fma(a, b, c)], [out])


def test_the_square_root_of_the_fallback_is_correctly_rounded() -> None:
    # Correct is a root whose two midpoints with its neighbours enclose the exact one; below and above are twice those.
    x = _adversarial(20_000).v
    roots = kernel._sqrt(x)
    below, above = (roots.nextafter(torch.tensor(to)).clamp_min(0) for to in (-torch.inf, torch.inf))
    for value, root, low, high in zip(*(t.tolist() for t in (x, roots, below, above)), strict=True):
        assert (Fraction(root) + Fraction(low)) ** 2 <= 4 * Fraction(value) <= (Fraction(root) + Fraction(high)) ** 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_twenty_steps_follow_torch_adamw(implementation: Implementation, form: str) -> None:
    n, optimizer = 10_007, AdamW(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
    start = _training_like(n)
    theirs = start.w.clone().requires_grad_()
    torch_adamw = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    ours = _planes(replace(start, m=torch.zeros(n), v=torch.zeros(n)), form, torch.float32)
    for step in range(1, 21):
        ours[-1] = theirs.grad = _training_like(n, seed=step).grad
        torch_adamw.step()
        _update(ours, _block(step, optimizer), implementation)
    w = join(ours[0], ours[1]) if form == "split" else ours[0]
    torch.testing.assert_close(w, theirs.detach(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours[-3], torch_adamw.state[theirs]["exp_avg"], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(ours[-2], torch_adamw.state[theirs]["exp_avg_sq"], rtol=1e-5, atol=1e-12)
    assert (w - start.w).abs().max() > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_a_skipped_step_changes_no_bit(implementation: Implementation, form: str) -> None:
    state = _training_like(1001)
    state.grad[17], state.grad[18] = torch.nan, torch.inf
    parts = _planes(state, form, torch.float32)
    before = [x.clone() for x in parts]
    _update(parts, _block(skip=True), implementation)
    _assert_same_bits(parts, before)
    _update(parts, _block(), implementation)
    assert not any(torch.equal(_bits(x), _bits(y)) for x, y in zip(parts[:-1], before, strict=False))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_clipping_and_decay_change_the_update(implementation: Implementation) -> None:
    # Not at step 1 from zero moments: there Adam's update does not depend on the gradient's scale.
    state = _training_like(1001)
    norm = state.grad.double().norm().item()
    runs = {}
    for clip_norm in (None, norm / 2):
        for decayed in (True, False):
            parts = _planes(state, "plain", torch.float32)
            _update(parts, _block(factor=clip_factor(norm, clip_norm)), implementation, decayed=decayed)
            runs[clip_norm is not None, decayed] = parts
    for decayed in (True, False):
        for off, on in zip(runs[False, decayed][:3], runs[True, decayed][:3], strict=True):
            assert (off != on).float().mean() > 0.9
    for clipped in (True, False):
        assert (runs[clipped, True][0] != runs[clipped, False][0]).float().mean() > 0.9
        _assert_same_bits(runs[clipped, True][1:], runs[clipped, False][1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_zero_padding_stays_zero(implementation: Implementation, form: str) -> None:
    parts = _planes(State(*torch.zeros(4, 100)), form, torch.bfloat16)
    for step in range(1, 4):
        _update(parts, _block(step), implementation)
    assert not any(_bits(x).any() for x in parts)


@needs_compiler
def test_denormals_survive_a_thread_that_flushes_them() -> None:
    state, block = _adversarial(10_000), _block()
    usual, flushing = _planes(state, "split", torch.float32), _planes(state, "split", torch.float32)
    _update(usual, block, "native")
    denormal = torch.tensor([1e-40])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        _update(flushing, block, "native", threads=2)
        assert (denormal * 1.0).item() == 0  # the caller's setting is put back
    finally:
        torch.set_flush_denormal(False)
    _assert_same_bits(usual, flushing)


@needs_compiler
def test_concurrent_calls_do_not_disturb_each_other() -> None:
    state, block = _training_like(40_003), _block()
    expected = _planes(state, "split", torch.bfloat16)
    _update(expected, block, "native")
    runs = [_planes(state, "split", torch.bfloat16) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda parts: _update(parts, block, "native", threads=2), runs))
    for parts in runs:
        _assert_same_bits(parts, expected)


def _good() -> dict[str, object]:
    hi, lo, m, v, grad = _planes(_training_like(8), "split", torch.bfloat16)
    return {"master": (hi, lo), "m": m, "v": v, "grad": grad, "constants": _block()} | {"decayed": True, "threads": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"master": ()}, r"\(hi, lo\) or \(w,\), got 0 tensors"),
        ({"master": (torch.zeros(8), torch.zeros(8, dtype=torch.int16))}, "hi must be torch.bfloat16, got torch.float32"),
        ({"master": (torch.zeros(8, dtype=torch.bfloat16),)}, "w must be torch.float32, got torch.bfloat16"),
        ({"m": torch.zeros(8, dtype=torch.float64)}, "m must be torch.float32"),
        ({"v": torch.zeros(9)}, r"v must have shape \[8\], got \[9\]"),
        ({"v": torch.zeros(16)[::2]}, r"v must be contiguous on the CPU, got stride \(2,\)"),
        ({"m": torch.zeros(8, device="meta")}, "m must be contiguous on the CPU, got .* meta"),
        ({"grad": torch.zeros(8, dtype=torch.float16)}, "grad must be torch.bfloat16 or torch.float32"),
        ({"grad": torch.zeros(2, 4)}, r"grad must have shape \[8\], got \[2, 4\]"),
        ({"constants": torch.zeros(10)}, r"constants must have shape \[16\]"),
        ({"threads": 0}, "threads must be >= 1, got 0"),
        ({"implementation": "cuda"}, "auto, native or torch, got 'cuda'"),
    ],
)
def test_mistakes_are_refused_with_their_numbers(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adamw_update(**(_good() | change))  # type: ignore[arg-type]


@pytest.fixture
def no_library_loaded() -> Iterator[None]:
    kernel._load.cache_clear()
    kernel._warn_once.cache_clear()
    yield
    kernel._load.cache_clear()
    kernel._warn_once.cache_clear()


def test_without_a_compiler_one_warning_and_the_same_bits(
    no_library_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parts, expected = (_planes(_training_like(99), "split", torch.bfloat16) for _ in range(2))
    with pytest.warns(RuntimeWarning, match="a hundred times slower.*no-such-compiler") as caught:
        for step in (1, 2, 3):
            _update(parts, _block(step), "auto")
            _update(expected, _block(step), "torch")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    _assert_same_bits(parts, expected)
    with pytest.raises(RuntimeError, match=r"not available.*no-such-compiler"):
        _update(parts, _block(), "native")
    assert "no-such-compiler" in (kernel.native_problem() or "")


@needs_compiler
def test_a_failing_build_says_what_the_compiler_said(
    no_library_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "FLAGS", (*kernel.FLAGS, "-fno-such-flag"))
    with pytest.warns(RuntimeWarning, match="no-such-flag"):
        _update(_planes(_training_like(9), "split", torch.bfloat16), _block(), "auto")
    assert list((tmp_path / "megatrain").iterdir()) == []


def test_an_unwritable_cache_falls_back_too(
    no_library_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="a hundred times slower"):
        _update(_planes(_training_like(9), "split", torch.bfloat16), _block(), "auto")


@needs_compiler
def test_the_library_is_built_once_and_its_name_follows_source_and_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as pool:  # as two processes would: each builds, both end with the same complete file
        first, same = pool.map(lambda _: kernel.build("g++", tmp_path), range(2))
    assert first == same
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    ctypes.CDLL(str(first))
    built_ns = first.stat().st_mtime_ns
    assert kernel.build("g++", tmp_path).stat().st_mtime_ns == built_ns
    changed = tmp_path / "changed.cpp"
    changed.write_text(kernel.SOURCE.read_text() + "\n// another comment\n")
    monkeypatch.setattr(kernel, "SOURCE", changed)
    monkeypatch.setattr(kernel, "FLAGS", ("-O0", *kernel.FLAGS))
    assert kernel.build("g++", tmp_path) != first


# Answers --version, then waits until two compilers run, then writes its output in two halves. Compiles nothing.
SLOW_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec echo slow 1
for last; do :; done
touch "{running}/$$"
tries=0
while [ "$(ls "{running}" | wc -l)" -lt 2 ] && [ $tries -lt 600 ]; do sleep 0.05; tries=$((tries + 1)); done
printf 'first half, ' > "$last"
sleep 0.3
printf 'second half' >> "$last"
"""


def test_two_processes_may_build_at_once_and_no_reader_sees_half_a_library(tmp_path: Path) -> None:
    running, cache, compiler = tmp_path / "running", tmp_path / "cache", tmp_path / "slow-compiler"
    running.mkdir()
    compiler.write_text(SLOW_COMPILER.format(running=running))
    compiler.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from megatrain.optim import kernel\n"
        "print(kernel.build(sys.argv[1], Path(sys.argv[2])), end='')"
    )
    command = [sys.executable, "-c", code, str(compiler), str(cache)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    seen = set()
    while any(builder.poll() is None for builder in builders):
        seen.update(path.read_text() for path in cache.glob("*.so"))
        time.sleep(0.01)
    paths = {builder.communicate()[0] for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0]
    assert len(list(running.iterdir())) == 2  # both did compile
    assert {str(path) for path in cache.iterdir()} == paths
    assert len(paths) == 1
    seen.add(Path(paths.pop()).read_text())
    assert seen == {"first half, second half"}


@needs_compiler
def test_the_compiler_reads_the_layout_of_the_constants() -> None:
    """Every index reaches the kernel from LAYOUT: moving a constant in the block moves what the kernel reads."""
    defines = {flag for flag in kernel.FLAGS if flag.startswith("-D")}
    assert defines == {f"-D{name}={index}" for name, index in LAYOUT.items()}
    read_by_kernel = {name for name in LAYOUT if f"[{name}]" in kernel.SOURCE.read_text()}
    assert read_by_kernel == LAYOUT.keys() - {"LR"}
    state, block = _training_like(64), _block(factor=0.5)
    usual = _planes(state, "plain", torch.float32)
    _update(usual, block, "native")
    for name in sorted(read_by_kernel):
        changed = block.clone()
        changed[LAYOUT[name]] += 0.25
        parts = _planes(state, "plain", torch.float32)
        _update(parts, changed, "native")
        assert any(not torch.equal(x, y) for x, y in zip(parts, usual, strict=True)), name
    assert block[constants.LR] == torch.tensor(1e-4)


def test_flags_never_allow_the_compiler_to_change_the_arithmetic() -> None:
    assert "-ffp-contract=off" in kernel.FLAGS
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"} & set(kernel.FLAGS)


@needs_compiler
def test_auto_uses_the_native_kernel_without_a_word() -> None:
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "from megatrain.optim import kernel\n"
        "assert kernel._native(required=False) is kernel._native(required=True) is not None"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        subprocess.run([sys.executable, "-c", code], check=True)
