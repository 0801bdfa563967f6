"""The head's loss and gradients in tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.layers.head import HeadTemplate, head_template
from megatrain.layers.inputs import IGNORE
from megatrain.model import ModelSpec
from tests.layers.small import small_config

V, H = 131, 42
Step = tuple[Tensor, Tensor, list[Tensor]]


def make(dtype: torch.dtype = torch.float32) -> tuple[HeadTemplate, tuple[Tensor, Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    head = head_template(ModelSpec.from_config(small_config("llama")))
    weights = ((1 + 0.1 * torch.randn(H)).to(dtype), (0.3 * torch.randn(V, H)).to(dtype))
    x, targets = torch.randn(2, 23, H).to(dtype), torch.randint(0, V, (2, 23))
    targets[0, 5:11] = IGNORE
    targets[1, -1] = IGNORE
    return head, weights, x, targets


def step(
    head: HeadTemplate, weights: tuple[Tensor, Tensor], x: Tensor, targets: Tensor, n_valid: int, tile: int
) -> Step:
    grads = [torch.full((H,), float("nan")), torch.full((V, H), float("nan"))]
    loss, dx = head.loss_forward_backward(weights, x, targets, n_valid, tile, grads, True)
    return loss, dx, grads


def plain(weights: tuple[Tensor, Tensor], x: Tensor, targets: Tensor, n_valid: int) -> Step:
    """The same by ordinary autograd, in FP64, with the full logits matrix."""
    leaves = [t.detach().double().requires_grad_() for t in (*weights, x)]
    norm, matrix, rows = leaves
    h = norm * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
    logits = (h @ matrix.t()).flatten(0, -2)
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / n_valid
    grads = torch.autograd.grad(loss, leaves)
    return loss.detach(), grads[2], list(grads[:2])


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return float((a.double() - b.double()).norm()) <= tolerance * float(b.double().norm())


@pytest.mark.parametrize("tile", [1, 7, 46, 1000])
def test_any_tile_gives_the_full_matrix_results(tile: int) -> None:
    head, weights, x, targets = make()
    loss, dx, grads = step(head, weights, x, targets, 39, tile)
    expected_loss, expected_dx, expected_grads = plain(weights, x, targets, 39)
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert close(dx, expected_dx, 2e-6)
    assert all(close(got, expected, 2e-6) for got, expected in zip(grads, expected_grads, strict=True))


def test_bf16_rounds_but_does_not_drift() -> None:
    head, weights, x, targets = make(torch.bfloat16)
    loss, dx, grads = step(head, weights, x, targets, 39, 10)
    expected_loss, expected_dx, expected_grads = plain(weights, x, targets, 39)
    assert dx.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in grads)
    assert float(loss) == pytest.approx(float(expected_loss), rel=5e-3)
    assert close(dx, expected_dx, 0.02) and all(close(g, e, 0.02) for g, e in zip(grads, expected_grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ignored_tokens_have_exactly_zero_gradient(dtype: torch.dtype) -> None:
    head, weights, x, targets = make(dtype)
    _, dx, grads = step(head, weights, x, targets, 39, 8)
    assert bool((dx[targets == IGNORE] == 0).all()) and bool((dx[targets != IGNORE] != 0).any(-1).all())
    # What an ignored token's hidden state is does not matter to any bit.
    other = x.clone()
    other[targets == IGNORE] = torch.randn(7, H).to(dtype)
    assert all(torch.equal(a, b) for a, b in zip(grads, step(head, weights, other, targets, 39, 8)[2], strict=True))


def test_no_valid_token_gives_zeros() -> None:
    head, weights, x, targets = make()
    loss, dx, grads = step(head, weights, x, torch.full_like(targets, IGNORE), 0, 8)
    assert float(loss) == 0 and not dx.any() and not any(g.any() for g in grads)


def test_evaluation_has_the_same_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        head, weights, x, targets = make(dtype)
        assert torch.equal(head.loss_only(weights, x, targets, 39, 7), step(head, weights, x, targets, 39, 7)[0])


def test_later_micro_batches_add() -> None:
    head, weights, x, targets = make()
    _, _, grads = step(head, weights, x, targets, 39, 8)
    twice = [g.clone() for g in grads]
    head.loss_forward_backward(weights, x, targets, 39, 8, twice, False)
    assert all(close(t, 2 * g, 1e-6) for t, g in zip(twice, grads, strict=True))


def test_large_logits_stay_finite() -> None:
    head, weights, x, targets = make()
    loss, dx, grads = step(head, (weights[0], weights[1] * 1e4), x, targets, 39, 8)
    assert all(bool(t.isfinite().all()) for t in (loss, dx, *grads))


def test_no_full_logits_matrix_exists() -> None:
    """The largest tensor any operation makes has tile x vocabulary elements, not tokens x vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, Tensor):
                    self.numel = max(self.numel, t.numel())
            return out

    head, weights, _, _ = make()
    x, targets = torch.randn(4, 100, H), torch.randint(0, V, (4, 100))
    grads = [torch.zeros(H), torch.zeros(V, H)]
    with Largest() as largest:
        head.loss_forward_backward(weights, x, targets, 400, 50, grads, True)
    assert largest.numel == max(4 * 100 * H, V * H, 50 * V)
