"""The embedding: a gather forward, and a backward that adds up the rows of equal tokens in one fixed order.

The usual backward adds rows with atomics, in whatever order threads arrive. Here the tokens are sorted (stable), so
equal tokens stand together in the order they had, and each run is summed as a balanced tree over that order:
occurrences (0, 1), (2, 3), ..., then pairs of pairs. The tree depends on the number of occurrences only, never on
threads, tiles or other tokens, and every step is elementwise, so the sums of one micro-batch have the same bits on
every device. log2(tokens) passes over the gradient are made.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE_COLUMNS = 512  # bounds the FP32 scratch to a few times tokens x 512; sums are by column, so no bit depends on it


def embedding_forward(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of `weight` [V, H] by `ids` [B, T]: the hidden state [B, T, H]."""
    with torch.no_grad():
        return torch.nn.functional.embedding(ids, weight)


def embedding_backward(
    ids: Tensor, dx: Tensor, acc: Tensor, *, first: bool = False, padding_idx: int | None = None
) -> None:
    """acc[v] += the sum of dx over the tokens equal to v, in FP32; `first` clears `acc` before.

    `ids` [B, T] int64, `dx` [B, T, H] in any float type, `acc` [V, H] FP32. Rows of several micro-batches are added one
    micro-batch sum after the other. `padding_idx` gets nothing, as in the library's embedding.
    """
    if first:
        acc.zero_()
    flat = ids.reshape(-1)
    rows, order = torch.sort(flat, stable=True)
    places = torch.arange(rows.numel(), device=rows.device)
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[1:] = rows[1:] != rows[:-1]
    first_of_run = torch.where(starts, places, 0).cummax(0).values
    if padding_idx is not None:
        keep = (rows != padding_idx)[:, None]
    for column in range(0, acc.shape[1], _TILE_COLUMNS):
        columns = slice(column, min(column + _TILE_COLUMNS, acc.shape[1]))
        sums = dx.reshape(-1, acc.shape[1])[:, columns].index_select(0, order).float()
        distance = 1
        while distance < rows.numel():
            # sums[i] covers occurrences i .. i + distance - 1 of its run; join it with the next as many.
            same = (rows[distance:] == rows[:-distance])[:, None]
            sums[:-distance] += torch.where(same, sums[distance:], 0.0)
            distance *= 2
        total = sums.index_select(0, first_of_run)
        if padding_idx is not None:
            total = torch.where(keep, total, 0.0)
        # Every occurrence writes its row's one new value, so no shape depends on how many rows there are.
        view = acc[:, columns]
        view.index_copy_(0, rows, view.index_select(0, rows) + total)
