"""The last product of a decoder layer, as an operation that can be left out.

A layer ends with its MLP's `down_proj`, added to the residual stream. Nothing that the backward needs depends on the result: so
where a layer is run again only to save what its backward needs, that product, 29% of the layer's FLOPs in Qwen2.5-7B, is for
nothing. A compiled layer must not be another graph for that, since another graph may have other bits. So the product is an
operation that the compiler does not look into, and whether it computes anything is decided as it runs.

Both gradients are products of their own and see neither the result nor whether there was one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class _Omit(threading.local):
    on = False


_omit = _Omit()


@contextmanager
def omitted() -> Iterator[None]:
    """In this context the calling thread's last products are not computed: their results hold whatever lies in memory."""
    _omit.on = True
    try:
        yield
    finally:
        _omit.on = False


@torch.library.custom_op("megatrain::last_product", mutates_args=())
def last_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., n] times weight [m, n] transposed, plus bias [m]: [..., m]."""
    if _omit.on:
        return _uncomputed(x, weight)
    return nn.functional.linear(x, weight, bias)


def _uncomputed(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@last_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _uncomputed(x, weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = bias is not None


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight = ctx.saved_tensors
    rows = dy.reshape(-1, dy.shape[-1])
    dw = rows.t() @ x.reshape(-1, x.shape[-1])
    return (rows @ weight).view(x.shape), dw, rows.sum(0) if ctx.biased else None


last_product.register_autograd(_gradients, setup_context=_save)


class _LastProduct(nn.Module):
    """Stands in for a layer's last `nn.Linear`, with its parameters under the same names."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = last_product(x, self.weight, self.bias)
        return result


def leave_out_last_product(layer: nn.Module) -> None:
    """Let `omitted` govern the last product of a decoder layer. AttributeError for one that does not end with `mlp.down_proj`."""
    mlp, last = layer.get_submodule("mlp"), layer.get_submodule("mlp.down_proj")
    assert isinstance(last, nn.Linear), last
    mlp.down_proj = _LastProduct(last)
