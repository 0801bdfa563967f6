"""The head on a GPU in BF16: the Triton cross-entropy alone, and loss and gradients in tiles with it."""

from __future__ import annotations

import os

# cuBLAS reads this when its first handle is made; without it deterministic algorithms refuse to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import Tensor

from megatrain.layers.head import HeadTemplate, head_template
from megatrain.layers.inputs import IGNORE
from megatrain.model import ModelSpec
from megatrain.recipe import Recipe
from sim.workspaces import workspaces
from tests.layers.small import small_config
from tests.layers.test_head import close, plain

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Less than a block of the kernel, odd; a few blocks, odd and a multiple of 16 (which decides the width of loads).
VOCABULARIES = [131, 9001, 8208]
VALID = 39
Step = tuple[Tensor, Tensor, list[Tensor]]


def make(
    vocab: int, hidden: int = 64, shape: tuple[int, int] = (2, 23), dtype: torch.dtype = torch.bfloat16
) -> tuple[HeadTemplate, tuple[Tensor, Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = ModelSpec.from_config(small_config("llama", **sizes))
    norm, matrix = 1 + 0.1 * torch.randn(hidden), 0.3 * torch.randn(vocab, hidden)
    x, targets = torch.randn(*shape, hidden), torch.randint(0, vocab, shape)
    targets[0, 5:11] = IGNORE
    targets[1, -1] = IGNORE
    weights = (norm.to("cuda", dtype), matrix.to("cuda", dtype))
    return head_template(model), weights, x.to("cuda", dtype), targets.cuda()


def step(head: HeadTemplate, weights: tuple[Tensor, Tensor], x: Tensor, targets: Tensor, n_valid: int, tile: int) -> Step:
    grads = [torch.full(w.shape, float("nan"), device="cuda") for w in weights]
    loss, dx = head.loss_forward_backward(weights, x, targets, n_valid, tile, grads, True)
    return loss, dx, grads


def logits_and_targets(rows: int, vocab: int, spread: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    logits = (torch.randn(rows, vocab) * spread).bfloat16().cuda()
    targets = torch.randint(0, vocab, (rows,))
    targets[0], targets[1], targets[2::5] = 0, vocab - 1, IGNORE
    return logits, targets.cuda()


# ---- the kernel ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 1031, 4096, 4097, 152064])
@pytest.mark.parametrize("spread", [1.0, 40.0, 1e4])
def test_the_kernel_is_the_formula(vocab: int, spread: float) -> None:
    from megatrain.layers import triton_loss

    logits, targets = logits_and_targets(70, vocab, spread)
    z, valid = logits.double(), targets != IGNORE
    target = torch.where(valid, targets, 0)[:, None]
    lse = z.logsumexp(1, keepdim=True)
    expected_losses = torch.where(valid, (lse - z.gather(1, target))[:, 0], 0.0)
    expected = (z - lse).exp().scatter_add(1, target, torch.full_like(lse, -1.0)) * (valid[:, None] / 50)

    losses = triton_loss.cross_entropy(logits, targets, 50, gradient=True)
    # Beside the relative error: z - m is rounded to FP32 where the logits are large.
    assert torch.allclose(losses.double(), expected_losses, rtol=1e-5, atol=1e-6 + 2e-7 * spread * 6)
    # Half a unit in BF16's last place; at the target 1 is taken from a softmax that may be almost 1.
    error = (logits.double() - expected).abs()
    assert bool((error <= expected.abs() * 2**-8 * 1.01 + 3e-7 / 50).all()), float(error.max())
    assert not losses[~valid].any() and not logits[~valid].any()


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_kernel_has_the_same_bits_again_alone_and_without_gradient(vocab: int) -> None:
    from megatrain.layers import triton_loss

    logits, targets = logits_and_targets(33, vocab, 3.0)
    first, again, kept, part = logits.clone(), logits.clone(), logits.clone(), logits[3:4].clone()
    losses = triton_loss.cross_entropy(first, targets, 9, gradient=True)
    assert torch.equal(losses, triton_loss.cross_entropy(again, targets, 9, gradient=True)) and torch.equal(first, again)
    assert torch.equal(losses, triton_loss.cross_entropy(kept, targets, 9, gradient=False)) and torch.equal(kept, logits)
    # A row's bits do not depend on the rows beside it.
    assert torch.equal(losses[3:4], triton_loss.cross_entropy(part, targets[3:4].clone(), 9, gradient=True))
    assert torch.equal(first[3:4], part)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_shows_unless_it_is_ignored(bad: float) -> None:
    from megatrain.layers import triton_loss

    logits, targets = torch.randn(3, 5000).bfloat16().cuda(), torch.tensor([7, 8, IGNORE], device="cuda")
    logits[1:, 4500] = bad
    losses = triton_loss.cross_entropy(logits, targets, 2, gradient=True)
    assert losses.isfinite().tolist() == [True, False, True]
    assert logits.isfinite().all(1).tolist() == [True, False, True]


# ---- the head ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("tile", [1, 10, 46, 1000])
def test_any_tile_gives_the_full_matrix_results(vocab: int, tile: int) -> None:
    head, weights, x, targets = make(vocab)
    loss, dx, grads = step(head, weights, x, targets, VALID, tile)
    expected_loss, expected_dx, expected_grads = plain(weights, x, targets, VALID)
    assert loss.dtype == torch.float32 and dx.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in grads)
    assert float(loss) == pytest.approx(float(expected_loss), rel=5e-3)
    assert close(dx, expected_dx, 0.02) and all(close(g, e, 0.02) for g, e in zip(grads, expected_grads, strict=True))


def test_fp32_has_no_such_rounding() -> None:
    """The FP32 recipe takes the plain code on a GPU too."""
    head, weights, x, targets = make(1031, dtype=torch.float32)
    loss, dx, grads = step(head, weights, x, targets, VALID, 10)
    expected_loss, expected_dx, expected_grads = plain(weights, x, targets, VALID)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert close(dx, expected_dx, 1e-5) and all(close(g, e, 1e-5) for g, e in zip(grads, expected_grads, strict=True))
    assert torch.equal(head.loss_only(weights, x, targets, VALID, 10), loss)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_repetition_and_evaluation_have_the_same_bits(vocab: int) -> None:
    head, weights, x, targets = make(vocab)
    loss, dx, grads = step(head, weights, x, targets, VALID, 7)
    for _ in range(5):
        again_loss, again_dx, again_grads = step(head, weights, x, targets, VALID, 7)
        assert torch.equal(loss, again_loss) and torch.equal(dx, again_dx)
        assert all(torch.equal(a, b) for a, b in zip(grads, again_grads, strict=True))
        assert torch.equal(head.loss_only(weights, x, targets, VALID, 7), loss)


def test_ignored_tokens_have_exactly_zero_gradient() -> None:
    head, weights, x, targets = make(9001)
    _, dx, grads = step(head, weights, x, targets, VALID, 8)
    assert not dx[targets == IGNORE].any() and bool((dx[targets != IGNORE] != 0).any(-1).all())
    # What an ignored token's hidden state is does not matter to any bit.
    other = x.clone()
    other[targets == IGNORE] = torch.randn(7, 64, device="cuda").bfloat16()
    assert all(torch.equal(a, b) for a, b in zip(grads, step(head, weights, other, targets, VALID, 8)[2], strict=True))


def test_no_valid_token_gives_zeros() -> None:
    head, weights, x, targets = make(9001)
    loss, dx, grads = step(head, weights, x, torch.full_like(targets, IGNORE), 0, 8)
    assert float(loss) == 0 and not dx.any() and not any(g.any() for g in grads)


def test_later_micro_batches_add() -> None:
    head, weights, x, targets = make(9001)
    _, _, grads = step(head, weights, x, targets, VALID, 8)
    twice = [g.clone() for g in grads]
    head.loss_forward_backward(weights, x, targets, VALID, 8, twice, False)
    assert all(close(t, 2 * g, 1e-6) for t, g in zip(twice, grads, strict=True))


@pytest.mark.parametrize("vocab", [32000, 1000])
def test_its_memory_is_what_the_simulator_counts(vocab: int) -> None:
    """Two bytes a logit of a tile, no product of the size of dW; with few words the norm's backward is the most."""
    recipe = Recipe(micro_batch_size=2, seq_len=1024, loss_tile=512)
    head, weights, x, targets = make(vocab, 256, (2, 1024))
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = ModelSpec.from_config(small_config("llama", vocab_size=vocab, hidden_size=256, **heads))
    grads = [torch.zeros(w.shape, device="cuda") for w in weights]

    def run() -> None:
        head.loss_forward_backward(weights, x, targets, 2041, recipe.loss_tile, grads, True)

    run()  # cuBLAS takes its workspace once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    got = torch.cuda.max_memory_allocated() - before
    assert 0.9 * got - (64 << 10) <= workspaces(model, recipe, on_host=False).loss <= 1.1 * got
