"""The head: final norm, output matrix and loss, forward and backward together, in tiles of tokens x the full
vocabulary.

Logits are the largest tensor of a training step and nobody needs them twice. So for each tile of tokens the logits are
made, turned into the loss and at once into their own gradient, multiplied out and dropped; the full matrix never
exists. For a tile of hidden rows x with norm output h and logits z = h W^T in the compute type, widened to FP32:

    loss    = sum over valid tokens of logsumexp(z) - z[target], divided by n_valid, the valid tokens of the whole step
    dz      = (softmax(z) - onehot(target)) / n_valid   in FP32, 0 for ignored rows, rounded to the compute type
    dh      = dz W,   dW += dz^T h   (each tile's product added in FP32, in tile order)

A tied head is given the embedding's matrix and its accumulator. Evaluation runs the same forward code, so its loss has
the same bits.

On a GPU in BF16 no FP32 logit is ever in memory: one kernel reads the rounded logits, works in FP32 and writes dz over
them (`megatrain.layers.triton_loss`), and the matmul itself adds its FP32 product to dW. Elsewhere, and in FP32, plain
PyTorch does the same in more passes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.layers.gradients import accumulate, gradients
from megatrain.layers.hf import CLASSES
from megatrain.layers.inputs import IGNORE
from megatrain.model import ModelSpec

# Rows of dW multiplied at once where the product is a tensor of its own: bounds its memory to 8192 x hidden. Part of the
# bits, like the tile.
_ROWS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTemplate:
    """A model's head as functions of explicit weights: (norm weight [H], output matrix [V, H])."""

    norm: nn.Module

    def loss_forward_backward(
        self,
        weights: Sequence[Tensor],
        x: Tensor,
        targets: Tensor,
        n_valid: int,
        tile: int,
        grads: Sequence[Tensor],
        first: bool,
    ) -> tuple[Tensor, Tensor]:
        """(loss, dx) of one micro-batch; adds the weights' gradients to `grads`, or overwrites them if `first`.

        `x` [B, T, H] in the compute type, `targets` [B, T] int64 with `IGNORE` for no loss, `grads` FP32 with the
        weights' shapes. `loss` is an FP32 scalar: this micro-batch's part of the step's mean. With `n_valid` 0 all
        results are zeros.
        """
        rows, wanted = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        dx = torch.empty_like(rows)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, rows.shape[0], tile):
            part = slice(start, start + tile)
            loss += self._tile(weights, rows[part], wanted[part], n_valid, grads, dx[part], first=first and start == 0)
        return loss / max(n_valid, 1), dx.view_as(x)

    def _tile(
        self, weights: Sequence[Tensor], rows: Tensor, targets: Tensor, n_valid: int, grads: Sequence[Tensor], dx: Tensor, *,
        first: bool,
    ) -> Tensor:  # fmt: skip
        """The sum of a tile's losses; writes `dx` and adds to `grads`. All else is gone when it returns: what little were left
        of it might lie where the next tile's logits would have found room."""
        norm_weight, matrix = weights
        with torch.enable_grad():
            row_leaf, norm_leaf = rows.detach().requires_grad_(), norm_weight.detach().requires_grad_()
            h = functional_call(self.norm, {"weight": norm_leaf}, (row_leaf,))
        with torch.no_grad():
            hidden = h.detach()
            losses, dz = _loss_gradient(hidden, matrix, targets, n_valid)
            loss = losses.sum()
            _add_product(grads[1], dz, hidden, first)
            dh = dz @ matrix
        del dz  # else it is there still in the norm's backward
        of_rows, dnorm = gradients(h, (row_leaf, norm_leaf), dh)
        dx.copy_(of_rows)
        accumulate([grads[0]], [dnorm], first)
        return loss

    @torch.no_grad()
    def loss_only(self, weights: Sequence[Tensor], x: Tensor, targets: Tensor, n_valid: int, tile: int) -> Tensor:
        """The loss of `loss_forward_backward`, to the bit, without gradients."""
        norm_weight, matrix = weights
        rows, wanted = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, rows.shape[0], tile):
            part = slice(start, start + tile)
            hidden = functional_call(self.norm, {"weight": norm_weight}, (rows[part],))
            loss += _losses(hidden, matrix, wanted[part], n_valid).sum()
            del hidden  # as in `_tile`
        return loss / max(n_valid, 1)


def _loss_gradient(hidden: Tensor, matrix: Tensor, targets: Tensor, n_valid: int) -> tuple[Tensor, Tensor]:
    """One tile's losses ([n] or [n, 1], FP32, 0 where ignored) and dz [n, V] in the compute type."""
    if _fused(hidden):
        from megatrain.layers import triton_loss

        dz = hidden @ matrix.t()
        return triton_loss.cross_entropy(dz, targets, n_valid, gradient=True), dz
    losses, exponents, sums, target, valid = _cross_entropy(hidden, matrix, targets)
    scale = valid.float() / max(n_valid, 1)
    dz = exponents.div_(sums)
    dz.scatter_(1, target, dz.gather(1, target) - 1.0)
    return losses, dz.mul_(scale).to(hidden.dtype)


def _losses(hidden: Tensor, matrix: Tensor, targets: Tensor, n_valid: int) -> Tensor:
    """The losses of `_loss_gradient`, to the bit."""
    if _fused(hidden):
        from megatrain.layers import triton_loss

        return triton_loss.cross_entropy(hidden @ matrix.t(), targets, n_valid, gradient=False)
    return _cross_entropy(hidden, matrix, targets)[0]


def _fused(t: Tensor) -> bool:
    """Whether GPU kernels do the work for tensors of this place and type. Triton is imported where they do only: a
    machine without a GPU has none."""
    return t.is_cuda and t.dtype != torch.float32


def _cross_entropy(hidden: Tensor, matrix: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One tile's (losses, exp(z - max z), its row sums, targets, valid): [n, V] the second, [n, 1] the others.

    Losses and targets are 0 where a token is ignored.
    """
    logits = (hidden @ matrix.t()).float()
    valid = (targets != IGNORE)[:, None]
    target = torch.where(valid, targets[:, None], 0)
    # In place from here on: one FP32 tile exists at a time.
    logits.sub_(logits.amax(1, keepdim=True))
    shifted = logits.gather(1, target)
    sums = logits.exp_().sum(1, keepdim=True)
    losses = torch.where(valid, sums.log() - shifted, 0.0)
    return losses, logits, sums, target, valid


def head_template(model: ModelSpec) -> HeadTemplate:
    """The head of `model`, its norm the library's own class on the meta device."""
    eps = float(json.loads(model.config_json)["rms_norm_eps"])
    with torch.device("meta"):
        return HeadTemplate(norm=CLASSES[model.architecture].norm(model.hidden_size, eps=eps).eval())


def _add_product(acc: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """acc [V, H] = a^T b if `first` else acc + a^T b, from operands in the compute type [n, V] and [n, H]: their products
    are summed in FP32 and not rounded to it."""
    if _fused(a):
        # The matmul adds to the accumulator itself: no product in memory, and one pass over dW less for each tile.
        if first:
            torch.mm(a.t(), b, out_dtype=torch.float32, out=acc)
        else:
            torch.addmm(acc, a.t(), b, out_dtype=torch.float32, out=acc)
        return
    for row in range(0, acc.shape[0], _ROWS):
        block = slice(row, row + _ROWS)
        accumulate([acc[block]], [a[:, block].t().float() @ b.float()], first)
