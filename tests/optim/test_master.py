import pytest
import torch
from torch import Tensor

from megatrain.optim.master import join, join_bits, split, split_bits

LARGEST_BF16 = (2 - 2**-7) * 2.0**127
FIRST_OVERFLOW = (2 - 2**-8) * 2.0**127


def _float(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _random_bits(n: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def _all_upper_halves_with(lower: int) -> Tensor:
    """Every sign, exponent and BF16 mantissa, with the given lower 16 bits."""
    return (torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16) + lower


def test_every_bit_pattern_survives_the_planes() -> None:
    edges = [_all_upper_halves_with(lower) for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    bits = torch.cat([_random_bits(1 << 20), *edges])
    assert torch.equal(join_bits(*split_bits(bits)), bits)


def test_finite_weights_are_split_losslessly_to_the_sign_of_zero() -> None:
    w = _float(torch.cat([_random_bits(1 << 20), torch.tensor([0, 1, -(2**31), -(2**31) + 1])]))
    w = w[w.abs() < FIRST_OVERFLOW]
    hi, lo = split(w)
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(hi, lo).view(torch.int32), w.view(torch.int32))


def test_hi_is_the_nearest_bf16_and_the_farther_from_zero_at_a_tie() -> None:
    w = _float(torch.cat([_random_bits(1 << 20, seed=1), _all_upper_halves_with(0x8000), _all_upper_halves_with(0)]))
    w = w[w.abs() < FIRST_OVERFLOW]
    hi, _ = split(w)
    nearest_even = w.to(torch.bfloat16)
    tie = (w.view(torch.int32) & 0xFFFF) == 0x8000
    assert tie.sum() > 60_000
    assert torch.equal(hi[~tie].view(torch.int16), nearest_even[~tie].view(torch.int16))
    away, exact = hi[tie].double(), w[tie].double()
    assert (away.abs() > exact.abs()).all()
    # At a tie both neighbours are equally far: away is even's own choice, or the mirror image of it.
    assert torch.equal((away - exact).abs(), (nearest_even[tie].double() - exact).abs())


def test_shape_and_layout_do_not_matter() -> None:
    w = torch.randn(6, 5).t()
    hi, lo = split(w)
    assert hi.shape == w.shape
    assert torch.equal(join(hi, lo), w)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_weight_and_the_first_that_is_too_large(sign: int) -> None:
    largest = torch.nextafter(torch.tensor(FIRST_OVERFLOW), torch.tensor(0.0)) * sign
    hi, lo = split(largest)
    assert hi.item() == LARGEST_BF16 * sign
    assert join(hi, lo) == largest
    with pytest.raises(ValueError, match=r"layers\.3\.up: .*finite as BF16.*flat index 2 \(1 such"):
        split(torch.tensor([1.0, 2.0, FIRST_OVERFLOW * sign]), "layers.3.up")


@pytest.mark.parametrize("bits", [0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, -0x00800000, -0x00400000])
def test_no_inf_and_no_nan_whatever_its_payload(bits: int) -> None:
    with pytest.raises(ValueError, match="finite as BF16"):
        split(_float(torch.tensor([0, bits])))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="must be float32"):
        split(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="hi bfloat16 and lo int16"):
        join(torch.zeros(2), torch.zeros(2, dtype=torch.int16))
    with pytest.raises(ValueError, match="of one shape"):
        join(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16))
