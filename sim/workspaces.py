"""Workspaces: the memory an op takes beside the storages its schedule names, while it runs. Estimates, with their formulas.

A schedule's storages are exact. What is estimated here are the tensors that PyTorch makes inside an op and drops before it
ends. Throughout: T tokens of a micro-batch, H hidden, I intermediate, V vocabulary, q and kv the widths of all query and of all
key-value heads, n the bytes of a number in the type of the computation (2 or 4), S the sequence length.

Sources: the code of `megatrain/layers` (which tensors have a name at once), what a layer's forward hands to autograd's pack hook
(counted for Qwen2 and Qwen3, eager and compiled; equal to the byte), and what PyTorch's memory profiler counts on the cpu backend
(within 5%, see `tests/sim/test_ledger.py`). What a GPU's own kernels take has not been measured.

Not covered: what a compiled backward fuses away (the figures are those of eager code, so above), and blocks the allocator holds
beyond what is live (`sim.ledger.ALLOCATOR_SLACK`).
"""

from __future__ import annotations

from typing import NamedTuple

from megatrain.model import ModelSpec
from megatrain.recipe import DTYPE_NBYTES, Recipe

HEAD_ROWS = 8192
"""Rows of the head's gradient that are multiplied at once (`megatrain.layers.head`)."""
EMBEDDING_COLUMNS = 512
"""Columns of the embedding's gradient that are summed at once (`megatrain.layers.embedding`)."""


class Workspaces(NamedTuple):
    """Bytes beside the storages, by kind of op, for one micro-batch. `kept_*` are of layers that keep their activations: there,
    what the forward saved is a storage of its own (of `saved` bytes) and not part of these."""

    embedding_forward: int
    forward: int
    kept_forward: int
    loss: int
    backward: int
    kept_backward: int
    embedding_backward: int


def workspaces(model: ModelSpec, recipe: Recipe, *, on_host: bool) -> Workspaces:
    """The workspaces of every kind of op. `on_host`: the cpu backend, whose kernels differ in attention and in the head."""
    n, tokens = DTYPE_NBYTES[recipe.precision], recipe.tokens_per_micro_batch
    hidden = tokens * model.hidden_size
    saved, scores = saved_nbytes(model, recipe, on_host=on_host), attention_nbytes(model, recipe, on_host=on_host)
    # At the end the last product, the output and (unless it is saved itself) the residual stream; in attention scores, while
    # what the MLP saves is not there yet.
    inside = max(hidden * (6 if n == 2 else 8), scores.passing - 3 * tokens * model.intermediate_size * n)
    kept_backward = _backward(model, recipe, saved, scores.passing, on_host=on_host)
    return Workspaces(
        embedding_forward=hidden * n,
        forward=saved + inside,
        kept_forward=inside,
        loss=_loss(model, recipe, on_host=on_host),
        backward=saved + max(inside, kept_backward),
        kept_backward=kept_backward,
        embedding_backward=_embedding_backward(model, recipe),
    )


def saved_nbytes(model: ModelSpec, recipe: Recipe, *, on_host: bool) -> int:
    """What one layer's forward saves for its backward, beyond its input: one micro-batch.

    Eager code: `ModelSpec.saved_bytes_per_token`. Compiled: the rows of both norms, the residual stream between them (3 H), q, k,
    v and attention's output (2 q + 2 kv), gate, up and their product (3 I), each n bytes, and in FP32 a number for each head and
    for each norm; Qwen3's norms of q and k add their inputs. Both add what attention holds for a score (`attention_nbytes`).
    """
    n, q, kv = DTYPE_NBYTES[recipe.precision], model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    a_token = model.saved_bytes_per_token(n)
    if recipe.compiled:
        fused = n * (3 * model.hidden_size + 2 * q + 2 * kv + 3 * model.intermediate_size) + 4 * model.n_heads + 8
        if model.architecture == "qwen3":
            fused += n * (q + kv) + 4 * (model.n_heads + model.n_kv_heads)
        a_token = min(a_token, fused)
    return recipe.tokens_per_micro_batch * a_token + attention_nbytes(model, recipe, on_host=on_host).saved


class AttentionBytes(NamedTuple):
    """What attention adds because it writes scores to memory: saved for the backward, and only passing."""

    saved: int
    passing: int


