"""What a measured run is given: random weights and random tokens."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatrain.model import ModelSpec
from megatrain.recipe import Recipe
from papers.h200.models import Device

_PIECE = 1 << 24
"""Elements that are drawn at a time, so that they take little of the device's memory."""


class RandomWeights(Mapping[str, Tensor]):
    """Weights by name, on the host, made when asked for: 0.02 x normal in BF16, drawn on the device; norms are 1, in FP32. A
    matrix holds until the next one is asked for: fresh memory for each would take longer than to make it. The name is the seed.
    """

    def __init__(self, model: ModelSpec, device: Device) -> None:
        self._shapes = {p.name: p.shape for block in model.blocks for p in block.params}
        self._device = device
        self._made = torch.empty(max(map(math.prod, self._shapes.values())), dtype=torch.bfloat16)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if "norm" in name:
            return torch.ones(shape)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        made = self._made[: math.prod(shape)]
        for piece in made.split(_PIECE):
            piece.copy_((torch.randn(piece.numel(), generator=generator, device=self._device) * 0.02).bfloat16())
        return made.view(shape)

    def __contains__(self, name: object) -> bool:  # a mapping's own would make the tensor
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def batches(model: ModelSpec, recipe: Recipe, count: int) -> list[dict[str, Tensor]]:
    """`count` batches of distinct random tokens, `input_ids` of shape (sequences of a step, tokens of a sequence), on the host.
    A longer list begins with the shorter."""
    generator = torch.Generator().manual_seed(7)
    shape = (recipe.micro_batches * recipe.micro_batch_size, recipe.seq_len)
    return [{"input_ids": torch.randint(0, model.vocab_size, shape, generator=generator)} for _ in range(count)]
