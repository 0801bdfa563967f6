"""A whole model step from the templates alone, in the plainest order: the reference for what an engine must do with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.layers.embedding import embedding_backward, embedding_forward
from megatrain.layers.gradients import accumulate
from megatrain.layers.head import head_template
from megatrain.layers.inputs import DTYPES, layer_inputs, make_inputs, n_valid
from megatrain.layers.template import layer_templates
from megatrain.model import ModelSpec
from megatrain.recipe import Recipe
from tests.layers.small import filled_slot, slot_views

EMBEDDING = "model.embed_tokens.weight"


def assembled_step(
    model: ModelSpec,
    recipe: Recipe,
    weights: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    recompute: bool = False,
) -> tuple[float, dict[str, Tensor]]:
    """(loss, FP32 gradients by name) of one step, micro-batch by micro-batch."""
    dtype, head = DTYPES[recipe.precision], head_template(model)
    slots = [filled_slot(block, weights, dtype) for block in model.blocks]
    views = [slot_views(slot, block, dtype) for slot, block in zip(slots, model.blocks, strict=True)]
    accs = {p.name: torch.full(p.shape, float("nan")) for block in model.blocks for p in block.params}
    templates = layer_templates(model, attention=recipe.attention)
    matrix, matrix_acc = (views[0][0], accs[EMBEDDING]) if model.tied else (views[-1][1], accs["lm_head.weight"])
    valid, total = n_valid(batch), 0.0

    for m, tensors in enumerate(make_inputs(model, recipe, batch)):
        first, inputs = m == 0, layer_inputs(tensors)
        x = embedding_forward(views[0][0], tensors["ids"])
        kept = []
        for template, layer_views in zip(templates, views[1:-1], strict=True):
            y, saved = template.forward(layer_views, x, inputs)
            kept.append((x, saved))
            x = y
        loss, dx = head.loss_forward_backward(
            (views[-1][0], matrix),
            x,
            tensors["targets"],
            valid,
            recipe.loss_tile,
            (accs["model.norm.weight"], matrix_acc),
            first,
        )
        again = head.loss_only((views[-1][0], matrix), x, tensors["targets"], valid, recipe.loss_tile)
        assert torch.equal(loss, again), "evaluation's loss has other bits"
        total += float(loss)
        for block, template, layer_views in reversed(list(zip(model.layers, templates, views[1:-1], strict=True))):
            x, saved = kept.pop()
            if recompute:
                _, saved = template.forward(layer_views, x, inputs)
            dx, grads = template.backward(layer_views, saved, dx)
            for spec, grad in zip(block.params, grads, strict=True):
                accumulate(accs[spec.name], grad, first)
        embedding_backward(
            tensors["ids"], dx, accs[EMBEDDING], first=first and not model.tied, padding_idx=model.padding_idx
        )
    return total, accs