def attention_nbytes(model: ModelSpec, recipe: Recipe, *, on_host: bool) -> AttentionBytes:
    """Zero for a fused kernel. With s = rows x heads x S x S scores:

    eager: the softmax in FP32 and, in BF16, its rounded copy are saved (4 + n) s, and keys and values repeated for every query
    head; scores and masked scores pass, 2 n s. A mask of segments: keys and values are repeated too, and a fused kernel takes the
    mask as numbers. On a GPU no such kernel is repeatable, so a deterministic recipe gets PyTorch's plain one, which saves
    probabilities and widened q, k, v in FP32, and scores pass.
    """
    n, tokens = DTYPE_NBYTES[recipe.precision], recipe.tokens_per_micro_batch
    scores = recipe.micro_batch_size * model.n_heads * recipe.seq_len**2
    queries = tokens * model.n_heads * model.head_dim
    # Keys and values of all query heads in place of those of the key-value heads.
    repeated = 2 * n * (queries - tokens * model.n_kv_heads * model.head_dim)
    if recipe.attention == "eager":
        return AttentionBytes(scores * (4 if n == 4 else 4 + n) + repeated, 2 * scores * n)
    if recipe.attention_mask == "causal":
        return AttentionBytes(0, 0)
    if recipe.deterministic and not on_host:
        return AttentionBytes(4 * scores + repeated + (12 * queries if n == 2 else 0), 4 * scores)
    return AttentionBytes(repeated + recipe.micro_batch_size * recipe.seq_len**2 * n, 0)


def _backward(model: ModelSpec, recipe: Recipe, saved: int, scores: int, *, on_host: bool) -> int:
    """A layer's backward beside what its forward saved; the largest of three moments.

    In the MLP: two gradients as wide as it (2 T I n; what a product saved goes when its own appears) and that of one matrix;
    compiled for a GPU one of the two takes the place of what was saved (seen on an H200, to 2 MiB in 3.1 GiB). In
    attention: gradients of all weights (in the type of the computation) and of q, k, v and output, a norm's in FP32 (8 T H),
    scores twice, while what the MLP and its norm saved is gone (4 T I n and (4 + 2 n) T H; compiled 3 T I n and n T H). At the
    end: gradients of all weights, widened to FP32 for every micro-batch after the first, and of the input, while all that was
    saved is gone.
    """
    n, tokens = DTYPE_NBYTES[recipe.precision], recipe.tokens_per_micro_batch
    hidden, wide = tokens * model.hidden_size, tokens * model.intermediate_size
    heads = tokens * (2 * model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    numel = max(block.numel for block in model.layers)
    widened = 4 * numel if recipe.micro_batches > 1 and n < 4 else 0
    in_mlp = (1 if recipe.compiled and not on_host else 2) * wide * n + model.hidden_size * model.intermediate_size * n
    gone = 3 * wide * n + hidden * n if recipe.compiled else 4 * wide * n + hidden * (4 + 2 * n)
    in_attention = numel * n + heads * n + 8 * hidden + 2 * scores - gone
    at_end = numel * n + widened + hidden * n - saved
    return max(in_mlp, in_attention, at_end)


def _loss(model: ModelSpec, recipe: Recipe, *, on_host: bool) -> int:
    """The head: of a tile of t tokens, and throughout the gradient of all hidden rows (n T H).

    A GPU in BF16: logits become their gradient in place (n t V, and 4 t for the losses) and the matmul adds to dW itself. Beside
    them, what the tile's norm saved and its output, and the tile's hidden gradient ((8 + n) t H). When the logits are gone, the
    norm's backward (28 t H), which counts where the vocabulary is less than 9 times as wide as the hidden state. Counted with the
    head's own code on the CPU, the kernel and the matmul left out: within 0.1% (`tests/sim/test_ledger.py`).

    Otherwise: logits in the type of the computation and in FP32 ((4 + n) t V), of which the gradient stays (n t V; in FP32 the
    three are one, 4 t V). While it stays there is one product of `HEAD_ROWS` rows in FP32 (for which BF16 operands are widened).
    Beside either, the tile's hidden gradient and norm.
    """
    n, tokens = DTYPE_NBYTES[recipe.precision], recipe.tokens_per_micro_batch
    tile, hidden, rows = min(recipe.loss_tile, tokens), model.hidden_size, min(HEAD_ROWS, model.vocab_size)
    gradient, beside = n * tile * model.vocab_size, tile * hidden * (8 + n)
    if n < 4 and not on_host:
        return tokens * hidden * n + 4 * tile + max(gradient + beside, 28 * tile * hidden)
    product, widened = 4 * rows * hidden + n * tile * hidden, 0
    if n < 4:
        product, widened = product + 4 * tile * (rows + hidden), 4 * tile * model.vocab_size
    return tokens * hidden * n + beside + gradient + max(widened, product)


def _embedding_backward(model: ModelSpec, recipe: Recipe) -> int:
    """Token order and runs (6 vectors of int64), and of `EMBEDDING_COLUMNS` columns four times the rows in FP32: sums, a shifted
    copy, its product and the result."""
    tokens, columns = recipe.tokens_per_micro_batch, min(EMBEDDING_COLUMNS, model.hidden_size)
    return tokens * (48 + columns * 16)
