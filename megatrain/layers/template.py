"""Stateless layer templates: a decoder layer as two functions of explicit weights.

A template is Hugging Face's own decoder-layer class, built once on the meta device (it owns no weight), for each
*structure*: the config fields that reach a layer. Two layers share a template exactly when those fields, and so their
parameter shapes and every attribute that changes their forward, are equal.

    y, saved = template.forward(weights, x, inputs)
    dx, grads = template.backward(weights, saved, dy)

`weights` are tensors in the order of `BlockSpec.params`, usually views into a slot; binding them copies nothing and
`saved` refers to none (see `saved.py`), so the backward may be given other memory that holds the same values. Keep,
recompute and the first forward are one code path with gradients enabled; recomputing drops `saved` and calls `saved_by`,
the same forward but for its last product (see `last_product.py`). Eager or compiled, the shapes are static: `x`
[micro_batch_size, seq_len, hidden_size].
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call

from megatrain.layers.gradients import gradients
from megatrain.layers.hf import CLASSES, hf_config
from megatrain.layers.inputs import LayerInputs
from megatrain.layers.last_product import leave_out_last_product, omitted
from megatrain.layers.saved import Rebinding, Saved, bind_weights, weight_free
from megatrain.model import ModelSpec

# Config fields that no decoder layer reads: rotary tables are inputs, the rest belongs to the embedding and the head.
_OUTSIDE_LAYERS = (
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",
    "num_hidden_layers",
    "pad_token_id",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTemplate:
    """One structure's forward and backward. `names` and `shapes` are its parameters within the layer, in order."""

    structure: str
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    call: Callable[..., Tensor]
    lock: threading.Lock

    def forward(self, weights: Sequence[Tensor], x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Saved]:
        """The layer's output, shaped as `x`, and what its backward needs.

        `x` and `inputs` must hold the same values until then. Raises ValueError if the weights are not the structure's.
        """
        y, saved = self._run(weights, x, inputs)
        return y.detach(), saved

    def saved_by(self, weights: Sequence[Tensor], x: Tensor, inputs: LayerInputs) -> Saved:
        """What `forward` saves, with the same bits, without its output."""
        with omitted():
            return self._run(weights, x, inputs)[1]

    def _run(self, weights: Sequence[Tensor], x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Saved]:
        self._check(weights)
        rebinding = Rebinding()
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            bound, anchors = bind_weights(weights)
            with self.lock, weight_free(weights, rebinding):
                y = self.call(leaf, inputs.cos, inputs.sin, inputs.mask, *bound)
        return y, Saved(output=get_gradient_edge(y), x=leaf, anchors=anchors, rebinding=rebinding)

    def backward(self, weights: Sequence[Tensor], saved: Saved, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(dx, weight gradients in parameter order) of the forward that gave `saved`. It can run once.

        `weights` must hold the values that forward read, wherever they lie now; gradients have their dtype.
        """
        self._check(weights)
        saved.rebinding.weights = weights
        try:
            dx, *grads = gradients(saved.output, (saved.x, *saved.anchors), dy)
        finally:
            saved.rebinding.weights = None
        return dx, grads

    def _check(self, weights: Sequence[Tensor]) -> None:
        got = tuple(w.shape for w in weights)
        if got != self.shapes:
            wrong = [
                f"{n}: {tuple(s)} expected, got {tuple(g)}"
                for n, s, g in zip(self.names, self.shapes, got, strict=False)
                if s != g
            ]
            raise ValueError(f"layer weights: {'; '.join(wrong) or f'{len(self.shapes)} expected, got {len(got)}'}")


def layer_templates(model: ModelSpec, *, attention: str = "sdpa", compiled: bool = False) -> tuple[LayerTemplate, ...]:
    """A template for each decoder layer; layers of equal structure get the same object.

    `attention` is "sdpa" or "eager". `compiled` runs them through torch.compile with static shapes as one graph; a graph break
    or reaching the recompile limit is an error, not a silent fall back to eager code. A structure is built, and compiled, once
    a process; while a template's forward runs, its module holds that call's weights, so threads take turns at it.
    """
    found = tuple(_build(layer_structure(model, layer), attention, compiled) for layer in range(model.n_layers))
    for template, block in zip(found, model.layers, strict=True):
        assert [tuple(s) for s in template.shapes] == [p.shape for p in block.params], (template.shapes, block.params)
    return found


def layer_structure(model: ModelSpec, layer: int) -> str:
    """All that a layer's forward depends on besides weights and inputs: the config fields a layer reads, as JSON.

    The template is built from this string alone, so what is not in it cannot differ between layers that share one.
    """
    if not 0 <= layer < model.n_layers:
        raise ValueError(f"layer: must be in 0..{model.n_layers - 1} of {model.name!r}, got {layer}")
    config = {key: value for key, value in json.loads(model.config_json).items() if key not in _OUTSIDE_LAYERS}
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=64)
def _build(structure: str, attention: str, compiled: bool) -> LayerTemplate:
    # One layer; what its index selects (a layer's type) is the same for all layers of a model that ModelSpec accepts.
    config = hf_config(json.loads(structure) | {"num_hidden_layers": 1, "max_window_layers": 0}, attention)
    with torch.device("meta"):
        module = CLASSES[config.model_type].layer(config, 0).eval()
        leave_out_last_product(module)
    names = tuple(module.state_dict())
    shapes = tuple(p.shape for p in module.state_dict().values())

    def call(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, *weights: Tensor) -> Tensor:
        arguments = {"attention_mask": mask, "position_embeddings": (cos, sin)}
        y: Tensor = functional_call(module, dict(zip(names, weights, strict=True)), (x,), arguments)
        return y

    run: Callable[..., Tensor] = call
    if compiled:
        # torch counts recompilations by code object: with one each, structures do not use up one another's limit.
        own = FunctionType(call.__code__.replace(), call.__globals__, "layer", None, call.__closure__)
        run = torch.compile(own, fullgraph=True, dynamic=False)
    return LayerTemplate(structure=structure, names=names, shapes=shapes, call=run, lock=threading.Lock())
