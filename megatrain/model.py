"""ModelSpec: a model as blocks with parameter counts, bytes, FLOPs and activation bytes. No times, no tensors, no
torch.

Blocks stand in the order a token meets them: the embedding (block 0), the decoder layers (1..L) and the head (L+1:
final norm and, unless tied, the output matrix). A tied head owns only its norm and reads the embedding's matrix.

A spec comes from a Hugging Face `config.json` alone (`megatrain.config`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

BlockKind = Literal["embedding", "layer", "head"]
Architecture = Literal["llama", "qwen2", "qwen3", "mistral"]

ALIGN_ELEMENTS = 128
"""Parameters start at multiples of this many elements: 256 bytes in BF16, 512 in FP32, so in every plane at least 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter. `name` is its Hugging Face name within the model; `offset` its first element within the block."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """One block. `numel` counts parameters; `span` elements of storage (parameters aligned to `ALIGN_ELEMENTS`).

    `tied` marks a head that owns only its norm and multiplies by the embedding's matrix. FLOPs and activation bytes
    depend on the whole model's sizes and are methods of `ModelSpec`.
    """

    index: int
    kind: BlockKind
    params: tuple[ParamSpec, ...]
    tied: bool = False

    @property
    def layer(self) -> int | None:
        """The decoder layer's number, from 0; None for the embedding and the head."""
        return self.index - 1 if self.kind == "layer" else None

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @property
    def span(self) -> int:
        return align(self.params[-1].end)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only model. Sizes are in elements, `sliding_window` and `max_position_embeddings` in tokens.

    `padding_idx` is the token whose embedding row the library gives no gradient (its `pad_token_id`). `config_json` is
    the resolved config in the present spelling, keys sorted: the library's config class rebuilds the same config from
    it.
    """

    name: str
    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    tied: bool
    sliding_window: int | None
    max_position_embeddings: int
    padding_idx: int | None
    blocks: tuple[BlockSpec, ...]
    config_json: str

    @staticmethod
    def from_config(source: Mapping[str, Any] | str | Path, *, name: str | None = None) -> ModelSpec:
        """The spec of a config: a mapping, the path of a `config.json`, or of a directory that holds one.

        Raises ValueError for a config that is not one of the four architectures or asks for something the templates do
        not compute exactly, FileNotFoundError for a path without a config.
        """
        if isinstance(source, Mapping):
            config, default_name = dict(source), ""
        else:
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            config = json.loads(path.read_text(encoding="utf-8"))
            default_name = path.parent.name if path.name == "config.json" else path.stem
            if not isinstance(config, dict):
                raise ValueError(f"{path}: must hold a JSON object, got {type(config).__name__}")
        from megatrain.config import spec_of  # here, since it makes specs

        return spec_of(config, name or default_name)

    @property
    def embedding(self) -> BlockSpec:
        return self.blocks[0]

    @property
    def layers(self) -> tuple[BlockSpec, ...]:
        return self.blocks[1:-1]

    @property
    def head(self) -> BlockSpec:
        return self.blocks[-1]

    @property
    def numel(self) -> int:
        """Parameters of the model; a tied matrix counts once."""
        return sum(block.numel for block in self.blocks)

    def forward_flops_per_token(self, block: BlockSpec) -> int:
        """FLOPs of the block's matrix products in a forward, for one token: 2 a weight. A backward costs twice that.

        Attention scores are left out (`attention_flops`), so are norms, rotations and activations. The embedding
        gathers: 0.
        """
        if block.kind == "embedding":
            return 0
        if block.kind == "head":
            return 2 * self.vocab_size * self.hidden_size
        return 2 * sum(p.numel for p in block.params if len(p.shape) == 2)

    def last_product_flops_per_token(self) -> int:
        """FLOPs of a decoder layer's last matrix product, for one token. A forward that runs again for the sake of what the
        backward needs leaves it out."""
        return 2 * self.intermediate_size * self.hidden_size

    def attention_flops(self, tokens: int, seq_len: int) -> int:
        """FLOPs of one layer's attention scores and weighted values in a causal forward over `tokens` in rows of
        `seq_len`.

        A row has seq_len (seq_len + 1) / 2 visible pairs; each costs 2 head_dim for its score and 2 head_dim for its
        value, in every query head. Kernels that do not skip the hidden pairs do almost twice as much.
        """
        return 2 * self.n_heads * self.head_dim * (seq_len + 1) * tokens

    def saved_bytes_per_token(self, precision_nbytes: int) -> int:
        """Bytes a token that one layer's kept forward saves beyond its input (an estimate for eager code and sdpa, no
        mask).

        With n = `precision_nbytes`: each norm saves its input in FP32 (of the first one, in FP32, that is the block's
        own input), the normalised rows and its output; attention its rotated q and k, v, its output and the FP32
        logsumexp; the MLP gate, its activation, up and their product. Qwen3's norms of q and k add their inputs in FP32
        and normalised rows.
        """
        n, q, kv = precision_nbytes, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        norms = self.hidden_size * (4 * (1 if n == 4 else 2) + 4 * n) + 8
        attention = n * (2 * q + 2 * kv) + 4 * self.n_heads
        mlp = 4 * n * self.intermediate_size
        qk_norms = (4 + n) * (q + kv) + 4 * (self.n_heads + self.n_kv_heads) if self.architecture == "qwen3" else 0
        return norms + attention + mlp + qk_norms

    def hidden_nbytes(self, tokens: int, precision_nbytes: int) -> int:
        """Bytes of the hidden state (a block's input, or its gradient) of `tokens` tokens."""
        return tokens * self.hidden_size * precision_nbytes


def check_sequence(model: ModelSpec, seq_len: int) -> None:
    """Raises ValueError for a sequence the templates do not compute exactly: one longer than a sliding window.

    Within the window a sliding layer is a causal layer. Longer than `max_position_embeddings` is allowed, as in the
    library.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len: must be >= 1, got {seq_len}")
    if model.sliding_window is not None and seq_len > model.sliding_window:
        raise ValueError(f"seq_len: must be <= sliding_window {model.sliding_window} of {model.name!r}, got {seq_len}")


def align(elements: int) -> int:
    """`elements` rounded up to a multiple of `ALIGN_ELEMENTS`."""
    return -(-elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
