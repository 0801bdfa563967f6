"""The embedding's backward: exact sums, one order, linear memory."""

from __future__ import annotations

import pytest
import torch

from megatrain.layers.embedding import embedding_backward, embedding_forward


def tree_sum(rows: torch.Tensor) -> torch.Tensor:
    """The documented order, written down independently: neighbours first, then pairs of pairs."""
    while len(rows) > 1:
        pairs = rows[0 : len(rows) // 2 * 2 : 2] + rows[1 : len(rows) // 2 * 2 : 2]
        rows = torch.cat([pairs, rows[len(rows) // 2 * 2 :]])
    return rows[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden_size", [7, 1030])
def test_each_row_is_the_tree_sum_of_its_occurrences_to_the_bit(dtype: torch.dtype, hidden_size: int) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (3, 19))
    ids[1] = 4
    dx = torch.randn(3, 19, hidden_size).to(dtype)
    acc = torch.randn(13, hidden_size)
    expected = acc.clone()
    for row in ids.unique().tolist():
        expected[row] += tree_sum(dx[ids == row].float())
    embedding_backward(ids, dx, acc)
    assert torch.equal(acc, expected)


def test_it_agrees_with_autograd() -> None:
    torch.manual_seed(0)
    ids, weight = torch.randint(0, 9, (4, 25)), torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    dx = torch.randn(4, 25, 6)
    torch.nn.functional.embedding(ids, weight, padding_idx=3).backward(dx.double())
    acc = torch.full((10, 6), float("nan"))
    embedding_backward(ids, dx, acc, first=True, padding_idx=3)
    torch.testing.assert_close(acc.double(), weight.grad, rtol=1e-6, atol=1e-6)
    assert torch.equal(acc[3], torch.zeros(6))


def test_micro_batches_add_their_sums_in_order_and_threads_do_not_matter() -> None:
    torch.manual_seed(0)
    ids, dx = torch.randint(0, 5, (2, 4, 300)), torch.randn(2, 4, 300, 40)
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            acc = torch.empty(8, 40)
            embedding_backward(ids[0], dx[0], acc, first=True)
            embedding_backward(ids[1], dx[1], acc)
            results.append(acc)
    finally:
        torch.set_num_threads(threads)
    parts = [torch.zeros(8, 40), torch.zeros(8, 40)]
    for part, i, d in zip(parts, ids, dx, strict=True):
        embedding_backward(i, d, part)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], parts[0] + parts[1])


def test_one_token_and_forward() -> None:
    weight, ids = torch.randn(5, 3), torch.tensor([[2]])
    assert torch.equal(embedding_forward(weight, ids), weight[ids])
    acc, dx = torch.zeros(5, 3), torch.randn(1, 1, 3)
    embedding_backward(ids, dx, acc)
    assert torch.equal(acc[2], dx[0, 0]) and int((acc != 0).any(1).sum()) == 1


def test_a_large_vocabulary_costs_nothing_but_its_accumulator() -> None:
    """200,000 rows x 4,096 tokens would be 3 GB as one-hot columns; the work here is by tokens."""
    ids, dx = torch.randint(0, 200_000, (1, 4096)), torch.randn(1, 4096, 16)
    acc = torch.zeros(200_000, 16)
    embedding_backward(ids, dx, acc)
    torch.testing.assert_close(acc.sum(0), dx.sum((0, 1)), rtol=1e-3, atol=1e-3)
