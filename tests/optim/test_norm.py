import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.optim.norm import finish_norm, first_nonfinite, n_tiles, norm_partials
from megatrain.recipe import NORM_TILE

SIZES = [1, 2, 3, 100, 1000, NORM_TILE // 2, NORM_TILE // 2 + 1, NORM_TILE - 1, NORM_TILE, NORM_TILE + 1, 5 * NORM_TILE + 4321]


def _gradient(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-6, 3, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


def _partials(grad: Tensor, **keywords: int) -> Tensor:
    out = torch.full((n_tiles(grad.numel()),), torch.nan)
    norm_partials(grad, out, **keywords)
    return out


def _by_definition(grad: Tensor) -> Tensor:
    """The module's definition, taken literally: every tile padded to its full size."""
    squares = torch.zeros(n_tiles(grad.numel()) * NORM_TILE)
    squares[: grad.numel()] = grad.float() * grad.float()
    x = squares.view(-1, NORM_TILE)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", SIZES)
def test_partials_are_the_padded_tree_bit_for_bit(numel: int, dtype: torch.dtype) -> None:
    grad = _gradient(numel, dtype)
    before = grad.clone()
    assert torch.equal(_partials(grad), _by_definition(grad))
    assert torch.equal(grad, before)


@settings(max_examples=20, deadline=None)
@given(
    numel=st.integers(1, 4 * NORM_TILE),
    offset=st.integers(0, 17),
    tiles_at_once=st.integers(1, 5),
    threads=st.integers(1, 4),
)
def test_bits_do_not_depend_on_threads_alignment_or_grouping(
    numel: int, offset: int, tiles_at_once: int, threads: int
) -> None:
    grad = _gradient(numel, torch.bfloat16, seed=numel)
    shifted = torch.empty(numel + offset, dtype=torch.bfloat16)[offset:].copy_(grad)
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        partials = _partials(shifted, tiles_at_once=tiles_at_once)
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(partials, _partials(grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_the_fp64_norm_to_1e_6(dtype: torch.dtype) -> None:
    grads = [_gradient(numel, dtype, seed=numel) for numel in SIZES]
    norm = finish_norm(torch.cat([_partials(grad) for grad in grads]).numpy())
    assert norm == pytest.approx(torch.cat(grads).double().norm().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("element", "low", "high"), [(2.0**-62, 1 - 1e-6, 1 + 1e-6), (2.0**-72, 0.9, 1.1), (2.0**-75.5, 0.0, 0.0), (1.8e19, 1, 1)]
)
def test_the_range_of_the_norm_is_as_documented(element: float, low: float, high: float) -> None:
    """One element: its square is exact to FP32's rounding above 2^-63, loses digits below, and is nothing below 2^-75."""
    grad = torch.zeros(5)
    grad[3] = element
    assert low * (1 - 1e-6) <= finish_norm(_partials(grad).numpy()) / float(grad[3]) <= high * (1 + 1e-6)


def test_the_final_sum_runs_in_fp64_from_first_to_last() -> None:
    # In FP64, 2^53 + 1 is a tie that goes to 2^53: from this end every 1 is lost, from the other none is.
    partials = np.array([2.0**53] + [1.0] * 10**6, dtype=np.float32)
    assert finish_norm(partials) == 2.0**26.5
    assert finish_norm(partials[::-1]) == math.sqrt(2**53 + 10**6) > 2.0**26.5
    tenths = np.full(10**6, 0.1, dtype=np.float32)
    assert finish_norm(tenths) == pytest.approx(math.sqrt(10**6 * float(tenths[0])), rel=1e-9)
    assert finish_norm(np.zeros(0, dtype=np.float32)) == 0.0


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_element_is_found_wherever_it_is_and_its_parameter_named(bad: float, dtype: torch.dtype) -> None:
    sizes = {"embedding": NORM_TILE + 1, "norm": 7, "up": 2 * NORM_TILE + 99, "head": NORM_TILE}
    counts = [n_tiles(numel) for numel in sizes.values()]
    for name, numel in sizes.items():
        for index in {0, numel // 2, numel - 1}:
            grads = {other: _gradient(size, dtype) for other, size in sizes.items()}
            grads[name][index] = bad
            partials = torch.cat([_partials(grad) for grad in grads.values()]).numpy()
            assert first_nonfinite(partials, counts, list(sizes)) == name
            assert not np.isfinite(finish_norm(partials))


def test_the_first_of_several_is_named_and_empty_parameters_shift_nothing() -> None:
    partials = np.array([1.0, 2.0, np.nan, 3.0, np.inf], dtype=np.float32)
    assert first_nonfinite(partials, [2, 0, 1, 0, 2], list("abcde")) == "c"
    assert first_nonfinite(partials[:2], [0, 2], ["a", "b"]) is None


def test_mistakes_are_refused_with_their_numbers() -> None:
    with pytest.raises(ValueError, match=r"out must be float32 \[2\].*got torch.float32 \[1\]"):
        norm_partials(torch.zeros(NORM_TILE + 1), torch.zeros(1))
    with pytest.raises(ValueError, match="grad must be bfloat16 or float32"):
        norm_partials(torch.zeros(4, dtype=torch.float16), torch.zeros(1))
    with pytest.raises(ValueError, match=r"grad must be .*stride \(2,\)"):
        norm_partials(torch.zeros(4)[::2], torch.zeros(1))
    with pytest.raises(ValueError, match="tiles_at_once must be >= 1"):
        norm_partials(torch.zeros(4), torch.zeros(1), tiles_at_once=0)
    with pytest.raises(ValueError, match=r"partials must be float32 \[tiles\]"):
        finish_norm(np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 names, 2 tile counts that sum to 3, 4 partials"):
        first_nonfinite(np.zeros(4, dtype=np.float32), [1, 2], ["a", "b"])
